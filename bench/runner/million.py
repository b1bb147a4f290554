"""A million messages for ten thousand sleeping sessions: memory, disk, restart after a kill, order and loss.

    asleep   all sessions connect, subscribe and leave
    fill     publishers send until all is acknowledged
    restart  SIGKILL, then the same files again, until the node says `ready`
    drain    all sessions come back and get everything, in order; then they come once more and get nothing

The broker's resident memory is sampled all the time, and its own high-water mark (VmHWM) is read at the end of each
step, so that nothing between two samples is missed. While queues are filled and drained, a client that has nothing to
do with them sends PINGREQ a hundred times a second, and sees what the node's own histogram should tell.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

from .brokers import BROKERS, Broker, Running
from .lag import Lag
from .machine import BUILD, BenchError, alone, compile_generator, describe, free_port, raise_open_files
from .phases import converse

MIB = 1024 * 1024
SAMPLE_SECONDS = 0.05
PING_SECONDS = 0.01
PING_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)  #: as the node's own histogram has them
PATIENCE = 900.0  #: seconds for the whole, and for a restart
RESIDENT_BAR = 500 * MIB

PROBE_CONNECT = b"\x10\x11\x00\x04MQTT\x04\x02\x00\x00\x00\x05probe"
PINGREQ, PINGRESP = b"\xc0\x00", b"\xd0\x00"


@dataclass(slots=True)
class Step:
    """What was seen while one thing was done."""

    name: str
    seconds: float = 0.0
    messages: int = 0
    resident: int = 0  #: bytes, the most
    resident_end: int = 0  #: bytes, at its end
    disk: int = 0  #: bytes at its end
    lag: Lag | None = None
    pings: Lag | None = None


@dataclass(slots=True)
class Outcome:
    """One variant on one broker."""

    variant: str
    broker: str
    steps: list[Step]
    said: dict[str, dict[str, Any]]  #: the generator's lines by phase
    samples: list[tuple[float, int]] = field(default_factory=list)  #: (seconds since the start, resident bytes)

    @property
    def resident(self) -> int:
        return max(step.resident for step in self.steps)

    @property
    def flaws(self) -> list[str]:
        """What must not happen; empty is good."""
        drain, fill = self.said["drain"], self.said["fill"]
        found = {key: drain[key] for key in ("lost", "reordered", "unexpected", "left", "disconnects", "conn_fail")}
        found["unacknowledged"] = fill["unacked"]
        found["forgotten sessions"] = drain["clients"] - drain["session_present"]
        return [f"{key}: {value}" for key, value in found.items() if value] + (["timed out"] * drain["timed_out"])


class Watch(Thread):
    """Samples the broker's resident memory; knows which step is under way."""

    def __init__(self, running: Running) -> None:
        super().__init__(daemon=True)
        self.running = running
        self.samples: list[tuple[float, int]] = []
        self._begin = time.monotonic()
        self._mark = 0
        self._ended = Event()

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.look()

    def look(self) -> int:
        resident = _resident(self.running.pid)
        if resident:  # between a kill and the next start there is nobody
            self.samples.append((round(time.monotonic() - self._begin, 3), resident))
        return resident

    def end_step(self, step: Step) -> None:
        """Write down what was seen since the last call."""
        step.resident_end = self.look()
        step.resident = max(_high_water(self.running.pid), *(resident for _, resident in self.samples[self._mark :]))
        step.disk = _folder_bytes(self.running.folder)
        self._mark = len(self.samples)

    def end(self) -> None:
        self._ended.set()
        self.join()


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError):
        return 0


