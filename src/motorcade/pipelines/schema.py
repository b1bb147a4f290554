"""The schema file of `ingest`: which messages are of which type, and what a message of a type holds.

    [types.position]
    topics = ["ecp/+/position"]                                    # MQTT filters; without any: what no other type takes
    fields = "vin STRING NOT NULL, lat DOUBLE NOT NULL, at TIMESTAMP"       # as Spark writes columns
    time = "at"                                                    # when it happened; else when it was recorded
    time_unit = "ms"                                               # of a time that is a number: s, ms or us
    key = ["vin", "at"]                                            # what makes two messages the same; else their GUID
    strict = true                                                  # fields that are not declared are an error

A file is read in two steps. `read` looks at everything that needs no Spark, so that mistakes are told at once;
`resolve` has Spark read the columns, and checks what is said about them.

Rule 1: types are asked in the order of the file, and the first one whose filter matches has the message.
Rule 2: every error names the file, the type and the key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from motorcade.core.errors import TopicError
from motorcade.core.topic import check_filter
from motorcade.core.words import nearest
from motorcade.pipelines import PipelineError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

#: Types in a file, at most: each is a column of every row on its way into the lake.
MAX_TYPES: Final = 100

#: The table of what cannot be taken; no type may be called so.
DEAD_LETTERS: Final = "dead_letters"

#: The column that is the folder of a row.
DAY: Final = "day"

#: Microseconds in one of them.
UNITS: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class SchemaError(PipelineError):
    """A schema file cannot be used as it is."""


class _TypeTable(msgspec.Struct, kw_only=True):
    """A type as it is written."""

    fields: str
    topics: list[str] = []
    time: str = ""
    time_unit: str = ""
    key: list[str] = []
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Type:
    """A type of messages."""

    name: str
    where: str  #: file and section, for errors
    ddl: str
    topics: tuple[str, ...] = ()  #: none: whatever no other type takes
    time: str = ""  #: the field that says when it happened
    time_unit: str = ""
    key: tuple[str, ...] = ()
    strict: bool = False
    columns: StructType | None = None  #: after `resolve`

    @property
    def schema(self) -> StructType:
        if self.columns is None:
            raise SchemaError(f"{self.where} fields: were not resolved")
        return self.columns

    @property
    def needed(self) -> tuple[str, ...]:
        """Fields that a message cannot be without: those that are NOT NULL, and what time and key are taken from."""
        declared = [field.name for field in self.schema.fields if not field.nullable]
        return tuple(dict.fromkeys([*declared, *([self.time] if self.time else []), *self.key]))


def read(path: Path) -> tuple[Type, ...]:
    """Read the types of a file, and check them as far as possible without Spark."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SchemaError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SchemaError(f"{path}: is no UTF-8 text, and so no schema") from error
    except tomllib.TOMLDecodeError as error:
        raise SchemaError(f"{path}: is no TOML: {error}") from error
    for key in tree:
        if key != "types":
            raise SchemaError(f"{path}: {key}: there is no such key{nearest(key, ['types'])}")
    tables = tree.get("types", {})
    if not isinstance(tables, dict) or not tables:
        raise SchemaError(f"{path}: declares no type; write for instance [types.position], and below it fields = …")
    if len(tables) > MAX_TYPES:
        raise SchemaError(f"{path}: declares {len(tables)} types; at most {MAX_TYPES} can be ingested together")
    types = tuple(_type(path, name, table) for name, table in tables.items())
    rest = [one.name for one in types if not one.topics]
    if len(rest) > 1:
        raise SchemaError(
            f"{path}: [types.{rest[1]}] topics: is missing, and [types.{rest[0]}] has none either; only one type can "
            "take what no other type takes"
        )
    return types


def _type(path: Path, name: str, table: Any) -> Type:
    where = f"{path}: [types.{name}]"
    if not isinstance(table, dict):
        raise SchemaError(f"{path}: types.{name} is a value; write [types.{name}], and below it fields = …")
    if not _NAME.fullmatch(name) or name == DEAD_LETTERS:
        raise SchemaError(
            f"{where}: is the name of a folder too: up to 64 small letters, digits, _ and -, not {DEAD_LETTERS!r}"
        )
    for key in table:
        if key not in _TypeTable.__struct_fields__:
            raise SchemaError(f"{where} {key}: there is no such key{nearest(key, _TypeTable.__struct_fields__)}")
    try:
        said = msgspec.convert(table, _TypeTable)
    except msgspec.ValidationError as error:
        problem, _, key = str(error).partition(" - at `$.")
        place = f" {key.rstrip('`')}:" if key else ""
        raise SchemaError(f"{where}{place} {problem}") from error
    _check_topics(where, table, said.topics)
    if said.time_unit and said.time_unit not in UNITS:
        raise SchemaError(f"{where} time_unit: {said.time_unit!r} is none of {', '.join(UNITS)}")
    if said.time_unit and not said.time:
        raise SchemaError(f"{where} time_unit: says nothing without `time`, the field that it is of")
    return Type(
        name, where, said.fields, tuple(said.topics), said.time, said.time_unit, tuple(said.key), strict=said.strict
    )


