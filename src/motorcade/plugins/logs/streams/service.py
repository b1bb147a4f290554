"""All streams of a node: what is declared, who reads, and what other plugins may do.

    records collection `stream`, key name:  [1, options; nil: being deleted]

What is declared in the configuration is not stored. A stream that is being deleted is marked so before anything of it
goes: if the node dies in between, the next one finishes it, and old records never turn up in a new stream of that name.

A stream that is no longer in the configuration is not declared any more, but its records stay in the store: a
mistake in a file can be mended. `delete` is the only way to lose them, and for that it must be declared.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec
import structlog

from motorcade.commit import Commit
from motorcade.core.errors import MotorcadeError
from motorcade.core.message import Message
from motorcade.core.record import RecordError, decode
from motorcade.core.trie import FilterTrie
from motorcade.delivery.progress import LogKey, ProgressOptions, ProgressStore
from motorcade.extension.declared import CONFIGURED, CREATED, ConflictError, FoundMessage, UnknownError, check_name
from motorcade.extension.plugin import Spawn
from motorcade.plugins.logs.streams.loader import Loader
from motorcade.plugins.logs.streams.options import StreamOptions, StreamsConfig
from motorcade.plugins.logs.streams.pages import Cache
from motorcade.plugins.logs.streams.position import PREFIX
from motorcade.plugins.logs.streams.reader import StreamSource, key_of
from motorcade.plugins.logs.streams.retention import Trimmer
from motorcade.plugins.logs.streams.stream import AppendBacklog, Shared, Stream
from motorcade.plugins.logs.streams.views import MAX_READERS, ReaderView, StreamView
from motorcade.storage.ports import Store, StoreError, StreamInfo

COLLECTION: Final = "stream"
RETRY: Final = 5.0  #: seconds until progress that could not be written is retried
LASTS: Final = 30 * 86400.0  #: seconds that progress in a stream without a retention is kept after the last commit


class _DeclarationRecord(msgspec.Struct, array_like=True, tag=1):
    options: StreamOptions | None  #: None: it is being deleted


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_DeclarationRecord).decode


def declares(value: bytes) -> bool:
    """Return True if a record of COLLECTION declares its stream; False if it is unreadable: no node takes it either."""
    try:
        return _decode(value).options is not None
    except (msgspec.MsgspecError, ValueError):
        return False


class StreamService:
    """The service `streams`: a `Declared`, and the way for other plugins to append."""

    noun: Final = "stream"
    Options: Final = StreamOptions

    def __init__(
        self,
        store: Store,
        config: StreamsConfig,
        now: Callable[[], float],
        spawn: Spawn,
        counters: Counter[str],
        log: structlog.stdlib.BoundLogger,
        bound: Callable[[Sequence[str]], None],
    ) -> None:
        self.now = now
        self.waiting = AppendBacklog(config.max_waiting, config.max_waiting_bytes)
        self.cache = Cache(config.cache_bytes, counters)
        self.trimmer = Trimmer(self, store.streams, config.trim_interval, config.trim_budget, counters, log)
        self._config = config
        kept = ProgressOptions(
            "stream",
            "refused_max_progress",
            "reader_waits_for_store",
            RETRY,
            interval=lambda: self._config.progress_interval,
            max_consumers=lambda: self._config.max_progress,
            lasts=self._lasts,
        )
        self.progress = ProgressStore(store, kept, now, spawn, counters, log)
        self._loader = Loader(spawn)
        self._shared = Shared(store, self.cache, self._loader, self.waiting, now, counters, log, self.trimmer.wake)
        self._store = store
        self._counters = counters
        self._log = log
        self._bound = bound  # told the filters of all streams when they change
        self._streams: dict[str, Stream] = {}
        self._opening: dict[str, Stream] = {}  # being declared
        self._unwatch: Callable[[], None] | None = None
        self._readers: dict[str, set[StreamSource]] = {}  # by name, declared or not
        self._trie: FilterTrie[tuple[Stream, ...]] = FilterTrie()
        self._changing = asyncio.Lock()

    # -- for the plugin

    async def start(self, configured: Mapping[str, StreamOptions]) -> None:
        """Declare what is stored and what is configured."""
        self._unwatch = self._store.streams.watch(self._told)
        stored = [item async for item in self._store.records.scan(COLLECTION, self.now())]
        for name, value in stored:
            await self._restore(name, value, configured)
        for name, options in configured.items():
            await self._declare(name, options, CONFIGURED)
        self._rebind()

    async def _restore(self, name: str, value: bytes, configured: Mapping[str, StreamOptions]) -> None:
        try:
            stored = _decode(value)
        except (msgspec.MsgspecError, ValueError) as error:
            self._counters["declaration_unreadable"] += 1
            self._log.error("stream_declaration_unreadable", stream=name, error=str(error))
            return
        if stored.options is None:
            await self._drop(name)
        elif name in configured:
            self._log.warning("stream_declared_twice", stream=name, holds="configuration")
        else:
            await self._declare(name, stored.options, CREATED)

    def configure(self, config: StreamsConfig) -> None:
        """Take new bounds, which hold for what comes."""
        self.waiting.max_messages = config.max_waiting
        self.waiting.max_bytes = config.max_waiting_bytes
        self.cache.max_bytes = config.cache_bytes
        self.trimmer.configure(config.trim_interval, config.trim_budget)
        self._config = config

    def check(self, configured: Mapping[str, StreamOptions], max_streams: int) -> None:
        """Raise `MotorcadeError` if these could not be declared."""
        others = [stream for stream in self._streams.values() if stream.origin != CONFIGURED]
        for stream in others:
            if stream.name in configured:
                raise ConflictError(
                    f"stream {stream.name!r} was declared while the node ran ({stream.origin}); "
                    "delete it there, or call this one otherwise"
                )
        if len(others) + len(configured) > max_streams:
            raise self._too_many(max_streams)

    async def reconfigure(self, configured: Mapping[str, StreamOptions]) -> None:
        """Declare the streams of a configuration, and undeclare those that it no longer has."""
        async with self._changing:
            self.check(configured, self._config.max_streams)
            for stream in [stream for stream in self._streams.values() if stream.origin == CONFIGURED]:
                if stream.name not in configured:
                    self._log.warning(
                        "stream_left", stream=stream.name, records=stream.records, remedy="declare it again"
                    )
                    self._undeclare(stream)
            for name, options in configured.items():
                present = self._streams.get(name)
                if present is None:
                    await self._declare(name, options, CONFIGURED)
                else:
                    present.options = options
            self._rebind()

    async def stop(self) -> None:
        """Write what readers have acknowledged."""
        await self.progress.settle()
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def _told(self, name: str, last: int) -> None:
        """Note that something was appended to the store, through this service or past it."""
        stream = self._streams.get(name) or self._opening.get(name)
        if stream is not None:
            stream.told(last)

    def streams(self) -> list[Stream]:
        return list(self._streams.values())

    def bound(self, topic: str) -> Sequence[Stream]:
        """Return the streams that take what is published to a topic, each once."""
        found = self._trie.match(topic)
        if len(found) <= 1:
            return found[0] if found else ()
        return list(dict.fromkeys(stream for streams in found for stream in streams))

    def _rebind(self) -> None:
        trie: FilterTrie[tuple[Stream, ...]] = FilterTrie()
        filters: dict[str, None] = {}
        for stream in self._streams.values():
            for filter_ in dict.fromkeys(stream.options.topics if stream.options else ()):
                trie.set(filter_, (*(trie.get(filter_) or ()), stream))
                filters[filter_] = None
        self._trie = trie
        self._bound(list(filters))

    def _lasts(self, log: LogKey) -> float:
        """Return how long progress is kept: the retention of its stream."""
        stream = self._streams.get(log.name)
        return (stream.options.retention if stream is not None and stream.options is not None else 0.0) or LASTS

    # -- for readers

    def stream(self, name: str) -> Stream | None:
        return self._streams.get(name)

    def attend(self, name: str, reader: StreamSource) -> None:
        self._readers.setdefault(name, set()).add(reader)

    def leave(self, name: str, reader: StreamSource) -> None:
        readers = self._readers.get(name)
        if readers is not None:
            readers.discard(reader)
            if not readers:
                del self._readers[name]

    def find_time(self, stream: Stream, time: float, found: Callable[[int | None], None]) -> None:
        async def look() -> None:
            after = None
            try:
                after = await self._store.streams.find(stream.name, time)
            except StoreError as error:
                self._counters["read_failed"] += 1
                self._log.error("stream_not_read", stream=stream.name, error=str(error))
            found(after)

        self._loader.do(look)

    def count(self, event: str, times: int = 1) -> None:
        self._counters[event] += times

    # -- for other plugins

    def append(self, stream: str, messages: Sequence[Message]) -> Commit[Sequence[int]]:
        """Append to a stream, in order. The commit tells the offsets; readers at the tail get it at once.

        It fails with `UnknownError` if there is no such stream, `StoreFullError` if the store takes no more or too much
        waits for it already, `RecordError` if a message cannot be written, else with `StoreError`.
        """
        found = self._streams.get(stream)
        return found.append(messages) if found is not None else Commit.failed(self._unknown(stream))

    async def open(self, name: str, owner: str) -> None:
        """Let a stream be read, and appended to, that belongs to a plugin. It is bound to no topics.

        The owner alone trims it, and may append to it in batches of its own too: readers hear of that. It is there
        until `release`; opening it again does nothing.
        """
        check_name(self.noun, name)
        async with self._changing:
            present = self._streams.get(name)
            if present is not None and present.origin == owner:
                return
            if present is not None:
                raise ConflictError(
                    f"stream {name!r} is declared already ({present.origin}); it cannot be {owner}'s too"
                )
            await self._declare(name, None, owner)

    async def release(self, name: str, owner: str) -> None:
        """Undeclare a stream opened by a plugin; its records stay."""
        async with self._changing:
            present = self._streams.get(name)
            if present is not None and present.origin == owner:
                self._undeclare(present)

    # -- Declared

    def __len__(self) -> int:
        return len(self._streams)

    def options(self, name: str) -> StreamOptions:
        """Return the options as they are, of a stream that may be changed here."""
        return cast("StreamOptions", self._own(name).options)

    async def list(self) -> Sequence[StreamView]:
        """Return the views of all streams, by name."""
        return [await self._view(self._streams[name]) for name in sorted(self._streams) if name in self._streams]

    async def show(self, name: str) -> StreamView:
        """Return the view of one stream, with its readers."""
        return await self._view(self._found(name), readers=True)

    async def create(self, name: str, options: Any) -> StreamView:
        """Declare and store it. Records that an undeclared stream of this name has left are found in it."""
        check_name(self.noun, name)
        async with self._changing:
            present = self._streams.get(name)
            if present is not None:
                raise ConflictError(f"stream {name!r} is there already ({present.origin})")
            if len(self._streams) >= self._config.max_streams:
                raise self._too_many(self._config.max_streams)
            await self._store.records.put(COLLECTION, name, _encode(_DeclarationRecord(options)))
            await self._declare(name, options, CREATED)
            self._rebind()
            self._log.info("stream_created", stream=name)
            return await self._view(self._streams[name])

    async def change(self, name: str, options: Any) -> StreamView:
        """Change topics and bounds, from now on."""
        async with self._changing:
            stream = self._own(name)
            await self._store.records.put(COLLECTION, name, _encode(_DeclarationRecord(options)))
            stream.options = options
            self._rebind()
            return await self._view(stream)

    async def delete(self, name: str) -> None:
        """Remove it with its records and all readers' progress."""
        async with self._changing:
            stream = self._own(name)
            await self._store.records.put(COLLECTION, name, _encode(_DeclarationRecord(None)))
            readers = self.progress.forget(key_of(name))
            self._undeclare(stream)
            self._rebind()
            await stream.settle()  # what is under way is part of what goes
            await self._drop(name, readers)
            self._log.info("stream_deleted", stream=name)

    async def read(self, name: str, after: int, limit: int) -> Sequence[FoundMessage]:
        """Return records as operators see them; what cannot be read is shown as it is, with the reason."""
        self._found(name)
        found = []
        for stored in await self._store.streams.read(name, after, limit):
            try:
                record = decode(stored.value)
            except RecordError as error:
                found.append(
                    FoundMessage(
                        position=stored.offset,
                        topic="",
                        payload=stored.value,
                        time=stored.time,
                        properties={"unreadable": str(error)},
                    )
                )
                continue
            found.append(
                FoundMessage(
                    position=stored.offset,
                    topic=record.topic,
                    payload=record.payload,
                    time=stored.time,
                    publisher=record.client,
                    guid=record.guid.hex(),
                    properties={"qos": str(record.qos), **dict(record.user_properties)},
                )
            )
        return found

    # -- declarations

    async def _declare(self, name: str, options: StreamOptions | None, origin: str) -> None:
        """Make a stream, and let those who wait for it begin."""
        if len(self._streams) >= self._config.max_streams:
            raise self._too_many(self._config.max_streams)
        self._opening[name] = stream = Stream(name, options, origin, self._shared)
        try:
            await stream.open()
        finally:
            del self._opening[name]
        self._streams[name] = stream
        self.trimmer.wake()
        for reader in list(self._readers.get(name, ())):
            reader.declared(stream)

    def _undeclare(self, stream: Stream) -> None:
        del self._streams[stream.name]
        for reader in list(self._readers.get(stream.name, ())):
            reader.deleted()
        stream.close()

    async def _drop(self, name: str, readers: Iterable[str] = ()) -> None:
        """Remove progress and records, and at last the declaration that says they are to go."""
        await self.progress.erase(key_of(name), readers)
        await self._store.streams.drop(name)
        await self._store.records.delete(COLLECTION, name)

    def _found(self, name: str) -> Stream:
        stream = self._streams.get(name)
        if stream is None:
            raise self._unknown(name)
        return stream

    def _own(self, name: str) -> Stream:
        """Return a stream that may be changed here."""
        stream = self._found(name)
        if stream.origin == CONFIGURED:
            raise ConflictError(
                f"stream {name!r} stands in the configuration: change it there ([plugins.streams.stream.{name}]), "
                "then `motorcade config reload`"
            )
        if stream.origin != CREATED:
            raise ConflictError(f"stream {name!r} belongs to the plugin {stream.origin!r}")
        return stream

    def _unknown(self, name: str) -> UnknownError:
        return UnknownError(f"there is no stream {name!r}; `motorcade stream list` shows those there are")

    def _too_many(self, most: int) -> MotorcadeError:
        self._counters["refused_max_streams"] += 1
        return ConflictError(f"there may be {most} streams (option max_streams of the plugin streams)")

    # -- views

    async def _view(self, stream: Stream, *, readers: bool = False) -> StreamView:
        info = await self._store.streams.info(stream.name)
        cursors = [c for progress in self.progress.of_log(key_of(stream.name)) for c in progress.cursors.values()]
        options = stream.options
        return StreamView(
            name=stream.name,
            origin=stream.origin,
            topics=options.topics if options else (),
            retention=options.retention if options else 0.0,
            max_bytes=options.max_bytes if options else 0,
            max_messages=options.max_messages if options else 0,
            first=info.first,
            last=info.last,
            records=info.records,
            bytes=info.size_bytes,
            readers=len(cursors),
            lag=max((_lag(cursor.done, info) for cursor in cursors), default=0),
            reading=tuple(await self._reader_views(stream.name, info)) if readers else (),
        )

    async def _reader_views(self, name: str, info: StreamInfo) -> Sequence[ReaderView]:
        """Return views of subscriptions, then of clients that have none now."""
        connected = {reader.cursor for reader in self._readers.get(name, ())}
        views: list[ReaderView] = []
        for progress in self.progress.of_log(key_of(name)):
            for offset, cursor in progress.cursors.items():
                views.append(
                    ReaderView(
                        client=progress.client,
                        filter=f"{PREFIX}{name}/{offset}".removesuffix("/"),
                        connected=cursor in connected,
                        offset=cursor.done,
                        lag=_lag(cursor.done, info),
                        in_flight=cursor.in_flight,
                    )
                )
        subscribed = {view.client for view in views}
        for client, stored in (await self.progress.consumers(key_of(name))).items():
            if client not in subscribed and stored is not None:
                views.append(ReaderView(client=client, offset=stored.number, lag=_lag(stored.number, info)))
        return views[:MAX_READERS]


def _lag(offset: int, info: StreamInfo) -> int:
    return max(0, info.last - max(offset, info.first - 1))
