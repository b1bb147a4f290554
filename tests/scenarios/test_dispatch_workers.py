"""Workers that come, go, die, hang, lie, flood or talk nonsense: their work is done by others, once.

Where work has to be taken over at once, `ack_timeout` is so long that waiting for it would fail the test.
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
import uuid
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from tests.support import frames
from tests.support.dispatch import STEADY, TELLING, WORKERS, Place, PlaceOf, numbered, numbers, texts, wait_until
from tests.support.frames import Actor, Work, acknowledge
from tests.support.ports import free_port


def registered(place: Place) -> set[str]:
    return {name.decode() for name in place.redis.zrange(WORKERS, 0, -1)}


# -- who is there


def test_workers_register_and_leave(place_of: PlaceOf) -> None:
    """Those that are stopped go at once, those that are killed with their lease."""
    place = place_of(lease=0.5)
    place.leader()
    one, two = place.worker(), place.worker()
    wait_until(lambda: registered(place) == {one.name, two.name}, "both are listed")
    one.stop()
    wait_until(lambda: registered(place) == {two.name}, "the one that stopped is gone")
    two.kill()
    wait_until(lambda: not registered(place), "the one that was killed is gone")


def test_a_worker_that_comes_later_gets_work(place: Place) -> None:
    """Nobody told the leader but the registry."""
    with Actor(port=free_port()) as silent:
        leader = place.leader(workers=[silent.name])
        place.publish(*numbered(1))
        silent.wait_for(1)
        worker = place.worker()
        leader.wait_event("dispatch_worker_connected", worker=worker.name)
        place.publish(*numbered(20, 1))
        wait_until(lambda: place.count() > 5, f"{worker.name} works")


def test_a_worker_from_the_file_is_found_again_and_again(place: Place) -> None:
    """It need not register; the leader lists it while it lives."""
    port = free_port()
    worker = place.worker(port=port, register=False)
    place.leader(workers=[worker.name])
    place.publish(*numbered(10))
    place.wait_processed(10)
    wait_until(lambda: registered(place) == {worker.name}, "the leader lists it, since it lives")
    worker.kill()
    place.publish(*numbered(10, 10))
    place.worker(port=port, register=False)
    place.wait_processed(20)
    assert list(range(20)) == numbers(place)


def test_messages_wait_while_nobody_works(place: Place) -> None:
    """In Redis, not in the leader, which tells how many there are."""
    leader = place.leader()
    memory = Path(f"/proc/{leader.pid}/statm")
    leader.wait_event("dispatch_leading")
    before = int(memory.read_text().split()[1])
    text = b'{"n": 0, "fill": "%s"}' % (b"x" * 1000)
    for _ in range(20):
        place.publish(*[text] * 1000)
    status = place.status()
    assert (20_000, 0) == (status["lag"], status["pending"]), status
    grown = (int(memory.read_text().split()[1]) - before) * 4096
    assert grown < 10 * 1024 * 1024, f"{grown} octets for 20 messages of a megabyte each"
    place.worker()
    place.wait_processed(20_000)


# -- who is cut off


def lie(connection: socket.socket, works: list[Work]) -> None:
    connection.sendall(b"".join(frames.ack(str(uuid.uuid4())) for _ in range(50)))


def flood(connection: socket.socket, works: list[Work]) -> None:
    """Acknowledges something for ever. (One of its messages would be believed, the first time.)"""
    again = frames.ack(str(uuid.uuid4())) * 1000
    for _ in range(1000):
        connection.sendall(again)


def talk_nonsense(connection: socket.socket, works: list[Work]) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def speak_version_2(connection: socket.socket, works: list[Work]) -> None:
    connection.sendall(frames.frame(frames.ACK, works[0].id.encode(), version=2))


def command_nothing_known(connection: socket.socket, works: list[Work]) -> None:
    connection.sendall(frames.frame(77, works[0].id.encode()))


def announce_too_much(connection: socket.socket, works: list[Work]) -> None:
    connection.sendall(frames.HEAD.pack(1, frames.ACK, 2**32 - 1))


def acknowledge_something_else(connection: socket.socket, works: list[Work]) -> None:
    connection.sendall(frames.frame(frames.ACK, b"z" * 36))


def hang_up(connection: socket.socket, works: list[Work]) -> None:
    connection.close()


BAD = {
    lie: "unknown_id",
    flood: "unknown_id",
    acknowledge_something_else: "unknown_id",
    talk_nonsense: "bad_frame",
    speak_version_2: "bad_frame",
    command_nothing_known: "bad_frame",
    announce_too_much: "bad_frame",
}


def test_who_breaks_the_rules_is_cut_off(place_of: PlaceOf) -> None:
    """Each at once, with a reason that is counted; the work goes to the only good one, and nothing is done twice."""
    place = place_of(max_deliveries=1000, **TELLING)
    with ExitStack() as stack:
        bad = {stack.enter_context(Actor(behaviour)): fault for behaviour, fault in BAD.items()}
        leader = place.leader(workers=[actor.name for actor in bad])
        place.publish(*numbered(200))
        for actor, fault in bad.items():
            leader.wait_event("dispatch_worker_cut_off", worker=actor.name, fault=fault)
        wait_until(lambda: all(actor.closed for actor in bad), "the leader hangs up")
        place.worker()
        place.wait_processed(200)
        assert list(range(200)) == numbers(place)
        wait_until(lambda: tells_of(place, bad), "the leader tells of it")


def tells_of(place: Place, bad: dict[Actor, str]) -> bool:
    """Whether the leader has told of everybody's fault."""
    told = place.told()
    return all(fault in told.get(actor.name, {}).get("faults", ()) for actor, fault in bad.items())


