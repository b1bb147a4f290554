"""The lease of a node when its store does not answer."""

from __future__ import annotations

import asyncio

import pytest

from motorcade.broker import lease
from motorcade.broker.lease import SessionLease
from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Lease


async def test_a_lease_that_cannot_be_given_back_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that was sent is held until its outcome is known; a node that stops cannot wait for that."""
    store = MemoryStore()
    await store.open()

    async def release(_lease: Lease) -> bool:
        await asyncio.get_running_loop().create_future()
        return True

    monkeypatch.setattr(store.coordination, "release", release)
    leading = SessionLease(store)
    await leading.begin("node", lambda _why: None)
    monkeypatch.setattr(lease, "TTL", 0.01)
    async with asyncio.timeout(60):
        await leading.end()
    await store.close()


async def test_a_node_whose_store_was_fenced_stops_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    await store.open()
    monkeypatch.setattr(lease, "TTL", 0.01)
    told: asyncio.Queue[str] = asyncio.Queue()
    leading = SessionLease(store)
    await leading.begin("node", told.put_nowait)
    await store.coordination.fence_member(store.writer)
    async with asyncio.timeout(60):
        assert await told.get() == lease.FENCED_NODE
        await leading.end()
    assert told.empty()
    await store.close()
