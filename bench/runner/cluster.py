"""Several nodes as one broker: what a message costs when it stays on a node, when it crosses, and when it is stored.

    lone        one node on Redis, without links
    member      one node on Redis that is a member of a cluster, alone
    two         two nodes; each publisher is connected to the node of its subscriber
    across      two nodes; each publisher is connected to the other node
    in turns    lone and member up at the same time, each with traffic in turn: five percent are less than a machine
                that other programs use changes between two rounds. What a node costs without any traffic, by the clock,
                is measured before each turn. It is no part of the cost of a message, but of the core: on a slow machine
                it would weigh more than it does

One machine has too few cores for several nodes, a generator and Redis at full speed. So what is compared is processor
time per message, of all nodes together: it says how much n cores can do. Redis and the generator are counted apart.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

from .brokers import START_SECONDS, Motorcade, Running
from .machine import (
    BENCH,
    BenchError,
    alone,
    compile_generator,
    describe,
    exact_cpu_seconds,
    exit_code,
    free_port,
    parse_cores,
    raise_open_files,
)
from .phases import converse
from .report import markdown_table

ROUNDS: Final = 3
IDLE: Final = 2.0  #: seconds without traffic before each turn
TURNS: Final = 5  #: of a lone node and a member, for each round
PATIENCE: Final = 300.0  #: seconds for one run of the generator
PAIRS, MESSAGES, QUICK_MESSAGES = 100, 400_000, 60_000
SETTLE: Final = 2  #: seconds between the last CONNACK and the first message: what connecting has cost is not counted
PER_Q0: Final = 8  #: times as many messages of QoS 0: one costs so much less
SLEEPERS, PER_SLEEPER, QUICK_PER_SLEEPER = 1000, 100, 20
RECEIVERS = 100
CLIENTS, QUICK_CLIENTS = 10_000, 2000

MEMBER_BAR: Final = 0.95  #: rate of a member alone on a core, beside a lone node
TWO_BAR: Final = 1.5  #: rate of two nodes on two cores, beside a lone node on one
ACROSS_BAR: Final = 2.5  #: cost of a message that crosses, beside one that does not

#: What each layout is, for the report.
WHAT: Final = {
    "lone": "one node on Redis, without links",
    "member": "one node with links, alone",
    "two": "two nodes, publishers at the node of their subscribers",
    "across": "two nodes, publishers at the other node",
}

LAYOUTS: Final = {"lone": (1, False), "member": (1, True), "two": (2, True), "across": (2, True)}  #: nodes, linked
IN_TURNS: Final = {"lone": "lone, in turns", "member": "member, in turns"}
ROWS: Final = (*LAYOUTS, *IN_TURNS.values())  #: layouts in the order of the report


class Member(Motorcade):
    """One node on Redis, with or without links to others."""

    def __init__(self, name: str, store: str, *, linked: bool) -> None:
        self.name = name
        self.store = store
        self.linked = linked

    def command(self, folder: Path, port: int) -> list[str]:
        text = (BENCH / "motorcade.toml").read_text() + f'\n[broker]\nnode = "{self.name}"\n'
        if self.linked:
            text += f'[cluster]\nbind = "127.0.0.1:{free_port()}"\n'
        config = folder / "motorcade.toml"
        config.write_text(text)
        listeners = ["--mqtt", f"127.0.0.1:{port}", "--ws", "off", "--http", "off"]
        place = ["--data", str(folder / "data"), "--store", self.store]
        return [str(self.program), "serve", "--config", str(config), *listeners, *place]


@contextmanager
def redis() -> Iterator[tuple[str, int]]:
    """Run a Redis that syncs once a second. Yield its URL and its process id."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise BenchError("neither redis-server nor valkey-server is installed")
    port = free_port()
    with TemporaryDirectory(prefix="bench-redis-") as folder:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--logfile", "log"]
        options += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
        server = subprocess.Popen([program, *options])
        try:
            _await_redis(server, port)
            yield f"redis://127.0.0.1:{port}", server.pid
        finally:
            server.terminate()
            server.wait()


