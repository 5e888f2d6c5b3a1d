"""A training step as one CUDA graph: the host launches once, however many kernels the step has.

At few tokens an eager step is mostly Python and launches, and the card waits for them. A captured step
replays the kernels of forward, backward and update as they were issued once, on the same memory: what changes
from step to step (tokens, learning rate, step count, divisors) has to lie in device tensors that are filled
before the replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

import torch

from titanforge.data import Batch

Result = TypeVar("Result")

WARM_UP_STEPS = 3
"""Steps before the capture. The first compiles and allocates what later ones keep, the second meets what the
first left behind (states, compiled code for a second shape); one more to be sure."""


class Graph(Protocol):
    """Records what a function launches, and launches it again."""

    def warm_up(self, launch: Callable[[], Result]) -> Result:
        """Run it as it is, where it will be captured."""
        ...

    def capture(self, launch: Callable[[], Result]) -> Result:
        """Record without running; the result is what each replay fills anew."""
        ...

    def replay(self) -> None:
        """Run what was recorded."""
        ...


class CudaGraph:
    """A CUDA graph and the stream on which it is warmed up and captured.

    Both share one stream: autograd remembers the stream on which it first accumulated a weight's gradient,
    and a capture must not depend on the work of another.

    peak_bytes: the allocator's peak while capturing. What a step needs stays with the graph from then on, but
    the allocator counts it as free.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.peak_bytes = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        outer = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outer.wait_stream(self.stream)

    def warm_up(self, launch: Callable[[], Result]) -> Result:
        with self._on_stream():
            return launch()

    def capture(self, launch: Callable[[], Result]) -> Result:
        torch.cuda.synchronize(self.device)
        # The graph takes memory of its own. What earlier steps left in the cache is needed for it, and
        # so are cuBLAS's workspaces, 32 MiB for each stream and thread that it has seen. Of its own it needs
        # one: backward is recorded from this thread, not from one of autograd's.
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportAttributeAccessIssue]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        graph = torch.cuda.CUDAGraph()
        # Relaxed: other threads (loading, saving) may go on, and tables are uploaded on a stream of their
        # own.
        with (
            torch.cuda.graph(graph, stream=self.stream, capture_error_mode="relaxed"),
            torch.autograd.set_multithreading_enabled(False),
        ):
            result = launch()
        self._graph = graph
        self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        return result

    def replay(self) -> None:
        assert self._graph is not None, "capture comes first"
        self._graph.replay()


class CapturedStep(Generic[Result]):
    """Calls `launch` for each step: the first times as it is, then captures it once and replays it.

    Every call is one step of the run, none is repeated: the warm-up steps train on batches of their own, and
    a capture runs nothing. So a captured run computes what the same run without capture does, bit for bit.

    launch: device work alone, the same at each usual step; reads and writes tensors that never move. It must
        not wait for the device.
    ready: whether nothing but device work is left in it (fp8 states choose their first scales on the host).
    usual: whether the step at hand is like the others. One that is not (Dobb refreshes its bases) runs as it
        is, before the capture and after it: beside the graph's memory, in memory of its own.
    before_capture: frees what `launch` makes anew (gradients), so that the graph finds room.
    around_capture: a context for the capture, which takes seconds.
    """

    def __init__(
        self,
        launch: Callable[[], Result],
        graph: Graph,
        *,
        warm_up_steps: int = WARM_UP_STEPS,
        ready: Callable[[], bool] = lambda: True,
        usual: Callable[[], bool] = lambda: True,
        before_capture: Callable[[], object] = lambda: None,
        around_capture: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._launch = launch
        self.graph = graph
        self._warm_up_steps = warm_up_steps
        self._ready = ready
        self._usual = usual
        self._before_capture = before_capture
        self._around_capture = around_capture
        self._steps = 0
        self._result: Result | None = None

    @property
    def captured(self) -> bool:
        """Whether usual steps are replays from now on."""
        return self._result is not None

    def __call__(self) -> Result:
        """One step. Of a replayed one the result is the same tensors each time: read or copy them before the
        next.

        Raises RuntimeError, naming the key, if the step cannot be captured.
        """
        if not self._usual():
            return self.graph.warm_up(self._launch)
        if self._result is None:
            if self._steps < self._warm_up_steps or not self._ready():
                self._steps += 1
                return self.graph.warm_up(self._launch)
            with self._around_capture():
                self._result = self._capture()
        self.graph.replay()
        return self._result

    def _capture(self) -> Result:
        self._before_capture()
        try:
            return self.graph.capture(self._launch)
        except RuntimeError as error:
            raise RuntimeError(
                "compile.cuda_graph = true: the step could not be captured; set it to false to do without. "
                f"What failed: {str(error).strip().splitlines()[0]}"
            ) from error


class StaticBatches:
    """The micro-batches of a step in device memory that stays where it is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.batches: list[Batch] = []

    def fill(self, batches: list[Batch]) -> None:
        """Copy a step's micro-batches in. Raises RuntimeError for other shapes than the first time."""
        if not self.batches:
            self.batches = [Batch(*(part.to(self._device, copy=True) for part in batch)) for batch in batches]
            return
        for own, given in zip(self.batches, batches, strict=True):
            for target, source in zip(own, given):
                if target.shape != source.shape:
                    raise RuntimeError(
                        f"compile.cuda_graph = true: a micro-batch of {tuple(source.shape)} tokens after "
                        f"one of {tuple(target.shape)}: a captured step has one shape; set it to false"
                    )
                target.copy_(source, non_blocking=True)
