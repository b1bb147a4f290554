"""A simulated fleet: thousands of vehicles in one process, which sleep, lose signal, reboot, answer late or refuse.

    Profile -> Kind, Behaviour      profile.py    who behaves how, and in which shares
    Fleet -> Vehicle -> Link        fleet.py      lets vehicles in, counts, waits
                                    vehicle.py    the life of one vehicle, and all it has received
                                    link.py       one connection: bytes to messages and back
    Received, Tally                 records.py    what happened, exactly

For tests, demonstrations and benchmarks; `motorcade fleet simulate` is its command. docs/fleet.md is the guide.
"""

from __future__ import annotations

from motorcade.fleet.fleet import Fleet, FleetOptions
from motorcade.fleet.profile import PROFILES, Behaviour, FleetError, Kind, Leave, Profile, find_profile
from motorcade.fleet.records import Figures, Received, Tally, digest_of
from motorcade.fleet.vehicle import State, Vehicle

__all__ = [
    "PROFILES",
    "Behaviour",
    "Figures",
    "Fleet",
    "FleetError",
    "FleetOptions",
    "Kind",
    "Leave",
    "Profile",
    "Received",
    "State",
    "Tally",
    "Vehicle",
    "digest_of",
    "find_profile",
]
