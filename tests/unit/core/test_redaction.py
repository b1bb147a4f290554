"""What people read holds no secrets, and nothing that a terminal obeys."""

from __future__ import annotations

import json
from time import thread_time

from motorcade.core.redaction import escape_json, is_secret, without_secrets
from motorcade.core.words import printable
from tests.support.cases import each_row


@each_row(
    "text shown",
    (
        ("redis://:hush@h:1/0", "redis://:***@h:1/0"),
        ("redis://hush@h:1", "redis://***@h:1"),
        ("rediss+cluster://me:hu/sh@x@h", "rediss+cluster://me:***@h"),
        ("REDIS://me:hush@h", "REDIS://me:***@h"),
        ("redis://h:1?password=hush&db=1", "redis://h:1?password=***&db=1"),
        ("https://h/x?a=1&api_key=hush#access-key=hush", "https://h/x?a=1&api_key=***#access-key=***"),
        ("cannot connect to 'redis://:hush@h:1': refused", "cannot connect to 'redis://:***@h:1': refused"),
        ("Authorization: Bearer hush-hush-hush-hush", "Authorization: Bearer ***"),
        ("host=h password=hush", "host=h password=***"),
        ("mqtt://h:1883/a?b=c", "mqtt://h:1883/a?b=c"),
        ("give it: Authorization: Bearer TOKEN", "give it: Authorization: Bearer TOKEN"),
    ),
)
def test_secrets_in_texts(text: str, shown: str) -> None:
    assert shown == without_secrets(text)


def test_a_text_that_a_client_has_made_up_is_looked_at_in_linear_time() -> None:
    """Client ids and topics are logged, on the event loop: 16 kB took 2 s."""
    size = 60_000
    for text in ("a" * size + " x://", "x://" + "a" * size, "a://" * (size // 4), "a://b@" * (size // 6), "a=" * size):
        began = thread_time()
        without_secrets(text)
        assert thread_time() - began < 0.5, text[:10]


def test_names_that_sound_like_secrets() -> None:
    for name in ("password", "X-API-Key", "apikey", "cookie", "Set-Cookie", "x-auth-token", "pass", "client_secret"):
        assert is_secret(name), name
    for name in ("key", "authentication", "compass", "signal", "bypass", "window"):
        assert not is_secret(name), name


def test_what_a_terminal_would_obey_is_escaped() -> None:
    """Control characters of both kinds, and those that turn the direction of writing; other letters stay."""
    assert r"a\x1b]52;c;eA==\x07\x9b2J\u202eb" == printable("a\x1b]52;c;eA==\x07\x9b2J\u202eb")
    assert "Straße 東京 🚗" == printable("Straße 東京 🚗")
    assert "a\nb\\r" == printable("a\nb\r", "\n")
    document = json.dumps({"id": "a\x9b\x7f\u202e\x1b"}, ensure_ascii=False)
    assert escape_json(document).isprintable() and json.loads(document) == json.loads(escape_json(document))
