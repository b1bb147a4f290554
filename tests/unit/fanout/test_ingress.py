"""What the platform may publish, and what it is answered. A wrong batch leaves no trace; a right one is all there.

Numbers such as A1, S7 or G8 in the docstrings name rows of the list of behaviours that the fan-out was designed from.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from motorcade.core.reasons import ReasonCode
from motorcade.core.receipt import TOPIC as RECEIPT
from motorcade.extension.declared import UnknownError
from motorcade.mqtt.packets import Packet, Puback, Pubcomp, Publish, Pubrec, Pubrel
from motorcade.mqtt.properties import NONE
from motorcade.plugins.fanout.tables import DATA_PREFIX, INGRESS, TRIGGER
from tests.support.virtual import Client
from tests.unit.fanout.node import (
    VIN,
    VINS,
    FanoutNode,
    batch,
    figures,
    in_turn,
    message_of,
    packed,
    say,
    taken,
    topic_of,
)

QUOTA_EXCEEDED = ReasonCode.QUOTA_EXCEEDED
WRONG = packed(batch([VINS[0], "short"], "wrong"))


@pytest.fixture
def node() -> Iterator[FanoutNode]:
    with FanoutNode.on() as made:
        yield made


def encoded(data: bytes) -> dict[str, str]:
    return {"data": b64encode(data).decode(), "encoding": "base64"}


def trigger(vins: tuple[str, ...], request: str, data_id: Any, **fields: Any) -> dict[str, Any]:
    return {"ids": vins, "request_id": request, "data_id": data_id} | fields


def answers(client: Client, *packets: Packet) -> list[Puback | Pubrec]:
    """What is answered to packets of one write; without any, what has been answered."""
    came = say(client, *packets) if packets else client.take()
    return [packet for packet in came if isinstance(packet, Puback | Pubrec)]


def nothing_is_stored(node: FanoutNode, request: str = "wrong") -> None:
    with pytest.raises(UnknownError):
        node.run(node.service.status(request))
    assert [] == node.receipts() and "not_known" == node.why()


# -- both forms


def test_a_batch_reaches_each_vehicle_once_on_its_own_topic(node: FanoutNode) -> None:
    """A1, S1, S18, S35: QoS 1, not retained, byte by byte, without the properties of the batch; in either version."""
    data = bytes(range(256))
    node.keep("campaign/1/part 1", data)
    for version in (4, 5):
        cars = [node.vehicle(vin, (4, 5)[number % 2]) for number, vin in enumerate(VINS)]
        platform = node.client(f"platform-{version}", version)
        notes: dict[str, Any] = (
            {"content_type": "application/json", "user_properties": (("trace", "1"),)} if version == 5 else {}
        )
        for topic, fields, payload in (
            (INGRESS, batch(VINS, "a", "für alle"), "für alle".encode()),
            (INGRESS, batch(VINS, "b") | encoded(data), data),
            (INGRESS, batch(VINS, "c", ""), b""),
            (TRIGGER, trigger(VINS, "d", "campaign/1/part 1"), data),
        ):
            platform.put(topic, packed(fields), **notes)
            assert (taken(20) if version == 5 else {}) == figures(platform.expect(Puback))
            for vin, car in zip(VINS, cars, strict=True):
                message = message_of(car)
                assert (topic_of(vin, fields["request_id"]), payload) == (message.topic, message.payload)
                assert (1, False, False, NONE) == (message.qos, message.retain, message.dup, message.properties)
                car.ack(message)


def test_data_and_triggers_in_one_write_are_taken_in_order(node: FanoutNode) -> None:
    """S10: a platform that does not wait for the first acknowledgement."""
    packets = []
    for number, vin in enumerate(VINS[:3]):
        fields = packed(trigger((vin,), "a", f"d{number}"))
        packets.append(Publish(f"{DATA_PREFIX}d{number}", b"%d" % number, 1, packet_id=2 * number + 1))
        packets.append(Publish(TRIGGER, fields, 1, packet_id=2 * number + 2))
    assert [0] * 6 == [answer.reason for answer in answers(node.platform, *packets)]
    assert [b"0", b"1", b"2"] == [message_of(node.vehicle(vin)).payload for vin in VINS[:3]]


def test_batches_of_any_qos_are_taken_once(node: FanoutNode) -> None:
    """S5: QoS 0 without an answer; QoS 2 with the figures in PUBREC, and once though it is repeated."""
    platform = node.platform
    assert [] == say(platform, Publish(INGRESS, packed(batch([VIN], "a"))))
    again = Publish(INGRESS, packed(batch([VIN], "b", mode="append")), 2, packet_id=7)
    assert [taken(1)] == [figures(answer) for answer in answers(platform, again)]
    assert [Pubrec, Pubcomp] == [type(packet) for packet in say(platform, again, Pubrel(7))]
    assert ["a", "b"] == in_turn(node.vehicle())


def test_what_platforms_publish_is_seen_by_nobody_else(node: FanoutNode) -> None:
    """S4, S5: neither subscribers, nor retained; the answer is success, not `no matching subscribers`."""
    node.run(node.plugins.load("retained", {}))
    listener, platform = node.client("listener"), node.client("another platform")
    for filter_ in ("#", "$SDV-FANOUT/#", INGRESS):
        listener.subscribe(filter_)
    for topic, payload in ((INGRESS, packed(batch([VIN], "a"))), (f"{DATA_PREFIX}seen", b"x")):
        assert [0] == [a.reason for a in answers(platform, Publish(topic, payload, 1, retain=True, packet_id=1))]
    assert {f"{RECEIPT}/a/{VIN}"} == {message.topic for message in listener.messages()}
    late = node.client("late")
    late.subscribe("$SDV-FANOUT/#")
    assert [] == late.messages()


# -- the answer


def test_a_request_that_is_issued_again_replaces_what_waits(node: FanoutNode) -> None:
    """A3, S8, S21, G10: the key is VIN and request; the old one has its receipt, other requests stay.

    A vehicle that is named twice has one entry. Mode `append` keeps both, and what was delivered is not replaced.
    """
    assert taken(2, duplicates=2) == node.send([VINS[0], VINS[1], VINS[0], VINS[0]], "a", "1")
    assert taken(1) == node.send([VIN], "b", "2")
    assert taken(3, replaced=2) == node.send(VINS[:3], "a", "3")
    assert taken(1) == node.send([VIN], "b", "4", mode="append")
    car = node.vehicle()
    seen = []
    while messages := car.messages():
        seen.append(messages[0].payload)
        car.ack(messages[0])
    assert [b"2", b"3", b"4"] == seen
    assert ["accepted", "accepted", "replaced", "sent", "acked"] == node.states("a", VIN)
    old, new, *rest = (receipt.delivery_id for receipt in node.receipts("a", VIN))
    assert [old, new, new] == rest and old != new
    assert taken(1) == node.send([VIN], "a", "5")
    assert b"5" == message_of(car).payload
    history = node.run(node.service.vehicle(VIN)).history
    assert ["acked", "acked", "acked", "replaced"] == [str(view.state) for view in history], "newest first"


def test_two_batches_that_are_the_same_byte_by_byte_bring_one_message(node: FanoutNode) -> None:
    """G10: a platform that has missed its PUBACK publishes again."""
    payload = packed(batch(VINS[:5], "a"))
    twins = [Publish(INGRESS, payload, 1, packet_id=number) for number in (900, 901)]
    assert [taken(5), taken(5, replaced=5)] == [figures(answer) for answer in answers(node.platform, *twins)]
    assert [["a"]] * 5 == [in_turn(node.vehicle(vin)) for vin in VINS[:5]]


# -- wrong batches


def test_a_wrong_batch_is_refused_as_a_whole_and_told_why(node: FanoutNode) -> None:
    """S6, S7, G8: 0x99 and what is wrong where; what is wrong is a table of `test_batch`. Nothing at all is stored."""
    assert node.refused(INGRESS, WRONG).startswith("ids[1]: 'short' is no VIN")
    (answer,) = answers(node.platform, Publish(INGRESS, WRONG, 2, packet_id=99))
    assert isinstance(answer, Pubrec) and ReasonCode.PAYLOAD_FORMAT_INVALID is answer.reason
    assert (answer.properties.reason_string or "").startswith("ids[1]")
    assert [] == say(node.platform, Publish(INGRESS, WRONG))
    assert 3 == node.counters["batches_refused"]
    assert "data is missing" in node.refused(INGRESS, trigger(VINS[:1], "wrong", "d"))
    assert "data_id is missing" in node.refused(TRIGGER, batch(VINS[:1], "wrong"))
    text = node.refused(TRIGGER, trigger(VINS[:1], "wrong", "never-published"))
    assert f"there is no data 'never-published'; publish it to {DATA_PREFIX}never-published first" == text
    nothing_is_stored(node)
    assert taken(1) == node.send([VIN], "right"), "the connection goes on"


def test_what_is_wrong_ends_a_connection_that_cannot_be_told(node: FanoutNode) -> None:
    """S6: MQTT 3.1.1 has no way to say no but to disconnect, without a PUBACK."""
    missing = packed(trigger(VINS[:1], "wrong", "nothing"))
    for topic, payload in ((INGRESS, WRONG), (INGRESS, b"{"), (TRIGGER, missing), (f"{DATA_PREFIX}{'0' * 40}", b"x")):
        old = node.client("old", 4)
        assert [] == say(old, Publish(topic, payload, 1, packet_id=1)) and not old.open, topic
    nothing_is_stored(node)


def test_keys_that_mean_nothing_are_logged(node: FanoutNode) -> None:
    """S6: they do no harm; but a misspelt one should not go unnoticed."""
    with capture_logs() as logs:
        assert taken(1) == node.send([VIN], "a", expires_inn=5)
    assert [("a", ["expires_inn"])] == [(log["request_id"], log["keys"]) for log in logs if "keys" in log]


# -- data


def test_ids_that_are_hashes_are_checked(node: FanoutNode) -> None:
    """A2, S1, G11: SHA-1 and SHA-256, named or by their look; what no hash may be is a table of `test_batch`."""
    data = b"\x00firmware\xff"
    sha1, sha256 = hashlib.sha1(data).hexdigest(), hashlib.sha256(data).hexdigest()
    ids = (sha1, sha256, sha1.upper(), f"sha1:{sha1}", f"sha256:{sha256}", sha1[:-1])
    for number, data_id in enumerate(ids):
        node.keep(data_id, data)
        assert taken(1) == node.trigger([VIN], f"r{number}", data_id)
    for data_id in ids[:-1]:
        assert "is not the sha" in node.refused(f"{DATA_PREFIX}{data_id}", data + b"!")
    assert "hexadecimal" in node.refused(f"{DATA_PREFIX}sha1:123", data)
    assert "data_id is empty" in node.refused(DATA_PREFIX, data)
    assert "257 characters are more than 256" in node.refused(f"{DATA_PREFIX}{'d' * 257}", data)
    assert 6 == len(in_turn(node.vehicle()))


def test_other_content_under_the_same_id_is_for_batches_that_follow(node: FanoutNode) -> None:
    """S2, G11: those that wait keep what they were accepted with."""
    with capture_logs() as logs:
        for vin, data in zip(VINS, (b"first", b"second"), strict=False):
            node.keep("data", data)
            node.trigger([vin], "a", "data")
    assert [b"first", b"second"] == [message_of(node.vehicle(vin)).payload for vin in VINS[:2]]
    assert ["data"] == [log["data_id"] for log in logs if log["event"] == "fanout_data_replaced"]


# -- who may


def test_nobody_can_forge_receipts(node: FanoutNode) -> None:
    """G1: what stands on the receipt topic comes from the node alone; likewise whatever else begins so."""
    node.run(node.plugins.load("retained", {}))
    listener = node.client("listener")
    listener.subscribe("$SDV-FANOUT/#")
    receipt = f"{RECEIPT}/a/{VIN}"
    for topic in (receipt, RECEIPT, "$SDV-FANOUT/nothing", f"{TRIGGER}/x", "$SDV-FANOUT/"):
        assert "no client may publish" in node.refused(topic, b'{"state": "acked"}', ReasonCode.NOT_AUTHORIZED)
    say(node.client("forger"), Publish(receipt, b"{}", retain=True))
    say(node.client("old", 4), Publish(receipt, b"{}", 1, packet_id=1))
    assert [] == listener.messages()
    node.send([VIN], "a")
    assert [receipt] == [message.topic for message in listener.messages()]


def test_receipts_are_watched_by_request_or_by_vehicle(node: FanoutNode) -> None:
    """The topic tells both; the bytes are those of the stream, in its order."""
    watchers: dict[tuple[int, str], Client] = {}
    for version in (4, 5):
        for filter_ in (f"{RECEIPT}/a/+", f"{RECEIPT}/+/{VIN}", f"{RECEIPT}/#"):
            watchers[version, filter_] = node.client(f"watcher-{len(watchers)}", version)
            watchers[version, filter_].subscribe(filter_)
    node.send(VINS[:2], "a")
    node.send([VIN], "b")
    in_turn(node.vehicle())
    stored = [(receipt.request_id, receipt.vin, str(receipt.state)) for receipt in node.receipts()]
    assert 7 == len(stored)
    for (version, filter_), watcher in watchers.items():
        messages = watcher.messages()
        heard = [json.loads(message.payload) for message in messages]
        wanted = [r for r in stored if "/#" in filter_ or (r[0] == "a" if "/a/" in filter_ else r[1] == VIN)]
        assert wanted == [(r["request_id"], r["vin"], r["state"]) for r in heard], f"{version} {filter_}"
        assert {1} == {message.qos for message in messages}
        assert all(
            message.topic == f"{RECEIPT}/{r['request_id']}/{r['vin']}"
            for message, r in zip(messages, heard, strict=True)
        )


# -- limits


def test_limits_of_a_batch_name_their_option() -> None:
    """S9, G14: vehicles, bytes of data, the check digit."""
    with FanoutNode.on(max_vins=3, max_payload=100, check_digit=True) as node:
        wrong = VIN[:8] + ("0" if VIN[8] != "0" else "1") + VIN[9:]
        for topic, fields, words in (
            (INGRESS, batch(VINS[:4], "wrong"), "max_vins"),
            (INGRESS, batch(VINS[:1] * 4, "wrong"), "max_vins"),
            (INGRESS, batch(VINS[:1], "wrong", "x" * 101), "max_payload"),
            (INGRESS, batch(VINS[:1], "wrong") | encoded(b"x" * 101), "max_payload"),
            (f"{DATA_PREFIX}large", b"x" * 101, "max_payload"),
            (INGRESS, batch([VINS[1], wrong], "wrong"), "ids[1]"),
        ):
            assert words in node.refused(topic, fields)
        nothing_is_stored(node)
        assert taken(3) == node.send(VINS[:3], "right", "x" * 100)


def test_a_vehicle_that_has_too_much_waiting_holds_up_nobody_else() -> None:
    """S9: its own message fails, and is told so; what replaces another needs no room."""
    with FanoutNode.on(max_pending=3) as node:
        for number in range(3):
            assert taken(1) == node.send([VIN], f"r{number}")
        assert taken(1, rejected=1) == node.send(VINS[:2], "r3")
        refused = node.receipts("r3", VIN)[-1]
        assert ("failed", "pending_limit") == (str(refused.state), refused.reason)
        assert taken(1, replaced=1) == node.send([VIN], "r1", "again")
        car = node.vehicle()
        assert ["r0", "r2", "r1"] == in_turn(car)
        assert taken(1) == node.send([VIN], "r3")
        assert ["r3"] == in_turn(car)
        assert {"accepted": 1, "failed": 1, "acked": 1} == node.counts("r3")


def test_data_in_all_is_bounded() -> None:
    """S9, G14: published again it needs no more room; also for a platform that does not wait for answers."""
    with FanoutNode.on(max_data_bytes=2500) as node:
        packets = [Publish(f"{DATA_PREFIX}d{n}", b"x" * 1000, 1, packet_id=n) for n in (1, 2, 3, 4)]
        reasons = Counter(answer.reason for answer in answers(node.platform, *packets))
        assert {ReasonCode.SUCCESS: 2, QUOTA_EXCEEDED: 2} == reasons
        node.keep("d1", b"y" * 1000)
        assert "max_data_bytes" in node.refused(f"{DATA_PREFIX}d5", b"x" * 1000, QUOTA_EXCEEDED)
        assert taken(1) == node.trigger([VIN], "a", "d1")


def test_batches_that_wait_for_the_store_are_bounded() -> None:
    """S9, G14: one more is refused at once; those that wait are accepted when the store answers."""
    with FanoutNode.on(max_queued=2) as node:
        other = node.client("other")
        with node.slow_store():
            for name in ("a", "b"):
                other.put(INGRESS, packed(batch([VIN], name)))
            assert "max_queued" in node.refused(INGRESS, batch([VIN], "c"), QUOTA_EXCEEDED)
        assert [taken(1)] * 2 == [figures(answer) for answer in answers(other)]


# -- batches with an id


def again(accepted: int, duplicates: int = 0, replaced: int = 0) -> dict[str, int]:
    """What a batch is answered that was taken before."""
    return taken(accepted, duplicates, replaced, repeated=1)


@pytest.mark.parametrize("mode", ["replace", "append"])
def test_a_repeated_batch_is_answered_as_before_and_reaches_nobody(node: FanoutNode, mode: str) -> None:
    """Delivered to one of its vehicles, waiting for the other; in whatever order they are named, in either version."""
    there, away = VINS[:2]
    car, replaced = node.vehicle(there), int(mode == "replace")
    node.send([away], "a", "earlier")
    fields = {"mode": mode, "batch_id": "b1"}
    assert taken(2, 1, replaced) == node.send([there, away, there], "a", "once", **fields)
    assert ["a"] == in_turn(car)
    for vins in ([there, away, there], [away, there, there]):
        assert again(2, 1, replaced) == node.send(vins, "a", "once", **fields)
    old = node.client("old", 4)
    old.put(INGRESS, packed(batch([there, away, there], "a", "once", **fields)))
    assert {} == figures(old.expect(Puback))
    assert [] == car.messages()
    assert 2 - replaced == len(in_turn(node.vehicle(away)))
    assert ["accepted", "sent", "acked"] == node.states("a", there)


def test_what_makes_a_batch_the_same(node: FanoutNode) -> None:
    """Its request, its id, its vehicles and its data; not when it expires and how urgent it is."""
    other = VINS[1]
    node.keep("data", b"data")
    for request in ("a", "b"):
        assert taken(1) == node.send([VIN], request, "data", batch_id="b1", expires_in=1000)
    for fields in (
        batch([other], "a", "data", batch_id="b1"),
        batch([VIN, other], "a", "data", batch_id="b1"),
        batch([VIN], "a", "other", batch_id="b1"),
    ):
        assert "'b1' was used in this request for other vehicles or other data" in node.refused(INGRESS, fields)
    node.refused(TRIGGER, trigger((VIN,), "a", "data", batch_id="b1"))
    assert again(1) == node.send([VIN], "a", batch_id="b1", expires_in=900, priority=3, **encoded(b"data"))
    assert taken(1) == node.send([VIN], "a", "data", batch_id="b2", mode="append")
    assert ["a", "b", "a"] == in_turn(node.vehicle())
    assert "not_known" == node.why(other)


def test_named_data_need_not_be_there_when_a_batch_is_repeated(node: FanoutNode) -> None:
    """Other data under the same id is not looked at; a refusal is not remembered."""
    assert "there is no data" in node.refused(TRIGGER, trigger((VIN,), "a", "d", batch_id="b1"))
    node.keep("d", b"data")
    assert taken(1) == node.trigger([VIN], "a", "d", batch_id="b1")
    node.keep("d", b"other")
    assert again(1) == node.trigger([VIN], "a", "d", batch_id="b1")
    assert b"data" == message_of(node.vehicle()).payload


def test_of_twins_that_come_at_once_one_is_taken(node: FanoutNode) -> None:
    """From several connections, several in one write."""
    payload = packed(batch(VINS, "a", mode="append", batch_id="b1"))
    platforms = [node.client(f"platform-{number}") for number in range(4)]
    with node.slow_store():
        for platform in platforms:
            platform.send(*(Publish(INGRESS, payload, 1, packet_id=number) for number in (1, 2, 3)))
            node.turn()
    found = [figures(answer) for platform in platforms for answer in answers(platform)]
    assert 12 == len(found) and 1 == found.count(taken(20)) and 11 == found.count(again(20))
    assert {"accepted": 20} == node.counts("a")


def test_remembered_ids_are_bounded_and_forgotten_with_the_retention() -> None:
    """One more is refused and says why; batches without an id are taken as before."""
    with FanoutNode.on(max_batch_ids=2, data_retention=1000.0) as node:
        for name in ("b1", "b2"):
            assert taken(1) == node.send([VIN], "a", name, mode="append", batch_id=name)
        assert "max_batch_ids" in node.refused(INGRESS, batch([VIN], "a", batch_id="b3"), QUOTA_EXCEEDED)
        assert again(1) == node.send([VIN], "a", "b1", mode="append", batch_id="b1")
        assert taken(1) == node.send([VIN], "a", "b3", mode="append")
        node.wait(1000.0)
        node.run(node.service.gc())
        assert taken(1) == node.send([VIN], "a", "b1", mode="append", batch_id="b1")
