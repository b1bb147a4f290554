"""Dispatcher and workers: what goes in comes out once, and everybody speaks the frames of the description.

Real leaders, workers and Redis servers; where a test plays one side itself, it does so over a socket, with frames that
are written from the description alone (tests/support/frames.py).
"""

from __future__ import annotations

import json
import socket
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial

import pytest

from tests.support import frames
from tests.support.dispatch import (
    PENDING,
    PROCESSED,
    PUBLISHED,
    STEADY,
    Daemon,
    Place,
    PlaceOf,
    numbered,
    numbers,
    texts,
    wait_until,
)
from tests.support.frames import Actor, acknowledge
from tests.support.redis import RedisCluster, RedisServer

# -- from one stream to the other


def test_every_message_is_processed_once(place: Place) -> None:
    """Published before and after the leader comes; two workers share them; only the results are left."""
    place.publish(*numbered(300))
    workers = [place.worker(), place.worker()]
    leader = place.leader()
    for worker in workers:
        leader.wait_event("dispatch_worker_connected", worker=worker.name)
    place.publish(*numbered(300, 300))
    entries = place.wait_processed(600)
    assert list(range(600)) == numbers(place)
    ids = [fields[b"id"].decode() for _, fields in entries]
    assert 600 == len(set(ids))
    assert all(str(uuid.UUID(one)) == one for one in ids)
    shares = Counter(fields[b"worker"].decode() for _, fields in entries)
    assert {worker.name for worker in workers} == set(shares)
    assert not place.dead()
    wait_until(lambda: 0 == place.redis.xlen(PUBLISHED), "what is finished is removed")


def test_published_entries_may_be_left_for_other_readers(place_of: PlaceOf) -> None:
    place = place_of(keep_published=True)
    place.worker()
    place.leader()
    place.publish(*numbered(50))
    place.wait_processed(50)
    assert 50 == place.redis.xlen(PUBLISHED)


def test_two_identical_messages_are_two_messages(place: Place) -> None:
    """And the `message_id` within them has no meaning."""
    text = b'{"message_id": "8e1ff7f6-8d0c-4a54-8f4b-0a3f8e0d3c55"}'
    assert 54 == len(text)
    place.worker()
    place.leader()
    place.publish(*[text] * 20)
    entries = place.wait_processed(20)
    assert [text] * 20 == texts(place)
    assert 20 == len({fields[b"id"] for _, fields in entries})
    assert all(b"8e1ff7f6" not in fields[b"id"] for _, fields in entries)


def test_a_cluster(place_of: PlaceOf) -> None:
    """The keys of the dispatcher lie on different servers."""
    with RedisCluster(masters=3, replicas=0) as cluster, Place(cluster, lease=0.5) as place:
        place.publish(*numbered(200))
        place.worker()
        place.worker()
        first, second = place.leader(), place.leader()
        place.wait_processed(200)
        place.publish(*numbered(200, 200))
        leader = first if first.events("dispatch_leading") else second
        leader.kill()
        place.publish(*numbered(200, 400))
        place.wait_processed(600)
        assert list(range(600)) == numbers(place)


def test_which_field_is_the_message(place: Place) -> None:
    """`payload`, `message` or `data`; the only field; else all fields as one object."""
    fields: list[dict[str, bytes]] = [
        {"payload": b'{"a": 1}', "topic": b"t", "guid": b"g"},
        {"message": b'{"a": 2}'},
        {"data": b'{"a": 3}', "other": b"x"},
        {"whatever": b'{"a": 4}'},
        {"a": b"5", "b": b"6"},
    ]
    for entry in fields:
        place.redis.xadd(PUBLISHED, entry)
    place.worker()
    place.leader()
    place.wait_processed(5)
    assert [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 4}, {"a": "5", "b": "6"}] == [json.loads(text) for text in texts(place)]


def test_other_names(place_of: PlaceOf) -> None:
    """Two dispatchers with a prefix of their own know nothing of each other."""
    mine, theirs = place_of(prefix="mine:"), place_of(prefix="theirs:")
    for one in (mine, theirs):
        one.worker()
        one.leader()
    mine.redis.xadd("mine:" + PUBLISHED, {"payload": b'{"n": 1}'})
    wait_until(lambda: mine.redis.xlen("mine:" + PROCESSED), "it is processed")
    assert not mine.redis.exists("theirs:" + PROCESSED, PROCESSED)


# -- the leader, seen by a worker


