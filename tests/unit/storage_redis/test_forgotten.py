"""A server that takes over, or starts again, may have forgotten what was confirmed; nothing new is taken for that."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

import pytest

from motorcade.storage.ports import Batch, Bound, Draft, Durability
from motorcade.storage.redis import RedisStore
from tests.contracts.engines import patient
from tests.support.redis import RedisServer

NOW = time.time()
X = "session:x"


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
async def stores(own_server: RedisServer) -> AsyncIterator[list[RedisStore]]:
    made = [patient(own_server.url, Durability.FAST) for _ in range(2)]
    for store in made:
        await store.open()
    yield made
    for store in made:
        await store.close()


async def append(store: RedisStore, *bodies: bytes, owner: str = X, **more: object) -> list[int]:
    return [(await store.mailboxes.append([owner], Draft(body), NOW, **more))[0].position for body in bodies]  # type: ignore[arg-type]


async def found(store: RedisStore, after: int = 0) -> list[bytes]:
    return [entry.body for entry in await store.mailboxes.read(X, after, 100, NOW)]


@pytest.mark.parametrize("bound", [Bound(0, 0), Bound(100, 0)], ids=["short way", "long way"])
async def test_positions_that_were_forgotten_are_not_given_again(
    own_server: RedisServer, stores: list[RedisStore], bound: Bound
) -> None:
    """Whichever member writes first: what a reader has is no obstacle, what it acknowledges late is nothing new."""
    here, there = stores
    assert [1, 2, 3] == await append(here, b"a", b"b", b"c", bound=bound)
    await append(there, b"of another", owner="session:y")
    await here.mailboxes.acknowledge(X, [1])
    before = own_server.remember()
    assert [4, 5] == await append(here, b"forgotten", b"forgotten too", bound=bound)
    own_server.forget_since(before)
    new = await append(there, b"d", bound=bound) + await append(here, b"e", bound=bound)
    assert 5 < new[0] < new[1] < 2**53
    assert [b"d", b"e"] == await found(here, 5)
    await here.mailboxes.acknowledge(X, [4, 5])
    assert [b"b", b"c", b"d", b"e"] == await found(there)
    assert [] == await here.check()
    await here.mailboxes.acknowledge(X, [3, 2, new[0]])
    assert [b"e"] == await found(there)
    assert [] == await here.check()
    await here.mailboxes.acknowledge(X, [new[1]])
    assert [new[1] + 1] == await append(here, b"f", bound=bound)
    assert [] == await here.check()


async def test_an_empty_mailbox_goes_on_above_what_was_forgotten(
    own_server: RedisServer, stores: list[RedisStore]
) -> None:
    here, there = stores
    await append(here, b"a")
    await here.mailboxes.acknowledge(X, [1])
    before = own_server.remember()
    assert [2, 3] == await append(here, b"b", b"c")
    own_server.forget_since(before)
    (new,) = await append(there, b"d")
    assert new > 3 and [b"d"] == await found(here)
    info = await here.mailboxes.info(X)
    assert (1, new, new) == (info.entries, info.first, info.last)
    assert [] == await here.check()


async def test_a_forgotten_mailbox_gets_another_generation(own_server: RedisServer, stores: list[RedisStore]) -> None:
    here, there = stores
    await append(here, b"of another", owner="session:y")
    before = own_server.remember()
    await append(here, b"a")
    old = (await here.mailboxes.info(X)).generation
    own_server.forget_since(before)
    await append(there, b"b")
    assert old < (await here.mailboxes.info(X)).generation
    late = Batch()
    late.append([X], Draft(b"for the first one"), NOW, generations=[old])
    assert (await here.write(late)).appended[0].gone
    assert [b"b"] == await found(here)


async def test_claims_and_reads_pass_over_the_gap_at_once(own_server: RedisServer, stores: list[RedisStore]) -> None:
    here, there = stores
    await append(here, b"a", b"b")
    own_server.forget_since(own_server.remember())
    new = await append(there, b"c", b"d")
    assert [1, 2, *new] == [entry.position for entry in await here.mailboxes.read(X, 0, 100, NOW)]
    assert [b"c"] == [entry.body for entry in await here.mailboxes.read(X, 2, 1, NOW)]
    batch = Batch()
    batch.claim([X], here.writer, 10, NOW)
    assert [1, 2, *new] == list((await here.write(batch)).claimed[0][0])


async def test_a_takeover_is_noticed(own_server: RedisServer, stores: list[RedisStore]) -> None:
    """Whoever has attached something looks then whether that is still known."""
    here, _ = stores
    remembered = own_server.remember()
    fence = (await here.coordination.attach(X, "a")).fence
    feed = here.feeds.feed_of(fence.home)
    assert [fence] == [one async for one in here.coordination.attached("a", feed)]
    before = here.coordination.takeovers
    own_server.forget_since(remembered)
    assert [] == [one async for one in here.coordination.attached("a", feed)]
    assert before < here.coordination.takeovers


async def test_a_server_that_goes_on_gives_no_gap(own_server: RedisServer, stores: list[RedisStore]) -> None:
    """A broken connection alone is no other history."""
    here, there = stores
    assert [1] == await append(here, b"a")
    own_server.command("CLIENT", "KILL", "TYPE", "normal")
    assert [2, 3] == await append(here, b"b", b"c")
    assert [4] == await append(there, b"d")
