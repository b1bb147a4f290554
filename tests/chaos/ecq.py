"""Kill a node under compacted queues again and again, and ask every consumer what it got.

    python -m tests.chaos.ecq --rounds 100 --engine rocksdb,redis [--seed 7]

A real node, producers, and consumers of exclusive and shared queues (`ecq_cast.py`), and a judge who only knows what
they wrote down and what anybody can read from the control port (`ecq_judge.py` lists what would be wrong). Each round
is one SIGKILL: at a random instant, at the moment when a producer got an answer or a consumer has acknowledged, or
while the node starts. At the end producers stop, consumers become steady, everything drains, and the node is killed
once more. Exit code 1 on any finding.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.chaos.ecq_cast import Consumer, Producer
from tests.chaos.ecq_judge import Place, Stored, Story, Verdict, judge
from tests.chaos.victim import ENGINES, Backing, NotReadyError, Victim

#: Seconds: longest life of a node in a round; longest drain; without progress until a drain is given up.
LIFE = 1.0
DRAIN_PATIENCE = 120.0
STANDSTILL = 20.0

EXCLUSIVE, SHARED, EACH = 4, 2, 3  #: queues of both kinds, and consumers of a shared one
PRODUCERS = 3

#: How a round goes, and how often.
WAYS = {"serving": 0.4, "answered": 0.25, "acknowledged": 0.2, "starting": 0.15}


@dataclass
class Options:
    """What to do in one run."""

    rounds: int = 20
    engine: str = "rocksdb"
    seed: int = 1
    durability: str = ""
    rate: float = 150.0  #: values per second of each producer
    data: Path | None = None
    quiet: bool = False


@dataclass
class Outcome:
    """What came of it."""

    options: Options
    verdict: Verdict
    kills: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    drain: float = 0.0


class Run:
    """One run on one engine."""

    def __init__(self, options: Options, data: Path) -> None:
        self.options = options
        self.random = Random(options.seed)
        self.backing = Backing(options.engine, data)
        self.victim = Victim(self.backing, data, durability=options.durability, http=True)
        self.kills: Counter[str] = Counter()
        self.troubles: list[tuple[str, str]] = []  #: kind of finding, and words
        self.starts: list[float] = []
        self.progress: dict[Story, tuple[int, int]] = {}  #: visits with a rewind so far, and progress, at a start
        address, random = self.victim.address, self.random
        self.places = [Place("exclusive", f"car-{number}") for number in range(EXCLUSIVE)]
        self.places += [Place("shared", f"fleet-{number}") for number in range(SHARED)]
        stories = [
            Story(place, place.name if place.kind == "exclusive" else f"{place.name}-{number}")
            for place in self.places
            for number in range(1 if place.kind == "exclusive" else EACH)
        ]
        self.consumers = [
            Consumer(story, address, Random(random.random()), lambda: self.victim.starts) for story in stories
        ]
        self.producers = [
            Producer(number, address, self.places, Random(random.random()), options.rate) for number in range(PRODUCERS)
        ]

    async def run(self) -> Outcome:
        began = draining = time.monotonic()
        await asyncio.to_thread(self.backing.start)
        stored: Stored = {}
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._start()
            cast: list[Producer | Consumer] = [*self.producers, *self.consumers]
            tasks = [asyncio.create_task(one.run()) for one in cast]
            for number in range(1, self.options.rounds + 1):
                await self._round()
                self._say(number)
            draining = time.monotonic()
            for producer in self.producers:
                producer.ending.set()
            for consumer in self.consumers:
                consumer.steady.set()
            await self._drain()
            await self.victim.kill()
            self.kills["drained"] += 1
            await self._start()
            await self._drain()
            stored = await self._stored()
        except (NotReadyError, httpx.HTTPError) as error:
            self.troubles.append(("node did not serve", str(error)))
        finally:
            drain = time.monotonic() - draining
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            await self.victim.kill()
            await asyncio.to_thread(self.backing.remove)
        self.troubles += [("cast", repr(end)) for end in ends if isinstance(end, Exception)]
        publications = [one for producer in self.producers for one in producer.publications]
        verdict = judge(publications, [consumer.story for consumer in self.consumers], stored)
        odd = [("odd", words) for consumer in self.consumers for words in consumer.odd]
        for kind, words in [*self.troubles, *odd, *(("traceback", words) for words in self.victim.tracebacks)]:
            verdict.add(kind, words)
        return Outcome(self.options, verdict, self.kills, time.monotonic() - began, drain)

    # -- one round

    async def _round(self) -> None:
        way = self.random.choices(list(WAYS), list(WAYS.values()))[0]
        await asyncio.sleep(self.random.uniform(0.0, LIFE))
        if not self.victim.is_alive:
            self.troubles.append(("node ended", f"process {self.victim.starts} ended by itself"))
        await self._look()
        if way in ("answered", "acknowledged"):
            await self._strike_when(way)
        await self.victim.kill()
        self.kills["serving" if way == "starting" else way] += 1
        if way == "starting":
            typical = sorted(self.starts)[len(self.starts) // 2]
            await self.victim.start_and_kill(self.random.uniform(0.5, 1.1) * typical)
            self.kills[way] += 1
        await self._start()

    async def _strike_when(self, way: str) -> None:
        """Kill at the very moment when a producer has got an answer, or a consumer has written its PUBACK."""
        struck, countdown = asyncio.Event(), self.random.randint(1, 30)

        def happened() -> None:
            nonlocal countdown
            countdown -= 1
            if countdown <= 0 and not struck.is_set():
                self.victim.strike()
                struck.set()

        self._tell(way, happened)
        try:
            await asyncio.wait_for(struck.wait(), LIFE)
        except TimeoutError:
            pass  # nothing moved for so long; any moment is as good
        self._tell(way, lambda: None)

    def _tell(self, way: str, happened: Callable[[], None]) -> None:
        for one in self.producers if way == "answered" else self.consumers:
            one.happened = happened

    async def _start(self) -> None:
        began = time.monotonic()
        for consumer in self.consumers:  # before they move it again
            consumer.open.clear()
        await self.victim.start()
        self.starts.append(time.monotonic() - began)
        await self._compare()
        for consumer in self.consumers:
            consumer.open.set()

    # -- progress, as anybody can read it

    async def _compare(self) -> None:
        """What a node tells that has just started was stored, and may only grow, but for rewinds."""
        for consumer in self.consumers:
            story = consumer.story
            found = await self._shown(story)
            if found is None:
                continue
            rewinds = sum(visit.rewound for visit in story.visits)
            before = self.progress.get(story, (rewinds, 0))
            if before[0] == rewinds and found["progress"] < before[1]:
                words = (
                    f"{story.client}: {found['progress']} at start {self.victim.starts}, {before[1]} at an earlier one"
                )
                self.troubles.append(("progress", words))
            self.progress[story] = rewinds, found["progress"]

    async def _look(self) -> None:
        """Progress never stands beyond a message that its consumer has, and has not acknowledged.

        Unless there is a newer value of its key by now.
        """
        for consumer in self.consumers:
            story, visits = consumer.story, len(consumer.story.visits)
            try:
                found = await self._shown(story)
            except httpx.HTTPError as error:
                self.troubles.append(("node did not serve", f"{story.client}: {error!r}"))
                return
            if found is None or visits != len(story.visits) or not visits or story.visits[-1].rewound:
                continue
            newest: dict[str, int] = {}
            for producer in self.producers:
                newest |= {one.key: one.value for one in producer.publications if one.place == story.place}
            late = [one.number for one in consumer.unacknowledged() if newest.get(one.key) == one.value]
            passed = [number for number in late if 0 < number <= found["progress"]]
            if passed:
                self.troubles.append(("progress", f"{story.client}: {found['progress']}, {passed} not acknowledged"))

    async def _shown(self, story: Story) -> dict[str, Any] | None:
        async with self._web() as web:
            answer = await web.get(f"compacted/{story.place.kind}/{story.place.name}")
        if answer.status_code == 404:  # nothing was appended yet
            return None
        views: list[dict[str, Any]] = answer.raise_for_status().json()["consuming"]
        return next((view for view in views if view["client"] == story.client), None)

    # -- the end

    async def _drain(self) -> None:
        """Until nobody waits for anything, or nothing moves any more."""
        end = time.monotonic() + DRAIN_PATIENCE
        seen, moved = -1, time.monotonic()
        while time.monotonic() < min(end, moved + STANDSTILL):
            waiting = [await self._shown(consumer.story) for consumer in self.consumers]
            if all(view is not None and view["connected"] and not view["waiting"] for view in waiting):
                return
            count = sum(len(visit.deliveries) for consumer in self.consumers for visit in consumer.story.visits[-1:])
            if count != seen:
                seen, moved = count, time.monotonic()
            await asyncio.sleep(0.1)
        self.troubles.append(("unfinished", f"after {time.monotonic() - moved:.0f} s without progress: {waiting}"))

    async def _stored(self) -> Stored:
        found: dict[Place, dict[str, tuple[int, int]]] = {}
        async with self._web() as web:
            for place in self.places:
                answer = await web.get(f"compacted/{place.kind}/{place.name}/messages", params={"limit": 1000})
                found[place] = {
                    message["properties"]["key"]: (message["position"], int(message["payload"].split()[0]))
                    for message in answer.raise_for_status().json()["data"]
                }
        return found

    def _web(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://{self.victim.http}/api/v1/", trust_env=False, timeout=60.0)

    def _say(self, number: int) -> None:
        if self.options.quiet:
            return
        acknowledged = sum(one.is_acknowledged for producer in self.producers for one in producer.publications)
        line = f"{self.options.engine}: round {number} of {self.options.rounds}, {acknowledged} values acknowledged"
        last = number == self.options.rounds
        if sys.stdout.isatty():
            print(f"\r{line}", end="\n" if last else "", flush=True)
        elif last:
            print(line, flush=True)


def crash(options: Options) -> Outcome:
    """Run, and remove what it left behind, unless the data shall be kept somewhere."""
    data = (
        options.data / options.engine if options.data is not None else Path(tempfile.mkdtemp(prefix="motorcade-chaos-"))
    )
    try:
        return asyncio.run(_run(options, data))
    finally:
        if options.data is None:
            shutil.rmtree(data, ignore_errors=True)


async def _run(options: Options, data: Path) -> Outcome:
    return await Run(options, data).run()


def report(outcome: Outcome) -> str:
    """The table, and every finding."""
    options, found = outcome.options, outcome.verdict
    kills = ", ".join(f"{count} {how}" for how, count in outcome.kills.items())
    level = f", durability {options.durability}" if options.durability else ""
    head = f"compacted queues on {options.engine}{level}, seed {options.seed}: {sum(outcome.kills.values())} kills "
    head += f"({kills}) in {outcome.seconds:.0f} s, the last {outcome.drain:.0f} s of it draining"
    kinds = ("lost", "backwards", "reused", "progress", "repeated", "unordered")
    return "\n".join(
        [
            head,
            "",
            f"published  {found.published}, acknowledged {found.acknowledged}",
            f"delivered  {found.delivered}, of these {found.again} that their consumer had acknowledged before",
            f"{'; '.join(f'{kind} {found.count(kind)}' for kind in kinds)}",
            "",
            *found.conclusion(),
        ]
    )


def _options(arguments: list[str]) -> list[Options]:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.ecq", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="kills per engine")
    parser.add_argument("--engine", default="rocksdb,redis", help=f"one or several of {', '.join(ENGINES)}")
    parser.add_argument("--seed", type=int, default=None, help="of everything random (except the timing of processes)")
    parser.add_argument("--durability", choices=("fast", "safe", "strict"), default="", help="level of the store")
    parser.add_argument("--rate", type=float, default=150.0, help="values per second of each producer")
    parser.add_argument("--data", type=Path, default=None, help="keep data and logs of the node here")
    parser.add_argument("--quiet", action="store_true", help="only the outcome")
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else Random().randrange(1_000_000)
    engines = given.engine.split(",")
    for engine in engines:
        if engine not in ENGINES:
            parser.error(f"no engine {engine!r}; there are {', '.join(ENGINES)}")
    return [
        Options(given.rounds, engine, seed, given.durability, given.rate, given.data, given.quiet) for engine in engines
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
