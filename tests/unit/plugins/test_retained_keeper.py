"""What is retained outlives the plugin, the store agrees with what subscribers get, and nobody is told too early."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from motorcade.commit import Commit
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import AFTER
from motorcade.extension.plugin import Plugins
from motorcade.plugins.retained import RetainedPlugin, keeper
from motorcade.plugins.retained.record import COLLECTION, RecordError, decode, encode
from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Batch, Store, StoreError, StoreFigures, StoreFullError, Written
from motorcade.storage.redis import RedisStore
from motorcade.storage.rocks import RocksStore
from tests.support.redis import RedisServer
from tests.unit.plugins.hub import MemoryHub

PATIENCE = 60.0  #: seconds for what must happen sooner or later

Open = Callable[[], Store]


class Faulty:
    """A store whose commits fail: `full` certainly writes nothing, `lost` writes nothing and `late` everything.

    Which of them is what `script` says, in turn, then chance.
    """

    atomic = True

    def __init__(self, seed: int = 0, faults: float = 0.0) -> None:
        self.inner = MemoryStore()
        self.chance = random.Random(seed)
        self.faults = faults  #: share of commits that fail
        self.script: list[str] = []
        self.commits = 0
        self.gate = asyncio.Event()  #: commits wait for it
        self.gate.set()
        self._writing: set[asyncio.Future[None]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def open(self) -> None:
        """What it has outlives the plugin: it is never closed."""
        self.inner.gate.is_open = True

    async def close(self) -> None:
        """See above."""

    async def figures(self) -> StoreFigures:
        return replace(await self.inner.figures(), engine="faulty")

    def write(self, batch: Batch) -> Commit[Written]:
        commit: Commit[Written] = Commit()
        self._writing.add(task := asyncio.ensure_future(self._write(batch, commit)))
        task.add_done_callback(self._writing.discard)
        return commit

    async def _write(self, batch: Batch, commit: Commit[Written]) -> None:
        fault = self.fault()
        self.commits += 1
        await self.pause()
        if fault == "full":
            commit.finish(StoreFullError("no room"))
            return
        written = Written([], [])
        if fault != "lost":
            written = await self.inner.write(batch)
        await self.pause()
        if fault != "none":
            commit.finish(StoreError("nobody knows"))
        else:
            commit.settle(written)

    def fault(self) -> str:
        if self.script:
            return self.script.pop(0)
        return self.chance.choice(["full", "lost", "late"]) if self.chance.random() < self.faults else "none"

    async def pause(self) -> None:
        await self.gate.wait()
        for _ in range(self.chance.randrange(4)):
            await asyncio.sleep(0)


@pytest.fixture
def faulty() -> Faulty:
    """A store without faults, until a test says otherwise."""
    return Faulty()


@pytest.fixture
def engine(faulty: Faulty) -> Open:
    """How to open the same store, again and again."""
    return lambda: cast("Store", faulty)


@pytest.fixture(params=["rocksdb", "redis"])
def real_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """The same with files and a server."""
    if request.param == "rocksdb":
        return lambda: RocksStore(tmp_path / "store")
    server: RedisServer = request.getfixturevalue("server")
    return lambda: RedisStore(server.url)


async def until(condition: Callable[[], bool]) -> None:
    """Let others work until it is so."""
    async with asyncio.timeout(PATIENCE):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


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

    @property
    def uncommitted(self) -> int:
        assert self.plugin._keeper is not None
        return self.plugin._keeper.uncommitted

    def publish(self, topic: str, payload: bytes, qos: int = 1, **fields: Any) -> list[asyncio.Future[None]]:
        """Publish as the broker does, within one turn of the loop; what the acknowledgement waits for."""
        work = self.hub.publish(Message(topic, payload, qos, retain=True, **fields))
        with pytest.raises(StopIteration):
            work.send(None)
        futures = self.hub.routed[-1].headers.get(AFTER, [])
        assert isinstance(futures, list)
        return futures

    async def stored(self, topic: str, payload: bytes, **fields: Any) -> None:
        """Publish, and wait for the store."""
        for done in self.publish(topic, payload, **fields):
            await done

    def given(self) -> dict[str, bytes]:
        """What a new subscriber gets."""
        before = len(self.hub.delivered)
        self.hub.subscribe(Subscription("#"))
        return {message.topic: message.payload for _, _, some in self.hub.delivered[before:] for message in some}

    async def kept(self) -> dict[str, bytes]:
        """What the store holds."""
        found = self.store.records.scan(COLLECTION, self.hub.now())
        return {topic: decode(topic, value).payload async for topic, value in found}

    async def agrees(self) -> None:
        """Wait until nothing is open between index and store."""
        await until(lambda: self.uncommitted == 0)


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


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is doubtful is written again at once."""
    monkeypatch.setattr(keeper, "RETRY_AFTER", 0.02)


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


