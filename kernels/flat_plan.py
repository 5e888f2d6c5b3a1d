"""The same launches over the same weights at every step: only gradients move, and often not even they.

`flat_update` checks every tensor and builds every line of its table at every call. A plan does so once; a
call then compares the gradients' addresses with those of the last one, and fills them in where they differ.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titanforge.kernels._triton import cdiv
from titanforge.kernels.codecs import BLOCK, Encoded, matrix_view
from titanforge.kernels.epilogues import Epilogue
from titanforge.kernels.flat import BLOCKS, Tables, is_capturing, launch_flat, table_row, tables_of
from titanforge.kernels.squares import SquareSums, check_squares
from titanforge.kernels.step import Target, check_hyper, make_target

_KEPT = 16


@dataclass(frozen=True)
class _Launch:
    tables: Tables
    target: Target
    gradient_type: torch.dtype
    aligned: bool
    squares: SquareSums | None = None


class FlatPlan:
    """Updates of a fixed list of tensors, as `flat_update` on a GPU or interpreted; the bits are the same.

    Arguments as there. Tensors may not move, and none may be empty. Raises ValueError as `flat_update`.

    squares: fp32 scalars, one a tensor, that each call fills with the sum of squares of the state that it
        leaves, added up in a fixed order; for rules of one state in floats that leave the weight alone.
    """

    def __init__(
        self,
        epilogue: Epilogue,
        weights: Sequence[Tensor | Encoded],
        states: Sequence[Sequence[Tensor | Encoded]],
        masters: Sequence[Tensor | None],
        hyper_rows: Sequence[int],
        tensor_ids: Sequence[int],
        squares: Sequence[Tensor] | None = None,
    ) -> None:
        self._rule = epilogue
        self._targets = [
            make_target(epilogue, weight, own, master=master, tensor_id=tensor_id)
            for weight, own, master, tensor_id in zip(weights, states, masters, tensor_ids, strict=True)
        ]
        if squares is not None:
            check_squares(epilogue, self._targets, squares)
        self._squares = squares
        self._device = self._targets[0].device
        self._rows = max(hyper_rows) + 1
        self._shapes = [target.shape for target in self._targets]
        self._stochastic = any(target.stochastic for target in self._targets)
        lines = [table_row(target, 0, row) for target, row in zip(self._targets, hyper_rows, strict=True)]
        self._lines = torch.tensor(lines, dtype=torch.int64)
        kinds: dict[tuple[object, ...], int] = {}
        self._kinds = [
            kinds.setdefault((*target.codec_names, target.master is not None), len(kinds))
            for target in self._targets
        ]
        self._aligned = [
            matrix_view(target.shape)[1] % BLOCK == 0 and all(address % 16 == 0 for address in line[:8])
            for target, line in zip(self._targets, lines)
        ]
        self._last: tuple[list[int], list[torch.dtype], list[_Launch]] | None = None
        self._found: OrderedDict[Any, list[_Launch]] = OrderedDict()
        self._captured: list[list[_Launch]] = []

    def __call__(
        self, grads: Sequence[Tensor], hyper: Tensor, rng: Tensor | None, nonfinite: Tensor | None
    ) -> None:
        """grads: of the weights, in order and of their shapes. hyper: fp32 [rows, H]."""
        check_hyper(self._rule, hyper, rng, self._stochastic)
        if hyper.shape[0] < self._rows:
            raise ValueError(f"hyper has {hyper.shape[0]} rows, the plan reads {self._rows}")
        if not all(grad.is_contiguous() for grad in grads):
            grads = [grad.contiguous() for grad in grads]
        if [grad.shape for grad in grads] != self._shapes:
            self._refuse(grads)
        for launch in self._launches(grads):
            launch_flat(
                self._rule, launch.tables, launch.target, launch.gradient_type, launch.aligned, hyper, rng,
                nonfinite, squares=launch.squares,
            )  # fmt: skip

    def _refuse(self, grads: Sequence[Tensor]) -> None:
        for grad, target in zip(grads, self._targets, strict=True):
            if grad.shape != target.shape:
                raise ValueError(
                    f"a gradient has shape {tuple(grad.shape)}, its weight {tuple(target.shape)}"
                )

    def _launches(self, grads: Sequence[Tensor]) -> list[_Launch]:
        addresses, types = [grad.data_ptr() for grad in grads], [grad.dtype for grad in grads]
        if self._last is None or self._last[0] != addresses or self._last[1] != types:
            key = (tuple(addresses), tuple(types))
            found = self._found.get(key)
            if found is None:
                found = self._found[key] = self._plan(addresses, types)
                while len(self._found) > _KEPT:
                    self._found.popitem(last=False)
            self._found.move_to_end(key)
            self._last = addresses, types, found
        launches = self._last[2]
        if is_capturing(self._device) and not any(launches is one for one in self._captured):
            self._captured.append(launches)  # replays read these tables: they are kept as long as the plan
        return launches

    def _plan(self, addresses: list[int], types: list[torch.dtype]) -> list[_Launch]:
        groups: dict[tuple[int, torch.dtype, bool], list[int]] = {}
        for index, (kind, dtype, aligned, address) in enumerate(
            zip(self._kinds, types, self._aligned, addresses, strict=True)
        ):
            groups.setdefault((kind, dtype, aligned and address % 16 == 0), []).append(index)
        lines = self._lines.clone()
        lines[:, 0] = torch.tensor(addresses, dtype=torch.int64)
        launches = []
        for (_, dtype, aligned), members in groups.items():
            own = lines if len(members) == len(lines) else lines[members]
            squares = None
            if self._squares is not None:
                programs = [cdiv(blocks, BLOCKS) for blocks in own[:, 10].tolist()]
                squares = SquareSums(programs, [self._squares[index] for index in members])
            tables, target = tables_of(own, self._device), self._targets[members[0]]
            launches.append(_Launch(tables, target, dtype, aligned, squares))
        return launches
