"""The places of keys: names to cells, cells to slots; `redis.slots` has the rest of the way to a server.

    owner, record ──homes.py──> home
    home, stream, lease, digest ──crc32 mod count──> cell ──hash tag {cell}──> slot ──topology──> server

A cell is what one script call can change at once. Everything of one home is in one cell: its mailboxes, its records,
where it is attached, its fence. The number of cells is fixed when a store is created (`meta`), because every node has
to come to the same cell; it should be a few times the number of masters, and no more, since each cell that a batch
touches costs a call.

All keys, where P is the store's prefix and N the cell:

    P:meta                  hash    version, cells; importing: while, or after a crash while, it was being filled
    P:{N}:w:writer          string  number and answers of a writer's last call (see commit.lua); 'closed': it is fenced
    P:{0}:w                 hash    writer -> second it was seen last, when it was opened: all that are registered
    P:{N}:n                 hash    counters: entries, records, blobs, bytes of blobs, notes
    P:{N}:a                 hash    home -> NUMBER:TOKEN:MEMBER, its fence and who has attached it
    P:{N}:p                 string  floor: positions of a mailbox that is made begin above it
    P:{N}:H                 string  HISTORY:HORIZON: that of the server that wrote last, and the position above which
                                    others are given since (commit.lua); on a lone server in one cell, for all
    P:{N}:o                 set     owners with entries
    P:{N}:e:owner           hash    POSITION -> entry; m POSITION -> mark; k KEY -> position (without the blanks);
                                    s -> its state (see redis_format)
    P:{N}:g:owner           zset    positions between first and last that are gone: 'FROM:TO' by FROM
    P:{N}:d:owner           zset    positions of the droppable entries
    P:{N}:x:owner           zset    position -> when the entry expires
    P:{N}:q:owner           zset    claims: 'POSITION:WRITER' by POSITION
    P:{N}:u:owner           zset    positions below the highest claim that are not claimed
    P:{N}:v:owner           hash    writer -> how many claims it has
    P:{N}:t0:owner          hash    token -> position and time, of appends in even hours; '' -> the hour
    P:{N}:t1:owner          hash    the same for odd hours
    P:{N}:x                 zset    owner -> when its next entry expires, or sooner (`soon` of its state)
    P:{N}:r                 hash    digest -> entries of this cell that refer to it
    P:{N}:b:digest          string  blob: keep_until (8 bytes), data
    P:{N}:b                 hash    digest -> size: all blobs of this cell
    P:{N}:h:digest          zset    appends under way that will refer to the blob -> until when they count
    P:{N}:c:digest          string  condemned by this sweep, unless it is wanted again
    P:{N}:R:collection      hash    key -> expires_at (8 bytes), value
    P:{N}:i:home            set     collection NUL key: records of a home that are not found by its name (`homes`)
    P:{N}:y                 zset    collection NUL key NUL home (if it is in i:home) -> when the record expires
    P:{N}:D                 zset    home -> when it is due
    P:{N}:F                 stream  NUMBER-0 -> n: nonce, d: data: the feed of changes
    P:{N}:T                 stream  of a store that is traced: what was decided (see trace.lua)
    P:{N}:S:stream          stream  OFFSET-0 -> t: time, v: value
    P:{N}:s:stream          hash    last, time, bytes
    P:{N}:s                 set     streams
    P:{N}:l:name            hash    a lease: token, holder; the key expires when the lease does
    P:{N}:f:name            string  fencing token given last
    P:{N}:f                 string  in a store that was imported: fencing tokens of other names begin above it
    P:n:{node}              channel of wake-ups
"""

from __future__ import annotations

import zlib

from motorcade.redis.slots import slot_of
from motorcade.storage.homes import home_of_owner, home_of_record

DEFAULT_CELLS = 64


class Cells:
    """Names to cells and keys."""

    def __init__(self, prefix: str, count: int) -> None:
        self.prefix = prefix
        self.count = count
        self._bases = [f"{prefix}:{{{cell}}}:" for cell in range(count)]
        self._slots = [slot_of(base) for base in self._bases]

    def of(self, name: str | bytes) -> int:
        """Return the cell of a home, a stream, a lease or a digest."""
        return zlib.crc32(name if isinstance(name, bytes) else name.encode()) % self.count

    def of_owner(self, owner: str) -> int:
        return self.of(home_of_owner(owner))

    def of_record(self, collection: str, key: str) -> int:
        return self.of(home_of_record(collection, key))

    def key(self, cell: int, rest: str) -> str:
        return self._bases[cell] + rest

    def slot(self, cell: int) -> int:
        return self._slots[cell]

    def channel(self, node: str) -> str:
        """Return the channel of a node's wake-ups."""
        return f"{self.prefix}:n:{{{node}}}"
