"""A small Llama, its batches, and one loop for fused and ordinary optimizers alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titanforge.config.sections import Optimizer
from titanforge.forge import ForgeOptimizer, Granule, ParamPlan, Steps, attach, build_forge_optimizer, plan
from titanforge.models.initialization import initialize_weights
from titanforge.models.registry import build_model
from titanforge.optim import build_optimizer
from titanforge.optim.build import build_groups, build_recipe

VOCAB, TOKENS = 300, 16
SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 72}


def llama(dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """An untied Llama with initialised weights; ragged shapes (hidden 72, vocabulary 300)."""
    model, _ = build_model(
        "llama3", "debugmodel", vocab_size=VOCAB, seq_len=TOKENS, overrides={**SIZES, **overrides}
    )
    model = model.to(dtype)
    initialize_weights(model, 0)
    return model


def batch(number: int, sequences: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens and labels of one micro-batch, some labels not counted."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCAB, (sequences, TOKENS + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, number % TOKENS] = -100
    return tokens[:, :-1], labels


def llama_loss(model: nn.Module, number: int) -> Tensor:
    device = next(model.parameters()).device
    tokens, labels = (part.to(device) for part in batch(number))
    return model(tokens, None, None, labels) / (2 * TOKENS - 1)


def options_of(name: str = "AdamW", **changes: Any) -> Optimizer:
    return Optimizer(**{"name": name, "lr": 1e-3, **changes})


def fuse(
    model: nn.Module,
    options: Optimizer,
    dtype: str = "float32",
    *,
    loss: Callable[[Any, int], Tensor] = llama_loss,
    **steps: Any,
) -> ForgeOptimizer:
    """`forge.attach` from the options, probed with the first batch."""
    return build_forge_optimizer(
        model, options, dtype, probe=lambda: loss(model, 0), steps=Steps(**steps), seed=3
    )


def fuse_materialised(
    model: nn.Module, options: Optimizer, dtype: str = "float32", **steps: Any
) -> ForgeOptimizer:
    """The same operands, but each gradient is formed from the same tiles and handed to the flat pass."""

    def formed(rule: Any, placement: Any, mesh: Any, schedule: Any) -> ParamPlan:
        decided = plan(rule, placement, mesh, schedule)
        return ParamPlan(Granule.LAYER, "formed for comparison", deferred=decided.deferred)

    return attach(
        model,
        build_groups(model, options),
        build_recipe(options, dtype),
        probe=lambda: llama_loss(model, 0),
        steps=Steps(**steps),
        seed=3,
        planner=formed,
    )


def ordinary(model: nn.Module, options: Optimizer, dtype: str = "float32") -> Any:
    return build_optimizer(model, options, dtype, seed=3)


def train(
    model: Any,
    optimizer: Any,
    first: int,
    last: int,
    *,
    micro_batches: int = 1,
    loss: Callable[[Any, int], Tensor] = llama_loss,
) -> list[float]:
    """Steps first … last - 1; returns their mean losses. The learning rate moves: a stale one would show."""
    losses = []
    for step in range(first, last):
        optimizer.set_lr(1.0 / (1 + 0.1 * step))
        optimizer.zero_grad()
        optimizer.begin_step(micro_batches)
        total = 0.0
        for index in range(micro_batches):
            value = loss(model, step * micro_batches + index) / micro_batches
            optimizer.before_backward(index, torch.isfinite(value.detach()))
            value.backward()
            total += float(value.detach())
        optimizer.step()
        losses.append(total)
    return losses


def kept_bytes(model: Any, optimizer: Any, step: int, micro_batches: int = 1) -> list[int]:
    """Bytes that each micro-batch's forward keeps for backward, weights and buffers apart; takes the step."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: list[int] = []
    optimizer.zero_grad()
    optimizer.begin_step(micro_batches)
    for index in range(micro_batches):
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = llama_loss(model, step * micro_batches + index) / micro_batches
        optimizer.before_backward(index, torch.isfinite(loss.detach()))
        loss.backward()
        found.append(sum(sizes.values()))
    optimizer.step()
    return found


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def states(optimizer: Any) -> dict[str, Tensor]:
    return {
        f"{name}.{slot}": tensor.clone()
        for name, slots in optimizer.state_dict()["state"].items()
        for slot, tensor in slots.items()
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a)
