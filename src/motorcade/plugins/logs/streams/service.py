"""All streams of a node: what is declared, who reads, and what other plugins may do.

    records collection `stream`, key name:  [1, options, number, member]

    options  nil: it is being deleted, by the member;  number  another one for each stream of that name

What is declared in the configuration is not stored. A stream that is being deleted is marked so before anything of it
goes: if the node dies in between, the next one finishes it, and old records never turn up in a new stream of that name.

With several members (`delivery.declarations` tells them of each other's changes) the one that is asked to delete a
stream marks it; all others end its readers, let their own appends come to an end, and answer. Then records and progress
are removed, and at last the mark. If a member does not answer, or the one that deletes dies, that is done later: by the
member that the mark names, or once it is fenced by the steward of the cell.

A stream that is no longer in the configuration is not declared any more, but its records stay in the store: a
mistake in a file can be mended. `delete` is the only way to lose them, and for that it must be declared.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from motorcade.commit import Commit
from motorcade.core.errors import MotorcadeError
from motorcade.core.message import Message
from motorcade.core.record import RecordError, decode
from motorcade.core.trie import FilterTrie
from motorcade.delivery.declarations import DeclarationKind, Declarations
from motorcade.delivery.progress import LogKey, ProgressOptions, ProgressStore
from motorcade.extension.ask_all import ask_all, name_of
from motorcade.extension.cluster import MemberState
from motorcade.extension.declared import CONFIGURED, CREATED, ConflictError, FoundMessage, UnknownError, check_name
from motorcade.extension.plugin import Context
from motorcade.plugins.logs.streams.loader import Loader
from motorcade.plugins.logs.streams.options import StreamOptions, StreamsConfig
from motorcade.plugins.logs.streams.pages import Cache
from motorcade.plugins.logs.streams.position import PREFIX
from motorcade.plugins.logs.streams.reader import StreamSource, key_of
from motorcade.plugins.logs.streams.retention import Trimmer
from motorcade.plugins.logs.streams.stream import AppendBacklog, Shared, Stream
from motorcade.plugins.logs.streams.tails import LOOK, End, StreamTails
from motorcade.plugins.logs.streams.views import MAX_READERS, ReaderView, ReadingSummary, StreamView
from motorcade.storage.ports import Store, StoreError, StreamInfo

COLLECTION: Final = "stream"
KIND: Final = DeclarationKind("stream", COLLECTION, "d")
READING: Final = "stream.reading"  #: the question who reads a stream; of none: how many read each
LOOKS: Final = 32  #: streams that are looked at together
RETRY: Final = 5.0  #: seconds until progress that could not be written, or a deletion, is retried
LASTS: Final = 30 * 86400.0  #: seconds that progress in a stream without a retention is kept after the last commit


class _DeclarationRecord(msgspec.Struct, array_like=True, tag=1):
    options: StreamOptions | None  #: None: it is being deleted
    made: int = 0  #: another number for each stream of a name; 0: an earlier version has declared it
    by: str = ""  #: id of the member that deletes it


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_DeclarationRecord).decode
_decode_summaries = msgspec.msgpack.Decoder(dict[str, ReadingSummary]).decode
_decode_readers = msgspec.msgpack.Decoder(list[ReaderView]).decode


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

    def __init__(self, context: Context, config: StreamsConfig, bound: Callable[[Sequence[str]], None]) -> None:
        store: Store = context.store
        cluster, counters, log = context.cluster, context.counters, context.log
        self.now = now = context.hub.now
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
            shared=cluster is not None,
        )
        self.progress = ProgressStore(store, kept, now, context.spawn, counters, log)
        self._loader = Loader(context.spawn)
        self._shared = Shared(
            store,
            self.cache,
            self._loader,
            self.waiting,
            now,
            counters,
            log,
            self._trim_soon,
            self._moved,
            self._reads,
        )
        self._store = store
        self._counters = counters
        self._log = log
        self._spawn = context.spawn
        self._bound = bound  # told the filters of all streams when they change
        self._streams: dict[str, Stream] = {}
        self._opening: dict[str, Stream] = {}  # being declared
        self._unwatch: Callable[[], None] | None = None
        self._readers: dict[str, set[StreamSource]] = {}  # by name, declared or not
        self._trie: FilterTrie[tuple[Stream, ...]] = FilterTrie()
        self._declarations = Declarations(context, KIND, self._declared_elsewhere)
        self._changing = self._declarations.changing
        self._deleting: dict[str, _DeclarationRecord] = {}  # marked, and not finished
        self._finishing = False
        self._context = context
        self._cluster = cluster
        self._tails: StreamTails | None = None

    # -- for the plugin

    async def start(self, configured: Mapping[str, StreamOptions]) -> None:
        """Declare what is stored and what is configured."""
        self._unwatch = self._store.streams.watch(self._appended)
        async with self._changing:
            for name, value in (await self._declarations.load()).items():
                await self._restore(name, value, configured)
            for name, options in configured.items():
                await self._declare(name, options, CONFIGURED)
            self._rebind()
        self._declarations.follow()
        context, cluster = self._context, self._cluster
        if cluster is not None:
            self._tails = StreamTails(context, cluster, self)
            context.at_end(cluster.on_ask(READING, self._asked_reading))
            context.at_end(cluster.on_change(self._members_changed))
            context.spawn(self._look_at_tails, "tails")

    async def _restore(self, name: str, value: bytes, configured: Mapping[str, StreamOptions]) -> None:
        stored = self._read(name, value)
        if stored is None:
            return
        if stored.options is None:
            self._note_deletion(name, stored)
            if self._cluster is None:
                await self._drop(name)
        elif name in configured:
            self._log.warning("stream_declared_twice", stream=name, holds="configuration")
        else:
            await self._declare(name, stored.options, CREATED, stored.made)

    def _read(self, name: str, value: bytes) -> _DeclarationRecord | None:
        """Return what a record says; None, logged: it cannot be read."""
        try:
            return _decode(value)
        except (msgspec.MsgspecError, ValueError) as error:
            self._counters["declaration_unreadable"] += 1
            self._log.error("stream_declaration_unreadable", stream=name, error=str(error))
            return None

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

    def _appended(self, name: str, last: int) -> None:
        """Note that something was appended to the store, through this service or past it."""
        stream = self._streams.get(name) or self._opening.get(name)
        if stream is not None:
            stream.told(last)
            if self._tails is not None:
                self._tails.moved(name)

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

    def find_end(self, stream: Stream, found: Callable[[bool], None]) -> None:
        async def look() -> None:
            known = False
            try:
                await stream.look_at_tail()
                known = True
            except StoreError as error:
                self._counters["read_failed"] += 1
                self._log.error("stream_not_read", stream=stream.name, error=str(error))
            found(known)

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
        summaries, silent = await self._summaries()
        found = sorted(self._streams.values(), key=lambda stream: stream.name)
        return [await self._view_of(stream, summaries.get(stream.name), silent) for stream in found]

    async def show(self, name: str) -> StreamView:
        """Return the view of one stream, with its readers."""
        return await self._view(self._found(name), readers=True)

    async def create(self, name: str, options: Any) -> StreamView:
        """Declare and store it. Records that an undeclared stream of this name has left are found in it."""
        check_name(self.noun, name)
        async with self._changing:
            if name in self._deleting and self.several:
                await self._declarations.refresh(name)
            elif name in self._deleting:
                await self._drop(name)  # it was not finished
            present = self._streams.get(name)
            if present is not None:
                raise ConflictError(f"stream {name!r} is there already ({present.origin})")
            if name in self._deleting:
                raise ConflictError(f"stream {name!r} is being deleted, which another node has to confirm; try again")
            if len(self._streams) >= self._config.max_streams:
                raise self._too_many(self._config.max_streams)
            made = secrets.randbits(52)
            await self._declarations.write(name, _encode(_DeclarationRecord(options, made)))
            await self._declare(name, options, CREATED, made)
            self._rebind()
            self._log.info("stream_created", stream=name)
        return await self._told(name)

    async def change(self, name: str, options: Any) -> StreamView:
        """Change topics and bounds, from now on."""
        async with self._changing:
            stream = self._own(name)
            await self._declarations.write(name, _encode(_DeclarationRecord(options, stream.made)))
            stream.options = options
            self._rebind()
        return await self._told(name)

    async def _told(self, name: str) -> StreamView:
        """Return the view of a stream when all members have put it in force that answer; each is waited for once."""
        silent = await self._declarations.tell(name)
        stream = self._found(name)
        return await (self._view_of(stream, self._summaries_here().get(name), silent) if silent else self._view(stream))

    async def delete(self, name: str) -> None:
        """Remove it with its records and all readers' progress."""
        mark = _DeclarationRecord(None, by=self._cluster.me if self._cluster is not None else "")
        async with self._changing:
            stream = self._own(name)
            mark.made = stream.made
            await self._declarations.write(name, _encode(mark))
            self._note_deletion(name, mark)
            readers = await self._end(stream)
            if not self.several:
                await self._drop(name, readers)
                self._log.info("stream_deleted", stream=name)
                return
        await self._finish_deletion(name, readers)

    async def _end(self, stream: Stream) -> Sequence[str]:
        """Undeclare a stream that is deleted, and let what is under way end, which is part of what goes.

        Returns the clients whose progress may not be stored yet.
        """
        readers = self.progress.forget(key_of(stream.name))
        self._undeclare(stream)
        self._rebind()
        await stream.settle()
        return readers

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

    async def _declare(self, name: str, options: StreamOptions | None, origin: str, made: int = 0) -> None:
        """Make a stream, and let those who wait for it begin."""
        if len(self._streams) >= self._config.max_streams:
            raise self._too_many(self._config.max_streams)
        self._opening[name] = stream = Stream(name, options, origin, self._shared, made)
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
        await self._declarations.write(name, None)
        self._deleting.pop(name, None)

    # -- declarations of other members

    async def _declared_elsewhere(self, name: str, value: bytes | None) -> None:
        """Make what another member has declared, changed or deleted so here."""
        record = self._read(name, value) if value is not None else None
        present = self._streams.get(name)
        if present is not None and present.origin != CREATED:
            if record is not None and record.options is not None:
                self._log.warning("stream_declared_twice", stream=name, holds=present.origin)
            return
        if present is not None and (record is None or record.options is None or record.made != present.made):
            await self._end(present)
            await self.progress.unwritten.idle()
            present = None
        self._deleting.pop(name, None)
        if record is None:
            return
        if record.options is None:
            self._note_deletion(name, record)
        elif present is not None:
            present.options = record.options
        else:
            try:
                await self._declare(name, record.options, CREATED, record.made)
            except ConflictError as error:  # the bound of this node is lower
                self._log.error("stream_not_declared", stream=name, error=str(error))
        self._rebind()

    def _note_deletion(self, name: str, mark: _DeclarationRecord) -> None:
        self._deleting[name] = mark
        if self._cluster is not None and not self._finishing:
            self._finishing = True
            self._spawn(self._finish_deletions, "delete")

    async def _finish_deletions(self) -> None:
        """Finish deletions that a member has not confirmed yet, or that their member has left."""
        try:
            while self._deleting:
                await asyncio.sleep(RETRY)
                for name in list(self._deleting):
                    try:
                        if await self._adopt_deletion(name):
                            await self._finish_deletion(name)
                    except (StoreError, ConflictError) as error:
                        self._log.info("stream_deletion_waits", stream=name, reason=str(error))
        finally:
            self._finishing = False

    async def _adopt_deletion(self, name: str) -> bool:
        """Return True if it is this member that finishes a deletion; it takes the place of one that is fenced."""
        cluster = self._cluster
        assert cluster is not None  # noqa: S101 - alone, a deletion is finished at once or with the next start
        async with self._changing:
            mark = self._deleting.get(name)
            if mark is None or mark.by == cluster.me:
                return mark is not None
            alive = any(member.id == mark.by and member.state is not MemberState.FENCED for member in cluster.members())
            if alive or not self._is_steward(name):
                return False
            mark = _DeclarationRecord(None, mark.made, cluster.me)
            await self._declarations.write(name, _encode(mark))
            self._deleting[name] = mark
        return True

    async def _finish_deletion(self, name: str, readers: Iterable[str] = ()) -> None:
        """Have all members end a stream, and remove it; if one does not answer, that is tried again later."""
        silent = await self._declarations.tell(name)
        if silent:
            self._log.warning("stream_deletion_waits", stream=name, silent=silent)
            return
        async with self._changing:
            mark = self._deleting.get(name)
            if mark is None or (self._cluster is not None and mark.by != self._cluster.me):
                return  # another member has finished it
            await self.progress.unwritten.idle()
            await self._drop(name, readers)
            self._log.info("stream_deleted", stream=name)

    # -- other members: ends of streams, and who trims

    @property
    def shared(self) -> bool:
        """Return True if other members may append and trim too."""
        return self._cluster is not None

    @property
    def several(self) -> bool:
        """Return True while there are others."""
        return self._cluster is not None and bool(self._cluster.peers)

    def keeps(self, stream: Stream) -> bool:
        """Return True if this member trims a stream."""
        return self._is_steward(stream.name)

    def _is_steward(self, name: str) -> bool:
        return self._cluster is None or self._cluster.is_steward(self._store.feeds.feed_of(name))

    def _members_changed(self) -> None:
        self.trimmer.members_changed()

    def _trim_soon(self, stream: Stream) -> None:
        if self._tails is None or self.keeps(stream):
            self.trimmer.wake()
        elif stream.overflows():
            self._tails.full(stream.name)

    def _moved(self, name: str) -> None:
        if self._tails is not None:
            self._tails.moved(name)

    def _reads(self, name: str, reads: bool) -> None:
        if self._tails is not None:
            (self._tails.read if reads else self._tails.unread)(name)

    def read_here(self) -> Iterable[str]:
        """Return the names of streams that have readers here."""
        return [stream.name for stream in self._streams.values() if stream.readers]

    def end_of(self, name: str) -> End | None:
        """Return what is known here of a stream."""
        stream = self._streams.get(name)
        return End(name, stream.last, stream.first) if stream is not None and stream.last else None

    def told_end(self, end: End) -> None:
        """Take what another member knows of a stream."""
        stream = self._streams.get(end.stream)
        if stream is not None:
            stream.told(end.last, end.first)

    def told_full(self, name: str) -> None:
        """Trim a stream, if that is for this member to do."""
        stream = self._streams.get(name)
        if stream is not None and self.keeps(stream):
            stream.uncounted = True
            self.trimmer.wake()

    async def _look_at_tails(self) -> None:
        """Look for what readers that wait at the tail of a stream were not told of."""
        while True:
            await asyncio.sleep(LOOK)
            awaited = [stream for stream in self._streams.values() if stream.awaited] if self.several else []
            for start in range(0, len(awaited), LOOKS):
                looks = (stream.look_at_tail() for stream in awaited[start : start + LOOKS])
                for failure in await asyncio.gather(*looks, return_exceptions=True):
                    if isinstance(failure, StoreError):
                        self._counters["read_failed"] += 1
                    elif isinstance(failure, BaseException):
                        raise failure

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
        """Return the view of one stream; `readers`: with those of all members."""
        if not readers:
            summaries, silent = await self._summaries(stream.name)
            return await self._view_of(stream, summaries.get(stream.name), silent)
        views, silent = [*self._readers_here(stream.name)], {}
        if self._cluster is not None:
            answers = await ask_all(self._cluster, READING, stream.name.encode())
            silent = answers.silent
            for answer in answers.found.values():
                views += _decode_readers(answer)
        lowest = min((view.offset for view in views), default=-1)
        view = await self._view_of(stream, ReadingSummary(len(views), lowest), silent)
        reading = await self._with_lags(stream.name, views, view)
        return msgspec.structs.replace(view, reading=tuple(reading))

    async def _view_of(self, stream: Stream, reading: ReadingSummary | None, silent: dict[str, str]) -> StreamView:
        info = await self._store.streams.info(stream.name)
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
            readers=reading.readers if reading else 0,
            lag=_lag(reading.lowest, info) if reading and reading.readers else 0,
            unanswered=silent,
        )

    async def _summaries(self, name: str = "") -> tuple[dict[str, ReadingSummary], dict[str, str]]:
        """Return how many read each stream, or one, on all members, and those that do not answer."""
        found = self._summaries_here()
        if self._cluster is None or not self._cluster.peers:
            return found, {}
        answers = await ask_all(self._cluster, READING)
        for answer in answers.found.values():
            for stream, there in _decode_summaries(answer).items():
                here = found.get(stream)
                if not name or stream == name:
                    found[stream] = there if here is None else here.beside(there)
        return found, answers.silent

    def _summaries_here(self) -> dict[str, ReadingSummary]:
        found: dict[str, ReadingSummary] = {}
        for name in self._streams:
            done = [
                cursor.done for progress in self.progress.of_log(key_of(name)) for cursor in progress.cursors.values()
            ]
            if done:
                found[name] = ReadingSummary(len(done), min(done))
        return found

    def _readers_here(self, name: str) -> Sequence[ReaderView]:
        """Return the subscriptions of this node to a stream."""
        connected = {reader.cursor for reader in self._readers.get(name, ())}
        return [
            ReaderView(
                client=progress.client,
                filter=f"{PREFIX}{name}/{offset}".removesuffix("/"),
                connected=cursor in connected,
                offset=cursor.done,
                lag=0,
                in_flight=cursor.in_flight,
                node=name_of(self._cluster.me) if self._cluster is not None else "",
            )
            for progress in self.progress.of_log(key_of(name))
            for offset, cursor in progress.cursors.items()
        ][:MAX_READERS]

    async def _asked_reading(self, _member: str, body: bytes) -> bytes:
        name = body.decode()
        return _encode(self._readers_here(name) if name else self._summaries_here())

    async def _with_lags(self, name: str, views: Sequence[ReaderView], stream: StreamView) -> Sequence[ReaderView]:
        """Return views of subscriptions with their lags, then of clients that have none now."""
        found = [msgspec.structs.replace(view, lag=_lag(view.offset, stream)) for view in views]
        found.sort(key=lambda view: (view.client, view.filter))  # the same on every node
        subscribed = {view.client for view in views}
        for client, stored in (await self.progress.consumers(key_of(name))).items():
            if client not in subscribed and stored is not None:
                found.append(ReaderView(client=client, offset=stored.number, lag=_lag(stored.number, stream)))
        return found[:MAX_READERS]


def _lag(offset: int, info: StreamInfo | StreamView) -> int:
    return max(0, info.last - max(offset, info.first - 1))
