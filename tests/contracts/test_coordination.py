"""Coordination: who is where, who leads, and that nobody sleeps through a message."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest

from motorcade.storage.ports import Appended, Draft, Lease, Store
from tests.contracts.engines import (
    NOW,
    ODD_NAMES,
    Engine,
    append,
    eventually,
    fill,
    odd_id,
    sweep,
)


@pytest.fixture
async def other(engine: Engine, store: Store) -> AsyncIterator[Store]:
    """A second store on the same data, as another node has it; the same store where there can be only one."""
    if not engine.shared:
        yield store
        return
    made = engine.make()
    await made.open()
    yield made
    await made.close()


# -- attach and detach


async def test_attach_says_what_was_before(store: Store, other: Store) -> None:
    first = await store.coordination.attach("v1", "node-a")
    assert ("", False) == (first.previous, first.pending)
    second = await other.coordination.attach("v1", "node-b")
    assert "node-a" == second.previous
    third = await store.coordination.attach("v1", "node-b")
    assert "node-b" == third.previous
    assert first.epoch < second.epoch < third.epoch


async def test_detach_ends_it(store: Store, other: Store) -> None:
    first = await store.coordination.attach("v1", "node-a")
    assert await store.coordination.detach("v1", first.epoch)
    assert not await store.coordination.detach("v1", first.epoch)
    assert "" == (await append(other, "v1", Draft(b"body"))).attached
    second = await other.coordination.attach("v1", "node-b")
    assert "" == second.previous
    assert first.epoch < second.epoch, "epochs grow across a detach"


async def test_an_old_epoch_detaches_nobody(store: Store, other: Store) -> None:
    """The old connection ends after the vehicle has come back elsewhere."""
    old = await store.coordination.attach("v1", "node-a")
    new = await other.coordination.attach("v1", "node-b")
    assert not await store.coordination.detach("v1", old.epoch)
    assert "node-b" == (await append(store, "v1", Draft(b"body"))).attached
    assert not await store.coordination.detach("v1", new.epoch + 1)
    assert await other.coordination.detach("v1", new.epoch)


async def test_detaching_a_stranger_does_nothing(store: Store) -> None:
    assert not await store.coordination.detach("nobody", 1)
    attached = await store.coordination.attach("v1", "node-a")
    assert not await store.coordination.detach("v2", attached.epoch)
    assert "node-a" == (await append(store, "v1", Draft(b"body"))).attached


async def test_appends_say_who_is_attached(store: Store, other: Store) -> None:
    """One by one, to many, repeated, and in a batch."""
    await store.coordination.attach("v1", "node-a")
    await other.coordination.attach("v2", "node-b")
    draft = Draft(b"body", token=b"token")
    wanted = [("v1", "node-a"), ("v2", "node-b"), ("v3", "")]
    for _ in range(2):
        answers = await store.mailboxes.append(["v1", "v2", "v3"], draft, NOW)
        assert wanted == [(answer.owner, answer.attached) for answer in answers]
    batch = other.batch()
    batch.append(["v1", "v2"], Draft(b"body"), NOW)
    batch.append(["v3"], Draft(b"body"), NOW)
    assert wanted == [(answer.owner, answer.attached) for answer in await batch.commit()]


async def test_attach_says_whether_something_is_pending(store: Store, other: Store) -> None:
    assert not (await store.coordination.attach("v1", "node-a")).pending
    await fill(other, "v1", b"1", b"2")
    assert (await store.coordination.attach("v1", "node-a")).pending
    await store.mailboxes.acknowledge("v1", [1])
    assert (await other.coordination.attach("v1", "node-a")).pending
    await store.mailboxes.acknowledge("v1", [2])
    assert not (await other.coordination.attach("v1", "node-a")).pending
    await append(store, "v1", Draft(b"3", expires_at=NOW + 1))
    await sweep(store, NOW + 2)
    assert not (await store.coordination.attach("v1", "node-a")).pending


async def test_attaching_changes_no_mailbox(store: Store) -> None:
    await fill(store, "v1", b"1")
    info = await store.mailboxes.info("v1")
    attached = await store.coordination.attach("v1", "node-a")
    await store.coordination.detach("v1", attached.epoch)
    assert info == await store.mailboxes.info("v1")


@pytest.mark.parametrize("seed", range(6))
async def test_no_wake_up_is_lost(store: Store, other: Store, seed: int) -> None:
    """A vehicle comes while its message comes: whoever is second sees the first.

    For many vehicles at once an attach and an append (alone or in a batch) are in the air, from two nodes where there
    can be two, with random gaps. They are serialised, so exactly one of them is told of the other.
    """
    dice = random.Random(seed)
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
        batch = dice.choice(stores).batch()
        batch.put("sessions", owner, b"touched")
        batch.append([owner], Draft(b"body"), NOW)
        return await batch.commit()

    async def race(owner: str) -> None:
        write = dice.choice([one, together])
        if dice.random() < 0.5:
            pending, (answer,) = await asyncio.gather(attach(owner), write(owner))
        else:
            (answer,), pending = await asyncio.gather(write(owner), attach(owner))
        assert pending or answer.attached == "node-a", f"{owner} sleeps beside its message"
        assert not (pending and answer.attached), f"{owner}: both were second"

    await asyncio.gather(*(race(f"v{number}") for number in range(80)))


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
    epochs = [answer.epoch for answer in answers]
    assert len(set(epochs)) == 30
    in_order = sorted(range(30), key=epochs.__getitem__)
    assert ["", *(f"node-{number}" for number in in_order[:-1])] == [answers[number].previous for number in in_order]
    assert f"node-{in_order[-1]}" == (await append(store, "v1", Draft(b"body"))).attached


# -- leases


async def acquire(store: Store, name: str = "sweeper", holder: str = "node-a", ttl: float = 60.0) -> Lease:
    lease = await store.coordination.acquire(name, holder, ttl, NOW)
    assert lease is not None
    assert name == lease.name
    return lease


async def test_a_lease_has_one_holder(store: Store, other: Store) -> None:
    lease = await acquire(store)
    assert await other.coordination.acquire("sweeper", "node-b", 60, NOW) is None
    assert await store.coordination.acquire("sweeper", "node-a", 60, NOW) is None, "nor does the same get it twice"
    await acquire(other, "another", "node-b")
    assert await store.coordination.renew(lease, 60, NOW)


async def test_a_lease_that_is_given_back_is_free_at_once(store: Store, other: Store) -> None:
    first = await acquire(store)
    assert await store.coordination.release(first)
    second = await acquire(other, holder="node-b")
    assert first.token < second.token


async def test_an_old_lease_is_worth_nothing(store: Store, other: Store) -> None:
    """Neither renewing nor releasing it touches the new holder's."""
    old = await acquire(store)
    await store.coordination.release(old)
    new = await acquire(other, holder="node-b")
    assert not await store.coordination.renew(old, 60, NOW)
    assert not await store.coordination.release(old)
    assert await other.coordination.renew(new, 60, NOW)
    assert await other.coordination.release(new)
    assert not await other.coordination.release(new)


