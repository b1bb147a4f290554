"""Results are written once per id, for as long as ids are remembered, and not too late."""

from __future__ import annotations

import asyncio

import pytest

from motorcade.core.errors import StoreDamagedError, StoreError, StoreFullError
from motorcade.dispatch.calls import WRITE, Calls, StaleError
from motorcade.dispatch.options import DispatchOptions
from tests.support.redis import RedisServer
from tests.support.standing_clock import until

KEYS = [
    "messages:processed",
    "{messages:processed}:seen",
    "{messages:processed}:seen:0",
    "{messages:processed}:seen:1",
]
LONG = 3_600_000


async def write(calls: Calls, *ids: str, remember: int = LONG, deadline: int = 0, kept: int = 0) -> int:
    words = [word for id_ in ids for word in (id_, f'"{id_}"')]
    fresh, _ = await calls.run(WRITE, KEYS, "w:1", deadline, remember, kept, *words)
    return int(fresh)


def written(server: RedisServer) -> list[bytes]:
    rows = server.command("XRANGE", "messages:processed", "-", "+")
    return [fields[b"id"] for _, fields in rows]


async def test_an_entry_tells_id_result_and_worker(calls, server) -> None:
    await write(calls, "a")
    ((_, fields),) = server.client.xrange("messages:processed")
    assert {b"id": b"a", b"payload": b'"a"', b"worker": b"w:1"} == fields


async def test_an_id_is_written_once(calls, server) -> None:
    """In one call, in the next, in a call with others."""
    assert [2, 0, 1, 0] == [await write(calls, *ids) for ids in ("aab", "a", "bca", "abc")]
    assert [b"a", b"b", b"c"] == written(server)


async def test_ids_are_remembered_over_one_change_of_sets(calls, server) -> None:
    """However long nothing was written, the last ids are known; those before them may go."""
    await write(calls, "a")
    for number, known in (("b", "ab"), ("c", "bc"), ("d", "cd")):
        server.command("HSET", KEYS[1], "since", 1)  # as if the newer set had been begun long ago
        await write(calls, number)
        assert 0 == await write(calls, *known)
    assert 1 == await write(calls, "a")


async def test_a_set_is_used_for_as_long_as_ids_must_be_known(calls, server) -> None:
    await write(calls, "a", remember=LONG)
    since = server.client.hget(KEYS[1], "since")
    await write(calls, "b", remember=LONG)
    assert (since, {b"a", b"b"}) == (server.client.hget(KEYS[1], "since"), server.client.smembers(KEYS[2]))


async def test_a_clock_that_was_put_back_empties_nothing(calls, server) -> None:
    await write(calls, "a")
    server.command("HSET", KEYS[1], "since", 99_999_999_999_999)
    assert [0, 1] == [await write(calls, "a"), await write(calls, "b")]
    assert {b"a", b"b"} == server.client.smembers(KEYS[2])


async def test_what_comes_too_late_is_not_written(calls, server) -> None:
    """By the server's own clock, whatever the worker believes."""
    seconds, _ = server.client.time()
    with pytest.raises(StaleError):
        await write(calls, "a", deadline=(seconds - 1) * 1000)
    assert [] == written(server)
    assert 1 == await write(calls, "a", deadline=(seconds + 60) * 1000)


async def test_results_may_be_bounded(calls, server) -> None:
    for number in range(500):
        await write(calls, str(number), kept=10)
    assert server.client.xlen("messages:processed") < 250  # about: whole nodes of a hundred entries go


async def test_what_could_not_be_written_is_not_known(calls, server) -> None:
    """A key of another kind, a user who may not: when that is mended, the same results are written."""
    server.command("SET", "messages:processed", "no stream")
    with pytest.raises(StoreDamagedError):
        await write(calls, "a", "b")
    server.command("DEL", "messages:processed")
    server.command("ACL", "SETUSER", "narrow", "on", ">secret", "~*", "+@all", "-xadd")
    narrow = Calls(DispatchOptions(redis=f"redis://narrow:secret@{server.address}"))
    await narrow.open()
    try:
        with pytest.raises(StoreError):
            await write(narrow, "a", "b")
        server.command("ACL", "SETUSER", "narrow", "+xadd")
        assert 2 == await write(narrow, "a", "b")
    finally:
        await narrow.close()
        server.command("ACL", "DELUSER", "narrow")


async def test_a_server_without_memory_says_so(own_server: RedisServer) -> None:
    calls = Calls(DispatchOptions(redis=own_server.url))
    await calls.open()
    try:
        own_server.command("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(StoreFullError):
            await write(calls, "a")
        own_server.command("CONFIG", "SET", "maxmemory", 0)
        assert 1 == await write(calls, "a")
    finally:
        await calls.close()


async def test_a_server_that_was_restarted_is_asked_again(own_server: RedisServer) -> None:
    """It knows the scripts no more, and the connection is gone: the caller sees neither."""
    calls = Calls(DispatchOptions(redis=own_server.url))
    await calls.open()
    try:
        assert 1 == await write(calls, "a")
        await asyncio.to_thread(own_server.stop)
        again = asyncio.create_task(write(calls, "a", "b"))
        await asyncio.to_thread(own_server.start)
        await until(again.done, "it is there again")
        assert 1 == await again
        own_server.command("SCRIPT", "FLUSH")
        assert 0 == await write(calls, "a", "b")
    finally:
        await calls.close()
