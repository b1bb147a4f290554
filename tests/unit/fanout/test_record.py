"""What the fan-out stores: it comes out as it went in, old records are read, damaged ones are named."""

from __future__ import annotations

import msgspec
import pytest

from motorcade.core.record import RecordError
from motorcade.plugins.fanout.record import (
    DataRecord,
    EntryRecord,
    RequestRecord,
    decode_data,
    decode_entry,
    decode_request,
    encode,
)
from motorcade.plugins.fanout.tables import MAX_ATTEMPTS, attempts_of, done_of, mark_of, owner_of, vin_of

ENTRY = EntryRecord(b"g" * 16, "task_1", 10.0, 20.0, 9, "platform")
DATA = DataRecord(b"d" * 32, "a" * 40, 5, 11.0)
REQUEST = RequestRecord("paused", 3.0, 1.0, 2.0, 200, 0.5)


def test_what_goes_in_comes_out() -> None:
    assert ENTRY == decode_entry(encode(ENTRY))
    assert DATA == decode_data(encode(DATA))
    assert REQUEST == decode_request(encode(REQUEST))


def test_the_formats_are_those_of_the_page() -> None:
    assert [1, b"g" * 16, "task_1", 10.0, 20.0, 9, "platform", 0] == msgspec.msgpack.decode(encode(ENTRY))
    assert [1, b"d" * 32, "a" * 40, 5, 11.0] == msgspec.msgpack.decode(encode(DATA))
    assert [1, "paused", 3.0, 1.0, 2.0, 200, 0.5, 0] == msgspec.msgpack.decode(encode(REQUEST))


def test_shorter_records_have_defaults_and_longer_ones_are_read() -> None:
    short = msgspec.msgpack.encode([1, b"g" * 16, "task_1", 10.0])
    assert EntryRecord(b"g" * 16, "task_1", 10.0) == decode_entry(short)
    assert RequestRecord() == decode_request(msgspec.msgpack.encode([1]))
    assert ENTRY == decode_entry(msgspec.msgpack.encode([*msgspec.msgpack.decode(encode(ENTRY)), "later"]))


def test_what_is_no_entry_is_refused() -> None:
    for value in (b"", b"\xff", b"\x91\x02", encode(ENTRY)[:-1], encode(REQUEST)):
        with pytest.raises(RecordError):
            raise AssertionError(decode_entry(value))


def test_mailboxes_belong_to_vehicles_and_history_is_another_one() -> None:
    assert "V" == vin_of(owner_of("V"))
    assert vin_of(done_of("V")) is None
    assert vin_of("queue:V") is None


def test_attempts_survive_in_the_mark() -> None:
    assert 0 == attempts_of(0)
    for attempts in range(MAX_ATTEMPTS + 1):
        assert attempts == attempts_of(mark_of(attempts))
    assert 255 == mark_of(1000)
