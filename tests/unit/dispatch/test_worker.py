"""A worker with leaders that the test plays: what it writes, what it answers, and how it ends."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

import pytest
from msgspec.structs import replace

from motorcade.core.errors import ConfigError, StoreError
from motorcade.dispatch.frames import process_frames
from motorcade.dispatch.handlers import Threads, load_handler
from motorcade.dispatch.options import DispatchOptions
from motorcade.dispatch.worker import run_worker
from tests.support.redis import RedisServer
from tests.support.standing_clock import clock, turn, until
from tests.unit.dispatch.rig import IDS, WORKERS, front, results, running, working


async def test_good_messages_before_a_bad_frame_are_done(options, server) -> None:
    """In one read with it; the connection is closed, and who sends them again has them acknowledged."""
    async with working(options) as worker:
        async with front(worker.name) as leader:
            leader.writer.write(process_frames(IDS[:3], [b"1", b"2", b"3"]) + b"nonsense")
            await until(lambda: leader.closed, "closed")
            await until(lambda: len(results(server)) == 3, "written")
        async with front(worker.name) as leader:
            leader.send(IDS[:3], b"1", b"2", b"3")
            await until(lambda: leader.acknowledged == IDS[:3], "acknowledged")
        assert dict(zip(IDS[:3], (b"1", b"2", b"3"), strict=True)) == results(server)


async def test_messages_are_written_as_they_came_and_acknowledged(options, server) -> None:
    """Many in one read; large ones in portions; one byte at a time."""
    odd = [b'{"n": 1,  "x":"\\u00e4"}', b" [1] ", *[b'"%b"' % (b"x" * 600_000)] * 5]
    async with working(options) as worker, front(worker.name) as leader:
        leader.send(IDS[:7], *odd)
        leader.send(IDS[7:])
        await until(lambda: len(leader.acknowledged) == len(IDS), "acknowledged")
        assert set(IDS) == set(leader.acknowledged)
        assert dict(zip(IDS, [*odd, *[b"{}"] * (len(IDS) - 7)], strict=True)) == results(server)
        server.empty()
        for byte in process_frames(IDS[:1], [b"1"]):
            leader.writer.write(bytes([byte]))
            await clock().quiet()
        await until(lambda: results(server) == {IDS[0]: b"1"}, "written")


async def test_two_leaders_send_the_same(options, server) -> None:
    """Both are answered, and it is written once."""
    async with working(options) as worker, front(worker.name) as old, front(worker.name) as new:
        old.send(IDS[:50])
        new.send(IDS[:50])
        await until(lambda: len(old.acknowledged) == len(new.acknowledged) == 50, "both answered")
        assert set(IDS[:50]) == set(results(server))


async def test_what_is_no_json_is_refused(options, server) -> None:
    """Its neighbours are not."""
    bodies = [b"", b"{", b"{} {}", b"\xff", b'{"a": nan}', b"[1,]", b"nullnull"]
    async with working(options) as worker, front(worker.name) as leader:
        for number, body in enumerate(bodies):
            leader.send(IDS[3 * number : 3 * number + 3], b"{}", body, b"{}")
        await until(lambda: leader.answers == 21, "answered")
        assert [(id_, "bad_json") for id_ in IDS[1:21:3]] == [
            (id_, reason.partition(":")[0]) for id_, reason in leader.rejected
        ]
        assert set(IDS[:21]) - set(IDS[1:21:3]) == set(results(server)) == set(leader.acknowledged)
        assert 0 == worker.inside


async def test_a_leader_that_talks_nonsense_is_cut_off(options) -> None:
    nonsense = [
        b"\x01\x07\x00\x00\x00\x00",
        b"\x02\x00\x00\x00\x00\x00",
        b"\x01\x00\x7f\xff\xff\xff",
        b"GET / HTTP/1.1\r\n",
    ]
    async with working(options) as worker, front(worker.name) as other:
        for number, data in enumerate(nonsense):
            async with front(worker.name) as leader:
                leader.writer.write(data)
                await clock().quiet()
                assert leader.closed, data
            other.send(IDS[number : number + 1])
            await until(lambda: len(other.acknowledged) == number + 1, "others are served")  # noqa: B023
        assert len(nonsense) == worker.cut_off


async def test_what_a_handler_returns_is_written(options, server) -> None:
    outcomes: list[tuple[object, bytes | None]] = [
        ({"a": 1}, b'{"a":1}'),
        ("tëxt", "tëxt".encode()),
        (b"\x00\xff", b"\x00\xff"),
        ([], b"[]"),
        (0, b"0"),
        (None, None),
    ]

    async def handler(message: Any) -> object:
        return outcomes[message["number"]][0]

    async with working(options, handler) as worker, front(worker.name) as leader:
        leader.send(IDS[:6], *(b'{"number": %d}' % number for number in range(6)))
        await until(lambda: len(leader.acknowledged) == 6, "acknowledged")
    assert {IDS[number]: payload for number, (_, payload) in enumerate(outcomes[:5])} == results(server)


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
        while self.most < 4:  # noqa: ASYNC110 - the others come when this one has let them
            await asyncio.sleep(0)
        self.now -= 1
        if message["n"] % 3 == 0:
            raise ValueError("divisible")
        return message


async def test_handlers_run_at_the_same_time(options, server) -> None:
    """As many as `parallel` says; what raises is refused with the error."""
    options = replace(options, parallel=4)
    for kind in ("sync", "asynchronous"):
        server.empty()
        tasks = Tasks()
        async with working(options, getattr(tasks, kind)) as worker, front(worker.name) as leader:
            leader.send(IDS[:40], *(json.dumps({"n": n}).encode() for n in range(40)))
            await until(lambda: leader.answers == 40, "answered", standing=True)
            assert {(IDS[n], "ValueError: divisible") for n in range(0, 40, 3)} == set(leader.rejected)
            assert {IDS[n]: b'{"n":%d}' % n for n in range(40) if n % 3} == results(server)
            assert 4 == tasks.most


async def test_a_function_that_ends_the_program_ends_no_thread() -> None:
    """Neither `sys.exit` nor a cancellation, of which Python says that they are no ordinary errors."""

    def handle(message: Any) -> bytes:
        if message == "exit":
            sys.exit("done")
        if message == "cancel":
            raise asyncio.CancelledError
        return b"ok"

    threads = Threads(handle, 1)
    outcomes = await threads.handle([b'"exit"', b'"cancel"', b'"fine"'])
    assert [(None, "SystemExit: done"), (None, "CancelledError"), (b"ok", None)] == outcomes
    assert [(b"ok", None)] == await threads.handle([b'"fine"'])
    threads.close()


async def test_results_that_cannot_be_written_are_given_back(own_server: RedisServer) -> None:
    """In time, so that the leader does not count it against the message; and written when they come again."""
    options = DispatchOptions(redis=own_server.url, listen="127.0.0.1:0", ack_timeout=20.0)
    async with working(options) as worker, front(worker.name) as leader:
        own_server.pause()
        clock().servers_answer = False
        leader.send(IDS[:3])
        await turn(13.0)
        assert 0 == leader.answers
        await turn(3.0)
        assert IDS[:3] == leader.returned
        own_server.resume()
        clock().servers_answer = True
        leader.send(IDS[:3])
        await until(lambda: leader.acknowledged, "written after all")
        assert (IDS[:3], set(IDS[:3])) == (leader.acknowledged, set(results(own_server)))


async def test_a_worker_is_on_the_roll_while_it_lives(options, server) -> None:
    """Unless it need not register."""
    async with working(options) as worker:
        await turn(60.0)
        assert [worker.name.encode()] == server.command("ZRANGE", WORKERS, 0, -1)
    assert [] == server.command("ZRANGE", WORKERS, 0, -1)
    async with working(replace(options, register=False)):
        assert 0 == server.command("EXISTS", WORKERS)


async def test_where_a_worker_says_it_is(options, server) -> None:
    """As it is told, with the port that it really has."""
    for advertise, host in (("", "127.0.0.1"), ("worker-7:0", "worker-7")):
        async with working(replace(options, advertise=advertise)) as worker, front(worker.name) as leader:
            assert host == worker.name.rpartition(":")[0]
            leader.send(IDS[:1])
            await until(lambda: leader.acknowledged, "found")


async def test_a_worker_that_is_stopped_finishes_what_it_has_begun(options, server) -> None:
    """What it has not begun is given back; then the connection ends."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def handler(message: object) -> object:
        begun.set()
        await go.wait()
        return message

    options = replace(options, parallel=2)
    names: list[str] = []
    async with running(lambda stop: run_worker(options, handler, stop=stop, ready=names.append)) as stop:
        await until(lambda: names, "ready")
        async with front(names[0]) as leader:
            leader.send(IDS[:10])
            await begun.wait()
            stop.set()
            await clock().quiet()
            assert (IDS[2:10], []) == (leader.returned, leader.acknowledged)
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

    options = replace(options, parallel=1, max_waiting=100)
    async with working(options, handler) as worker, front(worker.name) as leader:
        body = b'"%b"' % (b"x" * 100_000)
        for start in range(0, 400, 100):
            leader.send(IDS[start : start + 100], *[body] * 100)
        await until(lambda: got, "begun")
        draining = asyncio.ensure_future(leader.writer.drain())
        await turn(10.0)
        assert not draining.done()
        go.set()
        await draining
        await until(lambda: len(leader.acknowledged) == 400, "all acknowledged")


