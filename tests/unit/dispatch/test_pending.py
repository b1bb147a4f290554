"""The leader's pending table: every message is in one place."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from motorcade.dispatch.pending import PendingTable

MAX_DELIVERIES = 3


def pending_table() -> PendingTable:
    return PendingTable(MAX_DELIVERIES, retry_pause=0.1, longest_pause=2.0)


def test_pauses_grow() -> None:
    one, ids = pending_table(), [b"id"]
    one.add(ids, [b"entry"], [b"message"])
    one.failed(ids, "w", "refused", 10.0, counted=True, pause=True)
    one.wake(10.09)
    assert one.next_waiting() is None
    one.wake(10.1)
    assert ids[0] == one.next_waiting()
    one.waiting.clear()
    one.failed(ids, "w", "refused", 20.0, counted=True, pause=True)
    one.wake(20.19)
    assert one.next_waiting() is None
    one.wake(20.2)
    assert ids[0] == one.next_waiting()


class Messages(RuleBasedStateMachine):
    """Messages between reading, workers, pauses, dead letters and Redis."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = pending_table()
        self.now = 0.0
        self.added = 0
        self.sent: dict[bytes, int] = {}  # with a worker: failed deliveries so far
        self.told: list[bytes] = []
        self.dead_lettered: list[bytes] = []

    @rule(count=st.integers(1, 5), deliveries=st.integers(0, MAX_DELIVERIES))
    def read(self, count: int, deliveries: int) -> None:
        """An earlier leader may have counted deliveries; what had too many of them is hopeless at once."""
        ids = [b"%d" % number for number in range(self.added, self.added + count)]
        self.added += count
        self.pending.add(ids, ids, ids)
        for id_ in ids if deliveries else ():
            self.pending.remember(id_, deliveries)
        if deliveries < MAX_DELIVERIES:
            self.sent |= dict.fromkeys(ids, deliveries)

    @precondition(lambda self: self.pending.open)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        """A worker that had a message before may finish it; then no other worker gets it, and it is not hopeless."""
        ids = data.draw(st.lists(st.sampled_from(sorted(self.pending.open)), min_size=1, unique=True))
        before = self.pending.acknowledged
        assert [(id_, id_) for id_ in ids] == self.pending.acknowledge([*ids, b"unknown"])
        assert before + len(ids) == self.pending.acknowledged
        for id_ in ids:
            self.sent.pop(id_, None)
            assert id_ not in (self.pending.next_waiting(), self.pending.next_hopeless())

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), counted=st.booleans(), pause=st.booleans())
    def fail(self, data: st.DataObject, counted: bool, pause: bool) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.sent)), min_size=1, unique=True))
        self.pending.failed(ids, "w", "why", self.now, counted=counted, pause=pause)
        for id_ in ids:
            assert self.sent.pop(id_) + counted == self.pending.histories[id_].deliveries

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.pending.wake(self.now)

    @rule()
    def send_again(self) -> None:
        while (id_ := self.pending.next_waiting()) is not None:
            self.pending.waiting.popleft()
            self.sent[id_] = self.pending.histories[id_].deliveries
            assert self.sent[id_] < MAX_DELIVERIES

    @rule()
    def dead_letter(self) -> None:
        while (id_ := self.pending.next_hopeless()) is not None:
            assert MAX_DELIVERIES == self.pending.histories[id_].deliveries
            self.pending.dead_letter(id_)
            self.dead_lettered.append(id_)

    @rule(most=st.integers(1, 10))
    def tell(self, most: int) -> None:
        done = self.pending.take_done(most)
        assert done.ids == done.entries and len(done.ids) <= most
        assert set(done.several) <= set(done.ids) and set(done.ids) <= self.pending.untold()
        self.told += done.ids
        self.pending.told(done)

    @invariant()
    def every_message_is_somewhere_once(self) -> None:
        places = [
            *self.sent,
            *self.pending.waiting,
            *(id_ for _, id_ in self.pending.later),
            *self.pending.hopeless,
            *self.pending.untold(),
            *self.told,
        ]
        places = [
            id_ for id_ in places if id_ not in self.dead_lettered or id_ in self.told or id_ in self.pending.untold()
        ]
        assert len(set(places)) == self.added
        assert set(self.pending.open) | self.pending.untold() | set(self.told) == {b"%d" % n for n in range(self.added)}
        assert len(self.told) == len(set(self.told))

    @invariant()
    def nothing_is_known_of_what_redis_knows(self) -> None:
        assert self.pending.histories.keys() <= self.pending.open.keys() | self.pending.untold()


Messages.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestMessages = Messages.TestCase