async def test_large_messages_make_several_batches(engine: Open, tmp_path: Path) -> None:
    """Up to the bound of a payload, which is a mebibyte, a message is stored as it is."""
    chance = random.Random(1)
    payloads = {f"large/{number}": chance.randbytes(1024 * 1024) for number in range(6)}
    async with running(engine(), tmp_path) as first:
        waiting = [done for topic, payload in payloads.items() for done in first.publish(topic, payload)]
        await asyncio.gather(*waiting)
    async with running(engine(), tmp_path) as second:
        assert payloads == second.given()


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
        with pytest.raises(StoreError, match="surrogates"):
            await odd[0]
        assert {"odd": b"old", "fine": b"new"} == node.given() == await node.kept()
        assert (0, 1) == (node.uncommitted, node.counters["store_failed"])


# -- when the publisher is told


async def test_the_publisher_is_told_when_the_store_has_it(engine: Open, tmp_path: Path) -> None:
    """QoS 1 and 2 wait, QoS 0 does not; what needs no write is confirmed at once."""
    async with running(engine(), tmp_path) as node:
        for qos in (1, 2):
            (done,) = node.publish("a", b"%d" % qos, qos=qos)
            assert not done.done()
            await done
            assert {"a": b"%d" % qos} == await node.kept()
        assert [] == node.publish("a", b"0", qos=0)
        (done,) = node.publish("a", b"", qos=1)
        await done
        assert {} == await node.kept()
        assert [] == node.publish("a", b"", qos=1)  # there is nothing to delete


async def test_an_answer_waits_for_an_earlier_change_that_it_repeats(
    faulty: Faulty, engine: Open, tmp_path: Path
) -> None:
    """Deleting twice: the second deletion changes nothing, but is not true before the first."""
    async with running(engine(), tmp_path) as node:
        await node.stored("a", b"x")
        faulty.gate.clear()
        first = node.publish("a", b"")
        await flying(node, 1)
        second = node.publish("a", b"")
        assert [] != second
        assert first == second
        faulty.gate.set()
        await second[0]
        assert {} == await node.kept()


async def test_the_changes_of_one_turn_are_one_write(faulty: Faulty, engine: Open, tmp_path: Path) -> None:
    """However many topics, however often each has changed; the last message of each counts."""
    async with running(engine(), tmp_path) as node:
        before = faulty.commits
        waiting = [
            done
            for number in range(300)
            for done in node.publish(f"t/{number % 100}", b"%d" % number, qos=number % 2 + 1)
        ]
        await asyncio.gather(*waiting)
        assert {f"t/{number}": b"%d" % (number + 200) for number in range(100)} == await node.kept() == node.given()
        assert 1 == faulty.commits - before


