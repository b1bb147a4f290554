"""Compacted queues over the control port: shapes, pages, and what is refused. `motorcade queue` shows the rest."""

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

import motorcade.plugins.logs.compacted
from motorcade.control import MAX_FOUND
from motorcade.plugins.logs.compacted.options import EcqConfig
from motorcade.plugins.logs.compacted.plugin import EVENTS
from tests.scenarios.witness import metrics
from tests.support.compacted import Compacted
from tests.support.consumers import ask, settled, take, unique
from tests.support.local import LocalNode
from tests.support.node import ROOT
from tests.unit.http.answers import pages, refused

FORMS = ("exclusive", "shared")


@pytest.fixture(scope="module")
def web(node: LocalNode) -> Iterator[httpx.Client]:
    with node.web("/api/v1/compacted") as client:
        yield client


def consumed(queue: Compacted, count: int) -> None:
    """Have its own client acknowledge so many messages."""
    with queue.consumer(client_id=queue.name) as client:
        take(client, count)
        settled(client)


@pytest.mark.parametrize("form", FORMS)
def test_the_life_of_a_compacted_queue(node: LocalNode, web: httpx.Client, form: str) -> None:
    """Shown in full and listed in short; read, rewound and deleted."""
    began = time.time()
    queue = Compacted(node, "life", form)
    queue.put(("a", b"1"), ("b/c", b"\xff"), ("a", b"3"))
    with queue.consumer(client_id="life") as consumer:
        assert [b"\xff", b"3"] == [message.payload for message in take(consumer, 2)]
        settled(consumer)
        view = web.get(f"/{form}/life").json()
        (told,) = view.pop("consuming")
        assert began - 1 <= view.pop("oldest") <= told.pop("acked_at") <= time.time() + 1
        short = {"kind": form, "name": "life", "messages": 2, "first": 2, "last": 3, "consumers": 1}
        assert {**short, "bytes": (size := view["bytes"])} == view and size > 0
        assert {"client": "life", "connected": True, "progress": 3, "waiting": 0, "in_flight": 0} == told
        assert [view] == [entry for entry in web.get(f"/{form}").json()["data"] if entry["name"] == "life"]

        asked = web.post(f"/{form}/life/rewind", json={"to": 3, "consumer": "life", "preview": True})
        rewound = {
            "kind": form,
            "name": "life",
            "consumer": "life",
            "preview": True,
            "before": 3,
            "progress": 2,
            "messages": 1,
            "bytes": asked.json()["bytes"],
            "first": 3,
            "last": 3,
            "skipped": 0,
        }
        assert (200, rewound) == (asked.status_code, asked.json())
        assert 3 == web.get(f"/{form}/life").json()["consuming"][0]["progress"], "a preview changes nothing"
        done = web.post(f"/{form}/life/rewind", json={"to": 3, "consumer": "life"})
        assert (200, rewound | {"preview": False}) == (done.status_code, done.json())
        assert b"3" == consumer.receive().payload
    first, second = web.get(f"/{form}/life/messages").json()["data"]
    assert isinstance(second.pop("time"), float) and second.pop("guid")
    assert "a" == second.pop("properties")["key"]
    assert ("base64", b"\xff", "b/c") == (
        first["encoding"],
        base64.b64decode(first["payload"]),
        first["properties"]["key"],
    )
    assert second.pop("publisher")
    assert {"position": 3, "topic": queue.read("a"), "payload": "3", "encoding": "utf8"} == second
    gone = web.delete(f"/{form}/life")
    assert (200, {"kind": form, "name": "life", "result": "deleted"}) == (gone.status_code, gone.json())
    for answer in every_verb(web, form, "life"):
        assert (404, "NOT_FOUND") == refused(answer)
        assert queue.write("KEY") in answer.json()["message"]
    assert "life" not in {entry["name"] for entry in web.get(f"/{form}").json()["data"]}


def every_verb(web: httpx.Client, form: str, name: str) -> Iterator[httpx.Response]:
    """Everything that can be asked about one queue, in vain."""
    yield web.get(f"/{form}/{name}")
    yield web.get(f"/{form}/{name}/messages")
    yield web.post(f"/{form}/{name}/rewind", json={"to": 1, "consumer": name})
    yield web.delete(f"/{form}/{name}")


def test_lists_come_in_pages_by_name(node: LocalNode, web: httpx.Client) -> None:
    """Each is on exactly one page, and the last page says that it is the last."""
    wanted = sorted(f"page {number} & more" for number in range(25))
    for name in wanted:
        Compacted(node, name, "shared").put(("k", b"1"))
    for limit in (1, 7, 25, MAX_FOUND):
        found, sizes = pages(web, "/shared", limit, first="page")
        assert wanted == [entry["name"] for entry in found if entry["name"].startswith("page ")]
        assert max(sizes) <= limit


