"""Our own client, against a node and against a broker that follows a script.

The script writes and reads packets with tests/support/wire.py, so that a mistake of our codec cannot hide.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trustme

from motorcade.client import Client, ClientError, ClientState, ConnectionLostError, RefusedError, Will
from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.mqtt.packets import Publish
from motorcade.mqtt.properties import Properties
from tests.support import wire
from tests.support.node import NodeProcess
from tests.support.ports import free_port
from tests.support.tables import each_case

PATIENCE = 60.0  # seconds: machines that run tests are busy


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(ws=True) as running:
        yield running


@contextlib.asynccontextmanager
async def within() -> AsyncIterator[None]:
    async with asyncio.timeout(PATIENCE):
        yield


# --- with a node ------------------------------------------------------------------------------------------------------


@each_case("version", [4, 5])
@each_case("transport", ["tcp", "ws"])
async def test_messages_of_every_qos_arrive_once_and_in_order(node: NodeProcess, version: int, transport: str) -> None:
    """QoS 0, 1 and 2 both ways, over TCP and WebSocket, in both versions."""
    assert node.ws is not None
    port, path = (node.port, None) if transport == "tcp" else (node.ws.port, "/mqtt")
    async with within(), await Client.connect(port=port, ws_path=path, version=version) as client:
        topic = f"order/{version}/{transport}"
        assert (ReasonCode.GRANTED_QOS_2,) == await client.subscribe((topic, 2))
        wanted = [(qos, b"%d" % number) for number in range(20) for qos in (0, 1, 2)]
        for qos, payload in wanted:
            await client.publish(topic, payload, qos)
        assert wanted == [(message.qos, message.payload) for message in [await anext(client) for _ in wanted]]
        await client.unsubscribe(topic)
        assert 0 == len(client.state.unacknowledged)


async def test_large_messages_cross_many_reads(node: NodeProcess) -> None:
    payload = bytes(range(256)) * 2000
    async with within(), await Client.connect(port=node.port) as client:
        await client.subscribe(("large", 1))
        await client.publish("large", payload, 1)
        assert payload == (await anext(client)).payload


async def test_a_slow_consumer_loses_nothing(node: NodeProcess) -> None:
    """The buffer is small, so reading pauses and goes on; every message comes, in order."""
    count = 500
    async with (
        within(),
        await Client.connect(port=node.port) as sender,
        await Client.connect(port=node.port, buffer=8) as slow,
    ):
        await slow.subscribe(("slow", 1))
        for number in range(count):
            await sender.publish("slow", b"%d" % number, 1)
        while slow.received < 8:
            await sender.publish("meanwhile", b"", 1)
        # Nothing is read any more, so this cannot be answered, however often others are.
        question = asyncio.create_task(slow.subscribe("another"))
        for _ in range(100):
            await sender.publish("meanwhile", b"", 1)
        assert not question.done()
        assert slow.received < count
        assert [b"%d" % number for number in range(count)] == [(await anext(slow)).payload for _ in range(count)]
        assert (ReasonCode.SUCCESS,) == await question


async def test_properties_travel(node: NodeProcess) -> None:
    told = Properties(
        payload_format=1,
        content_type="text/plain",
        response_topic="answer",
        correlation_data=b"\x00\x01",
        user_properties=(("a", "1"), ("a", "2")),
    )
    async with within(), await Client.connect(port=node.port) as client:
        await client.subscribe(Subscription("properties", 1), properties=Properties(subscription_ids=(7,)))
        await client.publish("properties", b"x", 1, properties=told)
        got = (await anext(client)).properties
        assert (told.content_type, told.response_topic, told.correlation_data, told.user_properties, (7,)) == (
            got.content_type,
            got.response_topic,
            got.correlation_data,
            got.user_properties,
            got.subscription_ids,
        )


async def test_the_will_is_for_those_who_vanish(node: NodeProcess) -> None:
    """`abort` lets the broker publish the will, `disconnect` does not."""
    async with within(), await Client.connect(port=node.port) as watcher:
        await watcher.subscribe(("will/#", 1))
        polite = await Client.connect(port=node.port, will=Will("will/polite", b"gone", 1))
        await polite.disconnect()
        lost = await Client.connect(port=node.port, will=Will("will/lost", b"gone", 1))
        lost.abort()
        assert "will/lost" == (await anext(watcher)).topic


async def test_a_kept_session_is_found_again(node: NodeProcess) -> None:
    keep = Properties(session_expiry=60)
    async with within():
        first = await Client.connect(port=node.port, client_id="kept", properties=keep)
        await first.subscribe(("kept", 1))
        await first.disconnect()
        async with await Client.connect(port=node.port) as sender:
            await sender.publish("kept", b"while away", 1)
        async with await Client.connect(port=node.port, client_id="kept", clean_start=False) as second:
            assert second.session_present
            assert b"while away" == (await anext(second)).payload


async def test_an_assigned_client_id_is_known(node: NodeProcess) -> None:
    async with within(), await Client.connect(port=node.port) as client:
        assert client.client_id


async def test_after_disconnect_iteration_ends_and_calls_fail(node: NodeProcess) -> None:
    async with within():
        client = await Client.connect(port=node.port)
        await client.disconnect()
        await client.disconnect()
        assert [] == [message async for message in client]
        assert not client.is_connected
        with pytest.raises(ConnectionLostError):
            await client.publish("a", b"b", 1)
        with pytest.raises(ConnectionLostError):
            await client.subscribe("a")


async def test_taken_over_by_its_own_name(node: NodeProcess) -> None:
    """The reason that the broker gives reaches whoever waits for messages."""
    async with within():
        first = await Client.connect(port=node.port, client_id="twin")
        async with await Client.connect(port=node.port, client_id="twin"):
            with pytest.raises(ConnectionLostError) as caught:
                await anext(first)
            assert ReasonCode.SESSION_TAKEN_OVER is caught.value.reason
            assert ReasonCode.SESSION_TAKEN_OVER is await first.wait_closed()


async def test_many_clients_in_one_process(node: NodeProcess) -> None:
    """Three hundred vehicles, each hears its own message through a callback."""
    count = 300
    heard: list[str] = []
    everybody = asyncio.Event()

    def listener(name: str) -> Callable[[Publish], None]:
        def heard_by(message: Publish) -> None:
            assert name == message.payload.decode()
            heard.append(name)
            if len(heard) == count:
                everybody.set()

        return heard_by

    async with within():
        names = [f"vehicle-{number}" for number in range(count)]
        fleet = await asyncio.gather(
            *(Client.connect(port=node.port, client_id=name, on_message=listener(name)) for name in names)
        )
        await asyncio.gather(*(client.subscribe((f"fleet/{client.client_id}", 1)) for client in fleet))
        async with await Client.connect(port=node.port) as sender:
            for name in names:
                await sender.send(f"fleet/{name}", name.encode(), 1)
            await everybody.wait()
        await asyncio.gather(*(client.disconnect() for client in fleet))
    assert sorted(names) == sorted(heard)


async def test_over_tls_with_a_client_certificate(tmp_path: Path) -> None:
    """The broker's certificate is checked, and ours is shown; without one, or with the wrong authority, it fails."""
    authority, stranger = trustme.CA(), trustme.CA()
    server, ours = authority.issue_cert("127.0.0.1"), authority.issue_cert("car@example.org", common_name="car")
    server.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    server.private_key_pem.write_to_path(tmp_path / "server.key")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    port = free_port()
    config = f'[listeners.tls]\nbind = "127.0.0.1:{port}"\nrequire_client_certificate = true\n' + "".join(
        f'{key} = "{tmp_path / file}"\n'
        for key, file in (("certificate", "server.pem"), ("key", "server.key"), ("ca", "ca.pem"))
    )
    good, wrong, bare = (ssl.create_default_context() for _ in range(3))
    authority.configure_trust(good)
    ours.configure_cert(good)
    stranger.configure_trust(wrong)
    authority.configure_trust(bare)
    with NodeProcess(config=config):
        async with within():
            async with await Client.connect(port=port, tls=good) as client:
                await client.publish("a", b"b", 1)
            with pytest.raises(ClientError, match="certificate verify failed"):
                await Client.connect(port=port, tls=wrong)
            with pytest.raises(ClientError):
                await Client.connect(port=port, tls=bare)


