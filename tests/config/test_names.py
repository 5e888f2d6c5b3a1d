"""Names that the configuration lists are those of the layers that it does not import."""

from __future__ import annotations

from titanforge.checkpoint import manager
from titanforge.config.checkpoints import CHECKPOINT_PARTS
from titanforge.config.datasets import DATASETS
from titanforge.config.ranks import COORDINATE_RULES
from titanforge.config.rules import FOLDING_RULES, MATRIX_RULES, RULE_KEYS
from titanforge.config.updates import TORCH_OPTIM_RULES
from titanforge.config.validation import FORGE_KERNELS
from titanforge.data import sources
from titanforge.kernels.forms import AUTO, FORMS
from titanforge.optim.baseline import BASELINE_RULES
from titanforge.optim.registry import NESTEROV_RULES, RULES, build_rule
from titanforge.optim.split import splits


def test_rule_table_is_that_of_the_rules():
    class Recorder(dict):
        """Hyperparameters that remember which of them were read."""

        def __init__(self, values):
            super().__init__(values)
            self.read = set()

        def __getitem__(self, key):
            self.read.add(key)
            return super().__getitem__(key)

    assert set(RULE_KEYS) == set(RULES), "titanforge/config/rules.py lists other rules than titanforge/optim"
    values = {"lr": 1.0, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "momentum": 0.9}
    for name, keys in RULE_KEYS.items():
        rule = build_rule(name, momentum=0.9)
        options = Recorder(values)
        rule.hyperparameters(options, 3)
        assert options.read - {"lr", "weight_decay"} == keys - {"nesterov"}, name
        assert ("nesterov" in keys) == (name in NESTEROV_RULES), name
        assert (name in MATRIX_RULES) == rule.matrix_only, name
        assert (name in FOLDING_RULES) == splits(rule), name
        if "nesterov" in keys:
            assert not splits(build_rule(name, momentum=0.9, nesterov=True)), name


def test_dataset_names_are_those_of_the_sources():
    assert DATASETS == sources.DATASETS


def test_other_names_are_those_of_their_layers():
    assert CHECKPOINT_PARTS == manager._PARTS
    assert (AUTO, *FORMS) == FORGE_KERNELS
    assert set(TORCH_OPTIM_RULES) == set(BASELINE_RULES)
    assert {name for name in RULES if build_rule(name, momentum=0.9).regime == 1} == COORDINATE_RULES
