"""Readers under everything that can happen to them, beside a model: no loss, no double, order kept.

    append, in groups or while something is under way     acknowledge in any order, refuse
    append past the service, alone or beside it
    an append whose outcome nobody can tell               disconnect, resume, subscribe again with a position
    trim by count                                         unsubscribe, or lose the session, and begin anew
    restart of the node, orderly or killed                delete the stream and make it again

The store takes its time: others see what is appended before the append has returned, and reads overlap.

The model knows which offsets a reader must have got by the time it has acknowledged everything: all from its beginning
on, but for those that were trimmed before they were sent. Within one process each comes once and in order; after a
restart what was acknowledged and written down before does not come again; who begins anew without a position goes on
after what it has acknowledged without a hole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.record import encode
from motorcade.extension.sources import Why
from motorcade.plugins.streams import pages, stream
from motorcade.plugins.streams.progress import Mark
from motorcade.storage.memory import MemoryStore, MemoryStreams
from motorcade.storage.ports import StoreError, StreamRecord
from tests.unit.streams.clients import Client, Node, Session, offsets

READERS = 3


class SlowStreams(MemoryStreams):
    """Turns of the event loop pass between what is done and the answer; some appends fail after they were done."""

    after = 0  #: turns
    doubt = False

    async def append(self, stream: str, values: Sequence[bytes], now: float) -> list[int]:
        offsets = await super().append(stream, values, now)
        for _ in range(self.after):
            await asyncio.sleep(0)
        if self.doubt:
            raise StoreError("the answer was lost")
        return offsets

    async def read(self, stream: str, after: int, limit: int) -> list[StreamRecord]:
        found = await super().read(stream, after, limit)
        for _ in range(self.after):
            await asyncio.sleep(0)
        return found


FILTER = "$stream/s"


@dataclass
class Expected:
    """What one reader must get."""

    begin: int = 1  #: offset of the first record
    seen: int = 0  #: messages of its session that were checked
    last: int = 0  #: offset received last in this process
    got: set[int] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)
    connected: bool = True


class Streams(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.node: Node
        self.clients: list[Client] = []
        self.expected: list[Expected] = []
        self.tail = 0
        self.first = 1
        self.count = 0
        self.page = pages.PAGE

    def _pages_of(self, records: int) -> None:
        """Short pages, so that few messages make many."""
        for module in (pages, stream):
            vars(module)["PAGE"] = records

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @initialize(
        windows=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 12)), min_size=READERS, max_size=READERS),
        page=st.integers(1, 9),
        cache=st.sampled_from([1, 5000, 1_000_000]),
        after=st.integers(0, 3),
    )
    def begin(self, windows: list[tuple[int, int]], page: int, cache: int, after: int) -> None:
        self._pages_of(page)
        self.cache = cache
        self.store = MemoryStore()
        self.slow = self.store.streams = SlowStreams(self.store.gate)
        self.slow.after = after
        self.run(self._start())
        for number, (window, buffer) in enumerate(windows):
            client = self.node.client(f"car{number}", window, buffer)
            self.clients.append(client)
            self.expected.append(Expected())
            self.run(self._subscribe(client, "earliest"))

    async def _start(self) -> None:
        await self.store.open()
        self.node = await Node.on(self.store, cache_bytes=self.cache)
        await self.node.create()

    async def _subscribe(self, client: Client, offset: str) -> None:
        client.subscribe(FILTER, offset)

    def session(self, who: int) -> Session:
        return self.clients[who].sessions[FILTER]

    # -- what happens

    @rule(count=st.integers(1, 12), wait=st.booleans())
    def append(self, count: int, wait: bool) -> None:
        async def work() -> None:
            payloads = [b"%d" % number for number in range(self.count, self.count + count)]
            self.count += count
            appending = asyncio.ensure_future(self.node.append(*payloads))
            if wait:
                await appending
            else:
                for _ in range(2):
                    for client in self.clients:
                        client.turn()
                    await asyncio.sleep(0)
            self.tail = max(await appending)

        self.run(work())

    @rule(count=st.integers(1, 5), beside=st.integers(0, 3), turns=st.integers(0, 3))
    def append_past(self, count: int, beside: int, turns: int) -> None:
        """As another plugin does it, in a batch of its own, perhaps while appends of the service are under way."""

        async def work() -> None:
            numbers = iter(range(self.count, self.count + count + beside))
            self.count += count + beside
            own = [self.node.append(*(b"%d" % next(numbers) for _ in range(beside)))] if beside else []
            for _ in range(turns):
                await asyncio.sleep(0)
            batch = self.store.batch()
            batch.stream("s", [encode(Message("t/a", b"%d" % number)) for number in numbers], self.node.now)
            await batch.commit()
            await asyncio.gather(*own)
            self.tail = (await self.store.streams.info("s")).last

        self.run(work())

    @rule(count=st.integers(1, 5))
    def append_in_doubt(self, count: int) -> None:
        """It fails, and was done all the same. Those at the tail hear of it with the next one."""

        async def work() -> None:
            self.slow.doubt = True
            with suppress(StoreError):
                await self.node.append(*(b"%d" % number for number in range(self.count, self.count + count)))
            self.slow.doubt = False
            self.count += count
            self.tail = max(await self.node.append(b"%d" % self.count))
            self.count += 1

        self.run(work())

    @rule(turns=st.integers(0, 6))
    def turn(self, turns: int) -> None:
        async def work() -> None:
            for _ in range(turns):
                for client in self.clients:
                    client.turn()
                await asyncio.sleep(0)

        self.run(work())

    @rule(who=st.integers(0, READERS - 1), which=st.lists(st.integers(0, 5), min_size=1), refuse=st.booleans())
    def acknowledge(self, who: int, which: list[int], refuse: bool) -> None:
        session = self.session(who)
        reason = ReasonCode.UNSPECIFIED_ERROR if refuse else ReasonCode.SUCCESS

        async def work() -> None:
            for number in which:
                if not session.inflight:
                    return
                index = number % len(session.inflight)
                self.expected[who].acknowledged.add(session.inflight[index].tag & (2**48 - 1))
                self.clients[who].acknowledge(index, reason=reason)

        self.run(self.node.quiet())
        self.look(who)
        if self.expected[who].connected:
            self.run(work())

    @rule(who=st.integers(0, READERS - 1), which=st.lists(st.integers(0, 5)))
    def acknowledge_go_and_come_back(self, who: int, which: list[int]) -> None:
        """In the middle of things."""
        if not self.expected[who].connected:
            self.disconnect_or_resume(who)
        if which:
            self.acknowledge(who, which, refuse=False)
        self.disconnect_or_resume(who)
        self.disconnect_or_resume(who)

    @rule(keep=st.integers(0, 10))
    def trim(self, keep: int) -> None:
        async def work() -> None:
            found = self.node.streams.stream("s")
            assert found is not None
            removed = max(0, self.tail - self.first + 1 - max(keep, 1))
            swept = await self.store.streams.trim("s", records=max(keep, 1))
            assert removed == swept.removed
            self.first += removed
            await found.trimmed(swept.removed, swept.octets)

        self.run(work())

    @rule(who=st.integers(0, READERS - 1))
    def disconnect_or_resume(self, who: int) -> None:
        expected, client = self.expected[who], self.clients[who]
        self.look(who)

        async def work() -> None:
            if expected.connected:
                client.disconnect()
            else:
                client.resume()

        self.run(work())
        expected.connected = not expected.connected

    @rule(who=st.integers(0, READERS - 1), data=st.data())
    def subscribe_again(self, who: int, data: st.DataObject) -> None:
        if not self.expected[who].connected:
            return
        offset = data.draw(st.sampled_from(["earliest", "latest"]) | st.integers(1, self.tail + 3).map(str))
        self.run(self._subscribe(self.clients[who], offset))
        begin = {"earliest": 1, "latest": self.tail + 1}.get(offset) or int(offset)
        self.expected[who] = Expected(begin)

    @rule(who=st.integers(0, READERS - 1), why=st.sampled_from([Why.UNSUBSCRIBED, Why.ENDED]), late=st.booleans())
    def begin_anew(self, who: int, why: Why, late: bool) -> None:
        """Unsubscribe, or lose the session, and come back without a position."""
        expected, client = self.expected[who], self.clients[who]
        if not expected.connected:
            self.disconnect_or_resume(who)
        self.run(self.node.quiet())
        self.look(who)
        old = self.session(who)
        done = self.place(who).done

        async def work() -> None:
            client.sessions.pop(FILTER).end(why)
            if late and why is Why.UNSUBSCRIBED:
                while old.inflight:  # the client has got them, and says so
                    expected.acknowledged.add(old.inflight[0].tag & (2**48 - 1))
                    old.delivered(old.inflight.pop(0))
            client.subscribe(FILTER)

        self.run(work())
        assert done <= self.place(who).done
        expected.begin = max(expected.begin, self.place(who).done + 1)
        assert expected.acknowledged.issuperset(offset for offset in expected.got if offset < expected.begin), (
            "what was not acknowledged comes again"
        )
        expected.got &= expected.acknowledged
        expected.seen = expected.last = 0

    def place(self, who: int) -> Mark:
        mark = self.node.streams.ledger.find(f"car{who}", "s", "")
        assert mark is not None
        return mark

    @precondition(lambda self: self.tail > 0 and self.count % 3 == 0)
    @rule(orderly=st.booleans())
    def restart(self, orderly: bool) -> None:
        async def work() -> None:
            if orderly:
                for expected, client in zip(self.expected, self.clients, strict=True):
                    if expected.connected:
                        client.disconnect()
                await self.node.stop()
            else:
                await self.node.kill()
            node = await Node.on(self.store, cache_bytes=self.cache)
            for client in self.clients:
                client.resume(node)
            self.node = node

        self.run(self.node.quiet())
        for who in range(READERS):
            self.look(who)
        self.run(work())
        for expected in self.expected:
            expected.connected = True
            expected.got &= expected.acknowledged  # what was not acknowledged is to come again
            expected.last = 0

    @precondition(lambda self: self.tail > 0 and self.count % 5 == 0)
    @rule()
    def delete_and_make_again(self) -> None:
        async def work() -> None:
            await self.node.quiet()
            await self.node.streams.delete("s")
            await self.node.create()
            await self.node.quiet()

        self.run(work())
        self.tail, self.first = 0, 1
        for who, expected in enumerate(self.expected):
            self.session(who).inflight.clear()  # of the old stream; nobody waits for them
            self.expected[who] = Expected(1, len(self.session(who).received), connected=expected.connected)

    # -- what must hold

    def look(self, who: int) -> None:
        """Check what has come since the last look."""
        expected, session = self.expected[who], self.session(who)
        new = offsets(session.received[expected.seen :])
        expected.seen = len(session.received)
        for offset in new:
            assert offset > expected.last, "doubled, or out of order"
            assert offset >= expected.begin
            expected.last = offset
            expected.got.add(offset)
        assert 0 == session.overshoot

    @precondition(lambda self: self.count % 2 == 0)
    @rule()
    def everything_comes(self) -> None:
        """Who acknowledges everything gets everything, but for what was trimmed."""

        async def work() -> None:
            for expected, client in zip(self.expected, self.clients, strict=True):
                if not expected.connected:
                    client.resume()
                    expected.connected = True
                await client.drain()

        for who in range(READERS):
            self.look(who)
        self.run(work())
        for who, expected in enumerate(self.expected):
            self.look(who)
            missing = set(range(max(expected.begin, self.first), self.tail + 1)) - expected.got
            assert not missing
            expected.acknowledged |= expected.got
            assert max(self.tail, expected.begin - 1) == self.place(who).done, "nothing is left to be acknowledged"

    def teardown(self) -> None:
        try:
            if self.clients:
                self.everything_comes()
                self.run(self.node.stop())
                assert 0 == self.node.streams.waiting.messages == self.node.streams.waiting.octets
        finally:
            self._pages_of(self.page)
            self.loop.close()


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
