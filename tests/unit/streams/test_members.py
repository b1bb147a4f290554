"""Streams of several members on one store, in virtual time: appended, read, declared, moved and trimmed anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.delivery.progress import RANKED, decode
from motorcade.extension.declared import ConflictError
from motorcade.mqtt.packets import Puback, Suback, Subscribe
from motorcade.plugins.logs.streams.options import StreamOptions
from motorcade.plugins.logs.streams.plugin import StreamsPlugin
from motorcade.plugins.logs.streams.reader import COLLECTION as PROGRESS
from motorcade.plugins.logs.streams.reader import key_of
from motorcade.plugins.logs.streams.service import COLLECTION, StreamService
from motorcade.plugins.logs.streams.tails import END, LOOK, READ, UNREAD
from motorcade.storage.ports import Batch
from tests.support.members import MemberNode, Members
from tests.support.virtual import Client, standing
from tests.unit.streams.node import LASTING, offsets, read

PLUGINS: dict[str, Any] = {"streams": {"trim_interval": 1000.0}}
INTERVAL = 1000.0  #: seconds between two looks that nobody has asked for


def streams(node: MemberNode) -> StreamService:
    plugin = next(loaded.plugin for loaded in node.plugins.loaded())
    assert isinstance(plugin, StreamsPlugin)
    return plugin.streams


def counted(node: MemberNode, event: str) -> int:
    return next(loaded.context.counters[event] for loaded in node.plugins.loaded())


def options(**given: Any) -> StreamOptions:
    return msgspec.convert({"topics": ["t/#"]} | given, StreamOptions)


def create(node: MemberNode, name: str = "s", **given: Any) -> Any:
    return node.run(streams(node).create(name, options(**given)))


def names(node: MemberNode) -> list[str]:
    return [view.name for view in node.run(streams(node).list())]


def append(node: MemberNode, *payloads: bytes, stream: str = "s") -> None:
    with node.members.loop.running():
        commit = streams(node).append(stream, [Message("t/a", each, timestamp=node.clock.now) for each in payloads])
    node.turn()
    assert commit.done and commit.error is None


def numbered(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last + 1)]


def items(members: Members, here: MemberNode, there: MemberNode, kind: str) -> int:
    return members.link(here, there).sent.count(kind)


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members(3, plugins=PLUGINS)
    with standing(made.clock):
        create(made.nodes[0])
        yield made


# -- appended here, read there


def test_a_reader_gets_what_is_appended_on_any_member_at_once(members: Members) -> None:
    readers = [node.client(f"car-{node.member}", receive_maximum=50) for node in members.nodes]
    for reader in readers:
        read(reader, offset="earliest")
    expected: list[bytes] = []
    for number in range(30):
        node = members.nodes[number % 3]
        append(node, b"%d" % number)
        expected.append(b"%d" % number)
        for reader in readers:
            found = reader.messages()
            assert expected[-1:] == [bytes(message.payload) for message in found], (number, reader.client_id)
            assert [number + 1] == offsets(found)
            reader.ack(*found)
    assert 0 == sum(counted(node, "found_late") for node in members.nodes)


def test_what_clients_publish_on_any_member_is_in_the_stream_once_and_in_order(members: Members) -> None:
    """Retained, by wills, and relayed to subscribers of other members: the publisher's member alone appends."""
    *_, c = members.nodes
    subscribers = [node.client(f"sub-{node.member}") for node in members.nodes]
    for subscriber in subscribers:
        subscriber.subscribe("t/#")
    for number, node in enumerate(members.nodes):
        for qos in (0, 1, 2):
            assert 0 == node.client(f"pub-{number}").publish("t/x", b"%d:%d" % (number, qos), qos)
    expected = [b"%d:%d" % (number, qos) for number in range(3) for qos in (0, 1, 2)]
    reader = c.client("reader", receive_maximum=50)
    read(reader, offset="earliest")
    assert expected == reader.drain()
    for subscriber in subscribers:
        subscriber.drain()
        assert sorted(expected) == sorted(bytes(message.payload) for message in subscriber.received)


def test_members_without_readers_hear_nothing(members: Members) -> None:
    """An append costs no item but to those that read the stream."""
    a, b, c = members.nodes
    append(a, b"1")
    reader = b.client("car")
    read(reader, offset="earliest")
    append(a, *numbered(2, 5))
    append(a, b"6")
    assert numbered(1, 6) == reader.drain()
    assert (3, 0) == (items(members, a, b, END), items(members, a, c, END))  # one answers the reader
    reader.disconnect()
    append(a, b"7")
    assert (3, 1, 1) == (items(members, a, b, END), items(members, b, a, READ), items(members, b, a, UNREAD))


