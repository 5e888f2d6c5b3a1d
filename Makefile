# `make check` is what CI runs. Uses .venv when it exists (bash scripts/setup.sh dev makes it).
BIN := $(if $(wildcard .venv/bin/python),.venv/bin/,)
PATHS := train.py titanforge kernels parallelisms scripts tests

.PHONY: check lint format-check types test format docs

check: lint format-check types test

lint:
	$(BIN)ruff check $(PATHS)

format-check:
	$(BIN)ruff format --check $(PATHS)

types:
	$(BIN)basedpyright

test:
	$(BIN)python -m pytest -n 2

format:
	$(BIN)ruff check --fix $(PATHS)
	$(BIN)ruff format $(PATHS)

docs:
	$(BIN)python -m titanforge.config --markdown > docs/config.md
