"""Capturing second moments in hooks, and refreshing bases from them every T steps (Dobb, appendix B)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titanforge.optim.dobb.refresh import refresh_bases
from titanforge.optim.dobb.rule import Dobb
from titanforge.optim.param_groups import ParamGroupSpec, clean_name

_BATCH_BYTES = 256 * 2**20
"""Largest stack of blocks refreshed at once, fp32."""
_TOTAL, _COUNT, _HOOKED = "_second_moment", "_positions", "_second_moment_hook"


@torch.library.custom_op("titanforge::add_second_moment", mutates_args=("total", "count"))
def add_second_moment(total: Tensor, count: Tensor, x: Tensor) -> None:
    """total [B, w, w] += the block second moments of x [..., B w], count += its positions.

    Products are formed in x's dtype. Within backward it does nothing: activation checkpointing computes a
    forward again there, whose inputs were counted before.
    """
    if torch._C._current_graph_task_id() == -1:
        accumulate(total, count, x)


@add_second_moment.register_fake
def _(total: Tensor, count: Tensor, x: Tensor) -> None:
    return None


def accumulate(total: Tensor, count: Tensor, x: Tensor) -> None:
    """What `add_second_moment` does, wherever it is called."""
    blocks = x.reshape(-1, total.shape[0], total.shape[1]).transpose(0, 1)  # [B, N, w]
    if blocks.dtype == total.dtype:
        total.baddbmm_(blocks.mT, blocks)
    else:
        total += torch.bmm(blocks.mT, blocks)
    count += blocks.shape[1]


def _capture_input(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    total = getattr(module, _TOTAL)
    if total is not None and module.training:
        add_second_moment(total, getattr(module, _COUNT), inputs[0].detach())


def _capture_output_gradient(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    total, count = getattr(module, _TOTAL), getattr(module, _COUNT)
    if total is None or not module.training or not output.requires_grad:
        return
    if torch._C._current_graph_task_id() == -1:
        output.register_hook(lambda gradient: accumulate(total, count, gradient))


@dataclass
class Captured:
    """One weight: the linear that reads it, and its states [*, B, w, w] where the optimizer keeps them."""

    name: str
    module: nn.Module
    statistic: Tensor
    basis: Tensor


class DobbCapture:
    """The hooks of all weights under Dobb, and their refreshes.

    A step is `begin_step`, forwards and backwards with `before_backward` between the two, and `refresh`
    before weights are updated. Steps t = 0, T, 2T, ... capture; in all others, and outside training, hooks do
    nothing.

    steps: int64 scalar on the CPU, steps begun so far; saved with the states. failed_blocks: int64 scalar on
    the device, factorisations so far that failed, whose blocks kept their basis. all_reduce: sums a tensor in
    place over the ranks that see other data; None for one rank.
    """

    def __init__(self, rule: Dobb, weights: Sequence[Captured]) -> None:
        self.rule = rule
        self.options = rule.dobb
        self.weights = list(weights)
        self.steps = torch.zeros((), dtype=torch.int64)
        device = self.weights[0].basis.device
        self.failed_blocks = torch.zeros((), dtype=torch.int64, device=device)
        self.all_reduce: Callable[[Tensor], object] | None = None
        self._begun = 0
        self._micro_batches = self._captured_micro_batches = 1
        self._refreshing = False

    def begin_step(self, num_micro_batches: int) -> None:
        """A step of so many micro-batches starts."""
        self._refreshing = self._begun % self.options.period == 0
        self._cold = self._begun == 0
        self._begun += 1
        self.steps.fill_(self._begun)
        self._micro_batches = num_micro_batches
        self._captured_micro_batches = 1 if self.options.capture == "first" else num_micro_batches
        self._stop()
        self._moments: list[tuple[Tensor, Tensor]] = []
        if not self._refreshing:
            return
        for weight in self.weights:
            # Of all the matrices that the weight is made of.
            width, device = weight.basis.shape[-1], weight.basis.device
            count = weight.basis.numel() // (width * width)
            setattr(weight.module, _TOTAL, torch.zeros(count, width, width, device=device))
            setattr(weight.module, _COUNT, torch.zeros((), device=device))
        self._moments = [
            (getattr(weight.module, _TOTAL), getattr(weight.module, _COUNT)) for weight in self.weights
        ]

    def before_backward(self, micro_batch_index: int) -> None:
        """Before a backward: ends the capture of inputs after the last forward that counts, that of output
        gradients (whose hooks are set in the forward) likewise.
        """
        if micro_batch_index + 1 >= self._captured_micro_batches:
            self._stop()

    def _stop(self) -> None:
        for weight in self.weights:
            setattr(weight.module, _TOTAL, None)
            setattr(weight.module, _COUNT, None)

    def loaded(self) -> None:
        """The states, `steps` among them, were set from outside."""
        self._begun = int(self.steps)

    @torch.no_grad()
    def refresh(self, applies: Tensor) -> None:
        """C <- beta_C C + S and the bases from it, if this step captured; before its weight updates.

        applies: scalar on the device; where 0, states keep their bits (the capture of that step is lost).
        """
        if not self._refreshing:
            return
        self._refreshing = False
        self._stop()
        moments, self._moments = self._moments, []
        self._reduce(moments)
        by_width: dict[int, list[tuple[Captured, Tensor]]] = defaultdict(list)
        for weight, (total, count) in zip(self.weights, moments):
            # No position at all leaves the statistic as it is.
            mean = total / count.clamp_min(1.0)
            if self.options.side == "G":
                # Losses were divided by the tokens of the whole step; the paper's g_i were not.
                mean = mean * (count * (self._micro_batches / self._captured_micro_batches)) ** 2
            old = weight.statistic.float()
            mean = mean.view(old.shape)
            new = torch.where(count > 0, self.options.decay * old + mean, old)
            by_width[weight.basis.shape[-1]].append((weight, new))
        for group in by_width.values():
            size = max(1, _BATCH_BYTES // (4 * group[0][0].basis.numel()))
            for start in range(0, len(group), size):
                self._refresh_batch(group[start : start + size], applies)

    def _reduce(self, moments: Sequence[tuple[Tensor, Tensor]]) -> None:
        if self.all_reduce is None:
            return
        flat = torch.cat([part.reshape(-1) for pair in moments for part in pair])
        self.all_reduce(flat)
        parts = [part for pair in moments for part in pair]
        for part, summed in zip(parts, flat.split([part.numel() for part in parts])):
            part.copy_(summed.view(part.shape))

    def _refresh_batch(self, group: Sequence[tuple[Captured, Tensor]], applies: Tensor) -> None:
        """Blocks of one width, whatever weights they belong to."""
        width = group[0][0].basis.shape[-1]
        bases = torch.cat([weight.basis.reshape(-1, width, width) for weight, _ in group])
        statistics = torch.cat([new.reshape(-1, width, width) for _, new in group])
        stored = statistics.to(group[0][0].statistic.dtype)
        fresh, failed = refresh_bases(stored, bases, self.options, self._cold)
        fresh = torch.where(applies != 0, fresh, bases)
        self.failed_blocks += torch.where(applies != 0, failed, 0)
        counts = [weight.basis.numel() // (width * width) for weight, _ in group]
        for (weight, new), basis in zip(group, fresh.split(counts)):
            weight.basis.copy_(basis.view(weight.basis.shape))
            old = weight.statistic
            sound = torch.isfinite(new).all(dim=(-2, -1), keepdim=True) & (applies != 0)
            old.copy_(torch.where(sound, new.to(old.dtype), old))


def install_hooks(model: nn.Module, groups: Sequence[ParamGroupSpec]) -> dict[str, nn.Module]:
    """Put Dobb's hooks, idle as yet, on the linears that read weights under Dobb; before anything is compiled
    or run. Returns these by weight name.

    Raises ValueError for a weight that no `nn.Linear` owns.
    """
    owners: dict[str, nn.Module] = {}
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            owners[clean_name(f"{module_name}.weight".lstrip("."))] = module
    found: dict[str, nn.Module] = {}
    for group in groups:
        if not isinstance(group.rule, Dobb):
            continue
        hook = _capture_input if group.rule.dobb.side == "A" else _capture_output_gradient
        for name, param in zip(group.names, group.params):
            if name not in owners:
                raise ValueError(
                    f'optimizer.name = "dobb" captures what a linear layer reads, and {name!r} '
                    f"{tuple(param.shape)} belongs to none (expert stacks are not supported): take another "
                    "optimizer.name"
                )
            module = owners[name]
            found[name] = module
            if module.__dict__.get(_HOOKED) is hook:
                continue  # by an earlier optimizer of this model
            setattr(module, _HOOKED, hook)
            setattr(module, _TOTAL, None)
            setattr(module, _COUNT, None)
            module.register_forward_hook(hook)
    return found


def build_capture(
    groups: Sequence[ParamGroupSpec],
    modules: Mapping[str, nn.Module],
    states: Mapping[str, Mapping[str, Tensor]],
) -> DobbCapture | None:
    """The capture of an optimizer's weights under Dobb, or None without such.

    states: by weight name, with `statistic` and `basis`.
    """
    rules = [group.rule for group in groups if isinstance(group.rule, Dobb)]
    if not rules:
        return None
    weights = [
        Captured(name, module, states[name]["statistic"], states[name]["basis"])
        for name, module in modules.items()
    ]
    return DobbCapture(rules[0], weights)
