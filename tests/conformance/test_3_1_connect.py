"""Section 3.1: CONNECT, its flags, its payload and what the broker makes of them (wills, sessions: own files)."""

from __future__ import annotations

from collections.abc import Callable

from tests.support import wire
from tests.support.cases import both_versions, each, every_qos
from tests.support.clauses import clause
from tests.support.refusals import refused
from tests.support.virtual_wire import VirtualBroker

Open = Callable[..., wire.Client]


# --- connect flags and payload ------------------------------------------------------------------------------------


def test_a_password_may_stand_alone_in_5(connect: wire.Connect, name: str) -> None:
    """MQTT 5 allows a password without a user name."""
    connect(name, password=b"secret").expect_nothing()


@clause(v3=("MQTT-3.1.3-1", "MQTT-3.1.2-9"), v5=("MQTT-3.1.3-1", "MQTT-3.1.2-9"))
@both_versions
def test_all_fields_of_the_payload_are_read_in_order(connect: wire.Connect, name: str, version: int) -> None:
    """Client identifier, will, user name and password together are understood [MQTT-3.1.3-1]."""
    observer = connect(version=version)
    observer.subscribe(f"{name}/will", 1)
    client = connect(
        name,
        version=version,
        username="user",
        password=b"\x00\xff secret",
        will=wire.Will(f"{name}/will", b"gone", qos=1),
    )
    client.close()
    assert b"gone" == observer.receive().payload


# --- client identifier --------------------------------------------------------------------------------------------


@clause(v3=("MQTT-3.1.3-5", "MQTT-3.1.4-4"), v5=("MQTT-3.1.3-5", "MQTT-3.1.4-5"))
@both_versions
@each(client_id=("a", "Z", "0", "0123456789abcdefghijklm", "nopqrstuvwxyzABCDEFGHIJ", "KLMNOPQRSTUVWXYZ"))
def test_plain_client_identifiers_are_accepted(open_client: Open, version: int, client_id: str) -> None:
    """One to 23 letters and digits are always a valid identifier [MQTT-3.1.3-5]."""
    answer = open_client(version).connect(client_id)
    assert (0, False) == (answer.reason, answer.session_present)


@clause(v3="MQTT-3.1.3-6")
def test_an_empty_identifier_gets_a_session_of_its_own(open_client: Open, name: str) -> None:
    """Several clients without an identifier do not disturb each other [MQTT-3.1.3-6]."""
    clients = [open_client(4) for _ in range(3)]
    for client in clients:
        assert 0 == client.connect("").reason
        client.subscribe(name)
    clients[0].publish(name, b"x")
    assert [b"x"] * 3 == [client.expect(wire.PUBLISH).payload for client in clients]


@clause(v5=("MQTT-3.1.3-6", "MQTT-3.1.3-7", "MQTT-3.2.2-16"))
def test_an_assigned_identifier_is_told_and_unique(open_client: Open, name: str) -> None:
    """An empty identifier is answered with one that nobody has [MQTT-3.2.2-16]."""
    clients = [open_client() for _ in range(5)]
    assigned = [client.connect("").prop(0x12) for client in clients]
    assert all(assigned)
    assert 5 == len(set(assigned))
    for client in clients:
        client.expect_nothing()


@clause(v5=("MQTT-3.1.3-7", "MQTT-3.1.3-2"))
def test_an_assigned_identifier_names_the_session(open_client: Open, connect: wire.Connect, name: str) -> None:
    """A client may come back under the identifier that it was given and finds its session [MQTT-3.1.3-7]."""
    first = open_client()
    client_id = first.connect("", clean=False, properties=wire.prop(0x11, 300)).prop(0x12)
    first.subscribe(name, 1)
    first.disconnect()
    second = open_client()
    answer = second.connect(client_id, clean=False, properties=wire.prop(0x11, 300))
    assert answer.session_present
    assert answer.prop(0x12) is None
    connect().publish(name, b"x", 1)
    assert b"x" == second.receive().payload


@clause(v3="MQTT-3.1.3-2", v5="MQTT-3.1.3-2")
@both_versions
def test_sessions_of_different_identifiers_are_apart(connect: wire.Connect, name: str, version: int) -> None:
    """State belongs to one identifier, compared letter by letter [MQTT-3.1.3-2]."""
    kept = wire.prop(0x11, 300) if version == 5 else b""
    connect(f"{name}a", version=version, clean=False, properties=kept).disconnect()
    other = connect(f"{name}A", version=version, clean=False, properties=kept)
    assert other.connack is not None and not other.connack.session_present
    same = connect(f"{name}a", version=version, clean=False, properties=kept)
    assert same.connack is not None and same.connack.session_present


# --- response -----------------------------------------------------------------------------------------------------


@clause(v3=("MQTT-3.1.4-4", "MQTT-3.2.0-1"), v5=("MQTT-3.1.4-5", "MQTT-3.2.0-1", "MQTT-3.2.0-2"))
@both_versions
def test_packets_right_behind_connect_are_served_after_connack(open_client: Open, name: str, version: int) -> None:
    """A client need not wait for CONNACK; the answers come behind it, and there is one CONNACK only [MQTT-3.2.0-1]."""
    client = open_client(version)
    client.send(
        wire.connect_packet(name, version=version)
        + wire.subscribe_packet(1, [(name, 0)], version=version)
        + wire.publish_packet(name, b"x", version=version)
        + wire.PINGREQ
    )
    kinds = [client.recv().type for _ in range(4)]
    assert wire.CONNACK == kinds[0]
    assert {9, wire.PUBLISH, wire.PINGRESP} == set(kinds[1:])
    client.expect_nothing()


