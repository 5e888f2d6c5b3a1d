"""What `attach` refuses, and that a model is as it was wherever it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.forge.toy import llama, llama_loss, options_of, same, train, weights
from titanforge.forge import ForgeOptimizer, Granule, ParamPlan, Ranks, Steps, attach
from titanforge.forge.ranks import AXES as RANK_AXES
from titanforge.optim import Recipe, build_groups, build_rule
from titanforge.optim.elementwise import AdamW
from titanforge.parallelisms.mesh import AXES


def surface(model: nn.Module) -> list[Any]:
    """Classes, attributes and hooks of all modules and weights: what attaching changes."""
    found: list[Any] = []
    for name, module in model.named_modules():
        hooks = {key: list(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        own = {key: id(value) for key, value in vars(module).items()}
        found.append((name, type(module), own, hooks))
    for name, param in model.named_parameters():
        found.append((name, list(getattr(param, "_post_accumulate_grad_hooks", None) or ())))
    return found


def test_axes_are_those_of_the_mesh() -> None:
    assert set(RANK_AXES) == {*AXES, "ep"}


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: Steps(micro_batches=0), ValueError, r"micro_batches \(by training\.global_batch_size\) = 0"),
        (lambda: Steps(micro_batches="4"), TypeError, r"Steps\.micro_batches .* an integer, not str '4'"),
        (lambda: Steps(micro_batches=True), TypeError, "an integer, not bool True"),
        (lambda: Steps(tokens=-1), ValueError, r"Steps\.tokens .* = -1: must be 0 or more"),
        (lambda: Steps(tokens=0.5), TypeError, r"Steps\.tokens .* an integer, not float 0\.5"),
        (lambda: Steps(max_norm=float("nan")), ValueError, r"Steps\.max_norm \(training\.max_norm\) = nan"),
        (lambda: Steps(max_norm=float("inf")), ValueError, r"max_norm .* = inf: must be 0 or more, and fin"),
        (lambda: Steps(max_norm=None), TypeError, r"Steps\.max_norm .* a number, not None"),
        (lambda: Steps(accumulation="stsh"), ValueError, r"\(forge\.accumulation\) = 'stsh': .* auto, stash"),
        (lambda: Steps(undo="false"), TypeError, r"Steps\.undo .* True or False, not str 'false'"),
        (lambda: Steps(keep_logits=1), TypeError, r"\(forge\.keep_logits\) must be True or False, not int 1"),
        (lambda: Ranks(2), TypeError, r"Ranks\.mesh must be a mapping .*, not int 2"),
        (lambda: Ranks({"dp": 2}), ValueError, r"an axis of Ranks\.mesh = 'dp': must be one of pp, dp_repl"),
        (lambda: Ranks({"tp": 0}), ValueError, r"Ranks\.mesh\['tp'\] = 0: must be 1 or more"),
        (lambda: Ranks({"tp": 2.0}), TypeError, r"Ranks\.mesh\['tp'\] must be an integer, not float"),
        (lambda: Ranks({}, 3), TypeError, r"Ranks\.sum_over_data must be a function, not int 3"),
        (lambda: Ranks(sum_over=None), TypeError, r"Ranks\.sum_over must be a function, not None"),
        (lambda: Ranks(reduce="state"), ValueError, r"\(sync\.reduce\) = 'state': must be one of gradients"),
    ],
)
def test_steps_and_ranks_check_their_fields(make: Callable[[], Any], error: Any, told: str) -> None:
    with pytest.raises(error, match=told):
        make()


BAD: list[tuple[dict[str, Any], Any, str]] = [
    (
        {"recipe": "bfloat16"},
        TypeError,
        r"recipe must be a Recipe, not str 'bfloat16': pass titanforge\.optim",
    ),
    ({"steps": 4}, TypeError, r"steps must be a Steps, not int 4: pass titanforge\.forge\.Steps\(micro_b"),
    ({"ranks": {"tp": 2}}, TypeError, r"ranks must be a Ranks, not dict: pass titanforge\.forge\.Ranks"),
    ({"ranks": Ranks({"pp": 2})}, ValueError, "2 ranks of the mesh axis pp: .* set it to false"),
    ({"probe": None}, TypeError, "probe must be a function without arguments .*, not None: pass lambda"),
    ({"probe": torch.zeros(2)}, TypeError, "probe must be a function .*, not Tensor"),
    ({"probe": llama_loss}, TypeError, "probe must be a function without arguments"),
    ({"seed": "3"}, TypeError, r"seed \(debug\.seed\) must be an integer, not str '3'"),
    (
        {"seed": -1},
        ValueError,
        r"seed \(debug\.seed\) = -1: must be 0 or more and less than 9223372036854775808",
    ),
    ({"seed": 2**63}, ValueError, "must be 0 or more and less than"),
    (
        {"planner": "auto"},
        TypeError,
        r"planner must be a function like titanforge\.forge\.plan, not str 'auto'",
    ),
    ({"update_in_backward": "no"}, TypeError, "update_in_backward must be True or False, not str 'no'"),
    (
        {"options": [("lr", 1.0)]},
        TypeError,
        r"options must be a mapping such as \{\"lr\": 3e-4\}, not a list",
    ),
    ({"options": {"lr": "3e-4"}}, TypeError, r"options\['lr'\] must be a number, not a str: '3e-4'"),
    ({"options": {"lr": float("inf")}}, ValueError, r"options\['lr'\] must be at least 0 and finite"),
    ({"options": {"lr": -1.0}}, ValueError, r"options\['lr'\] must be at least 0"),
    ({"options": {"weightdecay": 0.1}}, ValueError, "adamw has none; did you mean 'weight_decay'"),
]


@pytest.mark.parametrize(
    "bad", BAD, ids=lambda bad: f"{next(iter(bad[0]))}={next(iter(bad[0].values()))!s:.12}"
)
def test_a_bad_argument_is_named_before_anything_changes(bad: tuple[dict[str, Any], Any, str]) -> None:
    words, error, told = bad
    model = llama()
    probed = []

    def probe() -> Tensor:
        probed.append(1)
        return llama_loss(model, 0)

    before = surface(model)
    with pytest.raises(error, match=told):
        attach(model, AdamW(), **({"probe": probe} | words))
    assert surface(model) == before
    assert not probed


def test_groups_own_each_weight_of_this_model_once() -> None:
    model = llama()

    def refused(groups: Any, told: str) -> None:
        before = surface(model)
        with pytest.raises(ValueError, match=told):
            attach(model, groups, probe=lambda: llama_loss(model, 0))
        assert surface(model) == before

    refused(
        build_groups(llama(), options_of()), "which is no trainable weight of this model: build the groups"
    )
    refused(build_groups(model, options_of()) * 2, "is owned twice: each weight belongs to one group")
    refused(build_groups(model, options_of())[:1], r"no group owns '[\w.]+' \(\d+ in all\), .*: freeze it")
    groups = build_groups(model, options_of())
    del groups[0].options["eps"]
    refused(groups, "options of the group '.*' lack eps")


class Final(nn.LayerNorm):
    """No class can be derived from it, so it cannot be fused: seen only when others have been."""

    def __init_subclass__(cls) -> None:
        raise TypeError("Final is final")


def chain(last: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), last or nn.LayerNorm(8))


def loss_of(model: nn.Module, number: int) -> Tensor:
    device = next(model.parameters()).device
    return (model(torch.full((4, 8), 1.0 + number, device=device).cumsum(0)) - 1).square().mean()


def attached(model: nn.Module, rule: str = "AdamW", **more: Any) -> ForgeOptimizer:
    words = {"probe": lambda: loss_of(model, 0), "options": {"lr": 0.01}}
    return attach(model, build_rule(rule), **(words | more))


LATE: dict[str, tuple[dict[str, Any], str]] = {
    "probe raises": ({"probe": lambda: 1 / 0}, "division by zero"),
    "probe without graph": ({"probe": lambda: torch.ones(())}, "the probe's result does not depend on any"),
    "planner raises": ({"planner": lambda *_: 1 / 0}, "division by zero"),
    "planner": ({"planner": lambda *_: None}, "planner must return a ParamPlan, and returned None for '0.w"),
    "recipe": ({"rule": "Dion", "recipe": Recipe("int8")}, "the weight update of dion writes the momentum"),
}


@pytest.mark.parametrize("rule", ["AdamW", "Dobb"])
@pytest.mark.parametrize("how", LATE)
def test_a_late_failure_leaves_the_model_to_its_former_optimizer(how: str, rule: str) -> None:
    """Fused forwards, Dobb's hooks and all: it trains on with the same bits. Without one it is ordinary."""
    more, told = LATE[how]
    model, twin, plain = chain(), chain(), chain()
    former, undisturbed = attached(model, "Dobb"), attached(twin, "Dobb")
    train(model, former, 0, 1, loss=loss_of)
    for each in (model, plain):
        before = surface(each)
        with pytest.raises((ValueError, TypeError, ZeroDivisionError), match=told):
            attached(each, **({"rule": rule} | more))
        assert surface(each) == before
    train(model, former, 1, 3, loss=loss_of)
    train(twin, undisturbed, 0, 3, loss=loss_of)
    assert same(weights(model), weights(twin))


