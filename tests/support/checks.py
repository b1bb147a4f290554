"""What several conformance tests look for: a connection that was refused, messages around an acknowledgement.

A broker may send messages of a new subscription before its SUBACK (3.8.4 of both specifications), so tests that expect
retained messages collect both without asking for an order.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support import wire

MALFORMED, PROTOCOL_ERROR, FILTER_INVALID, TOPIC_INVALID = 0x81, 0x82, 0x8F, 0x90

#: Subscription options of MQTT 5; the QoS is added to them.
NO_LOCAL, RETAIN_AS_PUBLISHED, RETAIN_IF_NEW, RETAIN_NEVER = 0x04, 0x08, 0x10, 0x20

both_versions = pytest.mark.parametrize("version", [4, 5], ids=["3.1.1", "5"])


def assert_filter_refused(client: wire.Client, topic_filter: str, options: int = 0) -> None:
    """Subscribing fails, by a code in the SUBACK or by the end of the connection: the specifications leave it open."""
    client.send(wire.subscribe_packet(client.next_id(), [(topic_filter, options)], version=client.version))
    try:
        answer = client.recv()
    except wire.Closed:
        assert client.version < 5, "MQTT 5 clients are told why"
        return
    if answer.type == wire.SUBACK:
        assert [FILTER_INVALID if client.version == 5 else 0x80] == answer.reasons
        return
    assert answer.type == wire.DISCONNECT, f"unexpected {answer.name}"
    assert answer.reason in (MALFORMED, PROTOCOL_ERROR, FILTER_INVALID)
    assert [] == client.expect_closed()


def subscribe_and_take(
    client: wire.Client,
    filters: str | Sequence[tuple[str, int]],
    options: int = 0,
    *,
    count: int,
    properties: bytes = b"",
) -> list[wire.Packet]:
    """Subscribe, then read the SUBACK and `count` messages in any order; no other message may follow.

    The messages are acknowledged; the PINGRESP that ends the reading stands behind the last PUBREL.
    """
    pairs = [(filters, options)] if isinstance(filters, str) else list(filters)
    client.send(wire.subscribe_packet(client.next_id(), pairs, version=client.version, properties=properties))
    messages: list[wire.Packet] = []
    granted: wire.Packet | None = None
    asked = False
    while True:
        packet = client.recv()
        if packet.type == wire.PUBLISH:
            messages.append(packet)
            acknowledge(client, packet)
        elif packet.type == wire.SUBACK:
            granted = packet
        elif packet.type == wire.PUBREL:
            assert packet.packet_id is not None
            client.send(wire.ack_packet(wire.PUBCOMP, packet.packet_id, version=client.version))
        else:
            assert packet.type == wire.PINGRESP, f"unexpected {packet.name}"
            break
        if granted and len(messages) >= count and not asked:
            client.send(wire.PINGREQ)
            asked = True
    assert granted is not None
    assert all(code <= 2 for code in granted.reasons), f"not granted: {granted.reasons}"
    assert count == len(messages)
    return messages


def acknowledge(client: wire.Client, message: wire.Packet) -> None:
    """Send the first answer to a message of QoS 1 or 2."""
    if message.qos:
        assert message.packet_id is not None
        kind = wire.PUBACK if message.qos == 1 else wire.PUBREC
        client.send(wire.ack_packet(kind, message.packet_id, version=client.version))