@clause(v3="MQTT-3.1.4-5", v5=("MQTT-3.1.4-6", "MQTT-3.1.4-2"))
@both_versions
def test_nothing_behind_a_rejected_connect_is_processed(
    open_client: Open, connect: wire.Connect, name: str, version: int
) -> None:
    """What a rejected client has sent already has no effect [MQTT-3.1.4-6]."""
    observer = connect(version=version)
    observer.subscribe(f"{name}/#")
    client = open_client(version)
    # MQTT 3.1.1 rejects the empty identifier, MQTT 5 the authentication method that nobody knows.
    rejected = (
        wire.connect_packet("", version=4, clean=False)
        if version == 4
        else wire.connect_packet(name, properties=wire.prop(0x15, "no-such-method"))
    )
    client.send(rejected + wire.publish_packet(f"{name}/t", b"x", version=version, retain=True))
    seen = client.expect_closed()
    assert [wire.CONNACK] == [answer.type for answer in seen]
    assert seen[0].reason
    observer.expect_nothing()
    late = connect(version=version)
    late.subscribe(f"{name}/#")
    late.expect_nothing()


# --- keep alive ---------------------------------------------------------------------------------------------------


@clause(v3="MQTT-3.1.2-24", v5=("MQTT-3.1.2-22", "MQTT-3.2.2-22"))
@both_versions
def test_a_silent_client_is_closed_as_if_the_network_failed(virtual: VirtualBroker, version: int) -> None:
    """Nothing for one and a half keep alives ends the connection and publishes the will [MQTT-3.1.2-22]."""
    observer = virtual.connect(version=version, keepalive=0)
    observer.subscribe("will")
    client = virtual.connect(version=version, keepalive=10, will=wire.Will("will", b"gone"))
    virtual.let_pass(14.9)
    observer.expect_nothing()
    virtual.let_pass(1.0)
    refused(client, 0x8D)
    assert b"gone" == observer.expect(wire.PUBLISH).payload


@clause(v3="MQTT-3.1.2-24", v5=("MQTT-3.1.2-22", "MQTT-3.2.2-22"))
@both_versions
def test_any_packet_keeps_a_client_alive(virtual: VirtualBroker, version: int) -> None:
    """A client that sends something in time stays, one that asked for no keep alive too [MQTT-3.1.2-22]."""
    pinging, publishing = (virtual.connect(version=version, keepalive=10) for _ in range(2))
    unlimited = virtual.connect(version=version, keepalive=0)
    for _ in range(10):
        virtual.let_pass(14)
        pinging.expect_nothing()
        publishing.publish("t", b"x")
    virtual.let_pass(14)
    for client in (pinging, publishing, unlimited):
        client.expect_nothing()


# --- limits of the client -----------------------------------------------------------------------------------------


@clause(v5=("MQTT-3.1.2-24", "MQTT-3.1.2-25"))
@every_qos
def test_packets_too_large_for_the_client_are_dropped(connect: wire.Connect, name: str, qos: int) -> None:
    """A message above the client's maximum packet size is not sent and does not block the next one [MQTT-3.1.2-25]."""
    # One message in flight: if the dropped one were still counted as sent, the small one could not follow.
    limits = wire.prop(0x27, 100) + wire.prop(0x21, 1) + wire.prop(0x11, 300)
    small = connect(name, clean=False, properties=limits)
    large, publisher = connect(), connect()
    small.subscribe(f"{name}/t", qos)
    large.subscribe(f"{name}/t", qos)
    for number in range(3):
        publisher.publish(f"{name}/t", b"x" * 200, qos)
        publisher.publish(f"{name}/t", b"%d" % number, qos)
    received = [small.receive() for _ in range(3)]
    assert [b"0", b"1", b"2"] == [message.payload for message in received]
    assert all(len(message.raw) <= 100 for message in received)
    assert 6 == len([large.receive() for _ in range(6)])
    small.close()
    again = connect(name, clean=False, properties=wire.prop(0x11, 300))
    again.expect_nothing()  # complete: not even a client without the limit gets it later


@clause(v5="MQTT-3.1.2-24")
def test_the_largest_packet_that_fits_is_sent(connect: wire.Connect, name: str) -> None:
    """The maximum packet size counts the whole packet: exactly that many bytes pass [MQTT-3.1.2-24]."""
    client = connect(properties=wire.prop(0x27, 100))
    client.subscribe(name)
    head = len(wire.publish_packet(name))
    publisher = connect()
    publisher.publish(name, b"a" * (101 - head))
    publisher.publish(name, b"b" * (100 - head))
    message = client.expect(wire.PUBLISH)
    assert (100, b"b") == (len(message.raw), message.payload[:1])


@clause(v5="MQTT-3.1.2-29")
def test_no_problem_information_for_who_declined(connect: wire.Connect, name: str) -> None:
    """Acknowledgements carry no reason string and no user properties when the client declined them [MQTT-3.1.2-29]."""
    client = connect(properties=wire.prop(0x17, 0))
    # Answers with something to explain: bad shared filter, nobody to receive, nothing to unsubscribe, unknown id.
    client.send(wire.subscribe_packet(1, [(name, 1), ("$share//x", 0)]))
    answers = client.recv()
    if answers.type == 9:
        client.send(wire.publish_packet(f"{name}/nobody", b"x", qos=1, packet_id=2))
        client.send(wire.publish_packet(f"{name}/nobody", b"x", qos=2, packet_id=3))
        client.send(wire.packet(0x62, b"\x00\x63"))
        every = [answers, *(client.recv() for _ in range(3)), client.unsubscribe(f"{name}/never")]
        for answer in every:
            assert [] == [found for found in answer.properties if found[0] in (0x1F, 0x26)], answer.name
    else:
        assert 14 == answers.type  # DISCONNECT may always explain itself
