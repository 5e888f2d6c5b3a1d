"""What `scripts/bench/matrix.py` leaves in a model's bases is what training would."""

from __future__ import annotations

import argparse

import torch

from scripts.bench import matrix_steps
from titanforge.optim import build_optimizer


def test_statistics_stay_positive_semidefinite_when_bases_are_warmed_again_and_again() -> None:
    args = argparse.Namespace(dtype="bfloat16", device="cpu", tiny=True, layers=2)
    model = matrix_steps.gpt2(args)
    chosen = matrix_steps.options(args, "Dobb", overlap_refresh=False, blocks=2)
    optimizer = build_optimizer(model, chosen, args.dtype)
    tokens = matrix_steps.batch(args, 256)
    weights = optimizer.capture.weights
    for repeat in range(4):
        matrix_steps.warm_bases(optimizer)
        for weight in weights:
            assert torch.equal(weight.statistic, torch.eye(weight.width).expand_as(weight.statistic)), repeat
        model.zero_grad(set_to_none=True)
        optimizer.begin_step(1)
        loss = model(tokens, None, None, tokens) / tokens.numel()
        optimizer.before_backward(0)
        loss.backward()
        optimizer.step()
        for weight in weights:  # bf16 products are off by 2^-9 of an entry, the shift is 2^-7 of a row's sum
            c = weight.statistic
            assert (c != torch.eye(weight.width)).any()
            bound = 2**-8 * c.abs().sum(dim=-1).amax(dim=-1)
            assert (torch.linalg.eigvalsh(c).amin(dim=-1) > -bound).all(), (repeat, weight.name)
    assert int(optimizer.capture.failed_blocks) == 0
