"""6 MQTT over WebSocket: the handshake, the kinds of frames, packets and frames that do not align.

Packets are built by `wire`, frames by the `websockets` client. `MOTORCADE_TEST_WS=HOST:PORT` runs these tests against
a broker that is running already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as open_websocket
from websockets.typing import Subprotocol

from tests.support import wire
from tests.support.cases import both_versions, each
from tests.support.clauses import clause
from tests.support.node import Endpoint, NodeProcess


class Listeners:
    """Where one broker listens for WebSocket and, if known, for plain TCP."""

    def __init__(self, ws: wire.Address, tcp: wire.Address | None) -> None:
        self.ws = ws
        self.tcp = tcp

    @property
    def uri(self) -> str:
        return f"ws://{self.ws.host}:{self.ws.port}/mqtt"


@pytest.fixture(scope="module")
def listeners(request: pytest.FixtureRequest) -> Listeners:
    host, _, port = os.environ.get("MOTORCADE_TEST_WS", "").rpartition(":")
    if port:
        tcp = os.environ.get("MOTORCADE_TEST_BROKER", "").rpartition(":")
        return Listeners(Endpoint(host, int(port)), Endpoint(tcp[0], int(tcp[2])) if tcp[2] else None)
    node: NodeProcess = request.getfixturevalue("node")
    assert node.ws is not None
    return Listeners(node.ws, node)


class Frames:
    """Binary frames of a WebSocket as the link of a `wire.Client`."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def sendall(self, data: bytes) -> None:
        self.connection.send(data)

    def recv(self, _most: int) -> bytes:
        """The next frame that is not empty; empty at the end."""
        while True:
            try:
                frame = self.connection.recv(timeout=wire.PATIENCE)
            except ConnectionClosed:
                return b""
            assert isinstance(frame, bytes), "the broker sent a text frame"
            if frame:
                return frame

    def settimeout(self, seconds: float | None) -> None:
        """`recv` has its own."""

    def close(self) -> None:
        self.connection.close()


class Socket(wire.Client):
    """A raw client over a WebSocket."""

    def __init__(self, connection: ClientConnection, version: int) -> None:
        super().__init__(Frames(connection), version=version)
        self.connection = connection


Open = Callable[..., Socket]


@pytest.fixture
def dial(listeners: Listeners) -> Iterator[Open]:
    """`dial(version=5)`: a WebSocket with the sub-protocol mqtt, closed at the end."""
    with ExitStack() as stack:

        def dialled(version: int = 5) -> Socket:
            opened = open_websocket(listeners.uri, subprotocols=[Subprotocol("mqtt")], compression=None, proxy=None)
            return Socket(stack.enter_context(opened), version)

        yield dialled


@clause(v3="MQTT-6.0.0-4", v5="MQTT-6.0.0-4")
@each(offered=(["mqtt"], ["other", "mqtt"], ["mqtt", "other"], ["mqttv3.1", "mqtt"]))
def test_the_server_selects_mqtt(listeners: Listeners, offered: list[str]) -> None:
    """Of the sub-protocols that a client offers the broker takes mqtt [MQTT-6.0.0-4]."""
    subprotocols = [Subprotocol(one) for one in offered]
    with open_websocket(listeners.uri, subprotocols=subprotocols, proxy=None) as connection:
        assert "mqtt" == connection.subprotocol


@clause(v3="MQTT-6.0.0-4", v5="MQTT-6.0.0-4")
def test_the_server_selects_nothing_else(listeners: Listeners) -> None:
    """A client that offers only other sub-protocols is refused or gets none of them [MQTT-6.0.0-4]."""
    try:
        opened = open_websocket(listeners.uri, subprotocols=[Subprotocol("chat"), Subprotocol("soap")], proxy=None)
    except InvalidHandshake:
        return
    with opened as connection:
        assert connection.subprotocol is None


@clause(v3="MQTT-6.0.0-1", v5="MQTT-6.0.0-1")
@both_versions
def test_the_broker_sends_binary_frames(dial: Open, name: str, version: int) -> None:
    """Everything from CONNACK to PINGRESP comes in binary frames [MQTT-6.0.0-1]."""
    socket = dial(version)
    socket.connect(name)
    socket.send(wire.subscribe_packet(1, [(name, 1)], version=version))
    assert 1 == socket.expect(wire.SUBACK).packet_id
    socket.send(wire.publish_packet(name, b"m", version=version))
    assert b"m" == socket.expect(wire.PUBLISH).payload
    socket.send(wire.PINGREQ)
    socket.expect(wire.PINGRESP)  # `recv` has looked at the kind of every frame


@clause(v3="MQTT-6.0.0-1", v5="MQTT-6.0.0-1")
@both_versions
def test_a_text_frame_ends_the_connection(dial: Open, name: str, version: int) -> None:
    """A text frame is not MQTT, even if its bytes would be a packet [MQTT-6.0.0-1]."""
    early = dial(version)
    early.connection.send(wire.connect_packet(name, version=version).decode())
    early.expect_closed()
    late = dial(version)
    late.connect(name)
    late.connection.send("\x30\x05\x00\x01a\x00m")
    late.expect_closed()


