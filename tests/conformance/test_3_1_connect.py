"""Section 3.1: CONNECT, its flags, its payload and what the broker makes of them (wills, sessions: own files)."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable

import pytest

from tests.support.clauses import clause
from tests.support.refusals import BROKEN, PROTOCOL_ERROR, bytes_to_the_end, connect_refused, refused
from tests.support.wire import (
    CONNACK,
    PINGREQ,
    PINGRESP,
    PUBACK,
    PUBLISH,
    Client,
    Will,
    ack_packet,
    connect_packet,
    disconnect_packet,
    packet,
    prop,
    props,
    publish_packet,
    subscribe_packet,
    utf8,
)

VERSIONS = (4, 5)
Connect = Callable[..., Client]
Open = Callable[..., Client]


def raw_connect(flags: int, payload: bytes, *, version: int, level: int | None = None, name: bytes = b"MQTT") -> bytes:
    """A CONNECT of given flags and payload, right or wrong."""
    head = utf8(name) + bytes([version if level is None else level, flags]) + struct.pack("!H", 60)
    return packet(0x10, head + (props() if version == 5 else b"") + payload)


# --- the first packet ---------------------------------------------------------------------------------------------


@clause(v3="MQTT-3.1.0-1", v5="MQTT-3.1.0-1")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ("publish", "subscribe", "pingreq", "disconnect", "puback"))
def test_the_first_packet_must_be_connect(
    open_client: Open, connect: Connect, name: str, version: int, kind: str
) -> None:
    """A connection that starts with another packet is closed, and the packet has no effect [MQTT-3.1.0-1]."""
    observer = connect(version=version)
    observer.subscribe(name)
    raw = {
        "publish": publish_packet(name, b"x", version=version),
        "subscribe": subscribe_packet(1, [(name, 0)], version=version),
        "pingreq": PINGREQ,
        "disconnect": disconnect_packet(version=version),
        "puback": ack_packet(PUBACK, 1, version=version),
    }[kind]
    client = open_client(version)
    client.send(raw)
    assert [] == client.expect_closed()
    observer.expect_nothing()


@clause(v3="MQTT-3.1.0-2", v5=("MQTT-3.1.0-2", "MQTT-3.2.0-2"))
@pytest.mark.parametrize("version", VERSIONS)
def test_a_second_connect_ends_the_connection(connect: Connect, name: str, version: int) -> None:
    """CONNECT may come once; the second one is a protocol error and gets no CONNACK [MQTT-3.1.0-2]."""
    client = connect(name, version=version)
    client.send(connect_packet(name, version=version))
    refused(client, PROTOCOL_ERROR)


# --- protocol name and level --------------------------------------------------------------------------------------


@clause(v3="MQTT-3.1.2-1", v5="MQTT-3.1.2-1")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("protocol", (b"", b"mqtt", b"MQT", b"MQTTX", b"HTTP", b"\xff\xff\xff\xff"))
def test_another_protocol_name_is_closed(open_client: Open, name: str, version: int, protocol: bytes) -> None:
    """Only MQTT (and MQIsdp of MQTT 3.1) is a name that is served; a refusal may say so [MQTT-3.1.2-1]."""
    client = open_client(version)
    client.send(raw_connect(0x02, utf8(name), version=version, name=protocol))
    assert bytes_to_the_end(client) in (b"", b"\x20\x02\x00\x01", b"\x20\x03\x00\x84\x00")


@clause(v3=("MQTT-3.1.2-2", "MQTT-3.2.2-4", "MQTT-3.2.2-5"), v5=("MQTT-3.1.2-2", "MQTT-3.2.2-6", "MQTT-3.2.2-7"))
@pytest.mark.parametrize("level", (0, 1, 2, 6, 7, 255))
def test_an_unsupported_level_is_answered_and_closed(open_client: Open, name: str, level: int) -> None:
    """A level that is none of 3, 4 and 5 gets return code 1 or reason 0x84, then the connection ends [MQTT-3.1.2-2]."""
    client = open_client(4)
    client.send(raw_connect(0x02, utf8(name), version=4, level=level))
    # A level above 5 may be taken for a future MQTT, whose clients would understand the newer form.
    newer = [b"\x20\x03\x00\x84\x00"] if level > 5 else []
    assert bytes_to_the_end(client) in [b"\x20\x02\x00\x01", *newer]


@pytest.mark.parametrize("version", (3, 4, 5))
def test_all_three_versions_are_spoken(connect: Connect, name: str, version: int) -> None:
    """Clients of MQTT 3.1, 3.1.1 and 5 are accepted and served side by side."""
    old, client = connect(version=4), connect(version=version)
    client.subscribe(name, 1)
    old.publish(name, b"from 3.1.1", 1)
    assert b"from 3.1.1" == client.receive().payload


# --- connect flags and payload ------------------------------------------------------------------------------------


@clause(v3=("MQTT-3.1.2-3", "MQTT-3.1.4-1"), v5=("MQTT-3.1.2-3", "MQTT-3.1.4-1"))
@pytest.mark.parametrize("version", VERSIONS)
def test_the_reserved_connect_flag_must_be_zero(open_client: Open, name: str, version: int) -> None:
    """A CONNECT with bit 0 of its flags set is malformed [MQTT-3.1.2-3]."""
    client = open_client(version)
    client.send(raw_connect(0x03, utf8(name), version=version))
    connect_refused(client, *BROKEN)


@clause(v3=("MQTT-3.1.2-11", "MQTT-3.1.2-13"), v5="MQTT-3.1.2-11")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("qos", (1, 2, 3))
def test_will_qos_without_a_will_is_refused(open_client: Open, name: str, version: int, qos: int) -> None:
    """Without the will flag the will QoS must be zero [MQTT-3.1.2-11]."""
    client = open_client(version)
    client.send(raw_connect(0x02 | qos << 3, utf8(name), version=version))
    connect_refused(client, *BROKEN)


@clause(v3=("MQTT-3.1.2-11", "MQTT-3.1.2-15"), v5="MQTT-3.1.2-13")
@pytest.mark.parametrize("version", VERSIONS)
def test_will_retain_without_a_will_is_refused(open_client: Open, name: str, version: int) -> None:
    """Without the will flag the will retain flag must be zero [MQTT-3.1.2-13]."""
    client = open_client(version)
    client.send(raw_connect(0x22, utf8(name), version=version))
    connect_refused(client, *BROKEN)


@clause(v3="MQTT-3.1.2-14", v5="MQTT-3.1.2-12")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_will_qos_of_three_is_refused(open_client: Open, name: str, version: int) -> None:
    """A will has QoS 0, 1 or 2 [MQTT-3.1.2-12]."""
    client = open_client(version)
    client.send(connect_packet(name, version=version, will=Will(f"{name}/will", b"x", qos=3)))
    connect_refused(client, *BROKEN)


def broken_payloads() -> list[object]:
    """Flags and payloads that do not fit each other."""
    cases: list[object] = []
    for version in VERSIONS:
        none = props() if version == 5 else b""
        will = none + utf8("will") + utf8("message")
        for case, flags, payload in (
            ("no-client-id", 0x02, b""),
            ("client-id-cut", 0x02, b"\x00\x09abc"),
            ("will-flag-without-will", 0x06, utf8("c")),
            ("will-topic-without-message", 0x06, utf8("c") + none + utf8("will")),
            ("will-message-cut", 0x06, utf8("c") + none + utf8("will") + b"\x00\x09abc"),
            ("will-without-flag", 0x02, utf8("c") + will),
            ("user-name-flag-without-user-name", 0x82, utf8("c")),
            ("user-name-without-flag", 0x02, utf8("c") + utf8("user")),
            ("password-flag-without-password", 0xC2, utf8("c") + utf8("user")),
            ("password-without-flag", 0x82, utf8("c") + utf8("user") + utf8("secret")),
            ("bytes-behind-the-end", 0x02, utf8("c") + b"\x00"),
            ("user-name-before-will", 0x86, utf8("c") + utf8("user") + will[:-1]),
        ):
            cases.append(pytest.param(version, flags, payload, id=f"v{version}-{case}"))
    return cases


@clause(
    v3=(
        "MQTT-3.1.2-9",
        "MQTT-3.1.2-11",
        "MQTT-3.1.2-18",
        "MQTT-3.1.2-19",
        "MQTT-3.1.2-20",
        "MQTT-3.1.2-21",
        "MQTT-3.1.3-1",
        "MQTT-3.1.3-3",
        "MQTT-3.1.4-1",
        "MQTT-3.2.2-6",
    ),
    v5=(
        "MQTT-3.1.2-9",
        "MQTT-3.1.2-16",
        "MQTT-3.1.2-17",
        "MQTT-3.1.2-18",
        "MQTT-3.1.2-19",
        "MQTT-3.1.3-1",
        "MQTT-3.1.3-3",
        "MQTT-3.1.4-1",
    ),
)
@pytest.mark.parametrize(("version", "flags", "payload"), broken_payloads())
def test_flags_and_payload_must_fit(open_client: Open, version: int, flags: int, payload: bytes) -> None:
    """The payload holds the fields that the flags announce, in their order and no others [MQTT-3.1.4-1]."""
    client = open_client(version)
    client.send(raw_connect(flags, payload, version=version))
    connect_refused(client, *BROKEN, 0x85, 0x90)


@clause(v3="MQTT-3.1.2-22")
def test_a_password_needs_a_user_name_in_3_1_1(open_client: Open, name: str) -> None:
    """MQTT 3.1.1 refuses a password without a user name [MQTT-3.1.2-22]."""
    client = open_client(4)
    client.send(connect_packet(name, version=4, password=b"secret"))
    connect_refused(client)


def test_a_password_may_stand_alone_in_5(connect: Connect, name: str) -> None:
    """MQTT 5 allows a password without a user name."""
    connect(name, password=b"secret").expect_nothing()


@clause(v3=("MQTT-3.1.3-1", "MQTT-3.1.2-9"), v5=("MQTT-3.1.3-1", "MQTT-3.1.2-9"))
@pytest.mark.parametrize("version", VERSIONS)
def test_all_fields_of_the_payload_are_read_in_order(connect: Connect, name: str, version: int) -> None:
    """Client identifier, will, user name and password together are understood [MQTT-3.1.3-1]."""
    observer = connect(version=version)
    observer.subscribe(f"{name}/will", 1)
    client = connect(
        name,
        version=version,
        username="user",
        password=b"\x00\xff secret",
        will=Will(f"{name}/will", b"gone", qos=1),
    )
    client.close()
    assert b"gone" == observer.receive().payload


@clause(v3="MQTT-3.1.4-1", v5="MQTT-3.1.4-1")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_connect_cut_at_any_byte_is_not_accepted(open_client: Open, name: str, version: int) -> None:
    """A CONNECT that ends too early, its length telling the same, is closed and never accepted [MQTT-3.1.4-1]."""
    whole = connect_packet(name[:4], version=version, username="u", will=Will("w", b"m"))
    for end in range(2, len(whole) - 1):
        client = open_client(version)
        client.send(packet(0x10, whole[2:end]))
        answer = bytes_to_the_end(client)
        assert b"" == answer or (version == 5 and answer[0] == 0x20 and answer[3] >= 0x80), f"cut at {end}"
        client.close()


# --- client identifier --------------------------------------------------------------------------------------------


@clause(v3=("MQTT-3.1.3-5", "MQTT-3.1.4-4"), v5=("MQTT-3.1.3-5", "MQTT-3.1.4-5"))
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "client_id", ("a", "Z", "0", "0123456789abcdefghijklm", "nopqrstuvwxyzABCDEFGHIJ", "KLMNOPQRSTUVWXYZ")
)
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
    assert [b"x"] * 3 == [client.expect(PUBLISH).payload for client in clients]


@clause(
    v3=("MQTT-3.1.3-8", "MQTT-3.1.3-9", "MQTT-3.2.2-4", "MQTT-3.2.2-5"),
)
def test_an_empty_identifier_needs_a_clean_session_in_3_1_1(open_client: Open) -> None:
    """Without Clean Session an empty identifier is rejected with return code 2 [MQTT-3.1.3-8]."""
    client = open_client(4)
    client.send(connect_packet("", version=4, clean=False))
    assert b"\x20\x02\x00\x02" == bytes_to_the_end(client)


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
def test_an_assigned_identifier_names_the_session(open_client: Open, connect: Connect, name: str) -> None:
    """A client may come back under the identifier that it was given and finds its session [MQTT-3.1.3-7]."""
    first = open_client()
    client_id = first.connect("", clean=False, properties=prop(0x11, 300)).prop(0x12)
    first.subscribe(name, 1)
    first.disconnect()
    second = open_client()
    answer = second.connect(client_id, clean=False, properties=prop(0x11, 300))
    assert answer.session_present
    assert answer.prop(0x12) is None
    connect().publish(name, b"x", 1)
    assert b"x" == second.receive().payload


@clause(v3=("MQTT-3.1.3-9", "MQTT-3.2.2-5"), v5=("MQTT-3.1.3-8", "MQTT-3.2.2-7"))
@pytest.mark.parametrize("version", VERSIONS)
def test_a_rejected_identifier_is_answered_and_closed(open_client: Open, version: int) -> None:
    """An identifier longer than the broker allows gets return code 2 or reason 0x85 [MQTT-3.1.3-8]."""
    client = open_client(version)
    answer = client.connect("x" * 5000)
    assert (2 if version == 4 else 0x85) == answer.reason
    assert not answer.session_present
    assert [] == client.expect_closed()


@clause(v3="MQTT-3.1.3-2", v5="MQTT-3.1.3-2")
@pytest.mark.parametrize("version", VERSIONS)
def test_sessions_of_different_identifiers_are_apart(connect: Connect, name: str, version: int) -> None:
    """State belongs to one identifier, compared letter by letter [MQTT-3.1.3-2]."""
    kept = prop(0x11, 300) if version == 5 else b""
    connect(f"{name}a", version=version, clean=False, properties=kept).disconnect()
    other = connect(f"{name}A", version=version, clean=False, properties=kept)
    assert other.connack is not None and not other.connack.session_present
    same = connect(f"{name}a", version=version, clean=False, properties=kept)
    assert same.connack is not None and same.connack.session_present


# --- response -----------------------------------------------------------------------------------------------------


@clause(v3=("MQTT-3.1.4-4", "MQTT-3.2.0-1"), v5=("MQTT-3.1.4-5", "MQTT-3.2.0-1", "MQTT-3.2.0-2"))
@pytest.mark.parametrize("version", VERSIONS)
def test_packets_right_behind_connect_are_served_after_connack(open_client: Open, name: str, version: int) -> None:
    """A client need not wait for CONNACK; the answers come behind it, and there is one CONNACK only [MQTT-3.2.0-1]."""
    client = open_client(version)
    client.send(
        connect_packet(name, version=version)
        + subscribe_packet(1, [(name, 0)], version=version)
        + publish_packet(name, b"x", version=version)
        + PINGREQ
    )
    kinds = [client.recv().type for _ in range(4)]
    assert CONNACK == kinds[0]
    assert {9, PUBLISH, PINGRESP} == set(kinds[1:])
    client.expect_nothing()


@clause(v3="MQTT-3.1.4-5", v5=("MQTT-3.1.4-6", "MQTT-3.1.4-2"))
@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_behind_a_rejected_connect_is_processed(
    open_client: Open, connect: Connect, name: str, version: int
) -> None:
    """What a rejected client has sent already has no effect [MQTT-3.1.4-6]."""
    observer = connect(version=version)
    observer.subscribe(f"{name}/#")
    client = open_client(version)
    # MQTT 3.1.1 rejects the empty identifier, MQTT 5 the authentication method that nobody knows.
    rejected = (
        connect_packet("", version=4, clean=False)
        if version == 4
        else connect_packet(name, properties=prop(0x15, "no-such-method"))
    )
    client.send(rejected + publish_packet(f"{name}/t", b"x", version=version, retain=True))
    seen = client.expect_closed()
    assert [CONNACK] == [answer.type for answer in seen]
    assert seen[0].reason
    observer.expect_nothing()
    late = connect(version=version)
    late.subscribe(f"{name}/#")
    late.expect_nothing()


@clause(v5="MQTT-3.1.4-2")
def test_a_failed_check_closes_the_connection(open_client: Open, name: str) -> None:
    """A CONNECT that is well-formed but not authentic is refused with a reason and closed [MQTT-3.1.4-2]."""
    client = open_client()
    client.send(connect_packet(name, properties=prop(0x15, "no-such-method")))
    connect_refused(client, 0x8C, 0x87)


# --- keep alive ---------------------------------------------------------------------------------------------------


@clause(v3="MQTT-3.1.2-24", v5=("MQTT-3.1.2-22", "MQTT-3.2.2-22"))
@pytest.mark.parametrize("version", VERSIONS)
def test_a_silent_client_is_closed_as_if_the_network_failed(connect: Connect, name: str, version: int) -> None:
    """Nothing for one and a half keep alives ends the connection and publishes the will [MQTT-3.1.2-22]."""
    observer = connect(version=version)
    observer.subscribe(f"{name}/will")
    client = connect(name, version=version, keepalive=1, will=Will(f"{name}/will", b"gone"))
    seen = client.expect_closed()
    if version == 5:
        assert [0x8D] == [answer.reason for answer in seen]
    else:
        assert [] == seen
    assert b"gone" == observer.expect(PUBLISH).payload


@clause(v3="MQTT-3.1.2-24", v5=("MQTT-3.1.2-22", "MQTT-3.2.2-22"))
@pytest.mark.parametrize("version", VERSIONS)
def test_any_packet_keeps_a_client_alive(connect: Connect, name: str, version: int) -> None:
    """A client that sends something in time stays, one that asked for no keep alive too [MQTT-3.1.2-22]."""
    deadline = time.monotonic() + 60
    rounds = 0
    while rounds < 2:  # two silent clients one after the other: more than two of their time-outs in all
        assert time.monotonic() < deadline, "this machine does not let a client speak once in a second"
        unlimited = connect(version=version, keepalive=0)
        rounds += kept_alive(connect, name, version)
        unlimited.expect_nothing()


#: Seconds between two packets after which the next one may come too late: twice as many are nearly the 1.5 keep alives
#: after which a client may be closed, whatever has kept it from speaking.
HESITATION = 0.7


def kept_alive(connect: Connect, name: str, version: int) -> bool:
    """Two clients speak until a silent one is closed, and stay; False if the machine let them speak too late."""
    pauses: list[float] = []
    spoke = time.monotonic()
    silent, pinging, publishing = (connect(version=version, keepalive=1) for _ in range(3))
    try:
        while True:
            try:
                silent.expect_closed(timeout=0.3)
                break
            except AssertionError as error:
                if "still open" not in str(error):
                    raise
                # The others say something meanwhile.
                pinging.expect_nothing()
                publishing.publish(name, b"x")
            pauses.append(time.monotonic() - spoke)
            spoke += pauses[-1]
        pinging.expect_nothing()
        publishing.expect_nothing()
    except AssertionError:
        pauses.append(time.monotonic() - spoke)
        if max(pauses) < HESITATION:
            raise
        return False
    return True


# --- limits of the client -----------------------------------------------------------------------------------------


@clause(v5=("MQTT-3.1.2-24", "MQTT-3.1.2-25"))
@pytest.mark.parametrize("qos", (0, 1, 2))
def test_packets_too_large_for_the_client_are_dropped(connect: Connect, name: str, qos: int) -> None:
    """A message above the client's maximum packet size is not sent and does not block the next one [MQTT-3.1.2-25]."""
    # One message in flight: if the dropped one were still counted as sent, the small one could not follow.
    limits = prop(0x27, 100) + prop(0x21, 1) + prop(0x11, 300)
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
    again = connect(name, clean=False, properties=prop(0x11, 300))
    again.expect_nothing()  # complete: not even a client without the limit gets it later


