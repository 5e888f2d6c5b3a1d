"""What a memory budget lets the compiler form again beside what torch would."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.partitioners as partitioners
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

logger = logging.getLogger(__name__)


class RecomputingConcatenations(CustomPartitionerFn):
    """inductor's own partitioner, with ``cat`` among what is cheap to form again.

    Torch leaves ``cat`` out, and a rotary embedding ends in one: of queries and keys that are normalised
    (Qwen3), whose norms' backward needs them as they came from their product, a block would keep the rotated
    ones too. Where the rotated ones are all that backward needs, they stay what is kept.
    """

    def __call__(
        self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        with _recomputable_cat():
            return partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> bytes:
        """Of the cache of compiled graphs."""
        return get_hash_for_files((__file__,))


@contextmanager
def _recomputable_cat() -> Iterator[None]:
    original = getattr(partitioners, "get_default_op_list", None)
    if original is None:
        logger.warning(
            'activation_checkpoint.mode = "memory_budget" keeps normalised queries and keys twice: the '
            f"partitioner of torch {torch.__version__} has other parts than those known here"
        )
        yield
        return

    def with_cat() -> Any:
        types = original()
        types.recomputable_ops.add(torch.ops.aten.cat)
        return types

    partitioners.get_default_op_list = with_cat
    try:
        yield
    finally:
        partitioners.get_default_op_list = original
