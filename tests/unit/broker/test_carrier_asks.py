"""Sources that say when they want to be asked, and hear what has left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from motorcade.core.message import Message
from motorcade.extension.sources import Given
from tests.unit.broker.memory import MemoryNode
from tests.unit.broker.sources import AskedClerk, Desk, acknowledge, given, messages, numbers, some
from tests.unit.broker.test_carrier import WINDOW, arrive, node_with


class Teller(AskedClerk):
    """Says whether it wants to be asked, and notes what has left."""

    wants: bool | None = False

    @property
    def asks(self) -> bool | None:
        return self.wants

    def sent_run(self, given: Sequence[Given]) -> None:
        self._note("sent", [one.tag for one in given])


class Broken(Teller):
    """Knows nothing."""

    @property
    def asks(self) -> bool | None:
        raise ValueError("no idea")

    def sent_run(self, given: Sequence[Given]) -> None:
        raise ValueError("no idea")


@pytest.fixture
def node() -> Iterator[MemoryNode]:
    with node_with() as made:
        yield made


def desk_of(sort: type[Teller]) -> Desk:
    desk = Desk()
    desk.kind.make = lambda feed: sort(feed, desk)
    return desk


def told(desk: Desk) -> list[int]:
    return [tag for _, tags in desk.calls("sent") for tag in tags]


def withdraw_even(given: Given) -> Message | None:
    return given.message if given.tag % 2 else None


@pytest.mark.parametrize("wants", [False, None, True])
def test_a_source_is_asked_while_it_wants_to_be(node: MemoryNode, wants: bool | None) -> None:
    """None is what a source says that says nothing: asked each time."""
    desk = desk_of(Teller)
    desk.at_last = withdraw_even
    peer = arrive(node, desk)
    desk.clerk.wants = wants  # type: ignore[attr-defined]
    desk.give(node, *some(3))
    assert ([1, 2, 3] if wants is False else [1, 3]) == numbers(peer)
    assert [] == desk.calls("sending") or wants is not False


def test_a_source_may_change_its_mind_while_messages_wait(node: MemoryNode) -> None:
    desk = desk_of(Teller)
    desk.at_last = withdraw_even
    peer = arrive(node, desk)
    desk.give(node, *some(WINDOW + 4))
    flying = messages(peer)
    assert [] == desk.calls("sending")
    desk.clerk.wants = True  # type: ignore[attr-defined]
    acknowledge(node, peer, *flying)
    assert [number for number in range(WINDOW + 1, WINDOW + 5) if number % 2] == numbers(peer)


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("wants", [False, True])
def test_a_source_hears_what_has_left(node: MemoryNode, qos: int, wants: bool) -> None:
    """Each message once, in order, before it hears what became of it; not what waits, was withdrawn or is too large."""
    desk = desk_of(Teller)
    desk.at_last = lambda given: None if given.tag == 3 else given.message
    peer = arrive(node, desk, filters=(("x", qos),), maximum_packet_size=100)
    desk.clerk.wants = wants  # type: ignore[attr-defined]
    large = given(2, payload=b"x" * 200)
    desk.give(node, given(1), large, *some(WINDOW + 2, first=3))
    for _ in range(4):
        acknowledge(node, peer, *[message for message in messages(peer) if message.qos])
    sent = [number for number in range(1, WINDOW + 5) if number != 2 and (number != 3 or not wants)]
    assert sent == told(desk)
    for number in sent:
        order = [call for call in desk.heard if number in (call[1] if call[0] == "sent" else call[1:2])]
        assert ["sent", "delivered"] == [call[0] for call in order if call[0] in ("sent", "delivered")]


def test_what_leaves_together_is_told_together(node: MemoryNode) -> None:
    desk = desk_of(Teller)
    peer = arrive(node, desk)
    desk.give(node, *some(WINDOW + 2))
    assert [("sent", list(range(1, WINDOW + 1)))] == desk.calls("sent")
    acknowledge(node, peer, *messages(peer)[:2])
    assert list(range(1, WINDOW + 3)) == told(desk)


def test_a_source_that_fails_to_say_hurts_nobody(node: MemoryNode) -> None:
    """It is asked, to be on the safe side."""
    desk = desk_of(Broken)
    desk.at_last = withdraw_even
    peer = arrive(node, desk)
    desk.give(node, *some(3))
    assert [1, 3] == numbers(peer)
    assert desk.kind.counters["failed"] >= 2
