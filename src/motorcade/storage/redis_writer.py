"""Everything that writes to Redis: operations are collected per lane, and go out in groups, one script call per lane.

    submit ──> lane ──┐                                              ┌──> answers
    submit ──> lane ──┼─ one group per server at a time: ────────────┤
    submit ──> lane ──┘  EVALSHA per lane, then one WAIT for all     └──> answers

A lane is what a script call can change at once: a cell on a cluster, everything on a lone server. While a group is
under way, the next one collects; the more is written, the larger the groups.

Rule 1: a lane has one call under way at most. It is numbered, and sent again unchanged under the same number until the
        answer is there or `patience` has run out; the script carries a number out once (commit.lua).
Rule 2: an answer counts when enough replicas have confirmed it. WAIT tells how many did, it does not fail.
Rule 3: acknowledgements need no confirmation: a group of nothing else does not WAIT.
Rule 4: at most `MAX_QUEUED` calls wait; whoever writes more waits for room.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import structlog

from motorcade.storage.cells import Cells
from motorcade.storage.ports import StoreError
from motorcade.storage.redis_scripts import COMMIT
from motorcade.storage.redis_servers import (
    FIRST_PAUSE,
    FULL,
    LONGEST_PAUSE,
    PASSING,
    Purpose,
    Servers,
    refusal,
)
from motorcade.storage.resp import Address, LostError, ServerError

log = structlog.get_logger("motorcade.storage.redis")

#: Calls that may wait in all lanes together.
MAX_QUEUED: Final = 20_000
#: A call takes no more once it has so many owners or records (some 10 ms of the server's time), or octets.
MAX_WEIGHT: Final = 1000
MAX_OCTETS: Final = 4 << 20
#: Milliseconds that one WAIT may take. Less than a connection may be silent.
WAIT_TIME: Final = 1000


@dataclass(frozen=True, slots=True)
class Operation:
    """What one of the scripts in lua/ does to one cell."""

    words: Sequence[Any]  #: name, cell, and what the script's header lists
    weight: int = 1  #: owners or records
    octets: int = 0

    @property
    def cell(self) -> int:
        return int(self.words[1])


@dataclass(slots=True, eq=False)
class Call:
    """Operations of one caller for one lane; they are carried out together."""

    operations: Sequence[Operation]
    durable: bool
    deadline: float
    done: asyncio.Future[list[Any]]

    @property
    def weight(self) -> int:
        return sum(operation.weight for operation in self.operations)

    @property
    def octets(self) -> int:
        return sum(operation.octets for operation in self.operations)

    def fail(self, error: StoreError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(slots=True)
class Frozen:
    """Calls that go out as one, unchanged however often they are sent."""

    number: int
    calls: list[Call]
    packed: bytes
    durable: bool
    deadline: float


@dataclass(slots=True, eq=False)
class Lane:
    """One stream of calls that happen one after the other."""

    slot: int
    key: str
    queue: deque[Call] = field(default_factory=deque)
    frozen: Frozen | None = None
    number: int = 0
    singly: int = 0  #: so many calls go one by one, because together they were refused
    pause: float = 0.0
    resting: bool = False  #: waits for its next attempt

    @property
    def is_idle(self) -> bool:
        return self.frozen is None and not self.queue


class Writer:
    """The only place that sends operations."""

    def __init__(self, servers: Servers, cells: Cells, replicas: int) -> None:
        self.commits = 0
        self.writes = 0
        self.full = False
        self.unconfirmed = 0  #: groups that too few replicas had confirmed in time
        self._servers = servers
        self._replicas = replicas
        self._prefix = cells.prefix
        self._flag = "1" if servers.clustered else "0"
        self._queued = 0
        self._room = asyncio.Event()
        self._room.set()
        self._idle = asyncio.Event()
        self._idle.set()
        writer = secrets.token_hex(6)
        count = cells.count if servers.clustered else 1
        self._lanes = [Lane(cells.slot(cell), cells.key(cell, f"w:{writer}")) for cell in range(count)]
        self._ready: dict[Lane, None] = {}
        self._tasks: dict[Address, asyncio.Task[None]] = {}
        self._closing = False

    @property
    def queued(self) -> int:
        return self._queued

    def lane_of(self, operation: Operation) -> int:
        return operation.cell if len(self._lanes) > 1 else 0

    async def write(self, operations: Sequence[Operation], durable: bool = True) -> list[Any]:
        """Carry out operations of any lanes; the answers in the same order. Lanes go their own ways."""
        while not self._room.is_set():
            await self._room.wait()
        if self._closing:
            raise StoreError("the store is closed")
        if len(operations) == 1:
            answers: list[Any] = await self._submit(self.lane_of(operations[0]), operations, durable)
            return answers
        by_lane: dict[int, list[int]] = {}
        for index, operation in enumerate(operations):
            by_lane.setdefault(self.lane_of(operation), []).append(index)
        portions = {lane: _portions(indices, operations) for lane, indices in by_lane.items()}
        answers = [None] * len(operations)
        for turn in range(max(len(some) for some in portions.values())):
            # What does not fit in one call of a lane follows when the first part has succeeded, so that only the
            # beginning of a batch can be left behind.
            calls = [
                (some[turn], self._submit(lane, [operations[index] for index in some[turn]], durable))
                for lane, some in portions.items()
                if turn < len(some)
            ]
            await asyncio.wait([done for _, done in calls])
            troubles = [error for _, done in calls if (error := done.exception()) is not None]
            if troubles:
                raise troubles[0]
            for some, done in calls:
                for index, answer in zip(some, done.result(), strict=True):
                    answers[index] = answer
        return answers

    def later(self, operation: Operation) -> None:
        """Carry out an operation that nobody waits for and that may be lost."""
        if not self._closing and self._room.is_set():
            done = self._submit(self.lane_of(operation), [operation], durable=False)
            done.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def close(self) -> None:
        """Finish what was submitted, or fail it when `patience` runs out."""
        self._closing = True
        await self._idle.wait()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # -- lanes

    def _submit(self, index: int, operations: Sequence[Operation], durable: bool) -> asyncio.Future[list[Any]]:
        loop = asyncio.get_running_loop()
        call = Call(operations, durable, loop.time() + self._servers.patience, loop.create_future())
        lane = self._lanes[index]
        lane.queue.append(call)
        self._queued += 1
        self._idle.clear()
        if self._queued >= MAX_QUEUED:
            self._room.clear()
        if lane.frozen is None and not lane.resting:
            self._wake(lane)
        return call.done

    def _wake(self, lane: Lane) -> None:
        lane.resting = False
        address = self._servers.master(lane.slot)
        if address is None:
            self._rest(lane, "nobody serves the slot")
            return
        self._ready[lane] = None
        if address not in self._tasks:
            task = asyncio.create_task(self._serve(address), name=f"redis-writer-{address}")
            self._tasks[address] = task

    def _rest(self, lane: Lane, trouble: str) -> None:
        """Try again in a while, or give up what has waited too long."""
        loop = asyncio.get_running_loop()
        if lane.frozen is not None and loop.time() > lane.frozen.deadline:
            self._finish(lane, StoreError(f"not confirmed within {self._servers.patience:g} s: {trouble}"))
        while lane.queue and loop.time() > lane.queue[0].deadline:
            self._count(1)
            lane.queue.popleft().fail(StoreError(f"not written within {self._servers.patience:g} s: {trouble}"))
        if lane.is_idle:
            self._look_idle()
            return
        self._servers.refresh()
        lane.pause = min(max(lane.pause * 2, FIRST_PAUSE), LONGEST_PAUSE)
        lane.resting = True
        loop.call_later(lane.pause, self._wake, lane)

    def _freeze(self, lane: Lane) -> Frozen:
        """Take what waits, as far as it fits in one call."""
        if lane.frozen is not None:
            return lane.frozen
        calls = [lane.queue.popleft()]
        weight, octets = calls[0].weight, calls[0].octets
        if lane.singly:
            lane.singly -= 1
        else:
            while lane.queue and weight < MAX_WEIGHT and octets < MAX_OCTETS:
                calls.append(lane.queue.popleft())
                weight += calls[-1].weight
                octets += calls[-1].octets
        lane.number += 1
        packed = msgspec.msgpack.encode([operation.words for call in calls for operation in call.operations])
        durable = any(call.durable for call in calls)
        lane.frozen = Frozen(lane.number, calls, packed, durable, max(call.deadline for call in calls))
        return lane.frozen

    def _finish(self, lane: Lane, outcome: list[Any] | StoreError) -> None:
        frozen, lane.frozen = lane.frozen, None
        if frozen is None:
            return
        self._count(len(frozen.calls))
        start = 0
        for call in frozen.calls:
            end = start + len(call.operations)
            if isinstance(outcome, StoreError):
                call.fail(outcome)
            elif not call.done.done():
                call.done.set_result(outcome[start:end])
            start = end

    def _count(self, finished: int) -> None:
        self._queued -= finished
        if not self._room.is_set() and self._queued < MAX_QUEUED // 2:
            self._room.set()

    def _look_idle(self) -> None:
        if self._queued == 0:
            self._idle.set()

    # -- groups

    async def _serve(self, address: Address) -> None:
        """Send groups to one server as long as it has lanes with work."""
        try:
            while lanes := [lane for lane in self._ready if self._servers.master(lane.slot) == address]:
                for lane in lanes:
                    del self._ready[lane]
                try:
                    await self._group(address, lanes)
                except Exception as error:
                    # A fault of ours must not leave callers waiting for ever.
                    log.exception("redis_group_failed", server=str(address))
                    for lane in lanes:
                        self._finish(lane, StoreError(f"{address}: {error}"))
                        if lane.queue and not lane.resting:
                            self._wake(lane)
        finally:
            del self._tasks[address]
            # Lanes that were made ready for this server, and have another one since.
            for lane in list(self._ready):
                if self._servers.master(lane.slot) not in self._tasks:
                    del self._ready[lane]
                    self._wake(lane)
            self._look_idle()

    async def _group(self, address: Address, lanes: list[Lane]) -> None:
        frozen = [self._freeze(lane) for lane in lanes]
        try:
            connection = await self._servers.connection(address, Purpose.WRITE)
        except StoreError as error:
            for lane in lanes:
                self._rest(lane, str(error))
            return
        replies = [
            connection.call("EVALSHA", COMMIT.digest, 1, lane.key, self._prefix, call.number, call.packed, self._flag)
            for lane, call in zip(lanes, frozen, strict=True)
        ]
        waits = self._replicas > 0 and any(call.durable for call in frozen)
        confirmed: asyncio.Future[int] | None = None
        if waits:
            confirmed = connection.call("WAIT", self._replicas, WAIT_TIME)
        answers = await asyncio.gather(*replies, return_exceptions=True)
        trouble = await self._shortage(confirmed)
        if not trouble:
            self.commits += 1
        for lane, call, answer in zip(lanes, frozen, answers, strict=True):
            if isinstance(answer, bytes) and not (trouble and call.durable):
                self.full = False
                self.writes += len(call.calls)
                lane.pause = 0.0
                self._finish(lane, msgspec.msgpack.decode(answer))
            elif isinstance(answer, bytes):
                self._rest(lane, trouble)
                continue
            elif isinstance(answer, ServerError) and answer.code == "NOSCRIPT":
                self._servers.load(connection, COMMIT)
            elif isinstance(answer, LostError) or (isinstance(answer, ServerError) and answer.code in PASSING):
                self._rest(lane, str(answer))
                continue
            else:
                self._refused(lane, call, answer, address)
            if lane.is_idle:
                self._look_idle()
            else:
                self._wake(lane)

    async def _shortage(self, confirmed: asyncio.Future[int] | None) -> str:
        """What keeps a group from being confirmed; nothing: it is."""
        if confirmed is None:
            return ""
        try:
            count = await confirmed
        except (LostError, ServerError) as error:
            return str(error)
        if count >= self._replicas:
            return ""
        self.unconfirmed += 1
        return f"{count} of {self._replicas} replicas have confirmed"

    def _refused(self, lane: Lane, call: Frozen, answer: object, address: Address) -> None:
        if isinstance(answer, ServerError):
            error = refusal(answer, address)
            if answer.code in FULL:
                self.full = True
                # A script is refused before its first write, so nothing of it was done. What only removes is let
                # through by the server, but not in company: send them one by one.
                if len(call.calls) > 1:
                    lane.queue.extendleft(reversed(call.calls))
                    lane.singly = len(call.calls)
                    lane.frozen = None
                    return
        else:
            error = StoreError(f"{address}: {answer}")
        log.warning("redis_refused", server=str(address), error=str(error))
        self._finish(lane, error)


def _portions(indices: list[int], operations: Sequence[Operation]) -> list[list[int]]:
    """Operations of one lane, in portions that a call can take."""
    portions: list[list[int]] = [[]]
    weight = octets = 0
    for index in indices:
        if portions[-1] and (weight >= MAX_WEIGHT or octets >= MAX_OCTETS):
            portions.append([])
            weight = octets = 0
        portions[-1].append(index)
        weight += operations[index].weight
        octets += operations[index].octets
    return portions
