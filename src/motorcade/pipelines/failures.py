"""Errors in short: the innermost error of what Spark reports, without its Java.

Spark wraps an error of ours again and again: a Python traceback inside a Java exception inside a Python exception. Who
reads the end of a command wants the sentence inside; the rest is in the log of the run.
"""

from __future__ import annotations

import re
from typing import Any, Final

from motorcade.core.errors import MotorcadeError

#: Characters of words that are not ours.
MAX_WORDS: Final = 600

GONE: Final = "Spark's Java has ended: it was killed, or out of memory (--set spark.driver.memory=4g gives it more)"

HELPER_GONE: Final = "a Python process of Spark's has ended: it was killed, or out of memory"

#: All that Java has to say when the process at the other end of a connection is no more.
_CUT_OFF: Final = "EOFException"

#: What py4j says of a call whose answer has not come; one that has failed has a reason behind the full stop.
_UNANSWERED: Final = re.compile(r"An error occurred while calling \S+(?<!\.)")

#: A line of a Python traceback that names an error, `motorcade.x.OptionError: words`, and the lines that it goes on in.
_PYTHON: Final = re.compile(
    r"^(?P<path>(?:\w+\.)*)(?P<name>[A-Z]\w*(?:Error|Exception|Interrupt|Exit))"
    r"(?:: (?P<words>.*(?:\n(?![ \t\n]|\w+[.:]|SQLSTATE|==+ ).+)*)|\s*$)",
    re.MULTILINE,
)

#: What Spark says before the words of an error, and behind them: where the query was, its plan, the stack.
_BEFORE: Final = re.compile(r"^\s*(?:\[STREAM_FAILED\] Query \[[^\]]*\] terminated with exception:|(?:[a-z]\w*\.)+)\s*")
_BEHIND: Final = re.compile(
    r"\s*(?:SQLSTATE: \w+|=== Streaming Query ===|== SQL |== DataFrame |\n\s*at [\w.$/]+\(|Driver stacktrace:"
    r"|JVM stacktrace:)"
)
_CAUSE: Final = re.compile(r"Caused by: (?:[\w.$]+(?:Exception|Error|Failure)): (.*)")

#: Errors that say where, but not why.
_WITHOUT_REASON: Final = re.compile(r"(?:SparkException: )?\[(?:FAILED_READ_FILE|FAILED_JDBC)")

#: What Spark says if a process that it has started does not answer within ten seconds, which no setting changes.
HASTE: Final = "Python worker failed to connect back"

#: Errors of Spark's that do not say what to do.
_ADVICE: Final = {
    HASTE: "it had ten seconds: the machine is too busy; start the command again when there is less to do",
    "[MALFORMED_CSV_RECORD]": "a line needs as many fields as the file has names; mend it, or let "
    "`--option TABLE.mode=DROPMALFORMED` leave such lines out",
}

#: User and password of a URL; the options of a source are part of a plan.
_SECRET: Final = re.compile(r"(?<=://)[^/@\s]+@")


def words(error: BaseException) -> str:
    """Return the message of the innermost error; our own as they are."""
    ours = _ours(error)
    if ours is None and _is_of_connection(error):
        return GONE
    if ours is not None:
        return str(ours)
    said = of_text(_text(error)) or of_text(str(getattr(error, "_cause", None) or type(error).__name__))
    if _WITHOUT_REASON.match(said) and (why := _cause(error)) and why not in said:
        said = f"{said.rstrip('.')}: {why}"
    said += "".join(f" ({advice})" for name, advice in _ADVICE.items() if name in said)
    return HELPER_GONE if said == _CUT_OFF else said


def _cause(error: BaseException) -> str:
    """Return the message of the innermost cause that Spark knows of."""
    java = getattr(error, "java_exception", None)
    if java is None:  # an error that PySpark has made its own, causes and all
        cause: Any = getattr(error, "_cause", None)
        while getattr(cause, "_cause", None) is not None:
            cause = cause._cause  # noqa: SLF001 - it does not tell otherwise
        return of_text(str(cause)) if cause is not None else ""
    try:
        while java.getCause() is not None:
            java = java.getCause()
        return of_text(str(java.getMessage()))
    except Exception:  # noqa: BLE001 - of any kind: Java has gone before it could tell
        return ""


def is_known(error: BaseException) -> bool:
    """Return True if its message is enough: raised by Spark, or by us on purpose. Others need a traceback."""
    of_spark = type(error).__module__.partition(".")[0] in {"pyspark", "py4j"}
    return of_spark or _ours(error) is not None or _is_of_connection(error)


def is_of_haste(error: BaseException) -> bool:
    """Return True if it comes from a machine that is too busy."""
    return HASTE in words(error)


def _is_of_connection(error: BaseException) -> bool:
    """Return True for an error of a connection: those of a driver's main thread are to its Java."""
    kind = type(error).__name__
    unanswered = kind == "Py4JError" and _UNANSWERED.fullmatch(str(error)) is not None
    return unanswered or kind == "Py4JNetworkError" or isinstance(error, ConnectionError)


def is_ours(error: BaseException) -> bool:
    """Return True if the message is ours, so that nothing else is needed."""
    return _ours(error) is not None or _innermost(_text(error))[1]


def of_text(text: str) -> str:
    """Return the message of the innermost error in what Spark reports."""
    said, ours = _innermost(text)
    line = _SECRET.sub("***@", " ".join(said.split()))
    return line if ours or len(line) <= MAX_WORDS else f"{line[:MAX_WORDS]} …"


def _innermost(text: str) -> tuple[str, bool]:
    """Return the innermost error as text, and whether it is one of ours."""
    found = [match for match in _PYTHON.finditer(text) if not match["name"].startswith("Py4J")]
    if "Traceback (most recent call last)" in text and found:
        last = found[-1]
        said = _BEHIND.split(last["words"] or "", maxsplit=1)[0]
        if last["path"].startswith("motorcade."):
            return said, True
        return f"{last['name']}: {said}" if said else last["name"], False
    causes = _CAUSE.findall(text)
    return _BEHIND.split(_BEFORE.sub("", causes[-1] if causes else text), maxsplit=1)[0], False


def _ours(error: BaseException | None) -> MotorcadeError | None:
    """Return an error of ours that another one was raised from."""
    while error is not None:
        if isinstance(error, MotorcadeError):
            return error
        error = error.__cause__
    return None


def _text(error: BaseException) -> str:
    java = getattr(error, "java_exception", None)  # of py4j: its own text is the whole Java stack
    if java is None:
        return str(error) or type(error).__name__
    try:
        return str(java.toString())
    except Exception:  # noqa: BLE001 - of any kind: Java has gone before it could tell
        return GONE
