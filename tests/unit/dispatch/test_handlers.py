"""User's functions in threads: whatever they raise is told, and no thread ends with it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from motorcade.dispatch.handlers import Threads


async def test_a_function_that_ends_the_program_ends_no_thread() -> None:
    """Neither `sys.exit` nor a cancellation, of which Python says that they are no ordinary errors."""

    def handle(message: Any) -> bytes:
        if message == "exit":
            sys.exit("done")
        if message == "cancel":
            raise asyncio.CancelledError
        return b"ok"

    threads = Threads(handle, 1)
    async with asyncio.timeout(60):
        outcomes = await threads.handle([b'"exit"', b'"cancel"', b'"fine"'])
        assert [(None, "SystemExit: done"), (None, "CancelledError"), (b"ok", None)] == outcomes
        assert [(b"ok", None)] == await threads.handle([b'"fine"'])
    threads.close()
