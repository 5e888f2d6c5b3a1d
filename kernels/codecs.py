"""How a weight or a state is stored: descriptors, allocation, and the plain-torch encoder and decoder.

Every tensor is seen as a matrix of rows and columns (`matrix_view`), columns running along the input axis.

    name            storage                             scale
    fp32 bf16 fp16  round to nearest even               none
    bf16_sr         bf16, stochastic rounding           none
    int8            q in -127..127                      fp32 per block of 64 columns
    uint8           q in 1..255, a magnitude            the same
    uint8_root      q in 1..255, root of a square       the same
    fp8_e4m3/e5m2   signed                              one power of two per tensor, delayed
    fp8_root        e4m3, root of a square, not zero    the same
    fp8_magnitude   e4m3, not zero                      the same

`int8_sr`, `uint8_sr` and `uint8_root_sr` round to one of the two neighbouring codes at random, with the mean
kept. Round to nearest has a dead zone: an average whose relative step 1 - beta is below half a code never
moves by itself (only with the scale of its block), which the random form does not have.

Blocks. With a the largest magnitude of a block, the scale is s = a (1 / 127) (or a (1 / 255)) and q =
round(x (127 / a)), each in fp32 and the last rounded once, as a fused multiply-add does: an instruction a
code. One re-encoding is off by at most s/2, so that an average with decay beta is off by at most s / (2 (1 -
beta)) (FORGE, Appendix B; s the largest scale met). a is floored at 1e-30, so that an all-zero block has a
finite scale and codes of zero. The last block of a row may be narrower.

Nonnegative states. A second moment v is stored as its root r, because 8 bits of r span the square of the
range of 8 bits of v, and its code is floored at 1. Then a step m / sqrt(v) is never enlarged by more than
3/2: let r' be the decoded root. If r <= 3s/2 then r' >= s >= 2r/3, since the code is at least 1. If r > 3s/2
then r' >= r - s/2 > r - r/3 = 2r/3. Hence 1/r' <= (3/2)/r for every r > 0, and an entry of a block whose
largest root is a never divides by less than a/255: v is floored away from zero (Appendix B), and the floor
errs towards small steps. Magnitudes (Adamax) are stored without the root and obey the same bound. With
stochastic rounding the same argument holds with s in place of s/2: r' >= max(s, r - s) >= r/2, a factor of 2.

fp8. One scale per tensor must be known before the tensor is, so it is the one of earlier steps (delayed
scaling): `meta` holds the scale of the stored codes, the scale of the next store, the largest magnitude met
in this step, and a history of those; `fp8_advance` moves on after a step. Scales are powers of two, so
changing one does not disturb normal codes. A magnitude beyond the range saturates; the margin of 2 makes that
rare. Nonnegative states are floored at the smallest positive code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from titanforge.kernels._triton import cdiv
from titanforge.kernels.philox import rounding_bits

BLOCK = 64
"""Columns that share a scale."""
SMALLEST_ABSMAX = 1e-30
FP8_HISTORY = 16
FP8_MARGIN = 2.0
FP8_EXPONENT = 100
_FP8_HEADER = 3

# Bits of Codec.code: how it is scaled, which storage format of that kind, and flags.
KIND, PLAIN, BLOCKWISE, TENSORWISE = 3, 0, 1, 2
FORM, FORM_UNIT = 12, 4
ROOT, FLOORED, STOCHASTIC = 16, 32, 64


def inverse(levels: float) -> float:
    """1 / levels as fp32: what makes a block's scale of its largest magnitude."""
    return torch.tensor(1.0 / levels, dtype=torch.float32).item()


def below(levels: float) -> float:
    """The fp32 number before `levels`: with it over a block's largest magnitude as factor, x * factor plus a
    random number in [0, 1) never reaches past the codes.
    """
    return torch.nextafter(torch.tensor(levels), torch.tensor(0.0)).item()


