"""The fan-out while a cluster has several members, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from motorcade.extension.declared import ConflictError
from motorcade.mqtt.packets import Puback
from motorcade.plugins.fanout.service import FanoutService
from motorcade.plugins.fanout.tables import DATA_PREFIX, INGRESS
from tests.support.members import MemberNode, Members
from tests.support.virtual import standing
from tests.unit.fanout.node import VIN, batch, filter_of, message_of, packed

IMPOSSIBLE = 0x83
PLUGINS: dict[str, Any] = {"fanout": {}}


def fanout(node: MemberNode) -> FanoutService:
    found: FanoutService = node.plugins.service("fanout")
    return found


def test_the_fan_out_is_refused_while_there_is_more_than_one_member() -> None:
    members = Members(2, plugins=PLUGINS)
    with standing(members.clock):
        for node in members.nodes:
            platform = node.client("platform")
            for topic in (INGRESS, f"{DATA_PREFIX}fw"):
                platform.put(topic, packed(batch([VIN], "r")))
                refused = platform.expect(Puback)
                assert IMPOSSIBLE == refused.reason
                assert "more than one node" in str(refused.properties.reason_string)
            for work in (fanout(node).send([VIN], "r", b""), fanout(node).cancel("r"), fanout(node).gc()):
                with pytest.raises(ConflictError, match="more than one node"):
                    node.run(work)
    assert {} == members.store.inner.mailboxes.boxes


def test_the_fan_out_stands_still_while_there_is_a_second_member_and_goes_on_when_it_is_gone() -> None:
    members = Members(1, plugins=PLUGINS)
    with standing(members.clock):
        (a,) = members.nodes
        car, platform = a.client(VIN), a.client("platform")
        car.subscribe(filter_of(VIN))
        for request in "ab":
            assert 0 == platform.publish(INGRESS, packed(batch([VIN], request, request)))
        first = message_of(car)
        b = members.join()
        car.ack(first)  # it counts, and nothing more comes
        assert [] == car.messages()
        members.kill(b)
        assert b"b" == message_of(car).payload