def test_a_model_without_memory_is_left_as_it_was() -> None:
    model = chain().to("meta")
    before = surface(model)
    with pytest.raises(ValueError, match="after the model has been given memory"):
        attached(model, "Dobb")
    assert surface(model) == before


def test_a_module_that_cannot_be_fused_leaves_the_others_as_they_were() -> None:
    """Also the hooks on weights of a former optimizer to which ranks handed gradients."""
    model = chain(Final(8))
    former = attached(model, ranks=Ranks({"dp_shard": 2}))
    before = surface(model)
    with pytest.raises(TypeError, match="Final is final"):
        attached(model)
    assert surface(model) == before
    train(model, former, 0, 1, loss=loss_of)
    assert model[0].weight.grad is None


def test_weights_move_together_only_when_nothing_can_fail_any_more() -> None:
    """A former optimizer reads them where they were."""
    model, merging = llama(), Steps(merge_projections=True)
    former = attach(model, AdamW(), probe=lambda: llama_loss(model, 0), steps=merging)
    norm, model.norm = model.norm, Final(32)
    model.norm.forward = lambda x: x * model.norm.weight
    before = surface(model), [param.data_ptr() for param in model.parameters()]
    with pytest.raises(TypeError, match="Final is final"):
        attach(model, AdamW(), probe=lambda: llama_loss(model, 0), steps=merging)
    assert (surface(model), [param.data_ptr() for param in model.parameters()]) == before
    model.norm = norm
    train(model, former, 0, 1)


