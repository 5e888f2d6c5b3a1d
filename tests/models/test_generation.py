"""Sampling: what is drawn, when it stops, what it sees of a long text."""

from __future__ import annotations

import pytest
import torch

from tests.models.test_llama3 import tiny_model
from titanforge.models.generation import generate

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


def greedy_by_hand(model, tokens: torch.Tensor, new: int, window: int) -> torch.Tensor:
    for _ in range(new):
        logits = model.logits(model(tokens[:, -window:]))
        tokens = torch.cat((tokens, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return tokens


def test_greedy_equals_stepping_by_hand_also_past_the_window():
    model = tiny_model()  # sees 16 tokens
    text = generate(model, PROMPT, 20, temperature=0)
    assert text.shape == (1, 25)
    with torch.no_grad():
        assert torch.equal(text, greedy_by_hand(model, PROMPT, 20, 16))
        long = torch.arange(30)[None]
        assert torch.equal(generate(model, long, 3, temperature=0), greedy_by_hand(model, long, 3, 16))


def test_prompt_is_untouched_and_nothing_new_is_allowed():
    assert torch.equal(generate(tiny_model(), PROMPT, 0), PROMPT)


def test_same_generator_same_text():
    model = tiny_model()
    first, again, other = (
        generate(model, PROMPT, 10, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_draws_follow_temperature_and_top_k():
    model = tiny_model()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        logits = model(PROMPT, logits_at=-1)[0] / 0.7
    kept = logits.topk(3).indices
    expected = torch.zeros(50).index_put_((kept,), logits[kept].softmax(0))
    draws = torch.stack([generate(model, PROMPT, 1, 0.7, 3, generator)[0, -1] for _ in range(1000)])
    seen = torch.bincount(draws, minlength=50) / 1000
    assert set(draws.tolist()) <= set(kept.tolist())
    torch.testing.assert_close(seen, expected, atol=0.08, rtol=0)  # five standard deviations
    assert torch.equal(
        generate(model, PROMPT, 5, 1.0, 1, generator), generate(model, PROMPT, 5, temperature=0)
    )


def test_stops_after_the_end_token():
    model = tiny_model()
    text = generate(model, PROMPT, 10, temperature=0)
    end = int(text[0, 7])
    place = 5 + text[0, 5:].tolist().index(end)
    assert torch.equal(generate(model, PROMPT, 10, temperature=0, eos_id=end), text[:, : place + 1])


def test_run_to_end_calls_the_model_as_often_whatever_is_drawn():
    model = tiny_model()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    text = generate(model, PROMPT, 10, temperature=0)
    end = int(text[0, 6])
    stopped = generate(model, PROMPT, 10, temperature=0, eos_id=end, run_to_end=True)
    assert len(calls) == 20
    assert torch.equal(stopped, generate(model, PROMPT, 10, temperature=0, eos_id=end))


def test_no_graph_is_kept():
    assert not generate(tiny_model(), PROMPT, 2).requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": torch.zeros(1, 0, dtype=torch.int64)}, r"shape \[1, 0\]"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.int64)}, r"shape \[2, 3\]"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"top_k": 0}, "top_k = 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny_model(), **{"tokens": PROMPT, "max_new_tokens": 1, **arguments})
