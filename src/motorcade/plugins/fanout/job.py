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


class Accepted:
    """What became of a batch."""

    __slots__ = ("accepted", "duplicates", "refusal", "rejected", "replaced")

    def __init__(self, duplicates: int) -> None:
        self.refusal = ""  #: why nothing of it was taken
        self.accepted = 0
        self.duplicates = duplicates
        self.replaced = 0
        self.rejected = 0

    def answer(self) -> Handled:
        """What the publisher hears."""
        if self.refusal:
            return Handled(ReasonCode.PAYLOAD_FORMAT_INVALID, self.refusal)
        told = [("accepted", self.accepted), ("duplicates", self.duplicates), ("replaced", self.replaced)]
        if self.rejected:
            told.append(("rejected", self.rejected))
        return Handled(user_properties=tuple((name, str(value)) for name, value in told))


class Job:
    """A batch on its way."""

    __slots__ = ("batch", "before", "begun", "done", "doubted", "guid", "key", "now", "over", "publisher", "result")

    def __init__(self, batch: Batch, message: Message, now: float) -> None:
        self.batch = batch
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
