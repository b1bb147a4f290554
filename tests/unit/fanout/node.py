"""A node in virtual time with the fan-out, its platform and vehicles (`tests.support.virtual`).

with FanoutNode.on(max_pending=3) as node:            options of the plugin
    car = node.vehicle(VIN)                           a client named by its VIN, subscribed, its session is kept
    node.send([VIN], "r", "data", expires_in=60)      the figures of the acknowledgement
    message = message_of(car)                         the only one that has come since the last time
    car.ack(message)
    node.states("r")                                  ["accepted", "sent", "acked"]
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from motorcade.core import receipt as receipts
from motorcade.core.reasons import ReasonCode
from motorcade.core.receipt import Receipt
from motorcade.core.record import decode as decode_record
from motorcade.core.vin import make_vin
from motorcade.mqtt.packets import Packet, Puback, Publish, Pubrec
from motorcade.plugins.fanout.service import FanoutService
from motorcade.plugins.fanout.tables import DATA_PREFIX, INGRESS, RECEIPTS, TRIGGER
from tests.support.virtual import Client, PluginNode

VINS = tuple(make_vin(number) for number in range(20))
VIN = VINS[0]
STEP = 0.001  #: seconds until an operator decides something
EXPIRY = 3600  #: seconds that sessions of vehicles outlive their connections

T = TypeVar("T")


def topic_of(vin: str, request: str) -> str:
    return f"agent/{vin}/proxy/request/{request}"


def filter_of(vin: str) -> str:
    return topic_of(vin, "+")


def taken(accepted: int, duplicates: int = 0, replaced: int = 0, **more: int) -> dict[str, int]:
    """The figures of a batch that was accepted."""
    return {"accepted": accepted, "duplicates": duplicates, "replaced": replaced} | more


def batch(vins: Sequence[str], request: str, data: str = "do it", **fields: Any) -> dict[str, Any]:
    """The JSON of a batch that carries its data."""
    return {"ids": vins, "request_id": request, "data": data} | fields


def packed(fields: dict[str, Any] | bytes) -> bytes:
    return fields if isinstance(fields, bytes) else json.dumps(fields).encode()


def figures(answer: Puback | Pubrec) -> dict[str, int]:
    """What a batch was answered, which must be that it is accepted."""
    assert not answer.reason, answer
    return {name: int(value) for name, value in answer.properties.user_properties}


def say(client: Client, *packets: Packet) -> list[Packet]:
    """Send packets in one write; what has come when everything that follows from them is done."""
    client.send(*packets)
    client.node.turn()
    return client.take()


def message_of(client: Client) -> Publish:
    """The only message that has come since the last time."""
    (message,) = client.messages()
    return message


def in_turn(client: Client) -> list[str]:
    """Acknowledge one message after the other until none is left; the requests they belong to."""
    names = []
    while messages := client.messages():
        assert 1 == len(messages), messages
        names.append(messages[0].topic.rsplit("/", 1)[1])
        client.ack(*client.inflight)
    return names


class FanoutNode(PluginNode):
    """See above."""

    plugin_name: ClassVar[str] = "fanout"

    def load(self, **config: Any) -> None:
        super().load(**config)
        self.platform = self.client("platform")

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        self.clock.now += STEP
        return super().begin(work)

    @contextmanager
    def slow_store(self) -> Iterator[None]:
        """Meanwhile the store does nothing that it is asked for; then all of it."""
        self.held.held = self.held.held_reads = True
        yield
        self.held.held = self.held.held_reads = False
        self.loop.call_soon(self.held.let_go)
        self.loop.call_soon(self.held.let_read)
        self.turn()

    # -- vehicles

    def lasting(self, vin: str = VIN, version: int = 5, **properties: Any) -> Client:
        """A vehicle whose session is kept, new or taken up again."""
        return self.client(vin, version, clean=False, session_expiry=EXPIRY, **properties)

    def vehicle(self, vin: str = VIN, version: int = 5, filter_: str = "", qos: int = 1, **more: Any) -> Client:
        """The same, and subscribed."""
        client = self.lasting(vin, version, **more)
        assert (qos,) == client.subscribe(filter_ or filter_of(vin), qos).reasons
        return client

    # -- the platform

    def publish(self, topic: str, fields: dict[str, Any] | bytes) -> Puback:
        self.platform.put(topic, packed(fields))
        return self.platform.expect(Puback)

    def send(self, vins: Sequence[str], request: str, data: str = "do it", **fields: Any) -> dict[str, int]:
        """A batch that carries its data; what is answered, which must be that it is accepted."""
        return figures(self.publish(INGRESS, batch(vins, request, data, **fields)))

    def trigger(self, vins: Sequence[str], request: str, data_id: str, **fields: Any) -> dict[str, int]:
        """A batch that names its data."""
        return figures(self.publish(TRIGGER, {"ids": vins, "request_id": request, "data_id": data_id} | fields))

    def keep(self, data_id: str, data: bytes) -> None:
        """Data that batches will name."""
        assert not self.publish(f"{DATA_PREFIX}{data_id}", data).reason

    def refused(
        self, topic: str, fields: dict[str, Any] | bytes, reason: ReasonCode = ReasonCode.PAYLOAD_FORMAT_INVALID
    ) -> str:
        """The reason string of what must be refused."""
        answer = self.publish(topic, fields)
        assert (reason, ()) == (answer.reason, answer.properties.user_properties), answer
        return answer.properties.reason_string or ""

    # -- what there is

    @property
    def service(self) -> FanoutService:
        service: FanoutService = self.plugins.service("fanout")
        return service

    def receipts(self, request: str = "", vin: str = "") -> list[Receipt]:
        """All that are stored, in order; of a request, or of a vehicle."""
        stream = self.held.inner.streams.streams.get(RECEIPTS)
        records = stream.records if stream is not None else []
        found = [receipts.decode(decode_record(record.value).payload) for record in records]
        return [r for r in found if r.request_id == (request or r.request_id) and r.vin == (vin or r.vin)]

    def states(self, request: str = "", vin: str = "") -> list[str]:
        return [str(receipt.state) for receipt in self.receipts(request, vin)]

    def counts(self, request: str) -> dict[str, int]:
        """How many deliveries of a request are in which state."""
        return {str(state): count for state, count in self.run(self.service.status(request)).states.items()}

    def why(self, vin: str = VIN) -> str:
        return str(self.run(self.service.why(vin)).reason)