async def test_a_lease_nobody_took_cannot_be_kept(store: Store) -> None:
    assert not await store.coordination.renew(Lease("sweeper", 1), 60, NOW)
    assert not await store.coordination.release(Lease("sweeper", 1))


async def test_a_lease_runs_out(store: Store, other: Store) -> None:
    """By whatever clock the engine goes: real time passes, and is handed in too."""
    first = await store.coordination.acquire("sweeper", "node-a", 0.2, time.time())
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
    """Even if nobody else has taken it: somebody may have acted on its end."""
    lease = await store.coordination.acquire("sweeper", "node-a", 0.05, time.time())
    assert lease is not None
    started = time.time()
    await eventually(lambda: asyncio.sleep(0, time.time() - started), lambda passed: passed > 0.1)
    assert not await store.coordination.renew(lease, 60, time.time())


async def test_a_lease_runs_out_to_the_moment(engine: Engine, store: Store) -> None:
    """Where time is an argument."""
    if not engine.clock_is_argument:
        pytest.skip("goes by the clock of the server")
    lease = await store.coordination.acquire("sweeper", "node-a", 10, NOW)
    assert lease is not None
    assert await store.coordination.acquire("sweeper", "node-b", 10, NOW + 9.75) is None
    assert await store.coordination.renew(lease, 10, NOW + 9.75)
    assert await store.coordination.acquire("sweeper", "node-b", 10, NOW + 19.5) is None
    assert not await store.coordination.renew(lease, 10, NOW + 19.75)
    assert await store.coordination.acquire("sweeper", "node-b", 10, NOW + 19.75) is not None


