from __future__ import annotations

import logging

import pytest

from titanforge.metrics.flops import peak_flops

# Device names as drivers report them.
KNOWN = [
    ("NVIDIA H100 80GB HBM3", 989.4),
    ("NVIDIA H100 PCIe", 756.5),
    ("NVIDIA H100 NVL", 835.5),
    ("NVIDIA H800", 989.4),
    ("NVIDIA H200", 989.4),
    ("NVIDIA H200 NVL", 835.5),
    ("NVIDIA GH200 480GB", 989.4),
    ("NVIDIA GH200 144G HBM3e", 989.4),
    ("NVIDIA B200", 2250),
    ("NVIDIA GB200", 2500),
    ("NVIDIA B300 SXM6 AC", 2250),
    ("NVIDIA GB300", 2500),
    ("NVIDIA A100-SXM4-80GB", 311.9),
    ("NVIDIA A100 80GB PCIe", 311.9),
    ("NVIDIA A100-PCIE-40GB", 311.9),
    ("NVIDIA A800-SXM4-80GB", 311.9),
    ("NVIDIA L40S", 362.1),
    ("NVIDIA L40", 181.1),
    ("NVIDIA L4", 121),
    ("NVIDIA A10G", 70),
    ("NVIDIA GeForce RTX 4090", 165.2),
    ("NVIDIA GeForce RTX 5090", 209.5),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9),
    ("NVIDIA RTX 6000 Ada Generation", 364.2),
    ("AMD Instinct MI300X", 1307.4),
    ("AMD Instinct MI325X", 1307.4),
    ("AMD Instinct MI355X", 2516.6),
    ("AMD Instinct MI250X", 191.5),
]


@pytest.mark.parametrize(("name", "tflops"), KNOWN, ids=[name for name, _ in KNOWN])
def test_known_devices(name: str, tflops: float) -> None:
    peak = peak_flops(name)
    assert peak is not None
    assert peak / 1e12 == pytest.approx(tflops)


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "Tesla V100-SXM2-32GB",  # no bf16
        "NVIDIA GeForce RTX 4090 Laptop GPU",  # another chip
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA H200 MIG 1g.18gb",  # a slice of the card
        "NVIDIA A1000",
        "NVIDIA XB2000",
    ],
)
def test_unknown_devices_are_not_guessed(name: str) -> None:
    assert peak_flops(name) is None


def test_unknown_device_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert peak_flops("Imaginary 9000") is None
    assert [r.message for r in caplog.records].count(
        "no peak FLOP/s known for device 'Imaginary 9000': mfu will be null"
    ) == 1
