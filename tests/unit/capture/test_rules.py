"""Rules come and go while messages flow, are there again after a restart, and say what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from motorcade.core.errors import MotorcadeError
from motorcade.core.message import Message
from motorcade.extension.declared import (
    CONFIGURED,
    CREATED,
    BadNameError,
    ConflictError,
    Declared,
    UnknownError,
    read_options,
)
from motorcade.extension.hooks import Callback, Continue, Handled, Stop
from motorcade.plugins.capture import CaptureConfig, RuleOptions, rules
from motorcade.plugins.capture.rules import COLLECTION, PRIORITY
from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import StoreError
from tests.support.ports import free_port
from tests.support.redis import RedisServer
from tests.support.waiting import until
from tests.unit.capture.capturing import capturing, message, options, payloads, rule


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    made = MemoryStore()
    await made.open()
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a server that is not there is given up soon."""
    monkeypatch.setattr(rules, "LAST_ATTEMPT", 0.1)
    monkeypatch.setattr(rules, "LAST_ATTEMPT_AT_END", 0.1)


def config(**more: object) -> CaptureConfig:
    return msgspec.convert(more, CaptureConfig)


def nowhere() -> str:
    return f"redis://127.0.0.1:{free_port()}"


async def test_without_rules_nothing_is_listened_to(store: MemoryStore) -> None:
    async with capturing(store) as capture:
        assert capture.hooks.message_publish is None
        made: Declared = capture.rules
        assert 0 == len(made) and [] == await made.list()
        await made.create("a", options("redis-stream:a", redis=nowhere()))
        (callback,) = capture.hooks.lookup("message.publish")
        assert (("fleet/#",), PRIORITY) == (callback.topics, callback.priority)
        await made.delete("a")
        assert capture.hooks.message_publish is None


async def test_a_rule_is_made_changed_shown_and_removed(store: MemoryStore, server: RedisServer) -> None:
    async with capturing(store) as capture:
        made = await capture.rules.create("in", options("redis-stream:a", redis=server.url))
        assert ("in", CREATED, ("fleet/#",)) == (made.name, made.origin, made.topics)
        await capture.captured(message("fleet/1", b"1"))
        changed = await capture.rules.change(
            "in", options("redis-stream:a", "other/#", redis=server.url, max_pending=7)
        )
        assert (("other/#",), 7, 1) == (changed.topics, changed.max_pending, changed.captured)
        assert [] == capture.publish(message("fleet/1", b"2"))
        await capture.captured(message("other/1", b"3"))
        moved = await capture.rules.change("in", options("redis-stream:b", "other/#", redis=server.url))
        await capture.captured(message("other/1", b"4"))
        assert ["in"] == [view.name for view in await capture.rules.list()]
        assert (2, 3) == (moved.captured, (await capture.rules.show("in")).captured)
        await capture.rules.delete("in")
        assert [] == capture.publish(message("other/1", b"5"))
        with pytest.raises(UnknownError, match="no capture rule 'in'"):
            await capture.rules.show("in")
    assert [[b"1", b"3"], [b"4"]] == [payloads(server, "a"), payloads(server, "b")]


async def test_options_can_be_sent_again_as_a_view_shows_them(store: MemoryStore, server: RedisServer) -> None:
    async with capturing(store) as capture:
        given = options("redis-stream:a", redis=f"redis://:hush@{server.address}")
        view = await capture.rules.create("in", given)
        fields = {info.name for info in msgspec.structs.fields(RuleOptions)}
        shown = {name: value for name, value in msgspec.to_builtins(view).items() if name in fields}
        assert "hush" not in repr(shown)
        await capture.rules.change("in", read_options("capture", RuleOptions, shown | {"max_length": 5}))
        assert msgspec.structs.replace(given, max_length=5) == capture.rules.options("in")