def test_messages_come_in_pages_that_cover_all(node: LocalNode, web: httpx.Client) -> None:
    Compacted(node, "many", "shared").put_numbers(120)
    found, sizes = pages(web, "/shared/many/messages", 50, by="after", first="0")
    assert (list(range(1, 121)), [50, 50, 20]) == ([entry["position"] for entry in found], sizes)
    assert [119, 120] == [e["position"] for e in web.get("/shared/many/messages?after=118").json()["data"]]


# -- rewinding


def test_a_time_is_a_number_a_text_or_a_while_ago(node: LocalNode, web: httpx.Client) -> None:
    """All of them mean the same moment; a text without a zone is in UTC."""
    queue = Compacted(node, "when")
    queue.put_numbers(3)
    consumed(queue, 3)
    first = web.get("/exclusive/when").json()["oldest"]
    earlier = datetime.fromtimestamp(first, UTC) - timedelta(minutes=1)
    zoned = earlier.astimezone(tz=datetime.strptime("+0530", "%z").tzinfo)
    to_the_first: list[dict[str, Any]] = [
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
    ]
    for given in to_the_first:
        answer = web.post("/exclusive/when/rewind", json={**given, "preview": True})
        assert (200, 0, 3) == (answer.status_code, answer.json()["progress"], answer.json()["messages"]), given
    for given in ({"since": time.time() + 60}, {"since": "2999-01-01"}, {"ago": 0}):
        answer = web.post("/exclusive/when/rewind", json={**given, "preview": True})
        assert (200, 3, 0) == (answer.status_code, answer.json()["progress"], answer.json()["messages"]), given


#: Form, what is asked for, status, and what must be said.
WRONG_REWINDS: list[tuple[str, dict[str, Any], int, str]] = [
    ("exclusive", {}, 400, "rewind: nothing given; say one of: to (the number that comes next), since (a time), ago"),
    ("exclusive", {"to": 1, "since": 1}, 400, "rewind: to and since given; say one of"),
    ("exclusive", {"to": 1, "since": 1, "ago": 1}, 400, "rewind: to and since and ago given; say one of"),
    ("exclusive", {"to": None}, 400, "rewind: nothing given"),
    ("exclusive", {"too": 1}, 400, "rewind: unknown option 'too'; did you mean 'to'?"),
    ("exclusive", {"zzz": 1}, 400, "rewind: unknown option 'zzz'; known are: ago, consumer, preview, since, to"),
    ("exclusive", {"to": -1}, 400, "rewind: to = -1: Expected int >= 0"),
    ("exclusive", {"to": 10**30}, 400, "the last number is 3"),
    ("exclusive", {"to": "5"}, 400, "rewind: to = '5': Expected int | null, got str"),
    ("exclusive", {"to": 1.5}, 400, "rewind: to = 1.5: Expected int"),
    ("exclusive", {"to": True}, 400, "rewind: to = True: Expected int"),
    ("exclusive", {"to": 5}, 400, "to: 5 is not between 0 and 4; the last number is 3"),
    ("exclusive", {"to": 2**63 - 1}, 400, "the last number is 3"),
    ("exclusive", {"since": -1}, 400, "rewind: since = -1: Expected float >= 0"),
    ("exclusive", {"since": True}, 400, "rewind: since = True: Expected float"),
    ("exclusive", {"since": ""}, 400, "rewind: since = '': must be seconds since the epoch, as a number, or an ISO"),
    ("exclusive", {"since": "yesterday"}, 400, "rewind: since = 'yesterday': must be seconds since the epoch"),
    ("exclusive", {"since": "2026-13-01"}, 400, "rewind: since = '2026-13-01': must be seconds since the epoch"),
    ("exclusive", {"since": "20261115"}, 400, "rewind: since = '20261115': must be seconds since the epoch"),
    ("exclusive", {"since": "1969-01-01"}, 400, "rewind: since = '1969-01-01': must be seconds since the epoch"),
    ("exclusive", {"ago": "2h"}, 400, "rewind: ago = '2h': Expected float | null, got str"),
    ("exclusive", {"ago": -1}, 400, "rewind: ago = -1: Expected float >= 0"),
    ("exclusive", {"to": 1, "preview": "yes"}, 400, "rewind: preview = 'yes': Expected bool, got str"),
    ("exclusive", {"to": 1, "consumer": 7}, 400, "rewind: consumer = 7: Expected str, got int"),
    ("exclusive", {"to": 1, "consumer": "other"}, 404, "no other consumer"),
    ("shared", {"to": 1}, 400, "name one"),
    ("shared", {"to": 1, "consumer": "nobody"}, 404, "no consumer 'nobody'"),
    ("shared", {"to": 1, "consumer": "no/body\0"}, 404, "no consumer"),
    ("shared", {"to": 1, "consumer": "x" * 60_000}, 404, "no consumer 'xxx"),
]


