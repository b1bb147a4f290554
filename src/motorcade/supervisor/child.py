"""A node that `motorcade serve --nodes` has started: `python -m motorcade.supervisor.child NAME`.

It reads what it is on standard input, one line, and that stays open as long as the supervisor lives: at its end the
node is killed, as it is by the system where that knows of parents (`orphan.py`). What it has acknowledged is stored.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from motorcade import config as configuration
from motorcade import log
from motorcade.core.errors import MotorcadeError
from motorcade.core.redaction import without_secrets
from motorcade.node import Siblings, run
from motorcade.supervisor.orphan import end_with


class NodeOrders(msgspec.Struct, frozen=True):
    """The line that a node reads on standard input."""

    config: str | None  #: path of the configuration file
    overrides: dict[str, Any]  #: keys of the configuration, stronger than file and environment
    tokens: str  #: folder of the token that all nodes share
    parent: int  #: process id of the supervisor


def main() -> None:
    """Run a node until SIGTERM, or until the supervisor is gone."""
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=NodeOrders)
    end_with(orders.parent, signal.SIGKILL)
    threading.Thread(target=_watch, name="supervisor", daemon=True).start()
    path = Path(orders.config) if orders.config is not None else None
    try:
        loaded = configuration.load(path, os.environ, orders.overrides)
        configuration.check_plugins(loaded)
    except MotorcadeError as error:
        print(f"error: {without_secrets(str(error))}", file=sys.stderr)  # noqa: T201 - the supervisor tells it
        raise SystemExit(1) from None
    log.configure(loaded.config.log.level, loaded.config.log.format)
    raise SystemExit(run(loaded, Siblings(Path(orders.tokens))))


def _watch() -> None:
    """Wait for the end of standard input; the node cannot hold this up."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
