"""Find the fastest tile configuration for a shape, on buffers of its own.

A fused update changes what it works on, so timing it on live weights would apply the step many times over.
The tuner therefore takes shapes, not tensors, and makes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from titanforge.kernels.codecs import Encoded, allocate, encode_, fp8_scale, get_codec
from titanforge.kernels.config import TileConfig, candidate_configs, remember_config, shape_key
from titanforge.kernels.epilogues import Epilogue
from titanforge.kernels.machine_cache import device_name
from titanforge.kernels.timing import replay_time
from titanforge.kernels.wgrad import fused_wgrad_update

_L2_BYTES = 200 << 20


def scratch_target(
    epilogue: Epilogue,
    codec_names: Sequence[str],
    shape: tuple[int, ...],
    device: torch.device,
    *,
    master: bool = False,
    weight_scale: float = 0.02,
    gradient_scale: float = 1.0,
) -> tuple[Encoded | None, list[Encoded], Tensor | None]:
    """(weight, states, master) of random values, for one weight [N, K] (or experts') that no training knows.

    gradient_scale: deviation of the gradients that the states are to look like averages of.
    """

    def filled(name: str, kind: str, scale: float) -> Encoded:
        part = allocate(get_codec(name), shape, device)
        value = torch.randn(shape, device=device) * scale
        if kind != "signed":
            value = value * value if kind == "square" else value.abs()
        if part.meta is not None and part.codec.kind == "tensor":
            magnitude = (value.sqrt() if part.codec.root else value.abs()).amax().reshape(1)
            part.meta[:2] = fp8_scale(magnitude, part.codec.levels)
        # Random bits are no use here, and drawing them in torch is slow.
        nearest = Encoded(part.values, get_codec(name.removesuffix("_sr")), part.meta)
        encode_(nearest, value)
        return part

    weight_name, *state_names = codec_names
    weight = filled(weight_name, "signed", weight_scale) if epilogue.updates_weight else None
    states = [filled(name, kind, gradient_scale) for name, kind in zip(state_names, epilogue.slot_kinds)]
    own_master = torch.randn(shape, device=device) * weight_scale if master else None
    return weight, states, own_master


def autotune(
    epilogue: Epilogue,
    codec_names: Sequence[str],
    shape: tuple[int, int],
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    master: bool = False,
    candidates: Sequence[TileConfig] | None = None,
    measure: Callable[[Sequence[Callable[[], Any]]], float] = replay_time,
    remember: bool = True,
) -> tuple[TileConfig, list[tuple[float, TileConfig]]]:
    """The fastest configuration for one weight [N, K] and a number of tokens, and all (milliseconds,
    configuration).

    codec_names: weight, first and second state (`fp32` where there is none), as the launch will have them.
    dtype: of dy and x. remember: write the winner to the cache that `choose_config` reads. A configuration
    that does not fit the device is passed over; RuntimeError if none fits.
    """
    n, k = shape
    dy = torch.randn(tokens, n, device=device, dtype=dtype)
    x = torch.randn(tokens, k, device=device, dtype=dtype)
    hyper = torch.full((epilogue.hyper_length,), 1e-3, device=device)
    rng = torch.zeros(2, dtype=torch.int64, device=device)
    bytes_of_one = sum(get_codec(name).dtype.itemsize for name in codec_names) * n * k
    copies = max(2, min(8, 1 + _L2_BYTES // max(bytes_of_one, 1)))
    targets = [scratch_target(epilogue, codec_names, shape, device, master=master) for _ in range(copies)]
    timed: list[tuple[float, TileConfig]] = []
    errors: list[str] = []
    for config in candidates if candidates is not None else candidate_configs(dtype, device):

        def call(target: tuple[Any, Any, Any], config: TileConfig = config) -> None:
            weight, states, own_master = target
            fused_wgrad_update(
                dy, x, weight, states, epilogue, hyper, master=own_master, rng=rng, config=config
            )

        try:
            time = measure([lambda target=target, call=call: call(target) for target in targets])
        except Exception as error:
            # Triton raises its own types for shared memory and registers; which, differs between its
            # versions.
            errors.append(f"{config}: {type(error).__name__}: {error}")
            continue
        timed.append((time, config))
    if not timed:
        raise RuntimeError("no tile configuration runs on this device:\n" + "\n".join(errors))
    timed.sort(key=lambda entry: entry[0])
    best = timed[0][1]
    if remember:
        remember_config(shape_key(device_name(device), n, k, tokens, dtype, "-".join(codec_names)), best)
    return best, timed
