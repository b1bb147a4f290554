"""A store of format 2, before there were homes: refused with what to do, and carried over by export and import."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from motorcade.broker.session_records import pair
from motorcade.storage import transfer
from motorcade.storage.ports import Durability, StoreError, StoreFencedError
from motorcade.storage.redis import RedisStore
from motorcade.storage.redis_reader import RedisReader
from motorcade.storage.transfer_redis import RedisSource, RedisTarget
from tests.support.redis import RedisServer

NOW = 1_900_000_000.0

TIME = b"A\xdcO\xec\xc0\x00\x00\x00"  #: NOW, as it is stored
NONE = bytes(8)
DIGEST = bytes.fromhex("67f102b906240ff517423373b60581ff8cba5c5a9fa817885faad1e46f5e2833")


def entry(size: int, flags: int, key: bytes, body: bytes, payload: bytes) -> bytes:
    sizes = struct.pack(">IBII", size, flags, len(key), len(body))
    return TIME + NONE + sizes + key + body + payload


def write_format_2(server: RedisServer) -> None:
    """What the version before wrote with 4 cells: names were hashed as they are, states had five numbers."""
    client = server.client
    client.hset("motorcade:meta", mapping={"version": 2, "cells": 4})
    client.hset("motorcade:{0}:R:session", "VIN1", NONE + b"\x91\xffsession")
    client.hset("motorcade:{2}:R:subscription", "4:VIN1a/+", NONE + b"\x80sub")
    client.hset("motorcade:{1}:R:retained", "t/1", struct.pack(">d", NOW + 1000) + b"kept")
    client.zadd("motorcade:{1}:y", {b"retained\x00t/1": NOW + 1000})
    client.hset("motorcade:{3}:e:session:VIN1", "s", struct.pack(">ddddd", 5, 2, 3, 312, 0))
    client.hset("motorcade:{3}:e:session:VIN1", "2", entry(5, 0, b"", b"m2", b"ppp"))
    client.hset("motorcade:{3}:e:session:VIN1", "4", entry(302, 2, b"", b"m4", DIGEST))
    client.hset("motorcade:{3}:e:session:VIN1", "5", entry(5, 0, b"k", b"m5", b"ppp"))
    client.hset("motorcade:{3}:e:session:VIN1", mapping={"kk": "5", "m2": "7"})
    client.zadd("motorcade:{3}:g:session:VIN1", {"3:3": 3})
    client.hset("motorcade:{3}:t1:session:VIN1", mapping={"": "527777", "t": "3:1900000000"})
    client.sadd("motorcade:{3}:o", "session:VIN1")
    client.hset("motorcade:{3}:r", DIGEST, "1")
    client.hset("motorcade:{1}:b", DIGEST, "300")
    client.set(b"motorcade:{1}:b:" + DIGEST, NONE + b"p" * 300)
    client.hset("motorcade:{0}:e:fanout:VIN1", "s", struct.pack(">ddddd", 1, 2, 0, 0, 0))
    client.hset("motorcade:{1}:e:session:VIN2", mapping={"epoch": "1", "node": "node-a"})
    client.xadd("motorcade:{2}:S:events", {"t": "1900000000", "v": "one"}, "1-0")
    client.xadd("motorcade:{2}:S:events", {"t": "1900000000", "v": "two"}, "2-0")
    client.hset("motorcade:{2}:s:events", mapping={"last": "2", "time": "1900000000", "octets": "6"})
    client.sadd("motorcade:{2}:s", "events")
    client.set("motorcade:{3}:f:lead", "1")
    client.set("motorcade:{0}:w:41c7794bacdc", b"17:\x91\x01")
    for cell, counts in enumerate(({"records": 1}, {"records": 1, "octets": 300, "blobs": 1}, {"records": 1})):
        client.hset(f"motorcade:{{{cell}}}:n", mapping=counts)  # type: ignore[arg-type]
    client.hset("motorcade:{3}:n", "entries", "3")


async def check_contents(store: RedisStore) -> None:
    entries = await store.mailboxes.read("session:VIN1", 0, 10, NOW)
    assert [(2, b"m2", b"ppp", b"", 7), (4, b"m4", b"p" * 300, b"", 0), (5, b"m5", b"ppp", b"k", 0)] == [
        (entry.position, entry.body, entry.payload, entry.key, entry.mark) for entry in entries
    ]
    assert (1, 5) == ((info := await store.mailboxes.info("session:VIN1")).generation, info.last)
    assert 1 == (await store.mailboxes.info("fanout:VIN1")).last
    opened = await store.coordination.open("session:VIN1", "node-b", ["session", "subscription"], NOW)
    assert [{"VIN1": b"\x91\xffsession"}, {pair("VIN1", "a/+"): b"\x80sub"}] == opened.records
    assert b"kept" == await store.records.get("retained", "t/1", NOW)
    assert [b"one", b"two"] == [record.value for record in await store.streams.read("events", 0, 10)]
    lease = await store.coordination.acquire("lead", "node-b", 1.0, NOW)
    assert lease is not None
    assert 1 < lease.token
    assert [] == await store.check()


async def test_it_is_refused_with_what_to_do_and_left_as_it_is(server: RedisServer) -> None:
    write_format_2(server)
    before = {key: server.client.dump(key) for key in server.client.keys("*")}
    with pytest.raises(StoreError, match=r"format 2.*`motorcade store export`.*prefix"):
        await RedisStore(server.url, Durability.FAST).open()
    assert before == {key: server.client.dump(key) for key in server.client.keys("*")}


def test_readers_refuse_it_too(server: RedisServer) -> None:
    write_format_2(server)
    with pytest.raises(StoreError, match="format 2"):
        RedisReader(server.url)


async def test_what_is_exported_can_be_imported(server: RedisServer) -> None:
    write_format_2(server)
    old = RedisStore(server.url, Durability.FAST, only_read=True)
    await old.open()
    out = io.BytesIO()
    await transfer.export(RedisSource(old), out, NOW)
    with pytest.raises(StoreFencedError):
        await old.records.put("c", "key", b"1")
    await old.close()
    new = RedisStore(server.url + "?prefix=new", Durability.FAST)
    await new.open()
    out.seek(0)
    await transfer.load(RedisTarget(new, NOW), out)
    await check_contents(new)
    await new.close()


def test_an_operator_does_the_same(server: RedisServer, tmp_path: Path) -> None:
    write_format_2(server)
    program, file = [sys.executable, "-m", "motorcade", "store"], tmp_path / "store.export"
    subprocess.run([*program, "export", file, "--store", server.url], check=True, capture_output=True)
    new = server.url + "?prefix=new"
    subprocess.run([*program, "import", file, "--store", new], check=True, capture_output=True)
    assert b"3" == server.client.hget("new:meta", "version")


async def test_there_is_nothing_to_read_where_there_is_no_store(server: RedisServer) -> None:
    with pytest.raises(StoreError, match="no store"):
        await RedisStore(server.url, Durability.FAST, only_read=True).open()
    assert [] == server.client.keys("*")
