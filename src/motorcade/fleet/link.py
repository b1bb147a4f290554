"""One connection of a vehicle: bytes to messages, answers to bytes. What to do about them is `vehicle.py`'s business.

Rule 1: an idle connection costs little. All connections of a fleet read into one buffer, which is free again when the
        read has been handled; a connection keeps bytes of its own only while a packet is not all there.
Rule 2: answers to what one read has brought leave together, after all of it has been handled. So a message that the
        broker sent before it could have our answer to the one before is seen as that: it overlaps.
Rule 3: a record says "answered" only after the bytes were handed to the transport, and never on a silent connection.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, cast

from motorcade.fleet.records import Received
from motorcade.mqtt.codec import MAX_PACKET, DecodeLimits, decode, split
from motorcade.mqtt.packets import PUBLISH, V5, Packet, Publish
from motorcade.mqtt.reasons import ProtocolError

_UNLIMITED = DecodeLimits(max_user_properties=0)
_PUBACK, _PUBACK_WITH_REASON = b"\x40\x02", b"\x40\x03"
_DISCONNECT = b"\xe0\0"


class LinkOwner(Protocol):
    """The owner of a connection."""

    def opened(self, link: VehicleLink) -> None:
        """Handle the open connection: CONNECT may be sent."""

    def heard(self, link: VehicleLink) -> None:
        """Note that bytes came."""

    def message(self, link: VehicleLink, message: Publish) -> None:
        """Handle a PUBLISH."""

    def packet(self, link: VehicleLink, packet: Packet) -> None:
        """Handle another packet."""

    def answered(self, link: VehicleLink, record: Received) -> None:
        """Handle that the answer to a message was written."""

    def broken(self, link: VehicleLink, error: ProtocolError) -> None:
        """Handle a protocol error of the broker; the connection is closed after this."""

    def closed(self, link: VehicleLink, error: Exception | None) -> None:
        """Handle the end, whichever side ended it. The last call."""


class VehicleLink(asyncio.BufferedProtocol):
    """One connection. Give it to `loop.create_connection`."""

    __slots__ = (
        "_answers",
        "_out",
        "_owner",
        "_rest",
        "_transport",
        "_view",
        "number",
        "silent",
        "unanswered",
        "version",
    )

    def __init__(self, owner: LinkOwner, number: int, version: int, view: memoryview) -> None:
        self.number = number  #: of the vehicle's connections, from 1
        self.version = version
        self.silent = False  #: nothing is read or written any more
        self.unanswered: dict[int, Received] | None = None  #: by packet id; None until there was one
        self._owner = owner
        self._view = view
        self._rest = b""
        self._out: list[bytes] = []
        self._answers: list[Received] | None = None  # a read is being handled; their PUBACKs are in `_out`
        self._transport: asyncio.Transport | None = None

    # --- sending ------------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Return True if something sent now may arrive."""
        return not self.silent and self._transport is not None and not self._transport.is_closing()

    def send(self, data: bytes) -> bool:
        """Write bytes; return True if they were handed over."""
        if self.silent or self._transport is None or self._transport.is_closing():
            return False
        self._transport.write(data)
        return True

    def answer(self, record: Received, reason: int) -> bool:
        """Send PUBACK. False if the connection is gone or the message has been answered."""
        waiting = self.unanswered
        if not self.is_open or waiting is None or waiting.get(record.packet_id) is not record:
            return False
        record.reason = reason
        raw = record.packet_id.to_bytes(2, "big")
        if reason and self.version == V5:
            self._out.append(_PUBACK_WITH_REASON + raw + bytes((reason,)))
        else:
            self._out.append(_PUBACK + raw)
        if self._answers is not None:
            self._answers.append(record)
        else:
            self._flush([record])
        return True

    def _flush(self, records: list[Received]) -> None:
        if not self.send(b"".join(self._out)):
            for record in records:
                record.reason = None
            self._out.clear()
            return
        self._out.clear()
        now = time.time()
        for record in records:
            record.answered = now
            if self.unanswered is not None and self.unanswered.get(record.packet_id) is record:
                del self.unanswered[record.packet_id]
            self._owner.answered(self, record)

    # --- ending -------------------------------------------------------------------------------------------------------

    def say_goodbye(self) -> None:
        """Send DISCONNECT, then close."""
        if self.send(_DISCONNECT) and self._transport is not None:
            self._transport.close()
        else:
            self.reset()

    def reset(self) -> None:
        """End at once and without a word."""
        if self._transport is not None:
            self._transport.abort()

    def fall_silent(self) -> None:
        """Stop reading and writing; the connection stays open, so the broker cannot know."""
        if self._transport is not None and not self.silent and not self._transport.is_closing():
            self._transport.pause_reading()
        self.silent = True

    # --- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by class
        self._owner.opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        if self.silent:
            return
        data = bytes(self._view[:nbytes])
        if self._rest:
            data = self._rest + data
            self._rest = b""
        self._owner.heard(self)
        answers: list[Received] = []
        self._answers = answers
        try:
            self._take(data)
        except ProtocolError as error:
            self._owner.broken(self, error)
            self.reset()
        self._answers = None
        if answers:
            self._flush(answers)

    def _take(self, data: bytes) -> None:
        offset = 0
        while (span := split(data, offset, MAX_PACKET)) is not None:
            start, end = span
            first = data[offset]
            packet = decode(first, data[start:end], self.version, _UNLIMITED)
            if first >> 4 == PUBLISH:
                self._owner.message(self, cast("Publish", packet))
            else:
                self._owner.packet(self, packet)
            offset = end
            if self.silent:
                return
        self._rest = data[offset:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._owner.closed(self, exc)
