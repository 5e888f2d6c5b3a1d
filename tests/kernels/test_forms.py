"""The forms of the weight-gradient kernel: choosing one, refusing what cannot run, what fits in shared
memory.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from titanforge.kernels import config as tiles
from titanforge.kernels import forms
from titanforge.kernels.config import _COOPERATIVE, _PINGPONG, TileConfig, choose_config
from titanforge.kernels.epilogues import get_epilogue
from titanforge.kernels.forms import AUTO, COOPERATIVE, FORMS, PINGPONG, PORTABLE, select_form
from titanforge.kernels.gluon import launch
from titanforge.kernels.gluon._gluon import HAS_GLUON, missing
from titanforge.kernels.step import Target, make_target
from titanforge.kernels.wgrad import config_for

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def unselected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(forms, "_said", set())
    monkeypatch.setattr(forms, "checked_forms", lambda device: ())
    yield
    select_form(AUTO, CPU)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a Hopper card, where only the choice is made and nothing is launched."""
    monkeypatch.setattr(forms, "unavailable", lambda device: "")
    monkeypatch.setattr(launch, "unavailable", lambda device: "")
    monkeypatch.setattr(forms, "untried", lambda form, device: "")


def target(n: int, k: int, weight: torch.dtype = torch.bfloat16) -> Target:
    tensors = [torch.zeros(n, k, dtype=weight) for _ in range(3)]
    return make_target(get_epilogue("adamw"), tensors[0], tensors[1:])


def operands(
    tokens: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(tokens, n, dtype=dtype), torch.zeros(tokens, k, dtype=dtype)


def test_a_form_that_cannot_run_here_is_refused_by_the_key_that_asks_for_it() -> None:
    for name in (PINGPONG, COOPERATIVE):
        with pytest.raises(
            ValueError, match=f"forge.kernel = '{name}' cannot run here: .*Hopper.* auto or portable"
        ):
            select_form(name, CPU)
    with pytest.raises(ValueError, match=r"forge.kernel = 'fast' is not one of auto, portable, pp2, coop"):
        select_form("fast", CPU)
    assert forms.selected_form() == AUTO
    select_form(PORTABLE, CPU)
    assert forms.form_for(512, CUDA) == PORTABLE


def test_auto_takes_a_form_by_the_number_of_tokens(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "HAS_TRITON", True)
    assert [forms.form_for(tokens, CUDA) for tokens in (1, 2048, 2049)] == [PINGPONG, PINGPONG, COOPERATIVE]
    assert forms.form_for(512, CPU) == PORTABLE


def test_another_gpu_keeps_the_portable_form_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forms, "HAS_TRITON", True)
    monkeypatch.setattr(forms, "unavailable", lambda device: "this is a card of another kind")
    with caplog.at_level(logging.WARNING, logger="titanforge.kernels.forms"):
        assert [forms.form_for(512, CUDA) for _ in range(3)] == [PORTABLE] * 3
    (said,) = [record.message for record in caplog.records]
    assert "portable form" in said
    assert "(this is a card of another kind)" in said


def test_auto_leaves_the_hopper_forms_alone_with_a_triton_that_they_were_not_tried_with(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forms, "unavailable", lambda device: "")
    for releases, form in ((("3.6",), PINGPONG), ((), PORTABLE)):
        monkeypatch.setattr(forms, "AUTO_TRITON", releases)
        monkeypatch.setattr(forms, "triton", SimpleNamespace(__version__="3.6.0"))
        monkeypatch.setattr(forms, "HAS_TRITON", True)
        with caplog.at_level(logging.WARNING, logger="titanforge.kernels.forms"):
            assert forms.form_for(512, CUDA) == form
    (said,) = [record.message for record in caplog.records]
    assert "not tried with Triton 3.6: `python -m titanforge.kernels.check_forms` checks it" in said
    caplog.clear()
    monkeypatch.setattr(forms, "triton", SimpleNamespace(__version__="3.9.0"))
    for _ in range(2):
        assert forms.form_for(512, CUDA) == PORTABLE
    (said,) = [record.message for record in caplog.records]
    assert "compiles but has not run on a GPU with Triton 3.9: `python -m titanforge" in said


