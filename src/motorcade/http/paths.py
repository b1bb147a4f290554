"""Names in paths: one segment each, a slash within a name is `%2F`.

Servers hand out paths decoded, where `a%2Fb` and `a/b` are the same, so a name with a slash would hide what comes after
it (`/clients/{id}/…`). Routes are therefore matched against the segments as they were sent; `{name:name}` is decoded
after that.
"""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import quote, unquote, unquote_to_bytes

from starlette.convertors import Convertor, register_url_convertor
from starlette.types import ASGIApp, Receive, Scope, Send

from motorcade.http.answers import refusal


class NameConvertor(Convertor[str]):
    """One segment. It may be empty: the message of the resource says more than that of the router."""

    regex = "[^/]*"

    def convert(self, value: str) -> str:
        return unquote(value, errors="strict")

    def to_string(self, value: str) -> str:
        return quote(value, safe="")


register_url_convertor("name", NameConvertor())


class Segments:
    """ASGI middleware: `scope["path"]` keeps slashes within segments as `%2F`. Comes before all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            raw = scope.get("raw_path") or quote(scope["path"]).encode()
            try:
                scope = {**scope, "path": _normal(raw)}
            except UnicodeDecodeError:
                app = refusal(HTTPStatus.BAD_REQUEST, "the path is not UTF-8")
        await app(scope, receive, send)


def _normal(raw: bytes) -> str:
    """Return the path with every segment escaped in one way, however it was sent."""
    return "/".join(quote(unquote_to_bytes(segment).decode(), safe="") for segment in raw.split(b"/"))
