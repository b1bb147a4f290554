"""The ends of deliveries, where several members may end the same one.

    end ─▶ one write: the entry is taken, history, untold record ─(and then)─▶ receipt into the stream
              │                                                                   └─▶ the untold record goes, later
              └ the entry is gone: another member has ended it, and tells its receipt

Rule 1: the store decides who ends a delivery: the one that removes its entry (`Batch.take`) tells the receipt. An
        append that replaces an entry removes it, too: then its batch tells.
Rule 2: the untold record is written in the cell of the vehicle, together with that. It goes when the receipt is in the
        stream. What a member that died has left is told by the steward of the cell, who looks first whether the stream
        has it. To tell is claimed by writing the own name into the record: so each receipt is told once.
Rule 3: an acknowledgement that comes when the delivery has ended otherwise is told as `late_ack`, behind the receipt
        that it is late for, so when this member hears of that.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from motorcade.commit import Commit
from motorcade.core import receipt as receipts
from motorcade.core.receipt import Receipt, ReceiptError, State
from motorcade.core.recent import RecentSet
from motorcade.core.record import RecordError
from motorcade.core.record import decode as decode_record
from motorcade.extension.plugin import Context
from motorcade.plugins.fanout.inflight import Delivery, InflightTable
from motorcade.plugins.fanout.members import FanoutMembers
from motorcade.plugins.fanout.receipt_format import ReceiptFormat, history_draft
from motorcade.plugins.fanout.record import MAX_APART, UntoldRecord, decode_untold, encode
from motorcade.plugins.fanout.tables import RECEIPTS, UNTOLD, done_of, owner_of, untold_of
from motorcade.storage.ports import (
    Batch,
    Bound,
    Store,
    StoreConflictError,
    StoreError,
    StoreFencedError,
    Written,
)

if TYPE_CHECKING:
    from motorcade.plugins.fanout.receipt_writer import ReceiptWriter

RETRY: Final = 1.0  #: seconds until a write that was refused is tried again
FORGET: Final = 0.2  #: seconds for which records that are told are gathered, to go together
STEP: Final = 1000  #: records of the stream read at once
MAX_LOST: Final = 10_000  #: acknowledgements that were too late, until it is heard what they were too late for


@dataclass(slots=True, eq=False)
class DeliveryEnd:
    """A delivery that is being ended."""

    delivery: Delivery
    receipt: Receipt
    key: str
    value: bytes  #: of the untold record
    over: Commit[bool]  #: True: it was ended here
    in_doubt: bool = False  #: some of it may be written


class Outbox:
    """The ends that one member writes."""

    def __init__(
        self, context: Context, members: FanoutMembers | None, table: InflightTable, writer: ReceiptWriter
    ) -> None:
        self._context = context
        self._store: Store = context.store
        self._now = context.hub.now
        self._counters = context.counters
        self._members = members
        self._table = table
        self._writer = writer
        self._format: ReceiptFormat = writer.format
        self._loop = asyncio.get_running_loop()
        self._told: list[str] = []  # keys of untold records that are to go
        self._forgetting = False
        self._replaced: RecentSet[tuple[str, int]] = RecentSet(MAX_LOST)  # of which this member has heard
        self._lost: OrderedDict[tuple[str, int], Delivery] = OrderedDict()  # acknowledged, and ended otherwise (rule 3)
        self._claimed: set[str] = set()  # keys of records that others have left, until they are told
        self._closed = False

    def close(self) -> None:
        """Write nothing more."""
        self._closed = True

    # -- ends

    def end(self, delivery: Delivery, receipt: Receipt) -> Commit[bool]:
        """End a delivery with its final receipt; True when that is told, False if it has ended otherwise.

        What the store refuses is written again, for ever.
        """
        assert self._members is not None  # noqa: S101 - a node by itself ends many in one write
        record = UntoldRecord(self._members.me, receipts.encode(receipt))
        key = untold_of(delivery.vin, delivery.position)
        ending = DeliveryEnd(delivery, receipt, key, encode(record), Commit())
        self._write(ending)
        return ending.over

    def _write(self, ending: DeliveryEnd) -> None:
        if self._closed:
            return
        delivery, config, now = ending.delivery, self._table.config, self._now()
        batch = Batch()
        batch.take(owner_of(delivery.vin), delivery.position)
        history = history_draft(ending.receipt, config)
        batch.append([done_of(delivery.vin)], history, now, Bound(entries=config.history))
        batch.put(UNTOLD, ending.key, ending.value)
        batch.stream(RECEIPTS, self._format.values([ending.receipt], now), now)
        commit = self._store.write(batch)
        commit.then(partial(self._written, ending, commit))

    def _written(self, ending: DeliveryEnd, commit: Commit[Written]) -> None:
        if self._closed:
            return
        error = commit.error
        if error is None:
            self._writer.finished += 1 - len(commit.result.appended[0].dropped)
            self._is_told(ending)
        elif isinstance(error, StoreConflictError) and not ending.in_doubt:
            self._is_lost(ending)
        elif isinstance(error, StoreFencedError):
            self.close()  # so is everything else; this member ends
        else:
            self._writer.note_refusal(error)
            ending.in_doubt = ending.in_doubt or not commit.refused or isinstance(error, StoreConflictError)
            again = self._begin_looking if ending.in_doubt else self._write
            if isinstance(error, StoreConflictError):
                again(ending)
            else:
                self._loop.call_later(RETRY, again, ending)

    def _begin_looking(self, ending: DeliveryEnd) -> None:
        if not self._closed:
            self._context.spawn(self._look(ending), "ending")

    async def _look(self, ending: DeliveryEnd) -> None:
        """Find out whether an end was written, and tell it then."""
        try:
            if await self._store.records.get(UNTOLD, ending.key, self._now()) == ending.value:
                found = await self._in_stream([ending.receipt])
                if ending.receipt.delivery_id not in found:
                    await self._store.write(self._telling(ending.receipt))
                self._is_told(ending)
                return
        except StoreError:
            self._loop.call_later(RETRY, self._begin_looking, ending)
            return
        ending.in_doubt = False  # nothing of it is there: it can be tried again
        self._write(ending)

    def _telling(self, receipt: Receipt) -> Batch:
        batch, now = Batch(), self._now()
        batch.stream(RECEIPTS, self._format.values([receipt], now), now)
        return batch

    def _is_told(self, ending: DeliveryEnd) -> None:
        self._forget(ending.key)
        self._writer.told([ending.receipt])
        ending.over.settle(True)

    def _is_lost(self, ending: DeliveryEnd) -> None:
        """Another member, or a batch, has ended it."""
        self._counters["ends_elsewhere"] += 1
        delivery = ending.delivery
        name = (delivery.vin, delivery.position)
        if ending.receipt.state is State.ACKED:
            if name in self._replaced:
                self._writer.note_late(delivery)
            else:
                self._lost[name] = delivery
                if len(self._lost) > MAX_LOST:
                    self._lost.popitem(last=False)
        ending.over.settle(False)

    def replaced(self, vin: str, position: int) -> None:
        """Note that a delivery has ended, as its `replaced` receipt is stored (rule 3)."""
        name = (vin, position)
        self._replaced.add(name)
        delivery = self._lost.pop(name, None)
        if delivery is not None:
            self._writer.note_late(delivery)

    # -- records that are told go

    def _forget(self, key: str) -> None:
        self._told.append(key)
        if not self._forgetting:
            self._forgetting = True
            self._loop.call_later(FORGET, self._forget_told)

    async def settle(self) -> None:
        """Remove the records that are told, before this member leaves."""
        if self._told:
            batch, self._told = self._deleting(self._told), []
            await self._store.write(batch)

    def _deleting(self, keys: Iterable[str]) -> Batch:
        batch = Batch()
        for key in keys:
            batch.delete(UNTOLD, key)
        return batch

    def _forget_told(self) -> None:
        keys, self._told = self._told, []
        commit = self._store.write(self._deleting(keys))
        commit.then(partial(self._forgotten, commit, keys))

    def _forgotten(self, commit: Commit[Written], keys: list[str]) -> None:
        if commit.error is not None and not isinstance(commit.error, StoreFencedError):
            self._told = [*keys, *self._told]
        self._forgetting = bool(self._told) and not self._closed
        if self._forgetting:
            self._loop.call_later(RETRY if commit.error is not None else FORGET, self._forget_told)

    # -- what others have left

    async def tell_left(self, feed: int | None = None) -> int:
        """Tell what members that are gone have left untold in a cell (rule 2), or, by itself, in all; how many."""
        now, left = self._now(), dict[str, Receipt]()
        async for key, value in self._store.records.scan(UNTOLD, now, feed=feed):
            try:
                record = decode_untold(value)
                receipt = receipts.decode(record.receipt)
            except (RecordError, ReceiptError) as error:
                self._context.log.warning("fanout_untold_unreadable", key=key, error=str(error))
                continue
            if key in self._claimed or await self._claim(key, value, record):
                self._claimed.add(key)
                left[key] = receipt
        if left:
            found = await self._in_stream(left.values())
            untold = [receipt for receipt in left.values() if receipt.delivery_id not in found]
            batch = Batch()
            batch.stream(RECEIPTS, self._format.values(untold, now), now)
            if untold:
                await self._store.write(batch)
                self._writer.told(untold)
            for key in left:
                self._claimed.discard(key)
                self._forget(key)
        return len(left)

    async def _claim(self, key: str, value: bytes, record: UntoldRecord) -> bool:
        """Become who tells a receipt; False if another member does."""
        if self._members is None:
            return True
        if self._members.is_alive(record.member):
            return False
        batch = Batch()
        batch.put(UNTOLD, key, encode(UntoldRecord(self._members.me, record.receipt)), expect=value, now=self._now())
        try:
            await self._store.write(batch)
        except StoreConflictError:
            return False
        return True

    async def untold(self, names: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
        """Return those of these deliveries whose final receipts are about to be told."""
        found = set()
        for vin, position in names:
            if await self._store.records.get(UNTOLD, untold_of(vin, position), self._now()) is not None:
                found.add((vin, position))
        return found

    async def _in_stream(self, wanted: Iterable[Receipt]) -> set[str]:
        """Return those of these deliveries whose final receipt is in the stream."""
        names = {receipt.delivery_id for receipt in wanted}
        since = min(receipt.time for receipt in wanted) - MAX_APART
        streams, found = self._store.streams, set[str]()
        after = await streams.find(RECEIPTS, since)
        while True:
            page = await streams.read(RECEIPTS, after, STEP)
            for record in page:
                try:
                    receipt = receipts.decode(decode_record(record.value).payload)
                except (RecordError, ReceiptError):
                    continue
                if receipt.state in receipts.FINAL and receipt.delivery_id in names:
                    found.add(receipt.delivery_id)
            if len(page) < STEP:
                return found
            after = page[-1].offset
