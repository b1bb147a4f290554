"""Requests and vehicles over the control port: shapes, pages, and what is refused. Commands show the rest."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import pytest

from motorcade.core.receipt import State
from motorcade.core.vin import make_vin
from motorcade.http.answers import MAX_BODY
from motorcade.http.api.fanout import MAX_BATCH, MAX_TARGETS
from motorcade.plugins.fanout.views import GcView
from motorcade.storage.ports import StoreError
from tests.scenarios.witness import wait_until
from tests.support.fanout import get, told, topic_of, vehicle
from tests.support.local import LocalNode
from tests.support.tables import each_case
from tests.unit.http.answers import pages, refused

VIN = make_vin(1)


def test_a_batch_is_sent_and_followed(web: httpx.Client) -> None:
    vins = sorted(make_vin(number) for number in range(10, 14))
    sent = web.post("/fanout/requests/life/send", json={"ids": [*vins, vins[0]], "data": "x"})
    assert (202, {"accepted": 4, "duplicates": 1, "replaced": 0, "rejected": 0}) == (sent.status_code, sent.json())
    view = web.get("/fanout/requests/life").json()
    assert view in web.get("/fanout/requests").json()["data"]
    assert 0 < view.pop("since") <= view.pop("first_at") <= view.pop("last_at")
    states = {"targets": 4, "pending": 4, "states": {"accepted": 4}}
    assert {"request_id": "life", "status": "active", **states} == view
    targets = web.get("/fanout/requests/life/targets").json()
    assert vins == [target["vin"] for target in targets["data"]]
    assert {"count": 4, "cursor": None} == targets["meta"]
    first = targets["data"][0]
    assert first.pop("time") > 0 and first.pop("node")
    assert {
        "vin": vins[0],
        "request_id": "life",
        "delivery_id": f"{vins[0]}.1",
        "state": "accepted",
        "attempt": 0,
        "reason": "",
    } == first
    again = web.post("/fanout/requests/life/send", json={"ids": vins[:1], "data": "x"})
    assert {"accepted": 1, "duplicates": 0, "replaced": 1, "rejected": 0} == again.json()
    batch = {"ids": [VIN], "data": "x", "batch_id": "b1"}
    answers = [web.post("/fanout/requests/twice/send", json=batch).json() for _ in range(2)]
    assert [False, True] == [answer["repeated"] for answer in answers], "a batch with an id is known"


def test_what_is_sent_arrives_as_it_was_meant(node: LocalNode, web: httpx.Client) -> None:
    """Bytes in base64; time, priority and mode are handed on; a batch may be larger than other bodies."""
    vin = make_vin(78)
    batch: dict[str, Any] = {"ids": [vin], "data": base64.b64encode(b"\x00\xff").decode(), "encoding": "base64"}
    options = {"expires_in": 5000, "priority": 9, "mode": "append"}
    for _ in range(2):
        assert 0 == web.post("/fanout/requests/meant/send", json={**batch, **options}).json()["replaced"]
    view = web.get(f"/vehicles/{vin}").json()
    assert (2, f"agent/{vin}/proxy/request/+", "offline") == (view["pending"], view["filter"], view["why"]["reason"])
    for entry in view["waiting"]:
        assert (2, 9) == (entry["size"], entry["priority"])
        assert entry["expires_at"] == pytest.approx(entry["accepted_at"] + 5000)
    with vehicle(node, vin) as client:
        assert [(topic_of(vin, "meant"), b"\x00\xff")] * 2 == [told(client), told(client)]
    large = {"ids": [VIN], "data": "x" * (MAX_BODY + 1)}
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
        ({"ids": [VIN, "short"], "data": ""}, "ids[1]"),
        ({"ids": [VIN], "data": "?", "encoding": "base64"}, "not base64"),
        ({"ids": [VIN], "data": "", "encoding": "utf16"}, "utf16"),
        ({"ids": [VIN], "data": "", "mode": "both"}, "both"),
        ({"ids": [VIN], "data": "", "expires": 5}, "expires"),
        ({"ids": [VIN], "data": "", "expires_in": -1}, "expires_in"),
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
    for vin in vins[:3]:
        with vehicle(node, vin) as client:
            get(client)
            wait_until(lambda vin=vin: not web.get(f"/vehicles/{vin}").json()["pending"], "it has it")  # type: ignore[misc]
    found, sizes = pages(web, "/fanout/requests/pages/targets", 10)
    assert (vins, [10, 10, 5]) == ([target["vin"] for target in found], sizes)
    exact, sizes = pages(web, "/fanout/requests/pages/targets", 25)
    assert (found, [25, 0]) == (exact, sizes)
    acked, sizes = pages(web, "/fanout/requests/pages/targets", 2, state="acked")
    assert (vins[:3], [2, 1]) == ([target["vin"] for target in acked], sizes)
    pending, _ = pages(web, "/fanout/requests/pages/targets", 100, state="pending")
    assert vins[3:] == [target["vin"] for target in pending]
    view = web.get("/fanout/requests/pages").json()
    assert ({"accepted": 22, "acked": 3}, 25, 22) == (view["states"], view["targets"], view["pending"])


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
        ({"limit": str(MAX_TARGETS + 1)}, str(MAX_TARGETS)),
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
        *(web.post(f"/fanout/requests/nope/{verb}") for verb in ("cancel", "pause", "resume")),
    ):
        assert (404, "NOT_FOUND") == refused(answer)
        assert "there is no request" in answer.json()["message"]


def test_a_store_that_does_not_answer_is_503(
    node: LocalNode, web: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise StoreError("the store does not answer")

    monkeypatch.setattr(node.node.control, "ask_fanout", broken)
    assert (503, "UNAVAILABLE") == refused(web.get("/fanout/requests/any"))


@each_case("vin", ["nope", "a%2Fb", VIN.lower(), VIN + "X"])
def test_what_is_no_vin_is_said(web: httpx.Client, vin: str) -> None:
    for path in (f"/vehicles/{vin}", f"/vehicles/{vin}/why"):
        answer = web.get(path)
        assert (400, "BAD_REQUEST") == refused(answer)
        assert "is no VIN" in answer.json()["message"]


def test_a_collection_runs_in_the_background(
    node: LocalNode, web: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it; one at a time; how it ended can be asked for."""
    ending = asyncio.Event()
    figures = {"vehicles": 5, "expired": 4, "cancelled": 3, "data": 2, "octets": 1, "seconds": 0.5}

    async def collect() -> GcView:
        await ending.wait()
        return GcView(**figures)  # type: ignore[arg-type]

    monkeypatch.setattr(node.node.control.fanout(), "gc", collect)
    assert (404, "NOT_FOUND") == refused(web.get("/fanout/gc"))
    started = web.post("/fanout/gc")
    assert (202, "running", None) == (started.status_code, started.json()["state"], started.json()["found"])
    assert (409, "CONFLICT") == refused(web.post("/fanout/gc"))
    node.soon(ending.set)
    wait_until(lambda: web.get("/fanout/gc").json()["state"] != "running", "it has ended")
    done = web.get("/fanout/gc").json()
    assert ("done", figures, "") == (done["state"], done["found"], done["error"])
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
