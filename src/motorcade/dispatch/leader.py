"""The leader: reads messages as workers have credit, dispatches them round robin, and retries what is not acknowledged.

    intake ─ read ─▶ assign.lua: pending ─▶ links, round robin ─▶ workers
      ▲                                        │
      └ finish.lua, settle.lua ◀ done ◀ pending table ◀ acknowledged; overdue, lost, refused ─▶ waiting ─▶ reassign.lua
                                              └─ hopeless ─▶ dead_letter.lua ─▶ done

A leadership is a handful of tasks that begin and end together. Any of them may find out that the term is over
(`TermOverError`, `FencedError`): then all end, nothing is written any more, and the process is a candidate again.

Rule 1: a message is stored as pending before a worker gets it, and leaves the intake after a worker has acknowledged it
        or it is among the dead letters. In between it is in the intake's own list of what was read, where the next
        leader finds it. So nothing is lost, whichever process is killed.
Rule 2: ids follow from entries, so every redelivery of a message has the same id.
Rule 3: nothing is read that no worker has credit for, except as much as one batch that is on its way.
Rule 4: nothing awaits per message.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Container, Coroutine, Sequence
from typing import Any, Final

import msgspec
import structlog

from motorcade.core.errors import StoreError
from motorcade.dispatch.calls import (
    ASSIGN,
    DEAD_LETTER,
    FINISH,
    FORGET_DEAD,
    REASSIGN,
    REGISTRY,
    SETTLE,
    Calls,
    FencedError,
)
from motorcade.dispatch.election import Election, LeaderTerm, TermOverError
from motorcade.dispatch.frames import Answers
from motorcade.dispatch.intake import EMPTY, ChannelIntake, Intake, ReadBatch
from motorcade.dispatch.links import Fault, LinkState, WorkerLink
from motorcade.dispatch.options import DispatchOptions
from motorcade.dispatch.pending import PendingTable
from motorcade.dispatch.security import leader_security
from motorcade.dispatch.views import LeaderView, RateReport, WorkerView
from motorcade.redis.scripts import Script
from motorcade.redis.servers import Purpose

log = structlog.get_logger("motorcade.dispatch")

#: Seconds between two looks at what is overdue.
LOOK_INTERVAL: Final = 0.05
#: Renewals in one lease.
RENEWALS: Final = 4
#: Seconds between two looks at the worker registry, and that a worker stays in it without being heard of.
REGISTRY_INTERVAL: Final = 0.5
REGISTRY_LEASE: Final = 3.0
#: Messages that Redis is told of at once: 3 ms of its time. Lua takes no more than about 8000 arguments.
DONE_AT_ONCE: Final = 3000
#: Messages that are done and of which Redis was not told; with more, nothing is read.
MAX_DONE: Final = 20_000
#: Ids among the pending that are looked at in one go.
SWEPT_AT_ONCE: Final = 1000
#: Batches that are being stored as pending at the same time.
ASSIGNING: Final = 4
#: Seconds between two rounds of claiming what was read and seems forgotten, and how long it must have been so.
RECLAIM_INTERVAL: Final = 15.0
RECLAIM_IDLE: Final = 10.0
#: Seconds between two looks at what was trimmed from the intake before it was read.
COUNT_INTERVAL: Final = 1.0
#: Messages that have failed once, and more often, that a worker may have at the same time.
SUSPECTS: Final = (sys.maxsize, 16, 1)
#: Messages that wait on when others behind them can be sent, in one go.
MAX_PASSED: Final = 100
#: Seconds before something that Redis refused is tried again.
PAUSE: Final = 0.2

STOPPED: Final = "stopped"

Report = Callable[[RateReport], None]


async def run_leader(
    options: DispatchOptions,
    *,
    stop: asyncio.Event,
    ready: Callable[[str], None] | None = None,
    report: Report | None = None,
) -> None:
    """Lead whenever no other process does, until `stop` is set; then finish what has begun and hand over.

    `ready` is called with `HOST:PID` of the candidate when Redis has answered.
    """
    leader_security(options)  # what is wrong with it is told before anything begins
    calls = Calls(options)
    await calls.open()
    try:
        election = Election(calls, options)
        if ready is not None:
            ready(election.token.rpartition(":")[0])
        await _run_terms(calls, election, options, stop, report)
    finally:
        await calls.close()


async def _run_terms(
    calls: Calls, election: Election, options: DispatchOptions, stop: asyncio.Event, report: Report | None
) -> None:
    loop = asyncio.get_running_loop()
    pause = PAUSE
    while (term := await election.campaign(stop)) is not None:
        began = loop.time()
        log.info("dispatch_leading", epoch=term.epoch, leader=term.token.rpartition(":")[0])
        why = await Leader(calls, election, term, options, report).lead(stop)
        (log.info if why == STOPPED else log.warning)("dispatch_led", epoch=term.epoch, why=why)
        await election.release()
        if not stop.is_set():
            # Another candidate may do better; back off longer after each failure.
            pause = min(pause * 2, options.lease) if loop.time() - began < options.lease else PAUSE
            await asyncio.sleep(pause)


class Leader:
    """One term of leading: reads, dispatches, retries and finishes messages."""

    def __init__(
        self, calls: Calls, election: Election, term: LeaderTerm, options: DispatchOptions, report: Report | None = None
    ) -> None:
        self.term = term
        self.pending = PendingTable(options.max_deliveries, options.retry_pause, options.ack_timeout)
        self.links: dict[str, WorkerLink] = {}
        self.read = 0
        self.dead_lettered = 0
        self.held_up = 0  #: times that nothing was read because no worker had credit
        self.intake = Intake(calls, options, term.fence)
        self.channel = ChannelIntake(calls, options, term.fence) if options.intake == "channel" else None
        self._calls = calls
        self._election = election
        self._options = options
        self._report = report
        self._security = leader_security(options)
        self._loop = asyncio.get_running_loop()
        self._order: list[WorkerLink] = []  #: of those that are connected
        self._turn = 0
        self._assigning = 0  #: messages that were read and are being stored as pending
        self._claim_at = 0.0
        self._count_at = 0.0
        self._claim_all = True
        self._deserted = False  #: no worker was connected when one was last looked for
        self._rate = 0.0
        self._credit = asyncio.Event()
        self._done = asyncio.Event()
        self._work = asyncio.Event()  #: something waits for a worker, or is hopeless
        self._idle = asyncio.Event()
        self._slots = asyncio.Semaphore(ASSIGNING)
        self._tasks: asyncio.TaskGroup
        self._pending_keys = [options.key("pending"), options.beside("pending", "fence")]
        self._deliveries = options.beside("pending", "deliveries")
        self._dead_keys = [options.key("dead"), options.beside("dead", "fence"), options.beside("dead", "ids")]
        self._gone: set[str] = set()  #: workers to be removed from the registry

    async def lead(self, stop: asyncio.Event) -> str:
        """Lead until the term is over or `stop` is set. Return why it has ended."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                running = [tasks.create_task(part, name=f"dispatch-{name}") for name, part in self._parts().items()]
                await stop.wait()
                await self._hand_over(running)
        except BaseExceptionGroup as group:
            return _why(group)
        finally:
            for link in self.links.values():
                link.close()
        return STOPPED

    def _parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        parts: dict[str, Coroutine[Any, Any, None]] = {
            "lease": self._renew(),
            "registry": self._keep_registry(),
            "intake": self._take_in(),
            "again": self._send_again(),
            "finish": self._finish(),
            "look": self._look(),
            "report": self._tell(),
        }
        if self.channel is not None:
            parts["channel"] = self.channel.run()
        return parts

    async def _hand_over(self, running: Sequence[asyncio.Task[None]]) -> None:
        """Stop reading, wait for what is in flight, write the results to Redis."""
        for task in running:
            if task.get_name() in {"dispatch-intake", "dispatch-channel"}:
                task.cancel()
        try:
            async with asyncio.timeout(self._options.stop_patience):
                while self.pending.done or self._assigning or any(link.held for link in self._order):
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            log.warning(
                "dispatch_left_behind", messages=len(self.pending.open), effect="the next leader sends them again"
            )
        raise TermOverError(STOPPED)  # which ends all tasks

    # -- lease and reports

    async def _renew(self) -> None:
        while True:
            await self._election.renew(self.term, msgspec.json.encode(self.view()))
            await asyncio.sleep(self._options.lease / RENEWALS)

    async def _look(self) -> None:
        """Check what depends on time."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            now = self._loop.time()
            self.term.check(now)
            for link in list(self._order):
                link.look(now)
            if self.pending.later:
                self.pending.wake(now)
            if self.pending.waiting or self.pending.hopeless:
                self._work.set()
            self._credit.set()  # windows may have grown

    async def _tell(self) -> None:
        seconds = self._options.report
        before, then = self.pending.acknowledged, self._loop.time()
        while True:
            await asyncio.sleep(seconds)
            done, now = self.pending.acknowledged, self._loop.time()
            self._rate = (done - before) / (now - then)
            rate = RateReport(
                messages_per_second=round(self._rate, 1),
                messages=done - before,
                total=done,
                in_flight=len(self.pending.open),
                workers=len(self._order),
                redistributed=self.pending.redistributed,
                dead=self.dead_lettered,
                held_up=self.held_up,
                trimmed=self.intake.unread + self.intake.unfinished,
            )
            log.info("dispatch_rate", **msgspec.structs.asdict(rate))
            if self._report is not None:
                self._report(rate)
            before, then = done, now

    def view(self) -> LeaderView:
        """Return what `dispatch status` shows."""
        return LeaderView(
            token=self.term.token,
            epoch=self.term.epoch,
            time=time.time(),
            messages_per_second=round(self._rate, 1),
            read=self.read,
            acknowledged=self.pending.acknowledged,
            redistributed=self.pending.redistributed,
            dead_lettered=self.dead_lettered,
            in_flight=len(self.pending.open),
            held_up=self.held_up,
            trimmed=self.intake.unread,
            unfinished=self.intake.unfinished,
            channel_dropped=self.channel.dropped if self.channel else 0,
            channel_gaps=self.channel.gaps if self.channel else 0,
            workers=tuple(
                WorkerView(
                    worker=link.name,
                    state=link.state,
                    in_flight=len(link.held),
                    window=link.window,
                    credit=link.credit,
                    acknowledged=link.acknowledged,
                    faults=dict(link.faults),
                    problem=link.problem if link.state is not LinkState.CONNECTED else "",
                )
                for link in sorted(self.links.values(), key=lambda link: link.name)
            ),
        )

    # -- workers

    async def _keep_registry(self) -> None:
        """Connect with all workers that are configured or have registered; list those that live."""
        tasks: dict[str, asyncio.Task[None]] = {}
        keys = [self._options.key("registry"), self._options.beside("registry", "fence")]
        registered: set[str] = set()
        while True:
            gone, self._gone = self._gone, set()
            connected = [link.name for link in self._order]
            try:
                rows = await self._calls.run(
                    REGISTRY,
                    keys,
                    self.term.fence,
                    int(REGISTRY_LEASE * 1000),
                    len(connected),
                    *connected,
                    *gone.difference(connected),
                    purpose=Purpose.READ,
                )
                registered = {name.decode("utf-8", "replace") for name in rows}
            except FencedError:
                raise
            except StoreError as error:
                self._gone |= gone
                log.warning("dispatch_roll_unknown", error=str(error))
            self._connect(tasks, registered)
            await asyncio.sleep(REGISTRY_INTERVAL)

    def _connect(self, tasks: dict[str, asyncio.Task[None]], registered: set[str]) -> None:
        wanted = [*self._options.workers, *sorted(registered)]
        for name in dict.fromkeys(wanted):
            if name in self.links or not _is_address(name):
                continue
            if len(self.links) >= self._options.max_workers:
                log.warning("dispatch_too_many_workers", ignored=name, max_workers=self._options.max_workers)
                break
            link = self.links[name] = WorkerLink(name, self, self._options, self._security)
            tasks[name] = self._tasks.create_task(link.run(), name=f"dispatch-link-{name}")
        for name in [name for name in self.links if name not in wanted]:
            if self.links[name].state is not LinkState.CONNECTED:
                self.links.pop(name).close()
                tasks.pop(name).cancel()

    def changed(self, link: WorkerLink) -> None:
        if link.state is LinkState.CONNECTED:
            log.info("dispatch_worker_connected", worker=link.name)
            self._order.append(link)
            self._gone.discard(link.name)
        elif link in self._order:
            self._order.remove(link)
            self._gone.add(link.name)
        self._credit.set()
        self._idle.set()
        if self.pending.waiting:
            self._work.set()

    def answered(self, link: WorkerLink, answers: Answers) -> None:
        now = self._loop.time()
        if answers.acknowledged:
            self.pending.acknowledge(answers.acknowledged)
            self._done.set()
        for id_, reason in answers.rejected:
            link.faults[Fault.REFUSED] += 1
            self.pending.failed([id_], link.name, f"{Fault.REFUSED}: {reason}", now, counted=True, pause=True)
        if answers.returned:
            link.faults[Fault.RETURNED] += len(answers.returned)
            # With a pause: while no worker can write, they come back as fast as they are sent.
            self.pending.failed(
                answers.returned, link.name, Fault.RETURNED, now, counted=False, pause=True, suspect=False
            )
        if self.pending.waiting or self.pending.hopeless:
            self._work.set()
        self._credit.set()
        self._idle.set()

    def taken_back(self, link: WorkerLink, ids: Sequence[bytes], fault: Fault, detail: str) -> None:
        if not ids:
            return
        log.warning("dispatch_redistributed", worker=link.name, fault=fault, detail=detail, messages=len(ids))
        # A lone worker that dies as soon as it comes back should not use up all deliveries in a moment.
        alone = all(other is link for other in self._order)
        # One that has never acknowledged anything is more likely to be at fault than all that it was sent.
        counted = bool(link.acknowledged) or fault in {Fault.HUNG, Fault.OVERDUE}
        # A worker that is merely slow was not killed by a message.
        suspect = fault is not Fault.OVERDUE
        why = f"{fault}: {detail}"
        self.pending.failed(ids, link.name, why, self._loop.time(), counted=counted, pause=alone, suspect=suspect)
        self._work.set()

    # -- intake

    async def _take_in(self) -> None:
        """Claim what was left behind, then read what is new, as far as workers have credit."""
        await self.intake.open()
        trouble = ""
        while True:
            try:
                if self._loop.time() >= self._count_at:  # also while nothing can be read
                    self._count_at = self._loop.time() + COUNT_INTERVAL
                    await self.intake.count_trimmed()
                room = self._room()
                if room <= 0:
                    await self._wait_for_credit()
                    continue
                if self._claim_all or self._loop.time() >= self._claim_at:
                    await self._claim()
                    continue
                await self._slots.acquire()
                if not await self._read(min(room, self.intake.most)):
                    self._slots.release()
                    await self.intake.wait()
                trouble = ""
            except FencedError:
                raise
            except StoreError as error:
                # What was read, and whose reply was lost, is claimed.
                self._claim_all = True
                if str(error) != trouble:
                    trouble = str(error)
                    log.warning("dispatch_intake_held", error=trouble)
                await asyncio.sleep(PAUSE)

    async def _read(self, count: int) -> bool:
        """Read, and let another task see to the rest; False if there is nothing."""
        try:
            batch = await self.intake.read(count)
        except BaseException:
            self._slots.release()
            raise
        if not batch.ids:
            return False
        self.read += len(batch.ids)
        batch = self._new(batch)
        self._assigning += len(batch.ids)
        self._tasks.create_task(self._dispatch(batch), name="dispatch-batch")
        return True

    def _new(self, batch: ReadBatch) -> ReadBatch:
        """Return a batch without the messages already in flight: a failover may have forgotten that it was read."""
        known = self.pending.open
        if known and not known.keys().isdisjoint(batch.ids):
            batch = _without(batch, known)
        self.pending.add(*batch)
        return batch

    async def _dispatch(self, batch: ReadBatch) -> None:
        """Store as pending, then send."""
        ids = self._without_large(batch)
        try:
            if ids:
                words: list[bytes | int] = [_milliseconds()] * (2 * len(ids))
                words[1::2] = ids
                await self._insist(ASSIGN, self._pending_keys, words)
                self._send(ids)
        finally:
            self._assigning -= len(batch.ids)
            self._slots.release()
            self._credit.set()

    def _without_large(self, batch: ReadBatch) -> list[bytes]:
        most = self._options.max_message
        if max(map(len, batch.messages), default=0) <= most:
            return batch.ids
        ids = []
        for id_, message in zip(batch.ids, batch.messages, strict=True):
            if len(message) <= most:
                ids.append(id_)
            else:
                self.pending.give_up(id_, f"too_large: {len(message)} bytes, max_message is {most}")
        self._work.set()
        return ids

    async def _claim(self) -> None:
        """Claim what this or an earlier leader has read and not finished, and what a lost reply held."""
        idle = 0.0 if self._claim_all else RECLAIM_IDLE
        self._claim_all = False
        claimed = 0
        after = b"0-0"
        while True:
            room = self._room()
            if room <= 0:
                await self._wait_for_credit()
                continue
            after, batch, gone = await self.intake.claim(after, idle, min(room, self.intake.most))
            # What is on its way is finished all the same: its message is here.
            self.intake.unfinished += sum(
                id_ not in self.pending.open for id_ in set(gone) - set(self.pending.untold())
            )
            batch = _without(_without(batch, self.pending.untold()), self.pending.open)
            if batch.ids:
                claimed += len(batch.ids)
                await self._take_over(batch)
            if after == b"0-0":
                break
        if claimed:
            log.info("dispatch_claimed", messages=claimed)
        await self._sweep()
        self._claim_at = self._loop.time() + RECLAIM_INTERVAL

    async def _sweep(self) -> None:
        """Forget ids that the intake does not know any more: a failover may bring some back, a crash leave some behind.

        All that the intake knows has just been claimed, so whatever is old and not in the table is of that kind.
        """
        before = _milliseconds() - int(RECLAIM_IDLE * 1000)
        ids = await self._calls.ask(
            self._pending_keys[0], "ZRANGEBYSCORE", self._pending_keys[0], "-inf", before, "LIMIT", 0, SWEPT_AT_ONCE
        )
        known = self.pending.untold()
        stray = [id_ for id_ in ids if id_ not in self.pending.open and id_ not in known]
        if stray:
            log.info("dispatch_pending_swept", ids=len(stray))
            await self._insist(SETTLE, [*self._pending_keys, self._deliveries], [len(stray), *stray])
        known_dead = await self._calls.ask(self._dead_keys[0], "HKEYS", self._dead_keys[2])
        marks = [id_ for id_ in known_dead if id_ not in self.pending.open and id_ not in self.pending.untold()]
        if marks:
            await self._insist(FORGET_DEAD, self._dead_keys, marks[:SWEPT_AT_ONCE])

    async def _take_over(self, batch: ReadBatch) -> None:
        """Send what was claimed, unless it was sent too often already."""
        # Before it is in the table: if this fails, it will be claimed again.
        found = await self._calls.ask(self._pending_keys[0], "HMGET", self._deliveries, *batch.ids)
        self.pending.add(*batch)
        for id_, deliveries in zip(batch.ids, found, strict=True):
            if deliveries is not None:
                self.pending.remember(id_, int(deliveries))
        if self.pending.hopeless:
            batch = _without(batch, set(self.pending.hopeless))
            self._work.set()
        await self._slots.acquire()
        self._assigning += len(batch.ids)
        await self._dispatch(batch)

    def _room(self) -> int:
        """Return how many messages may be read now."""
        if self.pending.done > MAX_DONE:
            return 0
        return sum([link.credit for link in self._order]) - self._assigning - self.pending.unsent

    async def _wait_for_credit(self) -> None:
        self.held_up += 1
        if not self._order and not self._deserted:
            log.warning("dispatch_no_workers", effect="messages wait in Redis", workers=len(self.links))
        self._deserted = not self._order
        self._credit.clear()
        await self._credit.wait()

    # -- sending

    def _send(self, ids: list[bytes]) -> None:
        """Dispatch messages round robin. What no worker has credit for waits."""
        now = self._loop.time()
        self.term.check(now)
        links = [link for link in self._order if link.credit]
        if links:
            start = self._turn % len(links)
            links = links[start:] + links[:start]
            self._turn += len(ids)
        while ids and links:
            left: list[bytes] = []
            for index, link in enumerate(links):
                share = ids[index :: len(links)]
                some = share[: link.credit]
                left += share[link.credit :]
                if some:
                    link.send(some, self.pending.messages(some), now)
            ids = left
            links = [link for link in links if link.credit]
        self.pending.waiting.extend(ids)

    async def _send_again(self) -> None:
        """Send messages that failed to another worker, or to the dead letters."""
        while True:
            await self._work.wait()
            self._work.clear()
            while (id_ := self.pending.next_hopeless()) is not None:
                await self._dead_letter(id_)
                self.pending.hopeless.popleft()
            while chosen := self._choose():
                await self._store_again([id_ for ids in chosen.values() for id_ in ids])
                self._send_chosen(chosen)

    def _choose(self) -> dict[WorkerLink, list[bytes]]:
        """Choose a worker for what waits: one with credit that has not just failed with it, if there is another.

        When a worker is lost, all that it had has failed, and perhaps one message was to blame. So what has failed is
        sent a few at a time, and what has failed again one at a time: a message that kills workers is found before its
        neighbours have used up their deliveries.
        """
        chosen: dict[WorkerLink, list[bytes]] = {}
        credit = {link: link.credit for link in self._order}
        suspects = {link: link.count_suspects() for link in self._order}
        kept: list[bytes] = []
        while len(kept) < MAX_PASSED and any(credit.values()) and (id_ := self.pending.next_waiting()) is not None:
            self.pending.waiting.popleft()
            history = self.pending.histories.get(id_)
            failures = history.failures if history is not None else 0
            last = history.worker if history is not None else ""
            others = [link for link in self._order if link.name != last] or self._order
            most = SUSPECTS[min(failures, len(SUSPECTS) - 1)]
            free = [link for link in others if credit[link] > 0 and suspects[link] < most]
            if not free:
                kept.append(id_)
                continue
            self._turn += 1
            link = free[self._turn % len(free)]
            credit[link] -= 1
            if failures:
                suspects[link] += 1
                link.suspects.add(id_)
            chosen.setdefault(link, []).append(id_)
        self.pending.waiting.extendleft(reversed(kept))
        return chosen

    async def _store_again(self, ids: list[bytes]) -> None:
        """Store those that have failed; those that only found no credit are stored already."""
        words: list[bytes | int] = [_milliseconds()]
        for id_ in ids:
            history = self.pending.histories.get(id_)
            if history is not None:
                words += (id_, history.deliveries)
        if len(words) > 1:
            await self._insist(REASSIGN, [*self._pending_keys, self._deliveries], words)

    def _send_chosen(self, chosen: dict[WorkerLink, list[bytes]]) -> None:
        now = self._loop.time()
        self.term.check(now)
        for link, ids in chosen.items():
            still = [id_ for id_ in ids if id_ in self.pending.open]
            if not still:
                continue
            if link.credit >= len(still) or (link.credit and len(still) == 1):
                link.send(still, self.pending.messages(still), now)
            else:  # it has lost its credit meanwhile
                self.pending.waiting.extendleft(reversed(still))

    async def _dead_letter(self, id_: bytes) -> None:
        kept = self.pending.open.get(id_)
        history = self.pending.histories.get(id_)
        if kept is None or history is None:
            return
        await self._insist(
            DEAD_LETTER,
            self._dead_keys,
            [
                id_,
                kept[1],
                history.reason.encode("utf-8", "replace"),
                history.deliveries,
                history.worker,
                f"{time.time():.3f}",
                self._options.max_dead,
            ],
            durable=True,
        )
        self.dead_lettered += 1
        log.warning(
            "dispatch_dead",
            id=id_.decode(),
            reason=history.reason,
            deliveries=history.deliveries,
            worker=history.worker,
        )
        self.pending.dead_letter(id_)
        self._done.set()

    # -- done

    async def _finish(self) -> None:
        """Tell Redis what is done, as much at once as has come together meanwhile."""
        options = self._options
        stream = [self.intake.key, options.beside(options.source, "fence")]
        while True:
            await self._done.wait()
            done = self.pending.take_done(DONE_AT_ONCE)
            if not done.ids:
                self._done.clear()
                self._idle.set()
                continue
            others = done.ids if not done.several else [id_ for id_ in done.ids if id_ not in self.pending.histories]
            # A leader killed between the two leaves an entry that is claimed again, or an id that is swept.
            await asyncio.gather(
                self._insist(
                    SETTLE, [*self._pending_keys, self._deliveries], [len(done.several), *done.several, *others]
                ),
                self._insist(FINISH, stream, [options.group, int(options.keep_published), *done.entries]),
            )
            if done.several:  # the intake no longer has them, so they cannot become dead letters twice
                await self._insist(FORGET_DEAD, self._dead_keys, done.several)
            self.pending.told(done)
            self._credit.set()

    async def _insist(self, script: Script, keys: list[str], words: Sequence[Any], durable: bool = False) -> None:
        """Carry out a script, however often it takes, as long as the term lasts."""
        while True:
            try:
                await self._calls.run(script, keys, self.term.fence, *words, durable=durable)
                return
            except FencedError:
                raise
            except StoreError as error:
                log.warning("dispatch_write_held", key=keys[0], error=str(error))
                await asyncio.sleep(PAUSE)


def _without(batch: ReadBatch, unwanted: Container[bytes]) -> ReadBatch:
    rows = [row for row in zip(*batch, strict=True) if row[0] not in unwanted]
    return ReadBatch(*(list(column) for column in zip(*rows, strict=True))) if rows else EMPTY


def _why(group: BaseExceptionGroup[BaseException]) -> str:
    """Return what has ended a term; raise anything else than the ordinary reasons again."""
    expected, others = group.split((TermOverError, StoreError))
    if others is not None:
        raise others
    reason: BaseException | None = expected
    while isinstance(reason, BaseExceptionGroup):
        reason = reason.exceptions[0]
    return str(reason)


def _milliseconds() -> int:
    return int(time.time() * 1000)


def _is_address(name: str) -> bool:
    host, _, port = name.rpartition(":")
    return bool(host) and port.isdigit() and 0 < int(port) < 65536
