"""Small bounded tables: log-ins that succeeded lately, log-ins that failed lately, and names known at an address.

Neither reads a clock; `now` is any clock in seconds that only grows.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

from motorcade.plugins.access.rules import address_of

V = TypeVar("V")
WINDOW = 60.0  #: seconds over which failures are counted


class SuccessCache(Generic[V]):
    """Remembers answers by what the client showed, without keeping what it showed.

    Keys are hashes under a key that is made with each cache and never leaves it: a copy of the table is of no use for
    trying passwords.
    """

    __slots__ = ("_entries", "_key", "_lifetime", "_size")

    def __init__(self, lifetime: float, size: int) -> None:
        self._key = secrets.token_bytes(32)
        self._lifetime = lifetime
        self._size = size
        self._entries: OrderedDict[bytes, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, shown: Iterable[bytes | str | None], now: float) -> V | None:
        """Return what was remembered, unless it is too old."""
        if not self._entries:
            return None
        entry = self._entries.get(self._digest(shown))
        return entry[1] if entry is not None and now < entry[0] else None

    def put(self, shown: Iterable[bytes | str | None], value: V, now: float) -> None:
        """Remember a value for the lifetime; the oldest entry makes room."""
        if not self._lifetime:
            return
        digest = self._digest(shown)
        self._entries[digest] = (now + self._lifetime, value)
        self._entries.move_to_end(digest)
        if len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def _digest(self, shown: Iterable[bytes | str | None]) -> bytes:
        hasher = hashlib.blake2b(key=self._key, digest_size=32)
        for part in shown:
            # Lengths keep ("ab", "c") apart from ("a", "bc"), the flag None from "".
            raw = part.encode() if isinstance(part, str) else part or b""
            hasher.update(bytes((part is not None,)) + len(raw).to_bytes(8, "big") + raw)
        return hasher.digest()


class Failures:
    """Counts failed log-ins per name and address; with an empty name, of all names of an address.

    Per name alone, any client could lock a vehicle out. IPv6 addresses count by their /64, which one subscriber gets as
    a whole.
    """

    __slots__ = ("_entries", "limit", "size")

    def __init__(self, limit: int, size: int) -> None:
        self.limit = limit  #: failures per `WINDOW`; 0 is none
        self.size = size
        self._entries: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def blocked(self, name: str, host: str, now: float) -> bool:
        """Return True if this name must wait before it may try again from this address."""
        return bool(self.limit) and self._count(_identity(name, host), now) >= self.limit

    def failed(self, name: str, host: str, now: float) -> int:
        """Count a failure; returns how many there were lately."""
        key = _identity(name, host)
        count = self._count(key, now)
        since = self._entries[key][0] if count else now
        self._entries[key] = (since, count + 1)
        if len(self._entries) > self.size:
            self._entries.popitem(last=False)
        return count + 1

    def forget(self, name: str, host: str) -> None:
        """Forget the failures of a name that got in."""
        if self._entries:
            self._entries.pop(_identity(name, host), None)

    def _count(self, key: tuple[str, str], now: float) -> int:
        entry = self._entries.get(key)
        if entry is None:
            return 0
        if now - entry[0] >= WINDOW:
            del self._entries[key]
            return 0
        return entry[1]


class Known:
    """Names that have got in from an address, the latest `size` of them.

    They are what a flood of wrong passwords from the same address (a carrier's gateway, a proxy) is told apart by.
    """

    __slots__ = ("_entries", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._entries: OrderedDict[int, None] = OrderedDict()  # hashes: a collision only prefers one name too many

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, name: str, host: str) -> None:
        """Note that a name got in."""
        if not self.size:
            return
        key = hash(_identity(name, host))
        self._entries[key] = None
        self._entries.move_to_end(key)
        while len(self._entries) > self.size:
            self._entries.popitem(last=False)

    def has(self, name: str, host: str) -> bool:
        """Tell whether this name got in from this address before."""
        return hash(_identity(name, host)) in self._entries


def network_of(host: str) -> str:
    """Return the address that failures and work are counted for: of IPv6 the /64."""
    address = address_of(host)
    return address.exploded[:19] if address is not None and address.version == 6 else host


def _identity(name: str, host: str) -> tuple[str, str]:
    return name, network_of(host)
