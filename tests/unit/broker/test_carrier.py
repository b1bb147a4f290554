"""What sources may rely on, and clients with them: one sentence of `extension/sources.py` or `carrier.py` per test."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from motorcade.broker import carrier as carrier_module
from motorcade.broker.carrier import BACKOFF, INBOX, MAX_BACKOFF, Carrier
from motorcade.broker.limits import SessionOptions
from motorcade.broker.mailbox import FIRST_OTHER_ID
from motorcade.broker.turns import STEP, STEP_OCTETS
from motorcade.core.client import ClientInfo
from motorcade.core.errors import HookError
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Callback, Stop
from motorcade.extension.sources import RECREATE, ROOM, Destroy, Given, Why
from motorcade.mqtt.packets import Connect, Packet, Puback, Pubcomp, Publish, Pubrec, Pubrel, Suback, Unsuback
from motorcade.mqtt.properties import NONE, Properties
from tests.unit.broker.held_store import HeldStore
from tests.unit.broker.memory import MemoryNode, Peer, Turns, standing
from tests.unit.broker.sources import (
    Clerk,
    Desk,
    Shelf,
    acknowledge,
    answer,
    carrier_of,
    given,
    messages,
    numbers,
    payloads,
    session_of,
    some,
    subscribe,
    unsubscribe,
)

WINDOW = 4
EXPIRY = 100


@pytest.fixture(autouse=True)
def silence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="motorcade.broker.carrier")


@contextmanager
def node_with(store: HeldStore | None = None, **options: Any) -> Iterator[MemoryNode]:
    node = MemoryNode(SessionOptions(**{"window": WINDOW, **options}), store=store)
    with standing(node.clock):
        yield node


@pytest.fixture
def node() -> Iterator[MemoryNode]:
    with node_with() as made:
        yield made


def connect(node: MemoryNode, *, version: int = 5, clean: bool = False, expiry: int = EXPIRY, **more: Any) -> Peer:
    """The client comes, or comes back."""
    properties = Properties(session_expiry=expiry or None, **more)
    peer = node.peer(version)
    peer.send(Connect("car", version, clean, properties=properties if version == 5 else NONE))
    node.turn()
    return peer


def arrive(node: MemoryNode, *desks: Desk, filters: tuple[tuple[str, int], ...] = (("x", 1),), **more: Any) -> Peer:
    """Kinds are there, and a client has subscribed."""
    for desk in desks:
        desk.open(node)
    peer = connect(node, **more)
    peer.take()
    subscribe(node, peer, *filters)
    return peer


def part(node: MemoryNode, peer: Peer) -> None:
    """The connection breaks."""
    peer.close()
    node.turn()


def wait(node: MemoryNode, seconds: float) -> None:
    node.turn()
    node.clock.now += seconds
    node.turn()


def timers(node: MemoryNode) -> int:
    """Calls that are due later; those that end broken connections are none of ours."""
    assert isinstance(node.loop, Turns)
    return len(
        [1 for _, _, timer in node.loop.later if timer.callback is not None and "_abort" not in str(timer.callback)]
    )


def publishes(packets: list[Packet]) -> list[Publish]:
    return [packet for packet in packets if isinstance(packet, Publish)]


# --- who gets what ------------------------------------------------------------------------------------------------


def test_one_instance_per_filter(node: MemoryNode) -> None:
    """A kind has an instance for each filter of a client."""
    desk = Desk()
    arrive(node, desk, filters=(("x", 1), ("y", 1)))
    assert [["x"], ["y"]] == [list(clerk.feed.subscriptions) for clerk in desk.clerks]
    assert [("subscribe", "x", Why.NEW), ("subscribe", "y", Why.NEW)] == desk.heard


def test_one_instance_for_all_filters(node: MemoryNode) -> None:
    """A multi-topic kind has one instance per client, which ends with its last filter."""
    desk = Desk(multi_topic=True)
    peer = arrive(node, desk, filters=(("x", 1), ("y", 1)))
    assert 1 == len(desk.clerks) and ["x", "y"] == list(desk.clerk.feed.subscriptions)
    unsubscribe(node, peer, "x")
    assert not desk.clerk.over and ["y"] == list(desk.clerk.feed.subscriptions)
    unsubscribe(node, peer, "y")
    assert desk.clerk.over


def test_instances_are_made_for_each_client(node: MemoryNode) -> None:
    """`feed.client` is the client whose source it is."""
    desk = Desk().open(node)
    for name in ("car", "van"):
        subscribe(node, node.client(name), ("x", 1))
    assert ["car", "van"] == [clerk.feed.client.client_id for clerk in desk.clerks]


def test_only_filters_with_the_prefix_are_offered(node: MemoryNode) -> None:
    desk = Desk(prefix="$q/")
    arrive(node, desk, filters=(("x", 1), ("$q/x", 1), ("$share/g/$q/x", 1)))
    assert [("subscribe", "$q/x", Why.NEW)] == desk.heard


def test_only_filters_that_the_kind_wants_are_offered(node: MemoryNode) -> None:
    """`wants` is asked with the client, the subscription and why."""
    asked: list[tuple[str, str, Why]] = []

    def wants(client: ClientInfo, subscription: Subscription, why: Why) -> bool:
        asked.append((client.client_id, subscription.filter, why))
        return subscription.filter == "y"

    desk = Desk(wants=wants)
    arrive(node, desk, filters=(("x", 1), ("y", 1)))
    assert [("subscribe", "y", Why.NEW)] == desk.heard
    assert {("car", "x", Why.NEW), ("car", "y", Why.NEW)} == set(asked)


def test_a_filter_that_nobody_takes_costs_nothing(node: MemoryNode) -> None:
    """`subscribe` answers False: the instance ends, and nothing is left."""
    desk = Desk()
    desk.takes = lambda clerk, subscription, why: False
    arrive(node, desk)
    assert [("subscribe", "x", Why.NEW), ("terminate",)] == desk.heard
    assert session_of(node).carrier is None


def test_subscribing_again_changes_nothing_but_the_options(node: MemoryNode) -> None:
    """Without `renew` a source goes on; what it has given is sent with the new QoS and identifier."""
    desk = Desk()
    peer = arrive(node, desk, filters=(("x", 1),))
    desk.give(node, *some(WINDOW + 1))
    first = messages(peer)
    subscribe(node, peer, ("x", 0), identifier=9)
    assert 1 == len(desk.calls("subscribe"))
    (last,) = messages(peer)
    assert (0, (9,)) == (last.qos, last.properties.subscription_ids)
    assert [()] * WINDOW == [packet.properties.subscription_ids for packet in first]


def test_subscribing_again_begins_anew_with_renew(node: MemoryNode) -> None:
    """The old instance is replaced; what it had given and not sent does not come."""
    desk = Desk(renew=True)
    peer = arrive(node, desk)
    desk.give(node, *some(WINDOW + 2))
    flying = messages(peer)
    desk.heard.clear()
    subscribe(node, peer, ("x", 1))
    assert [("unsubscribe", "x", Why.REMOVED), ("subscribe", "x", Why.AGAIN)] == desk.heard
    assert 2 == len(desk.clerks)
    acknowledge(node, peer, *flying)
    assert [] == messages(peer)
    assert [1, 2, 3, 4] == desk.tags() and desk.clerks[0].over


def test_a_repeated_subscription_that_is_not_wanted_leaves_the_old_one(node: MemoryNode) -> None:
    """With `renew`, but `wants` says no to AGAIN: what the first subscription is owed still comes."""
    desk = Desk(renew=True, wants=lambda client, subscription, why: why is not Why.AGAIN)
    peer = arrive(node, desk)
    desk.give(node, *some(WINDOW + 2))
    flying = messages(peer)
    subscribe(node, peer, ("x", 1))
    acknowledge(node, peer, *flying)
    assert [5, 6] == numbers(peer)


# --- what callbacks hear ------------------------------------------------------------------------------------------


def test_what_a_source_sends_itself_comes_in_order_and_later(node: MemoryNode) -> None:
    """Never inside the call that sends it."""
    desk = Desk()
    arrive(node, desk)
    for what in ("a", "b", "c"):
        desk.clerk.feed.send(what)
    assert [] == desk.calls("info")
    node.turn()
    assert ["a", "b", "c"] == [call[1] for call in desk.calls("info")]


def test_a_source_may_send_itself_something_in_its_constructor(node: MemoryNode) -> None:
    desk = Desk()
    desk.made = lambda clerk: clerk.feed.send("begin")
    arrive(node, desk)
    assert ["begin"] == [call[1] for call in desk.calls("info")]


def test_what_is_sent_later_comes_later(node: MemoryNode) -> None:
    """Unless it is cancelled."""
    desk = Desk()
    arrive(node, desk)
    desk.clerk.feed.send_later(1.0, "a")
    desk.clerk.feed.send_later(1.0, "b").cancel()
    wait(node, 0.9)
    assert [] == desk.calls("info")
    wait(node, 0.2)
    assert ["a"] == [call[1] for call in desk.calls("info")]
    assert 0 == timers(node)


def test_qos_0_is_delivered_when_it_is_written(node: MemoryNode) -> None:
    desk = Desk()
    peer = arrive(node, desk)
    desk.give(node, given(1, qos=0))
    assert [(1, ReasonCode.SUCCESS, "")] == desk.acks() and [1] == numbers(peer)


def test_qos_1_is_delivered_with_puback(node: MemoryNode) -> None:
    desk = Desk()
    peer = arrive(node, desk)
    desk.give(node, given(1))
    assert [] == desk.acks()
    acknowledge(node, peer, *messages(peer))
    assert [(1, ReasonCode.SUCCESS, "")] == desk.acks()


@pytest.mark.parametrize("reason", [ReasonCode.SUCCESS, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND])
def test_qos_2_is_delivered_with_pubcomp(node: MemoryNode, reason: ReasonCode) -> None:
    """Whatever PUBCOMP says: the client has taken the message with PUBREC."""
    desk = Desk()
    peer = arrive(node, desk, filters=(("x", 2),))
    desk.give(node, given(1, qos=2))
    (message,) = messages(peer)
    assert 2 == message.qos
    peer.send(Pubrec(message.packet_id))
    node.turn()
    assert [Pubrel(message.packet_id)] == peer.take() and [] == desk.acks()
    peer.send(Pubcomp(message.packet_id, reason))
    node.turn()
    assert [(1, ReasonCode.SUCCESS, "")] == desk.acks()


def test_a_source_may_hear_of_several_deliveries_at_once(node: MemoryNode) -> None:
    """Those that fared alike, oldest first, if it overrides `delivered_run`; several in flight may not be all."""
    desk = Desk(runs=True)
    peer = arrive(node, desk)
    desk.give(node, *some(4))
    flying = messages(peer)
    peer.send(
        *(Puback(packet.packet_id) for packet in flying[:2]), Puback(flying[2].packet_id, ReasonCode.QUOTA_EXCEEDED)
    )
    node.turn()
    runs = [(call[1], call[2].reason) for call in desk.calls("delivered_run")]
    assert [1, 2, 3] == [tag for tags, _ in runs for tag in tags]
    assert ([3], ReasonCode.QUOTA_EXCEEDED) == runs[-1]
    acknowledge(node, peer, flying[3])
    assert [] == desk.calls("delivered") and [4] == desk.calls("delivered_run")[-1][1]


def test_a_source_that_fails_with_several_deliveries_is_made_anew(node: MemoryNode) -> None:
    desk = Desk(runs=True)
    desk.after = _raising
    peer = arrive(node, desk)
    desk.give(node, *some(3))
    acknowledge(node, peer, *messages(peer))
    wait(node, BACKOFF)
    assert 2 == len(desk.clerks) and 1 == len(desk.calls("delivered_run"))


@pytest.mark.parametrize(("qos", "answer"), [(1, Puback), (2, Pubrec)])
def test_a_refusal_is_told(node: MemoryNode, qos: int, answer: Any) -> None:
    """And its place in the window is free."""
    desk = Desk()
    peer = arrive(node, desk, filters=(("x", 2),))
    desk.give(node, given(1, qos=qos))
    (message,) = messages(peer)
    peer.send(answer(message.packet_id, ReasonCode.QUOTA_EXCEEDED))
    node.turn()
    assert [(1, ReasonCode.QUOTA_EXCEEDED, "")] == desk.acks() and desk.calls("delivered")[0][2].refused
    assert not session_of(node).inflight


def test_the_qos_is_the_lower_of_message_and_subscription(node: MemoryNode) -> None:
    desk = Desk(multi_topic=True)
    peer = arrive(node, desk, filters=(("0", 0), ("1", 1), ("2", 2)))
    desk.give(node, *(given(1, filter_, qos=qos) for filter_ in "012" for qos in (0, 2)))
    got = messages(peer)
    for packet in got:
        reply = answer(packet)
        if reply is not None:
            peer.send(reply)
    assert [0, 0, 0, 1, 0, 2] == [packet.qos for packet in got]


def test_released_kinds_send_qos_1_at_most(node: MemoryNode) -> None:
    desk = Desk(release=True)
    peer = arrive(node, desk, filters=(("x", 2),))
    desk.give(node, given(1, qos=2))
    assert [1] == [packet.qos for packet in messages(peer)]


def test_unsubscribing_takes_away_what_was_not_sent(node: MemoryNode) -> None:
    """The source sees it in `feed.unsent` once more; the client gets nothing of it."""
    desk = Desk()
    unsent: list[list[int]] = []
    desk.leaves = lambda clerk, filter_, why: unsent.append([g.tag for g in clerk.feed.unsent])
    peer = arrive(node, desk)
    desk.give(node, *some(WINDOW + 3))
    flying = messages(peer)
    assert [Unsuback(2, (ReasonCode.SUCCESS,))] == unsubscribe(node, peer, "x")
    assert [[5, 6, 7]] == unsent
    acknowledge(node, peer, *flying)
    assert [] == messages(peer)


def test_acknowledgements_after_unsubscribing_are_told(node: MemoryNode) -> None:
    """All of them, also when they come in one read; then the source ends."""
    desk = Desk()
    peer = arrive(node, desk)
    desk.give(node, *some(3))
    flying = messages(peer)
    unsubscribe(node, peer, "x")
    assert [] == desk.calls("terminate")
    acknowledge(node, peer, *flying)
    assert [1, 2, 3] == desk.tags() and ("terminate",) == desk.heard[-1]
    assert session_of(node).carrier is None


def test_a_source_that_leaves_is_asked_for_nothing(node: MemoryNode) -> None:
    """Without a filter it may give nothing, and RECREATE is no reason to end before the last acknowledgement."""
    desk = Desk()
    peer = arrive(node, desk)
    desk.give(node, *some(2))
    flying = messages(peer)
    unsubscribe(node, peer, "x")
    desk.answer = lambda clerk, what, desired: RECREATE
    desk.clerk.feed.send("?")
    node.turn()
    assert ("info", "?", 0) == desk.heard[-1]
    acknowledge(node, peer, *flying)
    assert [1, 2] == desk.tags() and 1 == len(desk.clerks) and 0 == timers(node)


def test_unsubscribing_one_of_several_filters_leaves_the_others(node: MemoryNode) -> None:
    desk = Desk(multi_topic=True)
    peer = arrive(node, desk, filters=(("x", 1), ("y", 1)))
    desk.give(node, *some(WINDOW, "x"), given(10, "x"), given(11, "y"), given(12, "x"), given(13, "y"))
    flying = messages(peer)
    unsubscribe(node, peer, "x")
    acknowledge(node, peer, *flying)
    assert [11, 13] == numbers(peer)


def test_messages_for_a_filter_it_does_not_have_are_strays(node: MemoryNode) -> None:
    desk = Desk()
    peer = arrive(node, desk)
    desk.give(node, given(1, "y"), given(2, "x"))
    assert [2] == numbers(peer) and 1 == desk.kind.counters["stray"]


# --- what callbacks answer ----------------------------------------------------------------------------------------


def test_destroy_ends_some_filters(node: MemoryNode) -> None:
    """Without an `unsubscribe`: the source has said so itself. What it had given for them is gone."""
    desk = Desk(multi_topic=True)
    peer = arrive(node, desk, filters=(("x", 1), ("y", 1)))
    desk.give(node, *some(WINDOW, "y"), given(10, "x"), given(11, "y"))
    flying = messages(peer)
    desk.answer = lambda clerk, what, desired: Destroy(["x"])
    desk.clerk.feed.send("now")
    node.turn()
    assert ["y"] == list(desk.clerk.feed.subscriptions) and not desk.clerk.over
    acknowledge(node, peer, *flying)
    assert [11] == numbers(peer) and not desk.calls("unsubscribe")


def test_destroy_ends_a_source(node: MemoryNode) -> None:
    """In flight stays in flight; nobody hears of it any more, and nothing is left."""
    desk = Desk()
    desk.after = lambda clerk, given, ack: Destroy()
    peer = arrive(node, desk)
    desk.give(node, *some(2))
    flying = messages(peer)
    acknowledge(node, peer, flying[0])
    assert [1] == desk.tags() and desk.clerk.over and not desk.calls("unsubscribe")
    acknowledge(node, peer, flying[1])
    assert [1] == desk.tags() and session_of(node).carrier is None


def test_destroy_by_something_sent_leaves_nothing(node: MemoryNode) -> None:
    desk = Desk()
    desk.answer = lambda clerk, what, desired: Destroy()
    arrive(node, desk)
    desk.clerk.feed.send("now")
    node.turn()
    assert desk.clerk.over and session_of(node).carrier is None


def test_recreate_makes_a_new_instance_after_a_while(node: MemoryNode) -> None:
    """The old one hears `unsubscribe` with what it had not sent, and ends; the next one finds what it has kept."""
    desk = Desk()
    unsent: list[int] = []
    desk.leaves = lambda clerk, filter_, why: unsent.extend(g.tag for g in clerk.feed.unsent)
    peer = arrive(node, desk)
    desk.clerk.feed.kept = "notes"
    desk.give(node, *some(WINDOW + 1))
    assert [1, 2, 3, 4] == numbers(peer)
    desk.heard.clear()
    _recreate(node, desk)
    assert [("unsubscribe", "x", Why.REMOVED), ("terminate",)] == desk.heard[1:] and [5] == unsent
    wait(node, BACKOFF)
    assert ("subscribe", "x", Why.RECREATED) == desk.heard[-1]
    assert "notes" == desk.clerk.feed.kept and [1, 2, 3, 4] == [g.tag for g in desk.clerk.feed.inflight]
    assert 1 == desk.kind.counters["recreated"]


def test_a_filter_that_comes_while_there_is_no_instance_is_new_to_the_next(node: MemoryNode) -> None:
    """Given up and taken again in the meantime, it does not go on where it was."""
    desk = Desk(multi_topic=True)
    desk.answer = lambda clerk, what, desired: RECREATE
    peer = arrive(node, desk, filters=(("x", 1), ("y", 1)))
    desk.clerk.feed.send("broken")
    node.turn()
    unsubscribe(node, peer, "y")
    subscribe(node, peer, ("y", 1))
    desk.heard.clear()
    wait(node, 1)
    assert [("subscribe", "x", Why.RECREATED), ("subscribe", "y", Why.NEW)] == desk.heard


def _recreate(node: MemoryNode, desk: Desk) -> None:
    desk.answer = lambda clerk, what, desired: RECREATE if what == "broken" else None
    desk.clerk.feed.send("broken")
    node.turn()


def test_the_back_off_doubles_up_to_a_bound(node: MemoryNode) -> None:
    desk = Desk()
    arrive(node, desk)
    expected = BACKOFF
    for _ in range(12):
        made = len(desk.clerks)
        _recreate(node, desk)
        wait(node, expected * 0.99)
        assert made == len(desk.clerks)
        wait(node, expected * 0.02)
        assert made + 1 == len(desk.clerks)
        expected = min(2 * expected, MAX_BACKOFF)
    assert expected == MAX_BACKOFF


def test_the_back_off_begins_anew_after_a_delivery(node: MemoryNode) -> None:
    desk = Desk()
    peer = arrive(node, desk)
    for _ in range(4):
        _recreate(node, desk)
        wait(node, MAX_BACKOFF)
    desk.answer = lambda clerk, what, desired: [given(1)]
    desk.clerk.feed.send("go")
    node.turn()
    acknowledge(node, peer, *messages(peer))
    made = len(desk.clerks)
    _recreate(node, desk)
    wait(node, BACKOFF)
    assert made + 1 == len(desk.clerks)


def test_a_source_that_fails_at_every_delivery_waits_longer_and_longer(node: MemoryNode) -> None:
    """What raises has not delivered."""
    desk = Desk()

    def takes(clerk: Clerk, subscription: Subscription, why: Why) -> bool:
        clerk.feed.send([given(1, qos=0)])
        return True

    desk.takes = takes
    desk.after = _raising
    peer = arrive(node, desk)
    wait(node, BACKOFF)
    assert 2 == len(desk.clerks)
    wait(node, BACKOFF * 1.5)
    assert 2 == len(desk.clerks)
    wait(node, BACKOFF)
    assert 3 == len(desk.clerks) and [1, 1, 1] == numbers(peer)


def _raising(*_: Any) -> Any:
    raise RuntimeError("a plugin's own trouble")


def test_acknowledgements_while_there_is_no_instance_reach_the_next_one(node: MemoryNode) -> None:
    """Until then they count as in flight for it."""
    desk = Desk()
    seen = _look_inflight(desk)
    peer = arrive(node, desk)
    desk.give(node, *some(3))
    flying = messages(peer)
    _recreate(node, desk)
    acknowledge(node, peer, flying[1])
    wait(node, BACKOFF)
    assert [2] == desk.tags() and [2, 1, 3] == seen[-1]
    acknowledge(node, peer, flying[0], flying[2])
    assert [2, 1, 3] == desk.tags()


def _look_inflight(desk: Desk) -> list[list[int]]:
    """What each instance from now on finds in flight when it hears of its filter."""
    seen: list[list[int]] = []

    def takes(clerk: Clerk, subscription: Subscription, why: Why) -> bool:
        seen.append([g.tag for g in clerk.feed.inflight])
        return True

    desk.takes = takes
    return seen


def test_a_filter_that_comes_while_there_is_no_instance_is_offered_to_the_next_one(node: MemoryNode) -> None:
    desk = Desk(multi_topic=True)
    peer = arrive(node, desk)
    _recreate(node, desk)
    subscribe(node, peer, ("y", 1))
    assert 1 == len(desk.clerks)
    wait(node, BACKOFF)
    assert 2 == len(desk.clerks) and ["x", "y"] == list(desk.clerk.feed.subscriptions)


@pytest.mark.parametrize("how", ["unsubscribe", "break", "unregister"])
def test_who_is_gone_is_not_made_anew(node: MemoryNode, how: str) -> None:
    """Its timer goes with the subscription, the connection or the kind."""
    desk = Desk()
    peer = arrive(node, desk)
    _recreate(node, desk)
    assert 1 == timers(node)
    if how == "unsubscribe":
        unsubscribe(node, peer, "x")
    elif how == "break":
        part(node, peer)
    else:
        desk.close(node)
    assert 0 == timers(node)
    wait(node, MAX_BACKOFF)
    assert 1 == len(desk.clerks)


def test_a_new_instance_that_takes_nothing_is_the_end(node: MemoryNode) -> None:
    desk = Desk()
    arrive(node, desk)
    _recreate(node, desk)
    desk.takes = lambda clerk, subscription, why: False
    wait(node, BACKOFF)
    assert desk.clerk.over and session_of(node).carrier is None


# --- rule 1: room -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5, 200])
def test_promises_stay_within_the_buffer(node: MemoryNode, count: int) -> None:
    """Each source is promised at most half of what is left, and one at least."""
    desk = Desk()
    arrive(node, desk, filters=tuple((f"x{n}", 1) for n in range(count)))
    left = 128
    for number, clerk in enumerate(desk.clerks):
        told = clerk.feed.desired
        assert max(1, left // 2) == told, number
        left = max(0, left - told)
    assert carrier_of(node).promised <= 128 + count
    assert carrier_of(node).promised == sum(clerk.feed.desired for clerk in desk.clerks[:1]) + sum(
        lane.promised for lane in list(carrier_of(node).lanes.values())[1:]
    )


def test_a_promise_never_shrinks(node: MemoryNode) -> None:
    """Whoever was told 64 may fetch 64 and give them later, whatever others were told meanwhile."""
    slow, quick = Desk("slow", prefix="s"), Desk("quick", prefix="q")
    peer = arrive(node, slow, quick, filters=(("s", 1), ("q", 1)))
    assert 64 == slow.clerk.feed.desired and 32 == quick.clerk.feed.desired
    quick.give(node, *some(32, "q"))
    slow.clerk.feed.send("?")
    node.turn()
    assert ("info", "?", 64) == slow.heard[-1]
    slow.give(node, *some(64, "s"))
    assert 0 == slow.kind.counters["overshoot"] and 96 == carrier_of(node).buffered + len(messages(peer))


def test_what_a_source_gives_counts_against_its_promise(node: MemoryNode) -> None:
    desk = Desk()
    arrive(node, desk)
    assert 64 == desk.clerk.feed.desired
    desk.give(node, *some(WINDOW + 10))
    assert (10, 50) == (carrier_of(node).buffered, desk.lane.promised)
    assert 59 == desk.clerk.feed.desired  # half of 128 - 10


def test_who_was_told_0_hears_of_room() -> None:
    """As soon as there is some, and only once."""
    with node_with(window=1, source_buffer=2) as node:
        desk = Desk()
        peer = arrive(node, desk)
        desk.give(node, *some(3))
        assert 0 == desk.clerk.feed.desired
        node.turn()
        assert [] == [call for call in desk.calls("info") if call[1] is ROOM]
        acknowledge(node, peer, *messages(peer))
        assert 0 == desk.calls("delivered")[-1][2].desired
        acknowledge(node, peer, *messages(peer))
        assert [("info", ROOM, 1)] == [call for call in desk.calls("info") if call[1] is ROOM]


def test_room_that_an_unsubscribe_makes_is_told() -> None:
    """Nobody has to wait for an acknowledgement to hear of it."""
    with node_with(source_buffer=4, window=1) as node:
        one, other = Desk("one", prefix="o"), Desk("other", prefix="t")
        peer = arrive(node, one, other, filters=(("o", 1), ("t", 1)))
        one.give(node, *some(5, "o"))
        other.give(node, given(1, "t"))
        assert 0 == other.clerk.feed.desired
        unsubscribe(node, peer, "o")
        assert [("info", ROOM, 1)] == [call for call in other.calls("info") if call[1] is ROOM]


@pytest.mark.parametrize("how", ["unsubscribe", "destroy"])
def test_what_a_purge_leaves_is_room(how: str) -> None:
    """A source whose messages for one filter are gone hears that it may give more for the others."""
    with node_with(window=1) as node:
        desk = Desk(multi_topic=True, max_unacked=1)
        blocker = Desk("blocker", prefix="b")
        blocker.open(node)
        peer = arrive(node, desk, filters=(("b", 1), ("x", 1), ("y", 0)))
        blocker.give(node, given(1, "b"))
        assert 1 == desk.clerk.feed.desired
        desk.give(node, given(1, "x"))
        desk.heard.clear()
        if how == "unsubscribe":
            unsubscribe(node, peer, "x")
        else:
            desk.answer = lambda clerk, what, desired: Destroy(["x"]) if what == "now" else None
            desk.clerk.feed.send("now")
            node.turn()
        assert ("info", ROOM, 1) == desk.heard[-1]


def test_an_outcome_is_counted_once(node: MemoryNode) -> None:
    """Also if the instance fails that hears of it, and the next one hears of the rest."""
    desk = Desk()
    desk.after = _raising
    peer = arrive(node, desk)
    desk.give(node, *some(3))
    acknowledge(node, peer, *messages(peer))
    desk.after = lambda clerk, given, ack: None
    wait(node, BACKOFF)
    assert [1, 2, 3] == desk.tags() and 3 == desk.kind.counters["delivered"]


def test_giving_too_much_is_counted_and_sent_all_the_same() -> None:
    with node_with(source_buffer=8) as node:
        desk = Desk()
        peer = arrive(node, desk)
        assert 4 == desk.clerk.feed.desired
        desk.give(node, *some(50))
        assert 46 == desk.kind.counters["overshoot"] == node.plane.stats.refused["source_buffer"]
        got: list[int] = []
        while flying := messages(peer):
            assert len(flying) <= WINDOW
            got += [int(packet.payload) for packet in flying]
            acknowledge(node, peer, *flying)
        assert list(range(1, 51)) == got


def test_bytes_are_bounded_too() -> None:
    """Beyond the bound every source may have one message waiting."""
    with node_with(source_buffer_bytes=1000) as node:
        big, small = Desk("big", prefix="b"), Desk("small", prefix="s")
        arrive(node, big, small, filters=(("b", 1), ("s", 1)))
        big.give(node, *(given(n, "b", payload=b"1" * 250) for n in range(WINDOW + 4)))
        assert 1000 == carrier_of(node).octets
        assert 0 == big.clerk.feed.desired - big.lane.promised and 1 == small.clerk.feed.desired
        small.give(node, given(1, "s"))
        assert 0 == small.clerk.feed.desired


def test_no_more_in_flight_than_a_kind_may_have(node: MemoryNode) -> None:
    """`max_unacked`: what is in flight and what waits is taken off the number it is told."""
    desk = Desk(max_unacked=2)
    peer = arrive(node, desk)
    assert 2 == desk.clerk.feed.desired
    desk.give(node, *some(5))
    flying = messages(peer)
    assert [1, 2] == [int(packet.payload) for packet in flying] and 0 == desk.clerk.feed.desired
    acknowledge(node, peer, flying[0])
    assert [3] == numbers(peer)


def test_the_client_gets_no_more_than_it_takes(node: MemoryNode) -> None:
    """Its receive maximum holds for sources and live messages together."""
    desk = Desk(prefix="x")
    peer = arrive(node, desk, filters=(("x", 1), ("live", 1)), receive_maximum=3)
    publisher = node.client("pub")
    publisher.send(*(Publish("live", b"%d" % n, 1, packet_id=n) for n in (101, 102)))
    node.turn()
    desk.give(node, *some(5))
    flying = messages(peer)
    assert [101, 102, 1] == [int(packet.payload) for packet in flying]
    acknowledge(node, peer, flying[0])
    assert [2] == numbers(peer)


# --- rule 2: order, and everybody's turn --------------------------------------------------------------------------


def test_qos_0_does_not_overtake_what_waits_before_it(node: MemoryNode) -> None:
    desk = Desk(multi_topic=True)
    peer = arrive(node, desk, filters=(("x", 1), ("y", 0)))
    desk.give(node, *some(WINDOW + 1, "x"), given(9, "y"))
    flying = messages(peer)
    assert [1, 2, 3, 4] == [int(packet.payload) for packet in flying]
    acknowledge(node, peer, flying[0])
    assert [5, 9] == numbers(peer)


def test_a_full_window_does_not_stop_qos_0_of_others(node: MemoryNode) -> None:
    one, other = Desk("one", prefix="x"), Desk("other", prefix="y")
    peer = arrive(node, one, other, filters=(("x", 1), ("y", 0)))
    one.give(node, *some(WINDOW + 1))
    other.give(node, given(9, "y", 0))
    assert [1, 2, 3, 4, 9] == numbers(peer)


def test_sources_send_in_turn() -> None:
    """While the window has room for one message, each source that waits gets it once in a round."""
    with node_with(window=1) as node:
        desks = [Desk(name, prefix=name) for name in "abc"]
        peer = arrive(node, *desks, filters=(("a", 1), ("b", 1), ("c", 1)))
        for desk in desks:
            desk.give(node, *some(5, desk.kind.name))
        got = ""
        while flying := messages(peer):
            got += "".join(packet.topic[-1] for packet in flying)
            acknowledge(node, peer, *flying)
        assert "abc" * 4 == got[1:13] or "bca" * 4 == got[1:13]
        assert 15 == len(got)


def test_a_source_has_one_turn_in_a_round_whatever_its_messages_need() -> None:
    """One whose messages need room in the window and need none, by turns, is not served twice as often."""
    with node_with(window=30) as node:
        mixed, plain = Desk("mixed", multi_topic=True, prefix="m"), Desk("plain", prefix="p")
        peer = arrive(node, mixed, plain, filters=(("m0", 0), ("m1", 1), ("p", 0)))
        peer.wire.fill()
        mixed.give(node, *(given(n, f"m{n % 2}") for n in range(12)))
        plain.give(node, *some(12, "p", 0))
        peer.wire.drain()
        node.turn()
        got = "".join(packet.topic[5] for packet in messages(peer))
        assert 24 == len(got) and "mm" not in got and "pp" not in got


@pytest.mark.parametrize("durable", [False, True], ids=["queue", "mailbox"])
@pytest.mark.parametrize("sources", [1, 3])
def test_live_messages_have_their_turn(durable: bool, sources: int) -> None:
    """Between two messages of a source with a backlog one live message is sent, though the window frees one by one."""
    with node_with(HeldStore() if durable else None, window=1) as node:
        desks = [Desk(name, prefix=name) for name in "abc"[:sources]]
        peer = arrive(node, *desks, filters=(("live", 1), *((desk.kind.name, 1) for desk in desks)))
        for desk in desks:
            desk.give(node, *some(20, desk.kind.name))
        publisher = node.client("pub")
        publisher.send(*(Publish("live", b"%d" % n, 1, packet_id=n) for n in range(1, 6)))
        node.turn()
        got = ""
        while len(got) < 5 * (sources + 1) + 3:
            (packet,) = messages(peer)
            got += packet.topic[-1]
            acknowledge(node, peer, packet)
        rounds = got.split("e")  # of `live`
        assert 6 == len(rounds)
        assert all(len(between) == sources for between in rounds[1:5]), got


def test_live_messages_that_need_no_room_do_not_wait_for_any(node: MemoryNode) -> None:
    """The window is full and a source of QoS 0 has no end: live messages of QoS 0 have their turn all the same."""
    flying, endless = Desk("flying", prefix="x"), Desk("endless", prefix="y")
    peer = arrive(node, flying, endless, filters=(("x", 1), ("y", 0), ("live", 1)))
    flying.give(node, *some(WINDOW))
    first, *_ = messages(peer)
    node.client("pub").send(Publish("live", b"1", 1, packet_id=1), Publish("live", b"2"), Publish("live", b"3"))
    node.turn()
    assert [] == messages(peer), "they wait behind one that needs room"
    endless.after = lambda clerk, one, ack: [given(one.tag + 1, "y", 0)]
    endless.clerk.feed.send([given(1, "y", 0)])
    assert isinstance(node.loop, Turns)
    for number in range(20):  # it never comes to rest: as many callbacks as the source needs for a few messages
        callback, args = node.loop.soon.popleft()
        callback(*args)
        if number == 5:
            peer.send(Puback(first.packet_id or 0))
    assert [b"1", b"2", b"3"] == [packet.payload for packet in messages(peer) if packet.topic == "live"]


def test_a_small_source_beside_a_huge_one(node: MemoryNode) -> None:
    """Its next message is delivered within one round, however much the other has."""
    huge, small = Shelf("huge", 100_000, filter_="huge").open(node), Desk("small", prefix="small").open(node)
    peer = connect(node)
    peer.take()
    subscribe(node, peer, ("huge", 1), ("small", 1))
    for number in range(20):
        small.give(node, given(number, "small"))
        passed = 0
        while True:
            flying = messages(peer)
            if any(packet.topic == "from/small" for packet in flying):
                break
            passed += len(flying)
            acknowledge(node, peer, *flying[:1])
            flying = flying[1:]
            acknowledge(node, peer, *flying)
        assert passed <= 2 * WINDOW  # what was in flight, and what took its place before
        acknowledge(node, peer, *flying)
    assert huge.most <= 64


def test_5000_messages_through_a_window_of_32() -> None:
    with node_with(window=32) as node:
        Shelf("s", 5000).open(node)
        peer = connect(node)
        peer.take()
        subscribe(node, peer, ("x", 1))
        got: list[int] = []
        while flying := messages(peer):
            assert len(flying) <= 32
            got += [int(packet.payload) for packet in flying]
            acknowledge(node, peer, *flying)
        assert list(range(5000)) == got


def test_fetching_later_loses_nothing(node: MemoryNode) -> None:
    """A source that is slow with its messages delivers them all, in order, and is never counted as giving too much."""
    shelves = [Shelf(name, 300, filter_=name, delay=delay).open(node) for name, delay in (("a", 0.2), ("b", 0.0))]
    peer = connect(node)
    peer.take()
    subscribe(node, peer, ("a", 1), ("b", 1))
    got: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(1000):
        flying = messages(peer)
        for packet in flying:
            got[packet.topic[-1]].append(int(packet.payload))
        acknowledge(node, peer, *flying)
        wait(node, 0.1)
        if sum(map(len, got.values())) == 600:
            break
    assert [list(range(300))] * 2 == list(got.values())
    assert [0, 0] == [shelf.kind.counters["overshoot"] for shelf in shelves]


def test_one_pump_sends_a_bounded_number(node: MemoryNode) -> None:
    """Then others have their turn of the event loop, whoever the messages are of."""
    desk = Desk()
    peer = arrive(node, desk, filters=tuple((f"x{n}", 0) for n in range(STEP - 10)))
    subscribe(node, peer, *((f"y{n}", 0) for n in range(100)))
    for clerk in desk.clerks:
        clerk.feed.send([given(1, next(iter(clerk.feed.subscriptions)), 0)])
    assert STEP == max(_pumped(node)) and STEP + 90 == len(messages(peer))


def test_one_pump_sends_a_bounded_number_of_bytes(node: MemoryNode) -> None:
    desk = Desk()
    peer = arrive(node, desk, filters=tuple((f"x{n}", 0) for n in range(20)))
    for clerk in desk.clerks:
        clerk.feed.send([given(1, next(iter(clerk.feed.subscriptions)), 0, payload=bytes(STEP_OCTETS // 4))])
    assert max(_pumped(node)) <= 5 and 20 == len(messages(peer))


def _pumped(node: MemoryNode) -> list[int]:
    """How many messages left the buffer in each pump until nothing is left to do."""
    counts: list[int] = []
    pump = Carrier.pump

    def counting(self: Carrier, now: float) -> bool:
        before = self.buffered
        more = pump(self, now)
        counts.append(before - self.buffered)
        return more

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carrier_module.Carrier, "pump", counting)
        node.turn()
    return counts


def test_large_messages_without_qos_leave_the_others_their_turn(node: MemoryNode) -> None:
    """A source whose every message uses up a pump does not starve those that need room in the window."""
    large, small = Desk("large", prefix="l"), Desk("small", prefix="s")
    peer = arrive(node, large, small, filters=(("l", 0), ("s", 1)))
    large.after = lambda clerk, given_, ack: [given(2, "l", 0, payload=bytes(2 * STEP_OCTETS))] if left() else None
    budget = iter(range(50))

    def left() -> bool:
        return next(budget, None) is not None

    large.clerk.feed.send([given(1, "l", 0, payload=bytes(2 * STEP_OCTETS))])
    small.clerk.feed.send([given(7, "s")])
    node.turn()
    topics = [packet.topic for packet in messages(peer)]
    assert topics.index("from/s") <= 2 and 52 == len(topics)


def test_nothing_is_sent_into_a_full_socket(node: MemoryNode) -> None:
    """It waits, and goes on when there is room again; the source is asked for no more meanwhile."""
    desk = Desk()
    peer = arrive(node, desk)
    peer.wire.fill()
    desk.give(node, *some(2), given(3, qos=0))
    assert [] == messages(peer) and 3 == carrier_of(node).buffered
    peer.wire.drain()
    node.turn()
    assert [1, 2, 3] == numbers(peer)


# --- rule 3: the connection comes and goes ------------------------------------------------------------------------


def test_a_source_ends_with_its_connection(node: MemoryNode) -> None:
    """First it hears why, filter by filter."""
    desk = Desk(multi_topic=True)
    peer = arrive(node, desk, filters=(("x", 1), ("y", 1)))
    desk.heard.clear()
    part(node, peer)
    assert [
        ("unsubscribe", "x", Why.DISCONNECTED),
        ("unsubscribe", "y", Why.DISCONNECTED),
        ("terminate",),
    ] == desk.heard


def test_a_session_that_ends_with_its_connection_says_so(node: MemoryNode) -> None:
    desk = Desk()
    peer = arrive(node, desk, expiry=0)
    part(node, peer)
    assert [("unsubscribe", "x", Why.ENDED), ("terminate",)] == desk.heard[1:]


def test_a_new_instance_goes_on_where_the_old_one_has_ended(node: MemoryNode) -> None:
    """It finds what was kept and what is in flight; the session sends that again, and it hears the acknowledgements."""
    desk = Desk()
    unsent: list[int] = []
    desk.leaves = lambda clerk, filter_, why: unsent.extend(g.tag for g in clerk.feed.unsent)
    peer = arrive(node, desk)
    desk.give(node, *some(WINDOW + 2))
    first = messages(peer)
    desk.clerk.feed.kept = {"next": 5}
    part(node, peer)
    assert [5, 6] == unsent
    desk.heard.clear()
    peer = connect(node)
    assert [("subscribe", "x", Why.RESUMED)] == desk.heard
    feed = desk.clerk.feed
    assert ({"next": 5}, [1, 2, 3, 4], []) == (feed.kept, [g.tag for g in feed.inflight], feed.unsent)
    again = publishes(peer.take())
    assert [(p.packet_id, p.payload, True) for p in first] == [(p.packet_id, p.payload, p.dup) for p in again]
    acknowledge(node, peer, *again)
    assert [1, 2, 3, 4] == desk.tags() and [] == messages(peer)


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("durable", [False, True], ids=["memory", "durable"])
def test_a_take_over_is_a_disconnect_and_a_return(version: int, durable: bool) -> None:
    """Nothing is lost or doubled on the way."""
    with node_with(HeldStore() if durable else None) as node:
        Shelf("s", 50).open(node)
        got: list[int] = []
        peer = connect(node, version=version)
        subscribe(node, peer, ("x", 1))
        for _ in range(40):
            flying = publishes(peer.take())
            got += [int(packet.payload) for packet in flying if not packet.dup]
            acknowledge(node, peer, *flying[: len(flying) // 2])
            got += [int(packet.payload) for packet in publishes(peer.take()) if not packet.dup]
            peer = connect(node, version=version)
        assert list(range(50)) == got


def test_a_session_that_comes_back_after_a_restart_has_its_sources_again() -> None:
    """With nothing in flight and nothing kept: that was in the memory of the process before."""
    store = HeldStore()
    with node_with(store) as node:
        peer = arrive(node, Desk())
        peer.close()
        node.turn()
        after = node.restart()
        desk = Desk().open(after)
        connect(after)
        assert [("subscribe", "x", Why.RESUMED)] == desk.heard
        assert (None, []) == (desk.clerk.feed.kept, desk.clerk.feed.inflight)


def test_acknowledgements_that_came_last_are_told_before_the_end(node: MemoryNode) -> None:
    desk = Desk()
    peer = arrive(node, desk)
    desk.give(node, *some(2))
    first, second = messages(peer)
    peer.send(Puback(first.packet_id), Puback(second.packet_id))
    peer.close()
    node.turn()
    assert ["delivered", "delivered", "unsubscribe", "terminate"] == [call[0] for call in desk.heard[-4:]]


def test_release_takes_back_what_is_in_flight(node: MemoryNode) -> None:
    """The old instance sees it for the last time; the session has nothing of it any more."""
    desk = Desk(release=True)
    back: list[int] = []
    desk.leaves = lambda clerk, filter_, why: back.extend(g.tag for g in (*clerk.feed.inflight, *clerk.feed.unsent))
    peer = arrive(node, desk)
    desk.give(node, *some(WINDOW + 1))
    part(node, peer)
    assert [1, 2, 3, 4, 5] == back and not session_of(node).inflight
    peer = connect(node)
    assert [] == publishes(peer.take()) and [] == desk.clerk.feed.inflight


def test_release_shows_a_leaving_source_what_is_taken_back(node: MemoryNode) -> None:
    """It has no filter any more, so it sees in `terminate` what was never acknowledged."""
    desk = Desk(release=True)
    back: list[int] = []
    desk.ends = lambda clerk: back.extend(g.tag for g in clerk.feed.inflight)
    peer = arrive(node, desk)
    desk.give(node, *some(3))
    flying = messages(peer)
    unsubscribe(node, peer, "x")
    acknowledge(node, peer, flying[1])
    part(node, peer)
    assert [1, 3] == back and not session_of(node).inflight


@pytest.mark.parametrize("how", ["destroy", "unregister"])
def test_release_takes_back_what_ended_sources_have_in_flight(node: MemoryNode, how: str) -> None:
    desk = Desk(release=True)
    peer = arrive(node, desk)
    desk.give(node, *some(2))
    if how == "destroy":
        desk.answer = lambda clerk, what, desired: Destroy()
        desk.clerk.feed.send("now")
        node.turn()
    else:
        desk.close(node)
    assert 2 == len(session_of(node).inflight)
    part(node, peer)
    assert not session_of(node).inflight


@pytest.mark.parametrize("lingers", [False, True])
def test_acknowledgements_for_a_filter_that_is_gone_at_the_return(node: MemoryNode, lingers: bool) -> None:
    """A kind with `lingers` hears of what was in flight when the client unsubscribed, though it has gone in between."""
    desk = Desk(lingers=lingers)
    peer = arrive(node, desk)
    desk.give(node, *some(2))
    unsubscribe(node, peer, "x")
    part(node, peer)
    desk.heard.clear()
    peer = connect(node)
    again = publishes(peer.take())
    assert 2 == len(again) and 1 + lingers == len(desk.clerks)
    acknowledge(node, peer, again[0])
    acknowledge(node, peer, again[1])
    assert (["delivered", "delivered", "terminate"] if lingers else []) == [call[0] for call in desk.heard]
    assert session_of(node).carrier is None


def test_who_lingers_for_nothing_ends(node: MemoryNode) -> None:
    """What was in flight is taken back with the connection: no instance waits for it after the return."""
    desk = Desk(lingers=True, release=True)
    peer = arrive(node, desk)
    desk.give(node, *some(2))
    unsubscribe(node, peer, "x")
    part(node, peer)
    assert session_of(node).carrier is None
    connect(node)
    assert all(clerk.over for clerk in desk.clerks) and session_of(node).carrier is None


def test_who_lingers_ends_with_the_session(node: MemoryNode) -> None:
    desk = Desk(lingers=True)
    peer = arrive(node, desk)
    desk.give(node, *some(2))
    unsubscribe(node, peer, "x")
    part(node, peer)
    connect(node, clean=True)
    assert all(clerk.over for clerk in desk.clerks) and session_of(node).carrier is None


def test_a_filter_that_is_refused_at_the_return_is_offered_once(node: MemoryNode) -> None:
    desk = Desk()
    part(node, arrive(node, desk))
    desk.heard.clear()
    desk.takes = lambda clerk, subscription, why: False
    connect(node)
    assert [("subscribe", "x", Why.RESUMED), ("terminate",)] == desk.heard
    assert session_of(node).carrier is None


@pytest.mark.parametrize("how", ["clean", "other user"])
def test_another_session_begins_with_nothing(node: MemoryNode, how: str) -> None:
    """What the old one had from its sources is not for the new one."""
    desk = Desk()
    peer = arrive(node, desk)
    desk.give(node, *some(WINDOW + 1))
    peer.take()
    old = desk.clerk
    peer = node.client("car", clean=how == "clean", username="else", properties=Properties(session_expiry=EXPIRY))
    assert old.over and [] == publishes(peer.take()) and session_of(node).carrier is None
    old.feed.send("late")
    node.turn()
    assert [] == [call for call in desk.calls("info") if call[1] == "late"]


def test_a_session_that_expires_leaves_nothing(node: MemoryNode) -> None:
    desk = Desk()
    peer = arrive(node, desk)
    desk.give(node, *some(WINDOW + 1))
    left = carrier_of(node)
    part(node, peer)
    node.clock.now += EXPIRY + 1
    node.plane.registry.due(node.clock.now)
    assert not node.plane.registry.sessions and 0 == timers(node)
    assert (0, 0, 0, {}, {}) == (left.buffered, left.octets, left.promised, left.lanes, left.unacked)


def test_what_a_source_has_in_flight_is_not_dropped_with_the_session(node: MemoryNode) -> None:
    """It is still where it came from; only live messages are lost with a session."""
    desk = Desk(prefix="x")
    peer = arrive(node, desk, filters=(("x", 1), ("live", 1)), expiry=0)
    desk.give(node, *some(2))
    node.client("pub").send(Publish("live", b"9", 1, packet_id=1))
    node.turn()
    assert 3 == len(messages(peer))
    part(node, peer)
    assert 1 == node.plane.stats.dropped["session_ended"]


@pytest.mark.parametrize(("before", "after"), [(4, 5), (5, 4)])
def test_a_client_may_come_back_with_another_version(node: MemoryNode, before: int, after: int) -> None:
    """What is in flight comes again in the other form, with its identifier where there is one."""
    desk = Desk()
    desk.open(node)
    peer = connect(node, version=before)
    subscribe(node, peer, ("x", 2), identifier=7 if before == 5 else 0)
    desk.give(node, given(1, qos=1, content_type="text"), given(2, qos=2))
    assert [1, 2] == [int(packet.payload) for packet in publishes(peer.take())]
    part(node, peer)
    peer = connect(node, version=after)
    again = publishes(peer.take())
    assert [(b"1", 1, True), (b"2", 2, True)] == [(p.payload, p.qos, p.dup) for p in again]
    if after == 5:
        assert ["text", None] == [packet.properties.content_type for packet in again]
    acknowledge(node, peer, again[0])
    peer.send(Pubrec(again[1].packet_id), Pubcomp(again[1].packet_id))
    node.turn()
    assert [1, 2] == desk.tags()


def test_a_client_may_come_back_taking_smaller_packets(node: MemoryNode) -> None:
    """What does not fit any more is in flight for the new instance until it hears that it was dropped."""
    desk = Desk()
    peer = arrive(node, desk)
    desk.give(node, given(1, payload=b"1" * 500), given(2))
    part(node, peer)
    seen = _look_inflight(desk)
    peer = connect(node, maximum_packet_size=100)
    assert [[1, 2]] == seen and [(1, ReasonCode.PACKET_TOO_LARGE, "too_large")] == desk.acks()
    assert [b"2"] == [packet.payload for packet in publishes(peer.take())]


def test_a_client_may_come_back_taking_fewer_at_once(node: MemoryNode) -> None:
    """What was in flight is repeated as it acknowledges, before anything new of the source, QoS 0 too."""
    desk = Desk(multi_topic=True)
    peer = arrive(node, desk, filters=(("x", 1), ("y", 0)))
    desk.give(node, *some(3))
    part(node, peer)
    peer = connect(node, receive_maximum=1)
    desk.give(node, given(9, "y", 0), given(4))
    got: list[int] = []
    while flying := publishes(peer.take()):
        got += [int(packet.payload) for packet in flying]
        acknowledge(node, peer, *(packet for packet in flying if packet.qos))
    assert [1, 2, 3, 9, 4] == got


# --- rule 4: trouble stays where it is ----------------------------------------------------------------------------


@pytest.mark.parametrize("callback", ["made", "takes"])
def test_a_source_that_fails_at_once_does_not_fail_the_suback(node: MemoryNode, callback: str) -> None:
    """It counts as not wanting the filter."""
    bad, good = Desk("bad"), Desk("good")
    setattr(bad, callback, _raising)
    peer = arrive(node, bad, good)
    assert [Suback(1, (ReasonCode(1),))] == peer.take()
    assert 1 == bad.kind.counters["failed"] and 1 == len(carrier_of(node).lanes)
    good.give(node, given(1))
    assert [1] == numbers(peer)


def test_a_kind_that_cannot_say_what_it_wants_wants_nothing(node: MemoryNode) -> None:
    desk = Desk(wants=_raising)
    peer = arrive(node, desk)
    assert [Suback(1, (ReasonCode(1),))] == peer.take()
    assert [] == desk.clerks and desk.kind.counters["failed"] and session_of(node).carrier is None


@pytest.mark.parametrize("callback", ["answer", "after"])
def test_a_source_that_fails_later_is_made_anew(node: MemoryNode, callback: str) -> None:
    bad, good = Desk("bad"), Desk("good")
    peer = arrive(node, bad, good)
    setattr(bad, callback, _raising)
    bad.clerk.feed.send([given(1, qos=0)])
    good.clerk.feed.send([given(2, qos=0)])
    node.turn()
    assert peer.open and 2 in numbers(peer) and [2] == good.tags()
    assert [("terminate",)] == bad.calls("terminate")
    assert 1 == bad.kind.counters["failed"] == bad.kind.counters["recreated"]
    wait(node, BACKOFF)
    assert 2 == len(bad.clerks) and not bad.clerk.over


@pytest.mark.parametrize("callback", ["leaves", "ends"])
def test_a_source_that_fails_at_the_end_has_ended(node: MemoryNode, callback: str) -> None:
    bad, good = Desk("bad"), Desk("good")
    setattr(bad, callback, _raising)
    peer = arrive(node, bad, good)
    assert isinstance(unsubscribe(node, peer, "x")[-1], Unsuback)
    assert bad.clerk.over and good.clerk.over and session_of(node).carrier is None
    subscribe(node, peer, ("x", 1))
    part(node, peer)
    assert all(clerk.over for clerk in (*bad.clerks, *good.clerks)) and 2 == bad.kind.counters["failed"]


def test_a_source_that_fails_before_sending_sends_what_it_gave(node: MemoryNode) -> None:
    desk = Desk(asked=True)
    desk.at_last = _raising
    peer = arrive(node, desk)
    desk.give(node, given(1))
    assert [1] == numbers(peer) and 1 == desk.kind.counters["failed"]


@pytest.mark.parametrize(
    "wrong",
    [
        given(1),
        7,
        [7],
        [Given(None, "x")],  # type: ignore[arg-type]
        [Given(Message("t", "text"), "x")],  # type: ignore[arg-type]
        [Given(Message("t", b""), ["x"])],  # type: ignore[arg-type]
        [Given(Message("x" * 70_000, b""), "x", 1)],
        [Given(Message("\ud800", b""), "x", 1)],
        [Given(Message("t", b"", user_properties=((1, 2),)), "x", 1)],  # type: ignore[arg-type]
        Destroy(7),  # type: ignore[arg-type]
        Destroy([["x"]]),  # type: ignore[list-item]
    ],
    ids=["list", "number", "items", "message", "bytes", "filter", "topic", "UTF-8", "properties", "end", "filters"],
)
@pytest.mark.parametrize("identifier", [0, 7])
def test_a_source_that_gives_something_wrong_hurts_nobody(node: MemoryNode, wrong: Any, identifier: int) -> None:
    """Neither its client nor the other sources, nor what it gives afterwards; and every figure stays right."""
    bad, good = Desk("bad"), Desk("good")
    bad.open(node)
    good.open(node)
    peer = connect(node)
    peer.take()
    subscribe(node, peer, ("x", 1), identifier=identifier)
    bad.answer = lambda clerk, what, desired: wrong if what == "go" else [given(3)]
    bad.clerk.feed.send("go")
    good.give(node, given(2))
    wait(node, BACKOFF)
    bad.clerk.feed.send("again")
    node.turn()
    flying = messages(peer)
    assert peer.open and [2, 3] == [int(packet.payload) for packet in flying]
    assert bad.kind.counters["failed"] + bad.kind.counters["stray"]
    acknowledge(node, peer, *flying)
    carrier = carrier_of(node)
    assert (0, 0) == (carrier.buffered, carrier.octets) and not session_of(node).inflight
    assert all(lane.unacked == 0 for lane in carrier.lanes.values())


def test_a_message_that_cannot_be_written_is_dropped_as_unusable(node: MemoryNode) -> None:
    desk = Desk()
    peer = arrive(node, desk)
    desk.give(node, Given(Message("x" * 70_000, b"", 1), "x", 1), given(2))
    assert [2] == numbers(peer) and [(1, ReasonCode.SUCCESS, "unusable")] == desk.acks()


def test_a_kind_may_be_unregistered_by_its_own_callback(node: MemoryNode) -> None:
    """In any of them: it ends, and the client stays."""

    def unregister(*args: Any) -> Any:
        node.plane.shared.sources.unregister("desk")
        return args[0].message if isinstance(args[0], Given) else None

    for callback in ("leaves", "answer", "after", "takes", "at_last"):
        desk = Desk(multi_topic=True, asked=callback == "at_last")
        desk.open(node)
        peer = node.client("car")
        setattr(desk, callback, unregister)
        subscribe(node, peer, ("x", 1), ("y", 1))
        if desk.clerks and not desk.clerk.over:
            desk.clerk.feed.send([given(1), given(2, qos=0)])
            node.turn()
        assert peer.open, callback
        unsubscribe(node, peer, "x", "y")
        part(node, peer)
        assert all(clerk.over for clerk in desk.clerks), callback
        node.plane.shared.sources.unregister("desk")


# --- rule 5: the end is the end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["return", "recreate", "unsubscribe"])
def test_what_an_ended_source_sends_reaches_nobody(node: MemoryNode, how: str) -> None:
    """Not the instance that came after it either, and no timer is left."""
    desk = Desk()
    peer = arrive(node, desk)
    old = desk.clerk
    old.feed.send_later(0.5, "planned")
    old.feed.send("sent before the end")
    if how == "return":
        peer.close()
        node.turn()
        connect(node)
    elif how == "recreate":
        desk.answer = lambda clerk, what, desired: RECREATE
        node.turn()
        wait(node, BACKOFF)
        assert 2 == len(desk.clerks)
    else:
        unsubscribe(node, peer, "x")
    desk.heard.clear()
    desk.answer = lambda clerk, what, desired: None
    old.feed.send("late")
    old.feed.send_later(0.1, "later")
    assert 0 == old.feed.desired
    wait(node, 1.0)
    assert [] == desk.heard and 0 == timers(node)
    old.feed.kept = "too late"
    assert how == "unsubscribe" or desk.clerk.feed.kept is None


def test_what_sources_are_sent_is_bounded(node: MemoryNode) -> None:
    desk = Desk()
    arrive(node, desk)
    for number in range(INBOX + 5):
        desk.clerk.feed.send(str(number))
    node.turn()
    assert INBOX == len(desk.calls("info")) and 5 == desk.kind.counters["overrun"]


# --- just before a message is sent --------------------------------------------------------------------------------


def test_a_source_may_send_a_newer_message_instead(node: MemoryNode) -> None:
    """With the newer one's own QoS; what it hears of is what it gave."""
    desk = Desk(asked=True)
    newer = {1: Message("n", b"10", 0), 2: Message("n", b"20", 2)}
    desk.at_last = lambda given: newer[given.tag]
    peer = arrive(node, desk, filters=(("x", 2),))
    desk.give(node, given(1, qos=1), given(2, qos=0))
    assert [(b"10", 0), (b"20", 2)] == [(packet.payload, packet.qos) for packet in messages(peer)]
    assert [1] == desk.tags() and [2] == [g.tag for g in desk.clerk.feed.inflight]


