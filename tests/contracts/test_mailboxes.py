"""Mailboxes: what goes in comes out in order, once, and not after its time."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from motorcade.storage.ports import SPARE_ALL, Appended, Bound, Draft, Entry, MailboxInfo, Store
from tests.contracts.engines import (
    DAY,
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
    positions,
    sweep,
)

# -- order and positions


async def test_an_unknown_mailbox_is_empty(store: Store) -> None:
    assert [] == await entries(store, "nobody")
    assert MailboxInfo(0, 0, 0, 0) == await store.mailboxes.info("nobody")
    assert 0 == await store.mailboxes.acknowledge("nobody", [1, 2])
    assert 0 == await store.mailboxes.clear("nobody")
    assert not await store.mailboxes.mark("nobody", 1, 7)
    assert [] == await owners(store)


async def test_an_entry_comes_back_as_it_went_in(store: Store) -> None:
    """All fields, with payload stored apart and without."""
    first = Draft(b"body", PAYLOAD, b"key", expires_at=NOW + 60.25)
    assert Appended("v1", 1) == await append(store, "v1", first, NOW + 0.5)
    assert Appended("v1", 2) == await append(store, "v1", Draft(b"", b"small"), NOW + 1)
    assert Appended("v1", 3) == await append(store, "v1", Draft(b"\x00\xff"), NOW + 2)
    assert [
        Entry(1, b"body", PAYLOAD, b"key", NOW + 0.5, NOW + 60.25, 0),
        Entry(2, b"", b"small", b"", NOW + 1, 0.0, 0),
        Entry(3, b"\x00\xff", b"", b"", NOW + 2, 0.0, 0),
    ] == await entries(store, "v1", NOW + 3)


async def test_entries_come_in_the_order_they_went_in(store: Store) -> None:
    """Also beyond 256 and 65 536 positions' worth of key bytes: order is by number, not by text."""
    wanted = [b"%d" % number for number in range(300)]
    assert list(range(1, 301)) == await fill(store, "v1", *wanted)
    assert wanted == await bodies(store, "v1")


async def test_a_reader_goes_on_after_a_position(store: Store) -> None:
    await fill(store, "v1", *(b"%d" % number for number in range(1, 11)))

    async def read(after: int, limit: int) -> list[int]:
        return [int(entry.body) for entry in await store.mailboxes.read("v1", after, limit, NOW)]

    assert [1, 2, 3] == await read(0, 3)
    assert [4, 5, 6] == await read(3, 3)
    assert [10] == await read(9, 3)
    assert [] == await read(10, 3)
    assert [] == await read(1000, 3)
    assert [] == await read(0, 0)
    await store.mailboxes.acknowledge("v1", [4, 5])
    assert [3, 6] == await read(2, 2)
    assert [6] == await read(4, 1), "the position itself need not be there any more"


async def test_one_append_to_many_owners(store: Store) -> None:
    """One answer per owner, in the order of the owners, each with positions of its own."""
    await fill(store, "v7", b"before", b"before")
    names = [f"v{number}" for number in range(200)]
    answers = await store.mailboxes.append(names, Draft(b"body", PAYLOAD), NOW)
    assert names == [answer.owner for answer in answers]
    assert {"v7": 3} == {answer.owner: answer.position for answer in answers if answer.position != 1}
    for name in ("v0", "v100", "v199"):
        assert [(b"body", PAYLOAD)] == [(entry.body, entry.payload) for entry in await entries(store, name)]
    assert sorted(names) == await owners(store)


async def test_no_owners_is_no_append(store: Store) -> None:
    assert [] == await store.mailboxes.append([], Draft(b"body", PAYLOAD), NOW)


async def test_an_owner_named_twice_gets_two(store: Store) -> None:
    answers = await store.mailboxes.append(["v1", "v2", "v1"], Draft(b"body"), NOW)
    assert [("v1", 1), ("v2", 1), ("v1", 2)] == [(answer.owner, answer.position) for answer in answers]


async def test_positions_are_never_used_again(store: Store) -> None:
    """Whatever removed the entries: acknowledgement, clearing, replacement, bound, expiry."""
    seen = await fill(store, "v1", b"1", b"2", b"3")
    await store.mailboxes.acknowledge("v1", [3])
    seen += await fill(store, "v1", b"4")
    await store.mailboxes.acknowledge("v1", seen)
    seen += await fill(store, "v1", b"5")
    await store.mailboxes.clear("v1")
    seen += await fill(store, "v1", b"6")
    for _ in range(3):
        seen.append((await append(store, "v1", Draft(b"7", key=b"key"))).position)
    for _ in range(3):
        seen.append((await append(store, "v1", Draft(b"8"), bound=Bound(entries=1))).position)
    seen.append((await append(store, "v1", Draft(b"9", expires_at=NOW + 1))).position)
    await sweep(store, NOW + 2 * DAY)
    await store.mailboxes.clear("v1")
    assert seen[-1] <= (await store.mailboxes.info("v1")).last
    seen += await fill(store, "v1", b"10")
    assert sorted(set(seen)) == seen


async def test_owners_have_any_name(store: Store) -> None:
    """And are not mistaken for their neighbours."""
    done: list[str] = []
    await store.mailboxes.append(ODD_NAMES, Draft(b"theirs"), NOW)
    for name in ODD_NAMES:
        assert 2 == (await append(store, name, Draft(b"mine", PAYLOAD, b"key"))).position, odd_id(name)
        attached = await store.coordination.attach(name, "node")
        answer = await append(store, name, Draft(b"mine too", PAYLOAD, b"key", token=b"token"))
        assert Appended(name, 3, replaced=2, attached="node") == answer
        assert [b"theirs", b"mine too"] == await bodies(store, name), odd_id(name)
        assert await store.coordination.detach(name, attached.epoch), odd_id(name)
        assert sorted(set(ODD_NAMES) - set(done)) == await owners(store), odd_id(name)
        assert 2 == await store.mailboxes.acknowledge(name, [1, 3]), odd_id(name)
        done.append(name)
        assert sorted(set(ODD_NAMES) - set(done)) == await owners(store), odd_id(name)
        for other in ODD_NAMES:
            assert ([] if other in done else [b"theirs"]) == await bodies(store, other), (odd_id(name), odd_id(other))


