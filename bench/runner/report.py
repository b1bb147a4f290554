"""The report: Markdown for people, JSON for programs. Both show the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from .lag import Lag
from .measure import Plan, Sample
from .verdict import BarResult, Outcome, Row, Rows
from .workloads import Bar, Metric, Workload

#: Cores used by other processes, above which the report warns that its rates suffered.
NOISE = 0.15

DETAILS = (
    "CPU: the broker's processor seconds for a million messages delivered (connect rows: connections made). "
    "Loads are in cores; foreign is what neither broker nor generator used. Counts are sums over the rounds."
)


def human(number: float) -> str:
    """Three significant digits with k or M."""
    if number >= 999_500:
        return f"{number / 1e6:.2f}M"
    if number >= 99_500:
        return f"{number / 1e3:.0f}k"
    if number >= 1000:
        return f"{number / 1e3:.1f}k"
    return f"{number:.0f}"


def duration(microseconds: float) -> str:
    """A latency in the unit that reads best."""
    if microseconds >= 999_500:
        return f"{microseconds / 1e6:.1f} s"
    if microseconds >= 995:
        return f"{microseconds / 1e3:.3g} ms"
    return f"{microseconds:.0f} µs"


def result(metric: Metric, value: float) -> str:
    """A value of a metric with its unit."""
    if metric is Metric.P99:
        return duration(value)
    if metric is Metric.MEMORY:
        return f"{value / 1024:.1f} KiB"
    return f"{human(value)}/s"


def times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(line)} |" for line in lines), ""]


def markdown(rows: Rows, plan: Plan, versions: dict[str, str], subjects: Sequence[str], notes: Sequence[str]) -> str:
    """The whole report."""
    parts = [
        _head(rows, plan, versions, notes),
        _summary(rows),
        _details(rows),
        _lags(rows),
        _bars(rows.bars(subjects), subjects),
    ]
    return "\n".join(line for part in parts for line in part)


def _head(rows: Rows, plan: Plan, versions: dict[str, str], notes: Sequence[str]) -> list[str]:
    lines = ["# Benchmark", ""]
    lines += [f"- {name}: {version}" for name, version in versions.items()]
    lines.append(
        f"- broker on core {plan.broker_core}, generator on core {plan.generator_core}; "
        f"median of {plan.rounds} interleaved round(s), {plan.seconds:g} s of publishing each"
    )
    lines += [f"- {note}" for note in notes]
    lines += [f"- {note}" for note in noise([sample for row in rows.rows for sample in row.samples])]
    return [*lines, ""]


def noise(samples: Iterable[Sample]) -> list[str]:
    """A note, if others were busy on the machine."""
    foreign = [sample.foreign_load for sample in samples]
    if not foreign or median(foreign) <= NOISE:
        return []
    used = f"{median(foreign):.2f} cores (median), up to {max(foreign):.2f}"
    return [f"**noisy machine**: other processes used {used}; rates and latencies suffer, CPU per message least"]


def _workloads(rows: Rows) -> list[Workload]:
    return list({row.workload.name: row.workload for row in rows.rows}.values())


def _summary(rows: Rows) -> list[str]:
    def cell(workload: Workload, broker: str) -> str:
        row = rows.get(workload.name, broker)
        if row is None:
            return "left out"
        if row.value is None:
            return "failed"
        ratios = f" ({', '.join(times(rows.ratio(row, to=name)) for name in workload.yardsticks)})"
        ratio = "" if broker in workload.yardsticks else ratios
        return result(workload.metric, row.value) + ratio + ("" if row.valid else " **invalid**")

    lines = ["## Summary", ""]
    groups: dict[tuple[str, ...], list[Workload]] = {}
    for workload in _workloads(rows):
        groups.setdefault(workload.yardsticks, []).append(workload)
    for yardsticks, workloads in groups.items():
        names = {workload.name for workload in workloads}
        brokers = list({row.broker: None for row in rows.rows if row.workload.name in names})
        table = [[w.name, w.metric, *(cell(w, broker) for broker in brokers)] for w in workloads]
        lines += [
            f"In brackets the ratio to {' and to '.join(yardsticks)}; for latency and memory a lower one is better.",
            "",
            *markdown_table(["workload", "figure", *brokers], table),
        ]
    return lines


def _lags(rows: Rows) -> list[str]:
    """How late the event loop was in each round, where the broker tells."""
    lines: list[str] = []
    for row in rows.rows:
        for number, sample in enumerate(row.samples, 1):
            if "loop_lag" in sample.raw:
                head = f"`{row.workload.name}` {row.broker}, round {number}:"
                lines += [head, "", "```text", *Lag.from_json(sample.raw["loop_lag"]).drawing(), "```", ""]
    return ["## How late the event loop was", "", *lines] if lines else []


def _cpu(sample: Sample) -> float:
    return sample.cpu_per_million


def _detail(rows: Rows, row: Row) -> list[str]:
    head = [row.workload.name, row.broker]
    if row.value is None:
        return [*head, *["–"] * 9, "failed: " + row.errors[-1].replace("|", "/")]
    values = [sample.value for sample in row.samples]
    p50, p99 = row.middle(lambda sample: sample.p50), row.middle(lambda sample: sample.p99)
    generator, broker = row.middle(lambda sample: sample.generator_load), row.middle(lambda sample: sample.broker_load)
    counted = row.workload.metric in (Metric.MESSAGES, Metric.P99)
    return [
        *head,
        result(row.workload.metric, row.value),
        f"{result(row.workload.metric, min(values))} – {result(row.workload.metric, max(values))}",
        times(rows.ratio(row)),
        f"{duration(p50)} / {duration(p99)}" if p50 is not None and p99 is not None else "–",
        f"{row.middle(_cpu) or 0:.2f}",
        times(rows.ratio(row, _cpu)),
        f"{generator:.2f} / {broker:.2f}",
        f"{row.middle(lambda sample: sample.foreign_load):.2f}",
        _counts(row) if counted else "–",
        "valid" if row.valid else "**not valid**: " + "; ".join(row.flaws),
    ]


def _counts(row: Row) -> str:
    return " / ".join(
        str(row.total(get))
        for get in (
            lambda sample: sample.lost,
            lambda sample: sample.duplicated,
            lambda sample: sample.reordered,
        )
    )


def _details(rows: Rows) -> list[str]:
    head = [
        "workload",
        "broker",
        "median",
        "lowest – highest",
        "to yardstick",
        "p50 / p99",
        "CPU s per M",
        "CPU to yardstick",
        "load gen / broker",
        "foreign",
        "lost / dup / reordered",
        "verdict",
    ]
    legend = [f"- `{workload.name}`: {workload.what}" for workload in _workloads(rows)]
    return [
        "## Details",
        "",
        DETAILS,
        "",
        *markdown_table(head, [_detail(rows, row) for row in rows.rows]),
        *legend,
        "",
    ]


def _limit(bar: Bar) -> str:
    if bar.ratio_at_least is not None:
        return f"≥ {bar.ratio_at_least:g}×"
    if bar.ratio_at_most is not None:
        return f"≤ {bar.ratio_at_most:g}×"
    return f"≤ {(bar.value_at_most or 0) / 1024:g} KiB"


def _bars(results: Sequence[BarResult], subjects: Sequence[str]) -> list[str]:
    lines = ["## Bars", ""]
    if not results:
        return [*lines, f"None measured: no row of {' or '.join(subjects) or 'the broker under test'} has a bar.", ""]

    def line(entry: BarResult) -> list[str]:
        on_value = entry.bar.value_at_most is not None
        figure = "–"
        if entry.figure is not None:
            figure = result(entry.row.workload.metric, entry.figure) if on_value else times(entry.figure)
        outcome = f"{entry.outcome}" + (f" ({entry.note})" if entry.note else "")
        return [entry.bar.name, entry.row.workload.name, entry.row.broker, _limit(entry.bar), figure, outcome]

    counts = {outcome: sum(entry.outcome is outcome for entry in results) for outcome in Outcome}
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return [*lines, *markdown_table(["bar", "workload", "broker", "limit", "figure", ""], map(line, results)), said, ""]


def as_json(rows: Rows, plan: Plan, versions: dict[str, str], subjects: Sequence[str]) -> dict[str, Any]:
    """Everything the Markdown shows, and each sample with the generator's own words."""
    return {
        "brokers": versions,
        "rounds": plan.rounds,
        "seconds": plan.seconds,
        "rows": [
            {
                "workload": row.workload.name,
                "broker": row.broker,
                "metric": row.workload.metric.value,
                "value": row.value,
                "ratio": rows.ratio(row),
                "cpu_seconds_per_million": row.middle(_cpu),
                "cpu_ratio": rows.ratio(row, _cpu),
                "flaws": [flaw.value for flaw in row.flaws],
                "errors": list(row.errors),
                "samples": [asdict(sample) for sample in row.samples],
            }
            for row in rows.rows
        ],
        "bars": [
            {
                "bar": entry.bar.name,
                "workload": entry.row.workload.name,
                "broker": entry.row.broker,
                "figure": entry.figure,
                "outcome": entry.outcome.value,
                "note": entry.note,
            }
            for entry in rows.bars(subjects)
        ],
    }
