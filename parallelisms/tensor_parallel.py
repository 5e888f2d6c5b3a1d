"""Tensor parallelism with sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022).

Between blocks every rank holds T / ranks tokens of each sequence. Attention and feed-forward gather the
sequence, work on their heads or columns, and scatter the sum: two all-gathers and two reduce-scatters a block
in forward, as many in backward. Weights become DTensors on the ``tp`` axis; what a block needs is told by the
names of its modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titanforge.parallelisms.named_groups import group_named, name_group
from titanforge.parallelisms.traffic import Traffic, silent
from titanforge.parallelisms.vocabulary import VocabularySplit, split_embedding

KEY = "parallelism.tensor_parallel_degree"


def check_tensor_parallel(
    degree: int,
    *,
    n_heads: int,
    n_kv_heads: int,
    ffn_dim: int | None,
    vocab_size: int | None,
) -> None:
    """Whether a model of these sizes can be split.

    ffn_dim: None where experts take the feed-forward layers' place, which this axis does not split.
    vocab_size: None while it is not known.

    Raises:
        ValueError: naming the key, the size that does not fit and what would.
    """
    if degree == 1:
        return
    for name, size in (
        ("model.n_heads", n_heads),
        ("model.n_kv_heads", n_kv_heads),
        ("the feed-forward width", ffn_dim),
    ):
        if size is not None and size % degree:
            fitting = ", ".join(str(d) for d in range(1, degree) if size % d == 0)
            raise ValueError(f"{KEY} = {degree} does not divide {name} = {size}: use one of {fitting}.")
    if vocab_size is not None and -(-vocab_size // degree) * (degree - 1) >= vocab_size:
        raise ValueError(
            f"{KEY} = {degree} leaves a rank without a row of the {vocab_size} of the vocabulary."
        )


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, traffic: Traffic = silent) -> None:
    """Split ``model`` over the 1-D ``mesh``; first of all that is done to it, on the meta device.

    Its sequences must be whole multiples of the ranks (see ``pad_sequences``). Afterwards, and after the
    weights were given memory, call ``complete_gradients``. ``traffic`` is told of the collectives that are
    issued here; DTensor's own, between blocks, are not in it.
    """
    embedding, head = getattr(model, "tok_embeddings", None), getattr(model, "output", None)
    tied = embedding is not None and head is not None and embedding.weight is head.weight
    for block in model.get_submodule("layers").children():
        styles = _BLOCK | (_EXPERTS if _has(block, "feed_forward.experts") else {})
        plan = {name: style() for name, style in styles.items() if _has(block, name)}
        for style in plan.values():
            if isinstance(style, FusedColumns):
                style.traffic = traffic
        parallelize_module(block, mesh, plan)
    if embedding is not None:
        _distribute(embedding, mesh, Shard(0))
        split_embedding(embedding, VocabularySplit(mesh, embedding.num_embeddings, traffic))
    if (positions := getattr(model, "pos_embeddings", None)) is not None:
        _distribute(positions, mesh, Replicate())
        _look_up_own_positions(positions, mesh)
    if (norm := getattr(model, "norm", None)) is not None:
        parallelize_module(norm, mesh, SequenceParallel())
        norm.register_forward_hook(_gather_sequence)
    if head is not None:
        if tied:
            assert embedding is not None
            head.weight = embedding.weight
        else:
            _distribute(head, mesh, Shard(0))
        head.vocabulary = VocabularySplit(mesh, head.out_features, traffic)


def tensor_rank_weights(model: nn.Module, degree: int) -> int:
    """Weights that the fullest of ``degree`` ranks will hold; ``model`` is whole (on meta)."""
    total = 0
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        inside = module.removeprefix("layers.").partition(".")[2] if module.startswith("layers.") else module
        rows = ("tok_embeddings", "output", *_COLUMN_LINEARS)
        if inside in rows:
            total += -(-parameter.shape[0] // degree) * parameter[0].numel()
        elif inside == "feed_forward.experts":  # expert_parallel_degree is a multiple
            total += parameter.numel() // degree
        elif inside in _ROW_LINEARS and kind == "weight":
            total += -(-parameter.shape[1] // degree) * parameter.shape[0]
        else:
            total += parameter.numel()
    return total


def tensor_split_dim(name: str) -> int | None:
    """The dim along which ``apply_tensor_parallel`` cuts a block's matrix of that name; None: not at all."""
    module = name.removeprefix("layers.").partition(".")[2].removesuffix(".weight")
    return 0 if module in _COLUMN_LINEARS else 1 if module in _ROW_LINEARS else None


def complete_gradients(model: nn.Module) -> None:
    """Have gradients of weights that every rank holds summed over ranks as they arrive.

    Each rank has seen its own tokens, or its own heads, alone. FSDP does this for the weights that it
    manages, so without effect there.
    """
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and any(place.is_replicate() for place in parameter.placements):
            parameter.register_hook(_summed)


def _summed(gradient: torch.Tensor) -> torch.Tensor:
    assert isinstance(gradient, DTensor)
    wanted = [Replicate() if place.is_partial() else place for place in gradient.placements]
    return gradient.redistribute(placements=wanted)


def _has(module: nn.Module, name: str) -> bool:
    """Whether there is a module of that name (a norm that a family lacks is None)."""
    for part in name.split("."):
        module = getattr(module, part, None)  # pyright: ignore[reportAssignmentType]
        if module is None:
            return False
    return True


