"""The clocks that the broker reads, and the real ones, for when a test has not put them back.

virtual.standing ─▶ replaced(patches) ─▶ test ─ ends well ─▶ patches are undone where they were made
                                             └ leaves them ─▶ conftest: `left` names them, `put_back` undoes them
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

#: Modules of the broker.
READERS = (
    "attachments",
    "broker",
    "connection",
    "fastpath",
    "relay",
    "session_reader",
    "session_store",
    "session_writer",
    "shared_bans",
    "steward",
    "subscription_feed",
)

_replaced: list[ExitStack] = []  # oldest first


def replaced(patches: ExitStack) -> None:
    """Remember patches until they are undone."""
    _replaced.append(patches)
    patches.callback(_replaced.remove, patches)


def left() -> list[str]:
    """Name the places where the broker, or the node, does not read the real clock."""
    found = [f"{module.__name__}.{name}" for module, name, real in _readers() if vars(module)[name] is not real]
    node = sys.modules.get("motorcade.clock")
    if node is not None and node.CLOCK.wall is not time.time:
        found.append("motorcade.clock.CLOCK")
    return found


def put_back() -> None:
    """Undo what tests have replaced and left, the last first; and whatever else hides a real clock."""
    while _replaced:
        _replaced[-1].close()
    for module, name, real in _readers():
        setattr(module, name, real)
    node = sys.modules.get("motorcade.clock")
    if node is not None:
        node.CLOCK.wall = time.time


def _readers() -> Iterator[tuple[ModuleType, str, Any]]:
    """Every name of a clock in a module that is loaded, with what it means."""
    for reader in READERS:
        module = sys.modules.get(f"motorcade.broker.{reader}")
        for name in sorted({"time", "monotonic"} & vars(module).keys()) if module else ():
            assert module is not None
            yield module, name, time.monotonic if name == "monotonic" else sys.modules["motorcade.clock"].time
