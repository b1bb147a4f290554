"""Compacted queues while a cluster has several members, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from motorcade.extension.compacted import SERVICE, Compacted, CompactedKind
from motorcade.extension.declared import ConflictError
from tests.support.members import MemberNode, Members
from tests.support.virtual import standing

IMPOSSIBLE = 0x83
PLUGINS: dict[str, Any] = {"ecq": {}}


def compacted(node: MemberNode) -> Compacted:
    found: Compacted = node.plugins.service(SERVICE)
    return found


def test_compacted_queues_are_refused_while_there_is_more_than_one_member() -> None:
    members = Members(2, plugins=PLUGINS)
    with standing(members.clock):
        for node in members.nodes:
            for topic in ("$ECQ/car/#", "$SCQ/q/#"):
                suback = node.client("car").subscribe(topic)
                assert (IMPOSSIBLE,) == suback.reasons
                assert "more than one node" in str(suback.properties.reason_string)
            for topic in ("$ECQ/w/car/k", "$SCQ/w/q/k", "$ECQ/rewind/car"):
                assert IMPOSSIBLE == node.client("car").publish(topic, b"1")
            assert 0 == node.client("pub").publish("elsewhere", b"1")
            with pytest.raises(ConflictError, match="more than one node"):
                node.run(compacted(node).rewind(CompactedKind.EXCLUSIVE, "car", to=1))
            with pytest.raises(ConflictError, match="more than one node"):
                node.run(compacted(node).delete(CompactedKind.EXCLUSIVE, "car"))


def test_a_compacted_queue_stands_still_while_there_is_a_second_member_and_goes_on_when_it_is_gone() -> None:
    members = Members(1, plugins=PLUGINS)
    with standing(members.clock):
        (a,) = members.nodes
        car, pub = a.client("car", receive_maximum=1), a.client("pub")
        assert (1,) == car.subscribe("$ECQ/car/#").reasons
        for key in ("a", "b"):
            assert 0 == pub.publish(f"$ECQ/w/car/{key}", key.encode())
        (first,) = car.messages()
        b = members.join()
        assert IMPOSSIBLE == pub.publish("$ECQ/w/car/c", b"c")
        members.kill(b)
        car.ack(first)
        assert b"b" == car.drain()[-1]
        assert 0 == pub.publish("$ECQ/w/car/c", b"c")
        assert [b"c"] == car.drain()
