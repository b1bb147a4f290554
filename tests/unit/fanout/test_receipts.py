"""Receipts into the stream, to readers and to those who listen; the bytes are those of the format."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motorcade.core import receipt as receipts
from motorcade.core import record
from motorcade.core.message import Message
from motorcade.core.receipt import Receipt, State, delivery_id, topic_of
from motorcade.core.vin import MOST_VINS, make_vin
from motorcade.extension.plugin import Context
from motorcade.plugins.fanout import receipts as module
from motorcade.plugins.fanout.batch import MAX_REQUEST_ID
from motorcade.plugins.fanout.ledger import Ledger
from motorcade.plugins.fanout.receipts import Receipts, prefix_of
from motorcade.plugins.fanout.tables import RECEIPTS
from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Store, StoreError, StoreFullError
from tests.unit.fanout.bookkeeping import LOG, Bookkeeping
from tests.unit.plugins.hub import MemoryHub
from tests.unit.streams.node import StreamsNode

names = st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="/+#"), min_size=1)
vehicles = st.integers(0, MOST_VINS - 1).map(make_vin)
times = st.floats(min_value=0, max_value=4e9)


def made(node: str) -> Receipts:
    hub = MemoryHub()
    context = Context("fanout", hub, LOG, Path(), Counter(), set(), MemoryStore())
    return Receipts(context, node, Ledger(context.store, 10, hub.now, LOG, context.counters))


def as_format(receipt: Receipt, guid: bytes) -> bytes:
    """The value as the format of streams says it."""
    return record.encode(Message(topic_of(receipt), receipts.encode(receipt), 1, guid=guid, timestamp=receipt.time))


@given(
    st.lists(
        st.builds(
            Receipt,
            state=st.sampled_from(State),
            vin=vehicles,
            request_id=names.map(lambda name: name[:MAX_REQUEST_ID]),
            delivery_id=st.text(max_size=30),
            time=times,
            node=st.text(max_size=300),
            attempt=st.integers(0, 254),
            reason=st.text(max_size=300),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_values_are_records_of_a_stream(given_: list[Receipt]) -> None:
    values = made("n1").values(given_)
    guids = [record.decode(value).guid for value in values]
    assert [as_format(receipt, guid) for receipt, guid in zip(given_, guids, strict=True)] == values
    assert sorted(set(guids)) == guids
    for receipt, value in zip(given_, values, strict=True):
        assert value.startswith(prefix_of(receipt.request_id))


@given(
    st.lists(st.tuples(vehicles, st.integers(1, 2**40)), min_size=1, max_size=20),
    names.map(lambda name: name[:MAX_REQUEST_ID]),
    times,
    st.text(max_size=300),
)
def test_the_quick_way_makes_the_same_as_the_slow_one(
    targets: list[tuple[str, int]], request_id: str, now: float, node: str
) -> None:
    given = [vin for vin, _ in targets], [position for _, position in targets]
    quick = list(made(node).accepted(*given, request_id, now))
    slow = [
        Receipt(
            state=State.ACCEPTED,
            vin=vin,
            request_id=request_id,
            delivery_id=delivery_id(vin, position),
            time=now,
            node=node,
        )
        for vin, position in targets
    ]
    assert [as_format(receipt, record.decode(value).guid) for receipt, value in zip(slow, quick, strict=True)] == quick


def test_percent_signs_are_nothing_special() -> None:
    (value,) = made("%n%d").accepted([make_vin(1)], [7], "100%b %%", 1.0)
    receipt = receipts.decode(record.decode(value).payload)
    assert ("100%b %%", "%n%d", f"{make_vin(1)}.7") == (receipt.request_id, receipt.node, receipt.delivery_id)


def test_no_two_receipts_have_the_same_guid() -> None:
    """However many there are at one time."""
    receipts_ = made("n1")
    values = [
        value
        for _ in range(50)
        for value in receipts_.accepted([make_vin(n) for n in range(40)], range(1, 41), "r", 1.0)
    ]
    guids = [record.decode(value).guid for value in values]
    assert sorted(set(guids)) == guids


def test_a_prefix_tells_requests_apart_that_begin_alike() -> None:
    (value,) = made("n1").accepted([make_vin(1)], [1], "task_1", 1.0)
    assert value.startswith(prefix_of("task_1"))
    for other in ("task_11", "task", "task_", "Task_1", f"task_1/{make_vin(1)}"):
        assert not value.startswith(prefix_of(other))


def test_readers_of_the_stream_get_receipts() -> None:
    """Those that wait are woken; those that come later read to the end, without another receipt to wake them."""
    with StreamsNode.on() as node:
        node.run(node.streams.open(RECEIPTS, "fanout"))
        dashboard = node.reader("dashboard", stream=RECEIPTS)
        books = node.run(Bookkeeping.on(node.held))
        books.context.offer("streams", node.streams)
        node.run(books.accepted("task_1", range(10)))
        node.run(books.say(State.SENT, "task_1", 1))
        assert [State.ACCEPTED] * 10 + [State.SENT] == states(dashboard.drain())
        earliest = node.reader("earliest", stream=f"{RECEIPTS}/earliest")
        third, latest = (node.reader(f"from {offset}", offset, stream=RECEIPTS) for offset in ("3", "latest"))
        assert (11, 9, 0) == (len(earliest.drain()), len(third.drain()), len(latest.drain()))
        node.run(books.say(State.ACKED, "task_1", 1))
        assert [State.ACKED] == states(latest.drain())
        node.run(books.stop())


def states(payloads: list[bytes]) -> list[State]:
    return [receipts.decode(payload).state for payload in payloads]


async def test_a_slow_broker_loses_copies_but_no_receipts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    books = await Bookkeeping.on(store)
    monkeypatch.setattr(module, "MOST_UNPUBLISHED", 3)
    await books.accepted("task_1", range(10))
    assert 7 == books.counters["receipts_not_published"]
    assert {State.ACCEPTED: 10} == books.states("task_1")
    await books.stop()


async def test_nobody_hears_of_what_is_not_stored(store: Store) -> None:
    books = await Bookkeeping.on(store)
    values = books.receipts.values([books.receipt(State.ACKED, "task_1", 1, 1)])
    books.receipts.failed(values, StoreFullError("full"))
    assert [] == books.hub.routed
    assert 0 == len(books.ledger)
    assert 0 == books.counters["ledger_doubts"]
    books.receipts.failed(books.receipts.values([books.receipt(State.ACKED, "task_1", 1, 1)]), StoreError("away"))
    assert 1 == books.counters["ledger_doubts"]
    await books.stop()


async def test_nothing_is_written_for_nobody(store: Store) -> None:
    books = await Bookkeeping.on(store)
    assert [] == await books.write([])
    await books.accepted("task_1", [])
    books.receipts.failed([], StoreError("away"))
    assert 0 == (await store.streams.info(RECEIPTS)).last
    assert 0 == books.counters["ledger_doubts"]
    await books.stop()
