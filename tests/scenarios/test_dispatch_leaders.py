"""One leads, another takes over, and who has led before can write nothing any more.

The fence is tested by what cannot be argued with: every command that a leader has sent to Redis is listened to, and
sent again after somebody else has begun to lead. Nothing may change by it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import redis

from tests.support.consumers import connected
from tests.support.cutter import Cutter
from tests.support.dispatch import (
    DEAD,
    LOCK,
    PENDING,
    PROCESSED,
    PUBLISHED,
    STEADY,
    Daemon,
    Place,
    PlaceOf,
    numbered,
    numbers,
    wait_until,
)
from tests.support.frames import Actor
from tests.support.node import NodeProcess
from tests.support.redis import RedisServer

LEASE = 0.5
LEADING = "dispatch_leading"


def epochs(leader: Daemon) -> list[int]:
    """Of all its leaderships."""
    return [int(event["epoch"]) for event in leader.events(LEADING)]


def pair(place: Place, **options: Any) -> tuple[Daemon, Daemon]:
    """A dispatcher that leads, and one that waits."""
    first = place.leader(**options)
    first.wait_event(LEADING)
    second = place.leader(**options)
    return first, second


# -- who leads


def test_one_leads_at_a_time(place_of: PlaceOf) -> None:
    place = place_of(lease=3.0)
    first, second = pair(place)
    token = place.redis.get(LOCK)
    assert 0 < place.redis.pttl(LOCK) <= 3000
    renewed, last = 0, 0
    while renewed < 6:  # longer than a lease, which is renewed four times in its length
        left = place.redis.pttl(LOCK)
        renewed += left > last
        last = left
        assert token == place.redis.get(LOCK)
    assert [1] == epochs(first) and [] == epochs(second)


def test_a_leader_that_is_stopped_makes_room_at_once(place_of: PlaceOf) -> None:
    """It releases its lease, long before that would end."""
    place = place_of(lease=25.0)
    place.worker()
    first, second = pair(place)
    place.publish(*numbered(50))
    place.wait_processed(50)
    first.stop()
    second.wait_event(LEADING)
    assert [1] == epochs(first) and [2] == epochs(second)
    place.publish(*numbered(50, 50))
    place.wait_processed(100)


def test_a_leader_that_is_killed_is_replaced(place_of: PlaceOf) -> None:
    """With its messages under their ids, those that were on their way to workers too; nothing is lost or done twice."""
    place = place_of(lease=LEASE)
    with Actor() as silent:
        first, second = pair(place, workers=[silent.name])
        place.publish(*numbered(30))
        given = {one.id for one in silent.wait_for(30)}
        first.kill()
        second.wait_event(LEADING)
        place.publish(*numbered(30, 30))
        place.worker()
        silent.stop()
        entries = place.wait_processed(60)
    assert list(range(60)) == numbers(place)
    assert given <= {fields[b"id"].decode() for _, fields in entries}


def test_work_goes_on_while_leaders_die(place_of: PlaceOf) -> None:
    """One after the other, under load."""
    place = place_of(lease=LEASE)
    place.worker()
    place.worker()
    sent = 0
    for _ in range(3):
        leader = place.leader()
        leader.wait_event(LEADING)
        for _ in range(10):
            place.publish(*numbered(200, sent))
            sent += 200
        leader.kill()
    place.leader()
    place.wait_processed(sent)
    assert list(range(sent)) == numbers(place)


def test_a_leader_that_hung_for_three_leases(place_of: PlaceOf) -> None:
    """It finds out that it does not lead any more, stands back, and may lead again later."""
    place = place_of(lease=LEASE)
    place.worker()
    first, second = pair(place)
    place.publish(*numbered(100))
    first.pause()
    second.wait_event(LEADING)
    place.publish(*numbered(100, 100))
    place.wait_processed(200)
    with held(first, 2 * LEASE):
        place.publish(*numbered(100, 200))
    first.wait_event("dispatch_led")
    place.wait_processed(300)
    assert list(range(300)) == numbers(place)
    assert epochs(second)[0] > epochs(first)[0]
    second.kill()
    wait_until(lambda: epochs(first)[-1] > epochs(second)[-1], "it leads again")
    place.publish(*numbered(10, 300))
    place.wait_processed(310)


@contextmanager
def held(daemon: Daemon, seconds: float) -> Iterator[None]:
    """A paused process goes on after so many seconds at the earliest."""
    waiting = threading.Event()
    yield
    waiting.wait(seconds)
    daemon.resume()


def test_a_lock_that_somebody_has_taken_away(place_of: PlaceOf) -> None:
    """Whoever overwrites the key is respected: the leader stands back, and leads again when it is free."""
    place = place_of(lease=LEASE)
    leader = place.leader()
    leader.wait_event(LEADING)
    place.redis.set(LOCK, "somebody else", px=2000)
    leader.wait_event("dispatch_led")
    wait_until(lambda: 2 <= len(epochs(leader)), "it leads again")
    first, second, *_ = epochs(leader)
    assert second > first


# -- the fence


class Listener:
    """Everything that is said to a server, from MONITOR."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.commands: list[list[bytes]] = []
        # Without a timeout, which is 5 s if nobody says so: a leader may take longer to begin.
        self._connection = redis.Redis(server.host, server.port, socket_timeout=None).connection_pool.get_connection()
        self._connection.send_command("MONITOR")
        self._connection.read_response()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        try:
            while True:
                self.commands.append(spoken(self._connection.read_response(disable_decoding=True)))
        except (redis.RedisError, OSError, ValueError, AttributeError):
            return

    def close(self) -> None:
        self._connection.disconnect()
        self._thread.join(60)


