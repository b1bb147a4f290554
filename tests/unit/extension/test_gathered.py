"""Things that change often and are written seldom."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from motorcade import tasks
from motorcade.extension.gathered import BATCH, Gathered
from motorcade.tasks import Tasks, Work


class Paper:
    """Takes what is written; refuses, or waits, when it is told to."""

    def __init__(self) -> None:
        self.written: list[list[str]] = []
        self.refuse = False
        self.open = asyncio.Event()
        self.open.set()
        self.begun = asyncio.Event()
        self.done: list[list[str]] = []

    async def write(self, some: list[str]) -> bool:
        self.begun.set()
        await self.open.wait()
        if self.refuse:
            return False
        self.written.append(some)
        return True


def spawn(work: Work | Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    return asyncio.create_task(work() if callable(work) else work, name=name)


@pytest.fixture
def paper() -> Paper:
    return Paper()


def gathered(paper: Paper, interval: float = 3600.0) -> Gathered[str]:
    return Gathered(paper.write, lambda: interval, 0.001, spawn, "test", paper.done.append)


async def until_empty(things: Gathered[str]) -> None:
    async with asyncio.timeout(60):
        while [*things]:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)


async def test_what_has_changed_is_written_together_when_the_interval_is_over(paper: Paper) -> None:
    things = gathered(paper, 0.01)
    for name in ("a", "b", "a"):
        things.change(name)
    assert things.is_timed and "a" in things and [] == paper.written
    await until_empty(things)
    assert [["a", "b"]] == paper.written == paper.done
    assert not things.is_timed


async def test_what_is_urgent_does_not_wait_for_the_interval(paper: Paper) -> None:
    things = gathered(paper)
    things.change("a")
    things.change("b")
    assert things.waits("a")
    things.hurry("a")
    assert not things.waits("a")
    async with asyncio.timeout(60):
        while "a" in things:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
    assert [["a"]] == paper.written
    assert ["b"] == [*things]
    assert 0 == await things.settle()
    assert [["a"], ["b"]] == paper.written


async def test_what_changes_while_it_is_written_is_written_once_more(paper: Paper) -> None:
    """One batch at a time (rules 1 and 2)."""
    things = gathered(paper)
    paper.open.clear()
    things.hurry("a")
    await paper.begun.wait()
    things.hurry("a")
    things.hurry("b")
    assert [] == paper.written
    paper.open.set()
    await until_empty(things)
    assert [["a"], ["a", "b"]] == paper.written


async def test_what_could_not_be_written_comes_before_what_came_later(paper: Paper) -> None:
    things = gathered(paper)
    paper.refuse = True
    paper.open.clear()
    for name in ("a", "b"):
        things.hurry(name)
    await paper.begun.wait()
    things.hurry("c")
    things.drop("b")  # rule 3
    paper.open.set()
    while "a" not in things._urgent:  # noqa: ASYNC110 - nobody else tells
        await asyncio.sleep(0)
    assert [] == paper.written == paper.done
    paper.refuse = False
    await until_empty(things)
    assert [["a", "c"]] == paper.written


async def test_what_is_dropped_is_not_written(paper: Paper) -> None:
    things = gathered(paper)
    things.change("a")
    things.change("b")
    things.drop("a")
    assert 0 == await things.settle()
    assert [["b"]] == paper.written


async def test_batches_are_bounded(paper: Paper) -> None:
    things = gathered(paper)
    for number in range(BATCH + 1):
        things.change(str(number))
    assert 0 == await things.settle()
    assert [BATCH, 1] == [len(some) for some in paper.written]


async def test_the_end_tells_what_is_left(paper: Paper) -> None:
    things = gathered(paper)
    paper.refuse = True
    things.change("a")
    things.change("b")
    assert 2 == await things.settle()


async def test_what_a_failing_write_had_in_hand_is_written_by_the_next_attempt(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect of ours: the supervisor runs the task again."""
    monkeypatch.setattr(tasks, "FIRST_PAUSE", 0.001)
    supervisor, broken = Tasks(), [True]

    async def write(some: list[str]) -> bool:
        if broken.pop() if broken else False:
            raise ZeroDivisionError
        return await paper.write(some)

    def spawn(work: Work | Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        assert callable(work)
        return supervisor.start(work, name)

    things = Gathered(write, lambda: 3600.0, 0.001, spawn, "test.progress", paper.done.append)
    things.hurry("a")
    await until_empty(things)
    assert [["a"]] == paper.written == paper.done
    assert {"test.progress": 1} == supervisor.failures
