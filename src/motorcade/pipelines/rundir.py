"""The run directory: its lock, its identity, its progress.

    DIR/lock            held (flock) by the process that runs; pid and host are inside
    DIR/lock.java       held by its Java, which lives a moment longer than a process that was killed
    DIR/pipeline.json   which pipeline, with what identity; compared at each start, and kept once anything else is here
    DIR/status.json     what the run has said last; replaced by rename
    DIR/spark/          Spark's checkpoint: offsets and state
    DIR/spark.log       what Spark has to say; it and spark.log.1 are bounded (log4j2.properties)
    DIR/spark.out       what the Java of the last run has printed
    DIR/…               parts of the pipeline's own

Rule 1: kill -9 at any moment is harmless: locks end with their processes, files are whole or not there.
Rule 2: what was read is told by Spark's checkpoint alone. status.json is for eyes; a run that was killed leaves an old
        one, nothing depends on it.
Rule 3: nothing here holds a password.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final, Self

from motorcade.pipelines import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSION: Final = 1

#: Seconds to wait for the Java of a run that was killed: it finishes what it cannot interrupt.
JAVA_PATIENCE: Final = 120.0
_JAVA_EVERY: Final = 0.2

#: Seconds to wait for a process that only checks whether the lock is held.
_LOCK_PATIENCE: Final = 0.5

_LOCK: Final = "lock"
_JAVA_LOCK: Final = "lock.java"
_MANIFEST: Final = "pipeline.json"
_STATUS: Final = "status.json"
_SPARK: Final = "spark"
_LOG: Final = "spark.log"
_OUT: Final = "spark.out"

#: What a run that was killed before it wrote its manifest may have left.
_TRACES: Final = {_LOCK, _JAVA_LOCK, _STATUS, _LOG, _OUT}


def check_place(text: str) -> Path:
    """Check the name of a run directory; one that only Spark could reach is refused."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        raise PipelineError(
            f"{text} is no folder: a run needs one on this machine, or mounted, that all machines of the cluster see "
            "under the same name (locks and renames are not to be had otherwise)"
        )
    if not text.strip():
        raise PipelineError("the folder of a run needs a name")
    return Path(text).absolute()


class RunDir:
    """A folder that this process has, for as long as the context lasts."""

    def __init__(self, path: str | Path, pipeline: str, identity: Mapping[str, str]) -> None:
        self.path = check_place(str(path))
        self.pipeline = pipeline
        self.identity = dict(identity)
        self._lock: IO[str] | None = None
        self._java: Any = None  #: the file that Java holds, an object of py4j
        self._status: dict[str, Any] = {}
        self._noting = threading.Lock()  # batches are noted by Spark's threads too

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path)
            self._belong()
        except OSError as error:
            self._let_go()
            raise PipelineError(f"{self.path} cannot be the folder of a run: {error.strerror or error}") from error
        except BaseException:
            self._let_go()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_go()

    def _let_go(self) -> None:
        if self._java is not None:
            with suppress(Exception):  # Java is gone, and its lock with it
                self._java.close()
            self._java = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- places

    @property
    def spark(self) -> str:
        """Return the path of Spark's checkpoint."""
        return str(self.path / _SPARK)

    @property
    def log(self) -> Path:
        """Return the path of the log of Spark and Java."""
        return self.path / _LOG

    def part(self, name: str) -> Path:
        """Return a path of the pipeline's own; it may not exist."""
        return self.path / name

    # -- whose it is

    def _belong(self) -> None:
        mine = {"v": VERSION, "pipeline": self.pipeline, "identity": self.identity}
        found = _read(self.path / _MANIFEST)
        made = sorted(
            entry.name for entry in self.path.iterdir() if not _is_trace(entry.name) and entry.name != _MANIFEST
        )
        if found is not None:
            self._compare(found, begun=bool(made))
            self._status = (_read(self.path / _STATUS) or {}) | {"counts": None}  # they are of one run
            if found.get("identity") != self.identity:
                _write(self.path / _MANIFEST, mine | {"made_at": time.time()})
            return
        if made:
            raise PipelineError(
                f"{self.path} has other files in it ({', '.join(made[:3])}) and no {_MANIFEST}; "
                "a run needs a folder of its own"
            )
        _write(self.path / _MANIFEST, mine | {"made_at": time.time()})

    def _compare(self, found: Mapping[str, Any], *, begun: bool) -> None:
        """Refuse what another command has begun; one that had a mistake in it, and has made nothing, is corrected."""
        if found.get("v") != VERSION:
            raise PipelineError(
                f"{self.path / _MANIFEST} is of version {found.get('v')!r}, this is version {VERSION}; run it with the "
                "version of Motorcade that has made it, or begin in another folder"
            )
        if found.get("pipeline") != self.pipeline:
            raise PipelineError(
                f"{self.path} belongs to the pipeline {found.get('pipeline')!r}, not {self.pipeline!r}; "
                "name another folder"
            )
        before: Mapping[str, str] = found.get("identity", {})
        if not begun:
            return
        for field in sorted(before.keys() | self.identity.keys()):
            if before.get(field) != self.identity.get(field):
                raise PipelineError(
                    f"{self.path} was begun with {field} {_shown(before.get(field))}, and now it is "
                    f"{_shown(self.identity.get(field))}; run it as it was begun, or name another folder"
                )

    # -- how far it is

    @property
    def status(self) -> dict[str, Any]:
        """Return the last stored status, of this run or the one before."""
        with self._noting:
            return dict(self._status)

    def note(self, **fields: Any) -> None:
        """Remember these for `pipeline status`; what was noted under other names stays."""
        with self._noting:
            self._status |= fields
            if self._lock is not None:
                self._status["noted_at"] = time.time()
                _write(self.path / _STATUS, self._status)

    # -- the Java of the run

    def claim(self, spark: SparkSession, patience: float = JAVA_PATIENCE) -> None:
        """Let the session's Java hold the folder too, and wait for the Java of a run that was killed.

        Its process is gone, but Java goes on for a moment: a batch of the old run must not end inside the new one.
        """
        if self._java is not None:
            return
        jvm: Any = spark._jvm  # noqa: SLF001 - there is no other way to Java
        file = jvm.java.io.RandomAccessFile(str(self.path / _JAVA_LOCK), "rw")
        until = time.monotonic() + patience
        while file.getChannel().tryLock() is None:
            if time.monotonic() > until:
                file.close()
                raise PipelineError(
                    f"{self.path} is still held by the Java of another run after {patience:.0f} s; end that process"
                )
            time.sleep(_JAVA_EVERY)
        self._java = file


