"""Stores that are open for as long as a test needs them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from motorcade.redis.servers import ServerLink
from motorcade.redis.url import RedisOptions
from motorcade.storage.ports import Durability
from motorcade.storage.redis import RedisStore


@asynccontextmanager
async def opened(url: str, level: Durability = Durability.FAST, patience: float = 60.0) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, level, RedisOptions(patience=patience))
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def links(store: RedisStore) -> list[ServerLink]:
    return list(store.core.servers._links.values())
