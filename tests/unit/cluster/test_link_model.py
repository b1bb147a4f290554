"""Two members, the links between them, and everything that happens to connections, in any order and in virtual time.

Bytes come in order, in any pieces, and late; a connection breaks at any byte, and its ends notice at different times; a
side does not read for a while; a member starts again. What must hold:

- What a member handles of one incarnation of the other is a beginning of what that one has sent, in order and once.
  When both live and a connection stays up, it is all of it.
- Items are dropped only if they may be, and only by a full link; a link is full from its bounds on until less than
  half.
- A confirmation is done when its items were handled, or after patience, or with the end of an incarnation; never later.
- Who has the answer to a ping has handled everything that was sent before that answer was made.
- A question is answered or fails, at the latest in time; the answer is that to this question.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from motorcade.cluster import link as module
from motorcade.cluster.link import Link, LinkStatus, LinkWire
from motorcade.cluster.options import MAX_FRAME, LinkOptions
from motorcade.commit import Commit
from motorcade.extension.cluster import AskError, ItemHandler, Peer

OPTIONS = LinkOptions(bind="", max_items=12, max_bytes=600, patience=0.5)
BATCH_BYTES = 150
SIDES = st.sampled_from(["low", "high"])


@dataclass
class Waiting:
    """A confirmation that was asked for."""

    link: Link
    number: int
    asked_at: float
    commit: Commit[None]


@dataclass
class Question:
    asked_at: float
    patience: float
    text: bytes
    commit: Commit[bytes]


class Pipe:
    """Bytes on their way from a member."""

    def __init__(self, writer: Member, most: int) -> None:
        self.data = bytearray()
        self.writer = writer
        self.most = most
        self.broken = False
        self.paused = False

    def write(self, data: bytes) -> None:
        if self.broken:
            return
        self.data += data
        if len(self.data) > self.most and not self.paused:
            self.paused = True
            if self.writer.link.wire is self:
                self.writer.link.pause()

    def take(self, count: int) -> bytes:
        data = bytes(self.data[:count])
        del self.data[:count]
        if self.paused and len(self.data) * 2 <= self.most:
            self.paused = False
            if self.writer.link.wire is self:
                self.writer.link.resume()
        return data


@dataclass
class Member:
    """One side: its incarnation, and the link to the incarnation of the other side that it knows."""

    name: str
    number: int
    incarnation: int = 0
    link: Link = field(init=False)
    peer_incarnation: int = 0  #: of the other side; 0: it has not met any
    woken: set[Link] = field(default_factory=set)
    #: By incarnations, own and other: what was sent, and what was handled.
    sent: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)
    handled: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)
    asked_for: list[tuple[Link, LinkWire, int, bytes]] = field(default_factory=list)
    unmet: list[bytes] = field(default_factory=list)  #: sent before the other side's incarnation was known

    def begin(self) -> None:
        self.incarnation += 1
        self.meet(0)

    def meet(self, incarnation: int) -> None:
        """Begin the link to another incarnation."""
        self.peer_incarnation = incarnation
        self.link = Link("peer~1", 1, self, OPTIONS)
        self.unmet = []

    def known(self, incarnation: int) -> None:
        """Go on with an incarnation, which may be the first."""
        if self.peer_incarnation not in {0, incarnation}:
            self.link.close_dead("another incarnation")
            self.meet(incarnation)
        if not self.peer_incarnation:
            self.peer_incarnation = incarnation
            self.sent[self.incarnation, incarnation] = self.unmet

    @property
    def log(self) -> list[bytes]:
        """What was sent to the incarnation that it knows."""
        if not self.peer_incarnation:
            return self.unmet
        return self.sent.setdefault((self.incarnation, self.peer_incarnation), [])

    # -- LinkEvents

    def wake(self, link: Link) -> None:
        assert link not in self.woken
        self.woken.add(link)

    def handler(self, kind: str) -> ItemHandler | None:
        def handle(_peer: Peer, body: bytes) -> None:
            assert body.startswith(kind.encode())
            self.handled.setdefault((self.incarnation, self.peer_incarnation), []).append(body)

        return handle

    def asked(self, link: Link, wire: LinkWire, id_: int, noun: str, question: bytes) -> None:
        self.asked_for.append((link, wire, id_, question))

    def pong(self, link: Link) -> bytes:
        return b"%d %d" % (self.incarnation, len(self.log))

    def answered(self, link: Link, sent_at: float, body: bytes) -> None:
        incarnation, count = map(int, body.split())
        assert incarnation == self.peer_incarnation
        assert count <= len(self.handled.get((self.incarnation, incarnation), [])), "handled before the answer"


class TwoMembers(RuleBasedStateMachine):
    """The model; the member with the higher number dials."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = patch.multiple(module, BATCH_BYTES=BATCH_BYTES, WRITE_SIZE=50)
        self._patch.start()
        self.now = 1000.0
        self.low, self.high = Member("low", 1), Member("high", 2)
        self.low.begin()
        self.high.begin()
        self.to_low: Pipe | None = None
        self.to_high: Pipe | None = None
        self.greeting: tuple[int, int] | None = None  # under way to `high`: incarnation of `low`, received by it
        self.waiting: list[Waiting] = []
        self.rooms: list[tuple[Link, Commit[None]]] = []
        self.questions: list[Question] = []
        self.items = 0
        self.capacity = 0

    @initialize(capacity=st.sampled_from([40, 200, 1 << 30]))
    def begin(self, capacity: int) -> None:
        self.capacity = capacity

    def teardown(self) -> None:
        try:
            self.heal()
        finally:
            self._patch.stop()

    def member(self, name: str) -> Member:
        return self.low if name == "low" else self.high

    # -- what members do

    @rule(side=SIDES, kind=st.sampled_from("xyz"), size=st.integers(0, 260), droppable=st.booleans())
    def send(self, side: str, kind: str, size: int, droppable: bool) -> None:
        member = self.member(side)
        link = member.link
        self.items += 1
        body = b"%b%d " % (kind.encode(), self.items) + bytes(size)
        full, dropped, sent = link.full, link.dropped, link.sent
        link.send(kind, body, droppable=droppable)
        if link.dropped > dropped:
            assert droppable and full and link.sent == sent
        else:
            assert not (droppable and full)
            assert link.sent > sent
            member.log.append(body)

    @rule(side=SIDES, count=st.integers(2, 14), droppable=st.booleans())
    def send_many(self, side: str, count: int, droppable: bool) -> None:
        for _ in range(count):
            self.send(side, "x", 5, droppable)

    @rule(side=SIDES)
    def confirm(self, side: str) -> None:
        link = self.member(side).link
        commit = link.confirm()
        assert commit is link.confirm()
        self.waiting.append(Waiting(link, link.sent, self.now, commit))

    @rule(side=SIDES)
    def room(self, side: str) -> None:
        link = self.member(side).link
        self.rooms.append((link, link.room()))

    @rule(side=SIDES, patience=st.sampled_from([0.2, 1.0, 3.0]))
    def ask(self, side: str, patience: float) -> None:
        text = b"%d" % len(self.questions)
        commit = self.member(side).link.ask("noun", text, self.now + patience)
        self.questions.append(Question(self.now, patience, text, commit))

    @rule(side=SIDES, data=st.data())
    def answer(self, side: str, data: st.DataObject) -> None:
        asked = self.member(side).asked_for
        if asked:
            link, wire, id_, question = asked.pop(data.draw(st.integers(0, len(asked) - 1)))
            link.answer(wire, id_, b"answer to " + question)

    @rule(side=SIDES)
    def ping(self, side: str) -> None:
        self.member(side).link.ping(self.now)

    @rule(side=SIDES)
    def turn(self, side: str) -> None:
        member = self.member(side)
        woken, member.woken = member.woken, set()
        for link in woken:
            link.flush(self.now)

    # -- what happens to bytes

    @rule(to=SIDES, count=st.one_of(st.integers(1, 40), st.just(1 << 30)))
    def carry(self, to: str, count: int) -> None:
        member, pipe = (self.low, self.to_low) if to == "low" else (self.high, self.to_high)
        if pipe is None or (to == "high" and self.greeting is not None):
            return
        data = pipe.take(count)
        back = self.to_high if to == "low" else self.to_low
        if data and member.link.wire is back:
            member.link.receive(data, self.now)

    @rule(side=SIDES)
    def exchange(self, side: str) -> None:
        """One side's turn ends, and all of it is carried; then what the other side has to say."""
        to, back = ("high", "low") if side == "low" else ("low", "high")
        for _ in range(3):
            self.turn(side)
            self.carry(to, 1 << 30)
            self.carry(back, 1 << 30)

    @precondition(lambda self: self.to_low is not None)
    @rule()
    def cut(self) -> None:
        """Nothing more comes through; the ends notice later."""
        assert self.to_low is not None and self.to_high is not None
        self.to_low.broken = self.to_high.broken = True
        self.to_low.data.clear()
        self.to_high.data.clear()

    @rule(side=SIDES)
    def notice(self, side: str) -> None:
        """An end notices that its connection is broken."""
        link = self.member(side).link
        if isinstance(link.wire, Pipe) and link.wire.broken:
            link.lost("broken")

    @rule()
    def connect(self) -> None:
        """The member with the higher number dials if it has no connection; the other one may believe to have one."""
        if self.high.link.wire is not None:
            return
        if self.to_low is not None:
            self.cut()
        self.to_low, self.to_high = Pipe(self.high, self.capacity), Pipe(self.low, self.capacity)
        received = self.high.link.received if self.high.peer_incarnation in {0, self.low.incarnation} else 0
        if self.low.link.wire is not None:
            self.low.link.lost("another connection has taken its place")
        self.low.known(self.high.incarnation)
        self.low.link.check(received)
        self.greeting = self.low.incarnation, self.low.link.received
        self.low.link.opened(self.to_high, received, MAX_FRAME, self.now)

    @precondition(lambda self: self.greeting is not None)
    @rule()
    def greet(self) -> None:
        """The end of the greeting has come to the member that has dialled."""
        assert self.greeting is not None and self.to_low is not None
        (incarnation, received), self.greeting = self.greeting, None
        if self.to_low.broken or self.high.link.wire is not None:
            return
        self.high.known(incarnation)
        self.high.link.check(received)
        self.high.link.opened(self.to_low, received, MAX_FRAME, self.now)

    @rule(side=SIDES)
    def restart(self, side: str) -> None:
        if self.to_low is not None:
            self.cut()
        self.greeting = None
        member = self.member(side)
        member.link.close_dead("its process has ended")
        member.asked_for.clear()
        member.woken.clear()
        member.begin()

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.3, 0.6]))
    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        self.turn("low")
        self.turn("high")
        links = self.low.link, self.high.link
        while (due := min(link.deadline for link in links)) <= end:
            self.now = max(self.now, due)
            for link in links:
                link.tick(self.now)
            self.turn("low")
            self.turn("high")
        self.now = end

    # -- what must hold

    @invariant()
    def handled_is_a_beginning_of_what_was_sent(self) -> None:
        for one, other in ((self.low, self.high), (self.high, self.low)):
            for (own, theirs), handled in one.handled.items():
                sent = other.sent.get((theirs, own), [])
                assert sent[: len(handled)] == handled

    @invariant()
    def a_link_is_full_between_its_bounds(self) -> None:
        for link in (self.low.link, self.high.link):
            items, size = link.unacknowledged, link.unacknowledged_bytes
            if link.full:
                assert 2 * items >= OPTIONS.max_items or 2 * size >= OPTIONS.max_bytes
            else:
                assert items < OPTIONS.max_items and size < OPTIONS.max_bytes
        for link, room in self.rooms:
            assert room.done or link.full
        self.rooms = [each for each in self.rooms if not each[1].done]

    @invariant()
    def confirmations_are_done_in_time_and_not_before(self) -> None:
        for each in self.waiting:
            acknowledged = each.link.acknowledged >= each.number
            dead = each.link.status is LinkStatus.DEAD
            over = self.now - each.asked_at >= OPTIONS.patience - 1e-9
            if acknowledged or dead or self.now - each.asked_at > OPTIONS.patience + 1e-9:
                assert each.commit.done
            elif each.commit.done:
                assert over or each.link.impatient, "an earlier one of the same items may have run out of patience"
            assert each.commit.error is None
        self.waiting = [each for each in self.waiting if not each.commit.done]

    @invariant()
    def questions_are_answered_or_fail(self) -> None:
        for each in self.questions:
            if self.now - each.asked_at > each.patience + 1e-9:
                assert each.commit.done
            if each.commit.done:
                if each.commit.error is None:
                    assert b"answer to " + each.text == each.commit.result
                else:
                    assert isinstance(each.commit.error, AskError)

    def heal(self) -> None:
        """A connection that stays up brings everything, whatever the pipes hold at once."""
        if self.to_low is not None:
            self.cut()
        self.notice("low")
        self.notice("high")
        if self.high.link.wire is not None:
            self.high.link.lost("healed")
        self.connect()
        self.greet()
        for _ in range(100_000):
            self.turn("low")
            self.turn("high")
            assert self.to_low is not None and self.to_high is not None
            if not self.to_low.data and not self.to_high.data:
                break
            self.carry("low", 64)
            self.carry("high", 64)
        for one, other in ((self.low, self.high), (self.high, self.low)):
            handled = one.handled.get((one.incarnation, other.incarnation), [])
            assert other.log == handled, "all of it"
            assert 0 == other.link.unacknowledged and not other.link.full
        self.wait(4.0)
        self.confirmations_are_done_in_time_and_not_before()
        self.questions_are_answered_or_fail()
        assert not self.waiting


TestTwoMembers = TwoMembers.TestCase
TestTwoMembers.settings = settings(max_examples=300, stateful_step_count=80)
