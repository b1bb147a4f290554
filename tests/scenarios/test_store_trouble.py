"""When the store cannot do its work: no room, no right to write, damage, two nodes on one store, no Redis.

Whatever it is, nobody is told that a message is safe when it is not, everything that does not need the store goes on,
and when the trouble is over the same process works as before.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from motorcade.broker.lease import TTL
from tests.scenarios.witness import Witness, wait_until
from tests.support import wire
from tests.support.flows import REASON_STRING, SESSION_EXPIRY, lasting, numbered, payloads, publish_many
from tests.support.node import ROOT, START_PATIENCE, NodeProcess
from tests.support.redis import RedisServer
from tests.support.stores import Home, drained, embedded, session_present, shared, subscribe

QUOTA_EXCEEDED, SERVER_BUSY, NO_MATCHING_SUBSCRIBERS = 0x97, 0x89, 0x10
PATIENCE = 30.0


# --- no room ------------------------------------------------------------------------------------------------------


@dataclass
class Trouble:
    """A node on a store that can be made full, and be given room again."""

    home: Home
    fill: Callable[[], None]
    relieve: Callable[[], None]


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A disk of its own; where nothing may be mounted the other kinds of trouble have to do."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def give_room_only(folder: Path, size_bytes: int) -> None:
    """Fill a disk until so much is left."""
    room = os.statvfs(folder)
    with (folder / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, room.f_bavail * room.f_frsize - size_bytes)


def limit_files(home: Home, size_bytes: int) -> None:
    """Let the node's files grow no larger than this; -1 lifts the limit."""
    psutil.Process(home.node.pid).rlimit(psutil.RLIMIT_FSIZE, (size_bytes, psutil.RLIM_INFINITY))


@pytest.fixture(params=["room kept in reserve", "no room at all", "files that may not grow", "redis without memory"])
def trouble(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trouble]:
    """Each way in which a store can be full."""
    disk = tmp_path / "disk"
    match request.param:
        case "room kept in reserve" | "no room at all" as kind:
            left = 32 * 2**20 if "reserve" in kind else 0
            with small_disk(disk, "160m"), Home("rocksdb", f"rocksdb://{disk}/store", tmp_path / "data") as home:
                yield Trouble(home, lambda: give_room_only(disk, left), (disk / "filler").unlink)
        case "files that may not grow":
            with Home("rocksdb", "rocksdb://", tmp_path / "data") as home:
                yield Trouble(home, lambda: limit_files(home, 1), lambda: limit_files(home, psutil.RLIM_INFINITY))
        case _:
            with RedisServer() as server, Home("redis", server.url, tmp_path / "data") as home:
                yield Trouble(
                    home,
                    lambda: server.command("CONFIG", "SET", "maxmemory", "1"),
                    lambda: server.command("CONFIG", "SET", "maxmemory", "0"),
                )
    assert "Traceback" not in home.log, home.log


