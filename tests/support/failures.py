"""A plugin for pytest: `--failures FILE` writes failed tests with their reasons, for scripts/run_tests.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

#: characters of a reason; the whole of it is in pytest's own output
MAX_REASON = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", metavar="FILE", help="write failed tests and their reasons to FILE, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--failures")
    # Workers of pytest-xdist report to the controller, which has all results.
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(path)))


class Failures:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.found.setdefault(report.nodeid, f"{report.when}: {_reason(report)}")

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self.found))


def _reason(report: pytest.TestReport) -> str:
    """Return the last line of what pytest says about the failure."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext.strip().rpartition("\n")[2]
    return " ".join(text.split())[:MAX_REASON]
