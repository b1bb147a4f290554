"""A client that connects too often is banned by all members, wherever it connects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from motorcade.broker.limits import Limits
from motorcade.commit import Commit
from motorcade.core.reasons import ReasonCode
from motorcade.mqtt.packets import Connack, Connect
from motorcade.storage.ports import StoreAwayError, Written
from tests.support.members import MemberNode, Members
from tests.support.virtual import standing

MOST = 6  #: connects within a minute
BAN = 30.0


@pytest.fixture
def members() -> Iterator[Members]:
    limits = Limits(flapping_count=MOST, flapping_window=60.0, flapping_ban=BAN, connect_rate=0.0)
    found = Members(3, limits=limits)
    with standing(found.clock):
        yield found


def connects(node: MemberNode, client_id: str = "car") -> ReasonCode:
    peer = node.peer()
    peer.send(Connect(client_id, 5))
    node.turn()
    answer = next(packet for packet in peer.take() if isinstance(packet, Connack))
    peer.close()
    node.turn()
    return ReasonCode(answer.reason)


def until_banned(members: Members, used: int) -> int:
    """Connect to one member after the other; how often that went well."""
    for number in range(3 * MOST):
        if connects(members.nodes[number % used]) is ReasonCode.BANNED:
            return number
    raise AssertionError("it is never banned")


@pytest.mark.parametrize("used", [1, 2, 3])
def test_a_client_that_alternates_is_banned_everywhere(members: Members, used: int) -> None:
    """A member does not know of the first connect at each of the others."""
    assert MOST <= until_banned(members, used) <= MOST + used - 1
    assert [ReasonCode.BANNED] * 3 == [connects(node) for node in members.nodes]
    assert ReasonCode.SUCCESS == connects(members.nodes[1], "van")
    assert [ReasonCode.BANNED] == [connects(members.join())], "one that starts later reads it"
    members.wait(BAN + 1)
    assert [ReasonCode.SUCCESS] * 4 == [connects(node) for node in members.nodes]


def test_who_connects_once_is_told_to_nobody(members: Members) -> None:
    a, b, _ = members.nodes
    for number in range(50):
        connects(a, f"car{number}")
    assert "connects" not in members.link(a, b).sent
    connects(a, "car0")
    assert 1 == members.link(a, b).sent.count("connects")


def test_connects_long_ago_do_not_count(members: Members) -> None:
    for number in range(3 * MOST):
        assert ReasonCode.SUCCESS == connects(members.nodes[number % 3])
        members.wait(15)


def test_a_ban_that_cannot_be_stored_holds_where_it_was_found(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = members.nodes
    away: Commit[Written] = Commit.failed(StoreAwayError("the server is away"))
    monkeypatch.setattr(a.plugin_store, "write", lambda _batch: away)
    for _ in range(MOST + 1):
        found = connects(a)
    assert ReasonCode.BANNED == found == connects(a)
    assert ReasonCode.SUCCESS == connects(b)
