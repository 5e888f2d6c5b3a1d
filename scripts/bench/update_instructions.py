"""Instructions that the fused update spends on a weight, by class, in the code for Hopper; needs no GPU.

    python scripts/bench/update_instructions.py [NAME_PATTERN]

Counts the innermost loop that holds the update (pp2: 32 weights a thread and slice, coop: 64 a thread and
chunk), and for the portable form what follows its last product. They are counted as they stand: of a branch
all sides, so that pp2's three-way choice of the next slice counts two products a weight too many, and fp8
what rewrites an unapplied tile. Names are those of `compile_kernels.py`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import triton
from compile_kernels import compile_one, jobs
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler.errors import CompilationError

CLASSES = {
    "fp32": "FADD FMUL FFMA",
    "integer": "LOP3 SHF IADD3 PRMT FMNMX FSETP ISETP SEL FSEL VIMNMX VIMNMX3 LEA VIADD VIADDMNMX SGXT PLOP3",
    "imad": "IMAD IDP",
    "special": "MUFU",
    "convert": "F2FP HADD2 I2F F2I F2F I2FP",
    "move": "MOV",
    "shared": "LDS STS LDSM STSM SHFL",
    "global": "LDG STG LDC ULDC ATOMG",
    "spill": "LDL STL",
}
CLASS_OF = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes.split()}
WEIGHTS = {"pp2": 32, "coop": 64}
DEFAULT = r"^(pp2|coop)/adamw/(bf16|int8|fp8_states)$|^wgrad/few_tokens/adamw/(bf16|int8)$"


def disassemble(ptx: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Instructions in order, and the loops among them as (first, last)."""
    assembler = Path(get_ptxas(90).path)  # a release of Triton has several, of several releases of PTX
    arch = "sm_90a" if "sm_90a" in ptx else "sm_90"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        options = [f"-arch={arch}", "--fmad=false", str(source), "-o", str(binary)]
        subprocess.run([str(assembler), *options], check=True)
        text = subprocess.run(
            [str(assembler.parent / "nvdisasm"), "-c", str(binary)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label.group(1)] = len(found)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            found.append(instruction.group(1))
    loops = []
    for index, instruction in enumerate(found):
        target = re.search(r"BRA.*`\((\.L_\w+)\)", instruction)
        if target and labels.get(target.group(1), index + 1) <= index:
            loops.append((labels[target.group(1)], index))
    return found, loops


def update_of(form: str, found: list[str], loops: list[tuple[int, int]]) -> tuple[int, int]:
    """Where the update stands: the first innermost loop of some size that takes roots and reciprocals, more
    than the few by which another loop divides to find its next tile.
    """
    if form not in WEIGHTS:
        last_product = max(index for index, text in enumerate(found) if "GMMA" in text or "DEPBAR" in text)
        return last_product, len(found)
    taken = {loop: sum("MUFU" in text for text in found[loop[0] : loop[1]]) for loop in loops}
    large = [loop for loop in loops if loop[1] - loop[0] > 250 and taken[loop]]
    inner = [a for a in large if not any(b != a and b[0] >= a[0] and b[1] <= a[1] for b in large)]
    most = max(taken[loop] for loop in inner)
    first, last = next(loop for loop in inner if 2 * taken[loop] >= most)
    return first, last + 1


def count(instructions: list[str], weights: int) -> dict[str, float]:
    """Instructions a weight: all, then by class."""
    kinds: Counter[str] = Counter()
    for text in instructions:
        opcode = re.sub(r"^@!?U?P\w+ ", "", text).split()[0].split(".")[0]
        if opcode != "NOP":
            kinds[CLASS_OF.get(opcode, "other")] += 1
    return {"all": sum(kinds.values()) / weights, **{k: n / weights for k, n in kinds.most_common()}}


def main() -> int:
    """Print a line for each kernel; 1 where one does not compile with this release of Triton."""
    parser = argparse.ArgumentParser(description="Instructions of the fused update per weight.")
    parser.add_argument("only", nargs="?", default=DEFAULT, help="regular expression of kernel names")
    arguments = parser.parse_args()
    failed = 0
    for name, function, source in jobs(False):
        if not re.search(arguments.only, name):
            continue
        try:
            report: dict[str, Any] = compile_one(function, *source)
        except CompilationError as error:
            print(
                f"{name:36s} does not compile with Triton {triton.__version__}: {_cause(error)}", flush=True
            )
            failed = 1
            continue
        found, loops = disassemble(report["ptx"])
        form, constants = name.split("/")[0], source[1]
        if form not in WEIGHTS and "BLOCK_N" not in constants:
            continue
        first, last = update_of(form, found, loops)
        threads = 32 * source[2]["num_warps"]
        weights = WEIGHTS.get(form) or constants["BLOCK_N"] * constants["BLOCK_K"] // threads
        counted = count(found[first:last], weights)
        text = "  ".join(f"{kind} {value:.1f}" for kind, value in counted.items())
        size = (last - first) * 16 / 1024
        print(f"{name:36s} {size:5.1f} KB of {len(found) / 64:5.1f}  {text}", flush=True)
    return failed


def _cause(error: BaseException) -> str:
    """The innermost error's last line: those around it only say from where it was called."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
