"""What a traced store on Redis has written down (`RedisOptions.trace`), and whether it keeps its promises.

    I2  accepted decisions about a home form intervals, one for each fence, within its attachment
    I3  no call of a writer is accepted after its fence in that cell; those before are accepted in order, each once

Both are about one cell at a time: its trace has the order in which the server has carried things out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import redis

ATTACH = "attach "


class TraceEntry(NamedTuple):
    """One line of a trace; lua/trace.lua has the table of them."""

    cell: int
    name: str  #: of a home, a writer, a record, an owner
    number: int
    token: str
    what: str
    accepted: bool


def read_trace(clients: Iterable[redis.Redis], prefix: str = "motorcade") -> dict[int, list[TraceEntry]]:
    """Read the traces of all cells from the servers that have them."""
    found: dict[int, list[TraceEntry]] = {}
    for client in clients:
        keys: Any = client.keys(f"{prefix}:{{*}}:T")
        for key in keys:
            rows: Any = client.xrange(key)
            entries = [_entry({name: value.decode() for name, value in fields.items()}) for _, fields in rows]
            found[entries[0].cell] = entries
    return found


def _entry(fields: dict[bytes, str]) -> TraceEntry:
    number, _, token = fields[b"f"].partition(":")
    return TraceEntry(int(fields[b"c"]), fields[b"h"], int(number), token, fields[b"w"], fields[b"a"] == "1")


def violations(traces: dict[int, list[TraceEntry]]) -> list[str]:
    """Return what breaks a promise; empty: nothing does."""
    return [line for entries in traces.values() for line in (*_decisions(entries), *_writers(entries))]


def _decisions(entries: list[TraceEntry]) -> list[str]:
    """I2. A refused decision may also have failed by another condition, so only accepted ones prove anything."""
    wrong = []
    holds: dict[str, tuple[int, str]] = {}
    over: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for entry in entries:
        home, fence = entry.name, (entry.number, entry.token)
        if not entry.accepted:
            continue
        if entry.what.startswith(ATTACH):
            if home in holds:
                over[home].add(holds[home])
            holds[home] = fence
        elif entry.what in ("decision", "detach"):
            if fence in over[home]:
                wrong.append(f"cell {entry.cell}: {entry.what} about {home} by {fence}, after another attach")
            elif holds.get(home) != fence:
                wrong.append(f"cell {entry.cell}: {entry.what} about {home} by {fence}, which was never attached")
            if entry.what == "detach":
                over[home].add(fence)
                holds.pop(home, None)
    return wrong


def _writers(entries: list[TraceEntry]) -> list[str]:
    """I3."""
    wrong = []
    fenced: set[str] = set()
    last: dict[str, int] = {}
    for entry in entries:
        if entry.what == "fence":
            fenced.add(entry.name)
        elif entry.what == "call" and entry.accepted:
            if entry.name in fenced:
                wrong.append(f"cell {entry.cell}: call {entry.number} of {entry.name} after its fence")
            elif entry.number <= last.get(entry.name, 0):
                wrong.append(f"cell {entry.cell}: call {entry.number} of {entry.name} after call {last[entry.name]}")
            last[entry.name] = entry.number
    return wrong
