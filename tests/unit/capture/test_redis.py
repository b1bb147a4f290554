"""Into a lone Redis: what is there, in which order, how often, and what publishers hear when it is away."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from motorcade.commit import Commit
from motorcade.core.errors import MotorcadeError
from motorcade.extension.declared import ConflictError
from motorcade.storage.memory import MemoryStore
from motorcade.storage.ports import StoreError, StoreFullError
from motorcade.storage.redis import RedisStore
from tests.support.ports import free_port
from tests.support.redis import RedisServer
from tests.support.waiting import until
from tests.unit.capture.capturing import Capture, capturing, entries, message, options, payloads, rule
from tests.unit.storage_redis.proxy import Relay

pytestmark = pytest.mark.timeout(120)

KEY = "messages:published"
STREAM = f"redis-stream:{KEY}"
CHANNEL = f"redis-channel:{KEY}"


def certain(error: BaseException | None) -> bool:
    """Whether the broker refuses the message; else it closes the connection."""
    assert isinstance(error, StoreError), error
    return error.certain


async def outcome(waits: list[Commit[Any]]) -> BaseException | None:
    async with asyncio.timeout(60):
        (found,) = await asyncio.gather(*waits, return_exceptions=True)
    assert found is None or isinstance(found, BaseException)
    return found


async def test_a_published_message_is_an_entry_of_the_stream(server: RedisServer) -> None:
    """Its payload is untouched; the publisher is answered when it is there."""
    given = message("fleet/1", b"\x00\xff\n{}", username="driver", user_properties=(("a", "b"),))
    async with capturing(rule={"in": rule(STREAM, redis=server.url)}) as capture:
        await capture.captured(given)
        (found,) = entries(server, KEY)
    assert found == {
        "topic": b"fleet/1",
        "client": b"car",
        "time": b"1700000000.123456",
        "guid": given.guid.hex().encode(),
        "qos": b"1",
        "payload": b"\x00\xff\n{}",
        "username": b"driver",
        "properties": b'{"user_properties":[["a","b"]]}',
    }
    assert (1, 0, 0) == (capture.view("in").captured, capture.view("in").failed, capture.view("in").pending)
    assert 1 == capture.context.counters["captured"]


async def test_only_what_a_filter_matches_is_copied_and_once(server: RedisServer) -> None:
    topics = ["fleet/+/position", "fleet/1/#", "$SYS/uptime"]
    async with capturing(
        rule={"in": rule(STREAM, *topics, redis=server.url), "all": rule("redis-stream:all", "#", redis=server.url)}
    ) as capture:
        for topic in ("fleet/1/position", "fleet/2/other", "fleet/1/door", "$SYS/uptime", "$SYS/other"):
            capture.publish(message(topic, topic.encode(), qos=0))
        await until(lambda: capture.view("in").captured + capture.view("all").captured == 6)
    assert [b"fleet/1/position", b"fleet/1/door", b"$SYS/uptime"] == payloads(server, KEY)
    assert [b"fleet/1/position", b"fleet/2/other", b"fleet/1/door"] == payloads(server, "all")


async def test_many_at_once_keep_their_order(server: RedisServer) -> None:
    """More than one flight takes, of all QoS, in the order in which they were published."""
    async with capturing(rule={"in": rule(STREAM, redis=server.url)}) as capture:
        waits = [capture.publish(message("fleet/1", b"%d" % number, qos=number % 3)) for number in range(3000)]
        assert [bool(number % 3) for number in range(3000)] == [bool(some) for some in waits]
        await asyncio.gather(*(wait for some in waits for wait in some))
        await until(lambda: capture.view("in").captured == 3000)
    assert [b"%d" % number for number in range(3000)] == payloads(server, KEY)


async def test_large_messages_go_in_small_flights(server: RedisServer) -> None:
    async with capturing(rule={"in": rule(STREAM, redis=server.url)}) as capture:
        await asyncio.gather(*(capture.captured(message("fleet/1", b"%d" % n + bytes(700_000))) for n in range(9)))
    assert [b"%d" % number for number in range(9)] == [found.rstrip(b"\0") for found in payloads(server, KEY)]


async def test_a_stream_is_kept_to_about_a_length(server: RedisServer) -> None:
    async with capturing(rule={"in": rule(STREAM, redis=server.url, max_length=100)}) as capture:
        await asyncio.gather(*(capture.captured(message("fleet/1", b"%d" % n)) for n in range(1000)))
    length = server.client.xlen(KEY)
    assert 100 <= length <= 300  # Redis removes whole nodes of 100 entries
    assert b"999" == payloads(server, KEY)[-1]


@pytest.mark.parametrize("form", ["envelope", "payload"])
async def test_a_channel_gets_each_message(server: RedisServer, form: str) -> None:
    listener = server.client.pubsub(ignore_subscribe_messages=True)
    listener.subscribe(KEY)
    assert listener.get_message(timeout=60) is None  # it has subscribed
    async with capturing(rule={"in": rule(CHANNEL, redis=server.url, form=form)}) as capture:
        for number in range(10):
            await capture.captured(message("fleet/1", b"\xff\n%d" % number))
    heard: list[bytes] = []
    while len(heard) < 10:
        found = listener.get_message(timeout=60)
        assert found is not None
        heard.append(found["data"])
    listener.close()
    if form == "envelope":
        assert all(data.startswith(b'{"motorcade":1,"topic":"fleet/1",') for data in heard)
        heard = [data.partition(b"\n")[2] for data in heard]
    assert [b"\xff\n%d" % number for number in range(10)] == heard


async def test_a_rule_may_use_the_store_of_the_node(server: RedisServer) -> None:
    store = RedisStore(server.url)
    await store.open()
    async with capturing(store, rule={"in": rule(STREAM)}) as capture:
        await capture.captured(message("fleet/1", b"a"))
    await store.close()
    assert [b"a"] == payloads(server, KEY)


async def test_a_store_that_is_no_redis_does_not_serve() -> None:
    """The message says what to write."""
    with pytest.raises(MotorcadeError, match='redis = "redis://HOST:PORT"'):
        async with capturing(MemoryStore(), rule={"in": rule(STREAM)}):
            pass


# -- secrets


async def test_a_password_opens_and_is_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Not in views, nor in the log, nor in what a publisher hears; a view sent back keeps it."""
    caplog.set_level(logging.DEBUG)
    store = MemoryStore()
    await store.open()
    with RedisServer() as server:
        server.command("ACL", "SETUSER", "me", "on", ">hush", "~*", "&*", "+@all")
        right = f"redis://me:hush@{server.address}?patience=0.2"
        wrong = f"redis://me:hush-hush@{server.address}?patience=0.2"
        async with capturing(store) as capture:
            await capture.rules.create("in", options(STREAM, redis=right))
            await capture.captured(message("fleet/1", b"a"))
            view = await capture.rules.show("in")
            assert f"redis://me:***@{server.address}?patience=0.2" == view.redis
            await capture.rules.change("in", options(STREAM, "fleet/1", redis=view.redis))
            await capture.captured(message("fleet/1", b"b"))
            with pytest.raises(ConflictError) as nothing:
                await capture.rules.read("in", 0, 1)
            await capture.rules.change("in", options(STREAM, redis=wrong))
            error = await outcome(capture.publish(message("fleet/1", b"c")))
            assert certain(error)
            told = [repr(await capture.rules.list()), str(nothing.value), str(error), caplog.text]
        assert not [text for text in told if "hush" in text]
        assert "WRONGPASS" in str(error)


