"""A simulated fleet: thousands of vehicles in one process, which sleep, lose signal, reboot, answer late or refuse.

    Profile -> VehicleKind, Behaviour   profile.py    who behaves how, and in which shares
    Fleet -> Vehicle -> VehicleLink     fleet.py      lets vehicles in, counts, waits
                                        vehicle.py    the life of one vehicle, and all it has received
                                        link.py       one connection: bytes to messages and back
    Received, VehicleCounts             records.py    what happened, exactly

For tests, demonstrations and benchmarks; `motorcade fleet simulate` is its command. docs/fleet.md is the guide.
"""

from __future__ import annotations

from motorcade.fleet.fleet import Fleet, FleetOptions
from motorcade.fleet.profile import PROFILES, Behaviour, FleetError, Leave, Profile, VehicleKind, find_profile
from motorcade.fleet.records import FleetFigures, Received, VehicleCounts, digest_of
from motorcade.fleet.vehicle import Vehicle, VehicleState

__all__ = [
    "PROFILES",
    "Behaviour",
    "Fleet",
    "FleetError",
    "FleetFigures",
    "FleetOptions",
    "Leave",
    "Profile",
    "Received",
    "Vehicle",
    "VehicleCounts",
    "VehicleKind",
    "VehicleState",
    "digest_of",
    "find_profile",
]
