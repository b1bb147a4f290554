"""The application: routes, who may ask, and how errors are told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.middleware import Middleware

from motorcade.control import Control
from motorcade.http import api, health, metrics
from motorcade.http.answers import HANDLERS
from motorcade.http.bridge import Bridge
from motorcade.http.guard import OPEN, Guard, Token
from motorcade.http.paths import Segments


def make_app(
    control: Control, loop: asyncio.AbstractEventLoop, token: Token = OPEN, hosts: Iterable[str] | None = None
) -> Starlette:
    """Make the application for a broker that runs in `loop`. `hosts`: names to answer to, None is any."""
    bridge = Bridge(loop)
    return Starlette(
        routes=[*health.routes(control, bridge), *metrics.routes(control, bridge), *api.routes(control, bridge)],
        middleware=[Middleware(Segments), Middleware(Guard, token=token, hosts=hosts)],
        exception_handlers=HANDLERS,
    )
