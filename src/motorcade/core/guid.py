"""128-bit message ids that sort by time and stay unique when the clock steps back.

    | timestamp, microseconds | node + process | sequence |
    |<------- 64 bits ------->|<-- 48 bits --->|<- 16 b ->|

Rule 1: ids of one factory only grow. When the clock stands still or steps back, the last
timestamp is kept and the sequence counts on; when the sequence is used up, the timestamp
is moved on by one microsecond.
Rule 2: the 48 bits tell two factories apart: 16 bits of the node's name, 32 bits of the process. In a cluster they are
the number of the member, which no other one ever has: in containers all processes have the same number.
"""

from __future__ import annotations

import hashlib
from typing import Final

MEMBER: Final = 1 << 47  #: the bit that is set in the origin of a member


class GuidFactory:
    """Makes the ids of one node process."""

    __slots__ = ("_last", "_origin", "_sequence")

    def __init__(self, node: str, process: int) -> None:
        digest = hashlib.blake2b(node.encode(), digest_size=2).digest()
        self._origin = int.from_bytes(digest, "big") << 32 | process & 0xFFFFFFFF
        self._last = 0
        self._sequence = 0

    @classmethod
    def of_member(cls, number: int) -> GuidFactory:
        """Return the factory of a member of a cluster."""
        factory = cls("", 0)
        factory._origin = MEMBER | number & 0x7FFF_FFFF_FFFF
        return factory

    def next(self, microseconds: int) -> bytes:
        """Return the next id, for a message that arrived at this time (microseconds since the epoch)."""
        if microseconds > self._last:
            self._last = microseconds
            self._sequence = 0
        elif self._sequence < 0xFFFF:
            self._sequence += 1
        else:
            self._last += 1
            self._sequence = 0
        return (self._last << 64 | self._origin << 16 | self._sequence).to_bytes(16, "big")


def timestamp_of(guid: bytes) -> int:
    """Return the microseconds since the epoch at which the message arrived."""
    return int.from_bytes(guid[:8], "big")
