"""Claims: entries that one of several writers has, until they are acknowledged, given back, or it is no more."""

from __future__ import annotations

import asyncio
import random

import pytest

from motorcade.storage.ports import MAX_CLAIMED, Batch, Bound, Draft, Store, StoreFencedError
from tests.contracts.engines import (
    HOUR,
    NOW,
    PAYLOAD,
    Engine,
    append,
    bodies,
    fill,
    persistent,
    positions,
    sweep,
)

HIGH, LOW = "queue:q:1", "queue:q"  # of one home


async def claim(
    store: Store,
    limit: int,
    owners: list[str] | None = None,
    skip: list[list[int]] | None = None,
    now: float = NOW,
) -> list[list[int]]:
    batch = Batch()
    batch.claim(owners or [LOW], store.writer, limit, now, skip or [])
    (found,) = (await store.write(batch)).claimed
    return [list(some) for some in found]


async def release(store: Store, *places: int, owner: str = LOW) -> None:
    batch = Batch()
    batch.release(owner, store.writer, places)
    await store.write(batch)


async def test_an_entry_is_claimed_once_in_order(store: Store, other: Store) -> None:
    await fill(store, LOW, *(b"%d" % number for number in range(1, 7)))
    await fill(store, HIGH, b"a", b"b")
    assert [[1, 2], [1]] == await claim(store, 3, [HIGH, LOW])
    rest = await claim(other, 100, [HIGH, LOW])
    mine, theirs = await store.mailboxes.claimed(LOW, store.writer), await other.mailboxes.claimed(LOW, other.writer)
    assert [1, 2, 3, 4, 5, 6] == sorted({*mine, *theirs})
    if store is not other:
        assert ([[], [2, 3, 4, 5, 6]], [1]) == (rest, mine)
        await release(store, 3)  # it is not its own
    assert [[], []] == await claim(store, 10, [HIGH, LOW]) == await claim(other, 10, [LOW, HIGH])
    assert 6 == len(await bodies(store, LOW)), "claimed or not, it can be read"
    assert 1 == await other.mailboxes.acknowledge(LOW, [1]), "it is a fact, whoever has claimed it"
    assert [[]] == await claim(store, 10)
    assert [[]] == await claim(store, 10, ["queue:another"])
    assert [] == await store.mailboxes.claimed("queue:another", store.writer)
    with pytest.raises(ValueError, match="1000"):
        Batch().claim([LOW], store.writer, MAX_CLAIMED + 1, NOW)
    assert [] == await store.check()


async def test_what_is_given_back_is_in_its_old_place(store: Store, other: Store) -> None:
    await fill(store, LOW, *(b"%d" % number for number in range(1, 9)))
    assert [[1, 2, 3, 4, 5]] == await claim(store, 5)
    batch = Batch()
    batch.mark(LOW, 2, 3)
    batch.release(LOW, store.writer, [2, 4, 99])
    batch.acknowledge(LOW, [3])
    batch.claim([LOW], store.writer, 2, NOW, [[2]])
    assert [[[4, 6]]] == (await store.write(batch)).claimed
    assert [[2, 7]] == await claim(other, 2)
    (entry, _) = await other.mailboxes.entries(LOW, [2, 3, 7], NOW)
    assert (2, b"2", 3) == (entry.position, entry.body, entry.mark)
    await release(other, 2, 7)
    await release(store, *await store.mailboxes.claimed(LOW, store.writer))
    assert [] == await store.mailboxes.claimed(LOW, store.writer)
    assert [[1, 2, 4, 5, 6, 7, 8]] == await claim(other, 100), "all of them"
    await release(other, 1, 4, 8)
    await store.mailboxes.acknowledge(LOW, [4])  # while nobody has it
    await fill(store, LOW, b"9")
    assert [[1, 8, 9]] == await claim(store, 100)
    assert 7 == await store.mailboxes.clear(LOW)
    await fill(store, LOW, b"10")
    assert [[10]] == await claim(other, 5), "there is nothing left of old claims"
    await store.mailboxes.forget(LOW)
    (position,) = await fill(store, LOW, b"11")
    assert [[position]] == await claim(store, 5)
    assert [] == await store.check()


async def test_what_has_expired_is_not_claimed(store: Store) -> None:
    await append(store, LOW, Draft(b"1", PAYLOAD, expires_at=NOW + 5))
    await append(store, LOW, Draft(b"2", PAYLOAD))
    await append(store, LOW, Draft(b"3", PAYLOAD, expires_at=NOW + 5))
    assert [[2, 3]] == await claim(store, 2, skip=[[1]])
    assert [PAYLOAD, PAYLOAD] == [each.payload for each in await store.mailboxes.entries(LOW, [2, 3], NOW)]
    assert [2] == [each.position for each in await store.mailboxes.entries(LOW, [2, 3], NOW + 5)]
    assert [[]] == await claim(store, 2, now=NOW + 5)
    await sweep(store, NOW + HOUR)
    assert [2] == await store.mailboxes.claimed(LOW, store.writer)
    await release(store, 2, 3)
    assert [[2]] == await claim(store, 5)
    assert [] == await store.check()


