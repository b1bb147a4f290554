"""Who judges what pipelines have made that were killed: the lake beside a ledger, receipts beside a list of vehicles.

    Ledger   what was published, and where each message belongs: a table and a day, or the dead letters with a reason
    Found    what any reader of Parquet finds in the lake, and what lies there that no reader sees
    lake     each row once, each dead letter once, in the right place; nothing staged is left
    fanout   each vehicle of the audience in the plan once, and accepted by the node once; nobody else

The judge knows nothing of Spark, nor of what was killed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from tests.chaos.findings import Findings

DEAD_LETTERS = "dead_letters"
HIDDEN = ".motorcade"  #: the folder of a lake that readers leave out

# -- the lake

Row = tuple[int, str]  #: number of a message, day of its folder


@dataclass
class Ledger:
    """What was published and acknowledged."""

    #: By table and number: the day of its row; empty where that is the day on which the node got it.
    rows: dict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    dead: dict[bytes, str] = field(default_factory=dict)  #: by payload, of which no two are the same: the reason
    repeated: int = 0  #: messages that were published a second time

    @property
    def size(self) -> int:
        return sum(map(len, self.rows.values())) + len(self.dead)


@dataclass
class Found:
    """What is in a lake."""

    rows: dict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))
    dead: list[tuple[bytes, str]] = field(default_factory=list)  #: payload and reason
    left: list[str] = field(default_factory=list)  #: files that no reader sees and that nobody needs any more
    files: int = 0
    merged: int = 0  #: of them: made of others


def read(lake: Path) -> Found:
    """All files of all tables, as any reader finds them."""
    found = Found()
    for path in sorted(lake.glob("*/day=*/*.parquet")):
        table, day = path.parts[-3], path.parts[-2].removeprefix("day=")
        found.files += 1
        found.merged += path.name.startswith("merged-")
        if table == DEAD_LETTERS:
            made = pq.read_table(path, columns=["payload", "reason"], partitioning=None)
            found.dead += zip(*(made.column(name).to_pylist() for name in ("payload", "reason")), strict=True)
        else:
            numbers = pq.read_table(path, columns=["n"], partitioning=None).column("n").to_pylist()
            found.rows[table] += [(number, day) for number in numbers]
    hidden = (lake / HIDDEN).glob("*/staging/**/*")
    found.left = sorted(str(path.relative_to(lake)) for path in hidden if path.is_file())
    return found


def lake(ledger: Ledger, found: Found) -> Findings:
    """Whether the lake is what the ledger says."""
    findings = Findings()
    for table in ledger.rows.keys() | found.rows.keys():
        _table(findings, table, ledger.rows.get(table, {}), found.rows.get(table, []))
    times = Counter(payload for payload, _ in found.dead)
    for payload, reason in found.dead:
        if payload not in ledger.dead:
            findings.add("invented", f"dead letter {payload!r}")
        elif reason != ledger.dead[payload]:
            findings.add("wrong reason", f"{payload!r}: {reason}, not {ledger.dead[payload]}")
    for payload in ledger.dead:
        if not times[payload]:
            findings.add("lost", f"dead letter {payload!r}")
    for payload, count in times.items():
        if count > 1:
            findings.add("doubled", f"dead letter {payload!r}, {count} times")
    for name in found.left:
        findings.add("staged", name)
    return findings


def _table(findings: Findings, table: str, wanted: dict[int, str], rows: Sequence[Row]) -> None:
    times = Counter(number for number, _ in rows)
    for number, day in rows:
        if number not in wanted:
            findings.add("invented", f"{table} {number}")
        elif wanted[number] and wanted[number] != day:
            findings.add("wrong day", f"{table} {number}: {day}, not {wanted[number]}")
    for number in wanted:
        if not times[number]:
            findings.add("lost", f"{table} {number}")
    for number, count in times.items():
        if count > 1:
            findings.add("doubled", f"{table} {number}, {count} times")


# -- the fan-out


def fanout(request: str, audience: Iterable[str], planned: Iterable[str], accepted: Iterable[str]) -> Findings:
    """Whether those who were meant, and nobody else, were planned and addressed once; each of the last two by VIN."""
    findings = Findings()
    wanted, plan, addressed = set(audience), Counter(planned), Counter(accepted)
    for kind, times in (("planned", plan), ("addressed", addressed)):
        for vin in wanted - times.keys():
            findings.add(f"not {kind}", f"{request} {vin}")
        for vin in times.keys() - wanted:
            findings.add("invented", f"{request} {vin}, {kind}")
        for vin, count in times.items():
            if count > 1:
                findings.add(f"{kind} twice", f"{request} {vin}, {count} times")
    return findings
