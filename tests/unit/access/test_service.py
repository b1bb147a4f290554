"""Asking an HTTP service, with a real one on a loopback port."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from motorcade.core.client import ClientInfo
from motorcade.core.errors import PluginError
from motorcade.extension.hooks import Allow, Deny
from tests.support.tables import each_case

from .conftest import Start


class Service:
    """Answers every question with `status` and `answer`, and remembers the questions."""

    def __init__(self) -> None:
        self.status = 200
        self.answer: bytes = b'{"result": "allow"}'
        self.headers: dict[str, str] = {}
        self.asked: list[dict[str, Any]] = []
        self.seen_headers: list[dict[str, str]] = []
        self.gate = threading.Event()
        self.gate.set()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                service.asked.append(json.loads(body))
                service.seen_headers.append(dict(self.headers))
                service.gate.wait(60)
                try:
                    self.send_response(service.status)
                    for key, value in service.headers.items():
                        self.send_header(key, value)
                    self.send_header("Content-Length", str(len(service.answer)))
                    self.end_headers()
                    self.wfile.write(service.answer)
                except OSError:
                    pass  # the asker did not want to wait

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/auth"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def says(self, **answer: Any) -> None:
        self.answer = json.dumps(answer).encode()

    def stop(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    running = Service()
    yield running
    running.stop()


def ask(service: Service, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "http", "url": service.url, "cache_seconds": 0} | more]


async def test_the_service_hears_who_asks_and_decides(start: Start, service: Service) -> None:
    node = await start(authentication=ask(service, headers={"X-Key": "k"}))
    service.says(result="allow", is_superuser=True, client_attrs={"fleet": "north"}, expire_at=node.time + 9, other=1)
    answer = await node.log_in("alice", "secret", "c1")
    assert Allow(superuser=True, attributes={"fleet": "north"}, expires_at=node.time + 9) == answer
    (question,) = service.asked
    expected = {"clientid": "c1", "username": "alice", "password": "secret", "peerhost": "192.0.2.1"}
    assert expected == {key: question[key] for key in expected}
    assert "k" == service.seen_headers[0]["X-Key"]


async def test_a_password_that_is_not_text_arrives_unchanged(start: Start, service: Service) -> None:
    node = await start(authentication=ask(service))
    await node.authenticate(ClientInfo("c1", "u", "192.0.2.1"), password=b"\xff\x00")
    assert (None, "/wA=") == (service.asked[0]["password"], service.asked[0]["password_base64"])


async def test_deny_denies_and_ignore_passes_on(start: Start, service: Service) -> None:
    node = await start(authentication=ask(service), anonymous="allow")
    service.says(result="deny")
    assert isinstance(await node.log_in("alice", "secret"), Deny)
    service.says(result="ignore")
    assert isinstance(await node.log_in("alice", "secret"), Deny)  # shown credentials that nobody accepted
    assert isinstance(await node.authenticate(ClientInfo("c1", None, "192.0.2.1")), Allow)
    service.says(result="allow", expire_at=node.time - 1)
    assert isinstance(await node.log_in("alice", "secret"), Deny)


@each_case(
    ("status", "answer"),
    [
        (500, b'{"result": "allow"}'),
        (204, b""),
        (302, b'{"result": "allow"}'),
        (200, b""),
        (200, b"allow"),
        (200, b'{"result": "Allow"}'),
        (200, b'{"result": "allow", "is_superuser": "yes"}'),
        (200, b'{"result": "allow", "pad": "' + b"x" * 100_000 + b'"}'),
    ],
)
async def test_anything_else_refuses(start: Start, service: Service, status: int, answer: bytes) -> None:
    node = await start(authentication=ask(service), anonymous="allow")
    service.status, service.answer = status, answer
    service.headers = {"Location": service.url}
    service.asked.clear()
    refused = await node.log_in("alice", "secret")
    assert "SERVER_UNAVAILABLE" == refused.reason.name
    assert 1 == len(service.asked)


async def test_no_service_and_a_silent_service_refuse(start: Start, service: Service) -> None:
    node = await start(authentication=ask(service, timeout=0.05), anonymous="allow")
    service.gate.clear()
    assert "SERVER_UNAVAILABLE" == (await node.log_in("alice", "secret")).reason.name
    service.stop()
    assert "SERVER_UNAVAILABLE" == (await node.log_in("alice", "secret")).reason.name


async def test_allow_is_remembered_for_the_very_same_client_only(start: Start, service: Service) -> None:
    node = await start(authentication=ask(service, cache_seconds=60))
    for _ in range(3):
        await node.log_in("alice", "secret")
    assert 1 == len(service.asked)
    await node.log_in("alice", "other")
    await node.log_in("alice", "secret", "c2")
    await node.log_in("alice", "secret", host="192.0.2.2")
    assert 4 == len(service.asked)
    node.time += 61
    await node.log_in("alice", "secret")
    assert 5 == len(service.asked)


async def test_an_answer_is_not_remembered_longer_than_it_holds(start: Start, service: Service) -> None:
    node = await start(authentication=ask(service, cache_seconds=600))
    service.says(result="allow", expire_at=node.time + 10)
    await node.log_in("alice", "secret")
    node.time += 11
    assert isinstance(await node.log_in("alice", "secret"), Deny)
    assert 2 == len(service.asked)


async def test_too_many_questions_at_once_hear_that_the_server_is_busy(start: Start, service: Service) -> None:
    node = await start(authentication=ask(service, max_waiting=2, timeout=60))
    service.gate.clear()
    waiting = [asyncio.create_task(node.log_in("alice", "secret", f"c{i}")) for i in range(2)]
    async with asyncio.timeout(60):
        while len(service.asked) < 2:  # noqa: ASYNC110 - the service lives in a thread
            await asyncio.sleep(0.01)
    assert "SERVER_BUSY" == (await node.log_in("alice", "secret", "c3")).reason.name
    service.gate.set()
    assert [Allow(), Allow()] == await asyncio.gather(*waiting)


@each_case("url", ["", "ftp://127.0.0.1/", "127.0.0.1", "http://"])
async def test_a_bad_url_does_not_start(start: Start, url: str) -> None:
    with pytest.raises(PluginError):
        await start(authentication=[{"type": "http", "url": url}])
