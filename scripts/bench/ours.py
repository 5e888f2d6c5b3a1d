"""titanforge's side of the benchmarks: its model, checkpointing, compile and updates, for one device.

The same public pieces as the trainer's, in the trainer's order, without what one device does not need
(meshes, data loading, logging), so that a figure here is a figure of the framework.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from titanforge.captured import CapturedStep, CudaGraph
from titanforge.config.sections import Optimizer as OptimizerConfig
from titanforge.forge import ForgeOptimizer, Steps, build_forge_optimizer
from titanforge.kernels.forms import select_form
from titanforge.models.initialization import initialize_weights
from titanforge.models.registry import build_model
from titanforge.optim import build_optimizer
from titanforge.parallelisms import (
    apply_activation_checkpoint,
    apply_compile,
    clip_factor,
    clip_grad_norm_,
)

CompileMode = Literal["none", "blocks", "whole"]
UPDATES = ("torch-fused", "torch-foreach", "native", "forge", "forge-int8")


class Update(Protocol):
    """The optimizer half of a step."""

    @property
    def capturable(self) -> bool:
        """Whether its device side waits for nothing (any more)."""
        ...

    def zero_grad(self) -> None:
        """Drop the gradients."""

    def prepare(self) -> None:
        """Host side of a step, before its launches; not captured in a graph."""

    def before_backward(self, loss: Tensor) -> None:
        """Between forward and backward, in which a fused update changes the weights."""

    def step(self) -> None:
        """Device side: clip if asked, and update."""

    def state_tensors(self) -> list[Tensor]:
        """The states with a weight's shape."""
        ...


# Name on the command line: family, flavor, and the toy's sizes.
SHAPES: dict[str, tuple[str, str, dict[str, int]]] = {
    "llama3-8b": ("llama3", "8B", {"n_layers": 2, "dim": 64, "n_heads": 4, "n_kv_heads": 2}),
    "qwen3-8b": ("qwen3", "8B", {"n_layers": 2, "dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32}),
}
MEMORY_BUDGET = 0.99  # of `--ac memory_budget`: norms and elementwise products are recomputed, nothing else


def build_llama(**options: Any) -> nn.Module:
    """`build_shape` for Llama-3.1-8B's."""
    return build_shape("llama3-8b", **options)


def build_shape(
    shape: str,
    *,
    tiny: bool,
    seq_len: int,
    device: str,
    ac: str = "none",
    compile_mode: CompileMode = "none",
    fused: bool = False,
    seed: int = 0,
) -> nn.Module:
    """One of `SHAPES` (or its toy) with bf16 weights, initialised, ready for `loss.backward()`.

    fused: its update will run in backward; then blocks are recomputed and compiled as the trainer does it.
    """
    family, flavor, toy = SHAPES[shape]
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model: Any = build_model(
                family,
                "debugmodel" if tiny else flavor,
                vocab_size=512 if tiny else None,
                seq_len=seq_len,
                overrides=toy if tiny else {},
            )[0]
    finally:
        torch.set_default_dtype(previous)
    # Reading the generator's state waits for the device, which a captured step cannot; nothing draws numbers.
    apply_activation_checkpoint(model, ac, preserve_rng_state=False)
    if compile_mode == "blocks":
        budget = MEMORY_BUDGET if ac == "memory_budget" else None
        apply_compile(model, memory_budget=budget, recompute_outside=fused)
        model.output.compile()  # the loss: what `compile.components` has beside "model"
    model.to_empty(device=device)
    initialize_weights(model, seed)
    if compile_mode == "whole":
        model.compile()
    return model.train()


class TorchAdamW:
    """`torch.optim.AdamW` as a user would build it: one group, states in the weights' dtype."""

    def __init__(
        self, model: nn.Module, *, lr: float, max_norm: float, fused: bool, capturable: bool
    ) -> None:
        self.parameters = list(model.parameters())
        self.max_norm = max_norm
        self.capturable = capturable
        on_gpu = self.parameters[0].is_cuda
        # A tensor learning rate lives on the device, so that a captured step can be given another one.
        rate: float | Tensor = torch.tensor(lr, device=self.parameters[0].device) if capturable else lr
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=fused or None,
            foreach=not fused or None,
            capturable=capturable and on_gpu,
        )

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def prepare(self) -> None:
        pass

    def before_backward(self, loss: Tensor) -> None:
        pass

    def step(self) -> None:
        if self.max_norm > 0:
            clip_grad_norm_(self.parameters, self.max_norm)
        self.optimizer.step()

    def state_tensors(self) -> list[Tensor]:
        return [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim() > 0
        ]


class Native:
    """titanforge's own rule and engine. config: what updates the bf16 weights, and how states are kept."""

    def __init__(self, model: nn.Module, *, config: OptimizerConfig, max_norm: float) -> None:
        self.parameters = list(model.parameters())
        self.max_norm = max_norm
        self.optimizer: Any = build_optimizer(model, config, training_dtype="bfloat16")
        self.optimizer.set_lr(1.0)

    @property
    def capturable(self) -> bool:
        return self.optimizer.capturable

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def prepare(self) -> None:
        self.optimizer.begin_captured_step(1)

    def before_backward(self, loss: Tensor) -> None:
        pass

    def step(self) -> None:
        scale = None
        if self.max_norm > 0:
            _, scale = clip_factor(self.parameters, self.max_norm)
        self.optimizer.apply_step(grad_scale=scale)

    def state_tensors(self) -> list[Tensor]:
        return list(_tensors_in(self.optimizer.state_dict()["state"]))


class Forge(Native):
    """The same rule run in backward, where each weight gradient is made: no gradient is stored."""

    def __init__(
        self, model: nn.Module, *, config: OptimizerConfig, max_norm: float, steps: Steps | None = None
    ) -> None:
        if max_norm > 0:
            raise ValueError("the fused arms are timed without clipping: --max-norm 0")
        tokens = torch.arange(8, device=next(model.parameters()).device)[None]
        self._own(
            build_forge_optimizer(
                model,
                config,
                "bfloat16",
                probe=lambda: model(tokens, None, None, tokens),
                steps=steps or Steps(),
            )
        )

    @classmethod
    def of(cls, optimizer: ForgeOptimizer) -> Forge:
        """An optimizer that is attached already."""
        made = object.__new__(cls)
        made._own(optimizer)
        return made

    def _own(self, optimizer: ForgeOptimizer) -> None:
        self.optimizer = optimizer
        self.optimizer.set_lr(1.0)

    def before_backward(self, loss: Tensor) -> None:
        self.optimizer.before_backward(0, torch.isfinite(loss))

    def step(self) -> None:
        self.optimizer.apply_step()


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)


