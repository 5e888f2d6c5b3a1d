"""The training loop: builds every part in one fixed order, then trains step by step.

A step: fetch the micro-batches, agree with all ranks (valid tokens, failures, signals), forward and
backward each micro-batch on the *sum* of token losses divided by the valid tokens of the whole
global batch, reduce over replicas, clip, update, log, evaluate, save. ``train_step`` and ``train`` say what
a run does, ``DeviceStep`` what the device does in a step; everything else is one call to a collaborator.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanforge.agreement import Agreement
from titanforge.assembly import (
    batch_of_step,
    build_loader,
    build_meta_model,
    check_exchange,
    data_links,
    forge_steps,
    huggingface_form,
    mesh_sizes,
    probe_forward,
)
from titanforge.checkpoint import CheckpointManager
from titanforge.config import ConfigError, JobConfig, to_flat_dict, to_toml
from titanforge.data import Batch, build_tokenizer, merge_states
from titanforge.device_step import DeviceStep
from titanforge.evaluation import Validator
from titanforge.failure import RANK_LOST, names_key
from titanforge.finite import FiniteGuard
from titanforge.forge import Ranks, build_forge_optimizer
from titanforge.garbage import GarbageCollector
from titanforge.interruption import Interrupted, StopSignal
from titanforge.kernels.forms import select_form
from titanforge.layout import build_dims, check_model, parallelize
from titanforge.metrics import MetricsLogger, Profiler
from titanforge.models.initialization import initialize_weights
from titanforge.optim import build_groups, build_optimizer, lr_factor
from titanforge.parallelisms import init_distributed, set_determinism
from titanforge.parallelisms.peers import Progress
from titanforge.report import announce, summarize
from titanforge.run_folder import FolderLock, save_config
from titanforge.run_state import restore_run_state, run_state
from titanforge.step_totals import StepTotals
from titanforge.sync import CommLedger, Replication, build_sync_policy


class Trainer:
    """Owns one run. Build order: processes, mesh, seed, data, model, optimizer, sync, checkpoint, metrics."""

    def __init__(self, config: JobConfig, device_type: str) -> None:
        self.config = config
        self.dump_folder = Path(config.job.dump_folder)
        self.seed = config.debug.seed or 0
        self._resources = contextlib.ExitStack()
        try:
            self._build(device_type)
        except BaseException as error:
            self.failed(error)
            self.close()
            raise

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends; which collective failed, if the error does not say it, and
        who is to blame become notes."""
        if not hasattr(self, "runtime"):
            return
        refused = isinstance(error, ConfigError)  # perhaps because the folder is another run's
        if blame := self.runtime.failed(error, traces=not refused):
            if hasattr(self, "step") and not names_key(error):  # nor does it say which collective it was
                error.add_note(f"{self._where()[1]}; {RANK_LOST}")
            error.add_note(blame)

    def _where(self) -> tuple[Progress, str]:
        progress = Progress(self.step + 1, self.ledger.issued, self._stage)
        return progress, f"in step {self.step + 1}, latest collective: {self.ledger.latest}"

    def _place(self) -> str:
        return f"in step {self.step + 1}" if hasattr(self, "step") else "before the first step"

    def _writing(self) -> bool:
        return hasattr(self, "checkpointer") and self.checkpointer.writing

    def _owned(self, part: Any) -> Any:
        """Have ``part`` closed at the end, the newest first."""
        self._resources.callback(part.close)
        return part

    def _build(self, device_type: str) -> None:
        config = self.config
        self.stop_signal = self._owned(
            StopSignal(config.job.stop_timeout_seconds, self._place, self._writing)
        )
        self.runtime = self._owned(init_distributed(config.comm, device_type, str(self.dump_folder)))
        self.device = self.runtime.device
        self.is_main = self.runtime.rank == 0
        self._hold_folder()
        self.dims = build_dims(config, self.runtime.world_size)
        self.dims.build_mesh(device_type)
        self.dp_rank, self.dp_world = self.dims.data_rank_and_size()
        self._stage = self.dims.get_mesh("pp").get_local_rank()
        set_determinism(
            self.seed, config.debug.deterministic, config.debug.deterministic_warn_only, self.device
        )

        self.tokenizer = build_tokenizer(config.data.tokenizer, config.model.hf_assets_path)
        global_batch, self.micro_batches = batch_of_step(config, self.dp_world)
        self.loader = build_loader(
            config, self.tokenizer, global_batch, self.dp_rank, self.dp_world, self.seed, self.device
        )
        self.ledger = CommLedger(self.dims.degrees_of)
        self.totals = StepTotals(self)
        self.model, self.model_args = self._build_model()
        self.optimizer = self._build_optimizer()
        self.runtime.record = self.ledger.record
        self.optimizer.connect(data_links(self.dims, self.ledger))
        self.sync = self._owned(build_sync_policy(config.sync))
        self.sync.attach(self.model, self._replication(), self.ledger, self.optimizer)
        if config.sync.exchange_dtype != "float32":
            check_exchange(config, self.runtime.all_gather_object(self.sync.encodes))
        self.checkpointer = self._owned(
            CheckpointManager(
                config.checkpoint,
                self.dump_folder,
                config_toml=to_toml(config),
                runtime=self.runtime,
                form=huggingface_form(config, self.model_args),
                hf_assets_path=config.model.hf_assets_path,
            )
        )
        self.validator = Validator(self) if config.validation.enable else None

        self.step = 0  # optimizer steps done
        self.tokens_seen = 0  # target tokens that a loss was taken on, over all ranks
        self.runtime.where = self._where
        self.source_tokens: dict[str, int] = {}  # of a mix: tokens read of each source, over all ranks
        stops = config.training.nonfinite_loss == "stop"
        self.finite = FiniteGuard(stops, config.forge.enable, self.device, self.dims.dp_replicate)
        self._load()
        self.loaded_step = self.step
        self.metrics = self._owned(
            MetricsLogger(
                config,
                to_flat_dict(config),
                self.runtime,
                self.model,
                self.optimizer,
                resume_step=self.step,
                tokens_seen=self.tokens_seen,
            )
        )
        self.profiler = self._owned(
            Profiler(config.profiling, self.dump_folder, self.runtime.rank, self.step, self.device.type)
        )
        self.agreement = Agreement(self)
        self.device_step = DeviceStep(self)
        if self.is_main:
            announce(self)
        # Last, because it freezes what exists by now.
        self.garbage_collector = self._owned(GarbageCollector(config.training.gc_freq))

    # ---------------------------------------------------------------- building

    def _hold_folder(self) -> None:
        """Keep other runs out of the dump folder; every rank fails if the first one cannot have it."""
        refusal = None
        if self.is_main:
            try:
                self._owned(FolderLock(self.dump_folder))
                if self.config.job.save_config_file:
                    save_config(self.dump_folder, self.config.job.save_config_file, to_toml(self.config))
            except (ValueError, OSError) as error:
                refusal = str(error)
        refusal = self.runtime.all_gather_object(refusal)[0]
        if refusal is not None:
            raise ConfigError(refusal if refusal.startswith("job.") else f"job.dump_folder: {refusal}")

    def _build_model(self):
        config = self.config
        model, args = build_meta_model(config, self.tokenizer.vocab_size)
        check_model(config, self.dims, args)
        self.model_sizes = model.num_parameters()  # of the whole model, whatever stays here
        if self.dims.pp > 1:
            build_groups(model, config.optimizer)  # a pattern's weights may all be on other ranks
        self.pipeline = parallelize(model, config, self.dims, self.device, self.ledger.record)
        initialize_weights(model, self.seed)
        return model.train(), args

    def _replication(self) -> Replication | None:
        replicas = self.dims.get_group("dp_replicate")
        return replicas and Replication(replicas, self.dims.get_group("replica"), dist.group.WORLD)

    def _build_optimizer(self):
        """The ordinary engine, or the one that lives in backward."""
        config, training = self.config, self.config.training
        if not config.forge.enable:
            return build_optimizer(
                self.model, config.optimizer, training.dtype, seed=self.seed, partial=self.dims.pp > 1
            )
        select_form(config.forge.kernel, self.device)
        return build_forge_optimizer(
            self.model,
            config.optimizer,
            training.dtype,
            probe=lambda: probe_forward(self.model, self.device),
            steps=forge_steps(config, self.micro_batches),
            seed=self.seed,
            ranks=Ranks(
                mesh_sizes(self.dims),
                sum_over_data=self.totals.sum_over_data,
                sum_over=self.totals.sum_squares,
                reduce=config.sync.reduce,
            ),
        )

    # ---------------------------------------------------------------- the loop

    def train(self) -> None:
        """Run until ``training.steps`` are done.

        Raises:
            Interrupted: a signal arrived; a checkpoint of the last whole step has been saved.
            NonFiniteLoss: a step's loss or gradient was not finite (`training.nonfinite_loss`).
        """
        config = self.config
        if config.checkpoint.create_seed_checkpoint:
            self._save(last=True)
            return
        first_step = self.step + 1
        while self.step < config.training.steps:
            self.garbage_collector.run(self.step + 1)
            with self.profiler.recording(self.step + 1):
                self.train_step()
            if self.step == first_step:
                self.runtime.shorten_timeout()
            last = self.step == config.training.steps
            if self.validator is not None and (last or self.step % config.validation.freq == 0):
                self.validator.run()
            if self.checkpointer.due(self.step, first_step, last):
                self._save(last)
        if self.step < first_step and config.checkpoint.last_save_model_only:
            self._save(last=True)  # all steps were done before this was asked for
        self.agreement.settle()
        self.checkpointer.maybe_wait()
        self.metrics.close()  # before the summary, whose lines are to be the last
        if self.is_main:
            summarize(self)

    def train_step(self) -> None:
        """One optimizer step on one global batch."""
        config = self.config
        self.metrics.begin_step()
        batch = self.agreement.next_batch()
        batches, tokens_by_replica, known = batch
        valid_tokens = max(sum(tokens_by_replica), 1)
        alone = self.totals.begin_step(batch)
        schedule = config.lr_scheduler
        factor = lr_factor(
            self.step,
            schedule.warmup_steps,
            schedule.total_steps or config.training.steps,
            schedule.decay_ratio,
            schedule.decay_type,
            schedule.min_lr_factor,
        )
        self.optimizer.set_lr(factor)
        divisor = self.sync.gradient_divisor(tokens_by_replica)
        loss_tokens = max(tokens_by_replica[self.totals.replica], 1) if alone else valid_tokens
        self.sync.begin_step(self.micro_batches, tokens_by_replica, agreed=not alone)
        loss, grad_norm = self.device_step(batches, divisor, loss_tokens)
        self.step += 1
        shown = alone and self.metrics.due(self.step)
        tokens_shown = self.totals.tokens_seen if shown else self.tokens_seen + valid_tokens
        self.tokens_seen += valid_tokens if known else 0
        if self.sync.alarm:
            self.agreement.soon()
        self.metrics.sync_events(self.step, self.sync.take_events())
        self.metrics.end_step(
            self.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=factor * config.optimizer.lr,
            tokens_seen=tokens_shown,
            ledger=self.ledger,
            **{f"source_tokens/{name}": count for name, count in self.source_tokens.items()},
            **(self.model.metrics() | self.sync.metrics() if self.metrics.due(self.step) else {}),
            **self.optimizer.metrics(),
            **({"skipped_steps": self.finite.skipped} if config.training.nonfinite_loss == "skip" else {}),
        )
        if self.metrics.due(self.step) or self.sync.alarm:
            self._stop_if_nonfinite()

    def documents(self, batch: Batch) -> torch.Tensor | None:
        """What a model's call is told of documents. None without `data.document_mask`: ids that are all equal
        mask nothing, but any mask at all keeps attention from the plain causal kernels."""
        return batch.document_ids if self.config.data.document_mask else None

    def sync_point(self, reason: str) -> None:
        """Make replicas coherent before something looks at weights or states; training goes on from it."""
        self.agreement.settle()
        self.totals.share_nonfinite()
        self.sync.synchronize(reason)
        self.metrics.sync_events(self.step, self.sync.take_events())

    def _stop_if_nonfinite(self) -> None:
        self.totals.share_nonfinite()
        if (failure := self.finite.failure()) is not None:
            self.checkpointer.maybe_wait()
            raise failure

    # ---------------------------------------------------------------- saving and ending

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs, as the checkpoint stores it."""
        return run_state(self)

    def _save(self, last: bool = False) -> None:
        self._stop_if_nonfinite()
        with self.metrics.pause(), self.stop_signal.unhurried():
            self.sync_point("checkpoint")
            self.checkpointer.save(self.step, self.state, last=last)

    def _load(self) -> None:
        state = self.checkpointer.load(self.state)
        if state is not None:
            restore_run_state(self, state)
        if self.step and self.config.checkpoint.create_seed_checkpoint:
            raise ConfigError(
                f"checkpoint.create_seed_checkpoint = true, but {self.checkpointer.loaded_from} is of step "
                f"{self.step}: a seed starts a run; give it a job.dump_folder of its own."
            )

    def save_between_steps(self, position: dict[str, Any]) -> None:
        """Save the steps done, if saving is on. What was fetched since ``position`` is not trained on:
        the resumed run must begin with it."""
        if not self.config.checkpoint.enable or self.config.checkpoint.load_only:
            return
        self.loader.load_state_dict(merge_states(self.runtime.all_gather_object(position)))
        self._save()
        self.checkpointer.maybe_wait()

    def interrupt(self, number: int) -> None:
        name = StopSignal.name(number)
        checkpoint = self.config.checkpoint
        if checkpoint.enable and not checkpoint.load_only:
            raise Interrupted(f"{name} after step {self.step}; run the same command again to resume.")
        key = "checkpoint.load_only is true" if checkpoint.enable else "checkpoint.enable is false"
        raise Interrupted(f"{name} after step {self.step}; nothing was saved, as {key}.")

    def close(self) -> None:
        """Release everything, the newest part first; calling it again does nothing."""
        self._resources.close()
