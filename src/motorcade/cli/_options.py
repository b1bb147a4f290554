"""Values on the command line that several nouns take: `--set KEY=VALUE`, durations, topic filters, VINs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from motorcade.core.errors import MotorcadeError

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other option; VALUE is JSON, else text. May be repeated."),
]

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds


def settings(options: list[str]) -> dict[str, object]:
    """Parse `a.b=1` into {"a": {"b": 1}}."""
    tree: dict[str, object] = {}
    for option in options:
        key, found, text = option.partition("=")
        if not found or not all(key.split(".")):
            raise typer.BadParameter(f"{option!r}; write KEY=VALUE", param_hint="--set")
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            inner = place.setdefault(section, {})
            if not isinstance(inner, dict):
                raise typer.BadParameter(f"{option!r}: {section!r} is a value already", param_hint="--set")
            place = inner
        try:
            place[last] = json.loads(text)
        except ValueError:
            place[last] = text
    return tree


def duration(text: str) -> float:
    """Parse `7d`, `12h`, `30m`, `45s` or plain seconds; return seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no duration; write 7d, 12h, 30m, 45s, or 0 for no limit")
    seconds = float(found[1]) * _UNITS[found[2]]
    if math.isinf(seconds):
        raise typer.BadParameter(f"{text[:20]}… is too long for a duration; 0 is no limit")
    return int(seconds) if seconds.is_integer() else seconds


def positive_duration(text: str) -> float:
    """Read a duration that is not 0."""
    seconds = duration(text)
    if not seconds:
        raise typer.BadParameter("it must be longer than 0; leave it out to keep messages as long as the node does")
    return seconds


@contextmanager
def wrong_usage(option: str | None = None, prefix: str = "") -> Iterator[None]:
    """Report an error of Motorcade as wrong usage of an option."""
    try:
        yield
    except MotorcadeError as error:
        raise typer.BadParameter(f"{prefix}{error}", param_hint=option) from error


def topic_filter(text: str) -> str:
    """Check a topic filter."""
    from motorcade.core.topic import check_filter

    with wrong_usage(prefix=f"{text!r}: "):
        check_filter(text)
    return text


def request_id(text: str) -> str:
    """Check the id of a fan-out request."""
    from motorcade.plugins.fanout.batch import check_request_id

    with wrong_usage():
        check_request_id(text)
    return text


def vin(text: str) -> str:
    """Check a VIN."""
    from motorcade.core.vin import check_vin

    with wrong_usage():
        check_vin(text)
    return text


Retention = Annotated[
    float | None,
    typer.Option(parser=duration, metavar="7d|12h|30m|45s", help="How long messages are kept; 0 is no limit."),
]
Topics = Annotated[
    list[str] | None,
    typer.Option("-t", "--topic", parser=topic_filter, metavar="FILTER", help="Topic filter. May be repeated."),
]
