"""The configuration of a node: what may be set, where each value came from, and what is wrong with it.

    command line  >  environment MOTORCADE_SECTION__KEY  >  one TOML file  >  default

Each section is a record of the part that uses it, or stands below; there is no other list of options, and
docs/configuration.md is made from the records and their `#:` comments. Each source becomes a tree of plain values, the
trees are laid over each other with the origin of every leaf, and only the result is checked, so that an error can
always name file and line (or variable, or flag) of the value that is wrong.

Rule 1: an unknown key is an error, never ignored. `[plugins.NAME]` is checked by the plugin's own record.
Rule 2: 0 means unlimited (or off) wherever a limit may be lifted.
        Tables by name in it, `[plugins.queues.queue.NAME]`, are checked one by one.
Rule 3: a text value `file://PATH` is replaced by the contents of that file; `config show` shows the reference.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import ipaddress
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin

import msgspec

from motorcade import storage
from motorcade.broker.addressing import MAX_PATTERNS, problem_of
from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.state import BrokerOptions
from motorcade.core.errors import ConfigError, MotorcadeError
from motorcade.core.redaction import HEADERS, HIDDEN, is_secret, without_secrets
from motorcade.core.words import nearest
from motorcade.dispatch.options import DispatchOptions
from motorcade.extension.declared import Name, check_name, plain
from motorcade.extension.plugin import GROUP, literal_choices

Count = Annotated[int, msgspec.Meta(ge=0)]
Bind = str | tuple[str, ...]

OFF: Final = "off"


class TcpOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Plain MQTT over TCP."""

    bind: Bind = "127.0.0.1:1883"  #: `HOST:PORT`, `[IPV6]:PORT`, `*:PORT`, a list of these, or `off`
    max_connections: Count = 0  #: clients on this listener at once; 0: only `limits.max_connections` counts


class TlsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """MQTT over TLS 1.2 or newer."""

    bind: Bind = OFF  #: as for tcp; by convention port 8883
    certificate: str = ""  #: file with the server's certificate chain, PEM
    key: str = ""  #: file with the private key, PEM
    ca: str = ""  #: file with the authorities that client certificates must come from, PEM
    crl: str = (
        ""  #: file with revocation lists of these authorities, PEM (or they stand in `ca`); see access-control.md
    )
    require_client_certificate: bool = False  #: refuse clients without a certificate (needs `ca`)
    max_connections: Count = 0  #: clients on this listener at once; 0: only `limits.max_connections` counts


class WsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """MQTT over WebSocket."""

    bind: Bind = "127.0.0.1:8083"  #: as for tcp
    path: str = "/mqtt"  #: the only path that is answered
    origins: tuple[str, ...] = ()  #: `Origin`s of pages that are let in, `*`: all; empty: those of the same host
    max_connections: Count = 0  #: clients on this listener at once; 0: only `limits.max_connections` counts


class WssOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """MQTT over WebSocket over TLS."""

    bind: Bind = OFF  #: as for tcp; by convention port 8084
    path: str = "/mqtt"  #: the only path that is answered
    origins: tuple[str, ...] = ()  #: `Origin`s of pages that are let in, `*`: all; empty: those of the same host
    certificate: str = ""  #: file with the server's certificate chain, PEM
    key: str = ""  #: file with the private key, PEM
    ca: str = ""  #: file with the authorities that client certificates must come from, PEM
    crl: str = (
        ""  #: file with revocation lists of these authorities, PEM (or they stand in `ca`); see access-control.md
    )
    require_client_certificate: bool = False  #: refuse clients without a certificate (needs `ca`)
    max_connections: Count = 0  #: clients on this listener at once; 0: only `limits.max_connections` counts


class ListenersOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The listeners for clients."""

    tcp: TcpOptions = TcpOptions()
    tls: TlsOptions = TlsOptions()
    ws: WsOptions = WsOptions()
    wss: WssOptions = WssOptions()


class HttpOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Control port: `/api/v1`, `/metrics`, `/healthz`, `/readyz`."""

    bind: Bind = "127.0.0.1:18083"  #: as for listeners
    token: str = (
        ""  #: bearer token callers must show; empty: one is made in `data.dir`/token, and only loopback is bound
    )
    require_token: bool = True  #: false: on loopback, every process of the machine is the administrator
    plugin_paths: str | tuple[str, ...] = ()  #: folder or folders that plugins may be loaded from by path; empty: none


class LogOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Log on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"  #: least severe event that is written
    format: Literal["auto", "console", "json"] = "auto"  #: auto: console on a terminal, else one JSON object per line


class DataOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Files of the node."""

    dir: str = "./motorcade-data"  #: folder for all that the node writes; for its own user only, made when first needed


class StoreOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The store for what must outlive a connection."""

    url: str = "rocksdb://"  #: `rocksdb://[DIR]`, `redis://HOST:PORT`, `redis+cluster://HOST:PORT` or `memory://`
    durability: Literal["fast", "safe", "strict"] = "safe"  #: what an acknowledged write survives: docs/durability.md
    sweep_interval: float = 10.0  #: seconds between two rounds of removing what has expired
    sweep_budget: Count = 500  #: items removed in one step; others come between two steps; 0: this node removes nothing
    cache_bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = 128 << 20  #: rocksdb: blocks of its files kept in memory


class ClusterOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Several nodes on one store, as one broker. `motorcade serve --nodes N` sets what its nodes need by itself."""

    bind: str = ""  #: `HOST:PORT` on which other nodes reach this one; empty: a node by itself
    advertise: str = ""  #: `HOST:PORT` that the others are told, if that is not `bind`; needed with `*:PORT`
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = "motorcade"  #: of the cluster, alike on all nodes
    secret_file: str = ""  #: file with a secret that all nodes know, 16 bytes or more; not needed on loopback
    certificate: str = ""  #: file with the certificate chain of this node, PEM: links speak TLS
    key: str = ""  #: file with its private key, PEM
    ca: str = ""  #: file with the authorities that certificates of the others must come from, PEM: mutual TLS
    plain: bool = False  #: true: links leave this machine and private networks without TLS
    #: seconds that a publisher is held up for a node that does not confirm what it was sent
    patience: Annotated[float, msgspec.Meta(gt=0, le=60)] = 0.5
    lease: Annotated[float, msgspec.Meta(ge=0.5, le=600)] = 3.0  #: seconds of silence after which a node counts as dead
    #: seconds for which a node may rely on what it knows of the others; more than `lease` + 1
    view_lease: Annotated[float, msgspec.Meta(gt=1.5, le=1200)] = 5.0
    #: filters of durable sessions that name their own client and need no route: `agent/{client}/#`; alike on all nodes
    addressed: tuple[str, ...] = ()
    #: clients per second that a node sends away when it is drained; more if stopping leaves less time
    drain_rate: Annotated[float, msgspec.Meta(ge=0.1, le=1_000_000)] = 500.0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything. One attribute per section of the file."""

    broker: BrokerOptions = BrokerOptions()
    listeners: ListenersOptions = ListenersOptions()
    http: HttpOptions = HttpOptions()
    session: SessionOptions = SessionOptions()
    limits: Limits = Limits()
    plugins: dict[str, dict[str, Any]] = {}
    log: LogOptions = LogOptions()
    data: DataOptions = DataOptions()
    store: StoreOptions = StoreOptions()
    cluster: ClusterOptions = ClusterOptions()
    dispatch: DispatchOptions = DispatchOptions()


#: Keys that have a flag of `motorcade serve`.
FLAGS: Final[Mapping[str, str]] = {
    "listeners.tcp.bind": "--mqtt",
    "listeners.ws.bind": "--ws",
    "http.bind": "--http",
    "data.dir": "--data",
    "store.url": "--store",
    "broker.node": "--node",
    "log.level": "--log-level",
    "log.format": "--log-format",
}

PREFIX: Final = "MOTORCADE_"
DEFAULT: Final = "default"

#: On unless `[plugins.NAME] enabled = false`.
DEFAULT_PLUGINS: Final = ("retained", "queues", "streams", "capture", "fanout", "ecq", "systopics")
#: Loaded before all others, because a client must not slip in before its access can be checked.
FIRST_PLUGIN: Final = "access"

Path_ = tuple[str, ...]


class ListenAddress(NamedTuple):
    """The address of a listener. An empty host is every interface; port 0 lets the system choose."""

    host: str
    port: int


