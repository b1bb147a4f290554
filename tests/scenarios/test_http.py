"""What can be seen and done over the control port of a real node, and who is turned away?"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from motorcade.broker.broker import Broker
from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.plane import BrokerOptions, Plane
from motorcade.config import DEFAULT_PLUGINS
from motorcade.control import Control, NodeState, ReloadView
from motorcade.core.errors import ConfigError
from motorcade.core.guid import GuidFactory
from motorcade.extension.hooks import Hooks
from motorcade.extension.plugin import Plugins
from motorcade.http import bridge
from motorcade.http import server as server_module
from motorcade.http.answers import MAX_BODY
from motorcade.http.guard import Token
from motorcade.http.server import HttpServer
from tests.support.node import ROOT, NodeProcess
from tests.support.wire import DISCONNECT, PATIENCE, PUBLISH, Client, Will, prop

EXAMPLE = ROOT / "examples" / "plugins" / "geofence.py"
MUNICH = {"lat": 48.1374, "lon": 11.5755, "radius": 2000}
SESSION_EXPIRY = 0x11

Connect = Callable[..., Client]


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(http=True) as running:
        yield running


@pytest.fixture(scope="module")
def web(node: NodeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{node.http}", trust_env=False, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def connect(node: NodeProcess) -> Iterator[Connect]:
    """`connect(client_id, version=5, **options of CONNECT)`: accepted clients, closed at the end."""
    with ExitStack() as stack:

        def connected(client_id: str, version: int = 5, **options: Any) -> Client:
            client = stack.enter_context(Client(node, version=version))
            assert 0 == client.connect(client_id, **options).reason
            return client

        yield connected


def eventually(check: Callable[[], bool]) -> None:
    """A condition that comes true within the time a test waits for an answer."""
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def all_pages(web: httpx.Client, limit: int, **query: str) -> tuple[list[str], list[int]]:
    """Client ids of all pages in order, and the size of each page."""
    ids: list[str] = []
    sizes: list[int] = []
    cursor: str | None = ""
    while cursor is not None:
        page = web.get("/api/v1/clients", params={"limit": limit, "cursor": cursor, **query}).json()
        ids += [client["client_id"] for client in page["data"]]
        sizes.append(len(page["data"]))
        cursor = page["meta"]["cursor"]
    return ids, sizes


# -- health and metrics


@pytest.mark.parametrize(("path", "status"), [("/healthz", "ok"), ("/readyz", "ready"), ("/status", "ready")])
def test_a_running_node_is_alive_and_ready(web: httpx.Client, path: str, status: str) -> None:
    """Probes get 200 and one word; no version, no name."""
    answer = web.get(path)
    assert (200, {"status": status}) == (answer.status_code, answer.json())
    assert "server" not in answer.headers


SAMPLE = re.compile(
    r'([a-z_]+?)(_bucket|_sum|_count)?(?:\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)+)\})? (-?[0-9.e+-]+|\+Inf|NaN)'
)


def scrape(web: httpx.Client) -> dict[str, float]:
    """All samples by name and labels. Fails if the page is not in the text format."""
    answer = web.get("/metrics")
    assert "text/plain; version=0.0.4; charset=utf-8" == answer.headers["content-type"]
    samples: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in answer.text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            found = SAMPLE.fullmatch(line)
            assert found is not None, line
            name = found[1] + (found[2] or "")
            assert found[1] in kinds if kinds.get(found[1]) == "histogram" else name in kinds, line
            key, value = line.rsplit(" ", 1)
            assert key not in samples
            samples[key] = float(value)
    for name, kind in kinds.items():
        assert (kind == "counter") == name.endswith("_total")
    return samples


def test_metrics_count_what_happens(web: httpx.Client, connect: Connect) -> None:
    """A message in and out moves exactly its own counters, and names no client."""
    subscriber, publisher = connect("metrics-subscriber"), connect("metrics-publisher", version=4)
    subscriber.subscribe("metrics/t", 1)
    before = scrape(web)
    for _ in range(5):
        publisher.publish("metrics/t", b"12345", 1)
        subscriber.receive()
    publisher.publish("metrics/nobody", b"x", 1)
    after = scrape(web)
    moved = {key: after[key] - before[key] for key in after if key in before}
    assert 6 == moved['motorcade_messages_total{direction="in"}']
    assert moved['motorcade_messages_total{direction="out"}'] >= 5
    assert 26 == moved['motorcade_message_bytes_total{direction="in"}']
    assert moved['motorcade_messages_dropped_total{reason="no_subscribers"}'] >= 1
    assert 0 == moved['motorcade_messages_dropped_total{reason="queue_full"}']
    assert after["motorcade_clients_connected"] >= 2
    assert "metrics-subscriber" not in web.get("/metrics").text


def test_metrics_have_every_limit_plugin_and_the_loop(web: httpx.Client) -> None:
    """Series exist before something happens, so that an alert can be written on them."""
    samples = scrape(web)
    for key in (
        'motorcade_limit_refused_total{limit="max_connections"}',
        'motorcade_messages_dropped_total{reason="slow_consumer"}',
        'motorcade_session_events_total{event="takenover"}',
        'motorcade_hook_errors_total{plugin="retained",point="message.publish"}',
        'motorcade_plugin_gauge{plugin="retained",name="retained_messages"}',
    ):
        assert key in samples
    bounds = [value for key, value in samples.items() if key.startswith("motorcade_loop_lag_seconds_bucket")]
    assert sorted(bounds) == bounds
    assert bounds[-1] == samples["motorcade_loop_lag_seconds_count"]


def test_a_limit_that_was_hit_is_counted(node: NodeProcess, web: httpx.Client) -> None:
    """A CONNECT that is too large moves the counter with the name of its limit."""
    key = 'motorcade_limit_refused_total{limit="max_connect_size"}'
    before = scrape(web)[key]
    with Client(node) as client:
        client.send(b"\x10\xff\xff\x03")  # a CONNECT of 65535 bytes
        client.expect_closed()
    eventually(lambda: scrape(web)[key] == before + 1)


# -- clients


def test_clients_come_in_pages_that_cover_all(web: httpx.Client, connect: Connect) -> None:
    """Each client is on exactly one page, in the order of ids, however large the pages are."""
    names = sorted(f"page-{number}" for number in range(25))
    for name in names:
        connect(name)
    for limit, sizes in ((10, [10, 10, 5]), (25, [25]), (24, [24, 1]), (1000, [25])):
        assert (names, sizes) == all_pages(web, limit, search="PAGE-")
    assert 25 == web.get("/api/v1/clients", params={"limit": 3, "search": "page-"}).json()["meta"]["count"]
    everybody, _ = all_pages(web, 7)
    assert set(names) <= set(everybody) and sorted(everybody) == everybody


def test_a_search_finds_user_names_too(web: httpx.Client, connect: Connect) -> None:
    """Part of the name is enough, upper or lower case."""
    connect("searched", username="Fahrerin Müller")
    assert ["searched"] == all_pages(web, 10, search="müll")[0]
    assert [] == all_pages(web, 10, search="nobody-has-this-name")[0]


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "ten", "", "\N{FULLWIDTH DIGIT NINE}"])
def test_a_page_has_a_bound(web: httpx.Client, limit: str) -> None:
    """A limit that is none is refused, not guessed at."""
    answer = web.get("/api/v1/clients", params={"limit": limit})
    assert (400, "BAD_REQUEST") == (answer.status_code, answer.json()["code"])


def test_a_slash_within_a_client_id_is_escaped(web: httpx.Client, connect: Connect) -> None:
    """Otherwise it would hide what is below a client; a client `a/b` is not the client `a%2Fb` either."""
    connect("a/b"), connect("a%2Fb"), connect("a/b/subscriptions")
    shown = [web.get(f"/api/v1/clients/{path}") for path in ("a%2Fb", "a%252Fb", "a%2fb%2Fsubscriptions", "%61%2Fb")]
    assert ["a/b", "a%2Fb", "a/b/subscriptions", "a/b"] == [answer.json()["client"]["client_id"] for answer in shown]
    for path in ("a/b", "a%2Fb/subscriptions", "a/b/subscriptions"):
        answer = web.get(f"/api/v1/clients/{path}")
        assert 404 == answer.status_code
        assert "a slash within a name is written %2F" in answer.json()["message"]
    assert 404 == web.delete("/api/v1/clients/a/b").status_code
    assert 400 == web.get("/api/v1/clients/%FF").status_code


@pytest.mark.parametrize("client_id", ["plain", "with/slashes/in it", "ünïcode €", "per%2Fcent?&=;", ".."])
def test_a_client_in_full(web: httpx.Client, connect: Connect, client_id: str) -> None:
    """Whatever its id looks like, a client is found with its session, subscriptions and what is in flight to it."""
    client = connect(
        client_id,
        clean=False,
        keepalive=77,
        will=Will("will/t", b"secret", qos=1),
        properties=prop(SESSION_EXPIRY, 60),
    )
    client.subscribe([("detail/+", 1), ("$share/g/x", 2)])
    connect("detail-sender").publish("detail/x", b"secret", 1)
    message = client.expect(PUBLISH)  # not acknowledged
    answer = web.get(f"/api/v1/clients/{quoted(client_id)}")
    assert 200 == answer.status_code, answer.text
    found = answer.json()
    shown = found["client"]
    assert (client_id, True, "127.0.0.1", "tcp", "5") == (
        shown["client_id"],
        shown["connected"],
        shown["host"],
        shown["listener"],
        shown["protocol"],
    )
    assert (77, 2, 1, 0) == (shown["keep_alive"], shown["subscriptions"], shown["inflight"], shown["queued"])
    assert [message.packet_id] == found["inflight_ids"]
    assert 60 == found["session_expiry"]
    assert {"topic": "will/t", "qos": 1, "retain": False, "delay": 0} == found["will"]
    assert {("detail/+", 1), ("$share/g/x", 2)} == {(s["filter"], s["qos"]) for s in found["subscriptions"]}
    assert "secret" not in answer.text
    assert 200 == web.delete(f"/api/v1/clients/{quoted(client_id)}").status_code
    eventually(lambda: not web.get(f"/api/v1/clients/{quoted(client_id)}").json()["client"]["connected"])
    assert "session removed" == web.delete(f"/api/v1/clients/{quoted(client_id)}").json()["result"]


def quoted(client_id: str) -> str:
    """As one part of a path; dots too, which clients otherwise take for folders."""
    return "".join(f"%{byte:02X}" for byte in client_id.encode())


def test_an_unknown_client_is_not_found(web: httpx.Client) -> None:
    """Errors have a code and a sentence."""
    for answer in (web.get("/api/v1/clients/nobody"), web.delete("/api/v1/clients/nobody")):
        assert (404, "NOT_FOUND") == (answer.status_code, answer.json()["code"])
        assert "nobody" in answer.json()["message"]


def test_a_kicked_client_hears_why_and_others_stay(web: httpx.Client, connect: Connect) -> None:
    """MQTT 5 gets DISCONNECT 0x98 (administrative action); the session that ends with the connection is gone."""
    kicked, other = connect("kicked"), connect("other")
    answer = web.delete("/api/v1/clients/kicked")
    assert {"client_id": "kicked", "result": "disconnected"} == answer.json()
    (goodbye,) = kicked.expect_closed()
    assert (DISCONNECT, 0x98) == (goodbye.type, goodbye.reason)
    other.expect_nothing()
    eventually(lambda: web.get("/api/v1/clients/kicked").status_code == 404)


def test_removing_a_session_of_an_absent_client_publishes_its_will(web: httpx.Client, connect: Connect) -> None:
    """A delayed will goes out when the session ends, whoever ends it."""
    watch = connect("will-watch")
    watch.subscribe("will/delayed", 1)
    delay = prop(0x18, 600)
    options = {"clean": False, "properties": prop(SESSION_EXPIRY, 600)}
    absent = connect("absent", will=Will("will/delayed", b"gone", qos=1, properties=delay), **options)
    absent.abort()
    eventually(lambda: not web.get("/api/v1/clients/absent").json()["client"]["connected"])
    watch.expect_nothing()
    assert "session removed" == web.delete("/api/v1/clients/absent").json()["result"]
    assert b"gone" == watch.receive().payload
    assert 404 == web.get("/api/v1/clients/absent").status_code


# -- plugins, node, configuration


def test_the_node_tells_about_itself(node: NodeProcess, web: httpx.Client) -> None:
    """Where it listens, what it runs, how it is."""
    found = web.get("/api/v1/node").json()
    assert ("ready", node.pid) == (found["state"], found["pid"])
    assert [str(node.mqtt)] == found["listeners"]["tcp"]
    assert [str(node.http)] == found["listeners"]["http"]
    assert {"retained", "systopics"} <= set(found["plugins"])


def test_plugins_are_listed_loaded_and_unloaded(web: httpx.Client) -> None:
    """What runs shows its hooks; what is installed and does not run is available; nothing runs twice."""
    listed = web.get("/api/v1/plugins").json()
    plugins = {plugin["name"]: plugin for plugin in listed["data"]}
    assert set(DEFAULT_PLUGINS) == plugins.keys()
    assert "access" in listed["meta"]["available"]
    assert {"message.publish"} == {hook["point"] for hook in plugins["retained"]["hooks"]}

    wanted = {"path": str(EXAMPLE), "config": MUNICH}
    loaded = web.post("/api/v1/plugins/fence", json=wanted)
    assert (201, "fence", str(EXAMPLE)) == (loaded.status_code, loaded.json()["name"], loaded.json()["origin"])
    again = web.post("/api/v1/plugins/fence", json=wanted)
    assert (409, "CONFLICT") == (again.status_code, again.json()["code"])
    assert 200 == web.delete("/api/v1/plugins/fence").status_code
    assert 404 == web.delete("/api/v1/plugins/fence").status_code


@pytest.mark.parametrize("name", ["no-such-plugin", "../../etc/passwd"])
def test_a_plugin_that_does_not_exist_is_refused(web: httpx.Client, tmp_path: Path, name: str) -> None:
    """By name or by path, with a sentence."""
    answer = web.post("/api/v1/plugins/missing", json={"path": f"{tmp_path}/nowhere/x/{name}"})
    assert (409, True) == (answer.status_code, "there is no plugin" in answer.json()["message"])


def test_plugins_come_by_path_only_from_folders_of_the_configuration(tmp_path: Path) -> None:
    """By default from none; a plugin by name needs none."""
    mine = tmp_path / "mine.py"
    mine.write_text("raise SystemExit('this must not run')")
    with (
        NodeProcess(http=True, env={"MOTORCADE_HTTP__PLUGIN_PATHS": "[]"}) as node,
        httpx.Client(base_url=f"http://{node.http}", trust_env=False, timeout=PATIENCE) as web,
    ):
        for path in (mine, EXAMPLE):
            answer = web.post("/api/v1/plugins/mine", json={"path": str(path)})
            assert (409, True) == (answer.status_code, "http.plugin_paths" in answer.json()["message"])
        assert 201 == web.post("/api/v1/plugins/access", json={}).status_code
    with (
        NodeProcess(http=True, env={"MOTORCADE_HTTP__PLUGIN_PATHS": str(EXAMPLE.parent)}) as node,
        httpx.Client(base_url=f"http://{node.http}", trust_env=False, timeout=PATIENCE) as web,
    ):
        answer = web.post("/api/v1/plugins/mine", json={"path": str(mine)})
        assert (409, True) == (answer.status_code, "in none of the folders" in answer.json()["message"])
        assert 201 == web.post("/api/v1/plugins/fence", json={"path": str(EXAMPLE), "config": MUNICH}).status_code


def test_a_plugin_that_somebody_else_may_have_written_is_refused(web: httpx.Client, tmp_path: Path) -> None:
    """The port is open to every user of the machine; their files must not run with the rights of the node."""
    theirs = tmp_path / "theirs.py"
    theirs.write_text("raise SystemExit('this must not run')")
    theirs.chmod(0o666)
    answer = web.post("/api/v1/plugins/theirs", json={"path": str(theirs)})
    assert (409, True) == (answer.status_code, "written by everybody" in answer.json()["message"])
    if os.geteuid() == 0:  # only root can give files away
        theirs.chmod(0o600)
        os.chown(theirs, 65534, 65534)
        answer = web.post("/api/v1/plugins/theirs", json={"path": str(theirs)})
        assert (409, True) == (answer.status_code, "another user" in answer.json()["message"])
    assert 200 == web.get("/healthz").status_code


def test_a_reload_takes_a_good_file_and_refuses_a_bad_one(tmp_path: Path) -> None:
    """What is wrong is said with its line; the node serves on with what it had, and takes the next good file."""
    with NodeProcess(http=True, config="[plugins.retained]\nmax_messages = 10\n") as node:
        file = Path(node.command()[node.command().index("--config") + 1])
        with (
            httpx.Client(base_url=f"http://{node.http}", trust_env=False, timeout=PATIENCE) as web,
            Client(node) as client,
        ):
            client.connect("c")
            file.write_text("[plugins.retained]\nmax_messages = 10\n\n[session]\nwindw = 3\n")
            refused = web.post("/api/v1/config/reload")
            assert (409, "CONFLICT") == (refused.status_code, refused.json()["code"])
            assert "windw" in refused.json()["message"] and ":5" in refused.json()["message"]
            client.expect_nothing()
            file.write_text(
                "[plugins.retained]\nmax_messages = 1\n\n[plugins.systopics]\ninterval = 3600\n[session]\nwindow = 7\n"
            )
            before = {each["key"]: each["value"] for each in web.get("/api/v1/config").json()["data"]}
            assert any("retained" in change for change in web.post("/api/v1/config/reload").json()["changed"])
            after = {each["key"]: each["value"] for each in web.get("/api/v1/config").json()["data"]}
            differing = {key: after[key] for key in after if after[key] != before.get(key)}
            assert 1 == differing.pop("plugins.retained.max_messages"), "what is in force is shown"
            assert not [key for key in differing if not key.startswith("plugins.systopics.")], "and nothing else"
            client.publish("over/the/new/bound", b"x", 1, retain=True)
            client.subscribe("over/#")
            client.expect_nothing()


# -- who is turned away


@pytest.mark.parametrize("host", ["evil.example", "evil.example:18083", "127.0.0.1.evil.example", "", "[::2]"])
@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/api/v1/clients"])
def test_on_loopback_other_names_are_not_answered(web: httpx.Client, host: str, path: str) -> None:
    """A web page that points its own name to 127.0.0.1 reads nothing."""
    answer = web.get(path, headers={"Host": host})
    assert (403, "FORBIDDEN") == (answer.status_code, answer.json()["code"])


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:18083"])
def test_names_of_this_machine_are_answered(web: httpx.Client, host: str) -> None:
    """With any port: a tunnel may change it."""
    assert 200 == web.get("/healthz", headers={"Host": host}).status_code


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1"])
def test_pages_of_other_sites_change_nothing(web: httpx.Client, connect: Connect, origin: str) -> None:
    """A browser tells where a request comes from; one from elsewhere is refused before anything happens."""
    client = connect("browsed")
    answer = web.delete("/api/v1/clients/browsed", headers={"Origin": origin})
    assert (403, "FORBIDDEN") == (answer.status_code, answer.json()["code"])
    client.expect_nothing()


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"x" * (MAX_BODY + 1), "application/json", 413, "PAYLOAD_TOO_LARGE"),
        (b"{", "application/json", 400, "BAD_REQUEST"),
        (b"\xff", "application/json", 400, "BAD_REQUEST"),
        (b"[]", "application/json", 400, "BAD_REQUEST"),
        (b'{"pth": "x"}', "application/json", 400, "BAD_REQUEST"),
        (b'{"path": 5}', "application/json", 400, "BAD_REQUEST"),
        (b"[" * 60_000, "application/json", 400, "BAD_REQUEST"),
        (b"{}", "text/plain", 415, "UNSUPPORTED_MEDIA_TYPE"),
    ],
    ids=["large", "cut", "not utf-8", "list", "unknown key", "wrong type", "deep", "form"],
)
def test_bad_bodies(web: httpx.Client, content: bytes, kind: str, status: int, code: str) -> None:
    """Each gets its own answer, none gets further."""
    answer = web.post("/api/v1/plugins/x", content=content, headers={"Content-Type": kind})
    assert (status, code) == (answer.status_code, answer.json()["code"])


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "NOT_FOUND"),
        ("GET", "/api/v1/nothing", 404, "NOT_FOUND"),
        ("GET", "/api/v2/clients", 404, "NOT_FOUND"),
        ("POST", "/api/v1/clients", 405, "METHOD_NOT_ALLOWED"),
        ("GET", "/api/v1/config/reload", 405, "METHOD_NOT_ALLOWED"),
        ("DELETE", "/metrics", 405, "METHOD_NOT_ALLOWED"),
    ],
)
def test_unknown_paths_and_methods(web: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    """As JSON, like every other error."""
    answer = web.request(method, path)
    assert (status, code) == (answer.status_code, answer.json()["code"])


def test_garbage_on_the_control_port_hurts_nobody(node: NodeProcess, web: httpx.Client, connect: Connect) -> None:
    """Half a request, endless headers and no HTTP at all: others are answered, clients are served."""
    client = connect("undisturbed")
    assert node.http is not None
    with ExitStack() as stack:
        for data in (
            b"GET /metrics HTTP/1.1\r\nHost: local",
            b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000,
            b"\x10\x0c\x00",
        ):
            sock = stack.enter_context(socket.create_connection((node.http.host, node.http.port), PATIENCE))
            try:
                sock.sendall(data)
            except OSError:
                pass  # refused before all of it was sent
            assert 200 == web.get("/healthz").status_code
            client.expect_nothing()


def test_a_token_is_wanted_where_one_is_set() -> None:
    """Probes are open, everything else wants the very token; the address may then be any."""
    with NodeProcess(http=True, token=True, config='[http]\ntoken = "s3cret"\n') as node:
        with httpx.Client(base_url=f"http://{node.http}", trust_env=False, timeout=PATIENCE) as web:
            for path in ("/healthz", "/readyz", "/status"):
                assert 200 == web.get(path).status_code
            for path in ("/metrics", "/api/v1/clients", "/api/v1/nothing"):
                for given in (None, "Bearer wrong", "Bearer s3cret2", "Basic s3cret", "s3cret", "Bearer"):
                    answer = web.get(path, headers={"Authorization": given} if given else {})
                    assert (401, "UNAUTHORIZED", "Bearer") == (
                        answer.status_code,
                        answer.json()["code"],
                        answer.headers["www-authenticate"],
                    )
            assert 200 == web.get("/metrics", headers={"Authorization": "Bearer s3cret"}).status_code
            assert 404 == web.get("/api/v1/nothing", headers={"Authorization": "bearer s3cret"}).status_code
        assert "s3cret" not in node.log


def test_stopping_does_not_wait_for_open_connections() -> None:
    """An idle connection and half a request do not keep the node from ending with 0."""
    node = NodeProcess(http=True).start()
    assert node.http is not None
    address = (node.http.host, node.http.port)
    with socket.create_connection(address), socket.create_connection(address) as half:
        half.sendall(b"POST /api/v1/plugins/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        with httpx.Client(base_url=f"http://{node.http}", trust_env=False, timeout=PATIENCE) as web:
            assert 200 == web.get("/healthz").status_code
        node.stop()  # fails if the exit code is not 0 or it takes too long


# -- the same server in this process, where its parts can be held


@pytest.fixture
async def control(tmp_path: Path) -> Control:
    """A broker without listeners."""
    plane = Plane(BrokerOptions("n"), SessionOptions(), Limits(), Hooks(), GuidFactory("n", 1), time.time())
    broker = Broker(plane, asyncio.get_running_loop())

    async def reload() -> ReloadView:
        return ReloadView(applied=[], restart=[], changed=[])

    return Control(broker, Plugins(broker, plane.hooks, tmp_path, plane.shared.sources), reload)


@pytest.mark.parametrize("state", [NodeState.STARTING, NodeState.STOPPING])
async def test_a_node_that_starts_or_stops_is_alive_but_not_ready(control: Control, state: NodeState) -> None:
    """Load balancers hear 503 and when to ask again."""
    control.state = state
    server = HttpServer(control, "127.0.0.1", 0, Token(required=False))
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://{server.address}", trust_env=False, timeout=PATIENCE) as web:
        assert 200 == (await web.get("/healthz")).status_code
        for path in ("/readyz", "/status"):
            answer = await web.get(path)
            assert (503, "UNAVAILABLE") == (answer.status_code, answer.json()["code"])
            assert int(answer.headers["retry-after"]) > 0
    await server.stop()


async def test_a_broker_that_does_not_answer_is_not_alive(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the event loop is stuck, probes hear 503 from the other thread; afterwards all is well."""
    monkeypatch.setattr(bridge, "PATIENCE", 0.1)
    server = HttpServer(control, "127.0.0.1", 0, Token(required=False))
    await server.start()
    answers: list[int] = []

    def probe() -> None:
        answers.append(httpx.get(f"http://{server.address}/healthz", trust_env=False, timeout=PATIENCE).status_code)

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join(PATIENCE)  # blocks this event loop, which is the broker's
    assert [503] == answers
    monkeypatch.setattr(bridge, "PATIENCE", PATIENCE)
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as web:
        assert 200 == (await web.get(f"http://{server.address}/healthz")).status_code
    await server.stop()


