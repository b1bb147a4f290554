"""What is stored, byte by byte."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from motorcade.storage.ports import Draft
from motorcade.storage.redis_format import StoredEntry, pack_entry, raw, unpack_entry
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
