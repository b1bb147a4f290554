"""Who gets a message and how: overlapping subscriptions, options of MQTT 5, shared groups and their strategies."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from motorcade.broker.limits import SessionOptions
from motorcade.broker.pubsub import STRATEGIES, PubSub
from motorcade.broker.session import Session
from motorcade.broker.session_context import SessionContext
from motorcade.broker.stats import Stats
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Callback, Hooks
from motorcade.mqtt import codec
from motorcade.mqtt.packets import Publish

NOW = 1_700_000_000.0


class Rig:
    """Pub/sub with sessions whose wires are lists."""

    def __init__(self, **options: Any) -> None:
        self.hooks = Hooks()
        self.shared = SessionContext(SessionOptions(**options), self.hooks, Stats())
        self.pubsub = PubSub(self.shared)

    def session(self, name: str, *filters: str | Subscription, version: int = 5, online: bool = True) -> Session:
        session = Session(self.shared, ClientInfo(name, version=version), NOW)
        if online:
            self.attach(session)
        for wanted in filters:
            self.pubsub.subscribe(session, Subscription(wanted, 2) if isinstance(wanted, str) else wanted)
        return session

    def attach(self, session: Session, limit: int = 32) -> None:
        session.attach(session.client.version, min(limit, self.shared.options.window), 0, 0)
        session.resend(NOW)
        session.pump(NOW)

    def publish(self, topic: str = "t", qos: int = 1, publisher: str = "", payload: bytes = b"p", **more: Any) -> int:
        return self.pubsub.publish(Message(topic, payload, qos, publisher=publisher, **more), NOW)

    @property
    def dropped(self) -> dict[str, int]:
        return {why: count for why, count in self.shared.stats.dropped.items() if count}


def taken(session: Session) -> list[Publish]:
    """What a client has been sent since the last time."""
    packets = codec.Decoder(session.version).feed(b"".join(session.out))
    session.out.clear()
    return [packet for packet in packets if isinstance(packet, Publish)]


# --- ordinary subscriptions ---------------------------------------------------------------------------------------


def test_overlapping_subscriptions_give_one_copy() -> None:
    """With the highest QoS of them, and the identifiers of all. [MQTT-3.3.4-2], [MQTT-3.3.4-3]."""
    rig = Rig()
    several = [Subscription("a/b", 0, identifier=3), Subscription("a/+", 2), Subscription("#", 1, identifier=7)]
    car = rig.session("car", *several)
    assert 1 == rig.publish("a/b", 2)
    (message,) = taken(car)
    assert (2, (3, 7)) == (message.qos, tuple(sorted(message.properties.subscription_ids)))


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans(), st.integers(0, 2)), min_size=1, max_size=4))
def test_overlapping_options(options: list[tuple[int, bool, bool, int]]) -> None:
    """No-local subscriptions count for the messages of others only; all other options are taken together."""
    rig = Rig()
    filters = ("t", "#", "+", "t/#")
    several = [
        Subscription(filter_, qos, no_local, published, identifier=identifier)
        for filter_, (qos, no_local, published, identifier) in zip(filters, options, strict=False)
    ]
    car = rig.session("car", *several)
    for publisher, counting in (("other", several), ("car", [s for s in several if not s.no_local])):
        rig.publish("t", 2, publisher, retain=True)
        got = [(m.qos, m.retain, sorted(m.properties.subscription_ids)) for m in taken(car)]
        expected = (
            max((s.qos for s in counting), default=0),
            any(s.retain_as_published for s in counting),
            sorted(s.identifier for s in counting if s.identifier),
        )
        assert ([expected] if counting else []) == got


def test_a_subscription_is_replaced() -> None:
    """[MQTT-3.8.4-3]: the same filter again takes the place of the old one."""
    rig = Rig()
    car = rig.session("car", Subscription("t", 0, identifier=1), Subscription("t", 1, identifier=2))
    rig.publish("t", 2)
    assert [(1, (2,))] == [(m.qos, m.properties.subscription_ids) for m in taken(car)]
    assert 1 == rig.pubsub.subscriptions
    assert rig.pubsub.unsubscribe(car, "t")
    assert 0 == rig.publish("t", 2)
    assert {"no_subscribers": 1} == rig.dropped


def test_qos_and_retain_flag_of_a_live_message() -> None:
    """The lower QoS of both; the retain flag only for who asked for it as published. [MQTT-3.3.1-12] and -13."""
    for version in (3, 4, 5):
        for granted in (0, 1, 2):
            for qos in (0, 1, 2):
                for published in (False, True):
                    rig = Rig()
                    car = rig.session("car", Subscription("t", granted, retain_as_published=published), version=version)
                    bus = rig.session("bus", Subscription("t", granted), version=version)
                    rig.publish("t", qos, retain=True)
                    assert [(min(qos, granted), published)] == [(m.qos, m.retain) for m in taken(car)]
                    assert [(min(qos, granted), False)] == [(m.qos, m.retain) for m in taken(bus)]


def test_a_message_that_nobody_wants_is_told() -> None:
    rig = Rig()
    told: list[tuple[object, str, str]] = []
    rig.hooks.add("message.dropped", Callback(lambda c, m, why: told.append((c, m.topic, why)), 0, "test"))
    assert 0 == rig.publish("nobody")
    rig.session("away", Subscription("$share/g/t", 1), online=False)
    rig.publish("t", 0)
    assert [(None, "nobody", "no_subscribers"), (None, "t", "no_subscribers")] == told
    assert {"no_subscribers": 2} == rig.dropped


# --- shared subscriptions -----------------------------------------------------------------------------------------


def members(rig: Rig, count: int = 3, **more: Any) -> list[Session]:
    return [rig.session(f"m{number}", Subscription("$share/g/t/#", 1), **more) for number in range(count)]


def who(sessions: list[Session]) -> list[int]:
    """Numbers of those who got something, once for each message."""
    return [number for number, session in enumerate(sessions) for _ in taken(session)]


def test_each_message_goes_to_one_member_of_each_group() -> None:
    for strategy in STRATEGIES:
        rig = Rig(shared_strategy=strategy)
        group = members(rig)
        other = rig.session("other", Subscription("$share/h/t/#", 1))
        plain = rig.session("plain", "#")
        for number in range(30):
            rig.publish(f"t/{number}", publisher=f"p{number}")
            assert [1, 1, 1] == [len(who(sessions)) for sessions in (group, [other], [plain])]
            for session in (*group, other, plain):
                session.inflight.clear()


def test_round_robin() -> None:
    rig = Rig(shared_strategy="round_robin")
    group = members(rig)
    turns = []
    for _ in range(9):
        rig.publish("t/x")
        turns += who(group)
    assert turns[:3] * 3 == turns
    assert {0, 1, 2} == set(turns[:3])


def test_sticky() -> None:
    rig = Rig(shared_strategy="sticky", window=4)
    group = members(rig)
    for _ in range(3):
        rig.publish("t/x")
    (first, *others) = who(group)
    assert [first, first] == others
    for _ in range(20):
        rig.publish("t/x")  # its window is full now
    assert set(who(group)) == {first}
    group[first].detach()
    for _ in range(3):
        rig.publish("t/x")
    (second, *others) = who(group)
    assert first != second and [second, second] == others


def test_hashes_keep_to_their_member_while_the_members_stay() -> None:
    """Also while a window is full: that order is what they are chosen for."""
    for strategy, by_topic in (("hash_topic", True), ("hash_client", False)):
        rig = Rig(shared_strategy=strategy, window=2)
        group = members(rig)
        homes: dict[int, int] = {}
        for turn in range(4):
            for key in range(20):
                before = [(len(s.inflight), len(s.queue or ())) for s in group]
                rig.publish(f"t/{key if by_topic else turn}", publisher=f"p{turn if by_topic else key}")
                after = [(len(s.inflight), len(s.queue or ())) for s in group]
                (home,) = (number for number in range(3) if before[number] != after[number])
                assert home == homes.setdefault(key, home)
        assert len(set(homes.values())) > 1


def test_least_inflight() -> None:
    rig = Rig(shared_strategy="least_inflight")
    group = members(rig)
    for number, busy in enumerate((2, 0, 1)):
        for _ in range(busy):
            rig.pubsub.subscribe(group[number], Subscription(f"own/{number}", 1))
            rig.publish(f"own/{number}")
    who(group)
    rig.publish("t/x")
    assert [1] == who(group)
    rig.publish("t/x")
    rig.publish("t/x")
    assert [2, 2, 2] == [len(session.inflight) for session in group]


def test_least_inflight_takes_turns_among_equals() -> None:
    """Members that acknowledge at once are all equal; one that is busy does not change whose turn it is."""
    rig = Rig(shared_strategy="least_inflight")
    group = members(rig)
    rig.pubsub.subscribe(group[0], Subscription("own", 1))
    for busy in (False, True):
        if busy:
            rig.publish("own")
            who(group)
        chosen: list[int] = []
        for _ in range(12):
            rig.publish("t/x")
            (number,) = who(group)
            chosen.append(number)
            group[number].acknowledged(max(group[number].inflight))
        assert ([6, 6] if busy else [4, 4, 4]) == [chosen.count(number) for number in ((1, 2) if busy else (0, 1, 2))]


def test_members_with_room_go_first() -> None:
    for strategy in ("round_robin", "random", "least_inflight"):
        rig = Rig(shared_strategy=strategy, window=1)
        group = members(rig)
        for _ in range(3):
            rig.publish("t/x")
        assert [1, 1, 1] == [len(session.inflight) for session in group]
        del group[1].inflight[1]
        who(group)
        rig.publish("t/x")
        assert [1] == who(group)


def test_members_that_are_away_are_the_last_choice() -> None:
    """QoS 1 waits for one of them when nobody is there; QoS 0 does not."""
    rig = Rig(shared_strategy="round_robin")
    away = members(rig, online=False)
    rig.publish("t/x", 0)
    assert {"no_subscribers": 1} == rig.dropped
    rig.publish("t/x", 1)
    assert 1 == sum(len(session.queue or ()) for session in away)
    here = rig.session("here", Subscription("$share/g/t/#", 1))
    for _ in range(5):
        rig.publish("t/x", 1)
    assert 5 == len(taken(here))


# --- a member's session ends --------------------------------------------------------------------------------------


def end(rig: Rig, session: Session) -> None:
    """What the registry does."""
    rig.pubsub.hand_on(session, NOW)
    rig.pubsub.unsubscribe_all(session)


def test_unacknowledged_qos_1_messages_go_to_another_member() -> None:
    """[MQTT-4.8.2-5]: QoS 1 in flight and waiting; what was for the session alone is told as lost."""
    rig = Rig(shared_strategy="round_robin", window=1)
    lost: list[bytes] = []
    rig.hooks.add("message.dropped", Callback(lambda _c, m, _why: lost.append(m.payload), 0, "test"))
    first = rig.session("first", Subscription("$share/g/t", 1, identifier=4), Subscription("own", 1))
    rig.publish("t", payload=b"sent")
    rig.publish("t", payload=b"waits")
    rig.publish("own", payload=b"own")
    second = rig.session("second", Subscription("$share/g/t", 1))
    end(rig, first)
    assert [(b"sent", ())] == [(m.payload, m.properties.subscription_ids) for m in taken(second)]
    second.inflight.clear()
    second.pump(NOW)
    assert [(b"waits", ())] == [(m.payload, m.properties.subscription_ids) for m in taken(second)]
    assert [b"own"] == lost
    assert {"session_ended": 1} == rig.dropped


def test_a_qos_2_message_under_way_goes_to_nobody_else() -> None:
    """[MQTT-4.8.2-4]: somebody may have it already."""
    rig = Rig(shared_strategy="round_robin")
    first = rig.session("first", Subscription("$share/g/t", 2))
    rig.publish("t", 2)
    second = rig.session("second", Subscription("$share/g/t", 2))
    end(rig, first)
    assert [] == taken(second)
    assert {"session_ended": 1} == rig.dropped


def test_handed_on_messages_do_not_take_the_identifier_along() -> None:
    """Not even when they wait and are encoded anew because they can expire."""
    rig = Rig(shared_strategy="round_robin")
    first = rig.session("first", Subscription("$share/g/t", 1, identifier=4))
    rig.publish("t", expires_at=NOW + 100)
    second = rig.session("second", Subscription("$share/g/t", 1), online=False)
    first.detach()
    end(rig, first)
    rig.attach(second)
    (message,) = taken(second)
    assert ((), 100) == (message.properties.subscription_ids, message.properties.message_expiry)


def test_with_nobody_left_a_shared_message_is_told_as_dropped() -> None:
    rig = Rig()
    only = rig.session("only", Subscription("$share/g/t", 1))
    rig.publish("t")
    end(rig, only)
    assert 1 == sum(rig.dropped.values())
    assert (0, 0) == (rig.pubsub.shared_subscriptions, rig.publish("t"))
