"""Ids of messages, and which part of an entry is the message."""

from __future__ import annotations

import json
import uuid

from hypothesis import given
from hypothesis import strategies as st

from motorcade.dispatch.frames import MessageReader, process_frames
from motorcade.dispatch.ids import ORIGINS, Namer, message_of, message_of_channel

numbers = st.integers(0, 2**64 - 1)


def ids_of(origin: int, *entries: bytes) -> list[bytes]:
    return Namer(origin).taken_apart([[entry, [b"payload", b"{}"]] for entry in entries])[0]


@given(st.integers(0, ORIGINS - 1), st.sets(st.tuples(numbers, numbers), min_size=1, max_size=20))
def test_ids_are_uuids_and_tell_entries_apart(origin, pairs) -> None:
    entries = [b"%d-%d" % pair for pair in sorted(pairs)]
    ids = ids_of(origin, *entries)
    assert len(entries) == len(set(ids))
    for id_ in ids:
        found = uuid.UUID(id_.decode())
        assert (id_.decode(), 4, uuid.RFC_4122) == (str(found), found.version, found.variant)
    assert (ids, [b"{}"] * len(ids)) == MessageReader(10).feed(process_frames(ids, [b"{}"] * len(ids)))


def test_every_reader_gives_an_entry_the_same_id() -> None:
    """In another order, from another batch, alone."""
    entries = [b"1763236000000-0", b"1763236000000-1", b"1763236000001-0"]
    assert ids_of(77, *entries) == [ids_of(77, entry)[0] for entry in entries]
    assert ids_of(77, *entries) == ids_of(77, *reversed(entries))[::-1]


def test_another_group_gives_other_ids() -> None:
    assert ids_of(1, b"1-1") != ids_of(2, b"1-1")
    assert ids_of(1, b"%d-1" % 2**60) != ids_of(2, b"%d-1" % 2**60)


def test_what_was_deleted_is_passed_over() -> None:
    ids, entries, messages = Namer(0).taken_apart([[b"1-1", None], [b"1-2", [b"payload", b"x"]]])
    assert (1, [b"1-2"], [b"x"]) == (len(ids), entries, messages)


def test_which_field_is_the_message() -> None:
    for fields, message in (
        ([b"anything", b"{}"], b"{}"),
        ([b"topic", b"a/b", b"qos", b"1", b"payload", b"{}"], b"{}"),
        ([b"data", b"1", b"message", b"2"], b"2"),
        ([b"data", b"1", b"more", b"2"], b"1"),
        ([b"message", b"1", b"payload", b"2"], b"2"),
    ):
        assert [message] == Namer(0).taken_apart([[b"1-1", fields]])[2], fields


def test_other_entries_are_objects_of_their_fields() -> None:
    assert {"speed": "7", "vin": "ü\ufffd"} == json.loads(message_of([b"speed", b"7", b"vin", "ü".encode() + b"\xff"]))


def test_the_line_before_a_captured_message_is_taken_off() -> None:
    assert b'{"a":1}\nb' == message_of_channel(b'{"motorcade":1,"topic":"t"}\n{"a":1}\nb')
    assert b'{"a":1}\nb' == message_of_channel(b'{"a":1}\nb')
