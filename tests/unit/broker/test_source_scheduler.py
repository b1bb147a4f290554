"""What sources may rely on, and clients with them, where one look is enough: sentences of `extension/sources.py` and
`source_scheduler.py`. What holds in any order of events stands in `test_source_scheduler_model.py`."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from motorcade.broker import source_scheduler
from motorcade.broker.durable_queue import FIRST_OTHER_ID
from motorcade.broker.limits import SessionOptions
from motorcade.broker.source_scheduler import BACKOFF, INBOX, MAX_BACKOFF, STEP, STEP_BYTES, SourceScheduler
from motorcade.core.client import ClientInfo
from motorcade.core.errors import HookError
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Callback, Stop
from motorcade.extension.sources import RECREATE, Destroy, FastFeed, Given, Why
from motorcade.mqtt.packets import Connect, Packet, Puback, Publish, Pubrel, Suback
from motorcade.mqtt.properties import NONE, Properties
from tests.support.held_store import HeldStore
from tests.support.virtual import MemoryNode, Peer, Turns, standing
from tests.unit.broker.sources import (
    AskedSource,
    ScriptedSource,
    SharedBacklog,
    SourceScript,
    acknowledge,
    answer,
    given,
    messages,
    numbers,
    payloads,
    scheduler_of,
    session_of,
    some,
    subscribe,
    unsubscribe,
)

WINDOW = 4
EXPIRY = 100


@pytest.fixture(autouse=True)
def silence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="motorcade.broker.source_scheduler")


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


def arrive(
    node: MemoryNode, *scripts: SourceScript, filters: tuple[tuple[str, int], ...] = (("x", 1),), **more: Any
) -> Peer:
    """Kinds are there, and a client has subscribed."""
    for script in scripts:
        script.open(node)
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


# --- who gets what --------------------------------------------------------------------------------------------------


def test_a_kind_has_an_instance_per_filter_or_one_for_all_filters_of_a_client(node: MemoryNode) -> None:
    """`feed.client` is the client whose source it is; an instance ends with its last filter."""
    each, all_ = SourceScript("each").open(node), SourceScript("all", multi_topic=True).open(node)
    peers = {name: node.client(name) for name in ("car", "van")}
    for peer in peers.values():
        subscribe(node, peer, ("x", 1), ("y", 1))
    assert [("car", ["x"]), ("car", ["y"]), ("van", ["x"]), ("van", ["y"])] == _served(each)
    assert [("car", ["x", "y"]), ("van", ["x", "y"])] == _served(all_)
    assert [("subscribe", "x", Why.NEW), ("subscribe", "y", Why.NEW)] == each.heard[:2] == all_.heard[:2]
    unsubscribe(node, peers["car"], "x")
    assert [False, False] == [source.over for source in all_.sources]
    unsubscribe(node, peers["car"], "y")
    assert [True, False] == [source.over for source in all_.sources]
    assert [True, True, False, False] == [source.over for source in each.sources]


def _served(script: SourceScript) -> list[tuple[str, list[str]]]:
    return [(source.feed.client.client_id, list(source.feed.subscriptions)) for source in script.sources]


def test_only_filters_with_the_prefix_that_the_kind_wants_are_offered(node: MemoryNode) -> None:
    """`wants` is asked with the client, the subscription and why; a kind that cannot say what it wants, wants none."""
    asked: list[tuple[str, str, Why]] = []

    def wants(client: ClientInfo, subscription: Subscription, why: Why) -> bool:
        asked.append((client.client_id, subscription.filter, why))
        return subscription.filter == "$q/y"

    script, broken = SourceScript(prefix="$q/", wants=wants), SourceScript("broken", wants=_raising)
    peer = arrive(node, script, broken, filters=(("x", 1), ("$q/x", 1), ("$q/y", 1), ("$share/g/$q/y", 1)))
    assert [("subscribe", "$q/y", Why.NEW)] == script.heard
    assert {("car", "$q/x", Why.NEW), ("car", "$q/y", Why.NEW)} == set(asked)
    assert [Suback(1, (ReasonCode(1),) * 4)] == peer.take()
    assert [] == broken.sources and broken.kind.counters["failed"]


def test_a_filter_that_nobody_takes_costs_nothing(node: MemoryNode) -> None:
    """`subscribe` answers False: the instance ends, and nothing is left; at the return it is offered once."""
    script = SourceScript()
    script.takes = lambda source, subscription, why: False
    peer = arrive(node, script)
    assert [("subscribe", "x", Why.NEW), ("terminate",)] == script.heard
    assert session_of(node).scheduler is None
    part(node, peer)
    script.heard.clear()
    connect(node)
    assert [("subscribe", "x", Why.RESUMED), ("terminate",)] == script.heard
    assert session_of(node).scheduler is None


def test_subscribing_again_changes_nothing_but_the_options(node: MemoryNode) -> None:
    """Without `renew` a source goes on; what it has given is sent with the new QoS and identifier."""
    script = SourceScript()
    peer = arrive(node, script, filters=(("x", 1),))
    script.give(node, *some(WINDOW + 1))
    first = messages(peer)
    subscribe(node, peer, ("x", 0), identifier=9)
    assert 1 == len(script.calls("subscribe"))
    (last,) = messages(peer)
    assert (0, (9,)) == (last.qos, last.properties.subscription_ids)
    assert [()] * WINDOW == [packet.properties.subscription_ids for packet in first]


def test_a_repeated_subscription_that_is_not_wanted_leaves_the_old_one(node: MemoryNode) -> None:
    """With `renew`, but `wants` says no to AGAIN: what the first subscription is owed still comes."""
    script = SourceScript(renew=True, wants=lambda client, subscription, why: why is not Why.AGAIN)
    peer = arrive(node, script)
    script.give(node, *some(WINDOW + 2))
    flying = messages(peer)
    subscribe(node, peer, ("x", 1))
    acknowledge(node, peer, *flying)
    assert [5, 6] == numbers(peer)


# --- what callbacks hear and answer ----------------------------------------------------------------------------------


def test_what_a_source_sends_itself_comes_in_order_and_later(node: MemoryNode) -> None:
    """Never inside the call that sends it, be that the constructor; or after a while, unless it is cancelled."""
    script = SourceScript()
    script.made = lambda source: source.feed.send("begin")
    arrive(node, script)
    script.source.feed.send_later(1.0, "late")
    script.source.feed.send_later(1.0, "cancelled").cancel()
    for what in ("a", "b", "c"):
        script.source.feed.send(what)
    assert ["begin"] == [call[1] for call in script.calls("info")]
    wait(node, 0.9)
    assert ["begin", "a", "b", "c"] == [call[1] for call in script.calls("info")]
    wait(node, 0.2)
    assert ["late"] == [call[1] for call in script.calls("info")][4:]
    assert 0 == timers(node)


def test_a_source_that_leaves_is_asked_for_nothing(node: MemoryNode) -> None:
    """Without a filter it may give nothing, and RECREATE is no reason to end before the last acknowledgement."""
    script = SourceScript()
    peer = arrive(node, script)
    script.give(node, *some(2))
    flying = messages(peer)
    unsubscribe(node, peer, "x")
    script.answer = lambda source, what, desired: RECREATE
    script.source.feed.send("?")
    node.turn()
    assert ("info", "?", 0) == script.heard[-1]
    acknowledge(node, peer, *flying)
    assert [1, 2] == script.tags() and 1 == len(script.sources) and 0 == timers(node)


def test_a_filter_that_comes_while_there_is_no_instance_is_new_to_the_next(node: MemoryNode) -> None:
    """Also one that is given up and taken again in the meantime: it does not go on where it was."""
    script = SourceScript(multi_topic=True)
    peer = arrive(node, script, filters=(("x", 1), ("y", 1)))
    _recreate(node, script)
    assert [("unsubscribe", "x", Why.REMOVED), ("unsubscribe", "y", Why.REMOVED), ("terminate",)] == script.heard[-3:]
    unsubscribe(node, peer, "y")
    subscribe(node, peer, ("y", 1), ("z", 1))
    script.heard.clear()
    wait(node, BACKOFF)
    assert [
        ("subscribe", "x", Why.RECREATED),
        ("subscribe", "y", Why.NEW),
        ("subscribe", "z", Why.NEW),
    ] == script.heard


def _recreate(node: MemoryNode, script: SourceScript) -> None:
    script.answer = lambda source, what, desired: RECREATE if what == "broken" else None
    script.source.feed.send("broken")
    node.turn()


def test_the_next_instance_hears_what_was_acknowledged_while_there_was_none(node: MemoryNode) -> None:
    script = SourceScript()
    peer = arrive(node, script)
    script.give(node, *some(2))
    first, second = messages(peer)
    _recreate(node, script)
    acknowledge(node, peer, first)
    assert [] == script.tags()
    wait(node, BACKOFF)
    acknowledge(node, peer, second)
    assert 2 == len(script.sources) and [1, 2] == script.tags()


def test_a_source_hears_of_the_room_that_an_unsubscribed_filter_leaves(node: MemoryNode) -> None:
    """Nothing else would wake it: none of its messages is in flight, so none will be acknowledged."""
    other, script = SourceScript("other", prefix="o"), SourceScript("filled", multi_topic=True, prefix="f")
    peer = arrive(node, other, script, filters=(("o", 1), ("f/x", 1), ("f/y", 1)))
    other.give(node, *some(WINDOW, "o"))
    flying = messages(peer)
    assert WINDOW == len(flying)  # it is full
    script.give(node)
    script.give(node, *some(script.calls("info")[-1][2], "f/x"))  # all that it may
    assert not script.slot.promised and script.slot.buffer
    script.heard.clear()
    unsubscribe(node, peer, "f/x")
    acknowledge(node, peer, *flying)
    assert any(call[2] > 0 for call in script.calls("info")), script.heard


def test_the_back_off_doubles_up_to_a_bound_and_begins_anew_after_a_delivery(node: MemoryNode) -> None:
    script = SourceScript()
    peer = arrive(node, script)
    expected = BACKOFF
    for _ in range(12):
        made = len(script.sources)
        _recreate(node, script)
        wait(node, expected * 0.99)
        assert made == len(script.sources)
        wait(node, expected * 0.02)
        assert made + 1 == len(script.sources)
        expected = min(2 * expected, MAX_BACKOFF)
    assert expected == MAX_BACKOFF == script.slot.backoff and 12 == script.kind.counters["recreated"]
    script.answer = lambda source, what, desired: [given(1)]
    script.source.feed.send("go")
    node.turn()
    acknowledge(node, peer, *messages(peer))
    _recreate(node, script)
    wait(node, BACKOFF)
    assert 14 == len(script.sources)


def test_a_source_that_fails_at_every_delivery_waits_longer_and_longer(node: MemoryNode) -> None:
    """What raises has not delivered."""
    script = SourceScript()

    def takes(source: ScriptedSource, subscription: Subscription, why: Why) -> bool:
        source.feed.send([given(1, qos=0)])
        return True

    script.takes = takes
    script.after = _raising
    peer = arrive(node, script)
    wait(node, BACKOFF)
    assert 2 == len(script.sources)
    wait(node, BACKOFF * 1.5)
    assert 2 == len(script.sources)
    wait(node, BACKOFF)
    assert 3 == len(script.sources) and [1, 1, 1] == numbers(peer)


def _raising(*_: Any) -> Any:
    raise RuntimeError("a plugin's own trouble")


def test_who_is_gone_is_not_made_anew(node: MemoryNode) -> None:
    """Its timer goes with the subscription, the connection or the kind."""
    for how in ("unsubscribe", "break", "unregister"):
        script = SourceScript(how)
        peer = arrive(node, script)
        _recreate(node, script)
        assert 1 == timers(node)
        if how == "unsubscribe":
            unsubscribe(node, peer, "x")
        elif how == "break":
            part(node, peer)
        else:
            script.close(node)
        assert 0 == timers(node), how
        wait(node, MAX_BACKOFF)
        assert 1 == len(script.sources), how
        if how != "unregister":
            script.close(node)


# --- rule 1: room ---------------------------------------------------------------------------------------------------


def test_promises_stay_within_the_buffer() -> None:
    """Each source is promised at most half of what is left, and one at least; what it gives counts against it."""
    for count in (1, 2, 5, 200):
        with node_with() as node:
            script = SourceScript()
            arrive(node, script, filters=tuple((f"x{n}", 1) for n in range(count)))
            left = 128
            for number, source in enumerate(script.sources):
                told = source.feed.desired
                assert max(1, left // 2) == told, number
                left = max(0, left - told)
            assert scheduler_of(node).promised <= 128 + count
    with node_with() as node:
        script = SourceScript()
        arrive(node, script)
        assert 64 == script.source.feed.desired
        script.give(node, *some(WINDOW + 10))
        assert (10, 50) == (scheduler_of(node).buffered, script.slot.promised)
        assert 59 == script.source.feed.desired  # half of 128 - 10


def test_a_window_is_filled_before_anything_is_acknowledged() -> None:
    """A client may wait until its window is full; the buffer is smaller, and a source hears that it is empty again."""
    for qos in (1, 2):
        with node_with(window=1000, source_buffer=128) as node:
            backlog = SharedBacklog("all", 1500, qos=qos).open(node)
            peer = arrive(node, filters=(("x", 2),))
            node.turn()
            assert list(range(1000)) == numbers(peer), qos
            assert 64 == backlog.most


def test_an_outcome_is_counted_once(node: MemoryNode) -> None:
    """Also if the instance fails that hears of it, and the next one hears of the rest."""
    script = SourceScript()
    script.after = _raising
    peer = arrive(node, script)
    script.give(node, *some(3))
    acknowledge(node, peer, *messages(peer))
    script.after = lambda source, given, ack: None
    wait(node, BACKOFF)
    assert [1, 2, 3] == script.tags() and 3 == script.kind.counters["delivered"]


def test_giving_too_much_is_counted_and_sent_all_the_same() -> None:
    with node_with(source_buffer=8) as node:
        script = SourceScript()
        peer = arrive(node, script)
        assert 4 == script.source.feed.desired
        script.give(node, *some(50))
        assert 46 == script.kind.counters["overshoot"] == node.state.stats.refused["source_buffer"]
        got: list[int] = []
        while flying := messages(peer):
            assert len(flying) <= WINDOW
            got += [int(packet.payload) for packet in flying]
            acknowledge(node, peer, *flying)
        assert list(range(1, 51)) == got


def test_bytes_are_bounded_too() -> None:
    """Beyond the bound every source may have one message waiting."""
    with node_with(source_buffer_bytes=1000) as node:
        big, small = SourceScript("big", prefix="b"), SourceScript("small", prefix="s")
        arrive(node, big, small, filters=(("b", 1), ("s", 1)))
        big.give(node, *(given(n, "b", payload=b"1" * 250) for n in range(WINDOW + 4)))
        assert 1000 == scheduler_of(node).buffered_bytes
        assert 0 == big.source.feed.desired - big.slot.promised and 1 == small.source.feed.desired
        small.give(node, given(1, "s"))
        assert 0 == small.source.feed.desired


# --- rule 2: order, and everybody's turn ----------------------------------------------------------------------------


def test_a_source_has_one_turn_in_a_round_whatever_its_messages_need() -> None:
    """One whose messages need room in the window and need none, by turns, is not served twice as often."""
    with node_with(window=30) as node:
        mixed, plain = SourceScript("mixed", multi_topic=True, prefix="m"), SourceScript("plain", prefix="p")
        peer = arrive(node, mixed, plain, filters=(("m0", 0), ("m1", 1), ("p", 0)))
        peer.wire.fill()
        mixed.give(node, *(given(n, f"m{n % 2}") for n in range(12)))
        plain.give(node, *some(12, "p", 0))
        peer.wire.drain()
        node.turn()
        got = "".join(packet.topic[5] for packet in messages(peer))
        assert 24 == len(got) and "mm" not in got and "pp" not in got


def test_live_messages_have_their_turn() -> None:
    """Between two messages of a source with a backlog one live message is sent, though the window frees one by one."""
    for durable, sources in ((False, 1), (False, 3), (True, 1), (True, 3)):
        with node_with(HeldStore() if durable else None, window=1) as node:
            scripts = [SourceScript(name, prefix=name) for name in "abc"[:sources]]
            peer = arrive(node, *scripts, filters=(("live", 1), *((script.kind.name, 1) for script in scripts)))
            for script in scripts:
                script.give(node, *some(20, script.kind.name))
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
            assert all(len(between) == sources for between in rounds[1:5]), (durable, got)


def test_live_messages_that_need_no_room_do_not_wait_for_any(node: MemoryNode) -> None:
    """The window is full and a source of QoS 0 has no end: live messages of QoS 0 have their turn all the same."""
    flying, endless = SourceScript("flying", prefix="x"), SourceScript("endless", prefix="y")
    peer = arrive(node, flying, endless, filters=(("x", 1), ("y", 0), ("live", 1)))
    flying.give(node, *some(WINDOW))
    first, *_ = messages(peer)
    node.client("pub").send(Publish("live", b"1", 1, packet_id=1), Publish("live", b"2"), Publish("live", b"3"))
    node.turn()
    assert [] == messages(peer), "they wait behind one that needs room"
    endless.after = lambda source, one, ack: [given(one.tag + 1, "y", 0)]
    endless.source.feed.send([given(1, "y", 0)])
    assert isinstance(node.loop, Turns)
    for number in range(20):  # it never comes to rest: as many callbacks as the source needs for a few messages
        node.loop.soon.popleft().run()
        if number == 5:
            peer.send(Puback(first.packet_id or 0))
    assert [b"1", b"2", b"3"] == [packet.payload for packet in messages(peer) if packet.topic == "live"]


def test_one_pump_sends_a_bounded_number_of_messages_and_bytes(node: MemoryNode) -> None:
    """Then others have their turn of the event loop, whoever the messages are of."""
    script = SourceScript()
    peer = arrive(node, script, filters=tuple((f"x{n}", 0) for n in range(STEP - 10)))
    subscribe(node, peer, *((f"y{n}", 0) for n in range(100)))
    for source in script.sources:
        source.feed.send([given(1, next(iter(source.feed.subscriptions)), 0)])
    assert STEP == max(_pumped(node)) and STEP + 90 == len(messages(peer))
    for source in script.sources[:20]:
        source.feed.send([given(1, next(iter(source.feed.subscriptions)), 0, payload=bytes(STEP_BYTES // 4))])
    assert max(_pumped(node)) <= 5 and 20 == len(messages(peer))


def _pumped(node: MemoryNode) -> list[int]:
    """How many messages left the buffer in each pump until nothing is left to do."""
    counts: list[int] = []
    pump = SourceScheduler.pump

    def counting(self: SourceScheduler, now: float) -> bool:
        before = self.buffered
        more = pump(self, now)
        counts.append(before - self.buffered)
        return more

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_scheduler.SourceScheduler, "pump", counting)
        node.turn()
    return counts


def test_large_messages_without_qos_leave_the_others_their_turn(node: MemoryNode) -> None:
    """A source whose every message uses up a pump does not starve those that need room in the window."""
    large, small = SourceScript("large", prefix="l"), SourceScript("small", prefix="s")
    peer = arrive(node, large, small, filters=(("l", 0), ("s", 1)))
    large.after = lambda source, given_, ack: [given(2, "l", 0, payload=bytes(2 * STEP_BYTES))] if left() else None
    budget = iter(range(50))

    def left() -> bool:
        return next(budget, None) is not None

    large.source.feed.send([given(1, "l", 0, payload=bytes(2 * STEP_BYTES))])
    small.source.feed.send([given(7, "s")])
    node.turn()
    topics = [packet.topic for packet in messages(peer)]
    assert topics.index("from/s") <= 2 and 52 == len(topics)


# --- rule 3: the connection comes and goes --------------------------------------------------------------------------


def test_a_source_ends_with_its_connection(node: MemoryNode) -> None:
    """First it hears why, filter by filter; a session that ends with it says so."""
    for expiry, why in ((EXPIRY, Why.DISCONNECTED), (0, Why.ENDED)):
        script = SourceScript(f"expiry {expiry}", multi_topic=True)
        peer = arrive(node, script, filters=(("x", 1), ("y", 1)), expiry=expiry, clean=True)
        script.heard.clear()
        part(node, peer)
        assert [("unsubscribe", "x", why), ("unsubscribe", "y", why), ("terminate",)] == script.heard
        script.close(node)


def test_a_session_that_comes_back_after_a_restart_has_its_sources_again() -> None:
    """With nothing in flight and nothing kept: that was in the memory of the process before."""
    store = HeldStore()
    with node_with(store) as node:
        peer = arrive(node, SourceScript())
        peer.close()
        node.turn()
        after = node.restart()
        script = SourceScript().open(after)
        connect(after)
        assert [("subscribe", "x", Why.RESUMED)] == script.heard
        assert (None, []) == (script.source.feed.kept, script.source.feed.inflight)


def test_release_shows_a_leaving_source_what_is_taken_back(node: MemoryNode) -> None:
    """It has no filter any more, so it sees in `terminate` what was never acknowledged."""
    script = SourceScript(release=True)
    back: list[int] = []
    script.ends = lambda source: back.extend(g.tag for g in source.feed.inflight)
    peer = arrive(node, script)
    script.give(node, *some(3))
    flying = messages(peer)
    unsubscribe(node, peer, "x")
    acknowledge(node, peer, flying[1])
    part(node, peer)
    assert [1, 3] == back and not session_of(node).inflight


def test_release_takes_back_what_ended_sources_have_in_flight(node: MemoryNode) -> None:
    for how in ("destroy", "unregister"):
        script = SourceScript(how, release=True)
        peer = arrive(node, script, clean=True)
        script.give(node, *some(2))
        if how == "destroy":
            script.answer = lambda source, what, desired: Destroy()
            script.source.feed.send("now")
            node.turn()
        else:
            script.close(node)
        assert 2 == len(session_of(node).inflight)
        part(node, peer)
        assert not session_of(node).inflight, how
        if how == "destroy":
            script.close(node)


@pytest.mark.parametrize("lingers", [False, True])
def test_acknowledgements_for_a_filter_that_is_gone_at_the_return(node: MemoryNode, lingers: bool) -> None:
    """A kind with `lingers` hears of what was in flight when the client unsubscribed, though it has gone in between."""
    script = SourceScript(lingers=lingers)
    peer = arrive(node, script)
    script.give(node, *some(2))
    unsubscribe(node, peer, "x")
    part(node, peer)
    script.heard.clear()
    peer = connect(node)
    again = publishes(peer.take())
    assert 2 == len(again) and 1 + lingers == len(script.sources)
    acknowledge(node, peer, again[0])
    acknowledge(node, peer, again[1])
    assert (["delivered", "delivered", "terminate"] if lingers else []) == [call[0] for call in script.heard]
    assert session_of(node).scheduler is None


def test_who_lingers_for_nothing_ends(node: MemoryNode) -> None:
    """What was in flight is taken back with the connection: no instance waits for it after the return."""
    script = SourceScript(lingers=True, release=True)
    peer = arrive(node, script)
    script.give(node, *some(2))
    unsubscribe(node, peer, "x")
    part(node, peer)
    assert session_of(node).scheduler is None
    connect(node)
    assert all(source.over for source in script.sources) and session_of(node).scheduler is None


def test_a_session_that_expires_leaves_nothing(node: MemoryNode) -> None:
    script = SourceScript()
    peer = arrive(node, script)
    script.give(node, *some(WINDOW + 1))
    left = scheduler_of(node)
    part(node, peer)
    node.clock.now += EXPIRY + 1
    node.state.registry.due(node.clock.now)
    assert not node.state.registry.sessions and 0 == timers(node)
    assert (0, 0, 0, {}, {}) == (left.buffered, left.buffered_bytes, left.promised, left.slots, left.unacked)


def test_a_client_may_come_back_taking_fewer_at_once(node: MemoryNode) -> None:
    """What was in flight is repeated as it acknowledges, before anything new of the source, QoS 0 too."""
    script = SourceScript(multi_topic=True)
    peer = arrive(node, script, filters=(("x", 1), ("y", 0)))
    script.give(node, *some(3))
    part(node, peer)
    peer = connect(node, receive_maximum=1)
    script.give(node, given(9, "y", 0), given(4))
    got: list[int] = []
    while flying := publishes(peer.take()):
        got += [int(packet.payload) for packet in flying]
        acknowledge(node, peer, *(packet for packet in flying if packet.qos))
    assert [1, 2, 3, 9, 4] == got


# --- rule 4: trouble stays where it is ------------------------------------------------------------------------------


def test_a_source_that_fails_at_once_does_not_fail_the_suback() -> None:
    """It counts as not wanting the filter."""
    for callback in ("made", "takes"):
        with node_with() as node:
            bad, good = SourceScript("bad"), SourceScript("good")
            setattr(bad, callback, _raising)
            peer = arrive(node, bad, good)
            assert [Suback(1, (ReasonCode(1),))] == peer.take()
            assert 1 == bad.kind.counters["failed"] and 1 == len(scheduler_of(node).slots)
            good.give(node, given(1))
            assert [1] == numbers(peer)


WRONG: dict[str, Any] = {
    "list": given(1),
    "number": 7,
    "items": [7],
    "message": [Given(None, "x")],  # type: ignore[arg-type]
    "bytes": [Given(Message("t", "text"), "x")],  # type: ignore[arg-type]
    "filter": [Given(Message("t", b""), ["x"])],  # type: ignore[arg-type]
    "another filter": [given(1, "y")],
    "topic": [Given(Message("x" * 70_000, b""), "x", 1)],
    "UTF-8": [Given(Message("\ud800", b""), "x", 1)],
    "properties": [Given(Message("t", b"", user_properties=((1, 2),)), "x", 1)],  # type: ignore[arg-type]
    "end": Destroy(7),  # type: ignore[arg-type]
    "filters": Destroy([["x"]]),  # type: ignore[list-item]
}


def test_a_source_that_gives_something_wrong_hurts_nobody() -> None:
    """Neither its client nor the other sources, nor what it gives afterwards; and every figure stays right."""
    for name, identifier in [(name, identifier) for name in WRONG for identifier in (0, 7)]:
        with node_with() as node:
            bad, good = SourceScript("bad").open(node), SourceScript("good").open(node)
            peer = connect(node)
            peer.take()
            subscribe(node, peer, ("x", 1), identifier=identifier)
            bad.answer = lambda source, what, desired, wrong=WRONG[name]: (  # type: ignore[misc]
                wrong if what == "go" else [given(3)]
            )
            bad.source.feed.send("go")
            good.give(node, given(2))
            wait(node, BACKOFF)
            bad.source.feed.send("again")
            node.turn()
            flying = messages(peer)
            assert peer.open and [2, 3] == [int(packet.payload) for packet in flying], name
            assert bad.kind.counters["failed"] + bad.kind.counters["stray"], name
            acknowledge(node, peer, *flying)
            scheduler = scheduler_of(node)
            assert (0, 0) == (scheduler.buffered, scheduler.buffered_bytes) and not session_of(node).inflight, name
            assert all(slot.unacked == 0 for slot in scheduler.slots.values()), name


def test_a_message_that_cannot_be_written_is_dropped_as_unusable(node: MemoryNode) -> None:
    script = SourceScript()
    peer = arrive(node, script)
    script.give(node, Given(Message("x" * 70_000, b"", 1), "x", 1), given(2))
    assert [2] == numbers(peer) and [(1, ReasonCode.SUCCESS, "unusable")] == script.acks()


def test_a_kind_may_be_unregistered_by_its_own_callback(node: MemoryNode) -> None:
    """In any of them: it ends, and the client stays."""

    def unregister(*args: Any) -> Any:
        node.state.shared.sources.unregister("script")
        return args[0].message if isinstance(args[0], Given) else None

    for callback in ("leaves", "answer", "after", "takes", "at_last"):
        script = SourceScript(multi_topic=True, asked=callback == "at_last")
        script.open(node)
        peer = node.client("car")
        setattr(script, callback, unregister)
        subscribe(node, peer, ("x", 1), ("y", 1))
        if script.sources and not script.source.over:
            script.source.feed.send([given(1), given(2, qos=0)])
            node.turn()
        assert peer.open, callback
        unsubscribe(node, peer, "x", "y")
        part(node, peer)
        assert all(source.over for source in script.sources), callback
        node.state.shared.sources.unregister("script")


# --- rule 5: the end is the end -------------------------------------------------------------------------------------


def test_what_an_ended_source_sends_reaches_nobody() -> None:
    """Not the instance that came after it either, and no timer is left."""
    for how in ("return", "recreate", "unsubscribe"):
        with node_with() as node:
            script = SourceScript()
            peer = arrive(node, script)
            old = script.source
            old.feed.send_later(0.5, "planned")
            old.feed.send("sent before the end")
            if how == "return":
                part(node, peer)
                connect(node)
            elif how == "recreate":
                script.answer = lambda source, what, desired: RECREATE
                node.turn()
                wait(node, BACKOFF)
                assert 2 == len(script.sources)
            else:
                unsubscribe(node, peer, "x")
            script.heard.clear()
            script.answer = lambda source, what, desired: None
            old.feed.send("late")
            old.feed.send_later(0.1, "later")
            assert 0 == old.feed.desired
            wait(node, 1.0)
            assert [] == script.heard and 0 == timers(node), how
            old.feed.kept = "too late"
            assert how == "unsubscribe" or script.source.feed.kept is None, how


def test_what_sources_are_sent_is_bounded(node: MemoryNode) -> None:
    script = SourceScript()
    arrive(node, script)
    for number in range(INBOX + 5):
        script.source.feed.send(str(number))
    node.turn()
    assert INBOX == len(script.calls("info")) and 5 == script.kind.counters["overrun"]


# --- just before a message is sent, and just after ------------------------------------------------------------------


def test_a_source_may_send_a_newer_message_instead(node: MemoryNode) -> None:
    """Asked when there is room, not before; with the newer one's own QoS; what it hears of is what it gave."""
    script = SourceScript(asked=True)
    newer = {1: Message("n", b"10", 0), 2: Message("n", b"20", 2)}
    script.at_last = lambda given: newer.get(given.tag, given.message)
    peer = arrive(node, script, filters=(("x", 2),))
    script.give(node, given(1, qos=1), given(2, qos=0), *some(WINDOW, first=3))
    flying = messages(peer)
    assert [(b"10", 0), (b"20", 2)] == [(packet.payload, packet.qos) for packet in flying[:2]]
    assert [1] == script.tags() and 2 == script.source.feed.inflight[0].tag
    asked = [call[1] for call in script.calls("sending")]  # it may be asked twice
    assert [1, 2, 3, 4, 5] == list(dict.fromkeys(asked))
    acknowledge(node, peer, flying[2])
    assert [6] == [call[1] for call in script.calls("sending")][len(asked) :]


