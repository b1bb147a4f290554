"""What the platform may publish, and what it is answered. A wrong batch leaves no trace; a right one is all there.

Numbers such as A1, S7 or G8 in the docstrings name rows of the list of behaviours that the fan-out was designed from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from tests.scenarios.witness import wait_until
from tests.support.checks import both_versions
from tests.support.consumers import connected, subscribe, unique
from tests.support.fanout import (
    DATA,
    INGRESS,
    NOT_AUTHORIZED,
    TRIGGER,
    Platform,
    Watch,
    batch,
    figures,
    fresh,
    get,
    octets,
    one,
    quiet,
    request_name,
    taken,
    told,
    topic_of,
    vehicle,
)
from tests.support.flows import CONTENT_TYPE, REASON_STRING, USER_PROPERTY
from tests.support.node import NodeProcess
from tests.support.operator import Operator
from tests.support.wire import PUBACK, PUBCOMP, PUBREC, PUBREL, ack_packet, prop, publish_packet

QUOTA_EXCEEDED = 0x97

#: Small limits, so that tests reach them.
LIMITS = """
[plugins.fanout]
max_vins = 10
max_payload = 1000
max_pending = 3
max_data_bytes = 2500
check_digit = true
"""


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(http=True) as running:
        yield running


@pytest.fixture(scope="module")
def narrow() -> Iterator[NodeProcess]:
    with NodeProcess(config=LIMITS, http=True) as running:
        yield running


# --- both forms ---------------------------------------------------------------------------------------------------


@both_versions
def test_one_message_to_many_vehicles(node: NodeProcess, version: int) -> None:
    """A1, S18, S35: a batch reaches each vehicle once, on its own topic, QoS 1, not retained, byte by byte."""
    vins, request = fresh(10), request_name()
    vehicles = [vehicle(node, vin, (4, 5)[number % 2]) for number, vin in enumerate(vins)]
    with Platform(node, version) as platform:
        answer = platform.publish(INGRESS, batch(vins, request, "für alle"))
        assert (taken(10) if version == 5 else {}) == figures(answer)
    for vin, client in zip(vins, vehicles, strict=True):
        message = get(client)
        assert (topic_of(vin, request), "für alle".encode()) == (message.topic, message.payload)
        assert (1, False, False) == (message.qos, message.retain, message.dup)
        quiet(client, 0.01)


@both_versions
def test_data_first_and_then_vehicles(node: NodeProcess, version: int) -> None:
    """A1, S1: data is published once, under an id that may have slashes, and batches name it."""
    vins, request, data = fresh(4), request_name(), bytes(range(256)) * 20
    data_id = f"campaign/{request}/part 1"
    with Platform(node, version) as platform:
        platform.store(data_id, data)
        for part in (vins[:2], vins[2:]):
            assert (taken(2) if version == 5 else {}) == platform.trigger(part, request, data_id)
    for vin in vins:
        assert (topic_of(vin, request), data) == told(vehicle(node, vin))


def test_any_bytes_in_one_message(node: NodeProcess, platform: Platform) -> None:
    """A1: JSON cannot carry bytes; base64 can."""
    vin, data = one(), bytes(range(256))
    platform.send([vin], "task_bin_1", data)
    platform.send([vin], "task_bin_2", "")
    client = vehicle(node, vin)
    assert [(topic_of(vin, "task_bin_1"), data), (topic_of(vin, "task_bin_2"), b"")] == [told(client), told(client)]


def test_data_and_trigger_in_one_write(node: NodeProcess, platform: Platform) -> None:
    """S10: a platform that does not wait for the first acknowledgement is served in the order in which it speaks."""
    vins, request, client = fresh(3), request_name(), platform.client
    packets: list[bytes] = []
    for number, vin in enumerate(vins):
        body = octets({"ids": [vin], "request_id": request, "data_id": f"{request}-{number}"})
        packets.append(publish_packet(f"{DATA}{request}-{number}", b"%d" % number, qos=1, packet_id=2 * number + 100))
        packets.append(publish_packet(TRIGGER, body, qos=1, packet_id=2 * number + 101))
    client.send(b"".join(packets))
    for _ in packets:
        answer = client.expect(PUBACK)
        assert 0 == answer.reason, f"{answer.packet_id}: {answer.prop(REASON_STRING)}"
    for number, vin in enumerate(vins):
        assert (topic_of(vin, request), b"%d" % number) == told(vehicle(node, vin))


def test_quality_of_service_of_a_batch(node: NodeProcess, platform: Platform) -> None:
    """S5: QoS 0 is taken without an answer; QoS 2 is answered by PUBREC, and counts once though it is repeated."""
    vin, client = one(), platform.client
    client.publish(INGRESS, octets(batch([vin], "task_q_0")), 0)
    payload, packet_id = octets(batch([vin], "task_q_2", mode="append")), client.next_id()
    client.send(publish_packet(INGRESS, payload, qos=2, packet_id=packet_id))
    assert taken(1) == figures(client.await_answer(PUBREC, packet_id))
    client.send(publish_packet(INGRESS, payload, qos=2, packet_id=packet_id, dup=True))
    client.await_answer(PUBREC, packet_id)
    client.send(ack_packet(PUBREL, packet_id))
    client.await_answer(PUBCOMP, packet_id)
    car = vehicle(node, vin)
    assert [topic_of(vin, "task_q_0"), topic_of(vin, "task_q_2")] == [get(car).topic, get(car).topic]
    quiet(car)


def test_what_platforms_publish_is_seen_by_nobody_else(node: NodeProcess, platform: Platform) -> None:
    """S4, S5: neither subscribers, nor retained; and the answer is success, not `no matching subscribers`."""
    listener = connected(node)
    subscribe(listener, "$SDV-FANOUT/#")
    subscribe(listener, "#")
    subscribe(listener, INGRESS)
    vin = one()
    body = octets(batch([vin], "task_seen_1"))
    answer = platform.client.publish(INGRESS, body, 1, retain=True)
    assert answer is not None and taken(1) == figures(answer)
    answer = platform.client.publish(f"{DATA}seen", b"x", 1, retain=True)
    assert answer is not None and 0 == answer.reason
    topics = {get(listener).topic}  # the receipt; it may come by two of the filters
    assert {f"$SDV-FANOUT/receipt/task_seen_1/{vin}"} == topics
    late = connected(node)
    subscribe(late, "$SDV-FANOUT/#")
    quiet(late)


def test_vehicles_get_no_properties_of_the_batch(node: NodeProcess, platform: Platform) -> None:
    """S18: the message is the data; notes of the platform stay with it."""
    vin = one()
    properties = prop(CONTENT_TYPE, "application/json") + prop(USER_PROPERTY, ("trace", "1"))
    answer = platform.client.publish(INGRESS, octets(batch([vin], "task_p_1")), 1, properties=properties)
    assert answer is not None and taken(1) == figures(answer)
    assert [] == get(vehicle(node, vin)).properties


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
            sent = platform.publish(INGRESS, octets(batch([vin], f"task_paho_{number}", f"{number}")), 1)
            sent.wait_for_publish(30)
        wait_until(lambda: len(seen) == 3, "all three arrive")
    finally:
        for client in (car, platform):
            client.disconnect()
            client.loop_stop()
    assert [(topic_of(vin, f"task_paho_{number}"), b"%d" % number) for number in range(3)] == seen


# --- the answer ---------------------------------------------------------------------------------------------------


def test_duplicates_are_counted_and_get_one_message(node: NodeProcess, platform: Platform) -> None:
    """S8: a vehicle that is named twice has one entry."""
    first, second = fresh(2)
    assert taken(2, duplicates=2) == platform.send([first, second, first, first], "task_dup_1")
    for vin in (first, second):
        client = vehicle(node, vin)
        assert topic_of(vin, "task_dup_1") == get(client).topic
        quiet(client)


def test_a_request_that_is_issued_again_replaces_what_waits(node: NodeProcess, platform: Platform) -> None:
    """A3, S21, G10: the pending key is VIN and request; only the last one is delivered, and the old one is told."""
    vins, request = fresh(3), request_name()
    with Watch(node, request) as watch:
        assert taken(2) == platform.send(vins[:2], request, "old")
        assert taken(3, replaced=2) == platform.send(vins, request, "new")
        for vin in vins:
            client = vehicle(node, vin)
            assert (topic_of(vin, request), b"new") == told(client)
            quiet(client, 0.05)
        watch.gather(lambda: watch.number("acked") == 3, "all acknowledged")
        for vin in vins[:2]:
            assert sorted(["accepted", "accepted", "replaced", "sent", "acked"]) == sorted(watch.states(vin))
            old, new = (r["delivery_id"] for r in watch.of(vin) if r["state"] == "accepted")
            assert old != new
            assert [old] == [r["delivery_id"] for r in watch.of(vin) if r["state"] == "replaced"]
            assert [new] == [r["delivery_id"] for r in watch.of(vin) if r["state"] == "acked"]


def test_other_requests_of_the_vehicle_are_not_replaced(node: NodeProcess, platform: Platform) -> None:
    """A3: the key is the pair; a replaced message loses its place in the line."""
    vin = one()
    for request, data in (("a", "1"), ("b", "2"), ("a", "3")):
        platform.send([vin], f"task_{request}", data)
    client = vehicle(node, vin)
    assert [(topic_of(vin, "task_b"), b"2"), (topic_of(vin, "task_a"), b"3")] == [told(client), told(client)]
    quiet(client)


def test_mode_append_keeps_both(node: NodeProcess, platform: Platform) -> None:
    """A3, S21: what the released plugin does is there for those who ask for it."""
    vin, request = one(), request_name()
    for number in range(3):
        assert taken(1) == platform.send([vin], request, f"{number}", mode="append")
    client = vehicle(node, vin)
    assert [(topic_of(vin, request), b"%d" % number) for number in range(3)] == [told(client) for _ in range(3)]


def test_a_request_that_was_delivered_can_be_issued_again(node: NodeProcess, platform: Platform) -> None:
    """The seed: numbers of requests are finite, so they come again; nothing is replaced, both are delivered."""
    vin, request = one(), request_name()
    client = vehicle(node, vin)
    with Watch(node, request) as watch:
        for number in (1, 2):
            assert taken(1) == platform.send([vin], request, f"{number}")
            assert (topic_of(vin, request), b"%d" % number) == told(client)
            watch.until(vin, *["accepted", "sent", "acked"] * number)
        assert 2 == len({receipt["delivery_id"] for receipt in watch.seen})


def test_two_batches_that_are_the_same_byte_by_byte(node: NodeProcess, platform: Platform) -> None:
    """G10: a platform that has missed its PUBACK publishes again; each vehicle gets the message once."""
    vins, request = fresh(5), request_name()
    payload, client = octets(batch(vins, request)), platform.client
    client.send(publish_packet(INGRESS, payload, qos=1, packet_id=900))
    client.send(publish_packet(INGRESS, payload, qos=1, packet_id=901))
    assert [taken(5), taken(5, replaced=5)] == [figures(client.expect(PUBACK)), figures(client.expect(PUBACK))]
    for vin in vins:
        car = vehicle(node, vin)
        assert topic_of(vin, request) == get(car).topic
        quiet(car, 0.05)


def test_ten_thousand_vehicles_in_one_batch(node: NodeProcess, platform: Platform) -> None:
    """S9: the largest batch there may be is one message and one acknowledgement."""
    vins, request = fresh(10_000), request_name()
    assert taken(10_000) == platform.send(vins, request, "x" * 4096)
    with Operator(node) as desk:
        view = desk.show("fanout/requests", request)
        assert (10_000, 10_000, {"accepted": 10_000}) == (view["targets"], view["pending"], view["states"])
    for vin in (vins[0], vins[4999], vins[9999]):
        assert (topic_of(vin, request), b"x" * 4096) == told(vehicle(node, vin))
    text = platform.refused(INGRESS, batch([*vins, one()], request))
    assert "10001" in text and "10000" in text and "max_vins" in text


# --- wrong batches ------------------------------------------------------------------------------------------------


def wrong_batches() -> list[tuple[str, Any, tuple[str, ...]]]:
    """What is wrong, the batch, and what the reason must name. `VIN` stands for vehicles that are right."""
    right: dict[str, Any] = {"ids": ["VIN", "VIN"], "request_id": "task_wrong_1", "data": "x"}

    def but(**fields: Any) -> dict[str, Any]:
        return {key: value for key, value in (right | fields).items() if value is not ...}

    return [
        ("empty", b"", ("JSON",)),
        ("not JSON", b"{ids: [1]}", ("JSON",)),
        ("cut short", b'{"ids": ["LMCAAAAA7RA000000"], "request_id": "r"', ("JSON",)),
        ("not UTF-8", b'{"ids": ["\xff"]}', ("JSON",)),
        ("a list", b"[]", ("object",)),
        ("null", b"null", ("object",)),
        ("deep", b"[" * 100_000, ("JSON",)),
        ("no ids", but(ids=...), ("ids", "missing")),
        ("ids is a text", but(ids="VIN"), ("ids", "list")),
        ("ids is an object", but(ids={"VIN": 1}), ("ids", "list")),
        ("no vehicles", but(ids=[]), ("ids", "empty")),
        ("a number among VINs", but(ids=["VIN", 12, "VIN"]), ("ids[1]", "12")),
        ("null among VINs", but(ids=["VIN", None]), ("ids[1]", "null")),
        ("a list among VINs", but(ids=["VIN", ["VIN"]]), ("ids[1]",)),
        ("a short VIN at the end", but(ids=["VIN"] * 199 + ["LMCAAAAA7RA00000"]), ("ids[199]", "16")),
        ("a long VIN", but(ids=["LMCAAAAA7RA0000000"]), ("ids[0]", "18")),
        ("an empty VIN", but(ids=["VIN", ""]), ("ids[1]",)),
        ("a VIN with I", but(ids=["LMCAAAAA7RA00000I"]), ("ids[0]", "I")),
        ("a VIN with O", but(ids=["LMCAAAAA7RA00000O"]), ("ids[0]", "O")),
        ("a VIN with Q", but(ids=["LMCAAAAA7RA00000Q"]), ("ids[0]", "Q")),
        ("a VIN in small letters", but(ids=["lmcaaaaa7ra000000"]), ("ids[0]",)),
        ("a VIN with a space", but(ids=["LMCAAAAA7RA000000 "]), ("ids[0]",)),
        ("a VIN with a wildcard", but(ids=["LMCAAAAA7RA00000+"]), ("ids[0]", "+")),
        ("digits of another script", but(ids=["LMCAAAAA7RA00000٣"]), ("ids[0]",)),
        ("no request", but(request_id=...), ("request_id", "missing")),
        ("a numeric request", but(request_id=7), ("request_id", "7")),
        ("request null", but(request_id=None), ("request_id", "null")),
        ("an empty request", but(request_id=""), ("request_id", "empty")),
        ("request with a slash", but(request_id="a/b"), ("request_id", "/")),
        ("request with +", but(request_id="a+b"), ("request_id", "+")),
        ("request with #", but(request_id="#"), ("request_id", "#")),
        ("request with NUL", but(request_id="a\0b"), ("request_id",)),
        ("request with a control character", but(request_id="a\nb"), ("request_id",)),
        ("a long request", but(request_id="r" * 129), ("request_id", "129")),
        ("no data", but(data=...), ("data", "missing")),
        ("data is an object", but(data={"do": "it"}), ("data",)),
        ("data is null", but(data=None), ("data", "null")),
        ("data is a number", but(data=1), ("data", "1")),
        ("bad base64", but(data="@@@@", encoding="base64"), ("data", "base64")),
        ("base64 without padding", but(data="QUI", encoding="base64"), ("data", "base64")),
        ("base64 with a line break", but(data="QU\nI=", encoding="base64"), ("data", "base64")),
        ("unknown encoding", but(encoding="hex"), ("encoding", "hex", "base64")),
        ("expires_in 0", but(expires_in=0), ("expires_in",)),
        ("expires_in negative", but(expires_in=-1.5), ("expires_in", "-1.5")),
        ("expires_in is a text", but(expires_in="10"), ("expires_in",)),
        ("expires_in is true", but(expires_in=True), ("expires_in", "true")),
        ("expires_in null", but(expires_in=None), ("expires_in", "null")),
        ("priority 10", but(priority=10), ("priority", "10")),
        ("priority -1", but(priority=-1), ("priority", "-1")),
        ("priority 1.5", but(priority=1.5), ("priority", "1.5")),
        ("priority true", but(priority=True), ("priority", "true")),
        ("unknown mode", but(mode="merge"), ("mode", "merge", "append")),
        ("mode null", but(mode=None), ("mode", "null")),
    ]


WRONG = wrong_batches()


def filled(payload: Any, vins: list[str]) -> bytes:
    if isinstance(payload, bytes):
        return payload
    text = json.dumps(payload)
    while '"VIN"' in text:
        text = text.replace('"VIN"', json.dumps(vins[text.count('"VIN"') % len(vins)]), 1)
    return text.encode()


def nothing_is_stored_for(node: NodeProcess, vins: list[str], request: str = "task_wrong_1") -> None:
    with Operator(node) as desk:
        assert 404 == desk.web.get(f"fanout/requests/{request}").status_code
        for vin in vins:
            view = desk.show("vehicles", vin)
            assert (0, [], "not_known") == (view["pending"], view["history"], view["why"]["reason"])


def test_a_wrong_batch_is_refused_as_a_whole_and_told_why(node: NodeProcess, platform: Platform) -> None:
    """S6, S7, G8: MQTT 5 hears 0x99 and what is wrong where; the connection goes on, and nothing at all is stored."""
    vins = fresh(2)
    client = vehicle(node, vins[0])
    with Watch(node) as watch:
        for what, payload, words in WRONG:
            text = platform.refused(INGRESS, filled(payload, vins))
            assert len(text) <= 200, what
            for word in words:
                assert word in text, f"{what}: {text}"
        watch.nothing_more()
    quiet(client)
    client.disconnect()
    nothing_is_stored_for(node, vins[1:])


def test_a_wrong_batch_ends_a_connection_that_cannot_be_told(node: NodeProcess) -> None:
    """S6: MQTT 3.1.1 has no way to say no but to disconnect; without a PUBACK."""
    vins = fresh(2)
    chosen = [
        row for row in WRONG if row[0] in ("not JSON", "a number among VINs", "no vehicles", "request with a slash")
    ]
    for what, payload, _ in chosen:
        with Platform(node, 4) as platform:
            platform.client.send(publish_packet(INGRESS, filled(payload, vins), version=4, qos=1, packet_id=1))
            assert [] == platform.client.expect_closed(), what
    nothing_is_stored_for(node, vins)


def test_a_wrong_batch_with_another_quality_of_service(node: NodeProcess, platform: Platform) -> None:
    """QoS 2 hears it in PUBREC; QoS 0 cannot hear it, and goes on."""
    vins = fresh(1)
    payload = octets(batch([*vins, "short"], "task_wrong_1"))
    answer = platform.publish(INGRESS, payload, 2)
    assert 0x99 == answer.reason and "ids[1]" in answer.prop(REASON_STRING)
    platform.client.publish(INGRESS, payload, 0)
    assert taken(1) == platform.send([one()], request_name())
    nothing_is_stored_for(node, vins)


def test_keys_of_other_people_are_ignored_and_logged(node: NodeProcess, platform: Platform) -> None:
    """S6: extra keys do no harm; but a misspelt one should not go unnoticed."""
    vin, request = one(), request_name()
    assert taken(1) == platform.send([vin], request, expires_inn=5, note={"by": "me"})
    wait_until(lambda: any(request in line and "expires_inn" in line for line in node.output), "it is in the log")


def as_trigger(payload: Any) -> Any:
    return payload if isinstance(payload, bytes) else payload | {"data_id": "any"}


def test_a_trigger_that_is_wrong(node: NodeProcess, platform: Platform) -> None:
    """S6, S7, S10, S30: the same rules; data that is not there is said at once instead of blocking a vehicle."""
    vins = fresh(2)
    for what, payload, words in WRONG:
        if what in ("not JSON", "no ids", "a number among VINs", "no request", "request with a slash", "priority 10"):
            text = platform.refused(TRIGGER, filled(as_trigger(payload), vins))
            assert all(word in text for word in words), f"{what}: {text}"
    right = {"ids": vins, "request_id": "task_wrong_1", "data_id": "never-published"}
    text = platform.refused(TRIGGER, right)
    assert "never-published" in text and f"{DATA}never-published" in text
    for bad, word in ((7, "7"), ("", "empty"), ("a+b", "+"), (None, "null")):
        text = platform.refused(TRIGGER, right | {"data_id": bad})
        assert "data_id" in text and word in text
    text = platform.refused(TRIGGER, batch(vins, "task_wrong_1"))
    assert "data_id" in text and INGRESS in text
    text = platform.refused(INGRESS, right)
    assert "data" in text and TRIGGER in text
    with Platform(node, 4) as old:
        old.client.send(publish_packet(TRIGGER, octets(right), version=4, qos=1, packet_id=1))
        assert [] == old.client.expect_closed()
    nothing_is_stored_for(node, vins)


# --- data ---------------------------------------------------------------------------------------------------------


def test_ids_that_are_hashes_are_checked(node: NodeProcess, platform: Platform) -> None:
    """A2, G11: SHA-1 and SHA-256, named or by their look, in any case; anything else is an id like another."""
    data, vin = b"\x00firmware\xff", one()
    sha1, sha256 = hashlib.sha1(data).hexdigest(), hashlib.sha256(data).hexdigest()
    for data_id in (sha1, sha256, sha1.upper(), f"sha1:{sha1}", f"sha256:{sha256}"):
        platform.store(data_id, data)
        text = platform.refused(f"{DATA}{data_id}", data + b"!")
        assert "data_id" in text and ("sha1" in text or "sha256" in text)
        assert taken(1) == platform.trigger([vin], f"task_{data_id[:12]}", data_id, mode="append")
    for data_id in ("sha1:123", f"sha256:{sha1}"):
        assert "hexadecimal" in platform.refused(f"{DATA}{data_id}", data)
    platform.store(sha1[:-1], b"39 digits are no hash")
    client = vehicle(node, vin)
    assert [data] * 5 == [get(client).payload for _ in range(5)]


def test_ids_of_data_that_cannot_be(node: NodeProcess, platform: Platform) -> None:
    """S1: an empty id is refused here, and one that nobody could name."""
    assert "data_id" in platform.refused(DATA, b"x")
    assert "256" in platform.refused(f"{DATA}{'d' * 257}", b"x")
    with Platform(node, 4) as old:
        old.client.send(publish_packet(f"{DATA}{'0' * 40}", b"x", version=4, qos=1, packet_id=1))
        assert [] == old.client.expect_closed()


def test_other_content_under_the_same_id(node: NodeProcess, platform: Platform) -> None:
    """S2, G11: from then on batches get the new content; those that wait keep what they were accepted with."""
    before, after, data_id = one(), one(), unique("data")
    platform.store(data_id, b"first")
    platform.trigger([before], "task_same_1", data_id)
    platform.store(data_id, b"second")
    platform.trigger([after], "task_same_1", data_id)
    assert (topic_of(before, "task_same_1"), b"first") == told(vehicle(node, before))
    assert (topic_of(after, "task_same_1"), b"second") == told(vehicle(node, after))
    wait_until(lambda: any(data_id in line and "replaced" in line for line in node.output), "it is in the log")


# --- who may --------------------------------------------------------------------------------------------------------


def test_nobody_can_forge_receipts(node: NodeProcess, platform: Platform) -> None:
    """G1: what stands on the receipt topic comes from the node alone; likewise whatever else begins so."""
    vin, request = one(), request_name()
    with Watch(node, request) as watch:
        receipt = f"$SDV-FANOUT/receipt/{request}/{vin}"
        for topic in (receipt, "$SDV-FANOUT/receipt", "$SDV-FANOUT/nothing", "$SDV-FANOUT/trigger/x", "$SDV-FANOUT/"):
            assert "nobody may publish" in platform.refused(topic, b'{"state": "acked"}', NOT_AUTHORIZED)
        platform.client.publish(receipt, b"{}", 0, retain=True)
        with Platform(node, 4) as old:
            old.client.send(publish_packet(receipt, b"{}", version=4, qos=1, packet_id=1))
            try:
                old.client.expect(PUBACK)
            except AssertionError:
                pass  # closed: 3.1.1 leaves both to the broker
        watch.nothing_more()
        platform.send([vin], request)
        assert ["accepted"] == [watch.take()["state"]]


def test_access_rules_reserve_it_to_the_platform(tmp_path: Any) -> None:
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
        for topic, payload in ((INGRESS, octets(batch([vin], "task_acl_1"))), (f"{DATA}x", b"x"), (TRIGGER, b"{}")):
            answer = stranger.publish(topic, payload, 1)
            assert answer is not None and NOT_AUTHORIZED == answer.reason
        assert [0x87] == stranger.subscribe("$SDV-FANOUT/receipt/#", 1).reasons
        assert [0x87] == stranger.subscribe(f"agent/{other}/proxy/request/+", 1).reasons
        answer = car.publish(topic_of(vin, "task_acl_1"), b"forged", 1)
        assert answer is not None and NOT_AUTHORIZED == answer.reason
        quiet(car)
        answer = allowed.publish(INGRESS, octets(batch([vin], "task_acl_1")), 1)
        assert answer is not None and taken(1) == figures(answer)
        assert topic_of(vin, "task_acl_1") == get(car).topic


# --- limits -------------------------------------------------------------------------------------------------------


def test_limits_of_a_batch(narrow: NodeProcess) -> None:
    """S9, G14: vehicles in a batch, bytes of data, the check digit: each refusal names the option."""
    vins = fresh(11)
    with Platform(narrow) as platform:
        assert "max_vins" in platform.refused(INGRESS, batch(vins, "task_wrong_1"))
        assert "max_vins" in platform.refused(INGRESS, batch(vins[:1] * 11, "task_wrong_1"))
        assert "max_payload" in platform.refused(INGRESS, batch(vins[:1], "task_wrong_1", "x" * 1001))
        assert "max_payload" in platform.refused(INGRESS, batch(vins[:1], "task_wrong_1", b"\xff" * 1001))
        assert "max_payload" in platform.refused(f"{DATA}large", b"x" * 1001)
        wrong = vins[0][:8] + ("0" if vins[0][8] != "0" else "1") + vins[0][9:]
        text = platform.refused(INGRESS, batch([vins[1], wrong], "task_wrong_1"))
        assert "ids[1]" in text and "check digit" in text and vins[0][8] in text
        with Operator(narrow) as desk:
            assert 404 == desk.web.get("fanout/requests/task_wrong_1").status_code
        assert taken(10) == platform.send(vins[:10], "task_l_1", b"\xff" * 1000)


def test_a_vehicle_that_has_too_much_waiting(narrow: NodeProcess) -> None:
    """S9: its own message fails, and is told so; the others of the batch are not held up."""
    full, other = fresh(2)
    with Platform(narrow) as platform, Watch(narrow) as watch:
        for number in range(3):
            assert taken(1) == platform.send([full], f"task_f_{number}")
        assert taken(1) | {"rejected": 1} == platform.send([full, other], "task_f_3")
        watch.gather(lambda: watch.number("failed") == 1, "one has failed")
        refused = watch.of(full)[-1]
        assert ("failed", "pending_limit", "task_f_3") == (refused["state"], refused["reason"], refused["request_id"])
        assert taken(1, replaced=1) == platform.send([full], "task_f_1", "again"), "what replaces needs no room"
        car = vehicle(narrow, full)
        assert ["task_f_0", "task_f_2", "task_f_1"] == [get(car).topic.rsplit("/", 1)[1] for _ in range(3)]
        quiet(car)
        assert taken(1) == platform.send([full], "task_f_3")
        assert topic_of(full, "task_f_3") == get(car).topic
        with Operator(narrow) as desk:
            view = desk.show("fanout/requests", "task_f_3")
            assert view["targets"] == sum(view["states"].values()), view
            assert 1 == view["states"]["failed"]


def test_data_in_all_when_it_comes_at_once() -> None:
    """The limit holds also for a platform that does not wait for answers."""
    with NodeProcess(config="[plugins.fanout]\nmax_data_bytes = 2500\n") as node, connected(node) as client:
        client.send(b"".join(publish_packet(f"{DATA}d{n}", b"x" * 1000, qos=1, packet_id=n) for n in range(1, 7)))
        answers = [client.expect(PUBACK).reason for _ in range(6)]
        assert [0, 0] + [QUOTA_EXCEEDED] * 4 == sorted(answers, key=lambda reason: reason or 0)


def test_data_in_all(narrow: NodeProcess) -> None:
    """S9, G14: published again it needs no more room; one more is refused, and what is there can still be used."""
    vin = one()
    with Platform(narrow) as platform:
        platform.store("d1", b"1" * 1000)
        platform.store("d2", b"2" * 1000)
        platform.store("d1", b"1" * 1000)
        text = platform.refused(f"{DATA}d3", b"3" * 1000, QUOTA_EXCEEDED)
        assert "max_data_bytes" in text
        assert taken(1) == platform.trigger([vin], "task_d_1", "d1")
        assert b"1" * 1000 == get(vehicle(narrow, vin)).payload
