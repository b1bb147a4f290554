"""Plain messages, which the fast path hands to the plugin as they come: they mean the same as all others."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from motorcade.core.message import Message
from motorcade.extension.hooks import Callback, Stop
from motorcade.mqtt.packets import Puback, Publish
from motorcade.mqtt.properties import Properties
from motorcade.plugins.logs.compacted.plugin import EcqPlugin
from motorcade.storage.ports import StoreFullError
from tests.unit.ecq.node import EXCLUSIVE, EcqNode, numbers, told

SAID = Properties(user_properties=(("said", "so"),))


class Counted:
    """How many messages have come either way."""

    def __init__(self) -> None:
        self.plain = self.others = 0


@pytest.fixture
def counted() -> Any:
    """Counts what the plugin takes."""
    count = Counted()
    on_plain, on_publish = EcqPlugin.on_plain, EcqPlugin.on_publish

    def plain(plugin: EcqPlugin, *args: Any) -> Any:
        done = on_plain(plugin, *args)
        count.plain += done is not None
        return done

    def others(plugin: EcqPlugin, *args: Any) -> Any:
        count.others += 1
        return on_publish(plugin, *args)

    others.__dict__.update(on_publish.__dict__)  # the marks of the hook
    with patch.object(EcqPlugin, "on_plain", plain), patch.object(EcqPlugin, "on_publish", others):
        yield count


def packet(number: int, key: str, *, said: bool = False, qos: int = 1) -> Publish:
    properties = SAID if said else Properties()
    return Publish(f"$ECQ/w/car/{key}", b"%d" % number, qos, packet_id=number, properties=properties)


def test_they_are_appended_in_order_with_all_others(counted: Counted) -> None:
    """Of one read; and answered in the order in which they came."""
    for version in (4, 5):
        with EcqNode.on() as node:
            pub = node.client("pub", version)
            keys = ["k", "l", "k", "m", "l", "k"]
            for number, key in enumerate(keys, 1):  # their routes are known, and the queue is
                assert 0 == pub.publish(f"$ECQ/w/car/{key}", b"%d" % number)
            before = counted.plain
            pub.send(*(packet(each, key, said=version == 5 and each % 3 == 0) for each, key in enumerate(keys, 101)))
            assert [*range(101, 107)] == [pub.expect(Puback).packet_id for _ in keys]
            assert (4 if version == 5 else 6) == counted.plain - before
            assert [(10, "m", b"104"), (11, "l", b"105"), (12, "k", b"106")] == node.stored()


def test_a_consumer_cannot_tell_them_apart(counted: Counted) -> None:
    with EcqNode.on() as node:
        node.fill("car", ("k", b"1"))
        car, pub = node.consumer(), node.client("pub")
        assert [1] == numbers(car.messages())
        before = counted.plain
        assert 0 == pub.publish("$ECQ/w/car/k", b"2")
        assert 0 == pub.publish("$ECQ/w/car/k", b"x" * 5000)
        assert 2 == counted.plain - before
        assert [(2, "k", b"2"), (3, "k", b"x" * 5000)] == told(car.messages())
        (found,) = node.run(node.service.read(EXCLUSIVE, "car"))
        assert ("pub", 32) == (found.publisher, len(found.guid))


def test_a_store_that_refuses(counted: Counted) -> None:
    for version in (4, 5):
        with EcqNode.on() as node:
            pub = node.client("pub", version)
            assert 0 == pub.publish("$ECQ/w/car/k", b"1")
            node.held.held = True
            before = counted.plain
            pub.put("$ECQ/w/car/k", b"2")
            node.turn()
            node.held.fail(StoreFullError("no room"))
            node.held.held = False
            node.turn()
            assert (1, version == 5) == (counted.plain - before, pub.open)
            if version == 5:
                answer = pub.expect(Puback)
                assert (0x97, "no room") == (answer.reason, answer.properties.reason_string)


def test_a_full_queue_refuses_them(counted: Counted) -> None:
    """Unless they replace the value of their key."""
    with EcqNode.on(max_messages=1) as node:
        pub = node.client("pub")
        assert 0 == pub.publish("$ECQ/w/car/k", b"1")
        before = counted.plain
        assert 0x97 == pub.publish("$ECQ/w/car/l", b"2")
        assert 0 == pub.publish("$ECQ/w/car/k", b"3")
        assert 2 == counted.plain - before


def test_who_wants_to_see_them_does(counted: Counted) -> None:
    """Another callback for the topic, also one that comes later."""
    with EcqNode.on() as node:
        pub = node.client("pub")
        assert 0 == pub.publish("$ECQ/w/car/k", b"1")
        seen: list[bytes] = []

        def look(_client: object, message: Message) -> None:
            seen.append(message.payload)

        node.hooks.add("message.publish", Callback(look, 900, "test", ("$ECQ/w/#",)))
        before = counted.plain
        assert 0 == pub.publish("$ECQ/w/car/k", b"2")
        assert ([b"2"], 0) == (seen, counted.plain - before)
        node.hooks.remove("message.publish", look)
        assert 0 == pub.publish("$ECQ/w/car/k", b"3")
        assert 0 == pub.publish("$ECQ/w/car/k", b"4")
        assert ([b"2"], True) == (seen, counted.plain > before)


def test_access_rules_hold(counted: Counted) -> None:
    with EcqNode.on() as node:
        pub = node.client("pub")
        assert 0 == pub.publish("$ECQ/w/car/k", b"1")
        node.hooks.add("client.authorize", Callback(_authorize, 0, "test"))
        other = node.client("other")
        before = counted.plain
        assert [0x87, 0x87, 0, 0] == [
            other.publish(f"$ECQ/w/car/{key}", b"2") for key in ("secret", "secret", "k", "k")
        ]
        assert 1 == counted.plain - before, "once it is known to be allowed"


def _authorize(_client: object, _action: str, topic: str, _answer: object) -> Stop:
    return Stop(not topic.endswith("secret"))


def test_one_that_fails_hurts_nobody(counted: Counted) -> None:
    """The message takes the long way."""
    with EcqNode.on() as node:
        pub = node.client("pub")
        assert 0 == pub.publish("$ECQ/w/car/k", b"1")
        (callback,) = [each for each in node.hooks.lookup("message.publish") if each.plain is not None]

        def broken(*_args: object) -> None:
            raise RuntimeError("on purpose")

        plain, callback.plain = callback.plain, broken
        assert 0 == pub.publish("$ECQ/w/car/k", b"2")
        assert 1 == callback.errors
        callback.plain, callback.errors = plain, 0
        assert [(2, "k", b"2")] == node.stored("car")
