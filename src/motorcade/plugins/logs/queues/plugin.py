"""The plugin: append what is published, let clients subscribe, offer the queues to operators.

It listens to `message.publish` only for the topics that queues are bound to, after all plugins that may change the
message. What is appended is routed as well. While no queue is declared, it costs nothing.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, cast

import msgspec

from motorcade.core.client import ClientInfo
from motorcade.core.errors import PluginError
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.core.topic import SHARE
from motorcade.delivery.record import RecordError
from motorcade.extension.declared import BadNameError, check_name
from motorcade.extension.hooks import Continue, Handled, Stop, Verdict, acknowledge_after
from motorcade.extension.metrics import Counts, Family, Measure, Table, by_name
from motorcade.extension.plugin import Context, Plugin, hook
from motorcade.extension.sources import SourceType
from motorcade.plugins.logs.queues.members import QueueMembers
from motorcade.plugins.logs.queues.metrics import BY_QUEUE, COUNTS, MEASURES, ROUTE_BYTES
from motorcade.plugins.logs.queues.options import NOUN, QueuesConfig
from motorcade.plugins.logs.queues.queue import Queue
from motorcade.plugins.logs.queues.record import QUEUE
from motorcade.plugins.logs.queues.service import MAX_ROUTES, QueueService
from motorcade.plugins.logs.queues.source import QueueSource
from motorcade.plugins.logs.queues.store import QueueAppend, QueueStore
from motorcade.plugins.logs.queues.tables import PREFIX, mailbox_of
from motorcade.storage.ports import Store, StoreError, StoreFullError

SERVICE: Final = "queues"
LATE: Final = -900  #: priority on `message.publish`: after all that may change the message, before retained
EARLY: Final = 900  #: priority of the refusal of what no client may publish
#: Counted from the start, so that their series are there before it happens.
EVENTS: Final = (
    "appended",
    "delivered",
    "acknowledged",
    "refused",
    "redispatched",
    "timed_out",
    "dead_lettered",
    "dead_dropped",
    "expired",
    "dropped",
    "refused_full",
    "refused_pending",
    "refused_queues",
)

Wanted = Subscription | ReasonCode | Verdict


class QueuesPlugin(Plugin):
    """Keeps messages for consumers that share them."""

    Config: ClassVar[type[msgspec.Struct]] = QueuesConfig
    description: ClassVar[str] = "named queues: each message goes to one of the clients that consume $queue/NAME"
    counts: ClassVar[tuple[Counts, ...]] = COUNTS
    measures: ClassVar[tuple[Measure, ...]] = MEASURES

    config: QueuesConfig

    def __init__(self, context: Context, config: QueuesConfig) -> None:
        super().__init__(context, config)
        for event in EVENTS:
            context.counters[event] += 0
        store = cast("Store", context.store)  # or none: then it does not start
        self._store = QueueStore(store, context.counters, context.log, context.hub.now, context.spawn)
        self._queues = QueueService(self._store, config.max_queues, self._bind)
        self._bound: tuple[str, ...] = ()
        self._members: QueueMembers | None = None

    async def start(self) -> None:
        context = self.context
        if context.store is None:
            raise PluginError("queues need a store, and this node has none")
        if context.cluster is not None:
            self._members = QueueMembers(context.cluster, self._queues, context.spawn)
            self._queues.members = self._members
            self._members.start(context.at_end)
            context.spawn(self._members.look_again, "look")
        await self._queues.load(self.config.queue)
        if self._members is not None:
            self._members.follow(context.at_end)
        context.add_source(SourceType("queue", self._source, prefix=PREFIX, multi_topic=True, release=True))
        context.offer(SERVICE, self._queues)
        context.spawn(self._sweep, "sweep")

    async def stop(self) -> None:
        """Store what was acknowledged and counted. Nothing is published or consumed any more."""
        for queue in self._queues:
            queue.set_timer(None)
        if self._members is not None and self._members.claims:
            for queue in list(self._queues):
                queue.close()
            await asyncio.sleep(0)  # what they give back is on its way
            for queue in self._queues:
                await queue.settle()
        await self._store.close()

    async def reload(self, config: QueuesConfig) -> None:
        """Take declarations and bounds of the configuration; on any error everything stays as it was."""
        self._queues.max_queues = config.max_queues
        try:
            await self._queues.reload(config.queue)
        except BaseException:
            self._queues.max_queues = self.config.max_queues
            raise
        self.config = config

    def gauges(self) -> Mapping[str, float]:
        figures = {event: sum(by_queue.values()) for event, by_queue in self._figures().items()}
        return {"queues": len(self._queues), **figures, "queue_pending": self._store.pending}

    def metrics(self) -> Iterable[Family]:
        for figure, by_queue in self._figures().items():
            yield by_name(*BY_QUEUE[figure], "queue", by_queue)

    def _figures(self) -> dict[str, dict[str, float]]:
        queues = list(self._queues)
        return {
            "queue_consumers": {queue.name: len(queue.dispatcher.consumers) for queue in queues},
            "queue_inflight": {queue.name: queue.dispatcher.inflight for queue in queues},
            "queue_messages": {queue.name: queue.size[0] for queue in queues},
            "queue_bytes": {queue.name: queue.size[1] for queue in queues},
        }

    def tables(self) -> Iterable[Table]:
        routes = len(self._queues.routes)
        yield Table("queue_routes", routes, routes * ROUTE_BYTES, MAX_ROUTES * ROUTE_BYTES)

    def _source(self, feed: Any) -> QueueSource:
        return QueueSource(feed, self._queues)

    async def _sweep(self) -> None:
        """Remove what is too old, a bounded number at a time, one queue after the other."""
        after = ""
        while True:
            await asyncio.sleep(self.config.sweep_interval)
            try:
                after = await self.sweep(after, self.config.sweep_budget)
            except StoreError as error:
                self.context.log.warning("queues_not_swept", error=str(error))

    async def sweep(self, after: str, budget: int) -> str:
        """Look at up to so many messages of the queues that come after a name; the name to go on after."""
        names = [queue.name for queue in self._queues]
        turn = bisect_right(names, after)
        for name in (*names[turn:], *names[:turn]):
            queue = self._queues.get(name)
            if queue is not None and not self._sweeps(queue):
                await queue.refresh()  # others append and remove, too
            elif queue is not None:
                budget -= await queue.sweep(self.context.hub.now(), budget)
            after = name
            if budget <= 0:
                break
        return after

    def _sweeps(self, queue: Queue) -> bool:
        """Return True if this member removes what is too old of a queue."""
        cluster = self.context.cluster
        return cluster is None or cluster.is_steward(self._queues.store.feeds.feed_of(mailbox_of(queue.name)))

    # -- publishers

    def _bind(self) -> None:
        """Listen to what queues are bound to now."""
        bound = tuple(sorted(self._queues.filters()))
        if bound == self._bound:
            return
        self._bound = bound
        if bound:
            self.context.add_hook("message.publish", self.on_publish, priority=LATE, topics=bound)
        else:
            self.context.remove_hook("message.publish", self.on_publish)

    def on_publish(self, _client: ClientInfo | None, message: Message | Handled) -> Stop | None:
        """Append a message to the queues of its topic; its publisher is answered when it is stored."""
        if isinstance(message, Handled):
            return None
        queues = self._queues.match(message.topic)
        if not queues:
            return None
        waits = message.qos > 0
        try:
            appends = self._prepare(message, queues)
        except StoreFullError as error:
            return Stop(Handled(ReasonCode.QUOTA_EXCEEDED, str(error))) if waits else None
        except RecordError as error:
            self.context.counters["unstorable"] += 1
            return Stop(Handled(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, str(error))) if waits else None
        if appends:
            taken = self._store.append(appends)
            if waits:
                acknowledge_after(message, taken, taken=True)
        return None

    def _prepare(self, message: Message, queues: Sequence[Queue]) -> list[QueueAppend]:
        """Return the appends of a message: to all of its queues or to none, so that it can be sent again.

        The publisher of QoS 0 hears nothing, so that goes where there is room.
        """
        store, counters = self._store, self.context.counters
        if store.pending + len(queues) > self.config.max_pending:
            counters["refused_pending"] += 1
            raise StoreFullError(f"{store.pending} messages wait for the store already (max_pending)")
        body, payload = QUEUE.encode(message)
        appends: list[QueueAppend] = []
        for queue in queues:
            try:
                appends.append(queue.prepare(message, body, payload, beside=len(queues) > 1))
            except StoreFullError:
                counters["refused_full"] += 1
                if message.qos:
                    raise
        return appends

    @hook("message.publish", priority=EARLY, topics=(f"{PREFIX}#",))
    def on_publish_directly(self, _client: ClientInfo | None, message: Message | Handled) -> Stop | None:
        """Refuse messages to a queue's own name: they reach it by the topics it is bound to, and by no other way."""
        if isinstance(message, Handled):
            return None
        return Stop(
            Handled(
                ReasonCode.TOPIC_NAME_INVALID,
                f"nothing can be published to {PREFIX}…: publish to a topic that the queue is bound to",
            )
        )

    # -- consumers

    @hook("client.subscribe")
    def on_subscribe(self, _client: ClientInfo, _properties: object, wanted: list[Wanted]) -> Continue | None:
        """Refuse what cannot be a queue; say so if there is none yet."""
        answers = [self._judge(one) for one in wanted]
        return Continue(answers) if any(a is not b for a, b in zip(answers, wanted, strict=True)) else None

    def _judge(self, wanted: Wanted) -> Wanted:
        subscription = wanted.outcome if isinstance(wanted, Verdict) else wanted
        if not isinstance(subscription, Subscription) or "$queue" not in subscription.filter:
            return wanted
        filter_ = subscription.filter
        if filter_.startswith(f"{SHARE}/"):
            inner = filter_.split("/", 2)[-1]
            if inner.startswith(PREFIX) or inner == PREFIX[:-1]:
                return Verdict(
                    ReasonCode.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED,
                    f"a queue is shared by all who subscribe to it: subscribe to {inner}",
                )
            return wanted
        if not filter_.startswith(PREFIX):
            if filter_ == PREFIX[:-1]:
                return Verdict(ReasonCode.TOPIC_FILTER_INVALID, f"a queue is consumed by {PREFIX}NAME")
            return wanted
        name = filter_.removeprefix(PREFIX)
        try:
            check_name(NOUN, name)
        except BadNameError as error:
            return Verdict(ReasonCode.TOPIC_FILTER_INVALID, f"{error}; a queue is consumed by {PREFIX}NAME")
        granted = replace(subscription, qos=1) if subscription.qos > 1 else subscription
        if self._queues.get(name) is None:
            return Verdict(granted, f"there is no queue {name!r} yet; messages come when it is declared")
        return wanted if granted is subscription else granted
