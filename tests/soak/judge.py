"""Floors, and what is wrong with them.

A floor is what a node holds when everything was let go: after the churn of a cycle, with no client but the probes. The
first one has what a node makes once (caches, threads, modules); from the second on floors must be level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

RSS_GROWTH = 1.05  #: of the last floor, compared with the second
DISK_GROWTH = 1.5
DISK_SLACK = 64 << 20  #: bytes; an embedded store removes files some time after what is in them
SLACK = 16  #: entries of a table, descriptors: what may just be on its way
SHARE = 0.02  #: of its entries, by which a large table may differ
KIND_SLACK = 200  #: objects of one type
THREADS = 4

#: Caches that fill up to a bound of their own, whatever is let go: owner and attribute, and how many entries at most.
#: What they cost together is far below what RSS may grow by in a run of the soak.
CACHES = {
    "Recent.young": 140_000,  # of the embedded store: heads of mailboxes, counters of blobs, messages, rows read lately
    "Recent._old": 140_000,
    "State.known": 20_000,  # rows written lately, by their bytes
    "State.known_before": 20_000,
    "Notes._young": 40_000,  # rows that are put in place later
    "Notes._old": 40_000,
    "Notes._waiting": 40_000,
    "RecentSet._young": 200_000,  # deliveries that have ended
    "RecentSet._old": 200_000,
    'motorcade_table_entries{table="fanout_counted"}': 200_000,  # the same, as the node tells it
    'motorcade_table_entries{table="fanout_ended"}': 200_000,
    'motorcade_table_entries{table="access_failures"}': 200,
    'motorcade_plugin_gauge{plugin="streams",name="stream_records"}': 1_000,  # receipts are trimmed some at a time
    "Failures._entries": 200,  # max_failure_entries, by name and by address
}

#: Objects that lie in these caches, by type.
CACHED = {
    "builtins.list": 1_300,  # rows read lately, of 1024 mailboxes; a few hundred others
    "motorcade.storage.transaction.state.BlobInfo": 4_096,
    "motorcade.storage.transaction.state.SharedMessage": 4_096,
}


@dataclass(frozen=True)
class Floor:
    """The figures of a quiet node, and of the cycle before."""

    cycle: int
    rss: int = 0  #: bytes, as it is by itself
    trimmed: int = 0  #: bytes, after a full collection and malloc_trim
    store: int = 0  #: bytes of these that are the embedded store's own cache and write buffers
    garbage: int = 0  #: objects that this collection has found
    objects: int = 0
    descriptors: int = 0  #: without those of files in the data folder
    files: int = 0  #: open in the data folder; an embedded store has as many as it likes
    threads: int = 0
    disk: int = 0  #: bytes of the data folder
    tables: Mapping[str, float] = field(default_factory=dict)
    kinds: Mapping[str, int] = field(default_factory=dict)
    units: int = 0  #: pieces of churn
    messages: int = 0  #: PUBLISH packets, both ways
    probes: int = 0
    lost: int = 0
    latency: tuple[float, float] = (0.0, 0.0)  #: seconds; of the probes, median and 99 of 100
    lag: float = 0.0  #: seconds; of the event loop, 99 of 100 were less
    cpu: float = 0.0  #: seconds of processor time per message
    errors: Sequence[str] = ()  #: what the node has logged as errors


def verdict(floors: Sequence[Floor]) -> list[str]:
    """Name everything that has grown or was lost; nothing if the floors are level."""
    found = [f"cycle {floor.cycle}: {floor.lost} of {floor.probes} probes lost" for floor in floors if floor.lost]
    found += [f"cycle {floor.cycle}: no probe came through" for floor in floors if not floor.probes]
    found += [f"cycle {floor.cycle}: the node says: {error}" for floor in floors for error in floor.errors]
    if len(floors) < 2:
        return [*found, "one floor says nothing about growth: more cycles are needed"]
    first, last = floors[1 if len(floors) > 2 else 0], floors[-1]
    for name, before, after, most in (
        ("RSS", first.rss, last.rss, first.rss * RSS_GROWTH),
        ("RSS after a collection", first.trimmed, last.trimmed, first.trimmed * RSS_GROWTH),
        ("objects", _uncached(first), _uncached(last), _uncached(first) * (1 + SHARE) + KIND_SLACK),
        ("descriptors", first.descriptors, last.descriptors, first.descriptors + SLACK),
        ("threads", first.threads, last.threads, first.threads + THREADS),
        ("disk", first.disk, last.disk, first.disk * DISK_GROWTH + DISK_SLACK),
    ):
        if after > most:
            found.append(f"{name} grew from {before} to {after} (cycles {first.cycle} to {last.cycle})")
    found += _grown("table", first.tables, last.tables, SLACK)
    found += _grown("objects of type", first.kinds, last.kinds, KIND_SLACK)
    return found


def _grown(what: str, first: Mapping[str, float], last: Mapping[str, float], slack: int) -> list[str]:
    return [
        f"{what} {name} grew from {first.get(name, 0):g} to {after:g}"
        for name, after in sorted(last.items())
        if after > first.get(name, 0) * (1 + SHARE) + slack and after > _bound(name)
    ]


def _bound(name: str) -> int:
    """Return the entries or objects that a cache may have at any time; containers within it count four times."""
    owner = name.rstrip("[]")
    return CACHED.get(name, 0) or CACHES.get(owner, 0) * (4 if owner != name else 1)


def _uncached(floor: Floor) -> int:
    """Count the objects that lie in no cache."""
    return floor.objects - sum(min(floor.kinds.get(name, 0), bound) for name, bound in CACHED.items())


_ROWS = (
    ("RSS, MiB", lambda f: f"{f.rss / 2**20:.1f}"),
    ("RSS collected and trimmed, MiB", lambda f: f"{f.trimmed / 2**20:.1f}"),
    ("of these the store's own, MiB", lambda f: f"{f.store / 2**20:.1f}"),
    ("waited for a full collection", lambda f: f"{f.garbage}"),
    ("objects", lambda f: f"{f.objects}"),
    ("entries of all tables", lambda f: f"{sum(f.tables.values()):.0f}"),
    ("descriptors", lambda f: f"{f.descriptors}"),
    ("open files of the store", lambda f: f"{f.files}"),
    ("threads", lambda f: f"{f.threads}"),
    ("disk, MiB", lambda f: f"{f.disk / 2**20:.1f}"),
    ("pieces of churn", lambda f: f"{f.units}"),
    ("messages in and out", lambda f: f"{f.messages}"),
    ("probes", lambda f: f"{f.probes}"),
    ("probes lost", lambda f: f"{f.lost}"),
    ("latency median, ms", lambda f: f"{f.latency[0] * 1000:.1f}"),
    ("latency 99 %, ms", lambda f: f"{f.latency[1] * 1000:.1f}"),
    ("loop lag 99 %, below ms", lambda f: f"{f.lag * 1000:g}"),
    ("processor per message, µs", lambda f: f"{f.cpu * 1e6:.0f}"),
)


def report(floors: Sequence[Floor], tables: int = 12) -> str:
    """The floors side by side, and the tables that differ most."""
    heads = ["floor after cycle", *(str(floor.cycle) for floor in floors)]
    lines = [heads, *([name, *(show(floor) for floor in floors)] for name, show in _ROWS)]
    names = {name for floor in floors for name in floor.tables}
    spread = {name: max(f.tables.get(name, 0) for f in floors) - floors[0].tables.get(name, 0) for name in names}
    widest = [name for name in sorted(names, key=lambda name: -spread[name])[:tables] if spread[name] > 0]
    lines += [[f"  {name}", *(f"{floor.tables.get(name, 0):g}" for floor in floors)] for name in widest]
    wide = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(
        "  ".join([line[0].ljust(wide[0]), *(cell.rjust(w) for cell, w in zip(line[1:], wide[1:], strict=True))])
        for line in lines
    )