def test_a_wrong_rewind_is_refused_in_words_and_changes_nothing(node: LocalNode, web: httpx.Client) -> None:
    for form in FORMS:
        queue = Compacted(node, "firm", form)
        queue.put_numbers(3)
        consumed(queue, 3)
    failures = []
    for form, given, status, wanted in WRONG_REWINDS:
        answer = web.post(f"/{form}/firm/rewind", json=given)
        if status != answer.status_code or wanted not in answer.json()["message"]:
            failures.append(f"{form} {given}: {answer.status_code} {answer.text}")
    assert not failures, "\n".join(failures)
    for content in (b"{", b"[]", b"5", b'"text"', b"\xff"):
        answer = web.post("/exclusive/firm/rewind", content=content, headers={"Content-Type": "application/json"})
        assert (400, "BAD_REQUEST") == refused(answer), content
    for form in FORMS:
        assert 3 == web.get(f"/{form}/firm").json()["consuming"][0]["progress"]


# -- what is not there, and what cannot be


def test_what_is_not_there_is_not_found(node: LocalNode, web: httpx.Client) -> None:
    """A queue of the other form is another queue; a kind that does not exist is named with those that do."""
    Compacted(node, "other", "shared").put(("k", b"1"))
    for answer in every_verb(web, "exclusive", "other"):
        assert (404, "NOT_FOUND") == refused(answer)
    assert 200 == web.get("/shared/other").status_code
    for answer in (web.get("/exclusiv"), *every_verb(web, "exclusiv", "x")):
        assert (404, "NOT_FOUND") == refused(answer)
        assert "the kind 'exclusiv'; did you mean 'exclusive'?" in answer.json()["message"]
    assert "known are: exclusive, shared" in web.get("/zzz").json()["message"]


def test_what_cannot_be_asked_is_refused(node: LocalNode, web: httpx.Client) -> None:
    """No name, nothing to declare, bounds of a page, names that no queue can have."""
    nameless = web.get("/exclusive/")
    assert (400, "BAD_REQUEST") == refused(nameless) and "has a name" in nameless.json()["message"]
    for method, path in (("POST", "/shared"), ("POST", "/shared/x"), ("PUT", "/shared/x"), ("PATCH", "/shared/x")):
        assert (405, "METHOD_NOT_ALLOWED") == refused(web.request(method, path))
    Compacted(node, "bounds").put(("k", b"1"))
    for query in ("limit=0", "limit=1001", "limit=x", "limit=", "after=-1", "after=x", f"after={2**63}"):
        for path in ("/exclusive/bounds/messages", *(["/exclusive"] if query.startswith("limit") else [])):
            answer = web.get(f"{path}?{query}")
            assert (400, "BAD_REQUEST") == refused(answer), query
            assert query.partition("=")[0] in answer.json()["message"]
    for name in ("a%00b", "x" * 60_000, "%2B", "%23", "%ED%A0%80", "%FF"):
        for form in FORMS:
            assert {400, 404, 414} >= {answer.status_code for answer in every_verb(web, form, name)}, name


def test_metrics_count_what_becomes_of_messages(node: LocalNode) -> None:
    """Appended, replaced, delivered, acknowledged, refused, rewound."""
    before, queue = metrics(node), Compacted(node, unique("car"))
    queue.put(("k", b"1"), ("k", b"2"))
    with queue.consumer() as client:
        take(client, 1)
        client.publish(queue.rewind, b"1", 1)
        take(client, 1)
        ask(client, "$ECQ/another/#")
        client.publish("$ECQ/w", b"", 1)
        settled(client)
    grown = [series for series, value in metrics(node).items() if "ecq" in series and value > before.get(series, 0)]
    for word in ("appended", "replaced", "delivered", "acknowledged", "rewound", "refused"):
        assert [series for series in grown if word in series], f"{word}: {sorted(grown)}"


# -- the guide


def test_the_guide_names_every_counter_and_option() -> None:
    """docs/ecq.md is held to the plugin: what it counts, what can be set, and what that is otherwise."""
    page = (ROOT / "docs" / "ecq.md").read_text()
    sources = [path.read_text() for path in Path(motorcade.plugins.logs.compacted.__file__).parent.glob("*.py")]
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
