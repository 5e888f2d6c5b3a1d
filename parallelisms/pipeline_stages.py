"""Which modules each pipeline stage holds, and which stages each rank: names and numbers, no tensors.

A stage is a run of blocks; the first also has the embedding, the last the final norm and the head. Stages are
dealt to ranks in a loop (0, 1, 0, 1) or, for schedules shaped like a V, there and back (0, 1, 1, 0).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

DEGREE = "parallelism.pipeline_parallel_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
LAYERS_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
NAMED = "parallelism.module_fqns_per_model_part"
MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"


@dataclass(frozen=True)
class ScheduleKind:
    """What the layout must know of a schedule of torch.distributed.pipelining.

    several: a rank holds several stages. v_shaped: they are dealt there and back, two to a rank.
    splits_backward: gradients of weights are formed apart from those of inputs (zero bubble).
    """

    name: str
    several: bool = False
    v_shaped: bool = False
    splits_backward: bool = False


SCHEDULES: tuple[ScheduleKind, ...] = (
    ScheduleKind("GPipe"),
    ScheduleKind("1F1B"),
    ScheduleKind("Interleaved1F1B", several=True),
    ScheduleKind("InterleavedZeroBubble", several=True, splits_backward=True),
    ScheduleKind("ZBVZeroBubble", several=True, v_shaped=True, splits_backward=True),
)


def schedule_kind(name: str) -> ScheduleKind:
    """The schedule of that name, in any case.

    Raises:
        ValueError: there is none.
    """
    for kind in SCHEDULES:
        if kind.name.lower() == name.lower():
            return kind
    there = ", ".join(kind.name for kind in SCHEDULES)
    raise ValueError(f'{SCHEDULE} = "{name}": must be one of {there}.')


@dataclass(frozen=True)
class PipelinePlan:
    """Module names of every stage, in the order in which a token passes them.

    microbatches: that one call of a rank's sequences is cut into.
    """

    kind: ScheduleKind
    ranks: int
    stages: tuple[tuple[str, ...], ...]
    microbatches: int

    def rank_of(self, stage: int) -> int:
        """The rank along the pipeline axis that holds a stage."""
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.kind.v_shaped and turn % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank along the pipeline axis holds, ascending."""
        return [stage for stage in range(len(self.stages)) if self.rank_of(stage) == rank]

    def transfers(self, rank: int) -> int:
        """Boundaries between a stage of this rank and one of another: what each micro-batch crosses once in
        forward and once in backward, in either direction."""
        held = self.stages_of(rank)
        neighbours = [(stage, other) for stage in held for other in (stage - 1, stage + 1)]
        return sum(0 <= other < len(self.stages) and other not in held for _, other in neighbours)

    def layers_alive(self, rank: int) -> int:
        """Blocks whose activations of one micro-batch a rank keeps at most, each micro-batch counted.

        GPipe keeps all micro-batches. 1F1B starts one for every stage from here on; with several stages on a
        rank, Narayanan et al. 2021 section 2.2; ZB-V keeps as many as the ranks' stages (Qi et al. 2024).
        """
        held = self.stages_of(rank)
        most = max(sum(name.startswith("layers.") for name in self.stages[stage]) for stage in held)
        alive = self.ranks - rank
        if self.kind.name == "GPipe":
            alive = self.microbatches
        elif self.kind.v_shaped:
            alive = 2 * self.ranks
        elif self.kind.several:
            alive = 2 * (self.ranks - rank - 1) + (len(held) - 1) * self.ranks + 1
        return most * min(alive, self.microbatches * len(held))

    def lines(self) -> list[str]:
        """A line for each rank along the axis: its stages and their modules."""
        lines = []
        for rank in range(self.ranks):
            held = [f"stage {stage}: {show_modules(self.stages[stage])}" for stage in self.stages_of(rank)]
            lines.append(f"pipeline rank {rank}: {'; '.join(held)}")
        return lines


def check_pipeline_parallel(degree: int, schedule: str, *, tied: bool, n_experts: int = 0) -> None:
    """Whether a model can be cut into stages at all.

    Raises:
        ValueError: naming the key and the way out.
    """
    if degree > 1 and tied:
        raise ValueError(
            f"{DEGREE} = {degree}: this model's head is its embedding (tied weights), and the first and the "
            "last stage would each train a copy: set it to 1, or take a flavor that is not tied."
        )
    if degree > 1 and n_experts and schedule_kind(schedule).splits_backward:
        raise ValueError(
            f'{SCHEDULE} = "{schedule}": experts (model.n_experts = {n_experts}) form gradients of inputs '
            'and weights together: use "Interleaved1F1B" or "1F1B".'
        )


