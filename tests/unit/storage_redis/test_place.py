"""URLs of Redis stores."""

from __future__ import annotations

import pytest

from motorcade.redis.place import RedisOptions, parse_url
from motorcade.redis.resp import Address
from motorcade.storage.ports import StoreError


@pytest.mark.parametrize(
    ("url", "addresses", "clustered"),
    [
        ("redis://localhost", [("localhost", 6379)], False),
        ("redis://[::1]:7000/3", [("::1", 7000)], False),
        ("redis+cluster://a:1,b:2,c", [("a", 1), ("b", 2), ("c", 6379)], True),
        ("redis+cluster://user:pass@a:1,b:2/0", [("a", 1), ("b", 2)], True),
        ("rediss://a", [("a", 6379)], False),
    ],
)
def test_where_the_servers_are(url: str, addresses: list[tuple[str, int]], clustered: bool) -> None:
    place = parse_url(url, RedisOptions())
    assert [Address(*address) for address in addresses] == place.addresses
    assert clustered == place.clustered
    assert url.startswith("rediss") == (place.access.tls is not None)


@pytest.mark.parametrize(
    ("url", "user", "password", "database"),
    [
        ("redis://h/7", "", "", 7),
        ("redis://secret@h", "", "secret", 0),
        ("redis://:secret@h", "", "secret", 0),
        ("redis://me:s%40c%2Fr%3At@h", "me", "s@c/r:t", 0),
    ],
)
def test_how_to_get_in(url: str, user: str, password: str, database: int) -> None:
    access = parse_url(url, RedisOptions()).access
    assert (user, password, database) == (access.user, access.password, access.database)


def test_options_of_the_url_win() -> None:
    url = "redis://h?prefix=p&cells=128&replicas=2&patience=1.5&unchecked=yes"
    expected = RedisOptions(prefix="p", cells=128, replicas=2, patience=1.5, unchecked=True, blob_cache=5)
    assert expected == parse_url(url, RedisOptions(prefix="other", blob_cache=5)).options


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("http://secret@h", "redis://"),
        ("redis://secret@", "HOST:PORT"),
        ("redis://secret@h:port", "HOST:PORT"),
        ("redis://secret@a,b", "cluster"),
        ("redis://secret@h/name", "database"),
        ("redis+cluster://secret@h/1", "prefix"),
        ("redis://secret@h?cels=1", "'cels'"),
        ("redis://secret@h?cells=many", "many"),
        ("redis://secret@h?cells=0", "cells"),
        ("redis://secret@h?prefix={}", "braces"),
        ("rediss://secret@h?ca=nowhere.pem", "TLS"),
    ],
)
def test_a_wrong_url_is_refused_without_showing_the_password(url: str, what: str) -> None:
    with pytest.raises(StoreError, match=what) as raised:
        parse_url(url, RedisOptions())
    assert "secret" not in str(raised.value)
