"""W <- (1 - lr wd) W - lr s sign(M U) U^T in block-diagonal bases (Dobb), for many weights in two launches.

The first writes sign(M U), whose -1, 0 and 1 are exact in bf16; the second multiplies it by U^T and updates
the weights where the product lies in registers. Per element: M read, signs written and read, W read and
written.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from titanforge.kernels._triton import INTERPRET, LAUNCH_OPTIONS, cdiv, jit, runs_triton, tl
from titanforge.kernels.pointers import address_table, element_type


@jit
def _tile_of(w, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's rows and its columns within the block."""
    tiles = tl.cdiv(w, COLUMNS)
    rows = (tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    return rows, columns


@jit
def _dot(a, b, total, TO_FP32: tl.constexpr):
    if TO_FP32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total)


@jit
def sign_coefficients_kernel(
    table_ptr, sign_ptr, m, n, w,
    M_TYPE: tl.constexpr, M_SPLIT: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    """sign [weights, m, n] = sign(M[:, S_b] U_b). Grid: tiles of a block, blocks, weights.

    M_SPLIT: an fp32 M as two bf16 planes, so that the sign is that of the fp32 product but within 2^-16.
    """
    block, weight = tl.program_id(1), tl.program_id(2).to(tl.int64)
    m_ptr = tl.load(table_ptr + 4 * weight).to(tl.pointer_type(M_TYPE))
    u_ptr = tl.load(table_ptr + 4 * weight + 1).to(tl.pointer_type(tl.bfloat16))
    if ALIGNED:
        m_ptr = tl.multiple_of(m_ptr, 16)
        u_ptr = tl.multiple_of(u_ptr, 16)
    m_ptr += block * w
    u_ptr += block.to(tl.int64) * w * w
    rows, columns = _tile_of(w, ROWS, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, w, BLOCK_K):
        steps = start + tl.arange(0, BLOCK_K)
        inside = (rows < m)[:, None] & (steps < w)[None, :]
        value = tl.load(m_ptr + rows.to(tl.int64)[:, None] * n + steps[None, :], inside, other=0.0)
        u_inside = (steps < w)[:, None] & (columns < w)[None, :]
        u = tl.load(u_ptr + steps[:, None] * w + columns[None, :], u_inside, other=0.0)
        high = value.to(tl.bfloat16)
        if M_SPLIT:
            low = (value - high.to(tl.float32)).to(tl.bfloat16)
            total = _dot(low, u, total, TO_FP32)
        total = _dot(high, u, total, TO_FP32)
    sign = tl.where(total > 0, 1.0, tl.where(total < 0, -1.0, 0.0))
    places = sign_ptr + (weight * m + rows)[:, None] * n + (block * w + columns)[None, :]
    tl.store(places, sign.to(tl.bfloat16), mask=(rows < m)[:, None] & (columns < w)[None, :])


@jit(unspecialized=("scale",))
def rebuild_update_kernel(
    table_ptr, sign_ptr, h_ptr, scale, m, n, w,
    W_TYPE: tl.constexpr, COPY_TYPE: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    """The weights' update by scale sign U^T. Grid: tiles of a block, blocks, weights."""
    if tl.load(h_ptr) != 0:
        block, weight = tl.program_id(1), tl.program_id(2).to(tl.int64)
        u_ptr = tl.load(table_ptr + 4 * weight + 1).to(tl.pointer_type(tl.bfloat16))
        w_ptr = tl.load(table_ptr + 4 * weight + 2).to(tl.pointer_type(W_TYPE))
        copy_ptr = tl.load(table_ptr + 4 * weight + 3).to(tl.pointer_type(COPY_TYPE))
        if ALIGNED:
            u_ptr = tl.multiple_of(u_ptr, 16)
            w_ptr = tl.multiple_of(w_ptr, 16)
            copy_ptr = tl.multiple_of(copy_ptr, 16)
        u_ptr += block.to(tl.int64) * w * w
        rows, columns = _tile_of(w, ROWS, COLUMNS)
        sign_rows = sign_ptr + (weight * m + rows)[:, None] * n + block * w
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, w, BLOCK_K):
            steps = start + tl.arange(0, BLOCK_K)
            inside = (rows < m)[:, None] & (steps < w)[None, :]
            sign = tl.load(sign_rows + steps[None, :], inside, other=0.0)
            u_inside = (columns < w)[:, None] & (steps < w)[None, :]
            u = tl.load(u_ptr + columns[:, None] * w + steps[None, :], u_inside, other=0.0)
            total = _dot(sign, tl.trans(u), total, TO_FP32)
        inside = (rows < m)[:, None] & (columns < w)[None, :]
        places = rows.to(tl.int64)[:, None] * n + (block * w + columns)[None, :]
        lr, decay = tl.load(h_ptr + 1), tl.load(h_ptr + 2)
        old = tl.load(w_ptr + places, inside, other=0.0).to(tl.float32)
        moved = (old - (lr * decay) * old) - lr * (scale * total)
        tl.store(w_ptr + places, moved.to(W_TYPE), inside)
        if COPY:
            tl.store(copy_ptr + places, moved.to(COPY_TYPE), inside)


def sign_updates(
    momenta: Sequence[Tensor],
    bases: Sequence[Tensor],
    weights: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    hyper: Tensor,
    scale: float,
) -> None:
    """In place; nothing changes where hyper[0] is 0.

    momenta: contiguous [m, n], fp32, bf16 or fp16. bases: contiguous bf16 [..., B, w, w], B w = n. weights,
    copies: as `apply_updates` takes them. scale: s / sqrt(m) of the rule.
    """
    if not runs_triton(weights[0]):
        reference_sign_updates(momenta, bases, weights, copies, hyper, scale)
        return
    (m, n), w = weights[0].shape, bases[0].shape[-1]
    device, copied = weights[0].device, copies[0] is not None
    copy_type = copies[0].dtype if copies[0] is not None else weights[0].dtype
    signs = torch.empty(len(weights), m, n, dtype=torch.bfloat16, device=device)
    table = address_table(list(zip(momenta, bases, weights, copies)), device)
    tensors = [*momenta, *bases, *weights, *(copy for copy in copies if copy is not None)]
    rows, columns, block_k = (32, 16, 16) if INTERPRET else (128, 128 if w > 64 else 64, 64 if w > 32 else 32)
    grid = (cdiv(m, rows) * cdiv(w, columns), n // w, len(weights))
    options: dict[str, Any] = {
        "ALIGNED": all(tensor.data_ptr() % 16 == 0 for tensor in tensors),
        "ROWS": rows, "COLUMNS": columns, "BLOCK_K": block_k, "TO_FP32": INTERPRET, "num_warps": 8,
        "num_stages": 3, **LAUNCH_OPTIONS,
    }  # fmt: skip
    m_type = momenta[0].dtype
    sign_coefficients_kernel[grid](
        table, signs, m, n, w, M_TYPE=element_type(m_type), M_SPLIT=m_type != torch.bfloat16, **options
    )
    rebuild_update_kernel[grid](
        table, signs, hyper, scale, m, n, w, W_TYPE=element_type(weights[0].dtype),
        COPY_TYPE=element_type(copy_type), COPY=copied, **options,
    )  # fmt: skip


def reference_sign_updates(
    momenta: Sequence[Tensor],
    bases: Sequence[Tensor],
    weights: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    hyper: Tensor,
    scale: float,
) -> None:
    """The same in plain torch."""
    for momentum, basis, weight, copy in zip(momenta, bases, weights, copies):
        u = basis.reshape(-1, *basis.shape[-2:]).float()
        blocks = momentum.float().unflatten(-1, u.shape[:2]).transpose(0, 1)
        update = (torch.sign(blocks @ u) @ u.mT).transpose(0, 1).flatten(-2)
        w = weight.float()
        moved = (w - (hyper[1] * hyper[2]) * w) - hyper[1] * (scale * update)
        moved = torch.where(hyper[0] != 0, moved, w)
        weight.copy_(moved)
        if copy is not None:
            copy.copy_(torch.where(hyper[0] != 0, moved.to(copy.dtype), copy))
