"""Message ids: sorted, unique, and true to their layout, whatever the clock does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from motorcade.core.guid import GuidFactory, timestamp_of

NOW = 1_700_000_000_000_000  #: microseconds since the epoch

steps = st.lists(st.integers(-5, 5) | st.sampled_from((-3_600_000_000, 3_600_000_000)), min_size=1, max_size=200)


@given(steps)
def test_ids_only_grow_under_clock_steps(moves: list[int]) -> None:
    """Later ids sort behind earlier ones, so none comes twice, even when the clock is set back by an hour."""
    factory = GuidFactory("node", 1)
    clock = NOW
    ids = []
    for move in moves:
        clock += move
        ids.append(factory.next(clock))
    assert sorted(set(ids)) == ids
    assert {16} == {len(guid) for guid in ids}


@given(st.integers(1, 3), st.integers(1, 300))
def test_ids_never_lag_behind_the_clock(move: int, count: int) -> None:
    """However many ids a microsecond has had, the first of a later one tells its own time."""
    factory = GuidFactory("node", 1)
    for _ in range(count):
        factory.next(NOW)
    guid = factory.next(NOW + move)
    assert NOW + move == timestamp_of(guid)


def test_more_than_65536_ids_in_one_microsecond() -> None:
    """When the numbers of a microsecond are used up, the next microsecond's are taken, and the clock catches up."""
    factory = GuidFactory("node", 1)
    ids = [factory.next(NOW) for _ in range(65536 * 2 + 10)]
    assert sorted(set(ids)) == ids
    assert [NOW, NOW, NOW + 1, NOW + 2] == [timestamp_of(ids[i]) for i in (0, 65535, 65536, 65536 * 2)]
    assert ids[-1] < factory.next(NOW + 1), "the clock is behind the numbers that were taken"
    assert NOW + 50 == timestamp_of(factory.next(NOW + 50))


def test_layout() -> None:
    """64 bits of time, 16 of the node, 32 of the process, 16 of the sequence."""
    first, second = (factory.next(NOW) for factory in (GuidFactory("a", 0x1_2345_6789), GuidFactory("b", 7)))
    assert NOW.to_bytes(8, "big") == first[:8] == second[:8]
    assert 0x2345_6789 == int.from_bytes(first[10:14], "big"), "a process number beyond 32 bits is cut"
    assert 7 == int.from_bytes(second[10:14], "big")
    assert first[8:10] != second[8:10]
    assert b"\0\0" == first[14:]


def test_factories_of_two_processes_never_make_the_same_id() -> None:
    """The same node started twice, at the same microsecond."""
    one, two = GuidFactory("node", 1), GuidFactory("node", 2)
    assert not {one.next(NOW) for _ in range(1000)} & {two.next(NOW) for _ in range(1000)}
