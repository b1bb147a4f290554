"""Publishes `$SYS/broker/…` every few seconds, retained, a topic only when its text has changed.

Names, units and text forms are mosquitto's, because exporters and dashboards read them. docs/metrics.md lists them.
All figures come from `hub.statistics()` in one reading per round, so the topics of a round belong together.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, ClassVar, Final

import msgspec

import motorcade
from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import Handled, Stop
from motorcade.extension.plugin import Context, Plugin, hook
from motorcade.plugins.systopics.load import Load

ROOT: Final = "$SYS/broker"

#: Topic below `$SYS/broker`, and the name of its figure in `hub.statistics()`.
FIGURES: Final[Mapping[str, str]] = {
    "clients/connected": "clients_connected",
    "clients/active": "clients_connected",  # the old name, still published by mosquitto
    "clients/disconnected": "clients_disconnected",
    "clients/inactive": "clients_disconnected",  # likewise
    "clients/expired": "clients_expired",
    "clients/maximum": "clients_maximum",
    "clients/total": "clients_total",
    "messages/received": "messages_received",
    "messages/sent": "messages_sent",
    "messages/stored": "messages_stored",
    "store/messages/count": "messages_stored",
    "store/messages/bytes": "messages_stored_bytes",
    "subscriptions/count": "subscriptions",
    "shared_subscriptions/count": "shared_subscriptions",
    "retained messages/count": "retained_messages",
    "publish/messages/received": "publish_received",
    "publish/messages/sent": "publish_sent",
    "publish/messages/dropped": "publish_dropped",
    "publish/bytes/received": "publish_bytes_received",
    "publish/bytes/sent": "publish_bytes_sent",
    "bytes/received": "bytes_received",
    "bytes/sent": "bytes_sent",
}

#: Topic below `$SYS/broker/load`, and the counter whose averages it shows.
LOADS: Final[Mapping[str, str]] = {
    "messages/received": "messages_received",
    "messages/sent": "messages_sent",
    "publish/received": "publish_received",
    "publish/sent": "publish_sent",
    "publish/dropped": "publish_dropped",
    "bytes/received": "bytes_received",
    "bytes/sent": "bytes_sent",
    "sockets": "sockets_opened",
    "connections": "connections_accepted",
}


class SysTopicsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The interval at which the node's figures are published below `$SYS`."""

    interval: Annotated[float, msgspec.Meta(gt=0)] = 10.0  #: seconds between two rounds


class SysTopicsPlugin(Plugin):
    """The node's figures as messages."""

    Config: ClassVar[type[msgspec.Struct]] = SysTopicsConfig
    description: ClassVar[str] = "publishes the node's figures under $SYS, as mosquitto does"

    config: SysTopicsConfig

    def __init__(self, context: Context, config: SysTopicsConfig) -> None:
        super().__init__(context, config)
        self._published: dict[str, str] = {}
        self._loads = {topic: Load() for topic in LOADS}
        self._looked_at: float | None = None

    async def start(self) -> None:
        self.context.spawn(self._run, "rounds")

    async def reload(self, config: SysTopicsConfig) -> None:
        """Take a new interval, which holds from the next round on."""
        self.config = config

    @hook("message.publish", priority=1000, topics=("$SYS/#",))
    def on_publish(self, client: ClientInfo | None, _message: Message) -> Stop | None:
        """Refuse what a client sends to `$SYS`: only the node may speak for itself."""
        return None if client is None else Stop(Handled(ReasonCode.NOT_AUTHORIZED, "$SYS belongs to the broker"))

    async def _run(self) -> None:
        await self._publish("version", f"motorcade version {motorcade.__version__}")
        await self._publish("timestamp", _installed_at())
        while True:
            await self.publish_round()
            await asyncio.sleep(self.config.interval)

    async def publish_round(self) -> None:
        """Publish what has changed since the last round."""
        figures = self.context.hub.statistics()
        self._observe(figures)
        for topic, text in self._texts(figures):
            await self._publish(topic, text)

    def _observe(self, figures: Mapping[str, float]) -> None:
        # By the node's own uptime, not by the interval: a round may come late.
        uptime = figures.get("uptime", 0.0)
        elapsed = 0.0 if self._looked_at is None else uptime - self._looked_at
        self._looked_at = uptime
        for topic, name in LOADS.items():
            self._loads[topic].observe(figures.get(name, 0.0), elapsed)

    def _texts(self, figures: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        yield "uptime", f"{int(figures.get('uptime', 0))} seconds"
        for topic, name in FIGURES.items():
            yield topic, str(int(figures.get(name, 0)))
        for topic, load in self._loads.items():
            for period, average in load.averages().items():
                yield f"load/{topic}/{period}", f"{average:.2f}"
        current, maximum = memory()
        yield "heap/current", str(current)
        yield "heap/maximum", str(maximum)

    async def _publish(self, topic: str, text: str) -> None:
        if self._published.get(topic) == text:
            return
        await self.context.hub.publish(Message(f"{ROOT}/{topic}", text.encode(), retain=True))
        self._published[topic] = text


def memory() -> tuple[int, int]:
    """Return the process's resident set size in bytes, now and at its largest."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:  # not Linux
        return most, most
    now = pages * resource.getpagesize()
    return now, max(now, most)


def _installed_at() -> str:
    """Return when this version was installed. Mosquitto tells when it was built; a Python package is not."""
    written = Path(motorcade.__file__).stat().st_mtime
    return datetime.fromtimestamp(written, UTC).strftime("%Y-%m-%d %H:%M:%S+0000")
