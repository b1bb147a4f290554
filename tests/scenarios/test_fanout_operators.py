"""What operators do with the fan-out: commands, requests to the control port, decisions, and the question why.

Numbers such as S39 or G14 in the docstrings name rows of the list of behaviours that the fan-out was designed from.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.witness import wait_until
from tests.support.consumers import connected, lasting, receive_maximum, subscribe
from tests.support.fanout import (
    Platform,
    Watch,
    batch,
    filter_of,
    fresh,
    get,
    one,
    quiet,
    request_name,
    told,
    topic_of,
    vehicle,
)
from tests.support.flows import acknowledge
from tests.support.node import ROOT, NodeProcess
from tests.support.operator import Operator

#: Little patience, and collections by themselves.
HASTY = """
[plugins.fanout]
ack_timeout = 1.0
retry_delay = 0.1
retry_delay_max = 0.1
max_attempts = 4
gc_interval = 0.2
"""


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(http=True) as running:
        yield running


@pytest.fixture(scope="module")
def hasty() -> Iterator[NodeProcess]:
    with NodeProcess(config=HASTY, http=True) as running:
        yield running


def decide(desk: Operator, request: str, verb: str) -> dict[str, Any]:
    answer = desk.web.post(f"fanout/requests/{request}/{verb}")
    assert 200 == answer.status_code, answer.text
    return dict(answer.json())


def status(desk: Operator, request: str) -> dict[str, Any]:
    return desk.show("fanout/requests", request)


def why(desk: Operator, vin: str) -> dict[str, Any]:
    answer = desk.web.get(f"vehicles/{vin}/why")
    assert 200 == answer.status_code, answer.text
    view = dict(answer.json())
    assert view["sentence"].endswith(".") and view["next"].endswith("."), view
    assert vin in view["sentence"]
    return view


def send(desk: Operator, node: NodeProcess, *words: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """`motorcade fanout send WORDS`, over MQTT to this node."""
    return subprocess.run(
        [sys.executable, "-m", "motorcade", "fanout", "send", "--port", str(node.port), *map(str, words)],
        env={"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", "PATH": ""},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# --- sending ------------------------------------------------------------------------------------------------------


def test_send_from_files_to_the_end(node: NodeProcess, desk: Operator, tmp_path: Path) -> None:
    """A list with comments, blank lines and duplicates; bytes of any kind; several batches; then how far it is."""
    vins, request, data = fresh(450), request_name(), bytes(range(256)) * 16
    listed, payload = tmp_path / "vins.txt", tmp_path / "update.bin"
    listed.write_text("# our fleet\n\n" + "\n".join([*vins, vins[7], vins[8]]) + "\n")
    payload.write_bytes(data)
    words = ("--vins", listed, "--request", request, "--payload", payload)
    plan = json.loads(send(desk, node, *words, "--dry-run", "--json").stdout)
    assert (450, 2, 3, len(data)) == tuple(plan[key] for key in ("vehicles", "duplicates", "batches", "payload_bytes"))
    assert 404 == desk.web.get(f"fanout/requests/{request}").status_code, "a dry run sends nothing"
    client = vehicle(node, vins[449])
    result = send(desk, node, *words, "--expires", "1h", "--priority", 3)
    assert (0, "") == (result.returncode, result.stderr), result.stderr
    assert request in result.stdout and "450 vehicles accepted" in result.stdout and "2 duplicates" in result.stdout
    assert (topic_of(vins[449], request), data) == told(client)
    wait_until(lambda: status(desk, request)["states"] == {"accepted": 449, "acked": 1}, "one has acknowledged")
    waiting = desk.show("vehicles", vins[0])["waiting"][0]
    assert (3, len(data)) == (waiting["priority"], waiting["size"])
    assert 3590 < waiting["expires_at"] - waiting["accepted_at"] <= 3600
    assert "acked" in desk.done("fanout", "status", request)
    assert [vins[449]] == desk.done("fanout", "targets", request, "--state", "acked", "--only-vins").split()
    assert vins[:449] == [t["vin"] for t in desk.asked("fanout", "targets", request, "--state", "accepted")]
    assert vins[:449] == [t["vin"] for t in desk.asked("fanout", "targets", request, "--state", "pending")]
    again = send(desk, node, *words, "--expires", "1h", "--priority", 3)
    assert 0 == again.returncode and "3 batches of 3 had been accepted before" in again.stderr, again.stderr
    assert {"accepted": 449, "acked": 1} == status(desk, request)["states"], "the same command addresses no one twice"
    once_more = send(desk, node, *words, "--batch-id", "second", "--json")
    figures = json.loads(once_more.stdout)
    assert (450, 2, 449, 0) == tuple(figures[key] for key in ("accepted", "duplicates", "replaced", "repeated_batches"))


def test_send_a_list_from_another_command(node: NodeProcess, desk: Operator, tmp_path: Path) -> None:
    """`fanout targets … --only-vins | fanout send --vins -`."""
    vins, request = fresh(3), request_name()
    payload = tmp_path / "task.json"
    payload.write_text('{"do": "update"}')
    result = send(desk, node, "--vins", "-", "--request", request, "--payload", payload, stdin="\n".join(vins))
    assert 0 == result.returncode, result.stderr
    for vin in vins:
        assert (topic_of(vin, request), b'{"do": "update"}') == told(vehicle(node, vin))


def test_send_with_wrong_lines(node: NodeProcess, desk: Operator, tmp_path: Path) -> None:
    """Each is named by file and line, nothing is corrected, and nothing is sent."""
    vins, request = fresh(2), request_name()
    listed, payload = tmp_path / "vins.txt", tmp_path / "x"
    listed.write_text(f"{vins[0]}\nTOO-SHORT\n{vins[1].lower()}\n{vins[1]}\n")
    payload.write_text("x")
    for more in ((), ("--dry-run",)):
        result = send(desk, node, "--vins", listed, "--request", request, "--payload", payload, *more)
        assert result.returncode not in (0, None)
        assert "vins.txt:2" in result.stderr and "vins.txt:3" in result.stderr, result.stderr
        assert "Traceback" not in result.stderr
    empty = tmp_path / "empty.txt"
    empty.write_text("# nobody\n")
    assert 0 != send(desk, node, "--vins", empty, "--request", request, "--payload", payload).returncode
    assert 0 != send(desk, node, "--vins", listed, "--request", "a/b", "--payload", payload).returncode
    assert 404 == desk.web.get(f"fanout/requests/{request}").status_code


def test_send_what_is_refused(node: NodeProcess, desk: Operator, tmp_path: Path) -> None:
    """A node with small limits: the command says what the broker said, exits with 1, and writes down who is left."""
    vins, request, rest = fresh(30), request_name(), tmp_path / "rest.txt"
    listed, payload = tmp_path / "vins.txt", tmp_path / "x"
    listed.write_text("\n".join(vins))
    payload.write_text("x")
    with NodeProcess(config="[plugins.fanout]\nmax_vins = 10\nmax_pending = 1\n", http=True) as small:
        words = ("--vins", listed, "--request", request, "--payload", payload, "--rest", rest)
        result = send(desk, small, *words)
        assert 1 == result.returncode
        assert "max_vins" in result.stderr and "Traceback" not in result.stderr
        assert vins == rest.read_text().split()
        assert 0 == send(desk, small, *words, "--batch", 10).returncode
        result = send(desk, small, "--vins", listed, "--request", "second", "--payload", payload, "--batch", 10)
        assert 1 == result.returncode
        assert "max_pending" in result.stderr and "30" in result.stderr


def test_send_over_http(node: NodeProcess, desk: Operator) -> None:
    """The same checks, and the same figures, as for a batch over MQTT."""
    vins, request = fresh(3), request_name()
    path = f"fanout/requests/{request}/send"
    body = {"ids": [*vins, vins[0]], "data": b64encode(b"\xff\x00").decode(), "encoding": "base64"}
    answer = desk.web.post(path, json=body)
    assert 202 == answer.status_code, answer.text
    assert {"accepted": 3, "duplicates": 1, "replaced": 0, "rejected": 0} == answer.json()
    assert (topic_of(vins[0], request), b"\xff\x00") == told(vehicle(node, vins[0]))
    for wrong, word in (
        (body | {"ids": []}, "ids"),
        (body | {"ids": ["short"]}, "ids[0]"),
        (body | {"data": "@"}, "base64"),
        (body | {"expires_in": -1}, "expires_in"),
        (body | {"nonsense": 1}, "nonsense"),
    ):
        answer = desk.web.post(path, json=wrong)
        assert 400 == answer.status_code and word in answer.text, answer.text
    assert 400 == desk.web.post("fanout/requests/a%2Fb/send", json=body).status_code
    assert 3 == status(desk, request)["targets"]


# --- how far it is ------------------------------------------------------------------------------------------------


def test_all_requests(node: NodeProcess, desk: Operator, platform: Platform) -> None:
    """S43, G1: page by page over HTTP, as a table and as JSON by the command."""
    names = [request_name() for _ in range(5)]
    for name in names:
        platform.send([one()], name)
    found: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = desk.web.get("fanout/requests", params={"limit": 2, "cursor": cursor}).json()
        found += [view["request_id"] for view in page["data"]]
        cursor = page["meta"]["cursor"]
    assert sorted(found) == found and len(set(found)) == len(found)
    assert set(names) <= set(found)
    assert found == [view["request_id"] for view in desk.asked("fanout", "list")]
    table = desk.done("fanout", "list")
    assert all(name in table for name in names)


def test_what_is_not_there(desk: Operator) -> None:
    """Requests nobody has heard of, VINs that are none: a sentence and an exit code, 404 and 400."""
    for verb in ("status", "targets", "cancel", "pause", "resume"):
        assert (
            404
            == desk.web.request("POST" if verb in ("cancel", "pause", "resume") else "GET", nowhere(verb)).status_code
        )
    assert "never_sent" in desk.refused("fanout", "status", "never_sent")
    assert 400 == desk.web.get("vehicles/short/why").status_code
    assert 400 == desk.web.get("vehicles/short").status_code
    assert "short" in desk.refused("fanout", "why", "short", code=2)


def nowhere(verb: str) -> str:
    return "fanout/requests/never_sent" + ("" if verb == "status" else f"/{verb}")


def test_targets_page_by_page(desk: Operator, node: NodeProcess, platform: Platform) -> None:
    """G14: what waits can be inspected, by state, in pages that neither repeat nor leave out."""
    vins, request = fresh(25), request_name()
    platform.send(vins, request)
    for vin in vins[:5]:
        get(vehicle(node, vin))
    wait_until(lambda: status(desk, request)["states"].get("acked") == 5, "five have acknowledged")
    for state, expected in ((None, vins), ("accepted", vins[5:]), ("acked", vins[:5]), ("failed", [])):
        found: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            asked: dict[str, str | int] = {"limit": 4, "cursor": cursor}
            if state:
                asked["state"] = state
            page = desk.web.get(f"fanout/requests/{request}/targets", params=asked).json()
            found += [target["vin"] for target in page["data"]]
            cursor = page["meta"]["cursor"]
        assert sorted(expected) == sorted(found), state
    assert 400 == desk.web.get(f"fanout/requests/{request}/targets?state=lost").status_code


def test_figures_for_machines(node: NodeProcess, desk: Operator, platform: Platform) -> None:
    """S45, G14: batches, targets, receipts by state and refusals are counted."""
    before = desk.counters("fanout")
    vin = one()
    platform.send([vin, one()], request_name())
    platform.refused("$SDV-FANOUT", b"{}")
    get(vehicle(node, vin))
    wait_until(lambda: desk.counters("fanout").get("receipts_acked", 0) > before.get("receipts_acked", 0), "counted")
    after = desk.counters("fanout")
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert (1, 2, 1) == (grown["batches"], grown["targets"], grown["batches_refused"])
    assert (2, 1, 1) == tuple(grown[f"receipts_{state}"] for state in ("accepted", "sent", "acked"))
    assert desk.counted("fanout", "batches") >= after["batches"]


# --- decisions ----------------------------------------------------------------------------------------------------


def test_cancel_what_waits(node: NodeProcess, desk: Operator, platform: Platform) -> None:
    """S22, G10: vehicles that are away will not get it, each has its receipt; others' requests and later ones go on."""
    vins, request = fresh(20), request_name()
    platform.send(vins, request, "1")
    early = vehicle(node, vins[0])
    get(early)
    with Watch(node, request) as watch:
        platform.send(vins[:2], "task_other", "other")
        get(early)
        view = desk.asked("fanout", "cancel", request)
        assert ("cancelled", 20) == (view["status"], view["targets"])
        watch.gather(lambda: watch.number("cancelled") == 19, "all that waited")
        assert set(vins[1:]) == {receipt["vin"] for receipt in watch.seen if receipt["state"] == "cancelled"}
        assert {"acked": 1, "cancelled": 19} == status(desk, request)["states"]
        second = vehicle(node, vins[1])
        assert (topic_of(vins[1], "task_other"), b"other") == told(second)
        quiet(second)
        platform.send(vins[:3], request, "2")
        for client in (early, second, vehicle(node, vins[2])):
            assert b"2" == get(client).payload
        watch.gather(lambda: watch.number("acked") == 3, "all three")


