"""Tensors that lie one below the other in memory, each with a storage of its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.utils.dlpack import from_dlpack


def adjacent_parts(together: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Parts [rows, ...] of a contiguous tensor, in its memory; that goes with the last of them.

    What saves, sends or compares tensors looks at their storages. Slices would have one in common: a pickle
    would hold it once for each, a saved weight would bring its neighbours along, and `safetensors`'
    `save_model` refuses a slice. Not even PyTorch knows of the common memory: it is counted from the outside,
    so CUDA IPC sends but clones of such parts.
    """
    return [from_dlpack(part) for part in together.split(list(rows))]
