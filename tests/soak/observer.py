"""A plugin that measures its own node from inside; the soak loads it by its path.

On a message to `soak/observe` it collects garbage, gives freed memory back to the system, and counts every object and
every container that can be reached from the broker and from Motorcade's modules. What it found is in
`DATA/plugins/observer/PAYLOAD.json`.

Containers are named by their owner, `Router._routes` or `motorcade.core.topic.NAME`, and all of one name are added up:
one that is keyed by what clients choose shows as a number that grows from cycle to cycle, whichever it is.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import sys
import threading
import tracemalloc
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.extension.plugin import Plugin, hook

TOPIC = "soak/observe"
TRACE = "SOAK_TRACE"  #: environment variable
PACKAGE = "motorcade"
SHOWN = 25  #: lines of code of which the growth is told, if the node traces its memory

_CONTAINERS = (dict, set, frozenset, list, tuple, deque)
_LEAVES = (str, bytes, bytearray, memoryview, int, float, complex, bool, type(None), type, types.ModuleType)


class Observer(Plugin):
    """Counts what the node holds, when it is asked to."""

    description = "counts objects and tables for the soak"
    before: tracemalloc.Snapshot | None = None

    async def start(self) -> None:
        """Trace memory if the environment says so: what is allocated from now on."""
        if os.environ.get(TRACE):
            tracemalloc.start()

    @hook("message.publish", topics=[TOPIC])
    def on_publish(self, _client: ClientInfo | None, message: Message) -> None:
        """Look around, once this message is done with."""
        self.context.spawn(self._observe(message.payload.decode()), "observe")

    async def _observe(self, name: str) -> None:
        resident = memory()
        garbage = collect()
        objects = gc.get_objects()
        kinds = Counter(_name(type(each)) for each in objects)
        count = len(objects)
        del objects
        found = tables((self.context.hub, self.context))
        trim()
        told = {
            "resident": resident,
            "trimmed": memory(),
            "garbage": garbage,
            "objects": count,
            "threads": threading.active_count(),
            "kinds": dict(kinds),
            "tables": found,
            "lines": self._lines(),
        }
        folder = self.context.data
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{name}.part"
        part.write_text(json.dumps(told))
        part.rename(folder / f"{name}.json")

    def _lines(self) -> list[str]:
        """Lines of code whose memory has grown since the last look; none unless memory is traced."""
        if not tracemalloc.is_tracing():
            return []
        now = tracemalloc.take_snapshot()
        before, self.before = self.before, now
        return [str(line) for line in now.compare_to(before, "lineno")[:SHOWN]] if before is not None else []


def collect() -> int:
    """Collect until nothing is left to be collected; how many objects only a full collection has found."""
    found = gc.collect()
    while gc.collect():
        pass
    return found


def memory() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def trim() -> None:
    """Give freed memory back to the system, where the C library knows how."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)


def tables(roots: Iterable[object]) -> dict[str, int]:
    """The entries of all containers below these objects and in the package's modules, by the name of their owner."""
    counts: Counter[str] = Counter({"sys.modules": len(sys.modules)})
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [("", root) for root in roots]
    for name, module in list(sys.modules.items()):
        if name.split(".")[0].startswith(PACKAGE):
            todo += [(f"{name}.{key}", value) for key, value in list(vars(module).items()) if not key.startswith("__")]
    while todo:
        label, value = todo.pop()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, functools._lru_cache_wrapper):
            counts[f"{label}()"] += value.cache_info().currsize
        elif isinstance(value, _CONTAINERS):
            counts[label] += len(value)
            todo += _inside(label, value)
        else:
            todo += _attributes(value)
    return dict(counts)


def _inside(label: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield f"{label}[]", key
            yield f"{label}[]", each
    else:
        for each in value:
            yield f"{label}[]", each


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    """Follow the attributes of an object of ours, and the closure of a function."""
    if isinstance(value, types.MethodType):
        yield "", value.__self__
    elif isinstance(value, functools.partial):
        yield from (("", each) for each in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f"{value.__qualname__}.{name}", cell.cell_contents
            except ValueError:  # not set yet
                continue
    else:
        kind = type(value)
        if kind.__module__.split(".")[0].startswith((PACKAGE, "uvicorn", "starlette")):
            for name in _fields(kind, value):
                try:
                    yield f"{kind.__qualname__}.{name}", getattr(value, name)
                except Exception:  # noqa: BLE001 - a slot that is not set; a property that fails
                    continue


def _fields(kind: type, value: object) -> set[str]:
    names = set(getattr(value, "__dict__", ()))
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names.update([slots] if isinstance(slots, str) else slots)
    names.update(getattr(kind, "__struct_fields__", ()))
    return names - {"__dict__", "__weakref__"}


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
