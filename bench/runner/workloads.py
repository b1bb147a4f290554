"""What is measured: one entry for each row of the report, with the bar it has to reach.

Rule 1: a workload is the same for every broker. Where a broker cannot end it, brokers.py says so by name.
Rule 2: everything is closed loop (a window for QoS 1 and 2, `--flow` for QoS 0) except latency-*: a broker
that is slower than the generator then gets less load instead of an endless queue, and nothing need be dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

KIB = 1024


class Metric(StrEnum):
    """Which figure of a run is its result."""

    MESSAGES = "messages/s"
    CONNECTS = "connects/s"
    P99 = "p99 latency"
    MEMORY = "memory/connection"

    @property
    def lower_is_better(self) -> bool:
        return self in (Metric.P99, Metric.MEMORY)


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit that the broker under test has to keep."""

    name: str
    ratio_at_least: float | None = None  #: result / mosquitto's
    ratio_at_most: float | None = None  #: result / mosquitto's
    value_at_most: float | None = None  #: the result itself, in the metric's unit


PIPELINED = Bar("pipelined pairs", ratio_at_least=3)
FAN = Bar("fan-out and fan-in", ratio_at_least=1.5)
WAKE_UP = Bar("one message per wake-up", ratio_at_least=0.7)
TAIL = Bar("p99 at a fixed rate", ratio_at_most=1.5)
IDLE = Bar("idle connection", value_at_most=8 * KIB)


@dataclass(frozen=True, slots=True)
class Workload:
    """One row: how the generator is called, and what is read from its answer."""

    name: str
    what: str
    args: str
    metric: Metric = Metric.MESSAGES
    bar: Bar | None = None
    fresh: bool = False  #: a new broker for each run: what an earlier run left behind would be measured
    quick: bool = False  #: part of `bench/run --quick`
    messages_per_second: int = 3_000_000  #: an upper bound, by which the generator sizes its bookkeeping
    time_option: str | None = "--maxsec"  #: the generator's option for how long to publish
    time_factor: float = 1.0  #: how much longer than the others it has to run
    phases: tuple[str, ...] = ()  #: of the generator, if it has several; each is a row of its own
    stored: bool = False  #: measured on brokers that keep messages on disk, not on those that keep none
    default: bool = True  #: part of `bench/run` without --only

    def arguments(self, seconds: float) -> list[str]:
        """The generator's arguments after host and port, for a run of `seconds`."""
        timed = []
        if self.time_option:
            seconds *= self.time_factor
            timed = ["--msgs", str(int(self.messages_per_second * seconds)), self.time_option, str(seconds)]
        return self.args.split()[1:] + timed

    @property
    def yardsticks(self) -> tuple[str, ...]:
        """The brokers that results are compared with; the first one is the one that bars are about."""
        return ("mosquitto-lazy", "mosquitto-eager") if self.stored else ("mosquitto",)

    def rows(self) -> list[Workload]:
        """What one run of it gives: itself, or a row for each phase."""
        if not self.phases:
            return [self]
        return [replace(self, name=f"{self.name}-{phase}", what=f"{phase}: {self.what}") for phase in self.phases]

    @property
    def kind(self) -> str:
        """The generator's own name for this workload."""
        return self.args.split(maxsplit=1)[0]


#: Messages under way for each pair: fewer for many pairs, so that the sum stays in the thousands.
DEPTH = {1: 1000, 10: 500, 100: 50}
#: Each pair's messages spread over 50 topics with names of different lengths, and sizes over 24 to 104 bytes.
VARIED = "--topics-per-pair 50 --size 64 --size-jitter 40"
#: The same with 124 to 1924 bytes.
VARIED_1K = "--topics-per-pair 50 --size 1024 --size-jitter 900"


def _limit(qos: int, depth: int) -> str:
    return f"--qos {qos} " + (f"--window {depth}" if qos else f"--flow {depth}")


def _pairs() -> list[Workload]:
    return [
        Workload(
            f"pair-q{qos}-{pairs}-{size}",
            f"{pairs} publisher(s), each to its own subscriber, QoS {qos}, {size} B, pipelined",
            f"pair --pairs {pairs} --size {size} {_limit(qos, DEPTH[pairs])}",
            bar=PIPELINED if qos < 2 else None,
            quick=(pairs, size) == (10, 64),
        )
        for qos in (0, 1, 2)
        for pairs in (1, 10, 100)
        for size in (64, 1024)
    ]


def _varied() -> list[Workload]:
    rows = [(0, 10, VARIED, ""), (1, 10, VARIED, ""), (2, 10, VARIED, ""), (1, 100, VARIED_1K, "-1024")]
    return [
        Workload(
            f"varied-q{qos}-{pairs}{suffix}",
            f"{pairs} pairs, QoS {qos}, pipelined, 50 topics for each pair, sizes mixed",
            f"pair --pairs {pairs} {varied} {_limit(qos, DEPTH[pairs])}",
            bar=PIPELINED if qos < 2 else None,
            quick=qos == 1 and not suffix,
        )
        for qos, pairs, varied, suffix in rows
    ]


