"""Late writers on real servers: what was sent before a fence and arrives after it, per home and per store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from motorcade.broker.session_records import pair
from motorcade.storage import redis_members
from motorcade.storage.ports import Batch, Draft, Durability, FeedEnd, StoreError, StoreFencedError, Written
from motorcade.storage.redis import RedisStore
from tests.contracts.engines import patient
from tests.support.redis import RedisCluster, RedisServer
from tests.support.waiting import until
from tests.unit.storage_redis.proxy import Relay

NOW = time.time()


@asynccontextmanager
async def opened(url: str, level: Durability = Durability.FAST) -> AsyncIterator[RedisStore]:
    store = patient(url, level)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def keys(server: RedisServer, pattern: str = "*") -> set[bytes]:
    return {key for key in server.client.keys(f"motorcade:{pattern}") if isinstance(key, bytes)}


# -- homes


async def test_a_decision_that_arrives_after_another_attach_is_refused_and_facts_are_not(
    server: RedisServer, store: RedisStore
) -> None:
    async with Relay(server.host, server.port) as relay, opened(f"redis://127.0.0.1:{relay.port}") as late:
        await store.mailboxes.append(["session:x"], Draft(b"1"), NOW)
        mine = await late.coordination.attach("session:x", "a")
        other = await late.coordination.attach("session:y", "a")
        relay.hold()
        decision, fact, elsewhere = Batch(), Batch(), Batch()
        decision.fence(mine.fence)
        decision.put("session", "x", b"old")
        decision.note("client:x", b"x")
        decision.append(["session:z"], Draft(b"will"), NOW)
        fact.acknowledge("session:x", [1])
        elsewhere.fence(other.fence)
        elsewhere.put("session", "y", b"good")
        commits = [late.write(batch) for batch in (decision, fact, elsewhere)]
        taken = await store.coordination.attach("session:x", "b")
        assert ("a", True) == (taken.previous, taken.pending)
        relay.release()
        outcomes = await asyncio.gather(*commits, return_exceptions=True)
        assert [StoreFencedError, Written, Written] == [type(outcome) for outcome in outcomes]
        assert commits[0].refused
    assert await store.records.get("session", "x", NOW) is None
    assert b"good" == await store.records.get("session", "y", NOW)
    assert 0 == (await store.mailboxes.info("session:x")).entries
    assert 0 == (await store.mailboxes.info("session:z")).generation
    assert {FeedEnd()} == set(await store.feeds.ends())
    assert [] == await store.check()


async def test_the_same_number_with_another_token_is_another_fence(store: RedisStore, server: RedisServer) -> None:
    """A fail-over may forget an attach: the next one has its number."""
    first = await store.coordination.attach("session:x", "a")
    server.command("DEL", store.core.key(store.core.cells.of("client:x"), "a"))
    second = await store.coordination.attach("session:x", "b")
    assert first.fence.number == second.fence.number
    for fence, accepted in ((first.fence, False), (second.fence, True)):
        batch = Batch()
        batch.fence(fence)
        batch.put("session", "x", b"1")
        assert accepted == await _stored(store, batch)
    assert not await store.coordination.detach(first.fence)
    assert await store.coordination.detach(second.fence)


async def _stored(store: RedisStore, batch: Batch) -> bool:
    try:
        await store.write(batch)
    except StoreFencedError:
        return False
    return True


async def test_a_client_that_came_and_went_leaves_nothing(store: RedisStore, server: RedisServer) -> None:
    before = keys(server)
    attached = await store.coordination.attach("session:auto-1", "a")
    assert await store.coordination.detach(attached.fence)
    opened_ = await store.coordination.open("session:auto-2", "a", ["session", "subscription"], NOW)
    batch = Batch()
    batch.fence(opened_.attached.fence)
    batch.make("session:auto-2")
    batch.put("session", "auto-2", b"1")
    batch.put("subscription", pair("auto-2", "a/+"), b"1")
    batch.put("awaiting", pair("auto-2", "7"), b"1", NOW + 1)
    await store.write(batch)
    assert len(keys(server)) > len(before)
    end = Batch()
    end.fence(opened_.attached.fence)
    end.delete("session", "auto-2")
    end.delete("subscription", pair("auto-2", "a/+"))
    await store.write(end)
    await store.mailboxes.forget("session:auto-2", opened_.attached.fence)
    await store.coordination.detach(opened_.attached.fence)
    await store.sweep(NOW + 2, 1000)
    counters = {store.core.key(store.core.cells.of("client:auto-2"), kind) for kind in ("n", "p", "H")}
    assert counters | {store.core.key(0, "H")} >= keys(server) - before


async def test_a_large_mailbox_is_forgotten_only_while_the_fence_holds(store: RedisStore) -> None:
    attached = await store.coordination.attach("session:x", "a")
    for _ in range(4):
        batch = Batch()
        for _ in range(250):
            batch.append(["session:x"], Draft(b"1"), NOW)
        await store.write(batch)
    forgetting = asyncio.create_task(store.mailboxes.forget("session:x", attached.fence))
    await asyncio.sleep(0)  # its first step is under way
    await store.coordination.attach("session:x", "b")
    with pytest.raises(StoreFencedError):
        await forgetting
    assert 0 < (await store.mailboxes.info("session:x")).entries < 1000
    assert [] == await store.check()


async def test_a_decision_too_large_for_one_call_ends_where_the_fence_does(
    store: RedisStore, server: RedisServer
) -> None:
    async with opened(server.url) as other:
        attached = await store.coordination.attach("session:x", "a")
        batch = Batch()
        batch.fence(attached.fence)
        batch.append([f"v{number}" for number in range(20_000)], Draft(b"1", key=b"k"), NOW)
        before = store.core.writer.writes
        commit = store.write(batch)
        await until(lambda: store.core.writer.writes > before)
        await other.coordination.attach("session:x", "b")
        with pytest.raises(StoreError, match="in part"):
            await commit
        assert not commit.refused
    assert 0 < (await store.figures()).entries < 20_000
    assert [] == await store.check()


async def test_a_home_with_many_records_is_opened_whole(store: RedisStore) -> None:
    """Few come with the attach, many are read after it; binary values as they are."""
    every = bytes(range(256))
    for count in (5, 1500):
        batch = Batch()
        for number in range(count):
            batch.put("subscription", pair("x", f"f/{number}"), b"%d" % number + every)
        batch.put("subscription", pair("xx", "f"), b"of another")
        batch.put("session", "x", every)
        batch.put("awaiting", pair("x", "1"), b"expired", NOW - 1)
        await store.write(batch)
        found = await store.coordination.open("session:x", "a", ["session", "subscription", "awaiting"], NOW)
        assert [{"x": every}, count, {}] == [found.records[0], len(found.records[1]), found.records[2]]
        assert b"4" + every == found.records[1][pair("x", "f/4")]


async def test_check_tells_of_a_record_that_opening_would_not_find(store: RedisStore, server: RedisServer) -> None:
    for name in (pair("x", "a/+"), pair("x", "b"), "no pair"):
        await store.records.put("subscription", name, b"1")
    assert [] == await store.check()
    index = store.core.key(store.core.cells.of("client:x"), "i:", "client:x")
    server.command("SREM", index, f"subscription\0{pair('x', 'b')}")
    assert ["record subscription/1:xb: missing in the index of its home"] == await store.check()


# -- stores


async def test_nothing_of_a_fenced_store_lands_however_late(server: RedisServer, store: RedisStore) -> None:
    async with Relay(server.host, server.port) as relay:
        late = patient(f"redis://127.0.0.1:{relay.port}", Durability.FAST)
        await late.open()
        await late.mailboxes.append(["v"], Draft(b"1"), NOW)
        assert {store.writer, late.writer} == {member.writer for member in await store.coordination.members()}
        relay.hold()
        commits = []
        for number in range(3):
            batch = Batch()
            batch.append(["v"], Draft(b"late"), NOW)
            batch.acknowledge("v", [1])
            batch.stream("s", [b"%d" % number], NOW)
            commits.append(late.write(batch))
        await asyncio.sleep(0)
        assert await store.coordination.fence_member(late.writer)
        assert not await store.coordination.fence_member(late.writer)
        relay.release()
        outcomes = await asyncio.gather(*commits, return_exceptions=True)
        assert {StoreFencedError} == {type(outcome) for outcome in outcomes}
        assert all(commit.refused for commit in commits)
        assert [store.writer] == [member.writer for member in await store.coordination.members()]
        assert "is fenced" == late.condition().trouble
        with pytest.raises(StoreFencedError):
            await late.records.put("c", "key", b"1")
        assert 1 == len(await late.mailboxes.read("v", 0, 10, NOW)), "it may still read"
        await late.close()
        await late.open()
        assert 2 == (await late.mailboxes.append(["v"], Draft(b"2"), NOW))[0].position
        await late.close()
    assert [b"1", b"2"] == [entry.body for entry in await store.mailboxes.read("v", 0, 10, NOW)]


async def test_a_store_is_fenced_although_a_fail_over_has_forgotten_that_it_is_listed(
    server: RedisServer, store: RedisStore
) -> None:
    """The list lies on one server of a cluster; the others know the writer still."""
    late = patient(server.url, Durability.FAST)
    await late.open()
    assert 1 == server.client.hdel(f"motorcade:{{0}}:{redis_members.LIST}", late.writer)
    assert not await store.coordination.fence_member(late.writer)
    with pytest.raises(StoreFencedError):
        await late.records.put("c", "key", b"1")
    await late.close()


async def test_a_write_whose_answer_was_lost_before_the_fence_is_of_unknown_outcome(
    server: RedisServer, store: RedisStore
) -> None:
    async with Relay(server.host, server.port) as relay:
        late = patient(f"redis://127.0.0.1:{relay.port}", Durability.FAST)
        await late.open()
        relay.lose_next(then_hold=True)
        batch = Batch()
        batch.append(["v"], Draft(b"1"), NOW)
        commit = late.write(batch)
        await until(lambda: relay.lost == 1)
        assert await store.coordination.fence_member(late.writer)
        relay.release()
        with pytest.raises(StoreError, match="perhaps written"):
            await commit
        assert not commit.refused
        assert 1 == (await store.mailboxes.info("v")).entries
        await late.close()


async def test_a_store_that_is_closed_leaves_no_registration(server: RedisServer) -> None:
    async with opened(server.url) as store:
        assert [store.writer] == [member.writer for member in await store.coordination.members()]
        assert 2 == len(keys(server, "{*}:w*"))
    assert set() == keys(server, "{*}:w*")


async def test_the_registration_of_a_process_that_died_goes_with_a_sweep(
    server: RedisServer, store: RedisStore
) -> None:
    async with opened(server.url) as alive:
        dead, key = "0123456789abcdef", "motorcade:{0}:w:0123456789abcdef"
        server.command("SET", key, b"5:\x90")
        for age, listed in ((3600, True), (90_000, False)):
            server.command("HSET", "motorcade:{0}:w", dead, f"{int(time.time()) - age}:{NOW:.3f}")
            await store.sweep(NOW, 100)
            assert listed == (dead in {member.writer for member in await store.coordination.members()})
        assert b"closed" == server.command("GET", key)
        assert 0 < server.command("PTTL", key)
        await alive.records.put("c", "key", b"1")
        assert 2 == len(await store.coordination.members())


async def test_a_store_that_never_sweeps_shows_that_it_is_alive(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_members, "PULSE", 0.01)
    async with opened(server.url) as quiet:
        server.command("HSET", "motorcade:{0}:w", quiet.writer, f"1000:{NOW:.3f}")
        await until(lambda: not server.command("HGET", "motorcade:{0}:w", quiet.writer).startswith(b"1000:"))
        await store.sweep(NOW, 100)
        await quiet.records.put("c", "key", b"1")


async def test_a_store_may_fence_itself(store: RedisStore) -> None:
    assert await store.coordination.fence_member(store.writer)
    with pytest.raises(StoreFencedError):
        await store.records.put("c", "key", b"1")
    assert [] == await store.coordination.members()


async def test_a_full_store_can_be_opened_to_be_emptied(own_server: RedisServer) -> None:
    async with opened(own_server.url) as store:
        await store.mailboxes.append(["v"], Draft(b"1"), NOW)
    own_server.command("CONFIG", "SET", "maxmemory", own_server.client.info("memory")["used_memory"] // 2)
    async with opened(own_server.url) as store:
        assert 1 == await store.mailboxes.acknowledge("v", [1])


async def test_a_note_after_a_fail_over_is_not_taken_for_the_one_before(store: RedisStore, server: RedisServer) -> None:
    feed = store.feeds.feed_of("client:x")
    ends = []
    for data in (b"1", b"2"):
        batch = Batch()
        batch.note("client:x", data)
        await store.write(batch)
        ends.append((await store.feeds.ends())[feed])
    assert [b"2"] == [note.data for note in (await store.feeds.read(feed, ends[0], 10)).notes]
    server.command("XDEL", store.core.key(feed, "F"), "2-0")
    server.command("HINCRBY", store.core.key(feed, "n"), "notes", -1)
    assert (await store.feeds.read(feed, ends[1], 10)).gap
    server.command("DEL", store.core.key(feed, "F"))
    server.command("HSET", store.core.key(feed, "n"), "notes", 1)
    batch = Batch()
    batch.note("client:x", b"another")
    await store.write(batch)
    assert ends[1].number == (await store.feeds.ends())[feed].number
    assert (await store.feeds.read(feed, ends[1], 10)).gap
    assert (await store.feeds.read(feed, FeedEnd(), 10)).gap


# -- a cluster


@pytest.mark.timeout(300)
async def test_on_a_cluster_fences_hold_in_every_cell(cluster: RedisCluster) -> None:
    async with opened(cluster.url, Durability.SAFE) as store:
        late = patient(cluster.url, Durability.SAFE)
        await late.open()
        names = [f"v{number}" for number in range(50)]
        mine = await late.coordination.attach("session:x", "a")
        stale, good = Batch(), Batch()
        for batch, fence in ((stale, mine.fence), (good, (await store.coordination.attach("session:x", "b")).fence)):
            batch.append(names, Draft(b"1", b"p" * 1000), NOW)
            batch.put("session", "x", b"1")
            batch.fence(fence)
            batch.note("client:x", b"x")
            batch.make("session:x")
        with pytest.raises(StoreFencedError) as raised:
            await late.write(stale)
        assert raised.value.certain
        assert 0 == (await store.figures()).entries
        written = await store.write(good)
        assert names == [answer.owner for answer in written.appended]
        assert [1] == list(written.generations)
        assert 1 == sum(end.number for end in await store.feeds.ends())
        found = await late.coordination.open("session:x", "a", ["session"], NOW)
        assert ("b", [{"x": b"1"}], 1) == (
            found.attached.previous,
            found.records,
            found.attached.mailbox.generation,
        )
        assert await store.coordination.fence_member(late.writer)
        outcomes = await asyncio.gather(
            *(late.mailboxes.append([name], Draft(b"2"), NOW) for name in names), return_exceptions=True
        )
        assert {StoreFencedError} == {type(outcome) for outcome in outcomes}
        assert 50 == (await store.figures()).entries
        await late.close()
        assert [store.writer] == [member.writer for member in await store.coordination.members()]
        assert [] == await store.check()
    for server in cluster.masters():
        assert all(b"closed" == server.command("GET", key) for key in server.client.keys("motorcade:{*}:w:*"))


def _put(collection: str, key: str) -> Callable[[Batch, bytes], None]:
    return lambda batch, value: batch.put(collection, key, value)


def _append(owner: str, **more: Any) -> Callable[[Batch, bytes], None]:
    return lambda batch, value: batch.append([owner], Draft(value, **more), NOW)


#: What each feature writes of one thing: the last value counts, or the first one with a token.
LAST_WORDS: dict[str, tuple[Callable[[Batch, bytes], None], str]] = {
    "retained": (_put("retained", "t"), "retained"),
    "compacted": (_append("ecq:car", key=b"kdoor"), "ecq:car"),
    "last value": (_append("queue:jobs", key=b"kdoor"), "queue:jobs"),
    "replace": (_append("fanout:VIN", key=b"request"), "fanout:VIN"),
    "QoS 2 in": (_put("awaiting", pair("car", "7")), "awaiting"),
    "progress": (_put("ecq-progress", "car"), "ecq-progress"),
}


@pytest.mark.parametrize("feature", LAST_WORDS)
@pytest.mark.parametrize("after", ["at once", "eleven minutes later", "days later"])
async def test_the_last_word_is_not_that_of_a_late_writer(
    server: RedisServer, store: RedisStore, feature: str, after: str
) -> None:
    """It was sent before the fence, with an older value, and arrives after another member's newer one."""
    write, place = LAST_WORDS[feature]
    async with Relay(server.host, server.port) as relay:
        late = patient(f"redis://127.0.0.1:{relay.port}", Durability.FAST)
        await late.open()
        await late.mailboxes.append(["v"], Draft(b"1"), NOW)
        closed = next(key for key in keys(server, "{*}:w:*") if late.writer.encode() in key)
        relay.hold()
        old, new = Batch(), Batch()
        write(old, b"old")
        commit = late.write(old)
        await asyncio.sleep(0)
        assert await store.coordination.fence_member(late.writer)
        write(new, b"new")
        await store.write(new)
        if after == "eleven minutes later":
            assert server.command("PTTL", closed) > 11 * 60 * 1000, "what tells of the fence is there then"
        elif after == "days later":
            server.command("DEL", closed)
        relay.release()
        with pytest.raises(StoreFencedError):
            await commit
        assert commit.refused
        await late.close()
    if ":" in place:
        assert [b"new"] == [entry.body for entry in await store.mailboxes.read(place, 0, 10, NOW)]
    else:
        assert [b"new"] == [value async for _, value in store.records.scan(place, NOW)]


