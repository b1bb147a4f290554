"""The fan-out on several members of a cluster, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from motorcade.broker.attachments import DRAIN_PATIENCE
from motorcade.commit import Commit
from motorcade.core import receipt as receipts
from motorcade.core.receipt import FINAL, LATE_ACK, Receipt, State
from motorcade.core.record import decode as decode_record
from motorcade.extension.ask_all import UnansweredError
from motorcade.extension.declared import ConflictError, UnknownError
from motorcade.mqtt.packets import Connect, Puback, Publish
from motorcade.mqtt.properties import Properties
from motorcade.plugins.fanout.members import HINT
from motorcade.plugins.fanout.record import UntoldRecord, encode
from motorcade.plugins.fanout.service import FanoutService
from motorcade.plugins.fanout.tables import (
    CLAIMS,
    DATA_PREFIX,
    INGRESS,
    INTENTS,
    RECEIPTS,
    TRIGGER,
    UNTOLD,
    owner_of,
    untold_of,
)
from motorcade.storage.ports import Acknowledge, Append, Batch, Delete, Put, StoreError, StreamAppend, Take, Written
from tests.support.held_store import HeldStore
from tests.support.members import MemberNode, Members
from tests.support.virtual import Client, standing
from tests.unit.fanout.node import (
    EXPIRY,
    VIN,
    VINS,
    FanoutNode,
    batch,
    figures,
    filter_of,
    in_turn,
    message_of,
    packed,
    taken,
)


@contextmanager
def cluster(count: int = 2, **options: Any) -> Iterator[Members]:
    members = Members(count, plugins={"fanout": options})
    with standing(members.clock):
        members.wait(2.0)  # one of them counts
        yield members


def fanout(node: MemberNode) -> FanoutService:
    found: FanoutService = node.plugins.service("fanout")
    return found


def platform(node: MemberNode) -> Client:
    return node.client(f"platform-{node.member}")


def send(node: MemberNode, vins: Sequence[str], request: str, data: str = "do it", **fields: Any) -> dict[str, int]:
    client = platform(node)
    client.put(INGRESS, packed(batch(vins, request, data, **fields)))
    answer = figures(client.expect(Puback))
    client.disconnect()
    return answer


def car(node: MemberNode, vin: str = VIN, **more: Any) -> Client:
    """A vehicle whose session is kept, at whichever member, and subscribed."""
    client = node.admit(vin, clean=False, session_expiry=EXPIRY, **more)
    if not client.connack.session_present:
        assert (1,) == client.subscribe(filter_of(vin), 1).reasons
    return client


def told(members: Members, request: str = "", vin: str = "") -> list[Receipt]:
    stream = members.store.inner.streams.streams.get(RECEIPTS)
    found = [receipts.decode(decode_record(record.value).payload) for record in (stream.records if stream else [])]
    return [r for r in found if r.request_id == (request or r.request_id) and r.vin == (vin or r.vin)]


def states(members: Members, request: str = "", vin: str = "") -> list[str]:
    return [str(receipt.state) for receipt in told(members, request, vin)]


def check_final(members: Members) -> None:
    """Each delivery was accepted first, and has ended once; nothing is left that is still to be told."""
    members.wait(2.0)
    seen: dict[str, list[str]] = {}
    for receipt in told(members):
        if receipt.reason != LATE_ACK:
            seen.setdefault(receipt.delivery_id, []).append(str(receipt.state))
    for name, found in seen.items():
        assert "accepted" == found[0] and 1 == found.count("accepted"), (name, found)
        assert 1 == sum(state in FINAL for state in found), (name, found)
        assert found[-1] in FINAL, (name, found)
    collections = members.store.inner.records.collections
    for collection in (INTENTS, UNTOLD, CLAIMS):
        assert not collections.get(collection), collection


def pending(members: Members, vin: str = VIN) -> int:
    box = members.store.inner.mailboxes.boxes.get(owner_of(vin))
    return len(box.rows) if box is not None else 0


# -- anywhere


def test_a_batch_reaches_a_vehicle_at_another_member_at_once() -> None:
    with cluster(3) as members:
        a, b, c = members.nodes
        there = car(b)
        assert taken(1) == send(a, [VIN], "r")
        message = message_of(there)
        assert b"do it" == message.payload
        assert 1 == members.link(a, b).sent.count(HINT)
        assert 0 == members.link(a, c).sent.count(HINT)
        there.ack(message)
        assert ["accepted", "sent", "acked"] == states(members, "r")
        check_final(members)


def test_batches_of_all_members_come_one_at_a_time_in_the_order_of_the_mailbox() -> None:
    with cluster(3) as members:
        there = car(members.nodes[1])
        names = [f"r{number}" for number in range(9)]
        for number, name in enumerate(names):
            send(members.nodes[number % 3], [VIN], name)
        assert names == in_turn(there)
        check_final(members)


def test_the_order_is_that_of_the_mailbox_whatever_the_clocks_say() -> None:
    """What was stored first is sent first, also if its batch is told later."""
    with cluster(3) as members:
        a, b, c = members.nodes
        there = car(c)
        with held_receipts(members, a):
            client = platform(a)
            client.put(INGRESS, packed(batch([VIN], "first")))
            members.turn()
            send(b, [VIN], "second")
            assert [] == there.messages(), "the first one may not be sent yet, and holds up the second"
        members.wait(1.0)
        assert ["first", "second"] == in_turn(there)
        check_final(members)


@contextmanager
def held_receipts(members: Members, node: MemberNode) -> Iterator[None]:
    """Meanwhile a member's batches have their entries stored, and nothing that comes after that."""
    store = node.plugin_store
    write, waiting = store.write, []

    def hold(batch: Batch) -> Commit[Written]:
        held = any(isinstance(step, StreamAppend) and step.stream == RECEIPTS for step in batch.steps)
        if not held:
            return write(batch)
        commit: Commit[Written] = Commit()
        waiting.append((batch, commit))
        return commit

    store.write = hold  # type: ignore[method-assign]
    try:
        yield
    finally:
        store.write = write  # type: ignore[method-assign]
    with members.loop.running():
        for held_batch, commit in waiting:
            commit.follow(write(held_batch))
    members.turn()