def test_a_source_may_withdraw_a_message(node: MemoryNode) -> None:
    desk = Desk(asked=True)
    desk.at_last = lambda given: None if given.tag == 1 else given.message
    peer = arrive(node, desk)
    desk.give(node, *some(2))
    assert [2] == numbers(peer) and [(1, ReasonCode.SUCCESS, "withdrawn")] == desk.acks()


def test_a_source_is_asked_when_there_is_room(node: MemoryNode) -> None:
    """Not before: it could not say what is newest."""
    desk = Desk(asked=True)
    peer = arrive(node, desk)
    desk.give(node, *some(WINDOW + 1))
    assert [1, 2, 3, 4] == [call[1] for call in desk.calls("sending")]
    acknowledge(node, peer, *messages(peer)[:1])
    assert [1, 2, 3, 4, 5] == [call[1] for call in desk.calls("sending")]


def test_what_has_expired_is_not_sent(node: MemoryNode) -> None:
    """Its source hears so; what has waited tells what is left of its life."""
    desk = Desk()
    peer = arrive(node, desk)
    now = node.clock.now
    desk.give(node, *some(WINDOW), given(5, expires_at=now + 5), given(6, expires_at=now + 50))
    flying = messages(peer)
    wait(node, 10)
    acknowledge(node, peer, *flying)
    (packet,) = messages(peer)
    assert (b"6", 40) == (packet.payload, packet.properties.message_expiry)
    assert (5, ReasonCode.SUCCESS, "expired") in desk.acks() and 1 == node.plane.stats.dropped["expired"]


