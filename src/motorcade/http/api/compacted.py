"""`/compacted/exclusive` and `/compacted/shared`: queues that keep the last value of each key.

They are not declared, so there is nothing to create or to change. Both forms have the same routes.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from motorcade.clock import time
from motorcade.control import MAX_FOUND, Control
from motorcade.core.moment import seconds_of
from motorcade.core.words import nearest
from motorcade.extension.compacted import CompactedKind
from motorcade.extension.declared import BadOptionsError, read_options
from motorcade.http.answers import answer, body, first_of, page_of, told
from motorcade.http.api.declared import message_page, message_range
from motorcade.http.bridge import Bridge


class Rewind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of a rewind: one of `to`, `since` and `ago`."""

    to: Annotated[int, msgspec.Meta(ge=0)] | None = None  #: number of the next message
    since: Annotated[float, msgspec.Meta(ge=0)] | str | None = None  #: seconds since the epoch, or ISO 8601
    ago: Annotated[float, msgspec.Meta(ge=0)] | None = None  #: seconds, by the clock of this node
    consumer: str = ""  #: client id; one of a shared queue must be named
    preview: bool = False  #: only tell

    def place(self) -> tuple[int | None, float | None]:
        """Return number and time, of which one is None."""
        given = [name for name in ("to", "since", "ago") if getattr(self, name) is not None]
        if len(given) != 1:
            raise BadOptionsError(
                f"rewind: {' and '.join(given) or 'nothing'} given; say one of: to (the number that comes next), "
                "since (a time), ago (seconds)"
            )
        if self.ago is not None:
            return None, max(0.0, time() - self.ago)
        if isinstance(self.since, str):
            return None, _moment(self.since)
        return self.to, self.since


def _moment(text: str) -> float:
    seconds = seconds_of(text)
    if seconds is None:
        raise BadOptionsError(
            f"rewind: since = {text[:40]!r}: must be seconds since the epoch, as a number, or an ISO 8601 time: "
            "'2026-11-15T08:30:00Z'"
        )
    return seconds


def routes(control: Control, bridge: Bridge) -> list[Route]:
    """Return the routes. A node without the plugin answers 404 and says which one to load."""

    async def index(request: Request) -> Response:
        """Answer `?limit&cursor`, in the order of names; pass `meta.cursor` to get the next page, until it is null."""
        form = _form(request)
        cursor, limit = page_of(request, MAX_FOUND)
        found = await bridge.call_slow(control.ask_compacted, lambda compacted: compacted.list(form, cursor, limit + 1))
        return first_of([_line(view) for view in found], limit, lambda line: line["name"])

    async def show(request: Request) -> Response:
        form, name = _queue(request)
        return answer(await bridge.call_slow(control.ask_compacted, lambda compacted: compacted.show(form, name)))

    async def messages(request: Request) -> Response:
        form, name = _queue(request)
        return message_page(await bridge.call_slow(control.read_compacted, form, name, *message_range(request)))

    async def rewind(request: Request) -> Response:
        form, name = _queue(request)
        asked = read_options("rewind", Rewind, await body(request, dict[str, Any]))
        to, since = asked.place()
        return answer(
            await bridge.call_slow(
                control.ask_compacted,
                lambda compacted: compacted.rewind(
                    form, name, asked.consumer, to=to, since=since, preview=asked.preview
                ),
            )
        )

    async def delete(request: Request) -> Response:
        form, name = _queue(request)
        await bridge.call_slow(control.ask_compacted, lambda compacted: compacted.delete(form, name))
        return answer({"kind": form, "name": name, "result": "deleted"})

    one = "/compacted/{form:name}/{name:name}"  # no name has a slash; the plugin says that there is no such queue
    return [
        Route("/compacted/{form:name}", told(index), methods=["GET"]),
        Route(f"{one}/messages", told(messages), methods=["GET"]),
        Route(f"{one}/rewind", told(rewind), methods=["POST"]),
        Route(one, told(show), methods=["GET"]),
        Route(one, told(delete), methods=["DELETE"]),
    ]


def _form(request: Request) -> CompactedKind:
    text = request.path_params["form"]
    if text not in list(CompactedKind):
        raise HTTPException(
            HTTPStatus.NOT_FOUND,
            f"there are no compacted queues of the kind {text!r}{nearest(text, map(str, CompactedKind))}",
        )
    return CompactedKind(text)


def _queue(request: Request) -> tuple[CompactedKind, str]:
    name = request.path_params["name"]
    if not name:
        raise BadOptionsError("a compacted queue has a name: a client id, or what follows `$SCQ/`")
    return _form(request), name


def _line(view: msgspec.Struct) -> dict[str, Any]:
    """Return a view for a list: without what only the view of one queue has."""
    shown: dict[str, Any] = msgspec.to_builtins(view)
    return {name: value for name, value in shown.items() if name not in ("oldest", "consuming")}
