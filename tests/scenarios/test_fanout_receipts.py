"""What became of every message: receipts on their topics, in the stream, in counts; each delivery ends exactly once.

G1 of the list of behaviours that the fan-out was designed from: platforms could not learn what became of requests.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.scenarios.witness import wait_until
from tests.support.checks import both_versions
from tests.support.consumers import connected, lasting, subscribe, unique
from tests.support.fanout import (
    Platform,
    Watch,
    brief,
    fresh,
    get,
    one,
    quiet,
    request_name,
    topic_of,
    vehicle,
)
from tests.support.flows import acknowledge
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import Client

FINAL = {"acked", "replaced", "failed", "expired", "cancelled"}
PAGE = 1000

CONFIG = """
[plugins.fanout]
ack_timeout = 1.0
retry_delay = 0.1
max_attempts = 2
max_pending = 4
"""


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess("--node", "depot", config=CONFIG, http=True) as running:
        yield running


def stored(desk: Operator, request: str) -> list[dict[str, Any]]:
    """The receipts of a request that are in the stream."""
    found: list[dict[str, Any]] = []
    after = 0
    while page := desk.read("streams", "receipts", after=after, limit=PAGE):
        for message in page:
            assert message["topic"].startswith("$SDV-FANOUT/receipt/")
            found.append(json.loads(message["payload"]))
        after = page[-1]["position"]
    return [receipt for receipt in found if receipt["request_id"] == request]


def until_settled(desk: Operator, request: str) -> dict[str, Any]:
    """The status of a request when all its deliveries have ended."""
    wait_until(lambda: desk.show("fanout/requests", request)["pending"] == 0, f"{request} is over")
    return desk.show("fanout/requests", request)


def test_the_schema(node: NodeProcess, platform: Platform) -> None:
    """Version, names, types and times, field by field."""
    vin, request, began = one(), request_name(), time.time()
    client = vehicle(node, vin)
    with Watch(node, request) as watch:
        platform.send([vin], request)
        get(client)
        receipts = watch.until(vin, "accepted", "sent", "acked")
    for receipt in receipts:
        fields = ["v", "state", "vin", "request_id", "delivery_id", "time", "node", "attempt", "reason"]
        assert fields == list(receipt)
        assert (1, vin, request, "depot", "") == tuple(receipt[n] for n in ("v", "vin", "request_id", "node", "reason"))
        assert isinstance(receipt["time"], float)
    assert f"{vin}." in receipts[0]["delivery_id"]
    assert 1 == len({receipt["delivery_id"] for receipt in receipts})
    assert [0, 1, 1] == [receipt["attempt"] for receipt in receipts]
    times = [began, *(receipt["time"] for receipt in receipts), time.time()]
    assert sorted(times) == times


@both_versions
def test_whoever_watches_one_request_or_one_vehicle(node: NodeProcess, platform: Platform, version: int) -> None:
    """Topics tell the request and the vehicle, so one can watch either."""
    first, second, request, other = one(), one(), request_name(), request_name()
    one_vehicle = connected(node, version=version)
    subscribe(one_vehicle, f"$SDV-FANOUT/receipt/+/{first}")
    everything = connected(node, version=version)
    subscribe(everything, "$SDV-FANOUT/receipt/#", 0)
    with Watch(node, request, version) as watch:
        platform.send([first, second], request)
        platform.send([first], other)
        assert {first, second} == {watch.take()["vin"], watch.take()["vin"]}
        watch.nothing_more()
    seen = [get(one_vehicle), get(one_vehicle)]
    assert {f"$SDV-FANOUT/receipt/{name}/{first}" for name in (request, other)} == {message.topic for message in seen}
    assert {1} == {message.qos for message in seen}
    assert 3 == len({(message.topic, message.payload) for message in (get(everything) for _ in range(3))})
    quiet(one_vehicle)
    quiet(everything)


def every_end(node: NodeProcess, platform: Platform, desk: Operator, request: str) -> dict[str, list[str]]:
    """Vehicles whose messages of one request end in every way there is; by the way."""
    vins = fresh(8)
    acked, refusing, silent, replaced, expired, cancelled, full, plain = vins
    for number in range(4):
        platform.send([full], f"{request}-{number}")
    platform.send([expired], request, "x", expires_in=0.01)
    platform.send([replaced], request, "old")
    answer = platform.send([vin for vin in vins if vin not in (expired, cancelled)], request, "x")
    assert {"accepted": 5, "duplicates": 0, "replaced": 1, "rejected": 1} == answer
    # One after the other: nobody is silent for as long as the others take.
    clients = [vehicle(node, silent)]
    for vin in (acked, replaced, plain):
        clients.append(vehicle(node, vin, qos=0 if vin == plain else 1))
        get(clients[-1])
    clients.append(vehicle(node, refusing))
    for _ in range(2):
        acknowledge(clients[-1], get(clients[-1], ack=False), reason=0x80)
    clients[0].expect_closed()  # the first attempt; the second one is made when it is back
    clients[0] = lasting(node, silent)
    wait_until(lambda: desk.show("fanout/requests", request)["states"].get("failed") == 3, "three have failed")
    desk.web.post("fanout/gc")
    wait_until(lambda: desk.show("fanout/requests", request)["states"].get("expired") == 1, "one has expired")
    platform.send([cancelled], request)
    assert 200 == desk.web.post(f"fanout/requests/{request}/cancel").status_code
    return {
        "acked": [acked, replaced, plain],
        "failed": [refusing, silent, full],
        "replaced": [replaced],
        "expired": [expired],
        "cancelled": [cancelled],
    }


def test_each_delivery_ends_exactly_once(node: NodeProcess, platform: Platform, desk: Operator) -> None:
    """All states and their reasons; topic, stream, counts and targets tell the same."""
    request = request_name()
    with Watch(node, request) as watch:
        ends = every_end(node, platform, desk, request)
        status = until_settled(desk, request)
        receipts = stored(desk, request)
        watch.gather(lambda: len(watch.seen) >= len(receipts), "all receipts")
        watch.nothing_more()
    key = lambda receipt: (receipt["delivery_id"], receipt["time"], receipt["state"])  # noqa: E731
    assert sorted(receipts, key=key) == sorted(watch.seen, key=key), "topic and stream differ"
    by_delivery: dict[str, list[str]] = {}
    for receipt in receipts:
        by_delivery.setdefault(receipt["delivery_id"], []).append(receipt["state"])
    finals = {r["delivery_id"]: (r["vin"], r["state"], r["reason"]) for r in receipts if r["state"] in FINAL}
    for delivery, states in by_delivery.items():
        assert 1 == len(FINAL.intersection(states)) == sum(state in FINAL for state in states), (delivery, states)
        assert states[-1] in FINAL, (delivery, states)
        assert ["accepted"] == [state for state in states if state == "accepted"] == states[:1], (delivery, states)
    assert {state: sorted(vins) for state, vins in ends.items()} == {
        state: sorted(vin for vin, end, _ in finals.values() if end == state) for state in FINAL
    }
    reasons = {(state, reason) for _, state, reason in finals.values()}
    assert {
        ("acked", ""),
        ("acked", "qos0"),
        ("failed", "no_ack"),
        ("failed", "refused_0x80"),
        ("failed", "pending_limit"),
        ("replaced", "reissued"),
        ("expired", "expires_in"),
        ("cancelled", "cancelled"),
    } == reasons
    assert Counter(state for _, state, _ in finals.values()) == Counter(status["states"])
    assert len(finals) == status["targets"]
    targets = desk.web.get(f"fanout/requests/{request}/targets", params={"limit": 100}).json()["data"]
    assert finals == {t["delivery_id"]: (t["vin"], t["state"], t["reason"]) for t in targets}


def test_the_stream_from_its_beginning_and_live(node: NodeProcess, platform: Platform) -> None:
    """`$stream/receipts` over MQTT: what was, then what comes, in order, the same as on the topic."""
    vin, request = one(), request_name()
    early = connected(node, unique("early"))
    subscribe(early, "$stream/receipts")
    with Watch(node, request) as watch:
        client = vehicle(node, vin)
        platform.send([vin], request, "1")
        get(client)
        watch.until(vin, "accepted", "sent", "acked")
        late = connected(node, unique("late"))
        subscribe(late, "$stream/receipts/earliest")
        platform.send([vin], request, "2")
        get(client)
        watch.until(vin, *["accepted", "sent", "acked"] * 2)
        for reader in (early, late):
            assert watch.seen == follow(reader, request, 6)


def test_a_reader_that_comes_later_needs_no_further_receipt(node: NodeProcess, platform: Platform) -> None:
    """The command of docs/receipts.md: everything there is, though no reader was there when it was appended."""
    vin, request = one(), request_name()
    with Watch(node, request) as watch:
        client = vehicle(node, vin)
        platform.send([vin], request, "1")
        get(client)
        watch.until(vin, "accepted", "sent", "acked")
        reader = connected(node, unique("late"))
        subscribe(reader, "$stream/receipts/earliest")
        assert watch.seen == follow(reader, request, 3)


def follow(reader: Client, request: str, count: int) -> list[dict[str, Any]]:
    """So many receipts of a request from a reader of the stream."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        message = get(reader)
        receipt = json.loads(message.payload)
        assert f"$SDV-FANOUT/receipt/{receipt['request_id']}/{receipt['vin']}" == message.topic
        if receipt["request_id"] == request:
            found.append(receipt)
    return found


