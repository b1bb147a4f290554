"""What can be seen and done over the control port, and who is turned away."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from motorcade.config import DEFAULT_PLUGINS
from motorcade.http.answers import MAX_BODY
from tests.scenarios.witness import wait_until
from tests.support.local import LocalNode
from tests.support.node import ROOT
from tests.support.wire import DISCONNECT, PATIENCE, PUBLISH, Client, Will, prop
from tests.unit.http.answers import pages, refused

EXAMPLE = ROOT / "examples" / "plugins" / "geofence.py"
MUNICH = {"lat": 48.1374, "lon": 11.5755, "radius": 2000}
SESSION_EXPIRY = 0x11
CLIENTS = "/api/v1/clients"

Connect = Callable[..., Client]


@pytest.fixture(scope="module")
def web(node: LocalNode) -> Iterator[httpx.Client]:
    """From the root on: probes and metrics are not below /api/v1."""
    with node.web("") as client:
        yield client


@pytest.fixture
def connect(node: LocalNode) -> Iterator[Connect]:
    """`connect(client_id, version=5, **options of CONNECT)`: accepted clients, closed at the end."""
    with ExitStack() as stack:

        def connected(client_id: str, version: int = 5, **options: Any) -> Client:
            client = stack.enter_context(Client(node, version=version))
            assert 0 == client.connect(client_id, **options).reason
            return client

        yield connected


def ids(clients: list[dict[str, Any]]) -> list[str]:
    return [client["client_id"] for client in clients]


# -- health and metrics


def test_a_running_node_is_alive_and_ready(web: httpx.Client) -> None:
    """Probes get 200 and one word; no version, no name."""
    for path, status in (("/healthz", "ok"), ("/readyz", "ready"), ("/status", "ready")):
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


def test_a_limit_that_was_hit_is_counted(node: LocalNode, web: httpx.Client) -> None:
    """A CONNECT that is too large moves the counter with the name of its limit."""
    key = 'motorcade_limit_refused_total{limit="max_connect_size"}'
    before = scrape(web)[key]
    with Client(node) as client:
        client.send(b"\x10\xff\xff\x03")  # a CONNECT of 65535 bytes
        client.expect_closed()
    wait_until(lambda: scrape(web)[key] == before + 1, "it is so")


# -- clients


def test_clients_come_in_pages_that_cover_all(web: httpx.Client, connect: Connect) -> None:
    """Each client is on exactly one page, in the order of ids, however large the pages are."""
    names = sorted(f"page-{number}" for number in range(25))
    for name in names:
        connect(name)
    for limit, sizes in ((10, [10, 10, 5]), (25, [25]), (24, [24, 1]), (1000, [25])):
        found, seen = pages(web, CLIENTS, limit, search="PAGE-")
        assert (names, sizes) == (ids(found), seen)
    assert 25 == web.get("/api/v1/clients", params={"limit": 3, "search": "page-"}).json()["meta"]["count"]
    everybody = ids(pages(web, CLIENTS, 7)[0])
    assert set(names) <= set(everybody) and sorted(everybody) == everybody


def test_a_search_finds_user_names_too(web: httpx.Client, connect: Connect) -> None:
    """Part of the name is enough, upper or lower case."""
    connect("searched", username="Fahrerin Müller")
    assert ["searched"] == ids(pages(web, CLIENTS, 10, search="müll")[0])
    assert [] == pages(web, CLIENTS, 10, search="nobody-has-this-name")[0]


def test_a_page_has_a_bound(web: httpx.Client) -> None:
    """A limit that is none is refused, not guessed at."""
    for limit in ("0", "-1", "1001", "ten", "", "\N{FULLWIDTH DIGIT NINE}"):
        assert (400, "BAD_REQUEST") == refused(web.get("/api/v1/clients", params={"limit": limit})), limit


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


def test_a_client_in_full(web: httpx.Client, connect: Connect) -> None:
    """Whatever its id looks like, a client is found with its session, subscriptions and what is in flight to it."""
    for client_id in ("plain", "with/slashes/in it", "ünïcode €", "per%2Fcent?&=;", ".."):
        assert_shown_in_full(web, connect, client_id)


def assert_shown_in_full(web: httpx.Client, connect: Connect, client_id: str) -> None:
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
    wait_until(lambda: not web.get(f"/api/v1/clients/{quoted(client_id)}").json()["client"]["connected"], "it is so")
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
    assert {
        "client_id": "kicked",
        "result": "disconnected",
        "node": web.get("/api/v1/node").json()["node"],
    } == answer.json()
    (goodbye,) = kicked.expect_closed()
    assert (DISCONNECT, 0x98) == (goodbye.type, goodbye.reason)
    other.expect_nothing()
    wait_until(lambda: web.get("/api/v1/clients/kicked").status_code == 404, "it is so")


def test_removing_a_session_of_an_absent_client_publishes_its_will(web: httpx.Client, connect: Connect) -> None:
    """A delayed will goes out when the session ends, whoever ends it."""
    watch = connect("will-watch")
    watch.subscribe("will/delayed", 1)
    delay = prop(0x18, 600)
    options = {"clean": False, "properties": prop(SESSION_EXPIRY, 600)}
    absent = connect("absent", will=Will("will/delayed", b"gone", qos=1, properties=delay), **options)
    absent.abort()
    wait_until(lambda: not web.get("/api/v1/clients/absent").json()["client"]["connected"], "it is so")
    watch.expect_nothing()
    assert "session removed" == web.delete("/api/v1/clients/absent").json()["result"]
    assert b"gone" == watch.receive().payload
    assert 404 == web.get("/api/v1/clients/absent").status_code


# -- plugins, node, configuration


def test_the_node_tells_about_itself(node: LocalNode, web: httpx.Client) -> None:
    """Where it listens, what it runs, how it is."""
    found = web.get("/api/v1/node").json()
    assert ("ready", os.getpid()) == (found["state"], found["pid"])
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


def test_a_plugin_that_does_not_exist_is_refused(web: httpx.Client, tmp_path: Path) -> None:
    """By name or by path, with a sentence."""
    for name in ("no-such-plugin", "../../etc/passwd"):
        answer = web.post("/api/v1/plugins/missing", json={"path": f"{tmp_path}/nowhere/x/{name}"})
        assert (409, True) == (answer.status_code, "there is no plugin" in answer.json()["message"])


def test_plugins_come_by_path_only_from_folders_of_the_configuration(tmp_path: Path) -> None:
    """By default from none; a plugin by name needs none."""
    mine = tmp_path / "mine.py"
    mine.write_text("raise SystemExit('this must not run')")
    with (
        LocalNode(flags={"http.plugin_paths": []}) as node,
        node.web("") as web,
    ):
        for path in (mine, EXAMPLE):
            answer = web.post("/api/v1/plugins/mine", json={"path": str(path)})
            assert (409, True) == (answer.status_code, "http.plugin_paths" in answer.json()["message"])
        assert 201 == web.post("/api/v1/plugins/access", json={}).status_code
    with (
        LocalNode(flags={"http.plugin_paths": str(EXAMPLE.parent)}) as node,
        node.web("") as web,
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
    assert (409, True) == (answer.status_code, "written by every user" in answer.json()["message"])
    if os.geteuid() == 0:  # only root can give files away
        theirs.chmod(0o600)
        os.chown(theirs, 65534, 65534)
        answer = web.post("/api/v1/plugins/theirs", json={"path": str(theirs)})
        assert (409, True) == (answer.status_code, "another user" in answer.json()["message"])
    assert 200 == web.get("/healthz").status_code


def test_a_reload_takes_a_good_file_and_refuses_a_bad_one() -> None:
    """What is wrong is said with its line; the node serves on with what it had, and takes the next good file."""
    with LocalNode("[plugins.retained]\nmax_messages = 10\n") as node:
        file = node.file
        with (
            node.web("") as web,
            Client(node) as client,
        ):
            client.connect("c")
            file.write_text("[plugins.retained]\nmax_messages = 10\n\n[session]\nwindw = 3\n")
            answer = web.post("/api/v1/config/reload")
            assert (409, "CONFLICT") == refused(answer)
            assert "windw" in answer.json()["message"] and ":5" in answer.json()["message"]
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


def test_on_loopback_other_names_are_not_answered(web: httpx.Client) -> None:
    """A web page that points its own name to 127.0.0.1 reads nothing. Names of this machine may have any port.

    A load balancer that names no host, as HTTP/1.0 allows, may look whether the node is ready.
    """
    for host in ("evil.example", "evil.example:18083", "127.0.0.1.evil.example", "", "[::2]"):
        for path in ("/healthz", "/metrics", "/api/v1/clients"):
            if path == "/healthz" and not host:
                assert 200 == web.get(path, headers={"Host": host}).status_code
                continue
            assert (403, "FORBIDDEN") == refused(web.get(path, headers={"Host": host})), host
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:18083"):
        assert 200 == web.get("/healthz", headers={"Host": host}).status_code, host


def test_pages_of_other_sites_change_nothing(web: httpx.Client, connect: Connect) -> None:
    """A browser tells where a request comes from; one from elsewhere is refused before anything happens."""
    client = connect("browsed")
    for origin in ("https://evil.example", "null", "http://localhost:1"):
        answer = web.delete("/api/v1/clients/browsed", headers={"Origin": origin})
        assert (403, "FORBIDDEN") == refused(answer), origin
        client.expect_nothing()


def test_each_bad_body_gets_its_own_answer(web: httpx.Client) -> None:
    json, bad = "application/json", (400, "BAD_REQUEST")
    for content, kind, answer in (
        (b"x" * (MAX_BODY + 1), json, (413, "PAYLOAD_TOO_LARGE")),
        (b"{", json, bad),
        (b"\xff", json, bad),
        (b"[]", json, bad),
        (b'{"pth": "x"}', json, bad),
        (b'{"path": 5}', json, bad),
        (b"[" * 60_000, json, bad),
        (b"{}", "text/plain", (415, "UNSUPPORTED_MEDIA_TYPE")),
    ):
        assert answer == refused(web.post("/api/v1/plugins/x", content=content, headers={"Content-Type": kind}))


def test_unknown_paths_and_methods_are_answered_in_json(web: httpx.Client) -> None:
    for method, path, answer in (
        ("GET", "/", (404, "NOT_FOUND")),
        ("GET", "/api/v1/nothing", (404, "NOT_FOUND")),
        ("GET", "/api/v2/clients", (404, "NOT_FOUND")),
        ("POST", "/api/v1/clients", (405, "METHOD_NOT_ALLOWED")),
        ("GET", "/api/v1/config/reload", (405, "METHOD_NOT_ALLOWED")),
        ("DELETE", "/metrics", (405, "METHOD_NOT_ALLOWED")),
    ):
        assert answer == refused(web.request(method, path)), (method, path)


def test_garbage_on_the_control_port_hurts_nobody(node: LocalNode, web: httpx.Client, connect: Connect) -> None:
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


def test_a_token_is_wanted_where_one_is_set(caplog: pytest.LogCaptureFixture) -> None:
    """Probes are open, everything else wants the very token, which is in no log; the address may then be any."""
    with LocalNode('[http]\ntoken = "s3cret"\n') as node, node.web("") as web:
        for path in ("/healthz", "/readyz", "/status"):
            assert 200 == web.get(path).status_code
        for path in ("/metrics", "/api/v1/clients", "/api/v1/nothing"):
            for given in (None, "Bearer wrong", "Bearer s3cret2", "Basic s3cret", "s3cret", "Bearer"):
                answer = web.get(path, headers={"Authorization": given} if given else {})
                assert (401, "UNAUTHORIZED") == refused(answer)
                assert "Bearer" == answer.headers["www-authenticate"]
        assert 200 == web.get("/metrics", headers={"Authorization": "Bearer s3cret"}).status_code
        assert 404 == web.get("/api/v1/nothing", headers={"Authorization": "bearer s3cret"}).status_code
    assert "s3cret" not in caplog.text
