"""Servers of these tests; each test gets them empty."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from motorcade.dispatch.calls import Calls
from motorcade.dispatch.options import DispatchOptions
from tests.support.redis import RedisServer


@pytest.fixture(scope="session")
def lone_server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def server(lone_server: RedisServer) -> RedisServer:
    lone_server.empty()
    return lone_server


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server that the test may stop or pause."""
    with RedisServer() as running:
        yield running


@pytest.fixture
def options(server: RedisServer) -> DispatchOptions:
    return DispatchOptions(redis=server.url, listen="127.0.0.1:0")


@pytest.fixture
async def calls(options: DispatchOptions) -> AsyncIterator[Calls]:
    calls = Calls(options)
    await calls.open()
    yield calls
    await calls.close()
