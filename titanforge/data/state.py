"""The position in the data as a checkpoint holds it, and joining the ranks' parts."""

from __future__ import annotations

from typing import Any

import torch


def initial_streams(num_streams: int, width: int) -> torch.Tensor:
    """`StreamState` of every stream at the start of a run: int64 [V, width], the first columns epoch,
    document, offset, ordinal."""
    return torch.zeros(num_streams, width, dtype=torch.int64)


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks' `TrainLoader.state_dict()` as one, the same whichever rank merges.

    A stream is where the rank that has taken it farthest says.

    Raises RuntimeError if the ranks read different data or are not at the same step.
    """
    if not states:
        raise ValueError("merge_states: no states")
    for rank, state in enumerate(states):
        for key, value in state.items():
            if key != "streams" and value != states[0][key]:
                raise RuntimeError(
                    f"the ranks' data positions do not belong together: {key} is {states[0][key]} on rank 0 "
                    f"and {value} on rank {rank}"
                )
    stacked = torch.stack([state["streams"] for state in states])
    farthest = stacked[:, :, 3].argmax(dim=0)
    streams = stacked[farthest, torch.arange(stacked.shape[1])]
    merged = {**states[0], "streams": streams}
    check_complete(merged)
    return merged


def check_complete(state: dict[str, Any]) -> None:
    """Raise RuntimeError unless every stream's ordinal is what `samples` consumed in all make it."""
    streams = state["streams"]
    count = len(streams)
    expected = (
        (state["samples"] - torch.arange(count) + count - 1).div(count, rounding_mode="floor").clamp(min=0)
    )
    if not torch.equal(expected, streams[:, 3]):
        stream = int((expected != streams[:, 3]).nonzero()[0])
        raise RuntimeError(
            f"incomplete data position: after {state['samples']} samples stream {stream} must be at sample "
            f"{int(expected[stream])}, not {int(streams[stream, 3])}. "
            "Were all data-parallel ranks' states merged?"
        )