@pytest.mark.parametrize("days", [False, True], ids=["at once", "days later"])
async def test_late_acknowledgements_of_a_fenced_member_remove_nothing(
    server: RedisServer, store: RedisStore, *, days: bool
) -> None:
    """They would be true of the entries they are about; what came in their place they never meet, fenced or not."""
    async with Relay(server.host, server.port) as relay:
        late = patient(f"redis://127.0.0.1:{relay.port}", Durability.FAST)
        await late.open()
        assert 1 == (await late.mailboxes.append(["session:car"], Draft(b"1"), NOW))[0].position
        closed = next(key for key in keys(server, "{*}:w:*") if late.writer.encode() in key)
        relay.hold()
        late_batch = Batch()
        late_batch.acknowledge("session:car", range(1, 10))
        late_batch.mark("session:car", 2, 1)
        commit = late.write(late_batch)
        await asyncio.sleep(0)
        assert await store.coordination.fence_member(late.writer)
        await store.mailboxes.forget("session:car")
        await store.mailboxes.append(["session:car"], Draft(b"2"), NOW)
        if days:
            server.command("DEL", closed)
        relay.release()
        with pytest.raises(StoreFencedError):
            await commit
        await late.close()
    (entry,) = await store.mailboxes.read("session:car", 0, 10, NOW)
    assert (b"2", 0) == (entry.body, entry.mark)
