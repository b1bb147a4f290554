"""Rows of a frame into a stream of Redis, each exactly once, however often tasks and drivers are started again.

    task      stages its rows beside the stream, in parts, under a name of its own; its message is that name
    driver    when all tasks are done: decides which names make up the batch, moves part after part, notes the batch

    {KEY}:spark:RUN             hash    batch: landed last; landing, staged: decided on, not all of it moved yet
    {KEY}:spark:RUN:TASK        hash    number -> rows, as MessagePack; expires unless it is decided on

A part is moved by one script, which adds its rows and forgets the part. So whoever goes on after a crash finds what is
left; and a batch that Spark runs again, perhaps with its rows in another order, is the batch that was decided on first.

Rule 1: everything sent to the server may be sent twice: a part is written under its number, moved once, noted once.
Rule 2: all keys are in the slot of the stream, or no script could see them together.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa

from motorcade.pipelines import PipelineError
from motorcade.pipelines.sources.options import OptionError
from motorcade.pipelines.sources.shelf import shelf
from motorcade.redis.scripts import script_of
from motorcade.redis.slots import slot_of
from motorcade.storage.redis_format import raw
from motorcade.storage.redis_reader import Asking

#: Rows of one part: 0.6 ms of the server's processor time for payloads of 90 octets.
PART_ROWS: Final = 250

#: Seconds that rows wait for their batch; those of tasks that were run in vain are gone then.
STAGED_FOR: Final = 24 * 3600

LAND: Final = script_of("motorcade.pipelines.sources", "land")

#: A column of this name and type holds all fields of an entry; else each column is a field.
FIELDS: Final = "fields"

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task has written, for the driver."""

    key: str
    rows: int
    parts: int


def beside(key: str, *rest: str) -> str:
    """A key in the slot of another."""
    tagged = key if slot_of(f"{key}:") == slot_of(key) else f"{{{key}}}"
    found = ":".join((tagged, "spark", *rest))
    if slot_of(found) != slot_of(key):
        raise OptionError(f"option redis_stream: {key!r} has braces that leave no room for keys beside it")
    return found


class Appends:
    """One frame, or one query, on its way into one stream."""

    def __init__(self, store: str, key: str, run: str) -> None:
        self._store = store
        self._key = key
        self._run = run
        beside(key)

    # -- in a task

    def stage(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        asking = self._asking()
        self._check_kind(asking)
        name = beside(self._key, self._run, uuid.uuid4().hex)
        rows = parts = 0
        waiting: list[list[msgspec.Raw]] = []
        for batch in batches:
            waiting += [[raw(word) for word in words] for words in entries_of(batch)]
            while len(waiting) >= PART_ROWS:
                self._put(asking, name, parts, waiting[:PART_ROWS])
                rows, parts = rows + PART_ROWS, parts + 1
                del waiting[:PART_ROWS]
        if waiting:
            self._put(asking, name, parts, waiting)
            rows, parts = rows + len(waiting), parts + 1
        return Staged(name, rows, parts)

    def _check_kind(self, asking: Asking) -> None:
        """What is staged for a key of another kind could never land."""
        kind = str(asking.wait(asking.ask(slot_of(self._key), "TYPE", self._key)), "ascii")
        if kind not in {"none", "stream"}:
            raise PipelineError(
                f"the key {self._key!r} is a {kind}, not a stream; name another one with the option redis_stream"
            )

    def _put(self, asking: Asking, name: str, number: int, rows: list[list[msgspec.Raw]]) -> None:
        asking.wait(asking.ask(slot_of(name), "HSET", name, number, _encode(rows)))
        if not number:
            asking.wait(asking.ask(slot_of(name), "EXPIRE", name, STAGED_FOR))

    # -- on the driver

    def land(self, staged: Sequence[Staged], batch: int) -> int:
        """Move a batch into the stream; how many rows went in now."""
        asking = self._asking()
        ledger = beside(self._key, self._run)
        slot = slot_of(ledger)
        wanted = " ".join(f"{one.key.rpartition(':')[2]}={one.parts}" for one in staged if one.parts)
        for one in staged:  # before they are decided on: from then on they must not expire
            asking.wait(asking.ask(slot, "PERSIST", one.key))
        decided = asking.wait(asking.evaluate(slot, LAND, [ledger], "begin", batch, wanted))
        if decided == b"past":
            raise PipelineError(
                f"the query {self._run!r} has written later batches than {batch} into {self._key!r}: it was begun with "
                "a new checkpoint; give it a new name with the option `query`, too"
            )
        moved = 0
        if decided != b"done":
            for task, _, parts in (word.partition("=") for word in decided.decode().split()):
                name = beside(self._key, self._run, task)
                for number in range(int(parts)):
                    moved += asking.wait(asking.evaluate(slot, LAND, [self._key, name], "move", number))
            asking.wait(asking.evaluate(slot, LAND, [ledger], "end", batch))
        self.forget(staged)
        return moved

    def forget(self, staged: Sequence[Staged]) -> None:
        """What these tasks have staged is not wanted, or was moved."""
        asking = self._asking()
        for one in staged:
            asking.wait(asking.ask(slot_of(one.key), "DEL", one.key))

    def forget_run(self) -> None:
        """A run that nobody will go on with."""
        asking = self._asking()
        ledger = beside(self._key, self._run)
        asking.wait(asking.ask(slot_of(ledger), "DEL", ledger))

    def _asking(self) -> Asking:
        return shelf.take(self._store, Asking)


def entries_of(batch: pa.RecordBatch) -> list[list[bytes]]:
    """Names and values of each row's entry, one after the other; what is null is left out."""
    names = batch.schema.names
    if names == [FIELDS]:
        pairs = batch.column(0).to_pylist()
    else:
        columns = [column.to_pylist() for column in batch.columns]
        pairs = [list(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    found = [
        [word for name, value in row or () if value is not None for word in (octets(name), octets(value))]
        for row in pairs
    ]
    if not all(found):
        raise PipelineError("a row without any value cannot be an entry of a Redis stream")
    return found


def octets(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return str(value).encode()