def test_a_member_that_comes_hears_of_readers_and_they_of_its_appends(members: Members) -> None:
    a, _, _ = members.nodes
    reader = a.client("car")
    read(reader)
    late = members.join()
    assert ["s"] == names(late)
    append(late, b"1")
    assert [b"1"] == reader.drain()
    assert not counted(a, "found_late")


def test_an_append_between_a_reader_and_the_word_of_it_is_not_missed(members: Members) -> None:
    """The appending member hears of the reader after its append: it answers with the end that it knows."""
    a, b, _ = members.nodes
    members.link(b, a).held = True
    reader = b.client("car")
    reader.send(Subscribe(1, (Subscription("$stream/s", 1),)))
    members.wait(0.75)  # the SUBACK waits for A, but not for long
    reader.expect(Suback)
    append(a, b"1")
    assert [] == reader.messages()
    members.link(b, a).let_go()
    assert [b"1"] == reader.drain()
    assert not counted(b, "found_late")


def test_a_hint_that_is_lost_costs_a_second(members: Members) -> None:
    a, b, _ = members.nodes
    reader = b.client("car")
    read(reader)
    members.link(a, b).room_for = 0  # the link is full: hints are dropped
    append(a, b"1")
    assert [] == reader.messages()
    members.wait(LOOK)
    assert [b"1"] == reader.drain()
    assert 1 == counted(b, "found_late")


def test_pages_have_no_hole_where_others_have_appended_between(members: Members) -> None:
    """Own appends go into the page in memory; what lies between them is read."""
    a, b, _ = members.nodes
    reader = a.client("car", receive_maximum=100)
    members.link(b, a).held = True
    read(reader, offset="earliest")
    for number in range(1, 40, 2):
        append(b, b"%d" % number)
        append(a, b"%d" % (number + 1))
    members.link(b, a).let_go()
    members.turn()
    assert numbered(1, 40) == reader.drain()
    assert list(range(1, 41)) == offsets(reader.received)


# -- a reader that moves


@pytest.mark.parametrize("how", [LASTING, {}], ids=["lasting", "clean"])
def test_a_reader_goes_on_elsewhere_after_what_it_has_acknowledged(members: Members, how: dict[str, Any]) -> None:
    """At once, without saying goodbye: nothing is left out, and only what was in flight comes again."""
    a, b, c = members.nodes
    append(a, *numbered(1, 40))
    done = 0
    for step, node in enumerate((a, b, c, b, a, c)):
        car = node.admit("car", receive_maximum=6, **how)
        assert bool(how and step) is car.connack.session_present
        if not car.connack.session_present:
            read(car, offset="" if step else "earliest")
        found = car.messages()
        assert numbered(done + 1, done + 6) == [bytes(message.payload) for message in found], step
        car.ack(*found[:4])
        done += 4
    assert numbered(done + 1, 40) == [bytes(message.payload) for message in found[4:]] + car.drain()[2:]


def test_a_reader_that_sleeps_is_read_again_and_not_remembered(members: Members) -> None:
    """It was elsewhere meanwhile: the member that it comes back to must not go by what it knew."""
    a, b, _ = members.nodes
    append(a, *numbered(1, 9))
    for node, until in ((a, 3), (b, 6), (a, 9)):
        car = node.admit("car", receive_maximum=3, **LASTING)
        if not car.connack.session_present:
            read(car, offset="earliest")
        found = car.messages()
        assert numbered(until - 2, until) == [bytes(message.payload) for message in found]
        car.send(*(Puback(message.packet_id) for message in found))
        car.disconnect()
    assert [{}, {}, {}] == [{p.client: p for p in streams(node).progress.of_log(key_of("s"))} for node in members.nodes]


def test_late_progress_of_the_member_a_reader_has_left_is_no_step_back(members: Members) -> None:
    """And a position that the reader asks for elsewhere holds against it."""
    a, b, c = members.nodes
    append(a, *numbered(1, 9))
    car = a.client("car", receive_maximum=3)
    read(car, offset="earliest")
    stale = stored(members)
    car.drain()
    members.wait(2)
    assert (9, True) == (stored(members)[0], stored(members)[1] == stale[1])
    b.run(put_late(members, stale[2]))
    assert 9 == stored(members)[0]
    moved = b.client("car", receive_maximum=3)
    read(moved, offset="4")
    assert (3, True) == (stored(members)[0], stored(members)[1] > stale[1])
    b.run(put_late(members, stale[2]))
    moved.close()
    again = c.client("car", receive_maximum=9)
    read(again)
    assert numbered(4, 9) == again.drain()


def stored(members: Members, client: str = "car") -> tuple[int, int, bytes]:
    """Number, generation and contents of a record of progress."""
    value = members.store.records_of(PROGRESS)[f"s/{client}"]
    record = decode(value)
    return record.number, record.generation, value


