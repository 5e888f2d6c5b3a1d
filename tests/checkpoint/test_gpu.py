"""The same on GPUs: NCCL sums, and an asynchronous save that leaves the device's old values on disk."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.checkpoint.runs import COMM, settings
from tests.distributed_harness import run_distributed
from tests.parallelisms.toy import backward, global_batch, make_toy
from titanforge.checkpoint import CheckpointManager
from titanforge.parallelisms import apply_fsdp, clip_factor, init_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def _train_save_and_load(rank: int, world_size: int, folder, mode: str) -> None:
    runtime = init_distributed(COMM, "cuda", str(folder))
    mesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("dp_shard",))
    model = make_toy().to(runtime.device)
    apply_fsdp(model, mesh, torch.float32)
    tokens, labels = (t.to(runtime.device) for t in global_batch())
    valid = int((labels != -100).sum())
    backward(model, tokens.chunk(world_size)[rank], labels.chunk(world_size)[rank], valid)
    whole = make_toy().to(runtime.device)
    backward(whole, tokens, labels, valid)
    for (name, p), q in zip(model.named_parameters(), whole.parameters()):
        torch.testing.assert_close(
            p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    norm, _ = clip_factor(model.parameters(), 1.0)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9)
    torch.testing.assert_close(norm, expected, rtol=1e-4, atol=0)

    options = settings(async_mode=mode)
    manager = CheckpointManager(options, folder, config_toml="", runtime=runtime)
    for step in (1, 2):
        before = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
        manager.save(step, {"model": model.state_dict()})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(50.0)
        manager.maybe_wait()
        manager.load({"model": model.state_dict()})
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), before[name]), name
    runtime.shorten_timeout()
    manager.close()
    runtime.close()


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_gradients_sum_and_saves_hold_old_values(tmp_path, mode):
    run_distributed(
        _train_save_and_load, min(2, torch.cuda.device_count()), tmp_path, mode, backend=None, timeout=200
    )
