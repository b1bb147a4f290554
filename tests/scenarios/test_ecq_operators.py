"""Compacted queues as operators meet them: `motorcade queue`, the control port, rules of access."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.compacted import Compacted
from tests.support.consumers import ask, connected, numbers, payloads, settled, take, take_until, unique
from tests.support.flows import acknowledge
from tests.support.kept import sound_node
from tests.support.node import ROOT, NodeProcess
from tests.support.operator import Operator

NOT_AUTHORIZED = 0x87

#: The rule of the seed, and nothing else that concerns these topics.
RULES = """
{allow, {clientid, {re, "^ecq-.+"}}, subscribe, ["eq $ECQ/${clientid}/#"]}.
{allow, {clientid, "producer"}, publish, ["$ECQ/w/#"]}.
"""

ACCESS = """
[plugins.access]
anonymous = "allow"
acl_file = "{file}"
"""


@pytest.fixture(scope="module", params=["memory"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with sound_node(request, tmp_path_factory.mktemp("data"), "") as running:
        yield running


@pytest.fixture
def queue(node: NodeProcess) -> Compacted:
    return Compacted(node, unique("car"))


# --- looking ------------------------------------------------------------------------------------------------------


def test_show(queue: Compacted, desk: Operator) -> None:
    """Depth, octets, first and last number, the oldest; progress, when it was made, what waits and is in flight."""
    began = time.time()
    queue.put(*((f"k{number % 10}", b"x" * 100) for number in range(25)))
    view = desk.asked("queue", "show", queue.name)
    assert ("exclusive", queue.name) == (view["kind"], view["name"])
    assert (10, 16, 25) == (view["messages"], view["first"], view["last"])
    assert 1000 <= view["bytes"] < 10_000
    assert began - 1 <= view["oldest"] <= time.time() + 1
    with queue.consumer() as client:
        take(client, 4)
        take(client, 2, ack=False)
        settled(client)
        (consumer,) = queue.shown(desk)["consuming"]
        assert (queue.name, True, 19, 6) == tuple(
            consumer[key] for key in ("client", "connected", "progress", "waiting")
        )
        assert began - 1 <= consumer["acked_at"] <= time.time() + 1
        assert 2 <= consumer["in_flight"] <= 6
        client.disconnect()
    (consumer,) = queue.shown(desk)["consuming"]
    assert (False, 19, 6, 0) == tuple(consumer[key] for key in ("connected", "progress", "waiting", "in_flight"))
    said = desk.done("queue", "show", queue.name)
    for word in (queue.name, "10", "25", "19"):
        assert word in said


def test_reading_takes_nothing_out(queue: Compacted, desk: Operator) -> None:
    """`queue tail` shows the last messages, `queue read` and the control port all of them, page by page."""
    queue.put(*((f"k{number % 30}", b"%d" % number) for number in range(60)))
    seen = desk.asked("queue", "tail", queue.name, "-n", 5)
    assert [56, 57, 58, 59, 60] == [message["position"] for message in seen]
    assert [queue.read(f"k{number}") for number in range(25, 30)] == [message["topic"] for message in seen]
    assert "k29" == seen[-1]["properties"]["key"]
    assert [b"%d" % number for number in range(30, 60)] == queue.stored(desk)
    page = queue.messages(desk, after=40, limit=5)
    assert [41, 42, 43, 44, 45] == [message["position"] for message in page]
    with queue.consumer() as client:
        assert list(range(30, 60)) == numbers(take(client, 30))
        settled(client)
    assert 30 == len(queue.stored(desk)), "what is acknowledged stays, for one may go back"


def test_list(node: NodeProcess, desk: Operator) -> None:
    """Queues of all kinds; the same name may be one of each."""
    name = unique("name")
    desk.create("queues", name, topics=[f"{name}/#"])
    for kind in ("exclusive", "shared"):
        Compacted(node, name, kind).put(("k", b"x"))
    kinds = sorted(view["kind"] for view in desk.asked("queue", "list") if view["name"] == name)
    assert ["exclusive", "regular", "shared"] == kinds
    assert "regular" == desk.asked("queue", "show", name)["kind"], "the declared one is meant first"
    assert "shared" == desk.asked("queue", "show", name, "--shared")["kind"]


def test_pages_of_queues(node: NodeProcess, desk: Operator) -> None:
    names = sorted(unique("page") for _ in range(5))
    for name in names:
        Compacted(node, name, "shared").put(("k", b"x"))
    found: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = desk.web.get("compacted/shared", params={"limit": 2, "cursor": cursor}).json()
        found += [view["name"] for view in page["data"]]
        cursor = page["meta"].get("cursor")
    assert names == [name for name in found if name in names]
    assert sorted(set(found)) == found


# --- rewinding and deleting ---------------------------------------------------------------------------------------


def test_rewind_by_command(queue: Compacted, desk: Operator) -> None:
    """To a number or a time, with a preview that changes nothing. What is wrong is said."""
    queue.put_numbers(20)
    with queue.consumer() as client:
        take(client, 20)
        settled(client)
        told = desk.asked("queue", "rewind", queue.name, "--to", 16, "--preview")
        assert (True, 5, 16, 20) == (told["preview"], told["messages"], told["first"], told["last"])
        queue.put(("mark", b"mark"))
        assert [] == take_until(client, b"mark"), "a preview changes nothing"
        settled(client)
        assert "6 messages" in desk.done("queue", "rewind", queue.name, "--to", 16)
        assert [*(b"%d" % number for number in range(15, 20)), b"mark"] == payloads(take(client, 6))
        desk.done("queue", "rewind", queue.name, "--since", "2h")
        assert list(range(20)) == numbers(take(client, 20))
    assert "22" in desk.refused("queue", "rewind", queue.name, "--to", 99)
    desk.refused("queue", "rewind", queue.name, "--to", 1, "--since", "1h", code=2)


def test_rewind_of_a_shared_queue_by_command(node: NodeProcess, desk: Operator) -> None:
    queue = Compacted(node, unique("shared"), "shared")
    queue.put_numbers(10)
    name = unique("consumer")
    with queue.consumer(client_id=name) as client:
        take(client, 10)
        settled(client)
        told = desk.asked("queue", "rewind", queue.name, "--shared", "--consumer", name, "--to", 9)
        assert (10, 8, 2) == (told["before"], told["progress"], told["messages"])
        assert [8, 9] == numbers(take(client, 2))


def test_deleting(queue: Compacted, desk: Operator) -> None:
    """Messages and progress are gone; its consumer goes on with what comes, and numbers with where they were."""
    queue.put_numbers(50)
    with queue.consumer() as client:
        take(client, 10)
        under_way = settled(client)
        desk.delete("compacted/exclusive", queue.name)
        queue.put(("new", b"new"))
        for message in under_way:  # else they would take up its window
            acknowledge(client, message)
        late = take_until(client, b"new")
        assert len(under_way) + len(late) <= 32, "only what was under way"
    answer = desk.web.delete(f"compacted/exclusive/{unique('nobody')}")
    assert 404 == answer.status_code
    queue.put(("new", b"newer"))
    with queue.consumer() as client:
        seen = take(client, 1)
        assert ([b"newer"], [52]) == (payloads(seen), queue.numbers(seen))


def test_what_is_not_there(desk: Operator) -> None:
    """404 and exit code 1, with the name."""
    name = unique("nobody")
    assert name in desk.refused("queue", "show", name)
    for path in (f"compacted/exclusive/{name}", f"compacted/shared/{name}/messages", "compacted/other"):
        answer = desk.web.get(path)
        assert 404 == answer.status_code and answer.json()["message"]


def test_what_is_counted(queue: Compacted, desk: Operator) -> None:
    """Appended, replaced, delivered, acknowledged, refused, rewound: `/metrics` tells."""
    before = desk.metrics()
    queue.put(("k", b"1"), ("k", b"2"))
    with queue.consumer() as client:
        take(client, 1)
        client.publish(queue.rewind, b"1", 1)
        take(client, 1)
        ask(client, "$ECQ/another/#")
        client.publish("$ECQ/w", b"", 1)
        settled(client)
    grown = [series for series, value in desk.metrics().items() if "ecq" in series and value > before.get(series, 0)]
    for word in ("appended", "replaced", "delivered", "acknowledged", "rewound", "refused"):
        assert [series for series in grown if word in series], f"{word}: {sorted(grown)}"


# --- access -------------------------------------------------------------------------------------------------------


def test_rules_of_access(tmp_path: Path) -> None:
    """The rule of the seed: some clients may consume, each its own queue only. Who may not hears so."""
    (tmp_path / "acl.conf").write_text(RULES)
    with (
        NodeProcess(config=ACCESS.format(file=tmp_path / "acl.conf"), data=tmp_path / "data") as node,
        connected(node, "ecq-1") as allowed,
        connected(node, "other") as other,
        connected(node, "producer") as producer,
    ):
        assert [1] == ask(allowed, "$ECQ/ecq-1/#").reasons
        for filter_ in ("$ECQ/other/#", "$ECQ/ecq-1/#"):
            assert [NOT_AUTHORIZED] == ask(other, filter_).reasons
        for client, reason in ((other, NOT_AUTHORIZED), (allowed, NOT_AUTHORIZED), (producer, 0)):
            answer = client.publish("$ECQ/w/ecq-1/k", client.client_id.encode(), 1)
            assert answer is not None and reason == (answer.reason or 0)
        assert [b"producer"] == payloads(take(allowed, 1))


def test_the_rules_that_we_hand_out(tmp_path: Path) -> None:
    """`examples/access/acl.conf`: the back office appends, a vehicle consumes and goes back, each its own; no more."""
    vin, other = "LFV3A28K000000001", "LFV3A28K000000002"
    rules = ROOT / "examples" / "access" / "acl.conf"
    with (
        NodeProcess(config=ACCESS.format(file=rules), data=tmp_path / "data") as node,
        connected(node, vin) as vehicle,
        connected(node, "office", username="backoffice") as office,
        connected(node, "somebody") as somebody,
    ):
        for queue in (Compacted(node, vin), Compacted(node, "fleet", "shared")):
            assert [1] == ask(vehicle, queue.filter).reasons
            assert [NOT_AUTHORIZED] == ask(somebody, queue.filter).reasons
            for client, reason in ((vehicle, NOT_AUTHORIZED), (somebody, NOT_AUTHORIZED), (office, 0)):
                answer = client.publish(queue.write("k"), client.client_id.encode(), 1)
                assert answer is not None and reason == (answer.reason or 0)
            assert [b"office"] == payloads(take(vehicle, 1))
            for client, reason in ((somebody, NOT_AUTHORIZED), (vehicle, 0)):
                answer = client.publish(queue.rewind, b"1", 1)
                assert answer is not None and reason == (answer.reason or 0)
            assert [b"office"] == payloads(take(vehicle, 1))
        assert [NOT_AUTHORIZED] == ask(vehicle, f"$ECQ/{other}/#").reasons


def test_without_any_rules(queue: Compacted, node: NodeProcess) -> None:
    """The plugin's own checks hold: see `test_ecq.py`; and a client may consume and rewind what is its own."""
    queue.put_numbers(2)
    with queue.consumer() as client:
        take(client, 2)
        answer = client.publish(queue.rewind, b"2", 1)
        assert answer is not None and 0 == (answer.reason or 0)
        assert [1] == numbers(take(client, 1))
