"""A worker over real sockets: what it writes, what it answers, and how it ends."""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from motorcade.core.errors import ConfigError, StoreError
from motorcade.dispatch.calls import Calls
from motorcade.dispatch.frames import AnswerReader, process_frames
from motorcade.dispatch.handlers import load_handler
from motorcade.dispatch.options import DispatchOptions
from motorcade.dispatch.worker import Worker, run_worker
from tests.support.redis import RedisServer
from tests.unit.dispatch.peers import running, until

IDS = [str(uuid.UUID(int=number, version=4)).encode() for number in range(3000)]


class Front:
    """A leader's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.acknowledged: list[bytes] = []
        self.rejected: list[tuple[bytes, str]] = []
        self.returned: list[bytes] = []
        self.closed = False

    def send(self, ids: list[bytes], *messages: bytes) -> None:
        self.writer.write(process_frames(ids, list(messages) or [b"{}"] * len(ids)))

    async def listen(self) -> None:
        frames = AnswerReader()
        try:
            while data := await self.reader.read(1 << 16):
                answers = frames.feed(data)
                self.acknowledged += answers.acknowledged
                self.rejected += answers.rejected
                self.returned += answers.returned
        except ConnectionError:
            pass
        self.closed = True


@asynccontextmanager
async def front(name: str) -> AsyncIterator[Front]:
    host, _, port = name.rpartition(":")
    one = Front(*await asyncio.open_connection(host, int(port)))
    task = asyncio.create_task(one.listen())
    try:
        yield one
    finally:
        task.cancel()
        one.writer.close()


@asynccontextmanager
async def working(options: DispatchOptions, handler: Any = None) -> AsyncIterator[tuple[str, asyncio.Event]]:
    names: list[str] = []
    async with running(lambda stop: run_worker(options, handler, stop=stop, ready=names.append)) as stop:
        await until(lambda: names, "ready")
        yield names[0], stop


def results(server: RedisServer) -> dict[bytes, bytes]:
    rows = server.command("XRANGE", "messages:processed", "-", "+")
    found = {fields[b"id"]: fields[b"payload"] for _, fields in rows}
    assert len(rows) == len(found)
    return found


async def test_good_messages_before_a_bad_frame_are_done(options, server) -> None:
    """In one read with it; the connection is closed, and who sends them again has them acknowledged."""
    async with working(options) as (name, _):
        async with front(name) as leader:
            leader.writer.write(process_frames(IDS[:3], [b"1", b"2", b"3"]) + b"nonsense")
            await until(lambda: leader.closed, "closed")
            await until(lambda: len(results(server)) == 3, "written")
        async with front(name) as leader:
            leader.send(IDS[:3], b"1", b"2", b"3")
            await until(lambda: leader.acknowledged == IDS[:3], "acknowledged")
        assert dict(zip(IDS[:3], (b"1", b"2", b"3"), strict=True)) == results(server)


async def test_a_message_is_written_as_it_came_and_acknowledged(options, server) -> None:
    async with working(options) as (name, _), front(name) as leader:
        leader.send(IDS[:2], b'{"n": 1,  "x":"\\u00e4"}', b" [1] ")
        await until(lambda: leader.acknowledged == IDS[:2], "acknowledged")
        assert {IDS[0]: b'{"n": 1,  "x":"\\u00e4"}', IDS[1]: b" [1] "} == results(server)


async def test_many_messages_in_one_read(options, server) -> None:
    async with working(options) as (name, _), front(name) as leader:
        leader.send(IDS)
        await until(lambda: len(leader.acknowledged) == len(IDS), "acknowledged")
        assert set(IDS) == set(leader.acknowledged) == set(results(server))


async def test_large_messages_are_written_in_portions(options, server) -> None:
    body = b'"%b"' % (b"x" * 600_000)
    async with working(options) as (name, _), front(name) as leader:
        leader.send(IDS[:5], *[body] * 5)
        await until(lambda: len(leader.acknowledged) == 5, "acknowledged")
        assert dict.fromkeys(IDS[:5], body) == results(server)


async def test_two_leaders_send_the_same(options, server) -> None:
    """Both are answered, and it is written once."""
    async with working(options) as (name, _), front(name) as old, front(name) as new:
        old.send(IDS[:50])
        new.send(IDS[:50])
        await until(lambda: len(old.acknowledged) == len(new.acknowledged) == 50, "both answered")
        assert set(IDS[:50]) == set(results(server))


@pytest.mark.parametrize("body", [b"", b"{", b"{} {}", b"\xff", b'{"a": nan}', b"[1,]", b"null" * 2])
async def test_what_is_no_json_is_refused(body: bytes, options, server) -> None:
    """Its neighbours are not."""
    async with working(options) as (name, _), front(name) as leader:
        leader.send(IDS[:3], b"{}", body, b"{}")
        await until(lambda: leader.rejected and len(leader.acknowledged) == 2, "answered")
        ((id_, reason),) = leader.rejected
        assert (IDS[1], "bad_json") == (id_, reason.partition(":")[0])
        assert {IDS[0], IDS[2]} == set(results(server))


async def test_a_leader_that_talks_nonsense_is_cut_off(options) -> None:
    async with working(options) as (name, _), front(name) as leader, front(name) as other:
        leader.writer.write(b"\x01\x07\x00\x00\x00\x00")
        await until(lambda: leader.closed, "closed")
        other.send(IDS[:1])
        await until(lambda: other.acknowledged, "others are served")


@pytest.mark.parametrize(
    ("result", "payload"),
    [
        ({"a": 1}, b'{"a":1}'),
        ("tëxt", "tëxt".encode()),
        (b"\x00\xff", b"\x00\xff"),
        ([], b"[]"),
        (0, b"0"),
        (None, None),
    ],
    ids=repr,
)
async def test_what_a_handler_returns_is_written(result: object, payload: bytes | None, options, server) -> None:
    got: list[object] = []

    def handler(message: object) -> object:
        got.append(message)
        return result

    async with working(options, handler) as (name, _), front(name) as leader:
        leader.send(IDS[:1], b'{"speed": 7}')
        await until(lambda: leader.acknowledged == IDS[:1], "acknowledged")
    assert [{"speed": 7}] == got
    assert ({} if payload is None else {IDS[0]: payload}) == results(server)


class Tasks:
    """A handler that is called at the same time."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.enough = threading.Event()

    def sync(self, message: dict[str, int]) -> object:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            if self.now == 4:
                self.enough.set()
        self.enough.wait(60)
        with self.lock:
            self.now -= 1
        if message["n"] % 3 == 0:
            raise ValueError("divisible")
        return message

    async def asynchronous(self, message: dict[str, int]) -> object:
        self.now += 1
        self.most = max(self.most, self.now)
        await until(lambda: self.most >= 4, "four at the same time")
        self.now -= 1
        if message["n"] % 3 == 0:
            raise ValueError("divisible")
        return message


