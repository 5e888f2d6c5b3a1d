"""Stages on real processes: compared with the whole model, and what a step sends, counted by kind.

Run and judged in tests/trainer/test_pipeline.py, which has the processes.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.families import KINDS
from tests.parallelisms.test_tensor_parallel import batch, fill
from titanforge.models.registry import build_model
from titanforge.parallelisms import Pipeline, apply_fsdp, plan_pipeline, reshard, split_model
from titanforge.parallelisms.pipeline_stages import SCHEDULES
from titanforge.parallelisms.traffic import silent

VOCABULARY, LAYERS, T, MICROBATCHES = 51, 4, 16, 4
CPU = torch.device("cpu")
HIDDEN_BYTES = T * 32 * 4  # of a micro-batch of one sequence


class Communication(TorchDispatchMode):
    """Counts the operators of c10d by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def build(kind: str = "llama3"):
    family, flavor, sizes = KINDS[kind]
    sizes = {"dim": 32, "n_layers": LAYERS, "vocab_size": VOCABULARY, **sizes}
    sizes |= {"n_layers": LAYERS}
    with torch.device("meta"):
        return build_model(family, flavor, seq_len=T, overrides=sizes)[0]


def pipeline(model, schedule: str, mesh, shard_mesh=None) -> Pipeline:
    plan = plan_pipeline(mesh.size(), schedule, LAYERS, batch_size=MICROBATCHES)
    parts = split_model(model, plan, mesh.get_local_rank())
    if shard_mesh is not None:
        for part in parts:
            apply_fsdp(part, shard_mesh, None, None, reshard_policy="never")
    for part in parts:
        part.to_empty(device="cpu")
    fill(model)
    return Pipeline(
        parts,
        plan,
        mesh.get_group(),
        mesh.get_local_rank(),
        CPU,
        batch_size=MICROBATCHES,
        seq_len=T,
        shares=1,
        multiple=1,
        dtype=torch.float32,
    )


def run_schedules(world_size: int) -> list[tuple[str, dict[str, int], list]]:
    """Each schedule on this rank: gradients compared with the whole model's; what the second step sent.

    For each its name, the operators of c10d by number, and what it recorded.
    """
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("pp",))
    whole = build()
    fill(whole)
    tokens, positions, documents, labels = batch(B=MICROBATCHES, T=T)
    labels[1] = -100  # a micro-batch without a target: means of means would be wrong
    divisor = int((labels != -100).sum())
    loss = whole(tokens, positions, documents, labels)
    (loss / divisor).backward()
    wanted = dict(whole.named_parameters())
    logits = whole(tokens, positions, documents, logits_at=5)
    found = []
    for kind in SCHEDULES:
        model = build()
        stages = pipeline(model, kind.name, mesh)
        held = [name for name, _ in model.named_parameters()]
        assert held and len(held) < len(wanted), "a part of the weights, by their own names"
        for step in range(2):  # the first also warms up
            model.zero_grad()
            sent: list = []
            stages.traffic = lambda *what, sent=sent: sent.append(what)
            with Communication() as communication:
                own_loss = stages.forward_backward(tokens, positions, documents, labels, divisor)
            assert (own_loss > 0) == stages.has_last, step
        total = own_loss.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, loss.detach(), rtol=1e-6, atol=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.grad,
                wanted[name].grad,
                rtol=1e-4,
                atol=1e-6,
                msg=f"{kind.name} {name}: {{}}".format,
            )
        stages.traffic = silent
        stages.eval()
        assert all(not part.training for part in stages.parts)
        for size in (1, MICROBATCHES):  # of which more than one micro-batch is passed on piece by piece
            call = [x[:size] for x in (tokens, positions, documents)]
            torch.testing.assert_close(stages(*call, logits_at=5), logits[:size])
        evaluated = stages(tokens, positions, documents, labels)
        torch.testing.assert_close(evaluated, own_loss, rtol=1e-6, atol=1e-5)
        found.append((kind.name, dict(communication.counts), sent))
    return found


def run_with_shards() -> list[tuple[str, dict[str, int], int]]:
    """The same of stages whose weights are in shares, pp 2 x dp_shard 2, and their number of FSDP groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    tokens, positions, documents, labels = batch(B=MICROBATCHES, T=T)
    whole = build()
    fill(whole)
    whole(tokens, positions, documents, labels).backward()
    wanted = dict(whole.named_parameters())
    found = []
    for name in ("1F1B", "ZBVZeroBubble"):
        model = build()
        stages = pipeline(model, name, mesh["pp"], mesh["dp_shard"])
        for _ in range(2):
            model.zero_grad()
            with Communication() as communication:
                stages.forward_backward(tokens, positions, documents, labels, 2)  # two ranks read the same
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.grad.full_tensor(),
                wanted[key].grad,
                rtol=1e-4,
                atol=1e-5,
                msg=f"{key}: {{}}".format,
            )
        stages.eval()
        stages(tokens, positions, documents, labels)
        for part in stages.parts:
            reshard(part)
        # A group of weights for each block, embedding, head, and the norm of the whole.
        names = [key for stage in stages.stages for key in stages.plan.stages[stage]]
        found.append((name, dict(communication.counts), len(names)))
    return found
