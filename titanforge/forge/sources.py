"""What a weight's gradient is made of, and the kernel that consumes it without storing it.

A source can `fold` itself into a weight and its states, or `form` the gradient in fp32 where a rule has to
see all of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titanforge.kernels._triton import runs_triton
from titanforge.kernels.config import TileConfig
from titanforge.kernels.embedding import embedding_gradient, embedding_tile_count, embedding_update
from titanforge.kernels.epilogues import Epilogue
from titanforge.kernels.step import Target
from titanforge.kernels.vector import update_vector, vector_tile_count
from titanforge.kernels.wgrad import Operands, config_for, tile_count, update_target, wgrad


@dataclass(frozen=True)
class Launch:
    """What a kernel needs beside the operands.

    hyper: the rule's vector on the device. norm: fp32, receives the squares of the tiles' norms, or None.
    """

    epilogue: Epilogue
    hyper: Tensor
    rng: Tensor
    nonfinite: Tensor
    observe: bool = False


class Source(ABC):
    """The operands of one gradient."""

    @abstractmethod
    def tiles(self, target: Target) -> int:
        """Number of partial norms that `fold` writes."""

    @abstractmethod
    def fold(self, target: Target, launch: Launch, norm: Tensor | None) -> None:
        """Update the target in place."""

    @abstractmethod
    def form(self, target: Target) -> Tensor:
        """The gradient, fp32, of the target's shape."""

    @abstractmethod
    def copy(self) -> Source:
        """With operands of its own: a compiled graph uses the memory of what it hands over again."""

    @abstractmethod
    def joined(self, others: Sequence[Any]) -> Source:
        """The sum of this gradient and others of the same kind."""


@dataclass(frozen=True)
class Product(Source):
    """G = dyᵀ x. dy: [T, N]; x: [T, K]; offsets [E + 1] for experts [E, N, K]. T may be 0: G is then zero."""

    dy: Tensor
    x: Tensor
    offsets: Tensor | None = None

    def _config(self, target: Target) -> TileConfig:
        experts = target.shape[0] if self.offsets is not None else 1
        return config_for(self.dy, self.x, target, experts)

    def tiles(self, target: Target) -> int:
        return tile_count(target.shape, self._config(target)) if runs_triton(self.dy) else 1

    def fold(self, target: Target, launch: Launch, norm: Tensor | None) -> None:
        update_target(
            Operands(self.dy, self.x, self.offsets),
            target,
            launch.epilogue,
            launch.hyper,
            rng=launch.rng,
            norm_partials=norm,
            nonfinite=launch.nonfinite,
            observe=launch.observe,
        )

    def copy(self) -> Product:
        return Product(self.dy.clone(), self.x.clone(), self.offsets)

    def joined(self, others: Sequence[Product]) -> Product:
        if self.offsets is not None:
            raise ValueError(
                "tokens of experts are in another order in each micro-batch: they cannot be joined"
            )
        parts = (self, *others)
        return Product(torch.cat([part.dy for part in parts]), torch.cat([part.x for part in parts]))

    def form(self, target: Target) -> Tensor:
        # The same tiles as `fold`, so that both sum in one order.
        config = self._config(target) if runs_triton(self.dy) else None
        return wgrad(self.dy, self.x, offsets=self.offsets, config=config)


@dataclass(frozen=True)
class Rows(Source):
    """Row v of G is the sum of dy over the tokens whose id is v. dy: [T, D]; ids: [T]; other ids are
    ignored.
    """

    dy: Tensor
    ids: Tensor

    def tiles(self, target: Target) -> int:
        return embedding_tile_count(*target.shape)

    def fold(self, target: Target, launch: Launch, norm: Tensor | None) -> None:
        embedding_update(
            self.dy,
            self.ids,
            target.weight,
            target.states,
            launch.epilogue,
            launch.hyper,
            master=target.master,
            rng=launch.rng,
            tensor_id=target.tensor_id,
            norm_partials=norm,
            nonfinite=launch.nonfinite,
            observe=launch.observe,
        )

    def copy(self) -> Rows:
        return Rows(self.dy.clone(), self.ids.clone())

    def joined(self, others: Sequence[Rows]) -> Rows:
        parts = (self, *others)
        return Rows(torch.cat([part.dy for part in parts]), torch.cat([part.ids for part in parts]))

    def form(self, target: Target) -> Tensor:
        return embedding_gradient(self.dy, self.ids, target.shape[0])


@dataclass(frozen=True)
class Whole(Source):
    """A vector's gradient, complete, of any shape and float type."""

    gradient: Tensor

    def tiles(self, target: Target) -> int:
        return vector_tile_count(target.shape.numel())

    def fold(self, target: Target, launch: Launch, norm: Tensor | None) -> None:
        update_vector(
            self.gradient,
            target,
            launch.epilogue,
            launch.hyper,
            rng=launch.rng,
            norm_partials=norm,
            nonfinite=launch.nonfinite,
            observe=launch.observe,
        )

    def copy(self) -> Whole:
        return Whole(self.gradient.clone())

    def joined(self, others: Sequence[Whole]) -> Whole:
        return Whole(torch.stack([one.gradient.float() for one in (self, *others)]).sum(0))

    def form(self, target: Target) -> Tensor:
        return self.gradient.float().reshape(target.shape)


def no_tokens(kind: str, target: Target) -> Source:
    """The source of a zero gradient."""
    shape, device = target.shape, target.device
    if kind == "vector":
        return Whole(torch.zeros(shape, device=device))
    if kind == "embedding":
        ids = torch.empty(0, dtype=torch.int64, device=device)
        return Rows(torch.empty(0, shape[1], device=device), ids)
    offsets = torch.zeros(shape[0] + 1, dtype=torch.int32, device=device) if len(shape) == 3 else None
    empty = [torch.empty(0, size, device=device) for size in shape[-2:]]
    return Product(empty[0], empty[1], offsets)
