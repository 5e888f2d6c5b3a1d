"""Peak dense bf16 rate of a device, by the name that its driver reports: the denominator of MFU."""

from __future__ import annotations

import logging
import re

logger = logging.getLogger(__name__)

# (pattern searched in the device name, FLOP/s): bf16 tensor cores, fp32 accumulation, *without* sparsity
# (data sheets print the sparse number, twice these, in large type). The first match wins, so a card's
# slower form (PCIe, NVL, Max-Q) stands before the plain name. `\b` tells B200 from GB200, L40 from L40S.
# Sources: NVIDIA's data sheets of each product, the Ada (v2.1) and Blackwell RTX white papers, appendix A;
# AMD Instinct data sheets (MI250X is reported as two devices, each with half of the card's rate).
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"\bGB300\b", 2500e12),
    (r"\bB300\b", 2250e12),
    (r"\bGB200\b", 2500e12),
    (r"\bB200\b", 2250e12),
    (r"\bB100\b", 1750e12),
    (r"\bGH200\b", 989.4e12),
    (r"\bH200\b.*\bNVL\b", 835.5e12),
    (r"\bH200\b", 989.4e12),
    (r"\bH100\b.*\bNVL\b", 835.5e12),
    (r"\b(H100|H800)\b.*\bPCIe\b", 756.5e12),
    # "NVIDIA H100 80GB HBM3" is how the SXM form reports itself; a bare or custom H100 stays unknown.
    (r"\b(H100|H800)\b.*(\bHBM3|SXM)", 989.4e12),
    (r"\bH800\b", 989.4e12),
    (r"\bH20\b", 148e12),
    (r"\b(A100|A800)\b", 311.9e12),
    (r"\bA40\b", 149.7e12),
    (r"\bA30\b", 165e12),
    (r"\bA10G\b", 70e12),
    (r"\bA10\b", 125e12),
    (r"\bL40S\b", 362.1e12),
    (r"\bL40\b", 181.1e12),
    (r"\bL20\b", 119.5e12),
    (r"\bL4\b", 121e12),
    (r"\bRTX PRO 6000\b.*\bMax-Q\b", 438.9e12),
    (r"\bRTX PRO 6000\b", 503.8e12),
    (r"\bRTX 6000 Ada\b", 364.2e12),
    (r"\bRTX A6000\b", 154.8e12),
    # GeForce cards halve the tensor rate when accumulating in fp32, which training does.
    (r"\bRTX 5090 D\b", 209.5e12),
    (r"\bRTX 5090\b(?!.*Laptop)", 209.5e12),
    (r"\bRTX 5080\b(?!.*Laptop)", 112.6e12),
    (r"\bRTX 4090\b(?!.*(Laptop|\bD\b))", 165.2e12),
    (r"\bRTX 4080\b(?!.*(Laptop|SUPER))", 97.5e12),
    (r"\bRTX 3090 Ti\b", 80e12),
    (r"\bRTX 3090\b", 71.2e12),
    (r"\bMI355X\b", 2516.6e12),
    (r"\bMI350X\b", 2306.9e12),
    (r"\bMI325X\b", 1307.4e12),
    (r"\bMI300X\b", 1307.4e12),
    (r"\bMI300A\b", 980.6e12),
    (r"\bMI250X\b", 191.5e12),
    (r"\bMI250\b", 181.1e12),
    (r"\bMI210\b", 181e12),
)

_told: set[str] = set()


def peak_flops(device_name: str) -> float | None:
    """Peak dense bf16 FLOP/s of one device, or None where it is not known (then MFU is null).

    Args:
        device_name: as ``torch.cuda.get_device_name()`` gives it; ``"cpu"`` for a CPU.

    An unknown name is told once in the log: a guess would make every MFU of the run wrong.
    """
    # A MIG slice carries the whole card's name but owns a part of its cores.
    if not re.search(r"\bMIG\b", device_name):
        for pattern, flops in _PEAKS:
            if re.search(pattern, device_name, re.IGNORECASE):
                return flops
    if device_name not in _told:
        _told.add(device_name)
        logger.warning("no peak FLOP/s known for device %r: mfu will be null", device_name)
    return None
