"""Retained messages outlive the plugin, the store agrees with the index, and publishers are answered when it does."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from motorcade.commit import Commit
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.delivery.record import RecordError
from motorcade.extension.hooks import AFTER
from motorcade.extension.plugin import Plugins
from motorcade.plugins.retained import RetainedPlugin, plugin
from motorcade.plugins.retained.record import COLLECTION, decode, encode
from motorcade.storage import ports
from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Batch, Delete, Put, Store, StoreError, StoreFigures, StoreFullError, Written
from motorcade.storage.redis import RedisStore
from motorcade.storage.rocks import RocksStore
from tests.support.held_store import HeldStore
from tests.support.redis import RedisServer
from tests.unit.plugins.hub import MemoryHub

Open = Callable[[], Store]


class Lasting(HeldStore):
    """A store that outlives the plugin, and does what a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.topics: deque[list[str]] = deque()  #: of each batch

    def write(self, batch: Batch) -> Commit[Written]:
        self.topics.append([step.key for step in batch.steps if isinstance(step, Put | Delete)])
        return super().write(batch)

    async def figures(self) -> StoreFigures:
        return replace(await super().figures(), engine="held")


@pytest.fixture
def held() -> Lasting:
    return Lasting()


@pytest.fixture
def engine(held: Lasting) -> Open:
    """Open the same store, again and again."""
    return lambda: cast("Store", held)


@pytest.fixture(params=["rocksdb", "redis"])
def real_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """The same with files and a server."""
    if request.param == "rocksdb":
        return lambda: RocksStore(tmp_path / "store")
    server: RedisServer = request.getfixturevalue("server")
    return lambda: RedisStore(server.url)


@dataclass
class Running:
    """The plugin on an open store."""

    hub: MemoryHub
    plugins: Plugins
    store: Store

    @property
    def plugin(self) -> RetainedPlugin:
        (loaded,) = self.plugins.loaded()
        assert isinstance(loaded.plugin, RetainedPlugin)
        return loaded.plugin

    @property
    def counters(self) -> dict[str, int]:
        return dict(self.plugin.context.counters)

    def publish(self, topic: str, payload: bytes, qos: int = 1, **fields: Any) -> list[Commit[Any]]:
        """Publish as the broker does, within one turn of the loop; return what the acknowledgement waits for."""
        work = self.hub.publish(Message(topic, payload, qos, retain=True, **fields))
        with pytest.raises(StopIteration):
            work.send(None)
        commits = self.hub.routed[-1].headers.get(AFTER, [])
        assert isinstance(commits, list)
        return commits

    async def stored(self, topic: str, payload: bytes, **fields: Any) -> None:
        """Publish, and wait for the store."""
        for commit in self.publish(topic, payload, **fields):
            await commit

    def given(self) -> dict[str, bytes]:
        """Return what a new subscriber gets."""
        before = len(self.hub.delivered)
        self.hub.subscribe(Subscription("#"))
        return {message.topic: message.payload for _, _, some in self.hub.delivered[before:] for message in some}

    async def kept(self) -> dict[str, bytes]:
        """Return what the store holds."""
        found = self.store.records.scan(COLLECTION, self.hub.now())
        return {topic: decode(topic, value).payload async for topic, value in found}


@asynccontextmanager
async def running(store: Store, folder: Path, hub: MemoryHub | None = None, **config: Any) -> AsyncIterator[Running]:
    """A life of the plugin: the store is opened, everything is closed at the end."""
    hub = hub or MemoryHub()
    await store.open()
    plugins = Plugins(hub, hub.hooks, folder, hub.sources)
    plugins.store = store
    try:
        await plugins.load("retained", config)
        yield Running(hub, plugins, store)
    finally:
        await plugins.unload_all()
        await store.close()


# -- what comes back


FULL = Message(
    "fleet/ü/🚗",
    bytes(range(256)),
    qos=2,
    retain=True,
    publisher="tram",
    username="driver",
    guid=b"0123456789abcdef",
    timestamp=1000.0,
    payload_format=1,
    expires_at=2000.5,
    content_type="text/plain",
    response_topic="answers",
    correlation_data=b"\0\1",
    user_properties=(("a", "1"), ("a", "2")),
)


