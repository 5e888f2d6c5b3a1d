"""Initial weights that depend on the seed and the parameter's name, and on nothing else.

Element i (its index in the whole tensor) of parameter ``name`` is a pure function of (seed, name, i): the
same on any rank, device, dtype (up to the final rounding) and DTensor layout. Integer hashing replaces a
generator's state, and the normal distribution's inverse is computed by additions, multiplications, divisions
and square roots alone, which IEEE 754 fixes to the last bit; log and erf differ between libraries.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titanforge.models.layers.init_spec import Constant, InitSpec

# Elements handled at once: on the CPU as many as the cache holds, on a GPU as many as fill it.
CPU_CHUNK, GPU_CHUNK = 2**15, 2**24

# Names that wrappers put into a parameter's name; a wrapped model must draw the same numbers.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")

# splitmix64 (Steele, Lea & Flood 2014), as signed 64-bit integers
_GOLDEN, _MIX_1, _MIX_2 = (
    value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_UNIFORM_BITS = 35  # finest draw 2⁻³⁶: 6.66 standard deviations, within the approximation's reach below

# Algorithm AS 241, PPND7 (Wichura 1988): relative error about 1e-7. Highest power first.
_CENTRE_OVER = (59.10937472, 159.29113202, 50.434271938, 3.3871327179)
_CENTRE_UNDER = (67.1875636, 78.757757664, 17.895169469, 1.0)
_TAIL_OVER = (0.17023821103, 1.3067284816, 2.75681539, 1.4234372777)
_TAIL_UNDER = (0.12021132975, 0.7370016425, 1.0)


@torch.no_grad()
def initialize_weights(model: nn.Module, seed: int) -> None:
    """Give every parameter its declared initial value and refill every buffer, in place.

    A module declares its own by ``init_spec() -> {name relative to it: InitSpec}``, and refills buffers in
    ``reset_buffers()``. Parameters may be plain tensors or DTensors, sharded evenly or not; nothing is
    communicated. Raises ValueError for a parameter or buffer that no module declares, that two do, or that is
    still on the meta device.
    """
    specs, buffers = _declared(model)
    for name, parameter in model.named_parameters():
        name = _plain(name)
        if name not in specs:
            raise ValueError(f"no module declares how to initialise {name}: add it to an init_spec()")
        _fill(parameter, name, specs[name], seed)
    for name, _ in model.named_buffers():
        if _plain(name).rpartition(".")[0] not in buffers:
            raise ValueError(f"no module refills the buffer {_plain(name)}: give its module reset_buffers()")


def _declared(model: nn.Module) -> tuple[dict[str, InitSpec], set[str]]:
    """All init specs by full parameter name, and the names of the modules whose buffers were refilled."""
    specs: dict[str, InitSpec] = {}
    buffers: set[str] = set()
    existing = {_plain(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    for prefix, module in model.named_modules():
        prefix = _plain(prefix + ".") if prefix else ""
        # Looked up on the class: wrappers forward unknown attributes to what they wrap.
        if hasattr(type(module), "reset_buffers"):
            module.reset_buffers()  # pyright: ignore
            buffers.add(prefix.removesuffix("."))
        if hasattr(type(module), "init_spec"):
            for relative, spec in module.init_spec().items():  # pyright: ignore
                name = prefix + relative
                if name in specs or name not in existing:
                    what = "is declared twice" if name in specs else "does not exist"
                    raise ValueError(f"{type(module).__name__}.init_spec: parameter {name} {what}")
                specs[name] = spec
    return specs, buffers


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _fill(parameter: torch.Tensor, name: str, spec: InitSpec, seed: int) -> None:
    """Write the part of the tensor that this rank holds."""
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device: materialise the model (to_empty) first")
    shape, offset, local = tuple(parameter.shape), (0,) * parameter.dim(), parameter
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        local_shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        assert tuple(local.shape) == tuple(local_shape), (name, local.shape, local_shape)
    if isinstance(spec, Constant):
        local.fill_(spec.value)
        return
    if local.numel() == 0:
        return
    key = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=16).digest()
    keys = (int.from_bytes(key[:8], signed=True), int.from_bytes(key[8:], signed=True))
    # x = quantile of the truncated normal: a uniform of (0, 1) is first squeezed between the cuts' levels.
    squeeze = 1.0 if spec.cutoff == math.inf else math.erf(spec.cutoff / math.sqrt(2))
    flat = local.view(-1) if local.is_contiguous() else local.new_empty(local.numel())
    for start, index in _global_indices(local.shape, shape, offset, local.device):
        value = standard_normal(index, keys, squeeze)
        if spec.cutoff != math.inf:
            value.clamp_(-spec.cutoff, spec.cutoff)  # the approximation's last digit
        flat[start : start + value.numel()] = value.mul_(
            spec.std
        ).float()  # one way of rounding for all dtypes
    if not local.is_contiguous():
        local.copy_(flat.view(local.shape))


def _global_indices(
    local_shape: tuple[int, ...], shape: tuple[int, ...], offset: tuple[int, ...], device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """Chunks of a local block: flat index in it of the first element, each element's index in the whole."""
    limit = GPU_CHUNK if device.type == "cuda" else CPU_CHUNK
    last = local_shape[-1] if local_shape else 1
    # Index in the whole tensor of each row's first element.
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    stride = 1
    for size in shape:
        stride *= size
    for axis in range(len(shape)):
        stride //= shape[axis]
        if axis == len(shape) - 1:
            starts = starts + offset[axis]
        else:
            along = (torch.arange(local_shape[axis], device=device) + offset[axis]) * stride
            starts = (starts[:, None] + along).view(-1)
    within = torch.arange(last, device=device)
    for column in range(0, last, limit):
        columns = within[column : column + limit]
        rows = max(1, limit // columns.numel()) if last <= limit else 1
        for row in range(0, starts.numel(), rows):
            block = starts[row : row + rows, None] + columns
            yield row * last + column, block.view(-1)


def standard_normal(index: torch.Tensor, keys: tuple[int, int], squeeze: float = 1.0) -> torch.Tensor:
    """float64 normal deviates of int64 counters; overwrites ``index``.

    ``squeeze`` < 1 keeps the middle share of the distribution: erf(c/√2) cuts it at c standard deviations.
    """
    bits = _hash(index, keys)
    negative = (bits & 1) == 1
    # p: the level in the lower half, an odd multiple of 2⁻³⁷ in (0, 1/2), then kept away from the cut.
    p = _shift_right(bits, 64 - _UNIFORM_BITS).mul_(2).add_(1).double().mul_(2.0 ** -(_UNIFORM_BITS + 2))
    q = p.neg().add_(0.5).mul_(squeeze)  # distance from the median: exact for squeeze = 1
    z = _ratio((q * q).neg_().add_(0.180625), _CENTRE_OVER, _CENTRE_UNDER).mul_(q)
    tail = q > 0.425
    level = q[tail].neg_().add_(0.5)
    z[tail] = _ratio(_log(level).neg_().sqrt_().sub_(1.6), _TAIL_OVER, _TAIL_UNDER)
    return torch.where(negative, -z, z)


def _hash(x: torch.Tensor, keys: tuple[int, int]) -> torch.Tensor:
    """splitmix64 of a counter, twice, each with its key: integer arithmetic modulo 2⁶⁴, in place."""
    x.mul_(_GOLDEN)
    for key in keys:
        x.add_(key)
        x.bitwise_xor_(_shift_right(x, 30)).mul_(_MIX_1)
        x.bitwise_xor_(_shift_right(x, 27)).mul_(_MIX_2)
        x.bitwise_xor_(_shift_right(x, 31))
    return x


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64 (torch's is arithmetic)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _ratio(x: torch.Tensor, over: tuple[float, ...], under: tuple[float, ...]) -> torch.Tensor:
    """Quotient of two polynomials, coefficients from the highest power down (Horner)."""
    return _polynomial(x, over).div_(_polynomial(x, under))


def _polynomial(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    # Separate multiplications and additions: one fused operation would round differently on some devices.
    result = (x * coefficients[0]).add_(coefficients[1])
    for coefficient in coefficients[2:]:
        result.mul_(x).add_(coefficient)
    return result


def _log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of float64 in (0, 1), to about 1e-12, from exactly rounded operations alone.

    x = m·2ᵉ with m in [1/√2, √2); log m = 2 artanh((m-1)/(m+1)), by its series.
    """
    m, e = torch.frexp(x)
    low = m < math.sqrt(0.5)
    m = torch.where(low, m * 2, m)
    s = (m - 1).div_(m + 1)
    series = _polynomial(s * s, tuple(2.0 / k for k in range(15, 0, -2)))
    return series.mul_(s).add_((e - low.int()).double().mul_(math.log(2)))
