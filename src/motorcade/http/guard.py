"""Authorisation of requests. Comes before every route.

    Host      on loopback only names of this machine are answered, so that a web page cannot reach the node through a
              name of its own that it points to 127.0.0.1 (DNS rebinding); a probe need not name one, as every page does
    Origin    a browser's request that changes something must come from a page of this node
    token     everything but health wants `Authorization: Bearer TOKEN`; where the node has made the token itself, on
              loopback, metrics are open too

Without a token, which must be configured, only loopback may be listened on; `HttpServer` sees to that. A caller
without one may do everything but take access control away (`has_token`).
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from motorcade.http.answers import refusal

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/status"})  #: for probes, which have no token; they tell no secrets
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
READING = frozenset({"GET", "HEAD", "OPTIONS"})


class Token(NamedTuple):
    """The bearer token that callers must send."""

    text: str = ""
    file: Path | None = None  #: where the node has written it itself
    required: bool = True  #: false: they need not


OPEN = Token(required=False)  #: only for loopback


def has_token(request: Request) -> bool:
    """Return True if the caller has sent the token."""
    return request.scope.get("state", {}).get("token") is True


class Guard:
    """ASGI middleware. `hosts` are the only names answered to; None is any."""

    def __init__(self, app: ASGIApp, token: Token, hosts: Iterable[str] | None = None) -> None:
        self._app = app
        self._token = token.text.encode()
        self._required = token.required
        self._open = OPEN_PATHS if token.file is None else OPEN_PATHS | {"/metrics"}
        self._where = "" if token.file is None else f" (it is in {token.file})"
        self._hosts = None if hosts is None else LOCAL_NAMES | set(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or answer it here."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        knows = self._knows_token(headers.get("authorization", ""))
        scope.setdefault("state", {})["token"] = knows
        answer = self._objection(scope["method"], scope["path"], headers, knows=knows) or self._app
        await answer(scope, receive, send)

    def _objection(self, method: str, path: str, headers: Headers, *, knows: bool) -> Response | None:
        host = headers.get("host", "")
        is_probe = not host and path in OPEN_PATHS  # of a load balancer; a browser names a host
        if self._hosts is not None and not is_probe and _name_of(host) not in self._hosts:
            return refusal(HTTPStatus.FORBIDDEN, "this node does not answer to that name; ask for localhost")
        origin = headers.get("origin")
        if origin is not None and method not in READING and not _is_page_of(host, origin):
            return refusal(HTTPStatus.FORBIDDEN, "a page of another site may not change anything here")
        if self._required and path not in self._open and not knows:
            message = f"give the token of this node{self._where}: Authorization: Bearer TOKEN"
            return refusal(HTTPStatus.UNAUTHORIZED, message, {"WWW-Authenticate": "Bearer"})
        return None

    def _knows_token(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        # Compared in constant time, so that the answer's delay tells nothing about the token.
        return (
            bool(self._token)
            and scheme.lower() == "bearer"
            and hmac.compare_digest(given.strip().encode(), self._token)
        )


def _is_page_of(host: str, origin: str) -> bool:
    """Return True if an Origin header names this site."""
    try:
        site = urlsplit(origin).netloc
    except ValueError:
        return False
    return bool(site) and site == host


def _name_of(host: str) -> str:
    """Return the name in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
