"""URLs of Redis stores."""

from __future__ import annotations

import pytest

from motorcade.redis.resp import ServerAddress
from motorcade.redis.url import RedisOptions, parse_url
from motorcade.storage.ports import StoreError


def test_where_the_servers_are_and_how_to_get_in() -> None:
    for url, addresses, clustered in (
        ("redis://localhost", [("localhost", 6379)], False),
        ("redis://[::1]:7000/3", [("::1", 7000)], False),
        ("redis+cluster://a:1,b:2,c", [("a", 1), ("b", 2), ("c", 6379)], True),
        ("redis+cluster://user:pass@a:1,b:2/0", [("a", 1), ("b", 2)], True),
        ("rediss://a", [("a", 6379)], False),
    ):
        place = parse_url(url, RedisOptions())
        assert [ServerAddress(*address) for address in addresses] == place.addresses, url
        assert clustered == place.clustered, url
        assert url.startswith("rediss") == (place.access.tls is not None), url
    for url, user, password, database in (
        ("redis://h/7", "", "", 7),
        ("redis://secret@h", "", "secret", 0),
        ("redis://:secret@h", "", "secret", 0),
        ("redis://me:s%40c%2Fr%3At@h", "me", "s@c/r:t", 0),
    ):
        access = parse_url(url, RedisOptions()).access
        assert (user, password, database) == (access.user, access.password, access.database), url


def test_options_of_the_url_win() -> None:
    url = "redis://h?prefix=p&cells=128&replicas=2&patience=1.5&unchecked=yes"
    expected = RedisOptions(prefix="p", cells=128, replicas=2, patience=1.5, unchecked=True, blob_cache=5)
    assert expected == parse_url(url, RedisOptions(prefix="other", blob_cache=5)).options


def test_a_wrong_url_is_refused_without_showing_the_password() -> None:
    for url, what in (
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
    ):
        with pytest.raises(StoreError, match=what) as raised:
            parse_url(url, RedisOptions())
        assert "secret" not in str(raised.value), url
