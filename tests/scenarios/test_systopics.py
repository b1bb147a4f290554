"""What `$SYS` subscribers of a node see."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import motorcade
from tests.support.local import LocalNode
from tests.support.wire import PATIENCE, PUBACK, Client, Will
from tests.unit.plugins.test_systopics import TREE

NOT_AUTHORIZED = 0x87


@pytest.fixture
def node() -> Iterator[LocalNode]:
    with LocalNode("[plugins.systopics]\ninterval = 0.1\n") as running:
        yield running


def connected(node: LocalNode, client_id: str, **options: int) -> Client:
    client = Client(node, **options)
    assert 0 == client.connect(client_id).reason
    return client


def wait_for(watch: Client, topic: str, text: str) -> None:
    """Read `$SYS` messages until a topic has a text."""
    deadline = time.monotonic() + 2 * PATIENCE
    seen = None
    while time.monotonic() < deadline:
        message = watch.receive()
        if message.topic == f"$SYS/broker/{topic}":
            seen = message.payload.decode()
            if seen == text:
                return
    raise AssertionError(f"{topic} was {seen!r} to the end, not {text!r}")


def test_a_new_subscriber_gets_the_whole_tree_at_once(node: LocalNode) -> None:
    """All customary topics are retained, so that a monitor need not wait for a change."""
    with connected(node, "monitor") as monitor:
        monitor.subscribe("$SYS/#")
        retained: dict[str, str] = {}
        while len(retained) < len(TREE):
            message = monitor.receive()
            if message.retain:
                retained[message.topic.removeprefix("$SYS/broker/")] = message.payload.decode()
    assert TREE == retained.keys()
    assert f"motorcade version {motorcade.__version__}" == retained["version"]
    assert retained["uptime"].endswith(" seconds")


def test_figures_follow_what_happens(node: LocalNode) -> None:
    """Clients that come and go, subscriptions, and messages are counted."""
    with connected(node, "monitor") as monitor:
        monitor.subscribe("$SYS/broker/clients/connected")
        wait_for(monitor, "clients/connected", "1")
        with connected(node, "second") as second:
            wait_for(monitor, "clients/connected", "2")
            second.disconnect()
        wait_for(monitor, "clients/connected", "1")
        monitor.unsubscribe("$SYS/broker/clients/connected")
    with connected(node, "counter") as counter:
        counter.subscribe("$SYS/broker/publish/messages/received")
        with connected(node, "sender") as sender:
            for _ in range(7):
                sender.publish("t", b"x", 1)
        wait_for(counter, "publish/messages/received", "7")


def test_a_client_may_not_speak_for_the_broker(node: LocalNode) -> None:
    """MQTT 5 hears `not authorized`, MQTT 3.1.1 is sent away, and nobody sees the forged message. Nor by a will."""
    with connected(node, "monitor") as monitor, connected(node, "liar") as liar:
        monitor.subscribe([("$SYS/broker/version", 0), ("$SYS/forged", 1), ("lost", 1)])
        assert monitor.receive().retain
        answer = liar.publish("$SYS/broker/version", b"forged", 1, retain=True)
        assert answer is not None and (PUBACK, NOT_AUTHORIZED) == (answer.type, answer.reason)
        with connected(node, "old liar", version=4) as old:
            with pytest.raises(AssertionError):
                old.publish("$SYS/broker/version", b"forged", 1)
            old.expect_closed()
        for topic in ("$SYS/forged", "lost"):
            lost = Client(node)
            lost.connect("lost", will=Will(topic, b"will", qos=1, retain=True))
            lost.abort()
            if topic == "lost":
                assert b"will" == monitor.receive().payload
        monitor.expect_nothing()
        with connected(node, "late") as late:
            late.subscribe("$SYS/forged", 1)
            late.expect_nothing()
