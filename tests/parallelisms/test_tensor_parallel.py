"""Models split over tensor-parallel ranks: the loss, gradients and logits of the whole one."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.distributed_harness import run_distributed
from tests.models.families import KINDS
from titanforge.models.initialization import initialize_weights
from titanforge.models.registry import build_model
from titanforge.parallelisms import (
    apply_activation_checkpoint,
    apply_fsdp,
    apply_tensor_parallel,
    clip_factor,
    complete_gradients,
    pad_sequences,
)
from titanforge.parallelisms.sequence_collectives import Sharers, scatter_sequence

DENSE = [kind for kind in KINDS if "moe" not in kind]
VOCABULARY = 51  # odd, so that ranks hold different numbers of rows


def build(kind: str):
    family, flavor, sizes = KINDS[kind]
    sizes = {"dim": 32, "n_layers": 2, "vocab_size": VOCABULARY, **sizes}
    if "n_kv_heads" in sizes:
        sizes["n_kv_heads"] = 2
    with torch.device("meta"):
        model, _ = build_model(family, flavor, seq_len=16, overrides=sizes)
    return model


def fill(model) -> None:
    """Initial weights, then noise that is equal in every layout: norms of ones would hide mistakes."""
    model.to_empty(device="cpu")
    initialize_weights(model, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
            if isinstance(parameter, DTensor):
                shape, offset = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                own = tuple(slice(start, start + size) for start, size in zip(offset, shape))
                parameter.to_local().add_(0.2 * noise[own])
            else:
                parameter.add_(0.2 * noise)


def batch(B: int = 4, T: int = 16):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (B, T), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[0, :7] = -100
    places = torch.arange(T).expand(tokens.shape)
    documents = (places >= 9).long()
    return tokens, (places - 9 * documents), documents, labels


def assert_same_gradients(split, whole) -> None:
    wanted = dict(whole.named_parameters())
    assert wanted.keys() == dict(split.named_parameters()).keys()
    for name, parameter in split.named_parameters():
        assert torch.equal(parameter.full_tensor(), wanted[name]), name
        assert parameter.grad.placements == parameter.placements, name
        torch.testing.assert_close(
            parameter.grad.full_tensor(),
            wanted[name].grad,
            rtol=2e-4,
            atol=2e-5,
            msg=f"{name}: {{}}".format,
        )


def _split_equals_whole(rank: int, world_size: int, kind: str, tp: int) -> None:
    mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("dp_shard", "tp"))
    whole, split = build(kind), build(kind)
    apply_tensor_parallel(split, mesh["tp"])
    pad_sequences(split, tp)
    apply_activation_checkpoint(split, "selective", "op")
    sharded = tp < world_size
    if sharded:
        apply_fsdp(split, mesh["dp_shard"], torch.float32)
    fill(whole)
    fill(split)
    if not sharded:
        complete_gradients(split)
    calls = batch()
    own = mesh.get_local_rank("dp_shard")
    rows = 4 // mesh["dp_shard"].size()
    for _ in range(2):  # two micro-batches: gradients add up
        expected = whole(*calls)
        expected.backward()
        loss = split(*(each[own * rows : (own + 1) * rows] for each in calls))
        loss.backward()
        loss = loss.detach()
        if sharded:
            torch.distributed.all_reduce(loss, group=mesh.get_group("dp_shard"))
        torch.testing.assert_close(loss, expected.detach(), rtol=2e-6, atol=1e-5)
    assert_same_gradients(split, whole)
    norm, _ = clip_factor(split.parameters(), 1.0)
    torch.testing.assert_close(norm, clip_factor(whole.parameters(), 1.0)[0], rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        tokens = calls[0][:1, :13]  # no multiple of the ranks
        for place in (11, -1):
            ours, theirs = (model(tokens, logits_at=place) for model in (split, whole))
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        loss = split(*(each[own * rows : (own + 1) * rows] for each in calls))
        if sharded:
            torch.distributed.all_reduce(loss, group=mesh.get_group("dp_shard"))
        torch.testing.assert_close(loss, whole(*calls), rtol=2e-6, atol=1e-5)


def _all_kinds(rank: int, world_size: int, tp: int) -> None:
    for kind in DENSE:
        try:
            _split_equals_whole(rank, world_size, kind, tp)
        except Exception as error:
            raise AssertionError(kind) from error


@pytest.mark.parametrize("ranks", [2, 4], ids=["tp", "fsdp_by_tp"])
def test_two_way_split_equals_the_whole_model(ranks):
    run_distributed(_all_kinds, ranks, 2)


def test_a_sequence_that_ranks_cannot_share_is_refused() -> None:
    """Chunks of it could have a size that the collective takes, and hold other rows."""
    with pytest.raises(ValueError, match=r"sequence of 6 .* 4 tensor-parallel ranks: pad it"):
        scatter_sequence(torch.zeros(4, 6, 2), Sharers(4, 0, "none"))
