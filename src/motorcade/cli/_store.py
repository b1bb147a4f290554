"""The store that a command means: the named one, that of the running node, or the one `serve` would find."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from motorcade.cli import _control
from motorcade.cli.serve import ConfigFile
from motorcade.core.redaction import without_secrets

PRIVATE = "valkey://"  #: `valkey://DIR` is the private store of `serve --nodes` in that folder


@dataclass(frozen=True)
class StoreFlags:
    """The options that choose a store."""

    store: Annotated[
        str | None, typer.Option("--store", metavar="URL", help="The store. \\[as `motorcade serve` finds it]")
    ] = None
    config: ConfigFile = None
    data: Annotated[str | None, typer.Option("--data", metavar="DIR", help="Where the node keeps files.")] = None

    def find(self) -> StoreLocation:
        """Find the store without asking a node."""
        return find_store(self, None, None, ask=False, told=False)


@dataclass(frozen=True)
class NodeStoreFlags(StoreFlags):
    """The options that choose a store, and the node that may have it."""

    http: Annotated[
        str | None,
        typer.Option(
            "--http", metavar="HOST:PORT", envvar="MOTORCADE_HTTP", help="Control port of the node that has it open."
        ),
    ] = None
    token: _control.Token = None
    as_json: _control.AsJson = False

    def find(self, *, ask: bool = True) -> StoreLocation:
        """Find the store; `ask`: also by asking the node."""
        return find_store(self, self.http, self.token, ask=ask, told=not self.as_json)


@dataclass(frozen=True)
class StoreLocation:
    """The store that is meant, and the node that may have it."""

    url: str
    path: Path | None  #: of an embedded store
    durability: str
    http: str
    token: str | None
    private: Path | None = None  #: folder of the Valkey of `serve --nodes`, which may run or not

    @property
    def shown(self) -> str:
        """The URL without the password of its server."""
        if self.path is not None:
            return f"rocksdb://{self.path}"
        if self.private is not None:
            return f"{PRIVATE}{self.private}"
        scheme, _, rest = without_secrets(self.url).partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"


def find_store(
    given: StoreFlags, http: str | None, token: str | None, *, ask: bool = True, told: bool = True
) -> StoreLocation:
    """Return the store that is named; else that of the running node (`ask`); else the one `serve` would find.

    `told`: say on standard error which one it is, unless it was named itself.
    """
    from motorcade import config as configuration
    from motorcade import log
    from motorcade.http.token import find_token
    from motorcade.private_files import read_private
    from motorcade.storage import has_private_store, placed, private_store

    store = given.store
    private: Path | None = None
    if store is not None and store.startswith(PRIVATE):
        private, store = Path(store.removeprefix(PRIVATE)), None
    flags = {"store.url": store, "data.dir": given.data}
    named = next((f"--{name}" for name in ("store", "data", "config") if getattr(given, name)), "")
    named = named or next((name for name in ("MOTORCADE_STORE__URL", "MOTORCADE_DATA__DIR") if name in os.environ), "")
    found = configuration.load(
        given.config, os.environ, {key: value for key, value in flags.items() if value is not None}
    ).config
    log.configure("warning", found.log.format)
    url = placed(found.store.url, Path(found.data.dir))
    if http is None:
        address = next(iter(configuration.addresses(found.http.bind)), None)
        http = f"{address.host}:{address.port}" if address is not None else _control.DEFAULT
    token = token or found.http.token or find_token(http, os.environ, [Path(found.data.dir)]) or None
    why = f"as {named} says" if named else "no other is named"
    if ask and not named:
        running = _store_of_node(http, token)
        if running is None:
            why = f"no node answers at http://{http}"
        else:
            url, why = running
    if url == "memory://":
        raise _control.ControlError(
            "memory:// keeps nothing that outlives its node; name another store with --store URL or --config FILE"
        )
    data = Path(found.data.dir)
    if url.startswith(PRIVATE):
        private = Path(url.removeprefix(PRIVATE))
    elif private is None and url == placed("rocksdb://", data) and not (data / "store" / "CURRENT").exists():
        private = private_store(data) if has_private_store(private_store(data)) else None
    if private is not None:
        private = private.absolute()
        url = read_private(private / "url")[0] or f"{PRIVATE}{private}"
    path = Path(url.removeprefix("rocksdb://")).absolute() if url.startswith("rocksdb://") else None
    if path is not None:
        url = f"rocksdb://{path}"  # workers of Spark run in other folders
    location = StoreLocation(url, path, found.store.durability, http, token, private)
    if told and given.store is None:
        print(f"store: {location.shown} ({why})", file=sys.stderr)
    return location


def _store_of_node(http: str, token: str | None) -> tuple[str, str] | None:
    """Return the URL of the store of the node at an address, and how it is known; None: no node answers there."""
    control = _control.ControlClient(http, token)
    try:
        name, view = control.call("GET", "node")["node"], control.call("GET", "store")
    except _control.UnreachableError:
        return None
    except _control.ControlError as error:
        raise _control.ControlError(
            f"the node at http://{http} does not tell which store it has: {error}; name the store with --store URL"
        ) from error
    why = f"of node {name} at http://{http}"
    if view["place"]:
        return f"rocksdb://{view['place']}", why
    private = _private_of(control)
    if private is not None:
        return f"{PRIVATE}{private}", why
    engine = view["figures"]["engine"]
    raise _control.ControlError(
        f"node {name} at http://{http} keeps its store "
        + ("in memory, where only it can look" if engine == "memory" else f"on {engine}")
        + "; name a store with --store URL or --config FILE"
    )


def _private_of(control: _control.ControlClient) -> Path | None:
    """Return the folder of the private store of a node of `serve --nodes`: it reads the address from a file there."""
    settings = {each["key"]: each["value"] for each in control.call("GET", "config")["data"]}
    reference = str(settings.get("store.url", ""))
    file = Path(reference.removeprefix("file://"))
    return file.parent if reference.startswith("file://") and (file.parent / "server.lock").exists() else None
