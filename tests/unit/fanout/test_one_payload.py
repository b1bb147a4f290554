"""A payload is stored once, however many vehicles and requests it is for."""

from __future__ import annotations

import asyncio
from pathlib import Path

from motorcade.core.vin import make_vin
from motorcade.extension.plugin import Plugins
from motorcade.plugins.fanout.service import FanoutService
from motorcade.storage.rocks import RocksStore
from tests.support.virtual import MemoryNode

VEHICLES = 200
REQUESTS = 50
PAYLOAD = bytes(range(256)) * 16
IN_FLIGHT = 16


async def test_two_hundred_vehicles_and_fifty_requests(tmp_path: Path) -> None:
    """And another payload is another blob: the figures would show it."""
    store = RocksStore(tmp_path / "store")
    await store.open()
    node = MemoryNode(loop=asyncio.get_running_loop())
    plugins = Plugins(node.broker, node.hooks, Path("unused"), node.state.shared.sources)
    plugins.store = store
    await plugins.load("fanout")
    fanout: FanoutService = plugins.service("fanout")
    vins = [make_vin(number) for number in range(VEHICLES)]
    try:
        before = await store.figures()
        for first in range(0, REQUESTS, IN_FLIGHT):
            names = [f"r{number}" for number in range(first, min(first + IN_FLIGHT, REQUESTS))]
            answers = await asyncio.gather(*(fanout.send(vins, name, PAYLOAD) for name in names))
            assert all(answer.accepted == VEHICLES and not answer.rejected for answer in answers)
        after = await store.figures()
        assert VEHICLES * REQUESTS == after.entries - before.entries
        assert 1 == after.blobs - before.blobs
        assert len(PAYLOAD) == after.blob_octets - before.blob_octets
        await fanout.send(vins[:1], "r0", PAYLOAD[::-1])
        assert 2 == (await store.figures()).blobs - before.blobs
    finally:
        await plugins.unload_all()
        await store.close()
