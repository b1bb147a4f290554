"""A store that an earlier version has written: everything in it is served by this one.

`stores/0.1.0.tar.gz` is the data folder of a node of 0.1.0, filled by `fill` below and stopped with SIGTERM. To make
the archive of another version, run its own sources with this file:

    PYTHONPATH=. python -m tests.scenarios.test_upgrade ARCHIVE

Everything in it lasts for 30 years, so that the archive does not grow old.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from motorcade.core.vin import make_vin
from tests.scenarios.witness import wait_until
from tests.support import wire
from tests.support.consumers import ask, numbers, payloads, subscribe, take, user, user_property
from tests.support.fanout import Platform, get, stored_receipts, topic_of, vehicle
from tests.support.flows import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    MESSAGE_EXPIRY,
    PAYLOAD_FORMAT,
    RESPONSE_TOPIC,
    SESSION_EXPIRY,
    SUBSCRIPTION_ID,
    USER_PROPERTY,
)
from tests.support.operator import Operator, payload_of
from tests.support.stores import Home, drained, session_present

ARCHIVES = sorted((Path(__file__).parent / "stores").glob("*.tar.gz"))

AGES = 30 * 365 * 86400  #: seconds

CONFIG = f"""
[session]
expiry_max = {AGES}
expiry_default_v3 = {AGES}

[plugins.queues.queue.jobs]
topics = ["jobs/#"]
retention = 0
priorities = 3
max_attempts = 2
dead_letter = "dead"

[plugins.queues.queue.dead]
retention = 0

[plugins.queues.queue.state]
topics = ["state/#"]
kind = "last_value"
retention = 0

[plugins.streams.stream.log]
topics = ["log/#"]
retention = {AGES}

[plugins.ecq]
retention = 0
idle = {AGES}

