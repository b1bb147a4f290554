"""`/plugins`: what runs, what could run, loading and unloading."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from motorcade.control import Control
from motorcade.http.answers import answer, body
from motorcade.http.bridge import Bridge
from motorcade.http.guard import has_token

ACCESS: Final = "access"  #: the plugin that guards the node


class LoadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request to load a plugin."""

    path: str | None = None  #: file or folder on the node's machine; None: an installed plugin
    config: dict[str, Any] = {}


def routes(control: Control, bridge: Bridge) -> list[Route]:
    """Return the routes to plugins by name."""

    async def index(_request: Request) -> Response:
        """List loaded plugins; `meta.available` has name and origin of installed ones that are not loaded."""
        running = await bridge.call(control.plugins)
        names = {plugin.name for plugin in running}
        others = {name: origin for name, origin in control.installed().items() if name not in names}
        return answer({"data": running, "meta": {"count": len(running), "cursor": None, "available": others}})

    async def load(request: Request) -> Response:
        wanted = await body(request, LoadRequest)
        name = request.path_params["name"]
        return answer(await bridge.call_slow(control.load_plugin, name, wanted.config, wanted.path), 201)

    async def unload(request: Request) -> Response:
        name = request.path_params["name"]
        if name == ACCESS and not has_token(request):
            raise HTTPException(HTTPStatus.FORBIDDEN, "taking access control away needs the token of this node")
        await bridge.call_slow(control.unload_plugin, name)
        return answer({"name": name, "result": "unloaded"})

    return [
        Route("/plugins", index, methods=["GET"]),
        Route("/plugins/{name:name}", load, methods=["POST"]),
        Route("/plugins/{name:name}", unload, methods=["DELETE"]),
    ]
