"""From a parsed configuration to an exit code: dry run, training, and how each ending is told."""

from __future__ import annotations

import os
import sys
import traceback

import torch

from titanforge.config import ConfigError, JobConfig, to_toml, validate_config
from titanforge.interruption import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NONFINITE,
    Interrupted,
    NonFiniteLoss,
)


def run(config: JobConfig) -> int:
    """Train (or dry-run) ``config``; returns the process's exit code."""
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    warnings = validate_config(config, world_size, device_type)
    if rank == 0:
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        if config.job.print_config:
            print(to_toml(config))
    if config.job.dry_run:
        if rank == 0:
            from titanforge.dry_run import dry_run_report

            print(dry_run_report(config, world_size, device_type))
        return EXIT_DONE

    from titanforge.trainer import Trainer

    trainer: Trainer | None = None
    try:
        trainer = Trainer(config, device_type)
        trainer.train()
        return EXIT_DONE
    except Interrupted as stop:
        if rank == 0:
            print(f"stopped: {stop}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except NonFiniteLoss as stop:
        if rank == 0:
            print(f"error: {stop}", file=sys.stderr)
        return EXIT_NONFINITE
    except ConfigError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except Exception:
        print(f"[rank {rank}] failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        raise
    finally:
        if trainer is not None:
            trainer.close()
