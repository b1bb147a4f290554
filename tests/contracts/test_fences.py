"""Fences and generations: a late writer in front of each of them. Feeds: what a reader that was away is told.

A late writer has made its batch, and is stopped; another one goes on; then the batch is sent. (The model has the rest.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from motorcade.storage.ports import (
    FEED_KEPT,
    Appended,
    Batch,
    Bound,
    Draft,
    Elsewhere,
    FeedEnd,
    Fence,
    Lease,
    MailboxInfo,
    Opened,
    Store,
    StoreConflictError,
    StoreError,
    StoreFencedError,
)
from tests.contracts.engines import HOUR, NOW, PAYLOAD, Engine, append, bodies, entries, fill, persistent, scan, sweep

CLIENT = "client:vin"  #: the home of the following
MAILBOX = "session:vin"


# -- the fence of a home


async def test_a_decision_that_comes_late_is_refused_as_a_whole(store: Store, other: Store) -> None:
    """In all its parts, wherever they lie; the batches of the same turn are done."""
    old = await store.coordination.attach(MAILBOX, "node-a")
    late = Batch()
    late.append(["elsewhere"], Draft(b"late", PAYLOAD), NOW)
    late.put("retained", "topic", b"late")
    late.put("session", "vin", b"late")
    late.append([MAILBOX], Draft(b"late"), NOW)
    late.stream("receipts", [b"late"], NOW)
    late.note(CLIENT, b"late")
    late.fence(old.fence)
    new = await other.coordination.attach("fanout:vin", "node-b")  # another mailbox of the same home
    assert ("node-a", old.fence.number + 1) == (new.previous, new.fence.number)
    beside = []
    for number in range(4):
        batch = Batch()
        batch.append([MAILBOX], Draft(b"%d" % number), NOW)
        batch.put("session", "vin", b"%d" % number)
        if number == 3:
            batch.fence(new.fence)
        beside.append(store.write(batch))
        if number == 1:
            refused = store.write(late)
    with pytest.raises(StoreFencedError):
        await refused
    assert refused.refused
    for commit in beside:
        assert 1 == len((await commit).appended)
    assert [b"0", b"1", b"2", b"3"] == await bodies(store, MAILBOX)
    assert {"vin": b"3"} == await scan(store, "session")
    assert ({}, [], []) == (
        await scan(store, "retained"),
        await bodies(store, "elsewhere"),
        await store.streams.names(),
    )
    assert all(FeedEnd() == end for end in await store.feeds.ends())
    if store.atomic:  # others may have stored the payload before the rest, and keep it for a while
        assert (0, 0) == await store.blobs.count()


async def test_a_fence_ends_with_its_attachment(store: Store, other: Store) -> None:
    """A number may be given again after that; its token is another one."""
    first = (await store.coordination.attach(MAILBOX, "node-a")).fence
    assert await store.coordination.detach(first)
    for made in (await other.coordination.attach(MAILBOX, "node-b"), None):
        if made is not None:
            assert "" == made.previous and made.fence != first
            assert not await store.coordination.detach(first)
        batch = Batch()
        batch.put("session", "vin", b"late")
        batch.fence(first)
        with pytest.raises(StoreFencedError):
            await store.write(batch)
        if made is not None:
            assert await store.coordination.detach(made.fence)
    assert {} == await scan(store, "session")


async def test_facts_carry_no_fence(store: Store, other: Store) -> None:
    """What the old node acknowledges and marks after the client has moved is true all the same."""
    await fill(store, MAILBOX, b"1", b"2", b"3")
    await store.coordination.attach(MAILBOX, "node-a")
    await other.coordination.attach(MAILBOX, "node-b")
    batch = Batch()
    batch.acknowledge(MAILBOX, [1])
    batch.mark(MAILBOX, 2, 7)
    await store.write(batch)
    assert [(2, 7), (3, 0)] == [(entry.position, entry.mark) for entry in await entries(other, MAILBOX)]


async def test_a_mailbox_is_forgotten_only_by_the_one_in_charge(store: Store, other: Store) -> None:
    await fill(store, MAILBOX, *(b"%d" % number for number in range(600)))  # more than one step
    old = await store.coordination.attach(MAILBOX, "node-a")
    new = await other.coordination.attach(MAILBOX, "node-b")
    with pytest.raises(StoreFencedError):
        await store.mailboxes.forget(MAILBOX, old.fence)
    assert 600 == (await store.mailboxes.info(MAILBOX)).entries
    assert 600 == await other.mailboxes.forget(MAILBOX, new.fence)


async def test_a_home_is_attached_with_all_that_belongs_to_it(store: Store, other: Store) -> None:
    """One call gives a client's records and no other's; what is appended to any of its mailboxes says where it is."""
    for client in ("vin", "vi", "vin2", "3:vin"):
        batch = Batch()
        batch.put("session", client, client.encode())
        for rest in ("a/b", "#"):
            batch.put("subscription", f"{len(client)}:{client}{rest}", rest.encode())
        batch.put("awaiting", f"{len(client)}:{client}17", b"old", NOW + 5)
        batch.put("awaiting", f"{len(client)}:{client}18", b"new", NOW + 6)
        await store.write(batch)
    await fill(store, MAILBOX, b"1", b"2")
    opened = await other.coordination.open(MAILBOX, "node-a", ["session", "subscription", "awaiting", "none"], NOW + 5)
    assert (CLIENT, "") == (opened.attached.fence.home, opened.attached.previous)
    assert opened.attached.pending and MailboxInfo(2, 2, 1, 2, 1) == opened.attached.mailbox
    wanted = [{"vin": b"vin"}, {"3:vina/b": b"a/b", "3:vin#": b"#"}, {"3:vin18": b"new"}, {}]
    assert wanted == opened.records
    for owner in (MAILBOX, "fanout:vin", "fanout-done:vin", "ecq:vin"):
        assert "node-a" == (await append(store, owner, Draft(b""))).attached
    assert "" == (await append(store, "session:vi", Draft(b""))).attached
    with pytest.raises(ValueError, match="lie together"):
        await store.coordination.open(MAILBOX, "node-b", ["stream-progress"], NOW)
    batch = Batch()
    batch.delete("subscription", "3:vin#")
    batch.delete("session", "vin")
    batch.put("subscription", "3:vinc", b"c")
    batch.fence(opened.attached.fence)
    await store.write(batch)
    again = await store.coordination.open(MAILBOX, "node-b", ["subscription", "session"], NOW)
    assert [{"3:vina/b": b"a/b", "3:vinc": b"c"}, {}] == again.records
    assert "node-a" == again.attached.previous


# -- homes that another member has


async def test_a_home_is_left_to_the_member_that_has_it(store: Store, other: Store) -> None:
    """Nothing is changed then, also for what the member has in the air; the member itself may open it once more."""
    coordination = other.coordination
    await store.records.put("session", "vin", b"1")
    first = await store.coordination.try_open(MAILBOX, "node-a", ["session"], NOW)
    assert isinstance(first, Opened) and ("", [{"vin": b"1"}]) == (first.attached.previous, first.records)
    again = await store.coordination.try_open(MAILBOX, "node-a", ["session"], NOW, displace="node-c", wait=False)
    assert isinstance(again, Opened) and "node-a" == again.attached.previous
    mine, void = again.attached.fence, first.attached.fence
    assert void.number + 1 == mine.number
    for owner, displace in ((MAILBOX, ""), ("fanout:vin", "node-c"), (CLIENT, "node-")):
        assert Elsewhere("node-a") == await coordination.try_open(owner, "node-b", ["session"], NOW, displace=displace)
    decision = Batch()
    decision.put("session", "vin", b"2")
    decision.fence(mine)
    await store.write(decision)
    assert isinstance(await coordination.try_open("session:vi", "node-b", [], NOW), Opened), "another home"
    assert "node-a" == (await append(other, MAILBOX, Draft(b""))).attached
    with pytest.raises(ValueError, match="lie together"):
        await coordination.try_open(MAILBOX, "node-b", ["stream-progress"], NOW, displace="node-a")
    assert {"vin": b"2"} == await scan(store, "session")


async def test_a_member_that_was_displaced_decides_nothing_more(store: Store, other: Store) -> None:
    opened = await store.coordination.try_open(MAILBOX, "node-a", ["session"], NOW)
    assert isinstance(opened, Opened)
    late = Batch()
    late.put("session", "vin", b"late")
    late.fence(opened.attached.fence)
    taken = await other.coordination.try_open(MAILBOX, "node-b", ["session"], NOW, displace="node-a")
    assert isinstance(taken, Opened) and "node-a" == taken.attached.previous
    with pytest.raises(StoreFencedError):
        await store.write(late)
    assert Elsewhere("node-b") == await store.coordination.try_open(MAILBOX, "node-a", ["session"], NOW)
    assert {} == await scan(store, "session")


async def test_one_of_many_members_gets_a_home(store: Store, other: Store) -> None:
    for owner in ("session:a", "session:b", "session:c"):
        calls = [
            (store if number % 2 else other).coordination.try_open(owner, f"node-{number}", [], NOW)
            for number in range(20)
        ]
        answers = await asyncio.gather(*calls)
        (winner,) = [number for number, answer in enumerate(answers) if isinstance(answer, Opened)]
        assert {Elsewhere(f"node-{winner}")} == {answer for answer in answers if isinstance(answer, Elsewhere)}


async def attached(store: Store, member: str) -> dict[str, Fence]:
    """The fences of all homes of a member, feed by feed; each in the feed of its notes."""
    found: list[Fence] = []
    for feed in range(len(await store.feeds.ends())):
        fences = [fence async for fence in store.coordination.attached(member, feed)]
        assert all(feed == store.feeds.feed_of(fence.home) for fence in fences)
        found += fences
    homes = {fence.home: fence for fence in found}
    assert len(found) == len(homes)
    return homes


async def test_the_homes_of_a_member_are_found(store: Store, other: Store) -> None:
    """However many there are; one that was given up, or that another member has, is not among them."""
    assert {} == await attached(store, "node-a")
    names = [f"session:v{number}" for number in range(1500)]
    fences = [(await found).fence for found in [store.coordination.attach(name, "node-a~1") for name in names]]
    await store.coordination.attach("session:v1499", "node-a~12")
    await other.coordination.attach("session::odd:{}", "node:a~1:")
    await store.coordination.detach(fences[7])
    wanted = {fence.home: fence for fence in fences[:1499] if fence is not fences[7]}
    assert wanted == await attached(other, "node-a~1")
    assert {"client:v1499"} == (await attached(other, "node-a~12")).keys()
    assert {"client::odd:{}"} == (await attached(store, "node:a~1:")).keys()
    assert {} == await attached(store, "node-a") == await attached(store, "~1")
    with pytest.raises(ValueError, match="feed"):
        _ = [fence async for fence in store.coordination.attached("node-a", -1)]


async def test_a_home_is_given_up_with_the_last_decision(store: Store, other: Store) -> None:
    """All of the batch is written first, wherever it lies and in whatever order; what follows finds the home free."""
    fence = (await store.coordination.attach(MAILBOX, "node-a")).fence
    await fill(store, MAILBOX, b"1")
    last, late = Batch(), Batch()
    last.put("session", "vin", b"asleep")
    last.detach(fence)
    last.append([MAILBOX, *(f"v{number}" for number in range(50))], Draft(b"2", PAYLOAD), NOW)
    last.stream("s", [b"gone"], NOW)
    last.note(CLIENT, b"asleep")
    late.put("session", "vin", b"late")
    late.fence(fence)
    commits = [store.write(last), store.write(late)]
    following = await store.mailboxes.append([MAILBOX, "fanout:vin"], Draft(b"3"), NOW)
    assert ["", ""] == [answer.attached for answer in following]
    written = await commits[0]
    assert ([1], "node-a") == (list(written.notes), written.appended[0].attached), "it was its own, to the end"
    with pytest.raises(StoreFencedError):
        await commits[1]
    assert [b"1", b"2", b"3"] == await bodies(store, MAILBOX)
    assert [[b"2"]] * 50 == [await bodies(store, f"v{number}") for number in range(50)]
    assert ({"vin": b"asleep"}, [b"gone"]) == (
        await scan(store, "session"),
        [record.value for record in await store.streams.read("s", 0, 9)],
    )
    assert {} == await attached(other, "node-a")
    assert isinstance(await other.coordination.try_open(MAILBOX, "node-b", [], NOW), Opened)


async def test_a_home_is_not_given_up_by_a_member_that_has_lost_it(store: Store, other: Store) -> None:
    """Nothing of its batch is done; the others of that turn are, once."""
    fence = (await store.coordination.attach(MAILBOX, "node-a")).fence
    late, conflict = Batch(), Batch()
    late.put("session", "vin", b"late")
    late.detach(fence)
    mine = (await other.coordination.attach(MAILBOX, "node-b")).fence
    conflict.detach(mine)
    conflict.put("session", "vin", b"conflict", expect=b"another")
    beside = Batch()
    beside.append([MAILBOX], Draft(b"beside"), NOW)
    commits = [other.write(each) for each in (late, conflict, beside)]
    await asyncio.gather(*commits, return_exceptions=True)
    assert [StoreFencedError, StoreConflictError, type(None)] == [type(commit.error) for commit in commits]
    assert "node-b" == (await append(store, MAILBOX, Draft(b"last"))).attached
    assert [b"beside", b"last"] == await bodies(store, MAILBOX)
    given = Batch()
    given.detach(mine)
    given.detach(mine)
    await other.write(given)
    assert not await other.coordination.detach(mine)
    assert {} == await scan(store, "session")


# -- entries that are taken


async def test_an_entry_is_taken_once(store: Store, other: Store) -> None:
    """Whoever takes it writes what belongs to that; who comes late changes nothing, and can tell."""
    first, second = await fill(store, MAILBOX, b"1", b"2")

    def taking(position: int, end: bytes) -> Batch:
        batch = Batch()
        batch.append(["fanout-done:vin"], Draft(end), NOW)
        batch.take(MAILBOX, position)
        batch.stream("receipts", [end], NOW)
        batch.put("c", "k", end)
        return batch

    commits = [store.write(taking(first, b"a")), store.write(taking(first, b"b")), other.write(taking(first, b"c"))]
    outcomes = await asyncio.gather(*commits, return_exceptions=True)
    (done,) = [number for number, outcome in enumerate(outcomes) if not isinstance(outcome, Exception)]
    assert 2 == sum(isinstance(outcome, StoreConflictError) and outcome.certain for outcome in outcomes)
    end = b"abc"[done : done + 1]
    found = [record.value for record in await store.streams.read("receipts", 0, 9)]
    assert [[end], [end], [b"2"]] == [found, await bodies(store, "fanout-done:vin"), await bodies(store, MAILBOX)]
    assert {"k": end} == await scan(store, "c")
    late = taking(second, b"late")
    await other.mailboxes.acknowledge(MAILBOX, [second])
    for batch in (late, taking(7, b"never given"), taking(0, b"none"), taking(-1, b"none")):
        with pytest.raises(StoreConflictError):
            await store.write(batch)
    assert [end] == await bodies(store, "fanout-done:vin")
    assert [] == await store.check()


async def test_what_is_taken_goes_before_what_the_batch_brings(store: Store) -> None:
    """Whatever the order of the calls: it need not be pushed out, and a large batch does not leave it to others."""
    (position,) = await fill(store, MAILBOX, b"old")
    batch = Batch()
    for number in range(600):
        batch.append([MAILBOX if number == 0 else f"v{number}"], Draft(b"new", PAYLOAD), NOW, Bound(entries=1))
    batch.take(MAILBOX, position)
    batch.take(MAILBOX, position)
    appended = (await store.write(batch)).appended
    assert ((), 600) == (appended[0].dropped, len(appended))
    assert [b"new"] == await bodies(store, MAILBOX)
    assert [] == await store.check()


async def test_a_taken_entry_may_have_expired(store: Store) -> None:
    """Until it is swept: the one who takes it knows what it does."""
    answer = await append(store, MAILBOX, Draft(b"1", PAYLOAD, b"key", NOW - 1))
    batch = Batch()
    batch.take(MAILBOX, answer.position)
    batch.fence((await store.coordination.attach(MAILBOX, "node-a")).fence)
    await store.write(batch)
    assert 0 == (await store.mailboxes.info(MAILBOX)).entries
    assert 0 == (await append(store, MAILBOX, Draft(b"2", key=b"key"))).replaced
    await sweep(store, NOW + 3 * HOUR)
    assert (0, 0) == await store.blobs.count()
    assert [] == await store.check()


# -- positions and generations


async def test_what_is_said_of_a_forgotten_mailbox_does_not_meet_the_new_one(store: Store, other: Store) -> None:
    """A late acknowledgement and a late mark; once with the mailbox made by an append, once by itself."""
    for _ in range(2):
        old = await fill(store, MAILBOX, b"1", b"2", b"3")
        late = Batch()
        late.acknowledge(MAILBOX, old[:2])
        late.mark(MAILBOX, old[2], 7)
        await other.mailboxes.forget(MAILBOX)
        new = await fill(other, MAILBOX, b"4", b"5", b"6")
        assert new[0] > old[-1]
        await store.write(late)
        assert 0 == await store.mailboxes.acknowledge(MAILBOX, old)
        assert not await store.mailboxes.mark(MAILBOX, old[0], 7)
        found = await entries(store, MAILBOX)
        assert [(position, 0) for position in new] == [(entry.position, entry.mark) for entry in found]
        await store.mailboxes.forget(MAILBOX)
        await store.mailboxes.make(MAILBOX)
    assert [] == await store.check()


async def test_an_append_to_another_generation_is_not_taken(store: Store, other: Store) -> None:
    """It has no effect, and the others that it is for get theirs; the answer says that this receiver is gone."""
    assert [Appended("none", 0, gone=True)] == await store.mailboxes.append(["none"], Draft(b""), NOW, generations=[1])
    old = await store.mailboxes.make(MAILBOX)
    assert old == await store.mailboxes.make(MAILBOX) == (await store.mailboxes.info(MAILBOX)).generation
    late = Batch()
    late.append(["a", MAILBOX, "b"], Draft(b"late", PAYLOAD, token=b"token"), NOW, generations=[0, old, 0])
    late.append([MAILBOX], Draft(b"late", PAYLOAD, b"key"), NOW, generations=[old])
    await other.mailboxes.forget(MAILBOX)
    batch = Batch()
    batch.make(MAILBOX)
    batch.append([MAILBOX], Draft(b"kept", key=b"key"), NOW)
    written = await other.write(batch)
    (new,) = written.generations
    assert new != old and new <= written.appended[0].position
    told = [(answer.position > 0, answer.gone) for answer in (await store.write(late)).appended]
    assert [(True, False), (False, True), (True, False), (False, True)] == told
    assert [b"kept"] == await bodies(store, MAILBOX)
    answers = await store.mailboxes.append([MAILBOX, "a"], Draft(b"this"), NOW, generations=[new, 0])
    assert [False, False] == [answer.gone for answer in answers]
    assert [b"kept", b"this"] == await bodies(store, MAILBOX)
    for owner in (MAILBOX, "a", "b"):
        await store.mailboxes.clear(owner)
    await sweep(store, NOW + 3 * HOUR)
    assert (0, 0) == await store.blobs.count()
    assert [] == await store.check()


async def test_generations_are_never_given_again(store: Store) -> None:
    """Not even of mailboxes that never had an entry."""
    given = []
    for _ in range(3):
        given.append(await store.mailboxes.make(MAILBOX))
        assert MailboxInfo(0, 0, 0, given[-1] - 1, given[-1]) == await store.mailboxes.info(MAILBOX)
        assert 0 == await store.mailboxes.forget(MAILBOX)
        assert MailboxInfo(0, 0, 0, 0) == await store.mailboxes.info(MAILBOX)
        given.append(await store.mailboxes.make(MAILBOX))
        await fill(store, MAILBOX, b"1", b"2")
        assert 2 == await store.mailboxes.forget(MAILBOX)
    assert sorted(set(given)) == given


@persistent
async def test_positions_and_generations_survive_closing_and_opening(engine: Engine) -> None:
    store = engine.make()
    await store.open()
    old = await fill(store, MAILBOX, b"1", b"2")
    await store.mailboxes.forget(MAILBOX)
    empty = await store.mailboxes.make("fanout:vin")
    await store.close()
    store = engine.make()
    await store.open()
    assert empty == (await store.mailboxes.info("fanout:vin")).generation
    assert (await fill(store, MAILBOX, b"3"))[0] > old[-1]
    assert [False] == [
        answer.gone for answer in await store.mailboxes.append(["fanout:vin"], Draft(b""), NOW, generations=[empty])
    ]
    assert [] == await store.check()
    await store.close()


# -- the fence of a member


async def test_a_member_that_was_fenced_writes_nothing_any_more(engine: Engine, store: Store, other: Store) -> None:
    """Whatever it has in the air is stored or refused; whatever comes later is refused, and it says why."""
    assert store.writer in {member.writer for member in await other.coordination.members()}
    assert "" == store.condition().trouble
    fence = (await store.coordination.attach(MAILBOX, "node-a")).fence
    await fill(store, MAILBOX, b"0")
    commits = []
    for number in range(1, 200):
        batch = Batch()
        batch.append([MAILBOX], Draft(b"%d" % number), NOW)
        commits.append(store.write(batch))
    assert await other.coordination.fence_member(store.writer)
    await asyncio.gather(*commits, return_exceptions=True)
    stored = [b"0"] + [b"%d" % number for number, commit in enumerate(commits, 1) if commit.error is None]
    assert all(commit.error is None or commit.refused for commit in commits)
    assert stored == await bodies(store, MAILBOX)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: store.mailboxes.append(["v"], Draft(b"late", PAYLOAD), NOW),
        lambda: store.mailboxes.acknowledge(MAILBOX, [1]),
        lambda: store.mailboxes.mark(MAILBOX, 1, 7),
        lambda: store.mailboxes.make("v"),
        lambda: store.mailboxes.clear(MAILBOX),
        lambda: store.mailboxes.forget(MAILBOX),
        lambda: store.records.put("c", "k", b"late"),
        lambda: store.records.delete("c", "k"),
        lambda: store.streams.append("s", [b"late"], NOW),
        lambda: store.coordination.attach(MAILBOX, "node-c"),
        lambda: store.coordination.open(MAILBOX, "node-c", ["session"], NOW),
        lambda: store.coordination.try_open(MAILBOX, "node-c", ["session"], NOW),
        lambda: store.coordination.detach(fence),
        lambda: store.coordination.acquire("l", "node-c", 3.0, NOW),
        lambda: store.coordination.renew(Lease("l", 1), 3.0, NOW),
        lambda: store.coordination.release(Lease("l", 1)),
        lambda: store.write(appending("v")),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(StoreFencedError) as caught:
            await call()
        assert caught.value.certain, number
    assert stored == await bodies(store, MAILBOX)
    assert ({}, []) == (await scan(store, "c"), await store.streams.names())
    assert "is fenced" == store.condition().trouble and store.condition().detail
    old = store.writer
    assert old not in {member.writer for member in await store.coordination.members()}
    if engine.shared:
        assert not await other.coordination.fence_member(old), "it was fenced already"
        assert "node-a" == (await append(other, MAILBOX, Draft(b"new"))).attached
    await store.close()
    await store.open()
    assert old != store.writer and "" == store.condition().trouble
    assert 1 == len((await store.write(appending("v"))).appended)
    assert {store.writer, other.writer} == {member.writer for member in await store.coordination.members()}
    assert not await store.coordination.fence_member("another")


def appending(owner: str) -> Batch:
    batch = Batch()
    batch.append([owner], Draft(b"late"), NOW)
    return batch


async def test_a_store_that_is_closed_is_no_member(engine: Engine) -> None:
    first, second = engine.make(), engine.make()
    await first.open()
    if engine.shared:
        await second.open()
        assert 2 == len(await first.coordination.members())
        await second.close()
    assert [first.writer] == [member.writer for member in await first.coordination.members()]
    (member,) = await first.coordination.members()
    assert abs(member.since - NOW) < 24 * HOUR
    await first.close()
    with pytest.raises(StoreError):
        await first.coordination.members()


# -- feeds


async def note(store: Store, *data: bytes, home: str = CLIENT) -> None:
    batch = Batch()
    for each in data:
        batch.note(home, each)
    await store.write(batch)


async def test_a_feed_tells_every_reader_what_was_written(store: Store, other: Store) -> None:
    feed = store.feeds.feed_of(CLIENT)
    before = await store.feeds.ends()
    assert all(FeedEnd() == end for end in before) and feed < len(before)
    await note(store, b"", b"\x00\r\n", PAYLOAD)
    await note(other, b"last")
    page = await other.feeds.read(feed, FeedEnd(), 3)
    assert ([b"", b"\x00\r\n", PAYLOAD], False) == ([each.data for each in page.notes], page.gap)
    assert [1, 2, 3] == [each.number for each in page.notes]
    rest = await store.feeds.read(feed, FeedEnd(page.notes[-1].number, page.notes[-1].nonce), 100)
    assert [b"last"] == [each.data for each in rest.notes]
    end = FeedEnd(rest.notes[-1].number, rest.notes[-1].nonce)
    assert end == (await other.feeds.ends())[feed]
    assert ([], False) == ((await store.feeds.read(feed, end, 100)).notes, (await store.feeds.read(feed, end, 1)).gap)


async def test_a_reader_that_knows_another_end_is_told_of_a_gap(store: Store) -> None:
    """A fail-over has forgotten notes, and others may have come in their place."""
    feed = store.feeds.feed_of(CLIENT)
    assert (await store.feeds.read(feed, FeedEnd(3, b"12345678"), 9)).gap, "nothing is left of what it knows"
    await note(store, b"1", b"2", b"3")
    (first, second, third) = (await store.feeds.read(feed, FeedEnd(), 9)).notes
    for known in (FeedEnd(3, second.nonce), FeedEnd(2, b"12345678"), FeedEnd(4, third.nonce)):
        page = await store.feeds.read(feed, known, 9)
        assert page.gap and not page.notes
    assert [second, third] == (await store.feeds.read(feed, FeedEnd(1, first.nonce), 9)).notes


async def test_a_feed_keeps_its_newest_notes(store: Store) -> None:
    feed = store.feeds.feed_of(CLIENT)
    await note(store, b"first")
    (first,) = (await store.feeds.read(feed, FeedEnd(), 9)).notes
    for start in range(0, FEED_KEPT + 1000, 4000):
        await note(store, *(b"%d" % number for number in range(start, start + 4000)))
    assert (await store.feeds.read(feed, FeedEnd(first.number, first.nonce), 9)).gap
    assert (await store.feeds.read(feed, FeedEnd(), 9)).gap
    end = (await store.feeds.ends())[feed]
    page = await store.feeds.read(feed, end, 9)
    assert not page.gap and not page.notes
    await note(store, b"last")
    assert [b"last"] == [each.data for each in (await store.feeds.read(feed, end, 9)).notes]
    assert [] == await store.check()


async def test_an_attach_tells_the_last_note_of_its_feed(store: Store) -> None:
    before = (await store.coordination.attach(MAILBOX, "m1")).noted
    await note(store, b"1", b"2")
    end = (await store.feeds.ends())[store.feeds.feed_of(CLIENT)]
    opened = await store.coordination.open(MAILBOX, "m2", ["session"], 1.0)
    assert (before + 2, end.number) == (opened.attached.noted, opened.attached.noted)


@persistent
async def test_a_feed_goes_on_after_closing_and_opening(engine: Engine) -> None:
    store = engine.make()
    await store.open()
    feed = store.feeds.feed_of(CLIENT)
    await note(store, b"1")
    (end,) = [end for end in await store.feeds.ends() if end.number]
    await store.close()
    store = engine.make()
    await store.open()
    await note(store, b"2")
    assert [(2, b"2")] == [(each.number, each.data) for each in (await store.feeds.read(feed, end, 9)).notes]
    await store.close()
