"""What becomes of a record, on plain frames: judged by Spark, and by a few lines of Python beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import Row, SparkSession

from motorcade.core import topic as topics
from motorcade.pipelines import ingest, schema
from motorcade.pipelines.ingest import IngestOptions
from motorcade.pipelines.schema import SchemaError, Type
from tests.support.cases import refusal, unlike

pytestmark = pytest.mark.timeout(300)

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)
NOON = "2026-11-15T11:00:00Z"

SCHEMA = """
[types.position]
topics = ["ecp/+/position", "old/position"]
fields = "vin STRING NOT NULL, lat DOUBLE NOT NULL, speed INT, at TIMESTAMP"
time = "at"
key = ["vin", "at"]

[types.trip]
topics = ["ecp/+/trip/#"]
fields = "vin STRING NOT NULL, started BIGINT, inner STRUCT<a: INT, b: STRING>, tags ARRAY<STRING>"
time = "started"
time_unit = "ms"
strict = true

[types.rest]
fields = "n BIGINT"
"""

Given = tuple[str | None, bytes | None]


def declared(place: Path, text: str = SCHEMA) -> tuple[Type, ...]:
    path = place / "schema.toml"
    path.write_text(text)
    return schema.read(path)


def judged(
    spark: SparkSession, types: Sequence[Type], given: Sequence[Given], options: IngestOptions | None = None
) -> list[Row]:
    """A row for each record, in their order; the offset is its place."""
    rows = [(number, NOW, topic, payload, b"%016d" % number) for number, (topic, payload) in enumerate(given)]
    frame = spark.createDataFrame(rows, ingest.COLUMNS)
    found = ingest.classified(ingest.records(frame), types, options or IngestOptions()).collect()
    return sorted(found, key=lambda row: offset(row, len(types)))


def offset(row: Row, types: int) -> int:
    """Of whatever has become of it: exactly one thing has."""
    rows = [row[f"row_{number}"] for number in range(types)]
    there = [number for number, one in enumerate(rows) if one is not None]
    assert (there == [row.table]) if row.dead is None else (there == [] and row.table == types), row
    return int(row.dead.offset if row.dead is not None else rows[there[0]]["_offset"])


def position(**more: Any) -> bytes:
    return json.dumps({"vin": "v", "lat": 1.5, "at": NOON} | more).encode()


def trip(**more: Any) -> bytes:
    return json.dumps({"vin": "v", "started": 1_794_744_000_000} | more).encode()


P, T = "ecp/v/position", "ecp/v/trip/end"

#: Topic, payload, reason, detail.
DEAD: list[tuple[str | None, bytes | None, str, str]] = [
    (P, None, "no_payload", ""),
    (P, b"", "not_json", "empty"),
    (P, b" \n", "not_json", "empty"),
    (P, b"no", "not_json", "not one JSON object"),
    (P, b"[]", "not_json", "not one JSON object"),
    (P, b"5", "not_json", "not one JSON object"),
    (P, b"null", "not_json", "not one JSON object"),
    (P, b"[" + position() + b"]", "not_json", "not one JSON object"),
    (P, position() + position(), "not_json", "not one JSON object"),
    (P, position() + b"," + position(), "not_json", "not one JSON object"),
    (P, position() + b"}", "not_json", "not one JSON object"),
    (P, position() + b" rest", "not_json", "not one JSON object"),
    (P, position()[:-1], "not_json", "not one JSON object"),
    (P, position().replace(b'"', b"'"), "not_json", "not one JSON object"),
    (P, position().replace(b"1.5", b"NaN"), "not_json", "not one JSON object"),
    (P, position(vin="v\xff").replace(b"\\u00ff", b"\xff"), "not_json", "not UTF-8"),
    (P, b"{" + b" " * 2**20 + b"}", "too_large", "1048578 bytes, of 1048576 at most"),
    (P, position(lat="1.5", speed=1.5), "wrong_type", "lat, speed"),
    (P, position(lat="NaN"), "wrong_type", "lat"),
    (P, position(speed=2**31), "wrong_type", "speed"),
    (P, position(at="soon"), "wrong_type", "at"),
    (P, position(at={}), "wrong_type", "at"),
    (P, position(vin=None, lat=None), "missing_field", "vin, lat"),
    (P, b"{}", "missing_field", "vin, lat, at"),
    (P, position(at="2026-11-08T11:59:59.999999Z"), "too_late", "2026-11-08 11:59:59.999999"),
    (P, position(at=-1), "too_late", "1969-12-31 23:59:59"),
    (P, position(at="2026-11-15T13:00:00.000001Z"), "in_future", "2026-11-15 13:00:00.000001"),
    (T, trip(started=None), "missing_field", "started"),
    (T, trip(started=2**63 - 1), "wrong_type", f"started: no time: {2**63 - 1}"),
    (T, trip(inner={"a": "x"}), "wrong_type", "inside a field"),
    (T, trip(inner=5), "wrong_type", "inner"),
    (T, trip(extra=1, more=2), "unknown_field", "extra, more"),
    ("else", b'{"n": "x"}', "wrong_type", "n"),
    (None, b'{"n": "x"}', "wrong_type", "n"),
]

#: Topic, payload, table, day, late.
FINE: list[tuple[str | None, bytes, str, str, bool]] = [
    (P, position(), "position", "2026-11-15", False),
    (P, b" \n" + position() + b"\n", "position", "2026-11-15", False),
    ("old/position", position(), "position", "2026-11-15", False),
    (P, position(at="2026-11-14T23:59:59.999999Z"), "position", "2026-11-14", True),
    (P, position(at="2026-11-15T01:00:00+02:00"), "position", "2026-11-14", True),
    (P, position(at="2026-11-08T12:00:00Z"), "position", "2026-11-08", True),
    (P, position(at="2026-11-15T13:00:00Z"), "position", "2026-11-15", False),
    (P, position(at=1_794_744_000), "position", "2026-11-15", False),
    (P, position(unknown={"a": [1, 2]}, speed=None), "position", "2026-11-15", False),
    (P, position(vin='"}]}'), "position", "2026-11-15", False),
    (T, trip(), "trip", "2026-11-15", False),
    ("ecp/v/trip", trip(inner={"a": None}, tags=[]), "trip", "2026-11-15", False),
    ("else", b'{"n": 1}', "rest", "2026-11-15", False),
    ("else", b"{}", "rest", "2026-11-15", False),
    ("ecp/v/w/position", b"{}", "rest", "2026-11-15", False),
    (None, b'{"n": 1}', "rest", "2026-11-15", False),
]


def test_every_reason_and_what_is_right(spark: SparkSession, tmp_path: Path) -> None:
    types = schema.resolve(declared(tmp_path))
    given = [(topic, payload) for topic, payload, *_ in DEAD] + [(topic, payload) for topic, payload, *_ in FINE]
    rows = judged(spark, types, given)
    names = [one.name for one in types]
    for row, (topic, payload, reason, detail) in zip(rows, DEAD, strict=False):
        assert row.dead is not None, payload
        assert (reason, detail) == (row.dead.reason, row.dead.detail), payload
        assert (topic, payload) == (row.dead.topic, None if payload is None else bytes(row.dead.payload))
        assert (20772, False) == (row.day, row.late), "dead letters have the day of the record"
    for row, (_, payload, table, day, late) in zip(rows[len(DEAD) :], FINE, strict=True):
        assert row.dead is None, row
        assert (table, late) == (names[row.table], row.late), payload
        assert day == str((datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=row.day)).date()), payload


def test_values_come_as_they_were_sent(spark: SparkSession, tmp_path: Path) -> None:
    types = schema.resolve(declared(tmp_path))
    sent = {"vin": 'ä\u0000\n"', "started": 1_794_744_000_123, "inner": {"a": -1, "b": "{}"}, "tags": ["x", None, ""]}
    (row,) = judged(spark, types, [(T, json.dumps(sent).encode())])
    assert {**sent, "_offset": 0, "_topic": T} == {
        name: value for name, value in row.row_1.asDict(recursive=True).items() if name != "_time"
    }


def test_bounds_are_options(spark: SparkSession, tmp_path: Path) -> None:
    types = schema.resolve(declared(tmp_path))
    old, ahead = position(at="1970-01-01T00:00:00Z"), position(at="2026-11-15T12:00:03Z")
    given = [(P, old), (P, ahead), (P, position(vin="v" * 1000))]
    loose = judged(spark, types, given, IngestOptions(max_lateness=0))
    assert [0, 0, 0] == [row.table for row in loose]
    tight = judged(spark, types, given, IngestOptions(max_lateness=60, max_ahead=2, max_payload=900))
    assert ["too_late", "in_future", "too_large"] == [row.dead.reason for row in tight]


def test_keys_tell_messages_apart(spark: SparkSession, tmp_path: Path) -> None:
    """Of a type: by its fields, exactly; else by the GUID. A dead letter is nobody's duplicate."""
    types = schema.resolve(declared(tmp_path))
    same = [position(), position(lat=2.0), position(at="2026-11-15T12:00:00+01:00")]
    other = [position(vin="w"), position(at="2026-11-15T11:00:00.000001Z"), trip(), trip(), b"{}", b"{}"]
    rows = judged(spark, types, [*((P, one) for one in [*same, *other[:2]]), *((T, one) for one in other[2:])])
    keys = [bytes(row.key) for row in rows]
    assert 1 == len(set(keys[:3]))
    assert len(other) + 1 == len(set(keys))