class SelectiveSource(AskedSource):
    """Says whether it wants to be asked, and notes what has left."""

    wants: bool | None = False

    @property
    def asks(self) -> bool | None:
        return self.wants

    def sent_run(self, given: Sequence[Given]) -> None:
        self._note("sent", [one.tag for one in given])


class Broken(SelectiveSource):
    """Knows nothing."""

    @property
    def asks(self) -> bool | None:
        raise ValueError("no idea")

    def sent_run(self, given: Sequence[Given]) -> None:
        raise ValueError("no idea")


def _script_of(sort: type[SelectiveSource], wants: bool | None = False) -> SourceScript:
    def make(feed: FastFeed) -> SelectiveSource:
        source = sort(feed, script)
        source.wants = wants
        return source

    script = SourceScript()
    script.kind.make = make
    script.at_last = lambda given: given.message if given.tag % 2 else None
    return script


def test_a_source_is_asked_while_it_wants_to_be() -> None:
    """None is what one says that says nothing: asked each time. So is one that fails to say, to be on the safe side."""
    for sort, wants in ((SelectiveSource, False), (SelectiveSource, None), (SelectiveSource, True), (Broken, None)):
        with node_with() as node:
            script = _script_of(sort, wants)
            peer = arrive(node, script)
            script.give(node, *some(3))
            assert ([1, 2, 3] if wants is False else [1, 3]) == numbers(peer)
            assert bool(script.calls("sending")) is (wants is not False)
            assert (sort is Broken) == (script.kind.counters["failed"] >= 2)


