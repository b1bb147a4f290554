"""Vehicle identification numbers (ISO 3779): what one looks like, and the check digit.

    L M C A A A A A 9 R A 0 0 0 0 0 1
    |-WMI-|--VDS---| | | |--serial--|
                     | | plant
                     | model year
                     check digit, where the maker uses one (North America, China)

Rule 1: a VIN is never corrected, not even its case: two spellings of one vehicle would be two mailboxes, and a letter O
        that its author meant as a zero is a mistake that only the author can mend.
Rule 2: every message says which character is wrong, counted from 1 as people count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from motorcade.core.errors import MotorcadeError

LENGTH: Final = 17
ALPHABET: Final = "0123456789ABCDEFGHJKLMNPRSTUVWXYZ"  #: I, O and Q look like digits and are left out
CHECK: Final = 8  #: index of the check digit
MAX_VINS: Final = 33**5 * 10**6  #: numbers that `make_vin` can tell apart

_SHAPE: Final = re.compile("[A-HJ-NPR-Z0-9]{17}")
_SHAPES: Final = re.compile("(?:[A-HJ-NPR-Z0-9]{17}\n)+")
_SHOWN: Final = 20  # characters of a wrong VIN in a message

# ISO 3779 / 49 CFR 565.15: letters count as digits, each position has a weight, the sum modulo 11 is the check digit.
_VALUES: Final = {
    **{digit: int(digit) for digit in "0123456789"},
    **dict(zip("ABCDEFGH", range(1, 9), strict=True)),
    **dict(zip("JKLMN", range(1, 6), strict=True)),
    "P": 7,
    "R": 9,
    **dict(zip("STUVWXYZ", range(2, 10), strict=True)),
}
_WEIGHTS: Final = (8, 7, 6, 5, 4, 3, 2, 10, 0, 9, 8, 7, 6, 5, 4, 3, 2)


class VinError(MotorcadeError):
    """A text is no vehicle identification number; the message says what is wrong, and where."""


def check_vin(text: str, *, check_digit: bool = False) -> None:
    """Raise `VinError` if a text has not the shape of a VIN or, with `check_digit`, if its ninth character is wrong."""
    if _SHAPE.fullmatch(text) is None:
        raise VinError(f"{_shown(text)} is no VIN: {_problem(text)}")
    if check_digit and text[CHECK] != (right := check_digit_of(text)):
        raise VinError(
            f"{text!r} is no VIN: character 9 is {text[CHECK]!r}, the check digit of the others is {right!r}"
        )


def have_shape(texts: Sequence[str]) -> bool:
    """Return True if all texts have the shape of a VIN; a batch is looked through at once."""
    joined = "\n".join(texts) + "\n"
    return len(joined) == (LENGTH + 1) * len(texts) and _SHAPES.fullmatch(joined) is not None


def check_digit_of(text: str) -> str:
    """Return the check digit of a text of the right shape, whatever stands in its place: `0` to `9` or `X`."""
    remainder = sum(_VALUES[letter] * weight for letter, weight in zip(text, _WEIGHTS, strict=True)) % 11
    return "X" if remainder == 10 else str(remainder)


def make_vin(number: int, wmi: str = "LMC") -> str:
    """Return a valid VIN, check digit included, another one for each number: for simulated vehicles and tests."""
    if not 0 <= number < MAX_VINS:
        raise VinError(f"{number} is no number of a VIN: 0 to {MAX_VINS - 1}")
    high, serial = divmod(number, 10**6)
    attributes = ""
    for _ in range(5):
        high, digit = divmod(high, len(ALPHABET))
        attributes = ALPHABET[(digit + 10) % len(ALPHABET)] + attributes  # A first, so that it looks like a VIN
    vin = f"{wmi}{attributes}0RA{serial:06}"
    check_vin(vin)
    return f"{vin[:CHECK]}{check_digit_of(vin)}{vin[CHECK + 1 :]}"


def _problem(text: str) -> str:
    """Describe what is wrong with the shape; a wrong character before a wrong length, since it may be the cause."""
    for place, letter in enumerate(text[:LENGTH], start=1):
        if letter in ALPHABET:
            continue
        if letter.upper() in ALPHABET:
            return f"character {place} is {letter!r}; it is written in upper case"
        if letter in "IOQioq":
            return f"character {place} is {letter!r}; it has no I, O and Q (1 and 0 perhaps?)"
        return f"character {place} is {letter!r}; it has digits and letters A to Z only"
    return f"it has {len(text)} characters instead of {LENGTH}"


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}…"
