"""All queues of a node: the service `queues` (see `extension.declared`), and how messages and clients find them.

One change at a time. A change is checked first, written second and takes effect last, so that an error leaves
everything as it was. A queue that is taken out of the configuration is no longer served, but keeps its messages: they
are there if it is declared again, and go if it is deleted by name.

A client may subscribe before there is a queue, or after it was deleted. It waits here, at no cost, and joins when a
queue of that name is added.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from motorcade.core.errors import MotorcadeError
from motorcade.core.trie import FilterTrie
from motorcade.extension.declared import CONFIGURED, CREATED, ConflictError, FoundMessage, UnknownError, check_name
from motorcade.plugins.logs.queues import options as options_
from motorcade.plugins.logs.queues.dispatcher import QueueConsumer
from motorcade.plugins.logs.queues.members import decode_consuming
from motorcade.plugins.logs.queues.options import NOUN, QueueOptions, check, check_chain
from motorcade.plugins.logs.queues.queue import Queue
from motorcade.plugins.logs.queues.store import QueueStore
from motorcade.plugins.logs.queues.tables import COLLECTION, MAX_LEVELS, mailbox_of
from motorcade.storage.ports import Batch, StoreConflictError, StoreError

if TYPE_CHECKING:
    from motorcade.plugins.logs.queues.members import Consuming, QueueMembers
    from motorcade.plugins.logs.queues.source import QueueSource

MAX_ROUTES: Final = 4096  #: topics whose queues are remembered; then all are forgotten


class QueueConsumerView(msgspec.Struct, frozen=True, kw_only=True):
    """A client that consumes a queue."""

    client: str
    unacked: int  #: messages it has got, or is about to get, and not acknowledged
    sent: int  #: of these, sent


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """A queue at one moment."""

    name: str
    origin: str
    messages: int  #: in the store, those that consumers hold too
    bytes: int
    consumers: int
    inflight: int  #: messages that consumers hold
    options: QueueOptions


class QueueDetail(QueueView, frozen=True, kw_only=True):
    """A queue with all there is to know."""

    oldest: float | None  #: when the oldest message was stored, in seconds since the epoch
    dead_lettered: int  #: messages given up, since the start of the node
    clients: list[QueueConsumerView]
    unanswered: dict[str, str] | msgspec.UnsetType = msgspec.UNSET  #: nodes that did not answer, and why


class QueueService:
    """The queues that are declared now, by name."""

    noun: ClassVar[str] = NOUN
    Options: ClassVar[type[msgspec.Struct]] = QueueOptions

    def __init__(self, store: QueueStore, max_queues: int, changed: Callable[[], None]) -> None:
        """Take `changed`, which is called when queues may be bound to other filters."""
        self.max_queues = max_queues
        self.now = store.now
        self.routes: dict[str, tuple[Queue, ...]] = {}  #: queues by topic, as far as remembered
        self.members: QueueMembers | None = None  #: the others of a cluster; None: this node is alone
        self.store = store.store
        self._store = store
        self._changed = changed
        self._queues: dict[str, Queue] = {}
        self._trie: FilterTrie[list[Queue]] = FilterTrie()
        self._waiting: dict[str, dict[QueueConsumer, None]] = {}
        self._changing = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[Queue]:
        return iter([self._queues[name] for name in sorted(self._queues)])

    def get(self, name: str) -> Queue | None:
        """Return a queue by name."""
        return self._queues.get(name)

    def filters(self) -> set[str]:
        """Return what all queues are bound to."""
        return {filter_ for queue in self for filter_ in queue.options.topics}

    def match(self, topic: str) -> tuple[Queue, ...]:
        """Return the queues that a message of a topic is appended to."""
        found = self.routes.get(topic)
        if found is None:
            found = tuple({queue: None for queues in self._trie.match(topic) for queue in queues})
            if len(self.routes) >= MAX_ROUTES:
                self.routes.clear()
            self.routes[topic] = found
        return found

    # -- queues come and go

    def add(self, queue: Queue) -> None:
        """Add a queue; clients that wait for it join."""
        self._queues[queue.name] = queue
        if self.members is not None and self.members.claims:
            queue.dispatcher.begin_claims()
            queue.dispatcher.waits = self.members.waits
        self.rebind()
        self._let_in(queue)

    def _let_in(self, queue: Queue) -> None:
        """Let the clients join that wait for a queue."""
        for consumer in self._waiting.pop(queue.name, ()):
            queue.dispatcher.join(consumer, self.now())

    def remove(self, name: str) -> None:
        """Remove a queue; clients that consumed it wait for the next one of that name."""
        queue = self._queues.pop(name)
        self.rebind()
        consumers = list(queue.dispatcher.consumers)
        queue.close()
        for consumer in consumers:
            source: QueueSource = consumer.subscriber  # type: ignore[assignment]  # there is no other
            source.withdraw(consumer)
            self._waiting.setdefault(name, {})[consumer] = None

    def rebind(self) -> None:
        """Route by the filters that queues have now."""
        self._trie = FilterTrie()
        self.routes.clear()
        bound: dict[str, list[Queue]] = {}
        for queue in self:
            for filter_ in queue.options.topics:
                bound.setdefault(filter_, []).append(queue)
        for filter_, queues in bound.items():
            self._trie.set(filter_, queues)
        self._changed()

    # -- consumers come and go

    def enter(self, name: str, consumer: QueueConsumer) -> None:
        """Add a client that has subscribed to a queue, declared or not."""
        queue = self._queues.get(name)
        if queue is not None:
            queue.dispatcher.join(consumer, self.now())
        else:
            self._waiting.setdefault(name, {})[consumer] = None

    def leave(self, name: str, consumer: QueueConsumer, reason: str) -> None:
        """Remove a client that has unsubscribed, or is gone."""
        waiting = self._waiting.get(name)
        if waiting is not None:
            waiting.pop(consumer, None)
            if not waiting:
                del self._waiting[name]
        queue = self._queues.get(name)
        if queue is not None and consumer in queue.dispatcher.consumers:
            queue.dispatcher.leave(consumer, reason, self.now())

    def has_room(self, name: str, consumer: QueueConsumer) -> None:
        """Give a client messages of a queue: it may have room."""
        queue = self._queues.get(name)
        if queue is not None:
            queue.dispatcher.has_room(consumer, self.now())

    # -- looking

    def options(self, name: str) -> QueueOptions:
        return self._known(name).options

    async def list(self) -> Sequence[QueueView]:
        elsewhere, _ = await self._elsewhere([queue.name for queue in self])
        return [QueueView(**await self._view(queue, elsewhere.get(queue.name, ()))) for queue in self]

    async def show(self, name: str) -> QueueDetail:
        queue = self._known(name)
        elsewhere, silent = await self._elsewhere([name])
        others = elsewhere.get(name, ())
        clients = [(consumer.name, consumer.held, consumer.sent) for consumer in queue.dispatcher.consumers]
        for other in others:
            clients += other.clients
        return QueueDetail(
            **await self._view(queue, others),
            oldest=await queue.oldest(),
            dead_lettered=queue.dead_lettered + sum(other.dead_lettered for other in others),
            clients=[QueueConsumerView(client=client, unacked=held, sent=sent) for client, held, sent in clients],
            unanswered=silent or msgspec.UNSET,
        )

    async def _elsewhere(self, names: Sequence[str]) -> tuple[dict[str, Sequence[Consuming]], dict[str, str]]:
        """Return what other members have of queues, by name, and which ones did not answer."""
        found: dict[str, list[Consuming]] = {}
        if self.members is None or not self.members.claims:
            return {}, {}
        answers = await self.members.ask_all(names)
        for body in answers.found.values():
            for name, consuming in decode_consuming(body).items():
                found.setdefault(name, []).append(consuming)
        return {**found}, answers.silent

    async def read(self, name: str, after: int, limit: int) -> Sequence[FoundMessage]:
        return await self._known(name).read(after, limit)

    async def _view(self, queue: Queue, others: Sequence[Consuming]) -> dict[str, Any]:
        await queue.refresh()
        messages, size = queue.size
        return {
            "name": queue.name,
            "origin": queue.origin,
            "messages": messages,
            "bytes": size,
            "consumers": len(queue.dispatcher.consumers) + sum(len(other.clients) for other in others),
            "inflight": queue.dispatcher.inflight + sum(held for other in others for _, held, _ in other.clients),
            "options": queue.options,
        }

    def _known(self, name: str) -> Queue:
        queue = self._queues.get(name)
        if queue is None:
            names = ", ".join(sorted(self._queues)[:10]) or "none"
            raise UnknownError(f"there is no queue {name!r}; there are: {names}")
        return queue

    # -- changing

    async def create(self, name: str, options: QueueOptions) -> QueueDetail:
        async with self._changing:
            check(name, options)
            if self._queues.get(name) is not None:
                self._changeable(name)  # else it says where it is declared
                raise ConflictError(f"there is a queue {name!r} already; change or delete it")
            if len(self._queues) >= self.max_queues:
                self._store.counters["refused_queues"] += 1
                raise ConflictError(f"there are {len(self._queues)} queues already; see max_queues of [plugins.queues]")
            check_chain(name, self._options() | {name: options})
            if self.members is None:
                queue = await self._open(name, options, CREATED)
                await self._store.store.records.put(COLLECTION, name, options_.encode(options))
                self.add(queue)
            else:
                batch = Batch()
                batch.put(COLLECTION, name, options_.encode(options), expect=None, now=self.now())
                try:
                    await self.members.declare(batch, name, options)
                except StoreConflictError as error:
                    raise ConflictError(f"there is a queue {name!r} already; change or delete it") from error
        return await self.show(name)

    async def change(self, name: str, options: QueueOptions) -> QueueDetail:
        async with self._changing:
            queue = self._changeable(name)
            check(name, options)
            check_chain(name, self._options() | {name: options})
            await self._check_contents(queue, options)
            if self.members is None:
                await self._store.store.records.put(COLLECTION, name, options_.encode(options))
                queue.change(options)
                self.rebind()
            else:
                batch = Batch()
                batch.put(COLLECTION, name, options_.encode(options))
                await self.members.declare(batch, name, options)
        return await self.show(name)

    async def delete(self, name: str) -> None:
        async with self._changing:
            if self._queues.get(name) is None:
                await self._delete_rest(name)
                return
            queue = self._changeable(name)
            users = [other.name for other in self if other.options.dead_letter == name]
            if users:
                raise ConflictError(
                    f"queue {name!r} is the dead_letter of {', '.join(users)}; change or delete {users[0]!r} first"
                )
            if self.members is not None:
                # First, so that no member appends to it any more; after a crash in between its messages can be deleted.
                batch = Batch()
                batch.delete(COLLECTION, name)
                await self.members.declare(batch, name, None)
                await self._forget(name)
                return
            self.remove(name)
            try:
                await self._forget(name)
                # Last: after a crash in between the queue is there, and empty.
                await self._store.store.records.delete(COLLECTION, name)
            except StoreError:
                self.add(Queue(name, queue.options, queue.origin, self._store, self.get, self.members))
                raise

    def apply(self, name: str, options: QueueOptions | None) -> None:
        """Take a declaration that a member has written; None: the queue was deleted. Its configuration goes first."""
        queue = self._queues.get(name)
        if queue is not None and queue.origin == CONFIGURED:
            return
        if options is None:
            if queue is not None:
                self.remove(name)
        elif queue is None:
            self.add(Queue(name, options, CREATED, self._store, self.get, self.members))
        elif queue.options != options:
            queue.change(options)
            self.rebind()

    async def _delete_rest(self, name: str) -> None:
        """Remove the messages of a queue that was taken out of the configuration."""
        check_name(NOUN, name)
        if not await self._forget(name):
            self._known(name)

    async def _forget(self, name: str) -> int:
        """Remove all messages that a queue of this name can have, whatever its options are or were."""
        mailboxes = self._store.store.mailboxes
        return sum([await mailboxes.forget(mailbox_of(name, level)) for level in range(MAX_LEVELS)])

    def _changeable(self, name: str) -> Queue:
        queue = self._known(name)
        if queue.origin == CONFIGURED:
            raise ConflictError(
                f"queue {name!r} stands in the configuration; change [plugins.queues.queue.{name}] there and reload"
            )
        return queue

    async def _check_contents(self, queue: Queue, options: QueueOptions) -> None:
        """Raise `ConflictError` if messages in the queue would no longer be what it has."""
        await queue.refresh()
        if options.kind != queue.options.kind and queue.size[0]:
            raise ConflictError(
                f"queue {queue.name!r}: its kind cannot change from {queue.options.kind} to {options.kind} while it "
                f"has messages ({queue.size[0]}); let them be consumed, or delete the queue"
            )
        for level in range(options.priorities, queue.options.priorities):
            info = await self._store.store.mailboxes.info(mailbox_of(queue.name, level))
            if info.entries:
                raise ConflictError(
                    f"queue {queue.name!r}: there are {info.entries} messages of priority {level}; priorities can go "
                    f"down to {options.priorities} when they are consumed"
                )

    # -- the configuration

    async def load(self, configured: Mapping[str, QueueOptions]) -> None:
        """Bring back what was declared before, and what stands in the configuration."""
        stored = await self.stored()
        for name in stored.keys() & configured.keys():
            self._store.log.warning("queue_declared_twice", queue=name, used="the configuration")
        wanted = stored | dict(configured)
        self._warn_unbound(configured)
        for name, options in wanted.items():
            try:
                check_chain(name, wanted)
            except MotorcadeError as error:  # it was fine when it was declared: the configuration has changed
                self._store.log.warning("queue_doubtful", queue=name, error=str(error))
            self.add(await self._open(name, options, CONFIGURED if name in configured else CREATED))

    async def _open(self, name: str, options: QueueOptions, origin: str) -> Queue:
        """Return a queue with what the store has of it: messages of a time before may be there."""
        queue = Queue(name, options, origin, self._store, self.get, self.members)
        await queue.refresh()
        return queue

    async def stored(self, feed: int | None = None) -> dict[str, QueueOptions]:
        """Return the declarations in the store; `feed`: of one cell."""
        found: dict[str, QueueOptions] = {}
        async for name, value in self._store.store.records.scan(COLLECTION, self._store.now(), feed=feed):
            try:
                options = options_.decode(value)
                check(name, options)
            except MotorcadeError as error:  # one damaged record must not keep the node from starting
                self._store.counters["unreadable"] += 1
                self._store.log.error("queue_unreadable", queue=name, error=str(error))  # noqa: TRY400
            else:
                found[name] = options
        return found

    def _warn_unbound(self, configured: Mapping[str, QueueOptions]) -> None:
        users = {options.dead_letter for options in (*configured.values(), *self._options().values())}
        for name, options in configured.items():
            if not options.topics and name not in users:
                self._store.log.warning("queue_unbound", queue=name, remedy="give it topics, or make it a dead_letter")

    def _options(self) -> dict[str, QueueOptions]:
        return {queue.name: queue.options for queue in self}

    async def reload(self, configured: Mapping[str, QueueOptions]) -> None:
        """Take a changed configuration; `MotorcadeError` leaves everything as it was."""
        async with self._changing:
            created = {queue.name: queue.options for queue in self if queue.origin == CREATED}
            for name in created.keys() & configured.keys():
                raise ConflictError(f"queue {name!r} was declared while the node ran; delete it first, or rename one")
            self._warn_unbound(configured)
            for name in created:
                check_chain(name, created | dict(configured))
            present = {queue.name: queue for queue in self if queue.origin == CONFIGURED}
            for name in present.keys() & configured.keys():
                await self._check_contents(present[name], configured[name])
            added = [
                await self._open(name, configured[name], CONFIGURED) for name in configured.keys() - present.keys()
            ]
            for name, queue in present.items():
                if name not in configured:
                    self.remove(name)
                elif queue.options != configured[name]:
                    queue.change(configured[name])
            for queue in added:
                self.add(queue)
            self.rebind()
