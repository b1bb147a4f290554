#!/usr/bin/env python3
"""Write docs/conformance.md: every numbered statement of MQTT 3.1.1 and MQTT 5, and the tests that cover it.

    scripts/conformance_table.py            write the page
    scripts/conformance_table.py --check    change nothing; exit 1 if the page is stale or a statement has no test

The statements are catalogued in tests/conformance/clauses/*.toml, the tests name theirs in `@clause(...)` marks
(tests/support/clauses.py). The marks are read from the source text, so neither pytest nor Motorcade is needed.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLAUSES = ROOT / "tests" / "conformance" / "clauses"
TESTS = ROOT / "tests" / "conformance"
PAGE = ROOT / "docs" / "conformance.md"

VERSIONS = {"v3": "3.1.1", "v5": "5"}
SIDES = ("server", "client", "both")

Key = tuple[str, str]  # version and number


class CatalogueError(Exception):
    """The catalogue or a mark is wrong; the text names the file."""


@dataclass(frozen=True)
class Clause:
    """One statement of a specification."""

    version: str
    id: str
    side: str
    says: str

    @property
    def key(self) -> Key:
        return self.version, self.id

    @property
    def needs_test(self) -> bool:
        """Statements that only bind clients are listed, not tested."""
        return self.side != "client"


def read_clauses(folder: Path = CLAUSES) -> list[Clause]:
    """The whole catalogue, in the order of the specifications."""
    found: dict[Key, Clause] = {}
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["clause"]:
            clause = Clause(**entry)
            if clause.version not in VERSIONS.values() or clause.side not in SIDES or not clause.says:
                raise CatalogueError(f"{path.name}: {clause}")
            if clause.key in found:
                raise CatalogueError(f"{path.name}: {clause.id} of MQTT {clause.version} is catalogued twice")
            found[clause.key] = clause
    return sorted(found.values(), key=_order)


def _order(clause: Clause) -> tuple[str, list[int]]:
    return clause.version, [int(number) for number in re.findall(r"\d+", clause.id)]


def read_marks(folder: Path = TESTS) -> Iterator[tuple[Key, str]]:
    """Every statement that a test names, with the test as `file::test`."""
    for path in sorted(folder.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for key in _marked(node, path):
                    yield key, f"{path.name}::{node.name}"


def _marked(node: ast.FunctionDef | ast.AsyncFunctionDef, path: Path) -> Iterator[Key]:
    for mark in node.decorator_list:
        if not (isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "clause"):
            continue
        for keyword in mark.keywords:
            try:
                numbers = ast.literal_eval(keyword.value)
            except ValueError:
                raise CatalogueError(f"{path.name}:{mark.lineno}: write the numbers of the clauses as text") from None
            for number in (numbers,) if isinstance(numbers, str) else numbers:
                yield VERSIONS[keyword.arg or ""], number


def covered(clauses: list[Clause], marks: Iterator[tuple[Key, str]]) -> dict[Key, list[str]]:
    """Which tests cover which statement; a mark that names no catalogued statement is an error."""
    tests: dict[Key, list[str]] = {clause.key: [] for clause in clauses}
    for key, test in marks:
        if key not in tests:
            raise CatalogueError(f"{test} names {key[1]} of MQTT {key[0]}, which is not in the catalogue")
        if test not in tests[key]:
            tests[key].append(test)
    return tests


def missing(clauses: list[Clause], tests: dict[Key, list[str]]) -> list[Clause]:
    """Statements about servers that no test covers."""
    return [clause for clause in clauses if clause.needs_test and not tests[clause.key]]


def render(clauses: list[Clause], tests: dict[Key, list[str]]) -> str:
    """The page."""
    lines = [
        "# Conformance",
        "",
        "Every numbered statement of MQTT 3.1.1 and MQTT 5, in our words, and the tests in `tests/conformance/` that",
        "would fail if the broker broke it. Statements that bind only clients are listed for completeness.",
        "Made by `scripts/conformance_table.py`; do not edit.",
        "",
        "| | statements | about a server | of these tested |",
        "|---|---|---|---|",
    ]
    for version in VERSIONS.values():
        own = [clause for clause in clauses if clause.version == version]
        needed = [clause for clause in own if clause.needs_test]
        done = [clause for clause in needed if tests[clause.key]]
        lines.append(f"| MQTT {version} | {len(own)} | {len(needed)} | {len(done)} |")
    for version in VERSIONS.values():
        lines += ["", f"## MQTT {version}", "", "| statement | side | says | tests |", "|---|---|---|---|"]
        lines += [_row(clause, tests[clause.key]) for clause in clauses if clause.version == version]
    return "\n".join(lines) + "\n"


def _row(clause: Clause, tests: list[str]) -> str:
    says = clause.says.replace("|", "\\|")
    names = "<br>".join(f"`{test}`" for test in tests) or ("**none**" if clause.needs_test else "")
    return f"| {clause.id} | {clause.side} | {says} | {names} |"


def main(arguments: list[str] | None = None) -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, report what is missing or stale")
    options = parser.parse_args(arguments)
    try:
        clauses = read_clauses()
        tests = covered(clauses, read_marks())
    except CatalogueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    page = render(clauses, tests)
    untested = missing(clauses, tests)
    for clause in untested:
        sys.stderr.write(f"no test covers {clause.id} of MQTT {clause.version}: {clause.says}\n")
    if not options.check:
        PAGE.write_text(page)
        sys.stdout.write(f"{PAGE.relative_to(ROOT)}: {len(clauses)} statements, {len(untested)} lack a test\n")
        return 0
    stale = not PAGE.exists() or PAGE.read_text() != page
    if stale:
        sys.stderr.write(f"{PAGE.relative_to(ROOT)} is stale; run scripts/conformance_table.py\n")
    return 1 if untested or stale else 0


if __name__ == "__main__":
    sys.exit(main())
