"""Housekeeping on every engine: what has expired goes in bounded steps, and errors only delay it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from motorcade.storage.housekeeping import LONGEST_PAUSE, Housekeeping
from motorcade.storage.ports import Batch, Draft, Store, StoreFullError, Swept
from tests.contracts.engines import HOUR, NOW, PAYLOAD, Engine, eventually, local_clock


async def fill(store: Store, count: int = 50) -> None:
    batch = Batch()
    for number in range(count):
        batch.append([f"v{number}"], Draft(b"", PAYLOAD, expires_at=NOW + 60), NOW)
        batch.put("one", str(number), b"value", NOW + 60)
    batch.append(["stays"], Draft(b"body"), NOW)
    await store.write(batch)


async def test_a_round_removes_what_has_expired_and_takes_the_figures(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps that keep to the budget."""
    await fill(store)
    now = NOW
    told: list[tuple[str, int]] = []
    housekeeping = Housekeeping(store, 10.0, 7, lambda: now, on_expired=told.extend)
    steps: list[Swept] = []
    real = store.sweep

    async def watched(now: float, budget: int, cursor: bytes = b"", kept: Callable[[int], bool] | None = None) -> Swept:
        steps.append(await real(now, budget, cursor, kept))
        return steps[-1]

    monkeypatch.setattr(store, "sweep", watched)
    await housekeeping.round()
    assert (51, 50) == (housekeeping.figures.entries, housekeeping.figures.records)  # type: ignore[union-attr]
    assert 0 == housekeeping.counters.removed
    now = NOW + 3 * HOUR
    await housekeeping.round()
    assert (1, 0, 0) == (housekeeping.figures.entries, housekeeping.figures.records, housekeeping.figures.blobs)  # type: ignore[union-attr]
    counters = housekeeping.counters
    assert (2, 0, "", now) == (counters.rounds, counters.errors, counters.trouble, counters.ended_at)
    assert counters.removed == sum(step.removed for step in steps) >= 100
    assert counters.steps == len(steps) > 100 // 7
    assert max(step.removed for step in steps) <= 7
    assert counters.octets > 0
    assert sorted((f"v{number}", 1) for number in range(50)) == sorted(told)


def _is_of(number: int, cell: int) -> bool:
    return cell % 3 == number


async def test_nodes_that_share_the_cells_remove_everything_between_them(store: Store) -> None:
    """Each what lies in its own cells; an engine that serves one node has one of them, and is not asked."""
    await fill(store, 200)
    cells = len(await store.feeds.ends())
    members = [
        Housekeeping(store, 10.0, 1000, lambda: NOW + 3 * HOUR, kept=partial(_is_of, number)) for number in range(3)
    ]
    left: list[tuple[int, int, int]] = []
    for member in (*members, *members):  # a blob may lie in a cell that was swept before those of its entries
        await member.round()
        figures = member.figures
        assert figures is not None
        left.append((figures.entries, figures.records, figures.blobs))
    assert (1, 0, 0) == left[-1]
    if cells > 1:
        assert left[0][0] > left[1][0] > 1 and left[0][1] > left[1][1] > 0, left
        assert all(member.counters.removed > 50 for member in members)


@local_clock
async def test_a_budget_of_nothing_only_takes_figures(store: Store) -> None:
    await fill(store)
    housekeeping = Housekeeping(store, 10.0, 0, lambda: NOW + 3 * HOUR)
    await housekeeping.round()
    assert 51 == housekeeping.figures.entries  # type: ignore[union-attr]
    assert (1, 0, 0) == (housekeeping.counters.rounds, housekeeping.counters.steps, housekeeping.counters.removed)


@local_clock
async def test_a_store_that_fails_is_asked_again_later_and_later(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    housekeeping = Housekeeping(store, 10.0, 100)
    await housekeeping.round()
    before = housekeeping.figures

    async def full(now: float, budget: int, cursor: bytes = b"", kept: object = None) -> Swept:
        raise StoreFullError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(store, "sweep", full)
        pauses = []
        for _ in range(8):
            await housekeeping.round()
            pauses.append(housekeeping.pause)
    assert [20.0, 40.0, 80.0, 160.0, LONGEST_PAUSE, LONGEST_PAUSE] == pauses[:6]
    assert (8, "no room", before) == (housekeeping.counters.errors, housekeeping.counters.trouble, housekeeping.figures)
    await housekeeping.round()
    assert (10.0, "", 2) == (housekeeping.pause, housekeeping.counters.trouble, housekeeping.counters.rounds)


async def test_it_goes_round_by_itself_and_survives_a_closed_store(engine: Engine) -> None:
    store = engine.make()
    await store.open()
    housekeeping = Housekeeping(store, 0.0, 100)
    running = asyncio.create_task(housekeeping.run())

    async def counters() -> tuple[int, int]:
        return housekeeping.counters.rounds, housekeeping.counters.errors

    try:
        await eventually(counters, lambda found: found[0] >= 2)
        await store.close()
        await eventually(counters, lambda found: found[1] >= 1)
        assert not running.done()
    finally:
        running.cancel()
        await store.close()
