"""Read a leader's messages: from a stream with a consumer group. A channel is put into a stream first.

    stream     MULTI, XREADGROUP, EXEC; WATCH and GET of the fence arm the next one   ─▶ messages, within the credit
    channel    SUBSCRIBE ─▶ receive.lua ─▶ stream `received` ─▶ as above

All leaders are the same consumer of the group; the fence sees to it that there is one at a time. A read moves entries
into the group's list of what was read and not acknowledged, so it is a write: a transaction that comes to nothing when
the fence has changed since it was last looked at. (A script could do the same, but handing the entries through Lua
costs the server twice as much as reading them.)

Rule 1: what was read and not acknowledged is claimed first by a new leader, and again whenever a reply was lost, and
        now and then anyway. The caller of `claim` knows which of it is already in flight.
Rule 2: nothing is read that no worker has credit for. Between two reads there is nothing here but a size.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Final, NamedTuple

import structlog

from motorcade.core.errors import StoreError
from motorcade.dispatch.calls import CLAIM, GROUP, RECEIVE, TRIMMED, Calls, FencedError
from motorcade.dispatch.ids import ORIGINS, Namer, message_of_channel
from motorcade.dispatch.options import DispatchOptions
from motorcade.redis.resp import LostError, RedisConnection, ServerError, connect
from motorcade.redis.servers import PASSING, Purpose, refusal
from motorcade.redis.slots import slot_of

log = structlog.get_logger("motorcade.dispatch")

CONSUMER: Final = "leader"
#: Milliseconds that one look for new entries may take. Less than a connection may be silent.
BLOCK: Final = 500
#: Entries of the first read, before anything is known about their sizes.
FIRST_COUNT: Final = 16
#: Messages of the channel that are put into the stream at once.
RECEIVED_AT_ONCE: Final = 500
RECEIVED_BYTES: Final = 1 << 20
#: Seconds between attempts to subscribe, and between signs of life.
SUBSCRIBE_PAUSE: Final = 0.1
PING_INTERVAL: Final = 0.5


class ReadBatch(NamedTuple):
    """Messages that were read together."""

    ids: list[bytes]
    entries: list[bytes]
    messages: list[bytes]


EMPTY: Final = ReadBatch([], [], [])


class Intake:
    """The stream that messages are read from."""

    def __init__(self, calls: Calls, options: DispatchOptions, fence: str) -> None:
        self.key = options.key(options.source)
        self._calls = calls
        self._options = options
        self._fence_key = options.beside(options.source, "fence")
        self._fence = fence
        self._slot = slot_of(self.key)
        self._namer = Namer(0)
        self._armed: RedisConnection | None = None  #: connection on which the fence is watched
        self._size = 0.0  #: bytes of a message, as the last ones had
        self._last = b"0-0"  #: entry that was read last
        self._woken = b""  #: what that was when `wait` has found something after it
        self.unread = 0  #: entries that were trimmed unread, since counting began
        self.unfinished = 0  #: entries that were read, not finished, and trimmed before they could be read again
        self._tally = options.beside(options.source, "trimmed")
        self._read = -1  #: entries read since they were counted last; -1: unknown
        self._told = (0, 0)  #: `unread` and `unfinished` as they were told last

    async def open(self) -> None:
        """Create the consumer group if there is none."""
        origin = await self._calls.run(
            GROUP,
            [self.key, self._fence_key, self._options.beside(self._options.source, "origin"), self._tally],
            self._fence,
            self._options.group,
            secrets.randbelow(ORIGINS),
            durable=True,
        )
        self._namer = Namer(int(origin) % ORIGINS)
        counted = await self._calls.ask(self._tally, "HMGET", self._tally, "unread", "unfinished")
        self.unread, self.unfinished = self._told = (int(counted[0] or 0), int(counted[1] or 0))
        self._read = -1
        await self.look_where()

    @property
    def most(self) -> int:
        """Return how many entries one read may ask for."""
        if not self._size:
            return FIRST_COUNT
        return max(1, min(self._options.batch, int(self._options.batch_bytes / self._size)))

    async def read(self, count: int) -> ReadBatch:
        """Read up to `count` new messages. After a `LostError` some may have been read: claim them."""
        connection = await self._ready()
        self._armed = None
        read, self._read = self._read, -1  # until the reply is here
        replies = (
            connection.call("MULTI"),
            connection.call(
                "XREADGROUP", "GROUP", self._options.group, CONSUMER, "COUNT", count, "STREAMS", self.key, ">"
            ),
            connection.call("EXEC"),
            connection.call("WATCH", self._fence_key),
            connection.call("GET", self._fence_key),
        )
        done: Any
        fence: Any
        _, _, done, _, fence = await asyncio.gather(*replies, return_exceptions=True)
        if isinstance(done, ServerError):
            raise await self._trouble(done, connection)
        if isinstance(done, BaseException):
            raise done
        if isinstance(fence, bytes) and fence.decode() == self._fence:
            self._armed = connection
        if done is None:
            raise FencedError(f"{self.key}: the fence has changed")
        found = done[0]
        if isinstance(found, ServerError):
            raise await self._trouble(found, connection)
        rows = found[0][1] if found else []
        if read >= 0:
            self._read = read + len(rows)
        if not rows:
            return EMPTY
        self._last = rows[-1][0]
        return self._batch(rows)

    async def wait(self) -> None:
        """Return when there may be something new, or after a while."""
        if self._woken == self._last:
            # Nothing was read after the last wait, which had found something: another client has moved the group on.
            await self.look_where()
        connection = await self._connection()
        try:
            found = await connection.call("XREAD", "COUNT", 1, "BLOCK", BLOCK, "STREAMS", self.key, self._last)
        except ServerError as error:
            raise await self._trouble(error, connection) from None
        self._woken = self._last if found else b""

    async def look_where(self) -> None:
        """Find out where the group has got to, so that `wait` waits for what comes after."""
        for group in await self._calls.ask(self.key, "XINFO", "GROUPS", self.key):
            facts = dict(zip(group[::2], group[1::2], strict=True))
            if facts[b"name"] == self._options.group.encode():
                self._last = facts[b"last-delivered-id"]

    async def count_trimmed(self) -> None:
        """Count what was trimmed before it was read or finished. Must not run beside `read`."""
        since, self._read = self._read, -1
        self.unread, self.unfinished = counted = tuple(
            await self._calls.run(
                TRIMMED,
                [self.key, self._fence_key, self._tally],
                self._fence,
                self._options.group,
                since,
                self.unfinished,
            )
        )
        self._read = 0
        if counted != self._told:
            log.error(
                "dispatch_intake_trimmed",
                stream=self.key,
                lost=sum(counted) - sum(self._told),
                unread=self.unread,
                unfinished=self.unfinished,
                remedy="let the stream keep more (XADD … MAXLEN), or run more workers",
            )
            self._told = counted

    def gone(self, entries: list[bytes]) -> list[bytes]:
        """Return the ids of entries that are no longer in the stream."""
        return self._namer.taken_apart((entry, (b"", b"")) for entry in entries)[0]

    async def claim(self, after: bytes, idle: float, count: int) -> tuple[bytes, ReadBatch, list[bytes]]:
        """Claim what was read `idle` seconds ago and never acknowledged.

        Return the cursor to go on from (0-0: at the end), what was found, and the ids that are no longer in the stream.
        """
        after, rows, *gone = await self._calls.run(
            CLAIM,
            [self.key, self._fence_key],
            self._fence,
            self._options.group,
            CONSUMER,
            int(idle * 1000),
            after,
            count,
        )
        return after, self._batch(rows), self.gone(gone[0]) if gone and gone[0] else []

    def _batch(self, rows: list[Any]) -> ReadBatch:
        batch = ReadBatch(*self._namer.taken_apart(rows))
        if batch.entries:
            size = sum(map(len, batch.messages)) / len(batch.messages) + 100.0
            # Quick to see that messages have grown, slow to believe that they have shrunk.
            self._size = size if size > self._size else 0.9 * self._size + 0.1 * size
        return batch

    async def _connection(self) -> RedisConnection:
        address = self._calls.servers.master(self._slot)
        if address is None:
            await self._calls.servers.refresh()
            raise LostError("no server for the slot")
        return await self._calls.servers.connection(address, Purpose.BLOCK)

    async def _ready(self) -> RedisConnection:
        """Return a connection on which a change of the fence makes the next transaction fail."""
        connection = await self._connection()
        if self._armed is connection:
            return connection
        try:
            # An earlier term may have watched its own fence here, and have seen it fall.
            _, _, fence = await asyncio.gather(
                connection.call("UNWATCH"),
                connection.call("WATCH", self._fence_key),
                connection.call("GET", self._fence_key),
            )
        except ServerError as error:
            raise await self._trouble(error, connection) from None
        if fence is None or fence.decode() != self._fence:
            raise FencedError(f"{self.key} is fenced for {fence!r}")
        return connection

    async def _trouble(self, error: ServerError, connection: RedisConnection) -> StoreError:
        """Translate an error of the server."""
        if error.code == "NOGROUP":
            # The stream was deleted. The new group has other ids, and nothing has to be claimed.
            log.warning("dispatch_group_missing", stream=self.key, group=self._options.group)
            await self.open()
            return LostError(str(error))
        if error.code in PASSING or error.code == "EXECABORT":
            await self._calls.servers.refresh()
            return LostError(f"{connection.address}: {error}")
        return refusal(error, connection.address)


class ChannelIntake:
    """Copies a channel to the stream `received`."""

    def __init__(self, calls: Calls, options: DispatchOptions, fence: str) -> None:
        self.name = options.key("published")
        self.dropped = 0  #: messages that found no room
        self.received = 0
        self.gaps = 0  #: times that the subscription was lost; what was published then is gone
        self._calls = calls
        self._options = options
        self._keys = [options.key("received"), *(options.beside("received", what) for what in ("fence", "call"))]
        self._fence = fence
        self._waiting: list[bytes] = []
        self._storing = 0
        self._calls_made = 0
        self._work = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(), name="dispatch-channel")
            tasks.create_task(self._store(), name="dispatch-channel-store")

    async def _listen(self) -> None:
        servers = self._calls.servers
        while True:
            try:
                address = servers.master(slot_of(self.name))
                if address is None:
                    raise LostError("no server for the slot")
                connection = await connect(address, servers.access, self._push)
                try:
                    connection.send("SUBSCRIBE", self.name)
                    while connection.is_open and connection.silence < servers.access.reply_timeout:
                        connection.send("PING")
                        await asyncio.wait([connection.closed], timeout=PING_INTERVAL)
                finally:
                    connection.close()
            except StoreError as error:
                log.warning("dispatch_channel_lost", channel=self.name, error=str(error))
            self.gaps += 1
            await servers.refresh()
            await asyncio.sleep(SUBSCRIBE_PAUSE)

    def _push(self, reply: Any) -> None:
        if not isinstance(reply, list) or reply[0] != b"message":
            return
        if len(self._waiting) + self._storing >= self._options.max_receiving:
            self.dropped += 1
            return
        self._waiting.append(message_of_channel(reply[2]))
        self._work.set()

    async def _store(self) -> None:
        while True:
            await self._work.wait()
            some = self._some()
            if not some:
                self._work.clear()
                continue
            del self._waiting[: len(some)]
            self._storing = len(some)
            self._calls_made += 1
            taken = await self._stored(some)
            self._storing = 0
            self.received += taken
            self.dropped += len(some) - taken

    async def _stored(self, some: list[bytes]) -> int:
        """Retry with the same number and the same messages until the outcome is known."""
        while True:
            try:
                taken: int = await self._calls.run(
                    RECEIVE,
                    self._keys,
                    self._fence,
                    self._calls_made,
                    self._options.max_received,
                    *some,
                    durable=True,
                )
                return taken
            except FencedError:
                raise
            except StoreError as error:
                log.warning("dispatch_channel_not_stored", error=str(error), messages=len(some))
                await asyncio.sleep(SUBSCRIBE_PAUSE)

    def _some(self) -> list[bytes]:
        size = 0
        for count, message in enumerate(self._waiting[:RECEIVED_AT_ONCE], 1):
            size += len(message)
            if size > RECEIVED_BYTES:
                return self._waiting[:count]
        return self._waiting[:RECEIVED_AT_ONCE]
