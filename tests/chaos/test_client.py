"""The strict client keeps to the rules, also towards a broker that ends connections at the worst moments.

The broker of these tests is a script: for each connection what it sends, and what it must get.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.chaos.client import StrictClient
from tests.chaos.judge import History, Publication
from tests.support import wire
from tests.support.node import Endpoint
from tests.support.wire import Packet

PATIENCE = 60.0


class Script:
    """The broker's end of the newest connection."""

    def __init__(self) -> None:
        self.connections: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.connections.put((reader, writer))

    async def accept(self) -> None:
        """Take the next connection and its CONNECT."""
        self.reader, self.writer = await asyncio.wait_for(self.connections.get(), PATIENCE)
        assert 0x10 == (await self.get())[0]

    async def welcome(self, *, present: bool) -> None:
        await self.accept()
        self.send(bytes([0x20, 2, present, 0]))

    async def get(self) -> bytes:
        """The next packet, all of which are short here."""
        head = await asyncio.wait_for(self.reader.readexactly(2), PATIENCE)
        return head + await asyncio.wait_for(self.reader.readexactly(head[1]), PATIENCE)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def cut(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def stage() -> AsyncIterator[tuple[Script, StrictClient, list[bytes]]]:
    """A scripted broker, a client of MQTT 3.1.1 that wants to reach it, and the payloads that it handed on."""
    script, heard = Script(), list[bytes]()

    def deliver(packet: Packet, connection: int) -> None:
        heard.append(packet.payload)

    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = StrictClient("c", Endpoint("127.0.0.1", port), History(), version=4, deliver=deliver)
    client.start()
    try:
        yield script, client, heard
        client.check()
    finally:
        await client.stop()
        server.close()


def message(number: int, qos: int) -> Publication:
    return Publication(f"m{number}", "c", "t", number, qos)


def publish(packet_id: int, payload: bytes, *, qos: int, dup: bool = False) -> bytes:
    return wire.publish_packet("t", payload, version=4, qos=qos, packet_id=packet_id, dup=dup)


def ack(kind: int, packet_id: int) -> bytes:
    return wire.ack_packet(kind, packet_id, version=4)


async def test_what_was_not_acknowledged_is_repeated_in_order_with_dup_and_the_same_ids() -> None:
    async with stage() as (script, client, _):
        await script.welcome(present=False)
        first, second = message(1, 1), message(2, 2)
        await client.publish(first, b"one")
        await client.publish(second, b"two")
        assert publish(1, b"one", qos=1) == await script.get()
        assert publish(2, b"two", qos=2) == await script.get()
        script.cut()
        await script.welcome(present=True)
        assert publish(1, b"one", qos=1, dup=True) == await script.get()
        assert publish(2, b"two", qos=2, dup=True) == await script.get()
        assert not first.is_acknowledged and not second.is_acknowledged
        assert (2, 2) == (len(first.sent), len(second.sent))


async def test_after_pubrec_only_pubrel_is_sent_whatever_happens_to_connections() -> None:
    async with stage() as (script, client, _):
        await script.welcome(present=False)
        publication = message(1, 2)
        outgoing = await client.publish(publication, b"one")
        await script.get()
        script.send(ack(wire.PUBREC, 1))
        assert ack(wire.PUBREL, 1) == await script.get()
        assert publication.is_acknowledged and publication.is_open
        for _ in range(2):
            script.cut()
            await script.accept()  # and no CONNACK
        script.cut()
        await script.welcome(present=True)
        assert ack(wire.PUBREL, 1) == await script.get()
        script.send(ack(wire.PUBCOMP, 1))
        await asyncio.wait_for(outgoing.done.wait(), PATIENCE)
        assert 1 == len(publication.sent)
        assert not publication.is_open


async def test_the_same_qos_2_message_is_handed_on_once_until_its_pubrel() -> None:
    async with stage() as (script, client, heard):
        await script.welcome(present=False)
        script.send(publish(7, b"one", qos=2))
        assert ack(wire.PUBREC, 7) == await script.get()
        script.cut()
        await script.welcome(present=True)
        script.send(publish(7, b"one", qos=2, dup=True))
        assert ack(wire.PUBREC, 7) == await script.get()
        script.send(ack(wire.PUBREL, 7))
        assert ack(wire.PUBCOMP, 7) == await script.get()
        assert [b"one"] == heard
        script.send(ack(wire.PUBREL, 7))  # the broker may have missed PUBCOMP
        assert ack(wire.PUBCOMP, 7) == await script.get()
        script.send(publish(7, b"two", qos=2))
        assert ack(wire.PUBREC, 7) == await script.get()
        assert [b"one", b"two"] == heard
        assert [] == client.history.oddities


async def test_another_message_with_an_id_that_is_in_use_is_a_finding() -> None:
    async with stage() as (script, client, heard):
        await script.welcome(present=False)
        script.send(publish(7, b"one", qos=2))
        assert ack(wire.PUBREC, 7) == await script.get()
        script.cut()
        await script.welcome(present=True)
        script.send(publish(7, b"two", qos=2))
        assert ack(wire.PUBREC, 7) == await script.get()
        assert [b"one"] == heard
        assert ["id in use"] == [kind for kind, _ in client.history.oddities]


async def test_qos_1_is_handed_on_each_time() -> None:
    async with stage() as (script, _, heard):
        await script.welcome(present=False)
        for dup in (False, True):
            script.send(publish(7, b"one", qos=1, dup=dup))
            assert ack(wire.PUBACK, 7) == await script.get()
        assert [b"one", b"one"] == heard


async def test_a_broker_without_the_session_is_a_finding_and_gets_a_client_without_memory() -> None:
    async with stage() as (script, client, _):
        await script.welcome(present=False)
        subscribing = asyncio.create_task(client.subscribe(None, "t", 2))
        assert wire.subscribe_packet(1, [("t", 2)], version=4) == await script.get()
        script.send(bytes([0x90, 3, 0, 1, 2]))
        await asyncio.wait_for(subscribing, PATIENCE)
        publication = message(1, 2)
        await client.publish(publication, b"one")
        await script.get()
        script.cut()
        await script.welcome(present=False)
        assert wire.subscribe_packet(3, [("t", 2)], version=4) == await script.get()
        assert publication.given_up and not publication.is_open
        assert ["session forgotten"] == [kind for kind, _ in client.history.oddities]


async def test_a_subscription_counts_from_suback_on_and_is_asked_for_again() -> None:
    async with stage() as (script, client, _):
        await script.welcome(present=False)
        receiver = client.history.receiver("c")
        subscribing = asyncio.create_task(client.subscribe(receiver, "t", 1))
        await script.get()
        assert receiver.windows[0].granted == float("inf")
        script.cut()
        await script.welcome(present=True)
        asked = await script.get()
        script.send(bytes([0x90, 3, *asked[2:4], 1]))
        window = await asyncio.wait_for(subscribing, PATIENCE)
        assert window.asked < window.granted < float("inf")
