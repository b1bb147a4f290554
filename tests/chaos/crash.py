"""Kill a node under load again and again, and count what became of every message.

    python -m tests.chaos.crash --rounds 100 --engine rocksdb,redis [--qos 1,2] [--seed 7] [--kill node|redis|both]

A real node, real sockets, clients that outlive the node (`cast.py`), and a judge who only knows what the clients wrote
down (`judge.py`). Each round is one SIGKILL: at a random instant while the node serves, at the moment when a publisher
got an answer or a receiver a message, while the node starts, or right after it came back. At the end the load stops,
everybody comes back, everything drains, and the node is killed once more, so that whatever it would send twice after a
crash has its chance. Exit code 1 on any finding.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import rounds
from tests.chaos.cast import Cast
from tests.chaos.command import options_of_runs, run_all
from tests.chaos.judge import Debts, History, Tally, Verdict, judge, unpublished_wills

REDIS_AWAY = 0.5  #: seconds that a killed Redis is away, at most

#: How many of the nodes live at least until somebody has seen all retained messages.
LOOKS = 0.5

PLAN = rounds.Plan(
    life=1.5,
    ways={"serving": 0.4, "answered": 0.2, "delivered": 0.1, "starting": 0.15, "twice": 0.15},
    events={"answered": 20, "delivered": 20},
    patience=600.0,
    earliest=0.3,
)


@dataclass
class Options(rounds.NodeOptions):
    """What to do in one run."""

    qos: tuple[int, ...] = (1, 2)
    kill: str = "node"
    rate: float = 60.0  #: messages per second of each publisher


Outcome = rounds.Outcome[Options, Verdict]


class Run(rounds.NodeRun[Options, Verdict]):
    """One run on one engine."""

    def __init__(self, options: Options, data: Path) -> None:
        super().__init__(options, data, PLAN)
        self.history = History()
        self.cast = Cast(
            self.victim.address,
            self.history,
            self.random,
            qos=options.qos,
            rate=options.rate,
            patience=options.standstill / 2,
        )

    # -- the load

    async def enter(self) -> None:
        await self.cast.enter()
        await self.cast.play()

    async def end_load(self) -> None:
        await self.cast.end_load()

    async def leave(self) -> None:
        await self.cast.exit()

    def acknowledged(self) -> str:
        return str(sum(publication.is_acknowledged for publication in self.history.sent()))

    def judge(self) -> Verdict:
        return judge(self.history)

    def listen(self, event: str, happened: Callable[[], None]) -> None:
        def heard(what: str) -> None:
            if what == event:
                happened()

        self.history.happened = heard

    # -- one round

    async def round(self) -> None:
        kill = self.options.kill
        if kill == "both":
            kill = self.random.choice(("node", "redis"))
        if kill == "node":
            if self.random.random() < LOOKS:
                await self.cast.settle_probes()
            await super().round()
        elif kill == "redis":
            await self._round_of_redis()
        else:
            await asyncio.sleep(self.random.uniform(0.0, self.plan.life))
        self.cast.check()

    def life_of(self, way: str) -> float:
        return self.plan.life / 8 if way == "twice" else self.plan.life

    async def _round_of_redis(self) -> None:
        await asyncio.sleep(self.random.uniform(0.0, self.plan.life))
        server = await asyncio.to_thread(self.backing.kill, self.random)
        self.killed("redis")
        await asyncio.sleep(self.random.uniform(0.0, REDIS_AWAY))
        await asyncio.to_thread(server.start)
        if not self.victim.is_alive:
            words = f"process {self.victim.starts} did not live through a restart of Redis"
            self.troubles.append(("node ended", words))
            await self.victim.kill()
            await self.start()

    def killed(self, how: str) -> None:
        super().killed(how)
        self.cast.kills += how != "starting"

    async def start(self) -> None:
        await super().start()
        self.cast.probe()

    # -- the end

    async def drain(self) -> None:
        """Until nothing is owed any more."""
        debts = Debts(self.history)

        async def left() -> int:
            self.cast.check()
            return (
                sum(map(len, debts.owed().values()))
                + sum(publication.is_open for publication in self.history.sent())
                + len(unpublished_wills(self.history))
                + sum(not publisher.is_done for publisher in self.cast.paho_publishers)
            )

        await self.until_nothing_is_left(left)
        await self.cast.settle_probes()

    async def epilogue(self) -> None:
        """Kill once more, and speak to everybody once more: what would come twice comes before that."""
        if self.options.kill != "none":
            await self.victim.kill()
            self.killed("drained")
            await self.start()

        async def absent() -> int:
            self.cast.check()
            return not self.cast.is_together

        await self.until_nothing_is_left(absent)
        await self.cast.say_goodbye()
        await self.drain()


def crash(options: Options) -> Outcome:
    return rounds.crash(Run, options)


# -- telling


def report(outcome: Outcome) -> str:
    """The table, and every finding."""
    verdict, lines = outcome.verdict, [outcome.headline()]
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
    line = rounds.node_parser(
        "tests.chaos.crash", __doc__, rate=Options.rate, pace="messages per second of each publisher"
    )
    line.add_argument("--qos", type=_qos, default="1,2", help="QoS of the messages")
    line.add_argument("--kill", choices=("node", "redis", "both", "none"), default="node", help="who is killed")
    given = line.parse_args(arguments)
    for engine in given.engine:
        if given.kill in {"redis", "both"} and not engine.startswith("redis"):
            line.error(f"--kill {given.kill}: there is no Redis to kill with {engine}")
    return [Options(**run) for run in options_of_runs(given, "engine")]


def _qos(words: str) -> tuple[int, ...]:
    return tuple(int(word) for word in words.split(","))


def main(arguments: list[str]) -> int:
    return run_all(_options(arguments), crash, report, lambda outcome: outcome.verdict.passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