def test_records_are_known_by_an_id_of_their_own_or_by_their_offset(spark: SparkSession) -> None:
    """Entries of a Redis stream have any fields; some records went through no broker."""
    entries = [
        (1, NOW, "1-0", {"payload": b"{}", "topic": b"t", "guid": b"g", "id": b"i"}),
        (2, NOW, "2-0", {"payload": b"{}", "id": b"i"}),
        (3, NOW, "3-0", {"other": b"x"}),
    ]
    found = ingest.records(spark.createDataFrame(entries, ingest.ENTRIES)).collect()
    assert [("t", b"{}", b"g"), (None, b"{}", b"i"), (None, None, b"3-0")] == [
        (row.topic, None if row.payload is None else bytes(row.payload), bytes(row.identity)) for row in found
    ]
    rows = [(7, NOW, "t", b"{}", b""), (8, NOW, "t", b"{}", b"g" * 16)]
    found = ingest.records(spark.createDataFrame(rows, ingest.COLUMNS)).collect()
    assert [b"7", b"g" * 16] == [bytes(row.identity) for row in found]


def test_parts_of_a_key_do_not_run_into_each_other(spark: SparkSession, tmp_path: Path) -> None:
    text = """
    [types.t]
    fields = "a STRING, b STRING, n INT, d DOUBLE, m TIMESTAMP_NTZ"
    key = ["a", "b", "n", "d", "m"]
    """
    types = schema.resolve(declared(tmp_path, text))
    usual = {"a": "x", "b": "y", "n": 1, "d": 0.5, "m": "2026-01-01T00:00:00.000001"}
    changes: list[dict[str, Any]] = [
        {},
        {"a": "xy", "b": ""},
        {"a": "", "b": "xy"},
        {"a": "x1:", "b": ""},
        {"a": "1:x", "b": "1:y"},
        {"n": 11},
        {"n": -1},
        {"d": 0.25},
        {"m": "2026-01-01T00:00:00.000002"},
    ]
    rows = judged(spark, types, [("t", json.dumps(usual | change).encode()) for change in [*changes, {}]])
    keys = [bytes(row.key) for row in rows]
    assert len(changes) == len(set(keys))
    assert keys[0] == keys[-1]


