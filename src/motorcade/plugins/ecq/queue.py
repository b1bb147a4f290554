"""Compacted queues in memory: as much of each as appending and consuming need.

A `Queue` is made for its first publisher or consumer, and dropped when it was idle from one collection to the next, or
when there are many; the store has everything that matters.

Rule 1: `tail` is the highest number that this process has heard of. Consumers get nothing beyond it, though it may be
        in the store already: what has just been written may turn out to be one message too many, and goes again.
Rule 2: sizes are estimates from above. What replaces, expires or is collected leaves without a word of its size; one
        that seems full is looked at before anybody hears so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import Handled
from motorcade.plugins.ecq import record
from motorcade.plugins.ecq.options import EcqConfig
from motorcade.plugins.ecq.tables import EXCLUSIVE, Shape
from motorcade.storage.ports import Appended, Draft, Entry, MailboxInfo

if TYPE_CHECKING:
    from motorcade.plugins.ecq.progress import Progress

MAX_OPEN: Final = 65_536  #: queues in memory that nobody consumes; when there are more, those that are idle go

TAKEN: Final = Handled()


class Row(msgspec.Struct, gc=False):
    """A message on its way into a queue."""

    queue: Queue
    draft: Draft
    size: int
    message: Message | None  #: None: it was plain, the draft has everything
    probe: bool  #: it is not certain that there is room: it may have to replace an older value
    refusal: str = ""  #: why it was not taken

    def answer(self) -> Handled:
        """What its publisher hears, once the store has answered."""
        return Handled(ReasonCode.QUOTA_EXCEEDED, self.refusal) if self.refusal else TAKEN


class Item(msgspec.Struct, frozen=True, gc=False):
    """A message for consumers."""

    number: int
    message: Message


class Fresh(msgspec.Struct, frozen=True, gc=False):
    """What was appended at once."""

    after: int  #: the end of the queue before
    upto: int  #: and after it
    items: list[Item]
    gone: list[int]  #: what it has replaced


class Consumer(Protocol):
    """A source, as its queue knows it."""

    progress: Progress

    @property
    def in_flight(self) -> int: ...

    def offer(self, fresh: Fresh) -> None:
        """This was appended."""

    def look(self) -> None:
        """There may be something new."""

    def restart(self) -> None:
        """Its progress was changed by somebody else: begin again there."""


class Queue:
    """One queue."""

    __slots__ = (
        "_coming_octets",
        "_entries",
        "_fresh",
        "_fresh_after",
        "_gap",
        "_gone",
        "_octets",
        "_sized",
        "coming",
        "consumers",
        "doomed",
        "known",
        "name",
        "owner",
        "progresses",
        "registered",
        "rested",
        "shape",
        "sizes",
        "tail",
    )

    def __init__(self, shape: Shape, name: str) -> None:
        self.shape = shape
        self.name = name
        self.owner = shape.owner_of(name)
        self.tail = 0
        self.known = False  #: whether `tail` is (rule 1)
        self.registered = False  #: it is certain that the store has its record
        self.rested = -1  #: where it ended when the last collection found it idle
        self.consumers: dict[Consumer, None] = {}
        self.coming = 0  #: messages on their way into the store
        self.doomed: set[int] = set()  #: messages that are one too many, until they are removed
        self.sizes: dict[bytes, int] | None = None  #: by key, while it is near its bound of bytes
        self.progresses: int | None = None  #: shared: records of progress, once counted
        self._coming_octets = 0
        self._entries = 0
        self._octets = 0
        self._sized = False  # these two are known
        self._fresh: dict[int, Row] = {}
        self._fresh_after = 0
        self._gone: list[int] = []
        self._gap = False

    @property
    def idle(self) -> bool:
        """Whether nothing is lost with it."""
        return not (self.consumers or self.coming or self.doomed)

    # -- room

    def has_room(self, size: int, config: EcqConfig) -> bool:
        """Whether one more message fits for certain, after all that is on its way."""
        return self._sized and not self._is_over(self.coming + 1, self._coming_octets + size, config)

    def _is_over(self, entries: int, octets: int, config: EcqConfig) -> bool:
        entries += self._entries
        octets += self._octets
        return 0 < config.max_messages < entries or 0 < config.max_bytes < octets

    @property
    def octets(self) -> int:
        """Bytes in the store, as far as known."""
        return self._octets

    @property
    def octets_expected(self) -> int:
        """Bytes when everything is there that is on its way, if nothing is replaced."""
        return self._octets + self._coming_octets

    def expect(self, row: Row) -> None:
        """A message is on its way."""
        self.coming += 1
        self._coming_octets += row.size

    def looked(self, info: MailboxInfo) -> None:
        """What the store says, while nothing is on its way (or what is was not written yet)."""
        self._entries, self._octets = info.entries, info.octets
        self._sized = True
        self.known = True
        self.tail = max(self.tail, info.last)

    # -- what has become of messages

    def dropped(self, row: Row) -> None:
        """It was not written, or nobody knows."""
        self.coming -= 1
        self._coming_octets -= row.size

    def landed(self, row: Row, answer: Appended, config: EcqConfig) -> int:
        """It is in the store; its number, if it is one too many and must go again, else 0."""
        self.coming -= 1
        self._coming_octets -= row.size
        if answer.repeated:
            return 0
        number, replaced = answer.position, answer.replaced
        self._entries -= len(answer.dropped)
        if replaced:
            self._entries -= 1
        if self.consumers:
            for gone in (replaced, *answer.dropped):
                if gone and self._fresh.pop(gone, None) is None:
                    self._gone.append(gone)
        if not number:
            return 0
        self._entries += 1
        self._octets += row.size
        # A number between them is of a message whose writing has failed, as far as anybody knew: it must be read.
        self._gap = self._gap or not self.known or number != self.tail + 1
        self.tail, self.known = number, True
        if row.probe and not replaced and config.overflow == "refuse" and 0 < config.max_messages < self._entries:
            self._entries -= 1
            self._octets -= row.size
            self.doomed.add(number)
            return number
        if self.consumers:
            if not self._fresh:
                self._fresh_after = number - 1
            self._fresh[number] = row
        return 0

    def dispatch(self, stored_at: float, *, too_old: bool) -> None:
        """Tell consumers of what has landed."""
        rows, self._fresh = self._fresh, {}
        gone, self._gone = self._gone, []
        gap, self._gap = self._gap, False
        if not self.consumers:
            return
        shape = self.shape
        read = f"{shape.root}/{self.name}/"
        items = [
            Item(number, _delivery(row, read, (shape.number, str(number)), stored_at))
            for number, row in (() if gap or too_old else rows.items())
        ]
        fresh = Fresh(self._fresh_after if items else self.tail, self.tail, items, gone)
        for consumer in list(self.consumers):
            consumer.offer(fresh)

    def tell(self) -> None:
        """There may be something for consumers."""
        for consumer in list(self.consumers):
            consumer.look()

    def topic_of(self, entry: Entry) -> str:
        """Where consumers get an entry."""
        return f"{self.shape.root}/{self.name}/{entry.key.decode(errors='replace')}"


def _delivery(row: Row, read: str, number: tuple[str, str], stored_at: float) -> Message:
    draft = row.draft
    topic = read + draft.key.decode()
    if row.message is None:
        return record.delivery(record.decode(draft.body), draft.payload, topic, number, stored_at)
    return record.delivered(row.message, topic, number, stored_at)


class Queues:
    """All queues in memory."""

    def __init__(self, config: EcqConfig) -> None:
        self.config = config
        self.exclusive: dict[str, Queue] = {}  #: by name
        self.shared: dict[str, Queue] = {}

    def __iter__(self) -> Iterator[Queue]:
        yield from self.exclusive.values()
        yield from self.shared.values()

    def __len__(self) -> int:
        return len(self.exclusive) + len(self.shared)

    def of(self, shape: Shape) -> dict[str, Queue]:
        """Those of one form."""
        return self.exclusive if shape is EXCLUSIVE else self.shared

    def open(self, shape: Shape, name: str) -> Queue:
        """A queue, whether or not there is anything in it."""
        queues = self.exclusive if shape is EXCLUSIVE else self.shared
        queue = queues.get(name)
        if queue is None:
            if len(queues) >= MAX_OPEN:
                self._drop_idle(queues)
            queue = queues[name] = Queue(shape, name)
        return queue

    def peek(self, shape: Shape, name: str) -> Queue | None:
        """A queue that is in memory."""
        return self.of(shape).get(name)

    def drop(self, queue: Queue) -> None:
        """Close a queue if it is idle; its next user finds all of it in the store."""
        queues = self.of(queue.shape)
        if queue.idle and queues.get(queue.name) is queue:
            del queues[queue.name]

    def _drop_idle(self, queues: dict[str, Queue]) -> None:
        for name in [name for name, queue in queues.items() if queue.idle]:
            del queues[name]

    def consumed(self) -> list[Queue]:
        """Those that somebody consumes now."""
        return [queue for queue in self if queue.consumers]