async def test_requests_run_outside_the_brokers_thread(control: Control) -> None:
    """Only the copy is taken in the broker's thread; the rest of a request is not."""
    threads: list[int] = []

    def installed() -> dict[str, str]:
        threads.append(threading.get_ident())
        return {}

    control.installed = installed  # type: ignore[method-assign]
    server = HttpServer(control, "127.0.0.1", 0, Token(required=False))
    await server.start()
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as web:
        assert 200 == (await web.get(f"http://{server.address}/api/v1/plugins")).status_code
    await server.stop()
    assert 1 == len(threads)
    assert threading.get_ident() != threads[0]


@pytest.mark.parametrize(
    "data", [b"", b"GET /heal", b"POST /api/v1/plugins/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"]
)
async def test_connections_that_never_finish_a_request_are_closed(
    control: Control, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    """More silent ones than there may be connections at all shut out nobody for long."""
    monkeypatch.setattr(server_module, "REQUEST_PATIENCE", 0.2)
    server = HttpServer(control, "127.0.0.1", 0, Token(required=False))
    await server.start()
    host, port = server.address.split(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(server_module.MAX_CONNECTIONS + 5)]
    for _, writer in opened:
        writer.write(data)
    async with asyncio.timeout(2 * PATIENCE):
        for reader, writer in opened:
            try:
                await reader.read()  # to the end, with or without an answer before it
            except ConnectionError:
                pass
            writer.close()
    monkeypatch.setattr(server_module, "REQUEST_PATIENCE", PATIENCE)
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as web:
        assert 200 == (await web.get(f"http://{server.address}/healthz")).status_code
    await server.stop()


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "192.0.2.1", "example.org"])
async def test_without_a_token_only_loopback_is_listened_on(control: Control, host: str) -> None:
    """The refusal says what to set."""
    with pytest.raises(ConfigError, match=r"http\.token"):
        HttpServer(control, host, 18083, Token(required=False))