# -- properties

_level = st.sampled_from(["", "a", "b", "ab", "$x", ".", "a.b", "(", "é"])
_topic = st.lists(_level, min_size=1, max_size=4).map("/".join).filter(bool)


@st.composite
def _filter(draw: st.DrawFn) -> str:
    levels = draw(st.lists(st.one_of(_level, st.just("+")), min_size=1, max_size=4))
    return "/".join([*levels, "#"] if draw(st.booleans()) else levels) or "+"


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    filters=st.lists(_filter(), min_size=25, max_size=25, unique=True),
    names=st.lists(_topic, min_size=60, max_size=60, unique=True),
)
def test_filters_match_as_those_of_mqtt_do(spark_session: SparkSession, filters: list[str], names: list[str]) -> None:
    frame = spark_session.createDataFrame([(name,) for name in names], "topic STRING")
    columns = [ingest.matches(frame.topic, filter_).alias(str(number)) for number, filter_ in enumerate(filters)]
    for row in frame.select("topic", *columns).collect():
        for number, filter_ in enumerate(filters):
            assert topics.matches(filter_, row.topic) == row[str(number)], (filter_, row.topic)


def _expected(topic: str, payload: bytes) -> str:
    """The table, or the reason, by Python's own JSON; of types without nested fields."""
    try:
        text = payload.decode()
        value = json.loads(text, parse_constant=lambda _name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return "not_json"
    if not isinstance(value, dict):
        return "not_json"
    if topic != P:
        return "rest" if value.get("n") is None or _whole(value["n"], 63) else "wrong_type"
    lat, speed = value.get("lat"), value.get("speed")
    wrong = (lat is not None and (isinstance(lat, bool) or not isinstance(lat, int | float))) or (
        speed is not None and not _whole(speed, 31)
    )
    if wrong:
        return "wrong_type"
    return "missing_field" if value.get("vin") is None or lat is None else "position"


def _whole(value: object, bits: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**bits) <= value < 2**bits


_value = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(-1e6, 1e6), st.text(max_size=5), st.just([1]),
)  # fmt: skip
_object = st.dictionaries(st.sampled_from(["vin", "lat", "speed", "n", "x"]), _value, max_size=5)
_usual = st.fixed_dictionaries(
    {"vin": st.text(max_size=3), "lat": st.floats(-90, 90)}, optional={"speed": st.integers(0, 200)}
)
_payload = st.one_of(
    _usual.map(lambda value: json.dumps(value).encode()),
    _object.map(lambda value: json.dumps(value, ensure_ascii=False).encode()),
    st.tuples(_usual, st.integers(0, 30)).map(lambda pair: json.dumps(pair[0]).encode()[: pair[1]]),
    st.tuples(_usual, st.sampled_from(["}", "{}", " x", "]", ",", "\u00a0"])).map(
        lambda pair: (json.dumps(pair[0]) + pair[1]).encode()
    ),
    st.binary(max_size=12),
    st.sampled_from([b"[]", b"0", b'"x"', b"true", b"\xef\xbb\xbf{}", b"{}\x00", b'{"vin": "\x01"}']),
)