class Full(TorchDispatchMode):
    """A device that has no room for as many bytes at a time."""

    def __init__(self, bytes_at_a_time: int) -> None:
        super().__init__()
        self.limit = bytes_at_a_time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        owns = isinstance(made, Tensor) and made._base is None
        if owns and made.untyped_storage().nbytes() >= self.limit:
            raise torch.OutOfMemoryError("no room")
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_stay_where_they_are_without_room_to_move_the_largest_group(dtype: torch.dtype) -> None:
    """For q, k and v there would be room, and they come first. fp32 states take more of it than bf16 weights.

    The model is small beside its groups, so that all else is there.
    """
    model = llama(dtype, hidden_dim=400)
    before = surface(model), [param.data_ptr() for param in model.parameters()]
    ffn = model.layers["0"].feed_forward
    largest = 4 * sum(linear.weight.numel() for linear in (ffn.w1, ffn.w3))
    with Full(largest), pytest.raises(torch.OutOfMemoryError, match="no room"):
        attach(model, AdamW(), probe=lambda: llama_loss(model, 0))
    assert (surface(model), [param.data_ptr() for param in model.parameters()]) == before
    train(model, attach(model, AdamW(), probe=lambda: llama_loss(model, 0)), 0, 1)


def final(base: type[nn.Module]) -> type[nn.Module]:
    def refuse(cls: type) -> None:
        raise TypeError("no class of it")

    return type("Final", (base,), {"__init_subclass__": classmethod(refuse)})


class Slots(type):
    """Instances of a class derived from one of these are larger, so none becomes one of them."""

    def __new__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> type:
        derived = any(isinstance(base, Slots) for base in bases)
        return super().__new__(cls, name, bases, members | ({"__slots__": ("more",)} if derived else {}))


def slotted(base: type[nn.Module]) -> type[nn.Module]:
    return Slots("Slotted", (base,), {})


@pytest.mark.parametrize("owner", ["attention", "feed_forward"])
@pytest.mark.parametrize("make", [final, slotted])
def test_weights_stay_where_their_owner_cannot_multiply_them_together(
    make: Callable[[type[nn.Module]], type[nn.Module]], owner: str
) -> None:
    """Merging is there unasked, and its failure would come after the first groups have moved."""
    model, twin = llama(), llama()
    module = model.layers["1"].get_submodule(owner)  # the groups of the first block are found before it
    module.__class__ = unwilling = make(type(module))
    before = [param.data_ptr() for param in module.parameters()]
    optimizer = attach(model, AdamW(), probe=lambda: llama_loss(model, 0))
    undisturbed = attach(twin, AdamW(), probe=lambda: llama_loss(twin, 0))
    assert "4 groups of linears" in undisturbed.report() and "3 groups of linears" in optimizer.report()
    assert type(module) is unwilling and [param.data_ptr() for param in module.parameters()] == before
    losses = train(model, optimizer, 0, 2), train(twin, undisturbed, 0, 2)
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_a_module_that_takes_no_attributes_is_fused() -> None:
    class Strict(nn.LayerNorm):
        def __setattr__(self, name: str, value: Any) -> None:
            if name not in ("training", "normalized_shape", "eps", "elementwise_affine", "weight", "bias"):
                raise AttributeError(f"Strict has no {name}")
            super().__setattr__(name, value)

    model = chain(Strict(8))
    optimizer = attached(model)
    assert type(model[2]) is not Strict and all(line.plan.fused for line in optimizer.plan)
    train(model, optimizer, 0, 1, loss=loss_of)
    optimizer.detach()
    assert type(model[2]) is Strict


def test_a_former_optimizer_lets_go_of_weights_that_the_next_one_leaves_in_grad() -> None:
    """Its hook would take their gradients, outside of any step that it knows of."""

    def ordinary(rule: Any, placement: Any, mesh: Any, schedule: Any) -> ParamPlan:
        return ParamPlan(Granule.MODEL, "left to the ordinary engine")

    model, twin = chain(), chain()
    attached(model, ranks=Ranks({"dp_shard": 2}))
    train(model, attached(model, planner=ordinary), 0, 2, loss=loss_of)
    train(twin, attached(twin, planner=ordinary), 0, 2, loss=loss_of)
    assert same(weights(model), weights(twin))
