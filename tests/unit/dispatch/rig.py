"""Leaders and workers in the test's own event loop, whose clock stands until it is turned (`standing_clock`).

    async with leading(options, worker) as leader       a real leader; the workers it is told of
    async with working(options, handler) as worker      a real worker
    async with peer(answer) as worker                   a worker that the test plays, by the bytes of the description
    async with front(worker.name) as leader             a leader that the test plays

Redis is a real server. What a test tells it by `redis` has reached every client that waits for it.
"""

from __future__ import annotations

import asyncio
import struct
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from motorcade.dispatch.calls import Calls
from motorcade.dispatch.election import Election
from motorcade.dispatch.frames import AnswerReader, ack_frames, process_frames
from motorcade.dispatch.handlers import Handler
from motorcade.dispatch.leader import Leader
from motorcade.dispatch.options import DispatchOptions
from motorcade.dispatch.worker import Worker
from tests.support.redis import RedisServer
from tests.support.standing_clock import until

PUBLISHED, PENDING, DEAD, PROCESSED = "messages:published", "messages:pending", "messages:dead", "messages:processed"
DELIVERIES, DEAD_IDS = "{messages:pending}:deliveries", "{messages:dead}:ids"
LOCK, WORKERS = "distributed_leader_lock", "consumer:ids"

IDS = [str(uuid.UUID(int=number, version=4)).encode() for number in range(3000)]  # the same in every process

Answer = Callable[[list[bytes]], bytes]
acknowledge = ack_frames


# -- Redis


def redis(server: RedisServer, *words: object) -> Any:
    """A command, and one more: by then every client that waited for the first has its answer."""
    answer = server.command(*words)
    server.command("PING")
    return answer


def publish(server: RedisServer, *messages: bytes) -> None:
    for message in messages:
        server.command("XADD", PUBLISHED, "*", "payload", message)
    server.command("PING")


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


def is_empty(server: RedisServer) -> bool:
    """Nothing is left of what was published."""
    return (
        server.command("XLEN", PUBLISHED) == 0
        and server.command("ZCARD", PENDING) == 0
        and server.command("EXISTS", DELIVERIES, DEAD_IDS) == 0
        and all(group["pending"] == 0 for group in server.client.xinfo_groups(PUBLISHED))
    )


def results(server: RedisServer, key: str = PROCESSED) -> dict[bytes, bytes]:
    """What workers have written, by id; each id once."""
    rows: Any = server.client.xrange(key)
    found = {fields[b"id"]: fields[b"payload"] for _, fields in rows}
    assert len(rows) == len(found)
    return found


# -- real leaders and workers


@asynccontextmanager
async def running(run: Callable[[asyncio.Event], Awaitable[object]]) -> AsyncIterator[asyncio.Event]:
    """A leader or a worker, until the end of the block; it must end when it is told to."""
    stop = asyncio.Event()
    task = asyncio.ensure_future(run(stop))
    try:
        yield stop
    finally:
        stop.set()
        await until(task.done, "it ends")
        await task


@asynccontextmanager
async def leading(options: DispatchOptions, *workers: Peer) -> AsyncIterator[Leader]:
    """A leader whose inside can be looked at."""
    options = msgspec.structs.replace(options, workers=tuple(worker.name for worker in workers))
    async with AsyncExitStack() as stack:
        calls = Calls(options)
        await calls.open()
        stack.push_async_callback(calls.close)
        election = Election(calls, options)
        term = await election.campaign(asyncio.Event())
        assert term is not None
        leader = Leader(calls, election, term, options)
        async with running(leader.lead):
            yield leader
        await election.release()


@asynccontextmanager
async def working(options: DispatchOptions, handler: Handler | None = None) -> AsyncIterator[Worker]:
    """A worker whose inside can be looked at; `worker.stop` ends it."""
    calls = Calls(options)
    await calls.open()
    worker = Worker(calls, options, handler)
    ready: list[str] = []
    try:
        async with running(lambda stop: worker.run(stop, ready.append)):
            await until(lambda: ready, "it is ready")
            yield worker
    finally:
        await calls.close()


# -- a worker that the test plays

#: version 1 | command | length, big-endian | payload; of PROCESS_MESSAGE: UUID ':' message
HEAD = struct.Struct(">BBI")
PROCESS, ID_LENGTH = 0, 36


class Peer:
    """A worker that only listens, until it is told what to say."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.name = ""
        self.messages: list[tuple[bytes, bytes]] = []  #: id and message, of all connections
        self.connections = 0
        self.writer: asyncio.StreamWriter | None = None  #: of the last connection
        self.answer: Answer = answer or (lambda _ids: b"")  #: what is said to messages
        self.reads = True  #: otherwise it accepts connections, and that is all

    @property
    def ids(self) -> list[bytes]:
        return [id_ for id_, _ in self.messages]

    @property
    def texts(self) -> list[bytes]:
        return [text for _, text in self.messages]

    def say(self, data: bytes) -> None:
        assert self.writer is not None
        self.writer.write(data)

    def hang_up(self) -> None:
        assert self.writer is not None
        self.writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.connections += 1
        buffer = bytearray()
        try:
            while self.reads and (data := await reader.read(1 << 16)):
                buffer += data
                if found := self._take(buffer):
                    self.messages += found
                    writer.write(self.answer([id_ for id_, _ in found]))
            if self.reads:
                writer.close()
        except ConnectionError:
            writer.close()

    @staticmethod
    def _take(buffer: bytearray) -> list[tuple[bytes, bytes]]:
        found = []
        while len(buffer) >= HEAD.size:
            version, command, length = HEAD.unpack_from(buffer)
            if len(buffer) < HEAD.size + length:
                break
            payload = bytes(buffer[HEAD.size : HEAD.size + length])
            del buffer[: HEAD.size + length]
            if (version, command) == (1, PROCESS):  # a handshake is answered by silence
                assert payload[ID_LENGTH : ID_LENGTH + 1] == b":"
                found.append((payload[:ID_LENGTH], payload[ID_LENGTH + 1 :]))
        return found


@asynccontextmanager
async def peer(answer: Answer | None = None) -> AsyncIterator[Peer]:
    one = Peer(answer)
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.name = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield one
    finally:
        server.close()
        if one.writer is not None:
            one.writer.close()


# -- a leader that the test plays


class Front:
    """A leader's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.acknowledged: list[bytes] = []
        self.rejected: list[tuple[bytes, str]] = []
        self.returned: list[bytes] = []
        self.closed = False

    @property
    def answers(self) -> int:
        return len(self.acknowledged) + len(self.rejected) + len(self.returned)

    def send(self, ids: list[bytes], *messages: bytes) -> None:
        self.writer.write(process_frames(ids, list(messages) or [b"{}"] * len(ids)))

    async def listen(self) -> None:
        frames = AnswerReader()
        try:
            while data := await self.reader.read(1 << 16):
                answers = frames.feed(data)
                self.acknowledged += answers.acknowledged
                self.rejected += answers.rejected
                self.returned += answers.returned
        except ConnectionError:
            pass
        self.closed = True


@asynccontextmanager
async def front(name: str) -> AsyncIterator[Front]:
    one = Front(*await asyncio.open_connection("127.0.0.1", int(name.rpartition(":")[2])))
    task = asyncio.create_task(one.listen())
    try:
        yield one
    finally:
        task.cancel()
        one.writer.close()
