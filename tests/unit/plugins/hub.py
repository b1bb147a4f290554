"""A hub in memory: enough of a broker to run a plugin in, with a clock that stands until it is moved."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from motorcade.commit import Commit
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Handled, Hooks
from motorcade.extension.sources import Ack, Delayed, FastSource, Given, Source, Sources, Why


@dataclass
class MemoryHub:
    """Runs the hooks as the broker does; routes nothing, but remembers what would have been routed or delivered."""

    hooks: Hooks = field(default_factory=Hooks)
    sources: Sources = field(default_factory=Sources)
    time: float = 1000.0
    figures: dict[str, float] = field(default_factory=dict)
    routed: list[Message] = field(default_factory=list)
    delivered: list[tuple[str, Subscription, Iterator[Message]]] = field(default_factory=list)
    node: str = "n1"
    _routed: asyncio.Event = field(default_factory=asyncio.Event)

    async def publish(self, message: Message, client: ClientInfo | None = None) -> int:
        chain = self.hooks.publish_chains(message.topic)[1 if message.retain else 0]
        if chain is not None:
            result: Any = chain.fold(client, acc=replace(message, timestamp=self.time))
            result = await result if inspect.isawaitable(result) else result
            if isinstance(result, Handled):
                return 0
            message = result
        self.routed.append(message)
        self._routed.set()
        return 1

    async def seen(self, topic: str) -> None:
        """Wait until a message of a topic was routed."""
        while all(message.topic != topic for message in self.routed):
            self._routed.clear()
            await self._routed.wait()

    def tell(self, client_id: str, what: object) -> bool:
        return False

    def heard_below(self, level: str, besides: str = "") -> bool:
        return True

    def heard(self, topic: str, besides: str = "") -> bool:
        return True

    async def disconnect(self, client_id: str, reason: ReasonCode = ReasonCode.ADMINISTRATIVE_ACTION) -> bool:
        return False

    def client(self, client_id: str) -> ClientInfo | None:
        return None

    def clients(self) -> Iterable[ClientInfo]:
        return ()

    def last_seen(self, client_id: str) -> float:
        return 0.0

    async def seen_anywhere(self, client_id: str) -> float:
        return 0.0

    def arriving(self, client_id: str) -> Commit[None] | None:
        return None

    def under_way(self, client_id: str, commit: Commit[Any]) -> None:
        """No client moves."""

    def recheck_access(self) -> None:
        """Nobody asks."""

    def statistics(self) -> Mapping[str, float]:
        return dict(self.figures)

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    def subscribe(self, subscription: Subscription, *, is_new: bool = True, client_id: str = "car") -> None:
        """What the broker does after it has granted a subscription."""
        client, why = ClientInfo(client_id), Why.NEW if is_new else Why.AGAIN
        if self.hooks.session_subscribed is not None:
            self.hooks.session_subscribed.notify(client, subscription, is_new)
        for kind in self.sources.kinds:
            if kind.concerns(client, subscription, why):
                feed = PulledFeed(client)
                source = kind.make(feed)
                if source.subscribe(subscription, why):
                    feed.subscriptions[subscription.filter] = subscription
                    self.delivered.append((client_id, subscription, feed.read(source)))


class PulledFeed:
    """The broker's side of a source that is read one message at a time, as the test asks for the next."""

    def __init__(self, client: ClientInfo) -> None:
        self.client = client
        self.kept: Any = None
        self.subscriptions: dict[str, Subscription] = {}
        self.inflight: list[Given] = []
        self.unsent: list[Given] = []
        self.desired = 1
        self._inbox: list[object] = []

    def hand(self, given: Given) -> bool:
        return False

    def send(self, what: object) -> None:
        self._inbox.append(what)

    def send_later(self, delay: float, what: object) -> Delayed:
        raise NotImplementedError("nothing is delayed here")

    def disconnect(self, detail: str) -> None:
        raise NotImplementedError("nothing is connected here")

    def read(self, source: Source) -> Iterator[Message]:
        """What the source gives, until it is done or has nothing."""
        while self._inbox:
            answer = source.info(self._inbox.pop(0), 1)
            while isinstance(answer, list) and answer:
                (given,) = answer
                message = source.sending(given) if isinstance(source, FastSource) else given.message
                if message is not None:
                    yield message
                answer = source.delivered(given, Ack(1))
