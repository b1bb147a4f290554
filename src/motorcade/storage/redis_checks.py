"""Checks of Redis servers before they are trusted, and of the inside of a store.

A server without append-only file comes back empty after a crash, and its replicas then copy the emptiness; a server
that evicts forgets what was acknowledged. Neither is opened unless told to.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import structlog

from motorcade.redis.resp import ServerAddress, ServerError
from motorcade.redis.servers import Purpose, Servers
from motorcade.redis.slots import slot_of
from motorcade.redis.url import RedisOptions
from motorcade.storage.cells import DEFAULT_CELLS, Cells
from motorcade.storage.homes import INDEXED, home_of_record, is_indexed
from motorcade.storage.ports import Durability, StoreAwayError, StoreError
from motorcade.storage.redis_format import unpack_entry, unpack_state
from motorcade.storage.redis_scripts import READ

log = structlog.get_logger("motorcade.storage.redis")

#: Format of keys and values; raised when a store of the old format cannot be used as it is.
VERSION = 3
#: Formats that can be exported: 2 had no homes, so that most of its keys lie in other cells.
READABLE = (2, VERSION)
OLDEST_SERVER = (7, 0)


async def server_info(servers: Servers, address: ServerAddress) -> dict[str, str]:
    """Return INFO as a dictionary."""
    connection = await servers.connection(address, Purpose.READ)
    text = (await connection.call("INFO")).decode()
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


async def check_servers(servers: Servers, level: Durability, options: RedisOptions) -> int:
    """Refuse servers that would lose what they acknowledge; how many replicas have to confirm a write."""
    replicas: dict[ServerAddress, int] = {}
    synced = True  # by every server, before it answers
    if not servers.topology.is_whole:
        raise StoreAwayError("the Redis cluster does not serve all slots; see CLUSTER INFO")
    for address in servers.topology.all_masters():
        try:
            info = await server_info(servers, address)
            _check_server(address, info, servers.clustered, options)
            always = level is not Durability.FAST and await _syncs_always(servers, address)
            if level is Durability.STRICT and not always and not options.unchecked:
                raise StoreError(f"{address} does not sync every write; durability strict needs `appendfsync always`")
            synced = synced and always
        except ServerError as error:
            raise StoreError(f"{address} does not tell how it is set up: {error}") from None
        replicas[address] = int(info.get("connected_slaves", "0"))
    return _confirmations(replicas, level, options, synced)


def _check_server(address: ServerAddress, info: dict[str, str], clustered: bool, options: RedisOptions) -> None:
    if info.get("loading") == "1":  # it says of itself that it keeps no file, until that is read
        raise StoreAwayError(f"{address} is still reading its data")
    version = info.get("redis_version", "0.0")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        raise StoreError(f"{address} is Redis {version}; 7.0 or later, or Valkey, is needed")
    if (info.get("cluster_enabled") == "1") != clustered:
        name = "redis+cluster" if not clustered else "redis"
        raise StoreError(f"{address} is {'not ' if clustered else ''}part of a cluster; its URL begins with {name}://")
    if info.get("role") != "master":
        raise StoreError(f"{address} is a replica; the URL has to name its master")
    if options.unchecked:
        return
    if info.get("aof_enabled") != "1":
        raise StoreError(
            f"{address} keeps no append-only file and would lose everything in a crash; set `appendonly yes`, "
            "or add ?unchecked=yes to the URL if that may be"
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise StoreError(
            f"{address} evicts what it holds when memory runs out ({policy}); set `maxmemory-policy noeviction`, "
            "or add ?unchecked=yes to the URL if that may be"
        )


async def _syncs_always(servers: Servers, address: ServerAddress) -> bool:
    """Return True if a server has every write on its disk before it answers; False also if it does not tell."""
    connection = await servers.connection(address, Purpose.READ)
    try:
        reply = await connection.call("CONFIG", "GET", "appendfsync")
    except ServerError as error:
        log.info("redis_appendfsync_unknown", server=str(address), error=str(error))
        return False
    return bool(reply[1:] == [b"always"])


def _confirmations(replicas: dict[ServerAddress, int], level: Durability, options: RedisOptions, synced: bool) -> int:
    if level is Durability.FAST:
        return 0
    lacking = [str(address) for address, count in replicas.items() if count < (options.replicas or 1)]
    if options.replicas is not None:
        if options.replicas and lacking:
            raise StoreError(f"fewer than {options.replicas} replicas are connected to {', '.join(lacking)}")
        return options.replicas
    if len(lacking) == len(replicas):
        if not synced:
            log.warning(
                "redis_without_replicas",
                effect="a crash of a server or its machine can take the last two seconds, acknowledged or not",
                remedy="connect a replica, or set `appendfsync always`; see docs/durability.md",
            )
        return 0
    if lacking:
        log.warning("redis_replica_missing", masters=lacking, effect="they confirm no write until one is back")
    return 1


async def agree_on_cells(servers: Servers, options: RedisOptions, replicas: int, only_read: bool = False) -> int:
    """Create the store's meta record, or check that it is what we expect; the number of cells."""
    key = f"{options.prefix}:meta"
    slot = slot_of(key)
    # Asked first: a full server takes no HSETNX, and a full store has to be opened to be emptied.
    known = None not in await servers.ask(slot, "HMGET", key, "version", "cells")
    if not known and only_read:
        raise StoreError(f"there is no store with the prefix {options.prefix!r} on these servers")
    if not known:
        await servers.ask(slot, "HSETNX", key, "version", VERSION)
        await servers.ask(slot, "HSETNX", key, "cells", options.cells or DEFAULT_CELLS)
    if replicas:
        confirmed = await servers.ask(slot, "WAIT", replicas, 2000)
        if confirmed < replicas:
            raise StoreError(f"{confirmed} of {replicas} replicas have confirmed the first write")
    *numbers, importing = await servers.ask(slot, "HMGET", key, "version", "cells", "importing")
    version, cells = (int(value) for value in numbers)
    if version not in (READABLE if only_read else (VERSION,)):
        raise StoreError(format_refusal(version))
    if importing is not None:
        raise StoreError(
            f"an import into this store was not finished; remove all keys that begin with {options.prefix}: and import "
            "again, or choose another prefix"
        )
    if options.cells is not None and options.cells != cells:
        raise StoreError(f"the store was created with {cells} cells, not {options.cells}; that cannot be changed")
    return cells


