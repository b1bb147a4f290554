"""A node with the fan-out on a store in memory. Time passes when a test says so; until then all there is to do is done.

with FanoutNode(max_pending=3) as node:               options of the plugin
    car = node.vehicle(VIN)                           a client named by its VIN, subscribed, its session is kept
    node.send([VIN], "r", "data", expires_in=60)      the figures of the acknowledgement
    (message,) = car.messages()                       all that have come since the last time: no others are on their way
    car.ack(message)
    node.states("r")                                  ["accepted", "sent", "acked"]
"""

from __future__ import annotations

import json
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from motorcade.broker.limits import Limits, SessionOptions
from motorcade.core import receipt as receipts
from motorcade.core.reasons import ReasonCode
from motorcade.core.receipt import Receipt
from motorcade.core.record import decode as decode_record
from motorcade.core.subscription import Subscription
from motorcade.core.vin import make_vin
from motorcade.extension.plugin import Plugins
from motorcade.mqtt.packets import Connack, Connect, Packet, Puback, Publish, Pubrec, Suback, Subscribe, Unsubscribe
from motorcade.mqtt.properties import NONE, Properties
from motorcade.plugins.fanout.service import FanoutService
from motorcade.plugins.fanout.tables import DATA_PREFIX, INGRESS, RECEIPTS, TRIGGER
from tests.unit.broker.held_store import HeldStore
from tests.unit.broker.memory import MemoryNode, Turns, standing

VINS = tuple(make_vin(number) for number in range(20))
VIN = VINS[0]
STEP = 0.001  #: seconds that pass with everything that is done
EXPIRY = 3600  #: seconds that sessions of vehicles outlive their connections

Kind = TypeVar("Kind", bound=Packet)
Result = TypeVar("Result")


def topic_of(vin: str, request: str) -> str:
    return f"agent/{vin}/proxy/request/{request}"


def filter_of(vin: str) -> str:
    return topic_of(vin, "+")


def taken(accepted: int, duplicates: int = 0, replaced: int = 0, **more: int) -> dict[str, int]:
    """The figures of a batch that was accepted."""
    return {"accepted": accepted, "duplicates": duplicates, "replaced": replaced} | more


class FanoutClient:
    """A client that was let in. Whatever it sends is dealt with when the call returns."""

    def __init__(self, node: FanoutNode, connect: Connect) -> None:
        self._node = node
        self._came: list[Packet] = []
        self._numbers = 0
        self.peer = node.memory.peer(connect.version)
        self.say(connect)
        (connack,) = self.took(Connack)
        assert not connack.reason, connack
        self.session_present = connack.session_present

    @property
    def open(self) -> bool:
        return self.peer.open

    def say(self, *packets: Packet) -> None:
        """Packets in one write."""
        self._node.loop.call_soon(self.peer.send, *packets)
        self._node.go_on()

    def took(self, kind: type[Kind]) -> list[Kind]:
        """The packets of a kind that have come since the last time."""
        self._came += self.peer.take()
        found: list[Kind] = [packet for packet in self._came if isinstance(packet, kind)]
        self._came = [packet for packet in self._came if not isinstance(packet, kind)]
        return found

    def messages(self) -> list[Publish]:
        return self.took(Publish)

    def message(self) -> Publish:
        """The only message that has come since the last time."""
        (message,) = self.messages()
        return message

    def next_id(self) -> int:
        self._numbers += 1
        return self._numbers

    def ack(self, message: Publish, reason: int = 0) -> None:
        self.say(Puback(message.packet_id, ReasonCode(reason)))

    def in_turn(self) -> list[str]:
        """Acknowledge one message after the other until none is left; the requests they belong to."""
        names = []
        while messages := self.messages():
            (message,) = messages
            names.append(message.topic.rsplit("/", 1)[1])
            if message.qos:
                self.ack(message)
        return names

    def subscribe(self, filter_: str, qos: int = 1, identifier: int = 0) -> None:
        properties = Properties(subscription_ids=(identifier,)) if identifier else NONE
        self.say(Subscribe(self.next_id(), (Subscription(filter_, qos),), properties))
        (suback,) = self.took(Suback)
        assert (qos,) == suback.reasons, suback

    def unsubscribe(self, filter_: str) -> None:
        self.say(Unsubscribe(self.next_id(), (filter_,)))

    def publish(self, topic: str, payload: bytes = b"", qos: int = 1, **more: Any) -> Puback | Pubrec | None:
        """What the node answers; None if nothing (QoS 0, or it has closed the connection)."""
        self.say(Publish(topic, payload, qos, packet_id=self.next_id() if qos else 0, **more))
        answers: list[Puback | Pubrec] = [*self.took(Puback), *self.took(Pubrec)]
        return answers[0] if answers else None

    def abort(self) -> None:
        """The connection breaks."""
        self.peer.close()
        self._node.go_on()


