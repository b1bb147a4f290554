"""One message to a list of vehicles: what the platform publishes to `$SDV-FANOUT`, and the five triggers.

batch         `message.publish` on `$SDV-FANOUT…`: stored, then offered to vehicles that are there
subscribed    the source of a vehicle takes a filter
resumed       the same, when its session is back
acknowledged  the source hears of it; when the receipt is stored, the next one is looked for
heartbeat     `message.publish` on `ecp/{VIN}/online` and `ecp/{VIN}/heartbeat`, from the vehicle itself: a safety net
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, ClassVar, Final, cast

import msgspec

from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.receipt import TOPIC as RECEIPT_TOPIC
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Handled, Stop
from motorcade.extension.metrics import Counts, Measure, Table
from motorcade.extension.plugin import Context, Plugin, hook
from motorcade.extension.sources import Kind, Why
from motorcade.plugins.fanout.clerk import Clerk
from motorcade.plugins.fanout.desk import MOST_ENDED, MOST_GIVEN_BACK, Desk
from motorcade.plugins.fanout.dispatcher import Pool
from motorcade.plugins.fanout.intake import CACHED_OCTETS, Intake
from motorcade.plugins.fanout.ledger import MOST_KNOWN, MOST_OPEN, Ledger
from motorcade.plugins.fanout.metrics import (
    COUNTS,
    DELIVERY_ID_BYTES,
    INFLIGHT_BYTES,
    MEASURES,
    OPEN_BYTES,
    POSITION_BYTES,
    REQUEST_BYTES,
    VEHICLE_BYTES,
)
from motorcade.plugins.fanout.options import FanoutConfig
from motorcade.plugins.fanout.queries import Queries
from motorcade.plugins.fanout.receipts import Receipts
from motorcade.plugins.fanout.record import RecordError, decode_data, decode_request
from motorcade.plugins.fanout.recovery import Recovery
from motorcade.plugins.fanout.service import FanoutService, Parts
from motorcade.plugins.fanout.source import FanoutSource, is_for
from motorcade.plugins.fanout.sweeper import Sweeper
from motorcade.plugins.fanout.tables import (
    DATA,
    DATA_PREFIX,
    INGRESS,
    PRIORITISED,
    RECEIPTS,
    REQUESTS,
    STATE,
    TRIGGER,
    UNSWEPT,
)
from motorcade.plugins.fanout.views import GcView
from motorcade.storage.ports import Store, StoreError

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
        hub = context.hub
        store = self._store = cast("Store", context.store)
        node = hub.node
        self._sweep_now = asyncio.Event()
        self.desk = Desk(config, lambda vin: self.pool.trigger(vin, "acknowledged"))
        self.pool = Pool(store.mailboxes, self.desk, context.counters, hub.now, context.log)
        self.ledger = Ledger(store, config.max_requests, hub.now, context.log, context.counters)
        self.receipts = Receipts(context, node, self.ledger)
        self.clerk = Clerk(self.desk, self.receipts, node, hub.now, self.pool.trigger)
        self.pool.clerk = self.clerk
        self.queries = Queries(store, self.ledger, hub.now)
        self.recovery = Recovery(store, self.desk, self.clerk, self.queries, self.receipts, node, hub.now, context.log)
        self.intake = Intake(
            store,
            self.desk,
            self.receipts,
            self.recovery,
            self.clerk,
            node,
            hub.now,
            context.spawn,
            self.pool.trigger,
            context.counters,
            context.log,
        )
        make = partial(FanoutSource, desk=self.desk, clerk=self.clerk)
        self._kind = Kind(
            "fanout",
            make,
            wants=self._wants,
            multi_topic=True,
            generic=True,
            lingers=True,
            repeats=lambda _, given: self.clerk.repeats(given.tag),
            late=lambda _, given: self.clerk.late(given.tag),
        )
        self.sweeper = Sweeper(store, self.desk, self.pool, self.clerk, self.receipts, hub.now, context.counters)

    async def start(self) -> None:
        streams = self.context.service("streams")
        if streams is not None:
            await streams.open(RECEIPTS, self.context.name)
        await self._restore()
        await self.ledger.load()
        self._keep(self.ledger.run, "ledger")
        await self.recovery.run()
        self._keep(self.clerk.run, "receipts")
        self._keep(self.intake.run, "intake")
        for worker in self.pool.workers:
            self._keep(partial(self.pool.run, worker), "dispatcher")
        self.context.spawn(self._count, "count")
        self._keep(self._collect, "collect")
        self._keep(self._trim, "trim")
        self.context.add_source(self._kind)
        parts = Parts(
            self._store,
            self.context.hub,
            self.desk,
            self.intake,
            self.queries,
            self.sweeper,
            self._collect_once,
            self.context.hub.now,
            self.pool.trigger,
            self._sweep_now.set,
        )
        self.context.offer("fanout", FanoutService(parts))

    def _keep(self, run: Callable[[], Coroutine[Any, Any, None]], part: str) -> None:
        """Run a part until the plugin stops; if it fails by a fault of ours it goes on, since a fleet waits for it."""
        self.context.spawn(run, part)

    async def _restore(self) -> None:
        """What operators have decided, how much data there is, and whether priorities are in use."""
        now = self.context.hub.now()
        async for request_id, value in self._store.records.scan(REQUESTS, now):
            try:
                self.desk.requests[request_id] = decode_request(value)
            except RecordError as error:
                self.context.log.warning("fanout_request_unreadable", request_id=request_id, error=str(error))
        sizes: dict[str, int] = {}
        async for data_id, value in self._store.records.scan(DATA, now):
            with contextlib.suppress(RecordError):
                sizes[data_id] = decode_data(value).size
        self.sweeper.data = sizes
        self.intake.count_data(dict(sizes))
        self.desk.prioritised = await self._store.records.get(STATE, PRIORITISED, now) is not None
        if await self._store.records.get(STATE, UNSWEPT, now) is not None:
            self._sweep_now.set()  # the process before had not ended everything that was called off

    async def _count(self) -> None:
        """Count batch ids and histories: there may be so many of them that nothing should wait for it."""
        try:
            found = await self.sweeper.count_batch_ids()
            if not self.sweeper.batch_ids:  # else a collection was quicker
                self.intake.repeats.count += found
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
                await self.intake.settle()
                await self.clerk.settle()
                await self.ledger.checkpoint()
        except (TimeoutError, StoreError) as error:
            left = {"receipts": self.clerk.unwritten, "batches": self.intake.under_way}
            self.context.log.warning("fanout_stopped_unwritten", error=str(error) or "the store takes too long", **left)
        finally:
            for part in (self.intake, self.clerk, self.ledger):
                part.close()

    async def reload(self, config: FanoutConfig) -> None:
        """New options hold from now on; the number of dispatchers from the next start."""
        before, self.config = self.config, config
        self.desk.config = config
        if config.topic_prefix != before.topic_prefix:
            self.desk.look_again()
            self.context.sources.offer_again(self._kind)
        if config.ack_timeout != before.ack_timeout:
            self.clerk.watch_on()
        self.ledger.max_requests = config.max_requests
        self._sweep_now.set()

    async def _collect(self) -> None:
        pause = min(self.config.gc_interval, FIRST_COLLECTION)
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._sweep_now.wait(), pause)
            self._sweep_now.clear()
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
        self.intake.count_data(dict(self.sweeper.data))
        self.intake.repeats.count = self.sweeper.batch_ids
        self.ledger.forget_ended(self.context.hub.now() - self.config.receipts_retention)
        return found

    async def _trim(self) -> None:
        """Receipts that are old go."""
        while True:
            before = self.context.hub.now() - self.config.receipts_retention
            try:
                removed = TRIM_STEP
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
        """A batch, or data for one; nobody else gets it."""
        if isinstance(message, Handled):
            return None
        topic = message.topic
        if topic in (INGRESS, TRIGGER):
            return Stop(self.intake.batch(message, trigger=topic == TRIGGER))
        if topic.startswith(DATA_PREFIX):
            return Stop(self.intake.data(message, topic[len(DATA_PREFIX) :]))
        if client is None and topic.startswith(f"{RECEIPT_TOPIC}/"):
            return None  # our own
        reason = f"nobody may publish to {topic[:64]}; there are {INGRESS}, {TRIGGER} and {DATA_PREFIX}…"
        return Stop(Handled(ReasonCode.NOT_AUTHORIZED, reason))

    @hook("message.publish", topics=("ecp/+/online", "ecp/+/heartbeat"))
    def on_heartbeat(self, client: ClientInfo | None, message: Message | Handled) -> None:
        """A vehicle says that it is there; the message goes its way."""
        if isinstance(message, Handled) or client is None:
            return
        vin = message.topic.split("/", 2)[1]
        if vin == client.client_id:
            self.pool.trigger(vin, "heartbeat")

    # -- sessions

    @hook("session.terminated")
    def on_terminated(self, client: ClientInfo, why: str) -> None:  # noqa: ARG002 - whatever it was
        """What it had in flight is pending again."""
        self._session_over(client.client_id)

    @hook("session.discarded")
    def on_discarded(self, client: ClientInfo) -> None:
        """Likewise."""
        self._session_over(client.client_id)

    def _session_over(self, vin: str) -> None:
        delivery = self.desk.session_over(vin)
        if delivery is not None:
            self.clerk.session_over(delivery)

    def tables(self) -> Iterable[Table]:
        desk, ledger, intake = self.desk, self.ledger, self.intake
        ended, known, attempts = len(desk.ended), ledger.known, len(desk.attempts)
        yield Table("fanout_vehicles", len(desk.seats), len(desk.seats) * VEHICLE_BYTES)
        yield Table("fanout_inflight", len(desk.hold), len(desk.hold) * INFLIGHT_BYTES)
        most = self.config.max_requests
        yield Table("fanout_requests", len(ledger), len(ledger) * REQUEST_BYTES, most * REQUEST_BYTES)
        yield Table("fanout_sent", ledger.open, ledger.open * OPEN_BYTES, MOST_OPEN * OPEN_BYTES)
        yield Table("fanout_ended", ended, ended * POSITION_BYTES, 2 * MOST_ENDED * POSITION_BYTES)
        yield Table("fanout_counted", known, known * DELIVERY_ID_BYTES, 2 * MOST_KNOWN * DELIVERY_ID_BYTES)
        yield Table("fanout_given_back", attempts, attempts * POSITION_BYTES, MOST_GIVEN_BACK * POSITION_BYTES)
        yield Table("fanout_data_cache", intake.cached[0], intake.cached[1], CACHED_OCTETS)

    def history(self) -> int:
        """Return how many final receipts the histories of vehicles have."""
        return self.receipts.finished

    def gauges(self) -> dict[str, float]:
        """What is going on now."""
        return {
            "fanout_vehicles": len(self.desk.seats),
            "fanout_in_flight": len(self.desk.hold),
            "fanout_pending": self.ledger.pending,
            "fanout_receipts_unwritten": self.clerk.unwritten,
            "fanout_requests": len(self.ledger),
            "fanout_batch_ids": self.intake.repeats.count,
        }