async def test_a_mailbox_that_was_forgotten_begins_again(store: Store) -> None:
    """Also in an append to several owners: what was removed under a position says nothing of the next entry there."""
    for key in (b"", b"key"):
        await store.mailboxes.append(["v1", "v2"], Draft(b"before"), NOW)
        await store.mailboxes.forget("v2")
        appended = await store.mailboxes.append(["v1", "v2"], Draft(b"first", key=key), NOW)
        assert 1 == appended[1].position
        second = await append(store, "v2", Draft(b"second", key=key))
        assert (1 if key else 0) == second.replaced
        assert ([] if key else [b"first"]) + [b"second"] == await bodies(store, "v2")
        assert (1 if key else 2) == await store.mailboxes.acknowledge("v2", [1, 2])
        assert [] == await bodies(store, "v2")
        await store.mailboxes.forget("v2")
    assert [] == await store.check()


async def test_neighbours_in_name_are_apart(store: Store) -> None:
    """All odd names at once, each with its own content."""
    for number, name in enumerate(ODD_NAMES):
        await fill(store, name, *(b"%d" % number for _ in range(3)))
    for number, name in enumerate(ODD_NAMES):
        assert [b"%d" % number] * 3 == await bodies(store, name), odd_id(name)
    assert sorted(ODD_NAMES) == await owners(store)
    for name in ODD_NAMES[::2]:
        assert 3 == await store.mailboxes.clear(name)
    assert sorted(ODD_NAMES[1::2]) == await owners(store)


async def test_large_values(store: Store) -> None:
    """A mebibyte each of body, payload and key."""
    million = 1 << 20
    body, payload, key = b"b" * million, b"p" * million, b"k" * 65536
    await append(store, "v1", Draft(body, payload, key))
    (entry,) = await entries(store, "v1")
    assert (body, payload, key) == (entry.body, entry.payload, entry.key)
    assert 2 * million == (await store.mailboxes.info("v1")).octets
    assert Appended("v1", 2, replaced=1) == await append(store, "v1", Draft(b"", b"", key))


async def test_a_mailbox_longer_than_any_page(store: Store) -> None:
    """Several thousand entries, read in pages of every size, none lost, none twice."""
    total = 3000
    batch = store.batch()
    for number in range(total):
        batch.append(["v1"], Draft(b"%d" % number), NOW)
    await batch.commit()
    for size in (1000, 999, total, total + 1):
        found: list[int] = []
        after = 0
        while page := await store.mailboxes.read("v1", after, size, NOW):
            found += [int(entry.body) for entry in page]
            after = page[-1].position
        assert list(range(total)) == found
    assert total == await store.mailboxes.clear("v1")
    assert [] == await owners(store)


async def test_a_mailbox_of_large_entries_is_read_in_pages_of_any_size(store: Store) -> None:
    """Entries above what an engine fetches at once: apart, shared by several owners, and with a large body."""
    size = 300 * 1024
    wanted: list[tuple[bytes, bytes]] = []
    for number in range(20):
        body, payload = b"%d" % number, bytes([number]) * size
        if number % 3 == 2:
            body, payload = b"%d " % number + b"b" * size, b""
        wanted.append((body, payload))
        await store.mailboxes.append(["v1", "v2"] if number % 2 else ["v1"], Draft(body, payload), NOW)
    shared = wanted[1::2]
    for owner, expected in (("v1", wanted), ("v2", shared)):
        for limit in (1, 2, 7, 16, 17, 64):
            found: list[tuple[bytes, bytes]] = []
            after = 0
            while page := await store.mailboxes.read(owner, after, limit, NOW):
                assert len(page) == limit or len(found) + len(page) == len(expected), "a short page is the last one"
                found += [(entry.body, entry.payload) for entry in page]
                after = page[-1].position
            assert expected == found, f"{owner} in pages of {limit}"


async def test_large_entries_behind_expired_ones_are_read_one_by_one(store: Store) -> None:
    payload = b"p" * (300 * 1024)
    for number in range(150):
        await append(store, "v1", Draft(b"%d" % number, expires_at=NOW + 1))
    for number in range(3):
        await append(store, "v1", Draft(b"large %d" % number, payload + b"%d" % number))
    found, after = [], 0
    while page := await store.mailboxes.read("v1", after, 1, NOW + 2):
        found += [entry.body for entry in page]
        after = page[-1].position
    assert [b"large 0", b"large 1", b"large 2"] == found


# -- acknowledging and marks


async def test_acknowledged_entries_are_gone(store: Store) -> None:
    await fill(store, "v1", b"1", b"2", b"3", b"4")
    assert 2 == await store.mailboxes.acknowledge("v1", [2, 4])
    assert [b"1", b"3"] == await bodies(store, "v1")
    assert 1 == await store.mailboxes.acknowledge("v1", [1, 2, 2, 1, 99, 0, -1]), "each counted once, strangers not"
    assert 0 == await store.mailboxes.acknowledge("v1", [])
    assert 1 == await store.mailboxes.acknowledge("v1", iter([3]))
    assert [] == await entries(store, "v1")
    assert [] == await owners(store)


