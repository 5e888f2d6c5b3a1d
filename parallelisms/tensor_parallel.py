"""Tensor parallelism with sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022).

Between blocks every rank holds T / ranks tokens of each sequence. Attention and feed-forward gather the
sequence, work on their heads or columns, and scatter the sum: two all-gathers and two reduce-scatters a block
in forward, as many in backward. Weights become DTensors on the ``tp`` axis, which is what checkpoints, FSDP
and optimizers see; modules read this rank's part of them and compute on plain tensors. What a block needs is
told by the names of its modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from titanforge.parallelisms.named_groups import group_named, name_group
from titanforge.parallelisms.sequence_collectives import Sharers, gather_sequence, scatter_sequence
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
    issued here but for those of activations between blocks and of norms' gradients.

    Raises ValueError for a module whose forward would not be run, and for weights that no rank would know its
    part of: both are of a model that names its modules otherwise, or has others.
    """
    embedding, head = getattr(model, "tok_embeddings", None), getattr(model, "output", None)
    _check_modules(model, mesh.size())
    tied = embedding is not None and head is not None and embedding.weight is head.weight
    sharers = Sharers(mesh.size(), mesh.get_local_rank(), name_group(mesh.get_group(), traffic))
    for block in model.get_submodule("layers").children():
        parts = _BLOCK | (_EXPERTS if _has(block, "feed_forward.experts") else {})
        for name, part in parts.items():
            if _has(block, name):
                _split(block.get_submodule(name), part, mesh, sharers)
    if embedding is not None:
        _distribute(embedding, mesh, Shard(0))
        split_embedding(embedding, VocabularySplit(mesh, embedding.num_embeddings, traffic))
    if (positions := getattr(model, "pos_embeddings", None)) is not None:
        _distribute(positions, mesh, Replicate())
        _look_up_own_positions(positions, mesh)
    if (norm := getattr(model, "norm", None)) is not None:
        _split(norm, _FINAL_NORM, mesh, sharers)
    if head is not None:
        if tied:
            assert embedding is not None
            head.weight = embedding.weight
        else:
            _distribute(head, mesh, Shard(0))
        head.vocabulary = VocabularySplit(mesh, head.out_features, traffic)


def _check_modules(model: nn.Module, degree: int) -> None:
    """Whether ranks can run each module of ``model`` on their parts of its weights."""
    ends = {name: Part(Shard(0), None, nn.Embedding) for name in ("tok_embeddings", "pos_embeddings")}
    known = ends | {"norm": _FINAL_NORM, "output": Part(Shard(0), None)}
    for name, block in model.get_submodule("layers").named_children():
        parts = _BLOCK
        if _has(block, "feed_forward.experts"):
            parts = _BLOCK | _EXPERTS | {"feed_forward.experts": Part(Shard(0), None)}
        known |= {f"layers.{name}.{inner}": part for inner, part in parts.items()}
    for name, part in known.items():
        if part.stock is not None and _has(model, name):
            module = model.get_submodule(name)
            if why := _differs(module, part.stock):
                raise ValueError(
                    f"{KEY} = {degree}: {name} ({type(module).__name__}) {why}. Ranks that hold parts of its"
                    f" weights would compute what torch.nn.{part.stock.__name__} does: use that, and do the"
                    " rest in a module around it, or set the degree to 1."
                )
    if _has(model, "output") and not hasattr(model.output, "vocabulary"):
        raise ValueError(
            f"{KEY} = {degree}: output is a {type(model.output).__name__}, which takes the loss of a whole"
            " vocabulary: use titanforge.models.layers.OutputHead, or set the degree to 1."
        )
    for name, _ in model.named_parameters():
        holder = known.get(name.rpartition(".")[0])
        if holder is None or holder.placement is None:
            raise ValueError(
                f"{KEY} = {degree}: {name} belongs to no module that ranks know how to share, and would come"
                " apart on them: give modules the names of titanforge.models.layers, or set the degree to 1."
            )


