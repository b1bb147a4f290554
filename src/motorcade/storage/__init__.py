"""Storage: five small ports and the engines that serve them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Durability, Store, StoreError

#: What `open_store` understands, for messages.
FORMS = "memory://, rocksdb://DIRECTORY, redis://HOST:PORT or redis+cluster://HOST:PORT"

MEMORY = "memory://"

_SHARED = ("redis", "rediss", "redis+cluster", "rediss+cluster")


def names_store(url: str) -> bool:
    """Return True if `url` has one of the forms; `rocksdb://` may leave the directory to its user (see `placed`)."""
    scheme, separator, place = url.partition("://")
    return url in (MEMORY, "rocksdb://") or (bool(separator and place) and scheme in ("rocksdb", *_SHARED))


def placed(url: str, data: Path) -> str:
    """Return the URL, with the directory if an embedded store names none."""
    return f"rocksdb://{data / 'store'}" if url == "rocksdb://" else url


def private_store(data: Path) -> Path:
    """Return the folder of the Valkey that `motorcade serve --nodes` runs for its nodes, in their data folder."""
    return data / "valkey"


def has_private_store(folder: Path) -> bool:
    """Return True if such a Valkey has ever written there."""
    return (folder / "appendonlydir").is_dir()


async def open_store(url: str, durability: Durability = Durability.SAFE, cache_bytes: int | None = None) -> Store:
    """Open the store that `url` names; `StoreError` says what is wrong with it.

    `cache_bytes` bounds what an embedded store keeps of its files in memory.
    """
    store = await asyncio.to_thread(_store, url, durability, cache_bytes)  # importing an engine takes a while
    await store.open()
    return store


def _store(url: str, durability: Durability, cache_bytes: int | None) -> Store:
    scheme, separator, place = url.partition("://")
    match scheme:
        case "memory" if separator:
            return MemoryStore()
        case "rocksdb" if place:
            return _rocks(Path(place), durability, cache_bytes)
        case _ if scheme in _SHARED and place:
            return _redis(url, durability)
    raise StoreError(f"{url!r} does not name a store; it should be one of {FORMS}")


# An engine is imported when it is asked for: it takes a while, and the libraries of one are an extra.


def _rocks(path: Path, durability: Durability, cache_bytes: int | None) -> Store:
    from motorcade.storage.files import BLOCK_CACHE  # noqa: PLC0415
    from motorcade.storage.rocks import RocksStore  # noqa: PLC0415

    return RocksStore(path, durability=durability, block_cache=cache_bytes or BLOCK_CACHE)


def _redis(url: str, durability: Durability) -> Store:
    try:
        from motorcade.storage.redis import RedisStore  # noqa: PLC0415
    except ImportError as error:
        raise StoreError(f"{error}; `pip install 'motorcade[redis]'` brings what this store needs") from error
    return RedisStore(url, durability=durability)