def test_what_is_too_large_is_not_sent(node: MemoryNode) -> None:
    """It takes no place in the window and no packet id."""
    desk = Desk()
    peer = arrive(node, desk, maximum_packet_size=100)
    desk.give(node, given(1, payload=b"1" * 100), given(2))
    assert [2] == numbers(peer) and [(1, ReasonCode.PACKET_TOO_LARGE, "too_large")] == desk.acks()
    assert 1 == len(session_of(node).inflight) and 1 == node.plane.stats.dropped["too_large"]


def test_subscription_identifiers_are_those_of_the_filter(node: MemoryNode) -> None:
    """[MQTT-3.3.4-3]"""
    desk = Desk(multi_topic=True)
    peer = arrive(node, desk, filters=(("x", 1),))
    subscribe(node, peer, ("y", 1), identifier=3)
    desk.give(node, given(1, "x"), given(2, "y"), given(3, "y", 0))
    assert [(), (3,), (3,)] == [packet.properties.subscription_ids for packet in messages(peer)]


def test_retain_is_set_as_the_subscription_wants_it(node: MemoryNode) -> None:
    """[MQTT-3.3.1-12], [MQTT-3.3.1-13]; a kind of retained messages sets it always."""
    live, kept = Desk("live", prefix="l"), Desk("kept", prefix="k", retained=True)
    live.open(node)
    kept.open(node)
    peer = connect(node)
    peer.take()
    subscribe(node, peer, ("l", 1), Subscription("l/as", 1, retain_as_published=True), ("k", 1))
    for clerk in (*live.clerks, *kept.clerks):
        filter_ = next(iter(clerk.feed.subscriptions))
        clerk.feed.send([given(1, filter_, 0, retain=True), given(2, filter_, 0)])
    node.turn()
    flags = [(packet.topic, packet.payload, packet.retain) for packet in messages(peer)]
    assert {("from/l/as", b"1"), ("from/k", b"1")} == {(topic, payload) for topic, payload, retain in flags if retain}
    assert 6 == len(flags)


