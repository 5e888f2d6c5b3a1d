"""What replicas that average states will send of momenta, for printing: factors, or each momentum whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titanforge.config import JobConfig
from titanforge.layout import experts_in_rows
from titanforge.optim import factor_values
from titanforge.optim.param_groups import ParamGroupSpec
from titanforge.parallelisms import ParallelDims, expert_shard_dim


def averages_states(config: JobConfig, dims: ParallelDims) -> bool:
    """Whether replicas average states in place of gradients."""
    sync = config.sync
    return dims.dp_replicate > 1 and (sync.policy != "every_step" or sync.reduce == "states")


def averaged_factors(
    config: JobConfig, dims: ParallelDims, args: Any, groups: Sequence[ParamGroupSpec]
) -> int:
    """Values of the factors that replicas average at a sync in place of momenta: of weights that are whole
    within a replica, or of experts alone, of which each of its ranks holds whole ones.

    args: of the model. groups: of the whole model or of a pipeline stage, whose factors are counted.
    """
    shards, experts = dims.degree("dp_shard_cp"), getattr(args, "n_experts", 0)
    if not (averages_states(config, dims) and config.sync.low_rank):
        return 0
    if shards == dims.tp == 1:
        return factor_values(groups)
    in_rows = (
        experts_in_rows(dims, experts) if dims.ep > 1 else expert_shard_dim(max(experts, 1), shards) == 1
    )
    return factor_values(groups, experts_alone=True) if experts and not in_rows else 0


def replica_lines(
    config: JobConfig, dims: ParallelDims, args: Any, groups: Sequence[ParamGroupSpec], here: str = ""
) -> list[str]:
    """How the momenta that have factors cross replicas; nothing where none has, or `sync.low_rank` is off.

    Arguments as of `averaged_factors`. here: what `groups` are, where they are not the whole model.
    """
    if not (averages_states(config, dims) and config.sync.low_rank):
        return []
    sent = averaged_factors(config, dims, args, groups)
    lines = []
    if sent:
        code = config.sync.exchange_dtype
        lines.append(f"replicas average {sent:,} values of factors{here} at a sync, sent as {code}")
    if spared := factor_values(groups) - sent:
        which = "the other momenta" if sent else "momenta"
        lines.append(
            f"replicas average {which} densely, not by {spared:,} values of factors{here}: sync.low_rank "
            f"needs weights that are whole within a replica, and {dims.degrees_of('replica')} cuts them"
        )
    return lines
