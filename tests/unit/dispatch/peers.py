"""Leaders and workers of these tests that speak the bytes themselves, in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from motorcade.dispatch.frames import ack_frames
from tests.support.frames import PROCESS, split

PATIENCE = 60.0  # seconds: machines that run tests are busy


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait until something holds."""
    end = asyncio.get_running_loop().time() + PATIENCE
    while not condition():
        assert asyncio.get_running_loop().time() < end, f"not within {PATIENCE:g} s: {what}"
        await asyncio.sleep(0.005)


class Peer:
    """A worker that only listens, until it is told what to say."""

    def __init__(self) -> None:
        self.name = ""
        self.messages: list[tuple[bytes, bytes]] = []  #: id and message, of all connections
        self.connections = 0
        self.writer: asyncio.StreamWriter | None = None  #: of the last connection
        self.answer: Callable[[list[bytes]], bytes] = lambda _ids: b""  #: what is said to messages

    @property
    def ids(self) -> list[bytes]:
        return [id_ for id_, _ in self.messages]

    @property
    def texts(self) -> list[bytes]:
        return [text for _, text in self.messages]

    def say(self, data: bytes) -> None:
        assert self.writer is not None
        self.writer.write(data)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.connections += 1
        buffer = bytearray()
        try:
            while data := await reader.read(1 << 16):
                buffer += data
                found = [payload for command, payload in split(buffer) if command == PROCESS]
                self.messages += [(payload[:36], payload[37:]) for payload in found]
                if found and (said := self.answer([payload[:36] for payload in found])):
                    writer.write(said)
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def peer(answer: Callable[[list[bytes]], bytes] | None = None) -> AsyncIterator[Peer]:
    one = Peer()
    if answer is not None:
        one.answer = answer
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.name = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield one
    finally:
        server.close()
        if one.writer is not None:
            one.writer.close()


@asynccontextmanager
async def running(run: Callable[[asyncio.Event], Awaitable[None]]) -> AsyncIterator[asyncio.Event]:
    """A leader or a worker, until the end of the block; it must end when it is told to."""
    stop = asyncio.Event()
    task = asyncio.ensure_future(run(stop))
    try:
        yield stop
    finally:
        stop.set()
        async with asyncio.timeout(PATIENCE):
            await task


acknowledge = ack_frames
