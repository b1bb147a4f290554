"""Section 3.2: CONNACK and what it announces."""

from __future__ import annotations

from collections.abc import Callable

from motorcade.broker.state import BrokerOptions
from tests.support.cases import both_versions, every_qos, every_version
from tests.support.clauses import clause
from tests.support.refusals import connect_refused, refused
from tests.support.virtual_wire import VirtualBroker
from tests.support.wire import CONNACK, PUBLISH, Address, Client, Connect, Will, connect_packet, prop, subscribe_packet

Open = Callable[..., Client]

#: Properties that a CONNACK may have.
CONNACK_PROPERTIES = {*range(0x11, 0x14), 0x15, 0x16, 0x1A, 0x1C, 0x1F, 0x21, 0x22, *range(0x24, 0x2B)}


@clause(v3=("MQTT-3.2.0-1", "MQTT-3.2.2-1"), v5=("MQTT-3.2.0-1", "MQTT-3.2.2-1", "MQTT-3.2.2-2"))
@every_version
def test_connack_comes_first_and_says_success(open_client: Open, name: str, version: int) -> None:
    """The first packet is a CONNACK without reserved bits, without a session and with code 0 [MQTT-3.2.2-2]."""
    client = open_client(version)
    client.send(connect_packet(name, version=version))
    answer = client.expect(CONNACK)
    acknowledge_flags, code = answer.raw[2:4]
    assert (0, 0) == (acknowledge_flags, code)
    if version < 5:
        assert b"\x20\x02\x00\x00" == answer.raw
    client.expect_nothing()


@clause(v3="MQTT-3.2.2-2", v5=("MQTT-3.2.2-1", "MQTT-3.2.2-3"))
@both_versions
def test_session_present_is_the_only_flag(connect: Connect, name: str, version: int) -> None:
    """For a session that is there the acknowledge flags are exactly 1 [MQTT-3.2.2-3]."""
    kept = prop(0x11, 300) if version == 5 else b""
    connect(name, version=version, clean=False, properties=kept).disconnect()
    client = connect(name, version=version, clean=False, properties=kept)
    assert client.connack is not None
    assert b"\x01\x00" == client.connack.raw[2:4]


@clause(v5="MQTT-3.2.2-6")
def test_a_refusal_tells_nothing_of_the_session(connect: Connect, open_client: Open, name: str) -> None:
    """Session present is 0 in a refusal, although there is a session of that identifier [MQTT-3.2.2-6]."""
    connect(name, clean=False, properties=prop(0x11, 300)).disconnect()
    client = open_client()
    client.send(connect_packet(name, clean=False, properties=prop(0x15, "no-such-method")))
    connect_refused(client)
    back = connect(name, clean=False)
    assert back.connack is not None and back.connack.session_present  # and the session is unharmed


def test_connack_announces_what_the_broker_can_do(connect: Connect) -> None:
    """The defaults are told: 100 unreleased messages, 16 aliases, packets of 1 MiB, everything available."""
    connack = connect().connack
    assert connack is not None
    assert {key for key, _ in connack.properties} <= CONNACK_PROPERTIES
    assert len(connack.properties) == len({key for key, _ in connack.properties})
    assert (100, 16, 1_048_576) == tuple(map(connack.prop, (0x21, 0x22, 0x27)))
    # Retain, wildcards, subscription identifiers, shared subscriptions: absent means available.
    assert {None, 1} >= {connack.prop(key) for key in (0x25, 0x28, 0x29, 0x2A)}
    assert connack.prop(0x13) is None  # keep alive: the client's counts


@clause(v5=("MQTT-3.2.2-9", "MQTT-3.2.2-12"))
@every_qos
def test_no_maximum_qos_means_that_all_work(connect: Connect, name: str, qos: int) -> None:
    """A broker that announces no maximum takes every QoS in PUBLISH and in a will [MQTT-3.2.2-9].

    The statements are about brokers that cannot do QoS 1 or 2; that this one is none of them is what can be observed.
    """
    observer = connect()
    observer.subscribe(f"{name}/#", 2)
    client = connect(will=Will(f"{name}/will", b"gone", qos=qos))
    assert client.connack is not None
    assert client.connack.prop(0x24) is None
    client.publish(f"{name}/t", b"x", qos)
    client.close()
    assert [(b"x", qos), (b"gone", qos)] == [(m.payload, m.qos) for m in (observer.receive() for _ in range(2))]


