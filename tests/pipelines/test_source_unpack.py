"""Records unpacked a page at a time become the same rows as records decoded one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from motorcade.core import record
from motorcade.core.message import Message
from motorcade.core.record import Record
from motorcade.pipelines.sources import columns, unpack
from motorcade.pipelines.sources.columns import Wanted
from motorcade.pipelines.sources.messages import StoredStreamReader
from motorcade.pipelines.sources.options import ReadOptions
from motorcade.storage.readers import StreamPage

NOW = 1_790_000_000.25

LENGTHS = [0, 1, 3, 4, 5, 11, 12, 13, 31, 32, 33, 255, 256, 300, 65_535, 65_536]

text = st.one_of(st.text(max_size=40), st.sampled_from(LENGTHS).map(lambda size: "ä" * (size // 2) + "x" * (size % 2)))
binary = st.one_of(st.binary(max_size=40), st.sampled_from(LENGTHS).map(bytes))
seconds = st.floats(min_value=-1e9, max_value=1e10)
usual = st.builds(
    Record,
    text,
    binary,
    text,
    st.none() | text,
    seconds,
    binary,
    st.integers(0, 2),
    st.booleans(),
    st.none() | st.integers(0, 1),
    st.none() | seconds,
    st.none() | text,
    st.none() | text,
    st.none() | binary,
    st.lists(st.tuples(text, text), max_size=3).map(tuple) | st.just((("name", "value"),) * 16),
)
plain = st.builds(
    Record, text, binary, text, st.none() | text, seconds, st.binary(min_size=16, max_size=16), st.integers(0, 2)
)
#: As another program, another version or a broken disk may leave them.
strange = st.one_of(
    st.binary(max_size=40),
    st.just(msgspec.msgpack.encode([1, "short", b"payload"])),
    st.just(msgspec.msgpack.encode([1, "t", b"p", "c", None, 1.0, b"g", 1, False, *[None] * 5, [], "a new field"])),
    st.just(msgspec.msgpack.encode([9, "t", b"p", "c", None, 1.0, b"g", 1, False, *[None] * 5, []])),
    st.just(msgspec.msgpack.encode([1, "t", b"p", "c", None, 1, b"g", 1, False, *[None] * 5, []])),  # a whole number
    st.just(msgspec.msgpack.encode([1, "t", b"p", "c", None, 1.0, b"g", 3, False, *[None] * 5, []])),  # no such QoS
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    value = bytearray(msgspec.msgpack.encode(draw(usual | plain)))
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.integers(0, min(len(value), 60)))
        place = draw(st.sampled_from([place, max(0, len(value) - place)]))
        match draw(st.sampled_from(["change", "remove", "insert", "cut"])):
            case "change" if place < len(value):
                value[place] = draw(st.integers(0, 255))
            case "remove":
                del value[place : place + draw(st.integers(1, 3))]
            case "insert":
                value[place:place] = draw(st.binary(min_size=1, max_size=3))
            case "cut":
                del value[place:]
    return bytes(value)


values = st.lists(
    st.one_of(plain.map(msgspec.msgpack.encode), usual.map(msgspec.msgpack.encode), strange, damaged()), max_size=12
)


def messages(names: list[str], **options: str) -> StoredStreamReader:
    return StoredStreamReader(
        ReadOptions.parse({"store": "rocksdb://nowhere", "stream": "s", **options}), Wanted(names)
    )


def page_of(found: list[bytes], step: int = 1) -> StreamPage:
    return StreamPage(
        [7 + step * row for row in range(len(found))], [NOW + row // 3 for row in range(len(found))], found
    )


def one_by_one(page: StreamPage, names: list[str]) -> pa.RecordBatch:
    """The slow way, written once more: what a record is, `core.record` alone says."""
    kept = []
    for offset, time, value in zip(*page, strict=True):
        try:
            kept.append((offset, time, record.decode(value)))
        except record.RecordError:
            continue
    micros = {"time": [round(time * 1e6) for _, time, _ in kept], "offset": [offset for offset, _, _ in kept]}
    if "published" in names:
        micros["published"] = [round(found.time * 1e6) for _, _, found in kept]
    made: list[Any] = []
    for name in names:
        if name in micros:
            made.append(pa.array(micros[name], pa.int64()).cast(columns.TYPES[name]))
        elif name == "user_properties":
            pairs = [[{"name": pair[0], "value": pair[1]} for pair in found.user_properties] for _, _, found in kept]
            made.append(pa.array(pairs, columns.PROPERTIES))
        else:
            made.append(pa.array([getattr(found, name) for _, _, found in kept], columns.TYPES[name]))
    return columns.batch(names, made)


PLAIN = Record("t/1", b"{}", "c", None, NOW, b"0123456789abcdef", 1)
FULL = Record("t/2", b"{}", "c", "u", NOW, b"g", 2, True, 1, NOW, "a/b", "r", b"d", (("n", "v"), ("", "w")))
WHOLE = [msgspec.msgpack.encode(one) for one in (PLAIN, FULL)]

#: One that is cut off, and one whose user property is no text: each is told once.
BROKEN = [b"", msgspec.msgpack.encode(FULL).replace(b"\xa1v", b"\xa1\xff")]


@settings(deadline=None)
@example(BROKEN, list(columns.MESSAGES))
@given(values, st.lists(st.sampled_from(columns.MESSAGES), unique=True, min_size=1) | st.just(list(columns.MESSAGES)))
def test_the_rows_are_the_same(found: list[bytes], names: list[str]) -> None:
    if not found:
        return
    page = page_of(found)
    with capture_logs() as logs:
        made = messages(names, on_damaged="skip")._batch(page)
    made.validate(full=True)
    wanted = one_by_one(page, names)
    assert wanted.to_pylist() == made.to_pylist()
    assert wanted.schema == made.schema
    assert len(found) - wanted.num_rows == len([entry for entry in logs if entry["event"] == "record_damaged"])


@settings(deadline=None)
@given(st.lists(usual.filter(lambda one: len(one.user_properties) < 16) | plain, min_size=1, max_size=12))
def test_what_the_node_writes_is_never_decoded_one_by_one(found: list[Record]) -> None:
    values = [record.encode(one.message()) for one in found]
    taken = unpack.unpack(values)
    assert taken is not None
    assert taken.fine.all()


def test_a_record_that_is_otherwise_keeps_its_place() -> None:
    short = msgspec.msgpack.encode([1, "short", b"payload"])
    found = [record.encode(Message(f"t/{row}", b"%d" % row, 1, timestamp=NOW)) for row in range(10)]
    found[3], found[9] = short, short
    made = messages(["offset", "topic"])._batch(page_of(found, step=2))
    topics = [f"t/{row}" if row not in {3, 9} else "short" for row in range(10)]
    assert [{"offset": 7 + 2 * row, "topic": topic} for row, topic in enumerate(topics)] == made.to_pylist()


#: Bytes that mean something somewhere in a record.
TELLING = [0, 1, 3, 0x80, 0x90, 0x91, 0x92, 0x9F, 0xA0, 0xA2, 0xC0, 0xC2, 0xC4, 0xC5, 0xCB, 0xD9, 0xDB, 0xFF]


def variants(value: bytes) -> Iterator[bytes]:
    """A record with everything wrong that one byte can make wrong, and with every end it can have."""
    for place in range(len(value)):
        yield value[:place]
        yield value[:place] + value[place + 1 :]
        for byte in TELLING:
            yield value[:place] + bytes([byte]) + value[place + 1 :]
    yield value + b"\0"
    yield value + value
    yield value[:-1] + bytes([value[-1] + 1]) + b"\x92\xa0\xa0"
    yield value[:-1] + bytes([value[-1] + 2]) + b"\x92\xa0\xa0"


def test_whatever_is_wrong_is_seen_whoever_wants_it() -> None:
    """Between two records that are right, of which neither may change; also if none of its columns is wanted."""
    for names in (list(columns.MESSAGES), ["offset"]):
        reader = messages(names, on_damaged="skip")
        for whole, variant in [(one, variant) for one in WHOLE for variant in variants(one)]:
            page = page_of([whole, variant, whole])
            with capture_logs():
                try:
                    wanted = one_by_one(page, names)
                except (OverflowError, ValueError, pa.ArrowInvalid):  # a time that is none
                    with pytest.raises(pa.ArrowInvalid):
                        reader._batch(page)
                    continue
                assert wanted.to_pylist() == reader._batch(page).to_pylist(), variant


def test_a_record_does_not_end_in_the_next_one() -> None:
    whole = msgspec.msgpack.encode(Record("t", b"p", "c", None, NOW, b"g", 0, False, None, None, None, None, b"d"))
    assert b"\x90" == whole[-1:]
    page = page_of([whole, whole[:-1], b"\x90", whole])
    with capture_logs():
        made = messages(["offset"], on_damaged="skip")._batch(page)
    assert [7, 10] == made["offset"].to_pylist()


def test_more_bytes_than_arrow_can_count_are_decoded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [record.encode(Message("t", bytes(100), 1, timestamp=NOW)) for _ in range(3)]
    monkeypatch.setattr(unpack, "MAX_BYTES", 300)
    assert unpack.unpack(found) is None
    assert [bytes(100)] * 3 == [row["payload"] for row in messages(["payload"])._batch(page_of(found)).to_pylist()]
