"""Sections 3.12 and 3.13: PINGREQ and PINGRESP."""

from __future__ import annotations

from tests.support.cases import each
from tests.support.clauses import clause
from tests.support.wire import PINGREQ, PINGRESP, PUBLISH, SUBACK, Connect, publish_packet, subscribe_packet


@clause(v3="MQTT-3.12.4-1", v5="MQTT-3.12.4-1")
@each(version=(3, 4, 5), keepalive=(0, 60))
def test_each_pingreq_is_answered_once(connect: Connect, name: str, version: int, keepalive: int) -> None:
    """With or without a keep alive, alone or between other packets in one write [MQTT-3.12.4-1]."""
    client = connect(version=version, keepalive=keepalive)
    client.send(PINGREQ * 3)
    assert [b"\xd0\x00"] * 3 == [client.expect(PINGRESP).raw for _ in range(3)]
    subscribe, publish = subscribe_packet(1, [(name, 0)], version=version), publish_packet(name, version=version)
    client.send(subscribe + PINGREQ + publish)
    assert {SUBACK, PINGRESP, PUBLISH} == {client.recv().type for _ in range(3)}
    client.expect_nothing()