@dataclass(frozen=True)
class Codec:
    """How one tensor is stored. `kind`: plain (a cast), block (scale per 64 columns), tensor (one scale).

    root: the root of the value is stored. floored: the smallest positive code stands for everything below it.
    levels: the largest code (block) or the largest finite value (tensor).
    """

    name: str
    dtype: torch.dtype
    kind: str = "plain"
    root: bool = False
    floored: bool = False
    stochastic: bool = False
    levels: float = 0.0

    @property
    def code(self) -> int:
        """The codec as kernels read it at compile time: a bit field."""
        form = {torch.bfloat16: 1, torch.float16: 2, torch.uint8: 1, torch.float8_e5m2: 1}.get(self.dtype, 0)
        flags = ROOT * self.root | FLOORED * self.floored | STOCHASTIC * self.stochastic
        return (
            {"plain": PLAIN, "block": BLOCKWISE, "tensor": TENSORWISE}[self.kind] | form * FORM_UNIT | flags
        )

    @property
    def meta_length(self) -> int:
        """Length of `meta` for the tensor kind."""
        return _FP8_HEADER + FP8_HISTORY


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("fp32", torch.float32),
        Codec("bf16", torch.bfloat16),
        Codec("fp16", torch.float16),
        Codec("bf16_sr", torch.bfloat16, stochastic=True),
        Codec("int8", torch.int8, "block", levels=127.0),
        Codec("int8_sr", torch.int8, "block", stochastic=True, levels=127.0),
        Codec("uint8", torch.uint8, "block", floored=True, levels=255.0),
        Codec("uint8_sr", torch.uint8, "block", floored=True, stochastic=True, levels=255.0),
        Codec("uint8_root", torch.uint8, "block", root=True, floored=True, levels=255.0),
        Codec("uint8_root_sr", torch.uint8, "block", root=True, floored=True, stochastic=True, levels=255.0),
        Codec("fp8_e4m3", _E4M3, "tensor", levels=448.0),
        Codec("fp8_e5m2", _E5M2, "tensor", levels=57344.0),
        Codec("fp8_root", _E4M3, "tensor", root=True, floored=True, levels=448.0),
        Codec("fp8_magnitude", _E4M3, "tensor", floored=True, levels=448.0),
    )
}
"""Every codec by name."""

_PLAIN_BY_DTYPE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_BY_STATE_DTYPE = {
    "float32": dict.fromkeys(("signed", "square", "magnitude"), "fp32"),
    "bfloat16": dict.fromkeys(("signed", "square", "magnitude"), "bf16"),
    "int8": {"signed": "int8", "square": "uint8_root", "magnitude": "uint8"},
    "fp8": {"signed": "fp8_e4m3", "square": "fp8_root", "magnitude": "fp8_magnitude"},
}


def get_codec(name: str) -> Codec:
    """The codec of that name; ValueError with the known names otherwise."""
    if name not in CODECS:
        raise ValueError(f"no codec named {name!r}; known: {', '.join(CODECS)}")
    return CODECS[name]


def plain_codec(dtype: torch.dtype) -> Codec:
    """The codec of an ordinary float tensor."""
    if dtype not in _PLAIN_BY_DTYPE:
        raise ValueError(f"{dtype} is not stored without a scale: name its codec ({', '.join(CODECS)})")
    return CODECS[_PLAIN_BY_DTYPE[dtype]]


def state_codec(state_dtype: str, slot_kind: str, *, stochastic: bool = False) -> Codec:
    """The codec of a state for `optimizer.state_dtype` and the slot's kind (signed, square, magnitude).

    stochastic: rounding with the mean kept; available for bfloat16 and int8.
    """
    if state_dtype not in _BY_STATE_DTYPE:
        raise ValueError(
            f"optimizer.state_dtype = {state_dtype!r} is unknown; one of {', '.join(_BY_STATE_DTYPE)}"
        )
    name = _BY_STATE_DTYPE[state_dtype][slot_kind]
    if stochastic and name != "fp32":
        if name + "_sr" not in CODECS:
            raise ValueError(f"optimizer.state_dtype = {state_dtype!r} has no stochastic rounding; use int8")
        name += "_sr"
    return CODECS[name]


