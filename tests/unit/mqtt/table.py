"""Packets beside their bytes, written by hand from the specification. Several tests go over this one table."""

from __future__ import annotations

from dataclasses import dataclass

from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.mqtt.packets import (
    Auth,
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
from motorcade.mqtt.properties import Properties


@dataclass(frozen=True)
class PacketCase:
    name: str
    version: int
    packet: Packet
    raw: bytes


def _case(name: str, version: int, packet: Packet, raw: str) -> PacketCase:
    """`raw` is hexadecimal; spaces stand between the fields."""
    return PacketCase(f"v{version} {name}", version, packet, bytes.fromhex(raw))


def _in_mqtt_3(name: str, packet: Packet, raw: str) -> list[PacketCase]:
    return [_case(name, 3, packet, raw), _case(name, 4, packet, raw)]


def _everywhere(name: str, packet: Packet, raw: str) -> list[PacketCase]:
    return [*_in_mqtt_3(name, packet, raw), _case(name, 5, packet, raw)]


_USER = Properties(user_properties=(("a", "1"), ("a", "2")))

PACKETS: list[PacketCase] = [
    # --- CONNECT
    _case("CONNECT, least", 3, Connect("c", 3), "10 0f 0006 4d5149736470 03 02 0000 0001 63"),
    _case("CONNECT, least", 4, Connect("c", 4), "10 0d 0004 4d515454 04 02 0000 0001 63"),
    _case("CONNECT, least", 5, Connect("", 5), "10 0d 0004 4d515454 05 02 0000 00 0000"),
    _case(
        "CONNECT, everything",
        3,
        Connect("c", 3, False, 60, "u", b"p", Will("w", b"!", 2, True)),
        "10 1b 0006 4d5149736470 03 f4 003c 0001 63 0001 77 0001 21 0001 75 0001 70",
    ),
    _case(
        "CONNECT, everything",
        4,
        Connect("c", 4, False, 60, "u", b"p", Will("w", b"!", 1, True)),
        "10 19 0004 4d515454 04 ec 003c 0001 63 0001 77 0001 21 0001 75 0001 70",
    ),
    _case(
        "CONNECT, user name without password",
        4,
        Connect("c", 4, username="u"),
        "10 10 0004 4d515454 04 82 0000 0001 63 0001 75",
    ),
    _case(
        "CONNECT, password without user name",
        5,
        Connect("c", 5, password=b""),
        "10 10 0004 4d515454 05 42 0000 00 0001 63 0000",
    ),
    _case(
        "CONNECT, everything",
        5,
        Connect(
            "c",
            5,
            True,
            65535,
            "u",
            b"\x00\xff",
            Will(
                "w",
                b"",
                0,
                False,
                Properties(
                    payload_format=1,
                    message_expiry=2,
                    content_type="t",
                    response_topic="r",
                    correlation_data=b"\x00",
                    will_delay=3,
                    user_properties=(("k", "v"),),
                ),
            ),
            Properties(
                session_expiry=0xFFFFFFFF,
                authentication_method="m",
                authentication_data=b"d",
                request_problem_information=0,
                request_response_information=1,
                receive_maximum=1,
                topic_alias_maximum=2,
                user_properties=(("k", "v"),),
                maximum_packet_size=256,
            ),
        ),
        "10 5d 0004 4d515454 05 c6 ffff"
        "23 11ffffffff 1500016d 16000164 1700 1901 210001 220002 2600016b000176 2700000100"
        "0001 63"
        "1f 0101 0200000002 03000174 08000172 09000100 1800000003 2600016b000176"
        "0001 77 0000 0001 75 0002 00ff",
    ),
    # --- CONNACK
    *_in_mqtt_3("CONNACK, accepted", Connack(), "20 02 00 00"),
    *_in_mqtt_3("CONNACK, refused", Connack(ReasonCode.NOT_AUTHORIZED), "20 02 00 05"),
    *_in_mqtt_3("CONNACK, version", Connack(ReasonCode.UNSUPPORTED_PROTOCOL_VERSION), "20 02 00 01"),
    _case("CONNACK, session present", 4, Connack(session_present=True), "20 02 01 00"),
    _case("CONNACK, accepted", 5, Connack(), "20 03 00 00 00"),
    _case("CONNACK, refused", 5, Connack(ReasonCode.BANNED), "20 03 00 8a 00"),
    _case(
        "CONNACK, everything",
        5,
        Connack(
            ReasonCode.SUCCESS,
            True,
            Properties(
                session_expiry=1,
                assigned_client_id="i",
                server_keep_alive=2,
                authentication_method="m",
                authentication_data=b"d",
                response_information="r",
                server_reference="s",
                reason_string="x",
                receive_maximum=3,
                topic_alias_maximum=4,
                maximum_qos=1,
                retain_available=0,
                user_properties=(("k", "v"),),
                maximum_packet_size=5,
                wildcard_available=0,
                subscription_ids_available=0,
                shared_available=1,
            ),
        ),
        "20 3f 01 00"
        "3c 1100000001 12000169 130002 1500016d 16000164 1a000172 1c000173 1f000178 210003 220004 2401 2500"
        "2600016b000176 2700000005 2800 2900 2a01",
    ),
    # --- PUBLISH
    *_in_mqtt_3("PUBLISH QoS 0", Publish("a/b", b"hi"), "30 07 0003 612f62 6869"),
    *_in_mqtt_3("PUBLISH QoS 1", Publish("a", b"", 1, packet_id=10), "32 05 0001 61 000a"),
    *_in_mqtt_3("PUBLISH QoS 2, all flags", Publish("a", b"x", 2, True, True, 65535), "3d 06 0001 61 ffff 78"),
    _case("PUBLISH QoS 0", 5, Publish("a", b"hi", retain=True), "31 06 0001 61 00 6869"),
    _case("PUBLISH QoS 1", 5, Publish("a", b"", 1, packet_id=256), "32 06 0001 61 0100 00"),
    _case("PUBLISH by alias", 5, Publish("", b"x", properties=Properties(topic_alias=7)), "30 07 0000 03 230007 78"),
    _case(
        "PUBLISH, byte order mark and last code point",
        5,
        Publish("\ufeff\U0010ffff", b""),
        "30 0a 0007 efbbbf f48fbfbf 00",
    ),
    _case(
        "PUBLISH, everything",
        5,
        Publish(
            "a",
            b"x",
            2,
            False,
            True,
            1,
            Properties(
                payload_format=0,
                message_expiry=1,
                content_type="",
                response_topic="r",
                correlation_data=b"",
                subscription_ids=(1, 128, 268435455),
                topic_alias=65535,
                user_properties=(("b", ""), ("a", "1")),
            ),
        ),
        "3c 32 0001 61 0001"
        "2b 0100 0200000001 030000 08000172 090000 0b01 0b8001 0bffffff7f 23ffff 260001620000 26000161000131"
        "78",
    ),
    _case("PUBLISH of 128 bytes", 4, Publish("a", b"x" * 125), "30 8001 0001 61" + "78" * 125),
    # --- acknowledgements
    *_everywhere("PUBACK", Puback(1), "40 02 0001"),
    *_everywhere("PUBREC", Pubrec(2), "50 02 0002"),
    *_everywhere("PUBREL", Pubrel(3), "62 02 0003"),
    *_everywhere("PUBCOMP", Pubcomp(65535), "70 02 ffff"),
    _case("PUBACK, reason", 5, Puback(1, ReasonCode.NO_MATCHING_SUBSCRIBERS), "40 03 0001 10"),
    _case("PUBREC, reason", 5, Pubrec(1, ReasonCode.QUOTA_EXCEEDED), "50 03 0001 97"),
    _case("PUBREL, reason", 5, Pubrel(1, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND), "62 03 0001 92"),
    _case("PUBCOMP, reason", 5, Pubcomp(1, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND), "70 03 0001 92"),
    _case("PUBACK, properties", 5, Puback(1, properties=_USER), "40 12 0001 00 0e 26000161000131 26000161000132"),
    _case(
        "PUBREC, reason string",
        5,
        Pubrec(1, ReasonCode.NOT_AUTHORIZED, Properties(reason_string="no")),
        "50 09 0001 87 05 1f00026e6f",
    ),
    _case("PUBREL, reason string", 5, Pubrel(1, properties=Properties(reason_string="")), "62 07 0001 00 03 1f0000"),
    _case("PUBCOMP, properties", 5, Pubcomp(1, properties=_USER), "70 12 0001 00 0e 26000161000131 26000161000132"),
    # --- SUBSCRIBE, SUBACK
    *_in_mqtt_3("SUBSCRIBE", Subscribe(1, (Subscription("a/#", 1),)), "82 08 0001 0003 612f23 01"),
    *_in_mqtt_3(
        "SUBSCRIBE, two filters",
        Subscribe(2, (Subscription("a", 0), Subscription("+", 2))),
        "82 0a 0002 0001 61 00 0001 2b 02",
    ),
    _case("SUBSCRIBE", 5, Subscribe(1, (Subscription("#"),)), "82 07 0001 00 0001 23 00"),
    _case(
        "SUBSCRIBE, all options",
        5,
        Subscribe(
            1,
            (Subscription("a", 2, True, True, 2, 200), Subscription("b", 1, False, True, 1, 200)),
            Properties(subscription_ids=(200,), user_properties=(("k", "v"),)),
        ),
        "82 15 0001 0a 0bc801 2600016b000176 0001 61 2e 0001 62 19",
    ),
    *_in_mqtt_3("SUBACK", Suback(1, (ReasonCode.SUCCESS,)), "90 03 0001 00"),
    *_in_mqtt_3(
        "SUBACK, all codes",
        Suback(
            9,
            (
                ReasonCode.GRANTED_QOS_2,
                ReasonCode.GRANTED_QOS_1,
                ReasonCode.SUCCESS,
                ReasonCode.UNSPECIFIED_ERROR,
            ),
        ),
        "90 06 0009 02 01 00 80",
    ),
    _case(
        "SUBACK",
        5,
        Suback(1, (ReasonCode.GRANTED_QOS_1, ReasonCode.TOPIC_FILTER_INVALID), Properties(reason_string="f")),
        "90 09 0001 04 1f000166 01 8f",
    ),
    # --- UNSUBSCRIBE, UNSUBACK
    *_in_mqtt_3("UNSUBSCRIBE", Unsubscribe(1, ("a", "b")), "a2 08 0001 0001 61 0001 62"),
    _case("UNSUBSCRIBE", 5, Unsubscribe(1, ("a",)), "a2 06 0001 00 0001 61"),
    _case(
        "UNSUBSCRIBE, properties",
        5,
        Unsubscribe(1, ("a",), _USER),
        "a2 14 0001 0e 26000161000131 26000161000132 000161",
    ),
    *_in_mqtt_3("UNSUBACK", Unsuback(1), "b0 02 0001"),
    _case(
        "UNSUBACK",
        5,
        Unsuback(1, (ReasonCode.SUCCESS, ReasonCode.NO_SUBSCRIPTION_EXISTED)),
        "b0 05 0001 00 00 11",
    ),
    # --- the rest
    *_everywhere("PINGREQ", Pingreq(), "c0 00"),
    *_everywhere("PINGRESP", Pingresp(), "d0 00"),
    *_everywhere("DISCONNECT", Disconnect(), "e0 00"),
    _case("DISCONNECT, reason", 5, Disconnect(ReasonCode.DISCONNECT_WITH_WILL), "e0 01 04"),
    _case(
        "DISCONNECT, everything",
        5,
        Disconnect(
            ReasonCode.SERVER_MOVED,
            Properties(session_expiry=0, server_reference="s", reason_string="r", user_properties=(("k", "v"),)),
        ),
        "e0 16 9d 14 1100000000 1c000173 1f000172 2600016b000176",
    ),
    _case("AUTH, silent", 5, Auth(), "f0 00"),
    _case(
        "AUTH, everything",
        5,
        Auth(
            ReasonCode.CONTINUE_AUTHENTICATION,
            Properties(
                authentication_method="m", authentication_data=b"", reason_string="r", user_properties=(("", ""),)
            ),
        ),
        "f0 12 18 10 1500016d 160000 1f000172 2600000000",
    ),
]
