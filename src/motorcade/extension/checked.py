"""Plugin sources from a path that the caller is not trusted with: opened once, checked, and read from there.

The caller of the control port names a path. Between a check of that path and its use, any user who may write to a
folder on the way could put another file there. So every step below a folder that the configuration trusts is opened
without following links, what was opened is checked, and what is compiled is what was read from it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from motorcade.core.errors import PluginError

MAX_MODULES: Final = 1000  #: Python files of a package folder
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe must not wait


class Module(NamedTuple):
    """The source of one Python file."""

    file: Path
    source: bytes
    package: Path | None  #: the folder, if the file is its `__init__.py`


def read_plugin(path: Path, within: Iterable[str]) -> dict[str, Module]:
    """Return the modules at `path` by dotted name; `""` is the file itself, or `__init__.py` of the folder.

    `PluginError` unless the path lies in one of the folders `within`, and only the node's user or root can have
    written what is read.
    """
    base, names = _below(path, within)
    with _opened(os.open(base, _FOLDER)) as trusted:
        return _walk(trusted, base, names)


def _below(path: Path, within: Iterable[str]) -> tuple[Path, tuple[str, ...]]:
    """Return the trusted folder that the path lies in, and the way from there."""
    folders = [Path(folder).expanduser().resolve() for folder in within]
    if not folders:
        raise PluginError(
            "loading a plugin by its path over the control port is off; list its folder in http.plugin_paths,"
            " or write the path into [plugins.NAME] of the configuration"
        )
    for folder in folders:
        if path.is_relative_to(folder) and folder.is_dir():
            return folder, path.relative_to(folder).parts
    raise PluginError(f"{path} is in none of the folders of http.plugin_paths: {', '.join(map(str, folders))}")


def _walk(folder: int, place: Path, names: tuple[str, ...]) -> dict[str, Module]:
    """Go down from an open folder."""
    if not names:
        return dict(_package(folder, place, ""))
    inner = place / names[0]
    try:
        handle = os.open(names[0], _FILE, dir_fd=folder)
    except OSError as error:
        raise PluginError(f"there is no plugin at {inner}: {error.strerror}") from error
    with _opened(handle):
        about = _check(handle, inner)
        if stat.S_ISDIR(about.st_mode):
            return _walk(handle, inner, names[1:])
        if not stat.S_ISREG(about.st_mode) or len(names) > 1:
            raise PluginError(f"there is no plugin at {inner}: it is no file and no folder")
        return {"": Module(inner, _read(handle), None)}


def _package(folder: int, place: Path, prefix: str) -> Iterator[tuple[str, Module]]:
    """Yield every Python file below an open folder."""
    names = sorted(os.listdir(folder))
    if not prefix and "__init__.py" not in names:
        raise PluginError(f"there is no plugin at {place}: the folder has no __init__.py")
    if len(names) > MAX_MODULES:
        raise PluginError(f"{place} has more than {MAX_MODULES} entries; a plugin's folder holds only the plugin")
    if prefix and "__init__.py" not in names:  # a package all the same, as Python sees it
        yield prefix.removesuffix("."), Module(place / "__init__.py", b"", place)
    for name in names:
        stem = name.removesuffix(".py")
        if not stem.isidentifier() or stem == "__pycache__":
            continue
        try:
            handle = os.open(name, _FILE, dir_fd=folder)
        except OSError as error:
            if name == stem:
                continue  # data of the plugin
            raise PluginError(f"{place / name} is a link or cannot be read: {error.strerror}") from error
        with _opened(handle):
            mode = os.fstat(handle).st_mode
            dotted = f"{prefix}{stem}"
            if stat.S_ISDIR(mode) and name == stem:
                _check(handle, place / name)
                yield from _package(handle, place / name, f"{dotted}.")
            elif stat.S_ISREG(mode) and name != stem:
                _check(handle, place / name)
                is_package = stem == "__init__"
                key = prefix.removesuffix(".") if is_package else dotted
                yield key, Module(place / name, _read(handle), place if is_package else None)


def _check(handle: int, place: Path) -> os.stat_result:
    """Refuse what another user could have written."""
    about = os.fstat(handle)
    mode = stat.S_IMODE(about.st_mode)
    shared = stat.S_ISDIR(about.st_mode) and mode & stat.S_ISVTX  # such as /tmp: what lies in it is checked itself
    if about.st_uid not in (os.geteuid(), 0):
        raise PluginError(f"{place} belongs to another user; it must belong to the user the node runs as, or to root")
    if mode & stat.S_IWOTH and not shared:
        raise PluginError(f"{place} can be written by every user (mode {mode:o}); take that right away")
    if mode & stat.S_IWGRP and not shared and about.st_gid not in (os.getegid(), 0):
        raise PluginError(f"{place} can be written by another group (mode {mode:o}); take that right away")
    return about


def _read(handle: int) -> bytes:
    with os.fdopen(os.dup(handle), "rb") as file:
        return file.read()


@contextmanager
def _opened(handle: int) -> Iterator[int]:
    try:
        yield handle
    finally:
        os.close(handle)
