"""Every route of the control port with inputs that a caller should not send: each is answered, none with a 5xx.

The node is real and in this process; requests are raw bytes over its port, as clients that check nothing write them.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator, Sequence

from starlette.routing import BaseRoute, Mount, Route

from motorcade.core.vin import make_vin
from motorcade.http.app import make_app
from tests.support.local import LocalNode

VIN = make_vin(1)
DIGITS = "9" * 5000  #: more than Python converts
TARGETS = (
    *("%00", "%FF", "%C3%28", "%ED%A0%80", "%2F", "a%2Fb", "a/b", "", "..", "%2e%2e%2f", "%ZZ", "%", "%0A"),
    *("x" * 3000, DIGITS, "-1", "+", "%23", "%F0%9F%9A%97", VIN, "retained"),
)
QUERIES = (
    *("", "&&==;", f"limit={DIGITS}", "limit=-1", "limit=%00", "limit=%FF", "limit=%D9%A1", "limit=1&limit=x"),
    *("cursor=%00", "cursor=%ED%A0%80", "cursor=" + "x" * 9000, f"cursor={VIN}.{DIGITS}", "search=%FF"),
    *("state=%00", "state=pending", f"after={'9' * 19}", f"after={DIGITS}"),
)
HEADERS = (
    *("Origin: http://[", "Origin: \xff", "Origin: null", "Authorization: Bearer \xff", "Host: ["),
    *("Content-Type: text/plain", "Content-Type: application/json; charset=\xff", "Expect: 100-continue"),
)
NUMBERS = ("-1", "1e400", "1e308", "1.5", "9223372036854775808", "18446744073709551616", "9" * 400, "null", "[]")
TEXTS = (
    '""',
    r'"\u0000"',
    r'"/\u0000"',
    r'"\ud800"',
    '"~no_such_user/x"',
    '"/dev/null"',
    f'"{"x" * 60_000}"',
    "1",
    "{}",
)
MOMENTS = ('"9999-99-99T00:00:00Z"', '"0001-01-01T00:00:00+23:59"', '"9999-12-31T23:59:59-23:59"')


BODIES = (
    *(b"", b"[]", b"null", b"1", b"{", b"\xff\xfe", rb'{"\ud800": 1}', b'{"a":' * 15_000, b"[" * 30_000),
    b'{"config": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
)
WITHOUT_FIELDS = ("/reload", "/gc", "/cancel", "/pause", "/resume")


def fields() -> Iterator[bytes]:
    """Every field that requests have, with every value that fits badly."""
    batch = f'"ids": ["{VIN}"], "data": "x"'
    topics = '"topics": ["a/#"]'
    table = {
        (*NUMBERS,): ("to", "since", "ago", *(f'{batch}, "{name}' for name in ("expires_in", "priority"))),
        (*NUMBERS, "1"): tuple(
            f'{topics}, "{name}' for name in ("max_messages", "max_bytes", "max_age", "max_deliveries")
        ),
        (*TEXTS, *MOMENTS): (
            "to",
            "since",
            "path",
            'to": 1, "consumer',
            f'{topics}, "stream',
            f'{topics}, "url',
            "data",
        ),
        tuple(f"[{text}]" for text in TEXTS): ("topics", 'data": "x", "ids'),
        ('{"max_messages": 1e400}', '{"max_bytes": 99999999999999999999}', r'{"\u0000": 1}'): ("config",),
    }
    for values, names in table.items():
        for name, value in itertools.product(names, values):
            yield ("{" + (name if name.startswith('"') else f'"{name}') + f'": {value}}}').encode()


def walk(routes: Sequence[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str]]:
    for route in routes:
        if isinstance(route, Mount):
            yield from walk(route.routes, prefix + route.path)
        elif isinstance(route, Route):
            yield from ((method, prefix + route.path) for method in sorted(route.methods or ()) if method != "HEAD")


def requests(method: str, path: str) -> Iterator[tuple[str, str, bytes]]:
    """(request line, header, body) of everything that is asked of one route."""
    holes = re.findall(r"{[^}]*}", path)
    plain = ["exclusive" if "form" in hole else "x" for hole in holes]

    def target(names: list[str]) -> str:
        texts = iter(names)
        return re.sub(r"{[^}]*}", lambda _: next(texts), path)

    has_body = method in ("POST", "PUT", "PATCH")
    for place, name in itertools.product(range(len(holes)), TARGETS):
        yield f"{method} {target([*plain[:place], name, *plain[place + 1 :]])}", "", b"{}" if has_body else b""
    for query in QUERIES if method == "GET" else QUERIES[:3]:
        yield f"{method} {target(plain)}?{query}", "", b""
    for header in HEADERS:
        yield f"{method} {target(plain)}", header, b"{}" if has_body else b""
    for other in ("HEAD", "OPTIONS", "TRACE", "UNHEARD"):
        yield f"{other} {target(plain)}", "", b""
    for body in (*BODIES, *(() if path.endswith(WITHOUT_FIELDS) else fields())) if has_body else ():
        yield f"{method} {target(plain)}", "", body


class Web:
    """One connection to a control port, opened again when the node closes it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, line: str, header: str = "", body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of the answer."""
        given = [f"Content-Length: {len(body)}", *([header] if header else ())]
        if "Host" not in header:
            given.append(f"Host: {self.address}")
        if "Content-Type" not in header:
            given.append("Content-Type: application/json")
        if self.streams is None:
            self.streams = await asyncio.open_connection(self.host, self.port)
        reader, writer = self.streams
        writer.write("\r\n".join([f"{line} HTTP/1.1", *given, "", ""]).encode("latin-1") + body)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            while head.startswith("HTTP/1.1 100"):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            size = re.search(r"(?im)^content-length: (\d+)", head)
            answer = b"" if line.startswith("HEAD ") or size is None else await reader.readexactly(int(size[1]))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.close()
            return 0, b""  # closed without an answer
        if re.search(r"(?im)^connection: close", head) or size is None:
            self.close()
        return int(head.split(" ")[1]), answer

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


async def answered_badly(node: LocalNode) -> list[str]:
    """What was answered as it should not be."""
    web = Web(str(node.http))
    found: list[str] = []
    try:
        for method, path in walk(make_app(node.node.control, asyncio.get_running_loop()).routes):
            for line, header, body in requests(method, path):
                status, answer = await web.ask(line, header, body)
                if status >= 500 or not status:
                    found.append(f"{status} {line[:60]} {header} {body[:60]!r}: {answer[:60]!r}")
        assert 200 == (await web.ask("GET /healthz"))[0]
    finally:
        web.close()
    return found


def test_no_request_is_too_much_for_the_control_port() -> None:
    with LocalNode(flags={"http.plugin_paths": "/", "http.require_token": False}) as node:
        assert [] == asyncio.run(answered_badly(node))
