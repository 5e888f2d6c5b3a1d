"""Gathers and scatters of the tensor axis in pieces, each beside the part of a matrix product that needs it.

The compiler finds a gather that feeds products, and a product that feeds a scatter, and puts one operator of
torch in the place of both (Wang et al. 2023, "Overlap Communication with Dependent Computation via
Decomposition"). Ranks read each other's memory over NVLink, so they must be of one host.
"""

from __future__ import annotations

import os

from torch.distributed.device_mesh import DeviceMesh

KEY = "parallelism.enable_async_tensor_parallel"


def enable_async_tensor_parallel(mesh: DeviceMesh) -> None:
    """Let the ranks of the 1-D ``mesh`` read each other's memory; before its blocks are compiled with
    ``overlap_products`` (see ``apply_compile``).

    Raises:
        ValueError: no CUDA devices, ranks on several hosts, or a torch without it.
    """
    if mesh.device_type != "cuda":
        raise ValueError(f"{KEY} = true: needs CUDA devices, and this mesh is on {mesh.device_type}")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size()))
    if local % mesh.size():
        raise ValueError(
            f"{KEY} = true: the {mesh.size()} ranks of parallelism.tensor_parallel_degree are not all on one "
            f"host, which has {local}: set it to false, or the degree to a divisor of {local}"
        )
    try:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group
    except ImportError:
        raise ValueError(f"{KEY} = true: this torch has no symmetric memory: set it to false") from None
    enable_symm_mem_for_group(mesh.get_group().group_name)