@dataclass(frozen=True)
class Encoded:
    """A stored tensor: its codes, and the scales that go with them (None for plain codecs).

    values: any shape, contiguous, of the codec's dtype. meta: fp32, [rows, ceil(columns / 64)] of the matrix
    view for blocks, [3 + history] for fp8. Both belong in a checkpoint as they are.
    """

    values: Tensor
    codec: Codec
    meta: Tensor | None = None


def matrix_view(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) under which kernels see a tensor.

    Vectors are one row. Up to three axes the last one is the columns (an expert stack [E, N, K] has E N
    rows); beyond that everything but the first axis is, as for a convolution [out, in, height, width].
    """
    numel = math.prod(shape)
    if len(shape) <= 1:
        return 1, numel
    columns = shape[-1] if len(shape) <= 3 else math.prod(shape[1:])
    return (numel // columns if columns else 0), columns


def meta_shape(codec: Codec, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape of the fp32 `meta` tensor, None if there is none."""
    if codec.kind == "plain":
        return None
    rows, columns = matrix_view(shape)
    return (rows, cdiv(columns, BLOCK)) if codec.kind == "block" else (codec.meta_length,)


def allocate(
    codec: Codec, shape: torch.Size | tuple[int, ...], device: torch.device | str | None = None
) -> Encoded:
    """Storage for a tensor of zeros (of the smallest scale, where the codec cannot hold a zero)."""
    shape_of_meta = meta_shape(codec, shape)
    # Zero bytes are a positive zero in every storage dtype; zeros() itself lacks fp8 on some backends.
    values = (
        torch.zeros(shape, dtype=torch.uint8, device=device).view(codec.dtype)
        if codec.dtype.itemsize == 1
        else torch.zeros(shape, dtype=codec.dtype, device=device)
    )
    if shape_of_meta is None:
        return Encoded(values, codec)
    meta = torch.zeros(shape_of_meta, dtype=torch.float32, device=device)
    if codec.kind == "tensor":
        meta[:2] = 1.0
    return Encoded(values, codec, meta)


def as_encoded(tensor: Tensor | Encoded) -> Encoded:
    """A plain float tensor as the stored tensor that it is."""
    return tensor if isinstance(tensor, Encoded) else Encoded(tensor, plain_codec(tensor.dtype))


def _round_bits_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 [R, C] to bf16, adding 16 random bits below the last kept one. Not-finite values are kept."""
    integer = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rounded = ((integer + bits) >> 16) & 0xFFFF
    keep = (integer & 0x7F800000) == 0x7F800000
    upper = torch.where(keep, (x.to(torch.bfloat16).view(torch.int16).to(torch.int64)) & 0xFFFF, rounded)
    return upper.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def _blocks(x: Tensor) -> Tensor:
    """[R, C] to [R, ceil(C / 64), 64], zero-padded."""
    padding = -x.shape[1] % BLOCK
    return torch.nn.functional.pad(x, (0, padding)).unflatten(1, (-1, BLOCK))


def decode(stored: Encoded) -> Tensor:
    """The fp32 tensor, in the shape of the values."""
    codec, values, meta = stored.codec, stored.values, stored.meta
    if codec.kind == "plain":
        return values.to(torch.float32)
    assert meta is not None
    if codec.kind == "tensor":
        x = values.to(torch.float32) * meta[0]
    else:
        rows, columns = matrix_view(values.shape)
        codes = _blocks(values.reshape(rows, columns).to(torch.float32))
        x = (codes * meta.unsqueeze(-1)).flatten(1)[:, :columns].reshape(values.shape)
    return x * x if codec.root else x


def encode_(
    stored: Encoded, x: Tensor, *, seed: int = 0, step: int = 0, tensor_id: int = 0, lane: int = 0
) -> None:
    """Store the fp32 tensor x; the random bits are those of (seed, step, tensor_id) and the slot's lane."""
    codec, meta = stored.codec, stored.meta
    rows, columns = matrix_view(x.shape)
    x = x.reshape(rows, columns).contiguous()
    bits = torch.zeros((), dtype=torch.int64)
    if codec.stochastic:
        bits = rounding_bits(rows, columns, lane=lane, seed=seed, step=step, tensor_id=tensor_id).to(x.device)
    if codec.root:
        x = exact_sqrt(x)
    if codec.kind == "plain":
        codes = _round_bits_to_bf16(x, bits) if codec.stochastic else x.to(codec.dtype)
    elif codec.kind == "tensor":
        assert meta is not None
        meta[2] = torch.maximum(meta[2], x.abs().amax()) if x.numel() else meta[2]
        codes = _encode_fp8(x, codec, meta[1])
    else:
        assert meta is not None
        codes = _encode_blocks_(x, codec, meta, bits)
    stored.values.copy_(codes.reshape(stored.values.shape))


