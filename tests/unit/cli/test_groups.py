"""Options that verbs share: Typer sees the fields of a group, the function gets the group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from motorcade.cli._groups import expand, verb


@dataclass(frozen=True)
class Place:
    host: Annotated[str, typer.Option("-h", "--host")]
    port: Annotated[int, typer.Option("--port", min=1)] = 1883


@dataclass(frozen=True)
class SecurePlace(Place):
    cert: Annotated[str | None, typer.Option("--cert")] = None


def test_a_verb_gets_its_groups_and_its_own_options() -> None:
    app = typer.Typer()
    seen: list[object] = []

    @verb(app, "go")
    def _go(name: str, often: int = 1, *, place: SecurePlace) -> None:
        seen.append((name, often, place))

    runner = CliRunner()
    assert 0 == runner.invoke(app, ["car", "--often", "2", "-h", "there", "--cert", "c.pem"]).exit_code
    assert [("car", 2, SecurePlace("there", 1883, "c.pem"))] == seen
    assert 2 == runner.invoke(app, ["car"]).exit_code, "a field without a default is required"
    assert 2 == runner.invoke(app, ["car", "-h", "there", "--port", "0"]).exit_code, "bounds of a field hold"
    assert 1 == len(seen)


def test_two_groups_stand_in_the_order_of_the_parameters() -> None:
    @dataclass(frozen=True)
    class Other:
        deep: bool = False

    def work(*, other: Other, place: Place) -> None:
        """Words of the help."""

    work.__annotations__ = {"other": Other, "place": Place}  # a local class is out of reach for text annotations
    expanded = expand(work)
    assert ["deep", "host", "port"] == list(expanded.__annotations__)
    assert "Words of the help." == expanded.__doc__
