"""A leader with workers that the test plays: nothing lost, the same ids, credit, dead letters, taking over."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest
import redis as redis_client
from msgspec.structs import replace

from motorcade.core.errors import StoreError
from motorcade.dispatch.frames import ack_frames, reject_frame, return_frames
from motorcade.dispatch.leader import run_leader
from motorcade.dispatch.links import FIRST_WINDOW, Fault
from motorcade.dispatch.status import dead_list, dead_retry, status
from motorcade.dispatch.views import RateReport
from tests.support.redis import RedisServer
from tests.support.standing_clock import clock, turn, until
from tests.unit.dispatch.rig import (
    DEAD,
    DEAD_IDS,
    DELIVERIES,
    LOCK,
    PENDING,
    PUBLISHED,
    WORKERS,
    Peer,
    acknowledge,
    is_empty,
    leading,
    numbered,
    peer,
    publish,
    redis,
    running,
)
from tests.unit.storage_redis.proxy import Relay

STATE = "{distributed_leader_lock}:state"


async def test_messages_reach_a_worker_and_are_finished(options, server) -> None:
    """Whatever they are: the leader does not look into them, and equal ones are several messages."""
    odd = [b"no json", b"", b"\x00\xff\x00:", b'{"a": 1', *[b'{"message_id":"1"}'] * 3]
    async with peer(acknowledge) as worker, leading(options, worker) as leader:
        publish(server, *numbered(1000), *odd)
        await until(lambda: leader.pending.acknowledged == 1007, "acknowledged")
        assert sorted([*numbered(1000), *odd]) == sorted(worker.texts)
        assert 1007 == len(set(worker.ids))
        await until(lambda: is_empty(server), "finished")


async def test_what_is_trimmed_from_the_intake_is_told(options, server) -> None:
    """Before it could be read, and what an earlier leader has read and no worker has finished."""
    async with peer() as worker, leading(options, worker) as leader:
        publish(server, *numbered(10))
        await until(lambda: len(worker.messages) == 10, "sent")
        assert (0, 0) == (leader.view().trimmed, leader.view().unfinished)
    redis(server, "XTRIM", PUBLISHED, "MAXLEN", "4")
    async with leading(options) as leader:  # there is no worker
        publish(server, *numbered(10, 10))
        redis(server, "XTRIM", PUBLISHED, "MAXLEN", "3")
        await until(lambda: leader.view().trimmed == 7, "counted while nothing can be read")
    async with peer(acknowledge) as worker, leading(options, worker) as leader:
        await until(lambda: leader.view().unfinished == 10, "found when it is claimed")
        await until(lambda: is_empty(server), "finished")
        await until(lambda: leader.view().trimmed == 7, "once")
    found = await status(options)
    assert (7, 10, 0) == (found.trimmed, found.unfinished, found.lag)


async def test_workers_take_turns(options, server) -> None:
    """In one batch, and one message at a time."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(peer(acknowledge)) for _ in range(3)]
        leader = await stack.enter_async_context(leading(options, *workers))
        await until(lambda: len(leader._order) == 3, "connected")
        for number in range(9):
            publish(server, b"%d" % number)
            await until(lambda: leader.pending.acknowledged == number + 1, "acknowledged")  # noqa: B023 - at once
        assert [3, 3, 3] == [len(worker.messages) for worker in workers]
        publish(server, *numbered(300, 9))
        await until(lambda: leader.pending.acknowledged == 309, "acknowledged")
        assert min(len(worker.messages) for worker in workers) > 50


async def test_no_more_is_read_than_workers_have_credit_for(options, server) -> None:
    """The rest waits in Redis; one batch is in the leader, at most."""
    async with peer() as worker, leading(options, worker) as leader:
        publish(server, *numbered(500))
        await until(lambda: len(worker.messages) == FIRST_WINDOW, "the window is full")
        await until(lambda: leader.held_up, "held up")
        assert FIRST_WINDOW == len(leader.pending.open) == server.command("ZCARD", PENDING)
        worker.answer = acknowledge
        worker.say(ack_frames(worker.ids))
        await until(lambda: leader.pending.acknowledged == 500, "acknowledged")


async def test_pending_is_stored_before_a_worker_gets_it(options, server) -> None:
    async with peer(acknowledge) as worker, leading(options, worker) as leader:
        await until(lambda: leader._order, "connected")
        await turn(1.0)
        redis(server, "SET", PENDING, "no sorted set")
        publish(server, *numbered(10))
        await until(lambda: leader.read == 10, "read")
        await turn(5.0)
        assert [] == worker.messages, "as long as it cannot be stored"
        redis(server, "DEL", PENDING)
        await until(lambda: len(worker.messages) == 10, "arrived")
        await until(lambda: is_empty(server), "finished")


