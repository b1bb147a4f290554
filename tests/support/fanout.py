"""Platforms, vehicles and watchers of receipts, for tests that look at the fan-out from outside.

    platform = Platform(node)                       a client that publishes batches, and reads what it is answered
    vehicle(node, vin)                              a client named by its VIN, subscribed, with a lasting session
    watch = Watch(node, request)                    all receipts of a request, as they come
    watch.until(vin, "accepted", "sent", "acked")   these and no others, in this order

VINs and request ids are new each time, so tests share nodes. Messages for vehicles are looked for in the background;
`quiet` therefore waits a moment before it says that nothing comes.
"""

from __future__ import annotations

import itertools
import json
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from motorcade.core.vin import make_vin
from tests.support.consumers import connected, lasting, subscribe, unique
from tests.support.flows import REASON_STRING, USER_PROPERTY, acknowledge
from tests.support.operator import Operator
from tests.support.wire import PINGREQ, PINGRESP, PUBLISH, Address, Client, Closed, Packet

INGRESS, TRIGGER, DATA = "$SDV-FANOUT", "$SDV-FANOUT/trigger", "$SDV-FANOUT/data/"
NOT_AUTHORIZED, PAYLOAD_FORMAT_INVALID = 0x87, 0x99

#: Seconds a condition may take. Generous: machines that run tests are busy.
PATIENCE = 60.0

#: Seconds without a packet after which nothing is believed to be on its way.
MOMENT = 0.15

_numbers = itertools.count(1)


def fresh(count: int) -> list[str]:
    """VINs that no other test of this run uses."""
    return [make_vin(next(_numbers)) for _ in range(count)]


def one() -> str:
    return fresh(1)[0]


def request_name() -> str:
    return unique("task_ota")


def topic_of(vin: str, request: str) -> str:
    return f"agent/{vin}/proxy/request/{request}"


def filter_of(vin: str) -> str:
    return f"agent/{vin}/proxy/request/+"