def test_the_frame_of_a_message(place: Place) -> None:
    """Version 1, command 0, a length in network order, UUID, colon and the message; nothing else."""
    raw = bytearray()
    text = b'{"message_id": "8e1ff7f6-8d0c-4a54-8f4b-0a3f8e0d3c55"}'
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        place.leader(workers=[f"127.0.0.1:{listener.getsockname()[1]}"])
        place.publish(text)
        with closing(listener.accept()[0]) as connection:
            connection.settimeout(30)
            while len(raw) < 6 + 36 + 1 + 54:
                data = connection.recv(4096)
                assert data, f"closed after {bytes(raw)!r}"
                raw += data
            assert bytes([1, 0, 0, 0, 0, 91]) == raw[:6]
            identifier = raw[6:42].decode()
            assert str(uuid.UUID(identifier)) == identifier
            assert b":" + text == raw[42:]
            connection.sendall(bytes([1, 1, 0, 0, 0, 36]) + identifier.encode())
            place.wait_idle()


def test_a_message_is_pending_before_it_is_sent(place: Place) -> None:
    """Its id in the sorted set, with the time."""
    with Actor() as worker:
        place.leader(workers=[worker.name])
        place.publish(*numbered(3))
        for got in worker.wait_for(3):
            score = place.redis.zscore(PENDING, got.id)
            seconds, _ = place.redis.time()
            assert score is not None
            assert abs(score / 1000 - seconds) < 60
        worker.stop()


def test_messages_go_round(place_of: PlaceOf) -> None:
    """Three workers that have room get equal parts, however the messages come in."""
    place = place_of(**STEADY)
    with Actor() as one, Actor() as two, Actor() as three:
        actors = (one, two, three)
        leader = place.leader(workers=[actor.name for actor in actors])
        for actor in actors:
            leader.wait_event("dispatch_worker_connected", worker=actor.name)
        for first, end in ((0, 1), (1, 5), (5, 36)):
            place.publish(*numbered(end - first, first))
            wait_until(partial(_have, actors, end), "all are sent")
        assert [12, 12, 12] == [len(actor.got) for actor in actors]
        leader.kill()


def _have(actors: Iterable[Actor], count: int) -> bool:
    return count == sum(len(actor.got) for actor in actors)


def test_the_leader_does_not_look_into_messages(place: Place) -> None:
    """What is no JSON reaches a worker as it is; parsing is the workers' work."""
    odd = [b"no json", b"", b"\x00\xff\x00:", b'{"a": 1']
    with Actor(acknowledge) as worker:
        place.leader(workers=[worker.name])
        place.publish(*odd)
        worker.wait_for(4)
        assert odd == [one.text for one in worker.got]
        place.wait_idle()


def test_acknowledgements_come_as_they_come(place: Place) -> None:
    """Byte by byte, and many in one piece."""

    def slowly(connection: socket.socket, works: list[frames.Work]) -> None:
        data = b"".join(frames.ack(one.id) for one in works)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for position in range(min(len(data), 100)):
            connection.send(data[position : position + 1])
        connection.sendall(data[100:])

    with Actor(slowly) as worker:
        place.leader(workers=[worker.name])
        place.publish(*numbered(40))
        worker.wait_for(40)
        place.wait_idle()
        assert 40 == len(set(worker.ids)) == len(worker.ids)


def test_no_answer_in_time(place_of: PlaceOf) -> None:
    """Another worker gets it, under the same id; whoever is late is thanked all the same."""
    place = place_of(ack_timeout=0.5)
    with Actor() as silent:
        place.leader(workers=[silent.name])
        place.publish(*numbered(5))
        silent.wait_for(5)
        worker = place.worker()
        entries = place.wait_processed(5)
        assert set(silent.ids) == {fields[b"id"].decode() for _, fields in entries}
        assert {worker.name.encode()} == {fields[b"worker"] for _, fields in entries}


def test_a_worker_has_as_much_as_its_window(place_of: PlaceOf) -> None:
    """What exceeds it waits in Redis, not in the leader."""
    place = place_of(window=10, **STEADY)
    with Actor() as slow:
        place.leader(workers=[slow.name])
        place.publish(*numbered(100))
        slow.wait_for(10)
        status = place.status()
        assert 10 == len(slow.got)
        assert (90, 10) == (status["lag"], status["pending"]), status
        # Nine answers are room for nine more.
        for connection in list(slow._sockets):
            acknowledge(connection, slow.got[:9])
        slow.wait_for(19)
        assert 19 == len(set(slow.ids))