def test_what_a_bad_worker_spoils_is_not_the_fault_of_the_messages(place_of: PlaceOf) -> None:
    """Nobody else is there for a while: they wait for somebody, and are not given up."""
    place = place_of(max_deliveries=3, **STEADY)
    with Actor(hang_up) as bad:
        place.leader(workers=[bad.name])
        place.publish(*numbered(30))
        bad.wait(lambda: bad.closed >= 5, "it has hung up more often than that")
        place.worker()
        place.wait_processed(30)
    assert not place.dead()


def test_the_message_that_kills_workers_is_found(place_of: PlaceOf) -> None:
    """It is given up; those that were with it are not."""
    place = place_of(max_deliveries=3, **STEADY)

    def die_of_poison(connection: socket.socket, works: list[Work]) -> None:
        if any(one.text == b"poison" for one in works):
            connection.close()
        else:
            acknowledge(connection, works)

    with Actor(die_of_poison) as one, Actor(die_of_poison) as two:
        place.leader(workers=[one.name, two.name])
        place.publish(*numbered(20), b"poison", *numbered(20, 20))
        wait_until(place.dead, "one is given up")
        place.wait_idle()
        assert [b"poison"] == [fields[b"payload"] for _, fields in place.dead()]


def test_who_was_cut_off_is_left_alone_for_longer_each_time(place_of: PlaceOf) -> None:
    place = place_of(cut_off=0.1, max_deliveries=1000, **STEADY)
    at: list[float] = []

    def nonsense(connection: socket.socket, works: list[Work]) -> None:
        at.append(time.monotonic())
        talk_nonsense(connection, works)

    with Actor(nonsense) as bad:
        place.leader(workers=[bad.name])
        place.publish(*numbered(1))
        wait_until(lambda: len(at) >= 5, "it is tried again")
        gaps = [after - before for before, after in itertools.pairwise(at)]
        # A busy machine makes them longer, never shorter.
        assert all(gap >= 0.1 * 2**number for number, gap in enumerate(gaps[:4])), gaps


def test_who_does_not_read_is_cut_off(place_of: PlaceOf) -> None:
    """A worker that hangs with a full socket does not hold up the leader."""
    place = place_of(ack_timeout=0.5, window=10_000, window_bytes=50_000_000)
    with Actor(reads=False) as stuck:
        place.leader(workers=[stuck.name])
        text = b'{"n": 1, "fill": "%s"}' % (b"x" * 100_000)
        place.publish(*[text] * 60)
        stuck.wait(lambda: stuck.connections > 0, "the leader has come")
        place.worker()
        place.wait_processed(60)


def test_a_worker_that_is_stopped_by_its_machine(place_of: PlaceOf) -> None:
    """SIGSTOP: another one does its work; when it goes on, nothing is written twice."""
    place = place_of(ack_timeout=0.5)
    one, two = place.worker(), place.worker()
    place.leader()
    place.publish(*numbered(20))
    place.wait_processed(20)
    one.pause()
    place.publish(*numbered(100, 20))
    place.wait_processed(120)
    one.resume()
    place.publish(*numbered(100, 120))
    place.wait_processed(220)
    assert list(range(220)) == numbers(place)
    assert two.running


