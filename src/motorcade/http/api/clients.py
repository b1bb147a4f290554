"""`/clients`: who is there, one client in full, and sending one away."""

from __future__ import annotations

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from motorcade.control import MOST_CLIENTS, PAGE, Control
from motorcade.http.answers import answer, listing
from motorcade.http.bridge import Bridge


def routes(control: Control, bridge: Bridge) -> list[Route]:
    """A client id may contain slashes: written as `%2F` or as they are."""

    async def index(request: Request) -> Response:
        """`?limit&cursor&search`; pass `meta.cursor` to get the next page, until it is null."""
        query = request.query_params
        cursor, search = query.get("cursor", ""), query.get("search", "")
        page = await bridge.call(control.clients, cursor, _limit(query.get("limit", str(PAGE))), search)
        return listing(page.clients, count=page.count, cursor=page.cursor)

    async def show(request: Request) -> Response:
        return answer(await bridge.call(control.client, request.path_params["client_id"]))

    async def kick(request: Request) -> Response:
        client_id = request.path_params["client_id"]
        return answer({"client_id": client_id, "result": await bridge.call(control.kick, client_id)})

    return [
        Route("/clients", index, methods=["GET"]),
        Route("/clients/{client_id:path}", show, methods=["GET"]),
        Route("/clients/{client_id:path}", kick, methods=["DELETE"]),
    ]


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_CLIENTS):
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"limit must be a number from 1 to {MOST_CLIENTS}")
    return int(text)
