"""``--job.dry_run``: what a run would be, from the configuration alone: no memory, processes or GPU."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from titanforge.assembly import (
    batch_of_step,
    build_meta_model,
    check_exchange,
    forge_steps,
    mesh_sizes,
    probe_forward,
)
from titanforge.config import JobConfig
from titanforge.data import build_tokenizer
from titanforge.forge import Granule, Ranks, plan_report, preview
from titanforge.forge.head import CHUNK_LOGITS as FUSED_CHUNK_LOGITS
from titanforge.forge.plan import keeps_logits
from titanforge.forge.report import PlanLine
from titanforge.forge.weight_updates import block_of
from titanforge.layout import (
    DTYPES,
    axis_lines,
    build_dims,
    check_model,
    compute_dtype,
    experts_in_rows,
    pipeline_plan,
)
from titanforge.metrics import activation_bytes, estimate_memory
from titanforge.metrics.estimate import MemoryEstimate
from titanforge.metrics.memory import GIB
from titanforge.models.layers.loss import CHUNK_LOGITS
from titanforge.optim import build_groups, exchange_lines, state_bytes, update_bytes
from titanforge.optim.split import splits
from titanforge.parallelisms import (
    ParallelDims,
    PipelinePlan,
    expert_modules,
    split_model,
    tensor_rank_weights,
)
from titanforge.replica_lines import averaged_factors, averages_states, replica_lines
from titanforge.sync.encoded import sent_bytes


def dry_run_report(config: JobConfig, world_size: int, device_type: str) -> str:
    """The model's sizes, who updates which weights, the layout of the ranks and an estimate of memory.

    Raises:
        ConfigError, ValueError: whatever a real start would refuse.
    """
    training = config.training
    dims = build_dims(config, world_size)
    check_model(config, dims)
    tokenizer = build_tokenizer(config.data.tokenizer, config.model.hf_assets_path)
    model, args = build_meta_model(config, tokenizer.vocab_size)
    check_model(config, dims, args)
    stages = pipeline_plan(config, dims, args, model) if dims.pp > 1 else None
    groups = model.num_parameters()
    total = sum(groups.values())
    sequences, micro_batches = batch_of_step(config, dims.degree("dp"))
    lines = [
        f"model       {config.model.name} {config.model.flavor}, {args.vocab_size:,} tokens of vocabulary, "
        f"{total:,} parameters",
        *(f"  {name:<14}{count:>18,}" for name, count in groups.items()),
        f"flops       {model.flops_per_token(training.seq_len) / 1e9:.3f} GFLOP per token at "
        f"{training.seq_len} tokens",
        f"ranks       {dims.describe()}",
        *(f"  {line}" for line in axis_lines(config, dims, args)),
        *(f"  {line}" for line in ([] if stages is None else stages.lines())),
        f"batch       {sequences} sequences x {training.seq_len} tokens = {sequences * training.seq_len:,} "
        f"tokens a step, in {micro_batches} micro-batch{'es' * (micro_batches > 1)} of "
        f"{training.local_batch_size} a rank",
        "optimizer",
    ]
    optimizer_groups = build_groups(model, config.optimizer)
    for group in optimizer_groups:
        options = ", ".join(f"{key} {value:g}" for key, value in group.options.items())
        lines.append(f"  {group.name:<28}{group.num_parameters:>18,}  {options}")
    shards = dims.degree("dp_shard_cp") if dims.tp == 1 else 1
    if dims.tp == 1:  # the tables know matrices that one axis cuts
        in_rows = experts_in_rows(dims, getattr(args, "n_experts", 0))
        exchanges = exchange_lines(optimizer_groups, shards, in_rows, dims.dp_replicate)
        lines += [f"  {line}" for line in exchanges]
    factors, code = averaged_factors(config, dims, args, optimizer_groups), config.sync.exchange_dtype
    if averages_states(config, dims) and code != "float32" and dims.tp == 1:
        check_exchange(config, [factors > 0 or not all(splits(group.rule) for group in optimizer_groups)])
    lines += [f"  {line}" for line in replica_lines(config, dims, args, optimizer_groups)]
    kept_of_factors = sent_bytes(code, factors, dims.dp_replicate)
    gradient_bytes, in_backward, logits_kept = DTYPES[training.dtype].itemsize, set[str](), 0
    if config.forge.enable:
        previewed = preview(
            model,
            config.optimizer,
            training.dtype,
            probe=lambda: probe_forward(model, "meta"),
            steps=forge_steps(config, micro_batches),
            ranks=Ranks(mesh_sizes(dims), reduce=config.sync.reduce),
        )
        plan = previewed.lines
        lines += [*plan_report(plan, model).splitlines(), *previewed.switches]
        # Per weight of the model: none for those that are consumed where they are made, or as they arrive.
        gradient_bytes = held_for_gradients(plan, config, micro_batches) / total
        in_backward = {line.name for line in plan if line.plan.deferred and not line.plan.by_hook}
        if config.forge.keep_logits:
            logits_kept = kept_logits(plan)
    estimates = [
        rank_memory(
            config,
            dims,
            args,
            part,
            layers=args.n_layers if stages is None else stages.layers_alive(rank),
            gradient_bytes=gradient_bytes,
            state_bytes_per_param=(state_bytes(optimizer_groups, config.optimizer) + kept_of_factors) / total,
            update=update_bytes(
                optimizer_groups, lambda name: block_of(name) if name in in_backward else "", shards
            ),
            update_in_backward=bool(in_backward),
            logits_kept=logits_kept,
        )
        for rank, part in enumerate(rank_models(model, stages))
    ]
    estimate = max(estimates, key=lambda each: each.total)
    if stages is not None:
        lines.append(f"most memory on pipeline rank {estimates.index(estimate)}")
    lines += ["memory per rank, estimated", *(f"  {line}" for line in estimate.lines())]
    if device_type == "cuda":
        capacity = torch.cuda.get_device_properties(0).total_memory
        verdict = "fits" if estimate.total < 0.92 * capacity else "is unlikely to fit"
        lines.append(f"  {verdict} in the {capacity / GIB:.1f} GiB of this GPU")
    return "\n".join(lines)


def rank_models(model: nn.Module, stages: PipelinePlan | None) -> Iterator[nn.Module]:
    """For each rank along the pipeline axis the part of the model that it holds, on meta as the whole is."""
    if stages is None:
        yield model
        return
    for rank in range(stages.ranks):
        part = copy.deepcopy(model)
        split_model(part, stages, rank)
        yield part


def rank_memory(
    config: JobConfig,
    dims: ParallelDims,
    args: Any,
    model: nn.Module,
    *,
    layers: int,
    gradient_bytes: float,
    state_bytes_per_param: float,
    update: int,
    update_in_backward: bool,
    logits_kept: int,
) -> MemoryEstimate:
    """What a rank will need whose pipeline stages are ``model``, which is on meta and whole along other axes.

    layers: blocks whose activations are alive, those of several micro-batches each counted. logits_kept: of
    each token, from forward to backward.
    """
    training, recompute, tp = config.training, config.activation_checkpoint, dims.tp
    compute_bytes = DTYPES[compute_dtype(config)].itemsize
    batch, seq_len = training.local_batch_size, training.seq_len // dims.cp
    if dims.pp > 1:
        batch = config.parallelism.pipeline_parallel_microbatch_size
    chunk_logits = FUSED_CHUNK_LOGITS if config.forge.enable else CHUNK_LOGITS
    # What a block gathers for its matrix products is kept whole where nothing is recomputed.
    gathered = 2 * layers if recompute.mode == "none" else 2
    weights = tensor_rank_weights(model, tp)
    estimate = estimate_memory(
        num_params={"of a tensor rank": weights},
        weight_bytes=DTYPES[training.dtype].itemsize,
        gradient_bytes=gradient_bytes,
        state_bytes_per_param=state_bytes_per_param,
        activations=activation_bytes(
            batch=batch,
            seq_len=seq_len,
            dim=args.dim // tp,
            n_layers=layers,
            hidden_dim=args.ffn_dim // tp,
            kv_dim=args.n_kv_heads * args.head_dim // tp,
            q_dim=args.n_heads * args.head_dim // tp,
            qk_norm=config.model.name == "qwen3",
            routed=getattr(args, "n_experts_per_token", 0),
            vocab_size=-(-args.vocab_size // tp),
            compute_bytes=compute_bytes,
            mode=recompute.mode,
            selective_option=recompute.selective_ac_option,
            memory_budget=recompute.memory_budget,
            compiled=config.compile.enable and "model" in config.compile.components,
            loss_chunk_tokens=max(1, chunk_logits * tp // args.vocab_size),
        )
        + batch * seq_len * logits_kept * compute_bytes
        + (gathered * args.dim * batch * seq_len * compute_bytes * (tp - 1) // tp),
        dp_shard=dims.degree("dp_shard_cp"),
        layer_params=largest_unit(model, tp, dims.ep),
        compute_bytes=compute_bytes,
        update=update,
        update_in_backward=update_in_backward,
    )
    if dims.pp > 1 and dims.degree("dp_shard_cp") > 1:
        # A stage's weights stay gathered for all micro-batches, and its gradients whole until the last.
        whole = compute_bytes + DTYPES[training.mixed_precision_reduce].itemsize
        estimate = dataclasses.replace(estimate, gathered=weights * whole)
    return estimate


def held_for_gradients(plan: Sequence[PlanLine], config: JobConfig, micro_batches: int) -> float:
    """Bytes of gradients that are stored, of sums over micro-batches and of operands kept for them; and of
    the largest gradient that is formed whole for its layer alone."""
    training = config.training
    tokens = training.local_batch_size * training.seq_len
    held, formed = 0.0, 0
    for line in plan:
        if not line.plan.fused or (line.plan.by_hook and line.plan.join):
            held += line.numel * DTYPES[training.dtype].itemsize
        elif line.plan.by_hook:
            continue
        elif line.plan.join == "buffer":
            held += line.numel * 4
        elif line.plan.join == "stash":
            held += stashed_values(line, micro_batches * tokens) * DTYPES[compute_dtype(config)].itemsize
        if line.plan.granule is Granule.LAYER:
            formed = max(formed, line.numel * 4)
    return held + formed


def kept_logits(plan: Sequence[PlanLine]) -> int:
    """Logits of a token that `forge.keep_logits` keeps: a tied head hands a copy on to the embedding."""
    copies = {"head": 1, "tied": 2}
    return sum(copies[line.kind] * line.shape[0] for line in plan if keeps_logits(line.kind, line.plan))


def stashed_values(line: PlanLine, tokens: int) -> int:
    """Numbers that a step's tokens leave as operands of one weight's gradient.

    A head keeps hidden states, from which it forms its logits again, an embedding the gradient of its rows.
    """
    rows, columns = line.shape[-2:]
    widths = {"head": columns, "embedding": columns, "tied": 2 * columns}
    return tokens * widths.get(line.kind, rows + columns)


def largest_unit(model: nn.Module, tp: int = 1, ep: int = 1) -> int:
    """Weights of the largest set of modules that FSDP gathers at once, on a rank of the tensor axis.

    A block's experts are gathered along with it.
    """
    ends = [getattr(model, name) for name in ("tok_embeddings", "output")]  # None on another pipeline stage
    units = [*model.get_submodule("layers").children(), *(end for end in ends if end is not None)]
    return max(_unit_weights(unit, tp, ep) for unit in units)


def _unit_weights(unit: nn.Module, tp: int, ep: int) -> int:
    whole = sum(parameter.numel() for parameter in unit.parameters())
    experts = sum(p.numel() for module in expert_modules(unit) for p in module.parameters())
    return (whole - experts) // tp + experts // max(tp, ep)