def test_a_vehicle_that_comes_between_entry_and_receipts_gets_it_when_they_are_stored() -> None:
    """No member has a hint for its member: it finds the intent, and asks the member that has it."""
    with cluster() as members:
        a, b = members.nodes
        client = platform(a)
        with held_receipts(members, a):
            client.put(INGRESS, packed(batch([VIN], "r")))
            members.turn()
            there = car(b)
            assert [] == there.messages()
        assert b"do it" == message_of(there).payload
        there.ack(*there.inflight)
        check_final(members)


def test_priorities_count_at_all_members() -> None:
    with cluster() as members:
        a, b = members.nodes
        there = car(b)
        send(a, [VIN], "now")
        for request, priority in (("low", 0), ("high", 5), ("higher", 7)):
            send(a, [VIN], request, priority=priority)
        assert ["now", "higher", "high", "low"] == in_turn(there)


def test_data_is_that_which_was_published_last_wherever() -> None:
    with cluster() as members:
        a, b = members.nodes
        there = car(b)
        for node, data in ((a, b"old"), (b, b"new"), (a, b"newest")):
            assert 0 == platform(node).publish(f"{DATA_PREFIX}fw", data)
            for other in (a, b):
                client = platform(other)
                client.put(TRIGGER, packed({"ids": [VIN], "request_id": "r", "data_id": "fw"}))
                figures(client.expect(Puback))
                message = message_of(there)
                assert data == message.payload
                there.ack(message)


# -- replaced


def test_what_is_replaced_at_another_member_is_told_once_and_not_repeated() -> None:
    with cluster() as members:
        a, b = members.nodes
        there = car(b)
        send(a, [VIN], "r", "one")
        one = message_of(there)
        assert taken(1, replaced=1) == send(a, [VIN], "r", "two")
        assert [] == there.messages(), "its packet is not answered"
        assert ["accepted", "sent", "accepted", "replaced"] == states(members, "r")
        there.ack(one)
        assert [LATE_ACK] == [r.reason for r in told(members, "r") if r.reason == LATE_ACK]
        two = message_of(there)
        assert b"two" == two.payload
        there.ack(two)
        check_final(members)