async def test_a_process_that_stood_still_looks_at_nothing_old(options, server) -> None:
    """What is in its sockets has been sent to others long ago."""
    async with working(options) as worker:
        async with front(worker.name) as leader:
            leader.send(IDS[:1])
            await until(lambda: leader.acknowledged, "acknowledged")
            clock().move_to(clock().time() + options.remember / 4 + 1.0)
            leader.send(IDS[1:2])
            await until(lambda: leader.closed, "closed")
        await until(lambda: not worker.stood_still(clock().time()), "it goes on")
        async with front(worker.name) as leader:
            leader.send(IDS[2:3])
            await until(lambda: leader.acknowledged, "acknowledged")
    assert {IDS[0], IDS[2]} == set(results(server))


async def test_what_comes_too_late_is_not_written_and_not_answered(options, server) -> None:
    """The leader has given it to another worker long since."""
    async with working(options) as worker, front(worker.name) as leader:
        worker._ahead -= options.remember * 1000  # it believes that it is ten minutes ago
        leader.send(IDS[:2])
        await until(lambda: worker.stale == 2, "refused by the server")
        assert ([], 0) == (leader.acknowledged, worker.inside)
    assert {} == results(server)


async def test_a_handler_that_never_returns_does_not_keep_a_worker(options) -> None:
    options = replace(options, parallel=1)
    begun, never = threading.Event(), threading.Event()

    def handler(_message: object) -> None:
        begun.set()
        never.wait()

    async with working(options, handler) as worker, front(worker.name) as leader:
        leader.send(IDS[:1])
        await asyncio.to_thread(begun.wait, 60)
    never.set()


