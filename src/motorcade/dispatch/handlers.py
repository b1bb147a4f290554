"""Handlers of a worker: pass a message on as it came, or call a user's function.

    handler(message) ─▶ bytes or text: written as they are
                        None:          nothing is written; the message is acknowledged
                        anything else: written as JSON
                        raises:        the message is refused, with the error as the reason

`message` is the parsed JSON. A handler is called again for a message whose worker was lost, or too slow, so what it
does besides returning must bear that; what it returns is written once.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import msgspec

from motorcade.core.errors import ConfigError

Handler = Callable[[Any], Any] | Callable[[Any], Awaitable[Any]]

decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode


def load_handler(text: str) -> Handler:
    """Load `module:function`, from the Python path or the working directory."""
    module_name, _, path = text.partition(":")
    if not module_name or not path:
        raise ConfigError(f"handler {text!r}: write module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(f"handler {text!r}: module {module_name!r} cannot be imported: {error!r}") from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ConfigError(f"handler {text!r}: {module_name!r} has no {path!r}") from None
    if not callable(found):
        raise ConfigError(f"handler {text!r}: {path!r} is {type(found).__name__}, which cannot be called")
    handler: Handler = found
    return handler


def is_async(handler: Handler) -> bool:
    """Return True if a call returns an awaitable."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


Outcome = tuple[bytes | None, str | None]  #: what is written, and why the message was refused


class Threads:
    """Threads for handlers that are no coroutines.

    They are daemons: a handler that never returns cannot keep the process from ending, as it would in the standard
    library's pool.
    """

    def __init__(self, handler: Handler, count: int) -> None:
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._work: SimpleQueue[tuple[list[bytes], asyncio.Future[list[Outcome]]] | None] = SimpleQueue()
        self._count = count
        for number in range(count):
            threading.Thread(target=self._run, name=f"dispatch-handler-{number}", daemon=True).start()

    def handle(self, messages: list[bytes]) -> asyncio.Future[list[Outcome]]:
        """Handle messages one after the other in one thread; return their outcomes."""
        done: asyncio.Future[list[Outcome]] = self._loop.create_future()
        self._work.put((messages, done))
        return done

    def close(self) -> None:
        for _ in range(self._count):
            self._work.put(None)

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            messages, done = task
            outcomes = [self._handle(message) for message in messages]
            try:
                self._loop.call_soon_threadsafe(_tell, done, outcomes)
            except RuntimeError:  # the loop has ended without waiting for us
                return

    def _handle(self, message: bytes) -> Outcome:
        try:
            return written(self._handler(decode(message))), None
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything, `SystemExit` too, and
            return None, reason_of(error)  # this thread must not end with it; the leader is told


def _tell(done: asyncio.Future[list[Outcome]], outcomes: list[Outcome]) -> None:
    if not done.done():
        done.set_result(outcomes)


def written(result: Any) -> bytes | None:
    """Return a handler's result as it is written; `TypeError` if it cannot be."""
    match result:
        case None:
            return None
        case bytes():
            return result
        case bytearray() | memoryview():
            return bytes(result)
        case str():
            return result.encode()
        case _:
            return _encode(result)


def reason_of(error: BaseException) -> str:
    """Return why a message was refused."""
    if isinstance(error, msgspec.DecodeError):
        return f"bad_json: {error}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
