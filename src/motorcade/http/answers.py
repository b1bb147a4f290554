"""Responses and requests: JSON made by msgspec, errors as `{"code", "message"}`, bodies within a bound."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from http import HTTPStatus
from typing import TypeVar

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from motorcade.client_control import PAGE, NotFoundError
from motorcade.core.errors import MotorcadeError
from motorcade.core.redaction import without_secrets
from motorcade.extension.ask_all import UnansweredError
from motorcade.extension.declared import ConflictError, UnknownError
from motorcade.http.bridge import BrokerBusyError
from motorcade.storage.ports import StoreError

T = TypeVar("T")

Endpoint = Callable[[Request], Awaitable[Response]]

MAX_BODY = 64 * 1024  #: bytes of a request's body; larger ones are answered with 413
NO_ROUTE = "there is nothing at this path; a slash within a name is written %2F"
RETRY_AFTER = "5"  #: seconds after which a client may ask again

log = structlog.stdlib.get_logger("motorcade.http")

_CODES = {
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "PAYLOAD_TOO_LARGE",
    HTTPStatus.SERVICE_UNAVAILABLE: "UNAVAILABLE",
}


def answer(value: object, status: int = 200) -> Response:
    """Answer a value as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def listing(
    data: Sequence[T], *, count: int | None = None, cursor: str | None = None, unanswered: dict[str, str] | None = None
) -> Response:
    """Answer a list, with the total count, the cursor of the next page, and the nodes whose part is missing."""
    meta: dict[str, object] = {"count": len(data) if count is None else count, "cursor": cursor}
    if unanswered:
        meta["unanswered"] = unanswered
    return answer({"data": data, "meta": meta})


def page_of(request: Request, most: int) -> tuple[str, int]:
    """Return `?cursor&limit`: where a page begins, and how many entries it may have."""
    return request.query_params.get("cursor", ""), number(request, "limit", PAGE, 1, most)


def first_of(found: Sequence[T], limit: int, key: Callable[[T], str]) -> Response:
    """Answer the first `limit` of at most one more, with the cursor of the next page if there is one."""
    cursor = key(found[limit - 1]) if len(found) > limit else None
    return listing(found[:limit], cursor=cursor)


def refusal(status: HTTPStatus, message: str, headers: dict[str, str] | None = None) -> Response:
    """Answer an error."""
    code = _CODES.get(status, status.name)
    body = msgspec.json.encode({"code": code, "message": without_secrets(message)})
    return Response(body, status.value, headers, media_type="application/json")


async def body(request: Request, kind: type[T], most: int = MAX_BODY) -> T:
    """Read and check the body of a request; an empty one counts as `{}`."""
    raw = bytearray()
    try:
        async for part in request.stream():
            raw += part
            if len(raw) > most:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body may have {most} bytes")
    except ClientDisconnect as error:  # the answer reaches no one, but it is not our failure
        raise HTTPException(HTTPStatus.BAD_REQUEST, "the body is cut off") from error
    if raw and request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
    try:
        return msgspec.json.decode(bytes(raw) or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"the body is not what is expected: {error}") from error


def number(request: Request, name: str, default: int, least: int, most: int) -> int:
    """Read a number of the query, within its bounds."""
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and least <= int(text) <= most):
        raise HTTPException(
            HTTPStatus.BAD_REQUEST, f"{name} must be a number from {least} to {most}, not {text[:40]!r}"
        )
    return int(text)


# -- from exceptions to answers


def told(endpoint: Endpoint) -> Endpoint:
    """Answer errors of a plugin: 400, but 404 and 409 as everywhere, and 503 for the store."""

    @wraps(endpoint)
    async def told_(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (NotFoundError, UnknownError, ConflictError):
            raise  # 404 and 409, as everywhere
        except StoreError as error:
            return refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except MotorcadeError as error:
            return refusal(HTTPStatus.BAD_REQUEST, str(error))

    return told_


async def on_http_error(_request: Request, error: Exception) -> Response:
    """Answer what the routes raise, or the router for an unknown path or method."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for it
    status = HTTPStatus(error.status_code)
    message = NO_ROUTE if error.detail == HTTPStatus.NOT_FOUND.phrase else error.detail
    return refusal(status, message, dict(error.headers or {}))


async def on_refused(_request: Request, error: Exception) -> Response:
    """Answer a refusal of the broker, with its reason."""
    if isinstance(error, UnansweredError):
        return refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error), {"Retry-After": RETRY_AFTER})
    status = HTTPStatus.NOT_FOUND if isinstance(error, NotFoundError | UnknownError) else HTTPStatus.CONFLICT
    return refusal(status, str(error))


async def on_busy(_request: Request, error: Exception) -> Response:
    """Answer that the broker did not respond in time."""
    return refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error), {"Retry-After": RETRY_AFTER})


async def on_bug(request: Request, error: Exception) -> Response:
    """Answer an unexpected error: the log has it (the traceback by uvicorn), the caller hears that it happened."""
    log.error("http_request_failed", method=request.method, path=request.url.path, error=repr(error))
    return refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "something went wrong; the log of the node says what")


HANDLERS = {HTTPException: on_http_error, MotorcadeError: on_refused, BrokerBusyError: on_busy, Exception: on_bug}
