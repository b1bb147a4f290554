"""A day in the life of the fan-out, over real processes and sockets. How it behaves is shown in `tests/unit/fanout`.

What a kill or a restart may do to it, on every engine, is in `test_fanout_durable`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from tests.scenarios.witness import wait_until
from tests.support.checks import both_versions
from tests.support.consumers import connected, lasting, subscribe, unique
from tests.support.fanout import (
    DATA,
    INGRESS,
    NOT_AUTHORIZED,
    TRIGGER,
    Platform,
    Watch,
    as_bytes,
    batch,
    figures,
    fresh,
    get,
    one,
    request_name,
    stored_receipts,
    taken,
    told,
    topic_of,
    vehicle,
)
from tests.support.flows import acknowledge
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import DISCONNECT, publish_packet

CONFIG = """
[plugins.fanout]
ack_timeout = 5.0
retry_delay = 0.05
retry_delay_max = 0.05
max_attempts = 8
max_pending = 4
"""


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess("--node", "depot", config=CONFIG, http=True) as running:
        yield running


def decide(operator: Operator, request: str, verb: str) -> None:
    answer = operator.web.post(f"fanout/requests/{request}/{verb}")
    assert 200 == answer.status_code, answer.text


@both_versions
def test_a_campaign_from_its_first_batch_to_its_last_receipt(
    node: NodeProcess, platform: Platform, operator: Operator, version: int
) -> None:
    """Both forms, repeated batches, vehicles that are there, come later or come back; receipts on topic and stream."""
    (there, later, back), request, data = fresh(3), request_name(), bytes(range(256)) * 20
    early = vehicle(node, there, version)
    with Watch(node, request, version) as watch, Platform(node, version) as sender:
        sender.store(request, data)
        for _ in range(2):
            sender.trigger([there, later, back], request, request, batch_id="b1")
        assert (topic_of(there, request), data) == told(early)
        client = vehicle(node, back, version)
        first = get(client, ack=False)
        client.abort()
        client = lasting(node, back, version)
        again = get(client, ack=False)
        assert (True, first.packet_id, data) == (again.dup, again.packet_id, again.payload)
        acknowledge(client, again)
        assert (topic_of(later, request), data) == told(vehicle(node, later, version))
        watch.gather(lambda: watch.number("acked") == 3, "all have acknowledged")
        assert ["accepted", "sent", "acked"] == watch.states(there)
        seen = watch.seen
    fields = ["v", "state", "vin", "request_id", "delivery_id", "time", "node", "attempt", "reason"]
    assert all(fields == list(receipt) and "depot" == receipt["node"] for receipt in seen)
    reader = connected(node, unique("reader"), version)
    subscribe(reader, "$stream/receipts/earliest")
    found: list[dict[str, Any]] = []
    while len(found) < len(seen):
        receipt = json.loads(get(reader).payload)
        found += [receipt] if receipt["request_id"] == request else []
    assert seen == found
    platform.send([there], request, "and then")
    assert (topic_of(there, request), b"and then") == told(early), "nothing came twice"
    view = operator.show("fanout/requests", request)
    assert 4 == view["targets"] == sum(view["states"].values())


def test_each_delivery_ends_in_its_own_way(node: NodeProcess, platform: Platform, operator: Operator) -> None:
    """G1: acknowledged, refused, replaced, called off, expired, too many; topic, stream, counts and targets agree."""
    (vin, refusing, full), names = fresh(3), {word: request_name() for word in ("pause", "cancel", "expire", "go")}

    def of_these(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [receipt for receipt in found if receipt["request_id"] in names.values()]

    with Watch(node) as watch:
        for name in (*names.values(), names["go"]):
            platform.send([vin], name, name, **({"expires_in": 0.01} if name == names["expire"] else {}))
        for verb in ("pause", "cancel"):
            decide(operator, names[verb], verb)
        for _ in range(5):
            platform.send([full], names["go"], mode="append")
        platform.send([refusing], names["go"])
        client = vehicle(node, refusing)
        for _ in range(8):
            acknowledge(client, get(client, ack=False), reason=0x80)
        client = vehicle(node, vin)
        assert names["go"].encode() == get(client).payload
        decide(operator, names["pause"], "resume")
        assert names["pause"].encode() == get(client).payload
        wanted = {
            "pause": {"acked": 1},
            "cancel": {"cancelled": 1},
            "expire": {"expired": 1},
            "go": {"acked": 1, "replaced": 1, "failed": 2, "accepted": 4},
        }
        for word, states in wanted.items():
            wait_until(lambda w=word, s=states: counted(operator, names[w]) == s, f"{word}: {states}")  # type: ignore[misc]
        receipts = of_these(stored_receipts(operator))
        watch.gather(lambda: len(of_these(watch.seen)) >= len(receipts), "all receipts")
    assert receipts == of_these(watch.seen), "topic and stream differ"
    last = {receipt["delivery_id"]: (receipt["state"], receipt["reason"]) for receipt in receipts}
    reasons = {"", "reissued", "cancelled", "expires_in", "refused_0x80", "pending_limit"}
    assert reasons == {reason for _, reason in last.values()}
    targets = [
        target
        for name in names.values()
        for target in operator.web.get(f"fanout/requests/{name}/targets", params={"limit": 100}).json()["data"]
    ]
    assert last == {target["delivery_id"]: (target["state"], target["reason"]) for target in targets}


def counted(operator: Operator, request: str) -> dict[str, int]:
    return dict(operator.show("fanout/requests", request)["states"])


def test_a_silent_vehicle_is_sent_away_and_served_when_it_is_back(node: NodeProcess, platform: Platform) -> None:
    vin, request = one(), request_name()
    client = vehicle(node, vin)
    with Watch(node, request) as watch:
        platform.send([vin], request)
        first = get(client, ack=False)
        *_, goodbye = client.expect_closed()
        assert (DISCONNECT, 0x80) == (goodbye.type, goodbye.reason)
        again = get(lasting(node, vin))
        assert (True, first.packet_id) == (again.dup, again.packet_id)
        receipts = watch.until(vin, "accepted", "sent", "retried", "sent", "acked")
        assert [0, 1, 1, 2, 2] == [receipt["attempt"] for receipt in receipts]


def test_a_wrong_batch_over_a_socket(node: NodeProcess, platform: Platform, operator: Operator) -> None:
    """MQTT 5 is told why, and goes on; MQTT 3.1.1 has no way to say no but to disconnect, without a PUBACK."""
    wrong = batch([one(), "short"], "task_wrong")
    assert "ids[1]" in platform.refused(INGRESS, wrong)
    with Platform(node, 4) as old:
        old.client.send(publish_packet(INGRESS, as_bytes(wrong), version=4, qos=1, packet_id=1))
        assert [] == old.client.expect_closed()
    assert 404 == operator.web.get("fanout/requests/task_wrong").status_code
    assert taken(1) == platform.send([one()], request_name())


@pytest.mark.parametrize("protocol", [MQTTProtocolVersion.MQTTv311, MQTTProtocolVersion.MQTTv5], ids=["3.1.1", "5"])
def test_clients_that_others_have_written(node: NodeProcess, protocol: MQTTProtocolVersion) -> None:
    """A platform and a vehicle on Eclipse Paho."""
    vin, seen = one(), []
    car = paho.Client(CallbackAPIVersion.VERSION2, client_id=vin, protocol=protocol)
    car.on_message = lambda _client, _userdata, message: seen.append((message.topic, bytes(message.payload)))
    car.on_connect = lambda client, *_: client.subscribe(f"agent/{vin}/proxy/request/+", 1)
    platform = paho.Client(CallbackAPIVersion.VERSION2, client_id=unique("paho"), protocol=protocol)
    for client in (car, platform):
        client.connect(node.host, node.port)
        client.loop_start()
    try:
        for number in range(3):
            sent = platform.publish(INGRESS, as_bytes(batch([vin], f"task_paho_{number}", f"{number}")), 1)
            sent.wait_for_publish(30)
        wait_until(lambda: len(seen) == 3, "all three arrive")
    finally:
        for client in (car, platform):
            client.disconnect()
            client.loop_stop()
    assert [(topic_of(vin, f"task_paho_{number}"), b"%d" % number) for number in range(3)] == seen


def test_the_largest_batch_there_may_be(node: NodeProcess, platform: Platform, operator: Operator) -> None:
    """S9: one message, one acknowledgement, a receipt for each vehicle; a watcher misses none of a smaller one."""
    vins, request = fresh(10_000), request_name()
    assert taken(10_000) == platform.send(vins, request, "x" * 4096)
    view = operator.show("fanout/requests", request)
    assert (10_000, 10_000, {"accepted": 10_000}) == (view["targets"], view["pending"], view["states"])
    for vin in (vins[0], vins[9999]):
        assert (topic_of(vin, request), b"x" * 4096) == told(vehicle(node, vin))
    text = platform.refused(INGRESS, batch([*vins, one()], request))
    assert "10001" in text and "10000" in text and "max_vins" in text
    watched = request_name()
    with Watch(node, watched) as watch:
        platform.send(vins[:2000], watched)
        watch.gather(lambda: len(watch.seen) == 2000, "one for each")
        assert Counter(vins[:2000]) == Counter(receipt["vin"] for receipt in watch.seen)
    of_both = Counter(r["vin"] for r in stored_receipts(operator) if r["state"] == "accepted")
    assert all(of_both[vin] == 1 + (number < 2000) for number, vin in enumerate(vins))


def test_the_stream_of_receipts_is_not_for_others_to_change(
    node: NodeProcess, platform: Platform, operator: Operator
) -> None:
    """Nobody publishes to it, declares it anew, changes or deletes it: what became of a message stays so."""
    vin, request = one(), request_name()
    platform.send([vin], request)
    answer = platform.publish("$stream/receipts", b"{}")
    assert (answer.reason or 0) >= 0x80
    for method in ("POST", "PUT", "DELETE"):
        body = {"topics": ["forged/#"]} if method != "DELETE" else None
        answered = operator.web.request(method, "streams/receipts", json=body)
        assert 400 <= answered.status_code < 500, method
    platform.client.publish("forged/1", b"{}", 1)
    platform.send([vin], request)
    mine = [receipt["state"] for receipt in stored_receipts(operator) if receipt["request_id"] == request]
    assert ["accepted", "accepted", "replaced"] == mine


def test_access_rules_reserve_it_to_the_platform(tmp_path: Path) -> None:
    """S48, G14: rules decide who may command the fleet; what is sent to vehicles is not subject to them."""
    rules = tmp_path / "acl.conf"
    rules.write_text(
        '{allow, {user, "platform"}, all, ["$SDV-FANOUT/#"]}.\n'
        '{deny, all, all, ["$SDV-FANOUT/#"]}.\n'
        '{allow, all, subscribe, ["agent/${clientid}/proxy/request/+"]}.\n'
        '{deny, all, all, ["agent/#"]}.\n'
    )
    with NodeProcess(config=f'[plugins.access]\nacl_file = "{rules}"\n', http=True) as node:
        vin, other = fresh(2)
        allowed = connected(node, unique("p"), 5, username="platform")
        stranger = connected(node, unique("s"), 5, username="mallory")
        car = vehicle(node, vin)
        for client, topic, payload in (
            (stranger, INGRESS, as_bytes(batch([vin], "task_acl_1"))),
            (stranger, f"{DATA}x", b"x"),
            (stranger, TRIGGER, b"{}"),
            (car, topic_of(vin, "task_acl_1"), b"forged"),
        ):
            answer = client.publish(topic, payload, 1)
            assert answer is not None and NOT_AUTHORIZED == answer.reason
        assert [0x87] == stranger.subscribe("$SDV-FANOUT/receipt/#", 1).reasons
        assert [0x87] == stranger.subscribe(f"agent/{other}/proxy/request/+", 1).reasons
        answer = allowed.publish(INGRESS, as_bytes(batch([vin], "task_acl_2")), 1)
        assert answer is not None and taken(1) == figures(answer)
        assert topic_of(vin, "task_acl_2") == get(car).topic
