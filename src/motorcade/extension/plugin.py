"""Plugins: what they are, what they are given, and how they are found, loaded and unloaded.

A plugin is a subclass of `Plugin` in a Python package with an entry point in the group `motorcade.plugins`,
or in a `.py` file or package folder named by its path. Methods marked with `@hook(...)` are registered when
it starts and removed when it stops; everything it spawned is cancelled then. Nothing of a plugin that fails
to start stays behind.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import structlog

from motorcade.commit import Commit
from motorcade.core.client import ClientInfo
from motorcade.core.errors import HookError, MotorcadeError, PluginError
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.extension.checked import Module, read_plugin
from motorcade.extension.cluster import Cluster
from motorcade.extension.hooks import DEFAULT_TIMEOUT, Callback, Hooks
from motorcade.extension.metrics import Counts, Family, Measure, Table, declared
from motorcade.extension.sources import Sources, SourceType
from motorcade.tasks import Tasks, Work

GROUP = "motorcade.plugins"
BY_PATH = "motorcade_plugin_"  #: begins the name of a module that was loaded by path; a number and its stem follow
PATIENCE = 30.0  #: seconds a plugin may take to start or to stop; others wait for it
F = TypeVar("F", bound=Callable[..., Any])


class Hub(Protocol):
    """The broker's services for plugins."""

    @property
    def node(self) -> str:
        """The name of this node."""

    async def publish(self, message: Message) -> int:
        """Publish in the name of the node: hooks, then routing. Returns how many clients it went to."""

    def heard(self, topic: str, besides: str = "") -> bool:
        """Return True if a subscriber, or a plugin but this one, would get a message of this topic now.

        If not, it need not be made.
        """

    def heard_below(self, level: str, besides: str = "") -> bool:
        """Return the same for all topics below this first level, which begins with `$`: faster than asking for each."""

    def tell(self, client_id: str, what: object) -> bool:
        """Send `info(what)` to every generic source of a client; False if it is not connected, or has none."""

    async def disconnect(self, client_id: str, reason: ReasonCode = ReasonCode.ADMINISTRATIVE_ACTION) -> bool:
        """Send a client away; False if it is not connected."""

    def client(self, client_id: str) -> ClientInfo | None:
        """Return a connected client by its id, or None."""

    def clients(self) -> Iterable[ClientInfo]:
        """Return all connected clients, as they are now."""

    def last_seen(self, client_id: str) -> float:
        """Return when a client's connection ended, or began if it is connected; 0: it has no session."""

    async def seen_anywhere(self, client_id: str) -> float:
        """Return the same if its session is here, or sleeps in the store; a `StoreError` may be raised."""

    def arriving(self, client_id: str) -> Commit[None] | None:
        """Return what a client that has come from another node waits for: all that it has done there is settled.

        None: nothing. Until then that node may still write something about it (`under_way`).
        """

    def under_way(self, client_id: str, commit: Commit[Any]) -> None:
        """Note something that a plugin writes about a client, until its outcome is known.

        Another node that the client moves to waits for it (`arriving`), and a client whose connection broke belongs to
        this node until then. A node by itself does nothing.
        """

    def recheck_access(self) -> None:
        """Forget cached access decisions, and take away subscriptions that are no longer allowed."""

    def statistics(self) -> Mapping[str, float]:
        """Return the node's counters and gauges by name."""

    def now(self) -> float:
        """Return the seconds since the epoch by the node's clock, which never steps: for intervals."""

    def wall(self) -> float:
        """Return the seconds since the epoch by the system's clock: for what others have dated."""


class Spawn(Protocol):
    """`Context.spawn`."""

    def __call__(self, work: Work | Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]: ...


