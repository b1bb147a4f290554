"""From the first line to the exit code: starting, stopping, being killed, and crowds that come back all at once."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.scenarios.transports import CONFIG, KINDS, Papers, Ways, make_papers, open_ways
from tests.scenarios.witness import SLACK, assert_no_crash, metrics, rss, wait_until
from tests.support import wire
from tests.support.commands import run
from tests.support.flows import SESSION_EXPIRY, numbered
from tests.support.node import ROOT, START_PATIENCE, STOP_PATIENCE, Endpoint, NodeProcess
from tests.support.ports import free_port

SHUTTING_DOWN, TAKEN_OVER, SERVER_BUSY, SERVER_UNAVAILABLE = 0x8B, 0x8E, 0x89, 0x88

#: Things a node that ends well does not print.
COMPLAINTS = ("Traceback", "Warning", "never awaited", "was destroyed", "never retrieved", "Exception ignored")


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return make_papers(tmp_path_factory.mktemp("papers"))


def exits(node: NodeProcess) -> int:
    """Wait for the end of a node; its exit code."""
    assert node.process is not None
    try:
        return node.process.wait(STOP_PATIENCE)
    except subprocess.TimeoutExpired:
        node.kill()
        raise AssertionError(f"the node did not stop:\n{node.log}") from None


def assert_clean_exit(node: NodeProcess) -> None:
    assert 0 == exits(node), node.log
    for sign in COMPLAINTS:
        assert sign not in node.log, node.log


#: Plain TCP, and WebSocket frames within TLS.
plain_and_wrapped = pytest.mark.parametrize("kind", ["tcp", "wss"])


class Watched:
    """`motorcade serve` in a folder of its own, with standard output and standard error in two files beside it."""

    def __init__(self, folder: Path, *args: str, env: dict[str, str] | None = None) -> None:
        self.cwd = folder / "cwd"
        self.cwd.mkdir()
        self._files = folder / "stdout", folder / "stderr"
        self.args = args
        self.env = env or {}

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")} | self.env
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "motorcade", "serve", *self.args],
                cwd=self.cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
            try:
                wait_until(
                    lambda: "ready" in self.stdout or process.poll() is not None, "the node is ready", START_PATIENCE
                )
                assert process.poll() is None, self.stderr
                yield process
                process.send_signal(signal.SIGTERM)
                assert 0 == process.wait(STOP_PATIENCE), self.stderr
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait(STOP_PATIENCE)

    @property
    def stdout(self) -> str:
        return self._files[0].read_text()

    @property
    def stderr(self) -> str:
        return self._files[1].read_text()


# --- stopping -----------------------------------------------------------------------------------------------------


def test_clients_are_told_and_the_node_exits_with_0(papers: Papers) -> None:
    """MQTT 5 clients hear 0x8B, older ones are closed; by whatever way they came. Open requests hold nothing up."""
    ways = open_ways(papers)
    with ways.node as node, ExitStack() as stack:
        clients = [stack.enter_context(ways.client(kind, version)) for kind in KINDS for version in (3, 4, 5)]
        for index, client in enumerate(clients):
            assert 0 == client.connect(f"c{index}").reason
        strangers = [stack.enter_context(ways.client(kind)) for kind in KINDS]  # they have not sent CONNECT
        assert node.http is not None
        control = [stack.enter_context(socket.create_connection((node.http.host, node.http.port))) for _ in range(2)]
        control[0].sendall(b"POST /api/v1/plugins/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        os.kill(node.pid, signal.SIGTERM)
        for client in clients:
            told = [(packet.type, packet.reason) for packet in client.expect_closed()]
            assert told == ([(wire.DISCONNECT, SHUTTING_DOWN)] if client.version == 5 else [])
            client.close()  # over TLS the node waits for this, for a bounded time
        for stranger in strangers:
            assert [] == stranger.expect_closed()
            stranger.close()
        assert_clean_exit(node)


def test_clients_may_be_told_where_to_go() -> None:
    """With a server reference MQTT 5 clients hear 0x9C and the name of the other server."""
    with NodeProcess(config='[broker]\nserver_reference = "other.example:1883"\n') as node, wire.Client(node) as client:
        assert 0 == client.connect("c").reason
        os.kill(node.pid, signal.SIGTERM)
        (told,) = client.expect_closed()
        assert (wire.DISCONNECT, 0x9C, "other.example:1883") == (told.type, told.reason, told.prop(0x1C))
        assert_clean_exit(node)


@plain_and_wrapped
def test_what_is_under_way_is_written_before_the_end(papers: Papers, kind: str) -> None:
    """A reader that is so far behind that the node has begun to drop gets all that was not dropped, then DISCONNECT."""
    ways = open_ways(papers, more=f"{CONFIG}[broker]\ndrain_timeout = {STOP_PATIENCE}\n")
    with ways.node as node, ways.client(kind) as reader, ways.client("tcp") as writer:
        assert 0 == reader.connect("reader").reason
        assert 0 == writer.connect("writer").reason
        reader.subscribe("t", 0)
        sent = [number + b"." * 50_000 for number in numbered(400)]
        for payload in sent:
            writer.send(wire.publish_packet("t", payload))
        writer.publish("done", b"", 1)
        dropped = int(metrics(node)['motorcade_messages_dropped_total{reason="slow_consumer"}'])
        assert 0 < dropped < len(sent), "the kernel has taken everything: more messages are needed"
        os.kill(node.pid, signal.SIGTERM)
        writer.expect_closed()  # it is stopping now
        *messages, goodbye = reader.expect_closed(STOP_PATIENCE)
        assert sent[:-dropped] == [message.payload for message in messages]
        assert (wire.DISCONNECT, SHUTTING_DOWN) == (goodbye.type, goodbye.reason)
        reader.close()
        assert_clean_exit(node)


@plain_and_wrapped
def test_a_client_that_does_not_read_does_not_hold_up_the_end(papers: Papers, kind: str) -> None:
    """Its output is waited for no longer than `drain_timeout`; a second signal changes nothing."""
    more = "[broker]\ndrain_timeout = 1.0\n[limits]\nstall_timeout = 600.0\n"
    ways = open_ways(papers, more=more)
    with ways.node as node, ways.client(kind) as stuck, ways.client("tcp") as writer:
        assert 0 == stuck.connect("stuck").reason
        assert 0 == writer.connect("writer").reason
        stuck.subscribe("t", 0)
        for _ in range(400):
            writer.send(wire.publish_packet("t", b"." * 50_000))
        writer.publish("done", b"", 1)
        full = metrics(node)['motorcade_messages_dropped_total{reason="slow_consumer"}'] > 0
        assert full, "the kernel has taken everything: more messages are needed"
        os.kill(node.pid, signal.SIGTERM)
        writer.expect_closed()
        for again in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(node.pid, again)
        assert_clean_exit(node)


def test_stopping_amid_a_storm_of_connects(papers: Papers) -> None:
    """Who comes while the node stops is served, told, closed or refused; nobody hangs and the node exits with 0."""
    ways = open_ways(papers)
    over = threading.Event()
    seen: dict[str, int] = {}
    unexpected: list[str] = []

    def come_and_go(kind: str, number: int) -> None:
        count = 0
        while not over.is_set():
            count += 1
            try:
                with ways.client(kind) as client:
                    reason = client.connect(f"{kind}-{number}-{count}").reason
                    if reason == 0:
                        client.send(wire.subscribe_packet(1, [("t", 0)]) + wire.publish_packet("t", b"x"))
                        client.recv()
                    elif reason not in (SERVER_UNAVAILABLE, SERVER_BUSY):
                        unexpected.append(f"CONNACK 0x{reason or 0:02x}")
                seen[kind] = seen.get(kind, 0) + 1
            except (OSError, wire.Closed):
                pass
            except AssertionError as error:  # what came is no CONNACK
                if "DISCONNECT" not in str(error) and "HTTP" not in str(error) and str(error):
                    unexpected.append(str(error))

    with ways.node as node:
        threads = [threading.Thread(target=come_and_go, args=(kind, n), daemon=True) for kind in KINDS for n in (1, 2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: all(seen.get(kind, 0) > 20 for kind in KINDS), "clients of every kind come and go")
        os.kill(node.pid, signal.SIGTERM)
        assert_clean_exit(node)
        over.set()
        for thread in threads:
            thread.join(2 * wire.PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
        assert [] == unexpected


# --- starting -----------------------------------------------------------------------------------------------------


def test_ready_is_said_once_and_means_it(tmp_path: Path) -> None:
    """Standard output is one line; once it is there every port answers."""
    at = {name: Endpoint("127.0.0.1", free_port()) for name in ("mqtt", "ws", "http")}
    watched = Watched(tmp_path, *(word for name, endpoint in at.items() for word in (f"--{name}", str(endpoint))))
    with watched.running():
        for endpoint in at.values():
            socket.create_connection((endpoint.host, endpoint.port), timeout=wire.PATIENCE).close()
        with wire.Client(at["mqtt"]) as client:
            assert 0 == client.connect("at-once").reason
    (line,) = watched.stdout.splitlines()
    assert "ready" in line
    for endpoint in at.values():
        assert str(endpoint) in line


def test_a_killed_node_is_replaced_on_the_same_ports_at_once(papers: Papers) -> None:
    """SIGKILL with clients connected: the next node gets all addresses without waiting."""
    first = open_ways(papers)
    with ExitStack() as stack:
        first.node.start()
        clients = [stack.enter_context(first.client(kind)) for kind in KINDS for _ in range(5)]
        for index, client in enumerate(clients):
            assert 0 == client.connect(f"c{index}").reason
        first.node.kill()
        second = open_ways(papers)
        second.node.mqtt, second.node.ws, second.node.http = first.node.mqtt, first.node.ws, first.node.http
        assert second.node.config is not None
        assert first.node.config is not None
        second.node.config = first.node.config
        with second.node:
            ways = Ways(second.node, first.at, papers)
            for kind in KINDS:
                with ways.client(kind) as client:
                    assert 0 == client.connect("back").reason
                    client.expect_nothing()


# --- SIGHUP -------------------------------------------------------------------------------------------------------


def test_sighup_takes_a_good_file_and_refuses_a_broken_one() -> None:
    """Clients stay connected throughout, and the log tells what happened each time."""
    with NodeProcess(config='[log]\nformat = "json"\n[plugins.systopics]\ninterval = 60\n') as node:
        file = Path(node.command()[node.command().index("--config") + 1])
        good = file.read_text()

        def hang_up(text: str, event: str) -> dict[str, object]:
            file.write_text(text)
            lines = len(node.output)
            os.kill(node.pid, signal.SIGHUP)
            wait_until(lambda: any(event in line for line in node.output[lines:]), event)
            found: dict[str, object] = json.loads(next(line for line in node.output[lines:] if event in line))
            return found

        with wire.Client(node) as client:
            assert 0 == client.connect("stays").reason
            for broken, wanted in (
                ("[plugins.systopics\n", f"{file}:1"),
                (good + "[sesion]\nwindow = 5\n", "sesion"),
                (good.replace("60", '"often"'), "interval"),
            ):
                refused = hang_up(broken, "reload_refused")
                assert wanted in str(refused["error"])
                client.expect_nothing()
            reloaded = hang_up(good.replace("60", "30") + "[session]\nwindow = 5\n", '"reloaded"')
            assert "systopics" in str(reloaded["applied"])
            assert "session.window" in str(reloaded["restart"])
            client.expect_nothing()


# --- logs and what is left ----------------------------------------------------------------------------------------


def test_logs_are_json_and_hold_no_passwords(tmp_path: Path) -> None:
    """At the most talkative level, with log-ins that work and fail, and strangers: each line parses, none tells."""
    needle = "needle-in-the-log"
    assert 0 == run("passwd", "passwords", "alice", "--password-stdin", stdin=needle, cwd=tmp_path).returncode
    config = tmp_path / "motorcade.toml"
    config.write_text(f"""
