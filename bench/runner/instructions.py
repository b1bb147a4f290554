"""Instructions per message on fixed conversations, counted by callgrind: the same on a busy machine as on a quiet one.

    node under valgrind ◀─ one conversation at a time, in blocks: a block is sent at once, the next one when all that
                           it causes has arrived; counting is on from the second round of a conversation on

A figure is all that the node's process executes, threads and kernel-free library code included, divided by the
messages of the conversation. So it shows what a change costs although times are noise; it does not show waiting,
system calls and caches, for which the other benchmarks are there.

`counts.json` keeps the figures that are expected; `--check` ends with 1 if one of them has grown by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import StrEnum, auto
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Self

from .cluster import redis
from .machine import BENCH, REPOSITORY, BenchError, exit_code, free_port
from .report import markdown_table

INSTRUCTIONS: Final = BENCH / "instructions"
COUNTS: Final = INSTRUCTIONS / "counts.json"
TOLERANCE: Final = 0.05  #: by which a path may grow before `--check` ends with 1
PATIENCE: Final = 600.0  #: seconds for one block, and for the start: valgrind is fifty times slower, machines are busy
PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP = 0x30, 0x40, 0x50, 0x62, 0x70
LASTING: Final = 4  #: protocol level of clients whose sessions last: 3.1.1 without clean session


def _packet(first: int, body: bytes) -> bytes:
    length, rest = bytearray(), len(body)
    while True:
        rest, digit = divmod(rest, 128)
        length.append(digit | 0x80 if rest else digit)
        if not rest:
            return bytes([first, *length]) + body


def _text(text: str) -> bytes:
    return struct.pack("!H", len(text)) + text.encode()


def _publish(topic: str, payload: bytes, qos: int, packet_id: int) -> bytes:
    number = struct.pack("!H", packet_id) if qos else b""
    return _packet(PUBLISH | qos << 1, _text(topic) + number + payload)


class Client:
    """A client that sends blocks and counts what comes; it answers nothing by itself."""

    def __init__(self, port: int, name: str, *, lasting: bool = False) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        flags = 0 if lasting else 2
        self.send(_packet(0x10, _text("MQTT") + bytes([LASTING, flags]) + struct.pack("!H", 0) + _text(name)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self, count: int) -> list[tuple[int, bytes]]:
        """The next packets, as (first byte, body)."""
        packets: list[tuple[int, bytes]] = []
        buffer, at = self._buffer, 0
        while len(packets) < count:
            length, shift, end = 0, 0, at + 1
            while end < len(buffer):
                length |= (buffer[end] & 0x7F) << shift
                shift, end = shift + 7, end + 1
                if buffer[end - 1] < 0x80:
                    break
            else:
                end = len(buffer) + 1
            if end + length <= len(buffer):
                packets.append((buffer[at], bytes(buffer[end : end + length])))
                at = end + length
                continue
            del buffer[:at]
            at = 0
            got = self._socket.recv(1 << 18)
            if not got:
                raise BenchError("the node closed a connection of the conversation")
            buffer += got
        del buffer[:at]
        return packets

    def expect(self, first: int, count: int = 1) -> list[tuple[int, bytes]]:
        packets = self.receive(count)
        wrong = {hex(found) for found, _ in packets if found & 0xF0 != first & 0xF0}
        if wrong:
            raise BenchError(f"expected packets {first:#x}, got {', '.join(sorted(wrong))}")
        return packets

    def connected(self) -> Self:
        if self.expect(0x20)[0][1][1:2] != b"\0":
            raise BenchError("the node refused a client")
        return self

    def subscribe(self, *filters: str, qos: int = 1) -> None:
        body = b"".join(_text(one) + bytes([qos]) for one in filters)
        self.send(_packet(0x82, b"\0\1" + body))
        granted = self.expect(0x90)[0][1][2:]
        if any(code > 2 for code in granted):
            raise BenchError(f"a subscription was refused: {granted!r}")

    def take(self, count: int) -> None:
        """Receive PUBLISH packets, and acknowledge all of them at once as their QoS asks."""
        packets = self.expect(PUBLISH, count)
        answers, received = bytearray(), 0
        for first, body in packets:
            qos = first >> 1 & 3
            if qos:
                (length,) = struct.unpack_from("!H", body)
                answers += _packet(PUBACK if qos == 1 else PUBREC, body[2 + length : 4 + length])
                received += qos == 2
        if answers:
            self.send(bytes(answers))
        if received:
            self.send(b"".join(_packet(PUBCOMP, body) for _, body in self.expect(PUBREL, received)))

    def acknowledged(self, count: int, qos: int) -> None:
        """Wait until that many messages of this publisher are acknowledged."""
        if qos == 1:
            self.expect(PUBACK, count)
        elif qos == 2:
            self.send(b"".join(_packet(PUBREL, body) for _, body in self.expect(PUBREC, count)))
            self.expect(PUBCOMP, count)


Round = Callable[[], int]  #: one round of a conversation; tells how many messages it has had
PAYLOAD: Final = b"x" * 64
BLOCK: Final = 200  #: messages that are sent at once


@contextmanager
def _pair(port: int, qos: int) -> Iterator[Round]:
    with Client(port, "sub").connected() as subscriber, Client(port, "pub").connected() as publisher:
        subscriber.subscribe("pair/one", qos=qos)
        block = b"".join(_publish("pair/one", PAYLOAD, qos, number) for number in range(1, BLOCK + 1))

        def play() -> int:
            blocks = 10 if qos else 100  # timers run by the clock, and are counted too
            for _ in range(blocks):
                publisher.send(block)
                subscriber.take(BLOCK)
                publisher.acknowledged(BLOCK, qos)
            return blocks * BLOCK

        yield play


@contextmanager
def _single(port: int) -> Iterator[Round]:
    """One message per wake-up."""
    with Client(port, "sub").connected() as subscriber, Client(port, "pub").connected() as publisher:
        subscriber.subscribe("pair/single")

        def play() -> int:
            for number in range(1, 1001):
                publisher.send(_publish("pair/single", PAYLOAD, 1, number))
                subscriber.take(1)
                publisher.acknowledged(1, 1)
            return 1000

        yield play


@contextmanager
def _clients(port: int, name: str, count: int) -> Iterator[list[Client]]:
    with ExitStack() as opened:
        yield [opened.enter_context(Client(port, f"{name}{number}").connected()) for number in range(count)]


@contextmanager
def _one_to_many(port: int, qos: int) -> Iterator[Round]:
    with _clients(port, "sub", 100) as subscribers, Client(port, "pub").connected() as publisher:
        for subscriber in subscribers:
            subscriber.subscribe("many/one", qos=qos)
        block = b"".join(_publish("many/one", PAYLOAD, qos, number) for number in range(1, 21))

        def play() -> int:
            publisher.send(block)
            for subscriber in subscribers:
                subscriber.take(20)
            publisher.acknowledged(20, qos)
            return 20 * len(subscribers)

        yield play


@contextmanager
def _many_to_one(port: int, qos: int) -> Iterator[Round]:
    with Client(port, "sub").connected() as subscriber, _clients(port, "pub", 50) as publishers:
        subscriber.subscribe("one/+", qos=qos)
        blocks = [b"".join(_publish(f"one/{at}", PAYLOAD, qos, number) for number in range(1, 11)) for at in range(50)]

        def play() -> int:
            for publisher, block in zip(publishers, blocks, strict=True):
                publisher.send(block)
            subscriber.take(500)
            for publisher in publishers:
                publisher.acknowledged(10, qos)
            return 500

        yield play


@contextmanager
def _wildcards(port: int) -> Iterator[Round]:
    """A thousand filters with wildcards, and topics that differ: half of them are new in each round."""
    with _clients(port, "sub", 100) as subscribers, Client(port, "pub").connected() as publisher:
        for at, subscriber in enumerate(subscribers):
            subscriber.subscribe(*(f"wild/{at}/{number}/+/#" for number in range(10)), qos=0)
        fresh = iter(range(1 << 30))

        def play() -> int:
            topics = [f"wild/{at}/{number}/t/{number % 2 and next(fresh)}" for at in range(100) for number in range(10)]
            publisher.send(b"".join(_publish(topic, PAYLOAD, 0, 0) for topic in topics))
            for subscriber in subscribers:
                subscriber.take(10)
            return len(topics)

        yield play


@contextmanager
def _connects(port: int, subscribe: bool) -> Iterator[Round]:
    def play() -> int:
        for number in range(100):
            with Client(port, f"fleet-{number}").connected() as client:
                if subscribe:
                    client.subscribe(f"fleet/{number}/+")
                client.send(b"\xe0\0")
        return 100

    yield play


def _sleeper(port: int) -> Client:
    return Client(port, "sleeper", lasting=True).connected()


@contextmanager
def _offline(port: int, drain: bool) -> Iterator[Round]:
    """A durable session that sleeps while it is published to, or comes back and takes it."""
    with _sleeper(port) as sleeper:
        sleeper.subscribe("offline/one")
        sleeper.send(b"\xe0\0")
    with Client(port, "pub").connected() as publisher:
        block = b"".join(_publish("offline/one", PAYLOAD, 1, number) for number in range(1, BLOCK + 1))

        def fill() -> None:
            for _ in range(4):
                publisher.send(block)
                publisher.acknowledged(BLOCK, 1)

        def empty() -> None:
            with _sleeper(port) as sleeper:
                for _ in range(8):
                    sleeper.take(BLOCK // 2)
                sleeper.send(b"\xe0\0")

        def play() -> int:
            COUNTING.within(fill, not drain)
            COUNTING.within(empty, drain)
            return 4 * BLOCK

        yield play


@contextmanager
def _log(port: int, topic: str, filter_: str) -> Iterator[Round]:
    """Publish to a queue or stream whose consumer is connected."""
    with Client(port, "consumer").connected() as consumer, Client(port, "pub").connected() as publisher:
        consumer.subscribe(filter_)
        block = b"".join(_publish(topic, PAYLOAD, 1, number) for number in range(1, BLOCK + 1))

        def play() -> int:
            for _ in range(4):
                publisher.send(block)
                for _ in range(4):  # a source goes on by acknowledgements: the buffer is smaller than the window
                    consumer.take(BLOCK // 4)
                publisher.acknowledged(BLOCK, 1)
            return 4 * BLOCK

        yield play


@contextmanager
def _compacted(port: int) -> Iterator[Round]:
    """Values of fifty keys for a consumer that is connected."""
    with Client(port, "car", lasting=True).connected() as car, Client(port, "pub").connected() as publisher:
        car.subscribe("$ECQ/car/#")
        block = b"".join(_publish(f"$ECQ/w/car/key{number}", PAYLOAD, 1, number) for number in range(1, 51))

        def play() -> int:
            for _ in range(4):
                publisher.send(block)
                car.take(50)
                publisher.acknowledged(50, 1)
            return 200

        yield play


@contextmanager
def _vehicles(port: int) -> Iterator[Round]:
    """Batches to fifty vehicles that are connected; each acknowledges at once."""
    vins = [f"1M8GDM9A0KP{number:06d}" for number in range(50)]
    with ExitStack() as opened:
        cars = [opened.enter_context(Client(port, vin, lasting=True).connected()) for vin in vins]
        for vin, car in zip(vins, cars, strict=True):
            car.subscribe(f"agent/{vin}/proxy/request/+")
        platform = opened.enter_context(Client(port, "platform").connected())
        requests = iter(range(1 << 30))

        def play() -> int:
            for _ in range(4):
                body = json.dumps({"ids": vins, "request_id": f"task{next(requests)}", "data": "x" * 64}).encode()
                platform.send(_publish("$SDV-FANOUT", body, 1, 1))
                for car in cars:
                    car.take(1)
                platform.acknowledged(1, 1)
            return 4 * len(vins)

        yield play


@contextmanager
def _retained(port: int) -> Iterator[Round]:
    with Client(port, "pub").connected() as publisher:
        block = b"".join(
            _packet(PUBLISH | 3, _text(f"kept/{number}") + struct.pack("!H", number) + PAYLOAD)
            for number in range(1, BLOCK + 1)
        )

        def play() -> int:
            publisher.send(block)
            publisher.acknowledged(BLOCK, 1)
            return BLOCK

        yield play


#: What is counted, in this order: name, what one message is, and the conversation.
PATHS: Final[dict[str, tuple[str, Callable[[int], AbstractContextManager[Round]]]]] = {
    "pair-q0": ("message, one publisher, one subscriber", lambda port: _pair(port, 0)),
    "pair-q1": ("the same at QoS 1", lambda port: _pair(port, 1)),
    "pair-q2": ("the same at QoS 2", lambda port: _pair(port, 2)),
    "single-q1": ("message, one per wake-up", _single),
    "one-to-100-q1": ("delivery", lambda port: _one_to_many(port, 1)),
    "50-to-one-q1": ("message", lambda port: _many_to_one(port, 1)),
    "wildcards-1000": ("message", _wildcards),
    "connect": ("connect and disconnect", lambda port: _connects(port, False)),
    "connect-subscribe": ("the same with a subscription", lambda port: _connects(port, True)),
    "retained-q1": ("retained message", _retained),
    "offline-fill": ("message to a session that sleeps", lambda port: _offline(port, False)),
    "offline-drain": ("message of a session that comes back", lambda port: _offline(port, True)),
    "queue-q1": ("message through a queue", lambda port: _log(port, "work/one", "$queue/work")),
    "stream-q1": ("message through a stream", lambda port: _log(port, "log/one", "$stream/log")),
    "compacted-q1": ("value of a compacted queue", _compacted),
    "vehicle": ("delivery of the fan-out, with receipts", _vehicles),
}


class Counting:
    """Switches counting of the node's process on and off."""

    def __init__(self) -> None:
        self._pid = 0
        self._out = Path()
        self._active = False  #: a round is counted

    def of(self, pid: int, out: Path) -> None:
        self._pid, self._out = pid, out

    def count(self, play: Round, rounds: int) -> float:
        """Play a conversation a few times; return the instructions per message."""
        self._start()
        self._active = True
        messages = sum(play() for _ in range(rounds))
        self._active = False
        self._stop()
        return self._total() / messages

    def within(self, play: Callable[[], None], counted: bool) -> None:
        """Play a part of a round; count it only if `counted`."""
        if counted or not self._active:
            play()
            return
        self._stop()
        play()
        self._start()

    def _start(self) -> None:
        self._control("--instr=on")
        self._control("--zero")

    def _stop(self) -> None:
        self._control("--dump=counted")  # what was counted is gone when counting ends
        self._control("--instr=off")

    def _control(self, *words: str) -> None:
        done = subprocess.run(
            ["callgrind_control", *words, str(self._pid)], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        if done.returncode:
            raise BenchError(f"callgrind_control {' '.join(words)}: {done.stdout}{done.stderr}".strip())

    def _total(self) -> int:
        dumps = list(self._out.parent.glob(f"{self._out.name}.*"))
        if not dumps:
            raise BenchError("valgrind has written no counts")
        total = 0
        for dump in dumps:
            found = re.search(r"^(?:totals|summary): (\d+)", dump.read_text(errors="replace"), re.MULTILINE)
            total += int(found[1]) if found else 0
            dump.unlink()
        return total


COUNTING: Final = Counting()


class Kind(StrEnum):
    """What the node is."""

    EMBEDDED = auto()  #: with the embedded store
    LONE = auto()  #: on Redis, without links
    MEMBER = auto()  #: on Redis, with links: a member of a cluster, alone


@contextmanager
def _node(tree: Path, python: Path, folder: Path, kind: Kind) -> Iterator[int]:
    """Run a node under valgrind; give its port."""
    with ExitStack() as stack:
        line: list[str] = []
        config = (INSTRUCTIONS / "motorcade.toml").read_text()
        if kind is not Kind.EMBEDDED:
            line = ["--store", stack.enter_context(redis())[0]]
        if kind is Kind.MEMBER:
            config += f'\n[cluster]\nbind = "127.0.0.1:{free_port()}"\nlease = 60\nview_lease = 90\n'
        (folder / "motorcade.toml").write_text(config)
        yield stack.enter_context(_serving(tree, python, folder, line))


@contextmanager
def _serving(tree: Path, python: Path, folder: Path, more: Sequence[str]) -> Iterator[int]:
    port = free_port()
    out = folder / "callgrind.out"
    line = [
        *("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}", "--quiet"),
        *(str(python), "-m", "motorcade", "serve", "--config", str(folder / "motorcade.toml")),
        *("--mqtt", f"127.0.0.1:{port}", "--ws", "off", "--http", "off", "--data", str(folder / "data")),
        *more,
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONHASHSEED": "0"}
    log = folder / "log"
    with log.open("wb") as output:
        node = subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + PATIENCE
        while b" ready " not in log.read_bytes():
            if node.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"the node did not start under valgrind:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)
        COUNTING.of(node.pid, out)
        yield port
    finally:
        node.send_signal(signal.SIGKILL)
        node.wait()


def measure(
    tree: Path, names: Iterable[str], rounds: int, python: Path, kind: Kind = Kind.EMBEDDED
) -> dict[str, float]:
    """Count the instructions per message of some paths, on a node of its own for each."""
    counts: dict[str, float] = {}
    for name in names:
        with (
            TemporaryDirectory(prefix="motorcade-instructions-") as folder,
            _node(tree, python, Path(folder), kind) as port,
            PATHS[name][1](port) as play,
        ):
            play()
            play()
            counts[name] = COUNTING.count(play, rounds)
        print(f"{name}: {counts[name]:,.0f} instructions per {PATHS[name][0]}", file=sys.stderr, flush=True)
    return counts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/run instructions",
        description="Counts the instructions per message of the most important paths, with valgrind.",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=PATHS, help=f"these paths: {', '.join(PATHS)}")
    parser.add_argument("--tree", type=Path, default=REPOSITORY, help="sources to measure (this repository)")
    parser.add_argument("--beside", type=Path, metavar="TREE", help="other sources to measure in the same run")
    parser.add_argument(
        "--member", action="store_true", help="a member of a cluster, alone, beside a node without links; both on Redis"
    )
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each conversation that are counted (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there")
    parser.add_argument(
        "--check", action="store_true", help=f"end with 1 if a path has grown by more than {TOLERANCE:.0%}%"
    )
    parser.add_argument("--keep", action="store_true", help="keep the counts of this run as those that are expected")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return exit_code("bench/run instructions", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if not shutil.which("callgrind_control"):
        raise BenchError("valgrind is not installed; on Debian: `apt-get install valgrind` as root")
    python = REPOSITORY / ".venv" / "bin" / "python"
    names = args.only or list(PATHS)
    tree = args.tree.resolve()
    counts = measure(tree, names, args.rounds, python, Kind.MEMBER if args.member else Kind.EMBEDDED)
    if args.member:
        others, title = measure(tree, names, args.rounds, python, Kind.LONE), "lone node"
    elif args.beside:
        others, title = measure(args.beside.resolve(), names, args.rounds, python), "beside"
    else:
        others, title = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}, "expected"
    rows = []
    grown = []
    for name, count in counts.items():
        other = others.get(name)
        ratio = count / other if other else None
        rows.append(
            [name, PATHS[name][0], f"{count:,.0f}", f"{other:,.0f}" if other else "–", f"{ratio:.3f}" if ratio else "–"]
        )
        if ratio and ratio > 1 + TOLERANCE:
            grown.append(f"{name} ({ratio - 1:+.1%})")
    print("\n".join(markdown_table(["path", "one is", "instructions", title, "ratio"], rows)))
    if args.json:
        args.json.write_text(json.dumps({name: round(count) for name, count in counts.items()}, indent=2) + "\n")
    if args.keep and not args.member:
        kept = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
        COUNTS.write_text(
            json.dumps({**kept, **{name: round(count) for name, count in counts.items()}}, indent=2) + "\n"
        )
    if args.check and grown:
        print(
            f"more instructions than expected: {', '.join(grown)}. If that has to be: bench/run instructions --keep",
            file=sys.stderr,
        )
        return 1
    return 0
