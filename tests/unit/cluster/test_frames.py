"""Frames between members: written and read in any pieces, refused when they are wrong."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motorcade.cluster.frames import (
    ACK,
    ANSWER,
    ASK,
    BATCH,
    HELLO,
    MIN_FRAME,
    PING,
    PONG,
    PROOF,
    REFUSED,
    FrameReader,
    LinkFrameError,
    ack_frame,
    answer_frame,
    ask_frame,
    batch_head,
    hello_frame,
    ping_frame,
    pong_frame,
    proof_frame,
    read_answer,
    read_ask,
    read_batch,
    read_number,
    read_proof,
    read_sentence,
    refused_sentence,
)

numbers = st.integers(0, 2**64 - 1)
bodies = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=40)), max_size=20)
frames = st.one_of(
    st.binary(max_size=50).map(hello_frame),
    st.builds(proof_frame, numbers, st.sampled_from([b"", bytes(32)])),
    st.text(max_size=20).map(refused_sentence),
    numbers.map(ack_frame),
    st.builds(ask_frame, numbers, st.binary(min_size=1, max_size=255), st.binary(max_size=30)),
    st.builds(answer_frame, numbers, st.booleans(), st.binary(max_size=30)),
    numbers.map(ping_frame),
    st.builds(pong_frame, numbers, st.binary(max_size=30)),
)


def batch(first: int, items: list[tuple[int, bytes]]) -> bytes:
    given = [body for _, body in items]
    return batch_head(first, bytes(code for code, _ in items), given) + b"".join(given)


def read_all(reader: FrameReader, *pieces: bytes) -> list[tuple[int, bytes]]:
    return [(kind, data[start:stop]) for piece in pieces for kind, data, start, stop in reader.feed(piece)]


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


@given(st.lists(frames, max_size=10), st.lists(st.integers(0, 5000), max_size=20))
def test_frames_come_whole_however_they_are_cut(sent: list[bytes], cuts: list[int]) -> None:
    got = read_all(FrameReader(MIN_FRAME), *in_pieces(b"".join(sent), cuts))
    assert [(frame[4], frame[5:]) for frame in sent] == got


@given(numbers, bodies)
def test_a_batch_comes_as_it_was_sent(first: int, items: list[tuple[int, bytes]]) -> None:
    ((kind, data, start, stop),) = FrameReader(MIN_FRAME).feed(batch(first, items) + ack_frame(7)[:3])
    number, codes, lengths, at = read_batch(data, start, stop)
    assert (BATCH, first, len(items)) == (kind, number, len(codes))
    got = []
    for code, length in zip(codes, lengths, strict=True):
        got.append((code, data[at : at + length]))
        at += length
    assert items == got


def test_the_bytes_are_what_the_header_says() -> None:
    """Another version must be able to read them."""
    assert b"\x08\0\0\0\x05\x02\x01\0\0\0\0\0\0" == ack_frame(258)
    assert b"\x08\0\0\0\x08\x03\0\0\0\0\0\0\0" == ping_frame(3)
    assert b"\x09\0\0\0\x09\x03\0\0\0\0\0\0\0x" == pong_frame(3, b"x")
    assert b"\x0e\0\0\0\x06\x03\0\0\0\0\0\0\0\x02nowhy" == ask_frame(3, b"no", b"why")
    assert b"\x0a\0\0\0\x07\x03\0\0\0\0\0\0\0\x01y" == answer_frame(3, True, b"y")
    items = [(1, b"one"), (2, b""), (1, b"x")]
    expected = struct.pack("<IBQI", 12 + 3 + 12 + 4, 4, 9, 3) + b"\1\2\1" + struct.pack("<III", 3, 0, 1) + b"onex"
    assert expected == batch(9, items)


def test_other_frames_are_read_as_they_were_written() -> None:
    cases = [
        (proof_frame(5, bytes(32)), PROOF, read_proof, (5, bytes(32))),
        (proof_frame(5, b""), PROOF, read_proof, (5, b"")),
        (refused_sentence("no\nway \N{SNOWMAN}"), REFUSED, read_sentence, "no\N{REPLACEMENT CHARACTER}way \N{SNOWMAN}"),
        (ack_frame(5), ACK, read_number, 5),
        (ping_frame(5), PING, read_number, 5),
        (pong_frame(5, b"body"), PONG, read_number, 5),
        (ask_frame(5, b"noun", b"question"), ASK, read_ask, (5, "noun", b"question")),
        (answer_frame(5, True, b"answer"), ANSWER, read_answer, (5, True, b"answer")),
        (answer_frame(5, False, b"why"), ANSWER, read_answer, (5, False, b"why")),
        (hello_frame(b"hello"), HELLO, lambda data, start, stop: data[start:stop], b"hello"),
    ]
    for frame, kind, read, expected in cases:
        ((found, data, start, stop),) = FrameReader(MIN_FRAME).feed(frame)
        assert (kind, expected) == (found, read(data, start, stop))


def test_what_is_no_frame_is_refused_and_what_came_before_counts() -> None:
    for wrong, why in (
        (b"\x01\0\0\1\x05", "announces a frame of 16777217 bytes"),
        (b"\x00\0\0\0\x0a", "kind 10 are unknown"),
        (b"\x00\0\0\0\x00", "kind 0 are unknown"),
        (b"GET / HTTP/1.1", "announces a frame of"),
        (b"\x16\x03\x01\x02\x00\x01\x00", "announces a frame of"),
    ):
        frames = FrameReader(MIN_FRAME).feed(ack_frame(1) + ping_frame(2) + wrong)
        assert [ACK, PING] == [next(frames)[0], next(frames)[0]]
        with pytest.raises(LinkFrameError, match=why):
            next(frames)


@given(bodies.filter(bool), st.data())
def test_a_batch_whose_lengths_do_not_add_up_is_refused(items: list[tuple[int, bytes]], data: st.DataObject) -> None:
    body = bytearray(batch(1, items)[5:])
    count = len(items)
    at = data.draw(st.integers(8, 11 + 5 * count).filter(lambda at: not 12 <= at < 12 + count))
    body[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(LinkFrameError):
        read_batch(bytes(body), 0, len(body))


@pytest.mark.parametrize("read", [read_batch, read_proof, read_number, read_ask, read_answer])
def test_a_frame_that_is_too_short_is_refused(read) -> None:
    for size in range(8):
        with pytest.raises(LinkFrameError):
            read(bytes(100), 50, 50 + size)
