"""Check the Hopper forms of the fused kernel on this machine's card, and let `auto` take the right ones.

    python -m titanforge.kernels.check_forms

For releases of Triton with which the forms have not run on a GPU. Every check is a process of its own with a
time limit, since what such a form may do wrong is to wait for ever. It compares weights and states, bit for
bit, with the portable form's, then with its own results fifty times. A form that passes all its checks is
noted in `forms.json` beside the tuned tiles, for this card and this release of Triton.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from titanforge.kernels._triton import triton
from titanforge.kernels.autotune import scratch_target
from titanforge.kernels.codecs import Encoded
from titanforge.kernels.config import TileConfig, choose_config
from titanforge.kernels.epilogues import get_epilogue
from titanforge.kernels.forms import (
    COOPERATIVE,
    PINGPONG,
    PORTABLE,
    checked_key,
    checked_path,
    unavailable,
)
from titanforge.kernels.machine_cache import add_entry
from titanforge.kernels.wgrad import fused_wgrad_update

STORED = {
    "bf16": ("bf16", "bf16", "bf16"),
    "fp32": ("bf16", "fp32", "fp32"),
    "int8": ("bf16", "int8", "uint8_root"),
    "int8_sr": ("bf16_sr", "int8_sr", "uint8_root_sr"),
    "fp8": ("bf16", "fp8_e4m3", "fp8_root"),
}
"""Codecs of AdamW's weight, first and second state, by the name of a check."""
SHAPES = ((256, 512, 200), (2048, 4096, 512))  # rows and columns of the weight, tokens
REPEATS = 50
SECONDS = 240.0
FORMS = (PINGPONG, COOPERATIVE)


def checks(form: str) -> list[str]:
    """Names of a form's checks."""
    return [*STORED, *(["experts"] if form == PINGPONG else [])]


def run_check(form: str, name: str, device: torch.device) -> str:
    """What is wrong with a form, in words; empty if nothing. May wait for ever."""
    rule, names = get_epilogue("adamw"), STORED.get(name, STORED["bf16"])
    for n, k, tokens in SHAPES:
        shape, offsets = (n, k), None
        if name == "experts":  # with no token, one, and the others'
            shape = (4, n, k)
            offsets = torch.tensor([0, 0, 1, tokens // 2, tokens], dtype=torch.int32, device=device)
        weight, states, master = scratch_target(rule, names, shape, device, master=name == "fp32")
        dy = torch.randn(tokens, n, device=device).bfloat16()
        x = torch.randn(tokens, k, device=device).bfloat16()
        start = [part for part in (weight, *states) if part is not None]
        config, portable = (
            choose_config(n, k, tokens, dy.dtype, "-".join(names), device, form=one)
            for one in (form, PORTABLE)
        )
        expected = _updated(start, master, dy, x, offsets, portable)
        for launch in range(1 + REPEATS):
            found = _updated(start, master, dy, x, offsets, config)
            wrong = sum(int((_bits(a) != _bits(b)).sum()) for a, b in zip(found, expected))
            if wrong:
                return f"{wrong} bytes of {n} x {k} differ from the portable form's in launch {launch + 1}"
    return ""


def _updated(
    start: list[Encoded],
    master: Tensor | None,
    dy: Tensor,
    x: Tensor,
    offsets: Tensor | None,
    config: TileConfig,
) -> list[Tensor]:
    """What a step of AdamW makes of copies of weight and states."""
    rule = get_epilogue("adamw")
    hyper = torch.full((rule.hyper_length,), 0.01, device=dy.device)
    hyper[0] = 1.0  # apply
    rng = torch.tensor([3, 4], device=dy.device)
    own = [Encoded(part.values.clone(), part.codec, _copy(part.meta)) for part in start]
    own_master = _copy(master)
    fused_wgrad_update(
        dy, x, own[0], own[1:], rule, hyper, master=own_master, offsets=offsets, rng=rng, config=config
    )
    tensors = [*[part.values for part in own], *[part.meta for part in own], own_master]
    return [tensor for tensor in tensors if tensor is not None]


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def check_in_process(form: str, name: str, seconds: float = SECONDS) -> str:
    """`run_check` in a process of its own, which is killed after `seconds`."""
    command = [sys.executable, "-m", "titanforge.kernels.check_forms", "--form", form, "--check", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"did not end within {seconds:.0f} s"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]


def check_all(device: torch.device, check: Callable[[str, str], str] = check_in_process) -> bool:
    """Check all forms, print what was found, and note those that are right. Whether all are."""
    right = []
    for form in FORMS:
        found = {}
        for name in checks(form):
            found[name] = check(form, name)
            print(f"{form:6s}{name:10s}{found[name] or 'same bits'}", flush=True)
        if not any(found.values()):
            right.append(form)
    add_entry(checked_path(), checked_key(device), right)
    print(f"auto takes {' and '.join(right) or 'none'} with {checked_key(device)}: {checked_path()}")
    return len(right) == len(FORMS)


def main(argv: list[str] | None = None) -> int:
    """0 if every form is right, 1 if one is not or none can run here."""
    parser = argparse.ArgumentParser(description="Check the Hopper forms of the fused kernel on this card.")
    parser.add_argument("--form", choices=FORMS, help="with --check: one check, in this process")
    parser.add_argument("--check", choices=[*STORED, "experts"], help="which one")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if reason := unavailable(device):
        print(f"nothing to check: {reason}", file=sys.stderr)
        return 1
    if arguments.form and arguments.check:
        if wrong := run_check(arguments.form, arguments.check, device):
            print(wrong, file=sys.stderr)
        return 1 if wrong else 0
    print(f"{torch.cuda.get_device_name(device)}, Triton {triton.__version__}")
    return 0 if check_all(device) else 1


if __name__ == "__main__":
    sys.exit(main())
