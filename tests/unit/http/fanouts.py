"""A plugin that stands in for the fan-out: in memory, all that `Fanout` promises operators and nothing more.

What the control port and `motorcade fanout` do with such a service is tested against it, apart from what the real one
does: requests and vehicles are in the states that a test wants to see.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.receipt import FINAL, State
from motorcade.core.vin import check_vin
from motorcade.extension.declared import ConflictError, UnknownError
from motorcade.extension.hooks import Handled, Stop, acknowledge_after
from motorcade.extension.plugin import Plugin, hook
from motorcade.plugins.fanout import views
from motorcade.plugins.fanout.batch import BadBatchError, check_request_id, data_digests, parse
from motorcade.plugins.fanout.options import FanoutConfig
from motorcade.plugins.fanout.tables import DATA_PREFIX, TRIGGER
from motorcade.storage.ports import StoreError

NOW = 1_760_000_000.0
REFUSED = "LMCAAAAA1RA999999"  #: whoever names it is refused
HANGS_UP = "LMCAAAAA3RA888888"  #: whoever names it hears nothing more
SILENT = "LMCAAAAA5RA777777"  #: whoever names it waits for ever; told on `test/silent`
BROKEN = "store-is-broken"  #: a request of this id is one that the store does not know about


class Requests:
    """The service."""

    def __init__(self) -> None:
        self.config = FanoutConfig()
        self.deliveries: dict[str, dict[str, views.TargetView]] = {}
        self.status_of: dict[str, Any] = {}
        self.sent: dict[
            str, tuple[bytes, float, int, str | None]
        ] = {}  #: by request and VIN: data, time, priority, mode
        self.batch_ids: set[tuple[str, str]] = set()  #: with the request
        self.collect = asyncio.Event()
        self.collecting = False

    async def send(
        self,
        vins: Sequence[str],
        request_id: str,
        data: bytes,
        expires_in: float | None = None,
        priority: int = 0,
        mode: str | None = None,
        batch_id: str | None = None,
    ) -> views.AcceptedView:
        accepted = self.accept(vins, request_id, data, expires_in, priority, mode)
        if batch_id is None:
            return accepted
        repeated = (request_id, batch_id) in self.batch_ids
        self.batch_ids.add((request_id, batch_id))
        return msgspec.structs.replace(accepted, repeated=repeated)

    def accept(
        self,
        vins: Sequence[str],
        request_id: str,
        data: bytes,
        expires_in: float | None,
        priority: int,
        mode: str | None,
    ) -> views.AcceptedView:
        check_request_id(request_id)
        for vin in vins:
            check_vin(vin)
        if REFUSED in vins:
            raise BadBatchError(f"ids: {REFUSED} is not welcome here")
        deliveries = self.deliveries.setdefault(request_id, {})
        self.status_of.setdefault(request_id, "active")
        replaced = sum(f"{vin}.1" in deliveries for vin in set(vins))
        for vin in vins:
            self.sent[f"{request_id} {vin}"] = data, expires_in or 60.0, priority, mode
            deliveries[f"{vin}.1"] = views.TargetView(
                vin=vin, request_id=request_id, delivery_id=f"{vin}.1", state=State.ACCEPTED, time=NOW, attempt=0
            )
        return views.AcceptedView(accepted=len(set(vins)), duplicates=len(vins) - len(set(vins)), replaced=replaced)

    async def requests(self, after: str, limit: int) -> Sequence[views.RequestView]:
        return [self.view(request_id) for request_id in sorted(self.deliveries) if request_id > after][:limit]

    async def status(self, request_id: str) -> views.RequestView:
        return self.view(request_id)

    def view(self, request_id: str) -> views.RequestView:
        if request_id == BROKEN:
            raise StoreError("the store does not answer")
        if request_id not in self.deliveries:
            raise UnknownError(f"there is no request {request_id!r}")
        states = Counter(target.state for target in self.deliveries[request_id].values())
        return views.RequestView(
            request_id=request_id,
            status=self.status_of[request_id],
            since=NOW,
            first_at=NOW,
            last_at=NOW + 1,
            targets=states.total(),
            pending=sum(count for state, count in states.items() if state not in FINAL),
            states=dict(states),
        )

    async def targets(self, request_id: str, state: State | None, after: str, limit: int) -> Sequence[views.TargetView]:
        self.view(request_id)
        found = sorted(self.deliveries[request_id].values(), key=lambda target: target.delivery_id)
        return [target for target in found if target.delivery_id > after and (state is None or target.state is state)][
            :limit
        ]

    async def cancel(self, request_id: str) -> views.RequestView:
        return self.decide(request_id, "cancelled")

    async def pause(self, request_id: str) -> views.RequestView:
        return self.decide(request_id, "paused")

    async def resume(self, request_id: str) -> views.RequestView:
        return self.decide(request_id, "active")

    def decide(self, request_id: str, status: str) -> views.RequestView:
        self.view(request_id)
        self.status_of[request_id] = status
        return self.view(request_id)

    async def gc(self) -> views.GcView:
        if self.collecting:
            raise ConflictError("a collection is under way")
        self.collecting = True
        try:
            await self.collect.wait()
        finally:
            self.collecting = False
        return views.GcView(vehicles=5, expired=4, cancelled=3, data=2, octets=1, seconds=0.5)

    async def why(self, vin: str) -> views.WhyView:
        check_vin(vin)
        return views.not_known(vin)

    def delivery(self, target: views.TargetView) -> views.DeliveryView:
        """Tells in `publisher` what else was asked for, so that a test can see it."""
        data, expires_in, priority, mode = self.sent[f"{target.request_id} {target.vin}"]
        return views.DeliveryView(
            delivery_id=target.delivery_id,
            request_id=target.request_id,
            state="waiting",
            accepted_at=NOW,
            expires_at=NOW + expires_in,
            priority=priority,
            attempts=0,
            size=len(data),
            publisher=f"{mode} {data[:8].hex()}",
        )

    async def vehicle(self, vin: str) -> views.VehicleView:
        check_vin(vin)
        waiting = [
            self.delivery(target)
            for _, deliveries in sorted(self.deliveries.items())
            for target in deliveries.values()
            if target.vin == vin
        ]
        return views.VehicleView(
            vin=vin,
            connected=False,
            seen_at=0.0,
            subscribed=False,
            filter=self.config.filter_of(vin),
            pending=len(waiting),
            in_flight=None,
            waiting=waiting,
            history=[],
            why=views.offline(vin, waiting[0], len(waiting), NOW, 0.0) if waiting else views.not_known(vin),
        )


class FanoutsPlugin(Plugin):
    """Requests in memory."""

    async def start(self) -> None:
        self.service = Requests()
        self.data: dict[str, bytes] = {}
        self.context.offer("fanout", self.service)

    @hook("message.publish", topics=["$SDV-FANOUT/#", "test/#"])
    def on_publish(self, _client: ClientInfo | None, message: Message) -> Any:
        try:
            return self.taken(message)
        except BadBatchError as error:
            return Stop(Handled(ReasonCode.PAYLOAD_FORMAT_INVALID, str(error)))

    def taken(self, message: Message) -> Any:
        topic, payload = message.topic, bytes(message.payload)
        if topic == "test/collected":
            self.service.collect.set()
            return None
        if topic == "test/state":  # request, VIN, state
            request_id, vin, state = payload.decode().split()
            self.service.deliveries[request_id][f"{vin}.1"] = views.TargetView(
                vin=vin,
                request_id=request_id,
                delivery_id=f"{vin}.1",
                state=State(state),
                time=NOW + 1,
                attempt=2,
                reason="for the test",
            )
            return None
        if topic.startswith(DATA_PREFIX):
            data_id = topic.removeprefix(DATA_PREFIX)
            data_digests(data_id, payload)
            if payload == b"unwanted":
                raise BadBatchError("data: nobody wants this")
            self.data[data_id] = payload
            return Stop(Handled())
        if topic != TRIGGER:
            return None
        batch = parse(payload, self.service.config, trigger=True)
        if SILENT in batch.vins:
            acknowledge_after(message, asyncio.get_running_loop().create_future())
            self.context.spawn(self.tell("test/silent"), "tell")
            return Stop(Handled())
        if HANGS_UP in batch.vins:
            acknowledge_after(message, asyncio.get_running_loop().create_future())
            self.context.spawn(self.send_away("platform"), "send away")
            return Stop(Handled())
        view = self.service.accept(
            batch.vins, batch.request_id, self.data[batch.data_id], batch.expires_in, batch.priority, batch.mode
        )
        counts = {"accepted": view.accepted, "duplicates": view.duplicates, "replaced": view.replaced}
        return Stop(Handled(user_properties=tuple((name, str(count)) for name, count in counts.items())))

    async def send_away(self, client_id: str) -> None:
        await self.context.hub.disconnect(client_id)

    async def tell(self, topic: str) -> None:
        await self.context.hub.publish(Message(topic, b"now", 1, retain=True))
