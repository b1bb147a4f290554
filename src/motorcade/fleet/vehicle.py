"""The life of one vehicle: comes, subscribes, sends heartbeats, answers or does not, leaves, comes back.

    PARKED ──────┐ connect()                     (PARKED: only a caller brings it back)
    ASLEEP ──────┤ time
                 ▼
              WAITING ─ the fleet lets it in ─▶ CONNECTING ─ CONNACK, SUBACK if needed ─▶ ONLINE
                 ▲                                  │                                       │
                 └─────────── back-off ─────────────┴──────── lost ──────────────────────────┤ awake is over
    ASLEEP ◀────────────────────────────────────────────────────────────────────────────────┘

Rule 1: a vehicle has one timer, however much it has to do (`_plan`), and no task.
Rule 2: `link` is the connection that the broker accepted last. Others may still be open: one that was taken over, or
        one that fell silent. What comes by them is recorded and answered too, for that is what a broker must cope with.
Rule 3: times of life and answers are drawn from two streams, so that a seed gives the same life whatever is received.
"""

from __future__ import annotations

import asyncio
import math
import time
from enum import StrEnum, auto
from typing import TYPE_CHECKING

from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.fleet.chance import Chance
from motorcade.fleet.link import VehicleLink
from motorcade.fleet.profile import Behaviour, FleetError, Leave
from motorcade.fleet.records import Received, VehicleCounts, digest_of
from motorcade.mqtt.codec import encode
from motorcade.mqtt.packets import (
    V5,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
)
from motorcade.mqtt.properties import NONE, Properties
from motorcade.mqtt.reasons import ProtocolError

if TYPE_CHECKING:
    from motorcade.fleet.fleet import Fleet

_FAILURE = 0x80
_PINGREQ = encode(Pingreq(), V5)
_NEVER = float("inf")
_HANDSHAKE = 30.0  # seconds from the first attempt to SUBACK
_BACK_OFF, _BACK_OFF_MAX = 1.0, 60.0  # seconds before the first and before later attempts to come back
# Waking the process costs ten times what a heartbeat costs. So what is far off is done at common moments, four in a
# second, by all vehicles that have something to do then.
_GRID = 0.25  # seconds between two of these moments
_FAR = 5.0  # seconds
_EARLY = 0.002  # seconds that a timer may be early
_SUBSCRIBE_ID = 1  # a vehicle subscribes to one filter, and publishes without packet ids


class VehicleState(StrEnum):
    """The state of a vehicle."""

    PARKED = auto()
    ASLEEP = auto()
    WAITING = auto()
    CONNECTING = auto()
    ONLINE = auto()


