"""The codec over the whole table of malformed packets. What a broker answers: tests/conformance/test_4_13_*."""

from __future__ import annotations

from collections.abc import Callable

from motorcade.broker.limits import Limits
from motorcade.mqtt.codec import Decoder, decode
from motorcade.mqtt.reasons import ProtocolError
from tests.support.malformed import ALL, kinds_of_answer
from tests.support.wire import CONNECT, packet

LIMITS = Limits()


def _judged(codec: Callable[..., object], *given: object) -> int | None:
    """The reason for which the codec refuses; None if it finds nothing wrong."""
    try:
        codec(*given)
    except ProtocolError as error:
        return error.reason if str(error) else 0  # it must also say what is wrong
    return None


def test_the_codec_refuses_every_malformed_packet_with_its_reason() -> None:
    """Whole packets as they come, and their bodies in a right frame."""
    wrong = []
    for row in ALL:
        if row.opening and row.type != CONNECT:
            continue  # whoever does not begin with CONNECT is closed by the broker before the rest has come
        wanted = None if row.state else row.reason
        largest = LIMITS.max_connect_size if row.opening else LIMITS.max_packet_size
        found = [_judged(Decoder(row.version, max_size=largest).feed, row.raw)]
        if row.raw == packet(row.raw[0], row.raw[2:]):  # a length of one byte, and a true one
            found.append(_judged(decode, row.raw[0], row.raw[2:], row.version))
        if {wanted} != set(found):
            wrong.append(f"{row}: {found} instead of {wanted!r}")
    assert [] == wrong


def test_rows_have_names_of_their_own_and_some_are_of_each_kind() -> None:
    names = [str(row) for row in ALL]
    assert len(names) == len(set(names))
    assert 30 <= len(kinds_of_answer()) <= 60
