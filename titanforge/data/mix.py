"""The sources of a run: one, or several with weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titanforge.data.lanes import Lane
from titanforge.data.order import mix64
from titanforge.data.sources import ShardedSource, Source, open_source
from titanforge.data.split import TrainingDocuments, TrainingShards, Walk, training_side, validation_lane


@dataclass(frozen=True)
class SourceSpec:
    """One source as the configuration names it: the keys of `[[data.sources]]`."""

    dataset: str
    path: str | None = None
    weight: float = 1.0
    """Share of the tokens, in proportion to the other sources' weights."""
    text_key: str | None = None
    name: str | None = None
    subset: str | None = None
    split: str | None = None

    @property
    def label(self) -> str:
        return self.name or (Path(self.path).stem if self.path else self.dataset)


def open_mix(sources: Sequence[SourceSpec], text_key: str) -> list[Source | ShardedSource]:
    """Every source opened; `text_key` for those that have none of their own.

    Raises as `open_source` does, under the keys of `[[data.sources]]`, and ValueError for weights that are
    not above 0 and for names that occur twice.
    """
    labels = [spec.label for spec in sources]
    opened = []
    for i, spec in enumerate(sources):
        if not 0 < spec.weight < float("inf"):
            raise ValueError(f"data.sources[{i}].weight = {spec.weight}: must be above 0")
        if labels.index(spec.label) != i:
            raise ValueError(
                f"data.sources[{i}].name: {spec.label!r} is the name of data.sources"
                f"[{labels.index(spec.label)}] too; give one of them another name"
            )
        try:
            source = open_source(spec.dataset, spec.path, spec.text_key or text_key, spec.subset, spec.split)
        except (ValueError, FileNotFoundError) as error:
            # What is said about the one source of [training] holds for this one's keys.
            message = str(error)
            for theirs, ours in (
                ("training.dataset_path", f"data.sources[{i}].path"),
                ("training.dataset", f"data.sources[{i}].dataset"),
                ("(data.s", f"(data.sources[{i}].s"),
            ):
                message = message.replace(theirs, ours)
            raise type(error)(message) from error
        if spec.name:
            source.name = f"{spec.name}: {source.name}"
        opened.append(source)
    return opened


@dataclass(frozen=True)
class TrainingMix:
    """The training side of every source, with its weight and its label."""

    sides: tuple[TrainingDocuments | TrainingShards, ...]
    weights: tuple[float, ...]
    labels: tuple[str, ...]

    @classmethod
    def of(
        cls,
        opened: Sequence[Source | ShardedSource],
        specs: Sequence[SourceSpec],
        validation_fraction: float,
        num_streams: int,
    ) -> TrainingMix:
        return cls(
            sides=tuple(training_side(source, validation_fraction, num_streams) for source in opened),
            weights=tuple(spec.weight for spec in specs),
            labels=tuple(spec.label for spec in specs),
        )

    def __len__(self) -> int:
        return len(self.sides)

    def lanes(self, walk: Walk) -> Callable[[int], list[Lane]]:
        """Stream -> its lanes. The first source is shuffled as it is alone."""
        makers = [
            side.lanes(replace(walk, seed=mix64(walk.seed ^ mix64(s)) if s else walk.seed))
            for s, side in enumerate(self.sides)
        ]
        return lambda stream: [make(stream) for make in makers]

    def identity(self, walk: Walk) -> dict[str, int]:
        """What decides which document a position means, as ints."""
        first = self.sides[0]
        result = {
            "documents": sum(map(len, self.sides)),
            "source": first.source.fingerprint,
            "held_out": int(first.validation_fraction * 2**53),
        }
        if len(self) > 1:
            result["source"] = _hash(side.source.fingerprint for side in self.sides)
            result["weights"] = _hash(self.weights)
        if any(isinstance(side, TrainingShards) for side in self.sides):
            result["window"] = walk.window if walk.shuffle else 0
        return result


def validation_lanes(opened: Sequence[Source | ShardedSource], fraction: float) -> list[Lane]:
    """The held-out documents of every source, once each; with fraction 1, all documents."""
    return [validation_lane(source, fraction) for source in opened]


def _hash(values) -> int:
    return int.from_bytes(hashlib.blake2b(repr(list(values)).encode(), digest_size=7).digest())
