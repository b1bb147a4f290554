"""The URL of a Redis server or cluster, taken apart.

    redis://[user:password@]host[:port][/database][?option=value&…]
    redis+cluster://[user:password@]host[:port],host[:port],…[?option=value&…]
    rediss://… and rediss+cluster://…   the same over TLS

Options: `prefix`, `cells`, `replicas`, `patience`, `unchecked=yes`, `trace=yes` (see `RedisOptions`); for TLS `ca`,
`cert` and `key`, each the path of a PEM file. User and password are percent-encoded.
"""

from __future__ import annotations

import dataclasses
import ssl
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, unquote

from motorcade.core.errors import StoreError
from motorcade.redis.resp import Access, ServerAddress

PORT: Final = 6379

#: Seconds that a server may say nothing while commands wait; between them, a third of the patience, so that a server
#: that hangs leaves time for another attempt. A WAIT takes up to one second.
SHORTEST_SILENCE: Final = 1.5
LONGEST_SILENCE: Final = 4.0


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """The options that a deployment may choose."""

    prefix: str = "motorcade"  #: of all keys; stores with different prefixes may share a server
    cells: int | None = None  #: only when a store is created (64); later it must be the same, or left out
    replicas: int | None = (
        None  #: that must confirm a write; None: one, if the servers have any when the store is opened
    )
    unchecked: bool = False  #: also open a server that keeps no append-only file, or that evicts what it holds
    #: Seconds that a failover may take before callers get an error, give or take one attempt that is under way. A
    #: cluster needs about its `cluster-node-timeout` and two seconds more.
    patience: float = 10.0
    blob_cache: int = 32 << 20  #: bytes of payloads kept at hand for readers
    trace: bool = False  #: for tests: write down in the store what is attached, decided, refused and fenced


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """The servers of a store and the access to them."""

    addresses: list[ServerAddress]
    clustered: bool
    access: Access
    options: RedisOptions


def parse_url(url: str, options: RedisOptions) -> RedisUrl:
    """Parse a URL; its options win over `options`. Errors never show the part with the password."""
    scheme, found, rest = url.partition("://")
    if not found or scheme not in {"redis", "rediss", "redis+cluster", "rediss+cluster"}:
        raise StoreError("a Redis store is redis://…, rediss://…, redis+cluster://… or rediss+cluster://…")
    clustered = scheme.endswith("+cluster")
    rest, _, query = rest.partition("?")
    places, _, path = rest.partition("/")
    credentials, _, hosts = places.rpartition("@")
    user, colon, password = credentials.partition(":")
    if credentials and not colon:
        user, password = "", credentials
    addresses = [_address(host) for host in hosts.split(",")]
    if len(addresses) > 1 and not clustered:
        raise StoreError("several hosts make a cluster: redis+cluster://…")
    values = dict(parse_qsl(query, keep_blank_values=True))
    files = {name: values.pop(name, "") for name in ("ca", "cert", "key")}
    options = _options(values, options)
    access = Access(
        user=unquote(user),
        password=unquote(password),
        database=_database(path, clustered),
        tls=_tls(files) if scheme.startswith("rediss") else None,
        reply_timeout=min(LONGEST_SILENCE, max(SHORTEST_SILENCE, options.patience / 3)),
    )
    return RedisUrl(addresses, clustered, access, options)


def _address(text: str) -> ServerAddress:
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    else:
        host, _, port = text.partition(":")
    if not host or not (port or "0").isdigit():
        raise StoreError("a Redis URL needs hosts with numeric ports: redis://HOST:PORT")
    return ServerAddress(host, int(port or PORT))


def _database(path: str, clustered: bool) -> int:
    if not path:
        return 0
    if not path.isdigit():
        raise StoreError(f"the path of a Redis URL is the number of a database, not {path!r}")
    if clustered and path != "0":
        raise StoreError("a Redis cluster has database 0 only; use ?prefix=… to keep stores apart")
    return int(path)


def _tls(files: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=files["ca"] or None)
        if files["cert"]:
            context.load_cert_chain(files["cert"], files["key"] or None)
    except (OSError, ssl.SSLError) as error:
        raise StoreError(f"cannot read the TLS files of the Redis URL: {error}") from None
    return context


def _options(values: dict[str, str], options: RedisOptions) -> RedisOptions:
    try:
        for name, text in values.items():
            match name:
                case "prefix":
                    options = dataclasses.replace(options, prefix=text)
                case "cells":
                    options = dataclasses.replace(options, cells=int(text))
                case "replicas":
                    options = dataclasses.replace(options, replicas=int(text))
                case "patience":
                    options = dataclasses.replace(options, patience=float(text))
                case "unchecked":
                    options = dataclasses.replace(options, unchecked=text in {"yes", "true", "1"})
                case "trace":
                    options = dataclasses.replace(options, trace=text in {"yes", "true", "1"})
                case _:
                    raise StoreError(f"a Redis URL has no option {name!r}")
    except ValueError as error:
        raise StoreError(f"an option of the Redis URL is wrong: {error}") from None
    if not options.prefix or set(options.prefix) & set("{}"):
        raise StoreError("the prefix of a Redis store is not empty and has no braces")
    if options.cells is not None and not 1 <= options.cells <= 4096:
        raise StoreError("a Redis store has 1 to 4096 cells")
    return options
