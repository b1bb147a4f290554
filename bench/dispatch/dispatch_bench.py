"""Messages a second from one Redis stream to another: through leader and workers, and through a bare redis-py loop.

    drain   everything is in the stream before anybody begins
    live    a publisher writes as fast as it can while the others work, on the same cores
    waits   the handler waits 5 ms for each message, as one does that asks some service

A rate is the number of entries divided by the time between the first and the last one in the target stream, as the ids
that the server has given them tell: nobody has to look while it happens. Both sides read from and write to the same
server with the same messages and batch sizes, and take turns in every round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import redis

from runner.machine import BenchError, alone, describe, exact_cpu_seconds, free_port

HERE = Path(__file__).resolve().parent
MESSAGES, QUICK_MESSAGES = 500_000, 100_000
WAITING_MESSAGES = 20_000
ROUNDS = 3
BATCH = 500
WORKERS = (1, 2, 4)
PATIENCE = 180.0  # seconds
BAR, RATIO_BAR = 50_000, 1.0

SOURCE, TARGET, GROUP, FIELD = "messages:published", "messages:processed", "bare", "payload"
FILL = 1000  # entries in one pipeline

#: What a worker does with `waits`; written into a file that workers import.
WAITING_HANDLER = """
import asyncio


async def handle(message):
    await asyncio.sleep(0.005)
    return message