@pytest.mark.parametrize("kind", ["sync", "asynchronous"])
async def test_handlers_run_at_the_same_time(kind: str, options, server) -> None:
    """As many as `parallel` says; what raises is refused with the error."""
    tasks = Tasks()
    options = msgspec.structs.replace(options, parallel=4)
    async with working(options, getattr(tasks, kind)) as (name, _), front(name) as leader:
        leader.send(IDS[:40], *(json.dumps({"n": n}).encode() for n in range(40)))
        await until(lambda: len(leader.acknowledged) + len(leader.rejected) == 40, "answered")
        assert {(IDS[n], "ValueError: divisible") for n in range(0, 40, 3)} == set(leader.rejected)
        assert {IDS[n]: b'{"n":%d}' % n for n in range(40) if n % 3} == results(server)
        assert 4 == tasks.most


async def test_results_that_cannot_be_written_are_given_back(own_server: RedisServer) -> None:
    """In time, so that the leader does not count it against the message; and written when they come again."""
    options = DispatchOptions(redis=own_server.url, listen="127.0.0.1:0", ack_timeout=1.0)
    async with working(options) as (name, _), front(name) as leader:
        own_server.pause()
        leader.send(IDS[:3])
        await until(lambda: leader.returned == IDS[:3], "given back")
        own_server.resume()
        while not leader.acknowledged:  # on a busy machine they may come back once more
            leader.returned.clear()
            leader.send(IDS[:3])
            await until(lambda: leader.acknowledged or leader.returned, "answered")
        assert IDS[:3] == leader.acknowledged
        assert set(IDS[:3]) == set(results(own_server))


