"""One launch over many tensors: the epilogues of the fused kernel, on gradients that lie in memory.

Every tensor is cut into blocks of 64 columns of its matrix view, and a program takes `BLOCKS` consecutive
blocks of one tensor. Pointers and sizes stand in a table on the device, kept as long as they stay the same.

While a CUDA graph is captured nothing of this becomes part of it: a table that is new then is uploaded at
once, on a stream of its own, so that replays read device memory alone and no host memory has to outlive them.
"""

# Compile-time constants of Triton are Python numbers to its compiler and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportRedeclaration=false
from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titanforge.kernels._triton import (
    HAS_TRITON,
    LAUNCH_OPTIONS,
    cdiv,
    constant,
    jit,
    runs_triton,
    tl,
)
from titanforge.kernels.codecs import BLOCK, CODECS, Encoded, matrix_view
from titanforge.kernels.epilogues import Epilogue, get_epilogue
from titanforge.kernels.pointers import is_capturing, upload
from titanforge.kernels.squares import SquareSums, state_tile_squares
from titanforge.kernels.step import Target, check_hyper, make_target, reference_update
from titanforge.kernels.tiles import count_nonfinite, update_tile

BLOCKS = 32
"""Blocks of 64 columns per program."""
_FIELDS = 13
FIELDS = constant(_FIELDS)
_CACHED_TABLES = 1024
_CACHED_CHUNK_LISTS = 16  # 32 MB each for 8 billion weights


