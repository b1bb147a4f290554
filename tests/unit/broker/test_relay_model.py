"""Several members, one meaning: the same conversations with all clients on one node, and spread over members.

A conversation is a list of what clients do: connect to some member, publish in bursts, subscribe, leave, come back
elsewhere. It is played on one node, where every member is that node, and on two and three members. In the end every
client has heard the same: the same messages at the same QoS with the same properties, in the same order for each
publisher, topic and QoS; and every publisher got the same answers.

What may differ is left out: packet ids, who is chosen in a shared group (but one is, or none), and the order of
messages of different publishers, topics or QoS.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from motorcade.broker.limits import SessionOptions
from motorcade.core.subscription import Subscription
from motorcade.mqtt.packets import (
    Connect,
    Disconnect,
    Packet,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from motorcade.mqtt.properties import NONE, Properties
from tests.support.members import MemberNode, Members
from tests.support.virtual import Peer, standing
from tests.unit.broker.test_balance import balanced, exported

CLIENTS = 4
TOPICS = ("a", "a", "a/b", "c")
FILTERS = ("a", "a", "a/+", "#", "+", "c", "a/b", "+/b")
GROUPS = ("$share/g/a", "$share/h/#")
OPTIONS = SessionOptions(window=5, queue=1000, max_awaiting_rel=0, patience=0.0)


@dataclass(frozen=True)
class Join:
    """A client connects to a member, wherever it was."""

    client: int
    member: int
    version: int
    clean: bool
    lasting: bool


@dataclass(frozen=True)
class Say:
    """A client sends packets in one read: messages as topic, QoS and whether they have properties."""

    client: int
    messages: tuple[tuple[str, int, bool], ...]


@dataclass(frozen=True)
class Want:
    """A client subscribes, or gives up a filter."""

    client: int
    filter: str
    qos: int
    options: tuple[bool, bool, int]  #: no local, retain as published, identifier
    gone: bool = False


@dataclass(frozen=True)
class Leave:
    """A client goes, with a goodbye or without."""

    client: int
    goodbye: bool


Step = Join | Say | Want | Leave

clients = st.integers(0, CLIENTS - 1)
joins = st.builds(
    Join, clients, st.integers(0, 2), st.sampled_from((4, 5)), st.sampled_from((False, False, True)), st.booleans()
)
says = st.builds(
    Say,
    clients,
    st.lists(
        st.tuples(st.sampled_from(TOPICS), st.integers(0, 2), st.sampled_from((False, False, False, True))),
        min_size=1,
        max_size=8,
    ).map(tuple),
)
wants = st.builds(
    Want,
    clients,
    st.sampled_from(FILTERS + GROUPS),
    st.integers(0, 2),
    st.tuples(st.sampled_from((False, False, True)), st.booleans(), st.sampled_from((0, 0, 7))),
    st.sampled_from((False, False, False, True)),
)
leaves = st.builds(Leave, clients, st.booleans())


@st.composite
def conversations(draw: st.DrawFn) -> list[Step]:
    opening: list[Step] = []
    for number in range(CLIENTS):
        opening.append(Join(number, draw(st.integers(0, 2)), draw(st.sampled_from((4, 5))), False, draw(st.booleans())))
        want = draw(wants)
        opening.append(Want(number, want.filter, want.qos, want.options))
    usual = st.one_of(says, says, says, wants, joins, leaves)
    return opening + draw(st.lists(usual, min_size=5, max_size=25))


@dataclass
class Guest:
    """A client, wherever it is."""

    name: str
    peer: Peer | None = None
    version: int = 5
    #: (publisher, topic, QoS of delivery) -> payloads with what came along
    heard: dict[tuple[str, str, int], list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))
    answers: list[tuple[str, int]] = field(default_factory=list)
    shared: Counter[bytes] = field(default_factory=Counter)
    groups: set[str] = field(default_factory=set)

    def read(self) -> bool:
        """Take what has come, and answer it; True if there was something."""
        if self.peer is None:
            return False
        packets = self.peer.take()
        for packet in packets:
            self._take(packet)
        if not self.peer.open:
            self.peer = None
        return bool(packets)

    def _take(self, packet: Packet) -> None:
        assert self.peer is not None
        if isinstance(packet, Publish):
            publisher, _, _ = packet.payload.partition(b" ")
            key = publisher.decode(), packet.topic, packet.qos
            if not packet.dup:
                self.heard[key].append((bytes(packet.payload), packet.retain, packet.properties))
            if packet.qos:
                self.peer.send((Puback, Pubrec)[packet.qos - 1](packet.packet_id))
        elif isinstance(packet, Pubrel):
            self.peer.send(Pubcomp(packet.packet_id))
        elif isinstance(packet, Pubrec):
            self.answers.append(("Pubrec", packet.packet_id))
            self.peer.send(Pubrel(packet.packet_id))
        elif isinstance(packet, Puback):
            self.answers.append(("Puback", packet.packet_id))
        elif isinstance(packet, Suback | Unsuback):
            self.answers.append((type(packet).__name__, len(packet.reasons)))


class Play:
    """A conversation, on so many members."""

    def __init__(self, members: int) -> None:
        self.members = Members(members, OPTIONS)
        self.guests = [Guest(f"c{number}") for number in range(CLIENTS)]
        self.number = 0

    def run(self, conversation: list[Step]) -> None:
        with standing(self.members.clock):
            for step in conversation:
                self.step(step)
                self.go_on()
            for node in self.members.nodes:
                balanced(exported(node))
                assert not node.hooks.lookup("message.publish")
            for number in range(CLIENTS):  # all come back, and hear what has waited for them
                if self.guests[number].peer is None:
                    self.step(Join(number, number, 5, False, True))
                    self.go_on()
            for node in self.members.nodes:
                balanced(exported(node))

    def go_on(self) -> None:
        self.members.turn()
        while sum(guest.read() for guest in self.guests):  # all of them, each time
            self.members.turn()

    def node(self, number: int) -> MemberNode:
        return self.members.nodes[number % len(self.members.nodes)]

    def step(self, step: Step) -> None:
        guest = self.guests[step.client]
        if isinstance(step, Join):
            properties = Properties(session_expiry=1000 if step.lasting else None) if step.version == 5 else NONE
            clean = step.clean or (step.version == 4 and not step.lasting)
            guest.peer, guest.version = self.node(step.member).peer(step.version), step.version
            guest.peer.send(Connect(guest.name, step.version, clean, properties=properties))
            return
        if guest.peer is None:
            return
        if isinstance(step, Leave):
            if step.goodbye:
                guest.peer.send(Disconnect())
            else:
                guest.peer.close()
            guest.peer = None
        elif isinstance(step, Want):
            v5 = guest.version == 5
            no_local, as_published, identifier = step.options if v5 else (False, False, 0)
            no_local = no_local and not step.filter.startswith("$share")
            if step.gone:
                guest.peer.send(Unsubscribe(1, (step.filter,)))
                return
            wanted = Subscription(step.filter, step.qos, no_local, as_published)
            guest.peer.send(Subscribe(1, (wanted,), Properties(subscription_ids=(identifier,) if identifier else ())))
        else:
            packets = []
            for topic, qos, dressed in step.messages:
                self.number += 1
                more = Properties(content_type="c") if dressed and guest.version == 5 else NONE
                payload = b"%s %d" % (guest.name.encode(), self.number)
                packets.append(Publish(topic, payload, qos, packet_id=self.number if qos else 0, properties=more))
            guest.peer.send(*packets)


def played(conversation: list[Step], members: int) -> Play:
    play = Play(members)
    play.run(conversation)
    return play


def has_groups(conversation: list[Step]) -> bool:
    return any(isinstance(step, Want) and step.filter in GROUPS for step in conversation)


def difference(conversation: list[Step], members: int) -> str:
    """What differs between one node and several; empty if nothing does."""
    alone, spread = played(conversation, 1), played(conversation, members)
    for one, other in zip(alone.guests, spread.guests, strict=True):
        if one.answers != other.answers:
            return f"{one.name} was answered\n{other.answers}\nand not\n{one.answers}"
        if not has_groups(conversation) and one.heard != other.heard:
            return f"{one.name} heard\n{dict(other.heard)}\nand not\n{dict(one.heard)}"
    totals = []
    for play in (alone, spread):
        total: Counter[bytes] = Counter()
        for guest in play.guests:
            total.update(payload for heard in guest.heard.values() for payload, *_ in heard)
        totals.append(total)
    if totals[0] != totals[1]:
        return f"all together heard\n{totals[1] - totals[0]}\ntoo much, and\n{totals[0] - totals[1]}\ntoo little"
    return ""


@pytest.mark.parametrize("members", [2, 3])
@given(conversations())
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.reuse, Phase.generate, Phase.shrink],
)
def test_members_mean_what_one_node_means(members: int, conversation: list[Step]) -> None:
    found = difference(conversation, members)
    if found:
        pytest.fail(f"{found}\nafter\n" + "\n".join(map(repr, conversation)), pytrace=False)
