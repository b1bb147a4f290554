"""One log of all that the processes of a supervisor print.

Nodes log one JSON object per line, whatever the format of this log is; each becomes an event of this log, with the name
of the node. What is not such a line (a traceback of the interpreter, what a library prints) becomes the event
`printed`, so that the log stays what it is: one event per line, or one JSON object.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from motorcade.log import relay

ERROR: Final = "error: "  #: the last line of a command that fails begins so
_EVENT: Final = msgspec.json.Decoder(dict[str, Any])
#: `1234:M 18 Nov 2026 20:27:29.123 * text`: process, role, time, level, text.
_OF_VALKEY: Final = re.compile(r"\d+:[A-Z] .{8,30}? ([.\-*#]) (.*)")
#: What it says when it is told to end; an end that comes by itself is told by the supervisor.
_OF_ITS_END: Final = re.compile(r"signal-handler|[Uu]ser requested shutdown|ready to exit")
_LEVELS: Final = {".": "debug", "-": "debug", "*": "debug", "#": "warning"}


def of_node(node: str, line: str) -> None:
    """Log a line of a node; not the error that it ends with, which the supervisor tells."""
    if line.startswith(ERROR):
        return
    try:
        event = _EVENT.decode(line)
    except msgspec.DecodeError:
        event = {}
    if not isinstance(event.get("event"), str):
        if line.strip():
            _tell("printed", "info", node=node, text=line)
        return
    # Between the event and its fields, where the eye finds it.
    relay({"event": event.pop("event"), "node": node, **event})


def of_valkey(line: str) -> None:
    """Log a line of the store's server, if it is a warning."""
    found = _OF_VALKEY.match(line)
    level, text = (_LEVELS[found[1]], found[2]) if found else ("warning", line)
    if level == "warning" and text.strip() and not _OF_ITS_END.search(text):
        _tell("valkey_warns", level, text=text)


def _tell(event: str, level: str, **fields: object) -> None:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    relay({"event": event, **fields, "logger": "motorcade.supervisor", "level": level, "timestamp": now})
