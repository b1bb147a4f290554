"""docs/metrics.md is held to what a real node serves."""

from __future__ import annotations

import re
from importlib.metadata import entry_points

from motorcade.extension.metrics import MAX_LABELS, Counts, Measure, by_name, declared, same
from motorcade.extension.plugin import Plugin
from motorcade.http.metrics import render
from motorcade.plugins.fanout.members import MAX_TOLD
from motorcade.plugins.fanout.metrics import GUID_BYTES
from tests.scenarios.witness import wait_until
from tests.support.local import LocalNode
from tests.support.node import ROOT

CONFIG = """\
[store]
sweep_interval = 0.05

[plugins.access]
anonymous = "allow"

[plugins.queues.queue.jobs]
topics = ["jobs/#"]

[plugins.streams.stream.trips]
topics = ["trips/#"]
"""
LIMIT = re.compile(r'motorcade_table_limit_bytes{table="([a-z_]+)"} (\d+)')
#: Families without series until there is something to count.
LATER = {
    "motorcade_certificate_expiry_timestamp_seconds",  # of listeners with TLS
    "motorcade_plugin_total",
    "motorcade_protocol_errors_total",
    "motorcade_fanout_events_total",
    "motorcade_task_failures_total",
}
#: Figures that plugins tell by name of queue or stream.
BY_NAME = {
    *("queue_consumers", "queue_inflight", "queue_messages", "queue_bytes"),
    *("stream_records", "stream_bytes", "stream_readers"),
}


def test_the_page_names_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text().partition("## `/api/v1`")[0]
    told = set(re.findall(r"`((?:motorcade|process)_[a-z_]+)`", page))
    served: set[str] = set()
    figures: set[str] = set()
    bounds: dict[str, int] = {}

    def scrape() -> bool:
        text = web.get("/metrics").text
        served.update(line.split()[2] for line in text.splitlines() if line.startswith("# TYPE "))
        figures.update(re.findall(r'motorcade_plugin_gauge{plugin="[a-z]+",name="([a-z_]+)"}', text))
        bounds.update((table, int(size)) for table, size in LIMIT.findall(text))
        return "motorcade_store_entries" in served

    with LocalNode(CONFIG, store="rocksdb://") as node, node.web("") as web:
        wait_until(scrape, "the first round of housekeeping is done")
    assert set() == {name for name in served - told if not re.fullmatch("motorcade_[a-z]+_events_total", name)}
    # Those of a cluster are those of scenarios/test_operating.py.
    assert {name for name in told - served if not name.startswith("motorcade_cluster_")} <= LATER
    _check_bounds(bounds)
    # Each figure of a plugin is in a family of its own.
    declared_ = {measure.figure for kind in _kinds() for measure in kind.measures}
    assert set() == figures - declared_ - BY_NAME


def _check_bounds(bounds: dict[str, int]) -> None:
    """docs/limits.md has every table that has a bound, with its size, and the sum is what it promises."""
    page = (ROOT / "docs" / "limits.md").read_text().partition("## Memory")[2].partition("\n## ")[0]
    promised = re.search(r"at most (\d+) GiB together", page)
    assert promised is not None
    assert 0.7 * 1024**3 < sum(bounds.values()) <= int(promised[1]) * 1024**3
    told: dict[str, str] = {}
    for names, sizes in re.findall(r"(?m)^\| (`[a-z_`, ]+) \| ([0-9, ]+) MiB \|", page):
        told.update(zip(re.findall("`([a-z_]+)`", names), sizes.split(", "), strict=True))
    of_a_cluster = {"fanout_told": 2 * MAX_TOLD * GUID_BYTES}
    assert {table: str(round(size / 1024**2)) for table, size in (bounds | of_a_cluster).items()} == told


def _kinds() -> list[type[Plugin]]:
    return [entry.load() for entry in entry_points(group="motorcade.plugins")]


def test_a_plugin_that_declares_nothing_has_a_family_for_each_event_and_figure() -> None:
    page = render(declared("Geo fence", (), (), {"un-readable": 2}, {"fences": 3.5, "geo_fence_size_bytes": 1}))
    assert "motorcade_geo_fence_un_readable_total 2\n" in page
    assert "# TYPE motorcade_geo_fence_fences gauge\nmotorcade_geo_fence_fences 3.5\n" in page
    assert "motorcade_geo_fence_size_bytes 1\n" in page


def test_a_plugin_that_declares_families_has_these_and_one_for_the_rest() -> None:
    counts = (
        Counts("box_refusals_total", "Refused.", "reason", same("refused_full", "refused_late", prefix="refused_")),
        Counts("box_bytes_total", "Bytes.", "", same("bytes")),
    )
    measures = (Measure("box_messages", "Messages.", "messages"),)
    page = render(declared("box", counts, measures, {"refused_full": 2, "bytes": 7, "odd": 1}, {"messages": 4}))
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    assert [
        'motorcade_box_refusals_total{reason="full"} 2',
        'motorcade_box_refusals_total{reason="late"} 0',
        "motorcade_box_bytes_total 7",
        "motorcade_box_messages 4",
        'motorcade_box_events_total{event="odd"} 1',
    ] == lines


def test_names_that_operators_choose_are_bounded_as_labels() -> None:
    values = {f"q{number:04d}": 1.0 for number in range(MAX_LABELS + 7)}
    samples = by_name("queue_messages", "Messages.", "queue", values).samples
    assert MAX_LABELS + 1 == len(samples)
    assert ("", {"queue": "*"}, 7) == samples[-1]
