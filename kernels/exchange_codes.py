"""Codes of what ranks sum: fp32 values in few bits, for an all-reduce of two halves.

    code      bits a value                                        scale
    bfloat16  16: round to nearest even                           none
    int8      8: q in -127..127                                   bf16 for each block of 64 values
    int4      4: q in -7..7, two a byte, the even one low         the same

Of N ranks each has a buffer of N *pieces*. It encodes all of them and sends each to its owner; an owner
decodes what it was sent, adds it up in fp32 by rank, and encodes the sum; all ranks gather the sums and
decode them. So all hold the same bits, each value was rounded once on its way in and once on its way out, and
2 (N - 1) / N of the encoded buffer leave a rank, as of a ring's all-reduce.

A piece is its codes followed by its scales. Blocks are of consecutive values, and a piece of whole blocks.
With a the largest magnitude of a block, the scale s is a / levels rounded up to bf16, and q = round(x / s),
half to even: an error of at most s / 2, of which scales that round up leave nothing to be cut off. Scales
below the smallest normal number (2^-126) make a block of zeros. A value that is not finite makes its block
NaN.

Differences. Of values that change little from one exchange to the next, with `Sent`, a rank encodes what they
differ by from what it has sent so far, and an owner what the sum differs by from what all were told: codes
are then a part of the change off, not of the values, and what one exchange has rounded away the next one
sends (EF21, Richtarik, Sokolov, Fatkhullin 2021). A block that was told as NaN begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from titanforge.kernels._triton import LAUNCH_OPTIONS, cdiv, runs_triton
from titanforge.kernels.codecs import inverse
from titanforge.kernels.exchange_codes_kernel import decode_kernel, encode_kernel, sum_kernel

BLOCK = 64
"""Values that share a scale."""
_ROWS = 32
"""Blocks of a kernel's program."""
_SMALLEST_NORMAL = 0x0080  # bits of a bf16 number