def format_refusal(version: int) -> str:
    """Say why a store cannot be used as it is, and what to do."""
    told = f"the store has format {version}, this program knows format {VERSION}"
    if version not in READABLE:
        return told
    return (
        f"{told}; `motorcade store export` of this version reads it: stop all nodes, export it, and `motorcade store "
        "import` the file into another prefix (?prefix=NAME) or servers without contents"
    )


class Inspection:
    """The findings of `check`. Writes that happen meanwhile look like faults, so what has changed is read again."""

    ATTEMPTS = 3
    PAGE = 500

    def __init__(self, servers: Servers, cells: Cells) -> None:
        self._servers = servers
        self._cells = cells
        self._wrong: list[str] = []

    async def run(self) -> list[str]:
        for cell in range(self._cells.count):
            for attempt in range(self.ATTEMPTS):
                before = await self._ask(cell, "HGETALL", self._key(cell, "n"))
                wrong, needed = await self._cell(cell)
                wrong += await self._unindexed(cell)
                if before == await self._ask(cell, "HGETALL", self._key(cell, "n")):
                    self._wrong += wrong
                    await self._blobs(needed)
                    break
                if attempt == self.ATTEMPTS - 1:
                    log.info("redis_check_skipped", cell=cell, reason="it is being written")
        return self._wrong

    async def _cell(self, cell: int) -> tuple[list[str], set[bytes]]:
        """Return findings, and blobs that must be there: servers remove those of entries that expired an hour ago."""
        wrong: list[str] = []
        needed: set[bytes] = set()
        now = time.time()
        references: Counter[bytes] = Counter()
        total = 0
        async for owner in self._members(cell, "o"):
            name = owner.decode()
            first = entries = size_bytes = 0
            async for position, value in self._entries(cell, owner):
                entry = unpack_entry(value)
                first = first or position
                entries += 1
                size_bytes += entry.size_bytes
                if entry.digest:
                    references[entry.digest] += 1
                    if not 0 < entry.expires_at <= now:
                        needed.add(entry.digest)
            state = unpack_state(await self._ask(cell, "HGET", self._key(cell, "e:", owner), "s"))
            if (first, entries, size_bytes) != (state.first, state.entries, state.size_bytes):
                wrong.append(f"mailbox {name!r}: size and beginning do not agree with the entries")
            holes = await self._ask(cell, "ZRANGE", self._key(cell, "g:", owner), 0, -1)
            if sum(map(_length, holes)) != state.last - state.first + 1 - state.entries:
                wrong.append(f"mailbox {name!r}: the positions that are gone do not agree with the entries")
            total += entries
        counted = int(await self._ask(cell, "HGET", self._key(cell, "n"), "entries") or 0)
        if counted != total:
            wrong.append(f"cell {cell}: {total} entries, not {counted}")
        stored = await self._ask(cell, "HGETALL", self._key(cell, "r"))
        if dict(zip(stored[::2], map(int, stored[1::2]), strict=True)) != references:
            wrong.append(f"cell {cell}: the references to blobs do not agree with the entries")
        return wrong, needed

    async def _unindexed(self, cell: int) -> list[str]:
        """Find records that a session which is opened would not find."""
        wrong: list[str] = []
        for collection in INDEXED:
            records, cursor = self._key(cell, "R:", collection.encode()), b"0"
            while True:
                cursor, page = await self._ask(cell, "HSCAN", records, cursor, "COUNT", self.PAGE)
                homes = {key: home_of_record(collection, key) for key in (key.decode() for key in page[::2])}
                found = await asyncio.gather(
                    *(
                        self._ask(cell, "SISMEMBER", self._key(cell, "i:", home.encode()), f"{collection}\0{key}")
                        for key, home in homes.items()
                    )
                )
                missing = [
                    key
                    for (key, home), is_there in zip(homes.items(), found, strict=True)
                    if not is_there and is_indexed(collection, key, home)
                ]
                wrong += [f"record {collection}/{key}: missing in the index of its home" for key in missing]
                if cursor == b"0":
                    break
        return wrong

    async def _blobs(self, digests: set[bytes]) -> None:
        for digest in digests:
            cell = self._cells.of(digest)
            if not await self._ask(cell, "EXISTS", self._key(cell, "b:", digest)):
                self._wrong.append(f"blob {digest.hex()}: missing")

    async def _entries(self, cell: int, owner: bytes) -> AsyncIterator[tuple[int, bytes]]:
        """Yield all entries, expired or not."""
        keys = [self._key(cell, "e:", owner), self._key(cell, "g:", owner)]
        after = 0
        while page := await self._servers.evaluate(self._cells.slot(cell), READ, keys, after, self.PAGE, -1):
            for index in range(0, len(page), 3):
                after = int(page[index])
                yield after, page[index + 1]

    async def _members(self, cell: int, name: str) -> AsyncIterator[bytes]:
        cursor = b"0"
        seen: set[bytes] = set()
        while True:
            cursor, members = await self._ask(cell, "SSCAN", self._key(cell, name), cursor, "COUNT", self.PAGE)
            for member in set(members) - seen:
                yield member
            seen.update(members)
            if cursor == b"0":
                return

    def _key(self, cell: int, kind: str, name: bytes = b"") -> bytes:
        return self._cells.key(cell, kind).encode() + name

    async def _ask(self, cell: int, *arguments: str | bytes | int) -> Any:
        return await self._servers.ask(self._cells.slot(cell), *arguments)


def _length(hole: bytes) -> int:
    start, _, end = hole.partition(b":")
    return int(end) - int(start) + 1
