"""Groups, repetition, confirmation, refusal."""

from __future__ import annotations

import asyncio
import time

import pytest

from motorcade.storage.ports import Batch, Bound, Draft, Durability, StoreError, StoreFullError, StoreRefusedError
from motorcade.storage.redis import RedisStore
from motorcade.storage.redis_format import unpack_state
from motorcade.storage.redis_scripts import COMMIT
from motorcade.storage.redis_writer import Pipeline, PipelineCall, WriteJob
from tests.support.redis import RedisServer, wait_until
from tests.support.waiting import until
from tests.unit.storage_redis.opening import links, opened
from tests.unit.storage_redis.proxy import Relay

NOW = time.time()


async def test_what_is_written_together_goes_together(store: RedisStore) -> None:
    """A thousand callers, far fewer groups."""
    await asyncio.gather(*(store.mailboxes.append([f"v{n}"], Draft(b"b"), NOW) for n in range(1000)))
    figures = await store.figures()
    assert 1000 == figures.writes == figures.entries
    assert figures.commits <= 20
    assert 0 == figures.queued


async def test_one_bad_caller_does_not_spoil_the_group(store: RedisStore, server: RedisServer) -> None:
    """A key of ours that holds something else concerns its own cell's script, and says what to do."""
    cell = store.core.cells.of("v1")
    server.command("SET", store.core.key(cell, "e:", "v1"), "not ours")
    with pytest.raises(StoreError, match="prefix"):
        await store.mailboxes.append(["v1"], Draft(b"b"), NOW)
    assert 1 == (await store.mailboxes.append(["v2"], Draft(b"b"), NOW))[0].position


async def test_a_call_whose_answer_was_lost_is_done_once(server: RedisServer) -> None:
    """Plain appends, without a token: the second sending is answered from what the first left behind."""
    async with Relay(server.host, server.port) as relay, opened(f"redis://127.0.0.1:{relay.port}") as store:
        for number in range(1, 21):
            relay.lose_next(number % 3)
            answers = await store.mailboxes.append(["v1", "v2"], Draft(b"%d" % number), NOW)
            assert [number, number] == [answer.position for answer in answers]
            assert [number] == await store.streams.append("s", [b"%d" % number], NOW)
            attached = await store.coordination.attach("v1", "node")
            assert number == attached.fence.number
        assert relay.lost >= 20
        assert [b"%d" % n for n in range(1, 21)] == [e.body for e in await store.mailboxes.read("v1", 0, 100, NOW)]
        assert 20 == (await store.streams.info("s")).records
        assert [] == await store.check()


async def test_a_call_that_was_held_up_is_not_carried_out_late(store: RedisStore, server: RedisServer) -> None:
    await store.mailboxes.append(["v1"], Draft(b"1"), NOW)
    await store.mailboxes.append(["v1"], Draft(b"2"), NOW)
    pipeline = store.core.writer._pipelines[0]
    with pytest.raises(Exception, match="STALE"):
        server.command("EVALSHA", COMMIT.digest, 1, pipeline.key, "motorcade", pipeline.number - 1, b"\x90", "0")
    assert 2 == (await store.mailboxes.info("v1")).entries


async def test_scripts_that_were_flushed_are_loaded_again(store: RedisStore, server: RedisServer) -> None:
    await store.mailboxes.append(["v1"], Draft(b"1"), NOW)
    server.command("SCRIPT", "FLUSH")
    assert 2 == (await store.mailboxes.append(["v1"], Draft(b"2"), NOW))[0].position
    server.command("SCRIPT", "FLUSH")
    assert 2 == (await store.mailboxes.info("v1")).entries
    assert 2 == len(await store.mailboxes.read("v1", 0, 10, NOW))


async def test_writes_wait_for_a_server_that_comes_back(own_server: RedisServer) -> None:
    async with opened(own_server.url, patience=60.0) as store:
        await store.mailboxes.append(["v1"], Draft(b"1"), NOW)
        own_server.kill()
        writing = asyncio.create_task(store.mailboxes.append(["v1"], Draft(b"2"), NOW))
        reading = asyncio.create_task(store.mailboxes.read("v1", 0, 10, NOW))
        await until(lambda: any(link.trouble for link in store.core.servers._links.values()))  # an attempt has failed
        assert not writing.done() and not reading.done()
        await asyncio.to_thread(own_server.start)
        assert 1 < (await writing)[0].position
        assert b"1" == (await reading)[0].body


async def test_patience_ends(own_server: RedisServer) -> None:
    async with opened(own_server.url, patience=0.3) as store:
        own_server.kill()
        await until(lambda: not any(link.connection and link.connection.is_open for link in links(store)))
        with pytest.raises(StoreRefusedError, match=r"within 0\.3 s") as raised:
            await store.mailboxes.append(["v1"], Draft(b"1"), NOW)
        assert raised.value.certain
        waiting = [store.mailboxes.append([f"w{number}"], Draft(b"1"), NOW) for number in range(500)]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert ({StoreRefusedError}, 0) == ({type(outcome) for outcome in outcomes}, store.core.writer.queued)
        with pytest.raises(StoreError, match=r"within 0\.3 s"):
            await store.mailboxes.info("v1")
        await asyncio.to_thread(own_server.start)
        store.core.servers.patience = 60.0  # when it is there, it may be slow
        assert 1 == (await store.mailboxes.append(["v1"], Draft(b"1"), NOW))[0].position


