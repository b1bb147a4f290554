"""Retained messages of all members of a cluster: the store puts the changes in order, and each member follows them.

    PUBLISH ─▶ record and note in one batch ─▶ stored ─▶ PUBACK
                                 └─▶ feed of the cell ─▶ index of every member, this one too ─▶ subscribers
    SUBSCRIBE ─▶ ends of the feeds are asked for ─▶ followed up to there (`current`) ─▶ source

Rule 1: the index changes when a note comes, never before. Notes of a topic come in the order in which the store has
        applied its changes, so all members have the same last message. The changes that this member has written are
        kept until their notes come (`_own`), so nothing is read for them.
Rule 2: a note has the record if that is small. A larger one is read when its note has come.
Rule 3: a topic is unsettled while a change of this member is under way, or a record is being read: no subscriber gets
        its message before that is over (`settled`), since it may be outdated.
Rule 4: what was acknowledged on any member before a subscription was known to all of them is in the feeds by then. So
        a subscriber gets messages when its member has followed the feeds to the ends that they have after that. No
        publisher waits for a member, be it dead or slow.
Rule 5: a deletion is always written: that this member has no message of a topic does not mean that there is none.
Rule 6: a topic has one write in flight. What changes meanwhile is written when that is answered: the newest message,
        once. While the write waits for its group, a newer message takes the place of the one that waits.
Rule 7: nothing is written when a message expires: each member leaves it out at that second, and the store removes the
        record by itself.
Rule 8: a subscriber gets no retained message that has certainly come to it live: of a topic that has changed after its
        member asked for the ends (QoS 1 and 2), or by this member after it was subscribed (`came_live`).
Rule 9: a note of this member that was left out, as its cell was read again, is over when notes up to its number are
        handled. If they do not come, a fail-over has given that number to another one: the cell is read again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

import msgspec
import structlog

from motorcade.commit import Commit, joined
from motorcade.core.message import Message
from motorcade.core.topic import is_wildcard
from motorcade.core.trie import TopicTree
from motorcade.delivery.group import Group, GroupWriter
from motorcade.delivery.record import RecordError
from motorcade.extension.cluster import Cluster
from motorcade.plugins.retained.index import Index, RetainedRefusal, size_of
from motorcade.plugins.retained.record import COLLECTION, decode, encode
from motorcade.storage.ports import Backlog, Batch, FeedEnd, Store, StoreError

CODE: Final = "r"  #: of these notes
INLINE: Final = 256  #: bytes of a record that goes into its note
LOAD_STEP: Final = 200  #: records read, or topics looked at, between two turns of the event loop
MAX_READS: Final = 16  #: records that are read at the same time, of `max_payload` each
MAX_UNREAD: Final = 10_000  #: topics whose records are to be read; with more, their cells are read again
MAX_NAMED: Final = 100  #: unreadable records whose topics are logged; the rest is only counted
RETRY: Final = 0.5  #: seconds until the store is asked again that did not answer
SHARE: Final = 4  #: of the time, questions for the ends of the feeds take one in so many: subscribers share them
LONGEST: Final = 0.02  #: seconds between two of them at most
UNCHECKED: Final = 5.0  #: seconds without an answer, after which subscribers get what is known here
OVERDUE: Final = 10.0  #: seconds after which the note of a change is missing (rule 9)
MAX_RECENT: Final = 1000  #: topics of which it is known by what note they have changed last
LOST: Final = -1  #: number of a note that does not come any more


Ends = Sequence[FeedEnd]  #: of all feeds


class RetainedNote(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A topic has another message."""

    member: str  #: that has written it
    serial: int  #: of its changes
    topic: str
    size: int  #: bytes of the record; 0: there is none any more
    record: bytes = b""  #: empty: to be read


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RetainedNote).decode