async def test_acknowledging_leaves_other_owners_alone(store: Store) -> None:
    await store.mailboxes.append(["v1", "v2"], Draft(b"body", PAYLOAD), NOW)
    assert 1 == await store.mailboxes.acknowledge("v1", [1])
    assert [PAYLOAD] == [entry.payload for entry in await entries(store, "v2")]


async def test_marks(store: Store) -> None:
    """A mark stays with its entry and changes nothing else."""
    await append(store, "v1", Draft(b"1", PAYLOAD, b"key", expires_at=NOW + 60))
    await append(store, "v1", Draft(b"2"))
    (before, other) = await entries(store, "v1")
    for mark in (1, 255, 0, 7):
        assert await store.mailboxes.mark("v1", 1, mark)
        (marked, unmarked) = await entries(store, "v1")
        assert mark == marked.mark
        assert unmarked == other
        assert (before.body, before.payload, before.key) == (marked.body, marked.payload, marked.key)
        assert (before.stored_at, 0.0) == (marked.stored_at, marked.expires_at)
    assert not await store.mailboxes.mark("v1", 3, 1)
    await store.mailboxes.acknowledge("v1", [2])
    assert not await store.mailboxes.mark("v1", 2, 1)
    assert [1] == await positions(store, "v1"), "marking brings nothing back"


@pytest.mark.parametrize("owners", [["v1"], ["v1", "v2", "v3"]])
@pytest.mark.parametrize("payload", [b"", PAYLOAD, b"p" * 5000])
async def test_a_marked_entry_never_expires(store: Store, owners: list[str], payload: bytes) -> None:
    """Whoever has begun to deliver something marks it, so that it can be brought to an end."""
    for body in (b"marked", b"in a batch", b"not"):
        await store.mailboxes.append(owners, Draft(body * 50, payload, expires_at=NOW + 10), NOW)
    assert await store.mailboxes.mark("v1", 1, 3)
    batch = store.batch()
    batch.mark("v1", 2, 1)
    await batch.commit()
    await store.mailboxes.mark("v1", 2, 0)
    assert [(1, 0.0), (2, 0.0)] == [
        (e.position, e.expires_at) for e in await store.mailboxes.read("v1", 0, 9, NOW + 11)
    ]
    cursor: bytes | None = b""
    while cursor is not None:
        cursor = (await store.sweep(NOW + 11, 100, cursor)).cursor
    assert [(1, payload), (2, payload)] == [
        (e.position, e.payload) for e in await store.mailboxes.read("v1", 0, 9, NOW + 11)
    ]
    assert 2 == (await store.mailboxes.info("v1")).entries
    assert [] == await store.check()


async def test_the_successor_of_a_marked_entry_is_unmarked(store: Store) -> None:
    await append(store, "v1", Draft(b"1", key=b"key"))
    await store.mailboxes.mark("v1", 1, 9)
    await append(store, "v1", Draft(b"2", key=b"key"))
    assert not await store.mailboxes.mark("v1", 1, 9)
    assert [(b"2", 0)] == [(entry.body, entry.mark) for entry in await entries(store, "v1")]


@pytest.mark.parametrize("mark", [-1, 256, 1000])
async def test_marks_are_small_numbers(store: Store, mark: int) -> None:
    await fill(store, "v1", b"1")
    with pytest.raises(ValueError):
        await store.mailboxes.mark("v1", 1, mark)
    with pytest.raises(ValueError):
        store.batch().mark("v1", 1, mark)
    assert [0] == [entry.mark for entry in await entries(store, "v1")]


# -- compaction


async def test_a_key_has_one_entry(store: Store) -> None:
    """The newest, at the newest position."""
    answers = [await append(store, "v1", Draft(b"%d" % number, key=b"key")) for number in range(1, 4)]
    assert [(1, 0), (2, 1), (3, 2)] == [(answer.position, answer.replaced) for answer in answers]
    assert [(3, b"3", b"key")] == [(entry.position, entry.body, entry.key) for entry in await entries(store, "v1")]


async def test_keys_are_apart(store: Store) -> None:
    """Each other's, other owners', and from entries that have none."""
    await fill(store, "v1", b"plain")
    keys = [b"a", b"ab", b"a\x00", b"\x00", b"\xff", b"/", b"*", b"{}"]
    for key in keys:
        assert 0 == (await append(store, "v1", Draft(key, key=key))).replaced
    await append(store, "v2", Draft(b"other", key=b"a"))
    assert 2 == (await append(store, "v1", Draft(b"again", key=b"a"))).replaced
    assert [b"plain", *keys[1:], b"again"] == await bodies(store, "v1")
    assert [b"other"] == await bodies(store, "v2")


async def test_an_acknowledged_entry_is_not_replaced(store: Store) -> None:
    """Nor one that was cleared, pushed out or swept: its key is free."""
    await append(store, "v1", Draft(b"1", key=b"key"))
    await store.mailboxes.acknowledge("v1", [1])
    assert Appended("v1", 2) == await append(store, "v1", Draft(b"2", key=b"key"))
    await store.mailboxes.clear("v1")
    assert Appended("v1", 3) == await append(store, "v1", Draft(b"3", key=b"key"))
    assert Appended("v1", 4, dropped=(3,)) == await append(store, "v1", Draft(b"4"), bound=Bound(entries=1))
    fifth = await append(store, "v1", Draft(b"5", key=b"key", expires_at=NOW + 1))
    assert Appended("v1", 5) == fifth
    await sweep(store, NOW + 2)
    assert Appended("v1", 6) == await append(store, "v1", Draft(b"6", key=b"key"), NOW + 2)


