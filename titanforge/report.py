"""What a run says on the console before its first step and after its last."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from titanforge.layout import axis_lines
from titanforge.metrics.memory import GIB, local_bytes
from titanforge.metrics.plot import write_run_summary
from titanforge.replica_lines import replica_lines

if TYPE_CHECKING:
    from titanforge.trainer import Trainer


def announce(trainer: Trainer) -> None:
    """Print what was built: model, ranks, batch, who updates which weights, where the run starts."""
    config, training = trainer.config, trainer.config.training
    groups = trainer.model_sizes
    stages = [] if trainer.pipeline is None else trainer.pipeline.plan.lines()
    here = "" if trainer.pipeline is None else " of this rank's stages"
    sequences = trainer.micro_batches * training.local_batch_size * trainer.dp_world
    held = local_bytes(trainer.model.parameters(), trainer.device.type)
    lines = [
        config.job.description,
        f"  model      {config.model.name} {config.model.flavor}: {sum(groups.values()):,} parameters ("
        + ", ".join(f"{name} {count:,}" for name, count in groups.items() if count)
        + ")",
        f"  tokenizer  {trainer.tokenizer.name}, {trainer.tokenizer.vocab_size:,} tokens",
        f"  ranks      {trainer.dims.describe()} on {trainer.device.type}",
        *(f"             {line}" for line in axis_lines(config, trainer.dims, trainer.model_args)),
        *(f"             {line}" for line in stages),
        f"             {held / GIB:.3f} GiB of weights on this one",
        f"  step       {sequences} sequences x {training.seq_len} tokens in {trainer.micro_batches} "
        f"micro-batch{'es' * (trainer.micro_batches > 1)} of {training.local_batch_size} a rank",
    ]
    for group in trainer.optimizer.groups:
        options = ", ".join(f"{key} {value:g}" for key, value in group.options.items())
        lines.append(f"  optimizer  {group.name}: {group.num_parameters:,} parameters{here}, {options}")
    lines += [f"  {line}" for line in trainer.optimizer.report().splitlines()]
    crossing = replica_lines(config, trainer.dims, trainer.model_args, trainer.optimizer.groups, here)
    lines += [f"  {line}" for line in crossing]
    source = trainer.checkpointer.loaded_from
    if source is not None:
        lines.append(f"  start      step {trainer.step}, from {source}")
    if trainer.step >= training.steps:
        lines.append(
            f"  nothing left to train: training.steps = {training.steps} are done; raise it to go on"
        )
    print("\n".join(lines), flush=True)


def summarize(trainer: Trainer) -> None:
    """Draw the run's plot and print where everything is and what to try next."""
    folder = trainer.dump_folder
    metrics = folder / "metrics.jsonl"
    found: list[tuple[str, Path]] = [("metrics", metrics)]
    if trainer.config.metrics.enable_plot:
        plot = write_run_summary(folder, trainer.config.job.description)
        if plot is not None:
            found.append(("plot", plot))
    if (folder / "wandb").is_dir():
        found.append(("W&B run", (folder / "wandb" / "latest-run").resolve()))
    if trainer.config.metrics.enable_tensorboard:
        found.append(("TensorBoard", folder / trainer.config.metrics.save_tb_folder))
    checkpoint = None
    if (settings := trainer.config.checkpoint).enable:
        names = [f"export-step-{trainer.step}"] * settings.last_save_model_only + [f"step-{trainer.step}"]
        there = [trainer.checkpointer.folder / name for name in names]
        checkpoint = next((path for path in there if path.is_dir()), None)
        if checkpoint is not None:  # there is none where nothing is saved: checkpoint.load_only
            found.append(("checkpoint", checkpoint))
    print(f"done: {trainer.step} steps, {trainer.tokens_seen:,} tokens")
    for name, path in found:
        print(f"  {name:<12} {path}")
    if checkpoint is not None:
        # As this process was started: scripts/train.sh's environment is not the shell's.
        python = os.path.relpath(sys.executable)
        print("next:")
        print(f'  {python} scripts/generate.py --checkpoint {checkpoint} --prompt "import "')
        print(f"  {python} scripts/plot_run.py {metrics} another/metrics.jsonl -o comparison.png")
