"""When checkpoints are written, which one is loaded, and which ones are kept."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.api import CheckpointException

from titanforge.checkpoint import huggingface, json_state, layout, loading
from titanforge.checkpoint.dcp_format import MarkedWriter, explain
from titanforge.checkpoint.export import DTYPES, export_weights
from titanforge.checkpoint.layout import CheckpointError
from titanforge.checkpoint.loading import RANK_PARTS, TENSOR_PARTS, distinct, on_main
from titanforge.checkpoint.staging import HostStager

logger = logging.getLogger(__name__)

State = dict[str, Any]
_PARTS = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")


class CheckpointSettings(Protocol):
    """What the manager reads of the `[checkpoint]` section; see docs/config.md."""

    enable: bool
    folder: str
    interval: int
    initial_load_path: str | None
    initial_load_model_only: bool
    initial_load_in_hf: bool
    last_save_model_only: bool
    export_dtype: Any
    last_save_in_hf: bool
    async_mode: Any
    keep_latest_k: int
    load_step: int
    exclude_from_loading: list[str]
    enable_first_step_checkpoint: bool
    create_seed_checkpoint: bool
    load_only: bool


class Processes(Protocol):
    """What the manager needs to know of the run's processes."""

    rank: int
    world_size: int
    device: torch.device
    checkpoint_group: ProcessGroup


