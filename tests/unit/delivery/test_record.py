"""The stored form of a message, and the fields that features add to it."""

from __future__ import annotations

import msgspec
import pytest

from motorcade.core import record as stream_record
from motorcade.core.message import Message
from motorcade.delivery.record import Form, Record, RecordError, message_of, message_with

MESSAGE = Message(
    "a/b",
    b"payload",
    2,
    True,
    "publisher",
    "user",
    bytes(16),
    12.5,
    1,
    99.5,
    "text/plain",
    "answer/here",
    b"\x00\x01",
    (("name", "value"), ("name", "again")),
)


class Numbered(Record, frozen=True, gc=False):
    """A record with fields of a feature."""

    number: int = 0
    note: str = ""


def test_a_message_comes_back_with_the_fields_of_its_feature() -> None:
    """Body and payload give the whole message, and the feature's own fields."""
    form = Form(Numbered)
    body, payload = form.encode(MESSAGE, 7, "seven")
    record = form.decode(body)
    assert payload == b"payload"
    assert message_of(record, payload) == MESSAGE
    assert (record.number, record.note) == (7, "seven")


@pytest.mark.parametrize(("inline", "beside"), [(6, b"payload"), (7, b"")])
def test_a_small_payload_is_in_the_body(inline: int, beside: bytes) -> None:
    """Up to `inline` bytes of payload are in the body; the message is the same either way."""
    form = Form(Numbered, inline=inline)
    body, payload = form.encode(MESSAGE)
    assert payload == beside
    assert message_of(form.decode(body), payload) == MESSAGE


def test_a_stream_record_is_the_same_without_the_fields_of_a_feature() -> None:
    """A form reads stream records, and whoever reads streams reads its bodies."""
    form = Form(Numbered, inline=100)
    assert message_of(form.decode(stream_record.encode(MESSAGE))) == MESSAGE
    assert stream_record.decode(form.encode(MESSAGE, 7, "seven")[0]).message() == MESSAGE


def test_fields_may_be_replaced_on_both_ways() -> None:
    """What the key tells is left out of the body, and set again when the message is read."""
    form = Form(Numbered)
    body, payload = form.encode(MESSAGE, topic="")
    read = message_with(form.decode(body), payload, "c", 1, False, 1.0, ())
    assert (read.topic, read.qos, read.retain, read.timestamp, read.user_properties) == ("c", 1, False, 1.0, ())


def test_what_an_earlier_version_has_written_is_read_by_its_own_reader() -> None:
    """A body of another form goes to `old`; what that cannot read either is a `RecordError`."""

    def old(body: bytes) -> Numbered:
        topic, number = msgspec.msgpack.decode(body, type=tuple[str, int])
        return Numbered(topic, b"", number=number)

    form = Form(Numbered, old=old)
    record = form.decode(msgspec.msgpack.encode(("t", 3)))
    assert (record.topic, record.number) == ("t", 3)
    with pytest.raises(RecordError):
        form.decode(b"\xc1")
    with pytest.raises(RecordError):
        form.decode(msgspec.msgpack.encode((2, "t", b"")))


def test_what_cannot_be_written_is_told() -> None:
    """A plugin may have put anything into a message."""
    broken = Message(topic="a", payload=b"", user_properties=(("name", "\ud800"),))
    with pytest.raises(RecordError, match="cannot be stored"):
        Form(Numbered).encode(broken)
