"""What operators do with the fan-out: commands, requests to the control port, decisions, and the question why.

Numbers such as S39 or G14 in the docstrings name rows of the list of behaviours that the fan-out was designed from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.scenarios.witness import wait_until
from tests.support.consumers import subscribe
from tests.support.fanout import (
    Platform,
    Watch,
    batch,
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
from tests.support.local import LocalNode
from tests.support.operator import Operator


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with LocalNode() as running:
        yield running


def decide(operator: Operator, request: str, verb: str) -> dict[str, Any]:
    answer = operator.web.post(f"fanout/requests/{request}/{verb}")
    assert 200 == answer.status_code, answer.text
    return dict(answer.json())


def status(operator: Operator, request: str) -> dict[str, Any]:
    return operator.show("fanout/requests", request)


def why(operator: Operator, vin: str) -> dict[str, Any]:
    answer = operator.web.get(f"vehicles/{vin}/why")
    assert 200 == answer.status_code, answer.text
    view = dict(answer.json())
    assert view["sentence"].endswith(".") and view["next"].endswith("."), view
    assert vin in view["sentence"]
    return view


# --- how far it is ------------------------------------------------------------------------------------------------


def test_figures_for_machines(node: LocalNode, operator: Operator, platform: Platform) -> None:
    """S45, G14: batches, targets, receipts by state and refusals are counted."""
    before = operator.counters("fanout")
    vin = one()
    platform.send([vin, one()], request_name())
    platform.refused("$SDV-FANOUT", b"{}")
    get(vehicle(node, vin))
    wait_until(
        lambda: operator.counters("fanout").get("receipts_acked", 0) > before.get("receipts_acked", 0), "counted"
    )
    after = operator.counters("fanout")
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert (1, 2, 1) == (grown["batches"], grown["targets"], grown["batches_refused"])
    assert (2, 1, 1) == tuple(grown[f"receipts_{state}"] for state in ("accepted", "sent", "acked"))
    assert operator.counted("fanout", "batches") >= after["batches"]


# --- decisions ----------------------------------------------------------------------------------------------------


def test_cancel_what_waits(node: LocalNode, operator: Operator, platform: Platform) -> None:
    """S22, G10: vehicles that are away will not get it, each has its receipt; others' requests and later ones go on."""
    vins, request = fresh(20), request_name()
    platform.send(vins, request, "1")
    early = vehicle(node, vins[0])
    get(early)
    with Watch(node, request) as watch:
        platform.send(vins[:2], "task_other", "other")
        get(early)
        view = operator.asked("fanout", "cancel", request)
        assert ("cancelled", 20) == (view["status"], view["targets"])
        watch.gather(lambda: watch.number("cancelled") == 19, "all that waited")
        assert set(vins[1:]) == {receipt["vin"] for receipt in watch.seen if receipt["state"] == "cancelled"}
        assert {"acked": 1, "cancelled": 19} == status(operator, request)["states"]
        second = vehicle(node, vins[1])
        assert (topic_of(vins[1], "task_other"), b"other") == told(second)
        quiet(second)
        platform.send(vins[:3], request, "2")
        for client in (early, second, vehicle(node, vins[2])):
            assert b"2" == get(client).payload
        watch.gather(lambda: watch.number("acked") == 3, "all three")


def test_a_request_that_was_cancelled_and_is_issued_again(operator: Operator, platform: Platform) -> None:
    """The decision was about what waited then: the request is active again, and says so."""
    vin, request = one(), request_name()
    platform.send([vin], request)
    assert "cancelled" == decide(operator, request, "cancel")["status"]
    platform.send([vin], request, mode="append")  # or it would replace the first, if that is still there
    wait_until(lambda: status(operator, request)["states"] == {"accepted": 1, "cancelled": 1}, "the first is over")
    assert "active" == status(operator, request)["status"]


