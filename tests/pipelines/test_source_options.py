"""What users say wrong is told before anything is opened."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    CharType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
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
from motorcade.pipelines.sources.options import Edge, Lost, Missing, Moment, OptionError, ReadOptions, SourceKind
from tests.support.cases import refusal, unlike

TEXT, BINARY, NUMBER = StringType(), BinaryType(), IntegerType()
STORE = {"store": "rocksdb:///data/store"}
REDIS = {"store": "redis://127.0.0.1"}


def test_what_is_left_out_has_a_default() -> None:
    expected = ReadOptions(
        store="rocksdb:///data/store",
        kind=SourceKind.STREAM,
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


def test_beginning_and_end_are_edges_offsets_ids_or_times() -> None:
    noon, midnight = Moment(1769860800.0), Moment(1769817600.0)
    for kind, text, place in (
        ("stream", "earliest", Edge.EARLIEST),
        ("stream", "17", "17"),
        ("stream", "2026-01-31T12:00:00Z", noon),
        ("stream", "2026-01-31T12:00:00", noon),
        ("stream", "2026-01-31T13:00:00+01:00", noon),
        ("stream", "2026-01-31", midnight),
        ("redis_stream", "1760000000000-3", "1760000000000-3"),
        ("redis_stream", "1760000000000", "1760000000000"),
        ("redis_stream", "2026-01-31", midnight),
    ):
        options = ReadOptions.parse({**REDIS, kind: "s", "starting": text, "ending": text})
        assert (place, place) == (options.starting, options.ending), text


def test_a_wrong_option_for_reading_is_named() -> None:
    cases: list[tuple[dict[str, str], str]] = [
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
    ]
    told = [(says, refusal(OptionError, MotorcadeDataSource(options).schema)) for options, says in cases]
    assert [] == unlike(told)
    assert "geheim" not in str(told)


def test_mailboxes_and_reads_with_an_end_cannot_be_followed() -> None:
    mailboxes, ending = ({**STORE, "mailboxes": ""}, {**STORE, "stream": "s", "Ending": "5"})
    for options, says in ((mailboxes, "not followed"), (ending, r"option ending: what is followed .* has no end")):
        source = MotorcadeDataSource(options)
        with pytest.raises(OptionError, match=says):
            source.streamReader(source.schema())


def test_the_types_are_those_that_spark_wants() -> None:
    """Spark compares the schema of the first batch with its own and refuses the slightest difference."""
    for kind in SourceKind:
        made = pa.schema([(name, columns.TYPES[name]) for name in COLUMNS[kind]])
        assert to_arrow_schema(schema_of(kind), timezone="UTC").equals(made), kind


def test_a_schema_chooses_columns() -> None:
    schema = StructType([StructField("topic", TEXT), StructField("offset", LongType())])
    assert Wanted(["topic", "offset"]) == columns_of(SourceKind.STREAM, schema)


def test_a_schema_says_what_the_payload_becomes() -> None:
    """In its place among the columns, which are read as far as they are needed."""
    place = StructType().add("lat", DoubleType())
    body = StructType().add("vin", TEXT).add("at", place).add("doors", ArrayType(BooleanType()))
    schema = StructType().add("json", body).add("offset", LongType())
    wanted = columns_of(SourceKind.STREAM, schema)
    assert ["json", "offset"] == wanted.names
    assert ["offset", "payload"] == wanted.stored()
    assert to_arrow_schema(schema, timezone="UTC").field("json").type == wanted.json


def test_a_schema_that_cannot_be_read_is_told() -> None:
    """Columns that are not there, or of another type; what a payload cannot become."""
    times = ArrayType(StructType().add("at", TimestampType()))
    bodies: list[tuple[DataType, str]] = [
        (TEXT, r"cannot be string: it is a STRUCT<name: TYPE, …>; `from_json`"),
        (StructType(), "a STRUCT needs fields"),
        (StructType().add("a", TEXT).add("a", LongType()), "each with a name of its own"),
        (StructType().add("a", times), r"json\.a\[\]\.at: the payload can be parsed into STRUCT, ARRAY, BOOLEAN"),
        (StructType().add("a", MapType(TEXT, LongType())), r"json\.a: the payload can be"),
        (StructType().add("a", FloatType()), r"json\.a: the payload can be"),
        (StructType().add("a", CharType(3)), "CharType"),
    ]
    cases = [(SourceKind.STREAM, StructType().add("json", body), says) for body, says in bodies] + [
        (SourceKind.STREAM, StructType().add("speed", LongType()), "no column 'speed'; stream has offset, time, topic"),
        (
            SourceKind.STREAM,
            StructType().add("offset", TEXT),
            "'offset' is bigint, not string; a schema chooses columns",
        ),
        (
            SourceKind.REDIS_STREAM,
            StructType().add("json", StructType().add("a", LongType())),
            "no column 'json'; redis_stream has offset",
        ),
    ]
    assert [] == unlike((says, refusal(OptionError, columns_of, kind, schema)) for kind, schema, says in cases)


# -- for writing


def typed(**types: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in types.items()])


VINS, TOPICS = typed(vin=TEXT), typed(topic=TEXT, payload=BINARY)


def test_a_wrong_option_for_writing_is_named() -> None:
    kinds = "one of the options `redis_stream`, `fanout` and `publish`"
    entries = {"redis_stream": "s", "store": "redis://h"}
    fanout, publish = {"fanout": "mqtt://h"}, {"publish": "mqtt://h"}
    order = {**fanout, "request": "r"}
    whole = {**order, "payload": ""}
    cases: list[tuple[dict[str, str], StructType, str]] = [
        ({}, VINS, kinds),
        ({"redis_stream": "s"}, TOPICS, "`store` says where"),
        ({**entries, "store": "rocksdb:///x"}, TOPICS, "the store must be redis"),
        ({**entries, "qery": "x"}, TOPICS, "no option 'qery' for writing"),
        ({**entries, "query": "a b"}, TOPICS, "option query: 'a b' has a blank"),
        ({**entries, "query": "q"}, typed(a=DoubleType()), "the column 'a' is double; entries of a stream have text"),
        ({"fanout": "x", "publish": "x"}, VINS, kinds),
        ({"fanout": "http://h"}, VINS, "option fanout: .* is no address"),
        ({"fanout": "mqtt://u:p@h"}, VINS, "do not belong into it"),
        ({**fanout, "reqest": "r"}, VINS, "no option 'reqest' for a fan-out"),
        (fanout, VINS, "needs the options `request`"),
        (order, VINS, "`payload` or `payload_file`"),
        ({**whole, "request": "a/b"}, VINS, "option request: .*'/'"),
        ({**whole, "payload_file": "x"}, VINS, "not both"),
        ({**order, "payload_file": "/nowhere"}, VINS, "cannot read /nowhere"),
        ({**whole, "mode": "new"}, VINS, "option mode: 'new'"),
        ({**whole, "priority": "10"}, VINS, "option priority: .*0 to 9"),
        ({**whole, "expires_in": "-1"}, VINS, "option expires_in"),
        ({**whole, "window": "0"}, VINS, "option window"),
        ({**whole, "insecure": "yes"}, VINS, "option insecure"),
        (fanout, typed(vin=NUMBER), "one column `vin` of type string"),
        (fanout, typed(vin=TEXT, x=NUMBER), "one column `vin` of type string"),
        (fanout, typed(message=TEXT), "`message` of type binary"),
        (fanout, typed(message=BINARY, x=NUMBER), "`message` of type binary"),
        (fanout, typed(message=BINARY, vehicles=TEXT), "the column 'vehicles' is string"),
        ({**fanout, "task_rate": "5"}, typed(message=BINARY), "needs the column `vehicles`"),
        ({**publish, "request": "r"}, TOPICS, "no option 'request' for publishing"),
        ({**publish, "unrouted": "x"}, TOPICS, "option unrouted: 'x' is none of fail, ignore"),
        (publish, typed(topic=TEXT), "has the columns topic and payload"),
        (publish, typed(topic=TEXT, payload=TEXT, x=NUMBER), "has the columns topic and payload"),
        (publish, typed(topic=TEXT, payload=NUMBER), "the column 'payload' is int"),
        (publish, typed(topic=TEXT, payload=TEXT, user_properties=TEXT), "'user_properties' is string"),
    ]
    assert [] == unlike(
        (says, refusal(OptionError, MotorcadeDataSource(options).writer, schema, False))
        for options, schema, says in cases
    )


def test_what_cannot_be_overwritten_or_followed_is_told() -> None:
    entries = {"redis_stream": "s", "store": "redis://h"}
    vehicles = {"fanout": "mqtt://h", "request": "r", "payload": ""}
    sources = {name: MotorcadeDataSource(options) for name, options in (("entries", entries), ("vehicles", vehicles))}
    assert [] == unlike(
        (says, refusal(OptionError, write, VINS, overwrite))
        for write, overwrite, says in (
            (sources["entries"].streamWriter, True, "not overwritten"),
            (sources["entries"].streamWriter, False, "option query: a name is needed"),
            (sources["vehicles"].writer, True, "use mode append"),
            (sources["vehicles"].streamWriter, False, "not VINs: it may be started again with other partitions"),
        )
    )