def spoken(line: bytes) -> list[bytes]:
    """The words of a command as MONITOR shows it; what a script has called is left out."""
    head, _, words = line.partition(b"] ")
    if head.endswith(b"lua"):
        return []
    found = []
    for text in re.findall(rb'"((?:[^"\\]|\\.)*)"', words):
        escaped = text.decode("latin-1")
        found.append(
            re.sub(
                r"\\(x[0-9a-f]{2}|.)",
                lambda match: chr(int(match[1][1:], 16)) if len(match[1]) == 3 else PLAIN.get(match[1], match[1]),
                escaped,
            ).encode("latin-1")
        )
    return found


PLAIN = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b"}
READS = {b"PING", b"XREADGROUP", b"XLEN", b"GET", b"TIME", b"INFO", b"HELLO", b"CLIENT", b"SCRIPT", b"WAIT", b"AUTH"}


def state(server: RedisServer) -> dict[str, Any]:
    """Everything a leader may write, but for what says how time goes by."""
    client = server.client
    published = [client.xpending(PUBLISHED, "dispatch"), client.xrange(PUBLISHED)]
    return {
        "pending": client.zrange(PENDING, 0, -1, withscores=True),
        "deliveries": client.hgetall(f"{{{PENDING}}}:deliveries"),
        "published": published,
        "dead": client.xrange(DEAD),
        "processed": client.xrange(PROCESSED),
        "epoch": client.get(f"{{{LOCK}}}:epoch"),
        "lock": client.get(LOCK),
        "fences": {key: client.get(key) for key in client.keys("*:fence")},
    }


def test_nothing_that_an_old_leader_has_said_can_be_said_again(place_of: PlaceOf, dispatch_redis: RedisServer) -> None:
    """Renewals, pending entries, acknowledgements, dead letters: with its epoch they are refused for ever."""
    place = place_of(lease=LEASE, ack_timeout=60.0, remember=300.0, max_deliveries=2, retry_pause=0.01)
    listener = Listener(dispatch_redis)
    worker = place.worker()
    first = place.leader()
    first.wait_event(LEADING)
    place.publish(*numbered(50), b"no json")
    place.wait_processed(50)
    wait_until(place.dead, "one is put aside")
    first.kill()
    listener.close()
    worker.stop()
    with Actor() as silent:
        # Its lease outlasts the pause below: a lock that is free may be taken by anybody.
        second = place.leader(workers=[silent.name], lease=100.0)
        second.wait_event(LEADING)
        place.publish(*numbered(10, 50))
        silent.wait_for(10)
        second.pause()  # so that whatever changes now is somebody else's doing
        try:
            before = state(dispatch_redis)
            assert 10 == len(before["pending"]) and before["fences"]
            scripts = refused = 0
            for words in listener.commands:
                if not words or words[0].upper() in READS or words[0].upper() not in {b"EVALSHA", b"EVAL", b"FCALL"}:
                    continue
                scripts += 1
                try:
                    place.redis.execute_command(*words)
                except redis.ResponseError:
                    refused += 1
                after = state(dispatch_redis)
                if b"processed" in b" ".join(words):
                    continue  # a worker's own: it has no epoch, and its id was written already
                assert before == after, words[:6]
            assert scripts > 10
            assert before["processed"] == state(dispatch_redis)["processed"]
        finally:
            second.resume()


