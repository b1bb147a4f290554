"""The token of the control port: its holder is the administrator of the node.

A node without `http.token` makes one and keeps it in its data folder, readable by its own user only. A pointer to that
file, named after the address, lies where commands of the same user look, so that they need to know neither.

    DATA/token                                       the token
    $XDG_STATE_HOME/motorcade/nodes/127.0.0.1:18083  the path of DATA/token ($XDG_STATE_HOME: ~/.local/state)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from motorcade.core.errors import ConfigError
from motorcade.private_files import own_secret, read_private, write_private

NAME: Final = "token"
_LISTENING: Final = "0A"  # a state in the tables of the system
_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")


def own_token(data: Path) -> str:
    """Return the token in a node's data folder; make one if there is none. `ConfigError` if it cannot be written."""
    path = data / NAME
    try:
        return own_secret(path)
    except OSError as error:
        raise ConfigError(
            f"the token of the control port cannot be kept in {path}: {error.strerror};"
            " set http.token, another data.dir, or http.bind = 'off'"
        ) from error


def read_token(path: Path) -> str:
    """Read a token file; empty if there is none, or if others could have read or written it."""
    return read_private(path)[0]


# -- from an address to the file


def point(address: str, data: Path) -> Path | None:
    """Tell commands of this user where the token of the node at an address is; None if they cannot be told."""
    path = _pointer(address, os.environ)
    if path is None:
        return None
    with suppress(OSError):
        path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        write_private(path, str((data / NAME).absolute()))
        return path
    return None


def find_token(address: str, environ: Mapping[str, str], data: Iterable[Path] = ()) -> str:
    """Find the token for a node at `HOST:PORT` on this machine; empty if none is found.

    Where the node has left a pointer, else in these data folders. While a node is down, another user could listen in
    its place: where the system tells, a token is not found for a port that others than its owner and root listen on.
    """
    host, _, port = address.rpartition(":")
    hosts = {"localhost": ("127.0.0.1", "[::1]")}.get(host.lower(), (host,))
    if not any(name in ("127.0.0.1", "[::1]") or name.startswith("127.") for name in hosts):
        return ""  # a token is never sent to another machine unless the caller says so
    listening = users_listening(port)
    files: list[Path] = []
    for name in hosts:
        pointer = _pointer(f"{name}:{port}", environ)
        with suppress(OSError, UnicodeDecodeError, ValueError):
            if pointer is not None:
                files.append(Path(pointer.read_text().strip()))
    for path in [*files, *(folder / NAME for folder in data)]:
        found, owner = read_private(path)
        if found and listening <= {owner, 0}:
            return found
    return ""


def users_listening(port: str) -> set[int]:
    """Return users that listen on a port of this machine; none if the system does not tell."""
    found: set[int] = set()
    for table in _TABLES:
        with suppress(OSError, ValueError, IndexError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == int(port):
                    found.add(int(fields[7]))
    return found


def _pointer(address: str, environ: Mapping[str, str]) -> Path | None:
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # noqa: PTH117 - a text, maybe empty
        home = environ.get("HOME", "")
        if not os.path.isabs(home):  # noqa: PTH117
            return None
        state = f"{home}/.local/state"
    return Path(state, "motorcade", "nodes", address.replace("/", "_"))
