"""Clients of streams without a broker: a session with a window, its sources called as `extension.sources` says.

place = await Node.on(store)                   the service `streams`, with a clock that stands
car = place.client("car", window=4)
car.subscribe("$stream/s", "earliest")
await place.quiet()                            until nothing is under way
car.acknowledge(0)                             the oldest message in flight
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Coroutine
from typing import Any

import structlog

from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.sources import RECREATE, ROOM, Ack, Given, Why
from motorcade.plugins.streams.options import StreamOptions, StreamsConfig
from motorcade.plugins.streams.position import OFFSET
from motorcade.plugins.streams.reader import StreamSource
from motorcade.plugins.streams.service import Streams
from motorcade.storage.ports import Store
from motorcade.tasks import Work

NOW = 1_700_000_000.0


class Node:
    """The streams of one process over a store."""

    def __init__(self, store: Store, config: StreamsConfig) -> None:
        self.store = store
        self.now = NOW
        self.tasks: set[asyncio.Task[None]] = set()
        self.counters: Counter[str] = Counter()
        self.bound: list[str] = []
        self.clients: list[Client] = []
        self.streams = Streams(
            store,
            config,
            lambda: self.now,
            self._spawn,
            self.counters,
            structlog.stdlib.get_logger("motorcade.plugin"),
            lambda filters: setattr(self, "bound", list(filters)),
        )

    @classmethod
    async def on(cls, store: Store, now: float = NOW, **options: Any) -> Node:
        config = StreamsConfig(**options)
        node = cls(store, config)
        node.now = now
        await node.streams.start(config.stream)
        return node

    def _spawn(self, work: Work | Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work() if callable(work) else work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.counters["task_failed"] += 1

    def client(self, name: str, window: int = 4, buffer: int = 8) -> Client:
        client = Client(self, name, window, buffer)
        self.clients.append(client)
        return client

    async def create(self, name: str = "s", **options: Any) -> None:
        await self.streams.create(name, StreamOptions(**({"topics": ("t/#",)} | options)))

    async def append(self, *payloads: bytes, stream: str = "s") -> list[int]:
        return await self.streams.append(stream, [Message("t/a", payload, timestamp=self.now) for payload in payloads])

    async def quiet(self) -> None:
        """Until nothing is under way, and nobody has anything left to hear."""
        calm = 0
        while calm < 3:
            await asyncio.sleep(0)
            busy = sum(client.turn() for client in self.clients) > 0
            for task in list(self.tasks):
                if task.get_name() != "trim":
                    busy = True
                    await asyncio.wait([task], timeout=0.001)
            calm = 0 if busy else calm + 1
        assert 0 == self.counters["task_failed"]

    async def stop(self) -> None:
        await self.streams.stop()
        await self.kill()

    async def kill(self) -> None:
        """The process is gone: nothing is written any more."""
        self.streams.ledger.gathered.cancel()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class Timer:
    """Something that is sent later, when the test says so."""

    def __init__(self, what: object, delay: float) -> None:
        self.what: object = what
        self.delay = delay

    def cancel(self) -> None:
        self.what = None


class Feed:
    """What one instance of a source has."""

    def __init__(self, session: Session, kept: Any = None) -> None:
        self.session = session
        self.kept = kept
        self.inbox: deque[object] = deque()
        self.timers: list[Timer] = []
        self.ended = False

    @property
    def client(self) -> ClientInfo:
        return self.session.client.info

    @property
    def subscriptions(self) -> dict[str, Subscription]:
        return {self.session.subscription.filter: self.session.subscription}

    @property
    def inflight(self) -> list[Given]:
        return list(self.session.inflight)

    @property
    def unsent(self) -> list[Given]:
        return list(self.session.buffer)

    @property
    def desired(self) -> int:
        return max(0, self.session.client.buffer - len(self.session.buffer))

    def hand(self, given: Given) -> bool:
        return False

    def send(self, what: object) -> None:
        if not self.ended:
            self.inbox.append(what)

    def send_later(self, delay: float, what: object) -> Timer:
        timer = Timer(what, delay)
        self.timers.append(timer)
        return timer

    def disconnect(self, detail: str) -> None:
        raise NotImplementedError("streams close no connections")


class Session:
    """One subscription, with its lane: what waits and what is in flight."""

    def __init__(self, client: Client, subscription: Subscription) -> None:
        self.client = client
        self.subscription = subscription
        self.buffer: deque[Given] = deque()
        self.inflight: list[Given] = []
        self.received: list[Message] = []  #: each once when it is first sent
        self.feed: Feed | None = None
        self.source: StreamSource | None = None
        self.hungry = False
        self.overshoot = 0
        self.leaving = False  #: unsubscribed, with messages in flight

    def begin(self, why: Why) -> None:
        self.feed = Feed(self, self.feed.kept if self.feed is not None else None)
        self.source = StreamSource(self.feed, self.client.node.streams)
        assert self.source.subscribe(self.subscription, why)

    def end(self, why: Why) -> None:
        assert self.source is not None and self.feed is not None
        self.source.unsubscribe(self.subscription.filter, why)
        self.buffer.clear()
        self.hungry = False
        if why is Why.UNSUBSCRIBED and self.inflight:
            self.leaving = True
        else:
            self.terminate()

    def terminate(self) -> None:
        assert self.source is not None and self.feed is not None
        self.source.terminate()
        self.source = None
        self.feed.ended = True

    def turn(self) -> bool:
        """Tell the source what there is to hear, and send what may be sent; whether anything happened."""
        busy = False
        while self.source is not None and self.feed is not None and self.feed.inbox:
            busy = True
            what = self.feed.inbox.popleft()
            self.answer(self.source.info(what, self.told()), self.feed.desired)
        return self.pump() or busy

    def told(self) -> int:
        assert self.feed is not None
        self.hungry = not self.feed.desired
        return self.feed.desired

    def answer(self, answer: Any, desired: int) -> None:
        if answer is None:
            return
        if answer is RECREATE:
            self.end(Why.REMOVED)
            self.begin(Why.RECREATED)
            return
        self.overshoot += max(0, len(answer) - desired)
        self.buffer.extend(answer)

    def pump(self) -> bool:
        busy = False
        while self.source is not None and self.buffer and (len(self.inflight) < self.client.window or not self.qos):
            given = self.buffer.popleft()
            busy = True
            self.received.append(given.message)
            if self.qos:
                self.inflight.append(given)
            else:
                self.delivered(given)
        if self.hungry and self.feed is not None and self.source is not None and self.feed.desired:
            self.hungry = False
            self.answer(self.source.info(ROOM, self.feed.desired), self.feed.desired)
            return True
        return busy

    @property
    def qos(self) -> int:
        return self.subscription.qos

    def delivered(self, *given: Given, reason: ReasonCode = ReasonCode.SUCCESS) -> None:
        if self.source is None or self.feed is None:
            return
        answer = self.source.delivered_run(given, Ack(0 if self.leaving else self.told(), reason))
        if not self.leaving:
            self.answer(answer, self.feed.desired)
        elif not self.inflight:
            self.terminate()


class Client:
    """One client with one session; `crash` of the node loses what is in flight, as a real one does for sources."""

    def __init__(self, node: Node, name: str, window: int, buffer: int) -> None:
        self.node = node
        self.info = ClientInfo(name, version=5, clean_start=False)
        self.window = window
        self.buffer = buffer
        self.sessions: dict[str, Session] = {}

    def subscribe(self, filter_: str, offset: str = "", qos: int = 1, **options: Any) -> Session:
        properties = ((OFFSET, offset),) if offset else ()
        subscription = Subscription(filter_, qos, user_properties=properties, **options)
        old = self.sessions.get(filter_)
        if old is not None:
            old.end(Why.REMOVED)
        session = self.sessions[filter_] = Session(self, subscription)
        session.begin(Why.NEW if old is None else Why.AGAIN)
        return session

    def unsubscribe(self, filter_: str) -> Session:
        session = self.sessions.pop(filter_)
        session.end(Why.UNSUBSCRIBED)
        return session

    def disconnect(self, why: Why = Why.DISCONNECTED) -> None:
        for session in self.sessions.values():
            session.end(why)

    def resume(self, node: Node | None = None) -> None:
        """Come back, perhaps to a new process, which knows nothing of what was in flight."""
        if node is not None:
            self.node = node
            node.clients.append(self)
            for session in self.sessions.values():
                session.inflight.clear()
                session.buffer.clear()
                session.feed = session.source = None
        for session in self.sessions.values():
            session.begin(Why.RESUMED)

    def turn(self) -> bool:
        return sum(session.turn() for session in list(self.sessions.values())) > 0

    def acknowledge(self, index: int = 0, filter_: str = "", reason: ReasonCode = ReasonCode.SUCCESS) -> None:
        session = self.sessions[filter_] if filter_ else next(iter(self.sessions.values()))
        session.delivered(session.inflight.pop(index), reason=reason)

    async def drain(self) -> None:
        """Acknowledge until nothing comes any more."""
        await self.node.quiet()
        while any(session.inflight for session in self.sessions.values()):
            for session in self.sessions.values():
                held, session.inflight[:] = list(session.inflight), []
                session.delivered(*held)
            await self.node.quiet()


def offsets(messages: list[Message]) -> list[int]:
    return [int(dict(message.user_properties)[OFFSET]) for message in messages]