class Vehicle:
    """One vehicle. Made by `Fleet`; tests steer it by its methods."""

    __slots__ = (
        "_acknowledged",
        "_answers",
        "_beat_at",
        "_fleet",
        "_heard_at",
        "_keep_alive",
        "_leave_at",
        "_life",
        "_opening",
        "_pinged_at",
        "_retries",
        "_said",
        "_sent_at",
        "_silent_link",
        "_timer",
        "arrivals",
        "behaviour",
        "clean_next",
        "connections",
        "link",
        "received",
        "session_present",
        "state",
        "subscribed",
        "tally",
        "trouble",
        "version",
        "vin",
    )

    def __init__(self, fleet: Fleet, vin: str, version: int, behaviour: Behaviour, tally: VehicleCounts) -> None:
        self.vin = vin
        self.version = version
        self.behaviour = behaviour
        self.tally = tally  #: counts of all vehicles of its kind
        self.received: list[Received] = []  #: every PUBLISH that came, in order; bounded by `max_received`
        self.state = VehicleState.PARKED
        self.link: VehicleLink | None = None  #: the connection that the broker accepted last
        self.connections = 0  #: how many it has tried to open
        self.arrivals = 0  #: how often it came online
        self.session_present = False  #: whether the last CONNACK said so
        self.subscribed = False  #: whether its session has the subscription, as far as the vehicle knows
        self.clean_next = False  #: begin a new session with the next connection, whatever the behaviour says
        self.trouble = ""  #: why it was refused or lost the last time
        self._fleet = fleet
        self._life = Chance(fleet.options.seed, f"{vin}/life")
        self._answers = Chance(fleet.options.seed, f"{vin}/answers")
        self._acknowledged: dict[tuple[str, bytes], None] | None = None
        self._opening: VehicleLink | None = None
        self._silent_link: VehicleLink | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._leave_at = self._beat_at = _NEVER
        self._heard_at = self._sent_at = self._pinged_at = 0.0  # pinged: 0 when no answer is waited for
        self._keep_alive = 0  # seconds, as agreed for the present connection
        self._said = ""  # what the broker gave as reason before it hung up
        self._retries = 0

    def __repr__(self) -> str:
        return f"<Vehicle {self.vin} {self.state} received={len(self.received)}>"

    # --- control ------------------------------------------------------------------------------------------------------

    @property
    def is_online(self) -> bool:
        """Connected and subscribed."""
        return self.state is VehicleState.ONLINE

    @property
    def unanswered(self) -> list[Received]:
        """Return what came by the present connection and has not been answered."""
        waiting = self.link.unanswered if self.link is not None else None
        return list(waiting.values()) if waiting else []

    def behave(self, behaviour: Behaviour) -> None:
        """Change the behaviour. Answers that are due later stay as decided; CONNECT changes at the next connection."""
        self.behaviour = behaviour
        if self.state is VehicleState.ONLINE:
            self._plan_day(self._fleet.now())
            self._plan()

    async def connect(self, *, clean: bool = False, timeout: float = _HANDSHAKE) -> None:  # noqa: ASYNC109
        """Come back now, if it is away, and wait until it is online. `clean` begins a new session."""
        self.clean_next = clean
        if self.state in (VehicleState.PARKED, VehicleState.ASLEEP):
            self.come()
        await self._fleet.wait_until(lambda: self.is_online, f"{self.vin} is online", timeout)

    async def disconnect(self, *, timeout: float = _HANDSHAKE) -> None:  # noqa: ASYNC109
        """Say goodbye, and stay away until `connect`."""
        link = self.link
        self.park(Leave.GOODBYE)
        if link is not None:
            await self._fleet.wait_until(lambda: self.link is not link, f"{self.vin} is gone", timeout)

    def park(self, leave: Leave = Leave.RESET) -> None:
        """Go at once in this way, and stay away until `connect`."""
        self._go(leave)
        self._enter(VehicleState.PARKED)

    async def take_over(self, *, clean: bool = False, timeout: float = _HANDSHAKE) -> VehicleLink:  # noqa: ASYNC109
        """Open a second connection while the first one is open; the first one is returned, for the broker to close."""
        before = self.link
        if before is None or self.state is not VehicleState.ONLINE:
            raise FleetError(f"{self.vin} is {self.state}; only a vehicle that is online can be taken over")
        self.clean_next = clean
        self.come()
        await self._fleet.wait_until(
            lambda: self.is_online and self.link is not before, f"{self.vin} has its second connection", timeout
        )
        return before

    def answer(self, record: Received, reason: int = 0) -> bool:
        """Acknowledge or refuse a message now, whatever the behaviour says. False if that is too late."""
        return self.link is not None and self.link.answer(record, reason)

    def heartbeat(self) -> bool:
        """Send one now. False if it is not connected."""
        return self._publish("heartbeat")

    # --- coming -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start somewhere in its day."""
        behaviour = self.behaviour
        if not behaviour.stays:
            awake, asleep = self._life.between(behaviour.awake), self._life.between(behaviour.asleep)
            moment = self._life.number() * (awake + asleep)
            if moment > awake:
                self._enter(VehicleState.ASLEEP)
                self._wake_in(awake + asleep - moment)
                return
        self.come()

    def come(self) -> None:
        """Stand in line to connect."""
        self._enter(VehicleState.WAITING)
        self._fleet.admit(self)

    def open(self) -> VehicleLink:
        """Start to connect; return the connection that is to be opened."""
        self._enter(VehicleState.CONNECTING)
        self.connections += 1
        self._opening = VehicleLink(self, self.connections, self.version, self._fleet.view)
        self._timer = self._fleet.loop.call_later(_HANDSHAKE, self._gave_up)
        return self._opening

    def could_not_open(self, link: VehicleLink, why: str) -> None:
        """Note that no connection was made."""
        if link is self._opening:
            self._opening = None
            self.tally.failed += 1
            self._try_again(why)

    def opened(self, link: VehicleLink) -> None:
        self._fleet.links.add(link)
        if link is not self._opening:  # the caller has changed his mind meanwhile
            link.reset()
            return
        link.send(encode(self._introduction(), self.version))

    def _introduction(self) -> Connect:
        behaviour, options = self.behaviour, self._fleet.options
        clean = self.clean_next or (self.connections > 1 and self._life.happens(behaviour.clean))
        self.clean_next = False
        properties = Properties(session_expiry=behaviour.session_expiry) if self.version == V5 else NONE
        username = options.username.replace("{VIN}", self.vin) if options.username is not None else None
        password = options.password.replace("{VIN}", self.vin).encode() if options.password is not None else None
        return Connect(self.vin, self.version, clean, behaviour.keep_alive, username, password, None, properties)

    def _on_connack(self, link: VehicleLink, packet: Connack) -> None:
        if link is not self._opening:
            raise ProtocolError(ReasonCode.PROTOCOL_ERROR, "CONNACK was not to be expected")
        self._opening = None
        if packet.reason >= _FAILURE:
            self.tally.denied += 1
            link.reset()
            self._try_again(f"the connection was refused: {_told(packet.reason, packet.properties)}")
            return
        self.tally.connects += 1
        self.tally.resumed += packet.session_present
        told = packet.properties.server_keep_alive
        self._keep_alive = told if told is not None else self.behaviour.keep_alive
        self._said = ""
        self.link = link
        self.session_present = packet.session_present
        self.subscribed = self.subscribed and packet.session_present
        if self._silent_link is not None:  # out of the tunnel: the old connection is over here too
            self._silent_link.reset()
            self._silent_link = None
        if self.subscribed and not self.behaviour.resubscribe:
            self._arrive()
            return
        options = self._fleet.options
        wish = Subscription(f"{self._fleet.prefix_of(self.vin)}+", options.qos)
        link.send(encode(Subscribe(_SUBSCRIBE_ID, (wish,)), self.version))

    def _on_suback(self, link: VehicleLink, packet: Suback) -> None:
        if link is not self.link or self.state is not VehicleState.CONNECTING:
            return  # taken over in between
        if packet.reasons[0] >= _FAILURE:
            self.tally.denied += 1
            self._go(Leave.GOODBYE)
            self._try_again(f"the subscription was refused: {_told(packet.reasons[0], packet.properties)}")
            return
        self.subscribed = True
        self._arrive()

    def _arrive(self) -> None:
        now = self._fleet.now()
        self._enter(VehicleState.ONLINE)
        self.tally.online += 1
        self.arrivals += 1
        self._retries = 0
        self._heard_at = self._sent_at = now
        self._pinged_at = 0.0
        self._publish("online")
        self._plan_day(now)
        self._plan()

    # --- being there --------------------------------------------------------------------------------------------------

    def _plan_day(self, now: float) -> None:
        """Choose when it leaves, and its first heartbeat: anywhere in the period, so that heartbeats are spread."""
        behaviour = self.behaviour
        self._leave_at = _NEVER if behaviour.stays else now + self._life.between(behaviour.awake)
        self._beat_at = now + behaviour.heartbeat * self._life.number() if behaviour.heartbeat else _NEVER

    def _plan(self) -> None:
        """Set the timer to whatever comes next."""
        due = min(self._leave_at, self._beat_at, self._doubt_at())
        if self._timer is not None:
            self._timer.cancel()
        if due == _NEVER:
            self._timer = None
            return
        if due > self._fleet.now() + _FAR:
            due = math.ceil(due / _GRID) * _GRID
        self._timer = self._fleet.loop.call_at(due, self._due)

    def _doubt_at(self) -> float:
        """Return when to send PINGREQ, or to give the broker up after one: keep alive counts both ways."""
        if not self._keep_alive:
            return _NEVER
        return (self._pinged_at or min(self._sent_at, self._heard_at)) + self._keep_alive

    def _due(self) -> None:
        now = self._fleet.now() + _EARLY
        if now >= self._leave_at:
            self._fall_asleep()
            return
        if now >= self._beat_at:
            self._publish("heartbeat")
            self._beat_at = now + self.behaviour.heartbeat
        if now >= self._doubt_at():
            if self._pinged_at:
                self._lose(f"the broker did not answer PINGREQ within {self._keep_alive} s")
                return
            self._pinged_at = self._sent_at = now
            if self.link is not None:
                self.link.send(_PINGREQ)
        self._plan()

    def _publish(self, what: str) -> bool:
        if self.link is None:
            return False
        body = b'{"time":%.3f}' % time.time()
        sent = self.link.send(encode(Publish(f"ecp/{self.vin}/{what}", body), self.version))
        if sent:
            self.tally.heartbeats += 1
            self._sent_at = self._fleet.now()
        return sent

    # --- messages -----------------------------------------------------------------------------------------------------

    def heard(self, link: VehicleLink) -> None:
        if link is self.link:
            self._heard_at = self._fleet.now()
            self._pinged_at = 0.0

    def message(self, link: VehicleLink, message: Publish) -> None:
        if message.qos > self._fleet.options.qos:
            raise ProtocolError(ReasonCode.PROTOCOL_ERROR, f"a message with QoS {message.qos} was not asked for")
        record = self._record(link, message)
        self._remember(record)
        if not message.qos:
            return
        if link.unanswered is None:
            link.unanswered = {}
        if message.packet_id in link.unanswered:
            self.tally.broken += 1  # [MQTT-2.2.1-4]: an id is free again when its message was acknowledged
        link.unanswered[message.packet_id] = record
        self._decide(link, record)

    def _record(self, link: VehicleLink, message: Publish) -> Received:
        tally, topic, prefix = self.tally, message.topic, self._fleet.prefix_of(self.vin)
        request_id = topic
        if topic.startswith(prefix):
            request_id = topic[len(prefix) :]
        else:
            tally.strays += 1
        digest = self._fleet.shared(digest_of(message.payload))
        waiting = len(link.unanswered) if link.unanswered else 0
        repeated = self._acknowledged is not None and (request_id, digest) in self._acknowledged
        tally.received += 1
        tally.bytes += len(message.payload)
        tally.dup += message.dup
        tally.repeated += repeated
        tally.overlapped += waiting > 0
        return Received(
            request_id,
            digest,
            len(message.payload),
            message.qos,
            message.dup,
            message.packet_id,
            link.number,
            time.time(),
            waiting,
            repeated,
            message.properties.user_properties,
        )

    def _remember(self, record: Received) -> None:
        self.received.append(record)
        bound = self._fleet.options.max_received
        if len(self.received) > bound:
            surplus = len(self.received) - bound // 2  # rarely, and much at once
            del self.received[:surplus]
            self.tally.forgotten += surplus
        self._fleet.changed()

    def _decide(self, link: VehicleLink, record: Received) -> None:
        """Acknowledge, refuse or ignore; now or later."""
        behaviour = self.behaviour
        reason = 0
        if behaviour.refuse or behaviour.ignore:
            lot = self._answers.number()
            if lot < behaviour.ignore:
                self.tally.ignored += 1
                return
            if lot < behaviour.ignore + behaviour.refuse:
                reason = behaviour.reason
        delay = self._answers.between(behaviour.answer)
        if delay:
            self._fleet.loop.call_later(delay, self._respond, link, record, reason)
        else:
            self._respond(link, record, reason)

    def _respond(self, link: VehicleLink, record: Received, reason: int) -> None:
        if not reason or link.version == V5 or not link.is_open:
            link.answer(record, reason)
            return
        self.tally.refused += 1  # MQTT 3.1.1 has no other way to say no than to hang up
        link.reset()
        if link is self.link:
            self._stay_away()

    def answered(self, link: VehicleLink, record: Received) -> None:  # noqa: ARG002 - whichever connection it was
        if not record.acked:
            self.tally.refused += 1
            return
        self.tally.acked += 1
        if self._acknowledged is None:
            self._acknowledged = {}
        self._acknowledged[record.request_id, record.digest] = None
        if len(self._acknowledged) > self._fleet.options.max_received:
            del self._acknowledged[next(iter(self._acknowledged))]
        self._fleet.changed()

    def packet(self, link: VehicleLink, packet: Packet) -> None:
        match packet:
            case Pingresp():
                pass
            case Connack():
                self._on_connack(link, packet)
            case Suback():
                self._on_suback(link, packet)
            case Disconnect():
                if link is self.link or link is self._opening:
                    self._said = f"the broker disconnected it: {_told(packet.reason, packet.properties)}"
            case _:
                raise ProtocolError(ReasonCode.PROTOCOL_ERROR, f"{type(packet).__name__} was not to be expected")

    # --- going --------------------------------------------------------------------------------------------------------

    def _fall_asleep(self) -> None:
        self._go(self.behaviour.leave)
        self._enter(VehicleState.ASLEEP)
        self._wake_in(self._life.between(self.behaviour.asleep))

    def _wake_in(self, seconds: float) -> None:
        self._timer = self._fleet.loop.call_later(seconds, self.come)

    def _go(self, leave: Leave) -> None:
        """End the connections in this way. `closed` will find that they are not ours any more."""
        for link in (self.link, self._opening):
            if link is None:
                continue
            if leave is Leave.SILENCE:
                link.fall_silent()
                if self._silent_link is not None:
                    self._silent_link.reset()
                self._silent_link = link
            elif leave is Leave.GOODBYE:
                link.say_goodbye()
            else:
                link.reset()
        self._opening = None
        if leave is Leave.SILENCE:  # the others are known until they are closed
            self.link = None

    def broken(self, link: VehicleLink, error: ProtocolError) -> None:  # noqa: ARG002 - whichever connection it was
        self.tally.broken += 1
        self._said = f"the broker broke the rules of MQTT: {error}"

    def closed(self, link: VehicleLink, error: Exception | None) -> None:
        self._fleet.links.discard(link)
        if link is self._silent_link:
            self._silent_link = None
        if link is self._opening:
            self._opening = None
            self.tally.failed += 1
            self._try_again(self._said or f"the connection ended before CONNACK{f': {error}' if error else ''}")
        elif link is self.link:
            self.link = None
            if self.state in (VehicleState.ONLINE, VehicleState.CONNECTING) and self._opening is None:
                self.tally.lost += 1
                self._try_again(self._said or (f"the connection was lost: {error}" if error else "the broker hung up"))
        self._fleet.changed()

    def _gave_up(self) -> None:
        """Give up: no CONNACK or SUBACK came in time."""
        self.tally.failed += 1
        self._go(Leave.RESET)
        self._try_again(f"no answer from the broker within {_HANDSHAKE:g} s")

    def _lose(self, why: str) -> None:
        self.tally.lost += 1
        self._go(Leave.RESET)
        self._try_again(why)

    def _try_again(self, why: str) -> None:
        """Retry after a refusal or loss: note the reason and back off, longer each time."""
        self.trouble = why
        self._said = ""
        self._fleet.trouble(why)
        self._stay_away()

    def _stay_away(self) -> None:
        delay = min(_BACK_OFF * 2 ** min(self._retries, 16), _BACK_OFF_MAX)
        self._retries += 1
        self._enter(VehicleState.ASLEEP)
        self._wake_in(delay * (0.5 + 0.5 * self._life.number()))

    def _enter(self, state: VehicleState) -> None:
        self._leave_state()
        self.state = state
        self._fleet.changed()

    def _leave_state(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.state is VehicleState.ONLINE:
            self.tally.online -= 1
        elif self.state is VehicleState.CONNECTING:
            self._fleet.settled()


def _told(reason: ReasonCode, properties: Properties) -> str:
    name = reason.name.lower().replace("_", " ")
    detail = properties.reason_string
    return f"{name} (0x{reason:02x}){f': {detail}' if detail else ''}"
