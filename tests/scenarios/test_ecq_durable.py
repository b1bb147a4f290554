"""Compacted queues outlive the node: nothing acknowledged is lost, progress and numbers never go back.

Each test ends the node in the middle of its work and goes on with a new process on the same store: embedded, Redis, and
one pass on a Redis cluster.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scenarios.witness import wait_until
from tests.support.compacted import Compacted
from tests.support.consumers import fill, numbers, payloads, settled, take, take_until, unique
from tests.support.flows import REASON_STRING, acknowledge
from tests.support.operator import Operator
from tests.support.redis import RedisServer
from tests.support.stores import Home, embedded, shared
from tests.support.wire import PUBACK, Client, Closed, Packet, publish_packet

WINDOW = 32


#: Each store, and both ways to end a node.
ends = pytest.mark.parametrize(
    ("home", "end"),
    [("rocksdb", "SIGTERM"), ("rocksdb", "SIGKILL"), ("redis", "SIGKILL"), ("cluster", "SIGKILL")],
    indirect=["home"],
)


@ends
def test_queues_go_on_with_a_new_process(home: Home, end: str) -> None:
    """Last values, numbers, rewinds, and progress, of those who come back with a session and of new sessions."""
    home.start()
    queues = [Compacted(home, f"car-{number}") for number in range(4)]
    common = Compacted(home, "common", "shared")
    rewound = Compacted(home, "rewound")
    for queue in (*queues, common, rewound):
        queue.put_numbers(200, keys=100)
    for number, queue in enumerate(queues):
        with queue.sleeper(5 - number % 2) if number < 2 else queue.consumer(5 - number % 2) as client:
            take(client, 40)
            take(client, WINDOW, ack=False)
            settled(client)
            if number % 2:
                client.disconnect()
            else:
                client.abort()
    for name, count in (("one", 10), ("two", 90)):
        with common.consumer(client_id=name) as client:
            take(client, count)
            settled(client)
            client.disconnect()
    with rewound.consumer() as client:
        take(client, 100)
        answer = client.publish(rewound.rewind, b"171", 1)
        assert answer is not None and 0 == (answer.reason or 0)
        take(client, 5, ack=False)
        client.abort()
    with Operator(home.node) as operator:
        before = {queue: progress(operator, queue) for queue in queues}
        wait_until(lambda: len(common.shown(operator)["consuming"]) == 2, "both are known")
    home.settle()
    home.again(end)
    with Operator(home.node) as operator:
        assert before == {queue: progress(operator, queue) for queue in queues}
        for queue in queues:
            shown = queue.shown(operator)
            assert (100, 101, 200) == (shown["messages"], shown["first"], shown["last"])
    for number, queue in enumerate(queues):
        queue.put(("k39", b"200"), ("new", b"201"))
        with queue.sleeper(5 - number % 2) if number < 2 else queue.consumer(5 - number % 2) as client:
            seen = take_until(client, b"201")
            assert [*range(140, 200), 200] == numbers(seen)
            assert number % 2 or [*range(141, 201), 201] == queue.numbers(seen)
    for name, count in (("one", 10), ("two", 90), ("three", 0)):
        with common.consumer(client_id=name) as client:
            assert list(range(100 + count, 200)) == numbers(take(client, 100 - count))
    with rewound.consumer() as client:
        assert list(range(170, 200)) == numbers(take(client, 30))


def progress(operator: Operator, queue: Compacted) -> int:
    (view,) = queue.shown(operator)["consuming"]
    return int(view["progress"])


def test_numbers_are_never_used_again(home: Home) -> None:
    """Not after a crash, not when the queue was empty then, collected or deleted."""
    home.start("[plugins.ecq]\nretention = 1\ngc_interval = 0.1\n")
    empty, deleted = Compacted(home, "empty"), Compacted(home, "deleted")
    for queue in (empty, deleted):
        queue.put_numbers(5)
    with Operator(home.node) as operator:
        operator.delete("compacted/exclusive", deleted.name)
        wait_until(lambda: empty.shown(operator)["messages"] == 0, "collected")
    home.crash()
    for queue in (empty, deleted):
        with queue.consumer() as client:
            queue.put(("k0", b"new"))
            seen = take(client, 1)
            assert ([b"new"], [6]) == (payloads(seen), queue.numbers(seen))


def test_the_node_is_killed_in_the_middle_of_all_work(home: Home) -> None:
    """Producers and consumers at full speed when it happens. The last acknowledged value of each key, or a newer one,
    is there; values of a key never go back; no number stands for two messages.
    """
    home.start()
    queue = Compacted(home, "car")
    work = Work(home, queue)
    work.until_the_end()
    queue.put(("the-last", b"-1"))
    with queue.consumer() as client:
        for message in take_until(client, b"-1"):
            work.got(message)
    for key, value in work.accepted.items():
        assert work.newest.get(key, -1) >= value, (
            f"{key}: {value} was acknowledged, {work.newest.get(key)} was delivered"
        )
    with Operator(home.node) as operator:
        stored = {one["topic"]: int(one["payload"]) for one in queue.messages(operator)}
    for key, value in work.accepted.items():
        assert stored[queue.read(key)] >= value


class Work:
    """A producer and a consumer, and what they have seen."""

    KEYS = 40

    def __init__(self, home: Home, queue: Compacted) -> None:
        self.home = home
        self.queue = queue
        self.accepted: dict[str, int] = {}
        self.newest: dict[str, int] = {}
        self.meaning: dict[int, tuple[str, bytes]] = {}
        self.errors: list[BaseException] = []
        self.done = 0

    def got(self, message: Packet) -> None:
        (key,), (number,) = self.queue.keys([message]), self.queue.numbers([message])
        value = int(message.payload)
        assert value >= self.newest.get(key, -1), f"{key}: {value} after {self.newest[key]}"
        self.newest[key] = value
        assert (key, message.payload) == self.meaning.setdefault(number, (key, message.payload))
        self.done += 1

    def produce(self, client: Client) -> None:
        number = 0
        while True:
            lot = range(number, number + 50)
            for value in lot:
                topic = self.queue.write(f"k{value % self.KEYS}")
                client.send(publish_packet(topic, b"%d" % value, version=4, qos=1, packet_id=value - number + 1))
            for value in lot:
                client.expect(PUBACK)
                self.accepted[f"k{value % self.KEYS}"] = value
            number += 50

    def consume(self, client: Client) -> None:
        while True:
            message = take(client, 1, ack=False)[0]
            self.got(message)
            acknowledge(client, message)

    def until_the_end(self) -> None:
        """Let both work until some hundreds are consumed, kill the node, start another one."""
        pairs = ((self.produce, self.home.connect("producer", 4)), (self.consume, self.queue.consumer()))
        threads = [threading.Thread(target=self._guarded, args=pair, daemon=True) for pair in pairs]
        for thread in threads:
            thread.start()
        wait_until(lambda: self.done > 500 or bool(self.errors), "some hundreds are consumed")
        self.home.node.kill()  # the clients see the end of their connections
        for thread in threads:
            thread.join(60)
        assert [] == self.errors
        self.home.forget_lease()
        self.home.start()

    def _guarded(self, work: Callable[[Client], None], client: Client) -> None:
        try:
            work(client)
        except (Closed, OSError):
            pass
        except BaseException as error:  # noqa: BLE001 - told by the test
            self.errors.append(error)


@shared
def test_redis_goes_away_and_comes_back(home: Home) -> None:
    """A producer is told of a full store, and never that a value is safe when it is not; consumers go on meanwhile, or
    when the store is back.
    """
    home.may_complain = True
    with RedisServer() as server:
        home.url, home.forget_lease = server.url, lambda: None
        home.start()
        queue = Compacted(home, "car")
        queue.put_numbers(100)
        client = queue.sleeper()
        take(client, 20)
        producer = home.connect("producer")
        server.command("CONFIG", "SET", "maxmemory", "1")
        for qos in (1, 2):
            answer = producer.publish(queue.write("k0"), b"no room", qos)
            assert answer is not None and 0x97 == answer.reason, "a full store"
            assert answer.prop(REASON_STRING)
        assert list(range(20, 40)) == numbers(take(client, 20)), "what is there can be consumed"
        server.command("CONFIG", "SET", "maxmemory", "0")
        wait_until(lambda: appended(home, queue, b"room"), "there is room again")
        server.stop()
        producer.send(publish_packet(queue.write("k0"), b"safe?", qos=1, packet_id=1))
        assert [] == settled(producer), "the node has read it, and does not answer yet"
        server.start()
        safe = acknowledged(producer)
        wait_until(lambda: appended(home, queue, b"back"), "the store is back")
        client.close()
        with queue.sleeper() as client:
            seen = payloads(take_until(client, b"back"))
        assert [b"%d" % number for number in range(40, 100)] == [word for word in seen if word.isdigit()][-60:]
        assert not safe or b"safe?" in seen
        assert b"no room" not in seen


def acknowledged(producer: Client) -> bool:
    """Whether the node has taken responsibility; it may also say that it does not know, and close."""
    try:
        answer = producer.recv(30)
    except Closed:
        return False
    return answer.type == PUBACK and (answer.reason or 0) < 0x80


def appended(home: Home, queue: Compacted, payload: bytes) -> bool:
    """Whether a value was taken."""
    try:
        with Client(home) as client:
            if client.connect(unique("producer"), keepalive=0).reason:
                return False
            answer = client.publish(queue.write("back"), payload, 1)
            return answer is not None and (answer.reason or 0) < 0x80
    except (Closed, OSError, AssertionError):
        return False


@embedded
def test_queues_move_to_another_engine(home: Home, lone_redis: RedisServer, tmp_path: Path) -> None:
    """`store export` and `store import` take values, progress and numbers along, those of deleted queues too."""
    home.start()
    queue, deleted = Compacted(home, "car"), Compacted(home, "deleted")
    queue.put_numbers(20, keys=10)
    deleted.put_numbers(7)
    with Operator(home.node) as operator:
        operator.delete("compacted/exclusive", deleted.name)
    with queue.consumer() as client:
        take(client, 4)
        settled(client)
        client.disconnect()
    home.stop()
    lone_redis.empty()
    for words in (("export", f"rocksdb://{home.data / 'store'}"), ("import", lone_redis.url)):
        line = [sys.executable, "-m", "motorcade", "store", words[0], str(tmp_path / "file"), "--store", words[1]]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
        assert 0 == done.returncode, done.stderr
    home.url = lone_redis.url
    home.start()
    with queue.consumer() as client, deleted.consumer() as other:
        queue.put(("new", b"20"))
        seen = take(client, 7)
        assert (list(range(14, 21)), list(range(15, 22))) == (numbers(seen), queue.numbers(seen))
        deleted.put(("new", b"new"))
        assert [8] == deleted.numbers(take(other, 1))


def test_one_key_updated_many_times_leaves_one_payload(home: Home, request: pytest.FixtureRequest) -> None:
    """Neither the store nor the time of a start grows with what was replaced; Redis has its memory back."""
    home.start()
    queue = Compacted(home, "car")
    fill(home, [(queue.write("k"), b"%d " % number + b"x" * 2000) for number in range(5000)])
    if home.url.startswith("redis"):
        server: RedisServer = request.getfixturevalue("lone_redis")
        wait_until(lambda: server.client.info("memory")["used_memory_dataset"] < 5_000_000, "its memory is back")
    home.crash()
    with Operator(home.node) as operator:
        shown = queue.shown(operator)
        assert (1, 5000, 5000) == (shown["messages"], shown["first"], shown["last"])
        assert shown["bytes"] < 3000