async def test_tls(tmp_path: Path) -> None:
    import trustme  # noqa: PLC0415 - only here

    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    port = free_port()
    files = {
        f"tls-{name}-file": str(tmp_path / f"{file}.pem")
        for name, file in (("cert", "cert"), ("key", "key"), ("ca-cert", "ca"))
    }
    with RedisServer({"tls-port": str(port), "tls-auth-clients": "no", **files}) as server:
        url = f"rediss://127.0.0.1:{port}?ca={tmp_path / 'ca.pem'}"
        async with capturing(rule={"in": rule(STREAM, redis=url)}) as capture:
            await capture.captured(message("fleet/1", b"a"))
        assert [b"a"] == payloads(server, KEY)


# -- refusals


async def test_a_key_of_another_type_refuses_and_says_so(server: RedisServer) -> None:
    server.client.set(KEY, "text")
    async with capturing(rule={"in": rule(STREAM, redis=server.url)}) as capture:
        error = await outcome(capture.publish(message("fleet/1", b"a")))
        assert certain(error) and "is there and no stream" in str(error)
        assert 1 == capture.view("in").failed
        assert "no stream" in capture.view("in").problem
        server.client.delete(KEY)
        await capture.captured(message("fleet/1", b"b"))
        assert "" == capture.view("in").problem
    assert [b"b"] == payloads(server, KEY)


