"""Questions about requests: counts, and single deliveries page by page, whatever the size of a request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from motorcade.core.receipt import State
from motorcade.core.vin import make_vin
from motorcade.extension.declared import UnknownError
from motorcade.plugins.fanout import queries as module
from motorcade.plugins.fanout.tables import RECEIPTS
from motorcade.plugins.fanout.views import RequestView, TargetView
from motorcade.storage.ports import Store
from tests.unit.fanout.receipt_process import ReceiptProcess


async def all_pages(process: ReceiptProcess, request_id: str, state: State | None, limit: int) -> list[TargetView]:
    """As an operator goes through them."""
    found: list[TargetView] = []
    while True:
        page = await process.queries.targets(request_id, state, found[-1].delivery_id if found else "", limit)
        found += page
        assert len(page) <= limit
        if len(page) < limit:
            return found


def vehicles(found: Sequence[TargetView]) -> list[int]:
    numbers = {make_vin(number): number for number in range(100)}
    return [numbers[target.vin] for target in found]


async def busy(store: Store) -> ReceiptProcess:
    """Two requests at a time: vehicles 0 to 29 in all states, and others between them."""
    process = await ReceiptProcess.on(store)
    await process.accepted("task_2", range(40, 50))
    for start in (0, 10, 20):
        process.hub.time += 1
        await process.accepted("task_1", range(start, start + 10))
        await process.say(State.SENT, "task_2", 40 + start // 10, attempt=1)
    await process.say(State.SENT, "task_1", *range(20), attempt=1)
    await process.say(State.RETRIED, "task_1", *range(10, 15), attempt=1, reason="no_ack")
    process.hub.time += 1
    await process.say(State.ACKED, "task_1", *range(9, -1, -1), attempt=1)
    await process.say(State.EXPIRED, "task_1", 29, 28, reason="retention")
    return process


BUSY = {
    State.ACCEPTED: list(range(20, 28)),
    State.SENT: list(range(15, 20)),
    State.RETRIED: list(range(10, 15)),
    State.ACKED: list(range(9, -1, -1)),
    State.EXPIRED: [29, 28],
}


async def test_the_status_of_a_request(store: Store) -> None:
    process = await busy(store)
    assert RequestView(
        request_id="task_1",
        status="active",
        since=1001.0,
        first_at=1001.0,
        last_at=1004.0,
        targets=30,
        pending=18,
        states={state: len(found) for state, found in BUSY.items()},
    ) == await process.queries.status("task_1")
    await process.stop()


async def test_requests_come_in_the_order_of_their_ids(store: Store) -> None:
    process = await ReceiptProcess.on(store)
    for request_id in ("b", "a", "c", "ab"):
        await process.accepted(request_id, [1])
    assert ["a", "ab", "b", "c"] == [view.request_id for view in await process.queries.requests("", 10)]
    assert ["ab", "b"] == [view.request_id for view in await process.queries.requests("a", 2)]
    assert ["b", "c"] == [view.request_id for view in await process.queries.requests("abc", 10)]
    assert [] == await process.queries.requests("c", 10)
    await process.stop()


async def test_every_delivery_is_found_once_in_its_state(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of pages, also when its receipts lie behind those of others."""
    monkeypatch.setattr(module, "STEP", 7)
    monkeypatch.setattr(module, "WINDOW", 4)
    process = await busy(store)
    for limit in (1, 3, 5, 100):
        await each_in_its_state(process, limit)
    await process.counters.checkpoint()
    await process.accepted("task_3", range(60, 90))  # behind the end of the other two
    for limit in (1, 3, 5, 100):
        await each_in_its_state(process, limit)
    await process.stop()


async def each_in_its_state(process: ReceiptProcess, limit: int) -> None:
    for state, expected in BUSY.items():
        found = await all_pages(process, "task_1", state, limit)
        if state in (State.SENT, State.RETRIED):
            assert sorted(expected, key=make_vin) == vehicles(found), state
        else:
            assert expected == vehicles(found), state
        assert {state} == {target.state for target in found}
    assert [] == await all_pages(process, "task_1", State.CANCELLED, limit)
    found = await all_pages(process, "task_1", None, limit)
    assert list(range(30)) == vehicles(found)
    assert {state: sorted(numbers) for state, numbers in BUSY.items()} == {
        state: sorted(vehicles([target for target in found if target.state is state])) for state in BUSY
    }


