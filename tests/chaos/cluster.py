"""Three nodes that are one broker, clients that move, and up to two faults at a time; every message is counted.

    python -m tests.chaos.cluster --faults 150 --redis lone,cluster [--seed 7] [--minutes 60] [--without view-lease]

Each round: one or two faults, which end and are mended; then all habits rest. A lease and 2 s later nothing may be
left: what is acknowledged has come to everybody who is awake, every flow is over, and what each member is told then
comes to everybody. In the end the load stops and everything drains. What counts is what clients wrote down
(`cluster_judge.py`) and what the scripts of the store did (`store_trace.py`). Exit code 1 on any finding.

`--without` switches off one thing that the cluster relies on (`cluster_node.py`): then there must be findings, and the
run ends with the first one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, TextIO

import msgspec

from tests.chaos.cluster_cast import ClusterCast
from tests.chaos.cluster_faults import WEIGHTS, Faults
from tests.chaos.cluster_features import FEATURES, config_of
from tests.chaos.cluster_features import report as report_features
from tests.chaos.cluster_judge import Ledger, Verdict, judge
from tests.chaos.cluster_members import Member, Trio
from tests.chaos.cluster_node import SWITCHES
from tests.chaos.cluster_store import ClusterStore
from tests.chaos.command import add_runs, folder, options_of_runs, parser, run_all
from tests.chaos.judge import unpublished_wills
from tests.chaos.victim import NotReadyError
from tests.support.store_trace import violations

SETTLED = 2.0  #: seconds after a lease, from which on everything has to be as if nothing had happened
LOOK = 0.1  #: seconds between two looks at what is left
TWO = 0.6  #: how many of the rounds have two faults

#: Findings that what comes later cannot take back, so that they need not wait for the end.
FINAL = frozenset({
    "fence", "QoS 2 twice", "order", "unwanted", "repeated on one connection", "session forgotten", "retained",
    "invented",
})  # fmt: skip


#: What shows soonest that something is switched off: decisions of a member that stood still while its client moved;
#: calls that a member which was found dead sends again; values of a client that moves while writes wait; a member that
#: hears of nothing.
SHOWN_BY = {
    "home-fence": ("stand", "cut", "one-way", "slow"),
    "member-fence": ("stand", "apart", "apart one-way"),
    "drain": ("apart", "apart one-way", "stand", "slow", "kill"),
    "view-lease": ("stand", "apart", "apart one-way", "reset"),
    "look-again": ("kill", "stand", "one-way", "cut", "reset"),
}


@dataclass
class Options:
    """What to do in one run."""

    faults: int = 60
    redis: str = "lone"
    seed: int = 1
    minutes: float = 0.0  #: after which no more faults happen; 0: as long as it takes
    lease: float = 2.0
    rate: float = 6.0  #: messages per second of each publisher
    kinds: tuple[str, ...] = tuple(WEIGHTS)
    forget: bool = False
    retained: bool = False
    features: tuple[str, ...] = tuple(FEATURES)
    without: str = ""
    first: bool = False  #: no more faults happen after the first finding
    patience: float = 60.0  #: seconds until a probe that has not arrived will never come
    data: Path | None = None
    quiet: bool = False


@dataclass
class Outcome:
    """What came of it."""

    options: Options
    verdict: Verdict
    faults: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    rounds: int = 0
    starts: int = 0
    lapses: int = 0
    traced: int = 0
    errors: Counter[str] = field(default_factory=Counter)  #: events of this level in the logs
    found_after: float = 0.0  #: seconds until the first finding that was known before the end
    features: list[str] = field(default_factory=list)  #: what they tell


class Run:
    """One run on one kind of store."""

    def __init__(self, options: Options, data: Path) -> None:
        self.options = options
        self.data = data
        self.random = Random(options.seed)
        self.ledger = Ledger()
        self.began = self.ledger.clock()
        self.ledger.slack = options.lease + 4.0
        engine = "redis" if options.redis == "lone" else "redis+cluster"
        self.store = ClusterStore(engine, forgets=options.forget, clock=self.ledger.clock)
        self.ledger.lapses = self.store.lapses
        self.trio = Trio(
            self.store, data, lease=options.lease, more=config_of(options.features), without=options.without
        )
        kinds = tuple(kind for kind in options.kinds if kind != "forget" or options.forget)
        self.log: TextIO = (data / "faults.log").open("w")
        self.faults = Faults(self.trio, self.random, kinds, self._note)
        self.faults.ended = self._ended
        self.cast: ClusterCast
        self.troubles: list[tuple[str, str]] = []
        self.rounds = 0
        self.found_after = 0.0

    async def run(self) -> Outcome:
        began = time.monotonic()
        traced = 0
        try:
            await self.trio.start()
            self.cast = ClusterCast(
                self.trio,
                self.ledger,
                Random(self.options.seed),
                rate=self.options.rate,
                slack=self.ledger.slack,
                retained=self.options.retained,
                features=self.options.features,
            )
            await self.cast.enter()
            self.cast.play()
            await self._rounds(began)
            await self._end()
        except NotReadyError as error:
            self.troubles.append(("node did not serve", str(error)))
        finally:
            if hasattr(self, "cast"):
                await self.cast.exit()
            try:
                traces = await asyncio.to_thread(self.store.traces)
                traced = sum(map(len, traces.values()))
                self.ledger.violations = violations(traces)
                (self.data / "traces.json").write_bytes(msgspec.json.encode(traces))
            finally:
                await self.trio.remove()
                self.log.close()
                self._find_deaths()
                self._write_down()
        verdict = judge(self.ledger)
        for kind, words in (*self.troubles, *self.trio.troubles):
            verdict.add(kind, words)
        features = self.cast.features if hasattr(self, "cast") else []
        for feature in features:
            feature.judge(verdict)
        return Outcome(
            self.options,
            verdict,
            self.faults.happened,
            self.faults.pairs,
            time.monotonic() - began,
            self.rounds,
            sum(member.starts for member in self.trio.members.values()),
            len(self.store.lapses),
            traced,
            self._errors(),
            self.found_after,
            list(report_features(features)),
        )

    async def _rounds(self, began: float) -> None:
        options = self.options
        while self.faults.happened.total() < options.faults:
            if options.minutes and time.monotonic() - began > 60 * options.minutes:
                return
            if options.first and self.found_after:
                return
            left = options.faults - self.faults.happened.total()
            await asyncio.sleep(self.random.uniform(0.2, 1.5))
            chosen = self.faults.choose(min(left, 1 + (self.random.random() < TWO)))
            after = await self.faults.happen(chosen)
            self.rounds += 1
            self.cast.faults = self.faults.happened.total()
            for member in self.trio.members.values():
                member.look()
            self.cast.check()
            await self._settle(after)
            self._say()

    async def _settle(self, after: str) -> None:
        """Everybody rests; then nothing may be left, and a word from each member reaches everybody."""
        self.cast.rest()
        await asyncio.sleep(self.options.lease + SETTLED)
        await self._until_nothing_is_left(after)
        await self.cast.speak(after, self.options.patience)
        await self.cast.look(self.options.patience)
        for feature in self.cast.features:
            await feature.at_rest()
        if not self.found_after and await self._has_found():
            self.found_after = self.ledger.clock() - self.began
        self.cast.go_on()

    async def _has_found(self) -> bool:
        """Whether there is a finding already. With `first` all is judged that does not depend on what comes later."""
        if self.ledger.oddities or self.troubles or any(arrival.missing for arrival in self.ledger.arrivals):
            return True
        if not self.options.first:
            return False
        self.ledger.violations = violations(await asyncio.to_thread(self.store.traces))
        return not FINAL.isdisjoint(kind for kind, each in judge(self.ledger).by_kind.items() if each)

    async def _until_nothing_is_left(self, after: str) -> None:
        end = self.ledger.clock() + self.options.patience
        words = ""
        while self.ledger.clock() < end:
            words = await self._left()
            if not words:
                return
            await asyncio.sleep(LOOK)
        self.ledger.odd("left behind", f"after {after}: {words}")
        self._note(f"left behind: {words}")

    async def _left(self) -> str:
        found = [
            f"{name} has not got {len(owed)}, first {owed[0].name} (acknowledged {owed[0].acknowledged:.3f})"
            for name, owed in self.cast.owed().items()
        ]
        found += [f"{flow.name} is unanswered (sent {flow.sent[0]:.3f})" for flow in self.cast.open_flows()[:5]]
        for feature in self.cast.features:
            found += await feature.left()
        return "; ".join(found)

    async def _end(self) -> None:
        await self.cast.end_load(self.options.patience)
        await asyncio.sleep(self.options.lease + SETTLED)
        await self._until_nothing_is_left("all")
        end = self.ledger.clock() + self.options.patience
        while self.ledger.clock() < end and unpublished_wills(self.ledger):  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(LOOK)
        await self.cast.look(self.options.patience, final=True)
        for feature in self.cast.features:
            await feature.end()
        self.cast.check()

    # -- telling

    def _note(self, words: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.log.write(f"{now} {self.ledger.clock():.3f} {words}\n")
        self.log.flush()

    def _say(self) -> None:
        if not self.options.quiet:
            taken = sum(publication.is_acknowledged for publication in self.ledger.sent())
            odd = len(self.ledger.oddities) + sum(bool(each.missing) for each in self.ledger.arrivals)
            print(
                f"{self.options.redis}: {self.faults.happened.total()} of {self.options.faults} faults, "
                f"{taken} acknowledged, {odd} findings so far",
                flush=True,
            )

    def _write_down(self) -> None:
        """Leave what clients have written down beside the logs: for who looks for the reason of a finding."""
        ledger = self.ledger
        kept = {
            "publications": list(ledger.publications.values()),
            "receivers": list(ledger.receivers.values()),
            "lapses": self.store.lapses,
            "deaths": ledger.deaths,
            "forgotten": ledger.forgotten_sessions,
        }
        (self.data / "ledger.json").write_bytes(msgspec.json.encode(kept))

    # -- what members have written

    def _ended(self, name: str) -> None:
        self.ledger.deaths.append((str(self.trio.members[name].mqtt), self.ledger.clock()))

    def _find_deaths(self) -> None:
        """Note when a member was one no longer, though its process has gone on."""
        ahead = time.time() - self.ledger.clock()
        for member, event in self._events():
            if event.get("event") == "membership_lost":
                when = datetime.fromisoformat(event["timestamp"]).timestamp() - ahead
                self.ledger.deaths.append((str(member.mqtt), when))

    def _errors(self) -> Counter[str]:
        levels = ("error", "critical")
        return Counter(str(event.get("event")) for _, event in self._events() if event.get("level") in levels)

    def _events(self) -> Iterator[tuple[Member, dict[str, Any]]]:
        """What the logs of all processes that have ended say."""
        for member in self.trio.members.values():
            path = member.data / "node.log"
            for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict):
                    yield member, event


def crash(options: Options) -> Outcome:
    """Run, and remove what it left behind, unless the data shall be kept somewhere."""
    with folder(options.data, options.redis) as data:

        async def play() -> Outcome:
            return await Run(options, data).run()

        return asyncio.run(play())


def report(outcome: Outcome) -> str:
    return "\n".join(_lines(outcome))


def _lines(outcome: Outcome) -> Iterator[str]:
    options, verdict = outcome.options, outcome.verdict
    without = f", without {options.without}" if options.without else ""
    yield (
        f"{options.redis}{without}, seed {options.seed}: {outcome.faults.total()} faults in {outcome.rounds} rounds, "
        f"{outcome.seconds:.0f} s, {outcome.starts} processes"
    )
    yield ", ".join(f"{kind} {count}" for kind, count in sorted(outcome.faults.items()))
    yield f"at the same time: {', '.join(f'{pair} {count}' for pair, count in sorted(outcome.pairs.items()))}"
    yield ""
    lost, twice = verdict.count("lost"), verdict.count("QoS 2 twice")
    acknowledged = ", ".join(f"{count} at QoS {qos}" for qos, count in sorted(verdict.acknowledged.items()) if qos)
    yield f"acknowledged  {acknowledged}; refused {verdict.refused.total()}"
    yield f"due           {verdict.due}; delivered {verdict.delivered}, again {verdict.duplicated}"
    yield f"lost          {lost}; QoS 2 twice {twice}; order broken {verdict.count('order')}"
    yield f"live          reordered {verdict.reordered}; not confirmed, and gone with its member {verdict.untold}"
    yield f"sessions      forgotten {verdict.count('session forgotten')} of {verdict.reconnects} reconnects"
    yield f"retained      wrong {verdict.count('retained')} in {verdict.looks} looks"
    yield (
        f"wills         missing {verdict.count('will missing')}, unwanted {verdict.count('will unwanted')}, repeated "
        f"{verdict.wills_repeated}, of {verdict.wills}"
    )
    yield (
        f"progress      stuck {verdict.count('stuck')}, left behind {verdict.count('left behind')}; slowest probe "
        f"{verdict.slowest:.2f} s"
    )
    for words in outcome.features:
        kind, _, rest = words.partition(": ")
        yield f"{kind:<13} {rest}"
    yield f"fences        {verdict.count('fence')} violations in {outcome.traced} decisions"
    excused = ", ".join(f"{kind} {count}" for kind, count in sorted(verdict.excused.items())) or "nothing"
    yield f"excused       {excused}; the store has forgotten {outcome.lapses} times"
    if outcome.errors:
        yield f"errors told   {', '.join(f'{event} {count}' for event, count in sorted(outcome.errors.items()))}"
    if outcome.found_after:
        yield f"first finding after {outcome.found_after:.0f} s"
    yield ""
    yield from verdict.conclusion()


def _kinds(words: str) -> tuple[str, ...]:
    kinds = tuple(words.split(","))
    for kind in kinds:
        if kind not in WEIGHTS:
            raise ValueError(f"no fault {kind!r}; there are {', '.join(WEIGHTS)}")
    return kinds


def _features(words: str) -> tuple[str, ...]:
    names = tuple(words.split(",")) if words else ()
    for name in names:
        if name not in FEATURES:
            raise ValueError(f"no feature {name!r}; there are {', '.join(FEATURES)}")
    return names


def _options(arguments: list[str]) -> list[Options]:
    line = parser("tests.chaos.cluster", __doc__, rounds="as --faults", data=True)
    line.add_argument("--faults", type=int, default=0, help="how many there are, one or two at a time")
    add_runs(line, "redis", ("lone", "cluster"), default="lone,cluster")
    line.add_argument("--minutes", type=float, default=0.0, help="after which no more faults happen")
    line.add_argument("--lease", type=float, default=Options.lease, help="of the members, in seconds")
    line.add_argument("--rate", type=float, default=Options.rate, help="messages per second of each publisher")
    line.add_argument("--kinds", type=_kinds, default=tuple(WEIGHTS), help=f"faults: {','.join(WEIGHTS)}")
    line.add_argument("--forget", action="store_true", help="a cluster of nine, whose fail-overs forget")
    line.add_argument("--retained", action="store_true", help="with retained messages")
    line.add_argument("--features", type=_features, default=tuple(FEATURES), help=f"some of {','.join(FEATURES)}")
    line.add_argument("--without", choices=SWITCHES, default="", help="what is switched off")
    line.add_argument("--first", action="store_true", help="end with the first finding; so does --without")
    line.add_argument("--patience", type=float, default=Options.patience, help="seconds until a probe is missing")
    given = line.parse_args(arguments)
    given.faults = given.faults or given.rounds
    del given.rounds
    if given.forget and given.redis == ["lone"]:
        line.error("--forget: a lone Redis has no fail-over")
    runs = [Options(**run) for run in options_of_runs(given, "redis")]
    for run in runs:
        run.forget = run.forget and run.redis == "cluster"
        if run.without:
            run.first = run.retained = True
            run.kinds = SHOWN_BY[run.without] if run.kinds == tuple(WEIGHTS) else run.kinds
    return runs


def main(arguments: list[str]) -> int:
    return run_all(_options(arguments), crash, report, lambda outcome: outcome.verdict.passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
