"""The clock of these tests stands until it is turned; sockets are real."""

from __future__ import annotations

from tests.support.standing_clock import StandingLoop


def pytest_asyncio_loop_factories() -> dict[str, type[StandingLoop]]:
    return {"standing": StandingLoop}
