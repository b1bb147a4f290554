"""`/node`: the node itself."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from motorcade.control import Control
from motorcade.http.answers import answer
from motorcade.http.bridge import Bridge


def routes(control: Control, bridge: Bridge) -> list[Route]:
    """Return the routes to version, state, listeners and sizes."""

    async def show(_request: Request) -> Response:
        return answer(await bridge.call(control.node))

    return [Route("/node", show, methods=["GET"])]