class FusedColumns(ParallelStyle):
    """A linear whose rows are three matrices under each other, each to be split over heads.

    The weight stays sharded by plain rows, which is what checkpoints and FSDP can describe. Forward exchanges
    rows, an all-to-all of 1 / ranks of the weight, so that a rank multiplies its heads' q, k and v.
    """

    parts = 3
    traffic: Traffic = staticmethod(silent)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Shard(0))
        group, parts = name_group(device_mesh.get_group(), self.traffic), self.parts

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight, bias = module.weight, module.bias  # through the module: they may be cast on reading
            assert isinstance(weight, DTensor) and isinstance(x, DTensor)
            rows = exchange_rows(weight.to_local(), group, parts, False)
            bias_rows = None
            if isinstance(bias, DTensor):
                bias_rows = exchange_rows(bias.to_local(), group, parts, False)
            return F.linear(x.to_local(grad_placements=[Partial()]), rows, bias_rows)

        module.forward = forward
        return module


@torch.library.custom_op("titanforge::exchange_rows", mutates_args=())
def exchange_rows(rows: torch.Tensor, group_name: str, parts: int, back: bool) -> torch.Tensor:
    """Rows [n R / ranks] of a matrix as dealt in order → those of this rank's part of each of n matrices.

    One operator to the compiler. group_name: from ``name_group``. back: the inverse, which is its gradient.
    """
    group, traffic = group_named(group_name)
    receive, send, order = _exchange_plan(group.size(), group.rank(), rows.shape[0], parts, rows.device)
    given = rows.contiguous() if back else rows[order]
    arrived = torch.empty_like(given)
    traffic("tp", "rows of fused weights", given.nbytes)
    sizes = (send, receive) if back else (receive, send)
    dist.all_to_all_single(arrived, given, *sizes, group=group)
    if not back:
        return arrived
    in_place = torch.empty_like(arrived)
    in_place[order] = arrived
    return in_place


@exchange_rows.register_fake
def _(rows: torch.Tensor, group_name: str, parts: int, back: bool) -> torch.Tensor:
    return rows.new_empty(rows.shape)


def _note_exchange(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group_name, ctx.parts, ctx.back = inputs


def _return_rows(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return exchange_rows(grad, ctx.group_name, ctx.parts, not ctx.back), None, None, None


exchange_rows.register_autograd(_return_rows, setup_context=_note_exchange)


@functools.cache
def _exchange_plan(
    ranks: int, me: int, held: int, parts: int, device: torch.device
) -> tuple[list[int], list[int], torch.Tensor]:
    """Rows that come from each rank, rows that go to each, and which of the held ones go, in that order."""
    rows = torch.arange(held * ranks).view(parts, ranks, -1)  # [part, who needs it, row of it]
    needed = rows.transpose(0, 1).reshape(ranks, held)
    holder = needed // held
    mine = [needed[rank][holder[rank] == me] - me * held for rank in range(ranks)]
    receive = torch.bincount(holder[me], minlength=ranks).tolist()
    return receive, [len(m) for m in mine], torch.cat(mine).to(device)


class OwnTokens(ParallelStyle):
    """A linear that every rank has whole and applies to its own tokens, plain tensors in and out."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight = module.weight
            assert isinstance(weight, DTensor)
            return F.linear(x, weight.to_local(grad_placements=[Partial()]))

        module.forward = forward
        return module


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Shard | Replicate) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        # Nothing is sent: weights are on meta, or alike on every rank.
        distributed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(distributed, parameter.requires_grad))


def _look_up_own_positions(module: nn.Module, mesh: DeviceMesh) -> None:
    def forward(positions: torch.Tensor) -> torch.Tensor:
        own = positions.chunk(mesh.size(), dim=-1)[mesh.get_local_rank()]
        weight = module.weight
        assert isinstance(weight, DTensor)
        return F.embedding(own, weight.to_local(grad_placements=[Partial()]))

    module.forward = forward


def _gather_sequence(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """[B, T / ranks, D] → [B, T, D]; the gradient that comes back is each rank's vocabulary's share."""
    assert isinstance(output, DTensor)
    return output.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _gather_input(other_inputs: int) -> Callable[[], ParallelStyle]:
    none = (None,) * other_inputs
    return lambda: PrepareModuleInput(
        input_layouts=(Shard(1), *none), desired_input_layouts=(Replicate(), *none)
    )


def _scatter_output() -> ParallelStyle:
    return RowwiseParallel(output_layouts=Shard(1))


def _per_head() -> ParallelStyle:
    """A norm within heads, which are dim 2 of [B, T, heads, E]."""
    return SequenceParallel(sequence_dim=2, use_local_output=True)


_BLOCK: dict[str, Callable[[], ParallelStyle]] = {
    "attention_norm": SequenceParallel,
    "attention": _gather_input(2),  # rotation and mask are plain
    "attention.wq": ColwiseParallel,
    "attention.wk": ColwiseParallel,
    "attention.wv": ColwiseParallel,
    "attention.wqkv": FusedColumns,
    "attention.q_norm": _per_head,
    "attention.k_norm": _per_head,
    "attention.wo": _scatter_output,
    "ffn_norm": SequenceParallel,
    "feed_forward": _gather_input(0),
    "feed_forward.w1": ColwiseParallel,
    "feed_forward.w3": ColwiseParallel,
    "feed_forward.w2": _scatter_output,
}


def _own_tokens() -> ParallelStyle:
    """Experts take each rank's tokens as they are: who has which experts is another axis's matter."""
    return PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=True
    )


_EXPERTS: dict[str, Callable[[], ParallelStyle]] = {
    "feed_forward": _own_tokens,
    "feed_forward.router": OwnTokens,
}

_COLUMN_LINEARS = tuple(name for name, style in _BLOCK.items() if style in (ColwiseParallel, FusedColumns))
_ROW_LINEARS = tuple(name for name, style in _BLOCK.items() if style is _scatter_output)
