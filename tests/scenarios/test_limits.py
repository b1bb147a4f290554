"""Limits that sockets, listeners and the process itself show; `tests/unit/broker/test_limits_kept.py` has them all.

`guarded` shows that others are served on.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.scenarios.witness import Witness, assert_no_crash, guarded, metrics, refusals, wait_until
from tests.support.consumers import connected
from tests.support.node import NodeProcess
from tests.support.wire import PUBACK, PUBLISH, Client, Packet, ack_packet, publish_packet

QUOTA = 0x97


@contextmanager
def limited(config: str) -> Iterator[tuple[NodeProcess, Witness]]:
    """A node with these options and a witness around the test."""
    with NodeProcess(config=config, http=True) as node, guarded(node) as witness:
        yield node, witness


def test_networks() -> None:
    """An address that is not wanted is closed at once, without an answer; one that is wanted is served."""
    with NodeProcess(config='[limits]\ndeny = ["127.0.0.0/8"]\n', http=True) as node:
        with socket.create_connection((node.host, node.port), timeout=30) as stranger:
            try:
                assert b"" == stranger.recv(1)
            except ConnectionResetError:
                pass
        assert 1 == refusals(node, "network")
        assert_no_crash(node)
    with limited('[limits]\nallow = ["127.0.0.1/32"]\ndeny = ["127.1.0.0/16"]\n') as (node, witness):
        witness.check()
        assert 0 == refusals(node, "network")


def test_a_node_that_takes_too_much_memory_is_not_ready() -> None:
    """It lets no one in (0x97)."""
    with NodeProcess(config="[limits]\nmax_memory = 1000000\n", http=True) as node:
        url = f"http://{node.http}/readyz"
        wait_until(lambda: httpx.get(url, trust_env=False).status_code == 503, "it has looked at itself")
        assert "max_memory" in httpx.get(url, trust_env=False).text
        with Client(node) as client:
            assert QUOTA == client.connect("c").reason
        assert 1 == refusals(node, "max_memory")


# --- back-pressure ------------------------------------------------------------------------------------------------

PUBLISHERS, EACH = 40, 200  # far more than window and queue of one session hold together
MANY = 3000
#: Publishers wait longer than a busy machine keeps a receiver from its turn.
PATIENT = "[session]\npatience = 60\n"


def burst(topic: str, count: int, start: int = 0) -> bytes:
    """Numbered QoS 1 messages, all at once, without waiting for an acknowledgement."""
    return b"".join(publish_packet(topic, b"%d" % n, qos=1, packet_id=n + 1) for n in range(start, start + count))


def take(subscriber: Client, count: int) -> list[Packet]:
    """Receive and acknowledge."""
    messages: list[Packet] = []
    while len(messages) < count:
        message = subscriber.expect(PUBLISH)
        subscriber.send(ack_packet(PUBACK, message.packet_id or 0))
        messages.append(message)
    return messages


def test_publishers_wait_for_the_only_receiver_of_their_messages() -> None:
    """40 send 200 messages each as fast as they can to one subscriber that takes them one by one: nothing is lost."""
    with NodeProcess(http=True, config=PATIENT) as node, connected(node) as subscriber:
        subscriber.subscribe("in/+", 1)
        publishers = [connected(node) for _ in range(PUBLISHERS)]
        for number, publisher in enumerate(publishers):
            publisher.send(burst(f"in/{number}", EACH))
        messages = take(subscriber, PUBLISHERS * EACH)
        for number, publisher in enumerate(publishers):
            mine = [message.payload for message in messages if message.topic == f"in/{number}"]
            assert [b"%d" % n for n in range(EACH)] == mine
            assert list(range(1, EACH + 1)) == [publisher.expect(PUBACK).packet_id for _ in range(EACH)]
            publisher.close()
        assert 0 == metrics(node)['motorcade_messages_dropped_total{reason="queue_full"}']


def test_two_clients_that_flood_each_other_both_get_everything() -> None:
    """Each publishes more to the other than its queue holds, and takes what comes: none waits longer than patience."""
    with NodeProcess() as node, connected(node) as one, connected(node) as two:
        one.subscribe("to/one", 1)
        two.subscribe("to/two", 1)
        for start in range(0, MANY, 600):
            for client, topic in ((one, "to/two"), (two, "to/one")):
                client.send(burst(topic, 600, start=start))
        heard: dict[str, list[bytes]] = {"to/one": [], "to/two": []}
        last = b"%d" % (MANY - 1)
        while any(messages[-1:] != [last] for messages in heard.values()):
            for client, topic in ((one, "to/one"), (two, "to/two")):
                if heard[topic][-1:] != [last]:
                    message = client.recv()
                    if message.type == PUBLISH:
                        heard[topic].append(message.payload or b"")
                        client.send(ack_packet(PUBACK, message.packet_id or 0))
