"""What the fork server of ``distributed_harness`` does once before the first rank comes from it."""

from __future__ import annotations

import atexit
import gc

import titanforge.trainer  # noqa: F401  what most ranks need: torch, its compiler's front end, all layers

# A collection in a rank need not look at what was imported here, nor copy its pages.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)
