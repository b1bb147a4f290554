"""Sessions: opened, taken over, resumed, ended; wills and their delays; timers. All times are arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from motorcade.broker.limits import SessionOptions
from motorcade.broker.pubsub import PubSub
from motorcade.broker.registry import Registry
from motorcade.broker.session import Session
from motorcade.broker.session_context import SessionContext
from motorcade.broker.stats import Stats
from motorcade.commit import Commit
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Callback, Hooks

NOW = 1_700_000_000.0


class Link:
    """The connection of a session."""

    def __init__(self) -> None:
        self.direct: Callable[[bytes], int] | None = None
        self.ended: list[ReasonCode] = []
        self.flushed = 0

    def abort(self, why: str) -> None:
        raise AssertionError(why)

    def write(self, data: bytes) -> None:
        """Nobody reads it."""

    def write_rest(self, data: bytes) -> None:
        """Nor this."""

    def flush(self) -> None:
        self.flushed += 1

    def end(self, reason: ReasonCode, detail: str = "") -> None:
        self.ended.append(reason)

    def write_later(self) -> None:
        """Nothing is written by itself."""

    def pump_later(self) -> None:
        """Nothing waits."""

    def caught_up(self) -> None:
        """Nor does it wait for anybody."""

    def less_crowded(self) -> None: ...

    def acknowledge(self, numbers: list[bytes], commit: Commit[Any]) -> None:
        """Nor has it published anything."""


class Rig:
    def __init__(self) -> None:
        self.hooks = Hooks()
        self.shared = SessionContext(SessionOptions(), self.hooks, Stats())
        self.pubsub = PubSub(self.shared)
        self.registry = Registry(self.shared, self.pubsub)
        self.events: list[str] = []
        self.wills: list[str] = []
        for name in ("takenover", "discarded", "terminated", "disconnected"):
            self.hooks.add(f"session.{name}", Callback(self.observer(name), 0, "test"))

    def observer(self, name: str) -> Any:
        return lambda client, *why: self.events.append(" ".join((name, client.client_id, *why)))

    def connect(
        self, name: str = "car", now: float = NOW, *, clean: bool = False, expiry: int = 100, delay: int | None = None
    ) -> tuple[Session, bool]:
        """As the channel does it; `delay` gives the client a will."""
        session, present, wills = self.registry.open(ClientInfo(name), clean=clean, wall=now)
        self.publish(wills)
        session.expiry = expiry
        session.attach(5, 10, 0, 0)
        session.link = Link()
        self.registry.connect(session)
        session.will = None if delay is None else Message(f"will of {name}", b"")
        session.will_delay = delay or 0
        return session, present

    def disconnect(self, session: Session, now: float = NOW, *, with_will: bool = True) -> None:
        self.publish(self.registry.disconnect(session, now, with_will=with_will))

    def due(self, now: float, budget: int = 1000) -> None:
        self.publish(self.registry.due(now, budget))

    def publish(self, wills: list[Message]) -> None:
        self.wills += [will.topic for will in wills]


def test_a_session_is_resumed_with_what_it_had() -> None:
    rig = Rig()
    session, _ = rig.connect()
    rig.pubsub.subscribe(session, Subscription("t", 1))
    rig.disconnect(session, NOW)
    rig.pubsub.publish(Message("t", b"", 1), NOW + 1)
    again, present = rig.connect(now=NOW + 99.9)
    assert (True, True) == (present, again is session)
    assert (["t"], 1) == (list(again.subscriptions), len(again.queue or ()))
    rig.due(NOW + 1000)
    assert rig.registry.sessions == {"car": session}, "the timer of its absence means nothing any more"
    assert ["disconnected car"] == rig.events


def test_a_session_that_is_not_resumed_is_forgotten() -> None:
    for clean, expiry in ((True, 100), (False, 0), (True, 0)):
        rig = Rig()
        session, _ = rig.connect(expiry=expiry)
        rig.pubsub.subscribe(session, Subscription("t", 1))
        rig.disconnect(session)
        again, present = rig.connect(clean=clean, expiry=expiry)
        assert (False, False) == (present, again is session)
        assert {} == again.subscriptions
        assert 0 == rig.pubsub.subscriptions
        assert [again] == list(rig.registry.sessions.values())
        assert ("discarded car" if expiry else "terminated car disconnected") == rig.events[-1]


def test_a_session_expires_at_its_second() -> None:
    rig = Rig()
    session, _ = rig.connect(expiry=100)
    rig.pubsub.subscribe(session, Subscription("t", 1))
    rig.disconnect(session, NOW + 5)
    rig.due(NOW + 104.9)
    assert "car" in rig.registry.sessions
    rig.due(NOW + 105)
    assert {} == rig.registry.sessions
    assert (0, session.ended) == (rig.pubsub.subscriptions, True)
    assert ["disconnected car", "terminated car expired"] == rig.events
    assert 1 == rig.shared.stats.expired_sessions


def test_a_session_whose_time_is_over_is_not_resumed_though_nobody_looked() -> None:
    """The sweep has a budget and may be late; the client must not notice."""
    rig = Rig()
    session, _ = rig.connect(expiry=100, delay=50)
    rig.disconnect(session, NOW)
    again, present = rig.connect(now=NOW + 100.1)
    assert (False, False) == (present, again is session)
    assert ["will of car"] == rig.wills


# --- take-over ----------------------------------------------------------------------------------------------------


def test_the_old_connection_is_ended() -> None:
    """[MQTT-3.1.4-3]. The session is kept only if it outlives connections and the client wants it."""
    for clean in (False, True):
        for expiry in (0, 100):
            rig = Rig()
            old, _ = rig.connect(expiry=expiry)
            link = old.link
            assert isinstance(link, Link)
            new, present = rig.connect(clean=clean, expiry=expiry)
            assert [ReasonCode.SESSION_TAKEN_OVER] == link.ended
            assert 1 == link.flushed, "what it was still to hear is not lost with it"
            resumed = not clean and expiry > 0
            assert (resumed, resumed) == (present, new is old)
            assert (1, 1) == (rig.registry.connected, len(rig.registry.sessions))
            assert ["disconnected car", "takenover car", *([] if resumed else ["discarded car"])] == rig.events


# --- wills --------------------------------------------------------------------------------------------------------


def test_removing_a_session_publishes_its_will() -> None:
    rig = Rig()
    session, _ = rig.connect(delay=50)
    rig.disconnect(session, NOW)
    rig.publish(rig.registry.end("car", NOW + 1))
    assert (["will of car"], {}) == (rig.wills, rig.registry.sessions)
    assert [] == rig.registry.end("car", NOW + 1)


# --- timers -------------------------------------------------------------------------------------------------------


def test_a_sweep_keeps_to_its_budget_and_goes_on_where_it_stopped() -> None:
    rig = Rig()
    for number in range(25):
        session, _ = rig.connect(f"c{number}", expiry=10, delay=5)
        rig.disconnect(session, NOW)
    left, published = [], []
    for _ in range(4):
        rig.due(NOW + 100, budget=10)
        left.append(len(rig.registry.sessions))
        published.append(len(rig.wills))
    assert [15, 5, 0, 0] == left
    assert [10, 20, 25, 25] == published


def test_timers_are_bounded_while_clients_come_and_go() -> None:
    """Ten clients five thousand times, with ever shorter delays: the worst case for a heap that never forgets."""
    rig = Rig()
    for turn in range(5_000):
        session, _ = rig.connect(f"c{turn % 10}", NOW, expiry=100_000 - turn, delay=50_000 - turn)
        rig.disconnect(session, NOW)
    assert len(rig.registry._timers) <= 2 * 10 + 1001
    for turn in range(5_000):
        session, _ = rig.connect(f"new {turn}", NOW, expiry=1000)
        rig.disconnect(session, NOW)
        rig.publish(rig.registry.end(f"new {turn}", NOW))
    assert len(rig.registry._timers) <= 2 * 10 + 1001


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("connect", "clean", "break", "goodbye", "wait")),
            st.integers(0, 2),
            st.sampled_from((0, 10, 30)),
            st.sampled_from((None, 0, 5, 40)),
        ),
        max_size=40,
    )
)
@settings(max_examples=150, deadline=None)
def test_any_order_of_comings_and_goings(work: list[tuple[str, int, int, int | None]]) -> None:
    """Against a plain table of what each client has and when it ends."""
    rig = Rig()
    now = NOW
    sessions: dict[str, Session] = {}
    online: set[str] = set()
    ends: dict[str, float] = {}
    pending: dict[str, float] = {}
    expected: list[str] = []
    wills: dict[str, tuple[int | None, int]] = {}  # of those who are online: delay, expiry

    def gone(name: str, *, goodbye: bool, resumed: bool = False) -> None:
        delay, expiry = wills.pop(name)
        online.discard(name)
        if delay is not None and not goodbye:
            if min(delay, expiry) == 0:
                expected.append(f"will of {name}")
            elif not resumed:
                pending[name] = now + min(delay, expiry)
        if expiry:
            ends[name] = now + expiry
        else:
            sessions.pop(name)

    def sweep() -> None:
        for name in [name for name, at in pending.items() if at <= now]:
            del pending[name]
            expected.append(f"will of {name}")
        for name in [name for name, at in ends.items() if at <= now]:
            del ends[name]
            sessions.pop(name)

    for what, number, expiry, delay in work:
        name = f"c{number}"
        if what == "wait":
            now += 7
            rig.due(now)
            sweep()
        elif what in ("connect", "clean"):
            clean = what == "clean"
            resumes = not clean and name in sessions and (name in ends or wills[name][1] > 0)
            if name in online:
                gone(name, goodbye=False, resumed=resumes)
            ends.pop(name, None)
            if pending.pop(name, None) is not None and not resumes:
                expected.append(f"will of {name}")
            session, present = rig.connect(name, now, clean=clean, expiry=expiry, delay=delay)
            assert resumes is present
            assert (sessions.get(name) is session) is resumes
            sessions[name] = session
            online.add(name)
            wills[name] = (delay, expiry)
        elif name in online:
            rig.disconnect(sessions[name], now, with_will=what == "break")
            gone(name, goodbye=what == "goodbye")
        assert sessions == rig.registry.sessions
        assert len(online) == rig.registry.connected
        assert sorted(expected) == sorted(rig.wills)