async def test_an_address_that_is_taken_is_an_error_of_the_start(control: Control) -> None:
    """It names the address, and nothing is left running."""
    first = HttpServer(control, "127.0.0.1", 0, Token(required=False))
    await first.start()
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        await HttpServer(control, "127.0.0.1", port, Token(required=False)).start()
    await first.stop()
    again = HttpServer(control, "127.0.0.1", port, Token(required=False))
    await again.start()
    await again.stop()


async def test_a_failure_of_ours_is_told_without_details(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller hears that something went wrong; what it was stands in the log only."""

    async def broken() -> None:
        raise ZeroDivisionError("inner details")

    monkeypatch.setattr(control, "node", broken)
    server = HttpServer(control, "127.0.0.1", 0, Token(required=False))
    await server.start()
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as web:
        answer = await web.get(f"http://{server.address}/api/v1/node")
    await server.stop()
    assert (500, "INTERNAL_SERVER_ERROR") == (answer.status_code, answer.json()["code"])
    assert "inner details" not in answer.text


def test_sighup_and_the_verb_are_the_same(tmp_path: Path) -> None:
    """After SIGHUP with a bad file the node is alive and says so in its log."""
    with NodeProcess(http=True, config="[log]\nformat = 'json'\n") as node:
        file = Path(node.command()[node.command().index("--config") + 1])
        file.write_text("[nonsense]\n")
        os.kill(node.pid, signal.SIGHUP)
        eventually(lambda: "reload_refused" in node.log)
        assert 200 == httpx.get(f"http://{node.http}/readyz", trust_env=False, timeout=PATIENCE).status_code
        logged = [json.loads(line) for line in node.log.splitlines() if "reload_refused" in line]
        assert "nonsense" in logged[0]["error"]
