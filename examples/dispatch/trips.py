"""A handler for dispatcher workers: summarise a trip.

messages:published   {"vin": "LMCAAAAA4RA000000", "points": [{"km": 0.0, "at": 0}, {"km": 12.5, "at": 900}]}
messages:processed   {"vin": "LMCAAAAA4RA000000", "km": 12.5, "average_speed": 50.0}

cd examples/dispatch
motorcade dispatch leader --redis redis://127.0.0.1:6379 &
motorcade dispatch worker --redis redis://127.0.0.1:6379 --handler trips:summarise
redis-cli XADD messages:published '*' payload '{"vin": "V", "points": [{"km": 0, "at": 0}, {"km": 12.5, "at": 900}]}'
"""

from typing import Any

import msgspec


class Point(msgspec.Struct):
    """Where the odometer was, and when."""

    km: float
    at: float  #: seconds


class Trip(msgspec.Struct):
    """What a vehicle sends when it is parked."""

    vin: str
    points: list[Point]


def summarise(message: Any) -> dict[str, object] | None:
    """Return the result to write, or None to acknowledge the message without one.

    The worker passes decoded JSON. An exception rejects the message: the leader retries it, and after
    `max_deliveries` attempts it becomes a dead letter with the exception as its reason.
    """
    trip = msgspec.convert(message, Trip)
    if len(trip.points) < 2:
        return None  # the vehicle did not move
    first, last = trip.points[0], trip.points[-1]
    hours = (last.at - first.at) / 3600
    km = last.km - first.km
    return {"vin": trip.vin, "km": round(km, 1), "average_speed": round(km / hours, 1)}
