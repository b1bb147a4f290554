"""The intake: reads are fenced, what is done is cut off, and nothing that is not done ever is."""

from __future__ import annotations

import asyncio

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from motorcade.dispatch.calls import FINISH, Calls, FencedError
from motorcade.dispatch.intake import FIRST_COUNT, Intake
from motorcade.dispatch.options import DispatchOptions
from motorcade.dispatch.status import status
from motorcade.redis.resp import LostError
from tests.support.redis import RedisServer
from tests.support.standing_clock import clock

STREAM, FENCE = "messages:published", "{messages:published}:fence"
MINE = "1 host:1:ab"


@pytest.fixture
async def intake(calls: Calls, options: DispatchOptions, server: RedisServer) -> Intake:
    server.command("SET", FENCE, MINE)
    intake = Intake(calls, options, MINE)
    await intake.open()
    return intake


def add(server: RedisServer, *entries: str, size: int = 2) -> None:
    for entry in entries:
        server.command("XADD", STREAM, entry, "payload", b"x" * size)


def left(server: RedisServer) -> list[str]:
    return [entry.decode() for entry, _ in server.command("XRANGE", STREAM, "-", "+")]


async def test_messages_are_read_in_order_and_once(intake, server) -> None:
    add(server, *(f"1-{number}" for number in range(1, 31)))
    first, second = await intake.read(20), await intake.read(20)
    assert [b"1-%d" % number for number in range(1, 31)] == first.entries + second.entries
    assert [] == (await intake.read(20)).ids


async def test_a_read_with_a_fence_that_has_changed_comes_to_nothing(calls, options, server) -> None:
    """However shortly before: after the last look at it, and before the first."""
    add(server, *(f"1-{number}" for number in range(1, 31)))
    for number, change in enumerate((("SET", FENCE, "2 host:2:cd"), ("DEL", FENCE)), 1):
        server.command("SET", FENCE, MINE)
        intake = Intake(calls, options, MINE)
        await intake.open()
        await intake.read(10)
        server.command(*change)
        for _ in range(2):
            with pytest.raises(FencedError):
                await intake.read(10)
        assert 10 * number == server.command("XPENDING", STREAM, "dispatch")["pending"]


async def test_a_term_that_follows_on_the_same_connection_reads(intake, calls, options, server) -> None:
    add(server, "1-1", "1-2")
    await intake.read(1)
    server.command("SET", FENCE, "2 host:1:ab")
    following = Intake(calls, options, "2 host:1:ab")
    assert [b"1-2"] == (await following.read(10)).entries


async def test_the_size_of_messages_decides_how_many_are_read(intake, server) -> None:
    """Few at first; then as many as the batch may have bytes."""
    assert FIRST_COUNT == intake.most
    add(server, *(f"1-{number}" for number in range(1, 11)))
    await intake.read(10)
    assert 512 == intake.most
    add(server, "2-1", size=1_000_000)
    await intake.read(1)
    assert 4 == intake.most


async def test_waiting_ends_when_something_comes(intake, server) -> None:
    add(server, "1-1")
    assert 1 == len((await intake.read(10)).ids)
    waiting = asyncio.create_task(intake.wait())
    await clock().quiet()
    assert not waiting.done()
    add(server, "1-2")
    await waiting
    assert [b"1-2"] == (await intake.read(10)).entries


async def test_what_was_read_and_not_acknowledged_is_claimed(intake, server) -> None:
    """Whichever consumer has read it; in portions."""
    add(server, *(f"1-{number}" for number in range(1, 31)))
    await intake.read(10)
    server.command("XREADGROUP", "GROUP", "dispatch", "another", "COUNT", 10, "STREAMS", STREAM, ">")
    found, after = [], b"0-0"
    while True:
        after, batch, gone = await intake.claim(after, 0.0, 7)
        assert [] == gone
        found += batch.entries
        if after == b"0-0":
            break
    assert [b"1-%d" % number for number in range(1, 21)] == found
    assert b"0-0" == (await intake.claim(b"0-0", 60.0, 100))[0]


