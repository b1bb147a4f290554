"""Readiness: 503 with the reason while what clients send cannot be kept, or a background task stands still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from motorcade import tasks
from motorcade.control import Control, NodeState
from motorcade.http.metrics import families, render
from motorcade.storage import redis_writer, writer
from motorcade.storage.files import Files, RocksTables
from motorcade.storage.housekeeping import Housekeeping
from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import Draft, Durability, Store, StoreError
from motorcade.storage.redis import RedisStore
from motorcade.storage.rocks import RocksStore
from tests.support.redis import RedisServer
from tests.support.waiting import until
from tests.unit.http.answers import refused
from tests.unit.http.conftest import PATIENCE, in_memory


async def serve(control: Control, store: Store) -> Housekeeping:
    await store.open()
    control.store, control.housekeeping = store, Housekeeping(store, 3600.0, 100)
    return control.housekeeping


@pytest.fixture
async def web(control: Control) -> AsyncIterator[httpx.AsyncClient]:
    async with in_memory(control) as client:
        yield client


async def reasons(web: httpx.AsyncClient) -> str:
    """What `/readyz` complains of; nothing: the node is ready. It is alive all the while."""
    assert 200 == (await web.get("/healthz")).status_code
    answer = await web.get("/readyz")
    if answer.status_code == 200:
        return ""
    assert 503 == answer.status_code and int(answer.headers["retry-after"]) > 0
    text: str = answer.json()["message"]
    return text


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

    def open_(files: Files, *, read_only: bool = False) -> RocksTables:
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
    written = asyncio.ensure_future(store.records.put("c", "k", b"w"))
    await until(lambda: store._writer.trouble is not None)
    tried = opened
    await until(lambda: opened > tried + 3)
    for _ in range(20):
        assert "the store cannot be written" == await reasons(web)
    await housekeeping.round()
    assert 0 == (await page(control))["store_available"] and "store_records" in await page(control)
    fails = False
    await until(lambda: store._writer.trouble is None)
    assert not await reasons(web)
    await asyncio.wait_for(written, PATIENCE)  # it was in the log all the while
    assert b"w" == await store.records.get("c", "k", 0.0)
    await store.close()


async def test_a_fault_in_the_writers_thread_is_no_end(
    control: Control, web: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LOOK_EVERY", 0.01)
    store = RocksStore(tmp_path / "store", reserve=0)
    await serve(control, store)
    free = store._files.free_bytes

    def breaks() -> int:
        raise PermissionError("statvfs")

    monkeypatch.setattr(store._files, "free_bytes", breaks)
    store._writer._looked_at = 0.0
    with pytest.raises(StoreError):
        await store.records.put("c", "k", b"v")
    assert "the store cannot be written" == await reasons(web)
    assert store._writer.faults
    monkeypatch.setattr(store._files, "free_bytes", free)
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
    task = supervisor.start(work, "fanout.sweep.of-a-customer")
    await until(lambda: supervisor.failures["fanout.sweep"] > 0)
    assert "background tasks stand still: fanout.sweep" == await reasons(web), "without details"
    (problem,) = (await control.node()).problems
    assert "fanout.sweep.of-a-customer" in problem and "a defect, and /a/path" in problem
    text = render(families(await control.statistics()))
    assert "motorcade_tasks_standing_still 1" in text
    assert 'motorcade_task_failures_total{task="fanout.sweep"}' in text
    well.set()
    async with asyncio.timeout(PATIENCE):
        while await reasons(web):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    task.cancel()


async def test_a_node_that_starts_or_stops_is_alive_but_not_ready(control: Control, web: httpx.AsyncClient) -> None:
    """Load balancers hear 503 and when to ask again."""
    for state in (NodeState.STARTING, NodeState.STOPPING):
        control.state = state
        assert 200 == (await web.get("/healthz")).status_code
        for path in ("/readyz", "/status"):
            answer = await web.get(path)
            assert (503, "UNAVAILABLE") == refused(answer)
            assert int(answer.headers["retry-after"]) > 0


async def test_a_failure_of_ours_is_told_without_details(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller hears that something went wrong; what it was stands in the log only."""

    async def broken() -> None:
        raise ZeroDivisionError("inner details")

    monkeypatch.setattr(control, "node", broken)
    async with in_memory(control, raise_app_exceptions=False) as web:
        answer = await web.get("/api/v1/node")
    assert (500, "INTERNAL_SERVER_ERROR") == refused(answer)
    assert "inner details" not in answer.text