@jit
def flat_kernel(
    table_ptr, chunk_ptr, h_ptr, rng_ptr, nonfinite_ptr, squares_ptr, hyper_length,
    EPILOGUE: tl.constexpr, SLOTS: tl.constexpr, WEIGHT: tl.constexpr, MASTER: tl.constexpr,
    W_CODEC: tl.constexpr, S0_CODEC: tl.constexpr, S1_CODEC: tl.constexpr, STOCHASTIC: tl.constexpr,
    G_TYPE: tl.constexpr, W_TYPE: tl.constexpr, S0_TYPE: tl.constexpr, S1_TYPE: tl.constexpr,
    COUNT: tl.constexpr, OBSERVE: tl.constexpr, SQUARES: tl.constexpr,
    BLOCKS: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor.

    table: int64 [tensors, 13]: addresses of gradient, weight, its scales, master, first state, its scales,
    second state, its scales; columns, blocks per row, blocks in all, tensor id, row of `h`. chunk: int32
    [programs, 2]: tensor, first block / BLOCKS. ALIGNED: addresses and columns are multiples of 16. MASKED:
    not every chunk is full. SQUARES: the sum of squares of the new state goes into fp32 `squares` [programs].
    """
    program = tl.program_id(0)
    entry = table_ptr + tl.load(chunk_ptr + 2 * program).to(tl.int64) * FIELDS
    first_block = tl.load(chunk_ptr + 2 * program + 1).to(tl.int64) * BLOCKS
    g_ptr = tl.load(entry).to(tl.pointer_type(G_TYPE))
    w_ptr = tl.load(entry + 1).to(tl.pointer_type(W_TYPE))
    w_meta_ptr = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    master_ptr = tl.load(entry + 3).to(tl.pointer_type(tl.float32))
    s0_ptr = tl.load(entry + 4).to(tl.pointer_type(S0_TYPE))
    s0_meta_ptr = tl.load(entry + 5).to(tl.pointer_type(tl.float32))
    s1_ptr = tl.load(entry + 6).to(tl.pointer_type(S1_TYPE))
    s1_meta_ptr = tl.load(entry + 7).to(tl.pointer_type(tl.float32))
    columns = tl.load(entry + 8)
    row_blocks = tl.load(entry + 9)
    blocks = tl.load(entry + 10)
    tensor_id = tl.load(entry + 11)
    h_ptr += tl.load(entry + 12) * hyper_length
    if ALIGNED:
        g_ptr = tl.multiple_of(g_ptr, 16)
        w_ptr = tl.multiple_of(w_ptr, 16)
        master_ptr = tl.multiple_of(master_ptr, 16)
        s0_ptr = tl.multiple_of(s0_ptr, 16)
        s1_ptr = tl.multiple_of(s1_ptr, 16)
        columns = tl.multiple_of(columns, 16)

    block = first_block + tl.arange(0, BLOCKS)[:, None]
    lane = tl.arange(0, 64)[None, :]
    row = block // row_blocks
    column = (block % row_blocks) * 64
    off = row * columns + column + lane
    scale_off = row * row_blocks + column // 64
    inside = (block < blocks) & (column + lane < columns)
    if MASKED:
        g = tl.load(g_ptr + off, mask=inside, other=0.0).to(tl.float32)
    else:
        g = tl.load(g_ptr + off).to(tl.float32)
    bad = count_nonfinite(g)
    if COUNT and not OBSERVE:
        tl.atomic_add(nonfinite_ptr, bad, mask=(bad > 0) & (tl.load(h_ptr) != 0))
    if SQUARES:
        total = state_tile_squares(g, 1 - bad, off, inside, s0_ptr, h_ptr, EPILOGUE, S0_CODEC, MASKED)
        tl.store(squares_ptr + program, total)
    else:
        update_tile(
            g, 1 - bad, 0, off, inside, 0, scale_off, block < blocks, row,
            column // 8 + tl.arange(0, 8)[None, :],
            w_ptr, w_meta_ptr, master_ptr, s0_ptr, s0_meta_ptr, s1_ptr, s1_meta_ptr, h_ptr, rng_ptr,
            tensor_id,
            EPILOGUE, SLOTS, WEIGHT, MASTER, W_CODEC, S0_CODEC, S1_CODEC, STOCHASTIC, MASKED, OBSERVE,
        )  # fmt: skip


@dataclass(frozen=True)
class _Item:
    """One tensor of a launch."""

    target: Target
    gradient: Tensor
    hyper_row: int

    @property
    def signature(self) -> tuple[Any, ...]:
        """Tensors of one signature share a launch (or two, of aligned and unaligned ones)."""
        return (*self.target.codec_names, self.target.master is not None, self.gradient.dtype)

    @property
    def aligned(self) -> bool:
        """Whether 16-byte accesses are possible everywhere."""
        _, columns = matrix_view(self.target.shape)
        return columns % BLOCK == 0 and all(address % 16 == 0 for address in self.addresses)

    @property
    def addresses(self) -> tuple[int, ...]:
        """The eight addresses of the table; 0 for what is not there."""
        return self.row[:8]

    @functools.cached_property
    def row(self) -> tuple[int, ...]:
        """The tensor's line of the table."""
        return table_row(self.target, self.gradient.data_ptr(), self.hyper_row)


def table_row(target: Target, gradient: int, hyper_row: int) -> tuple[int, ...]:
    """A tensor's line of the table, from the gradient's address. Addresses are 0 for what is not there."""
    parts: list[Tensor | None] = (
        [target.weight.values, target.weight.meta] if target.weight is not None else [None, None]
    )
    parts.append(target.master)
    for slot in range(2):
        state = target.states[slot] if slot < len(target.states) else None
        parts += [state.values, state.meta] if state is not None else [None, None]
    rows, columns = matrix_view(target.shape)
    row_blocks = cdiv(columns, BLOCK)
    addresses = [part.data_ptr() if part is not None else 0 for part in parts]
    return (gradient, *addresses, columns, row_blocks, rows * row_blocks, target.tensor_id, hyper_row)


@dataclass(frozen=True)
class Tables:
    """Device tables of one launch. full: every chunk is."""

    table: Tensor
    chunks: Tensor
    full: bool


_tables: OrderedDict[Any, Tables] = OrderedDict()
_chunk_lists: OrderedDict[Any, Tensor] = OrderedDict()
_captured: dict[int, Tables] = {}
"""What CUDA graphs were captured with, by identity: their replays read these tables, which are never
dropped."""


def tables_of(rows: Tensor, device: torch.device) -> Tables:
    """From the lines, int64 [tensors, 13] on the host."""
    chunks = _chunk_list(tuple(rows[:, 10].tolist()), device)
    full = bool(((rows[:, 8] % BLOCK == 0) & (rows[:, 10] % BLOCKS == 0)).all())
    return Tables(upload(rows, device), chunks, full)


def _chunk_list(blocks: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [programs, 2] on the device, for tensors of these sizes.

    Kept apart from the addresses, which may change with every step as gradients are allocated anew: for
    8 billion weights it has 4 million lines and takes the host 0.4 s.
    """
    found = _chunk_lists.get((blocks, device))
    if found is None:
        counts = torch.tensor([cdiv(count, BLOCKS) for count in blocks])
        tensor_of = torch.repeat_interleave(torch.arange(len(blocks)), counts)
        chunk_of = torch.arange(len(tensor_of)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        found = upload(torch.stack((tensor_of, chunk_of), 1).to(torch.int32), device)
        _chunk_lists[blocks, device] = found
        while len(_chunk_lists) > _CACHED_CHUNK_LISTS:
            _chunk_lists.popitem(last=False)
    _chunk_lists.move_to_end((blocks, device))
    return found


def _cached_tables(items: Sequence[_Item], device: torch.device) -> Tables:
    rows = tuple(item.row for item in items)
    key = (rows, device)
    found = _tables.get(key)
    if found is None:
        found = _tables[key] = tables_of(torch.tensor(rows, dtype=torch.int64), device)
        while len(_tables) > _CACHED_TABLES:
            _tables.popitem(last=False)
    _tables.move_to_end(key)
    if is_capturing(device):
        _captured[id(found)] = found
    return found


def flat_update(
    epilogue: Epilogue | str,
    weights: Sequence[Tensor | Encoded] | None,
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor | Encoded]],
    hyper: Tensor,
    *,
    masters: Sequence[Tensor | None] | None = None,
    hyper_rows: Sequence[int] | None = None,
    rng: Tensor | None = None,
    tensor_ids: Sequence[int] | None = None,
    nonfinite: Tensor | None = None,
    observe: bool = False,
) -> None:
    """Update many tensors in place, in one launch per combination of dtypes, codecs and alignment.

    weights, grads, states: lists over tensors (states: per tensor, in slot order), of any shapes; weights may
    be None for rules that do not touch them. grads: fp32, bf16 or fp16. hyper: fp32 [H], or [rows, H] with
    hyper_rows, the row of each tensor (parameter groups). masters: fp32 or None per tensor. rng, tensor_ids,
    nonfinite, observe: as `fused_wgrad_update`; the part skipped for a gradient that is not finite is a chunk
    of 2048 elements.
    """
    epilogue = get_epilogue(epilogue) if isinstance(epilogue, str) else epilogue
    count = len(grads)
    weight_list = list(weights) if weights is not None else [None] * count
    master_list = list(masters) if masters is not None else [None] * count
    ids = list(tensor_ids) if tensor_ids is not None else [0] * count
    hyper_index = list(hyper_rows) if hyper_rows is not None else [0] * count
    lengths = {len(weight_list), len(states), len(master_list), len(ids), len(hyper_index), count}
    if len(lengths) != 1:
        raise ValueError(
            f"weights, grads, states, masters and ids must be lists of one length, not {sorted(lengths)}"
        )
    hyper_table = hyper.unsqueeze(0) if hyper.dim() == 1 else hyper
    if any(not 0 <= row < hyper_table.shape[0] for row in hyper_index):
        raise ValueError(f"hyper_rows must be in 0..{hyper_table.shape[0] - 1}: {hyper_index}")
    groups: dict[Any, list[_Item]] = {}
    for weight, grad, own_states, master, tensor_id, row in zip(
        weight_list, grads, states, master_list, ids, hyper_index
    ):
        target = make_target(epilogue, weight, own_states, master=master, tensor_id=tensor_id)
        check_hyper(epilogue, hyper_table, rng, target.stochastic)
        if grad.shape != target.shape:
            raise ValueError(f"a gradient has shape {tuple(grad.shape)}, its weight {tuple(target.shape)}")
        if grad.numel():
            item = _Item(target, grad.contiguous(), row)
            groups.setdefault(item.signature, []).append(item)
    for items in groups.values():
        _run_group(epilogue, items, hyper_table, rng, nonfinite, observe)


def _run_group(
    epilogue: Epilogue,
    items: list[_Item],
    hyper: Tensor,
    rng: Tensor | None,
    nonfinite: Tensor | None,
    observe: bool,
) -> None:
    targets = [item.target for item in items]

    def gather(parts: Sequence[Tensor | None]) -> list[Tensor]:
        return [part for part in parts if part is not None]

    weights = [target.weight for target in targets]
    slots = range(len(epilogue.slots))
    _update_op(
        [item.gradient for item in items],
        gather([weight.values if weight is not None else None for weight in weights]),
        gather([target.master for target in targets]),
        [target.states[slot].values for slot in slots for target in targets],
        gather([part.meta for target in targets for part in target.parts]),
        hyper, rng, nonfinite, [item.hyper_row for item in items], [target.tensor_id for target in targets],
        epilogue.name, ",".join(targets[0].codec_names), observe,
    )  # fmt: skip


@torch.library.custom_op(
    "titanforge::flat_update", mutates_args=("weights", "masters", "states", "metas", "nonfinite")
)
def _update_op(
    grads: list[Tensor],
    weights: list[Tensor],
    masters: list[Tensor],
    states: list[Tensor],
    metas: list[Tensor],
    hyper: Tensor,
    rng: Tensor | None,
    nonfinite: Tensor | None,
    hyper_rows: list[int],
    tensor_ids: list[int],
    epilogue: str,
    codecs: str,
    observe: bool,
) -> None:
    rule, names = get_epilogue(epilogue), codecs.split(",")
    items = _rebuild_items(rule, names, grads, weights, masters, states, metas, hyper_rows, tensor_ids)
    if runs_triton(grads[0]):
        for aligned in (True, False):
            group = [item for item in items if item.aligned is aligned]
            if group:
                _launch(rule, group, hyper, rng, nonfinite, observe)
        return
    for item in items:
        gradient = item.gradient.to(torch.float32)
        reference_update(rule, gradient, item.target, hyper[item.hyper_row], rng, nonfinite, observe=observe)


def _rebuild_items(
    rule: Epilogue,
    names: Sequence[str],
    grads: list[Tensor],
    weights: list[Tensor],
    masters: list[Tensor],
    states: list[Tensor],
    metas: list[Tensor],
    hyper_rows: list[int],
    tensor_ids: list[int],
) -> list[_Item]:
    """The items of one group, from the flat lists that a custom op can take."""
    meta = iter(metas)

    def stored(values: Tensor, name: str) -> Encoded:
        codec = CODECS[name]
        return Encoded(values, codec, next(meta) if codec.kind != "plain" else None)

    items = []
    for index, grad in enumerate(grads):
        weight = stored(weights[index], names[0]) if weights else None
        own = tuple(
            stored(states[slot * len(grads) + index], names[1 + slot]) for slot in range(len(rule.slots))
        )
        master = masters[index] if masters else None
        target = Target(grad.shape, weight, own, master, tensor_ids[index])
        items.append(_Item(target, grad, hyper_rows[index]))
    return items


def _launch(
    rule: Epilogue,
    items: list[_Item],
    hyper: Tensor,
    rng: Tensor | None,
    nonfinite: Tensor | None,
    observe: bool,
) -> None:
    first = items[0]
    tables = _cached_tables(items, first.gradient.device)
    launch_flat(
        rule, tables, first.target, first.gradient.dtype, first.aligned, hyper, rng, nonfinite, observe
    )


def launch_flat(
    rule: Epilogue,
    tables: Tables,
    target: Target,
    gradient_type: torch.dtype,
    aligned: bool,
    hyper: Tensor,
    rng: Tensor | None,
    nonfinite: Tensor | None,
    observe: bool = False,
    squares: SquareSums | None = None,
) -> None:
    """One launch, with a small one for `squares`. target: any of the tensors, which are stored alike."""
    codecs = [CODECS[name] for name in target.codec_names]
    types = [_element_type(codec.dtype) for codec in codecs]
    flat_kernel[(tables.chunks.shape[0],)](
        tables.table, tables.chunks, hyper, rng, nonfinite,
        squares.partial if squares is not None else None, hyper.shape[1],
        EPILOGUE=rule.jit, SLOTS=len(rule.slots), WEIGHT=target.weight is not None,
        MASTER=target.master is not None,
        W_CODEC=codecs[0].code, S0_CODEC=codecs[1].code, S1_CODEC=codecs[2].code,
        STOCHASTIC=target.stochastic,
        G_TYPE=_element_type(gradient_type), W_TYPE=types[0], S0_TYPE=types[1], S1_TYPE=types[2],
        COUNT=nonfinite is not None, OBSERVE=observe, SQUARES=squares is not None,
        BLOCKS=BLOCKS, ALIGNED=aligned, MASKED=not (aligned and tables.full), num_warps=4, **LAUNCH_OPTIONS,
    )  # fmt: skip
    if squares is not None:
        squares.add_up()


def _element_type(dtype: torch.dtype) -> Any:
    if not HAS_TRITON:
        return None
    return {
        torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int8:
        tl.int8,
    }.get(dtype, tl.uint8)  # fmt: skip


@_update_op.register_fake
def _(*_arguments: object) -> None:
    return None
