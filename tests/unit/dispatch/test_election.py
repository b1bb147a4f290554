"""Election: one leader at a time, each with a higher epoch, and no former leader can write."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from motorcade.dispatch import calls as scripts
from motorcade.dispatch.calls import Calls, FencedError
from motorcade.dispatch.election import Election, LeaderTerm, TermOverError
from motorcade.dispatch.options import DispatchOptions
from motorcade.redis.scripts import Script
from tests.support.redis import RedisServer
from tests.support.standing_clock import clock, turn
from tests.unit.dispatch.rig import LOCK

FENCED = ("messages:published", "messages:pending", "messages:dead", "consumer:ids")


async def elected(calls: Calls, options: DispatchOptions) -> tuple[Election, LeaderTerm]:
    election = Election(calls, options)
    term = await election.campaign(asyncio.Event())
    assert term is not None
    return election, term


async def test_a_leader_has_the_lock_and_all_fences(calls, options, server) -> None:
    _, term = await elected(calls, options)
    assert term.token.encode() == server.command("GET", LOCK)
    assert 0 < server.command("PTTL", LOCK) <= options.lease * 1000
    assert {term.fence.encode()} == {server.command("GET", f"{{{key}}}:fence") for key in FENCED}


async def test_no_other_candidate_leads_meanwhile(calls, options, server) -> None:
    await elected(calls, options)
    other, stop = Election(calls, options), asyncio.Event()
    campaign = asyncio.create_task(other.campaign(stop))
    await turn(2 * options.lease)
    assert not campaign.done()
    stop.set()
    assert await campaign is None
    assert b"1" == server.command("GET", f"{{{LOCK}}}:epoch")


async def test_every_leadership_has_a_higher_epoch(calls, options) -> None:
    """After a release, after the lock has expired, for the same candidate and for others."""
    election, first = await elected(calls, options)
    await election.release()
    again = await election.campaign(asyncio.Event())
    assert again is not None
    await calls.ask(LOCK, "DEL", LOCK)  # as if it had expired
    _, third = await elected(calls, options)
    assert [1, 2, 3] == [first.epoch, again.epoch, third.epoch]


async def test_a_leader_that_asks_again_has_the_same_term(calls, options) -> None:
    """An answer that was lost on the way costs no epoch."""
    token = "host:1:ab"
    keys = [LOCK, f"{{{LOCK}}}:epoch"]
    assert [[1, 0], [1, 0]] == [await calls.run(scripts.ACQUIRE, keys, token, 2000) for _ in range(2)]


async def test_a_lease_counts_from_when_it_was_asked_for(calls, options, monkeypatch) -> None:
    """The answer may take long: for the server the lease began before it."""
    election, term = await elected(calls, options)
    run = calls.run

    async def slow(*arguments: object, **more: object) -> object:
        answer = await run(*arguments, **more)
        await turn(options.lease / 2)
        return answer

    monkeypatch.setattr(calls, "run", slow)
    began = clock().time()
    await election.renew(term, b"{}")
    assert began + options.lease / 2 <= clock().time()
    assert began < term.expires < began + options.lease


async def test_a_term_is_renewed_or_over(calls, options, server) -> None:
    election, term = await elected(calls, options)
    before = term.expires
    server.command("PEXPIRE", LOCK, 20_000)
    await turn(1.0)
    await election.renew(term, b"{}")
    assert before + 1.0 == term.expires
    assert server.command("PTTL", LOCK) > 20_000
    assert b"{}" == server.command("GET", f"{{{LOCK}}}:state")
    server.command("SET", LOCK, "another process")
    with pytest.raises(TermOverError, match="another process"):
        await election.renew(term, b"{}")
    await election.release()
    assert b"another process" == server.command("GET", LOCK)


async def test_a_term_that_was_not_renewed_in_time_is_over() -> None:
    term = LeaderTerm("t", 1, expires=10.0)
    term.check(9.99)
    with pytest.raises(TermOverError):
        term.check(10.0)


async def test_a_leader_that_cannot_reach_redis_steps_down(own_server: RedisServer) -> None:
    options = DispatchOptions(redis=own_server.url, lease=60.0)
    calls = Calls(options)
    await calls.open()
    try:
        election, term = await elected(calls, options)
        own_server.pause()
        clock().servers_answer = False
        renewing = asyncio.ensure_future(election.renew(term, b"{}"))
        await turn(options.lease)
        with pytest.raises(TermOverError, match="cannot be renewed"):
            await renewing
    finally:
        own_server.resume()
        await calls.close()


async def test_a_counter_that_was_set_back_is_outbid(calls, options, server) -> None:
    """A failover may forget the last epochs; fences remember them."""
    server.command("SET", "{messages:pending}:fence", "41 host:1:ab")
    server.command("SET", "{messages:dead}:fence", "17 host:1:ab")
    _, term = await elected(calls, options)
    assert (42, b"42") == (term.epoch, server.command("GET", f"{{{LOCK}}}:epoch"))
    assert {term.fence.encode()} == {server.command("GET", f"{{{key}}}:fence") for key in FENCED}


async def test_a_fence_of_the_same_epoch_and_another_leader_is_outbid(calls, options, server) -> None:
    """Two leaders with one number: the counter was lost and counted again."""
    server.command("SET", "{messages:published}:fence", "1 host:1:ab")
    _, term = await elected(calls, options)
    assert 2 == term.epoch


#: Every script with which a leader writes: the key, what stands beside it, and arguments that would do something.
WRITES: list[tuple[Script, str, list[str], list[str | int]]] = [
    (scripts.GROUP, "messages:published", ["origin", "trimmed"], ["g", 7]),
    (scripts.TRIMMED, "messages:published", ["trimmed"], ["dispatch", 0, 1]),
    (scripts.CLAIM, "messages:published", [], ["dispatch", "leader", 0, "0-0", 10]),
    (scripts.RECEIVE, "messages:published", ["call"], [1, 100, "x"]),
    (scripts.FINISH, "messages:published", [], ["dispatch", 0, "1-1"]),
    (scripts.ASSIGN, "messages:pending", [], [1, "x"]),
    (scripts.REASSIGN, "messages:pending", ["deliveries"], [1, "x", 2]),
    (scripts.SETTLE, "messages:pending", ["deliveries"], [1, "old"]),
    (scripts.DEAD_LETTER, "messages:dead", ["ids"], ["x", "{}", "why", 5, "w", "0", 10]),
    (scripts.FORGET_DEAD, "messages:dead", ["ids"], ["old"]),
    (scripts.REGISTRY, "consumer:ids", [], [3000, 1, "a:1", "b:1"]),
]


def contents(server: RedisServer) -> dict[bytes, bytes]:
    return {key: server.command("DUMP", key) for key in server.command("KEYS", "*")}


async def test_no_leader_writes_with_an_old_epoch(calls, options, server) -> None:
    """Refused, and nothing has changed; with the right fence, the same call is carried out."""
    for (script, key, beside, words), higher in itertools.product(WRITES, (True, False)):
        server.empty()
        _, term = await elected(calls, options)
        for command in (
            ("XADD", "messages:published", "1-1", "payload", "{}"),
            ("XGROUP", "CREATE", "messages:published", "dispatch", "0"),
            ("XREADGROUP", "GROUP", "dispatch", "x", "STREAMS", "messages:published", ">"),
            ("ZADD", "messages:pending", 1, "old"),
            ("HSET", "{messages:pending}:deliveries", "old", 1),
            ("HSET", "{messages:dead}:ids", "old", "1-1"),
            ("ZADD", "consumer:ids", 99_999_999_999_999, "b:1"),
            ("PERSIST", LOCK),  # it would expire while the contents are compared
        ):
            server.command(*command)
        keys = [key, *(f"{{{key}}}:{what}" for what in ("fence", *beside))]
        if higher:
            server.command("SET", keys[1], f"{term.epoch + 1} host:1:ab")
        else:
            server.command("DEL", keys[1])
        before = contents(server)
        with pytest.raises(FencedError):
            await calls.run(script, keys, term.fence, *words)
        assert before == contents(server), (key, words)
        server.command("SET", keys[1], term.fence)
        await calls.run(script, keys, term.fence, *words)
        assert before | {keys[1].encode(): server.command("DUMP", keys[1])} != contents(server), (key, words)
