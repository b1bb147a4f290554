"""Section 4.5, message receipt: an accepted message reaches every session that wants it."""

from __future__ import annotations

from tests.support.cases import every_version, qos_1_and_2
from tests.support.clauses import clause
from tests.support.flows import lasting, numbered, payloads, publish_many, receive_until
from tests.support.wire import Connect


@every_version
@qos_1_and_2
@clause(v3="MQTT-4.5.0-1", v5="MQTT-4.5.0-1")
def test_every_matching_session_gets_the_message(connect: Connect, name: str, version: int, qos: int) -> None:
    """Present and absent clients with exact and wildcard subscriptions all get it, others do not. [MQTT-4.5.0-1]"""
    filters = [f"{name}/a", f"{name}/+", f"{name}/#", "+/a"]
    present = [connect(version=version) for _ in filters]
    for client, wanted in zip(present, filters, strict=True):
        client.subscribe(wanted, qos)
    for number, wanted in enumerate(filters):
        absent = connect(f"{name}-away{number}", **lasting(version))
        absent.subscribe(wanted, qos)
        absent.disconnect()
    other = connect(version=version)
    other.subscribe(f"{name}/b", qos)
    publisher = connect(version=version)
    publish_many(publisher, f"{name}/a", [*numbered(5), b"end"], qos)
    back = [connect(f"{name}-away{number}", **lasting(version)) for number in range(len(filters))]
    for client in present + back:
        messages = [m for m in receive_until(client, b"end") if m.topic == f"{name}/a"]
        assert [*numbered(5), b"end"] == payloads(messages)
    publisher.publish(f"{name}/b", b"other", qos)
    assert [b"other"] == payloads(receive_until(other, b"other"))


@every_version
@qos_1_and_2
@clause(v3="MQTT-4.5.0-1", v5="MQTT-4.5.0-1")
def test_messages_wait_through_several_absences(connect: Connect, name: str, version: int, qos: int) -> None:
    """Messages for an absent client are kept when it comes and goes without reading them. [MQTT-4.5.0-1]"""
    subscriber, publisher = connect(f"{name}-s", **lasting(version)), connect(version=version)
    subscriber.subscribe(name, qos)
    for part in range(3):
        subscriber.disconnect()
        publish_many(publisher, name, numbered(20, start=20 * part), qos)
        subscriber = connect(f"{name}-s", **lasting(version))
    publisher.publish(name, b"end", qos)
    assert [*numbered(60), b"end"] == payloads(receive_until(subscriber, b"end"))