async def test_nothing_is_confirmed_by_a_store_that_hangs(faulty: Faulty, engine: Open, tmp_path: Path) -> None:
    """Subscribers see the newest at once; publishers are told when the store is back, and everything is there."""
    async with running(engine(), tmp_path) as node:
        faulty.gate.clear()
        first = node.publish("a", b"1")
        await flying(node, 1)
        second = node.publish("a", b"2") + node.publish("b", b"2")
        for _ in range(20):
            await asyncio.sleep(0)
        assert not [done for done in (*first, *second) if done.done()]
        assert {"a": b"2", "b": b"2"} == node.given()
        faulty.gate.set()
        await asyncio.gather(*first, *second)
        assert {"a": b"2", "b": b"2"} == await node.kept()


async def flying(node: Running, count: int) -> None:
    """Wait until so many topics are on their way to the store, and no more wait."""
    kept_by = node.plugin._keeper
    assert kept_by is not None
    await until(lambda: (count, 0) == (len(kept_by._flying), len(kept_by._waiting)))


async def test_too_much_that_is_not_confirmed_is_refused(
    faulty: Faulty, engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New topics are refused, and who asks is told; topics that wait already take further messages."""
    monkeypatch.setattr(keeper, "MAX_UNCOMMITTED", 3)
    async with running(engine(), tmp_path) as node:
        await node.stored("known", b"old")
        faulty.gate.clear()
        flight = node.publish("a", b"1")
        await flying(node, 1)
        waiting = node.publish("b", b"1") + node.publish("c", b"1")
        (refused,) = node.publish("known", b"new")
        with pytest.raises(StoreFullError, match="3 retained messages wait"):
            await refused
        assert [] == node.publish("known", b"new", qos=0)
        waiting += node.publish("b", b"2")
        assert 0 == node.plugin.clear("known")
        assert {"known": b"old", "a": b"1", "b": b"2", "c": b"1"} == node.given()
        assert 2 == node.counters["refused_uncommitted"]
        faulty.gate.set()
        await asyncio.gather(*flight, *waiting)
        await node.stored("known", b"new")
        assert {"known": b"new", "a": b"1", "b": b"2", "c": b"1"} == await node.kept()


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
        for done in (new, unknown):
            with pytest.raises(StoreFullError, match="reserve"):
                await done
        assert {"a": b"old"} == second.given() == await second.kept()
        assert 2 == second.counters["store_failed"]
        assert 0 == second.uncommitted  # it is certain that nothing was written


@pytest.mark.usefixtures("soon")
async def test_a_write_of_unknown_outcome_is_undone(faulty: Faulty, engine: Open, tmp_path: Path) -> None:
    """The index is what counts, and the store follows it."""
    async with running(engine(), tmp_path) as node:
        await node.stored("known", b"old")
        faulty.script = ["late"]
        (known,), (unknown,) = node.publish("known", b"new"), node.publish("unknown", b"new")
        for done in (known, unknown):
            with pytest.raises(StoreError) as told:
                await done
            assert not told.value.certain
        assert {"known": b"old"} == node.given() != await node.kept()
        assert 2 == node.uncommitted
        await node.agrees()
        assert {"known": b"old"} == node.given() == await node.kept()
        assert 2 == node.counters["store_failed"]  # attempts to mend are not counted


@pytest.mark.usefixtures("soon")
async def test_a_newer_message_is_not_undone_with_the_older_one(faulty: Faulty, engine: Open, tmp_path: Path) -> None:
    """What came while the failed write was under way is written next; if it fails too, the last confirmed is back."""
    for fate, expected in (("none", b"newer"), ("lost", b"old")):
        faulty.script = ["none", "lost", fate]
        async with running(engine(), tmp_path) as node:
            await node.stored("a", b"old")
            faulty.gate.clear()
            (failed,) = node.publish("a", b"new")
            await flying(node, 1)
            (newer,) = node.publish("a", b"newer")
            faulty.gate.set()
            outcomes = await asyncio.gather(failed, newer, return_exceptions=True)
            assert [True, fate == "lost"] == [isinstance(outcome, StoreError) for outcome in outcomes]
            assert {"a": expected} == node.given()
            await node.agrees()
            assert {"a": expected} == node.given() == await node.kept()


async def test_who_waits_while_the_plugin_goes_is_told(faulty: Faulty, engine: Open, tmp_path: Path) -> None:
    """The store refuses in time, and nobody waits for ever."""
    async with running(engine(), tmp_path) as node:
        faulty.script = ["lost", "lost"]
        faulty.gate.clear()
        (flight,) = node.publish("a", b"1")
        await flying(node, 1)
        (waiting,) = node.publish("b", b"1")
        faulty.gate.set()
        await node.plugins.unload("retained")
        assert flight.exception() is not None
        assert waiting.exception() is not None


@pytest.mark.usefixtures("soon")
async def test_a_doubt_lasts_until_something_is_written(faulty: Faulty, engine: Open, tmp_path: Path) -> None:
    """The older message was written though nobody knows, the newer one certainly not: the older one has to go."""
    faulty.script = ["none", "late", "full"]
    async with running(engine(), tmp_path) as node:
        await node.stored("a", b"old")
        faulty.gate.clear()
        (older,) = node.publish("a", b"new")
        await flying(node, 1)
        (newer,) = node.publish("a", b"newer")
        faulty.gate.set()
        for done in (older, newer):
            with pytest.raises(StoreError):
                await done
        assert {"a": b"old"} == node.given()
        assert 1 == node.uncommitted
        await node.agrees()
        assert {"a": b"old"} == await node.kept()


async def test_a_deletion_reaches_what_may_be_stored(faulty: Faulty, engine: Open, tmp_path: Path) -> None:
    """The index has nothing to delete, but the store may, and in fact does."""
    faulty.script = ["late"]
    async with running(engine(), tmp_path) as node:
        (failed,) = node.publish("a", b"new")
        with pytest.raises(StoreError):
            await failed
        assert {} == node.given() != await node.kept()
        (deleted,) = node.publish("a", b"")
        await deleted
        assert {} == await node.kept()
        assert 0 == node.uncommitted


async def test_unloading_leaves_no_doubt_if_it_can_help_it(faulty: Faulty, engine: Open, tmp_path: Path) -> None:
    """What may be stored is put right before the plugin goes."""
    async with running(engine(), tmp_path) as node:
        await node.stored("known", b"old")
        faulty.script = ["late"]
        for done in node.publish("known", b"new") + node.publish("unknown", b"new"):
            with pytest.raises(StoreError):
                await done
        assert {"known": b"new", "unknown": b"new"} == await node.kept()
        await node.plugins.unload("retained")
        assert {"known": b"old"} == await node.kept()


@pytest.mark.usefixtures("soon")
async def test_whatever_fails_the_last_confirmed_message_or_a_newer_one_is_kept(tmp_path: Path) -> None:
    """Thousands of changes over a store that often fails: in the end index and store say the same."""
    for seed in range(6):
        await _change_and_compare(seed, tmp_path)


async def _change_and_compare(seed: int, folder: Path) -> None:
    chance = random.Random(seed)
    faulty = Faulty(seed, faults=0.3)
    confirmed: dict[str, int] = {}  # topic -> number of the last change that was confirmed
    payloads: dict[str, list[bytes]] = {}  # topic -> payloads of all changes

    def confirm(topic: str, number: int, done: asyncio.Future[None]) -> None:
        if done.exception() is None:
            confirmed[topic] = max(confirmed.get(topic, 0), number)

    async with running(cast("Store", faulty), folder) as node:
        for number in range(2000):
            topic = f"t/{chance.randrange(20)}"
            payload = b"" if chance.random() < 0.25 else b"%d" % number
            changes = payloads.setdefault(topic, [b""])
            changes.append(payload)
            for done in node.publish(topic, payload, qos=chance.randrange(3)):
                done.add_done_callback(partial(confirm, topic, len(changes) - 1))
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        faulty.faults = 0.0
        await node.agrees()
        given = node.given()
        assert given == await node.kept()
    assert confirmed, "nothing was ever confirmed"
    for topic, changes in payloads.items():
        assert given.get(topic, b"") in changes[confirmed.get(topic, 0) :]