async def test_an_old_position_does_not_acknowledge_the_successor(store: Store) -> None:
    """The vehicle acknowledges what it got, while something newer of the same key has come."""
    await append(store, "v1", Draft(b"1", key=b"key"))
    await append(store, "v1", Draft(b"2", key=b"key"))
    assert 0 == await store.mailboxes.acknowledge("v1", [1])
    assert [b"2"] == await bodies(store, "v1")
    assert Appended("v1", 3, replaced=2) == await append(store, "v1", Draft(b"3", key=b"key"))


async def test_replacing_moves_to_the_end(store: Store) -> None:
    for body, key in ((b"a1", b"a"), (b"b1", b"b"), (b"a2", b"a"), (b"c1", b"c"), (b"b2", b"b")):
        await append(store, "v1", Draft(body, key=key))
    assert [b"a2", b"c1", b"b2"] == await bodies(store, "v1")


# -- bounds


async def test_the_oldest_goes_when_there_are_too_many(store: Store) -> None:
    answers = [await append(store, "v1", Draft(b"%d" % number), bound=Bound(entries=3)) for number in range(1, 6)]
    assert [(), (), (), (1,), (2,)] == [answer.dropped for answer in answers]
    assert [b"3", b"4", b"5"] == await bodies(store, "v1")


async def test_droppable_entries_go_first(store: Store) -> None:
    for number, droppable in enumerate((False, True, False, True), 1):
        await append(store, "v1", Draft(b"%d" % number, droppable=droppable))
    bound = Bound(entries=4)
    assert (2,) == (await append(store, "v1", Draft(b"5"), bound=bound)).dropped
    assert (4,) == (await append(store, "v1", Draft(b"6"), bound=bound)).dropped
    assert (1,) == (await append(store, "v1", Draft(b"7"), bound=bound)).dropped
    assert [b"3", b"5", b"6", b"7"] == await bodies(store, "v1")


async def test_the_oldest_that_is_not_in_flight_goes(store: Store) -> None:
    """Whatever lies below: entries that are there, and holes of those that were acknowledged out of order."""
    await fill(store, "v1", *(b"%d" % number for number in range(1, 8)))
    await store.mailboxes.acknowledge("v1", [2, 4, 5])
    bound = Bound(entries=4)
    for spared, victim in ((3, 6), (3, 7), (8, 9), (8, 10)):
        answer = await append(store, "v1", Draft(b"x"), bound=bound, spared=spared)
        assert (victim,) == answer.dropped and not answer.over
    assert [1, 3, 8, 11] == await positions(store, "v1")
    assert Appended("v1", 0) == await append(store, "v1", Draft(b"y"), bound=bound, spared=11), "it goes itself"
    assert [1, 3, 8, 11] == await positions(store, "v1")


async def test_droppable_entries_go_although_others_are_in_flight(store: Store) -> None:
    await fill(store, "v1", b"1")
    await append(store, "v1", Draft(b"2", droppable=True))
    await fill(store, "v1", b"3")
    assert (2,) == (await append(store, "v1", Draft(b"4"), bound=Bound(entries=3), spared=3)).dropped
    assert [b"1", b"3", b"4"] == await bodies(store, "v1")


async def test_a_mailbox_that_is_spared_grows_above_its_bound_and_tells(store: Store) -> None:
    bound, many = Bound(entries=2, octets=100), ["v1", "v2"]
    await fill(store, "v1", b"1", b"2")
    await append(store, "v2", Draft(b"1", droppable=True))
    await fill(store, "v2", b"2")
    answers = await store.mailboxes.append(many, Draft(b"3"), NOW, bound, [SPARE_ALL, SPARE_ALL])
    assert [Appended("v1", 3, over=True), Appended("v2", 3, dropped=(1,))] == answers
    assert (await append(store, "v1", Draft(b"4", b"4" * 98), bound=Bound(octets=100), spared=SPARE_ALL)).over
    assert Appended("v1", 0) == await append(store, "v1", Draft(b"5", droppable=True), bound=bound, spared=SPARE_ALL)
    answers = await store.mailboxes.append(many, Draft(b"6"), NOW, bound, [2, 0])
    assert [(3, 4), (2,)] == [answer.dropped for answer in answers], "each owner has its own"
    assert [b"1", b"2"] == (await bodies(store, "v1"))[:2]


async def test_a_droppable_entry_that_finds_no_other_goes_itself(store: Store) -> None:
    await fill(store, "v1", b"1", b"2")
    answer = await append(store, "v1", Draft(b"3", PAYLOAD, droppable=True), bound=Bound(entries=2))
    assert Appended("v1", 0) == answer
    assert [b"1", b"2"] == await bodies(store, "v1")
    assert 2 == (await store.mailboxes.info("v1")).octets
    fourth = await append(store, "v1", Draft(b"4"))
    assert fourth.position > 2
    assert [b"1", b"2", b"4"] == await bodies(store, "v1")


async def test_acknowledged_droppable_entries_are_forgotten(store: Store) -> None:
    """They must not be counted as something to drop."""
    for number in range(1, 4):
        await append(store, "v1", Draft(b"%d" % number, droppable=number == 2))
    await store.mailboxes.acknowledge("v1", [2])
    answer = await append(store, "v1", Draft(b"4"), bound=Bound(entries=2))
    assert (1,) == answer.dropped
    assert [b"3", b"4"] == await bodies(store, "v1")


async def test_octets_are_bounded(store: Store) -> None:
    """Bodies and payloads; as many go as it takes."""
    bound = Bound(octets=10)
    for body, payload in ((b"1", b"111"), (b"2", b""), (b"3", b"333")):
        assert () == (await append(store, "v1", Draft(body, payload), bound=bound)).dropped
    assert (1,) == (await append(store, "v1", Draft(b"4", b"44"), bound=bound)).dropped
    assert (2, 3) == (await append(store, "v1", Draft(b"5", b"5555"), bound=bound)).dropped
    assert [b"4", b"5"] == await bodies(store, "v1")
    assert 8 == (await store.mailboxes.info("v1")).octets
    assert () == (await append(store, "v1", Draft(b"66"), bound=bound)).dropped, "just full is not too much"
    assert (4, 5, 6) == (await append(store, "v1", Draft(b"7" * 10), bound=bound)).dropped


