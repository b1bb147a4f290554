"""`/config`: what the node is configured with, secrets hidden; `/config/reload`: read it again, the same as SIGHUP."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from motorcade.control import Control
from motorcade.http.answers import answer, listing
from motorcade.http.bridge import Bridge


def routes(control: Control, bridge: Bridge) -> list[Route]:
    """Return the routes. A wrong configuration is refused with 409, and the old one stays in force."""

    async def reload(_request: Request) -> Response:
        return answer(await bridge.call_slow(control.reload))

    async def show(_request: Request) -> Response:
        """List every key in the order of the sections, with its value and its origin."""
        return listing(await bridge.call(control.configuration))

    return [Route("/config", show, methods=["GET"]), Route("/config/reload", reload, methods=["POST"])]
