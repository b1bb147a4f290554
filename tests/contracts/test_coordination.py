"""Coordination: who is where, who leads, and that nobody sleeps through a message."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from motorcade.storage.ports import Appended, Batch, Draft, Lease, Store, StoreFencedError
from tests.contracts.engines import (
    HOUR,
    NOW,
    ODD_NAMES,
    Engine,
    append,
    eventually,
    local_clock,
    odd_id,
    persistent,
)

# -- attach and detach (the model has more of it)


async def test_the_last_attach_counts_whatever_an_old_connection_does(store: Store, other: Store) -> None:
    """It ends after the vehicle has come back elsewhere. Appends of all kinds say who is attached."""
    old = await store.coordination.attach("v1", "node-a")
    assert ("", False) == (old.previous, old.pending)
    new = await other.coordination.attach("v1", "node-b")
    assert "node-a" == new.previous
    assert not await store.coordination.detach(old.fence)
    draft, wanted = Draft(b"body", token=b"token"), [("v1", "node-b"), ("v2", "")]
    for _ in range(2):
        answers = await store.mailboxes.append(["v1", "v2"], draft, NOW)
        assert wanted == [(answer.owner, answer.attached) for answer in answers]
    batch = Batch()
    batch.append(["v1"], Draft(b"body"), NOW)
    batch.append(["v2"], Draft(b"body"), NOW)
    assert wanted == [(answer.owner, answer.attached) for answer in (await other.write(batch)).appended]
    assert await other.coordination.detach(new.fence)
    assert not await other.coordination.detach(new.fence)
    again = await store.coordination.attach("v1", "node-a")
    assert ("", True) == (again.previous, again.pending)
    assert old.fence.number + 1 == new.fence.number
    assert 3 == len({old.fence.token, new.fence.token, again.fence.token})


async def test_no_wake_up_is_lost(store: Store, other: Store) -> None:
    """A vehicle comes while its message comes: whoever is second sees the first.

    For many vehicles at once an attach and an append (alone or in a batch) are in the air, from two nodes where there
    can be two, with random gaps. They are serialised, so exactly one of them is told of the other.
    """
    dice = random.Random(6)
    stores = [store, other]

    async def give_way() -> None:
        for _ in range(dice.randrange(4)):
            await asyncio.sleep(0)

    async def attach(owner: str) -> bool:
        await give_way()
        return (await dice.choice(stores).coordination.attach(owner, "node-a")).pending

    async def one(owner: str) -> list[Appended]:
        await give_way()
        return await dice.choice(stores).mailboxes.append([owner], Draft(b"body"), NOW)

    async def together(owner: str) -> list[Appended]:
        await give_way()
        batch = Batch()
        batch.put("sessions", owner, b"touched")
        batch.append([owner], Draft(b"body"), NOW)
        return (await dice.choice(stores).write(batch)).appended

    async def race(owner: str) -> None:
        write = dice.choice([one, together])
        if dice.random() < 0.5:
            pending, (answer,) = await asyncio.gather(attach(owner), write(owner))
        else:
            (answer,), pending = await asyncio.gather(write(owner), attach(owner))
        assert pending or answer.attached == "node-a", f"{owner} sleeps beside its message"
        assert not (pending and answer.attached), f"{owner}: both were second"

    await asyncio.gather(*(race(f"v{number}") for number in range(400)))


async def test_a_fleet_comes_while_a_campaign_is_written(store: Store, other: Store) -> None:
    """The same for one append to many owners."""
    names = [f"v{number}" for number in range(100)]

    async def arrive(name: str, turn: int) -> bool:
        for _ in range(turn % 10):
            await asyncio.sleep(0)
        return (await other.coordination.attach(name, "node-a")).pending

    async with asyncio.TaskGroup() as tasks:
        arrivals = [tasks.create_task(arrive(name, turn)) for turn, name in enumerate(names)]
        campaign = tasks.create_task(store.mailboxes.append(names, Draft(b"body", b"p" * 1000), NOW))
    for arrival, answer in zip(arrivals, campaign.result(), strict=True):
        assert arrival.result() != bool(answer.attached), f"{answer.owner}: exactly one is second"


async def test_attaches_at_once_form_a_chain(store: Store, other: Store) -> None:
    """Each sees exactly one before it; one is the last."""
    calls = [(store if number % 2 else other).coordination.attach("v1", f"node-{number}") for number in range(30)]
    answers = await asyncio.gather(*calls)
    numbers = [answer.fence.number for answer in answers]
    assert list(range(1, 31)) == sorted(numbers)
    in_order = sorted(range(30), key=numbers.__getitem__)
    assert ["", *(f"node-{number}" for number in in_order[:-1])] == [answers[number].previous for number in in_order]
    assert f"node-{in_order[-1]}" == (await append(store, "v1", Draft(b"body"))).attached


# -- homes that are due


async def due(store: Store, now: float, limit: int = 10_000) -> list[tuple[str, float]]:
    """The homes that are due in all feeds, each in its own."""
    found = []
    for feed in range(len(await store.feeds.ends())):
        homes = await store.coordination.due(feed, now, limit)
        assert all(feed == store.feeds.feed_of(home) for home, _ in homes)
        assert sorted(at for _, at in homes) == [at for _, at in homes], "the oldest first"
        found += homes
    return sorted(found)


async def test_a_home_is_due_when_its_time_has_come(store: Store, other: Store) -> None:
    """It has one time, which the last one to write has set; it stays due until it gets another one."""
    batch = Batch()
    for number in range(300):
        batch.due(f"client:v{number}", NOW + number / 10)
    batch.due("client:never", 0.0)
    await store.write(batch)
    assert [("client:v0", NOW)] == await due(other, NOW)
    wanted = sorted((f"client:v{number}", NOW + number / 10) for number in range(300))
    assert wanted == await due(other, NOW + 29.9) == await due(store, NOW + HOUR)
    some = await due(store, NOW + HOUR, 1)
    assert len(some) == len({store.feeds.feed_of(home) for home, _ in wanted})
    assert ("client:v0", NOW) in some
    assert [] == await due(store, NOW + HOUR, 0)
    later, gone = Batch(), Batch()
    later.due("client:v0", NOW + HOUR)
    gone.due("client:v1", 0.0)
    await other.write(later)
    await other.write(gone)
    assert wanted[:0] == await due(store, NOW + 0.1)
    assert ("client:v0", NOW + HOUR) in await due(store, NOW + HOUR)
    with pytest.raises(ValueError, match="feed"):
        await store.coordination.due(-1, NOW, 1)
    assert 299 == (await store.figures()).records
    assert [] == await store.check()


async def test_a_late_member_does_not_set_the_time_of_a_home(store: Store, other: Store) -> None:
    """It is a decision like every other that is written with a fence."""
    old = await store.coordination.attach("session:v", "node-a")
    late = Batch()
    late.due("client:v", NOW)
    late.spare("session:v", 7)
    late.detach(old.fence)
    new = await other.coordination.attach("session:v", "node-b")
    asleep = Batch()
    asleep.due("client:v", NOW + 60)
    asleep.detach(new.fence)
    await other.write(asleep)
    with pytest.raises(StoreFencedError):
        await store.write(late)
    assert [("client:v", NOW + 60)] == await due(store, NOW + 60)


@persistent
async def test_times_survive_closing_and_opening(engine: Engine) -> None:
    store = engine.make()
    await store.open()
    batch = Batch()
    batch.due("client:v", NOW + 0.123)
    await store.write(batch)
    await store.close()
    store = engine.make()
    await store.open()
    assert [("client:v", NOW + 0.123)] == await due(store, NOW + 1)
    await store.close()


# -- the clock


async def test_the_clock_of_a_store_is_one_for_all_who_share_it(store: Store, other: Store) -> None:
    times = [await each.coordination.time() for each in (store, other, store)]
    assert sorted(times) == times
    assert abs(time.time() - times[-1]) < HOUR, "seconds since the epoch"


# -- leases


async def acquire(store: Store, name: str = "sweeper", holder: str = "node-a", now: float = NOW) -> Lease:
    lease = await store.coordination.acquire(name, holder, 60.0, now)
    assert lease is not None
    assert name == lease.name
    return lease


async def test_a_lease_has_one_holder_until_it_is_given_back(store: Store, other: Store) -> None:
    """Neither renewing nor releasing an old one touches the new holder's."""
    assert not await store.coordination.renew(Lease("sweeper", 1), 60, NOW), "nobody took it"
    assert not await store.coordination.release(Lease("sweeper", 1))
    old = await acquire(store)
    assert await other.coordination.acquire("sweeper", "node-b", 60, NOW) is None
    assert await store.coordination.acquire("sweeper", "node-a", 60, NOW) is None, "nor does the same get it twice"
    await acquire(other, "another", "node-b")
    assert await store.coordination.renew(old, 60, NOW)
    assert await store.coordination.release(old)
    new = await acquire(other, holder="node-b")
    assert old.token < new.token
    assert not await store.coordination.renew(old, 60, NOW)
    assert not await store.coordination.release(old)
    assert await other.coordination.renew(new, 60, NOW)
    assert await other.coordination.release(new)
    assert not await other.coordination.release(new)


