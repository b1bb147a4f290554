"""Section 4.2: the transport is an ordered, lossless stream of bytes (WebSocket: test_6_*)."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.cases import both_versions
from tests.support.clauses import clause
from tests.support.wire import PUBLISH, Client, publish_packet

Connect = Callable[..., Client]


@clause(v5="MQTT-4.2-1")
@both_versions
def test_tcp_carries_every_byte_in_order(connect: Connect, name: str, version: int) -> None:
    """What is sent over TCP in pieces of any size arrives complete and in order [MQTT-4.2-1]."""
    subscriber, publisher = connect(version=version), connect(version=version)
    subscriber.subscribe(name, 1)
    payloads = [bytes([number]) * (number * 997) for number in range(30)]
    stream = b"".join(
        publish_packet(name, payload, version=version, qos=1, packet_id=number + 1)
        for number, payload in enumerate(payloads)
    )
    for at in range(0, len(stream), 1009):  # pieces that never end where a packet ends
        publisher.send(stream[at : at + 1009])
    assert list(range(1, 31)) == [publisher.recv().packet_id for _ in range(30)]
    assert payloads == [subscriber.receive().payload for _ in range(30)]


@clause(v5="MQTT-4.2-1")
@both_versions
def test_a_large_message_arrives_whole(connect: Connect, name: str, version: int) -> None:
    """A message of nearly the maximum packet size passes unharmed [MQTT-4.2-1]."""
    subscriber, publisher = connect(version=version), connect(version=version)
    subscriber.subscribe(name)
    payload = bytes(range(256)) * 4000
    publisher.publish(name, payload)
    assert payload == subscriber.expect(PUBLISH).payload