class Stubborn:
    """A publisher that comes back when it was sent away because nobody could tell what became of its message.

    That happens to messages that are being written when the files fail: they may be there later or not. Those that
    come after them are refused with certainty.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self.client = home.connect("stubborn")
        self.taken: list[bytes] = []  #: payloads that were acknowledged
        self.unknown: set[bytes] = set()  #: payloads that nobody knows about

    def publish(self, topic: str, payload: bytes, qos: int = 1) -> wire.Packet | None:
        """The answer; None if the connection was closed instead."""
        number = self.client.next_id()
        self.client.send(wire.publish_packet(topic, payload, qos=qos, packet_id=number))
        answer = self.client.recv()
        if answer.type == wire.DISCONNECT:
            assert SERVER_BUSY == answer.reason and answer.prop(REASON_STRING)
            self.unknown.add(payload)
            self.client = self.home.connect("stubborn")
            return None
        assert (wire.PUBACK if qos == 1 else wire.PUBREC, number) == (answer.type, answer.packet_id), answer.name
        if (answer.reason or 0) < 0x80:
            self.taken.append(payload)
            if qos == 2:
                self.client.send(wire.ack_packet(wire.PUBREL, number))
                self.client.expect(wire.PUBCOMP)
        return answer

    def until(self, wanted: Callable[[wire.Packet], bool], qos: int = 1) -> wire.Packet:
        """Publish to `t` again and again until an answer is as wanted."""
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self.publish("t", b"%d-%d" % (qos, time.monotonic_ns()), qos)
            if answer is not None and wanted(answer):
                return answer
            assert time.monotonic() < deadline, f"still {answer}"

    def known(self, messages: list[wire.Packet]) -> list[bytes]:
        """The payloads without those that nobody knows about."""
        return [message.payload for message in messages if message.payload not in self.unknown]


def refused(answer: wire.Packet) -> bool:
    return answer.reason == QUOTA_EXCEEDED


def taken(answer: wire.Packet) -> bool:
    return answer.reason == 0


def test_a_full_store_takes_nothing_and_loses_nothing(trouble: Trouble) -> None:
    """Publishers hear it, live traffic goes on, what waits can be fetched, and with room all goes on."""
    home = trouble.home
    home.start("[session]\nqueue = 1000000\nqueue_bytes = 0\n")
    for name in ("reader", "sleeper"):
        home.absent(name, 5, ("t", 2))
    for version in (4, 5):
        home.absent(f"known{version}", version, ("known", 1))
    home.connect("p").publish("retained", b"old", 1, retain=True)
    publisher = Stubborn(home)
    for payload in numbered(40):
        publisher.publish("t", payload)
    with Witness(home) as witness:
        witness.check()
        trouble.fill()
        for qos in (1, 2):
            assert publisher.until(refused, qos).prop(REASON_STRING), "somebody at the client wants to know why"
        tell_the_log(home, publisher)
        old = home.connect("old", 4)
        old.send(wire.publish_packet("t", b"not taken", version=4, qos=1, packet_id=1))
        assert [] == old.expect_closed()
        unheard = publisher.publish("nobody", b"x")
        assert unheard is not None and NO_MATCHING_SUBSCRIBERS == unheard.reason
        publisher.taken.remove(b"x")
        witness.check()
        for version in (4, 5):
            refuse_what_is_new(home, version)
        retaining = home.connect("p")
        retaining.send(wire.publish_packet("retained", b"new", qos=1, packet_id=99, retain=True))
        assert not acknowledged(retaining), "acknowledged, but not stored"
        waiting = list(publisher.taken)
        reader = home.back("reader")
        seen: list[wire.Packet] = []
        while waiting != publisher.known(seen):
            assert len(seen) < len(waiting) + len(publisher.unknown), publisher.known(seen)
            seen.append(reader.receive())
        witness.check()
        trouble.relieve()
        publisher.until(taken)
        publisher.publish("t", b"after", 2)
        witness.check()
    assert publisher.taken[len(waiting) :] == publisher.known(drained(reader))
    let_in_again(home)
    home.settle()
    home.crash()
    assert publisher.taken == publisher.known(drained(home.back("sleeper")))
    # What the reader has acknowledged while that could not be stored may come again.
    assert {*publisher.known(drained(home.back("reader")))} <= {*publisher.taken}
    home.connect("p").publish("more", b"x", 1)
    for version in (4, 5):
        assert b"x" in payloads(drained(home.back(f"known{version}", version)))
    late = home.connect("late")
    subscribe(late, "retained", 1)
    assert [b"old"] == payloads(drained(late))


def tell_the_log(home: Home, publisher: Stubborn) -> None:
    """An operator reads when it began, not a line for each message."""
    wait_until(lambda: '"level":"error"' in home.node.log, "the log tells of the full store")
    lines = len(home.node.output)
    for _ in range(50):
        publisher.publish("t", b"%d" % time.monotonic_ns())
    assert len(home.node.output) - lines < 25, "".join(home.node.output[lines:][:5])


def refuse_what_is_new(home: Home, version: int) -> None:
    """New lasting sessions and subscriptions are refused, those that exist and those that do not last are served."""
    stranger = home.client(version)
    code = 3 if version == 4 else QUOTA_EXCEEDED
    assert code == stranger.connect(f"new{version}", **lasting(version)).reason
    stranger.expect_closed()
    brief = home.connect(f"brief{version}", version)
    subscribe(brief, "live", 1)
    known = home.back(f"known{version}", version)
    known.send(wire.subscribe_packet(9, [("more", 1)], version=version))
    assert [0x80 if version == 4 else QUOTA_EXCEEDED] == known.await_answer(wire.SUBACK, 9).reasons
    brief.publish("live", b"x", 1)
    assert b"x" == brief.receive().payload
    brief.close()


def let_in_again(home: Home) -> None:
    """There is room: what was refused is granted."""
    attempts = itertools.count()

    def let_in() -> bool:
        with wire.Client(home) as stranger:  # each time another one: who comes again and again is banned
            return stranger.connect(f"new{next(attempts)}", **lasting(5)).reason == 0

    wait_until(let_in, "a new session is let in")
    for version in (4, 5):
        subscribe(home.back(f"known{version}", version), "more", 1)


# --- the files ----------------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """The node says which directory, and does not start."""
    disk = tmp_path / "disk"
    home = Home("rocksdb", f"rocksdb://{disk}/store", tmp_path / "data")
    if os.geteuid():
        disk.mkdir(mode=0o500)
        assert str(disk) in home.refusal()
        return
    with small_disk(disk, "200m"), home:
        home.start()
        home.absent("s", 5, ("t", 1))
        home.connect("p").publish("t", b"x", 1)
        home.stop()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        told = home.refusal()
        assert str(disk) in told
        assert "ead-only" in told
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        home.start()
        assert [b"x"] == payloads(drained(home.back("s")))


def test_a_file_where_the_store_should_be(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    assert str(tmp_path / "store") in Home("rocksdb", f"rocksdb://{tmp_path}/store", tmp_path / "data").refusal()


@embedded
def test_damaged_files(home: Home) -> None:
    """The node names the file and what can be done about it, and does not start as if nothing had been there."""
    home.start()
    home.absent("s", 5, ("t", 1))
    publish_many(home.connect("p"), "t", numbered(200), 1)
    home.kill()
    for pattern in ("*.log", "MANIFEST-*", "CURRENT"):
        path = max((home.data / "store").glob(pattern), key=lambda found: found.stat().st_size)
        intact = path.read_bytes()
        content = bytearray(intact)
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
        told = home.refusal()
        for word in ("damaged", str(home.data / "store"), "backup"):
            assert word in told, pattern
        path.write_bytes(intact)
    home.start()
    assert numbered(200) == payloads(drained(home.back("s")))


@embedded
def test_a_log_cut_short_by_a_crash_is_no_damage(home: Home) -> None:
    """What was being written when the machine went down was not acknowledged; everything before it is there."""
    home.start()
    home.absent("s", 5, ("t", 1))
    publish_many(home.connect("p"), "t", numbered(50), 1)
    home.kill()
    path = max((home.data / "store").glob("*.log"), key=lambda found: found.stat().st_size)
    with path.open("ab") as log:
        log.write(b"\x01\x02\x03\x04\x40\x00\x01half")
    home.start()
    assert numbered(50) == payloads(drained(home.back("s")))


# --- durability levels --------------------------------------------------------------------------------------------


def test_durability_levels_survive_a_kill(home: Home) -> None:
    """A crash of the process loses nothing at any level."""
    for number, level in enumerate(("fast", "safe", "strict") if home.kind == "rocksdb" else ("fast", "safe")):
        home.start(f'[store]\ndurability = "{level}"\n')
        if not number:
            home.absent("s", 5, ("t", 1))
        publish_many(home.connect("p"), "t", numbered(20), 1)
        home.crash()
        assert numbered(20) == payloads(drained(home.back("s"))), level
        home.stop()


def test_strict_durability_on_redis(tmp_path: Path) -> None:
    """A server that does not sync every write is refused, and the message names the setting; one that does is used."""
    strict = '[store]\ndurability = "strict"\n'
    with RedisServer() as server:
        assert "appendfsync" in Home("redis", server.url, tmp_path / "data").refusal(config=strict)
    always = RedisServer({"appendfsync": "always"})
    with always as server, Home("redis", server.url, tmp_path / "data") as home:
        home.start(strict)
        home.absent("s", 5, ("t", 1))
        home.connect("p").publish("t", b"x", 1)
        home.crash()
        assert [b"x"] == payloads(drained(home.back("s")))


@embedded
def test_an_unknown_durability_is_refused(home: Home) -> None:
    """With the place, the wrong value and the right ones."""
    told = home.refusal(config='[store]\ndurability = "eventual"\n')
    for word in ("store.durability", "eventual", "fast", "safe", "strict"):
        assert word in told


def test_the_store_may_be_named_in_the_configuration(tmp_path: Path) -> None:
    """Relative to nothing but itself; and what is kept in memory ends with the node."""
    for url, kept in ((f"rocksdb://{tmp_path}/place", True), ("memory://", False)):
        for life in (1, 2):
            with NodeProcess(config=f'[store]\nurl = "{url}"\n') as node, wire.Client(node) as client:
                connack = client.connect("s", **lasting(5))
                assert (kept and life == 2) == connack.session_present
                client.disconnect()
    assert (tmp_path / "place" / "CURRENT").exists()


# --- two nodes ----------------------------------------------------------------------------------------------------


@embedded
def test_a_second_node_on_the_same_files_is_refused(home: Home) -> None:
    """It says what is in the way; the first notices nothing."""
    home.start()
    home.absent("s", 5, ("t", 1))
    told = home.refusal()
    assert "in use by another process" in told
    assert str(home.data / "store") in told
    home.connect("p").publish("t", b"x", 1)
    assert [b"x"] == payloads(drained(home.back("s")))


@shared
def test_a_second_node_on_the_same_redis_does_not_serve(home: Home) -> None:
    """It says that another node is there, and either gives up or waits; the first notices nothing."""
    home.start()
    home.absent("s", 5, ("t", 1))
    second = home.process()
    process = subprocess.Popen(
        second.command(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said = ""
        assert process.stdout is not None
        while "another node" not in said:
            line = process.stdout.readline()
            assert line, f"ended without a word about the other node:\n{said}"
            assert " ready " not in line, said + line
            said += line
        home.connect("p").publish("t", b"x", 1)
        assert [b"x"] == payloads(drained(home.back("s")))
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(START_PATIENCE) in (0, 1)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@shared
def test_the_lease_of_a_killed_node_runs_out(home: Home, lone_redis: RedisServer) -> None:
    """A node that was killed could not give its lease back; the next one waits for the end of it and says so."""
    home.forget_lease = lambda: None
    home.start()
    home.absent("s", 5, ("t", 1))
    home.connect("p").publish("t", b"x", 1)
    home.kill()
    (lease,) = lone_redis.client.scan_iter("*:l:sessions", count=10_000)
    assert 0 < lone_redis.client.pttl(lease) <= TTL * 1000
    # Somebody holds it until the next node has seen it, which may take longer to start than a lease lasts.
    lone_redis.client.persist(lease)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(home.start)
        wait_until(lambda: "another node" in home.log or starting.done(), "it says that another node is in the way")
        lone_redis.client.pexpire(lease, 500)
        starting.result()
    assert "another node" in home.node.log
    assert [b"x"] == payloads(drained(home.back("s")))


# --- no Redis -----------------------------------------------------------------------------------------------------


def test_no_redis_at_the_start(tmp_path: Path) -> None:
    """The node says which server it waits for; SIGTERM ends it before it was ready."""
    with RedisServer() as server:
        url, address = f"{server.url}?patience=1", server.address
    node = NodeProcess("--store", url, data=tmp_path / "data")
    process = subprocess.Popen(
        node.command(),
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        assert process.stdout is not None
        waits = next(line for line in process.stdout if "waiting_for_store" in line)
        assert address in waits
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert 0 == process.returncode, rest
    assert " ready " not in rest
    assert "Traceback" not in rest, rest


@pytest.mark.parametrize("how", ["stop", "kill", "pause"])
def test_redis_goes_away_and_comes_back(tmp_path: Path, how: str) -> None:
    """Nobody is acknowledged meanwhile, live traffic goes on, and the same process works on when Redis is back."""
    # A lone server that is killed keeps what it has answered only if it syncs first, see docs/durability.md.
    with (
        RedisServer({"appendfsync": "always"}) as server,
        Home("redis", f"{server.url}?patience=2", tmp_path / "data") as home,
    ):
        home.start()
        go_away_and_come_back(home, server, how)
        assert "Traceback" not in home.log, home.log


def go_away_and_come_back(home: Home, server: RedisServer, how: str) -> None:
    home.absent("s", 5, ("t", 1))
    sent = numbered(20)
    publish_many(home.connect("p"), "t", sent, 1)
    pid = home.node.pid
    with Witness(home) as witness:
        getattr(server, how)()
        for version in (4, 5):
            for qos in (1, 2):
                publisher = home.connect(f"p{version}", version)
                publisher.send(wire.publish_packet("t", b"unheard", version=version, qos=qos, packet_id=1))
                assert not acknowledged(publisher), "acknowledged, although the store is away"
        witness.check()
        if how == "pause":
            server.resume()
        else:
            server.start()
        wait_until(lambda: taken_up(home, b"after"), "a message is taken again")
        witness.check()
    assert pid == home.node.pid and home.node.process is not None and home.node.process.poll() is None
    home.crash()
    seen = payloads(drained(home.back("s")))
    assert sent == seen[:20]
    # Nobody was told what became of the others: they may be there or not.
    assert {b"after"} <= {*seen[20:]} <= {b"after", b"unheard"}


def acknowledged(publisher: wire.Client) -> bool:
    """Whether anything says that the message was taken; a closed connection and silence do not."""
    try:
        while (found := publisher.recv()).type not in (wire.PUBACK, wire.PUBREC):
            pass
        return (found.reason or 0) < 0x80
    except (wire.Closed, TimeoutError):
        return False


def taken_up(home: Home, payload: bytes) -> bool:
    """Try to publish on a new connection; False if that was not acknowledged."""
    with wire.Client(home) as publisher:
        if publisher.connect("again").reason:
            return False
        publisher.send(wire.publish_packet("t", payload, qos=1, packet_id=1))
        return acknowledged(publisher)


def test_a_client_comes_while_redis_is_away(tmp_path: Path) -> None:
    """A lasting session is not let in as if it were new: CONNACK with an error, or nothing, never "no session"."""
    with RedisServer() as server, Home("redis", f"{server.url}?patience=1", tmp_path / "data") as home:
        home.start()
        home.absent("s", 5, ("t", 1))
        home.connect("p").publish("t", b"x", 1)
        server.stop()
        with wire.Client(home) as client:
            try:
                answer = client.connect("s", **lasting(5))
                assert answer.reason or answer.session_present, "the session was lost for the client"
            except (wire.Closed, TimeoutError):
                pass
        server.start()

        def there() -> bool:
            with wire.Client(home) as client:
                try:
                    answer = client.connect("s", **lasting(5))
                except (wire.Closed, TimeoutError):
                    return False
                return answer.reason == 0 and answer.session_present

        wait_until(there, "the session is back")
        back = home.back("s")
        assert b"x" == back.expect(wire.PUBLISH).payload
        assert session_present(home.connect("s", clean=False, properties=wire.prop(SESSION_EXPIRY, 60)))
