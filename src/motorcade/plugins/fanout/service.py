"""The service `fanout` (`views.Fanout`), for operators and other plugins."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, Literal

import msgspec
from msgspec import UNSET

from motorcade.core import receipt as receipts_
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.receipt import ReceiptError
from motorcade.core.record import RecordError
from motorcade.core.vin import check_vin
from motorcade.extension.ask_all import PATIENCE as SHORT
from motorcade.extension.ask_all import UnansweredError
from motorcade.extension.declared import ConflictError, UnknownError
from motorcade.plugins.fanout import batch as batches
from motorcade.plugins.fanout import views
from motorcade.plugins.fanout.batch import BadBatchError
from motorcade.plugins.fanout.inflight import ACTIVE, Delivery, EntryVerdict, Phase
from motorcade.plugins.fanout.ingress import Ingress
from motorcade.plugins.fanout.parts import Parts
from motorcade.plugins.fanout.record import EntryRecord, RequestRecord, Status, decode_entry
from motorcade.plugins.fanout.sweeper import Sweeper
from motorcade.plugins.fanout.tables import attempts_of, done_of, owner_of
from motorcade.plugins.fanout.views import (
    AcceptedView,
    DeliveryView,
    GcView,
    RequestView,
    TargetView,
    VehicleView,
    Wanted,
    WhyView,
)
from motorcade.storage.ports import Entry, StoreError, StoreFullError

VEHICLE: Final = "fanout.vehicle"
COLLECT: Final = "fanout.collect"
COLLECTING: Final = 600.0  #: seconds that a collection at another member may take
HISTORY = 1000  #: final receipts of a vehicle read at most


_encode = msgspec.msgpack.Encoder().encode
_decode_vehicle = msgspec.msgpack.Decoder(VehicleView).decode
_decode_gc = msgspec.msgpack.Decoder(GcView).decode


def _sum(one: GcView, another: GcView) -> GcView:
    """Return what two members have collected at the same time."""
    return GcView(
        vehicles=one.vehicles + another.vehicles,
        expired=one.expired + another.expired,
        cancelled=one.cancelled + another.cancelled,
        data=one.data + another.data,
        octets=one.octets + another.octets,
        seconds=max(one.seconds, another.seconds),
    )


def _decided(request_id: str, record: RequestRecord) -> RequestView:
    """Return a request of which only what operators have decided is known."""
    return RequestView(
        request_id=request_id,
        status=record.state,
        since=record.since,
        first_at=record.first_at,
        last_at=record.last_at,
        targets=record.targets,
        pending=0,
        states={},
    )


class FanoutService:
    """Implements `views.Fanout`."""

    def __init__(
        self,
        parts: Parts,
        ingress: Ingress,
        sweeper: Sweeper,
        collect: Callable[[], Awaitable[GcView]],
    ) -> None:
        self._parts = parts
        self._table = parts.table
        self._hub = parts.context.hub
        self._ingress = ingress
        self._sweeper = sweeper
        self._collect = collect

    def start(self) -> None:
        """Begin to answer other members."""
        members = self._parts.members
        if members is not None:
            at_end = self._parts.context.at_end
            at_end(members.cluster.on_ask(VEHICLE, self._answer_vehicle))
            at_end(members.cluster.on_ask(COLLECT, self._answer_collect))

    # -- requests

    async def send(
        self,
        vins: Sequence[str],
        request_id: str,
        data: bytes,
        expires_in: float | None = None,
        priority: int = 0,
        mode: str | None = None,
        batch_id: str | None = None,
    ) -> AcceptedView:
        """Send as a batch that carries its data does."""
        fields: dict[str, object] = {"ids": list(vins), "request_id": request_id, "priority": priority}
        fields |= {"data": b64encode(data).decode(), "encoding": "base64"}
        fields |= {"expires_in": expires_in} if expires_in is not None else {}
        fields |= {"mode": mode} if mode is not None else {}
        fields |= {"batch_id": batch_id} if batch_id is not None else {}
        parsed = batches.parse(msgspec.json.encode(fields), self._table.config, trigger=False)
        batch = self._ingress.submit(parsed, Message("", b""))
        await batch.done
        result = batch.result
        if result.refusal and result.reason is ReasonCode.QUOTA_EXCEEDED:
            raise StoreFullError(result.refusal)
        if result.refusal:
            raise BadBatchError(result.refusal)
        return AcceptedView(
            accepted=result.accepted,
            duplicates=result.duplicates,
            replaced=result.replaced,
            rejected=result.rejected,
            superseded=result.superseded or UNSET,
            repeated=result.repeated if batch.named is not None else UNSET,
        )

    async def requests(self, after: str, limit: int) -> Sequence[RequestView]:
        """Return requests in the order of their ids."""
        source = self._parts.role or self._parts.queries
        found = [self._shown(view) for view in await source.requests(after, limit)]
        known = {view.request_id for view in found}
        last = found[-1].request_id if len(found) == limit else ""
        found += [
            _decided(name, record)
            for name, record in self._table.requests.items()
            if record.state == "paused" and name > after and (not last or name < last) and name not in known
        ]
        return sorted(found, key=lambda view: view.request_id)[:limit]

    async def status(self, request_id: str) -> RequestView:
        """Return one request."""
        try:
            return self._shown(await (self._parts.role or self._parts.queries).status(request_id))
        except UnknownError:
            record = self._table.requests.get(request_id)
            if record is None:
                raise
            return _decided(request_id, record)  # its counts are forgotten (`max_requests`), what was decided is not

    def _shown(self, view: RequestView) -> RequestView:
        """Return a request with what operators have decided."""
        record = self._table.requests.get(view.request_id, ACTIVE)
        if record.state == "active" and not view.pending:
            return msgspec.structs.replace(view, status="complete", since=view.last_at)
        return msgspec.structs.replace(view, status=record.state, since=record.since or view.first_at)

    async def targets(self, request_id: str, state: Wanted, after: str, limit: int) -> Sequence[TargetView]:
        """Return the deliveries, each with its last receipt."""
        return await (self._parts.role or self._parts.queries).targets(request_id, state, after, limit)

    async def cancel(self, request_id: str) -> RequestView:
        """Call off what is pending now."""
        view = await self.status(request_id)  # `UnknownError`
        await self._parts.decisions.decide(request_id, partial(self._decided, view, "cancelled"))
        return await self.status(request_id)

    async def pause(self, request_id: str) -> RequestView:
        """Pass over its messages until `resume`."""
        view = await self.status(request_id)  # `UnknownError`
        await self._parts.decisions.decide(request_id, partial(self._decided, view, "paused"))
        return await self.status(request_id)

    async def resume(self, request_id: str) -> RequestView:
        """Go on with a request that was paused."""
        view = await self.status(request_id)  # `UnknownError`
        if self._table.requests.get(request_id, ACTIVE).state != "paused":
            raise ConflictError(f"request {request_id!r} is not paused")
        await self._parts.decisions.decide(request_id, partial(self._decided, view, "active"))
        return await self.status(request_id)

    def _decided(self, view: RequestView, state: Status, before: RequestRecord) -> RequestRecord:
        """Return the next decision about a request."""
        now, cancels = self._parts.now(), state == "cancelled"
        return RequestRecord(
            state,
            now,
            view.first_at,
            view.last_at,
            view.targets,
            max(now, before.cancelled_at) if cancels else before.cancelled_at,
            before.era + cancels,
        )

    async def gc(self) -> GcView:
        """Collect now."""
        if self._sweeper.running:
            raise ConflictError("a collection is under way; ask again when it is done")
        members = self._parts.members
        if members is None:
            return await self._collect()
        others, found = await asyncio.gather(members.ask_all(COLLECT, patience=COLLECTING), self._collect())
        if others.silent:
            raise UnansweredError("not all nodes have collected", others.silent)
        for body in others.found.values():
            found = _sum(found, _decode_gc(body))
        return found

    async def _answer_collect(self, _member: str, _body: bytes) -> bytes:
        """Collect in the cells of this member; that which is under way counts, if there is one."""
        await self._sweeper.idle.wait()
        return _encode(await self._collect())

    # -- vehicles

    async def why(self, vin: str) -> WhyView:
        """Return the one sentence about a vehicle."""
        check_vin(vin, check_digit=self._table.config.check_digit)
        try:
            return (await self.vehicle(vin)).why
        except StoreError as error:
            return views.store_unavailable(vin, str(error))

    async def vehicle(self, vin: str) -> VehicleView:
        """Return everything about a vehicle, as the node sees it that it is connected to."""
        check_vin(vin, check_digit=self._table.config.check_digit)
        members = self._parts.members
        if members is not None and self._hub.client(vin) is None:
            answers = await members.ask_all(VEHICLE, vin.encode(), patience=SHORT)
            for body in answers.found.values():
                if body:
                    return _decode_vehicle(body)
            if answers.silent:
                raise UnansweredError(f"where {vin} is connected is not known now", answers.silent)
        return await self._vehicle(vin)

    async def _answer_vehicle(self, _member: str, body: bytes) -> bytes:
        """Answer what is known of a vehicle that is connected here."""
        vin = body.decode()
        return _encode(await self._vehicle(vin)) if self._hub.client(vin) is not None else b""

    async def _vehicle(self, vin: str) -> VehicleView:
        parts, table, now = self._parts, self._table, self._parts.now()
        info = await parts.store.mailboxes.info(owner_of(vin))
        entries = await parts.store.mailboxes.read(owner_of(vin), 0, views.MAX_WAITING + 1, now)
        history = await self._history(vin)
        held = table.inflight.get(vin)
        shown = [view for entry in entries if (view := self._entry_view(vin, entry, held, now)) is not None]
        waiting = [view for view in shown if view.state in ("waiting", "paused")]
        waiting.sort(key=lambda view: (view.state == "paused", -view.priority))
        in_flight = next((view for view in shown if view.state in ("in_flight", "backing_off")), None)
        connected = self._hub.client(vin) is not None
        seen_at = await self._hub.seen_anywhere(vin)
        return VehicleView(
            vin=vin,
            connected=connected,
            seen_at=seen_at,
            subscribed=vin in table.sources,
            filter=table.config.filter_of(vin),
            pending=info.entries,
            in_flight=in_flight,
            waiting=waiting[: views.MAX_WAITING],
            history=history,
            why=self._why(vin, info.entries, in_flight, waiting, history, seen_at, connected=connected),
        )

    def _why(
        self,
        vin: str,
        pending: int,
        in_flight: DeliveryView | None,
        waiting: list[DeliveryView],
        history: list[TargetView],
        seen_at: float,
        *,
        connected: bool,
    ) -> WhyView:
        now = self._parts.now()
        head = in_flight or next(iter(waiting), None)
        if head is None:
            return views.nothing_pending(vin, history[0]) if history else views.not_known(vin)
        if not connected:
            return views.offline(vin, head, pending, now, seen_at)
        if vin not in self._table.sources:
            return views.not_subscribed(vin, head, pending, self._table.config.filter_of(vin), seen_at)
        if head.state == "in_flight":
            return views.in_flight(vin, head, pending, now)
        if head.state == "backing_off":
            return views.backing_off(vin, head, pending, now, self._table.config.max_attempts)
        if head.state == "paused":
            return views.paused(vin, head, pending)
        held = self._table.inflight.get(vin)
        if held is not None and held.phase is Phase.OVER:
            return views.window_full(vin, head, pending, 1)
        if held is not None and held.phase is Phase.CLAIMED:
            return views.window_full(vin, head, pending, 0)
        return views.dispatching(vin, head, pending)

    def _entry_view(self, vin: str, entry: Entry, held: Delivery | None, now: float) -> DeliveryView | None:
        if (vin, entry.position) in self._table.ended:
            return None
        try:
            record = decode_entry(entry.body)
        except RecordError:
            return None
        config = self._table.config
        ends = record.accepted_at + config.data_retention
        view = DeliveryView(
            delivery_id=receipts_.delivery_id(vin, entry.position),
            request_id=record.request_id,
            state=self._state(record, now),
            accepted_at=record.accepted_at,
            expires_at=min(ends, record.expires_at) if record.expires_at else ends,
            priority=record.priority,
            attempts=attempts_of(entry.mark),
            size=len(entry.payload),
            publisher=record.publisher,
        )
        if held is None or held.position != entry.position or held.phase is Phase.CLAIMED:
            return view
        if held.phase is Phase.BACKING_OFF:
            return msgspec.structs.replace(view, state="backing_off", attempts=held.attempts, until=held.since)
        until = held.since + config.ack_timeout if config.ack_timeout and vin in self._table.sources else 0.0
        return msgspec.structs.replace(view, state="in_flight", attempts=held.attempts, sent_at=held.since, until=until)

    def _state(self, record: EntryRecord, now: float) -> Literal["waiting", "paused"]:
        return "paused" if self._table.judge(record, now) is EntryVerdict.LATER else "waiting"

    async def _history(self, vin: str) -> list[TargetView]:
        entries = await self._parts.store.mailboxes.read(done_of(vin), 0, HISTORY, self._parts.now())
        found: dict[str, TargetView] = {}  # where batches are not atomic, something may have been written twice
        for entry in reversed(entries):
            try:
                receipt = receipts_.decode(entry.body)
            except ReceiptError:
                continue
            found.setdefault(receipt.delivery_id, TargetView.of(receipt))
        return list(found.values())
