"""The server of the control port: its thread, its addresses, and connections that never finish."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack

import httpx
import pytest

from motorcade import tasks
from motorcade.control import Control
from motorcade.core.errors import ConfigError
from motorcade.http import bridge
from motorcade.http import server as http_server
from motorcade.http.server import HttpServer
from tests.support.waiting import until
from tests.unit.http.conftest import PATIENCE


@pytest.fixture
async def server(control: Control) -> AsyncIterator[HttpServer]:
    running = HttpServer(control, "127.0.0.1", 0)
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def web(server: HttpServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{server.address}", trust_env=False, timeout=PATIENCE) as client:
        yield client


async def test_a_broker_that_does_not_answer_is_not_alive(
    server: HttpServer, web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the event loop is stuck, probes hear 503 from the other thread; afterwards all is well."""
    monkeypatch.setattr(bridge, "PATIENCE", 0.1)
    answers: list[int] = []

    def probe() -> None:
        answers.append(httpx.get(f"http://{server.address}/healthz", trust_env=False, timeout=PATIENCE).status_code)

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join(PATIENCE)  # blocks this event loop, which is the broker's
    assert [503] == answers
    monkeypatch.setattr(bridge, "PATIENCE", PATIENCE)
    assert 200 == (await web.get("/healthz")).status_code


async def test_requests_run_outside_the_brokers_thread(control: Control, web: httpx.AsyncClient) -> None:
    """Only the copy is taken in the broker's thread; the rest of a request is not."""
    threads: list[int] = []

    def installed() -> dict[str, str]:
        threads.append(threading.get_ident())
        return {}

    control.installed = installed  # type: ignore[method-assign]
    assert 200 == (await web.get("/api/v1/plugins")).status_code
    assert 1 == len(threads)
    assert threading.get_ident() != threads[0]


async def test_without_a_token_only_loopback_is_listened_on(control: Control) -> None:
    """The refusal says what to set."""
    for host in ("", "0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(ConfigError, match=r"http\.token"):
            HttpServer(control, host, 18083)


async def test_an_address_that_is_taken_is_an_error_of_the_start(control: Control) -> None:
    """It names the address, and nothing is left running."""
    first = HttpServer(control, "127.0.0.1", 0)
    await first.start()
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        await HttpServer(control, "127.0.0.1", port).start()
    await first.stop()
    again = HttpServer(control, "127.0.0.1", port)
    await again.start()
    await again.stop()


# -- connections that never finish

#: A request that begins and does not end: nothing, half a head, half a body (its head makes it a request under way).
UNFINISHED = (
    b"",
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: yyy",
    b"POST /api/v1/plugins/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",
)


async def test_unfinished_requests_do_not_starve_the_probes(
    server: HttpServer, web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More connections than the server has places, none of which ever sends a whole request, however long it waits."""
    monkeypatch.setattr(http_server, "REQUEST_PATIENCE", 3600.0)
    for data in (UNFINISHED[:2], UNFINISHED[2:]):
        with ExitStack() as held:
            for number in range(3 * http_server.MAX_CONNECTIONS):
                held.enter_context(dialled(server)).sendall(data[number % len(data)])
                await asyncio.sleep(0)
            for _ in range(5):
                # A connection of its own, as probes have: one that rests between two requests may have to give way.
                async with httpx.AsyncClient(base_url=web.base_url, timeout=PATIENCE) as probe:
                    assert 200 == (await probe.get("/readyz")).status_code


def dialled(server: HttpServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)))


async def test_connections_that_never_finish_a_request_are_closed(
    server: HttpServer, web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More silent ones than there may be connections at all shut out nobody for long."""
    monkeypatch.setattr(http_server, "REQUEST_PATIENCE", 0.2)
    host, _, port = server.address.rpartition(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(http_server.MAX_CONNECTIONS + 5)]
    for number, (_, writer) in enumerate(opened):
        writer.write(UNFINISHED[number % len(UNFINISHED)])
    async with asyncio.timeout(2 * PATIENCE):
        for reader, writer in opened:
            try:
                await reader.read()  # to the end, with or without an answer before it
            except ConnectionError:
                pass
            writer.close()
    monkeypatch.setattr(http_server, "REQUEST_PATIENCE", PATIENCE)
    assert 200 == (await web.get("/healthz")).status_code


async def test_connections_in_use_are_kept_however_many_silent_ones_come(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the address that has most, the one goes that waits longest; a client that asks now and then keeps its own."""
    monkeypatch.setattr(http_server, "REQUEST_PATIENCE", 3600.0)
    host, _, port = server.address.rpartition(":")
    reader, client = await asyncio.open_connection(host, int(port))
    with ExitStack() as held:
        for _ in range(4):
            client.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in await reader.readline()
            await reader.readuntil(b'{"status":"ok"}')
            for _ in range(http_server.MAX_CONNECTIONS // 2):
                held.enter_context(dialled(server))
            await asyncio.sleep(0)
        client.close()


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
