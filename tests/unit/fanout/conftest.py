"""store  of tests of receipts: in memory. Engines are held to the same contract (`tests/contracts`)
world  of the model, for one example
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Store
from tests.unit.fanout.test_model import Machine, judged


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    made = MemoryStore()
    await made.open()
    yield made
    await made.close()


@pytest.fixture
def world() -> Iterator[Machine]:
    """A node, three vehicles that are away, a platform. What the model demands in the end is demanded here, too."""
    with judged(Machine()) as machine:
        yield machine
