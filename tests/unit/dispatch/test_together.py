"""A leader and our own workers, in one event loop."""

from __future__ import annotations

import asyncio
from collections import Counter

from msgspec.structs import replace

from motorcade.dispatch.leader import run_leader
from motorcade.dispatch.options import DispatchOptions
from motorcade.dispatch.status import dead_list
from motorcade.dispatch.views import RateReport
from motorcade.dispatch.worker import run_worker
from tests.support.redis import RedisServer, valkey_program
from tests.support.standing_clock import clock, turn, until
from tests.unit.dispatch.rig import (
    LOCK,
    PROCESSED,
    PUBLISHED,
    WORKERS,
    is_empty,
    leading,
    numbered,
    publish,
    redis,
    results,
    running,
    working,
)


async def test_a_slow_handler_is_sent_what_it_can_do_in_time(options: DispatchOptions, server: RedisServer) -> None:
    """Nothing is given up because too much was sent at once."""

    async def handler(message: int) -> int:
        await asyncio.sleep(3.0)
        return message

    options = replace(options, parallel=4)
    publish(server, *numbered(160))
    async with working(options, handler), leading(options) as leader:
        await until(lambda: leader.pending.acknowledged >= 160, "acknowledged")
        assert 0 == leader.dead_lettered
        (link,) = leader.links.values()
        assert link.window < 256
        await until(lambda: is_empty(server), "finished")
    assert sorted(numbered(160)) == sorted(results(server).values())


async def test_a_handler_that_fails_now_and_then(options: DispatchOptions, server: RedisServer) -> None:
    """It gets the message again and again until it succeeds; what can never be done is put aside with the reason."""
    seen: Counter[int] = Counter()
    rates: list[RateReport] = []

    async def handler(message: int) -> object:
        seen[message] += 1
        if seen[message] < 3 or message == 7:
            raise RuntimeError("not yet")
        return {"number": message, "times": seen[message]}

    options = replace(options, max_deliveries=4)
    publish(server, *numbered(10), b"no json")
    async with (
        running(lambda stop: run_worker(options, handler, stop=stop, report=rates.append)),
        leading(options) as leader,
    ):
        await until(lambda: leader.pending.acknowledged == 9 and leader.dead_lettered == 2, "all are done")
        await until(lambda: is_empty(server), "finished")
        await turn(options.report)
    assert sorted(b'{"number":%d,"times":3}' % n for n in range(10) if n != 7) == sorted(results(server).values())
    letters = {letter.payload: (letter.deliveries, letter.reason) for letter in await dead_list(options)}
    assert (4, "refused: RuntimeError: not yet") == letters[b"7"]
    assert (4, "refused: bad_json") == (letters[b"no json"][0], letters[b"no json"][1][:17])
    assert (9, 26) == (sum(rate.messages for rate in rates), rates[-1].refused), "it is told"


async def test_dispatchers_with_names_of_their_own_know_nothing_of_each_other(
    options: DispatchOptions, server: RedisServer
) -> None:
    mine, theirs = replace(options, prefix="mine:"), replace(options, prefix="theirs:")
    async with working(mine), working(theirs), leading(mine) as leader, leading(theirs):
        redis(server, "XADD", "mine:" + PUBLISHED, "*", "payload", b"1")
        await until(lambda: leader.pending.acknowledged, "done")
    assert [b"1"] == list(results(server, "mine:" + PROCESSED).values())
    assert not server.command("EXISTS", "theirs:" + PROCESSED, PROCESSED, LOCK)


async def test_whatever_is_done_to_redis() -> None:
    """The stream, the group, the scripts, everything is gone: leader and worker go on with what is published then."""
    with RedisServer(program=valkey_program()) as valkey:
        options = DispatchOptions(redis=valkey.url, listen="127.0.0.1:0", lease=60.0, ack_timeout=60.0, remember=600.0)
        async with (
            running(lambda stop: run_worker(options, stop=stop)),
            running(lambda stop: run_leader(options, stop=stop)),
        ):
            for harm in (
                ("PING",),
                ("DEL", PUBLISHED),
                ("XGROUP", "DESTROY", PUBLISHED, "dispatch"),
                ("SCRIPT", "FLUSH"),
                ("FLUSHALL",),
            ):
                redis(valkey, *harm)
                before = valkey.command("XLEN", PROCESSED)
                publish(valkey, *numbered(50))
                await until(lambda: valkey.command("XLEN", PROCESSED) == before + 50, f"after {harm}")  # noqa: B023


async def test_who_is_stopped_while_redis_is_away_ends(own_server: RedisServer) -> None:
    """And does not wait for it."""
    options = DispatchOptions(redis=own_server.url + "?patience=300", listen="127.0.0.1:0")
    try:
        async with (
            running(lambda stop: run_worker(options, stop=stop)),
            running(lambda stop: run_leader(options, stop=stop)),
        ):
            await until(lambda: own_server.command("ZCARD", WORKERS) == 1, "registered")
            await until(lambda: own_server.command("EXISTS", LOCK) == 1, "there is a leader")
            own_server.pause()
            clock().servers_answer = False
    finally:
        own_server.resume()


async def test_a_redis_that_takes_no_results_condemns_nothing(options: DispatchOptions, server: RedisServer) -> None:
    """However long: no worker can write, so messages come back uncounted, and go on when it is there again."""
    options = replace(options, max_deliveries=2)
    server.command("SET", "{messages:processed}:seen", "no hash")  # nothing can be written, all else works
    async with working(options), leading(options) as leader:
        publish(server, *numbered(50))
        await until(lambda: leader.pending.redistributed > 200, "given back again and again")
        redis(server, "DEL", "{messages:processed}:seen")
        await until(lambda: leader.pending.acknowledged >= 50, "acknowledged")
        assert 0 == leader.dead_lettered
    assert sorted(numbered(50)) == sorted(results(server).values())