def _check_topics(where: str, table: dict[str, Any], topics: Sequence[str]) -> None:
    if "topics" in table and not topics:
        raise SchemaError(f"{where} topics: is empty; leave it out to take what no other type takes")
    for topic in topics:
        try:
            check_filter(topic)
        except TopicError as error:
            raise SchemaError(f"{where} topics: {topic!r}: {error}") from error


# -- columns


def resolve(types: Sequence[Type]) -> tuple[Type, ...]:
    """Return the types with their columns, as Spark reads them; it needs a session, since the parser is Java's."""
    return tuple(_resolved(one) for one in types)


def _resolved(one: Type) -> Type:
    columns = _parsed(one)
    seen: dict[str, str] = {}
    for field in columns.fields:
        name = field.name
        if name.startswith("_") or name.lower() == DAY:
            raise SchemaError(
                f"{one.where} fields: {name!r} cannot be the name of a column: the lake has columns of its own, "
                f"{DAY!r} and those that begin with _"
            )
        if name.lower() in seen:
            raise SchemaError(
                f"{one.where} fields: {seen[name.lower()]!r} and {name!r} are the same to Spark, whatever their case"
            )
        seen[name.lower()] = name
        _check_inside(one, name, field.dataType)
    for key, names in (("time", [one.time] if one.time else []), ("key", one.key)):
        for name in names:
            if name not in columns.fieldNames():
                raise SchemaError(f"{one.where} {key}: there is no field {name!r}{nearest(name, columns.fieldNames())}")
    if one.time:
        _check_time(one, columns[one.time].dataType)
    return replace(one, columns=columns)


def _parsed(one: Type) -> StructType:
    from pyspark.errors import PySparkException  # noqa: PLC0415 - an extra, and slow to import
    from pyspark.sql.types import StructType  # noqa: PLC0415

    try:
        found = StructType.fromDDL(one.ddl)
    except PySparkException as error:
        said = str(error).strip().split("\n")[0].strip()
        raise SchemaError(
            f"{one.where} fields: Spark cannot read {one.ddl!r}: {said}; write columns as in "
            '"vin STRING NOT NULL, speed DOUBLE, at TIMESTAMP"'
        ) from error
    if not isinstance(found, StructType) or not found.fields:
        raise SchemaError(f'{one.where} fields: declares no column; write for instance "vin STRING NOT NULL"')
    return found


def _check_inside(one: Type, path: str, kind: DataType) -> None:
    """Check that JSON and Parquet both have the types, and that nothing is declared that cannot be kept."""
    from pyspark.sql import types as sparks  # noqa: PLC0415

    simple = (
        *(sparks.StringType, sparks.BooleanType, sparks.ByteType, sparks.ShortType, sparks.IntegerType),
        *(sparks.LongType, sparks.FloatType, sparks.DoubleType, sparks.DecimalType),
        *(sparks.DateType, sparks.TimestampType, sparks.TimestampNTZType, sparks.BinaryType),
    )
    match kind:
        case sparks.StructType():
            for field in kind.fields:
                if not field.nullable:
                    raise SchemaError(
                        f"{one.where} fields: {path}.{field.name} is NOT NULL inside another field, which is not "
                        "checked; leave NOT NULL out there"
                    )
                _check_inside(one, f"{path}.{field.name}", field.dataType)
        case sparks.ArrayType():
            _check_inside(one, f"{path}[]", kind.elementType)
        case sparks.MapType():
            if not isinstance(kind.keyType, sparks.StringType):
                raise SchemaError(f"{one.where} fields: {path}: names in JSON are text, so a map has STRING keys")
            _check_inside(one, f"{path}[]", kind.valueType)
        case _ if type(kind) not in simple:
            raise SchemaError(f"{one.where} fields: {path}: {kind.simpleString()} cannot be read from JSON")


def _check_time(one: Type, kind: DataType) -> None:
    from pyspark.sql import types as sparks  # noqa: PLC0415

    if isinstance(kind, sparks.TimestampType):
        if one.time_unit:
            raise SchemaError(f"{one.where} time_unit: {one.time!r} is a TIMESTAMP and needs none")
    elif not isinstance(kind, sparks.IntegralType | sparks.FractionalType):
        raise SchemaError(
            f"{one.where} time: {one.time!r} is {kind.simpleString().upper()}; a time is a TIMESTAMP, or a number with "
            "time_unit"
        )
    elif not one.time_unit:
        raise SchemaError(
            f"{one.where} time: {one.time!r} is a number; say with time_unit what it counts: {', '.join(UNITS)}"
        )
