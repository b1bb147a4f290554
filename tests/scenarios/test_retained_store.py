"""Are retained messages there after the node has ended, however it ended, and never an older one than was promised?"""

from __future__ import annotations

import random
import time
from collections import defaultdict

import pytest

from tests.support.stores import Home, both_ends, on_every_store
from tests.support.wire import (
    PINGREQ,
    PINGRESP,
    PUBACK,
    PUBLISH,
    PUBREC,
    Client,
    Closed,
    Packet,
    publish_packet,
)

ROUNDS = {"rocksdb": 20, "redis": 5}  #: a server that runs on has less to lose when the node dies
TOPICS = 8
UNANSWERED = 30  #: messages that the publisher has under way at most before it sends more
EVERY_QOS_2 = 25  #: so many messages of QoS 1 for one of QoS 2


def retained(home: Home, filter_: str, at_least: int = 0) -> dict[str, bytes]:
    """What a new subscriber gets. Of more than a few the node sends others something in between: say how many."""
    with Client(home) as reader:
        assert 0 == reader.connect("reader").reason
        reader.subscribe(filter_)
        found = [reader.recv() for _ in range(at_least)]
        reader.send(PINGREQ)
        while (packet := reader.recv()).type == PUBLISH:
            found.append(packet)
        assert PINGRESP == packet.type
    assert all(message.retain for message in found)
    by_topic = {message.topic: message.payload for message in found}
    assert len(found) == len(by_topic), "a message came twice"
    return by_topic


class Publisher:
    """Sends retained messages without waiting, and knows which of them were acknowledged."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.sent: dict[str, list[bytes]] = defaultdict(lambda: [b""])  # payloads by topic, in order; empty: deletion
        self.certain: dict[str, int] = defaultdict(int)  # the one of them that must be there, if not a later one
        self._under_way: dict[int, tuple[str, int]] = {}
        self._count = 0  # messages sent

    def send(self, client: Client, count: int) -> None:
        """Send some messages at once, then wait until not too many are unanswered."""
        packets = []
        for _ in range(count):
            self._count += 1
            packet_id = client.next_id()
            topic = f"t/{self.chance.randrange(TOPICS)}"
            payload = b"" if self.chance.random() < 0.1 else b"%d" % self._count
            self.sent[topic].append(payload)
            self._under_way[packet_id] = (topic, len(self.sent[topic]) - 1)
            qos = 1 if packet_id % EVERY_QOS_2 else 2
            packets.append(publish_packet(topic, payload, version=4, qos=qos, packet_id=packet_id, retain=True))
        client.send(b"".join(packets))
        while len(self._under_way) > UNANSWERED:
            self.note(client.recv())

    def give_up(self, client: Client) -> int:
        """The node is dead. Note what it had said before; how many messages it has not answered."""
        for answer in the_rest(client):
            self.note(answer)
        left = len(self._under_way)
        self._under_way.clear()
        return left

    def note(self, answer: Packet) -> None:
        assert answer.type in (PUBACK, PUBREC), answer.name
        assert answer.packet_id is not None
        topic, number = self._under_way.pop(answer.packet_id)
        self.certain[topic] = max(self.certain[topic], number)

    def judge(self, found: dict[str, bytes]) -> None:
        """What was acknowledged, or something later; from now on that."""
        for topic, payloads in self.sent.items():
            allowed = payloads[self.certain[topic] :]
            payload = found.get(topic, b"")
            assert payload in allowed, f"{topic} has {payload!r}, should have one of {allowed}"
            self.certain[topic] += allowed.index(payload)
        assert found.keys() <= self.sent.keys()


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_nothing_that_was_acknowledged(home: Home) -> None:
    """Killed again and again in the middle of many messages: each topic has its acknowledged message or a later one."""
    publisher = Publisher(seed=3)
    chance = publisher.chance
    for _ in range(ROUNDS[home.kind]):
        home.start()
        publisher.judge(retained(home, "t/#"))
        client = home.connect("publisher", 4)
        for _ in range(chance.randrange(1, 30)):
            publisher.send(client, chance.randrange(1, 30))
        time.sleep(chance.uniform(0, 0.005))  # the moment that this is about
        home.node.kill()
        publisher.give_up(client)
        home.kill()
    home.start()
    publisher.judge(retained(home, "t/#"))
    # Whether a kill comes between a message and its answer is chance, and more often so the more rounds there are.
    assert sum(publisher.certain.values()) > 20, "hardly anything was acknowledged"


def the_rest(client: Client) -> list[Packet]:
    """What had arrived when the node died; its last packet may be cut."""
    packets = []
    while True:
        try:
            packets.append(client.recv())
        except Closed:
            return packets


@both_ends
def test_a_large_set_is_back(home: Home, end: str) -> None:
    """Thousands of topics, each once, though nobody has waited for more than the last."""
    expected = {f"set/{number}": b"%d" % number for number in range(3000)}
    home.start()
    filler = home.connect("filler")
    filler.send(b"".join(publish_packet(topic, payload, qos=0, retain=True) for topic, payload in expected.items()))
    filler.publish("last", b"x", 1, retain=True)
    home.again(end)
    assert expected == retained(home, "set/+", len(expected))


@on_every_store
def test_the_largest_message_is_back(home: Home) -> None:
    """A payload of a mebibyte, the most that is kept by default; one byte more ends the old message."""
    payload = random.Random(4).randbytes(1024 * 1024)
    home.start("[limits]\nmax_packet_size = 2000000\n")
    publisher = home.connect("publisher")
    publisher.publish("largest", payload, 1, retain=True)
    publisher.publish("too large", b"old", 1, retain=True)
    publisher.publish("too large", payload + b"x", 1, retain=True)
    home.crash()
    assert {"largest": payload} == retained(home, "#")
