"""Frames: written and read in any pieces, refused when they are wrong."""

from __future__ import annotations

import struct
import uuid
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motorcade.dispatch.frames import (
    ACK,
    MAX_REASON,
    PROCESS,
    REJECT,
    AnswerReader,
    FrameError,
    MessageReader,
    ack_frames,
    process_frames,
    reject_frame,
    return_frames,
)

MAX = 1000
IDS = [str(uuid.UUID(int=number << 64 | 4 << 76 | 8 << 60, version=4)).encode() for number in range(20)]

messages = st.lists(st.tuples(st.sampled_from(IDS), st.binary(max_size=80)), max_size=20)
answers = st.lists(st.tuples(st.sampled_from("anr"), st.sampled_from(IDS), st.text(max_size=20)), max_size=20)
cuts = st.lists(st.integers(0, 5000), max_size=20)


def frame(version: int, command: int, payload: bytes, length: int | None = None) -> bytes:
    return struct.pack(">BBI", version, command, len(payload) if length is None else length) + payload


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


def test_a_message_is_what_the_seed_says() -> None:
    """Version, command, length in big-endian, id, colon, message."""
    assert b"\x01\x00\x00\x00\x00\x27" + IDS[0] + b":{}" == process_frames([IDS[0]], [b"{}"])
    assert b"\x01\x01\x00\x00\x00\x24" + IDS[0] == ack_frames([IDS[0]])


def test_nothing_is_written_for_nothing() -> None:
    assert (b"", b"", b"") == (process_frames([], []), ack_frames([]), return_frames([]))


@given(messages, cuts)
def test_messages_come_whole_however_they_are_cut(pairs, cuts) -> None:
    """Split and merged as TCP likes, the same messages come out in the same order."""
    reader = MessageReader(MAX)
    found: list[tuple[bytes, bytes]] = []
    for piece in in_pieces(process_frames([id_ for id_, _ in pairs], [body for _, body in pairs]), cuts):
        found += zip(*reader.feed(piece), strict=True)
    assert pairs == found


@given(answers, cuts)
def test_answers_come_whole_however_they_are_cut(said, cuts) -> None:
    """Runs of acknowledgements, and anything between them."""
    writers = {
        "a": lambda id_, _: ack_frames([id_]),
        "n": reject_frame,
        "r": lambda id_, _: return_frames([id_]),
    }
    data = b"".join(writers[kind](id_, reason) for kind, id_, reason in said)
    reader = AnswerReader()
    acknowledged, rejected, returned = [], [], []
    for piece in in_pieces(data, cuts):
        some = reader.feed(piece)
        acknowledged += some.acknowledged
        rejected += some.rejected
        returned += some.returned
    assert [id_ for kind, id_, _ in said if kind == "a"] == acknowledged
    assert [(id_, reason) for kind, id_, reason in said if kind == "n"] == rejected
    assert [id_ for kind, id_, _ in said if kind == "r"] == returned


def test_a_large_message_is_joined_once() -> None:
    """A message of many reads costs no more than its bytes."""
    body = b"x" * MAX
    data = process_frames([IDS[0]], [body])
    reader = MessageReader(MAX)
    for byte in data[:-1]:
        assert ([], []) == reader.feed(bytes([byte]))
    assert ([IDS[0]], [body]) == reader.feed(data[-1:])


def test_a_reason_is_cut() -> None:
    reader = AnswerReader()
    ((_, reason),) = reader.feed(reject_frame(IDS[0], "ä" * MAX_REASON)).rejected
    assert "ä" * (MAX_REASON // 2) == reason


def test_what_a_worker_does_not_take() -> None:
    """What came well before it is not lost."""
    for data, why in (
        (frame(2, PROCESS, IDS[0] + b":{}"), "version 2"),
        (frame(0, PROCESS, IDS[0] + b":{}"), "version 0"),
        (frame(1, 2, IDS[0] + b":{}"), "command 2"),
        (frame(1, ACK, IDS[0]), "command 1"),
        (frame(1, PROCESS, b"", MAX + 38), "longer"),
        (frame(1, PROCESS, b"", 2**32 - 1), "longer"),
        (frame(1, PROCESS, IDS[0]), "too short"),
        (frame(1, PROCESS, b""), "too short"),
        (frame(1, PROCESS, IDS[0] + b"{}"), "colon"),
        (frame(1, PROCESS, b"g" + IDS[0][1:] + b":{}"), "no UUID"),
        (frame(1, PROCESS, IDS[0].replace(b"-", b"0") + b":{}"), "no UUID"),
        (frame(1, PROCESS, IDS[0][:8] + b"00" + IDS[0][9:13] + IDS[0][14:] + b":{}"), "no UUID"),
        (frame(1, PROCESS, b"\xff" * 36 + b":{}"), "no UUID"),
        (frame(1, PROCESS, b" " * 36 + b":{}"), "no UUID"),
    ):
        with pytest.raises(FrameError, match=why) as found:
            MessageReader(MAX).feed(process_frames(IDS[1:3], [b"{}", b"[]"]) + data + process_frames([IDS[4]], [b"{}"]))
        assert (IDS[1:3], [b"{}", b"[]"]) == found.value.before


def test_what_a_leader_does_not_take() -> None:
    """What came well before it is not lost."""
    for data, why in (
        (frame(9, ACK, IDS[0]), "version 9"),
        (frame(1, PROCESS, IDS[0] + b":{}"), "command 0"),
        (frame(1, 2, IDS[0]), "command 2"),
        (frame(1, ACK, IDS[0] + b"x"), "37 bytes"),
        (frame(1, ACK, IDS[0][:-1]), "too short"),
        (frame(1, ACK, b"", 0), "too short"),
        (frame(1, REJECT, b"", 2**31), "longer"),
        (b"GET / HTTP/1.1\r\n", "version 71"),
    ):
        with pytest.raises(FrameError, match=why) as found:
            AnswerReader().feed(ack_frames(IDS[:5]) + data)
        assert (IDS[:5], [], []) == found.value.before


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_waited_for(data: bytes) -> None:
    """Whatever comes, readers raise nothing but `FrameError`."""
    for reader in (AnswerReader(), MessageReader(MAX)):
        try:
            reader.feed(data)
        except FrameError:
            pass
