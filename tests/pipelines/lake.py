"""Streams to read from: a store that is written in a loop of its own, beside a reader that has none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Self, TypeVar

from motorcade.core import record
from motorcade.core.message import Message
from motorcade.storage import open_store
from motorcade.storage.ports import Durability, Store

T = TypeVar("T")

NOW = 1_790_000_000.0


def message(number: int, **more: object) -> Message:
    """The message with this number, always the same."""
    return Message(
        topic=f"v/{number % 7}/t",
        payload=b'{"n": %d}' % number,
        qos=number % 3,
        publisher=f"car-{number % 5}",
        timestamp=NOW + number,
        guid=number.to_bytes(16, "big"),
        **more,  # type: ignore[arg-type]
    )


class Lake:
    """A store, open for writing: what a node would do."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._runner = asyncio.Runner()
        self._store: Store = self._runner.run(open_store(url, Durability.FAST))

    def do(self, act: Callable[[Store], Awaitable[T]]) -> T:
        async def doing() -> T:
            return await act(self._store)

        return self._runner.run(doing())

    def append(self, stream: str, values: Sequence[bytes], now: float = NOW) -> list[int]:
        return self.do(lambda store: store.streams.append(stream, values, now))

    def fill(self, stream: str, count: int, first: int = 1, now: float = NOW) -> None:
        """Messages with numbers from `first` on, which are their offsets if the stream was empty."""
        for start in range(first, first + count, 1000):
            some = range(start, min(start + 1000, first + count))
            self.append(stream, [record.encode(message(number)) for number in some], now)

    def trim(self, stream: str, records: int) -> None:
        """Keep so many."""
        while self.do(lambda store: store.streams.trim(stream, records=records)).cursor is not None:
            pass

    def close(self) -> None:
        self._runner.run(self._store.close())
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