def test_a_request_that_was_cancelled_and_is_issued_again(desk: Operator, platform: Platform) -> None:
    """The decision was about what waited then: the request is active again, and says so."""
    vin, request = one(), request_name()
    platform.send([vin], request)
    assert "cancelled" == decide(desk, request, "cancel")["status"]
    platform.send([vin], request, mode="append")  # or it would replace the first, if that is still there
    wait_until(lambda: status(desk, request)["states"] == {"accepted": 1, "cancelled": 1}, "the first is over")
    assert "active" == status(desk, request)["status"]


def test_cancel_what_is_in_flight(hasty: NodeProcess) -> None:
    """It cannot be called back: acknowledged it is `acked`, else it is not sent again and `cancelled`."""
    quick, silent, refusing, request = one(), one(), one(), request_name()
    with Operator(hasty) as desk, Platform(hasty) as platform, Watch(hasty, request) as watch:
        clients = [vehicle(hasty, vin) for vin in (quick, silent, refusing)]
        platform.send([quick, silent, refusing], request)
        first, _, third = (get(client, ack=False) for client in clients)
        decide(desk, request, "cancel")
        acknowledge(clients[0], first)
        acknowledge(clients[2], third, reason=0x80)
        watch.gather(lambda: watch.number("acked") + watch.number("cancelled") == 3, "all three are over")
        finals = {r["vin"]: r["state"] for r in watch.seen if r["state"] in ("acked", "cancelled")}
        assert {quick: "acked", silent: "cancelled", refusing: "cancelled"} == finals
        clients[1].expect_closed()
        clients[1] = lasting(hasty, silent)
        platform.send([quick, silent, refusing], "task_next", "next")
        assert [b"next"] * 3 == [get(client).payload for client in clients]


