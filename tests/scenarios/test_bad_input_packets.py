"""Does a node survive packets that no honest client would send, and tell the offender what was wrong?

The table of malformed packets (tests/support/malformed.py) is played to a broker in memory in tests/conformance; here
a node behind real sockets gets one row of each kind of answer. Around every test an honest pair of clients is served
as before, the node's memory comes back, and its log has no error of its own (`guarded`). A CONNECT may take a minute
here, so that a lie about a length cannot be "refused" by the connect timeout.
"""

from __future__ import annotations

import itertools
import socket
import uuid
from collections.abc import Iterator

import pytest

from tests.scenarios.witness import Witness, metrics, refusals, wait_until
from tests.support.malformed import (
    ALL,
    ALLOWED,
    PROPERTIES,
    QUOTA_EXCEEDED,
    TOPIC_INVALID,
    carrying,
    kinds_of_answer,
    told_otherwise,
)
from tests.support.node import NodeProcess
from tests.support.refusals import BROKEN, MALFORMED, PROTOCOL_ERROR, connect_refused, refused
from tests.support.wire import CONNACK, PUBLISH, Client, connect_packet, prop, publish_packet, subscribe_packet

CONFIG = """
[limits]
connect_timeout = 60.0
"""

pytestmark = pytest.mark.usefixtures("witness")


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(config=CONFIG, http=True) as running:
        yield running


_numbers = itertools.count(1)


def fresh() -> str:
    """A client id of its own for every offender, so that none is taken for a flapping client."""
    return f"bad-{next(_numbers)}-{uuid.uuid4().hex[:6]}"


def accepted(node: NodeProcess, version: int = 5, **options: object) -> Client:
    """An offender that behaves well so far."""
    client = Client(node, version=version)
    assert client.connect(fresh(), **options).reason == 0
    return client


def test_each_kind_of_answer_is_heard_over_sockets(node: NodeProcess, witness: Witness) -> None:
    """The offender is told and closed, what follows its packet is not looked at, and others are served meanwhile."""
    for version in (3, 4, 5):
        behind = publish_packet("witness/behind", b"too late", version=version)
        rows = [row for row in kinds_of_answer(ALL) if row.version == version]
        assert [] == told_otherwise(rows, lambda version: Client(node, version=version), fresh, behind)
        witness.check()


def test_a_second_connect_in_the_same_segment_is_refused(node: NodeProcess) -> None:
    """Two CONNECTs at once: the first is answered, the second ends the connection."""
    for version in (4, 5):
        with Client(node, version=version) as offender:
            offender.send(connect_packet(fresh(), version=version) + connect_packet(fresh(), version=version))
            assert offender.expect(CONNACK).reason == 0
            refused(offender, PROTOCOL_ERROR)


def test_a_connection_that_ends_inside_a_packet_is_forgotten(node: NodeProcess, witness: Witness) -> None:
    """Inside a CONNECT or a PUBLISH, by a close, half a close or a reset: the node lets go of the connection."""
    message = publish_packet("witness/half", b"never whole", qos=1)
    for ending in ("close", "half-close", "abort"):
        for raw in (connect_packet(fresh())[:-1], message[:-1]):
            offender = Client(node) if raw[0] == 0x10 else accepted(node)
            offender.send(raw)
            if ending == "half-close":
                offender.socket.shutdown(socket.SHUT_WR)
                assert [] == offender.expect_closed()
                offender.close()
            else:
                getattr(offender, ending)()
    wait_until(lambda: metrics(node)["motorcade_connections"] == 2, "only the witness is connected")
    witness.subscriber.expect_nothing()


def test_a_flood_of_user_properties_is_refused(node: NodeProcess, witness: Witness) -> None:
    """64 user properties are fine, 65 are not, and a packet full of them is refused without reading them all."""
    for kind in ALLOWED:
        before = refusals(node, "max_user_properties")
        counts = (65, 2000 if kind in ("CONNECT", "will") else 140_000)
        for count in counts:
            raw = carrying(kind, PROPERTIES[0x26] * count, fresh())
            offender = Client(node) if raw[0] == 0x10 else accepted(node)
            with offender:
                offender.send(raw)
                (connect_refused if raw[0] == 0x10 else refused)(offender, QUOTA_EXCEEDED)
        assert before + len(counts) == refusals(node, "max_user_properties"), kind
        witness.check()


def test_as_many_user_properties_as_allowed_arrive_in_order(node: NodeProcess, witness: Witness) -> None:
    """64 user properties go through as they came, double names too. [MQTT-3.3.2-18]"""
    pairs = [("k", str(n)) for n in range(64)]
    with accepted(node) as honest:
        honest.publish("witness/many", b"!", properties=b"".join(prop(0x26, pair) for pair in pairs))
        message = witness.subscriber.expect(PUBLISH)
        assert pairs == message.prop_all(0x26)


# --- text of ours that is made from theirs --------------------------------------------------------------------------


def test_a_refused_filter_of_any_length_gets_an_answer(node: NodeProcess, witness: Witness) -> None:
    """The reason string tells what was wrong; it must fit into a string even if the filter was as long as a string."""
    for filter_ in ("a+" + "b" * 65_533, "#/" + "b" * 65_533, "$share/+/" + "b" * 65_526, "\x01+" * 32_767):
        with accepted(node) as offender:
            offender.send(subscribe_packet(1, [(filter_, 0)]))
            refused(offender, MALFORMED)
        witness.check()


def test_an_authentication_method_of_any_length_gets_an_answer(node: NodeProcess) -> None:
    """An unknown method is refused with 0x8C, however long and unprintable its name is."""
    with Client(node) as offender:
        offender.send(connect_packet(fresh(), properties=prop(0x15, "\x01" * 16_000)))
        connect_refused(offender, 0x8C)


def test_a_goodbye_is_never_larger_than_the_client_takes(node: NodeProcess) -> None:
    """A client that takes only small packets gets its DISCONNECT without a reason string. [MQTT-3.14.2-3]"""
    wrong_topic, no_identifier = publish_packet("a/" * 40 + "+", b""), subscribe_packet(0, [("a", 0)])
    for most, raw, reasons in ((64, wrong_topic, (TOPIC_INVALID,)), (40, no_identifier, BROKEN)):
        with accepted(node, properties=prop(0x27, most)) as offender:
            offender.send(raw)
            answer = refused(offender, *reasons)
            assert answer is not None and len(answer.raw) <= most