async def lost(intake: Intake, options: DispatchOptions) -> tuple[int, int]:
    """What is counted, and what `dispatch status` says of it."""
    await intake.count_trimmed()
    told = await status(options)
    assert (intake.unread, intake.unfinished) == (told.trimmed, told.unfinished)
    return told.trimmed, told.unfinished


async def test_entries_that_are_trimmed_before_they_are_read_are_counted(intake, calls, options, server) -> None:
    """Without a leader, during a read, all of them, repeatedly; each is counted once, with an event."""
    with structlog.testing.capture_logs() as logs:
        assert (0, 0) == await lost(intake, options)
        add(server, *(f"1-{number}" for number in range(1, 11)))
        server.command("XTRIM", STREAM, "MAXLEN", "7")
        assert (3, 0) == await lost(intake, options), "before the first read"
        await intake.read(3)
        assert (3, 0) == await lost(intake, options)
        server.command("XTRIM", STREAM, "MAXLEN", "1")
        following = Intake(calls, options, MINE)
        await following.open()
        assert (6, 0) == await lost(following, options), "three unread of the last four"
        batch = await following.read(10)
        await finish(calls, "1-4", "1-5", "1-6", *(entry.decode() for entry in batch.entries))
        for _ in range(2):
            assert (6, 0) == await lost(following, options)
        add(server, "2-1", "2-2")
        server.command("XTRIM", STREAM, "MAXLEN", "0")
        assert (8, 0) == await lost(following, options)
        assert 0 == (await status(options)).lag
        add(server, "3-1")
        assert 1 == (await status(options)).lag
    events = [event for event in logs if event["event"] == "dispatch_intake_trimmed"]
    assert [3, 3, 2] == [event["lost"] for event in events]
    assert [3, 6, 8] == [event["unread"] for event in events]


async def test_a_trim_behind_the_back_of_reads_is_found_when_all_is_done(intake, calls, options, server) -> None:
    """Between two looks entries are trimmed and the group reads on: what is in flight hides some of it for a while."""
    add(server, *(f"1-{number}" for number in range(1, 11)))
    await intake.read(2)
    await lost(intake, options)
    server.command("XTRIM", STREAM, "MAXLEN", "5")
    batch = await intake.read(5)
    assert (0, 0) == await lost(intake, options)
    await finish(calls, "1-1", "1-2", *(entry.decode() for entry in batch.entries))
    assert (3, 0) == await lost(intake, options)


async def test_servers_that_jump_over_what_was_trimmed_are_understood(intake, calls, options, server) -> None:
    """Since Redis 7.2 the count of what a group has read includes what was trimmed before it."""
    add(server, *(f"1-{number}" for number in range(1, 11)))
    await intake.read(2)
    assert (0, 0) == await lost(intake, options)
    server.command("XTRIM", STREAM, "MAXLEN", "4")
    await intake.read(1)
    server.command("XGROUP", "SETID", STREAM, "dispatch", "1-7", "ENTRIESREAD", "7")
    for _ in range(2):
        assert (4, 0) == await lost(intake, options)
    batch = await intake.read(10)
    await finish(calls, "1-1", "1-2", "1-7", *(entry.decode() for entry in batch.entries))
    assert (4, 0) == await lost(intake, options)


async def test_nothing_is_counted_that_was_not_lost(intake, calls, options, server) -> None:
    """Reads and acknowledgements in any order, replies that are lost, a group that is set, streams that are kept."""
    number = 0
    for keep in (0, 1, 0):
        for count in (1, 7, 3, 5):
            add(server, *(f"1-{number + index}" for index in range(1, count + 1)))
            number += count
            batch = await intake.read(count - 1)
            done = [entry.decode() for entry in batch.entries]
            if done[1:]:
                await finish(calls, *done[1:], keep=keep)
            assert (0, 0) == await lost(intake, options)
            if done:
                await finish(calls, done[0], keep=keep)
            assert (0, 0) == await lost(intake, options)
    server.command("XREADGROUP", "GROUP", "dispatch", "leader", "COUNT", 1, "STREAMS", STREAM, ">")
    intake._read = -1  # the reply was lost
    assert (0, 0) == await lost(intake, options)
    server.command("XGROUP", "SETID", STREAM, "dispatch", "0")
    assert (0, 0) == await lost(intake, options)
    server.command("DEL", STREAM)
    assert (0, 0) == await lost(intake, options)
    with pytest.raises(LostError):
        await intake.read(1)
    add(server, "1-1")
    assert (0, 0) == await lost(intake, options)