@pytest.mark.parametrize("to", [STREAM, CHANNEL])
async def test_a_full_server_refuses(server: RedisServer, to: str) -> None:
    """With certainty: nothing was done, not even half of it."""
    listener = server.client.pubsub(ignore_subscribe_messages=True)
    listener.subscribe(KEY)
    listener.get_message(timeout=60)
    async with capturing(rule={"in": rule(to, redis=server.url)}) as capture:
        server.command("CONFIG", "SET", "maxmemory", "1")
        assert isinstance(await outcome(capture.publish(message("fleet/1", b"a"))), StoreFullError)
        server.command("CONFIG", "SET", "maxmemory", "0")
        await capture.captured(message("fleet/1", b"b"))
    if to == STREAM:
        assert [b"b"] == payloads(server, KEY)
    else:
        found = listener.get_message(timeout=60)
        assert found is not None and found["data"].endswith(b"\nb")
    listener.close()


async def test_a_message_that_cannot_be_written_does_not_harm_others(server: RedisServer) -> None:
    """A plugin may have made it of something else than text."""
    async with capturing(rule={"in": rule(STREAM, redis=server.url)}) as capture:
        waits = [
            capture.publish(message("fleet/1", b"a")),
            capture.publish(message("fleet/1", b"b", publisher="\ud800")),
            capture.publish(message("fleet/1", b"c")),
        ]
        errors = [await outcome(some) for some in waits]
    assert errors[0] is None and errors[2] is None and certain(errors[1])
    assert [b"a", b"c"] == payloads(server, KEY)


# -- away


async def test_what_is_published_while_redis_is_away_arrives_in_order(server: RedisServer) -> None:
    url = f"{server.url}?patience=30"
    async with capturing(rule={"in": rule(STREAM, redis=url)}) as capture:
        await capture.captured(message("fleet/1", b"0"))
        server.stop()
        waits = [capture.publish(message("fleet/1", b"%d" % number, qos=number % 2)) for number in range(1, 100)]
        await until(lambda: bool(capture.view("in").problem))
        assert 99 == capture.view("in").pending
        server.start()
        await asyncio.gather(*(wait for some in waits for wait in some))
        await until(lambda: capture.view("in").captured == 100)
        assert "" == capture.view("in").problem
    assert [b"%d" % number for number in range(100)] == payloads(server, KEY)


async def test_a_bound_of_what_waits() -> None:
    """More is refused or dropped, and counted; who waits too long is refused, QoS 0 waits on."""
    url = f"redis://127.0.0.1:{free_port()}?patience=0.3"
    async with capturing(rule={"in": rule(STREAM, redis=url, max_pending=3)}) as capture:
        waits = [capture.publish(message("fleet/1", b"", qos=qos)) for qos in (1, 0, 2)]
        assert isinstance(await outcome(capture.publish(message("fleet/1", b""))), StoreFullError)
        assert [] == capture.publish(message("fleet/1", b"", qos=0))
        assert (1, 1, 3) == (capture.view("in").refused, capture.view("in").dropped, capture.view("in").pending)
        for some in (waits[0], waits[2]):
            error = await outcome(some)
            assert certain(error) and "within 0.3 s: cannot connect" in str(error)
        assert (2, 1) == (capture.view("in").failed, capture.view("in").pending)
        await capture.rules.reload(capture.plugin.config)


async def test_a_bound_of_bytes_that_wait() -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    async with capturing(rule={"in": rule(STREAM, redis=url, max_pending_bytes=1000)}) as capture:
        capture.publish(message("fleet/1", bytes(5000), qos=0))  # larger than the bound: alone
        assert 1 == capture.view("in").pending
        capture.publish(message("fleet/1", b"", qos=0))
        assert (1, 1) == (capture.view("in").pending, capture.view("in").dropped)


async def test_a_lost_answer_does_not_double(server: RedisServer) -> None:
    """Nobody knows whether it arrived: it is sent again, and is there once."""
    async with Relay(server.host, server.port) as relay:
        url = f"redis://127.0.0.1:{relay.port}"
        async with capturing(rule={"in": rule(STREAM, redis=url)}) as capture:
            await capture.captured(message("fleet/1", b"first"))
            for number in range(20):
                (relay.lose_next if number % 2 else relay.stop_next)()
                await asyncio.gather(
                    *(capture.captured(message("fleet/1", b"%d.%d" % (number, part))) for part in range(5))
                )
            assert 20 == relay.lost
    expected = [b"%d.%d" % (number, part) for number in range(20) for part in range(5)]
    assert [b"first", *expected] == payloads(server, KEY)