async def test_a_lease_runs_out(store: Store, other: Store) -> None:
    """By whatever clock the engine goes: real time passes, and is handed in too."""
    first = await store.coordination.acquire("sweeper", "node-a", 0.05, time.time())
    assert first is not None
    second = await eventually(
        lambda: other.coordination.acquire("sweeper", "node-b", 60, time.time()), lambda lease: lease is not None
    )
    assert second is not None
    assert first.token < second.token
    assert not await store.coordination.renew(first, 60, time.time())
    assert not await store.coordination.release(first)
    assert await other.coordination.renew(second, 60, time.time())


async def test_a_lease_that_ran_out_is_not_renewed(store: Store) -> None:
    """Even if nobody else has taken it: somebody may have acted on its end. A renewal may also shorten it."""
    lease = await acquire(store, now=time.time())
    assert await store.coordination.renew(lease, 0.05, time.time())
    gone = time.time() + 0.1
    await eventually(lambda: asyncio.sleep(0.01, time.time()), lambda now: now > gone)
    assert not await store.coordination.renew(lease, 60, time.time())


@local_clock
async def test_a_lease_runs_out_to_the_moment(store: Store) -> None:
    """Where time is an argument."""
    lease = await store.coordination.acquire("sweeper", "node-a", 10, NOW)
    assert lease is not None
    assert await store.coordination.acquire("sweeper", "node-b", 10, NOW + 9.75) is None
    assert await store.coordination.renew(lease, 10, NOW + 9.75)
    assert await store.coordination.acquire("sweeper", "node-b", 10, NOW + 19.5) is None
    assert not await store.coordination.renew(lease, 10, NOW + 19.75)
    assert await store.coordination.acquire("sweeper", "node-b", 10, NOW + 19.75) is not None


