"""Lua files of a package, put together and known by their digest."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import NamedTuple


class Script(NamedTuple):
    """A script as the server knows it."""

    source: bytes
    digest: str


def script_of(package: str, *names: str) -> Script:
    """Return a script made of the files `lua/NAME.lua` of a package, one after the other."""
    folder = files(package) / "lua"
    return named(b"\n".join((folder / f"{name}.lua").read_bytes() for name in names))


def named(source: bytes) -> Script:
    # The server names scripts by SHA-1; nothing is protected by it.
    return Script(source, hashlib.sha1(source, usedforsecurity=False).hexdigest())
