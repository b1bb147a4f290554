"""The command as a user runs it: a process with arguments, standard streams and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.node import ROOT, NodeProcess

Run = Callable[..., subprocess.CompletedProcess[str]]
PATIENCE = 60.0  # seconds


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Ours without the variables that would configure a node, so that a developer's shell does not decide."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MOTORCADE_")}
    return clean | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"} | (extra or {})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run("pub", "-t", "a", …, stdin="", env=None)` in an empty folder."""

    def run_(*args: object, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "motorcade", *map(str, args)],
            input=stdin,
            env=environment(env),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    return run_


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    """A node with its control port."""
    with NodeProcess(http=True, token=True) as running:
        yield running
