"""Queues and streams through the source way, beside live routing of the same messages on the same node.

    live     publisher and subscribers connected, topics that nobody keeps
    fill     the same messages to topics that are kept; the last PUBACK says that all is stored
    drain    the subscribers come and get them out of the queue or stream

One run of the generator does all three on a fresh node, so the ratio of drain to live is one of the same seconds, the
same messages and the same generator. Rates count from the first message to the last.

    idle     many subscribers, nothing published: processor time of the node, with sources and with plain filters
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from .brokers import Motorcade, Running
from .machine import (
    SOURCES,
    BenchError,
    alone,
    busy_seconds,
    children_seconds,
    compile_generator,
    cpu_seconds,
    describe,
    exact_cpu_seconds,
    exit_code,
    free_port,
    parse_cores,
    raise_open_files,
)
from .measure import Runs, Sample
from .phases import converse
from .report import human, markdown_table, noise, times
from .verdict import Flaw, Outcome, Row
from .workloads import VARIED, Metric, Workload

RATIO_BAR = 0.5  #: drain / live, at least
IDLE_BAR = 0.005  #: cores that idle subscribers of sources may take beyond plain ones: what cannot be told from noise

ROUNDS = 3
PATIENCE = 120.0  #: seconds for one run of the generator
MESSAGES, QUICK_MESSAGES = 100_000, 20_000
IDLE_CLIENTS, QUICK_IDLE_CLIENTS = 10_000, 1000
IDLE_SECONDS, QUICK_IDLE_SECONDS = 20.0, 3.0
CALM_SECONDS = 2.0  #: between the last connect and the first look at idle subscribers
READY_SECONDS = 90.0  #: until idle subscribers are connected

FILTERS = {"stream": "$stream/load/earliest", "queue": "$queue/load"}
WHAT = {
    ("stream", False): "one reader of a stream; live: one subscriber",
    ("stream", True): "{n} readers of a stream, each gets all; live: {n} subscribers",
    ("queue", False): "one consumer of a queue; live: one subscriber",
    ("queue", True): "{n} consumers of a queue, each gets its share; live: a shared subscription with {n} members",
}


@dataclass(frozen=True, slots=True)
class Setup:
    """How the node is run."""

    store: str
    window: int  #: messages in flight to a client


class MotorcadeSources(Motorcade):
    """Motorcade with one queue or stream that is called `load`."""

    def __init__(self, kind: str, setup: Setup) -> None:
        self.name = f"motorcade ({kind})"
        self.kind = kind
        self.setup = setup

    def command(self, folder: Path, port: int) -> list[str]:
        config = folder / "motorcade.toml"
        template = (SOURCES / "motorcade.toml").read_text()
        config.write_text(template.replace("{kind}", self.kind).replace("{window}", str(self.setup.window)))
        listeners = ["--mqtt", f"127.0.0.1:{port}", "--ws", "off", "--http", "off"]
        place = ["--data", str(folder / "data"), "--store", self.setup.store]
        return [str(self.program), "serve", "--config", str(config), *listeners, *place]


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the report."""

    kind: str  #: stream or queue
    qos: int
    readers: int
    messages: int  #: published; each reader of a stream gets all of them

    @property
    def name(self) -> str:
        return f"{self.kind}-q{self.qos}-{self.readers}"

    @property
    def what(self) -> str:
        what = WHAT[self.kind, self.readers > 1].format(n=self.readers)
        return f"{what}; QoS {self.qos}, {self.messages} messages, 50 topics, sizes mixed"

    def arguments(self) -> list[str]:
        """The generator's, after host and port."""
        words = f"--n {self.readers} --msgs {self.messages} --qos {self.qos} --window 400 --flow 400 {VARIED}"
        shared = ["--shared"] * (self.kind == "queue")
        return ["--tag", "bench", "--filter", FILTERS[self.kind], *words.split(), *shared, "--idle", "20"]

    def workload(self, phase: str) -> Workload:
        return Workload(f"{self.name}-{phase}", self.what, "source", time_option=None)


