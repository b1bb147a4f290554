"""What users say wrong is told before anything is opened."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    CharType,
    DataType,
    DoubleType,
    FloatType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from motorcade.pipelines.sources import columns
from motorcade.pipelines.sources.columns import Wanted
from motorcade.pipelines.sources.datasource import COLUMNS, MotorcadeDataSource, columns_of, schema_of
from motorcade.pipelines.sources.options import Edge, Kind, Lost, Missing, Moment, OptionError, ReadOptions

STORE = {"store": "rocksdb:///data/store"}
REDIS = {"store": "redis://127.0.0.1"}


def test_what_is_left_out_has_a_default() -> None:
    expected = ReadOptions(
        store="rocksdb:///data/store",
        kind=Kind.STREAM,
        name="receipts",
        starting=Edge.EARLIEST,
        ending=Edge.LATEST,
        max_rows=1_000_000,
        rows_per_partition=250_000,
        on_trimmed=Lost.FAIL,
        on_damaged=Lost.FAIL,
        if_missing=Missing.FAIL,
    )
    assert expected == ReadOptions.parse({**STORE, "stream": "receipts"})


def test_names_and_choices_are_read_in_any_case() -> None:
    """Spark hands names over as they were written."""
    options = ReadOptions.parse({**STORE, "Stream": "Receipts", "ON_TRIMMED": "Skip", "starting": "LATEST"})
    assert ("Receipts", Lost.SKIP, Edge.LATEST) == (options.name, options.on_trimmed, options.starting)


@pytest.mark.parametrize(
    ("kind", "text", "place"),
    [
        ("stream", "earliest", Edge.EARLIEST),
        ("stream", "17", "17"),
        ("stream", "2026-01-31T12:00:00Z", Moment(1769860800.0)),
        ("stream", "2026-01-31T12:00:00", Moment(1769860800.0)),
        ("stream", "2026-01-31T13:00:00+01:00", Moment(1769860800.0)),
        ("stream", "2026-01-31", Moment(1769817600.0)),
        ("redis_stream", "1760000000000-3", "1760000000000-3"),
        ("redis_stream", "1760000000000", "1760000000000"),
        ("redis_stream", "2026-01-31", Moment(1769817600.0)),
    ],
)
def test_where_to_begin(kind: str, text: str, place: object) -> None:
    assert place == ReadOptions.parse({**REDIS, kind: "s", "starting": text}).starting
    assert place == ReadOptions.parse({**REDIS, kind: "s", "ending": text}).ending


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stream": "s"}, "`store` says where to read"),
        ({"store": "memory://", "stream": "s"}, "option store: 'memory'… is none of rocksdb"),
        ({"store": "rocksdb://", "stream": "s"}, "option store"),
        ({"store": "mysql://u:geheim@h", "stream": "s"}, "option store: 'mysql'… is none of"),
        (STORE, "one of the options `stream`"),
        ({**STORE, "stream": "s", "mailboxes": ""}, "one of the options `stream`"),
        ({**STORE, "stream": ""}, "option stream: a name is needed"),
        ({**STORE, "redis_stream": "s"}, "option redis_stream: the store must be redis"),
        ({**STORE, "stream": "s", "startin": "latest"}, "no option 'startin'; it knows ending, if_missing, mailboxes"),
        (
            {**STORE, "stream": "s", "starting": "soon"},
            "option starting: 'soon' is none of earliest, latest, an offset",
        ),
        ({**REDIS, "redis_stream": "s", "starting": "-"}, "option starting: '-' is none of earliest, latest, an id"),
        ({**STORE, "stream": "s", "starting": "-5"}, "option starting"),
        ({**STORE, "stream": "s", "max_rows": "0"}, "option max_rows: a number above 0 is needed, not '0'"),
        ({**STORE, "stream": "s", "rows_per_partition": "many"}, "option rows_per_partition"),
        ({**STORE, "stream": "s", "on_trimmed": "ignore"}, "option on_trimmed: 'ignore' is none of fail, skip"),
        ({**STORE, "stream": "s", "if_missing": "no"}, "option if_missing: 'no' is none of fail, empty"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], says: str) -> None:
    with pytest.raises(OptionError, match=says) as error:
        MotorcadeDataSource(options).schema()
    assert "geheim" not in str(error.value)


def test_mailboxes_cannot_be_followed() -> None:
    source = MotorcadeDataSource({**STORE, "mailboxes": ""})
    with pytest.raises(OptionError, match="not followed"):
        source.streamReader(source.schema())


def test_what_is_followed_has_no_end() -> None:
    source = MotorcadeDataSource({**STORE, "stream": "s", "Ending": "5"})
    with pytest.raises(OptionError, match=r"option ending: what is followed .* has no end"):
        source.streamReader(source.schema())


@pytest.mark.parametrize("kind", list(Kind))
def test_the_types_are_those_that_spark_wants(kind: Kind) -> None:
    """Spark compares the schema of the first batch with its own and refuses the slightest difference."""
    made = pa.schema([(name, columns.TYPES[name]) for name in COLUMNS[kind]])
    assert to_arrow_schema(schema_of(kind), timezone="UTC").equals(made)


def test_a_schema_chooses_columns() -> None:
    schema = StructType([StructField("topic", StringType()), StructField("offset", LongType())])
    assert Wanted(["topic", "offset"]) == columns_of(Kind.STREAM, schema)


def test_a_schema_says_what_the_payload_becomes() -> None:
    """In its place among the columns, which are read as far as they are needed."""
    place = StructType().add("lat", DoubleType())
    body = StructType().add("vin", StringType()).add("at", place).add("doors", ArrayType(BooleanType()))
    schema = StructType().add("json", body).add("offset", LongType())
    wanted = columns_of(Kind.STREAM, schema)
    assert ["json", "offset"] == wanted.names
    assert ["offset", "payload"] == wanted.stored()
    assert to_arrow_schema(schema, timezone="UTC").field("json").type == wanted.json


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (StringType(), r"cannot be string: it is a STRUCT<name: TYPE, …>; `from_json`"),
        (StructType(), "a STRUCT needs fields"),
        (StructType().add("a", StringType()).add("a", LongType()), "each with a name of its own"),
        (
            StructType().add("a", ArrayType(StructType().add("at", TimestampType()))),
            r"json\.a\[\]\.at: the payload can be parsed into STRUCT, ARRAY, BOOLEAN",
        ),
        (StructType().add("a", MapType(StringType(), LongType())), r"json\.a: the payload can be"),
        (StructType().add("a", FloatType()), r"json\.a: the payload can be"),
        (StructType().add("a", CharType(3)), "CharType"),
    ],
)
def test_what_the_payload_cannot_become(kind: DataType, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        columns_of(Kind.STREAM, StructType().add("json", kind))


def test_only_messages_have_payloads_to_parse() -> None:
    with pytest.raises(OptionError, match="no column 'json'; redis_stream has offset"):
        columns_of(Kind.REDIS_STREAM, StructType().add("json", StructType().add("a", LongType())))


@pytest.mark.parametrize(
    ("field", "says"),
    [
        (StructField("speed", LongType()), "no column 'speed'; stream has offset, time, topic"),
        (StructField("offset", StringType()), "'offset' is bigint, not string; a schema chooses columns"),
    ],
)
def test_a_schema_cannot_ask_for_more(field: StructField, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        columns_of(Kind.STREAM, StructType([field]))
