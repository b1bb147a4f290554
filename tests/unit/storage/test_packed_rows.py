"""Records that share a row."""

from __future__ import annotations

import itertools

import pytest

from motorcade.storage import packed_rows
from motorcade.storage.ports import Formed, StreamRecord

NOW = 1_000_000.5


def rows(values: list[bytes] | Formed, time: float = NOW) -> list[tuple[int, bytes, int]]:
    return list(packed_rows.rows_of(11, time, values))


def test_rows_hold_what_was_given() -> None:
    for count, time, formed in itertools.product((1, 2, 255, 256, 257, 1000), (0.0, NOW), (False, True)):
        values = [b"%d" % number * (number % 3) for number in range(count)]
        given = Formed([0], [values]) if formed else values
        made = rows(given, time)
        found = [record for last, row, _ in made for record in packed_rows.records(last, row, 0, 9999)]
        assert [StreamRecord(11 + number, time, value) for number, value in enumerate(values)] == found
        assert list(map(len, values)) == [size for _, row, _ in made for size in packed_rows.sizes(row)]
        assert sum(map(len, values)) == sum(size_bytes for _, _, size_bytes in made)
        assert {time} == {packed_rows.extent(row)[0] for _, row, _ in made}
        assert count == sum(packed_rows.extent(row)[1] for _, row, _ in made)
        assert (count + 255) // 256 == len(made)


def test_large_values_share_no_row() -> None:
    large = bytes(packed_rows.MAX_BYTES)
    assert [11, 12, 14, 15] == [last for last, _, _ in rows([large, large, b"1", large, b"2"])]
    assert [1, 1, 2, 1] == [packed_rows.extent(row)[1] for _, row, _ in rows([large, large, b"1", large, b"2"])]


def test_a_reader_gets_the_part_it_wants() -> None:
    values = [b"%d" % number for number in range(20)]
    for given in (values, Formed([0], [values])):
        ((last, row, _),) = rows(given)
        assert 30 == last
        for start, limit in itertools.product(range(1, 31), (1, 5, 20, 99)):
            wanted = values[max(start - 11, 0) :][:limit]
            assert wanted == [record.value for record in packed_rows.records(last, row, start, limit)]


def test_what_is_common_is_stored_once() -> None:
    columns = [[b"%03d" % number for number in range(200)]]
    ((_, row, size_bytes),) = rows(Formed([b"a" * 300, 0, b"b", 0], columns))
    assert 200 * 307 == size_bytes
    assert len(row) < 200 * 6 + 400


def test_formed_values_are_a_sequence() -> None:
    formed = Formed([b"<", 0, b"-", 1, b"-", 0, b">"], [[b"1", b"22", b""], [b"a", b"b", b"c"]])
    wanted = [b"<1-a-1>", b"<22-b-22>", b"<-c->"]
    assert wanted == list(formed)
    assert wanted == [formed[0], formed[1], formed[-1]]
    assert wanted[::-1] == formed[::-1]
    assert wanted[1:] == formed[1:]
    assert wanted[1:2] == list(formed.part(1, 2))
    assert 3 == len(formed)
    assert sum(map(len, wanted)) == formed.size_bytes()
    assert b"<22-b-22>" in formed
    assert [] == list(Formed([b"x", 0], [[]]))
    with pytest.raises(IndexError):
        formed[3]