def _differs(module: nn.Module, stock: type[nn.Module]) -> str:
    """In which way a module may do something else than its stock class, in words; empty: in none."""
    if stock is nn.RMSNorm and isinstance(module, nn.LayerNorm):
        stock = nn.LayerNorm
    if not isinstance(module, stock):
        return f"is no torch.nn.{stock.__name__}"
    if type(module).forward is not stock.forward or "forward" in vars(module):
        return "has a forward of its own"
    if isinstance(module, nn.Embedding):
        for option, plain in (("padding_idx", None), ("max_norm", None), ("scale_grad_by_freq", False)):
            if getattr(module, option) is not plain:
                return f"has {option}"
    if module._parameters.get("weight") is None and stock is not nn.RMSNorm:
        return "works out its weight"
    return ""


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
    (place,) = gradient.placements  # the tensor axis is the only one without FSDP
    if not place.is_partial():
        return gradient
    # What redistribute would send, without its planning: a block has four of these.
    mesh, ops = gradient.device_mesh, torch.ops._c10d_functional
    total = ops.wait_tensor(ops.all_reduce(gradient.to_local(), "sum", mesh.get_group().group_name))
    return DTensor.from_local(
        total, mesh, [Replicate()], run_check=False, shape=gradient.shape, stride=gradient.stride()
    )


def _has(module: nn.Module, name: str) -> bool:
    """Whether there is a module of that name (a norm that a family lacks is None)."""
    for part in name.split("."):
        module = getattr(module, part, None)  # pyright: ignore[reportAssignmentType]
        if module is None:
            return False
    return True


class Part(NamedTuple):
    """How ranks share a module.

    placement: of its own weights; None: it has none. behaviour: given its class, the forward of the subclass
    that it gets; None: as it is. stock: the class that this computes as; None: it runs the module's own
    forward.
    """

    placement: Shard | Replicate | None
    behaviour: Callable[[Any], Callable[..., torch.Tensor]] | None
    stock: type[nn.Module] | None = None


def _split(module: nn.Module, part: Part, mesh: DeviceMesh, sharers: Sharers) -> None:
    if part.placement is not None:
        others = {"bias": Replicate()} if part is _ROWS else {}
        _distribute(module, mesh, part.placement, others)
    if part.behaviour is not None:
        module.sharers = sharers  # pyright: ignore[reportArgumentType]
        module.__class__ = _sharing_class(type(module), part.behaviour)


@functools.cache
def _sharing_class(
    base: type[nn.Module], behaviour: Callable[[Any], Callable[..., torch.Tensor]]
) -> type[nn.Module]:
    """One per kind of module, so that blocks share compiled code."""
    return type(base.__name__, (base,), {"__module__": base.__module__, "forward": behaviour(base)})


def _own(module: nn.Module, name: str, sees_all: bool = False) -> torch.Tensor | None:
    """This rank's part of a weight, in the dtype that the module computes in; differentiable.

    sees_all: its gradient here is the whole one already.
    """
    weight = module._parameters[name]
    if weight is None:
        return None
    assert isinstance(weight, DTensor)
    # Of a weight that all have, each rank's gradient is of its own tokens, or heads.
    partial = weight.placements[0].is_replicate() and not sees_all
    part = weight.to_local(grad_placements=[Partial()] if partial else None)
    dtype = getattr(
        module, "computes_in", None
    )  # see apply_mixed_precision; a DTensor's cast takes far longer
    return part if dtype is None else part.to(dtype)