async def test_nobody_there_is_said_with_the_address() -> None:
    port = free_port()
    with pytest.raises(ClientError, match=f"cannot connect to 127.0.0.1:{port}: Connection refused"):
        await Client.connect(port=port)


# --- with a script ----------------------------------------------------------------------------------------------------


class Peer:
    """The broker's end of one connection, packet by packet."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, version: int) -> None:
        self.reader = reader
        self.writer = writer
        self.version = version

    async def raw(self) -> bytes:
        """One whole packet as it came."""
        return b"".join(await wire.read_frame(self.reader))

    async def packet(self) -> wire.Packet:
        return wire.parse(await self.raw(), self.version)

    async def expect(self, kind: int) -> wire.Packet:
        got = await self.packet()
        assert kind == got.type, f"{got.name} came"
        return got

    def send(self, *packets: bytes) -> None:
        self.writer.write(b"".join(packets))

    async def accept(self, properties: bytes = b"", *, session_present: bool = False, reason: int = 0) -> None:
        """Take the CONNECT and answer it."""
        first = (await self.raw())[0]
        assert wire.CONNECT == first >> 4
        body = bytes((session_present, reason))
        self.send(wire.packet(wire.CONNACK << 4, body + wire.props(properties) if self.version == 5 else body))


@contextlib.asynccontextmanager
async def scripted(*scripts: Callable[[Peer], Awaitable[None]], version: int = 5) -> AsyncIterator[int]:
    """A broker that plays one script per connection; the port. A failing script fails the test."""
    waiting = list(scripts)
    played: list[asyncio.Task[None]] = []

    def arrived(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def play() -> None:
            try:
                await waiting.pop(0)(Peer(reader, writer, version))
            finally:
                writer.close()

        played.append(asyncio.create_task(play()))

    server = await asyncio.start_server(arrived, "127.0.0.1", 0)
    async with within(), server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*played)
    assert not waiting, "nobody came for the next script"


@each_case("version", [4, 5])
async def test_a_refusal_carries_its_reason(version: int) -> None:
    async def refuse(peer: Peer) -> None:
        await peer.accept(reason=5 if version == 4 else 0x87)

    async with scripted(refuse, version=version) as port:
        with pytest.raises(RefusedError, match="the connection was refused: not authorized") as caught:
            await Client.connect(port=port, version=version)
        assert ReasonCode.NOT_AUTHORIZED is caught.value.reason


async def test_no_answer_is_an_error() -> None:
    async def silent(peer: Peer) -> None:
        await peer.raw()
        await peer.reader.read()  # until the client gives up

    async with scripted(silent) as port:
        with pytest.raises(ClientError, match=r"no answer from 127\.0\.0\.1"):
            await Client.connect(port=port, timeout=0.1)


async def test_the_brokers_receive_maximum_is_kept() -> None:
    """Never more than two messages in flight; each acknowledgement lets one more out."""
    count = 6

    async def two_at_a_time(peer: Peer) -> None:
        await peer.accept(wire.prop(0x21, 2))
        open_ids: list[int] = []
        for left in range(count, 0, -1):
            while len(open_ids) < min(2, left):
                open_ids.append((await peer.expect(wire.PUBLISH)).packet_id or 0)
            # What the client would send beyond its window had to come before the answer to this.
            peer.send(wire.publish_packet("barrier", b"", qos=1, packet_id=9))
            await peer.expect(wire.PUBACK)
            peer.send(wire.ack_packet(wire.PUBACK, open_ids.pop(0)))
        await peer.expect(wire.DISCONNECT)

    async with scripted(two_at_a_time) as port, await Client.connect(port=port) as client:
        sent = [await client.send("a", b"", 1) for _ in range(count)]
        await asyncio.gather(*(future for future in sent if future is not None))


async def test_a_sender_that_gives_up_does_not_block_the_next() -> None:
    """Cancelled in the very moment in which it is told of room: the room goes to the next in line."""

    async def one_at_a_time(peer: Peer) -> None:
        await peer.accept(wire.prop(0x21, 1))
        for payload in (b"1", b"3"):
            got = await peer.expect(wire.PUBLISH)
            assert payload == got.payload
            # In one write, so that the client handles both before any of its tasks goes on.
            peer.send(wire.ack_packet(wire.PUBACK, got.packet_id or 0), wire.publish_packet("cancel", b""))
        await peer.expect(wire.DISCONNECT)

    senders: list[asyncio.Task[ReasonCode]] = []

    def cancel(_: Publish) -> None:
        senders[0].cancel()

    async with scripted(one_at_a_time) as port, await Client.connect(port=port, on_message=cancel) as client:
        await client.send("a", b"1", 1)
        senders += [asyncio.create_task(client.publish("a", payload, 1)) for payload in (b"2", b"3")]
        assert ReasonCode.SUCCESS is await senders[1]
        with pytest.raises(asyncio.CancelledError):
            await senders[0]


@each_case("qos", [1, 2])
async def test_what_was_not_acknowledged_is_sent_again(qos: int) -> None:
    """The state of a lost connection goes to the next one: same packet id, DUP set [MQTT-4.4.0-1]."""
    ids: list[int | None] = []

    async def vanish(peer: Peer) -> None:
        await peer.accept()
        ids.append((await peer.expect(wire.PUBLISH)).packet_id)

    async def come_back(peer: Peer) -> None:
        await peer.accept(session_present=True)
        again = await peer.expect(wire.PUBLISH)
        assert (ids[0], True, b"x") == (again.packet_id, again.dup, again.payload)
        assert again.packet_id is not None
        if qos == 1:
            peer.send(wire.ack_packet(wire.PUBACK, again.packet_id))
        else:
            peer.send(wire.ack_packet(wire.PUBREC, again.packet_id))
            await peer.expect(wire.PUBREL)
            peer.send(wire.ack_packet(wire.PUBCOMP, again.packet_id))
        peer.send(wire.publish_packet("acknowledged", b""))
        await peer.expect(wire.DISCONNECT)

    state = ClientState()
    async with scripted(vanish, come_back) as port:
        first = await Client.connect(port=port, state=state)
        with pytest.raises(ConnectionLostError):
            await first.publish("a", b"x", qos)
        assert 1 == len(state.unacknowledged)
        async with await Client.connect(port=port, state=state, clean_start=False) as second:
            assert "acknowledged" == (await anext(second)).topic
        assert {} == state.unacknowledged


async def test_a_lost_session_is_forgotten() -> None:
    """Without a session at the broker nothing is sent again."""

    async def vanish(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(wire.PUBLISH)

    async def new(peer: Peer) -> None:
        await peer.accept(session_present=False)
        assert b"fresh" == (await peer.expect(wire.PUBLISH)).payload
        await peer.expect(wire.DISCONNECT)

    state = ClientState()
    async with scripted(vanish, new) as port:
        first = await Client.connect(port=port, state=state)
        with pytest.raises(ConnectionLostError):
            await first.publish("a", b"old", 1)
        async with await Client.connect(port=port, state=state, clean_start=False) as second:
            await second.publish("a", b"fresh")


async def test_a_repeated_qos_2_message_is_heard_once() -> None:
    """Until it is released, the same packet id is the same message; afterwards it is a new one."""

    async def repeat(peer: Peer) -> None:
        await peer.accept()
        for dup in (False, True):
            peer.send(wire.publish_packet("a", b"one", qos=2, packet_id=5, dup=dup))
            await peer.expect(wire.PUBREC)
        peer.send(wire.ack_packet(wire.PUBREL, 5))
        await peer.expect(wire.PUBCOMP)
        peer.send(wire.publish_packet("a", b"two", qos=2, packet_id=5))
        await peer.expect(wire.PUBREC)
        await peer.expect(wire.DISCONNECT)

    async with scripted(repeat) as port, await Client.connect(port=port) as client:
        assert [b"one", b"two"] == [(await anext(client)).payload, (await anext(client)).payload]
        assert 2 == client.received


async def test_a_refused_message_raises() -> None:
    async def refuse(peer: Peer) -> None:
        await peer.accept()
        for kind in (wire.PUBACK, wire.PUBREC):
            got = await peer.expect(wire.PUBLISH)
            why = wire.prop(0x1F, "not here")
            peer.send(wire.ack_packet(kind, got.packet_id or 0, reason=0x87, properties=why))
        await peer.expect(wire.DISCONNECT)

    async with scripted(refuse) as port, await Client.connect(port=port) as client:
        for qos in (1, 2):
            with pytest.raises(
                RefusedError, match=r"the message to 'a/b' was refused: not authorized \(0x87\): not here"
            ):
                await client.publish("a/b", b"x", qos)


@each_case("reason", [0x00, 0x99])
async def test_what_an_acknowledgement_says_besides_is_told(reason: int) -> None:
    """Before the future ends, whether the message was taken or refused."""

    async def answers(peer: Peer) -> None:
        await peer.accept()
        got = await peer.expect(wire.PUBLISH)
        said = wire.prop(0x26, ("accepted", "2")) + wire.prop(0x26, ("replaced", "1"))
        peer.send(wire.ack_packet(wire.PUBACK, got.packet_id or 0, reason=reason, properties=said))
        await peer.expect(wire.DISCONNECT)

    told: list[Properties] = []
    async with scripted(answers) as port, await Client.connect(port=port) as client:
        sent = await client.send("a", b"", 1, told=told.append)
        assert sent is not None
        with contextlib.suppress(RefusedError):
            assert ReasonCode.SUCCESS == await sent
    assert [(("accepted", "2"), ("replaced", "1"))] == [properties.user_properties for properties in told]


async def test_the_callback_decides_the_acknowledgement() -> None:
    async def ask(peer: Peer) -> None:
        await peer.accept()
        for payload, reason in ((b"good", 0), (b"bad", 0x99)):
            peer.send(wire.publish_packet("a", payload, qos=1, packet_id=3))
            assert reason == (await peer.expect(wire.PUBACK)).reason
        await peer.expect(wire.DISCONNECT)

    seen = asyncio.Semaphore(0)

    def judge(message: Publish) -> ReasonCode | None:
        seen.release()
        return ReasonCode.PAYLOAD_FORMAT_INVALID if message.payload == b"bad" else None

    async with scripted(ask) as port, await Client.connect(port=port, on_message=judge):
        for _ in range(2):
            await seen.acquire()


async def test_topic_aliases_of_the_broker_are_understood() -> None:
    async def abbreviate(peer: Peer) -> None:
        await peer.accept()
        alias = wire.prop(0x23, 1)
        peer.send(
            wire.publish_packet("long/topic", b"1", properties=alias), wire.publish_packet("", b"2", properties=alias)
        )
        await peer.expect(wire.DISCONNECT)

    told = Properties(topic_alias_maximum=1)
    async with scripted(abbreviate) as port, await Client.connect(port=port, properties=told) as client:
        assert ["long/topic", "long/topic"] == [(await anext(client)).topic, (await anext(client)).topic]


@each_case(
    ("garbage", "reason"),
    [
        (b"\x00\x00", 0x81),  # packet type 0
        (wire.publish_packet("", b"", properties=wire.prop(0x23, 9)), 0x94),  # an alias that was never set
        (wire.packet(wire.CONNACK << 4, b"\x00\x00\x00"), 0x82),
        (wire.packet(0xC0), 0x82),  # PINGREQ from a broker
    ],
)
async def test_a_broker_that_breaks_the_rules_is_told_and_left(garbage: bytes, reason: int) -> None:
    async def break_rules(peer: Peer) -> None:
        await peer.accept()
        await peer.expect(wire.PUBLISH)  # the client has seen our CONNACK
        peer.send(garbage)
        assert reason == (await peer.expect(wire.DISCONNECT)).reason
        assert b"" == await peer.reader.read()

    async with scripted(break_rules) as port:
        client = await Client.connect(port=port)
        await client.publish("hello")
        with pytest.raises(ConnectionLostError, match="the broker broke the rules"):
            await anext(client)


async def test_silence_is_filled_with_pings_and_a_dead_broker_is_noticed() -> None:
    """PINGREQ once per keep-alive; when no answer comes within another one, the connection is given up."""

    async def answer_once(peer: Peer) -> None:
        await peer.accept()
        assert wire.PINGREQ == await peer.raw()
        peer.send(b"\xd0\x00")
        assert wire.PINGREQ == await peer.raw()
        assert b"" == await _rest(peer)

    async with scripted(answer_once) as port:
        client = await Client.connect(port=port, keep_alive=1)
        with pytest.raises(ConnectionLostError, match="did not answer PINGREQ"):
            await anext(client)


async def test_the_broker_may_set_the_keep_alive() -> None:
    async def impatient(peer: Peer) -> None:
        await peer.accept(wire.prop(0x13, 1))
        assert wire.PINGREQ == await peer.raw()
        peer.send(b"\xd0\x00", wire.publish_packet("seen", b""))
        await peer.expect(wire.DISCONNECT)

    async with scripted(impatient) as port, await Client.connect(port=port, keep_alive=600) as client:
        assert "seen" == (await anext(client)).topic


async def test_enhanced_authentication_answers_each_challenge() -> None:
    async def challenge(peer: Peer) -> None:
        await peer.raw()
        method = wire.prop(0x15, "ECHO")
        for data in (b"a", b"b"):
            peer.send(wire.auth_packet(0x18, method + wire.prop(0x16, data)))
            got = await peer.expect(wire.AUTH)
            assert (0x18, "ECHO", data + data) == (got.reason, got.prop(0x15), got.prop(0x16))
        peer.send(wire.packet(wire.CONNACK << 4, b"\x00\x00" + wire.props(method)))
        await peer.expect(wire.DISCONNECT)

    told = Properties(authentication_method="ECHO")
    async with (
        scripted(challenge) as port,
        await Client.connect(port=port, properties=told, on_auth=lambda data: (data or b"") * 2) as client,
    ):
        assert client.is_connected


async def _rest(peer: Peer) -> bytes:
    try:
        return await peer.reader.read()
    except ConnectionResetError:
        return b""
