"""What operators see of compacted queues and do to them: `extension.compacted.Compacted`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from heapq import nsmallest
from typing import Final

import msgspec

from motorcade.core.record import RecordError
from motorcade.extension.compacted import CompactedView, ConsumerView, Form, RewindView
from motorcade.extension.declared import BadOptionsError, Found, UnknownError
from motorcade.plugins.ecq import record
from motorcade.plugins.ecq.progress import Progress
from motorcade.plugins.ecq.queue import Consumer, Queue
from motorcade.plugins.ecq.source import Tools
from motorcade.plugins.ecq.tables import QUEUES, SHAPES, ProgressRecord
from motorcade.plugins.ecq.topics import quoted
from motorcade.storage.ports import Batch, Entry, StoreError

PAGE: Final = 256  #: messages read at once
MAX_SHOWN: Final = 1000  #: consumers shown with one queue

_NOUN: Final = {Form.EXCLUSIVE: "exclusive queue of client", Form.SHARED: "shared compacted queue"}


class CompactedService:
    """All compacted queues of a node."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    # -- looking

    async def list(self, kind: Form, after: str = "", limit: int = 100) -> Sequence[CompactedView]:
        shape = SHAPES[kind]
        skip = len(shape.owners)
        scan = self._tools.store.records.scan(QUEUES, self._tools.now(), shape.owners)
        names = [owner[skip:] async for owner, _ in scan if owner[skip:] > after]
        return [await self._view(Queue(shape, name)) for name in nsmallest(limit, names)]

    async def _view(self, queue: Queue) -> CompactedView:
        info = await self._tools.store.mailboxes.info(queue.owner)
        return CompactedView(
            kind=queue.shape.form,
            name=queue.name,
            messages=info.entries,
            bytes=info.octets,
            first=info.first,
            last=info.last,
            consumers=len(await self._progress(queue)),
        )

    async def show(self, kind: Form, name: str) -> CompactedView:
        queue = await self._find(kind, name)
        known = self._tools.queues.peek(queue.shape, name)
        consuming = {consumer.progress.client: consumer for consumer in known.consumers} if known is not None else {}
        for unwritten in self._tools.ledger.unwritten(queue):
            with suppress(StoreError):  # what is stored is shown
                await self._tools.ledger.flush(unwritten)
        progress = await self._progress(queue)
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
            bytes=info.octets,
            first=info.first,
            last=info.last,
            oldest=oldest,
            consumers=len(progress),
            consuming=tuple(
                _consumer(client, progress[client], consuming.get(client), numbers)
                for client in nsmallest(MAX_SHOWN, progress)
            ),
        )

    async def _find(self, kind: Form, name: str) -> Queue:
        """A queue that is there, not the one in memory; `UnknownError`."""
        queue = Queue(SHAPES[kind], name)
        if "\0" in name or await self._tools.store.records.get(QUEUES, queue.owner, self._tools.now()) is None:
            raise UnknownError(
                f"there is no {_NOUN[kind]} {quoted(name)}; it begins with the first message published to "
                f"{queue.shape.root}/w/{quoted(name)[1:-1]}/KEY"
            )
        return queue

    async def _progress(self, queue: Queue) -> dict[str, ProgressRecord | None]:
        """What is stored of each consumer; None for one that consumes and has acknowledged nothing yet."""
        tools, shape = self._tools, queue.shape
        known = tools.queues.peek(shape, queue.name)
        found: dict[str, ProgressRecord | None] = {}
        if known is not None:
            found = {consumer.progress.client: consumer.progress.stored for consumer in known.consumers}
        for progress in tools.ledger.unwritten(queue):
            found.setdefault(progress.client, progress.stored)
        if shape.form is Form.EXCLUSIVE:
            stored = await tools.ledger.read(queue, queue.name)
            if stored is not None:
                found[queue.name] = stored
            return found
        prefix = f"{queue.name}/"
        async for key, value in tools.store.records.scan(shape.progress, tools.now(), prefix):
            found[key.removeprefix(prefix)] = tools.ledger.decode(key, value)
        return found

    async def _entries(self, queue: Queue, after: int = 0) -> AsyncIterator[Entry]:
        """What is to be delivered, oldest first."""
        tools = self._tools
        known = tools.queues.peek(queue.shape, queue.name)
        while True:
            now = tools.now()
            entries = await tools.store.mailboxes.read(queue.owner, after, PAGE, now)
            oldest = now - tools.config.retention if tools.config.retention else 0.0
            for entry in entries:
                if entry.stored_at > oldest and (known is None or entry.position not in known.doomed):
                    yield entry
            if len(entries) < PAGE:
                return
            after = entries[-1].position

    async def read(self, kind: Form, name: str, after: int = 0, limit: int = 100) -> Sequence[Found]:
        queue = await self._find(kind, name)
        found: list[Found] = []
        if limit > 0:
            async for entry in self._entries(queue, after):
                found.append(_found(queue, entry))
                if len(found) >= limit:
                    break
        return found

    # -- rewinding

    async def rewind(
        self,
        kind: Form,
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
        client = await self._consumer(queue, consumer)
        progress = self._tools.ledger.open(queue, client)
        try:
            await self._tools.ledger.load(progress)
            view = await self._plan(queue, progress, to, since)
            if preview:
                return view
            self._tools.ledger.rewind(progress, view.progress)
            self._tools.counters["rewound"] += 1
            self._tools.log.info("ecq_rewound", queue=queue.owner, client=client, before=view.before, to=view.progress)
            known = self._tools.queues.peek(queue.shape, name)
            for each in [*known.consumers] if known is not None else ():
                if each.progress is progress:
                    each.restart()
            await self._tools.ledger.flush(progress)
        finally:
            self._tools.ledger.close(progress)
        return msgspec.structs.replace(view, preview=False)

    async def _consumer(self, queue: Queue, consumer: str) -> str:
        """The client id of a consumer; `UnknownError` if there is no such one."""
        if queue.shape.form is Form.EXCLUSIVE:
            if consumer not in ("", queue.name):
                raise UnknownError(f"the queue of client {quoted(queue.name)} has no other consumer than that client")
            return queue.name
        if not consumer:
            raise BadOptionsError(f"rewind: shared queue {quoted(queue.name)} has many consumers; name one")
        known = self._tools.queues.peek(queue.shape, queue.name)
        consuming = known is not None and any(each.progress.client == consumer for each in known.consumers)
        pending = self._tools.ledger.peek(queue, consumer) is not None
        nobody = "\0" in consumer  # the store has no such keys
        if nobody or (not (consuming or pending) and await self._tools.ledger.read(queue, consumer) is None):
            raise UnknownError(f"shared queue {quoted(queue.name)} has no consumer {quoted(consumer)}")
        return consumer

    async def _plan(self, queue: Queue, progress: Progress, to: int | None, since: float | None) -> RewindView:
        """What a rewind would do. The queue is read as a whole: only what is still there counts."""
        last = (await self._tools.store.mailboxes.info(queue.owner)).last
        if to is not None and not 0 <= to <= last + 1:
            raise BadOptionsError(f"rewind: to: {to} is not between 0 and {last + 1}; the last number is {last}")
        target = max(0, to - 1) if to is not None else None
        before = progress.number
        messages = octets = skipped = first = end = 0
        async for entry in self._entries(queue):
            number = entry.position
            if target is None and since is not None:
                if entry.stored_at < since and number <= before:
                    continue
                target = min(before, number - 1)
            if target is not None and number > target:
                messages += 1
                octets += len(entry.body) + len(entry.payload)
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
            bytes=octets,
            first=first,
            last=end,
            skipped=skipped,
        )

    # -- the end of a queue

    async def delete(self, kind: Form, name: str) -> None:
        queue = await self._find(kind, name)
        await self._tools.appender.between(lambda: self._delete(queue))

    async def _delete(self, queue: Queue) -> None:
        """While nothing is appended; what waits to be is in the queue that begins after this one."""
        tools, shape = self._tools, queue.shape
        known = tools.queues.peek(shape, queue.name)
        if known is not None:
            known.registered = False
        progress = [*await self._progress(queue)]
        last = (await tools.store.mailboxes.info(queue.owner)).last
        await tools.store.mailboxes.clear(queue.owner)
        batch = Batch()
        batch.delete(QUEUES, queue.owner)
        for client in progress:
            pending = tools.ledger.peek(queue, client)
            if pending is not None:
                tools.ledger.forget(pending, last)
            batch.delete(shape.progress, shape.progress_key(queue.name, client))
        await tools.store.write(batch)
        tools.appender.count -= 1
        tools.counters["deleted"] += 1
        if known is not None and known.idle:
            tools.queues.drop(known)
        elif known is not None:
            known.progresses = None
            known.sizes = None
            tools.appender.look(known)
            for consumer in [*known.consumers]:
                consumer.restart()


def _consumer(
    client: str, stored: ProgressRecord | None, consumer: Consumer | None, numbers: Sequence[int]
) -> ConsumerView:
    number = stored.number if stored is not None else 0
    return ConsumerView(
        client=client,
        connected=consumer is not None,
        progress=number,
        acked_at=stored.time if stored is not None else None,
        waiting=len(numbers) - bisect_right(numbers, number),
        in_flight=consumer.in_flight if consumer is not None else 0,
    )


def _found(queue: Queue, entry: Entry) -> Found:
    key = entry.key.decode(errors="replace")
    told = {"key": key}
    try:
        stored = record.decode(entry.body)
    except RecordError as error:
        told["error"] = str(error)
        return Found(
            position=entry.position, topic=queue.topic_of(entry), payload=b"", time=entry.stored_at, properties=told
        )
    if stored.content_type is not None:
        told["content-type"] = stored.content_type
    return Found(
        position=entry.position,
        topic=queue.topic_of(entry),
        payload=entry.payload if stored.payload is None else stored.payload,
        time=entry.stored_at,
        publisher=stored.publisher,
        guid=stored.guid.hex(),
        properties=dict(stored.user_properties) | {"qos": str(stored.qos)} | told,
    )
