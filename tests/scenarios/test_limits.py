"""Is every limit kept, told to the client as docs/limits.md says, and counted under its name?

One node per test, with the limit set low. `guarded` shows that others are served on. The last test holds three lists
together: the node's options and counters, docs/limits.md, and the counters that this file looks at.
"""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from motorcade.broker.limits import Limits, SessionOptions
from motorcade.broker.stats import LIMIT_NAMES
from tests.scenarios.witness import Witness, assert_no_crash, guarded, metrics, refusals, wait_until
from tests.support.node import ROOT, NodeProcess
from tests.support.refusals import bytes_to_the_end, connect_refused, refused
from tests.support.wire import (
    CONNACK,
    DISCONNECT,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    UNSUBACK,
    Client,
    Will,
    ack_packet,
    connect_packet,
    prop,
    publish_packet,
    unsubscribe_packet,
)

# Reason codes that only limits give.
TOO_LARGE, QUOTA, RATE, BANNED, ALIAS, RECEIVE_MAXIMUM = 0x95, 0x97, 0x9F, 0x8A, 0x94, 0x93
CLIENT_ID, TOPIC_NAME, TOPIC_FILTER, KEEP_ALIVE, ID_NOT_FOUND = 0x85, 0x90, 0x8F, 0x8D, 0x92

both = pytest.mark.parametrize("version", [4, 5], ids=["3.1.1", "5"])
_numbers = itertools.count(1)


@contextmanager
def limited(limits: str = "", session: str = "", listener: str = "") -> Iterator[tuple[NodeProcess, Witness]]:
    """A node with these options and a witness around the test."""
    config = f"[limits]\n{limits}\n[session]\n{session}\n[listeners.tcp]\n{listener}\n"
    with NodeProcess(config=config, http=True) as node, guarded(node) as witness:
        yield node, witness


def accepted(node: NodeProcess, version: int = 5, client_id: str = "", **options: Any) -> Client:
    client = Client(node, version=version)
    options.setdefault("keepalive", 0)
    answer = client.connect(client_id or f"l{next(_numbers)}", **options)
    assert answer.reason == 0, f"refused with {answer.reason}"
    client.connack = answer
    return client


def told(client: Client, code_v3: int, code_v5: int, **options: Any) -> None:
    """A CONNECT that is refused with a CONNACK of this code, and then closed."""
    options.setdefault("client_id", f"l{next(_numbers)}")
    client.send(connect_packet(version=client.version, **options))
    answers = client.expect_closed()
    assert [(CONNACK, code_v5 if client.version == 5 else code_v3)] == [(a.type, a.reason) for a in answers]


def announced(client: Client, number: int) -> object:
    assert client.connack is not None
    return client.connack.prop(number)


# --- sizes --------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("size", [100, 1000, 70_000])
def test_max_packet_size(version: int, size: int) -> None:
    """A packet of exactly the size passes, one byte more ends the connection; CONNACK has announced it."""
    with limited(f"max_packet_size = {size}") as (node, witness), accepted(node, version) as client:
        if version == 5:
            assert size == announced(client, 0x27)
        fits = _publish_of(size, version)
        for _ in range(2):  # the first message of a topic takes another way than the next
            client.send(fits)
            assert witness.subscriber.receive().payload
        client.send(_publish_of(size + 1, version))
        refused(client, TOO_LARGE)
        assert 1 == refusals(node, "max_packet_size")


def _publish_of(size: int, version: int) -> bytes:
    """A PUBLISH of exactly so many bytes."""
    payload = size
    while len(raw := publish_packet("witness/size", b"." * payload, version=version)) > size:
        payload -= 1
    assert size == len(raw)
    return raw