async def test_messages_come_back_with_everything_that_belongs_to_them(real_engine: Open, tmp_path: Path) -> None:
    """All fields are what they were; notes of plugins are not among them."""
    async with running(real_engine(), tmp_path) as first:
        await first.hub.publish(replace(FULL, headers={"note": 1}))
        await first.hub.publish(Message("plain", b"x", retain=True))
    async with running(real_engine(), tmp_path) as second:
        assert FULL == second.plugin.get(FULL.topic)
        assert Message("plain", b"x", retain=True, timestamp=1000.0) == second.plugin.get("plain")
        assert 2 == second.counters["loaded"]


async def test_what_was_deleted_stays_deleted(engine: Open, tmp_path: Path) -> None:
    """By an empty message, by an operator, or because its successor did not fit."""
    async with running(engine(), tmp_path, max_payload=10) as first:
        for topic in ("emptied", "cleared/1", "cleared/2", "outgrown", "stays"):
            await first.stored(topic, b"kept")
        await first.stored("emptied", b"")
        assert 2 == first.plugin.clear("cleared/+")
        await first.stored("outgrown", b"more than ten")
    async with running(engine(), tmp_path) as second:
        assert {"stays": b"kept"} == second.given()


async def test_what_expires_while_nobody_runs_does_not_come_back(engine: Open, tmp_path: Path) -> None:
    """The record ends at the message's time, also without having been deleted."""
    hub = MemoryHub()
    async with running(engine(), tmp_path, hub) as first:
        await first.stored("short", b"x", expires_at=1010.0)
        await first.stored("long", b"x", expires_at=1020.0)
    hub.time = 1010.0
    async with running(engine(), tmp_path, hub) as second:
        assert {"long": b"x"} == second.given()
        hub.time = 1020.0
        assert {} == second.given() == await second.kept()


async def test_a_plugin_that_is_loaded_again_has_its_messages(engine: Open, tmp_path: Path) -> None:
    """Unloading writes what nobody has waited for."""
    async with running(engine(), tmp_path) as node:
        for number in range(1000):
            node.publish(f"t/{number}", b"%d" % number, qos=0)
        await node.plugins.unload("retained")
        await node.plugins.load("retained")
        assert {f"t/{number}": b"%d" % number for number in range(1000)} == node.given()


async def test_a_store_in_memory_is_left_alone(tmp_path: Path) -> None:
    """It would only hold everything twice; nobody waits, and unloading forgets."""
    async with running(MemoryStore(), tmp_path) as node:
        assert [] == node.publish("a", b"x")
        assert {"a": b"x"} == node.given()
        assert {} == await node.kept()
        await node.plugins.unload("retained")
        await node.plugins.load("retained")
        assert {} == node.given()


async def test_figures_of_the_node_are_not_stored(engine: Open, tmp_path: Path) -> None:
    """`$SYS` tells of a node that runs; other topics with `$` are like all others."""
    async with running(engine(), tmp_path) as node:
        assert [] == node.publish("$SYS/broker/uptime", b"1 second")
        await node.stored("$SYSTEM/x", b"kept")
        assert {"$SYSTEM/x": b"kept"} == await node.kept()
        assert node.plugin.get("$SYS/broker/uptime") is not None


#: As the version before the common stored form wrote it.
OLD = (
    b"\x9d\x01\xc4\x08\x00\x01\x02\x03\x04\x05\x06\x07\x02\xa4tram\xa6driver\xc4\x100123456789abcdef"
    b"\xcb@\x8f@\x00\x00\x00\x00\x00\x01\xcb@\x9fB\x00\x00\x00\x00\x00\xaatext/plain\xa7answers\xc4\x02\x00\x01"
    b"\x92\x92\xa1a\xa11\x92\xa1a\xa12"
)
OLD_PLAIN = b"\x9d\x01\xc4\x01x\x00\xa0\xc0\xc4\x00\xcb@\x8f@\x00\x00\x00\x00\x00\xc0\xc0\xc0\xc0\xc0\x90"


