"""Mailboxes beyond the model (`test_model.py`): any name, large and long ones, and many calls at once."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from msgspec.structs import replace

from motorcade.storage.ports import SPARE_ALL, Appended, Batch, Bound, Draft, MailboxInfo, Store
from tests.contracts.engines import (
    HOUR,
    NOW,
    ODD_NAMES,
    PAYLOAD,
    Engine,
    append,
    bodies,
    entries,
    fill,
    odd_id,
    owners,
    persistent,
    positions,
    sweep,
)


async def test_owners_have_any_name_and_are_not_mistaken_for_their_neighbours(store: Store) -> None:
    await store.mailboxes.append(ODD_NAMES, Draft(b"to all"), NOW)
    for number, name in enumerate(ODD_NAMES):
        assert 2 == (await append(store, name, Draft(b"", PAYLOAD, b"key"))).position, odd_id(name)
        attached = await store.coordination.attach(name, "node")
        answer = await append(store, name, Draft(b"%d" % number, PAYLOAD, b"key", token=b"token"))
        assert Appended(name, 3, replaced=2, attached="node") == answer
        assert await store.coordination.detach(attached.fence), odd_id(name)
    left = set(ODD_NAMES)
    for number, name in enumerate(ODD_NAMES):
        assert [b"to all", b"%d" % number] == await bodies(store, name), odd_id(name)
        assert 2 == await store.mailboxes.acknowledge(name, [1, 3]), odd_id(name)
        left.discard(name)
        assert sorted(left) == await owners(store), odd_id(name)
    assert [] == await store.check()


async def test_large_values(store: Store) -> None:
    """A mebibyte each of body and payload, and the longest key."""
    million = 1 << 20
    body, payload, key = b"b" * million, b"p" * million, b"k" * 65536
    await append(store, "v1", Draft(body, payload, key))
    (entry,) = await entries(store, "v1")
    assert (body, payload, key) == (entry.body, entry.payload, entry.key)
    assert 2 * million == (await store.mailboxes.info("v1")).size_bytes
    assert Appended("v1", 2, replaced=1) == await append(store, "v1", Draft(b"", b"", key))


async def test_a_mailbox_longer_than_any_page(store: Store) -> None:
    """Several thousand entries behind hundreds that have expired, in pages of every size: none lost, none twice."""
    total = 3000
    batch = Batch()
    for number in range(500):
        batch.append(["v1"], Draft(b"%d" % number, expires_at=NOW + 1), NOW)
    for number in range(total):
        batch.append(["v1"], Draft(b"%d" % number), NOW)
    await store.write(batch)
    for size in (1000, 999, total, total + 1):
        assert list(range(total)) == [int(body) for body, _ in await paged(store, "v1", size, NOW + 1)]
    assert [b"0"] == [entry.body for entry in await store.mailboxes.read("v1", 0, 1, NOW + 1)]
    assert total + 500 == await store.mailboxes.clear("v1")
    assert [] == await owners(store)


async def test_the_owners_of_one_feed_are_those_whose_homes_it_tells_of(store: Store) -> None:
    names = [f"fanout:v{number}" for number in range(200)]
    await store.mailboxes.append(names, Draft(b"1"), NOW)
    for feed in range(len(await store.feeds.ends())):
        wanted = {name for name in names if store.feeds.feed_of(name.replace("fanout", "client")) == feed}
        assert wanted == {owner async for owner in store.mailboxes.owners(feed)}
    for feed in (-1, len(await store.feeds.ends())):
        with pytest.raises(ValueError, match="feed"):
            _ = [owner async for owner in store.mailboxes.owners(feed)]


async def paged(store: Store, owner: str, limit: int, now: float = NOW) -> list[tuple[bytes, bytes]]:
    """Body and payload of all entries, read page by page; a short page must be the last one."""
    found: list[tuple[bytes, bytes]] = []
    after, short = 0, False
    while page := await store.mailboxes.read(owner, after, limit, now):
        assert not short, f"something came after a page of less than {limit}"
        short = len(page) < limit
        found += [(entry.body, entry.payload) for entry in page]
        after = page[-1].position
    return found


async def test_a_mailbox_of_large_entries_is_read_in_pages_of_any_size(store: Store) -> None:
    """Entries above what an engine fetches at once: apart, shared by several owners, with a large body, behind others
    that have expired.
    """
    size = 300 * 1024
    wanted: list[tuple[bytes, bytes]] = []
    for number in range(150):
        await append(store, "v1", Draft(b"%d" % number, expires_at=NOW + 1))
    for number in range(20):
        body, payload = b"%d" % number, bytes([number]) * size
        if number % 3 == 2:
            body, payload = b"%d " % number + b"b" * size, b""
        wanted.append((body, payload))
        await store.mailboxes.append(["v1", "v2"] if number % 2 else ["v1"], Draft(body, payload), NOW)
    for owner, expected in (("v1", wanted), ("v2", wanted[1::2])):
        for limit in (1, 7, 16, 17, 64):
            assert expected == await paged(store, owner, limit, NOW + 2), f"{owner} in pages of {limit}"


async def test_marks_are_small_numbers(store: Store) -> None:
    await fill(store, "v1", b"1")
    for mark in (-1, 256, 1000):
        with pytest.raises(ValueError):
            await store.mailboxes.mark("v1", 1, mark)
        with pytest.raises(ValueError):
            Batch().mark("v1", 1, mark)
    assert [0] == [entry.mark for entry in await entries(store, "v1")]


# -- forgotten owners


async def test_a_marked_entry_never_expires(store: Store) -> None:
    await append(store, "v1", Draft(b"1", expires_at=NOW + 1))
    await append(store, "v1", Draft(b"2", expires_at=NOW + 1))
    assert await store.mailboxes.mark("v1", 1, 1)
    assert [b"1"] == [entry.body for entry in await store.mailboxes.read("v1", 0, 9, NOW + 10)]
    await sweep(store, NOW + 10)
    assert [b"1"] == [entry.body for entry in await store.mailboxes.read("v1", 0, 9, NOW + 10)]


async def test_an_entry_that_a_batch_removes_is_not_replaced_by_it(store: Store) -> None:
    await append(store, "v1", Draft(b"1", key=b"key"))
    await append(store, "v1", Draft(b"2", key=b"other"))
    batch = Batch()
    batch.acknowledge("v1", [1])
    batch.append(["v1"], Draft(b"3", key=b"key"), NOW)
    batch.append(["v1"], Draft(b"4", key=b"key"), NOW)
    assert [Appended("v1", 3), Appended("v1", 4, replaced=3)] == (await store.write(batch)).appended
    assert [b"2", b"4"] == await bodies(store, "v1")
    assert [] == await store.check()


async def test_a_mailbox_that_was_forgotten_begins_above_its_old_positions(store: Store) -> None:
    """Also in an append to several owners."""
    last = 0
    for key in (b"", b"key"):
        await store.mailboxes.append(["v1", "v2"], Draft(b"before"), NOW)
        await store.mailboxes.forget("v2")
        appended = await store.mailboxes.append(["v1", "v2"], Draft(b"first", key=key), NOW)
        first = appended[1].position
        assert first > last + 1
        second = await append(store, "v2", Draft(b"second", key=key))
        assert (first if key else 0) == second.replaced
        assert ([] if key else [b"first"]) + [b"second"] == await bodies(store, "v2")
        assert (1 if key else 2) == await store.mailboxes.acknowledge("v2", range(1, second.position + 1))
        assert [] == await bodies(store, "v2")
        await store.mailboxes.forget("v2")
        last = second.position
    assert [] == await store.check()


async def test_the_end_of_a_forgotten_entry_does_not_end_its_successor(store: Store) -> None:
    await append(store, "v1", Draft(b"old", expires_at=NOW + 5, token=b"token"))
    await store.mailboxes.forget("v1")
    await append(store, "v1", Draft(b"new", token=b"token"), NOW + 1)
    await sweep(store, NOW + HOUR + 0.5)
    assert [b"new"] == await bodies(store, "v1")
    assert (await append(store, "v1", Draft(b"new", token=b"token"), NOW + HOUR + 0.5)).repeated


async def test_a_large_mailbox_is_forgotten_with_its_tokens(store: Store) -> None:
    drafts = [Draft(b"%d" % number, PAYLOAD[: number * 4], token=b"t%d" % number) for number in range(700)]
    await asyncio.gather(*(append(store, "v1", draft) for draft in drafts))
    await append(store, "v1", Draft(b"later", token=b"later"), NOW + HOUR)
    assert 701 == await store.mailboxes.forget("v1")
    assert MailboxInfo(0, 0, 0, 0) == await store.mailboxes.info("v1")
    again = [await append(store, "v1", draft) for draft in drafts[::100]]
    assert [(position, False) for position in range(702, 709)] == [(each.position, each.repeated) for each in again]
    assert Appended("v1", 709) == await append(store, "v1", Draft(b"later", token=b"later"), NOW + HOUR)
    assert [] == await store.check()


# -- mailboxes of those who are away


async def sparing(store: Store, owner: str, position: int) -> None:
    batch = Batch()
    batch.spare(owner, position)
    await store.write(batch)


async def test_a_mailbox_remembers_what_is_in_flight(store: Store, other: Store) -> None:
    """Whoever appends does not push it out; what the appender knows counts if it protects more."""
    bound = Bound(entries=4)
    await sparing(store, "v", SPARE_ALL)  # there is no such mailbox yet
    await fill(store, "v", b"1", b"2", b"3", b"4")
    assert (1,) == (await append(store, "v", Draft(b"5"), bound=bound)).dropped
    await sparing(store, "v", 3)
    await fill(other, "v", b"6", b"7")  # without a bound, which changes nothing about what is remembered
    assert (4, 5, 6) == (await append(other, "v", Draft(b"8"), bound=bound)).dropped
    assert (7,) == (await append(other, "v", Draft(b"9"), bound=bound, spared=2)).dropped
    answer = await append(other, "v", Draft(b"pushed out itself"), bound=bound, spared=9)
    assert (0, ()) == (answer.position, answer.dropped)
    assert [b"2", b"3", b"8", b"9"] == await bodies(store, "v")
    await sparing(other, "v", SPARE_ALL)
    for spared in (0, 3, SPARE_ALL):
        answer = await append(store, "v", Draft(b"over"), bound=bound, spared=spared)
        assert (True, ()) == (answer.over, answer.dropped)
    assert 0 == (await append(store, "v", Draft(b"", droppable=True), bound=bound)).position
    answers = await store.mailboxes.append(["v", "w"], Draft(b"both"), NOW, bound)
    assert [True, False] == [answer.over for answer in answers]
    await sparing(store, "v", 0)
    assert 5 == len((await append(store, "v", Draft(b"last"), bound=bound)).dropped)
    assert [b"over", b"over", b"both", b"last"] == (await bodies(store, "v"))
    with pytest.raises(ValueError, match="spared"):
        Batch().spare("v", -2)
    assert [] == await store.check()


async def test_what_a_mailbox_spares_is_forgotten_with_it(store: Store) -> None:
    for _ in range(2):
        await fill(store, "v", b"1", b"2")
        assert 1 == len((await append(store, "v", Draft(b"3"), bound=Bound(entries=2))).dropped)
        await sparing(store, "v", SPARE_ALL)
        await store.mailboxes.clear("v")
        await fill(store, "v", b"1", b"2")
        assert (await append(store, "v", Draft(b"3"), bound=Bound(entries=2))).over, "it is the same mailbox"
        await store.mailboxes.forget("v")


@persistent
async def test_what_a_mailbox_spares_survives_closing_and_opening(engine: Engine) -> None:
    for position, dropped in ((SPARE_ALL, ()), (2, (3,)), (0, (1,))):
        engine.empty()
        store = engine.make()
        await store.open()
        await fill(store, "v", b"1", b"2", b"3")
        await sparing(store, "v", position)
        await store.mailboxes.acknowledge("v", [9])
        await store.close()
        store = engine.make()
        await store.open()
        assert dropped == (await append(store, "v", Draft(b"4"), bound=Bound(entries=3))).dropped
        assert [] == await store.check()
        await store.close()


async def test_what_is_for_those_who_are_away_is_not_kept_for_others(store: Store, other: Store) -> None:
    """Who is attached is told of instead; nothing is changed there, not even a token is remembered."""
    fence = (await store.coordination.attach("session:here", "node-a")).fence
    new = await store.mailboxes.make("session:here")
    away = Draft(b"", PAYLOAD, droppable=True, away=True)
    names = ["session:away", "session:here", "session:gone", "session:here", "session:away"]
    generations = [0, new, 7, new + 1, 0]
    for draft in (away, replace(away, token=b"token", key=b"key", expires_at=NOW + 60)):
        answers = await other.mailboxes.append(names, draft, NOW, Bound(entries=9), generations=generations)
        assert ["", "node-a", "", "node-a", ""] == [answer.attached for answer in answers]
        assert [False, False, True, True, False] == [answer.gone for answer in answers]
        assert [True, False, False, False, True] == [answer.position > 0 for answer in answers]
        assert answers[1] == Appended("session:here", 0, attached="node-a")
    assert 0 == (await store.mailboxes.info("session:here")).entries
    for draft in (away, replace(away, token=b"token")):
        assert 0 == (await append(other, "fanout:here", draft)).position, "the same home"
        batch = Batch()
        batch.append(["session:here"], draft, NOW)
        assert 0 == (await other.write(batch)).appended[0].position
    assert 0 == (await store.mailboxes.info("fanout:here")).generation, "it was not even made"
    assert await store.coordination.detach(fence)
    answer = await append(other, "session:here", replace(away, token=b"token"))
    assert (True, False) == (answer.position > 0, answer.repeated)
    for name in (*names, "fanout:here"):
        await store.mailboxes.clear(name)
    await sweep(store, NOW + 3 * HOUR)
    assert (0, 0) == await store.blobs.count()
    assert [] == await store.check()


async def test_who_comes_while_it_is_appended_gets_it_or_is_told_of(store: Store, other: Store) -> None:
    """Of an attach and an append for those who are away, one sees the other."""
    dice = random.Random(3)

    async def attach(owner: str) -> bool:
        for _ in range(dice.randrange(4)):
            await asyncio.sleep(0)
        return (await store.coordination.attach(owner, "node-a")).pending

    async def race(owner: str) -> None:
        pending, answer = await asyncio.gather(attach(owner), append(other, owner, Draft(b"", away=True)))
        assert pending == (answer.position > 0) == (answer.attached == "")

    await asyncio.gather(*(race(f"v{number}") for number in range(200)))


# -- many at once


async def test_calls_in_the_air_keep_their_order(store: Store) -> None:
    """Nobody waits for the one before (rule 6): single calls and batches, payloads with the entry and apart from it."""
    payloads = [PAYLOAD[: 1000 * (number % 4)] + b"%d" % number for number in range(200)]

    async def call(number: int) -> list[Appended]:
        names, draft = ["v1", f"w{number % 7}"], Draft(b"%d" % number, payloads[number])
        if number % 3:
            return await store.mailboxes.append(names, draft, NOW)
        batch = Batch()
        batch.append(names, draft, NOW)
        return (await store.write(batch)).appended

    answers = await asyncio.gather(*(call(number) for number in range(200)))
    assert list(range(1, 201)) == [answer[0].position for answer in answers]
    assert payloads == [entry.payload for entry in await entries(store, "v1")]
    assert payloads[3::7] == [entry.payload for entry in await entries(store, "w3")]


async def test_different_calls_in_the_air_keep_their_order(store: Store) -> None:
    boxes = store.mailboxes
    calls = [
        boxes.append(["v1"], Draft(b"1"), NOW),
        boxes.append(["v1"], Draft(b"2"), NOW),
        boxes.mark("v1", 2, 5),
        boxes.acknowledge("v1", [1, 2]),
        boxes.mark("v1", 2, 6),
        boxes.append(["v1"], Draft(b"3"), NOW),
        boxes.clear("v1"),
        boxes.append(["v1"], Draft(b"4"), NOW),
        boxes.append(["v2"], Draft(b"1", token=b"token"), NOW),
        boxes.forget("v2"),
        boxes.append(["v2"], Draft(b"2", token=b"token"), NOW),
    ]
    answers = await asyncio.gather(*(asyncio.ensure_future(call) for call in calls))
    assert [True, 2, False] == answers[2:5]
    assert [1, 1] == [answers[6], answers[9]]
    assert [(4, b"4")] == [(entry.position, entry.body) for entry in await entries(store, "v1")]
    assert [b"2"] == await bodies(store, "v2")


async def test_a_batch_larger_than_any_step_keeps_its_place(store: Store) -> None:
    """Answers in its order, and what was begun after it does not come between its parts."""
    names = [f"v{number}" for number in range(2500)]
    batch = Batch()
    batch.append(names, Draft(b"1"), NOW)
    batch.append(names[::-1], Draft(b"2"), NOW)
    later = [store.mailboxes.append([name], Draft(b"3", PAYLOAD), NOW) for name in names[::250]]
    commit = store.write(batch)
    await asyncio.gather(*later)
    answers = (await commit).appended
    assert [*names, *names[::-1]] == [answer.owner for answer in answers]
    assert [1] * 2500 + [2] * 2500 == [answer.position for answer in answers]
    for name in names[::250]:
        assert [b"1", b"2", b"3"] == await bodies(store, name)
    await store.mailboxes.clear("v7")
    assert sorted(set(names) - {"v7"}) == await owners(store)


async def test_writers_at_once_are_served_one_after_the_other(store: Store) -> None:
    """No position twice, each writer's order kept; one entry of a key, one append of a token, a bound that holds."""

    async def write(writer: int) -> list[int]:
        return [(await append(store, "v1", Draft(b"%d %d" % (writer, number)))).position for number in range(20)]

    given = await asyncio.gather(*(write(writer) for writer in range(8)))
    assert list(range(1, 161)) == sorted(itertools.chain.from_iterable(given))
    found = [tuple(map(int, body.split())) for body in await bodies(store, "v1")]
    for writer in range(8):
        assert [(writer, number) for number in range(20)] == [pair for pair in found if pair[0] == writer]

    answers = await asyncio.gather(*(append(store, "key", Draft(b"%d" % n, PAYLOAD, b"key")) for n in range(100)))
    replaced = [answer.replaced for answer in answers if answer.replaced]
    assert list(range(1, 101)) == sorted(answer.position for answer in answers)
    assert len(replaced) == len(set(replaced)) == 99
    assert [5050 - sum(replaced)] == await positions(store, "key")

    answers = await asyncio.gather(*(append(store, "token", Draft(b"b", PAYLOAD, token=b"t")) for _ in range(20)))
    assert [False] + [True] * 19 == sorted(answer.repeated for answer in answers)
    assert {1} == {answer.position for answer in answers}

    calls = (append(store, "bound", Draft(b"%d" % n), bound=Bound(entries=10)) for n in range(200))
    dropped = [position for answer in await asyncio.gather(*calls) for position in answer.dropped]
    assert list(range(1, 191)) == sorted(dropped)
    assert list(range(191, 201)) == await positions(store, "bound")


