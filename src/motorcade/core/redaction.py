"""Secrets in what people read: names that sound like one, passwords in URLs, keys in queries and headers."""

from __future__ import annotations

import re

_SECRET = re.compile(
    r"passw(or)?d|passphrase|\bpass\b|\bpwd\b|secret|token|credential|authorization|\bauth\b|cookie|signature|\bsig\b"
    r"|(private|api|access|shared)[-_]?key",
    re.IGNORECASE,
)
#: What a URL may stand in, as one piece: each is looked at once, however it is made up; clients choose texts too.
_PIECE = re.compile(r"[^\s\"'<>]+")
_IN_QUERY = re.compile(r"((?:^|[?&;#,\s])([^=&;#?,\s\"']*)=)[^&;#\s\"']+")
_BEARER = re.compile(r"\b(bearer\s+|authorization:\s*basic\s+)[^\s,\"']{12,}", re.IGNORECASE)
_CONTROLS = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")  # JSON leaves them as they are
HIDDEN = "***"
HEADERS = "headers"  #: a table of this name has values that may all be keys


def is_secret(key: str) -> bool:
    """Return True if a value under this name must not be shown."""
    return _SECRET.search(key) is not None


def without_secrets(text: str) -> str:
    """Return a text with the passwords and keys of URLs, and what follows `Bearer`, hidden."""
    if "://" in text:
        text = _PIECE.sub(_hide_user, text)
    if "=" in text:
        text = _IN_QUERY.sub(lambda found: f"{found[1]}{HIDDEN}" if is_secret(found[2]) else found[0], text)
    return _BEARER.sub(rf"\1{HIDDEN}", text)


def _hide_user(found: re.Match[str]) -> str:
    """Keep the user of `user:password@`, hide the rest; what stands alone before `@` may be a key.

    Up to the last `@`: passwords may hold one.
    """
    before, slashes, rest = found[0].partition("://")
    credentials, at, host = rest.rpartition("@")
    if not at:
        return found[0]
    user, colon, _ = credentials.partition(":")
    return f"{before}{slashes}{user if colon else ''}{colon}{HIDDEN}@{host}"


def escape_json(text: str) -> str:
    """Return the same JSON with characters that a terminal could obey as escapes."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
