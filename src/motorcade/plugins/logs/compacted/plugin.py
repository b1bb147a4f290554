"""The plugin of compacted queues: publishes to them, and subscriptions to them.

Nothing that is published below `$ECQ/` and `$SCQ/` is routed. A queue that is not used costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar, Final, cast

import msgspec

from motorcade.commit import Commit, commit_of
from motorcade.core.client import ClientInfo
from motorcade.core.errors import MotorcadeError, PluginError
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.record import RecordError
from motorcade.core.subscription import Subscription
from motorcade.delivery.progress import LogKey, ProgressOptions, ProgressStore
from motorcade.extension.compacted import SERVICE, CompactedKind, RewindView
from motorcade.extension.declared import BadOptionsError
from motorcade.extension.hooks import Continue, Handled, Stop, Verdict, acknowledge_after
from motorcade.extension.metrics import Counts, Measure, Table
from motorcade.extension.plugin import Context, Plugin, hook
from motorcade.extension.sources import SourceType
from motorcade.plugins.logs.compacted import record
from motorcade.plugins.logs.compacted.collector import Collector
from motorcade.plugins.logs.compacted.members import CompactedMembers
from motorcade.plugins.logs.compacted.metrics import COUNTS, MEASURES, MESSAGE_BYTES, QUEUE_BYTES
from motorcade.plugins.logs.compacted.options import EcqConfig
from motorcade.plugins.logs.compacted.queue import MAX_OPEN, RETRY, Queues
from motorcade.plugins.logs.compacted.service import CompactedService
from motorcade.plugins.logs.compacted.source import CompactedSource, Tools
from motorcade.plugins.logs.compacted.tables import EXCLUSIVE, SHARED, Shape
from motorcade.plugins.logs.compacted.topics import (
    PLACE,
    RESERVED,
    REWIND,
    ROOTS,
    TOPICS,
    WRITING,
    judge,
    quoted,
    what,
)
from motorcade.storage.ports import Draft, Store, StoreError

TAKING: Final = 500  #: priority on `message.publish`: after those who may refuse, before those who keep
LONGEST: Final = 64  #: bytes of the payload of a rewind
STEP: Final = 256  #: queues looked at in one step of a heartbeat
STOP_TAKEN: Final = Stop(Handled())
#: Counted from the start, so that their series are there before it happens.
EVENTS: Final = (
    "appended",
    "replaced",
    "dropped",
    "acknowledged",
    "refused",
    "given_again",
    "given_up",
    "too_old",
    "rewound",
    "collected",
    "gc_rounds",
    "refused_full",
    "refused_pending",
    "refused_queues",
    "refused_consumers",
    "refused_key",
    "refused_publish",
    "refused_subscribe",
    "hints_dropped",
    "wanted_overflows",
)

Wanted = Subscription | ReasonCode | Verdict


class EcqPlugin(Plugin):
    """Keeps the last value of each key for consumers."""

    Config: ClassVar[type[msgspec.Struct]] = EcqConfig
    description: ClassVar[str] = "compacted queues: the last value of each key, for one client ($ECQ) or many ($SCQ)"
    counts: ClassVar[tuple[Counts, ...]] = COUNTS
    measures: ClassVar[tuple[Measure, ...]] = MEASURES

    config: EcqConfig

    def __init__(self, context: Context, config: EcqConfig) -> None:
        super().__init__(context, config)
        for event in EVENTS:
            context.counters[event] += 0
        self.queues: Queues
        self.tools: Tools
        self.collector: Collector
        self.service: CompactedService
        self._look_all = asyncio.Event()  # where all queues end that have consumers

    async def start(self) -> None:
        context = self.context
        store = cast("Store | None", context.store)
        if store is None:
            raise PluginError("compacted queues need a store, and this node has none")
        now, counters, log = context.hub.now, context.counters, context.log
        self.queues = Queues(store, self.config, now, context.spawn, counters, log)
        kept = ProgressOptions(
            "ecq",
            "refused_consumers",
            "consumer_waits_for_store",
            RETRY,
            interval=lambda: self.config.progress_interval,
            max_consumers=lambda: self.config.max_consumers,
            lasts=self._lasts,
            shared=context.cluster is not None,
        )
        progress = ProgressStore(store, kept, now, context.spawn, counters, log)
        self.tools = Tools(store, self.queues, progress, now, counters, log)
        self.collector = Collector(self.tools, context.cluster)
        self.service = CompactedService(self.tools)
        if context.cluster is not None:
            members = CompactedMembers(context.cluster, self.queues, self._look_all.set, self.service.rewound)
            self.queues.members = members
            members.start(context.at_end)
            self.service.answer(context.cluster, context.at_end)
        context.spawn(self.collector.count, "count")
        context.spawn(self.collector.run, "collect")
        context.spawn(self._heartbeat, "heartbeat")
        make = partial(CompactedSource, tools=self.tools)
        for shape in (EXCLUSIVE, SHARED):
            name = shape.root[1:].lower()
            context.add_source(SourceType(name, make, prefix=f"{shape.root}/", release=True))
        context.offer(SERVICE, self.service)

    def _lasts(self, log: LogKey) -> float:
        """Return how long the progress of a consumer is kept; of an exclusive queue it goes with the queue."""
        return 0.0 if log.single else self.config.idle

    async def stop(self) -> None:
        """Store what was acknowledged."""
        await self.tools.progress.settle()

    async def reload(self, config: EcqConfig) -> None:
        """Take new options, which hold from now on."""
        self.config = config
        self.queues.configure(config)
        self.collector.hurry()

    def gauges(self) -> Mapping[str, float]:
        queues = self.queues
        return {
            "ecq_queues": queues.count,
            "ecq_open": len(queues),
            "ecq_consumers": sum(len(queue.consumers) for queue in queues),
            "ecq_pending": queues.pending,
            "ecq_pending_bytes": queues.pending_bytes,
        }

    def tables(self) -> Iterable[Table]:
        config, queues = self.config, self.queues
        pending = queues.pending_bytes + queues.pending * MESSAGE_BYTES
        yield Table("ecq_queues", len(queues), len(queues) * QUEUE_BYTES, len(CompactedKind) * MAX_OPEN * QUEUE_BYTES)
        bound = config.max_pending_bytes + config.max_pending * MESSAGE_BYTES
        yield Table("ecq_pending", queues.pending, pending, bound)

    async def _heartbeat(self) -> None:
        """Look now and then whether consumers have got everything, in case that an event was missed."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look_all.wait(), self.config.heartbeat)
            self._look_all.clear()
            for number, queue in enumerate(self.queues.consumed()):
                self.queues.look(queue)
                if not (number + 1) % STEP:
                    await asyncio.sleep(0.01)

    # -- producers

    def on_plain(self, client: ClientInfo, topic: str, payload: bytes, guid: bytes) -> Commit[None] | None:
        """Append a message without anything special to a queue that is open; all else is for `on_publish`."""
        queues, config = self.queues, self.config
        shape = WRITING.get(topic[:PLACE])
        name, _, key = topic[PLACE:].partition("/")
        queue = queues.of(shape).get(name) if shape is not None else None
        place = key.encode()
        if queue is None or not queue.registered or not 0 < len(place) <= config.max_key:
            return None
        if queues.pending >= config.max_pending or queues.pending_bytes >= config.max_pending_bytes:
            return None
        body, rest = record.encode_plain(payload, client.client_id, client.username, guid, self.context.hub.now())
        size = len(body) + len(rest)
        if 0 < config.max_bytes < size:
            return None
        return queues.append(queue, Draft(body, rest, place), size)

    @hook("message.publish", priority=TAKING, topics=TOPICS, takes=True, plain="on_plain")
    def on_publish(self, client: ClientInfo | None, message: Message | Handled) -> Stop | None:
        """Append, or rewind; no other plugin gets it."""
        if isinstance(message, Handled):
            return None
        topic = message.topic
        shape = WRITING.get(topic[:PLACE])
        if shape is None:
            return Stop(self._other(client, message))
        name, _, key = topic[PLACE:].partition("/")
        config = self.config
        place = key.encode()
        if (
            not name
            or not 0 < len(place) <= config.max_key
            or len(name.encode()) > config.max_name
            or (shape is SHARED and name in RESERVED)
        ):
            return Stop(self._bad_key(shape, name, place))
        try:
            body, payload = record.encode(message)
        except RecordError as error:
            self.context.counters["unstorable"] += 1
            return Stop(Handled(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, str(error)))
        queues = self.queues
        size = len(body) + len(payload)
        if queues.pending >= config.max_pending or queues.pending_bytes >= config.max_pending_bytes:
            self.context.counters["refused_pending"] += 1
            if not message.qos:
                return STOP_TAKEN  # no client waits for an answer: a refusal would only end the connection of MQTT 3
            why = f"{queues.pending} messages wait for the store already (max_pending, max_pending_bytes)"
            return Stop(Handled(ReasonCode.QUOTA_EXCEEDED, why))
        if 0 < config.max_bytes < size:
            self.context.counters["refused_full"] += 1
            if not message.qos:
                return STOP_TAKEN
            why = f"the message is larger than a queue may be ({config.max_bytes} bytes, max_bytes)"
            return Stop(Handled(ReasonCode.QUOTA_EXCEEDED, why))
        token = message.guid if message.qos == 2 else b""
        draft = Draft(body, payload, place, message.expires_at or 0.0, False, token)
        commit = queues.append(queues.open(shape, name), draft, size)
        if message.qos:
            acknowledge_after(message, commit, taken=True)
        return STOP_TAKEN

    def _bad_key(self, shape: Shape, name: str, key: bytes) -> Handled:
        self.context.counters["refused_key"] += 1
        config = self.config
        if not name or not key:
            why = f"publish to {shape.root}/w/{what(shape)}/KEY, with both of them"
        elif shape is SHARED and name in RESERVED:
            why = f"no shared queue is called {name!r}"
        elif len(key) > config.max_key:
            why = f"the key has {len(key)} bytes, {config.max_key} are allowed (max_key)"
        else:
            why = f"the name has {len(name.encode())} bytes, {config.max_name} are allowed (max_name)"
        return Handled(ReasonCode.TOPIC_NAME_INVALID, why)

    def _other(self, client: ClientInfo | None, message: Message) -> Handled:
        """Handle a message that is not written to a queue."""
        root, *levels = message.topic.split("/")
        shape = ROOTS[root]
        if len(levels) == 2 and levels[0] == REWIND and levels[1]:
            return self._rewind(shape, levels[1], client, message)
        self.context.counters["refused_publish"] += 1
        return Handled(
            ReasonCode.TOPIC_NAME_INVALID,
            f"nothing can be published there: append with {root}/w/{what(shape)}/KEY, "
            f"get messages again with {root}/{REWIND}/{what(shape)}",
        )

    # -- rewinding

    def _rewind(self, shape: Shape, name: str, client: ClientInfo | None, message: Message) -> Handled:
        """Rewind a consumer that wants to get messages again."""
        if client is None or (shape.form is CompactedKind.EXCLUSIVE and name != client.client_id):
            self.context.counters["refused_publish"] += 1
            return Handled(
                ReasonCode.NOT_AUTHORIZED, f"the queue of {quoted(name)} can be rewound by the client of that id alone"
            )
        try:
            to, since = read_position(message.payload)
        except ValueError as error:
            self.context.counters["refused_publish"] += 1
            return Handled(ReasonCode.PAYLOAD_FORMAT_INVALID, str(error))
        answers: list[Handled] = []
        refused: list[StoreError] = []

        async def rewind() -> None:
            try:
                done = await self.service.rewind(shape.form, name, client.client_id, to=to, since=since)
            except StoreError as error:
                refused.append(error)  # the store is away, or this member fenced: the publisher hears it, no defect
            except BadOptionsError as error:
                answers.append(Handled(ReasonCode.PAYLOAD_FORMAT_INVALID, str(error)))
            except MotorcadeError as error:
                answers.append(Handled(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, str(error)))
            else:
                answers.append(Handled(user_properties=_told(done)))

        ended = commit_of(self.context.spawn(rewind(), "rewind"))
        heard: Commit[None] = Commit()
        ended.then(lambda: heard.finish(refused[0] if refused else ended.error))
        acknowledge_after(message, heard)
        return Handled(outcome=lambda: answers[0])

    # -- consumers

    @hook("client.subscribe")
    def on_subscribe(self, client: ClientInfo, _properties: object, wanted: list[Wanted]) -> Continue | None:
        """Refuse what is no way to consume a queue."""
        answers = [self._judge(client, one) for one in wanted]
        return Continue(answers) if any(a is not b for a, b in zip(answers, wanted, strict=True)) else None

    def _judge(self, client: ClientInfo, wanted: Wanted) -> Wanted:
        subscription = wanted.outcome if isinstance(wanted, Verdict) else wanted
        if not isinstance(subscription, Subscription) or subscription.filter[:1] != "$":
            return wanted
        refusal = judge(client.client_id, subscription, self.config.max_name)
        if refusal is None:
            return wanted
        self.context.counters["refused_subscribe"] += 1
        return Verdict(refusal.reason, refusal.detail)


def read_position(payload: bytes) -> tuple[int | None, float | None]:
    """Read the position to rewind to: a number, or a time; `ValueError` says what is wrong."""
    text = payload.decode("ascii", errors="replace").strip() if len(payload) <= LONGEST else ""
    if text.isascii() and text.isdigit():
        return int(text), None
    try:
        time = datetime.fromisoformat(text)
        return None, (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise ValueError("rewind: the payload is a sequence number, or a time as 2026-01-31T12:00:00Z") from error


def _told(done: RewindView) -> tuple[tuple[str, str], ...]:
    """Return the user properties that tell a consumer of its rewind."""
    told: dict[str, Any] = {"before": done.before, "progress": done.progress, "messages": done.messages}
    return tuple((name, str(value)) for name, value in told.items())