[plugins.fanout]
data_retention = {AGES}
receipts_retention = {AGES}
"""

PARKED, DRIVING = make_vin(900_001), make_vin(900_002)
PROPERTIES = b"".join(
    [
        wire.prop(PAYLOAD_FORMAT, 1),
        wire.prop(MESSAGE_EXPIRY, AGES),
        wire.prop(CONTENT_TYPE, "text/plain"),
        wire.prop(RESPONSE_TOPIC, "answers/here"),
        wire.prop(CORRELATION_DATA, b"\x00\x01"),
        user("first", "1"),
        user("second", "2"),
    ]
)
LARGE = b"large" * 2000


def lasting(home: Home, client_id: str, version: int = 5, **options: Any) -> wire.Client:
    """Connect with a session that lasts."""
    properties = wire.prop(SESSION_EXPIRY, AGES) if version == 5 else b""
    return home.connect(client_id, version, clean=False, properties=properties, **options)


def back(home: Home, client_id: str, version: int = 5) -> wire.Client:
    """Connect a client whose session must be there."""
    client = lasting(home, client_id, version)
    assert session_present(client), f"the session of {client_id} is gone"
    return client


# -- in


def fill(home: Home) -> None:
    """Leave something of every kind in the store."""
    home.start(CONFIG)
    for part in (fill_sessions, fill_queues, fill_compacted, fill_stream, fill_retained, fill_fanout):
        part(home)
    home.settle()
    home.stop()


def fill_sessions(home: Home) -> None:
    with lasting(home, "sleeper") as client:
        client.subscribe([("s/#", 2)], properties=wire.prop(SUBSCRIPTION_ID, 7))
        client.disconnect()
    with lasting(home, "old-sleeper", 4) as client:
        client.subscribe([("s/#", 1)])
        client.disconnect()
    for member in ("member-a", "member-b"):
        with lasting(home, member) as client:
            client.subscribe([("$share/group/g/#", 1)])
            client.disconnect()
    with home.connect("publisher") as client:
        client.publish("s/plain", b"plain", 1)
        client.publish("s/props", b"props", 1, properties=PROPERTIES)
        client.publish("s/large", LARGE, 1)
        client.publish("s/two", b"two", 2)
        client.publish("s/empty", b"", 1)
        client.publish("s/none", b"none", 0)
        for number in range(4):
            client.publish("g/shared", b"%d" % number, 1)
    with lasting(home, "half-way") as client:  # PUBREC sent, PUBCOMP not: only PUBREL comes again
        client.subscribe([("h/#", 2)])
        with home.connect("other") as other:
            other.publish("h/1", b"released", 2)
            other.publish("h/2", b"unanswered", 2)
        first = client.expect(wire.PUBLISH)
        client.expect(wire.PUBLISH)
        client.send(wire.ack_packet(wire.PUBREC, first.packet_id or 0))
        client.await_answer(wire.PUBREL, first.packet_id)
        client.disconnect()
    with lasting(home, "half-sent") as client:  # PUBREC had, PUBREL not sent: the message must not be routed again
        client.send(wire.publish_packet("s/once", b"once", qos=2, packet_id=77))
        client.expect(wire.PUBREC)
        client.disconnect()
    will = wire.Will("s/will", b"gone", 1, properties=wire.prop(0x18, AGES))  # Will Delay Interval
    with lasting(home, "with-will", will=will) as client:
        client.disconnect(0x04)  # with its will


def fill_queues(home: Home) -> None:
    with home.connect("producer") as producer, home.connect("refuses") as client:
        producer.publish("jobs/a", b"dead", 1, properties=PROPERTIES)
        subscribe(client, "$queue/jobs")
        for _ in range(2):
            message = client.expect(wire.PUBLISH)
            assert message.payload == b"dead"
            client.send(wire.ack_packet(wire.PUBACK, message.packet_id or 0, reason=0x80))
        with Operator(home.node) as operator:
            wait_until(lambda: len(operator.read("queues", "dead", limit=10)) == 1, "the message is a dead letter")
        client.disconnect()
        for number in range(5):
            producer.publish("jobs/a", b"%d" % number, 1, properties=user("priority", "0"))
        producer.publish("jobs/a", b"first", 1, properties=user("priority", "2"))
        for number in range(6):
            producer.publish(f"state/{number % 2}", b"%d" % number, 1)


def fill_compacted(home: Home) -> None:
    with home.connect("producer") as client:
        for number in range(6):
            client.publish(f"$ECQ/w/car/{number % 3}", b"%d" % number, 1)
            client.publish(f"$SCQ/w/shared/{number % 3}", b"%d" % number, 1)
        client.publish("$ECQ/w/car/large", LARGE, 1, properties=PROPERTIES)
    for client_id, filter_ in (("car", "$ECQ/car/#"), ("reader", "$SCQ/shared/#")):
        with home.connect(client_id) as client:
            subscribe(client, filter_)
            take(client, 1)
            client.disconnect()


def fill_stream(home: Home) -> None:
    with home.connect("producer") as client:
        for number in range(20):
            client.publish("log/a", b"%d" % number, 1, properties=PROPERTIES if number == 10 else b"")
    with home.connect("reader") as client:
        ask(client, "$stream/log/earliest")
        take(client, 8)
        client.disconnect()


def fill_retained(home: Home) -> None:
    with home.connect("producer") as client:
        client.publish("r/plain", b"plain", 1, retain=True)
        client.publish("r/props", b"props", 2, retain=True, properties=PROPERTIES)
        client.publish("r/gone", b"gone", 1, retain=True)
        client.publish("r/gone", b"", 1, retain=True)


def fill_fanout(home: Home) -> None:
    with Platform(home) as platform, vehicle(home, DRIVING) as driving:
        platform.send([PARKED, DRIVING], "task_1", "do it", batch_id="batch-1")
        assert get(driving).topic == topic_of(DRIVING, "task_1")
        platform.store("data-1", LARGE)
        platform.trigger([PARKED], "task_2", "data-1")
        with Operator(home.node) as operator:
            wait_until(lambda: acked(operator) == 1, "the receipt is stored")
        driving.disconnect()


def acked(operator: Operator) -> int:
    return sum(receipt["state"] == "acked" for receipt in stored_receipts(operator))


# -- out


def has_properties(message: wire.Packet) -> None:
    """Every property of MQTT 5 that the publisher gave is there."""
    assert (message.prop(PAYLOAD_FORMAT), message.prop(CONTENT_TYPE)) == (1, "text/plain")
    assert (message.prop(RESPONSE_TOPIC), message.prop(CORRELATION_DATA)) == ("answers/here", b"\x00\x01")
    assert 0 < message.prop(MESSAGE_EXPIRY) <= AGES
    assert message.prop_all(USER_PROPERTY)[:2] == [("first", "1"), ("second", "2")]


def check_sessions(home: Home) -> None:
    """Queued messages, flows of QoS 2 that were half done, shared groups, a will that waits."""
    sleeper = back(home, "sleeper")
    found = {message.topic: message for message in drained(sleeper)}
    assert {topic: message.payload for topic, message in found.items()} == {
        "s/plain": b"plain",
        "s/props": b"props",
        "s/large": LARGE,
        "s/two": b"two",
        "s/empty": b"",
        "s/none": b"none",
        "s/once": b"once",
    }
    # (0.1.0 stored QoS 0 for absent clients without the identifier.)
    assert {message.prop(SUBSCRIPTION_ID) for message in found.values() if message.qos} == {7}
    assert [found[f"s/{name}"].qos for name in ("none", "plain", "two")] == [0, 1, 2]
    has_properties(found["s/props"])
    old = drained(back(home, "old-sleeper", 4))
    assert {"plain", "props", "two", "once"} <= {message.topic.removeprefix("s/") for message in old}
    members = [drained(back(home, member)) for member in ("member-a", "member-b")]
    assert sorted(message.payload for messages in members for message in messages) == [b"0", b"1", b"2", b"3"]
    check_half_way(home)
    with home.connect("publisher") as client:
        client.publish("s/new", b"new", 1)
    assert [message.payload for message in drained(sleeper)] == [b"new"]


def check_half_way(home: Home) -> None:
    half_way = back(home, "half-way")
    came = [half_way.recv(), half_way.recv()]
    assert sorted(packet.name for packet in came) == ["PUBLISH", "PUBREL"]
    assert [packet.payload for packet in came if packet.type == wire.PUBLISH] == [b"unanswered"]
    half_sent = back(home, "half-sent")
    half_sent.send(wire.publish_packet("s/once", b"once", qos=2, packet_id=77, dup=True))
    assert half_sent.expect(wire.PUBREC).reason == 0
    half_sent.send(wire.ack_packet(wire.PUBREL, 77))
    assert half_sent.expect(wire.PUBCOMP).reason == 0


def check_queues(home: Home) -> None:
    """Messages in the order of their levels, newest values by key, dead letters with their story."""
    with home.connect("worker") as worker:
        subscribe(worker, "$queue/jobs")
        assert payloads(take(worker, 6)) == [b"first", b"0", b"1", b"2", b"3", b"4"]
        subscribe(worker, "$queue/state")
        assert sorted(payloads(take(worker, 2))) == [b"4", b"5"]
        subscribe(worker, "$queue/dead")
        dead = take(worker, 1)[0]
        has_properties(dead)
        assert (dead.payload, user_property(dead, "dead-queue")) == (b"dead", "jobs")
        assert user_property(dead, "dead-attempts") == "2"


def check_compacted(home: Home) -> None:
    """Last values with their numbers, and how far each consumer was; newer values replace older ones."""
    with Operator(home.node) as operator:
        stored = operator.read("compacted/exclusive", "car", limit=10)
        assert [payload_of(message) for message in stored] == [b"3", b"4", b"5", LARGE]
    with home.connect("producer") as client:
        client.publish("$ECQ/w/car/0", b"new", 1)
    with home.connect("car") as car:
        subscribe(car, "$ECQ/car/#")
        messages = take(car, 3)
        assert payloads(messages) == [b"4", b"5", LARGE]
        has_properties(messages[2])
        assert payloads(take(car, 1)) == [b"new"]
    with home.connect("reader") as reader:
        subscribe(reader, "$SCQ/shared/#")
        assert payloads(take(reader, 2)) == [b"4", b"5"]


def check_stream(home: Home) -> None:
    """All records, and the client goes on where it was."""
    with home.connect("reader") as reader:
        subscribe(reader, "$stream/log")
        messages = take(reader, 12)
        assert numbers(messages) == list(range(8, 20))
        has_properties(messages[2])


def check_retained(home: Home) -> None:
    """What is retained comes to a new subscriber; what was removed does not."""
    with home.connect("new") as client:
        client.subscribe("r/#", 2)
        found = {message.topic: message for message in (client.receive(), client.receive())}
        assert {topic: message.payload for topic, message in found.items()} == {
            "r/plain": b"plain",
            "r/props": b"props",
        }
        assert all(message.retain for message in found.values())
        has_properties(found["r/props"])


def check_fanout(home: Home) -> None:
    """A parked vehicle gets what waits for it, the batch is known when it is repeated, and the counts are right."""
    with Platform(home) as platform, vehicle(home, PARKED) as parked:
        assert [get(parked).topic, get(parked).topic] == [topic_of(PARKED, "task_1"), topic_of(PARKED, "task_2")]
        assert platform.send([PARKED, DRIVING], "task_1", "do it", batch_id="batch-1")["repeated"] == 1
        with Operator(home.node) as operator:
            wait_until(lambda: acked(operator) == 3, "the receipts are stored")
            shown = {request["request_id"]: request for request in operator.web.get("fanout/requests").json()["data"]}
            assert {name: request["states"]["acked"] for name, request in shown.items()} == {"task_1": 2, "task_2": 1}


CHECKS = (check_sessions, check_queues, check_compacted, check_stream, check_retained, check_fanout)


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.gz"))
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """A node of this version on a copy of the store."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    with Home("rocksdb", "rocksdb://", tmp_path / "data") as home:
        home.start(CONFIG)
        yield home
    home.assert_well()


def test_a_store_of_an_earlier_version_is_served(written: Home) -> None:
    """Everything that was stored is delivered, once, as it was published; and again after a restart what is left."""
    for check in CHECKS:
        check(written)
    written.restart()
    assert drained(back(written, "sleeper")) == []


def main(archive: str) -> None:
    """Write an archive with the version that runs."""
    with tempfile.TemporaryDirectory() as folder:
        with Home("rocksdb", "rocksdb://", Path(folder) / "data") as home:
            fill(home)
        (Path(folder) / "data" / "token").unlink(missing_ok=True)
        with tarfile.open(archive, "w:gz", compresslevel=9) as packed:
            packed.add(Path(folder) / "data", "data", filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if Path(member.name).name in ("LOG", "LOCK"):  # they tell of the machine
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main(sys.argv[1])