# --- kinds come and go --------------------------------------------------------------------------------------------


def test_clients_that_are_there_hear_of_a_new_kind(node: MemoryNode) -> None:
    peer = connect(node)
    subscribe(node, peer, ("x", 1))
    peer.take()
    desk = Desk().open(node)
    assert [("subscribe", "x", Why.RECREATED)] == desk.heard
    desk.give(node, given(1))
    assert [1] == numbers(peer)


def test_a_new_kind_that_nobody_wants_costs_nothing(node: MemoryNode) -> None:
    peer = connect(node)
    subscribe(node, peer, ("x", 1))
    Desk(prefix="$q/").open(node)
    assert session_of(node).carrier is None


def test_clients_that_are_away_hear_of_a_new_kind_when_they_come_back(node: MemoryNode) -> None:
    peer = connect(node)
    subscribe(node, peer, ("x", 1))
    part(node, peer)
    desk = Desk().open(node)
    assert [] == desk.heard
    connect(node)
    assert [("subscribe", "x", Why.RESUMED)] == desk.heard


def test_unregistering_a_kind_ends_its_sources(node: MemoryNode) -> None:
    """What was given and not sent is gone; what is in flight ends as usual, and nobody is told."""
    desk, other = Desk(), Desk("other")
    peer = arrive(node, desk, other)
    desk.give(node, *some(WINDOW + 2))
    flying = messages(peer)
    desk.heard.clear()
    desk.close(node)
    assert [("unsubscribe", "x", Why.REMOVED), ("terminate",)] == desk.heard
    other.give(node, given(9))
    acknowledge(node, peer, *flying)
    assert [9] == numbers(peer) and [] == desk.tags()