async def test_what_is_claimed_counts_as_in_flight(store: Store) -> None:
    """No bound pushes it out, nor what is before it; a newer value of its key replaces it all the same."""
    bound = Bound(entries=4)
    await fill(store, LOW, b"1", b"2", b"3")
    await append(store, LOW, Draft(b"4", key=b"k"))
    assert [[1, 2]] == await claim(store, 2)
    await release(store, 1)
    assert (3,) == (await append(store, LOW, Draft(b"5"), bound=bound)).dropped
    assert [[1, 4]] == await claim(store, 2)
    assert 4 == (await append(store, LOW, Draft(b"6", key=b"k"), bound=bound)).replaced
    assert (5,) == (await append(store, LOW, Draft(b"7"), bound=bound)).dropped
    await release(store, 1, 2, 4)
    assert (1,) == (await append(store, LOW, Draft(b"8"), bound=bound)).dropped
    assert [2, 6, 7, 8] == await positions(store, LOW)
    assert [] == await store.check()


async def test_the_bound_of_several_mailboxes_of_a_home(store: Store) -> None:
    refusing = Bound(entries=3, refuse=True, beside=(HIGH,))
    await fill(store, HIGH, b"1", b"2")
    assert not (await append(store, LOW, Draft(b"3", key=b"k"), bound=refusing)).refused
    assert (await append(store, LOW, Draft(b"4"), bound=refusing)).refused
    assert (await append(store, HIGH, Draft(b"4"), bound=Bound(0, 3, refuse=True, beside=(LOW,)))).refused
    assert 1 == (await append(store, LOW, Draft(b"5", key=b"k"), bound=refusing)).replaced
    await store.mailboxes.acknowledge(HIGH, [1])
    assert 3 == (await append(store, LOW, Draft(b"6"), bound=refusing)).position
    assert [[], [2, 3]] == await claim(store, 5, ["queue:q:2", LOW])


async def test_claims_of_a_writer_that_is_no_more_are_void(engine: Engine, store: Store) -> None:
    """A claim that comes after the fence is refused; what was claimed before is free again, in its old place."""
    if not engine.shared:
        pytest.skip("there is no second writer")
    first, second = engine.make(), engine.make()
    await first.open()
    await second.open()
    await fill(store, LOW, *(b"%d" % number for number in range(1, 10)))
    batch = Batch()
    batch.mark(LOW, 2, 7)
    batch.claim([LOW], first.writer, 3, NOW)
    await first.write(batch)
    assert [[4, 5]] == await claim(second, 2)
    assert [[6, 7]] == await claim(store, 2)
    late = [claim(first, 1) for _ in range(20)]
    fencing = asyncio.create_task(store.coordination.fence_member(first.writer))
    answers = await asyncio.gather(*late, return_exceptions=True)
    assert await fencing
    assert all(isinstance(each, StoreFencedError) or each in ([[]], [[8]], [[9]]) for each in answers)
    with pytest.raises(StoreFencedError):
        await claim(first, 5)
    with pytest.raises(StoreFencedError):
        await release(first, 2)
    await second.close()
    assert [[1, 2, 3, 4]] == await claim(store, 4)
    assert 7 == (await store.mailboxes.entries(LOW, [2], NOW))[0].mark
    assert [[5, 8, 9]] == await claim(store, 5)
    assert list(range(1, 10)) == await store.mailboxes.claimed(LOW, store.writer)
    await first.close()
    assert [] == await store.check()


@persistent
async def test_claims_end_with_their_store(engine: Engine) -> None:
    store = engine.make()
    await store.open()
    await fill(store, LOW, b"1", b"2")
    assert [[1]] == await claim(store, 1)
    await store.close()
    await store.open()
    assert [[1, 2]] == await claim(store, 5)
    await store.close()


async def test_claims_of_several_writers_never_overlap(store: Store, other: Store) -> None:
    """Whatever is appended, claimed, given back, acknowledged and replaced, in any order."""
    dice = random.Random(5)
    here, there, held = [store, other], [HIGH, LOW], {0: set[tuple[str, int]](), 1: set[tuple[str, int]]()}
    entries: set[tuple[str, int]] = set()
    for _ in range(300):
        who, owner = dice.randrange(2), dice.choice(there)
        match dice.randrange(5):
            case 0:
                key = dice.choice([b"", b"", b"k"])
                answer = await append(here[who], owner, Draft(b"x", key=key))
                entries.add((owner, answer.position))
                for gone in (entries, *held.values()):
                    gone.discard((owner, answer.replaced))
            case 1 | 2:
                free = entries - held[0] - held[1]
                limit = dice.randrange(5)
                found = await claim(here[who], limit, there)
                claimed = [(name, place) for name, some in zip(there, found, strict=True) for place in some]
                assert sorted(free, key=lambda each: (each[0] == LOW, each[1]))[:limit] == claimed
                held[who].update(claimed)
            case 3 if held[who]:
                some = dice.sample(sorted(held[who]), dice.randrange(len(held[who]) + 1))
                batch = Batch()
                for name, place in some:
                    batch.release(name, here[who].writer, [place])
                await here[who].write(batch)
                held[who].difference_update(some)
            case 4 if entries:
                name, place = dice.choice(sorted(entries))
                assert 1 == await here[who].mailboxes.acknowledge(name, [place])
                for gone in (entries, *held.values()):
                    gone.discard((name, place))
        if store is other:
            held[0] |= held[1]
            held[1] = held[0]
    for who, name in ((0, HIGH), (0, LOW), (1, HIGH), (1, LOW)):
        mine = sorted(place for of, place in held[who] if of == name)
        assert mine == await here[who].mailboxes.claimed(name, here[who].writer)
    assert [] == await store.check()
