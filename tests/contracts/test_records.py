"""Records: small named collections."""

from __future__ import annotations

import asyncio

import pytest

from motorcade.storage.ports import Store
from tests.contracts.engines import DAY, NOW, ODD_NAMES, odd_id, scan, sweep


async def test_an_unknown_record_is_none(store: Store) -> None:
    assert await store.records.get("sessions", "nobody", NOW) is None
    assert not await store.records.delete("sessions", "nobody")
    assert {} == await scan(store, "sessions")


async def test_the_last_write_counts(store: Store) -> None:
    await store.records.put("sessions", "c1", b"first")
    await store.records.put("sessions", "c1", b"second")
    assert b"second" == await store.records.get("sessions", "c1", NOW)
    assert {"c1": b"second"} == await scan(store, "sessions")


@pytest.mark.parametrize("value", [b"", b"\x00", bytes(range(256)), b"x" * (1 << 20)], ids=["empty", "0", "256", "1M"])
async def test_a_record_has_any_value(store: Store, value: bytes) -> None:
    """Also an empty one, which is not the same as none."""
    await store.records.put("sessions", "c1", value)
    assert value == await store.records.get("sessions", "c1", NOW)
    assert {"c1": value} == await scan(store, "sessions")
    assert await store.records.delete("sessions", "c1")


async def test_a_deleted_record_is_gone(store: Store) -> None:
    await store.records.put("sessions", "c1", b"value")
    await store.records.put("sessions", "c2", b"value")
    assert await store.records.delete("sessions", "c1")
    assert not await store.records.delete("sessions", "c1")
    assert await store.records.get("sessions", "c1", NOW) is None
    assert {"c2": b"value"} == await scan(store, "sessions")


async def test_collections_are_apart(store: Store) -> None:
    """Also those whose names begin alike."""
    names = ["a", "ab", "abc", "b", "sessions", "session"]
    for name in names:
        await store.records.put(name, "key", name.encode())
        await store.records.put(name, "b" + name, b"")
    for name in names:
        assert name.encode() == await store.records.get(name, "key", NOW)
        assert {"key": name.encode(), "b" + name: b""} == await scan(store, name)
    await store.records.delete("ab", "key")
    assert b"abc" == await store.records.get("abc", "key", NOW)


async def test_keys_are_any_text(store: Store) -> None:
    for name in ODD_NAMES:
        await store.records.put("topics", name, b"value")
        assert b"value" == await store.records.get("topics", name, NOW), odd_id(name)
        assert {name: b"value"} == await scan(store, "topics", name), odd_id(name)
        assert {name: b"value"} == await scan(store, "topics"), odd_id(name)
        assert await store.records.delete("topics", name), odd_id(name)
        assert {} == await scan(store, "topics"), odd_id(name)


async def test_all_odd_keys_together(store: Store) -> None:
    wanted = {name: b"%d" % number for number, name in enumerate(ODD_NAMES)}
    for name, value in wanted.items():
        await store.records.put("topics", name, value)
    assert wanted == await scan(store, "topics")
    for name, value in wanted.items():
        assert value == await store.records.get("topics", name, NOW), odd_id(name)


async def test_a_scan_takes_its_prefix_literally(store: Store) -> None:
    """What looks like a pattern is none; text is compared as text."""
    keys = [*ODD_NAMES, "a/b/c", "a/c", "車/1", "*x", "[a", "?x", "\\x"]
    for key in keys:
        await store.records.put("topics", key, key.encode()[:9])
    for prefix in ["", *ODD_NAMES, "a/", "a/c", "車/", "v" * 500, "no such"]:
        wanted = {key: key.encode()[:9] for key in keys if key.startswith(prefix)}
        assert wanted == await scan(store, "topics", prefix), odd_id(prefix)


