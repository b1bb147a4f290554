"""Kill leaders, workers and Redis masters under load, and count every message.

    python -m tests.chaos.dispatch --rounds 20 --engine redis+cluster,redis [--workers 3] [--rate 2000] [--seed 7]

Two dispatchers, a few workers, one publisher who knows exactly what is in the stream (`feed.py`). A round is one blow:

    leader    SIGKILL                            worker    SIGKILL, one of them or all at once
    pause     SIGSTOP of the leader for three    hang      SIGSTOP of a worker for longer than it may take to answer
              leases, then SIGCONT               redis     SIGKILL of a master of the cluster, or of the lone server
    both      SIGKILL of the leader and a worker at the same moment

What was killed is started again a little later. In the end the publisher stops, everything drains, and the streams are
read: each number that was published must be in `messages:processed` exactly once, no identifier twice, nothing among
the dead letters. `take-over` is the time from the blow to a leader with a higher epoch. Exit code 1 on any finding.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import redis

from tests.chaos.command import add_runs, options_of_runs, parser, run_all
from tests.chaos.feed import Feed
from tests.support.dispatch import DEAD, PROCESSED, Daemon, Place, connect, wait_until
from tests.support.redis import RedisCluster, RedisServer

ENGINES = ("redis", "redis+cluster")

LEASE = 2.0  # seconds, as by default
ACK_TIMEOUT = 2.0  # seconds, as by default
TAKE_OVER_MARGIN = 1.0  # seconds: a take-over may last a lease and this

#: Seconds: between two blows; until what was killed is started again; longest drain; standstill that ends a drain.
LIFE = (0.3, 1.5)
AWAY = (0.0, 1.0)
DRAIN_PATIENCE = 180.0
STANDSTILL = 30.0
TAKE_OVER_PATIENCE = 30.0

#: How a round goes, and how often.
WAYS = {"leader": 5, "worker": 3, "workers": 1, "pause": 3, "hang": 1, "redis": 3, "both": 2}
PAGE = 10_000  # entries read at once


@dataclass
class Options:
    """What to do in one run."""

    rounds: int = 20
    engine: str = "redis+cluster"
    workers: int = 3
    rate: float = 2000.0  #: messages a second
    seed: int = 1
    ways: Mapping[str, int] = field(default_factory=lambda: WAYS)
    lease: float = LEASE
    quiet: bool = False


@dataclass
class Verdict:
    """What the streams say."""

    published: int
    processed: int  #: entries
    duplicated: int  #: entries beyond the first of a number or of an identifier
    lost: int
    dead: int
    invented: int  #: entries that nobody has published

    @property
    def passed(self) -> bool:
        return not (self.duplicated or self.lost or self.dead or self.invented)


def judge(published: int, processed: Iterable[tuple[str, int]], dead: int = 0) -> Verdict:
    """`processed`: identifier and number of each entry; all numbers from 1 to `published` were published."""
    numbers: Counter[int] = Counter()
    ids: Counter[str] = Counter()
    for identifier, number in processed:
        numbers[number] += 1
        ids[identifier] += 1
    entries = numbers.total()
    twice = max(entries - len(numbers), entries - len(ids))
    wanted = set(range(1, published + 1))
    found = numbers.keys()
    return Verdict(published, entries, twice, len(wanted - found), dead, len(found - wanted))


@dataclass
class Outcome:
    """What came of a run."""

    options: Options
    verdict: Verdict
    blows: Counter[str] = field(default_factory=Counter)
    take_overs: list[float] = field(default_factory=list)  #: seconds; of blows to a leader
    leaderships: int = 0  #: the last epoch
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def slow(self) -> list[float]:
        return [seconds for seconds in self.take_overs if seconds > self.options.lease + TAKE_OVER_MARGIN]

    @property
    def passed(self) -> bool:
        return self.verdict.passed and not self.findings


def order(options: Options, random: Random) -> list[str]:
    """Which blow comes when: as often as it should, and each at least once if there are enough rounds."""
    ways = list(options.ways)
    drawn = random.choices(ways, list(options.ways.values()), k=max(options.rounds - len(ways), 0))
    made = ways[: options.rounds] + drawn
    random.shuffle(made)
    return made


class Run:
    """One run on one engine."""

    def __init__(self, options: Options, backing: RedisServer | RedisCluster) -> None:
        self.options = options
        self.backing = backing
        self.random = Random(options.seed)
        self.order = order(options, self.random)
        self.place = Place(backing, lease=options.lease, ack_timeout=ACK_TIMEOUT)
        self.feed = Feed(backing, options.rate)
        self.leaders: list[Daemon] = []
        self.workers: list[Daemon] = []
        self.blows: Counter[str] = Counter()
        self.take_overs: list[float] = []
        self.findings: list[str] = []

    def run(self) -> Outcome:
        begun = time.monotonic()
        with self.place:
            self.workers = [self.place.worker() for _ in range(self.options.workers)]
            self.leaders = [self.place.leader() for _ in range(2)]
            self.feed.start()
            try:
                for number in range(self.options.rounds):
                    self._round(number)
            finally:
                self.feed.stop()
            self._drain()
            # Who was killed last may still be starting, and a process that is not ready does not end in peace.
            wait_until(lambda: all(daemon.ready for daemon in (*self.leaders, *self.workers)), "everybody is back")
            verdict = self._verdict()
            self._look_at_logs()
            epoch = self._epoch()
        return Outcome(
            self.options,
            verdict,
            self.blows,
            self.take_overs,
            epoch,
            self.findings,
            time.monotonic() - begun,
        )

    # -- blows

    def _round(self, number: int) -> None:
        self._sleep(LIFE)
        for daemon in (*self.leaders, *self.workers):
            if not daemon.running:
                self.findings.append(f"{daemon.words[0]} has ended by itself: {''.join(daemon.output[-3:])}")
                self._restart(daemon)
        way = self.order[number]
        self.blows[way] += 1
        self._say(f"round {number + 1}: {way}, {self.feed.confirmed} published")
        getattr(self, f"_{way}")()

    def _leader(self) -> None:
        leader, epoch = self._leading()
        leader.kill()
        self._await_successor(epoch, time.monotonic())
        self._restart(leader)

    def _pause(self) -> None:
        """The leader hangs for three leases; somebody else leads, and then the old one goes on where it was."""
        leader, epoch = self._leading()
        leader.pause()
        paused = time.monotonic()
        self._await_successor(epoch, paused)
        time.sleep(max(3 * self.options.lease - (time.monotonic() - paused), 0))
        leader.resume()

    def _worker(self) -> None:
        victim = self.random.choice(self.workers)
        victim.kill()
        self._sleep(AWAY)
        self._restart(victim)

    def _workers(self) -> None:
        for worker in self.workers:
            worker.kill()
        self._sleep(AWAY)
        for worker in self.workers:
            self._restart(worker)

    def _hang(self) -> None:
        victim = self.random.choice(self.workers)
        victim.pause()
        time.sleep(1.5 * ACK_TIMEOUT)
        victim.resume()

    def _both(self) -> None:
        leader, epoch = self._leading()
        worker = self.random.choice(self.workers)
        leader.kill()
        struck = time.monotonic()
        worker.kill()
        self._await_successor(epoch, struck)
        self._restart(leader)
        self._restart(worker)

    def _redis(self) -> None:
        backing = self.backing
        if isinstance(backing, RedisServer):
            backing.kill()
            self._sleep(AWAY)
            backing.start()
            return
        backing.wait_healthy()  # with a replica that has nothing, Redis itself loses what it has confirmed
        masters = backing.masters()
        victim = self.random.choice(masters)
        victim.kill()
        deadline = time.monotonic() + TAKE_OVER_PATIENCE
        while len(backing.masters()) < len(masters) and time.monotonic() < deadline:
            time.sleep(0.05)
        victim.start()

    # -- who leads

    def _leading(self) -> tuple[Daemon, int]:
        """The dispatcher that leads, and its epoch; waits for one, and for the others to be candidates.

        Otherwise a take-over would be as long as it takes to start a process.
        """
        deadline = time.monotonic() + TAKE_OVER_PATIENCE
        while time.monotonic() < deadline:
            if not all(leader.ready for leader in self.leaders):
                time.sleep(0.05)
                continue
            found = max(
                ((epoch_of(leader), leader) for leader in self.leaders if leader.running), key=lambda one: one[0]
            )
            if found[0] and found[0] == self._epoch():
                return found[1], found[0]
            time.sleep(0.05)
        raise AssertionError("nobody leads:\n" + "\n".join(leader.log for leader in self.leaders))

    def _epoch(self) -> int:
        return max(epoch_of(leader) for leader in self.leaders)

    def _await_successor(self, epoch: int, since: float) -> None:
        while time.monotonic() < since + TAKE_OVER_PATIENCE:
            if self._epoch() > epoch:
                self.take_overs.append(time.monotonic() - since)
                return
            time.sleep(0.005)
        self.findings.append(f"nobody took over from epoch {epoch} within {TAKE_OVER_PATIENCE:g} s")

    def _restart(self, daemon: Daemon) -> None:
        """Another process with the same command line: a worker is found under the same name again."""
        daemon.launch()

    def _sleep(self, between: tuple[float, float]) -> None:
        time.sleep(self.random.uniform(*between))

    # -- the end

    def _drain(self) -> None:
        """Wait until all that was published is processed, or nothing moves any more."""
        client = connect(self.backing)
        seen, moved, end = -1, time.monotonic(), time.monotonic() + DRAIN_PATIENCE
        while time.monotonic() < min(end, moved + STANDSTILL):
            try:
                count, waits = int(client.xlen(PROCESSED)), self.place.pending()
            except redis.RedisError:
                continue
            if count >= self.feed.confirmed and not waits:
                break
            if count != seen:
                seen, moved = count, time.monotonic()
            time.sleep(0.1)
        else:
            self.findings.append(
                f"not drained: {seen} of {self.feed.confirmed} processed, {self.place.pending()} pending"
            )
        client.close()

    def _verdict(self) -> Verdict:
        client = connect(self.backing)
        dead = int(client.xlen(DEAD))
        if dead:
            reasons = Counter(str(fields.get(b"reason"), "utf-8") for _, fields in client.xrange(DEAD, count=PAGE))
            self.findings.append(f"dead letters: {dict(reasons)}")
        verdict = judge(self.feed.confirmed, entries(client), dead)
        client.close()
        return verdict

    def _look_at_logs(self) -> None:
        for daemon in self.place.daemons:
            if "Traceback" in daemon.log:
                self.findings.append(
                    f"traceback of {daemon.words[0]}: {daemon.log[daemon.log.index('Traceback') :][:2000]}"
                )

    def _say(self, text: str) -> None:
        if not self.options.quiet:
            print(text, file=sys.stderr, flush=True)


def epoch_of(leader: Daemon) -> int:
    """The last epoch under which it has begun to lead; 0 if it never has."""
    return max((int(event["epoch"]) for event in leader.events("dispatch_leading")), default=0)


def entries(client: Any) -> Iterable[tuple[str, int]]:
    """Identifier and number of all entries of the processed stream."""
    last = "-"
    while True:
        page = client.xrange(PROCESSED, min=last, count=PAGE)
        for _, fields in page:
            yield fields[b"id"].decode(), json.loads(fields[b"payload"])["n"]
        if len(page) < PAGE:
            return
        last = f"({page[-1][0].decode()}"


def chaos(options: Options) -> Outcome:
    # A lone server has no replica to confirm what it has: it must sync before it answers to keep its word.
    backing = RedisServer({"appendfsync": "always"}) if options.engine == "redis" else RedisCluster()
    with backing:
        return Run(options, backing).run()


def report(outcome: Outcome) -> str:
    verdict, taken = outcome.verdict, sorted(outcome.take_overs)
    asked = outcome.options
    blows = ", ".join(f"{count} × {way}" for way, count in outcome.blows.items())
    counts = ("published", "processed", "duplicated", "lost", "dead", "invented")
    lines = [
        f"{asked.engine}: {asked.rounds} rounds in {outcome.seconds:.0f} s, seed {asked.seed}: {blows}",
        "  " + "  ".join(f"{name} {getattr(verdict, name)}" for name in counts),
    ]
    if taken:
        late = f"{len(outcome.slow)} of {len(taken)} over {asked.lease + TAKE_OVER_MARGIN:g} s"
        lines.append(
            f"  leaderships {outcome.leaderships}; take-over after {taken[0]:.2f} – {taken[-1]:.2f} s "
            f"(median {taken[len(taken) // 2]:.2f}), {late}"
        )
    return "\n".join(lines + [f"  FINDING {finding}" for finding in outcome.findings])


def _options(arguments: list[str]) -> list[Options]:
    line = parser("tests.chaos.dispatch", __doc__, rounds="blows per engine", data=False)
    line.set_defaults(seed=Options.seed)
    add_runs(line, "engine", ENGINES, default="redis+cluster,redis")
    line.add_argument("--workers", type=int, default=Options.workers)
    line.add_argument("--rate", type=float, default=Options.rate, help="messages a second")
    known = ", ".join(WAYS)
    line.add_argument("--only", dest="ways", type=_ways, metavar="WAY,…", default=WAYS, help=f"blows, of {known}")
    return [Options(**run) for run in options_of_runs(line.parse_args(arguments), "engine")]


def _ways(words: str) -> dict[str, int]:
    try:
        return {way: WAYS[way] for way in words.split(",")}
    except KeyError as unknown:
        raise ArgumentTypeError(f"no blow {unknown}; there are {', '.join(WAYS)}") from None


def main(arguments: list[str]) -> int:
    return run_all(_options(arguments), chaos, report, lambda outcome: outcome.passed and not outcome.slow)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