[log]
level = "debug"
[http]
token = "{needle}-token"
[plugins.access]
anonymous = "deny"
failure_delay = 0.0
[[plugins.access.authentication]]
type = "password"
file = "{tmp_path}/passwords"
[[plugins.access.authentication]]
type = "jwt"
algorithms = ["HS256"]
secret = "{needle}-secret-that-is-long-enough"
""")
    at = {name: Endpoint("127.0.0.1", free_port()) for name in ("mqtt", "http")}
    flags = [word for name, endpoint in at.items() for word in (f"--{name}", str(endpoint))]
    watched = Watched(tmp_path, *flags, "--ws", "off", "--config", str(config))
    with watched.running() as process:
        for version in (4, 5):
            for password, let_in in ((needle, True), (f"{needle}-wrong", False), (None, False)):
                with wire.Client(at["mqtt"], version=version) as client:
                    assert let_in == (client.connect("c", username="alice", password=password).reason == 0)
        with wire.Client(at["mqtt"]) as stranger:
            stranger.send(b"\x00" * 10)
            stranger.expect_closed()
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: '"reloaded"' in watched.stderr, "the file is read again")
    lines = watched.stderr.splitlines()
    assert len(lines) > 5
    for line in lines:
        record = json.loads(line)
        assert {"event", "level", "timestamp", "logger"} <= record.keys()
    assert needle not in watched.stderr + watched.stdout


def test_nothing_is_left_undone(tmp_path: Path, papers: Papers) -> None:
    """In Python's development mode, after traffic on every way in, a stop complains of nothing and leaves no files."""
    at = {kind: Endpoint("127.0.0.1", free_port()) for kind in KINDS}
    config = tmp_path / "motorcade.toml"
    listeners = "".join(f'[listeners.{kind}]\nbind = "{at[kind]}"\n{papers.tls}' for kind in ("tls", "wss"))
    config.write_text(f"{listeners}[broker]\ndrain_timeout = 0.5\n")  # the TLS clients below do not close by themselves
    watched = Watched(
        tmp_path,
        *("--mqtt", str(at["tcp"]), "--ws", str(at["ws"]), "--http", f"127.0.0.1:{free_port()}"),
        *("--config", str(config)),
        env={"PYTHONDEVMODE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    with ExitStack() as stack, watched.running():
        ways = Ways(NodeProcess(), at, papers)
        for kind in KINDS:
            client = stack.enter_context(ways.client(kind))
            assert 0 == client.connect(f"stays-{kind}", keepalive=0).reason
            client.subscribe("t/#", 2)
            for qos in (0, 1, 2):
                client.publish(f"t/{kind}", b"m", qos, retain=True)
            with ways.client(kind) as leaves:
                assert 0 == leaves.connect(f"leaves-{kind}").reason
                leaves.disconnect()
            with ways.client(kind) as breaks:
                breaks.send(b"\x00")
                breaks.expect_closed()
    for line in watched.stderr.splitlines():
        record = json.loads(line)
        # Development mode tells of whatever took a tenth of a second: on a busy machine that may be anything.
        slow = record["logger"] == "asyncio" and record["event"].startswith("Executing ")
        assert slow or record["level"] not in ("warning", "error"), line
    for sign in COMPLAINTS:
        assert sign not in watched.stderr, watched.stderr
    assert [] == [path.name for path in watched.cwd.iterdir() if path.name != "motorcade-data"]


# --- crowds -------------------------------------------------------------------------------------------------------


async def read_packet(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Type and body of the next packet."""
    head, body = await wire.read_frame(reader)
    return head[0] >> 4, body


Visitor = tuple[asyncio.StreamReader, asyncio.StreamWriter]


#: Who comes in a crowd to a busy machine may need longer than 5 seconds to say who it is.
PATIENT = "[limits]\nconnect_timeout = 600.0\n"


async def visit(node: NodeProcess, client_id: str, **options: object) -> Visitor:
    """Connect, and be accepted."""
    reader, writer = await asyncio.open_connection(node.host, node.port)
    writer.write(wire.connect_packet(client_id, keepalive=0, **options))  # type: ignore[arg-type]  # passed on
    kind, body = await read_packet(reader)
    assert (wire.CONNACK, 0) == (kind, body[1])
    return reader, writer


async def echo(visitor: Visitor, topic: str) -> None:
    """Subscribe to a topic, publish to it and get it back."""
    reader, writer = visitor
    writer.write(
        wire.subscribe_packet(1, [(topic, 1)]) + wire.publish_packet(topic, topic.encode(), qos=1, packet_id=2)
    )
    while True:
        kind, body = await read_packet(reader)
        if kind == wire.PUBLISH:
            assert body.endswith(topic.encode())
            writer.write(wire.packet(0x40, body[2 + len(topic) : 4 + len(topic)]))
            return


async def happens(condition: Callable[[], bool], what: str) -> None:
    """`wait_until` beside a running loop, so that closed connections really close."""
    await asyncio.to_thread(wait_until, condition, what)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_everybody_comes_back_at_once_after_a_restart() -> None:
    """2000 clients lose their node by SIGKILL and connect to its successor at once: all are served."""
    first = NodeProcess(config=PATIENT).start()
    try:
        crowd = await asyncio.gather(*(visit(first, f"c{n}") for n in range(2000)))
    finally:
        first.kill()
    for _, writer in crowd:
        writer.transport.abort()
    second = NodeProcess(config=PATIENT, http=True)
    second.mqtt = first.mqtt
    with second:
        async with asyncio.timeout(600):
            crowd = await asyncio.gather(*(visit(second, f"c{n}") for n in range(2000)))
            await asyncio.gather(*(echo(visitor, f"t/{n}") for n, visitor in enumerate(crowd)))
        assert 2000 == metrics(second)["motorcade_connections"]
        for _, writer in crowd:
            writer.transport.abort()
        await happens(lambda: metrics(second)["motorcade_connections"] == 0, "all are gone")
        assert_no_crash(second)


async def test_one_name_and_two_hundred_connects() -> None:
    """All at once under one client id: one connection stays, all others are told and closed."""
    with NodeProcess(config=f"{PATIENT}flapping_count = 0\n", http=True) as node:
        rivals = await asyncio.gather(*(visit(node, "same") for _ in range(200)))

        next_packets = {asyncio.create_task(read_packet(reader)): (reader, writer) for reader, writer in rivals}
        waiting = set(next_packets)
        async with asyncio.timeout(600):
            while len(waiting) > 1:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for told in done:
                    kind, body = told.result()
                    assert (wire.DISCONNECT, TAKEN_OVER) == (kind, body[0])
                    assert b"" == await next_packets[told][0].read()
            (last,) = waiting
            next_packets[last][1].write(wire.PINGREQ)
            assert (wire.PINGRESP, b"") == await last
        await happens(lambda: metrics(node)["motorcade_connections"] == 1, "one connection")
        await echo(next_packets[last], "t")
        for _, writer in rivals:
            writer.transport.abort()
        assert_no_crash(node)


#: Bytes that the embedded engine may hold in memory before it writes them out.
WRITE_BUFFERS = 96 * 1024 * 1024


def store_has_no(node: NodeProcess, figure: str) -> bool:
    values = [value for series, value in metrics(node).items() if series.startswith(f"motorcade_store_{figure}{{")]
    return values == [0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("store", "slack"), [("memory://", SLACK / 4), ("rocksdb://", WRITE_BUFFERS)])
async def test_sessions_that_come_and_go_leave_nothing(store: str, slack: float) -> None:
    """1000 sessions with subscriptions and waiting messages, several times: memory, sessions and files come back."""
    expiry = wire.prop(SESSION_EXPIRY, 1)
    with NodeProcess("--store", store, http=True, config=f"{PATIENT}[store]\nsweep_interval = 0.5\n") as node:
        process = psutil.Process(node.pid)
        sessions = "motorcade_sessions"
        metrics(node)
        files = process.num_fds()
        after: list[int] = []
        for turn in range(4):
            crowd = await asyncio.gather(
                *(visit(node, f"s{turn}-{n}", clean=False, properties=expiry) for n in range(1000))
            )
            await asyncio.gather(*(echo(visitor, f"t/{turn}/{n}") for n, visitor in enumerate(crowd)))
            for reader, writer in crowd:
                writer.write(wire.subscribe_packet(7, [(f"all/{turn}/+", 1)]))
                kind, _ = await read_packet(reader)
                while kind != 9:
                    kind, _ = await read_packet(reader)
                writer.transport.abort()
            await happens(lambda: metrics(node)["motorcade_connections"] == 0, "all connections are gone")
            with wire.Client(node) as publisher:
                assert 0 == publisher.connect("publisher").reason
                for number in range(10):
                    publisher.publish(f"all/{turn}/{number}", b"." * 1000, 1)
            await happens(lambda: metrics(node)[sessions] == 0, "all sessions have expired")
            await happens(lambda: process.num_fds() <= files + (store != "memory://") * 20, "all files are closed")
            after.append(rss(node))
        assert after[-1] < after[0] + slack, [size >> 20 for size in after]
        for figure in ("entries", "records", "blobs"):
            await happens(partial(store_has_no, node, figure), f"the store has no {figure} left")
        assert_no_crash(node)


def test_a_node_without_files_left_recovers() -> None:
    """More clients than the process may have files: those inside are served, and who leaves makes room."""
    with NodeProcess() as node, ExitStack() as stack:
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (64, 64))
        inside = stack.enter_context(wire.Client(node))
        assert 0 == inside.connect("inside", keepalive=0).reason
        crowd = [stack.enter_context(wire.Client(node)) for _ in range(100)]
        answers = []
        for number, client in enumerate(crowd):
            client.send(wire.connect_packet(f"c{number}", keepalive=0))
        for client in crowd:
            try:
                answers.append(client.expect(wire.CONNACK).reason)
            except (wire.Closed, OSError):
                answers.append(None)
        assert 0 in answers
        assert None in answers, "there were files for all of them"
        inside.expect_nothing()
        for client in crowd:
            client.close()

        def let_in() -> bool:
            try:
                with wire.Client(node) as late:
                    return late.connect("late").reason == 0
            except (wire.Closed, OSError):
                return False

        wait_until(let_in, "there is room again")
        inside.expect_nothing()
        assert_no_crash(node)


def test_a_connection_without_an_address_is_nobody() -> None:
    """A peer that resets before it is accepted has no address: it is not taken for one on this machine.

    The node is stopped for a moment, so that connections are made, filled and reset before it can look at them.
    """
    with NodeProcess(http=True) as node, wire.Client(node) as watch:
        watch.connect("watch")
        watch.subscribe("forged", 0)
        assert node.process is not None
        os.kill(node.process.pid, signal.SIGSTOP)
        try:
            for number in range(20):
                with socket.create_connection((node.host, node.port)) as ghost:
                    ghost.sendall(wire.connect_packet(f"ghost{number}") + wire.publish_packet("forged", b"boo"))
                    ghost.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            os.kill(node.process.pid, signal.SIGCONT)
        watch.expect_nothing()
