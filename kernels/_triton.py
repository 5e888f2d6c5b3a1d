"""The one place that knows whether Triton is there, and whether it interprets or compiles.

`HAS_TRITON` is False where Triton is not installed; every module of this package still imports, and only the
plain-torch references run. `INTERPRET` is True under `TRITON_INTERPRET=1`: Triton decides this when a kernel
is decorated, that is at import, so it cannot change within a process. Interpreted kernels run on CPU tensors.
"""

from __future__ import annotations

import os
import re
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton
    import triton.language as tl

    HAS_TRITON = True
else:
    try:
        import triton
        import triton.language as tl

        HAS_TRITON = True
    except ImportError:
        triton = None
        tl = None
        HAS_TRITON = False

INTERPRET: bool = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"


def interpreter_fault(triton_version: str, numpy_version: str) -> str:
    """Why Triton's CPU interpreter does not run with this release of NumPy; empty where it does.

    Before 3.7 it turns a loop's bound into a Python number by `int` of an array of one dim, which NumPy has
    refused since 2.4. Compiled kernels know no NumPy.
    """
    if _release(triton_version) >= (3, 7) or _release(numpy_version) < (2, 4):
        return ""
    return (
        f"the CPU interpreter of Triton {triton_version} does not run with NumPy {numpy_version}: "
        "pip install 'numpy<2.4', or take a PyTorch that comes with Triton 3.7 or newer"
    )


def _release(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def _installed_fault() -> str:
    try:
        return interpreter_fault(triton.__version__, metadata.version("numpy")) if HAS_TRITON else ""
    except metadata.PackageNotFoundError:
        return ""


INTERPRETER_FAULT = _installed_fault()
"""Why kernels cannot be interpreted on this machine; empty where they can, and where there is no Triton."""

if INTERPRET and INTERPRETER_FAULT:
    raise RuntimeError(f"TRITON_INTERPRET=1: {INTERPRETER_FAULT}; or unset it")


def jit(function: Any = None, *, unspecialized: tuple[str, ...] = ()) -> Any:
    """`triton.jit` where Triton is installed; otherwise the function itself, which nothing will call.

    unspecialized: arguments whose value must not lead to another compilation (1, or a multiple of 16).
    """
    if function is None:
        return lambda inner: jit(inner, unspecialized=unspecialized)
    return triton.jit(do_not_specialize=list(unspecialized))(function) if HAS_TRITON else function


def constant(value: Any) -> Any:
    """A module-level constant that jit functions may read. (Interpreted functions are Python: any value will
    do.)
    """
    return tl.constexpr(value) if HAS_TRITON and not INTERPRET else value


def _capability() -> tuple[int, int]:
    """Of the current GPU. Without one, kernels are compiled for Hopper."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


_capability.__triton_builtin__ = True  # may be called while a kernel is compiled


def _compile_time(function: Any) -> Any:
    return triton.constexpr_function(function) if HAS_TRITON and not INTERPRET else function


@_compile_time
def converts_fp8() -> Any:
    """Whether the GPU converts fp8 itself: from sm_89 on."""
    return _capability() >= (8, 9)


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b for non-negative a."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least n (n >= 1)."""
    return 1 << max(n - 1, 0).bit_length()


def runs_triton(tensor: Tensor) -> bool:
    """Whether kernels on this tensor go through Triton (on a GPU, or interpreted on CPU) or the reference."""
    if tensor.is_cuda and not HAS_TRITON:
        raise RuntimeError("updates on a CUDA device need Triton: install triton, or train on CPU")
    return tensor.is_cuda or (INTERPRET and tensor.device.type == "cpu")


def kernel_view(tensor: Tensor) -> Tensor:
    """The tensor as kernels take it: fp8 storage is handed over as bytes and decoded by our own code."""
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return tensor.view(torch.uint8)
    return tensor


LAUNCH_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
"""Passed at every launch. Whether `a * b + c` is contracted depends on the code around it, so contraction
would let the fused and the unfused form of one epilogue differ in the last bit. The updates are bound by
memory and do not miss it."""