async def test_a_consumer_beside_writers_gets_everything_once_in_order(store: Store) -> None:
    """It reads, acknowledges and goes on while it is written."""
    total = 300

    async def produce() -> None:
        for number in range(total):
            await append(store, "v1", Draft(b"%d" % number, PAYLOAD[: number * 3]))

    async def consume() -> list[int]:
        found: list[int] = []
        after = 0
        while len(found) < total:
            page = await store.mailboxes.read("v1", after, 7, NOW)
            if not page:
                await asyncio.sleep(0)
                continue
            found += [int(entry.body) for entry in page]
            after = page[-1].position
            assert len(page) == await store.mailboxes.acknowledge("v1", [entry.position for entry in page])
        return found

    async with asyncio.timeout(60):
        found, _ = await asyncio.gather(consume(), produce())
    assert list(range(total)) == found
    assert MailboxInfo(0, 0, 0, total, 1) == await store.mailboxes.info("v1")


async def test_each_owner_has_all_of_its_own_once_when_many_are_written_at_once(store: Store) -> None:
    dice = random.Random(20)
    names = [f"v{number}" for number in range(50)]
    plans = [dice.sample(names, 20) for _ in range(60)]
    await asyncio.gather(
        *(store.mailboxes.append(plan, Draft(b"%d" % number, PAYLOAD), NOW) for number, plan in enumerate(plans))
    )
    for name in names:
        wanted = [b"%d" % number for number, plan in enumerate(plans) if name in plan]
        assert wanted == await bodies(store, name)
