"""The last message of each topic, in memory, within bounds. Subscribers are served from it.

    tree      topic -> message, by topic level, so that a filter with wildcards visits only branches that can match
    expiring  topic -> time at which its message expires; only of messages that do. Its order is the order in which
              `sweep` looks at them: those it has looked at go to the end, so each call goes on where the last stopped

Rule 1: a message that does not fit is refused, and the old message of its topic goes away all the same: a subscriber
        must never take an outdated message for the current one. [MQTT-3.3.1-5]
Rule 2: an expired message is gone at its very second, whether it was swept or not: every reader passes the time.
Rule 3: `walk` reads the tree while it changes. It keeps nodes, never messages: a message that is deleted meanwhile is
        not seen, one that is replaced meanwhile is seen as it is then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import islice

from motorcade.core.message import Message
from motorcade.core.trie import TopicTree, _Node


class RetainedRefusal(StrEnum):
    """The bound that a message did not fit in. The values are the names of the options."""

    MAX_PAYLOAD = "max_payload"
    MAX_MESSAGES = "max_messages"
    MAX_BYTES = "max_bytes"


class Index:
    """Retained messages. A bound of 0 is none; `now` is always in seconds since the epoch."""

    def __init__(self, max_messages: int, max_payload: int, max_bytes: int) -> None:
        self.max_messages = max_messages
        self.max_payload = max_payload
        self.max_bytes = max_bytes
        self.bytes = 0  #: of all topics, payloads and properties
        self._tree = _RetainedTree()
        self._expiring: dict[str, float] = {}

    def __len__(self) -> int:
        """Return how many there are, with those that have expired but were not swept yet."""
        return len(self._tree)

    @property
    def nodes(self) -> int:
        """Return the number of levels of all topics."""
        return self._tree.nodes

    def put(self, message: Message, now: float, sweep_budget: int = 0) -> tuple[Message | None, RetainedRefusal | None]:
        """Keep a message as the last one of its topic; return the one before, and the bound that was broken, if any.

        When there is no room, up to `sweep_budget` expired messages are looked for first.
        """
        if self.max_payload and len(message.payload) > self.max_payload:
            return self.delete(message.topic), RetainedRefusal.MAX_PAYLOAD
        old = self._set(message)  # before it is known whether it fits: the old one goes in any case (rule 1)
        refusal = self._broken(is_new=old is None)
        if refusal is not None and sweep_budget and self.sweep(now, sweep_budget):
            refusal = self._broken(is_new=old is None)
        if refusal is not None:
            self.delete(message.topic)
        return old, refusal

    def refuses(
        self, message: Message, now: float, sweep_budget: int, messages: int, size_bytes: int
    ) -> RetainedRefusal | None:
        """Return the bound that a message would break, with so many new ones that are not here yet."""
        if self.max_payload and len(message.payload) > self.max_payload:
            return RetainedRefusal.MAX_PAYLOAD
        refusal = self._would_break(message, messages, size_bytes)
        if refusal is not None and self.sweep(now, sweep_budget):
            refusal = self._would_break(message, messages, size_bytes)
        return refusal

    def _would_break(self, message: Message, messages: int, size_bytes: int) -> RetainedRefusal | None:
        old = self._tree.get(message.topic)
        if self.max_messages and old is None and len(self._tree) + messages >= self.max_messages:
            return RetainedRefusal.MAX_MESSAGES
        growth = size_of(message) - (size_of(old) if old is not None else 0)
        if self.max_bytes and self.bytes + size_bytes + growth > self.max_bytes:
            return RetainedRefusal.MAX_BYTES
        return None

    def topics(self) -> list[str]:
        """Return all topics, those of `$…` too."""
        return self._tree.topics()

    def restore(self, topic: str, message: Message | None) -> None:
        """Put a topic back to what it was, without checking bounds: it was within them once."""
        if message is None:
            self.delete(topic)
        else:
            self._set(message)

    @property
    def beyond(self) -> bool:
        """Return True if there is more than the bounds allow (after `restore`, or under new bounds)."""
        return self._broken(is_new=True) is not None

    def _broken(self, *, is_new: bool) -> RetainedRefusal | None:
        """Return the bound that is broken by a message that was set just now, perhaps of a new topic."""
        if self.max_messages and is_new and len(self._tree) > self.max_messages:
            return RetainedRefusal.MAX_MESSAGES
        if self.max_bytes and self.bytes > self.max_bytes:
            return RetainedRefusal.MAX_BYTES
        return None

    def _set(self, message: Message) -> Message | None:
        """Keep a message; return the one before."""
        # In place, never by deleting first: `walk` holds on to the topic's node (rule 3).
        old = self._tree.set(message.topic, message)
        self.bytes += size_of(message)
        if old is not None:
            self.bytes -= size_of(old)
            if old.expires_at is not None:
                self._expiring.pop(message.topic, None)
        if message.expires_at is not None:
            self._expiring[message.topic] = message.expires_at
        return old

    def delete(self, topic: str) -> Message | None:
        """Delete the message of a topic, and return it."""
        message = self._tree.remove(topic)
        if message is not None:
            self.bytes -= size_of(message)
            self._expiring.pop(topic, None)
        return message

    def peek(self, topic: str) -> Message | None:
        """Return the message of a topic, expired or not."""
        return self._tree.get(topic)

    def get(self, topic: str, now: float) -> Message | None:
        """Return the message of a topic."""
        message = self._tree.get(topic)
        return None if message is None or message.expired(now) else message

    def walk(self, filter_: str, clock: Callable[[], float]) -> Iterator[Message]:
        """Yield the messages of all topics that a filter matches, in no particular order; see rule 3."""
        return (message for message in self._tree.walk(filter_) if not message.expired(clock()))

    def sweep(self, now: float, budget: int) -> int:
        """Look at up to `budget` messages that can expire; delete those that have, and return how many."""
        gone = 0
        for topic in list(islice(self._expiring, budget)):
            at = self._expiring.pop(topic)
            if at <= now:
                gone += self.delete(topic) is not None
            else:
                self._expiring[topic] = at
        return gone


def size_of(message: Message) -> int:
    """Return the bytes that a message counts for `max_bytes`."""
    size = len(message.topic) + len(message.payload)
    if message.correlation_data or message.content_type or message.response_topic:
        size += len(message.correlation_data or b"")
        size += len(message.content_type or "") + len(message.response_topic or "")
    if message.user_properties:
        size += sum(len(name) + len(value) for name, value in message.user_properties)
    return size


class _RetainedTree(TopicTree[Message]):
    """Topics, read with a filter while they change."""

    __slots__ = ()

    def topics(self) -> list[str]:
        """Return all topics."""
        found: list[str] = []
        waiting: list[_Node[Message]] = [self._root]
        while waiting:
            node = waiting.pop()
            if node.value is not None:
                found.append(node.value.topic)
            waiting.extend(node.children.values())
        return found

    def walk(self, filter_: str) -> Iterator[Message]:
        """Yield the messages that a filter matches. A step costs the nodes up to the next match and copies no message.

        It holds one list of references per level; the children of a node are listed when it is entered.
        """
        wanted = filter_.split("/")
        waiting: list[Iterator[tuple[_Node[Message], int]]] = [self._below(self._root, 0, wanted)]
        while waiting:
            step = next(waiting[-1], None)
            if step is None:
                waiting.pop()
                continue
            node, depth = step
            if node.value is not None and (depth == len(wanted) or wanted[depth] == "#"):
                yield node.value
            if depth < len(wanted) and node.children:
                waiting.append(self._below(node, depth, wanted))

    def _below(self, node: _Node[Message], depth: int, wanted: list[str]) -> Iterator[tuple[_Node[Message], int]]:
        """Return the children that can match, each with the level of the filter at which it goes on."""
        level = wanted[depth]
        if level not in ("+", "#"):
            child = node.children.get(level)
            return iter(()) if child is None else iter(((child, depth + 1),))
        deeper = depth if level == "#" else depth + 1  # '#' stays in force all the way down
        if node is self._root:  # [MQTT-4.7.2-1]
            children = [child for name, child in node.children.items() if not name.startswith("$")]
        else:
            children = list(node.children.values())
        return ((child, deeper) for child in children)
