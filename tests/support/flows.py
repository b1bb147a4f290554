"""Exchanges of many packets, for tests that hold back acknowledgements or look at whole sequences.

`wire.Client.receive` finishes one message before it reads the next, which a broker need not wait for. The functions
here take packets as they come.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.support.wire import (
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    Client,
    Packet,
    ack_packet,
    prop,
    publish_packet,
)

#: Property identifiers (MQTT 5, table 2-4).
PAYLOAD_FORMAT = 0x01
MESSAGE_EXPIRY = 0x02
CONTENT_TYPE = 0x03
RESPONSE_TOPIC = 0x08
CORRELATION_DATA = 0x09
SUBSCRIPTION_ID = 0x0B
SESSION_EXPIRY = 0x11
REASON_STRING = 0x1F
RECEIVE_MAXIMUM = 0x21
TOPIC_ALIAS_MAXIMUM = 0x22
TOPIC_ALIAS = 0x23
USER_PROPERTY = 0x26
MAXIMUM_PACKET_SIZE = 0x27

MALFORMED_PACKET = 0x81
PROTOCOL_ERROR = 0x82
TOPIC_NAME_INVALID = 0x90
PACKET_ID_NOT_FOUND = 0x92
RECEIVE_MAXIMUM_EXCEEDED = 0x93
TOPIC_ALIAS_INVALID = 0x94

#: For statements that hold in all protocol versions, and in those with a clause number.
every_version = pytest.mark.parametrize("version", [3, 4, 5], ids=["3.1", "3.1.1", "5"])
both_versions = pytest.mark.parametrize("version", [4, 5], ids=["3.1.1", "5"])
qos_1_and_2 = pytest.mark.parametrize("qos", [1, 2], ids=["qos1", "qos2"])
every_qos = pytest.mark.parametrize("qos", [0, 1, 2], ids=["qos0", "qos1", "qos2"])

#: Messages a client of this suite has under way at most; below the Receive Maximum that any broker announces here.
PIPELINE = 16


def lasting(version: int, *properties: bytes) -> dict[str, Any]:
    """Options of a CONNECT whose session outlives the connection and is taken up again by the next such CONNECT."""
    if version < 5:
        return {"version": version, "clean": False}
    return {"version": 5, "clean": False, "properties": prop(SESSION_EXPIRY, 3600) + b"".join(properties)}


def acknowledge(client: Client, message: Packet, **kw: Any) -> None:
    """Send the first answer to a PUBLISH of QoS 1 or 2: PUBACK or PUBREC."""
    assert message.packet_id is not None
    client.send(ack_packet(PUBACK if message.qos == 1 else PUBREC, message.packet_id, version=client.version, **kw))


def publish_many(client: Client, topic: str, payloads: Iterable[bytes], qos: int) -> None:
    """Publish in order, several at a time, until the broker has taken responsibility for all of them."""
    waiting: set[int] = set()

    def settle(most: int) -> None:
        while len(waiting) > most:
            answer = client.recv()
            if answer.type == PUBREC:
                assert (answer.reason or 0) < 0x80, f"PUBREC 0x{answer.reason:02x}"
                client.send(ack_packet(PUBREL, answer.packet_id or 0, version=client.version))
                continue
            assert answer.type == (PUBACK if qos == 1 else PUBCOMP), f"unexpected {answer.name}"
            waiting.remove(answer.packet_id or 0)

    for payload in payloads:
        packet_id = client.next_id() if qos else None
        client.send(publish_packet(topic, payload, version=client.version, qos=qos, packet_id=packet_id))
        if packet_id is not None:
            waiting.add(packet_id)
            settle(PIPELINE - 1)
    settle(0)


def receive_until(client: Client, last: bytes) -> list[Packet]:
    """All messages up to and with the one whose payload is `last`, in order, each acknowledged at once."""
    messages: list[Packet] = []
    releases = 0
    while not messages or messages[-1].payload != last or releases:
        found = client.recv()
        if found.type == PUBREL:
            releases -= 1
            client.send(ack_packet(PUBCOMP, found.packet_id or 0, version=client.version))
            continue
        assert found.type == PUBLISH, f"unexpected {found.name} after {len(messages)} messages"
        messages.append(found)
        if found.qos:
            acknowledge(client, found)
            releases += found.qos == 2
    return messages


def payloads(messages: Sequence[Packet]) -> list[bytes]:
    """What the messages say."""
    return [message.payload for message in messages]


def numbered(count: int, start: int = 0) -> list[bytes]:
    """Payloads that tell their place."""
    return [b"%05d" % number for number in range(start, start + count)]


def let_pass(seconds: float) -> None:
    """Let an interval of the protocol pass: the broker counts real seconds, and nothing tells that they are over."""
    time.sleep(seconds)


def hold_unreleased(client: Client, topic: str, count: int, payload: bytes = b"held") -> None:
    """Publish QoS 2 messages up to PUBREC, with the packet ids from 1 to `count`."""
    for number in range(1, count + 1):
        client.send(publish_packet(topic, payload, version=client.version, qos=2, packet_id=number))
        answer = client.expect(PUBREC)
        assert number == answer.packet_id and (answer.reason or 0) < 0x80
