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
    return free_ports(1, host)


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """The first of so many such ports in a row: for what takes the next free ones by itself."""
    for _ in range(ATTEMPTS):
        first = _next(count)
        if all(_is_free(host, port) for port in range(first, first + count)):
            return first
    raise AssertionError(f"no {count} free ports among {ATTEMPTS} below the range of outgoing connections")


def _next(count: int) -> int:
    highest = _highest()
    with os.fdopen(os.open(COUNTER, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        first = int(text) + 1 if text.isdigit() else LOWEST
        if not LOWEST <= first <= highest - count + 1:
            first = LOWEST
        file.seek(0)
        file.truncate()
        file.write(str(first + count - 1))
        file.flush()
        return first


def _highest() -> int:
    """The last port below the range of outgoing connections; if that range begins low, the last there is."""
    try:
        first = int(RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32768
    return first - 1 if first > LOWEST + 1000 else 65535


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without SO_REUSEADDR: a port that a supervisor holds for a node, and does not listen on, is not free.
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
