"""Requests and vehicles over the control port of a real node. Its fan-out is the stand-in of fanouts.py."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from motorcade.core.receipt import State
from motorcade.core.vin import make_vin
from motorcade.http.api.fanout import MAX_BATCH, MOST_TARGETS
from tests.scenarios.witness import wait_until
from tests.support.local import LocalNode
from tests.support.tables import each_case
from tests.support.wire import Client
from tests.unit.http.answers import pages, refused
from tests.unit.http.fanouts import BROKEN, NOW, REFUSED

CONFIG = f"""\
[plugins.fanout]
enabled = false

[plugins.fanouts]
path = "{Path(__file__).with_name("fanouts.py")}"
"""
VIN = make_vin(1)


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with LocalNode(CONFIG) as running:
        yield running


def test_a_batch_is_sent_and_followed(web: httpx.Client) -> None:
    vins = sorted(make_vin(number) for number in range(10, 14))
    sent = web.post("/fanout/requests/life/send", json={"ids": [*vins, vins[0]], "data": "x"})
    assert (202, {"accepted": 4, "duplicates": 1, "replaced": 0, "rejected": 0}) == (sent.status_code, sent.json())
    again = web.post("/fanout/requests/life/send", json={"ids": vins[:1], "data": "x"})
    assert {"accepted": 1, "duplicates": 0, "replaced": 1, "rejected": 0} == again.json()
    view = {
        "request_id": "life",
        "status": "active",
        "since": NOW,
        "first_at": NOW,
        "last_at": NOW + 1,
        "targets": 4,
        "pending": 4,
        "states": {"accepted": 4},
    }
    assert view == web.get("/fanout/requests/life").json()
    assert view in web.get("/fanout/requests").json()["data"]
    targets = web.get("/fanout/requests/life/targets").json()
    assert vins == [target["vin"] for target in targets["data"]]
    assert {"count": 4, "cursor": None} == targets["meta"]
    assert {
        "vin": vins[0],
        "request_id": "life",
        "delivery_id": f"{vins[0]}.1",
        "state": "accepted",
        "time": NOW,
        "attempt": 0,
        "reason": "",
        "node": "",
    } == targets["data"][0]


def test_a_batch_with_an_id_is_told_whether_it_is_known(web: httpx.Client) -> None:
    batch = {"ids": [VIN], "data": "x", "batch_id": "b1"}
    answers = [web.post("/fanout/requests/twice/send", json=batch).json() for _ in range(2)]
    assert [False, True] == [answer["repeated"] for answer in answers]


def test_what_is_sent_arrives_as_it_was_meant(web: httpx.Client) -> None:
    """Bytes in base64; time, priority and mode are handed on; a batch may be larger than other bodies."""
    batch: dict[str, Any] = {"data": base64.b64encode(b"\x00\xff").decode(), "encoding": "base64"}
    options = {"expires_in": 5, "priority": 9, "mode": "append"}
    batch["ids"] = [vin := make_vin(78)]
    assert 202 == web.post("/fanout/requests/meant/send", json={**batch, **options}).status_code
    (entry,) = web.get(f"/vehicles/{vin}").json()["waiting"]
    assert (2, 9, NOW + 5, "append 00ff") == tuple(
        entry[name] for name in ("size", "priority", "expires_at", "publisher")
    )
    large = {"ids": [VIN], "data": "x" * (MAX_BATCH // 2)}
    assert 202 == web.post("/fanout/requests/large/send", json=large).status_code
    larger = web.post("/fanout/requests/large/send", json={"ids": [VIN], "data": "x" * MAX_BATCH})
    assert (413, "PAYLOAD_TOO_LARGE") == refused(larger)


@each_case(
    ("batch", "wanted"),
    [
        ({}, "ids"),
        ({"ids": [], "data": ""}, "length >= 1"),
        ({"ids": [VIN]}, "data"),
        ({"ids": [7], "data": ""}, "Expected `str`, got `int`"),
        ({"ids": [VIN.lower()], "data": ""}, "upper case"),
        ({"ids": [VIN], "data": "?", "encoding": "base64"}, "not base64"),
        ({"ids": [VIN], "data": "", "encoding": "utf16"}, "utf16"),
        ({"ids": [VIN], "data": "", "mode": "both"}, "both"),
        ({"ids": [VIN], "data": "", "expires": 5}, "expires"),
        ({"ids": [VIN, REFUSED], "data": ""}, "not welcome"),
    ],
)
def test_a_wrong_batch_is_answered_with_words(web: httpx.Client, batch: dict[str, Any], wanted: str) -> None:
    answer = web.post("/fanout/requests/wrong/send", json=batch)
    assert (400, "BAD_REQUEST") == refused(answer)
    assert wanted in answer.json()["message"]
    assert 404 == web.get("/fanout/requests/wrong").status_code


def test_targets_come_page_by_page_and_by_state(web: httpx.Client, node: LocalNode) -> None:
    vins = sorted(make_vin(number) for number in range(100, 125))
    web.post("/fanout/requests/pages/send", json={"ids": vins, "data": "x"})
    with Client(node) as client:
        client.connect("tester")
        for vin in vins[:3]:
            client.publish("test/state", f"pages {vin} failed".encode(), 1)
    found, sizes = pages(web, "/fanout/requests/pages/targets", 10)
    assert (vins, [10, 10, 5]) == ([target["vin"] for target in found], sizes)
    exact, sizes = pages(web, "/fanout/requests/pages/targets", 25)
    assert (found, [25, 0]) == (exact, sizes)
    failed, sizes = pages(web, "/fanout/requests/pages/targets", 2, state="failed")
    assert (vins[:3], [2, 1]) == ([target["vin"] for target in failed], sizes)
    assert {"for the test"} == {target["reason"] for target in failed}
    view = web.get("/fanout/requests/pages").json()
    assert ({"accepted": 22, "failed": 3}, 25, 22) == (view["states"], view["targets"], view["pending"])


def test_requests_come_page_by_page(web: httpx.Client) -> None:
    for name in ("r3", "r1", "r2"):
        web.post(f"/fanout/requests/{name}/send", json={"ids": [VIN], "data": "x"})
    found, sizes = pages(web, "/fanout/requests", 2)
    names = [view["request_id"] for view in found]
    assert sorted(names) == names and {"r1", "r2", "r3"} <= set(names)
    assert all(size == 2 for size in sizes[:-1])


@each_case(
    ("query", "wanted"),
    [
        ({"limit": "0"}, "limit must be a number from 1"),
        ({"limit": str(MOST_TARGETS + 1)}, str(MOST_TARGETS)),
        ({"limit": "ten"}, "'ten'"),
        ({"state": "aked"}, "did you mean 'acked'?"),
        ({"state": "lost in a tunnel"}, ", ".join(sorted((*State, "pending")))),
    ],
)
def test_a_wrong_query_is_answered_with_words(web: httpx.Client, query: dict[str, str], wanted: str) -> None:
    answer = web.get("/fanout/requests/pages/targets", params=query)
    assert (400, "BAD_REQUEST") == refused(answer)
    assert wanted in answer.json()["message"]


def test_what_is_not_there_is_not_found(web: httpx.Client) -> None:
    for answer in (
        web.get("/fanout/requests/nope"),
        web.get("/fanout/requests/nope/targets"),
        web.post("/fanout/requests/nope/cancel"),
        web.post("/fanout/requests/nope/pause"),
        web.post("/fanout/requests/nope/resume"),
        web.get("/fanout/requests/a%2Fb"),
    ):
        assert (404, "NOT_FOUND") == refused(answer)
        assert "there is no request" in answer.json()["message"]


def test_a_store_that_does_not_answer_is_503(web: httpx.Client) -> None:
    assert (503, "UNAVAILABLE") == refused(web.get(f"/fanout/requests/{BROKEN}"))


@each_case("vin", ["nope", "a%2Fb", VIN.lower(), VIN + "X"])
def test_what_is_no_vin_is_said(web: httpx.Client, vin: str) -> None:
    for path in (f"/vehicles/{vin}", f"/vehicles/{vin}/why"):
        answer = web.get(path)
        assert (400, "BAD_REQUEST") == refused(answer)
        assert "is no VIN" in answer.json()["message"]


def test_a_collection_runs_in_the_background(web: httpx.Client, node: LocalNode) -> None:
    """Nobody waits for it; one at a time; how it ended can be asked for."""
    assert (404, "NOT_FOUND") == refused(web.get("/fanout/gc"))
    started = web.post("/fanout/gc")
    assert (202, "running", None) == (started.status_code, started.json()["state"], started.json()["found"])
    assert (409, "CONFLICT") == refused(web.post("/fanout/gc"))
    with Client(node) as client:
        client.connect("tester")
        client.publish("test/collected", b"", 1)
    wait_until(lambda: web.get("/fanout/gc").json()["state"] != "running", "it has ended")
    done = web.get("/fanout/gc").json()
    found = {"vehicles": 5, "expired": 4, "cancelled": 3, "data": 2, "octets": 1, "seconds": 0.5}
    assert ("done", found, "") == (done["state"], done["found"], done["error"])
    assert 202 == web.post("/fanout/gc").status_code


def test_a_node_without_fan_out_says_which_plugin_to_load() -> None:
    with LocalNode("[plugins.fanout]\nenabled = false\n") as node, node.web() as web:
        for answer in (
            web.get("/fanout/requests"),
            web.get("/fanout/requests/x"),
            web.post("/fanout/gc"),
            web.get(f"/vehicles/{VIN}"),
            web.get(f"/vehicles/{VIN}/why"),
        ):
            assert (404, "NOT_FOUND") == refused(answer)
            assert "motorcade plugin load fanout" in answer.json()["message"]