def test_a_source_may_change_its_mind_while_messages_wait(node: MemoryNode) -> None:
    script = _script_of(SelectiveSource)
    peer = arrive(node, script)
    script.give(node, *some(WINDOW + 4))
    flying = messages(peer)
    assert [] == script.calls("sending")
    script.source.wants = True  # type: ignore[attr-defined]
    acknowledge(node, peer, *flying)
    assert [number for number in range(WINDOW + 1, WINDOW + 5) if number % 2] == numbers(peer)


def test_a_source_hears_what_has_left() -> None:
    """Each message once, in order, before it hears what became of it; not what waits, was withdrawn or is too large."""
    for qos, wants in ((0, False), (0, True), (1, False), (1, True)):
        with node_with() as node:
            script = _script_of(SelectiveSource, wants)
            script.at_last = lambda given: None if given.tag == 3 else given.message
            peer = arrive(node, script, filters=(("x", qos),), maximum_packet_size=100)
            script.give(node, given(1), given(2, payload=b"x" * 200), *some(WINDOW + 2, first=3))
            if not wants:
                left = [1, 3, 4, 5] if qos else [1, *range(3, WINDOW + 5)]
                assert left == [tag for _, tags in script.calls("sent") for tag in tags]
            for _ in range(4):
                acknowledge(node, peer, *[message for message in messages(peer) if message.qos])
            sent = [number for number in range(1, WINDOW + 5) if number != 2 and (number != 3 or not wants)]
            assert sent == [tag for _, tags in script.calls("sent") for tag in tags]
            for number in sent:
                order = [call for call in script.heard if number in (call[1] if call[0] == "sent" else call[1:2])]
                assert ["sent", "delivered"] == [call[0] for call in order if call[0] in ("sent", "delivered")]