def test_what_is_replaced_at_another_member_before_its_next_attempt_blocks_nothing() -> None:
    """A vehicle that was silent, and is about to be sent away for that, is sent away all the same."""
    with cluster(ack_timeout=5.0, retry_delay=1.0) as members:
        a, b = members.nodes
        there = car(b)
        send(a, [VIN], "r", "one")
        message_of(there)
        members.wait(5.5)
        assert "retried" == states(members, "r")[-1]
        send(a, [VIN], "r", "two")
        members.wait(1.0)
        assert not there.open
        there = car(b)
        two = message_of(there)
        assert b"two" == two.payload
        there.ack(two)
        check_final(members)


def test_an_acknowledgement_that_comes_too_late_is_told_behind_what_has_replaced_it() -> None:
    with cluster() as members:
        a, b = members.nodes
        there = car(b)
        send(a, [VIN], "r", "one")
        one = message_of(there)
        with held_receipts(members, a):
            client = platform(a)
            client.put(INGRESS, packed(batch([VIN], "r", "two")))
            members.turn()  # the first one is gone from the mailbox, and B does not know
            there.ack(one)
        members.wait(1.0)
        assert ["accepted", "sent", "accepted", "replaced", "sent"] == states(members, "r")[:5]
        assert LATE_ACK == told(members, "r")[4].reason
        two = message_of(there)
        there.ack(two)
        check_final(members)


def test_members_that_replace_each_others_batches_end_each_delivery_once() -> None:
    with cluster(3) as members:
        cars = [car(members.nodes[number % 3], vin) for number, vin in enumerate(VINS[:6])]
        waiting = []
        for number in range(9):
            client = members.nodes[number % 3].client(f"p{number}")
            vins = VINS[:6] if number % 2 else VINS[5::-1]
            client.put(INGRESS, packed(batch(list(vins), "r", str(number))))
            waiting.append(client)
        answers = [figures(client.expect(Puback)) for client in waiting]
        assert {6} == {answer["accepted"] for answer in answers}
        for each in cars:
            in_turn(each)
        check_final(members)
        finals = Counter(r.state for r in told(members, "r") if r.state in FINAL and r.reason != LATE_ACK)
        assert 54 == finals.total()
        assert sum(answer["replaced"] for answer in answers) == finals[State.REPLACED]


def test_what_is_one_too_many_fails_alone() -> None:
    with cluster(max_pending=2) as members:
        a, b = members.nodes
        for number, node in enumerate((a, b)):
            send(node, [VIN], f"r{number}")
        assert taken(2, rejected=1) | {"accepted": 1} == send(b, [VIN, VINS[1]], "more")
        assert ["accepted", "failed"] == states(members, "more", VIN)
        cars = [car(a), car(b, VINS[1])]
        assert ["r0", "r1"] == in_turn(cars[0])
        assert ["more"] == in_turn(cars[1])
        check_final(members)


# -- moves


def test_a_vehicle_that_moves_gets_again_what_it_has_not_acknowledged() -> None:
    with cluster() as members:
        a, b = members.nodes
        here = car(a)
        send(b, [VIN], "r")
        send(b, [VIN], "s")
        assert "r" == message_of(here).topic.rsplit("/", 1)[1]
        there = car(b)
        assert not here.open
        assert ["r", "s"] == in_turn(there)
        assert ["accepted", "sent", "sent", "acked"] == states(members, "r")
        check_final(members)


def test_a_vehicle_that_moves_is_sent_nothing_until_its_acknowledgements_are_stored() -> None:
    with cluster() as members:
        a, b = members.nodes
        here = car(a)
        send(a, [VIN], "r")
        send(a, [VIN], "s")
        message = message_of(here)
        with held_receipts(members, a):
            here.ack(message)
            peer = car(b)
            members.wait(0.5)
            assert [] == peer.messages()
        members.wait(0.5)
        assert ["s"] == in_turn(peer)
        assert ["accepted", "sent", "acked"] == states(members, "r")
        check_final(members)


def test_a_vehicle_of_a_silent_member_is_sent_nothing_until_that_is_gone() -> None:
    """It may still write what the vehicle has acknowledged there."""
    with cluster() as members:
        a, b = members.nodes
        here = car(a)
        send(a, [VIN], "r")
        message_of(here)
        b.cluster.mute.add(a.member)
        there = b.peer()
        there.send(Connect(VIN, 5, clean_start=False, properties=Properties(session_expiry=EXPIRY)))
        members.wait(5.0)
        assert there.open
        assert [] == [packet for packet in there.take() if isinstance(packet, Publish)]
        members.kill(a)
        members.wait(DRAIN_PATIENCE)  # here, a question to a dead member is not refused
        assert 1 == len([packet for packet in there.take() if isinstance(packet, Publish)])