async def test_what_an_earlier_version_has_stored_is_read(held: Lasting, engine: Open, tmp_path: Path) -> None:
    """A new message of the topic is stored in the new form: the topic, which the key tells, is left empty."""
    await held.records.put(COLLECTION, FULL.topic, OLD, 2000.5)
    await held.records.put(COLLECTION, "plain", OLD_PLAIN)
    async with running(engine(), tmp_path) as node:
        assert replace(FULL, payload=bytes(range(8))) == node.plugin.get(FULL.topic)
        assert Message("plain", b"x", retain=True, timestamp=1000.0) == node.plugin.get("plain")
        await node.stored("plain", b"new")
        value = msgspec.msgpack.decode(held.records_of(COLLECTION)["plain"])
        assert [1, "", b"new"] == value[:3]
        assert True is value[8]


# -- bounds and damage at the start


async def test_of_too_many_the_newest_are_loaded(engine: Open, tmp_path: Path) -> None:
    """The others stay in the store, and come back when the bounds allow it."""
    hub = MemoryHub()
    async with running(engine(), tmp_path, hub) as first:
        for number in chance_order(20):
            hub.time = 1000.0 + number
            await first.stored(f"t/{number:02}", b"x" * 10)
        await first.stored("large", b"x" * 100)
    async with running(engine(), tmp_path, hub, max_messages=5, max_payload=50) as second:
        assert [f"t/{number}" for number in range(15, 20)] == sorted(second.given())
        assert (5, 16) == (second.counters["loaded"], second.counters["not_loaded"])
    async with running(engine(), tmp_path, hub, max_bytes=3 * 14) as third:
        assert [f"t/{number}" for number in range(17, 20)] == sorted(third.given())
    async with running(engine(), tmp_path, hub) as fourth:
        assert 21 == len(fourth.given())


def chance_order(count: int) -> list[int]:
    return random.Random(count).sample(range(count), count)


async def test_a_message_that_was_not_loaded_can_be_deleted_and_replaced(engine: Open, tmp_path: Path) -> None:
    """What the index does not know must not come back behind its back."""
    hub = MemoryHub()
    async with running(engine(), tmp_path, hub) as first:
        for topic in ("deleted", "refused", "replaced", "newest"):
            await first.stored(topic, b"old")
            hub.time += 1
    async with running(engine(), tmp_path, hub, max_messages=1) as second:
        assert ["newest"] == list(second.given())
        await second.stored("deleted", b"")
        await second.stored("refused", b"new")  # the table is full
        await second.stored("newest", b"")
        await second.stored("replaced", b"new")
    async with running(engine(), tmp_path, hub) as third:
        assert {"replaced": b"new"} == third.given()