async def test_what_cannot_be_done_is_said(store: MemoryStore, server: RedisServer) -> None:
    given = options("redis-stream:a", redis=server.url)
    async with capturing(store, rule={"conf": rule("redis-stream:a", redis=server.url)}, max_rules=2) as capture:
        made = capture.rules
        with pytest.raises(BadNameError):
            await made.create("a b", given)
        with pytest.raises(
            ConflictError, match=r"already: it stands in the configuration, \[plugins.capture.rule.conf\]"
        ):
            await made.create("conf", given)
        for refused in (made.change("conf", given), made.delete("conf")):
            with pytest.raises(ConflictError, match="change it there and reload"):
                await refused
        await made.create("own", given)
        with pytest.raises(ConflictError, match="already"):
            await made.create("own", given)
        with pytest.raises(ConflictError, match="max_rules"):
            await made.create("third", given)
        for unknown in (made.change("x", given), made.delete("x"), made.show("x"), made.read("x", 0, 1)):
            with pytest.raises(UnknownError):
                await unknown
        with pytest.raises(MotorcadeError, match="no option 'colour'"):
            await made.change("own", options("redis-stream:a", redis=f"{server.url}?colour=red"))
        with pytest.raises(MotorcadeError, match="the plugin 'streams' is not loaded"):
            await made.change("own", options("stream:a"))
        assert (given, 2) == (made.options("own"), len(made))


async def test_a_rule_has_nothing_to_read_and_says_where_to_look(store: MemoryStore) -> None:
    async with capturing(store) as capture:
        for name, to, told in (("a", "redis-stream:k", "XRANGE k - +"), ("b", "redis-channel:k", "SUBSCRIBE k")):
            await capture.rules.create(name, options(to, redis=nowhere()))
            with pytest.raises(ConflictError) as refused:
                await capture.rules.read(name, 0, 10)
            assert told in str(refused.value)


async def test_rules_of_commands_outlive_the_plugin(store: MemoryStore, server: RedisServer) -> None:
    given = options("redis-stream:a", redis=server.url, max_pending=5)
    async with capturing(store) as capture:
        await capture.rules.create("in", given)
        await capture.rules.create("gone", given)
        await capture.rules.delete("gone")
    async with capturing(store) as capture:
        assert ["in"] == [view.name for view in await capture.rules.list()]
        assert given == capture.rules.options("in")
        await capture.captured(message("fleet/1", b"1"))
    assert [b"1"] == payloads(server, "a")


async def test_stored_rules_that_cannot_work_do_not_keep_the_node_from_starting(store: MemoryStore) -> None:
    """One is not readable: it is counted. One has a URL without meaning: its publishers hear so until it is changed."""
    await store.records.put(COLLECTION, "damaged", b"\xff")
    broken = msgspec.json.encode(rule("redis-stream:a", redis="redis://:hush@h:port"))
    await store.records.put(COLLECTION, "broken", broken)
    async with capturing(store) as capture:
        assert 1 == capture.context.counters["unreadable"]
        (view,) = await capture.rules.list()
        assert "numeric ports" in view.problem and "hush" not in repr(view)
        (refused,) = capture.publish(message("fleet/1", b""))
        with pytest.raises(StoreError, match="numeric ports") as told:
            await refused
        assert told.value.certain
        capture.publish(message("fleet/1", b"", qos=0))
        assert 2 == (await capture.rules.show("broken")).failed
        await capture.rules.delete("broken")
        assert 0 == len(capture.rules)


async def test_a_wrong_url_in_the_configuration_is_refused() -> None:
    with pytest.raises(MotorcadeError, match="capture rule 'in': a Redis URL needs hosts with numeric ports") as told:
        async with capturing(rule={"in": rule("redis-stream:a", redis="redis://:hush@h:port")}):
            pass
    assert "hush" not in str(told.value)


# -- reload


async def test_a_reload_brings_changes_and_removes(store: MemoryStore, server: RedisServer) -> None:
    url = server.url
    before = {name: rule(f"redis-stream:{name}", f"{name}/#", redis=url) for name in ("stays", "moves", "goes")}
    after = {
        "stays": rule("redis-stream:stays", "stays/+", redis=url, max_length=9),
        "moves": rule("redis-stream:moved", "moves/#", redis=url),
        "comes": rule("redis-stream:comes", "comes/#", redis=url),
    }
    async with capturing(store, rule=before) as capture:
        for name in before:
            await capture.captured(message(f"{name}/1", b"1"))
        await capture.plugin.reload(config(rule=after))
        views = {view.name: view for view in await capture.rules.list()}
        assert {"stays": 1, "moves": 1, "comes": 0} == {name: view.captured for name, view in views.items()}
        assert 9 == views["stays"].max_length
        assert [] == capture.publish(message("goes/1", b"2")) == capture.publish(message("stays/1/2", b"2"))
        for name in after:
            await capture.captured(message(f"{name}/1", b"2"))
        await capture.plugin.reload(config())
        assert 0 == len(capture.rules) and capture.hooks.message_publish is None
    assert [b"1", b"2"] == payloads(server, "stays")
    assert [[b"1"], [b"2"], [b"1"], [b"2"]] == [payloads(server, key) for key in ("moves", "moved", "goes", "comes")]


