"""Interleaved rounds: every broker runs a workload before any runs it a second time.

A shared machine has good and bad minutes. Interleaving gives each broker its share of both, and the order
rotates from round to round, so that nobody always comes first.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .brokers import Broker, Running, StartError
from .lag import Lag
from .machine import BenchError, busy_seconds, children_seconds, cpu_seconds, free_port
from .phases import converse
from .workloads import Metric, Workload

#: Beyond the time it publishes: connecting 10 000 clients to a slow broker, and draining what it still holds.
GRACE_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What one run of the generator told. Counts are messages, latencies microseconds."""

    value: float  #: the workload's metric: per second, microseconds, or bytes
    cpu_per_million: float  #: the broker's processor seconds for a million messages (or connects)
    generator_load: float  #: cores
    broker_load: float  #: cores
    foreign_load: float  #: cores used meanwhile by neither broker nor generator
    p50: float | None = None
    p99: float | None = None
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    misrouted: int = 0  #: wrong subscriber, topic or size
    disconnects: int = 0
    not_connected: int = 0
    unacknowledged: int = 0
    timed_out: bool = False
    lower_qos: bool = False  #: the broker granted less than was asked for
    generator_late_p99: float | None = None  #: how far the generator fell behind its own schedule
    rate_reached: float = 1.0  #: of the rate that was asked for, where one was
    raw: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, metric: Metric, raw: dict[str, Any], foreign_load: float) -> Sample:
        """Read the generator's JSON line."""
        latency = raw.get("lat_us", {})
        values = {
            Metric.MESSAGES: raw.get("rate"),
            Metric.CONNECTS: raw.get("connects_per_s"),
            Metric.P99: latency.get("p99"),
            Metric.MEMORY: raw.get("rss_per_conn_bytes"),
        }
        return cls(
            value=float(values[metric]),
            cpu_per_million=raw["cpu_s_per_M"],
            generator_load=raw["gen_util"],
            broker_load=raw["broker_util"],
            foreign_load=foreign_load,
            p50=latency.get("p50"),
            p99=latency.get("p99"),
            lost=raw.get("lost", 0),
            duplicated=raw.get("dup", 0),
            reordered=raw.get("reordered", 0),
            misrouted=raw.get("unexpected", 0),
            disconnects=raw["disconnects"],
            not_connected=raw["conn_fail"],
            unacknowledged=raw.get("unacked", 0),
            timed_out=raw.get("timed_out", False),
            lower_qos=raw.get("granted_qos", raw["qos"]) < raw["qos"],
            generator_late_p99=raw.get("gen_late_us", {}).get("p99"),
            rate_reached=raw["rate"] / raw["target_rate"] if "target_rate" in raw else 1.0,
            raw=raw,
        )


@dataclass(slots=True)
class Runs:
    """All runs of one workload on one broker."""

    workload: Workload
    broker: Broker
    samples: list[Sample] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a benchmark is run."""

    generator: Path
    rounds: int
    seconds: float
    broker_core: int
    generator_core: int


class Bench:
    """Runs workloads on brokers, and keeps the brokers up between runs.

    A broker serves workload after workload like one in use, its caches and compiled code warm. It is replaced
    when a run failed on it, and always where the workload asks for a fresh one. One that does not start is given up.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.running: dict[str, Running] = {}
        self.given_up: dict[str, StartError] = {}

    def measure(self, workloads: Iterable[Workload], brokers: Sequence[Broker]) -> list[Runs]:
        """Every workload on every broker; stops all brokers at the end, whatever happened."""
        try:
            return [runs for workload in workloads for runs in self._workload(workload, brokers)]
        finally:
            for name in list(self.running):
                self._stop(name)

    def _workload(self, workload: Workload, brokers: Sequence[Broker]) -> list[Runs]:
        subjects = [broker for product in brokers for broker in (product.stored if workload.stored else (product,))]
        table = [
            [Runs(row, broker) for row in workload.rows()]
            for broker in subjects
            if workload.name not in broker.left_out
        ]
        for number in range(self.plan.rounds):
            shift = number % max(1, len(table))
            for rows in table[shift:] + table[:shift]:
                self._round(workload, rows)
        return [runs for rows in table for runs in rows]

    def _round(self, workload: Workload, rows: Sequence[Runs]) -> None:
        """One run, which gives a sample to each of the rows."""
        broker = rows[0].broker
        head = f"{workload.name} {broker.name}:"
        try:
            running = self._broker(broker, fresh=workload.fresh)
            samples = self._run(workload, running)
        except BenchError as error:
            for runs in rows:
                runs.errors.append(str(error))
            print(head, "failed:", error, file=sys.stderr, flush=True)
            self._stop(broker.name)
            return
        for runs, sample in zip(rows, samples, strict=True):
            runs.samples.append(sample)
        values = " ".join(f"{sample.value:.0f}" for sample in samples)
        print(head, values, f"({workload.metric})", file=sys.stderr, flush=True)
        if workload.fresh or any(sample.timed_out for sample in samples) or not running.alive:
            self._stop(broker.name)

    def _broker(self, broker: Broker, fresh: bool) -> Running:
        if fresh:
            self._stop(broker.name)
        if broker.name in self.given_up:
            raise self.given_up[broker.name]
        if broker.name not in self.running:
            try:
                self.running[broker.name] = Running(broker, free_port(), self.plan.broker_core)
            except StartError as error:
                self.given_up[broker.name] = error
                raise
        return self.running[broker.name]

    def _stop(self, name: str) -> None:
        running = self.running.pop(name, None)
        if running is not None:
            running.stop()

    def _run(self, workload: Workload, broker: Running) -> list[Sample]:
        """One run of the generator, a sample for each row. Raises BenchError when it gives no figures."""
        plan = self.plan
        command = ["taskset", "-c", str(plan.generator_core), str(plan.generator), workload.kind, "127.0.0.1"]
        command += [str(broker.port), "--broker-pid", str(broker.pid), *workload.arguments(plan.seconds)]
        patience = plan.seconds * workload.time_factor + GRACE_SECONDS
        started, busy = time.monotonic(), busy_seconds()
        served, generated = cpu_seconds(broker.pid), children_seconds()
        said = _in_phases(workload, broker, command, patience) if workload.phases else [_at_once(command, patience)]
        ours = cpu_seconds(broker.pid) - served + children_seconds() - generated
        foreign = max(0.0, busy_seconds() - busy - ours) / (time.monotonic() - started)
        return [Sample.of(workload.metric, raw, round(foreign, 3)) for raw in said]


def _at_once(command: Sequence[str], patience: float) -> dict[str, Any]:
    """What the generator said at its end."""
    try:
        answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        raise BenchError(f"no end after {patience:.0f} s") from None
    if answer.returncode or not answer.stdout.strip():
        said = answer.stderr.strip().splitlines() or [f"the generator ended with {answer.returncode}"]
        raise BenchError(said[-1])
    raw: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    return raw


def _in_phases(workload: Workload, broker: Running, command: Sequence[str], patience: float) -> list[dict[str, Any]]:
    """What the generator said of each phase, and how late the event loop was while it filled."""
    lags: dict[str, Lag] = {}

    def look(phase: str) -> str:
        if address := broker.control_address:
            lags[phase] = Lag.read(address)
        return ""

    said = converse(command, patience, look)
    if "fill" in lags:
        said["fill"]["loop_lag"] = lags["fill"].since(lags["asleep"]).as_json()
    return [said[phase] for phase in workload.phases]