@clause(v3="MQTT-6.0.0-2", v5="MQTT-6.0.0-2")
@both_versions
def test_one_frame_may_hold_many_packets(dial: Open, name: str, version: int) -> None:
    """CONNECT, SUBSCRIBE, several PUBLISH and PINGREQ in one frame are all taken [MQTT-6.0.0-2]."""
    socket = dial(version)
    messages = b"".join(wire.publish_packet(name, b"%d" % n, version=version) for n in range(20))
    head = wire.connect_packet(name, version=version) + wire.subscribe_packet(1, [(name, 0)], version=version)
    socket.send(head + messages + wire.PINGREQ)
    socket.expect(wire.CONNACK)
    socket.expect(wire.SUBACK)
    assert [b"%d" % n for n in range(20)] == [socket.expect(wire.PUBLISH).payload for _ in range(20)]
    socket.expect(wire.PINGRESP)


@clause(v3="MQTT-6.0.0-2", v5="MQTT-6.0.0-2")
@both_versions
@each(size=(1, 2, 3, 7))
def test_a_packet_may_be_spread_over_frames(dial: Open, name: str, version: int, size: int) -> None:
    """Packets cut into frames of a few bytes, at any place, are put together again [MQTT-6.0.0-2]."""
    socket = dial(version)
    stream = (
        wire.connect_packet(name, version=version)
        + wire.subscribe_packet(1, [(name, 1)], version=version)
        + wire.publish_packet(name, b"payload", version=version, qos=1, packet_id=2)
        + wire.PINGREQ
    )
    for at in range(0, len(stream), size):
        socket.send(stream[at : at + size])
    assert [wire.CONNACK, wire.SUBACK] == [socket.recv().type for _ in range(2)]
    rest = [socket.recv() for _ in range(3)]
    assert {wire.PUBLISH, wire.PUBACK, wire.PINGRESP} == {found.type for found in rest}
    assert b"payload" in {found.payload for found in rest}


@clause(v3="MQTT-6.0.0-2", v5="MQTT-6.0.0-2")
def test_a_message_may_be_fragmented(dial: Open, name: str) -> None:
    """A WebSocket message in several fragments, with an empty one among them, is one piece of the stream
    [MQTT-6.0.0-2].
    """
    socket = dial()
    socket.connect(name)
    packet = wire.subscribe_packet(1, [(name, 0)])
    socket.connection.send([packet[:1], b"", packet[1:6], packet[6:]])
    socket.expect(wire.SUBACK)


@clause(v3="MQTT-6.0.0-2", v5="MQTT-6.0.0-2")
def test_empty_frames_are_harmless(dial: Open, name: str) -> None:
    """An empty binary frame adds nothing to the stream [MQTT-6.0.0-2]."""
    socket = dial()
    socket.connect(name)
    socket.send(b"")
    socket.send(wire.PINGREQ[:1])
    socket.send(b"")
    socket.send(wire.PINGREQ[1:])
    socket.expect(wire.PINGRESP)


@both_versions
def test_disconnect_closes_the_websocket(dial: Open, name: str, version: int) -> None:
    """After a DISCONNECT the broker ends the WebSocket too (6, 3.14.4)."""
    socket = dial(version)
    socket.connect(name)
    socket.send(wire.disconnect_packet(version=version))
    socket.expect_closed()


@both_versions
def test_a_malformed_packet_ends_the_websocket(dial: Open, name: str, version: int) -> None:
    """What ends a TCP connection ends a WebSocket connection (4.8, 4.13, 6)."""
    socket = dial(version)
    socket.connect(name)
    socket.send(b"\x30\xff\xff\xff\xff\x7f")
    socket.expect_closed()


@clause(v3="MQTT-7.1.1-1", v5="MQTT-7.1.1-1")
def test_tcp_and_websocket_clients_meet(dial: Open, listeners: Listeners, name: str) -> None:
    """Both transports carry an ordered stream without loss into the same broker [MQTT-7.1.1-1]."""
    assert listeners.tcp is not None, "set MOTORCADE_TEST_BROKER beside MOTORCADE_TEST_WS"
    socket = dial()
    socket.connect(f"{name}-ws")
    socket.send(wire.subscribe_packet(1, [(f"{name}/to-ws", 0)]))
    socket.expect(wire.SUBACK)
    numbers = [b"%d" % n for n in range(500)]
    with wire.Client(listeners.tcp) as tcp:
        tcp.connect(f"{name}-tcp")
        tcp.subscribe(f"{name}/to-tcp")
        tcp.send(b"".join(wire.publish_packet(f"{name}/to-ws", number) for number in numbers))
        assert numbers == [socket.expect(wire.PUBLISH).payload for _ in numbers]
        socket.send(b"".join(wire.publish_packet(f"{name}/to-tcp", number) for number in numbers))
        assert numbers == [tcp.expect(wire.PUBLISH).payload for _ in numbers]
