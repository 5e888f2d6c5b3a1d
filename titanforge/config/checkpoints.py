"""Checks of what is saved and loaded: checkpoints, and Hugging Face's files."""

from __future__ import annotations

from pathlib import Path

from titanforge.config import schema
from titanforge.config.schema import refusal, show
from titanforge.config.sections import JobConfig

CHECKPOINT_PARTS = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")


def check_checkpoint(config: JobConfig, world_size: int) -> list[str]:
    """What is saved, and where a run starts from; returns warnings."""
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        # Training silently from random weights would be the worst reading of these three.
        for path in (
            "checkpoint.initial_load_path",
            "checkpoint.initial_load_in_hf",
            "checkpoint.create_seed_checkpoint",
            "checkpoint.load_only",
        ):
            if schema.get_value(config, path):
                raise refusal(config, path, "needs checkpoint.enable = true")
        if checkpoint.load_step != -1:
            raise refusal(config, "checkpoint.load_step", "needs checkpoint.enable = true")
        return []
    if checkpoint.keep_latest_k == 1:
        raise refusal(
            config,
            "checkpoint.keep_latest_k",
            "a crash during a save would leave no checkpoint: keep at least 2, or 0 for all",
        )
    for part in checkpoint.exclude_from_loading:
        if part not in CHECKPOINT_PARTS:
            word = schema.nearest(part, CHECKPOINT_PARTS)
            hint = f"; did you mean {show(word)}?" if word else ""
            raise refusal(
                config,
                "checkpoint.exclude_from_loading",
                f"{show(part)} is not one of {', '.join(CHECKPOINT_PARTS)}{hint}",
            )
    if checkpoint.initial_load_path and not Path(checkpoint.initial_load_path).expanduser().is_dir():
        raise refusal(config, "checkpoint.initial_load_path", "no such folder")
    _check_hugging_face(config)
    if checkpoint.create_seed_checkpoint and world_size != 1:
        raise refusal(
            config,
            "checkpoint.create_seed_checkpoint",
            f"is made by one process, not {world_size}: start it with torchrun --nproc_per_node=1",
        )
    if checkpoint.create_seed_checkpoint and checkpoint.load_only:
        raise refusal(config, "checkpoint.load_only", "contradicts checkpoint.create_seed_checkpoint = true")
    if checkpoint.last_save_model_only:
        return [
            "checkpoint.last_save_model_only = true: the last checkpoint holds weights alone, for no resume"
        ]
    return []


def _check_hugging_face(config: JobConfig) -> None:
    checkpoint, model = config.checkpoint, config.model
    if checkpoint.initial_load_in_hf:
        if not (checkpoint.initial_load_path or model.hf_assets_path):
            raise refusal(
                config,
                "checkpoint.initial_load_in_hf",
                "needs the model's folder: set checkpoint.initial_load_path or model.hf_assets_path",
            )
        if not checkpoint.initial_load_model_only:
            raise refusal(
                config,
                "checkpoint.initial_load_model_only",
                "checkpoint.initial_load_in_hf = true finds weights alone: set it to true",
            )
    if checkpoint.last_save_in_hf and not checkpoint.last_save_model_only:
        raise refusal(
            config,
            "checkpoint.last_save_in_hf",
            "holds weights alone: set checkpoint.last_save_model_only = true as well",
        )
    if checkpoint.last_save_in_hf and model.moe_balancing == "bias":
        raise refusal(
            config,
            "model.moe_balancing",
            "Hugging Face's model has no bias on the choice of experts (checkpoint.last_save_in_hf = true):"
            ' use "auxiliary_loss"',
        )
