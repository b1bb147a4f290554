"""Is every limit kept, told to the client as docs/limits.md says, and counted under its name?

One node in memory per limit and version, with the limit set low. What only sockets show is in
`tests/scenarios/test_limits.py`. The last test holds three lists together: the node's options and counters,
docs/limits.md, and the counters that tests look at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.stats import LIMIT_NAMES
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.mqtt import codec
from motorcade.mqtt.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from motorcade.mqtt.properties import NONE, Properties
from tests.support.node import ROOT
from tests.support.virtual import MemoryNode, Peer, standing

VERSIONS = (4, 5)
OK = ReasonCode.SUCCESS
QUOTA = ReasonCode.QUOTA_EXCEEDED
#: Return codes of CONNACK in MQTT 3.x, as the codec shows them.
IN_V3 = {
    0: OK,
    2: ReasonCode.CLIENT_IDENTIFIER_NOT_VALID,
    3: ReasonCode.SERVER_UNAVAILABLE,
    5: ReasonCode.NOT_AUTHORIZED,
}


class Limited:
    """A node with low limits, and clients of one version."""

    def __init__(self, version: int, limits: Limits, session: SessionOptions) -> None:
        self.version = version
        self.node = MemoryNode(session, limits)
        self._names = 0

    def connect(self, client_id: str = "", *, host: str = "127.0.0.1", **more: Any) -> tuple[Peer, list[Packet]]:
        """A client that asks to be let in, and the answer."""
        self._names += 1
        if self.version != 5:
            more["properties"] = NONE
        peer = self.node.peer(self.version, host)
        peer.send(Connect(client_id or f"c{self._names}", self.version, **{"clean_start": True, **more}))
        self.node.turn()
        return peer, peer.take()

    def client(self, client_id: str = "", **more: Any) -> Peer:
        """A client that was let in."""
        peer, (connack, *_) = self.connect(client_id, **more)
        assert isinstance(connack, Connack) and connack.reason is OK, connack
        return peer

    def refuses(self, code_v3: int, code_v5: ReasonCode, client_id: str = "", **more: Any) -> None:
        """A CONNECT is answered with a CONNACK of this code, and the connection closed."""
        peer, answers = self.connect(client_id, **more)
        assert [code_v5 if self.version == 5 else IN_V3[code_v3]] == [
            a.reason for a in answers if isinstance(a, Connack)
        ]
        assert not peer.open and 1 == len(answers)

    def ends(self, peer: Peer, reason: ReasonCode) -> None:
        """The connection is closed, in MQTT 5 with this reason."""
        self.node.turn()
        answers = peer.take()
        told = [answer.reason for answer in answers if isinstance(answer, Disconnect)]
        assert not peer.open and told == [reason] * (self.version == 5) and len(told) == len(answers), answers

    def say(self, peer: Peer, *packets: bytes | Packet) -> list[Packet]:
        """The client sends; what comes back, on a connection that is still there."""
        peer.send(*packets)
        self.node.turn()
        assert peer.open
        return peer.take()

    def later(self, seconds: float) -> None:
        self.node.clock.now += seconds
        self.node.broker._tick()
        self.node.turn()

    def counted(self, **expected: int) -> None:
        """These limits have been hit so often, and no others."""
        assert expected == {name: count for name, count in self.node.state.stats.refused.items() if count}

    def properties(self, client_id: str = "", **connect: Any) -> Properties:
        """What CONNACK announces."""
        _, (connack, *_) = self.connect(client_id, **connect)
        assert isinstance(connack, Connack)
        return connack.properties


@contextmanager
def limited(version: int = 5, session: SessionOptions | None = None, **limits: Any) -> Iterator[Limited]:
    rig = Limited(version, Limits(**{"flapping_count": 0, **limits}), session or SessionOptions())
    with standing(rig.node.clock):
        yield rig


# --- sizes --------------------------------------------------------------------------------------------------------


def publish_of(size: int, version: int) -> bytes:
    """A PUBLISH of exactly so many bytes."""
    payload = size
    while len(raw := codec.encode(Publish("size", b"." * payload), version)) > size:
        payload -= 1
    assert size == len(raw)
    return raw


def test_a_packet_of_exactly_the_largest_size_passes_and_one_byte_more_does_not() -> None:
    for version, size in [(version, size) for version in VERSIONS for size in (100, 1000, 70_000)]:
        with limited(version, max_packet_size=size) as rig:
            assert (size if version == 5 else None) == rig.properties("asks").maximum_packet_size
            client, reader = rig.client(), rig.client("reader")
            rig.node.subscribe(reader, ("size", 0))
            for _ in range(2):  # the first message of a topic takes another way than the next
                rig.say(client, publish_of(size, version))
                assert 1 == len(reader.take())
            client.send(publish_of(size + 1, version))
            rig.ends(client, ReasonCode.PACKET_TOO_LARGE)
            rig.counted(max_packet_size=1)


def test_a_connect_that_is_too_large_is_closed_as_soon_as_its_length_is_known() -> None:
    """In every version without an answer; once inside, packets may be larger."""
    for version in VERSIONS:
        with limited(version, max_connect_size=200) as rig:
            client = rig.client("l" * 150)
            assert rig.say(client, Publish("large", b"." * 1000, 1, packet_id=1))
            offender = rig.node.peer(version)
            offender.send(codec.encode(Connect("l" * 150, version, username="u" * 100), version)[:80])
            rig.node.turn()
            assert not offender.open and not offender.take()
            rig.counted(max_connect_size=1)


# --- connecting ---------------------------------------------------------------------------------------------------


def test_connections_are_bounded() -> None:
    """One too many hears 0x97 (3.x: 3); when somebody leaves there is room again."""
    for version in VERSIONS:
        with limited(version, max_connections=2) as rig:
            rig.client()
            second = rig.client()
            rig.refuses(3, QUOTA)
            rig.counted(max_connections=1)
            second.close()
            rig.node.turn()
            rig.client()


def test_sessions_are_bounded() -> None:
    """A client without a session hears 0x97 (3.x: 3) when there are enough; one that has a session is let in."""
    stay: dict[str, Any] = {"clean_start": False, "properties": Properties(session_expiry=60)}
    for version in VERSIONS:
        with limited(version, max_sessions=2) as rig:
            for name in ("one", "two"):
                rig.client(name, **stay).send(Disconnect())
                rig.node.turn()
            rig.refuses(3, QUOTA)
            rig.counted(max_sessions=1)
            _, (connack, *_) = rig.connect("one", **stay)
            assert isinstance(connack, Connack) and connack.session_present
            rig.client("two").send(Disconnect())  # a clean start that ends with its connection
            rig.node.turn()
            rig.client("three")


def test_the_rate_of_connects_is_bounded() -> None:
    """CONNECTs above the burst hear 0x9F (3.x: 3)."""
    for version in VERSIONS:
        with limited(version, connect_rate=0.1, connect_burst=2) as rig:
            clients = [rig.client() for _ in range(2)]
            for _ in range(3):
                rig.refuses(3, ReasonCode.CONNECTION_RATE_EXCEEDED)
            rig.counted(connect_rate=3)
            assert all(client.open for client in clients)
            rig.later(10)
            rig.client()


def test_addresses_that_are_not_wanted_are_closed_without_an_answer() -> None:
    for rules in ({"deny": ("127.1.0.0/16",)}, {"allow": ("127.0.0.0/16", "::1/128")}):
        with limited(**rules) as rig:
            stranger = rig.node.peer(host="127.1.2.3")
            rig.node.turn()
            assert not stranger.open and not stranger.take()
            rig.counted(network=1)
            rig.client(host="127.0.0.7")


def test_client_ids_are_bounded_in_bytes_not_characters() -> None:
    """Longer ones hear 0x85 (3.x: 2)."""
    for version in VERSIONS:
        with limited(version, max_client_id=20) as rig:
            rig.client("ü" * 10)
            rig.refuses(2, ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, "ü" * 10 + "x")
            rig.counted(max_client_id=1)


def test_a_client_id_that_connects_too_often_is_banned_for_a_while() -> None:
    """0x8A (3.x: 5); others are not, unless addresses are counted too."""
    for version in VERSIONS:
        with limited(version, flapping_count=5, flapping_window=60.0, flapping_ban=30.0) as rig:
            for _ in range(5):
                rig.client("restless")
            rig.refuses(5, ReasonCode.BANNED, "restless")
            rig.counted(flapping=1)
            rig.client("calm")
            rig.later(31)
            rig.client("restless")
        with limited(version, flapping_count=5, flapping_ban=60.0, flapping_by_address=True) as rig:
            for _ in range(5):
                rig.client(host="127.0.0.7")
            rig.refuses(5, ReasonCode.BANNED, host="127.0.0.7")
            rig.counted(flapping=1)
            rig.client(host="127.0.0.8")


# --- what one packet may contain ----------------------------------------------------------------------------------


def test_levels_of_topics_are_bounded() -> None:
    """A topic of more levels ends the connection (0x90), a filter is refused (0x8F, 3.x: 0x80), so is a will (0x90)."""
    for version in VERSIONS:
        with limited(version, max_topic_levels=3) as rig:
            client = rig.client()
            answers = rig.say(client, Subscribe(1, (Subscription("a/+/#"),)), Subscribe(2, (Subscription("a/+/c/#"),)))
            refused = ReasonCode.TOPIC_FILTER_INVALID if version == 5 else 0x80
            assert [(0,), (refused,)] == [answer.reasons for answer in answers if isinstance(answer, Suback)]
            rig.counted(max_topic_levels=1)
            assert [b"fits"] == [
                p.payload for p in rig.say(client, Publish("a/b/c", b"fits")) if isinstance(p, Publish)
            ]
            client.send(Publish("a/b/c/d", b""))
            rig.ends(client, ReasonCode.TOPIC_NAME_INVALID)
            peer, answers = rig.connect(will=Will("a/b/c/d", b""))
            told = [answer.reason for answer in answers if isinstance(answer, Connack)]
            assert not peer.open and told == [ReasonCode.TOPIC_NAME_INVALID] * (version == 5)
            rig.counted(max_topic_levels=3)


def test_topic_aliases_are_announced_and_bounded() -> None:
    """One above what CONNACK has told ends the connection with 0x94; nothing told means none."""
    for most in (2, 0):
        with limited(max_topic_alias=most) as rig:
            assert (rig.properties("asks").topic_alias_maximum or 0) == most
            client, reader = rig.client(), rig.client()
            rig.node.subscribe(reader, ("t", 0))
            for topic in ("t", "") if most else ():
                rig.say(client, Publish(topic, b"x", properties=Properties(topic_alias=most)))
                assert [b"x"] == [p.payload for p in reader.take() if isinstance(p, Publish)]
            client.send(Publish("t", b"", properties=Properties(topic_alias=most + 1)))
            rig.ends(client, ReasonCode.TOPIC_ALIAS_INVALID)
            rig.counted(max_topic_alias=1)


def test_aliases_towards_a_client_are_bounded() -> None:
    """However many it takes; other topics come in full."""
    with limited(max_topic_alias_out=2) as rig:
        client = rig.client(properties=Properties(topic_alias_maximum=10))
        rig.node.subscribe(client, ("t/#", 0))
        found = rig.say(client, *(Publish(f"t/{number}", b"x") for number in (1, 2, 3, 1, 2, 3)))
        sent = [(p.topic, p.properties.topic_alias) for p in found if isinstance(p, Publish)]
        assert [("t/1", 1), ("t/2", 2), ("t/3", None), ("", 1), ("", 2), ("t/3", None)] == sent


def test_user_properties_are_bounded() -> None:
    """One more ends the connection with 0x97, in CONNECT too."""
    with limited(max_user_properties=2) as rig:
        pairs = (("k", "v"),) * 3
        client = rig.client(properties=Properties(user_properties=pairs[:2]))
        rig.say(client, Publish("t", b"", properties=Properties(user_properties=pairs[:2])))
        client.send(Publish("t", b"", properties=Properties(user_properties=pairs)))
        rig.ends(client, QUOTA)
        rig.refuses(0, QUOTA, properties=Properties(user_properties=pairs))
        rig.counted(max_user_properties=2)


def test_filters_of_one_packet_are_bounded() -> None:
    """SUBSCRIBE is refused as a whole (0x97 each, 3.x: 0x80), UNSUBSCRIBE too (0x83 each; 3.x is closed)."""
    for version in VERSIONS:
        with limited(version, max_filters=2) as rig:
            client = rig.client()
            some = tuple(Subscription(name) for name in "abcde")
            answers = rig.say(client, Subscribe(1, some[:2]), Subscribe(2, some[2:]))
            refused = (QUOTA if version == 5 else 0x80,) * 3
            assert [(0, 0), refused] == [answer.reasons for answer in answers if isinstance(answer, Suback)]
            rig.counted(max_filters=1)
            client.send(Unsubscribe(9, ("a", "b", "c")))
            if version == 5:
                rig.node.turn()
                assert [Unsuback(9, (ReasonCode(0x83),) * 3)] == [
                    Unsuback(a.packet_id, a.reasons) for a in client.take() if isinstance(a, Unsuback)
                ]
                assert 1 == len(rig.say(client, Publish("a", b""), Publish("c", b""))), "as before"
            else:
                rig.ends(client, OK)
            rig.counted(max_filters=2)


# --- what one session may hold ------------------------------------------------------------------------------------


def test_subscriptions_of_a_session_are_bounded() -> None:
    """By number and by bytes: refused (0x97, 3.x: 0x80); renewing one that exists is not, and leaving makes room."""
    a, b, c = "a" * 10, "b" * 10, "c"
    bounds: tuple[dict[str, Any], ...] = ({"max_subscriptions": 2}, {"max_filter_bytes": 20})
    for options in bounds:
        for version in VERSIONS:
            with limited(version, SessionOptions(**options)) as rig:
                client = rig.client()
                (first,) = rig.say(client, Subscribe(1, (Subscription(a), Subscription(b), Subscription(c))))
                assert isinstance(first, Suback) and (0, 0, QUOTA if version == 5 else 0x80) == first.reasons
                rig.counted(**dict.fromkeys(options, 1))
                answers = rig.say(client, Subscribe(2, (Subscription(a, 1),)), Unsubscribe(3, (b,)))
                answers += rig.say(client, Subscribe(4, (Subscription(c),)))
                assert [(1,), (0,)] == [answer.reasons for answer in answers if isinstance(answer, Suback)]


def test_unreleased_messages_are_announced_and_bounded() -> None:
    """As receive maximum; one QoS 2 message too many ends the connection with 0x93."""
    for version in VERSIONS:
        with limited(version, SessionOptions(max_awaiting_rel=2)) as rig:
            assert (2 if version == 5 else None) == rig.properties("asks").receive_maximum
            client = rig.client()
            answers = rig.say(client, *(Publish("t", b"", 2, packet_id=number) for number in (1, 2)))
            assert [1, 2] == [answer.packet_id for answer in answers if isinstance(answer, Pubrec)]
            client.send(Publish("t", b"", 2, packet_id=3))
            rig.ends(client, ReasonCode.RECEIVE_MAXIMUM_EXCEEDED)
            rig.counted(max_awaiting_rel=1)


def test_an_identifier_that_is_not_released_in_time_is_forgotten() -> None:
    """Its PUBREL is for nothing, and it is free again."""
    for version in VERSIONS:
        with limited(version, SessionOptions(await_rel_timeout=5.0)) as rig:
            client, reader = rig.client(), rig.client()
            rig.node.subscribe(reader, ("t", 0))
            rig.say(client, Publish("t", b"1", 2, packet_id=7))
            rig.later(6)
            rig.counted(await_rel_timeout=1)
            (answer,) = rig.say(client, Pubrel(7))
            assert isinstance(answer, Pubcomp)
            assert (ReasonCode.PACKET_IDENTIFIER_NOT_FOUND if version == 5 else OK) is answer.reason
            rig.say(client, Publish("t", b"2", 2, packet_id=7))
            assert [b"1", b"2"] == [p.payload for p in reader.take() if isinstance(p, Publish)]


def test_a_publisher_waits_a_moment_for_the_only_receiver_of_its_messages() -> None:
    """Then, or at once without patience, the queue drops its oldest; nobody is told but the counter."""
    for patience in (5.0, 0.0):
        with limited(session=SessionOptions(window=2, queue=10, patience=patience)) as rig:
            stuck, publisher = rig.client(), rig.client()
            rig.node.subscribe(stuck, ("t", 1))
            publisher.send(*(Publish("t", b"%d" % n, 1, packet_id=n + 1) for n in range(30)))
            rig.node.turn()
            answers = publisher.take()
            if patience:
                assert len(answers) < 30 and not publisher.wire.reading
                rig.later(patience + 1)
                rig.node.turn()
                answers += publisher.take()
            assert list(range(1, 31)) == [answer.packet_id for answer in answers if isinstance(answer, Puback)]
            rig.counted(**{"patience": 1} if patience else {})
            assert 30 - 2 - 10 == rig.node.state.stats.dropped["queue_full"]


def test_a_publisher_that_waits_is_not_taken_for_dead() -> None:
    """While it waits nothing is read from it, so its keep alive does not count."""
    with limited(session=SessionOptions(window=2, queue=10, patience=1000.0)) as rig:
        slow, publisher = rig.client(), rig.client(keep_alive=1)
        rig.node.subscribe(slow, ("t", 1))
        publisher.send(*(Publish("t", b"%d" % n, 1, packet_id=n + 1) for n in range(100)))
        rig.node.turn()
        got: list[bytes] = []
        while len(got) < 100:
            rig.later(0.5)
            for packet in slow.take():
                assert isinstance(packet, Publish)
                got.append(packet.payload)
                slow.send(Puback(packet.packet_id))
        assert [b"%d" % n for n in range(100)] == got
        assert 100 == len(publisher.take()) and publisher.open


def test_nobody_waits_for_a_slow_receiver_beside_another() -> None:
    with limited(session=SessionOptions(window=2, queue=10, patience=1000.0)) as rig:
        slow, quick, publisher = rig.client(), rig.client(), rig.client()
        for peer in (slow, quick):
            rig.node.subscribe(peer, ("t", 1))
        for n in range(100):
            assert 1 == len(rig.say(publisher, Publish("t", b"%d" % n, 1, packet_id=n + 1)))
            (packet,) = quick.take()
            assert isinstance(packet, Publish) and b"%d" % n == packet.payload
            rig.say(quick, Puback(packet.packet_id))
        assert 100 - 2 - 10 == rig.node.state.stats.dropped["queue_full"]


def test_a_session_expiry_above_the_maximum_is_lowered_and_told() -> None:
    with limited(session=SessionOptions(expiry_max=100)) as rig:
        for wanted, told in ((50, None), (100, None), (101, 100), (0xFFFFFFFF, 100)):
            assert told == rig.properties(properties=Properties(session_expiry=wanted)).session_expiry


# --- silent clients -----------------------------------------------------------------------------------------------


def test_a_client_that_is_silent_for_longer_than_its_keep_alive_is_closed() -> None:
    """In MQTT 5 with 0x8D; while nothing is read from it because of others it is not silent."""
    for version in VERSIONS:
        with limited(version, keep_alive_factor=1.5) as rig:
            silent, lively = rig.client(keep_alive=10), rig.client(keep_alive=10)
            rig.later(14)
            assert [Pingresp()] == rig.say(lively, Pingreq())
            assert silent.open
            rig.later(2)
            rig.ends(silent, ReasonCode.KEEP_ALIVE_TIMEOUT)
            assert lively.open
            rig.counted(keep_alive=1)


def test_a_longer_keep_alive_or_none_is_lowered() -> None:
    """MQTT 5 clients are told; others do not stay for ever either when they have vanished."""
    with limited(max_keep_alive=20) as rig:
        for wanted, told in ((0, 20), (60, 20), (30, 20), (20, None), (10, None)):
            assert told == rig.properties(keep_alive=wanted).server_keep_alive
    with limited(4, max_keep_alive=20, keep_alive_factor=1.0) as rig:
        silent = rig.client(keep_alive=0)
        rig.later(21)
        rig.ends(silent, OK)
        rig.counted(keep_alive=1)


# --- the lists ----------------------------------------------------------------------------------------------------

#: Counters of limits that other tests look at.
ELSEWHERE = {
    "auth_timeout": "tests/unit/broker/test_patience.py",
    "byte_rate": "tests/unit/broker/test_connection.py",
    "connect_timeout": "tests/unit/broker/test_patience.py",
    "max_memory": "tests/unit/broker/test_patience.py",
    "message_rate": "tests/unit/broker/test_connection.py",
    "source_buffer": "tests/unit/broker/test_source_scheduler.py",
    "stall_timeout": "tests/scenarios/test_bad_input_resources.py",
}


def test_every_limit_is_documented_and_tested() -> None:
    """Every counter of the node, every option of [limits] and [session] stands in docs/limits.md with its default."""
    rows = documented()
    options = {f"limits.{name}": value for name, value in defaults(Limits()).items()}
    options |= {f"session.{name}": value for name, value in defaults(SessionOptions()).items()}
    assert options == {name: default for name, (default, _) in rows.items() if name.startswith(("limits.", "session."))}
    assert set(LIMIT_NAMES) == {name for _, found in rows.values() for name in found}
    here = (ROOT / "tests" / "unit" / "broker" / "test_limits_kept.py").read_text()
    tested = set(re.findall(r"counted\(([a-z_]+)=", here)) | {"patience", "max_subscriptions", "max_filter_bytes"}
    assert set(LIMIT_NAMES) == tested | ELSEWHERE.keys(), "a counter that no test looks at"
    for name, path in ELSEWHERE.items():
        assert f'"{name}"' in (ROOT / path).read_text(), name


def defaults(options: Any) -> dict[str, str]:
    return {name: spoken(getattr(options, name)) for name in options.__struct_fields__}


def spoken(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if value < 1e6 else f"{value:.0f}"
    return "none" if value == () else str(value)


def documented() -> dict[str, tuple[str, set[str]]]:
    """Option -> (default, counters) of the tables in docs/limits.md."""
    rows: dict[str, tuple[str, set[str]]] = {}
    for line in (ROOT / "docs" / "limits.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) >= 4 and (found := re.match(r"`([a-z0-9_.]+)`", cells[0])):
            default = cells[1].replace("`", "").split(" ")[0]
            rows[found[1]] = default, set(re.findall(r'limit="([a-z_0-9]+)"', cells[2]))
    return rows
