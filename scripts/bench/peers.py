"""Other people's optimizers as arms of `step.py`, each driven as its own documentation says.

    flashoptim  pip install flashoptim     FlashOptim's AdamW, each gradient released by a hook in backward
    optimi      pip install torch-optimi   optimi's AdamW with gradient release and Kahan summation
    bnb         pip install bitsandbytes   AdamW8bit
    torchao     pip install torchao        AdamW8bit
    galore      pip install galore-torch   GaLore, rank 128
    apollo      pip install apollo-torch   APOLLO, rank 256
    adalomo     pip install lomo-optim     AdaLomo
    muon                                   torch.optim.Muon for the blocks' matrices, fused AdamW for the rest

A driver only: nothing of theirs is copied or changed, with two exceptions, told here. GaLore's projections
come from random orthonormal matrices instead of an SVD of each gradient, which it takes every 200 steps and
which for this shape is minutes: its time is therefore that of the steps between. And galore-torch,
apollo-torch and lomo-optim import a handful of names from transformers that a step does not need: where it
is not installed they are given placeholders.
"""

# None of them is a dependency of ours, so the type checker cannot find them.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
GALORE_RANK, APOLLO_RANK, REFRESH = 128, 256, 200


class Peer:
    """An optimizer's half of a step (`ours.Update`): gradients as usual, then its `step`."""

    capturable = False

    def __init__(self, optimizer: Any, *others: Any) -> None:
        self.optimizers: tuple[Any, ...] = (optimizer, *others)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def prepare(self) -> None:
        pass

    def before_backward(self, loss: Tensor) -> None:
        pass

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_tensors(self) -> list[Tensor]:
        return []  # each stores them in its own way


class InBackward(Peer):
    """One whose hooks do everything while backward runs."""

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        pass


class AdaLomo(InBackward):
    """Its hooks update the weights that have their gradient whenever another one gets its own; the last one
    is left for the end.
    """

    def before_backward(self, loss: Tensor) -> None:
        self.optimizers[0].step_num += 1

    def step(self) -> None:
        self.optimizers[0].grad_func(0)


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices of the blocks, everything else)."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        inside = name.startswith("layers.") and parameter.dim() == 2
        (matrices if inside else others).append(parameter)
    return matrices, others


def _flashoptim(model: nn.Module, lr: float) -> Peer:
    import flashoptim

    options: dict[str, Any] = {}
    if not next(model.parameters()).is_cuda:  # there it neither quantises nor fuses
        options = {"quantize": False, "fused": False, "master_weight_bits": None}
    optimizer = flashoptim.FlashAdamW(
        model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, **options
    )
    flashoptim.enable_gradient_release(model, optimizer)
    return InBackward(optimizer)


def _optimi(model: nn.Module, lr: float) -> Peer:
    import optimi

    optimizer = optimi.AdamW(
        model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, gradient_release=True
    )
    optimi.prepare_for_gradient_release(model, optimizer)
    return InBackward(optimizer)


def _bnb(model: nn.Module, lr: float) -> Peer:
    import bitsandbytes

    return Peer(
        bitsandbytes.optim.AdamW8bit(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
    )


def _torchao(model: nn.Module, lr: float) -> Peer:
    from torchao.optim import AdamW8bit

    return Peer(AdamW8bit(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY))


def _galore(model: nn.Module, lr: float) -> Peer:
    with _transformers_or_its_names():
        import galore_torch
        from galore_torch.galore_projector import GaLoreProjector

    def random_basis(self: Any, weights: Tensor, rank: int, type: str) -> Tensor:  # the name is theirs
        rows, columns = weights.shape
        tall = torch.randn(rows if type == "left" else columns, rank, device=weights.device)
        basis = torch.linalg.qr(tall).Q.to(weights.dtype)
        return basis if type == "left" else basis.t().contiguous()

    GaLoreProjector.get_orthogonal_matrix = random_basis
    matrices, others = _split(model)
    low_rank = {"rank": GALORE_RANK, "update_proj_gap": REFRESH, "scale": 0.25, "proj_type": "std"}
    groups: list[dict[str, Any]] = [{"params": others}, {"params": matrices, **low_rank}]
    return Peer(
        galore_torch.GaLoreAdamW(
            groups, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, no_deprecation_warning=True
        )
    )


def _apollo(model: nn.Module, lr: float) -> Peer:
    with _transformers_or_its_names():
        import apollo_torch

    matrices, others = _split(model)
    low_rank = {
        "rank": APOLLO_RANK,
        "proj": "random",
        "scale_type": "channel",
        "scale": 1,
        "update_proj_gap": REFRESH,
        "proj_type": "std",
    }
    groups: list[dict[str, Any]] = [{"params": others}, {"params": matrices, **low_rank}]
    return Peer(apollo_torch.APOLLOAdamW(groups, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY))


def _adalomo(model: nn.Module, lr: float) -> Peer:
    with _transformers_or_its_names():
        import lomo_optim

    # bf16 has the range of float32: no loss scale.
    return AdaLomo(lomo_optim.AdaLomo(model, lr=lr, loss_scale=0, weight_decay=WEIGHT_DECAY))


def _muon(model: nn.Module, lr: float) -> Peer:
    matrices, others = _split(model)
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    return Peer(muon, torch.optim.AdamW(others, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True))


PEERS: dict[str, tuple[Callable[[nn.Module, float], Peer], tuple[str, ...]]] = {
    "flashoptim": (_flashoptim, ("flashoptim",)),
    "optimi": (_optimi, ("optimi",)),
    "bnb": (_bnb, ("bitsandbytes",)),
    "torchao": (_torchao, ("torchao",)),
    "galore": (_galore, ("galore_torch", "bitsandbytes")),
    "apollo": (_apollo, ("apollo_torch", "bitsandbytes")),
    "adalomo": (_adalomo, ("lomo_optim",)),
    "muon": (_muon, ()),
}
"""Arm: how it is built, and the modules that it needs beside torch."""
GPU_ONLY = ("adalomo",)


def missing(peer: str, device: str) -> str:
    """Why this peer cannot run here; empty if it can."""
    absent = [module for module in PEERS[peer][1] if importlib.util.find_spec(module) is None]
    if peer == "muon" and not hasattr(torch.optim, "Muon"):
        absent.append("torch.optim.Muon")
    if absent:
        return f"not installed: {', '.join(absent)}"
    return (
        "its states are on a GPU whatever the weights are on" if peer in GPU_ONLY and device != "cuda" else ""
    )


def build_peer(peer: str, model: nn.Module, lr: float) -> Peer:
    """The peer's optimizer over all parameters of a model, its hooks in place."""
    return PEERS[peer][0](model, lr)


@contextlib.contextmanager
def _transformers_or_its_names() -> Iterator[None]:
    """While a peer is imported: the names that it takes from transformers, where that is not installed."""
    if importlib.util.find_spec("transformers") is not None:
        yield
        return
    logger = types.SimpleNamespace(get_logger=logging.getLogger)
    names: dict[str, dict[str, Any]] = {
        "transformers": {"__path__": []},
        "transformers.integrations": {},
        "transformers.integrations.deepspeed": {"is_deepspeed_zero3_enabled": lambda: False},
        "transformers.utils": {"logging": logger},
        "transformers.utils.versions": {"require_version": lambda *_: None},
    }
    for name, members in names.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(members)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