@both
def test_max_connect_size(version: int) -> None:
    """A CONNECT that is too large is closed as soon as its length is known, in every version without an answer."""
    with limited("max_connect_size = 200") as (node, _):
        whole = connect_packet("l" * 150, version=version, username="")
        with accepted(node, version, "l" * 150):
            pass
        with Client(node, version=version) as offender:
            offender.send(connect_packet("l" * 150, version=version, username="u" * 100)[: len(whole) // 2])
            assert b"" == bytes_to_the_end(offender)
        assert 1 == refusals(node, "max_connect_size")
        with accepted(node, version) as client:  # once inside, packets may be larger
            client.publish("large", b"." * 1000, qos=1)


# --- connecting ---------------------------------------------------------------------------------------------------


def test_connect_timeout() -> None:
    """A connection without a complete CONNECT is closed without an answer."""
    with limited("connect_timeout = 0.5") as (node, _), Client(node) as silent:
        silent.send(connect_packet("slow")[:-1])
        assert [] == silent.expect_closed()
        assert 1 == refusals(node, "connect_timeout")


@both
def test_auth_timeout(version: int) -> None:
    """A client whose authentication comes to no end hears 0x88 (3.x: 3); `connect_timeout` is over by then."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        config = (
            "[limits]\nconnect_timeout = 0.2\nauth_timeout = 1.0\n"
            f'[[plugins.access.authentication]]\ntype = "http"\nurl = "{url}"\ntimeout = 60.0\n'
        )
        with NodeProcess(config=config, http=True) as node, Client(node, version=version) as client:
            told(client, 3, 0x88)
            assert (1, 0) == (refusals(node, "auth_timeout"), refusals(node, "connect_timeout"))


@both
def test_max_memory(version: int) -> None:
    """A node that takes more memory than it may lets no one in (0x97, 3.x: 3), and says that it is not ready."""
    config = "[limits]\nmax_memory = 1000000\n"
    with NodeProcess(config=config, http=True) as node:
        url = f"http://{node.http}/readyz"
        wait_until(lambda: httpx.get(url, trust_env=False).status_code == 503, "it has looked at itself")
        assert "max_memory" in httpx.get(url, trust_env=False).text
        with Client(node, version=version) as client:
            told(client, 3, QUOTA)
        assert 1 == refusals(node, "max_memory")


@both
def test_max_connections(version: int) -> None:
    """One connection too many hears 0x97 (3.x: 3); when somebody leaves there is room again."""
    with limited("max_connections = 3") as (node, witness):  # the witness has two
        with accepted(node, version), Client(node, version=version) as offender:
            told(offender, 3, QUOTA)
            witness.check()
        assert 1 == refusals(node, "max_connections")
        wait_until(lambda: metrics(node)["motorcade_connections"] == 2, "the others are gone")
        accepted(node, version).close()


def test_max_connections_of_a_listener() -> None:
    """A listener that is full closes new connections without an answer."""
    with limited(listener="max_connections = 3") as (node, witness):
        with accepted(node), Client(node) as offender:
            assert b"" == bytes_to_the_end(offender)
            witness.check()
        assert 1 == refusals(node, "max_connections")


@both
def test_max_sessions(version: int) -> None:
    """A client without a session hears 0x97 (3.x: 3) when there are enough; one that has a session is let in."""
    stay: dict[str, Any] = {"clean": False, "properties": prop(0x11, 60) if version == 5 else b""}
    with limited("max_sessions = 4") as (node, witness):  # the witness has two
        for name in ("one", "two"):
            accepted(node, version, name, **stay).disconnect()
        with Client(node, version=version) as offender:
            told(offender, 3, QUOTA)
        assert 1 == refusals(node, "max_sessions")
        witness.check()
        with accepted(node, version, "one", **stay) as known:
            assert known.connack is not None and known.connack.session_present
        accepted(node, version, "two").disconnect()  # a clean start that ends with its connection
        accepted(node, version, "three").close()


@both
def test_connect_rate(version: int) -> None:
    """CONNECTs above the burst hear 0x9F (3.x: 3); clients that are connected notice nothing."""
    with limited("connect_rate = 0.01\nconnect_burst = 4") as (node, witness):  # the witness takes two
        accepted(node, version).close()
        accepted(node, version).close()
        for _ in range(3):
            with Client(node, version=version) as offender:
                told(offender, 3, RATE)
        witness.check()
        assert 3 == refusals(node, "connect_rate")


@pytest.mark.parametrize("rule", ['deny = ["127.0.0.0/8"]', 'allow = ["10.0.0.0/8", "::1/128"]'], ids=["deny", "allow"])
def test_network(rule: str) -> None:
    """An address that is not wanted is closed at once, without an answer."""
    with NodeProcess(config=f"[limits]\n{rule}\n", http=True) as node:
        for _ in range(2):
            with socket.create_connection((node.host, node.port), timeout=30) as stranger:
                try:
                    assert b"" == stranger.recv(1)
                except ConnectionResetError:
                    pass
        assert 2 == refusals(node, "network")
        assert_no_crash(node)


def test_network_that_is_wanted() -> None:
    """The address of the test is allowed, a part of its network is denied: it is served."""
    with limited('allow = ["127.0.0.1/32"]\ndeny = ["127.1.0.0/16"]') as (node, witness):
        witness.check()
        assert 0 == refusals(node, "network")


@both
def test_max_client_id(version: int) -> None:
    """A client id of more bytes hears 0x85 (3.x: 2). Bytes count, not characters."""
    with limited("max_client_id = 20") as (node, _):
        accepted(node, version, "ü" * 10).close()
        with Client(node, version=version) as offender:
            told(offender, 2, CLIENT_ID, client_id="ü" * 10 + "x")
        assert 1 == refusals(node, "max_client_id")


@both
def test_flapping(version: int) -> None:
    """A client id that connects too often is banned for a while, 0x8A (3.x: 5); others are not."""
    with limited("flapping_count = 5\nflapping_window = 60.0\nflapping_ban = 1.0") as (node, witness):
        for _ in range(5):
            accepted(node, version, "restless").close()
        with Client(node, version=version) as offender:
            told(offender, 5, BANNED, client_id="restless")
        assert 1 == refusals(node, "flapping")
        accepted(node, version, "calm").close()
        witness.check()

        def forgiven() -> bool:
            with Client(node, version=version) as returned:
                return returned.connect("restless").reason == 0

        wait_until(forgiven, "the ban ends")


def test_flapping_by_address() -> None:
    """If told to, the node counts by address too; then another client id does not help."""
    rules = "flapping_count = 6\nflapping_ban = 60.0\nflapping_by_address = true"
    with limited(rules) as (node, witness):  # the witness takes two
        for _ in range(4):
            accepted(node).close()
        with Client(node) as offender:
            told(offender, 5, BANNED)
        assert 1 == refusals(node, "flapping")
        witness.check()


# --- rates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ("message_rate = 40.0\nmessage_burst = 10", "message_rate"),
        ("byte_rate = 40000.0\nbyte_burst = 10000", "byte_rate"),
    ],
    ids=["message_rate", "byte_rate"],
)
@both
def test_rates(version: int, limits: str, name: str) -> None:
    """Above its rate a client is read more slowly: nothing is lost, and the others are not slowed down."""
    with limited(limits) as (node, witness), accepted(node, version) as eager, accepted(node) as reader:
        reader.subscribe("rate")
        packets = [publish_packet("rate", b"%d" % n + b" " * 1000, version=version) for n in range(30)]
        for half in (packets[:15], packets[15:]):  # more at once than the burst, however slow this machine is
            eager.send(b"".join(half))
            witness.check()
        assert list(range(30)) == [int(reader.receive().payload) for _ in range(30)]
        assert refusals(node, name) > 0
        eager.expect_nothing()


# --- what one packet may contain ----------------------------------------------------------------------------------


@both
def test_max_topic_levels(version: int) -> None:
    """A topic of more levels ends the connection (0x90), a filter is refused (0x8F, 3.x: 0x80), so is a will (0x90)."""
    with limited("max_topic_levels = 3") as (node, _):
        with accepted(node, version) as client:
            assert [0] == client.subscribe("a/+/#").reasons
            assert [TOPIC_FILTER if version == 5 else 0x80] == client.subscribe("a/+/c/#").reasons
            assert 1 == refusals(node, "max_topic_levels")
            client.publish("a/b/c", b"fits")
            assert b"fits" == client.receive().payload
            client.send(publish_packet("a/b/c/d", b"", version=version))
            refused(client, TOPIC_NAME)
        assert 2 == refusals(node, "max_topic_levels")
        with Client(node, version=version) as offender:
            offender.send(connect_packet("w", version=version, will=Will("a/b/c/d")))
            connect_refused(offender, TOPIC_NAME)
        assert 3 == refusals(node, "max_topic_levels")


def test_max_topic_alias() -> None:
    """CONNACK tells how many aliases there are; one above ends the connection with 0x94."""
    with limited("max_topic_alias = 2") as (node, witness), accepted(node) as client:
        assert 2 == announced(client, 0x22)
        client.publish("witness/alias", b"1", properties=prop(0x23, 2))
        client.publish("", b"2", properties=prop(0x23, 2))
        assert [b"1", b"2"] == [witness.subscriber.receive().payload for _ in range(2)]
        client.send(publish_packet("witness/alias", b"3", properties=prop(0x23, 3)))
        refused(client, ALIAS)
        assert 1 == refusals(node, "max_topic_alias")


def test_no_topic_alias() -> None:
    """0 is none: CONNACK says nothing, which means none, and the first alias ends the connection."""
    with limited("max_topic_alias = 0") as (node, _), accepted(node) as client:
        assert announced(client, 0x22) in (None, 0)
        client.send(publish_packet("a", b"", properties=prop(0x23, 1)))
        refused(client, ALIAS)
        assert 1 == refusals(node, "max_topic_alias")


def test_max_topic_alias_out() -> None:
    """Towards a client that takes ten aliases the node sets up no more than it may; other topics come in full."""
    with limited("max_topic_alias_out = 2") as (node, _), accepted(node, properties=prop(0x22, 10)) as client:
        client.subscribe("t/#")
        topics = ["t/1", "t/2", "t/3", "t/1", "t/2", "t/3"]
        for topic in topics:
            client.publish(topic, topic.encode())
        messages = [client.expect(PUBLISH) for _ in topics]
        assert [t.encode() for t in topics] == [m.payload for m in messages]
        assert {m.prop(0x23) for m in messages} == {1, 2, None}
        assert ["t/3", "t/3"] == [m.topic for m in messages if m.prop(0x23) is None]


def test_max_user_properties() -> None:
    """As many user properties as allowed pass, one more ends the connection with 0x97."""
    pair = prop(0x26, ("k", "v"))
    with limited("max_user_properties = 2") as (node, witness), accepted(node) as client:
        client.publish("witness/pairs", b"", properties=pair * 2)
        assert [("k", "v")] * 2 == witness.subscriber.receive().prop_all(0x26)
        client.send(publish_packet("witness/pairs", b"", properties=pair * 3))
        refused(client, QUOTA)
        assert 1 == refusals(node, "max_user_properties")
        with Client(node) as offender:
            told(offender, 0, QUOTA, properties=pair * 3)
        assert 2 == refusals(node, "max_user_properties")


@both
def test_max_filters(version: int) -> None:
    """A SUBSCRIBE of too many filters is refused as a whole (0x97 each, 3.x: 0x80); the connection goes on."""
    with limited("max_filters = 2") as (node, _), accepted(node, version) as client:
        assert [0, 0] == client.subscribe([("a", 0), ("b", 0)]).reasons
        answer = client.subscribe([("c", 0), ("d", 0), ("e", 0)])
        assert [QUOTA if version == 5 else 0x80] * 3 == answer.reasons
        assert 1 == refusals(node, "max_filters")
        client.publish("c", b"")
        client.expect_nothing()


@both
def test_max_filters_of_an_unsubscribe(version: int) -> None:
    """An UNSUBSCRIBE of too many filters: nothing of it is done (0x83 each; 3.x, which cannot say no, is closed)."""
    with limited("max_filters = 2") as (node, _), accepted(node, version) as client:
        client.subscribe("a")
        client.send(unsubscribe_packet(9, ["a", "b", "c"], version=version))
        if version == 5:
            answer = client.expect(UNSUBACK)
            assert (9, [0x83] * 3) == (answer.packet_id, answer.reasons)
            client.publish("a", b"still there")
            assert b"still there" == client.receive().payload
        else:
            refused(client)
        assert 1 == refusals(node, "max_filters")


# --- what one session may hold ------------------------------------------------------------------------------------


@both
def test_max_filter_bytes(version: int) -> None:
    """Filters that are too long together are refused (0x97, 3.x: 0x80); renewing one that exists is not."""
    with limited(session="max_filter_bytes = 20") as (node, witness), accepted(node, version) as client:
        refusal = QUOTA if version == 5 else 0x80
        assert [0, 0, refusal] == client.subscribe([("a" * 10, 0), ("b" * 10, 0), ("c", 0)]).reasons
        assert [1] == client.subscribe("a" * 10, 1).reasons
        assert 1 == refusals(node, "max_filter_bytes")
        client.unsubscribe("b" * 10)
        assert [0] == client.subscribe("c").reasons
        witness.check()


@both
def test_max_subscriptions(version: int) -> None:
    """One subscription too many is refused (0x97, 3.x: 0x80); renewing one that exists is not."""
    with limited(session="max_subscriptions = 2") as (node, witness), accepted(node, version) as client:
        refusal = QUOTA if version == 5 else 0x80
        assert [0, 0, refusal] == client.subscribe([("a", 0), ("b", 0), ("c", 0)]).reasons
        assert [1] == client.subscribe("a", 1).reasons
        assert 1 == refusals(node, "max_subscriptions")
        client.unsubscribe("b")
        assert [0] == client.subscribe("c").reasons
        witness.check()


@both
def test_max_awaiting_rel(version: int) -> None:
    """CONNACK announces it as receive maximum; one unreleased QoS 2 message too many ends the connection with 0x93."""
    with limited(session="max_awaiting_rel = 2") as (node, _), accepted(node, version) as client:
        if version == 5:
            assert 2 == announced(client, 0x21)
        for number in (1, 2):
            client.send(publish_packet("a", version=version, qos=2, packet_id=number))
            assert number == client.expect(PUBREC).packet_id
        client.send(publish_packet("a", version=version, qos=2, packet_id=3))
        refused(client, RECEIVE_MAXIMUM)
        assert 1 == refusals(node, "max_awaiting_rel")


@both
def test_await_rel_timeout(version: int) -> None:
    """An identifier that is not released in time is forgotten: its PUBREL is for nothing, and it is free again."""
    with limited(session="await_rel_timeout = 0.5") as (node, witness), accepted(node, version) as client:
        before = refusals(node, "await_rel_timeout")  # the witness may have been too slow as well
        client.send(publish_packet("witness/rel", b"1", version=version, qos=2, packet_id=7))
        assert 7 == client.expect(PUBREC).packet_id
        assert b"1" == witness.subscriber.receive().payload
        wait_until(lambda: refusals(node, "await_rel_timeout") == before + 1, "the identifier is forgotten")
        client.send(ack_packet(PUBREL, 7, version=version))
        answer = client.expect(PUBCOMP)
        assert (7, ID_NOT_FOUND if version == 5 else None) == (answer.packet_id, answer.reason)
        client.publish("witness/rel", b"2", qos=2, packet_id=7)
        assert b"2" == witness.subscriber.receive().payload


@both
def test_window(version: int) -> None:
    """No more messages are in flight than the window, or the client's receive maximum, allows."""
    with limited(session="window = 3") as (node, witness), accepted(node, version) as client:
        client.subscribe("w", 1)
        for n in range(5):
            witness.publisher.publish("w", b"%d" % n, qos=1)
        first = [client.expect(PUBLISH) for _ in range(3)]
        client.expect_nothing()
        client.send(ack_packet(PUBACK, first[0].packet_id or 0, version=version))
        assert b"3" == client.expect(PUBLISH).payload
        client.expect_nothing()


def _dropped(node: NodeProcess) -> float:
    return metrics(node)['motorcade_messages_dropped_total{reason="queue_full"}']


@both
def test_queue(version: int) -> None:
    """A full queue drops its oldest QoS 0 message first, then its oldest; the client is told nothing."""
    stay: dict[str, Any] = {"clean": False, "properties": prop(0x11, 60) if version == 5 else b""}
    with limited(session="queue = 4\nstore_qos0 = true") as (node, witness):
        with accepted(node, version, "q", **stay) as client:
            client.subscribe("q", 1)
            client.disconnect()
        for n, qos in enumerate((1, 0, 1, 0, 1, 1, 1)):
            witness.publisher.publish("q", b"%d" % n, qos=qos)
        assert 3 == _dropped(node)  # 1, 3, then 0
        with accepted(node, version, "q", **stay) as client:
            assert [b"2", b"4", b"5", b"6"] == [client.receive().payload for _ in range(4)]
            client.expect_nothing()


@pytest.mark.parametrize(("patience", "given_up"), [(0.05, 1), (0, 0)])
def test_patience(patience: float, given_up: int) -> None:
    """A publisher waits a moment for the only receiver of its messages; then, or at once, the queue drops."""
    session = f"window = 2\nqueue = 10\npatience = {patience}"
    with limited(session=session) as (node, _), accepted(node) as stuck, accepted(node) as publisher:
        stuck.subscribe("t", 1)
        publisher.send(b"".join(publish_packet("t", b"%d" % n, qos=1, packet_id=n + 1) for n in range(30)))
        assert list(range(1, 31)) == [publisher.expect(PUBACK).packet_id for _ in range(30)]
        assert given_up == refusals(node, "patience")
        assert 30 - 2 - 10 == _dropped(node)


def test_queue_bytes() -> None:
    """The bytes that wait are bounded too."""
    stay: dict[str, Any] = {"clean": False, "properties": prop(0x11, 60)}
    with limited(session="queue_bytes = 5000") as (node, witness):
        with accepted(node, 5, "q", **stay) as client:
            client.subscribe("q", 1)
            client.disconnect()
        for n in range(8):
            witness.publisher.publish("q", b"%d" % n + b" " * 1000, qos=1)
        assert 4 == _dropped(node)
        with accepted(node, 5, "q", **stay) as client:
            assert [4, 5, 6, 7] == [int(client.receive().payload) for _ in range(4)]
            client.expect_nothing()


GREEDY = """
from motorcade.core.message import Message
from motorcade.extension.plugin import Plugin
from motorcade.extension.sources import Given, Kind, Source


class Greedy(Source):
    def subscribe(self, subscription, why):
        self.feed.send("begin")
        return True

    def info(self, what, desired):
        return [Given(Message("greedy", b"%d %d" % (number, desired), 1), "greedy") for number in range(desired + 5)]


class GreedyPlugin(Plugin):
    async def start(self):
        self.context.add_source(Kind("greedy", Greedy, prefix="greedy"))
"""


def test_source_buffer(tmp_path: Path) -> None:
    """A source is told how much room there is; what it gives beyond is counted, and comes all the same."""
    (tmp_path / "greedy.py").write_text(GREEDY)
    config = f'[session]\nsource_buffer = 10\n[plugins.greedy]\npath = "{tmp_path / "greedy.py"}"\n'
    with NodeProcess(config=config, http=True) as node, guarded(node), accepted(node) as client:
        client.subscribe("greedy", 1)
        room = 5  # nobody gets more than half of it
        for number in range(room + 5):
            message = client.receive()
            assert (b"%d %d" % (number, room), 1) == (message.payload, message.qos)
        assert 5 == refusals(node, "source_buffer")


def test_expiry_max() -> None:
    """A session expiry above the maximum is lowered, and CONNACK says so; one below is kept."""
    with limited(session="expiry_max = 100") as (node, _):
        for wanted, answer in ((50, None), (100, None), (101, 100), (0xFFFFFFFF, 100)):
            with accepted(node, properties=prop(0x11, wanted)) as client:
                assert answer == announced(client, 0x11)


# --- slow and silent clients --------------------------------------------------------------------------------------


def test_write_high_and_stall_timeout() -> None:
    """A full socket loses QoS 0 messages; when it takes nothing for a while the client is closed without an answer."""
    options = "write_high = 65536\nwrite_low = 16384\nstall_timeout = 0.5"
    with limited(options) as (node, witness), accepted(node) as slow, accepted(node) as flooder:
        slow.subscribe("flood")

        def gone() -> bool:
            flooder.send(publish_packet("flood", b"." * 60_000) * 10)
            witness.check()
            return refusals(node, "stall_timeout") == 1

        wait_until(gone, "the client that takes nothing is closed")
        assert metrics(node)['motorcade_messages_dropped_total{reason="slow_consumer"}'] > 0


@both
def test_keep_alive(version: int) -> None:
    """A client that is silent for longer than its keep alive allows is closed, in MQTT 5 with 0x8D."""
    with limited("keep_alive_factor = 1.0") as (node, _), accepted(node, version, keepalive=1) as silent:
        answers = silent.expect_closed()
        assert [(DISCONNECT, KEEP_ALIVE)] * (version == 5) == [(a.type, a.reason) for a in answers]
        assert 1 == refusals(node, "keep_alive")


@pytest.mark.parametrize(("wanted", "answer"), [(0, 2), (60, 2), (3, 2), (2, None), (1, None)])
def test_max_keep_alive(wanted: int, answer: int | None) -> None:
    """A longer keep alive, or none, is lowered; MQTT 5 clients are told."""
    with NodeProcess(config="[limits]\nmax_keep_alive = 2\n") as node, accepted(node, keepalive=wanted) as client:
        assert answer == announced(client, 0x13)


def test_max_keep_alive_holds_for_mqtt_3() -> None:
    """MQTT 3 cannot be told, but a client without a keep alive does not stay for ever when it has vanished."""
    with NodeProcess(config="[limits]\nmax_keep_alive = 1\n", http=True) as node:
        with accepted(node, 4, keepalive=0) as silent:
            assert [] == silent.expect_closed()
        assert 1 == refusals(node, "keep_alive")


# --- the lists ----------------------------------------------------------------------------------------------------


def test_every_limit_is_documented_and_tested() -> None:
    """Every counter of the node, every option of [limits] and [session] stands in docs/limits.md with its default."""
    rows = _documented()
    options = {f"limits.{name}": value for name, value in _defaults(Limits()).items()}
    options |= {f"session.{name}": value for name, value in _defaults(SessionOptions()).items()}
    assert options == {name: default for name, (default, _) in rows.items() if name.startswith(("limits.", "session."))}
    counters = {name for _, found in rows.values() for name in found}
    assert set(LIMIT_NAMES) == counters
    here = Path(__file__).read_text()
    for name in LIMIT_NAMES:
        assert f'"{name}"' in here, f"no test looks at the counter of {name}"


def _defaults(options: Any) -> dict[str, str]:
    return {name: _spoken(getattr(options, name)) for name in options.__struct_fields__}


def _spoken(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if value < 1e6 else f"{value:.0f}"
    return "none" if value == () else str(value)


def _documented() -> dict[str, tuple[str, set[str]]]:
    """Option -> (default, counters) of the tables in docs/limits.md."""
    rows: dict[str, tuple[str, set[str]]] = {}
    for line in (ROOT / "docs" / "limits.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) >= 4 and (found := re.match(r"`([a-z0-9_.]+)`", cells[0])):
            default = cells[1].replace("`", "").split(" ")[0]
            rows[found[1]] = default, set(re.findall(r'limit="([a-z_0-9]+)"', cells[2]))
    return rows