class PluginSetting(NamedTuple):
    """One plugin that should run."""

    name: str
    path: str | None  #: None: found by entry point
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Value:
    """A leaf of a tree before it is checked."""

    value: Any
    origin: str
    text: str | None = None  #: an environment variable as written, in case a plain string is wanted
    reference: str | None = None  #: `file://…` that the value was read from
    sections: Mapping[Path_, str] = field(default_factory=dict)  #: where the sections of its file begin


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid configuration and where it came from."""

    config: Config
    path: Path | None
    leaves: dict[Path_, _Value] = field(repr=False)
    _environ: Mapping[str, str] = field(repr=False)
    overrides: Mapping[str, object] = field(repr=False)  #: from the command line

    def origin(self, key: str) -> str:
        """Return the origin of the value of `session.window`: default, file, environment or command line."""
        wanted = tuple(key.split("."))
        if wanted in self.leaves:
            return self.leaves[wanted].origin
        below = {leaf.origin for path, leaf in self.leaves.items() if path[: len(wanted)] == wanted}
        return ", ".join(sorted(below)) or DEFAULT

    def entries(self) -> Iterator[tuple[str, object, str]]:
        """Yield every key with its value and origin, secrets hidden."""
        for path, value in _flatten(msgspec.to_builtins(self.config), ()):
            leaf = self.leaves.get(path)
            shown = leaf.reference if leaf is not None and leaf.reference else _hide(path, value)
            yield _dotted(path), shown, leaf.origin if leaf is not None else DEFAULT

    def again(self) -> LoadedConfig:
        """Read the same file once more, with the same environment and command line; plugins' tables are checked too."""
        loaded = load(self.path, self._environ, self.overrides)
        check_plugins(loaded)
        return loaded


def load(path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, object]) -> LoadedConfig:
    """Read, merge and check. `overrides` are dotted keys from the command line. Raises `ConfigError`."""
    leaves: dict[Path_, _Value] = {}
    for layer in (_from_file(path), _from_environment(environ), _from_command_line(overrides)):
        _lay_over(leaves, layer)
    _resolve_references(leaves)
    checked = _check_section(Config, (), leaves)
    config = msgspec.convert(checked, Config)
    for key, problem in _contradictions(config):
        raise ConfigError(f"{_where(leaves, key)}: {_dotted(key)}: {problem}")
    return LoadedConfig(config, path, leaves, dict(environ), dict(overrides))


# --- questions the node asks about a configuration --------------------------------------------------------------------


def addresses(bind: Bind) -> list[ListenAddress]:
    """Return the addresses in `bind`; none for `off`. Raises `ConfigError`."""
    texts = (bind,) if isinstance(bind, str) else bind
    return [parse_address(text) for text in texts if text != OFF]


def parse_address(text: str) -> ListenAddress:
    """Parse `HOST:PORT`, `[IPV6]:PORT` or `*:PORT`."""
    match = re.fullmatch(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]]*)):(?P<port>\d{1,5})", text.strip())
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(f"{text!r} is not an address; write HOST:PORT, [IPV6]:PORT, *:PORT or off")
    host = match["v6"] or match["host"]
    return ListenAddress("" if host == "*" else host, int(match["port"]))


def plugins_to_load(config: Config) -> list[PluginSetting]:
    """Return the plugins of this configuration in loading order: access, the built-in ones, then as in the file."""
    names = [name for name in (FIRST_PLUGIN,) if name in config.plugins]
    names += [name for name in (*DEFAULT_PLUGINS, *config.plugins) if name not in names]
    settings = []
    for name in dict.fromkeys(names):
        table = dict(config.plugins.get(name, {}))
        path = table.pop("path", None)
        if table.pop("enabled", True):
            settings.append(PluginSetting(name, path, table))
    return settings


def check_plugins(loaded: LoadedConfig) -> None:
    """Check the tables of installed plugins against their own records, so that errors name the line.

    A plugin with a `path` is not imported here: looking at a configuration must not run the plugin's code.
    """
    installed = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    for name, path, table in plugins_to_load(loaded.config):
        if path is not None:
            continue
        section = ("plugins", name)
        if name not in installed:
            problem = f"there is no plugin {name!r}{nearest(name, installed)}; one that is not installed needs a `path`"
            raise ConfigError(f"{_where(loaded.leaves, section)}: {problem}")
        try:
            record = installed[name].load().Config
        except Exception as error:
            raise ConfigError(f"plugin {name!r} ({installed[name].value}) cannot be imported: {error!r}") from error
        own = {
            key: leaf for key, leaf in loaded.leaves.items() if key[:2] == section and len(key) > 2 and key[2] in table
        }
        _whole(record, _check_section(record, section, own), section, loaded.leaves)


def differences(old: Config, new: Config) -> list[str]:
    """Return the dotted keys whose values differ."""
    before = dict(_flatten(msgspec.to_builtins(old), ()))
    after = dict(_flatten(msgspec.to_builtins(new), ()))
    return sorted(_dotted(key) for key in before.keys() | after.keys() if before.get(key) != after.get(key))


# --- the three sources ------------------------------------------------------------------------------------------------


