"""What is published on its way into one stream of the store.

    publish ─▶ waiting: one group per turn of the event loop ─(one write at a time)─▶ store ─▶ readers, publishers

Rule 1: one write per stream is under way at a time. While it is, the next group collects; the busier, the larger. So
        records are in the store, and in front of readers, in the order in which they were given.
Rule 2: what waits is bounded, over all streams together (`Waiting`). What does not fit is refused with
        `StoreFullError`, which the publisher hears.
Rule 3: all messages of a group share one future. It is made only if somebody waits for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from motorcade.core.message import Message
from motorcade.core.record import encode
from motorcade.extension.plugin import Spawn
from motorcade.storage.ports import StoreError, StoreFullError, Streams

MAX_GROUP: Final = 1000  #: messages written at once; one `append` of more goes as a whole
MAX_GROUP_BYTES: Final = 4 * 1024**2
OVERHEAD: Final = 200  #: bytes a message takes in memory besides its record, roughly

Done = asyncio.Future[list[int]]


class Waiting:
    """How much waits for the store, of all streams."""

    __slots__ = ("max_messages", "max_octets", "messages", "octets")

    def __init__(self, max_messages: int, max_octets: int) -> None:
        self.max_messages = max_messages
        self.max_octets = max_octets
        self.messages = 0
        self.octets = 0

    def full(self) -> bool:
        return self.messages >= self.max_messages or self.octets >= self.max_octets


class Group:
    """Messages that are written together."""

    __slots__ = ("done", "messages", "octets", "values")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.values: list[bytes] = []
        self.octets = 0
        self.done: Done | None = None

    def future(self) -> Done:
        if self.done is None:
            self.done = asyncio.get_running_loop().create_future()
        return self.done

    def fail(self, error: Exception) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # seen: those who wait may be gone


class Appender:
    """Writes to one stream. `appended(offsets, group, now)` is called in order, before anybody else hears of it."""

    def __init__(
        self,
        name: str,
        store: Streams,
        waiting: Waiting,
        now: Callable[[], float],
        spawn: Spawn,
        appended: Callable[[list[int], Group, float], None],
        settled: Callable[[], None],
        counters: Counter[str],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._name = name
        self._store = store
        self._all = waiting
        self._now = now
        self._spawn = spawn
        self._appended = appended
        self._settled = settled  # called when nothing waits or is under way any more, whatever became of it
        self._counters = counters
        self._log = log
        self._groups: deque[Group] = deque()
        self._task: asyncio.Task[None] | None = None
        self._failing = False
        self.doubtful = False  #: a write has failed that may have been done all the same; whoever counts looks again

    def put(self, message: Message) -> Group:
        """Append one message; `StoreFullError` if too much waits, `RecordError` if it cannot be written."""
        if self._all.full():
            raise self._refused()
        value = encode(message)
        group = self._open()
        group.messages.append(message)
        group.values.append(value)
        octets = len(value) + OVERHEAD
        group.octets += octets
        self._all.messages += 1
        self._all.octets += octets
        return group

    def append(self, messages: Sequence[Message]) -> Done:
        """Append several, in one write; their offsets when they are stored. Errors of `put` fail the future."""
        loop = asyncio.get_running_loop()
        done: Done = loop.create_future()
        if not messages:
            done.set_result([])
            return done
        try:
            if self._all.full():
                raise self._refused()
            values = [encode(message) for message in messages]
        except Exception as error:  # noqa: BLE001 - the caller hears of it where it waits
            done.set_exception(error)
            done.exception()
            return done
        group = self._open()
        first = len(group.values)
        group.messages.extend(messages)
        group.values.extend(values)
        octets = sum(map(len, values)) + OVERHEAD * len(values)
        group.octets += octets
        self._all.messages += len(values)
        self._all.octets += octets
        last = len(group.values)

        def pass_on(written: Done) -> None:
            if done.done():
                return  # whoever waited has given up
            error = written.exception()
            if error is None:
                done.set_result(written.result()[first:last])
            else:
                done.set_exception(error)
                done.exception()

        group.future().add_done_callback(pass_on)
        return done

    def _open(self) -> Group:
        """The group that collects now."""
        groups = self._groups
        if not groups or len(groups[-1].values) >= MAX_GROUP or groups[-1].octets >= MAX_GROUP_BYTES:
            groups.append(Group())
            if self._task is None:
                # A task begins in the next turn of the event loop: what comes in this one is in the group by then.
                self._task = self._spawn(self._write(), f"append-{self._name}")
        return groups[-1]

    def _refused(self) -> StoreFullError:
        self._counters["refused_waiting"] += 1
        return StoreFullError(
            f"stream {self._name!r}: {self._all.messages} messages wait for the store already "
            "(options max_waiting and max_waiting_bytes of the plugin streams)"
        )

    async def _write(self) -> None:
        try:
            while self._groups:
                await self._write_one(self._groups.popleft())
        finally:
            self._task = None
            while self._groups:  # cancelled: the plugin is unloaded
                self._over(group := self._groups.popleft())
                group.fail(StoreError(f"stream {self._name!r} is closed"))
            self._settled()

    async def _write_one(self, group: Group) -> None:
        now = self._now()
        try:
            offsets = await self._store.append(self._name, group.values, now)
        except BaseException as error:
            self._over(group)
            self._failed(group, error)
            if not isinstance(error, Exception):
                raise
            return
        self._over(group)
        self._failing = False
        self._counters["appended"] += len(offsets)
        try:
            self._appended(offsets, group, now)
        except Exception:  # noqa: BLE001 - it is logged
            # A fault of ours: the records are stored, and publishers must hear that. Whoever looks finds them.
            self.doubtful = True
            self._log.exception("stream_append_not_told", stream=self._name)
        if group.done is not None and not group.done.done():
            group.done.set_result(offsets)

    def _over(self, group: Group) -> None:
        self._all.messages -= len(group.values)
        self._all.octets -= group.octets

    def _failed(self, group: Group, error: BaseException) -> None:
        self._counters["append_failed"] += len(group.values)
        self.doubtful = self.doubtful or not (isinstance(error, StoreError) and error.certain)
        if not self._failing:  # once, not for every group
            self._failing = True
            self._log.error("stream_append_failed", stream=self._name, error=str(error) or repr(error))
        group.fail(error if isinstance(error, StoreError) else StoreError(f"stream {self._name!r}: {error!r}"))

    @property
    def busy(self) -> bool:
        """Whether something waits or is under way."""
        return self._task is not None

    async def settle(self) -> None:
        """Wait until everything is written, or has failed."""
        while self._task is not None:
            await asyncio.wait([self._task])