async def test_who_does_not_answer_loses_the_message_to_another(options, server) -> None:
    """Under the same id, counted; when no worker ever answers, it becomes a dead letter with that reason."""
    options = replace(options, max_deliveries=3)
    async with peer() as silent, peer() as other, leading(options, silent, other) as leader:
        await until(lambda: len(leader._order) == 2, "connected")
        publish(server, b"1")
        await turn(options.ack_timeout - 1)
        assert 1 == len(silent.messages + other.messages)
        await turn(2)
        assert [(1, 1), silent.ids] == [(len(silent.ids), len(other.ids)), other.ids]
        assert b"1" == server.command("HGET", DELIVERIES, silent.ids[0])
        holder = other if leader.links[other.name].held else silent
        holder.say(ack_frames(holder.ids[-1:]))
        await until(lambda: is_empty(server), "finished")
        publish(server, b"2")
        await until(lambda: leader.dead_lettered == 1, "given up", within=4 * options.ack_timeout)
        (letter,) = await dead_list(options)
        assert (b"2", 3, True) == (letter.payload, letter.deliveries, letter.reason.startswith(("overdue", "hung")))


async def test_a_worker_that_does_not_read_delays_no_other(options, server) -> None:
    """A worker that hangs with a full socket is cut off in time; another one does its work."""
    options = replace(options, window=10_000, window_bytes=50_000_000)
    async with peer() as stuck, peer(acknowledge) as other, leading(options, stuck) as leader:
        stuck.reads = False
        publish(server, *[b'"%b"' % (b"x" * 100_000)] * 60)
        await until(lambda: leader.links[stuck.name].held, "it has got something")
        redis(server, "ZADD", WORKERS, 99_999_999_999_999, other.name)
        await until(lambda: leader.pending.acknowledged == 60, "done by the other")
        assert 1 == leader.links[stuck.name].faults[Fault.HUNG] == leader.view().workers[0].faults.get("hung", 1)


async def test_what_a_lost_worker_had_goes_to_another_at_once(options, server) -> None:
    async with peer() as dying, peer(acknowledge) as other, leading(options, dying, other) as leader:
        await until(lambda: len(leader._order) == 2, "connected")
        publish(server, *numbered(10))
        await until(lambda: len(dying.messages) == 5, "its share has come")
        dying.hang_up()
        await until(lambda: leader.pending.acknowledged == 10, "all acknowledged")
        assert sorted(numbered(10)) == sorted(other.texts)
        await until(lambda: is_empty(server), "finished")


async def test_what_is_refused_too_often_is_put_aside_with_the_reason(options, server) -> None:
    options = replace(options, max_deliveries=3)
    refuse = lambda ids: b"".join(reject_frame(id_, "ValueError: no wheels") for id_ in ids)  # noqa: E731
    async with peer(refuse) as worker, leading(options, worker) as leader:
        publish(server, b'{"wheels": 0}')
        await until(lambda: leader.dead_lettered == 1, "given up")
        assert 3 == len(worker.messages)
        await until(lambda: is_empty(server), "nothing is left elsewhere")
        (letter,) = await dead_list(options)
        assert (worker.ids[0].decode(), b'{"wheels": 0}', 3) == (letter.id, letter.payload, letter.deliveries)
        assert ("refused: ValueError: no wheels", worker.name) == (letter.reason, letter.worker)
        worker.answer = acknowledge
        assert 1 == await dead_retry(options)
        await until(lambda: leader.pending.acknowledged == 1, "processed after all")
        assert (b'{"wheels": 0}', 4) == (worker.texts[-1], len(worker.messages))
        assert [] == await dead_list(options)


