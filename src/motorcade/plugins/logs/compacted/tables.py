"""The tables of compacted queues in the store.

    mailbox  ecq:{CLIENTID}                        an exclusive queue
    mailbox  scq:{QUEUE}                           a shared queue
             position                              the sequence number; grows, and is never used again, not even when
                                                   the queue is empty or was deleted: a mailbox is never `forget`ed
             key                                   the key of the message: an append replaces the entry of the same key
                                                   in the same batch
             body, payload                         `record.py`
             expiry                                the message's own; the retention is counted from the time of storing
             token                                 QoS 2: an append that is repeated after an error is done once
    records  compacted / {mailbox}                 there is such a queue; its body is [1, time of its first message]
    records  ecq-progress / {CLIENTID}             how far its consumer is: [1, number, time of the last change]
    records  scq-progress / {QUEUE}/{CLIENTID}     the same for each consumer of a shared queue

Names are one level of a topic, so they hold no slash, and no client gets at the progress of another one.
"""

from __future__ import annotations

from typing import Final

import msgspec

from motorcade.delivery.progress import LogKey
from motorcade.extension.compacted import CompactedKind

QUEUES: Final = "compacted"


class Shape(msgspec.Struct, frozen=True, eq=False):
    """The differences of the two forms."""

    form: CompactedKind
    root: str  #: first level of all topics
    owners: str  #: beginning of the names of mailboxes
    progress: str  #: collection of records
    number: str  #: user property of deliveries

    def owner_of(self, name: str) -> str:
        """Return the mailbox of a queue."""
        return self.owners + name

    def log_key(self, name: str) -> LogKey:
        """Return where the progress of the consumers of a queue is stored."""
        return LogKey(self.progress, name, single=self.form is CompactedKind.EXCLUSIVE)


EXCLUSIVE: Final = Shape(CompactedKind.EXCLUSIVE, "$ECQ", "ecq:", "ecq-progress", "ecq-seqno")
SHARED: Final = Shape(CompactedKind.SHARED, "$SCQ", "scq:", "scq-progress", "scq-seqno")
SHAPES: Final = {CompactedKind.EXCLUSIVE: EXCLUSIVE, CompactedKind.SHARED: SHARED}


class CompactedQueueRecord(msgspec.Struct, array_like=True, tag=1, frozen=True, gc=False):
    """That there is a queue."""

    since: float


encode: Final = msgspec.msgpack.Encoder().encode
decode_queue: Final = msgspec.msgpack.Decoder(CompactedQueueRecord).decode
