"""What an item on a link costs: `.venv/bin/python bench/cluster/links_bench.py`.

send      `Link.send`, and its share of the end of the turn: a batch is made and written
receive   the same bytes, cut as a socket cuts them, up to an empty handler
together  two members over a loopback socket in one process, confirmed: both sides, and the system
"""

from __future__ import annotations

import asyncio
import logging
import sys
from time import perf_counter

import structlog
import uvloop

from motorcade.cluster.greeting import Hello, Identity
from motorcade.cluster.link import Link, LinkWire
from motorcade.cluster.links import Links
from motorcade.cluster.options import MAX_FRAME, LinkOptions
from motorcade.cluster.security import LinkSecurity
from motorcade.extension.cluster import ItemHandler, Peer
from motorcade.tasks import Tasks

ITEMS = 1_000_000
READ = 262_144
OPTIONS = LinkOptions(bind="", max_items=10 * ITEMS, max_bytes=1 << 33)


def handle(_peer: Peer, _body: bytes) -> None:
    """Take an item."""


class Events:
    """What a link needs."""

    def wake(self, link: Link) -> None: ...

    def handler(self, kind: str) -> ItemHandler:
        return handle

    def asked(self, link: Link, wire: LinkWire, id_: int, noun: str, question: bytes) -> None: ...

    def pong(self, link: Link) -> bytes:
        return b""

    def answered(self, link: Link, sent_at: float, body: bytes) -> None: ...


class Written:
    """A wire that keeps what it is given."""

    def __init__(self) -> None:
        self.data: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.data.append(data)


def pure(size: int, turn: int) -> tuple[float, float]:
    """Microseconds to send and to receive an item of a size, so many in a turn."""
    body = bytes(size)
    link, wire = Link("b~2", 2, Events(), OPTIONS), Written()
    link.opened(wire, 0, MAX_FRAME, 0.0)
    began = perf_counter()
    for _ in range(ITEMS // turn):
        for _ in range(turn):
            link.send("live", body)
        link.flush(0.0)
    sending = perf_counter() - began
    data = b"".join(wire.data)
    other = Link("a~1", 1, Events(), OPTIONS)
    other.opened(Written(), 0, MAX_FRAME, 0.0)
    pieces = [data[at : at + READ] for at in range(0, len(data), READ)]
    began = perf_counter()
    for piece in pieces:
        other.receive(piece, 0.0)
    receiving = perf_counter() - began
    assert other.received == link.sent, "all have come"
    return sending / ITEMS * 1e6, receiving / ITEMS * 1e6


class Owner:
    """A member without membership."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    def admit(self, hello: Hello) -> str:
        return ""

    def linked(self, link: Link) -> None:
        self.open.set()

    def unlinked(self, link: Link, why: str) -> None: ...

    def refused(self, member: str, why: str) -> None: ...

    def pong(self, link: Link) -> bytes:
        return b""

    def answered(self, link: Link, sent_at: float, body: bytes) -> None: ...


async def together(size: int, turn: int) -> float:
    """Microseconds for an item from one member to another, both in this process."""
    sides = []
    for number, name in enumerate("ab", 1):
        me = Identity("bench", "store", name, number, name.encode(), "")
        sides.append((me, owner := Owner(), Links(me, owner, LinkOptions(bind="127.0.0.1:0"), LinkSecurity(), Tasks())))
    (me, _, first), (_, owner, second) = sides
    first.on_item("live", handle)
    address = await first.open()
    second.expect([(me.id, me.number, address)])
    await owner.open.wait()
    peer = second.peer(me.id)
    assert peer is not None
    body = bytes(size)
    began = perf_counter()
    for _ in range(ITEMS // turn):
        for _ in range(turn):
            peer.send("live", body)
        await (peer.room() if peer.full else asyncio.sleep(0))
    await peer.confirm()
    took = perf_counter() - began
    await second.close()
    await first.close()
    return took / ITEMS * 1e6


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    print(f"Python {sys.version.split()[0]}, {ITEMS} items, microseconds per item")
    print(f"{'bytes':>6} {'per turn':>9} {'send':>6} {'receive':>8} {'together':>9}")
    for size, turn in ((40, 1), (40, 10), (40, 1000), (200, 100), (1000, 100)):
        send, receive = min(pure(size, turn) for _ in range(3))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            both = min(runner.run(together(size, turn)) for _ in range(2))
        print(f"{size:>6} {turn:>9} {send:>6.2f} {receive:>8.2f} {both:>9.2f}")


if __name__ == "__main__":
    main()
