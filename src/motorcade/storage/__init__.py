"""Storage: five small ports and the engines that serve them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, cast

from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Durability, Store, StoreError

#: What `open_store` understands, for messages.
FORMS = "memory://, rocksdb://DIRECTORY, redis://HOST:PORT or redis+cluster://HOST:PORT"


async def open_store(url: str, durability: Durability = Durability.SAFE) -> Store:
    """Open the store that `url` names; `StoreError` says what is wrong with it."""
    store = _store(url, durability)
    await store.open()
    return store


def _store(url: str, durability: Durability) -> Store:
    scheme, _, place = url.partition("://")
    match scheme:
        case "memory":
            return MemoryStore()
        case "rocksdb" if place:
            return cast("Store", _engine("rocks", "rocksdb").RocksStore(Path(place), durability=durability))
        case "redis" | "rediss" | "redis+cluster" | "rediss+cluster" if place:
            return cast("Store", _engine("redis", "redis").RedisStore(url, durability=durability))
    raise StoreError(f"{url!r} does not name a store; it should be one of {FORMS}")


def _engine(module: str, extra: str) -> Any:
    """An engine is imported when it is asked for, since its libraries are extras."""
    try:
        return import_module(f"motorcade.storage.{module}")
    except ImportError as error:
        raise StoreError(f"{error}; `pip install 'motorcade[{extra}]'` brings what this store needs") from error