async def test_a_scan_of_many(store: Store) -> None:
    """More than any page; each once."""
    batch = store.batch()
    wanted = {f"c{number}": b"%d" % number for number in range(3000)}
    for key, value in wanted.items():
        batch.put("sessions", key, value)
    await batch.commit()
    assert wanted == await scan(store, "sessions")
    assert {key: value for key, value in wanted.items() if key.startswith("c29")} == await scan(
        store, "sessions", "c29"
    )


async def test_a_scan_while_records_change(store: Store) -> None:
    """What is not touched is seen once, whatever happens around it."""
    for number in range(300):
        await store.records.put("sessions", f"stays {number}", b"value")
        await store.records.put("sessions", f"goes {number}", b"value")
    found: list[str] = []
    async for key, _ in store.records.scan("sessions", NOW):
        if len(found) % 10 == 0 and len(found) < 3000:
            await store.records.delete("sessions", f"goes {len(found) // 10}")
            await store.records.put("sessions", f"comes {len(found)}", b"value")
        found.append(key)
    stays = [key for key in found if key.startswith("stays")]
    assert sorted(f"stays {number}" for number in range(300)) == sorted(stays)


async def test_a_record_ends_at_its_time(store: Store) -> None:
    """To the moment, in `get` and `scan`, whether or not a sweep has been there."""
    await store.records.put("sessions", "short", b"1", NOW + 10)
    await store.records.put("sessions", "long", b"2", NOW + 20)
    await store.records.put("sessions", "for ever", b"3")
    assert b"1" == await store.records.get("sessions", "short", NOW + 9.75)
    assert await store.records.get("sessions", "short", NOW + 10) is None
    assert {"long": b"2", "for ever": b"3"} == await scan(store, "sessions", now=NOW + 10)
    assert {"for ever": b"3"} == await scan(store, "sessions", now=NOW + 20)
    await sweep(store, NOW + 10)
    assert {"long": b"2", "for ever": b"3"} == await scan(store, "sessions", now=NOW + 10)
    await sweep(store, NOW + DAY)
    assert {"for ever": b"3"} == await scan(store, "sessions", now=NOW)


async def test_a_new_write_brings_a_new_time(store: Store) -> None:
    """Longer, shorter, none; a sweep goes by the last one."""
    for key in ("longer", "shorter", "none", "again"):
        await store.records.put("sessions", key, b"old", NOW + 10)
    await store.records.put("sessions", "longer", b"new", NOW + 20)
    await store.records.put("sessions", "shorter", b"new", NOW + 5)
    await store.records.put("sessions", "none", b"new")
    await store.records.delete("sessions", "again")
    await store.records.put("sessions", "again", b"new")
    await sweep(store, NOW + 6)
    assert {"longer", "none", "again"} == set(await scan(store, "sessions", now=NOW + 6))
    await sweep(store, NOW + 15)
    assert {"longer": b"new", "none": b"new", "again": b"new"} == await scan(store, "sessions", now=NOW + 15)


async def test_writes_in_the_air_keep_their_order(store: Store) -> None:
    """The last that began counts (rule 6)."""
    calls = []
    for number in range(100):
        calls.append(store.records.put("sessions", "c1", b"%d" % number))
        calls.append(store.records.put("sessions", f"c{number % 7 + 2}", b"%d" % number))
    await asyncio.gather(*calls)
    assert b"99" == await store.records.get("sessions", "c1", NOW)
    assert {f"c{number % 7 + 2}": b"%d" % number for number in range(100)} | {"c1": b"99"} == await scan(
        store, "sessions"
    )


async def test_a_delete_in_the_air_keeps_its_order(store: Store) -> None:
    answers = await asyncio.gather(
        *(
            asyncio.ensure_future(call)
            for call in (
                store.records.delete("sessions", "c1"),
                store.records.put("sessions", "c1", b"1"),
                store.records.delete("sessions", "c1"),
                store.records.delete("sessions", "c1"),
            )
        )
    )
    assert [False, None, True, False] == answers