async def test_a_message_that_kills_workers_is_found_before_its_neighbours_suffer(options, server) -> None:
    """It comes first, so that none of its neighbours is ever answered in the same read."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(peer()) for _ in range(2)]
        for worker in workers:
            worker.answer = lambda ids, worker=worker: die_of_poison(worker, ids)  # type: ignore[misc]
        publish(server, b"poison", *numbered(300))
        leader = await stack.enter_async_context(leading(options, *workers))
        await until(lambda: leader.dead_lettered, "given up")
        await until(lambda: is_empty(server), "finished")
        assert (300, 1) == (leader.pending.acknowledged, leader.dead_lettered)
    (letter,) = await dead_list(options)
    assert (b"poison", "lost") == (letter.payload, letter.reason.partition(":")[0])


async def test_a_worker_that_has_never_done_anything_condemns_nothing(options, server) -> None:
    """It hangs up on everything; a later worker gets all messages."""
    options = replace(options, max_deliveries=2)
    async with peer() as bad, peer(acknowledge) as good:

        def hang_up(_ids: list[bytes]) -> bytes:
            bad.hang_up()
            return b""

        bad.answer = hang_up
        publish(server, *numbered(20))
        async with leading(options, bad) as leader:
            await until(lambda: bad.connections > 4, "it has hung up a few times")
            redis(server, "ZADD", WORKERS, 99_999_999_999_999, good.name)
            await until(lambda: leader.pending.acknowledged == 20, "acknowledged")
            assert 0 == leader.dead_lettered


async def test_a_good_message_proves_the_worker_that_a_bad_one_kills(options, server) -> None:
    """One worker, and poison first: its neighbours get their turn, then the poison counts."""
    options = replace(options, max_deliveries=2)
    async with peer() as worker:
        worker.answer = lambda ids: die_of_poison(worker, ids)
        publish(server, b"poison", *numbered(10))
        async with leading(options, worker) as leader:
            await until(lambda: leader.pending.acknowledged == 10 and leader.dead_lettered == 1, "all done")


def die_of_poison(worker: Peer, ids: list[bytes]) -> bytes:
    if b"poison" in worker.texts[-len(ids) :]:
        worker.hang_up()
        return b""
    return ack_frames(ids)


async def test_what_is_given_back_is_not_counted(options, server) -> None:
    """However often."""
    options = replace(options, max_deliveries=2)
    async with peer(return_frames) as worker, leading(options, worker) as leader:
        publish(server, b"1")
        await until(lambda: len(worker.messages) > 10, "sent again and again")
        worker.answer = acknowledge
        await until(lambda: leader.pending.acknowledged == 1, "acknowledged")
        assert (0, 1) == (leader.dead_lettered, len(set(worker.ids)))


async def test_what_is_too_large_is_put_aside(options, server) -> None:
    options = replace(options, max_message=1000)
    async with peer(acknowledge) as worker, leading(options, worker) as leader:
        publish(server, b"1", b"x" * 1001, b"2")
        await until(lambda: leader.dead_lettered == 1 and leader.pending.acknowledged == 2, "all done")
        (letter,) = await dead_list(options)
        assert (b"x" * 1001, "too_large") == (letter.payload, letter.reason.partition(":")[0])
        assert [b"1", b"2"] == sorted(worker.texts)
        await until(lambda: is_empty(server), "finished")


async def test_a_new_leader_sends_what_the_old_one_had_under_the_same_ids(options, server) -> None:
    """Also what the old one had read and not sent to any worker."""
    publish(server, *numbered(40))
    async with peer() as silent:
        async with leading(options, silent):
            await until(lambda: len(silent.messages) == FIRST_WINDOW, "the window is full")
        server.command("XREADGROUP", "GROUP", "dispatch", "leader", "COUNT", 5, "STREAMS", PUBLISHED, ">")
        async with peer(acknowledge) as worker, leading(options, worker) as leader:
            await until(lambda: leader.pending.acknowledged == 40, "acknowledged")
            assert sorted(numbered(40)) == sorted(worker.texts)
            assert dict(silent.messages).items() <= dict(worker.messages).items()
            await until(lambda: is_empty(server), "finished")


async def test_taking_over_is_tried_again_when_it_fails(options, server) -> None:
    """Nothing is forgotten between claiming and sending."""
    publish(server, *numbered(5))
    async with peer() as silent, leading(options, silent):
        await until(lambda: len(silent.messages) == 5, "arrived")
    redis(server, "SET", DELIVERIES, "no hash")
    async with peer(acknowledge) as worker, leading(options, worker) as leader:
        await until(lambda: leader.intake._size and leader._claim_all, "claimed, and failed")
        assert ([], {}) == (worker.messages, leader.pending.open)
        redis(server, "DEL", DELIVERIES)
        await until(lambda: leader.pending.acknowledged == 5, "acknowledged")


async def test_deliveries_are_counted_over_leaders(options, server) -> None:
    """What the old leader has counted is not forgotten; that it was lost does not count."""
    options = replace(options, max_deliveries=3)
    refusals = 2

    def refuse_twice(ids: list[bytes]) -> bytes:
        nonlocal refusals
        refusals -= 1
        return reject_frame(ids[0], "no") if refusals >= 0 else b""

    publish(server, b"1")
    async with peer(refuse_twice) as worker:
        async with leading(options, worker):
            await until(lambda: len(worker.messages) == 3, "sent a third time")
        async with leading(options, worker) as leader:
            await until(lambda: len(worker.messages) == 4, "sent by the next leader")
            worker.say(reject_frame(worker.ids[0], "no"))
            await until(lambda: leader.dead_lettered == 1, "given up")
    (letter,) = await dead_list(options)
    assert 3 == letter.deliveries


async def test_what_was_given_up_and_not_cleared_is_given_up_once(options, server) -> None:
    """A leader that was killed between the two has written the letter; the next one only clears the rest."""
    options = replace(options, max_deliveries=1)
    publish(server, b"1")
    async with peer() as worker:
        async with leading(options, worker):
            await until(lambda: worker.messages, "arrived")
        id_ = worker.ids[0]
        server.command("HSET", DELIVERIES, id_, 1)
        server.command("XADD", DEAD, "7-1", "id", id_, "payload", "1", "reason", "r", "deliveries", 1)
        server.command("HSET", DEAD_IDS, id_, "7-1")
        async with leading(options, worker) as leader:
            await until(lambda: leader.dead_lettered, "given up")
            await until(lambda: is_empty(server), "finished")
    assert (1, 1) == (len(await dead_list(options)), len(worker.messages))


async def test_a_stopped_leader_waits_for_what_is_on_its_way(options, server) -> None:
    options = replace(options, stop_patience=60.0)
    publish(server, *numbered(5))
    async with peer() as worker:
        async with leading(options, worker) as leader:
            await until(lambda: len(worker.messages) == 5, "arrived")
            clock().call_later(50.0, lambda: worker.say(ack_frames(worker.ids)))
        assert 5 == leader.pending.acknowledged
        assert is_empty(server)


async def test_a_leader_whose_fence_has_fallen_does_nothing_more(options, server) -> None:
    """It ends its term; what a worker acknowledges to it then is not finished by it."""
    async with peer() as worker, leading(options, worker) as leader:
        publish(server, *numbered(5))
        await until(lambda: len(worker.messages) == 5, "arrived")
        for key in (PUBLISHED, PENDING, DEAD, WORKERS):
            redis(server, "SET", f"{{{key}}}:fence", "99 host:1:ab")
        worker.say(ack_frames(worker.ids))
        await until(lambda: leader.links[worker.name].state == "closed", "it has ended")
        assert (5, 5) == (server.command("XLEN", PUBLISHED), server.command("ZCARD", PENDING))


async def test_a_lost_answer_loses_nothing(options, server) -> None:
    """Redis has done it, and the leader never heard of it; or the connections break off. Nothing is found twice."""
    for intake in ("stream", "channel"):
        server.empty()
        async with Relay(server.host, server.port) as relay, peer(acknowledge) as worker:
            through = replace(options, intake=intake, redis=f"redis://127.0.0.1:{relay.port}")
            async with leading(through, worker) as leader:
                await until(lambda: heard(server, leader.channel), "the channel has a subscriber")
                for start in range(0, 600, 20):
                    relay.lose_next(start % 3)
                    send(server, intake, *numbered(20, start))
                    await turn(0.1)
                    if intake == "stream" and start % 100 == 0:
                        redis(server, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                relay.lose_next(0)
                await until(lambda: set(numbered(600)) == set(worker.texts), "all have come")
                assert 600 == len(set(worker.ids))
                await turn(60.0)
                assert leader.pending.acknowledged >= 600 and not leader.pending.open
            assert relay.lost > 10


def heard(server: RedisServer, channel: object) -> bool:
    return channel is None or bool(server.client.pubsub_numsub(PUBLISHED)[0][1])


def send(server: RedisServer, intake: str, *messages: bytes) -> None:
    if intake == "stream":
        publish(server, *messages)
        return
    for message in messages:
        redis(server, "PUBLISH", PUBLISHED, message)


async def test_a_stream_that_is_deleted_begins_again(options, server) -> None:
    async with peer(acknowledge) as worker, leading(options, worker) as leader:
        publish(server, *numbered(3))
        await until(lambda: leader.pending.acknowledged == 3, "acknowledged")
        redis(server, "DEL", PUBLISHED)
        publish(server, b"3")
        await until(lambda: leader.pending.acknowledged == 4, "acknowledged")
        assert 4 == len(set(worker.ids))


async def test_what_other_readers_want_stays(options, server) -> None:
    options = replace(options, keep_published=True)
    async with peer(acknowledge) as worker, leading(options, worker) as leader:
        publish(server, *numbered(10))
        await until(lambda: leader.pending.acknowledged == 10, "acknowledged")
        await until(lambda: server.command("ZCARD", PENDING) == 0, "finished")
        assert 10 == server.command("XLEN", PUBLISHED)
        publish(server, b"10")
        await until(lambda: leader.pending.acknowledged == 11, "acknowledged")
        assert 11 == len(worker.messages)


async def test_keys_that_are_no_longer_needed_are_swept(options, server) -> None:
    """Ids that a failover has brought back, and marks that a leader was killed before it could remove."""
    beside = [PENDING, DELIVERIES, DEAD_IDS]
    redis(server, "ZADD", beside[0], 1, "stray")
    server.command("HSET", beside[1], "stray", 1)
    server.command("HSET", beside[2], "stray", "7-1")
    async with peer(acknowledge) as worker, leading(options, worker):
        await until(lambda: not server.command("EXISTS", *beside), "swept")


async def test_messages_of_a_channel(options, server) -> None:
    """Stored before they are handed out; taken over by the next leader."""
    options = replace(options, intake="channel")
    async with peer() as worker:
        async with leading(options, worker):
            await until(lambda: redis(server, "PUBLISH", PUBLISHED, b"0") == 1, "the channel has a subscriber")
            for message in numbered(30, 1):
                redis(server, "PUBLISH", PUBLISHED, message)
            await until(lambda: server.command("XLEN", "messages:received") == 31, "all stored")
        async with leading(options, worker) as leader:
            worker.answer = acknowledge
            await until(lambda: leader.pending.unsent == 0 and leader.links, "begun")
            if worker.writer is not None:
                worker.say(ack_frames([id_ for id_ in set(worker.ids) if id_ in leader.links[worker.name].held]))
            await until(lambda: leader.pending.acknowledged == 31, "acknowledged")
        assert set(numbered(31)) == set(worker.texts)
        assert 31 == len(set(worker.ids))
        assert 0 == server.command("XLEN", "messages:received")


async def test_a_channel_with_too_much_waiting_drops_and_counts(options, server) -> None:
    options = replace(options, intake="channel", max_received=10)
    async with leading(options) as leader:
        await until(lambda: redis(server, "PUBLISH", PUBLISHED, b"0") == 1, "the channel has a subscriber")
        for message in numbered(30, 1):
            redis(server, "PUBLISH", PUBLISHED, message)
        channel = leader.channel
        assert channel is not None
        await until(lambda: channel.received + channel.dropped == 31, "all seen")
        assert (10, 10, 21) == (server.command("XLEN", "messages:received"), channel.received, channel.dropped)


async def test_status_tells_who_leads_who_works_and_what_waits(options, server) -> None:
    publish(server, *numbered(50))
    before = await status(options)
    assert ("", 0, 50, None) == (before.leader, before.epoch, before.lag, before.view)
    async with peer() as worker, leading(options, worker) as leader:
        await until(lambda: len(worker.messages) == FIRST_WINDOW, "the window is full")
        await until(lambda: b'"in_flight":16' in (server.command("GET", STATE) or b""), "the leader has told")
        await until(lambda: server.command("ZCARD", WORKERS) == 1, "the worker is in the registry")
        seen = await status(options)
        assert seen.view is not None
        assert (worker.name,) == seen.registered
        assert (1, leader.term.token.rpartition(":")[0]) == (seen.epoch, seen.leader)
        assert 0 < seen.lease_left <= options.lease
        assert (50 - FIRST_WINDOW, FIRST_WINDOW, 0) == (seen.lag, seen.pending, seen.dead)
        (shown,) = seen.view.workers
        assert (worker.name, "connected", FIRST_WINDOW, 0) == (
            shown.worker,
            shown.state,
            shown.in_flight,
            shown.credit,
        )
        worker.say(ack_frames(worker.ids))
        worker.answer = acknowledge
        await until(lambda: leader.pending.acknowledged == 50, "acknowledged")


async def test_candidates_wait_for_their_turn(options, server) -> None:
    """One leads, for as long as it lives; when it is stopped, the other one goes on within a moment."""
    async with peer(acknowledge) as worker:
        options = replace(options, workers=(worker.name,))
        names: list[str] = []
        rates: list[RateReport] = []
        first = running(lambda stop: run_leader(options, stop=stop, ready=names.append, report=rates.append))
        second = running(lambda stop: run_leader(options, stop=stop, ready=names.append, report=rates.append))
        async with second:
            async with first:
                await until(lambda: len(names) == 2, "both are candidates")
                publish(server, *numbered(10))
                await turn(2 * options.lease)
                assert (10, b"1") == (len(worker.messages), server.command("GET", EPOCH))
                assert 10 == sum(rate.messages for rate in rates), "messages per second are told"
            publish(server, *numbered(10, 10))
            await until(lambda: len(worker.messages) == 20, "goes on", within=5.0)
    assert not server.command("EXISTS", LOCK), "there is no leader"


EPOCH = "{distributed_leader_lock}:epoch"


async def test_a_lock_that_was_overwritten(options, server) -> None:
    """A foreign value in the lock is respected: the leader steps down, and leads again when it is free."""
    async with peer(acknowledge) as worker:
        options = replace(options, workers=(worker.name,))
        async with running(lambda stop: run_leader(options, stop=stop)):
            await until(lambda: server.command("GET", EPOCH) == b"1", "it leads")
            redis(server, "SET", LOCK, "another process")
            await turn(2 * options.lease)
            publish(server, b"1")
            await turn(2 * options.lease)
            assert (b"another process", []) == (server.command("GET", LOCK), worker.messages)
            redis(server, "DEL", LOCK)
            await until(lambda: worker.messages, "it leads again")
            assert b"2" == server.command("GET", EPOCH)


async def test_nothing_that_an_old_leader_has_said_can_be_said_again(options, server, monkeypatch) -> None:
    """Every script that it has sent is sent again after another process has begun to lead: nothing may change by it."""
    options = replace(options, max_deliveries=1)
    refuse = lambda ids: b"".join(reject_frame(id_, "no") for id_ in ids)  # noqa: E731
    spoken: list[tuple[Any, ...]] = []
    with monkeypatch.context() as patch:
        patch.setattr(type(clock()), "heard", lambda _loop, words: spoken.append(words))
        async with peer(acknowledge) as worker, peer(refuse) as other, leading(options, worker, other) as leader:
            publish(server, *numbered(20))
            await until(
                lambda: leader.pending.acknowledged and leader.dead_lettered, "some are done, some are dead letters"
            )
            await until(lambda: is_empty(server), "finished")
            await turn(2 * options.lease)
    async with peer() as silent, leading(options, silent):
        publish(server, *numbered(10))
        await until(lambda: len(silent.messages) == 10, "sent")
        before = contents(server)
        scripts = [words for words in spoken if words[0] == "EVALSHA"]
        for words in scripts:
            try:
                server.command(*words)
            except redis_client.ResponseError:
                pass
            assert before == contents(server), words[:6]
        assert len({words[1] for words in scripts}) > 8


def contents(server: RedisServer) -> dict[bytes, bytes]:
    """Everything a leader may write."""
    return {key: server.command("DUMP", key) for key in server.command("KEYS", "*")}


def test_faults_are_named() -> None:
    """Names that operators see."""
    assert {"lost", "hung", "overdue", "unknown_id", "bad_frame", "secret", "refused", "returned", "repeated"} == set(
        Fault
    )


async def test_a_dead_letter_that_cannot_be_sent_back_stays(options, server) -> None:
    """Until it can; and then it is sent once, however often that is asked for."""
    server.command("XADD", DEAD, "1-1", "id", "x", "payload", "{}", "reason", "r", "deliveries", "1")
    redis(server, "SET", PUBLISHED, "no stream")
    with pytest.raises(StoreError):
        await dead_retry(options)
    assert 1 == server.command("XLEN", DEAD)
    redis(server, "DEL", PUBLISHED)
    assert 1 == await dead_retry(options)
    assert (0, 0, 1) == (await dead_retry(options), server.command("XLEN", DEAD), server.command("XLEN", PUBLISHED))


async def test_a_dead_letter_that_is_not_there(options, server) -> None:
    for wanted in (["unknown"], ["1-1", "unknown"]):
        server.command("XADD", DEAD, "1-1", "id", "x", "payload", "{}", "reason", "r", "deliveries", "1")
        with pytest.raises(StoreError, match="unknown"):
            await dead_retry(options, wanted)
        assert len(wanted) - 1 == server.command("XLEN", PUBLISHED)
        server.empty()