def test_pause_and_resume(node: NodeProcess, desk: Operator, platform: Platform) -> None:
    """Its messages are passed over, others go on; what is resumed comes at once to those who are there."""
    there, later, request = one(), one(), request_name()
    client = vehicle(node, there)
    platform.send([later], request, "paused")
    assert "paused" == desk.asked("fanout", "pause", request)["status"]
    platform.send([there], request, "paused")
    platform.send([there, later], "task_on", "on")
    assert b"on" == get(client).payload
    quiet(client)
    assert ("paused", 1) == (why(desk, there)["reason"], why(desk, there)["pending"])
    second = vehicle(node, later)
    assert b"on" == get(second).payload
    quiet(second)
    assert {"accepted": 2} == status(desk, request)["states"]
    assert "active" == decide(desk, request, "resume")["status"]
    assert [b"paused", b"paused"] == [get(client).payload, get(second).payload]
    assert 409 == desk.web.post(f"fanout/requests/{request}/resume").status_code


def test_pause_what_is_in_flight(hasty: NodeProcess) -> None:
    """An acknowledgement counts; silence is not answered by another attempt until it is resumed."""
    quick, silent, request = one(), one(), request_name()
    with Operator(hasty) as desk, Platform(hasty) as platform, Watch(hasty, request) as watch:
        first, second = vehicle(hasty, quick), vehicle(hasty, silent)
        platform.send([quick, silent], request, "x")
        message = get(first, ack=False)
        get(second, ack=False)
        decide(desk, request, "pause")
        acknowledge(first, message)
        watch.gather(lambda: watch.states(quick)[-1:] == ["acked"], "it is acknowledged")
        watch.gather(lambda: "retried" in watch.states(silent), "the attempt has failed")
        platform.send([silent], "task_on", "on")
        second.expect_closed()
        second = lasting(hasty, silent)
        assert b"on" == get(second).payload
        quiet(second, 1.0)
        decide(desk, request, "resume")
        assert b"x" == get(second).payload
        watch.gather(lambda: watch.states(silent)[-1:] == ["acked"], "it is acknowledged")


