"""Fan-out on three real nodes over one store: batches anywhere, vehicles anywhere, and nodes that die.

Each delivery has one final receipt, and no connection of a vehicle ever has two messages that are not acknowledged.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from tests.support.cluster_nodes import ClusterNodes
from tests.support.commands import run
from tests.support.consumers import lasting, subscribe
from tests.support.fanout import (
    Platform,
    Watch,
    filter_of,
    fresh,
    get,
    one,
    quiet,
    request_name,
    stored_receipts,
    taken,
    topic_of,
    vehicle,
)
from tests.support.flows import acknowledge
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import PUBLISH, Client, Closed, Packet

#: Members that are killed are found dead soon.
OPTIONS = "lease = 2.0\nview_lease = 3.5"
PATIENCE = 120.0  #: seconds until all of some work must be done
FINAL = {"acked", "replaced", "failed", "expired", "cancelled"}
MOMENT = 0.02  #: seconds for which a vehicle looks whether a second message comes before it acknowledges the first


@pytest.fixture(scope="module", params=["lone_redis", "cluster_redis"])
def nodes(request: pytest.FixtureRequest) -> Iterator[ClusterNodes]:
    servers = request.getfixturevalue(request.param)
    with ClusterNodes(3, f"{servers.url}?prefix=fanout", cluster=OPTIONS) as running:
        yield running
        for node in running.nodes:
            errors = [line for line in node.output if "Traceback" in line or '"level":"error"' in line]
            assert [] == [line for line in errors if '"event":"membership_lost"' not in line]


class Car(threading.Thread):
    """A vehicle that acknowledges what it gets, and comes back when its connection is gone, mostly at another node."""

    def __init__(self, nodes: ClusterNodes, vin: str, at: int, *, moves: float = 0.0, hesitates: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.vin = vin
        self.got: list[str] = []  #: requests, each once, in the order of their first coming
        self.two: list[str] = []  #: a second message on a connection whose first one was not acknowledged
        self._nodes = nodes
        self._at = at
        self._moves = moves  # probability that it moves instead of acknowledging
        self._hesitates = hesitates
        self._random = random.Random(vin)
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            with suppress(OSError, Closed, TimeoutError, AssertionError):
                client = lasting(self._nodes[self._at % len(self._nodes)], self.vin)
                try:
                    if client.connack is not None and not client.connack.session_present:
                        subscribe(client, filter_of(self.vin))
                    self._drive(client)
                finally:
                    client.close()
            self._at += 1
            self._stopped.wait(0.05)

    def _drive(self, client: Client) -> None:
        while not self._stopped.is_set():
            message = _next(client, 0.2)
            if message is None:
                continue
            request = message.topic.rsplit("/", 1)[1]
            if request not in self.got:
                self.got.append(request)
            second = _next(client, max(MOMENT, self._hesitates * self._random.random()))
            if second is not None and second.topic != message.topic:
                self.two.append(f"{request} {second.topic}")
            if self._random.random() < self._moves:
                return
            acknowledge(client, message)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def _next(client: Client, timeout: float) -> Packet | None:
    try:
        message = client.recv(timeout)
    except TimeoutError:
        return None
    if message.type != PUBLISH:
        raise Closed(message.name)
    return message


def receipts_of(nodes: ClusterNodes, *requests: str) -> list[dict[str, Any]]:
    with Operator(_alive(nodes)) as operator:
        return [receipt for receipt in stored_receipts(operator) if receipt["request_id"] in requests]


def _alive(nodes: ClusterNodes) -> NodeProcess:
    return next(node for node in nodes.nodes if node.process is not None and node.process.poll() is None)


def until_final(nodes: ClusterNodes, requests: Sequence[str], deliveries: int) -> dict[str, list[dict[str, Any]]]:
    """Wait until so many deliveries have ended; the receipts of each. Each has one final receipt."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = receipts_of(nodes, *requests)
        finals = sum(receipt["state"] in FINAL for receipt in found)
        if finals >= deliveries:
            break
        assert time.monotonic() < deadline, f"{finals} of {deliveries} have ended"
        time.sleep(0.2)
    time.sleep(0.5)  # what would be too much may still come
    by_delivery: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for receipt in receipts_of(nodes, *requests):
        by_delivery[receipt["delivery_id"]].append(receipt)
    for name, told in by_delivery.items():
        states = [receipt["state"] for receipt in told if receipt["reason"] != "late_ack"]
        assert 1 == states.count("accepted"), (name, states)
        assert 1 == sum(state in FINAL for state in states), (name, states)
        assert "accepted" == states[0], (name, states)
    assert deliveries == len(by_delivery)
    return by_delivery


