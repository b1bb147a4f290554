"""The way to all servers."""

from __future__ import annotations

import asyncio

from motorcade.redis.resp import Access, ServerAddress
from motorcade.redis.servers import Servers
from tests.support.ports import free_port


async def test_who_is_cancelled_takes_no_answer_away_from_others() -> None:
    """Many wait for one question about the topology; one of them loses patience."""
    servers = Servers([ServerAddress("127.0.0.1", free_port())], Access(), clustered=True, patience=1.0)

    async def wait() -> str:
        await servers.refresh()
        return "answered"

    impatient, patient = asyncio.create_task(wait()), asyncio.create_task(wait())
    await asyncio.sleep(0)
    impatient.cancel()
    async with asyncio.timeout(60):
        assert "answered" == await patient
    assert impatient.cancelled()
    await servers.close()
