"""The engines under contract, and small things that all suites use."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from motorcade.redis.url import RedisOptions
from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Appended, Bound, Draft, Durability, Entry, Store, Swept
from motorcade.storage.redis import RedisStore
from motorcade.storage.rocks import RocksStore
from tests.support.redis import RedisCluster, RedisServer

T = TypeVar("T")

#: The moment at which most tests happen. Time is an argument everywhere, so it could be any; it is about today, because
#: a shared server may let things go by its own clock as well, when they are long overdue.
NOW = float(int(time.time()))
HOUR = 3600.0
DAY = 24 * HOUR

#: Large enough to be stored apart from its entry by every engine.
PAYLOAD = b"payload " * 512

#: Names that are easily mistaken: for separators, patterns, hash tags, escapes, numbers, parts of each other.
ODD_NAMES = [
    "a", "ab", "a/b", "/", "//", "%", "%2F", "*", "?", "[a-z]", "\\", "{", "}", "{}", "{a}", "{a}b", "a{b}c", ":",
    "a:b", "0", "00", " ", " a ", "a\nb", "\x01", "\x7f", "ä", "a\u0308", "車", "🚗", "\uffff", "\U0010ffff", "'",
    '"', "$SYS", "v" * 1000, "v" * 65535,
]  # fmt: skip


#: Tests for engines that apply a batch as a whole, that keep their data, and that go by `now` in everything.
atomic = local_clock = pytest.mark.parametrize("engine", ["memory", "rocksdb"], indirect=True)
persistent = pytest.mark.parametrize("engine", ["rocksdb", "redis", "valkey", "cluster"], indirect=True)


def odd_id(name: str) -> str:
    """A short name of an odd name, for reports."""
    text = name.encode("unicode_escape").decode("ascii")
    return text if len(text) < 20 else f"{text[:8]}…{len(name)}"


class Engine:
    """How to get at one engine. Every store it makes has the same data behind it, where there is any."""

    persistent = False  #: what was written is there after `close` and `open`
    shared = False  #: several stores may be open at once; leases go by the servers' clock, not by `now`
    atomic = True  #: batches are seen as a whole or not at all

    def __init__(self, name: str) -> None:
        self.name = name

    def make(self) -> Store:
        return MemoryStore()

    def empty(self) -> None:
        """Forget all data."""


class EmbeddedEngine(Engine):
    """Directories of RocksDB, one after the other."""

    persistent = True

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name)
        self.level = Durability.SAFE
        self._directory = directory
        self._count = 0

    @property
    def path(self) -> Path:
        return self._directory / f"store-{self._count}"

    def make(self) -> Store:
        return RocksStore(self.path, self.level)

    def empty(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._count += 1


class SharedEngine(Engine):
    """A server, or a cluster of them."""

    persistent = shared = True
    atomic = False

    def __init__(self, name: str, servers: RedisServer | RedisCluster) -> None:
        super().__init__(name)
        self._servers = servers

    def make(self) -> RedisStore:
        # A server alone has no replica that could confirm anything.
        return patient(self._servers.url, Durability.SAFE if self.name == "cluster" else Durability.FAST)

    def empty(self) -> None:
        self._servers.empty()


def patient(url: str, durability: Durability) -> RedisStore:
    """A store that does not take servers for lost because the machine is busy."""
    made = RedisStore(url, durability, RedisOptions(patience=60.0))
    made._place = replace(made._place, access=replace(made._place.access, connect_timeout=60.0, reply_timeout=60.0))
    return made


def digest_of(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()


async def append(
    store: Store, owner: str, draft: Draft, now: float = NOW, bound: Bound | None = None, spared: int = 0
) -> Appended:
    """Append to one owner."""
    answers = await store.mailboxes.append([owner], draft, now, bound or Bound(), [spared] if spared else ())
    assert [owner] == [answer.owner for answer in answers]
    return answers[0]


async def fill(store: Store, owner: str, *bodies: bytes) -> list[int]:
    """Append plain entries; their positions."""
    return [(await append(store, owner, Draft(body))).position for body in bodies]


async def entries(store: Store, owner: str, now: float = NOW) -> list[Entry]:
    """All entries of a mailbox."""
    return await store.mailboxes.read(owner, 0, 1_000_000, now)


async def bodies(store: Store, owner: str, now: float = NOW) -> list[bytes]:
    return [entry.body for entry in await entries(store, owner, now)]


async def positions(store: Store, owner: str, now: float = NOW) -> list[int]:
    return [entry.position for entry in await entries(store, owner, now)]


async def owners(store: Store) -> list[str]:
    return sorted([owner async for owner in store.mailboxes.owners()])


async def scan(store: Store, collection: str, prefix: str = "", now: float = NOW) -> dict[str, bytes]:
    """All records of a collection; none comes twice."""
    found = [item async for item in store.records.scan(collection, now, prefix)]
    assert len(found) == len(dict(found)), "a scan gave a record twice"
    return dict(found)


async def sweep(store: Store, now: float, budget: int = 100) -> list[Swept]:
    """A complete sweep, step by step."""
    steps = [await store.sweep(now, budget)]
    while (cursor := steps[-1].cursor) is not None:
        assert len(steps) < 100_000, "the sweep does not end"
        steps.append(await store.sweep(now, budget, cursor))
    return steps


async def trim(store: Store, stream: str, budget: int = 1000, **limits: float) -> list[Swept]:
    """A complete trim, step by step."""
    steps: list[Swept] = []
    while not steps or steps[-1].cursor is not None:
        assert len(steps) < 10_000, "the trim does not end"
        steps.append(await store.streams.trim(stream, budget=budget, **limits))  # type: ignore[arg-type]
    return steps


async def eventually(ask: Callable[[], Awaitable[T]], accept: Callable[[T], bool], patience: float = 60.0) -> T:
    """Ask again and again until the answer is accepted."""
    async with asyncio.timeout(patience):
        while True:
            if accept(answer := await ask()):
                return answer
            await asyncio.sleep(0.01)
