"""Tables that a query may name: files and databases, as written on a command line.

    fleet=vehicles.parquet      by the ending: parquet, csv, json, orc; a folder without one is Parquet
    fleet=jdbc:postgresql://…   a database; the table is called as it is here, unless `fleet.dbtable` says otherwise
    fleet.sep=;                 an option of Spark's reader; `fleet.format=csv` is one too
    fleet.password=@FILE        the content of a file, which appears nowhere

Rule 1: text is text. Types of CSV columns are not guessed: a VIN of digits alone would become a number and lose zeros.
Rule 2: a line of a CSV file with more or fewer fields than there are names is wrong, whatever a query asks for: which
        of its fields is the VIN is unknown.
Rule 3: `identity` tells tables apart without telling secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from motorcade.pipelines import PipelineError, failures

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JDBC: Final = "jdbc"
FORMATS: Final = ("parquet", "csv", "json", "orc", JDBC)

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ENDINGS: Final = {"parquet": "parquet", "csv": "csv", "tsv": "csv", "json": "json", "jsonl": "json", "orc": "orc"}
_SECRET: Final = re.compile(r"pass(word|wd)?|secret|token", re.IGNORECASE)

#: What a reader does unless it is told otherwise.
_DEFAULTS: Final[dict[str, dict[str, str]]] = {
    "csv": {
        "header": "true",
        "inferSchema": "false",
        "mode": "FAILFAST",
        "enforceSchema": "false",
        "columnPruning": "false",  # else a line is not looked at behind the last column that a query asks for
    },
    "json": {"mode": "FAILFAST"},
}


@dataclass(frozen=True)
class QueryTable:
    """A table, by the name that a query calls it."""

    name: str
    place: str  #: path, or URL of a database
    format: str = "parquet"
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def register(self, spark: SparkSession) -> None:
        """Let queries of this session name it."""
        reader = spark.read.format(self.format).options(**self.options)
        try:
            frame = reader.load() if self.format == JDBC else reader.load(self.place)
        except Exception as error:
            if not failures.is_known(error):
                raise
            raise PipelineError(
                f"table {self.name!r} ({self.place}) cannot be read: {failures.words(error)}"
            ) from error
        frame.createOrReplaceTempView(self.name)

    @property
    def identity(self) -> str:
        """Return everything that decides which rows it has, without credentials."""
        said = {key: value for key, value in self.options.items() if key != "url" and not _SECRET.search(key)}
        return " ".join([f"{self.name}={self.place}", *(f"{key}={value}" for key, value in sorted(said.items()))])


def tables_of(named: Iterable[str], options: Iterable[str]) -> list[QueryTable]:
    """Parse `NAME=PLACE` and `NAME.OPTION=VALUE`; `PipelineError` says what is wrong."""
    places: dict[str, str] = {}
    for text in named:
        name, equals, place = text.partition("=")
        if not equals or not place or not _NAME.fullmatch(name):
            raise PipelineError(f"{text!r} is no table; write NAME=PATH or NAME=jdbc:…, the name of letters and digits")
        if name in places:
            raise PipelineError(f"there are two tables {name!r}")
        places[name] = place
    chosen: dict[str, dict[str, str]] = {name: {} for name in places}
    for text in options:
        key, equals, value = text.partition("=")
        name, dot, option = key.partition(".")
        if not equals or not dot or not option:
            raise PipelineError(f"{text.partition('=')[0]!r} is no option of a table; write NAME.OPTION=VALUE")
        if name not in places:
            raise PipelineError(f"{key!r} is an option of a table {name!r}, which is not there")
        chosen[name][option] = _content(key, value[1:]) if value.startswith("@") else value
    return [_table(name, place, chosen[name]) for name, place in places.items()]


def _table(name: str, place: str, options: dict[str, str]) -> QueryTable:
    if place.startswith("jdbc:"):
        if _SECRET.search(place):
            raise PipelineError(
                f"the URL of table {name!r} has a password in it, and URLs are shown; give it as {name}.password=@FILE"
            )
        query = {} if "query" in options or "dbtable" in options else {"dbtable": name}
        return QueryTable(name, place, JDBC, {"url": place, **query, **options})
    kind = options.pop("format", "") or _format(place)
    if kind not in FORMATS or kind == JDBC:
        raise PipelineError(f"table {name!r} has the format {kind!r}, which is none of {', '.join(FORMATS[:-1])}")
    if "://" not in place and "*" not in place:
        if not Path(place).exists():
            raise PipelineError(f"table {name!r}: there is no file or folder {place}")
        place = str(Path(place).absolute())
    tabs = {"sep": "\t"} if place.endswith((".tsv", ".tsv.gz")) else {}
    return QueryTable(name, place, kind, _DEFAULTS.get(kind, {}) | tabs | options)


def _format(place: str) -> str:
    ending = place.removesuffix(".gz").rpartition(".")[2].lower()
    return _ENDINGS.get(ending, "parquet")


def _content(key: str, file: str) -> str:
    try:
        return Path(file).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"{key}: cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
