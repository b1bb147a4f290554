"""Records beyond the model (`test_model.py`): any key, many of them, and calls at once."""

from __future__ import annotations

import asyncio

import pytest

from motorcade.storage.ports import Batch, Draft, Store, StoreConflictError
from tests.contracts.engines import NOW, ODD_NAMES, bodies, odd_id, scan


async def test_keys_are_any_text_and_a_scan_takes_its_prefix_literally(store: Store) -> None:
    """What looks like a pattern is none; text is compared as text."""
    keys = [*ODD_NAMES, "a/b/c", "a/c", "車/1", "*x", "[a", "?x", "\\x"]
    left = {key: b"%d" % number for number, key in enumerate(keys)}
    for key, value in left.items():
        await store.records.put("topics", key, value)
    for prefix in ["", *ODD_NAMES, "a/", "a/c", "車/", "v" * 500, "no such"]:
        wanted = {key: value for key, value in left.items() if key.startswith(prefix)}
        assert wanted == await scan(store, "topics", prefix), odd_id(prefix)
    for key in keys:
        assert left.pop(key) == await store.records.get("topics", key, NOW), odd_id(key)
        assert await store.records.delete("topics", key), odd_id(key)
        assert left == await scan(store, "topics"), odd_id(key)


async def test_a_scan_of_more_than_any_page_gives_each_record_once(store: Store) -> None:
    batch = Batch()
    wanted = {f"c{number}": b"%d" % number for number in range(3000)} | {"large": b"x" * (1 << 20)}
    for key, value in wanted.items():
        batch.put("sessions", key, value)
    await store.write(batch)
    assert wanted == await scan(store, "sessions")
    some = {key: value for key, value in wanted.items() if key.startswith("c29")}
    assert some == await scan(store, "sessions", "c29")


async def test_many_are_read_at_once(store: Store) -> None:
    """In the order of their keys; None for what is not there, or has expired."""
    batch = Batch()
    for number in range(2500):
        batch.put("sessions", f"c{number}", b"%d" % number, NOW + number if number % 2 else 0.0)
    await store.write(batch)
    keys = [f"c{number}" for number in range(2599, -1, -1)]
    wanted = [b"%d" % n if n < 2500 and (not n % 2 or n > 10) else None for n in range(2599, -1, -1)]
    assert wanted == await store.records.get_many("sessions", keys, NOW + 10)
    assert [b"0", b"0", None] == await store.records.get_many("sessions", ["c0", "c0", "none"], NOW)
    assert [] == await store.records.get_many("sessions", [], NOW)


async def test_a_scan_while_records_change(store: Store) -> None:
    """What is not touched is seen once, whatever happens around it."""
    batch = Batch()
    for number in range(300):
        batch.put("sessions", f"stays {number}", b"value")
        batch.put("sessions", f"goes {number}", b"value")
    await store.write(batch)
    found: list[str] = []
    async for key, _ in store.records.scan("sessions", NOW):
        if len(found) % 10 == 0 and len(found) < 3000:
            await store.records.delete("sessions", f"goes {len(found) // 10}")
            await store.records.put("sessions", f"comes {len(found)}", b"value")
        found.append(key)
    stays = [key for key in found if key.startswith("stays")]
    assert sorted(f"stays {number}" for number in range(300)) == sorted(stays)


async def test_calls_in_the_air_keep_their_order(store: Store) -> None:
    """The last that began counts (rule 6)."""
    records = store.records
    calls = [records.put("sessions", f"c{number % 7}", b"%d" % number) for number in range(100)]
    await asyncio.gather(*(asyncio.ensure_future(call) for call in calls))
    assert {f"c{number % 7}": b"%d" % number for number in range(100)} == await scan(store, "sessions")
    different = [
        records.delete("sessions", "d"),
        records.put("sessions", "d", b"1"),
        records.delete("sessions", "d"),
        records.delete("sessions", "d"),
    ]
    answers = await asyncio.gather(*(asyncio.ensure_future(call) for call in different))
    assert [False, None, True, False] == answers


async def test_a_put_that_expects_another_value_refuses_its_batch(store: Store) -> None:
    """All of it, and no other batch of the same turn; what is expected is what was stored before the batch."""

    def batch(value: bytes, expect: bytes | None, now: float = NOW) -> Batch:
        made = Batch()
        made.append(["v"], Draft(value), NOW)
        made.put("c", "key", value, NOW + 10, expect=expect, now=now)
        made.put("c", "beside", value)
        return made

    first = [store.write(batch(b"%d" % number, None)) for number in range(3)]
    second = [store.write(batch(b"%d" % number, b"0")) for number in range(3, 5)]
    await asyncio.gather(*first, *second, return_exceptions=True)
    assert [False, True, True] == [commit.refused for commit in first]
    assert [False, True] == [commit.refused for commit in second]
    with pytest.raises(StoreConflictError):
        await second[1]
    assert {"key": b"3", "beside": b"3"} == await scan(store, "c")
    assert [b"0", b"3"] == await bodies(store, "v")
    with pytest.raises(StoreConflictError):
        await store.write(batch(b"5", None, NOW + 9))
    await store.write(batch(b"6", None, NOW + 10))  # it has expired
    assert {"key": b"6", "beside": b"6"} == await scan(store, "c")
    assert [] == await store.check()


