"""What went wrong, in as few words as there are: the innermost error of what Spark says, without its Java.

Spark wraps an error of ours again and again: a Python traceback inside a Java exception inside a Python exception. Who
reads the end of a command wants the sentence inside.
"""

from __future__ import annotations

import re
from typing import Final

from motorcade.core.errors import MotorcadeError

#: Characters of words that are not ours.
MAX_WORDS: Final = 600

#: A line of a Python traceback that names an error: `motorcade.x.OptionError: words`.
_PYTHON: Final = re.compile(
    r"^(?:\w+\.)*(?P<name>[A-Z]\w*(?:Error|Exception|Interrupt|Exit)): (?P<words>.*(?:\n(?![ \t]|\n|\w+[.:]).*)*)",
    re.MULTILINE,
)

#: Where Java begins to tell how it got there.
_STACK: Final = re.compile(r"\n\s*(?:at [\w.$]+\(|Driver stacktrace:|JVM stacktrace:|\.\.\. \d+ more)|\n\nDriver stack")
_CAUSE: Final = re.compile(r"Caused by: (?:[\w.$]+(?:Exception|Error|Failure)): (.*)")


def words(error: BaseException) -> str:
    """The words of the innermost error."""
    inner = _ours(error)
    if inner is not None:
        return str(inner)
    return _shortened(_inside(_text(error)))


def _ours(error: BaseException | None) -> MotorcadeError | None:
    """An error of ours that another one was raised from."""
    while error is not None:
        if isinstance(error, MotorcadeError):
            return error
        error = error.__cause__
    return None


def _text(error: BaseException) -> str:
    java = getattr(error, "java_exception", None)  # of py4j: its own text is the whole Java stack
    if java is not None:
        return str(java.toString())
    return str(error) or type(error).__name__


def _inside(text: str) -> str:
    if "Traceback (most recent call last)" in text:
        found = [match for match in _PYTHON.finditer(text) if not match["name"].startswith("Py4J")]
        if found:
            last = found[-1]
            ours = "motorcade." in text[last.start() : last.start("words")]
            return last["words"] if ours else f"{last['name']}: {last['words']}"
    causes = _CAUSE.findall(text)
    return causes[-1] if causes else _STACK.split(text, maxsplit=1)[0]


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_WORDS else f"{line[:MAX_WORDS]} …"
