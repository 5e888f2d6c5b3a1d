"""What the kernel benchmarks measure: shapes, storage recipes, buffers, floors, and the standard path."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from titanforge.kernels.autotune import scratch_target
from titanforge.kernels.codecs import BLOCK, Encoded, get_codec
from titanforge.kernels.epilogues import Epilogue, get_epilogue
from titanforge.kernels.timing import replay_time

BANDWIDTH, FLOPS = 4.25e12, 730e12
GATE_UP, DOWN, ATTENTION, KEY_VALUE = (14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096)
LAYER = ((GATE_UP, 2), (DOWN, 1), (ATTENTION, 2), (KEY_VALUE, 2))  # one Llama-3.1-8B layer
LAYERS = 32
QWEN3_32B = (((25600, 5120), 2), ((5120, 25600), 1), ((8192, 5120), 1), ((5120, 8192), 1), ((1024, 5120), 2))
EXPERTS = (((128, 768, 2048), 2), ((128, 2048, 768), 1))  # of one Qwen3-30B-A3B layer
MODELS = {
    "Llama-8B": (LAYER, LAYERS),
    "Qwen3-32B": (QWEN3_32B, 64),
    "Qwen3-30B-A3B experts": (EXPERTS, 48),
}
"""By model: (shape, number in a layer) of its linears, and layers."""
MERGED = {
    "Llama-8B": ((2 * 14336, 4096), (4096 + 2 * 1024, 4096)),
    "Qwen3-32B": ((2 * 25600, 5120), (8192 + 2 * 1024, 5120)),
}
"""By model: its linears of one input as `forge.merge_projections` lays them, gate and up, and q, k and v."""


def tuned_shapes(model: str, recipe: str) -> list[tuple[int, int]]:
    """Shapes [N, K] of the launches that a training step of a model makes for its linears.

    Those of merged linears come first: one launch takes them where nothing goes by a weight's name (bits of
    random rounding) or by a whole weight (scales of fp8 states).
    """
    weight, by_kind, master = RECIPES[recipe]
    apart = master or any(
        name.endswith("_sr") or name.startswith("fp8") for name in (weight, *by_kind.values())
    )
    layer, _ = MODELS[model]
    alone = [shape for shape, _ in layer if len(shape) == 2]
    return [*(() if apart else MERGED[model]), *alone]


RECIPES: dict[str, tuple[str, dict[str, str], bool]] = {
    # name: weight codec, state codec by slot kind, fp32 master
    "bf16": ("bf16", dict.fromkeys(("signed", "square", "magnitude"), "bf16"), False),
    "int8": ("bf16", {"signed": "int8", "square": "uint8_root", "magnitude": "uint8"}, False),
    "bf16_sr": ("bf16_sr", dict.fromkeys(("signed", "square", "magnitude"), "bf16_sr"), False),
    "fp32_states": ("bf16", dict.fromkeys(("signed", "square", "magnitude"), "fp32"), False),
    "master": ("bf16", dict.fromkeys(("signed", "square", "magnitude"), "fp32"), True),
    "fp8": ("bf16", {"signed": "fp8_e4m3", "square": "fp8_root", "magnitude": "fp8_magnitude"}, False),
    "fp8_sr": ("bf16_sr", {"signed": "fp8_e4m3", "square": "fp8_root", "magnitude": "fp8_magnitude"}, False),
    "int8_sr": ("bf16_sr", {"signed": "int8_sr", "square": "uint8_root_sr", "magnitude": "uint8_sr"}, False),
}

HYPER = {
    "apply": 1.0, "lr": 1e-3, "weight_decay": 0.1, "grad_scale": 1.0, "momentum": 0.9, "eps": 1e-8, "alpha":
    0.95,
    "one_minus_alpha": 0.05, "beta1": 0.9, "one_minus_beta1": 0.1, "beta2": 0.95, "one_minus_beta2": 0.05,
    "inverse_correction1": 1 / (1 - 0.9**5), "inverse_sqrt_correction2": (1 - 0.95**5) ** -0.5,
    "gradient_factor": 0.3, "momentum_factor": 0.8, "adaptive_factor": 0.4, "plain_factor": 0.05, "decay":
    0.9,
    "gain": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    rule: str
    recipe: str
    shape: tuple[int, ...]
    tokens: int


def codec_names(rule: Epilogue, recipe: str) -> list[str]:
    """Codec names of weight and two states."""
    weight, by_kind, _ = RECIPES[recipe]
    states = [by_kind[kind] for kind in rule.slot_kinds]
    return [weight if rule.updates_weight else "fp32", *states, *["fp32"] * (2 - len(states))]


def moved_bytes(rule: Epilogue, recipe: str, weights: int) -> float:
    """Bytes read and written once: weight, states, scales, master."""
    names = codec_names(rule, recipe)
    used = ([names[0]] if rule.updates_weight else []) + names[1 : 1 + len(rule.slots)]
    total = 0.0
    for name in used:
        codec = get_codec(name)
        total += codec.dtype.itemsize + (4 / BLOCK if codec.kind == "block" else 0)
    if RECIPES[recipe][2] and rule.updates_weight:
        # The master is read and written, and the weight is then only written.
        total += 4 - get_codec(names[0]).dtype.itemsize / 2
    return 2 * total * weights


def floor_ms(rule: Epilogue, recipe: str, shape: tuple[int, ...], tokens: int) -> float:
    """The time below which no kernel can be on this card."""
    moved, products = moved_bytes(rule, recipe, math.prod(shape)), 2.0 * tokens * math.prod(shape[-2:])
    return max(moved / BANDWIDTH, products / FLOPS) * 1e3


def hyper_vector(rule: Epilogue, device: torch.device) -> Tensor:
    """Fixed hyperparameters of a rule."""
    return torch.tensor([HYPER[name] for name in rule.hyper_names], dtype=torch.float32, device=device)


@dataclass
class Set:
    """One weight with its states."""

    weight: Encoded | None
    states: list[Encoded]
    master: Tensor | None

    def parts(self) -> list[Encoded]:
        """Weight, if any, and states."""
        return ([self.weight] if self.weight is not None else []) + self.states

    def clone(self) -> Set:
        """A copy with its own storage."""

        def copy(part: Encoded) -> Encoded:
            return Encoded(
                part.values.clone(), part.codec, part.meta.clone() if part.meta is not None else None
            )

        return Set(
            copy(self.weight) if self.weight is not None else None,
            [copy(state) for state in self.states],
            self.master.clone() if self.master is not None else None,
        )

    def tensors(self) -> list[Tensor]:
        """Everything that a step writes, as bytes."""
        found = [part.values for part in self.parts()] + [p.meta for p in self.parts() if p.meta is not None]
        return [
            tensor.view(torch.uint8)
            for tensor in [*found, *([self.master] if self.master is not None else [])]
        ]


def rms_error(found: Tensor, exact: Tensor) -> float:
    """Relative root-mean-square error."""
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-300))


class Operands:
    """dy and x of one shape and token count, and the gradient in fp64 for one of the checks.

    Of a shape of experts, the tokens are dealt unevenly, and one expert has none.
    """

    def __init__(self, shape: tuple[int, ...], tokens: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        n, k = shape[-2:]
        self.offsets: Tensor | None = None
        if len(shape) == 3:
            shares = torch.rand(shape[0], generator=torch.Generator().manual_seed(0))
            shares[shape[0] // 2] = 0
            bounds = torch.cat((torch.zeros(1), (shares / shares.sum()).cumsum(0))).mul(tokens).round()
            self.offsets = bounds.to(torch.int32).to(device)
        self.dy = (torch.randn(tokens, n, device=device, generator=generator) * 0.01).bfloat16()
        self.x = torch.randn(tokens, k, device=device, generator=generator).bfloat16()

    def exact_gradient(self) -> Tensor:
        """G in fp64."""
        return self.dy.double().t() @ self.x.double()


def prepare(cell: Cell, device: torch.device, seed: int) -> Set:
    """Random storage at the scale that training has: states of the gradient's size, weights of 0.02."""
    rule = get_epilogue(cell.rule)
    torch.manual_seed(seed)
    weight, states, master = scratch_target(
        rule, codec_names(rule, cell.recipe), cell.shape, device,
        master=RECIPES[cell.recipe][2] and rule.updates_weight,
        gradient_scale=0.01 * max(cell.tokens, 1) ** 0.5,
    )  # fmt: skip
    return Set(weight, states, master)


