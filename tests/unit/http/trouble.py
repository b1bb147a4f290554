"""A plugin before the fan-out that refuses, hangs up and is silent when a batch names one of these, which it never is.

It stands where access control does: what it refuses, the fan-out does not see.
"""

from __future__ import annotations

import asyncio
from typing import Any

from motorcade.core.client import ClientInfo
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import Handled, Stop, acknowledge_after
from motorcade.extension.plugin import Plugin, hook
from motorcade.plugins.fanout.plugin import TAKING

REFUSED = "LMCAAAAA1RA999999"  #: a batch that names it is refused
HANGS_UP = "LMCAAAAA3RA888888"  #: its publisher, `platform`, is sent away instead of an answer
SILENT = "LMCAAAAA5RA777777"  #: its publisher waits for ever; told on `test/silent`
UNWANTED = b"unwanted"  #: data that is refused


class TroublePlugin(Plugin):
    """Troubles."""

    @hook("message.publish", priority=TAKING + 1, topics=["$SDV-FANOUT/#"])
    def on_publish(self, _client: ClientInfo | None, message: Message) -> Any:
        payload = bytes(message.payload)
        if payload == UNWANTED:
            return Stop(Handled(ReasonCode.PAYLOAD_FORMAT_INVALID, "data: nobody wants this"))
        if REFUSED.encode() in payload:
            return Stop(Handled(ReasonCode.PAYLOAD_FORMAT_INVALID, f"ids: {REFUSED} is not welcome here"))
        for vin, work in ((SILENT, self.tell), (HANGS_UP, self.send_away)):
            if vin.encode() in payload:
                acknowledge_after(message, asyncio.get_running_loop().create_future())
                self.context.spawn(work(), "trouble")
                return Stop(Handled())
        return None

    async def send_away(self) -> None:
        await self.context.hub.disconnect("platform")

    async def tell(self) -> None:
        await self.context.hub.publish(Message("test/silent", b"now", 1, retain=True))
