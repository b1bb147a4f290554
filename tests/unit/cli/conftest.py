"""Commands against a node of this process; see tests/support/commands.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support import commands
from tests.support.commands import Done
from tests.support.local import LocalNode
from tests.support.operator import Operator

Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run("pub", "-t", "a", …, stdin="", env=None)` in an empty folder."""
    return partial(commands.run, cwd=tmp_path)


@pytest.fixture(scope="module")
def node(request: pytest.FixtureRequest) -> Iterator[LocalNode]:
    """A node with its control port, and the `CONFIG` of the test file."""
    with LocalNode(getattr(request.module, "CONFIG", "")) as running:
        yield running


@pytest.fixture(scope="module")
def operator(node: LocalNode) -> Iterator[Operator]:
    with Operator(node) as running:
        yield running
