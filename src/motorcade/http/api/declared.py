"""`/queues`, `/streams`, `/captures`: what operators declare, in one way for all.

A plugin that is loaded while the node runs is served at once: its service is looked up with each request.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from motorcade.client_control import PAGE
from motorcade.control import DECLARED, MAX_FOUND, Control, FoundPage
from motorcade.core.words import as_text
from motorcade.extension.declared import FoundMessage
from motorcade.http.answers import answer, body, listing, number, told
from motorcade.http.bridge import Bridge

FROM_THE_START: Final = 0  #: positions begin with 1
FARTHEST: Final = 2**63 - 1


def routes(control: Control, bridge: Bridge) -> list[Route]:
    """Return the routes of all nouns. Without its plugin, a noun answers 404 and says which one to load."""
    return [route for plural in DECLARED for route in _noun(plural, control, bridge)]


def _noun(plural: str, control: Control, bridge: Bridge) -> list[Route]:
    async def index(_request: Request) -> Response:
        return listing([_shown(view) for view in await bridge.call_slow(control.declarations, plural)])

    async def show(request: Request) -> Response:
        return answer(_shown(await bridge.call_slow(control.declaration, plural, request.path_params["name"])))

    async def create(request: Request) -> Response:
        given = await body(request, dict[str, Any])
        view = await bridge.call_slow(control.declare, plural, request.path_params["name"], given)
        return answer(_shown(view), HTTPStatus.CREATED)

    async def change(request: Request) -> Response:
        """Change options: PUT replaces all, PATCH those that are given."""
        given = await body(request, dict[str, Any])
        keep = request.method == "PATCH"
        name = request.path_params["name"]
        return answer(_shown(await bridge.call_slow(control.redeclare, plural, name, given, keep=keep)))

    async def delete(request: Request) -> Response:
        name = request.path_params["name"]
        await bridge.call_slow(control.remove_declared, plural, name)
        return answer({"name": name, "result": "deleted"})

    async def messages(request: Request) -> Response:
        name = request.path_params["name"]
        return message_page(await bridge.call_slow(control.read_declared, plural, name, *message_range(request)))

    one = f"/{plural}/{{name:name}}"  # a name with a slash (%2F) is refused by its plugin, in words
    return [
        Route(f"/{plural}", told(index), methods=["GET"]),
        Route(f"{one}/messages", told(messages), methods=["GET"]),
        Route(one, told(show), methods=["GET"]),
        Route(one, told(create), methods=["POST"]),
        Route(one, told(change), methods=["PUT", "PATCH"]),
        Route(one, told(delete), methods=["DELETE"]),
    ]


def _shown(view: msgspec.Struct) -> dict[str, Any]:
    """Return a view in the shape that all have: name and origin, options as they are sent, figures."""
    shown: dict[str, Any] = msgspec.to_builtins(view)
    options = shown.pop("options", {})
    return {"name": shown.pop("name"), "origin": shown.pop("origin"), **options, **shown}


def message_range(request: Request) -> tuple[int, int]:
    """Return `?after&limit` of a request for messages."""
    return number(request, "after", FROM_THE_START, 0, FARTHEST), number(request, "limit", PAGE, 1, MAX_FOUND)


def message_page(page: FoundPage) -> Response:
    """Answer a page of messages; `meta.count` is the number on this page."""
    cursor = None if page.cursor is None else str(page.cursor)
    return listing([_message(found) for found in page.messages], cursor=cursor)


def _message(found: FoundMessage) -> dict[str, Any]:
    """Return a message as JSON shows it."""
    payload, encoding = as_text(found.payload)
    return {
        "position": found.position,
        "topic": found.topic,
        "payload": payload,
        "encoding": encoding,
        "time": found.time,
        "publisher": found.publisher,
        "guid": found.guid,
        "properties": found.properties,
    }
