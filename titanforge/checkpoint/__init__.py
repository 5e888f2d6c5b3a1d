"""Checkpoints: when they are written and which one is read (``manager``), how a state is read (``loading``)
or its weights alone are written (``export``), and their bytes (``*_format``).

Imports torch and safetensors alone. See docs/checkpoints.md.
"""

from titanforge.checkpoint.layout import CheckpointError
from titanforge.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointError", "CheckpointManager"]