def test_unregistering_ends_what_waits_for_absent_clients(node: MemoryNode) -> None:
    """A kind of the same name that comes later begins anew."""
    desk = Desk()
    peer = arrive(node, desk)
    desk.clerk.feed.kept = "old"
    part(node, peer)
    desk.close(node)
    assert session_of(node).carrier is None
    other = Desk().open(node)
    connect(node)
    assert other.clerk.feed.kept is None


def test_room_that_unregistering_makes_is_told() -> None:
    with node_with(source_buffer=4, window=1) as node:
        one, other = Desk("one", prefix="o"), Desk("other", prefix="t")
        arrive(node, one, other, filters=(("o", 1), ("t", 1)))
        one.give(node, *some(5, "o"))
        other.give(node, given(1, "t"))
        assert 0 == other.clerk.feed.desired
        one.close(node)
        assert [("info", ROOM, 1)] == [call for call in other.calls("info") if call[1] is ROOM]


def test_a_kind_that_comes_while_a_subscription_is_stored() -> None:
    """It may hear of it at once; if the store refuses the subscription, it hears that too."""
    store = HeldStore()
    with node_with(store) as node:
        peer = connect(node)
        peer.take()
        store.held = True
        subscribe(node, peer, ("x", 1))
        desk = Desk().open(node)
        store.full = True
        store.let_go()
        node.turn()
        assert [Suback(1, (ReasonCode.QUOTA_EXCEEDED,), Properties(reason_string="no room"))] == peer.take()
        assert all(clerk.over for clerk in desk.clerks) and session_of(node).carrier is None