SIMPLE = """
[types.position]
topics = ["ecp/+/position"]
fields = "vin STRING NOT NULL, lat DOUBLE NOT NULL, speed INT"

[types.rest]
fields = "n BIGINT"
"""


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(given=st.lists(st.tuples(st.sampled_from([P, "else"]), _payload), min_size=150, max_size=250))
def test_every_record_has_one_place(
    spark_session: SparkSession, tmp_path_factory: pytest.TempPathFactory, given: list[Given]
) -> None:
    types = schema.resolve(declared(tmp_path_factory.mktemp("schema"), SIMPLE))
    rows = judged(spark_session, types, given)
    assert list(range(len(given))) == [offset(row, len(types)) for row in rows]
    for row, (topic, payload) in zip(rows, given, strict=True):
        found = row.dead.reason if row.dead is not None else types[row.table].name
        assert _expected(str(topic), payload or b"") == found, payload


# -- schema files that Spark has to read


@pytest.mark.usefixtures("spark")
def test_columns_that_cannot_be_are_named(tmp_path: Path) -> None:
    cases = [
        ('fields = "vin STRNG"', r"\[types.t\] fields: Spark cannot read 'vin STRNG'.*STRNG.*; write columns as in"),
        ('fields = ""', "declares no column"),
        ('fields = "vin STRING, VIN STRING"', "'vin' and 'VIN' are the same to Spark"),
        ('fields = "day DATE"', "'day' cannot be the name of a column"),
        ('fields = "_time DATE"', "'_time' cannot be the name of a column"),
        ('fields = "v VARIANT"', "v: variant cannot be read from JSON"),
        ('fields = "m MAP<INT, INT>"', "m: names in JSON are text"),
        ('fields = "s STRUCT<a: INT NOT NULL>"', r"s\.a is NOT NULL inside another field"),
        ('fields = "a ARRAY<STRUCT<b: INT NOT NULL>>"', r"a\[\]\.b is NOT NULL inside another field"),
        ('fields = "vin STRING"\nkey = ["vim"]', "key: there is no field 'vim'; did you mean 'vin'?"),
        ('fields = "vin STRING"\ntime = "at"', "time: there is no field 'at'"),
        ('fields = "at STRING"\ntime = "at"', "time: 'at' is STRING; a time is a TIMESTAMP, or a number"),
        ('fields = "at BIGINT"\ntime = "at"', "time: 'at' is a number; say with time_unit"),
        ('fields = "at TIMESTAMP"\ntime = "at"\ntime_unit = "s"', "time_unit: 'at' is a TIMESTAMP and needs none"),
    ]
    told = []
    for section, words in cases:
        types = declared(tmp_path, f"[types.t]\n{section}\n")
        told.append((words, refusal(SchemaError, schema.resolve, types)))
    assert [] == unlike(told)
    assert [] == unlike((re.escape(str(tmp_path / "schema.toml")), said) for _, said in told)


@pytest.mark.usefixtures("spark")
def test_what_a_type_needs(tmp_path: Path) -> None:
    position_, trip_, rest = schema.resolve(declared(tmp_path))
    assert ("vin", "lat", "at") == position_.needed
    assert ("vin", "started") == trip_.needed
    assert () == rest.needed
