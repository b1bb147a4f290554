"""Keep retained messages, and give them to subscribers.

The hook `message.publish` runs with the lowest priority in use (`LAST`), because it must keep the message as other
plugins leave it: a rewritten topic, a changed payload, a dropped message. A plugin that ends the chain before it
(`Stop`, `STOP`, `Handled`) decides against keeping too. It never changes or holds up a message: one that cannot be kept
is routed all the same.

With a store that outlives the node, every change is written to it (`store`), and a publisher with QoS 1 or 2 is
answered when the store has it. Topics below `$SYS` are not stored: figures of a node end with it.

With several nodes the changes of all of them come by the feeds of the store (`feed`), and change the index then.

A subscriber gets the messages by a source (`source`), which reads them as the client's window has room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Final, cast

import msgspec

from motorcade.commit import Commit
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.core.topic import SHARE, check_filter
from motorcade.extension.cluster import Cluster
from motorcade.extension.hooks import Handled, acknowledge_after
from motorcade.extension.metrics import Counts, Measure, Table
from motorcade.extension.plugin import Context, Plugin, hook
from motorcade.extension.sources import SourceType, Why
from motorcade.plugins.retained.feed import CODE, RetainedFeed
from motorcade.plugins.retained.index import Index, RetainedRefusal
from motorcade.plugins.retained.metrics import COUNTS, LEVEL_BYTES, MEASURES, MESSAGE_BYTES
from motorcade.plugins.retained.source import Messages, Rate, RetainedSource
from motorcade.plugins.retained.store import RetainedStore
from motorcade.storage.ports import Store, StoreFullError

LAST: Final = -1000  #: priority on `message.publish`: after all that may change or drop the message
STOP_TIMEOUT: Final = 10.0  #: seconds that the end of the plugin waits for writes in flight
UNSTORED: Final = "$SYS/"  #: topics below are not stored

Count = Annotated[int, msgspec.Meta(ge=0)]


class RetainedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds of retained messages. 0 lifts a bound. A message beyond one is routed but not kept."""

    max_messages: Count = 100_000  #: topics with a retained message
    max_payload: Count = 1024 * 1024  #: bytes of one payload
    max_bytes: Count = 256 * 1024 * 1024  #: bytes of all topics, payloads and properties together
    delivery_rate: Count = 0  #: messages per second that all subscribers together are sent; 0 is any number
    sweep_interval: Annotated[float, msgspec.Meta(gt=0)] = 1.0  #: seconds between two looks for expired messages
    sweep_budget: Annotated[int, msgspec.Meta(ge=1)] = 1000  #: messages looked at each time


