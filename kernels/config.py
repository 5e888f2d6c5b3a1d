"""Which tile shape the weight-gradient kernel runs with: a table, and what an autotuner found on this
machine.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, replace
from functools import cache

import torch

from titanforge.kernels._triton import INTERPRET, next_power_of_2
from titanforge.kernels.forms import (
    AUTO,
    COOPERATIVE,
    FORMS,
    PINGPONG,
    PORTABLE,
    form_for,
    selected_form,
    unavailable,
    untried,
)
from titanforge.kernels.machine_cache import add_entry, cache_path, device_name, known_entries


@dataclass(frozen=True)
class TileConfig:
    """Tile of `block_n` x `block_k` weights, `block_t` tokens a step, and how it is scheduled.

    group: rows of tiles walked together. split: pieces in which the epilogue takes a tile (1, 2, 4).
    prefetch: ask for weights and states in L2 before the mainloop. form: of the kernel, `forms.FORMS`. Forms
    other than portable have a fixed tile and take `block_t`, `group` and `stages`. overlap: whether pp2's two
    warpgroups may update at the same time. paired: pp2 moves two slices of the same rows at a time.
    """

    block_n: int
    block_k: int
    block_t: int
    group: int = 8
    split: int = 1
    warps: int = 4
    stages: int = 3
    prefetch: bool = False
    form: str = PORTABLE
    overlap: bool = False
    paired: bool = False

    def __post_init__(self) -> None:
        if self.split not in (1, 2, 4) or self.block_k % (64 * self.split):
            raise ValueError(
                f"a tile must split into 1, 2 or 4 pieces whose width is a multiple of 64: {self}"
            )
        if not 1 <= self.group <= 255:
            raise ValueError(f"group is 1 to 255 rows of tiles: {self}")
        if min(self.block_n, self.block_t) < 16:
            raise ValueError(f"a tile is at least 16 rows by 16 tokens: {self}")
        tile = {PINGPONG: (128, 128), COOPERATIVE: (128, 256)}.get(self.form)
        if self.form not in FORMS or (tile and (self.block_n, self.block_k) != tile):
            raise ValueError(f"a form is one of {', '.join(FORMS)}, each with its own tile: {self}")

    def packed(self) -> list[int]:
        """As integers, for a custom op."""
        *sizes, prefetch, form, overlap, paired = astuple(self)
        return [*sizes, int(prefetch), FORMS.index(form), int(overlap), int(paired)]

    @staticmethod
    def unpacked(packed: list[int]) -> TileConfig:
        """The configuration that `packed` gave these integers."""
        *sizes, prefetch, form, overlap, paired = packed
        return TileConfig(
            *sizes, prefetch=bool(prefetch), form=FORMS[form], overlap=bool(overlap), paired=bool(paired)
        )


# Measured on an H200 with AdamW and bf16 states: the narrow tile hides its epilogue behind other blocks of
# the same multiprocessor while memory is the limit, the wide one reuses operands while multiplying is.
_FEW_TOKENS = TileConfig(64, 128, 64, group=8, split=2, warps=4, stages=4, prefetch=True)
_MANY_TOKENS = TileConfig(128, 256, 64, group=8, split=4, warps=8, stages=4, prefetch=True)
# Where the epilogue holds more than the wide tile leaves registers for (fp32 states, random rounding, fp8).
_MANY_TOKENS_HEAVY = TileConfig(128, 128, 64, group=8, split=2, warps=8, stages=4, prefetch=True)
_SMALL = TileConfig(64, 64, 64, group=8, warps=4, stages=3)
# fp32 operands take twice the shared memory, and products without tensor cores take many registers.
_FP32 = TileConfig(64, 64, 16, group=8, warps=8, stages=2)
_INTERPRETED = TileConfig(32, 64, 32, group=2)
_PINGPONG = TileConfig(128, 128, 64, group=1, stages=4, form=PINGPONG)
_COOPERATIVE = TileConfig(128, 256, 32, group=8, split=4, warps=8, stages=4, form=COOPERATIVE)
_WIDE_ROWS = 8192  # from this many columns on, tiles are walked in groups of rows


def shape_key(name: str, n: int, k: int, tokens: int, dtype: torch.dtype, codecs: str) -> str:
    """Key of the cache. Tokens are taken to the next power of two, so that near batch sizes share an
    entry.
    """
    bucket = next_power_of_2(max(tokens, 1))
    return f"{name}/{n}x{k}/{bucket}/{str(dtype).removeprefix('torch.')}/{codecs}"


@cache
def _tuned() -> dict[str, TileConfig]:
    return known_entries(cache_path(), lambda entry: TileConfig(**entry))


def remember_config(key: str, config: TileConfig) -> None:
    """Add one entry to the cache file."""
    add_entry(cache_path(), key, asdict(config))
    _tuned.cache_clear()


def choose_config(
    n: int,
    k: int,
    tokens: int,
    dtype: torch.dtype,
    codecs: str,
    device: torch.device,
    *,
    heavy: bool = False,
    form: str | None = None,
) -> TileConfig:
    """The tuned configuration for this device and shape, or else the table's.

    n, k: rows and columns of the weight. tokens: of the whole batch (per expert on average, for grouped
    weights). dtype: of the operands. codecs: storage of weight and states, as in the key of a tuned entry.
    heavy: whether the epilogue needs many registers. form: of the kernel, by default what `forge.kernel` asks
    for; a tuned configuration of another form than the one asked for is not taken.
    """
    if INTERPRET and device.type == "cpu":
        return _INTERPRETED
    asked = form or selected_form()
    tuned = _tuned()
    if tuned and device.type == "cuda":
        key = shape_key(device_name(device), n, k, tokens, dtype, codecs)
        found = tuned.get(key)
        # An entry outlives the Triton that it was measured with.
        runs = found is not None and (found.form == PORTABLE or not untried(found.form, device))
        if found is not None and (asked == found.form or (asked == AUTO and runs)):
            return found
    form = form or form_for(tokens, device)
    if form == PINGPONG:
        # bf16 is bound by moving bytes: there neighbouring slices go together.
        group = 8 if k > _WIDE_ROWS else 1
        return replace(_PINGPONG, group=group, paired=codecs == "bf16-bf16-bf16")
    if form == COOPERATIVE:
        return _COOPERATIVE
    if dtype == torch.float32:
        return _FP32
    if n <= 256 or k <= 256:
        return _SMALL
    if tokens < 2048:
        return _FEW_TOKENS
    return _MANY_TOKENS_HEAVY if heavy else _MANY_TOKENS


def candidate_configs(dtype: torch.dtype, device: torch.device) -> list[TileConfig]:
    """What the autotuner tries: forms that the device cannot run are left out, and those that have not run
    with this Triton unless `forge.kernel` names one: a kernel that waits for ever would hold up the others.
    """
    if dtype == torch.float32:
        return [_FP32, TileConfig(64, 64, 32, warps=4, stages=2), TileConfig(32, 64, 32, warps=4, stages=3)]
    shapes = (
        (64, 128, 2, 4),
        (64, 128, 1, 4),
        (128, 128, 2, 8),
        (128, 128, 1, 8),
        (128, 256, 4, 8),
        (64, 256, 2, 4),
    )
    portable = [
        TileConfig(block_n, block_k, 64, group, split, warps, stages, prefetch=True)
        for block_n, block_k, split, warps in shapes
        for group in (1, 8)
        for stages in (3, 4)
    ] + [_SMALL]
    if unavailable(device):
        return portable
    groups = (1, 4, 8)
    ways = ({}, {"overlap": True}, {"paired": True})
    others = [replace(_PINGPONG, group=group, **way) for group in groups for way in ways]
    others += [replace(_COOPERATIVE, group=group) for group in groups]
    named = selected_form() not in (AUTO, PORTABLE)
    return [*[config for config in others if named or not untried(config.form, device)], *portable]
