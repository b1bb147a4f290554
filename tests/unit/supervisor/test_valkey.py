"""The private store: a server of its own, in a folder that is locked, stopped or found again however it was left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import redis

from motorcade.core.errors import StoreError
from motorcade.storage import has_private_store, open_store
from motorcade.storage.ports import Durability
from motorcade.supervisor import valkey
from motorcade.supervisor.ports import HeldPorts
from motorcade.supervisor.program import ServerProgram, find_program
from motorcade.supervisor.supervised import StartError, Supervised
from motorcade.supervisor.valkey import PrivateStore, ask, served
from tests.support.waiting import until

OF_MACHINE = ServerProgram(shutil.which("redis-server") or "redis-server", "redis", "7")


@contextlib.asynccontextmanager
async def running(
    folder: Path, program: ServerProgram | None = None, durability: Durability = Durability.SAFE
) -> AsyncIterator[tuple[PrivateStore, Supervised]]:
    """A private store that is looked after, as the supervisor does it."""
    ports = HeldPorts()
    store = PrivateStore(folder, program or find_program(), durability, ports)
    try:
        await store.claim()
        supervised = Supervised(store, asyncio.Event())
        task = asyncio.create_task(supervised.run())
        up = asyncio.create_task(supervised.up.wait())
        await asyncio.wait({task, up}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if task.done():
            task.result()
        try:
            yield store, supervised
        finally:
            supervised.stop()
            await task
    finally:
        store.release()
        ports.close()


def setting(url: str, name: str) -> str:
    """Return what the server says of a setting."""
    with redis.Redis.from_url(url) as client:
        return str(client.config_get(name)[name])


@pytest.mark.parametrize("program", [None, OF_MACHINE], ids=["valkey", "redis"])
async def test_what_it_has_taken_is_there_at_the_next_start_at_the_same_address(
    tmp_path: Path, program: ServerProgram | None
) -> None:
    folder = tmp_path / 'a "strange" földer'
    async with running(folder, program) as (store, _):
        url = store.url
        assert b"OK" == await ask(url, "SET", "k", "v")
        wanted = {"appendfsync": "always", "appendonly": "yes", "maxmemory-policy": "noeviction", "bind": "127.0.0.1"}
        assert wanted == {name: setting(url, name) for name in wanted}
        opened = await open_store(url, Durability.STRICT)  # it keeps every promise
        await opened.close()
        for path in (folder, *folder.rglob("*")):
            assert not path.stat().st_mode & 0o077, path
    assert has_private_store(folder)
    assert b"" == await ask(url, "PING")
    async with running(folder, program) as (store, _):
        assert url == store.url == store.url_file.read_text().strip()
        assert b"v" == await ask(url, "GET", "k")


async def test_the_password_is_asked_for_and_stands_on_no_command_line(tmp_path: Path) -> None:
    async with running(tmp_path) as (store, _):
        address = store.url.rpartition("@")[2]
        assert b"NOAUTH" in await ask(f"redis://{address}", "GET", "k")
        assert b"refuses us" in await ask(f"redis://:guess@{address}", "GET", "k")
        command = " ".join(psutil.Process(int(store._pid())).cmdline())
        assert store.url.partition("@")[0].removeprefix("redis://:") not in command


async def test_durability_fast_syncs_once_a_second(tmp_path: Path) -> None:
    async with running(tmp_path, durability=Durability.FAST) as (store, _):
        assert "everysec" == setting(store.url, "appendfsync")


async def test_a_server_that_dies_is_started_again_with_all_it_had(tmp_path: Path) -> None:
    async with running(tmp_path) as (store, supervised):
        assert b"OK" == await ask(store.url, "SET", "k", "v")
        assert supervised.child is not None
        first = supervised.child.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervised.deaths == 1 and supervised.up.is_set())
        assert supervised.child.pid != first
        assert b"v" == await ask(store.url, "GET", "k")


async def left(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server that goes on without its supervisor, with the lock that it inherited."""
    ports = HeldPorts()
    store = PrivateStore(folder, find_program(), Durability.SAFE, ports)
    await store.claim()
    (folder / "server.conf").write_text(store._configuration())
    process = subprocess.Popen(  # noqa: ASYNC220 - it is to outlive the loop
        [find_program().path, str(folder / "server.conf")],
        pass_fds=(store._server_lock,),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    async with asyncio.timeout(60):
        while await ask(store.url, "PING") != b"PONG":  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)
    assert b"OK" == await ask(store.url, "SET", "k", "v")
    url = store.url
    store.release()
    ports.close()
    return process, url


async def test_a_server_that_was_left_is_shut_down_and_its_files_are_taken_over(tmp_path: Path) -> None:
    process, url = await left(tmp_path)
    try:
        async with running(tmp_path) as (store, _):
            assert 0 == process.wait(10)
            assert url == store.url
            assert b"v" == await ask(store.url, "GET", "k")
    finally:
        process.kill()
        process.wait()


async def test_a_server_that_was_left_and_hangs_is_named_and_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(valkey, "LEFT_PATIENCE", 0.5)
    process, _ = await left(tmp_path)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StoreError, match=rf"process {process.pid}\) still has the files in {tmp_path}"):
            async with running(tmp_path):
                pass
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


async def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    async with running(tmp_path):
        with pytest.raises(StoreError, match=f"{tmp_path} is in use by another"):
            async with running(tmp_path):
                pass


async def test_commands_use_the_server_that_runs_or_run_one_for_themselves(tmp_path: Path) -> None:
    program = find_program()
    async with served(tmp_path, program, Durability.SAFE) as url:
        assert b"OK" == await ask(url, "SET", "k", "v")
    assert b"" == await ask(url, "PING")
    async with running(tmp_path) as (store, _):
        async with served(tmp_path, program, Durability.SAFE) as url:
            assert store.url == url
            assert b"v" == await ask(url, "GET", "k")
        assert b"PONG" == await ask(store.url, "PING")


async def test_a_port_that_was_taken_meanwhile_is_replaced(tmp_path: Path) -> None:
    async with running(tmp_path) as (store, _):
        port = int(store.url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        async with running(tmp_path) as (store, _):
            assert port != int(store.url.rpartition(":")[2])
            assert b"PONG" == await ask(store.url, "PING")


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """Its own last words, and nothing runs on."""
    async with running(tmp_path):
        pass
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(StartError, match=r"(?i)manifest|AOF"):
        async with running(tmp_path):
            pass


async def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreError, match=f"{file}/valkey cannot hold a store: Not a directory"):
        async with running(file / "valkey"):
            pass