async def test_what_was_trimmed_before_there_was_a_group_was_for_others(calls, options, server) -> None:
    add(server, *(f"1-{number}" for number in range(1, 11)))
    server.command("XTRIM", STREAM, "MAXLEN", "4")
    server.command("SET", FENCE, MINE)
    intake = Intake(calls, options, MINE)
    await intake.open()
    assert (0, 0) == await lost(intake, options)
    await intake.read(10)
    assert (0, 0) == await lost(intake, options)


async def test_entries_that_were_read_and_trimmed_are_named_when_they_are_claimed(intake, server) -> None:
    add(server, *(f"1-{number}" for number in range(1, 5)))
    batch = await intake.read(4)
    server.command("XTRIM", STREAM, "MAXLEN", "1")
    after, found, gone = await intake.claim(b"0-0", 0.0, 100)
    assert (b"0-0", [b"1-4"], batch.ids[:3]) == (after, found.entries, gone)


async def test_a_stream_that_was_deleted_is_created_again(intake, server) -> None:
    """Entries of the same names have other ids then."""
    add(server, "1-1")
    before = await intake.read(10)
    server.command("DEL", STREAM)
    with pytest.raises(LostError):
        await intake.read(10)
    add(server, "1-1")
    after = await intake.read(10)
    assert before.entries == after.entries
    assert before.ids != after.ids


async def finish(calls: Calls, *entries: str, keep: int = 0) -> None:
    await calls.run(FINISH, [STREAM, FENCE], MINE, "dispatch", keep, *entries)


async def test_what_is_done_is_cut_off_below_what_is_not(intake, calls, server) -> None:
    add(server, "1-1", "1-2", "2-1", "2-2", "3-1")
    await intake.read(4)
    await finish(calls, "1-2", "2-1")
    assert ["1-1", "1-2", "2-1", "2-2", "3-1"] == left(server)
    await finish(calls, "1-1")
    assert ["2-2", "3-1"] == left(server)
    await finish(calls, "2-2")
    assert ["3-1"] == left(server)
    await finish(calls, "2-2")
    assert ["3-1"] == left(server)


async def test_a_group_that_was_set_back_loses_nothing(intake, calls, server) -> None:
    """A failover may know what waits for an acknowledgement, and not how far was read."""
    add(server, "1-1", "1-2", "1-3", "1-4")
    await intake.read(4)
    await finish(calls, "1-1")
    server.command("XGROUP", "SETID", STREAM, "dispatch", "1-1")
    await finish(calls, "1-2")
    assert ["1-2", "1-3", "1-4"] == left(server)


async def test_numbers_that_are_too_large_are_deleted_one_by_one(intake, calls, server) -> None:
    large = 2**63
    add(server, f"1-{large}", f"1-{large + 1}", f"1-{large + 2}")
    await intake.read(10)
    await finish(calls, f"1-{large + 1}")
    assert [f"1-{large}", f"1-{large + 2}"] == left(server)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_only_what_is_done_goes(data, calls, options, server) -> None:
    """In whatever order, and however much was read."""
    server.empty()
    server.command("SET", FENCE, MINE)
    intake = Intake(calls, options, MINE)
    await intake.open()
    entries = [f"{time}-{number}" for time in range(1, 4) for number in range(data.draw(st.integers(1, 4)))]
    add(server, *entries)
    read = [entry.decode() for entry in (await intake.read(data.draw(st.integers(1, len(entries))))).entries]
    order = data.draw(st.permutations(read))
    done = order[: data.draw(st.integers(0, len(order)))]
    while done:
        some, done = done[:3], done[3:]
        await finish(calls, *some)
        gone = set(entries) - set(left(server))
        finished = set(order[: order.index(some[-1]) + 1])
        assert gone <= finished
        lowest = next((entry for entry in entries if entry not in finished), None)
        assert set(entries[: entries.index(lowest)] if lowest else entries) == gone