def build_update(
    kind: str,
    model: nn.Module,
    *,
    lr: float,
    max_norm: float,
    capturable: bool = False,
    forge_kernel: str = "auto",
    steps: Steps | None = None,
) -> Update:
    """One of `UPDATES` over all parameters of the model. forge_kernel: as in `[forge]`; steps: if fused."""
    select_form(forge_kernel, next(model.parameters()).device)
    if kind == "native" or kind.startswith("forge"):
        state_dtype: Any = "int8" if kind == "forge-int8" else "bfloat16"
        config = OptimizerConfig(name="AdamW", lr=lr, implementation="native", state_dtype=state_dtype)
        if kind == "native":
            return Native(model, config=config, max_norm=max_norm)
        return Forge(model, config=config, max_norm=max_norm, steps=steps)
    return TorchAdamW(model, lr=lr, max_norm=max_norm, fused=kind == "torch-fused", capturable=capturable)


@dataclass
class TrainStep:
    """zero_grad, forward, loss, backward, update: what every arm is timed on."""

    model: nn.Module
    update: Update

    def forward_backward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean token loss, fp32 scalar on the device; gradients are left in `.grad`."""
        loss = self.model(tokens, None, None, labels) / labels.numel()
        self.update.before_backward(loss.detach())
        loss.backward()
        return loss.detach()

    def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.update.prepare()
        return self.launch(tokens, labels)

    def launch(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Everything but the host side of the update."""
        self.update.zero_grad()
        loss = self.forward_backward(tokens, labels)
        self.update.step()
        return loss


class GraphedStep:
    """The whole step as one CUDA graph, as the trainer captures it (`compile.cuda_graph`).

    Weights and states are updated in place, so they are the graph's static memory; tokens and labels are
    copied into static buffers before each replay. The first calls run as they are.
    """

    def __init__(self, step: TrainStep, tokens: Tensor, labels: Tensor) -> None:
        self.update = step.update
        self.tokens, self.labels = tokens.clone(), labels.clone()
        self.step = CapturedStep(
            lambda: step.launch(self.tokens, self.labels),
            CudaGraph(tokens.device),
            ready=lambda: step.update.capturable,
            before_capture=step.update.zero_grad,
        )

    def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.update.prepare()
        self.tokens.copy_(tokens)
        self.labels.copy_(labels)
        return self.step()


def timed_parts(
    step: TrainStep, pool: list[tuple[Tensor, Tensor]], repeats: int, device: str
) -> dict[str, float]:
    """Median ms of forward + backward and of the update, from further steps after the timed ones."""
    parts: dict[str, list[float]] = {"forward_backward_ms": [], "update_ms": []}

    def clock(work: Callable[[], object]) -> float:
        if device != "cuda":
            start = time.perf_counter()
            work()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    for number in range(repeats):
        tokens, labels = pool[number % len(pool)]
        step.update.prepare()
        step.update.zero_grad()
        parts["forward_backward_ms"].append(clock(lambda t=tokens, y=labels: step.forward_backward(t, y)))
        parts["update_ms"].append(clock(step.update.step))
    return {name: statistics.median(values) for name, values in parts.items()}