async def test_there_are_only_so_many_leaders(options) -> None:
    """One more is closed at once; the others are served."""
    async with (
        working(replace(options, max_leaders=2)) as worker,
        front(worker.name) as one,
        front(worker.name) as two,
    ):
        one.send(IDS[:1])
        two.send(IDS[1:2])
        await until(lambda: one.acknowledged and two.acknowledged, "served")
        async with front(worker.name) as three:
            await until(lambda: three.closed, "closed")
        one.send(IDS[2:3])
        await until(lambda: IDS[2] in one.acknowledged, "still served")


async def test_a_port_that_is_taken_says_so(options) -> None:
    async with working(options) as worker:
        with pytest.raises(ConfigError, match=f"cannot listen on {worker.name}"):
            await run_worker(replace(options, listen=worker.name), stop=asyncio.Event())


async def test_a_url_that_is_wrong_says_so(server: RedisServer) -> None:
    for url in ("redis+cluster://{}", "redis://{}?prefix=x", "redis://{}?cells=3", "redis://{}/x"):
        options = DispatchOptions(redis=url.format(server.address), listen="127.0.0.1:0")
        with pytest.raises(StoreError):
            await run_worker(options, stop=asyncio.Event())


def test_a_handler_is_found_by_its_name_or_it_is_said_why_not() -> None:
    assert json.dumps is load_handler("json:dumps")
    assert "decode" == getattr(load_handler("json:JSONDecoder.decode"), "__name__", "")
    for text, why in (
        ("no_such_module_here:f", "cannot be imported"),
        ("json:no_such_function", "has no 'no_such_function'"),
        ("json:__name__", "cannot be called"),
        ("json", "write module:function"),
    ):
        with pytest.raises(ConfigError, match=why):
            load_handler(text)
