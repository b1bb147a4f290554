"""What an operator sees of dispatchers and workers, and does to them: status, dead letters, lines about throughput."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest

from tests.support.dispatch import (
    PROCESSED,
    PUBLISHED,
    STEADY,
    TELLING,
    Daemon,
    Place,
    PlaceOf,
    numbered,
    numbers,
    texts,
    wait_until,
)
from tests.support.frames import Actor
from tests.support.ports import free_port
from tests.support.redis import RedisServer, valkey_program

# -- status


def test_the_status_of_everything(place_of: PlaceOf) -> None:
    """Leader, epoch, what is left of the lease, each worker, what waits, what is pending, what was given up."""
    place = place_of(window=10, **TELLING)
    with Actor() as silent:
        leader = place.leader(workers=[silent.name])
        place.publish(*numbered(25))
        silent.wait_for(10)
        wait_until(lambda: place.told().get(silent.name, {}).get("in_flight"), "the leader has told about itself")
        status = place.status()
        assert 1 == status["epoch"] == status["view"]["epoch"]
        assert f"{socket.gethostname()}:{leader.pid}" == status["leader"]
        assert 0 < status["lease_left"] <= TELLING["lease"]
        assert (15, 10, 0, 0) == tuple(status[name] for name in ("lag", "pending", "dead", "processed"))
        (worker,) = status["view"]["workers"]
        assert silent.name == worker["worker"]
        assert (10, 0, 0) == (worker["in_flight"], worker["credit"], worker["acknowledged"])
        text = place.done("status")
        assert silent.name in text
        assert re.search(r"epoch +1\b", text), text


def test_the_status_of_nothing(place: Place) -> None:
    """Nobody leads, nothing has ever been published: that is no failure."""
    status = place.status()
    assert ("", None) == (status["leader"], status["view"])
    assert (0, 0, 0, 0, []) == tuple(status[name] for name in ("lag", "pending", "dead", "processed", "registered"))
    assert "nobody" in place.done("status")


def test_the_status_after_work(place_of: PlaceOf) -> None:
    place = place_of(**TELLING)
    worker = place.worker()
    place.leader()
    place.publish(*numbered(30))
    place.wait_processed(30)
    wait_until(lambda: 30 == place.told().get(worker.name, {}).get("acknowledged"), "the acknowledgements are counted")
    status = place.status()
    assert (0, 0, 30, [worker.name]) == tuple(status[name] for name in ("lag", "pending", "processed", "registered"))


# -- dead letters


def test_dead_letters_are_listed_and_tried_again(place_of: PlaceOf) -> None:
    """Once what was wrong is mended: they become new messages, are processed once, and the letters are gone."""
    place = place_of(max_deliveries=2, retry_pause=0.01, **STEADY)
    module = place.folder / "mended.py"
    module.write_text("def handle(message):\n    raise RuntimeError('out of order')\n")
    worker = place.worker("--handler", "mended:handle")
    place.leader()
    place.publish(*numbered(5), b"no json")
    wait_until(lambda: 6 == len(place.dead()), "they are put aside")
    place.wait_idle()

    letters = place.asked("dead", "list")
    assert {*(text.decode() for text in numbered(5)), "no json"} == {letter["payload"] for letter in letters}
    assert {2} == {letter["deliveries"] for letter in letters}
    assert {worker.name} == {letter["worker"] for letter in letters}
    broken = [letter for letter in letters if "RuntimeError: out of order" in letter["reason"]]
    (odd,) = [letter for letter in letters if "JSON" in letter["reason"]]
    assert 5 == len(broken)
    assert "out of order" in place.done("dead", "list")
    assert [letters[1]["entry"]] == [
        one["entry"] for one in place.asked("dead", "list", "-n", "1", "--after", letters[0]["entry"])
    ]

    worker.stop()
    module.write_text("def handle(message):\n    return message\n")
    place.worker("--handler", "mended:handle")
    assert {"retried": 1} == place.asked("dead", "retry", broken[0]["entry"])
    place.wait_processed(1)
    assert 5 == len(place.dead())
    refused = place.command("dead", "retry", broken[0]["entry"])
    assert (1, "") == (refused.returncode, refused.stdout)
    assert broken[0]["entry"] in refused.stderr

    place.done("dead", "retry", "--all")
    place.wait_processed(5)
    assert list(range(5)) == numbers(place)
    wait_until(lambda: 1 == len(place.dead()), "what is no JSON is put aside again")
    assert odd["payload"] == place.asked("dead", "list")[0]["payload"]


# -- lines


def test_messages_per_second_are_told(place_of: PlaceOf) -> None:
    """By leader and worker, every `report` seconds while something moves."""
    place = place_of(report=0.2)
    worker, leader = place.worker(), place.leader()
    place.publish(*numbered(500))
    place.wait_processed(500)

    def told(daemon: Daemon, event: str) -> bool:
        return any(line["messages_per_second"] > 0 for line in daemon.events(event))

    wait_until(lambda: told(worker, "dispatch_worker_rate"), "the worker tells")
    wait_until(lambda: told(leader, "dispatch_rate"), "the leader tells")


@pytest.mark.parametrize("part", ["leader", "worker"])
def test_redis_that_is_not_there_at_the_start(part: str, tmp_path: Any) -> None:
    """Said at once where it should be, and waited for or refused: never a traceback."""
    port = free_port()
    daemon = Daemon([part, "--redis", f"redis://127.0.0.1:{port}?patience=1"], tmp_path).launch()
    try:
        wait_until(lambda: not daemon.running or f"127.0.0.1:{port}" in daemon.log, "it says so")
        assert f"127.0.0.1:{port}" in daemon.log
        assert "Traceback" not in daemon.log, daemon.log
    finally:
        daemon.kill()


def test_redis_that_goes_and_comes_back(place_of: PlaceOf, dispatch_redis: Any) -> None:
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


def test_results_that_redis_does_not_take(place_of: PlaceOf) -> None:
    """They are tried again without haste, and nobody is to blame: nothing is given up when it works again."""
    place = place_of(report=0.1)
    place.redis.set(PROCESSED, "something else")
    worker, leader = place.worker(), place.leader()
    place.publish(*numbered(100))
    worker.wait_event("dispatch_worker_not_written")
    begun = len(leader.events("dispatch_rate"))
    wait_until(lambda: len(leader.events("dispatch_rate")) > begun + 15, "a while has passed")
    assert len(worker.events("dispatch_worker_not_written")) < 100
    place.redis.delete(PROCESSED)
    place.wait_processed(100)
    assert list(range(100)) == numbers(place)
    assert not place.dead()


def test_whatever_somebody_does_to_redis() -> None:
    """The stream, the group, the scripts, everything is gone: leader and worker go on with what is published then."""
    with RedisServer(program=valkey_program()) as valkey, Place(valkey, lease=0.5) as place:
        place.worker()
        place.leader()
        harms = [
            lambda: None,
            lambda: place.redis.delete(PUBLISHED),
            lambda: place.redis.xgroup_destroy(PUBLISHED, "dispatch"),
            place.redis.script_flush,
            place.redis.flushall,
        ]
        for harm in harms:
            harm()
            before = place.count()
            place.publish(*numbered(50))
            place.wait_processed(before + 50)
