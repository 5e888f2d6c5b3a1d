"""From a parsed configuration to an exit code: dry run, training, and how each ending is told."""

from __future__ import annotations

import os
import sys
import traceback

import torch

from titanforge.config import ConfigError, JobConfig, to_toml, validate_config
from titanforge.failure import one_line, tell
from titanforge.interruption import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_NONFINITE,
    Interrupted,
    NonFiniteLoss,
    StopSignal,
)


def run(config: JobConfig) -> int:
    """Train (or dry-run) ``config``; returns the process's exit code.

    Raises:
        ConfigError: from the checks before anything is built.
    """
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
        return _dry_run(config, rank, world_size, device_type)
    return _train(config, rank, world_size, device_type)


def _dry_run(config: JobConfig, rank: int, world_size: int, device_type: str) -> int:
    from titanforge.dry_run import dry_run_report

    if rank == 0:
        try:
            print(dry_run_report(config, world_size, device_type))
        except (ValueError, OSError) as error:
            tell(one_line(error))
            return EXIT_CONFIG
    return EXIT_DONE


def _train(config: JobConfig, rank: int, world_size: int, device_type: str) -> int:
    from titanforge.checkpoint import CheckpointError
    from titanforge.data import DataError
    from titanforge.layout import build_dims, check_model
    from titanforge.parallelisms import PeerFailure
    from titanforge.trainer import Trainer

    trainer: Trainer | None = None
    try:
        check_model(config, build_dims(config, world_size))
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
    except PeerFailure as failure:
        if rank == 0:  # the rank that failed speaks for itself too, but its log may be on another node
            print(f"error: {failure}", file=sys.stderr)
        return EXIT_ERROR
    except DataError as error:
        if trainer is None:
            tell(str(error))
        else:
            print(f"error: rank {rank} cannot read the data: {error}", file=sys.stderr)
        return EXIT_ERROR
    except CheckpointError as error:
        tell(str(error))
        return EXIT_ERROR
    except Exception as error:
        if trainer is not None:
            trainer.failed(error)
        if blame := getattr(error, "__notes__", None):
            print(
                f"error: rank {rank} ends: {one_line(error)} {' '.join(blame)}", file=sys.stderr, flush=True
            )
            return EXIT_ERROR
        # While nothing is built yet, these are about what the user asked for.
        if trainer is None and isinstance(error, (ConfigError, ValueError, OSError)):
            tell(one_line(error))
            return EXIT_CONFIG
        print(f"[rank {rank}] failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        if trainer is not None and (number := trainer.stop_signal.received):
            # A signal to the process group ends children, too: compilers, workers.
            print(
                f"stopped: rank {rank}: {StopSignal.name(number)} in step {trainer.step + 1}, which "
                "then failed (above); the same command goes on from the latest checkpoint, if there is one.",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            return EXIT_INTERRUPTED
        return EXIT_ERROR
    finally:
        if trainer is not None:
            trainer.close()
