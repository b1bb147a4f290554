"""The supervisor of `motorcade serve --nodes N`: starts everything, keeps it running, ends it.

    hold ports ─▶ lock DATA ─▶ store, if none is named ─▶ all nodes at once ─▶ `ready` ─▶ until a signal ─▶ nodes drain,
    all at once ─▶ store

SIGTERM and Ctrl-C end it at any moment of that; a Ctrl-C while it ends kills the nodes that are still draining. SIGHUP
is passed on to the nodes: each reads its configuration again and says what came of it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
import uvloop

from motorcade import __version__
from motorcade.config import DEFAULT, LoadedConfig
from motorcade.core.errors import ConfigError, MotorcadeError
from motorcade.core.redaction import without_secrets
from motorcade.http.token import own_token
from motorcade.node import keep_private
from motorcade.private_files import own_secret
from motorcade.storage import MEMORY, private_store
from motorcade.storage.ports import Durability
from motorcade.supervisor.output import of_node
from motorcade.supervisor.plan import SECRET_FILE, NodePlan, plan
from motorcade.supervisor.ports import HeldPorts
from motorcade.supervisor.process import STDOUT, ChildProcess, python_command
from motorcade.supervisor.program import find_program
from motorcade.supervisor.supervised import Startable, StartError, Supervised
from motorcade.supervisor.valkey import PrivateStore

INTERRUPTED: Final = 130  #: exit code after a second Ctrl-C, as a shell has it
#: Seconds that a node may take to end beyond `broker.drain_timeout`: plugins and the store have bounds of their own.
STOP_GRACE: Final = 60.0
NODE: Final = tuple(python_command("motorcade.supervisor.child"))  #: the command of a node, but for its name

#: `motorcade VERSION ready  tcp 127.0.0.1:1883  http 127.0.0.1:18083`
_READY = re.compile(r"motorcade \S+ ready  (.+)")

Places = dict[str, list[str]]  #: kind of listener: addresses

log = structlog.stdlib.get_logger("motorcade.supervisor")


class NodeProcess:
    """A node as it is started: its command, what it is told, and its line with `ready`."""

    kind = "node"

    def __init__(self, plan: NodePlan, command: Sequence[str], orders: Callable[[], bytes], drain: float) -> None:
        self.name = plan.name
        self.stop_patience = drain + STOP_GRACE
        self.places: Places = {}
        self._folder = plan.folder
        self._command = (*command, plan.name)
        self._orders = orders
        self._ready: asyncio.Event = asyncio.Event()

    async def launch(self) -> ChildProcess:
        self._ready = ready = asyncio.Event()

        def on_line(fd: int, line: str) -> None:
            if fd == STDOUT and (found := _READY.fullmatch(line)) is not None:
                self.places = _places(found[1])
                ready.set()
            else:
                of_node(self.name, line)

        return await ChildProcess.start(self._command, on_line, said=self._orders())

    async def comes_up(self, _child: ChildProcess) -> None:
        await self._ready.wait()

    def told(self, _child: ChildProcess) -> dict[str, object]:
        return {"http": " ".join(self.places.get("http", ())), "data": str(self._folder)}


class Supervisor:
    """Runs nodes, and their store if they have none."""

    def __init__(self, loaded: LoadedConfig, count: int, command: Sequence[str] = NODE) -> None:
        self.stopping = asyncio.Event()
        self.nodes: list[Supervised] = []
        self.store: Supervised | None = None
        self._loaded = loaded
        self._count = count
        self._command = command
        self._data = Path(loaded.config.data.dir)
        self._hurry = asyncio.Event()
        self._failure = ""
        self._running: dict[asyncio.Task[None], Supervised] = {}

    async def run(self) -> int:
        """Serve until `stopping` is set, then end everything; the exit code."""
        ports, lock, private = HeldPorts(), -1, None
        try:
            private = self._private_store(ports)
            plans = plan(self._loaded, self._count, ports)
            lock = _lock(self._data)
            if private is not None:
                await self._unless_stopped(private.claim())
                if not self.stopping.is_set():
                    private.announce()
                    self.store = self._start(private, asyncio.Event())  # it ends well, however much of a hurry there is
            if await self._is_up(self.store):
                self._make_secrets()
                nodes = [NodeProcess(each, self._command, self._orders(each, private), self._drain) for each in plans]
                self.nodes = [self._start(node, self._hurry) for node in nodes]
                if all([await self._is_up(node) for node in self.nodes]):
                    self._announce(nodes)
            await self.stopping.wait()
        finally:
            await self._stop()
            if private is not None:
                private.release()
            ports.close()
            if lock >= 0:
                os.close(lock)
        if self._failure:
            raise MotorcadeError(self._failure)
        return INTERRUPTED if self._hurry.is_set() else 0

    def interrupt(self) -> None:
        """End; the second time, at once. For Ctrl-C."""
        if self.stopping.is_set():
            self._hurry.set()
        self.stopping.set()

    def reload(self) -> None:
        """Have all nodes read their configuration again; one that starts, when it has. For SIGHUP."""
        for node in self.nodes:
            node.tell(signal.SIGHUP)

    # -- starting

    @property
    def _drain(self) -> float:
        return self._loaded.config.broker.drain_timeout

    def _private_store(self, ports: HeldPorts) -> PrivateStore | None:
        """Return the store that has to be run, None if one is named; `ConfigError` if that serves one node only."""
        store, origin = self._loaded.config.store, self._loaded.origin("store.url")
        folder = private_store(self._data)
        if origin != DEFAULT:
            if store.url.startswith(("rocksdb:", MEMORY)):
                raise ConfigError(
                    f"{origin}: store.url: the embedded engine serves exactly one node, not {self._count}; "
                    f"leave store.url out for a private Valkey in {folder}, or name redis://HOST:PORT"
                )
            return None
        single = self._data / "store"
        if (single / "CURRENT").exists():
            raise ConfigError(
                f"{self._data} holds the store of a single node, {single}, which cannot serve more. To take it along: "
                f"`motorcade store export FILE --store rocksdb://{single}`, `motorcade store import FILE "
                f"--store valkey://{folder}`, then move {single} away; or name another folder with --data"
            )
        return PrivateStore(folder, find_program(), Durability(store.durability), ports)

    def _make_secrets(self) -> None:
        """Make what all nodes share: the token of their control ports, and the secret of their links."""
        config = self._loaded.config
        if config.http.require_token and not config.http.token:
            own_token(self._data)
        if not config.cluster.secret_file:
            path = self._data / SECRET_FILE
            try:
                own_secret(path)
            except OSError as error:
                raise ConfigError(f"the secret of the nodes cannot be kept in {path}: {error.strerror}") from error

    def _orders(self, node: NodePlan, private: PrivateStore | None) -> Callable[[], bytes]:
        store: dict[str, Any] = {"store.url": f"file://{private.url_file}"} if private is not None else {}
        orders = node.orders(self._loaded, self._data.absolute(), store, os.getpid())
        line = msgspec.json.encode(orders) + b"\n"
        return lambda: line

    def _start(self, how: Startable, hurry: asyncio.Event) -> Supervised:
        supervised = Supervised(how, hurry)
        task = asyncio.create_task(supervised.run(), name=f"{how.kind} {how.name}")
        self._running[task] = supervised
        task.add_done_callback(self._ended)
        return supervised

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End everything if one of the processes cannot be had."""
        if not task.cancelled() and (error := task.exception()) is not None:
            known = isinstance(error, StartError)
            self._failure = self._failure or (str(error) if known else f"a defect of the supervisor: {error!r}")
            if not known:
                log.error("supervisor_failed", exc_info=error)
            self.stopping.set()

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for some work, or until everything is to end."""
        task, stopping = asyncio.create_task(work), asyncio.create_task(self.stopping.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    async def _is_up(self, supervised: Supervised | None) -> bool:
        """Wait until a process is of use; False if everything is to end before that."""
        if supervised is None:
            return not self.stopping.is_set()
        waits = [asyncio.create_task(event.wait()) for event in (supervised.up, self.stopping)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return not self.stopping.is_set()

    def _announce(self, nodes: list[NodeProcess]) -> None:
        places: Places = {}
        for node in nodes:
            for kind, at in node.places.items():
                places[kind] = list(dict.fromkeys(places.get(kind, []) + at))
        where = "  ".join(f"{kind} {' '.join(at)}" for kind, at in places.items())
        names = " ".join(node.name for node in nodes)
        print(f"motorcade {__version__} ready  {where}  nodes {names}", flush=True)  # noqa: T201 - others wait for it

    # -- ending

    async def _stop(self) -> None:
        """End the nodes, all at once, then the store that they have needed until then."""
        self.stopping.set()
        await self._finish([node for node in self._running.values() if node is not self.store])
        await self._finish([self.store] if self.store is not None else [])

    async def _finish(self, processes: list[Supervised]) -> None:
        tasks = [task for task, supervised in self._running.items() if supervised in processes]
        for supervised in processes:
            supervised.stop()
        if tasks:
            await asyncio.wait(tasks)


def _places(text: str) -> Places:
    """Read the part of a ready line that tells where a node listens."""
    return {kind: at for kind, *at in (part.split() for part in text.split("  ") if part)}


def _lock(data: Path) -> int:
    """Lock the data folder against another supervisor; the descriptor that holds the lock."""
    path = data / "nodes.lock"
    try:
        data.mkdir(parents=True, mode=0o700, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another folder with --data") from error
    keep_private(data)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise ConfigError(
            f"another `motorcade serve --nodes` has the data folder {data}; stop it, or name another with --data"
        ) from None
    return handle


def run(loaded: LoadedConfig, count: int, command: Sequence[str] = NODE) -> int:
    """Run nodes until SIGTERM or SIGINT; the exit code."""
    os.umask(0o077)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(Supervisor(loaded, count, command)))
    except MotorcadeError as error:
        print(f"error: {without_secrets(str(error))}", file=sys.stderr)  # noqa: T201 - for the person who started it
        return 1


async def _serve(supervisor: Supervisor) -> int:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, supervisor.stopping.set)
    loop.add_signal_handler(signal.SIGINT, supervisor.interrupt)
    loop.add_signal_handler(signal.SIGHUP, supervisor.reload)
    return await supervisor.run()