def look(path: str | Path) -> dict[str, Any]:
    """Return manifest, `running` (the pid, or None) and status of a run directory."""
    place = check_place(str(path))
    found = _read(place / _MANIFEST)
    if found is None:
        raise PipelineError(f"{place} is no folder of a pipeline's run: there is no {_MANIFEST} in it")
    return {
        "folder": str(place),
        "pipeline": found.get("pipeline"),
        "identity": found.get("identity", {}),
        "made_at": found.get("made_at"),
        "running": _holder(place),
        "status": _read(place / _STATUS) or {},
    }


# -- files


def _locked(path: Path) -> IO[str]:
    file = (path / _LOCK).open("a+")
    until = time.monotonic() + _LOCK_PATIENCE
    while not _taken(file, fcntl.LOCK_EX):
        if time.monotonic() > until:
            holder = _owner(file)
            file.close()
            raise PipelineError(
                f"{path} is in use by {holder}; two runs cannot share a folder: stop that one, or name another folder"
            )
        time.sleep(_LOCK_PATIENCE / 10)
    file.truncate(0)
    file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    file.flush()
    return file


def _owner(file: IO[str]) -> str:
    file.seek(0)
    try:
        inside = json.loads(file.read())
        return f"process {inside['pid']} on {inside['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"  # which has not written its name yet


def _holder(path: Path) -> str | None:
    """Return the process that holds the directory now."""
    try:
        file = (path / _LOCK).open()
    except OSError:
        return None
    with file:
        return None if _taken(file, fcntl.LOCK_SH) else _owner(file)


def _taken(file: IO[str], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_trace(name: str) -> bool:
    return name in _TRACES or name.startswith((f".{_MANIFEST}.", f".{_STATUS}.", f"{_LOG}."))


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise PipelineError(f"{file.parent} is no folder") from error
    except OSError as error:
        raise PipelineError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise PipelineError(f"{file} is no JSON ({error}); it was not written by a run") from error
    if not isinstance(found, dict):
        raise PipelineError(f"{file} holds no object; it was not written by a run")
    return found


def _write(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file whole or not at all, whenever the machine stops."""
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("w") as out:
            json.dump(content, out, ensure_ascii=False, indent=2, default=str)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _shown(value: str | None) -> str:
    return "unset" if value is None else repr(value)
