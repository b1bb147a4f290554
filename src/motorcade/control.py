"""The operator's view of a node and actions on it. Command line, API and pages come through here, never past it.

Everything handed out is a copy: a frozen record that stays as it is while the broker goes on.

Rule 1: every method runs in the broker's event loop, between two packets. What may be large is bounded (`limit`,
        `MAX_…`) or done in steps that let the loop go on (`SCAN`, `COPY`).
Rule 2: nothing secret is copied: no passwords, no payloads, no attributes from tokens.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import StrEnum, auto
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

import msgspec

from motorcade import __version__
from motorcade.broker.broker import LAG_BUCKETS, Broker
from motorcade.broker.tables import tables
from motorcade.client_control import (
    MAX_CLIENTS,
    PAGE,
    ClientDetail,
    ClientPage,
    Directory,
    Kicked,
    LocalClients,
    NotFoundError,
)
from motorcade.clock import time
from motorcade.extension.compacted import SERVICE, Compacted, CompactedKind
from motorcade.extension.declared import BadOptionsError, ConflictError, Declared, FoundMessage, read_options
from motorcade.extension.hooks import POINTS, Hooks
from motorcade.extension.metrics import Family, Table
from motorcade.extension.plugin import Loaded, Plugins, available
from motorcade.node_control import LocalNode, NodeEntry, NodeList, NodeOrder, Nodes
from motorcade.storage.housekeeping import Housekeeping, SweepCounters
from motorcade.storage.ports import Store, StoreCondition, StoreError, StoreFigures
from motorcade.tasks import label_of

if TYPE_CHECKING:
    from motorcade.plugins.fanout.views import Fanout, GcView

T = TypeVar("T")

MAX_STREAMS: Final = 100  #: streams whose sizes are told
MAX_TASKS: Final = 10  #: tasks that are named when they stand still
MAX_FOUND: Final = 1000  #: messages of a queue or stream on a page
MAX_BYTES: Final = 4 * 1024 * 1024  #: bytes of their payloads after which a page ends, however few they are
MAX_NUMBER: Final = 2**63 - 1  #: that an option can have
READ: Final = 50  #: messages asked for before the loop may go on

#: What operators declare, by the name of the service, and the plugin that has it.
DECLARED: Final[Mapping[str, str]] = {"queues": "queues", "streams": "streams", "captures": "capture"}
#: What every kind of source counts, so that its series are there before it happens.
SOURCE_EVENTS: Final = (
    *("given", "delivered", "refused", "expired", "too_large", "withdrawn"),
    *("stray", "overshoot", "failed", "recreated"),
)


class NodeState(StrEnum):
    """The state in the life of a node."""

    STARTING = auto()
    READY = auto()
    STOPPING = auto()


class HookView(msgspec.Struct, frozen=True, kw_only=True):
    """A callback a plugin has registered."""

    point: str
    priority: int
    errors: int  #: times it raised or ran out of time


class PluginView(msgspec.Struct, frozen=True, kw_only=True):
    """A plugin that runs."""

    name: str
    origin: str  #: entry point or path
    description: str
    hooks: list[HookView]
    counters: dict[str, int]
    gauges: dict[str, float]
    tasks: int  #: running in the background


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The health of a node: whether clients should be sent to it."""

    ready: bool
    reasons: list[str]  #: why not, in plain words
    degraded: list[str]  #: what a member of a cluster cannot do now, and none of the others could do instead
    details: list[str]  #: the same for the operator


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """The node as a whole."""

    node: str
    version: str
    state: NodeState
    uptime: float  #: seconds
    pid: int
    python: str
    listeners: dict[str, list[str]]  #: name: addresses
    connections: int
    sessions: int
    subscriptions: int
    plugins: list[str]
    problems: list[str]  #: why it is not ready


class LoopLag(msgspec.Struct, frozen=True, kw_only=True):
    """The delay of the event loop, as a histogram."""

    buckets: tuple[tuple[float, int], ...]  #: (upper bound in seconds, samples up to it)
    total: float  #: seconds, of all samples
    count: int


class StoreView(msgspec.Struct, frozen=True, kw_only=True):
    """The store of the node."""

    figures: StoreFigures
    place: str  #: directory of an embedded store; empty: it has none
    pid: int  #: of this process, which alone has an embedded store open
    streams: dict[str, int]  #: records of the first MAX_STREAMS
    sweeps: SweepCounters | None


