"""The stored shape of a message: what goes in comes out, old and new records are read, damaged ones are named."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motorcade.core.message import Message
from motorcade.core.record import Record, RecordError, decode, encode
from tests.support.cases import each_row

texts = st.text(max_size=20)
times = st.floats(min_value=0, max_value=4e9)
messages = st.builds(
    Message,
    topic=texts,
    payload=st.binary(max_size=100),
    qos=st.integers(0, 2),
    retain=st.booleans(),
    publisher=texts,
    username=st.none() | texts,
    guid=st.binary(min_size=16, max_size=16) | st.just(b""),
    timestamp=times,
    payload_format=st.none() | st.integers(0, 1),
    expires_at=st.none() | times,
    content_type=st.none() | texts,
    response_topic=st.none() | texts,
    correlation_data=st.none() | st.binary(max_size=20),
    user_properties=st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
)


@given(messages)
def test_what_goes_in_comes_out(message: Message) -> None:
    assert message == decode(encode(message)).message()


def test_the_format_is_the_one_of_the_page() -> None:
    """Others read these bytes, in other languages: the order of the fields is fixed."""
    message = Message(
        "a/b", b"\x00\xff", 1, True, "car", "ann", b"g" * 16, 12.5, 1, 99.0, "text/plain", "re", b"c", (("k", "v"),)
    )
    fields = [1, "a/b", b"\x00\xff", "car", "ann", 12.5, b"g" * 16, 1, True, 1, 99.0, "text/plain", "re", b"c"]
    assert [*fields, [["k", "v"]]] == msgspec.msgpack.decode(encode(message))


def test_headers_stay_with_the_publish() -> None:
    assert {} == decode(encode(Message("a", b"", headers={"note": object()}))).message().headers


def test_a_record_with_more_fields_is_read() -> None:
    """A later program may add fields at the end."""
    fields = [*msgspec.msgpack.decode(encode(Message("a", b"x"))), "new", 7]
    assert Message("a", b"x") == decode(msgspec.msgpack.encode(fields)).message()


def test_a_record_with_fewer_fields_is_read() -> None:
    """Whoever writes records elsewhere may leave out what it does not know."""
    assert Record("a", b"x") == decode(msgspec.msgpack.encode([1, "a", b"x"]))


@each_row(
    "value says",
    (
        (b"", "truncated"),
        (b"\xc1", "malformed"),
        (msgspec.msgpack.encode({"topic": "a"}), "array"),
        (msgspec.msgpack.encode([1, "a"]), "length"),
        (msgspec.msgpack.encode([1, "a", b"", "", None, 0.0, b"", 3]), "<= 2"),
        (msgspec.msgpack.encode([2, "a", b""]), "its version is 2"),
    ),
)
def test_what_is_no_record_is_named(value: bytes, says: str) -> None:
    with pytest.raises(RecordError, match=says):
        decode(value)


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(RecordError, match="cannot be stored"):
        encode(Message("a\ud800", b""))
