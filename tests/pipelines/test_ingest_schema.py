"""Schema files as they are written, and what is wrong with them before Spark sees them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from motorcade.pipelines import schema
from motorcade.pipelines.schema import SchemaError
from tests.support.cases import refusal, unlike

FIELDS = 'fields = "vin STRING"\n'


def test_what_is_wrong_with_a_schema_is_named(tmp_path: Path) -> None:
    cases = [
        ("", "declares no type; write for instance"),
        ("types = 3", "declares no type"),
        ("[types", "is no TOML: "),
        ("[typs.position]", "typs: there is no such key; did you mean 'types'?"),
        ("[types]\nposition = 3", "types.position is a value; write"),
        ("[types.position]\n", r"\[types.position\] Object missing required field `fields`"),
        (f"[types.position]\n{FIELDS}topic = ['a']", r"\[types.position\] topic: there is no such key; did you mean"),
        ("[types.position]\nfields = 3", r"\[types.position\] fields: Expected `str`, got `int`"),
        (f"[types.position]\n{FIELDS}topics = 'a'", "topics: Expected `array`, got `str`"),
        (f"[types.position]\n{FIELDS}topics = []", "topics: is empty; leave it out"),
        (f"[types.position]\n{FIELDS}topics = ['a/#/b']", "topics: 'a/#/b': '#' must be the last level"),
        (f"[types.position]\n{FIELDS}time_unit = 'ms'", "time_unit: says nothing without `time`"),
        (f"[types.position]\n{FIELDS}time = 'at'\ntime_unit = 'h'", "time_unit: 'h' is none of s, ms, us"),
        (f"[types.Position]\n{FIELDS}", "is the name of a folder too"),
        (f"[types.dead_letters]\n{FIELDS}", "not 'dead_letters'"),
        (f"[types.'../x']\n{FIELDS}", "is the name of a folder too"),
        (f"[types.a]\n{FIELDS}[types.b]\n{FIELDS}", r"\[types.b\] topics: is missing, and \[types.a\] has none either"),
        ("".join(f"[types.t{n}]\n{FIELDS}" for n in range(101)), "declares 101 types; at most 100"),
    ]
    path = tmp_path / "schema.toml"
    told = []
    for text, words in cases:
        path.write_text(text)
        told.append((f"^{re.escape(str(path))}: .*{words}", refusal(SchemaError, schema.read, path)))
    assert [] == unlike(told)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"nowhere\.toml: No such file"):
        schema.read(tmp_path / "nowhere.toml")
    (tmp_path / "picture").write_bytes(b"\xff\xd8")
    with pytest.raises(SchemaError, match="is no UTF-8 text"):
        schema.read(tmp_path / "picture")


def test_a_type_that_is_not_resolved_has_no_columns(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(f"[types.position]\n{FIELDS}")
    (found,) = schema.read(path)
    assert ("position", (), False) == (found.name, found.topics, found.strict)
    with pytest.raises(SchemaError, match="were not resolved"):
        _ = found.schema
