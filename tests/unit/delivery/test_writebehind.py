"""Records that change often and are written later."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from motorcade.delivery.writebehind import BATCH, WriteBehind
from motorcade.storage.ports import Batch, Put, StoreError
from tests.support.held_store import HeldStore


def put_all(batch: Batch, some: Collection[str]) -> None:
    for text in some:
        batch.put("texts", text, b"v")


class Rig:
    """Texts that are written to a store that does things when it is told to."""

    def __init__(self, interval: float = 3600.0) -> None:
        self.store = HeldStore()
        self.batches: list[list[str]] = []  #: as they were made
        self.done: list[tuple[list[str], bool]] = []  #: and whether they were stored
        write = self.store.write

        def noted(batch: Batch) -> Any:
            self.batches.append([step.key for step in batch.steps if isinstance(step, Put)])
            return write(batch)

        self.store.write = noted  # type: ignore[method-assign]
        self.texts: WriteBehind[str] = WriteBehind(
            self.store,
            put_all,
            lambda: interval,
            0.001,
            lambda some, error: self.done.append((list(some), error is None)),
        )

    async def until_empty(self) -> None:
        async with asyncio.timeout(60):
            while [*self.texts]:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0)


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_what_has_changed_is_written_together_when_the_interval_is_over() -> None:
    rig = Rig(0.01)
    for name in ("a", "b", "a"):
        rig.texts.change(name)
    assert rig.texts.is_timed and "a" in rig.texts and [] == rig.batches
    await rig.until_empty()
    assert ([["a", "b"]], [(["a", "b"], True)]) == (rig.batches, rig.done)
    assert not rig.texts.is_timed


async def test_what_is_urgent_does_not_wait_for_the_interval(rig: Rig) -> None:
    for name in "abc":
        rig.texts.change(name)
    flushed = rig.texts.flush("a")
    rig.texts.hurry_changed("c")
    rig.texts.hurry_changed("d")  # has not changed
    await flushed
    assert ([["a", "c"]], ["b"]) == (rig.batches, [*rig.texts])
    assert rig.texts.flush("a").done, "it is written"
    assert 0 == await rig.texts.settle()
    assert [["a", "c"], ["b"]] == rig.batches


async def test_what_changes_while_it_is_in_flight_is_written_again(rig: Rig) -> None:
    """One batch at a time (rules 1 and 2)."""
    rig.store.held = True
    rig.texts.hurry("a")
    await asyncio.sleep(0)
    rig.texts.hurry("a")
    rig.texts.hurry("b")
    await asyncio.sleep(0)
    assert [["a"]] == rig.batches
    rig.store.held = False
    rig.store.let_go()
    await rig.until_empty()
    assert [["a"], ["a", "b"]] == rig.batches


async def test_what_could_not_be_written_comes_before_what_came_later(rig: Rig) -> None:
    rig.store.held = True
    for name in ("a", "b"):
        rig.texts.hurry(name)
    failed = rig.texts.flush("a")
    await asyncio.sleep(0)
    rig.texts.hurry("c")
    rig.texts.drop("b")  # rule 3
    rig.store.held = False
    rig.store.fail(StoreError("away"))
    with pytest.raises(StoreError):
        await failed
    await rig.until_empty()
    assert [["a", "b"], ["a", "c"]] == rig.batches
    assert [(["a"], False), (["a", "c"], True)] == rig.done


async def test_what_is_dropped_is_not_written(rig: Rig) -> None:
    rig.texts.change("a")
    rig.texts.change("b")
    flushed = rig.texts.flush("a")
    rig.texts.drop("a")
    assert flushed.done
    assert 0 == await rig.texts.settle()
    assert [["b"]] == rig.batches


async def test_batches_are_bounded(rig: Rig) -> None:
    for number in range(BATCH + 1):
        rig.texts.change(str(number))
    assert 0 == await rig.texts.settle()
    assert [BATCH, 1] == [len(some) for some in rig.batches]


async def test_the_end_tells_what_is_left(rig: Rig) -> None:
    """What waits for a retry is tried once more."""
    rig.store.full = True
    rig.texts.hurry("a")
    rig.texts.change("b")
    await asyncio.sleep(0)
    assert 2 == await rig.texts.settle()
    rig.store.full = False
    assert 0 == await rig.texts.settle()


async def test_a_defect_of_the_caller_is_retried_like_a_failure() -> None:
    store, broken = HeldStore(), [True]

    def put(batch: Batch, some: Collection[str]) -> None:
        if broken and broken.pop():
            raise ZeroDivisionError
        put_all(batch, some)

    errors: list[bool] = []
    texts: WriteBehind[str] = WriteBehind(
        store, put, lambda: 3600.0, 0.001, lambda _, error: errors.append(error is not None)
    )
    texts.hurry("a")
    async with asyncio.timeout(60):
        while "a" in texts:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)
    assert [True, False] == errors


async def test_what_is_dropped_in_flight_does_not_let_the_next_batch_begin(rig: Rig) -> None:
    """One batch is in flight at a time, so none is taken for another (rule 1)."""
    rig.store.held = True
    rig.texts.hurry("a")
    await asyncio.sleep(0)
    rig.texts.drop("a")
    rig.texts.hurry("b")
    await asyncio.sleep(0)
    assert [["a"]] == rig.batches
    rig.store.let_go(1)
    await asyncio.sleep(0)
    assert "b" in rig.texts, "it is not written yet"
    rig.store.held = False
    rig.store.let_go()
    await rig.until_empty()
    assert [["a"], ["b"]] == rig.batches
    assert [([], True), (["b"], True)] == rig.done


async def test_the_end_writes_what_is_added_while_a_batch_is_made() -> None:
    """A caller whose records take several batches says so when the first of them is made."""
    store, parts = HeldStore(), ["1", "2", "3"]

    def put(batch: Batch, some: Collection[str]) -> None:
        put_all(batch, [text + parts.pop() for text in some])
        if parts:
            texts.change(*some)

    texts: WriteBehind[str] = WriteBehind(store, put, lambda: 3600.0, 0.001, lambda _some, _error: None)
    texts.change("a")
    assert 0 == await texts.settle()
    assert [] == parts
    assert [] == [*texts]


async def test_what_is_written_alone_does_not_wait_for_the_batch_in_flight(rig: Rig) -> None:
    """It is given to the store before what its caller gives it next; `idle` and `settle` wait for it."""
    rig.store.held = True
    rig.texts.hurry("a")
    await asyncio.sleep(0)
    rig.texts.change("b")
    rig.texts.write_alone("b")
    rig.texts.write_alone("c")  # has not changed
    rig.texts.write_alone("a")  # is being written as it is
    assert ([["a"], ["b"]], ["a", "b"]) == (rig.batches, [*rig.texts])
    rig.texts.change("b")
    rig.texts.write_alone("b")
    over = rig.texts.idle()
    for _ in range(2):
        rig.store.let_go(1)
        await asyncio.sleep(0)
        assert not over.done
    assert ["b"] == [*rig.texts]
    rig.store.let_go()
    await rig.until_empty()
    assert over.done and [["a"], ["b"], ["b"]] == rig.batches


async def test_what_could_not_be_written_alone_is_retried_unless_it_was_dropped(rig: Rig) -> None:
    rig.store.held = True
    for name in "ab":
        rig.texts.change(name)
        rig.texts.write_alone(name)
    rig.texts.drop("b")
    for _ in range(2):
        rig.store.fail(StoreError("no"))
    rig.store.held = False
    await rig.until_empty()
    assert [["a"], ["b"], ["a"]] == rig.batches
    assert 0 == await rig.texts.settle()
