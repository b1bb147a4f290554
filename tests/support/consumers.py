"""Clients that consume queues, streams and other sources, and those that fill them.

Sources read from stores in the background, so a PINGRESP does not tell that nothing more is under way. Tests that say
"nothing comes" send a message that must come behind it, and look at what came before.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from tests.support import wire
from tests.support.flows import REASON_STRING, RECEIVE_MAXIMUM, SESSION_EXPIRY, USER_PROPERTY, acknowledge

FILTER_INVALID, TOPIC_INVALID, QUOTA_EXCEEDED, SHARED_NOT_SUPPORTED = 0x8F, 0x90, 0x97, 0x9E

#: Messages that are published before their acknowledgements are read. MQTT 3 knows no receive maximum.
LOT = 500


def unique(word: str) -> str:
    """A name that no other test uses."""
    return f"{word}-{uuid.uuid4().hex[:10]}"


def connected(
    address: wire.Address, client_id: str = "", version: int = 5, *properties: bytes, **options: Any
) -> wire.Client:
    """A client that was accepted, with a session that ends with it."""
    client = wire.Client(address, version=version)
    if version >= 5 and properties:
        options["properties"] = b"".join(properties)
    client.connack = client.connect(client_id or unique("c"), keepalive=0, **options)
    assert 0 == client.connack.reason, f"CONNECT refused with 0x{client.connack.reason or 0:02x}"
    return client


def lasting(address: wire.Address, client_id: str, version: int = 5, *properties: bytes) -> wire.Client:
    """A client whose session outlives its connection, new or taken up again."""
    return connected(address, client_id, version, wire.prop(SESSION_EXPIRY, 3600), *properties, clean=False)


def receive_maximum(count: int) -> bytes:
    return wire.prop(RECEIVE_MAXIMUM, count)


def user(key: str, value: str) -> bytes:
    return wire.prop(USER_PROPERTY, (key, value))


def user_property(message: wire.Packet, key: str) -> str:
    """The only value of a user property."""
    values = [value for name, value in message.prop_all(USER_PROPERTY) if name == key]
    assert 1 == len(values), f"{key}: {values}"
    return str(values[0])


def subscribe(client: wire.Client, filter_: str, qos: int = 1, *properties: bytes) -> wire.Packet:
    """Subscribe and be granted it; messages that come before the SUBACK are kept for `recv`."""
    answer = ask(client, filter_, qos, *properties)
    assert [min(qos & 3, 1) if filter_.startswith(("$queue/", "$stream/")) else qos & 3] == answer.reasons, (
        f"{filter_}: SUBACK {answer.reasons}, {answer.prop(REASON_STRING)}"
    )
    return answer


def ask(client: wire.Client, filter_: str, qos: int = 1, *properties: bytes) -> wire.Packet:
    """SUBSCRIBE; the SUBACK, whatever it says."""
    packet_id = client.next_id()
    client.send(
        wire.subscribe_packet(packet_id, [(filter_, qos)], version=client.version, properties=b"".join(properties))
    )
    return client.await_answer(wire.SUBACK, packet_id)


def unsubscribe(client: wire.Client, filter_: str) -> list[wire.Packet]:
    """Unsubscribe; the messages that came before the UNSUBACK."""
    packet_id = client.next_id()
    client.send(wire.unsubscribe_packet(packet_id, [filter_], version=client.version))
    answer = client.await_answer(wire.UNSUBACK, packet_id)
    assert all(reason == 0 for reason in answer.reasons), answer.reasons
    before = list(client.pending)
    client.pending.clear()
    return before


def fill(address: wire.Address, messages: Iterable[tuple[str, bytes]], *properties: bytes, qos: int = 1) -> None:
    """Publish in order, in large lots, until the node has taken responsibility for all of them.

    Properties need MQTT 5, whose clients may have fewer under way.
    """
    version = 5 if properties else 4
    with connected(address, version=version) as client:
        lot: list[tuple[str, bytes]] = []
        for message in messages:
            lot.append(message)
            if len(lot) >= (LOT if version == 4 else 50):
                _publish_lot(client, lot, b"".join(properties), qos)
                lot = []
        _publish_lot(client, lot, b"".join(properties), qos)


def _publish_lot(client: wire.Client, lot: Sequence[tuple[str, bytes]], properties: bytes, qos: int) -> None:
    packets: list[bytes] = []
    waiting: set[int | None] = set()
    for topic, payload in lot:
        packet_id = client.next_id() if qos else None
        packets.append(
            wire.publish_packet(
                topic, payload, version=client.version, qos=qos, packet_id=packet_id, properties=properties
            )
        )
        if qos:
            waiting.add(packet_id)
    client.send(b"".join(packets))
    while waiting:
        answer = client.expect(wire.PUBACK)
        assert (answer.reason or 0) < 0x80, f"PUBACK 0x{answer.reason:02x}"
        waiting.remove(answer.packet_id)
    if not qos:
        client.expect_nothing()


def take(client: wire.Client, count: int, *, ack: bool = True, timeout: float = wire.PATIENCE) -> list[wire.Packet]:
    """The next messages; nothing else may come in between."""
    messages: list[wire.Packet] = []
    while len(messages) < count:
        message = client.recv(timeout)
        assert wire.PUBLISH == message.type, f"unexpected {message.name} after {len(messages)} messages"
        messages.append(message)
        if ack and message.qos:
            acknowledge(client, message)
    return messages


def take_until(client: wire.Client, last: bytes, *, ack: bool = True) -> list[wire.Packet]:
    """All messages before the one with this payload, which is taken too."""
    messages: list[wire.Packet] = []
    while True:
        message = take(client, 1, ack=ack)[0]
        if message.payload == last:
            if not ack and message.qos:
                acknowledge(client, message)
            return messages
        messages.append(message)


def ack_all(client: wire.Client, messages: Iterable[wire.Packet], reason: int | None = None) -> None:
    """PUBACK for each of them, in one write."""
    client.send(
        b"".join(
            wire.ack_packet(wire.PUBACK, message.packet_id or 0, version=client.version, reason=reason)
            for message in messages
            if message.qos
        )
    )


def settled(client: wire.Client) -> list[wire.Packet]:
    """The node has read everything that the client has sent; the messages that came before it said so."""
    client.send(wire.PINGREQ)
    before: list[wire.Packet] = []
    while True:
        found = client.recv()
        if found.type == wire.PINGRESP:
            return before
        assert wire.PUBLISH == found.type, f"unexpected {found.name}"
        before.append(found)


def payloads(messages: Iterable[wire.Packet]) -> list[bytes]:
    return [message.payload for message in messages]


def numbers(messages: Iterable[wire.Packet]) -> list[int]:
    """Payloads that are numbers."""
    return [int(message.payload.split()[0]) for message in messages]


def numbered(topic: str, count: int, start: int = 0, padding: int = 0) -> list[tuple[str, bytes]]:
    """Messages for `fill` that tell their place."""
    return [(topic, b"%d" % number + b" " * bool(padding) + b"x" * padding) for number in range(start, start + count)]
