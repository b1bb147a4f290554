"""Payloads as JSON: the column `json`, with the declared fields.

Spark's `from_json` takes longer than everything else that happens to a record. Here a page of payloads is parsed at
once by Arrow, and only the fields that are wanted become columns.

What a payload becomes is said by `_fitted`, one by one:
    no JSON object (RFC 8259, UTF-8)      null
    a field that is not there             null inside of the object
    a value that is not what is declared  null in its place: nothing is converted, but whole numbers to DOUBLE
    NaN and the infinities                null in their place, though they are no JSON: Python and others write them
    a field that comes twice              the last one

Rule: a shortcut for the usual. Whatever Arrow does not take, and whatever it might take for something else, is left to
      `_fitted`. So what a record becomes does not depend on its neighbours in the page.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

#: What a field may be, besides STRUCT and ARRAY of these.
SCALARS: Final = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "BYTE",
    pa.int16(): "SHORT",
    pa.int32(): "INT",
    pa.int64(): "LONG",
    pa.float64(): "DOUBLE",
    pa.string(): "STRING",
}

#: Brackets in a payload for which Python's parser may be too deep.
_DEEP: Final = 500

#: Numbers that are none, which Arrow takes; also `Inf`, which no other parser does.
_NO_NUMBER: Final = re.compile(rb"[:,\[]\s*-?(?:NaN|Inf)")

_Fit = Callable[[Any], Any]


def unfit(kind: pa.DataType, path: str = "json") -> str | None:
    """Return why payloads cannot be parsed as that type; None if they can."""
    if pa.types.is_list(kind):
        return unfit(kind.value_type, f"{path}[]")
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        if not names or len(set(names)) < len(names):
            return f"{path}: a STRUCT needs fields, each with a name of its own"
        return next(filter(None, (unfit(field.type, f"{path}.{field.name}") for field in kind)), None)
    if kind not in SCALARS:
        return f"{path}: the payload can be parsed into STRUCT, ARRAY, {', '.join(SCALARS.values())}"
    return None


class JsonPayloads:
    """Parses payloads into one type, which is a STRUCT."""

    def __init__(self, kind: pa.StructType) -> None:
        self._kind = kind
        self._fit = _fit(kind)
        self._options = pyarrow.json.ParseOptions(
            explicit_schema=pa.schema(list(kind)), unexpected_field_behavior="ignore"
        )

    def column(self, payloads: pa.Array) -> pa.Array:
        """Make the column of payloads, none of them null."""
        if not len(payloads):
            return pa.nulls(0, self._kind)
        made = self._at_once(payloads)
        return self._fitted(payloads.to_pylist()) if made is None else made

    def _at_once(self, payloads: pa.Array) -> pa.Array | None:
        """Parse all by Arrow; None if Arrow cannot, or might miss what `_fitted` would see.

        They go to Arrow with a line feed between. Each begins and ends like an object. So whatever is still open at the
        end of one is an error: a text has no line feeds, and behind a brace no other one opens. Each is then at least
        one object, and if they are as many as there are payloads, exactly one.
        """
        lines = pc.binary_join(pa.ListArray.from_arrays([0, len(payloads)], payloads), b"\n")[0].as_py()
        if not _are_objects(payloads, lines):
            return None
        try:
            payloads.cast(pa.string())
            table = pyarrow.json.read_json(
                pa.BufferReader(lines),
                pyarrow.json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
                self._options,
            )
        except pa.ArrowInvalid:
            return None
        if len(table) != len(payloads):
            return None
        fields = [_whole(column) for column in table.columns]
        return pa.StructArray.from_arrays(fields, names=table.column_names)

    def _fitted(self, payloads: Sequence[bytes]) -> pa.Array:
        """Parse one by one."""
        return pa.array([self._fit(_parsed(payload)) for payload in payloads], self._kind)


def _are_objects(payloads: pa.Array, lines: bytes) -> bool:
    """Return True if each looks like an object, none is too deep, and numbers are numbers."""
    if not pc.all(pc.and_(pc.starts_with(payloads, b"{"), pc.ends_with(payloads, b"}"))).as_py():
        return False
    long = payloads.filter(pc.greater(pc.binary_length(payloads), _DEEP))
    if len(long):
        brackets = pc.add(pc.count_substring(long, b"["), pc.count_substring(long, b"{"))
        if pc.max(brackets).as_py() > _DEEP:
            return False
    # A single byte is found much faster than three.
    odd = (b"N" in lines and b"NaN" in lines) or (b"I" in lines and b"Inf" in lines)
    return not odd or _NO_NUMBER.search(lines) is None


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


# -- one by one


def _parsed(payload: bytes) -> Any:
    """Parse JSON; None if it is none."""
    try:
        return json.loads(payload.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None


def _no_number(_: str) -> None:
    """Refuse NaN and the infinities."""


def _fit(kind: pa.DataType) -> _Fit:
    """Return a function that converts a value to the declared type, or to None."""
    if pa.types.is_struct(kind):
        return _struct({field.name: _fit(field.type) for field in kind})
    if pa.types.is_list(kind):
        return _list(_fit(kind.value_type))
    if pa.types.is_boolean(kind):
        return lambda value: value if isinstance(value, bool) else None
    if pa.types.is_string(kind):
        return _text
    if pa.types.is_floating(kind):
        return _double
    return _integer(1 << kind.bit_width - 1)


def _struct(fits: dict[str, _Fit]) -> _Fit:
    def fit(value: Any) -> dict[str, Any] | None:
        if not isinstance(value, dict):
            return None
        return {name: fit(value.get(name)) for name, fit in fits.items()}

    return fit


def _list(fit: _Fit) -> _Fit:
    return lambda value: [fit(one) for one in value] if isinstance(value, list) else None


def _text(value: Any) -> str | None:
    """Return a text, but None for half a surrogate pair, which can be escaped and is no text."""
    return value if isinstance(value, str) and (value.isascii() or not _HALF.search(value)) else None


_HALF: Final = re.compile("[\ud800-\udfff]")


def _double(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _integer(end: int) -> _Fit:
    return lambda value: value if type(value) is int and -end <= value < end else None
