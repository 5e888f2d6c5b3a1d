"""Payloads and states against the Dobb paper's Tables 3 and 7, its numbers, and what optimizers hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titanforge.config.sections import Optimizer
from titanforge.models.registry import build_model
from titanforge.optim import build_groups, build_optimizer, exchange_lines, factor_values, update_bytes
from titanforge.optim.accounting import cross_shard_payload, second_moment_entries, state_entries
from titanforge.optim.matrix_options import DobbOptions
from titanforge.optim.orthonormal import _noise as orthonormal_noise

M, N = 96, 32


@pytest.mark.parametrize("axis", ["output", "input"])
def test_table_3(axis) -> None:
    assert cross_shard_payload("muon", M, N, axis) == M * N
    assert cross_shard_payload("dion", M, N, axis, rank_fraction=0.25) == 8 * (M + N)
    assert cross_shard_payload("dobb", M, N, axis) == 0
    assert cross_shard_payload("adamw", M, N, axis) == 0


@pytest.mark.parametrize(
    ("side", "norm", "output", "input"),
    [("A", "linf", 0, 0), ("G", "linf", 0, 0), ("A", "l2", N, 0), ("G", "l2", 0, M)],
)
def test_table_7(side: str, norm: str, output: int, input: int) -> None:
    dobb = DobbOptions(side=side, norm=norm)
    assert cross_shard_payload("dobb", M, N, "output", dobb=dobb) == output
    assert cross_shard_payload("dobb", M, N, "input", dobb=dobb) == input


def test_nothing_is_exchanged_where_nothing_is_sharded() -> None:
    for name in ("muon", "dion", "rmnp", "dobb", "adamw"):
        assert cross_shard_payload(name, M, N, "none", dobb=DobbOptions(norm="l2")) == 0


def test_the_numbers_of_section_5() -> None:
    """A 4096 x 4096 projection in fp32."""
    n = 4096
    assert 4 * cross_shard_payload("muon", n, n, "input") / 1e6 == pytest.approx(67.11, abs=0.005)
    dion = 4 * cross_shard_payload("dion", n, n, "input", rank_fraction=64 / n)
    assert dion / 1e6 == pytest.approx(2.10, abs=0.005)
    columns = 4 * cross_shard_payload("dobb", n, n, "output", dobb=DobbOptions(norm="l2"))
    assert columns / 1e6 == pytest.approx(0.0164, abs=5e-5)
    moments = 4 * second_moment_entries(n, n, DobbOptions(blocks=16))
    assert moments == 4_194_304
    assert moments / 9 / 1e6 == pytest.approx(0.466, abs=5e-4)


@pytest.mark.parametrize("name", ["Muon", "RMNP", "Dion", "Dobb", "Dobb-G"])
def test_states_are_those_that_an_optimizer_has(name: str) -> None:
    options = Optimizer(name=name.split("-")[0])
    options.dion.rank_fraction = 0.25
    options.dobb.blocks = 4
    options.dobb.side = "G" if name.endswith("G") else "A"
    model = nn.Module()
    model.linear = nn.Linear(N, M, bias=False)
    states = build_optimizer(model, options, "float32").state_dict()["state"]["linear.weight"]
    stored = sum(tensor.numel() for slot, tensor in states.items() if slot != "captured_steps")
    dobb = DobbOptions(side=options.dobb.side, blocks=4)
    assert stored == state_entries(options.name.lower(), M, N, rank_fraction=0.25, dobb=dobb)


def test_a_whole_model_is_accounted_for_as_in_the_paper() -> None:
    """Figure 1: Dion's payload on GPT-2 XL is 1.5 rho of Muon's mn; a fused QKV counts as its three matrices.
    Muon's ranks hand over less: of 4 shards a quarter of the momenta and as much of updates.
    """
    with torch.device("meta"):
        model, _ = build_model("gpt2", "1.56B", vocab_size=1, seq_len=8)
    told = {}
    for name in ("Muon", "Dion", "RMNP", "Dobb"):
        options = Optimizer(name=name)
        options.dion.rank_fraction = 1 / 16
        options.dobb.blocks = 16
        (told[name],) = exchange_lines(build_groups(model, options), 4)
    entries = 48 * (4 * 1600**2 + 2 * 4 * 1600**2)
    assert told["Muon"] == f"muon sends {2 * entries // 4:,} scalars a step between 4 shards"
    assert told["Dion"] == f"dion sends {entries * 15 // 160:,} scalars a step between 4 shards"
    assert told["RMNP"] == "rmnp sends 0 scalars a step between 4 shards"
    moments = 48 * (3 * 1600**2 + 6400**2) // 16
    assert told["Dobb"] == (
        f"dobb sends 0 scalars a step between 4 shards; second moments, {moments:,} scalars, every 9 steps"
    )
    assert exchange_lines(build_groups(model, Optimizer(name="Muon")), 1) == []
    dion = Optimizer(name="Dion")
    dion.dion.rank_fraction = 1 / 16
    # Between replicas: r (m + n) of four square matrices and two that are four times as wide.
    assert factor_values(build_groups(model, dion)) == 48 * 100 * (4 * 2 * 1600 + 2 * 5 * 1600)
    dion.dion.rank_fraction = 1.0
    assert factor_values(build_groups(model, dion)) == 0
    alone = build_groups(model, options)
    assert exchange_lines(alone, 1) == [], "one rank has nobody to send second moments to"
    (told["replicas"],) = exchange_lines(alone, 1, replicas=2)
    assert told["replicas"] == f"dobb sends second moments, {moments:,} scalars, every 9 steps"


def test_room_of_updates() -> None:
    """By blocks it is that of one block's matrices of a shape; what Dion keeps is not."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleList([nn.Linear(N, M), nn.Linear(N, M)]) for _ in range(4))
    by_block = lambda name: name.split(".")[1]  # noqa: E731
    muon = build_groups(model, Optimizer(name="Muon"))
    assert update_bytes(muon) == 4 * 8 * (M * N + N * N)
    assert update_bytes(muon, by_block) == 4 * 2 * (M * N + N * N)
    assert update_bytes(muon, shards=4) == 2 * (12 * M * N + 4 * N * N)
    assert update_bytes(muon, shards=16) == 12 * M * N + 4 * N * N
    options = Optimizer(name="Dion")
    options.dion.rank_fraction = 0.25
    dion, kept = build_groups(model, options), orthonormal_noise(M, 8, torch.device("cpu")).nbytes
    assert update_bytes(dion) - kept == 4 * (update_bytes(dion, by_block) - kept) > 0
    assert update_bytes(build_groups(model, Optimizer())) == 0
