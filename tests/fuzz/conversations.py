"""What the fuzzer plays: conversations of up to four clients with the node, their files, and how they are damaged.

A file has one event per line, `CLIENT WHAT  # comment`, where WHAT is bytes in hexadecimal or a word:

    A 10 0d 00 04 ...   client A sends these bytes (one packet per line, so that packets can be moved about);
                        62*5000 is the byte 62 five thousand times
    A close | half | reset      A ends its connection
    A full | drain              A's socket takes no more bytes, takes them again
    A late SECONDS              the node looks at A's connection, as if so much time had passed
    A expire SECONDS            the node looks for sessions and wills that are due by then
    A recheck                   access rules have changed

A client whose connection has ended and who sends again has connected anew. A and B acknowledge messages by themselves,
C does not. D speaks WebSocket: its bytes are those of HTTP and of frames, masked with zeros so that they can be read.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random
from typing import NamedTuple

CORPUS = Path(__file__).with_name("corpus")

CLIENTS = "ABCD"
WORDS = ("close", "half", "reset", "full", "drain", "late 1", "late 100000", "expire 1", "expire 100000", "recheck")

#: Numbers at the edges of the formats.
EDGES = (0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 63, 64, 65, 126, 127, 128, 129, 253, 254, 255)
STRINGS = (
    b"+", b"#", b"/", b"$share/g/", b"$SYS/#", b"$", b"\0", b"\xc0\x80", b"\xed\xa0\x80", b"\xff", b"\xef\xbb\xbf",
    b"wait/", b"refuse/", b"rewrite/", b"forbidden/", b"mallory", b"steps",
    b"\xff\xff\xff\x7f", b"\x80\x80\x80\x80\x01", b"\x00\x00", b"\xff\xff",
    b"\x26\x00\x01k\x00\x01v", b"\x23\x00\x01", b"\x0b\x01", b"\xc0\x00",
)  # fmt: skip


class Event(NamedTuple):
    """One line."""

    client: str
    word: str  #: "" for bytes
    data: bytes = b""


Conversation = tuple[Event, ...]


def read(text: str) -> Conversation:
    """The conversation in a file's text."""
    events: list[Event] = []
    for line in text.splitlines():
        client, _, what = line.partition("#")[0].strip().partition(" ")
        if client:
            events.append(_event(client, what.strip()))
    return tuple(events)


def _event(client: str, what: str) -> Event:
    if what.split(maxsplit=1)[0] in ("close", "half", "reset", "full", "drain", "late", "expire", "recheck"):
        return Event(client, what)
    return Event(client, "", b"".join(_bytes(token) for token in what.split()))


def _bytes(token: str) -> bytes:
    byte, _, times = token.partition("*")
    return bytes.fromhex(byte) * int(times or 1)


def write(conversation: Conversation) -> str:
    """The text of a file with a conversation."""
    return "".join(f"{event.client} {event.word or hexadecimal(event.data)}\n" for event in conversation)


def hexadecimal(data: bytes) -> str:
    """Bytes as they stand in a file."""
    runs = ((byte, len(list(same))) for byte, same in itertools.groupby(data))
    return " ".join(f"{byte:02x}*{n}" if n > 16 else " ".join([f"{byte:02x}"] * n) for byte, n in runs)


def corpus() -> dict[str, Conversation]:
    """All seeds by name."""
    return {path.stem: read(path.read_text()) for path in sorted(CORPUS.glob("*.txt"))}


# -- damage