def status(node: NodeProcess, request: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("fanout", "status", request, "--http", node.http, "--json").stdout)
    return found


def check_counts(nodes: ClusterNodes, request: str, states: Counter[str]) -> None:
    """All nodes tell the same counts, and those of the stream."""
    for node in nodes.nodes:
        view = status(node, request)
        assert states == Counter(view["states"]), node.http
        assert 0 == view["pending"]


def test_batches_and_vehicles_at_all_nodes(nodes: ClusterNodes) -> None:
    """Each vehicle gets all, one after the other, in the order in which they were acknowledged to the platform."""
    vins = fresh(6)
    requests = [request_name() for _ in range(12)]
    cars = [Car(nodes, vin, number) for number, vin in enumerate(vins)]
    for car in cars:
        car.start()
    platforms = [Platform(node) for node in nodes.nodes]
    for number, request in enumerate(requests):
        assert taken(6) == platforms[number % 3].send(vins, request)
    told = until_final(nodes, requests, 72)
    for car in cars:
        car.stop()
        assert requests == car.got
        assert [] == car.two
    assert {"acked"} == {receipts[-1]["state"] for receipts in told.values()}
    assert 3 == len({receipts[-1]["node"] for receipts in told.values()})
    check_counts(nodes, requests[0], Counter(acked=6))
    for platform in platforms:
        platform.client.close()


def test_receipts_are_heard_at_every_node(nodes: ClusterNodes) -> None:
    vin, request = one(), request_name()
    with Watch(nodes[0], request) as watch, Platform(nodes[1]) as platform, vehicle(nodes[2], vin) as car:
        platform.send([vin], request)
        get(car)
        watch.until(vin, "accepted", "sent", "acked")


def test_vehicles_move_while_messages_are_in_flight(nodes: ClusterNodes) -> None:
    vins = fresh(6)
    requests = [request_name() for _ in range(10)]
    cars = [Car(nodes, vin, number, moves=0.4, hesitates=0.1) for number, vin in enumerate(vins)]
    for car in cars:
        car.start()
    platforms = [Platform(node) for node in nodes.nodes]
    for number, request in enumerate(requests):
        platforms[number % 3].send(vins, request)
    until_final(nodes, requests, 60)
    for car in cars:
        car.stop()
        assert set(requests) == set(car.got)
        assert [] == car.two
    for platform in platforms:
        platform.client.close()