def test_attempts_go_on_at_the_next_member() -> None:
    with cluster(ack_timeout=5.0, retry_delay=1.0, retry_delay_max=1.0, max_attempts=3) as members:
        a, b = members.nodes
        send(a, [VIN], "r")
        for node in (a, b, a):
            there = car(node)
            message_of(there)
            members.wait(7.0)
            assert not there.open
        members.wait(1.0)
        assert ["accepted", "sent", "retried", "sent", "retried", "sent", "failed"] == states(members, "r")
        assert [1, 1, 2, 2, 3, 3] == [r.attempt for r in told(members, "r")[1:]]
        check_final(members)


# -- members die


def test_a_vehicle_of_a_dead_member_gets_again_what_it_has_not_acknowledged() -> None:
    with cluster(3) as members:
        a, b, c = members.nodes
        here = car(a)
        send(b, [VIN], "r")
        message_of(here)
        members.kill(a)
        members.wait(2.0)
        there = car(c)
        assert ["r"] == in_turn(there)
        check_final(members)


@pytest.mark.parametrize("last", range(8))
def test_a_batch_of_a_member_that_dies_is_completed_by_another(last: int) -> None:
    """After each of its writes; what was told is not told again, and a vehicle that waits gets it."""
    with cluster(3) as members:
        a, b, c = members.nodes
        there = car(b)
        send(c, [VIN, VINS[1]], "r", "one")
        message = message_of(there)
        die_after(a, last)
        client = platform(a)
        client.put(INGRESS, packed(batch([VIN, VINS[1], VINS[2]], "r", "two", batch_id="b1")))
        members.wait(0.5)
        members.kill(a)
        members.wait(3.0)
        there.ack(message)
        answer = send(c, [VIN, VINS[1], VINS[2]], "r", "two", batch_id="b1")
        assert 3 == answer["accepted"]
        other = [car(node, vin) for node, vin in ((b, VINS[1]), (c, VINS[2]))]
        for each in (there, *other):
            in_turn(each)
        check_final(members)
        assert 5 == states(members, "r").count("accepted")


def die_after(node: MemberNode, writes: int) -> None:
    """Let a member write so much more, then nothing."""
    store, left = node.plugin_store, [writes]
    write = store.write

    def some(batch: Batch) -> Commit[Written]:
        left[0] -= 1
        return write(batch) if left[0] >= 0 else Commit()

    store.write = some  # type: ignore[method-assign]


@pytest.mark.parametrize("cut", range(5))
def test_an_end_that_a_member_has_left_in_part_is_told_once(cut: int) -> None:
    """Where batches are not atomic: entry taken, history, untold record, receipt in the stream."""
    with cluster(3) as members:
        a, b, c = members.nodes
        members.store.inner.atomic = False
        here = car(a)
        send(b, [VIN], "r")
        message = message_of(here)
        store = a.plugin_store
        write = store.write

        def part(batch: Batch) -> Commit[Written]:
            if any(isinstance(step, Take) for step in batch.steps):
                kinds = (Take, Append, Put, StreamAppend)
                assert kinds == tuple(type(step) for step in batch.steps)
                some = Batch()
                some.conditions, some.steps = batch.conditions, batch.steps[:cut]
                if cut:
                    write(some)
                return Commit()
            return Commit() if any(isinstance(step, Delete | Acknowledge) for step in batch.steps) else write(batch)

        store.write = part  # type: ignore[method-assign]
        here.ack(message)
        members.kill(a)
        members.wait(3.0)
        there = car(c)
        got = in_turn(there)
        if 0 < cut < 3:
            return  # one script: it is never cut there
        assert (["r"] if not cut else []) == got
        check_final(members)


def test_hints_of_a_dead_member_are_not_missed() -> None:
    """F17: what it has stored and could not tell is found at once, without a heartbeat."""
    with cluster(3) as members:
        a, b, _ = members.nodes
        there = car(b)
        members.link(a, b).held = True
        send(a, [VIN], "r")
        assert [] == there.messages()
        members.kill(a)
        assert ["r"] == in_turn(there)