async def test_a_worker_is_on_the_roll_while_it_lives(options, server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motorcade.dispatch.worker.SIGN_OUT", 60.0)  # however busy the machine is
    async with working(options) as (name, _):
        assert [name.encode()] == server.command("ZRANGE", "consumer:ids", 0, -1)
    assert [] == server.command("ZRANGE", "consumer:ids", 0, -1)


@pytest.mark.parametrize(
    ("listen", "advertise", "host"),
    [("127.0.0.1:0", "", "127.0.0.1"), ("127.0.0.1:0", "worker-7:0", "worker-7")],
)
async def test_where_a_worker_says_it_is(listen: str, advertise: str, host: str, options, server) -> None:
    """As it is told, with the port that it really has."""
    options = msgspec.structs.replace(options, listen=listen, advertise=advertise)
    async with working(options) as (name, _):
        assert host == name.rpartition(":")[0]
        async with front(f"127.0.0.1:{name.rpartition(':')[2]}") as leader:
            leader.send(IDS[:1])
            await until(lambda: leader.acknowledged, "found")


async def test_a_worker_need_not_register(options, server) -> None:
    async with working(msgspec.structs.replace(options, register=False)):
        assert 0 == server.command("EXISTS", "consumer:ids")


async def test_a_worker_that_is_stopped_finishes_what_it_has_begun(options, server) -> None:
    """What it has not begun is given back; then the connection ends."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def handler(message: object) -> object:
        begun.set()
        await go.wait()
        return message

    options = msgspec.structs.replace(options, parallel=2)
    async with working(options, handler) as (name, stop), front(name) as leader:
        leader.send(IDS[:10])
        await begun.wait()
        stop.set()
        await until(lambda: leader.returned == IDS[2:10], "given back")
        assert not leader.acknowledged
        go.set()
        await until(lambda: leader.closed, "closed")
        assert set(IDS[:2]) == set(leader.acknowledged) == set(results(server))


async def test_a_worker_with_too_much_inside_reads_no_more(options, server) -> None:
    """And goes on when there is room."""
    go = asyncio.Event()
    got: list[object] = []

    async def handler(message: object) -> object:
        got.append(message)
        await go.wait()
        return message

    options = msgspec.structs.replace(options, parallel=1, max_waiting=100)
    async with working(options, handler) as (name, _), front(name) as leader:
        body = b'"%b"' % (b"x" * 100_000)
        for start in range(0, 400, 100):
            leader.send(IDS[start : start + 100], *[body] * 100)
        await until(lambda: got, "begun")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await leader.writer.drain()
        go.set()
        await until(lambda: len(leader.acknowledged) == 400, "all acknowledged")


async def test_a_process_that_stood_still_looks_at_nothing_old(calls: Calls, options, server) -> None:
    """What is in its sockets has been sent to others long ago."""
    worker = Worker(calls, options, None)
    names: list[str] = []
    async with running(lambda stop: worker.run(stop, names.append)):
        await until(lambda: names, "ready")
        async with front(names[0]) as leader:
            leader.send(IDS[:1])
            await until(lambda: leader.acknowledged, "acknowledged")
            worker.beat -= options.remember / 4 + 1.0
            leader.send(IDS[1:2])
            await until(lambda: leader.closed, "closed")
        await until(lambda: not worker.stood_still(asyncio.get_running_loop().time()), "it goes on")
        async with front(names[0]) as leader:
            leader.send(IDS[2:3])
            await until(lambda: leader.acknowledged, "acknowledged")
    assert {IDS[0], IDS[2]} == set(results(server))


async def test_what_comes_too_late_is_not_written_and_not_answered(calls: Calls, options, server) -> None:
    """The leader has given it to somebody else long since."""
    worker = Worker(calls, options, None)
    names: list[str] = []
    async with running(lambda stop: worker.run(stop, names.append)):
        await until(lambda: names, "ready")
        async with front(names[0]) as leader:
            worker._ahead -= options.remember * 1000  # it believes that it is ten minutes ago
            leader.send(IDS[:2])
            await until(lambda: worker.stale == 2, "refused by the server")
            assert ([], 0) == (leader.acknowledged, worker.inside)
    assert {} == results(server)


async def test_a_handler_that_never_returns_does_not_keep_a_worker(options) -> None:
    options = msgspec.structs.replace(options, parallel=1, stop_patience=0.1)
    begun, never = threading.Event(), threading.Event()

    def handler(_message: object) -> None:
        begun.set()
        never.wait()

    async with working(options, handler) as (name, _), front(name) as leader:
        leader.send(IDS[:1])
        await asyncio.to_thread(begun.wait, 60)
    never.set()


async def test_there_are_only_so_many_leaders(options) -> None:
    """One more is closed at once; the others are served."""
    async with (
        working(msgspec.structs.replace(options, max_leaders=2)) as (name, _),
        front(name) as one,
        front(name) as two,
    ):
        one.send(IDS[:1])
        two.send(IDS[1:2])
        await until(lambda: one.acknowledged and two.acknowledged, "served")
        async with front(name) as three:
            await until(lambda: three.closed, "closed")
        one.send(IDS[2:3])
        await until(lambda: IDS[2] in one.acknowledged, "still served")


async def test_a_port_that_is_taken_says_so(options) -> None:
    async with working(options) as (name, _):
        with pytest.raises(ConfigError, match=f"cannot listen on {name}"):
            await run_worker(msgspec.structs.replace(options, listen=name), stop=asyncio.Event())


@pytest.mark.parametrize("url", ["redis+cluster://{}", "redis://{}?prefix=x", "redis://{}?cells=3", "redis://{}/x"])
async def test_a_url_that_is_wrong_says_so(url: str, server: RedisServer) -> None:
    options = DispatchOptions(redis=url.format(server.address), listen="127.0.0.1:0")
    with pytest.raises(StoreError):
        await run_worker(options, stop=asyncio.Event())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no_such_module_here:f", "cannot be imported"),
        ("json:no_such_function", "has no 'no_such_function'"),
        ("json:__name__", "cannot be called"),
        ("json", "write module:function"),
    ],
)
def test_a_handler_that_cannot_be_loaded_says_why(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_handler(text)


def test_a_handler_is_found_by_its_name() -> None:
    assert json.dumps is load_handler("json:dumps")
    assert "decode" == getattr(load_handler("json:JSONDecoder.decode"), "__name__", "")