def buffer_count(cell: Cell) -> int:
    """Sets to rotate through, so that the L2 of 50 MB does not hold the next one."""
    size = moved_bytes(get_epilogue(cell.rule), cell.recipe, math.prod(cell.shape)) / 2
    return max(2, min(8, math.ceil(400e6 / max(size, 1.0))))


def torch_adamw(
    weights: list[Tensor], grads: list[Tensor], m: list[Tensor], v: list[Tensor], steps: list[Tensor]
) -> None:
    """torch's fused AdamW kernel, without its optimizer's host work."""
    torch.ops.aten._fused_adamw_(
        weights, grads, m, v, [], steps, lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def time_standard(cell: Cell, operands: Operands, device: torch.device) -> dict[str, float]:
    """Milliseconds of cuBLAS G alone, and of G followed by torch's fused AdamW (bf16), as one graph."""
    count = buffer_count(Cell("adamw", "bf16", cell.shape, cell.tokens))
    n, k = cell.shape
    grads = [torch.empty(n, k, device=device, dtype=torch.bfloat16) for _ in range(count)]
    weights = [torch.randn(n, k, device=device).mul_(0.02).bfloat16() for _ in range(count)]
    moments = [(torch.randn_like(w), torch.rand_like(w)) for w in weights]
    steps = [torch.tensor(5.0, device=device) for _ in range(count)]

    def matmul(index: int) -> None:
        torch.mm(operands.dy.t(), operands.x, out=grads[index])

    def adamw(index: int) -> None:
        m, v = moments[index]
        torch_adamw([weights[index]], [grads[index]], [m], [v], [steps[index]])

    def both(index: int) -> None:
        matmul(index)
        adamw(index)

    def timed(function: Callable[[int], None]) -> float:
        return replay_time([lambda index=index: function(index) for index in range(count)])

    return {"cublas_ms": timed(matmul), "torch_adamw_ms": timed(adamw), "standard_ms": timed(both)}