def test_a_member_that_starts_leaves_the_batches_of_living_ones_alone() -> None:
    with cluster() as members:
        a, b = members.nodes
        with held_receipts(members, b):
            client = platform(b)
            client.put(INGRESS, packed(batch([VIN], "r")))
            members.turn()
            members.join()
            members.wait(5.0)
            assert [] == states(members, "r")
        assert ["accepted"] == states(members, "r")
        in_turn(car(a))
        check_final(members)


# -- batch ids


def test_a_batch_that_is_repeated_at_another_member_is_stored_once() -> None:
    with cluster() as members:
        a, b = members.nodes
        assert taken(1) == send(a, [VIN], "r", batch_id="b1")
        assert taken(1, repeated=1) == send(b, [VIN], "r", batch_id="b1")
        assert ["accepted"] == states(members, "r")


def test_a_batch_that_is_under_way_at_another_member_is_waited_for() -> None:
    with cluster() as members:
        a, b = members.nodes
        first, second = platform(a), platform(b)
        fields = packed(batch([VIN], "r", batch_id="b1"))
        with held_receipts(members, a):
            first.put(INGRESS, fields)
            members.turn()
            second.put(INGRESS, fields)
            members.wait(1.0)
            assert [] == second.take()
        assert taken(1) == figures(first.expect(Puback))
        members.wait(1.0)
        assert taken(1, repeated=1) == figures(second.expect(Puback))
        assert ["accepted"] == states(members, "r")


# -- operators


def test_counts_are_known_at_each_member_also_after_the_death_of_the_one_that_counts() -> None:
    with cluster(3) as members:
        a, b, c = members.nodes
        there = car(b)
        for number in range(5):
            send(members.nodes[number % 3], VINS[:4], f"r{number % 2}")
        in_turn(there)
        for node in members.nodes:
            found = {view.request_id: (view.targets, view.pending) for view in node.run(fanout(node).requests("", 10))}
            assert {"r0": (12, 3), "r1": (8, 3)} == found
            assert 3 == len(node.run(fanout(node).targets("r0", "pending", "", 10)))
            with pytest.raises(UnknownError, match="no request"):
                node.run(fanout(node).status("other"))
        members.kill(a)  # the first is the steward
        members.wait(3.0)
        in_turn(car(c, VINS[1]))
        for node in members.nodes:
            view = node.run(fanout(node).status("r0"))
            assert (12, 2) == (view.targets, view.pending)


def test_a_request_is_paused_resumed_and_called_off_from_any_member() -> None:
    with cluster(3) as members:
        a, b, c = members.nodes
        send(a, VINS[:2], "r")
        c.run(fanout(c).pause("r"))
        there = car(b)
        assert [] == there.messages()
        for node in members.nodes:
            assert "paused" == node.run(fanout(node).status("r")).status
            assert "paused" == str(node.run(fanout(node).why(VIN)).reason)
        a.run(fanout(a).resume("r"))
        message = message_of(there)
        c.run(fanout(c).cancel("r"))
        members.wait(1.0)
        assert ["accepted", "cancelled"] == states(members, "r", VINS[1])
        there.ack(message)
        assert "acked" == states(members, "r", VIN)[-1], "it was in flight, and no other member has ended it"
        send(b, VINS[:1], "r")
        assert ["r"] == in_turn(there)
        check_final(members)


def test_why_is_told_by_the_member_that_has_the_vehicle() -> None:
    with cluster(3) as members:
        a, b, c = members.nodes
        send(a, [VIN], "r")
        for node in members.nodes:
            assert "offline" == str(node.run(fanout(node).why(VIN)).reason)
        there = car(b)
        message_of(there)
        for node in members.nodes:
            assert "in_flight" == str(node.run(fanout(node).why(VIN)).reason)
            assert node.run(fanout(node).vehicle(VIN)).connected
        there.disconnect()
        seen = members.clock.now
        members.wait(2.0)
        for node in (a, c):
            assert abs(seen - node.run(fanout(node).vehicle(VIN)).seen_at) < 1.5


def test_what_expires_is_ended_once_by_one_member_and_never_while_it_is_in_flight() -> None:
    with cluster(3, gc_interval=5.0, ack_timeout=0.0) as members:
        a, b, _ = members.nodes
        there = car(b)
        send(a, VINS[:3], "r", expires_in=2.0)
        message = message_of(there)
        members.wait(12.0)
        assert {"expired"} == {s for vin in VINS[1:3] for s in states(members, "r", vin)[1:]}
        there.ack(message)
        assert "acked" == states(members, "r", VIN)[-1]
        found = a.run(fanout(a).gc())
        assert 0 == found.expired
        check_final(members)


