"""The update of a norm's weight or a bias: its gradient is a vector that lies in memory, complete.

One launch of a few programs, which takes all it needs as arguments: no table on the device as in `flat`, no
product as in `wgrad`. A step of a model has one for each such weight, in the backward that completes it.
"""

# pyright: reportArgumentType=false
from __future__ import annotations

import torch
from torch import Tensor

from titanforge.kernels._triton import LAUNCH_OPTIONS, cdiv, jit, next_power_of_2, runs_triton, tl
from titanforge.kernels.codecs import CODECS
from titanforge.kernels.epilogues import Epilogue
from titanforge.kernels.step import Target, kernel_parts, reference_update
from titanforge.kernels.tiles import count_nonfinite, update_tile

_WIDEST = 1024
_ELEMENTS_OF_A_WARP = 256


@jit(unspecialized=("tensor_id",))
def vector_kernel(
    gradient_ptr, norm_ptr, nonfinite_ptr,
    w_ptr, w_meta_ptr, master_ptr, s0_ptr, s0_meta_ptr, s1_ptr, s1_meta_ptr, h_ptr, rng_ptr, tensor_id,
    D,
    EPILOGUE: tl.constexpr, SLOTS: tl.constexpr, WEIGHT: tl.constexpr, MASTER: tl.constexpr,
    W_CODEC: tl.constexpr, S0_CODEC: tl.constexpr, S1_CODEC: tl.constexpr, STOCHASTIC: tl.constexpr,
    NORM: tl.constexpr, COUNT: tl.constexpr, OBSERVE: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_D elements of a vector [D]. Grid: (D / BLOCK_D,)."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_D
    off = tl.arange(0, BLOCK_D)[None, :]
    inside = first + off < D
    if MASKED:
        g = tl.load(gradient_ptr + first + off, mask=inside, other=0.0).to(tl.float32)
    else:
        g = tl.load(gradient_ptr + first + off).to(tl.float32)
    if NORM:
        tl.store(norm_ptr + tl.program_id(0), tl.sum(tl.sum(g * g, axis=1), axis=0))
    bad = count_nonfinite(g)
    if COUNT and not OBSERVE:
        tl.atomic_add(nonfinite_ptr, bad, mask=(bad > 0) & (tl.load(h_ptr) != 0))
    block = tl.arange(0, BLOCK_D // 64)[None, :]
    update_tile(
        g, 1 - bad, first, off, inside, first // 64, block, first // 64 + block < tl.cdiv(D, 64),
        tl.full([1, 1], 0, tl.int64), first // 8 + tl.arange(0, BLOCK_D // 8)[None, :],
        w_ptr, w_meta_ptr, master_ptr, s0_ptr, s0_meta_ptr, s1_ptr, s1_meta_ptr, h_ptr, rng_ptr,
        tensor_id,
        EPILOGUE, SLOTS, WEIGHT, MASTER, W_CODEC, S0_CODEC, S1_CODEC, STOCHASTIC, MASKED, OBSERVE,
    )  # fmt: skip


def _width(elements: int) -> int:
    return min(_WIDEST, max(64, next_power_of_2(elements)))


def vector_tile_count(elements: int) -> int:
    """Length of `norm_partials` for a vector."""
    return cdiv(elements, _width(elements))


def update_vector(
    gradient: Tensor,
    target: Target,
    rule: Epilogue,
    hyper: Tensor,
    *,
    rng: Tensor | None = None,
    norm_partials: Tensor | None = None,
    nonfinite: Tensor | None = None,
    observe: bool = False,
) -> None:
    """Update a vector, which `target` has as a matrix of one row [1, D], and its states in place.

    gradient: D elements of any shape and float type. norm_partials: fp32 [vector_tile_count(D)], receives
    sums of squares. nonfinite: int32 [1], counts the tiles left out because their gradient is not finite.
    observe: only collect the magnitudes that fp8 states would have. For callers that made the `Target` once;
    no custom op: the compiler must not see it.
    """
    elements = target.shape.numel()
    if elements == 0:
        return
    if not runs_triton(gradient):
        gradient = gradient.to(torch.float32).reshape(target.shape)
        if norm_partials is not None:
            norm_partials.zero_()
            norm_partials[0] = gradient.square().sum()
        reference_update(rule, gradient, target, hyper, rng, nonfinite, observe=observe)
        return
    width = _width(elements)
    w_codec, s0_codec, s1_codec = (CODECS[name].code for name in target.codec_names)
    vector_kernel[(cdiv(elements, width),)](
        gradient.contiguous(), norm_partials, nonfinite, *kernel_parts(target), hyper, rng, target.tensor_id,
        elements,
        EPILOGUE=rule.jit, SLOTS=len(rule.slots), WEIGHT=target.weight is not None,
        MASTER=target.master is not None, W_CODEC=w_codec, S0_CODEC=s0_codec, S1_CODEC=s1_codec,
        STOCHASTIC=target.stochastic, NORM=norm_partials is not None, COUNT=nonfinite is not None,
        OBSERVE=observe, MASKED=elements % width != 0, BLOCK_D=width,
        num_warps=max(1, width // _ELEMENTS_OF_A_WARP), **LAUNCH_OPTIONS,
    )  # fmt: skip
