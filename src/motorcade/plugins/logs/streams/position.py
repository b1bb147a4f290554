"""The position in a filter: where a client wants to begin.

    $stream/{name}             with the user property `stream-offset` (MQTT 5), or without any position
    $stream/{name}/{offset}    the same for MQTT 3.1.1

An offset is `earliest`, `latest`, the number of a record (that one comes first), or a time: ISO 8601 (without a zone it
is UTC) or `@` and seconds since the epoch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum, auto
from typing import Final

from motorcade.core.errors import MotorcadeError
from motorcade.core.message import UserProperties
from motorcade.core.subscription import Subscription
from motorcade.core.topic import is_wildcard
from motorcade.extension.declared import check_name

PREFIX: Final = "$stream/"
OFFSET: Final = "stream-offset"  #: user property, of SUBSCRIBE and of delivered messages
MOST: Final = 2**48 - 1  #: an offset; tags of messages have room for so much
_FORMS: Final = "'earliest', 'latest', a number from 1, an ISO 8601 time, or '@' and seconds since the epoch"
_ISO: Final = re.compile(r"\d{4}-\d\d-\d\d([T ].*)?", re.ASCII)


class PositionError(MotorcadeError):
    """A filter or an offset that cannot be meant."""


class Origin(StrEnum):
    """The point from which a position counts."""

    EARLIEST = auto()
    LATEST = auto()
    NUMBER = auto()
    TIME = auto()


@dataclass(frozen=True, slots=True)
class Position:
    """A position to begin at."""

    origin: Origin
    value: float = 0  #: offset of the first record wanted, or seconds since the epoch


EARLIEST: Final = Position(Origin.EARLIEST)
LATEST: Final = Position(Origin.LATEST)


@dataclass(frozen=True, slots=True)
class Wish:
    """The stream and position that a subscription asks for."""

    name: str
    written: str  #: the offset in the filter, as written; "": there is none
    position: Position | None  #: None: none was given


def read_wish(subscription: Subscription) -> Wish:
    """Read what a subscription asks for; `PositionError` or `BadNameError` tells the client what is wrong."""
    name, _, written = subscription.filter.removeprefix(PREFIX).partition("/")
    if is_wildcard(subscription.filter):
        raise PositionError(f"{subscription.filter!r}: streams are read one by one, without wildcards")
    check_name("stream", name)
    if subscription.filter.count("/") > 1 and not written:
        raise PositionError(f"{subscription.filter!r}: an offset must follow the last '/': {_FORMS}")
    text = written or _property(subscription.user_properties)
    return Wish(name, written, read_position(text) if text else None)


def _property(properties: UserProperties) -> str:
    """Return the value of the property; the last one counts."""
    found = [value for name, value in properties if name == OFFSET]
    if found and not found[-1]:
        raise PositionError(f"user property {OFFSET} is empty; it is {_FORMS}")
    return found[-1] if found else ""


def read_position(text: str) -> Position:
    """Return the position that a text means; `PositionError` if it means none."""
    if text in {Origin.EARLIEST, Origin.LATEST}:
        return Position(Origin(text))
    if text.isascii() and text.isdigit():
        number = int(text) if len(text) < 20 else MOST + 1
        if not 1 <= number <= MOST:
            raise PositionError(f"offset {text[:40]!r}: numbers go from 1 to {MOST}; an offset is {_FORMS}")
        return Position(Origin.NUMBER, number)
    seconds = _seconds(text)
    if seconds is None:
        raise PositionError(f"offset {text[:40]!r} is none of: {_FORMS}")
    return Position(Origin.TIME, seconds)


def _seconds(text: str) -> float | None:
    try:
        if text.startswith("@"):
            seconds = float(text[1:])
            return seconds if math.isfinite(seconds) and seconds >= 0 else None
        if not _ISO.fullmatch(text):
            return None
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