def _from_file(path: Path | None) -> dict[Path_, _Value]:
    if path is None:
        return {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        raise ConfigError(f"file {path}{':' + line[1] if line else ''}: not valid TOML: {error}") from error
    lines = _key_lines(text)
    places = {key: f"file {path}:{line}" for key, line in lines.items()}
    return {
        key: _Value(value, f"file {path}:{_line_of(key, lines)}", sections=places) for key, value in _flatten(tree, ())
    }


def _from_environment(environ: Mapping[str, str]) -> dict[Path_, _Value]:
    """Read variables `MOTORCADE_A__B__C`. `MOTORCADE_CONFIG` and the like have no `__`, so they are no keys."""
    leaves: dict[Path_, _Value] = {}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or "__" not in name:
            continue
        key = tuple(name.removeprefix(PREFIX).lower().split("__"))
        if not all(key):
            raise ConfigError(f"environment {name}: an empty part; write {PREFIX}SECTION__KEY")
        value = _parse_value(environ[name])
        for path, leaf in _flatten(value, key):
            leaves[path] = _Value(leaf, f"environment {name}", environ[name] if path == key else None)
    return leaves


def _parse_value(text: str) -> object:
    """Return the text as a TOML value if it is one, else the text itself."""
    try:
        tree = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return tree["value"] if tree.keys() == {"value"} else text


def _from_command_line(overrides: Mapping[str, object]) -> dict[Path_, _Value]:
    leaves = {}
    for key, value in overrides.items():
        leaves[tuple(key.split("."))] = _Value(value, f"command line {FLAGS.get(key, key)}")
    return leaves


def _lay_over(leaves: dict[Path_, _Value], layer: dict[Path_, _Value]) -> None:
    """Lay a layer over others: later wins, leaf by leaf; a value also replaces a table of its name, and vice versa."""
    for key in layer:
        for other in [o for o in leaves if o[: len(key)] == key or key[: len(o)] == o]:
            if other not in layer:
                del leaves[other]
    leaves.update(layer)


def _resolve_references(leaves: dict[Path_, _Value]) -> None:
    for key, leaf in leaves.items():
        if not (isinstance(leaf.value, str) and leaf.value.startswith("file://")):
            continue
        try:
            value = Path(leaf.value.removeprefix("file://")).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{leaf.origin}: {_dotted(key)}: cannot read {leaf.value}: {error}") from error
        leaves[key] = replace(leaf, value=value, reference=leaf.value)


def _flatten(tree: object, prefix: Path_) -> Iterator[tuple[Path_, object]]:
    if not isinstance(tree, dict) or (not tree and prefix):
        yield prefix, tree
        return
    for key, value in tree.items():
        yield from _flatten(value, (*prefix, key))


# --- checking ---------------------------------------------------------------------------------------------------------


def _check_section(record: type[msgspec.Struct], section: Path_, leaves: Mapping[Path_, _Value]) -> dict[str, Any]:
    """Return the tree below `section`, checked against a record; `ConfigError` names the first wrong key."""
    fields = {info.encode_name: info.type for info in msgspec.structs.fields(record)}
    depth = len(section)
    result: dict[str, Any] = {}
    for key, leaf in leaves.items():
        if key[:depth] != section:
            continue
        if len(key) == depth:
            if leaf.value != {}:
                raise ConfigError(f"{leaf.origin}: [{_dotted(section)}] is a section; write keys below it")
            continue
        name = key[depth]
        if name not in fields:
            unknown = key[: depth + 1]
            raise ConfigError(f"{_where(leaves, unknown)}: unknown key {_dotted(unknown)!r}{nearest(name, fields)}")
        if name in result:
            continue
        kind = fields[name]
        inner = (*section, name)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            result[name] = _whole(kind, _check_section(kind, inner, leaves), inner, leaves)
        elif (named := _named_tables(kind)) is not None:
            result[name] = _check_tables(named, inner, leaves)
        elif inner == ("plugins",):
            result[name] = _plugin_tables(leaves)
        elif inner in leaves:
            result[name] = _convert(leaf, kind, inner)
        else:
            result[name] = _convert(_Value(_tree(inner, leaves), leaf.origin), kind, inner)
    return result


class _NamedTables(NamedTuple):
    """`dict[Name, Record]`: tables by name."""

    key: object
    record: type[msgspec.Struct]


def _named_tables(kind: object) -> _NamedTables | None:
    if get_origin(kind) is not dict:
        return None
    key, value = get_args(kind)
    return _NamedTables(key, value) if isinstance(value, type) and issubclass(value, msgspec.Struct) else None


def _check_tables(named: _NamedTables, section: Path_, leaves: Mapping[Path_, _Value]) -> dict[str, Any]:
    """Return the tables below `section`, each checked for itself."""
    depth = len(section)
    result: dict[str, Any] = {}
    for key, leaf in leaves.items():
        if key[:depth] != section:
            continue
        if len(key) <= depth + 1 and leaf.value != {}:
            wanted = _dotted((*section, *(key[depth:] or ("NAME",))))
            raise ConfigError(f"{leaf.origin}: {_dotted(key)} must be a section [{wanted}]")
        if len(key) == depth or key[depth] in result:
            continue
        name, inner = key[depth], key[: depth + 1]
        _check_key(named.key, name, _where(leaves, inner), section)
        result[name] = _whole(named.record, _check_section(named.record, inner, leaves), inner, leaves)
    return result


def _check_key(kind: object, name: str, origin: str, section: Path_) -> None:
    try:
        if kind == Name:
            check_name(section[-1], name)  # says in words what the pattern says
        else:
            msgspec.convert(name, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {_dotted((*section, name))}: {plain(error)}") from error
    except MotorcadeError as error:
        raise ConfigError(f"{origin}: {error}") from error


def _whole(
    record: type[msgspec.Struct], checked: dict[str, Any], section: Path_, leaves: Mapping[Path_, _Value]
) -> dict[str, Any]:
    """Return values that are right one by one; check that all that must be there are, and that they go together.

    Records say what is wrong as `KEY: problem` or, of a named table in them, `NOUN 'NAME': KEY: problem`; both tell
    the line.
    """
    try:
        msgspec.convert(checked, record)
    except (msgspec.ValidationError, MotorcadeError) as error:
        place, problem = _taken_apart(plain(error), record, checked)
        place = (*section, *place)
        key, found, rest = problem.partition(": ")
        if found and any(path[: len(place) + 1] == (*place, key) for path in leaves):
            raise ConfigError(f"{_where(leaves, (*place, key))}: {_dotted((*place, key))}: {rest}") from error
        raise ConfigError(f"{_where(leaves, place)}: [{_dotted(place)}]: {problem}") from error
    return checked


def _taken_apart(problem: str, record: type[msgspec.Struct], checked: Mapping[str, Any]) -> tuple[Path_, str]:
    """Return the named table that a problem is about, if there is one, and the rest of the words."""
    table = re.match(r"\w+ '([^']+)': (.*)", problem)
    for info in msgspec.structs.fields(record):
        if table and _named_tables(info.type) and table[1] in checked.get(info.encode_name, {}):
            return (info.encode_name, table[1]), table[2]
    return (), problem


def _plugin_tables(leaves: Mapping[Path_, _Value]) -> dict[str, Any]:
    tree = _tree(("plugins",), leaves)
    for key, leaf in leaves.items():
        if key[0] != "plugins":
            continue
        if len(key) == 2 and leaf.value != {}:
            raise ConfigError(f"{leaf.origin}: plugins.{key[1]} must be a section [plugins.{key[1]}]")
        if key[2:] == ("enabled",):
            _convert(leaf, bool, key)
        elif key[2:] == ("path",):
            _convert(leaf, str, key)
    return tree


def _tree(section: Path_, leaves: Mapping[Path_, _Value]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, leaf in leaves.items():
        if key[: len(section)] != section or len(key) == len(section):
            continue
        node = tree
        for part in key[len(section) : -1]:
            node = node.setdefault(part, {})
        node[key[-1]] = leaf.value
    return tree


def _convert(leaf: _Value, kind: object, key: Path_) -> object:
    try:
        return msgspec.to_builtins(msgspec.convert(leaf.value, kind))
    except msgspec.ValidationError as error:
        if leaf.text is not None and leaf.value != leaf.text:
            try:  # MOTORCADE_BROKER__NODE=7 means the text 7
                return msgspec.to_builtins(msgspec.convert(leaf.text, kind))
            except msgspec.ValidationError:
                pass
        shown = repr(_hide(key, leaf.value))
        choices = literal_choices(kind)
        problem = f"must be one of {choices}" if choices else plain(error)
        raise ConfigError(f"{leaf.origin}: {_dotted(key)} = {shown}: {problem}") from error


def _where(leaves: Mapping[Path_, _Value], key: Path_) -> str:
    """Return the origin of a value, or of a section: the line of its header, if it has one."""
    for path, leaf in leaves.items():
        if path[: len(key)] == key:
            return leaf.sections.get(key, leaf.origin)
    return DEFAULT


#: Smallest and largest sensible value, where that is not 0 and unlimited.
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "broker.server_keep_alive": (0, 65535),
    "session.window": (1, 65535),
    "session.queue": (1, math.inf),
    "session.max_awaiting_rel": (1, 65535),
    "limits.max_packet_size": (1, 268_435_460),
    "limits.max_connect_size": (1, 268_435_460),
    "limits.max_client_id": (1, 65535),
    "limits.max_topic_alias": (0, 65535),
    "limits.max_topic_alias_out": (0, 65535),
    "limits.max_keep_alive": (0, 65535),
    "limits.keep_alive_factor": (1, math.inf),
}
SHARED_STRATEGIES: Final = ("round_robin", "random", "sticky", "hash_topic", "hash_client", "least_inflight")


def _out_of_range(config: Config) -> Iterator[tuple[Path_, str]]:
    for section in ("broker", "session", "limits"):
        for name, value in msgspec.structs.asdict(getattr(config, section)).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            least, most = _RANGES.get(f"{section}.{name}", (0, math.inf))
            if not least <= value <= most:
                bounds = f"at least {least}" if most == math.inf else f"between {least} and {most}"
                yield (section, name), f"{value} must be {bounds}"
    strategy = config.session.shared_strategy
    if strategy not in SHARED_STRATEGIES:
        yield ("session", "shared_strategy"), f"unknown strategy {strategy!r}{nearest(strategy, SHARED_STRATEGIES)}"


def _contradictions(config: Config) -> Iterator[tuple[Path_, str]]:
    """Yield values that have the right type and still make no sense."""
    yield from _out_of_range(config)
    listeners = config.listeners
    for name, bind in (
        *((("listeners", n, "bind"), getattr(listeners, n).bind) for n in ("tcp", "tls", "ws", "wss")),
        (("http", "bind"), config.http.bind),
    ):
        try:
            addresses(bind)
        except ConfigError as error:
            yield name, str(error)
        else:
            if name == ("http", "bind") and not _guarded(config.http) and not all(map(_is_loopback, addresses(bind))):
                yield (
                    name,
                    f"{bind!r} can be reached from outside: set http.token (and require it), or bind it to loopback",
                )
    for name_, secure in (("tls", listeners.tls), ("wss", listeners.wss)):
        if not addresses(secure.bind):
            continue
        for needed in ("certificate", "key") + (("ca",) if secure.require_client_certificate else ()):
            if not getattr(secure, needed):
                yield ("listeners", name_), f"needs {needed!r} (a PEM file) to listen on {secure.bind}"
        if secure.crl and not secure.ca:
            yield ("listeners", name_, "crl"), "needs 'ca': a revocation list is one of the authorities in it"
    for name_ in ("ws", "wss"):
        if not getattr(listeners, name_).path.startswith("/"):
            yield ("listeners", name_, "path"), "must begin with /"
    for name_ in ("allow", "deny"):
        for network in getattr(config.limits, name_):
            try:
                ipaddress.ip_network(network, strict=False)
            except ValueError as error:
                yield ("limits", name_), f"{error}; write networks like 10.0.0.0/8 or fd00::/8"
    if config.limits.write_low > config.limits.write_high:
        yield ("limits", "write_low"), f"must not be above limits.write_high ({config.limits.write_high})"
    if not storage.names_store(config.store.url):
        yield ("store", "url"), f"{config.store.url!r} does not name a store; it should be one of {storage.FORMS}"
    yield from _cluster_contradictions(config.cluster)


def _cluster_contradictions(cluster: ClusterOptions) -> Iterator[tuple[Path_, str]]:
    for name, text in (("bind", cluster.bind), ("advertise", cluster.advertise)):
        try:
            address = parse_address(text) if text else None
        except ConfigError:
            yield ("cluster", name), f"{text!r} is not an address; write HOST:PORT or [IPV6]:PORT"
        else:
            if address is not None and name == "advertise" and not (address.host and address.port):
                yield ("cluster", name), f"{text!r} does not say where others reach this node; write HOST:PORT"
            if address is not None and name == "bind":
                yield from _open_links(cluster, address)
    if bool(cluster.certificate) != bool(cluster.key):
        yield ("cluster", "certificate" if cluster.certificate else "key"), "a certificate and its key go together"
    if cluster.ca and not cluster.certificate:
        yield ("cluster", "ca"), "a node that asks others for a certificate needs one itself: set certificate and key"
    if len(cluster.addressed) > MAX_PATTERNS:
        yield ("cluster", "addressed"), f"there may be {MAX_PATTERNS} patterns, not {len(cluster.addressed)}"
    for pattern in cluster.addressed:
        if problem := problem_of(pattern):
            yield ("cluster", "addressed"), problem
    if not cluster.view_lease > cluster.lease + 1:
        yield (
            ("cluster", "view_lease"),
            (
                f"{cluster.view_lease:g} must be more than cluster.lease + 1, which is {cluster.lease + 1:g}: before a "
                "view ends, a node that has died is known to be dead"
            ),
        )


def _open_links(cluster: ClusterOptions, bind: ListenAddress) -> Iterator[tuple[Path_, str]]:
    """Find what is wrong with links that other machines can reach."""
    key = ("cluster", "bind")
    if not bind.host and not cluster.advertise:
        yield key, f"{cluster.bind!r} is every interface: say in cluster.advertise where others reach it"
    if _is_loopback(bind):
        return
    if not cluster.secret_file and not cluster.ca:
        yield (
            key,
            f"{cluster.bind!r} can be reached from outside: set cluster.secret_file, or certificates with cluster.ca",
        )
    try:
        private = ipaddress.ip_address(bind.host).is_private
    except ValueError:  # every interface, or a name: where that leads is seen when it is listened on
        private = bool(bind.host)
    if not private and not cluster.certificate and not cluster.plain:
        yield (
            key,
            (
                f"{cluster.bind!r} may be reached over networks that are not private: set cluster.certificate and key, "
                "or cluster.plain = true if links need no TLS there"
            ),
        )


def _guarded(http: HttpOptions) -> bool:
    """Return True if the port may be reached from other machines."""
    return bool(http.token) and http.require_token


def _is_loopback(address: ListenAddress) -> bool:
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return address.host == "localhost"


def _hide(path: Path_, value: object) -> object:
    """Return a value as it may be shown: nothing below a name that sounds like a secret, no passwords in URLs."""
    if isinstance(value, dict):
        return {key: _hide((*path, key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(path, inner) for inner in value]
    named = path[2:] if path[0] == "plugins" else path
    if any(is_secret(part) for part in named) or HEADERS in [part.lower() for part in path[:-1]]:
        return value if isinstance(value, bool) or value in ("", None) else HIDDEN
    return without_secrets(value) if isinstance(value, str) else value


# --- lines of a TOML file ---------------------------------------------------------------------------------------------

_KEY_PART = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_KEY = rf"{_KEY_PART}(?:\s*\.\s*{_KEY_PART})*"
_HEADER = re.compile(rf"\s*\[\[?\s*({_KEY})\s*\]\]?")
_ASSIGNMENT = re.compile(rf"\s*({_KEY})\s*=")
_MULTILINE = re.compile(r'"""|\'\'\'')


def _key_lines(text: str) -> dict[Path_, int]:
    """Find the line (from 1) of every section header and key by reading the text; tomllib keeps no positions."""
    lines: dict[Path_, int] = {}
    section: Path_ = ()
    inside: str | None = None  # the quotes of a string that goes on over lines
    for number, line in enumerate(text.splitlines(), 1):
        if inside is None:
            if header := _HEADER.match(line):
                section = _split_key(header[1])
                lines.setdefault(section, number)
            elif assignment := _ASSIGNMENT.match(line):
                lines.setdefault(section + _split_key(assignment[1]), number)
        for quotes in _MULTILINE.findall(line):
            if inside is None:
                inside = quotes
            elif inside == quotes:
                inside = None
    return lines


def _split_key(text: str) -> Path_:
    return tuple(part.strip("\"'") for part in re.findall(_KEY_PART, text))


def _dotted(key: Path_) -> str:
    """Return a key as TOML writes it: a part that is not bare stands in quotes."""
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else json.dumps(part) for part in key)


def _line_of(key: Path_, lines: Mapping[Path_, int]) -> int:
    """Return the line of the key, or of the inline table or section that it stands in."""
    for end in range(len(key), 0, -1):
        if key[:end] in lines:
            return lines[key[:end]]
    return 1


# --- reference --------------------------------------------------------------------------------------------------------


def reference() -> str:
    """Return the page docs/configuration.md: every section, key, type, default and comment."""
    parts = [_REFERENCE_HEAD]
    for section, record in _sections(Config, ()):
        parts += _described(section, record)
    parts.append(_PLUGINS_HEAD)
    for section, record in _plugin_sections():
        parts += _described(section, record)
    parts.append(_REFERENCE_TAIL)
    return "\n".join(parts)


def _described(section: Path_, record: type[msgspec.Struct]) -> Iterator[str]:
    yield f"## `[{'.'.join(section)}]`\n\n{inspect.getdoc(record)}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    comments = _comments(record)
    for info in msgspec.structs.fields(record):
        name = info.encode_name
        kind, default = _type_name(info.type), f"`{toml(info.default)}`"
        if _named_tables(info.type) is not None:
            name, kind, default = f"{name}.NAME", "section", "none"
        elif info.required:
            default = "must be given"
        yield f"| `{name}` | {kind} | {default} | {comments[info.name]} |"
    yield ""


def _plugin_sections() -> Iterator[tuple[Path_, type[msgspec.Struct]]]:
    """Yield the sections of plugins that are always there; those of named tables follow their section."""
    installed = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    for plugin in DEFAULT_PLUGINS:
        record: type[msgspec.Struct] = installed[plugin].load().Config
        yield ("plugins", plugin), record
        for info in msgspec.structs.fields(record):
            if (named := _named_tables(info.type)) is not None:
                yield ("plugins", plugin, info.encode_name, "NAME"), named.record


def _sections(record: type[msgspec.Struct], prefix: Path_) -> Iterator[tuple[Path_, type[msgspec.Struct]]]:
    for info in msgspec.structs.fields(record):
        if not (isinstance(info.type, type) and issubclass(info.type, msgspec.Struct)):
            continue
        inner = (*prefix, info.name)
        below = list(_sections(info.type, inner))
        yield from below or [(inner, info.type)]


def _comments(record: type[msgspec.Struct]) -> dict[str, str]:
    """Return the `#:` comment of each field: at the end of its line, on the lines before, or within its parentheses."""
    comments: dict[str, str] = {}
    before: list[str] = []
    opened = ""  # the field whose default goes on over lines
    for line in inspect.getsource(record).splitlines():
        code, _, comment = line.partition("#:")
        if match := re.match(r"    (\w+):", code):
            comments[match[1]] = comment.strip() or " ".join(before)
            opened = match[1] if code.rstrip().endswith("(") else ""
        elif opened and comment:
            comments[opened], opened = comment.strip(), ""
        before = [*before, comment.strip()] if not code.strip() else []
    return comments


_TYPES: Final[Mapping[object, str]] = {str: "text", bool: "true or false", int: "integer", float: "number"}
_BOUNDS: Final = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def _type_name(kind: object) -> str:
    if kind == Bind:
        return "address or list"
    if kind in _TYPES:
        return _TYPES[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        metas = [meta for meta in args[1:] if isinstance(meta, msgspec.Meta)]
        bounds = [
            f"{sign} {getattr(meta, bound)}"
            for meta in metas
            for bound, sign in _BOUNDS
            if getattr(meta, bound) is not None
        ]
        return " ".join([_type_name(args[0]), ", ".join(bounds)]).strip()
    if origin in (tuple, list):
        return f"list of {_type_name(args[0])}"
    return ", ".join(f"`{choice}`" for choice in args)  # of Literal


def toml(value: object) -> str:
    """Return a value as TOML writes it."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False)  # TOML's basic strings escape as JSON does
        case list() | tuple():
            return f"[{', '.join(map(toml, value))}]"
        case dict():
            return "{" + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
        case _:
            return str(value)


_REFERENCE_HEAD = """\
# Configuration

<!-- Made by `motorcade config reference`; a test keeps it in step with src/motorcade/config.py. -->

One TOML file, given by `motorcade serve --config FILE` or the variable `MOTORCADE_CONFIG`. Every key can also be set by
an environment variable, `MOTORCADE_SECTION__KEY`: `MOTORCADE_SESSION__WINDOW=64`,
`MOTORCADE_LISTENERS__TCP__BIND='["127.0.0.1:1883", "[::1]:1883"]'`. The value is read as TOML if it is TOML, else as
text. The command line is stronger than the environment, the environment than the file, the file than the default.

- An unknown key or a value of the wrong type is an error that names file, line and key.
- 0 means unlimited (or off) wherever the table says so.
- A text value `file://PATH` is replaced by the contents of that file (without its last line break): for secrets.
- `motorcade config check` says whether a file is good; `motorcade config show --origin` shows what is in force and why.
- Without a file the node listens on loopback only.
"""

_LOADED = " and ".join([", ".join(f"`{name}`" for name in DEFAULT_PLUGINS[:-1]), f"`{DEFAULT_PLUGINS[-1]}`"])
_PLUGINS_HEAD = f"""\
## `[plugins.NAME]`

One section per plugin; its keys are the plugin's own, and the plugin checks them. Two keys work for all of them:

| key | type | default | meaning |
|---|---|---|---|
| `enabled` | true or false | `true` | false: the plugin is not loaded |
| `path` | text | none | load the plugin from this `.py` file or package folder instead of an installed package |

{_LOADED} are loaded unless `enabled = false`; every other plugin is loaded when its section is there.
`access`, which has [a page of its own](access-control.md), is always loaded first.

What has a name of its own is a section of its own: `[plugins.queues.queue.orders]` declares the queue `orders`. A
reload applies what has changed.
"""

_REFERENCE_TAIL = (
    """\
## Flags of `motorcade serve`

| flag | key |
|---|---|
"""
    + "\n".join(f"| `{flag}` | `{key}` |" for key, flag in FLAGS.items())
    + "\n"
)
