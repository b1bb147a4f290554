"""Run scripts on the right server, and retry until the outcome is known.

Every script of the dispatcher may be carried out twice without harm: a leader's because it says what is to be so, a
worker's because it writes an id once. So whatever goes wrong on the way, the call is made again, until `patience` runs
out; the cases in which that would be wrong have errors of their own:

    FencedError     another process leads; nothing was done, and there is no retry
    StaleError      the write comes too late to be recognised as a repetition; nothing was done

A call that is `durable` counts when as many replicas have it as there should be: those of the options, else one if the
server has any. A replica that has gone meanwhile is not waited for; the server is asked again how many it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import structlog

from motorcade.core.errors import StoreError
from motorcade.dispatch.options import DispatchOptions

try:
    from motorcade.redis.resp import Argument, LostError, RedisConnection, ServerAddress, ServerError
    from motorcade.redis.scripts import Script, script_of
    from motorcade.redis.servers import FIRST_PAUSE, LONGEST_PAUSE, PASSING, Purpose, Servers, refusal
    from motorcade.redis.slots import slot_of
    from motorcade.redis.url import RedisOptions, parse_url
except ImportError as missing:  # the first import of a dispatcher
    raise StoreError(f"{missing}; `pip install 'motorcade[redis]'` brings what dispatchers need") from missing

log = structlog.get_logger("motorcade.dispatch")

_script = partial(script_of, "motorcade.dispatch")

ACQUIRE: Final = _script("acquire")
RENEW: Final = _script("renew")
RELEASE: Final = _script("release")
OUTBID: Final = _script("outbid")
RAISE: Final = _script("raise")
GROUP: Final = _script("fence", "group")
CLAIM: Final = _script("fence", "claim")
TRIMMED: Final = _script("fence", "trimmed")
RECEIVE: Final = _script("fence", "receive")
FINISH: Final = _script("fence", "finish")
ASSIGN: Final = _script("fence", "assign")
REASSIGN: Final = _script("fence", "reassign")
SETTLE: Final = _script("fence", "settle")
DEAD_LETTER: Final = _script("fence", "dead_letter")
FORGET_DEAD: Final = _script("fence", "forget_dead")
REGISTRY: Final = _script("fence", "registry")
REGISTER: Final = _script("register")
WRITE: Final = _script("write")
RETRY: Final = _script("retry")

ALL: Final = (
    ACQUIRE, RENEW, RELEASE, OUTBID, RAISE, GROUP, CLAIM, TRIMMED, RECEIVE, FINISH, ASSIGN, REASSIGN, SETTLE,
    DEAD_LETTER, FORGET_DEAD, REGISTRY, REGISTER, WRITE, RETRY,
)  # fmt: skip

#: Milliseconds that one WAIT may take. Less than a connection may be silent.
WAIT_TIME: Final = 500
OLDEST_SERVER: Final = 7
#: Seconds after which a server is asked again whether it has replicas.
ASK_AGAIN: Final = 2.0


class FencedError(StoreError):
    """A newer leader has been elected; this one may not write any more."""


class StaleError(StoreError):
    """A worker's write that came too late."""


