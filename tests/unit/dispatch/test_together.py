"""A leader and our own workers, in one event loop."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from motorcade.dispatch.leader import run_leader
from motorcade.dispatch.options import DispatchOptions
from motorcade.dispatch.worker import run_worker
from tests.support.redis import RedisServer
from tests.unit.dispatch.peers import running, until
from tests.unit.dispatch.test_leader import is_empty, leading, numbered, publish


def processed(server: RedisServer) -> list[bytes]:
    return sorted(fields[b"payload"] for _, fields in server.command("XRANGE", "messages:processed", "-", "+"))


async def test_a_slow_handler_is_sent_what_it_can_do_in_time(
    options: DispatchOptions, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is given up because too much was sent at once. All times are long: the machine may be busy meanwhile."""

    async def handler(message: int) -> int:
        await asyncio.sleep(0.08)
        return message

    monkeypatch.setattr("motorcade.dispatch.leader.LOOK_INTERVAL", 0.2)
    options = msgspec.structs.replace(options, ack_timeout=1.6, remember=20.0, parallel=4)
    publish(server, *numbered(160))
    async with running(lambda stop: run_worker(options, handler, stop=stop)), leading(options) as leader:
        await until(lambda: leader.book.acknowledged >= 160, "acknowledged")
        assert 0 == leader.buried
        (link,) = leader.links.values()
        assert link.window < 256
        await until(lambda: is_empty(server), "finished")
    assert sorted(numbered(160)) == processed(server)


async def test_who_is_stopped_while_redis_is_away_ends(own_server: RedisServer) -> None:
    """And does not wait for it."""
    options = DispatchOptions(redis=own_server.url + "?patience=300", listen="127.0.0.1:0", stop_patience=0.2)
    names: list[str] = []
    try:
        async with (
            running(lambda stop: run_worker(options, stop=stop, ready=names.append)),
            running(lambda stop: run_leader(options, stop=stop, ready=names.append)),
        ):
            await until(lambda: own_server.command("ZCARD", "consumer:ids") == 1, "registered")
            await until(lambda: own_server.command("EXISTS", "distributed_leader_lock") == 1, "somebody leads")
            own_server.pause()
    finally:
        own_server.resume()


async def test_a_redis_that_is_away_condemns_nothing(own_server: RedisServer) -> None:
    """However long: nobody can write, so messages come back uncounted, and go on when it is there again."""
    options = DispatchOptions(redis=own_server.url, listen="127.0.0.1:0", lease=60.0, ack_timeout=60.0, remember=600.0)
    options = msgspec.structs.replace(options, max_deliveries=2, retry_pause=0.02)
    own_server.command("SET", "{messages:processed}:seen", "no hash")  # nothing can be written, all else works
    async with running(lambda stop: run_worker(options, stop=stop)), leading(options) as leader:
        publish(own_server, *numbered(50))
        await until(lambda: leader.book.redistributed > 200, "given back again and again")
        own_server.command("DEL", "{messages:processed}:seen")
        await until(lambda: leader.book.acknowledged >= 50, "acknowledged")
        assert 0 == leader.buried
    assert sorted(numbered(50)) == processed(own_server)