def on_a_card_with(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    """As if on a Hopper card with a release of Triton, where only the choice is made."""
    for module in (forms, tiles):
        monkeypatch.setattr(module, "unavailable", lambda device: "")
    monkeypatch.setattr(forms, "triton", SimpleNamespace(__version__=release))
    monkeypatch.setattr(forms, "HAS_TRITON", True)
    monkeypatch.setattr(tiles, "INTERPRET", False)
    monkeypatch.setattr(tiles, "device_name", lambda device: "card")


@pytest.mark.parametrize(("release", "ran"), [("3.6.0", True), ("3.9.0", False), ("3.10.0", False)])
def test_what_was_tuned_with_another_triton_is_taken_where_it_ran(
    monkeypatch: pytest.MonkeyPatch, release: str, ran: bool
) -> None:
    on_a_card_with(monkeypatch, release)
    codecs = "bf16-bf16-bf16"
    key = tiles.shape_key("card", 4096, 4096, 512, torch.bfloat16, codecs)
    found = tiles.replace(_PINGPONG, group=4)
    monkeypatch.setattr(tiles, "_tuned", lambda: {key: found})

    def chosen() -> TileConfig:
        return choose_config(4096, 4096, 512, torch.bfloat16, codecs, CUDA)

    def tried() -> set[str]:
        return {config.form for config in tiles.candidate_configs(torch.bfloat16, CUDA)}

    assert (chosen() == found) == ran
    assert (chosen().form == PORTABLE) != ran
    assert tried() == (set(FORMS) if ran else {PORTABLE})
    select_form(PINGPONG, CUDA)
    assert chosen() == found
    assert tried() == set(FORMS)


def test_a_form_that_fails_with_a_triton_that_it_has_not_run_with_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = RuntimeError("at line 3: ")
    error.__cause__ = AttributeError("shared_memory_descriptor has no attribute 'reinterpret'")
    on_a_card_with(monkeypatch, "3.6.0")
    forms.explain(PINGPONG, error)
    for release, known in (("3.9", "it compiles but has not run on a GPU"), ("3.10", "it was not tried")):
        on_a_card_with(monkeypatch, f"{release}.0")
        said = f"forge.kernel = 'pp2' cannot run here: {known} with Triton {release}, and there it fails"
        with pytest.raises(
            RuntimeError, match=rf"{said} \(AttributeError: .*'reinterpret'\); set it to auto"
        ):
            forms.explain(PINGPONG, error)


def test_a_gluon_that_lacks_a_name_is_refused_with_it() -> None:
    assert missing({"a": 1, "b": 2}) == ""
    assert "has no tma.async_load, barrier that" in missing({"tma.async_load": None, "m": 0, "barrier": None})


def test_what_a_form_does_not_take(hopper: None) -> None:
    dy, x = operands(64, 256, 512)
    assert launch.refusal(dy, x, target(256, 512), _PINGPONG) == ""
    assert launch.refusal(dy, x, target(256, 512), _COOPERATIVE) == ""
    assert launch.refusal(dy, x, target(256, 512), _PINGPONG, bias=True) == "a bias gradient"
    assert "only observes" in launch.refusal(dy, x, target(256, 512), _PINGPONG, observe=True)
    for n, k, config in ((200, 512, _PINGPONG), (256, 320, _PINGPONG), (256, 384, _COOPERATIVE)):
        reason = launch.refusal(*operands(64, n, k), target(n, k), config)
        assert reason.startswith(f"{n} x {k} is not whole tiles of {config.block_n} x {config.block_k}")
    assert launch.refusal(*operands(0, 256, 512), target(256, 512), _PINGPONG) == "no tokens"
    experts = [torch.zeros(3, 256, 512, dtype=torch.bfloat16) for _ in range(3)]
    grouped = make_target(get_epilogue("adamw"), experts[0], experts[1:])
    assert launch.refusal(dy, x, grouped, _PINGPONG) == ""
    assert launch.refusal(dy, x, grouped, _COOPERATIVE) == "experts"
    assert "float32" in launch.refusal(*operands(64, 256, 512, torch.float32), target(256, 512), _PINGPONG)
    turned = torch.zeros(256, 64, dtype=torch.bfloat16).t()
    assert "contiguous" in launch.refusal(turned, x, target(256, 512), _PINGPONG)
    shifted = torch.zeros(64 * 257, dtype=torch.bfloat16)[1:].as_strided((64, 256), (256, 1))
    assert "aligned" in launch.refusal(shifted, x, target(256, 512), _PINGPONG)


def test_a_launch_that_does_not_fit_falls_back_and_says_so(
    hopper: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    select_form(COOPERATIVE, CPU)
    with caplog.at_level(logging.WARNING, logger="titanforge.kernels.forms"):
        assert config_for(*operands(64, 256, 512), target(256, 512)).form == COOPERATIVE
        assert not caplog.records
        for _ in range(2):
            assert config_for(*operands(64, 250, 512), target(250, 512)).form == PORTABLE
    assert len(caplog.records) == 1
    assert config_for(*operands(64, 256, 512)).form == PORTABLE  # only stores a gradient
    select_form("auto", CPU)
    monkeypatch.setattr(tiles, "form_for", lambda tokens, device: PINGPONG)
    caplog.clear()
    for tokens in (64, 64, 0):
        assert config_for(*operands(tokens, 250, 512), target(250, 512)).form == PORTABLE
    assert [record.getMessage().count("250 x 512") for record in caplog.records] == [1]


def test_configurations_keep_their_form() -> None:
    for config in (_PINGPONG, _COOPERATIVE, TileConfig(64, 128, 64, prefetch=True)):
        assert TileConfig.unpacked(config.packed()) == config
    assert choose_config(4096, 14336, 512, torch.bfloat16, "", CPU, form=PINGPONG).group == 8
    assert choose_config(14336, 4096, 512, torch.bfloat16, "", CPU, form=PINGPONG).group == 1
    with pytest.raises(ValueError, match="each with its own tile"):
        TileConfig(64, 128, 64, form=PINGPONG)


@pytest.mark.parametrize("part_bytes", [2, 4, 6, 10, 14])
def test_rings_fit_in_shared_memory(part_bytes: int) -> None:
    slot_bytes, stage_bytes = part_bytes * 64 * 64, 2 * 64 * (128 + 128)
    stages, slots = launch.pingpong_memory(4, slot_bytes, stage_bytes)
    assert stages >= 3
    assert slots >= 2
    assert stages * stage_bytes + slots * slot_bytes < launch.SHARED_BYTES
    assert launch.cooperative_chunks(4, 2 * 32 * (128 + 256)) == 4
    assert launch.cooperative_chunks(3, 2 * 64 * (128 + 256)) == 2


@pytest.mark.skipif(not HAS_GLUON, reason="needs Triton with Gluon")
def test_a_cached_tensor_map_does_not_keep_its_tensor() -> None:
    tensor = torch.zeros(128, 256, dtype=torch.bfloat16)
    alive = weakref.ref(tensor)
    found = launch.descriptor(tensor, (64, 64))
    assert launch.descriptor(tensor, (64, 64)) is found
    assert found.base.data_ptr() == tensor.data_ptr()
    del tensor
    gc.collect()
    assert alive() is None