async def test_records_that_cannot_be_read_harm_nobody(
    engine: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are counted and named; the next message of the topic takes their place."""
    good = encode(Message("good", b"x"))
    bad = {
        "empty": b"",
        "torn": good[:-3],
        "noise": b"\xc1" + bytes(50),
        "future": b"\x9d\x02" + good[2:],
        "a/#": good,
        "wild/qos": encode(Message("wild/qos", b"x", qos=3)),
    }
    async with running(engine(), tmp_path) as first:
        await first.stored("good", b"x")
        for topic, value in bad.items():
            await first.store.records.put(COLLECTION, topic, value)
    async with running(engine(), tmp_path) as second:
        assert {"good": b"x"} == second.given()
        assert (1, len(bad)) == (second.counters["loaded"], second.counters["unreadable"])
        told = capsys.readouterr().out
        assert all(topic in told for topic in bad), told
        await second.stored("torn", b"whole")
        await second.stored("noise", b"")
    async with running(engine(), tmp_path) as third:
        assert {"good": b"x", "torn": b"whole"} == third.given()
        assert len(bad) - 2 == third.counters["unreadable"]


def test_what_is_no_text_is_no_record() -> None:
    """A plugin may publish what no client can; it hears of it, and others are not concerned."""
    with pytest.raises(RecordError, match="surrogates"):
        encode(Message("a", b"x", content_type="\ud800"))
    with pytest.raises(RecordError, match="wildcard"):
        encode(Message("a/+", b"x"))


async def test_a_message_that_cannot_be_stored_spoils_no_other(engine: Open, tmp_path: Path) -> None:
    """In the same batch, others are confirmed; its own topic is as it was."""
    async with running(engine(), tmp_path) as node:
        await node.stored("odd", b"old")
        odd = node.publish("odd", b"new", content_type="\ud800")
        fine = node.publish("fine", b"new")
        await asyncio.gather(*fine)
        with pytest.raises(RecordError, match="surrogates"):
            await odd[0]
        assert {"odd": b"old", "fine": b"new"} == node.given() == await node.kept()
        assert 1 == node.counters["store_failed"]


# -- when the publisher is told


async def test_the_publisher_is_told_when_the_store_has_it(engine: Open, tmp_path: Path) -> None:
    """QoS 1 and 2 wait, QoS 0 does not; what needs no write is confirmed at once."""
    async with running(engine(), tmp_path) as node:
        for qos in (1, 2):
            (commit,) = node.publish("a", b"%d" % qos, qos=qos)
            assert not commit.done
            await commit
            assert {"a": b"%d" % qos} == await node.kept()
        assert [] == node.publish("a", b"0", qos=0)
        await node.stored("a", b"")
        assert {} == await node.kept()
        assert [] == node.publish("a", b"", qos=1)  # there is nothing to delete


async def test_an_answer_waits_for_an_earlier_change_that_it_repeats(
    held: Lasting, engine: Open, tmp_path: Path
) -> None:
    """Deleting twice: the second deletion changes nothing, but is not true before the first."""
    async with running(engine(), tmp_path) as node:
        await node.stored("a", b"x")
        held.held = True
        node.publish("a", b"")
        (second,) = node.publish("a", b"")
        await asyncio.sleep(0)
        assert not second.done
        held.let_go()
        await second
        assert {} == await node.kept()


async def test_too_much_in_flight_is_refused(
    held: Lasting, engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old message stays, and a publisher of QoS 1 or 2 is refused; topics in flight take further changes."""
    monkeypatch.setattr(ports, "MAX_BACKLOG_ROWS", 2)
    async with running(engine(), tmp_path) as node:
        await node.stored("known", b"old")
        held.held = True
        taken = node.publish("a", b"1") + node.publish("b", b"1")
        (refused,) = node.publish("known", b"new")
        with pytest.raises(StoreFullError, match="waits for the store already"):
            await refused
        assert [] == node.publish("known", b"new", qos=0)
        taken += node.publish("b", b"2")
        assert 0 == node.plugin.clear("known")
        assert {"known": b"old", "a": b"1", "b": b"2"} == node.given()
        assert 2 == node.counters["refused_uncommitted"]
        held.held = False
        held.let_go()
        await asyncio.gather(*taken)
        await node.stored("known", b"new")
        assert {"known": b"new", "a": b"1", "b": b"2"} == await node.kept()


# -- a store that fails


async def test_a_full_disk_leaves_the_old_message_in_force(tmp_path: Path) -> None:
    """The publisher is refused, subscribers get the old message, and deleting goes on."""
    async with running(RocksStore(tmp_path / "store"), tmp_path) as first:
        await first.stored("a", b"old")
        await first.stored("b", b"old")
    async with running(RocksStore(tmp_path / "store", reserve=2**62), tmp_path) as second:
        (new,), (unknown,), (deleted,) = (
            second.publish("a", b"new"),
            second.publish("c", b"x"),
            second.publish("b", b""),
        )
        await deleted
        for commit in (new, unknown):
            with pytest.raises(StoreFullError, match="reserve"):
                await commit
        assert {"a": b"old"} == second.given() == await second.kept()
        assert 2 == second.counters["store_failed"]


async def test_after_an_unknown_outcome_the_last_confirmed_message_is_given(
    held: Lasting, engine: Open, tmp_path: Path
) -> None:
    """A deletion reaches what may be stored; the next start reads what is."""
    async with running(engine(), tmp_path) as node:
        await node.stored("known", b"old")
        held.held = True
        commits = [*node.publish("known", b"new"), *node.publish("unknown", b"new"), *node.publish("stays", b"new")]
        await asyncio.sleep(0)
        held.fail(StoreError("unknown"), written=True)
        for commit in commits:
            with pytest.raises(StoreError, match="unknown"):
                await commit
        assert {"known": b"old"} == node.given()
        held.held = False
        await node.stored("unknown", b"")
    async with running(engine(), tmp_path) as node:
        assert {"known": b"new", "stays": b"new"} == node.given()


async def test_a_store_that_does_not_answer_does_not_keep_the_plugin(
    held: Lasting, engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends all the same; publishers are answered by the store, when it is back."""
    monkeypatch.setattr(plugin, "STOP_TIMEOUT", 0.0)
    async with running(engine(), tmp_path) as node:
        held.held = True
        (commit,) = node.publish("a", b"1")
        await node.plugins.unload("retained")
        assert not commit.done
        held.let_go()
        await commit


class Topic:
    """A model of one topic."""

    def __init__(self) -> None:
        self.current = self.stored = self.written = b""  #: for subscribers, in the store, in flight
        self.writing = False  #: there is a write in flight, or waiting
        self.commits: list[Commit[Any]] = []  #: that wait for it
        self.later: list[Commit[Any]] = []  #: that wait for the next one
        self.changed = False  #: since what is in flight

    def publish(self, payload: bytes, commits: list[Commit[Any]], *, inflight: bool) -> None:
        if payload or self.current:
            self.current = payload
            if not self.writing:
                self.writing, self.written = True, payload
            elif payload and self.written and not self.changed and not inflight:
                self.written = payload  # in place of what waits
            else:
                self.changed = True
        (self.later if self.changed else self.commits).extend(commits)

    def answered(self, stored: bool) -> None:
        """Check that publishers are told; the newest change is written next."""
        assert all(commit.done and (commit.error is None) is stored for commit in self.commits)
        assert not any(commit.done for commit in self.later)
        if stored:
            self.stored = self.written
        self.commits, self.later, self.writing = self.later, [], self.changed
        if self.changed:
            self.written, self.changed = self.current, False
        elif not stored:
            self.current = self.stored


PUBLISH = st.tuples(st.sampled_from("abc"), st.sampled_from([b"", b"1", b"2"]), st.integers(0, 2))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PUBLISH | st.booleans(), max_size=40))
def test_whatever_is_refused_index_and_store_agree(tmp_path: Path, steps: list[Any]) -> None:
    """Publish, or let the store take (True) or refuse (False) its oldest write; in the end there is a restart.

    What is published between two of these is written together.
    """
    asyncio.run(_check_against_model(steps, tmp_path))


async def _check_against_model(steps: list[Any], folder: Path) -> None:
    held = Lasting()
    topics = {name: Topic() for name in "abc"}

    def answer(stored: bool) -> None:
        call = held.waiting.popleft()
        if stored:
            call.go()
        else:
            call.refuse(StoreFullError("no room"))
        for name in held.topics.popleft():
            topics[name].answered(stored)

    async with running(cast("Store", held), folder) as node:
        held.held = True
        try:
            for step in steps:
                if isinstance(step, tuple):
                    name, payload, qos = step
                    commits = node.publish(name, payload, qos)
                    topics[name].publish(payload, commits, inflight=any(name in batch for batch in held.topics))
                    assert (qos > 0 and topics[name].writing) is bool(commits)
                else:
                    await asyncio.sleep(0)
                    if held.waiting:
                        answer(step)
                assert {name: topic.current for name, topic in topics.items() if topic.current} == node.given()
            await asyncio.sleep(0)
            while held.waiting:
                answer(stored=True)
                await asyncio.sleep(0)
        finally:
            held.held = False
            held.let_go()
        given = node.given()
        assert {name: topic.stored for name, topic in topics.items() if topic.stored} == given == await node.kept()
    async with running(cast("Store", held), folder) as node:
        assert given == node.given()