def cases(messages: int) -> list[Case]:
    """All rows. With ten readers of a stream every message is delivered ten times, so there are fewer."""
    found = [Case(kind, qos, 1, messages) for kind in FILTERS for qos in (0, 1)]
    found += [Case("stream", qos, 10, messages // 5) for qos in (0, 1)]
    return found + [Case("queue", qos, 10, messages) for qos in (0, 1)]


@dataclass(slots=True)
class Result:
    """All rounds of one case."""

    case: Case
    live: Row
    drain: Row
    fills: list[dict[str, Any]]

    @property
    def ratios(self) -> list[float]:
        """Drain to live, of each round."""
        pairs = zip(self.live.samples, self.drain.samples, strict=True)
        return [drain.value / live.value for live, drain in pairs if live.value]

    @property
    def ratio(self) -> float | None:
        return median(self.ratios) if self.ratios else None

    @property
    def flaws(self) -> tuple[str, ...]:
        named = [("live", self.live.flaws), ("drain", self.drain.flaws)]
        unstored = any(fill["unacked"] or fill["timed_out"] for fill in self.fills)
        return (*(f"{phase}: {flaw}" for phase, flaws in named for flaw in flaws), *["fill: not finished"] * unstored)

    @property
    def outcome(self) -> Outcome:
        """A live rate that the generator could not exceed makes the ratio too good; nothing is shown by it."""
        if self.ratio is None or self.live.flaws or self.drain.flaws not in ((), (Flaw.GENERATOR_BOUND,)):
            return Outcome.NOT_SHOWN
        if self.ratio >= RATIO_BAR:
            return Outcome.MET
        return Outcome.NOT_SHOWN if self.drain.flaws else Outcome.MISSED


@dataclass(frozen=True, slots=True)
class Idle:
    """So many subscribers that get nothing."""

    name: str
    clients: int
    seconds: float
    cpu: float  #: processor seconds of the node meanwhile
    kib_each: float  #: growth of its resident memory for each of them

    @property
    def cores(self) -> float:
        return self.cpu / self.seconds


@dataclass(slots=True)
class Sources:
    """Runs everything, on these cores."""

    generator: Path
    setup: Setup
    broker_core: int
    generator_core: int
    fills: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def measure(self, rows: Sequence[Case], rounds: int) -> list[Result]:
        """Rounds of all cases, interleaved: a bad minute of the machine is shared."""
        live = {case: Runs(case.workload("live"), MotorcadeSources(case.kind, self.setup)) for case in rows}
        drain = {case: Runs(case.workload("drain"), MotorcadeSources(case.kind, self.setup)) for case in rows}
        for _ in range(rounds):
            for case in rows:
                self._round(case, live[case], drain[case])
        return [Result(case, Row.of(live[case]), Row.of(drain[case]), self.fills.get(case.name, [])) for case in rows]

    def _round(self, case: Case, live: Runs, drain: Runs) -> None:
        try:
            with self._node(case.kind) as node:
                said, foreign = self._run(case, node)
        except BenchError as error:
            print(f"{case.name}: failed: {error}", file=sys.stderr, flush=True)
            live.errors.append(str(error))
            drain.errors.append(str(error))
            return
        self.fills.setdefault(case.name, []).append(said["fill"])
        for runs, phase in ((live, "live"), (drain, "drain")):
            runs.samples.append(Sample.of(Metric.MESSAGES, said[phase], foreign))
        values = ", ".join(f"{phase} {human(said[phase]['rate'])}/s" for phase in ("live", "fill", "drain"))
        print(f"{case.name}: {values}", file=sys.stderr, flush=True)

    def _run(self, case: Case, node: Running) -> tuple[dict[str, dict[str, Any]], float]:
        """What the generator said of each phase, and the load of everybody else."""
        started, busy = time.monotonic(), busy_seconds()
        served, generated = cpu_seconds(node.pid), children_seconds()
        said = converse(self._command("source", node, *case.arguments()), PATIENCE)
        ours = cpu_seconds(node.pid) - served + children_seconds() - generated
        return said, round(max(0.0, busy_seconds() - busy - ours) / (time.monotonic() - started), 3)

    def idle(self, clients: int, seconds: float) -> list[Idle]:
        """Plain subscribers first, then those of a stream, then consumers of a queue, each on a fresh node."""
        wanted = [("plain", "stream", []), *((kind, kind, ["--filter", FILTERS[kind]]) for kind in FILTERS)]
        return [self._idle(name, kind, options, clients, seconds) for name, kind, options in wanted]

    def _idle(self, name: str, kind: str, options: list[str], clients: int, seconds: float) -> Idle:
        with self._node(kind) as node:
            hold = str(READY_SECONDS + seconds + CALM_SECONDS)
            command = self._command("conn", node, "--n", str(clients), "--sub", "--hold", hold, *options)
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as generator:
                try:
                    assert generator.stdout is not None
                    line = generator.stdout.readline()
                    if not line:
                        assert generator.stderr is not None
                        raise BenchError(
                            f"idle {name}: {generator.stderr.read().strip() or 'the generator said nothing'}"
                        )
                    time.sleep(CALM_SECONDS)
                    before, began = exact_cpu_seconds(node.pid), time.monotonic()
                    time.sleep(seconds)
                    used, took = exact_cpu_seconds(node.pid) - before, time.monotonic() - began
                finally:
                    generator.send_signal(signal.SIGKILL)
        said = json.loads(line)
        if said["conn_fail"] or said["disconnects"]:
            raise BenchError(f"idle {name}: {said['conn_fail']} not connected, {said['disconnects']} disconnected")
        found = Idle(name, clients, took, used, said["rss_per_conn_bytes"] / 1024)
        print(f"idle {name}: {found.cores:.4f} cores", file=sys.stderr, flush=True)
        return found

    def _command(self, workload: str, node: Running, *options: str) -> list[str]:
        head = ["taskset", "-c", str(self.generator_core), str(self.generator), workload, "127.0.0.1", str(node.port)]
        return [*head, "--broker-pid", str(node.pid), *options]

    @contextmanager
    def _node(self, kind: str) -> Iterator[Running]:
        running = Running(MotorcadeSources(kind, self.setup), free_port(), self.broker_core)
        try:
            yield running
        finally:
            running.stop()


# -- the report

HEAD = (
    "row",
    "live",
    "drain",
    "ratio",
    "lowest – highest",
    "CPU µs live / drain",
    "fill",
    "first message",
    "lost / dup / reordered",
    "load gen live / drain",
    "bar",
)


def idle_outcome(plain: Idle, other: Idle) -> Outcome:
    """Whether subscribers of sources cost what plain ones do."""
    return Outcome.MET if other.cores <= plain.cores + IDLE_BAR else Outcome.MISSED


def markdown(results: Sequence[Result], idle: Sequence[Idle], notes: Sequence[str]) -> str:
    """The whole report."""
    samples = [sample for result in results for row in (result.live, result.drain) for sample in row.samples]
    lines = ["# Sources beside live routing", "", *(f"- {note}" for note in [*notes, *noise(samples)]), ""]
    if results:
        lines += [
            f"Bar: draining a queue or stream has at least {RATIO_BAR:g} × the rate of live routing in the same run.",
            "",
            *markdown_table(
                HEAD,
                [_cells(result) for result in results],
            ),
            *(f"- `{result.case.name}`: {result.case.what}" for result in results),
            "",
        ]
    if idle:
        lines += _idle_table(idle)
    return "\n".join(lines)


def _cells(result: Result) -> list[str]:
    live, drain = result.live, result.drain
    if not result.ratios or live.value is None or drain.value is None:
        errors = (*live.errors, "no figures")
        return [result.case.name, *["–"] * 9, f"failed: {errors[0].replace('|', '/')}"]
    loads = [row.middle(lambda sample: sample.generator_load) or 0.0 for row in (live, drain)]
    costs = [row.middle(lambda sample: sample.cpu_per_million) or 0.0 for row in (live, drain)]
    firsts = median(sample.raw["first_s"] for sample in drain.samples)
    counts = (
        drain.total(lambda sample: sample.lost),
        drain.total(lambda sample: sample.duplicated),
        drain.total(lambda sample: sample.reordered),
    )
    return [
        result.case.name,
        f"{human(live.value)}/s",
        f"{human(drain.value)}/s",
        times(result.ratio),
        f"{times(min(result.ratios))} – {times(max(result.ratios))}",
        " / ".join(f"{cost:.1f}" for cost in costs),
        f"{human(median(fill['rate'] for fill in result.fills))}/s",
        f"{firsts * 1000:.0f} ms",
        " / ".join(str(count) for count in counts),
        " / ".join(f"{load:.2f}" for load in loads),
        f"{result.outcome}" + (f" (**not valid**: {'; '.join(result.flaws)})" if result.flaws else ""),
    ]


def _idle_table(idle: Sequence[Idle]) -> list[str]:
    plain, *others = idle
    bars = {other.name: idle_outcome(plain, other) for other in others}
    bar = f"those of sources take at most {IDLE_BAR:g} cores more than plain ones"
    return [
        f"{plain.clients} idle subscribers for {plain.seconds:.0f} s. Bar: {bar}.",
        "",
        *markdown_table(
            ["subscribers of", "CPU s", "cores", "KiB each", "bar"],
            [
                [one.name, f"{one.cpu:.3f}", f"{one.cores:.4f}", f"{one.kib_each:.1f}", f"{bars.get(one.name, '')}"]
                for one in idle
            ],
        ),
    ]


def as_json(results: Sequence[Result], idle: Sequence[Idle]) -> dict[str, Any]:
    """Everything, with the generator's own words."""
    return {
        "machine": describe(),
        "rows": [
            {
                "row": result.case.name,
                "ratio": result.ratio,
                "ratios": result.ratios,
                "outcome": result.outcome.value,
                "flaws": list(result.flaws),
                "errors": list(result.live.errors),
                "live": [sample.raw for sample in result.live.samples],
                "fill": result.fills,
                "drain": [sample.raw for sample in result.drain.samples],
            }
            for result in results
        ],
        "idle": [asdict(one) | {"cores": one.cores} for one in idle],
    }


# -- the command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/run sources",
        description="Drains queues and streams beside live routing of the same messages; looks at idle subscribers.",
    )
    parser.add_argument("--quick", action="store_true", help="one round, fewer messages, fewer idle clients")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"rounds, of which the median counts ({ROUNDS})")
    parser.add_argument("--messages", type=int, metavar="N", help=f"messages of a run ({MESSAGES})")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows, such as stream-q1-1, or idle")
    parser.add_argument("--store", default="rocksdb://", metavar="URL", help="where the node stores (rocksdb://)")
    parser.add_argument("--window", type=int, default=32, metavar="N", help="messages in flight to a client (32)")
    parser.add_argument("--cores", default="0,1", metavar="B,G", help="cores of broker and generator (0,1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument("--strict", action="store_true", help="end with 1 unless every measured bar is met")
    return parser


def _chosen(only: Sequence[str] | None, messages: int) -> tuple[list[Case], bool]:
    """The rows that were asked for, and whether idle subscribers were."""
    rows = cases(messages)
    if only is None:
        return rows, True
    unknown = set(only) - {case.name for case in rows} - {"idle"}
    if unknown:
        names = ", ".join([*(case.name for case in rows), "idle"])
        raise BenchError(f"no such row: {', '.join(sorted(unknown))} (there are {names})")
    return [case for case in rows if case.name in only], "idle" in only


def _measure(args: argparse.Namespace) -> int:
    rows, idle_too = _chosen(args.only, args.messages or (QUICK_MESSAGES if args.quick else MESSAGES))
    broker_core, generator_core = parse_cores(args.cores)
    rounds = args.rounds or (1 if args.quick else ROUNDS)
    setup = Setup(args.store, args.window)
    raise_open_files()
    with alone():
        node = MotorcadeSources("stream", setup)
        node.prepare(install=False)
        bench = Sources(compile_generator(), setup, broker_core, generator_core)
        results = bench.measure(rows, rounds)
        clients = (QUICK_IDLE_CLIENTS, QUICK_IDLE_SECONDS) if args.quick else (IDLE_CLIENTS, IDLE_SECONDS)
        idle = bench.idle(*clients) if idle_too else []
    notes = [
        f"motorcade: {node.version()}, store {args.store}, window {args.window}",
        f"node on core {broker_core}, generator on core {generator_core}; median of {rounds} interleaved round(s)",
        f"machine: {describe()}",
    ]
    report = markdown(results, idle, notes)
    print(report)
    if args.out:
        args.out.write_text(report)
    if args.json:
        args.json.write_text(json.dumps(as_json(results, idle), indent=1) + "\n")
    outcomes = [result.outcome for result in results] + [idle_outcome(idle[0], one) for one in idle[1:]]
    return 1 if args.strict and any(outcome is not Outcome.MET for outcome in outcomes) else 0


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit code tells failures of the run, and with --strict of the bars."""
    args = _parser().parse_args(arguments)
    return exit_code("bench/run sources", lambda: _measure(args))
