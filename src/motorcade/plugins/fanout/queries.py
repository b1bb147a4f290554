"""Answers about requests: counts from the counters, single deliveries from the stream `receipts`.

The stream is read from where a request began to where it ended, page by page, so that others get their turn; receipts
of other requests are told by their first bytes. How much is remembered meanwhile is bounded, whatever the size of a
request:

    acked, failed, …   each delivery has one such receipt: those are the answer, in the order in which they ended
    sent, retried      the counters know which deliveries these are; by delivery id
    accepted, any      so many deliveries at a time (`WINDOW`), in the order in which they were accepted: the rest of
                       the stream is read for what became of them

Rule 1: asked again, the order is the same, so one can go on after the last delivery one has seen.
Rule 2: the place of that delivery is remembered, so going on does not begin at the beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Collection
from heapq import nsmallest
from itertools import islice
from typing import TYPE_CHECKING, Final

from motorcade.core import receipt as receipts
from motorcade.core.receipt import FINAL, LATE_ACK, Receipt, ReceiptError, State
from motorcade.core.record import RecordError
from motorcade.core.record import decode as decode_record
from motorcade.extension.declared import UnknownError
from motorcade.plugins.fanout.counters import RequestCounters, Tally
from motorcade.plugins.fanout.receipt_format import prefix_of
from motorcade.plugins.fanout.tables import RECEIPTS
from motorcade.plugins.fanout.views import PENDING, RequestView, TargetView, Wanted
from motorcade.storage.ports import Store

if TYPE_CHECKING:
    from motorcade.plugins.fanout.counting import CountingRole

STEP: Final = 1000  #: records read at once
WINDOW: Final = 20_000  #: deliveries followed at a time
PLACES: Final = 1000  #: deliveries whose place is remembered

_Found = tuple[int, Receipt]


class Queries:
    """Answers about requests."""

    def __init__(self, store: Store, counters: RequestCounters) -> None:
        self._store = store
        self._counters = counters
        self.role: CountingRole | None = None  #: with several members: who of them counts
        self._places: OrderedDict[tuple[str, Wanted, str], int] = OrderedDict()

    async def requests(self, after: str, limit: int) -> list[RequestView]:
        """Return requests in the order of their ids, after one of them."""
        await self._counters.ready()
        return [_view(tally) for tally in islice(self._counters.after(after), limit)]

    async def status(self, request_id: str) -> RequestView:
        """Return one request; `UnknownError`."""
        return _view(await self._tally(request_id))

    async def targets(self, request_id: str, state: Wanted, after: str, limit: int) -> list[TargetView]:
        """Return deliveries in a state with the receipt that says so; pending or None: with their last receipts."""
        tally = await self._tally(request_id)
        if limit <= 0:
            return []
        if isinstance(state, State) and state in (State.SENT, State.RETRIED):
            found = await self._open(tally, state, after, limit)
        elif isinstance(state, State) and state in FINAL:
            found = await self._ended(tally, state, after, limit)
        else:
            found = await self._accepted(tally, state, after, limit)
        return [TargetView.of(receipt) for _, receipt in found]

    async def _tally(self, request_id: str) -> Tally:
        await self._counters.ready()
        tally = self._counters.find(request_id)
        if tally is None:
            raise UnknownError(
                f"there is no request {request_id[:128]!r}; `motorcade fanout list` shows those there are"
            )
        return tally

    async def last_receipts(self, request_id: str, vins: Collection[str]) -> dict[str, Receipt]:
        """Return the last receipt of each delivery of some vehicles, by delivery id; all that is in the stream now."""
        if self.role is not None:
            begin = await self.role.place(request_id)
        else:
            await self._counters.ready()
            begin = self._counters.place(request_id)
        found: dict[str, Receipt] = {}
        async for _, receipt in self._scan(request_id, begin, (await self._store.streams.info(RECEIPTS)).last):
            name = receipt.delivery_id
            if receipt.vin in vins and (name not in found or found[name].state not in FINAL):
                found[name] = receipt
        return found

    # -- three ways through the stream

    async def _open(self, tally: Tally, state: State, after: str, limit: int) -> list[_Found]:
        names = nsmallest(limit, (name for name, now in tally.open.items() if now is state and name > after))
        found: dict[str, _Found | None] = dict.fromkeys(names)
        if found:
            async for offset, receipt in self._scan(tally.request_id, tally.begin, tally.end):
                if receipt.state is state and receipt.delivery_id in found:
                    found[receipt.delivery_id] = offset, receipt
        return [item for item in found.values() if item is not None]

    async def _ended(self, tally: Tally, state: State, after: str, limit: int) -> list[_Found]:
        place = await self._place(tally, state, after)
        found: dict[str, _Found] = {}  # by delivery: after a crash a receipt may be there twice
        async for offset, receipt in self._scan(tally.request_id, place, tally.end):
            if receipt.state is state:
                found.setdefault(receipt.delivery_id, (offset, receipt))
                if len(found) == limit:
                    break
        self._remember(tally, state, found)
        return list(found.values())

    async def _accepted(self, tally: Tally, state: Wanted, after: str, limit: int) -> list[_Found]:
        place = await self._place(tally, state, after)
        answer: dict[str, _Found] = {}
        more = True
        while more and len(answer) < limit:
            window = limit if state is None else WINDOW
            found, place, more = await self._follow(tally, state, place, window)
            answer |= islice(found.items(), limit - len(answer))
        self._remember(tally, state, answer)
        return list(answer.values())

    async def _follow(
        self, tally: Tally, state: Wanted, place: int, window: int
    ) -> tuple[dict[str, _Found], int, bool]:
        """Follow so many deliveries accepted behind a place: return those in a state now, the last place, any more."""
        found: dict[str, _Found] = {}
        count, more = 0, False
        async for offset, receipt in self._scan(tally.request_id, place, tally.end):
            name = receipt.delivery_id
            if receipt.state is State.ACCEPTED:
                if count == window:
                    more = True
                elif name not in found:
                    found[name] = offset, receipt
                    count, place = count + 1, offset
            elif name in found:
                if state is not None and (state != PENDING or receipt.state in FINAL):
                    del found[name]
                elif found[name][1].state not in FINAL:  # the last word, even if another one is stored after it
                    found[name] = found[name][0], receipt
        return found, place, more

    # -- places

    async def _place(self, tally: Tally, state: Wanted, after: str) -> int:
        """Return the offset behind which to go on."""
        if not after:
            return tally.begin
        place = self._places.get((tally.request_id, state, after))
        if place is not None:
            return place
        wanted = state if state in FINAL else State.ACCEPTED
        async for offset, receipt in self._scan(tally.request_id, tally.begin, tally.end):
            if receipt.state is wanted and receipt.delivery_id == after:
                return offset
        raise UnknownError(f"request {tally.request_id!r} has no delivery {after[:64]!r} in that state to go on after")

    def _remember(self, tally: Tally, state: Wanted, found: dict[str, _Found]) -> None:
        if found:
            name = next(reversed(found))
            self._places[tally.request_id, state, name] = found[name][0]
            if len(self._places) > PLACES:
                self._places.popitem(last=False)

    async def _scan(self, request_id: str, after: int, end: int) -> AsyncIterator[_Found]:
        """Read the receipts of a request behind an offset and up to another one."""
        prefix = prefix_of(request_id)
        while after < end:
            page = await self._store.streams.read(RECEIPTS, after, STEP)
            for record in page:
                if record.offset <= end and record.value.startswith(prefix):
                    try:
                        receipt = receipts.decode(decode_record(record.value).payload)
                    except (RecordError, ReceiptError):
                        continue  # the counters have logged it
                    if receipt.reason != LATE_ACK:  # that changes no state
                        yield record.offset, receipt
            after = page[-1].offset if len(page) == STEP else end


def _view(tally: Tally) -> RequestView:
    return RequestView(
        request_id=tally.request_id,
        status="active",
        since=tally.first_at,
        first_at=tally.first_at,
        last_at=tally.last_at,
        targets=tally.accepted,
        pending=tally.pending,
        states=tally.states(),
    )
