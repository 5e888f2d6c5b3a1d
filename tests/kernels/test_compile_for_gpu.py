"""The kernels compile for Hopper on a machine without a GPU, into tensor-core code that keeps to its
registers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.hand_overs import early_arrivals

pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia.compiler")

ROOT = Path(__file__).parents[2]


KERNELS = {
    "wgrad/few_tokens/adamw/bf16": (4, 128),
    "flat/adamw/int8": (0, 128),
    "exchange_codes/sum_kernel/int4/differences": (0, 0),
    "pp2/adamw/bf16": (16, 128),
    # All that pp2 has: experts, codes of a byte seen as pairs, random bits.
    "pp2/adamw/int8_sr/experts": (16, 256),
    "coop/adamw/fp8_states": (2, 128),
}
"""Names, how many tensor-core instructions each must have, and the most bytes that it may spill."""


def test_kernels_compile(tmp_path: Path) -> None:
    """Those above; of all others, that the script names every argument that their kernels have."""
    only = "|".join(f"^{name}$" for name in KERNELS)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "scripts/bench/compile_kernels.py", "--quick", "--only", only, "--out",
        str(tmp_path)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "compile.json").read_text())
    assert report["failures"] == 0
    assert {kernel["kernel"] for kernel in report["kernels"]} == set(KERNELS)
    for kernel in report["kernels"]:
        products, spilled = KERNELS[kernel["kernel"]]
        assert kernel["wgmma"] == products
        assert kernel["shared_bytes"] <= 227 * 1024
        assert kernel["spill_store_bytes"] <= spilled, kernel


def test_an_arrival_before_all_warps_are_done_is_seen() -> None:
    guarded = """
$L__BB0_3:
	st.shared.b32 	[%r1], %r2;
	fence.proxy.async.shared::cta;
	bar.sync 	2, 128;
	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];
	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 64;
"""
    assert early_arrivals(guarded) == []
    without = guarded.replace("bar.sync 	2, 128;", "")
    assert early_arrivals(without) == ["6: mbarrier.arrive.shared::cta.b64"]
    arrival = "	@%p1 mbarrier.arrive"
    stored_later = guarded.replace(arrival, "	st.shared.b32 	[%r1], %r2;\n" + arrival)
    assert len(early_arrivals(stored_later)) == 1


def test_a_barrier_of_one_warp_is_enough_for_a_part_of_one_warp_alone() -> None:
    mover = """
	barrier.sync 	1;
$L__BB0_9:
	cp.async.bulk.wait_group.read 	0;
	bar.warp.sync 	-1;
	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];
	barrier.sync 	1;
"""
    assert early_arrivals(mover) == []
    consumers = mover.replace("$L__BB0_9:", "	bar.sync 	2, 128;\n$L__BB0_9:")
    assert early_arrivals(consumers) == ["7: mbarrier.arrive.shared::cta.b64"]
