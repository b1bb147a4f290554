"""3.9 SUBACK: its codes, their order, its size."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.cases import both_versions, each, every_qos
from tests.support.clauses import clause
from tests.support.wire import DISCONNECT, SUBACK, Client, Closed, prop, subscribe_packet

Connect = Callable[..., Client]

MAXIMUM_PACKET_SIZE = 0x27

#: Table 3-8 of MQTT 5, and the return codes of 3.1.1.
CODES = {
    4: {0x00, 0x01, 0x02, 0x80},
    5: {0x00, 0x01, 0x02, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2},
}


@clause(v3="MQTT-3.9.3-1", v5="MQTT-3.9.3-1")
@both_versions
def test_codes_stand_in_the_order_of_the_filters(connect: Connect, name: str, version: int) -> None:
    """Fifty filters with differing QoS are answered with fifty codes in the same order [MQTT-3.9.3-1]."""
    asked = [(7 * n + n // 5) % 3 for n in range(50)]
    client = connect(version=version)
    assert asked == client.subscribe([(f"{name}/{n}", qos) for n, qos in enumerate(asked)]).reasons


@clause(v3="MQTT-3.9.3-2", v5="MQTT-3.9.3-2")
@both_versions
@each(wrong=("{}/#/x", "{}/a+", "$share/g", "$share//{}"))
def test_a_suback_uses_defined_codes_only(connect: Connect, name: str, version: int, wrong: str) -> None:
    """Where a wrong filter is answered by a SUBACK, each of its codes is defined for SUBACK [MQTT-3.9.3-2]."""
    client = connect(version=version)
    filters = [(f"{name}/a", 0), (wrong.format(name), 1), (f"{name}/b", 2)]
    client.send(subscribe_packet(1, filters, version=version))
    try:
        answer = client.recv()
    except Closed:
        assert version < 5, "MQTT 5 clients are told why"
        return
    if answer.type == DISCONNECT:
        assert answer.reason in (0x81, 0x82, 0x8F)
        return
    assert SUBACK == answer.type
    assert 3 == len(answer.reasons)
    assert set(answer.reasons) <= CODES[version]
    assert (0, 2) == (answer.reasons[0], answer.reasons[2])


@clause(v3="MQTT-3.9.3-2", v5="MQTT-3.9.3-2")
@both_versions
@every_qos
def test_each_qos_is_granted_as_asked(connect: Connect, name: str, version: int, qos: int) -> None:
    """The node supports all three QoS and says so in the SUBACK [MQTT-3.9.3-2]."""
    assert [qos] == connect(version=version).subscribe(name, qos).reasons


@clause(v5=("MQTT-3.9.2-1", "MQTT-3.9.2-2"))
def test_a_suback_fits_into_the_maximum_packet_size(connect: Connect, name: str) -> None:
    """Reason string and user properties never push a SUBACK, also one of a refusal, over the client's maximum
    [MQTT-3.9.2-1] [MQTT-3.9.2-2].
    """
    client = connect(properties=prop(MAXIMUM_PACKET_SIZE, 20))
    filters = [(f"{name}/a", 0), ("$share/g+/x", 1)]
    client.send(subscribe_packet(1, filters))
    answer = client.recv()
    assert answer.type in (SUBACK, DISCONNECT)
    assert len(answer.raw) <= 20
    if answer.type == SUBACK:
        assert [0, 0x8F] == answer.reasons
