"""Whether compiled kernels hand shared memory over only when all of a group's warps are done with it.

The Gluon forms leave it to Triton to synchronise a group's warps before one thread arrives at an mbarrier for
all of them. A release of Triton that did not would give code that compiles, and races.
"""

from __future__ import annotations

import re

_BARRIER = re.compile(r"\b(bar|barrier|bar\.warp)\.sync\b")
_ARRIVAL = re.compile(r"\bmbarrier\.arrive(?!\.expect_tx)\S*")
# What may still be under way in another warp: uses of shared memory, products that read it, copies.
_USE = re.compile(
    r"\b(ld|st|atom|red)\.shared|\b(ld|st)matrix|\bwgmma\.(mma_async|wait_group)|\bcp\.async\.bulk|"
    r"\bfence\.proxy|\bmbarrier\.try_wait"
)


def early_arrivals(ptx: str) -> list[str]:
    """The arrivals at mbarriers that no barrier of the warps precedes, after what last used shared memory in
    their block of code. Each as `line: instruction`; arrivals that only announce bytes are not looked at.
    """
    found = []
    done = False  # whether all warps are known to have come here since the last use
    for number, line in enumerate(ptx.splitlines(), 1):
        if line.startswith("$L__BB") or _USE.search(line):
            done = False
        elif _BARRIER.search(line):
            done = True
        elif (arrival := _ARRIVAL.search(line)) and not done:
            found.append(f"{number}: {arrival.group()}")
    return found
