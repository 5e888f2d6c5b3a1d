"""The FORGE paper's appendix I as facts: what it reports of each optimizer family, to stand beside ours.

Llama-3.1-8B, batch 1, sequence 512, RTX PRO 6000 (96 GB, PCIe), 10,000 steps; peak memory in GB as printed,
mean milliseconds of a step; the baseline is the family's reference implementation. The text says that both
arms hold fp32 states; the peaks fit states of two bytes (FORGE-AdamW, 48.8: 2 + 2 + 2 bytes for each of
8.03e9 weights are 44.9 GiB; with fp32 states they would be 74.8). Another card, so the times are not to be
compared with ours across columns, only the ratios.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "FORGE paper, appendix I (RTX PRO 6000)"


@dataclass(frozen=True)
class PaperRow:
    """Peak GB and ms of a step, of the baseline and of FORGE; None: not reported."""

    base_gb: float | None = None
    forge_gb: float | None = None
    base_ms: float | None = None
    forge_ms: float | None = None
    note: str = ""


APPENDIX_I: dict[str, PaperRow] = {
    "sgd": PaperRow(45.1, 20.9, 217.3, 148.2),
    "momentum": PaperRow(60.0, 34.9, 290.4, 166.1),
    "adagrad": PaperRow(75.0, 34.9, 361.6, 167.0),
    "rmsprop": PaperRow(75.0, 34.9, 361.2, 164.6),
    "adam": PaperRow(note="not in the table"),
    "adamw": PaperRow(75.0, 48.8, 379.0, 236.0),
    "adamax": PaperRow(note="not in the table"),
    "nadam": PaperRow(None, 48.8, None, 177.0),
    "radam": PaperRow(75.0, 48.8, 443.7, 181.6),
    "lion": PaperRow(48.0, 34.9, 380.6, 186.8),
    "lamb": PaperRow(None, 48.8, None, 218.6, "its deferred path"),
    "muon": PaperRow(note="other models and card (I.1): Qwen3-8B 48.69 to 37.92, 1454.6 to 1440.7 ms"),
    "scion": PaperRow(note="classified only"),
    "adam_mini": PaperRow(65.9, 34.9, 663.1, 266.2),
    "adafactor": PaperRow(41.9, 22.2, 951.4, 280.9),
    "adalomo": PaperRow(39.9, 20.9, 615.7, 189.3),
    "sm3": PaperRow(39.9, 20.9, 583.8, 168.4),
    "lars": PaperRow(note="classified only"),
    "adamw-int8": PaperRow(None, 35.8, None, 182.6),
    "lion-int8": PaperRow(None, 28.3, None, 167.0),
}
