"""What a rule may say; what is wrong is told by name; secrets are not told at all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from motorcade.plugins.capture.options import CaptureConfig, RuleOptions, TargetKind, hash_tag, parse_target, shown
from motorcade.redis.slots import slot_of
from tests.unit.capture.capturing import options, rule


def test_a_target_is_a_kind_and_a_name() -> None:
    assert (TargetKind.STREAM, "telemetry") == parse_target("stream:telemetry")
    assert (TargetKind.REDIS_STREAM, "messages:published") == parse_target("redis-stream:messages:published")
    assert (TargetKind.REDIS_CHANNEL, "messages:published") == parse_target("redis-channel:messages:published")


def test_what_is_wrong_is_named() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"to": "stream:a", "topics": []}, "topics: at least one"),
        ({"to": "stream:a", "topics": ["a/#/b"]}, "topics: 'a/#/b'"),
        ({"to": "stream:a", "topics": [""]}, "topics: ''"),
        ({"to": "stream:a", "topics": ["$share/g/a"]}, "leave $share/GROUP/ away"),
        ({"to": "stream:a", "topics": ["a"] * 1001}, "more than 1000"),
        ({"to": "nowhere", "topics": ["a"]}, "to: 'nowhere' is no target; write stream:NAME"),
        ({"to": "redis-stream:", "topics": ["a"]}, "to: 'redis-stream:' is no target"),
        ({"to": "stream:a/b", "topics": ["a"]}, "to: stream name 'a/b'"),
        ({"to": f"redis-stream:{'k' * 513}", "topics": ["a"]}, "to: the name of a redis-stream"),
        ({"to": "redis-stream:a}b", "topics": ["a"]}, "a part in braces"),
        ({"to": "stream:a", "topics": ["a"], "redis": "redis://h"}, "redis: goes with"),
        ({"to": "redis-stream:a", "topics": ["a"], "redis": "http://h"}, "redis: must be redis://"),
        ({"to": "redis-channel:a", "topics": ["a"], "max_length": 5}, "max_length: goes with redis-stream"),
        ({"to": "redis-stream:a", "topics": ["a"], "form": "payload"}, "form: goes with redis-channel"),
        ({"to": "redis-channel:a", "topics": ["a"], "form": "xml"}, "form"),
        ({"to": "stream:a", "topics": ["a"], "max_pending": 0}, "max_pending"),
        ({"to": "stream:a", "topics": ["a"], "max_pendin": 1}, "max_pendin"),
        ({"topics": ["a"]}, "to"),
    ]
    for given, told in wrong:
        with pytest.raises(msgspec.ValidationError) as refused:
            msgspec.convert(given, RuleOptions)
        assert told in str(refused.value)
    with pytest.raises(msgspec.ValidationError) as refused:
        options("redis-stream:a", redis="http://:hush@h")
    assert "hush" not in str(refused.value)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"rule": {"a b": rule("stream:a")}}, CaptureConfig)


def test_a_url_is_shown_without_its_password() -> None:
    for url, expected in [
        ("", ""),
        ("redis://h:1/2?patience=3", "redis://h:1/2?patience=3"),
        ("redis://:hush@h:1", "redis://:***@h:1"),
        ("redis://hush@h:1", "redis://***@h:1"),
        ("rediss+cluster://me:hush@a,b?ca=x.pem", "rediss+cluster://me:***@a,b?ca=x.pem"),
        ("redis://me:hu/sh@h", "redis://me:***@h"),
        ("redis://me:hu@sh@h", "redis://me:***@h"),
    ]:
        assert expected == shown(url)


def test_a_tag_leads_to_the_place_of_its_key() -> None:
    """A cluster keeps `x{TAG}y` where it keeps the key. Some keys have no tag."""
    for key in ("plain", "a:b", "fleet:{eu}:in", "a{b", "{{a}b", "{a}{b}", "ü"):
        assert slot_of(key) == slot_of(f"motorcade:{{{hash_tag(key)}}}:writer"), key
    for key in ("a}b", "{}", "{}a{b}"):
        assert hash_tag(key) is None, key