"""


@dataclass
class Sample:
    """One side once."""

    side: str
    case: str
    processes: int  #: workers, or bare loops
    count: int
    seconds: float
    cpu: dict[str, float] = field(default_factory=dict)  #: microseconds per message, by part

    @property
    def rate(self) -> float:
        return self.count / self.seconds


# -- the server and its messages


class Server:
    """A Redis server of its own, with an append-only file unless told otherwise."""

    def __init__(self, folder: Path, append_only: bool) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        line = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        line += ["--appendonly", "yes" if append_only else "no", "--maxmemory-policy", "noeviction"]
        # A rewrite of the file in the middle of a run would be that run's bad luck.
        line += ["--auto-aof-rewrite-percentage", "0"]
        self.process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
        self.client = redis.Redis("127.0.0.1", self.port)
        wait_until(self._answers, "redis-server answers")

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False

    def empty(self) -> None:
        self.client.flushall()

    def fill(self, count: int) -> None:
        for done in range(0, count, FILL):
            line = self.client.pipeline(transaction=False)
            for text in messages(min(FILL, count - done)):
                line.xadd(SOURCE, {FIELD: text})
            line.execute()

    def seconds(self) -> float:
        """Between the first and the last entry of the target."""
        first, last = self.client.xrange(TARGET, count=1)[0][0], self.client.xrevrange(TARGET, count=1)[0][0]
        return (int(last.split(b"-")[0]) - int(first.split(b"-")[0])) / 1000

    def stop(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait()


def messages(count: int) -> Iterator[str]:
    """As the publisher of the seed makes them: 54 characters."""
    for _ in range(count):
        yield f'{{"message_id": "{uuid.uuid4()}"}}'


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise BenchError(f"not within {PATIENCE:g} s: {what}")
        time.sleep(0.05)


# -- processes


def start(line: Sequence[str], **options: object) -> subprocess.Popen[str]:
    """Start a process and wait until it says that it is ready."""
    process = subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **options
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    if "ready" not in said:
        process.kill()
        raise BenchError(f"{' '.join(line)} did not start: {said.strip() or 'it said nothing'}")
    return process


@contextmanager
def running(line: Sequence[str], **options: object) -> Iterator[subprocess.Popen[str]]:
    process = start(line, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@dataclass
class Meter:
    """Processor time of some processes over a run."""

    parts: dict[str, list[int]]
    begun: dict[str, float] = field(default_factory=dict)

    def read(self) -> dict[str, float]:
        return {name: sum(exact_cpu_seconds(pid) for pid in pids) for name, pids in self.parts.items()}

    def begin(self) -> None:
        self.begun = self.read()

    def each(self, count: int) -> dict[str, float]:
        return {name: (used - self.begun[name]) / count * 1e6 for name, used in self.read().items()}


@dataclass
class Case:
    """What is measured."""

    name: str
    count: int
    batch: int
    folder: Path

    @property
    def live(self) -> bool:
        return self.name == "live"


def publisher(server: Server, case: Case) -> list[str]:
    return [sys.executable, str(HERE / "publisher.py"), server.url, SOURCE, FIELD, str(case.count)]


def measure_bare(server: Server, case: Case, processes: int) -> Sample:
    """So many loops side by side, members of one group."""
    server.empty()
    if not case.live:
        server.fill(case.count)
    server.client.xgroup_create(SOURCE, GROUP, id="0", mkstream=True)
    with ExitStack() as stack:
        feed = [stack.enter_context(running(publisher(server, case)))] if case.live else []
        loops = []
        for number in range(processes):
            words = [server.url, SOURCE, TARGET, GROUP, f"c{number}", str(case.batch), FIELD]
            loops.append(stack.enter_context(running([sys.executable, str(HERE / "bare_loop.py"), *words])))
        meter = Meter({"loops": [loop.pid for loop in loops], "redis": [server.process.pid]})
        meter.begin()
        for process in (*feed, *loops):
            go(process)
        wait_until(lambda: server.client.xlen(TARGET) >= case.count, "the bare loops are done")
        return Sample("bare", case.name, processes, case.count, server.seconds(), meter.each(case.count))


def measure_dispatch(server: Server, case: Case, processes: int) -> Sample:
    """One leader and so many workers, each a process with its defaults but for the batch size."""
    server.empty()
    if not case.live:
        server.fill(case.count)
    options = case.folder / "dispatch.toml"
    handler = 'handler = "bench_handler:handle"\n' if case.name == "waits" else ""
    options.write_text(f'[dispatch]\nredis = "{server.url}"\nbatch = {case.batch}\n{handler}')
    (case.folder / "bench_handler.py").write_text(WAITING_HANDLER)
    where = os.environ | {"PYTHONPATH": str(case.folder)}
    words = [sys.executable, "-m", "motorcade", "dispatch"]
    with ExitStack() as stack:
        feed = [stack.enter_context(running(publisher(server, case)))] if case.live else []
        workers = []
        for _ in range(processes):
            line = [*words, "worker", "--config", str(options), "--listen", f"127.0.0.1:{free_port()}"]
            workers.append(stack.enter_context(running(line, env=where)))
        meter = Meter({"workers": [worker.pid for worker in workers], "redis": [server.process.pid]})
        meter.begin()
        # The leader is last: with workers that wait for it and a full stream it begins at once.
        leader = stack.enter_context(running([*words, "leader", "--config", str(options)]))
        for process in feed:
            go(process)
        wait_until(lambda: server.client.xlen(TARGET) >= case.count, "the workers are done")
        used = {"leader": exact_cpu_seconds(leader.pid) / case.count * 1e6} | meter.each(case.count)
    count = server.client.xlen(TARGET)
    if count != case.count:
        raise BenchError(f"{case.count} messages became {count} entries")
    return Sample("dispatch", case.name, processes, case.count, server.seconds(), used)


# -- rounds and report


def measure(server: Server, folder: Path, args: argparse.Namespace) -> list[Sample]:
    """Rounds of all cases, both sides in turn: a bad minute of the machine is shared."""
    samples = []
    for _ in range(args.rounds):
        for name in args.only:
            count = min(args.messages, WAITING_MESSAGES) if name == "waits" else args.messages
            case = Case(name, count, args.batch, folder)
            for processes in args.workers:
                sides = [measure_dispatch] if name == "waits" else [measure_bare, measure_dispatch]
                for side in sides:
                    sample = side(server, case, processes)
                    samples.append(sample)
                    words = f"{name}: {sample.side} × {processes}: {sample.rate:,.0f}/s"
                    print(words, file=sys.stderr, flush=True)
    return samples


def chosen(samples: Sequence[Sample], side: str, case: str, processes: int) -> list[Sample]:
    return [one for one in samples if (one.side, one.case, one.processes) == (side, case, processes)]


def row(samples: Sequence[Sample], case: str, processes: int) -> list[str]:
    own, bare = (chosen(samples, side, case, processes) for side in ("dispatch", "bare"))
    alone_ = chosen(samples, "bare", case, 1)
    rates = [one.rate for one in own]
    cpu = ", ".join(f"{part} {median(one.cpu[part] for one in own):.1f}" for part in own[0].cpu)
    return [
        case,
        str(processes),
        f"{median(rates):,.0f} ({min(rates):,.0f} – {max(rates):,.0f})",
        f"{median(one.rate for one in bare):,.0f}" if bare else "",
        ratio(own, bare),
        ratio(own, alone_),
        cpu,
    ]


def ratio(own: Sequence[Sample], bare: Sequence[Sample]) -> str:
    """The median of the rounds' own ratios."""
    if not bare:
        return ""
    return f"{median(mine.rate / theirs.rate for mine, theirs in zip(own, bare, strict=True)):.2f}"