class WorkState(StrEnum):
    """The state of long work: a backup, a collection."""

    RUNNING = auto()
    DONE = auto()
    FAILED = auto()


class BackupView(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of the store, in the making or made."""

    to: str
    state: WorkState
    started_at: float
    seconds: float  #: it took, or has taken so far
    octets: int  #: of the copy; 0 until it is there
    error: str


class CollectionView(msgspec.Struct, frozen=True, kw_only=True):
    """A collection of what the fan-out no longer needs, under way or ended."""

    state: WorkState
    started_at: float
    seconds: float  #: it took, or has taken so far
    found: GcView | None  #: what became of it, when it has ended well
    error: str


class FoundPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some messages of a queue or stream, oldest first."""

    messages: list[FoundMessage]
    cursor: int | None  #: position to go on after; None: these were the last


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """All counters and gauges at one moment."""

    figures: dict[str, float]  #: `hub.statistics()`
    dropped: dict[str, int]
    withdrawn: dict[str, int]
    cluster: dict[str, dict[str, int]]  #: family: kind of item: messages; empty: the node is alone
    moves: dict[str, int]  #: of clients between members; empty: the node is alone
    refused: dict[str, int]
    protocol_errors: dict[str, int]
    session_events: dict[str, int]
    auth: dict[str, int]  #: allowed, denied
    acl: dict[str, int]
    plugins: list[PluginView]
    families: list[Family]  #: of plugins
    tables: list[Table]  #: what is kept in memory, by the broker and by plugins
    sources: dict[str, dict[str, int]]  #: kind of source: event: how often
    declared: dict[str, int]  #: queue, stream, …: how many there are
    certificates: dict[str, dict[str, float]]  #: listener: option: when the first of its file ends
    lag: LoopLag
    store: StoreFigures | None  #: as of the last round of housekeeping
    condition: StoreCondition | None  #: of the store, as of now
    sweeps: SweepCounters | None
    task_failures: dict[str, int]  #: background task: how often it has failed
    tasks_standing: int  #: background tasks that have failed and do not run well again yet


class ReloadView(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a reload."""

    applied: list[str]
    restart: list[str]  #: what was not applied: it needs a restart, or a command
    changed: list[str]  #: both


class SettingView(msgspec.Struct, frozen=True, kw_only=True):
    """One key of the configuration. What is secret is hidden."""

    key: str
    value: Any
    origin: str  #: file and line, environment, command line or default


@runtime_checkable
class Copyable(Protocol):
    """A store in a directory, that can be copied while it goes on."""

    @property
    def path(self) -> Path: ...

    async def backup(self, to: Path) -> None: ...


class MembershipStatus(Protocol):
    """The membership of this node in a cluster."""

    def troubles(self) -> list[tuple[str, str]]:
        """Return why clients should be sent to other members: in plain words, and for the operator."""

    def metrics(self) -> list[Family]:
        """Return what is measured of members, links and feeds."""


Reload = Callable[[], Awaitable[ReloadView]]
Setting = tuple[str, object, str]  #: key, value, origin


class Control:
    """The control plane of one node."""

    def __init__(
        self,
        broker: Broker,
        plugins: Plugins,
        reload: Reload,
        *,
        settings: Callable[[], Iterable[Setting]] = tuple,
        plugin_paths: Sequence[str] = (),
    ) -> None:
        """Take `reload`, which reads the configuration again and tells the changes; `MotorcadeError` if it is wrong.

        `settings`: the options in force; `plugin_paths`: folders that callers may load plugins from.
        """
        self.state = NodeState.STARTING  #: set by the node
        self.certificates: dict[str, dict[str, float]] = {}  #: listener: option: when its file ends; set by the node
        self.listeners: dict[str, list[str]] = {}  #: addresses by name; set by the node when they are open
        self.directory: Directory = LocalClients(broker)  #: of the whole cluster, once this node is a member (`join`)
        self.nodes: Nodes = LocalNode(broker)  #: likewise
        self.membership: MembershipStatus | None = None  #: likewise; None: this node is alone
        self.settings = settings  #: changed by a reload
        self.plugin_paths = plugin_paths
        self._broker = broker
        self._broker_state = broker.state
        self._plugins = plugins
        self._reload = reload
        self.store: Store | None = None  #: set by the node when it is open
        self.housekeeping: Housekeeping | None = None  #: likewise
        self._backup: BackupView | None = None  #: the last one
        self._backing_up: asyncio.Task[None] | None = None
        self._collection: CollectionView | None = None  #: the last one that was asked for
        self._collecting: asyncio.Task[None] | None = None

    def join(self, membership: MembershipStatus, directory: Directory, nodes: Nodes) -> None:
        """Show the whole cluster from now on, not this node alone."""
        self.membership, self.directory, self.nodes = membership, directory, nodes

    # -- clients

    async def clients(self, cursor: str = "", limit: int = PAGE, search: str = "", node: str = "") -> ClientPage:
        """Return a page of clients after `cursor`, connected or away, whose id or user name contains `search`.

        `node`: of one node of the cluster only; `NotFoundError` if there is none of that name.
        """
        return await self.directory.page(cursor, min(max(limit, 1), MAX_CLIENTS), search, node)

    async def client(self, client_id: str) -> ClientDetail:
        """Return everything about one client; `NotFoundError` if it has no session."""
        return await self.directory.show(client_id)

    async def kick(self, client_id: str) -> Kicked:
        """Send a client away; what was done. If it is away already, its session is removed and its will published."""
        return await self.directory.kick(client_id)

    # -- nodes

    async def list_nodes(self) -> NodeList:
        """Return all nodes of the cluster, this one first."""
        return await self.nodes.list()

    async def show_node(self, name: str) -> NodeEntry:
        """Return one node by its name, or by the id of the member that it is; `NotFoundError`."""
        return await self.nodes.show(name)

    async def order_node(self, name: str, order: NodeOrder) -> NodeEntry:
        """Have a node do something: send its clients away, take them again, leave; how it is then."""
        return await self.nodes.order(name, order)

    # -- plugins

    async def plugins(self) -> list[PluginView]:
        """Return the plugins that run, in the order of loading."""
        hooks = self._broker_state.hooks
        return [_plugin_view(loaded, hooks) for loaded in self._plugins.loaded()]

    @staticmethod
    def installed() -> dict[str, str]:
        """Return names and origins of plugins that could be loaded. Reads files: the only method for another thread."""
        return available()

    async def load_plugin(
        self, name: str, config: Mapping[str, Any] | None = None, path: str | None = None
    ) -> PluginView:
        """Load a plugin; `PluginError` says why it could not be. A path must lie in one of `plugin_paths`."""
        loaded = await self._plugins.load(name, config, path, within=self.plugin_paths)
        return _plugin_view(loaded, self._broker_state.hooks)

    async def unload_plugin(self, name: str) -> None:
        """Unload a plugin; `NotFoundError` if it does not run."""
        if all(loaded.name != name for loaded in self._plugins.loaded()):
            raise NotFoundError(f"plugin {name!r} is not loaded")
        await self._plugins.unload(name)

    # -- what operators declare

    def declared(self, plural: str) -> Declared:
        """Return the service of queues, streams or captures; `NotFoundError` names the plugin. Only for this loop."""
        service: Declared | None = self._plugins.service(plural)
        if service is None:
            name = DECLARED.get(plural, plural)
            raise NotFoundError(
                f"this node has no {plural}: plugin {name!r} is not loaded (`motorcade plugin load {name}`)"
            )
        return service

    async def declarations(self, plural: str) -> list[msgspec.Struct]:
        """Return the views of all that are declared, by name."""
        return list(await self.declared(plural).list())

    async def declaration(self, plural: str, name: str) -> msgspec.Struct:
        """Return the view of one; `UnknownError`."""
        return await self.declared(plural).show(name)

    async def declare(self, plural: str, name: str, given: Mapping[str, Any]) -> msgspec.Struct:
        """Make one; `ConflictError` if it is there, `BadNameError`, `BadOptionsError`."""
        service = self.declared(plural)
        return await service.create(name, _options(service, given))

    async def redeclare(self, plural: str, name: str, given: Mapping[str, Any], *, keep: bool) -> msgspec.Struct:
        """Give one other options; what is not given stays as it is (`keep`) or goes back to its default."""
        service = self.declared(plural)
        old = msgspec.to_builtins(service.options(name)) if keep else {}
        return await service.change(name, _options(service, {**old, **given}))

    async def remove_declared(self, plural: str, name: str) -> None:
        """Remove one with its contents; `UnknownError`, `ConflictError`."""
        await self.declared(plural).delete(name)

    async def read_declared(self, plural: str, name: str, after: int, limit: int) -> FoundPage:
        """Return messages after a position: at most `limit`, fewer where they are large. Changes nothing."""
        service = self.declared(plural)
        return await _found_page(lambda last, ask: service.read(name, last, ask), after, limit)

    # -- compacted queues

    def compacted(self) -> Compacted:
        """Return the service of compacted queues; `NotFoundError` names the plugin to load. Await in this loop only."""
        service: Compacted | None = self._plugins.service(SERVICE)
        if service is None:
            raise NotFoundError(
                "this node has no compacted queues: plugin 'ecq' is not loaded (`motorcade plugin load ecq`)"
            )
        return service

    async def ask_compacted(self, question: Callable[[Compacted], Awaitable[T]]) -> T:
        """Return the plugin's answer to a question, asked in this loop."""
        return await question(self.compacted())

    async def read_compacted(self, form: CompactedKind, name: str, after: int, limit: int) -> FoundPage:
        """Return messages after a sequence number, as `read_declared` gives those of declared queues."""
        service = self.compacted()
        return await _found_page(lambda last, ask: service.read(form, name, last, ask), after, limit)

    # -- the fan-out

    def fanout(self) -> Fanout:
        """Return the service of the fan-out; `NotFoundError` says what to do. Await its methods in this loop only."""
        service: Fanout | None = self._plugins.service("fanout")
        if service is None:
            raise NotFoundError(
                "this node has no fan-out: plugin 'fanout' is not loaded (`motorcade plugin load fanout`)"
            )
        return service

    async def ask_fanout(self, question: Callable[[Fanout], Awaitable[T]]) -> T:
        """Return the fan-out's answer to a question, asked in this loop."""
        return await question(self.fanout())

    async def start_collection(self) -> CollectionView:
        """Let the fan-out collect now; ask `collection` how far it is. One at a time."""
        service = self.fanout()
        if self._collecting is not None and not self._collecting.done():
            raise ConflictError("a collection is under way already; wait until it is done")
        started = CollectionView(state=WorkState.RUNNING, started_at=time(), seconds=0.0, found=None, error="")
        self._collection = started
        self._collecting = asyncio.create_task(self._collect(service, started), name="collection")
        return started

    async def collection(self) -> CollectionView:
        """Return the last collection that was asked for; `NotFoundError` if none was."""
        last = self._collection
        if last is None:
            raise NotFoundError("no collection was asked for since this node started")
        if last.state is not WorkState.RUNNING:
            return last
        return msgspec.structs.replace(last, seconds=time() - last.started_at)

    async def _collect(self, service: Fanout, started: CollectionView) -> None:
        state, found, error = WorkState.DONE, None, ""
        try:
            found = await service.gc()
        except Exception as problem:  # noqa: BLE001 - the caller that asks for the collection hears it
            state, error = WorkState.FAILED, str(problem)
        self._collection = msgspec.structs.replace(
            started, state=state, seconds=time() - started.started_at, found=found, error=error
        )

    # -- the store

    async def store_view(self) -> StoreView:
        """Return the store's figures as of now; `StoreError` if it does not answer."""
        store = self._open_store()
        names = sorted(await store.streams.names())[:MAX_STREAMS]
        return StoreView(
            figures=await store.figures(),
            place=str(store.path.absolute()) if isinstance(store, Copyable) else "",
            pid=os.getpid(),
            streams={name: (await store.streams.info(name)).records for name in names},
            sweeps=self.housekeeping.counters if self.housekeeping is not None else None,
        )

    async def start_backup(self, to: str) -> BackupView:
        """Begin to copy an embedded store to a new directory; ask `backup` how far it is. One at a time."""
        store, place = self._open_store(), Path(to)
        if not isinstance(store, Copyable):
            raise StoreError("this store is not in a directory; it is backed up by its server's own means")
        if self._backing_up is not None and not self._backing_up.done():
            raise StoreError(
                f"a backup is under way already; wait until {self._backup.to if self._backup else ''} is done"
            )
        if not place.is_absolute():
            raise StoreError(f"{to!r} is no absolute path, and the node works in a folder of its own")
        started = self._backup = BackupView(
            to=to, state=WorkState.RUNNING, started_at=time(), seconds=0.0, octets=0, error=""
        )
        self._backing_up = asyncio.create_task(self._copy(store, place, started), name="backup")
        return started

    async def backup(self) -> BackupView:
        """Return the last backup, or the one under way; `NotFoundError` if there was none."""
        last = self._backup
        if last is None:
            raise NotFoundError("no backup was made since this node started")
        if last.state is not WorkState.RUNNING:
            return last
        return msgspec.structs.replace(last, seconds=time() - last.started_at)

    async def _copy(self, store: Copyable, to: Path, started: BackupView) -> None:
        from motorcade.storage import embedded  # noqa: PLC0415 - needs a library that other stores do without

        def ended(state: WorkState, size_bytes: int = 0, error: str = "") -> BackupView:
            seconds = time() - started.started_at
            return msgspec.structs.replace(started, state=state, seconds=seconds, octets=size_bytes, error=error)

        # First beside the store, by hard links, which takes no time; what may take long is done in another thread.
        made = store.path / "copy-backup"
        try:
            await asyncio.to_thread(embedded.remove, made)
            await store.backup(made)
            size_bytes = await asyncio.to_thread(embedded.publish, made, to)
        except Exception as error:  # noqa: BLE001 - the caller that asks for the backup hears it
            self._backup = ended(WorkState.FAILED, error=str(error))
            await asyncio.to_thread(embedded.remove, made)
        else:
            self._backup = ended(WorkState.DONE, size_bytes)

    def _open_store(self) -> Store:
        if self.store is None:
            raise NotFoundError("this node has no store open")
        return self.store

    # -- the node

    async def configuration(self) -> list[SettingView]:
        """Return the settings in force: file, environment and command line at the start, and applied reloads."""
        return [SettingView(key=key, value=value, origin=origin) for key, value, origin in self.settings()]

    async def reload(self) -> ReloadView:
        """Read the configuration again; what was applied and what was not. `MotorcadeError` says what is wrong."""
        return await self._reload()

    async def node(self) -> NodeView:
        """Return the node as a whole."""
        broker_state = self._broker_state
        return NodeView(
            node=broker_state.options.node,
            version=__version__,
            state=self.state,
            uptime=self._broker.statistics().get("uptime", 0.0),
            pid=os.getpid(),
            python=platform.python_version(),
            listeners=dict(self.listeners),
            connections=broker_state.connections,
            sessions=len(broker_state.registry.sessions),
            subscriptions=broker_state.pubsub.subscriptions + broker_state.pubsub.shared_subscriptions,
            plugins=[loaded.name for loaded in self._plugins.loaded()],
            problems=(await self.health()).details,
        )

    async def health(self) -> Health:
        """Return whether the node serves clients and can keep what they send. An answer means that the loop turns."""
        reasons: list[str] = []
        details: list[str] = []
        degraded: list[str] = []
        if self.state is not NodeState.READY:
            reasons.append(f"the node is {self.state}")
            details.append(reasons[0])
        elif self._broker_state.draining:
            reasons.append(self._broker_state.draining)
            details.append(reasons[0])
        if self.membership is not None:
            for reason, detail in self.membership.troubles():
                reasons.append(reason)
                details.append(detail)
        condition = self.store.condition() if self.store is not None else None
        if condition is not None and condition.trouble:
            # Members share it: whatever one cannot store now, the others cannot store either. Live messages go on.
            (reasons if self.membership is None else degraded).append(f"the store {condition.trouble}")
            details.append(f"the store {condition.trouble}: {condition.detail}")
        sessions = self._broker_state.store
        if sessions is not None:
            try:
                sessions.lease.check()
            except StoreError as error:
                reasons.append(str(error))
                details.append(str(error))
        if self._broker_state.full:
            reasons.append("the node takes more memory than it may (limits.max_memory)")
            details.append(reasons[-1])
        standing = self._broker.supervisor.standing_still()
        if standing:
            names = sorted({label_of(task.name) for task in standing})  # everyone may ask: no names of queues and rules
            more = f" and {len(names) - MAX_TASKS} more" if len(names) > MAX_TASKS else ""
            reasons.append(f"background tasks stand still: {', '.join(names[:MAX_TASKS])}{more}")
            details += self._broker.supervisor.troubles()
        return Health(ready=not reasons, reasons=reasons, degraded=degraded, details=details)

    async def statistics(self) -> Statistics:
        """Return all counters and gauges."""
        stats = self._broker_state.stats
        plugins = await self.plugins()
        return Statistics(
            figures=dict(self._broker.statistics()),
            dropped=dict(stats.dropped),
            withdrawn=dict(stats.withdrawn),
            cluster=stats.cluster() if self._broker_state.relay is not None else {},
            moves=dict(stats.moves) if self._broker_state.relay is not None else {},
            refused=dict(stats.refused),
            protocol_errors=dict(stats.protocol_errors),
            session_events=dict(stats.sessions),
            auth={"allowed": stats.auth_allowed, "denied": stats.auth_denied},
            acl={"allowed": stats.acl_allowed, "denied": stats.acl_denied},
            plugins=plugins,
            families=[
                *(self.membership.metrics() if self.membership is not None else ()),
                *(
                    family
                    for loaded, view in zip(self._plugins.loaded(), plugins, strict=True)
                    for family in loaded.metrics(view.gauges)
                ),
            ],
            tables=[
                *tables(self._broker_state),
                *(table for loaded in self._plugins.loaded() for table in loaded.tables()),
            ],
            sources={kind.name: {**dict.fromkeys(SOURCE_EVENTS, 0), **kind.counters} for kind in self._plugins.kinds()},
            declared={
                service.noun: len(service)
                for plural in DECLARED
                if (service := self._plugins.service(plural)) is not None
            },
            certificates={listener: dict(ends) for listener, ends in self.certificates.items()},
            lag=_lag(self._broker),
            store=self.housekeeping.figures if self.housekeeping is not None else None,
            condition=self.store.condition() if self.store is not None else None,
            task_failures=dict(self._broker.supervisor.failures),
            tasks_standing=len(self._broker.supervisor.standing_still()),
            sweeps=self.housekeeping.counters if self.housekeeping is not None else None,
        )


async def _found_page(
    read: Callable[[int, int], Awaitable[Sequence[FoundMessage]]], after: int, limit: int
) -> FoundPage:
    """Return a page of messages, read in steps that let the loop go on."""
    wanted = min(max(limit, 1), MAX_FOUND)
    found: list[FoundMessage] = []
    size_bytes, more = 0, True
    while more and len(found) <= wanted and size_bytes <= MAX_BYTES:
        ask = min(wanted + 1 - len(found), READ)  # one more than wanted tells whether there is more
        step = await read(found[-1].position if found else after, ask)
        found += step
        size_bytes += sum(len(message.payload) for message in step)
        more = len(step) == ask
        await asyncio.sleep(0)
    shown = found[:wanted]
    more = more or len(found) > wanted
    return FoundPage(messages=shown, cursor=shown[-1].position if more and shown else None)


def _options(service: Declared, given: Mapping[str, Any]) -> msgspec.Struct:
    """Return options that can be stored: integers have 64 bits at most."""
    for key, value in given.items():
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise BadOptionsError(f"{service.noun}: {key} must be a number up to {MAX_NUMBER}")
    return read_options(service.noun, service.Options, given)


def _lag(broker: Broker) -> LoopLag:
    buckets = tuple(zip(LAG_BUCKETS, accumulate(broker.lag), strict=False))  # the last count is above all bounds
    return LoopLag(buckets=buckets, total=broker.lag_sum, count=sum(broker.lag))


def _plugin_view(loaded: Loaded, hooks: Hooks) -> PluginView:
    return PluginView(
        name=loaded.name,
        origin=loaded.origin,
        description=loaded.plugin.description,
        hooks=[
            HookView(point=point, priority=callback.priority, errors=callback.errors)
            for point in POINTS
            for callback in hooks.lookup(point)
            if callback.owner == loaded.name
        ],
        counters=dict(loaded.context.counters),
        gauges=loaded.gauges(),
        tasks=len(loaded.context.tasks),
    )
