"""Background tasks: run again when they fail, counted, named, and known while they stand still."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, cast
from unittest.mock import patch

import pytest
from structlog.testing import capture_logs

from motorcade import tasks
from motorcade.tasks import FIRST_PAUSE, LONGEST_PAUSE, MAX_TOLD, MAX_TRACEBACK, STEADY, Tasks
from tests.support.virtual import Clock, Turns


class World:
    """A loop with a clock of its own."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.loop = Turns(self.clock)
        self.tasks = Tasks()

    def start(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
        return self.tasks.start(work, name, loop=cast("asyncio.AbstractEventLoop", self.loop))

    def pass_time(self, seconds: float) -> None:
        end = self.clock.now + seconds
        self.loop.turn()
        while self.loop.later and self.loop.later[0][0] <= end:
            self.clock.now = max(self.clock.now, self.loop.later[0][0])
            self.loop.turn()
        self.clock.now = end
        self.loop.turn()

    def standing(self) -> list[str]:
        found: list[str] = []
        self.loop.call_soon(lambda: found.extend(self.tasks.troubles()))
        self.loop.turn()
        return found


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.loop.die()


def test_a_task_that_fails_is_run_again_with_back_off_until_it_ends_well(world: World) -> None:
    attempts: list[float] = []
    start = world.clock.now

    async def work() -> None:
        attempts.append(world.clock.now - start)
        if len(attempts) < 4:
            raise RuntimeError("broken")

    task = world.start(work, "queues.fetch.orders")
    with capture_logs() as logs:
        world.pass_time(0)
        assert ["task queues.fetch.orders has failed and is tried again: RuntimeError: broken"] == world.standing()
        world.pass_time(60)
    assert [0, FIRST_PAUSE, 3 * FIRST_PAUSE, 7 * FIRST_PAUSE] == attempts
    assert task.done() and not world.standing()
    assert {"queues.fetch": 3} == world.tasks.failures, "labels have no names of queues in them"
    first = logs[0]
    assert ("task_failed", "queues.fetch.orders", FIRST_PAUSE) == (first["event"], first["task"], first["again_in"])
    assert "RuntimeError: broken" in first["traceback"] and "in work" in first["traceback"]


def test_a_loop_stands_still_until_it_has_run_for_a_while(world: World) -> None:
    fails = True

    async def loop() -> None:
        while True:
            await asyncio.sleep(1)
            if fails:
                raise OSError("gone")

    task = world.start(loop, "fanout.sweep")
    assert not world.standing()
    world.pass_time(1.5)
    assert world.standing()
    fails = False
    world.pass_time(2)
    assert world.standing(), "it runs, but not for long"
    world.pass_time(STEADY)
    assert not world.standing()
    fails = True
    world.pass_time(1)
    assert world.standing() == ["task fanout.sweep has failed and is tried again: OSError: gone"], "counted from one"
    task.cancel()
    world.pass_time(0)
    assert not world.standing()


def test_attempts_are_never_further_apart_than_the_longest_pause(world: World) -> None:
    attempts: list[float] = []

    async def work() -> None:
        attempts.append(world.clock.now)
        raise RuntimeError

    world.start(work, "a.b")
    world.pass_time(600)
    pauses = [after - before for before, after in itertools.pairwise(attempts)]
    assert pauses[-1] == LONGEST_PAUSE == max(pauses)


def test_many_failures_at_once_are_few_lines(world: World) -> None:
    async def work() -> None:
        raise RuntimeError("x" * 10_000)

    with capture_logs() as logs:
        for number in range(500):
            world.start(work, f"sessions.fetch.{number}")
        world.pass_time(0)
        assert 1 == len(logs)
        world.pass_time(FIRST_PAUSE)
    assert 2 == len(logs) and 499 == logs[1]["unlogged"]
    assert len(logs[0]["traceback"]) <= MAX_TRACEBACK and len(logs[0]["error"]) < 400
    told = world.standing()
    assert MAX_TOLD + 1 == len(told) and told[-1] == "and 490 tasks more"
    assert 1000 == world.tasks.failures["sessions.fetch"]


def test_who_starts_a_task_hears_of_its_failures(world: World) -> None:
    heard: list[int] = []

    async def work() -> None:
        if not heard:
            raise ValueError

    loop = cast("asyncio.AbstractEventLoop", world.loop)
    world.tasks.start(work, "a.b", failed=lambda: heard.append(1), loop=loop)
    with patch.object(tasks, "log"):
        world.pass_time(5)
    assert [1] == heard
