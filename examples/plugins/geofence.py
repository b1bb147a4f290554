"""A worked example: tell when a vehicle enters or leaves a circle on the map.

vehicle   fleet/{vin}/position   {"lat": 48.1374, "lon": 11.5755}
plugin    fleet/{vin}/geofence   inside | outside    retained, published when it changes

MOTORCADE_HTTP__PLUGIN_PATHS=examples/plugins motorcade serve
motorcade plugin load geofence --path examples/plugins/geofence.py --set lat=48.1374 --set lon=11.5755 --set radius=2000
"""

from math import asin, cos, radians, sin, sqrt
from typing import Annotated

import msgspec

from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.extension.plugin import Plugin, hook


class Circle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration. Checked before the plugin is made: a wrong value or an unknown key is refused by name."""

    lat: Annotated[float, msgspec.Meta(ge=-90, le=90)]  #: degrees
    lon: Annotated[float, msgspec.Meta(ge=-180, le=180)]  #: degrees
    radius: Annotated[float, msgspec.Meta(gt=0)]  #: metres
    max_vehicles: Annotated[int, msgspec.Meta(ge=1)] = 100_000  #: remembered; then the longest known is forgotten


class Geofence(Plugin):
    """Watches positions on their way to subscribers, and changes none."""

    Config = Circle
    description = "publishes fleet/{vin}/geofence when a vehicle enters or leaves a circle"

    async def start(self) -> None:
        self.where: dict[str, str] = {}

    @hook("message.publish", topics=["fleet/+/position"])  # other messages never come here, and lose no time by it
    def on_position(self, _client: ClientInfo | None, message: Message) -> None:
        try:
            position = msgspec.json.decode(message.payload, type=dict[str, float])
            now = "inside" if self.distance(position["lat"], position["lon"]) <= self.config.radius else "outside"
        except (msgspec.DecodeError, KeyError):
            self.context.counters["unreadable"] += 1  # in /metrics: motorcade_geofence_unreadable_total
            return
        vin = message.topic.split("/")[1]
        if self.where.get(vin) != now:
            self.where[vin] = now
            if len(self.where) > self.config.max_vehicles:
                del self.where[next(iter(self.where))]
            self.context.spawn(self.tell(Message(f"fleet/{vin}/geofence", now.encode(), qos=1, retain=True)), "tell")

    async def tell(self, message: Message) -> None:
        await self.context.hub.publish(message)

    def distance(self, lat: float, lon: float) -> float:
        """Metres on the great circle."""
        a, b = radians(self.config.lat), radians(lat)
        half = sin((b - a) / 2) ** 2 + cos(a) * cos(b) * sin(radians(lon - self.config.lon) / 2) ** 2
        return 2 * 6_371_000 * asin(sqrt(min(1.0, half)))
