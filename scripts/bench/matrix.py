"""Matrix optimizers on one GPU: are the kernels right, how long is a refresh, an optimizer call, a capture.

    python scripts/bench/matrix.py --out outputs/matrix

Every part stands alone: one that fails or runs out of time is reported as such, and the others go on. Times
are medians of CUDA events or of graph replays over several buffers of random data.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from scripts.bench.harness import machine_facts, markdown_table
from scripts.bench.matrix_fused import fused
from scripts.bench.matrix_kernels import correctness, refresh, signs, symmetric
from scripts.bench.matrix_refresh import refresh_step
from scripts.bench.matrix_steps import capture, optimizer_calls, side_stream

PARTS: dict[str, Callable[[argparse.Namespace, Callable[[], float]], list[dict[str, Any]]]] = {
    "correctness": correctness,
    "refresh": refresh,
    "optimizer_calls": optimizer_calls,
    "refresh_step": refresh_step,
    "capture": capture,
    "side_stream": side_stream,
    "symmetric": symmetric,
    "signs": signs,
    "fused": fused,
}


def table_of(rows: list[dict[str, Any]]) -> str:
    header = list(dict.fromkeys(key for row in rows for key in row))
    return markdown_table(header, [[text_of(row.get(key)) for key in header] for row in rows])


def text_of(value: Any) -> Any:
    """Small errors with their magnitude, other floats for the table's two digits."""
    return f"{value:.1e}" if isinstance(value, float) and 0 < abs(value) < 0.1 else value


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/matrix"))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--budget", type=float, default=145.0, help="seconds for everything")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="weights, states"
    )
    parser.add_argument("--methods", nargs="+", default=None, help="of the optimizer calls; default: all")
    parser.add_argument(
        "--fused-rules", nargs="+", default=["Muon"], help="of the part `fused`; Muon, Dion, RMNP, Dobb"
    )
    parser.add_argument(
        "--refresh-variants", action="store_true", help="more tiles and forms, and the time of each kernel"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of a step where a model runs")
    parser.add_argument("--layers", type=int, default=2, help="of the toy model")
    parser.add_argument("--tiny", action="store_true", help="toy shapes, to prove the script anywhere")
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cpu" and not args.tiny:
        parser.error("no CUDA device: --tiny proves the script without one")
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    report: dict[str, Any] = {"machine": machine_facts(), "parts": {}, "failures": {}, "seconds": {}}

    def left() -> float:
        return args.budget - (time.perf_counter() - started)

    for name in args.parts:
        begun = time.perf_counter()
        try:
            if left() < 5:
                raise TimeoutError("not run: out of time")
            report["parts"][name] = PARTS[name](args, left)
        except Exception as error:
            traceback.print_exc()
            report["failures"][name] = f"{type(error).__name__}: {error}"[:2000]
        if args.device == "cuda":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as error:  # the device is lost, and every later part with it
                report["failures"][name] = f"device lost: {error}"[:2000]
        report["seconds"][name] = round(time.perf_counter() - begun, 1)
        write(args.out, report)
        print(f"\n## {name} ({report['seconds'][name]} s)\n", flush=True)
        print(table_of(report["parts"].get(name, [])) if name in report["parts"] else "", flush=True)
        if name in report["failures"]:
            print(f"FAILED: {report['failures'][name]}", flush=True)
    return 1 if report["failures"] else 0


def write(out: Path, report: dict[str, Any]) -> None:
    """matrix.json and matrix.md, after every part."""
    (out / "matrix.json").write_text(json.dumps(report, indent=1))
    lines = ["# Matrix optimizers", ""]
    for name, rows in report["parts"].items():
        lines += [f"## {name}", "", table_of(rows), ""]
    lines += [f"- FAILED {name}: {text}" for name, text in report["failures"].items()]
    lines += ["", *(f"- {key}: {value}" for key, value in report["machine"].items())]
    (out / "matrix.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
