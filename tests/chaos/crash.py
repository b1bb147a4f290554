"""Kill a node under load again and again, and count what became of every message.

    python -m tests.chaos.crash --rounds 100 --engine rocksdb,redis [--qos 1,2] [--seed 7] [--kill node|redis|both]

A real node, real sockets, clients that outlive the node (`cast.py`), and a judge who only knows what the clients wrote
down (`judge.py`). Each round is one SIGKILL: at a random instant while the node serves, at the moment when a publisher
got an answer or a receiver a message, while the node starts, or right after it came back. At the end the load stops,
everybody comes back, everything drains, and the node is killed once more, so that whatever it would send twice after a
crash has its chance. Exit code 1 on any finding.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.chaos.cast import Cast
from tests.chaos.judge import Debts, History, Tally, Verdict, judge, unpublished_wills
from tests.chaos.victim import ENGINES, Backing, NotReadyError, Victim

#: Seconds: longest life of a node in a round; longest absence of a killed Redis; longest drain.
LIFE = 1.5
REDIS_AWAY = 0.5
DRAIN_PATIENCE = 600.0

#: How many of the nodes live at least until somebody has seen all retained messages.
LOOKS = 0.5

#: How a round goes, and how often.
WAYS = {"serving": 0.4, "answered": 0.2, "delivered": 0.1, "starting": 0.15, "twice": 0.15}


@dataclass
class Options:
    """What to do in one run."""

    rounds: int = 20
    engine: str = "rocksdb"
    qos: tuple[int, ...] = (1, 2)
    seed: int = 1
    kill: str = "node"
    durability: str = ""
    rate: float = 60.0  #: messages per second of each publisher
    data: Path | None = None
    quiet: bool = False
    standstill: float = 20.0  #: seconds without any progress until a drain is given up


@dataclass
class Outcome:
    """What came of it."""

    options: Options
    verdict: Verdict
    kills: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    drain: float = 0.0
    starts: list[float] = field(default_factory=list)  #: seconds until ready


class Run:
    """One run on one engine."""

    def __init__(self, options: Options, data: Path) -> None:
        self.options = options
        self.random = Random(options.seed)
        self.history = History()
        self.backing = Backing(options.engine, data)
        self.victim = Victim(self.backing, data, durability=options.durability)
        self.kills: Counter[str] = Counter()
        self.starts: list[float] = []

    async def run(self) -> Outcome:
        began = time.monotonic()
        await asyncio.to_thread(self.backing.start)
        self.cast = Cast(
            self.victim.address,
            self.history,
            self.random,
            qos=self.options.qos,
            rate=self.options.rate,
            patience=self.options.standstill / 2,
        )
        draining = began
        try:
            await self._start()
            await self.cast.enter()
            await self.cast.play()
            for number in range(1, self.options.rounds + 1):
                await self._round()
                self.cast.check()
                self._say(number)
            draining = time.monotonic()
            await self.cast.end_load()
            await self._drain()
            await self._epilogue()
        except NotReadyError as error:
            self.history.odd("node did not start", str(error))
        finally:
            drain = time.monotonic() - draining
            await self.cast.exit()
            await self.victim.kill()
            await asyncio.to_thread(self.backing.remove)
        for words in self.victim.tracebacks:
            self.history.odd("traceback", words)
        verdict = judge(self.history)
        return Outcome(self.options, verdict, self.kills, time.monotonic() - began, drain, self.starts)

    # -- one round

    async def _round(self) -> None:
        kill = self.options.kill
        if kill == "both":
            kill = self.random.choice(("node", "redis"))
        if kill == "node":
            await self._round_of_node()
        elif kill == "redis":
            await self._round_of_redis()
        else:
            await asyncio.sleep(self.random.uniform(0.0, LIFE))

    async def _round_of_node(self) -> None:
        if self.random.random() < LOOKS:
            await self.cast.settle_probes()
        way = self.random.choices(list(WAYS), list(WAYS.values()))[0]
        await asyncio.sleep(self.random.uniform(0.0, LIFE if way != "twice" else LIFE / 8))
        if not self.victim.is_alive:
            self.history.odd("node ended", f"process {self.victim.starts} ended by itself")
        if way in {"answered", "delivered"}:
            await self._strike_at(way)
        await self.victim.kill()
        self._killed(way if way != "starting" else "serving")
        if way == "starting":
            typical = sorted(self.starts)[len(self.starts) // 2]
            await self.victim.start_and_kill(self.random.uniform(0.3, 1.1) * typical)
            self._killed("starting", counted=False)
        await self._start()

    async def _strike_at(self, event: str) -> None:
        """Kill at the very moment when a client has got an answer or a message."""
        struck, countdown = asyncio.Event(), self.random.randint(1, 20)

        def happened(what: str) -> None:
            nonlocal countdown
            countdown -= what == event
            if countdown <= 0 and not struck.is_set():
                self.victim.strike()
                struck.set()

        self.history.happened = happened
        try:
            await asyncio.wait_for(struck.wait(), LIFE)
        except TimeoutError:
            pass  # nothing moved for so long; any moment is as good
        self.history.happened = lambda event: None

    async def _round_of_redis(self) -> None:
        await asyncio.sleep(self.random.uniform(0.0, LIFE))
        server = await asyncio.to_thread(self.backing.kill, self.random)
        self._killed("redis")
        await asyncio.sleep(self.random.uniform(0.0, REDIS_AWAY))
        await asyncio.to_thread(server.start)
        if not self.victim.is_alive:
            self.history.odd("node ended", f"process {self.victim.starts} did not live through a restart of Redis")
            await self.victim.kill()
            await self._start()

    def _killed(self, how: str, *, counted: bool = True) -> None:
        self.kills[how] += 1
        self.cast.kills += counted

    async def _start(self) -> None:
        began = time.monotonic()
        await self.victim.start()
        self.starts.append(time.monotonic() - began)
        self.cast.probe()

    # -- the end

    async def _drain(self) -> None:
        """Until nothing is owed any more, or nothing moves any more."""
        debts = Debts(self.history)
        await self._until(
            lambda: (
                sum(map(len, debts.owed().values()))
                + sum(publication.is_open for publication in self.history.sent())
                + len(unpublished_wills(self.history))
                + sum(not publisher.is_done for publisher in self.cast.paho_publishers)
            )
        )
        await self.cast.settle_probes()

    async def _epilogue(self) -> None:
        """Kill once more, and speak to everybody once more: what would come twice comes before that."""
        if self.options.kill != "nobody":
            await self.victim.kill()
            self._killed("drained")
            await self._start()
        await self._until(lambda: 0 if self.cast.is_together else 1)
        await self.cast.say_goodbye()
        await self._drain()

    async def _until(self, remaining: Callable[[], int]) -> None:
        end = time.monotonic() + DRAIN_PATIENCE
        least, moved = sys.maxsize, time.monotonic()
        while (left := remaining()) and time.monotonic() < min(end, moved + self.options.standstill):
            if left < least:
                least, moved = left, time.monotonic()
            await asyncio.sleep(0.1)
            self.cast.check()

    def _say(self, number: int) -> None:
        if self.options.quiet:
            return
        acknowledged = sum(publication.is_acknowledged for publication in self.history.sent())
        line = f"\r{self.options.engine}: round {number} of {self.options.rounds}, {acknowledged} acknowledged"
        end = "\n" if number == self.options.rounds else ""
        if sys.stdout.isatty() or end:
            print(line.lstrip("\r") if end and not sys.stdout.isatty() else line, end=end, flush=True)


def crash(options: Options) -> Outcome:
    """Run, and remove what it left behind, unless the data shall be kept somewhere."""
    data = (
        options.data / options.engine if options.data is not None else Path(tempfile.mkdtemp(prefix="motorcade-chaos-"))
    )
    try:
        return asyncio.run(Run(options, data).run())
    finally:
        if options.data is None:
            shutil.rmtree(data, ignore_errors=True)


# -- telling


def report(outcome: Outcome) -> str:
    """The table, and every finding."""
    options, verdict = outcome.options, outcome.verdict
    kills = ", ".join(f"{count} {how}" for how, count in outcome.kills.items())
    level = f", durability {options.durability}" if options.durability else ""
    head = f"{options.engine}{level}, seed {options.seed}: {sum(outcome.kills.values())} kills ({kills}) in "
    lines = [head + f"{outcome.seconds:.0f} s, the last {outcome.drain:.0f} s of it draining"]
    if outcome.starts:
        lines += [f"ready within {min(outcome.starts):.1f} to {max(outcome.starts):.1f} s", ""]
    lines += _rows("", dict(sorted(verdict.by_qos.items())), acknowledged=True)
    lines += ["", *_rows("receiver", verdict.by_receiver, acknowledged=False), ""]
    order, twice, forgotten = (verdict.count(kind) for kind in ("order", "QoS 2 twice", "session forgotten"))
    absent, unwanted = verdict.count("will missing"), verdict.count("will unwanted")
    lines.append(f"order broken {order}; QoS 2 twice {twice}; unanswered {verdict.open}; refused {verdict.refused}")
    lines.append(f"sessions forgotten {forgotten} of {verdict.reconnects} reconnects")
    lines.append(f"retained wrong {verdict.count('retained')} in {verdict.probes} looks")
    lines.append(f"wills missing {absent}, unwanted {unwanted}, repeated {verdict.wills_repeated}, of {verdict.wills}")
    lines += ["", *verdict.conclusion()]
    return "\n".join(lines)


def _rows(title: str, tallies: dict[str, Tally], *, acknowledged: bool) -> Iterator[str]:
    first = ["acknowledged"] if acknowledged else []
    heads = [*first, "due", "delivered", "duplicated", "DUP", "repeated", "unmarked", "lost"]
    yield f"{title:<12}" + "".join(f"{head:>14}" for head in heads)
    for name, tally in tallies.items():
        values = [tally.acknowledged] if acknowledged else []
        values += [
            tally.due,
            tally.delivered,
            tally.duplicated,
            tally.marked,
            tally.repeated,
            tally.unmarked,
            tally.lost,
        ]
        yield f"{name:<12}" + "".join(f"{value:>14}" for value in values)


def _options(arguments: list[str]) -> list[Options]:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.crash", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="kills per engine")
    parser.add_argument("--engine", default="rocksdb,redis", help=f"one or several of {', '.join(ENGINES)}")
    parser.add_argument("--qos", default="1,2", help="QoS of the messages")
    parser.add_argument("--seed", type=int, default=None, help="of everything random (except the timing of processes)")
    parser.add_argument("--kill", choices=("node", "redis", "both", "nobody"), default="node", help="who is killed")
    parser.add_argument("--durability", choices=("fast", "safe", "strict"), default="", help="level of the store")
    parser.add_argument("--rate", type=float, default=60.0, help="messages per second of each publisher")
    parser.add_argument("--data", type=Path, default=None, help="keep data and logs of the node here")
    parser.add_argument("--quiet", action="store_true", help="only the outcome")
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else Random().randrange(1_000_000)
    engines = given.engine.split(",")
    for engine in engines:
        if engine not in ENGINES:
            parser.error(f"no engine {engine!r}; there are {', '.join(ENGINES)}")
        if given.kill in {"redis", "both"} and not engine.startswith("redis"):
            parser.error(f"--kill {given.kill}: there is no Redis to kill with {engine}")
    qos = tuple(int(word) for word in given.qos.split(","))
    return [
        Options(given.rounds, engine, qos, seed, given.kill, given.durability, given.rate, given.data, given.quiet)
        for engine in engines
    ]


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing is left running
    passed = True
    for options in _options(arguments):
        outcome = crash(options)
        print(report(outcome), end="\n\n", flush=True)
        passed &= outcome.verdict.passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
