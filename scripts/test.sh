#!/usr/bin/env bash
# Sets up (first run only), then lint, format check, type check and tests:  bash scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh dev

export OMP_NUM_THREADS=1  # distributed tests start several processes; threads would fight for the cores
paths=(train.py titanforge kernels parallelisms scripts tests)
.venv/bin/ruff check "${paths[@]}"
.venv/bin/ruff format --check "${paths[@]}"
.venv/bin/basedpyright
exec .venv/bin/python -m pytest -n 2 "$@"
