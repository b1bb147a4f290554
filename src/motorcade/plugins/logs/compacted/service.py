"""The operator's view of compacted queues and actions on them: `extension.compacted.Compacted`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from heapq import nsmallest
from typing import Final

import msgspec

from motorcade.core.errors import MotorcadeError
from motorcade.core.record import RecordError
from motorcade.delivery.progress import Progress, Stored
from motorcade.delivery.record import payload_of
from motorcade.extension.cluster import Cluster, End
from motorcade.extension.compacted import CompactedKind, CompactedView, ConsumerView, RewindView
from motorcade.extension.declared import BadOptionsError, ConflictError, FoundMessage, UnknownError
from motorcade.plugins.logs.compacted.members import REWIND, SHOW
from motorcade.plugins.logs.compacted.queue import CompactedQueue, Consumer
from motorcade.plugins.logs.compacted.record import FORM
from motorcade.plugins.logs.compacted.source import Tools
from motorcade.plugins.logs.compacted.tables import QUEUES, SHAPES
from motorcade.plugins.logs.compacted.topics import quoted
from motorcade.storage.ports import Batch, Entry, StoreError

PAGE: Final = 256  #: messages read at once
MAX_SHOWN: Final = 1000  #: consumers shown with one queue

_NOUN: Final = {CompactedKind.EXCLUSIVE: "exclusive queue of client", CompactedKind.SHARED: "shared compacted queue"}


class ShowQuestion(msgspec.Struct, array_like=True):
    """The question for the consumers of a queue that a member has."""

    kind: CompactedKind
    name: str


class RewindQuestion(msgspec.Struct, array_like=True):
    """The question to rewind a consumer, if it is connected there."""

    kind: CompactedKind
    name: str
    client: str
    to: int | None
    since: float | None
    preview: bool


class RewindAnswer(msgspec.Struct, array_like=True):
    """The outcome of a rewind."""

    view: RewindView | None = None
    problem: str = ""
    bad_options: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode_show = msgspec.msgpack.Decoder(ShowQuestion).decode
_decode_shown = msgspec.msgpack.Decoder(dict[str, int]).decode
_decode_rewind = msgspec.msgpack.Decoder(RewindQuestion).decode
_decode_rewound = msgspec.msgpack.Decoder(RewindAnswer).decode


class CompactedService:
    """All compacted queues, from any node."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def answer(self, cluster: Cluster, at_end: Callable[[End], None]) -> None:
        """Answer the questions of other members."""
        at_end(cluster.on_ask(SHOW, self._answer_show))
        at_end(cluster.on_ask(REWIND, self._answer_rewind))

    # -- looking

    async def list(self, kind: CompactedKind, after: str = "", limit: int = 100) -> Sequence[CompactedView]:
        shape = SHAPES[kind]
        skip = len(shape.owners)
        scan = self._tools.store.records.scan(QUEUES, self._tools.now(), shape.owners)
        names = [owner[skip:] async for owner, _ in scan if owner[skip:] > after]
        return [await self._view(CompactedQueue(self._tools.queues, shape, name)) for name in nsmallest(limit, names)]

    async def _view(self, queue: CompactedQueue) -> CompactedView:
        info = await self._tools.store.mailboxes.info(queue.owner)
        return CompactedView(
            kind=queue.shape.form,
            name=queue.name,
            messages=info.entries,
            bytes=info.size_bytes,
            first=info.first,
            last=info.last,
            consumers=len(await self._tools.progress.consumers(queue.log_key)),
        )

    async def show(self, kind: CompactedKind, name: str) -> CompactedView:
        queue = await self._find(kind, name)
        consuming = await self._flushed(queue)
        unanswered: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
        members = self._tools.queues.members
        if members:
            answers = await members.ask_all(SHOW, _encode(ShowQuestion(kind, name)))
            unanswered = answers.silent or msgspec.UNSET
            for body in answers.found.values():
                consuming |= _decode_shown(body)
        stored = dict.fromkeys(consuming) | await self._tools.progress.consumers(queue.log_key)
        info = await self._tools.store.mailboxes.info(queue.owner)
        oldest: float | None = None
        numbers: list[int] = []
        async for entry in self._entries(queue):
            oldest = entry.stored_at if oldest is None else oldest
            numbers.append(entry.position)
        return CompactedView(
            kind=kind,
            name=name,
            messages=info.entries,
            bytes=info.size_bytes,
            first=info.first,
            last=info.last,
            oldest=oldest,
            consumers=len(stored),
            consuming=tuple(
                _consumer(client, stored[client], consuming.get(client), numbers)
                for client in nsmallest(MAX_SHOWN, stored)
            ),
            unanswered=unanswered,
        )

    async def _flushed(self, queue: CompactedQueue) -> dict[str, int]:
        """Store the progress of those that consume a queue here; return what each has in flight."""
        for progress in self._tools.progress.of_log(queue.log_key):
            with suppress(StoreError):  # what is stored is shown
                await self._tools.progress.flush(progress)
        return {each.progress.client: len(each.feed.inflight) for each in self._consuming(queue)}

    async def _answer_show(self, _member: str, body: bytes) -> bytes:
        question = _decode_show(body)
        return _encode(await self._flushed(CompactedQueue(self._tools.queues, SHAPES[question.kind], question.name)))

    async def _find(self, kind: CompactedKind, name: str) -> CompactedQueue:
        """Return a queue that is in the store, perhaps not in memory; `UnknownError`."""
        queue = CompactedQueue(self._tools.queues, SHAPES[kind], name)
        if "\0" in name or await self._tools.store.records.get(QUEUES, queue.owner, self._tools.now()) is None:
            raise UnknownError(
                f"there is no {_NOUN[kind]} {quoted(name)}; it begins with the first message published to "
                f"{queue.shape.root}/w/{quoted(name)[1:-1]}/KEY"
            )
        return queue

    def _consuming(self, queue: CompactedQueue) -> Sequence[Consumer]:
        """Return those that consume a queue now."""
        known = self._tools.queues.peek(queue.shape, queue.name)
        return list(known.consumers) if known is not None else ()

    async def _entries(self, queue: CompactedQueue, after: int = 0) -> AsyncIterator[Entry]:
        """Yield the entries to deliver, oldest first."""
        tools = self._tools
        while True:
            entries = await tools.store.mailboxes.read(queue.owner, after, PAGE, tools.now())
            oldest = tools.queues.oldest()
            for entry in entries:
                if entry.stored_at > oldest:
                    yield entry
            if len(entries) < PAGE:
                return
            after = entries[-1].position

    async def read(self, kind: CompactedKind, name: str, after: int = 0, limit: int = 100) -> Sequence[FoundMessage]:
        queue = await self._find(kind, name)
        found: list[FoundMessage] = []
        if limit > 0:
            async for entry in self._entries(queue, after):
                found.append(_found(queue, entry))
                if len(found) >= limit:
                    break
        return found

    # -- rewinding

    async def rewind(
        self,
        kind: CompactedKind,
        name: str,
        consumer: str = "",
        *,
        to: int | None = None,
        since: float | None = None,
        preview: bool = False,
    ) -> RewindView:
        if (to is None) == (since is None):
            raise BadOptionsError("rewind: give either a number (to) or a time (since)")
        queue = await self._find(kind, name)
        client = self._named(queue, consumer)
        members = self._tools.queues.members
        if members and not self._has(queue, client):
            answers = await members.ask_all(REWIND, _encode(RewindQuestion(kind, name, client, to, since, preview)))
            for body in filter(None, answers.found.values()):
                return _result(_decode_rewound(body))
        await self._check_consumer(queue, client)
        view = await self._rewind(queue, client, to, since, preview=preview)
        if members and not preview and not self._has(queue, client):
            members.tell_rewound(queue, client)
        return view

    async def _answer_rewind(self, _member: str, body: bytes) -> bytes:
        """Rewind a consumer that is connected here; an empty answer says that it is not."""
        question = _decode_rewind(body)
        queue = CompactedQueue(self._tools.queues, SHAPES[question.kind], question.name)
        if not self._has(queue, question.client):
            return b""
        try:
            view = await self._rewind(queue, question.client, question.to, question.since, preview=question.preview)
        except MotorcadeError as error:
            return _encode(RewindAnswer(None, str(error), isinstance(error, BadOptionsError)))
        return _encode(RewindAnswer(view))

    async def rewound(self, queue: CompactedQueue, client: str) -> None:
        """Let a consumer begin again that another member has rewound."""
        progress = self._tools.progress.peek(queue.log_key, client)
        if progress is not None and await self._tools.progress.renew(progress):
            self._restart(queue, progress)

    def _has(self, queue: CompactedQueue, client: str) -> bool:
        """Return True if a client consumes a queue here."""
        return any(each.progress.client == client for each in self._consuming(queue))

    def _restart(self, queue: CompactedQueue, progress: Progress) -> None:
        for each in self._consuming(queue):
            if each.progress is progress:
                each.restart()

    async def _rewind(
        self, queue: CompactedQueue, client: str, to: int | None, since: float | None, *, preview: bool
    ) -> RewindView:
        progress = self._tools.progress.open(queue.log_key, client)
        try:
            await self._tools.progress.load(progress)
            view = await self._plan(queue, progress, to, since)
            if preview:
                return view
            self._tools.progress.rewind(progress, view.progress)
            self._tools.counters["rewound"] += 1
            self._tools.log.info("ecq_rewound", queue=queue.owner, client=client, before=view.before, to=view.progress)
            self._restart(queue, progress)
            await self._tools.progress.flush(progress)
        finally:
            self._tools.progress.close(progress)
        return msgspec.structs.replace(view, preview=False)

    def _named(self, queue: CompactedQueue, consumer: str) -> str:
        """Return the client id of the consumer that is meant."""
        if queue.shape.form is CompactedKind.EXCLUSIVE:
            if consumer not in ("", queue.name):
                raise UnknownError(f"the queue of client {quoted(queue.name)} has no other consumer than that client")
            return queue.name
        if not consumer:
            raise BadOptionsError(f"rewind: shared queue {quoted(queue.name)} has many consumers; name one")
        return consumer

    async def _check_consumer(self, queue: CompactedQueue, consumer: str) -> None:
        """Raise `UnknownError` if a shared queue has no such consumer."""
        if queue.shape.form is CompactedKind.EXCLUSIVE:
            return
        progress, log = self._tools.progress, queue.log_key
        known = progress.peek(log, consumer) is not None
        if "\0" in consumer or (not known and await progress.read(log, consumer) is None):  # no key has that character
            raise UnknownError(f"shared queue {quoted(queue.name)} has no consumer {quoted(consumer)}")

    async def _plan(self, queue: CompactedQueue, progress: Progress, to: int | None, since: float | None) -> RewindView:
        """Plan a rewind. The queue is read as a whole: only what is still there counts."""
        last = (await self._tools.store.mailboxes.info(queue.owner)).last
        if to is not None and not 0 <= to <= last + 1:
            raise BadOptionsError(f"rewind: to: {to} is not between 0 and {last + 1}; the last number is {last}")
        target = max(0, to - 1) if to is not None else None
        progress.gather()
        before = progress.number
        messages = size_bytes = skipped = first = end = 0
        async for entry in self._entries(queue):
            number = entry.position
            if target is None and since is not None:
                if entry.stored_at < since and number <= before:
                    continue
                target = min(before, number - 1)
            if target is not None and number > target:
                messages += 1
                size_bytes += len(entry.body) + len(entry.payload)
                first, end = first or number, number
            elif number > before:
                skipped += 1
        if target is None:
            target = before
        return RewindView(
            kind=queue.shape.form,
            name=queue.name,
            consumer=progress.client,
            preview=True,
            before=before,
            progress=target,
            messages=messages,
            bytes=size_bytes,
            first=first,
            last=end,
            skipped=skipped,
        )

    # -- the end of a queue

    async def delete(self, kind: CompactedKind, name: str) -> None:
        queue = await self._find(kind, name)
        known = self._tools.queues.open(queue.shape, name)
        await self._tools.queues.hold(known, lambda: self._delete(known))
        self._tools.queues.drop(known)

    async def _delete(self, queue: CompactedQueue) -> None:
        """Delete it, while nothing is appended; what waits to be is in the queue that begins after this one."""
        tools = self._tools
        await tools.store.mailboxes.clear(queue.owner)
        last = (await tools.store.mailboxes.info(queue.owner)).last
        await tools.progress.erase(queue.log_key, tools.progress.forget(queue.log_key, last))
        batch = Batch()
        batch.delete(QUEUES, queue.owner)
        await tools.queues.forget(queue, batch)
        tools.counters["deleted"] += 1
        queue.reached(last)
        for consumer in list(queue.consumers):
            consumer.restart()


