"""The last scene of the demonstration: the whole loop, on Spark of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def test_the_whole_loop_is_played_and_leaves_the_report_alone(tmp_path: Path) -> None:
    """Exit code 0 means that the audit was clean, and every count as it should be."""
    place, kept = tmp_path / "tmp", tmp_path / "report"
    place.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "motorcade", "demo", "--report", str(kept)],
        env={**os.environ, "TMPDIR": str(place)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert 0 == done.returncode, done.stdout[-2000:] + done.stderr
    assert "" == done.stderr
    assert "423 rows: 400 vehicles, 20 named twice, 3 no VIN; 2 batches sent and acknowledged" in done.stdout
    assert "400 vehicles by SQL, 395 acked, 5 pending, none lost: audit clean" in done.stdout
    assert 13 == done.stdout.count("✓")
    assert {"report.html", "report.png"} == {file.name for file in kept.iterdir()}
    assert (kept / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "task_brakes_7" in (kept / "report.html").read_text()
    assert [] == list(place.iterdir())
