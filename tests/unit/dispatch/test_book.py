"""The leader's book: every message is somewhere, once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from motorcade.dispatch.book import Book, Done

MAX_DELIVERIES = 3


def book() -> Book:
    return Book(MAX_DELIVERIES, retry_pause=0.1, longest_pause=2.0)


def filled(count: int) -> tuple[Book, list[bytes]]:
    one = book()
    ids = [b"id%d" % number for number in range(count)]
    one.add(ids, [b"e%d" % number for number in range(count)], [b"m%d" % number for number in range(count)])
    return one, ids


def test_what_is_acknowledged_is_told_once() -> None:
    one, ids = filled(3)
    assert [(b"e0", b"m0"), (b"e1", b"m1")] == one.acknowledge(ids[:2])
    assert [(b"e2", b"m2")] == one.acknowledge(ids[1:])
    done = one.take_done(10)
    assert Done(ids, [b"e0", b"e1", b"e2"], []) == done
    assert set(ids) == one.untold()
    one.told(done)
    assert (set(), 0, 3, {}) == (one.untold(), one.done, one.acknowledged, one.open)


def test_not_more_is_told_at_once_than_asked_for() -> None:
    one, ids = filled(5)
    one.acknowledge(ids)
    assert [ids[:2], ids[2:4], ids[4:], []] == [one.take_done(2).ids for _ in range(4)]


def test_a_delivery_that_failed_counts() -> None:
    """Until there were too many of them."""
    one, ids = filled(1)
    for delivery in range(1, MAX_DELIVERIES):
        one.failed(ids, "w", "lost", 0.0, counted=True, pause=False)
        assert (ids[0], delivery) == (one.next_waiting(), one.histories[ids[0]].deliveries)
        one.waiting.popleft()
    one.failed(ids, "w", "lost", 0.0, counted=True, pause=False)
    assert (None, ids[0]) == (one.next_waiting(), one.next_hopeless())
    one.bury(ids[0])
    assert (ids, [b"e0"], ids) == one.take_done(10)


def test_what_is_given_back_does_not_count() -> None:
    one, ids = filled(1)
    for _ in range(10):
        one.failed(ids, "w", "returned", 0.0, counted=False, pause=False)
        one.waiting.clear()
    assert (0, None) == (one.histories[ids[0]].deliveries, one.next_hopeless())


def test_pauses_grow() -> None:
    one, ids = filled(1)
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


def test_a_late_acknowledgement_is_one() -> None:
    """Whoever had the message before may have done it; then it is sent to nobody else, and is not hopeless."""
    one, ids = filled(2)
    one.failed(ids, "w", "overdue", 0.0, counted=True, pause=False)
    one.acknowledge(ids[:1])
    assert ids[1] == one.next_waiting()
    for _ in range(MAX_DELIVERIES):
        one.failed(ids[1:], "w", "overdue", 0.0, counted=True, pause=False)
    one.acknowledge(ids[1:])
    assert (None, None) == (one.next_hopeless(), one.next_waiting())


def test_what_an_earlier_leader_has_counted() -> None:
    one, ids = filled(2)
    one.remember(ids[0], 1)
    one.remember(ids[1], MAX_DELIVERIES)
    assert (ids[1], 1) == (one.next_hopeless(), one.histories[ids[0]].deliveries)


class Messages(RuleBasedStateMachine):
    """Messages between reading, workers, pauses, dead letters and Redis."""

    def __init__(self) -> None:
        super().__init__()
        self.book = book()
        self.now = 0.0
        self.added = 0
        self.sent: dict[bytes, int] = {}  # with a worker: failed deliveries so far
        self.told: list[bytes] = []
        self.buried: list[bytes] = []

    @rule(count=st.integers(1, 5))
    def read(self, count: int) -> None:
        ids = [b"%d" % number for number in range(self.added, self.added + count)]
        self.added += count
        self.book.add(ids, ids, ids)
        self.sent |= dict.fromkeys(ids, 0)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.sent)), min_size=1, unique=True))
        self.book.acknowledge(list(ids))
        for id_ in ids:
            del self.sent[id_]

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), counted=st.booleans(), pause=st.booleans())
    def fail(self, data: st.DataObject, counted: bool, pause: bool) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.sent)), min_size=1, unique=True))
        self.book.failed(ids, "w", "why", self.now, counted=counted, pause=pause)
        for id_ in ids:
            assert self.sent.pop(id_) + counted == self.book.histories[id_].deliveries

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.book.wake(self.now)

    @rule()
    def send_again(self) -> None:
        while (id_ := self.book.next_waiting()) is not None:
            self.book.waiting.popleft()
            self.sent[id_] = self.book.histories[id_].deliveries
            assert self.sent[id_] < MAX_DELIVERIES

    @rule()
    def bury(self) -> None:
        while (id_ := self.book.next_hopeless()) is not None:
            assert MAX_DELIVERIES == self.book.histories[id_].deliveries
            self.book.bury(id_)
            self.buried.append(id_)

    @rule(most=st.integers(1, 10))
    def tell(self, most: int) -> None:
        done = self.book.take_done(most)
        assert done.ids == done.entries
        self.told += done.ids
        self.book.told(done)

    @invariant()
    def every_message_is_somewhere_once(self) -> None:
        places = [
            *self.sent,
            *self.book.waiting,
            *(id_ for _, id_ in self.book.later),
            *self.book.hopeless,
            *self.book.untold(),
            *self.told,
        ]
        places = [id_ for id_ in places if id_ not in self.buried or id_ in self.told or id_ in self.book.untold()]
        assert len(set(places)) == self.added
        assert set(self.book.open) | self.book.untold() | set(self.told) == {b"%d" % n for n in range(self.added)}
        assert len(self.told) == len(set(self.told))


Messages.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestMessages = Messages.TestCase