async def test_both_bounds_hold(store: Store) -> None:
    bound = Bound(entries=2, octets=10)
    for body in (b"1", b"2"):
        await append(store, "v1", Draft(body), bound=bound)
    assert (1,) == (await append(store, "v1", Draft(b"3" * 9), bound=bound)).dropped
    assert (2, 3) == (await append(store, "v1", Draft(b"4" * 9), bound=bound)).dropped


@pytest.mark.parametrize("droppable", [False, True])
async def test_what_can_never_fit_pushes_out_nothing(store: Store, droppable: bool) -> None:
    await append(store, "v1", Draft(b"1", droppable=True))
    answer = await append(store, "v1", Draft(b"2", PAYLOAD, droppable=droppable), bound=Bound(octets=100))
    assert Appended("v1", 0) == answer
    assert [b"1"] == await bodies(store, "v1")


@pytest.mark.parametrize("droppable", [False, True])
async def test_what_can_never_fit_leaves_a_full_mailbox_alone(store: Store, droppable: bool) -> None:
    """Even one that is larger than the bound, because it was filled under another: nothing goes for nothing."""
    await fill(store, "v1", b"1" * 60, b"2" * 60)
    draft = Draft(b"3", PAYLOAD, droppable=droppable)
    assert Appended("v1", 0) == await append(store, "v1", draft, bound=Bound(entries=1, octets=100))
    assert [b"1" * 60, b"2" * 60] == await bodies(store, "v1")
    assert MailboxInfo(2, 120, 1, (await store.mailboxes.info("v1")).last) == await store.mailboxes.info("v1")


async def test_expired_entries_count_until_they_are_swept(store: Store) -> None:
    """They go in the same order as others, and are told."""
    await append(store, "v1", Draft(b"1"))
    await append(store, "v1", Draft(b"2", expires_at=NOW + 1))
    await append(store, "v1", Draft(b"3", expires_at=NOW + 1))
    bound, later = Bound(entries=3), NOW + 2
    assert Appended("v1", 4, dropped=(1,)) == await append(store, "v1", Draft(b"4"), later, bound)
    assert Appended("v1", 5, dropped=(2,)) == await append(store, "v1", Draft(b"5"), later, bound)
    await sweep(store, later)
    assert Appended("v1", 6) == await append(store, "v1", Draft(b"6"), later, bound)
    assert [b"4", b"5", b"6"] == await bodies(store, "v1", later)


async def test_replacing_makes_room_before_the_bound_is_asked(store: Store) -> None:
    bound = Bound(entries=2, octets=8)
    await append(store, "v1", Draft(b"1", b"111", b"key"), bound=bound)
    await append(store, "v1", Draft(b"2", b"222"), bound=bound)
    assert Appended("v1", 3, replaced=1) == await append(store, "v1", Draft(b"3", b"333", b"key"), bound=bound)
    assert [b"2", b"3"] == await bodies(store, "v1")


async def test_a_droppable_successor_takes_the_room_of_its_predecessor(store: Store) -> None:
    await append(store, "v1", Draft(b"1", key=b"key"))
    await fill(store, "v1", b"2")
    answer = await append(store, "v1", Draft(b"3", key=b"key", droppable=True), bound=Bound(entries=2))
    assert Appended("v1", 3, replaced=1) == answer


async def test_a_bound_counts_for_its_append_only(store: Store) -> None:
    """It is no property of the mailbox; a smaller one later takes away more."""
    await fill(store, "v1", *(b"%d" % number for number in range(1, 7)))
    assert (1, 2, 3, 4) == (await append(store, "v1", Draft(b"7"), bound=Bound(entries=3))).dropped
    assert () == (await append(store, "v1", Draft(b"8"))).dropped


async def test_a_smaller_bound_takes_more_than_the_entry_that_came_with_it(store: Store) -> None:
    """The new entry goes first, being droppable; the rest is still too much."""
    await fill(store, "v1", b"1", b"2", b"3")
    answer = await append(store, "v1", Draft(b"4", droppable=True), bound=Bound(entries=1))
    assert Appended("v1", 0, dropped=(1, 2)) == answer
    assert [b"3"] == await bodies(store, "v1")


async def test_a_bound_holds_for_each_owner(store: Store) -> None:
    await fill(store, "v1", b"1", b"2")
    await fill(store, "v3", b"1", b"2", b"3")
    answers = await store.mailboxes.append(["v1", "v2", "v3"], Draft(b"new", PAYLOAD), NOW, Bound(entries=2))
    assert [("v1", (1,)), ("v2", ()), ("v3", (1, 2))] == [(answer.owner, answer.dropped) for answer in answers]


# -- tokens


async def test_a_repeated_append_is_done_once(store: Store) -> None:
    draft = Draft(b"body", PAYLOAD, token=b"token")
    assert Appended("v1", 1) == await append(store, "v1", draft)
    assert Appended("v1", 1, repeated=True) == await append(store, "v1", draft, NOW + 1)
    assert Appended("v1", 2) == await append(store, "v1", Draft(b"other", token=b"another"))
    assert Appended("v1", 1, repeated=True) == await append(store, "v1", draft, NOW + 2)
    assert [b"body", b"other"] == await bodies(store, "v1")