class FanoutNode:
    """See above."""

    def __init__(self, **options: Any) -> None:
        self.store = HeldStore()
        sessions = SessionOptions(expiry_default_v3=EXPIRY)
        self.memory = MemoryNode(sessions, Limits(flapping_count=0), store=self.store.inner)
        assert isinstance(self.memory.loop, Turns)
        self.loop = self.memory.loop
        self.options = options
        self._stack = ExitStack()
        self._stack.enter_context(standing(self.memory.clock))
        self.plugins = Plugins(self.memory.broker, self.memory.hooks, Path("unused"), self.memory.plane.shared.sources)
        self.plugins.store = self.store
        self.loaded = self.run(self.plugins.load("fanout", options))
        self.platform = self.client("platform")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.loop.die()
        self._stack.close()
        if error is None:
            assert not [name for name in ("task_failed", "dispatch_failed") if self.counters[name]]
            assert not [kind for kind in self.memory.plane.shared.sources.kinds if kind.counters["failed"]]

    # -- time

    @property
    def now(self) -> float:
        return self.memory.clock.now

    def go_on(self) -> None:
        """Let everybody do what there is to do now; no two things happen at the same moment."""
        self.memory.clock.now += STEP
        self.memory.turn()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Something that needs no time."""
        task = self.loop.create_task(work)
        self.go_on()
        assert task.done(), task
        result: Result = task.result()
        return result

    def pass_time(self, seconds: float) -> None:
        """Everything that is due happens at its time."""
        clock, until = self.memory.clock, self.now + seconds
        while self.loop.later and self.loop.later[0][0] <= until:
            clock.now = max(clock.now, self.loop.later[0][0])
            self.memory.turn()
        clock.now = until
        for will in self.memory.plane.registry.due(until):
            self.memory.broker.publish_will(will)
        self.memory.turn()

    @contextmanager
    def slow_store(self) -> Iterator[None]:
        """Meanwhile the store does nothing that it is asked for; then all of it."""
        self.store.held = self.store.held_reads = True
        yield
        self.store.held = self.store.held_reads = False
        self.loop.call_soon(self.store.let_go)
        self.loop.call_soon(self.store.let_read)
        self.go_on()

    # -- clients

    def client(self, client_id: str, version: int = 5, *, clean: bool = True, **properties: Any) -> FanoutClient:
        sent = Properties(**properties) if version == 5 else NONE
        return FanoutClient(self, Connect(client_id, version, clean, properties=sent))

    def lasting(self, client_id: str, version: int = 5, **properties: Any) -> FanoutClient:
        """A client whose session is kept, new or taken up again."""
        return self.client(client_id, version, clean=False, session_expiry=EXPIRY, **properties)

    def vehicle(self, vin: str = VIN, version: int = 5, filter_: str = "", qos: int = 1, **more: Any) -> FanoutClient:
        client = self.lasting(vin, version, **more)
        client.subscribe(filter_ or filter_of(vin), qos)
        return client

    # -- the platform

    def publish(self, topic: str, fields: dict[str, Any] | bytes) -> Puback:
        payload = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        answer = self.platform.publish(topic, payload)
        assert isinstance(answer, Puback)
        return answer

    def figures(self, topic: str, fields: dict[str, Any]) -> dict[str, int]:
        """What is answered to a batch, which must be that it is accepted."""
        return figures(self.publish(topic, fields))

    def send(self, vins: Sequence[str], request: str, data: str = "do it", **fields: Any) -> dict[str, int]:
        """A batch that carries its data."""
        return self.figures(INGRESS, batch(vins, request, data, **fields))

    def trigger(self, vins: Sequence[str], request: str, data_id: str, **fields: Any) -> dict[str, int]:
        """A batch that names its data."""
        return self.figures(TRIGGER, {"ids": vins, "request_id": request, "data_id": data_id} | fields)

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

    @property
    def counters(self) -> dict[str, int]:
        return self.loaded.context.counters

    def receipts(self, request: str = "", vin: str = "") -> list[Receipt]:
        """All that are stored, in order; of a request, or of a vehicle."""
        stream = self.store.inner.streams.streams.get(RECEIPTS)
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


def batch(vins: Sequence[str], request: str, data: str = "do it", **fields: Any) -> dict[str, Any]:
    """The JSON of a batch that carries its data."""
    return {"ids": vins, "request_id": request, "data": data} | fields


def figures(answer: Puback | Pubrec | None) -> dict[str, int]:
    """What a batch was answered, which must be that it is accepted."""
    assert answer is not None and not answer.reason, answer
    return {name: int(value) for name, value in answer.properties.user_properties}
