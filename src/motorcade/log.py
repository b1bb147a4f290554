"""Logs: events with fields, for people on a terminal and as JSON lines for machines.

Everything, structlog's and the standard library's, goes through one handler on the root logger, so that a library's
warning looks like our own. Levels are those of the standard library: changing them while running needs no new loggers.
Values under a key that sounds like a secret are never written.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, TextIO

import msgspec
import structlog

_SECRET = re.compile(r"passw(or)?d|secret|token|credential|authorization|private_key|api_key", re.IGNORECASE)
HIDDEN = "***"

#: Libraries that speak of each connection at INFO; what matters of it, the node logs itself.
_TALKATIVE = ("uvicorn", "websockets", "asyncio", "httpx", "httpcore")


def is_secret(key: str) -> bool:
    """Whether a value under this name must not be shown."""
    return _SECRET.search(key) is not None


def redact(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Hide secrets, in nested mappings too. A structlog processor."""
    for key, value in event.items():
        event[key] = _hide(key, value)
    return event


def _hide(key: str, value: object) -> object:
    if is_secret(key):
        return value if value is None else HIDDEN
    if isinstance(value, Mapping):
        return {inner: _hide(str(inner), item) for inner, item in value.items()}
    return value


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
    handler.set_name("motorcade")
    handler.setFormatter(_formatter(shared, console=console, colors=console and target.isatty()))
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.get_name() == "motorcade"]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _formatter(
    shared: list[structlog.typing.Processor], *, console: bool, colors: bool
) -> structlog.stdlib.ProcessorFormatter:
    end: list[structlog.typing.Processor]
    if console:
        end = [structlog.dev.ConsoleRenderer(colors=colors)]
    else:
        end = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_json)]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *end],
    )


def _json(event: object, **_: object) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()