async def test_a_put_with_a_rank_never_takes_back_what_its_value_begins_with(store: Store) -> None:
    """Bytes are compared without a sign or a locale; the same rank is written; nothing else of the batch is held up."""

    def batch(value: bytes, expires_at: float = 0.0) -> Batch:
        made = Batch()
        made.put("c", "key", value, expires_at, rank=4)
        made.put("c", "beside", value)
        return made

    values = [b"\0\0\x7f\xffone", b"\0\0\x7f\xfezz", b"\0\0\x80\0two", b"\0\0\x80\0again", b"\0\0\x80", b"a\0", b"B"]
    left = [b"\0\0\x7f\xffone"] * 2 + [b"\0\0\x80\0two"] + [b"\0\0\x80\0again"] * 2 + [b"a\0"] * 2
    for value, wanted in zip(values, left, strict=True):
        await store.write(batch(value))
        assert {"key": wanted, "beside": value} == await scan(store, "c")
    await asyncio.gather(*[store.write(batch(b"b%d" % number)) for number in (3, 9, 5)])
    assert {"key": b"b9", "beside": b"b5"} == await scan(store, "c")
    await store.write(batch(b"c", NOW + 5))
    await store.write(batch(b"b"))  # an older one does not take away when it ends
    assert await store.records.get("c", "key", NOW + 5) is None
    await store.records.delete("c", "key")
    await store.write(batch(b"a"))
    assert {"key": b"a", "beside": b"a"} == await scan(store, "c")
    assert [] == await store.check()


# -- by home, and by feed


async def test_the_records_of_a_home_are_found_without_attaching_it(store: Store, other: Store) -> None:
    """All of them, however many, and none of another home; who is in charge stays in charge."""
    batch = Batch()
    for client in ("vin", "vi", "3:vin"):
        batch.put("session", client, client.encode())
        for number in range(3):
            batch.put("subscription", f"{len(client)}:{client}{number}", bytes(range(256)))
    batch.put("subscription", "3:vingone", b"", NOW + 5)
    batch.put("retained", "vin", b"of the topic")
    await store.write(batch)
    fence = (await store.coordination.attach("session:vin", "node-a")).fence
    of_home = other.records.of_home
    assert {"vin": b"vin"} == await of_home("session", "client:vin", NOW)
    wanted = {f"3:vin{number}": bytes(range(256)) for number in range(3)}
    assert wanted | {"3:vingone": b""} == await of_home("subscription", "client:vin", NOW + 4)
    assert wanted == await of_home("subscription", "client:vin", NOW + 5)
    assert {"vin": b"of the topic"} == await of_home("retained", "vin", NOW)
    assert {} == await of_home("subscription", "client:v", NOW) == await of_home("none", "client:vin", NOW)
    with pytest.raises(ValueError, match="lie together"):
        await of_home("stream-progress", "client:vin", NOW)
    batch = Batch()
    for number in range(600):
        batch.put("subscription", f"3:vin{number}", b"%d" % number)
    batch.delete("session", "vin")
    batch.fence(fence)
    await store.write(batch)
    assert {f"3:vin{number}": b"%d" % number for number in range(600)} == await of_home(
        "subscription", "client:vin", NOW + 5
    )
    assert {} == await of_home("session", "client:vin", NOW)


async def test_members_of_a_cluster_read_each_other_in_one_step(store: Store, other: Store) -> None:
    """Their records have one home, whatever the keys; each member changes its own by comparing what it put last."""
    for number in (1, 2, 10):
        await store.records.put("member", str(number), b"%d" % number)
    await store.records.put("cluster", "identity", b"fleet")
    await store.records.put("cluster", "members", b"named like their home")
    members = other.records.of_home
    assert {"1": b"1", "2": b"2", "10": b"10"} == await members("member", "members", NOW)
    assert {"identity": b"fleet", "members": b"named like their home"} == await members("cluster", "members", NOW)
    with pytest.raises(ValueError, match="members"):
        await members("member", "client:vin", NOW)
    condemned = Batch()
    condemned.put("member", "2", b"condemned", expect=b"2")
    renewed = Batch()
    renewed.put("member", "2", b"renewed", expect=b"2")
    await other.write(condemned)
    with pytest.raises(StoreConflictError):
        await store.write(renewed)
    gone = Batch()
    gone.put("cluster", "next", b"11", expect=None)
    gone.delete("member", "1")
    gone.note("members", b"left")
    await store.write(gone)
    assert {"2": b"condemned", "10": b"10"} == await members("member", "members", NOW)
    opened = await store.coordination.open("members", "node-a", ["member", "cluster"], NOW)
    assert [2, 3] == list(map(len, opened.records))
    assert [] == await store.check()


async def test_a_scan_of_one_feed_gives_the_records_that_it_tells_of(store: Store) -> None:
    batch = Batch()
    wanted: dict[int, dict[str, bytes]] = {feed: {} for feed in range(len(await store.feeds.ends()))}
    for number in range(300):
        key = f"7:v{number:06d}#"
        batch.put("subscription", key, b"%d" % number)
        wanted[store.feeds.feed_of(f"client:v{number:06d}")][key] = b"%d" % number
    await store.write(batch)
    found = {
        feed: {key: value async for key, value in store.records.scan("subscription", NOW, feed=feed)} for feed in wanted
    }
    assert wanted == found
    key = next(iter(wanted[store.feeds.feed_of("client:v000007")]))
    some = [
        name async for name, _ in store.records.scan("subscription", NOW, key, store.feeds.feed_of("client:v000007"))
    ]
    assert [key] == some
    for feed in (-1, len(wanted)):
        with pytest.raises(ValueError, match="feed"):
            _ = [name async for name, _ in store.records.scan("subscription", NOW, feed=feed)]
