"""`$SYS` while a cluster has several members: each node by itself, and all of them together, on each node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from motorcade.mqtt.properties import Properties
from motorcade.plugins.systopics import SysTopicsPlugin
from motorcade.plugins.systopics.plugin import LARGEST, STORED, total
from tests.support.members import MemberNode, Members
from tests.support.virtual import standing

INTERVAL = 10.0


@pytest.fixture
def members() -> Iterator[Members]:
    plugins: dict[str, dict[str, Any]] = {"retained": {}, "systopics": {"interval": INTERVAL}}
    made = Members(2, plugins=plugins)
    with standing(made.clock):
        made.wait(0.1)
        yield made


def plugin(node: MemberNode) -> SysTopicsPlugin:
    (found,) = (loaded.plugin for loaded in node.plugins.loaded() if isinstance(loaded.plugin, SysTopicsPlugin))
    return found


def tree(members: Members, node: MemberNode) -> dict[str, str]:
    """What a new subscriber of `$SYS` gets at a node, after two rounds: the others have had theirs by the second."""
    members.wait(2 * INTERVAL + 1)
    monitor = node.client("monitor", receive_maximum=1000)
    monitor.subscribe("$SYS/#", 0)
    members.wait(0.1)
    found = {message.topic: message.payload.decode() for message in monitor.messages() if message.retain}
    monitor.disconnect()
    members.turn()
    return found


def test_each_node_tells_the_figures_of_each_and_of_all(members: Members) -> None:
    a, b = members.nodes
    clients = [a.client("1"), a.client("2"), b.client("3")]
    clients[0].subscribe("t/1")
    clients[2].subscribe("t/2")
    clients[1].publish("t/2", b"x")
    for node in members.nodes:
        found = tree(members, node)
        assert ("3", "2", "1") == tuple(
            found[f"$SYS/{whose}/clients/connected"] for whose in ("broker", "brokers/n1", "brokers/n2")
        )
        assert ("2", "1", "1") == tuple(
            found[f"$SYS/{whose}/subscriptions/count"] for whose in ("broker", "brokers/n1", "brokers/n2")
        )
        assert ("1", "1", "0") == tuple(
            found[f"$SYS/{whose}/publish/messages/received"] for whose in ("broker", "brokers/n1", "brokers/n2")
        )
        of_one = {topic.removeprefix("$SYS/brokers/n2/") for topic in found if topic.startswith("$SYS/brokers/n2/")}
        of_all = {topic.removeprefix("$SYS/broker/") for topic in found if topic.startswith("$SYS/broker/")}
        # A node says for itself what version it has.
        assert of_all - of_one <= {"version", "timestamp"}
        assert of_one <= of_all
        assert found["$SYS/broker/uptime"].endswith(" seconds")


def test_totals_of_what_is_stored_and_of_what_waits_in_memory() -> None:
    one = dict.fromkeys((*LARGEST, *STORED), 12.0) | {"queued": 2.0, "bytes/sent": 5.0}
    other = dict.fromkeys((*LARGEST, *STORED), 13.0) | {"queued": 4.0, "bytes/sent": 6.0}
    found = total([one, other])
    assert 2 + 4 + 10 == found["messages/stored"]  # 10 in the store by the first, 9 by the second, which looked earlier
    assert (13, 11) == (found["uptime"], found["bytes/sent"])


def test_a_node_that_does_not_answer_counts_as_it_was_until_it_is_gone(members: Members) -> None:
    a, b = members.nodes
    car = b.client("car", properties=Properties(session_expiry=100))
    assert "1" == tree(members, a)["$SYS/broker/clients/connected"]
    a.cluster.mute.add(b.member)
    b.client("late")
    found = tree(members, a)
    assert ("1", "1") == (found["$SYS/broker/clients/connected"], found["$SYS/brokers/n2/clients/connected"])
    assert plugin(a).context.counters["unanswered"]
    members.kill(b)
    found = tree(members, a)
    assert "0" == found["$SYS/broker/clients/connected"]
    assert not [topic for topic in found if topic.startswith("$SYS/brokers/n2/")]
    car.close()


def test_a_member_without_others_asks_nobody() -> None:
    members = Members(1, plugins={"retained": {}, "systopics": {"interval": INTERVAL}})
    with standing(members.clock):
        (a,) = members.nodes
        assert [topic for topic in tree(members, a) if topic.startswith("$SYS/brokers/n1/")]
        assert not plugin(a).context.counters["unanswered"]
