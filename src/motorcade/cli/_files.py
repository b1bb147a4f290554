"""Files of a command: read, checked before its work begins, written whole or not at all.

Whether something can be written is found out by writing there, not by permissions: read-only disks, quotas and folders
such as /proc are not seen in those. What is written for that has no name, and is gone when it is closed.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import typer

from motorcade.core.errors import MotorcadeError


class FileError(MotorcadeError):
    """An output file cannot be written."""


def read(option: str, place: str | Path) -> bytes:
    """Read a file, or standard input (`-`)."""
    if place == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(place).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"cannot read {place}: {error.strerror}", param_hint=option) from error


def check_file(option: str, file: Path | None) -> None:
    """Refuse a file that cannot be written; one that is there stays as it is."""
    if file is None:
        return
    try:
        why = _why_no_file(file)
    except OSError as error:  # a name that is too long
        why = error.strerror or str(error)
    if why:
        raise typer.BadParameter(f"{file} cannot be written: {why}", param_hint=option)


def check_folder(option: str, folder: Path) -> None:
    """Refuse a folder in which nothing can be written, or that cannot be made."""
    try:
        why = _why_no_folder(next(place for place in (folder, *folder.absolute().parents) if place.exists()))
    except OSError as error:  # as above
        why = error.strerror or str(error)
    if why:
        raise typer.BadParameter(f"{folder} cannot be written: {why}", param_hint=option)


def write(contents: Mapping[Path, bytes]) -> None:
    """Write all of these files. If one of them fails, those that were there before are as they were."""
    ready: list[tuple[Path, Path]] = []
    try:
        for file, content in contents.items():
            with _telling(file):
                target = file.resolve()
                if _is_written_in_place(target):
                    target.write_bytes(content)
                    continue
                partial = target.with_name(f".motorcade-{secrets.token_hex(8)}")
                ready.append((partial, target))
                partial.write_bytes(content)
                if target.exists():
                    shutil.copymode(target, partial)
        for partial, target in ready:
            with _telling(target):
                partial.replace(target)
    finally:
        for partial, _target in ready:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


@contextmanager
def _telling(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(f"cannot write {file}: {error.strerror or error}") from error


def _is_written_in_place(target: Path) -> bool:
    """Return True for a pipe, /dev/stdout, or a writable file in a directory that is not."""
    return target.exists() and (not target.is_file() or bool(_why_no_folder(target.parent)))


def _why_no_file(file: Path) -> str:
    if file.is_dir():
        return "it is a folder; name a file in it"
    if file.exists():
        return "" if os.access(file, os.W_OK) else os.strerror(errno.EACCES)
    return _why_no_folder(file.resolve().parent)


def _why_no_folder(folder: Path) -> str:
    if not folder.exists():
        return f"there is no folder {folder}"
    if not folder.is_dir():
        return f"{folder} is no folder"
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"nothing can be written in {folder}: {error.strerror or error}"
    return ""
