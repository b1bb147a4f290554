"""Kill a node under a fan-out again and again, and ask every vehicle what it got.

    python -m tests.chaos.fanout --rounds 100 --engine rocksdb,redis [--vehicles 30] [--seed 7]

A real node, a fleet of vehicles that sleep, lose signal, reboot, answer late, refuse or are silent
(`motorcade.fleet`), a platform that publishes batches of both forms (`platform.py`), and a judge who only knows what
they wrote down, and what anybody can read from the node (`audit.py`). Each round is one SIGKILL: at a random instant,
at the moment when the platform got an answer or a vehicle has acknowledged, or while the node starts. At the end the
platform stops, all vehicles become steady, everything drains, and the node is killed once more. Exit code 1 on any
finding.
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
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx

from motorcade.core import receipt as receipts_
from motorcade.core.receipt import Receipt, State
from motorcade.fleet import Behaviour, Fleet, FleetError, FleetOptions, Kind, Leave, Profile
from motorcade.fleet import State as Moment
from tests.chaos.audit import Audit, audit
from tests.chaos.platform import Platform
from tests.chaos.victim import ENGINES, Backing, NotReadyError, Victim

#: Seconds: longest life of a node in a round; longest drain; without progress until a drain is given up.
LIFE = 1.2
DRAIN_PATIENCE = 300.0
STANDSTILL = 20.0

ACK_TIMEOUT = 0.6  #: so short that vehicles are found to be silent between two kills
CONFIG = f"""
[plugins.fanout]
ack_timeout = {ACK_TIMEOUT}
retry_delay = 0.1
retry_delay_max = 0.5
max_attempts = 254
max_pending = 0
"""

#: Lives as in `motorcade.fleet.PROFILES`, so short that something happens between two kills.
LIVES = Profile(
    "hurried",
    (
        Kind("steady", Behaviour(heartbeat=1.0), 6),
        Kind("commuter", Behaviour(heartbeat=1.0, awake=(0.2, 1.5), asleep=(0.1, 1.0)), 4),
        Kind("tunnel", Behaviour(awake=(0.2, 2.0), asleep=(0.1, 1.0), leave=Leave.SILENCE, keep_alive=2), 3),
        Kind("reboot", Behaviour(awake=(0.3, 2.0), asleep=(0.05, 0.5), leave=Leave.RESET, clean=0.5), 3),
        Kind("slow", Behaviour(answer=(0.1, 2.5)), 3),
        Kind("refusing", Behaviour(refuse=0.5), 2),
        Kind("silent", Behaviour(ignore=0.4), 2),
    ),
)
STEADY = Behaviour(heartbeat=1.0)

#: How a round goes, and how often.
WAYS = {"serving": 0.4, "answered": 0.25, "acknowledged": 0.2, "starting": 0.15}


@dataclass
class Options:
    """What to do in one run."""

    rounds: int = 20
    engine: str = "rocksdb"
    vehicles: int = 30
    seed: int = 1
    durability: str = ""
    rate: float = 25.0  #: batches per second
    data: Path | None = None
    quiet: bool = False
    standstill: float = STANDSTILL


@dataclass
class Outcome:
    """What came of it."""

    options: Options
    audit: Audit
    kills: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    drain: float = 0.0


class Run:
    """One run on one engine."""

    def __init__(self, options: Options, data: Path) -> None:
        self.options = options
        self.random = Random(options.seed)
        self.backing = Backing(options.engine, data)
        self.victim = Victim(self.backing, data, durability=options.durability, config=CONFIG, http=True)
        self.kills: Counter[str] = Counter()
        self.troubles: list[tuple[str, str]] = []  #: kind of finding, and words
        self.starts: list[float] = []

    async def run(self) -> Outcome:
        began = draining = time.monotonic()
        await asyncio.to_thread(self.backing.start)
        address = self.victim.address
        self.fleet = Fleet(
            FleetOptions(
                host=address.host,
                port=address.port,
                vehicles=self.options.vehicles,
                profile=LIVES,
                both_versions=True,
                seed=self.options.seed,
                rate=0.0,
            )
        )
        self.platform = Platform(address, self.fleet.vins, self.random, self.options.rate)
        receipts: list[Receipt] = []
        counts: dict[str, dict[State, int]] = {}
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._start()
            await self.fleet.start()
            tasks = [asyncio.create_task(self.platform.run()), asyncio.create_task(self.platform.make())]
            for number in range(1, self.options.rounds + 1):
                await self._round()
                self._say(number)
            draining = time.monotonic()
            self.platform.end()
            await self._drain()
            await self.victim.kill()
            self.kills["drained"] += 1
            await self._start()
            await self._drain()
            receipts, counts = await self._receipts(), await self._counts()
        except (NotReadyError, FleetError, httpx.HTTPError) as error:
            self.troubles.append(("node did not serve", str(error)))
        finally:
            drain = time.monotonic() - draining
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.fleet.stop(Leave.RESET)
            await self.victim.kill()
            await asyncio.to_thread(self.backing.remove)
        vehicles = {vehicle.vin: vehicle.received for vehicle in self.fleet}
        atomic = not self.options.engine.startswith("redis")
        found = audit(self.platform.batches, vehicles, receipts, counts, ACK_TIMEOUT, atomic=atomic)
        for kind, words in [*self.troubles, *(("odd", odd) for odd in self.platform.odd)]:
            found.add(kind, words)
        for words in self.victim.tracebacks:
            found.add("traceback", words)
        return Outcome(self.options, found, self.kills, time.monotonic() - began, drain)

    # -- one round

    async def _round(self) -> None:
        way = self.random.choices(list(WAYS), list(WAYS.values()))[0]
        await asyncio.sleep(self.random.uniform(0.0, LIFE))
        if not self.victim.is_alive:
            self.troubles.append(("node ended", f"process {self.victim.starts} ended by itself"))
        if way == "answered":
            await self._strike_at_answer()
        elif way == "acknowledged":
            await self._strike_at_acknowledgement()
        await self.victim.kill()
        self.kills["serving" if way == "starting" else way] += 1
        if way == "starting":
            typical = sorted(self.starts)[len(self.starts) // 2]
            await self.victim.start_and_kill(self.random.uniform(0.5, 1.1) * typical)
            self.kills[way] += 1
        await self._start()

    async def _strike_at_answer(self) -> None:
        """Kill at the very moment when the platform has got an answer."""
        struck, countdown = asyncio.Event(), self.random.randint(1, 10)

        def happened() -> None:
            nonlocal countdown
            countdown -= 1
            if countdown <= 0 and not struck.is_set():
                self.victim.strike()
                struck.set()

        self.platform.happened = happened
        try:
            await asyncio.wait_for(struck.wait(), LIFE)
        except TimeoutError:
            pass  # nothing moved for so long; any moment is as good
        self.platform.happened = lambda: None

    async def _strike_at_acknowledgement(self) -> None:
        """Kill when some vehicle has written its PUBACK."""
        enough = self.fleet.figures().total.acked + self.random.randint(1, 20)
        try:
            await self.fleet.wait_until(lambda: self.fleet.figures().total.acked >= enough, "acknowledgements", LIFE)
        except FleetError:
            pass  # likewise
        self.victim.strike()

    async def _start(self) -> None:
        began = time.monotonic()
        await self.victim.start()
        self.starts.append(time.monotonic() - began)
        self._wake(0.8)

    def _wake(self, share: float) -> None:
        """Vehicles that would wait before they try again come at once: a life of a node is short here."""
        for vehicle in self.fleet:
            if vehicle.state is Moment.ASLEEP and self.random.random() < share:
                vehicle.come()

    # -- the end

    async def _drain(self) -> None:
        """Until every delivery has ended, or nothing moves any more."""
        self.fleet.behave(STEADY)
        end = time.monotonic() + DRAIN_PATIENCE
        least, moved = sys.maxsize, time.monotonic()
        while time.monotonic() < min(end, moved + self.options.standstill):
            self._wake(1.0)
            counts = await self._counts()
            ended = sum(states.get(state, 0) for states in counts.values() for state in receipts_.FINAL)
            left = sum(sum(states.values()) for states in counts.values()) - ended + self.platform.open
            if not left:
                return
            if left < least:
                least, moved = left, time.monotonic()
            await asyncio.sleep(0.2)

    def _web(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://{self.victim.http}/api/v1/", trust_env=False, timeout=60.0)

    async def _counts(self) -> dict[str, dict[State, int]]:
        """What `fanout list` shows."""
        found: dict[str, dict[State, int]] = {}
        async with self._web() as web:
            cursor: str | None = ""
            while cursor is not None:
                answer = (await web.get("fanout/requests", params={"limit": 500, "cursor": cursor})).raise_for_status()
                page = answer.json()
                for view in page["data"]:
                    found[view["request_id"]] = {State(state): count for state, count in view["states"].items()}
                cursor = page["meta"].get("cursor")
        return found

    async def _receipts(self) -> list[Receipt]:
        """All of the stream `receipts`."""
        found: list[Receipt] = []
        async with self._web() as web:
            after = 0
            while True:
                params = {"after": after, "limit": 1000}
                answer = (await web.get("streams/receipts/messages", params=params)).raise_for_status()
                page = answer.json()["data"]
                if not page:
                    return found
                found += [receipts_.decode(message["payload"].encode()) for message in page]
                after = page[-1]["position"]

    def _say(self, number: int) -> None:
        if self.options.quiet:
            return
        acknowledged = sum(batch.is_acknowledged for batch in self.platform.batches)
        line = f"{self.options.engine}: round {number} of {self.options.rounds}, {acknowledged} batches acknowledged"
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
        return asyncio.run(Run(options, data).run())
    finally:
        if options.data is None:
            shutil.rmtree(data, ignore_errors=True)


def report(outcome: Outcome) -> str:
    """The table, and every finding."""
    options, found = outcome.options, outcome.audit
    kills = ", ".join(f"{count} {how}" for how, count in outcome.kills.items())
    level = f", durability {options.durability}" if options.durability else ""
    ended = ", ".join(f"{count} {state}" for state, count in found.ended.items())
    head = f"fan-out on {options.engine}{level}, {options.vehicles} vehicles, seed {options.seed}: "
    head += f"{sum(outcome.kills.values())} kills ({kills}) in {outcome.seconds:.0f} s, "
    wrong = [f"{kind} {found.count(kind)}" for kind in ("not ended", "ended twice", "two at once", "wrong count")]
    excuses = ", ".join(f"{count} {why}" for why, count in sorted(found.excused.items()) if why) or "none"
    return "\n".join(
        [
            f"{head}the last {outcome.drain:.0f} s of it draining",
            "",
            f"batches acknowledged {found.batches}, for {found.promised} vehicles",
            f"with an id           sent again {found.published_again} times, {found.known} of them known",
            f"deliveries accepted  {found.deliveries}; ended: {ended}",
            f"received             {found.received}, duplicated {found.duplicated}",
            f"while one was unanswered: {excuses}",
            f"lost                 {found.count('lost')}",
            f"receipts repeated {found.repeated}; {'; '.join(wrong)}",
            "",
            *found.conclusion(),
        ]
    )


def _options(arguments: list[str]) -> list[Options]:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.fanout", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="kills per engine")
    parser.add_argument("--engine", default="rocksdb,redis", help=f"one or several of {', '.join(ENGINES)}")
    parser.add_argument("--vehicles", type=int, default=30)
    parser.add_argument("--seed", type=int, default=None, help="of everything random (except the timing of processes)")
    parser.add_argument("--durability", choices=("fast", "safe", "strict"), default="", help="level of the store")
    parser.add_argument("--rate", type=float, default=25.0, help="batches per second")
    parser.add_argument("--data", type=Path, default=None, help="keep data and logs of the node here")
    parser.add_argument("--quiet", action="store_true", help="only the outcome")
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else Random().randrange(1_000_000)
    engines = given.engine.split(",")
    for engine in engines:
        if engine not in ENGINES:
            parser.error(f"no engine {engine!r}; there are {', '.join(ENGINES)}")
    return [
        Options(given.rounds, engine, given.vehicles, seed, given.durability, given.rate, given.data, given.quiet)
        for engine in engines
    ]


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing is left running
    passed = True
    for options in _options(arguments):
        outcome = crash(options)
        print(report(outcome), end="\n\n", flush=True)
        passed &= outcome.audit.passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
