"""Tables for people, JSON for scripts."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from motorcade.core.redaction import escape_json
from motorcade.core.words import printable

_WIDE = 10_000  # columns of a table that is not shown on a terminal


def print_json(value: object) -> None:
    """Print one JSON document on standard output."""
    print(escape_json(json.dumps(value, ensure_ascii=False, indent=2)))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; on a pipe it is as wide as its contents, so that nothing is cut off for grep."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(_cell(value))) for value in row))
    Console(width=None if sys.stdout.isatty() else _WIDE).print(table)


def print_list(columns: Sequence[str], found: Iterable[Mapping[str, object]], name: str) -> None:
    """Print a table of those columns that any entry has, or that there are none."""
    rows = list(found)
    if rows:
        columns = [column for column in columns if any(column in row for row in rows)]
        print_table(columns, ([row.get(column) for column in columns] for row in rows))
    else:
        print(f"no {name}")


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Print one line per field."""
    pairs = [(name, printable(_cell(value), "\n")) for name, value in fields]
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        print(f"{name:<{width}}  {value}".rstrip())


def write_bytes(data: bytes) -> None:
    """Write bytes of messages, not flushed: as they are into a file or pipe, with escapes on a terminal."""
    if sys.stdout.isatty():
        data = printable(data.decode("utf-8", "backslashreplace"), "\n\t").encode()
    sys.stdout.buffer.write(data)


class Terminal:
    """Standard output that is a terminal: of control sequences only colours get through.

    What comes from clients is escaped where it is printed; this catches what was forgotten.
    """

    _COLOUR = re.compile("(\x1b\\[[0-9;]*m)")

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write with escapes."""
        if not text.isprintable():
            parts = self._COLOUR.split(text)
            parts[::2] = [printable(part, "\n\t\r") for part in parts[::2]]
            text = "".join(parts)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def when(seconds: float | None) -> str:
    """Format a time since the epoch, in local time."""
    return "" if not seconds else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _cell(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case list() | tuple() | dict():
            return json.dumps(value, ensure_ascii=False)
        case _:
            return str(value)
