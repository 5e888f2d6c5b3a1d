"""W <- (1 - lr wd) W - lr s sign(M U) U^T in block-diagonal bases (Dobb), for many weights at once.

Blocks of up to 128 columns take one launch: a program has rows of a whole block, so that its signs never
leave registers. Wider ones take two: the first writes sign(M U), whose -1, 0 and 1 are exact in bf16; the
second multiplies it by U^T and updates the weights where the product lies in registers. Per element: M read,
W read and written, and of wider blocks signs written and read.

The width is known when a kernel is compiled: the columns of a block begin at multiples of it, and only a
known one tells the compiler how many bytes it may load at once.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titanforge.kernels._triton import (
    INTERPRET,
    LAUNCH_OPTIONS,
    cdiv,
    jit,
    next_power_of_2,
    runs_triton,
    tl,
)
from titanforge.kernels.pointers import address_table, element_type

WHOLE_BLOCK = 128 if not INTERPRET else 32
"""Widest block that one program holds."""


@jit
def _tile_of(w: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
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
    table_ptr, sign_ptr, m, n, w: tl.constexpr,
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
    table_ptr, sign_ptr, h_ptr, scale, m, n, w: tl.constexpr,
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
        inside = (rows < m)[:, None] & (columns < w)[None, :]
        places = rows.to(tl.int64)[:, None] * n + (block * w + columns)[None, :]
        lr, decay = tl.load(h_ptr + 1), tl.load(h_ptr + 2)
        old = tl.load(w_ptr + places, inside, other=0.0)  # arrives while the products run
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, w, BLOCK_K):
            steps = start + tl.arange(0, BLOCK_K)
            sign_inside = (rows < m)[:, None] & (steps < w)[None, :]
            sign = tl.load(sign_rows + steps[None, :], sign_inside, other=0.0)
            u_inside = (columns < w)[:, None] & (steps < w)[None, :]
            u = tl.load(u_ptr + columns[:, None] * w + steps[None, :], u_inside, other=0.0)
            total = _dot(sign, tl.trans(u), total, TO_FP32)
        old = old.to(tl.float32)
        moved = (old - (lr * decay) * old) - lr * (scale * total)
        tl.store(w_ptr + places, moved.to(W_TYPE), inside)
        if COPY:
            tl.store(copy_ptr + places, moved.to(COPY_TYPE), inside)


@jit(unspecialized=("scale",))
def sign_update_kernel(
    table_ptr, h_ptr, scale, m, n, w: tl.constexpr,
    M_TYPE: tl.constexpr, M_SPLIT: tl.constexpr, W_TYPE: tl.constexpr, COPY_TYPE: tl.constexpr,
    COPY: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
    TO_FP32: tl.constexpr,
):  # fmt: skip
    """The whole of it for blocks w <= WIDTH. A program reads U once for TILES tiles of rows. Grid: these,
    blocks, weights.
    """
    if tl.load(h_ptr) != 0:
        block, weight = tl.program_id(1), tl.program_id(2).to(tl.int64)
        m_ptr = tl.load(table_ptr + 4 * weight).to(tl.pointer_type(M_TYPE))
        u_ptr = tl.load(table_ptr + 4 * weight + 1).to(tl.pointer_type(tl.bfloat16))
        w_ptr = tl.load(table_ptr + 4 * weight + 2).to(tl.pointer_type(W_TYPE))
        copy_ptr = tl.load(table_ptr + 4 * weight + 3).to(tl.pointer_type(COPY_TYPE))
        if ALIGNED:
            m_ptr = tl.multiple_of(m_ptr, 16)
            u_ptr = tl.multiple_of(u_ptr, 16)
            w_ptr = tl.multiple_of(w_ptr, 16)
            copy_ptr = tl.multiple_of(copy_ptr, 16)
        columns, steps = tl.arange(0, WIDTH), tl.arange(0, WIDTH)
        u_inside = (steps < w)[:, None] & (columns < w)[None, :]
        u_places = block.to(tl.int64) * w * w + steps[:, None] * w + columns[None, :]
        u = tl.load(u_ptr + u_places, u_inside, other=0.0)
        lr, decay = tl.load(h_ptr + 1), tl.load(h_ptr + 2)
        first = tl.program_id(0) * ROWS * TILES
        for start in range(first, tl.minimum(first + ROWS * TILES, m), ROWS):
            rows = start + tl.arange(0, ROWS)
            inside = (rows < m)[:, None] & (columns < w)[None, :]
            places = rows.to(tl.int64)[:, None] * n + (block * w + columns)[None, :]
            value = tl.load(m_ptr + places, inside, other=0.0)
            old = tl.load(w_ptr + places, inside, other=0.0)  # arrives while the products run
            high = value.to(tl.bfloat16)
            total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
            if M_SPLIT:
                low = (value - high.to(tl.float32)).to(tl.bfloat16)
                total = _dot(low, u, total, TO_FP32)
            total = _dot(high, u, total, TO_FP32)
            sign = tl.where(total > 0, 1.0, tl.where(total < 0, -1.0, 0.0)).to(tl.bfloat16)
            total = _dot(sign, tl.trans(u), tl.zeros((ROWS, WIDTH), dtype=tl.float32), TO_FP32)
            old = old.to(tl.float32)
            moved = (old - (lr * decay) * old) - lr * (scale * total)
            tl.store(w_ptr + places, moved.to(W_TYPE), inside)
            if COPY:
                tl.store(copy_ptr + places, moved.to(COPY_TYPE), inside)


@dataclass(frozen=True)
class SignConfig:
    """Launches of `SignUpdates`. For blocks up to `WHOLE_BLOCK`: rows of a tile, tiles of a program, warps,
    stages, and the most registers of a thread (None: what the compiler takes; 128 lets two programs of eight
    warps share a multiprocessor). wide_*: for wider blocks, of the second launch's threads likewise.
    """

    rows: int = 64
    tiles: int = 4
    warps: int = 8
    stages: int = 2
    registers: int | None = None
    wide_warps: int = 8
    wide_stages: int = 3
    wide_registers: int | None = None


class SignUpdates:
    """Updates of weights of one shape, whose tensors do not move: what a launch needs is found once.

    momenta: contiguous [m, n], fp32, bf16 or fp16. bases: contiguous bf16 [..., B, w, w], B w = n. weights,
    copies: as `apply_updates` takes them.
    """

    def __init__(
        self,
        momenta: Sequence[Tensor],
        bases: Sequence[Tensor],
        weights: Sequence[Tensor],
        copies: Sequence[Tensor | None],
        config: SignConfig | None = None,
    ) -> None:
        self._config = config or SignConfig()
        self._tensors = momenta, bases, weights, copies
        copy = copies[0]
        self._table = address_table(list(zip(momenta, bases, weights, copies)), weights[0].device)
        present = [*momenta, *bases, *weights, *(one for one in copies if one is not None)]
        own_type = weights[0].dtype
        self._aligned = all(tensor.data_ptr() % 16 == 0 for tensor in present)
        self._written = {
            "W_TYPE": element_type(own_type), "COPY": copy is not None,
            "COPY_TYPE": element_type(own_type if copy is None else copy.dtype),
        }  # fmt: skip
        self._read = {
            "M_TYPE": element_type(momenta[0].dtype), "M_SPLIT": momenta[0].dtype != torch.bfloat16
        }  # fmt: skip

    def __call__(self, hyper: Tensor, scale: float) -> None:
        """In place; nothing changes where hyper[0] is 0. scale: s / sqrt(m) of the rule."""
        _, bases, weights, _ = self._tensors
        (m, n), w, count, table = weights[0].shape, bases[0].shape[-1], len(weights), self._table
        options: dict[str, Any] = {"ALIGNED": self._aligned, "TO_FP32": INTERPRET, **LAUNCH_OPTIONS}
        config = self._config
        if w <= WHOLE_BLOCK:
            rows, tiles = (16, 2) if INTERPRET else (config.rows, config.tiles)
            sign_update_kernel[(cdiv(m, rows * tiles), n // w, count)](
                table, hyper, scale, m, n, w,
                ROWS=rows, TILES=tiles, WIDTH=max(16, next_power_of_2(w)), num_warps=config.warps,
                num_stages=config.stages, **_most(config.registers), **self._read, **self._written, **options,
            )  # fmt: skip
            return
        rows, columns, block_k = (32, 16, 16) if INTERPRET else (128, 128, 64)
        options |= {
            "ROWS": rows, "COLUMNS": columns, "BLOCK_K": block_k, "num_warps": config.wide_warps,
            "num_stages": config.wide_stages,
        }  # fmt: skip
        grid = (cdiv(m, rows) * cdiv(w, columns), n // w, count)
        signs = torch.empty(count, m, n, dtype=torch.bfloat16, device=weights[0].device)
        sign_coefficients_kernel[grid](table, signs, m, n, w, **self._read, **options)
        rebuild_update_kernel[grid](
            table, signs, hyper, scale, m, n, w, **_most(config.wide_registers), **self._written, **options
        )


def _most(registers: int | None) -> dict[str, Any]:
    return {} if registers is None or INTERPRET else {"maxnreg": registers}


def sign_updates(
    momenta: Sequence[Tensor],
    bases: Sequence[Tensor],
    weights: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    hyper: Tensor,
    scale: float,
) -> None:
    """One call of `SignUpdates`, on any device."""
    if runs_triton(weights[0]):
        SignUpdates(momenta, bases, weights, copies)(hyper, scale)
    else:
        reference_sign_updates(momenta, bases, weights, copies, hyper, scale)


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