def test_a_paused_message_expires(hasty: NodeProcess) -> None:
    """Expiry does not wait; and a paused request can be cancelled."""
    vin, other, request = one(), one(), request_name()
    with Operator(hasty) as desk, Platform(hasty) as platform, Watch(hasty, request) as watch:
        platform.send([other], request)
        decide(desk, request, "pause")
        platform.send([vin], request, expires_in=0.1)
        client = vehicle(hasty, vin)
        watch.until(vin, "accepted", "expired")
        quiet(client)
        decide(desk, request, "cancel")
        watch.until(other, "accepted", "cancelled")


# --- care -----------------------------------------------------------------------------------------------------------


def test_collections_happen_by_themselves(hasty: NodeProcess) -> None:
    """S39: what has expired for vehicles that do not come is found, and told, without any command."""
    vins, request = fresh(50), request_name()
    with Platform(hasty) as platform, Watch(hasty, request) as watch:
        platform.send(vins, request, expires_in=0.05)
        watch.gather(lambda: watch.number("expired") == 50, "all of them")


def test_collect_now(desk: Operator, platform: Platform) -> None:
    """S40, S43: by command; it tells what it has found."""
    vins, request = fresh(3), request_name()
    platform.send(vins, request, expires_in=0.01)
    platform.send(vins[:1], "task_stays")
    quiet(platform.client, 0.1)
    found = desk.asked("fanout", "gc")
    assert 3 <= found["expired"] and 3 <= found["vehicles"]
    wait_until(lambda: status(desk, request)["states"] == {"expired": 3}, "they have expired")
    assert 1 == desk.show("vehicles", vins[0])["pending"]


