"""Why has this vehicle not got its message? What `motorcade fanout why` answers, for vehicles that are really so."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import pytest

from motorcade.core.vin import make_vin
from tests.scenarios.witness import wait_until
from tests.support import wire
from tests.support.local import LocalNode

CONFIG = """\
[plugins.fanout]
ack_timeout = 3600
retry_delay = 3600
retry_delay_max = 3600
"""
NUMBERS = count(1)


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with LocalNode(CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def web(node: LocalNode) -> Iterator[httpx.Client]:
    with node.web() as client:
        yield client


@pytest.fixture
def vin() -> str:
    """A vehicle that no other test has heard of."""
    return make_vin(next(NUMBERS))


def send(web: httpx.Client, vin: str, request_id: str) -> None:
    answer = web.post(f"/fanout/requests/{request_id}/send", json={"ids": [vin], "data": "x"})
    assert 1 == answer.json()["accepted"]


def why(web: httpx.Client, vin: str) -> dict[str, Any]:
    answer: dict[str, Any] = web.get(f"/vehicles/{vin}/why").json()
    assert vin in answer["sentence"]
    return answer


def until(web: httpx.Client, vin: str, reason: str) -> dict[str, Any]:
    """The answer with this reason; what happens on a connection is known a moment later."""
    wait_until(lambda: reason == why(web, vin)["reason"], f"{reason}, not {why(web, vin)}")
    return why(web, vin)


def subscribed(client: wire.Client, vin: str) -> None:
    assert [1] == client.subscribe(f"agent/{vin}/proxy/request/+", 1).reasons


def acknowledgement(message: wire.Packet, reason: int = 0) -> bytes:
    assert message.packet_id is not None
    return wire.ack_packet(wire.PUBACK, message.packet_id, reason=reason)


def test_nobody_has_sent_it_anything(web: httpx.Client, vin: str) -> None:
    assert ("not_known", 0) == (why(web, vin)["reason"], why(web, vin)["pending"])


def test_it_was_never_there(web: httpx.Client, vin: str) -> None:
    send(web, vin, "never")
    answer = why(web, vin)
    assert ("offline", 1, "never", 0) == tuple(answer[name] for name in ("reason", "pending", "request_id", "since"))
    assert "no session" in answer["sentence"]


def test_it_is_away(web: httpx.Client, node: LocalNode, vin: str) -> None:
    """Since when is told of one that has kept its session."""
    with wire.Client(node) as vehicle:
        vehicle.connect(vin, properties=wire.prop(0x11, 3600))
        subscribed(vehicle, vin)
        vehicle.disconnect()
    send(web, vin, "away")
    answer = until(web, vin, "offline")
    assert "last seen" in answer["sentence"] and answer["since"] > 0


def test_it_is_there_and_does_not_listen(web: httpx.Client, node: LocalNode, vin: str) -> None:
    send(web, vin, "deaf")
    with wire.Client(node) as vehicle:
        vehicle.connect(vin)
        vehicle.subscribe(f"agent/{vin}/something/else", 1)
        answer = until(web, vin, "not_subscribed")
    assert f"agent/{vin}/proxy/request/+" in answer["sentence"]


def test_it_has_not_acknowledged(web: httpx.Client, node: LocalNode, vin: str) -> None:
    """Then it has: nothing waits any more, and the last message is told of."""
    send(web, vin, "slow")
    with wire.Client(node) as vehicle:
        vehicle.connect(vin)
        subscribed(vehicle, vin)
        message = vehicle.expect(wire.PUBLISH)
        answer = until(web, vin, "in_flight")
        assert ("slow", 1, f"{vin}.1") == tuple(answer[name] for name in ("request_id", "attempt", "delivery_id"))
        assert answer["until"] == pytest.approx(answer["since"] + 3600)
        vehicle.send(acknowledgement(message))
        done = until(web, vin, "nothing_pending")
    assert ("slow", 0) == (done["request_id"], done["pending"])
    assert "acked" in done["sentence"]


def test_it_has_refused(web: httpx.Client, node: LocalNode, vin: str) -> None:
    send(web, vin, "refused")
    with wire.Client(node) as vehicle:
        vehicle.connect(vin)
        subscribed(vehicle, vin)
        vehicle.send(acknowledgement(vehicle.expect(wire.PUBLISH), 0x97))
        answer = until(web, vin, "backing_off")
        assert 1 == answer["attempt"] and answer["until"] > 0
        assert "once" in answer["sentence"]


@pytest.mark.parametrize("waits_before", [False, True], ids=["comes later", "waits before"])
def test_it_takes_no_more_at_a_time(web: httpx.Client, node: LocalNode, vin: str, waits_before: bool) -> None:
    """A message of another kind fills its window of one."""
    if waits_before:
        send(web, vin, "full")
    with wire.Client(node) as vehicle:
        vehicle.connect(vin, properties=wire.prop(0x21, 1))
        vehicle.subscribe("news", 1)
        with wire.Client(node) as sender:
            sender.connect()
            sender.publish("news", b"unacknowledged", 1)
        other = vehicle.expect(wire.PUBLISH)
        assert "news" == other.topic
        subscribed(vehicle, vin)
        if not waits_before:
            send(web, vin, "full")
        answer = until(web, vin, "window_full")
        assert ("full", 1) == (answer["request_id"], answer["pending"])
        vehicle.send(acknowledgement(other))
        assert f"agent/{vin}/proxy/request/full" == vehicle.expect(wire.PUBLISH).topic


def test_the_vehicle_in_full(web: httpx.Client, node: LocalNode, vin: str) -> None:
    """What is in flight, what waits behind it in which order, and what has ended."""
    with wire.Client(node) as vehicle:
        vehicle.connect(vin)
        subscribed(vehicle, vin)
        send(web, vin, "first")
        vehicle.send(acknowledgement(vehicle.expect(wire.PUBLISH)))
        until(web, vin, "nothing_pending")
        for request_id in ("second", "third"):
            send(web, vin, request_id)
        vehicle.expect(wire.PUBLISH)
        until(web, vin, "in_flight")
        view = web.get(f"/vehicles/{vin}").json()
    assert (True, True, 2) == (view["connected"], view["subscribed"], view["pending"])
    assert ("second", "in_flight", 1) == tuple(view["in_flight"][name] for name in ("request_id", "state", "attempts"))
    assert [("third", "waiting")] == [(entry["request_id"], entry["state"]) for entry in view["waiting"]]
    assert [("first", "acked", 1)] == [
        (entry["request_id"], entry["state"], entry["attempt"]) for entry in view["history"]
    ]
    assert "in_flight" == view["why"]["reason"]
