"""All servers of a place: connections that come back, the way to the right server, and reads that get there.

    lone server    every slot leads to it
    cluster        CLUSTER SLOTS of the first server that answers; asked again when a server says MOVED or is gone

Each server has one connection per purpose: groups of writes end with a WAIT, which holds up everything behind it, as
does a command that blocks until there is something to read.

Rule 1: reads are repeated until `patience` runs out, whatever went wrong, unless the server says that they are wrong.
Rule 2: a server that cannot be reached is left alone for a while, longer each time; meanwhile callers fail at
        once, so that a thousand waiting readers make one attempt.
Rule 3: a server has another history of writes after each start, and each time it becomes a master. It is asked for it
        on each new connection, and when the topology has changed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any

import structlog

from motorcade.core.errors import StoreAwayError, StoreDamagedError, StoreError, StoreFullError
from motorcade.redis.resp import Access, Argument, LostError, RedisConnection, ServerAddress, ServerError, connect
from motorcade.redis.scripts import Script
from motorcade.redis.slots import Topology

log = structlog.get_logger("motorcade.redis")

#: Answers that mean: nothing was done, it may work in a moment or elsewhere.
PASSING = frozenset(
    {"MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "LOADING", "READONLY", "MASTERDOWN", "BUSY", "NOREPLICAS", "UNBLOCKED"}
)
#: Answers that mean: nothing was done, and nothing will be until there is room again.
FULL = frozenset({"OOM", "MISCONF"})

#: Seconds between attempts, doubled each time.
FIRST_PAUSE = 0.01
LONGEST_PAUSE = 0.5


class Purpose(StrEnum):
    """The purpose of a connection."""

    READ = auto()
    WRITE = auto()
    BLOCK = auto()


@dataclass(slots=True)
class ServerLink:
    """One of the connections to one server."""

    lock: asyncio.Lock
    connection: RedisConnection | None = None
    pause: float = 0.0
    closed_until: float = 0.0  #: loop time
    trouble: str = ""
    history: str | None = None  #: of the server, as this connection was told last


def refusal(error: ServerError, address: ServerAddress) -> StoreError:
    """Translate a server's refusal into an error for the caller."""
    if error.code in FULL:
        return StoreFullError(f"{address} takes no writes: {error}")
    if error.code == "WRONGTYPE":
        return StoreDamagedError(f"{address} holds something else under our keys ({error}); give the store a prefix")
    return StoreError(f"{address} refuses: {error}")


