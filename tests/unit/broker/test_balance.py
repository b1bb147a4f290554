"""Counters add up: every copy of a message is sent, dropped for a reason, or waits (docs/metrics.md, "Adding up").

The copies are counted here, from the subscriptions at the moment of each PUBLISH; everything else is what the node
counts. Sessions live in memory.
"""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from motorcade.broker.limits import Limits, SessionOptions
from motorcade.core.subscription import Subscription
from motorcade.mqtt.packets import (
    Connect,
    Disconnect,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Unsubscribe,
)
from motorcade.mqtt.properties import Properties
from tests.unit.broker.memory import MemoryNode, Peer, standing

STEPS = 80
DEEDS = (*("publish",) * 6, *("connect", "acknowledge") * 2, "leave", "kill", "fill", "drain", "unsubscribe", "wait")
NOT_OF_RECEIVERS = {"no_subscribers"}


class Conversation:
    """One node, one publisher, and three clients that come, go, lag and acknowledge as chance has it."""

    def __init__(self, chance: Random, *, store_qos0: bool) -> None:
        self.chance = chance
        options = SessionOptions(window=2, queue=4, patience=0.0, store_qos0=store_qos0, expiry_default_v3=50)
        self.node = MemoryNode(options, Limits(flapping_count=0))
        self.copies = self.unheard = 0
        self.peers: dict[str, Peer] = {}
        self.number = 0

    def run(self) -> None:
        with standing(self.node.clock):
            self.writer = self.node.client("writer")
            for _ in range(STEPS):
                deed = self.chance.choice(DEEDS)
                name = f"client-{self.chance.randrange(3)}"
                if deed == "publish":
                    self.publish()
                elif deed == "connect":
                    self.connect(name)
                elif deed == "wait":
                    self.node.clock.now += self.chance.choice([1, 10, 100])
                    self.node.plane.registry.due(self.node.clock.now)
                elif (peer := self.peers.get(name)) is not None and peer.open:
                    getattr(self, deed)(peer)
                self.node.turn()
                self.check()

    def publish(self) -> None:
        topic, qos = f"t/{self.chance.randrange(2)}", self.chance.randrange(3)
        heard = sum(topic in session.subscriptions for session in self.node.plane.registry.sessions.values())
        self.copies += heard
        self.unheard += not heard
        self.number += 1
        properties = Properties(message_expiry=5) if self.chance.random() < 0.2 else Properties()
        size = self.chance.choice([1, 200])
        self.writer.send(Publish(topic, b"x" * size, qos, packet_id=self.number if qos else 0, properties=properties))
        self.node.turn()
        for packet in self.writer.take():
            if isinstance(packet, Pubrec):
                self.writer.send(Pubrel(packet.packet_id))

    def connect(self, name: str) -> None:
        version, clean = self.chance.choice([4, 5]), self.chance.random() < 0.3
        wanted = Properties()
        if version == 5:
            smallest = 100 if self.chance.random() < 0.3 else None
            wanted = Properties(session_expiry=50, maximum_packet_size=smallest)
        peer = self.peers[name] = self.node.peer(version)
        peer.send(Connect(name, version, clean, properties=wanted))
        self.node.turn()
        for topic in ("t/0", "t/1"):
            if self.chance.random() < 0.8 and peer.open:
                peer.send(Subscribe(1, (Subscription(topic, self.chance.randrange(3)),)))

    def acknowledge(self, peer: Peer) -> None:
        for packet in peer.take():
            match packet:
                case Publish(qos=1):
                    peer.send(Puback(packet.packet_id))
                case Publish(qos=2):
                    peer.send(Pubrec(packet.packet_id))
                case Pubrel():
                    peer.send(Pubcomp(packet.packet_id))
                case _:
                    pass

    def leave(self, peer: Peer) -> None:
        peer.send(Disconnect())

    def kill(self, peer: Peer) -> None:
        peer.close()

    def fill(self, peer: Peer) -> None:
        peer.wire.fill()

    def drain(self, peer: Peer) -> None:
        peer.wire.drain()

    def unsubscribe(self, peer: Peer) -> None:
        peer.send(Unsubscribe(9, ("t/0",)))

    def check(self) -> None:
        plane = self.node.plane
        stats = plane.stats
        dropped = sum(count for reason, count in stats.dropped.items() if reason not in NOT_OF_RECEIVERS)
        told = {"sent": stats.publish_sent, "abandoned": stats.abandoned, "queued": plane.shared.queued}
        assert self.copies == stats.publish_sent - stats.abandoned + dropped + plane.shared.queued, (
            self.copies,
            told,
            {reason: count for reason, count in stats.dropped.items() if count},
        )
        assert self.unheard == stats.dropped["no_subscribers"]
        assert self.number == stats.publish_received
        waiting = sum(len(session.queue or ()) for session in plane.registry.sessions.values())
        assert waiting == plane.shared.queued


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_every_copy_is_sent_dropped_or_waits(seed: int, store_qos0: bool) -> None:
    Conversation(Random(seed), store_qos0=store_qos0).run()
