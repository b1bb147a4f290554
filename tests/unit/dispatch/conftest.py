"""What these tests talk to Redis with; the server itself is one of `tests/unit/conftest.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from motorcade.dispatch.calls import Calls
from motorcade.dispatch.options import DispatchOptions
from tests.support.redis import RedisServer


@pytest.fixture
def options(server: RedisServer) -> DispatchOptions:
    """Nothing is over or overdue because the machine was busy: whoever tests that says how soon."""
    return DispatchOptions(redis=server.url, listen="127.0.0.1:0", lease=60.0, ack_timeout=60.0, remember=600.0)


@pytest.fixture
async def calls(options: DispatchOptions) -> AsyncIterator[Calls]:
    calls = Calls(options)
    await calls.open()
    yield calls
    await calls.close()
