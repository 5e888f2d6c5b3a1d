"""Every layout gives the single process's gradient sum; mixed precision is the same with and without FSDP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.distributed_harness import run_distributed
from tests.parallelisms.toy import backward, global_batch, make_toy
from titanforge.parallelisms import (
    apply_activation_checkpoint,
    apply_compile,
    apply_fsdp,
    apply_mixed_precision,
    clip_factor,
    clip_grad_norm_,
    reshard,
    set_is_last_micro_batch,
)


def _reference(tied: bool):
    model = make_toy(tied=tied)
    tokens, labels = global_batch()
    loss = backward(model, tokens, labels, int((labels != -100).sum()))
    norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1e9)
    return loss, {name: p.grad for name, p in model.named_parameters()}, norm


def _full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _sharded_gradients(rank, world_size, replicate, tied, policy, micro_batches, reduce_every):
    expected_loss, expected, expected_norm = _reference(tied)
    mesh = init_device_mesh(
        "cpu", (replicate, world_size // replicate), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    model = make_toy(tied=tied)
    if mesh["dp_shard"].size() > 1:
        apply_fsdp(model, mesh["dp_shard"], torch.float32, torch.float32, policy)
    tokens, labels = global_batch()
    valid = int((labels != -100).sum())
    mine = zip(tokens.chunk(world_size * micro_batches), labels.chunk(world_size * micro_batches))
    loss = torch.zeros(())
    for index, (t, y) in enumerate(list(mine)[rank * micro_batches : (rank + 1) * micro_batches]):
        set_is_last_micro_batch(model, index == micro_batches - 1, reduce_every)
        loss += backward(model, t, y, valid)
    dist.all_reduce(loss)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    if replicate > 1:  # the sync policy's job
        for p in model.parameters():
            local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            dist.all_reduce(local, group=mesh["dp_replicate"].get_group())
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            _full(p.grad), expected[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    norm, factor = clip_factor(iter(model.parameters()), 0.01)
    torch.testing.assert_close(norm, expected_norm, rtol=1e-5, atol=0)
    torch.testing.assert_close(factor, 0.01 / (expected_norm + 1e-6), rtol=1e-5, atol=0)
    before = model.norm.weight.grad.clone()
    returned = clip_grad_norm_(model.parameters(), 0.01)  # a generator, as users hand it
    torch.testing.assert_close(returned, expected_norm, rtol=1e-5, atol=0)
    torch.testing.assert_close(_full(model.norm.weight.grad), _full(before) * factor)


@pytest.mark.parametrize(
    ("world_size", "replicate", "tied", "policy", "micro_batches", "reduce_every"),
    [
        (2, 1, False, "default", 1, True),
        (2, 2, False, "default", 2, True),
        (4, 1, False, "never", 2, False),
        (4, 2, True, "always", 2, True),
    ],
    ids=["fsdp2", "replicas2-accumulate", "fsdp4-never-reduce-last", "hsdp2x2-tied"],
)
def test_gradients_are_the_single_process_sum(
    world_size, replicate, tied, policy, micro_batches, reduce_every
):
    run_distributed(_sharded_gradients, world_size, replicate, tied, policy, micro_batches, reduce_every)


def _one_rank_fsdp_bf16(rank, world_size):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    sharded, plain = make_toy(), make_toy()
    apply_fsdp(sharded, mesh, torch.bfloat16, torch.float32)
    assert apply_mixed_precision(plain, torch.bfloat16) == len(list(plain.parameters()))
    tokens, labels = global_batch()
    for _ in range(2):  # two micro-batches, accumulated in fp32
        a = backward(sharded, tokens, labels, 40)
        b = backward(plain, tokens, labels, 40)
        assert torch.equal(a, b)
    for (name, p), (other, q) in zip(plain.named_parameters(), sharded.named_parameters()):
        assert name == other and p.dtype == p.grad.dtype == torch.float32
        assert torch.equal(p.grad, q.grad.full_tensor()), name
    exact = make_toy()
    assert not torch.equal(a, backward(exact, tokens, labels, 40)), "bf16 must have been used"


def test_mixed_precision_without_fsdp_is_bitwise_what_fsdp_computes():
    run_distributed(_one_rank_fsdp_bf16, 1)


def test_mixed_precision_leaves_names_weights_and_state_dict_alone():
    model, twin = make_toy(tied=True), make_toy(tied=True)
    apply_mixed_precision(model, torch.bfloat16)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in twin.named_parameters()]
    for name, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]) and value.dtype == torch.float32
    assert model.norm.weight.dtype == torch.bfloat16
    before = dict(model.named_parameters())["norm.weight"]
    model.to_empty(device="cpu")
    assert dict(model.named_parameters())["norm.weight"].shape == before.shape
    assert apply_mixed_precision(make_toy(), torch.float32) == 0


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_blocks_compile_whole_and_share_their_code(mode):
    torch._dynamo.reset()
    tokens, labels = global_batch()
    eager, compiled = make_toy(layers=12), make_toy(layers=12)
    for model in (eager, compiled):
        apply_mixed_precision(model, torch.bfloat16)
        apply_activation_checkpoint(model, mode, "op")
    counter = CompileCounterWithBackend("aot_eager")
    assert apply_compile(compiled, backend=counter) == 12
    torch.testing.assert_close(backward(compiled, tokens, labels, 40), backward(eager, tokens, labels, 40))
    for p, q in zip(compiled.parameters(), eager.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=1e-3)
    assert counter.frame_count == 1


def _evaluate_then_train(rank, world_size):
    """Weights changed after an evaluation must be what the next forward sees."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    model, fresh = make_toy(), make_toy(seed=5)
    apply_fsdp(model, mesh, torch.float32)
    apply_fsdp(fresh, mesh, torch.float32)
    tokens, labels = global_batch()
    with torch.no_grad():
        model.loss_sum(model(tokens), labels)
        reshard(model)
        for p, q in zip(model.parameters(), fresh.parameters()):
            p.copy_(q)
        assert torch.equal(model.loss_sum(model(tokens), labels), fresh.loss_sum(fresh(tokens), labels))
        assert model.logits(model(tokens)).shape == (*tokens.shape, 33)


def test_reshard_after_evaluation():
    run_distributed(_evaluate_then_train, 2)


def test_unknown_reshard_policy_names_its_key():
    with pytest.raises(ValueError, match="fsdp_reshard_after_forward"):
        apply_fsdp(make_toy(), None, None, reshard_policy="sometimes")