def test_a_request_that_is_issued_again_at_another_node_replaces_what_waits(nodes: ClusterNodes) -> None:
    """Also what is in flight: each of them ends once, and the last one stays."""
    vins, request = fresh(8), request_name()
    cars = [Car(nodes, vin, number, hesitates=0.2) for number, vin in enumerate(vins)]
    for car in cars:
        car.start()
    answers: list[dict[str, int]] = []

    def publish(node: NodeProcess, number: int) -> None:
        with Platform(node) as platform:
            answers.extend(platform.send(vins, request, f"{number} {step}") for step in range(5))

    threads = [threading.Thread(target=publish, args=(node, number)) for number, node in enumerate(nodes.nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = until_final(nodes, [request], 8 * 15)
    for car in cars:
        car.stop()
        assert [] == car.two
    finals = Counter(r["state"] for found in told.values() for r in found if r["state"] in FINAL)
    assert sum(answer["replaced"] for answer in answers) == finals["replaced"]
    assert 120 == finals["replaced"] + finals["acked"]
    check_counts(nodes, request, finals)


@pytest.mark.parametrize("how", ["sends", "accepts"])
def test_a_node_is_killed(nodes: ClusterNodes, how: str) -> None:
    """The one that sends: its vehicles come to others. The one that accepts: the platform repeats its batches there."""
    vins = fresh(8)
    requests = [request_name() for _ in range(30)]
    cars = [Car(nodes, vin, 2 if how == "sends" else number, hesitates=0.05) for number, vin in enumerate(vins)]
    for car in cars:
        car.start()
    killer = threading.Timer(0.4, nodes[2].kill)
    killer.start()
    try:
        for request in requests:
            _accepted(nodes, 0 if how == "sends" else 2, vins, request)
        killer.join()
        until_final(nodes, requests, 240)
        for car in cars:
            car.stop()
            assert set(requests) == set(car.got)
            assert [] == car.two
    finally:
        killer.join()
        nodes.nodes[2] = nodes.node("n3").start()
    for request in requests:
        check_counts(nodes, request, Counter(acked=8))


def _accepted(nodes: ClusterNodes, at: int, vins: Sequence[str], request: str) -> None:
    """Send a batch with an id until some node has accepted it."""
    deadline = time.monotonic() + PATIENCE
    while True:
        assert time.monotonic() < deadline
        try:
            with Platform(nodes[at % 3]) as platform:
                answer = platform.send(vins, request, batch_id=f"{request}-1")
        except (OSError, Closed, TimeoutError):
            at += 1
            continue
        assert len(vins) == answer["accepted"]
        return


def test_a_node_stands_still_for_longer_than_its_lease(nodes: ClusterNodes) -> None:
    """Its vehicles come to others meanwhile; what it still says when it goes on is too late."""
    vins = fresh(6)
    requests = [request_name() for _ in range(12)]
    cars = [Car(nodes, vin, 2, hesitates=0.05) for vin in vins]
    for car in cars:
        car.start()
    with Platform(nodes[0]) as platform:
        for number, request in enumerate(requests):
            if number == 4:
                os.kill(nodes[2].pid, signal.SIGSTOP)
            platform.send(vins, request)
            time.sleep(0.05)
        for car in cars:
            car.stop()
        cars = [Car(nodes, vin, number % 2, hesitates=0.05) for number, vin in enumerate(vins)]
        time.sleep(4.0)  # longer than the lease: it is found dead
        for car in cars:
            car.start()
        os.kill(nodes[2].pid, signal.SIGCONT)
        until_final(nodes, requests, 72)
    for car in cars:
        car.stop()
        assert [] == car.two
    _until_ready(nodes[2])
    for request in requests:
        check_counts(nodes, request, Counter(acked=6))


def _until_ready(node: NodeProcess) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        with suppress(Exception), node.web("") as web:
            if 200 == web.get("/readyz").status_code:
                return
        assert time.monotonic() < deadline, "it does not join again"
        time.sleep(0.2)


def test_a_batch_id_is_known_at_all_nodes(nodes: ClusterNodes) -> None:
    vins, request = fresh(3), request_name()
    platforms = [Platform(node) for node in nodes.nodes]
    answers = [platform.send(vins, request, batch_id="b-1") for platform in platforms]
    assert [taken(3), taken(3) | {"repeated": 1}, taken(3) | {"repeated": 1}] == answers
    platforms[2].refused("$SDV-FANOUT", {"ids": vins[:1], "request_id": request, "data": "x", "batch_id": "b-1"})
    assert 3 == len(receipts_of(nodes, request))
    for platform in platforms:
        platform.client.close()


def test_one_batch_at_all_nodes_at_the_same_time_is_stored_once(nodes: ClusterNodes) -> None:
    vins = fresh(20)
    for _ in range(5):
        request = request_name()
        answers: list[dict[str, int]] = []

        def publish(node: NodeProcess, request: str = request, answers: list[dict[str, int]] = answers) -> None:
            with Platform(node) as platform:
                answers.append(platform.send(vins, request, batch_id="b-1"))

        threads = [threading.Thread(target=publish, args=(node,)) for node in nodes.nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [20, 20, 20] == [answer["accepted"] for answer in answers]
        assert 2 == sum(answer.get("repeated", 0) for answer in answers)
        assert 20 == len(receipts_of(nodes, request))


def test_requests_are_decided_about_at_any_node(nodes: ClusterNodes) -> None:
    vin, other, request = one(), one(), request_name()
    with Platform(nodes[0]) as platform, vehicle(nodes[1], vin) as car:
        platform.send([other], request)
        run("fanout", "pause", request, "--http", nodes[2].http)
        platform.send([vin], request)
        quiet(car)
        for node in nodes.nodes:
            assert "paused" == status(node, request)["status"]
            why = json.loads(run("fanout", "why", vin, "--http", node.http, "--json").stdout)
            assert "paused" == why["reason"]
        run("fanout", "resume", request, "--http", nodes[0].http)
        message = get(car, ack=False)
        assert topic_of(vin, request) == message.topic
        for node in nodes.nodes:
            why = json.loads(run("fanout", "why", vin, "--http", node.http, "--json").stdout)
            assert "in_flight" == why["reason"]
            shown = json.loads(run("vehicle", "show", vin, "--http", node.http, "--json").stdout)
            assert shown["connected"]
        acknowledge(car, message)
        run("fanout", "cancel", request, "--http", nodes[1].http)
        until_final(nodes, [request], 2)
        run("fanout", "gc", "--http", nodes[2].http)
    for node in nodes.nodes:
        assert {"acked": 1, "cancelled": 1} == status(node, request)["states"]
        names = [view["request_id"] for view in json.loads(run("fanout", "list", "--http", node.http, "--json").stdout)]
        assert request in names
        targets = json.loads(run("fanout", "targets", request, "--http", node.http, "--json").stdout)
        assert {vin: "acked", other: "cancelled"} == {target["vin"]: target["state"] for target in targets}