def test_a_source_hears_of_what_is_too_large_for_the_client_that_comes_back(node: MemoryNode) -> None:
    script = SourceScript()
    peer = arrive(node, script)
    script.give(node, given(1, payload=b"x" * 200), given(2))
    assert 2 == len(messages(peer))
    part(node, peer)
    peer = connect(node, maximum_packet_size=100)
    assert [b"2"] == [packet.payload for packet in publishes(peer.take())]
    assert [(1, ReasonCode.PACKET_TOO_LARGE, "too_large")] == script.acks()


def test_what_has_expired_is_not_sent(node: MemoryNode) -> None:
    """Its source hears so; what has waited tells what is left of its life."""
    script = SourceScript()
    peer = arrive(node, script)
    now = node.clock.now
    script.give(node, *some(WINDOW), given(5, expires_at=now + 5), given(6, expires_at=now + 50))
    flying = messages(peer)
    wait(node, 10)
    acknowledge(node, peer, *flying)
    (packet,) = messages(peer)
    assert (b"6", 40) == (packet.payload, packet.properties.message_expiry)
    assert (5, ReasonCode.SUCCESS, "expired") in script.acks() and 1 == node.state.stats.dropped["expired"]


def test_retain_is_set_as_the_subscription_wants_it(node: MemoryNode) -> None:
    """[MQTT-3.3.1-12], [MQTT-3.3.1-13]; a kind of retained messages sets it always."""
    live, kept = SourceScript("live", prefix="l"), SourceScript("kept", prefix="k", retained=True)
    live.open(node)
    kept.open(node)
    peer = connect(node)
    peer.take()
    subscribe(node, peer, ("l", 1), Subscription("l/as", 1, retain_as_published=True), ("k", 1))
    for source in (*live.sources, *kept.sources):
        filter_ = next(iter(source.feed.subscriptions))
        source.feed.send([given(1, filter_, 0, retain=True), given(2, filter_, 0)])
    node.turn()
    flags = [(packet.topic, packet.payload, packet.retain) for packet in messages(peer)]
    assert {("from/l/as", b"1"), ("from/k", b"1")} == {(topic, payload) for topic, payload, retain in flags if retain}
    assert 6 == len(flags)


# --- kinds come and go ----------------------------------------------------------------------------------------------


def test_clients_hear_of_a_kind_that_comes_and_goes(node: MemoryNode) -> None:
    """At once, or when they come back; one of the same name that comes later begins anew."""
    peer = connect(node)
    subscribe(node, peer, ("x", 1))
    peer.take()
    SourceScript("unwanted", prefix="$q/").open(node)
    assert session_of(node).scheduler is None, "a new kind that nobody wants costs nothing"
    script = SourceScript().open(node)
    assert [("subscribe", "x", Why.RECREATED)] == script.heard
    script.give(node, given(1))
    assert [1] == numbers(peer)
    script.source.feed.kept = "old"
    part(node, peer)
    script.close(node)
    assert not [slot for slot in scheduler_of(node).slots.values() if slot.kind is script.kind]
    other = SourceScript().open(node)
    assert [] == other.heard
    connect(node)
    assert [("subscribe", "x", Why.RESUMED)] == other.heard and other.source.feed.kept is None


def test_a_kind_that_comes_while_a_subscription_is_stored() -> None:
    """It may hear of it at once; if the store refuses the subscription, it hears that too."""
    store = HeldStore()
    with node_with(store) as node:
        peer = connect(node)
        peer.take()
        store.held = True
        subscribe(node, peer, ("x", 1))
        script = SourceScript().open(node)
        store.full = True
        store.let_go()
        node.turn()
        assert [Suback(1, (ReasonCode.QUOTA_EXCEEDED,), Properties(reason_string="no room"))] == peer.take()
        assert all(source.over for source in script.sources) and session_of(node).scheduler is None


def test_there_is_one_kind_of_a_name(node: MemoryNode) -> None:
    SourceScript().open(node)
    with pytest.raises(HookError, match="script"):
        SourceScript().open(node)
    assert node.state.shared.sources.unregister("script") is True
    assert node.state.shared.sources.unregister("script") is False


# --- the session around it ------------------------------------------------------------------------------------------


def test_access_that_is_taken_away_ends_a_source() -> None:
    """Of a client that is there, or meanwhile: then what is in flight is not repeated."""
    for online in (True, False):
        with node_with() as node:
            script = SourceScript()
            peer = arrive(node, script)
            script.give(node, *some(WINDOW + 1 if online else 2))
            flying = messages(peer)
            if not online:
                part(node, peer)
            allowed = [online]
            node.hooks.add("client.authorize", Callback(lambda *_, allowed=allowed: Stop(allowed[0]), 0, "access"))
            node.turn()
            if online:
                allowed[0] = False
                node.broker.recheck_access()
                node.turn()
                assert ("unsubscribe", "x", Why.UNSUBSCRIBED) == script.heard[-1]
                acknowledge(node, peer, *flying)
                assert [] == messages(peer)
            else:
                assert [] == publishes(connect(node).take()) and 1 == len(script.sources)
                assert not session_of(node).inflight and 2 == node.state.stats.dropped["revoked"]
            assert session_of(node).scheduler is None


def test_packet_ids_of_sources_do_not_run_out() -> None:
    """A durable session has few of them; what has none waits, and the mailbox goes on."""
    with node_with(HeldStore(), window=0) as node:
        SharedBacklog("s", 8000).open(node)
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


# --- two speeds, one meaning ----------------------------------------------------------------------------------------


def _conversation(*, observed: bool, durable: bool, version: int, live: bool) -> tuple[list[Any], list[Any]]:
    """What a client gets and its sources hear, on one of both ways.

    With live messages and QoS 0 beside, one answer per read: who has the first turn after several at once is left open.
    """
    at_once = 1 if live else 3
    with node_with(HeldStore() if durable else None) as node:
        node.state.observed = observed
        script = SourceScript(multi_topic=True)
        script.after = lambda source, given_, ack: (
            [given(given_.tag + 10, given_.filter, given_.message.qos)] if given_.tag < 60 else None
        )
        peer = arrive(node, script, filters=(("0", 0), ("1", 1), ("2", 2), ("live", 1)), version=version)
        script.give(node, *(given(n, filter_, 2) for n, filter_ in enumerate("0112212" if live else "112212", 1)))
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
        return got, script.heard


def test_acknowledgements_mean_the_same_on_both_ways() -> None:
    """Through the fast path and packet by packet: the client gets the same, and its source hears the same."""
    for case in [(durable, version, live) for durable in (False, True) for version in (4, 5) for live in (False, True)]:
        durable, version, live = case
        quick = _conversation(observed=False, durable=durable, version=version, live=live)
        slow = _conversation(observed=True, durable=durable, version=version, live=live)
        for kind in (Publish, Pubrel):  # answers and messages each keep their own order
            got = [[p for p in packets if isinstance(p, kind)] for packets in (quick[0], slow[0])]
            assert got[0] == got[1], case
        assert [call[:2] for call in quick[1]] == [call[:2] for call in slow[1]], case
        assert len([call for call in quick[1] if call[0] == "delivered"]) >= 30, case


# --- handed over at once --------------------------------------------------------------------------------------------


def test_what_is_handed_over_leaves_at_once(node: MemoryNode) -> None:
    """It is in flight when `hand` returns, without a callback; a client that comes back gets it again."""
    script = SourceScript(asked=True)
    peer = arrive(node, script)
    script.heard.clear()
    assert script.source.feed.hand(given(1))
    assert [1] == [one.tag for one in script.source.feed.inflight] and [] == script.heard
    node.turn()
    (packet,) = messages(peer)
    assert (b"1", 1, "from/x") == (packet.payload, packet.qos, packet.topic)
    part(node, peer)
    peer = connect(node)
    (packet,) = publishes(peer.take())
    assert packet.dup and 2 == len(script.sources)
    acknowledge(node, peer, packet)
    assert [1] == script.tags()


def test_what_is_handed_over_keeps_its_order(node: MemoryNode) -> None:
    """Nothing passes what waits already, be it of another source."""
    script, other = SourceScript(), SourceScript("other").open(node)
    peer = arrive(node, script)
    script.give(node, *some(WINDOW + 1))
    flying = messages(peer)
    assert not script.source.feed.hand(given(9)) and not other.source.feed.hand(given(9))
    acknowledge(node, peer, flying[0])
    assert [b"5"] == [packet.payload for packet in messages(peer)]
    assert not script.source.feed.hand(given(9)), "the window is full"
    acknowledge(node, peer, *flying[1:])
    assert other.source.feed.hand(given(9))
    node.turn()
    assert [b"9"] == [packet.payload for packet in messages(peer)]


def test_what_cannot_be_handed_over_changes_nothing() -> None:
    """Whoever hears False may give it the other way."""
    for what in ("qos 0", "retained", "expires", "another filter", "identifier", "told", "after its end"):
        with node_with() as node:
            script = SourceScript()
            peer = arrive(node, script)
            feed = script.source.feed
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
                part(node, peer)
            peer.take()
            assert not feed.hand(one), what
            node.turn()
            assert [] == peer.take() and not feed.inflight, what
