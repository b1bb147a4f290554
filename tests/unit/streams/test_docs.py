"""The page docs/streams.md names the defaults that hold, and every counter there is."""

from __future__ import annotations

import re

import msgspec

from motorcade.plugins.logs.streams.options import StreamOptions, StreamsConfig
from tests.support.node import ROOT

PAGE = (ROOT / "docs" / "streams.md").read_text(encoding="utf-8")
CODE = ROOT / "src" / "motorcade"
SOURCES = "".join(
    file.read_text(encoding="utf-8")
    for file in (*(CODE / "plugins" / "logs" / "streams").glob("*.py"), CODE / "delivery" / "progress.py")
)


def test_defaults() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+|none) \|", PAGE, re.MULTILINE))
    defaults = msgspec.structs.asdict(StreamOptions()) | msgspec.structs.asdict(StreamsConfig())
    del defaults["stream"]
    assert "none" == rows.pop("topics")
    assert () == defaults.pop("topics")
    assert {key: float(value) for key, value in defaults.items()} == {key: float(value) for key, value in rows.items()}


def test_counters() -> None:
    counted = set(re.findall(r'counters\["(\w+)"\]', SOURCES)) | set(re.findall(r'count\("(\w+)"\)', SOURCES))
    table = PAGE[PAGE.index("| event |") : PAGE.index("Gauges:")]
    named = set(re.findall(r"`(\w+)`", table))
    assert counted <= named
    counted.add("refused_max_progress")  # by the options of the progress store
    assert named - counted <= {"refused", "expired", "too_large"}, "what clients do, by the name the scheduler gives it"
