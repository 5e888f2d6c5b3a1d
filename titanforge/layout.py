"""How the ranks share a model: the degrees of a configuration, whether a model fits them, and doing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from titanforge.config import ConfigError, JobConfig
from titanforge.config.ranks import SHARDED_RULES
from titanforge.config.rules import rule_name
from titanforge.models.registry import build_model, model_args
from titanforge.optim import build_groups, check_storage, shard_dims
from titanforge.optim.param_groups import ParamGroupSpec
from titanforge.parallelisms import (
    ParallelDims,
    Pipeline,
    PipelinePlan,
    apply_activation_checkpoint,
    apply_compile,
    apply_context_parallel,
    apply_expert_parallel,
    apply_fsdp,
    apply_mixed_precision,
    apply_tensor_parallel,
    check_context_parallel,
    check_expert_parallel,
    check_pipeline_parallel,
    check_tensor_parallel,
    complete_gradients,
    enable_async_tensor_parallel,
    expert_shard_dim,
    pad_sequences,
    plan_pipeline,
    sequence_pieces,
    share_routing,
    split_model,
    tensor_split_dim,
)
from titanforge.parallelisms.traffic import Traffic, silent

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NOT_OVERRIDES = ("name", "flavor", "hf_assets_path")  # every other key of [model] is one


def build_dims(config: JobConfig, world_size: int) -> ParallelDims:
    """The degrees of a run on ``world_size`` ranks.

    Raises:
        ValueError: they do not make that number.
    """
    parallelism = config.parallelism
    return ParallelDims(
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        world_size=world_size,
    )


def model_overrides(config: JobConfig) -> dict[str, Any]:
    """The keys of ``[model]`` that change a size."""
    return {key: value for key, value in vars(config.model).items() if key not in NOT_OVERRIDES}


def compute_dtype(config: JobConfig) -> str:
    """What forward and backward compute in."""
    training = config.training
    return training.mixed_precision_param if training.dtype == "float32" else training.dtype


def longest_sequence(config: JobConfig) -> int:
    """Tokens of the longest sequence that the model will see."""
    return max(config.training.seq_len, config.validation.seq_len or 0)


def check_model(config: JobConfig, dims: ParallelDims, args: Any = None) -> None:
    """Whether the model can be split so; needs no process and no memory.

    args: the built model's; None: those that the configuration names, whose vocabulary may not be known yet.

    Raises:
        ValueError: naming the key and what would fit.
    """
    if args is None:
        args = model_args(
            config.model.name,
            config.model.flavor,
            seq_len=longest_sequence(config),
            overrides=model_overrides(config),
        )
        args.check()
        _check_rules(config, dims)
    n_experts = getattr(args, "n_experts", 0)
    check_tensor_parallel(
        dims.tp,
        n_heads=args.n_heads,
        n_kv_heads=args.n_kv_heads,
        ffn_dim=None if n_experts else args.ffn_dim,
        vocab_size=args.vocab_size,
    )
    if config.compile.cuda_graph and n_experts and compute_dtype(config) != "bfloat16":
        raise ConfigError(
            "compile.cuda_graph = true: experts in float32 go one by one, and the host waits for their loads:"
            ' set training.mixed_precision_param = "bfloat16", or compile.cuda_graph = false'
        )
    check_context_parallel(
        dims.cp,
        config.parallelism.context_parallel_method,
        n_heads=args.n_heads,
        tensor_degree=dims.tp,
    )
    check_expert_parallel(
        dims.ep,
        n_experts=n_experts,
        widths=(args.dim, args.hidden_dim) if n_experts else (),
        tensor_degree=dims.tp,
        others=dims.degree("dp_shard_mod_ep"),
    )
    if dims.pp > 1:
        schedule = config.parallelism.pipeline_parallel_schedule
        check_pipeline_parallel(dims.pp, schedule, tied=args.tie_embeddings, n_experts=n_experts)
        pipeline_plan(config, dims, args)


def _check_rules(config: JobConfig, dims: ParallelDims) -> None:
    """Whether the rules can store and update what a rank holds, and have what replicas are to watch."""
    optimizer = config.optimizer
    shards = dims.degree("dp_shard_cp")
    rules = {rule_name(config.optimizer.name), rule_name(config.optimizer.scalar.name)}
    cut = shards * dims.tp > 1 and not rules <= SHARDED_RULES
    watched = dims.dp_replicate > 1 and config.sync.policy == "rmmc"
    native = optimizer.implementation == "native"
    stored = native and (optimizer.state_dtype != "float32" or optimizer.master_weights != "none")
    if not (cut or watched or stored):
        return
    with torch.device("meta"):
        model, _ = build_model(
            config.model.name,
            config.model.flavor,
            vocab_size=1,
            seq_len=longest_sequence(config),
            overrides=model_overrides(config),
        )
    groups = build_groups(model.to(DTYPES[config.training.dtype]), optimizer)
    if stored:
        check_storage(groups, optimizer, config.training.dtype)
    if watched and not any(
        slot.name == "m"
        for group in groups
        for param in group.params
        for slot in group.rule.slots_for(param.shape)
    ):
        raise ConfigError(
            'sync.policy = "rmmc" watches the momentum, and no weight has one with optimizer.name ='
            f' "{config.optimizer.name}": take one with momentum, or sync.policy = "scheduled"'
        )
    if cut:
        _check_shards(groups, dims, getattr(model.args, "n_experts", 0))


def _check_shards(groups: Sequence[ParamGroupSpec], dims: ParallelDims, n_experts: int) -> None:
    """Whether each weight's rule can update each shard by itself."""
    shards = dims.degree("dp_shard_cp")
    dobb = any(group.rule.name == "dobb" for group in groups)
    if dobb and (held := experts_in_rows(dims, n_experts)):
        raise ConfigError(
            f"parallelism.expert_parallel_degree = {dims.ep}: leaves rows of {held} experts to each"
            f" {dims.degree('dp_shard_mod_ep')} ranks, and Dobb takes experts whole: use a larger degree, or"
            " a larger data_parallel_replicate_degree"
        )
    for group in groups:
        if group.rule.regime == 1 or group.rule.u_gathers:
            continue
        for name, param in zip(group.names, group.params):
            dim, cut_by_tensor_axis = group.rule.shard_dim(param.shape), tensor_split_dim(name)
            ranks = shards * (dims.tp if dim == cut_by_tensor_axis else 1)
            if ranks > 1:
                group.rule.check_shards(name, param.shape, group.parts.get(name, 1), dim, ranks)


