"""The command line: what is measured, on which brokers, and where the report goes."""

from __future__ import annotations

import argparse
import fnmatch
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from . import cluster, ecq, fanout, instructions, sources
from .brokers import BROKERS, Broker, Custom, Motorcade
from .machine import BenchError, alone, compile_generator, describe, exit_code, parse_cores, raise_open_files
from .measure import Bench, Plan
from .report import as_json, markdown
from .verdict import Outcome, Rows
from .workloads import WORKLOADS, Workload

ROUNDS, QUICK_ROUNDS = 3, 1
SECONDS, QUICK_SECONDS = 2.0, 1.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/run",
        description="Measures Motorcade beside mosquitto, aedes and amqtt, and prints a report in Markdown.",
        epilog="`bench/run sources` measures queues and streams beside live routing, `bench/run fanout` the fan-out "
        "beside a loop of PUBLISHes, `bench/run ecq` compacted queues, `bench/run cluster` several nodes, `bench/run "
        "instructions` the instructions of the main paths; each has a --help of its own.",
    )
    parser.add_argument("--quick", action="store_true", help="few workloads, one short round")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these workloads (see --list); * stands for anything")
    parser.add_argument("--peers", metavar="A,B", help=f"brokers to measure (default: {','.join(BROKERS)})")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"rounds, of which the median counts ({ROUNDS})")
    parser.add_argument("--seconds", type=float, metavar="S", help=f"time of publishing in each run ({SECONDS:g})")
    parser.add_argument("--cores", default="0,1", metavar="B,G", help="cores of broker and generator (0,1)")
    parser.add_argument("--broker-cmd", metavar="CMD", help="one more broker: its command line, with {port} and {dir}")
    parser.add_argument("--broker-name", default="custom", metavar="NAME", help="its name in the report (custom)")
    parser.add_argument("--no-install", action="store_true", help="use only what is there already")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument("--strict", action="store_true", help="end with 1 unless every measured bar is met")
    parser.add_argument("--list", action="store_true", help="list the workloads and end")
    return parser


def _workloads(only: Sequence[str] | None, quick: bool) -> list[Workload]:
    """The workloads that were asked for, in the order of the list."""
    if only is None:
        return [workload for workload in WORKLOADS.values() if (workload.quick if quick else workload.default)]
    chosen: set[str] = set()
    for pattern in only:
        found = set(fnmatch.filter(WORKLOADS, pattern))
        if not found:
            raise BenchError(f"no such workload: {pattern} (bench/run --list)")
        chosen |= found
    return [workload for name, workload in WORKLOADS.items() if name in chosen]


def _brokers(args: argparse.Namespace) -> tuple[list[Broker], list[str]]:
    """The brokers that are there, and a note for each that is not.

    One that was asked for by name must be there; of the default ones, those that cannot be had are left out.
    """
    names = args.peers.split(",") if args.peers else list(BROKERS)
    brokers, notes = [], []
    for name in names:
        if name not in BROKERS:
            raise BenchError(f"no such broker: {name} (there are {', '.join(BROKERS)})")
        try:
            BROKERS[name].prepare(install=not args.no_install)
        except BenchError as error:
            if args.peers:
                raise
            notes.append(f"{name} was not measured: {error}")
            continue
        brokers.append(BROKERS[name])
    if args.broker_cmd:
        custom = Custom(args.broker_name, args.broker_cmd)
        custom.prepare(install=False)
        brokers.insert(0, custom)
    return brokers, notes


def _measure(args: argparse.Namespace) -> int:
    workloads = _workloads(args.only, args.quick)
    broker_core, generator_core = parse_cores(args.cores)
    raise_open_files()
    with alone():
        brokers, notes = _brokers(args)
        plan = Plan(
            generator=compile_generator(),
            rounds=args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS),
            seconds=args.seconds or (QUICK_SECONDS if args.quick else SECONDS),
            broker_core=broker_core,
            generator_core=generator_core,
        )
        versions = {broker.name: broker.version() for broker in brokers}
        rows = Rows(Bench(plan).measure(workloads, brokers))
    measured = {row.broker for row in rows.rows}
    for broker in brokers:
        if broker.stored:
            versions |= {variant.name: variant.version() for variant in broker.stored if variant.name in measured}
        for workload in workloads:
            if workload.name in broker.left_out:
                notes.append(f"{broker.name} leaves out {workload.name}: {broker.left_out[workload.name]}")
    subjects = [broker.name for broker in brokers if isinstance(broker, Motorcade | Custom)]
    report = markdown(rows, plan, versions, subjects, [f"machine: {describe()}", *notes])
    print(report)
    if args.out:
        args.out.write_text(report)
    if args.json:
        args.json.write_text(json.dumps(as_json(rows, plan, versions, subjects), indent=1) + "\n")
    bars = rows.bars(subjects)
    unmet = not bars or any(bar.outcome is not Outcome.MET for bar in bars)
    return 1 if args.strict and unmet else 0


def _terminated(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code tells failures of the run, and with --strict of the bars."""
    words = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, _terminated)  # an exception, so that the brokers are stopped on the way out
    if words[:1] == ["sources"]:
        return sources.main(words[1:])
    if words[:1] == ["fanout"]:
        return fanout.main(words[1:])
    if words[:1] == ["ecq"]:
        return ecq.main(words[1:])
    if words[:1] == ["cluster"]:
        return cluster.main(words[1:])
    if words[:1] == ["instructions"]:
        return instructions.main(words[1:])
    args = _parser().parse_args(words)
    if args.list:
        for workload in WORKLOADS.values():
            when = "quick" if workload.quick else "" if workload.default else "--only"
            print(f"{workload.name:26} {when:6} {workload.what}")
        return 0
    return exit_code("bench/run", lambda: _measure(args))
