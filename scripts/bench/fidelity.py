"""Measure how far training in bf16 takes a weight from training in fp32, fused and by the standard path.

    python scripts/bench/fidelity.py                              # the paper's size, on a GPU
    python scripts/bench/fidelity.py --forms portable pp2 coop    # each form of the fused kernel
    python scripts/bench/fidelity.py --device cpu --tiny          # proves the script anywhere, in seconds

Twenty steps of AdamW on one linear under a cross-entropy (FORGE, appendix E: V = 1024, H = 4096, BT = 2048).
The standard path forms each gradient in bf16 and then updates: titanforge's ordinary engine, and
torch.optim's fused AdamW; the fused kernel hands the product's fp32 sums to the update. What both lose by
storing weight and states is the same, so read the ratio to the standard path of the same storage. The paper
states neither learning rate nor initial values, which move the figures a hundredfold: rates are an axis here.
Writes fidelity.json, fidelity.md and fidelity.png (the error after each step).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.harness import machine_facts, markdown_table, write_report
from scripts.bench.observed import recorded_forms
from scripts.exactness.one_linear import PAPER, SMALL, Size, relative_rms, weights_by_step
from titanforge.config.sections import Optimizer
from titanforge.kernels.forms import FORMS, select_form

STORAGE: dict[str, dict[str, Any]] = {
    "bf16": {"state_dtype": "bfloat16"},
    "fp32 master": {"master_weights": "float32"},
    "bf16, rounded at random": {"state_dtype": "bfloat16", "master_weights": "stochastic_rounding"},
    "int8 states": {"state_dtype": "int8"},
    "fp8 states": {"state_dtype": "fp8"},
}
STANDARD = "standard"


def paths(storage: str, forms: list[str]) -> list[tuple[str, dict[str, Any], str]]:
    """(name, changes of `[optimizer]`, form of the fused kernel or empty) of what is compared."""
    own = STORAGE[storage]
    listed = [(STANDARD, own, "")]
    if storage == "bf16":
        listed.append(("torch fused AdamW", {"implementation": "fused"}, ""))
    return listed + [(f"fused, {form}", own, form) for form in forms]


def measure(
    size: Size,
    storage: str,
    rate: float,
    forms: list[str],
    reference: list[torch.Tensor],
    device: torch.device,
) -> list[dict[str, Any]]:
    """One cell a path: the weight's relative rms error after each step."""
    cells: list[dict[str, Any]] = []
    for name, changes, form in paths(storage, forms):
        cell: dict[str, Any] = {"storage": storage, "lr": rate, "path": name}
        options = Optimizer(name="AdamW", lr=rate, **changes)
        try:
            select_form(form or "auto", device)
            with recorded_forms() as chosen:
                found = weights_by_step(size, torch.bfloat16, options, device, fuse=bool(form))
                pairs = list(zip(found, reference, strict=True))
        except (ValueError, RuntimeError) as error:  # a form that cannot run here, say
            text = (str(error).strip().splitlines() or [""])[-1]
            cells.append(cell | {"error": f"{type(error).__name__}: {text}"})
            print(f"{storage}, lr {rate:g}, {name}: {cells[-1]['error']}", flush=True)
            continue
        finally:
            select_form("auto", device)
        errors = [relative_rms(weight, wanted) for weight, wanted in pairs]
        last, wanted = pairs[-1]
        cell |= {
            "rms_by_step": errors,
            "rms": errors[-1],
            "largest": float((last - wanted).abs().max()),
            "forms": chosen,
        }
        if standard := next((one.get("rms") for one in cells if one["path"] == STANDARD), None):
            cell["times_standard"] = cell["rms"] / standard
        cells.append(cell)
        print(f"{storage}, lr {rate:g}, {name}: {cell['rms']:.4e}", flush=True)
    return cells


def table_of(cells: list[dict[str, Any]]) -> str:
    header = ["storage", "lr", "path", "form", "rms error of W", "largest", "x standard"]
    rows = []
    for cell in cells:
        named = [cell["storage"], f"{cell['lr']:g}", cell["path"]]
        if "error" in cell:
            rows.append([*named, None, f"failed ({cell['error']})", None, None])
            continue
        form = "/".join(sorted({one["form"] for one in cell["forms"]})) or None
        ratio = f"{cell['times_standard']:.4f}" if "times_standard" in cell else None
        rows.append([*named, form, f"{cell['rms']:.4e}", f"{cell['largest']:.2e}", ratio])
    return markdown_table(header, rows)


def plot(cells: list[dict[str, Any]], rates: list[float], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(rates), figsize=(5.5 * len(rates), 4.2), squeeze=False)
    colours = dict(zip(STORAGE, plt.rcParams["axes.prop_cycle"].by_key()["color"]))
    for axis, rate in zip(axes[0], rates):
        for cell in cells:
            if cell["lr"] == rate and "rms" in cell:
                # Paths of one storage nearly cover each other: broken lines show both.
                style = {STANDARD: "-", "torch fused AdamW": "-."}.get(cell["path"], "--")
                steps = range(1, len(cell["rms_by_step"]) + 1)
                label = f"{cell['storage']}: {cell['path']}"
                axis.plot(steps, cell["rms_by_step"], style, color=colours[cell["storage"]], label=label)
        axis.set(title=f"{title}, lr {rate:g}", xlabel="step", ylabel="relative rms error of W", yscale="log")
    axes[0][-1].legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """1 if a path failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy size, to prove the script anywhere")
    parser.add_argument("--storage", nargs="+", choices=STORAGE, default=list(STORAGE))
    parser.add_argument(
        "--lr", nargs="+", type=float, default=[1e-3, 1e-4, 1e-5], help="learning rates, each"
    )
    parser.add_argument("--forms", nargs="+", choices=("auto", *FORMS), default=["auto"], help="each of them")
    parser.add_argument("--out", type=Path, default=Path("outputs/fidelity"), help="folder of the report")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: use --device cpu --tiny to prove the script")
    device, size = torch.device(args.device), SMALL if args.tiny else PAPER
    cells: list[dict[str, Any]] = []
    for rate in args.lr:
        exact = Optimizer(name="AdamW", lr=rate)
        reference = list(weights_by_step(size, torch.float32, exact, device, fuse=False))
        for storage in args.storage:
            cells += measure(size, storage, rate, args.forms, reference, device)
    report = {"machine": machine_facts(), "size": vars(size), "cells": cells}
    write_report(args.out, "fidelity", report, table_of(cells))
    plot(cells, args.lr, str(size), args.out / "fidelity.png")
    return 1 if any("error" in cell for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