def _high_water(pid: int) -> int:
    """The most resident memory since the last call, by the kernel's own account."""
    status = Path(f"/proc/{pid}/status").read_text()
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # proc(5): sets the mark back to what is resident now
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def _folder_bytes(folder: Path) -> int:
    """What the files take on disk. They come and go while we look."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(path) / name).stat().st_blocks * 512
            except OSError:
                continue
    return total


class Pings(Thread):
    """A client that only asks whether the broker is there, and how long the answer takes."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._counts = [0] * (len(PING_BOUNDS) + 1)
        self._seconds = 0.0
        self._ended = Event()
        self._socket = socket.create_connection(("127.0.0.1", port), 10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(60)
        self._socket.sendall(PROBE_CONNECT)
        if self._socket.recv(4) != b"\x20\x02\x00\x00":
            raise BenchError("the broker does not let the probe in")

    def run(self) -> None:
        while not self._ended.wait(PING_SECONDS):
            sent = time.monotonic()
            try:
                self._socket.sendall(PINGREQ)
                answered = self._socket.recv(2) == PINGRESP
            except OSError:
                answered = False
            if not answered:
                self._seconds = float("nan")  # shows in the report: the probe was sent away
                return
            took = time.monotonic() - sent
            self._seconds += took
            self._counts[bisect_left(PING_BOUNDS, took)] += 1

    def end(self) -> Lag:
        self._ended.set()
        self.join()
        self._socket.close()
        total, buckets = 0, []
        for bound, count in zip((*PING_BOUNDS, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return Lag(tuple(buckets), self._seconds)


class Million:
    """One variant on one broker, from the first session to the last message."""

    def __init__(self, running: Running, end: signal.Signals) -> None:
        self.running = running
        self.end = end
        self.steps: list[Step] = []
        self.watch = Watch(running)
        self._lag: Lag | None = None
        self._pings: Pings | None = None

    def run(self, command: Sequence[str], variant: str) -> Outcome:
        self.watch.start()
        try:
            said = converse(command, PATIENCE, self._between)
            self._close("drain", said["drain"]["secs"], said["drain"]["received"])
        finally:
            self.watch.end()
        for step in self.steps:
            if step.name in said:
                step.seconds = said[step.name]["secs"]
        self.steps[1].messages = said["fill"]["queued"]
        return Outcome(variant, self.running.broker.name, self.steps, said, self.watch.samples)

    def _between(self, phase: str) -> str:
        """The generator waits: write down the step that ends, begin the next. Returns the broker's pid."""
        self._close(phase)
        if phase == "fill":
            seconds = self.running.restart(self.end, PATIENCE)
            self._close("restart", seconds)
        self._lag = self._read_lag()
        self._pings = Pings(self.running.port)
        self._pings.start()
        return str(self.running.pid)

    def _close(self, name: str, seconds: float = 0.0, messages: int = 0) -> None:
        step = Step(name, seconds, messages)
        if self._pings is not None:
            step.pings = self._pings.end()
            self._pings = None
        lag = self._read_lag() if self._lag else None
        if lag and self._lag:
            step.lag = lag.since(self._lag)
        self._lag = None
        self.watch.end_step(step)
        self.steps.append(step)

    def _read_lag(self) -> Lag | None:
        address = self.running.control_address
        return Lag.read(address) if address else None


def _mib(count: int) -> str:
    return f"{count / MIB:.0f} MiB"


def report(outcome: Outcome) -> str:
    """A small table, the verdict, the histograms."""
    lines = [
        f"## {outcome.variant}, {outcome.broker}",
        "",
        "| step | seconds | messages | messages/s | resident, most | resident, at its end | on disk |",
        "|---|---|---|---|---|---|---|",
    ]
    for step in outcome.steps:
        rate = f"{step.messages / step.seconds:.0f}" if step.messages and step.seconds else "–"
        messages = str(step.messages) if step.messages else "–"
        cells = [step.name, f"{step.seconds:.2f}", messages, rate, _mib(step.resident), _mib(step.resident_end)]
        lines.append("| " + " | ".join([*cells, _mib(step.disk)]) + " |")
    drain = outcome.said["drain"]
    counts = {
        "lost": drain["lost"],
        "out of order": drain["reordered"],
        "twice": drain["dup"],
        "wrong": drain["unexpected"],
        "again after all was acknowledged": drain["left"],
    }
    bar = "met" if outcome.resident < RESIDENT_BAR else "MISSED"
    lines += [
        "",
        f"- received {drain['received']} of {drain['expected']}; {', '.join(f'{k} {v}' for k, v in counts.items())}",
        f"- resident memory: {_mib(outcome.resident)} at most; bar: below {_mib(RESIDENT_BAR)}: {bar}",
        f"- verdict: {'; '.join(outcome.flaws) or 'complete and in order'}",
        "",
    ]
    for step in outcome.steps:
        for title, lag in (("how late the event loop was", step.lag), ("PINGREQ to PINGRESP", step.pings)):
            if lag is not None:
                lines += [f"{step.name}, {title}:", "", "```text", *lag.drawing(), "```", ""]
    return "\n".join(lines)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Everything, with all samples of memory."""
    steps = [
        asdict(step) | {"lag": step.lag and step.lag.as_json(), "pings": step.pings and step.pings.as_json()}
        for step in outcome.steps
    ]
    return {
        "variant": outcome.variant,
        "broker": outcome.broker,
        "steps": steps,
        "resident_max": outcome.resident,
        "flaws": outcome.flaws,
        "generator": outcome.said,
        "resident_samples": outcome.samples,
    }


def _parser(brokers: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/offline/million",
        description="Fills queues of sleeping sessions, kills the node, starts it again and drains them.",
    )
    parser.add_argument("--small", action="store_true", help="500 sessions, 20 000 messages: to try it out")
    parser.add_argument("--sessions", type=int, metavar="N", help="sleeping sessions (10000)")
    parser.add_argument("--each", type=int, metavar="N", help="messages for each of them (100)")
    parser.add_argument("--variant", choices=("own", "shared", "both"), default="both", help="topics (both)")
    parser.add_argument("--size", type=int, default=200, metavar="BYTES", help="payload (200)")
    parser.add_argument("--pubs", type=int, default=10, metavar="N", help="publishers, 100 unacknowledged each (10)")
    parser.add_argument("--compressible", action="store_true", help="payloads that differ in their first bytes only")
    parser.add_argument("--broker", choices=brokers, default="motorcade-safe", help="what is measured")
    parser.add_argument("--end", choices=("KILL", "TERM"), default="KILL", help="the signal that ends it (KILL)")
    parser.add_argument("--cores", default="0,1", metavar="B,G", help="cores of broker and generator (0,1)")
    parser.add_argument("--json", type=Path, default=BUILD / "million.json", metavar="FILE", help="everything seen")
    return parser


@contextmanager
def _started(broker: Broker, core: int) -> Iterator[Running]:
    running = Running(broker, free_port(), core)
    try:
        yield running
    finally:
        running.stop()


def _measure(args: argparse.Namespace, broker: Broker) -> list[Outcome]:
    broker_core, generator_core = (int(core) for core in args.cores.split(","))
    sessions = args.sessions or (500 if args.small else 10_000)
    each = args.each or (40 if args.small else 100)
    broker.prepare(install=False)
    raise_open_files()
    found = []
    with alone():
        generator = compile_generator()
        for variant in ("own", "shared") if args.variant == "both" else (args.variant,):
            print(f"{variant}: {sessions} sessions, {each} messages each, {broker.name}", file=sys.stderr, flush=True)
            with _started(broker, broker_core) as running:
                command = ["taskset", "-c", str(generator_core), str(generator), "offline", "127.0.0.1"]
                command += [str(running.port), "--broker-pid", str(running.pid), "--n", str(sessions)]
                command += ["--per", str(each), "--pubs", str(args.pubs), "--size", str(args.size), "--window", "100"]
                command += ["--idle", "60", "--keep-sessions", "--again", *(["--shared"] * (variant == "shared"))]
                command += ["--compressible"] * args.compressible
                found.append(Million(running, signal.Signals[f"SIG{args.end}"]).run(command, variant))
            print(report(found[-1]), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Ends with 1 when a message was lost, came in the wrong order or to the wrong client."""
    brokers = {broker.name: broker for product in BROKERS.values() for broker in product.stored}
    args = _parser(list(brokers)).parse_args(arguments)
    try:
        outcomes = _measure(args, brokers[args.broker])
    except BenchError as error:
        print(f"bench/offline/million: {error}", file=sys.stderr)
        return 2
    args.json.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": describe(), "outcomes": [as_json(outcome) for outcome in outcomes]}
    args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(outcome.flaws for outcome in outcomes) else 0
