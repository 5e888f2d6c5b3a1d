"""The forms of the weight-gradient kernel: which exist, which one is asked for, and where each can run.

    portable  plain Triton, any GPU
    pp2       Gluon, Hopper: two warpgroups in turns (few tokens)
    coop      Gluon, Hopper: eight warps multiply, four update (many tokens)

All agree bit for bit. `select_form` sets what launches choose from; a launch that the chosen form does not
take (a ragged shape, experts in coop) runs in the portable form.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

import torch

from titanforge.kernels._triton import HAS_TRITON, triton
from titanforge.kernels.gluon._gluon import GLUON_ERROR
from titanforge.kernels.machine_cache import cache_path, device_name, read_entries

logger = logging.getLogger(__name__)

PORTABLE, PINGPONG, COOPERATIVE = "portable", "pp2", "coop"
FORMS = (PORTABLE, PINGPONG, COOPERATIVE)
AUTO = "auto"
AUTO_TRITON = ("3.6", "3.8")
"""Releases of Triton with which `auto` takes the Gluon forms: those with which they ran on a GPU, bit for bit
(with 3.6 timed, too). Gluon is Triton's experimental language: with another release a kernel may wait for
ever, so that a user must have checked the forms (`check_forms`) or named one."""
COMPILED_TRITON = ("3.7", "3.9")
"""Releases with which every form was compiled for such a card, and not run on one."""
FEW_TOKENS = 2048
"""Up to this many tokens `auto` takes the ping-pong form. H200, bf16 states: at 1024 the faster one by a
fifth, at 2048 within 1.3 % of the other; from there to 4096 not measured."""

_selected = AUTO
_said: set[str] = set()


def select_form(name: str, device: torch.device) -> None:
    """Choose the form of all later launches by name, or `auto`: by shape and number of tokens.

    Raises ValueError, which names `forge.kernel`, for a form that does not exist or cannot run on the device.
    """
    global _selected
    if name not in (AUTO, *FORMS):
        raise ValueError(f"forge.kernel = {name!r} is not one of {', '.join((AUTO, *FORMS))}")
    if name not in (AUTO, PORTABLE) and (reason := unavailable(device)):
        raise ValueError(f"forge.kernel = {name!r} cannot run here: {reason}; set it to auto or portable")
    _selected = name


def selected_form() -> str:
    """The name that `select_form` was given last; `auto` before."""
    return _selected


@cache
def unavailable(device: torch.device) -> str:
    """Why the Gluon forms cannot run on a device; empty if they can."""
    if device.type != "cuda":
        return f"it needs an NVIDIA Hopper GPU, and the device is {device.type}"
    if GLUON_ERROR:
        return GLUON_ERROR
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        name = torch.cuda.get_device_name(device)
        return f"it needs an NVIDIA Hopper GPU (sm_90), and this is {name} (sm_{major}{minor})"
    return ""


def untried(form: str, device: torch.device) -> str:
    """Why `auto` passes a Gluon form by although it could run; empty where it does not."""
    known = _not_run()
    if not known or form in checked_forms(device):
        return ""
    return (
        f"{known}: `python -m titanforge.kernels.check_forms` checks it on this card, and then auto takes "
        "it; or name it in forge.kernel"
    )


def checked_path() -> Path:
    """File of the forms that `check_forms` found right on this machine, beside the tuned configurations."""
    return cache_path().with_name("forms.json")


def checked_key(device: torch.device) -> str:
    """Key of that file: the card and the release of Triton, all of it."""
    return f"{device_name(device)}/triton {triton.__version__}"


@cache
def checked_forms(device: torch.device) -> tuple[str, ...]:
    """The forms that were checked on such a card with this release of Triton."""
    return tuple(read_entries(checked_path()).get(checked_key(device), ()))


def _not_run() -> str:
    if not HAS_TRITON:
        return ""
    version = ".".join(triton.__version__.split(".")[:2])
    if version in AUTO_TRITON:
        return ""
    known = "it compiles but has not run on a GPU" if version in COMPILED_TRITON else "it was not tried"
    return f"{known} with Triton {version}"


def explain(form: str, error: Exception) -> None:
    """Raise a RuntimeError that names `forge.kernel` in the place of an error of a launch, where the form has
    not run with this Triton; else do nothing. Compiling comes first: the launch has updated nothing.
    """
    if known := _not_run():
        while error.__cause__ is not None:  # those around it only say from where it was called
            error = error.__cause__  # type: ignore[assignment]
        said = (str(error).strip().splitlines() or [""])[-1]
        raise RuntimeError(
            f"forge.kernel = {form!r} cannot run here: {known}, and there it fails "
            f"({type(error).__name__}: {said}); set it to auto or portable"
        ) from error


def say_once(text: str) -> None:
    """A warning in the log, the first time only."""
    if text not in _said:
        _said.add(text)
        logger.warning(text)


def form_for(tokens: int, device: torch.device) -> str:
    """The form for a number of tokens on a device, by `forge.kernel`."""
    if _selected != AUTO:
        return _selected
    if device.type != "cuda" or not HAS_TRITON:
        return PORTABLE
    form = PINGPONG if tokens <= FEW_TOKENS else COOPERATIVE
    if reason := unavailable(device) or untried(form, device):
        say_once(f"fused updates run in the portable form of their kernel: a faster one cannot ({reason})")
        return PORTABLE
    return form
