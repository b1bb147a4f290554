"""One message to a list of vehicles: batches that are published to `$SDV-FANOUT`, and the five triggers.

batch         `message.publish` on `$SDV-FANOUT…`: stored, then offered to vehicles that are there
subscribed    the source of a vehicle takes a filter
resumed       the same, when its session is back
acknowledged  the source hears of it; when the receipt is stored, the next one is looked for
heartbeat     `message.publish` on `ecp/{VIN}/online` and `ecp/{VIN}/heartbeat`, from the vehicle itself: a safety net
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from functools import partial
from typing import ClassVar, Final

import msgspec

from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.receipt import TOPIC as RECEIPT_TOPIC
from motorcade.core.record import RecordError
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Handled, Stop
from motorcade.extension.metrics import Counts, Measure, Table
from motorcade.extension.plugin import Context, Plugin, hook
from motorcade.extension.sources import SourceType, Why
from motorcade.plugins.fanout.counters import MAX_KNOWN, MAX_OPEN
from motorcade.plugins.fanout.dispatcher import Dispatcher
from motorcade.plugins.fanout.inflight import MAX_ENDED, MAX_RELEASED
from motorcade.plugins.fanout.ingress import Ingress
from motorcade.plugins.fanout.members import MAX_TOLD
from motorcade.plugins.fanout.metrics import (
    COUNTS,
    DELIVERY_ID_BYTES,
    GUID_BYTES,
    INFLIGHT_BYTES,
    MEASURES,
    OPEN_BYTES,
    POSITION_BYTES,
    REQUEST_BYTES,
    VEHICLE_BYTES,
)
from motorcade.plugins.fanout.options import FanoutConfig
from motorcade.plugins.fanout.outbox import Outbox
from motorcade.plugins.fanout.parts import Parts
from motorcade.plugins.fanout.payloads import CACHED_BYTES
from motorcade.plugins.fanout.record import RequestRecord, decode_data
from motorcade.plugins.fanout.recovery import Recovery
from motorcade.plugins.fanout.service import FanoutService
from motorcade.plugins.fanout.source import VehicleSource, is_for
from motorcade.plugins.fanout.steward import FanoutSteward
from motorcade.plugins.fanout.sweeper import Sweeper
from motorcade.plugins.fanout.tables import (
    DATA,
    DATA_PREFIX,
    INGRESS,
    RECEIPTS,
    STATE,
    TRIGGER,
    UNSWEPT,
    mark_of,
    owner_of,
)
from motorcade.plugins.fanout.views import GcView
from motorcade.storage.ports import Batch, StoreError

TAKING: Final = 500  #: priority on `message.publish`: after those who may refuse, before those who keep
FIRST_COLLECTION: Final = 1800.0  #: seconds after the start, at most
LAST_WRITES: Final = 10.0  #: seconds, when the plugin stops, for batches and receipts that are not stored yet
COLLECT_AGAIN: Final = 30.0  #: seconds after a collection that the store has cut short
TRIM_STEP: Final = 1000  #: receipts removed at once
TRIM_EVERY: Final = 60.0  #: seconds


class FanoutPlugin(Plugin):
    """Fans messages out to vehicles, one at a time each, and tells what became of every one."""

    Config: ClassVar[type[msgspec.Struct]] = FanoutConfig
    description: ClassVar[str] = "one message to a list of vehicles, with a receipt for every change of state"
    counts: ClassVar[tuple[Counts, ...]] = COUNTS
    measures: ClassVar[tuple[Measure, ...]] = MEASURES
    at_start: ClassVar[tuple[str, ...]] = ("dispatchers",)

    config: FanoutConfig

    def __init__(self, context: Context, config: FanoutConfig) -> None:
        super().__init__(context, config)
        parts = self._parts = Parts(context, config, self._decided)
        self._store = parts.store
        self.table = parts.table
        self.counters = parts.counters
        self.receipts = parts.receipts
        self.dispatcher = Dispatcher(parts)
        self.recovery = Recovery(parts)
        self.ingress = Ingress(parts, self.recovery)
        self.sweeper = Sweeper(parts, self.dispatcher)
        self._collect_now = asyncio.Event()
        self._kind = SourceType(
            "fanout",
            partial(VehicleSource, table=parts.table, attempts=parts.attempts),
            wants=self._wants,
            multi_topic=True,
            generic=True,
            lingers=True,
            repeats=lambda _, given: parts.attempts.repeats(given.tag),
            late=lambda _, given: parts.attempts.late(given.tag),
        )

    async def start(self) -> None:
        streams = self.context.service("streams")
        if streams is not None:
            await streams.open(RECEIPTS, self.context.name)
        await self._restore()
        spawn = self.context.spawn  # what fails by a fault of ours goes on, since a fleet waits for it
        members, role = self._parts.members, self._parts.role
        if members is None or role is None:
            await Outbox(self.context, None, self.table, self.receipts).tell_left()  # of a cluster before
            await self.counters.load()
            spawn(self.counters.run, "counters")
            await self.recovery.run()
        else:
            members.start(self._parts.hinted, self._members_changed)
            self._parts.decisions.follow()
            role.start()
            assert self.receipts.outbox is not None  # noqa: S101 - as there are members
            spawn(FanoutSteward(self.context, members, self.recovery, self.receipts.outbox).run, "steward")
            self.ingress.start()
            self.sweeper.start()
        spawn(self.ingress.run, "ingress")
        for queue in self._parts.triggers.queues:
            spawn(partial(self.dispatcher.run, queue), "dispatcher")
        spawn(self._count, "count")
        spawn(self._collect, "collect")
        spawn(self._trim, "trim")
        self.context.add_source(self._kind)
        service = FanoutService(self._parts, self.ingress, self.sweeper, self._collect_once)
        service.start()
        self.context.offer("fanout", service)

    def _members_changed(self, has_gone: bool) -> None:
        """Look once at all vehicles when a member has gone: its hints may not have come (`members`, rule 1)."""
        cluster = self.context.cluster
        self.table.rely(alone=cluster is None or not cluster.peers)
        if has_gone:
            for vin in list(self.table.sources):
                self._parts.triggers.trigger(vin, "member_gone")

    def _decided(self, record: RequestRecord) -> None:
        """Do what follows from a decision about a request."""
        if record.state == "cancelled":
            self._collect_now.set()
        elif record.state == "active":
            for vin in list(self.table.sources):
                self._parts.triggers.trigger(vin, "resumed_request")

    async def _restore(self) -> None:
        """Read what operators have decided, how much data there is, and whether priorities are in use."""
        now = self.context.hub.now()
        await self._parts.decisions.load()
        sizes: dict[str, int] = {}
        async for data_id, value in self._store.records.scan(DATA, now):
            with contextlib.suppress(RecordError):
                sizes[data_id] = decode_data(value).size
        self.sweeper.data = sizes
        self.ingress.payloads.count(dict(sizes))
        if await self._store.records.get(STATE, UNSWEPT, now) is not None:
            self._collect_now.set()  # the process before had not ended everything that was called off

    async def _count(self) -> None:
        """Count batch ids and histories: there may be so many of them that nothing should wait for it."""
        try:
            found = await self.sweeper.count_batch_ids()
            if not self.sweeper.batch_ids:  # else a collection was quicker
                self.ingress.dedup.count += found
            await self.sweeper.count_history()
        except StoreError as error:
            self.context.log.warning("fanout_batch_ids_not_counted", error=str(error))  # the next collection does it

    async def stop(self) -> None:
        """Write down what has happened, as far as the store takes it in `LAST_WRITES` seconds.

        What is left is repeated after the next start: vehicles get a message again whose last receipt is not stored,
        counts are made from the receipts, and publishers send their batches again.
        """
        try:
            async with asyncio.timeout(LAST_WRITES):
                await self.ingress.settle()
                await self.receipts.settle()
                if self.receipts.outbox is not None:
                    await self.receipts.outbox.settle()
                if self._parts.role is not None:
                    await self._parts.role.stop()
                else:
                    await self.counters.checkpoint()
        except (TimeoutError, StoreError) as error:
            left = {"receipts": self.receipts.unwritten, "batches": self.ingress.under_way}
            self.context.log.warning("fanout_stopped_unwritten", error=str(error) or "the store takes too long", **left)
        finally:
            for part in (self.ingress, self._parts.attempts, self.receipts, self.counters):
                part.close()

    async def reload(self, config: FanoutConfig) -> None:
        """Go by new options from now on; by the number of dispatchers from the next start."""
        before, self.config = self.config, config
        self.table.config = config
        if config.topic_prefix != before.topic_prefix:
            for source in list(self.table.sources.values()):
                source.look_again()
            self.context.sources.offer_again(self._kind)
        if config.ack_timeout != before.ack_timeout:
            self._parts.attempts.watch_all()
        self.counters.max_requests = config.max_requests
        self._collect_now.set()

    async def _collect(self) -> None:
        pause = min(self.config.gc_interval, FIRST_COLLECTION)
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._collect_now.wait(), pause)
            self._collect_now.clear()
            pause = self.config.gc_interval
            await self.sweeper.idle.wait()  # an operator's has perhaps passed what this one is for
            try:
                found = await self._collect_once()
                self.context.log.info("fanout_collected", **msgspec.structs.asdict(found))
            except StoreError as error:
                self.context.log.warning("fanout_not_collected", error=str(error))
                pause = min(pause, COLLECT_AGAIN)

    async def _collect_once(self) -> GcView:
        """Collect what is over, and let the limits of data and batch ids know what is left."""
        found = await self.sweeper.collect()
        self.ingress.payloads.count(dict(self.sweeper.data))
        self.ingress.dedup.count = self.sweeper.batch_ids
        self.counters.forget_ended(self.context.hub.now() - self.config.receipts_retention)
        return found

    async def _trim(self) -> None:
        """Remove old receipts."""
        cluster = self.context.cluster
        while True:
            before = self.context.hub.now() - self.config.receipts_retention
            is_ours = cluster is None or cluster.is_steward(self._store.feeds.feed_of(RECEIPTS))
            try:
                removed = TRIM_STEP if is_ours else 0
                while removed >= TRIM_STEP:
                    removed = (await self._store.streams.trim(RECEIPTS, before=before, budget=TRIM_STEP)).removed
                    self.context.counters["receipts_trimmed"] += removed
            except StoreError as error:
                self.context.log.warning("receipts_not_trimmed", error=str(error))
            await asyncio.sleep(TRIM_EVERY)

    def _wants(self, client: ClientInfo, subscription: Subscription, why: Why) -> bool:  # noqa: ARG002 - each time
        return is_for(client.client_id, subscription.filter, self.config)

    # -- what is published

    @hook("message.publish", priority=TAKING, topics=(INGRESS, f"{INGRESS}/#"))
    def on_ingress(self, client: ClientInfo | None, message: Message | Handled) -> Stop | None:
        """Take a batch, or data for one; it goes no further."""
        if isinstance(message, Handled):
            return None
        topic = message.topic
        if topic in (INGRESS, TRIGGER):
            return Stop(self.ingress.publish(message, trigger=topic == TRIGGER))
        if topic.startswith(DATA_PREFIX):
            return Stop(self.ingress.payloads.publish(message, topic[len(DATA_PREFIX) :]))
        if client is None and topic.startswith(f"{RECEIPT_TOPIC}/"):
            return None  # our own
        reason = f"no client may publish to {topic[:64]}; there are {INGRESS}, {TRIGGER} and {DATA_PREFIX}…"
        return Stop(Handled(ReasonCode.NOT_AUTHORIZED, reason))

    @hook("message.publish", topics=("ecp/+/online", "ecp/+/heartbeat"))
    def on_heartbeat(self, client: ClientInfo | None, message: Message | Handled) -> None:
        """Look for messages of a vehicle that says it is there; its own message goes its way."""
        if isinstance(message, Handled) or client is None:
            return
        vin = message.topic.split("/", 2)[1]
        if vin == client.client_id:
            self._parts.triggers.trigger(vin, "heartbeat")

    # -- sessions

    @hook("session.terminated")
    def on_terminated(self, client: ClientInfo, why: str) -> None:  # noqa: ARG002 - whatever it was
        """Make what it had in flight pending again."""
        self._parts.attempts.session_over(client.client_id)

    @hook("session.discarded")
    def on_discarded(self, client: ClientInfo) -> None:
        """Do the same."""
        self._parts.attempts.session_over(client.client_id)

    @hook("session.left")
    def on_left(self, client: ClientInfo) -> None:
        """Forget what it has in flight: the node that it goes to sends it again."""
        left = self._parts.attempts.session_left(client.client_id)
        if left is not None:
            position, attempts = left
            batch = Batch()
            batch.mark(owner_of(client.client_id), position, mark_of(attempts))
            self.context.hub.under_way(client.client_id, self._store.write(batch))

    def tables(self) -> Iterable[Table]:
        table, counters, cached = self.table, self.counters, self.ingress.payloads.cached
        ended, known, attempts = len(table.ended), counters.known, len(table.attempts)
        yield Table("fanout_vehicles", len(table.sources), len(table.sources) * VEHICLE_BYTES)
        yield Table("fanout_inflight", len(table.inflight), len(table.inflight) * INFLIGHT_BYTES)
        most = self.config.max_requests
        yield Table("fanout_requests", len(counters), len(counters) * REQUEST_BYTES, most * REQUEST_BYTES)
        yield Table("fanout_sent", counters.open, counters.open * OPEN_BYTES, MAX_OPEN * OPEN_BYTES)
        yield Table("fanout_ended", ended, ended * POSITION_BYTES, 2 * MAX_ENDED * POSITION_BYTES)
        yield Table("fanout_counted", known, known * DELIVERY_ID_BYTES, 2 * MAX_KNOWN * DELIVERY_ID_BYTES)
        yield Table("fanout_given_back", attempts, attempts * POSITION_BYTES, MAX_RELEASED * POSITION_BYTES)
        if self._parts.members is not None:
            told = len(self._parts.members.told)
            yield Table("fanout_told", told, told * GUID_BYTES, 2 * MAX_TOLD * GUID_BYTES)
        yield Table("fanout_data_cache", cached[0], cached[1], CACHED_BYTES)

    def history(self) -> int:
        """Return how many final receipts the histories of vehicles have."""
        return self.receipts.finished

    def gauges(self) -> dict[str, float]:
        """Return what is going on now."""
        return {
            "fanout_vehicles": len(self.table.sources),
            "fanout_in_flight": len(self.table.inflight),
            "fanout_pending": self.counters.pending,
            "fanout_receipts_unwritten": self.receipts.unwritten,
            "fanout_requests": len(self.counters),
            "fanout_batch_ids": self.ingress.dedup.count,
        }