def _linear(base: Any) -> Callable[..., torch.Tensor]:
    """Of this rank's rows, or of all."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, _own(self, "weight"), _own(self, "bias"))  # pyright: ignore[reportArgumentType]

    return forward


def _norm(base: Any) -> Callable[..., torch.Tensor]:
    if issubclass(base, nn.LayerNorm):

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, self.normalized_shape, _own(self, "weight"), _own(self, "bias"), self.eps)

    else:
        assert issubclass(base, nn.RMSNorm), base

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(x, self.normalized_shape, _own(self, "weight"), self.eps)

    return forward


def _gathers_input(base: Any) -> Callable[..., torch.Tensor]:
    """[B, T / ranks, D] of the block's hidden states → [B, T, D], once for all that read them."""

    def forward(self: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        return base.forward(self, gather_sequence(x, self.sharers), *others)

    return forward


def _gathers_output(base: Any) -> Callable[..., torch.Tensor]:
    """[B, T / ranks, D] → [B, T, D]; the gradient that comes back is each rank's vocabulary's share."""
    norm = _norm(base)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return gather_sequence(norm(self, x), self.sharers)

    return forward


def _scatters_output(base: Any) -> Callable[..., torch.Tensor]:
    """A linear of this rank's columns, whose sum over ranks is scattered over the sequence."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight, bias = _own(self, "weight"), _own(self, "bias", sees_all=True)
        if bias is not None and self.sharers.rank:
            bias = bias - bias.detach()  # the sum has it once, from the first; its gradient is of all tokens
        return scatter_sequence(F.linear(x, weight, bias), self.sharers)  # pyright: ignore

    return forward


def _exchanges_rows(base: Any) -> Callable[..., torch.Tensor]:
    """A linear whose rows are three matrices under each other, each to be split over heads.

    The weight stays sharded by plain rows, which is what checkpoints and FSDP can describe. Forward exchanges
    rows, an all-to-all of 1 / ranks of the weight, so that a rank multiplies its heads' q, k and v.
    """

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        name, bias = self.sharers.group_name, _own(self, "bias")
        rows = exchange_rows(_own(self, "weight"), name, 3, False)
        return F.linear(x, rows, None if bias is None else exchange_rows(bias, name, 3, False))

    return forward


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


def _distribute(
    module: nn.Module,
    mesh: DeviceMesh,
    placement: Shard | Replicate,
    others: Mapping[str, Shard | Replicate] = MappingProxyType({}),
) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        # Nothing is sent: weights are on meta, or alike on every rank.
        place = others.get(name, placement)
        distributed = distribute_tensor(parameter.detach(), mesh, [place], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(distributed, parameter.requires_grad))


def _look_up_own_positions(module: nn.Module, mesh: DeviceMesh) -> None:
    def forward(positions: torch.Tensor) -> torch.Tensor:
        own = positions.chunk(mesh.size(), dim=-1)[mesh.get_local_rank()]
        weight = module.weight
        assert isinstance(weight, DTensor)
        return F.embedding(own, weight.to_local(grad_placements=[Partial()]))

    module.forward = forward


_COLUMNS, _FUSED_COLUMNS = Part(Shard(0), _linear, nn.Linear), Part(Shard(0), _exchanges_rows, nn.Linear)
_ROWS = Part(Shard(1), _scatters_output, nn.Linear)
_NORM, _FINAL_NORM = Part(Replicate(), _norm, nn.RMSNorm), Part(Replicate(), _gathers_output, nn.RMSNorm)
_GATHERS = Part(None, _gathers_input)

_BLOCK: dict[str, Part] = {
    "attention_norm": _NORM,
    "attention": _GATHERS,
    "attention.wq": _COLUMNS,
    "attention.wk": _COLUMNS,
    "attention.wv": _COLUMNS,
    "attention.wqkv": _FUSED_COLUMNS,
    "attention.q_norm": _NORM,
    "attention.k_norm": _NORM,
    "attention.wo": _ROWS,
    "ffn_norm": _NORM,
    "feed_forward": _GATHERS,
    "feed_forward.w1": _COLUMNS,
    "feed_forward.w3": _COLUMNS,
    "feed_forward.w2": _ROWS,
}

# Experts take each rank's tokens as they are: who has which experts is another axis's matter.
_EXPERTS: dict[str, Part] = {
    "feed_forward": Part(None, None),
    "feed_forward.router": Part(Replicate(), _linear, nn.Linear),
}

_COLUMN_LINEARS = tuple(name for name, part in _BLOCK.items() if part in (_COLUMNS, _FUSED_COLUMNS))
_ROW_LINEARS = tuple(name for name, part in _BLOCK.items() if part is _ROWS)
