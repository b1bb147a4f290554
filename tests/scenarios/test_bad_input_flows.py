"""Do flows that are never finished, and acknowledgements out of place, harm anybody but the client they belong to?"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator

import pytest

from tests.scenarios.witness import Witness, refusals, rss
from tests.support import wire
from tests.support.cases import both_versions, each_row
from tests.support.node import NodeProcess
from tests.support.refusals import PROTOCOL_ERROR, refused

RECEIVE_MAXIMUM_EXCEEDED, ID_NOT_FOUND = 0x93, 0x92
AWAITING = 100  #: QoS 2 messages that a client may leave unreleased

_numbers = itertools.count(1)

pytestmark = pytest.mark.usefixtures("witness")


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(http=True) as running:
        yield running


def accepted(node: NodeProcess, version: int, client_id: str = "", **options: object) -> wire.Client:
    client = wire.Client(node, version=version)
    answer = client.connect(client_id or f"flow-{next(_numbers)}-{uuid.uuid4().hex[:6]}", keepalive=0, **options)
    assert answer.reason == 0
    client.connack = answer
    return client


# --- QoS 2 of the client ------------------------------------------------------------------------------------------


def _hoard(client: wire.Client, topic: str, count: int, payload: bytes = b"h") -> None:
    """Publish QoS 2 messages and release none."""
    for number in range(1, count + 1):
        client.send(wire.publish_packet(topic, payload, version=client.version, qos=2, packet_id=number))
    for number in range(1, count + 1):
        answer = client.expect(wire.PUBREC)
        assert (number, True) == (answer.packet_id, (answer.reason or 0) < 0x80)


@both_versions
def test_a_client_that_never_releases_qos_2_is_stopped(node: NodeProcess, witness: Witness, version: int) -> None:
    """The message after the last one that may wait for its PUBREL ends the connection, with 0x93 in MQTT 5."""
    before = refusals(node, "max_awaiting_rel")
    with accepted(node, version) as offender:
        _hoard(offender, "hoard", AWAITING)
        witness.check()
        offender.send(wire.publish_packet("hoard", b"one too many", version=version, qos=2, packet_id=AWAITING + 1))
        refused(offender, RECEIVE_MAXIMUM_EXCEEDED)
    assert before + 1 == refusals(node, "max_awaiting_rel")


@both_versions
def test_hoarding_goes_on_where_it_stopped(node: NodeProcess, witness: Witness, version: int) -> None:
    """Coming back does not give a hoarder a new allowance, releasing does; every message was routed once."""
    name = f"hoarder-{version}-{uuid.uuid4().hex[:6]}"
    stay = {"clean": False, "properties": wire.prop(0x11, 60) if version == 5 else b""}
    with accepted(node, version, name, **stay) as offender:
        _hoard(offender, "hoard", AWAITING)
    with accepted(node, version, name, **stay) as offender:
        assert offender.connack is not None and offender.connack.session_present
        offender.send(wire.publish_packet("witness/again", b"x", version=version, qos=2, packet_id=1, dup=True))
        assert offender.expect(wire.PUBREC).packet_id == 1
        witness.subscriber.expect_nothing()  # it was routed when it first came
        offender.send(wire.ack_packet(wire.PUBREL, 1, version=version))
        assert offender.expect(wire.PUBCOMP).packet_id == 1
        offender.send(wire.publish_packet("witness/new", b"x", version=version, qos=2, packet_id=1))
        assert offender.expect(wire.PUBREC).packet_id == 1
        assert witness.subscriber.receive().topic == "witness/new"
        offender.send(wire.publish_packet("hoard", b"", version=version, qos=2, packet_id=AWAITING + 1))
        refused(offender, RECEIVE_MAXIMUM_EXCEEDED)
    with accepted(node, version, name) as cleaned:
        assert cleaned.connack is not None and not cleaned.connack.session_present


def test_many_hoarders_of_large_messages_cost_no_memory(node: NodeProcess, witness: Witness) -> None:
    """A message is routed at PUBLISH; what waits for PUBREL is its identifier, not the message."""
    before = rss(node)
    offenders = [accepted(node, 5) for _ in range(10)]
    for offender in offenders:
        _hoard(offender, "hoard", AWAITING, b"L" * 100_000)
        witness.check()
    assert rss(node) < before + 48 * 1024 * 1024, "100 MB were sent"
    for offender in offenders:
        offender.close()


# --- acknowledgements out of place --------------------------------------------------------------------------------


@both_versions
def test_acknowledgements_for_nothing_are_harmless(node: NodeProcess, version: int) -> None:
    """Identifiers that are not in use: PUBACK and PUBCOMP are ignored, PUBREC and PUBREL get their answers."""
    with accepted(node, version) as client:
        for number in (1, 2, 65535):
            client.send(
                wire.ack_packet(wire.PUBACK, number, version=version)
                + wire.ack_packet(wire.PUBCOMP, number, version=version)
            )
            client.send(wire.ack_packet(wire.PUBREL, number, version=version))
            answer = client.expect(wire.PUBCOMP)
            assert (number, ID_NOT_FOUND if version == 5 else None) == (answer.packet_id, answer.reason)
            client.send(wire.ack_packet(wire.PUBREC, number, version=version))
            answer = client.expect(wire.PUBREL)
            assert (number, ID_NOT_FOUND if version == 5 else None) == (answer.packet_id, answer.reason)
        client.expect_nothing()


@both_versions
@each_row("granted wrong", [(1, wire.PUBREC), (1, wire.PUBCOMP), (2, wire.PUBACK), (2, wire.PUBCOMP)])
def test_the_wrong_acknowledgement_frees_no_identifier(
    node: NodeProcess, witness: Witness, version: int, granted: int, wrong: int
) -> None:
    """An acknowledgement that does not fit the message is an error of the protocol; the message stays in flight."""
    name = f"wrong-{version}-{granted}-{wrong}-{uuid.uuid4().hex[:6]}"
    stay = {"clean": False, "properties": wire.prop(0x11, 60) if version == 5 else b""}
    with accepted(node, version, name, **stay) as offender:
        offender.subscribe("wrong", granted)
        witness.publisher.publish("wrong", b"x", qos=granted)
        message = offender.expect(wire.PUBLISH)
        assert message.packet_id is not None
        offender.send(wire.ack_packet(wrong, message.packet_id, version=version))
        refused(offender, PROTOCOL_ERROR)
    with accepted(node, version, name, **stay) as returned:
        again = returned.receive()
        assert (message.packet_id, True, b"x") == (again.packet_id, again.dup, again.payload)
    with accepted(node, version, name):
        pass  # a clean start: the session ends


@both_versions
def test_a_full_window_of_unreleased_qos_2_blocks_only_itself(
    node: NodeProcess, witness: Witness, version: int
) -> None:
    """A subscriber that answers PUBREC but never PUBCOMP keeps its identifiers, gets no more, and others go on."""
    with accepted(node, version) as slow:
        slow.subscribe("block", 2)
        for n in range(100):
            witness.publisher.publish("block", b"%d" % n, qos=2)
        window: list[wire.Packet] = [slow.expect(wire.PUBLISH) for _ in range(32)]
        slow.expect_nothing()
        for message in window:
            assert message.packet_id is not None
            slow.send(wire.ack_packet(wire.PUBREC, message.packet_id, version=version))
            assert slow.expect(wire.PUBREL).packet_id == message.packet_id
        slow.expect_nothing()  # PUBREC frees nothing
        witness.check()
        for message in window[:5]:
            assert message.packet_id is not None
            slow.send(wire.ack_packet(wire.PUBCOMP, message.packet_id, version=version))
        taken = {message.packet_id for message in window[5:]}
        for n in range(32, 37):
            message = slow.expect(wire.PUBLISH)
            assert (b"%d" % n, False) == (message.payload, message.packet_id in taken)
        slow.expect_nothing()
