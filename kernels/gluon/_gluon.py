"""The one place that knows whether Gluon, Triton's lower language, is there."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from titanforge.kernels._triton import HAS_TRITON, INTERPRET, triton

GLUON_ERROR = ""
"""Why there is no Gluon here; empty where there is."""

gluon: Any = None
hopper: Any = None
TensorDescriptor: Any = None
if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl
else:
    gl = None
    if not HAS_TRITON:
        GLUON_ERROR = "Triton is not installed"
    elif INTERPRET:
        GLUON_ERROR = "Triton interprets its kernels (TRITON_INTERPRET=1)"
    else:
        try:
            gluon = import_module("triton.experimental.gluon")
            gl = import_module("triton.experimental.gluon.language")
            hopper = import_module("triton.experimental.gluon.language.nvidia.hopper")
            TensorDescriptor = import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor
        except (ImportError, AttributeError) as error:
            GLUON_ERROR = f"this Triton has no Gluon for Hopper ({error}): 3.6 or newer does"

mbarrier: Any = getattr(hopper, "mbarrier", None)
fence_async_shared: Any = getattr(hopper, "fence_async_shared", None)
warpgroup_mma: Any = getattr(hopper, "warpgroup_mma", None)
warpgroup_mma_wait: Any = getattr(hopper, "warpgroup_mma_wait", None)
_tma: Any = getattr(hopper, "tma", None)
# The first names are those of Triton 3.9, the second those of 3.6; between them each changed at a release of
# its own.
tma_load: Any = getattr(_tma, "async_load", None) or getattr(_tma, "async_copy_global_to_shared", None)
tma_store: Any = getattr(_tma, "async_store", None) or getattr(_tma, "async_copy_shared_to_global", None)
tma_store_wait: Any = getattr(_tma, "store_wait", None)
partition_barrier: Any = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier", None)
_shared: Any = getattr(gl, "shared_memory_descriptor", None)
reinterpret: Any = getattr(_shared, "reinterpret", None) or getattr(_shared, "_reinterpret", None)
"""`reinterpret(buffer, dtype, shape, layout)`: what lies in shared memory, seen as something else."""


def missing(names: dict[str, Any]) -> str:
    """Why Gluon cannot be used, where something that the kernels need is None; else empty."""
    absent = ", ".join(name for name, found in names.items() if found is None)
    return f"Gluon of Triton {triton.__version__} has no {absent} that we know the name of" if absent else ""


if not GLUON_ERROR:
    GLUON_ERROR = missing(
        {
            "mbarrier": mbarrier, "fence_async_shared": fence_async_shared, "warpgroup_mma": warpgroup_mma,
            "warpgroup_mma_wait": warpgroup_mma_wait, "tma.async_load": tma_load,
            "tma.async_store": tma_store, "tma.store_wait": tma_store_wait, "barrier": partition_barrier,
            "shared_memory_descriptor.reinterpret": reinterpret,
            "warp_specialize": getattr(gl, "warp_specialize", None),
        }
    )  # fmt: skip
HAS_GLUON = not GLUON_ERROR


def jit(function: Any = None, *, unspecialized: tuple[str, ...] = ()) -> Any:
    """`gluon.jit`, or the function itself where there is no Gluon and nothing will call it."""
    if function is None:
        return lambda inner: jit(inner, unspecialized=unspecialized)
    return gluon.jit(do_not_specialize=list(unspecialized))(function) if HAS_GLUON else function