async def test_a_reload_that_is_wrong_changes_nothing(store: MemoryStore, server: RedisServer) -> None:
    before = {"in": rule("redis-stream:a", redis=server.url)}
    async with capturing(store, rule=before) as capture:
        for wrong in ({"rule": {"b": rule("redis-stream:b", redis=nowhere()), "in": rule("stream:b")}},):
            with pytest.raises(MotorcadeError, match="streams"):
                await capture.plugin.reload(config(**wrong))
        await capture.rules.create("own", options("redis-stream:c", redis=server.url))
        with pytest.raises(ConflictError, match="max_rules"):
            await capture.plugin.reload(config(rule=before, max_rules=1))
        assert ["in", "own"] == [view.name for view in await capture.rules.list()]
        await capture.captured(message("fleet/1", b"1"))
    assert [b"1"] == payloads(server, "a")


async def test_the_configuration_hides_a_rule_of_the_same_name(store: MemoryStore, server: RedisServer) -> None:
    """It is there again when the configuration does without."""
    own, conf = rule("redis-stream:own", redis=server.url), rule("redis-stream:conf", redis=server.url)
    async with capturing(store) as capture:
        await capture.rules.create("in", msgspec.convert(own, RuleOptions))
        await capture.plugin.reload(config(rule={"in": conf}))
        assert CONFIGURED == (await capture.rules.show("in")).origin
        await capture.captured(message("fleet/1", b"1"))
    async with capturing(store, rule={"in": conf}) as capture:
        assert CONFIGURED == (await capture.rules.show("in")).origin
        await capture.plugin.reload(config())
        assert CREATED == (await capture.rules.show("in")).origin
        await capture.captured(message("fleet/1", b"2"))
    assert [[b"1"], [b"2"]] == [payloads(server, "conf"), payloads(server, "own")]


# -- while messages flow


async def test_changes_while_messages_flow_lose_and_double_nothing(
    store: MemoryStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every message that a rule has taken is in one of the two streams, once, and in order there."""
    monkeypatch.setattr(rules, "LAST_ATTEMPT", 30.0)  # nothing is given up, however busy the machine is
    keys = ("a", "b")
    async with capturing(store) as capture:
        await capture.rules.create("in", options("redis-stream:a", redis=server.url))
        stop = asyncio.Event()
        sent: list[bytes] = []

        async def publish() -> None:
            while not stop.is_set():
                for _ in range(20):
                    sent.append(b"%06d" % len(sent))
                    capture.publish(message("fleet/1", sent[-1], qos=len(sent) % 2))
                await asyncio.sleep(0)

        flow = asyncio.create_task(publish())
        for number in range(1, 30):
            more = {"max_length": 0, "max_pending": 100_000 + number}
            await capture.rules.change("in", options(f"redis-stream:{keys[number // 2 % 2]}", redis=server.url, **more))
        stop.set()
        await flow

        def all_told() -> bool:  # also of what went the way that was changed last
            view = capture.view("in")
            return not view.pending and view.captured + view.dropped + view.refused + view.failed >= len(sent)

        await until(all_told)
        view = capture.view("in")
        assert (len(sent), 0) == (view.captured + view.dropped + view.refused, view.failed)
    found = [payloads(server, key) for key in keys]
    assert all(some == sorted(some) and some for some in found)
    assert view.captured == len(set(found[0]) | set(found[1])) == len(found[0]) + len(found[1])


async def test_it_copies_what_other_plugins_have_made_of_a_message(store: MemoryStore, server: RedisServer) -> None:
    """And nothing of what they have taken for themselves."""

    def rewrite(_client: None, given: Message) -> Continue | Stop | None:
        if given.payload == b"secret":
            return Continue(Handled())
        return Continue(message(given.topic, given.payload.upper()))

    async with capturing(store, rule={"in": rule("redis-stream:a", redis=server.url)}) as capture:
        capture.hooks.add("message.publish", Callback(rewrite, 0, "other"))
        chain, _ = capture.hooks.publish_chains("fleet/1")
        assert chain is not None
        for payload in (b"a", b"secret", b"b"):
            chain.fold(None, acc=message("fleet/1", payload))
        await until(lambda: capture.view("in").captured == 2)
    assert [b"A", b"B"] == payloads(server, "a")
