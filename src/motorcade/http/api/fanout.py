"""`/fanout` and `/vehicles`: requests, what became of each of their messages, and why a vehicle has not got its own."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from motorcade.control import MAX_FOUND, Control
from motorcade.core.receipt import State
from motorcade.core.words import nearest
from motorcade.http.answers import Endpoint, answer, body, first_of, listing, page_of, told
from motorcade.http.bridge import Bridge

if TYPE_CHECKING:
    from motorcade.plugins.fanout.views import Fanout

MAX_BATCH: Final = 2 * 1024 * 1024  #: bytes of a batch in JSON; larger ones go over MQTT, in two steps
MAX_TARGETS: Final = 10_000  #: on a page: their states are read from the rest of the stream, again for each page

Row = tuple[str, str, Endpoint]  #: path, method, who answers


class SendRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A batch, as on the topic `$SDV-FANOUT`; the request id is in the path."""

    ids: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    data: str
    encoding: Literal["utf8", "base64"] = "utf8"
    expires_in: float | None = None
    priority: int = 0
    mode: Literal["replace", "append"] | None = None
    batch_id: str | None = None

    def payload(self) -> bytes:
        """Return the data as vehicles get it."""
        if self.encoding == "utf8":
            return self.data.encode()
        try:
            return b64decode(self.data, validate=True)
        except ValueError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"data: not base64: {error}") from error


def routes(control: Control, bridge: Bridge) -> list[Route]:
    """Return the routes. A node without the plugin answers 404 and says which one to load."""
    one = "/fanout/requests/{request_id:name}"  # an id with a slash is no id; the fan-out says so
    vehicle = "/vehicles/{vin:name}"

    def ask(parameter: str, question: Callable[[Fanout, str], Awaitable[object]]) -> Endpoint:
        async def asked(request: Request) -> Response:
            name = request.path_params[parameter]
            return answer(await bridge.call_slow(control.ask_fanout, lambda fanout: question(fanout, name)))

        return asked

    rows: tuple[Row, ...] = (
        *_requests(control, bridge, one),
        (one, "GET", ask("request_id", lambda fanout, request_id: fanout.status(request_id))),
        (f"{one}/cancel", "POST", ask("request_id", lambda fanout, request_id: fanout.cancel(request_id))),
        (f"{one}/pause", "POST", ask("request_id", lambda fanout, request_id: fanout.pause(request_id))),
        (f"{one}/resume", "POST", ask("request_id", lambda fanout, request_id: fanout.resume(request_id))),
        *_collections(control, bridge),
        (f"{vehicle}/why", "GET", ask("vin", lambda fanout, vin: fanout.why(vin))),
        (vehicle, "GET", ask("vin", lambda fanout, vin: fanout.vehicle(vin))),
    )
    return [Route(path, told(endpoint), methods=[method]) for path, method, endpoint in rows]


def _requests(control: Control, bridge: Bridge, one: str) -> list[Row]:
    async def index(request: Request) -> Response:
        """Answer `?limit&cursor`, in the order of ids; pass `meta.cursor` to get the next page, until it is null."""
        cursor, limit = page_of(request, MAX_FOUND)
        found = await bridge.call_slow(control.ask_fanout, lambda fanout: fanout.requests(cursor, limit + 1))
        return first_of(found, limit, lambda view: view.request_id)

    async def targets(request: Request) -> Response:
        """Answer `?state&limit&cursor`; `meta.count` is the number on this page."""
        request_id, state = request.path_params["request_id"], _state(request)
        cursor, limit = page_of(request, MAX_TARGETS)
        found = await bridge.call_slow(
            control.ask_fanout, lambda fanout: fanout.targets(request_id, state, cursor, limit)
        )
        # Not one more than wanted, to see whether there is one: the fan-out remembers the place of the last one it has
        # given, and has to look for that of any other. So the last page may be empty.
        return listing(found, cursor=found[-1].delivery_id if len(found) == limit else None)

    async def send(request: Request) -> Response:
        """Answer 202 when the batch is as durable as the store promises; which vehicles got it is told later."""
        batch = await body(request, SendRequest, MAX_BATCH)
        request_id, data = request.path_params["request_id"], batch.payload()
        accepted = await bridge.call_slow(
            control.ask_fanout,
            lambda fanout: fanout.send(
                batch.ids,
                request_id,
                data,
                expires_in=batch.expires_in,
                priority=batch.priority,
                mode=batch.mode,
                batch_id=batch.batch_id,
            ),
        )
        return answer(accepted, HTTPStatus.ACCEPTED)

    return [
        ("/fanout/requests", "GET", index),
        (f"{one}/targets", "GET", targets),
        (f"{one}/send", "POST", send),
    ]


def _collections(control: Control, bridge: Bridge) -> list[Row]:
    async def start(_request: Request) -> Response:
        """Begin a collection and answer 202; ask by GET how far it is."""
        return answer(await bridge.call(control.start_collection), HTTPStatus.ACCEPTED)

    async def show(_request: Request) -> Response:
        return answer(await bridge.call(control.collection))

    return [("/fanout/gc", "POST", start), ("/fanout/gc", "GET", show)]


def _state(request: Request) -> State | Literal["pending"] | None:
    text = request.query_params.get("state", "")
    if not text:
        return None
    if text == "pending":  # any that is not final
        return "pending"
    if text not in list(State):
        known = (*map(str, State), "pending")
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"state: there is no {text!r}{nearest(text, known)}")
    return State(text)
