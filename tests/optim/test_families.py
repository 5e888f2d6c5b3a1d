"""Every rule against an independent implementation, over many steps, to round-off."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from titanforge.optim.engine import RuleOptimizer
from titanforge.optim.param_groups import ParamGroupSpec
from titanforge.optim.registry import RULES, build_rule

STEPS = 12
LR, DECAY, BETA1, BETA2, EPS, MOMENTUM = 1e-2, 0.1, 0.9, 0.95, 1e-8, 0.9
OPTIONS = {
    "lr": LR,
    "weight_decay": DECAY,
    "beta1": BETA1,
    "beta2": BETA2,
    "eps": EPS,
    "momentum": MOMENTUM,
}
BETAS = (BETA1, BETA2)


def start_weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Two matrices of one shape (so that batching happens), a tall one and a vector."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 10), (6, 10), (12, 5), (7,)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator) * 0.1 for p in start_weights()]


def run_ours(
    name: str, weights: list[nn.Parameter] | None = None, lr: float = LR, **structure: object
) -> list[Tensor]:
    params = weights if weights is not None else start_weights(torch.float32)
    rule = build_rule(name, **structure)  # pyright: ignore[reportArgumentType]
    names = [f"p{i}" for i in range(len(params))]
    group = ParamGroupSpec("all", rule, {**OPTIONS, "lr": lr}, names, params)
    optimizer = RuleOptimizer([group])
    for step in range(STEPS):
        for param, gradient in zip(params, gradients(step)):
            param.grad = gradient.clone()
        optimizer.set_lr(1.0 - 0.05 * step)
        optimizer.step()
    return [param.detach() for param in params]


def run_torch(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[Tensor]:
    """In float64, so that the difference is our rounding alone."""
    params = start_weights()
    optimizer = make(params)
    for step in range(STEPS):
        for param, gradient in zip(params, gradients(step)):
            param.grad = gradient.to(param.dtype)
        for group in optimizer.param_groups:
            group["lr"] = LR * (1.0 - 0.05 * step)
        optimizer.step()
    return [param.detach() for param in params]


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 2e-6) -> None:
    for mine, other, start in zip(ours, theirs, start_weights()):
        moved = (other - start).abs().max()
        assert moved > 1e-3, "the reference must move, or the comparison says nothing"
        assert (mine.double() - other).abs().max() <= tolerance * max(1.0, float(other.abs().max()))


TORCH: dict[str, tuple[str, dict, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = {
    "sgd": ("sgd", {"momentum": 0.0}, lambda p: torch.optim.SGD(p, LR, weight_decay=DECAY)),
    "sgd_momentum": ("sgd", {}, lambda p: torch.optim.SGD(p, LR, MOMENTUM, weight_decay=DECAY)),
    "sgd_nesterov": (
        "sgd",
        {"nesterov": True},
        lambda p: torch.optim.SGD(p, LR, MOMENTUM, weight_decay=DECAY, nesterov=True),
    ),
    "adagrad": ("adagrad", {}, lambda p: torch.optim.Adagrad(p, LR, weight_decay=DECAY, eps=EPS)),
    "rmsprop": ("rmsprop", {}, lambda p: torch.optim.RMSprop(p, LR, BETA2, EPS, weight_decay=DECAY)),
    "adam": ("adam", {}, lambda p: torch.optim.Adam(p, LR, BETAS, EPS, DECAY)),
    "adamw": ("adamw", {}, lambda p: torch.optim.AdamW(p, LR, BETAS, EPS, DECAY)),
    "adamax": ("adamax", {}, lambda p: torch.optim.Adamax(p, LR, BETAS, EPS, DECAY)),
    "nadam": (
        "nadam",
        {},
        lambda p: torch.optim.NAdam(p, LR, BETAS, EPS, DECAY, decoupled_weight_decay=True),
    ),
    "radam": (
        "radam",
        {},
        lambda p: torch.optim.RAdam(p, LR, BETAS, EPS, DECAY, decoupled_weight_decay=True),
    ),
    "adafactor": (
        "adafactor",
        {},
        # torch's default epsilon follows the dtype: state the fp32 one for the fp64 reference.
        lambda p: torch.optim.Adafactor(
            p, LR, weight_decay=DECAY, eps=(torch.finfo(torch.float32).eps, 1e-3)
        ),
    ),
}


@pytest.mark.parametrize("case", TORCH)
def test_equals_torch(case: str) -> None:
    name, structure, make = TORCH[case]
    assert_close(run_ours(name, **structure), run_torch(make))


# Plain implementations, one tensor at a time in float64, written from the papers and not from our code.


def lion(w: Tensor, g: Tensor, s: dict, lr: float, t: int) -> Tensor:
    """Chen et al. 2023, algorithm 2."""
    m = s.setdefault("m", torch.zeros_like(w))
    update = torch.sign(torch.lerp(g, m, BETA1))
    s["m"] = torch.lerp(g, m, BETA2)
    return w * (1 - lr * DECAY) - lr * update


def adam_moments(g: Tensor, s: dict, t: int) -> tuple[Tensor, Tensor]:
    s["m"] = BETA1 * s.get("m", 0.0) + (1 - BETA1) * g
    s["v"] = BETA2 * s.get("v", 0.0) + (1 - BETA2) * g**2
    return s["m"] / (1 - BETA1**t), s["v"] / (1 - BETA2**t)


def lamb(w: Tensor, g: Tensor, s: dict, lr: float, t: int) -> Tensor:
    """You et al. 2020, algorithm 2."""
    m, v = adam_moments(g, s, t)
    update = m / (v.sqrt() + EPS) + DECAY * w
    return w - lr * (w.norm() / update.norm()) * update


def polar_by_newton_schulz(x: Tensor) -> Tensor:
    """Through the singular values, to which the odd quintic applies one by one."""
    u, sigma, v = torch.linalg.svd(x / x.norm(), full_matrices=False)
    for _ in range(5):
        sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
    return u @ torch.diag(sigma) @ v


def muon(w: Tensor, g: Tensor, s: dict, lr: float, t: int) -> Tensor:
    """Jordan et al. 2024, the update scaled to root mean square 0.2 (Liu et al. 2025)."""
    s["m"] = MOMENTUM * s.get("m", 0.0) + g
    return w * (1 - lr * DECAY) - lr * 0.2 * math.sqrt(max(w.shape)) * polar_by_newton_schulz(s["m"])


def muon_nesterov(w: Tensor, g: Tensor, s: dict, lr: float, t: int) -> Tensor:
    s["m"] = MOMENTUM * s.get("m", 0.0) + g
    direction = polar_by_newton_schulz(g + MOMENTUM * s["m"])
    return w * (1 - lr * DECAY) - lr * 0.2 * math.sqrt(max(w.shape)) * direction


def rmnp(w: Tensor, g: Tensor, s: dict, lr: float, t: int) -> Tensor:
    """Each row of the momentum to unit norm, on the shared scale."""
    s["m"] = MOMENTUM * s.get("m", 0.0) + g
    rows = torch.stack([row / row.norm() for row in s["m"]])
    return w * (1 - lr * DECAY) - lr * 0.2 * math.sqrt(max(w.shape)) * rows


def scion(w: Tensor, g: Tensor, s: dict, lr: float, t: int) -> Tensor:
    """Pethick et al. 2025, spectral norm; alpha = 1 - momentum."""
    s["m"] = MOMENTUM * s.get("m", 0.0) + (1 - MOMENTUM) * g
    out_features, in_features = w.shape
    scale = math.sqrt(out_features / in_features)
    return w * (1 - lr * DECAY) - lr * scale * polar_by_newton_schulz(s["m"])


def adam_mini(w: Tensor, g: Tensor, s: dict, lr: float, t: int) -> Tensor:
    """Zhang et al. 2024: one second moment per output row, or per vector."""
    blocks = g.reshape(g.shape[0], -1) if g.dim() > 1 else g.reshape(1, -1)
    s["m"] = BETA1 * s.get("m", 0.0) + (1 - BETA1) * g
    s["v"] = BETA2 * s.get("v", 0.0) + (1 - BETA2) * torch.stack([b.pow(2).mean() for b in blocks])
    denominator = (s["v"] / (1 - BETA2**t)).sqrt() + EPS
    step = (s["m"] / (1 - BETA1**t)).reshape(blocks.shape) / denominator[:, None]
    return w * (1 - lr * DECAY) - lr * step.reshape(w.shape)


def adalomo(w: Tensor, g: Tensor, s: dict, lr: float, t: int) -> Tensor:
    """Lv et al. 2023, algorithm 1, with the decay 1 - t^-0.8 of its authors' code."""
    beta = 1 - t**-0.8
    squares = g**2 + EPS**2
    if g.dim() == 1:
        s["v"] = beta * s.get("v", 0.0) + (1 - beta) * squares
        u = g / s["v"].sqrt()
    else:
        s["r"] = beta * s.get("r", 0.0) + (1 - beta) * squares.sum(1)
        s["c"] = beta * s.get("c", 0.0) + (1 - beta) * squares.sum(0)
        u = g / (torch.outer(s["r"], s["c"]) / s["r"].sum()).sqrt()
    u = u / max(1.0, float(u.pow(2).mean().sqrt()))
    return w * (1 - lr * DECAY) - lr * max(1e-3, float(w.pow(2).mean().sqrt())) * u


