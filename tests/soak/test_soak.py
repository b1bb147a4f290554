"""The soak itself, for seconds: every piece of churn works, the floors are measured, no probe is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import churn
from tests.soak.judge import report
from tests.soak.soak import Options, Soak


@pytest.mark.slow
async def test_a_short_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(churn, "LET_GO", 0.5)  # whether anything grows is for a run of minutes
    soak = Soak(Options(minutes=0.05, cycles=1, rate=0.5), tmp_path)
    (floor,) = await soak.run()
    assert set(churn.PIECES) == set(soak.done), "each kind of churn was tried"
    assert (0, ()) == (floor.lost, tuple(floor.errors)), soak.node.log
    assert min(floor.probes, floor.rss, floor.trimmed, floor.objects, floor.disk, floor.messages) > 0
    assert min(floor.descriptors, floor.threads, floor.units) > 0
    assert floor.tables["Registry.sessions"] == 2, "the probes are alone"
    assert "probes lost" in report([floor])
