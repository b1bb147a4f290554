"""A test that fails with a standing clock is the only one that fails (`tests/support/clocks.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from motorcade.broker import broker
from motorcade.broker.limits import SessionOptions
from motorcade.tasks import Tasks
from tests.support import clocks
from tests.support.held_store import HeldStore
from tests.support.virtual import Clock, Turns, standing
from tests.unit.broker.world import Guest, PluginWorld, often

GUILTY = """
from motorcade.broker import broker
from tests.support.virtual import Clock, standing

kept = []

def test_guilty():
    for _ in range(2):
        kept.append(standing(Clock()))
        kept[-1].__enter__()
    assert False, "its own reason"

def test_next():
    assert not isinstance(broker.time, Clock)

def test_clock_of_its_own():
    with standing(Clock()):
        assert isinstance(broker.time, Clock)
"""


def test_only_the_test_that_left_its_clock_fails(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(GUILTY)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "/dev/null"]
    command += ["--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    told = done.stdout
    assert "1 failed, 2 passed, 1 error" in told, told + done.stderr
    assert "its own reason" in told
    assert "test_it.py::test_guilty left its clock in motorcade.broker" in told


def test_clocks_that_were_left_are_named_and_put_back_with_all_that_was_replaced() -> None:
    real, note = vars(broker)["time"], Tasks.note
    outer, inner = standing(Clock()), standing(Clock())
    outer.__enter__()
    inner.__enter__()
    assert "motorcade.broker.broker.time" in clocks.left()
    clocks.put_back()
    assert [] == clocks.left()
    assert (real, note) == (vars(broker)["time"], Tasks.note)
    inner.__exit__(None, None, None)  # as when a machine is removed from memory later
    outer.__exit__(None, None, None)
    assert [] == clocks.left()


class Failing(PluginWorld[Guest]):
    """A model that fails where a class below says."""

    store: HeldStore

    @rule()
    def start(self) -> None:
        self.store = HeldStore()
        self.set_up(SessionOptions())
        self.go()

    def go(self) -> None:
        """Nothing fails here."""

    def come_to_rest(self) -> None:
        """Nor here."""

    def judge(self) -> None:
        """Nor here."""


class InRule(Failing):
    def go(self) -> None:
        raise AssertionError("planted")


class InTheEnd(Failing):
    def judge(self) -> None:
        raise AssertionError("planted")


class WhenKilled(Failing):
    def go(self) -> None:
        def die() -> None:
            raise AssertionError("planted")

        self.node.loop.die = die  # type: ignore[method-assign,union-attr]


@pytest.mark.parametrize("machine", [InRule, InTheEnd, WhenKilled])
def test_a_model_puts_the_clock_back_wherever_it_fails(machine: type[RuleBasedStateMachine]) -> None:
    with pytest.raises(AssertionError, match="planted"):
        run_state_machine_as_test(machine, settings=settings(often(examples=2, steps=1), database=None))
    assert [] == clocks.left()


def test_a_task_that_awaits_something_to_clean_up_dies_with_its_process() -> None:
    loop = Turns(Clock())
    steps: list[str] = []

    async def work() -> None:
        try:
            await loop.create_future()
        finally:
            try:
                steps.append("first")
                await loop.create_future()
            finally:
                steps.append("second")
                await loop.create_future()
                steps.append("never")

    loop.create_task(work())
    loop.turn()
    loop.die()
    assert ["first", "second"] == steps
    assert not loop.tasks
