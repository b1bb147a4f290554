"""The plugin `capture`: its configuration, its hook and the service `captures`.

The hook runs at priority −900: after all that may change or drop a message, before the retained messages. It never
changes a message and never waits; a publisher with QoS 1 or 2 is answered when the target has the message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from motorcade.extension.metrics import Counts, Measure, Table
from motorcade.extension.plugin import Context, Plugin
from motorcade.plugins.capture.metrics import COUNTS, MEASURES, ROUTE_BYTES
from motorcade.plugins.capture.options import CaptureConfig
from motorcade.plugins.capture.rules import MAX_TOPICS, CaptureRules


class CapturePlugin(Plugin):
    """Copies published messages into streams, Redis streams and Redis channels."""

    Config: ClassVar[type[msgspec.Struct]] = CaptureConfig
    description: ClassVar[str] = "copies published messages into streams, Redis streams and Redis channels"
    counts: ClassVar[tuple[Counts, ...]] = COUNTS
    measures: ClassVar[tuple[Measure, ...]] = MEASURES

    config: CaptureConfig

    def __init__(self, context: Context, config: CaptureConfig) -> None:
        super().__init__(context, config)
        self._rules = CaptureRules(context, config)

    async def start(self) -> None:
        await self._rules.open()
        self.context.offer("captures", self._rules)

    async def reload(self, config: CaptureConfig) -> None:
        await self._rules.reload(config)
        self.config = config

    async def stop(self) -> None:
        """Bring what was taken to its target."""
        await self._rules.close()

    def tables(self) -> Iterable[Table]:
        topics = self._rules.remembered
        yield Table("capture_routes", topics, topics * ROUTE_BYTES, MAX_TOPICS * ROUTE_BYTES)

    def gauges(self) -> dict[str, float]:
        return {"capture_rules": len(self._rules), "capture_pending": self._rules.pending}