@dataclass(frozen=True)
class ExchangeCode:
    """How a value is sent. levels: the largest code; 0: a float, without a scale."""

    name: str
    bits: int
    levels: int = 0

    def piece_bytes(self, values: int) -> int:
        """Of the codes and scales of so many values, whole blocks."""
        return self.code_bytes(values) + (2 * (values // BLOCK) if self.levels else 0)

    def code_bytes(self, values: int) -> int:
        """Of the codes alone."""
        return values * self.bits // 8


EXCHANGE_CODES = {
    code.name: code
    for code in (ExchangeCode("bfloat16", 16), ExchangeCode("int8", 8, 127), ExchangeCode("int4", 4, 7))
}
"""Every code by name."""


def padded(values: int, ranks: int) -> int:
    """The least size of a buffer for so many values: whole blocks for each rank."""
    return cdiv(values, ranks * BLOCK) * ranks * BLOCK


@dataclass(frozen=True)
class Sent:
    """What earlier exchanges of one buffer have sent; fp32, zeros at first.

    own: [values], by this rank. sum: [values / ranks], of its own piece by all ranks. told: [values], the
    sums as all ranks have decoded them; where it is NaN nothing was sent.
    """

    own: Tensor
    sum: Tensor
    told: Tensor

    @classmethod
    def nothing(cls, values: int, ranks: int, device: torch.device | None = None) -> Sent:
        own, told = torch.zeros(2, values, device=device).unbind(0)
        return cls(own, torch.zeros(values // ranks, device=device), told)


def _check(code: ExchangeCode, encoded: Tensor, values: int) -> None:
    """Of [pieces, bytes] for `values` in all."""
    pieces = len(encoded)
    if values % (pieces * BLOCK) or encoded.shape[1] != code.piece_bytes(values // pieces):
        raise ValueError(
            f"{values} values in {pieces} pieces are not {list(encoded.shape)} bytes of {code.name}"
        )
    if not encoded.is_contiguous() or encoded.dtype != torch.uint8:
        raise ValueError(f"codes are contiguous bytes, not {encoded.dtype} with strides {encoded.stride()}")


def encode(
    x: Tensor, code: ExchangeCode, pieces: int, factor: float = 1.0, sent: Sent | None = None
) -> Tensor:
    """The codes, uint8 [pieces, bytes], of factor * x; x: fp32 [values], whole blocks for each piece.

    sent: encode the difference from what was sent, and note it there.
    """
    values = x.numel()
    encoded = torch.empty((pieces, code.piece_bytes(values // pieces)), dtype=torch.uint8, device=x.device)
    _check(code, encoded, values)
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"codes are of contiguous fp32 values, not of {x.dtype}")
    if not runs_triton(x):
        before = None if sent is None else torch.where(sent.told.isnan(), 0.0, sent.own)
        new = x * factor if before is None else x * factor - before
        encoded.copy_(encode_reference(new.view(pieces, -1), code))
        if sent is not None and before is not None:
            sent.own.copy_(before + decode_reference(encoded, code, values // pieces).view(-1))
        return encoded
    blocks = values // pieces // BLOCK
    own, told = (None, None) if sent is None else (sent.own, sent.told)
    encode_kernel[(cdiv(blocks, _ROWS), pieces)](
        x, own, told, encoded, encoded.view(torch.int16), blocks, encoded.shape[1], factor,
        **kernel_constants(code), **LAUNCH_OPTIONS,
    )  # fmt: skip
    return encoded


def sum_pieces(
    received: Tensor, code: ExchangeCode, values: int, sent: Sent | None = None, rank: int = 0
) -> Tensor:
    """The codes, uint8 [bytes], of the sum of pieces [ranks, bytes] of so many values each, by rank.

    sent: pieces are differences, and so are the codes: of this rank's piece.
    """
    _check(code, received, values * len(received))
    told = None if sent is None else sent.told[rank * values :][:values]
    if not runs_triton(received):
        total = torch.zeros(values, device=received.device)
        if sent is not None and told is not None:
            total = torch.where(told.isnan(), 0.0, sent.sum)
        for piece in received:
            total += decode_reference(piece[None], code, values)[0]
        if sent is not None and told is not None:
            sent.sum.copy_(total)
            total = total - torch.where(told.isnan(), 0.0, told)
        return encode_reference(total[None], code)[0]
    out = torch.empty_like(received[0])
    blocks = values // BLOCK
    sum_kernel[(cdiv(blocks, _ROWS),)](
        received, received.view(torch.int16), None if sent is None else sent.sum, told,
        out, out.view(torch.int16), len(received), blocks, received.shape[1],
        **kernel_constants(code), **LAUNCH_OPTIONS,
    )  # fmt: skip
    return out


def decode(encoded: Tensor, code: ExchangeCode, out: Tensor, sent: Sent | None = None) -> None:
    """Fill `out`, fp32 [values], from the codes of its pieces, uint8 [pieces, bytes].

    sent: codes are differences from what was told; note it there.
    """
    pieces, values = len(encoded), out.numel()
    _check(code, encoded, values)
    if not runs_triton(out):
        out.copy_(decode_reference(encoded, code, values // pieces).view(-1))
        if sent is not None:
            out.add_(torch.where(sent.told.isnan(), 0.0, sent.told))
            sent.told.copy_(out)
        return
    blocks = values // pieces // BLOCK
    decode_kernel[(cdiv(blocks, _ROWS), pieces)](
        encoded, encoded.view(torch.int16), out, None if sent is None else sent.told, blocks,
        encoded.shape[1], **kernel_constants(code), **LAUNCH_OPTIONS,
    )  # fmt: skip


def kernel_constants(code: ExchangeCode) -> dict[str, object]:
    """Compile-time constants of the kernels."""
    return {"BITS": code.bits, "INVERSE": inverse(code.levels or 1), "ROWS": _ROWS, "BLOCK": BLOCK}


def encode_reference(x: Tensor, code: ExchangeCode) -> Tensor:
    """Codes uint8 [pieces, bytes] of fp32 [pieces, values]."""
    pieces = len(x)
    if not code.levels:
        nan = torch.tensor(0x7FC0, dtype=torch.int16, device=x.device)  # one of many: the kernel's
        return torch.where(x.isnan(), nan, x.to(torch.bfloat16).view(torch.int16)).view(torch.uint8)
    x = x.reshape(pieces, -1, BLOCK)
    largest = (x.view(torch.int32) & 0x7FFFFFFF).amax(2)  # of the magnitudes' bits: NaN is above all
    finite = largest < 0x7F800000
    scale = (largest.view(torch.float32) * inverse(code.levels)).view(torch.int32)
    scale = (scale + 0xFFFF) >> 16
    scale = torch.where(scale < _SMALLEST_NORMAL, 0, scale)
    scale = torch.where(finite, scale, 0x7FC0).to(torch.int16)
    s = scale.view(torch.bfloat16).float()
    reciprocal = torch.where(finite & (s > 0), 1.0 / s, 0.0).unsqueeze(2)
    q = torch.where(finite.unsqueeze(2), torch.round(x * reciprocal), 0.0).to(torch.int8)
    if code.bits == 4:
        nibbles = (q + 8).view(torch.uint8).unflatten(2, (-1, 2))
        q = nibbles[..., 0] | (nibbles[..., 1] << 4)
    return torch.cat((q.view(torch.uint8).flatten(1), scale.view(torch.uint8).view(pieces, -1)), 1)


def decode_reference(encoded: Tensor, code: ExchangeCode, values: int) -> Tensor:
    """fp32 [pieces, values] of codes uint8 [pieces, bytes]."""
    if not code.levels:
        return encoded.contiguous().view(torch.bfloat16).float()
    codes, scales = encoded.split([code.code_bytes(values), 2 * (values // BLOCK)], 1)
    if code.bits == 4:
        q = torch.stack((codes & 15, codes >> 4), -1).flatten(1).to(torch.int8) - 8
    else:
        q = codes.contiguous().view(torch.int8)
    s = scales.contiguous().view(torch.bfloat16).float()
    return (q.float().view(len(encoded), -1, BLOCK) * s.unsqueeze(2)).flatten(1)