def _wake_ups() -> list[Workload]:
    return [
        Workload(
            f"single-q1-{pairs}",
            f"{pairs} pair(s), QoS 1, 64 B, each publisher waits for its PUBACK",
            f"pair --pairs {pairs} --qos 1 --window 1",
            bar=WAKE_UP,
            quick=pairs == 100,
        )
        for pairs in (100, 1)
    ]


def _fans() -> list[Workload]:
    return [
        Workload(
            "fanout-q0",
            "1 publisher to 1000 subscribers, QoS 0, the next message when all have the last",
            "fanout --n 1000 --qos 0 --flow 1",
            bar=FAN,
            quick=True,
            messages_per_second=20_000,
        ),
        Workload(
            "fanout-q1",
            "1 publisher to 1000 subscribers, QoS 1, 20 messages under way",
            "fanout --n 1000 --qos 1 --window 20 --flow 20",
            bar=FAN,
            messages_per_second=20_000,
        ),
        Workload("fanin-q0", "100 publishers to 1 subscriber, QoS 0", f"fanin --n 100 {_limit(0, 50)}", bar=FAN),
        Workload(
            "fanin-q1", "100 publishers to 1 subscriber, QoS 1", f"fanin --n 100 {_limit(1, 50)}", bar=FAN, quick=True
        ),
        Workload(
            "fanin-q1-varied",
            "100 publishers to 1 subscriber, QoS 1, 50 topics for each publisher, sizes mixed",
            f"fanin --n 100 {VARIED} {_limit(1, 50)}",
            bar=FAN,
        ),
    ]


def _wildcards() -> list[Workload]:
    return [
        Workload(
            f"wildcard-{filters}",
            f"{filters} filters with + and # of {subscribers} subscribers, {topics} topics, QoS 0",
            f"wild --n {filters} --subs {subscribers} --topics {topics} --qos 0 --flow 2000",
            quick=filters == 1000,
            messages_per_second=1_000_000,
        )
        for filters, subscribers, topics in ((1000, 20, 10_000), (10_000, 100, 40_000))
    ]


def _latencies() -> list[Workload]:
    return [
        Workload(
            f"latency-{rate}",
            f"{rate} messages/s in all over 50 pairs, QoS 1, 128 B, open loop, timed from when each was due",
            f"rate --rate {rate} --pairs 50 --qos 1 --size 128",
            metric=Metric.P99,
            bar=TAIL,
            quick=rate == 1000,
            time_option="--secs",
            time_factor=3,  # a 99th percentile needs some thousands of messages
        )
        for rate in (1000, 10_000)
    ]


def _connections() -> list[Workload]:
    return [
        Workload(
            "connect",
            "5000 clients connect, 64 at a time",
            "conn --n 5000",
            metric=Metric.CONNECTS,
            fresh=True,
            quick=True,
            time_option=None,
        ),
        Workload(
            "memory",
            "resident memory of the broker for each of 10 000 idle connections",
            "conn --n 10000",
            metric=Metric.MEMORY,
            bar=IDLE,
            fresh=True,
            time_option=None,
        ),
        Workload(
            "memory-subscribed",
            "the same, each connection with one subscription of its own",
            "conn --n 10000 --sub",
            metric=Metric.MEMORY,
            fresh=True,
            time_option=None,
        ),
    ]


#: Nobody fills longer than this: rewriting the whole file again and again, mosquitto-eager would not end.
FILL_SECONDS = 10


def _offline() -> list[Workload]:
    rows = [(clients, pubs, size, False) for clients in (1, 100, 1000) for pubs in (1, 10) for size in (64, 1024)]
    rows += [(clients, pubs, size, True) for clients in (100, 1000) for pubs in (1, 10) for size in (64, 1024)]
    found = []
    for clients, pubs, size, shared in rows:
        # A message for many costs its publisher one: more of them, so that the time to take them can be measured.
        each = (300_000 if shared else 100_000) // clients
        ways = "all by one topic" if shared else "each by its own topic"
        found.append(
            Workload(
                f"offline-{'shared' if shared else 'own'}-{clients}-{pubs}-{size}",
                f"{each} messages for each of {clients} sleeping session(s), {ways}, {pubs} publisher(s) with 100 "
                f"unacknowledged each, QoS 1, {size} B",
                f"offline --n {clients} --per {each} --pubs {pubs} --size {size} {'--shared' if shared else ''} "
                f"--window 100 --maxsec {FILL_SECONDS} --idle 30 --keep-sessions",
                fresh=True,
                time_option=None,
                phases=("fill", "drain"),
                stored=True,
                default=False,
            )
        )
    return found


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for group in (_pairs, _varied, _wake_ups, _fans, _wildcards, _latencies, _connections, _offline)
    for workload in group()
}
