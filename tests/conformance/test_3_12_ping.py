"""Sections 3.12 and 3.13: PINGREQ and PINGRESP."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.cases import every_version
from tests.support.clauses import clause
from tests.support.wire import PINGREQ, PINGRESP, PUBLISH, SUBACK, Client, publish_packet, subscribe_packet

Connect = Callable[..., Client]


@clause(v3="MQTT-3.12.4-1", v5="MQTT-3.12.4-1")
@every_version
def test_pingreq_is_answered(connect: Connect, version: int) -> None:
    """Each PINGREQ gets one PINGRESP of two bytes [MQTT-3.12.4-1]."""
    client = connect(version=version)
    client.send(PINGREQ * 3)
    assert [b"\xd0\x00"] * 3 == [client.expect(PINGRESP).raw for _ in range(3)]
    client.expect_nothing()


@clause(v3="MQTT-3.12.4-1", v5="MQTT-3.12.4-1")
@every_version
def test_pingreq_is_answered_without_a_keep_alive(connect: Connect, version: int) -> None:
    """A client may ping whenever it likes, also when it asked for no keep alive [MQTT-3.12.4-1]."""
    client = connect(version=version, keepalive=0)
    client.expect_nothing()


@clause(v3="MQTT-3.12.4-1", v5="MQTT-3.12.4-1")
@every_version
def test_pingreq_among_other_packets_is_answered(connect: Connect, name: str, version: int) -> None:
    """PINGREQ between other packets in one write is answered once, and so are they [MQTT-3.12.4-1]."""
    client = connect(version=version)
    client.send(
        subscribe_packet(1, [(name, 0)], version=version) + PINGREQ + publish_packet(name, b"x", version=version)
    )
    assert {SUBACK, PINGRESP, PUBLISH} == {client.recv().type for _ in range(3)}
    client.expect_nothing()
