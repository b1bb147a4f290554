"""Kill a node under compacted queues again and again, and ask every consumer what it got.

    python -m tests.chaos.ecq --rounds 100 --engine rocksdb,redis [--seed 7]

A real node, producers, and consumers of exclusive and shared queues (`ecq_cast.py`), and a judge who only knows what
they wrote down and what anybody can read from the control port (`ecq_judge.py` lists what would be wrong). Each round
is one SIGKILL: at a random instant, at the moment when a producer got an answer or a consumer has acknowledged, or
while the node starts. At the end producers stop, consumers become steady, everything drains, and the node is killed
once more. Exit code 1 on any finding.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.chaos import rounds
from tests.chaos.command import options_of_runs, run_all
from tests.chaos.ecq_cast import Consumer, Producer
from tests.chaos.ecq_judge import Place, Stored, Story, Verdict, judge

EXCLUSIVE, SHARED, EACH = 4, 2, 3  #: queues of both kinds, and consumers of a shared one
PRODUCERS = 3

PLAN = rounds.Plan(
    life=1.0,
    ways={"serving": 0.4, "answered": 0.25, "acknowledged": 0.2, "starting": 0.15},
    events={"answered": 30, "acknowledged": 30},
    patience=120.0,
)


@dataclass
class Options(rounds.NodeOptions):
    """What to do in one run."""

    rate: float = 150.0  #: values per second of each producer


Outcome = rounds.Outcome[Options, Verdict]


class Run(rounds.NodeRun[Options, Verdict]):
    """One run on one engine."""

    def __init__(self, options: Options, data: Path) -> None:
        super().__init__(options, data, PLAN, http=True)
        self.progress: dict[Story, tuple[int, int]] = {}  #: visits with a rewind so far, and progress, at a start
        self.stored: Stored = {}
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

    # -- the load

    async def enter(self) -> None:
        for producer in self.producers:
            self.spawn(producer.run())
        for consumer in self.consumers:
            self.spawn(consumer.run())

    async def end_load(self) -> None:
        for producer in self.producers:
            producer.ending.set()
        for consumer in self.consumers:
            consumer.steady.set()

    def acknowledged(self) -> str:
        count = sum(one.is_acknowledged for producer in self.producers for one in producer.publications)
        return f"{count} values"

    def judge(self) -> Verdict:
        publications = [one for producer in self.producers for one in producer.publications]
        verdict = judge(publications, [consumer.story for consumer in self.consumers], self.stored)
        for consumer in self.consumers:
            for words in consumer.odd:
                verdict.add("odd", words)
        return verdict

    def listen(self, event: str, happened: Callable[[], None]) -> None:
        """A producer has got an answer, or a consumer has written its PUBACK."""
        for one in self.producers if event == "answered" else self.consumers:
            one.happened = happened

    # -- one round

    async def before_kill(self, way: str) -> None:
        await self._look()
        await super().before_kill(way)

    async def start(self) -> None:
        for consumer in self.consumers:  # before they move it again
            consumer.open.clear()
        await super().start()
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
        async with self.web() as web:
            answer = await web.get(f"compacted/{story.place.kind}/{story.place.name}")
        if answer.status_code == 404:  # nothing was appended yet
            return None
        views: list[dict[str, Any]] = answer.raise_for_status().json()["consuming"]
        return next((view for view in views if view["client"] == story.client), None)

    # -- the end

    async def drain(self) -> None:
        """Until nobody waits for anything, or nothing moves any more."""
        end = time.monotonic() + self.plan.patience
        seen, moved = -1, time.monotonic()
        while time.monotonic() < min(end, moved + self.options.standstill):
            waiting = [await self._shown(consumer.story) for consumer in self.consumers]
            if all(view is not None and view["connected"] and not view["waiting"] for view in waiting):
                return
            count = sum(len(visit.deliveries) for consumer in self.consumers for visit in consumer.story.visits[-1:])
            if count != seen:
                seen, moved = count, time.monotonic()
            await asyncio.sleep(0.1)
        self.troubles.append(("unfinished", f"after {time.monotonic() - moved:.0f} s without progress: {waiting}"))

    async def epilogue(self) -> None:
        await super().epilogue()
        self.stored = await self._stored()

    async def _stored(self) -> Stored:
        found: dict[Place, dict[str, tuple[int, int]]] = {}
        async with self.web() as web:
            for place in self.places:
                answer = await web.get(f"compacted/{place.kind}/{place.name}/messages", params={"limit": 1000})
                found[place] = {
                    message["properties"]["key"]: (message["position"], int(message["payload"].split()[0]))
                    for message in answer.raise_for_status().json()["data"]
                }
        return found


def crash(options: Options) -> Outcome:
    return rounds.crash(Run, options)


def report(outcome: Outcome) -> str:
    """The table, and every finding."""
    found = outcome.verdict
    kinds = ("lost", "backwards", "reused", "progress", "repeated", "unordered")
    return "\n".join(
        [
            outcome.headline("compacted queues"),
            "",
            f"published  {found.published}, acknowledged {found.acknowledged}",
            f"delivered  {found.delivered}, of these {found.again} that their consumer had acknowledged before",
            f"{'; '.join(f'{kind} {found.count(kind)}' for kind in kinds)}",
            "",
            *found.conclusion(),
        ]
    )


def _options(arguments: list[str]) -> list[Options]:
    line = rounds.node_parser("tests.chaos.ecq", __doc__, rate=Options.rate, pace="values per second of each producer")
    return [Options(**run) for run in options_of_runs(line.parse_args(arguments), "engine")]


def main(arguments: list[str]) -> int:
    return run_all(_options(arguments), crash, report, lambda outcome: outcome.verdict.passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
