"""Kernels of `scripts/bench/matrix.py`: right against float64; refresh and symmetric products timed."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from titanforge.kernels._triton import INTERPRET
from titanforge.kernels.block_basis import WHOLE_BLOCK, SignConfig, SignUpdates, sign_updates
from titanforge.kernels.cholesky_qr import cholesky_qr_refresh, config_for, reference_refresh
from titanforge.kernels.codecs import as_encoded
from titanforge.kernels.newton_schulz import newton_schulz_iterations, reference_iterations
from titanforge.kernels.symmetric import autotune_symmetric, symmetric_product
from titanforge.kernels.symmetric_config import candidates
from titanforge.kernels.timing import replay_time
from titanforge.optim.batches import Batch
from titanforge.optim.local_update import LocalWeight
from titanforge.optim.low_rank_in_place import low_rank_update
from titanforge.optim.matrix_options import DionOptions, MatrixOptions
from titanforge.optim.registry import build_rule

Left = Callable[[], float]
OMEGA = 1e-2
QUINTIC = (3.4445, -4.7750, 2.0315)
# (model, count of blocks, their width): q, k, v, out and up read `dim`, down reads 4 `dim`.
REFRESHES = {
    "GPT-2 Small, B = 1": ((60, 768), (12, 3072)),
    "GPT-2 XL, B = 16": ((3840, 100), (768, 400)),
}


def events(function: Callable[[], object], repeats: int, on_gpu: bool) -> float:
    """Median milliseconds of eager calls, after one that is not timed."""
    function()
    if not on_gpu:
        return float("nan")
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measured(functions: Sequence[Callable[[], object]], on_gpu: bool) -> float:
    if on_gpu:
        return replay_time(functions)
    functions[0]()
    return float("nan")


def blocks(count: int, width: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Second moments with spectra over four decades, fp32, and orthonormal bf16 bases."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.randn(min(count, 8), width, width, device=device, generator=generator)
    basis = torch.linalg.qr(drawn).Q.contiguous()
    decay = torch.logspace(0, -4, width, device=device)
    c = (basis * decay) @ basis.mT
    other = torch.linalg.qr(drawn.mT + 0.1 * drawn).Q.to(torch.bfloat16).contiguous()
    index = torch.arange(count, device=device) % len(drawn)
    return c[index].contiguous(), other[index].contiguous()


def exact_refresh(c: Tensor, u: Tensor) -> Tensor:
    """Q of (C + eps I) U with a positive diagonal of R, as Cholesky QR makes it; all in float64."""
    d = c.double()
    largest = d.abs().sum(-1).amax(-1)[:, None, None]
    exact, r = torch.linalg.qr((d / largest) @ u.double() + OMEGA * u.double())
    return exact * torch.sign(r.diagonal(dim1=-2, dim2=-1))[:, None]


def correctness(args: argparse.Namespace, left: Left) -> list[dict[str, Any]]:
    device, rows = args.device, []
    wide = ((4, 16), (4, 100), (3, 400), (2, 768), (1, 3072), (1, 4096))
    for count, width in ((2, 40), (2, 70)) if args.tiny else wide:
        c, u = blocks(count, width, device)
        c[0, 0, 0] = torch.nan if count > 1 else c[0, 0, 0]
        fresh, failed = cholesky_qr_refresh(c, u, OMEGA)
        plain, _ = reference_refresh(c, u, OMEGA)
        good = [index for index in range(count) if count == 1 or index]
        exact = exact_refresh(c[good], u[good])
        eye = torch.eye(width, device=device, dtype=torch.float64)
        mine, theirs = (one[good].double() for one in (fresh, plain))
        rounded = exact.to(torch.bfloat16).double()
        rows.append(
            {
                "what": f"refresh {count} x {width}",
                "error": float((mine - exact).abs().max()),
                "torch cholesky": float((theirs - exact).abs().max()),
                "exact, rounded": float((rounded - exact).abs().max()),
                "|QtQ - I|": float((mine.mT @ mine - eye).abs().max()),
                "exact, rounded |QtQ - I|": float((rounded.mT @ rounded - eye).abs().max()),
                "as it should": bool(
                    failed.tolist() == [count > 1 and index == 0 for index in range(count)]
                    and (count == 1 or torch.equal(fresh[0], u[0]))
                    and (mine - exact).abs().max() <= 4 * (rounded - exact).abs().max()
                ),
            }
        )
    for shape in ((2, 40, 64),) if args.tiny else ((4, 1600, 1600), (2, 1600, 6400), (2, 6400, 1600)):
        x = torch.randn(shape, device=device)
        x = (x / x.norm(dim=(1, 2), keepdim=True)).bfloat16()
        exact = reference_iterations(x.double(), 5, QUINTIC)
        mine, plain = (f(x.clone(), 5, QUINTIC) for f in (newton_schulz_iterations, reference_iterations))
        errors = [float((y.double() - exact).norm() / exact.norm()) for y in (mine, plain)]
        tall = shape[1] > shape[2]
        gram = torch.empty(shape[0], min(shape[1:]), min(shape[1:]), dtype=x.dtype, device=device)
        symmetric_product(x, gram, tall=tall, config=config_of_test(args))
        rows.append(
            {
                "what": f"Newton-Schulz {shape}",
                "error": errors[0],
                "torch bf16": errors[1],
                "as it should": errors[0] <= 1.2 * errors[1] and torch.equal(gram, gram.mT),
            }
        )
    hyper = torch.tensor([1.0, 1e-2, 0.1, 1.0, 0.95, 1.0], device=device)
    for m, width, count in ((40, 16, 2),) if args.tiny else ((4800, 100, 16), (1600, 400, 16)):
        _, basis = blocks(count, width, device)
        for dtype in (torch.bfloat16, torch.float32):
            momenta = [torch.randn(m, count * width, device=device).to(dtype) for _ in range(2)]
            mine = [torch.randn(m, count * width, device=device) for _ in range(2)]
            theirs = [w.double() for w in mine]
            gradients = [torch.randn_like(momentum) for momentum in momenta]
            if args.device == "cuda" or INTERPRET:
                counter = torch.zeros(1, dtype=torch.int32, device=device)
                update = SignUpdates(momenta, [basis, basis], mine, [None, None])
                expected = [(0.95 * m.double() + g.double()).to(dtype) for m, g in zip(momenta, gradients)]
                update(hyper, 0.3, gradients, counter)
                apart = [float((a - b).abs().max()) for a, b in zip(momenta, expected)]
                assert max(apart) <= (2**-5 if dtype == torch.bfloat16 else 1e-5), apart
            else:
                sign_updates(momenta, [basis, basis], mine, [None, None], hyper, 0.3)
            for momentum, w in zip(momenta, theirs):
                u = basis.double()
                z = torch.sign(momentum.double().unflatten(-1, (count, width)).transpose(0, 1) @ u)
                w.copy_(w - 1e-3 * w - 1e-2 * 0.3 * (z @ u.mT).transpose(0, 1).flatten(-2))
            # A coefficient near zero may turn, which moves one row of one block.
            off = torch.stack(
                [((a.double() - b).abs() > 1e-4).any(1).float().mean() for a, b in zip(mine, theirs)]
            )
            rows.append(
                {
                    "what": f"sign update {m} x {count * width}, {count} blocks, {dtype}",
                    "error": float(off.mean()),
                    "as it should": bool(off.mean() < (0.02 if dtype == torch.bfloat16 else 0.2)),
                }
            )
    for shape in ((40, 24), (24, 40)) if args.tiny else ((1600, 1600), (6400, 1600), (1600, 6400)):
        rows += [_dion(shape, dtype, device) for dtype in (torch.bfloat16, torch.float32)]
    if not all(row["as it should"] for row in rows):
        wrong = [row["what"] for row in rows if not row["as it should"]]
        print(f"NOT AS IT SHOULD BE: {wrong}", flush=True)
    return rows


def _dion(shape: tuple[int, int], dtype: torch.dtype, device: str) -> dict[str, Any]:
    """A step of Dion at rho = 1/16 on matrices of a decaying spectrum, against the rule in float64."""
    rule: Any = build_rule("dion", matrix=MatrixOptions(dion=DionOptions(1 / 16)))
    h = torch.tensor(rule.hyperparameters({"lr": 1.0, "weight_decay": 0.1, "momentum": 0.95}, 1)).to(device)
    generator = torch.Generator(device).manual_seed(0)
    short = min(shape)
    left, right = (torch.randn(3, size, short, device=device, generator=generator) for size in shape)
    drawn = ((left * torch.logspace(0, -3, short, device=device)) @ right.mT / short).to(dtype)
    items = [
        LocalWeight(
            weight=torch.zeros(shape, device=device),
            gradient=None,
            states=(as_encoded(one.clone()),),
            auxiliary=rule.new_auxiliary(torch.Size(shape), torch.device(device), number),
        )
        for number, one in enumerate(drawn)
    ]
    found = [
        rule.whole_update(
            item.weight.double(),
            (one.double(),),
            (item.auxiliary[0].double(),),
            h.double(),
        )
        for item, one in zip(items, drawn)
    ]
    took = low_rank_update(rule, Batch(items), h, rule.scale(*shape))
    pairs = [
        (item.weight, item.states[0].values, item.auxiliary[0], weight, state[0], q[0])
        for item, (weight, state, q) in zip(items, found)
    ]
    errors = [
        max(float((pair[k].double() - pair[k + 3]).norm() / pair[k + 3].norm()) for pair in pairs)
        for k in range(3)
    ]
    return {
        "what": f"Dion {shape} r = {rule.rank(*shape)}, {dtype}: weight, momentum, Q",
        "error": errors[0],
        "momentum's": errors[1],
        "Q's": errors[2],
        "as it should": took and max(errors[0], errors[2]) < 1e-3 and errors[1] < 5e-3,
    }


def split_of_kernels(function: Callable[[], object], name: str) -> None:
    """Print the device time of each kernel of one call."""
    if not torch.cuda.is_available():
        return
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        function()
        torch.cuda.synchronize()
    print(f"kernels of {name}", flush=True)
    for event in sorted(profiled.key_averages(), key=lambda one: -one.self_device_time_total)[:8]:
        print(
            f"  {event.self_device_time_total / 1e3:8.3f} ms {event.count:5d} x {event.key[:60]}", flush=True
        )


def signs(args: argparse.Namespace, left: Left) -> list[dict[str, Any]]:
    """Dobb's step of some of GPT-2 XL's matrices at B = 16, by launch; beside what its bytes take."""
    on_gpu, rows = args.device == "cuda", []
    plain = SignConfig()
    narrow = [
        plain, replace(plain, stages=1), replace(plain, stages=1, registers=168), replace(plain, warps=8),
        replace(plain, warps=8, registers=128), replace(plain, warps=8, stages=1, registers=128),
        replace(plain, rows=128, warps=8), replace(plain, tiles=10),
    ]  # fmt: skip
    wide = [
        plain, replace(plain, wide_stages=2), replace(plain, wide_columns=128),
        replace(plain, wide_columns=128, wide_registers=128, wide_stages=2, wide_programs=2),
        replace(plain, splits=True), replace(plain, splits=True, split_registers=128),
    ]  # fmt: skip
    shapes = ((24, 32, 16, 2),) if args.tiny else ((4800, 1600, 100, 16), (1600, 6400, 400, 12))
    for m, n, width, count in shapes:
        _, basis = blocks(n // width, width, args.device)
        for config in narrow if width <= WHOLE_BLOCK else wide:
            if on_gpu and left() < 5:
                break
            calls, takes = [], False
            for _ in range(2 if on_gpu else 1):  # past the cache
                w, momentum, gradients = (
                    [torch.randn(m, n, device=args.device).bfloat16() for _ in range(count)] for _ in range(3)
                )
                hyper = torch.tensor([1.0, 1e-4, 0.1, 1.0, 0.95, 1.0], device=args.device)
                none: list[Tensor | None] = [None] * count
                if on_gpu or INTERPRET:
                    update = SignUpdates(momentum, [basis] * count, w, none, config)
                    takes = update.takes_gradients
                    if takes:
                        counter = torch.zeros(1, dtype=torch.int32, device=args.device)
                        calls.append(lambda u=update, h=hyper, g=gradients, c=counter: u(h, 0.3, g, c))
                    else:
                        calls.append(lambda u=update, h=hyper: u(h, 0.3))
                else:
                    calls.append(
                        lambda m=momentum, w=w, b=[basis] * count, c=none, h=hyper: sign_updates(
                            m, b, w, c, h, 0.3
                        )
                    )
            row: dict[str, Any] = {
                "matrices": f"{count} x {m} x {n}",
                "block": width,
                "with the gradient": takes,
            }
            try:
                row["ms"] = measured(calls, on_gpu)
                row["of its bytes at 4.25 TB/s"] = row["ms"] / ((10 if takes else 6) * count * m * n / 4.25e9)
            except Exception as error:  # does not fit this card
                row["note"] = f"{type(error).__name__}: {error}"[:120]
            rows.append({**row, "launch": _differences(config, plain)})
            print(rows[-1], flush=True)
    return rows


def _differences(config: SignConfig, plain: SignConfig) -> str:
    changed = {key: value for key, value in vars(config).items() if value != getattr(plain, key)}
    return ", ".join(f"{key} = {value}" for key, value in changed.items()) or "default"


def config_of_test(args: argparse.Namespace) -> Any:
    if args.device == "cuda":
        return candidates()[0]
    return replace(candidates()[0], block=16, block_k=32, stages=1) if INTERPRET else None


def refresh(args: argparse.Namespace, left: Left) -> list[dict[str, Any]]:
    """A whole model's refresh by three routines. Householder, slow, takes some blocks, and is scaled up."""
    on_gpu, rows = args.device == "cuda", []
    shapes = {"toy": ((3, 20), (2, 70))} if args.tiny else REFRESHES
    for name, groups in shapes.items():
        row: dict[str, Any] = {"model": name, "blocks": " + ".join(f"{n} x {w}" for n, w in groups)}
        totals = dict.fromkeys(("triton ms", "triton eager ms", "cholesky_ex ms", "linalg.qr ms"), 0.0)
        tuned = 0.0
        for count, width in groups:
            c, u = blocks(count, width, args.device)
            u2 = u.roll(1, 0).contiguous()
            one = measured([lambda c=c, u=u: cholesky_qr_refresh(c, u, OMEGA),
                            lambda c=c, u=u2: cholesky_qr_refresh(c, u, OMEGA)], on_gpu)  # fmt: skip
            totals["triton ms"] += one
            totals["triton eager ms"] += events(lambda c=c, u=u: cholesky_qr_refresh(c, u, OMEGA), 5, on_gpu)
            best = one
            base = config_for(width)
            others = [
                replace(base, invert_warps=0 if base.invert_warps else 2),
                replace(base, planes=not base.planes),
            ]
            if 64 < width <= 512:  # less padding, and narrower products
                others.append(replace(config_for(64), invert_warps=2))
            if args.refresh_variants:
                others += [
                    replace(base, warps=8),
                    replace(base, block_k=64),
                    replace(base, factor_warps=12 - base.factor_warps),
                    replace(base, invert_warps=4),
                ]
                for form in (base, others[0]):
                    split_of_kernels(
                        lambda c=c, u=u, o=form: cholesky_qr_refresh(c, u, OMEGA, o),
                        f"{count} x {width}, {form}",
                    )
            for other in others if on_gpu and left() > (15 if args.refresh_variants else 50) else []:
                if left() < 15:
                    break
                try:
                    took = measured([lambda c=c, u=u, o=other: cholesky_qr_refresh(c, u, OMEGA, o)], True)
                except Exception as error:  # does not fit this card
                    print(f"refresh {width}, {other}: {type(error).__name__}: {error}"[:300], flush=True)
                    continue
                print(f"refresh {count} x {width}, {other}: {took:.3f} ms (default {one:.3f})", flush=True)
                best = min(best, took)
            tuned += best
            totals["cholesky_ex ms"] += events(
                lambda c=c, u=u: reference_refresh(c, u, OMEGA), 2 if left() > 90 else 1, on_gpu
            )
            some = min(count, 6 if width > 1000 else 24)
            q = (c[:some] @ u[:some].float()) / c[:some].abs().sum(-1).amax(-1)[:, None, None]
            householder = events(lambda q=q: torch.linalg.qr(q), 1, on_gpu)
            totals["linalg.qr ms"] += householder * count / some
            del c, u, u2, q
        rows.append(
            {
                **row,
                **totals,
                "best tiles ms": tuned,
                "qr / triton": totals["linalg.qr ms"] / totals["triton ms"],
                "cholesky_ex / triton": totals["cholesky_ex ms"] / totals["triton ms"],
            }
        )
    return rows


