"""Run a test function on several real processes, and train.py under torchrun.

``run_distributed`` starts ``world_size`` processes, joins them in one gloo group, and runs a
module-level function on each. They are forked from a server that has imported torch and the trainer once, for
those imports cost a process seconds. What the ranks print goes to a file per rank; when a rank fails, the
first failing rank's traceback and log become the message of one exception and the others are killed,
so a rank that waits in a collective for a dead peer never costs the whole timeout.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PRELOADED = ["tests.rank_imports"]


class RankFailure(AssertionError):
    """A rank raised, died or ran out of time.

    Attributes:
        rank: the first rank that failed.
        exitcode: its exit status, negative for a signal, None at a timeout.
        exception_type: class name of what it raised, "" if it died without raising.
        log: everything it printed.
    """

    def __init__(self, message: str, rank: int, exitcode: int | None, exception_type: str, log: str):
        super().__init__(message)
        self.rank = rank
        self.exitcode = exitcode
        self.exception_type = exception_type
        self.log = log


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    environment: Mapping[str, str],
    backend: str | None,
    timeout: float,
    fn: Callable,
    args: tuple,
) -> None:
    log = os.open(os.path.join(folder, f"log_{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()  # a fork server has the one it was started with
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        try:
            if backend is not None:
                dist.init_process_group(
                    backend,
                    init_method=f"file://{folder}/store",
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=timeout),
                )
            result = fn(rank, world_size, *args)
            with open(os.path.join(folder, f"result_{rank}"), "wb") as file:
                pickle.dump(result, file)
        except BaseException as error:
            # Written before the group is torn down: the parent must learn of it even if that hangs.
            report = os.path.join(folder, f"error_{rank}")
            with open(report + ".part", "wb") as file:
                pickle.dump((time.time(), type(error).__name__, traceback.format_exc()), file)
            os.rename(report + ".part", report)
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    except BaseException:
        sys.stderr.flush()
        os._exit(1)
    # Not through the interpreter's end: gloo's threads now and then abort a process that has done its work.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def process_context() -> Any:
    """Where processes come from: a server that has imported everything, or from nothing where there is a GPU,
    which no process can use whose parent has looked for one."""
    import torch

    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _first_failure(folder: str, processes: Sequence[Any]) -> tuple[int, str, str] | None:
    """(rank, exception class, traceback) of the earliest failure, or None while all is well."""
    reports = []
    for rank in range(len(processes)):
        path = os.path.join(folder, f"error_{rank}")
        if os.path.exists(path):
            with open(path, "rb") as file:
                reports.append((*pickle.load(file), rank))
    dead = [r for r, p in enumerate(processes) if p.exitcode not in (None, 0)]
    silent = [r for r in dead if not os.path.exists(os.path.join(folder, f"error_{r}"))]
    if silent:  # killed by a signal: what the others raise afterwards is only the echo
        return silent[0], "", ""
    if reports:
        _, name, text, rank = min(reports)
        return rank, name, text
    return None


_LOST_CONNECTION = ("Gloo connectFullMesh failed", "Connection closed by peer")


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    backend: str | None = "gloo",
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on ``world_size`` processes of one process group.

    Args:
        fn: a module-level function (it is pickled by name); what it returns must pickle.
        timeout: seconds for the whole run, and the group's collective timeout.
        backend: process-group backend; None leaves joining a group to ``fn`` (RANK, WORLD_SIZE,
            LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set).

    Returns:
        What each rank returned, by rank.

    Raises:
        RankFailure: with the traceback and the log of the first rank that failed.
    """
    try:
        return _run_once(fn, world_size, args, timeout, backend)
    except RankFailure as failure:
        # Seen once in thousands of groups, before anything was sent over it, on a loopback without faults.
        if not all(words in str(failure) for words in _LOST_CONNECTION):
            raise
        warnings.warn(f"gloo lost a connection it was making: the ranks start again\n{failure}", stacklevel=2)
        return _run_once(fn, world_size, args, timeout, backend)


def _run_once(
    fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float, backend: str | None
) -> list[Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    context = process_context()
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        saved = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the children, read when torch is imported
        try:
            processes = [
                context.Process(
                    target=_rank_main,
                    args=(rank, world_size, folder, environment, backend, timeout, fn, args),
                )
                for rank in range(world_size)
            ]
            for process in processes:
                process.start()
        finally:
            if saved is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = saved

        deadline = time.monotonic() + timeout
        failure, timed_out = None, False
        try:
            while failure is None:
                running = [p for p in processes if p.exitcode is None]
                failure = _first_failure(folder, processes)
                if not running or failure is not None:
                    break
                if time.monotonic() > deadline:
                    timed_out = True
                    failure = (processes.index(running[0]), "TimeoutError", "")
                    break
                wait([p.sentinel for p in running], timeout=0.2)
        finally:
            if failure is not None and not timed_out:
                # The failing rank's own log must reach the disk; and where a rank was killed, a peer's echo
                # can be seen before the death is.
                time.sleep(0.5)
                failure = _first_failure(folder, processes) or failure
            for process in processes:
                if process.exitcode is None and (failure is not None or sys.exc_info()[0] is not None):
                    process.kill()
                process.join()

        if failure is not None:
            rank, name, text = failure
            log = Path(folder, f"log_{rank}")
            output = log.read_text(errors="replace") if log.exists() else ""
            exitcode = None if timed_out else processes[rank].exitcode
            what = f"ran past {timeout} s" if timed_out else f"failed (exit status {exitcode})"
            raise RankFailure(
                f"rank {rank} of {world_size} {what}\n{text}\n--- its log ---\n{output[-8000:]}",
                rank,
                exitcode,
                name,
                output,
            )
        results = []
        for rank in range(world_size):
            with open(os.path.join(folder, f"result_{rank}"), "rb") as file:
                results.append(pickle.load(file))
        return results


def start_torchrun(
    script_args: Sequence[str], nproc: int, env: Mapping[str, str] | None = None, **popen_options: Any
) -> subprocess.Popen:
    """Start ``script_args`` (script first) on ``nproc`` ranks; ``nproc=0``: plain Python, no torchrun.

    The process leads its own session, so ``os.killpg`` reaches the launcher. Signals sent to the
    launcher are passed on to the ranks by torchrun.
    """
    launcher = [sys.executable]
    if nproc > 0:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    merged = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "WANDB_MODE": "offline"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        merged.pop(name, None)
    merged.update(env or {})
    options = {"cwd": REPOSITORY, "text": True, "start_new_session": True, **popen_options}
    return subprocess.Popen([*launcher, *script_args], env=merged, **options)


def stop_process(process: subprocess.Popen, grace: float = 15) -> None:
    """End a process of ``start_torchrun``: SIGTERM so that the launcher ends its ranks, then SIGKILL."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_torchrun(
    script_args: Sequence[str], nproc: int, env: Mapping[str, str] | None = None, timeout: float = 180
) -> subprocess.CompletedProcess:
    """Run ``script_args`` to its end and return it with stdout and stderr as text; never raises for rc.

    Raises:
        subprocess.TimeoutExpired: with the output so far; the ranks are stopped first.
    """
    process = start_torchrun(script_args, nproc, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        stop_process(process)
        stdout, stderr = process.communicate()
        raise subprocess.TimeoutExpired(process.args, timeout, stdout, stderr) from None
    except BaseException:
        stop_process(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