def test_collect_while_a_collection_is_under_way() -> None:
    """S40: there is one at a time; who asks for another is told so, and nothing is disturbed."""
    node = NodeProcess(config="[plugins.fanout]\ngc_budget = 1\n", http=True)
    with node, Platform(node) as platform, Operator(node) as desk:
        vins, request = fresh(4000), request_name()
        platform.send(vins, request, expires_in=0.01)
        with ThreadPoolExecutor(4) as operators:
            answers = list(operators.map(lambda _: desk.web.post("fanout/gc"), range(4)))
        assert {202, 409} == {answer.status_code for answer in answers}
        assert all("under way" in answer.text for answer in answers if answer.status_code == 409)
        wait_until(lambda: status(desk, request)["states"] == {"expired": 4000}, "all have expired, once each")
        wait_until(lambda: desk.web.post("fanout/gc").status_code == 202, "it can be asked again")


def test_retention() -> None:
    """The seed, A7, S39, G4: what is older goes with `retention`; a message that waits keeps its data in any case."""
    config = "[plugins.fanout]\ndata_retention = 4.0\ngc_interval = 0.3\n"
    with NodeProcess(config=config, http=True) as node, Platform(node) as platform, Watch(node) as watch:
        old, young, request = one(), one(), request_name()
        platform.store("d", b"payload")
        platform.trigger([old], request, "d")
        quiet(platform.client, 2.5)
        platform.trigger([young], request, "d")
        watch.gather(lambda: "expired" in watch.states(old), "it is older than messages are kept")
        assert "retention" == watch.of(old)[-1]["reason"]
        assert (topic_of(young, request), b"payload") == told(vehicle(node, young))
        watch.gather(lambda: watch.states(young)[-1:] == ["acked"], "it is acknowledged")


