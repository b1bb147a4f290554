"""The leader's book: every message is somewhere, once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from motorcade.dispatch.book import Book

MAX_DELIVERIES = 3


def book() -> Book:
    return Book(MAX_DELIVERIES, retry_pause=0.1, longest_pause=2.0)


def test_pauses_grow() -> None:
    one, ids = book(), [b"id"]
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
        self.book = book()
        self.now = 0.0
        self.added = 0
        self.sent: dict[bytes, int] = {}  # with a worker: failed deliveries so far
        self.told: list[bytes] = []
        self.buried: list[bytes] = []

    @rule(count=st.integers(1, 5), deliveries=st.integers(0, MAX_DELIVERIES))
    def read(self, count: int, deliveries: int) -> None:
        """An earlier leader may have counted deliveries; what had too many of them is hopeless at once."""
        ids = [b"%d" % number for number in range(self.added, self.added + count)]
        self.added += count
        self.book.add(ids, ids, ids)
        for id_ in ids if deliveries else ():
            self.book.remember(id_, deliveries)
        if deliveries < MAX_DELIVERIES:
            self.sent |= dict.fromkeys(ids, deliveries)

    @precondition(lambda self: self.book.open)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        """Whoever had a message before may have done it; then it is sent to nobody else, and is not hopeless."""
        ids = data.draw(st.lists(st.sampled_from(sorted(self.book.open)), min_size=1, unique=True))
        before = self.book.acknowledged
        assert [(id_, id_) for id_ in ids] == self.book.acknowledge([*ids, b"nobody's"])
        assert before + len(ids) == self.book.acknowledged
        for id_ in ids:
            self.sent.pop(id_, None)
            assert id_ not in (self.book.next_waiting(), self.book.next_hopeless())

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
        assert done.ids == done.entries and len(done.ids) <= most
        assert set(done.several) <= set(done.ids) and set(done.ids) <= self.book.untold()
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

    @invariant()
    def nothing_is_known_of_what_redis_knows(self) -> None:
        assert self.book.histories.keys() <= self.book.open.keys() | self.book.untold()


Messages.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestMessages = Messages.TestCase