def _await_redis(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise BenchError("the Redis server does not listen") from None
            time.sleep(0.05)
        else:
            return


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of traffic."""

    name: str
    what: str
    arguments: str  #: of the generator, after host and port
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    phases: tuple[str, ...] = ()


def cases(*, quick: bool) -> list[Case]:
    """Return all kinds of traffic."""
    messages = QUICK_MESSAGES if quick else MESSAGES
    per = QUICK_PER_SLEEPER if quick else PER_SLEEPER
    clients = QUICK_CLIENTS if quick else CLIENTS
    found = [
        Case(
            f"live-q{qos}",
            f"{PAIRS} pairs, QoS {qos}, 64 bytes",
            f"pair --pairs {PAIRS} --qos {qos} --msgs {messages * (1 if qos else PER_Q0)} --window 100 "
            f"--flow 100 --idle 20 --settle {SETTLE}",
        )
        for qos in (0, 1)
    ]
    found.append(
        Case(
            "awake",
            f"{PAIRS} pairs, QoS 1, 64 bytes, the subscribers with durable sessions",
            f"pair --pairs {PAIRS} --qos 1 --msgs {messages // 4} --window 100 --idle 20 --persistent",
        )
    )
    sleepers = "--pubs 10 --window 100 --size 256 --idle 20"
    phases = ("asleep", "fill", "drain")
    found += [
        Case(
            "durable",
            f"{SLEEPERS} sleeping sessions with topics of their own, 256 bytes",
            f"offline --n {SLEEPERS} --per {per} {sleepers}",
            phases=phases,
        ),
        Case(
            "shared",
            f"256 bytes, each for all of {RECEIVERS} sleeping sessions; figures are per message and receiver",
            f"offline --shared --n {RECEIVERS} --per {10 * per} {sleepers}",
            phases=phases,
        ),
    ]
    found.append(Case("connect", f"{clients} clients, each with a subscription", f"conn --n {clients} --sub"))
    return found


@dataclass(slots=True)
class Figures:
    """What all rounds of one row have brought."""

    rates: list[float] = field(default_factory=list)  #: per second
    nodes: list[float] = field(default_factory=list)  #: processor time of all nodes, µs each
    redis: list[float] = field(default_factory=list)  #: and of Redis
    generator: list[float] = field(default_factory=list)  #: load, in cores
    idle: list[float] = field(default_factory=list)  #: cores used without traffic

    def add(self, rate: float, nodes: float, store: float, generator: float) -> None:
        self.rates.append(rate)
        self.nodes.append(nodes)
        self.redis.append(store)
        self.generator.append(generator)


@dataclass(slots=True)
class Bench:
    """Runs all cases in all layouts."""

    generator: Path
    cores: tuple[int, int]
    figures: dict[tuple[str, str], Figures] = field(default_factory=dict)  #: by row and layout

    def measure(self, wanted: Sequence[Case], rounds: int) -> None:
        """Run interleaved rounds: a bad minute of the machine is shared."""
        for number in range(rounds):
            layouts = list(LAYOUTS)
            for layout in layouts[number % len(layouts) :] + layouts[: number % len(layouts)]:
                chosen = [case for case in wanted if layout in case.layouts]
                self._measure_layout(layout, chosen)
        for case in wanted:
            if case.name in LIVE:
                self._take_turns(case, TURNS * rounds)

    def _take_turns(self, case: Case, times: int) -> None:
        """Measure a lone node and a member in turns."""
        with ExitStack() as stack:
            nodes: list[tuple[str, Running, int]] = []
            for layout, row in IN_TURNS.items():
                url, redis_pid = stack.enter_context(redis())
                node = Running(Member(layout, url, linked=LAYOUTS[layout][1]), free_port(), self.cores[0])
                stack.callback(node.stop)
                nodes.append((row, node, redis_pid))
            for number in range(times):
                for row, node, redis_pid in nodes[:: -1 if number % 2 else 1]:
                    before, began = exact_cpu_seconds(node.pid), time.monotonic()
                    time.sleep(IDLE)
                    idle = (exact_cpu_seconds(node.pid) - before) / (time.monotonic() - began)
                    self._run(case, row, [node], redis_pid, idle)

    def _measure_layout(self, layout: str, chosen: Sequence[Case]) -> None:
        count, linked = LAYOUTS[layout]
        with ExitStack() as stack:
            url, redis_pid = stack.enter_context(redis())
            nodes: list[Running] = []
            for number in range(count):
                node = Running(Member(f"n{number + 1}", url, linked=linked), free_port(), self.cores[0])
                stack.callback(node.stop)
                nodes.append(node)
            for case in chosen:
                self._run(case, layout, nodes, redis_pid)

    def _run(
        self, case: Case, layout: str, nodes: Sequence[Running], redis_pid: int, idle: float | None = None
    ) -> None:
        """`idle`: cores that the nodes have used without traffic, which is taken off."""
        workload, *words = case.arguments.split()
        command = ["taskset", "-c", str(self.cores[1]), str(self.generator), workload, "127.0.0.1", str(nodes[0].port)]
        command += [*words, "--broker-pid", ",".join(str(node.pid) for node in nodes)]
        command += ["--ports", ",".join(str(node.port) for node in nodes)]
        command += ["--shift", "1"] * (layout == "across")
        for row, said, store in self._said(case, command, redis_pid):
            wrong = [name for name in WRONG if said.get(name)]
            if wrong:
                raise BenchError(f"{row} {layout}: {', '.join(f'{name} {said[name]}' for name in wrong)}")
            operations = said["broker_cpu_s"] / said["cpu_s_per_M"] * 1e6 if said["cpu_s_per_M"] else 1
            rate = said["connects_per_s"] if "connects_per_s" in said else said["rate"]
            figures = self.figures.setdefault((row, layout), Figures())
            cost = said["cpu_s_per_M"]
            if idle is not None:
                figures.idle.append(idle)
                cost -= idle * said["secs"] / operations * 1e6
            figures.add(rate, cost, store / operations * 1e6, said["gen_util"])
            print(f"{row} {layout}: {rate:.0f}/s, {said['cpu_s_per_M']:.2f} us each", file=sys.stderr, flush=True)

    def _said(self, case: Case, command: Sequence[str], redis_pid: int) -> list[tuple[str, dict[str, Any], float]]:
        """Return what the generator said, with the processor time of Redis meanwhile, for each row."""
        marks = [exact_cpu_seconds(redis_pid)]

        def look(_phase: str) -> str:
            marks.append(exact_cpu_seconds(redis_pid))
            return ""

        if case.phases:
            said = converse(command, PATIENCE, look)
            look("")
            costs = [after - before for before, after in pairwise(marks)]
            rows = list(zip(case.phases, costs, strict=True))[1:]  # nothing is published in the first
            return [(f"{case.name}-{phase}", said[phase], cost) for phase, cost in rows]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        if done.returncode or not done.stdout:
            raise BenchError(done.stderr.strip() or "the generator said nothing")
        return [(case.name, json.loads(done.stdout.splitlines()[-1]), exact_cpu_seconds(redis_pid) - marks[0])]

    def cost(self, row: str, layout: str) -> float | None:
        """Return the processor time of the nodes, µs each."""
        figures = self.figures.get((row, layout))
        return median(figures.nodes) if figures is not None else None

    def _left(self, row: str, layout: str) -> float:
        """Return what is left of a core for messages, beside what a node costs without traffic."""
        return 1 - median(self.figures[row, IN_TURNS[layout]].idle or [0.0])

    def bars(self) -> list[tuple[str, float, bool]]:
        """Return what was asked for, how it is, and whether that is enough."""
        found: list[tuple[str, float, bool]] = []
        for row in LIVE:
            lone, _, two, across = (self.cost(row, layout) for layout in LAYOUTS)
            before, after = (self.cost(row, layout) for layout in IN_TURNS.values())
            if not (lone and two and across and before and after):
                continue
            alone_ratio = self._left(row, "member") / after / (self._left(row, "lone") / before)
            both, crossing = 2 * lone / two, across / two
            found += [
                (f"{row}: a member alone / a lone node, at least {MEMBER_BAR}", alone_ratio, alone_ratio >= MEMBER_BAR),
                (f"{row}: two nodes on two cores / a lone node, at least {TWO_BAR}", both, both >= TWO_BAR),
                (
                    f"{row}: a message that crosses / one that stays, at most {ACROSS_BAR}",
                    crossing,
                    crossing <= ACROSS_BAR,
                ),
            ]
        return found


LIVE: Final = ("live-q0", "live-q1")  #: rows that have bars
WRONG: Final = ("lost", "unexpected", "reordered", "timed_out", "conn_fail", "disconnects", "unacked")


def markdown(bench: Bench, wanted: Sequence[Case], notes: Sequence[str]) -> str:
    """Return the whole report."""
    lines = ["# Several nodes as one broker", "", *(f"- {note}" for note in notes), ""]
    heads = ["row", "layout", "rate", "nodes, µs each", "lowest – highest", "Redis, µs each", "load gen"]
    body = [
        [
            row,
            layout,
            f"{median(figures.rates):.0f}/s",
            f"{median(figures.nodes):.3f}",
            f"{min(figures.nodes):.3f} – {max(figures.nodes):.3f}",
            f"{median(figures.redis):.2f}",
            f"{median(figures.generator):.2f}",
        ]
        for (row, layout), figures in sorted(bench.figures.items(), key=_order(wanted))
    ]
    lines += [*markdown_table(heads, body), ""]
    for (row, layout), figures in bench.figures.items():
        if figures.idle:
            lines.append(
                f"- {row} {layout}: {median(figures.idle):.2%} of a core without traffic, which is not in its figure"
            )
    lines.append("")
    bars = [[what, f"{ratio:.2f}", "met" if met else "missed"] for what, ratio, met in bench.bars()]
    return "\n".join([*lines, *markdown_table(["bar", "ratio", ""], bars), ""])


def _order(wanted: Sequence[Case]) -> Callable[[tuple[tuple[str, str], Figures]], tuple[int, str, int]]:
    names = [case.name for case in wanted]

    def key(item: tuple[tuple[str, str], Figures]) -> tuple[int, str, int]:
        (row, layout), _ = item
        return next(at for at, name in enumerate(names) if row.startswith(name)), row, ROWS.index(layout)

    return key


# -- the command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench/run cluster", description="Several nodes on one Redis as one broker.")
    parser.add_argument("--quick", action="store_true", help="one round, fewer messages")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"rounds, of which the median counts ({ROUNDS})")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these: live-q0 live-q1 awake durable shared connect")
    parser.add_argument("--cores", default="0,1", metavar="B,G", help="cores of the nodes and the generator (0,1)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument("--strict", action="store_true", help="end with 1 unless every measured bar is met")
    return parser


def _measure(args: argparse.Namespace) -> int:
    cores = parse_cores(args.cores)
    rounds = args.rounds or (1 if args.quick else ROUNDS)
    wanted = [case for case in cases(quick=args.quick) if not args.only or case.name in args.only]
    if not wanted:
        raise BenchError("nothing to measure: --only takes live-q0, live-q1, awake, durable, shared, connect")
    raise_open_files()
    with alone():
        Motorcade().prepare(install=False)
        bench = Bench(compile_generator(), cores)
        bench.measure(wanted, rounds)
    notes = [f"motorcade: {Motorcade().version()}"]
    notes += [f"{layout}: {what}" for layout, what in WHAT.items()]
    notes += [f"{case.name}: {case.what}" for case in wanted]
    notes.append(
        f"all nodes on core {cores[0]}, generator on core {cores[1]}, Redis on either: compare costs, not rates"
    )
    notes += [f"median of {rounds} interleaved round(s)", f"machine: {describe()}"]
    report = markdown(bench, wanted, notes)
    print(report)
    if args.out:
        args.out.write_text(report)
    return 1 if args.strict and not all(met for _, _, met in bench.bars()) else 0


def main(arguments: Sequence[str]) -> int:
    """Run it. Return the exit code: it tells failures of the run, and with --strict of the bars."""
    args = _parser().parse_args(arguments)
    return exit_code("bench/run cluster", lambda: _measure(args))
