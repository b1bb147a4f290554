"""A message in Redis says all that was published, and its payload is as it was."""

from __future__ import annotations

import json
from typing import Any

from motorcade.plugins.capture.forms import envelope, fields
from tests.unit.capture.capturing import NOW, message

BINARY = bytes(range(256)) + b'\n{"motorcade":1}\n'
FULL: dict[str, Any] = {
    "username": "driver",
    "retain": True,
    "payload_format": 1,
    "expires_at": NOW + 60,
    "content_type": "text/plain",
    "response_topic": "answer",
    "correlation_data": b"\x00\xff",
    "user_properties": (("a", "1"), ("a", "2"), ("ü", "\n")),
}
PROPERTIES = {
    "payload_format": 1,
    "expires_at": NOW + 60,
    "content_type": "text/plain",
    "response_topic": "answer",
    "correlation_data": "AP8=",
    "user_properties": [["a", "1"], ["a", "2"], ["ü", "\n"]],
}


def test_an_entry_of_a_stream_has_a_field_for_each_thing() -> None:
    given = message("fleet/ü", BINARY, qos=2)
    found = fields(given)
    assert dict(zip(found[::2], found[1::2], strict=True)) == {
        "topic": "fleet/ü".encode(),
        "client": b"car",
        "time": "1700000000.123456",
        "guid": given.guid.hex(),
        "qos": 2,
        "payload": BINARY,
    }


def test_what_is_not_always_there_is_a_field_of_its_own() -> None:
    found = fields(message("fleet/1", b"", **FULL))
    named = dict(zip(found[::2], found[1::2], strict=True))
    assert (b"driver", 1) == (named["username"], named["retain"])
    assert isinstance(named["properties"], bytes) and json.loads(named["properties"]) == PROPERTIES


def test_a_channel_gets_one_line_of_json_and_the_payload() -> None:
    given = message("fleet/ü", BINARY, **FULL)
    line, _, payload = envelope(given).partition(b"\n")
    assert payload == BINARY
    assert line.startswith(b'{"motorcade":1,')
    assert json.loads(line) == {
        "motorcade": 1,
        "topic": "fleet/ü",
        "client": "car",
        "time": NOW,
        "guid": given.guid.hex(),
        "qos": 1,
        "username": "driver",
        "retain": True,
        "properties": PROPERTIES,
    }


def test_what_a_message_does_not_have_is_left_out() -> None:
    line, _, _ = envelope(message("fleet/1", b"")).partition(b"\n")
    assert {"motorcade", "topic", "client", "time", "guid", "qos"} == json.loads(line).keys()
    assert "properties" not in fields(message("fleet/1", b""))
    one: list[dict[str, Any]] = [{"user_properties": (("a", "b"),)}, {"payload_format": 0}, {"content_type": ""}]
    for properties in one:
        assert "properties" in fields(message("fleet/1", b"", **properties)), properties
