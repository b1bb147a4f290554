"""The turns of a carrier: who sends the next message to a client, and how it leaves.

         lane ─┐
         lane ─┼─▶ ring: what needs room in the window ─┐
 durable queue ┤                                         ├─ one each, in turn ─▶ window
    live queue ┘   free: what needs none (QoS 0) ────────┘

Rule 1: between two messages of one, each of the others that waits has sent one, or could not. Whoever has sent goes
        behind all others. (One that moves between the two rings may be passed twice.)
Rule 2: a lane that waits alone sends as many as there is room for, without ceremony (`_send_run`).
Rule 3: a message is taken from its lane when it is sent, or when it is certain that it never will be; whatever became
        of it is noted, for its source to hear.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from motorcade.broker.frames import IDS, frame_of
from motorcade.broker.lane import Lane, Outcome
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.extension.sources import Given, Kind

if TYPE_CHECKING:
    from motorcade.broker.session import Session

log = logging.getLogger(__name__)

STEP = 256  #: messages sent, or things told to sources, per turn of the event loop
STEP_OCTETS = 256 * 1024  #: bytes likewise; one message more than that goes alone


class Upstream(Protocol):
    """What a window gets its messages from: the lane of a source, the durable queue, the live queue."""

    @property
    def waits(self) -> bool:
        """Return True if it has a message to send."""

    @property
    def needs_room(self) -> bool:
        """Return True if the next message must find room in the window. Only asked while one waits."""

    def turn(self, now: float) -> bool:
        """Send the next message; False if there is none, or it must wait."""


class Turns:
    """Messages of sources on their way into one session's window."""

    __slots__ = ("_done", "_free", "_ring", "_rings", "_sent_octets", "buffered", "octets", "session", "unacked")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.unacked: dict[int, tuple[Lane, Given]] = {}  #: by packet id, in the order of sending
        self.buffered = 0  #: messages that wait in lanes
        self.octets = 0  #: of these
        # Who has something to send, the next one first: what needs room in the window, and what does not (QoS 0).
        self._ring: dict[Upstream, None] = {}
        self._free: dict[Upstream, None] = {}
        self._rings = (self._ring, self._free)
        self._done: list[Outcome] = []  # what sources have to hear
        self._sent_octets = 0  # of this pump

    def _line_up(self, upstream: Upstream) -> None:
        """Let it wait where its next message belongs: behind the others, if it did not wait there already."""
        if not upstream.waits:
            self._ring.pop(upstream, None)
            self._free.pop(upstream, None)
        elif upstream.needs_room:
            self._free.pop(upstream, None)
            self._ring.setdefault(upstream)
        else:
            self._ring.pop(upstream, None)
            self._free.setdefault(upstream)

    def _round(self, now: float, budget: int) -> int:
        """One message of everybody who waits; how many were sent. One that waits alone may send more."""
        session = self.session
        sent = 0
        cut = False
        stood = [(ring, len(ring)) for ring in self._rings]  # who comes in again meanwhile has had its turn
        for ring, number in stood:
            for _ in range(number):
                cut = cut or sent >= budget or self._sent_octets > STEP_OCTETS
                no_room = ring is self._ring and session.room <= 0
                if cut or no_room or not ring or not session.writable:
                    break
                lane = next(iter(ring))
                alone = len(self._free) + len(self._ring) == 1
                del ring[lane]
                if alone:
                    sent += self._send_run(lane, now, budget - sent)
                elif lane.turn(now):
                    sent += 1
                self._line_up(lane)
        if cut:
            self._rings = self._rings[::-1]  # what needs no room in the window may have used up the rest of a pump
        return sent

    def send(self, lane: Lane, now: float) -> bool:
        """Send the next message of a lane, or find that it is not to be sent; False if there is no room for it."""
        if not lane.buffer:
            return False
        session = self.session
        given = lane.buffer[0]
        message: Message | None = given.message
        qos = lane.qos_of(given.message, given.filter)
        no_room = session.room <= 0 or lane.busy
        if qos and no_room:
            return False
        if lane.asks and self._asks_now(lane):
            message = self._ask(lane, given)
            if not lane.buffer or given.filter not in lane.subscriptions:
                return False  # asking has ended it
            qos = lane.qos_of(message, given.filter) if message is not None else 0
            if qos and no_room:
                return False
        lane.buffer.popleft()
        octets = len(given.message.payload)
        self.buffered -= 1
        self.octets -= octets
        self._sent_octets += octets
        if message is None:
            self._done.append((lane, given, ReasonCode.SUCCESS, "withdrawn"))
        elif message.expired(now):
            session.shared.stats.routed += 1
            session.forgo(message, "expired")
            self._done.append((lane, given, ReasonCode.SUCCESS, "expired"))
        else:
            self._send(lane, given, message, qos, now)
        return True

    def _send(self, lane: Lane, given: Given, message: Message, qos: int, now: float) -> None:
        session, kind = self.session, lane.kind
        subscription = lane.subscriptions[given.filter]
        identifiers = (subscription.identifier,) if subscription.identifier else ()
        if identifiers:
            message = replace(message, headers=message.headers | {"subscription_ids": identifiers})
        retain = message.retain and (kind.retained or subscription.retain_as_published)
        try:
            frame = frame_of(message, session.version, qos, now, retain=retain, identifiers=identifiers)
        except Exception:  # noqa: BLE001 - a plugin may make messages that cannot be written, and must hurt only itself
            self._failed(kind, "message")
            self._done.append((lane, given, ReasonCode.SUCCESS, "unusable"))
            return
        number = session.take_id() if qos else 0
        session.shared.stats.routed += 1
        if not session.send(frame, number):
            self._done.append((lane, given, ReasonCode.PACKET_TOO_LARGE, "too_large"))
            return
        if qos:
            self.unacked[number] = (lane, given)
            lane.unacked += 1
        else:
            self._done.append((lane, given, ReasonCode.SUCCESS, ""))
        if lane.told_sent:
            self._tell_sent(lane, [given])

    def _send_run(self, lane: Upstream, now: float, most: int) -> int:
        """Messages of one that waits alone, as far as there is room; how many were sent.

        Plain ones, to a client with nothing special, take the inside of `send` and `Window.send` without their calls.
        """
        session = self.session
        hooks = session.shared.hooks
        sent = 0
        quick = isinstance(lane, Lane) and not (lane.kind.max_unacked or session.special)
        if hooks.message_delivered is not None or hooks.delivery_completed is not None:
            quick = False
        while sent < most and self._sent_octets <= STEP_OCTETS:
            count = self._send_quickly(lane, now, most - sent) if quick and isinstance(lane, Lane) else 0
            if not count and not lane.turn(now):
                break
            sent += count or 1
        return sent

    def _send_quickly(self, lane: Lane, now: float, most: int) -> int:
        """The next messages of a lane up to the first with something of its own; how many were sent."""
        session = self.session
        buffer, inflight, out, unacked, done = lane.buffer, session.inflight, session.out, self.unacked, self._done
        subscriptions, version, take_id = lane.subscriptions, session.version, session.take_id
        highest = 1 if lane.kind.release else 2
        retained, asks = lane.kind.retained, lane.asks and self._asks_now(lane)
        run: list[Given] | None = [] if lane.told_sent else None
        room = session.room
        octets = sent = unwindowed = 0
        empty = not out
        while sent < most and buffer and octets <= STEP_OCTETS:
            given = buffer[0]
            message = given.message
            subscription = subscriptions[given.filter]
            if subscription.identifier or message.expires_at is not None:
                break
            qos = min(message.qos, subscription.qos, highest)
            if qos and sent - unwindowed >= room:
                break
            if asks:
                wanted = self._ask(lane, given)
                if wanted is not message or lane.buffer is not buffer or not buffer:
                    break  # another one, or asking has ended it
            retain = message.retain and (retained or subscription.retain_as_published)
            try:
                frame = frame_of(message, version, qos, now, retain=retain)
            except Exception:  # noqa: BLE001 - `_send` tells of it
                break
            buffer.popleft()
            if qos:
                number = take_id()
                inflight[number] = frame
                unacked[number] = (lane, given)
                out += (frame[0], IDS[number], frame[1])
            else:
                unwindowed += 1
                out += frame[:2]
                done.append((lane, given, ReasonCode.SUCCESS, ""))
            if run is not None:
                run.append(given)
            octets += len(message.payload)
            sent += 1
        if sent:
            lane.unacked += sent - unwindowed
            self.buffered -= sent
            self.octets -= octets
            self._sent_octets += octets
            if empty:
                session.shared.dirty.append(session)
            stats = session.shared.stats
            stats.packets_sent += sent
            stats.publish_sent += sent
            stats.routed += sent
            stats.publish_bytes_sent += octets
            if run is not None:
                self._tell_sent(lane, run)
        return sent

    def hand(self, lane: Lane, given: Given) -> bool:
        """Send one message to a client for whom nothing waits; False: it cannot be done here and now.

        Like `_send_quickly`, this is the inside of `send` and `Window.send` for plain messages to plain clients.
        """
        session = self.session
        hooks, message = session.shared.hooks, given.message
        subscription = lane.subscriptions.get(given.filter)
        if (
            not session.ready
            or self._ring
            or self._free
            or subscription is None
            or not (subscription.qos and message.qos)
            or subscription.identifier
            or message.retain
            or message.expires_at is not None
            or lane.kind.max_unacked
            or session.special
            or hooks.message_delivered is not None
            or hooks.delivery_completed is not None
            or session.room <= 0
        ):
            return False
        qos = min(message.qos, subscription.qos, 1 if lane.kind.release else 2)
        try:
            frame = frame_of(message, session.version, qos, 0.0)
        except Exception:  # noqa: BLE001 - `_send` tells of it
            return False
        number = session.take_id()
        session.inflight[number] = frame
        self.unacked[number] = (lane, given)
        lane.unacked += 1
        out = session.out
        if not out:
            session.shared.dirty.append(session)
            if session.link is not None:
                session.link.write_later()
        out += (frame[0], IDS[number], frame[1])
        lane.kind.counters["given"] += 1
        stats = session.shared.stats
        stats.packets_sent += 1
        stats.publish_sent += 1
        stats.routed += 1
        stats.publish_bytes_sent += len(message.payload)
        return True

    def _asks_now(self, lane: Lane) -> bool:
        """Whether a source that can be asked wants to be."""
        try:
            return lane.source is not None and lane.source.asks is not False
        except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
            self._failed(lane.kind, "asks")
            return True

    def _tell_sent(self, lane: Lane, given: list[Given]) -> None:
        if lane.source is not None:
            try:
                lane.source.sent_run(given)
            except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
                self._failed(lane.kind, "sent_run")

    def _ask(self, lane: Lane, given: Given) -> Message | None:
        if lane.source is None:
            return given.message
        try:
            message = lane.source.sending(given)
            return message if message is None or is_message(message) else given.message
        except Exception:  # noqa: BLE001 - a plugin may raise anything, and must hurt only itself
            self._failed(lane.kind, "sending")
            return given.message

    def acknowledged(self, number: int, reason: ReasonCode = ReasonCode.SUCCESS, dropped: str = "") -> None:
        """The client is done with a message, or will never get it; its source hears of it with the next pump."""
        at = self.unacked.pop(number, None)
        if at is None:
            return
        lane, given = at
        lane.unacked -= 1
        if lane.source is None and lane.subscriptions:
            lane.missed.append((lane, given, reason, dropped))
            return
        self._done.append((lane, given, reason, dropped))
        if lane.buffer and lane.kind.max_unacked:
            self._line_up(lane)

    def _failed(self, kind: Kind, callback: str) -> None:
        kind.counters["failed"] += 1
        client_id = self.session.client.client_id
        text = "source_failed source=%s callback=%s client=%s"
        log.error(text, kind.name, callback, client_id, exc_info=True)  # noqa: LOG014 - called while it is handled


def is_message(message: object) -> bool:
    """Whether a source has given what it should; what cannot be encoded shows when it is."""
    return isinstance(message, Message) and isinstance(message.payload, bytes)