class Servers:
    """The way to every server."""

    def __init__(
        self,
        seeds: list[ServerAddress],
        access: Access,
        clustered: bool,
        patience: float,
        scripts: Iterable[Script] = (),
    ) -> None:
        self.seeds = seeds
        self.access = access
        self.clustered = clustered
        self.patience = patience
        self.topology = Topology.alone(seeds[0])
        self.reconnects = 0
        self.topologies = 0  #: times that another server has come to serve something
        self._scripts = tuple(scripts)  #: that every server is told before it is asked
        self._links: dict[tuple[ServerAddress, Purpose], ServerLink] = {}
        self._known: set[ServerAddress] = set(seeds)
        self._refreshing: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self) -> None:
        self._closed = False
        if self.clustered:
            await self._ask_for_topology()

    async def close(self) -> None:
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
        open_ones = [link.connection for link in self._links.values() if link.connection is not None]
        for connection in open_ones:
            connection.close()
        for connection in open_ones:
            await connection.closed
        self._links.clear()

    # -- connections

    async def connection(self, address: ServerAddress, purpose: Purpose) -> RedisConnection:
        """Return an open connection; `LostError` if there is none and none can be made now."""
        link = self._links.get((address, purpose))
        if link is None:
            link = self._links[address, purpose] = ServerLink(asyncio.Lock())
        connection = link.connection
        if connection is not None and connection.is_open:
            return connection
        async with link.lock:
            return await self._connect(link, address)

    async def _connect(self, link: ServerLink, address: ServerAddress) -> RedisConnection:
        loop = asyncio.get_running_loop()
        if link.connection is not None and link.connection.is_open:
            return link.connection
        if self._closed:
            raise LostError("the store is closed")
        if loop.time() < link.closed_until:
            raise LostError(link.trouble)
        if link.connection is not None:
            self.reconnects += 1
        try:
            connection = await connect(address, self.access)
        except LostError as error:
            link.pause = min(max(link.pause * 2, FIRST_PAUSE), LONGEST_PAUSE)
            link.closed_until = loop.time() + link.pause * random.uniform(0.5, 1.0)  # noqa: S311 - spreads attempts
            link.trouble = str(error)
            raise
        link.pause = 0.0
        link.connection = connection
        link.history = None
        for script in self._scripts:
            self.load(connection, script)
        return connection

    async def connection_and_history(self, address: ServerAddress, purpose: Purpose) -> tuple[RedisConnection, str]:
        """Return an open connection, and the name of the history of its server's writes (rule 3); empty: it tells none.

        `LostError` as `connection`. One caller at a time for each server and purpose.
        """
        while True:
            connection = await self.connection(address, purpose)
            link = self._links[address, purpose]
            if link.history is not None:
                return connection, link.history
            link.history = ""  # unless it is to be asked again, which may happen meanwhile
            try:
                told = _replication_id(await connection.call("INFO", "replication"))
            except ServerError as error:
                log.warning("redis_history_unknown", server=str(address), error=str(error))
                return connection, ""
            except LostError:
                link.history = None
                raise
            if link.history is not None:
                link.history = told

    @staticmethod
    def load(connection: RedisConnection, script: Script) -> None:
        """Make a script known; a failure shows when the script is called."""
        connection.call("SCRIPT", "LOAD", script.source).add_done_callback(lambda reply: reply.exception())

    # -- topology

    def master(self, slot: int) -> ServerAddress | None:
        return self.topology.master(slot)

    def refresh(self) -> asyncio.Future[None]:
        """Ask who serves what, now; one question at a time, however many want to know.

        Shielded: a caller that is cancelled while waiting must not take the answer away from the others.
        """
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh(), name="redis-topology")
        return asyncio.shield(self._refreshing)

    async def _refresh(self) -> None:
        if not self.clustered or self._closed:
            return
        try:
            await self._ask_for_topology()
        except StoreError as error:
            log.warning("redis_topology_unknown", error=str(error))
        except Exception:
            log.exception("redis_topology_unreadable")  # those who wait for it go on with what is known

    async def _ask_for_topology(self) -> None:
        # All at once, and the first answer counts: one that hangs must not keep us from the others.
        questions = [asyncio.create_task(self._slots(address)) for address in self._known]
        troubles: list[str] = []
        away = True  # no server has said a word
        try:
            for answer in asyncio.as_completed(questions):
                try:
                    topology, known = await answer
                except (LostError, ServerError) as error:
                    troubles.append(str(error))
                    away = away and (isinstance(error, LostError) or error.code in PASSING)
                    continue
                if topology != self.topology:
                    log.info("redis_topology", masters=[str(master) for master in topology.all_masters()])
                    self.topologies += 1
                    for link in self._links.values():
                        link.history = None
                self.topology = topology
                self._known |= known
                return
        finally:
            for question in questions:
                question.cancel()
            await asyncio.gather(*questions, return_exceptions=True)
        hint = " (the URL of a lone server begins with redis://)" if "support disabled" in str(troubles) else ""
        kind = StoreAwayError if away else StoreError
        raise kind(f"no server of the cluster answers: {'; '.join(sorted(set(troubles)))}{hint}")

    async def _slots(self, address: ServerAddress) -> tuple[Topology, set[ServerAddress]]:
        connection = await self.connection(address, Purpose.READ)
        reply = await connection.call("CLUSTER", "SLOTS")
        known = {
            ServerAddress(node[0].decode() or address.host, node[1]) for line in reply for node in line[2:] if node[0]
        }
        return Topology.parse(reply, address), known

    # -- reads

    async def ask(self, slot: int, *arguments: Argument) -> Any:
        """Send a command that may be repeated to the master of a slot."""
        end = asyncio.get_running_loop().time() + self.patience
        pause = FIRST_PAUSE
        asked: ServerAddress | None = None  # the server that has the key while its slot is being moved
        while True:
            address = asked or self.topology.master(slot)
            try:
                return await self._ask_once(address, asked is not None, arguments)
            except LostError as error:
                trouble, asked = str(error), None
            except ServerError as error:
                if error.code not in PASSING:
                    raise
                trouble = f"{address}: {error}"
                asked = moved_to(error) if error.code == "ASK" else None
                if asked is not None:
                    continue
            if self._closed:
                raise StoreError("the store is closed")
            if asyncio.get_running_loop().time() > end:
                raise StoreAwayError(f"no answer within {self.patience:g} s: {trouble}")
            await self.refresh()
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _ask_once(self, address: ServerAddress | None, asking: bool, arguments: tuple[Argument, ...]) -> Any:
        if address is None:
            raise LostError("no server has the slot")
        connection = await self.connection(address, Purpose.READ)
        await connection.room()
        if asking:
            connection.call("ASKING").add_done_callback(lambda reply: reply.exception())
        return await connection.call(*arguments)

    async def evaluate(self, slot: int, script: Script, keys: Iterable[Argument], *arguments: Argument) -> Any:
        """Run a script that writes nothing."""
        names = list(keys)
        try:
            return await self.ask(slot, "EVALSHA", script.digest, len(names), *names, *arguments)
        except ServerError as error:
            if error.code != "NOSCRIPT":
                raise
        return await self.ask(slot, "EVAL", script.source, len(names), *names, *arguments)


def _replication_id(told: bytes) -> str:
    for line in told.decode("utf-8", "replace").splitlines():
        name, _, value = line.partition(":")
        if name == "master_replid":
            return value
    return ""


def moved_to(error: ServerError) -> ServerAddress | None:
    """Return the server that a MOVED or ASK names, if it names one."""
    words = str(error).split()
    if len(words) < 3:
        return None
    host, _, port = words[2].rpartition(":")
    return ServerAddress(host, int(port)) if host else None