async def test_a_repetition_reaches_only_those_that_were_missed(store: Store) -> None:
    """A batch that was broken off is repeated as a whole."""
    draft = Draft(b"body", PAYLOAD, token=b"token")
    await store.mailboxes.append(["v1", "v3"], draft, NOW)
    answers = await store.mailboxes.append(["v1", "v2", "v3", "v2"], draft, NOW)
    assert [("v1", 1, True), ("v2", 1, False), ("v3", 1, True), ("v2", 1, True)] == [
        (answer.owner, answer.position, answer.repeated) for answer in answers
    ]
    for name in ("v1", "v2", "v3"):
        assert [b"body"] == await bodies(store, name)


async def test_a_token_outlives_its_entry(store: Store) -> None:
    """Acknowledged, cleared, replaced: it was delivered, and must not come again."""
    draft = Draft(b"body", key=b"key", token=b"token")
    await append(store, "v1", draft)
    await store.mailboxes.acknowledge("v1", [1])
    assert Appended("v1", 1, repeated=True) == await append(store, "v1", draft)
    assert Appended("v1", 2) == await append(store, "v1", Draft(b"newer", key=b"key"))
    await store.mailboxes.clear("v1")
    assert Appended("v1", 1, repeated=True) == await append(store, "v1", draft)
    assert [] == await entries(store, "v1")


async def test_a_repetition_of_what_was_pushed_out_changes_nothing(store: Store) -> None:
    await fill(store, "v1", b"1")
    draft = Draft(b"2", droppable=True, token=b"token")
    assert Appended("v1", 0) == await append(store, "v1", draft, bound=Bound(entries=1))
    assert Appended("v1", 0, repeated=True) == await append(store, "v1", draft)
    assert [b"1"] == await bodies(store, "v1")


async def test_a_repetition_replaces_and_drops_nothing(store: Store) -> None:
    draft = Draft(b"1", key=b"key", token=b"token")
    await append(store, "v1", draft)
    await append(store, "v1", Draft(b"2", key=b"key"))
    assert Appended("v1", 1, repeated=True) == await append(store, "v1", draft, bound=Bound(entries=1, octets=1))
    assert [b"2"] == await bodies(store, "v1")


async def test_a_token_is_known_for_an_hour(store: Store) -> None:
    draft = Draft(b"body", token=b"token")
    assert not (await append(store, "v1", draft)).repeated
    assert (await append(store, "v1", draft, NOW + HOUR - 1)).repeated
    await sweep(store, NOW + HOUR - 1)
    assert (await append(store, "v1", draft, NOW + HOUR - 1)).repeated, "a repetition does not prolong it"
    assert not (await append(store, "v1", draft, NOW + HOUR + 1)).repeated
    assert (await append(store, "v1", draft, NOW + HOUR + 2)).repeated
    await sweep(store, NOW + HOUR + 2)
    assert (await append(store, "v1", draft, NOW + HOUR + 3)).repeated, "the sweep forgets only what is over"
    assert [b"body", b"body"] == await bodies(store, "v1")


async def test_tokens_belong_to_their_owner(store: Store) -> None:
    draft = Draft(b"body", token=b"token")
    assert not (await append(store, "v1", draft)).repeated
    assert not (await append(store, "v2", draft)).repeated


async def test_without_a_token_every_append_counts(store: Store) -> None:
    assert [1, 2, 3] == await fill(store, "v1", b"same", b"same", b"same")


# -- expiry


async def test_a_reader_sees_nothing_that_has_expired(store: Store) -> None:
    """To the moment, and whether or not a sweep has been there."""
    await append(store, "v1", Draft(b"short", PAYLOAD, expires_at=NOW + 10))
    await append(store, "v1", Draft(b"long", PAYLOAD, expires_at=NOW + 20))
    await append(store, "v1", Draft(b"for ever"))
    assert [b"short", b"long", b"for ever"] == await bodies(store, "v1", NOW + 9.75)
    assert [b"long", b"for ever"] == await bodies(store, "v1", NOW + 10)
    assert [b"long", b"for ever"] == await bodies(store, "v1", NOW + 19.75)
    assert [b"for ever"] == await bodies(store, "v1", NOW + 20)
    await sweep(store, NOW + 10)
    assert [b"long", b"for ever"] == await bodies(store, "v1", NOW + 10)
    assert MailboxInfo(2, 12 + len(PAYLOAD), 2, 3) == await store.mailboxes.info("v1")


async def test_expired_entries_do_not_use_up_the_limit(store: Store) -> None:
    """A reader with a small limit gets what is behind them, however many they are."""
    batch = store.batch()
    for number in range(500):
        batch.append(["v1"], Draft(b"%d" % number, expires_at=NOW + 1), NOW)
    batch.append(["v1"], Draft(b"alive"), NOW)
    await batch.commit()
    assert [b"alive"] == [entry.body for entry in await store.mailboxes.read("v1", 0, 1, NOW + 1)]


async def test_an_expired_entry_is_replaced(store: Store) -> None:
    await append(store, "v1", Draft(b"1", key=b"key", expires_at=NOW + 1))
    assert Appended("v1", 2, replaced=1) == await append(store, "v1", Draft(b"2", key=b"key"), NOW + 2)
    await sweep(store, NOW + 3)
    assert [b"2"] == await bodies(store, "v1", NOW + 3)


async def test_an_entry_that_is_too_late_already_is_never_seen(store: Store) -> None:
    await append(store, "v1", Draft(b"late", expires_at=NOW - 1))
    assert [] == await entries(store, "v1")


# -- sizes


