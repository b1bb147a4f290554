"""`/clients`: who is there, one client in full, and sending one away."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from motorcade.control import MAX_CLIENTS, Control
from motorcade.http.answers import answer, listing, page_of
from motorcade.http.bridge import Bridge


def routes(control: Control, bridge: Bridge) -> list[Route]:
    """Return the routes. A client id is one segment of the path: a slash in it is written `%2F`."""

    async def index(request: Request) -> Response:
        """Answer `?limit&cursor&search`; pass `meta.cursor` to get the next page, until it is null."""
        cursor, limit = page_of(request, MAX_CLIENTS)
        page = await bridge.call(control.clients, cursor, limit, request.query_params.get("search", ""))
        return listing(page.clients, count=page.count, cursor=page.cursor)

    async def show(request: Request) -> Response:
        return answer(await bridge.call(control.client, request.path_params["client_id"]))

    async def kick(request: Request) -> Response:
        client_id = request.path_params["client_id"]
        return answer({"client_id": client_id, "result": await bridge.call(control.kick, client_id)})

    return [
        Route("/clients", index, methods=["GET"]),
        Route("/clients/{client_id:name}", show, methods=["GET"]),
        Route("/clients/{client_id:name}", kick, methods=["DELETE"]),
    ]
