"""docs/metrics.md is held to what a real node serves."""

from __future__ import annotations

import re

import httpx

from tests.scenarios.witness import wait_until
from tests.support.node import ROOT, NodeProcess
from tests.unit.http.conftest import PATIENCE


def test_the_page_names_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text().partition("## `/api/v1`")[0]
    told = set(re.findall(r"`((?:motorcade|process)_[a-z_]+)`", page))
    served: set[str] = set()

    def scrape() -> bool:
        text = httpx.get(f"http://{node.http}/metrics", trust_env=False, timeout=PATIENCE).text
        served.update(line.split()[2] for line in text.splitlines() if line.startswith("# TYPE "))
        return "motorcade_store_entries" in served

    with NodeProcess(http=True, config="[store]\nsweep_interval = 0.05\n") as node:
        wait_until(scrape, "the first round of housekeeping is done")
    assert set() == served - told
    # These two have no series until there is something to count.
    assert {"motorcade_plugin_total", "motorcade_protocol_errors_total"} >= told - served
