"""What is stored, byte by byte."""

from __future__ import annotations

import struct
import time

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from motorcade.storage import transfer_redis
from motorcade.storage.ports import SPARE_ALL, Batch, Bound, Draft
from motorcade.storage.redis import RedisStore
from motorcade.storage.redis_format import StoredEntry, StoredState, pack_entry, raw, unpack_entry, unpack_state
from tests.support.redis import RedisServer

TIMES = st.floats(0, 1e12, allow_nan=False)


@given(st.binary(), st.binary(), st.binary(), TIMES, TIMES, st.booleans(), st.booleans())
def test_an_entry_comes_back(
    body: bytes, payload: bytes, key: bytes, now: float, expires: float, droppable: bool, apart: bool
) -> None:
    digest = b"d" * 32 if apart else b""
    value, size_bytes, flags = pack_entry(Draft(body, payload, key, expires, droppable), now, digest)
    assert len(body) + len(payload) == size_bytes
    assert (droppable, apart) == (bool(flags & 1), bool(flags & 2))
    assert StoredEntry(now, expires, size_bytes, key, body, b"" if apart else payload, digest) == unpack_entry(value)


def test_scripts_get_bytes_as_they_are(server: RedisServer) -> None:
    for size in (0, 1, 31, 32, 255, 256, 65535, 65536, 1 << 20):
        data = (bytes(range(256)) * (size // 256 + 1))[:size]
        packed = msgspec.msgpack.encode([raw(data), "next"])
        script = "local found = cmsgpack.unpack(ARGV[1]) return {found[1], found[2]}"
        assert [data, b"next"] == server.command("EVAL", script, 0, packed), size


NOW = time.time()


def test_states_of_all_lengths_are_read() -> None:
    """Format 2 had five numbers; the last one of seven is left out while it is 0."""
    numbers = (9, 4, 3, 100, 5.5)
    read = [
        unpack_state(struct.pack(f">{'d' * len(each)}", *each)) for each in (numbers, (*numbers, 2), (*numbers, 2, -1))
    ]
    assert [StoredState(*numbers), StoredState(*numbers, 2), StoredState(*numbers, 2, -1)] == read


async def test_a_mailbox_that_spares_nothing_has_a_state_of_six_numbers(store: RedisStore, server: RedisServer) -> None:
    """Whatever is done to it; one that spares keeps that through everything."""
    boxes = store.mailboxes

    async def spare(position: int) -> None:
        batch = Batch()
        batch.spare("v", position)
        await store.write(batch)

    for position, size in ((0, 48), (5, 56), (SPARE_ALL, 56), (0, 48)):
        await spare(position)
        for draft in (Draft(b"1"), Draft(b"2", key=b"k", token=b"%d" % size, expires_at=NOW - 1), Draft(b"3")):
            await boxes.append(["v"], draft, NOW)
            await boxes.append(["v"], draft, NOW, Bound(entries=100))
        await spare(position)
        await store.sweep(NOW, 100)
        await boxes.acknowledge("v", [1, 3])
        await boxes.clear("v")
        await boxes.append(["v"], Draft(b"4"), NOW)
        state = server.command("HGET", store.core.key(store.core.cells.of("v"), "e:", "v"), "s")
        assert (size, position) == (len(state), unpack_state(state).spare)
        assert [] == await store.check()


async def test_times_are_told_with_the_records(store: RedisStore) -> None:
    batch = Batch()
    for home in ("client:v", "client:w"):
        batch.due(home, NOW)
    batch.put("c", "k", b"")
    await store.write(batch)
    assert {"c": 1, "due": 2} == (await transfer_redis.summary(store))[1]
