"""Status of a run, seen from outside: from its directory, and from the stream that it reads.

Offsets are those of Spark's checkpoint, so they are right whatever has become of the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from motorcade.core.errors import MotorcadeError
from motorcade.pipelines import rundir
from motorcade.pipelines.runner import behind

#: What a run notes, in the order in which it is shown.
_NOTED: Final = (
    *("trigger", "started_at", "ended_at", "error", "batches", "rows", "rows_last", "seconds_last", "batch_at"),
    "counts",
)


def look(path: str | Path, store: str | None = None) -> dict[str, Any]:
    """Return everything about a run; `store` is the URL of its store, if the directory's lacks a password."""
    found = rundir.look(path)
    noted: Mapping[str, Any] = found["status"]
    batch, offsets = committed(Path(found["folder"]) / "spark")
    identity: Mapping[str, str] = found["identity"]
    late, unknown = _behind(store or identity.get("store"), identity, offsets)
    return {
        "folder": found["folder"],
        "pipeline": found["pipeline"],
        "identity": identity,
        "made_at": found["made_at"],
        "running": found["running"] is not None,
        "by": found["running"],
        "state": _state(noted.get("state"), running=found["running"] is not None),
        "batch": batch if batch is not None else noted.get("batch"),
        "offsets": offsets,
        "behind": late,
        "behind_unknown": unknown,
        **{name: noted.get(name) for name in _NOTED},
    }


def _state(noted: str | None, *, running: bool) -> str:
    if running:
        return "running"
    # Who is killed says nothing.
    return "killed" if noted == "running" else noted or "new"


def committed(checkpoint: Path) -> tuple[int | None, list[dict[str, Any]]]:
    """Return the last micro-batch that is done, and its end, for each source."""
    done = _newest(checkpoint / "commits")
    if done is None:
        return None, []
    try:
        # Two lines of Spark's own, then one for each source; `-` if a source had none.
        lines = (checkpoint / "offsets" / str(done)).read_text().splitlines()[2:]
    except OSError:
        return done, []
    return done, [_parsed(line) for line in lines if line not in {"", "-"}]


def _newest(log: Path) -> int | None:
    try:
        return max((int(entry.name) for entry in log.iterdir() if entry.name.isdigit()), default=None)
    except OSError:
        return None


def _parsed(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {"offset": line}
    return found if isinstance(found, dict) else {"offset": found}


def _behind(
    store: str | None, identity: Mapping[str, str], offsets: list[dict[str, Any]]
) -> tuple[int | None, str | None]:
    """Return how many rows lie between what was read and the end of the stream; or why that is not known."""
    if store is None or not offsets or not ("stream" in identity or "redis_stream" in identity):
        return None, None
    try:
        return behind(offsets[0], _newest_offset(store, identity)), None
    except MotorcadeError as error:
        return None, str(error)


def _newest_offset(store: str, identity: Mapping[str, str]) -> dict[str, Any]:
    from motorcade.storage.readers import open_reader  # noqa: PLC0415 - a status without a stream needs no store

    if "redis_stream" in identity:
        from motorcade.storage.redis_reader import NativeReader  # noqa: PLC0415 - needs another extra

        natives = NativeReader(store)
        try:
            return {"entries": natives.extent(identity["redis_stream"]).added}
        finally:
            natives.close()
    reader = open_reader(store)
    try:
        return {"offset": reader.extent(identity["stream"]).last}
    finally:
        reader.close()