def symmetric(args: argparse.Namespace, left: Left) -> list[dict[str, Any]]:
    """X X^T and A A by half beside torch.bmm; the winners are written to symmetric.json for later runs."""
    if args.device != "cuda":
        return []
    rows = []
    shapes = (
        (1600, 1600, 24), (1600, 6400, 6), (768, 768, 48), (768, 3072, 24), (4096, 4096, 4), (4096, 12288, 1),
        (5120, 5120, 2), (5120, 25600, 1), (1024, 4096, 16),
        (1600, 1600, 4), (1600, 6400, 1), (4096, 4096, 2), (1024, 4096, 2),  # one block's, of fused updates
    )  # fmt: skip
    device = torch.device("cuda", torch.cuda.current_device())
    for m, k, count in shapes:
        if left() < 8:
            rows.append({"m": m, "k": k, "matrices": count, "best": "not run: out of time"})
            continue

        def measure(functions: Sequence[Callable[[], Any]]) -> float:
            return replay_time(functions, budget_ms=25.0)

        best, timed = autotune_symmetric(m, k, count, device, measure=measure)
        name = "bmm" if best is None else f"{best.block}x{best.block_k} w{best.warps} s{best.stages}"
        by_config = {config: ms for ms, config in timed}
        triton = min((ms for ms, config in timed if config is not None), default=float("nan"))
        rows.append(
            {
                "m": m, "k": k, "matrices": count, "torch.bmm ms": by_config.get(None), "triton ms": triton,
                "ratio": triton / by_config[None] if None in by_config else None,
                "bmm TFLOP/s": 2 * count * m * m * k / by_config[None] / 1e9 if None in by_config else None,
                "best": name,
            }
        )  # fmt: skip
    return rows
