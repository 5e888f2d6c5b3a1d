"""Whether compiled kernels hand shared memory over only when all of a group's warps are done with it.

The Gluon forms leave it to Triton to synchronise a group's warps before one thread arrives at an mbarrier for
all of them. A release of Triton that did not would give code that compiles, and races.
"""

from __future__ import annotations

import itertools
import re

_SWITCH = re.compile(r"\bbarrier\.sync\b")  # where warps that take different parts of a kernel begin and end
_GROUP = re.compile(r"\bbar\.sync\b")
_WARP = re.compile(r"\bbar\.warp\.sync\b")
_ARRIVAL = re.compile(r"\bmbarrier\.arrive(?!\.expect_tx)\S*")
# What may still be under way in another warp: uses of shared memory, products that read it, copies.
_USE = re.compile(
    r"\b(ld|st|atom|red)\.shared|\b(ld|st)matrix|\bwgmma\.(mma_async|wait_group)|\bcp\.async\.bulk|"
    r"\bfence\.proxy|\bmbarrier\.try_wait"
)


def early_arrivals(ptx: str) -> list[str]:
    """The arrivals at mbarriers that no barrier of the warps precedes, after what last used shared memory in
    their block of code. Each as `line: instruction`; arrivals that only announce bytes are not looked at.

    In a part of several warps, which has barriers of them, one of a single warp does not count.
    """
    lines = ptx.splitlines()
    switches = [number for number, line in enumerate(lines) if _SWITCH.search(line)]
    found = []
    for first, last in itertools.pairwise([0, *switches, len(lines)]):
        part = lines[first:last]
        barrier = _GROUP if any(_GROUP.search(line) for line in part) else _WARP
        done = False  # whether all warps are known to have come here since the last use
        for number, line in enumerate(part, first + 1):
            if line.startswith("$L__BB") or _USE.search(line):
                done = False
            elif barrier.search(line) or _SWITCH.search(line):
                done = True
            elif (arrival := _ARRIVAL.search(line)) and not done:
                found.append(f"{number}: {arrival.group()}")
    return found