def test_data_that_is_too_old() -> None:
    """The seed, A7: it is gone after its time, though the node has seen it lately; published again it is there."""
    with NodeProcess(config="[plugins.fanout]\ndata_retention = 0.5\n") as node, Platform(node) as platform:
        platform.store("d", b"payload")
        quiet(platform.client, 0.7)
        late = {"ids": [one()], "request_id": "task_late", "data_id": "d"}
        assert "there is no data" in platform.refused("$SDV-FANOUT/trigger", late)
        platform.store("d", b"payload")
        platform.trigger([one()], "task_late", "d")


def test_options_that_change_while_it_runs(tmp_path: Path) -> None:
    """S41: they hold from now on, and what is over by them is collected at once; a mistake changes nothing."""
    path = tmp_path / "motorcade.toml"
    path.write_text("[plugins.fanout]\n")
    with NodeProcess("--config", str(path), http=True) as node, Platform(node) as platform, Watch(node) as watch:
        vin, request = one(), request_name()
        platform.send([vin], request, expires_in=0.05)
        quiet(platform.client)
        path.write_text("[plugins.fanout]\ngc_interval = 1800\nmax_vins = 2\n")
        os.kill(node.pid, signal.SIGHUP)
        watch.until(vin, "accepted", "expired")
        assert "max_vins" in platform.refused("$SDV-FANOUT", batch(fresh(3), request))
        path.write_text("[plugins.fanout]\nmax_vins = 0\n")
        os.kill(node.pid, signal.SIGHUP)
        wait_until(lambda: any("max_vins" in line for line in node.output), "the mistake is told")
        assert "more than 2" in platform.refused("$SDV-FANOUT", batch(fresh(3), request))


def test_another_prefix_while_it_runs(tmp_path: Path) -> None:
    """S41, S42: vehicles that are there get their messages where they are subscribed now; what is in flight goes on."""
    path = tmp_path / "motorcade.toml"
    path.write_text("[plugins.fanout]\n")
    both, old, other = fresh(3)
    with NodeProcess("--config", str(path), http=True) as node, Platform(node) as platform, Operator(node) as desk:
        clients = [vehicle(node, vin) for vin in (both, old)]
        subscribe(clients[0], f"cars/{both}/+")
        new = vehicle(node, other, filter_=f"cars/{other}/+")
        platform.send([both, old, other], "task_1")
        first = [get(client, ack=False) for client in clients]
        platform.send([both, old, other], "task_2")
        path.write_text('[plugins.fanout]\ntopic_prefix = "cars/{VIN}"\n')
        os.kill(node.pid, signal.SIGHUP)
        assert [f"cars/{other}/task_{number}" for number in (1, 2)] == [get(new).topic for _ in range(2)]
        for client, message in zip(clients, first, strict=True):
            quiet(client)  # one in flight
            acknowledge(client, message)
        assert f"cars/{both}/task_2" == get(clients[0]).topic
        quiet(clients[1])
        view = why(desk, old)
        assert ("not_subscribed", 1, "task_2") == (view["reason"], view["pending"], view["request_id"])
        subscribe(clients[1], f"cars/{old}/+")
        assert f"cars/{old}/task_2" == get(clients[1]).topic
        wait_until(lambda: status(desk, "task_1")["states"] == {"acked": 3}, "all have got the first")
        wait_until(lambda: status(desk, "task_2")["states"] == {"acked": 3}, "all have got the second")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('topic_prefix = "agent/proxy"', ("topic_prefix", "{VIN}")),
        ('topic_prefix = "agent/{VIN}/{VIN}"', ("topic_prefix", "once")),
        ('topic_prefix = "agent/{VIN}/#"', ("topic_prefix",)),
        ("max_vinz = 5", ("max_vinz", "max_vins")),
        ("max_vins = 0", ("max_vins",)),
        ("gc_interval = 0", ("gc_interval",)),
    ],
)
def test_options_that_are_wrong(line: str, words: tuple[str, ...]) -> None:
    """S42: the node does not start, and names the option."""
    with pytest.raises(AssertionError) as caught:
        NodeProcess(config=f"[plugins.fanout]\n{line}\n").start()
    for word in words:
        assert word in str(caught.value)


