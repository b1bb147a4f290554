"""The composition root: the only place that picks implementations and puts the parts together."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import math
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from time import monotonic, time
from typing import Any

import msgspec
import structlog
import uvloop

from motorcade import __version__
from motorcade.broker.addressing import Addressing
from motorcade.broker.attachments import Attachments
from motorcade.broker.broker import Broker
from motorcade.broker.lease import LEASE, TTL
from motorcade.broker.listener import Endpoint, Listener, address_text
from motorcade.broker.relay import Relay
from motorcade.broker.session_store import CLOSE_PATIENCE, SessionStore
from motorcade.broker.shared_bans import SharedBans
from motorcade.broker.state import BrokerOptions, BrokerState
from motorcade.broker.steward import Steward
from motorcade.broker.subscription_feed import SubscriptionFeed
from motorcade.broker.tls import Served, TlsFiles, server_context
from motorcade.client_control import LocalClients
from motorcade.cluster.member import ClusterMember, MemberOptions, ensure_alone
from motorcade.cluster.options import LinkOptions
from motorcade.cluster.security import link_security
from motorcade.cluster_clients import ClusterClients
from motorcade.cluster_nodes import ClusterNodes
from motorcade.config import Config, LoadedConfig, addresses, differences, plugins_to_load
from motorcade.control import Control, NodeState, ReloadView
from motorcade.core.errors import ConfigError, MotorcadeError
from motorcade.core.guid import GuidFactory
from motorcade.core.redaction import without_secrets
from motorcade.extension.cluster import MemberState
from motorcade.extension.declared import ConflictError
from motorcade.extension.hooks import Hooks
from motorcade.extension.plugin import Plugins
from motorcade.http.guard import Token
from motorcade.http.server import HttpServer
from motorcade.http.token import NAME as TOKEN_FILE
from motorcade.http.token import own_token, point
from motorcade.node_control import NodeDrain, NodeOrder
from motorcade.storage import MEMORY, has_private_store, open_store, placed, private_store
from motorcade.storage.housekeeping import Housekeeping
from motorcade.storage.ports import Durability, Store, StoreAwayError
from motorcade.tasks import Tasks

log = structlog.stdlib.get_logger("motorcade.node")

#: Seconds between two attempts to open a store whose servers do not answer, doubled each time; between two messages.
FIRST_PAUSE, LONGEST_PAUSE, TELL_AGAIN = 0.2, 3.0, 30.0
SPARE_FILES = 100  #: descriptors a node needs besides those of its connections
FENCED_PATIENCE = 1.0  #: seconds that the end of an incarnation may take whose writes are refused
DETACH_LOOK = 0.02  #: seconds between two looks at clients that are being detached
DAY = 86400.0  #: seconds
SOON = 30 * DAY  #: before a certificate ends the log says so
#: New objects between collections, and how many make a larger one. A pass over the youngest takes 3 ms, a larger one
#: 22 ms, a full one 370 ms for 20 000 sessions: so that is rare, and nothing that ends may depend on it.
GC_THRESHOLDS = (50_000, 5, 400)
LATER = " has changed: takes effect at the next start"  #: a reload says so of a key


LARGE_BLOCK = 4 * 2**20  #: bytes; more than a message, less than what one check of a password takes
SPARE_BLOCK = 8 * 2**20  #: bytes at the end of the heap that are kept for what comes next
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


@dataclass(frozen=True, slots=True)
class Siblings:
    """Things that a node shares with others of the same command, besides the ports of its listeners."""

    tokens: Path  #: folder of the token of all control ports


@dataclass(slots=True)
class Process:
    """The state of a process that outlives one incarnation of its node: a fenced node joins again as another one."""

    stopping: asyncio.Event  #: a signal has asked for the end
    lives: int = 0
    ports: dict[tuple[str, int], int] = field(default_factory=dict)  #: by kind and place in the list
    drain: NodeOrder | None = None  #: an operator has drained this node


class Node:
    """One node: starts, serves until told to stop, drains. With siblings, its ports are theirs too.

    A node with links is a member of a cluster: it enters before its plugins are loaded, and joins when they are, before
    its first client. One that is a member no longer ends as if it were stopped, quickly, and `rejoins` is set.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        loop: asyncio.AbstractEventLoop,
        siblings: Siblings | None = None,
        process: Process | None = None,
    ) -> None:
        self._loaded = loaded
        self._siblings = siblings
        self._process = process or Process(asyncio.Event())
        self.rejoins = False  #: it was found dead, and has to begin again
        self.member: ClusterMember | None = None  #: None: it has no links, and is alone
        self._attachments: Attachments | None = None
        self._drain: NodeDrain | None = None  #: with a member only
        config = loaded.config
        hooks = Hooks()
        options = _broker_options(config)
        guids = GuidFactory(options.node, os.getpid())
        self.state = BrokerState(options, config.session, config.limits, hooks, guids, time())
        self.tasks = Tasks()
        self.broker = Broker(self.state, loop, self.tasks)
        self.plugins = Plugins(
            self.broker, hooks, Path(config.data.dir) / "plugins", self.state.shared.sources, self.tasks
        )
        self.broker.gauges = self.plugins.gauges
        paths = config.http.plugin_paths
        self.control = Control(
            self.broker,
            self.plugins,
            self.reload,
            settings=loaded.entries,
            plugin_paths=(paths,) if isinstance(paths, str) else paths,
        )
        self.listeners: list[Listener] = []
        self._tls: dict[str, Served] = {}  # by listener
        self.http: list[HttpServer] = []
        self._pointers: list[Path] = []  # for commands, to the token
        self.store: Store | None = None  #: open while the node runs
        self.session_store: SessionStore | None = None  #: with a store that lasts
        self.housekeeping: asyncio.Task[None] | None = None
        self._reminder: asyncio.TimerHandle | None = None  # to look at the certificates
        self.stopping = asyncio.Event()
        self.failure = ""  #: why it had to stop

    async def run(self) -> None:
        """Serve until `stopping` is set, then drain."""
        _check_store(self._loaded)
        keep_private(Path(self._loaded.config.data.dir))
        if self._store_url.startswith("rocksdb://"):
            keep_private(Path(self._store_url.removeprefix("rocksdb://")))
        try:
            self.store = self.plugins.store = await self._open_store()
            if self.store is not None:
                await self._start(self.store)
                if not self.stopping.is_set():
                    self._announce()
                await self.stopping.wait()
        finally:
            await self._stop()
        if self.failure:
            raise MotorcadeError(self.failure)
        self._process.lives += 1

    @property
    def _store_url(self) -> str:
        config = self._loaded.config
        return placed(config.store.url, Path(config.data.dir))

    async def _open_store(self) -> Store | None:
        """Return the store, as soon as its servers answer; None if the node is to stop before that.

        Only silence is waited for. What a server refuses (a wrong password, a database that it does not have, a setting
        that would lose messages) is an error at once: it does not go away by itself.
        """
        pause, told_at = FIRST_PAUSE, -math.inf
        while not self.stopping.is_set():
            try:
                options = self._loaded.config.store
                store = await self._unless_stopped(
                    open_store(self._store_url, Durability(options.durability), options.cache_bytes)
                )
            except StoreAwayError as error:
                if monotonic() - told_at >= TELL_AGAIN:
                    told_at = monotonic()
                    log.warning("waiting_for_store", error=str(error), consequence="clients are served when it answers")
            else:
                if told_at > -math.inf:
                    log.info("store_answers")
                return store
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return None

    async def _unless_stopped(self, work: Coroutine[Any, Any, Store]) -> Store | None:
        """Return what is opened; None if the node is to stop first. Files are opened anyway: they need no server."""
        opening = asyncio.create_task(work, name="open-store")
        if self._store_url.startswith(("rocksdb:", MEMORY)):
            return await opening
        stopped = asyncio.create_task(self.stopping.wait(), name="stopped")
        await asyncio.wait({opening, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not opening.done():
            opening.cancel()
            await asyncio.wait({opening})
        return None if opening.cancelled() else opening.result()

    async def _start(self, store: Store) -> None:
        config = self._loaded.config
        url = self._store_url
        if config.cluster.bind:
            await self._enter(store)
            if self.stopping.is_set():
                return
        for name, path, options in plugins_to_load(config):  # before the listeners: no client slips in unchecked
            await self.plugins.load(name, options, path)
        if self.member is not None:
            self._put_together(store, self.member)
            await self._open_control(config)  # it tells why this node takes no clients yet
            await self._join(store, self.member)
            if self.stopping.is_set():
                return
        elif url != MEMORY:
            await self._restore(store, shared=not url.startswith("rocksdb"))
        self._tls = _contexts(config)
        for place, endpoint in enumerate(_endpoints(config, self._tls, shared=self._siblings is not None)):
            port = self._process.ports.get((endpoint.kind, place), endpoint.port)  # it may have been any
            listener = Listener(self.broker, replace(endpoint, port=port))
            await listener.open()
            self._process.ports[endpoint.kind, place] = listener.port
            self.listeners.append(listener)
        if self._drain is not None and self._process.drain is not None:  # what it was told still holds
            try:
                await self._drain.order(self._process.drain)
            except ConflictError as error:
                self._process.drain = None
                log.warning("drain_ends", node=self.state.options.node, reason=str(error))
        if self.member is None:
            await self._open_control(config)
        self._tell_certificates()
        self._keep_tidy(store)
        self.broker.start()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)

    async def _open_control(self, config: Config) -> None:
        found = addresses(config.http.bind)
        if not found:
            return
        token = Token(config.http.token, required=config.http.require_token)
        folder = Path(config.data.dir) if self._siblings is None else self._siblings.tokens
        if not token.text and token.required:
            token = Token(own_token(folder), (folder / TOKEN_FILE).absolute())
        for address in found:
            server = HttpServer(self.control, address.host, address.port, token, self.tasks)
            await server.start()
            self.http.append(server)
            if token.file is not None and (pointer := point(server.address, folder)) is not None:
                self._pointers.append(pointer)

    def _keep_tidy(self, store: Store) -> None:
        options = self._loaded.config.store
        housekeeping = Housekeeping(
            store,
            options.sweep_interval,
            options.sweep_budget,
            kept=self.member.is_steward if self.member is not None else None,
            on_expired=self.session_store.expired if self.session_store is not None else None,
        )
        self.control.store, self.control.housekeeping = store, housekeeping
        # What waits is what is told: not what plugins keep to be looked up.
        self.broker.stored = lambda: (
            max(0, housekeeping.figures.entries - self.plugins.history()) if housekeeping.figures is not None else 0
        )
        self.housekeeping = self.tasks.start(housekeeping.run, "store.housekeeping")

    async def _restore(self, store: Store, *, shared: bool) -> None:
        """Make sessions durable, and bring back those that an earlier process has left."""
        sessions = SessionStore(store, self.state, self.broker.loop, self.broker.flusher.later, self.tasks)
        self.session_store = sessions
        if shared:
            await sessions.lease.begin(self.state.options.node, self._fail)
            await ensure_alone(store, self.state.options.node)
        self.state.store = self.state.registry.store = sessions
        await sessions.restore()

    async def _enter(self, store: Store) -> None:
        """Join the cluster as a member that serves no client yet. Ids that it makes from now on have its number."""
        config = self._loaded.config
        links = _link_options(config)
        options = MemberOptions(
            cluster=config.cluster.name,
            name=self.state.options.node,
            links=links,
            advertise=config.cluster.advertise,
            lease=config.cluster.lease,
            view_lease=config.cluster.view_lease,
            addressed=config.cluster.addressed,
            compared=_compared(self._loaded),
        )
        member = self.member = ClusterMember(options, link_security(links), store, self.tasks, self._rejoin)
        await member.enter(self.stopping)
        if self.stopping.is_set():
            return
        await self._refuse_lone_node(store)
        self.state.guids = GuidFactory.of_member(member.number)
        self.plugins.cluster = member

    async def _refuse_lone_node(self, store: Store) -> None:
        """Wait for a node by itself that has served this store and died; `MotorcadeError` if it is alive."""
        deadline = monotonic() + 2 * TTL
        while not self.stopping.is_set():
            lease = await store.coordination.acquire(LEASE, self.state.options.node, TTL, time())
            if lease is not None:
                await store.coordination.release(lease)
                return
            if monotonic() > deadline:
                raise MotorcadeError(
                    f"{self.state.options.node} cannot join a cluster: a node by itself (no cluster.bind) serves this "
                    "store; stop it, or give it cluster.bind too"
                )
            await asyncio.sleep(TTL / 4)

    def _put_together(self, store: Store, member: ClusterMember) -> None:
        """Put the parts together that make this node one of several."""
        state, broker = self.state, self.broker
        sessions = SessionStore(store, state, broker.loop, broker.flusher.later, self.tasks)
        self.session_store = state.store = state.registry.store = sessions
        addressing = Addressing(self._loaded.config.cluster.addressed)
        relay = Relay(member, state, broker.flusher.later, self.tasks, addressing)
        SharedBans(member, store, state)
        attachments = self._attachments = Attachments(member, sessions, state.registry, broker.publish_will)
        feed = SubscriptionFeed(member, store, attachments, relay.subscribers, addressing)
        sessions.join(attachments, feed, addressing)
        attachments.start()
        host = _DrainHost(self, member, attachments, self._process, restarts=self._siblings is not None)
        self._drain = NodeDrain(broker, host, self._loaded.config.cluster.drain_rate, self.tasks)
        clients = ClusterClients(member, LocalClients(broker), attachments, store)
        self.control.join(member, clients, ClusterNodes(member, self._drain))

    async def _join(self, store: Store, member: ClusterMember) -> None:
        """Have this node serve with the others."""
        assert self._attachments is not None  # noqa: S101 - `_put_together` has made them
        attachments = self._attachments
        await member.join(self.stopping)
        self.tasks.start(Steward(member, store, attachments).run, "cluster.steward")

    def _rejoin(self, _why: str) -> None:
        """End, and begin again as another incarnation."""
        self.rejoins = True
        self.stopping.set()

    def _fail(self, why: str) -> None:
        """Stop, and say why."""
        self.failure = why
        self.stopping.set()

    def _announce(self) -> None:
        for listener in self.listeners:
            endpoint = listener.endpoint
            self.control.listeners.setdefault(endpoint.kind, []).append(address_text(endpoint.host, listener.port))
        for server in self.http:
            self.control.listeners.setdefault("http", []).append(server.address)
        self.control.state = NodeState.READY
        if self._process.lives:
            log.info("ready_again", lives=self._process.lives + 1)
            return
        where = "  ".join(f"{kind} {' '.join(at)}" for kind, at in self.control.listeners.items())
        print(f"motorcade {__version__} ready  {where}", flush=True)  # noqa: T201 - the line others wait for

    async def _stop(self) -> None:
        self.control.state = NodeState.STOPPING
        if self._reminder is not None:
            self._reminder.cancel()
        member, patience = self.member, self.state.options.drain_timeout
        if member is not None:
            patience = min(patience, FENCED_PATIENCE) if self.rejoins else patience
            await member.leave()
        # Listeners first: no new client may arrive while the others are sent away.
        for listener in self.listeners:
            await listener.close()
        steady = member is not None and not self.rejoins
        await self.broker.drain(patience, self._loaded.config.cluster.drain_rate if steady else math.inf)
        if self._attachments is not None and not self.rejoins:
            await self._detach_all(self._attachments, patience)
        await self.plugins.unload_all()
        for server in self.http:
            await server.stop()
        for pointer in self._pointers:
            pointer.unlink(missing_ok=True)
        if self.housekeeping is not None:
            self.housekeeping.cancel()
            await asyncio.wait({self.housekeeping})
        if self._attachments is not None:
            self._attachments.stop()
        if self.session_store is not None:
            await self.session_store.close(CLOSE_PATIENCE if not self.rejoins else FENCED_PATIENCE)
        if member is not None:
            await member.depart(clean=not self._attachments)
        if self.rejoins:
            self.tasks.cancel()
        if self.store is not None:
            await self.store.close()

    async def _detach_all(self, attachments: Attachments, patience: float) -> None:
        """Wait until the sessions of all clients are written down, so that any other member may serve them."""
        deadline = monotonic() + patience
        while len(attachments) and monotonic() < deadline:  # noqa: ASYNC110 - once per shutdown; no event is needed
            await asyncio.sleep(DETACH_LOOK)

    def _tell_certificates(self) -> None:
        """Say what ends soon, at the start, after a reload and once a day; the metrics have all dates."""
        self.control.certificates = {kind: dict(served.expiry) for kind, served in self._tls.items()}
        for kind, served in self._tls.items():
            if served.files.ca and "crl" not in served.expiry:
                log.warning(
                    "no_revocation_list",
                    listener=kind,
                    consequence="revoked client certificates are let in",
                    remedy=f"set listeners.{kind}.crl",
                )
            for file, end in served.expiry.items():
                left = end - time()
                if left <= 0:
                    log.error("certificate_expired", listener=kind, file=getattr(served.files, file) or file)
                elif left < SOON:
                    days = int(left // DAY)
                    log.warning("certificate_ends_soon", listener=kind, file=getattr(served.files, file), days=days)
        if self._tls:
            if self._reminder is not None:
                self._reminder.cancel()
            self._reminder = self.broker.loop.call_later(DAY, self._tell_certificates)

    async def reload(self) -> ReloadView:
        """Read the configuration again: plugins get their tables, TLS listeners their certificates.

        A configuration or file that is wrong is refused before anything is changed; what a plugin refuses on its own
        is told together with what was applied before it.
        """
        loaded = self._loaded.again()
        served = _contexts(loaded.config)
        applied, restart = await self._reload_plugins(loaded.config)
        for kind in self._tls.keys() & served.keys():
            old, new = self._tls[kind], served[kind]
            if (old.digest, old.files) == (new.digest, new.files):
                continue
            for listener in self.listeners:
                if listener.endpoint.kind == kind:
                    await listener.renew(new.context)
            self._tls[kind] = new
            applied.append(f"listener {kind} has new certificates; connections that exist stay as they are")
        self._tell_certificates()
        in_force = {f"listeners.{kind}.{name}" for kind in self._tls for name in TlsFiles._fields}
        restart += [
            f"{key}{LATER}"
            for key in differences(self._loaded.config, loaded.config)
            if key not in in_force and not key.startswith("plugins.")
        ]
        waiting = {text.removesuffix(LATER) for text in restart if text.endswith(LATER)}
        self.control.settings = partial(_in_force, self._loaded, loaded, waiting)
        log.info("reloaded", applied=applied, restart=restart)
        return ReloadView(applied=applied, restart=restart, changed=applied + restart)

    async def _reload_plugins(self, config: Config) -> tuple[list[str], list[str]]:
        """Give plugins their tables; what was applied, and what needs more than that."""
        running = {plugin.name for plugin in self.plugins.loaded()}
        applied: list[str] = []
        restart: list[str] = []
        old_paths = {name: path for name, path, _ in plugins_to_load(self._loaded.config)}
        for name, _, options in plugins_to_load(config):  # all of them before any of them
            self.plugins.check(name, options)
        for name, path, options in plugins_to_load(config):
            if name not in running:
                restart.append(f"plugin {name} is not running: restart, or `motorcade plugin load {name}`")
                continue
            try:
                later = await self.plugins.reload(name, options)
            except MotorcadeError as error:
                before = f" (applied before that: {', '.join(applied)})" if applied else ""
                raise MotorcadeError(f"{error}{before}") from error
            applied.append(f"plugin {name} reloaded")
            restart += [f"plugins.{name}.{key}{LATER}" for key in later]
            if path != old_paths.get(name, path):
                restart.append(f"plugins.{name}.path{LATER}")
        wanted = {name for name, _, _ in plugins_to_load(config)}
        restart += [
            f"plugin {name} is no longer configured, but runs on: restart, or `motorcade plugin unload {name}`"
            for name in sorted(running - wanted)
        ]
        return applied, restart

    async def reload_on_signal(self) -> None:
        """Reload when SIGHUP comes."""
        try:
            await self.reload()
        except MotorcadeError as error:
            log.error(  # noqa: TRY400 - the message says where and what
                "reload_refused", error=str(error), consequence="the old configuration stays in force"
            )
        except Exception as error:  # noqa: BLE001 - a defect: it would be lost otherwise
            self.tasks.note("node.reload", error)


class _DrainHost:
    """The node's side of a drain (`node_control.DrainHost`)."""

    def __init__(
        self, node: Node, member: ClusterMember, attachments: Attachments, process: Process, *, restarts: bool
    ) -> None:
        self.restarts = restarts
        self._node = node
        self._member = member
        self._attachments = attachments
        self._process = process

    def state(self) -> str:
        return str(self._member.state)

    async def begin_leaving(self) -> None:
        self._ensure_others()
        await self._member.leave()
        try:
            self._ensure_others()  # they may have been told the same at the same time
        except ConflictError:
            await self._member.take_clients()
            raise

    def _ensure_others(self) -> None:
        others = [view for view in self._member.members() if view.id != self._member.me]
        if not any(view.state is MemberState.LIVE for view in others):
            raise ConflictError(
                f"{self._member.options.name} is the only node that takes clients: no other one would serve them; "
                "start another one first, or end this one with SIGTERM"
            )

    async def end_leaving(self) -> None:
        await self._member.take_clients()

    async def close_listeners(self) -> None:
        for listener in self._node.listeners:
            await listener.close()

    async def open_listeners(self) -> None:
        try:
            for listener in self._node.listeners:
                await listener.open()
        except ConfigError:
            await self.close_listeners()
            raise

    def remember(self, order: NodeOrder | None) -> None:
        self._process.drain = order

    def attached(self) -> int:
        return len(self._attachments)

    def stop(self) -> None:
        self._process.stopping.set()
        self._node.stopping.set()


def _in_force(old: LoadedConfig, new: LoadedConfig, waiting: set[str]) -> Iterator[tuple[str, object, str]]:
    """Yield entries as they are after a reload: new ones, but for those that wait for a restart."""
    yield from (entry for entry in new.entries() if entry[0] not in waiting)
    yield from (entry for entry in old.entries() if entry[0] in waiting)


def keep_private(folder: Path) -> None:
    """Take the rights of others away from a folder of an earlier version; a new one is made without them."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return  # it is not there yet
    try:
        mode = stat.S_IMODE(os.fstat(handle).st_mode)
        if mode & stat.S_ISVTX:
            log.warning("data_folder_open", folder=str(folder), mode=f"{mode:o}", error="it is shared, as /tmp is")
        elif mode & 0o077:
            os.fchmod(handle, mode & 0o700)
            log.info("data_folder_closed", folder=str(folder), before=f"{mode:o}", now=f"{mode & 0o700:o}")
    except OSError as error:
        log.warning("data_folder_open", folder=str(folder), mode=f"{mode:o}", error=error.strerror)
    finally:
        os.close(handle)


def _raise_file_limit(connections: int) -> None:
    """Raise the limit of open files: a descriptor per connection; as many as allowed, and say if that is too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and connections + SPARE_FILES > hard:
        log.info("few_file_descriptors", allowed=hard, max_connections=connections, remedy="raise `ulimit -n`")


def give_back_large_blocks() -> bool:
    """Have large blocks of memory returned to the system as soon as they are freed; False where that is unknown.

    By itself the GNU C library learns from the first such block to keep the next ones, in a heap of each thread that is
    never trimmed: 19 MiB for each thread that has ever checked a password, and a reload starts others.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    return tune is not None and bool(tune(_M_MMAP_THRESHOLD, LARGE_BLOCK) and tune(_M_TRIM_THRESHOLD, SPARE_BLOCK))


def _check_store(loaded: LoadedConfig) -> None:
    """Refuse a store that this node cannot serve as it is asked to, before anything is opened."""
    config = loaded.config
    url, data = config.store.url, Path(config.data.dir)
    embedded = url.startswith(("rocksdb:", MEMORY))
    if config.cluster.bind and embedded:
        raise ConfigError(
            f"{loaded.origin('cluster.bind')}: cluster.bind: the embedded engine serves exactly one node, and "
            f"store.url is {url}; name a store that all nodes reach, redis://HOST:PORT, or leave cluster.bind out"
        )
    private = private_store(data)
    if url == "rocksdb://" and has_private_store(private):
        raise ConfigError(
            f"{data} holds the store of several nodes, {private}: start it with `--nodes 2` or more. To go on with one "
            f"node: `motorcade store export FILE --store valkey://{private}`, `motorcade store import FILE --store "
            f"rocksdb://{data / 'store'}`, then move {private} away; or name another folder with --data"
        )


def run(loaded: LoadedConfig, siblings: Siblings | None = None) -> int:
    """Run a node until SIGTERM or SIGINT; the exit code."""
    os.umask(0o077)  # what the node writes is its own user's, whichever library writes it
    _raise_file_limit(loaded.config.limits.max_connections)
    give_back_large_blocks()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(loaded, siblings))
    except MotorcadeError as error:
        print(f"error: {without_secrets(str(error))}", file=sys.stderr)  # noqa: T201 - for the person who started it
        return 1
    return 0


async def _serve(loaded: LoadedConfig, siblings: Siblings | None) -> None:
    """Run a node; one that its cluster has found dead, again and again as another incarnation."""
    loop = asyncio.get_running_loop()
    process = Process(asyncio.Event())
    tasks: set[asyncio.Task[None]] = set()
    node = Node(loaded, loop, siblings, process)

    def stop() -> None:
        process.stopping.set()
        node.stopping.set()

    def reload() -> None:
        task = asyncio.create_task(node.reload_on_signal(), name="reload")
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    while True:
        await node.run()
        if not node.rejoins or process.stopping.is_set():
            return
        gc.unfreeze()  # else nothing of the node that has ended could be freed
        node = Node(loaded, loop, siblings, process)
        gc.collect()


def made_up_name(port: int) -> str:
    """Return the name of a node that is given none, by its first port."""
    return f"{socket.gethostname()}-{port}"


def _broker_options(config: Config) -> BrokerOptions:
    first = next((a.port for a in addresses(config.listeners.tcp.bind)), 0)
    return msgspec.structs.replace(config.broker, node=config.broker.node or made_up_name(first))


def _link_options(config: Config) -> LinkOptions:
    """Return the options of the links of a member."""
    cluster = config.cluster
    return LinkOptions(
        bind=cluster.bind,
        secret_file=cluster.secret_file,
        certificate=cluster.certificate,
        key=cluster.key,
        ca=cluster.ca,
        plain=cluster.plain,
        patience=cluster.patience,
        lease=cluster.lease,
    )


#: Beginnings of the keys that should be alike on all nodes of a cluster, since a client may be served by any of them.
COMPARED = (
    *("session.", "plugins.", "cluster.patience", "store.durability"),
    *("limits.max_packet_size", "limits.flapping_"),
)


def _compared(loaded: LoadedConfig) -> dict[str, str]:
    """Return short marks of the options that should be alike on all nodes; secrets are hidden before."""
    return {
        key: blake2b(repr(value).encode(), digest_size=4).hexdigest()
        for key, value, _ in loaded.entries()
        if key.startswith(COMPARED)
    }


def _contexts(config: Config) -> dict[str, Served]:
    """Return the TLS contexts of all listeners that are on."""
    found: dict[str, Served] = {}
    for kind, options in (("tls", config.listeners.tls), ("wss", config.listeners.wss)):
        if addresses(options.bind):
            files = TlsFiles(
                options.certificate, options.key, options.ca, options.crl, options.require_client_certificate
            )
            try:
                found[kind] = server_context(files)
            except ConfigError as error:
                raise ConfigError(f"listeners.{kind}: {error}") from error
    return found


def _endpoints(config: Config, tls: dict[str, Served], *, shared: bool) -> list[Endpoint]:
    """Return all addresses of all listeners."""
    listeners = config.listeners
    found = [
        Endpoint("tcp", address.host, address.port, None, "", (), listeners.tcp.max_connections, shared)
        for address in addresses(listeners.tcp.bind)
    ]
    for address in addresses(listeners.tls.bind):
        context = tls["tls"].context
        found.append(
            Endpoint("tls", address.host, address.port, context, "", (), listeners.tls.max_connections, shared)
        )
    for address in addresses(listeners.ws.bind):
        ws = listeners.ws
        found.append(Endpoint("ws", address.host, address.port, None, ws.path, ws.origins, ws.max_connections, shared))
    for address in addresses(listeners.wss.bind):
        wss = listeners.wss
        context = tls["wss"].context
        found.append(
            Endpoint("wss", address.host, address.port, context, wss.path, wss.origins, wss.max_connections, shared)
        )
    if not found:
        raise ConfigError("all listeners are off: no client could connect")
    return found
