"""All queues of a node: to which ones a message is appended, and which clients consume them.

A client may subscribe before there is a queue, or after it was deleted. It waits here, at no cost, and joins when a
queue of that name is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from motorcade.core.trie import FilterTrie
from motorcade.plugins.logs.queues.dispatcher import Consumer
from motorcade.plugins.logs.queues.options import QueueOptions
from motorcade.plugins.logs.queues.queue import Queue

if TYPE_CHECKING:
    from motorcade.plugins.logs.queues.source import QueueSource

MAX_ROUTES: Final = 4096  #: topics whose queues are remembered; then all are forgotten


class Queues:
    """The queues that are declared now, by name."""

    def __init__(self, now: Callable[[], float], changed: Callable[[], None]) -> None:
        self.now = now
        self._changed = changed
        self._queues: dict[str, Queue] = {}
        self._trie: FilterTrie[list[Queue]] = FilterTrie()
        self._routes: dict[str, tuple[Queue, ...]] = {}
        self._waiting: dict[str, dict[Consumer, None]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[Queue]:
        return iter(list(self._queues.values()))

    @property
    def remembered(self) -> int:
        """Return how many topics' queues are remembered."""
        return len(self._routes)

    def get(self, name: str) -> Queue | None:
        """Return a queue by name."""
        return self._queues.get(name)

    def options(self) -> dict[str, QueueOptions]:
        """Return the options of all."""
        return {name: queue.options for name, queue in self._queues.items()}

    def filters(self) -> set[str]:
        """Return what all queues are bound to."""
        return {filter_ for queue in self._queues.values() for filter_ in queue.options.topics}

    def match(self, topic: str) -> tuple[Queue, ...]:
        """Return the queues that a message of a topic is appended to."""
        found = self._routes.get(topic)
        if found is None:
            found = tuple({queue: None for queues in self._trie.match(topic) for queue in queues})
            if len(self._routes) >= MAX_ROUTES:
                self._routes.clear()
            self._routes[topic] = found
        return found

    # -- queues come and go

    def add(self, queue: Queue) -> None:
        """Add a queue; clients that wait for it join."""
        self._queues[queue.name] = queue
        self.rebind()
        for consumer in self._waiting.pop(queue.name, ()):
            queue.dispatcher.join(consumer, self.now())

    def remove(self, name: str) -> Queue:
        """Remove a queue; clients that consumed it wait for the next one of that name."""
        queue = self._queues.pop(name)
        self.rebind()
        consumers = list(queue.dispatcher.consumers)
        queue.close()
        for consumer in consumers:
            source: QueueSource = consumer.subscriber  # type: ignore[assignment]  # there is no other
            source.withdraw(consumer)
            self._waiting.setdefault(name, {})[consumer] = None
        return queue

    def rebind(self) -> None:
        """Route by the filters that queues have now."""
        self._trie = FilterTrie()
        self._routes.clear()
        bound: dict[str, list[Queue]] = {}
        for queue in self._queues.values():
            for filter_ in queue.options.topics:
                bound.setdefault(filter_, []).append(queue)
        for filter_, queues in bound.items():
            self._trie.set(filter_, queues)
        self._changed()

    # -- consumers come and go

    def enter(self, name: str, consumer: Consumer) -> None:
        """Add a client that has subscribed to a queue, declared or not."""
        queue = self._queues.get(name)
        if queue is not None:
            queue.dispatcher.join(consumer, self.now())
        else:
            self._waiting.setdefault(name, {})[consumer] = None

    def leave(self, name: str, consumer: Consumer, reason: str) -> None:
        """Remove a client that has unsubscribed, or is gone."""
        waiting = self._waiting.get(name)
        if waiting is not None:
            waiting.pop(consumer, None)
            if not waiting:
                del self._waiting[name]
        queue = self._queues.get(name)
        if queue is not None and consumer in queue.dispatcher.consumers:
            queue.dispatcher.leave(consumer, reason, self.now())

    def has_room(self, name: str, consumer: Consumer) -> None:
        """Give a client messages of a queue: it may have room."""
        queue = self._queues.get(name)
        if queue is not None:
            queue.dispatcher.has_room(consumer, self.now())