def exact_sqrt(x: Tensor) -> Tensor:
    """The correctly rounded root of fp32, as interpreted kernels compute it: torch's own on CPU is a unit off
    in places. Compiled kernels take the GPU's approximate root, which the update needs anyway: one code in
    some 100,000 is the next one there.
    """
    return torch.sqrt(x.to(torch.float64)).to(torch.float32)


def _encode_fp8(x: Tensor, codec: Codec, scale: Tensor) -> Tensor:
    y = (x * (1.0 / scale)).clamp(-codec.levels, codec.levels)
    if codec.floored:
        y = y.clamp_min(torch.finfo(codec.dtype).smallest_normal / 8)
    return y.to(codec.dtype)


def _encode_blocks_(x: Tensor, codec: Codec, meta: Tensor, bits: Tensor) -> Tensor:
    columns = x.shape[1]
    blocks = _blocks(x)
    absmax = blocks.abs().amax(2).clamp_min(SMALLEST_ABSMAX)
    meta.copy_(absmax * inverse(codec.levels))
    levels = below(codec.levels) if codec.stochastic else codec.levels
    factor = (levels / absmax).unsqueeze(-1)
    if codec.stochastic:
        # In float64, as a fused multiply-add: the product is exact and the sum rounded once. 128 + u, as
        # kernels have it.
        u = _blocks(128.0 + bits.to(torch.float64) * 2.0**-16)
        y = (blocks.to(torch.float64) * factor.to(torch.float64) + u).to(torch.float32)
        q = torch.floor(y) - 128.0
    else:
        # Rounded once, as a fused multiply-add does: the product is exact in float64.
        q = torch.round(blocks.to(torch.float64) * factor.to(torch.float64))
    q = q.clamp(1.0 if codec.floored else -codec.levels, codec.levels)
    return q.flatten(1)[:, :columns].to(codec.dtype)


def fp8_scale(history: Tensor, largest: Tensor | float) -> Tensor:
    """A power of two at or above margin * max(history) / largest, over the last axis of [..., H].

    An all-zero history gives the smallest scale, so that a floored zero stays next to zero.
    """
    target = history.amax(-1) * (FP8_MARGIN / largest)
    _, exponent = torch.frexp(target)
    exponent = torch.where(target > 0, exponent, -FP8_EXPONENT).clamp(-FP8_EXPONENT, FP8_EXPONENT)
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


def fp8_advance(meta: Tensor, largest: Tensor | float, apply_flag: Tensor) -> None:
    """Move fp8 scales on, after the step that wrote with them. On the device, without a host read.

    meta: [3 + H] of one tensor, or [tensors, 3 + H]: keep the `meta` of many tensors as rows of one, and one
    call serves all. largest: `Codec.levels`, or a tensor of them per row. apply_flag: h[0] of the step; where
    it was 0 nothing was written and nothing moves.
    """
    history = torch.cat((meta[..., 2:3], meta[..., _FP8_HEADER:-1]), -1)
    scale = fp8_scale(history, largest).unsqueeze(-1)
    moved = torch.cat((meta[..., 1:2], scale, torch.zeros_like(scale), history), -1)
    meta.copy_(torch.where(apply_flag != 0, moved, meta))


def fp8_calibrate(meta: Tensor, largest: Tensor | float) -> None:
    """After an observing pass (which only collects magnitudes): choose the scales of the first store from
    it.
    """
    meta[..., 1] = fp8_scale(meta[..., 2:3], largest)