def test_a_worker_that_is_killed_at_work(place_of: PlaceOf) -> None:
    """Its messages go to the other one at once, and each is there once."""
    place = place_of(**STEADY)
    one, _ = place.worker(), place.worker()
    place.leader()
    stop = threading.Event()
    sent = Counter[str]()

    def publish() -> None:
        while not stop.is_set():
            place.publish(*numbered(50, sent["n"]))
            sent["n"] += 50

    feeding = threading.Thread(target=publish)
    feeding.start()
    try:
        wait_until(lambda: place.count() > 500, "work is under way")
        one.kill()
        goal = place.count() + 1000
        wait_until(lambda: place.count() > goal, "work goes on")
    finally:
        stop.set()
        feeding.join()
    place.wait_processed(sent["n"])
    assert list(range(sent["n"])) == numbers(place)


# -- what a worker does with a message


def handler(place: Place, text: str) -> str:
    """A module of the user, in the folder where the worker is started."""
    name = f"handler_{uuid.uuid4().hex}"
    (place.folder / f"{name}.py").write_text(text)
    return f"{name}:handle"


def test_an_asynchronous_handler_works_on_several_at_a_time(place: Place) -> None:
    """As many as `parallel` says."""
    text = """
import asyncio
running = most = 0

async def handle(message):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.05)
    running -= 1
    return {"n": message["n"], "most": most}
"""
    place.worker("--handler", handler(place, text), parallel=4)
    place.leader()
    place.publish(*numbered(40))
    place.wait_processed(40)
    assert b'"most":4' in texts(place)[-1].replace(b" ", b"")


def test_a_handler_that_fails_now_and_then(place: Place) -> None:
    """It gets the parsed message, again and again until it succeeds; what it returns then is written."""
    text = """
seen = {}

def handle(message):
    number = message["n"]
    seen[number] = seen.get(number, 0) + 1
    if seen[number] < 3:
        raise RuntimeError("not yet")
    return {"double": number * 2, "times": seen[number]}
"""
    place.worker("--handler", handler(place, text))
    place.leader()
    place.publish(*numbered(5))
    place.wait_processed(5)
    assert [{"double": 2 * n, "times": 3} for n in range(5)] == sorted(map(json.loads, texts(place)), key=str)
    assert not place.dead()


def test_what_can_never_be_processed_is_put_aside(place: Place) -> None:
    """After so many deliveries, with the reason; the others are not held up."""
    place.options |= {"max_deliveries": 2, "retry_pause": 0.01}
    place.worker()
    place.leader()
    place.publish(b'{"n": 1}', b"no json", b'{"n": 2}')
    wait_until(place.dead, "it is put aside")
    ((_, fields),) = place.dead()
    assert (b"no json", b"2") == (fields[b"payload"], fields[b"deliveries"])
    assert b"JSON" in fields[b"reason"]
    place.wait_processed(2)
    assert [1, 2] == numbers(place)


def test_a_message_that_nobody_answers(place_of: PlaceOf) -> None:
    """Is put aside with that reason."""
    place = place_of(ack_timeout=0.3, max_deliveries=2)
    with Actor() as one, Actor() as two:
        place.leader(workers=[one.name, two.name])
        place.publish(b'{"n": 1}')
        wait_until(place.dead, "it is put aside")
        ((_, fields),) = place.dead()
        assert b'{"n": 1}' == fields[b"payload"] and b"2" == fields[b"deliveries"]
        assert [1, 1] == [len(actor.wait_for(1)) for actor in (one, two)], "another worker each time"
        assert one.ids == two.ids == [fields[b"id"].decode()]
    place.wait_idle()


def test_a_message_that_is_too_large(place_of: PlaceOf) -> None:
    place = place_of(max_message=1000, **STEADY)
    with Actor(acknowledge) as worker:
        place.leader(workers=[worker.name])
        place.publish(b'"%s"' % (b"x" * 2000), b'{"n": 1}')
        wait_until(place.dead, "it is put aside")
        assert [b'{"n": 1}'] == [one.text for one in worker.wait_for(1)]
        place.wait_idle()


def test_a_worker_that_is_stopped_finishes_what_it_has_begun(place_of: PlaceOf) -> None:
    """It acknowledges, too: nobody has to do it again."""
    place = place_of(parallel=4, window=4, stop_patience=20.0, **STEADY)
    text = """
import asyncio, pathlib

async def handle(message):
    pathlib.Path(f"begun-{message['n']}").touch()
    await asyncio.sleep(0.5)
    return message
"""
    worker = place.worker("--handler", handler(place, text))
    place.leader()
    place.publish(*numbered(4))
    wait_until(lambda: 4 == len(list(place.folder.glob("begun-*"))), "it has begun all of them")
    worker.stop()
    assert 4 == place.count()
    place.wait_idle()
