"""AdamW on one linear under a cross-entropy: how far storage and rounding take a weight from fp32's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanforge.config.sections import Optimizer
from titanforge.forge import Ranks, attach
from titanforge.optim.build import build_groups, build_optimizer, build_recipe

STEPS = 20


@dataclass(frozen=True)
class Size:
    """rows, columns: of the weight [rows, columns]. tokens: of each step."""

    rows: int
    columns: int
    tokens: int

    def __str__(self) -> str:
        return f"V={self.rows} H={self.columns} BT={self.tokens}"


PAPER = Size(1024, 4096, 2048)
"""As in the FORGE paper, appendix E; which states neither learning rate nor initial values."""
SMALL = Size(96, 256, 128)


def weights_by_step(
    size: Size,
    dtype: torch.dtype,
    options: Optimizer,
    device: torch.device,
    *,
    fuse: bool,
    steps: int = STEPS,
) -> Iterator[Tensor]:
    """The weight, or its fp32 master, in fp64 after each step on the same given inputs.

    dtype: of the weight. Initial values are of deviation 0.02 and rounded to bf16, so that all dtypes begin
    with the same ones.
    """
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(size.columns, size.rows, bias=False)
    with torch.no_grad():
        linear.weight.copy_((torch.randn(size.rows, size.columns, generator=generator) * 0.02).bfloat16())
    linear = linear.to(device, dtype)
    x = torch.randn(size.tokens, size.columns, generator=generator).to(device)
    labels = torch.randint(0, size.rows, (size.tokens,), generator=generator).to(device)

    def loss() -> Tensor:
        return F.cross_entropy(linear(x.to(dtype)).float(), labels)

    name = str(dtype).removeprefix("torch.")
    if fuse:
        recipe = build_recipe(options, name)
        optimizer = attach(linear, build_groups(linear, options), recipe, probe=loss, ranks=Ranks())
    else:
        optimizer = build_optimizer(linear, options, name)
    for _ in range(steps):
        optimizer.zero_grad()
        optimizer.begin_step(1)
        value = loss()
        optimizer.before_backward(0, torch.isfinite(value.detach()))
        value.backward()
        optimizer.step()
        master = optimizer.state_dict()["state"]["weight"].get("master", linear.weight)
        yield master.detach().double().clone()


def relative_rms(found: Tensor, expected: Tensor) -> float:
    """Error of a tensor, relative to the whole of what it should be."""
    return float((found - expected).norm()) / float(expected.norm())
