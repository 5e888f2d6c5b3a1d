"""Compare runs: ``python scripts/plot_run.py outputs/metrics.jsonl [more.jsonl …] -o comparison.png``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# Runs from a bare checkout too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from titanforge.metrics.plot import plot_runs, run_labels
from titanforge.metrics.sinks.jsonl import read_metrics


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; 1 with one line on stderr when a file is missing, broken or empty."""
    parser = argparse.ArgumentParser(description="Draw loss and throughput of one or several runs.")
    parser.add_argument("files", nargs="+", help="metrics.jsonl files, or folders that hold one")
    parser.add_argument("-o", "--output", default="runs.png", help="PNG to write (default: %(default)s)")
    parser.add_argument("--labels", help="comma-separated names, one a file (default: the folders' names)")
    parser.add_argument("--title", default="", help="title of the picture")
    options = parser.parse_args(argv)
    files = [Path(f) / "metrics.jsonl" if Path(f).is_dir() else Path(f) for f in options.files]
    labels = options.labels.split(",") if options.labels else run_labels(files)
    if len(labels) != len(files) or len(set(labels)) != len(labels):
        parser.error(f"--labels: {len(files)} different names needed, got {options.labels!r}")
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        print(
            f"error: no such file: {', '.join(missing)}: name metrics.jsonl files of runs, "
            "or folders that hold one (a run writes it to job.dump_folder)",
            file=sys.stderr,
        )
        return 1
    try:
        runs = {label: read_metrics(file) for label, file in zip(labels, files, strict=True)}
        print(plot_runs(runs, options.output, options.title))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