def report(samples: Sequence[Sample], args: argparse.Namespace) -> str:
    heads = ["case", "workers", "messages/s", "bare loops", "ratio", "to one loop", "CPU per message, µs"]
    lines = [
        "# Dispatcher and workers beside a bare loop",
        "",
        f"- machine: {describe()}; redis-py {redis.__version__}",
        f"- {args.messages} messages of 54 bytes (`waits`: {WAITING_MESSAGES}), batches of {args.batch}",
        f"- append-only file {'off' if args.no_append_only else 'on'}; median of {args.rounds} interleaved round(s)",
        f"- bars: ≥ {BAR} messages/s, ratio ≥ {RATIO_BAR:g}",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
    ]
    for case in args.only:
        lines += [f"| {' | '.join(row(samples, case, processes))} |" for processes in args.workers]
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="bench/dispatch/run", description=__doc__.splitlines()[0])
    made.add_argument("--quick", action="store_true", help="one round, fewer messages")
    made.add_argument("--rounds", type=int, metavar="N", help=f"rounds, of which the median counts ({ROUNDS})")
    made.add_argument("--messages", type=int, metavar="N", help=f"in one run ({MESSAGES})")
    made.add_argument("--batch", type=int, default=BATCH, metavar="N", help=f"messages read at once ({BATCH})")
    made.add_argument("--workers", type=int, nargs="+", default=WORKERS, metavar="N", help="how many (1 2 4)")
    made.add_argument("--only", nargs="+", choices=("drain", "live", "waits"), default=("drain", "live", "waits"))
    made.add_argument("--no-append-only", action="store_true", help="Redis keeps everything in memory alone")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    made.add_argument("--out", type=Path, metavar="FILE", help="write the report there too")
    return made


def main() -> int:
    args = parser().parse_args()
    args.rounds = args.rounds or (1 if args.quick else ROUNDS)
    args.messages = args.messages or (QUICK_MESSAGES if args.quick else MESSAGES)
    try:
        with alone(), tempfile.TemporaryDirectory(prefix="motorcade-bench-dispatch-") as folder:
            server = Server(Path(folder), not args.no_append_only)
            try:
                samples = measure(server, Path(folder), args)
            finally:
                server.stop()
    except BenchError as error:
        print(f"bench/dispatch/run: {error}", file=sys.stderr)
        return 2
    text = report(samples, args)
    print(text)
    if args.out:
        args.out.write_text(text)
    if args.json:
        args.json.write_text(json.dumps([asdict(sample) for sample in samples], indent=1) + "\n")
    return 0
