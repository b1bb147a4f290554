"""The log of a process, as tests configure it, and as it was before."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog


@contextmanager
def log_put_back() -> Iterator[None]:
    """Put handlers, level and processors back: a handler that stays writes to a stream that is closed."""
    root = logging.getLogger()
    handlers, level, before = list(root.handlers), root.level, structlog.get_config()
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        structlog.configure(**before)