async def test_renewing_keeps_a_lease(store: Store, other: Store) -> None:
    """A short lease that is renewed for long stays with its holder beyond its first end."""
    lease = await store.coordination.acquire("sweeper", "node-a", 30, time.time())
    assert lease is not None
    assert await store.coordination.renew(lease, 60, time.time())
    if other is store:
        assert await other.coordination.acquire("sweeper", "node-b", 5, time.time() + 31) is None
    else:
        # The server's clock cannot be moved; a renewal may also shorten, which can be waited for.
        assert await store.coordination.renew(lease, 0.05, time.time())
        taken = await eventually(
            lambda: other.coordination.acquire("sweeper", "node-b", 60, time.time()), lambda found: found is not None
        )
        assert taken is not None and taken.token > lease.token


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


async def test_a_node_hears_what_is_sent_to_it(store: Store, other: Store) -> None:
    """All of it, in order, and nothing that is for others."""
    mine, theirs = Ear(store, "node-a"), Ear(store, "node-b")
    try:
        await mine.ready(other)
        await theirs.ready(other)
        wanted = [b"%d" % number for number in range(50)]
        for data in wanted:
            await other.coordination.notify("node-a", data)
        await other.coordination.notify("node-b", b"last")
        await mine.hears(wanted)
        await theirs.hears([b"last"])
    finally:
        await mine.close()
        await theirs.close()


async def test_every_listener_of_a_node_hears(store: Store, other: Store) -> None:
    first, second = Ear(store, "node-a"), Ear(other, "node-a")
    try:
        await first.ready(store)
        await second.ready(other)
        await store.coordination.notify("node-a", b"both")
        await first.hears([b"both"])
        await second.hears([b"both"])
    finally:
        await first.close()
        await second.close()


async def test_nobody_listens(store: Store) -> None:
    """Best effort: nothing is kept for later, nothing fails."""
    await store.coordination.notify("node-a", b"into the void")
    ear = Ear(store, "node-a")
    try:
        await ear.ready(store)
        await store.coordination.notify("node-a", b"now")
        await ear.hears([b"now"])
    finally:
        await ear.close()


async def test_a_listener_can_leave_and_come_back(store: Store, other: Store) -> None:
    for number in range(5):
        ear = Ear(store, "node-a")
        await ear.ready(other)
        await other.coordination.notify("node-a", b"%d" % number)
        await ear.hears([b"%d" % number])
        await ear.close()
        await other.coordination.notify("node-a", b"lost")


@pytest.mark.parametrize("data", [b"", b"\x00\r\n", b"x" * 65536], ids=["empty", "control", "64 KiB"])
async def test_wake_ups_carry_bytes(store: Store, data: bytes) -> None:
    ear = Ear(store, "node/{a} ä*")
    try:
        await ear.ready(store)
        await store.coordination.notify("node/{a} ä*", data)
        await ear.hears([data])
    finally:
        await ear.close()