async def test_a_delivery_is_told_with_its_last_receipt(store: Store) -> None:
    process = await busy(store)
    (first,) = await process.queries.targets("task_1", State.RETRIED, "", 1)
    assert (State.RETRIED, 1, "no_ack", "n1", 1003.0, "task_1") == (
        first.state,
        first.attempt,
        first.reason,
        first.node,
        first.time,
        first.request_id,
    )
    assert f"{first.vin}.1" == first.delivery_id
    await process.stop()


async def test_what_has_ended_is_not_taken_back_by_a_late_receipt(store: Store) -> None:
    process = await ReceiptProcess.on(store)
    await process.accepted("task_1", [1])
    await process.say(State.REPLACED, "task_1", 1)
    await process.say(State.SENT, "task_1", 1)
    (target,) = await process.queries.targets("task_1", None, "", 10)
    assert State.REPLACED is target.state
    assert [] == await process.queries.targets("task_1", State.SENT, "", 10)
    await process.stop()


async def test_a_request_issued_again_has_a_delivery_for_each_time(store: Store) -> None:
    process = await ReceiptProcess.on(store)
    await process.accepted("task_1", [1])
    await process.accepted("task_1", [1])
    await process.write([process.receipt(State.REPLACED, "task_1", 1, position=1)])
    found = await process.queries.targets("task_1", None, "", 10)
    assert [(f"{make_vin(1)}.1", State.REPLACED), (f"{make_vin(1)}.2", State.ACCEPTED)] == [
        (target.delivery_id, target.state) for target in found
    ]
    await process.stop()


async def test_a_receipt_that_is_there_twice_is_told_once(store: Store) -> None:
    process = await ReceiptProcess.on(store)
    await process.accepted("task_1", [1, 2])
    await process.say(State.ACKED, "task_1", 1)
    await process.say(State.ACKED, "task_1", 1, 2)
    assert [1, 2] == vehicles(await process.queries.targets("task_1", State.ACKED, "", 10))
    await process.stop()


async def test_going_on_does_not_begin_at_the_beginning(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP", 10)
    process = await ReceiptProcess.on(store)
    for _ in range(10):
        await process.accepted("task_1", range(10))
    await process.write([process.receipt(State.ACKED, "task_1", number, 1) for number in range(10)])
    await process.counters.checkpoint()
    page = await process.queries.targets("task_1", State.ACKED, "", 3)
    read = []
    original = type(store.streams).read

    async def watched(streams: object, stream: str, after: int, limit: int) -> object:
        read.append(after)
        return await original(streams, stream, after, limit)  # type: ignore[arg-type]

    monkeypatch.setattr(type(store.streams), "read", watched)
    assert 3 == len(await process.queries.targets("task_1", State.ACKED, page[-1].delivery_id, 3))
    assert [103] == read
    fresh = module.Queries(store, process.counters)  # another one has to look for the place
    assert 3 == len(await fresh.targets("task_1", State.ACKED, page[-1].delivery_id, 3))
    await process.stop()


async def test_what_is_not_there_is_said_so(store: Store) -> None:
    process = await busy(store)
    with pytest.raises(UnknownError, match=r"there is no request 'task_9'; `motorcade fanout list` shows"):
        await process.queries.status("task_9")
    with pytest.raises(UnknownError, match="there is no request"):
        await process.queries.targets("task_9", None, "", 10)
    with pytest.raises(UnknownError, match=r"has no delivery 'X\.1' in that state"):
        await process.queries.targets("task_1", State.ACKED, "X.1", 10)
    assert [] == await process.queries.targets("task_1", None, "", 0)
    await process.stop()


async def test_receipts_that_cannot_be_read_are_passed_over(store: Store) -> None:
    process = await ReceiptProcess.on(store)
    await process.accepted("task_1", [1])
    (stored,) = await store.streams.read(RECEIPTS, 0, 10)
    await store.streams.append(RECEIPTS, [stored.value[:-30], b"", stored.value.replace(b"accepted", b"unknownx")], 1.0)
    await process.accepted("task_1", [2])
    process.spawn(process.counters.run())
    assert [1, 2] == vehicles(await process.queries.targets("task_1", None, "", 10))
    await process.stop()
