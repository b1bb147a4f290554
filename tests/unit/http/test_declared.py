"""What operators declare, over the control port of a real node. Its queues are the boxes of boxes.py."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from motorcade.control import MOST_FOUND, MOST_OCTETS, SOURCE_EVENTS
from tests.support.node import NodeProcess
from tests.support.wire import Client
from tests.unit.http.answers import pages, refused
from tests.unit.http.conftest import PATIENCE

BOXES = Path(__file__).with_name("boxes.py")
CONFIG = f"""\
[plugins.queues]
enabled = false

[plugins.capture]
enabled = false

[plugins.boxes]
path = "{BOXES}"

[plugins.boxes.box.fixed]
topics = ["boxes/fixed"]
"""


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(http=True, config=CONFIG) as running:
        yield running


def test_the_life_of_a_declared_thing(web: httpx.Client) -> None:
    """Made, shown, listed, changed and removed; what it is told in full is what it was given."""
    made = web.post("/queues/life", json={"topics": ["boxes/life"], "max_messages": 5})
    options = {"topics": ["boxes/life"], "kind": "wooden", "max_messages": 5, "token": 0}
    view = {"name": "life", "origin": "command", **options, "messages": 0}
    assert (201, view) == (made.status_code, made.json())
    assert view == web.get("/queues/life").json()
    listed = web.get("/queues").json()
    assert ["fixed", "life"] == [entry["name"] for entry in listed["data"]]
    assert {"count": 2, "cursor": None} == listed["meta"]

    patched = web.patch("/queues/life", json={"kind": "tin"})
    assert (200, view | {"kind": "tin"}) == (patched.status_code, patched.json())
    put = web.put("/queues/life", json={"topics": ["boxes/other"]})
    assert 200 == put.status_code
    assert view | {"topics": ["boxes/other"], "max_messages": 10_000} == put.json()

    gone = web.delete("/queues/life")
    assert (200, {"name": "life", "result": "deleted"}) == (gone.status_code, gone.json())
    assert (404, "NOT_FOUND") == refused(web.get("/queues/life"))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"topics": ["a"], "max_mesages": 5}, "queue: unknown option 'max_mesages'; did you mean 'max_messages'?"),
        ({"topics": ["a"], "zzz": 5}, "unknown option 'zzz'; known are: kind, max_messages, token, topics"),
        ({"topics": ["a"], "kind": "paper"}, "queue: kind = 'paper': must be one of 'wooden', 'tin'"),
        ({"topics": "a"}, "queue: topics = 'a': Expected array, got str"),
        ({"topics": []}, "queue: topics = []: Expected array of length >= 1"),
        ({"topics": ["a"], "max_messages": -1}, "queue: max_messages = -1: Expected int >= 0"),
        ({"topics": ["a"], "token": "hush"}, "queue: token = ***: Expected int, got str"),
        ({}, "queue: topics must be given"),
        ({"topics": ["a"], "kind": "tin", "max_messages": 10**6}, "queue: max_messages: a tin box is small"),
        ({"topics": ["forbidden"]}, "topics: not this one"),
    ],
    ids=["near", "far", "choice", "type", "empty", "range", "secret", "missing", "together", "by the plugin"],
)
def test_a_wrong_option_is_named(web: httpx.Client, given: dict[str, Any], wanted: str) -> None:
    """With what it may be; nothing is made then, and nothing changes."""
    answer = web.post("/queues/wrong", json=given)
    assert (400, "BAD_REQUEST") == refused(answer)
    assert wanted in answer.json()["message"]
    assert 404 == web.get("/queues/wrong").status_code


def test_a_wrong_change_is_refused_and_changes_nothing(web: httpx.Client) -> None:
    web.post("/queues/steady", json={"topics": ["boxes/steady"]})
    before = web.get("/queues/steady").json()
    for answer in (
        web.put("/queues/steady", json={"kind": "tin"}),  # topics must be given again
        web.put("/queues/steady", json={"topics": ["a"], "knd": "tin"}),
        web.patch("/queues/steady", json={"knd": "tin"}),
        web.patch("/queues/steady", json={"kind": "tin", "max_messages": 10**6}),
    ):
        assert (400, "BAD_REQUEST") == refused(answer)
    assert before == web.get("/queues/steady").json()


@pytest.mark.parametrize("name", ["-x", "a b", "%23", "x" * 65, "a+b", "a%2Fb"])
def test_a_bad_name_is_refused(web: httpx.Client, name: str) -> None:
    answer = web.post(f"/queues/{name}", json={"topics": ["a"]})
    assert (400, "BAD_REQUEST") == refused(answer)
    assert "letters, digits" in answer.json()["message"]


def test_what_is_not_there_is_not_found(web: httpx.Client) -> None:
    for answer in (
        web.get("/queues/nope"),
        web.put("/queues/nope", json={"topics": ["a"]}),
        web.patch("/queues/nope", json={}),
        web.delete("/queues/nope"),
        web.get("/queues/nope/messages"),
    ):
        assert (404, "NOT_FOUND") == refused(answer)
        assert "nope" in answer.json()["message"]


def test_what_is_there_and_what_is_configured_stands_in_the_way(web: httpx.Client) -> None:
    assert (409, "CONFLICT") == refused(web.post("/queues/fixed", json={"topics": ["a"]}))
    assert (409, "CONFLICT") == refused(web.put("/queues/fixed", json={"topics": ["a"]}))
    assert (409, "CONFLICT") == refused(web.patch("/queues/fixed", json={"kind": "tin"}))
    assert (409, "CONFLICT") == refused(web.delete("/queues/fixed"))
    assert ("configuration", "wooden") == (
        web.get("/queues/fixed").json()["origin"],
        web.get("/queues/fixed").json()["kind"],
    )


def test_a_plugin_that_is_not_loaded_is_named(web: httpx.Client) -> None:
    for answer in (web.get("/captures"), web.post("/captures/x", json={}), web.get("/captures/x/messages")):
        assert (404, "NOT_FOUND") == refused(answer)
        assert "`motorcade plugin load capture`" in answer.json()["message"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_only_one_thing_at_a_time_is_changed(web: httpx.Client, method: str) -> None:
    assert (405, "METHOD_NOT_ALLOWED") == refused(web.request(method, "/queues"))


@pytest.mark.parametrize("content", [b"{", b"[]", b'"text"', b"\xff"])
def test_a_body_that_is_no_object_is_refused(web: httpx.Client, content: bytes) -> None:
    answer = web.post("/queues/body", content=content, headers={"Content-Type": "application/json"})
    assert (400, "BAD_REQUEST") == refused(answer)


# -- messages


def test_messages_are_text_or_base64(node: NodeProcess, web: httpx.Client) -> None:
    """Bytes come as they are; which of the two it is stands beside them."""
    web.post("/queues/bytes", json={"topics": ["boxes/bytes"]})
    raw = [b"plain", "Grüße".encode(), b"", b"\xff\x00\xfe", b"a\x00b"]
    with Client(node) as client:
        client.connect("packer")
        for payload in raw:
            client.publish("boxes/bytes", payload, 1)
    found, _ = pages(web, "/queues/bytes/messages", 100, by="after", first="0")
    decoded = [
        base64.b64decode(entry["payload"]) if entry["encoding"] == "base64" else entry["payload"].encode()
        for entry in found
    ]
    assert raw == decoded
    assert ["utf8", "utf8", "utf8", "base64", "utf8"] == [entry["encoding"] for entry in found]
    first = found[0]
    assert isinstance(first.pop("time"), float)
    assert {
        "position": 1,
        "topic": "boxes/bytes",
        "payload": "plain",
        "encoding": "utf8",
        "publisher": "packer",
        "guid": "00ff",
        "properties": {"attempts": "0"},
    } == first


def test_messages_come_in_pages_that_cover_all(node: NodeProcess, web: httpx.Client) -> None:
    """Each is on exactly one page, and the last page says that it is the last."""
    web.post("/queues/many", json={"topics": ["boxes/many"]})
    assert {"data": [], "meta": {"count": 0, "cursor": None}} == web.get("/queues/many/messages").json()
    with Client(node) as client:
        client.connect("filler")
        for number in range(120):
            client.publish("boxes/many", b"%d" % number, 1)
    for limit, sizes in ((50, [50, 50, 20]), (60, [60, 60]), (119, [119, 1]), (120, [120]), (MOST_FOUND, [120])):
        found, seen = pages(web, "/queues/many/messages", limit, by="after", first="0")
        assert (list(range(1, 121)), sizes) == ([entry["position"] for entry in found], seen)
    assert 100 == web.get("/queues/many/messages").json()["meta"]["count"]
    assert [119, 120] == [e["position"] for e in web.get("/queues/many/messages?after=118").json()["data"]]


def test_a_page_of_large_messages_is_short(node: NodeProcess, web: httpx.Client) -> None:
    """However many are asked for, a page ends soon after MOST_OCTETS."""
    web.post("/queues/large", json={"topics": ["boxes/large"]})
    size, count = 128 * 1024, 130
    with Client(node) as client:
        client.connect("heavy")
        for _ in range(count):
            client.publish("boxes/large", b"x" * size, 1)
    found, sizes = pages(web, "/queues/large/messages", MOST_FOUND, by="after", first="0")
    assert list(range(1, count + 1)) == [entry["position"] for entry in found]
    assert len(sizes) > 1
    assert max(sizes) * size < 2 * MOST_OCTETS


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "limit=", "after=-1", "after=x", f"after={2**63}"]
)
def test_a_page_has_bounds(web: httpx.Client, query: str) -> None:
    """What is no position or no number of messages is refused, not guessed at."""
    answer = web.get(f"/queues/fixed/messages?{query}")
    assert (400, "BAD_REQUEST") == refused(answer)
    assert query.partition("=")[0] in answer.json()["message"]


# -- metrics


def test_metrics_tell_how_many_there_are(node: NodeProcess, web: httpx.Client) -> None:
    def counted() -> int:
        page = httpx.get(f"http://{node.http}/metrics", trust_env=False, timeout=PATIENCE).text
        (line,) = [line for line in page.splitlines() if line.startswith('motorcade_declared{noun="queue"} ')]
        assert 'noun="capture"' not in page
        return int(line.split()[-1])

    before = counted()
    web.post("/queues/counted", json={"topics": ["a"]})
    assert before + 1 == counted()
    web.delete("/queues/counted")
    assert before == counted()


def test_metrics_count_what_becomes_of_messages_of_sources(node: NodeProcess) -> None:
    """Every kind of source has its series before anything happens."""

    def counted() -> dict[str, int]:
        page = httpx.get(f"http://{node.http}/metrics", trust_env=False, timeout=PATIENCE).text
        start = 'motorcade_source_total{source="retained",event="'
        found = [line.removeprefix(start).split('"} ') for line in page.splitlines() if line.startswith(start)]
        return {event: int(value) for event, value in found}

    before = counted()
    assert set(SOURCE_EVENTS) == before.keys()
    with Client(node) as client:
        client.connect("keeper")
        client.publish("kept/a", b"1", 1, retain=True)
        client.publish("kept/b", b"2", 1, retain=True)
        client.subscribe("kept/#", 1)
        assert {b"1", b"2"} == {client.receive().payload, client.receive().payload}
        client.expect_nothing()  # its acknowledgements have been read
    after = counted()
    moved = {event: after[event] - before[event] for event in after if after[event] != before[event]}
    assert {"given": 2, "delivered": 2} == moved
