"""Values on the command line that several nouns take: `--set KEY=VALUE`, durations, topic filters."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated

import typer

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of its own; VALUE is JSON, else text. Several times."),
]

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds


def settings(options: list[str]) -> dict[str, object]:
    """`a.b=1` as {"a": {"b": 1}}."""
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
    """`7d`, `12h`, `30m`, `45s` or plain seconds, in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no duration; write 7d, 12h, 30m, 45s, or 0 for no limit")
    seconds = float(found[1]) * _UNITS[found[2]]
    if math.isinf(seconds):
        raise typer.BadParameter(f"{text[:20]}… is too long for a duration; 0 is no limit")
    return int(seconds) if seconds.is_integer() else seconds


def topic_filter(text: str) -> str:
    """Check a topic filter."""
    from motorcade.core.errors import TopicError
    from motorcade.core.topic import check_filter

    try:
        check_filter(text)
    except TopicError as error:
        raise typer.BadParameter(f"{text!r}: {error}") from error
    return text


Retention = Annotated[
    float | None,
    typer.Option(parser=duration, metavar="7d|12h|30m|45s", help="How long messages are kept; 0 is no limit."),
]
Topics = Annotated[
    list[str] | None,
    typer.Option("-t", "--topic", parser=topic_filter, metavar="FILTER", help="What it takes. Several times."),
]
