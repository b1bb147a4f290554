"""The VIN fan-out beside what a user does today: a loop of one PUBLISH QoS 1 per vehicle to mosquitto.

    online    all vehicles connected, with sessions that last; from the first byte of the platform to the last delivery
    offline   all vehicles away; from the first byte of the platform to its last acknowledgement, then they come back
    accept    triggers of 200 VINs, 16 in flight, for vehicles that never come: a million pending messages, step by step

Both get the same payload for the same vehicles, from the same generator (`vinfan` of mqttload.c), in interleaved
rounds. Motorcade stores on disk, synced, before it acknowledges. mosquitto keeps its sessions in memory and writes them
every 30 minutes (`mosquitto-lazy`) or after every change (`mosquitto-eager`), which is measured once and with few
vehicles: its time grows with their square.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from .brokers import Broker, Mosquitto, Motorcade, Running
from .machine import BENCH, BenchError, alone, compile_generator, describe, exit_code, free_port, parse_cores
from .phases import converse
from .report import markdown_table

ONLINE_BAR = 2.0  #: times as fast as the loop, until the last vehicle has its message
OFFLINE_BAR = 5.0  #: times as fast as the loop, until everything is acknowledged
ACCEPT_BAR = 100_000  #: targets a second
FLAT = 0.8  #: the slowest step of a million is at least this part of the median; RSS grows by less than the rest

ROUNDS = 3
VEHICLES, QUICK_VEHICLES = 19_000, 2000
PER_BATCH = 200
IN_FLIGHT = 16  #: batches
LOOP_IN_FLIGHT = 100  #: messages of the loop
SIZE = 4096
PENDING, QUICK_PENDING = 1_000_000, 200_000
STEP = 100_000
EAGER = "mosquitto-eager"
EAGER_VEHICLES = 1000  #: a file that is written as a whole after every change is no match for more
PATIENCE = 600.0
SPARE_FILES = 900  #: beside one for each vehicle


@dataclass(frozen=True, slots=True)
class Side:
    """One who is measured, and how the platform speaks to it."""

    broker: Broker
    mode: str  #: of the generator: loop or batch

    @property
    def name(self) -> str:
        return self.broker.name

    def arguments(self) -> list[str]:
        window = IN_FLIGHT if self.mode == "batch" else LOOP_IN_FLIGHT
        return ["--mode", self.mode, "--batch-topic", "$SDV-FANOUT", "--window", str(window)]


def sides() -> list[Side]:
    ours = next(variant for variant in Motorcade.stored if variant.name == "motorcade-safe")
    return [Side(ours, "batch"), *(Side(variant, "loop") for variant in Mosquitto.stored)]


@dataclass(slots=True)
class Fanout:
    """Runs everything, on these cores."""

    generator: Path
    vehicles: int
    broker_core: int
    generator_core: int
    online: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    offline: dict[str, list[dict[str, dict[str, Any]]]] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, rounds: int, chosen: Sequence[str]) -> None:
        """Rounds of all, interleaved: a bad minute of the machine is shared."""
        for number in range(rounds):
            for side in sides():
                eager = side.name == EAGER
                if "online" in chosen and not eager:
                    self._online(side)
                if "offline" in chosen and (not eager or not number):
                    self._offline(side, min(self.vehicles, EAGER_VEHICLES) if eager else self.vehicles)

    def _online(self, side: Side) -> None:
        running = Running(side.broker, free_port(), self.broker_core)
        try:
            command = [*self._command(running), *self._load(self.vehicles), *side.arguments(), "--persistent"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        finally:
            running.stop()
        if done.returncode or not done.stdout:
            raise BenchError(f"online, {side.name}: {done.stderr.strip() or 'the generator said nothing'}")
        said = json.loads(done.stdout.splitlines()[-1])
        self._complete(said, f"online, {side.name}")
        self.online.setdefault(side.name, []).append(said)
        print(f"online {side.name}: {said['last_delivery_s']:.2f} s", file=sys.stderr, flush=True)

    def _offline(self, side: Side, vehicles: int) -> None:
        running = Running(side.broker, free_port(), self.broker_core)
        try:
            command = [*self._command(running), *self._load(vehicles), *side.arguments(), "--offline"]
            said = converse(command, PATIENCE)
        finally:
            running.stop()
        self._complete(said["drain"], f"offline, {side.name}")
        self.offline.setdefault(side.name, []).append(said)
        fill, drain = said["fill"], said["drain"]
        words = f"offline {side.name}: accepted in {fill['secs']:.2f} s, drained in {drain['secs']:.2f} s"
        print(words, file=sys.stderr, flush=True)

    def _complete(self, said: dict[str, Any], what: str) -> None:
        if said["lost"] or said["unexpected"] or said["timed_out"] or said["conn_fail"]:
            counts = ", ".join(f"{name} {said[name]}" for name in ("lost", "unexpected", "timed_out", "conn_fail"))
            raise BenchError(f"{what}: {counts}")

    def accept(self, targets: int) -> None:
        """A million pending messages, step by step, on a node of its own."""
        running = Running(sides()[0].broker, free_port(), self.broker_core)
        told = {"host": "127.0.0.1", "port": running.port, "pid": running.pid, "targets": targets, "step": STEP}
        told |= {"vehicles": 20_000, "per_batch": PER_BATCH, "window": IN_FLIGHT, "size": SIZE}
        try:
            done = subprocess.run(
                ["taskset", "-c", str(self.generator_core), sys.executable, "-m", "runner.accept"],
                input=json.dumps(told),
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                cwd=BENCH,
                check=False,
            )
        finally:
            running.stop()
        if done.returncode:
            raise BenchError(f"accept: {done.stderr.strip()}")
        self.steps = [json.loads(line) for line in done.stdout.splitlines()]

    def _load(self, vehicles: int) -> list[str]:
        batches = vehicles // PER_BATCH
        words = f"--n {vehicles} --batches {batches} --per-batch {PER_BATCH} --size {SIZE} --idle 60"
        return ["--tag", "bench", *words.split()]

    def _command(self, running: Running) -> list[str]:
        head = ["taskset", "-c", str(self.generator_core), str(self.generator), "vinfan", "127.0.0.1"]
        return [*head, str(running.port), "--broker-pid", str(running.pid)]


# -- the report


def _grouped(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ")


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """How much longer they take, in the median and over the rounds; some have fewer rounds."""
    each = [other / own for other, own in zip(theirs, ours, strict=False)]
    return f"{median(each):.2f} × ({min(each):.2f} – {max(each):.2f})"


def _met(theirs: Sequence[float], ours: Sequence[float], bar: float) -> str:
    return "met" if median(other / own for other, own in zip(theirs, ours, strict=False)) >= bar else "missed"


def _online_table(bench: Fanout) -> list[str]:
    ours = [said["last_delivery_s"] for said in bench.online[sides()[0].name]]
    rows = []
    for name, runs in bench.online.items():
        took = [said["last_delivery_s"] for said in runs]
        own = name == sides()[0].name
        rows.append(
            [
                name,
                f"{median(took):.2f} s",
                "" if own else _ratio(took, ours),
                f"{median(said['publisher_bytes'] for said in runs) / 1e6:.1f} MB",
                f"{median(said['broker_cpu_s'] for said in runs):.2f} s",
                f"{median(said['gen_util'] for said in runs):.2f}",
                f"{sum(said['dup'] for said in runs)}",
                "" if own else f"≥ {ONLINE_BAR:g} ×: {_met(took, ours, ONLINE_BAR)}",
            ]
        )
    heads = ["online", "last vehicle", "loop / fan-out", "platform sends", "CPU", "load gen", "dup", "bar"]
    return [f"{bench.vehicles} vehicles, {SIZE} bytes each.", "", *markdown_table(heads, rows), ""]


def _offline_table(bench: Fanout) -> list[str]:
    def per_vehicle(runs: Sequence[dict[str, dict[str, Any]]]) -> list[float]:
        return [said["fill"]["secs"] / said["fill"]["queued"] for said in runs]

    ours = per_vehicle(bench.offline[sides()[0].name])
    rows = []
    for name, runs in bench.offline.items():
        took = per_vehicle(runs)
        own = name == sides()[0].name
        rows.append(
            [
                name,
                f"{runs[0]['fill']['queued']}",
                f"{median(said['fill']['secs'] for said in runs):.3f} s",
                f"{_grouped(1 / median(took))}/s",
                "" if own else _ratio(took, ours),
                f"{median(said['drain']['publisher_bytes'] for said in runs) / 1e6:.1f} MB",
                f"{median(said['fill']['gen_util'] for said in runs):.2f}",
                f"{median(said['drain']['secs'] for said in runs):.2f} s",
                "" if own else f"≥ {OFFLINE_BAR:g} ×: {_met(took, ours, OFFLINE_BAR)}",
            ]
        )
    heads = [
        "offline",
        "vehicles",
        "accepted",
        "rate",
        "loop / fan-out",
        "platform sends",
        "load gen",
        "drained",
        "bar",
    ]
    return [*markdown_table(heads, rows), ""]


def _accept_table(steps: Sequence[dict[str, Any]]) -> list[str]:
    rates = [step["rate"] for step in steps]
    rate = median(rates)
    rows = [
        [
            f"{step['targets']}",
            f"{_grouped(step['rate'])}/s",
            f"{step['rss_kb'] / 1024:.0f} MiB",
            f"{step['cpu'] / STEP * 1e6:.1f} µs",
            f"{step['load']:.2f}",
        ]
        for step in steps
    ]
    verdict = "met" if rate >= ACCEPT_BAR else "missed"
    flat = "flat" if min(rates) >= FLAT * rate else "not flat"
    grown = (steps[-1]["rss_kb"] - steps[0]["rss_kb"]) / 1024
    head = f"Triggers of {PER_BATCH} VINs, {IN_FLIGHT} in flight, synced: median {_grouped(rate)} targets/s "
    head += f"(bar {ACCEPT_BAR}: {verdict}); {flat}, slowest step {min(rates) / rate:.2f} of the median; "
    head += f"RSS grew by {grown:.0f} MiB from the first step to the last."
    return [
        head,
        "",
        *markdown_table(["pending", "accepted", "RSS", "CPU each", "load gen"], rows),
        "",
    ]


def markdown(bench: Fanout, notes: Sequence[str]) -> str:
    """The whole report."""
    lines = ["# The fan-out beside a loop", "", *(f"- {note}" for note in notes), ""]
    if bench.online:
        lines += _online_table(bench)
    if bench.offline:
        lines += _offline_table(bench)
    if bench.steps:
        lines += _accept_table(bench.steps)
    return "\n".join(lines)


# -- the command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/run fanout",
        description="One message to many vehicles: the fan-out beside a loop of PUBLISHes to mosquitto.",
    )
    parser.add_argument("--quick", action="store_true", help="one round, fewer vehicles")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"rounds, of which the median counts ({ROUNDS})")
    parser.add_argument("--vehicles", type=int, metavar="N", help=f"a multiple of {PER_BATCH} ({VEHICLES})")
    parser.add_argument("--pending", type=int, metavar="N", help=f"targets of `accept` ({PENDING})")
    parser.add_argument("--only", nargs="+", choices=("online", "offline", "accept"), help="these parts")
    parser.add_argument("--cores", default="0,1", metavar="B,G", help="cores of broker and generator (0,1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report there too")
    return parser


def _allow_files(vehicles: int) -> None:
    wanted = vehicles + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(hard, wanted)))
    except (ValueError, OSError) as error:
        most = (hard - SPARE_FILES) // PER_BATCH * PER_BATCH
        words = f"{wanted} open files are needed and {hard} allowed; `ulimit -n {wanted}`, or --vehicles {most}"
        raise BenchError(words) from error


def _measure(args: argparse.Namespace) -> int:
    vehicles = args.vehicles or (QUICK_VEHICLES if args.quick else VEHICLES)
    if vehicles < PER_BATCH or vehicles % PER_BATCH:
        raise BenchError(f"--vehicles {vehicles}: a multiple of {PER_BATCH}")
    broker_core, generator_core = parse_cores(args.cores)
    rounds = args.rounds or (1 if args.quick else ROUNDS)
    chosen = args.only or ("online", "offline", "accept")
    _allow_files(vehicles)
    with alone():
        for side in sides():
            side.broker.prepare(install=False)
        bench = Fanout(compile_generator(), vehicles, broker_core, generator_core)
        bench.measure(rounds, chosen)
        if "accept" in chosen:
            pending = args.pending or (QUICK_PENDING if args.quick else PENDING)
            bench.accept(pending // STEP * STEP or STEP)
    notes = [f"{side.name}: {side.broker.version()}" for side in sides()]
    notes.append(
        f"broker on core {broker_core}, generator on core {generator_core}; median of {rounds} interleaved round(s)"
    )
    notes.append(f"loop: {LOOP_IN_FLIGHT} messages in flight; fan-out: {IN_FLIGHT} batches of {PER_BATCH}")
    notes.append(f"machine: {describe()}")
    report = markdown(bench, notes)
    print(report)
    if args.out:
        args.out.write_text(report)
    if args.json:
        everything = {"machine": describe(), "online": bench.online, "offline": bench.offline, "accept": bench.steps}
        args.json.write_text(json.dumps(everything, indent=1) + "\n")
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit code tells failures of the run."""
    args = _parser().parse_args(arguments)
    return exit_code("bench/run fanout", lambda: _measure(args))
