"""Mailboxes against a model: any sequence of calls gives what a list per owner would give.

The model is written down twice as simple as any engine could be; hypothesis looks for a sequence of calls where the two
differ, and shows the shortest.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
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

from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import SPARE_ALL, Appended, Bound, Draft, Durability, Entry, MailboxInfo, Store
from motorcade.storage.rocks import RocksStore
from tests.contracts.engines import DAY, HOUR, NOW, digest_of, entries, owners, patient, sweep
from tests.support.redis import RedisCluster, RedisServer

T = TypeVar("T")

OWNERS = st.sampled_from(["v1", "v2", "v1/v2"])
PAYLOADS = [b"", b"small", b"a" * 1000, b"b" * 2000]
BOUNDS = st.one_of(
    st.just(Bound()),
    st.builds(Bound, entries=st.integers(1, 4)),
    st.builds(Bound, octets=st.sampled_from([3, 10, 2500])),
    st.builds(Bound, entries=st.integers(1, 4), octets=st.sampled_from([10, 2500])),
)
#: `expires_at` is filled in as seconds from now on; 0: never.
DRAFTS = st.builds(
    Draft,
    body=st.binary(max_size=4),
    payload=st.sampled_from(PAYLOADS),
    key=st.sampled_from([b"", b"", b"k1", b"k2"]),
    expires_at=st.sampled_from([0.0, 0.0, 1.0, 5.0, 2 * HOUR]),
    droppable=st.booleans(),
    token=st.sampled_from([b"", b"", b"t1", b"t2"]),
)
SPARED = st.sampled_from([0, 0, 0, SPARE_ALL, 1, 3, 5, 8, 12])
CALLS = st.tuples(st.lists(OWNERS, min_size=1, max_size=3), DRAFTS, BOUNDS, SPARED)


@dataclass
class ModelBox:
    """One owner: a list, what was given last, and tokens with their first time and position."""

    entries: list[tuple[Entry, bool]] = field(default_factory=list)  #: and whether it is droppable
    last: int = 0
    tokens: dict[bytes, tuple[float, int]] = field(default_factory=dict)

    def octets(self) -> int:
        return sum(len(entry.body) + len(entry.payload) for entry, _ in self.entries)

    def too_large(self, bound: Bound) -> bool:
        return bool(bound.entries and len(self.entries) > bound.entries) or bool(
            bound.octets and self.octets() > bound.octets
        )

    def remove(self, positions: set[int]) -> int:
        before = len(self.entries)
        self.entries = [pair for pair in self.entries if pair[0].position not in positions]
        return before - len(self.entries)

    def append(self, owner: str, draft: Draft, now: float, bound: Bound, position: int, spared: int) -> Appended:
        """What the answer has to be; `position` is the one to use if the entry stays."""
        first, known = self.tokens.get(draft.token, (now - HOUR, 0)) if draft.token else (now - HOUR, 0)
        if now < first + HOUR:
            return Appended(owner, known, repeated=True)
        replaced = next((entry.position for entry, _ in self.entries if draft.key and entry.key == draft.key), 0)
        self.remove({replaced})
        dropped: list[int] = []
        if bound.octets and len(draft.body) + len(draft.payload) > bound.octets:
            position = 0
        else:
            entry = Entry(position, draft.body, draft.payload, draft.key, now, draft.expires_at, 0)
            self.entries.append((entry, draft.droppable))
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
        return Appended(owner, position, replaced, tuple(dropped), over=position > 0 and self.too_large(bound))


class MailboxMachine(RuleBasedStateMachine):
    """Any calls, in any order, on one engine."""

    persistent = False

    def make(self) -> Store:
        return MemoryStore()

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp(prefix="motorcade-model-"))
        self.model: dict[str, ModelBox] = {}
        self.now = NOW
        self.store = self.make()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def box(self, owner: str) -> ModelBox:
        return self.model.setdefault(owner, ModelBox())

    @initialize()
    def open(self) -> None:
        self.run(self.store.open())

    def expect(self, owner: str, draft: Draft, bound: Bound, spared: int, answer: Appended) -> None:
        box = self.box(owner)
        assert answer == box.append(owner, draft, self.now, bound, answer.position or box.last + 1, spared)
        if answer.position and not answer.repeated:
            # What was pushed out itself may have used up positions; nothing else may.
            assert answer.position > box.last
            box.last = answer.position

    def dated(self, draft: Draft) -> Draft:
        return replace(draft, expires_at=self.now + draft.expires_at) if draft.expires_at else draft

    @rule(call=CALLS)
    def append(self, call: tuple[list[str], Draft, Bound, int]) -> None:
        names, draft, bound, spared = call[0], self.dated(call[1]), call[2], [call[3]] * len(call[0])
        for owner, answer in zip(
            names, self.run(self.store.mailboxes.append(names, draft, self.now, bound, spared)), strict=True
        ):
            self.expect(owner, draft, bound, call[3], answer)

    @rule(calls=st.lists(CALLS, max_size=5), acknowledged=st.lists(st.tuples(OWNERS, st.integers(1, 12)), max_size=4))
    def batch(self, calls: list[tuple[list[str], Draft, Bound, int]], acknowledged: list[tuple[str, int]]) -> None:
        batch = self.store.batch()
        for owner, position in acknowledged:
            batch.acknowledge(owner, [position])
        for names, draft, bound, spared in calls:
            batch.append(names, self.dated(draft), self.now, bound, [spared] * len(names))
        answers = iter(self.run(batch.commit()))
        for owner, position in acknowledged:
            self.box(owner).remove({position})
        for names, draft, bound, spared in calls:
            for owner in names:
                self.expect(owner, self.dated(draft), bound, spared, next(answers))
        assert next(answers, None) is None

    @rule(owner=OWNERS, positions=st.lists(st.integers(0, 20), max_size=6))
    def acknowledge(self, owner: str, positions: list[int]) -> None:
        count = self.box(owner).remove(set(positions))
        assert count == self.run(self.store.mailboxes.acknowledge(owner, positions))

    @rule(owner=OWNERS, position=st.integers(1, 20), mark=st.sampled_from([0, 1, 255]))
    def mark(self, owner: str, position: int, mark: int) -> None:
        box = self.box(owner)
        there = any(entry.position == position for entry, _ in box.entries)
        box.entries = [
            (self.marked(entry, mark) if entry.position == position else entry, droppable)
            for entry, droppable in box.entries
        ]
        assert there == self.run(self.store.mailboxes.mark(owner, position, mark))

    @staticmethod
    def marked(entry: Entry, mark: int) -> Entry:
        """What is marked never expires."""
        return replace(entry, mark=mark, expires_at=0.0 if mark else entry.expires_at)

    @rule(owner=OWNERS)
    def clear(self, owner: str) -> None:
        box = self.box(owner)
        assert len(box.entries) == self.run(self.store.mailboxes.clear(owner))
        box.entries = []

    @rule(owner=OWNERS)
    def forget(self, owner: str) -> None:
        box = self.box(owner)
        assert len(box.entries) == self.run(self.store.mailboxes.forget(owner))
        self.model[owner] = ModelBox()
        assert MailboxInfo(0, 0, 0, 0) == self.run(self.store.mailboxes.info(owner))

    @rule(owner=OWNERS, after=st.integers(0, 20), limit=st.integers(0, 5))
    def read(self, owner: str, after: int, limit: int) -> None:
        wanted = [entry for entry in self.alive(owner) if entry.position > after][:limit]
        assert wanted == self.run(self.store.mailboxes.read(owner, after, limit, self.now))

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, HOUR]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(budget=st.integers(1, 20))
    def sweep(self, budget: int) -> None:
        steps = self.run(sweep(self.store, self.now, budget))
        assert all(step.removed <= budget for step in steps)
        for owner, box in self.model.items():
            alive = {entry.position for entry in self.alive(owner)}
            box.remove({entry.position for entry, _ in box.entries} - alive)

    @precondition(lambda self: self.persistent)
    @rule()
    def reopen(self) -> None:
        self.run(self.store.close())
        self.store = self.make()
        self.run(self.store.open())

    def alive(self, owner: str) -> list[Entry]:
        found = [entry for entry, _ in self.box(owner).entries]
        return [entry for entry in found if not entry.expires_at or self.now < entry.expires_at]

    @invariant()
    def mailboxes_agree(self) -> None:
        for owner, box in self.model.items():
            assert self.alive(owner) == self.run(entries(self.store, owner, self.now))
            info = self.run(self.store.mailboxes.info(owner))
            first = box.entries[0][0].position if box.entries else 0
            assert info == MailboxInfo(len(box.entries), box.octets(), first, info.last)
            assert info.last >= box.last
        assert sorted(owner for owner, box in self.model.items() if box.entries) == self.run(owners(self.store))

    @invariant()
    def payloads_are_there(self) -> None:
        held = {entry.payload for box in self.model.values() for entry, _ in box.entries if len(entry.payload) > 256}
        for payload in held:
            assert payload == self.run(self.store.blobs.get(digest_of(payload), self.now))

    def teardown(self) -> None:
        """In the end the store is sound, and empty when all is taken out of it."""
        try:
            assert [] == self.run(self.store.check())
            for owner in self.model:
                self.run(self.store.mailboxes.clear(owner))
            self.run(sweep(self.store, self.now + DAY))
            assert (0, 0) == self.run(self.store.blobs.count())
            assert 0 == self.run(self.store.figures()).entries
            assert [] == self.run(self.store.check())
        finally:
            self.run(self.store.close())
            self.runner.close()
            shutil.rmtree(self.directory, ignore_errors=True)


class RocksMailboxMachine(MailboxMachine):
    """The same with files, closed and opened again in between."""

    persistent = True

    def make(self) -> Store:
        return RocksStore(self.directory / "store")


EVERY_TIME = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

TestMemoryModel = MailboxMachine.TestCase
TestMemoryModel.settings = settings(EVERY_TIME, max_examples=100, stateful_step_count=40)

TestRocksModel = RocksMailboxMachine.TestCase
TestRocksModel.settings = settings(EVERY_TIME, max_examples=20, stateful_step_count=30)


def machine_over(servers: RedisServer | RedisCluster, level: Durability) -> type[MailboxMachine]:
    class RedisMailboxMachine(MailboxMachine):
        persistent = True

        def __init__(self) -> None:
            servers.empty()
            super().__init__()

        def make(self) -> Store:
            return patient(servers.url, level)

    return RedisMailboxMachine


@pytest.mark.timeout(600)
def test_redis_model(redis_server: RedisServer) -> None:
    """The same with a server."""
    machine = machine_over(redis_server, Durability.FAST)
    run_state_machine_as_test(machine, settings=settings(EVERY_TIME, max_examples=20, stateful_step_count=30))


@pytest.mark.timeout(600)
def test_cluster_model(redis_cluster: RedisCluster) -> None:
    """The same with six of them, where payloads and entries are in different places."""
    machine = machine_over(redis_cluster, Durability.SAFE)
    run_state_machine_as_test(machine, settings=settings(EVERY_TIME, max_examples=5, stateful_step_count=30))
