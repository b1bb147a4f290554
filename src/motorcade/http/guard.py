"""Who may ask. Stands before every route.

    Host      on loopback only names of this machine are answered, so that a web page cannot reach the node through a
              name of its own that it points to 127.0.0.1 (DNS rebinding)
    Origin    a browser's request that changes something must come from a page of this node
    token     where one is set, everything but health wants `Authorization: Bearer TOKEN`

Without a token only loopback may be listened on; `HttpServer` sees to that.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from motorcade.http.answers import refusal

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/status"})  #: for probes, which have no token; they tell no secrets
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
READING = frozenset({"GET", "HEAD", "OPTIONS"})


class Guard:
    """ASGI middleware. `hosts` are the only names answered to; None is any."""

    def __init__(self, app: ASGIApp, token: str = "", hosts: Iterable[str] | None = None) -> None:
        self._app = app
        self._token = token.encode()
        self._hosts = None if hosts is None else LOCAL_NAMES | set(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or answer it here."""
        if scope["type"] != "http":
            return
        answer = self._objection(scope["method"], scope["path"], Headers(scope=scope)) or self._app
        await answer(scope, receive, send)

    def _objection(self, method: str, path: str, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        if self._hosts is not None and _name_of(host) not in self._hosts:
            return refusal(HTTPStatus.FORBIDDEN, "this node does not answer to that name; ask for localhost")
        origin = headers.get("origin")
        if origin is not None and method not in READING and not _is_page_of(host, origin):
            return refusal(HTTPStatus.FORBIDDEN, "a page of another site may not change anything here")
        if self._token and path not in OPEN_PATHS and not self._knows_token(headers.get("authorization", "")):
            message = "give the token of this node: Authorization: Bearer TOKEN"
            return refusal(HTTPStatus.UNAUTHORIZED, message, {"WWW-Authenticate": "Bearer"})
        return None

    def _knows_token(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        # Compared in constant time, so that the answer's delay tells nothing about the token.
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token)


def _is_page_of(host: str, origin: str) -> bool:
    """Whether an Origin header names this site."""
    try:
        site = urlsplit(origin).netloc
    except ValueError:
        return False
    return bool(site) and site == host


def _name_of(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