async def put_late(members: Members, value: bytes) -> None:
    """As a member writes it that was stopped for a while."""
    batch = Batch()
    batch.put(PROGRESS, "s/car", value, rank=RANKED)
    await members.store.write(batch)


# -- declared here, there everywhere


def test_a_stream_is_declared_changed_and_deleted_everywhere(members: Members) -> None:
    a, b, c = members.nodes
    create(b, "other", topics=["o/#"], retention=60)
    for node in members.nodes:
        assert ["other", "s"] == names(node)
        assert 0 == node.client("pub").publish("o/x", b"1")
    assert [3, 3, 3] == [node.run(streams(node).show("other")).records for node in members.nodes]
    c.run(streams(c).change("other", options(topics=["p/#"], retention=90)))
    for node in members.nodes:
        assert (("p/#",), 90) == (streams(node).options("other").topics, streams(node).options("other").retention)
        assert 0 == node.client("pub").publish("o/x", b"not taken")
        assert 0 == node.client("pub").publish("p/x", b"2")
    assert 6 == a.run(streams(a).show("other")).records
    a.run(streams(a).delete("other"))
    assert [["s"]] * 3 == [names(node) for node in members.nodes]
    assert ["s"] == list(members.store.records_of(COLLECTION))
    assert "other" not in members.store.inner.streams.streams


def test_a_declaration_that_could_not_be_told_comes_by_its_note(members: Members) -> None:
    _, b, c = members.nodes
    b.cluster.mute.add(c.member)
    work = members.loop.create_task(streams(b).create("other", options(topics=["o/#"])))
    members.turn()
    assert ["other", "s"] == names(c)
    members.wait(5)  # the one that does not answer is waited for that long at most
    assert work.done() and work.result().name == "other"


def test_of_two_members_that_declare_at_once_one_is_refused(members: Members) -> None:
    """And so is one that changes what another has changed, before it has heard of that."""
    a, b, _ = members.nodes

    async def declare(node: MemberNode, retention: int) -> int:
        try:
            await streams(node).create("new", options(retention=retention))
        except ConflictError:
            return 0
        return retention

    tasks = [members.loop.create_task(declare(node, number)) for number, node in enumerate((a, b), 1)]
    members.turn()
    done = [task.result() for task in tasks]
    kept = max(done)
    assert [0, kept] == sorted(done)
    assert [kept] * 3 == [streams(node).options("new").retention for node in members.nodes]


def test_a_deleted_stream_ends_its_readers_and_a_new_one_begins_anew_everywhere(members: Members) -> None:
    a, b, c = members.nodes
    append(a, *numbered(1, 5))
    readers = [node.client(f"car-{node.member}", receive_maximum=2, **LASTING) for node in members.nodes]
    for reader in readers:
        read(reader, offset="earliest")
        assert numbered(1, 2) == reader.payloads()
    b.run(streams(b).delete("s"))
    assert ({}, {}) == (members.store.records_of(COLLECTION), members.store.records_of(PROGRESS))
    assert not members.store.inner.streams.streams
    create(c)
    append(a, b"new")
    members.wait(2)
    for reader in readers:
        got = [bytes(message.payload) for message in reader.messages()]
        reader.ack(*reader.inflight)
        got += reader.drain()
        assert [b"new"] == [payload for payload in got if payload == b"new"], got
        assert not {b"3", b"4", b"5"} & {*got}
    members.wait(2)
    for node in members.nodes:
        assert 1 == node.run(streams(node).show("s")).records


def test_a_stream_that_was_deleted_and_made_again_meanwhile_is_another_one(members: Members) -> None:
    """A member that has heard of neither must not go on where the old one was."""
    a, _, c = members.nodes
    append(a, *numbered(1, 5))
    reader = c.client("car", receive_maximum=2, **LASTING)
    read(reader, offset="earliest")
    old = streams(c).stream("s")
    record = msgspec.msgpack.decode(members.store.records_of(COLLECTION)["s"])
    record[2] += 1
    c.run(members.store.records.put(COLLECTION, "s", msgspec.msgpack.encode(record)))
    assert streams(c).stream("s") is old
    c.cluster.reload(0)
    members.turn()
    new = streams(c).stream("s")
    assert new is not None and new is not old and (old is not None and old.closed)
    members.wait(2)
    assert new.readers, "it reads the new one, from its beginning"


