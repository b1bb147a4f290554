"""The Lua files beside this one, put together and known by their digest.

commit   common.lua, all operations, commit.lua: everything that writes
traced   the same with trace.lua, for tests
fill     the same with what only an import needs: each function costs every call, whether it is used or not
join     registers a writer
read, info, home, attached, find, extent: read only, one file each
"""

from __future__ import annotations

from functools import partial

from motorcade.redis.scripts import script_of

#: Files that define operations of `commit`. `offer` uses what `append` defines, `expire` what `delete` does.
OPERATIONS = (
    "append", "offer", "make", "acknowledge", "mark", "spare", "claim", "clear", "forget",
    "put", "delete", "expire",
    "stream", "trim", "drop",
    "note", "due",
    "attach", "open", "detach", "fence", "acquire", "renew", "release",
    "blob", "unhold", "condemn", "discard",
    "guard",
)  # fmt: skip


_script = partial(script_of, "motorcade.storage")

COMMIT = _script("common", *OPERATIONS, "commit")
FILL = _script("common", *OPERATIONS, "load", "commit")  # `load` uses what `append` defines
TRACED = _script("common", *OPERATIONS, "trace", "commit")
READ = _script("read")
INFO = _script("info")
HOME = _script("home")
ATTACHED = _script("attached")
FIND = _script("find")
EXTENT = _script("extent")
JOIN = _script("join")
ALL = (COMMIT, READ, INFO, HOME, ATTACHED, FIND, EXTENT)
