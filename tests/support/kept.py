"""A queue or a stream of a test's own, and a node on one of two stores that must not complain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.consumers import TOPIC_INVALID, ask, fill, numbered, settled
from tests.support.flows import REASON_STRING
from tests.support.node import NodeProcess
from tests.support.operator import Operator, payload_of
from tests.support.redis import RedisServer
from tests.support.wire import Client, publish_packet

COMPLAINTS = ("Traceback", '"level":"error"', "never retrieved")


@contextmanager
def sound_node(request: pytest.FixtureRequest, data: Path, config: str) -> Iterator[NodeProcess]:
    """A node on the store that `request.param` names; its log must have nothing to complain about."""
    url = f"{request.param}://"
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("lone_redis")
        server.empty()
        url = server.url
    with NodeProcess("--store", url, data=data, http=True, config=config) as running:
        yield running
    for sign in COMPLAINTS:
        assert sign not in running.log, running.log[max(0, running.log.index(sign) - 1000) :][:4000]


class Kept:
    """What is published below its name is kept in it."""

    noun: ClassVar[str]

    def __init__(self, node: NodeProcess, operator: Operator, name: str, **options: Any) -> None:
        self.node = node
        self.operator = operator
        self.name = name
        self.filter = f"${self.noun}/{name}"
        self.operator.create(f"{self.noun}s", name, **({"topics": [f"{name}/#"]} | options))

    def put(self, *payloads: bytes, topic: str = "a", properties: bytes = b"") -> None:
        """Publish to it, acknowledged."""
        fill(self.node, [(f"{self.name}/{topic}", payload) for payload in payloads], *filter(None, [properties]))

    def put_numbers(self, count: int, start: int = 0) -> None:
        fill(self.node, numbered(f"{self.name}/a", count, start))

    def assert_nobody_publishes_to_it(self, client: Client) -> None:
        """By its own name; messages reach it by the topics it is bound to, and the publisher hears so."""
        if client.version == 5:
            answer = client.publish(self.filter, b"x", 1)
            assert answer is not None and TOPIC_INVALID == answer.reason
            assert answer.prop(REASON_STRING)
            assert [] == settled(client)
        else:
            client.send(publish_packet(self.filter, b"x", version=client.version, qos=1, packet_id=7))
            assert [] == client.expect_closed()
        assert [] == self.stored()

    def stored(self) -> list[bytes]:
        """What an operator sees in it."""
        return [payload_of(message) for message in self.operator.read(f"{self.noun}s", self.name, limit=1000)]


class Queue(Kept):
    """A queue."""

    noun = "queue"


class Stream(Kept):
    """A stream."""

    noun = "stream"


def assert_refused(client: Client, filter_: str, reason: int) -> None:
    """In the SUBACK, in MQTT 5 with this reason and words for it; the connection stays."""
    answer = ask(client, filter_)
    assert [reason if client.version == 5 else 0x80] == answer.reasons
    assert client.version < 5 or answer.prop(REASON_STRING)
    assert [] == settled(client)
