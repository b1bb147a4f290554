"""Queues while a cluster has several members, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from motorcade.extension.declared import ConflictError
from motorcade.plugins.logs.queues.options import QueueOptions
from motorcade.plugins.logs.queues.service import QueueService
from tests.support.members import MemberNode, Members
from tests.support.virtual import standing

IMPOSSIBLE = 0x83
PLUGINS: dict[str, Any] = {"queues": {"queue": {"q": {"topics": ["q/#"]}}}}


def queues(node: MemberNode) -> QueueService:
    found: QueueService = node.plugins.service("queues")
    return found


def test_queues_are_refused_while_there_is_more_than_one_member() -> None:
    members = Members(2, lasting=False, plugins=PLUGINS)
    with standing(members.clock):
        for node in members.nodes:
            suback = node.client("worker").subscribe("$queue/q")
            assert (IMPOSSIBLE,) == suback.reasons
            assert "more than one node" in str(suback.properties.reason_string)
            assert IMPOSSIBLE == node.client("pub").publish("q/a", b"1")
            assert 0 == node.client("pub").publish("elsewhere", b"1")
            with pytest.raises(ConflictError, match="more than one node"):
                node.run(queues(node).create("other", QueueOptions()))


def test_a_queue_stands_still_while_there_is_a_second_member_and_goes_on_when_it_is_gone() -> None:
    members = Members(1, lasting=False, plugins=PLUGINS)
    with standing(members.clock):
        (a,) = members.nodes
        worker, pub = a.client("worker", receive_maximum=1), a.client("pub")
        worker.subscribe("$queue/q")
        for payload in (b"1", b"2"):
            assert 0 == pub.publish("q/a", payload)
        (first,) = worker.messages()
        b = members.join()
        worker.ack(first)  # it counts, and nothing more comes
        assert [] == worker.messages()
        members.kill(b)
        (second,) = worker.messages()
        assert b"2" == bytes(second.payload)
        worker.ack(second)
        assert 0 == pub.publish("q/a", b"3")
        assert [b"3"] == [bytes(message.payload) for message in worker.messages()]
