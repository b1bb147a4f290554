"""Dispatchers and workers as processes: a day in their life, and what they do when somebody is killed.

What leaders and workers do beyond that is tested in one process, where time need not be waited for
(tests/unit/dispatch); many kills of all kinds, counted, are in tests/chaos.
"""

from __future__ import annotations

import json
import re
import socket
import uuid
from collections import Counter
from pathlib import Path

from tests.support.consumers import connected
from tests.support.dispatch import (
    LOCK,
    PROCESSED,
    PUBLISHED,
    STEADY,
    WORKERS,
    Daemon,
    Place,
    PlaceOf,
    numbered,
    numbers,
    texts,
    wait_until,
)
from tests.support.node import NodeProcess
from tests.support.ports import free_port
from tests.support.redis import RedisCluster, RedisServer

LEADING = "dispatch_leading"

#: A user's module: what it does is decided by files in the folder where workers run.
HANDLER = """
import asyncio, pathlib

async def handle(message):
    pathlib.Path(f"begun-{message['n']}").touch()
    while pathlib.Path("wait").exists():
        await asyncio.sleep(0.02)
    if message["n"] % 10 == 3 and not pathlib.Path("mended").exists():
        raise RuntimeError("out of order")
    return message
"""


def registered(place: Place) -> set[str]:
    return {name.decode() for name in place.redis.zrange(WORKERS, 0, -1)}


def worker_with_handler(place: Place) -> Daemon:
    (place.folder / "handler.py").write_text(HANDLER)
    return place.worker("--handler", "handler:handle", parallel=50)


def begun(place: Place) -> int:
    """How many messages handlers have begun to work on."""
    return len(list(place.folder.glob("begun-*")))


def test_a_day_of_dispatcher_and_workers(place_of: PlaceOf) -> None:
    """Two workers share what is published; what fails is put aside, shown, mended and tried again; all is told."""
    place = place_of(max_deliveries=2, retry_pause=0.01, report=0.2, **STEADY | {"lease": 4.0})
    status = place.asked("status")
    assert ("", None, 0, 0, []) == tuple(status[key] for key in ("leader", "view", "lag", "dead", "registered"))
    assert "none" in place.done("status")

    place.publish(*numbered(100))
    workers = [worker_with_handler(place), worker_with_handler(place)]
    leader = place.leader()
    for worker in workers:
        leader.wait_event("dispatch_worker_connected", worker=worker.name)
    assert {worker.name for worker in workers} == registered(place)
    place.publish(*numbered(100, 100), b"no json")
    wait_until(lambda: 21 == len(place.dead()), "what fails is put aside")
    entries = place.wait_processed(180)
    assert [number for number in range(200) if number % 10 != 3] == numbers(place)
    ids = [fields[b"id"].decode() for _, fields in entries]
    assert 180 == len(set(ids)) and all(str(uuid.UUID(one)) == one for one in ids)
    assert {worker.name for worker in workers} == {fields[b"worker"].decode() for _, fields in entries}
    wait_until(lambda: 0 == place.redis.xlen(PUBLISHED), "what is finished is removed")

    # Operators look at it.
    wait_until(lambda: place.asked("status")["view"]["acknowledged"] >= 180, "the leader tells about itself")
    status = place.asked("status")
    assert f"{socket.gethostname()}:{leader.pid}" == status["leader"]
    assert 1 == status["epoch"] == status["view"]["epoch"] and 0 < status["lease_left"] <= 4.0
    assert (0, 0, 21, 180) == tuple(status[key] for key in ("lag", "pending", "dead", "processed"))
    assert {worker.name for worker in workers} == set(status["registered"])
    text = place.done("status")
    assert all(worker.name in text for worker in workers) and re.search(r"epoch +1\b", text), text
    for daemon, event in ((leader, "dispatch_rate"), (workers[0], "dispatch_worker_rate")):
        assert any(line["messages_per_second"] > 0 for line in daemon.events(event)), event

    # Dead letters are mended and tried again.
    letters = place.asked("dead", "list")
    broken = [letter for letter in letters if "RuntimeError: out of order" in letter["reason"]]
    (odd,) = [letter for letter in letters if "JSON" in letter["reason"]]
    assert (20, "no json", {2}) == (len(broken), odd["payload"], {letter["deliveries"] for letter in letters})
    assert "out of order" in place.done("dead", "list")
    assert [letters[1]["entry"]] == [
        one["entry"] for one in place.asked("dead", "list", "-n", "1", "--after", letters[0]["entry"])
    ]
    (place.folder / "mended").touch()
    assert {"retried": 1} == place.asked("dead", "retry", broken[0]["entry"])
    place.wait_processed(181)
    assert broken[0]["entry"] in place.refused("dead", "retry", broken[0]["entry"])
    place.done("dead", "retry", "--all")
    place.wait_processed(200)
    assert list(range(200)) == numbers(place)
    wait_until(lambda: ["no json"] == [one["payload"] for one in place.asked("dead", "list")], "put aside again")