@dataclass(slots=True)
class Context:
    """The services and data for one plugin."""

    name: str
    hub: Hub
    log: structlog.stdlib.BoundLogger
    data: Path  #: folder of this plugin's own; made when first used
    counters: Counter[str]  #: what has happened, by event; `Plugin.counts` says as which families it is shown
    tasks: set[asyncio.Task[None]]
    store: Any = None  #: the node's store, a `motorcade.storage.ports.Store`; `memory://` ends with the node
    hooks: Hooks = field(default_factory=Hooks)
    sources: Sources = field(default_factory=Sources)
    services: dict[str, Any] = field(default_factory=dict)
    offered: set[str] = field(default_factory=set)
    supervisor: Tasks = field(default_factory=Tasks)  #: the node's background tasks
    cluster: Cluster | None = None  #: the other members; None: this node is alone
    endings: list[Callable[[], None]] = field(default_factory=list)  #: what is called when the plugin is unloaded

    def spawn(self, work: Work | Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run something in the background until it ends or the plugin is unloaded.

        A function that makes the coroutine is called again with back-off when it fails, and the node is not ready while
        it stands still. A coroutine by itself cannot be repeated: its failure is counted and logged.
        """
        name = f"{self.name}.{name}"
        if callable(work):
            task = self.supervisor.start(work, name, failed=self._count_failure)
        else:
            task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def add_hook(
        self,
        point: str,
        function: Callable[..., Any],
        *,
        priority: int = 0,
        topics: Iterable[str] = (),
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """Register a callback while the plugin runs; `@hook` does it for what is known from the start.

        A callback that is there already is replaced, which is how its `topics` change.
        """
        self.hooks.remove(point, function)
        self.hooks.add(point, Callback(function, priority, self.name, tuple(topics), timeout=timeout))

    def remove_hook(self, point: str, function: Callable[..., Any]) -> bool:
        """Take a callback away; False if it was not there."""
        return self.hooks.remove(point, function)

    def add_source(self, kind: SourceType) -> None:
        """Register a kind of source (see `extension.sources`); it ends with the plugin."""
        kind.owner = self.name
        self.sources.register(kind)

    def at_end(self, end: Callable[[], None]) -> None:
        """Have something ended when the plugin is unloaded, such as what `Cluster.on_note` has begun."""
        self.endings.append(end)

    def offer(self, name: str, service: Any) -> None:
        """Let other plugins use something of this one, by name, until it is unloaded."""
        if name in self.services:
            raise PluginError(f"plugin {self.name!r}: there is a service {name!r} already")
        self.services[name] = service
        self.offered.add(name)

    def service(self, name: str) -> Any:
        """Return the service of another plugin, or None. Ask each time: it may be unloaded."""
        return self.services.get(name)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._count_failure()
            self.supervisor.note(task.get_name(), error)

    def _count_failure(self) -> None:
        self.counters["task_failed"] += 1


class NoConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The configuration of a plugin that has none."""


class Plugin:
    """Base class of all plugins. Override what you need; mark callbacks with `@hook`."""

    Config: ClassVar[type[msgspec.Struct]] = NoConfig  #: validated before the plugin is made; unknown keys are errors
    description: ClassVar[str] = ""
    counts: ClassVar[tuple[Counts, ...]] = ()  #: families of what is counted; else each event is a family
    measures: ClassVar[tuple[Measure, ...]] = ()  #: families of what `gauges` tells; else each of them is one
    at_start: ClassVar[tuple[str, ...]] = ()  #: options that a reload does not apply: they hold from the next start on

    def __init__(self, context: Context, config: Any) -> None:
        self.context = context
        self.config = config

    async def start(self) -> None:
        """Start, before the hooks are registered. Raise to refuse being loaded."""

    async def reload(self, config: Any) -> None:
        """Take a new configuration, or the same with changed files. Raise `MotorcadeError` to keep the old."""
        self.config = config

    async def stop(self) -> None:
        """Stop, after the hooks are removed."""

    def gauges(self) -> Mapping[str, float]:
        """Return figures of the moment, by name; they join the node's statistics. Must be quick."""
        return {}

    def history(self) -> int:
        """Return how many entries of mailboxes wait for no one, since they are kept to be looked up. Must be quick."""
        return 0

    def metrics(self) -> Iterable[Family]:
        """Return families that are neither counts nor figures of the moment: those with own labels. Must be quick."""
        return ()

    def tables(self) -> Iterable[Table]:
        """Return the tables that this plugin keeps in memory. Must be quick."""
        return ()


@dataclass(frozen=True, slots=True)
class _Mark:
    point: str
    priority: int
    topics: tuple[str, ...]
    retained_only: bool
    takes: bool
    timeout: float
    plain: str


def hook(
    point: str,
    *,
    priority: int = 0,
    topics: Iterable[str] = (),
    retained_only: bool = False,
    takes: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
    plain: str = "",
) -> Callable[[F], F]:
    """Mark a method of a plugin as callback of a hook point (see `extension.hooks`).

    `plain` names the method that takes plain messages as they come (`hooks.Plain`).
    """

    def mark(function: F) -> F:
        marks: list[_Mark] = function.__dict__.setdefault("__motorcade_hooks__", [])
        marks.append(_Mark(point, priority, tuple(topics), retained_only, takes, timeout, plain))
        return function

    return mark


@dataclass(slots=True)
class Loaded:
    """A plugin that is running."""

    name: str
    plugin: Plugin
    context: Context
    origin: str  #: entry point or path
    started_with: msgspec.Struct  #: its configuration when it was loaded

    def gauges(self) -> dict[str, float]:
        """Return the plugin's figures; none if it fails to tell them."""
        try:
            return dict(self.plugin.gauges())
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
            self.context.counters["gauges_failed"] += 1
            self.context.log.error("plugin_gauges_failed", error=repr(error))  # noqa: TRY400 - the error says enough
            return {}

    def history(self) -> int:
        """Return how many entries the plugin keeps as history; 0 if it fails to tell."""
        try:
            return self.plugin.history()
        except Exception as error:  # noqa: BLE001 - as for gauges
            self.context.counters["gauges_failed"] += 1
            self.context.log.error("plugin_history_failed", error=repr(error))  # noqa: TRY400 - the error says enough
            return 0

    def metrics(self, figures: Mapping[str, float]) -> list[Family]:
        """Return the plugin's families, of which `figures` are known already; only the declared ones if it fails."""
        plugin = self.plugin
        found = declared(self.name, plugin.counts, plugin.measures, self.context.counters, figures)
        try:
            return [*found, *plugin.metrics()]
        except Exception as error:  # noqa: BLE001 - as for gauges
            self.context.counters["gauges_failed"] += 1
            self.context.log.error("plugin_metrics_failed", error=repr(error))  # noqa: TRY400 - the error says enough
            return found

    def tables(self) -> list[Table]:
        """Return the plugin's tables; none if it fails to tell them."""
        try:
            return list(self.plugin.tables())
        except Exception as error:  # noqa: BLE001 - as for gauges
            self.context.counters["gauges_failed"] += 1
            self.context.log.error("plugin_tables_failed", error=repr(error))  # noqa: TRY400 - the error says enough
            return []


class Plugins:
    """The plugins of one node."""

    def __init__(
        self, hub: Hub, hooks: Hooks, data: Path, sources: Sources | None = None, tasks: Tasks | None = None
    ) -> None:
        self._hub = hub
        self._tasks = tasks or Tasks()
        self._hooks = hooks
        self._sources = sources or Sources()
        self._data = data
        self._services: dict[str, Any] = {}
        self.store: Any = None  #: given to every plugin that is loaded from now on
        self.cluster: Cluster | None = None  #: the same; None: this node is alone
        self._loaded: dict[str, Loaded] = {}
        self._changing = asyncio.Lock()

    def loaded(self) -> list[Loaded]:
        """Return the running plugins, in the order of loading."""
        return list(self._loaded.values())

    def service(self, name: str) -> Any:
        """Return the service of a plugin, or None."""
        return self._services.get(name)

    def kinds(self) -> tuple[SourceType, ...]:
        """Return all kinds of sources that plugins have registered."""
        return self._sources.kinds

    def history(self) -> int:
        """Return how many entries of mailboxes the plugins keep as history."""
        return sum(loaded.history() for loaded in self._loaded.values())

    def gauges(self) -> dict[str, float]:
        """Return the figures of all plugins together."""
        return {name: value for loaded in self._loaded.values() for name, value in loaded.gauges().items()}

    async def load(
        self,
        name: str,
        config: Mapping[str, object] | None = None,
        path: str | None = None,
        *,
        within: Sequence[str] | None = None,
    ) -> Loaded:
        """Find, configure and start a plugin. `PluginError` says what is wrong; nothing stays behind then.

        With `within`, a `path` must lie in one of these folders and belong to the node's user (see `checked`);
        without, the caller is trusted with it.
        """
        async with self._changing:
            if name in self._loaded:
                raise PluginError(f"plugin {name!r} is loaded already")
            kind, origin = _from_path(path, within) if path else _from_entry_point(name)
            try:
                options = _configure(name, kind, config or {})
            except PluginError:
                _forget(kind.__module__)
                raise
            log = structlog.stdlib.get_logger("motorcade.plugin").bind(plugin=name)
            context = self._context(name, log)
            try:
                plugin = kind(context, options)
                await asyncio.wait_for(plugin.start(), PATIENCE)
                for point, callback in _callbacks(name, plugin):
                    self._hooks.add(point, callback)
            except Exception as error:
                self._withdraw(context)
                await _cancel(context)
                _forget(kind.__module__)
                if isinstance(error, MotorcadeError) and not isinstance(error, HookError):
                    raise PluginError(f"plugin {name!r}: {error}") from error
                raise PluginError(f"plugin {name!r} could not start: {error!r}") from error
            loaded = self._loaded[name] = Loaded(name, plugin, context, origin, options)
            log.info("plugin_loaded", origin=origin)
            return loaded

    def _context(self, name: str, log: structlog.stdlib.BoundLogger) -> Context:
        return Context(
            name,
            self._hub,
            log,
            self._data / name,
            Counter(),
            set(),
            self.store,
            self._hooks,
            self._sources,
            self._services,
            supervisor=self._tasks,
            cluster=self.cluster,
        )

    def _withdraw(self, context: Context) -> None:
        """Remove a plugin's callbacks: it is not called any more."""
        self._hooks.remove_owner(context.name)
        self._sources.remove_owner(context.name)
        for service in context.offered:
            self._services.pop(service, None)
        for end in reversed(context.endings):
            end()
        context.endings.clear()

    async def unload(self, name: str) -> None:
        """Stop a plugin and remove its callbacks."""
        async with self._changing:
            loaded = self._loaded.pop(name, None)
            if loaded is None:
                raise PluginError(f"plugin {name!r} is not loaded; loaded are: {', '.join(self._loaded) or 'none'}")
            self._withdraw(loaded.context)
            try:
                await asyncio.wait_for(loaded.plugin.stop(), PATIENCE)
            except Exception as error:
                raise PluginError(f"plugin {name!r} is unloaded, but did not stop well: {error!r}") from error
            finally:
                await _cancel(loaded.context)
                _forget(type(loaded.plugin).__module__)
            loaded.context.log.info("plugin_unloaded")

    async def reload(self, name: str, config: Mapping[str, object]) -> list[str]:
        """Give a running plugin new configuration; on any error the old stays in force.

        Returns the options that have changed since the plugin was loaded, and hold only from the next start on.
        """
        async with self._changing:
            loaded = self._loaded.get(name)
            if loaded is None:
                raise PluginError(f"plugin {name!r} is not loaded")
            options = _configure(name, type(loaded.plugin), config)
            try:
                await asyncio.wait_for(loaded.plugin.reload(options), PATIENCE)
            except MotorcadeError:
                raise
            except Exception as error:
                raise PluginError(f"plugin {name!r} could not reload: {error!r}") from error
            return [key for key in loaded.plugin.at_start if getattr(loaded.started_with, key) != getattr(options, key)]

    def check(self, name: str, config: Mapping[str, object]) -> None:
        """Raise `PluginError` if a running plugin would not take this configuration."""
        loaded = self._loaded.get(name)
        if loaded is not None:
            _configure(name, type(loaded.plugin), config)

    async def unload_all(self) -> None:
        """Stop everything, last loaded first."""
        for name in reversed(list(self._loaded)):
            try:
                await self.unload(name)
            except Exception as error:  # noqa: BLE001 - one plugin's failure must not keep the others from stopping
                log = structlog.stdlib.get_logger("motorcade.plugin")
                log.error("plugin_stop_failed", plugin=name, error=repr(error))  # noqa: TRY400 - the error says enough


def available() -> dict[str, str]:
    """Return names of installed plugins and where they come from."""
    return {entry.name: entry.value for entry in importlib.metadata.entry_points(group=GROUP)}


def _callbacks(owner: str, plugin: Plugin) -> Iterator[tuple[str, Callback]]:
    for _, method in inspect.getmembers(plugin, inspect.ismethod):
        marks: list[_Mark] = getattr(method.__func__, "__motorcade_hooks__", [])
        for m in marks:
            plain = getattr(plugin, m.plain) if m.plain else None
            yield (
                m.point,
                Callback(method, m.priority, owner, m.topics, m.retained_only, m.timeout, m.takes, plain=plain),
            )


def _configure(name: str, kind: type[Plugin], config: Mapping[str, object]) -> msgspec.Struct:
    try:
        return msgspec.convert(dict(config), kind.Config)
    except msgspec.ValidationError as error:
        raise PluginError(f"configuration of plugin {name!r}: {error}{_hint(kind.Config, str(error))}") from error


def _hint(record: type[msgspec.Struct], problem: str) -> str:
    """Return the allowed values, if the problem is a wrong choice for a field of the record."""
    found = re.search(r"`\$\.(\w+)`$", problem)
    hints = get_type_hints(record) if found else {}
    choices = literal_choices(hints.get(found[1])) if found else ""
    return f"; it must be one of {choices}" if choices else ""


def literal_choices(kind: object) -> str:
    """List the choices of a field of literal values, for people; empty for other types."""
    return ", ".join(repr(choice) for choice in get_args(kind)) if get_origin(kind) is Literal else ""


def _from_entry_point(name: str) -> tuple[type[Plugin], str]:
    found = [entry for entry in importlib.metadata.entry_points(group=GROUP) if entry.name == name]
    if not found:
        names = ", ".join(available()) or "none"
        raise PluginError(f"there is no plugin {name!r}; installed are: {names} (or give a path)")
    try:
        kind = found[0].load()
    except Exception as error:
        raise PluginError(f"plugin {name!r} ({found[0].value}) cannot be imported: {error!r}") from error
    if not (isinstance(kind, type) and issubclass(kind, Plugin)):
        raise PluginError(f"entry point {found[0].value} is not a subclass of motorcade.extension.plugin.Plugin")
    return kind, found[0].value


_numbers = itertools.count()  # a fresh module name per load, so that an edited file is read again


def _from_path(text: str, within: Sequence[str] | None) -> tuple[type[Plugin], str]:
    try:
        path = Path(text).expanduser().resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the path; the home folder of an unknown user
        raise PluginError(f"there is no plugin at {text!r}: {error}") from error
    stem = re.sub(r"\W", "_", path.stem)
    module_name = f"{BY_PATH}{next(_numbers)}_{stem}"
    modules = _trusted(path, text) if within is None else read_plugin(path, within)
    for name, source in modules.items():
        _held.modules[f"{module_name}.{name}" if name else module_name] = source
    if within is not None:
        _held.closed.add(module_name)
    keeping, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # for the modules of a package, see _HeldLoader
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        _forget(module_name)
        raise PluginError(f"plugin at {text} cannot be imported: {error!r}") from error
    finally:
        sys.dont_write_bytecode = keeping
    try:
        return _only_plugin(module, text), str(path)
    except PluginError:
        _forget(module_name)
        raise


def _trusted(path: Path, text: str) -> dict[str, Module]:
    """Return the file, or `__init__.py` of the folder; modules of the folder are found as they are imported."""
    package = path if path.is_dir() else None
    file = path / "__init__.py" if package else path
    if not file.is_file():
        raise PluginError(f"there is no plugin at {text}")
    try:
        return {"": Module(file, file.read_bytes(), package)}
    except OSError as error:
        raise PluginError(f"there is no plugin at {text}: {error.strerror}") from error


class _HeldModules(importlib.abc.MetaPathFinder):
    """Finds the modules of plugins that were loaded by path, as they were read then."""

    def __init__(self) -> None:
        self.modules: dict[str, Module] = {}
        self.closed: set[str] = set()  #: plugins that consist of nothing but what was read

    def find_spec(
        self,
        fullname: str,
        path: object = None,  # noqa: ARG002 - as the import system calls it
        target: object = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a held module, as part of the import system."""
        found = self.modules.get(fullname)
        if found is not None:
            return importlib.util.spec_from_file_location(
                fullname,
                found.file,
                loader=_HeldLoader(fullname, str(found.file), found.source),
                submodule_search_locations=[str(found.package)] if found.package else None,
            )
        if fullname.partition(".")[0] in self.closed:
            raise ModuleNotFoundError(f"{fullname!r} is no .py file that came with the plugin", name=fullname)
        return None


class _HeldLoader(importlib.machinery.SourceFileLoader):
    """Compiles what was read: the cache on disk would miss an edit within the same second."""

    def __init__(self, fullname: str, path: str, source: bytes) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._source, self.get_filename(fullname))


_held = _HeldModules()
sys.meta_path.insert(0, _held)


def _forget(module_name: str) -> None:
    """Take a plugin that was loaded by path, with all its modules, out of the interpreter's tables, and out of ours.

    Installed plugins stay: others may have imported them.
    """
    root = module_name.partition(".")[0]
    if not root.startswith(BY_PATH):
        return
    module = sys.modules.get(root)
    for folder in getattr(module, "__path__", ()):
        sys.path_importer_cache.pop(folder, None)
    tables: tuple[MutableMapping[str, Any], ...] = (sys.modules, _held.modules)
    for table in tables:
        for name in [name for name in table if name == root or name.startswith(f"{root}.")]:
            del table[name]
    _held.closed.discard(root)


def _only_plugin(module: ModuleType, text: str) -> type[Plugin]:
    kinds = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Plugin) and value.__module__.startswith(module.__name__)
    ]
    if len(kinds) != 1:
        raise PluginError(f"{text} must define exactly one subclass of Plugin, it defines {len(kinds)}")
    return kinds[0]


async def _cancel(context: Context) -> None:
    tasks = list(context.tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=PATIENCE)
