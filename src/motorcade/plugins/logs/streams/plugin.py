"""The plugin: where streams meet the hooks of the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import msgspec

from motorcade.commit import Commit
from motorcade.core.client import ClientInfo
from motorcade.core.errors import MotorcadeError
from motorcade.core.message import Message, UserProperties
from motorcade.core.reasons import ReasonCode
from motorcade.core.record import RecordError
from motorcade.core.subscription import Subscription
from motorcade.core.topic import SHARE
from motorcade.extension.hooks import Continue, Handled, Stop, Verdict, acknowledge_after
from motorcade.extension.metrics import Counts, Family, Measure, Table, by_name
from motorcade.extension.plugin import Context, Plugin, hook
from motorcade.extension.sources import FastFeed, SourceType, Why
from motorcade.plugins.logs.streams.metrics import COUNTS, MEASURES, PROGRESS_BYTES
from motorcade.plugins.logs.streams.options import StreamsConfig
from motorcade.plugins.logs.streams.position import PREFIX, read_wish
from motorcade.plugins.logs.streams.reader import StreamSource
from motorcade.plugins.logs.streams.service import StreamService
from motorcade.plugins.logs.streams.stream import Stream
from motorcade.storage.ports import StoreError, StoreFullError

LATE: Final = -900  #: priority on `message.publish`: after all that may change the message, before retained
SERVICE: Final = "streams"
LOOK_PATIENCE: Final = 0.8  #: seconds that a SUBACK waits for the ends of its streams; less than hooks may take


class StreamsPlugin(Plugin):
    """Keeps what is published in streams, and lets clients read them again."""

    Config: ClassVar[type[msgspec.Struct]] = StreamsConfig
    description: ClassVar[str] = "append-only streams of published messages, read again from any offset ($stream/NAME)"
    counts: ClassVar[tuple[Counts, ...]] = COUNTS
    measures: ClassVar[tuple[Measure, ...]] = MEASURES

    config: StreamsConfig

    def __init__(self, context: Context, config: StreamsConfig) -> None:
        super().__init__(context, config)
        self.streams = StreamService(context, config, self._rebind)

    async def start(self) -> None:
        await self.streams.start(self.config.stream)
        self.context.spawn(self.streams.trimmer.run, "trim")
        self.context.offer(SERVICE, self.streams)
        self.context.add_source(SourceType("stream", self._make, prefix=PREFIX, wants=_wants, renew=True))

    async def reload(self, config: StreamsConfig) -> None:
        self.streams.check(config.stream, config.max_streams)
        self.streams.configure(config)
        await self.streams.reconfigure(config.stream)
        self.config = config

    async def stop(self) -> None:
        await self.streams.stop()

    def gauges(self) -> dict[str, float]:
        """Return the figures of the moment."""
        streams = self.streams
        return {
            "streams": len(streams),
            "stream_records": sum(stream.records for stream in streams.streams()),
            "stream_bytes": sum(stream.size_bytes for stream in streams.streams()),
            "stream_readers": sum(len(stream.readers) for stream in streams.streams()),
            "stream_progress": len(streams.progress),
            "stream_waiting": streams.waiting.messages,
            "stream_cache_bytes": streams.cache.size_bytes,
        }

    def metrics(self) -> Iterable[Family]:
        streams = {stream.name: stream for stream in self.streams.streams()}
        readers = {name: len(stream.readers) for name, stream in streams.items()}
        yield by_name("stream_records", "Records in a stream.", "stream", {n: s.records for n, s in streams.items()})
        yield by_name(
            "stream_bytes", "Bytes of these records.", "stream", {n: s.size_bytes for n, s in streams.items()}
        )
        yield by_name("stream_readers", "Clients that read a stream now.", "stream", readers)

    def tables(self) -> Iterable[Table]:
        streams = self.streams
        progress = len(streams.progress)
        yield Table("stream_cache", len(streams.cache), streams.cache.size_bytes, self.config.cache_bytes)
        yield Table("stream_progress", progress, progress * PROGRESS_BYTES)

    def _make(self, feed: FastFeed) -> StreamSource:
        return StreamSource(feed, self.streams)

    # -- in

    def _rebind(self, filters: Sequence[str]) -> None:
        """Register `on_publish` for what is published to one of these filters, and nothing else."""
        if filters:
            self.context.add_hook("message.publish", self.on_publish, priority=LATE, topics=filters)
        else:
            self.context.remove_hook("message.publish", self.on_publish)

    def on_publish(self, _client: ClientInfo | None, message: Message | Handled) -> None:
        """Append the message to every stream that is bound to its topic."""
        if isinstance(message, Handled):
            return
        for stream in self.streams.bound(message.topic):
            try:
                commit = stream.write((message,))
            except StoreFullError as error:
                self._refuse(message, error)
            except RecordError as error:
                self.context.counters["unwritable"] += 1
                self.context.log.warning("stream_message_unwritable", stream=stream.name, error=str(error))
            else:
                if message.qos:
                    acknowledge_after(message, commit, taken=True)

    def _refuse(self, message: Message, error: StoreFullError) -> None:
        """Refuse a message when too much waits: a publisher that asks hears it; QoS 0 is routed, but not stored."""
        if not message.qos:
            self.context.counters["dropped_qos0"] += 1
            return
        acknowledge_after(message, Commit[None].failed(error))

    @hook("message.publish", topics=(f"{PREFIX}#",))
    def on_publish_to_stream(self, _client: ClientInfo | None, message: Message | Handled) -> Stop | None:
        """Refuse messages to a stream by its name."""
        if isinstance(message, Handled):
            return None
        self.context.counters["refused_publish"] += 1
        reason = "messages reach a stream by the topics it is bound to, not by its name"
        return Stop(Handled(ReasonCode.TOPIC_NAME_INVALID, reason))

    # -- out

    @hook("client.subscribe")
    def on_subscribe(
        self, _client: ClientInfo, _properties: UserProperties, wanted: list[Any]
    ) -> Continue | Awaitable[Continue | None] | None:
        """Judge what begins with `$stream/`."""
        judged = [self._judge(each) for each in wanted]
        answer = None if all(new is old for new, old in zip(judged, wanted, strict=True)) else Continue(judged)
        if self.context.cluster is None:
            return answer
        streams = [stream for stream in map(self._stream_of, judged) if stream is not None]
        return self._look_before(streams, answer) if streams else answer

    def _stream_of(self, judged: Any) -> Stream | None:
        """Return the stream that a granted subscription reads, if it is declared."""
        granted = judged.outcome if isinstance(judged, Verdict) else judged
        if not isinstance(granted, Subscription) or not granted.filter.startswith(PREFIX):
            return None
        return self.streams.stream(read_wish(granted).name)

    async def _look_before(self, streams: Sequence[Stream], answer: Continue | None) -> Continue | None:
        """Find the ends of streams before the SUBACK, so that `latest` is what comes after it, on whatever member."""
        for stream in streams:
            try:
                async with asyncio.timeout(LOOK_PATIENCE):
                    await stream.look_at_tail()
            except (StoreError, TimeoutError) as error:  # it begins where the stream was known to end
                self.context.counters["read_failed"] += 1
                self.context.log.warning("stream_end_not_read", stream=stream.name, error=str(error))
                break
        return answer

    def _judge(self, asked: Any) -> Any:
        subscription = asked.outcome if isinstance(asked, Verdict) else asked
        if not isinstance(subscription, Subscription) or subscription.filter[:1] != "$":
            return asked
        filter_ = subscription.filter
        if filter_.startswith(f"{SHARE}/") and f"/{PREFIX}" in filter_:
            return self._refused(
                ReasonCode.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED,
                "streams are not shared: every reader gets everything; queues ($queue/NAME) are",
            )
        if not filter_.startswith(PREFIX) and filter_ != PREFIX.rstrip("/"):
            return asked
        try:
            wish = read_wish(subscription)
        except MotorcadeError as error:
            return self._refused(ReasonCode.TOPIC_FILTER_INVALID, str(error))
        granted = subscription if subscription.qos < 2 else replace(subscription, qos=1)
        if self.streams.stream(wish.name) is None:
            return Verdict(granted, f"there is no stream {wish.name!r} yet; its messages will come when it is declared")
        return granted

    def _refused(self, reason: ReasonCode, detail: str) -> Verdict:
        self.context.counters["refused_subscribe"] += 1
        return Verdict(reason, detail)

    @hook("session.terminated")
    def on_terminated(self, client: ClientInfo, _why: str) -> None:
        """Forget a client's places, which are of no interest after it; what is committed stays."""
        self.streams.progress.end_client(client.client_id)

    @hook("session.discarded")
    def on_discarded(self, client: ClientInfo) -> None:
        """Forget a client's places, likewise."""
        self.streams.progress.end_client(client.client_id)

    @hook("session.left")
    def on_left(self, client: ClientInfo) -> None:
        """Forget a client's places, since it may go on on another node; what is committed is read when it is back."""
        self.streams.progress.end_client(client.client_id)


def _wants(_client: ClientInfo, subscription: Subscription, why: Why) -> bool:
    """Return False for a repeated subscription without a position: it goes on where it is."""
    return why is not Why.AGAIN or read_wish(subscription).position is not None
