"""Records of a fleet: one `Received` per PUBLISH that came, and counts per kind of vehicle.

A test that judges loss and duplicates looks at `Vehicle.received`. Nothing is merged or left out there: a message that
comes twice is there twice, each time with the connection it came by, its packet id and what was answered when.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields


def digest_of(payload: bytes) -> bytes:
    """Return the SHA-256 of a payload, for `Received.digest`."""
    return hashlib.sha256(payload).digest()


@dataclass(slots=True, eq=False)
class Received:
    """One PUBLISH that has come. All but `answered` and `reason` is as it was when it came."""

    request_id: str  #: the last level of the topic; the whole topic if it is no request for this vehicle
    digest: bytes  #: SHA-256 of the payload
    size: int  #: bytes of the payload
    qos: int
    dup: bool
    packet_id: int  #: 0 for QoS 0
    connection: int  #: which connection of the vehicle it came by, from 1
    time: float  #: since the epoch
    waiting: int  #: messages of the same connection that were not answered yet when it came
    repeated: bool  #: the same request with the same payload had been acknowledged before
    user_properties: tuple[tuple[str, str], ...] = ()  #: MQTT 5
    answered: float | None = None  #: since the epoch: when PUBACK was written
    reason: int | None = None  #: reason code of that PUBACK

    @property
    def acked(self) -> bool:
        """Return True if it was acknowledged, and not refused."""
        return self.reason is not None and self.reason < 0x80


@dataclass(slots=True)
class VehicleCounts:
    """Counts of the vehicles of one kind."""

    vehicles: int = 0
    online: int = 0  #: connected and subscribed now
    connects: int = 0  #: CONNACKs that let a vehicle in
    resumed: int = 0  #: of these, with a session that the broker had kept
    denied: int = 0  #: CONNACKs and SUBACKs that refused
    failed: int = 0  #: attempts to connect that got no answer
    lost: int = 0  #: connections that ended although the vehicle had not left
    received: int = 0  #: PUBLISH packets
    bytes: int = 0  #: of their payloads
    acked: int = 0  #: PUBACKs that said yes
    refused: int = 0  #: messages answered with an error; MQTT 3.1.1: with the end of the connection
    ignored: int = 0  #: messages that are never answered, on purpose
    dup: int = 0  #: came with the DUP flag
    repeated: int = 0  #: came again after they had been acknowledged
    overlapped: int = 0  #: came while an earlier one of the same connection was not answered
    strays: int = 0  #: came on a topic that is no request for this vehicle
    broken: int = 0  #: breaches of MQTT by the broker, such as a packet id that is in use
    forgotten: int = 0  #: entries of `Vehicle.received` dropped to stay within `max_received`
    heartbeats: int = 0

    def add(self, other: VehicleCounts) -> None:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _COUNTS}


_COUNTS = tuple(entry.name for entry in fields(VehicleCounts))


@dataclass(slots=True)
class FleetFigures:
    """A copy of all counts at one moment."""

    seconds: float  #: since the start
    kinds: dict[str, VehicleCounts] = field(default_factory=dict)
    troubles: dict[str, int] = field(default_factory=dict)  #: what connections were refused or lost for, how often

    @property
    def total(self) -> VehicleCounts:
        total = VehicleCounts()
        for tally in self.kinds.values():
            total.add(tally)
        return total
