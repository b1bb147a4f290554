"""A node waits for a Redis that is not there yet, and for nothing else."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from motorcade import config as configuration
from motorcade.core.errors import MotorcadeError
from motorcade.node import Node
from tests.support.ports import free_port
from tests.support.redis import RedisServer

PATIENCE = 120.0  # seconds


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """A node sets the collector up for its process."""
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


def node_on(url: str, data: Path) -> Node:
    flags = {"listeners.tcp.bind": "127.0.0.1:0", "listeners.ws.bind": "off", "http.bind": "off"}
    loaded = configuration.load(None, {}, {**flags, "data.dir": str(data), "store.url": url})
    return Node(loaded, asyncio.get_running_loop())


async def until_told(capsys: pytest.CaptureFixture[str], words: str, running: asyncio.Task[None]) -> str:
    """What was written so far, when it has these words in it."""
    written = ""
    async with asyncio.timeout(PATIENCE):
        while words not in written:
            assert not running.done(), running.exception()
            both = capsys.readouterr()
            written += both.out + both.err
            await asyncio.sleep(0.02)
    return written


async def test_a_node_waits_for_a_redis_that_is_not_there_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = RedisServer()
    server.port = free_port()
    node = node_on(server.url, tmp_path)
    running = asyncio.create_task(node.run())
    told = await until_told(capsys, "waiting_for_store", running)
    assert f"cannot connect to {server.address}" in told and " ready " not in told
    try:
        await asyncio.to_thread(server.start)
        await until_told(capsys, " ready ", running)
        node.stopping.set()
        await asyncio.wait_for(running, PATIENCE)
    finally:
        await asyncio.to_thread(server.stop)


async def test_a_node_that_waits_can_be_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = node_on(f"redis+cluster://127.0.0.1:{free_port()}", tmp_path)
    running = asyncio.create_task(node.run())
    await until_told(capsys, "waiting_for_store", running)
    node.stopping.set()
    await asyncio.wait_for(running, PATIENCE)


async def test_what_a_server_refuses_is_not_waited_for(tmp_path: Path, server: RedisServer) -> None:
    server.command("ACL", "SETUSER", "hub", "on", ">right", "~*", "+@all")
    try:
        for access in ("hub:wrong@{}", "{}/4711", "{}?unchecked=yes&replicas=3"):
            node = node_on("redis://" + access.format(server.address), tmp_path)
            with pytest.raises(MotorcadeError):
                await asyncio.wait_for(node.run(), PATIENCE)
    finally:
        server.command("ACL", "DELUSER", "hub")
