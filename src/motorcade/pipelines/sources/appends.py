"""Rows of a frame into a stream of Redis, each exactly once, however often tasks and drivers are started again.

    task      stages its rows beside the stream, in parts, under a name of its own; its message is that name
    driver    when all tasks are done: has the ledger decide which names make up the batch, has the server move part
              after part, and has the ledger note the batch when as many rows have landed as were staged

    {KEY}:spark:RUN             hash    the ledger
                                          batch, rows       landed last
                                          checkpoint        of the query; another one is refused
                                          landing, staged, expected, decision    what was decided on, not all moved yet
                                          landed, moved:TASK    rows that are in the stream, parts of a task
    {KEY}:spark:RUN:TASK        hash    number -> rows, as MessagePack; expires STAGED_FOR after its last use

A part is moved by one script, which adds its rows, forgets the part and notes that in the ledger. So a driver that
goes on after a crash knows what has landed; and a batch that Spark runs again, perhaps with its rows in another order,
is the batch that was decided on first, if a row of it has landed.

Rule 1: everything sent to the server may be sent twice: a part is written under its number, moved once, noted once.
Rule 2: all keys are in the slot of the stream, or no script could see them together.
Rule 3: a part that is not there is not taken for one that was moved: only the ledger says what was. Rows that vanish
        (expired, evicted, lost in a fail-over) fail the write; if none of the batch has landed, it is written again.
Rule 4: what was decided on is not removed before it has landed, even when Spark aborts the write.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa

from motorcade.pipelines import PipelineError
from motorcade.pipelines.sources.options import OptionError
from motorcade.pipelines.sources.store_cache import store_cache
from motorcade.redis.resp import Argument
from motorcade.redis.scripts import script_of
from motorcade.redis.slots import slot_of
from motorcade.storage.redis_format import raw
from motorcade.storage.redis_reader import Asking

#: Rows of one part: 0.6 ms of the server's processor time for payloads of 90 bytes.
PART_ROWS: Final = 250

#: Parts on their way at once: the server is never idle, and other clients wait for it at most 5 ms.
WINDOW: Final = 8

#: Seconds that rows wait for their batch after their last use; those of tasks whose work was not needed are gone then.
STAGED_FOR: Final = 24 * 3600

#: Seconds that a frame written under a `batch_id` is remembered.
REMEMBERED: Final = 30 * 24 * 3600

LAND: Final = script_of("motorcade.pipelines.sources", "land")

#: A column of this name and type holds all fields of an entry; else each column is a field.
FIELDS: Final = "fields"

#: Times that a batch is gone over, for servers that fail over meanwhile.
MAX_ROUNDS: Final = 5

OVERRULED: Final = -1  #: an answer of `land`: another decision holds
NOT_YET: Final = -2  #: likewise: parts before it were not moved yet

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Staged:
    """A task's report to the driver of what it has staged."""

    key: str
    rows: int
    parts: int
    checkpoint: str = ""  #: id of the query, which Spark keeps in its checkpoint; empty: a frame

    @property
    def task(self) -> str:
        return self.key.rpartition(":")[2]


@dataclass(frozen=True, slots=True)
class Decision:
    """The parts of a batch."""

    batch: int
    tasks: Sequence[tuple[str, int]]  #: name and parts
    rows: int
    token: str


def beside(key: str, *rest: str) -> str:
    """Return a key in the slot of another."""
    tagged = key if slot_of(f"{key}:") == slot_of(key) else f"{{{key}}}"
    found = ":".join((tagged, "spark", *rest))
    if slot_of(found) != slot_of(key):
        raise OptionError(f"option redis_stream: {key!r} has braces that leave no room for keys beside it")
    return found


