"""The real model, built on meta, sharded, then materialised: same weights, loss and gradients as whole."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed_harness import run_distributed
from titanforge.models.initialization import initialize_weights
from titanforge.models.llama3.args import Llama3Args
from titanforge.models.llama3.model import Llama3
from titanforge.parallelisms import apply_activation_checkpoint, apply_fsdp


def _build(tie: bool):

    args = Llama3Args(
        dim=36,
        n_layers=2,
        n_heads=6,
        n_kv_heads=3,
        hidden_dim=50,
        vocab_size=37,
        max_seq_len=16,
        tie_embeddings=tie,
    )
    with torch.device("meta"):
        return Llama3(args)


def _loss(model, tokens, labels):
    positions = torch.arange(16).expand(tokens.shape)
    documents = (positions >= 9).long()
    loss = model(tokens, positions, documents, labels) / 100
    loss.backward()
    return loss.detach()


def _sharded_equals_whole(rank: int, world_size: int, tie: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 37, (4, 16), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[0, :7] = -100
    whole, sharded = _build(tie), _build(tie)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    apply_activation_checkpoint(sharded, "selective", "op")
    apply_fsdp(sharded, mesh, torch.float32)
    for model in (whole, sharded):
        model.to_empty(device="cpu")
        initialize_weights(model, 3)
    assert (whole.output.weight is whole.tok_embeddings.weight) == tie
    assert (sharded.output.weight is sharded.tok_embeddings.weight) == tie
    expected = _loss(whole, tokens, labels)
    mine = slice(rank * 2, rank * 2 + 2)
    loss = _loss(sharded, tokens[mine], labels[mine])
    torch.distributed.all_reduce(loss)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    gradients = dict(whole.named_parameters())
    assert gradients.keys() == dict(sharded.named_parameters()).keys()
    for name, parameter in sharded.named_parameters():
        assert torch.equal(parameter.full_tensor(), gradients[name]), name
        torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_sharded_llama_equals_the_whole_one(tie):
    run_distributed(_sharded_equals_whole, 2, tie)
