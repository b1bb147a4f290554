"""A broker that does what a test says, packet by packet, so that the simulator can be judged from the other side.

Packets are written and read by tests/support/wire.py: a mistake of our codec cannot hide in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

from tests.support import wire

PATIENCE = 60.0  # seconds


class Peer:
    """The broker's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, version: int) -> None:
        self.reader = reader
        self.writer = writer
        self.version = version
        self.connect = b""  #: the CONNECT as it came
        self.subscribe: bytes | None = None  #: the SUBSCRIBE as it came

    async def raw(self) -> bytes:
        """One whole packet as it came."""
        return b"".join(await wire.read_frame(self.reader))

    async def next(self, kind: int) -> wire.Packet:
        """The next packet, which must be of this type; heartbeats are passed over unless they are asked for."""
        async with asyncio.timeout(PATIENCE):
            while True:
                got = wire.parse(await self.raw(), self.version)
                if got.type == kind:
                    return got
                assert wire.PUBLISH == got.type, f"{got.name} came"

    def send(self, *packets: bytes) -> None:
        self.writer.write(b"".join(packets))

    def deliver(self, topic: str, payload: bytes, packet_id: int, *, qos: int = 1, dup: bool = False) -> None:
        self.send(self.publish(topic, payload, packet_id, qos=qos, dup=dup))

    def publish(self, topic: str, payload: bytes, packet_id: int, *, qos: int = 1, dup: bool = False) -> bytes:
        number = packet_id if qos else None
        return wire.publish_packet(topic, payload, version=self.version, qos=qos, packet_id=number, dup=dup)

    async def introduced(self) -> None:
        """Take the CONNECT."""
        async with asyncio.timeout(PATIENCE):
            self.connect = await self.raw()
        assert wire.CONNECT == self.connect[0] >> 4

    def connack(self, reason: int = 0, *, session_present: bool = False, properties: bytes = b"") -> None:
        body = bytes((session_present, reason))
        self.send(wire.packet(wire.CONNACK << 4, body + wire.props(properties) if self.version == 5 else body))

    async def subscribed(self, reason: int = 1) -> None:
        """Take the SUBSCRIBE and answer it."""
        async with asyncio.timeout(PATIENCE):
            raw = await self.raw()
        assert wire.SUBSCRIBE == raw[0] >> 4
        self.subscribe = raw
        body = raw[2:4] + (b"\0" if self.version == 5 else b"") + bytes((reason,))
        self.send(wire.packet(wire.SUBACK << 4, body))

    async def welcome(self) -> wire.Packet:
        """A new session, up to the vehicle's first sign of life, which is returned."""
        await self.introduced()
        self.connack()
        await self.subscribed()
        return await self.next(wire.PUBLISH)

    async def closed(self) -> bytes:
        """What still comes before the connection ends."""
        async with asyncio.timeout(PATIENCE):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    def hang_up(self) -> None:
        self.writer.close()


class Broker:
    """Connections in the order in which they come."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.port = 0
        self.peers: list[Peer] = []
        self._came: asyncio.Queue[Peer] = asyncio.Queue()

    def arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer, self.version)
        self.peers.append(peer)
        self._came.put_nowait(peer)

    async def peer(self) -> Peer:
        """The next connection."""
        async with asyncio.timeout(PATIENCE):
            return await self._came.get()


@contextlib.asynccontextmanager
async def scripted(version: int = 5, tls: ssl.SSLContext | None = None) -> AsyncIterator[Broker]:
    """A broker on a free port."""
    broker = Broker(version)
    server = await asyncio.start_server(broker.arrived, "127.0.0.1", 0, ssl=tls)
    broker.port = server.sockets[0].getsockname()[1]
    try:
        yield broker
    finally:
        server.close()
        for peer in broker.peers:
            peer.writer.transport.abort()
