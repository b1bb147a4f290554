"""A relay between a store and a server that can lose commands and answers: the store does not know which it was."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Relay:
    """Listens on `port`; cuts the connection instead of passing on the next answer to a script, or the next script.

    While it `holds`, commands stay with it, as in the buffers of a process or a network that stands still.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.lost = 0
        self._lose = 0
        self._stop = 0
        self._then_hold = False
        self._flowing = asyncio.Event()
        self._flowing.set()

    def lose_next(self, count: int = 1, *, then_hold: bool = False) -> None:
        self._lose = count
        self._then_hold = then_hold

    def hold(self) -> None:
        self._flowing.clear()

    def release(self) -> None:
        self._flowing.set()

    def stop_next(self, count: int = 1) -> None:
        """The server never gets it."""
        self._stop = count

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        back, forth = await asyncio.open_connection(*self._target)
        armed = asyncio.Event()

        async def commands() -> None:
            while data := await reader.read(1 << 16):
                if self._stop and b"EVALSHA" in data:
                    self._stop -= 1
                    self.lost += 1
                    return
                if self._lose and b"EVALSHA" in data:
                    armed.set()
                await self._flowing.wait()
                forth.write(data)

        async def answers() -> None:
            while data := await back.read(1 << 16):
                if armed.is_set():
                    self._lose -= 1
                    self.lost += 1
                    if self._then_hold:
                        self.hold()
                    return
                writer.write(data)

        both = [asyncio.create_task(commands()), asyncio.create_task(answers())]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in both:
                each.cancel()
            writer.close()
            forth.close()
            self._tasks.discard(task)
