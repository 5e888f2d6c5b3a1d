"""What tensor-parallel ranks exchange between blocks: activations with their sequence in shares, or whole.

Plain tensors in and out. DTensor would send the same, and dispatch each operator between the two in Python,
which costs the host more than a GPU takes for the block. To the compiler these are collectives of its own
kind, which it can place beside products (see ``async_tensor_parallel``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Sharers(NamedTuple):
    """The ranks that share a sequence, in the order of their shares; rank: this one."""

    count: int
    rank: int
    group_name: str


def gather_sequence(x: torch.Tensor, sharers: Sharers) -> torch.Tensor:
    """[B, T / ranks, …] of each rank → [B, T, …] on all; the gradient is summed over ranks and scattered."""
    return _Gather.apply(x, sharers.count, sharers.group_name)  # pyright: ignore[reportReturnType]


def scatter_sequence(x: torch.Tensor, sharers: Sharers) -> torch.Tensor:
    """[B, T, …], of which each rank has an addend → this rank's [B, T / ranks, …] of the sum; the gradient is
    gathered.

    Raises ValueError for a T that is not a multiple of the ranks.
    """
    if x.shape[1] % sharers.count:
        raise ValueError(
            f"a sequence of {x.shape[1]} does not divide into the shares of {sharers.count} tensor-parallel "
            "ranks: pad it, or change parallelism.tensor_parallel_degree"
        )
    return _Scatter.apply(x, sharers.count, sharers.group_name)  # pyright: ignore[reportReturnType]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int, group_name: str) -> torch.Tensor:
        ctx.count, ctx.group_name = count, group_name
        return _gathered(x, count, group_name)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _scattered(gradients[0], ctx.count, ctx.group_name), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int, group_name: str) -> torch.Tensor:
        ctx.count, ctx.group_name = count, group_name
        return _scattered(x, count, group_name)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gathered(gradients[0], ctx.count, ctx.group_name), None, None


# The operators themselves and not their Python wrappers, whose results are another tensor subclass.


def _gathered(x: torch.Tensor, count: int, group_name: str) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    by_rank = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), count, group_name))
    return torch.cat(torch.chunk(by_rank, count, dim=0), dim=1)


def _scattered(x: torch.Tensor, count: int, group_name: str) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    by_rank = torch.cat(torch.chunk(x, count, dim=1), dim=0)
    return ops.wait_tensor(ops.reduce_scatter_tensor(by_rank, "sum", count, group_name))
