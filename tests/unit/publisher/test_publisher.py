"""Messages until each is acknowledged: against a broker that follows a script, and a pace on a clock of its own.

The script writes and reads packets with tests/support/wire.py, so that a mistake of our codec cannot hide.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

import pytest

from motorcade.core.reasons import ReasonCode
from motorcade.publisher.address import BrokerAddress
from motorcade.publisher.publisher import Pace, Post, PublisherOptions, PublishError, ReliablePublisher, pulled
from tests.support import wire

PATIENCE = 60.0


class Watch:
    """A clock that goes on when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.naps: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


async def test_the_pace_is_kept_and_lost_time_is_not_made_up_for() -> None:
    watch = Watch()
    pace = Pace(100.0, lambda: watch.now, watch.sleep)
    for _ in range(3):
        await pace.take(50)
    assert [0.5, 0.5] == watch.naps, "the first goes at once"
    watch.now += 60
    await pace.take(200)
    assert [0.5, 0.5] == watch.naps
    await pace.settle()
    assert [0.5, 0.5, 2.0] == watch.naps, "the last one has its time too"
    await pace.settle()
    assert 3 == len(watch.naps)


async def test_without_a_rate_nobody_waits() -> None:
    watch = Watch()
    pace = Pace(None, lambda: watch.now, watch.sleep)
    for _ in range(3):
        await pace.take(10**9)
    await pace.settle()
    assert [] == watch.naps


# -- a broker


