"""Options of the source, checked before anything is opened.

An option that is not known is an error, since a misspelt one would be ignored in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum, auto
from typing import TypeVar

from motorcade.core.errors import MotorcadeError
from motorcade.storage import FORMS, MEMORY, names_store

#: Rows of one micro-batch.
MAX_ROWS = 1_000_000

#: Rows of one task. Beginning and ending one costs Spark about as much as reading 20 000.
ROWS_PER_PARTITION = 250_000


class OptionError(MotorcadeError):
    """An option of the source is missing or wrong."""


class SourceKind(StrEnum):
    """The kinds of sources; the value is the name of the option."""

    STREAM = auto()
    REDIS_STREAM = auto()
    MAILBOXES = auto()


class Edge(StrEnum):
    """An end of a stream."""

    EARLIEST = auto()
    LATEST = auto()


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time."""

    time: float  #: seconds since the epoch


#: Where reading begins or ends: an end of the stream, a time, or an offset (of a Redis stream: an id), as written.
Place = Edge | Moment | str


class Lost(StrEnum):
    """The reaction to rows that are gone."""

    FAIL = auto()
    SKIP = auto()  #: go on without them; how many they are is logged


class Missing(StrEnum):
    """The reaction to a stream that does not exist."""

    FAIL = auto()
    EMPTY = auto()  #: it has no rows yet


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """All of them; docs/pipelines.md explains each."""

    store: str
    kind: SourceKind
    name: str  #: of the stream, key of the Redis stream, or prefix of the owners
    starting: Place = Edge.EARLIEST
    ending: Place = Edge.LATEST
    max_rows: int = MAX_ROWS
    rows_per_partition: int = ROWS_PER_PARTITION
    on_trimmed: Lost = Lost.FAIL
    on_damaged: Lost = Lost.FAIL
    if_missing: Missing = Missing.FAIL

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> ReadOptions:
        options = {name.lower(): value for name, value in given.items()}
        unknown = sorted(set(options) - KNOWN)
        if unknown:
            raise OptionError(f"the source motorcade has no option {unknown[0]!r}; it knows {', '.join(sorted(KNOWN))}")
        kinds = [kind for kind in SourceKind if kind in options]
        if len(kinds) != 1:
            raise OptionError("one of the options `stream`, `redis_stream` and `mailboxes` says what to read")
        kind = kinds[0]
        if kind is not SourceKind.MAILBOXES and not options[kind]:
            raise OptionError(f"option {kind.value}: a name is needed")
        return cls(
            store=_store(options.get("store", ""), kind),
            kind=kind,
            name=options[kind],
            starting=_place("starting", options.get("starting", Edge.EARLIEST), kind),
            ending=_place("ending", options.get("ending", Edge.LATEST), kind),
            max_rows=_count("max_rows", options.get("max_rows", ""), MAX_ROWS),
            rows_per_partition=_count("rows_per_partition", options.get("rows_per_partition", ""), ROWS_PER_PARTITION),
            on_trimmed=_choice("on_trimmed", options.get("on_trimmed", Lost.FAIL), Lost),
            on_damaged=_choice("on_damaged", options.get("on_damaged", Lost.FAIL), Lost),
            if_missing=_choice("if_missing", options.get("if_missing", Missing.FAIL), Missing),
        )


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of writing a frame."""

    store: str
    redis_stream: str
    query: str = ""  #: the name under which a streaming query is known when it is started again
    batch_id: str = ""  #: the name under which a frame is known when it is written again

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> WriteOptions:
        options = {name.lower(): value for name, value in given.items() if name.lower() not in SPARKS_OWN}
        known = set(cls.__dataclass_fields__)
        unknown = sorted(set(options) - known)
        if unknown:
            raise OptionError(f"there is no option {unknown[0]!r} for writing; there are {', '.join(sorted(known))}")
        if not options.get("redis_stream"):
            raise OptionError("the option `redis_stream` says which stream to write to")
        for name in ("query", "batch_id"):
            if set(options.get(name, "")) & set(": {}="):
                raise OptionError(f"option {name}: {options[name]!r} has a blank, a colon, a brace or an equals sign")
        return cls(
            _store(options.get("store", ""), SourceKind.REDIS_STREAM),
            options["redis_stream"],
            options.get("query", ""),
            options.get("batch_id", ""),
        )


#: Options that Spark hands on to every sink.
SPARKS_OWN = {"checkpointlocation", "path"}

KNOWN = {field for field in ReadOptions.__dataclass_fields__ if field not in {"kind", "name"}} | set(SourceKind)


def _store(url: str, kind: SourceKind) -> str:
    if not url:
        raise OptionError(f"the option `store` says where to read: one of {FORMS.removeprefix(MEMORY + ', ')}")
    scheme = url.partition("://")[0]
    if not names_store(url) or url in {MEMORY, "rocksdb://"}:
        # Not the whole of it: it may hold a password.
        raise OptionError(f"option store: {scheme!r}… is none of {FORMS.removeprefix(MEMORY + ', ')}")
    if kind is SourceKind.REDIS_STREAM and scheme == "rocksdb":
        raise OptionError("option redis_stream: the store must be redis://… or redis+cluster://…, not rocksdb://…")
    return url


def _place(name: str, text: str, kind: SourceKind) -> Place:
    if text.lower() in set(Edge):
        return Edge(text.lower())
    number, dash, sequence = text.partition("-")
    if number.isdigit() and not dash and number.isascii():
        return text
    if kind is SourceKind.REDIS_STREAM and number.isdigit() and sequence.isdigit() and len(number) > 4:
        return text
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        form = "an id such as 1760000000000-0" if kind is SourceKind.REDIS_STREAM else "an offset"
        raise OptionError(
            f"option {name}: {text!r} is none of earliest, latest, {form} and a time such as 2026-01-31T12:00:00Z"
        ) from None
    return Moment((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def _count(name: str, text: str, default: int) -> int:
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise OptionError(f"option {name}: a number above 0 is needed, not {text!r}")
    return int(text)


Choice = TypeVar("Choice", bound=StrEnum)


def _choice(name: str, text: str, choices: type[Choice]) -> Choice:
    try:
        return choices(text.lower())
    except ValueError:
        raise OptionError(f"option {name}: {text!r} is none of {', '.join(choices)}") from None
