"""The clock of these tests, which stands until it is turned, and what they talk to Redis with.

The server itself is one of `tests/unit/conftest.py`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from motorcade.dispatch.calls import Calls
from motorcade.dispatch.options import DispatchOptions
from tests.support.redis import RedisServer
from tests.support.standing_clock import StandingLoop, clock, count_commands


def pytest_asyncio_loop_factories() -> dict[str, type[StandingLoop]]:
    return {"standing": StandingLoop}


@pytest.fixture(autouse=True)
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops know what Redis has not answered yet, and what leaders write into it about time goes by the loop's."""
    count_commands(monkeypatch.setattr)
    began = time.time()
    monkeypatch.setattr("motorcade.dispatch.leader._milliseconds", lambda: int((began + clock().time()) * 1000))
    monkeypatch.setattr("motorcade.dispatch.leader.LOOK_INTERVAL", 0.5)  # a minute has few turns then


@pytest.fixture
def options(server: RedisServer) -> DispatchOptions:
    """What goes by the server's clock is not over because the machine was busy."""
    return DispatchOptions(redis=server.url, listen="127.0.0.1:0", lease=60.0, ack_timeout=60.0, remember=600.0)


@pytest.fixture
async def calls(options: DispatchOptions) -> AsyncIterator[Calls]:
    calls = Calls(options)
    await calls.open()
    yield calls
    await calls.close()
