"""The command that checks the Hopper forms on a card: what it notes, and what `auto` makes of that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from titanforge.kernels import check_forms, forms
from titanforge.kernels.check_forms import check_all, check_in_process, checks, main, run_check
from titanforge.kernels.forms import COOPERATIVE, PINGPONG, PORTABLE

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TITANFORGE_CACHE_DIR", str(tmp_path))
    forms.checked_forms.cache_clear()
    yield
    forms.checked_forms.cache_clear()


def on_a_card_with(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    """As if on a Hopper card with a release of Triton, where only the choice is made."""
    monkeypatch.setattr(forms, "unavailable", lambda device: "")
    monkeypatch.setattr(forms, "device_name", lambda device: "card")
    monkeypatch.setattr(forms, "triton", SimpleNamespace(__version__=release))
    monkeypatch.setattr(forms, "HAS_TRITON", True)
    forms.checked_forms.cache_clear()


def test_auto_takes_the_forms_that_passed_with_that_release_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_card_with(monkeypatch, "3.9.0")
    assert "titanforge.kernels.check_forms` checks it on this card" in forms.untried(PINGPONG, CUDA)
    assert forms.form_for(512, CUDA) == PORTABLE
    wrong = {(COOPERATIVE, "int8"): "did not end within 240 s"}
    assert not check_all(CUDA, lambda form, name: wrong.get((form, name), ""))
    said = capsys.readouterr().out
    assert "coop  int8      did not end within 240 s" in said
    assert "auto takes pp2 with card/triton 3.9.0" in said
    assert json.loads(forms.checked_path().read_text()) == {"card/triton 3.9.0": [PINGPONG]}
    on_a_card_with(monkeypatch, "3.9.0")
    assert forms.form_for(512, CUDA) == PINGPONG
    assert forms.form_for(4096, CUDA) == PORTABLE
    on_a_card_with(monkeypatch, "3.9.1")
    assert forms.form_for(512, CUDA) == PORTABLE
    assert check_all(CUDA, lambda form, name: "")
    on_a_card_with(monkeypatch, "3.9.1")
    assert forms.form_for(4096, CUDA) == COOPERATIVE


@pytest.mark.parametrize("name", checks(PINGPONG))
def test_a_check_compares_every_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_forms, "SHAPES", ((64, 128, 8),))
    monkeypatch.setattr(check_forms, "REPEATS", 1)
    assert run_check(PINGPONG, name, CPU) == ""  # one and the same form here
    right = check_forms._updated
    calls = iter(range(9))

    def last_byte_off(*arguments: object) -> list[torch.Tensor]:
        found = right(*arguments)  # type: ignore[arg-type]
        if next(calls) == 2:
            found[-1].view(torch.uint8).flatten()[-1] ^= 1
        return found

    monkeypatch.setattr(check_forms, "_updated", last_byte_off)
    assert run_check(PINGPONG, name, CPU) == "1 bytes of 64 x 128 differ from the portable form's in launch 2"


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_a_check_that_cannot_run_or_does_not_end_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "nothing to check: it needs an NVIDIA Hopper GPU" in capsys.readouterr().err
    assert not forms.checked_path().exists()
    assert "NVIDIA Hopper GPU" in check_in_process(PINGPONG, "bf16")
    assert check_in_process(PINGPONG, "bf16", seconds=0.2) == "did not end within 0 s"
