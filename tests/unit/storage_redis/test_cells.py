"""Names to cells to slots to servers."""

from __future__ import annotations

from motorcade.redis.resp import ServerAddress
from motorcade.redis.slots import SLOTS, Topology, slot_of
from motorcade.storage.cells import Cells
from tests.support.redis import RedisServer


def test_only_the_first_braces_count() -> None:
    for key, tag in (
        ("{user1000}.following", "user1000"),
        ("{user1000}.followers", "user1000"),
        ("foo{}{bar}", "foo{}{bar}"),
        ("foo{{bar}}zap", "{bar"),
        ("foo{bar}{zap}", "bar"),
        ("foo{bar", "foo{bar"),
    ):
        assert slot_of(tag) == slot_of(key), key


def test_slots_are_those_of_the_specification_and_of_a_real_server() -> None:
    assert 0x31C3 % SLOTS == slot_of("123456789")
    with RedisServer({"cluster-enabled": "yes"}) as server:
        for key in ["a", "motorcade:{7}:m:owner", "motorcade:n:{node}", "ä{ö}", "{}x", "}{"]:
            assert server.command("CLUSTER", "KEYSLOT", key) == slot_of(key), key


def test_cells_never_change() -> None:
    """Every node and every version has to find the same cell; data would be lost from sight otherwise."""
    cells = Cells("p", 64)
    assert [47, 21, 0, 3] == [cells.of(name) for name in ("WVWZZZ1JZXW000001", "client", "", "ä")]
    assert cells.of("client") == cells.of(b"client")
    assert "p:{21}:e:client" == cells.key(21, "e:client")


def test_all_keys_of_a_cell_are_in_one_slot_and_64_cells_reach_every_master_of_a_large_cluster() -> None:
    cells = Cells("p", 64)
    for cell in range(64):
        slots = {slot_of(cells.key(cell, kind)) for kind in ("n", "m:{x}", "e:}{", "t:a:1", "w:1")}
        assert {cells.slot(cell)} == slots
    cells = Cells("motorcade", 64)
    assert 16 == len({cells.slot(cell) * 16 // SLOTS for cell in range(64)})


def line(first: int, last: int, host: bytes | None, port: int) -> list[object]:
    return [first, last, [host, port, b"id", []], [b"10.0.0.9", 9, b"replica", []]]


def test_a_topology_tells_the_master_of_each_slot() -> None:
    asked = ServerAddress("seed", 1)
    found = Topology.parse([line(5000, 16383, b"", 2), line(0, 4999, b"10.0.0.1", 3)], asked)
    assert [ServerAddress("10.0.0.1", 3), ServerAddress("10.0.0.1", 3)] == [found.master(0), found.master(4999)]
    assert [ServerAddress("seed", 2), ServerAddress("seed", 2)] == [found.master(5000), found.master(16383)]
    assert found.is_whole


def test_slots_that_nobody_serves_have_no_master() -> None:
    found = Topology.parse([line(10, 20, b"a", 1), line(30, 40, None, 2)], ServerAddress("seed", 1))
    assert [None, ServerAddress("a", 1), None, ServerAddress("seed", 2), None] == [
        found.master(slot) for slot in (9, 10, 25, 40, 41)
    ]
    assert not found.is_whole
    assert [ServerAddress("a", 1), ServerAddress("seed", 2)] == found.all_masters()
