"""docs/fleet.md says what is so: options and their defaults, profiles, counts, and an example that runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec

from motorcade.fleet import PROFILES, Behaviour, VehicleCounts
from motorcade.fleet.profile import read_profile
from tests.support.node import ROOT, NodeProcess

PAGE = (ROOT / "docs" / "fleet.md").read_text()
OF_A_FILE = {"share": 1, "like": "steady"}


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_every_option_of_a_behaviour_stands_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section("Profiles"), re.MULTILINE))
    wanted = OF_A_FILE | msgspec.to_builtins(Behaviour())
    shown = {
        name: tomllib.loads(f"x = {text}")["x"] for name, text in rows.items() if name in wanted and "`" not in text
    }
    shown |= {name: rows[name].strip().strip("`") for name in ("like", "leave")}
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in wanted.items()} == shown


def test_every_profile_is_described() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|$", section("Profiles"), re.MULTILINE))
    assert set(PROFILES) <= set(rows)
    for name in ("steady", "commuter", "tunnel", "reboot", "slow", "silent"):
        assert PROFILES[name].about == rows[name].strip()


def test_counts_of_the_report_exist() -> None:
    named = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (.*?) \|", section("The report"), re.MULTILINE))))
    assert named
    assert named <= set(VehicleCounts().as_dict())


def test_the_file_on_the_page_is_a_profile(tmp_path: Path) -> None:
    (text,) = blocks("toml")
    path = tmp_path / "own.toml"
    path.write_text(text)
    city, lorry = read_profile(path).kinds
    assert (3, (60, 600), 0.1) == (city.share, city.behaviour.asleep, lorry.behaviour.refuse)


async def test_the_example_runs() -> None:
    (text,) = blocks("python")
    names: dict[str, object] = {"__name__": "page"}
    exec(compile(text, "docs/fleet.md", "exec"), names)
    example = names["lost_and_found"]
    with NodeProcess() as node:
        assert callable(example)
        await example(node.port)


def test_flags_exist() -> None:
    source = (ROOT / "src" / "motorcade" / "cli" / "fleet.py").read_text()
    assert [] == [option for option in re.findall(r"`(--[\w-]+)", PAGE) if f'"{option}"' not in source]
