"""The table in docs/models.md of what works with which model: every cell is tried."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed_harness import run_distributed
from tests.models.families import batch, tiny
from titanforge.models.decoder import Decoder
from titanforge.models.huggingface import form_of
from titanforge.models.registry import MODELS
from titanforge.parallelisms import ParallelDims
from titanforge.parallelisms.activation_checkpoint import apply_activation_checkpoint
from titanforge.parallelisms.compile import apply_compile
from titanforge.parallelisms.data_parallel import apply_fsdp

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
# First cell of a row → kind of tiny model.
ROWS = {
    "`llama3`": "llama3",
    "`qwen3`": "qwen3",
    "`qwen3`, experts": "qwen3_moe",
    "`gpt2`": "gpt2",
    "`gpt2`, modern": "gpt2_modern",
}


def table(heading: str) -> list[list[str]]:
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if not row[0].startswith("---")]


HEADER, *CELLS = table("What works with which")


def same_loss_and_gradients(kind: str, change: Any, **changes: Any) -> bool:
    tokens, labels = batch()
    ids = torch.arange(12).expand(2, 12) // 5
    losses, gradients = [], []
    for changed in (False, True):
        model = tiny(kind, **changes)
        if changed:
            change(model)
        loss = model(tokens, None, ids, labels)
        loss.backward()
        losses.append(loss)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*losses)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)
    return True


def documents(kind: str) -> bool:
    model, (tokens, _) = tiny(kind), batch()
    ids = torch.arange(12).expand(2, 12) // 5
    first = model(tokens, None, ids)
    tokens[:, :5] = (tokens[:, :5] + 1) % 50
    second = model(tokens, None, ids)
    # Experts see other rows beside a token's own, which may round its product otherwise.
    torch.testing.assert_close(first[:, 5:], second[:, 5:])
    return not torch.allclose(first[:, :5], second[:, :5], atol=0.1)


def compiles(kind: str) -> bool:
    torch._dynamo.reset()
    return same_loss_and_gradients(kind, lambda model: apply_compile(model, "aot_eager"))


def recomputes(kind: str) -> bool:
    return all(
        same_loss_and_gradients(kind, lambda model, mode=mode: apply_activation_checkpoint(model, mode))
        for mode in ("full", "selective")
    )


def ties(kind: str) -> bool:
    model = tiny(kind, tie_embeddings=True)
    return model.output is not None and model.output.weight is model.tok_embeddings.weight


def has_experts(kind: str) -> bool:
    return any(p.dim() == 3 for p in tiny(kind).parameters())


def exchanges(kind: str) -> bool:
    try:
        form_of(tiny(kind).args)
    except ValueError:
        return False
    return True


CHECKS = {
    "document masks": documents,
    "compile": compiles,
    "recomputation": recomputes,
    "tied head": ties,
    "experts": has_experts,
    "Hugging Face": exchanges,
}


def sharded(rank: int, world_size: int, kinds: list[str]) -> list[str]:
    """Kinds whose loss and gradients are the same when sharded."""
    dims = ParallelDims(dp_replicate=1, dp_shard=world_size, cp=1, tp=1, pp=1, ep=1, world_size=world_size)
    dims.build_mesh("cpu")
    tokens, labels = batch()
    for kind in kinds:
        # What a batch says of the load is each rank's own: without it the sum over ranks is the whole.
        changes = {"moe_balancing": "none"} if kind == "qwen3_moe" else {}
        plain, model = tiny(kind, **changes), tiny(kind, **changes)
        plain(tokens, labels=labels).backward()
        apply_fsdp(model, dims.get_mesh("dp_shard"), param_dtype=None)
        model(tokens[rank : rank + 1], labels=labels[rank : rank + 1]).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5, msg=f"{kind} {name}"
            )
    return kinds


def test_table_lists_every_kind_and_every_check():
    assert [row[0] for row in CELLS] == list(ROWS)
    assert set(HEADER[1:]) == {*CHECKS, "FSDP"}


@pytest.mark.parametrize("column", CHECKS)
@pytest.mark.parametrize("row", CELLS, ids=lambda row: ROWS[row[0]])
def test_cell_is_true(row, column):
    stated = row[HEADER.index(column)]
    assert stated == ("yes" if CHECKS[column](ROWS[row[0]]) else "no")


def test_sharded_column_is_true():
    stated = [ROWS[row[0]] for row in CELLS if row[HEADER.index("FSDP")] == "yes"]
    assert stated == list(ROWS.values())
    run_distributed(sharded, 2, stated, timeout=180)


def test_every_size_is_listed_with_its_head():
    listed = set()
    sizes = [line.strip("|").split("|") for line in PAGE.partition("## ")[0].splitlines() if line[:1] == "|"]
    for family, flavors, head in sizes[2:]:
        (name,) = re.findall(r"`(\w+)`", family)
        for flavor in re.findall(r"`([\w.-]+)`", flavors):
            args = MODELS[name].flavors[flavor]
            assert args.tie_embeddings == head.strip().startswith("tied"), flavor
            listed.add((name, flavor))
    assert listed == {(name, flavor) for name, spec in MODELS.items() for flavor in spec.flavors}


def test_every_family_is_a_decoder():
    assert all(isinstance(tiny(kind), Decoder) for kind in ROWS.values())