def test_there_is_one_kind_of_a_name(node: MemoryNode) -> None:
    Desk().open(node)
    with pytest.raises(HookError, match="desk"):
        Desk().open(node)
    assert node.plane.shared.sources.unregister("desk") is True
    assert node.plane.shared.sources.unregister("desk") is False


def test_generic_sources_hear_what_their_client_is_told(node: MemoryNode) -> None:
    """`Hub.tell` says whether anybody was there to hear it."""
    generic, plain = Desk("generic", generic=True), Desk("plain")
    assert node.broker.tell("car", "?") is False
    peer = arrive(node, generic, plain, filters=(("x", 1), ("y", 1)))
    assert node.broker.tell("car", "hello") is True
    node.turn()
    assert ["hello", "hello"] == [call[1] for call in generic.calls("info")] and [] == plain.calls("info")
    part(node, peer)
    assert node.broker.tell("car", "?") is False
    assert node.broker.tell("nobody", "?") is False


# --- the session around it ----------------------------------------------------------------------------------------


def test_access_that_is_taken_away_ends_a_source(node: MemoryNode) -> None:
    desk = Desk()
    peer = arrive(node, desk)
    desk.give(node, *some(WINDOW + 1))
    flying = messages(peer)
    allowed = [True]
    node.hooks.add("client.authorize", Callback(lambda *_: Stop(allowed[0]), 0, "access"))
    node.turn()
    allowed[0] = False
    node.broker.recheck_access()
    node.turn()
    assert ("unsubscribe", "x", Why.UNSUBSCRIBED) == desk.heard[-1]
    acknowledge(node, peer, *flying)
    assert [] == messages(peer) and session_of(node).carrier is None


