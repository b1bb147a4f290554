"""Tables as somebody names them on a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from motorcade.pipelines import PipelineError
from motorcade.pipelines.tables import tables_of
from tests.support.cases import refusal, unlike


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.parquet", "a.csv", "a.tsv.gz", "a.jsonl", "a.orc", "secret", "a.dat"):
        (tmp_path / name).write_text("pass me\n")
    (tmp_path / "folder").mkdir()
    return tmp_path


def test_the_ending_tells_the_format(here: Path) -> None:
    kinds = {"a.parquet": "parquet", "folder": "parquet", "a.csv": "csv", "a.tsv.gz": "csv", "a.jsonl": "json"}
    for place, kind in kinds.items():
        (table,) = tables_of([f"fleet={place}"], [])
        assert ("fleet", str(here / place), kind) == (table.name, table.place, table.format)
        assert table.options.get("sep") == ("\t" if "tsv" in place else None)


def test_options_belong_to_their_table(here: Path) -> None:
    first, second = tables_of(
        ["fleet=a.csv", "parts=a.dat"], ["fleet.sep=;", "fleet.header=false", "parts.format=csv", "parts.quote=="]
    )
    assert (";", "false", "=") == (first.options["sep"], first.options["header"], second.options["quote"])
    assert "csv" == second.format
    assert "false" == second.options["inferSchema"], "text is text"


def test_a_database_has_its_table_and_a_password_that_is_nowhere_shown(here: Path) -> None:
    (table,) = tables_of(["fleet=jdbc:derby:memory:x"], ["fleet.password=@secret", "fleet.user=me"])
    assert {"url": "jdbc:derby:memory:x", "dbtable": "fleet", "password": "pass me", "user": "me"} == table.options
    assert "fleet=jdbc:derby:memory:x dbtable=fleet user=me" == table.identity
    assert "pass me" not in repr(table)
    (other,) = tables_of(["fleet=jdbc:x"], ["fleet.query=SELECT 1"])
    assert "dbtable" not in other.options


def test_what_is_wrong_is_named(here: Path) -> None:
    cases: list[tuple[list[str], list[str], str]] = [
        (["a.csv"], [], "write NAME=PATH"),
        (["a-b=a.csv"], [], "write NAME=PATH"),
        (["fleet="], [], "write NAME=PATH"),
        (["fleet=a.csv", "fleet=a.orc"], [], "two tables 'fleet'"),
        (["fleet=nowhere.csv"], [], "there is no file or folder nowhere.csv"),
        (["fleet=a.csv"], ["sep=;"], "'sep' is no option of a table"),
        (["fleet=a.csv"], ["flet.sep=;"], "a table 'flet', which is not there"),
        (["fleet=a.csv"], ["fleet.sep=@nowhere"], "fleet.sep: cannot read nowhere"),
        (["fleet=a.csv"], ["fleet.format=xml"], "none of parquet, csv, json, orc"),
        (["fleet=jdbc:pg://h/db?user=me&password=geheim"], [], r"fleet\.password=@FILE"),
    ]
    told = [(says, refusal(PipelineError, tables_of, tables, options)) for tables, options, says in cases]
    assert [] == unlike(told)
    assert "geheim" not in str(told)
