"""Batches and data from the platform, on their way into the store.

    PUBLISH ─▶ parsed, checked ─▶ [ line ] ─▶ data found ─▶ one append to all VINs ─▶ receipts ─▶ PUBACK, triggers
                   │                 in order                  (many under way)
                   └─ wrong: refused, nothing stored

Rule 1: a batch is checked as a whole before anything of it is stored.
Rule 2: appends begin in the order in which batches came, so that a request that is issued again replaces the one before
        and not the other way round.
Rule 3: the publisher is answered when the entries and their receipts are stored. With the entries an intent is stored,
        and removed with the receipts: if the node dies in between, the next start finds the intent and writes what is
        missing (`recovery`). If the store does not say whether it has stored the entries, the publisher is told that
        it failed, and the same is done at once.
Rule 4: a vehicle that has as many messages pending as it may have gets no more: its own delivery has `failed`, with the
        reason `pending_limit`, and the answer tells how many were `rejected`. One vehicle that never comes must not
        hold up a campaign.
Rule 5: receipts of several batches are under way at a time, but batches end in the order in which they came, and one
        that replaces entries of another waits for it. So no vehicle gets the later of two messages first, and no
        receipt says `replaced` before `accepted`, however often something has to be written again.
Rule 6: a batch with a `batch_id` that was stored before is answered, and stored no more (`repeats`).
Rule 7: every publisher is answered. When the plugin is unloaded while batches wait for the store, their publishers are
        disconnected; what is stored of them has its intent, and the next start completes it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import structlog

from motorcade.core.errors import MotorcadeError
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.receipt import Receipt, State, delivery_id
from motorcade.extension.hooks import Handled, acknowledge_after
from motorcade.extension.plugin import Spawn
from motorcade.plugins.fanout import batch as batches
from motorcade.plugins.fanout.batch import BadBatchError, Batch
from motorcade.plugins.fanout.clerk import Clerk
from motorcade.plugins.fanout.desk import ACTIVE, Desk, delivery_of
from motorcade.plugins.fanout.job import Job
from motorcade.plugins.fanout.ledger import UNLOADED
from motorcade.plugins.fanout.receipts import RETRY, Receipts, Run, history_draft
from motorcade.plugins.fanout.record import DataRecord, EntryRecord, RecordError, decode_data, encode
from motorcade.plugins.fanout.recovery import Recovery
from motorcade.plugins.fanout.repeats import Repeats, named_of
from motorcade.plugins.fanout.tables import DATA, INTENTS, PRIORITISED, REQUESTS, STATE, done_of, owner_of
from motorcade.storage.ports import Appended, Bound, Draft, Store, StoreError, StoreFullError
from motorcade.storage.ports import Batch as StoreBatch

CACHED: Final = 64  #: data that was published lately, kept in memory
CACHED_OCTETS: Final = 16 * 1024**2
FLOORS: Final = 100_000  #: vehicles of which it is known how many messages were pending once


class MissingDataError(MotorcadeError):
    """A trigger names data that is not there; nothing was stored."""


class Intake:
    """What the platform publishes."""

    def __init__(
        self,
        store: Store,
        desk: Desk,
        receipts: Receipts,
        recovery: Recovery,
        clerk: Clerk,
        node: str,
        now: Callable[[], float],
        spawn: Spawn,
        trigger: Callable[[str, str], None],
        counters: Counter[str],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._store = store
        self._desk = desk
        self._receipts = receipts
        self._recovery = recovery
        self._clerk = clerk
        self._node = node
        self._now = now
        self._spawn = spawn
        self._trigger = trigger
        self._counters = counters
        self._log = log
        self.repeats = Repeats(store.records, desk, now, counters)
        self._line: asyncio.Queue[Job] = asyncio.Queue()
        self._last: Job | None = None  # whose append has begun
        self._telling: dict[str, dict[Job, None]] = {}  # by request: those whose append has begun, until they are over
        self._jobs: dict[Job, None] = {}  # all that have come and are not over
        self._closed = False
        self._data: OrderedDict[str, tuple[bytes, float]] = OrderedDict()  # by id, lately, and when it was published
        self._data_octets = 0
        self.data_octets = 0  #: of all data in the store, about
        self._sizes: dict[str, int] = {}  # by id
        self._coming: dict[str, bytes] = {}  # on their way into the store
        self._storing: dict[str, asyncio.Future[None]] = {}  # the last write of each
        self._floors: OrderedDict[str, int] = OrderedDict()  # VIN -> messages that are gone for certain

    # -- what is published

    @property
    def cached(self) -> tuple[int, int]:
        """Data in memory: how many, and their bytes."""
        return len(self._data), self._data_octets

    def batch(self, message: Message, *, trigger: bool) -> Handled:
        """A batch; the answer to its publisher."""
        try:
            parsed = batches.parse(message.payload, self._desk.config, trigger=trigger)
        except BadBatchError as error:
            self._counters["batches_refused"] += 1
            return Handled(ReasonCode.PAYLOAD_FORMAT_INVALID, str(error))
        if parsed.extra:
            self._log.info("batch_has_unknown_keys", request_id=parsed.request_id, keys=list(parsed.extra))
        try:
            job = self.submit(parsed, message)
        except StoreFullError as error:
            return Handled(ReasonCode.QUOTA_EXCEEDED, str(error))
        acknowledge_after(message, job.done)
        return Handled(outcome=job.result.answer)

    def submit(self, parsed: Batch, message: Message) -> Job:
        """Take a batch that is right; `StoreFullError` if too many wait."""
        most = self._desk.config.max_queued
        if len(self._jobs) >= most:
            self._counters["batches_refused_queued"] += 1
            raise StoreFullError(f"{most} batches wait for the store (max_queued); send it again later")
        if parsed.batch_id:
            job = Job(parsed, message, self.repeats.moment(), named_of(parsed))
        else:
            job = Job(parsed, message, self._now())
        if self._closed:
            self._end(job, StoreError(UNLOADED))
            return job
        self._jobs[job] = None
        self._line.put_nowait(job)
        return job

    def data(self, message: Message, data_id: str) -> Handled:
        """Data that batches will name."""
        config = self._desk.config
        try:
            batches.check_data_id(data_id)
            batches.check_size(len(message.payload), config)
            batches.data_digests(data_id, message.payload)
        except BadBatchError as error:
            self._counters["data_refused"] += 1
            return Handled(ReasonCode.PAYLOAD_FORMAT_INVALID, str(error))
        size, before = len(message.payload), self._sizes.get(data_id)
        if config.max_data_bytes and self.data_octets + size - (before or 0) > config.max_data_bytes:
            self._counters["data_refused_full"] += 1
            return Handled(
                ReasonCode.QUOTA_EXCEEDED,
                f"data of {self.data_octets} bytes is stored, {config.max_data_bytes} may be (max_data_bytes)",
            )
        self._sizes[data_id] = size
        self.data_octets += size - (before or 0)
        self._coming[data_id] = message.payload  # batches that come behind it find it here
        earlier = self._storing.get(data_id)
        done = asyncio.ensure_future(self._store_data(data_id, message.payload, earlier, before))
        self._storing[data_id] = done
        acknowledge_after(message, done)
        return Handled()

    async def _store_data(
        self, data_id: str, data: bytes, earlier: asyncio.Future[None] | None, before: int | None
    ) -> None:
        """The bytes once by their hash, and under their id; published again, they live longer."""
        if earlier is not None:
            await asyncio.wait([earlier])  # of two with the same id the second is the last
        try:
            await self._put_data(data_id, data)
        except BaseException:
            self.data_octets += (before or 0) - len(data)
            if before is None:
                self._sizes.pop(data_id, None)
            else:
                self._sizes[data_id] = before
            raise
        finally:
            if self._coming.get(data_id) is data:
                del self._coming[data_id]
                self._storing.pop(data_id, None)
        self._counters["data_stored"] += 1

    async def _put_data(self, data_id: str, data: bytes) -> None:
        now = self._now()
        until = now + self._desk.config.data_retention
        known = await self._store.records.get(DATA, data_id, now)
        digest = await self._store.blobs.put(data, now, until)
        if known is not None and _digest_of(known) not in (b"", digest):
            self._counters["data_replaced"] += 1
            self._log.warning("fanout_data_replaced", data_id=data_id)
        record = DataRecord(digest, hashlib.sha1(data, usedforsecurity=False).hexdigest(), len(data), now)
        await self._store.records.put(DATA, data_id, encode(record), until)
        self._remember(data_id, data, now)

    def count_data(self, sizes: dict[str, int]) -> None:
        """What is stored, as somebody has found who looked."""
        self._sizes = sizes | {data_id: len(data) for data_id, data in self._coming.items()}
        self.data_octets = sum(self._sizes.values())

    def _remember(self, data_id: str, data: bytes, since: float) -> None:
        self._forget(data_id)
        self._data[data_id] = data, since
        self._data_octets += len(data)
        while self._data and (len(self._data) > CACHED or self._data_octets > CACHED_OCTETS):
            self._forget(next(iter(self._data)))

    def _forget(self, data_id: str) -> None:
        old = self._data.pop(data_id, None)
        self._data_octets -= len(old[0]) if old is not None else 0

    # -- the end

    @property
    def under_way(self) -> int:
        """Return how many batches are not over."""
        return len(self._jobs)

    async def settle(self) -> None:
        """Wait until the batches and the data that have come by now are stored or refused."""
        for job in list(self._jobs):
            await job.over.wait()
        if self._storing:
            await asyncio.wait(list(self._storing.values()))

    def close(self) -> None:
        """Fail the batches that are not over, and those that still come: their publishers send them again (rule 7)."""
        self._closed = True
        for job in self._jobs:
            if not job.done.done():
                self._end(job, StoreError(UNLOADED))

    # -- the line

    async def run(self) -> None:
        """Begin one append after the other, until cancelled (rule 2)."""
        while True:
            job = await self._line.get()
            try:
                if job.named is not None and not await self.repeats.admit(job, job.named):
                    self._end(job)
                    self._over(job)
                    continue
                data = job.batch.data if job.batch.data is not None else await self._find(job.batch.data_id)
                if job.batch.priority:
                    await self._prioritise()
                await self._use_again(job)
            except MissingDataError as error:
                job.result.refuse(str(error))
                self._end(job)
                self._over(job)
                continue
            except Exception as error:  # noqa: BLE001 - whatever it is, the publisher must not wait for ever
                self._end(job, error if isinstance(error, StoreError) else StoreError(repr(error)))
                self._over(job)
                continue
            entry = self._entry(job)
            self._desk.untold.add(job.guid)
            commit = asyncio.ensure_future(self._append(job, entry, data))
            await asyncio.sleep(0)  # it has begun: what comes later is stored later
            job.before, self._last = self._last, job
            self._telling.setdefault(job.batch.request_id, {})[job] = None
            self._spawn(self._finish(job, entry, data, commit), "batch")

    async def _find(self, data_id: str) -> bytes:
        now = self._now()
        coming = self._coming.get(data_id)
        if coming is not None:
            return coming
        retention = self._desk.config.data_retention
        cached = self._data.get(data_id)
        if cached is not None and now < cached[1] + retention:
            return cached[0]
        value = await self._store.records.get(DATA, data_id, now)
        found: bytes | None = None
        since = 0.0
        try:
            record = decode_data(value) if value is not None else None
            if record is not None and now < record.time + retention:  # it may have been longer when this was stored
                found = await self._store.blobs.get(record.digest, now)
                since = record.time
        except RecordError as error:
            raise StoreError(f"data {data_id!r} cannot be read: {error}") from error
        if found is None:
            self._counters["batches_without_data"] += 1
            shown = data_id if len(data_id) <= 64 else f"{data_id[:64]}…"
            raise MissingDataError(f"there is no data {shown!r}; publish it to $SDV-FANOUT/data/{shown} first")
        self._remember(data_id, found, since)
        return found

    async def _prioritise(self) -> None:
        """From now on the oldest message of a vehicle is not always the next; a collection may find that it is."""
        self._desk.priorities += 1
        if not self._desk.prioritised:
            self._desk.prioritised = True
            try:
                await self._store.records.put(STATE, PRIORITISED, b"1")
            except StoreError:
                self._desk.prioritised = False  # the next one tries again; this one is refused
                raise

    async def _use_again(self, job: Job) -> None:
        """A request that was cancelled is active again; what was accepted before stays withdrawn."""
        request_id = job.batch.request_id
        if self._desk.requests.get(request_id, ACTIVE).state != "cancelled":
            return
        async with self._desk.deciding:
            before = self._desk.requests.get(request_id, ACTIVE)
            if before.state == "cancelled":
                record = msgspec.structs.replace(before, state="active", since=job.now)
                until = job.now + self._desk.config.data_retention
                await self._store.records.put(REQUESTS, request_id, encode(record), until)
                self._desk.requests[request_id] = record

    def _entry(self, job: Job) -> EntryRecord:
        parsed = job.batch
        expires_at = job.now + parsed.expires_in if parsed.expires_in is not None else 0.0
        return EntryRecord(job.guid, parsed.request_id, job.now, expires_at, parsed.priority, job.publisher)

    async def _append(self, job: Job, entry: EntryRecord, data: bytes) -> list[Appended]:
        parsed = job.batch
        key = parsed.request_id.encode() if parsed.mode == "replace" else b""
        draft = Draft(encode(entry), data, key=key)
        batch = StoreBatch()
        batch.put(INTENTS, job.key, encode(job.intent()))  # first: where batches are not atomic it must not be missing
        batch.append([owner_of(vin) for vin in parsed.vins], draft, job.now)
        return (await self._store.write(batch)).appended

    async def _finish(self, job: Job, entry: EntryRecord, data: bytes, commit: asyncio.Future[list[Appended]]) -> None:
        """See to it that the batch ends, whatever happens."""
        try:
            answers, rejected = await self._appended(job, commit)
            await self._write_receipts(job, answers, rejected)
            await job.may_end()
        except Exception as error:  # noqa: BLE001 - whatever it is, the publisher must not wait for ever
            if not isinstance(error, StoreError):
                self._log.exception("fanout_batch_failed", request_id=job.batch.request_id)
            self._end(job, error if isinstance(error, StoreError) else StoreError(repr(error)))
            await job.may_end()
            if not _is_certain(commit):
                await self._recover(job)
        else:
            self._over(job)
            self._end(job)
            self._tell(job, entry, data, answers, rejected)
        finally:
            self._over(job)

    async def _appended(
        self, job: Job, commit: asyncio.Future[list[Appended]]
    ) -> tuple[list[Appended], dict[str, int]]:
        answers = await commit
        return answers, await self._beyond(job.batch.vins, answers)

    def _over(self, job: Job) -> None:
        """Its messages may be sent, and the next batch may end."""
        if job.over.is_set():
            return
        self._jobs.pop(job, None)
        self._desk.untold.discard(job.guid)
        job.before = None
        job.begun.set()
        job.over.set()
        if job.named is not None:
            self.repeats.over(job, job.named)
        others = self._telling.get(job.batch.request_id)
        if others is not None:
            others.pop(job, None)
            if not others:
                del self._telling[job.batch.request_id]

    async def _recover(self, job: Job) -> None:
        """Nobody knows whether its entries are stored: find out, and write the receipts of those that are (rule 3)."""
        job.doubted = True
        self._counters["batches_doubted"] += 1
        vins = job.batch.vins
        while True:
            try:
                found = await self._recovery.complete(job.guid, job.intent(), vins)
                break
            except StoreError as error:
                self._log.warning("fanout_batch_not_completed", request_id=job.batch.request_id, error=str(error))
                await asyncio.sleep(RETRY)
        self._over(job)
        self._desk.drained.difference_update(vins)
        ended = {receipt.delivery_id for receipt in found if receipt.state is State.REPLACED}
        for vin in vins:
            held = self._desk.hold.get(vin)
            if held is not None and held.name in ended:
                self._desk.stored(vin, held.position)
            self._trigger(vin, "batch")

    def _end(self, job: Job, error: Exception | None = None) -> None:
        """The publisher hears of it."""
        if error is None and job.result.repeated:
            self._counters["batches_repeated"] += 1
        elif error is None and not job.result.refusal:
            self._counters["batches"] += 1
            self._counters["targets"] += job.result.accepted
        else:
            self._counters["batches_refused" if error is None else "batches_failed"] += 1
        job.finish(error)

    async def _beyond(self, vins: Sequence[str], answers: list[Appended]) -> dict[str, int]:
        """VIN -> position of messages that are one too many (rule 4)."""
        most = self._desk.config.max_pending
        beyond: dict[str, int] = {}
        if not most or max(answer.position for answer in answers) <= most:
            return beyond
        for vin, answer in zip(vins, answers, strict=True):
            if answer.replaced or answer.position - self._floors.get(vin, 0) <= most:
                continue
            info = await self._store.mailboxes.info(answer.owner)
            self._floors[vin] = info.last - info.entries
            self._floors.move_to_end(vin)
            if len(self._floors) > FLOORS:
                self._floors.popitem(last=False)
            if info.entries > most:
                beyond[vin] = answer.position
        return beyond

    async def _write_receipts(self, job: Job, answers: list[Appended], rejected: dict[str, int]) -> None:
        vins = job.batch.vins
        replaced = [(vin, answer.replaced) for vin, answer in zip(vins, answers, strict=True) if answer.replaced]
        unknown = await self._wait_for(job, replaced) if replaced else []
        await job.may_begin()
        ends = [(*end, State.REPLACED, "reissued") for end in replaced if self._desk.end_entry(*end)]
        if len(ends) < len(replaced):
            await self._clerk.written(set(replaced))  # some have ended otherwise; the intent stays until that is stored
        result = job.result
        result.replaced = len(ends)
        result.rejected = len(rejected)
        result.accepted = len(vins) - len(rejected)
        if job.known is not None:
            result.add(job.known)
        ends += [(*end, State.FAILED, "pending_limit") for end in rejected.items() if self._desk.end_entry(*end)]
        others = [self._receipt(job, *end, State.ACCEPTED) for end in unknown]
        others += [self._receipt(job, *end) for end in ends]
        bound = Bound(entries=self._desk.config.history)
        keep = self.repeats.keep(job, job.named) if job.named is not None else None

        def fill(batch: StoreBatch) -> None:
            if keep is not None:
                keep(batch)  # before anything is removed by which it could be found out
            for receipt in others:
                if receipt.state is not State.ACCEPTED:
                    batch.append([done_of(receipt.vin)], history_draft(receipt, self._desk.config), job.now, bound)
            for vin, position in rejected.items():
                batch.acknowledge(owner_of(vin), [position])
            batch.delete(INTENTS, job.key)

        positions = [answer.position for answer in answers]
        asyncio.get_running_loop().call_soon(job.begun.set)  # as soon as its own commit has begun
        await self._receipts.store(fill, others, Run(vins, positions, job.batch.request_id, job.now))
        if keep is not None and job.known is None:
            self.repeats.count += 1

    async def _wait_for(self, job: Job, replaced: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        """Let batches come first whose entries this one has replaced (rule 5); those that were never told of."""
        vins = {vin for vin, _ in replaced}
        doubted = False
        for other in list(self._telling[job.batch.request_id]):
            if other is job:
                break
            if not vins.isdisjoint(other.batch.vins):
                await other.over.wait()
                doubted = doubted or other.doubted
        while doubted:
            try:
                return await self._recovery.unknown(job.batch.request_id, replaced)
            except StoreError:
                await asyncio.sleep(RETRY)
        return []

    def _receipt(self, job: Job, vin: str, position: int, state: State, reason: str = "") -> Receipt:
        held = self._desk.hold.get(vin)
        return Receipt(
            state=state,
            vin=vin,
            request_id=job.batch.request_id,
            delivery_id=delivery_id(vin, position),
            time=job.now,
            node=self._node,
            attempt=held.attempts if held is not None and held.position == position else 0,
            reason=reason,
        )

    def _tell(
        self, job: Job, entry: EntryRecord, data: bytes, answers: list[Appended], rejected: dict[str, int]
    ) -> None:
        """Vehicles that are there may get it now; one whose message was replaced on its way is free for the next."""
        desk = self._desk
        if not desk.seats and not desk.hold:
            return
        now = self._now()
        for vin, answer in zip(job.batch.vins, answers, strict=True):
            held = desk.hold.get(vin)
            if held is not None and held.position == answer.replaced:
                desk.stored(vin, held.position)
            if vin in desk.seats and vin not in rejected:
                delivery = delivery_of(vin, answer.position, entry, data, desk.config)
                if desk.offer_new(delivery, now):
                    self._counters["trigger_batch"] += 1
                else:
                    self._trigger(vin, "batch")


def _is_certain(commit: asyncio.Future[list[Appended]]) -> bool:
    """Whether nothing of a batch is stored, nor will be."""
    error = commit.exception() if commit.done() and not commit.cancelled() else None
    return isinstance(error, StoreError) and error.certain


def _digest_of(value: bytes) -> bytes:
    try:
        return decode_data(value).digest
    except RecordError:
        return b""
