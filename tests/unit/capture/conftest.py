"""Servers of these tests; each test gets them empty and well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.redis import RedisServer


@pytest.fixture(scope="module")
def lone_server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def server(lone_server: RedisServer) -> Iterator[RedisServer]:
    lone_server.empty()
    yield lone_server
    lone_server.resume()
    lone_server.command("CONFIG", "SET", "maxmemory", "0")
