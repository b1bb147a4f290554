"""Do the clients that people use consume compacted queues? paho-mqtt, aiomqtt, gmqtt, mosquitto and MQTT.js do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.scenarios.clients import KINDS, Details, Kind, Listeners, RealClient
from tests.support.compacted import Compacted
from tests.support.consumers import unique
from tests.support.node import NodeProcess

over_tcp = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.transport == "tcp"], ids=str)


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(ws=True) as running:
        yield running


@pytest.fixture
def make(node: NodeProcess, kind: Kind) -> Iterator[Callable[[], RealClient]]:
    made: list[RealClient] = []

    def create() -> RealClient:
        assert node.ws is not None
        made.append(kind.driver(Listeners(node.mqtt, node.ws), kind.transport, kind.version))
        return made[-1]

    yield create
    for client in made:
        client.close()


@over_tcp
def test_a_day_of_a_consumer(make: Callable[[], RealClient], node: NodeProcess, kind: Kind) -> None:
    """It gets the last values in order, live ones at once, and after a pause only what is new."""
    queue = Compacted(node, unique("car"))
    producer, consumer = make(), make()
    producer.connect(unique("producer"))
    details = Details("text/plain", "answers", b"id", (("colour", "red"),)) if kind.version == 5 else None
    for key, value in (("a", b"1"), ("b/c", b"2"), ("a", b"3")):
        producer.publish(queue.write(key), value, details=details)
    consumer.connect(queue.name)
    consumer.subscribe(queue.filter, 1)
    seen = [consumer.receive() for _ in range(2)]
    assert [(queue.read("b/c"), b"2"), (queue.read("a"), b"3")] == [(one.topic, one.payload) for one in seen]
    assert [(1, False)] * 2 == [(one.qos, one.retain) for one in seen]
    if kind.version == 5:
        told = [dict(one.details.user) for one in seen if one.details is not None]
        assert [{"colour": "red", "ecq-seqno": number} for number in ("2", "3")] == told
    producer.publish(queue.write("live"), b"4")
    assert b"4" == consumer.receive().payload
    producer.publish(queue.write("live"), b"5")
    assert b"5" == consumer.receive().payload
    consumer.publish(f"seen/{queue.name}", b"")  # a library may acknowledge after it has handed over: this comes behind
    consumer.disconnect()
    for value in (b"6", b"7"):
        producer.publish(queue.write("a"), value)
    consumer.connect(queue.name)
    consumer.subscribe(queue.filter, 1)
    assert b"7" == consumer.receive().payload, "neither what was acknowledged nor what is out of date"
    if kind.driver.name != "mosquitto":  # each mosquitto_pub is a client of its own
        consumer.publish(queue.rewind, b"3")
        assert [b"5", b"7"] == [consumer.receive().payload for _ in range(2)]
