"""Files that only their own user can read: tokens, secrets, addresses with a password in them."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Final

MAX_SECRET_FILE: Final = 4096  #: bytes that are read of one


def read_private(path: Path) -> tuple[str, int]:
    """Return the text of a private file, and the user that owns it; "" and -1 if there is none, or others can read it.

    Root reads the files of all users; it is told the truth by the files of any user.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return "", -1
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        private = not stat.S_IMODE(about.st_mode) & 0o077 and about.st_uid in (os.geteuid(), 0)
        if not stat.S_ISREG(about.st_mode) or not (private or os.geteuid() == 0):
            return "", -1
        return file.read(MAX_SECRET_FILE).decode("ascii", "replace").strip(), about.st_uid


def write_private(path: Path, text: str) -> None:
    """Replace a file by one that only its owner can read; `OSError` leaves the old one as it was."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{text}\n")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def own_secret(path: Path) -> str:
    """Return the secret in a file; make one, and its folder, if there is none. `OSError` if it cannot be written."""
    found, _ = read_private(path)
    if not found:
        path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        found = secrets.token_urlsafe(32)
        write_private(path, found)
    return found
