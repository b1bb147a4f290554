"""`/store`: what is in the store of the node, and copies of it."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from motorcade.control import Control
from motorcade.http.answers import answer, body
from motorcade.http.bridge import Bridge


class BackupRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request for a backup."""

    to: str  #: absolute path of a directory on the node's machine; it must not exist


def routes(control: Control, bridge: Bridge) -> list[Route]:
    """Return the routes. A backup may take long: POST starts it, GET tells its state until it is not `running`."""

    async def show(_request: Request) -> Response:
        return answer(await bridge.call_slow(control.store_view))

    async def start(request: Request) -> Response:
        wanted = await body(request, BackupRequest)
        return answer(await bridge.call(control.start_backup, wanted.to), HTTPStatus.ACCEPTED)

    async def progress(_request: Request) -> Response:
        return answer(await bridge.call(control.backup))

    return [
        Route("/store", show, methods=["GET"]),
        Route("/store/backup", start, methods=["POST"]),
        Route("/store/backup", progress, methods=["GET"]),
    ]
