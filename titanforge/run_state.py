"""What a checkpoint holds of a run, and putting it back."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import torch

from titanforge.config import ConfigError
from titanforge.data import merge_states

if TYPE_CHECKING:
    from titanforge.trainer import Trainer

# How a model is trained rather than what it computes: a run may be resumed with other values.
_FREE_ARGUMENTS = ("max_seq_len", "moe_balancing", "moe_auxiliary_loss_coefficient", "moe_bias_update_rate")


def run_state(trainer: Trainer) -> dict[str, Any]:
    """Everything that a resumed run needs; collective."""
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "train_state": {
            "step": trainer.step,
            "tokens_seen": trainer.tokens_seen,
            "model": identity(trainer.config.model.name, trainer.model_args),
            "sync": trainer.sync.state_dict(),
            "comm": trainer.ledger.state_dict(),
            **trainer.optimizer.plain_state(),
        },
        "dataloader": merge_states(trainer.runtime.all_gather_object(trainer.loader.state_dict())),
        "rng": _rng_state(trainer.device),
    }


def restore_run_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Take over what was loaded; parts that are absent stay as they are.

    Raises:
        ConfigError: the weights belong to a model that computes something else, in the same shapes.
    """
    progress = state.get("train_state", {})
    if "model" in state:
        check_same_model(progress.get("model"), identity(trainer.config.model.name, trainer.model_args))
        trainer.model.load_state_dict(state["model"])
    if "optimizer" in state:
        trainer.optimizer.load_state_dict(state["optimizer"])
    else:
        trainer.optimizer.refresh_master_weights()
    trainer.sync.load_state_dict(progress.get("sync", {}))
    if progress:
        trainer.step, trainer.tokens_seen = progress["step"], progress["tokens_seen"]
        trainer.optimizer.load_plain_state(progress)
        trainer.ledger.load_state_dict(progress.get("comm", {}))
    if "dataloader" in state:
        trainer.loader.load_state_dict(state["dataloader"])
    if "rng" in state:
        _restore_rng_state(state["rng"], trainer.device)


def identity(name: str, args: Any) -> dict[str, Any]:
    """The family and the arguments that decide what its weights mean, as JSON gives them back.

    Weights alone do not tell: twice the heads of half the width have the same shapes.
    """
    arguments = {k: v for k, v in dataclasses.asdict(args).items() if k not in _FREE_ARGUMENTS}
    return json.loads(json.dumps({"name": name, **arguments}))


def check_same_model(saved: dict[str, Any] | None, own: dict[str, Any]) -> None:
    """Compare two identities; ``saved`` is None for a checkpoint that has none.

    Raises:
        ConfigError: they differ; the message names each difference.
    """
    if saved is None:
        return
    missing = object()
    differing = [key for key in own if saved.get(key, missing) != own[key]]
    if differing:
        told = ", ".join(f"model.{key} = {saved.get(key)!r}, here {own[key]!r}" for key in differing)
        raise ConfigError(
            f"the checkpoint is of another model: {told}. Set model.* back, or train the other model in "
            "another job.dump_folder."
        )


def _rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
