"""The source on the page docs/sources.md is the file that the scenario tests run, and the page's numbers hold."""

from __future__ import annotations

import re
import runpy

from motorcade.broker.limits import SessionOptions
from motorcade.broker.source_scheduler import BACKOFF, MAX_BACKOFF
from motorcade.extension.sources import FastFeed, FastSource, Feed, Source
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


def test_five_callbacks_are_enough() -> None:
    """The example overrides some of the five, and needs neither the optional face nor its feed; the page lists that."""
    contract = {name for name in vars(Source) if not name.startswith("_")}
    assert contract == {"subscribe", "unsubscribe", "terminate", "delivered", "info"}
    reader = runpy.run_path(str(ROOT / "examples" / "plugins" / "sqlite_source.py"))["Reader"]
    assert issubclass(reader, Source) and not issubclass(reader, FastSource)
    assert "subscribe" in vars(reader) and not set(vars(reader)) & set(vars(FastSource)) - {
        "__init__",
        "__module__",
        "__doc__",
    }
    optional = {name for name in vars(FastSource) if not name.startswith("_")}
    assert "hand" in vars(FastFeed) and not hasattr(Feed, "hand") and "feed.hand(" not in FILE
    section = PAGE.partition("## The optional face")[2].partition("\n## ")[0]
    assert optional | {"feed.hand"} == set(re.findall(r"^\| `([a-z_.]+)", section, re.MULTILINE))


def test_the_page_tells_the_numbers_that_hold() -> None:
    """Bounds and times on the page are those of the broker."""
    options = SessionOptions()
    assert f"`session.source_buffer` ({options.source_buffer} messages" in " ".join(PAGE.split())
    assert f"`source_buffer_bytes`, {options.source_buffer_bytes // 2**20} MiB" in " ".join(PAGE.split())
    assert f"after {BACKOFF:g} s, which doubles up to {MAX_BACKOFF:g} s" in " ".join(PAGE.split())
