"""Copying a state to host memory, so that training may go on while it is written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from titanforge.checkpoint.safetensors_format import local_tensor


class HostStager(AsyncStager):
    """Copies this rank's part of every tensor into host buffers that are used again by the next save.

    torch's own stager cannot be used twice in 2.11 (staging clears its dispatch table), and one per save
    would page-lock the memory anew each time.

    Args:
        pin: page-lock the buffers: faster copies from a GPU, for as much host memory held for good.
    """

    _synchronize_after_execute = False  # ``stage`` has already waited

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._buffers: dict[str, Tensor] = {}

    def stage(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Host copies of the flat ``state_dict``, complete on return; DTensors stay DTensors.

        The copies live until the next call, which must not come before they are written.
        """
        staged: dict[str, Tensor] = {}
        devices = set()
        for name, tensor in state_dict.items():
            local = local_tensor(tensor)
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=self._pin)
                self._buffers[name] = buffer
            buffer.copy_(local, non_blocking=True)
            devices.add(local.device)
            # The constructor, because from_local would move the copy back to the mesh's device.
            staged[name] = (
                DTensor(buffer, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else buffer
            )
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return staged

    def close(self) -> None:
        """torch 2.11 calls this after every save: the buffers stay; see ``release``."""

    def release(self) -> None:
        """Free the buffers; no save may be running."""
        self._buffers.clear()
