"""The Lua files beside this one, put together and known by their digest.

commit   common.lua, all operations, commit.lua: everything that writes
read, info, find: read only, one file each
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import NamedTuple

#: Files that define operations of `commit`; `load` uses what `append` defines.
OPERATIONS = (
    "append", "acknowledge", "mark", "clear", "forget", "expire",
    "put", "delete",
    "stream", "trim", "drop",
    "attach", "detach", "acquire", "renew", "release",
    "blob", "unhold", "condemn", "discard",
    "load",
)  # fmt: skip


class Script(NamedTuple):
    """A script as the server knows it."""

    source: bytes
    digest: str


def _script(*names: str) -> Script:
    folder = files("motorcade.storage") / "lua"
    source = b"\n".join((folder / f"{name}.lua").read_bytes() for name in names)
    # The server names scripts by SHA-1; nothing is protected by it.
    return Script(source, hashlib.sha1(source, usedforsecurity=False).hexdigest())


COMMIT = _script("common", *OPERATIONS, "commit")
READ = _script("read")
INFO = _script("info")
FIND = _script("find")
EXTENT = _script("extent")
ALL = (COMMIT, READ, INFO, FIND, EXTENT)
