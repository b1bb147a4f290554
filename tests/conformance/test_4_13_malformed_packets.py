"""Section 4.13 of MQTT 5 and 4.8 of MQTT 3.1.1: packets that break the rules, by the statement that they break.

The packets and their answers are the table in tests/support/malformed.py, played to a broker in memory (a node behind
sockets gets one of each kind of answer in tests/scenarios/test_bad_input_packets.py). Each offender is told what the
table says and closed; what follows the packet has no effect, and a bystander is served on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest

from tests.support import malformed, wire
from tests.support.cases import both_versions, each
from tests.support.clauses import clause
from tests.support.malformed import ALL, Malformed, of_type, told_otherwise
from tests.support.refusals import BROKEN, bytes_to_the_end, connect_refused, refused
from tests.support.virtual_wire import VirtualBroker

Refuse = Callable[[Iterable[Malformed]], None]

TEXTS = (*malformed.ILL_FORMED_TEXTS, *malformed.NULL_TEXTS)
ACKNOWLEDGEMENTS = (wire.PUBACK, wire.PUBREC, wire.PUBREL, wire.PUBCOMP)

#: Reason codes of table 3-1, which CONNACK may have, and of table 3-10, which DISCONNECT of a server may have.
CONNACK_REASONS = {0x00, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9F}
DISCONNECT_REASONS = {
    *(0x00, 0x80, 0x81, 0x82, 0x83, 0x87, 0x89, 0x8B, 0x8D, 0x8E, 0x8F, 0x90, 0x93, 0x94, 0x95, 0x96, 0x97),
    *(0x98, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9E, 0x9F, 0xA0, 0xA1, 0xA2),
}


@pytest.fixture
def refuse(virtual: VirtualBroker) -> Refuse:
    """`refuse(rows)`: every packet of these rows is refused as its row says, and harms nobody else."""
    names = (f"offender-{number}" for number in itertools.count())

    def refuse_all(rows: Iterable[Malformed]) -> None:
        before = len(virtual.node.broker.connections)
        bystander = virtual.connect()
        bystander.subscribe("behind")
        by_version = itertools.groupby(sorted(rows, key=lambda row: row.version), lambda row: row.version)
        for version, own in by_version:
            behind = wire.publish_packet("behind", b"behind the error", version=version)
            assert [] == told_otherwise(list(own), virtual.open, lambda: next(names), behind)
        bystander.publish("behind", b"still here")
        assert b"still here" == bystander.receive().payload
        bystander.close()
        assert before == len(virtual.node.broker.connections), "offenders left connections behind"

    return refuse_all


# --- all of them --------------------------------------------------------------------------------------------------


@clause(v3="MQTT-4.8.0-1", v5=("MQTT-3.2.2-6", "MQTT-3.2.2-7", "MQTT-3.2.2-8", "MQTT-4.13.1-1", "MQTT-4.13.2-1"))
@clause(v5=("MQTT-3.14.0-1", "MQTT-3.14.2-1", "MQTT-3.14.2-2", "MQTT-3.14.4-1", "MQTT-3.14.4-2"))
def test_an_error_ends_the_connection_it_came_on(refuse: Refuse) -> None:
    """Whoever is not let in gets no DISCONNECT, reasons are those of the tables, and nothing follows the answer."""
    for row in ALL:
        for kind, code in row.answer:
            assert row.version < 5 or row.opening == (kind != wire.DISCONNECT), row
            assert row.version < 5 or code in (
                DISCONNECT_REASONS if kind == wire.DISCONNECT else CONNACK_REASONS | {1}
            ), row
    refuse(ALL)


@clause(v3=("MQTT-4.8.0-1", "MQTT-4.8.0-2"), v5="MQTT-4.13.1-1")
@both_versions
def test_what_came_before_the_error_was_served(virtual: VirtualBroker, version: int) -> None:
    """Packets in front of the broken one in the same write have their effect [MQTT-4.13.1-1]."""
    observer, offender = virtual.connect(version=version), virtual.connect(version=version)
    observer.subscribe("good")
    offender.send(wire.publish_packet("good", b"good", version=version) + wire.packet(0x00))
    refused(offender, *BROKEN)
    assert b"good" == observer.expect(wire.PUBLISH).payload


@clause(v5=("MQTT-3.14.2-3", "MQTT-3.14.2-4", "MQTT-3.1.2-24"))
def test_a_disconnect_fits_the_client(virtual: VirtualBroker) -> None:
    """A reason string or user property that makes DISCONNECT too large for the client is left out [MQTT-3.14.2-3]."""
    rows = [row for row in ALL if row.version == 5 and not row.opening]
    for row in malformed.kinds_of_answer(rows):
        client = virtual.connect(properties=wire.prop(0x27, 24))  # enough for the CONNACK, not for a sentence
        client.send(row.raw)
        answer = refused(client, row.reason)
        assert answer is not None and len(answer.raw) <= 24, row
        assert answer.prop(0x11) is None and answer.flags == 0, row


# --- chapter 1 and 2 ----------------------------------------------------------------------------------------------


@clause(v3="MQTT-1.5.3-1", v5="MQTT-1.5.4-1")
def test_ill_formed_utf8_closes_the_connection(refuse: Refuse) -> None:
    refuse(malformed.ILL_FORMED_TEXTS)


@clause(v3="MQTT-1.5.3-2", v5="MQTT-1.5.4-2")
def test_the_null_character_closes_the_connection(refuse: Refuse) -> None:
    refuse(malformed.NULL_TEXTS)


@clause(
    v3=("MQTT-1.5.3-1", "MQTT-1.5.3-2", "MQTT-3.1.3-4", "MQTT-3.1.3-10", "MQTT-3.1.3-11"),
    v5=("MQTT-1.5.4-1", "MQTT-1.5.4-2", "MQTT-3.1.3-4", "MQTT-3.1.3-11", "MQTT-3.1.3-12"),
)
def test_client_id_will_topic_and_user_name_are_utf8(refuse: Refuse) -> None:
    refuse(of_type(TEXTS, wire.CONNECT))


@clause(v3="MQTT-3.3.2-1", v5=("MQTT-3.3.2-1", "MQTT-3.3.2-13", "MQTT-3.3.2-19", "MQTT-1.5.7-1"))
def test_topic_response_topic_content_type_and_user_properties_are_utf8(refuse: Refuse) -> None:
    refuse(of_type(TEXTS, wire.PUBLISH))


@clause(v3=("MQTT-3.8.3-1", "MQTT-3.10.3-1", "MQTT-4.7.3-2"), v5=("MQTT-3.8.3-1", "MQTT-3.10.3-1", "MQTT-4.7.3-2"))
def test_filters_are_utf8_without_the_null_character(refuse: Refuse) -> None:
    refuse(of_type(TEXTS, wire.SUBSCRIBE, wire.UNSUBSCRIBE))


@clause(v3=("MQTT-2.2.2-1", "MQTT-2.2.2-2"), v5="MQTT-2.1.3-1")
def test_reserved_flags_of_the_fixed_header_are_checked(refuse: Refuse) -> None:
    refuse(malformed.FLAGS)


@clause(v3="MQTT-3.6.1-1", v5="MQTT-3.6.1-1")
def test_flags_of_pubrel_are_0010(refuse: Refuse) -> None:
    refuse(of_type(malformed.FLAGS, wire.PUBREL))


@clause(v3="MQTT-3.8.1-1", v5="MQTT-3.8.1-1")
def test_flags_of_subscribe_are_0010(refuse: Refuse) -> None:
    refuse(of_type(malformed.FLAGS, wire.SUBSCRIBE))


@clause(v3="MQTT-3.10.1-1", v5="MQTT-3.10.1-1")
def test_flags_of_unsubscribe_are_0010(refuse: Refuse) -> None:
    refuse(of_type(malformed.FLAGS, wire.UNSUBSCRIBE))


@clause(v3="MQTT-3.14.1-1", v5=("MQTT-3.14.1-1", "MQTT-3.15.1-1"))
def test_disconnect_and_auth_have_no_flags(refuse: Refuse) -> None:
    refuse(of_type(malformed.FLAGS, wire.DISCONNECT, wire.AUTH))


@clause(v3="MQTT-4.8.0-1", v5="MQTT-4.13.1-1")
def test_types_that_a_client_does_not_send_end_the_connection(refuse: Refuse) -> None:
    """Types that the version does not have, and packets of servers, right or broken."""
    refuse((*malformed.TYPES, *malformed.SERVER_PACKETS, *malformed.BROKEN_SERVER_PACKETS))


@clause(v3=("MQTT-4.8.0-1", "MQTT-4.8.0-2"), v5=("MQTT-1.5.5-1", "MQTT-4.13.1-1"))
def test_lengths_that_are_wrong_or_too_large_end_the_connection(refuse: Refuse) -> None:
    """From the length alone: not one byte of the packet has come [MQTT-4.8.0-2]."""
    refuse((*malformed.LENGTHS, *malformed.STRANGERS))


@clause(v3="MQTT-2.3.1-1", v5="MQTT-2.2.1-3")
def test_a_packet_identifier_of_zero_ends_the_connection(refuse: Refuse) -> None:
    refuse(malformed.PACKET_IDS)


@clause(v5=("MQTT-2.2.2-1", "MQTT-4.13.1-1"))
def test_broken_properties_end_the_connection(refuse: Refuse) -> None:
    """Missing, unknown, cut, misplaced and repeated ones, and values that the specification forbids."""
    refuse(malformed.PROPERTY_ROWS)


# --- CONNECT ------------------------------------------------------------------------------------------------------


@clause(v3="MQTT-3.1.0-1", v5=("MQTT-3.1.0-1", "MQTT-3.14.0-1"))
def test_the_first_packet_must_be_connect(refuse: Refuse) -> None:
    refuse(malformed.STRANGERS)


@clause(v3="MQTT-3.1.0-2", v5=("MQTT-3.1.0-2", "MQTT-3.2.0-2"))
def test_a_second_connect_ends_the_connection(refuse: Refuse) -> None:
    refuse(malformed.SECOND_CONNECTS)


@clause(
    v3=("MQTT-3.1.2-1", "MQTT-3.1.2-2", "MQTT-3.2.2-4", "MQTT-3.2.2-5"),
    v5=("MQTT-3.1.2-1", "MQTT-3.1.2-2", "MQTT-3.2.2-6", "MQTT-3.2.2-7"),
)
def test_another_protocol_or_level_is_answered_and_closed(refuse: Refuse) -> None:
    refuse(malformed.PROTOCOLS)


@clause(v3=("MQTT-3.1.2-3", "MQTT-3.1.2-9", "MQTT-3.1.2-18", "MQTT-3.1.2-19", "MQTT-3.1.2-20", "MQTT-3.1.2-21"))
@clause(v3=("MQTT-3.1.2-22", "MQTT-3.1.3-1", "MQTT-3.1.3-3", "MQTT-3.1.4-1", "MQTT-3.2.2-6"))
@clause(v5=("MQTT-3.1.2-3", "MQTT-3.1.2-9", "MQTT-3.1.2-16", "MQTT-3.1.2-17", "MQTT-3.1.2-18", "MQTT-3.1.2-19"))
@clause(v5=("MQTT-3.1.3-1", "MQTT-3.1.3-3", "MQTT-3.1.4-1"))
def test_flags_and_payload_of_a_connect_must_fit(refuse: Refuse) -> None:
    """The payload holds the fields that the flags announce, in their order and no others [MQTT-3.1.4-1]."""
    refuse((*malformed.CONNECTS, *malformed.WILLS))


@clause(
    v3=("MQTT-3.1.2-11", "MQTT-3.1.2-13", "MQTT-3.1.2-14", "MQTT-3.1.2-15"),
    v5=("MQTT-3.1.2-11", "MQTT-3.1.2-12", "MQTT-3.1.2-13"),
)
def test_flags_of_a_will_need_a_will_and_its_topic_is_a_name(refuse: Refuse) -> None:
    refuse(malformed.WILLS)


@clause(
    v3=("MQTT-3.1.3-8", "MQTT-3.1.3-9", "MQTT-3.2.2-4", "MQTT-3.2.2-5"),
    v5=("MQTT-3.1.3-8", "MQTT-3.2.2-6", "MQTT-3.2.2-7"),
)
def test_a_rejected_client_identifier_is_answered_and_closed(refuse: Refuse) -> None:
    """Too long, with a wildcard, or empty for a session that stays: return code 2 or reason 0x85 [MQTT-3.1.3-8]."""
    refuse(malformed.CLIENT_IDS)


# --- PUBLISH ------------------------------------------------------------------------------------------------------


@clause(v3=("MQTT-3.3.1-2", "MQTT-3.3.1-4"), v5=("MQTT-3.3.1-2", "MQTT-3.3.1-4"))
def test_qos_3_and_dup_without_qos_are_malformed(refuse: Refuse) -> None:
    refuse(malformed.PUBLISHES)


@clause(
    v3=("MQTT-3.3.2-1", "MQTT-3.3.2-2", "MQTT-4.7.1-1", "MQTT-4.7.3-1", "MQTT-4.7.3-3"),
    v5=("MQTT-3.3.2-1", "MQTT-3.3.2-2", "MQTT-4.7.0-1", "MQTT-4.7.3-1", "MQTT-4.7.3-3"),
)
def test_a_topic_name_is_there_and_has_no_wildcards(refuse: Refuse) -> None:
    refuse((*malformed.TOPICS, *malformed.PUBLISHES))


@clause(v5=("MQTT-3.3.2-8", "MQTT-3.3.2-9", "MQTT-3.3.2-12"))
def test_an_alias_of_zero_above_the_maximum_or_never_given_is_refused(refuse: Refuse) -> None:
    refuse(malformed.ALIASES)


@clause(v5=("MQTT-3.3.2-14", "MQTT-3.3.4-6"))
def test_properties_of_a_publish_must_be_possible(refuse: Refuse) -> None:
    """No wildcards in a response topic [MQTT-3.3.2-14], no subscription identifier of a client [MQTT-3.3.4-6]."""
    refuse(of_type((*malformed.IMPOSSIBLE_VALUES, *malformed.FOREIGN_PROPERTIES), wire.PUBLISH))


# --- the other packets --------------------------------------------------------------------------------------------


@clause(v3="MQTT-4.8.0-1", v5=("MQTT-3.4.2-1", "MQTT-3.5.2-1", "MQTT-3.6.2-1", "MQTT-3.7.2-1", "MQTT-4.13.1-1"))
@each(version=(3, 4, 5), kind=ACKNOWLEDGEMENTS)
def test_broken_acknowledgements_are_refused_also_when_one_is_awaited(
    virtual: VirtualBroker, version: int, kind: int
) -> None:
    """Cut short, with reason codes of other packets [MQTT-3.4.2-1], with properties of others."""
    for row in of_type((*malformed.ACKNOWLEDGEMENTS, *malformed.REPEATED_PROPERTIES), kind):
        if row.version != version:
            continue
        client, other = virtual.connect(version=version), virtual.connect(version=version)
        client.subscribe("t", 2)
        if kind == wire.PUBREL:
            client.send(wire.publish_packet("own", version=version, qos=2, packet_id=1))
            client.expect(wire.PUBREC)
        else:
            other.publish("t", b"x", 1 if kind == wire.PUBACK else 2)
            assert client.expect(wire.PUBLISH).packet_id == 1
            if kind == wire.PUBCOMP:
                client.send(wire.ack_packet(wire.PUBREC, 1, version=version))
                client.expect(wire.PUBREL)
        client.send(row.raw)
        refused(client, row.reason)


@clause(
    v3=("MQTT-3.8.3-3", "MQTT-3.8.3-4", "MQTT-3.10.3-2"),
    v5=("MQTT-3.8.3-2", "MQTT-3.8.3-4", "MQTT-3.8.3-5", "MQTT-3.10.3-2"),
)
def test_subscribe_and_unsubscribe_have_filters_and_defined_options(refuse: Refuse) -> None:
    refuse((*malformed.SUBSCRIBES, *malformed.UNSUBSCRIBES))


@clause(v5=("MQTT-4.12.0-7", "MQTT-4.13.1-1"))
def test_broken_disconnects_and_auths_are_errors(refuse: Refuse) -> None:
    """A client that named no method must not send AUTH [MQTT-4.12.0-7]."""
    refuse((*malformed.DISCONNECTS, *malformed.AUTHS))


@clause(v3="MQTT-3.14.1-1", v5="MQTT-3.14.1-1")
@both_versions
def test_a_disconnect_with_flags_is_not_a_goodbye(virtual: VirtualBroker, version: int) -> None:
    """Reserved bits make DISCONNECT malformed, so the will is published [MQTT-3.14.1-1]."""
    observer = virtual.connect(version=version)
    observer.subscribe("will")
    client = virtual.connect(version=version, will=wire.Will("will", b"gone"))
    client.send(b"\xe1\x00")
    refused(client, malformed.MALFORMED)
    assert b"gone" == observer.expect(wire.PUBLISH).payload


# --- packets cut short --------------------------------------------------------------------------------------------


def _full_connect(version: int) -> bytes:
    v5 = version == 5
    return wire.connect_packet(
        "cut",
        version=version,
        username="user",
        password=b"word",
        will=wire.Will("will", b"gone", 1, properties=wire.prop(0x18, 0) + wire.prop(0x26, ("k", "v")) if v5 else b""),
        properties=wire.prop(0x11, 60) + wire.prop(0x21, 10) + wire.prop(0x26, ("k", "v")) if v5 else b"",
        clean=False,
    )


def _full_packets(version: int) -> dict[str, tuple[bytes, set[int]]]:
    """Packets with every optional field that the version has, and where they may be cut and are still whole."""
    v5 = version == 5
    pair = wire.prop(0x26, ("k", "v")) if v5 else b""
    head = 2 + (1 + len(pair) if v5 else 0)
    found = {
        "PUBLISH QoS 0": (wire.publish_packet("t/a", version=version, properties=pair), set()),
        "PUBLISH QoS 1": (wire.publish_packet("t/a", version=version, qos=1, packet_id=7, properties=pair), set()),
        "PUBLISH QoS 2": (wire.publish_packet("t/a", version=version, qos=2, packet_id=8, properties=pair), set()),
        "SUBSCRIBE": (
            wire.subscribe_packet(9, [("t/+/x", 1), ("$share/g/t", 0)], version=version, properties=pair),
            {head + 2 + 5 + 1},
        ),
        "UNSUBSCRIBE": (wire.unsubscribe_packet(10, ["t/+/x", "t"], version=version, properties=pair), {head + 2 + 5}),
    }
    for kind, name in zip(ACKNOWLEDGEMENTS, ("PUBACK", "PUBREC", "PUBREL", "PUBCOMP"), strict=True):
        short = {2, 3} if v5 else set[int]()
        found[name] = (wire.ack_packet(kind, 11, version=version, reason=0, properties=pair), short)
    if v5:
        alias = wire.prop(0x23, 1) + wire.prop(0x08, "r")
        found["PUBLISH with an alias"] = (wire.publish_packet("t/a", properties=alias), set())
        found["DISCONNECT"] = (
            wire.disconnect_packet(reason=4, properties=wire.prop(0x11, 0) + wire.prop(0x1F, "bye")),
            {0, 1},
        )
    return found


def _verdict(client: wire.Client) -> str:
    """What became of a client: refused for what it sent, or still there, or gone as it wished."""
    client.send(wire.PINGREQ)
    seen = []
    try:
        while True:
            seen.append(client.recv())
            if seen[-1].type == wire.PINGRESP:
                return "understood"
    except wire.Closed:
        pass
    if client.version == 5 and not seen:
        return "understood"  # its DISCONNECT
    told = [one.type == wire.DISCONNECT and one.reason in BROKEN for one in seen]
    return "refused" if told == [True] * (client.version == 5) else f"closed after {seen}"


@clause(v3="MQTT-4.8.0-1", v5="MQTT-4.13.1-1")
@each(version=(3, 4, 5))
def test_a_packet_cut_at_any_byte_is_refused_or_understood(virtual: VirtualBroker, version: int) -> None:
    """A body that ends too early is malformed, unless what is left is a whole packet again; never anything else."""
    wrong = []
    for name, (full, whole) in _full_packets(version).items():
        for end in range(len(full) - 2):
            client = virtual.connect(version=version)
            client.send(wire.packet(full[0], full[2 : 2 + end]))
            wanted = "understood" if end in whole else "refused"
            if wanted != (found := _verdict(client)):
                wrong.append(f"{name} cut at {end}: {found} instead of {wanted}")
    assert [] == wrong


@clause(v3="MQTT-3.1.4-1", v5="MQTT-3.1.4-1")
@each(version=(4, 5))
def test_a_connect_cut_at_any_byte_is_not_accepted(virtual: VirtualBroker, version: int) -> None:
    """No part of a CONNECT is a CONNECT; MQTT 5 is told so as soon as the packet has named its version."""
    observer = virtual.connect()
    observer.subscribe("will")
    full = _full_connect(version)
    for end in range(len(full) - 2):
        client = virtual.open(version)
        client.send(wire.packet(0x10, full[2 : 2 + end]))
        if version == 5 and end >= 7:
            connect_refused(client, malformed.MALFORMED)
        else:
            assert b"" == bytes_to_the_end(client), f"cut at {end}"
    observer.expect_nothing()


@each(version=(4, 5), how=("close", "half-close", "abort"))
def test_a_connection_that_ends_inside_a_packet_is_forgotten(virtual: VirtualBroker, version: int, how: str) -> None:
    """Whatever part of a packet has come, and however the connection ends, the broker lets go of both."""
    before = len(virtual.node.broker.connections)
    for full in (_full_connect(version), *(full for full, _ in _full_packets(version).values())):
        for end in range(1, len(full)):
            client = virtual.open(version) if full[0] == 0x10 else virtual.connect(version=version)
            client.send(full[:end])
            if how == "half-close":
                client.socket.shutdown(1)
                assert [] == client.expect_closed()
            else:
                getattr(client, how)()
    assert before == len(virtual.node.broker.connections)


@both_versions
def test_unfinished_packets_are_waited_for(virtual: VirtualBroker, version: int) -> None:
    """Connections that stopped inside a packet are kept, and may go on later."""
    observer = virtual.connect()
    observer.subscribe("late")
    whole = wire.publish_packet("late", b"at last", version=version)
    waiting = [virtual.connect(version=version) for _ in range(len(whole) - 1)]
    for end, client in enumerate(waiting, start=1):
        client.send(whole[:end])
    observer.expect_nothing()
    for end, client in enumerate(waiting, start=1):
        client.send(whole[end:])
        assert b"at last" == observer.receive().payload
