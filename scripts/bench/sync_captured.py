"""A replica's step as CUDA graphs, for `sync_threads.py`: the host launches a few, not a thousand kernels.

Forward and backward are one graph, and so is each half of the update that always launches the same. What a
sync exchanges between the halves, and so the U that reads it, runs as it is. The policies and the optimizer
are the real ones: they see a step that returns at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from titanforge.captured import WARM_UP_STEPS, CapturedStep, Graph
from titanforge.optim import RuleOptimizer

NewGraph = Callable[[], Graph]


class CapturedGradients:
    """Loss and gradients of one micro-batch, from a graph after the first steps.

    forward: the loss, divided as its gradient is to be, of tokens and labels int64 [B, T].
    """

    def __init__(
        self, forward: Callable[[Tensor, Tensor], Tensor], params: list[Tensor], new_graph: NewGraph
    ) -> None:
        self._forward, self._params = forward, params
        self._batch: list[Tensor] = []
        self._gradients: list[Tensor | None] = []
        self._step = CapturedStep(self._launch, new_graph(), before_capture=self._drop)

    @property
    def captured(self) -> bool:
        return self._step.captured

    def _launch(self) -> Tensor:
        loss = self._forward(*self._batch)
        loss.backward()
        return loss.detach()

    def _drop(self) -> None:
        for param in self._params:
            param.grad = None

    def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss, in memory that the next call overwrites; gradients are in `.grad`, which was None."""
        if not self._batch:
            self._batch = [tokens.clone(), labels.clone()]
        for kept, given in zip(self._batch, (tokens, labels)):
            kept.copy_(given)
        loss = self._step()
        if self._step.captured:
            if not self._gradients:
                self._gradients = [param.grad for param in self._params]
            for param, gradient in zip(self._params, self._gradients):
                param.grad = gradient
        return loss


class CapturedUpdates:
    """An optimizer in front of another, which replays what the other would launch.

    ready: whether gradients lie where they will stay.
    """

    def __init__(self, optimizer: RuleOptimizer, new_graph: NewGraph, ready: Callable[[], bool]) -> None:
        self._optimizer, self._new_graph, self._ready = optimizer, new_graph, ready
        self._steps: dict[Any, CapturedStep[bool]] = {}

    finishes_if = False
    """A step that may turn out to be none is not among those that are captured."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def _go(self, key: Any, launch: Callable[[], None]) -> None:
        def launched() -> bool:
            launch()
            return True

        if key not in self._steps:
            # One more than the gradients take: kernels' tables of where they lie are made before a capture.
            self._steps[key] = CapturedStep(
                launched, self._new_graph(), warm_up_steps=WARM_UP_STEPS + 2, ready=self._ready
            )
        self._steps[key]()

    def step(self, apply_flag: Tensor | None = None, grad_scale: Tensor | None = None) -> None:
        self._optimizer.prepare_step()
        self._go("step", lambda: self._optimizer.apply_step(apply_flag, grad_scale))

    def accumulate_step(
        self, apply_flag: Tensor | None = None, grad_scale: Tensor | None = None, whole: bool = True
    ) -> None:
        if whole and "A" in self._steps:
            raise RuntimeError("a policy that watches whole steps takes both kinds: not captured here")
        self._optimizer.prepare_step()
        self._go(
            "whole A" if whole else "A",
            lambda: self._optimizer.apply_accumulation(apply_flag, grad_scale, whole),
        )

    def finish_step(self, local: Any = None, mean: Any = None) -> None:
        # A rate of its own is a number that Python computes, and a mean an exchange.
        if mean is not None or local is None or local.lr is not None:
            self._optimizer.finish_step(local, mean)
        else:
            self._go(("U", local.kind), lambda: self._optimizer.finish_step(local))
