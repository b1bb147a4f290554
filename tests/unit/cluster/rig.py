"""Two ends of a link without sockets: bytes lie in pipes until they are carried, and time is a number.

pair = Pair()                      a~1 and b~2, connected
pair.a.link.send("kind", b"…")
pair.settle()                      turns end, bytes are carried, until nothing happens any more
pair.b.items                       what its handlers have got
pair.cut(); pair.connect()         the connection breaks; another one
"""

from __future__ import annotations

from dataclasses import dataclass, field

from motorcade.cluster.link import Link, LinkWire
from motorcade.cluster.options import MAX_FRAME, LinkOptions
from motorcade.extension.cluster import ItemHandler, Peer

OPTIONS = LinkOptions(bind="", max_items=20, max_bytes=2000, patience=0.5)


class Pipe:
    """Bytes on their way to one end; above `most` the writer is paused, as transports do it."""

    def __init__(self, writer: End, most: int) -> None:
        self.data = bytearray()
        self.writer = writer
        self.most = most
        self.broken = False
        self._paused = False

    def write(self, data: bytes) -> None:
        if not self.broken:
            self.data += data
            if len(self.data) > self.most and not self._paused:
                self._paused = True
                self.writer.link.pause()

    def carry(self, most: int) -> bytes:
        data = bytes(self.data[:most])
        del self.data[:most]
        if self._paused and len(self.data) * 2 <= self.most and self.writer.link.wire is self:
            self._paused = False
            self.writer.link.resume()
        return data


@dataclass
class End:
    """One end, and what its handlers have seen."""

    name: str
    number: int
    options: LinkOptions = OPTIONS
    items: list[tuple[str, bytes]] = field(default_factory=list)
    asked_for: list[tuple[LinkWire, int, str, bytes]] = field(default_factory=list)
    pongs: list[tuple[float, bytes]] = field(default_factory=list)
    pong_body: bytes = b""
    known: set[str] = field(default_factory=lambda: {"one", "two", "large"})
    failing: bool = False
    woken: bool = False

    def __post_init__(self) -> None:
        self.link = Link(f"{'b' if self.name == 'a' else 'a'}~{3 - self.number}", 3 - self.number, self, self.options)

    # -- LinkEvents

    def wake(self, link: Link) -> None:
        if link is self.link:
            assert not self.woken, "one flush for each turn is enough"
            self.woken = True

    def handler(self, kind: str) -> ItemHandler | None:
        if kind not in self.known:
            return None

        def handle(_peer: Peer, body: bytes) -> None:
            self.items.append((kind, body))
            if self.failing:
                raise RuntimeError("a handler that raises")

        return handle

    def asked(self, link: Link, wire: LinkWire, id_: int, noun: str, question: bytes) -> None:
        self.asked_for.append((wire, id_, noun, question))

    def pong(self, link: Link) -> bytes:
        return self.pong_body

    def answered(self, link: Link, sent_at: float, body: bytes) -> None:
        self.pongs.append((sent_at, body))


class Pair:
    """Two members and what is between them."""

    def __init__(self, options: LinkOptions = OPTIONS, *, capacity: int = 1 << 30) -> None:
        self.now = 100.0
        self.capacity = capacity
        self.a, self.b = End("a", 1, options), End("b", 2, options)
        self.to_a = self.to_b = Pipe(self.a, 0)
        self.connect()

    def connect(self, max_frame: int = MAX_FRAME) -> None:
        a, b = self.a, self.b
        self.to_a, self.to_b = Pipe(b, self.capacity), Pipe(a, self.capacity)
        received_a, received_b = a.link.received, b.link.received
        a.link.check(received_b)
        b.link.check(received_a)
        a.link.opened(self.to_b, received_b, max_frame, self.now)
        b.link.opened(self.to_a, received_a, max_frame, self.now)

    def cut(self) -> None:
        """Lose what is on its way."""
        self.to_a.broken = self.to_b.broken = True
        self.a.link.lost("it was cut")
        self.b.link.lost("it was cut")

    def turn(self) -> None:
        for end in (self.a, self.b):
            if end.woken:
                end.woken = False
                end.link.flush(self.now)

    def carry(self, most: int = 1 << 30) -> bool:
        """Carry up to so many bytes each way. Return False if there were none."""
        carried = False
        for end, pipe in ((self.a, self.to_a), (self.b, self.to_b)):
            if not pipe.broken and (data := pipe.carry(most)):
                carried = True
                end.link.receive(data, self.now)
        return carried

    def settle(self, most: int = 1 << 30) -> None:
        self.turn()
        while self.carry(most):
            self.turn()

    def wait(self, seconds: float) -> None:
        """Let time pass, with the timers of both ends."""
        end = self.now + seconds
        self.turn()
        while (due := min(self.a.link.deadline, self.b.link.deadline)) <= end:
            self.now = max(self.now, due)
            self.a.link.tick(self.now)
            self.b.link.tick(self.now)
            self.turn()
        self.now = end
