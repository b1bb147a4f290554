"""Talking to a running node over its HTTP control port."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from motorcade.cli import _output
from motorcade.core.errors import MotorcadeError
from motorcade.http.token import find_token

Http = Annotated[
    str, typer.Option("--http", metavar="HOST:PORT", envvar="MOTORCADE_HTTP", help="Control port of the node.")
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="MOTORCADE_TOKEN",
        help="Bearer token, or file://PATH of a file with it. \\[found, if this user runs the node here]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
DEFAULT = "127.0.0.1:18083"
DATA = "./motorcade-data"  #: where a node of this folder keeps its files unless told otherwise
_PATIENCE = 30.0  # seconds; loading a plugin may take a while
_PAGE = 500  # entries per request


class ControlError(MotorcadeError):
    """The node could not be reached, or said no; `code` is its word for that (`NOT_FOUND`)."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(f"{message} ({code})" if code else message)
        self.message = message
        self.code = code


class UnreachableError(ControlError):
    """Nothing answers at that address."""


class ControlClient:
    """The verbs of one node."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address = address
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        token = _read_token(token or "") or find_token(
            address, os.environ, [Path(os.environ.get("MOTORCADE_DATA__DIR", DATA))]
        )
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        # Never through a proxy: the control port is on loopback or in the operator's own network.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Send one request below `/api/v1`. Raises `ControlError` with the node's message."""
        request = urllib.request.Request(
            f"http://{self.address}/api/v1/{path}",
            method=method,
            data=json.dumps(body).encode() if body is not None else None,
            headers=self._headers,
        )
        try:
            with self._open(request, timeout=_PATIENCE) as answer:
                return _decoded(answer.read(), self.address)
        except urllib.error.HTTPError as error:
            raise _refusal(error) from error
        except urllib.error.URLError as error:
            raise UnreachableError(self._unreachable(error.reason)) from error
        except (OSError, ValueError) as error:
            raise UnreachableError(self._unreachable(error)) from error

    def _unreachable(self, cause: object) -> str:
        text = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
        return (
            f"no node answers at http://{self.address} ({text}); start one with `motorcade serve`,"
            " or say where it is with --http HOST:PORT"
        )

    def pages(
        self, path: str, limit: int | None = None, *, size: int = _PAGE, key: str = "cursor", **query: object
    ) -> Iterator[Any]:
        """Yield the entries of a list, at most `limit`, by requests for `size` of them; `key` is where to go on.

        Nodes whose entries are missing are told on standard error, once.
        """
        silent: set[str] = set()
        left = limit
        while left is None or left > 0:
            query["limit"] = size if left is None else min(size, left)
            answer = self.call("GET", f"{path}?{urlencode(query)}")
            for node, why in answer["meta"].get("unanswered", {}).items():
                if node not in silent:
                    print(f"no answer from node {node}: {why}; what it has is missing", file=sys.stderr)
                    silent.add(node)
            yield from answer["data"]
            if (cursor := answer["meta"].get("cursor")) is None:
                return
            query[key] = cursor
            if left is not None:
                left -= len(answer["data"])


def _read_token(text: str) -> str:
    """Return the token that is meant: `file://PATH` is a file with it, as in the configuration."""
    if not text.startswith("file://"):
        return text.strip()
    path = Path(text.removeprefix("file://"))
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ControlError(f"--token (MOTORCADE_TOKEN): cannot read {path}: {why}") from None


@dataclass(frozen=True)
class NodeFlags:
    """The options of every verb that asks a node: which one, and how its answer is printed."""

    http: Http = DEFAULT
    token: Token = None
    as_json: AsJson = False

    @property
    def control(self) -> ControlClient:
        return ControlClient(self.http, self.token)

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Send one request."""
        return self.control.call(method, path, body)

    def print(self, answer: Any, text: Callable[[Any], None]) -> None:
        """Print an answer as JSON, or for people by `text`."""
        if self.as_json:
            _output.print_json(answer)
        else:
            text(answer)


def name(text: str) -> str:
    """Quote a client id or plugin name as one segment of a path."""
    try:
        return quote(text, safe="")
    except UnicodeEncodeError as error:
        raise typer.BadParameter(f"{text!r} is not UTF-8; no name is written so") from error


def _decoded(body: bytes, address: str) -> Any:
    if not body:
        return None
    try:
        return json.loads(body)
    except ValueError as error:
        raise ControlError(f"what answers at http://{address} is not a Motorcade node: no JSON came back") from error


def _refusal(error: urllib.error.HTTPError) -> ControlError:
    try:
        answer = json.loads(error.read())
        message = str(answer["message"])
        if error.code == HTTPStatus.UNAUTHORIZED:
            message += "; commands take it with --token or MOTORCADE_TOKEN"
        return ControlError(message, str(answer["code"]))
    except (ValueError, KeyError, TypeError):
        return ControlError(f"the node answered {error.code} {error.reason} to {error.url}")