class Platform:
    """Publishes batches with QoS 1."""

    def __init__(self, address: Address, version: int = 5, client_id: str = "") -> None:
        self.client = connected(address, client_id or unique("platform"), version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def publish(self, topic: str, payload: bytes | str | dict[str, Any], qos: int = 1) -> Packet:
        """What the broker answers, whatever it is."""
        answer = self.client.publish(topic, as_bytes(payload), qos)
        assert answer is not None
        return answer

    def send(self, vins: Sequence[str], request: str, data: str | bytes = "do it", **fields: Any) -> dict[str, int]:
        """A batch that carries its data; the figures of its acknowledgement (none for MQTT 3.1.1)."""
        return figures(self.publish(INGRESS, batch(vins, request, data, **fields)))

    def store(self, data_id: str, data: bytes) -> None:
        assert 0 == (self.publish(f"{DATA}{data_id}", data).reason or 0)

    def trigger(self, vins: Sequence[str], request: str, data_id: str, **fields: Any) -> dict[str, int]:
        """A batch that names its data."""
        return figures(
            self.publish(TRIGGER, {"ids": list(vins), "request_id": request, "data_id": data_id} | fields),
        )

    def refused(self, topic: str, payload: bytes | str | dict[str, Any], reason: int = PAYLOAD_FORMAT_INVALID) -> str:
        """The reason string of what must be refused."""
        answer = self.publish(topic, payload)
        assert reason == answer.reason, f"PUBACK 0x{answer.reason or 0:02x}, {answer.prop(REASON_STRING)}"
        assert [] == answer.prop_all(USER_PROPERTY)
        text = answer.prop(REASON_STRING)
        assert isinstance(text, str), "no reason string"
        return text


def as_bytes(payload: bytes | str | dict[str, Any]) -> bytes:
    if isinstance(payload, bytes):
        return payload
    return (payload if isinstance(payload, str) else json.dumps(payload)).encode()


def batch(vins: Sequence[str], request: str, data: str | bytes = "do it", **fields: Any) -> dict[str, Any]:
    """The JSON of a batch that carries its data: text as it is, bytes as base64."""
    coded = {"data": data} if isinstance(data, str) else {"data": b64encode(data).decode(), "encoding": "base64"}
    return {"ids": list(vins), "request_id": request} | coded | fields


def figures(answer: Packet) -> dict[str, int]:
    """What a batch was answered, which must be that it was taken."""
    assert 0 == (answer.reason or 0), f"0x{answer.reason:02x}: {answer.prop(REASON_STRING)}"
    pairs = answer.prop_all(USER_PROPERTY)
    found = {str(key): int(value) for key, value in pairs}
    assert len(found) == len(pairs), pairs
    return found


def taken(accepted: int, duplicates: int = 0, replaced: int = 0) -> dict[str, int]:
    return {"accepted": accepted, "duplicates": duplicates, "replaced": replaced}


def vehicle(
    address: Address, vin: str, version: int = 5, *properties: bytes, filter_: str = "", qos: int = 1
) -> Client:
    """A vehicle that is there and subscribed; what comes with the SUBACK is kept for `recv`."""
    client = lasting(address, vin, version, *properties)
    subscribe(client, filter_ or filter_of(vin), qos)
    return client


def get(client: Client, *, ack: bool = True, timeout: float = PATIENCE) -> Packet:
    """The next message."""
    message = client.recv(timeout)
    assert PUBLISH == message.type, f"unexpected {message.name}"
    if ack and message.qos:
        acknowledge(client, message)
    return message


def told(client: Client, *, ack: bool = True) -> tuple[str, bytes]:
    """Topic and payload of the next message."""
    message = get(client, ack=ack)
    return message.topic, message.payload


def quiet(client: Client, moment: float = MOMENT) -> None:
    """Nothing comes: not before the answer to a PINGREQ, and not in the moment after it."""
    client.send(PINGREQ)
    found = client.recv(PATIENCE)
    assert PINGRESP == found.type, f"unexpected {found.name} {found.topic} {found.payload[:40]!r}"
    try:
        found = client.recv(moment)
    except TimeoutError:
        return
    raise AssertionError(f"unexpected {found.name} {found.topic} {found.payload[:40]!r}")


def nothing_else(platform: Platform, client: Client, vin: str) -> None:
    """Nothing waits for a vehicle that has acknowledged all it has got: what is sent to it now comes next."""
    request = request_name()
    platform.send([vin], request, "next")
    assert topic_of(vin, request) == get(client).topic


def stored_receipts(operator: Operator) -> list[dict[str, Any]]:
    """All receipts in the stream, in order."""
    found: list[dict[str, Any]] = []
    after = 0
    while page := operator.read("streams", "receipts", after=after, limit=1000):
        for message in page:
            assert message["topic"].startswith("$SDV-FANOUT/receipt/")
            found.append(json.loads(message["payload"]))
        after = page[-1]["position"]
    return found


class Watch:
    """Whoever follows the receipts of one request, or of all."""

    def __init__(self, address: Address, request: str = "+", version: int = 5) -> None:
        self.client = connected(address, unique("watch"), version)
        subscribe(self.client, f"$SDV-FANOUT/receipt/{request}/+")
        self.seen: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def take(self, timeout: float = PATIENCE) -> dict[str, Any]:
        """The next receipt."""
        message = get(self.client, timeout=timeout)
        receipt: dict[str, Any] = json.loads(message.payload)
        assert f"$SDV-FANOUT/receipt/{receipt['request_id']}/{receipt['vin']}" == message.topic
        self.seen.append(receipt)
        return receipt

    def gather(self, condition: Callable[[], bool], what: str) -> None:
        """Read until it is so."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            try:
                self.take(max(0.0, deadline - time.monotonic()))
            except (TimeoutError, Closed) as error:
                raise AssertionError(f"{what}: {error}; {len(self.seen)} receipts: {brief(self.seen)}") from error

    def of(self, vin: str) -> list[dict[str, Any]]:
        return [receipt for receipt in self.seen if receipt["vin"] == vin]

    def states(self, vin: str) -> list[str]:
        return [receipt["state"] for receipt in self.of(vin)]

    def until(self, vin: str, *states: str) -> list[dict[str, Any]]:
        """Read until a vehicle has as many receipts; they must be these."""
        self.gather(lambda: len(self.of(vin)) >= len(states), f"{vin}: {states}")
        assert list(states) == self.states(vin), brief(self.of(vin))
        return self.of(vin)

    def number(self, state: str) -> int:
        return sum(receipt["state"] == state for receipt in self.seen)

    def nothing_more(self) -> None:
        quiet(self.client)


def brief(receipts: Iterable[dict[str, Any]]) -> list[str]:
    """Receipts in short, for messages about them."""
    return [f"{r['delivery_id']} {r['request_id']} {r['state']}#{r['attempt']} {r['reason']}" for r in receipts][-40:]