class Change:
    """A change that this member makes, until its note has come."""

    __slots__ = (
        "commit",
        "growth",
        "is_new",
        "message",
        "next",
        "number",
        "serial",
        "size",
        "stored_at",
        "topic",
        "value",
    )

    def __init__(self, serial: int, topic: str, message: Message | None) -> None:
        self.serial = serial
        self.topic = topic
        self.message = message  #: None: a deletion
        self.value = b""  #: record of the message, until the store gets it
        self.size = 0  #: of that
        self.growth = 0  #: bytes that the index will grow by
        self.is_new = False  #: the index has no message of the topic
        self.commit: Group[Change]
        self.next: NextChange | None = None
        self.number = 0  #: of the note; 0: not stored yet
        self.stored_at = 0.0


class NextChange:
    """The newest change of a topic that waits until the one before it is written."""

    __slots__ = ("commit", "message")

    def __init__(self) -> None:
        self.message: Message | None = None
        self.commit: Commit[None] = Commit()


class UnsettledTopic:
    """A topic whose message no subscriber gets yet."""

    __slots__ = ("over", "reasons")

    def __init__(self) -> None:
        self.reasons = 0  #: changes under way, and a record to be read
        self.over: Commit[None] = Commit()


class LastChange(NamedTuple):
    """The last change of a topic."""

    feed: int
    number: int
    serial: int  #: of this member's changes; 0: another member's
    qos: int