def test_a_deletion_waits_for_a_member_that_is_silent_and_its_appends_do_not_come_back(members: Members) -> None:
    a, b, c = members.nodes
    append(c, b"1")
    a.cluster.mute.add(c.member)
    work = members.loop.create_task(streams(a).delete("s"))
    members.wait(5)
    assert work.done() and work.exception() is None
    assert ["s"] == list(members.store.inner.streams.streams), "its records stay until all have confirmed"
    with pytest.raises(ConflictError, match="being deleted"):
        create(b)
    a.cluster.mute.clear()
    members.wait(10)
    assert not members.store.inner.streams.streams and not members.store.records_of(COLLECTION)
    create(b)
    assert ["s"] == names(c)


def test_a_deletion_is_finished_by_the_steward_if_its_member_dies(members: Members) -> None:
    a, b, c = members.nodes
    append(c, b"1")
    b.cluster.mute.add(c.member)
    work = members.loop.create_task(streams(b).delete("s"))
    members.wait(1)
    assert not work.done()
    members.kill(b)
    work.cancel()
    members.wait(10)
    assert not members.store.inner.streams.streams and not members.store.records_of(COLLECTION)
    create(c)
    assert [["s"], ["s"]] == [names(a), names(c)]


# -- trimmed by one


def test_the_steward_trims_and_after_its_death_the_next_one(members: Members) -> None:
    a, b, c = members.nodes  # the first one that is alive is the steward of all cells
    a.run(streams(a).change("s", options(max_messages=100)))
    append(c, *numbered(1, 100))
    reader = c.client("car", receive_maximum=9)
    read(reader, offset="earliest")
    assert numbered(1, 9) == reader.payloads()
    append(c, *numbered(101, 300))
    members.wait(LOOK)
    assert (200, 0, 0) == (counted(a, "trimmed"), counted(b, "trimmed"), counted(c, "trimmed"))
    assert (201, 300) == ends(members)
    got = reader.drain()
    assert numbered(201, 300) == got[-100:], "readers notice that what they had not read yet is gone"
    members.kill(a)
    append(c, *numbered(301, 420))
    members.wait(LOOK)
    assert (120, 0) == (counted(b, "trimmed"), counted(c, "trimmed"))
    assert (321, 420) == ends(members)


def test_the_steward_trims_by_age_what_others_have_appended() -> None:
    made = Members(3, plugins={"streams": {"trim_interval": 10.0}})
    with standing(made.clock):
        a, b, c = made.nodes
        create(b, retention=60.0)
        append(c, b"1")
        made.wait(50)
        append(b, b"2")
        made.wait(25)
        assert (2, 2) == ends(made)
        assert (1, 0, 0) == (counted(a, "trimmed"), counted(b, "trimmed"), counted(c, "trimmed"))
        made.wait(50)
        assert [0, 0, 0] == [streams(node).stream("s").records for node in made.nodes]  # type: ignore[union-attr]


def ends(members: Members) -> tuple[int, int]:
    records = members.store.inner.streams.streams["s"].records
    return records[0].offset, records[-1].offset


# -- looked at anywhere


def test_every_member_shows_the_same(members: Members) -> None:
    a, b, c = members.nodes
    append(a, *numbered(1, 10))
    readers: list[Client] = []
    for node, done in ((a, 2), (b, 5), (c, 7)):
        reader = node.client(f"car-{node.member}", receive_maximum=9)
        read(reader, offset="earliest")
        found = reader.messages()
        reader.ack(*found[:done])
        reader.messages()
        readers.append(reader)
    shown = [node.run(streams(node).show("s")) for node in members.nodes]
    listed = [node.run(streams(node).list()) for node in members.nodes]
    assert [(10, 3, 8)] * 3 == [(view.records, view.readers, view.lag) for view in shown]
    assert listed[0] == listed[1] == listed[2]
    assert [(10, 3, 8)] == [(view.records, view.readers, view.lag) for view in listed[0]]
    told = [{(r.client, r.node, r.offset, r.lag, r.connected) for r in view.reading} for view in shown]
    assert told[0] == told[1] == told[2]
    assert ("car-n2~2", "n2", 5, 5, True) in told[0]
    found_ = [node.run(streams(node).read("s", 3, 4)) for node in members.nodes]
    assert found_[0] == found_[1] == found_[2] and [4, 5, 6, 7] == [message.position for message in found_[0]]


def test_a_member_that_does_not_answer_is_named(members: Members) -> None:
    a, b, _ = members.nodes
    a.cluster.mute.add(b.member)
    task = members.loop.create_task(streams(a).show("s"))
    members.wait(5)
    assert ["n2"] == list(task.result().unanswered)


def test_latest_means_what_comes_after_the_suback_on_a_member_that_has_not_heard_of_the_rest(members: Members) -> None:
    a, b, _ = members.nodes
    append(a, *numbered(1, 9))
    reader = b.client("car")
    read(reader, offset="latest")
    append(a, b"10")
    assert [b"10"] == reader.drain()
