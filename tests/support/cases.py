"""Tables of cases that one test goes through: a failure lists every case that is not as it should be.

assert [] == unlike((says, refusal(OptionError, parse, options)) for options, says in WRONG)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable


def refusal(error: type[BaseException], act: Callable[..., object], *args: object) -> str:
    """What `act` is refused with, or that it is not refused."""
    try:
        return f"not refused: {act(*args)!r}"
    except error as refused:
        return str(refused)


def unlike(told: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs of pattern and text in which the pattern is not found."""
    return [(pattern, text) for pattern, text in told if not re.search(pattern, text)]
