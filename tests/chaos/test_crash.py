"""The crash test in short. `make chaos ROUNDS=100` is the long one."""

from __future__ import annotations

import pytest

from tests.chaos.crash import Options, crash, report


@pytest.mark.parametrize("engine", ["rocksdb", "redis"])
def test_nothing_acknowledged_is_lost_when_the_node_is_killed(engine: str) -> None:
    """A few kills under load: nothing lost, QoS 2 exactly once, order kept, sessions and retained values there."""
    outcome = crash(Options(rounds=3, engine=engine, seed=3, quiet=True, standstill=60.0))
    assert outcome.verdict.passed, report(outcome)
    assert outcome.verdict.by_qos["QoS 1"].acknowledged and outcome.verdict.by_qos["QoS 2"].acknowledged
    assert outcome.kills.total() > 3


def test_a_store_that_forgets_does_not_pass() -> None:
    """The same on a store that ends with its process: what was acknowledged is lost, and the test says so."""
    outcome = crash(Options(rounds=2, engine="memory", seed=3, quiet=True, standstill=2.0))
    assert not outcome.verdict.passed
    assert outcome.verdict.count("lost")
    assert outcome.verdict.count("session forgotten")
