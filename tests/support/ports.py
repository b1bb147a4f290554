"""Free TCP ports for servers under test.

A port that the system hands out for `bind(0)` lies in the range that it takes for outgoing connections too: between
asking for it and listening on it, some client of another test may get it. So servers get ports below that range, each
process the next one of a counter that all test processes of this user share.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

LOWEST = 10_000  #: below are the ports of ordinary services
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
COUNTER = Path(tempfile.gettempdir()) / f"motorcade-test-ports-{os.getuid()}"
ATTEMPTS = 1000


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on right now, and that nobody else who asks here gets for a long time."""
    for _ in range(ATTEMPTS):
        port = _next()
        if _is_free(host, port):
            return port
    raise AssertionError(f"no free port among {ATTEMPTS} below the range of outgoing connections")


def _next() -> int:
    highest = _highest()
    with os.fdopen(os.open(COUNTER, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        port = int(text) + 1 if text.isdigit() else LOWEST
        if not LOWEST <= port <= highest:
            port = LOWEST
        file.seek(0)
        file.truncate()
        file.write(str(port))
        file.flush()
        return port


def _highest() -> int:
    """The last port below the range of outgoing connections; if that range begins low, the last there is."""
    try:
        first = int(RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32768
    return first - 1 if first > LOWEST + 1000 else 65535


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
