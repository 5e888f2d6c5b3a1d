"""Dobb's update of many weights at once: W <- (1 - lr wd) W - lr s sign(M U) U^T in block-diagonal bases.

Blocks of up to 128 columns, and in another form those of up to 512, take one launch for all weights of a
shape (`block_basis_kernel`), in which the momentum may take the gradient too: per element M and W are read
and written and G is read. Wider ones take two launches, after the momentum's own: the first writes sign(M U),
whose -1, 0 and 1 are exact in bf16; the second multiplies it by U^T and updates the weights where the product
lies in registers.
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
from titanforge.kernels.block_basis_kernel import narrow_step_kernel, product, wide_step_kernel
from titanforge.kernels.planes import dot
from titanforge.kernels.pointers import address_table, element_type, is_capturing

WHOLE_BLOCK = 128 if not INTERPRET else 32
"""Widest block that one tile holds."""
ONE_LAUNCH = 512 if not INTERPRET else 64
"""Widest block whose rows one program takes."""


@jit
def _tile_of(w: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's rows and its columns within the block."""
    tiles = tl.cdiv(w, COLUMNS)
    rows = (tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    return rows, columns


@jit
def sign_coefficients_kernel(
    table_ptr, sign_ptr, m, n, w: tl.constexpr,
    M_TYPE: tl.constexpr, M_SPLIT: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, TO_FP32: tl.constexpr,
):  # fmt: skip
    """sign [weights, m, n] = sign(M[:, S_b] U_b). Grid: tiles of a block, blocks, weights."""
    block, weight = tl.program_id(1), tl.program_id(2).to(tl.int64)
    m_ptr = tl.load(table_ptr + 5 * weight).to(tl.pointer_type(M_TYPE))
    u_ptr = tl.load(table_ptr + 5 * weight + 1).to(tl.pointer_type(tl.bfloat16))
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
        total = product(value, u, total, M_SPLIT, TO_FP32)
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
        u_ptr = tl.load(table_ptr + 5 * weight + 1).to(tl.pointer_type(tl.bfloat16))
        w_ptr = tl.load(table_ptr + 5 * weight + 2).to(tl.pointer_type(W_TYPE))
        copy_ptr = tl.load(table_ptr + 5 * weight + 3).to(tl.pointer_type(COPY_TYPE))
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
            total = dot(sign, tl.trans(u), total, TO_FP32)
        old = old.to(tl.float32)
        moved = (old - (lr * decay) * old) - lr * (scale * total)
        tl.store(w_ptr + places, moved.to(W_TYPE), inside)
        if COPY:
            tl.store(copy_ptr + places, moved.to(COPY_TYPE), inside)


@dataclass(frozen=True)
class SignConfig:
    """Launches of `SignUpdates`: rows of a tile, tiles of a program, warps, stages and the most registers of
    a thread (None: what the compiler takes), for blocks up to `WHOLE_BLOCK`. wide_*: up to `ONE_LAUNCH`, with
    the columns of a product, and programs of a multiprocessor. split_*: of two launches, registers of the
    second; splits: whether blocks up to `ONE_LAUNCH` take two as well.
    """

    rows: int = 64
    tiles: int = 5
    warps: int = 4
    stages: int = 2
    registers: int | None = None
    wide_rows: int = 128
    wide_columns: int = 256
    wide_warps: int = 8
    wide_stages: int = 3
    wide_registers: int | None = None
    wide_programs: int = 1
    splits: bool = False
    split_registers: int | None = None


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
        self._width = bases[0].shape[-1]
        copy, own_type = copies[0], weights[0].dtype
        self._types: dict[str, Any] = {
            "M_TYPE": element_type(momenta[0].dtype), "M_SPLIT": momenta[0].dtype != torch.bfloat16,
            "W_TYPE": element_type(own_type), "COPY": copy is not None,
            "COPY_TYPE": element_type(own_type if copy is None else copy.dtype),
        }  # fmt: skip
        self._plain = self._table([None] * len(weights))
        self._last: tuple[list[int], tuple[Tensor, bool]] | None = None
        self._captured: list[Tensor] = []

    @property
    def takes_gradients(self) -> bool:
        """Whether the launch can bring the momenta up to date as well."""
        return self._width <= (WHOLE_BLOCK if self._config.splits else ONE_LAUNCH)

    def __call__(
        self,
        hyper: Tensor,
        scale: float,
        gradients: Sequence[Tensor] | None = None,
        nonfinite: Tensor | None = None,
    ) -> None:
        """In place; nothing changes where hyper[0] is 0. scale: s / sqrt(m) of the rule.

        gradients: contiguous, of one dtype; then the momenta become mu M + gain G first (hyper as of
        `momentum_state`), but where a gradient is not finite, and nonfinite, int32 [1], counts the programs
        that have met such. Only where `takes_gradients`.
        """
        table, aligned = self._plain if gradients is None else self._with(gradients)
        types = {
            **self._types, "ALIGNED": aligned, "GRADIENT": gradients is not None,
            "G_TYPE": element_type(torch.bfloat16 if gradients is None else gradients[0].dtype),
            "TO_FP32": INTERPRET, **LAUNCH_OPTIONS,
        }  # fmt: skip
        counter = table if nonfinite is None else nonfinite  # not read without gradients
        if self._width <= WHOLE_BLOCK:
            self._narrow(table, hyper, counter, scale, types)
        elif self.takes_gradients:
            self._wide(table, hyper, counter, scale, types)
        else:
            self._split(table, hyper, scale, types)

    def _table(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, bool]:
        momenta, bases, weights, copies = self._tensors
        rows = list(zip(momenta, bases, weights, copies, gradients, strict=True))
        aligned = all(one.data_ptr() % 16 == 0 for row in rows for one in row if one is not None)
        return address_table(rows, weights[0].device), aligned

    def _with(self, gradients: Sequence[Tensor]) -> tuple[Tensor, bool]:
        addresses = [gradient.data_ptr() for gradient in gradients]
        if self._last is None or self._last[0] != addresses:
            self._last = addresses, self._table(gradients)
        found = self._last[1]
        if is_capturing(found[0].device):
            self._captured.append(found[0])  # replays read it, whatever addresses come later
        return found

    def _narrow(self, table: Tensor, hyper: Tensor, counter: Tensor, scale: float, types: Any) -> None:
        (m, n), w, config = self._tensors[2][0].shape, self._width, self._config
        rows, tiles = (16, 2) if INTERPRET else (config.rows, config.tiles)
        warps = 8 if types["M_SPLIT"] else config.warps  # fp32 momenta take a thread's registers
        width = max(16, next_power_of_2(w))
        narrow_step_kernel[(cdiv(m, rows * tiles), n // w, len(table))](
            table, hyper, counter, scale, m, n, w,
            MASK_ROWS=m % rows != 0, ROWS=rows, TILES=tiles, WIDTH=width,
            KEPT=min(rows, _rows_at_once(w, width, warps)), num_warps=warps,
            num_stages=config.stages, **_most(config.registers), **types,
        )  # fmt: skip

    def _wide(self, table: Tensor, hyper: Tensor, counter: Tensor, scale: float, types: Any) -> None:
        weight, w, config = self._tensors[2][0], self._width, self._config
        (m, n), device = weight.shape, weight.device
        rows, columns, block_k, chunk = 32, 32, 16, 16
        if not INTERPRET:
            rows, block_k, chunk = config.wide_rows, 64, 32 if types["M_SPLIT"] else 64
            columns = min(128 if types["M_SPLIT"] else config.wide_columns, next_power_of_2(w))
        tiles = cdiv(m, rows) * (n // w) * len(table)
        programs = min(tiles, _at_once(device) * config.wide_programs)
        signs = torch.empty(programs, rows, cdiv(w, block_k) * block_k, dtype=torch.bfloat16, device=device)
        wide_step_kernel[(programs,)](
            table, signs, hyper, counter, scale, m, n, len(table), w,
            MASK_ROWS=m % rows != 0, ROWS=rows, COLUMNS=columns, BLOCK_K=block_k, CHUNK=chunk,
            KEPT=min(rows, _rows_at_once(w, chunk, config.wide_warps)), num_warps=config.wide_warps,
            num_stages=config.wide_stages, **_most(config.wide_registers), **types,
        )  # fmt: skip

    def _split(self, table: Tensor, hyper: Tensor, scale: float, types: Any) -> None:
        weight, w, config = self._tensors[2][0], self._width, self._config
        m, n = weight.shape
        rows, columns, block_k = (32, 16, 16) if INTERPRET else (128, 128, 64)
        read = {key: types[key] for key in ("M_TYPE", "M_SPLIT")}
        written = {key: types[key] for key in ("W_TYPE", "COPY_TYPE", "COPY")}
        options: dict[str, Any] = {
            "ALIGNED": types["ALIGNED"], "TO_FP32": INTERPRET, "ROWS": rows, "COLUMNS": columns,
            "BLOCK_K": block_k, "num_warps": 8, "num_stages": 3, **LAUNCH_OPTIONS,
        }  # fmt: skip
        grid = (cdiv(m, rows) * cdiv(w, columns), n // w, len(table))
        signs = torch.empty(len(table), m, n, dtype=torch.bfloat16, device=weight.device)
        sign_coefficients_kernel[grid](table, signs, m, n, w, **read, **options)
        rebuild_update_kernel[grid](
            table, signs, hyper, scale, m, n, w, **_most(config.split_registers), **written, **options
        )


def _rows_at_once(w: int, columns: int, warps: int) -> int:
    """Rows of a tile that its threads read at a time: bf16 in 16 bytes a thread, or as their place allows."""
    return max(1, warps * 32 * (8 if w % 8 == 0 else 4) // columns)


def _at_once(device: torch.device) -> int:
    """Programs that a device runs side by side, one a multiprocessor."""
    return 3 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


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