async def test_a_full_server_refuses_appends_and_lets_acknowledgements_through(own_server: RedisServer) -> None:
    """In one group too, and it takes appends again when there is room."""
    async with opened(own_server.url) as store:
        for _ in range(50):
            await store.mailboxes.append(["v1"], Draft(b"x" * 1000), NOW)
        used = own_server.client.info("memory")["used_memory"]
        own_server.command("CONFIG", "SET", "maxmemory", used // 2)
        appends = [store.mailboxes.append(["v1"], Draft(b"new"), NOW) for _ in range(3)]
        acks = [store.mailboxes.acknowledge("v1", [position]) for position in (1, 2, 3)]
        outcomes = await asyncio.gather(*appends, *acks, return_exceptions=True)
        assert [StoreFullError] * 3 == [type(outcome) for outcome in outcomes[:3]]
        assert [1, 1, 1] == outcomes[3:]
        with pytest.raises(StoreFullError):
            await store.mailboxes.append(["v1"], Draft(b"new"), NOW)
        assert (await store.figures()).full
        own_server.command("CONFIG", "SET", "maxmemory", 0)
        assert 51 == (await store.mailboxes.append(["v1"], Draft(b"new"), NOW))[0].position
        assert not (await store.figures()).full
        assert 48 == (await store.mailboxes.info("v1")).entries
        assert [] == await store.check()


async def test_safe_means_confirmed_by_a_replica() -> None:
    """A write that no replica confirms waits, however long, and is confirmed when the replica is back."""
    with RedisServer() as master, RedisServer({"replicaof": f"{master.host} {master.port}"}) as replica:
        wait_until(lambda: "online" in str(master.client.info("replication").get("slave0")), "the replica follows")
        async with opened(master.url, Durability.SAFE, patience=60.0) as store:
            assert 1 == (await store.mailboxes.append(["v1"], Draft(b"1"), NOW))[0].position
            replica.pause()
            acknowledged = await store.mailboxes.acknowledge("v1", [1])
            assert 1 == acknowledged, "acknowledgements need no confirmation"
            store.core.servers.patience = 0.1
            writing = asyncio.create_task(store.mailboxes.append(["v1"], Draft(b"2"), NOW))
            await until(lambda: store.core.writer.unconfirmed > 1)
            assert not writing.done()
            assert "0 of 1 replicas" in store.condition().detail
            store.core.servers.patience = 60.0
            replica.resume()
            assert 2 == (await writing)[0].position
            assert 3 == (await store.mailboxes.append(["v1"], Draft(b"3"), NOW))[0].position
            found = replica.client.hget(store.core.key(store.core.cells.of("v1"), "e:", "v1"), "s")
            assert isinstance(found, bytes)
            assert 3 == unpack_state(found).last


async def test_large_batches_are_cut_and_stay_in_order(store: RedisStore) -> None:
    batch = Batch()
    names = [f"v{number}" for number in range(2500)]
    batch.append(names, Draft(b"1", b"p" * 100), NOW)
    batch.append(names, Draft(b"2", b"p" * 100), NOW, Bound(entries=1))
    answers = (await store.write(batch)).appended
    assert [*names, *names] == [answer.owner for answer in answers]
    assert {(1, ())} == {(answer.position, answer.dropped) for answer in answers[:2500]}
    assert {(2, (1,))} == {(answer.position, answer.dropped) for answer in answers[2500:]}
    assert [] == await store.check()


async def test_what_is_empty_can_be_removed(store: RedisStore) -> None:
    """Nothing off a size is "-0" in Lua, which the server does not take for a number."""
    for _ in range(4):
        await store.mailboxes.append(["v1"], Draft(b"", expires_at=NOW + 1), NOW)
    assert 1 == await store.mailboxes.acknowledge("v1", [1])
    assert 2 == (await store.sweep(NOW + 2, 2)).removed
    assert 1 == await store.mailboxes.clear("v1")
    await store.streams.append("s", [b"", b""], NOW)
    assert 1 == (await store.streams.trim("s", records=1)).removed
    await store.records.put("c", "key", b"", NOW + 1)
    await store.blobs.put(b"", NOW)
    assert (await store.sweep(NOW + 2, 100)).cursor is None
    assert (0, 0) == await store.blobs.count()
    assert [] == await store.check()


def test_calls_that_were_refused_together_go_one_by_one() -> None:
    """Before all others, whatever their kind, also if some of them are put back or are late meanwhile."""
    pipeline, late, timely = Pipeline(0, "w"), WriteJob([], 0.0), WriteJob([], 10.0)

    def call(job: WriteJob, *, early: bool) -> PipelineCall:
        return PipelineCall(job, pipeline, 0, [], [], True, early, 1, 1, grows=True, ready=True)

    payload, entry, other = call(late, early=True), call(timely, early=False), call(timely, early=True)
    for each in (payload, entry):
        each.alone = True
    pipeline.put_back([payload, entry])
    pipeline.put_back([other])
    assert payload is pipeline.peek() is pipeline.take()
    pipeline.put_back([payload])
    assert [payload] == pipeline.remove_late(5.0)
    assert [entry, other] == [pipeline.take(), pipeline.take()]
    assert not pipeline.has_work
