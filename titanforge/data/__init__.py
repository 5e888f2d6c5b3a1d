"""Text to batches: tokenizers, sources, packing, and loaders that resume anywhere.

Knows nothing of configuration, models, or processes groups: plain arguments in, CPU tensors out.
"""

from __future__ import annotations

from titanforge.data.build import build_train_loader, build_validation_loader
from titanforge.data.errors import DataError, DataExhausted
from titanforge.data.loader import TrainLoader
from titanforge.data.mix import SourceSpec
from titanforge.data.packing import IGNORED, Batch
from titanforge.data.state import merge_states
from titanforge.data.tokenizers import Tokenizer, build_tokenizer
from titanforge.data.validation import ValidationLoader

__all__ = [
    "IGNORED",
    "Batch",
    "DataError",
    "DataExhausted",
    "SourceSpec",
    "Tokenizer",
    "TrainLoader",
    "ValidationLoader",
    "build_tokenizer",
    "build_train_loader",
    "build_validation_loader",
    "merge_states",
]
