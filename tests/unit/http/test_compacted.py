"""Compacted queues over the control port of a real node. They are the trays of trays.py."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import motorcade.plugins.ecq
from motorcade.control import MOST_FOUND, MOST_OCTETS
from motorcade.plugins.ecq.options import EcqConfig
from motorcade.plugins.ecq.plugin import EVENTS
from tests.support.node import ROOT, NodeProcess
from tests.support.wire import Client
from tests.unit.http.answers import pages, refused
from tests.unit.http.conftest import PATIENCE

TRAYS = Path(__file__).with_name("trays.py")
CONFIG = f"""\
[plugins.ecq]
enabled = false

[plugins.trays]
path = "{TRAYS}"
"""


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(http=True, config=CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def web(node: NodeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{node.http}/api/v1/compacted", trust_env=False, timeout=PATIENCE) as client:
        yield client


def fill(node: NodeProcess, place: str, *entries: tuple[str, bytes], progress: dict[str, int] | None = None) -> None:
    """Values by key into `{form}/{name}`, and how far its consumers are."""
    with Client(node) as client:
        client.connect("filler")
        for key, payload in entries:
            client.publish(f"trays/{place}/{key}", payload, 1)
        for who, number in (progress or {}).items():
            client.publish(f"trays/consumer/{place}/{who}", b"%d" % number, 1)


def numbered(count: int, size: int = 1) -> list[tuple[str, bytes]]:
    return [(f"k{number}", b"x" * size) for number in range(count)]


@pytest.mark.parametrize("form", ["exclusive", "shared"])
def test_one_is_shown_in_full_and_listed_in_short(node: NodeProcess, web: httpx.Client, form: str) -> None:
    fill(node, f"{form}/life", ("a", b"1"), ("b", b"22"), ("a", b"333"), progress={"life": 2, "else": 0})
    shown = web.get(f"/{form}/life")
    assert 200 == shown.status_code
    view = shown.json()
    assert isinstance(view.pop("oldest"), float)
    consuming = view.pop("consuming")
    short = {"kind": form, "name": "life", "messages": 2, "bytes": 5, "first": 2, "last": 3, "consumers": 2}
    assert short == view
    away = {"connected": False, "acked_at": None, "in_flight": 0}
    other, same = consuming
    assert {"client": "else", "progress": 0, "waiting": 2, **away} == other
    assert {"client": "life", "progress": 2, "waiting": 1, **away} == same
    listed = web.get(f"/{form}").json()
    assert [short] == [entry for entry in listed["data"] if entry["name"] == "life"]


def test_lists_come_in_pages_by_name(node: NodeProcess, web: httpx.Client) -> None:
    """Each is on exactly one page, and the last page says that it is the last."""
    wanted = sorted(f"page {number} & more" for number in range(25))
    for name in wanted:
        fill(node, f"shared/{name}", ("k", b"1"))
    for limit in (1, 7, 25, MOST_FOUND):
        names: list[str] = []
        cursor: str | None = "page"
        while cursor is not None:
            page = web.get("/shared", params={"limit": limit, "cursor": cursor}).json()
            assert len(page["data"]) == page["meta"]["count"] <= limit
            names += [entry["name"] for entry in page["data"]]
            cursor = page["meta"]["cursor"]
        assert wanted == [name for name in names if name.startswith("page ")]


@pytest.mark.parametrize("name", ["rewind", "messages", "Grüße", "a b", "100%", "?x=1", "..", "a&b=c"])
def test_any_client_id_can_be_asked_for(node: NodeProcess, web: httpx.Client, name: str) -> None:
    """Also one that is a word of the API, or has a meaning in addresses."""
    fill(node, f"exclusive/{name}", ("k", b"1"), progress={name: 1})
    quoted = "".join(f"%{octet:02X}" for octet in name.encode())
    assert name == web.get(f"/exclusive/{quoted}").json()["name"]
    assert ["k"] == [entry["properties"]["key"] for entry in web.get(f"/exclusive/{quoted}/messages").json()["data"]]
    assert 0 == web.post(f"/exclusive/{quoted}/rewind", json={"to": 1}).json()["progress"]
    gone = web.delete(f"/exclusive/{quoted}")
    assert (200, {"kind": "exclusive", "name": name, "result": "deleted"}) == (gone.status_code, gone.json())
    assert (404, "NOT_FOUND") == refused(web.get(f"/exclusive/{quoted}"))


# -- messages


def test_messages_are_text_or_base64(node: NodeProcess, web: httpx.Client) -> None:
    fill(node, "exclusive/bytes", ("text", "Grüße".encode()), ("raw", b"\xff\x00"))
    text, raw = web.get("/exclusive/bytes/messages").json()["data"]
    assert ("utf8", "Grüße") == (text["encoding"], text["payload"])
    assert ("base64", b"\xff\x00") == (raw["encoding"], base64.b64decode(raw["payload"]))
    assert isinstance(text.pop("time"), float)
    assert {
        "position": 1,
        "topic": "trays/bytes/text",
        "payload": "Grüße",
        "encoding": "utf8",
        "publisher": "filler",
        "guid": "00ff",
        "properties": {"key": "text"},
    } == text


def test_messages_come_in_pages_that_cover_all(node: NodeProcess, web: httpx.Client) -> None:
    fill(node, "shared/many", *numbered(120))
    for limit, sizes in ((50, [50, 50, 20]), (60, [60, 60]), (119, [119, 1]), (120, [120]), (MOST_FOUND, [120])):
        found, seen = pages(web, "/shared/many/messages", limit, by="after", first="0")
        assert (list(range(1, 121)), sizes) == ([entry["position"] for entry in found], seen)
    assert [119, 120] == [e["position"] for e in web.get("/shared/many/messages?after=118").json()["data"]]


def test_a_page_of_large_messages_is_short(node: NodeProcess, web: httpx.Client) -> None:
    """However many are asked for, a page ends soon after MOST_OCTETS."""
    size, count = 256 * 1024, 70
    fill(node, "exclusive/large", *numbered(count, size))
    found, sizes = pages(web, "/exclusive/large/messages", MOST_FOUND, by="after", first="0")
    assert list(range(1, count + 1)) == [entry["position"] for entry in found]
    assert len(sizes) > 1
    assert (max(sizes) - 50) * size < MOST_OCTETS


# -- rewinding


def test_a_preview_changes_nothing_and_says_what_the_rewind_does(node: NodeProcess, web: httpx.Client) -> None:
    fill(node, "exclusive/back", *numbered(9, 3), ("k1", b"newer"), progress={"back": 10})
    asked = web.post("/exclusive/back/rewind", json={"to": 2, "preview": True})
    told = {
        "kind": "exclusive",
        "name": "back",
        "consumer": "back",
        "preview": True,
        "before": 10,
        "progress": 1,
        "messages": 8,
        "bytes": 7 * 3 + 5,
        "first": 3,
        "last": 10,
        "skipped": 0,
    }
    assert (200, told) == (asked.status_code, asked.json())
    assert 10 == web.get("/exclusive/back").json()["consuming"][0]["progress"]
    assert told | {"preview": False} == web.post("/exclusive/back/rewind", json={"to": 2}).json()
    assert 1 == web.get("/exclusive/back").json()["consuming"][0]["progress"]


def test_only_the_consumer_that_is_named_is_rewound(node: NodeProcess, web: httpx.Client) -> None:
    fill(node, "shared/both", *numbered(4), progress={"one": 4, "two": 4})
    assert 200 == web.post("/shared/both/rewind", json={"to": 3, "consumer": "two"}).status_code
    assert {"one": 4, "two": 2} == {
        entry["client"]: entry["progress"] for entry in web.get("/shared/both").json()["consuming"]
    }


def test_a_time_is_a_number_a_text_or_a_while_ago(node: NodeProcess, web: httpx.Client) -> None:
    """All of them mean the same moment; a text without a zone is in UTC."""
    fill(node, "exclusive/when", *numbered(3), progress={"when": 3})
    first = web.get("/exclusive/when").json()["oldest"]
    earlier = datetime.fromtimestamp(first, UTC) - timedelta(minutes=1)
    zoned = earlier.astimezone(tz=datetime.strptime("+0530", "%z").tzinfo)
    for given in (
        {"since": first},
        {"since": earlier.timestamp()},
        {"since": earlier.isoformat()},
        {"since": earlier.replace(tzinfo=None).isoformat()},
        {"since": earlier.strftime("%Y-%m-%d %H:%M:%SZ")},
        {"since": zoned.isoformat()},
        {"since": f"{earlier - timedelta(days=1):%Y-%m-%d}"},
        {"since": 0},
        {"ago": time.time() - earlier.timestamp()},
        {"ago": 10**12},
    ):
        answer = web.post("/exclusive/when/rewind", json={**given, "preview": True})
        assert (200, 0, 3) == (answer.status_code, answer.json()["progress"], answer.json()["messages"]), given
    for given in ({"since": time.time() + 60}, {"since": "2999-01-01"}, {"ago": 0}):
        answer = web.post("/exclusive/when/rewind", json={**given, "preview": True})
        assert (200, 3, 0) == (answer.status_code, answer.json()["progress"], answer.json()["messages"]), given


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, "rewind: nothing given; say one of: to (the number that comes next), since (a time), ago (seconds)"),
        ({"to": 1, "since": 1}, "rewind: to and since given; say one of"),
        ({"to": 1, "since": 1, "ago": 1}, "rewind: to and since and ago given; say one of"),
        ({"to": None}, "rewind: nothing given"),
        ({"too": 1}, "rewind: unknown option 'too'; did you mean 'to'?"),
        ({"zzz": 1}, "rewind: unknown option 'zzz'; known are: ago, consumer, preview, since, to"),
        ({"to": -1}, "rewind: to = -1: Expected int >= 0"),
        ({"to": 10**30}, f"to = {10**30}: the last number is 3"),
        ({"to": "5"}, "rewind: to = '5': Expected int | null, got str"),
        ({"to": 1.5}, "rewind: to = 1.5: Expected int"),
        ({"to": True}, "rewind: to = True: Expected int"),
        ({"to": 99}, "to = 99: the last number is 3"),
        ({"since": -1}, "rewind: since = -1: Expected float >= 0"),
        ({"since": True}, "rewind: since = True: Expected float"),
        ({"since": ""}, "rewind: since = '': must be seconds since the epoch, as a number, or an ISO 8601 time"),
        ({"since": "yesterday"}, "rewind: since = 'yesterday': must be seconds since the epoch"),
        ({"since": "2026-13-01"}, "rewind: since = '2026-13-01': must be seconds since the epoch"),
        ({"since": "20261115"}, "rewind: since = '20261115': must be seconds since the epoch"),
        ({"since": "1969-01-01"}, "rewind: since = '1969-01-01': must be seconds since the epoch"),
        ({"ago": "2h"}, "rewind: ago = '2h': Expected float | null, got str"),
        ({"ago": -1}, "rewind: ago = -1: Expected float >= 0"),
        ({"to": 1, "preview": "yes"}, "rewind: preview = 'yes': Expected bool, got str"),
        ({"to": 1, "consumer": 7}, "rewind: consumer = 7: Expected str, got int"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_rewind_is_refused_in_words_and_changes_nothing(
    node: NodeProcess, web: httpx.Client, given: dict[str, Any], wanted: str
) -> None:
    if web.get("/exclusive/firm").status_code == 404:
        fill(node, "exclusive/firm", *numbered(3), progress={"firm": 3})
    answer = web.post("/exclusive/firm/rewind", json=given)
    assert (400, "BAD_REQUEST") == refused(answer)
    assert wanted in answer.json()["message"]
    assert 3 == web.get("/exclusive/firm").json()["consuming"][0]["progress"]


@pytest.mark.parametrize("content", [b"{", b"[]", b"5", b'"text"', b"\xff"])
def test_a_body_that_is_no_object_is_refused(web: httpx.Client, content: bytes) -> None:
    answer = web.post("/exclusive/x/rewind", content=content, headers={"Content-Type": "application/json"})
    assert (400, "BAD_REQUEST") == refused(answer)


# -- what is not there, and what cannot be


def test_what_is_not_there_is_not_found(node: NodeProcess, web: httpx.Client) -> None:
    """A queue of the other form is another queue."""
    fill(node, "shared/other", ("k", b"1"))
    for answer in (
        web.get("/exclusive/other"),
        web.get("/exclusive/other/messages"),
        web.post("/exclusive/other/rewind", json={"to": 1}),
        web.delete("/exclusive/other"),
        web.get("/exclusive/a%2Fb"),
    ):
        assert (404, "NOT_FOUND") == refused(answer)
        assert "there is no exclusive tray" in answer.json()["message"]
    assert 200 == web.get("/shared/other").status_code
    assert (404, "NOT_FOUND") == refused(web.post("/shared/other/rewind", json={"to": 1, "consumer": "nobody"}))
    assert (400, "BAD_REQUEST") == refused(web.post("/shared/other/rewind", json={"to": 1}))


def test_a_kind_that_is_not_there_is_named_with_those_that_are(web: httpx.Client) -> None:
    for answer in (
        web.get("/exclusiv"),
        web.get("/exclusiv/x"),
        web.get("/exclusiv/x/messages"),
        web.post("/exclusiv/x/rewind", json={"to": 1}),
        web.delete("/exclusiv/x"),
    ):
        assert (404, "NOT_FOUND") == refused(answer)
        assert "the kind 'exclusiv'; did you mean 'exclusive'?" in answer.json()["message"]
    assert "known are: exclusive, shared" in web.get("/zzz").json()["message"]


def test_a_queue_has_a_name(web: httpx.Client) -> None:
    answer = web.get("/exclusive/")
    assert (400, "BAD_REQUEST") == refused(answer)
    assert "has a name" in answer.json()["message"]


def test_nothing_is_declared_here(web: httpx.Client) -> None:
    for method, path in (("POST", "/shared"), ("POST", "/shared/x"), ("PUT", "/shared/x"), ("PATCH", "/shared/x")):
        assert (405, "METHOD_NOT_ALLOWED") == refused(web.request(method, path))


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "limit=", "after=-1", "after=x", f"after={2**63}"]
)
def test_a_page_has_bounds(node: NodeProcess, web: httpx.Client, query: str) -> None:
    """What is no number or no count of messages is refused, not guessed at."""
    fill(node, "exclusive/bounds", ("k", b"1"))
    answers = [web.get(f"/exclusive/bounds/messages?{query}")]
    if query.startswith("limit"):
        answers.append(web.get(f"/exclusive?{query}"))
    for answer in answers:
        assert (400, "BAD_REQUEST") == refused(answer)
        assert query.partition("=")[0] in answer.json()["message"]


def test_a_plugin_that_is_not_loaded_is_named(node: NodeProcess, web: httpx.Client) -> None:
    """Who has the queues is asked with each request."""
    plugins = f"http://{node.http}/api/v1/plugins/trays"
    assert 200 == httpx.delete(plugins, trust_env=False, timeout=PATIENCE).status_code
    try:
        for answer in (
            web.get("/shared"),
            web.get("/shared/x"),
            web.get("/shared/x/messages"),
            web.post("/shared/x/rewind", json={"to": 1}),
            web.delete("/shared/x"),
        ):
            assert (404, "NOT_FOUND") == refused(answer)
            assert "`motorcade plugin load ecq`" in answer.json()["message"]
    finally:
        assert 201 == httpx.post(plugins, json={"path": str(TRAYS)}, trust_env=False, timeout=PATIENCE).status_code
    assert [] == web.get("/shared").json()["data"]


# -- with the plugin in the box


@pytest.fixture(scope="module")
def hub() -> Iterator[NodeProcess]:
    """A node as it comes."""
    with NodeProcess(http=True) as running:
        yield running


@pytest.fixture(scope="module")
def desk(hub: NodeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{hub.http}/api/v1/compacted", trust_env=False, timeout=PATIENCE) as client:
        yield client


@pytest.mark.parametrize(("form", "root"), [("exclusive", "$ECQ"), ("shared", "$SCQ")])
def test_the_life_of_a_compacted_queue(hub: NodeProcess, desk: httpx.Client, form: str, root: str) -> None:
    """What the plugin tells has the shape that the trays have, and is true."""
    began = time.time()
    with Client(hub) as producer, Client(hub) as consumer:
        producer.connect("producer")
        for key, payload in (("a", b"1"), ("b/c", b"\xff"), ("a", b"3")):
            producer.publish(f"{root}/w/life/{key}", payload, 1)
        consumer.connect("life")
        consumer.subscribe(f"{root}/life/#", 1)
        assert [b"\xff", b"3"] == [consumer.receive().payload, consumer.receive().payload]
        consumer.expect_nothing()  # its acknowledgements have been read
        view = desk.get(f"/{form}/life").json()
        (told,) = view.pop("consuming")
        assert began - 1 <= view.pop("oldest") <= told.pop("acked_at") <= time.time() + 1
        assert 0 < view.pop("bytes")
        assert {"kind": form, "name": "life", "messages": 2, "first": 2, "last": 3, "consumers": 1} == view
        assert {"client": "life", "connected": True, "progress": 3, "waiting": 0, "in_flight": 0} == told

        again = desk.post(f"/{form}/life/rewind", json={"to": 3, "consumer": "life"})
        assert (200, (False, 3, 2, 1)) == (
            again.status_code,
            tuple(again.json()[key] for key in ("preview", "before", "progress", "messages")),
        )
        assert b"3" == consumer.receive().payload
        consumer.disconnect()
    assert "life" in {entry["name"] for entry in desk.get(f"/{form}").json()["data"]}
    first, second = desk.get(f"/{form}/life/messages").json()["data"]
    assert (2, f"{root}/life/b/c", "base64", "producer") == tuple(
        first[key] for key in ("position", "topic", "encoding", "publisher")
    )
    assert ("b/c", "a", "3") == (first["properties"]["key"], second["properties"]["key"], second["payload"])
    assert 200 == desk.delete(f"/{form}/life").status_code
    for answer in (
        desk.get(f"/{form}/life"),
        desk.get(f"/{form}/life/messages"),
        desk.post(f"/{form}/life/rewind", json={"to": 1, "consumer": "life"}),
        desk.delete(f"/{form}/life"),
    ):
        assert (404, "NOT_FOUND") == refused(answer)
        assert f"{root}/w/life/KEY" in answer.json()["message"]
    assert "life" not in {entry["name"] for entry in desk.get(f"/{form}").json()["data"]}


@pytest.mark.parametrize("name", ["Grüße", "a b", "100%", "?x=1", "..", "rewind", "w", "%2F", "a%2Fb"])
def test_any_client_id_has_a_queue(hub: NodeProcess, desk: httpx.Client, name: str) -> None:
    with Client(hub) as producer:
        producer.connect("producer")
        producer.publish(f"$ECQ/w/{name}/k", b"1", 1)
    quoted = "".join(f"%{octet:02X}" for octet in name.encode())
    assert (name, 1) == tuple(desk.get(f"/exclusive/{quoted}").json()[key] for key in ("name", "messages"))
    assert f"$ECQ/{name}/k" == desk.get(f"/exclusive/{quoted}/messages").json()["data"][0]["topic"]
    assert 200 == desk.delete(f"/exclusive/{quoted}").status_code


@pytest.mark.parametrize(
    ("form", "given", "status", "wanted"),
    [
        ("exclusive", {"to": 3}, 400, ("to: 3", "between 0 and 2", "the last number is 1")),
        ("exclusive", {"to": 2**63 - 1}, 400, (f"to: {2**63 - 1}", "the last number is 1")),
        ("exclusive", {"to": 1, "consumer": "other"}, 404, ("client 'firm'", "no other consumer")),
        ("shared", {"to": 1}, 400, ("shared queue 'firm'", "name one")),
        ("shared", {"to": 1, "consumer": "nobody"}, 404, ("shared queue 'firm'", "no consumer 'nobody'")),
        ("shared", {"to": 1, "consumer": "no/body\0"}, 404, ("no consumer",)),
        ("shared", {"to": 1, "consumer": "x" * 60_000}, 404, ("no consumer 'xxx",)),
    ],
    ids=["ahead", "far ahead", "other", "whose", "nobody", "odd", "long"],
)
def test_what_the_plugin_refuses_is_said(
    hub: NodeProcess, desk: httpx.Client, form: str, given: dict[str, Any], status: int, wanted: tuple[str, ...]
) -> None:
    with Client(hub) as producer:
        producer.connect("producer")
        for root in ("$ECQ", "$SCQ"):
            if desk.get(f"/{'exclusive' if root == '$ECQ' else 'shared'}/firm").status_code == 404:
                producer.publish(f"{root}/w/firm/k", b"1", 1)
    answer = desk.post(f"/{form}/firm/rewind", json=given)
    assert (status, set()) == (refused(answer)[0], {word for word in wanted if word not in answer.json()["message"]})


@pytest.mark.parametrize("name", ["a%00b", "x" * 60_000, "%2B", "%23", "%ED%A0%80", "%FF"])
def test_names_that_no_queue_can_have_are_not_found(desk: httpx.Client, name: str) -> None:
    for form in ("exclusive", "shared"):
        for answer in (
            desk.get(f"/{form}/{name}"),
            desk.get(f"/{form}/{name}/messages"),
            desk.post(f"/{form}/{name}/rewind", json={"to": 1, "consumer": "c"}),
            desk.delete(f"/{form}/{name}"),
        ):
            assert answer.status_code in (400, 404, 414), answer.text


# -- the guide


def test_the_guide_names_every_counter_and_option() -> None:
    """docs/ecq.md is held to the plugin: what it counts, what can be set, and what that is otherwise."""
    page = (ROOT / "docs" / "ecq.md").read_text()
    sources = [path.read_text() for path in Path(motorcade.plugins.ecq.__file__).parent.glob("*.py")]
    counted = {name for text in sources for name in re.findall(r'counters\["(\w+)"\] \+=', text)} | set(EVENTS)
    assert set() == {name for name in counted if f"`{name}`" not in page}
    rows = [line.split(" | ") for line in page.partition("## Options")[2].splitlines() if line.startswith("| `")]
    told = {
        name: value
        for row in rows
        for name, value in zip(re.findall(r"`(\w+)`", row[0]), row[1].split(", "), strict=False)
    }
    options = {field.name: field.default for field in msgspec.structs.fields(EcqConfig)}
    shown = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in options.items()}
    assert {name: told[name].strip("`") for name in options if name in told} == shown | {
        name: f"{int(options[name])}" for name in ("retention", "idle")
    }
