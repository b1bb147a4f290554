"""A batch on its way into the store, and its place in the line.

begun ─▶ its receipts are being written; those of the next batch may be, too (the store keeps the order)
over  ─▶ everything about it, and about all batches before it, is stored or will never be: it may be sent, and its
         publisher is told
"""

from __future__ import annotations

import asyncio
from secrets import token_bytes

from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import Handled
from motorcade.plugins.fanout.batch import Batch
from motorcade.plugins.fanout.record import BatchRecord, IntentRecord, Named


class Accepted:
    """What became of a batch."""

    __slots__ = ("accepted", "duplicates", "reason", "refusal", "rejected", "repeated", "replaced", "superseded")

    def __init__(self, duplicates: int) -> None:
        self.refusal = ""  #: why nothing of it was taken
        self.reason = ReasonCode.PAYLOAD_FORMAT_INVALID  #: the same as a code
        self.accepted = 0
        self.duplicates = duplicates
        self.replaced = 0
        self.rejected = 0
        self.superseded = 0
        self.repeated = False

    def refuse(self, refusal: str, reason: ReasonCode = ReasonCode.PAYLOAD_FORMAT_INVALID) -> None:
        """Nothing of it is taken."""
        self.refusal, self.reason = refusal, reason

    def repeat(self, known: BatchRecord) -> None:
        """It was taken before."""
        self.repeated = True
        self.accepted, self.duplicates, self.replaced = known.accepted, known.duplicates, known.replaced
        self.rejected, self.superseded = known.rejected, known.superseded

    def add(self, known: BatchRecord) -> None:
        """A part of it was taken before."""
        self.accepted += known.accepted
        self.replaced += known.replaced
        self.rejected += known.rejected
        self.superseded += known.superseded

    def answer(self) -> Handled:
        """What the publisher hears."""
        if self.refusal:
            return Handled(self.reason, self.refusal)
        told = [("accepted", self.accepted), ("duplicates", self.duplicates), ("replaced", self.replaced)]
        if self.rejected:
            told.append(("rejected", self.rejected))
        if self.superseded:
            told.append(("superseded", self.superseded))
        if self.repeated:
            told.append(("repeated", 1))
        return Handled(user_properties=tuple((name, str(value)) for name, value in told))


class Job:
    """A batch on its way."""

    __slots__ = (
        "batch",
        "before",
        "begun",
        "done",
        "doubted",
        "guid",
        "key",
        "known",
        "named",
        "now",
        "over",
        "publisher",
        "result",
    )

    def __init__(self, batch: Batch, message: Message, now: float, named: Named | None = None) -> None:
        self.batch = batch
        self.named = named  #: it has an id
        self.known: BatchRecord | None = None  #: a part of it was stored before; this is the rest
        self.guid = message.guid or token_bytes(16)
        self.publisher = message.publisher
        self.now = now
        self.key = self.guid.hex()  #: of its intent
        self.result = Accepted(batch.duplicates)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.before: Job | None = None  #: in the line, until that is over
        self.begun = asyncio.Event()
        self.over = asyncio.Event()
        self.doubted = False  #: the store did not say whether its entries are stored

    def intent(self) -> IntentRecord:
        """What is stored with its entries."""
        return IntentRecord(self.batch.request_id, "".join(self.batch.vins), self.now, self.named)

    async def may_begin(self) -> None:
        """Wait until the receipts of the batch before it are being written."""
        if self.before is not None:
            await self.before.begun.wait()

    async def may_end(self) -> None:
        """Wait until the batches before it are over."""
        if self.before is not None:
            await self.before.over.wait()
            self.before = None

    def finish(self, error: Exception | None = None) -> None:
        """Tell the publisher, unless it knows."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
            self.done.exception()  # seen: nobody may be left to look at it
