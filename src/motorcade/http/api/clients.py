"""`/clients`: who is there, one client in full, and sending one away."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from motorcade.client_control import MAX_CLIENTS
from motorcade.control import Control
from motorcade.http.answers import answer, listing, page_of
from motorcade.http.bridge import Bridge


def routes(control: Control, bridge: Bridge) -> list[Route]:
    """Return the routes. A client id is one segment of the path: a slash in it is written `%2F`."""

    async def index(request: Request) -> Response:
        """Answer `?limit&cursor&search&node`; pass `meta.cursor` to get the next page, until it is null.

        Nodes that did not answer are in `meta.unanswered`; their clients are missing.
        """
        cursor, limit = page_of(request, MAX_CLIENTS)
        query = request.query_params
        page = await bridge.call_slow(control.clients, cursor, limit, query.get("search", ""), query.get("node", ""))
        return listing(page.clients, count=page.count, cursor=page.cursor, unanswered=page.unanswered)

    async def show(request: Request) -> Response:
        return answer(await bridge.call_slow(control.client, request.path_params["client_id"]))

    async def kick(request: Request) -> Response:
        return answer(await bridge.call_slow(control.kick, request.path_params["client_id"]))

    return [
        Route("/clients", index, methods=["GET"]),
        Route("/clients/{client_id:name}", show, methods=["GET"]),
        Route("/clients/{client_id:name}", kick, methods=["DELETE"]),
    ]
