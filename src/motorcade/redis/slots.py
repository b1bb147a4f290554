"""Keys to slots, and slots to servers. A lone server has all slots."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from motorcade.core.errors import StoreError
from motorcade.redis.resp import ServerAddress

SLOTS = 16384


def slot_of(key: str) -> int:
    """Return the cluster's slot of a key: CRC16 of what stands in the first braces, if anything does."""
    start = key.find("{")
    if start >= 0:
        end = key.find("}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return crc_hqx(key.encode(), 0) % SLOTS


@dataclass(frozen=True, slots=True)
class Topology:
    """The master of each slot; a lone server is master of all."""

    ends: tuple[int, ...]  #: last slot of each range, ascending
    masters: tuple[ServerAddress | None, ...]  #: of each range; None: no server has it

    @classmethod
    def alone(cls, address: ServerAddress) -> Topology:
        return cls((SLOTS - 1,), (address,))

    @classmethod
    def parse(cls, reply: Sequence[Any], asked: ServerAddress) -> Topology:
        """Parse the answer to CLUSTER SLOTS. A server that does not know its own host is where we asked."""
        ends: list[int] = []
        masters: list[ServerAddress | None] = []
        following = 0
        for start, end, master, *_ in sorted(reply, key=lambda line: int(line[0])):
            if start > following:
                ends.append(start - 1)
                masters.append(None)
            host = (master[0] or b"").decode()
            ends.append(end)
            masters.append(ServerAddress(host if host not in {"", "?"} else asked.host, int(master[1])))
            following = end + 1
        if following < SLOTS:
            ends.append(SLOTS - 1)
            masters.append(None)
        return cls(tuple(ends), tuple(masters))

    def master(self, slot: int) -> ServerAddress | None:
        for end, master in zip(self.ends, self.masters, strict=True):
            if slot <= end:
                return master
        raise StoreError(f"no slot {slot}")

    def all_masters(self) -> list[ServerAddress]:
        return sorted({master for master in self.masters if master is not None})

    @property
    def is_whole(self) -> bool:
        return None not in self.masters