def sm3(w: Tensor, g: Tensor, s: dict, lr: float, t: int) -> Tensor:
    """Anil et al. 2019, SM3-II, entry by entry."""
    if g.dim() == 1:
        s["v"] = s.get("v", torch.zeros_like(g)) + g**2
        return w * (1 - lr * DECAY) - lr * g / (s["v"].sqrt() + EPS)
    rows = s.setdefault("rows", [0.0] * g.shape[0])
    columns = s.setdefault("columns", [0.0] * g.shape[1])
    new_rows, new_columns = [0.0] * len(rows), [0.0] * len(columns)
    out = w.clone()
    for i in range(len(rows)):
        for j in range(len(columns)):
            nu = min(rows[i], columns[j]) + float(g[i, j]) ** 2
            out[i, j] = w[i, j] * (1 - lr * DECAY) - lr * g[i, j] / (math.sqrt(nu) + EPS)
            new_rows[i], new_columns[j] = max(new_rows[i], nu), max(new_columns[j], nu)
    s["rows"], s["columns"] = new_rows, new_columns
    return out


def lars(w: Tensor, g: Tensor, s: dict, lr: float, t: int) -> Tensor:
    """You et al. 2017, algorithm 1."""
    ratio = 0.001 * w.norm() / (g.norm() + DECAY * w.norm())
    s["m"] = MOMENTUM * s.get("m", 0.0) + lr * ratio * (g + DECAY * w)
    return w - s["m"]


