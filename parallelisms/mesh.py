"""The device mesh, and its axes by name.

Axes, outermost first: ``pp, dp_replicate, dp_shard, cp, tp``. Derived ones are flattened from them:

==============  ===========================  ==========================================
``dp``          dp_replicate x dp_shard      ranks that read different data
``dp_shard_cp`` dp_shard x cp                ranks that shard weights (FSDP)
``dp_cp``       dp_replicate x dp_shard x cp ranks whose gradients are summed
``loss``        pp x the same                ranks whose losses are summed: stages but the last add 0
``replica``     dp_shard x cp x tp           ranks that one replica's weights are split over
==============  ===========================  ==========================================

Experts have a mesh of their own over the same ranks: of the ``dp_shard x cp x tp`` ranks of a replica, ``ep``
neighbours share the experts among them, and the ``dp_shard_mod_ep`` ranks in the same place of each such set
hold the same experts, in shares (FSDP).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "loss": ("pp", "dp_replicate", "dp_shard", "cp"),
    "replica": ("dp_shard", "cp", "tp"),
}
_KEYS = {
    "pp": "parallelism.pipeline_parallel_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
}
EXPERT_AXES = ("dp_shard_mod_ep", "ep")
# Of names under which traffic is recorded, those that are no axes of the mesh, or mean more.
_RECORDED = {
    "world": AXES,
    "dp_shard": FLATTENED["dp_shard_cp"],
    "dp_shard x tp": FLATTENED["replica"],
    "dp_shard_mod_ep": FLATTENED["replica"],
}


@dataclass
class ParallelDims:
    """Degrees of each axis; ``dp_shard = -1`` takes what the others leave.

    Raises:
        ValueError: naming the configuration key, its value and what would be valid.
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    world_size: int = 1
    _mesh: DeviceMesh | None = field(default=None, init=False, repr=False)
    _flat: dict[str, DeviceMesh] = field(default_factory=dict, init=False, repr=False)
    _expert_mesh: DeviceMesh | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for axis, key in _KEYS.items():
            degree = getattr(self, axis)
            if degree < 1 and not (axis == "dp_shard" and degree == -1):
                wanted = "-1 (what the others leave) or at least 1" if axis == "dp_shard" else "at least 1"
                raise ValueError(f"{key} = {degree}: must be {wanted}.")
        others = self.dp_replicate * self.cp * self.tp * self.pp
        if self.dp_shard == -1:
            if self.world_size % others:
                raise ValueError(
                    f"{self._product('dp_replicate', 'cp', 'tp', 'pp')} does not divide the "
                    f"{self.world_size} ranks, so {_KEYS['dp_shard']} = -1 has no value."
                )
            self.dp_shard = self.world_size // others
        if others * self.dp_shard != self.world_size:
            raise ValueError(
                f"{self._product('dp_replicate', 'dp_shard', 'cp', 'tp', 'pp')} makes "
                f"{others * self.dp_shard} ranks, but {self.world_size} ranks were started. Set one to "
                f"fit ({_KEYS['dp_shard']} = -1 fits by itself) or start {others * self.dp_shard} ranks."
            )

        in_replica = self.dp_shard * self.cp * self.tp
        if in_replica % self.ep:
            fitting = ", ".join(str(d) for d in range(1, in_replica + 1) if in_replica % d == 0)
            raise ValueError(
                f"{_KEYS['ep']} = {self.ep} does not divide the number of ranks of a replica, {in_replica} ("
                f"{self._product('dp_shard', 'cp', 'tp')}), which share the experts: use one of {fitting}, "
                "or another number of ranks."
            )
        if self.ep > 1 and self.ep % self.tp:
            raise ValueError(
                f"{_KEYS['ep']} = {self.ep} is no multiple of {_KEYS['tp']} = {self.tp}, whose ranks hold"
                " different experts: use one, or set the latter to 1."
            )

    def _product(self, *axes: str) -> str:
        """Degrees by key, those of 1 left out unless they all are."""
        above_one = [axis for axis in axes if getattr(self, axis) > 1] or axes[:1]
        return " x ".join(f"{_KEYS[axis]} = {getattr(self, axis)}" for axis in above_one)

    def degrees_of(self, recorded: str) -> str:
        """The keys, with their values, that gave an axis of the traffic's record its ranks; empty for a name
        that is unknown here.
        """
        axes = _RECORDED.get(recorded) or FLATTENED.get(recorded) or (recorded,)
        return self._product(*axes) if all(axis in _KEYS for axis in axes) else ""

    @property
    def sharers(self) -> int:
        """Ranks that read the same data and work on it together."""
        return self.world_size // (self.dp_replicate * self.dp_shard)

    def degree(self, name: str) -> int:
        """Ranks along an axis, single or flattened; those of the experts' mesh are 1 where ep is 1."""
        if name in EXPERT_AXES:
            others = self.dp_shard * self.cp * self.tp // self.ep
            return self.ep if name == "ep" else others if self.ep > 1 else 1
        axes = FLATTENED.get(name, (name,))
        for axis in axes:
            if axis not in AXES:
                raise ValueError(
                    f"no mesh axis {name!r}; there are {', '.join((*AXES, *EXPERT_AXES, *FLATTENED))}."
                )
        return prod(getattr(self, axis) for axis in axes)

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """Create the mesh once, over all ranks; collective over the default group."""
        assert self._mesh is None, "the mesh is built once"
        self._mesh = init_device_mesh(
            device_type, tuple(getattr(self, axis) for axis in AXES), mesh_dim_names=AXES
        )
        for name, axes in FLATTENED.items():
            if name == "loss" and self.pp == 1:  # one set of communicators for the two names
                self._flat[name] = self._flat["dp_cp"]
            elif name == "replica" and self.tp == 1:
                self._flat[name] = self._flat["dp_shard_cp"]
            else:
                self._flat[name] = self._mesh[axes]._flatten(f"flat_{name}")
        if self.ep > 1:
            sizes = (self.pp, self.dp_replicate, *(self.degree(axis) for axis in EXPERT_AXES))
            names = ("pp", "dp_replicate", *EXPERT_AXES)
            self._expert_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        return self._mesh

    def get_mesh(self, name: str) -> DeviceMesh:
        """The 1-D mesh of an axis, also of one rank.

        Raises:
            ValueError: no such axis; the message lists the valid ones.
        """
        self.degree(name)
        assert self._mesh is not None, "build_mesh comes first"
        if name in EXPERT_AXES:
            assert self._expert_mesh is not None, "experts have a mesh of their own if ep is above 1"
            return self._expert_mesh[name]
        return self._flat[name] if name in self._flat else self._mesh[name]

    def get_optional_mesh(self, name: str) -> DeviceMesh | None:
        """The mesh of an axis, or None where the axis has one rank."""
        return self.get_mesh(name) if self.degree(name) > 1 else None

    def get_group(self, name: str) -> ProcessGroup | None:
        """The process group of an axis, or None where the axis has one rank."""
        mesh = self.get_optional_mesh(name)
        return None if mesh is None else mesh.get_group()

    def ranks_by_replica(self) -> list[list[int]]:
        """The ranks of each replica, in order."""
        assert self._mesh is not None, "build_mesh comes first"
        ranks = self._mesh.mesh.movedim(AXES.index("dp_replicate"), 0)
        return ranks.reshape(self.dp_replicate, -1).tolist()

    def data_rank_and_size(self) -> tuple[int, int]:
        """(which share of the global batch this rank reads, number of shares)."""
        return self.get_mesh("dp").get_local_rank(), self.degree("dp")

    def describe(self) -> str:
        """One line for the start-up report, such as ``8 ranks = dp_replicate 2 x dp_shard 4``."""
        parts = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return (
            f"{self.world_size} rank{'s' * (self.world_size > 1)}"
            + (f" = {' x '.join(parts)}" if parts else "")
            + (f", experts over ep {self.ep}" if self.ep > 1 else "")
        )
