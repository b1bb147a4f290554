"""Faults, the lists that they come from, and what becomes of them."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Self

SOURCES = Path("src/motorcade")


class Outcome(StrEnum):
    """What became of a fault."""

    FOUND = "found"
    SURVIVED = "survived"
    GAP = "known gap"  #: it survived, and the list says why
    UNSURE = "unsure"  #: the test that failed also fails without the fault
    LATE = "out of time"
    BROKEN = "broken"  #: the run did not end properly, so it shows nothing
    STALE = "stale"  #: its text is not in the sources any more, or a test that it names is gone


#: outcomes that are no error
GOOD = (Outcome.FOUND, Outcome.GAP)


class ListError(Exception):
    """The list of faults is wrong; the text names the file."""


@dataclass(frozen=True)
class Fault:
    """One fault."""

    name: str
    area: str
    file: str  #: below src/motorcade
    old: str
    new: str
    tests: tuple[str, ...]  #: paths or patterns of paths, in the order in which they run
    gap: str = ""  #: why no test finds it
    subtle: bool = False


@dataclass(frozen=True)
class Verdict:
    """What became of a fault, and by which test."""

    name: str
    area: str
    outcome: Outcome
    seconds: float = 0.0
    test: str = ""
    reason: str = ""

    def __str__(self) -> str:
        detail = f"{self.test}  {self.reason}".strip()
        return f"{self.outcome:11}  {self.seconds:5.1f} s  {self.area}/{self.name}  {detail[:200]}".rstrip()

    def encoded(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decoded(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(**fields | {"outcome": Outcome(fields["outcome"])})

    def doubted(self, reason: str) -> Verdict:
        """The test that found it fails without the fault, too."""
        return replace(self, outcome=Outcome.UNSURE, reason=reason)


def load(folder: Path) -> list[Fault]:
    """Read all lists in a folder. The tests of a fault's area follow its own."""
    found: dict[str, Fault] = {}
    for path in sorted(folder.glob("*.toml")):
        listed = tomllib.loads(path.read_text())
        areas: dict[str, list[str]] = listed.get("areas", {})
        for entry in listed.get("fault", []):
            fault = _fault(entry, areas, path.name)
            if fault.name in found:
                raise ListError(f"{path.name}: there are two faults {fault.name!r}")
            found[fault.name] = fault
    return list(found.values())


def _fault(entry: dict[str, Any], areas: dict[str, list[str]], file: str) -> Fault:
    name, area = entry.get("name"), entry.get("area")
    if area not in areas:
        raise ListError(f"{file}: fault {name!r} is of an unknown area {area!r}")
    tests = tuple(dict.fromkeys([*entry.pop("tests", ()), *areas[area]]))
    try:
        fault = Fault(**entry, tests=tests)
    except TypeError as error:
        raise ListError(f"{file}: fault {name!r}: {error}") from error
    if fault.old == fault.new:
        raise ListError(f"{file}: fault {name!r} changes nothing")
    return fault


def chosen(faults: Sequence[Fault], patterns: Sequence[str]) -> list[Fault]:
    """Those whose name or area fits one of the patterns; all of them without any."""
    if not patterns:
        return list(faults)
    return [f for f in faults if any(fnmatch(f.name, p) or fnmatch(f.area, p) for p in patterns)]


def staleness(fault: Fault, root: Path) -> str:
    """Return why a fault cannot be planted or looked for; nothing if it can."""
    path = root / SOURCES / fault.file
    if not path.exists():
        return f"there is no {SOURCES / fault.file}"
    times = path.read_text().count(fault.old)
    if times != 1:
        return f"its text is {times} times in {SOURCES / fault.file}"
    gone = [pattern for pattern in fault.tests if not any(root.glob(pattern))]
    return f"there is no {', '.join(gone)}" if gone else ""


def expanded(patterns: Sequence[str], root: Path) -> list[str]:
    """Return the paths that fit patterns, in their order."""
    found = [path for pattern in patterns for path in sorted(root.glob(pattern)) if path.name != "__pycache__"]
    return list(dict.fromkeys(str(path.relative_to(root)) for path in found))


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return a table of outcomes by area, and what is not as it should be."""
    outcomes = [outcome for outcome in Outcome if any(v.outcome is outcome for v in verdicts)]
    rows = [["area", "faults", *outcomes]]
    for area in [*dict.fromkeys(v.area for v in verdicts), ""]:
        own = Counter(v.outcome for v in verdicts if area in ("", v.area))
        rows.append([area or "all", str(own.total()), *(str(own[outcome] or "") for outcome in outcomes)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    bad = [str(verdict) for verdict in verdicts if verdict.outcome not in GOOD]
    return "\n".join(lines + (["", *bad] if bad else []))
