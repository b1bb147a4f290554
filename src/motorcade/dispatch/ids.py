"""Ids of messages: the same entry of a stream always has the same id, whichever leader reads it. Pure.

    tttttttt-tttt-4ooo-Vooo-ssssssssssss

t: milliseconds of the entry's id, s: its sequence number, o: the origin, a random number that is drawn when the
consumer group is made (V: 8 to b, two bits of it too), so that a stream that was deleted and filled again has other
ids. The form is that of a UUID of version 4. An entry whose numbers do not fit (a client chose them) gets a digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from motorcade.dispatch.options import MESSAGE_FIELDS

#: Exclusive bounds of an origin and of the numbers of an entry's id.
ORIGINS: Final = 1 << 26
FITTING: Final = 1 << 48

ENVELOPE: Final = b'{"motorcade":1,'  #: how a message of a capture rule begins in a channel


class Namer:
    """Derive the ids of messages from the entries of one stream."""

    __slots__ = ("_origin", "_prefix", "_time")

    def __init__(self, origin: int) -> None:
        self._origin = origin
        self._time = b""
        self._prefix = b""

    def taken_apart(self, rows: Iterable[Any]) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """Return ids, entries and messages of a reply to XREADGROUP or XAUTOCLAIM."""
        ids: list[bytes] = []
        entries: list[bytes] = []
        messages: list[bytes] = []
        time, prefix = self._time, self._prefix
        for entry, fields in rows:
            if fields is None:  # deleted from the stream, but still pending in the group
                continue
            moment, _, number = entry.partition(b"-")
            if moment != time:
                time, prefix = moment, self._prefix_of(moment)
            sequence = int(number)
            ids.append(b"%b%012x" % (prefix, sequence) if prefix and sequence < FITTING else self._digest(entry))
            entries.append(entry)
            messages.append(fields[1] if len(fields) == 2 else message_of(fields))
        self._time, self._prefix = time, prefix
        return ids, entries, messages

    def _prefix_of(self, moment: bytes) -> bytes:
        time = int(moment)
        if time >= FITTING:
            return b""
        digits = f"{time:012x}"
        high, low = self._origin >> 14, self._origin & 0x3FFF
        return f"{digits[:8]}-{digits[8:]}-4{high:03x}-{0x8000 | low:04x}-".encode()

    def _digest(self, entry: bytes) -> bytes:
        raw = hashlib.blake2b(b"%d %b" % (self._origin, entry), digest_size=16).hexdigest()
        return f"{raw[:8]}-{raw[8:12]}-4{raw[13:16]}-8{raw[17:20]}-{raw[20:]}".encode()


def message_of(fields: list[bytes]) -> bytes:
    """Return the message in an entry with several fields (see `options.MESSAGE_FIELDS`)."""
    names = fields[::2]
    for wanted in MESSAGE_FIELDS:
        if wanted in names:
            return fields[2 * names.index(wanted) + 1]
    pairs = zip(names, fields[1::2], strict=True)
    return msgspec.json.encode({_text(name): _text(value) for name, value in pairs})


def message_of_channel(data: bytes) -> bytes:
    """Return what was published, without the line that a capture rule puts before it."""
    return data.partition(b"\n")[2] if data.startswith(ENVELOPE) else data


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
