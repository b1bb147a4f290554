"""A node that is killed round after round, whatever it has to bear.

    start   the store, the node, then everybody who uses it (`enter`)
    rounds  each is one SIGKILL, and another process with the same port and the same data:
                serving     at a random instant
                starting    and once more while the next process starts
                answered, … at the very moment when something has happened to somebody who uses the node (`listen`)
    end     the load stops (`end_load`), everything drains, the node is killed once more, and everything drains again:
            whatever it would send twice after a crash has its chance
    judge   only what was written down outside of the node counts (`judge`)

A crash test of a node is a `NodeRun` with a load and a judge of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Generic, TypeVar

import httpx

from tests.chaos.command import add_runs, folder, parser
from tests.chaos.findings import Findings
from tests.chaos.victim import ENGINES, Backing, NotReadyError, Victim

LOOK = 0.1  #: seconds between two looks at what is left


@dataclass(frozen=True)
class Plan:
    """How the rounds of a test go, and how long they may take."""

    life: float  #: seconds that a node lives in a round, at most
    ways: Mapping[str, float]  #: how a round goes, and how often
    events: Mapping[str, int]  #: the ways that are events, and how many of them there are before the kill, at most
    patience: float  #: seconds that a drain may take
    earliest: float = 0.5  #: when a node that starts may be killed, as a share of the time that a start takes


@dataclass
class NodeOptions:
    """What to do in one run."""

    rounds: int = 20
    engine: str = "rocksdb"
    seed: int = 1
    durability: str = ""
    rate: float = 0.0  #: of the load, a second
    data: Path | None = None
    quiet: bool = False
    standstill: float = 20.0  #: seconds without any progress until a drain is given up


Options = TypeVar("Options", bound=NodeOptions)
Verdict = TypeVar("Verdict", bound=Findings)


@dataclass
class Outcome(Generic[Options, Verdict]):
    """What came of it."""

    options: Options
    verdict: Verdict
    kills: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    drain: float = 0.0
    starts: list[float] = field(default_factory=list)  #: seconds until ready

    def headline(self, load: str = "") -> str:
        """The first line of a report; `load` is what the node had to bear."""
        options, kills = self.options, ", ".join(f"{count} {how}" for how, count in self.kills.items())
        where = f"{load} on {options.engine}" if load else options.engine
        level = f", durability {options.durability}" if options.durability else ""
        times = f"{self.seconds:.0f} s, the last {self.drain:.0f} s of it draining"
        return f"{where}{level}, seed {options.seed}: {self.kills.total()} kills ({kills}) in {times}"


class NodeRun(ABC, Generic[Options, Verdict]):
    """One run on one engine."""

    gives_up: ClassVar[tuple[type[Exception], ...]] = (NotReadyError, httpx.HTTPError)  #: a node that is of no use

    def __init__(self, options: Options, data: Path, plan: Plan, *, config: str = "", http: bool = False) -> None:
        self.options = options
        self.plan = plan
        self.random = Random(options.seed)
        self.backing = Backing(options.engine, data)
        self.victim = Victim(self.backing, data, durability=options.durability, config=config, http=http)
        self.kills: Counter[str] = Counter()
        self.starts: list[float] = []
        self.troubles: list[tuple[str, str]] = []  #: kind of finding, and words
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> Outcome[Options, Verdict]:
        began = draining = time.monotonic()
        await asyncio.to_thread(self.backing.start)
        try:
            await self.start()
            await self.enter()
            for number in range(1, self.options.rounds + 1):
                await self.round()
                self._say(number)
            draining = time.monotonic()
            await self.end_load()
            await self.drain()
            await self.epilogue()
        except self.gives_up as error:
            self.troubles.append(("node did not serve", str(error)))
        finally:
            drain = time.monotonic() - draining
            await self._end_tasks()
            await self.leave()
            await self.victim.kill()
            await asyncio.to_thread(self.backing.remove)
        verdict = self.judge()
        for kind, words in [*self.troubles, *(("traceback", words) for words in self.victim.tracebacks)]:
            verdict.add(kind, words)
        return Outcome(self.options, verdict, self.kills, time.monotonic() - began, drain, self.starts)

    # -- the load

    @abstractmethod
    async def enter(self) -> None:
        """Everybody begins; the node is ready."""

    @abstractmethod
    async def end_load(self) -> None:
        """Nobody asks for anything new."""

    @abstractmethod
    async def drain(self) -> None:
        """Until nothing is left to be done, or nothing moves any more."""

    async def leave(self) -> None:
        """It is over, whatever has happened before."""

    @abstractmethod
    def acknowledged(self) -> str:
        """What the node has promised so far, in words."""

    @abstractmethod
    def judge(self) -> Verdict:
        """What came of it all."""

    @abstractmethod
    def listen(self, event: str, happened: Callable[[], None]) -> None:
        """From now on tell `happened` of each event of this kind."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Until the end; what it raises is a finding."""
        self._tasks.append(asyncio.create_task(work))

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        self.troubles += [("cast", repr(end)) for end in ends if isinstance(end, Exception)]

    # -- one round

    async def round(self) -> None:
        way = self.random.choices(list(self.plan.ways), list(self.plan.ways.values()))[0]
        await asyncio.sleep(self.random.uniform(0.0, self.life_of(way)))
        if not self.victim.is_alive:
            self.troubles.append(("node ended", f"process {self.victim.starts} ended by itself"))
        await self.before_kill(way)
        await self.victim.kill()
        self.killed("serving" if way == "starting" else way)
        if way == "starting":
            typical = sorted(self.starts)[len(self.starts) // 2]
            await self.victim.start_and_kill(self.random.uniform(self.plan.earliest, 1.1) * typical)
            self.killed(way)
        await self.start()

    def life_of(self, way: str) -> float:
        """Seconds, at most."""
        return self.plan.life

    async def before_kill(self, way: str) -> None:
        """The node is about to be killed, at any moment or when something has happened."""
        if way in self.plan.events:
            await self.strike_at(way)

    async def strike_at(self, event: str) -> None:
        """Kill at the very moment when this has happened once more."""
        struck, countdown = asyncio.Event(), self.random.randint(1, self.plan.events[event])

        def happened() -> None:
            nonlocal countdown
            countdown -= 1
            if countdown <= 0 and not struck.is_set():
                self.victim.strike()
                struck.set()

        self.listen(event, happened)
        try:
            await asyncio.wait_for(struck.wait(), self.plan.life)
        except TimeoutError:
            pass  # nothing moved for so long; any moment is as good
        self.listen(event, lambda: None)

    def killed(self, how: str) -> None:
        self.kills[how] += 1

    async def start(self) -> None:
        """The next process, until it is ready."""
        began = time.monotonic()
        await self.victim.start()
        self.starts.append(time.monotonic() - began)

    # -- the end

    async def epilogue(self) -> None:
        """Everything has drained: kill once more, and let come what would come twice."""
        await self.victim.kill()
        self.killed("drained")
        await self.start()
        await self.drain()

    async def until_nothing_is_left(self, left: Callable[[], Awaitable[int]]) -> None:
        """Or until that has not become less for too long."""
        end = time.monotonic() + self.plan.patience
        least, moved = sys.maxsize, time.monotonic()
        while time.monotonic() < min(end, moved + self.options.standstill):
            now = await left()
            if not now:
                return
            if now < least:
                least, moved = now, time.monotonic()
            await asyncio.sleep(LOOK)

    def web(self) -> httpx.AsyncClient:
        """What anybody can read from the node."""
        address, auth = f"http://{self.victim.http}/api/v1/", self.victim.auth
        return httpx.AsyncClient(base_url=address, headers=auth, trust_env=False, timeout=60.0)

    # -- telling

    def _say(self, number: int) -> None:
        if self.options.quiet:
            return
        line = f"{self.options.engine}: round {number} of {self.options.rounds}, {self.acknowledged()} acknowledged"
        last = number == self.options.rounds
        if sys.stdout.isatty():
            print(f"\r{line}", end="\n" if last else "", flush=True)
        elif last:
            print(line, flush=True)


def crash(run: Callable[[Options, Path], NodeRun[Options, Verdict]], options: Options) -> Outcome[Options, Verdict]:
    """Run, and remove what it left behind, unless the data shall be kept somewhere."""
    with folder(options.data, options.engine) as data:

        async def play() -> Outcome[Options, Verdict]:
            return await run(options, data).run()

        return asyncio.run(play())


def node_parser(module: str, about: str, *, rate: float, pace: str) -> argparse.ArgumentParser:
    """For options like `NodeOptions`, with a run for each engine; `pace` says what the rate is."""
    line = parser(module, about, rounds="kills per engine")
    add_runs(line, "engine", ENGINES, default="rocksdb,redis")
    line.add_argument("--durability", choices=("fast", "safe", "strict"), default="", help="level of the store")
    line.add_argument("--rate", type=float, default=rate, help=pace)
    return line