@clause(v5="MQTT-3.1.2-24")
def test_the_largest_packet_that_fits_is_sent(connect: Connect, name: str) -> None:
    """The maximum packet size counts the whole packet: exactly that many bytes pass [MQTT-3.1.2-24]."""
    client = connect(properties=prop(0x27, 100))
    client.subscribe(name)
    head = len(publish_packet(name))
    publisher = connect()
    publisher.publish(name, b"a" * (101 - head))
    publisher.publish(name, b"b" * (100 - head))
    message = client.expect(PUBLISH)
    assert (100, b"b") == (len(message.raw), message.payload[:1])


@clause(v5="MQTT-3.1.2-27")
@pytest.mark.parametrize("properties", (b"", prop(0x22, 0)), ids=("absent", "zero"))
def test_no_aliases_for_a_client_that_did_not_ask(connect: Connect, name: str, properties: bytes) -> None:
    """Without a Topic Alias Maximum every PUBLISH has its topic and no alias [MQTT-3.1.2-27]."""
    client = connect(properties=properties)
    client.subscribe(f"{name}/#")
    for _ in range(5):
        client.publish(f"{name}/t", b"x")
        message = client.expect(PUBLISH)
        assert (f"{name}/t", None) == (message.topic, message.prop(0x23))


@clause(v5="MQTT-3.1.2-26")
@pytest.mark.parametrize("maximum", (1, 2, 5))
def test_aliases_stay_within_the_clients_maximum(connect: Connect, name: str, maximum: int) -> None:
    """No alias is above the maximum, and each stands for the topic it was set up with [MQTT-3.1.2-26]."""
    client = connect(properties=prop(0x22, maximum))
    client.subscribe(f"{name}/#")
    known: dict[int, str] = {}
    for number in range(40):
        topic = f"{name}/{number % 8}"
        client.publish(topic, b"x")
        message = client.expect(PUBLISH)
        alias = message.prop(0x23)
        if alias is not None:
            assert 1 <= alias <= maximum
            if message.topic:
                known[alias] = message.topic
        assert topic == (message.topic or known[alias])


