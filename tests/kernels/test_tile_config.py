"""The choice of tiles: table, tuner, and the cache between them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from titanforge.kernels import config as config_module
from titanforge.kernels import symmetric_config
from titanforge.kernels._triton import INTERPRET
from titanforge.kernels.autotune import autotune
from titanforge.kernels.config import TileConfig, candidate_configs, choose_config
from titanforge.kernels.epilogues import get_epilogue
from titanforge.kernels.forms import checked_forms, checked_path
from titanforge.kernels.machine_cache import cache_path

pytestmark = pytest.mark.skipif(INTERPRET, reason="interpreted kernels have one configuration")
CPU = torch.device("cpu")
CODECS = "bf16-bf16-bf16"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITANFORGE_CACHE_DIR", str(tmp_path))
    config_module._tuned.cache_clear()
    yield
    config_module._tuned.cache_clear()


def test_entries_of_another_release_are_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """They ended every choice of tiles, of any shape, in a TypeError that named no file."""
    ours = TileConfig(64, 128, 64)
    config_module.remember_config("ours", ours)
    newer = {**asdict(ours), "clusters": 2}
    columns = {**asdict(config_module._PINGPONG), "group": -4}  # a walk by columns, which releases had
    entries = {
        "ours": asdict(ours), "field": newer, "form": {**asdict(ours), "form": "gone"}, "kind": 3,
        "order": columns,
    }  # fmt: skip
    cache_path().write_text(json.dumps(entries))
    config_module._tuned.cache_clear()
    assert config_module._tuned() == {"ours": ours}
    assert choose_config(4096, 4096, 512, torch.bfloat16, CODECS, CPU)
    assert f"{cache_path()}: 4 of its entries" in caplog.text
    config_module.remember_config("more", ours)
    assert json.loads(cache_path().read_text()).keys() == {*entries, "more"}, (
        "another release still has its own"
    )


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_cache_is_named(text: str) -> None:
    cache_path().write_text(text)
    checked_path().write_text(text)
    for read, path in (
        (config_module._tuned, cache_path()),
        (lambda: config_module.remember_config("key", TileConfig(64, 128, 64)), cache_path()),
        (lambda: checked_forms.__wrapped__(CPU), checked_path()),
    ):
        with pytest.raises(RuntimeError, match=f"^{re.escape(str(path))} .*delete it"):
            read()


def test_table_covers_every_kind_of_launch() -> None:
    few = choose_config(4096, 4096, 512, torch.bfloat16, CODECS, CPU)
    many = choose_config(4096, 4096, 8192, torch.bfloat16, CODECS, CPU)
    heavy = choose_config(4096, 4096, 8192, torch.bfloat16, CODECS, CPU, heavy=True)
    small = choose_config(64, 4096, 8192, torch.bfloat16, CODECS, CPU)
    fp32 = choose_config(4096, 4096, 512, torch.float32, CODECS, CPU)
    assert len({few, many, heavy, small, fp32}) == 5
    assert many.block_n * many.block_k > heavy.block_n * heavy.block_k > few.block_n * few.block_k
    for dtype in (torch.bfloat16, torch.float32):
        for candidate in candidate_configs(dtype, CPU):
            operand_bytes = dtype.itemsize * candidate.block_t * (candidate.block_n + candidate.block_k)
            assert operand_bytes * candidate.stages <= 227 * 1024


def test_tuner_remembers_the_fastest_and_passes_over_what_fails() -> None:
    candidates = [
        TileConfig(64, 128, 64),
        TileConfig(128, 128, 64),
        TileConfig(64, 64, 64),
        TileConfig(32, 64, 32),
    ]
    times = iter([3.0, 1.0, 2.0])
    measured: list[int] = []

    def measure(functions: Sequence[Callable[[], object]]) -> float:
        if len(measured) == 3:
            raise RuntimeError("out of resources: shared memory")
        for function in functions:
            function()
        measured.append(len(functions))
        return next(times)

    def tune(**changed: object) -> tuple[TileConfig, list[tuple[float, TileConfig]]]:
        return autotune(
            get_epilogue("adamw"), ["bf16", "bf16", "bf16"], (32, 64), 20, torch.bfloat16, CPU,
            candidates=candidates, measure=measure, **changed,
        )  # type: ignore[arg-type]  # fmt: skip

    best, timed = tune()
    assert best == candidates[1]
    assert [time for time, _ in timed] == [1.0, 2.0, 3.0]
    assert min(measured) >= 2  # buffers rotate
    assert cache_path().exists()
    tuned = config_module._tuned()  # what `choose_config` reads on a GPU
    assert tuned[config_module.shape_key("cpu", 32, 64, 30, torch.bfloat16, CODECS)] == best  # 20's bucket
    assert len(tuned) == 1
    with pytest.raises(RuntimeError, match="no tile configuration runs on this device"):
        tune()


def test_a_tile_that_cannot_hold_its_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        TileConfig(64, 128, 64, split=4)
    with pytest.raises(ValueError, match="at least 16"):
        TileConfig(8, 64, 64)
    for group in (-1, 0, 256):
        with pytest.raises(ValueError, match="1 to 255 rows"):
            replace(config_module._PINGPONG, group=group)


def test_so_are_tiles_of_symmetric_products(caplog: pytest.LogCaptureFixture) -> None:
    ours = asdict(symmetric_config.candidates()[0])
    entries = {"ours": ours, "library": None, "field": {**ours, "clusters": 2}}
    symmetric_config.tuned_path().write_text(json.dumps(entries))
    symmetric_config._tuned.cache_clear()
    try:
        assert symmetric_config._tuned().keys() == {"ours", "library"}
    finally:
        symmetric_config._tuned.cache_clear()
    assert f"{symmetric_config.tuned_path()}: 1 of its entries" in caplog.text
