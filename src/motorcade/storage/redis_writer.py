"""Write to Redis: collect operations per pipeline, and send them in groups, one script call per pipeline.

    submit ──> pipeline ──┐                                                  ┌──> answers
    submit ──> pipeline ──┼─ one group per server at a time: ────────────────┤
    submit ──> pipeline ──┘  EVALSHA per pipeline, then one WAIT for all     └──> answers

A pipeline is what a script call can change at once: a cell on a cluster, everything on a lone server. While a group is
under way, the next one collects; the more is written, the larger the groups.

What a caller submits is a `WriteJob` of one or more stages. A stage begins when everything before it has succeeded, so
that only the beginning of a job can be left behind. All its calls enter the pipelines at once, when it is
submitted: a call whose turn has not come holds up what was submitted after it.

The writer is registered in every pipeline before its first call, and refused when it no longer is (redis_members.py).

Rule 1: a pipeline has one call under way at most. It is numbered, and retried unchanged under the same number until
        the answer is there; the script carries a number out once (commit.lua). So a job of which something was sent is
        carried on however long that takes, and its caller hears whether it is stored. A job of which nothing but
        payloads was sent within `patience`, while a server is away, is refused: also one that waits behind another job.
Rule 2: an answer counts when enough replicas have confirmed it. WAIT tells how many did, it does not fail.
Rule 3: acknowledgements need no confirmation: a group of nothing else does not WAIT.
Rule 4: each pipeline carries jobs out in the order in which they were submitted. Only stages that are `early` may
        overtake: payloads, which have no order, and which entries wait for.
Rule 5: at most `MAX_QUEUED` calls wait; jobs beyond that stand in line.
Rule 6: `StoreRefusedError` is for jobs of which surely nothing was done, `StoreFullError` for those of which nothing
        that grows was done: every call of it was refused, and none was ever sent without an answer. Any other
        error is a `StoreError`: the outcome is unknown. That is so when the store is closed before the answer is there,
        when the rest of a job finds its server full, and when a call is refused that was sent before.
Rule 7: a condition of a job that does not hold (`JobStage.conditions`, lua/guard.lua) refuses this job and no other.
        It is checked in its pipeline, together with the operations of its stage there.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from motorcade.commit import Commit
from motorcade.redis.resp import LostError, RedisConnection, ServerAddress, ServerError
from motorcade.redis.scripts import Script
from motorcade.redis.servers import (
    FIRST_PAUSE,
    FULL,
    LONGEST_PAUSE,
    PASSING,
    Purpose,
    Servers,
    refusal,
)
from motorcade.storage.cells import Cells
from motorcade.storage.ports import (
    StoreConflictError,
    StoreError,
    StoreFencedError,
    StoreFullError,
    StoreRefusedError,
)
from motorcade.storage.redis_scripts import COMMIT

log = structlog.get_logger("motorcade.storage.redis")

#: Calls that may wait in all pipelines together.
MAX_QUEUED: Final = 20_000
#: A call takes no more once it has so much weight (up to 5 ms of the server's time), or so many bytes.
MAX_WEIGHT: Final = 500
MAX_BYTES: Final = 4 << 20
#: Seconds without a confirmation until the store counts as away, and seconds that it does after the last attempt.
TROUBLE_AFTER: Final = 1.0
TROUBLE_LASTS: Final = 30.0
#: Seconds between two looks for what is late.
EXPIRE_EVERY: Final = 0.25
#: Milliseconds that one WAIT may take. Less than a connection may be silent.
WAIT_TIME: Final = 1000

#: Answers that mean: nothing of the call was done.
NOTHING_DONE: Final = PASSING | FULL | {"NOSCRIPT", "FENCED"}

#: Why everything is refused.
FENCED: Final = "this store was fenced, it may not write any more: it has to be opened again"

#: Operations that a full server refuses. The others remove something, or change a few bytes that must be changed so
#: that a full store can be emptied.
GROWING: Final = frozenset({"append", "offer", "make", "put", "stream", "blob"})

#: What a guard answers when a condition does not hold.
UNMET: Final[Mapping[str, Callable[[], StoreError]]] = {
    "CONFLICT": lambda: StoreConflictError("a record or an entry is not as the write expects it"),
    "FENCED": lambda: StoreFencedError("the home is attached elsewhere"),
}


# Structs, since one of each is made for every write, and making a frozen dataclass takes ten times as long.


class Operation(msgspec.Struct, frozen=True, gc=False):
    """The work of one of the scripts in lua/ on one cell."""

    words: Sequence[Any]  #: name, cell, and what the script's header lists
    weight: int = 1  #: of some 5 µs of the server's time: an owner or record without any extras
    size_bytes: int = 0

    @property
    def cell(self) -> int:
        return int(self.words[1])


class JobStage(msgspec.Struct, frozen=True, gc=False):
    """Operations that need not wait for each other."""

    operations: Sequence[Operation]
    durable: bool = True
    early: bool = False  #: see rule 4; only the first stage of a job may be
    conditions: Sequence[Sequence[Any]] = ()  #: see rule 7; name, cell, and what lua/guard.lua lists


class PipelineCall(msgspec.Struct, eq=False):
    """Operations of one job for one pipeline; they are carried out together."""

    job: WriteJob
    pipeline: Pipeline
    stage: int
    indices: Sequence[int]  #: of the operations in their stage
    operations: Sequence[Operation]
    durable: bool
    early: bool
    weight: int
    size_bytes: int
    grows: bool
    conditions: Sequence[Sequence[Any]] = ()
    ready: bool = False  #: everything before it has succeeded
    dead: bool = False  #: something before it has failed
    alone: bool = False  #: goes by itself and before all others, since together with others it was refused


class WriteJob:
    """The work that one caller has submitted, and how far it has come."""

    def __init__(self, stages: Sequence[JobStage], deadline: float) -> None:
        self.stages = stages
        self.deadline = deadline  #: loop time; a job is refused if nothing of it could be sent until then
        self.sent = 0  #: times that a call was sent and was done, or may have been; payloads do not count
        self.commit: Commit[list[list[Any]]] = Commit()
        self.turns: list[list[PipelineCall]] = []  #: calls that are under way at the same time, turn after turn
        self.turn = 0
        self._left = 0  #: calls of this turn without an answer
        self._answers: list[list[Any]] = [[None] * len(stage.operations) for stage in stages]
        self._applied = False  #: something that grows was done, beside payloads, which no reader sees without entries
        self._troubles: list[StoreError] = []

    def begin_turn(self) -> list[PipelineCall]:
        """Return the calls that are ready now."""
        calls = self.turns[self.turn]
        self._left = len(calls)
        for call in calls:
            call.ready = True
        return calls

    def finish(self, call: PipelineCall, outcome: list[Any] | StoreError) -> bool:
        """Note what became of a call; whether that was the last of its turn."""
        if isinstance(outcome, StoreError):
            self._troubles.append(outcome)
        else:
            self._applied = self._applied or (call.grows and not call.early)
            answers = self._answers[call.stage]
            for index, answer in zip(call.indices, outcome, strict=True):
                answers[index] = answer
        self._left -= 1
        return self._left == 0

    @property
    def failed(self) -> bool:
        return bool(self._troubles)

    def end(self) -> None:
        """Tell the caller."""
        if self._troubles:
            self.commit.finish(self._trouble())
        else:
            self.commit.settle(self._answers)

    def _trouble(self) -> StoreError:
        for trouble in self._troubles:
            if not trouble.certain:
                return trouble
        if self._applied:
            return StoreError(f"written in part: {self._troubles[0]}")
        return self._troubles[0]

    def is_late(self, now: float) -> bool:
        """Return True if it is refused, since nothing of it could be sent in time."""
        return not self.sent and now > self.deadline


@dataclass(slots=True)
class Frozen:
    """Calls that go out as one, unchanged however often they are sent."""

    number: int
    calls: list[PipelineCall]
    packed: bytes
    durable: bool
    grows: bool
    lost: bool = False  #: it was sent at least once, with unknown outcome


@dataclass(slots=True, eq=False)
class Pipeline:
    """One stream of calls that happen one after the other."""

    slot: int
    key: str
    early: deque[PipelineCall] = field(default_factory=deque)
    queue: deque[PipelineCall] = field(default_factory=deque)
    frozen: Frozen | None = None
    number: int = 0
    pause: float = 0.0
    resting: bool = False  #: waits for its next attempt

    @property
    def has_work(self) -> bool:
        """True if something can be sent."""
        return self.frozen is not None or self.peek() is not None

    def peek(self) -> PipelineCall | None:
        """Return the call that is next, if its turn has come."""
        queue = self.queue
        while queue and queue[0].dead:
            queue.popleft()
        if self.early and not (queue and queue[0].alone):
            return self.early[0]
        return queue[0] if queue and queue[0].ready else None

    def take(self) -> PipelineCall:
        """Remove the call that is next."""
        return self.early.popleft() if self.early and not (self.queue and self.queue[0].alone) else self.queue.popleft()

    def put_back(self, calls: Sequence[PipelineCall]) -> None:
        """Let calls that were taken be the next ones again, in their order."""
        for call in reversed(calls):
            (self.early if call.early and not call.alone else self.queue).appendleft(call)

    def remove_late(self, now: float) -> list[PipelineCall]:
        """Take out the calls of jobs that are late, whatever is before them."""
        late = []
        for waiting in (self.early, self.queue):
            for call in [call for call in waiting if call.ready and call.job.is_late(now)]:
                waiting.remove(call)
                late.append(call)
        return late

    def remove_all(self) -> list[PipelineCall]:
        """Take out all calls that could be sent, whatever is before them."""
        calls = [call for call in (*self.early, *self.queue) if call.ready]
        self.early.clear()
        self.queue = deque(call for call in self.queue if not call.ready)
        return calls

    @property
    def stands(self) -> bool:
        """Return True if nothing is in flight: its server is away, or the next call waits for another pipeline."""
        return self.resting or (self.frozen is None and self.peek() is None)


class Trouble(NamedTuple):
    """A pipeline whose calls are not confirmed."""

    since: float  #: loop time
    last: float  #: loop time of the last attempt
    text: str


class RedisWriter:
    """The only place that sends operations."""

    def __init__(self, servers: Servers, cells: Cells, replicas: int, script: Script = COMMIT) -> None:
        self.name = secrets.token_hex(8)
        self.script = script
        self.fenced = False
        self.commits = 0
        self.writes = 0
        self.full = False
        self.unconfirmed = 0  #: groups that too few replicas had confirmed in time
        self._servers = servers
        self._replicas = replicas
        self._prefix = cells.prefix
        self._flag = "1" if servers.clustered else "0"
        self._queued = 0
        self._line: deque[WriteJob] = deque()
        self._letting_in = False
        self._idle = asyncio.Event()
        self._idle.set()
        count = cells.count if servers.clustered else 1
        self._pipelines = [Pipeline(cells.slot(cell), cells.key(cell, f"w:{self.name}")) for cell in range(count)]
        self._ready: dict[Pipeline, None] = {}
        self._troubles: dict[Pipeline, Trouble] = {}
        self._full_at = 0.0  # loop time of the last refusal for want of room
        self._tasks: dict[ServerAddress, asyncio.Task[None]] = {}
        self._expiring: asyncio.TimerHandle | None = None
        self._closing = False
        self._closed_at = inf  # loop time

    @property
    def queued(self) -> int:
        return self._queued + len(self._line)

    def condition(self) -> tuple[str, str]:
        """Return why not everything can be written, in few words and in the operator's; both empty: it can.

        What lasts less than `TROUBLE_AFTER` is part of every failover. What has gone quiet counts for `TROUBLE_LASTS`
        more: perhaps no caller has written since.
        """
        if self.fenced:
            return "is fenced", FENCED
        now = asyncio.get_running_loop().time()
        for pipeline, trouble in list(self._troubles.items()):
            if not pipeline.resting and now - trouble.last > TROUBLE_LASTS:
                del self._troubles[pipeline]
        for trouble in self._troubles.values():
            if now - trouble.since > TROUBLE_AFTER:
                return "does not answer", trouble.text
        if self.full and now - self._full_at < TROUBLE_LASTS:
            return "has no room", "Redis refuses writes for want of memory"
        return "", ""

    def pipeline_of(self, cell: int) -> int:
        return cell if len(self._pipelines) > 1 else 0

    @property
    def places(self) -> list[tuple[int, str]]:
        """Return the slot and the key of each pipeline."""
        return [(pipeline.slot, pipeline.key) for pipeline in self._pipelines]

    def submit(self, stages: Sequence[JobStage]) -> Commit[list[list[Any]]]:
        """Carry out stages one after the other; the answers of each in the order of its operations."""
        if self._closing:
            return Commit.failed(StoreError("the store is closed"))
        if self.fenced:
            return Commit.failed(StoreFencedError(FENCED))
        job = WriteJob(stages, asyncio.get_running_loop().time() + self._servers.patience)
        if self._line or self._queued >= MAX_QUEUED:
            self._line.append(job)
        else:
            self._place(job)
        return job.commit

    async def write(self, operations: Sequence[Operation], durable: bool = True) -> list[Any]:
        """Carry out operations of any pipelines; the answers in the same order. Pipelines go their own ways."""
        return (await self.submit([JobStage(operations, durable)]))[0]

    def later(self, operation: Operation) -> None:
        """Carry out an operation that no caller waits for and that may be lost."""
        if not self._closing and not self._line:
            self.submit([JobStage([operation], durable=False)])

    async def close(self) -> None:
        """Finish what was submitted, or fail it when `patience` runs out."""
        if not self._closing:
            self._closing = True
            self._closed_at = asyncio.get_running_loop().time()
        await self._idle.wait()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._expiring is not None:
            self._expiring.cancel()

    # -- jobs

    def _place(self, job: WriteJob) -> None:
        """Give all calls of a job their places, and begin."""
        for number, stage in enumerate(job.stages):
            job.turns += self._turns(job, number, stage)
        for call in (call for calls in job.turns for call in calls):
            (call.pipeline.early if call.early else call.pipeline.queue).append(call)
            self._queued += 1
        if job.turns:
            self._idle.clear()
            self._begin_turn(job)
        else:
            job.end()

    def _turns(self, job: WriteJob, number: int, stage: JobStage) -> list[list[PipelineCall]]:
        """Return the calls of a stage: one per pipeline, and more turns if one has more than a call can take."""
        by_pipeline: dict[int, list[int]] = {self.pipeline_of(condition[1]): [] for condition in stage.conditions}
        for index, operation in enumerate(stage.operations):
            by_pipeline.setdefault(self.pipeline_of(operation.cell), []).append(index)
        turns: list[list[PipelineCall]] = []
        for pipeline, indices in by_pipeline.items():
            for turn, some in enumerate(_portions(indices, stage.operations)):
                if turn == len(turns):
                    turns.append([])
                operations = [stage.operations[index] for index in some]
                call = PipelineCall(
                    job,
                    self._pipelines[pipeline],
                    number,
                    some,
                    operations,
                    stage.durable,
                    # What does not fit in one call has to wait for the call before it, and must not be waited for.
                    stage.early and number == 0 and turn == 0,
                    sum(operation.weight for operation in operations),
                    sum(operation.size_bytes for operation in operations),
                    any(operation.words[0] in GROWING for operation in operations),
                    stage.conditions and self._conditions(stage, pipeline, turn),
                )
                turns[turn].append(call)
        return turns

    def _conditions(self, stage: JobStage, pipeline: int, turn: int) -> list[Sequence[Any]]:
        """Return the conditions of a call: a record must be as expected before the first turn, a fence in each turn."""
        in_pipeline = [condition for condition in stage.conditions if self.pipeline_of(condition[1]) == pipeline]
        return [condition for condition in in_pipeline if turn == 0 or condition[0] == "fence"]

    def _begin_turn(self, job: WriteJob) -> None:
        for call in job.begin_turn():
            self._look_at(call.pipeline)

    def _look_at(self, pipeline: Pipeline) -> None:
        """Have a pipeline served if it was waiting for something that has happened now."""
        if pipeline.frozen is None and not pipeline.resting and pipeline not in self._ready and pipeline.has_work:
            self._wake(pipeline)

    def _finish_call(self, call: PipelineCall, outcome: list[Any] | StoreError) -> None:
        job = call.job
        self._queued -= 1
        if job.finish(call, outcome):
            job.turn += 1
            if not job.failed and job.turn < len(job.turns):
                self._begin_turn(job)
            else:
                self._bury(job)
                job.end()
        if self._line and not self._letting_in:
            self._letting_in = True  # placing one may finish it at once, which would come here again
            while self._line and self._queued < MAX_QUEUED:
                self._place(self._line.popleft())
            self._letting_in = False

    def _bury(self, job: WriteJob) -> None:
        """Drop what was to follow in a job that has failed, so that it holds up no other any more."""
        for calls in job.turns[job.turn :]:
            for call in calls:
                call.dead = True
                self._queued -= 1
            for call in calls:
                self._look_at(call.pipeline)

    # -- pipelines

    def _wake(self, pipeline: Pipeline) -> None:
        pipeline.resting = False
        if not pipeline.has_work:  # what it waited for has failed elsewhere
            self._look_idle()
            return
        address = self._servers.master(pipeline.slot)
        if address is None:
            self._rest(pipeline, "no server has the slot")
            return
        self._ready[pipeline] = None
        if address not in self._tasks:
            task = asyncio.create_task(self._serve(address), name=f"redis-writer-{address}")
            self._tasks[address] = task

    def _rest(self, pipeline: Pipeline, trouble: str) -> None:
        """Try again in a while, or give up what has waited too long."""
        loop = asyncio.get_running_loop()
        pipeline.resting = True  # so that what ends here wakes no one
        before = self._troubles.get(pipeline)
        self._troubles[pipeline] = Trouble(before.since if before is not None else loop.time(), loop.time(), trouble)
        now, end = loop.time(), self._closed_at + self._servers.patience
        if pipeline.frozen is not None and not pipeline.frozen.lost:
            # Nothing of it was done, so some of it may become late.
            calls, pipeline.frozen = pipeline.frozen.calls, None
            pipeline.put_back(calls)
        if pipeline.frozen is not None and now > end:
            self._finish(pipeline, StoreError(f"not confirmed in time, perhaps written: {trouble}"))
        self._expire_in(FIRST_PAUSE)
        if now > end:
            self._refuse(pipeline.remove_late(now), trouble)
            for call in pipeline.remove_all():
                self._finish_call(call, StoreError(f"the store was closed before all of it was written: {trouble}"))
        if not pipeline.has_work:
            pipeline.resting = False
            self._look_idle()
            return
        self._servers.refresh()
        pipeline.pause = min(max(pipeline.pause * 2, FIRST_PAUSE), LONGEST_PAUSE)
        loop.call_later(pipeline.pause, self._wake, pipeline)

    def _expire(self) -> None:
        """Refuse what is late, now and then as long as a server is away (rule 1)."""
        now = asyncio.get_running_loop().time()
        self._expiring = None
        waiting = [pipeline for pipeline in self._pipelines if (pipeline.queue or pipeline.early) and pipeline.stands]
        for pipeline, calls in [(pipeline, pipeline.remove_late(now)) for pipeline in waiting]:
            trouble = self._troubles.get(pipeline) or next(iter(self._troubles.values()), None)
            self._refuse(calls, trouble.text if trouble is not None else "others are waited for")
            self._look_at(pipeline)
        self._look_idle()
        if any(pipeline.resting for pipeline in self._pipelines):
            self._expire_in(EXPIRE_EVERY)

    def _expire_in(self, seconds: float) -> None:
        if self._expiring is None:
            self._expiring = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _refuse(self, calls: Sequence[PipelineCall], trouble: str) -> None:
        for call in calls:
            self._finish_call(call, StoreRefusedError(f"not written within {self._servers.patience:g} s: {trouble}"))

    def _freeze(self, pipeline: Pipeline) -> Frozen:
        """Take what waits, as far as it fits in one call."""
        if pipeline.frozen is not None:
            return pipeline.frozen
        calls: list[PipelineCall] = []
        weight = size_bytes = 0
        while (call := pipeline.peek()) is not None and weight < MAX_WEIGHT and size_bytes < MAX_BYTES:
            if call.alone and calls:
                break
            calls.append(pipeline.take())
            weight += call.weight
            size_bytes += call.size_bytes
            if call.alone:
                break
        pipeline.number += 1
        words: list[Sequence[Any]] = []
        for call in calls:
            if call.conditions:
                words.append(("guard", call.conditions[0][1], call.conditions, len(call.operations)))
            words += [operation.words for operation in call.operations]
        packed = msgspec.msgpack.encode(words)
        pipeline.frozen = Frozen(
            pipeline.number,
            calls,
            packed,
            any(call.durable for call in calls),
            any(call.grows for call in calls),
        )
        return pipeline.frozen

    def _finish(self, pipeline: Pipeline, outcome: list[Any] | StoreError) -> None:
        frozen, pipeline.frozen = pipeline.frozen, None
        if frozen is None:
            return
        start = 0
        for call in frozen.calls:
            result: list[Any] | StoreError = outcome
            if isinstance(outcome, list):
                start += bool(call.conditions)  # a guard has an answer too
                end = start + len(call.operations)
                failed = call.conditions and outcome[start - 1]
                result = UNMET[failed]() if failed else outcome[start:end]
                start = end
            self._finish_call(call, result)

    def _look_idle(self) -> None:
        if self._queued == 0 and not self._line:
            self._idle.set()

    # -- groups

    async def _serve(self, address: ServerAddress) -> None:
        """Send groups to one server as long as it has pipelines with work."""
        try:
            while pipelines := [pipeline for pipeline in self._ready if self._servers.master(pipeline.slot) == address]:
                for pipeline in pipelines:
                    del self._ready[pipeline]
                try:
                    if busy := [pipeline for pipeline in pipelines if pipeline.has_work]:
                        await self._group(address, busy)
                except Exception as error:
                    # A fault of ours must not leave callers waiting for ever.
                    log.exception("redis_group_failed", server=str(address))
                    for pipeline in pipelines:
                        self._finish(pipeline, StoreError(f"{address}: {error}"))
                        if pipeline.has_work and not pipeline.resting:
                            self._wake(pipeline)
        finally:
            del self._tasks[address]
            # Pipelines that were made ready for this server, and have another one since.
            for pipeline in list(self._ready):
                if self._servers.master(pipeline.slot) not in self._tasks:
                    del self._ready[pipeline]
                    self._wake(pipeline)
            self._look_idle()

    async def _group(self, address: ServerAddress, pipelines: list[Pipeline]) -> None:
        frozen = [self._freeze(pipeline) for pipeline in pipelines]
        try:
            connection, history = await self._servers.connection_and_history(address, Purpose.WRITE)
        except StoreError as error:
            for pipeline in pipelines:
                self._rest(pipeline, str(error))
            return
        for call in frozen:
            for each in call.calls:
                each.job.sent += not each.early
        replies = [
            connection.call(
                "EVALSHA",
                self.script.digest,
                1,
                pipeline.key,
                self._prefix,
                call.number,
                call.packed,
                self._flag,
                int(call.grows),
                history,
            )
            for pipeline, call in zip(pipelines, frozen, strict=True)
        ]
        confirmed: asyncio.Future[int] | None = None
        if self._replicas > 0 and any(call.durable for call in frozen):
            confirmed = connection.call("WAIT", self._replicas, WAIT_TIME)
        answers = await asyncio.gather(*replies, return_exceptions=True)
        trouble = await self._shortage(confirmed)
        if not trouble:
            self.commits += 1
        for pipeline, call, answer in zip(pipelines, frozen, answers, strict=True):
            self._answered(connection, pipeline, call, answer, trouble)

    def _answered(
        self, connection: RedisConnection, pipeline: Pipeline, call: Frozen, answer: object, trouble: str
    ) -> None:
        """Take the answer to one pipeline's call; `trouble`: why nothing that must be durable counts yet."""
        if isinstance(answer, ServerError) and answer.code in NOTHING_DONE:
            for each in call.calls:
                each.job.sent -= not each.early
        if isinstance(answer, bytes) and not (trouble and call.durable):
            if call.grows:
                self.full = False
            self.writes += len(call.calls)
            pipeline.pause = 0.0
            self._troubles.pop(pipeline, None)
            self._finish(pipeline, msgspec.msgpack.decode(answer))
        elif isinstance(answer, bytes):
            call.lost = True
            self._rest(pipeline, trouble)
            return
        elif isinstance(answer, ServerError) and answer.code == "NOSCRIPT":
            self._servers.load(connection, self.script)
        elif isinstance(answer, LostError) or (isinstance(answer, ServerError) and answer.code in PASSING):
            call.lost = call.lost or isinstance(answer, LostError)
            self._rest(pipeline, str(answer))
            return
        else:
            self._refused(pipeline, call, answer, connection.address)
        if pipeline.has_work:
            self._wake(pipeline)
        else:
            self._look_idle()

    async def _shortage(self, confirmed: asyncio.Future[int] | None) -> str:
        """Return what keeps a group from being confirmed; nothing: it is."""
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

    def _refused(self, pipeline: Pipeline, call: Frozen, answer: object, address: ServerAddress) -> None:
        error = refusal(answer, address) if isinstance(answer, ServerError) else StoreError(f"{address}: {answer}")
        known = (isinstance(error, StoreFullError) and self.full) or self.fenced
        if isinstance(answer, ServerError) and answer.code == "FENCED":
            self.fenced = True
            error = StoreError(f"perhaps written, perhaps not: {FENCED}") if call.lost else StoreFencedError(FENCED)
        if isinstance(error, StoreFullError):
            self.full = True
            self._full_at = asyncio.get_running_loop().time()
            if call.lost:
                # It was sent before, perhaps to a server that is slow to look at what it got.
                error = StoreError(f"perhaps written, perhaps not: {error}")
            elif len(call.calls) > 1:
                # A script is refused before its first write, so nothing of it was done. What only removes is let
                # through, but not in company: send them one by one.
                for each in call.calls:
                    each.alone = True
                pipeline.frozen = None
                pipeline.put_back(call.calls)
                return
        if not known:  # a full server refuses everything; once is enough
            log.warning("redis_refused", server=str(address), error=str(error))
        self._finish(pipeline, error)


def _portions(indices: list[int], operations: Sequence[Operation]) -> list[list[int]]:
    """Return the operations of one pipeline, in portions that a call can take."""
    portions: list[list[int]] = [[]]
    weight = size_bytes = 0
    for index in indices:
        if portions[-1] and (weight >= MAX_WEIGHT or size_bytes >= MAX_BYTES):
            portions.append([])
            weight = size_bytes = 0
        portions[-1].append(index)
        weight += operations[index].weight
        size_bytes += operations[index].size_bytes
    return portions
