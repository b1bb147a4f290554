"""Do the clients that people use work with the node?

Every scenario runs with paho-mqtt, aiomqtt, gmqtt, mosquitto_pub and mosquitto_sub, and MQTT.js, over TCP and, where
the client can, over WebSocket, in MQTT 3.1.1 and 5. `MOTORCADE_TEST_BROKER` and `MOTORCADE_TEST_WS` (HOST:PORT each)
run them against a broker that is running already.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.scenarios.clients import KINDS, Details, Kind, Listeners, RealClient, Received, Will
from tests.support.node import Endpoint, NodeProcess

Make = Callable[[Kind], RealClient]

all_kinds = pytest.mark.parametrize("kind", KINDS, ids=str)
v5_kinds = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.version == 5], ids=str)


@pytest.fixture(scope="module")
def listeners() -> Iterator[Listeners]:
    tcp, ws = (os.environ.get(name, "") for name in ("MOTORCADE_TEST_BROKER", "MOTORCADE_TEST_WS"))
    if tcp and ws:
        yield Listeners(*(Endpoint(host, int(port)) for host, _, port in (tcp.rpartition(":"), ws.rpartition(":"))))
        return
    with NodeProcess(ws=True) as node:
        assert node.ws is not None
        yield Listeners(node.mqtt, node.ws)


@pytest.fixture
def name() -> str:
    """A word that no other test uses, for topics and client ids."""
    return "r" + uuid.uuid4().hex[:12]


@pytest.fixture
def make(listeners: Listeners) -> Iterator[Make]:
    """`make(kind)`: a client of that kind, closed at the end."""
    made: list[RealClient] = []

    def create(kind: Kind) -> RealClient:
        made.append(kind.driver(listeners, kind.transport, kind.version))
        return made[-1]

    yield create
    for client in made:
        client.close()


@pytest.fixture
def pair(make: Make, kind: Kind, name: str) -> tuple[RealClient, RealClient]:
    """Two connected clients of the same kind."""
    subscriber, publisher = make(kind), make(kind)
    subscriber.connect(f"{name}-sub")
    publisher.connect(f"{name}-pub")
    return subscriber, publisher


@all_kinds
def test_messages_of_each_qos_flow(pair: tuple[RealClient, RealClient], kind: Kind, name: str) -> None:
    """They arrive complete, in order, with the QoS and the topic they were sent with."""
    subscriber, publisher = pair
    subscriber.subscribe(f"{name}/+/x", 2)
    for qos in (0, 1, 2):
        sent = [Received(f"{name}/{n}/x", f"message {n} \u00fc\U0001f697".encode(), qos, False) for n in range(3)]
        for message in sent:
            publisher.publish(message.topic, message.payload, qos)
        assert sent == [subscriber.receive() for _ in sent]


@all_kinds
def test_the_lower_qos_counts(pair: tuple[RealClient, RealClient], kind: Kind, name: str) -> None:
    """A QoS 2 message reaches a subscriber of QoS 1 with QoS 1."""
    subscriber, publisher = pair
    subscriber.subscribe(name, 1)
    publisher.publish(name, b"m", 2)
    assert Received(name, b"m", 1, False) == subscriber.receive()


@all_kinds
def test_a_retained_message_waits(pair: tuple[RealClient, RealClient], kind: Kind, name: str) -> None:
    """A later subscriber gets the retained message, marked as such, and then the live ones."""
    subscriber, publisher = pair
    publisher.publish(f"{name}/a", b"old", retain=True)
    publisher.publish(f"{name}/a", b"kept", retain=True)
    subscriber.subscribe(f"{name}/#", 1)
    assert Received(f"{name}/a", b"kept", 1, True) == subscriber.receive()
    publisher.publish(f"{name}/a", b"", retain=True)
    assert Received(f"{name}/a", b"", 1, False) == subscriber.receive()


@all_kinds
def test_a_lost_connection_publishes_the_will(make: Make, kind: Kind, name: str) -> None:
    """The will of a client that vanishes reaches the others; that of one that leaves properly does not."""
    witness, polite, lost, publisher = (make(kind) for _ in range(4))
    witness.connect(f"{name}-witness")
    witness.subscribe(f"{name}/will/+", 1)
    for client, word in ((polite, "polite"), (lost, "lost")):
        client.connect(f"{name}-{word}", will=Will(f"{name}/will/{word}", word.encode()))
        client.subscribe(f"{name}/other", 0)
    polite.disconnect()
    if polite.leaves_with_will:
        assert b"polite" == witness.receive().payload
    lost.drop()
    assert Received(f"{name}/will/lost", b"lost", 1, False) == witness.receive()
    publisher.connect(f"{name}-publisher")
    publisher.publish(f"{name}/will/end", b"end")
    assert b"end" == witness.receive().payload


@all_kinds
def test_a_lasting_session_keeps_messages(make: Make, kind: Kind, name: str) -> None:
    """What is published while a client is away, politely or not, waits for it, in order, and live messages follow."""
    subscriber, publisher = make(kind), make(kind)
    publisher.connect(f"{name}-pub")
    subscriber.connect(f"{name}-sub", clean=False)
    subscriber.subscribe(name, 1)
    # The rude end first: it may lose acknowledgements of QoS 1 messages that came before, and they would come again.
    for leave in (subscriber.drop, subscriber.disconnect):
        publisher.publish(name, b"before", 0)
        assert b"before" == subscriber.receive().payload
        leave()
        for n in range(5):
            publisher.publish(name, b"%d" % n)
        subscriber.connect(f"{name}-sub", clean=False)
        publisher.publish(name, b"after")
        assert [*(b"%d" % n for n in range(5)), b"after"] == [subscriber.receive().payload for _ in range(6)]


@v5_kinds
def test_properties_arrive(pair: tuple[RealClient, RealClient], kind: Kind, name: str) -> None:
    """Content type, response topic, correlation data and user properties, repeated ones too, come out as sent."""
    subscriber, publisher = pair
    subscriber.subscribe(name, 1)
    details = Details(
        content_type="application/json",
        response_topic=f"{name}/reply",
        correlation_data=b"request 7",
        user=(("trace", "1"), ("trace", "2"), ("vin", "\u00fc")),
    )
    publisher.publish(name, b"{}", details=details)
    assert Received(name, b"{}", 1, False, details) == subscriber.receive()


@all_kinds
def test_a_group_shares_messages(make: Make, kind: Kind, name: str) -> None:
    """Members of a shared subscription together get every message once."""
    members = [make(kind), make(kind)]
    members[1].inbox = members[0].inbox
    for n, member in enumerate(members):
        member.connect(f"{name}-{n}")
        member.subscribe(f"$share/group/{name}", 1)
    publisher = make(kind)
    publisher.connect(f"{name}-pub")
    sent = [b"%d" % n for n in range(20)]
    for payload in sent:
        publisher.publish(name, payload)
    assert sorted(sent) == sorted(members[0].receive().payload for _ in sent)
    # A message that came twice would be in the inbox before this one.
    publisher.publish(name, b"end")
    assert b"end" == members[0].receive().payload


def test_all_kinds_understand_each_other(make: Make, name: str) -> None:
    """What one client publishes reaches all of them, whatever the library, the transport and the version."""
    clients = []
    for n, kind in enumerate(KINDS):
        client = make(kind)
        client.connect(f"{name}-{n}")
        client.subscribe(name, 2)
        clients.append(client)
    for n, publisher in enumerate(clients):
        publisher.publish(name, b"from %d" % n, n % 3)
        for client in clients:
            message = client.receive()
            assert (b"from %d" % n, n % 3) == (message.payload, message.qos), client.name
