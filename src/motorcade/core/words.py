"""Words for people who have written something wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """What was probably meant by an unknown name, as the end of a sentence."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known are: {', '.join(names) or 'none'}"


def printable(text: str, keep: str = "") -> str:
    """A text for a terminal: what is not printable is written as an escape, except what is in `keep`.

    Names, topics and reasons come from clients; a terminal would obey the control sequences in them.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )
