"""A shared store in memory, as far as several nodes can tell: cells with logs, which fail over and forget.

    node A ─ CellStore ─ pipeline per cell ─ call 7 ─▶ [ way ] ─▶ Cell: log of calls ─▶ MemoryStore
    node B ─ CellStore ─ …                                          └ forget(k): made again without the last k

What stands in a cell is the engine in memory, so every operation means what it means there. Here is what a shared
engine adds: batches that are written cell by cell, writers that are registered in each cell and number their calls,
answers that are lost, servers that are away, and fail-overs. A store that is told nothing never fails.

Rule 1: a pipeline has one call under way. It is sent again under its number until there is an answer, and a cell
        answers a number that it knows from what it has answered before.
Rule 2: the jobs of a pipeline are carried out in the order in which they were submitted. A stage of a job begins when
        all before it has succeeded; until then it holds up what was submitted after it.
Rule 3: a call that has left goes its way, whatever becomes of the process that has sent it.
Rule 4: a cell that fails over has forgotten its last calls, whoever was told of them; what is under way to it or from
        it is lost. Lapses tell whose homes that concerns.
Rule 5: what is random is drawn once, and is the same when a cell is made again.
"""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeVar
from unittest.mock import patch

import msgspec

from motorcade.commit import Commit
from motorcade.core.errors import StoreAwayError, StoreError, StoreFencedError, StoreRefusedError
from motorcade.storage import memory
from motorcade.storage.homes import CLIENT, home_of_owner, home_of_record
from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import (
    FENCED,
    NO_BOUND,
    Acknowledge,
    AddNote,
    Append,
    Appended,
    Attached,
    Backlog,
    Batch,
    Bound,
    Claim,
    Condition,
    Delete,
    Detach,
    Draft,
    Elsewhere,
    Entry,
    FeedEnd,
    FeedPage,
    Fence,
    Holds,
    MailboxInfo,
    Make,
    Mark,
    Member,
    Offer,
    Opened,
    Put,
    Release,
    SetDue,
    Spare,
    Step,
    StoreCondition,
    StoreFigures,
    StreamAppend,
    Swept,
    Take,
    Written,
    weigh,
)
from motorcade.storage.tails import CLOSED, MAX_PAGE
from tests.support.store_trace import TraceEntry

T = TypeVar("T")

PATIENCE: Final = 10.0  #: seconds after which what could not be sent is refused, and a question has no answer
PAUSE: Final = 0.2  #: seconds until a server is tried again
PULSE: Final = 1.0  #: seconds between two looks at a feed
MAX_LAG: Final = 2.0  #: seconds by which a replica may lag behind that is promoted
#: Positions that are given after a fail-over begin above those that may have been given until then.
HORIZON_BEGAN, POSITIONS_PER_SECOND = 1_690_000_000, 131_072
MAX_CALL: Final = 50  #: jobs in one call
WRITER: Final = "writer:"  #: what stands for a writer among the homes of a lapse


