"""Bytes as TCP brings them, for readers of frames: what is not complete yet is kept until the rest has come."""

from __future__ import annotations


class Pieces:
    """The beginning of a frame. Its pieces are joined once, however many there are."""

    __slots__ = ("_have", "_need", "_parts")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._have = 0
        self._need = 0  #: bytes without which nothing new can be read

    def together(self, data: bytes) -> bytes:
        """Return what has come so far; nothing if that is known to be too little."""
        self._parts.append(data)
        self._have += len(data)
        if self._have < self._need:
            return b""
        whole = b"".join(self._parts) if len(self._parts) > 1 else data
        self._parts.clear()
        self._have = self._need = 0
        return whole

    def keep(self, rest: bytes, need: int) -> None:
        """Keep the beginning of a frame, of which `need` bytes must be there to read on."""
        if rest:
            self._parts.append(rest)
            self._have = len(rest)
            self._need = need