def plan_pipeline(
    ranks: int,
    schedule: str,
    n_layers: int,
    *,
    batch_size: int,
    microbatch_size: int = 1,
    embedding_layers: float = 1.0,
    head_layers: float = 1.0,
    layers_per_stage: int | None = None,
    named: Sequence[Sequence[str]] | None = None,
) -> PipelinePlan:
    """Cut a model of ``n_layers`` equal blocks.

    Args:
        ranks: along the pipeline axis.
        batch_size, microbatch_size: sequences of one call, and of one micro-batch of it.
        embedding_layers, head_layers: as how many blocks the embedding counts, and norm and head.
        layers_per_stage: decides how many stages a rank has; None: one, or two where the schedule has
            several.
        named: modules of each stage instead.

    Raises:
        ValueError: naming the key and what would fit.
    """
    kind = schedule_kind(schedule)
    microbatches = _count_microbatches(kind, ranks, batch_size, microbatch_size)
    if named is not None:
        _check_number(kind, ranks, len(named), f"{NAMED} names {len(named)} stages")
        return PipelinePlan(kind, ranks, _check_named(named, n_layers), microbatches)
    count = ranks * (2 if kind.several else 1)
    if layers_per_stage is not None:
        count = -int(-(n_layers + embedding_layers + head_layers) // layers_per_stage)
        _check_number(kind, ranks, count, f"{LAYERS_PER_STAGE} = {layers_per_stage} makes {count} stages")
    if count > n_layers:
        raise ValueError(
            f'{DEGREE} = {ranks} with {SCHEDULE} = "{kind.name}" makes {count} stages, but the model has '
            f"{n_layers} layers (model.n_layers): a stage needs at least one. Use a lower degree."
        )
    stages, first = [], 0
    for stage, layers in enumerate(balance(n_layers, count, embedding_layers, head_layers)):
        modules = [f"layers.{layer}" for layer in range(first, first + layers)]
        first += layers
        before = ["tok_embeddings"] * (stage == 0)
        after = ["norm", "output"] * (stage == count - 1)
        stages.append((*before, *modules, *after))
    return PipelinePlan(kind, ranks, tuple(stages), microbatches)


def balance(n_layers: int, stages: int, embedding_layers: float, head_layers: float) -> list[int]:
    """Layers of each stage, at least one, so that the fullest is as light as can be.

    Of stages that are equally full a later one takes the layer: earlier ones keep more micro-batches alive.
    """
    load = [1.0] * stages
    load[0] += embedding_layers
    load[-1] += head_layers
    counts = [1] * stages
    for _ in range(n_layers - stages):
        lightest = min(range(stages), key=lambda stage: (load[stage], -stage))
        load[lightest] += 1
        counts[lightest] += 1
    return counts


def show_modules(modules: Sequence[str]) -> str:
    """``tok_embeddings, layers 0-3``: runs of blocks as ranges."""
    shown, layers = [], [int(name.split(".")[1]) for name in modules if name.startswith("layers.")]
    if layers:
        run = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
        shown.append(f"layer{'s' * (len(layers) > 1)} {run}")
    before = [name for name in modules if name == "tok_embeddings"]
    after = [name for name in modules if name in ("norm", "output")]
    return ", ".join([*before, *shown, *after])


def _count_microbatches(kind: ScheduleKind, ranks: int, batch_size: int, microbatch_size: int) -> int:
    count, rest = divmod(batch_size, microbatch_size)
    if rest:
        raise ValueError(
            f"{MICROBATCH} = {microbatch_size} does not divide training.local_batch_size = {batch_size}, "
            "which is cut into micro-batches."
        )
    cut = f"training.local_batch_size = {batch_size} / {MICROBATCH} = {microbatch_size}"
    if kind.name != "GPipe" and count < ranks:
        raise ValueError(
            f'{cut} makes {count} micro-batches, fewer than {DEGREE} = {ranks}: {SCHEDULE} = "{kind.name}" '
            f"needs as many (more waste less). Set training.local_batch_size to {ranks * microbatch_size} or "
            "more."
        )
    rounds = max(1, count // ranks)
    if kind.several and not kind.v_shaped and count % rounds:
        raise ValueError(
            f'{cut} makes {count} micro-batches, which {SCHEDULE} = "{kind.name}" deals in {rounds} rounds: '
            f"make them a multiple of {DEGREE} = {ranks}."
        )
    return count


def _check_number(kind: ScheduleKind, ranks: int, count: int, what: str) -> None:
    """Whether so many stages can be dealt to the ranks."""
    per_rank, rest = divmod(count, ranks)
    wanted = "two" if kind.v_shaped else "two or more" if kind.several else "one"
    fits = per_rank == 2 if kind.v_shaped else per_rank >= 2 if kind.several else per_rank == 1
    if rest or not fits:
        raise ValueError(
            f'{what}, but {SCHEDULE} = "{kind.name}" takes {wanted} on each of the {DEGREE} = {ranks} ranks.'
        )


def _check_named(named: Sequence[Sequence[str]], n_layers: int) -> tuple[tuple[str, ...], ...]:
    """The stages as the user names them: every module once, in order, norm and head together."""
    # Learned positions are added to the embedding, and go with it.
    stages = [tuple(name for name in stage if name != "pos_embeddings") for stage in named]
    order = ["tok_embeddings", *(f"layers.{layer}" for layer in range(n_layers)), "norm", "output"]
    given = [name for stage in stages for name in stage]
    for name in given:
        if name not in order:
            hint = " (the model has fewer layers)" if re.fullmatch(r"layers\.\d+", name) else ""
            raise ValueError(
                f'{NAMED}: "{name}" is no module{hint}; there are tok_embeddings, layers.0 ... '
                f"layers.{n_layers - 1}, norm, output."
            )
    if given != order:
        wrong = next((name for name, right in zip(given, order) if name != right), None)
        missing = [name for name in order if name not in given]
        told = f"{missing[0]} is in no stage" if missing else f"{wrong} stands out of order or twice"
        raise ValueError(f"{NAMED}: {told}; stages list every module once, in the order of the model.")
    if any(not stage for stage in stages) or "norm" not in stages[-1]:
        raise ValueError(f"{NAMED}: no stage may be empty, and norm and output belong into the last.")
    return tuple(stages)