# --- why ------------------------------------------------------------------------------------------------------------


def test_why_in_the_life_of_a_vehicle(node: NodeProcess, desk: Operator, platform: Platform) -> None:
    """G14: from a VIN that nobody has named to one that has got everything, reason by reason."""
    vin, request = one(), request_name()
    assert "not_known" == why(desk, vin)["reason"]
    platform.send([vin], request)
    view = why(desk, vin)
    assert ("offline", 1, request) == (view["reason"], view["pending"], view["request_id"])
    client = lasting(node, vin)
    view = why(desk, vin)
    assert "not_subscribed" == view["reason"] and filter_of(vin) in view["sentence"]
    subscribe(client, filter_of(vin))
    message = get(client, ack=False)
    view = why(desk, vin)
    assert ("in_flight", 1) == (view["reason"], view["attempt"])
    assert view["since"] < view["until"]
    client.abort()
    wait_until(lambda: why(desk, vin)["reason"] == "offline", "it is away")
    assert "repeated" in why(desk, vin)["next"]
    back = lasting(node, vin)
    acknowledge(back, get(back, ack=False))
    wait_until(lambda: why(desk, vin)["reason"] == "nothing_pending", "it has got everything")
    assert request in why(desk, vin)["sentence"] and "acked" in why(desk, vin)["sentence"]
    assert message.topic == topic_of(vin, request)
    assert desk.done("fanout", "why", vin).startswith("nothing_pending: ")
    shown = desk.done("vehicle", "show", vin)
    assert all(word in shown for word in (vin, "acked", request, filter_of(vin)))


def test_why_a_vehicle_that_is_silent_or_refuses() -> None:
    """After an attempt in vain it is said when the next one is."""
    with NodeProcess(config="[plugins.fanout]\nretry_delay = 60\n", http=True) as node:
        vin, request = one(), request_name()
        with Platform(node) as platform, Operator(node) as desk:
            client = vehicle(node, vin)
            platform.send([vin], request)
            acknowledge(client, get(client, ack=False), reason=0x83)
            wait_until(lambda: why(desk, vin)["reason"] == "backing_off", "it is not sent at once")
            view = why(desk, vin)
            assert (1, 1) == (view["attempt"], view["pending"])
            assert view["until"] > 0 and "again at" in view["next"]
            waiting = desk.show("vehicles", vin)["in_flight"]
            assert ("backing_off", 1) == (waiting["state"], waiting["attempts"])


def test_why_a_window_is_full(node: NodeProcess, desk: Operator, platform: Platform) -> None:
    """A vehicle that has not acknowledged other messages takes no more; it goes on when it has."""
    vin, request = one(), request_name()
    client = vehicle(node, vin, 5, receive_maximum(1))
    subscribe(client, "other")
    with connected(node) as other:
        other.publish("other", b"x", 1)
    held = get(client, ack=False)
    platform.send([vin], request)
    quiet(client)
    view = why(desk, vin)
    assert ("window_full", request, 1) == (view["reason"], view["request_id"], view["pending"])
    acknowledge(client, held)
    assert topic_of(vin, request) == get(client).topic
