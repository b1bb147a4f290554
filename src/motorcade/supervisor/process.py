"""One process of the supervisor: in a session of its own, with its output in lines.

In a session of its own, since Ctrl-C goes to all processes of the terminal's foreground group: the store must not end
before the nodes have drained, and the supervisor tells each of them when.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from motorcade.core.errors import MotorcadeError
from motorcade.supervisor.output import ERROR

STDIN: Final = 0
STDOUT: Final = 1
STDERR: Final = 2
MAX_LINE: Final = 1 << 20  #: bytes; a longer line is cut into pieces
TAIL: Final = 20  #: last lines that are kept, to be told when the process dies
MAX_TAIL_LINE: Final = 1000  #: characters of such a line
OUTPUT_PATIENCE: Final = 1.0  #: seconds for the rest of its output, which a process of its own may hold open

OnLine = Callable[[int, str], None]
KILLED: Final = "it was killed, by hand or by a system that is out of memory"


class ChildProcess(asyncio.SubprocessProtocol):
    """A process that was started here."""

    def __init__(self, on_line: OnLine, tail_of: Sequence[int] = (STDERR,)) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()  #: exit code, or minus the number of a signal
        self.pid = 0
        self.tail: deque[str] = deque(maxlen=TAIL)  #: last lines of some of its output
        self._on_line = on_line
        self._tail_of = tail_of
        self._rest = {STDOUT: b"", STDERR: b""}
        self._loop = loop
        self._code: int | None = None
        self._transport: asyncio.SubprocessTransport | None = None

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        on_line: OnLine,
        *,
        said: bytes = b"",
        pass_fds: Sequence[int] = (),
        tail_of: Sequence[int] = (STDERR,),
    ) -> ChildProcess:
        """Start a command, tell it something on standard input, and leave that open. `MotorcadeError` if it cannot."""
        loop = asyncio.get_running_loop()
        try:
            transport, child = await loop.subprocess_exec(
                lambda: cls(on_line, tail_of), *command, start_new_session=True, pass_fds=pass_fds
            )
        except OSError as error:
            raise MotorcadeError(f"{command[0]} cannot be started: {error.strerror or error}") from error
        if said:
            cast("asyncio.WriteTransport", transport.get_pipe_transport(STDIN)).write(said)
        return child

    @property
    def message(self) -> str:
        """Its last words: the error, if it has called it one."""
        lines = [line for line in self.tail if line.strip()]
        errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
        if not errors and self._code == -signal.SIGKILL:
            return KILLED  # what it has said last was said of something else
        return (errors or lines or [""])[-1].strip()

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._code is None and self._transport is not None:
            with contextlib.suppress(ProcessLookupError):  # its end is known in the next turn of the loop
                self._transport.send_signal(number)

    async def stop(self, patience: float, hurry: asyncio.Event) -> bool:
        """Let it end, and kill it if it does not within `patience`, or as soon as there is `hurry`; False if killed."""
        self.signal(signal.SIGTERM)
        hurrying = asyncio.ensure_future(hurry.wait())
        ends: set[asyncio.Future[Any]] = {self.ended, hurrying}
        await asyncio.wait(ends, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if self.ended.done():
            return True
        self.signal(signal.SIGKILL)
        await asyncio.wait({self.ended})
        return False

    # -- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)
        self.pid = self._transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, rest = (self._rest[fd] + data).split(b"\n")
        for line in lines:
            self._line(fd, line)
        while len(rest) > MAX_LINE:
            self._line(fd, rest[:MAX_LINE])
            rest = rest[MAX_LINE:]
        self._rest[fd] = rest

    def process_exited(self) -> None:
        self._code = self._transport.get_returncode() if self._transport is not None else None
        self._loop.call_later(OUTPUT_PATIENCE, self._end)

    def connection_lost(self, _error: Exception | None) -> None:
        """Note the end of the process and of its output."""
        self._end()

    def _line(self, fd: int, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        if fd in self._tail_of:
            self.tail.append(text[:MAX_TAIL_LINE])
        self._on_line(fd, text)

    def _end(self) -> None:
        if self.ended.done():
            return
        for fd, rest in self._rest.items():
            if rest:
                self._line(fd, rest)
        self._rest = dict.fromkeys(self._rest, b"")
        if self._transport is not None:
            self._transport.close()
        self.ended.set_result(self._code if self._code is not None else -signal.SIGKILL)


def ending(code: int) -> dict[str, object]:
    """Return how a process ended, for the log."""
    if code >= 0:
        return {"code": code}
    try:
        return {"signal": signal.Signals(-code).name}
    except ValueError:
        return {"signal": -code}


def python_command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module of ours; what lies in the working directory is not imported (-P)."""
    return [sys.executable, "-P", "-m", module, *words]


def bound_command(number: int, command: Sequence[str]) -> list[str]:
    """Return a command that gets a signal when this process ends; see `orphan.py`."""
    return python_command("motorcade.supervisor.orphan", str(os.getpid()), str(number), *command)
