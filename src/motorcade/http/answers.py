"""How answers look: JSON made by msgspec, errors as `{"code", "message"}`, request bodies within a bound."""

from __future__ import annotations

from http import HTTPStatus
from typing import TypeVar

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from motorcade.control import NotFoundError
from motorcade.core.errors import MotorcadeError
from motorcade.extension.declared import UnknownError
from motorcade.http.bridge import BrokerBusyError

T = TypeVar("T")

MAX_BODY = 64 * 1024  #: bytes of a request's body; larger ones are answered with 413
RETRY_AFTER = "5"  #: seconds after which a client may ask again

log = structlog.stdlib.get_logger("motorcade.http")

_CODES = {
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "PAYLOAD_TOO_LARGE",
    HTTPStatus.SERVICE_UNAVAILABLE: "UNAVAILABLE",
}


def answer(value: object, status: int = 200) -> Response:
    """A value as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def listing(data: list[T], *, count: int | None = None, cursor: str | None = None) -> Response:
    """A list, with how many there are in all and where the next page begins."""
    meta = {"count": len(data) if count is None else count, "cursor": cursor}
    return answer({"data": data, "meta": meta})


def refusal(status: HTTPStatus, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error."""
    code = _CODES.get(status, status.name)
    body = msgspec.json.encode({"code": code, "message": message})
    return Response(body, status.value, headers, media_type="application/json")


async def body(request: Request, kind: type[T]) -> T:
    """The checked body of a request; an empty one counts as `{}`."""
    raw = bytearray()
    try:
        async for part in request.stream():
            raw += part
            if len(raw) > MAX_BODY:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body may have {MAX_BODY} bytes")
    except ClientDisconnect as error:  # nobody hears the answer, but it is not our failure either
        raise HTTPException(HTTPStatus.BAD_REQUEST, "the body is cut off") from error
    if raw and request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
    try:
        return msgspec.json.decode(bytes(raw) or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"the body is not what is expected: {error}") from error


# -- from exceptions to answers


async def on_http_error(_request: Request, error: Exception) -> Response:
    """Raised by the routes, or by the router for an unknown path or method."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for it
    return refusal(HTTPStatus(error.status_code), error.detail, dict(error.headers or {}))


async def on_refused(_request: Request, error: Exception) -> Response:
    """The broker said no, and why."""
    status = HTTPStatus.NOT_FOUND if isinstance(error, NotFoundError | UnknownError) else HTTPStatus.CONFLICT
    return refusal(status, str(error))


async def on_busy(_request: Request, error: Exception) -> Response:
    """The broker did not answer."""
    return refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error), {"Retry-After": RETRY_AFTER})


async def on_bug(request: Request, error: Exception) -> Response:
    """Something nobody thought of: the log has it (the traceback by uvicorn), the caller hears that it happened."""
    log.error("http_request_failed", method=request.method, path=request.url.path, error=repr(error))
    return refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "something went wrong; the log of the node says what")


HANDLERS = {HTTPException: on_http_error, MotorcadeError: on_refused, BrokerBusyError: on_busy, Exception: on_bug}
