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

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from motorcade.core import receipt as receipts_
from motorcade.core.receipt import Receipt, State
from motorcade.fleet import Behaviour, Fleet, FleetError, FleetOptions, Leave, Profile, VehicleKind
from motorcade.fleet import VehicleState as Moment
from tests.chaos import rounds
from tests.chaos.audit import Audit, audit
from tests.chaos.command import options_of_runs, run_all
from tests.chaos.platform import Platform

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
        VehicleKind("steady", Behaviour(heartbeat=1.0), 6),
        VehicleKind("commuter", Behaviour(heartbeat=1.0, awake=(0.2, 1.5), asleep=(0.1, 1.0)), 4),
        VehicleKind("tunnel", Behaviour(awake=(0.2, 2.0), asleep=(0.1, 1.0), leave=Leave.SILENCE, keep_alive=2), 3),
        VehicleKind("reboot", Behaviour(awake=(0.3, 2.0), asleep=(0.05, 0.5), leave=Leave.RESET, clean=0.5), 3),
        VehicleKind("slow", Behaviour(answer=(0.1, 2.5)), 3),
        VehicleKind("refusing", Behaviour(refuse=0.5), 2),
        VehicleKind("silent", Behaviour(ignore=0.4), 2),
    ),
)
STEADY = Behaviour(heartbeat=1.0)

PLAN = rounds.Plan(
    life=1.2,
    ways={"serving": 0.4, "answered": 0.25, "acknowledged": 0.2, "starting": 0.15},
    events={"answered": 10},
    patience=300.0,
)


@dataclass
class Options(rounds.NodeOptions):
    """What to do in one run."""

    rate: float = 25.0  #: batches per second
    vehicles: int = 30


Outcome = rounds.Outcome[Options, Audit]


class Run(rounds.NodeRun[Options, Audit]):
    """One run on one engine."""

    gives_up = (*rounds.NodeRun.gives_up, FleetError)

    def __init__(self, options: Options, data: Path) -> None:
        super().__init__(options, data, PLAN, config=CONFIG, http=True)
        address = self.victim.address
        self.fleet = Fleet(
            FleetOptions(
                host=address.host,
                port=address.port,
                vehicles=options.vehicles,
                profile=LIVES,
                both_versions=True,
                seed=options.seed,
                rate=0.0,
            )
        )
        self.platform = Platform(address, self.fleet.vins, self.random, options.rate)
        self.receipts: list[Receipt] = []
        self.counts: dict[str, dict[State, int]] = {}

    # -- the load

    async def enter(self) -> None:
        await self.fleet.start()
        self.spawn(self.platform.run())
        self.spawn(self.platform.make())

    async def end_load(self) -> None:
        self.platform.end()

    async def leave(self) -> None:
        await self.fleet.stop(Leave.RESET)

    def acknowledged(self) -> str:
        return f"{sum(batch.is_acknowledged for batch in self.platform.batches)} batches"

    def judge(self) -> Audit:
        vehicles = {vehicle.vin: vehicle.received for vehicle in self.fleet}
        atomic = not self.options.engine.startswith("redis")
        found = audit(self.platform.batches, vehicles, self.receipts, self.counts, ACK_TIMEOUT, atomic=atomic)
        for words in self.platform.odd:
            found.add("odd", words)
        return found

    def listen(self, event: str, happened: Callable[[], None]) -> None:
        """The platform has got an answer."""
        self.platform.happened = happened

    # -- one round

    async def before_kill(self, way: str) -> None:
        if way == "acknowledged":
            await self._strike_at_acknowledgement()
        else:
            await super().before_kill(way)

    async def _strike_at_acknowledgement(self) -> None:
        """Kill when some vehicle has written its PUBACK."""
        enough = self.fleet.figures().total.acked + self.random.randint(1, 20)
        try:
            await self.fleet.wait_until(
                lambda: self.fleet.figures().total.acked >= enough, "acknowledgements", self.plan.life
            )
        except FleetError:
            pass  # nothing moved for so long; any moment is as good
        self.victim.strike()

    async def start(self) -> None:
        await super().start()
        self._wake(0.8)

    def _wake(self, share: float) -> None:
        """Vehicles that would wait before they try again come at once: a life of a node is short here."""
        for vehicle in self.fleet:
            if vehicle.state is Moment.ASLEEP and self.random.random() < share:
                vehicle.come()

    # -- the end

    async def drain(self) -> None:
        """Until every delivery has ended."""
        self.fleet.behave(STEADY)

        async def left() -> int:
            self._wake(1.0)
            counts = await self._counts()
            ended = sum(states.get(state, 0) for states in counts.values() for state in receipts_.FINAL)
            return sum(sum(states.values()) for states in counts.values()) - ended + self.platform.open

        await self.until_nothing_is_left(left)

    async def epilogue(self) -> None:
        await super().epilogue()
        self.receipts, self.counts = await self._receipts(), await self._counts()

    async def _counts(self) -> dict[str, dict[State, int]]:
        """What `fanout list` shows."""
        found: dict[str, dict[State, int]] = {}
        async with self.web() as web:
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
        async with self.web() as web:
            after = 0
            while True:
                params = {"after": after, "limit": 1000}
                answer = (await web.get("streams/receipts/messages", params=params)).raise_for_status()
                page = answer.json()["data"]
                if not page:
                    return found
                found += [receipts_.decode(message["payload"].encode()) for message in page]
                after = page[-1]["position"]


def crash(options: Options) -> Outcome:
    return rounds.crash(Run, options)


def report(outcome: Outcome) -> str:
    """The table, and every finding."""
    found = outcome.verdict
    ended = ", ".join(f"{count} {state}" for state, count in found.ended.items())
    wrong = [f"{kind} {found.count(kind)}" for kind in ("not ended", "ended twice", "two at once", "wrong count")]
    excuses = ", ".join(f"{count} {why}" for why, count in sorted(found.excused.items()) if why) or "none"
    return "\n".join(
        [
            outcome.headline(f"fan-out to {outcome.options.vehicles} vehicles"),
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
    line = rounds.node_parser("tests.chaos.fanout", __doc__, rate=Options.rate, pace="batches per second")
    line.add_argument("--vehicles", type=int, default=30)
    return [Options(**run) for run in options_of_runs(line.parse_args(arguments), "engine")]


def main(arguments: list[str]) -> int:
    return run_all(_options(arguments), crash, report, lambda outcome: outcome.verdict.passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
