"""Text for people: suggestions, safe output, payloads in JSON."""

from __future__ import annotations

import base64
import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Return what was probably meant by an unknown name, as the end of a sentence."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are: {', '.join(names) or 'none'}"


def printable(text: str, keep: str = "") -> str:
    """Return a text for a terminal: what is not printable is written as an escape, except what is in `keep`.

    Names, topics and reasons come from clients; a terminal would obey the control sequences in them.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def as_text(payload: bytes) -> tuple[str, str]:
    """Return a payload as text and its encoding: `utf8`, or `base64` for what is not UTF-8."""
    try:
        return payload.decode(), "utf8"
    except UnicodeDecodeError:
        return base64.b64encode(payload).decode(), "base64"