def test_access_that_is_taken_away_meanwhile_leaves_no_source(node: MemoryNode) -> None:
    """The session is resumed without the subscription; what is in flight is not repeated."""
    desk = Desk()
    peer = arrive(node, desk)
    desk.give(node, *some(2))
    part(node, peer)
    node.hooks.add("client.authorize", Callback(lambda *_: Stop(False), 0, "access"))
    peer = connect(node)
    assert [] == publishes(peer.take()) and 1 == len(desk.clerks)
    assert not session_of(node).inflight and session_of(node).carrier is None
    assert 2 == node.plane.stats.dropped["revoked"]


def test_packet_ids_of_sources_do_not_run_out() -> None:
    """A durable session has few of them; what has none waits, and the mailbox goes on."""
    with node_with(HeldStore(), window=0) as node:
        Shelf("s", 8000).open(node)
        peer = connect(node)
        peer.take()
        subscribe(node, peer, ("x", 1), ("live", 1))
        flying = messages(peer)
        with _deadline():
            for _ in range(120):
                acknowledge(node, peer, flying.pop(0))
                flying += messages(peer)
        assert 65536 - FIRST_OTHER_ID == len(flying) == len({packet.packet_id for packet in flying})
        node.client("pub").send(Publish("live", b"now", 1, packet_id=1))
        node.turn()
        assert [b"now"] == payloads(peer)