def test_a_receipt_is_stored_before_the_next_message_is_sent(
    node: NodeProcess, platform: Platform, desk: Operator
) -> None:
    """A delivery is finished when its receipt is stored, not before."""
    vin, request = one(), request_name()
    client = vehicle(node, vin)
    for number in range(3):
        platform.send([vin], request, f"{number}", mode="append")
    for number in range(3):
        message = get(client, ack=False)
        assert b"%d" % number == message.payload
        acked = [receipt for receipt in stored(desk, request) if receipt["state"] == "acked"]
        assert number == len(acked), brief(acked)
        acknowledge(client, message)


def test_a_batch_has_one_time(node: NodeProcess, platform: Platform) -> None:
    """S3: that of the node when it came, the same for all its vehicles; later batches have later ones."""
    vins, request = fresh(50), request_name()
    with Watch(node, request) as watch:
        began = time.time()
        for _ in range(2):
            platform.send(vins, request, mode="append")
        watch.gather(lambda: watch.number("accepted") == 100, "all are accepted")
        times = {receipt["time"] for receipt in watch.of(vins[0])}
        assert 2 == len(times) and began <= min(times) <= max(times) <= time.time()
        assert all(times == {receipt["time"] for receipt in watch.of(vin)} for vin in vins)


def test_a_request_id_that_is_used_again_has_histories_of_its_own(
    node: NodeProcess, platform: Platform, desk: Operator
) -> None:
    """The seed, A3: numbers of requests are finite; deliveries are told apart by their ids, and counted each."""
    vin, request = one(), request_name()
    client = vehicle(node, vin)
    for number in range(4):
        platform.send([vin], request, f"{number}")
        message = get(client, ack=False)
        acknowledge(client, message, reason=0x80 if number == 3 else 0)
    acknowledge(client, get(client, ack=False), reason=0x80)
    status = until_settled(desk, request)
    assert (4, {"acked": 3, "failed": 1}) == (status["targets"], status["states"])
    histories: dict[str, list[str]] = {}
    for receipt in stored(desk, request):
        histories.setdefault(receipt["delivery_id"], []).append(receipt["state"])
    taken = ["accepted", "sent", "acked"]
    assert [taken] * 3 + [["accepted", "sent", "retried", "sent", "failed"]] == list(histories.values())