# --- brokers that are configured otherwise ------------------------------------------------------------------------


@clause(v5="MQTT-3.2.2-22")
def test_the_brokers_keep_alive_is_told_and_used() -> None:
    """A keep alive that the broker imposes stands in CONNACK, and a silent client is closed by it [MQTT-3.2.2-22]."""
    with VirtualBroker(BrokerOptions(server_keep_alive=20)) as strict:
        client = strict.connect(keepalive=0)
        assert client.connack is not None and 20 == client.connack.prop(0x13)
        strict.let_pass(29)
        client.expect_nothing()
        strict.let_pass(31)
        refused(client, 0x8D)


@clause(v5="MQTT-3.2.2-13")
def test_a_broker_that_cannot_retain_refuses_retained_wills() -> None:
    """Without retained messages CONNACK says so, and a retained will is refused with 0x9A [MQTT-3.2.2-13]."""
    with VirtualBroker() as forgetful:
        client = forgetful.connect(will=Will("will", b"x"))
        assert client.connack is not None and 0 == client.connack.prop(0x25)
        refused_client = forgetful.open()
        refused_client.send(connect_packet("c", will=Will("will", b"x", retain=True)))
        connect_refused(refused_client, 0x9A)


@clause(v5="MQTT-3.2.2-19")
def test_a_reason_string_is_sent_when_it_fits(open_client: Open, name: str, talkative: Address) -> None:
    """A refusal explains itself to a client that can take it [MQTT-3.2.2-19]."""
    client = open_client(5, talkative)
    client.send(connect_packet(name, username="refused"))
    answer = connect_refused(client, 0x87)
    assert answer is not None
    assert "wordy" in (answer.prop(0x1F) or "")


@clause(v5=("MQTT-3.2.2-19", "MQTT-3.2.2-20", "MQTT-3.1.2-24"))
def test_a_reason_string_that_does_not_fit_is_left_out(open_client: Open, name: str, talkative: Address) -> None:
    """CONNACK drops its reason string and user properties rather than exceed the client's limit [MQTT-3.2.2-19]."""
    client = open_client(5, talkative)
    client.send(connect_packet(name, username="refused", properties=prop(0x27, 40)))
    answer = connect_refused(client, 0x87)
    assert answer is not None
    assert len(answer.raw) <= 40
    assert answer.prop(0x1F) is None and answer.prop(0x26) is None


@clause(v5="MQTT-3.1.2-29")
def test_problem_information_depends_on_the_client(connect: Connect, name: str, talkative: Address) -> None:
    """PUBACK explains itself by default and does not when the client declined [MQTT-3.1.2-29]."""
    curious, quiet = connect(to=talkative), connect(to=talkative, properties=prop(0x17, 0))
    for client, wanted in ((curious, True), (quiet, False)):
        answer = client.publish("talkative/refuse", b"x", 1)
        assert answer is not None
        assert 0x99 == answer.reason
        assert wanted is (answer.prop(0x1F) is not None)
        assert wanted is (answer.prop(0x26) is not None)


@clause(v5="MQTT-3.1.2-24")
def test_acknowledgements_stay_within_the_clients_limit(connect: Connect, talkative: Address) -> None:
    """PUBACK drops its words, not its reason, for a client that takes only small packets [MQTT-3.1.2-24]."""
    client = connect(to=talkative, properties=prop(0x27, 40))
    answer = client.publish("talkative/refuse", b"x", 1)
    assert answer is not None
    assert 0x99 == answer.reason
    assert len(answer.raw) <= 40


def test_subscribers_of_a_new_node_start_with_nothing(connect: Connect, talkative: Address) -> None:
    """A node without stored data has no retained messages outside $SYS."""
    client = connect(to=talkative)
    client.send(subscribe_packet(1, [("#", 0)]))
    client.recv()
    client.expect_nothing()
    client.publish("t", b"x")
    assert b"x" == client.expect(PUBLISH).payload
