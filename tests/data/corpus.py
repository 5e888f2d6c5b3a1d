"""A small corpus with every awkward kind of document, and loaders over it."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

from titanforge.data import Batch, TrainLoader, build_tokenizer, build_train_loader

SEQ_LEN = 16


def texts(count: int = 60, seed: int = 0) -> list[str]:
    """Empty, one-byte, ordinary, and many-sequence documents, all different but for the empty ones."""
    rng = random.Random(seed)
    lengths = [0, 1, 2, 15, 16, 17, 31, 400, *(rng.randrange(1, 60) for _ in range(count - 8))]
    rng.shuffle(lengths)
    return ["".join(rng.choice("abcdefghijklmnop ") for _ in range(n)) for n in lengths]


def write_jsonl(path: Path, documents: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


def loader(path: str, **changes) -> TrainLoader:
    settings = {
        "dataset": "jsonl",
        "dataset_path": path,
        "text_key": "text",
        "tokenizer": build_tokenizer("byte"),
        "seq_len": SEQ_LEN,
        "local_batch_size": 2,
        "global_batch_size": 24,
        "dp_rank": 0,
        "dp_world": 1,
        "seed": 3,
        "num_streams": 12,
        "shuffle": True,
        "repeat": True,
        "document_mask": True,
        "validation_fraction": 0.0,
    }
    return build_train_loader(**{**settings, **changes})


def ranks(path: str, world: int, **changes) -> list[TrainLoader]:
    return [loader(path, dp_rank=rank, dp_world=world, **changes) for rank in range(world)]


def rows(batch: Batch) -> list[tuple]:
    return [tuple(tuple(t[i].tolist()) for t in batch) for i in range(len(batch.tokens))]


def step(loaders: list[TrainLoader]) -> Counter:
    """The next global batch of all ranks: a multiset of (tokens, labels, positions, document_ids)."""
    return Counter(
        row for loader in loaders for _ in range(loader.plan.micro_batches) for row in rows(next(loader))
    )
