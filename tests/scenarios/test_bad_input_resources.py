"""Can a client use up the node by being slow, silent, or by asking for more than it reads?

Memory is looked at while the client misbehaves, not only afterwards: what it may hold is bounded by limits that have a
name. Timeouts are short in these nodes' configurations; the tests wait for what follows, never for a time.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from tests.scenarios.witness import PATIENCE, guarded, metrics, refusals, rss, wait_until
from tests.support import wire
from tests.support.cases import each
from tests.support.flows import hold_unreleased
from tests.support.node import NodeProcess
from tests.support.refusals import refused

MIB = 1024 * 1024
KEEP_ALIVE_TIMEOUT = 0x8D

CONFIG = """
[limits]
connect_timeout = 1.0
stall_timeout = 2.0
"""

#: The same, but nobody is sent away for being slow: what is held must be bounded without that.
PATIENT = """
[limits]
connect_timeout = 60.0
stall_timeout = 600.0
"""

_numbers = itertools.count(1)


def node_with(config: str) -> NodeProcess:
    """In memory: the embedded store may hold some 100 MiB before it writes them out, and would hide what is lost."""
    return NodeProcess("--store", "memory://", config=config, http=True)


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with node_with(CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def patient() -> Iterator[NodeProcess]:
    with node_with(PATIENT) as running:
        yield running


def accepted(node: NodeProcess, version: int = 5, **options: object) -> wire.Client:
    client = wire.Client(node, version=version)
    options.setdefault("keepalive", 0)
    assert client.connect(f"res-{next(_numbers)}-{uuid.uuid4().hex[:6]}", **options).reason == 0
    return client


def deaf(node: NodeProcess, filter_: str, qos: int = 0, version: int = 5) -> wire.Client:
    """A subscriber that will not read any more. The kernel takes some megabytes for it before its socket is full."""
    client = accepted(node, version)
    client.subscribe(filter_, qos)
    return client


# --- slow readers -------------------------------------------------------------------------------------------------


def test_a_flood_to_a_subscriber_that_stops_reading_is_dropped(patient: NodeProcess) -> None:
    """QoS 0 messages that a full socket does not take are dropped and counted; others get all of theirs."""
    with guarded(patient) as witness, deaf(patient, "flood", version=4) as slow, accepted(patient) as flooder:
        reader = accepted(patient)
        reader.subscribe("flood")
        before, dropped = rss(patient), _dropped(patient, "slow_consumer")
        highest = before
        for n in range(200):
            flooder.send(wire.publish_packet("flood", n.to_bytes(4, "big") + b"." * 256 * 1024))
            assert n == int.from_bytes(reader.expect(wire.PUBLISH).payload[:4], "big")
            if n % 10 == 0:
                witness.check()
                highest = max(highest, rss(patient))
        assert highest < before + 32 * MIB, f"50 MiB were sent, memory grew by {(highest - before) / MIB:.0f} MiB"
        assert _dropped(patient, "slow_consumer") > dropped
        # What was sent before its socket was full is still whole, and the client is served on once it reads.
        first = slow.expect(wire.PUBLISH)
        assert 0 == int.from_bytes(first.payload[:4], "big")
        _drain(slow)
        flooder.publish("flood", b"after")
        assert b"after" == _last(slow).payload
        reader.close()


def _dropped(node: NodeProcess, reason: str) -> float:
    return metrics(node)[f'motorcade_messages_dropped_total{{reason="{reason}"}}']


def _read_on(client: wire.Client) -> None:
    """Read whatever comes; ends with `Closed`."""
    while True:
        client.recv()


def _drain(client: wire.Client) -> None:
    """Read until the answer to a PINGREQ, so that nothing of before is under way."""
    client.send(wire.PINGREQ)
    while client.recv().type == wire.PUBLISH:
        pass


def _last(client: wire.Client) -> wire.Packet:
    message = client.recv()
    while message.payload != b"after":
        message = client.recv()
    return message


def test_messages_that_must_wait_wait_within_the_queue(patient: NodeProcess) -> None:
    """QoS 1 messages for a client that stops reading fill its window and its queue, and no more."""
    with guarded(patient) as witness, deaf(patient, "wait", 1) as slow, accepted(patient) as flooder:
        before = rss(patient)
        for n in range(60):
            flooder.publish("wait", n.to_bytes(4, "big") + b"." * 1_000_000, qos=1)
            if n % 10 == 0:
                witness.check()
        # 8 MiB of queue, 1 MiB of socket, 32 messages in the window at most, and what the collector has not met yet
        assert rss(patient) < before + (8 + 1 + 32 + 24) * MIB
        assert _dropped(patient, "queue_full") > 0
        slow.close()


def test_a_client_that_takes_nothing_is_sent_away(node: NodeProcess) -> None:
    """After `stall_timeout` a client whose socket has been full all the time is closed, and its memory is free."""
    with guarded(node) as witness, deaf(node, "stall") as slow, accepted(node) as flooder:
        before = refusals(node, "stall_timeout")

        def sent_away() -> bool:
            flooder.send(wire.publish_packet("stall", b"." * 200_000) * 5)
            witness.check()
            return refusals(node, "stall_timeout") > before

        wait_until(sent_away, "the slow client is sent away")
        with pytest.raises(wire.Closed):  # perhaps inside of a packet
            _read_on(slow)
        assert before + 1 == refusals(node, "stall_timeout")


@each(
    request_=(
        wire.PINGREQ * 4096,
        b"".join(wire.subscribe_packet(n, [("$queue/-", 0)]) for n in range(1, 500)),
        b"".join(wire.publish_packet("nobody", qos=1, packet_id=n) for n in range(1, 500)),
    )
)
def test_a_client_that_asks_and_never_reads_is_not_answered_for_ever(patient: NodeProcess, request_: bytes) -> None:
    """While its socket is full the node reads nothing from it: it feels back-pressure instead of filling our memory."""
    with guarded(patient) as witness, accepted(patient) as greedy:
        greedy.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        before = rss(patient)
        stopped = _send_until_blocked(greedy, request_, 256 * MIB)
        witness.check()
        assert stopped, "256 MiB were taken from a client that reads nothing"
        assert rss(patient) < before + 48 * MIB


def _send_until_blocked(client: wire.Client, data: bytes, limit: int) -> bool:
    """Send the same bytes over and over; True if the other side stopped taking them or closed."""
    sent = 0
    client.socket.settimeout(2)
    try:
        while sent < limit:
            client.socket.sendall(data)
            sent += len(data)
    except OSError:
        return True
    return False


def test_large_retained_messages_go_at_the_readers_pace(patient: NodeProcess) -> None:
    """Many subscribers ask for many large retained messages and read nothing: each costs one socket, not the set."""
    with accepted(patient) as publisher:
        for n in range(40):
            publisher.publish(f"large/{n}", b"." * 1_000_000, qos=1, retain=True)
        with guarded(patient) as witness, ExitStack() as stack:
            before = rss(patient)
            for _ in range(20):
                stack.enter_context(deaf(patient, "none")).send(wire.subscribe_packet(2, [("large/#", 0)]))
            witness.check()
            stack.enter_context(accepted(patient)).expect_nothing()
            grown = rss(patient) - before
            assert grown < 20 * 4 * MIB, f"40 MB asked for 20 times: memory grew by {grown / MIB:.0f} MiB"
        for n in range(40):
            publisher.publish(f"large/{n}", b"", qos=1, retain=True)


# --- half-open connections ----------------------------------------------------------------------------------------


def test_a_connect_sent_byte_by_byte_does_not_get_more_time(node: NodeProcess) -> None:
    """The time for the CONNECT counts from the connection, not from the last byte."""
    with guarded(node), wire.Client(node) as dripping:

        def refused_yet() -> bool:
            dripping.send(b"x")
            try:
                return dripping.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                return False
            except ConnectionError:
                return True

        dripping.send(b"\x10\x80\x7d\x00\x04MQTT\x05\x02")
        wait_until(refused_yet, "a dripping CONNECT is closed")


def test_many_unfinished_connections_are_let_go(node: NodeProcess) -> None:
    """Idle connections, half of them inside a CONNECT, cost little, hinder nobody, and are all gone in the end."""
    count = 1000
    with guarded(node) as witness:
        before = metrics(node)["motorcade_connections"]
        idle: list[socket.socket] = []
        try:
            for n in range(count):
                idle.append(socket.create_connection((node.host, node.port), timeout=PATIENCE))
                if n % 2:
                    idle[-1].sendall(b"\x10\x7f\x00\x04MQTT\x05\x02" + b"\x00" * (n % 60))
                if n % 500 == 0:
                    witness.check()
            witness.check()
            wait_until(
                lambda: metrics(node)["motorcade_connections"] <= before, "all unfinished connections are closed"
            )
            closed = sum(1 for each in idle if each.recv(1) == b"")
            assert count == closed
        finally:
            for each in idle:
                each.close()


# --- small pieces -------------------------------------------------------------------------------------------------


def test_a_large_packet_sent_byte_by_byte_arrives(patient: NodeProcess) -> None:
    """A packet in single bytes is one packet, and costs the node no more than its size."""
    payload = bytes(range(256)) * 100
    with guarded(patient) as witness, accepted(patient) as dripping:
        before = rss(patient)
        raw = wire.publish_packet("witness/drip", payload, qos=1, packet_id=1)
        for at in range(len(raw)):
            dripping.socket.send(raw[at : at + 1])
            if at % 20_000 == 0:
                witness.check()
        dripping.expect(wire.PUBACK)
        assert payload == witness.subscriber.receive().payload
        assert rss(patient) < before + 32 * MIB


def test_many_large_packets_in_small_pieces_cost_their_size(patient: NodeProcess) -> None:
    """Eight clients leave a packet of 900 kB unfinished, sent in pieces of two bytes."""
    piece, size = b"..", 900_000
    with guarded(patient) as witness, ExitStack() as stack:
        clients = [stack.enter_context(accepted(patient)) for _ in range(8)]
        before = rss(patient)
        raw = wire.publish_packet("drip", b"." * size)

        def drip(client: wire.Client) -> None:
            client.send(raw[:20])
            for _ in range(20_000):
                client.socket.send(piece)

        threads = [threading.Thread(target=drip, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            witness.check()
        for thread in threads:
            thread.join()
        assert rss(patient) < before + 24 * MIB, "8 times 40 kB were sent"


def test_a_burst_of_tiny_packets_in_one_segment_is_served(patient: NodeProcess) -> None:
    """Many PINGREQs between two messages: all are answered, in order, and nobody else waits for long."""
    with guarded(patient) as witness, accepted(patient) as eager:
        eager.subscribe("own")
        sender = threading.Thread(
            target=eager.send,
            args=(wire.publish_packet("own", b"first") + wire.PINGREQ * 200_000 + wire.publish_packet("own", b"last"),),
        )
        sender.start()
        witness.check()
        assert b"first" == eager.expect(wire.PUBLISH).payload
        pongs, rest = 0, bytes(eager.buffer)
        eager.buffer.clear()
        while b"last" not in rest:
            pongs += rest.count(b"\xd0\x00")
            rest = rest[-1:] if len(rest) % 2 else b""
            rest += eager.recv_some()
        sender.join()
        witness.check()
        assert 200_000 == pongs + rest.count(b"\xd0\x00")


# --- packets that are cheap to send and dear to serve --------------------------------------------------------------

EXPENSIVE: dict[str, bytes] = {
    "SUBSCRIBE": b"".join(wire.subscribe_packet(n, [(f"own/{n}", 0)]) for n in range(1, 500)),
    "SUBSCRIBE that is refused": b"".join(wire.subscribe_packet(n, [("$queue/-", 0)]) for n in range(1, 500)),
    "UNSUBSCRIBE": b"".join(wire.unsubscribe_packet(n, [f"own/{n}"]) for n in range(1, 500)),
    "PUBREL of unknown ids": b"".join(wire.ack_packet(wire.PUBREL, n) for n in range(1, 500)),
    "PUBLISH with properties": b"".join(
        wire.publish_packet(f"own/{n}", properties=wire.prop(0x26, ("k", "v")) * 60) for n in range(1, 200)
    ),
    "PUBLISH to ever new topics": b"".join(wire.publish_packet(f"own/{n}", b"") for n in range(60_000)),
}


@each(kind=EXPENSIVE)
def test_expensive_packets_of_one_client_do_not_hold_up_the_others(patient: NodeProcess, kind: str) -> None:
    """While one client sends as fast as it can, a message of another one takes turns, not seconds.

    The node may work for five seconds before the witness is served; one that serves a whole read of such packets at
    once works longer. Seconds of its processor, since others may need those of the clock.
    """
    over = threading.Event()

    def flood(client: wire.Client) -> None:
        client.socket.settimeout(20)
        try:
            while not over.is_set():
                client.socket.sendall(EXPENSIVE[kind])
        except OSError:
            pass

    def read(client: wire.Client) -> None:
        try:
            while client.socket.recv(MIB):
                pass
        except OSError:
            pass

    with guarded(patient) as witness, accepted(patient) as greedy:
        threads = [threading.Thread(target=work, args=(greedy,)) for work in (flood, read)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(4):
                before = worked(patient)
                witness.check()
                assert worked(patient) < before + 5, "the witness had to wait"
        finally:
            over.set()
            greedy.socket.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


def worked(node: NodeProcess) -> float:
    """Seconds of a processor that the node has used."""
    times = psutil.Process(node.pid).cpu_times()
    return float(times.user + times.system)


# --- offenders that are refused over and over -----------------------------------------------------------------------


@pytest.fixture
def untouched() -> Iterator[NodeProcess]:
    """A node of its own: the others may still be at work on what a test before has left in their sockets."""
    with node_with(PATIENT) as running:
        yield running


def test_many_offenders_leave_nothing_behind(untouched: NodeProcess) -> None:
    """Clients that subscribe, fill their queues and break the rules: sessions, subscriptions and memory come back."""
    figures = ("motorcade_sessions", "motorcade_subscriptions", "motorcade_connections")
    with guarded(untouched) as witness:
        before = metrics(untouched)
        for _ in range(300):
            with accepted(untouched) as offender:
                offender.send(wire.subscribe_packet(1, [("crowd/#", 1), (f"own/{offender.client_id}", 2)]))
                offender.send(wire.publish_packet("crowd/x", b"." * 1000, qos=1, packet_id=1))
                offender.send(b"\xc1\x00")
                with pytest.raises(wire.Closed):
                    _read_on(offender)
        witness.check()
        known = [name for name in figures if name in before]
        assert known
        wanted = {name: before[name] for name in known}
        deadline = time.monotonic() + PATIENCE  # the last offender's socket is closed a moment after it hears so
        while time.monotonic() < deadline:
            after = metrics(untouched)
            if all(after[name] <= figure for name, figure in wanted.items()):
                break
            time.sleep(0.05)
        assert all(after[name] <= figure for name, figure in wanted.items()), (wanted, after)


def test_refused_clients_hear_why_and_are_counted(patient: NodeProcess) -> None:
    """Closing for a broken rule is counted by its reason."""
    series = 'motorcade_protocol_errors_total{reason="malformed_packet"}'
    with guarded(patient):
        before = metrics(patient).get(series, 0.0)
        with accepted(patient) as offender:
            offender.send(b"\xc1\x00")
            refused(offender, 0x81)
        assert before + 1 == metrics(patient)[series]


def test_many_unreleased_large_messages_cost_no_memory(patient: NodeProcess) -> None:
    """A message is routed at PUBLISH; what waits for PUBREL is its identifier, not the message."""
    with guarded(patient) as witness, ExitStack() as stack:
        before = rss(patient)
        for _ in range(10):
            offender = stack.enter_context(accepted(patient))
            hold_unreleased(offender, "hoard", 100, b"L" * 100_000)
            witness.check()
        assert rss(patient) < before + 48 * MIB, "100 MB were sent"
