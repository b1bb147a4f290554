"""When a message is kept, and who gets it later.

It listens to `message.publish` with the lowest priority in use (`LAST`), because it must keep the message as other
plugins leave it: a rewritten topic, a changed payload, a dropped message. A plugin that ends the chain before it
(`Stop`, `STOP`, `Handled`) decides against keeping too. It never changes or holds up a message: what cannot be kept
is routed all the same.

With a store that outlives the node, every change goes there too (`keeper`), and who has published with QoS 1 or 2 is
answered when the store has it. What stands below `$SYS` does not: figures of a node end with it.

A subscriber gets the messages by a source (`source`), which reads them as the client's window has room.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar, Final, cast

import msgspec

from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.core.topic import SHARE, check_filter
from motorcade.extension.hooks import Handled, acknowledge_after
from motorcade.extension.metrics import Counts, Measure, Table
from motorcade.extension.plugin import Context, Plugin, hook
from motorcade.extension.sources import Kind, Why
from motorcade.plugins.retained.index import Index
from motorcade.plugins.retained.keeper import Keeper
from motorcade.plugins.retained.metrics import COUNTS, LEVEL_BYTES, MEASURES, MESSAGE_BYTES
from motorcade.plugins.retained.source import Rate, RetainedSource, Shelf
from motorcade.storage.ports import Store

LAST: Final = -1000  #: priority on `message.publish`: after everybody who may change or drop the message
LAST_ATTEMPT: Final = 3.0  #: seconds, when the plugin stops, to write again what may not be stored as it should
PASSING: Final = "$SYS/"  #: topics below are not stored

Count = Annotated[int, msgspec.Meta(ge=0)]


class RetainedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds of what is kept. 0 lifts a bound. A message beyond one is routed but not kept."""

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
        self._shelf = Shelf(self._index, self._rate, context.hub.now)
        self._keeper: Keeper | None = None  #: none while nothing outlives the node
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        store = cast("Store | None", self.context.store)
        if store is not None and (await store.figures()).engine != "memory":
            self._keeper = Keeper(store, self._index, self.context.counters, self.context.log)
            await self._keeper.load(self.context.hub.now())
            self._keeping = self.context.spawn(self._keeper.run, "store")
        self.context.spawn(self._sweep, "sweep")
        make = partial(RetainedSource, shelf=self._shelf)
        self.context.add_source(Kind("retained", make, wants=self._wants, renew=True, retained=True))

    async def stop(self) -> None:
        """Nobody publishes any more; what was published is stored."""
        if self._keeper is None or self._keeping is None:
            return
        await self._keeper.settle()
        self._keeping.cancel()
        await asyncio.wait([self._keeping])
        with contextlib.suppress(TimeoutError):  # a store that is away must not hold up the node's end
            await asyncio.wait_for(self._keeper.mend(), LAST_ATTEMPT)
        if self._keeper.uncommitted:
            self.context.log.warning("retained_left_doubtful", topics=self._keeper.uncommitted)

    async def reload(self, config: RetainedConfig) -> None:
        """New bounds hold for what comes; what is kept already stays."""
        self.config = config
        self._index.max_messages = config.max_messages
        self._index.max_payload = config.max_payload
        self._index.max_bytes = config.max_bytes
        self._rate.per_second = config.delivery_rate

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.config.sweep_interval)
            self._count_expired(self._index.sweep(self.context.hub.now(), self.config.sweep_budget))

    def _count_expired(self, gone: int) -> None:
        if gone:
            self.context.counters["expired"] += gone

    # -- what is kept

    @hook("message.publish", priority=LAST, retained_only=True)
    def on_publish(self, _client: ClientInfo | None, message: Message | Handled) -> None:
        """Keep the message, or forget the old one if it is empty."""
        if isinstance(message, Handled) or not message.retain:  # another plugin may have taken the flag away
            return
        keeper = self._keeper if not message.topic.startswith(PASSING) else None
        if keeper is None:
            self._keep(message)
        elif keeper.has_room(message.topic):
            before = self._index.peek(message.topic)
            self._keep(message)
            done = keeper.changed(message.topic, before, waits=message.qos > 0)
            if done is not None:
                acknowledge_after(message, done)
        else:
            self._refuse(message, keeper)

    def _keep(self, message: Message) -> None:
        counters = self.context.counters
        if not message.payload:
            counters["deleted"] += self._index.delete(message.topic)  # [MQTT-3.3.1-6], [MQTT-3.3.1-7]
            return
        # Headers are notes about this one publish (`acknowledge_after` makes one); a kept copy must not repeat them.
        kept = replace(message, headers={}) if message.headers or message.qos else message
        refusal = self._index.put(kept, self.context.hub.now(), self.config.sweep_budget)  # [MQTT-3.3.1-5]
        if refusal is None:
            counters["stored"] += 1
            return
        counters[f"refused_{refusal}"] += 1
        self.context.log.debug("not_retained", topic=message.topic, limit=str(refusal))

    def _refuse(self, message: Message, keeper: Keeper) -> None:
        """Neither a new message nor the end of the old one can be noted: the old one stays, and who asks is told."""
        self.context.counters["refused_uncommitted"] += 1
        if message.qos > 0:
            refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            refused.set_exception(keeper.full())
            refused.exception()  # seen: nobody may be left to look at it
            acknowledge_after(message, refused)

    # -- who gets it

    def _wants(self, client: ClientInfo, subscription: Subscription, why: Why) -> bool:
        """Whether a subscription gets retained messages, as its retain handling says."""
        if why not in (Why.NEW, Why.AGAIN) or subscription.retain_handling == 2:
            return False  # [MQTT-3.3.1-11]
        if subscription.retain_handling == 1 and why is not Why.NEW:
            return False  # [MQTT-3.3.1-10]
        if subscription.filter.startswith(f"{SHARE}/"):
            return False  # a group would get them once per member: none, as the specification has it (4.8.2)
        return next(self._shelf.matching(subscription, client.client_id), None) is not None  # most match nothing

    # -- for operators

    def topics(self, filter_: str = "#") -> Iterator[str]:
        """Topics with a retained message. `#` does not show `$…` topics; ask for `$SYS/#` to see those."""
        check_filter(filter_)
        return (message.topic for message in self._index.walk(filter_, self.context.hub.now))

    def get(self, topic: str) -> Message | None:
        """The retained message of a topic."""
        return self._index.get(topic, self.context.hub.now())

    def clear(self, filter_: str) -> int:
        """Forget all messages whose topics a filter matches; how many."""
        gone = sum(self._forget(topic) for topic in list(self.topics(filter_)))
        self.context.counters["deleted"] += gone
        return gone

    def _forget(self, topic: str) -> bool:
        before = self._index.peek(topic)
        keeper = self._keeper if not topic.startswith(PASSING) else None
        if keeper is not None and not keeper.has_room(topic):
            return False
        gone = self._index.delete(topic)
        if keeper is not None:
            keeper.changed(topic, before, waits=False)
        return gone

    def gauges(self) -> dict[str, float]:
        """What is kept now."""
        return {"retained_messages": len(self._index), "retained_bytes": self._index.bytes}

    def tables(self) -> Iterable[Table]:
        index, config = self._index, self.config
        octets = index.bytes + len(index) * MESSAGE_BYTES + index.nodes * LEVEL_BYTES
        # At the bound, with two levels of each topic that it does not share with others.
        bound = config.max_bytes + config.max_messages * (MESSAGE_BYTES + 2 * LEVEL_BYTES)
        yield Table("retained", len(index), octets, bound if config.max_bytes and config.max_messages else 0)
