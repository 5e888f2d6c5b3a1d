"""Which rank, and which of its workers, gets which sample of a step.

Sample i of a run is ordinal i // V of stream i mod V. A step takes the samples [c, c + G), so its set
depends on nothing but c and G. Who gets which is free; what is chosen here lets a rank, and a worker, walk
few streams, because whoever takes a sample must have tokenized the stream up to it.
"""

from __future__ import annotations

import numpy as np


def rank_samples(
    consumed: int, global_batch_size: int, num_streams: int, dp_rank: int, dp_world: int
) -> np.ndarray:
    """The samples of one rank in the step that begins at sample `consumed`: int64 [G / dp_world], ascending
    within what the rank has of a stream. Micro-batch m is the m-th run of local_batch_size of them."""
    samples = np.arange(consumed, consumed + global_batch_size, dtype=np.int64)
    if num_streams % dp_world == 0:
        # Any dp_world samples in a row have each residue once: every rank keeps num_streams / dp_world
        # streams.
        return samples[samples % dp_world == dp_rank]
    by_stream = samples[np.argsort(samples % num_streams, kind="stable")]
    share = global_batch_size // dp_world
    return by_stream[dp_rank * share : (dp_rank + 1) * share]


def worker_of(streams: np.ndarray, num_streams: int, dp_world: int, num_workers: int) -> np.ndarray:
    """The worker that walks each of a rank's streams: always the same one. int64, shape of `streams`."""
    if num_streams % dp_world == 0:
        streams = streams // dp_world
    return streams % num_workers
