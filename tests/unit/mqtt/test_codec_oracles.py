"""Our codec beside two that are not ours: `mqtt5` (MQTT 5, Rust) both ways, and `gmqtt`'s writers for MQTT 3.

`mqtt5` does not tell a property that is absent from one that has its default value; packets are compared in its terms.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gmqtt
import mqtt5
from gmqtt.mqtt import package as gmqtt_package
from gmqtt.mqtt.constants import MQTTCommands
from hypothesis import given, settings
from hypothesis import strategies as st

from motorcade.core.errors import TopicError
from motorcade.core.reasons import ReasonCode
from motorcade.core.topic import check_filter, split_share
from motorcade.mqtt.codec import MAX_PACKET, Decoder, decode, encode, split
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
from motorcade.mqtt.properties import NONE, Properties
from motorcade.mqtt.reasons import ProtocolError
from motorcade.mqtt.wire import varint
from tests.support.cases import each
from tests.unit.mqtt import strategies
from tests.unit.mqtt.table import PACKETS, PacketCase

# --- MQTT 5 -------------------------------------------------------------------------------------------------------


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _message(properties: Properties) -> dict[str, Any]:
    return {
        "payload_format_indicator": _or(properties.payload_format, 0),
        "message_expiry_interval": properties.message_expiry,
        "content_type": properties.content_type,
        "response_topic": properties.response_topic,
        "correlation_data": properties.correlation_data,
        "user_properties": list(properties.user_properties),
    }


def _will(will: Will | None) -> mqtt5.Will | None:
    if will is None:
        return None
    return mqtt5.Will(
        will.topic,
        payload=will.payload,
        qos=mqtt5.QoS(will.qos),
        retain=will.retain,
        will_delay_interval=_or(will.properties.will_delay, 0),
        **_message(will.properties),
    )


def _answer(properties: Properties) -> dict[str, Any]:
    return {"reason_str": properties.reason_string, "user_properties": list(properties.user_properties)}


def _authentication(properties: Properties) -> dict[str, Any]:
    return {
        "authentication_method": properties.authentication_method,
        "authentication_data": properties.authentication_data,
    }


def _connect(packet: Connect) -> mqtt5.Packet:
    p = packet.properties
    return mqtt5.ConnectPacket(
        packet.client_id,
        username=packet.username,
        password=packet.password,
        clean_start=packet.clean_start,
        will=_will(packet.will),
        keep_alive=packet.keep_alive,
        session_expiry_interval=_or(p.session_expiry, 0),
        request_problem_info=bool(_or(p.request_problem_information, 1)),
        request_response_info=bool(_or(p.request_response_information, 0)),
        receive_max=_or(p.receive_maximum, 65535),
        topic_alias_max=_or(p.topic_alias_maximum, 0),
        max_packet_size=p.maximum_packet_size,
        user_properties=list(p.user_properties),
        **_authentication(p),
    )


def _connack(packet: Connack) -> mqtt5.Packet:
    p = packet.properties
    return mqtt5.ConnAckPacket(
        session_present=packet.session_present,
        reason_code=mqtt5.ConnAckReasonCode(packet.reason),
        session_expiry_interval=p.session_expiry,
        assigned_client_id=p.assigned_client_id,
        server_keep_alive=p.server_keep_alive,
        response_info=p.response_information,
        server_reference=p.server_reference,
        receive_max=_or(p.receive_maximum, 65535),
        topic_alias_max=_or(p.topic_alias_maximum, 0),
        max_qos=mqtt5.QoS(_or(p.maximum_qos, 2)),
        retain_available=bool(_or(p.retain_available, 1)),
        max_packet_size=p.maximum_packet_size,
        wildcard_subscription_available=bool(_or(p.wildcard_available, 1)),
        subscription_id_available=bool(_or(p.subscription_ids_available, 1)),
        shared_subscription_available=bool(_or(p.shared_available, 1)),
        **_authentication(p),
        **_answer(p),
    )


def _publish(packet: Publish) -> mqtt5.Packet:
    return mqtt5.PublishPacket(
        packet.topic,
        packet.payload,
        qos=mqtt5.QoS(packet.qos),
        retain=packet.retain,
        packet_id=packet.packet_id or None,
        duplicate=packet.dup,
        subscription_ids=list(packet.properties.subscription_ids),
        topic_alias=packet.properties.topic_alias,
        **_message(packet.properties),
    )


def _subscribe(packet: Subscribe) -> mqtt5.Packet:
    filters = [
        mqtt5.TopicFilter(
            wanted.filter,
            max_qos=mqtt5.QoS(wanted.qos),
            no_local=wanted.no_local,
            retain_as_published=wanted.retain_as_published,
            retain_handling=mqtt5.RetainHandling(wanted.retain_handling),
        )
        for wanted in packet.subscriptions
    ]
    identifier = packet.properties.subscription_ids[0] if packet.properties.subscription_ids else None
    return mqtt5.SubscribePacket(
        packet.packet_id,
        filters,
        subscription_id=identifier,
        user_properties=list(packet.properties.user_properties),
    )


def theirs(packet: Packet) -> mqtt5.Packet:
    """The same packet in the terms of `mqtt5`."""
    match packet:
        case Connect():
            return _connect(packet)
        case Connack():
            return _connack(packet)
        case Publish():
            return _publish(packet)
        case Puback(packet_id, reason, p):
            return mqtt5.PubAckPacket(packet_id, reason_code=mqtt5.PubAckReasonCode(reason), **_answer(p))
        case Pubrec(packet_id, reason, p):
            return mqtt5.PubRecPacket(packet_id, reason_code=mqtt5.PubRecReasonCode(reason), **_answer(p))
        case Pubrel(packet_id, reason, p):
            return mqtt5.PubRelPacket(packet_id, reason_code=mqtt5.PubRelReasonCode(reason), **_answer(p))
        case Pubcomp(packet_id, reason, p):
            return mqtt5.PubCompPacket(packet_id, reason_code=mqtt5.PubCompReasonCode(reason), **_answer(p))
        case Subscribe():
            return _subscribe(packet)
        case Suback(packet_id, reasons, p):
            return mqtt5.SubAckPacket(packet_id, [mqtt5.SubAckReasonCode(code) for code in reasons], **_answer(p))
        case Unsubscribe(packet_id, filters, p):
            return mqtt5.UnsubscribePacket(packet_id, list(filters), user_properties=list(p.user_properties))
        case Unsuback(packet_id, reasons, p):
            return mqtt5.UnsubAckPacket(packet_id, [mqtt5.UnsubAckReasonCode(code) for code in reasons], **_answer(p))
        case Pingreq():
            return mqtt5.PingReqPacket()
        case Pingresp():
            return mqtt5.PingRespPacket()
        case Disconnect(reason, p):
            return mqtt5.DisconnectPacket(
                reason_code=mqtt5.DisconnectReasonCode(reason),
                session_expiry_interval=p.session_expiry,
                server_reference=p.server_reference,
                **_answer(p),
            )
        case Auth(reason, p):
            return mqtt5.AuthPacket(reason_code=mqtt5.AuthReasonCode(reason), **_authentication(p), **_answer(p))


def _read(raw: bytes) -> mqtt5.Packet:
    packet, length = mqtt5.read(memoryview(raw))
    assert len(raw) == length
    return packet


def _excused(packet: Packet) -> str:
    """Why we read a packet that the oracle refuses, or "" if there is no reason to."""
    match packet:
        case Auth(0, p) if p == NONE:
            return "3.15.2.1: reason code and property length of AUTH may be left out"
        case Disconnect(reason=ReasonCode.BAD_AUTHENTICATION_METHOD):
            return "2.4: table 2-6 lists 0x8C for DISCONNECT (3.14.2.1 forgets it)"
        case Subscribe() | Unsubscribe() if not _filters_are_right(packet):
            return "syntax of topic filters is checked by the broker, which knows how many levels they may have"
        case _:
            return ""


def _filters_are_right(packet: Subscribe | Unsubscribe) -> bool:
    if isinstance(packet, Unsubscribe):
        return all(_filter_is_right(filter_) for filter_ in packet.filters)
    return all(
        _filter_is_right(wanted.filter) and not (wanted.no_local and wanted.filter.startswith("$share/"))
        for wanted in packet.subscriptions
    )


def _filter_is_right(filter_: str) -> bool:
    try:
        check_filter(split_share(filter_)[1])
    except TopicError:
        return False
    return True


_V5 = [case for case in PACKETS if case.version == 5 and not _excused(case.packet)]


@each(case=_V5)
def test_the_oracle_reads_our_table(case: PacketCase) -> None:
    assert theirs(case.packet) == _read(case.raw)


@settings(deadline=None, max_examples=200)
@given(packet=strategies.packets(5).filter(lambda packet: not _excused(packet)))
def test_the_oracle_reads_what_we_write(packet: Packet) -> None:
    assert theirs(packet) == _read(encode(packet, 5))


@settings(deadline=None, max_examples=200)
@given(packet=strategies.packets(5))
def test_we_read_what_the_oracle_writes(packet: Packet) -> None:
    (read,) = Decoder(5).feed(theirs(packet).write())
    assert theirs(packet) == theirs(read)


@settings(deadline=None, max_examples=800)
@given(data=st.data())
def test_we_accept_nothing_that_the_oracle_refuses(data: st.DataObject) -> None:
    """Damaged bodies in right frames: what we accept, it accepts and reads alike, unless the specification says why."""
    whole = encode(data.draw(strategies.packets(5)), 5)
    start, _ = split(whole, 0, MAX_PACKET) or (0, 0)
    first = data.draw(st.just(whole[0]) | st.integers(0, 255))
    body = data.draw(strategies.damaged(whole[start:]))
    try:
        packet = decode(first, body, 5)
    except ProtocolError:
        return
    if _excused(packet) or (isinstance(packet, Connect) and packet.version != 5):
        return
    assert theirs(packet) == _read(bytes((first,)) + varint(len(body)) + body)


# --- MQTT 3 -------------------------------------------------------------------------------------------------------
#
# MQTT 3 leaves no choice in how a packet is written, so equal bytes mean agreement both ways. gmqtt is a client: it
# writes what clients send. What only servers send (CONNACK, SUBACK, UNSUBACK, PINGRESP) it takes apart in passing;
# for these the table stands alone. It counts characters where it should count bytes, so it is handed bytes.


def _gmqtt_protocol(version: int, packet_id: int) -> SimpleNamespace:
    name = b"MQIsdp" if version == 3 else b"MQTT"
    ids = SimpleNamespace(next_id=lambda: packet_id)
    return SimpleNamespace(proto_name=name, proto_ver=version, id_generator=ids)


def _gmqtt_message(topic: str, payload: bytes, qos: int, retain: bool, dup: bool) -> gmqtt.Message:
    message = gmqtt.Message(topic.encode(), payload, qos=qos, retain=retain)
    message.dup = dup
    return message


def _gmqtt_bytes(packet: Packet, version: int) -> bytes | None:
    """What gmqtt writes for `packet`, or None for what only a server sends."""
    build = gmqtt_package
    match packet:
        case Connect():
            will = packet.will
            return bytes(
                build.LoginPackageFactor.build_package(
                    packet.client_id.encode(),
                    None if packet.username is None else packet.username.encode(),
                    packet.password,
                    packet.clean_start,
                    packet.keep_alive,
                    _gmqtt_protocol(version, 0),
                    will and _gmqtt_message(will.topic, will.payload, will.qos, will.retain, False),
                )
            )
        case Publish():
            message = _gmqtt_message(packet.topic, packet.payload, packet.qos, packet.retain, packet.dup)
            _, raw = build.PublishPacket.build_package(message, _gmqtt_protocol(version, packet.packet_id))
            return bytes(raw)
        case Subscribe():
            wanted = [gmqtt.Subscription(one.filter.encode(), qos=one.qos) for one in packet.subscriptions]
            _, raw = build.SubscribePacket.build_package(wanted, _gmqtt_protocol(version, packet.packet_id))
            return bytes(raw)
        case Unsubscribe():
            filters = [filter_.encode() for filter_ in packet.filters]
            _, raw = build.UnsubscribePacket.build_package(filters, _gmqtt_protocol(version, packet.packet_id))
            return bytes(raw)
        case Puback() | Pubrec() | Pubcomp() | Pubrel():
            command = _COMMANDS[type(packet)]
            return bytes(build.CommandWithMidPacket.build_package(command, packet.packet_id, False, proto_ver=version))
        case Pingreq():
            return bytes(build.SimpleCommandPacket.build_package(MQTTCommands.PINGREQ))
        case Disconnect():
            return bytes(build.DisconnectPacket.build_package(_gmqtt_protocol(version, 0)))
        case _:
            return None


_COMMANDS: dict[type[Packet], int] = {
    Puback: MQTTCommands.PUBACK,
    Pubrec: MQTTCommands.PUBREC,
    Pubrel: MQTTCommands.PUBREL | 2,
    Pubcomp: MQTTCommands.PUBCOMP,
}
_BY_SERVERS = (Connack, Suback, Unsuback, Pingresp)


@settings(deadline=None, max_examples=250)
@given(version=st.sampled_from((3, 4)), data=st.data())
def test_gmqtt_writes_the_same_bytes(version: int, data: st.DataObject) -> None:
    packet = data.draw(strategies.packets(version).filter(lambda packet: not isinstance(packet, _BY_SERVERS)))
    raw = _gmqtt_bytes(packet, version)
    assert raw is not None
    assert raw.hex(" ") == encode(packet, version).hex(" ")
    assert [packet] == Decoder(version).feed(raw)
