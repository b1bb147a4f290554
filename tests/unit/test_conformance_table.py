"""docs/conformance.md is complete and current, and the tool that makes it notices when it is not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def table() -> ModuleType:
    """scripts/conformance_table.py as a module."""
    spec = importlib.util.spec_from_file_location("conformance_table", ROOT / "scripts" / "conformance_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def catalogue(folder: Path, *entries: str) -> Path:
    """A catalogue of statements `version id side`."""
    folder.mkdir(exist_ok=True)
    text = ""
    for entry in entries:
        version, number, side = entry.split()
        text += f'[[clause]]\nversion = "{version}"\nid = "{number}"\nside = "{side}"\nsays = "It is so."\n'
    (folder / "10-some.toml").write_text(text)
    return folder


def marked(folder: Path, mark: str) -> Path:
    """A folder with one marked test."""
    folder.mkdir(exist_ok=True)
    (folder / "test_some.py").write_text(f"@clause({mark})\ndef test_it() -> None: ...\n")
    return folder


def test_every_statement_about_a_server_has_a_test(table: ModuleType) -> None:
    """No statement of the catalogue that binds a server is without a test."""
    clauses = table.read_clauses()
    assert [] == [clause.key for clause in table.missing(clauses, table.covered(clauses, table.read_marks()))]


def test_the_page_is_current(table: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The page in docs/ is what the tool would write now."""
    assert (0, "") == (table.main(["--check"]), capsys.readouterr().err)


def test_both_catalogues_are_whole(table: ModuleType) -> None:
    """Numbers within a section have no gaps, except those that the specifications leave out themselves."""
    gaps = set()
    last: dict[tuple[str, str], int] = {}
    for clause in table.read_clauses():
        section, _, number = clause.id.rpartition("-")
        for skipped in range(last.get((clause.version, section), 0) + 1, int(number)):
            gaps.add((clause.version, f"{section}-{skipped}"))
        last[clause.version, section] = int(number)
    assert {("5", "MQTT-2.2.1-1"), ("5", "MQTT-4.8.2-5")} >= gaps


def test_an_untested_statement_is_found(table: ModuleType, tmp_path: Path) -> None:
    """Statements about servers and about both sides need a test, those about clients do not."""
    clauses = table.read_clauses(
        catalogue(tmp_path / "c", "5 MQTT-1.0.0-1 server", "5 MQTT-1.0.0-2 both", "5 MQTT-1.0.0-3 client")
    )
    tests = table.covered(clauses, table.read_marks(marked(tmp_path / "t", 'v5="MQTT-1.0.0-1"')))
    assert [("5", "MQTT-1.0.0-2")] == [clause.key for clause in table.missing(clauses, tests)]


def test_a_mark_counts_for_its_version_only(table: ModuleType, tmp_path: Path) -> None:
    """The same number in the other specification is another statement."""
    clauses = table.read_clauses(catalogue(tmp_path / "c", "5 MQTT-1.0.0-1 server", "3.1.1 MQTT-1.0.0-1 server"))
    tests = table.covered(clauses, table.read_marks(marked(tmp_path / "t", 'v3=("MQTT-1.0.0-1",)')))
    assert ["test_some.py::test_it"] == tests["3.1.1", "MQTT-1.0.0-1"]
    assert [] == tests["5", "MQTT-1.0.0-1"]


@pytest.mark.parametrize("mark", ('v5="MQTT-9.9.9-9"', "v5=NUMBERS"), ids=("unknown", "not-text"))
def test_a_wrong_mark_is_an_error(table: ModuleType, tmp_path: Path, mark: str) -> None:
    """A mark that names no catalogued statement, or hides its name in a variable, is not ignored."""
    clauses = table.read_clauses(catalogue(tmp_path / "c", "5 MQTT-1.0.0-1 server"))
    with pytest.raises(table.CatalogueError, match=r"test_some\.py"):
        table.covered(clauses, table.read_marks(marked(tmp_path / "t", mark)))


@pytest.mark.parametrize(
    "entries",
    (("5 MQTT-1.0.0-1 server", "5 MQTT-1.0.0-1 both"), ("5 MQTT-1.0.0-1 nobody",), ("6 MQTT-1.0.0-1 server",)),
    ids=("twice", "side", "version"),
)
def test_a_wrong_catalogue_is_an_error(table: ModuleType, tmp_path: Path, entries: tuple[str, ...]) -> None:
    """A statement that is listed twice, or has an unknown side or version, is not accepted."""
    with pytest.raises(table.CatalogueError, match=r"10-some\.toml"):
        table.read_clauses(catalogue(tmp_path / "c", *entries))