# -- answers that get lost


@pytest.mark.parametrize("intake", ["stream", "channel"])
def test_what_is_asked_again_because_an_answer_was_lost(
    place_of: PlaceOf, dispatch_redis: RedisServer, intake: str
) -> None:
    """Redis has done it, and leader and worker never heard of it: everything is still there once."""
    with Cutter(dispatch_redis.port, chance=0.05, seed=4) as way:
        place = place_of(intake=intake, redis=f"redis://127.0.0.1:{way.port}", lease=LEASE)
        worker, leader = place.worker(), place.leader()
        listens(place, intake)
        sent = 0
        while way.cuts < 40:
            sent += 20
            for text in numbered(20, sent - 20):
                if intake == "stream":
                    place.publish(text)
                else:
                    place.redis.publish(PUBLISHED, text)
            if intake == "stream":
                wait_until(partial(at_least, place, sent // 2), "work goes on")
        way.chance = 0.0
        place.wait_idle()
        if intake == "stream":
            place.wait_processed(sent)
        leader.stop()
        worker.stop()
    found = numbers(place)
    assert len(set(found)) == len(found), "nothing is there twice"
    assert not place.dead()


def at_least(place: Place, count: int) -> bool:
    return place.count() >= count


def listens(place: Place, intake: str) -> None:
    """Wait until a leader would hear what is published."""
    if intake == "channel":
        wait_until(lambda: dict(place.redis.pubsub_numsub(PUBLISHED))[PUBLISHED.encode()], "it listens")


# -- messages over a channel


def test_messages_over_a_channel(place_of: PlaceOf) -> None:
    """As the seed has it: from receipt on, nothing is lost; what nobody hears is."""
    place = place_of(intake="channel", **STEADY)  # what is said while nobody leads would not be heard
    place.redis.publish(PUBLISHED, b'{"n": 1000}')  # nobody listens yet
    leader = place.leader()
    leader.wait_event(LEADING)
    listens(place, "channel")
    for text in numbered(100):
        place.redis.publish(PUBLISHED, text)
    wait_until(lambda: 100 == place.redis.xlen("messages:received"), "it has received them")
    leader.kill()
    place.redis.delete(LOCK)  # as if its lease were over
    place.worker()
    place.leader()
    place.wait_processed(100)
    assert list(range(100)) == numbers(place)
    wait_until(lambda: 0 == place.redis.xlen("messages:received"), "what is finished is removed")


@pytest.mark.parametrize("intake", ["stream", "channel"])
def test_from_vehicles_to_workers(place_of: PlaceOf, intake: str) -> None:
    """Telemetry over MQTT, a capture rule of the broker, the dispatcher, a worker."""
    place = place_of(intake=intake, **STEADY)
    place.worker()
    leader = place.leader()
    leader.wait_event(LEADING)
    listens(place, intake)
    to = "redis-stream" if intake == "stream" else "redis-channel"
    config = f"""
[plugins.capture.rule.telemetry]
topics = ["fleet/+/telemetry"]
to = "{to}:{PUBLISHED}"
redis = "{place.url}"
"""
    with NodeProcess(config=config) as node, connected(node) as vehicle:
        for text in numbered(50):
            vehicle.publish("fleet/WVWZZZ1JZXW000001/telemetry", text, 1)
        place.wait_processed(50)
    assert list(range(50)) == numbers(place)