async def test_info_follows_every_change(store: Store) -> None:
    info = store.mailboxes.info
    await append(store, "v1", Draft(b"12", b"345"))
    assert MailboxInfo(1, 5, 1, 1) == await info("v1")
    await append(store, "v1", Draft(b"12", b"345", b"key"))
    assert MailboxInfo(2, 10, 1, 2) == await info("v1")
    await append(store, "v1", Draft(b"1", PAYLOAD, b"key"))
    assert MailboxInfo(2, 6 + len(PAYLOAD), 1, 3) == await info("v1")
    await store.mailboxes.mark("v1", 1, 3)
    await store.mailboxes.acknowledge("v1", [1, 2])
    assert MailboxInfo(1, 1 + len(PAYLOAD), 3, 3) == await info("v1")
    await append(store, "v1", Draft(b"1234"), bound=Bound(entries=1))
    assert MailboxInfo(1, 4, 4, 4) == await info("v1")
    await store.mailboxes.clear("v1")
    assert MailboxInfo(0, 0, 0, 4) == await info("v1")
    await fill(store, "v1", b"12")
    assert MailboxInfo(1, 2, 5, 5) == await info("v1")


async def test_clear_takes_everything_of_one_owner(store: Store) -> None:
    await fill(store, "v1", b"1", b"2")
    await append(store, "v1", Draft(b"3", PAYLOAD, b"key", droppable=True))
    await fill(store, "v2", b"1")
    assert 3 == await store.mailboxes.clear("v1")
    assert 0 == await store.mailboxes.clear("v1")
    assert [] == await entries(store, "v1")
    assert ["v2"] == await owners(store)
    assert Appended("v1", 4) == await append(store, "v1", Draft(b"4", key=b"key"), bound=Bound(entries=1))


async def test_a_forgotten_owner_begins_anew(store: Store) -> None:
    """Positions, keys, marks, sizes and tokens; others and the attachment stay."""
    attached = await store.coordination.attach("v1", "node")
    draft = Draft(b"1", PAYLOAD, b"key", droppable=True, token=b"token")
    assert Appended("v1", 1, attached="node") == await append(store, "v1", draft)
    await append(store, "v1", Draft(b"2", expires_at=NOW + 10))
    await store.mailboxes.mark("v1", 1, 7)
    await append(store, "v2", draft)
    assert 2 == await store.mailboxes.forget("v1")
    assert MailboxInfo(0, 0, 0, 0) == await store.mailboxes.info("v1")
    assert ["v2"] == await owners(store)
    assert Appended("v1", 1, attached="node") == await append(store, "v1", draft)
    assert [(1, b"1", 0)] == [(entry.position, entry.body, entry.mark) for entry in await entries(store, "v1")]
    assert await store.coordination.detach("v1", attached.epoch)
    assert (await append(store, "v2", draft)).repeated
    assert [] == await store.check()


async def test_a_stranger_is_forgotten_at_once(store: Store) -> None:
    assert 0 == await store.mailboxes.forget("nobody")
    await fill(store, "v1", b"1")
    await store.mailboxes.acknowledge("v1", [1])
    assert 0 == await store.mailboxes.forget("v1")
    assert [1] == await fill(store, "v1", b"1")


async def test_a_large_mailbox_is_forgotten_with_its_tokens(store: Store) -> None:
    drafts = [Draft(b"%d" % number, PAYLOAD[: number * 4], token=b"t%d" % number) for number in range(700)]
    await asyncio.gather(*(append(store, "v1", draft) for draft in drafts))
    await append(store, "v1", Draft(b"later", token=b"later"), NOW + HOUR)
    assert 701 == await store.mailboxes.forget("v1")
    assert MailboxInfo(0, 0, 0, 0) == await store.mailboxes.info("v1")
    again = [await append(store, "v1", draft) for draft in drafts[::100]]
    assert [(position, False) for position in range(1, 8)] == [(each.position, each.repeated) for each in again]
    assert Appended("v1", 8) == await append(store, "v1", Draft(b"later", token=b"later"), NOW + HOUR)
    assert [] == await store.check()


async def test_the_end_of_a_forgotten_entry_does_not_end_its_successor(store: Store) -> None:
    """Positions are given again, so what was to happen to the old entry must not happen to the new one."""
    await append(store, "v1", Draft(b"old", expires_at=NOW + 5, token=b"token"))
    await store.mailboxes.forget("v1")
    await append(store, "v1", Draft(b"new", token=b"token"), NOW + 1)
    await sweep(store, NOW + HOUR + 0.5)
    assert [b"new"] == await bodies(store, "v1")
    assert (await append(store, "v1", Draft(b"new", token=b"token"), NOW + HOUR + 0.5)).repeated


async def test_what_comes_after_a_forgotten_owner_stays(store: Store) -> None:
    """Calls in the air keep their order."""
    boxes = store.mailboxes
    calls = [
        boxes.append(["v1"], Draft(b"1", token=b"token"), NOW),
        boxes.forget("v1"),
        boxes.append(["v1"], Draft(b"2", token=b"token"), NOW),
    ]
    answers = await asyncio.gather(*(asyncio.ensure_future(call) for call in calls))
    assert 1 == answers[1]
    assert [b"2"] == await bodies(store, "v1")


async def test_a_forgotten_owner_is_forgotten_for_good(engine: Engine) -> None:
    """After closing and opening too; what forgets everything is asked all the same."""
    store = engine.make()
    await store.open()
    for number in range(40):
        await append(store, "v1", Draft(b"%d" % number, token=b"token%d" % number))
    await store.mailboxes.forget("v1")
    await store.close()
    store = engine.make()
    await store.open()
    assert Appended("v1", 1) == await append(store, "v1", Draft(b"new", token=b"token3"))
    await store.close()


