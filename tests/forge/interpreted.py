"""Run with TRITON_INTERPRET=1: every kernel of a fused step on the CPU. Prints one JSON line."""

from __future__ import annotations

import json

import torch

from tests.forge import toy
from tests.forge.toy import (
    fuse,
    fuse_materialised,
    largest_difference,
    llama,
    options_of,
    ordinary,
    same,
    states,
    train,
    weights,
)
from titanforge.kernels._triton import INTERPRET


def main() -> None:
    found: dict[str, object] = {"interpreted": INTERPRET}
    toy.VOCAB = 90  # a program of the embedding's kernel for each; still ragged, and some are in no batch
    for name, dtype, recipe in (
        ("adamw", "float32", {}),
        ("adamw", "bfloat16", {"state_dtype": "int8", "master_weights": "stochastic_rounding"}),
        ("muon", "bfloat16", {"state_dtype": "bfloat16", "master_weights": "float32"}),
    ):
        options = options_of(name, **recipe)
        torch_dtype = getattr(torch, dtype)
        sizes = {"n_layers": 1, "dim": 16, "n_heads": 2, "n_kv_heads": 1, "hidden_dim": 40}
        sizes["tie_embeddings"] = "int8" in recipe.values()
        fused, formed, plain = (llama(torch_dtype, **sizes) for _ in range(3))
        optimizer, other = fuse(fused, options, dtype), fuse_materialised(formed, options, dtype)
        steps = 2 if dtype == "float32" else 1
        losses = train(fused, optimizer, 0, steps)
        train(formed, other, 0, steps)
        exact = same(weights(fused), weights(formed)) and same(states(optimizer), states(other))
        expected = train(plain, ordinary(plain, options, dtype), 0, steps)
        found[f"{name} {dtype}"] = {
            "bit exact": exact,
            "formed differ by": largest_difference(weights(fused), weights(formed)),
            "losses differ by": max(abs(a - b) for a, b in zip(losses, expected)),
            "weights differ by": largest_difference(weights(fused), weights(plain)),
            "moved": largest_difference(weights(fused), weights(llama(torch_dtype, **sizes))),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
