"""`/config/reload`: read the configuration again, the same as SIGHUP."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from motorcade.control import Control
from motorcade.http.answers import answer
from motorcade.http.bridge import Bridge


def routes(control: Control, bridge: Bridge) -> list[Route]:
    """A configuration that is wrong is refused with 409, and the old one stays in force."""

    async def reload(_request: Request) -> Response:
        return answer(await bridge.call_slow(control.reload))

    return [Route("/config/reload", reload, methods=["POST"])]
