"""Readiness: 503 with the reason while what clients send cannot be kept, or a background task stands still."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from motorcade import tasks
from motorcade.broker.broker import Broker
from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.plane import BrokerOptions, Plane
from motorcade.control import Control, NodeState, ReloadView
from motorcade.core.guid import GuidFactory
from motorcade.extension.hooks import Hooks
from motorcade.extension.plugin import Plugins
from motorcade.http import server as http_server
from motorcade.http.metrics import families, render
from motorcade.http.server import HttpServer
from motorcade.storage import redis_writer, writer
from motorcade.storage.files import Files, Tables
from motorcade.storage.housekeeping import Housekeeping
from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Draft, Durability, Store, StoreError
from motorcade.storage.redis import RedisStore
from motorcade.storage.rocks import RocksStore
from tests.support.redis import RedisServer

PATIENCE = 60.0  # seconds: machines that run tests are busy


@pytest.fixture
async def control(tmp_path: Path) -> Control:
    """A node that is ready, without listeners."""
    plane = Plane(BrokerOptions("n"), SessionOptions(), Limits(), Hooks(), GuidFactory("n", 1), time.time())
    broker = Broker(plane, asyncio.get_running_loop())

    async def reload() -> ReloadView:
        return ReloadView(applied=[], restart=[], changed=[])

    made = Control(broker, Plugins(broker, plane.hooks, tmp_path, plane.shared.sources), reload)
    made.state = NodeState.READY
    return made


async def serve(control: Control, store: Store) -> Housekeeping:
    await store.open()
    control.store, control.housekeeping = store, Housekeeping(store, 3600.0, 100)
    return control.housekeeping


@pytest.fixture
async def web(control: Control) -> AsyncIterator[httpx.AsyncClient]:
    server = HttpServer(control, "127.0.0.1", 0)
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://{server.address}", trust_env=False, timeout=PATIENCE) as client:
        yield client
    await server.stop()


async def reasons(web: httpx.AsyncClient) -> str:
    """What `/readyz` complains of; nothing: the node is ready. It is alive all the while."""
    assert 200 == (await web.get("/healthz")).status_code
    answer = await web.get("/readyz")
    if answer.status_code == 200:
        return ""
    assert 503 == answer.status_code and int(answer.headers["retry-after"]) > 0
    text: str = answer.json()["message"]
    return text


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - another thread changes it
            await asyncio.sleep(0.01)


async def page(control: Control) -> dict[str, float]:
    """The metrics of the store by name."""
    lines = render(families(await control.statistics())).splitlines()
    found = [line.rpartition(" ") for line in lines if line.startswith("motorcade_store")]
    return {name.partition("{")[0].removeprefix("motorcade_"): float(value) for name, _, value in found}


async def test_a_node_with_a_store_that_takes_writes_is_ready(control: Control, web: httpx.AsyncClient) -> None:
    await serve(control, MemoryStore())
    assert not await reasons(web)
    assert [] == (await control.node()).problems


async def test_a_node_is_not_ready_while_its_store_is_full(
    control: Control, web: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noticed without a write, told with the reason; the metrics stay, and say so."""
    monkeypatch.setattr(writer, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(writer, "LOOK_IDLE", 0.01)
    store = RocksStore(tmp_path / "store", reserve=0)
    housekeeping = await serve(control, store)
    await store.mailboxes.append(["v"], Draft(b"1"), 1.0)
    await housekeeping.round()
    assert not await reasons(web)
    before = await page(control)
    store._writer._reserve = 1 << 62
    await until(lambda: store._writer.full)
    assert "the store has no room" == await reasons(web)
    (problem,) = (await control.node()).problems
    assert "kept in reserve" in problem and str(tmp_path) in problem
    await housekeeping.round()
    after = await page(control)
    assert before.keys() == after.keys() and {"store_entries", "store_disk_bytes"} <= after.keys()
    assert (0, 1, 1, 0) == (
        before["store_full"],
        before["store_available"],
        after["store_full"],
        after["store_available"],
    )
    store._writer._reserve = 0
    await until(lambda: not store._writer.full)
    assert not await reasons(web)
    await store.close()


async def test_a_node_is_not_ready_while_the_syncs_of_its_store_fail(
    control: Control, web: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even between opening the files again, which succeeds, and the next write."""
    monkeypatch.setattr(writer, "LOOK_EVERY", 0.01)
    fails, opened = False, 0

    class Disk:
        """Files that can be opened and written, but not synced."""

        def __init__(self, db: object) -> None:
            self._db = db

        def flush_wal(self, sync: bool) -> None:
            if fails:
                raise OSError("Input/output error")
            self._db.flush_wal(sync)  # type: ignore[attr-defined]

        def __getattr__(self, name: str) -> object:
            return getattr(self._db, name)

    really = Files.open

    def open_(files: Files, *, read_only: bool = False) -> Tables:
        nonlocal opened
        opened += 1
        tables = really(files, read_only=read_only)
        tables.db = Disk(tables.db)  # type: ignore[assignment]
        return tables

    monkeypatch.setattr(Files, "open", open_)
    store = RocksStore(tmp_path / "store", reserve=0)
    housekeeping = await serve(control, store)
    await store.records.put("c", "k", b"v")
    await housekeeping.round()
    fails = True
    with pytest.raises(StoreError):
        await store.records.put("c", "k", b"w")
    tried = opened
    await until(lambda: opened > tried + 3)
    for _ in range(20):
        assert "the store cannot be written" == await reasons(web)
    await housekeeping.round()
    assert 0 == (await page(control))["store_available"] and "store_records" in await page(control)
    fails = False
    await until(lambda: store._writer.trouble is None)
    assert not await reasons(web)
    await store.records.put("c", "k", b"x")
    await store.close()


async def test_a_fault_in_the_writers_thread_is_no_end(
    control: Control, web: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LOOK_EVERY", 0.01)
    store = RocksStore(tmp_path / "store", reserve=0)
    await serve(control, store)
    free = store._files.free_octets

    def breaks() -> int:
        raise PermissionError("statvfs")

    monkeypatch.setattr(store._files, "free_octets", breaks)
    store._writer._looked_at = 0.0
    with pytest.raises(StoreError):
        await store.records.put("c", "k", b"v")
    assert "the store cannot be written" == await reasons(web)
    assert store._writer.faults
    monkeypatch.setattr(store._files, "free_octets", free)
    await until(lambda: store._writer.trouble is None)
    await store.records.put("c", "k", b"v")
    assert b"v" == await store.records.get("c", "k", 1.0)
    await store.close()


async def test_a_node_is_not_ready_while_redis_is_away(
    control: Control, web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_writer, "TROUBLE_AFTER", 0.05)
    with RedisServer() as server:
        store = RedisStore(server.url, Durability.FAST)
        housekeeping = await serve(control, store)
        await store.records.put("c", "k", b"v")
        await housekeeping.round()
        before = await page(control)
        assert not await reasons(web)
        server.kill()
        writing = asyncio.ensure_future(store.records.put("c", "k", b"w"))
        async with asyncio.timeout(PATIENCE):
            while "the store does not answer" != await reasons(web):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        assert before.keys() == (await page(control)).keys()
        assert 0 == (await page(control))["store_available"]
        server.start()
        await writing
        assert not await reasons(web)
        await store.close()


async def test_a_node_is_not_ready_while_a_background_task_stands_still(
    control: Control, web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(tasks, "STEADY", 0.05)
    well = asyncio.Event()

    async def work() -> None:
        if not well.is_set():
            raise RuntimeError("a defect, and /a/path")
        await asyncio.Event().wait()

    supervisor = control._broker.supervisor
    task = supervisor.start(work, "fanout.clerk.of-a-customer")
    await until(lambda: supervisor.failures["fanout.clerk"] > 0)
    assert "background tasks stand still: fanout.clerk" == await reasons(web), "without details"
    (problem,) = (await control.node()).problems
    assert "fanout.clerk.of-a-customer" in problem and "a defect, and /a/path" in problem
    text = render(families(await control.statistics()))
    assert "motorcade_tasks_standing_still 1" in text
    assert 'motorcade_task_failures_total{task="fanout.clerk"}' in text
    well.set()
    async with asyncio.timeout(PATIENCE):
        while await reasons(web):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    task.cancel()


# -- connections that never finish


async def test_half_open_requests_do_not_starve_the_probes(
    control: Control, web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More connections than the server has places, none of which ever sends a whole request."""
    monkeypatch.setattr(http_server, "REQUEST_PATIENCE", 3600.0)
    await serve(control, MemoryStore())
    host, port = web.base_url.host, web.base_url.port
    assert port is not None
    held: list[socket.socket] = []
    try:
        for number in range(3 * http_server.MAX_CONNECTIONS):
            held.append(socket.create_connection((host, port)))
            if number % 3:
                held[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * (number % 7))
            await asyncio.sleep(0)
        for _ in range(5):
            assert not await reasons(web)
    finally:
        for one in held:
            one.close()


async def test_unfinished_bodies_do_not_starve_the_probes(
    control: Control, web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads are complete, so each is a request under way."""
    monkeypatch.setattr(http_server, "REQUEST_PATIENCE", 3600.0)
    await serve(control, MemoryStore())
    host, port = web.base_url.host, web.base_url.port
    assert port is not None
    head = b"POST /api/v1/plugins/x HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    held: list[socket.socket] = []
    try:
        for _ in range(3 * http_server.MAX_CONNECTIONS):
            held.append(socket.create_connection((host, port)))
            held[-1].sendall(head + b"Content-Length: 100\r\n\r\n{")
            await asyncio.sleep(0)
        for _ in range(5):
            assert not await reasons(web)
    finally:
        for one in held:
            one.close()


async def test_connections_in_use_are_kept_however_many_silent_ones_come(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the address that has most, the one goes that waits longest; a client that asks now and then keeps its own."""
    monkeypatch.setattr(http_server, "REQUEST_PATIENCE", 3600.0)
    server = HttpServer(control, "127.0.0.1", 0)
    await server.start()
    host, _, port = server.address.rpartition(":")
    reader, client = await asyncio.open_connection(host, int(port))
    held: list[socket.socket] = []
    for _ in range(4):
        client.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b'{"status":"ok"}')
        held += [socket.create_connection((host, int(port))) for _ in range(http_server.MAX_CONNECTIONS // 2)]
        await asyncio.sleep(0)
    client.close()
    for one in held:
        one.close()
    await server.stop()


async def test_a_server_whose_thread_has_ended_begins_again(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE", 0.01)
    on_tick, broken = http_server._Server.on_tick, [True]

    async def breaks(server: http_server._Server, counter: int) -> bool:
        if broken:
            broken.pop()
            raise RuntimeError("a defect")
        return await on_tick(server, counter)

    server = HttpServer(control, "127.0.0.1", 0, supervisor=control._broker.supervisor)
    await server.start()
    monkeypatch.setattr(http_server._Server, "on_tick", breaks)
    await until(lambda: control._broker.supervisor.failures["http.server"] > 0)
    async with httpx.AsyncClient(base_url=f"http://{server.address}", trust_env=False, timeout=PATIENCE) as web:
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    assert 200 == (await web.get("/healthz")).status_code
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.01)
        answer = await web.get("/readyz")
        assert "http.server" in answer.text, "until it has run for a while"
    await server.stop()