def test_pause_and_resume(node: LocalNode, operator: Operator, platform: Platform) -> None:
    """Its messages are passed over, others go on; what is resumed comes at once to those who are there."""
    there, later, request = one(), one(), request_name()
    client = vehicle(node, there)
    platform.send([later], request, "paused")
    assert "paused" == operator.asked("fanout", "pause", request)["status"]
    platform.send([there], request, "paused")
    platform.send([there, later], "task_on", "on")
    assert b"on" == get(client).payload
    quiet(client)
    assert ("paused", 1) == (why(operator, there)["reason"], why(operator, there)["pending"])
    second = vehicle(node, later)
    assert b"on" == get(second).payload
    quiet(second)
    assert {"accepted": 2} == status(operator, request)["states"]
    assert "active" == decide(operator, request, "resume")["status"]
    assert [b"paused", b"paused"] == [get(client).payload, get(second).payload]
    assert 409 == operator.web.post(f"fanout/requests/{request}/resume").status_code


# --- care -----------------------------------------------------------------------------------------------------------


def test_collections_happen_by_themselves() -> None:
    """S39: what has expired for vehicles that do not come is found, and told, without any command."""
    vins, request = fresh(50), request_name()
    with (
        LocalNode("[plugins.fanout]\ngc_interval = 0.2\n") as node,
        Platform(node) as platform,
        Watch(node, request) as watch,
    ):
        platform.send(vins, request, expires_in=0.05)
        watch.gather(lambda: watch.number("expired") == 50, "all of them")


def test_options_that_change_while_it_runs() -> None:
    """S41: they hold from now on, and what is over by them is collected at once; a mistake changes nothing."""
    with LocalNode() as node, Platform(node) as platform, Watch(node) as watch, Operator(node) as operator:
        vin, request = one(), request_name()
        platform.send([vin], request, expires_in=0.05)
        quiet(platform.client)
        node.file.write_text("[plugins.fanout]\ngc_interval = 1800\nmax_vins = 2\n")
        operator.done("config", "reload")
        watch.until(vin, "accepted", "expired")
        assert "max_vins" in platform.refused("$SDV-FANOUT", batch(fresh(3), request))
        node.file.write_text("[plugins.fanout]\nmax_vins = 0\n")
        assert "max_vins" in operator.refused("config", "reload")
        assert "more than 2" in platform.refused("$SDV-FANOUT", batch(fresh(3), request))


def test_another_prefix_while_it_runs() -> None:
    """S41, S42: vehicles that are there get their messages where they are subscribed now; what is in flight goes on."""
    both, old, other = fresh(3)
    with LocalNode() as node, Platform(node) as platform, Operator(node) as operator:
        clients = [vehicle(node, vin) for vin in (both, old)]
        subscribe(clients[0], f"cars/{both}/+")
        new = vehicle(node, other, filter_=f"cars/{other}/+")
        platform.send([both, old, other], "task_1")
        first = [get(client, ack=False) for client in clients]
        platform.send([both, old, other], "task_2")
        node.file.write_text('[plugins.fanout]\ntopic_prefix = "cars/{VIN}"\n')
        operator.done("config", "reload")
        assert [f"cars/{other}/task_{number}" for number in (1, 2)] == [get(new).topic for _ in range(2)]
        for client, message in zip(clients, first, strict=True):
            quiet(client)  # one in flight
            acknowledge(client, message)
        assert f"cars/{both}/task_2" == get(clients[0]).topic
        quiet(clients[1])
        view = why(operator, old)
        assert ("not_subscribed", 1, "task_2") == (view["reason"], view["pending"], view["request_id"])
        subscribe(clients[1], f"cars/{old}/+")
        assert f"cars/{old}/task_2" == get(clients[1]).topic
        wait_until(lambda: status(operator, "task_1")["states"] == {"acked": 3}, "all have got the first")
        wait_until(lambda: status(operator, "task_2")["states"] == {"acked": 3}, "all have got the second")