def pipeline_plan(
    config: JobConfig, dims: ParallelDims, args: Any, model: nn.Module | None = None
) -> PipelinePlan:
    """The stages of a run with a pipeline axis.

    model: whole, on meta: tells as how many blocks embedding and head count; None: as one each, which decides
        where the cuts are, but not whether there can be any.

    Raises:
        ValueError: naming the key and what would fit.
    """
    parallelism = config.parallelism
    ends = [
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    ]
    measured: list[float] = [1.0, 1.0]
    if model is not None and parallelism.pipeline_parallel_layers_per_stage is None:
        measured = _layers_at_the_ends(model)
    embedding, head = (own if given is None else float(given) for given, own in zip(ends, measured))
    return plan_pipeline(
        dims.pp,
        parallelism.pipeline_parallel_schedule,
        args.n_layers,
        batch_size=config.training.local_batch_size,
        microbatch_size=parallelism.pipeline_parallel_microbatch_size,
        embedding_layers=embedding,
        head_layers=head,
        layers_per_stage=parallelism.pipeline_parallel_layers_per_stage,
        named=parallelism.module_fqns_per_model_part,
    )


def _layers_at_the_ends(model: nn.Module) -> list[float]:
    """Weights of the embedding, and of norm and head, relative to those of a block."""
    blocks, first, last = 0, 0, 0
    for name, parameter in model.named_parameters():
        if name.startswith("layers."):
            blocks += parameter.numel()
        elif name.startswith(("norm.", "output.")):
            last += parameter.numel()
        else:
            first += parameter.numel()
    block = blocks / len(model.get_submodule("layers"))  # pyright: ignore[reportArgumentType]
    return [first / block, last / block]


def axis_lines(config: JobConfig, dims: ParallelDims, args: Any) -> list[str]:
    """For each axis of more than one rank, a line saying what its ranks share."""
    parallelism, T = config.parallelism, config.training.seq_len
    lines = []
    if dims.pp > 1:
        plan = pipeline_plan(config, dims, args)
        lines.append(
            f"pp {dims.pp}: {len(plan.stages)} stages, schedule {plan.kind.name} of {plan.microbatches}"
            f" micro-batches of {parallelism.pipeline_parallel_microbatch_size}"
        )
    if dims.dp_replicate > 1:
        lines.append(f"dp_replicate {dims.dp_replicate}: whole replicas, each with its own sequences")
    if dims.degree("dp_shard_cp") > 1:
        over = "dp_shard x cp" if dims.cp > 1 else "dp_shard"
        lines.append(
            f"{over} {dims.degree('dp_shard_cp')}: 1/{dims.degree('dp_shard_cp')} of each weight, gradient"
            " and optimizer state a rank" + (", each with its own sequences" if dims.dp_shard > 1 else "")
        )
    if dims.cp > 1:
        lines.append(
            f"cp {dims.cp}: {T // dims.cp} of the {T} tokens of a sequence a rank,"
            f" attention by {parallelism.context_parallel_method}"
        )
    n_experts = getattr(args, "n_experts", 0)
    if dims.tp > 1:
        columns = "" if n_experts else f" {args.ffn_dim // dims.tp} feed-forward columns,"
        lines.append(
            f"tp {dims.tp}: {args.n_heads // dims.tp} query and {args.n_kv_heads // dims.tp} key/value heads,"
            f"{columns} {-(-args.vocab_size // dims.tp)} rows of the"
            f" vocabulary a rank; {T // dims.cp // dims.tp} tokens of a sequence between blocks"
        )
    if dims.ep > 1:
        others = dims.degree("dp_shard_mod_ep")
        lines.append(
            f"ep {dims.ep}: {n_experts // dims.ep} of the {n_experts} experts of a block a rank"
            + (f", 1/{others} of them between steps" if others > 1 else "")
            + "; tokens go to their experts' ranks and back"
        )
    return lines