class Calls:
    """The way to Redis of one leader or worker."""

    def __init__(self, options: DispatchOptions) -> None:
        default = RedisOptions()
        place = parse_url(options.redis, default)
        if place.options.prefix != default.prefix or place.options.cells is not None:
            raise StoreError("dispatch.redis: `prefix` and `cells` are for stores; set dispatch.prefix instead")
        self.servers = Servers(place.addresses, place.access, place.clustered, place.options.patience, ALL)
        self.unconfirmed = 0  #: calls that too few replicas had confirmed in time
        self._wanted = options.replicas if place.options.replicas is None else place.options.replicas
        self._unchecked = place.options.unchecked
        self._replicas: dict[RedisConnection, tuple[float, int]] = {}  #: when it was asked for, and how many

    async def open(self) -> None:
        """Find the servers, and see whether they can keep what they are given."""
        await self.servers.open()
        for address in self.servers.topology.all_masters():
            told: bytes = await self._ask_server(address)
            facts = dict(line.split(":", 1) for line in told.decode().splitlines() if ":" in line)
            version = facts.get("redis_version", "0")
            if int(version.partition(".")[0]) < OLDEST_SERVER:
                raise StoreError(f"{address} is Redis {version}; {OLDEST_SERVER}.0 or later, or Valkey, is needed")
            if (facts.get("cluster_enabled") == "1") != self.servers.clustered:
                right = "redis" if self.servers.clustered else "redis+cluster"
                raise StoreError(f"{address}: dispatch.redis has to begin with {right}:// for this server")
            if not self._unchecked:
                _warn(address, facts)

    async def _ask_server(self, address: ServerAddress) -> Any:
        """Send INFO to a server that may still be starting."""
        end = asyncio.get_running_loop().time() + self.servers.patience
        while True:
            try:
                connection = await self.servers.connection(address, Purpose.READ)
                return await connection.call("INFO")
            except LostError:
                if asyncio.get_running_loop().time() > end:
                    raise
            except ServerError as error:
                if error.code not in PASSING or asyncio.get_running_loop().time() > end:
                    raise StoreError(f"{address} does not tell about itself: {error}") from None
            await asyncio.sleep(LONGEST_PAUSE / 2)

    async def close(self) -> None:
        await self.servers.close()

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        *arguments: Argument,
        durable: bool = False,
        patience: float | None = None,
        purpose: Purpose = Purpose.WRITE,
    ) -> Any:
        """Carry out a script where its first key is; `StoreError` if that has not worked in time."""
        loop = asyncio.get_running_loop()
        given = self.servers.patience if patience is None else patience
        end = loop.time() + given
        slot = slot_of(keys[0])
        words: tuple[Argument, ...] = (len(keys), *keys, *arguments)
        by_source = False
        pause = FIRST_PAUSE
        while True:
            head = ("EVAL", script.source) if by_source else ("EVALSHA", script.digest)
            by_source = False
            address = self.servers.master(slot)
            try:
                if address is None:
                    raise LostError("no server for the slot")
                connection = await self.servers.connection(address, purpose)
                return await self._once(connection, (*head, *words), durable)
            except LostError as error:
                trouble = str(error)
            except ServerError as error:
                if error.code == "NOSCRIPT":
                    by_source = True
                    continue
                if error.code not in PASSING:
                    raise _meant(error, connection) from None
                trouble = f"{address}: {error}"
            if loop.time() + pause > end:
                raise StoreError(f"not done within {given:g} s: {trouble}")
            await self.servers.refresh()
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    async def ask(self, key: str, *words: Argument) -> Any:
        """Send a command that may be repeated to where a key is."""
        try:
            return await self.servers.ask(slot_of(key), *words)
        except ServerError as error:
            raise refusal(error, self.servers.master(slot_of(key)) or self.servers.seeds[0]) from None

    async def _once(self, connection: RedisConnection, words: tuple[Argument, ...], durable: bool) -> Any:
        replicas = await self._confirmations(connection) if durable else 0
        if not replicas:
            return await connection.call(*words)
        replies = (connection.call(*words), connection.call("WAIT", replicas, WAIT_TIME))
        answer: Any
        count: Any
        answer, count = await asyncio.gather(*replies, return_exceptions=True)
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(count, int) and count >= replicas:
            return answer
        self.unconfirmed += 1
        self._replicas.pop(connection, None)
        raise LostError(f"{connection.address}: {count} of {replicas} replicas have confirmed")

    async def _confirmations(self, connection: RedisConnection) -> int:
        """Return how many replicas have to confirm a write to this server."""
        if self._wanted >= 0:
            return self._wanted
        now = asyncio.get_running_loop().time()
        asked, count = self._replicas.get(connection, (-ASK_AGAIN, 0))
        if now - asked >= ASK_AGAIN:
            try:
                told: bytes = await connection.call("INFO", "replication")
            except ServerError:  # a user that may only write here is not allowed to ask
                told = b""
            count = int(b"state=online" in told)
            for gone in [other for other in self._replicas if not other.is_open]:
                del self._replicas[gone]
            self._replicas[connection] = (now, count)
        return count


def _warn(address: ServerAddress, facts: dict[str, str]) -> None:
    """Say what such a server may lose."""
    if facts.get("aof_enabled") != "1":
        log.warning(
            "dispatch_redis_forgets",
            server=str(address),
            effect="a crash loses messages",
            remedy="set `appendonly yes`",
        )
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        remedy = "set `maxmemory-policy noeviction`"
        log.warning("dispatch_redis_evicts", server=str(address), policy=policy, remedy=remedy)


def _meant(error: ServerError, connection: RedisConnection) -> StoreError:
    match error.code:
        case "FENCED":
            return FencedError(f"another process leads: {error}")
        case "STALE":
            return StaleError(str(error))
        case _:
            return refusal(error, connection.address)
