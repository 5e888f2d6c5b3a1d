"""Random tokens for timing: non-zero ids, several batches to rotate over, the same for every arm."""

from __future__ import annotations

import torch

# Distinct batches. The loss of a real model falls on them when they come round again, which is how a run
# shows that it trained; zeros or one repeated batch would flatter caches and the matrix units' power draw.
POOL_SIZE = 4


def token_pool(
    vocab_size: int, batch: int, seq_len: int, *, device: str = "cpu", seed: int = 1234
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`POOL_SIZE` pairs (tokens, labels), int64 [batch, seq_len] each; labels are the next tokens."""
    generator = torch.Generator().manual_seed(seed)
    pool = []
    for _ in range(POOL_SIZE):
        ids = torch.randint(1, vocab_size, (batch, seq_len + 1), generator=generator)
        pool.append((ids[:, :-1].contiguous().to(device), ids[:, 1:].contiguous().to(device)))
    return pool
