"""Logs: events with fields, for people on a terminal and as JSON lines for machines.

Everything, structlog's and the standard library's, goes through one handler on the root logger, so that a library's
warning looks like our own. Levels are those of the standard library: changing them while running needs no new loggers.
Values under a key that sounds like a secret, values of headers, and passwords in URLs are never written; control
characters are written as escapes, so that no client can speak to the terminal.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, TextIO

import msgspec
import structlog

from motorcade.core.redaction import HEADERS, HIDDEN, escape_json, is_secret, without_secrets
from motorcade.core.words import printable

__all__ = ["HEADERS", "HIDDEN", "configure", "is_secret", "redact", "relay", "without_secrets"]


HANDLER: Final = "motorcade"  #: name of the handler that all logs go to, at the root logger
#: Libraries that speak of each connection at INFO; what matters of it, the node logs itself.
_TALKATIVE = ("uvicorn", "websockets", "asyncio", "httpx", "httpcore")


def redact(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Hide secrets, in nested mappings too. A structlog processor."""
    for key, value in event.items():
        event[key] = _hide(key, value)
    return event


def _hide(key: str, value: object, *, secret: bool = False) -> object:
    secret = secret or is_secret(key)
    if isinstance(value, Mapping):
        secret = secret or key.lower() == HEADERS
        return {inner: _hide(str(inner), item, secret=secret) for inner, item in value.items()}
    if secret:
        return value if value is None or isinstance(value, bool) else HIDDEN
    if isinstance(value, list | tuple):
        return [_hide(key, item) for item in value]
    return without_secrets(value) if isinstance(value, str) else value


def _escape(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Let no control character through to a terminal. A structlog processor."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = printable(value, "\n\t" if key == "exception" else "")
    return event


def configure(level: str = "info", format: str = "auto", stream: TextIO | None = None) -> None:  # noqa: A002 - the key's name
    """Send all logs to `stream` (standard error). May be called again; the last call counts."""
    target = stream if stream is not None else sys.stderr
    console = format == "console" or (format == "auto" and target.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(target)
    handler.set_name(HANDLER)
    handler.setFormatter(_formatter(shared, console=console, colors=console and target.isatty()))
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.get_name() == HANDLER]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def relay(event: Mapping[str, Any]) -> None:
    """Write an event of another process, which has its level, time and logger already, as one of this log."""
    record = logging.makeLogRecord({"msg": dict(event), "_logger": None, "_name": str(event.get("level", "info"))})
    for handler in logging.getLogger().handlers:
        if handler.get_name() == HANDLER:
            handler.handle(record)


def _formatter(
    shared: list[structlog.typing.Processor], *, console: bool, colors: bool
) -> structlog.stdlib.ProcessorFormatter:
    end: list[structlog.typing.Processor]
    if console:
        renderer: structlog.typing.Processor = structlog.dev.ConsoleRenderer(
            colors=colors, exception_formatter=structlog.dev.plain_traceback
        )
        end = [structlog.processors.format_exc_info, redact, _escape, renderer]
    else:
        end = [structlog.processors.format_exc_info, redact, structlog.processors.JSONRenderer(serializer=_json)]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *end],
    )


def _json(event: object, **_: object) -> str:
    return escape_json(msgspec.json.encode(event, enc_hook=repr).decode())