class Broker:
    """Says what it is told to say to each PUBLISH; notes which came, on which connection."""

    def __init__(self, answer: Callable[[Broker, str, bytes], bytes | None]) -> None:
        self.answer = answer
        self.connections = 0
        self.got: list[tuple[int, str, bytes]] = []
        self.most_waiting = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection = self.connections
        try:
            await _packet(reader)
            writer.write(bytes([0x20, 3, 0, 0, 0]))
            while True:
                kind, body = await _packet(reader)
                if kind >> 4 == 14:
                    return
                if kind >> 4 != 3:
                    continue
                length = int.from_bytes(body[:2], "big")
                topic = body[2 : 2 + length].decode()
                packet_id, payload = body[2 + length : 4 + length], body[5 + length :]
                self.got.append((connection, topic, payload))
                said = self.answer(self, topic, payload)
                if said is None:
                    return
                if said == TOO_LARGE:
                    writer.write(said)
                    return
                if said:
                    writer.write(bytes([0x40, 2 + len(said)]) + packet_id + said)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def _packet(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head, body = await wire.read_frame(reader)
    return head[0], body


OK, LATER = b"\x00\x00", b""
TOO_LARGE = bytes([0xE0, 1, 0x95])  # a DISCONNECT instead of an answer


def refusal(reason: int, words: str) -> bytes:
    text = words.encode()
    return bytes([reason, 3 + len(text), 0x1F]) + len(text).to_bytes(2, "big") + text


@asynccontextmanager
async def broker(answer: Callable[[Broker, str, bytes], bytes | None]) -> AsyncIterator[tuple[Broker, BrokerAddress]]:
    acting = Broker(answer)
    server = await asyncio.start_server(acting.serve, "127.0.0.1", 0)
    async with asyncio.timeout(PATIENCE):
        yield acting, BrokerAddress.parse(f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()


async def posts(count: int, first: int = 0) -> AsyncIterator[Post]:
    for number in range(first, first + count):
        yield Post("t", b"%d" % number, name=f"number {number}")


class Ledger:
    """What was acknowledged."""

    def __init__(self, act: Callable[[Post], None] = lambda _post: None) -> None:
        self.accepted: list[bytes] = []
        self.act = act

    def __call__(self, post: Post, _reason: ReasonCode, _answers: Mapping[str, str]) -> None:
        self.act(post)
        self.accepted.append(post.payload)


def send(address: BrokerAddress, ledger: Ledger, what: AsyncIterator[Post], **more: float) -> Awaitable[None]:
    options = PublisherOptions(window=int(more.get("window", 4)), patience=more.get("patience", PATIENCE))
    return ReliablePublisher(address, ledger, options).send(what)


async def test_what_was_not_acknowledged_is_sent_again_in_order() -> None:
    """The broker hangs up at every fifth message it gets, answers to some of them unsaid."""

    def answer(acting: Broker, _topic: str, _payload: bytes) -> bytes | None:
        return None if len(acting.got) % 5 == 0 else OK

    async with broker(answer) as (acting, address):
        ledger = Ledger()
        publisher = ReliablePublisher(address, ledger, PublisherOptions(window=4))
        await publisher.send(posts(20))
    assert {b"%d" % number for number in range(20)} == set(ledger.accepted)
    assert 20 == len(ledger.accepted), "each is told once"
    assert acting.connections - 1 == publisher.reconnected > 0
    assert len(acting.got) - 20 <= publisher.sent_again, "some of them it has not even read"
    for connection in range(1, acting.connections + 1):
        there = [int(payload) for at, _, payload in acting.got if at == connection]
        assert sorted(there) == there


async def test_no_more_than_the_window_is_in_flight() -> None:
    waiting: list[int] = []

    def answer(acting: Broker, _topic: str, _payload: bytes) -> bytes | None:
        waiting.append(len(acting.got) - len(ledger.accepted))
        return OK

    ledger = Ledger()
    async with broker(answer) as (_acting, address):
        await send(address, ledger, posts(30), window=3)
    assert 30 == len(ledger.accepted) and max(waiting) <= 3


async def test_a_broker_that_says_why_it_hangs_up_is_not_asked_again() -> None:
    """It says so to nobody's message, so all that wait for an answer learn of it."""

    def answer(_acting: Broker, _topic: str, payload: bytes) -> bytes | None:
        return TOO_LARGE if payload == b"2" else LATER

    async with broker(answer) as (acting, address):
        with pytest.raises(PublishError, match=r"the broker disconnected us: packet too large \(0x95\)"):
            await send(address, Ledger(), posts(3))
    assert 1 == acting.connections


async def test_the_first_refusal_ends_it_with_the_brokers_words() -> None:
    def answer(_acting: Broker, _topic: str, payload: bytes) -> bytes | None:
        return refusal(0x99, "ids: no") if payload == b"5" else OK

    ledger = Ledger()
    async with broker(answer) as (acting, address):
        with pytest.raises(PublishError, match=r"^number 5 was refused: ids: no \(0x99\)$"):
            await send(address, ledger, posts(30), window=4)
    assert 1 == acting.connections and len(acting.got) <= 5 + 4
    sent = {payload for _, _, payload in acting.got}
    assert sent - {b"5"} == set(ledger.accepted), "those in flight are waited for"


async def test_whoever_counts_may_end_it_too() -> None:
    def act(post: Post) -> None:
        if post.payload == b"3":
            raise PublishError("this is not what I wanted")

    async with broker(lambda *_: OK) as (_acting, address):
        with pytest.raises(PublishError, match="not what I wanted"):
            await send(address, Ledger(act), posts(30), window=2)


async def test_what_the_others_need_is_first_on_every_connection() -> None:
    def answer(acting: Broker, topic: str, _payload: bytes) -> bytes | None:
        return None if topic == "t" and acting.connections == 1 and len(acting.got) == 3 else OK

    ledger = Ledger()
    async with broker(answer) as (acting, address):
        await ReliablePublisher(address, ledger, PublisherOptions(window=1), first=[Post("data", b"d")]).send(posts(3))
    assert ["data", "t", "t", "data", "t", "t"] == [topic for _, topic, _ in acting.got]
    assert [b"d", b"0", b"d", b"1", b"2"] == ledger.accepted


async def test_a_refusal_of_it_ends_everything() -> None:
    async with broker(lambda *_: refusal(0x97, "no room")) as (acting, address):
        with pytest.raises(PublishError, match=r"the payload was refused: no room \(0x97\)"):
            await ReliablePublisher(address, Ledger(), first=[Post("data", b"d", name="the payload")]).send(posts(3))
    assert 1 == len(acting.got)


async def test_a_message_at_which_the_broker_hangs_up_again_and_again_ends_it() -> None:
    async with broker(lambda *_: None) as (acting, address):
        with pytest.raises(PublishError, match=r"nothing was acknowledged for 0\.3 s; last error: "):
            await send(address, Ledger(), posts(3), patience=0.3)
    assert acting.connections > 1


async def test_a_broker_that_says_nothing_is_left() -> None:
    async with broker(lambda *_: LATER) as (acting, address):
        with pytest.raises(PublishError, match=r"did not acknowledge anything for 0\.2 s"):
            await send(address, Ledger(), posts(3), patience=0.2)
    assert acting.connections > 1


async def test_who_is_not_let_in_does_not_try_again() -> None:
    async def refuse(counted: list[int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counted.append(1)
        await _packet(reader)
        writer.write(bytes([0x20, 3, 0, 0x86, 0]))
        writer.close()

    counted: list[int] = []
    server = await asyncio.start_server(partial(refuse, counted), "127.0.0.1", 0)
    address = BrokerAddress.parse(f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(PublishError, match=r"mqtt://127.0.0.1:\d+: the connection was refused: bad user name"):
        await send(address, Ledger(), posts(3))
    server.close()
    assert [1] == counted


async def test_nobody_connects_for_nothing() -> None:
    async with broker(lambda *_: OK) as (acting, address):
        await send(address, Ledger(), posts(0))
    assert 0 == acting.connections


async def test_a_plain_iterator_may_take_its_time() -> None:
    """It is waited for in a thread: the loop goes on."""
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow() -> Iterator[int]:
        yield 1
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(PATIENCE)
        yield 2

    found = []
    async for number in pulled(slow()):
        found.append(number)
        loop.call_soon(gate.set)
    assert [1, 2] == found