def _result(answer: RewindAnswer) -> RewindView:
    if answer.view is not None:
        return answer.view
    raise (BadOptionsError if answer.bad_options else ConflictError)(answer.problem)


def _consumer(client: str, stored: Stored | None, in_flight: int | None, numbers: Sequence[int]) -> ConsumerView:
    number = stored.number if stored is not None else 0
    return ConsumerView(
        client=client,
        connected=in_flight is not None,
        progress=number,
        acked_at=stored.time if stored is not None else None,
        waiting=len(numbers) - bisect_right(numbers, number),
        in_flight=in_flight or 0,
    )


def _found(queue: CompactedQueue, entry: Entry) -> FoundMessage:
    key = entry.key.decode(errors="replace")
    told = {"key": key}
    try:
        stored = FORM.decode(entry.body)
    except RecordError as error:
        told["error"] = str(error)
        return FoundMessage(
            position=entry.position, topic=queue.topic_of(entry), payload=b"", time=entry.stored_at, properties=told
        )
    if stored.content_type is not None:
        told["content-type"] = stored.content_type
    return FoundMessage(
        position=entry.position,
        topic=queue.topic_of(entry),
        payload=payload_of(stored, entry.payload),
        time=entry.stored_at,
        publisher=stored.client,
        guid=stored.guid.hex(),
        properties=dict(stored.user_properties) | {"qos": str(stored.qos)} | told,
    )