class CheckpointManager:
    """Saves and loads a run's state; every method is collective and called on all ranks in one order.

    A state is ``{"model": …, "optimizer": …, "rng": …, any other name: …}``: nested dicts and lists whose
    tensors (in model and optimizer, DTensors too) are stored by torch.distributed.checkpoint, and whose
    other values go to JSON. ``rng`` is each rank's own. Everything else must be equal on all ranks.

    Args:
        form: how the model is stored by Hugging Face's tools, for `initial_load_in_hf` and `last_save_in_hf`.
        hf_assets_path: `model.hf_assets_path`.

    Attributes:
        loaded_from: what ``load`` read, None if nothing.
        skipped: (folder name, reason) of each newer checkpoint that ``load`` could not use.

    Raises:
        ValueError: a setting that cannot work, naming its key.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        dump_folder: Path | str,
        *,
        config_toml: str,
        runtime: Processes,
        form: huggingface.Form | None = None,
        hf_assets_path: str = "",
    ) -> None:
        unknown = set(settings.exclude_from_loading) - set(_PARTS)
        if unknown:
            raise ValueError(
                f"checkpoint.exclude_from_loading: {sorted(unknown)} is no part. There are: "
                f"{', '.join(_PARTS)}."
            )
        if settings.keep_latest_k == 1 or settings.keep_latest_k < 0:
            raise ValueError(
                f"checkpoint.keep_latest_k = {settings.keep_latest_k}: use 0 (keep all) or at least 2, "
                "so that one good checkpoint survives a crash during a save."
            )
        self.settings = settings
        self.folder = Path(dump_folder) / settings.folder
        self.loaded_from: Path | None = None
        self.skipped: list[tuple[str, str]] = []
        self._config_toml = config_toml
        self._form, self._assets = form, Path(hf_assets_path) if hf_assets_path else None
        self._runtime = runtime
        self._group = runtime.checkpoint_group
        self._saved_step = -1
        self._pending: tuple[int, Future] | None = None
        self._background: Future | None = None  # the latest, waited for or not
        self._stager: HostStager | None = None
        self._writes = settings.enable and not settings.load_only
        if self._writes and settings.async_mode != "disabled":
            self._stager = self._make_stager()

    # ------------------------------------------------------------------ saving

    def due(self, step: int, first_step: int = 1, last: bool = False) -> bool:
        """Whether ``step`` is one to save after; ``first_step`` is the first of this process."""
        if not self._writes:
            return False
        first = self.settings.enable_first_step_checkpoint and step == first_step
        return last or first or step % self.settings.interval == 0

    def save(self, step: int, state: State | Callable[[], State], last: bool = False) -> bool:
        """Write a checkpoint of ``step``; returns whether one was written (or begun, asynchronously).

        With `checkpoint.async_mode` the state is copied to host memory before this returns, so training
        may change it at once; the copy is written in the background.

        Args:
            state: the state, or a function that makes it (called only if something is written).
            last: the run's last save: synchronous, and weights alone with `last_save_model_only`.

        Raises:
            CheckpointError: this save, or the one before it in the background, failed.
        """
        if not self._writes:
            return False
        self.maybe_wait()
        seed = self.settings.create_seed_checkpoint
        if last and self.settings.last_save_model_only and not seed:
            export_weights(
                self.folder,
                (state() if callable(state) else state)["model"],
                step=step,
                dtype=DTYPES[self.settings.export_dtype],
                config_toml=self._config_toml,
                group=self._group,
                form=self._form if self.settings.last_save_in_hf else None,
                assets=self._assets,
            )
            return True
        if step == self._saved_step:
            return False
        tensors, shared, own = _split(state() if callable(state) else state)
        for part in TENSOR_PARTS:  # of which pipeline stages hold different entries
            if part in shared:
                held = distinct(shared[part], self._group).values()
                shared[part] = functools.reduce(json_state.merge, held)
        final = layout.step_folder(self.folder, step)
        written = layout.temporary(final)
        on_main(self._group, lambda: layout.make_empty(written))
        writer = MarkedWriter(
            written,
            final,
            step=step,
            rank=self._runtime.rank,
            world_size=self._runtime.world_size,
            state=shared,
            rank_state=own,
            config_toml=self._config_toml,
        )
        if self._stager is None or last:
            try:
                dcp.save(tensors, storage_writer=writer, process_group=self._group)
            except CheckpointException as error:
                raise self._save_error(step, error) from error
            self._saved_step = step
            self._purge(step)
            return True
        future = dcp.async_save(
            tensors, storage_writer=writer, process_group=self._group, async_stager=self._stager
        )
        assert isinstance(future, Future), "the stager copies before it returns"
        # On the writing thread: deleting old checkpoints must not hold up training either.
        future.add_done_callback(lambda done: None if done.exception() else self._purge(step))
        self._pending, self._background = (step, future), future
        return True

    @property
    def writing(self) -> bool:
        """Whether a save in the background is under way; any thread may ask."""
        return self._background is not None and not self._background.done()

    def maybe_wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            CheckpointError: it failed; on every rank, as all ranks learn of any rank's failure.
        """
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        try:
            future.result()
        except BaseException as error:  # CheckpointException is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise self._save_error(step, error) from error
        self._saved_step = step

    def close(self) -> None:
        """Finish the save in the background and release host memory; safe to call twice."""
        try:
            self.maybe_wait()
        finally:
            if self._stager is not None:
                self._stager.release()
                self._stager = None

    def _save_error(self, step: int, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"saving step {step} to {self.folder} failed ({explain(error)}). Older checkpoints are intact."
        )

    def _purge(self, saved: int) -> None:
        if self._runtime.rank != 0 or self.settings.keep_latest_k == 0:
            return
        try:
            layout.purge(self.folder, self.settings.keep_latest_k, saved)
        except OSError as error:
            logger.warning("could not purge %s (%s); training goes on", self.folder, error)

    def _make_stager(self) -> HostStager:
        on_gpu = self._runtime.device.type == "cuda"
        pinned = self.settings.async_mode == "async_with_pinned_mem"
        if pinned and not on_gpu:
            logger.warning(
                'checkpoint.async_mode = "async_with_pinned_mem": host memory is pinned for GPUs alone; '
                'here it does what "async" does.'
            )
        return HostStager(pin=pinned and on_gpu)

    # ------------------------------------------------------------------ loading

    def load(self, state: State | Callable[[], State]) -> State | None:
        """Load the checkpoint that the settings ask for.

        The newest whole one in `checkpoint.folder` (or `load_step`); if the folder has none, what
        `initial_load_path` names; otherwise nothing. Broken ones are skipped with a warning.

        Args:
            state: the run's current state or a function that makes it. Its tensors are overwritten.

        Returns:
            The loaded parts (tensors are those of ``state``), or None: start from scratch. Without the
            part ``train_state`` the run starts at step 0.

        Raises:
            CheckpointError: checkpoints are there, but none is whole.
            FileNotFoundError: `load_step` or `initial_load_path` names nothing.
            ValueError: the checkpoint does not fit the run.
        """
        settings = self.settings
        if not settings.enable:
            return None
        if self._writes:
            for line in on_main(self._group, lambda: layout.tidy(self.folder)):
                logger.warning("%s: %s", self.folder, line)
        source, self.skipped = loading.newest_usable(self.folder, settings.load_step, self._group)
        initial = settings.initial_load_path
        if source is None and settings.initial_load_in_hf:
            folder = Path(initial) if initial else self._assets
            assert folder is not None and self._form is not None, "checked with the configuration"
            live = state() if callable(state) else state
            loading.read_huggingface_weights(folder, live["model"], self._form, self._group)
            self.loaded_from = folder
            return {"model": live["model"]}
        if source is None and initial is None:
            return None
        live = state() if callable(state) else state
        excluded = set(settings.exclude_from_loading)
        parts = (set(live) - excluded) if excluded else None
        if source is None:
            assert initial is not None
            return self._load_initial(Path(initial), live, parts)
        loaded = loading.read_checkpoint(source, live, parts, self._runtime.rank, self._group)
        self.loaded_from = source
        if self._writes and settings.load_step >= 0 and self._runtime.rank == 0:
            later = [step for step in layout.list_steps(self.folder) if step > settings.load_step]
            if later:
                logger.warning(
                    "%s also holds later steps (%s): with checkpoint.load_step = -1 a run would go on from "
                    "those. Move them away if this run is to take their place.",
                    self.folder,
                    ", ".join(map(str, later)),
                )
        return loaded

    def _load_initial(self, path: Path, live: State, parts: set[str] | None) -> State:
        model_only = self.settings.initial_load_model_only
        kind = on_main(self._group, lambda: loading.kind_of(path))
        if kind == "weights":
            if not model_only:
                raise ValueError(
                    f"checkpoint.initial_load_model_only = false, but {path} holds weights alone; set it "
                    "to true."
                )
            loading.read_foreign_weights(path, live["model"], self._group)
            self.loaded_from = path
            return {"model": live["model"]}
        source: Path | None = path
        if kind == "folder":
            source, self.skipped = loading.newest_usable(path, -1, self._group)
        elif (reason := loading.why_unusable(path, self._group)) is not None:
            raise CheckpointError(f"checkpoint.initial_load_path: {path} is unusable: {reason}.")
        assert source is not None
        wanted = {"model"} if model_only else parts
        loaded = loading.read_checkpoint(source, live, wanted, self._runtime.rank, self._group)
        self.loaded_from = source
        return loaded


def _split(state: State) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """(tensors for DCP by name, JSON equal on all ranks, JSON of this rank)."""
    tensors: dict[str, Tensor] = {}
    shared, own = {}, {}
    for part, value in state.items():
        if part in TENSOR_PARTS:
            shared[part] = json_state.split(value, part, tensors)
        else:
            (own if part in RANK_PARTS else shared)[part] = json_state.encode(value, part)
    return tensors, shared, own