def test_two_decisions_at_the_same_time_hold_both() -> None:
    """A request that is paused here and called off there is called off, and what comes later is paused."""
    with cluster() as members:
        a, b = members.nodes
        send(a, [VIN], "r")
        with members.loop.running():
            tasks = [members.loop.create_task(work) for work in (fanout(a).pause("r"), fanout(b).cancel("r"))]
        members.wait(2.0)
        assert all(task.done() and not task.exception() for task in tasks)
        assert ["accepted", "cancelled"] == states(members, "r")
        with pytest.raises(ConflictError, match="not paused"):
            a.run(fanout(a).resume("r"))


def test_what_a_cluster_has_left_untold_is_told_by_a_node_by_itself() -> None:
    """All members were killed, and the store is served by a node without links."""
    store = HeldStore()
    receipt = Receipt(
        state=State.ACKED, vin=VIN, request_id="r", delivery_id=f"{VIN}.1", time=1.0, node="n1", attempt=1
    )
    store.inner.records.apply_put(
        UNTOLD, untold_of(VIN, 1), encode(UntoldRecord("n1~1", receipts.encode(receipt))), 0.0
    )
    with FanoutNode.on(store) as node:
        node.wait(1.0)
        assert [receipt] == node.receipts()
        assert {} == store.inner.records.collections[UNTOLD]


@pytest.mark.parametrize("one", range(5))
@pytest.mark.parametrize("other", range(5))
def test_batches_of_two_members_that_die_are_completed_though_they_replace_each_other(one: int, other: int) -> None:
    """Each of them has written so much; each delivery is told of once, and the vehicles get what is left."""
    with cluster(3) as members:
        a, b, c = members.nodes
        send(c, VINS[:3], "r", "zero")
        die_after(a, one)
        die_after(b, other)
        for node, vins, data in ((a, VINS[:3], "a"), (b, VINS[2::-1], "b")):
            client = platform(node)
            client.put(INGRESS, packed(batch(list(vins), "r", data)))
        members.wait(0.5)
        members.kill(a)
        members.wait(1.0)
        members.kill(b)
        members.wait(8.0)
        send(c, VINS[:3], "s")
        for vin in VINS[:3]:
            assert "s" == in_turn(car(c, vin))[-1]
        check_final(members)


def test_a_batch_in_doubt_and_that_of_a_dead_member_do_not_wait_for_each_other() -> None:
    """One member does not know what is stored of its batch, another one has died with its own under way."""
    with cluster(3) as members:
        a, b, c = members.nodes
        members.store.inner.atomic = False
        send(c, VINS[:3], "r", "zero")
        die_after(b, 1)
        client = platform(b)
        client.put(INGRESS, packed(batch(VINS[:3], "r", "b")))
        members.turn()
        write = a.plugin_store.write
        doubt: list[Commit[Written]] = []

        def unknown(batch: Batch) -> Commit[Written]:
            commit = write(batch)
            if doubt or not any(isinstance(step, Append) for step in batch.steps):
                return commit
            doubt.append(commit)
            return Commit.failed(StoreError("stored in part"))

        a.plugin_store.write = unknown  # type: ignore[method-assign]
        publisher = a.peer()
        publisher.send(Connect("platform-a", 5))
        publisher.send(Publish(INGRESS, packed(batch(list(VINS[:3]), "r", "a")), 1, packet_id=1))
        members.wait(0.5)
        assert doubt
        members.kill(b)
        members.wait(15.0)
        for vin in VINS[:3]:
            assert ["r"] == in_turn(car(c, vin))
        check_final(members)


def test_a_member_that_does_not_answer_is_named_where_it_may_have_the_vehicle() -> None:
    with cluster() as members:
        a, b = members.nodes
        send(a, [VIN], "r")
        car(b)
        a.cluster.mute.add(b.member)
        a.begin(fanout(a).why(VIN))
        with pytest.raises(UnansweredError, match=r"connected is not known now; no answer from: n2"):
            members.wait(4.0)
        assert "in_flight" == str(b.run(fanout(b).why(VIN)).reason)