def test_the_history_of_a_vehicle(node: NodeProcess, platform: Platform, desk: Operator) -> None:
    """How its last messages have ended, newest first, whatever the end was."""
    vin, request = one(), request_name()
    platform.send([vin], request, "old")
    platform.send([vin], request, "new")
    client = vehicle(node, vin)
    get(client)
    wait_until(lambda: len(desk.show("vehicles", vin)["history"]) == 2, "both ends are there")
    assert ["acked", "replaced"] == [entry["state"] for entry in desk.show("vehicles", vin)["history"]]


def test_the_stream_is_not_for_others_to_change(node: NodeProcess, platform: Platform, desk: Operator) -> None:
    """Nobody publishes to it, declares it anew, changes or deletes it: what became of a message stays so."""
    with Watch(node) as watch:
        vin, request = one(), request_name()
        platform.send([vin], request)
        watch.until(vin, "accepted")
        answer = platform.publish("$stream/receipts", b"{}")
        assert (answer.reason or 0) >= 0x80
        assert 400 <= desk.web.post("streams/receipts", json={"topics": ["forged/#"]}).status_code < 500
        assert 400 <= desk.web.put("streams/receipts", json={"topics": ["forged/#"]}).status_code < 500
        assert 400 <= desk.web.delete("streams/receipts").status_code < 500
        platform.client.publish("forged/1", b"{}", 1)
        assert ["accepted"] == [receipt["state"] for receipt in stored(desk, request)]
        watch.nothing_more()


def test_nobody_who_watches_costs_nothing_but_the_stream(node: NodeProcess, platform: Platform, desk: Operator) -> None:
    """Receipts are stored whether or not somebody listens, and a large batch has one for each vehicle."""
    vins, request = fresh(2000), request_name()
    platform.send(vins, request)
    assert Counter(vins) == Counter(receipt["vin"] for receipt in stored(desk, request))


def test_a_watcher_of_a_large_batch_misses_nothing(node: NodeProcess, platform: Platform) -> None:
    """A receipt for each of five thousand vehicles, on its topic, in time."""
    vins, request = fresh(5000), request_name()
    with Watch(node, request) as watch:
        platform.send(vins, request)
        watch.gather(lambda: len(watch.seen) == 5000, "one for each")
        assert Counter(vins) == Counter(receipt["vin"] for receipt in watch.seen)


def test_messages_go_where_receipts_say(node: NodeProcess, platform: Platform) -> None:
    """`acked` follows the vehicle's own PUBACK and nothing else: of ten vehicles, those that have acknowledged."""
    vins, request = fresh(10), request_name()
    clients = [vehicle(node, vin) for vin in vins[:6]]
    with Watch(node, request) as watch:
        platform.send(vins, request)
        for number, client in enumerate(clients):
            message = get(client, ack=number < 4)
            assert topic_of(vins[number], request) == message.topic
        watch.gather(lambda: watch.number("acked") >= 4, "those that have acknowledged")
        assert set(vins[:4]) == {receipt["vin"] for receipt in watch.seen if receipt["state"] == "acked"}
