"""The source on the page docs/sources.md is the file that the scenario tests run, and the page's numbers hold."""

from __future__ import annotations

import re

from motorcade.broker.limits import SessionOptions
from motorcade.broker.source_scheduler import BACKOFF, MAX_BACKOFF
from tests.support.node import ROOT

PAGE = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")
FILE = (ROOT / "examples" / "plugins" / "sqlite_source.py").read_text(encoding="utf-8")
MAX_LINES = 60


def test_the_page_shows_the_file() -> None:
    """The file is the truth; whoever changes it changes the page."""
    assert [FILE] == re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_example_is_short() -> None:
    """Blank lines, imports and all."""
    assert len(FILE.splitlines()) < MAX_LINES
    assert max(len(line) for line in FILE.splitlines()) <= 120


def test_the_page_tells_the_numbers_that_hold() -> None:
    """Bounds and times on the page are those of the broker."""
    options = SessionOptions()
    assert f"`session.source_buffer` ({options.source_buffer} messages" in " ".join(PAGE.split())
    assert f"`source_buffer_bytes`, {options.source_buffer_bytes // 2**20} MiB" in " ".join(PAGE.split())
    assert f"after {BACKOFF:g} s, which doubles up to {MAX_BACKOFF:g} s" in " ".join(PAGE.split())
