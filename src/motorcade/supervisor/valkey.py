"""The private store of the nodes of one machine: a Valkey, or Redis, in `DATA/valkey`.

    lock          held by the process that looks after the folder: a supervisor, or a command
    server.lock   held by the server itself, which inherits it: as long as it is locked, a server has these files
    server.pid    of the server, for people
    password      of the server; made once
    server.conf   written for each start; holds the password, which is on no command line
    url           redis://:PASSWORD@127.0.0.1:PORT; nodes and commands read it
    appendonlydir everything that is stored

All of it is readable by its own user only. The server listens on loopback, with a password, since other users of the
machine reach that; the port stays the same from start to start as long as it is free. Every acknowledged write is on
the disk (`appendfsync always`), unless durability is `fast`.

A server that has outlived its supervisor still holds `server.lock`. It knows the password, so it is ours: it is told to
shut down, which it does when its file is complete, and a new one goes on with the files. Nothing is killed by a number
that was read from a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic
from typing import Any, Final

import structlog

from motorcade.config import ListenAddress
from motorcade.core.errors import MotorcadeError, StoreAwayError, StoreError
from motorcade.private_files import own_secret, read_private, write_private
from motorcade.storage.ports import Durability
from motorcade.supervisor.output import of_valkey
from motorcade.supervisor.ports import LOOPBACK, HeldPorts
from motorcade.supervisor.process import STDERR, STDOUT, ChildProcess, bound_command
from motorcade.supervisor.program import ServerProgram

SCHEME: Final = "valkey://"  #: `valkey://DIR` names a private store for commands
LEFT_PATIENCE: Final = 60.0  #: seconds for a server that was left by another supervisor to end
STOP_PATIENCE: Final = 60.0  #: seconds for a server to write what it has and to end
FIRST_ASK: Final = 0.02  #: seconds between two questions whether it answers, while it starts
LATER_ASK: Final = 0.5  #: seconds, while it reads its files
TELL_AGAIN: Final = 30.0  #: seconds between two lines that say it is still reading

log = structlog.stdlib.get_logger("motorcade.supervisor")


class PrivateStore:
    """A server that this process runs, in a folder that this process has locked."""

    kind = "valkey"
    stop_patience = STOP_PATIENCE

    def __init__(self, folder: Path, program: ServerProgram, durability: Durability, ports: HeldPorts) -> None:
        self.folder = folder.absolute()
        self.name = str(folder)
        self.url = ""  #: known after `claim`
        self._program = program
        self._sync = "everysec" if durability is Durability.FAST else "always"
        self._ports = ports
        self._port = 0
        self._password = ""
        self._lock = -1
        self._server_lock = -1

    @property
    def url_file(self) -> Path:
        return self.folder / "url"

    async def claim(self) -> None:
        """Lock the folder, end a server that was left there, choose a port. `StoreError` if another process has it."""
        try:
            self.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            self.folder.chmod(0o700)
            self._lock = _locked(self.folder / "lock")
            if self._lock < 0:
                raise StoreError(f"{self.folder} is in use by another `motorcade serve --nodes` or `motorcade store`")
            self._server_lock = await self._server_lock_when_free()
            self._password = own_secret(self.folder / "password")
            self._port = self._choose_port()
            self.url = f"redis://:{self._password}@{LOOPBACK}:{self._port}"
            write_private(self.url_file, self.url)
        except OSError as error:
            raise StoreError(f"{self.folder} cannot hold a store: {error.strerror or error}") from error

    def release(self) -> None:
        """Let others have the folder. The server must have ended."""
        for handle in (self._server_lock, self._lock):
            if handle >= 0:
                os.close(handle)
        self._lock = self._server_lock = -1

    def announce(self) -> None:
        """Say once what the promise of this store is."""
        promise = {
            "always": "an acknowledged write is on the disk",
            "everysec": "durability fast: a crash of the machine can take the last two seconds, acknowledged or not",
        }
        log.info(
            "private_store",
            server=f"{self._program.name} {self._program.version}",
            program=self._program.path,
            folder=str(self.folder),
            address=f"{LOOPBACK}:{self._port}",
            appendfsync=self._sync,
            promise=promise[self._sync],
        )

    # -- as a supervised process

    async def launch(self) -> ChildProcess:
        conf = self.folder / "server.conf"
        try:
            write_private(conf, self._configuration())
        except OSError as error:
            raise StoreError(f"{conf} cannot be written: {error.strerror or error}") from error
        command = bound_command(signal.SIGTERM, [self._program.path, str(conf)])
        return await ChildProcess.start(
            command, lambda _fd, line: of_valkey(line), pass_fds=(self._server_lock,), tail_of=(STDOUT, STDERR)
        )

    async def comes_up(self, child: ChildProcess) -> None:
        """Return when it answers; it may have to read its files first, however long that takes."""
        told_at = monotonic()
        pause = FIRST_ASK
        while True:
            answer = await ask(self.url, "PING")
            if answer == b"PONG":
                break
            if answer:  # it is there, and reads
                pause = LATER_ASK
                if monotonic() - told_at > TELL_AGAIN:
                    told_at = monotonic()
                    log.info("valkey_reads_its_files", valkey=self.name, answer=answer.decode("utf-8", "replace"))
            await asyncio.sleep(pause)
        about = (await ask(self.url, "INFO", "server")).decode("utf-8", "replace")
        if f"process_id:{child.pid}\r" not in about:
            raise StoreError(f"another server answers at {LOOPBACK}:{self._port}")

    def told(self, _child: ChildProcess) -> dict[str, object]:
        return {}

    # --

    def _configuration(self) -> str:
        folder = _quoted(str(self.folder))
        return "\n".join(
            (
                "# Written by `motorcade serve --nodes` at each start; what is changed here is lost.",
                f"bind {LOOPBACK}",
                f"port {self._port}",
                f"requirepass {self._password}",
                "protected-mode yes",
                "daemonize no",
                f"dir {folder}",
                f"pidfile {_quoted(str(self.folder / 'server.pid'))}",
                "databases 1",
                "appendonly yes",
                "appenddirname appendonlydir",
                f"appendfsync {self._sync}",
                'save ""',
                "maxmemory-policy noeviction",
            )
        )

    def _choose_port(self) -> int:
        """Hold the port of the last start, so that what was told the URL finds it again; else any."""
        what = str(self.folder)
        last = read_private(self.url_file)[0].rpartition(":")[2]
        if last.isdigit() and 0 < int(last) < 65536:
            with contextlib.suppress(MotorcadeError):
                return self._ports.spread(ListenAddress(LOOPBACK, int(last)), 1, what)[0].port
        return self._ports.spread(ListenAddress(LOOPBACK, 0), 1, what)[0].port

    async def _server_lock_when_free(self) -> int:
        """Return the lock that the server is to inherit, when no server has it any more."""
        deadline, told = monotonic() + LEFT_PATIENCE, False
        path = self.folder / "server.lock"
        while (lock := _locked(path)) < 0:
            if not told:
                told = True
                log.warning(
                    "valkey_left", folder=str(self.folder), pid=self._pid(), consequence="it is shut down first"
                )
            if monotonic() > deadline:
                raise StoreError(
                    f"a server of an earlier start (process {self._pid() or 'unknown'}) still has the files in "
                    f"{self.folder} and does not end; look at it, and end it with SIGTERM"
                )
            await ask(read_private(self.url_file)[0], "SHUTDOWN")
            await asyncio.sleep(LATER_ASK / 5)
        return lock

    def _pid(self) -> str:
        try:
            return (self.folder / "server.pid").read_text().strip()
        except OSError:
            return ""


async def ask(url: str, *words: str) -> bytes:
    """Ask a server once; its answer, also one that refuses, or "" if there is none. `StoreError` without the client."""
    try:
        from motorcade.redis.resp import ServerError, connect  # noqa: PLC0415 - of the extra, which may be missing
        from motorcade.redis.url import RedisOptions, parse_url  # noqa: PLC0415
    except ImportError as error:
        raise StoreError(f"{error}; `pip install 'motorcade[cluster]'` brings what this store needs") from error
    if not url:
        return b""
    place = parse_url(url, RedisOptions())
    try:
        connection = await connect(place.addresses[0], place.access)
    except StoreAwayError:
        return b""
    except StoreError as error:
        return str(error).encode()
    try:
        answer = await asyncio.wait_for(connection.call(*words), place.access.reply_timeout)
    except ServerError as error:
        return str(error).encode()
    except (StoreAwayError, TimeoutError):
        return b""
    finally:
        connection.close()
    return bytes(answer)


@contextlib.asynccontextmanager
async def served(folder: Path, program: ServerProgram, durability: Durability) -> AsyncIterator[str]:
    """Yield the URL of the private store in a folder: of the server that runs, or of one that runs only for this."""
    ports = HeldPorts()
    store = PrivateStore(folder, program, durability, ports)
    try:
        try:
            await store.claim()
        except StoreError:
            url = read_private(store.url_file)[0]
            if await ask(url, "PING") != b"PONG":
                raise
            yield url
            return
        child = await store.launch()
        try:
            up = asyncio.create_task(store.comes_up(child))
            waits: set[asyncio.Future[Any]] = {up, child.ended}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not up.done():
                up.cancel()
                raise StoreError(f"the server of {folder} does not start: {child.message}")
            up.result()
            yield store.url
        finally:
            await child.stop(STOP_PATIENCE, asyncio.Event())
    finally:
        store.release()
        ports.close()


def _locked(path: Path) -> int:
    """Lock a file; its descriptor, or -1 if another process has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return -1
    return handle


def _quoted(text: str) -> str:
    """Return a text as the server's configuration has it."""
    return (
        '"'
        + "".join(
            char
            if char.isascii() and char.isprintable() and char not in '"\\'
            else "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))
            for char in text
        )
        + '"'
    )
