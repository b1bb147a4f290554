"""Queues, streams and capture rules over the control port. `motorcade queue`, `stream` and `capture` show the rest."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import quote

import httpx

from motorcade.control import MAX_BYTES, MAX_FOUND, SOURCE_EVENTS
from tests.scenarios.witness import metrics
from tests.support.consumers import connected, fill, numbered, settled, subscribe, take
from tests.support.local import LocalNode
from tests.unit.http.answers import pages, refused

CONFIG = """\
[plugins.queues.queue.fixed]
topics = ["fixed/#"]

[plugins.streams.stream.fixed]
topics = ["fixed/#", "more/+"]
retention = 3600

[plugins.capture.rule.fixed]
topics = ["copied/#"]
to = "stream:fixed"
"""

#: What each must be given besides its topics.
NOUNS: dict[str, dict[str, Any]] = {"queues": {}, "streams": {}, "captures": {"to": "stream:fixed"}}


def test_the_life_of_a_declared_thing(web: httpx.Client) -> None:
    """Made, shown, listed, changed and removed; what it is told in full is what it was given, and the defaults."""
    made = web.post("/queues/life", json={"topics": ["life/#"], "max_messages": 5, "ack_timeout": 1.5})
    view = made.json()
    options = {
        "topics": ["life/#"],
        "kind": "regular",
        "key": view["key"],
        "strategy": "round_robin",
        "max_messages": 5,
        "max_bytes": 1 << 30,
        "overflow": view["overflow"],
        "retention": 604800,
        "ack_timeout": 1.5,
        "redispatch_delay": 0.1,
        "max_attempts": 10,
        "dead_letter": "",
        "priorities": 1,
    }
    assert (201, options) == (made.status_code, {key: view[key] for key in options})
    assert ("life", "command", 0, 0) == tuple(view[key] for key in ("name", "origin", "messages", "consumers"))
    assert view == web.get("/queues/life").json()
    listed = web.get("/queues").json()
    assert ["fixed", "life"] == [entry["name"] for entry in listed["data"]]
    assert {"count": 2, "cursor": None} == listed["meta"]
    patched = web.patch("/queues/life", json={"strategy": "random"})
    assert (200, view | {"strategy": "random"}) == (patched.status_code, patched.json())
    put = web.put("/queues/life", json={"topics": ["other"]})
    assert (200, ["other"], "round_robin") == (put.status_code, put.json()["topics"], put.json()["strategy"])
    assert put.json()["max_messages"] > 5, "what is not given is the default again"
    gone = web.delete("/queues/life")
    assert (200, {"name": "life", "result": "deleted"}) == (gone.status_code, gone.json())
    assert (404, "NOT_FOUND") == refused(web.get("/queues/life"))
    fixed = web.get("/streams/fixed").json()
    assert (3600, 10 << 30, 0) == (fixed["retention"], fixed["max_bytes"], fixed["max_messages"])


WRONG_OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("queues", {"max_mesages": 5}, "queue: unknown option 'max_mesages'; did you mean 'max_messages'?"),
    ("queues", {"zzz": 5}, "unknown option 'zzz'; known are: ack_timeout, "),
    ("queues", {"kind": "best"}, "queue: kind = 'best': must be one of 'regular', "),
    ("queues", {"topics": "a"}, "queue: topics = 'a': Expected array, got str"),
    ("queues", {"max_messages": -1}, "queue: max_messages = -1: Expected int >= "),
    ("queues", {"max_messages": "many"}, "max_messages"),
    ("queues", {"strategy": "fair"}, "round_robin"),
    ("queues", {"overflow": "panic"}, "drop_oldest"),
    ("queues", {"priorities": 11}, "priorities"),
    ("queues", {"priorities": 0}, "priorities"),
    ("queues", {"key": "colour"}, "property:"),
    ("queues", {"topics": ["a/#/b"]}, "a/#/b"),
    ("queues", {"topics": ["$queue/x"]}, "$queue/x"),
    ("queues", {"topics": ["$share/g/t"]}, "$share/g/t"),
    ("queues", {"dead_letter": "-x"}, "-x"),
    ("streams", {"retention": -1}, "retention"),
    ("streams", {"colour": "red"}, "colour"),
    ("streams", {"topics": ["a/+b"]}, "a/+b"),
    ("streams", {"topics": ["$stream/x"]}, "$stream/x"),
    ("streams", {"topics": "t"}, "topics"),
    ("captures", {"to": "stream:fixed", "max_pending": 0}, "max_pending"),
    ("captures", {"to": "stream:fixed", "colour": "red"}, "colour"),
    ("captures", {}, "capture: to must be given"),
]


def test_a_wrong_option_is_named(web: httpx.Client) -> None:
    """With what it may be; nothing is made then, and nothing changes."""
    failures = []
    for nouns, given, wanted in WRONG_OPTIONS:
        answer = web.post(f"/{nouns}/wrong", json={"topics": ["a"]} | given)
        if (400, "BAD_REQUEST") != refused(answer) or wanted not in answer.json()["message"]:
            failures.append(f"{nouns} {given}: {answer.text}")
        if web.get(f"/{nouns}/wrong").status_code != 404:
            failures.append(f"{nouns} {given}: it was made")
    assert not failures, "\n".join(failures)
    web.post("/queues/steady", json={"topics": ["steady"]})
    before = web.get("/queues/steady").json()
    for answer in (
        web.put("/queues/steady", json={"topics": ["a"], "knd": "regular"}),
        web.patch("/queues/steady", json={"knd": "regular"}),
        web.patch("/queues/steady", json={"priorities": 11}),
    ):
        assert (400, "BAD_REQUEST") == refused(answer)
    assert before == web.get("/queues/steady").json()
    web.delete("/queues/steady")


def test_a_bad_name_or_body_is_refused(web: httpx.Client) -> None:
    for nouns, more in NOUNS.items():
        for name in ("-x", "a b", "#", "a/b", "ü", "a+b", "x" * 65):
            answer = web.post(f"/{nouns}/{quote(name, safe='')}", json={"topics": ["t"], **more})
            assert (400, "BAD_REQUEST") == refused(answer), name
            assert "letters, digits" in answer.json()["message"], name
    for content in (b"{", b"[]", b'"text"', b"\xff"):
        answer = web.post("/queues/body", content=content, headers={"Content-Type": "application/json"})
        assert (400, "BAD_REQUEST") == refused(answer), content
    for method in ("POST", "PUT", "DELETE"):
        assert (405, "METHOD_NOT_ALLOWED") == refused(web.request(method, "/queues")), "one thing at a time"


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


def test_what_is_there_and_what_is_configured_stands_in_the_way(node: LocalNode, web: httpx.Client) -> None:
    """What the configuration declares works, and is changed there."""
    for nouns, more in NOUNS.items():
        before = web.get(f"/{nouns}/fixed").json()
        for method in ("PUT", "PATCH", "DELETE", "POST"):
            body: dict[str, Any] = {} if method == "DELETE" else {"json": {"topics": ["other"], **more}}
            answer = web.request(method, f"/{nouns}/fixed", **body)
            assert (409, "CONFLICT") == refused(answer), (method, nouns)
            assert "configuration" in answer.json()["message"], (method, nouns)
        assert "configuration" == before["origin"]
        assert before == web.get(f"/{nouns}/fixed").json()
    fill(node, [("fixed/a", b"1"), ("more/a", b"2"), ("copied/a", b"3")])
    found, _ = pages(web, "/streams/fixed/messages", 100, by="after", first="0")
    assert ["fixed/a", "more/a", "copied/a"] == [entry["topic"] for entry in found]


def test_a_queue_for_dead_letters(web: httpx.Client) -> None:
    """One that takes dead letters only has no topics; while others name it, it cannot go."""
    assert 201 == web.post("/queues/dead", json={"topics": []}).status_code
    assert "dead" == web.post("/queues/jobs", json={"topics": ["t"], "dead_letter": "dead"}).json()["dead_letter"]
    answer = web.delete("/queues/dead")
    assert 409 == answer.status_code and "jobs" in answer.json()["message"], "it is in use"
    assert [200, 200] == [web.delete(f"/queues/{name}").status_code for name in ("jobs", "dead")]


def test_a_plugin_that_is_not_loaded_is_named() -> None:
    with LocalNode("[plugins.capture]\nenabled = false\n") as node, node.web() as web:
        for answer in (web.get("/captures"), web.post("/captures/x", json={}), web.get("/captures/x/messages")):
            assert (404, "NOT_FOUND") == refused(answer)
            assert "`motorcade plugin load capture`" in answer.json()["message"]
        assert not [series for series in metrics(node) if 'noun="capture"' in series]


# -- messages


def test_messages_are_text_or_base64(node: LocalNode, web: httpx.Client) -> None:
    """Bytes come as they are; which of the two it is stands beside them."""
    raw = [b"plain", "Grüße".encode(), b"", b"\xff\x00\xfe", b"a\x00b"]
    for nouns in ("queues", "streams"):
        web.post(f"/{nouns}/bytes", json={"topics": ["bytes"]})
    with connected(node, "packer") as client:
        for payload in raw:
            client.publish("bytes", payload, 1)
    for nouns in ("queues", "streams"):
        found, _ = pages(web, f"/{nouns}/bytes/messages", 100, by="after", first="0")
        decoded = [
            base64.b64decode(entry["payload"]) if entry["encoding"] == "base64" else entry["payload"].encode()
            for entry in found
        ]
        assert raw == decoded
        assert ["utf8", "utf8", "utf8", "base64", "utf8"] == [entry["encoding"] for entry in found]
        assert {"position", "topic", "payload", "encoding", "time", "publisher", "guid", "properties"} == set(found[0])
        assert ("bytes", "packer") == (found[0]["topic"], found[0]["publisher"])


def test_messages_come_in_pages_that_cover_all(node: LocalNode, web: httpx.Client) -> None:
    """Each is on exactly one page, the last page says that it is the last, and nothing is taken out."""
    web.post("/queues/many", json={"topics": ["many"]})
    assert {"data": [], "meta": {"count": 0, "cursor": None}} == web.get("/queues/many/messages").json()
    fill(node, numbered("many", 120))
    for limit, sizes in ((50, [50, 50, 20]), (60, [60, 60]), (119, [119, 1]), (120, [120]), (MAX_FOUND, [120])):
        found, seen = pages(web, "/queues/many/messages", limit, by="after", first="0")
        assert ([str(number) for number in range(120)], sizes) == ([entry["payload"] for entry in found], seen)
    positions = [entry["position"] for entry in found]
    assert sorted(set(positions)) == positions
    assert 100 == web.get("/queues/many/messages").json()["meta"]["count"]
    rest = web.get(f"/queues/many/messages?after={positions[-3]}").json()["data"]
    assert positions[-2:] == [entry["position"] for entry in rest]
    with connected(node) as client:
        subscribe(client, "$queue/many")
        take(client, 5, ack=False)
        view = web.get("/queues/many").json()
        assert (120, 1) == (view["messages"], view["consumers"])
    for query in ("limit=0", "limit=1001", "limit=x", "limit=", "after=-1", "after=x", f"after={2**63}"):
        answer = web.get(f"/queues/many/messages?{query}")
        assert (400, "BAD_REQUEST") == refused(answer), query
        assert query.partition("=")[0] in answer.json()["message"]


def test_a_page_of_large_messages_is_short(node: LocalNode, web: httpx.Client) -> None:
    """However many are asked for, a page ends soon after MAX_BYTES."""
    size, count = 128 * 1024, 130
    web.post("/queues/large", json={"topics": ["large"]})
    with connected(node) as client:
        for _ in range(count):
            client.publish("large", b"x" * size, 1)
    found, sizes = pages(web, "/queues/large/messages", MAX_FOUND, by="after", first="0")
    assert count == len(found)
    assert len(sizes) > 1
    assert max(sizes) * size < 2 * MAX_BYTES


# -- metrics


def test_metrics_tell_how_many_there_are(node: LocalNode, web: httpx.Client) -> None:
    series = 'motorcade_declared{noun="queue"}'
    before = metrics(node)[series]
    web.post("/queues/counted", json={"topics": ["a"]})
    assert before + 1 == metrics(node)[series]
    web.delete("/queues/counted")
    assert before == metrics(node)[series]


def test_metrics_count_what_becomes_of_messages_of_sources(node: LocalNode) -> None:
    """Every kind of source has its series before anything happens."""

    def counted() -> dict[str, float]:
        start = 'motorcade_source_total{source="retained",event="'
        found = {series: value for series, value in metrics(node).items() if series.startswith(start)}
        return {series.removeprefix(start).removesuffix('"}'): value for series, value in found.items()}

    before = counted()
    assert set(SOURCE_EVENTS) == before.keys()
    with connected(node) as client:
        client.publish("kept/a", b"1", 1, retain=True)
        client.publish("kept/b", b"2", 1, retain=True)
        client.subscribe("kept/#", 1)
        assert {b"1", b"2"} == {client.receive().payload, client.receive().payload}
        settled(client)
    after = counted()
    moved = {event: after[event] - before[event] for event in after if after[event] != before[event]}
    assert {"given": 2, "delivered": 2} == moved