class RedisStreamWriter:
    """One frame, or one query, on its way into one stream."""

    def __init__(self, store: str, key: str, run: str, lasts: int = 0) -> None:
        """Take `lasts`, the seconds that the ledger is kept; 0: no limit."""
        self._store = store
        self._key = key
        self._run = run
        self._lasts = lasts
        beside(key)

    # -- in a task

    def stage(self, batches: Iterator[pa.RecordBatch], checkpoint: str = "") -> Staged:
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
        return Staged(name, rows, parts, checkpoint)

    def _check_kind(self, asking: Asking) -> None:
        """Refuse a key of another kind: what is staged for it could never be moved."""
        kind = str(asking.wait(asking.ask(slot_of(self._key), "TYPE", self._key)), "ascii")
        if kind not in {"none", "stream"}:
            raise PipelineError(
                f"the key {self._key!r} is a {kind}, not a stream; name another one with the option redis_stream"
            )

    def _put(self, asking: Asking, name: str, number: int, rows: list[list[msgspec.Raw]]) -> None:
        slot = slot_of(name)
        written = asking.begin(asking.ask(slot, "HSET", name, number, _encode(rows)))
        asking.wait(asking.ask(slot, "EXPIRE", name, STAGED_FOR))
        asking.wait(written)

    # -- on the driver

    def land(self, staged: Sequence[Staged], batch: int) -> int:
        """Move a batch into the stream; how many rows went in now. `PipelineError` if not all of it can land."""
        asking = self._asking()
        decided = self._decide(asking, staged, batch)
        moved = 0
        if decided is not None:
            for _ in range(MAX_ROUNDS):
                moved += self._move_all(asking, decided)
                answer, *counts = self._ledger(asking, "end", batch, decided.token, self._lasts)
                if answer != b"short":
                    break
                # A server that knows of less than what was confirmed: a replica that was behind has taken over.
            if answer == b"other":
                self._check_answer(asking, decided, OVERRULED)
            if answer != b"done":
                raise PipelineError(self._half(batch, *counts))
        self.forget(staged)
        return moved

    def _decide(self, asking: Asking, staged: Sequence[Staged], batch: int) -> Decision | None:
        """Decide what is to be moved; None: the batch is in the stream already."""
        rows = sum(one.rows for one in staged)
        checkpoint = next((one.checkpoint for one in staged if one.checkpoint), "")
        wanted = " ".join(f"{one.task}={one.parts}" for one in staged if one.parts)
        token = uuid.uuid4().hex
        answer, *more = self._ledger(asking, "begin", batch, wanted, rows, token, checkpoint, self._lasts)
        match answer:
            case b"go":
                tasks = [
                    (task, int(parts)) for task, _, parts in (one.partition("=") for one in more[0].decode().split())
                ]
                return Decision(batch, tasks, int(more[1]), more[2].decode())
            case b"done":
                # A query reads what its checkpoint says; a frame that is written again is known by its size alone.
                if not checkpoint and more[0] not in {rows, -1}:
                    raise PipelineError(
                        f"{self._run!r} was written into {self._key!r} with {more[0]} rows, and this frame has {rows}: "
                        "it is another one; give it another batch_id"
                    )
                return None
            case b"past":
                raise PipelineError(
                    f"the query {self._run!r} has written later batches than {batch} into {self._key!r}: it was begun "
                    "with a new checkpoint; give it a new name with the option `query`, too"
                )
            case b"other":
                raise PipelineError(
                    f"the query {self._run!r} has written into {self._key!r} with another checkpoint (its id is "
                    f"{more[0].decode()}): give it a new name with the option `query`, or go on with that checkpoint. "
                    f"If rows may come twice, remove the key {beside(self._key, self._run)!r}"
                )
            case b"cut":
                raise PipelineError(self._half(int(more[0]), int(more[1]), int(more[2])))
            case _:
                raise PipelineError(
                    f"batch {more[0]} of {self._run!r} was cut short while version 0.1.0 was landing it in "
                    f"{self._key!r}, which did not note how far it came. {self._remedy(int(more[0]))}"
                )

    def _move_all(self, asking: Asking, decided: Decision) -> int:
        """Have everything moved that was decided on; rows that went in now."""
        starts = self._all(asking, [self._check(asking, decided, task, parts) for task, parts in decided.tasks])
        for start in starts:
            self._check_answer(asking, decided, start)
        moved = 0
        under_way: deque[tuple[str, int, asyncio.Task[int]]] = deque()
        try:
            for (task, parts), start in zip(decided.tasks, starts, strict=True):
                for number in range(start, parts):
                    if len(under_way) >= WINDOW:
                        moved += self._moved(asking, decided, *under_way.popleft())
                    under_way.append((task, number, asking.begin(self._move(asking, decided, task, number))))
            while under_way:
                moved += self._moved(asking, decided, *under_way.popleft())
        finally:
            asking.forget(deque(answer for _, _, answer in under_way))
        return moved

    async def _check(self, asking: Asking, decided: Decision, task: str, parts: int) -> int:
        """Return how many parts of a task were moved before; all others must be there."""
        ledger = beside(self._key, self._run)
        keys: list[Argument] = [ledger, beside(self._key, self._run, task)]
        return int(await asking.evaluate(slot_of(ledger), LAND, keys, "check", decided.token, task, parts, STAGED_FOR))

    async def _move(self, asking: Asking, decided: Decision, task: str, number: int) -> int:
        ledger = beside(self._key, self._run)
        keys: list[Argument] = [ledger, self._key, beside(self._key, self._run, task)]
        return int(await asking.evaluate(slot_of(ledger), LAND, keys, "move", decided.token, task, number, STAGED_FOR))

    def _moved(self, asking: Asking, decided: Decision, task: str, number: int, answer: asyncio.Task[int]) -> int:
        rows = asking.wait(answer)
        for _ in range(WINDOW):
            if rows != NOT_YET:
                break
            # A connection was lost: parts are sent again in another order, perhaps to a server that knows of fewer.
            start = asking.wait(self._check(asking, decided, task, dict(decided.tasks)[task]))
            self._check_answer(asking, decided, start)
            for before in range(start, number):
                self._check_answer(asking, decided, asking.wait(self._move(asking, decided, task, before)))
            rows = asking.wait(self._move(asking, decided, task, number))
        self._check_answer(asking, decided, rows)
        return rows

    @staticmethod
    def _all(asking: Asking, questions: Sequence[Coroutine[Any, Any, int]]) -> list[int]:
        """Ask all at once; the answers."""
        answers = deque(asking.begin(question) for question in questions)
        found = []
        try:
            while answers:
                found.append(asking.wait(answers[0]))
                answers.popleft()
        finally:
            asking.forget(answers)
        return found

    def _check_answer(self, asking: Asking, decided: Decision, answer: int) -> None:
        if answer >= 0:
            return
        if answer == OVERRULED:
            raise PipelineError(
                f"batch {decided.batch} of {self._run!r} is written into {self._key!r} by another driver at the same "
                "time: let one of them go"
            )
        ledger = beside(self._key, self._run)
        landed = int(asking.wait(asking.ask(slot_of(ledger), "HGET", ledger, "landed")) or 0)
        if landed:
            raise PipelineError(self._half(decided.batch, landed, decided.rows))
        raise PipelineError(
            f"rows that were staged for batch {decided.batch} of {self._run!r} are gone from the Redis server before "
            f"they were moved into {self._key!r}: they have expired (after {STAGED_FOR // 3600} h), were evicted "
            "(maxmemory-policy), or were lost in a fail-over. Nothing of the batch has landed: write it again"
        )

    def _half(self, batch: int, landed: int, expected: int) -> str:
        return (
            f"{landed} of {expected} rows of batch {batch} of {self._run!r} are in {self._key!r}, and the others are "
            "gone from the keys beside it: they have expired, were evicted (maxmemory-policy), or were lost in a "
            f"fail-over. {self._remedy(batch)}"
        )

    def _remedy(self, batch: int) -> str:
        ledger = beside(self._key, self._run)
        return (
            f"To write the batch again as a whole, so that the rows that landed come twice: DEL {ledger}. To go on "
            f"without what is missing: HSET {ledger} batch {batch}, then HDEL {ledger} landing landed"
        )

    def forget(self, staged: Sequence[Staged]) -> None:
        """Remove what these tasks have staged: it was moved, or is not needed.

        What was decided on stays until it is moved.
        """
        asking = self._asking()
        ledger = beside(self._key, self._run)
        self._all(
            asking,
            [asking.evaluate(slot_of(ledger), LAND, [ledger, one.key], "drop", one.task) for one in staged],
        )

    def forget_run(self) -> None:
        """Remove everything of a run that is not continued."""
        asking = self._asking()
        ledger = beside(self._key, self._run)
        asking.wait(asking.ask(slot_of(ledger), "DEL", ledger))

    def _ledger(self, asking: Asking, *arguments: Argument) -> list[Any]:
        ledger = beside(self._key, self._run)
        answer: list[Any] = asking.wait(asking.evaluate(slot_of(ledger), LAND, [ledger], *arguments))
        return answer

    def _asking(self) -> Asking:
        return store_cache.take(self._store, Asking)


def entries_of(batch: pa.RecordBatch) -> list[list[bytes]]:
    """Return the names and values of each row's entry, one after the other; null values are left out."""
    names = batch.schema.names
    if names == [FIELDS]:
        pairs = batch.column(0).to_pylist()
    else:
        columns = [column.to_pylist() for column in batch.columns]
        pairs = [list(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    found = [
        [word for name, value in row or () if value is not None for word in (as_bytes(name), as_bytes(value))]
        for row in pairs
    ]
    if not all(found):
        raise PipelineError("a row without any value cannot be an entry of a Redis stream")
    return found


def as_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return str(value).encode()