async def test_owners_are_those_with_entries(store: Store) -> None:
    names = [f"v{number}" for number in range(1500)]
    await store.mailboxes.append(names, Draft(b"body"), NOW)
    await store.mailboxes.acknowledge("v7", [1])
    await store.coordination.attach("somebody", "node")
    assert sorted(set(names) - {"v7"}) == await owners(store)


# -- many at once


async def test_writers_at_once_share_the_positions(store: Store) -> None:
    """No position twice, none lost, and each writer's own order is kept."""

    async def write(writer: int) -> list[int]:
        return [(await append(store, "v1", Draft(b"%d %d" % (writer, number)))).position for number in range(40)]

    given = await asyncio.gather(*(write(writer) for writer in range(8)))
    assert list(range(1, 321)) == sorted(itertools.chain.from_iterable(given))
    found = [tuple(map(int, body.split())) for body in await bodies(store, "v1")]
    assert 320 == len(found)
    for writer in range(8):
        assert [(writer, number) for number in range(40)] == [pair for pair in found if pair[0] == writer]


async def test_calls_in_the_air_keep_their_order(store: Store) -> None:
    """Nobody waits for the one before (rule 6); single calls and batches alike."""

    async def commit(number: int) -> list[Appended]:
        batch = store.batch()
        batch.append(["v1"], Draft(b"%d" % number), NOW)
        return await batch.commit()

    def call(number: int) -> asyncio.Task[list[Appended]]:
        if number % 3 == 0:
            return asyncio.create_task(commit(number))
        return asyncio.create_task(store.mailboxes.append(["v1"], Draft(b"%d" % number), NOW))

    answers = await asyncio.gather(*(call(number) for number in range(200)))
    assert list(range(1, 201)) == [answer.position for (answer,) in answers]
    assert [b"%d" % number for number in range(200)] == await bodies(store, "v1")


async def test_payloads_of_any_size_keep_their_order(store: Store) -> None:
    """Large ones are stored apart, perhaps elsewhere, and must not make room for small ones meanwhile."""
    payloads = [PAYLOAD[: 1000 * (number % 4)] + b"%d" % number for number in range(200)]
    calls = [
        store.mailboxes.append(["v1", f"w{number % 7}"], Draft(b"", payload), NOW)
        for number, payload in enumerate(payloads)
    ]
    await asyncio.gather(*(asyncio.ensure_future(call) for call in calls))
    assert payloads == [entry.payload for entry in await entries(store, "v1")]


async def test_a_batch_larger_than_any_step_keeps_its_place(store: Store) -> None:
    """What was begun after it does not come between its parts."""
    names = [f"v{number}" for number in range(2500)]
    batch = store.batch()
    batch.append(names, Draft(b"1"), NOW)
    batch.append(names, Draft(b"2"), NOW)
    later = [store.mailboxes.append([name], Draft(b"3", PAYLOAD), NOW) for name in names[::250]]
    await asyncio.gather(asyncio.ensure_future(batch.commit()), *(asyncio.ensure_future(call) for call in later))
    for name in names[::250]:
        assert [b"1", b"2", b"3"] == await bodies(store, name)


async def test_different_calls_in_the_air_keep_their_order(store: Store) -> None:
    """Append, mark, acknowledge and clear of one owner, started at once."""
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
    ]
    answers = await asyncio.gather(*(asyncio.ensure_future(call) for call in calls))
    assert [True, 2, False] == answers[2:5]
    assert 1 == answers[6]
    assert [(4, b"4")] == [(entry.position, entry.body) for entry in await entries(store, "v1")]


async def test_a_key_written_by_many_has_one_entry(store: Store) -> None:
    """Every position is either replaced by exactly one later append or still there."""
    answers = await asyncio.gather(*(append(store, "v1", Draft(b"%d" % n, PAYLOAD, b"key")) for n in range(100)))
    given = {answer.position for answer in answers}
    replaced = [answer.replaced for answer in answers if answer.replaced]
    assert list(range(1, 101)) == sorted(given)
    assert len(replaced) == len(set(replaced)) == 99
    assert list(given - set(replaced)) == await positions(store, "v1")


async def test_a_repetition_in_the_air_is_recognised(store: Store) -> None:
    """The first try and the second meet in the store."""
    draft = Draft(b"body", PAYLOAD, token=b"token")
    answers = await asyncio.gather(*(append(store, "v1", draft) for _ in range(20)))
    assert [False] + [True] * 19 == sorted(answer.repeated for answer in answers)
    assert {1} == {answer.position for answer in answers}
    assert [b"body"] == await bodies(store, "v1")


async def test_a_bound_holds_under_many_writers(store: Store) -> None:
    bound = Bound(entries=10)
    answers = await asyncio.gather(*(append(store, "v1", Draft(b"%d" % n), bound=bound) for n in range(200)))
    dropped = [position for answer in answers for position in answer.dropped]
    assert list(range(1, 191)) == sorted(dropped)
    assert list(range(191, 201)) == await positions(store, "v1")


async def test_readers_and_acknowledgements_beside_writers(store: Store) -> None:
    """A consumer that reads, acknowledges and goes on gets everything once, in order, while it is written."""
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
    assert MailboxInfo(0, 0, 0, total) == await store.mailboxes.info("v1")


async def test_many_owners_at_once(store: Store) -> None:
    """Appends to random sets of owners, all in the air: each owner has all of its own, once."""
    dice = random.Random(20)
    names = [f"v{number}" for number in range(50)]
    plans = [dice.sample(names, 20) for _ in range(60)]
    await asyncio.gather(
        *(store.mailboxes.append(plan, Draft(b"%d" % number, PAYLOAD), NOW) for number, plan in enumerate(plans))
    )
    for name in names:
        wanted = [b"%d" % number for number, plan in enumerate(plans) if name in plan]
        assert wanted == await bodies(store, name)
