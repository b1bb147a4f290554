"""What a broker answers to a client that broke the rules.

MQTT 5 tells the reason in a CONNACK (before the client was accepted) or a DISCONNECT (after); MQTT 3.1 and 3.1.1 have
no words for it and the connection just ends. Either way the connection is closed and nothing follows the answer.
"""

from __future__ import annotations

from tests.support.wire import CONNACK, DISCONNECT, Client, Closed, Packet

MALFORMED = 0x81
PROTOCOL_ERROR = 0x82
#: Where the specification leaves open which of the two it is.
BROKEN = (MALFORMED, PROTOCOL_ERROR)


def refused(client: Client, *reasons: int) -> Packet | None:
    """Expect that an accepted client is closed, in MQTT 5 after a DISCONNECT with one of `reasons`."""
    seen = client.expect_closed()
    if client.version < 5:
        assert [] == seen, f"3.x has no packet for this, got {[packet.name for packet in seen]}"
        return None
    assert [DISCONNECT] == [packet.type for packet in seen], [packet.name for packet in seen]
    return _checked(seen[0], reasons)


def connect_refused(client: Client, *reasons: int) -> Packet | None:
    """Expect that a broken CONNECT is closed, in MQTT 5 after a CONNACK with one of `reasons`.

    MQTT 3.1.1 forbids a CONNACK for a CONNECT that breaks the format [MQTT-3.1.4-1].
    """
    seen = client.expect_closed()
    if client.version < 5:
        assert [] == seen, f"a broken CONNECT gets no CONNACK in 3.x, got {[packet.name for packet in seen]}"
        return None
    assert [CONNACK] == [packet.type for packet in seen], [packet.name for packet in seen]
    assert not seen[0].session_present
    return _checked(seen[0], reasons)


def _checked(answer: Packet, reasons: tuple[int, ...]) -> Packet:
    wanted = [f"0x{reason:02x}" for reason in reasons]
    assert answer.reason is not None and answer.reason >= 0x80, f"reason 0x{answer.reason or 0:02x} is not an error"
    assert not reasons or answer.reason in reasons, f"reason 0x{answer.reason:02x}, expected one of {wanted}"
    return answer


def bytes_to_the_end(client: Client) -> bytes:
    """Everything until the broker closes, uninterpreted: for answers whose format depends on a guessed version."""
    seen = b""
    while True:
        try:
            seen += client.recv_some()
        except Closed:
            return seen
