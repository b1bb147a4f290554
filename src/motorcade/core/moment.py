"""Times that people write."""

from __future__ import annotations

import re
from datetime import UTC, datetime, tzinfo
from typing import Final

# `datetime` reads more than people expect, `20261115` for instance, which they would mean as a number.
_ISO: Final = re.compile(r"\d{4}-\d\d-\d\d([T ].*)?", re.ASCII)


def seconds_of(text: str, zone: tzinfo | None = UTC) -> float | None:
    """Return seconds since the epoch of an ISO 8601 date or time; None if it is none, or before the epoch.

    Without a zone of its own it is in `zone`, where None is that of this machine.
    """
    if not _ISO.fullmatch(text):
        return None
    try:
        moment = datetime.fromisoformat(text)
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=zone)).timestamp()
    except (ValueError, OverflowError):
        return None
    return seconds if seconds >= 0 else None