class RetainedPlugin(Plugin):
    """Keeps the last message of each topic that was published with the retain flag."""

    Config: ClassVar[type[msgspec.Struct]] = RetainedConfig
    description: ClassVar[str] = "keeps the last retained message of each topic for later subscribers"
    counts: ClassVar[tuple[Counts, ...]] = COUNTS
    measures: ClassVar[tuple[Measure, ...]] = MEASURES

    config: RetainedConfig

    def __init__(self, context: Context, config: RetainedConfig) -> None:
        super().__init__(context, config)
        self._index = Index(config.max_messages, config.max_payload, config.max_bytes)
        self._rate = Rate(config.delivery_rate)
        self._messages = Messages(self._index, self._rate, context.hub.now, UNSTORED)
        self._store: RetainedStore | None = None  #: of a lone node; None if nothing outlives it
        self._shared: RetainedFeed | None = None  #: of a node that is one of several

    async def start(self) -> None:
        store, context = cast("Store | None", self.context.store), self.context
        if store is not None and context.cluster is not None:
            self._follow(store, context.cluster)
        elif store is not None and (await store.figures()).engine != "memory":
            self._store = RetainedStore(store, self._index, context.counters, context.log, context.hub.now)
            await self._store.load()
        self.context.spawn(self._sweep, "sweep")
        make = partial(RetainedSource, messages=self._messages)
        self.context.add_source(SourceType("retained", make, wants=self._wants, renew=True, retained=True))

    def _follow(self, store: Store, cluster: Cluster) -> None:
        """Follow what all members retain."""
        context = self.context
        shared = RetainedFeed(cluster, store, self._index, context.counters, context.log, context.hub.now)
        self._shared = self._messages.shared = shared
        context.at_end(cluster.on_note(CODE, shared.handle, shared.reload))
        context.spawn(shared.look, "look")
        context.spawn(shared.read, "read")

    async def stop(self) -> None:
        """Wait until what was published is stored, so that it is there when the plugin is loaded again."""
        store = self._shared or self._store
        if store is None:
            return
        try:
            await asyncio.wait_for(store.settle(), STOP_TIMEOUT)
        except TimeoutError:  # the store goes on with them
            self.context.log.warning("retained_stopped_unwritten", topics=store.unwritten)

    async def reload(self, config: RetainedConfig) -> None:
        """Take new bounds for messages to come; those that are kept already stay."""
        self.config = config
        self._index.max_messages = config.max_messages
        self._index.max_payload = config.max_payload
        self._index.max_bytes = config.max_bytes
        self._rate.per_second = config.delivery_rate

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.config.sweep_interval)
            self._count_expired(self._index.sweep(self.context.hub.now(), self.config.sweep_budget))
            if self._shared is not None:
                self._shared.tidy()

    def _count_expired(self, gone: int) -> None:
        if gone:
            self.context.counters["expired"] += gone

    # -- publishing

    @hook("message.publish", priority=LAST, retained_only=True)
    def on_publish(self, _client: ClientInfo | None, message: Message | Handled) -> None:
        """Keep the message, or delete the old one if it is empty."""
        if isinstance(message, Handled) or not message.retain:  # another plugin may have taken the flag away
            return
        if self._shared is not None and not message.topic.startswith(UNSTORED):
            # Also at QoS 0: a client that moves to another member publishes there when this is over.
            acknowledge_after(message, self._share(self._shared, message))
            return
        store = self._store_of(message.topic)
        if store is None:
            self._keep(message)
            return
        commit: Commit[Any] | None
        if store.has_room(message.topic):
            commit = store.write(message.topic, *self._keep(message))
        else:
            self.context.counters["refused_uncommitted"] += 1
            commit = Commit.failed(StoreFullError("too much waits for the store already to retain a message"))
        if commit is not None and message.qos:
            acknowledge_after(message, commit)

    def _share(self, shared: RetainedFeed, message: Message) -> Commit[Any]:
        """Have all members keep a message, or delete the old one if it is empty or does not fit."""
        if not shared.has_room(message.topic):
            self.context.counters["refused_uncommitted"] += 1
            return Commit.failed(StoreFullError("too much waits for the store already to retain a message"))
        if not message.payload:
            return shared.change(message.topic, None)
        refusal = shared.refuses(message, self.config.sweep_budget)
        if refusal is None:
            return shared.change(message.topic, _without_headers(message))
        self._count_refused(message, refusal)
        return shared.change(message.topic, None)

    def _count_refused(self, message: Message, refusal: RetainedRefusal) -> None:
        self.context.counters[f"refused_{refusal}"] += 1
        self.context.log.debug("not_retained", topic=message.topic, limit=str(refusal))

    def _store_of(self, topic: str) -> RetainedStore | None:
        return None if topic.startswith(UNSTORED) else self._store

    def _keep(self, message: Message) -> tuple[Message | None, Message | None]:
        """Keep a message, or delete the old one if it is empty; return what the topic had and what it has now."""
        counters = self.context.counters
        if not message.payload:
            before = self._index.delete(message.topic)  # [MQTT-3.3.1-6], [MQTT-3.3.1-7]
            counters["deleted"] += before is not None
            return before, None
        kept = _without_headers(message) if message.headers or message.qos else message
        before, refusal = self._index.put(kept, self.context.hub.now(), self.config.sweep_budget)  # [MQTT-3.3.1-5]
        if refusal is None:
            counters["stored"] += 1
            return before, kept
        self._count_refused(message, refusal)
        return before, None

    # -- subscribing

    def _wants(self, client: ClientInfo, subscription: Subscription, why: Why) -> bool:
        """Return True if a subscription gets retained messages, as its retain handling says."""
        if why not in (Why.NEW, Why.AGAIN) or subscription.retain_handling == 2:
            return False  # [MQTT-3.3.1-11]
        if subscription.retain_handling == 1 and why is not Why.NEW:
            return False  # [MQTT-3.3.1-10]
        if subscription.filter.startswith(f"{SHARE}/"):
            return False  # a group would get them once per member: none, as the specification has it (4.8.2)
        if self._messages.shared_by(subscription.filter) is not None:
            return True  # what others have published is known when it is looked for
        return next(self._messages.matching(subscription, client.client_id), None) is not None  # most match nothing

    # -- for operators

    def topics(self, filter_: str = "#") -> Iterator[str]:
        """Return the topics with a retained message. `#` does not match `$…` topics; ask for `$SYS/#` to see those."""
        check_filter(filter_)
        return (message.topic for message in self._index.walk(filter_, self.context.hub.now))

    def get(self, topic: str) -> Message | None:
        """Return the retained message of a topic."""
        return self._index.get(topic, self.context.hub.now())

    def clear(self, filter_: str) -> int:
        """Delete all messages whose topics a filter matches; return how many."""
        return sum(self._delete(topic) for topic in list(self.topics(filter_)))

    def _delete(self, topic: str) -> bool:
        if self._shared is not None and not topic.startswith(UNSTORED):
            if not self._shared.has_room(topic):
                return False
            self._shared.change(topic, None)
            return True
        store = self._store_of(topic)
        if store is not None and not store.has_room(topic):
            return False
        before = self._index.delete(topic)
        if store is not None:
            store.write(topic, before, None)
        self.context.counters["deleted"] += before is not None
        return before is not None

    def gauges(self) -> dict[str, float]:
        """Return how much is kept now."""
        return {"retained_messages": len(self._index), "retained_bytes": self._index.bytes}

    def tables(self) -> Iterable[Table]:
        index, config = self._index, self.config
        size = index.bytes + len(index) * MESSAGE_BYTES + index.nodes * LEVEL_BYTES
        # At the bound, with two levels of each topic that it does not share with others.
        bound = config.max_bytes + config.max_messages * (MESSAGE_BYTES + 2 * LEVEL_BYTES)
        yield Table("retained", len(index), size, bound if config.max_bytes and config.max_messages else 0)


def _without_headers(message: Message) -> Message:
    """Return a copy without headers: they are notes about one publish (`acknowledge_after` makes one).

    Not by `dataclasses.replace`, which costs more than all the rest of keeping a message.
    """
    return Message(
        message.topic,
        message.payload,
        message.qos,
        message.retain,
        message.publisher,
        message.username,
        message.guid,
        message.timestamp,
        message.payload_format,
        message.expires_at,
        message.content_type,
        message.response_topic,
        message.correlation_data,
        message.user_properties,
    )
