"""The application: routes, who may ask, and how errors are told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from motorcade.control import Control, NodeState
from motorcade.http import api, health, metrics
from motorcade.http.answers import HANDLERS, RETRY_AFTER, refusal
from motorcade.http.bridge import Bridge
from motorcade.http.guard import OPEN, Guard, Token
from motorcade.http.paths import Segments


class Started:
    """ASGI middleware: while a node joins its cluster, the API tells of nodes and nothing else."""

    def __init__(self, app: ASGIApp, control: Control) -> None:
        self._app = app
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and self._control.state is NodeState.STARTING:
            path = scope["path"]
            if path.startswith("/api/") and not (scope["method"] == "GET" and path.startswith("/api/v1/node")):
                app = refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the node is starting", {"Retry-After": RETRY_AFTER})
        await app(scope, receive, send)


def make_app(
    control: Control, loop: asyncio.AbstractEventLoop, token: Token = OPEN, hosts: Iterable[str] | None = None
) -> Starlette:
    """Make the application for a broker that runs in `loop`. `hosts`: names to answer to, None is any."""
    bridge = Bridge(loop)
    return Starlette(
        routes=[*health.routes(control, bridge), *metrics.routes(control, bridge), *api.routes(control, bridge)],
        middleware=[
            Middleware(Segments),
            Middleware(Guard, token=token, hosts=hosts),
            Middleware(Started, control=control),
        ],
        exception_handlers=HANDLERS,
    )
