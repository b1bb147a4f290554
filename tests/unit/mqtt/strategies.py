"""Hypothesis strategies for every packet that can be said in a version, and for damage to bytes.

Which packet may carry which property is written down here a second time, by packet, from the sections of the
specification; the codec has it by property, from table 2-4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

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
from motorcade.mqtt.properties import NONE, Properties

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
topics = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0+#"), min_size=1, max_size=12)
filters = topics | st.sampled_from(("#", "+", "/", "a/+/#", "+/+", "$share/g/a/#", "$SYS/#"))
blobs = st.binary(max_size=12)
payloads = st.binary(max_size=200)
flags = st.integers(0, 1)
twos = st.integers(0, 0xFFFF)
fours = st.integers(0, 0xFFFF_FFFF)
packet_ids = st.integers(1, 0xFFFF)
qualities = st.integers(0, 2)
subscription_ids = st.one_of(st.integers(1, 300), st.integers(1, 268_435_455))
user_properties = st.lists(st.tuples(texts, texts), max_size=3).map(tuple)

_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "payload_format": flags,
    "message_expiry": fours,
    "content_type": texts,
    "response_topic": topics,
    "correlation_data": blobs,
    "session_expiry": fours,
    "assigned_client_id": texts,
    "server_keep_alive": twos,
    "authentication_method": texts,
    "authentication_data": blobs,
    "request_problem_information": flags,
    "will_delay": fours,
    "request_response_information": flags,
    "response_information": texts,
    "server_reference": texts,
    "reason_string": texts,
    "receive_maximum": st.integers(1, 0xFFFF),
    "topic_alias_maximum": twos,
    "topic_alias": st.integers(1, 0xFFFF),
    "maximum_qos": flags,
    "retain_available": flags,
    "maximum_packet_size": st.integers(1, 0xFFFF_FFFF),
    "wildcard_available": flags,
    "subscription_ids_available": flags,
    "shared_available": flags,
}


def _properties(*names: str) -> st.SearchStrategy[Properties]:
    """Any of the named properties, and user properties, which every packet may have."""
    some = {name: st.none() | _VALUES[name] for name in names}
    return st.just(NONE) | st.builds(Properties, user_properties=user_properties, **some).map(_with_method)


def _with_method(properties: Properties) -> Properties:
    """Authentication data goes with a method only."""
    if properties.authentication_method is None and properties.authentication_data is not None:
        return replace(properties, authentication_method="m")
    return properties


_message = ("payload_format", "message_expiry", "content_type", "response_topic", "correlation_data")
_authentication = ("authentication_method", "authentication_data")
will_properties = _properties(*_message, "will_delay")
connect_properties = _properties(
    "session_expiry",
    "receive_maximum",
    "maximum_packet_size",
    "topic_alias_maximum",
    "request_response_information",
    "request_problem_information",
    *_authentication,
)
connack_properties = _properties(
    "session_expiry",
    "receive_maximum",
    "maximum_qos",
    "retain_available",
    "maximum_packet_size",
    "assigned_client_id",
    "topic_alias_maximum",
    "reason_string",
    "wildcard_available",
    "subscription_ids_available",
    "shared_available",
    "server_keep_alive",
    "response_information",
    "server_reference",
    *_authentication,
)
answer_properties = _properties("reason_string")
disconnect_properties = _properties("session_expiry", "reason_string", "server_reference")


@st.composite
def publish_properties(draw: st.DrawFn) -> Properties:
    properties = draw(_properties(*_message, "topic_alias"))
    return replace(properties, subscription_ids=tuple(draw(st.lists(subscription_ids, max_size=3))))


def _reasons(*codes: int) -> st.SearchStrategy[ReasonCode]:
    return st.sampled_from([ReasonCode(code) for code in codes])


_received = _reasons(0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99)
_released = _reasons(0x00, 0x92)
_subscribed = _reasons(0x00, 0x01, 0x02, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2)
_unsubscribed = _reasons(0x00, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91)
_connected_3 = _reasons(0x00, 0x84, 0x85, 0x88, 0x86, 0x87)
_connected = _reasons(
    *(0x00, 0x80, 0x81, 0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8A, 0x8C, 0x90, 0x95, 0x97, 0x99),
    *(0x9A, 0x9B, 0x9C, 0x9D, 0x9F),
)
_disconnected = _reasons(
    *(0x00, 0x04, 0x80, 0x81, 0x82, 0x83, 0x87, 0x89, 0x8B, 0x8D, 0x8E, 0x8F, 0x90, 0x93, 0x94, 0x95, 0x96, 0x97),
    *(0x98, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9E, 0x9F, 0xA0, 0xA1, 0xA2),
)


@st.composite
def connects(draw: st.DrawFn, version: int) -> Connect:
    new = version == 5
    properties = connect_properties if new else st.just(NONE)
    wills = st.builds(Will, topics, payloads, qualities, st.booleans(), will_properties if new else st.just(NONE))
    username = draw(st.none() | texts)
    password = draw(st.none() | blobs) if new or username is not None else None
    return Connect(
        draw(texts),
        version,
        draw(st.booleans()),
        draw(twos),
        username,
        password,
        draw(st.none() | wills),
        draw(properties),
    )


@st.composite
def connacks(draw: st.DrawFn, version: int) -> Connack:
    reason = draw(_connected if version == 5 else _connected_3)
    present = reason == ReasonCode.SUCCESS and version != 3 and draw(st.booleans())
    return Connack(reason, present, draw(connack_properties) if version == 5 else NONE)


@st.composite
def publishes(draw: st.DrawFn, version: int) -> Publish:
    properties = draw(publish_properties()) if version == 5 else NONE
    qos = draw(qualities)
    return Publish(
        draw(topics | st.just("") if properties.topic_alias is not None else topics),
        draw(payloads),
        qos,
        draw(st.booleans()),
        draw(st.booleans()) if qos else False,
        draw(packet_ids) if qos else 0,
        properties,
    )


@st.composite
def subscribes(draw: st.DrawFn, version: int) -> Subscribe:
    if version != 5:
        old = st.builds(Subscription, filters, qualities)
        return Subscribe(draw(packet_ids), tuple(draw(st.lists(old, min_size=1, max_size=4))))
    properties = draw(_properties())
    identifier = draw(st.just(0) | subscription_ids)
    if identifier:
        properties = replace(properties, subscription_ids=(identifier,))
    new = st.builds(Subscription, filters, qualities, st.booleans(), st.booleans(), qualities, st.just(identifier))
    new = new.filter(lambda wanted: not (wanted.no_local and wanted.filter.startswith("$share/")))
    return Subscribe(draw(packet_ids), tuple(draw(st.lists(new, min_size=1, max_size=4))), properties)


def _lists(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, min_size=1, max_size=4).map(tuple)


@st.composite
def auths(draw: st.DrawFn) -> Auth:
    if draw(st.booleans()):
        return Auth()
    properties = draw(_properties(*_authentication, "reason_string"))
    if properties.authentication_method is None:
        properties = replace(properties, authentication_method=draw(texts))
    return Auth(draw(_reasons(0x00, 0x18, 0x19)), properties)


def packets(version: int) -> st.SearchStrategy[Packet]:
    """Every packet that `version` can say."""
    if version == 5:
        own: list[st.SearchStrategy[Any]] = [
            st.builds(Puback, packet_ids, _received, answer_properties),
            st.builds(Pubrec, packet_ids, _received, answer_properties),
            st.builds(Pubrel, packet_ids, _released, answer_properties),
            st.builds(Pubcomp, packet_ids, _released, answer_properties),
            st.builds(Suback, packet_ids, _lists(_subscribed), answer_properties),
            st.builds(Unsubscribe, packet_ids, _lists(filters), _properties()),
            st.builds(Unsuback, packet_ids, _lists(_unsubscribed), answer_properties),
            st.builds(Disconnect, _disconnected, disconnect_properties),
            auths(),
        ]
    else:
        own = [
            st.builds(Puback, packet_ids),
            st.builds(Pubrec, packet_ids),
            st.builds(Pubrel, packet_ids),
            st.builds(Pubcomp, packet_ids),
            st.builds(Suback, packet_ids, _lists(_reasons(0x00, 0x01, 0x02, 0x80))),
            st.builds(Unsubscribe, packet_ids, _lists(filters)),
            st.builds(Unsuback, packet_ids),
            st.builds(Disconnect),
        ]
    common: list[st.SearchStrategy[Any]] = [
        connects(version),
        connacks(version),
        publishes(version),
        subscribes(version),
        st.builds(Pingreq),
        st.builds(Pingresp),
    ]
    return st.one_of(*common, *own)


@st.composite
def damaged(draw: st.DrawFn, raw: bytes) -> bytes:
    """`raw` with one to three bytes flipped, put in, taken out or the tail cut off."""
    data = bytearray(raw)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(("flip", "put", "take", "insert", "cut"))):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "put" if data:
                data[at] = draw(st.integers(0, 255))
            case "take" if data:
                del data[at]
            case "insert":
                data.insert(at, draw(st.integers(0, 255)))
            case "cut":
                del data[at:]
    return bytes(data)
