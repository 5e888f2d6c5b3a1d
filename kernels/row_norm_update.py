"""W <- (1 - lr wd) W - lr s M / |M|, row by row (RMNP), of many weights in one launch."""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from titanforge.kernels._triton import LAUNCH_OPTIONS, jit, next_power_of_2, tl
from titanforge.kernels.pointers import address_table, element_type

_CHUNK = 2048


@jit(unspecialized=("scale",))
def row_norm_update_kernel(
    table_ptr, h_ptr, scale, n,
    M_TYPE: tl.constexpr, W_TYPE: tl.constexpr, COPY_TYPE: tl.constexpr, COPY: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row of one weight; its momentum is read twice, from cache the second time. table: int64
    [weights, 3], addresses of momentum, weight and its rounded copy. h: (apply, lr, weight_decay, ...).
    Grid: rows, weights.
    """
    if tl.load(h_ptr) != 0:
        entry = table_ptr + 3 * tl.program_id(1)
        m_ptr = tl.load(entry).to(tl.pointer_type(M_TYPE))
        w_ptr = tl.load(entry + 1).to(tl.pointer_type(W_TYPE))
        copy_ptr = tl.load(entry + 2).to(tl.pointer_type(COPY_TYPE))
        if ALIGNED:
            m_ptr = tl.multiple_of(m_ptr, 16)
            w_ptr = tl.multiple_of(w_ptr, 16)
            copy_ptr = tl.multiple_of(copy_ptr, 16)
        row = tl.program_id(0).to(tl.int64) * n
        squares = tl.zeros((CHUNK,), dtype=tl.float32)
        for start in range(0, n, CHUNK):
            index = start + tl.arange(0, CHUNK)
            m = tl.load(m_ptr + row + index, mask=index < n, other=0.0).to(tl.float32)
            squares += m * m
        norm = tl.sqrt(tl.sum(squares, axis=0))
        good = norm > 0
        divisor = tl.where(good, norm, 1.0)
        lr, decay = tl.load(h_ptr + 1), tl.load(h_ptr + 2)
        for start in range(0, n, CHUNK):
            index = start + tl.arange(0, CHUNK)
            inside = index < n
            m = tl.load(m_ptr + row + index, mask=inside, other=0.0).to(tl.float32)
            w = tl.load(w_ptr + row + index, mask=inside, other=0.0).to(tl.float32)
            moved = (w - (lr * decay) * w) - lr * (scale * tl.where(good, m / divisor, 0.0))
            tl.store(w_ptr + row + index, moved.to(W_TYPE), mask=inside)
            if COPY:
                tl.store(copy_ptr + row + index, moved.to(COPY_TYPE), mask=inside)


class RowNormUpdates:
    """Updates of weights [m, n] of one shape, whose tensors do not move: what a launch needs is found once.

    momenta: contiguous, of one of fp32, bf16 and fp16. weights, copies: as `apply_updates` takes them. On a
    GPU or interpreted. A row of zeros makes no step but the decay.
    """

    def __init__(
        self, momenta: Sequence[Tensor], weights: Sequence[Tensor], copies: Sequence[Tensor | None]
    ) -> None:
        self._tensors = momenta, weights, copies
        copy, own_type = copies[0], weights[0].dtype
        self._table = address_table(list(zip(momenta, weights, copies)), weights[0].device)
        present = [*momenta, *weights, *(one for one in copies if one is not None)]
        self._options = {
            "ALIGNED": all(tensor.data_ptr() % 16 == 0 for tensor in present),
            "M_TYPE": element_type(momenta[0].dtype),
            "W_TYPE": element_type(own_type),
            "COPY_TYPE": element_type(own_type if copy is None else copy.dtype),
            "COPY": copy is not None,
            "CHUNK": min(_CHUNK, next_power_of_2(weights[0].shape[1])),
        }

    def __call__(self, hyper: Tensor, scale: float) -> None:
        """In place; nothing changes where hyper[0] is 0."""
        weights = self._tensors[1]
        rows, columns = weights[0].shape
        row_norm_update_kernel[(rows, len(weights))](
            self._table, hyper, scale, columns, num_warps=4, **self._options, **LAUNCH_OPTIONS
        )
