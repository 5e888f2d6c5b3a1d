"""Embedding rows: the gradient of a row is summed in registers over its tokens and consumed there.

A dense gradient [V, D] never exists. Every row takes its step, also one that no token names: its gradient is
zero, which decays its states as an ordinary optimizer would.
"""

# Slices of a tile are Python slices to Triton's compiler and `constexpr` to a type checker.
# pyright: reportArgumentType=false
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titanforge.kernels._triton import LAUNCH_OPTIONS, cdiv, jit, next_power_of_2, runs_triton, tl
from titanforge.kernels.codecs import CODECS, Encoded
from titanforge.kernels.epilogues import Epilogue, get_epilogue
from titanforge.kernels.step import Target, check_hyper, kernel_parts, make_target, reference_update
from titanforge.kernels.tiles import count_nonfinite, update_tile

_WIDEST = 1024
_COLUMNS_OF_A_WARP = 512
"""So a row of 1024 has two warps: 2 to 6 % less time than with four, on an H200."""
_TOKENS_AT_ONCE = 4


@jit(unspecialized=("tensor_id",))
def embedding_kernel(
    dy_ptr, order_ptr, bounds_ptr, gradient_ptr, norm_ptr, nonfinite_ptr,
    w_ptr, w_meta_ptr, master_ptr, s0_ptr, s0_meta_ptr, s1_ptr, s1_meta_ptr, h_ptr, rng_ptr, tensor_id,
    D, dy_stride_t,
    EPILOGUE: tl.constexpr, SLOTS: tl.constexpr, WEIGHT: tl.constexpr, MASTER: tl.constexpr,
    W_CODEC: tl.constexpr, S0_CODEC: tl.constexpr, S1_CODEC: tl.constexpr, STOCHASTIC: tl.constexpr,
    STORE_GRADIENT: tl.constexpr, NORM: tl.constexpr, COUNT: tl.constexpr, OBSERVE: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """BLOCK_D columns of one row.

    dy: [T, D] with unit stride along D. order: int64 [T], token indices sorted by id, ties in token order.
    bounds: int64 [V + 1], where each row's tokens begin in `order`. Grid: (V, D / BLOCK_D).
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_D
    column = first + tl.arange(0, BLOCK_D)[None, :]
    inside = column < D
    begin = tl.load(bounds_ptr + row)
    end = tl.load(bounds_ptr + row + 1)
    t = tl.arange(0, BLOCK_T)
    g = tl.zeros((1, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_T):
        taken = start + t < end
        token = tl.load(order_ptr + start + t, mask=taken, other=0)
        mask = taken[:, None]
        if MASKED:
            mask = mask & inside
        dy = tl.load(dy_ptr + token[:, None] * dy_stride_t + column, mask=mask, other=0.0)
        g += tl.sum(dy.to(tl.float32), axis=0)[None, :]
    if NORM:
        tl.store(
            norm_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.sum(tl.sum(g * g, axis=1), axis=0)
        )
    base = row * D + first
    off = tl.arange(0, BLOCK_D)[None, :]
    if STORE_GRADIENT:
        tl.store(gradient_ptr + base + off, g, mask=inside)
    else:
        bad = count_nonfinite(g)
        if COUNT and not OBSERVE:
            tl.atomic_add(nonfinite_ptr, bad, mask=(bad > 0) & (tl.load(h_ptr) != 0))
        blocks = tl.cdiv(D, 64)
        block = tl.arange(0, BLOCK_D // 64)[None, :]
        update_tile(
            g, 1 - bad, base, off, inside, row * blocks + first // 64, block, first // 64 + block < blocks,
            tl.full([1, 1], row, tl.int64), first // 8 + tl.arange(0, BLOCK_D // 8)[None, :],
            w_ptr, w_meta_ptr, master_ptr, s0_ptr, s0_meta_ptr, s1_ptr, s1_meta_ptr, h_ptr, rng_ptr,
            tensor_id,
            EPILOGUE, SLOTS, WEIGHT, MASTER, W_CODEC, S0_CODEC, S1_CODEC, STOCHASTIC, MASKED, OBSERVE,
        )  # fmt: skip


def sort_tokens(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(order [T], bounds [rows + 1]) of token ids [...], int64: ids outside 0..rows - 1 belong to no row.

    Stable, so that each row sums its tokens in one fixed order. Without a host read.
    """
    sorted_ids, order = torch.sort(ids.reshape(-1).to(torch.int64), stable=True)
    bounds = torch.searchsorted(sorted_ids, torch.arange(rows + 1, device=ids.device))
    return order, bounds


def embedding_gradient_reference(dy: Tensor, ids: Tensor, rows: int) -> Tensor:
    """The dense gradient [rows, D] in plain torch, fp32."""
    flat_ids = ids.reshape(-1).to(torch.int64)
    keep = (flat_ids >= 0) & (flat_ids < rows)
    gradient = torch.zeros(rows, dy.shape[-1], dtype=torch.float32, device=dy.device)
    return gradient.index_add_(0, flat_ids[keep], dy.reshape(-1, dy.shape[-1])[keep].to(torch.float32))


def embedding_update(
    dy: Tensor,
    ids: Tensor,
    weight: Tensor | Encoded | None,
    states: Sequence[Tensor | Encoded],
    epilogue: Epilogue | str,
    hyper: Tensor,
    *,
    master: Tensor | None = None,
    rng: Tensor | None = None,
    tensor_id: int = 0,
    norm_partials: Tensor | None = None,
    nonfinite: Tensor | None = None,
    observe: bool = False,
) -> None:
    """Update an embedding weight [V, D] and its states in place.

    dy: [..., D], the gradient at the embedding's output. ids: integers of the leading shape; ids outside the
    rows (of another vocabulary shard) are ignored. norm_partials: fp32 [embedding_tile_count(V, D)]. Other
    arguments as `fused_wgrad_update`; the part skipped for a gradient that is not finite is a row (or 1024
    columns of it).
    """
    epilogue = get_epilogue(epilogue) if isinstance(epilogue, str) else epilogue
    target = make_target(epilogue, weight, states, master=master, tensor_id=tensor_id)
    check_hyper(epilogue, hyper, rng, target.stochastic)
    if len(target.shape) != 2 or dy.shape[-1] != target.shape[1] or dy.shape[:-1] != ids.shape:
        raise ValueError(
            f"an embedding of shape {tuple(target.shape)} takes ids [...] and dy [..., {target.shape[-1]}], "
            f"not {tuple(ids.shape)} and {tuple(dy.shape)}"
        )
    if norm_partials is not None and norm_partials.numel() < embedding_tile_count(*target.shape):
        raise ValueError(f"norm_partials needs {embedding_tile_count(*target.shape)} values")
    weight_part = target.weight
    fields = [(part.values, part.meta) for part in target.states] + [(None, None)] * (2 - len(target.states))
    _update_op(
        dy.flatten(0, -2), ids,
        None if weight_part is None else weight_part.values, None if weight_part is None else
        weight_part.meta,
        target.master, *fields[0], *fields[1], hyper, rng, norm_partials, nonfinite, tensor_id, epilogue.name,
        ",".join(target.codec_names), observe,
    )  # fmt: skip


def _width(columns: int) -> int:
    return min(_WIDEST, max(64, next_power_of_2(columns)))


def embedding_tile_count(rows: int, columns: int) -> int:
    """Length of `norm_partials` for a weight [rows, columns]."""
    return rows * cdiv(columns, _width(columns))


def embedding_gradient(dy: Tensor, ids: Tensor, rows: int) -> Tensor:
    """The dense gradient [rows, D] in fp32, summed in the order of the fused kernel: for comparisons only."""
    dy = dy.flatten(0, -2)
    if not runs_triton(dy):
        return embedding_gradient_reference(dy, ids, rows)
    gradient = torch.empty(rows, dy.shape[1], dtype=torch.float32, device=dy.device)
    _launch(dy, ids, rows, [None] * 7, gradient=gradient)
    return gradient


def _launch(
    dy: Tensor,
    ids: Tensor,
    rows: int,
    parts: Sequence[Tensor | None],
    *,
    gradient: Tensor | None = None,
    epilogue: Epilogue | None = None,
    codecs: Sequence[int] = (0, 0, 0),
    stochastic: bool = False,
    hyper: Tensor | None = None,
    rng: Tensor | None = None,
    tensor_id: int = 0,
    norm: Tensor | None = None,
    nonfinite: Tensor | None = None,
    observe: bool = False,
) -> None:
    columns = dy.shape[1]
    if rows * columns == 0:
        return
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    order, bounds = sort_tokens(ids, rows)
    width = _width(columns)
    embedding_kernel[(rows, cdiv(columns, width))](
        dy, order, bounds, gradient, norm, nonfinite, *parts, hyper, rng, tensor_id, columns, dy.stride(0),
        EPILOGUE=epilogue.jit if epilogue is not None else None,
        SLOTS=len(epilogue.slots) if epilogue is not None else 0,
        WEIGHT=parts[0] is not None, MASTER=parts[2] is not None,
        W_CODEC=codecs[0], S0_CODEC=codecs[1], S1_CODEC=codecs[2], STOCHASTIC=stochastic,
        STORE_GRADIENT=gradient is not None, NORM=norm is not None, COUNT=nonfinite is not None,
        OBSERVE=observe, MASKED=columns % width != 0, BLOCK_D=width, BLOCK_T=_TOKENS_AT_ONCE,
        num_warps=max(1, width // _COLUMNS_OF_A_WARP), **LAUNCH_OPTIONS,
    )  # fmt: skip


@torch.library.custom_op(
    "titanforge::embedding_update",
    mutates_args=(
        "weight", "weight_meta", "master", "s0", "s0_meta", "s1", "s1_meta", "norm_partials", "nonfinite",
    ),
)  # fmt: skip
def _update_op(
    dy: Tensor,
    ids: Tensor,
    weight: Tensor | None,
    weight_meta: Tensor | None,
    master: Tensor | None,
    s0: Tensor | None,
    s0_meta: Tensor | None,
    s1: Tensor | None,
    s1_meta: Tensor | None,
    hyper: Tensor,
    rng: Tensor | None,
    norm_partials: Tensor | None,
    nonfinite: Tensor | None,
    tensor_id: int,
    epilogue: str,
    codecs: str,
    observe: bool,
) -> None:
    rule, names = get_epilogue(epilogue), codecs.split(",")
    states = tuple(
        Encoded(values, CODECS[name], meta)
        for values, name, meta in zip((s0, s1), names[1:], (s0_meta, s1_meta))
        if values is not None
    )
    stored_weight = Encoded(weight, CODECS[names[0]], weight_meta) if weight is not None else None
    shape = next(part.values.shape for part in (stored_weight, *states) if part is not None)
    target = Target(shape, stored_weight, states, master, tensor_id)
    if runs_triton(dy):
        _launch(
            dy, ids, shape[0], kernel_parts(target), epilogue=rule, codecs=[CODECS[name].code for name in
            names],
            stochastic=target.stochastic, hyper=hyper, rng=rng, tensor_id=tensor_id, norm=norm_partials,
            nonfinite=nonfinite, observe=observe,
        )  # fmt: skip
        return
    gradient = embedding_gradient_reference(dy, ids, shape[0])
    if norm_partials is not None:
        norm_partials.zero_()
        norm_partials[0] = gradient.square().sum()
    reference_update(rule, gradient, target, hyper, rng, nonfinite, observe=observe)


@_update_op.register_fake
def _(*_arguments: object) -> None:
    return None
