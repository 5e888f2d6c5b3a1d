"""What one update launch needs beside its tensors' shapes: arguments checked once, for all kernels alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titanforge.kernels._triton import kernel_view
from titanforge.kernels.codecs import (
    Encoded,
    as_encoded,
    decode,
    encode_,
    exact_sqrt,
    meta_shape,
    plain_codec,
)
from titanforge.kernels.epilogues import Epilogue

_PIECE = 1 << 16
"""Elements of a tensor that are updated at a time on a CPU: what they need there stays in its cache."""


@dataclass(frozen=True)
class Target:
    """One weight with its states, as an update reads and writes them.

    weight: None where the epilogue does not update it. master: fp32, of the weight's shape; then the epilogue
    works on it and the weight is an encoded copy. tensor_id: sets this tensor's random bits apart from
    another's.
    """

    shape: torch.Size
    weight: Encoded | None
    states: tuple[Encoded, ...]
    master: Tensor | None = None
    tensor_id: int = 0

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.parts[0].values.device

    @property
    def parts(self) -> tuple[Encoded, ...]:
        """The weight, if there is one, and the states."""
        return (self.weight, *self.states) if self.weight is not None else self.states

    @property
    def stochastic(self) -> bool:
        """Whether any part draws random bits."""
        return any(part.codec.stochastic for part in self.parts)

    @property
    def heavy(self) -> bool:
        """Whether its epilogue needs many registers: fp32 storage of two or more tensors, random bits,
        fp8.
        """
        codecs = [part.codec for part in self.parts]
        wide = sum(codec.dtype == torch.float32 for codec in codecs) + (self.master is not None)
        return wide >= 2 or self.stochastic or any(codec.kind == "tensor" for codec in codecs)

    @property
    def codec_names(self) -> tuple[str, ...]:
        """Codec names of weight, first and second state; `fp32` stands where there is none."""
        weight = self.weight.codec.name if self.weight is not None else "fp32"
        states = [state.codec.name for state in self.states]
        return (weight, *states, *["fp32"] * (2 - len(states)))


def make_target(
    epilogue: Epilogue,
    weight: Tensor | Encoded | None,
    states: Sequence[Tensor | Encoded],
    *,
    master: Tensor | None = None,
    tensor_id: int = 0,
) -> Target:
    """Check one weight and its states against the epilogue. Raises ValueError naming what does not fit."""
    if len(states) != len(epilogue.slots):
        raise ValueError(f"{epilogue.name} has the states {epilogue.slots}, {len(states)} were given")
    stored_states = tuple(as_encoded(state) for state in states)
    stored_weight = as_encoded(weight) if weight is not None and epilogue.updates_weight else None
    if epilogue.updates_weight and stored_weight is None:
        raise ValueError(f"{epilogue.name} updates the weight, and none was given")
    parts = {"weight": stored_weight, **dict(zip(epilogue.slots, stored_states))}
    shape = next(part.values.shape for part in parts.values() if part is not None)
    for name, part in parts.items():
        if part is not None:
            _check_part(epilogue.name, name, part, shape)
    if master is not None:
        if stored_weight is None:
            raise ValueError(f"{epilogue.name} does not update the weight, so it takes no master")
        _check_part(epilogue.name, "master", Encoded(master, plain_codec(torch.float32)), shape)
    return Target(shape, stored_weight, stored_states, master, tensor_id)


def _check_part(rule: str, name: str, part: Encoded, shape: torch.Size) -> None:
    if part.values.shape != shape:
        raise ValueError(f"{rule}: {name} has shape {tuple(part.values.shape)}, expected {tuple(shape)}")
    if not part.values.is_contiguous():
        raise ValueError(f"{rule}: {name} is updated in place and must be contiguous (shape {tuple(shape)})")
    if part.values.dtype != part.codec.dtype:
        raise ValueError(
            f"{rule}: {name} is {part.values.dtype}, its codec {part.codec.name} holds {part.codec.dtype}"
        )
    expected = meta_shape(part.codec, shape)
    found = None if part.meta is None else tuple(part.meta.shape)
    if found != expected:
        raise ValueError(
            f"{rule}: the scales of {name} have shape {found}, {part.codec.name} needs {expected}"
        )


def check_hyper(epilogue: Epilogue, hyper: Tensor, rng: Tensor | None, stochastic: bool) -> None:
    """Check the hyperparameter vector (fp32) and the random key (int64 [2]: seed, step)."""
    if (
        hyper.dtype != torch.float32
        or hyper.shape[-1] < epilogue.hyper_length  # a rule may have more, for its weight update
        or not hyper.is_contiguous()
    ):
        raise ValueError(
            f"{epilogue.name} takes a contiguous fp32 hyper vector of {epilogue.hyper_length} or more values "
            f"{epilogue.hyper_names}, not {hyper.dtype} {tuple(hyper.shape)}"
        )
    if stochastic and (rng is None or rng.dtype != torch.int64 or rng.shape != (2,)):
        raise ValueError("stochastic rounding needs rng, an int64 tensor (seed, step) on the device")


def reference_update(
    epilogue: Epilogue,
    gradient: Tensor,
    target: Target,
    hyper: Tensor,
    rng: Tensor | None,
    nonfinite: Tensor | None = None,
    *,
    observe: bool = False,
) -> None:
    """The whole update of one tensor in plain torch; the tile that is skipped when not finite is the whole
    tensor.

    gradient: fp32, of the target's shape.
    """
    if float(hyper[0]) == 0.0:
        return
    # The sum takes one pass; only where finite values overflow in it are all of them looked at.
    finite = math.isfinite(float(gradient.sum())) or bool(torch.isfinite(gradient).all())
    if not finite:
        if nonfinite is not None and not observe:
            nonfinite += 1
        return
    key = (int(rng[0]), int(rng[1])) if rng is not None else (0, 0)
    for part, of_part in _pieces(gradient, target):
        _update_piece(epilogue, part, of_part, hyper, key, observe)


def _pieces(gradient: Tensor, target: Target) -> Iterator[tuple[Tensor, Target]]:
    """The tensor in pieces; whole where what is stored depends on more than its own value (random bits on the
    coordinate, block scales on neighbours).
    """
    elementwise = all(part.codec.kind == "plain" and not part.codec.stochastic for part in target.parts)
    if gradient.is_cuda or not elementwise or gradient.numel() <= _PIECE:
        yield gradient, target
        return

    def cut(tensor: Tensor, first: int) -> Tensor:
        return tensor.view(-1)[first : first + _PIECE]

    flat = gradient.reshape(-1)
    for first in range(0, flat.numel(), _PIECE):
        part = cut(flat, first)
        states = tuple(Encoded(cut(one.values, first), one.codec) for one in target.states)
        weight = target.weight and Encoded(cut(target.weight.values, first), target.weight.codec)
        master = None if target.master is None else cut(target.master, first)
        yield part, Target(part.shape, weight, states, master)


def _update_piece(
    epilogue: Epilogue, gradient: Tensor, target: Target, hyper: Tensor, key: tuple[int, int], observe: bool
) -> None:
    old = [decode(state) for state in target.states]
    if target.master is not None:
        weight = target.master
    else:
        weight = decode(target.weight) if target.weight is not None else gradient
    weight_new, *new = epilogue.reference(gradient, weight, *old, hyper)
    if observe:
        for part, value in zip(target.parts, (weight_new, *new) if target.weight is not None else new):
            if part.meta is not None and part.codec.kind == "tensor":
                magnitude = (exact_sqrt(value) if part.codec.root else value).abs().amax()
                part.meta[2] = torch.maximum(part.meta[2], magnitude)
        return
    seed, step = key
    if target.master is not None:
        target.master.copy_(weight_new)
    if target.weight is not None:
        encode_(target.weight, weight_new, seed=seed, step=step, tensor_id=target.tensor_id, lane=0)
    for lane, (state, value) in enumerate(zip(target.states, new), start=1):
        encode_(state, value, seed=seed, step=step, tensor_id=target.tensor_id, lane=lane)


def kernel_parts(target: Target) -> list[Tensor | None]:
    """Weight, its scales, master, first state, its scales, second state, its scales: as kernels take them."""
    weight, states = target.weight, target.states
    flat: list[Tensor | None] = [
        kernel_view(weight.values) if weight is not None else None,
        weight.meta if weight is not None else None,
        target.master,
    ]
    for slot in range(2):
        state = states[slot] if slot < len(states) else None
        flat += [
            kernel_view(state.values) if state is not None else None,
            state.meta if state is not None else None,
        ]
    return flat