def experts_in_rows(dims: ParallelDims, n_experts: int) -> int:
    """Experts of a layer of which each rank keeps rows between steps; 0 where it keeps whole ones."""
    others = dims.degree("dp_shard_mod_ep")
    held = n_experts // dims.ep
    return held if dims.ep > 1 < others and expert_shard_dim(held, others) == 1 else 0


def parallelize(
    model: nn.Module, config: JobConfig, dims: ParallelDims, device: torch.device, traffic: Traffic = silent
) -> Pipeline | None:
    """Split a model that is on meta, inside out, and give it memory: stages, tensor, context, …, shards.

    With a pipeline axis ``model`` is left with this rank's modules, and what is returned runs its stages.

    traffic: is told of the collectives that the split model issues (see ``parallelisms.traffic``).
    """
    training, checkpointing = config.training, config.activation_checkpoint
    plan, parts = None, [model]
    if dims.pp > 1:
        plan = pipeline_plan(config, dims, model.args, model)
        parts = split_model(model, plan, dims.get_mesh("pp").get_local_rank())
    tensor_mesh = dims.get_optional_mesh("tp")
    overlap = config.parallelism.enable_async_tensor_parallel
    if tensor_mesh is not None:
        apply_tensor_parallel(model, tensor_mesh, traffic)
        if overlap:
            enable_async_tensor_parallel(tensor_mesh)
    pieces = dims.tp
    context_mesh = dims.get_optional_mesh("cp")
    if context_mesh is not None:
        method = config.parallelism.context_parallel_method
        for part in parts:
            apply_context_parallel(part, context_mesh, method, traffic)
        pieces *= sequence_pieces(dims.cp, method)
    expert_mesh = dims.get_optional_mesh("ep")
    if expert_mesh is not None:
        apply_expert_parallel(model, expert_mesh, traffic)
    for part in parts:
        share_routing(part, dims.get_group("cp"), dims.get_group("tp"), traffic)
    if pieces > 1 and plan is None:
        pad_sequences(model, pieces)  # after the others: it comes first in a call
    # Reading the generator's state waits for the device, which a captured step cannot; no model here draws
    # numbers.
    replay_random = checkpointing.preserve_rng_state and not config.compile.cuda_graph
    apply_activation_checkpoint(model, checkpointing.mode, checkpointing.selective_ac_option, replay_random)
    if config.compile.enable and "model" in config.compile.components:
        budget = checkpointing.memory_budget if checkpointing.mode == "memory_budget" else None
        # Within one graph with the recomputation, what knows its mesh cannot be kept (torch 2.13).
        outside = config.forge.enable or tensor_mesh is not None
        apply_compile(model, config.compile.backend, budget, outside, overlap)
    head = model.output  # None on a rank without the last stage
    if config.compile.enable and "loss" in config.compile.components and isinstance(head, nn.Module):
        head.compile(backend=config.compile.backend, fullgraph=True)
    compute = compute_dtype(config)
    shard_mesh = dims.get_optional_mesh("dp_shard_cp")
    if shard_mesh is not None:
        # By the parameters themselves: names change under wrappers, and only here both are at hand.
        groups = build_groups(model, config.optimizer, partial=plan is not None)
        dims_by_weight = shard_dims(groups, shard_mesh.size())
        reshard = config.parallelism.fsdp_reshard_after_forward
        # Every micro-batch would gather again, and a stage holds a part of the model anyway.
        reshard = "never" if reshard == "default" and plan is not None else reshard
        for part in parts:
            apply_fsdp(
                part,
                shard_mesh,
                param_dtype=DTYPES[compute],
                reduce_dtype=DTYPES[training.mixed_precision_reduce],
                reshard_policy=reshard,
                cpu_offload=training.enable_cpu_offload,
                shard_dim=lambda param: dims_by_weight.get(id(param)),
                expert_mesh=None if expert_mesh is None else dims.get_mesh("dp_shard_mod_ep"),
            )
    else:
        apply_mixed_precision(model, DTYPES[compute])
    for part in parts:
        part.to_empty(device="cpu" if training.enable_cpu_offload else device)
    if tensor_mesh is not None and shard_mesh is None:
        complete_gradients(model)
    if plan is None:
        return None
    return Pipeline(
        parts,
        plan,
        dims.get_mesh("pp").get_group(),
        dims.get_mesh("pp").get_local_rank(),
        device,
        batch_size=training.local_batch_size,
        seq_len=training.seq_len,
        shares=dims.cp * dims.tp,
        multiple=pieces,
        dtype=DTYPES[compute],
        traffic=traffic,
    )
