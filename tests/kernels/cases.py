"""Hyperparameters, recipes and comparisons shared by the kernel tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titanforge.kernels.codecs import Encoded, allocate, encode_, get_codec
from titanforge.kernels.epilogues import Epilogue

VALUES = {
    "apply": 1.0, "lr": 0.02, "weight_decay": 0.1, "grad_scale": 0.7, "momentum": 0.9, "eps": 1e-6, "alpha":
    0.95,
    "one_minus_alpha": 0.05, "beta1": 0.9, "one_minus_beta1": 0.1, "beta2": 0.95, "one_minus_beta2": 0.05,
    "inverse_correction1": 2.7, "inverse_sqrt_correction2": 2.2, "gradient_factor": 0.3, "momentum_factor":
    0.8,
    "adaptive_factor": 0.4, "plain_factor": 0.05, "decay": 0.9, "gain": 0.5,
}  # fmt: skip

RECIPES = {
    # name: weight codec, codec by slot kind, fp32 master
    "fp32": ("fp32", {"signed": "fp32", "square": "fp32", "magnitude": "fp32"}, False),
    "bf16": ("bf16", {"signed": "bf16", "square": "bf16", "magnitude": "bf16"}, False),
    "master": ("bf16", {"signed": "fp32", "square": "fp32", "magnitude": "fp32"}, True),
    "bf16_sr": ("bf16_sr", {"signed": "bf16_sr", "square": "bf16_sr", "magnitude": "bf16_sr"}, False),
    "int8": ("bf16", {"signed": "int8", "square": "uint8_root", "magnitude": "uint8"}, False),
    "int8_sr": ("bf16_sr", {"signed": "int8_sr", "square": "uint8_root_sr", "magnitude": "uint8_sr"}, False),
    "fp8": ("fp8_e4m3", {"signed": "fp8_e5m2", "square": "fp8_root", "magnitude": "fp8_magnitude"}, False),
}


def hyper_vector(epilogue: Epilogue, device: torch.device | str = "cpu", **changed: float) -> Tensor:
    values = {**VALUES, **changed}
    return torch.tensor([values[name] for name in epilogue.hyper_names], dtype=torch.float32, device=device)


class Weight:
    """One weight with its states, stored by a recipe, and everything that a step changes."""

    def __init__(
        self, epilogue: Epilogue, recipe: str, shape: Sequence[int], device: torch.device | str, seed: int = 0
    ) -> None:
        weight_codec, by_kind, has_master = RECIPES[recipe]
        generator = torch.Generator().manual_seed(seed)
        value = torch.randn(tuple(shape), generator=generator)
        self.weight = stored(weight_codec, value, device)
        self.states = [
            stored(by_kind[kind], (value.flip(-1) if value.dim() else value).abs() * 0.1 + 1e-3, device)
            for kind in epilogue.slot_kinds
        ]
        self.master = value.to(device) if has_master and epilogue.updates_weight else None

    def tensors(self) -> list[Tensor]:
        parts = [self.weight, *self.states]
        found = [part.values for part in parts] + [part.meta for part in parts if part.meta is not None]
        return [*found, self.master] if self.master is not None else found


def stored(codec_name: str, value: Tensor, device: torch.device | str) -> Encoded:
    encoded = allocate(get_codec(codec_name), value.shape)
    if encoded.meta is not None and encoded.codec.kind == "tensor":
        encoded.meta[:2] = 2.0**-6
    encode_(encoded, value)
    meta = encoded.meta.to(device) if encoded.meta is not None else None
    return Encoded(encoded.values.to(device), encoded.codec, meta)


def same_bits(left: Tensor, right: Tensor) -> bool:
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    same_kind = left.shape == right.shape and left.dtype == right.dtype
    return same_kind and torch.equal(left.view(raw).cpu(), right.view(raw).cpu())


def assert_same_bits(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    assert len(left) == len(right)
    for index, (a, b) in enumerate(zip(left, right)):
        if not same_bits(a, b):
            different = (a.float() != b.float()).float().mean().item()
            raise AssertionError(
                f"tensor {index} ({a.dtype}, {tuple(a.shape)}) differs in {different:.2%} of places"
            )


def assert_same_state(found: Encoded, expected: Encoded) -> None:
    """A stored state and the CPU's: the same bits, but a root taken on a GPU is its approximate one, so that
    now and then a code is the next one (and a scale a few units in the last place off).
    """
    if not (found.codec.root and found.values.is_cuda):
        assert_same_bits([found.values], [expected.values])
        if found.meta is not None and expected.meta is not None:
            assert_same_bits([found.meta], [expected.meta])
        return
    codes, wanted = (part.values.cpu().view(torch.uint8).int() for part in (found, expected))
    assert ((codes - wanted).abs() <= 1).all()
    assert (codes != wanted).sum() <= 1e-2 * codes.numel()  # of an empty tensor too
    assert found.meta is not None
    assert expected.meta is not None
    assert torch.allclose(found.meta.cpu(), expected.meta, rtol=2.0**-20, atol=0.0)


def assert_near_reference(found: Tensor, expected: Tensor, before: Tensor) -> None:
    """A stored weight, up to how square roots and quotients are rounded.

    torch's root on CPU is up to 1 unit in the last place off, the GPU's approximate root and quotient up to
    2, so the step may be off by 2^-20 of itself, the sum by a rounding of the weight, and the stored weight
    by one code.
    """
    new, old, value = expected.float().cpu(), before.float().cpu(), found.float().cpu()
    precision = torch.finfo(expected.dtype).eps if expected.dtype != torch.float32 else 2.0**-23
    floor = torch.finfo(expected.dtype).smallest_normal * precision
    error = (value - new).abs()
    assert (
        error <= (new - old).abs() * 2.0**-20 + torch.maximum(new.abs(), value.abs()) * precision + floor
    ).all()
