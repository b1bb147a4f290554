"""What docs/capture.md shows to readers of captured messages works, and its defaults are those that hold."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from motorcade.plugins.capture import RuleOptions, rules, sink
from motorcade.plugins.capture.forms import envelope
from tests.support.node import ROOT
from tests.support.redis import RedisServer
from tests.unit.capture.capturing import NOW, capturing, message, rule

PAGE = (ROOT / "docs" / "capture.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def example(number: int) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(EXAMPLES[number], names)
    return names


async def test_a_reader_of_the_stream_finds_topic_and_payload(server: RedisServer) -> None:
    async with capturing(rule={"in": rule("redis-stream:k", redis=server.url)}) as capture:
        await capture.captured(message("fleet/ü", b"\xff"))
    assert [("fleet/ü", b"\xff")] == example(0)["copied"](server.url, "k")


def test_a_listener_of_the_channel_finds_everything() -> None:
    known, payload = example(1)["opened"](envelope(message("fleet/1", b"\n\xff\n", username="me")))
    assert (b"\n\xff\n", "fleet/1", "me", NOW) == (payload, known["topic"], known["username"], known["time"])


def test_the_page_tells_the_defaults_that_hold() -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| `?(\w+)`?", PAGE, re.MULTILINE))
    fields = {info.name: info for info in msgspec.structs.fields(RuleOptions)}
    assert fields.keys() <= {*told, *re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)}
    for name in ("max_length", "form", "max_pending", "max_pending_bytes"):
        assert str(fields[name].default) == told[name]
    assert f"the last {sink.MAX_RECENT // 1000} 000 of the rule" in PAGE
    assert f"for up to {rules.LAST_ATTEMPT:g} s" in PAGE
    assert f"up to {rules.LAST_ATTEMPT_AT_END:g} s" in PAGE