@clause(v5="MQTT-3.1.2-28")
@pytest.mark.parametrize("properties", (b"", prop(0x19, 0)), ids=("absent", "zero"))
def test_response_information_only_on_request(connect: Connect, properties: bytes) -> None:
    """A client that did not ask for response information gets none [MQTT-3.1.2-28]."""
    client = connect(properties=properties)
    assert client.connack is not None and client.connack.prop(0x1A) is None


@clause(v5="MQTT-3.1.2-29")
def test_no_problem_information_for_who_declined(connect: Connect, name: str) -> None:
    """Acknowledgements carry no reason string and no user properties when the client declined them [MQTT-3.1.2-29]."""
    client = connect(properties=prop(0x17, 0))
    # Answers with something to explain: bad shared filter, nobody to receive, nothing to unsubscribe, unknown id.
    client.send(subscribe_packet(1, [(name, 1), ("$share//x", 0)]))
    answers = client.recv()
    if answers.type == 9:
        client.send(publish_packet(f"{name}/nobody", b"x", qos=1, packet_id=2))
        client.send(publish_packet(f"{name}/nobody", b"x", qos=2, packet_id=3))
        client.send(packet(0x62, b"\x00\x63"))
        every = [answers, *(client.recv() for _ in range(3)), client.unsubscribe(f"{name}/never")]
        for answer in every:
            assert [] == [found for found in answer.properties if found[0] in (0x1F, 0x26)], answer.name
    else:
        assert 14 == answers.type  # DISCONNECT may always explain itself


# --- a client that stops halfway ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_half_a_connect_leaves_nothing_behind(open_client: Open, connect: Connect, name: str, version: int) -> None:
    """A CONNECT that never becomes complete has no session and publishes no will."""
    observer = connect(version=version)
    observer.subscribe(f"{name}/will")
    client = open_client(version)
    client.send(connect_packet(name, version=version, will=Will(f"{name}/will", b"x"))[:-1])
    client.socket.shutdown(socket.SHUT_WR)
    assert [] == client.expect_closed()
    observer.expect_nothing()
