"""The plan in words: how many weights and bytes go which way, and why any weight is not fused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from titanforge.forge.coverage import frozen_parameters
from titanforge.forge.plan import Kind, ParamPlan, keeps_logits
from titanforge.forge.projections import Group

GIB = 1024**3


@dataclass(frozen=True)
class PlanLine:
    """One trainable weight."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    plan: ParamPlan
    kind: Kind

    @property
    def numel(self) -> int:
        """Number of weights."""
        return torch.Size(self.shape).numel()


def unkept_logits(lines: Sequence[PlanLine]) -> str:
    """Why `forge.keep_logits = true` does nothing; empty if it does something."""
    if any(keeps_logits(line.kind, line.plan) for line in lines):
        return ""
    heads = [line.plan for line in lines if line.kind in ("head", "tied")]
    if any(decided.by_hook for decided in heads):
        why = "ranks share the head"
    elif any(decided.join == "stash" for decided in heads):
        why = "the head joins micro-batches by their tokens"
    else:
        why = "no head is fused"
    return f"forge.keep_logits = true has no effect: {why}"


def merged_projections(groups: Sequence[Group]) -> str:
    """Which linears `forge.merge_projections` multiplies together, if any."""
    if not groups:
        return ""
    kinds = sorted({"+".join(group.attributes) for group in groups})
    return f"  {len(groups)} groups of linears of one input ({', '.join(kinds)}) are multiplied as one"


def switches_report(lines: Sequence[PlanLine], groups: Sequence[Group], *, keep_logits: bool) -> list[str]:
    """What the `[forge]` switches that are on do to this plan; dry runs say so too.

    groups: of `groups_of_linears`; none where `merge_projections` is off.
    """
    told = [merged_projections(groups)]
    told += [unkept_logits(lines)] if keep_logits else []
    return [line for line in told if line]


def plan_report(lines: Sequence[PlanLine], model: nn.Module) -> str:
    """A few lines of text: the fused share, then one line per granule and reason, the largest first."""
    total = sum(line.numel for line in lines)
    fused = sum(line.numel for line in lines if line.plan.fused)
    share = 100.0 * fused / max(total, 1)
    ranks = any(line.plan.by_hook for line in lines)
    fate = "have a gradient for a bucket's or a shard's time" if ranks else "never have a gradient in memory"
    text = [f"forge: {share:.1f} % of {total:,} trainable parameters {fate}"]
    grouped: dict[tuple[str, str, str], list[PlanLine]] = defaultdict(list)
    for line in lines:
        after = "; U after backward" if line.plan.by_hook else "; U follows with its block"
        after = after if line.plan.deferred and "U follows" not in line.plan.why else ""
        grouped[line.plan.granule.value, line.plan.join, line.plan.why + after].append(line)
    for (granule, _, why), members in sorted(
        grouped.items(), key=lambda item: -sum(m.numel for m in item[1])
    ):
        numel = sum(member.numel for member in members)
        size = sum(member.numel * member.dtype.itemsize for member in members) / GIB
        where = "ordinary" if not members[0].plan.fused else granule
        text.append(
            f"  {where:<12}{len(members):>5} weights {numel:>16,} parameters {size:>9.3f} GiB  {why}"
            + _named(members, members[0].plan.fused)
        )
    frozen = frozen_parameters(model)
    if frozen:
        numel = sum(param.numel() for param in frozen.values())
        text.append(f"  {'frozen':<12}{len(frozen):>5} weights {numel:>16,} parameters: nothing updates them")
    return "\n".join(text)


def _named(members: Sequence[PlanLine], fused: bool) -> str:
    """The names, where one would want to know which."""
    if fused:
        return ""
    names = ", ".join(member.name for member in members[:3])
    return f" ({names}{f' and {len(members) - 3} more' if len(members) > 3 else ''})"