def test_workers_that_are_stopped_hang_or_are_killed(place_of: PlaceOf) -> None:
    """One that is stopped finishes what it has begun; what others had goes to somebody else, and is there once."""
    place = place_of(stop_patience=30.0, **STEADY | {"ack_timeout": 2.0, "max_deliveries": 100})
    leader = place.leader()
    stopped = worker_with_handler(place)
    (place.folder / "wait").touch()
    (place.folder / "mended").touch()
    place.publish(*numbered(10))
    wait_until(lambda: 10 == begun(place), "it has begun")
    (place.folder / "wait").unlink()
    stopped.stop()
    place.wait_processed(10)
    assert not registered(place), "who is stopped leaves"
    killed, paused, other = (worker_with_handler(place) for _ in range(3))
    for worker in (killed, paused, other):
        leader.wait_event("dispatch_worker_connected", worker=worker.name)
    (place.folder / "wait").touch()
    place.publish(*numbered(30, 10))
    wait_until(lambda: 40 == begun(place), "all have begun")
    killed.kill()
    paused.pause()
    (place.folder / "wait").unlink()
    place.wait_processed(40)
    paused.resume()
    place.publish(*numbered(60, 40))
    place.wait_processed(100)
    assert list(range(100)) == numbers(place)
    assert not place.dead()
    wait_until(lambda: killed.name not in registered(place), "who was killed is gone with its lease")


def test_a_leader_that_is_killed_is_replaced(place_of: PlaceOf) -> None:
    """With its messages under their ids, those that were on their way to workers too; nothing is lost or done twice."""
    place = place_of(lease=0.5, ack_timeout=60.0, remember=300.0)
    worker = worker_with_handler(place)
    (place.folder / "wait").touch()
    (place.folder / "mended").touch()
    first = place.leader()
    first.wait_event(LEADING)
    second = place.leader()
    place.publish(*numbered(30))
    wait_until(lambda: begun(place) >= 10, "it has begun")
    first.kill()
    second.wait_event(LEADING)
    place.publish(*numbered(30, 30))
    (place.folder / "wait").unlink()
    place.wait_processed(60)
    assert list(range(60)) == numbers(place)
    assert worker.running
    assert first.events(LEADING)[0]["epoch"] < second.events(LEADING)[0]["epoch"]


def test_redis_that_is_killed_and_comes_back(place_of: PlaceOf, dispatch_redis: RedisServer) -> None:
    """Leader and worker go on when it is there again."""
    place = place_of(lease=0.5)
    place.worker()
    place.leader()
    place.publish(*numbered(20))
    place.wait_processed(20)
    dispatch_redis.kill()
    dispatch_redis.start()
    place.publish(*numbered(20, 20))
    wait_until(lambda: numbers(place)[-20:] == list(range(20, 40)), "work goes on")
    assert len(texts(place)) == len(set(texts(place)))


def test_redis_that_is_not_there_at_the_start(tmp_path: Path) -> None:
    """Said at once where it should be, and waited for or refused: never a traceback."""
    port = free_port()
    daemons = [Daemon([part, "--redis", f"redis://127.0.0.1:{port}?patience=1"], tmp_path) for part in PARTS]
    try:
        for daemon in daemons:
            daemon.launch()
        for daemon in daemons:
            wait_until(lambda: not daemon.running or f"127.0.0.1:{port}" in daemon.log, "it says so")  # noqa: B023
            assert f"127.0.0.1:{port}" in daemon.log and "Traceback" not in daemon.log, daemon.log
    finally:
        for daemon in daemons:
            daemon.kill()


PARTS = ("leader", "worker")


def test_a_cluster_whose_keys_lie_on_different_servers() -> None:
    """The leader is killed, too."""
    with RedisCluster(masters=3, replicas=0) as cluster, Place(cluster, lease=0.5) as place:
        place.publish(*numbered(200))
        place.worker()
        place.worker()
        first, second = place.leader(), place.leader()
        place.wait_processed(200)
        place.publish(*numbered(200, 200))
        leader = first if first.events(LEADING) else second
        leader.kill()
        place.publish(*numbered(200, 400))
        place.wait_processed(600)
        assert list(range(600)) == numbers(place)


def test_from_vehicles_to_workers(place_of: PlaceOf) -> None:
    """Telemetry over MQTT, a capture rule of the broker, the dispatcher, a worker; over a stream and over a channel."""
    places = {intake: place_of(intake=intake, prefix=f"{intake}:", **STEADY) for intake in ("stream", "channel")}
    rules = ""
    for intake, place in places.items():
        place.worker()
        place.leader().wait_event(LEADING)
        rules += f'[plugins.capture.rule.{intake}]\ntopics = ["fleet/+/telemetry"]\nredis = "{place.url}"\n'
        rules += f'to = "redis-{intake}:{intake}:{PUBLISHED}"\n'
    client, channel = places["channel"].redis, f"channel:{PUBLISHED}"
    wait_until(lambda: dict(client.pubsub_numsub(channel))[channel.encode()], "it listens")
    with NodeProcess(config=rules) as node, connected(node) as vehicle:
        for text in numbered(50):
            vehicle.publish("fleet/WVWZZZ1JZXW000001/telemetry", text, 1)
        for intake in places:
            key = f"{intake}:{PROCESSED}"
            wait_until(lambda: 50 == client.xlen(key), f"all are processed over a {intake}")  # noqa: B023
            found = Counter(json.loads(fields[b"payload"])["n"] for _, fields in client.xrange(key))
            assert Counter(range(50)) == found
    assert client.exists(f"stream:{LOCK}", f"channel:{LOCK}") == 2, "each has a leader of its own"