PLAIN: dict[str, tuple[str, dict, Callable[..., Tensor], float]] = {
    "lion": ("lion", {}, lion, 2e-6),
    "lamb": ("lamb", {}, lamb, 2e-6),
    "muon": ("muon", {}, muon, 2e-5),
    "rmnp": ("rmnp", {}, rmnp, 2e-6),
    "muon_nesterov": ("muon", {"nesterov": True}, muon_nesterov, 2e-5),
    "scion": ("scion", {}, scion, 2e-5),
    "adam_mini": ("adam_mini", {}, adam_mini, 2e-6),
    "adalomo": ("adalomo", {}, adalomo, 2e-6),
    "sm3": ("sm3", {}, sm3, 2e-6),
    "lars": ("lars", {}, lars, 2e-6),
}


@pytest.mark.parametrize("case", PLAIN)
def test_equals_the_paper(case: str) -> None:
    name, structure, step_of, tolerance = PLAIN[case]
    rule = build_rule(name, **structure)
    count = 3 if rule.matrix_only else 4  # Muon and Scion take no vector
    weights = [param.detach() for param in start_weights()[:count]]
    states: list[dict] = [{} for _ in weights]
    peak = 100 * LR if name == "lars" else LR  # its ratio is a thousand times smaller than a step of Adam
    for step in range(STEPS):
        lr = peak * (1.0 - 0.05 * step)
        weights = [
            step_of(w, g.double(), s, lr, step + 1) for w, g, s in zip(weights, gradients(step), states)
        ]
    ours = run_ours(name, start_weights(torch.float32)[:count], peak, **structure)
    assert_close(ours, weights, tolerance)


def test_every_rule_has_a_reference() -> None:
    elsewhere = {"dion", "dobb"}  # test_dion.py, test_dobb.py
    assert {name for name, *_ in TORCH.values()} | {name for name, *_ in PLAIN.values()} | elsewhere == set(
        RULES
    )


def test_muon_equals_torch() -> None:
    """torch iterates in bfloat16: equal to its precision, not to round-off."""
    params = start_weights(torch.float32)[:3]
    reference = torch.optim.Muon(
        params, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for param, gradient in zip(params, gradients(0)):
        param.grad = gradient.clone()
    reference.step()
    ours = start_weights(torch.float32)[:3]
    group = ParamGroupSpec("all", build_rule("muon", nesterov=True), dict(OPTIONS), list("abc"), ours)
    optimizer = RuleOptimizer([group])
    for param, gradient in zip(ours, gradients(0)):
        param.grad = gradient.clone()
    optimizer.step()
    for mine, other, start in zip(ours, params, start_weights(torch.float32)):
        assert (mine - other).norm() < 0.03 * (other - start).norm()