class RetainedFeed:
    """Follow the changes of all members, and make those of this one."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        index: Index,
        counters: Counter[str],
        log: structlog.stdlib.BoundLogger,
        now: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._index = index
        self._counters = counters
        self._log = log
        self._now = now
        self._puts = GroupWriter(store, now, self._fill, self._written)
        self._deletions = GroupWriter(store, now, self._fill, self._written)
        self.serial = 0  #: of the last change of this member
        self._inflight: dict[str, Change] = {}  # by topic: being written
        self._own: dict[int, Change] = {}  # by serial: their notes have not come
        self._backlog = Backlog()  # of these
        self._coming = 0  # topics that the index does not have, of these
        self._growth = 0  # bytes that it will grow by
        self._unsettled: TopicTree[UnsettledTopic] = TopicTree()
        self._unread: dict[str, tuple[int, LastChange]] = {}  # by topic: which reading of it counts, and for which note
        self._recent: dict[str, LastChange] = {}  # by topic, the oldest first
        self._readings = 0
        self._to_read = asyncio.Event()
        self._asking: list[tuple[int, Commit[Ends]]] = []  # feed (-1: all), and who waits for it to be followed
        self._asked = asyncio.Event()
        self._was_read: set[int] = set()  # cells that were read once
        self._dropped: set[int] = set()  # and those that must be read again: too much was to be read
        self._all_read = asyncio.Event()
        self._failing = False  # the last write failed
        self._unreadable = 0

    # -- what subscribers may get

    def current(self, filter_: str) -> Commit[Ends]:
        """Return a commit that is done when the index has what was acknowledged anywhere up to now (rule 4).

        Its result are the ends of all feeds; empty: they are not known.
        """
        commit: Commit[Ends] = Commit()
        self._asking.append((-1 if is_wildcard(filter_) else self._store.feeds.feed_of(filter_), commit))
        self._asked.set()
        return commit

    async def look(self) -> None:
        """Ask for the ends of the feeds, for those who wait for them."""
        loop = asyncio.get_running_loop()
        while True:
            await self._asked.wait()
            await self._all_read.wait()
            self._asked.clear()
            asking, self._asking = self._asking, []
            began = loop.time()
            ends = await self._ends()
            pause = min((loop.time() - began) * (SHARE - 1), LONGEST)
            if ends is None:
                self._counters["unchecked"] += len(asking)
                for _, commit in asking:
                    commit.settle(())
            else:
                reached = [self._cluster.reached(feed, end.number) for feed, end in enumerate(ends)]
                everything = joined(commit for commit in reached if not commit.done)
                for feed, commit in asking:
                    (everything if feed < 0 else reached[feed]).then(partial(commit.settle, ends))
            await asyncio.sleep(pause)

    def came_live(self, topic: str, ends: Ends, serial: int) -> bool:
        """Return True if a subscriber has got the message of a topic live (rule 8).

        `ends`: of the feeds after it was subscribed; `serial`: of the last change of this member before.
        """
        recent = self._recent.get(topic)
        if recent is None:
            return False
        if recent.serial:
            return recent.serial > serial
        return bool(recent.qos and ends) and recent.number > ends[recent.feed].number

    async def _ends(self) -> Ends | None:
        """Return the ends of all feeds; None if the store does not tell them for long."""
        until = self._now() + UNCHECKED
        while True:
            try:
                async with asyncio.timeout(max(until - self._now(), 0.0)):
                    return await self._store.feeds.ends()
            except TimeoutError:
                error = "no answer"
            except StoreError as failure:
                error = str(failure)
            if self._now() + RETRY >= until:
                self._log.warning("retained_unchecked", error=error, consequence="subscribers get what is known here")
                return None
            await asyncio.sleep(RETRY)

    def unsettled(self, filter_: str) -> list[str]:
        """Return the unsettled topics that a filter matches (rule 3)."""
        return [topic for topic, _ in self._unsettled.match(filter_)]

    def settled(self, topic: str) -> Commit[None] | None:
        """Return a commit that is done when a topic is settled; None: it is."""
        unsettled = self._unsettled.get(topic)
        return None if unsettled is None else unsettled.over

    def _hold(self, topic: str) -> None:
        unsettled = self._unsettled.get(topic)
        if unsettled is None:
            unsettled = UnsettledTopic()
            self._unsettled.set(topic, unsettled)
        unsettled.reasons += 1

    def _release(self, topic: str) -> None:
        unsettled = self._unsettled.get(topic)
        if unsettled is not None:
            unsettled.reasons -= 1
            if not unsettled.reasons:
                self._unsettled.remove(topic)
                unsettled.over.finish()

    # -- changes of this member

    def has_room(self, topic: str) -> bool:
        """Return True if a change of a topic can be taken now."""
        return topic in self._inflight or not (self._backlog.full or self._store.backlog.full)

    def refuses(self, message: Message, sweep_budget: int) -> RetainedRefusal | None:
        """Return the bound that a message would break, if any."""
        return self._index.refuses(message, self._now(), sweep_budget, self._coming, self._growth)

    def change(self, topic: str, message: Message | None) -> Commit[None]:
        """Store the message that a topic has from now on; None: it has none any more."""
        change = self._inflight.get(topic)
        if change is None:
            return self._write(topic, message)
        if change.value and change.next is None and message is not None:  # it waits for its group
            return self._replace(change, message)
        if change.next is None:
            change.next = NextChange()
        change.next.message = message
        return change.next.commit

    def _write(self, topic: str, message: Message | None) -> Commit[None]:
        change = Change(self.serial + 1, topic, message)
        error = self._encode(change, message)
        if error is not None:
            return Commit.failed(error)
        self.serial += 1
        self._inflight[topic] = self._own[change.serial] = change
        self._backlog.rows += 1
        self._hold(topic)
        change.commit = (self._deletions if message is None else self._puts).add((change,), change.size)
        return _outcome(change.commit)

    def _replace(self, change: Change, message: Message) -> Commit[None]:
        before = change.size
        error = self._encode(change, message)
        if error is not None:
            return Commit.failed(error)
        change.commit.size += change.size - before
        return _outcome(change.commit)

    def _encode(self, change: Change, message: Message | None) -> RecordError | None:
        """Make the record of a change, and count it; the error if its message cannot be stored."""
        try:
            value = b"" if message is None else encode(message)
        except RecordError as error:
            self._counters["store_failed"] += 1
            return error
        old = self._index.peek(change.topic)
        growth = max(0, (size_of(message) if message is not None else 0) - (size_of(old) if old is not None else 0))
        is_new = old is None and message is not None
        self._backlog.bytes += len(value) - change.size
        self._growth += growth - change.growth
        self._coming += is_new - change.is_new
        change.message, change.value, change.size = message, value, len(value)
        change.growth, change.is_new = growth, is_new
        return None

    def _fill(self, batch: Batch, group: Group[Change]) -> None:
        for change in group.items:
            value, change.value = change.value, b""
            if change.message is None:
                batch.delete(COLLECTION, change.topic)
            else:
                batch.put(COLLECTION, change.topic, value, change.message.expires_at or 0.0)
            record = value if len(value) <= INLINE else b""
            note = RetainedNote(self._cluster.me, change.serial, change.topic, len(value), record)
            batch.note(change.topic, CODE.encode() + _encode(note))

    def _written(self, group: Group[Change]) -> None:
        error = group.error
        if self._failing is (error is None):  # log it once until that changes
            self._failing = error is not None
            if error is None:
                self._log.info("retained_stored_again")
            else:
                self._log.warning("retained_not_stored", error=str(error))
        for place, change in enumerate(group.items):
            if error is not None:
                self._counters["store_failed"] += 1
                self._finish(change)
            else:
                change.number, change.stored_at = group.result.notes[place], self._now()
                self._look_at(change)
            del self._inflight[change.topic]
            following = change.next
            if following is not None:
                following.commit.follow(self._write(change.topic, following.message))

    def _look_at(self, change: Change) -> bool:
        """Finish a change whose note was left out (rule 9); True if it is over."""
        if 0 < change.number <= self._cluster.handled(self._feed_of(change.topic)):
            self._finish(change)
        return change.serial not in self._own

    def _finish(self, change: Change) -> None:
        if self._own.pop(change.serial, None) is not None:
            self._backlog.rows -= 1
            self._backlog.bytes -= change.size
            self._growth -= change.growth
            self._coming -= change.is_new
            self._release(change.topic)

    def tidy(self) -> None:
        """Look at changes whose notes have not come; once a second."""
        overdue = self._now() - OVERDUE
        again = {
            self._feed_of(change.topic)
            for change in list(self._own.values())
            if change.number > 0 and not self._look_at(change) and change.stored_at < overdue
        }
        for feed in again:
            self._log.warning("retained_notes_missing", feed=feed, consequence="its cell is read again")
            self._cluster.reload(feed)
            for change in self._own.values():
                if change.number > 0 and self._feed_of(change.topic) == feed:
                    change.number = LOST

    def _feed_of(self, topic: str) -> int:
        return self._store.feeds.feed_of(topic)

    # -- changes of all members

    def handle(self, feed: int, number: int, data: bytes) -> None:
        """Take a note."""
        note = _decode(data)
        topic = note.topic
        change = self._own.get(note.serial) if note.member == self._cluster.me else None
        if change is not None:
            self._apply(topic, change.message, LastChange(feed, number, note.serial, 0))
            self._finish(change)
        elif note.record or not note.size:
            message = self._decoded(topic, note.record) if note.size else None
            self._apply(topic, message, LastChange(feed, number, 0, 0))
        else:
            self._read_later(topic, LastChange(feed, number, 0, 0))
            return
        self._read_no_more(topic)

    def _apply(self, topic: str, message: Message | None, recent: LastChange) -> None:
        counters, now, own = self._counters, self._now(), bool(recent.serial)
        if not own:
            counters["received"] += 1
        self._recent.pop(topic, None)
        if message is None:
            counters["deleted"] += (self._index.delete(topic) is not None) and own
            return
        self._recent[topic] = recent._replace(qos=message.qos)
        if len(self._recent) > MAX_RECENT:
            del self._recent[next(iter(self._recent))]
        _, refusal = self._index.put(message, now, LOAD_STEP)
        if refusal is not None:
            counters[f"refused_{refusal}"] += 1
            self._log.debug("not_retained", topic=topic, limit=str(refusal))
        elif own:
            counters["stored"] += 1

    def _decoded(self, topic: str, value: bytes) -> Message | None:
        try:
            return decode(topic, value)
        except RecordError as error:
            self._counters["unreadable"] += 1
            self._unreadable += 1
            if self._unreadable <= MAX_NAMED:
                self._log.warning("retained_unreadable", topic=topic, error=str(error))
            return None

    # -- records that are read

    def _read_later(self, topic: str, recent: LastChange) -> None:
        if recent.feed in self._dropped:
            return  # its cell is read again, which has not begun
        self._readings += 1
        if topic not in self._unread:
            if len(self._unread) >= MAX_UNREAD:
                self._drop_unread(recent.feed)
                return
            self._hold(topic)
        self._unread[topic] = self._readings, recent
        self._to_read.set()

    def _read_no_more(self, topic: str) -> None:
        if self._unread.pop(topic, None) is not None:
            self._release(topic)

    def _drop_unread(self, feed: int) -> None:
        """Have a cell read again as a whole, since too many of its records are to be read."""
        self._counters["overrun"] += 1
        self._dropped.add(feed)
        self._all_read.clear()
        self._cluster.reload(feed)

    async def read(self) -> None:
        """Read records of which notes have come."""
        while True:
            await self._to_read.wait()
            wanted = list(islice(self._unread.items(), MAX_READS))
            if not wanted:
                self._to_read.clear()
                continue
            now = self._now()
            answers = await asyncio.gather(
                *(self._store.records.get(COLLECTION, topic, now) for topic, _ in wanted), return_exceptions=True
            )
            failed = False
            for (topic, reading), value in zip(wanted, answers, strict=True):
                if isinstance(value, StoreError):
                    failed = True
                elif isinstance(value, BaseException):
                    raise value
                elif self._unread.get(topic) == reading:  # else there is a later note
                    self._apply(topic, None if value is None else self._decoded(topic, value), reading[1])
                    self._read_no_more(topic)
            if failed:
                await asyncio.sleep(RETRY)

    async def reload(self, feed: int) -> None:
        """Read a cell, or read it again. Of more than the bounds allow, what comes first is taken."""
        self._dropped.discard(feed)
        unread = {topic: self._unread[topic] for topic in self._unread if self._feed_of(topic) == feed}
        found: set[str] = set()
        left = 0
        async for topic, value in self._store.records.scan(COLLECTION, self._now(), feed=feed):
            found.add(topic)
            if len(found) % LOAD_STEP == 0:
                await asyncio.sleep(0)
            message = self._decoded(topic, value)
            if message is None:
                self._index.delete(topic)
                continue
            _, refusal = self._index.put(message, self._now(), LOAD_STEP)
            left += refusal is not None
            self._counters["loaded"] += refusal is None
        if left:
            self._counters["not_loaded"] += left
            self._log.warning("retained_beyond_bounds", left=left, remedy="raise the bounds of [plugins.retained]")
        for change in [change for change in self._own.values() if change.number == LOST]:
            if self._feed_of(change.topic) == feed:
                self._finish(change)
        if feed in self._was_read:
            await self._forget_all_but(feed, found)
        for topic, reading in unread.items():
            if self._unread.get(topic) == reading:
                self._read_no_more(topic)
        self._was_read.add(feed)
        if len(self._was_read) >= self._cluster.feeds and not self._dropped:
            self._all_read.set()

    async def _forget_all_but(self, feed: int, found: Iterable[str]) -> None:
        known = set(found)
        for count, topic in enumerate(self._index.topics(), 1):
            if topic not in known and self._feed_of(topic) == feed and not topic.startswith("$SYS/"):
                self._index.delete(topic)
            if count % LOAD_STEP == 0:
                await asyncio.sleep(0)

    # -- the end

    @property
    def unwritten(self) -> int:
        """Return how many topics have a write in flight."""
        return len(self._inflight)

    async def settle(self) -> None:
        """Wait until no write is in flight."""
        while self._inflight:
            with contextlib.suppress(StoreError):  # publishers are told
                await next(iter(self._inflight.values())).commit


def _outcome(write: Group[Change]) -> Commit[None]:
    """Return the outcome of a group, for one of those who wait for it."""
    commit: Commit[None] = Commit()
    write.then(lambda: commit.finish(write.error))
    return commit