async def test_only_one_of_many_gets_a_lease(store: Store, other: Store) -> None:
    """And the tokens of those who get it one after the other grow."""
    tokens = []
    for _ in range(10):
        calls = [
            (store if number % 2 else other).coordination.acquire("sweeper", f"node-{number}", 60, NOW)
            for number in range(10)
        ]
        won = [lease for lease in await asyncio.gather(*calls) if lease is not None]
        assert 1 == len(won)
        tokens.append(won[0].token)
        assert await store.coordination.release(won[0])
    assert sorted(set(tokens)) == tokens


async def test_leases_have_any_name(store: Store) -> None:
    leases = [await acquire(store, name, name) for name in ODD_NAMES]
    for name, lease in zip(ODD_NAMES, leases, strict=True):
        assert await store.coordination.acquire(name, "node-b", 60, NOW) is None, odd_id(name)
        assert await store.coordination.release(lease), odd_id(name)
        assert await store.coordination.acquire(name, "node-b", 60, NOW) is not None, odd_id(name)


# -- wake-ups


class Ear:
    """A listener in the background, and what it has heard."""

    def __init__(self, store: Store, node: str) -> None:
        self.store = store
        self.node = node
        self.heard: list[bytes] = []
        self.task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for data in self.store.coordination.listen(self.node):
            self.heard.append(data)

    async def ready(self, sender: Store) -> None:
        """Wake-ups may be lost until the listener is connected, so knock until it hears."""

        async def knock() -> bool:
            await sender.coordination.notify(self.node, b"knock")
            return b"knock" in self.heard

        await eventually(knock, bool)

    async def hears(self, wanted: list[bytes]) -> None:
        async def heard() -> list[bytes]:
            return [data for data in self.heard if data != b"knock"]

        await eventually(heard, lambda heard: len(heard) >= len(wanted))
        assert wanted == await heard()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def listening(store: Store, node: str, sender: Store) -> AsyncIterator[Ear]:
    ear = Ear(store, node)
    try:
        await ear.ready(sender)
        yield ear
    finally:
        await ear.close()


async def test_every_listener_of_a_node_hears_what_is_sent_to_it(store: Store, other: Store) -> None:
    """All of it, any bytes, in order, and nothing that is for others, or was sent before anybody listened."""
    name = "node/{a} ä*"
    await store.coordination.notify(name, b"into the void")
    async with (
        listening(store, name, other) as first,
        listening(other, name, store) as second,
        listening(store, "node-b", other) as theirs,
    ):
        wanted = [b"", b"\x00\r\n", b"x" * 65536, *(b"%d" % number for number in range(50))]
        for data in wanted:
            await other.coordination.notify(name, data)
        await other.coordination.notify("node-b", b"last")
        await first.hears(wanted)
        await second.hears(wanted)
        await theirs.hears([b"last"])


async def test_a_listener_can_leave_and_come_back(store: Store, other: Store) -> None:
    for number in range(5):
        async with listening(store, "node-a", other) as ear:
            await other.coordination.notify("node-a", b"%d" % number)
            await ear.hears([b"%d" % number])
        await other.coordination.notify("node-a", b"lost")