# -- a worker, seen by the leader


class Leader:
    """A leader played by a test."""

    def __init__(self, worker: Daemon) -> None:
        host, port = worker.name.split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = bytearray()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def acks(self, count: int) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            data = self.socket.recv(65536)
            assert data, f"closed after {len(found)} acknowledgements"
            self.buffer += data
            for command, payload in frames.split(self.buffer):
                assert frames.ACK == command
                found.append(payload.decode())
        return found

    def closed(self) -> bool:
        """Whether the worker ends the connection; what it says before does not matter."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return True

    def close(self) -> None:
        self.socket.close()


def new_id() -> str:
    return str(uuid.uuid4())


@pytest.fixture(scope="module")
def standing(dispatch_redis: RedisServer) -> Iterator[tuple[Place, Daemon]]:
    """A worker for all tests of this part, and the place where it writes."""
    with Place(dispatch_redis, prefix="standing:") as place:
        yield place, place.worker()


def written(place: Place, *identifiers: str) -> list[bytes]:
    """What the standing worker has written under these ids, oldest first."""
    entries = place.redis.xrange("standing:" + PROCESSED)
    return [fields[b"payload"] for _, fields in entries if fields[b"id"].decode() in identifiers]


def test_a_worker_acknowledges_what_is_written(standing: tuple[Place, Daemon]) -> None:
    place, worker = standing
    with closing(Leader(worker)) as leader:
        identifier = new_id()
        leader.send(frames.process(identifier, b'{"n": 7}'))
        assert [identifier] == leader.acks(1)
        assert [b'{"n": 7}'] == written(place, identifier)


def test_frames_in_pieces_and_in_one(standing: tuple[Place, Daemon]) -> None:
    place, worker = standing
    with closing(Leader(worker)) as leader:
        split, merged = new_id(), [new_id() for _ in range(500)]
        for byte in frames.process(split, b'{"n": 1}'):
            leader.send(bytes([byte]))
        leader.send(b"".join(frames.process(one, b'{"n": 2}') for one in merged))
        assert {split, *merged} == set(leader.acks(501))
        assert 501 == len(written(place, split, *merged))


def test_one_id_is_one_entry(standing: tuple[Place, Daemon]) -> None:
    """Sent twice to one worker and once to another, as after a time-out: everybody is acknowledged."""
    place, one = standing
    two = place.worker()
    with closing(Leader(one)) as first, closing(Leader(two)) as second:
        identifier = new_id()
        first.send(frames.process(identifier, b"{}") * 2)
        assert [identifier] * 2 == first.acks(2)
        second.send(frames.process(identifier, b"{}"))
        assert [identifier] == second.acks(1)
        assert [b"{}"] == written(place, identifier)


@pytest.mark.parametrize(
    "broken",
    [
        frames.frame(0, b"x", version=2),
        frames.frame(9, b"x"),
        frames.HEAD.pack(1, 0, 2**31),
        frames.frame(0, b"no identifier at all, however long it is"),
        frames.frame(0, new_id().encode() + b";{}"),
    ],
    ids=["version", "command", "length", "identifier", "separator"],
)
def test_a_worker_ends_a_conversation_that_it_does_not_understand(
    standing: tuple[Place, Daemon], broken: bytes
) -> None:
    """It says why in its log, and serves others as before."""
    _, worker = standing
    before = len(worker.events("dispatch_leader_cut_off"))
    with closing(Leader(worker)) as good, closing(Leader(worker)) as bad:
        bad.send(broken)
        assert bad.closed()
        identifier = new_id()
        good.send(frames.process(identifier, b"{}"))
        assert [identifier] == good.acks(1)
    wait_until(lambda: len(worker.events("dispatch_leader_cut_off")) > before, "it says why")


def test_several_leaders_at_once(standing: tuple[Place, Daemon]) -> None:
    """An old one and a new one: each gets the answers to what it has sent."""
    place, worker = standing
    with closing(Leader(worker)) as old, closing(Leader(worker)) as new:
        ids = {leader: [new_id() for _ in range(50)] for leader in (old, new)}
        for leader, own in ids.items():
            leader.send(b"".join(frames.process(one, b"{}") for one in own))
        for leader, own in ids.items():
            assert set(own) == set(leader.acks(50))
        assert 100 == len(written(place, *ids[old], *ids[new]))
