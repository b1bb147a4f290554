"""Granted subscriptions get what is acknowledged after them, in short. `make chaos-grants` is the long one."""

from __future__ import annotations

import pytest

from tests.chaos.grants import FAULTS, Options, Outcome, crash, report


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_acknowledged_after_suback_arrives(fault: str) -> None:
    """Also with a member that stands still, and with one that is far away."""
    outcome = crash(Options(tries=240, fault=fault, quiet=True))
    assert outcome.passed, report(outcome)
    assert {"raw", "paho"} == set(outcome.waits)
    assert (fault == "stand") == bool(outcome.stands)


def test_a_run_does_not_pass_that_has_missed_one_or_waited_for_too_long() -> None:
    def outcome(**kw: object) -> Outcome:
        return Outcome(Options(tries=2), **{"tries": 2, "waits": {"raw": [0.01, 0.02]}, **kw})  # type: ignore[arg-type]

    assert outcome().passed and report(outcome()).endswith("PASSED")
    for wrong in ({"tries": 1}, {"missed": ["try 1"]}, {"troubles": ["traceback"]}, {"waits": {"paho": [6.1]}}):
        assert not outcome(**wrong).passed, wrong
        assert report(outcome(**wrong)).endswith("FAILED")
