"""`rmmc` takes the norms that the momentum kernel leaves, through the kernels themselves."""

from __future__ import annotations

from tests.interpreted import needs_interpreter, run_interpreted


@needs_interpreter
def test_the_decision_makes_no_second_pass_over_momenta() -> None:
    assert len(run_interpreted("tests.sync.interpreted").splitlines()) == 2
