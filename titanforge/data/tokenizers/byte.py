"""Bytes as tokens: no file, no loss, and nats per token are nats per byte."""

from __future__ import annotations

import numpy as np

from titanforge.data.tokenizers.base import well_formed


class ByteTokenizer:
    """UTF-8 bytes 0–255, then bos 256 and eos 257."""

    name = "byte"
    vocab_size = 258
    bos_id = 256
    eos_id = 257

    def encode(self, text: str) -> list[int]:
        return list(well_formed(text).encode("utf-8"))

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(well_formed(text).encode("utf-8"), dtype=np.uint8).astype(np.int32)

    def decode(self, ids: list[int]) -> str:
        special = {self.bos_id: b"<|bos|>", self.eos_id: b"<|eos|>"}
        parts = (bytes([i]) if 0 <= i < 256 else special.get(i, "\ufffd".encode()) for i in ids)
        return b"".join(parts).decode("utf-8", errors="replace")
