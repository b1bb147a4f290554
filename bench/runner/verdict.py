"""From samples to rows: medians, ratios to mosquitto, what makes a row invalid, and whether the bars are met.

Rule: a row in which messages went missing, or whose generator was the bottleneck, is never called valid, however
good its figure. A ratio is valid only when both its rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from .measure import Runs, Sample
from .workloads import Bar, Metric, Workload

#: Above this the generator had nothing left to give, however busy the broker was.
GENERATOR_FULL = 0.95
#: Above this it had little left, and the broker must have been busier than BROKER_BUSY to be the bottleneck.
GENERATOR_BUSY = 0.85
BROKER_BUSY = 0.85
#: The part of the p99 that may be the generator's own lateness before the figure is about the generator.
LATENESS_SHARE = 0.5
#: The part of a fixed rate that must arrive.
RATE_REACHED = 0.98


class Flaw(StrEnum):
    """Why a row is not valid."""

    FAILED = "a run failed"
    LOST = "messages lost"
    DUPLICATED = "messages duplicated"
    REORDERED = "messages reordered"
    MISROUTED = "messages misrouted or changed"
    DISCONNECTED = "clients disconnected"
    NOT_CONNECTED = "clients not connected"
    UNFINISHED = "not finished"
    LOWER_QOS = "lower QoS granted"
    GENERATOR_BOUND = "generator was the bottleneck"
    GENERATOR_LATE = "generator was late"
    RATE_MISSED = "rate not reached"


class Outcome(StrEnum):
    """How a bar stands."""

    MET = "met"
    MISSED = "MISSED"
    NOT_SHOWN = "not shown"


@dataclass(frozen=True, slots=True)
class Row:
    """One workload on one broker, over all rounds."""

    workload: Workload
    broker: str
    samples: tuple[Sample, ...]
    errors: tuple[str, ...]
    flaws: tuple[Flaw, ...]

    @classmethod
    def of(cls, runs: Runs) -> Row:
        flaws = tuple(_flaws(runs.workload, runs.samples, runs.errors))
        return cls(runs.workload, runs.broker.name, tuple(runs.samples), tuple(runs.errors), flaws)

    @property
    def valid(self) -> bool:
        return not self.flaws

    @property
    def value(self) -> float | None:
        return self.middle(lambda sample: sample.value)

    def middle(self, get: Callable[[Sample], float | None]) -> float | None:
        """The median over the rounds, or None where no round has the figure."""
        values = [value for sample in self.samples if (value := get(sample)) is not None]
        return median(values) if values else None

    def total(self, get: Callable[[Sample], int]) -> int:
        """The sum over the rounds."""
        return sum(get(sample) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class BarResult:
    """One bar on one row."""

    bar: Bar
    row: Row
    figure: float | None  #: the ratio, or the value for a bar on the value
    outcome: Outcome
    note: str


class Rows:
    """All rows, found by workload and broker."""

    def __init__(self, runs: Iterable[Runs]) -> None:
        self.rows = [Row.of(entry) for entry in runs]
        self._index = {(row.workload.name, row.broker): row for row in self.rows}

    def get(self, workload: str, broker: str) -> Row | None:
        return self._index.get((workload, broker))

    def yardstick(self, row: Row) -> Row | None:
        return self.get(row.workload.name, row.workload.yardsticks[0])

    def ratio(
        self, row: Row, get: Callable[[Sample], float | None] = lambda sample: sample.value, to: str | None = None
    ) -> float | None:
        """The row's median over that of broker `to` (its yardstick), or None where one is missing."""
        base = self.get(row.workload.name, to) if to else self.yardstick(row)
        mine, theirs = row.middle(get), base.middle(get) if base else None
        return mine / theirs if mine is not None and theirs else None

    def bars(self, subjects: Iterable[str]) -> list[BarResult]:
        """Every bar of every measured workload, for the brokers that have to reach them."""
        wanted = set(subjects)
        return [self._judge(row.workload.bar, row) for row in self.rows if row.workload.bar and row.broker in wanted]

    def _judge(self, bar: Bar, row: Row) -> BarResult:
        on_value = bar.value_at_most is not None
        figure = row.value if on_value else self.ratio(row)
        base = None if on_value else self.yardstick(row)
        if figure is None:
            missing = f"no {row.workload.yardsticks[0]} in this run" if not on_value and base is None else "no figure"
            return BarResult(bar, row, None, Outcome.NOT_SHOWN, missing)
        if base is not None and not base.valid:
            return BarResult(bar, row, figure, Outcome.NOT_SHOWN, f"{base.broker}: " + "; ".join(base.flaws))
        reached = _reached(bar, figure)
        if row.valid:
            return BarResult(bar, row, figure, Outcome.MET if reached else Outcome.MISSED, "")
        if row.flaws == (Flaw.GENERATOR_BOUND,) and bar.ratio_at_least is not None and reached:
            # A generator that could not keep up makes the figure too small, never too large.
            return BarResult(bar, row, figure, Outcome.MET, "at least: " + Flaw.GENERATOR_BOUND)
        return BarResult(bar, row, figure, Outcome.NOT_SHOWN, "; ".join(row.flaws))


def _reached(bar: Bar, figure: float) -> bool:
    if bar.ratio_at_least is not None:
        return figure >= bar.ratio_at_least
    limit = bar.ratio_at_most if bar.ratio_at_most is not None else bar.value_at_most
    assert limit is not None, bar
    return figure <= limit


def _flaws(workload: Workload, samples: list[Sample], errors: list[str]) -> Iterable[Flaw]:
    if errors or not samples:
        yield Flaw.FAILED
    qos = {sample.raw.get("qos") for sample in samples}
    found = {
        Flaw.LOST: any(sample.lost for sample in samples),
        # At QoS 1 a duplicate is allowed; it is shown, and does not make the row invalid.
        Flaw.DUPLICATED: qos != {1} and any(sample.duplicated for sample in samples),
        Flaw.REORDERED: any(sample.reordered for sample in samples),
        Flaw.MISROUTED: any(sample.misrouted for sample in samples),
        Flaw.DISCONNECTED: any(sample.disconnects for sample in samples),
        Flaw.NOT_CONNECTED: any(sample.not_connected for sample in samples),
        Flaw.UNFINISHED: any(sample.timed_out or sample.unacknowledged for sample in samples),
        Flaw.LOWER_QOS: any(sample.lower_qos for sample in samples),
        Flaw.RATE_MISSED: any(sample.rate_reached < RATE_REACHED for sample in samples),
    }
    yield from (flaw for flaw, is_so in found.items() if is_so)
    if samples:
        yield from _generator_flaws(workload, samples)


def _generator_flaws(workload: Workload, samples: list[Sample]) -> Iterable[Flaw]:
    if workload.metric is Metric.P99:
        # Here the generator spins so that it is never asleep when a message is due: its load says nothing.
        late = median(sample.generator_late_p99 or 0.0 for sample in samples)
        if late > LATENESS_SHARE * median(sample.value for sample in samples):
            yield Flaw.GENERATOR_LATE
        return
    if workload.metric is Metric.MEMORY:
        return  # not a matter of speed
    generator = median(sample.generator_load for sample in samples)
    broker = median(sample.broker_load for sample in samples)
    if generator > GENERATOR_FULL or (generator > GENERATOR_BUSY and broker < BROKER_BUSY):
        yield Flaw.GENERATOR_BOUND