class Ways(Protocol):
    """The way between one process and the servers."""

    def request(self, cell: Cell, arrive: Callable[[], None], refused: Callable[[], None]) -> None:
        """Call `arrive` at the server, or `refused` in the process: nothing was sent."""

    def answer(self, cell: Cell, arrive: Callable[[], None]) -> None:
        """Call `arrive` in the process."""

    def now(self) -> float:
        """Return the time of the servers."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine of the engine, which never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("the engine waits")


# -- the servers


class _Draws:
    """What is random in the engine: remembered, and the same when a call is carried out again (rule 5)."""

    def __init__(self) -> None:
        self.drawn: list[bytes] = []
        self.again: deque[bytes] | None = None

    def token_bytes(self, size: int) -> bytes:
        if self.again:
            return self.again.popleft()
        value = secrets.token_bytes(size)
        self.drawn.append(value)
        return value

    def token_hex(self, size: int) -> str:
        return secrets.token_hex(size)


DRAWS: Final = _Draws()


@contextmanager
def drawing() -> Iterator[None]:
    """Have the engine draw what is random from `DRAWS`."""
    with patch.object(memory, "secrets", DRAWS):
        yield


@dataclass(slots=True)
class Work:
    """What a job does in one cell, at once."""

    what: str
    homes: tuple[str, ...]  #: that it changes
    do: Callable[[MemoryStore], Any]


@dataclass(slots=True)
class _Logged:
    """A call that was carried out."""

    at: float
    writer: str
    number: int
    works: Sequence[Work]
    drawn: list[bytes]


@dataclass(frozen=True, slots=True)
class Lapse:
    """What a fail-over has forgotten."""

    at: float
    cell: int
    homes: frozenset[str]

    def concerns(self, home: str) -> bool:
        return home in self.homes


class FencedWriterError(Exception):
    """The writer is not registered, or its registration was closed."""


class Cell:
    """One cell, as its server has it."""

    member_fences = True  #: writers that were fenced write no more; a test may do without

    def __init__(self, number: int) -> None:
        self.number = number
        self.epoch = 0  #: one more with every fail-over
        self.away = False  #: its server refuses connections
        self.readers: list[Callable[[], None]] = []  #: told of notes, and of new servers
        self.log: list[_Logged] = []
        self._begin()

    def _begin(self) -> None:
        self.engine = MemoryStore()
        run(self.engine.open())
        self.writers: dict[str, int] = {}  #: number of the last call of each that is registered
        self.closed: set[str] = set()
        self.trace: list[TraceEntry] = []
        self._answers: dict[str, list[Any]] = {}

    def execute(self, writer: str, number: int, works: Sequence[Work], now: float) -> list[Any]:
        """Carry out a call; an answer is a result, or the error of that job."""
        last = self.writers.get(writer)
        fenced = writer in self.closed and self.member_fences
        if last is None or fenced:
            self._trace(writer, number, "call", accepted=False)
            raise FencedWriterError
        if number <= last:
            return self._answers[writer]  # of an earlier one nobody waits for it any more
        DRAWS.drawn = []
        notes = self.engine.feeds.noted
        answers = self._carry_out(writer, number, works)
        self.log.append(_Logged(now, writer, number, works, DRAWS.drawn))
        if self.engine.feeds.noted != notes:
            self.ring()
        return answers

    def _carry_out(self, writer: str, number: int, works: Sequence[Work]) -> list[Any]:
        if writer:
            self._trace(writer, number, "call")
        answers: list[Any] = []
        for work in works:
            try:
                answers.append(work.do(self.engine))
            except StoreError as error:
                answers.append(error)
            self._note(work, answers[-1])
        self.writers[writer] = number
        self._answers[writer] = answers
        return answers

    def ring(self) -> None:
        for told in list(self.readers):
            told()

    def forget(self, count: int, now: float) -> Lapse:
        """Fail over to a server that lacks the last calls, none older than `MAX_LAG`."""
        self.epoch += 1
        kept = len(self.log)
        while count and kept and self.log[kept - 1].at > now - MAX_LAG:
            kept -= 1
            count -= 1
        lost, log = self.log[kept:], self.log[:kept]
        if lost:
            self._begin()
            for one in log:
                DRAWS.again = deque(one.drawn)
                self._carry_out(one.writer, one.number, one.works)
            DRAWS.again = None
            self.log = log
        self._raise_horizon(now)
        self.ring()
        homes = {home for one in lost for work in one.works for home in work.homes}
        return Lapse(now, self.number, frozenset(homes))

    def _raise_horizon(self, now: float) -> None:
        """Give positions far above those that may have been forgotten (ports, rule 9)."""
        horizon = int(now - HORIZON_BEGAN) * POSITIONS_PER_SECOND + self.epoch

        def do(engine: MemoryStore) -> None:
            mailboxes = engine.mailboxes
            mailboxes.floor = max(mailboxes.floor, horizon)
            for box in mailboxes.boxes.values():
                box.last = max(box.last, horizon) if box.is_there else box.last

        DRAWS.drawn = []
        works = [Work("horizon", (), do)]
        self._carry_out("", self.epoch, works)
        self.log.append(_Logged(now, "", self.epoch, works, []))

    # -- writers, which are registered by calls like others

    def join(self, writer: str) -> Work:
        def do(_: MemoryStore) -> bool:
            return writer not in self.closed

        return Work("join", (WRITER + writer,), do)

    def admit(self, writer: str, now: float) -> bool:
        """Register a writer; False if it was fenced meanwhile."""
        if writer in self.closed:
            return False
        self.writers.setdefault(writer, 0)
        self.execute(writer, 1, [self.join(writer)], now)
        return True

    def fence(self, writer: str) -> Work:
        def do(engine: MemoryStore) -> bool:
            self.closed.add(writer)
            engine.gate.fenced_others.add(writer)
            return True

        return Work(f"fence {writer}", (WRITER + writer,), do)

    def leave(self, writer: str) -> None:
        """Remove the registration of a store that is closed."""
        self.writers.pop(writer, None)

    # -- what was decided

    def _trace(self, name: str, number: int, what: str, token: str = "", *, accepted: bool = True) -> None:
        self.trace.append(TraceEntry(self.number, name, number, token, what, accepted))

    def _note(self, work: Work, answer: Any) -> None:
        what, _, name = work.what.partition(" ")
        accepted = not isinstance(answer, StoreError)
        if what == "fence":
            self._trace(name, 0, "fence")
        elif what == "attach" and isinstance(answer, Opened | Attached):
            fence = answer.fence if isinstance(answer, Attached) else answer.attached.fence
            self._trace(fence.home, fence.number, f"attach {name}", fence.token.hex())
        elif what in ("decision", "detach") and accepted:
            fences, detached = name.split(" ")[:-1], name.split(" ")[-1]
            for text in fences:
                home, number, token = text.rsplit(":", 2)
                last = what == "detach" and text == detached
                self._trace(home, int(number), "detach" if last else "decision", token)


class Cells:
    """All cells of a store."""

    def __init__(self, count: int) -> None:
        self.cells = [Cell(number) for number in range(count)]
        self.listed: dict[str, float] = {}  #: writers that have registered and are not fenced, with when
        self.lapses: list[Lapse] = []

    def of(self, home: str) -> Cell:
        return self.cells[zlib.crc32(home.encode()) % len(self.cells)]

    def forget(self, number: int, count: int, now: float) -> Lapse:
        lapse = self.cells[number].forget(count, now)
        self.lapses.append(lapse)
        return lapse

    def traces(self) -> dict[int, list[TraceEntry]]:
        return {cell.number: cell.trace for cell in self.cells}


# -- one process' way to write


class _Job:
    """What one caller has submitted."""

    def __init__(self, stages: Sequence[Sequence[tuple[Cell, Work]]]) -> None:
        self.commit: Commit[list[list[Any]]] = Commit()
        self.turns: list[list[_Ticket]] = []
        self.turn = self.left = 0
        self.sent = False
        self.errors: list[StoreError] = []
        for stage in stages:
            self.turns.append([_Ticket(self, cell, work) for cell, work in stage])


@dataclass(slots=True, eq=False)
class _Ticket:
    """What a job does in one cell, in the queue there."""

    job: _Job
    cell: Cell
    work: Work
    ready: bool = False
    dead: bool = False
    answer: Any = None


@dataclass(slots=True)
class _Sent:
    """A call under way."""

    number: int
    tickets: list[_Ticket]
    again: bool = False


class _Pipeline:
    """The calls of a store to one cell."""

    def __init__(self, store: CellStore, cell: Cell) -> None:
        self.cell = cell
        self.queue: deque[_Ticket] = deque()
        self._store = store
        self._number = 1  # the registration is the first
        self._sent: _Sent | None = None
        self._soon = False

    def look(self) -> None:
        if self._sent is None and not self._soon and not self._store.dead:
            self._soon = True
            self._store.loop.call_soon(self._send_next)

    def _send_next(self) -> None:
        self._soon = False
        if self._sent is not None or self._store.dead:
            return
        tickets: list[_Ticket] = []
        while self.queue and len(tickets) < MAX_CALL and (self.queue[0].dead or self.queue[0].ready):
            ticket = self.queue.popleft()
            if not ticket.dead:
                tickets.append(ticket)
        if tickets:
            self._number += 1
            self._sent = _Sent(self._number, tickets)
            self._send(self._sent)

    def _send(self, sent: _Sent) -> None:
        if self._store.dead or self._sent is not sent:
            return
        cell, epoch = self.cell, self.cell.epoch

        def arrive() -> None:
            if cell.epoch != epoch:
                self._store.ways.answer(cell, lost)
                return
            try:
                outcome: list[Any] | None = cell.execute(
                    self._store.writer, sent.number, [ticket.work for ticket in sent.tickets], self._store.ways.now()
                )
            except FencedWriterError:
                outcome = None
            after = cell.epoch
            self._store.ways.answer(cell, lambda: answered(after, outcome))

        def answered(after: int, outcome: list[Any] | None) -> None:
            if cell.epoch != after:
                lost()
            else:
                self._answered(sent, outcome)

        def lost() -> None:
            sent.again = True
            self._store.loop.call_later(PAUSE, self._send, sent)

        def refused() -> None:
            self._store.loop.call_later(PAUSE, self._send, sent)
            self._store.loop.call_soon(self._put_back, sent)

        for ticket in sent.tickets:
            ticket.job.sent = True
        self._store.ways.request(cell, arrive, refused)

    def _put_back(self, sent: _Sent) -> None:
        """Nothing of it has left: it may be refused when its time is over."""
        if not sent.again:
            for ticket in sent.tickets:
                ticket.job.sent = False

    def _answered(self, sent: _Sent, outcome: list[Any] | None) -> None:
        if self._store.dead or self._sent is not sent:
            return
        self._sent = None
        if outcome is None:
            self._store.fenced = True
            error = StoreError(f"perhaps written: {FENCED}") if sent.again else StoreFencedError(FENCED)
            outcome = [error] * len(sent.tickets)
        for ticket, answer in zip(sent.tickets, outcome, strict=True):
            self._store.answered(ticket, answer)
        self.look()

    def late(self, job: _Job) -> None:
        """A job of which nothing has left is refused: so it is no longer sent either."""
        if self._sent is not None and any(ticket.job is job for ticket in self._sent.tickets):
            self._sent.tickets = [ticket for ticket in self._sent.tickets if ticket.job is not job]
            if not self._sent.tickets:
                self._sent = None
        self.look()


# -- the store of one process


class CellStore:
    """A `Store` on cells, for one process."""

    atomic = False
    blobs: Any = None
    streams: Any = None

    def __init__(self, cells: Cells, ways: Ways) -> None:
        self.shared = cells
        self.ways = ways
        self.writer = secrets.token_hex(8)
        self.dead = False  #: the process is, or the store was closed
        self.fenced = False
        self.backlog = Backlog()
        self.mailboxes = CellMailboxes(self)
        self.records = CellRecords(self)
        self.feeds = CellFeeds(self)
        self.coordination = CellCoordination(self)
        self._pipelines = [_Pipeline(self, cell) for cell in cells.cells]

    async def open(self) -> None:
        """Register in all cells; `StoreAwayError` if one is away."""
        self.loop = asyncio.get_running_loop()
        self.shared.listed[self.writer] = self.ways.now()
        for cell in self.shared.cells:
            if not await self.ask(cell, lambda _, cell=cell: cell.admit(self.writer, self.ways.now())):  # type: ignore[misc]
                raise StoreFencedError(FENCED)

    async def close(self) -> None:
        self.dead = True
        for tail in list(self.feeds.tails):
            tail.close()
        if not self.fenced:
            self.shared.listed.pop(self.writer, None)
            for cell in self.shared.cells:
                self.ways.request(cell, partial(cell.leave, self.writer), lambda: None)

    def write(self, batch: Batch) -> Commit[Written]:
        rows, size = weigh(batch)
        self.backlog.rows += rows
        self.backlog.bytes += size
        plan = _Plan(self.shared, batch)
        submitted = self.submit(plan.stages)
        commit: Commit[Written] = Commit()

        def done() -> None:
            self.backlog.rows -= rows
            self.backlog.bytes -= size
            if submitted.error is not None:
                commit.finish(submitted.error)
            else:
                commit.settle(plan.written(submitted.result))

        submitted.then(done)
        return commit

    def submit(self, stages: Sequence[Sequence[tuple[Cell, Work]]]) -> Commit[list[list[Any]]]:
        job = _Job(stages)
        if self.fenced:
            job.commit.finish(StoreFencedError(FENCED))
        elif self.dead:
            pass  # nobody is there any more to hear of it
        elif not any(job.turns):
            job.commit.settle([[] for _ in stages])
        else:
            for tickets in job.turns:
                for ticket in tickets:
                    self._pipelines[ticket.cell.number].queue.append(ticket)
            self._begin_turn(job)
            self.loop.call_later(PATIENCE, self._look_whether_late, job)
        return job.commit

    def _begin_turn(self, job: _Job) -> None:
        while not job.turns[job.turn]:
            job.turn += 1
            if job.turn == len(job.turns):
                self._end(job)
                return
        job.left = len(job.turns[job.turn])
        for ticket in job.turns[job.turn]:
            ticket.ready = True
            self._pipelines[ticket.cell.number].look()

    def answered(self, ticket: _Ticket, answer: Any) -> None:
        job = ticket.job
        ticket.answer = answer
        if isinstance(answer, StoreError):
            job.errors.append(answer)
        job.left -= 1
        if job.left:
            return
        job.turn += 1
        if job.errors or job.turn == len(job.turns):
            for tickets in job.turns[job.turn :]:
                for one in tickets:
                    one.dead = True
                    self._pipelines[one.cell.number].look()
            self._end(job)
        else:
            self._begin_turn(job)

    def _end(self, job: _Job) -> None:
        if not job.errors:
            job.commit.settle([[ticket.answer for ticket in tickets] for tickets in job.turns])
            return
        error = job.errors[0]
        applied = any(
            ticket.answer is not None and not isinstance(ticket.answer, StoreError) and ticket.work.what != "guard"
            for tickets in job.turns
            for ticket in tickets
        )
        if error.certain and applied:
            error = StoreError(f"written in part: {error}")
        job.commit.finish(error)

    def _look_whether_late(self, job: _Job) -> None:
        if job.commit.done or job.sent or self.dead:
            return
        for tickets in job.turns:
            for ticket in tickets:
                ticket.dead = True
        job.commit.finish(StoreRefusedError(f"not written within {PATIENCE:g} s"))
        for pipeline in self._pipelines:
            pipeline.late(job)

    async def one(self, cell: Cell, work: Work) -> Any:
        """Carry out something in one cell."""
        return (await self.submit([[(cell, work)]]))[0][0]

    async def ask(self, cell: Cell, question: Callable[[MemoryStore], T]) -> T:
        """Read something from a cell, again and again until `PATIENCE` is over."""
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE
        while True:
            found: asyncio.Future[list[Any]] = loop.create_future()

            def put(value: list[Any], found: asyncio.Future[list[Any]] = found) -> None:
                if not found.done():
                    found.set_result(value)

            def arrive(epoch: int = cell.epoch, put: Callable[[list[Any]], None] = put) -> None:
                value = [question(cell.engine)] if cell.epoch == epoch else []
                self.ways.answer(cell, lambda: put(value))

            self.ways.request(cell, arrive, lambda put=put: put([]))  # type: ignore[misc]
            try:
                async with asyncio.timeout_at(end):
                    answer = await found
                    if answer:
                        value: T = answer[0]
                        return value
                    await asyncio.sleep(PAUSE)
            except TimeoutError:
                raise StoreAwayError(f"no answer within {PATIENCE:g} s") from None

    async def sweep(
        self, now: float, budget: int, cursor: bytes = b"", kept: Callable[[int], bool] | None = None
    ) -> Swept:
        raise NotImplementedError("nothing expires here")

    async def figures(self) -> StoreFigures:
        return StoreFigures("cells", 0, 0, 0, 0, 0, 0, 0, 0, 0, full=False)

    def condition(self) -> StoreCondition:
        return StoreCondition("cells", 0, 0, 0, full=False, trouble="is fenced" if self.fenced else "")

    async def check(self) -> list[str]:
        return []


# -- batches, cell by cell


class _Part(Batch):
    """What a batch does in one cell at once, and where its answers belong."""

    __slots__ = ("places",)

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[int, Sequence[int]]] = []  #: of each step: which one of the batch, which of its owners


class _Plan:
    """The stages of a batch: what has conditions first, the end of an attachment last."""

    def __init__(self, cells: Cells, batch: Batch) -> None:
        self._cells = cells
        self._batch = batch
        self.stages: list[list[tuple[Cell, Work]]] = []
        self._parts: list[list[_Part]] = []
        steps = list(enumerate(batch.steps))
        guarded = list(dict.fromkeys(self._cell_of(condition).number for condition in batch.conditions))
        everywhere = {cell for _, step in steps for cell in self._split(step)}
        alone = len(everywhere | set(guarded)) == 1
        last = [] if alone else [one for one in steps if isinstance(one[1], Detach)]
        steps = [one for one in steps if one not in last]
        if len(guarded) > 1:
            self._stage([self._part(number, (), batch.conditions) for number in guarded], guarded)
        for number in guarded:
            self._stage([self._part(number, steps, batch.conditions)], [number])
        before: int | None = None
        for one in steps:
            numbers = [number for number in self._split(one[1]) if number not in guarded]
            if not numbers:
                continue
            if len(numbers) == 1 and numbers[0] == before:
                self._extend(numbers[0], one)
            else:
                self._stage([self._part(number, [one]) for number in numbers], numbers)
            before = numbers[0] if len(numbers) == 1 else None
        if last:
            number = self._cell_of(last[0][1].fence).number  # type: ignore[union-attr]
            self._stage([self._part(number, last)], [number])

    def _stage(self, parts: list[_Part], numbers: Sequence[int]) -> None:
        self._parts.append(parts)
        self.stages.append(
            [(self._cells.cells[number], _work(part)) for number, part in zip(numbers, parts, strict=True)]
        )

    def _extend(self, number: int, one: tuple[int, Step]) -> None:
        part = self._parts[-1][0]
        self._add(part, number, one)
        self.stages[-1] = [(self._cells.cells[number], _work(part))]

    def _part(self, number: int, steps: Iterable[tuple[int, Step]], conditions: Sequence[Condition] = ()) -> _Part:
        part = _Part()
        part.conditions = [one for one in conditions if self._cell_of(one).number == number]
        for one in steps:
            self._add(part, number, one)
        return part

    def _add(self, part: _Part, number: int, one: tuple[int, Step]) -> None:
        index, step = one
        owners = self._split(step).get(number)
        if owners is None:
            return
        if isinstance(step, Append) and len(owners) < len(step.owners):
            step = msgspec.structs.replace(
                step,
                owners=[step.owners[at] for at in owners],
                spared=[step.spared[at] for at in owners] if step.spared else (),
                generations=[step.generations[at] for at in owners] if step.generations else (),
            )
        part.steps.append(step)
        part.places.append((index, owners))

    def _split(self, step: Step) -> dict[int, Sequence[int]]:
        """Return the cells of a step, and which of its owners are there."""
        found: dict[int, list[int]] = {}
        for at, home in enumerate(_homes(step)):
            found.setdefault(self._cells.of(home).number, []).append(at)
        return dict(found)

    def _cell_of(self, condition: Condition) -> Cell:
        return self._cells.of(_home_of_condition(condition))

    def written(self, answers: list[list[Any]]) -> Written:
        """Put the answers of all parts together."""
        appended: dict[int, dict[int, Appended]] = {}
        others: dict[tuple[int, str], Any] = {}
        for parts, of_stage in zip(self._parts, answers, strict=True):
            for part, answer in zip(parts, of_stage, strict=True):
                of_appends, made, notes = iter(answer.appended), iter(answer.generations), iter(answer.notes)
                claimed = iter(answer.claimed)
                for (index, owners), step in zip(part.places, part.steps, strict=True):
                    if isinstance(step, Append):
                        appended.setdefault(index, {}).update((at, next(of_appends)) for at in owners)
                    elif isinstance(step, Offer):
                        appended[index] = {0: next(of_appends)}
                    elif isinstance(step, Make):
                        others[index, "made"] = next(made)
                    elif isinstance(step, AddNote):
                        others[index, "note"] = next(notes)
                    elif isinstance(step, Claim):
                        others[index, "claimed"] = next(claimed)

        def of(kind: str) -> list[Any]:
            return [value for (_, what), value in sorted(others.items()) if what == kind]

        in_order = [appended[index][at] for index in sorted(appended) for at in sorted(appended[index])]
        return Written(in_order, [], of("made"), of("note"), of("claimed"))


def _work(part: _Part) -> Work:
    homes = tuple(dict.fromkeys(home for step in part.steps for home in _homes(step)))
    fences = [one for one in part.conditions if isinstance(one, Fence)]
    detached = [step.fence for step in part.steps if isinstance(step, Detach)]
    text = [f"{one.home}:{one.number}:{one.token.hex()}" for one in (*fences, *detached[:1])]
    what = "write" if part.steps else "guard"
    if fences and detached:
        what = " ".join(("detach", *text))
    elif fences:
        what = " ".join(("decision", *text, "-"))

    def do(engine: MemoryStore) -> Written:
        return engine.apply(part)

    return Work(what, homes, do)


def _homes(step: Step) -> Sequence[str]:
    match step:
        case Append(owners=owners):
            return [home_of_owner(owner) for owner in owners]
        case Offer(client_id=client_id):
            return [CLIENT + client_id]
        case Claim(owners=owners):
            return [home_of_owner(owners[0])]
        case Make() | Acknowledge() | Mark() | Spare() | Release() | Take():
            return [home_of_owner(step.owner)]
        case Put() | Delete():
            return [home_of_record(step.collection, step.key)]
        case AddNote() | SetDue():
            return [step.home]
        case Detach():
            return [step.fence.home]
        case StreamAppend():
            raise NotImplementedError("no streams here")


def _home_of_condition(condition: Condition) -> str:
    if isinstance(condition, Fence):
        return condition.home
    if isinstance(condition, Holds):
        return home_of_owner(condition.owner)
    return home_of_record(condition.collection, condition.key)


# -- ports


class _Port:
    def __init__(self, store: CellStore) -> None:
        self._store = store

    def _of(self, home: str) -> Cell:
        return self._store.shared.of(home)

    async def _batch(self, batch: Batch) -> Written:
        return await self._store.write(batch)


class CellMailboxes(_Port):
    """Mailboxes outside of batches."""

    async def append(
        self,
        owners: Sequence[str],
        draft: Draft,
        now: float,
        bound: Bound = NO_BOUND,
        spared: Sequence[int] = (),
        generations: Sequence[int] = (),
    ) -> list[Appended]:
        batch = Batch()
        batch.append(owners, draft, now, bound, spared, generations)
        return (await self._batch(batch)).appended

    async def make(self, owner: str) -> int:
        batch = Batch()
        batch.make(owner)
        return (await self._batch(batch)).generations[0]

    async def read(self, owner: str, after: int, limit: int, now: float) -> list[Entry]:
        home = self._of(home_of_owner(owner))
        return await self._store.ask(home, lambda engine: run(engine.mailboxes.read(owner, after, limit, now)))

    async def entries(self, owner: str, positions: Sequence[int], now: float) -> list[Entry]:
        home = self._of(home_of_owner(owner))
        return await self._store.ask(home, lambda engine: run(engine.mailboxes.entries(owner, positions, now)))

    async def acknowledge(self, owner: str, positions: Iterable[int]) -> int:
        wanted = list(positions)
        home = home_of_owner(owner)
        work = Work("write", (home,), lambda engine: engine.mailboxes.apply_acknowledge(owner, wanted))
        return int(await self._store.one(self._of(home), work))

    async def owners(self, feed: int | None = None) -> AsyncIterator[str]:
        for cell in self._store.shared.cells if feed is None else [self._store.shared.cells[feed]]:
            found = await self._store.ask(
                cell, lambda engine: [owner for owner, box in engine.mailboxes.boxes.items() if box.rows]
            )
            for owner in found:
                yield owner

    async def info(self, owner: str) -> MailboxInfo:
        home = self._of(home_of_owner(owner))
        return await self._store.ask(home, lambda engine: run(engine.mailboxes.info(owner)))

    async def forget(self, owner: str, fence: Fence | None = None) -> int:
        home = home_of_owner(owner)
        what = "write" if fence is None else f"decision {home}:{fence.number}:{fence.token.hex()} -"
        work = Work(what, (home,), lambda engine: run(engine.mailboxes.forget(owner, fence)))
        return int(await self._store.one(self._of(home), work))


class CellRecords(_Port):
    """Records outside of batches."""

    async def get(self, collection: str, key: str, now: float) -> bytes | None:
        cell = self._of(home_of_record(collection, key))
        return await self._store.ask(cell, lambda engine: run(engine.records.get(collection, key, now)))

    async def get_many(self, collection: str, keys: Sequence[str], now: float) -> list[bytes | None]:
        return list(await asyncio.gather(*(self.get(collection, key, now) for key in keys)))

    async def of_home(self, collection: str, home: str, now: float) -> dict[str, bytes]:
        return await self._store.ask(self._of(home), lambda engine: engine.records.look(collection, home, now))

    async def scan(
        self, collection: str, now: float, prefix: str = "", feed: int | None = None
    ) -> AsyncIterator[tuple[str, bytes]]:
        for cell in self._store.shared.cells if feed is None else [self._store.shared.cells[feed]]:
            found = await self._store.ask(
                cell,
                lambda engine: [
                    (key, value)
                    for key, (value, until) in engine.records.collections.get(collection, {}).items()
                    if key.startswith(prefix) and not 0 < until <= now
                ],
            )
            for key, value in found:
                yield key, value


class CellFeeds(_Port):
    """One feed per cell."""

    def __init__(self, store: CellStore) -> None:
        super().__init__(store)
        self.tails: set[CellTail] = set()

    def feed_of(self, home: str) -> int:
        return self._of(home).number

    async def ends(self) -> list[FeedEnd]:
        cells = self._store.shared.cells
        asking = (self._store.ask(cell, lambda engine: run(engine.feeds.ends())[0]) for cell in cells)
        return list(await asyncio.gather(*asking))

    async def read(self, feed: int, after: FeedEnd, limit: int) -> FeedPage:
        cell = self._store.shared.cells[feed]
        return await self._store.ask(cell, lambda engine: run(engine.feeds.read(0, after, limit)))

    def follow(self, after: Sequence[FeedEnd]) -> CellTail:
        tail = CellTail(self._store, after)
        self.tails.add(tail)
        return tail


@dataclass(slots=True, eq=False)
class _Followed:
    """One feed, and how far it was read."""

    end: FeedEnd
    news: asyncio.Event = field(default_factory=asyncio.Event)
    gap: bool = False
    resets: int = 0


class CellTail:
    """Follows all feeds, as `RedisTail` does."""

    def __init__(self, store: CellStore, after: Sequence[FeedEnd]) -> None:
        self._store = store
        self._feeds = [_Followed(end) for end in after]
        self._pages: asyncio.Queue[tuple[int, int, FeedPage] | None] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._follow(number), name=f"tail-{number}") for number in range(len(after))]
        self._bells = [partial(self._rung, number) for number in range(len(after))]
        self._closed = False
        for cell, bell in zip(store.shared.cells, self._bells, strict=True):
            cell.readers.append(bell)

    @property
    def ends(self) -> Sequence[FeedEnd]:
        return [feed.end for feed in self._feeds]

    def _rung(self, number: int) -> None:
        self._store.ways.answer(self._store.shared.cells[number], partial(self.look, number))

    async def next(self) -> tuple[int, FeedPage]:
        while not self._closed:
            found = await self._pages.get()
            if found is None:
                break
            number, resets, page = found
            if resets == self._feeds[number].resets:
                return number, page
        raise StoreError(CLOSED)

    def reset(self, feed: int, end: FeedEnd) -> None:
        followed = self._feeds[feed]
        followed.end, followed.gap = end, False
        followed.resets += 1
        self.look(feed)

    def look(self, feed: int) -> None:
        self._feeds[feed].news.set()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._store.feeds.tails.discard(self)
        for cell, bell in zip(self._store.shared.cells, self._bells, strict=True):
            cell.readers.remove(bell)
        for task in self._tasks:
            task.cancel()
        self._pages.put_nowait(None)

    async def _follow(self, number: int) -> None:
        feed = self._feeds[number]
        while True:
            feed.news.clear()
            while not feed.gap:
                resets, end = feed.resets, feed.end
                try:
                    page = await self._store.feeds.read(number, end, MAX_PAGE)
                except StoreError:
                    break
                if resets != feed.resets:
                    continue
                if page.gap:
                    feed.gap = True
                elif page.notes:
                    feed.end = FeedEnd(page.notes[-1].number, page.notes[-1].nonce)
                else:
                    break
                self._pages.put_nowait((number, resets, page))
            try:
                async with asyncio.timeout(PULSE):
                    await feed.news.wait()
            except TimeoutError:
                pass


class CellCoordination(_Port):
    """Attachments and fences."""

    async def open(self, owner: str, member: str, collections: Sequence[str], now: float) -> Opened:
        found = await self.try_open(owner, member, collections, now, displace="*")
        assert isinstance(found, Opened)
        return found

    async def attach(self, owner: str, member: str) -> Attached:
        home = home_of_owner(owner)
        work = Work(f"attach {member}", (home,), lambda engine: run(engine.coordination.attach(owner, member)))
        found: Attached = await self._store.one(self._of(home), work)
        return found

    async def try_open(
        self,
        owner: str,
        member: str,
        collections: Sequence[str],
        now: float,
        *,
        displace: str = "",
        wait: bool = True,
    ) -> Opened | Elsewhere:
        home = home_of_owner(owner)

        def do(engine: MemoryStore) -> Opened | Elsewhere:
            if displace == "*":
                return run(engine.coordination.open(owner, member, collections, now))
            return run(engine.coordination.try_open(owner, member, collections, now, displace=displace))

        found: Opened | Elsewhere = await self._store.one(self._of(home), Work(f"attach {member}", (home,), do))
        return found

    @property
    def takeovers(self) -> int:
        return sum(cell.epoch for cell in self._store.shared.cells)

    async def attached(self, member: str, feed: int) -> AsyncIterator[Fence]:
        cell = self._store.shared.cells[feed]
        found = await self._store.ask(
            cell,
            lambda engine: [fence for holder, fence in engine.mailboxes.attached.values() if holder == member],
        )
        for fence in found:
            yield fence

    async def due(self, feed: int, now: float, limit: int) -> list[tuple[str, float]]:
        cell = self._store.shared.cells[feed]
        return await self._store.ask(cell, lambda engine: run(engine.coordination.due(0, now, limit)))

    async def time(self) -> float:
        return await self._store.ask(self._store.shared.cells[0], lambda _: self._store.ways.now())

    async def members(self) -> list[Member]:
        listed = self._store.shared.listed
        return await self._store.ask(
            self._store.shared.cells[0], lambda _: [Member(writer, since) for writer, since in listed.items()]
        )

    async def fence_member(self, writer: str) -> bool:
        listed = self._store.shared.listed
        if not await self._store.ask(self._store.shared.cells[0], lambda _: writer in listed):
            return False
        await self._store.submit([[(cell, cell.fence(writer)) for cell in self._store.shared.cells]])
        listed.pop(writer, None)
        return True
