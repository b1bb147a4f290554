"""Lists of vehicles as people have them: a file with a VIN on each line.

Blank lines and lines that begin with `#` are ignored, as is space around a VIN. Anything else that is no VIN is
a mistake that is named by file and line; nothing is corrected, and nothing of such a list is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from motorcade.cli import _files
from motorcade.core.errors import MotorcadeError

SHOWN = 10  #: wrong lines that are named; the others are counted


class VinListError(MotorcadeError):
    """A list has lines that are no VINs, or none at all."""


@dataclass(frozen=True)
class VinList:
    """The vehicles of a file, each once, in its order."""

    vins: list[str]
    duplicates: int  #: lines that named a vehicle a second time


def read(place: str, *, check_digit: bool) -> VinList:
    """Read a list of VINs from a file, or from standard input (`-`); `VinListError` names the wrong lines."""
    from motorcade.core.vin import VinError, check_vin

    name = "<stdin>" if place == "-" else place
    vins: dict[str, None] = {}
    named = 0
    wrong: list[str] = []
    mistakes = 0
    for number, line in enumerate(_files.read("--vins", place).split(b"\n"), start=1):
        text = line.strip()
        if not text or text.startswith(b"#"):
            continue
        named += 1
        try:
            vin = text.decode()
            check_vin(vin, check_digit=check_digit)
        except (VinError, UnicodeDecodeError) as error:
            mistakes += 1
            if mistakes <= SHOWN:
                why = "this is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
                wrong.append(f"{name}:{number}: {why}")
        else:
            vins[vin] = None
    if mistakes:
        rest = f"\n… and {mistakes - SHOWN} more" if mistakes > SHOWN else ""
        count = "a line is" if mistakes == 1 else f"{mistakes} lines are"
        raise VinListError("\n".join(wrong) + f"{rest}\n{count} wrong; nothing was sent")
    if not vins:
        raise VinListError(f"{name} names no vehicle; write one VIN on each line")
    return VinList(list(vins), named - len(vins))