async def test_a_server_that_hangs_does_not_double(server: RedisServer) -> None:
    """What it got before the connection was given up, it carries out when it comes to itself, beside the repetition."""
    url = f"{server.url}?patience=60"
    async with capturing(rule={"in": rule(STREAM, redis=url)}) as capture:
        await capture.captured(message("fleet/1", b"0"))
        server.pause()
        waits = [wait for number in range(1, 20) for wait in capture.publish(message("fleet/1", b"%d" % number))]
        await until(lambda: "lost the connection" in capture.view("in").problem)
        server.resume()
        await asyncio.gather(*waits)
        await capture.captured(message("fleet/1", b"20"))
    assert [b"%d" % number for number in range(21)] == payloads(server, KEY)


async def hung(capture: Capture, server: RedisServer, given: Any) -> None:
    """Publish to a server that hangs, until the publisher's patience is over; then the server goes on."""
    server.pause()
    error = await outcome(capture.publish(given))
    assert not certain(error)
    assert 1 == capture.view("in").pending


async def test_a_qos_2_message_that_comes_again_is_recognised(server: RedisServer) -> None:
    """By its GUID: while nobody knows, when it is there, and after it was there for others to fail."""
    async with capturing(rule={"in": rule(STREAM, redis=f"{server.url}?patience=0.1")}) as capture:
        await capture.captured(message("fleet/1", b"before"))
        given = message("fleet/1", b"twice", qos=2)
        await hung(capture, server, given)
        again = capture.publish(given)
        assert 1 == capture.view("in").pending
        server.resume()
        await outcome(again)  # it may have lost its patience once more
        await until(lambda: not capture.view("in").pending)
        assert await outcome(capture.publish(given)) is None
        assert 2 == capture.view("in").repeated
    assert [b"before", b"twice"] == payloads(server, KEY)


async def test_a_qos_2_message_that_was_refused_may_come_again(server: RedisServer) -> None:
    server.client.set(KEY, "text")
    async with capturing(rule={"in": rule(STREAM, redis=server.url)}) as capture:
        given = message("fleet/1", b"a", qos=2)
        assert certain(await outcome(capture.publish(given)))
        server.client.delete(KEY)
        await capture.captured(given)
    assert [b"a"] == payloads(server, KEY)


async def test_a_qos_1_publisher_is_not_answered_when_nobody_knows(server: RedisServer) -> None:
    """What was sent is not given up: it is there once, whatever the publisher does."""
    async with capturing(rule={"in": rule(STREAM, redis=f"{server.url}?patience=0.1")}) as capture:
        await capture.captured(message("fleet/1", b"before"))
        await hung(capture, server, message("fleet/1", b"a"))
        server.resume()
        await until(lambda: capture.view("in").captured == 2)
    assert [b"before", b"a"] == payloads(server, KEY)


async def test_a_script_that_the_server_forgot_is_sent_again(server: RedisServer) -> None:
    async with capturing(rule={"in": rule(STREAM, redis=server.url)}) as capture:
        await capture.captured(message("fleet/1", b"a"))
        server.command("SCRIPT", "FLUSH")
        await capture.captured(message("fleet/1", b"b"))
    assert [b"a", b"b"] == payloads(server, KEY)


async def test_a_replica_has_it_before_the_publisher_hears() -> None:
    """With `replicas` in the URL no answer comes without them; without it, as soon as the server has one."""
    with RedisServer() as server, RedisServer() as replica:
        url = f"{server.url}?replicas=1&patience=0.2"
        async with capturing(
            rule={"in": rule(STREAM, redis=url), "free": rule("redis-stream:free", redis=server.url)}
        ) as capture:
            first, free = capture.publish(message("fleet/1", b"a"))
            assert await outcome([free]) is None  # it has no replica, and none is asked for
            error = await outcome([first])
            assert not certain(error) and "0 of 1 replicas" in str(error)
            replica.command("REPLICAOF", server.host, server.port)
            await until(lambda: capture.view("in").captured == 1)
            await until(lambda: replica.client.info("replication")["master_link_status"] == "up")
        assert [b"a"] == payloads(replica, KEY)


async def test_the_end_brings_what_waits(server: RedisServer) -> None:
    """QoS 0 messages that nobody waits for are there when the plugin is unloaded."""
    async with capturing(rule={"in": rule(STREAM, redis=server.url)}) as capture:
        for number in range(2000):
            capture.publish(message("fleet/1", b"%d" % number, qos=0))
    assert [b"%d" % number for number in range(2000)] == payloads(server, KEY)
    assert not server.client.client_list(_type="normal")[1:], "a connection is left"