class Mutator:
    """Makes new conversations out of the seeds. The same random numbers give the same conversations."""

    def __init__(self, seeds: list[Conversation], random: Random) -> None:
        self._seeds = seeds
        self._packets = sorted({event.data for seed in seeds for event in seed if event.data})
        self._random = random

    def make(self) -> Conversation:
        """A conversation nobody has seen."""
        random = self._random
        events = list(random.choice(self._seeds))
        if random.random() < 0.2:
            events = self._spliced(events)
        for _ in range(random.choice((0, 1, 1, 2, 3, 5, 8))):
            self._change_events(events)
        for _ in range(random.choice((0, 1, 1, 1, 2, 4))):
            self._change_bytes(events)
        if random.random() < 0.3:
            events = self._recut(events)
        return tuple(events[:200])

    def _spliced(self, events: list[Event]) -> list[Event]:
        other = self._random.choice(self._seeds)
        cut = self._random.randrange(len(events) + 1)
        return events[:cut] + list(other[self._random.randrange(len(other)) :])

    def _change_events(self, events: list[Event]) -> None:
        random = self._random
        at = random.randrange(len(events) + 1)
        choice = random.randrange(7)
        client = random.choice(CLIENTS)
        if choice == 0 or not events:
            events.insert(at, Event(client, "", random.choice(self._packets)))
        elif choice == 1:
            events.insert(at, Event(client, random.choice(WORDS)))
        elif choice == 2:
            del events[at % len(events)]
        elif choice == 3:
            events.insert(at, events[at % len(events)])
        elif choice == 4:
            other = random.randrange(len(events))
            at %= len(events)
            events[at], events[other] = events[other], events[at]
        elif choice == 5:
            at %= len(events)
            events[at] = events[at]._replace(client=client)
        else:
            event = events[at % len(events)]
            events[at:at] = [event] * random.choice((2, 5, 20, 40))

    def _change_bytes(self, events: list[Event]) -> None:
        places = [i for i, event in enumerate(events) if event.data]
        if not places:
            return
        at = self._random.choice(places)
        events[at] = events[at]._replace(data=self._damaged(events[at].data))

    def _damaged(self, data: bytes) -> bytes:
        random = self._random
        raw = bytearray(data)
        at = random.randrange(len(raw))
        choice = random.randrange(10)
        if choice == 0:
            raw[at] ^= 1 << random.randrange(8)
        elif choice == 1:
            raw[at] = random.choice(EDGES)
        elif choice == 2:
            raw[at] = random.randrange(256)
        elif choice == 3:
            del raw[at : at + random.choice((1, 1, 2, 4, 16))]
        elif choice == 4:
            raw[at:at] = random.choice(STRINGS)
        elif choice == 5:
            raw[at : at + 2] = random.choice(STRINGS)
        elif choice == 6:
            raw[at:at] = random.randbytes(random.choice((1, 2, 4, 16)))
        elif choice == 7:
            raw[at:at] = raw[at : at + random.choice((1, 4, 16, 64))] * random.choice((1, 1, 2, 100))
        elif choice == 8:
            del raw[at:]
        else:
            return bytes(raw) + random.choice(self._packets)
        if random.random() < 0.7:  # otherwise most damage would stop at the length
            return self._fitting(raw)
        return bytes(raw)

    @staticmethod
    def _fitting(raw: bytearray) -> bytes:
        """The same packet with a remaining length that is true, if its length had been readable."""
        for at in range(1, min(len(raw), 5)):
            if raw[at] < 0x80:
                body = raw[at + 1 :]
                length = len(body)
                digits = bytearray()
                while length >= 0x80:
                    digits.append(length & 0x7F | 0x80)
                    length >>= 7
                digits.append(length)
                return bytes(raw[:1] + digits + body)
        return bytes(raw)

    def _recut(self, events: list[Event]) -> list[Event]:
        """The same bytes in other pieces: packets in halves, in single bytes, or several at once."""
        random = self._random
        out: list[Event] = []
        for event in events:
            last = out[-1] if out else None
            if event.data and last is not None and last.data and last.client == event.client and random.random() < 0.5:
                out[-1] = event._replace(data=last.data + event.data)
            elif len(event.data) > 1 and random.random() < 0.3:
                step = random.choice((1, 2, max(1, len(event.data) // 2)))
                step = max(step, len(event.data) // 64)
                out += [event._replace(data=event.data[i : i + step]) for i in range(0, len(event.data), step)]
            else:
                out.append(event)
        return out