@contextmanager
def _deadline() -> Iterator[None]:
    """An endless loop fails instead of holding up all tests."""

    def over(*_: Any) -> None:
        raise AssertionError("it does not end")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_nothing_is_left_when_all_is_done(node: MemoryNode) -> None:
    """Unsubscribed and acknowledged, in either order: no carrier, no timers, no figures."""
    for acknowledged_first in (True, False):
        desk = Desk(multi_topic=True)
        peer = arrive(node, desk, filters=(("x", 1), ("y", 1)), clean=True)
        desk.give(node, *some(WINDOW + 2), given(9, "y"))
        desk.clerk.feed.send_later(100, "never")
        flying = messages(peer)
        left = carrier_of(node)
        if acknowledged_first:
            while flying:
                acknowledge(node, peer, *flying)
                flying = messages(peer)
            unsubscribe(node, peer, "x", "y")
        else:
            unsubscribe(node, peer, "x", "y")
            acknowledge(node, peer, *flying)
        assert session_of(node).carrier is None and 0 == timers(node)
        assert (0, 0, 0) == (left.buffered, left.octets, left.promised)
        desk.close(node)


# --- two speeds, one meaning --------------------------------------------------------------------------------------


def _conversation(*, observed: bool, durable: bool, version: int, live: bool) -> tuple[list[Any], list[Any]]:
    """What a client gets and its sources hear, on one of both ways.

    With live messages and QoS 0 beside, one answer per read: who has the first turn after several at once is left open.
    """
    at_once = 1 if live else 3
    with node_with(HeldStore() if durable else None) as node:
        node.plane.observed = observed
        desk = Desk(multi_topic=True)
        desk.after = lambda clerk, given_, ack: (
            [given(given_.tag + 10, given_.filter, given_.message.qos)] if given_.tag < 60 else None
        )
        peer = arrive(node, desk, filters=(("0", 0), ("1", 1), ("2", 2), ("live", 1)), version=version)
        desk.give(node, *(given(n, filter_, 2) for n, filter_ in enumerate("0112212" if live else "112212", 1)))
        publisher = node.client("pub")
        got: list[Packet] = []
        todo: list[Packet] = []
        for turn in range(80):
            fresh = [packet for packet in peer.take() if not isinstance(packet, Suback)]
            got += fresh
            todo += fresh
            todo.sort(key=lambda packet: isinstance(packet, Pubrel))  # only the order of each kind must be the same
            if live and turn % 7 == 0:
                publisher.send(Publish("live", b"live %d" % turn, 1, packet_id=1))
            replies = [reply for reply in map(answer, todo[:at_once]) if reply is not None]
            todo = todo[at_once:]
            if replies:
                peer.send(*replies)  # in one read: PUBACK, PUBREC and PUBCOMP in any order
            node.turn()
        return got, desk.heard


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("durable", [False, True], ids=["memory", "durable"])
@pytest.mark.parametrize("live", [False, True], ids=["alone", "beside live messages"])
def test_acknowledgements_mean_the_same_on_both_ways(durable: bool, version: int, live: bool) -> None:
    """Through the byte loop and packet by packet: the client gets the same, and its source hears the same."""
    quick = _conversation(observed=False, durable=durable, version=version, live=live)
    slow = _conversation(observed=True, durable=durable, version=version, live=live)
    kinds = (Publish, Pubrel)
    for kind in kinds:  # answers and messages each keep their own order
        assert [p for p in quick[0] if isinstance(p, kind)] == [p for p in slow[0] if isinstance(p, kind)]
    assert [call[:2] for call in quick[1]] == [call[:2] for call in slow[1]]
    assert len([call for call in quick[1] if call[0] == "delivered"]) >= 30


# --- handed over at once ------------------------------------------------------------------------------------------


def test_what_is_handed_over_leaves_at_once(node: MemoryNode) -> None:
    """It is in flight when `hand` returns, without a callback; its acknowledgement reaches the source."""
    desk = Desk(asked=True)
    peer = arrive(node, desk)
    desk.heard.clear()
    assert desk.clerk.feed.hand(given(1))
    assert [1] == [one.tag for one in desk.clerk.feed.inflight] and [] == desk.heard
    node.turn()
    (packet,) = messages(peer)
    assert (b"1", 1, "from/x") == (packet.payload, packet.qos, packet.topic)
    acknowledge(node, peer, packet)
    assert [1] == desk.tags()


def test_what_is_handed_over_keeps_its_order(node: MemoryNode) -> None:
    """Nothing passes what waits already, be it of another source."""
    desk, other = Desk(), Desk("other").open(node)
    peer = arrive(node, desk)
    desk.give(node, *some(WINDOW + 1))
    flying = messages(peer)
    assert not desk.clerk.feed.hand(given(9)) and not other.clerk.feed.hand(given(9))
    acknowledge(node, peer, flying[0])
    assert [b"5"] == [packet.payload for packet in messages(peer)]
    assert not desk.clerk.feed.hand(given(9)), "the window is full"
    acknowledge(node, peer, *flying[1:])
    assert other.clerk.feed.hand(given(9))
    node.turn()
    assert [b"9"] == [packet.payload for packet in messages(peer)]


@pytest.mark.parametrize(
    "what", ["qos 0", "retained", "expires", "another filter", "identifier", "told", "after its end"]
)
def test_what_cannot_be_handed_over_changes_nothing(node: MemoryNode, what: str) -> None:
    """Whoever hears False may give it the other way."""
    desk = Desk()
    peer = arrive(node, desk)
    feed = desk.clerk.feed
    one = given(1)
    if what == "qos 0":
        subscribe(node, peer, ("x", 0))
    elif what == "retained":
        one = given(1, retain=True)
    elif what == "expires":
        one = given(1, expires_at=node.clock.now + 9)
    elif what == "another filter":
        one = given(1, "y")
    elif what == "identifier":
        subscribe(node, peer, ("x", 1), identifier=9)
    elif what == "told":
        node.hooks.add("message.delivered", Callback(lambda *_: None, 0, "test"))
    else:
        peer.close()
        node.turn()
    peer.take()
    assert not feed.hand(one)
    node.turn()
    assert [] == peer.take() and not feed.inflight


def test_what_is_handed_over_is_repeated_by_the_session(node: MemoryNode) -> None:
    """It is in flight like any other: a client that comes back gets it again, and the new instance hears of it."""
    desk = Desk()
    peer = arrive(node, desk)
    assert desk.clerk.feed.hand(given(1))
    node.turn()
    peer.close()
    node.turn()
    peer = connect(node)
    node.turn()
    (packet,) = publishes(peer.take())
    assert packet.dup and 2 == len(desk.clerks)
    acknowledge(node, peer, packet)
    assert [1] == desk.tags()
