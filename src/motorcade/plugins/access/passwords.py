"""Password files: reading, checking and changing them.

    # comment
    alice:$argon2id$v=19$m=19456,t=2,p=1$SALT$HASH    ours, and mosquitto's since 2.1
    bob:$7$ITERATIONS$SALT$HASH                       mosquitto: PBKDF2 with SHA-512
    carl:$6$SALT$HASH                                 mosquitto before 2.0: SHA-512 of password and salt

Rule 1: a line that is not understood is an error, and so is a second line for the same user. A plain-text password
would otherwise be taken for a hash, and a broken line could let a client in.
Rule 2: checking never says, by its answer or by its time, whether the user exists.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import argon2
from argon2.exceptions import InvalidHashError, VerificationError

from motorcade.core.errors import AccessFileError
from motorcade.plugins.access.aclfile import read_text

HASHER = argon2.PasswordHasher(time_cost=2, memory_cost=19 * 1024, parallelism=1)  #: about 42 ms on one core
MAX_MEMORY = 1024 * 1024  #: KiB that a hash may demand
MAX_ITERATIONS = 10_000_000  #: of PBKDF2


@dataclass(frozen=True, slots=True)
class Argon2Hash:
    """`$argon2id$…`."""

    encoded: str

    def verify(self, password: bytes) -> bool:
        try:
            return HASHER.verify(self.encoded, password)
        except (VerificationError, InvalidHashError):
            return False


@dataclass(frozen=True, slots=True)
class Pbkdf2Hash:
    """`$7$…`."""

    encoded: str
    iterations: int
    salt: bytes
    digest: bytes

    def verify(self, password: bytes) -> bool:
        made = hashlib.pbkdf2_hmac("sha512", password, self.salt, self.iterations, len(self.digest))
        return hmac.compare_digest(made, self.digest)


@dataclass(frozen=True, slots=True)
class Sha512Hash:
    """`$6$…`: quick to guess; `motorcade passwd` replaces it."""

    encoded: str
    salt: bytes
    digest: bytes

    def verify(self, password: bytes) -> bool:
        return hmac.compare_digest(hashlib.sha512(password + self.salt).digest(), self.digest)


Hash = Argon2Hash | Pbkdf2Hash | Sha512Hash


def parse_hash(text: str) -> Hash:
    """Return a stored hash; `ValueError` says what is wrong with it."""
    if text.startswith("$argon2id$"):
        return _parse_argon2(text)
    kind, *fields = text.split("$")[1:]
    if kind == "7" and len(fields) == 3 and fields[0].isascii() and fields[0].isdigit():
        iterations = int(fields[0])
        if not 1 <= iterations <= MAX_ITERATIONS:
            raise ValueError(f"the number of iterations must be 1 to {MAX_ITERATIONS}")
        return Pbkdf2Hash(text, iterations, _base64(fields[1], 1), _base64(fields[2], 64))
    if kind == "6" and len(fields) == 2:
        return Sha512Hash(text, _base64(fields[0], 1), _base64(fields[1], 64))
    raise ValueError("expected $argon2id$…, $7$… or $6$…")


def _parse_argon2(text: str) -> Argon2Hash:
    try:
        parameters = argon2.extract_parameters(text)
    except InvalidHashError as error:
        raise ValueError("damaged argon2id hash") from error
    if parameters.type is not argon2.Type.ID or parameters.hash_len < 16:
        raise ValueError("damaged argon2id hash")
    if parameters.memory_cost > MAX_MEMORY or parameters.time_cost > 100 or parameters.parallelism > 64:
        raise ValueError("the hash demands too much memory or time")
    return Argon2Hash(text)


def _base64(text: str, at_least: int) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("salt or hash is not base64") from error
    if len(raw) < at_least:
        raise ValueError("salt or hash is too short")
    return raw


class PasswordFile:
    """The users of one file, as they were when it was read."""

    def __init__(self, name: str, users: dict[str, Hash]) -> None:
        self.name = name
        self.users = users
        self._hashes = list(users.values()) or [parse_hash(HASHER.hash(secrets.token_bytes(16)))]
        self._key = secrets.token_bytes(16)

    @classmethod
    def load(cls, path: str | Path) -> PasswordFile:
        """Read a file; `AccessFileError` names the first line that is wrong."""
        return cls(str(path), dict(_entries(read_text(path), str(path))))

    def stored(self, username: str) -> tuple[Hash, bool]:
        """Return the hash to check for a user, and whether it is the user's own.

        Unknown users get some user's hash, always the same one, so that checking them is the same work.
        """
        own = self.users.get(username)
        if own is not None:
            return own, True
        pick = hashlib.blake2b(username.encode(), key=self._key, digest_size=8).digest()
        return self._hashes[int.from_bytes(pick, "big") % len(self._hashes)], False


def _entries(text: str, name: str) -> Iterator[tuple[str, Hash]]:
    seen: set[str] = set()
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.removesuffix("\r")
        if not line.strip() or line.startswith("#"):
            continue
        user, colon, stored = line.partition(":")
        if not colon or not user:
            raise AccessFileError(f"{name}:{number}: expected USER:HASH")
        if user in seen:
            raise AccessFileError(f"{name}:{number}: user {user!r} is there a second time")
        seen.add(user)
        try:
            yield user, parse_hash(stored.strip())
        except ValueError as error:
            raise AccessFileError(
                f"{name}:{number}: password of {user!r}: {error} (motorcade passwd makes one)"
            ) from None


# --- changing ---


def check_user(user: str) -> None:
    """Raise `AccessFileError` unless a user of this name can stand in a file."""
    if not user or user.startswith("#") or user != user.strip() or any(c == ":" or ord(c) < 32 for c in user):
        raise AccessFileError(
            f"user name {user!r} must not be empty, begin with '#' or space, or contain ':' or control characters"
        )


def set_password(path: Path, user: str, password: bytes) -> bool:
    """Add a user or change the password; True if the user is new. Makes the file if there is none."""
    check_user(user)
    if not password:
        raise AccessFileError("the password must not be empty")
    with _locked(path):
        lines, index = _lines_of(path, user)
        line = f"{user}:{HASHER.hash(password)}"
        if index is None:
            lines.append(line)
        else:
            lines[index] = line
        _replace(path, lines)
        return index is None


def delete_user(path: Path, user: str) -> bool:
    """Take a user out; False if there was none."""
    with _locked(path):
        lines, index = _lines_of(path, user)
        if index is None:
            return False
        del lines[index]
        _replace(path, lines)
        return True


def _lines_of(path: Path, user: str) -> tuple[list[str], int | None]:
    """Return all lines of a valid file, and where the user stands."""
    if not path.exists():
        return [], None
    text = read_text(path)
    dict(_entries(text, str(path)))  # never touch a file that is not understood
    lines = text.splitlines()
    return lines, next((i for i, line in enumerate(lines) if line.startswith(f"{user}:")), None)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock for one change at a time: the folder, because the file itself is replaced."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise AccessFileError(f"{path}: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, lines: list[str]) -> None:
    """Write all lines at once: a reader sees the old file or the new one, and only its owner can read it."""
    target = path.resolve()
    text = "".join(f"{line}\n" for line in lines)
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # mode 0600
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            if target.exists():
                _keep_owner(handle, target)
            out.write(text)
            out.flush()
            os.fsync(handle)
        Path(temporary).replace(target)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise AccessFileError(f"{path}: cannot be written: {error.strerror}") from error


def _keep_owner(handle: int, target: Path) -> None:
    """Keep the owner of a file that the broker's user owns when root changes a password."""
    old = target.stat()
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        try:
            os.fchown(handle, old.st_uid, old.st_gid)
        except PermissionError:
            pass
