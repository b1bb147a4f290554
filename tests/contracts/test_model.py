"""A store against a model: any sequence of calls gives what lists and dictionaries would give.

The model is written down twice as simple as any engine could be; hypothesis looks for a sequence of calls where the two
differ, and shows the shortest. Whatever is written down here needs no example beside it: bounds, what is in flight and
spared, tokens, keys, marks, expiry, sweeps and their budgets, batches in order and their conditions, records, streams
and their trims, blobs that are kept, attachments and fences, generations, feeds; on engines that keep their data,
closed and opened again at any moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from motorcade.storage.homes import home_of_owner
from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import (
    SPARE_ALL,
    Appended,
    Attached,
    Batch,
    Bound,
    Draft,
    Durability,
    Entry,
    FeedEnd,
    Fence,
    Formed,
    MailboxInfo,
    Store,
    StoreConflictError,
    StoreFencedError,
    StreamInfo,
    StreamRecord,
    Written,
    spared_by,
)
from tests.contracts.engines import (
    DAY,
    HOUR,
    NOW,
    EmbeddedEngine,
    Engine,
    digest_of,
    entries,
    owners,
    persistent,
    scan,
    sweep,
    trim,
)

T = TypeVar("T")

OWNERS = st.sampled_from(["v1", "session:v", "fanout:v"])  # the last two have one home
HOMES = st.sampled_from(["v1", "client:v", "elsewhere"])
PAYLOADS = [b"", b"small", b"a" * 1000, b"b" * 2000]
CONTENTS = [b"", b"value", bytes(range(256)), b"x" * 40_000]
BOUNDS = st.one_of(
    st.just(Bound()),
    st.builds(Bound, entries=st.integers(1, 4), refuse=st.booleans()),
    st.builds(Bound, size_bytes=st.sampled_from([3, 10, 2500]), refuse=st.booleans()),
    st.builds(Bound, entries=st.integers(1, 4), size_bytes=st.sampled_from([10, 2500]), refuse=st.booleans()),
)
#: Seconds from now on, when something expires; 0: never.
ENDS = st.sampled_from([0.0, 0.0, 1.0, 5.0, 2 * HOUR, -1.0])
DRAFTS = st.builds(
    Draft,
    body=st.binary(max_size=4),
    payload=st.integers(0, 3).map(lambda number: PAYLOADS[number]),
    key=st.sampled_from([b"", b"", b"k", b"k\x00", b"k\xff/*{}"]),
    expires_at=ENDS,
    droppable=st.booleans(),
    token=st.sampled_from([b"", b"", b"t1", b"t2"]),
    away=st.sampled_from([False, False, False, True]),
)
SPARED = st.sampled_from([0, 0, 0, SPARE_ALL, 1, 3, 5, 8, 12])
POSITIONS = st.integers(-1, 30)
#: The generation that an append names: any, the one that there is, another one.
ANY, THIS, ANOTHER = 0, 1, 2
GENERATIONS = st.sampled_from([ANY, ANY, THIS, ANOTHER])
MARKS = st.sampled_from([0, 1, 255])

COLLECTIONS, KEYS = st.sampled_from(["c", "cc"]), st.sampled_from(["k", "k/1", "k/1/2", "*", "v1"])
VALUES = st.integers(0, 3).map(lambda number: CONTENTS[number])  # by number: large ones would be told in full

STREAMS = st.sampled_from(["s", "ss"])
ROWS = st.lists(VALUES, min_size=1, max_size=5)
RECORDS = ROWS | ROWS.map(lambda values: Formed([b"<", 0, b"|", 0, b">"], [values]))

APPEND = st.tuples(st.just("append"), st.lists(OWNERS, max_size=3), DRAFTS, BOUNDS, SPARED, GENERATIONS)
STEPS = st.one_of(
    APPEND,
    APPEND,
    st.tuples(st.just("acknowledge"), OWNERS, st.lists(POSITIONS, max_size=4)),
    st.tuples(st.just("mark"), OWNERS, POSITIONS, MARKS),
    st.tuples(st.just("put"), COLLECTIONS, KEYS, VALUES, ENDS),
    st.tuples(st.just("delete"), COLLECTIONS, KEYS),
    st.tuples(st.just("stream"), STREAMS, RECORDS, st.sampled_from([0.0, 0.0, 5.0])),
    st.tuples(st.just("make"), OWNERS),
    st.tuples(st.just("note"), HOMES, st.binary(max_size=4)),
    st.tuples(st.just("spare"), OWNERS, SPARED),
    st.tuples(st.just("due"), HOMES, ENDS),
)
CONDITIONS = st.one_of(
    st.tuples(st.just("fence"), st.integers(0, 3)),  # how many attaches ago it was given
    st.tuples(st.just("detach"), st.integers(0, 3)),
    st.tuples(st.just("take"), OWNERS, st.integers(0, 3)),  # which of the entries, if there are so many
    st.tuples(st.just("expect"), COLLECTIONS, KEYS, st.none() | VALUES),
    st.tuples(st.just("expect"), COLLECTIONS, KEYS, st.just("what is there")),
)


@dataclass
class ModelBox:
    """One owner: a list, what was given last, and tokens with their first time and position."""

    entries: list[tuple[Entry, bool]] = field(default_factory=list)  #: and whether it is droppable
    last: int = 0
    tokens: dict[bytes, tuple[float, int]] = field(default_factory=dict)
    floor: int = 0  #: of positions and generations before it was forgotten
    made: bool = False
    generation: int = 0  #: as the engine has told it
    spare: int = 0

    def size_bytes(self) -> int:
        return sum(len(entry.body) + len(entry.payload) for entry, _ in self.entries)

    def too_large(self, bound: Bound) -> bool:
        return bool(bound.entries and len(self.entries) > bound.entries) or bool(
            bound.size_bytes and self.size_bytes() > bound.size_bytes
        )

    def remove(self, positions: set[int]) -> int:
        before = len(self.entries)
        self.entries = [pair for pair in self.entries if pair[0].position not in positions]
        return before - len(self.entries)

    def append(
        self, owner: str, draft: Draft, now: float, bound: Bound, position: int, spared: int, node: str
    ) -> Appended:
        """What the answer has to be; `position` is the one to use if the entry stays, `node` where the owner is."""
        if draft.away and node:
            return Appended(owner, 0, attached=node)
        spared = spared_by(spared, self.spare)
        first, known = self.tokens.get(draft.token, (now - HOUR, 0)) if draft.token else (now - HOUR, 0)
        if now < first + HOUR:
            return Appended(owner, known, repeated=True, attached=node)
        replaced = next((entry.position for entry, _ in self.entries if draft.key and entry.key == draft.key), 0)
        before = list(self.entries)
        self.remove({replaced})
        dropped: list[int] = []
        if bound.size_bytes and len(draft.body) + len(draft.payload) > bound.size_bytes:
            position = 0
        else:
            entry = Entry(position, draft.body, draft.payload, draft.key, now, draft.expires_at, 0)
            self.entries.append((entry, draft.droppable))
        if bound.refuse and (not position or self.too_large(bound)):
            self.entries = before
            return Appended(owner, 0, attached=node, refused=True)
        if position:
            self.made = True
            while self.too_large(bound):
                victims = [old.position for old, droppable in self.entries if droppable]
                victims += [old.position for old, _ in self.entries if old.position > spared != SPARE_ALL]
                if not victims:
                    break
                dropped.append(victims[0])
                self.remove({victims[0]})
            if position in dropped:
                dropped.remove(position)
                position = 0
        if draft.token:
            self.tokens[draft.token] = (now, position)
        over = position > 0 and self.too_large(bound)
        return Appended(owner, position, replaced, tuple(dropped), attached=node, over=over)

    def mark(self, position: int, mark: int) -> bool:
        """What is marked never expires."""
        there = any(entry.position == position for entry, _ in self.entries)
        self.entries = [
            (replace(entry, mark=mark, expires_at=0.0 if mark else entry.expires_at), droppable)
            if entry.position == position
            else (entry, droppable)
            for entry, droppable in self.entries
        ]
        return there

    def alive(self, now: float) -> list[Entry]:
        return [entry for entry, _ in self.entries if not entry.expires_at or now < entry.expires_at]

    def sweep(self, now: float) -> list[int]:
        """The positions that go."""
        gone = {entry.position for entry, _ in self.entries} - {entry.position for entry in self.alive(now)}
        self.remove(gone)
        return sorted(gone)


@dataclass
class ModelStream:
    """A list; offsets are those that the engine has given."""

    records: list[StreamRecord] = field(default_factory=list)
    last: int = 0
    time: float = 0.0

    def append(self, values: Sequence[bytes], now: float, offsets: Sequence[int]) -> None:
        assert len(values) == len(offsets)
        assert all(before < after for before, after in zip([self.last, *offsets], offsets, strict=False)), offsets
        self.time, self.last = max(now, self.time), offsets[-1]
        self.records += [StreamRecord(offset, self.time, value) for offset, value in zip(offsets, values, strict=True)]

    def size_bytes(self) -> int:
        return sum(len(record.value) for record in self.records)

    def trim(self, before: float, records: int, size_bytes: int) -> tuple[int, int]:
        """How many go, and their bytes."""
        count, size = len(self.records), self.size_bytes()
        while self.records and (
            self.records[0].time < before
            or (records and len(self.records) > records)
            or (size_bytes and self.size_bytes() > size_bytes)
        ):
            del self.records[0]
        return count - len(self.records), size - self.size_bytes()


class StoreMachine(RuleBasedStateMachine):
    """Any calls, in any order, on one engine."""

    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now = NOW
        self.boxes: dict[str, ModelBox] = {}
        self.attached: dict[str, tuple[str, Fence]] = {}  #: by home
        self.fences: list[Fence] = []  #: all that were given, the last one first
        self.dues: dict[str, float] = {}  #: by home
        self.notes: dict[int, list[tuple[int, bytes]]] = {}  #: of each feed, that were not read, with their numbers
        self.read_up_to: dict[int, FeedEnd] = {}
        self.records: dict[tuple[str, str], tuple[bytes, float]] = {}
        self.streams: dict[str, ModelStream] = {}
        self.kept: dict[bytes, float] = {}  #: blobs that were put, and how long they are kept
        self.engine.empty()
        self.store = self.engine.make()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

    async def written(self, batch: Batch) -> Written:
        return await self.store.write(batch)

    def box(self, owner: str) -> ModelBox:
        return self.boxes.setdefault(owner, ModelBox())

    def at(self, seconds: float) -> float:
        return self.now + seconds if seconds else 0.0

    @initialize()
    def open(self) -> None:
        self.run(self.store.open())

    # -- writes

    def expect(self, owner: str, draft: Draft, bound: Bound, spared: int, named: int, answer: Appended) -> None:
        box, node = self.box(owner), self.attached[home][0] if (home := home_of_owner(owner)) in self.attached else ""
        if named == ANOTHER:
            assert answer == Appended(owner, 0, attached=node, gone=True)
            return
        wanted = box.append(owner, draft, self.now, bound, answer.position or box.last + 1, spared, node)
        assert answer == wanted
        if answer.position and not answer.repeated:
            # What was pushed out itself may have used up positions; nothing else may.
            assert answer.position > max(box.last, box.floor)
            box.last, box.made = answer.position, True

    def generations(self, names: list[str], named: int) -> list[int]:
        if named == ANOTHER:
            return [self.box(owner).generation + 1_000_000 for owner in names]
        return [self.box(owner).generation for owner in names] if named == THIS else []

    @rule(call=APPEND)
    def append(self, call: tuple[str, list[str], Draft, Bound, int, int]) -> None:
        _, names, draft, bound, spared, named = call
        draft, generations = replace(draft, expires_at=self.at(draft.expires_at)), self.generations(names, named)
        answers = self.run(
            self.store.mailboxes.append(names, draft, self.now, bound, [spared] * len(names), generations)
        )
        for owner, answer in zip(names, answers, strict=True):
            self.expect(owner, draft, bound, spared, named, answer)

    def add_conditions(self, batch: Batch, conditions: list[tuple]) -> bool:
        """Whether all of them hold."""
        holds = True
        for condition in conditions:
            match condition:
                case ("fence", ago) if ago < len(self.fences):
                    fence = self.fences[ago]
                    batch.fence(fence)
                    holds = holds and self.attached.get(fence.home, ("", None))[1] == fence
                case ("detach", ago) if ago < len(self.fences):
                    fence = self.fences[ago]
                    batch.detach(fence)
                    holds = holds and self.attached.get(fence.home, ("", None))[1] == fence
                case ("take", owner, index):
                    there_are = [entry.position for entry, _ in self.box(owner).entries]
                    batch.take(owner, there_are[index] if index < len(there_are) else self.box(owner).last + 1)
                    holds = holds and index < len(there_are)
                case ("expect", collection, key, value):
                    there = self.readable(collection).get(key)
                    value = there if value == "what is there" else value
                    batch.put(collection, key, b"expected", expect=value, now=self.now)
                    holds = holds and there == value
        return holds

    @rule(steps=st.lists(STEPS, max_size=8), conditions=st.just([]) | st.lists(CONDITIONS, max_size=2))
    def batch(self, steps: list[tuple], conditions: list[tuple]) -> None:
        """Each step sees what the steps before it have done; conditions are about what was there before."""
        batch = Batch()
        holds = self.add_conditions(batch, conditions)
        for step in steps:
            match step:
                case ("append", names, draft, bound, spared, named):
                    draft = replace(draft, expires_at=self.at(draft.expires_at))
                    batch.append(names, draft, self.now, bound, [spared] * len(names), self.generations(names, named))
                case ("make", owner):
                    batch.make(owner)
                case ("note", home, data):
                    batch.note(home, data)
                case ("spare", owner, position):
                    batch.spare(owner, position)
                case ("due", home, seconds):
                    batch.due(home, self.at(seconds))
                case ("acknowledge", owner, positions):
                    batch.acknowledge(owner, iter(positions))
                case ("mark", owner, position, mark):
                    batch.mark(owner, position, mark)
                case ("put", collection, key, value, seconds):
                    batch.put(collection, key, value, self.at(seconds))
                case ("delete", collection, key):
                    batch.delete(collection, key)
                case ("stream", name, values, ago):
                    batch.stream(name, values, self.now - ago)
        if not holds:
            with pytest.raises((StoreFencedError, StoreConflictError)):
                self.run(self.written(batch))
            return
        written = self.run(self.written(batch))
        taken = [
            (self.box(condition[1]), self.box(condition[1]).entries[condition[2]][0].position)
            for condition in conditions
            if condition[0] == "take"
        ]
        for box, position in taken:
            box.remove({position})
        for condition in conditions:
            if condition[0] == "expect":
                self.records[condition[1], condition[2]] = b"expected", 0.0
        answers, offsets, generations = iter(written.appended), iter(written.offsets), iter(written.generations)
        numbers = iter(written.notes)
        for step in steps:
            match step:
                case ("append", names, draft, bound, spared, named):
                    draft = replace(draft, expires_at=self.at(draft.expires_at))
                    for owner in names:
                        self.expect(owner, draft, bound, spared, named, next(answers))
                case ("make", owner):
                    self.made(owner, next(generations))
                case ("note", home, data):
                    self.notes.setdefault(self.store.feeds.feed_of(home), []).append((next(numbers), data))
                case ("spare", owner, position):
                    if self.box(owner).made:
                        self.box(owner).spare = position
                case ("due", home, seconds):
                    self.dues.pop(home, None)
                    if seconds:
                        self.dues[home] = self.at(seconds)
                case ("acknowledge", owner, positions):
                    self.box(owner).remove(set(positions))
                case ("mark", owner, position, mark):
                    self.box(owner).mark(position, mark)
                case ("put", collection, key, value, seconds):
                    self.records[collection, key] = value, self.at(seconds)
                case ("delete", collection, key):
                    self.records.pop((collection, key), None)
                case ("stream", name, values, ago):
                    stream = self.streams.setdefault(name, ModelStream())
                    stream.append(values, self.now - ago, list(next(offsets)))  # the invariant compares the rest
        for condition in conditions:
            if condition[0] == "detach" and condition[1] < len(self.fences):
                self.attached.pop(self.fences[condition[1]].home, None)
        assert next(answers, None) is None
        assert next(offsets, None) is None
        assert next(generations, None) is None
        assert next(numbers, None) is None

    def made(self, owner: str, generation: int) -> None:
        """The mailbox is there, and has a generation that is its own."""
        box = self.box(owner)
        assert generation == box.generation if box.generation else generation > box.floor
        box.made, box.generation = True, generation

    @rule(owner=OWNERS)
    def make(self, owner: str) -> None:
        self.made(owner, self.run(self.store.mailboxes.make(owner)))

    @rule(owner=OWNERS, positions=st.lists(POSITIONS, max_size=6))
    def acknowledge(self, owner: str, positions: list[int]) -> None:
        count = self.box(owner).remove(set(positions))
        assert count == self.run(self.store.mailboxes.acknowledge(owner, iter(positions)))

    @rule(owner=OWNERS, position=POSITIONS, mark=MARKS)
    def mark(self, owner: str, position: int, mark: int) -> None:
        assert self.box(owner).mark(position, mark) == self.run(self.store.mailboxes.mark(owner, position, mark))

    @rule(owner=OWNERS)
    def clear(self, owner: str) -> None:
        box = self.box(owner)
        assert len(box.entries) == self.run(self.store.mailboxes.clear(owner))
        box.entries = []

    @rule(owner=OWNERS)
    def forget(self, owner: str) -> None:
        box = self.box(owner)
        assert len(box.entries) == self.run(self.store.mailboxes.forget(owner))
        self.boxes[owner] = ModelBox(floor=max(box.floor, box.last, box.generation))
        assert MailboxInfo(0, 0, 0, 0) == self.run(self.store.mailboxes.info(owner))

    @rule(payload=st.integers(2, 3).map(lambda number: PAYLOADS[number]), seconds=st.sampled_from([1.0, 5.0, 2 * HOUR]))
    def put_blob(self, payload: bytes, seconds: float) -> None:
        """A later time lengthens, an earlier one changes nothing."""
        assert digest_of(payload) == self.run(self.store.blobs.put(payload, self.now, self.now + seconds))
        self.kept[payload] = max(self.kept.get(payload, 0.0), self.now + seconds)

    @rule(collection=COLLECTIONS, key=KEYS, value=VALUES, seconds=ENDS)
    def put(self, collection: str, key: str, value: bytes, seconds: float) -> None:
        self.run(self.store.records.put(collection, key, value, self.at(seconds)))
        self.records[collection, key] = value, self.at(seconds)

    @rule(collection=COLLECTIONS, key=KEYS)
    def delete(self, collection: str, key: str) -> None:
        there = key in self.readable(collection)
        overdue = (collection, key) in self.records and not there
        answer = self.run(self.store.records.delete(collection, key))
        assert overdue or answer == there
        self.records.pop((collection, key), None)

    @rule(name=STREAMS, values=st.just([]) | RECORDS, ago=st.sampled_from([0.0, 0.0, 5.0]))
    def stream(self, name: str, values: Sequence[bytes], ago: float) -> None:
        """Clocks of several nodes differ; time never goes back in a stream."""
        offsets = self.run(self.store.streams.append(name, values, self.now - ago))
        if values:
            self.streams.setdefault(name, ModelStream()).append(values, self.now - ago, offsets)
        assert len(values) == len(offsets)

    @rule(
        name=STREAMS,
        age=st.sampled_from([None, None, 0.0, 1.0, 5.0]),
        records=st.sampled_from([0, 0, 1, 3]),
        size_bytes=st.sampled_from([0, 0, 1, 10, 300, 40_000]),
        budget=st.integers(1, 6),
    )
    def trim(self, name: str, age: float | None, records: int, size_bytes: int, budget: int) -> None:
        before = 0.0 if age is None else self.now - age
        steps = self.run(trim(self.store, name, budget, before=before, records=records, size_bytes=size_bytes))
        wanted = self.streams.get(name, ModelStream()).trim(before, records, size_bytes)
        assert wanted == (sum(step.removed for step in steps), sum(step.size_bytes for step in steps))
        assert all(step.removed <= budget for step in steps)

    @rule(name=STREAMS)
    def drop(self, name: str) -> None:
        self.run(self.store.streams.drop(name))
        self.streams.pop(name, None)

    @rule(owner=OWNERS, node=st.sampled_from(["node-a", "node-b"]))
    def attach(self, owner: str, node: str) -> None:
        self.was_attached(owner, node, self.run(self.store.coordination.attach(owner, node)))

    @rule(owner=OWNERS, node=st.sampled_from(["node-a", "node-b"]))
    def open_home(self, owner: str, node: str) -> None:
        """Also with records: of these collections, those whose key is the home."""
        opened = self.run(self.store.coordination.open(owner, node, ["c", "cc"], self.now))
        self.was_attached(owner, node, opened.attached)
        home = home_of_owner(owner)
        records = [self.readable(collection) for collection in ("c", "cc")]
        assert [{home: found[home]} if home in found else {} for found in records] == opened.records

    def was_attached(self, owner: str, node: str, answer: Attached) -> None:
        home, info = home_of_owner(owner), self.run(self.store.mailboxes.info(owner))
        previous, old = self.attached.get(home, ("", None))
        assert (previous, bool(self.box(owner).entries), info) == (answer.previous, answer.pending, answer.mailbox)
        assert home == answer.fence.home and answer.fence not in self.fences
        assert old is None or answer.fence.number == old.number + 1
        self.attached[home] = node, answer.fence
        self.fences.insert(0, answer.fence)

    @precondition(lambda self: self.fences)
    @rule(ago=st.integers(0, 3))
    def detach(self, ago: int) -> None:
        """With the fence of the last attach, or an old one."""
        fence = self.fences[min(ago, len(self.fences) - 1)]
        there = self.attached.get(fence.home, ("", None))[1] == fence
        assert there == self.run(self.store.coordination.detach(fence))
        if there:
            del self.attached[fence.home]

    @rule(limit=st.integers(1, 3))
    def read_feeds(self, limit: int) -> None:
        """All that was noted comes once, in order, and leads to the end."""
        for feed, end in enumerate(self.run(self.store.feeds.ends())):
            wanted, found = self.notes.pop(feed, []), list[tuple[int, bytes]]()
            page = self.run(self.store.feeds.read(feed, self.read_up_to.get(feed, FeedEnd()), limit))
            while page.notes:
                found += [(note.number, note.data) for note in page.notes]
                self.read_up_to[feed] = FeedEnd(page.notes[-1].number, page.notes[-1].nonce)
                page = self.run(self.store.feeds.read(feed, self.read_up_to[feed], limit))
            assert not page.gap and found == wanted
            assert end == self.read_up_to.get(feed, FeedEnd())

    @rule(limit=st.integers(0, 3))
    def look_due(self, limit: int) -> None:
        """The oldest first, of each feed."""
        for feed in range(len(self.run(self.store.feeds.ends()))):
            times = [(home, at) for home, at in self.dues.items() if self.store.feeds.feed_of(home) == feed]
            wanted = sorted((at, home) for home, at in times if at <= self.now)[:limit]
            assert [(home, at) for at, home in wanted] == self.run(self.store.coordination.due(feed, self.now, limit))

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, HOUR]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(budget=st.integers(1, 20))
    def sweep(self, budget: int) -> None:
        steps = self.run(sweep(self.store, self.now, budget))
        assert all(step.removed <= budget for step in steps)
        gone = [(owner, position) for owner, box in self.boxes.items() for position in box.sweep(self.now)]
        assert sorted(gone) == sorted(pair for step in steps for pair in step.expired)
        self.records = {name: one for name, one in self.records.items() if not one[1] or self.now < one[1]}
        figures = self.run(self.store.figures())
        wanted = (sum(len(box.entries) for box in self.boxes.values()), len(self.records) + len(self.dues))
        assert wanted == (figures.entries, figures.records)

    @precondition(lambda self: self.engine.persistent)
    @rule()
    def reopen(self) -> None:
        self.run(self.store.close())
        self.store = self.engine.make()
        self.run(self.store.open())
        if not self.engine.shared:
            self.attached.clear()  # the node that they were attached to is gone

    # -- reads

    @rule(owner=OWNERS, after=POSITIONS, limit=st.integers(0, 5))
    def read(self, owner: str, after: int, limit: int) -> None:
        wanted = [entry for entry in self.box(owner).alive(self.now) if entry.position > after][:limit]
        assert wanted == self.run(self.store.mailboxes.read(owner, max(after, 0), limit, self.now))

    @rule(name=STREAMS, number=st.integers(0, 8), limit=st.integers(0, 4), time=st.sampled_from([0.0, 1.0, 5.0, 99.0]))
    def read_stream(self, name: str, number: int, limit: int, time: float) -> None:
        """After an offset, and from where a time begins."""
        stream, read = self.streams.get(name, ModelStream()), self.store.streams.read
        after = stream.records[number].offset if number < len(stream.records) else stream.last
        wanted = [record for record in stream.records if record.offset > after][:limit]
        assert wanted == self.run(read(name, after, limit))
        later = [record for record in stream.records if record.time >= self.now - time]
        found = self.run(self.store.streams.find(name, self.now - time))
        assert later == self.run(read(name, found, 1000))
        assert found <= stream.last and (later or found == stream.last)

    def readable(self, collection: str) -> dict[str, bytes]:
        return {
            key: value
            for (place, key), (value, end) in self.records.items()
            if place == collection and (not end or self.now < end)
        }

    @rule(collection=COLLECTIONS, key=KEYS)
    def look_up(self, collection: str, key: str) -> None:
        wanted = self.readable(collection)
        assert wanted.get(key) == self.run(self.store.records.get(collection, key, self.now))
        begin_so = {name: value for name, value in wanted.items() if name.startswith(key)}
        assert begin_so == self.run(scan(self.store, collection, key, self.now))

    @invariant()
    def all_agree(self) -> None:
        async def compare() -> None:
            await self.compare_mailboxes()
            await self.compare_records()
            await self.compare_streams()

        self.run(compare())

    async def compare_mailboxes(self) -> None:
        mailboxes, kept = self.store.mailboxes, {payload for payload, until in self.kept.items() if self.now < until}
        for owner, box in self.boxes.items():
            assert box.alive(self.now) == await entries(self.store, owner, self.now)
            info = await mailboxes.info(owner)
            first = box.entries[0][0].position if box.entries else 0
            assert info == MailboxInfo(len(box.entries), box.size_bytes(), first, info.last, info.generation)
            assert info.last >= box.last
            if info.generation:
                self.made(owner, info.generation)
            assert bool(info.generation) == box.made
            kept |= {entry.payload for entry, _ in box.entries if len(entry.payload) > 256}
        assert sorted(owner for owner, box in self.boxes.items() if box.entries) == await owners(self.store)
        for payload in kept:
            assert payload == await self.store.blobs.get(digest_of(payload), self.now)

    async def compare_records(self) -> None:
        for collection in {place for place, _ in self.records}:
            assert self.readable(collection) == await scan(self.store, collection, now=self.now)

    async def compare_streams(self) -> None:
        streams = self.store.streams
        assert sorted(self.streams) == sorted(await streams.names())
        for name, stream in self.streams.items():
            assert stream.records == await streams.read(name, 0, 1000)
            first = stream.records[0].offset if stream.records else 0
            assert StreamInfo(first, stream.last, len(stream.records), stream.size_bytes()) == await streams.info(name)

    def teardown(self) -> None:
        """In the end the store is sound, and empty when all is taken out of it."""
        try:
            assert [] == self.run(self.store.check())
            for owner in self.boxes:
                self.run(self.store.mailboxes.clear(owner))
            self.run(sweep(self.store, self.now + DAY))
            assert (0, 0) == self.run(self.store.blobs.count())
            assert 0 == self.run(self.store.figures()).entries
            assert [] == self.run(self.store.check())
        finally:
            self.run(self.store.close())
            self.loop.close()


# -- the same, by the hundred


@persistent
async def test_long_batches_give_what_they_give_in_memory(store: Store) -> None:
    """A hundred steps in one call, which servers do quickly; the engine that is compared with has its model above."""
    reference = MemoryStore()
    await reference.open()
    for seed in range(12):
        now = NOW + seed * HOUR / 2
        boxes = [f"v1/{seed}", "v1", f"v1/{seed}/v2"]  # one lives long enough to forget tokens
        dice = Random(seed)
        steps = [random_step(dice, boxes, now) for _ in range(120)]
        mine, theirs = [await carried_out(one, steps, boxes, now, seed) for one in (store, reference)]
        for what, found in mine.items():
            assert found == theirs[what], f"{what}, seed {seed}"
        assert [] == await store.check()
    await reference.close()


async def carried_out(store: Store, steps: list[tuple], boxes: list[str], now: float, seed: int) -> dict[str, object]:
    """What is answered, and what can be read after a sweep, a little later, and after a trim."""
    batch = Batch()
    for method, arguments in steps:
        getattr(batch, method)(*arguments)
    written = await store.write(batch)
    found: dict[str, object] = {f"answer {number}": answer for number, answer in enumerate(written.appended)}
    for owner in boxes:
        found[owner] = await entries(store, owner, now), await store.mailboxes.info(owner)
    swept = await sweep(store, now + 10)
    found["expired"] = sorted(pair for step in swept for pair in step.expired)
    figures = await store.figures()
    found["figures"] = figures.entries, figures.records
    found["records"] = [await scan(store, collection, now=now + 10) for collection in ("c", "cc")]
    found["trimmed"] = [await trimmed(store, name, now, seed) for name in ("s", "ss")]
    return found


#: Of trims; times are seconds from now on.
LIMITS: list[dict[str, float]] = [
    {"before": -1.0},
    {"records": 5},
    {"size_bytes": 3000},
    {"records": 9, "size_bytes": 700},
]


async def trimmed(store: Store, name: str, now: float, seed: int) -> tuple[object, ...]:
    limits = LIMITS[seed % len(LIMITS)]
    if "before" in limits:
        limits = {"before": now + limits["before"]}
    before = await store.streams.read(name, 0, 1000)
    steps = await trim(store, name, 3, **limits)
    found = await store.streams.find(name, now - 1)
    gone = sum(step.removed for step in steps), sum(step.size_bytes for step in steps)
    return before, gone, found, await store.streams.read(name, 0, 1000), await store.streams.info(name)


def random_step(dice: Random, boxes: list[str], now: float) -> tuple[str, tuple[Any, ...]]:
    """Mostly appends to mailboxes that are full."""
    owner, end = dice.choice(boxes), dice.choice((0.0, 0.0, now + 5, now + 2 * HOUR, now - 1))
    kinds = ("append", "acknowledge", "mark", "put", "delete", "stream", "spare")
    match dice.choices(kinds, (60, 14, 6, 12, 3, 5, 3))[0]:
        case "spare":
            return "spare", (owner, dice.choice((0, SPARE_ALL, dice.randrange(50))))
        case "acknowledge":
            return "acknowledge", (owner, dice.sample(range(50), 5))
        case "mark":
            return "mark", (owner, dice.randrange(50), dice.choice((0, 1, 255)))
        case "put":
            return "put", (dice.choice(("c", "cc")), dice.choice("abc"), dice.choice(CONTENTS), end)
        case "delete":
            return "delete", (dice.choice(("c", "cc")), dice.choice("abc"))
        case "stream":
            values = [dice.choice(CONTENTS[:3]) for _ in range(dice.randrange(1, 5))]
            return "stream", (dice.choice(("s", "ss")), values, now - dice.choice((0, 1, 3)))
    draft = Draft(
        bytes(dice.randrange(4)),
        dice.choice(PAYLOADS),
        dice.choice((b"", b"", b"k", b"k\x00", b"k\xff/*{}")),
        end,
        dice.random() < 0.3,
        dice.choice((b"", b"", b"", b"t%d" % dice.randrange(9))),
    )
    bound = Bound(dice.choice((0, 0, 1, 3, 8)), dice.choice((0, 0, 0, 3, 10, 2500, 6000)), dice.random() < 0.3)
    names = dice.sample(boxes, dice.choice((1, 1, 2, 3)))
    spared = [dice.choice((0, 0, SPARE_ALL, dice.randrange(50), dice.randrange(50))) for _ in names]
    return "append", (names, draft, now, bound, spared)


#: How often, and how long: as much as an engine does in a few seconds.
EXAMPLES = {"memory": (60, 40), "rocksdb": (15, 30), "redis": (15, 30), "valkey": (4, 30), "cluster": (5, 30)}


@pytest.mark.timeout(600)
def test_any_calls_in_any_order(engine: Engine) -> None:
    class Machine(StoreMachine):
        pass

    Machine.engine = engine
    if isinstance(engine, EmbeddedEngine):
        engine.level = Durability.FAST  # a sync for every call would take longer than all else
    examples, steps = EXAMPLES[engine.name]
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )
