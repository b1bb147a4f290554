"""Durable sessions as their clients see them, on a store whose writes are done, fail or are lost as the test says.

What holds in any order of events stands in `test_durable_model.py`; that both speeds of the broker mean the same, in
`test_equivalence.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import pytest

from motorcade.broker import durable_queue, fastpath, session_writer
from motorcade.broker.frames import Frame
from motorcade.broker.limits import SessionOptions
from motorcade.broker.pubsub import Copy
from motorcade.broker.session import Session
from motorcade.broker.session_writer import FullMessage, PlainMessage
from motorcade.commit import Commit
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.core.record import RecordError
from motorcade.core.subscription import Subscription
from motorcade.extension.hooks import Callback, Continue, acknowledge_after
from motorcade.extension.sources import Answer, Feed, Given, Source, SourceType, Why
from motorcade.mqtt.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from motorcade.mqtt.properties import NONE, Properties
from motorcade.storage.ports import Entry, Fence, StoreError, StoreFullError, StoreRefusedError
from tests.support.held_store import HeldStore
from tests.support.virtual import MemoryNode, Peer, standing, surviving

RETRY = 1.0  #: seconds after which the broker has tried again what failed
LASTING = Properties(session_expiry=3600)


class World:
    """A node on a store, and the nodes that come after it."""

    def __init__(self, options: SessionOptions, *, atomic: bool) -> None:
        self.store = HeldStore(atomic=atomic)
        self.node = MemoryNode(options, store=self.store)

    def turn(self) -> None:
        self.node.turn()

    def pass_time(self, seconds: float) -> None:
        """Seconds pass; what is due happens."""
        self.node.clock.now += seconds
        self.node.turn()
        for will in self.node.state.registry.due(self.node.clock.now):
            self.node.broker.publish_will(will)
        self.node.turn()

    def restart(self, written: int = 0) -> None:
        """The process is killed; so many of the writes it waited for were done. Another begins."""
        held, self.store.held, self.store.held_reads = self.store.held, False, False
        self.store.die(written)
        self.node = self.node.restart()
        self.store.held = held

    def join(self, client_id: str, *wanted: tuple[str, int] | Subscription, **more: Any) -> Peer:
        """A lasting client, connected, with subscriptions."""
        more.setdefault("properties", LASTING)
        peer = self.node.client(client_id, **more)
        if wanted:
            self.node.subscribe(peer, *wanted)
        return peer

    def back(self, client_id: str, properties: Properties = LASTING, version: int = 5) -> tuple[Peer, list[Packet]]:
        """A client that comes back, and what it gets."""
        peer = self.node.peer(version)
        peer.send(Connect(client_id, version, clean_start=False, properties=properties if version == 5 else NONE))
        self.turn()
        first, *rest = peer.take()
        assert isinstance(first, Connack) and first.session_present, first
        return peer, rest

    def release(self) -> None:
        """Everything that waits is done, and what follows from it."""
        self.store.held = self.store.held_reads = False
        while self.store.waiting or self.store.reads:
            self.store.let_go()
            self.store.let_read()
            self.turn()


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:

        def made(options: SessionOptions | None = None, *, atomic: bool = True) -> World:
            world = World(options or SessionOptions(), atomic=atomic)
            stack.enter_context(standing(world.node.clock))
            return world

        yield made


def payloads(packets: list[Packet]) -> list[bytes]:
    return [packet.payload for packet in packets if isinstance(packet, Publish)]


def kinds(packets: list[Packet]) -> list[tuple[str, int]]:
    return [(type(packet).__name__, getattr(packet, "packet_id", 0)) for packet in packets]


def drain(world: World, peer: Peer, packets: list[Packet]) -> list[Publish]:
    """Acknowledge everything that comes until nothing does; the messages."""
    found: list[Publish] = []
    while packets:
        for packet in packets:
            if isinstance(packet, Publish):
                found.append(packet)
                if packet.qos:
                    peer.send(Puback(packet.packet_id) if packet.qos == 1 else Pubrec(packet.packet_id))
            elif isinstance(packet, Pubrel):
                peer.send(Pubcomp(packet.packet_id))
        world.turn()
        packets = peer.take()
    return found


# --- what is acknowledged is stored -------------------------------------------------------------------------------


def test_receivers_that_are_not_durable_get_the_message_after_the_commit_too(make: Make) -> None:
    """So nobody sees a message that its publisher has to send again."""
    world = make()
    world.join("r", ("t", 1))
    live = world.node.client("live")
    world.node.subscribe(live, ("t", 1))
    publisher = world.node.client("p")
    world.store.held = True
    publisher.send(Publish("t", b"m", 1, packet_id=1))
    world.turn()
    assert not live.take()
    world.release()
    assert payloads(live.take()) == [b"m"]


def test_a_session_goes_on_though_reading_its_mailbox_has_failed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a defect of ours, not by an error of the store."""
    world = make(SessionOptions(window=7))
    world.join("r", ("t", 1)).close()
    world.turn()
    publisher = world.join("p")
    publisher.send(*(Publish("t", b"%d" % n, 1, packet_id=n + 1) for n in range(40)))
    world.turn()
    read, failures = world.store.mailboxes.read, iter([True, False, True, True])

    async def fails(*arguments: Any) -> list[Entry]:
        if next(failures, False):
            raise UnboundLocalError("a defect")
        return await read(*arguments)

    monkeypatch.setattr(world.store.mailboxes, "read", fails)
    found: list[bytes] = []
    with surviving():
        peer, packets = world.back("r")
        for _ in range(6):
            found += payloads(cast("list[Packet]", drain(world, peer, packets)))
            world.pass_time(RETRY * 4)
            packets = peer.take()
    assert [b"%d" % n for n in range(40)] == found, "each once, in order"
    assert {"sessions.fetch": 3} == world.node.broker.supervisor.failures


def test_a_client_can_come_back_though_ending_its_session_has_failed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    world.join("r", ("t", 1))
    forget, failures = world.store.mailboxes.forget, iter([True, True])

    async def fails(owner: str, fence: Fence | None) -> int:
        if next(failures, False):
            raise KeyError("a defect")
        return await forget(owner, fence)

    monkeypatch.setattr(world.store.mailboxes, "forget", fails)
    with surviving():
        peer = world.node.peer()
        peer.send(Connect("r", 5, clean_start=True, properties=LASTING))
        world.turn()
        assert not peer.take(), "the new session waits until nothing is left of the old one"
        for _ in range(4):
            world.pass_time(RETRY * 2)
        assert kinds(peer.take()) == [("Connack", 0)]


def test_all_are_served_though_a_message_cannot_be_encoded_for_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a defect of ours: it is stored, so the publisher is answered, and the one gets it from the store."""
    world = make()
    bad, good, publisher = world.join("bad", ("t", 1)), world.join("good", ("t", 1)), world.join("p")

    def failing(source: type[FullMessage | PlainMessage]) -> None:
        frame = source.frame

        def fails(self: Any, copy: Copy, now: float) -> Frame:
            if copy.session.client_id == "bad":
                raise KeyError("a defect")
            return frame(self, copy, now)

        monkeypatch.setattr(source, "frame", fails)

    failing(FullMessage)
    failing(PlainMessage)
    with surviving():
        publisher.send(Publish("t", b"m", 1, packet_id=7))
        world.turn()
    assert kinds(publisher.take()) == [("Puback", 7)]
    assert payloads(good.take()) == payloads(bad.take()) == [b"m"]


def test_a_client_that_cannot_be_served_is_sent_away_and_holds_up_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    bad, good, publisher = world.join("bad", ("t", 1)), world.join("good", ("t", 1)), world.join("p")
    pump = Session.pump

    def fails(session: Session, now: float) -> bool:
        if session.client.client_id == "bad":
            raise KeyError("a defect")
        return pump(session, now)

    monkeypatch.setattr(Session, "pump", fails)
    with surviving():
        publisher.send(Publish("t", b"m", 1, packet_id=7))
        world.turn()
        assert kinds(publisher.take()) == [("Puback", 7)]
        assert payloads(good.take()) == [b"m"]
        assert kinds(bad.take()) == [("Disconnect", 0)]
    monkeypatch.undo()
    bad.close()
    world.turn()
    _, packets = world.back("bad")
    assert payloads(packets) == [b"m"]


# --- QoS 2 --------------------------------------------------------------------------------------------------------


def _doubtful(world: World, *, written: bool, version: int = 5) -> None:
    """A lasting publisher `p` has sent QoS 2 message `m` with id 1 for `r`, who is away; its outcome is unknown.

    That happens only where batches are not atomic."""
    world.join("r", ("t", 2)).close()
    publisher = world.join("p", version=version, clean=False)
    world.store.held = True
    publisher.send(Publish("t", b"m", 2, packet_id=1))
    world.turn()
    world.store.fail(StoreError("lost"), written=written)
    world.store.held = False
    world.turn()
    assert not publisher.open


def _comes_back(world: World, version: int = 5) -> Peer:
    """The publisher, and repeats its message."""
    publisher, _ = world.back("p", version=version)
    publisher.send(Publish("t", b"m", 2, packet_id=1, dup=True))
    return publisher


def test_a_doubtful_message_is_doubtful_until_its_repetition_is_stored(make: Make) -> None:
    """The connection that repeats it ends before the store has answered, at whatever moment."""
    for written in (True, False):
        for taken_over in (True, False):
            for turns in range(4):
                world = make(atomic=False)
                _doubtful(world, written=written)
                world.store.held = True
                connect = Connect("p", 5, clean_start=False, properties=LASTING)
                publisher = world.node.peer()
                publisher.send(connect)
                world.turn()
                world.store.let_go(1)
                world.turn()
                publisher.send(Publish("t", b"m", 2, packet_id=1, dup=True))
                for _ in range(turns):
                    world.turn()
                    world.store.let_go(1)
                if taken_over:
                    world.node.peer().send(connect)
                else:
                    publisher.close()
                world.turn()
                world.release()
                assert kinds(_answered(world, _comes_back(world))) == [("Pubrec", 1)]
                peer, packets = world.back("r")
                assert [packet.payload for packet in drain(world, peer, packets)] == [b"m"], turns


def test_a_batch_of_which_a_part_is_stored_when_the_node_is_killed_comes_once(make: Make) -> None:
    """Where batches are not atomic: the id comes first, and tells which member of a group was chosen."""
    for cut in range(6):
        world = make(SessionOptions(shared_strategy="round_robin"), atomic=False)
        for name in ("r", "s"):
            world.join(name, ("t", 2), ("$share/g/t", 2)).close()
        publisher = world.join("p")
        world.store.held = True
        publisher.send(Publish("t", b"m", 2, packet_id=1))
        world.turn()
        world.store.cut = cut
        world.restart(written=1)
        world.store.cut, world.store.held = None, False
        assert kinds(_answered(world, _comes_back(world))) == [("Pubrec", 1)]
        got = []
        for name in ("r", "s"):
            peer, packets = world.back(name)
            got += [packet.payload for packet in drain(world, peer, packets)]
        assert got == [b"m"] * 3, cut


def test_a_doubtful_message_that_is_refused_does_not_pass_for_the_next_one(make: Make) -> None:
    """A client whose message is refused may use its id for another; one that hears nothing repeats it."""
    for version in (4, 5):
        for written in (True, False):
            world = make(atomic=False)
            _doubtful(world, written=written, version=version)
            world.store.full = True
            answers = _answered(world, _comes_back(world, version))
            world.store.full = False
            expected = [b"m"]
            publisher, _ = world.back("p", version=version)
            if not answers:
                publisher.send(Publish("t", b"m", 2, packet_id=1, dup=True))
            elif answers[0].reason >= 0x80:  # type: ignore[union-attr]
                publisher.send(Publish("t", b"other", 2, packet_id=1))
                expected = [b"m", b"other"] if written else [b"other"]
            assert kinds(_answered(world, publisher)) == [("Pubrec", 1)] or kinds(answers) == [("Pubrec", 1)]
            peer, packets = world.back("r")
            assert [packet.payload for packet in drain(world, peer, packets)] == expected, answers


def _answered(world: World, peer: Peer) -> list[Packet]:
    world.turn()
    return [packet for packet in peer.take() if isinstance(packet, Pubrec)]


def test_the_id_of_a_message_in_the_air_does_not_outlive_the_session(make: Make) -> None:
    """Whatever becomes of the message: the session has ended before the store has answered."""
    for fails in (False, True):
        for atomic in (True, False):
            world = make(atomic=atomic)
            world.join("r", ("t", 2)).close()
            publisher = world.join("p")
            world.store.held = True
            publisher.send(Publish("t", b"m", 2, packet_id=1))
            world.turn()
            publisher.close()
            world.turn()
            world.node.state.registry.end("p", world.node.clock.now)
            world.turn()
            if fails:
                world.store.fail(StoreError("lost"), written=True)
                world.turn()
            world.release()
            world.pass_time(2 * RETRY)
            assert not world.store.records_of("awaiting") and "p" not in world.store.records_of("session")


def test_a_full_store_does_not_make_a_message_come_twice(make: Make) -> None:
    """The entries are stored, then the store is full: whatever else it should note about the message."""
    for version in (4, 5):
        world = make(atomic=False)
        world.join("r", ("t", 2)).close()
        publisher = world.join("p", version=version, clean=False)
        world.store.held = True
        publisher.send(Publish("t", b"m", 2, packet_id=1))
        world.turn()
        world.store.let_go(1)
        world.turn()
        world.store.full = True
        world.release()
        world.store.full = False
        if not publisher.open:
            publisher, _ = world.back("p", version=version)
            publisher.send(Publish("t", b"m", 2, packet_id=1, dup=True))
        (answer,) = _answered(world, publisher)
        assert isinstance(answer, Pubrec) and answer.reason < 0x80
        peer, packets = world.back("r")
        assert [packet.payload for packet in drain(world, peer, packets)] == [b"m"]


def test_an_id_that_was_doubtful_is_forgotten_when_it_is_released(make: Make) -> None:
    """Else the next message under this id would pass for the doubtful one, and be routed twice."""
    world = make(atomic=False)
    publisher = world.join("p")
    publisher.send(Publish("t", b"m1", 2, packet_id=1))
    world.turn()
    world.restart()
    live = world.node.client("live")
    world.node.subscribe(live, ("t", 2))
    publisher, _ = world.back("p")
    publisher.send(Pubrel(1), Publish("t", b"m2", 2, packet_id=1))
    world.turn()
    publisher.close()
    world.turn()
    publisher, _ = world.back("p")
    publisher.send(Publish("t", b"m2", 2, packet_id=1, dup=True))
    world.turn()
    assert kinds(publisher.take()) == [("Pubrec", 1)]
    assert payloads(live.take()) == [b"m2"]


def test_pubrec_of_an_earlier_connection_does_not_release_what_comes_again(make: Make) -> None:
    """A client that answers a message of its last connection before it has come again: it must get it once."""
    world = make()
    receiver, publisher = world.join("r", ("t", 2)), world.join("p")
    publisher.send(Publish("t", b"m", 2, packet_id=1))
    world.turn()
    (message,) = receiver.take()
    assert isinstance(message, Publish)
    receiver.close()
    world.turn()
    world.store.held_reads = True
    receiver, packets = world.back("r")
    receiver.send(Pubrec(message.packet_id))
    world.turn()
    packets += receiver.take()
    world.release()
    packets += receiver.take()
    pubrel = [i for i, packet in enumerate(packets) if isinstance(packet, Pubrel)]
    again = [i for i, packet in enumerate(packets) if isinstance(packet, Publish)]
    assert not pubrel or not again or again[0] < pubrel[0], packets


class OneMessage(Source):
    """Gives one message to whoever subscribes."""

    def __init__(self, feed: Feed, message: Message) -> None:
        super().__init__(feed)
        self.message = message

    def subscribe(self, subscription: Subscription, why: Why) -> bool:
        self.feed.send(subscription.filter)
        return True

    def info(self, what: object, desired: int) -> Answer:
        return [Given(self.message, str(what))]


def test_pubrels_keep_the_order_of_pubrecs(make: Make) -> None:
    """[MQTT-4.6.0-4], also between messages from the store and others."""
    world = make()
    receiver, publisher = world.join("r", ("t", 2)), world.join("p")
    publisher.send(Publish("t", b"m", 2, packet_id=1))
    retained = Message("r", b"retained", 2, retain=True)
    world.node.broker.state.shared.sources.register(
        SourceType("one", partial(OneMessage, message=retained), prefix="one")
    )
    receiver.send(Subscribe(2, (Subscription("one", 2),)))
    world.turn()
    messages = [packet for packet in receiver.take() if isinstance(packet, Publish)]
    assert len(messages) == 2
    stored, other = sorted(messages, key=lambda message: message.payload)
    world.store.held = True
    receiver.send(Pubrec(stored.packet_id), Pubrec(other.packet_id))
    world.turn()
    world.release()
    assert kinds(receiver.take()) == [("Pubrel", stored.packet_id), ("Pubrel", other.packet_id)]


# --- connecting, leaving, ending ----------------------------------------------------------------------------------


def test_connack_of_a_new_lasting_session_waits_for_the_store(make: Make) -> None:
    world = make()
    world.store.held = True
    peer = world.node.peer()
    peer.send(Connect("r", 5, properties=LASTING))
    world.turn()
    assert not peer.take()
    world.release()
    assert isinstance(peer.take()[0], Connack)
    world.restart()
    world.back("r")


def test_a_session_that_ends_leaves_nothing(make: Make) -> None:
    for how in ("clean start", "expiry 0", "expired", "removed"):
        world = make()
        receiver, publisher = world.join("r", ("t", 1), ("#", 2), ("$share/g/t", 1)), world.join("p")
        publisher.send(Publish("t", b"1", 1, packet_id=1))
        receiver.send(Publish("x", b"2", 2, packet_id=2))
        world.turn()
        _end(world, receiver, how)
        for collection in ("session", "subscription", "awaiting"):
            assert not [key for key in world.store.records_of(collection) if "r" in key], collection
        assert not world.store.entries("r")


def _end(world: World, receiver: Peer, how: str) -> None:
    if how == "clean start":
        peer = world.node.peer()
        peer.send(Connect("r", 5, clean_start=True))
    elif how == "expiry 0":
        receiver.send(Disconnect(properties=Properties(session_expiry=0)))
    else:
        receiver.close()
        world.turn()
        if how == "expired":
            world.pass_time(3601)
        else:
            world.node.state.registry.end("r", world.node.clock.now)
    world.turn()


def test_acknowledgements_that_failed_do_not_hit_the_next_session(make: Make) -> None:
    """Positions of the next session begin anew."""
    world = make()
    receiver, publisher = world.join("r", ("t", 1)), world.join("p")
    publisher.send(*(Publish("t", b"old", 1, packet_id=n) for n in (1, 2, 3)))
    world.turn()
    numbers = [packet.packet_id for packet in receiver.take() if isinstance(packet, Publish)]
    world.store.held = True
    receiver.send(*(Puback(number) for number in numbers))
    world.turn()
    while world.store.waiting:
        world.store.fail(StoreError("away"))
        world.turn()
    world.store.held = False
    receiver = world.join("r", ("t", 1))  # starts clean
    publisher.send(*(Publish("t", b"new", 1, packet_id=n) for n in (1, 2, 3)))
    world.turn()
    assert payloads(receiver.take()) == [b"new"] * 3
    world.pass_time(2 * RETRY)
    assert len(world.store.entries("r")) == 3


def test_qos_0_that_was_kept_comes_before_what_is_published_now(make: Make) -> None:
    """[MQTT-4.6.0-6]"""
    world = make()
    world.join("r", ("t", 0)).close()
    publisher = world.join("p")
    publisher.send(Publish("t", b"1"), Publish("t", b"2"))
    world.turn()
    world.store.held_reads = True
    receiver, packets = world.back("r")
    publisher.send(Publish("t", b"3"))
    world.turn()
    world.release()
    assert payloads(packets + receiver.take()) == [b"1", b"2", b"3"]
    publisher.send(Publish("t", b"4"))
    world.turn()
    assert payloads(receiver.take()) == [b"4"]
    assert not world.store.entries("r")


def test_a_will_goes_out_after_a_crash_unless_the_client_has_said_goodbye(make: Make) -> None:
    world = make()
    world.join("r", ("w/#", 1)).close()
    will = {"will": Will("w/x", b"gone", 1)}
    world.join("x", **will)
    bye = world.join("y", will=Will("w/y", b"gone", 1))
    bye.send(Disconnect())
    world.turn()
    world.restart()
    world.pass_time(1)
    peer, packets = world.back("r")
    assert [packet.topic for packet in drain(world, peer, packets)] == ["w/x"]
    world.restart()
    world.pass_time(1)
    _, packets = world.back("r")
    assert not payloads(packets)


def test_a_goodbye_that_could_not_be_stored_at_once_is_stored_later(make: Make) -> None:
    """Else the will would go out after the next start."""
    world = make()
    world.join("r", ("w/#", 1)).close()
    bye = world.join("y", will=Will("w/y", b"gone", 1))
    world.store.held = True
    bye.send(Disconnect())
    world.turn()
    while world.store.waiting:
        world.store.fail(StoreError("away"))
        world.turn()
    world.store.held = False
    world.pass_time(2 * RETRY)
    world.restart()
    world.pass_time(1)
    _, packets = world.back("r")
    assert not payloads(packets)


# --- subscriptions ------------------------------------------------------------------------------------------------


def test_suback_and_unsuback_wait_for_the_store(make: Make) -> None:
    world = make()
    receiver = world.join("r", ("a", 1))
    world.store.held = True
    receiver.send(Subscribe(1, (Subscription("t", 1),)), Unsubscribe(2, ("a",)))
    world.turn()
    assert not receiver.take()
    world.release()
    assert kinds(receiver.take()) == [("Suback", 1), ("Unsuback", 2)]
    world.restart()
    assert list(world.node.state.registry.sessions["r"].subscriptions) == ["t"]


def test_options_of_subscriptions_outlive_the_process(make: Make) -> None:
    world = make()
    wanted = Subscription("t/+", 2, no_local=True, retain_as_published=True, retain_handling=2)
    peer = world.join("r")
    peer.send(Subscribe(1, (wanted,), Properties(subscription_ids=(9,))))
    world.turn()
    before = world.node.state.registry.sessions["r"].subscriptions
    assert before["t/+"].identifier == 9
    world.restart()
    assert world.node.state.registry.sessions["r"].subscriptions == before


def test_a_subscription_that_was_removed_does_not_come_back(make: Make) -> None:
    """The store fails, the client repeats its UNSUBSCRIBE."""
    world = make()
    receiver = world.join("r", ("t", 1))
    world.store.held = True
    receiver.send(Unsubscribe(1, ("t",)))
    world.turn()
    while world.store.waiting:
        world.store.fail(StoreError("away"))
        world.turn()
    world.store.held = False
    assert not receiver.open
    receiver, _ = world.back("r")
    receiver.send(Unsubscribe(1, ("t",)))
    world.turn()
    assert [packet for packet in receiver.take() if isinstance(packet, Unsuback)]
    world.restart()
    assert not world.node.state.registry.sessions["r"].subscriptions


def test_subscriptions_that_were_refused_are_not_there(make: Make) -> None:
    """Also if one filter was asked for twice before the first answer."""
    world = make()
    receiver = world.join("r")
    world.store.full = True
    receiver.send(Subscribe(1, (Subscription("t", 1),)), Subscribe(2, (Subscription("t", 2),)))
    world.turn()
    answers = [packet for packet in receiver.take() if isinstance(packet, Suback)]
    assert [answer.reasons for answer in answers] == [(ReasonCode.QUOTA_EXCEEDED,)] * 2
    assert not world.node.state.registry.sessions["r"].subscriptions
    world.store.full = False
    world.restart()
    assert not world.node.state.registry.sessions["r"].subscriptions


def test_a_subscription_of_a_session_that_has_ended_meanwhile_is_nobodys(make: Make) -> None:
    """The client starts clean while its SUBSCRIBE is in the air."""
    for fails in (False, True):
        world = make()
        told: list[str] = []
        world.node.hooks.add(
            "session.subscribed",
            Callback(lambda _client, subscription, _new, told=told: told.append(subscription.filter), 0, "x"),
        )
        receiver = world.join("r", ("t", 1))
        told.clear()
        world.store.held = True
        receiver.send(Subscribe(2, (Subscription("t", 2),)))
        world.turn()
        peer = world.node.peer()
        peer.send(Connect("r", 5, clean_start=True, properties=LASTING))
        if fails:
            world.store.fail(StoreError("away"))
            world.turn()
        world.release()
        assert isinstance(peer.take()[0], Connack)
        assert not told
        assert not world.node.state.pubsub.subscriptions
        assert not world.node.state.pubsub.route("t").count


# --- a store that takes nothing -----------------------------------------------------------------------------------


def test_a_full_store_refuses_what_is_new(make: Make) -> None:
    world = make()
    receiver, publisher, old = world.join("r", ("t", 1)), world.join("p"), world.join("q", version=4, clean=False)
    world.store.full = True
    for qos in (1, 2):
        publisher.send(Publish("t", b"m", qos, packet_id=qos))
        world.turn()
        (answer,) = publisher.take()
        assert isinstance(answer, Puback | Pubrec) and answer.reason is ReasonCode.QUOTA_EXCEEDED
    old.send(Publish("t", b"m", 1, packet_id=1))
    world.turn()
    assert not old.open
    newcomer = world.node.peer()
    newcomer.send(Connect("new", 5, properties=LASTING))
    world.turn()
    (answer, *_) = newcomer.take()
    assert isinstance(answer, Connack) and answer.reason is ReasonCode.QUOTA_EXCEEDED
    assert not newcomer.open and "new" not in world.node.state.registry.sessions
    assert not receiver.take() and not world.store.entries("r")
    guest = world.node.client("guest")
    assert guest.open
    world.store.full = False
    publisher.send(Publish("t", b"again", 2, packet_id=2))
    world.turn()
    assert kinds(publisher.take()) == [("Pubrec", 2)] and payloads(receiver.take()) == [b"again"]


def test_a_full_store_can_be_emptied_while_others_go_on_publishing(make: Make) -> None:
    for qos in (1, 2):
        world = make(SessionOptions(window=4))
        world.join("r", ("t", 2)).close()
        publisher = world.join("p")
        publisher.send(*(Publish("t", b"%d" % n, qos, packet_id=n) for n in range(1, 11)))
        world.turn()
        publisher.take()
        world.store.full = True
        receiver, packets = world.back("r")
        found: list[bytes] = []
        for _ in range(40):
            publisher.send(Publish("t", b"no", 1, packet_id=100))  # in the same turn, refused
            for packet in packets:
                if isinstance(packet, Publish):
                    found.append(packet.payload)
                    receiver.send(Puback(packet.packet_id) if packet.qos == 1 else Pubrec(packet.packet_id))
                elif isinstance(packet, Pubrel):
                    receiver.send(Pubcomp(packet.packet_id))
            world.turn()
            packets = receiver.take()
        assert receiver.open and publisher.open
        assert found == [b"%d" % n for n in range(1, 11)]
        assert not world.store.entries("r")


def test_the_id_of_a_refused_qos_2_message_can_be_used_again(make: Make) -> None:
    """It was stored, but a plugin could not store what it wanted."""
    world = make()
    world.join("r", ("t", 1)).close()
    publisher = world.join("p")

    def refuse(_client: ClientInfo | None, message: Message) -> Continue:
        acknowledge_after(message, Commit.failed(StoreFullError("no room")))
        return Continue(message)

    world.node.hooks.add("message.publish", Callback(refuse, 0, "x"))
    publisher.send(Publish("t", b"m1", 2, packet_id=1))
    world.turn()
    (answer,) = publisher.take()
    assert isinstance(answer, Pubrec) and answer.reason is ReasonCode.QUOTA_EXCEEDED
    world.restart()
    publisher, _ = world.back("p")
    publisher.send(Publish("t", b"m2", 2, packet_id=1))
    world.turn()
    assert kinds(publisher.take()) == [("Pubrec", 1)]
    peer, packets = world.back("r")
    assert b"m2" in [packet.payload for packet in drain(world, peer, packets)]


@pytest.mark.parametrize("qos", [1, 2])
def test_what_the_store_could_not_take_in_time_is_to_be_sent_again(make: Make, qos: int) -> None:
    """Certainly nothing is stored, but there is room: an error in PUBACK would tell the client not to try again."""
    world = make()
    world.join("r", ("t", 1)).close()
    publisher = world.join("p")
    world.store.held = True
    publisher.send(Publish("t", b"m1", qos, packet_id=1))
    world.turn()
    while world.store.waiting:
        world.store.fail(StoreRefusedError("not written within 10 s: cannot connect to 10.0.0.1:6379"))
        world.turn()
    world.store.held = False
    (answer,) = publisher.take()
    assert isinstance(answer, Disconnect) and answer.reason is ReasonCode.SERVER_BUSY
    assert "the store does not answer, send it again" == answer.properties.reason_string
    publisher, _ = world.back("p")
    publisher.send(Publish("t", b"m1", qos, packet_id=1, dup=True))
    world.turn()
    assert kinds(publisher.take()) == [("Puback" if qos == 1 else "Pubrec", 1)]
    peer, packets = world.back("r")
    assert [b"m1"] == [packet.payload for packet in drain(world, peer, packets)]


# --- bounds -------------------------------------------------------------------------------------------------------


def test_a_client_that_is_connected_loses_nothing_to_a_burst(make: Make) -> None:
    """Its publisher waits when it is behind, and not only when the store has told so."""
    options = SessionOptions(queue=50, window=5, patience=10)
    world = make(options)
    receiver, publisher = world.join("r", ("t", 1)), world.join("p")
    publisher.send(*(Publish("t", b"%d" % n, 1, packet_id=n + 1) for n in range(400)))
    world.turn()
    found = drain(world, receiver, receiver.take())
    assert [packet.payload for packet in found] == [b"%d" % n for n in range(400)]
    assert not world.node.state.stats.dropped["queue_full"]


def test_large_messages_in_flight_do_not_push_each_other_out(make: Make) -> None:
    world = make(SessionOptions(queue=50, window=20, queue_bytes=100_000, patience=10))
    receiver, publisher = world.join("r", ("t", 1)), world.join("p")
    for number in range(1, 31):
        publisher.send(Publish("t", b"%02d" % number + b"x" * 20_000, 1, packet_id=number))
        world.turn()
    found = drain(world, receiver, receiver.take())
    assert [packet.payload[:2] for packet in found] == [b"%02d" % number for number in range(1, 31)]
    assert not world.node.state.stats.dropped["queue_full"]


def test_a_queue_that_is_too_long_loses_its_oldest(make: Make) -> None:
    world = make(SessionOptions(queue=10, window=5))
    world.join("r", ("t", 1)).close()
    world.turn()
    publisher = world.join("p")
    publisher.send(*(Publish("t", b"%d" % n, 1, packet_id=n + 1) for n in range(25)))
    world.turn()
    assert len([p for p in publisher.take() if isinstance(p, Puback)]) == 25
    assert world.node.state.stats.dropped["queue_full"] == 15
    receiver, packets = world.back("r")
    assert [packet.payload for packet in drain(world, receiver, packets)] == [b"%d" % n for n in range(15, 25)]


def test_a_message_for_many_goes_to_the_store_in_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has a bounded number of entries to do; what comes after it keeps its order."""
    monkeypatch.setattr(session_writer, "MAX_ROWS", 3)
    monkeypatch.setattr(fastpath, "MAX_ROWS", 3)
    monkeypatch.setattr(session_writer, "MAX_IN_FLIGHT", 6)
    world = make()
    names = [f"r{number}" for number in range(20)]
    for name in names:
        world.join(name, ("t", 1)).close()
    publisher = world.node.client("p")
    world.store.held = True
    publisher.send(*(Publish("t", b"%d" % number, 1, packet_id=number) for number in (1, 2)))
    stored = 0
    world.turn()
    while world.store.waiting:
        assert len(world.store.waiting) <= 3
        assert [packet.packet_id for packet in publisher.take() if isinstance(packet, Puback)] == []
        world.store.let_go(1)
        stored = sum(len(world.store.entries(name)) for name in names)
        if stored >= 20:
            break
        world.turn()
    world.turn()
    assert stored == 20 and kinds(publisher.take()) == [("Puback", 1)]
    world.release()
    assert kinds(publisher.take()) == [("Puback", 2)]
    for name in names:
        peer, packets = world.back(name)
        assert [packet.payload for packet in drain(world, peer, packets)] == [b"1", b"2"]


def test_a_store_that_hangs_holds_up_publishers_of_every_kind(make: Make) -> None:
    """What waits for it in memory is bounded: QoS 1 and 2 by waiting, QoS 0 for absent clients by dropping."""
    world = make(SessionOptions(queue=0, queue_bytes=0, max_awaiting_rel=0))
    world.join("r", ("t", 1)).close()
    world.turn()
    publisher, flooding = world.node.client("p"), world.node.client("f")
    world.store.held = True
    rounds = 0
    while publisher.wire.reading:
        publisher.send(*(Publish("t", b"1", 1, packet_id=1) for _ in range(100)))
        world.turn()
        rounds += 1
        assert rounds < 1000
    for _ in range(2000):
        flooding.send(*(Publish("t", b"0") for _ in range(50)))
        world.turn()
    dropped = world.node.state.stats.dropped
    assert dropped["queue_full"] + dropped["not_stored"] > 50_000
    world.release()
    assert len(publisher.take()) == 100 * rounds


# --- shared groups ------------------------------------------------------------------------------------------------


def test_shared_messages_of_a_session_that_ends_go_to_other_members(make: Make) -> None:
    """[MQTT-4.8.2-5]; each of them once."""
    world = make()
    leaving = world.join("r", ("$share/g/t", 2))
    leaving.close()
    world.turn()
    publisher = world.join("p")
    publisher.send(*(Publish("t", b"%d" % n, 1 + n % 2, packet_id=n) for n in range(1, 11)))
    world.turn()
    other = world.join("o", ("$share/g/t", 2))
    world.pass_time(3601)
    assert sorted(p.payload for p in drain(world, other, other.take())) == sorted(b"%d" % n for n in range(1, 11))
    assert not world.store.entries("r") and not world.store.entries("o")


def test_a_shared_message_on_its_way_to_a_member_that_ends_goes_to_another(make: Make) -> None:
    """Member and message in one turn of the loop."""
    world = make()
    leaving = world.join("r", ("$share/g/t", 1))
    other = world.join("o", ("$share/g/t", 1))
    publisher = world.join("p")
    for number in (1, 2):  # one of them for each
        publisher.send(Publish("t", b"%d" % number, 1, packet_id=number))
    leaving.send(Disconnect(properties=Properties(session_expiry=0)))
    world.turn()
    assert kinds(publisher.take()) == [("Puback", 1), ("Puback", 2)]
    assert sorted(payloads(other.take())) == [b"1", b"2"]


def test_a_member_that_is_gone_when_the_message_is_stored_is_not_the_one_to_get_it(make: Make) -> None:
    """The one chosen is not durable; somebody else's copy has to be stored first."""
    world = make(SessionOptions(shared_strategy="round_robin"))
    world.join("kept", ("t", 1)).close()
    live = world.node.client("live")
    world.node.subscribe(live, ("$share/g/t", 1))
    world.join("away", ("$share/g/t", 1)).close()
    publisher = world.join("p")
    world.store.held = True
    publisher.send(Publish("t", b"m", 1, packet_id=1))
    world.turn()
    live.close()
    world.turn()
    world.release()
    assert kinds(publisher.take()) == [("Puback", 1)]
    _, packets = world.back("away")
    assert payloads(packets) == [b"m"]
    assert world.node.state.shared.queued == 0


def test_a_full_store_does_not_keep_sessions_from_ending(make: Make) -> None:
    """Their shared messages cannot be handed on then, but the room they take is given back."""
    world = make()
    world.join("r", ("$share/g/t", 1)).close()
    world.turn()
    publisher = world.join("p")
    publisher.send(*(Publish("t", b"%d" % n, 1, packet_id=n) for n in range(1, 5)))
    world.turn()
    world.join("o", ("$share/g/t", 1)).close()
    world.turn()
    world.store.full = True
    world.pass_time(3601 - 1)
    peer = world.node.peer()
    peer.send(Connect("r", 5, clean_start=True))
    world.turn()
    assert isinstance(peer.take()[0], Connack)
    assert not world.store.entries("r")


# --- what plugins keep ---------------------------------------------------------------------------------------------


def test_a_publisher_is_not_told_that_nobody_hears_what_a_plugin_has_taken(make: Make) -> None:
    for taken in (False, True):
        world = make()

        def keep(_client: ClientInfo | None, message: Message, taken: bool = taken) -> None:
            acknowledge_after(message, Commit.stored(None), taken=taken)

        world.node.hooks.add("message.publish", Callback(keep, 0, "test"))
        publisher = world.join("p")
        publisher.send(Publish("t", b"m", 1, packet_id=1))
        world.turn()
        (answer,) = (packet for packet in publisher.take() if isinstance(packet, Puback))
        assert answer.reason is (ReasonCode.SUCCESS if taken else ReasonCode.NO_MATCHING_SUBSCRIBERS)


# --- a full queue drops what waits, never what is in flight --------------------------------------------------------


def _publish(world: World, publisher: Peer, numbers: range, qos: int = 1) -> None:
    for number in numbers:
        publisher.send(Publish("t", b"%d" % number, qos, packet_id=number))
        world.turn()
        if qos == 2:
            publisher.send(Pubrel(number))
            world.turn()


SMALL = SessionOptions(window=3, queue=2, patience=0)


def test_what_is_appended_before_a_client_comes_back_drops_nothing_that_it_gets(make: Make) -> None:
    world = make(SMALL)
    receiver, publisher = world.join("r", ("t", 1)), world.join("p")
    receiver.close()
    world.turn()
    _publish(world, publisher, range(1, 3))
    world.store.held = True
    _publish(world, publisher, range(3, 5))
    peer = world.node.peer(5)
    peer.send(Connect("r", 5, clean_start=False, properties=LASTING))
    world.turn()
    assert not payloads(peer.take()), "an append that may still push out something is under way"
    world.release()
    got = payloads(peer.take())
    assert 2 <= len(got)
    peer.close()
    world.turn()
    assert got == payloads(world.back("r")[1])


def test_a_queue_that_overflows_tells_what_it_drops(make: Make) -> None:
    world = make(SMALL)
    told: list[tuple[bytes, str]] = []
    world.node.hooks.add(
        "message.dropped", Callback(lambda client, message, why: told.append((message.payload, why)), 0, "test")
    )
    receiver, publisher = world.join("r", ("t", 1)), world.join("p")
    _publish(world, publisher, range(1, 9))
    assert [b"1", b"2", b"3"] == payloads(receiver.take())
    rest = [payload for payload, why in told if why == "queue_full"]
    assert rest and rest == [b"%d" % number for number in range(4, 4 + len(rest))]
    assert len(rest) == world.node.state.stats.dropped["queue_full"]


# --- a packet id that is held is passed over ------------------------------------------------------------------------


def test_the_other_id_of_a_message_is_stored_before_it_is_used(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_queue, "IDS_OF_QUEUE", 2)
    world = make(SessionOptions(window=8))
    receiver, publisher = world.join("r", ("t", 2)), world.join("p")
    _publish(world, publisher, range(1, 3), 2)
    assert 2 == len(payloads(receiver.take()))
    world.store.held = True
    publisher.send(Publish("t", b"3", 2, packet_id=3))
    world.turn()
    world.store.let_go(1)
    world.turn()
    assert not payloads(receiver.take()) and world.store.waiting
    world.store.fail(StoreError("no answer"), written=False)
    world.turn()
    world.pass_time(RETRY)
    assert not payloads(receiver.take()), "it is tried again"
    world.release()
    world.pass_time(RETRY)
    world.release()
    assert [b"3"] == payloads(receiver.take())


def test_an_entry_that_is_dropped_before_its_other_id_is_stored_stops_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_queue, "IDS_OF_QUEUE", 2)
    world = make(SMALL)
    receiver, publisher = world.join("r", ("t", 1)), world.join("p")
    _publish(world, publisher, range(1, 3))
    sent = receiver.take()
    assert [b"1", b"2"] == payloads(sent)
    world.store.held = True
    publisher.send(Publish("t", b"3", 1, packet_id=3))
    world.turn()
    world.store.let_go(1)
    world.turn()
    world.store.fail(StoreError("no answer"))
    world.turn()
    world.release()
    _publish(world, publisher, range(4, 12))
    assert 3 not in world.store.entries("r"), "there was no room for it"
    world.pass_time(RETRY)
    rest = [packet.payload for packet in drain(world, receiver, sent + receiver.take())]
    _publish(world, publisher, range(12, 15))
    rest += [packet.payload for packet in drain(world, receiver, receiver.take())]
    assert [b"12", b"13", b"14"] == rest[-3:]
    assert not world.store.entries("r")


# --- DUP ------------------------------------------------------------------------------------------------------------


def test_only_what_may_have_been_sent_before_carries_dup(make: Make) -> None:
    """[MQTT-3.3.1-3]; after a kill it is unknown what a connected client was sent, but what comes later is new."""
    for how in ("break", "killed", "killed while away"):
        world = make(SessionOptions(window=2))
        receiver, publisher = world.join("r", ("t", 1)), world.join("p")
        _publish(world, publisher, range(1, 5))
        assert [b"1", b"2"] == payloads(receiver.take())
        if how != "killed":
            receiver.close()
            world.turn()
            _publish(world, publisher, range(5, 7))
        if how.startswith("killed"):
            world.restart()
        publisher = world.join("p")
        _publish(world, publisher, range(7, 9))
        peer, packets = world.back("r")
        _publish(world, publisher, range(9, 11))
        dups = {packet.payload: packet.dup for packet in drain(world, peer, packets + peer.take())}
        sent = {b"1", b"2"} if how != "killed" else {b"1", b"2", b"3", b"4"}
        assert sent == {payload for payload, dup in dups.items() if dup}
        assert dups.keys() >= {b"7", b"8", b"9", b"10"}


def test_after_a_kill_dup_is_on_no_more_than_the_client_took_at_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the acknowledgements that were not stored; also if its window is another now."""
    monkeypatch.setattr(durable_queue, "UNSETTLED", 1)
    world = make()
    small = Properties(session_expiry=3600, receive_maximum=2)
    receiver, publisher = world.join("r", ("t", 1), properties=small), world.join("p")
    _publish(world, publisher, range(1, 9))
    assert 2 == len(payloads(receiver.take()))
    world.restart()
    peer, packets = world.back("r")
    got = drain(world, peer, packets)
    assert [True] * 3 + [False] * 5 == [packet.dup for packet in got]
    assert [b"%d" % number for number in range(1, 9)] == [packet.payload for packet in got]


def test_what_was_sent_carries_dup_although_the_client_took_fewer_at_once_before_the_kill(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[MQTT-3.3.1-1]"""
    monkeypatch.setattr(durable_queue, "UNSETTLED", 1)
    world = make(SessionOptions(window=8))
    receiver, publisher = world.join("r", ("t", 1)), world.join("p")
    _publish(world, publisher, range(1, 9))
    assert 8 == len(payloads(receiver.take()))
    receiver.close()
    world.turn()
    small = Properties(session_expiry=3600, receive_maximum=2)
    for _ in range(2):
        assert [b"1", b"2"] == payloads(world.back("r", small)[1])
        world.restart()
    peer, packets = world.back("r")
    assert [True] * 8 == [packet.dup for packet in drain(world, peer, packets)]


def test_what_an_earlier_connection_has_in_flight_does_not_count_as_queue(make: Make) -> None:
    world = make(SMALL)
    receiver, publisher = world.join("r", ("t", 1)), world.join("p")
    _publish(world, publisher, range(1, 4))
    assert 3 == len(payloads(receiver.take()))
    for _ in range(2):
        receiver.close()
        world.turn()
        receiver, packets = world.back("r", Properties(session_expiry=3600, receive_maximum=1))
        assert [b"1"] == payloads(packets)
    receiver.close()
    world.turn()
    _publish(world, publisher, range(4, 6))
    peer, packets = world.back("r")
    assert [b"%d" % number for number in range(1, 6)] == [packet.payload for packet in drain(world, peer, packets)]


def test_a_queue_whose_positions_begin_high_is_not_taken_for_a_long_one(make: Make) -> None:
    """New mailboxes begin above the positions of those that are gone (ports, rule 9)."""
    world = make(SessionOptions(queue=10))
    world.store.inner.mailboxes.floor = 1_000_000
    reader, publisher = world.join("r", ("t", 1)), world.join("p")
    session = world.node.state.registry.sessions["r"]
    world.store.held_reads = True
    for number in (1, 2, 3):
        publisher.send(Publish("t", b"%d" % number, 1, packet_id=number))
        world.turn()
        assert session.waiting_messages + len(session.inflight) == number
        assert not session.behind
    world.release()
    assert [b"1", b"2", b"3"] == payloads(reader.take())
    reader.send(Disconnect())
    world.turn()
    publisher.send(Publish("t", b"4", 1, packet_id=4))
    world.turn()
    assert session.waiting_messages <= 4


@pytest.mark.parametrize("version", [4, 5])
def test_nothing_is_taken_from_a_client_that_was_sent_away_meanwhile(
    make: Make, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its lease a node knows at once that it cannot store a message; the client's next packets are there."""
    world = make()
    world.join("r", ("t", 1))
    publisher = world.node.client("p", version=version)
    publisher.send(Publish("t", b"route", 1, packet_id=1))  # the fast path knows the topic from now on
    world.turn()
    store = world.node.state.store
    assert store is not None
    lost = StoreRefusedError("the lease has run out")
    monkeypatch.setattr(store.lease, "write", lambda _batch: Commit.failed(lost))
    publisher.send(Publish("t", b"m", 1, packet_id=2), Subscribe(3, (Subscription("left", 0),)))
    world.turn()
    assert not publisher.open
    assert world.node.state.pubsub.subscriptions == 1, "an ended session must not be left among the subscribers"


@pytest.mark.parametrize("waits", [False, True])
def test_a_message_that_cannot_be_stored_holds_up_no_other(
    make: Make, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """A plugin has made it of something that cannot be written. It fails, at once or when there is room again."""
    world = make()
    reader, publisher = world.join("r", ("t", 1)), world.join("p")
    store, session = world.node.state.store, world.node.state.registry.sessions["r"]
    assert store is not None
    if waits:
        world.store.held = True
        monkeypatch.setattr(session_writer, "MAX_IN_FLIGHT", 1)
        publisher.send(Publish("t", b"before", 1, packet_id=1))
        world.turn()
    bad = Message("t", b"bad", 1, user_properties=(("key", "\ud800"),))
    commit = store.writer.accept(bad, [Copy(session, 1, False, ())], world.node.clock.now)
    world.release()
    assert isinstance(commit.error, RecordError)
    reader.send(Disconnect())
    publisher.send(Publish("t", b"after", 1, packet_id=2))
    world.turn()
    _, packets = world.back("r")
    assert b"after" in payloads(packets)
    assert session.durable is not None and not session.durable.coming
