"""One link, by examples; `test_link_model.py` has everything at once."""

from __future__ import annotations

import pytest
import structlog
from msgspec.structs import replace

from motorcade.cluster import link as module
from motorcade.cluster.frames import (
    ACK,
    ANSWER,
    BATCH,
    MIN_FRAME,
    FrameReader,
    LinkFrameError,
    ack_frame,
    batch_head,
    hello_frame,
    read_batch,
    refused_sentence,
)
from motorcade.cluster.link import LinkClosedError, LinkLostError, LinkStatus
from motorcade.core.handshake import HandshakeError
from motorcade.extension.cluster import AskError, ItemHandler, Peer
from tests.unit.cluster.rig import OPTIONS, Pair, Pipe


def frames(pipe: Pipe) -> list[tuple[int, bytes, int, int]]:
    """What is in a pipe."""
    return list(FrameReader(1 << 30).feed(bytes(pipe.data)))


def kinds(pipe: Pipe) -> list[int]:
    return [kind for kind, *_ in frames(pipe)]


def test_items_come_in_order_in_one_frame_for_a_turn() -> None:
    pair = Pair()
    for number in range(5):
        pair.a.link.send("one" if number % 2 else "two", b"%d" % number)
    assert not pair.to_b.data, "nothing is written before the turn is over"
    pair.turn()
    assert [BATCH] == kinds(pair.to_b)
    pair.carry()
    assert [("two", b"0"), ("one", b"1"), ("two", b"2"), ("one", b"3"), ("two", b"4")] == pair.b.items
    assert [ACK] == kinds(pair.to_a)
    pair.settle()
    assert 0 == pair.a.link.unacknowledged == pair.a.link.unacknowledged_bytes
    assert pair.a.link.sent == pair.a.link.acknowledged == pair.b.link.received == 7, "two of them declare the kinds"


def test_several_frames_of_one_read_have_one_ack() -> None:
    pair = Pair()
    for _ in range(3):
        pair.a.link.send("one", b"x")
        pair.turn()
    assert [BATCH] * 3 == kinds(pair.to_b)
    pair.carry()
    assert [ACK] == kinds(pair.to_a)
    pair.carry()
    assert not pair.to_b.data, "an ACK is not answered"


def test_a_kind_is_declared_once_for_each_pair_of_incarnations() -> None:
    pair = Pair()
    pair.a.link.send("one", b"1")
    pair.settle()
    pair.cut()
    pair.a.link.send("one", b"2")
    pair.connect()
    pair.a.link.send("one", b"3")
    pair.settle()
    assert [("one", b"1"), ("one", b"2"), ("one", b"3")] == pair.b.items
    assert 4 == pair.b.link.received


def test_there_are_so_many_kinds_and_they_have_short_names() -> None:
    link = Pair().a.link
    for number in range(255):
        link.send(f"kind{number}", b"")
    for wrong in ("another", "", "x" * 256):
        with pytest.raises(ValueError, match="at most 255 kinds"):
            link.send(wrong, b"")
    link.send("kind3", b"goes on")


def test_items_without_handler_are_counted_until_there_is_one() -> None:
    """A plugin may be loaded later, and a member of a later version may say more."""
    pair = Pair()
    pair.a.link.send("three", b"1")
    pair.settle()
    assert ([], {"three": 1}) == (pair.b.items, dict(pair.b.link.unknown))
    pair.b.known.add("three")
    pair.b.link.refresh()
    pair.a.link.send("three", b"2")
    pair.settle()
    assert ([("three", b"2")], {"three": 1}) == (pair.b.items, dict(pair.b.link.unknown))


def test_a_handler_that_raises_stops_nothing() -> None:
    pair = Pair()
    pair.b.failing = True
    pair.a.link.send("one", b"1")
    pair.a.link.send("one", b"2")
    with structlog.testing.capture_logs() as logs:
        pair.settle()
    assert ([("one", b"1"), ("one", b"2")], 2) == (pair.b.items, pair.b.link.errors)
    assert [("cluster_item_failed", "a~1", "one")] * 2 == [(log["event"], log["peer"], log["kind"]) for log in logs]
    assert 0 == pair.a.link.unacknowledged


# -- confirmations


def test_a_confirmation_is_shared_by_a_turn_and_done_when_the_peer_has_it() -> None:
    pair = Pair()
    assert pair.a.link.confirm().done, "nothing was sent"
    pair.a.link.send("one", b"1")
    first = pair.a.link.confirm()
    assert first is pair.a.link.confirm()
    pair.a.link.send("one", b"2")
    second = pair.a.link.confirm()
    assert second is not first and not first.done
    pair.turn()
    pair.carry()
    assert (False, False) == (first.done, second.done)
    pair.carry()
    assert (True, True, None) == (first.done, second.done, first.error)
    assert pair.a.link.confirm().done


def test_patience_ends_a_confirmation_and_is_counted() -> None:
    pair = Pair()
    pair.a.link.send("one", b"1")
    early = pair.a.link.confirm()
    pair.wait(0.3)
    pair.a.link.send("one", b"2")
    late = pair.a.link.confirm()
    pair.wait(0.19)
    assert not early.done
    pair.wait(0.02)
    assert (True, False, 1) == (early.done, late.done, pair.a.link.impatient)
    pair.wait(0.3)
    assert (True, 2) == (late.done, pair.a.link.impatient)
    again = pair.a.link.confirm()
    assert not again.done, "it is not acknowledged, and may be waited for again"
    pair.settle()
    assert (True, 2) == (again.done, pair.a.link.impatient), "the link delivers all the same"
    assert 2 == len(pair.b.items)


def test_patience_holds_without_a_connection_and_the_end_of_a_peer_ends_it() -> None:
    pair = Pair()
    pair.cut()
    pair.a.link.send("one", b"1")
    first = pair.a.link.confirm()
    pair.wait(0.5)
    assert first.done
    pair.a.link.send("one", b"2")
    second = pair.a.link.confirm()
    pair.a.link.close_dead("it was fenced")
    assert (True, 1) == (second.done, pair.a.link.impatient)


# -- the window


def test_a_full_link_drops_what_may_be_dropped_and_has_room_at_less_than_half() -> None:
    pair = Pair()
    link = pair.a.link
    assert link.room().done
    for number in range(19):
        link.send("one", b"%d" % number, droppable=True)
    assert (True, 20) == (link.full, link.unacknowledged)
    room = link.room()
    assert room is link.room() and not room.done
    link.send("one", b"dropped", droppable=True)
    link.send("one", b"kept")
    assert (1, 1) == (link.dropped, link.over_full)
    pair.turn()
    pair.to_a.data += ack_frame(11)
    pair.carry()
    assert (True, False) == (link.full, room.done), "ten are left, that is half"
    pair.settle()
    assert (False, True, 20) == (link.full, room.done, len(pair.b.items))
    assert ("one", b"kept") == pair.b.items[-1]


def test_a_link_is_full_by_bytes_too() -> None:
    pair = Pair()
    for _ in range(3):
        pair.a.link.send("one", bytes(600))
        assert not pair.a.link.full
    pair.a.link.send("one", bytes(600))
    assert pair.a.link.full
    pair.settle()
    assert not pair.a.link.full


def test_acks_and_answers_overtake_items_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides are full and write no items; nothing that the other one waits for is behind them."""
    monkeypatch.setattr(module, "BATCH_BYTES", 100)
    pair = Pair(capacity=150)
    for end in (pair.a, pair.b):
        for _ in range(30):
            end.link.send("one", bytes(50))
    answer = pair.a.link.ask("noun", b"question", pair.now + 5)
    pair.turn()
    waiting = len(pair.to_a.data)
    pair.b.link.receive(pair.to_b.carry(1 << 30), pair.now)
    pair.b.link.answer(*pair.b.asked_for[0][:2], b"answer")
    pair.turn()
    new = FrameReader(1 << 30).feed(bytes(pair.to_a.data[waiting:]))
    assert [ACK, ANSWER] == [kind for kind, *_ in new], "ahead of 28 items"
    pair.settle(60)
    assert (30, 30, True) == (len(pair.a.items), len(pair.b.items), answer.done)


def test_a_connection_that_has_room_again_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 100)
    pair = Pair(capacity=150)
    for _ in range(5):
        pair.a.link.send("one", bytes(99))
    pair.turn()
    written = []
    while pair.to_b.data:
        written.append(kinds(pair.to_b))
        pair.to_b.carry(1 << 30)
    assert [[BATCH] * 2, [BATCH] * 2, [BATCH]] == written


def test_a_large_item_is_written_in_pieces_and_nothing_comes_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_SIZE", 1000)
    pair = Pair(replace(OPTIONS, max_bytes=10_000_000), capacity=2500)
    pair.a.link.send("large", bytes(300_000))
    pair.a.link.send("one", b"after")
    pair.turn()
    assert 2500 < len(pair.to_b.data) < 3600
    pair.a.link.ping(pair.now)
    assert 2500 < len(pair.to_b.data) < 3600, "in the middle of an item"
    pair.settle(700)
    assert ([300_000, 5], 1) == ([len(body) for _, body in pair.b.items], len(pair.a.pongs))
    pair.a.link.send("large", bytes(300_000))
    pair.turn()
    pair.cut()
    pair.a.link.send("one", b"after")
    pair.connect()
    pair.settle(7000)
    assert [300_000, 5, 300_000, 5] == [len(body) for _, body in pair.b.items]


def test_a_confirmation_may_be_done_before_its_turn_is_over() -> None:
    pair = Pair()
    pair.a.link.send("one", b"1")
    pair.turn()
    confirmed = pair.a.link.confirm()
    pair.carry()
    pair.carry()
    assert confirmed.done
    pair.a.link.send("one", b"2")
    later = pair.a.link.confirm()
    pair.wait(0.6)
    assert (True, 1) == (later.done, pair.a.link.impatient)


def test_large_items_pass_and_too_large_ones_are_refused_where_they_are_sent() -> None:
    options = replace(OPTIONS, max_frame=2_000_000, max_bytes=10_000_000)
    pair = Pair(options)
    pair.a.link.send("one", b"before")
    pair.a.link.send("large", bytes(1_900_000))
    with structlog.testing.capture_logs() as logs:
        pair.a.link.send("large", bytes(2_000_000))
    pair.a.link.send("one", b"after")
    pair.settle(65_536)
    assert [6, 1_900_000, 5] == [len(body) for _, body in pair.b.items]
    assert (1, 0) == (pair.a.link.too_large, pair.a.link.unacknowledged_bytes)
    assert [("cluster_item_too_large", "large", 2_000_000)] == [
        (log["event"], log["kind"], log["size"]) for log in logs
    ]


def test_an_item_that_a_peer_turns_out_not_to_take_leaves_no_gap() -> None:
    """Its `max_frame` is known when it connects."""
    pair = Pair(replace(OPTIONS, max_bytes=10_000_000))
    pair.cut()
    for kind, size in (("one", 1), ("large", 1_500_000), ("one", 2)):
        pair.a.link.send(kind, bytes(size))
    pair.turn()
    pair.connect(MIN_FRAME)
    pair.settle()
    assert [1, 2] == [len(body) for _, body in pair.b.items]
    assert (1, 0, 0) == (pair.a.link.too_large, pair.a.link.unacknowledged_bytes, pair.b.link.errors)


def test_large_turns_are_cut_into_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 100)
    pair = Pair(replace(OPTIONS, max_items=1000, max_bytes=100_000))
    sizes = [10] * 30 + [99, 100, 101, 1, 500, 1]
    for size in sizes:
        pair.a.link.send("one", bytes(size))
    pair.turn()
    batches = [read_batch(*frame[1:]) for frame in frames(pair.to_b)]
    assert all(sum(lengths) <= 200 or len(lengths) == 1 for _, _, lengths, _ in batches)
    pair.settle()
    assert sizes == [len(body) for _, body in pair.b.items]


# -- breaks


def test_what_was_not_acknowledged_is_sent_again_and_handled_once() -> None:
    pair = Pair()
    pair.a.link.send("one", b"1")
    pair.settle()
    pair.a.link.send("one", b"2")
    pair.turn()
    pair.b.link.receive(pair.to_b.carry(1 << 30), pair.now)  # its ACK is lost
    pair.a.link.send("one", b"3")
    pair.turn()  # lost on its way
    pair.cut()
    pair.a.link.send("one", b"4")
    pair.turn()
    pair.connect()
    pair.settle()
    assert [b"1", b"2", b"3", b"4"] == [body for _, body in pair.b.items]
    assert 1 == pair.a.link.resent, "3 was written on the old connection, 4 was not, and 2 had been received"
    assert 2 == pair.a.link.connections


def test_what_waited_for_a_connection_does_not_wait_twice() -> None:
    pair = Pair(capacity=10)
    for number in range(4):
        pair.a.link.send("one", b"%d" % number)
        pair.turn()
    pair.a.link.ping(pair.now)
    pair.cut()
    pair.connect()
    pair.settle()
    assert [b"0", b"1", b"2", b"3"] == [body for _, body in pair.b.items]
    assert 2 == pair.a.link.resent, "one batch was written, an item and its declaration"


def test_a_batch_that_is_known_in_part_is_handled_in_part() -> None:
    pair = Pair()
    pair.a.link.send("one", b"1")
    pair.settle()  # items 1 and 2
    again = batch_head(2, b"\1\1\1", [b"1", b"2", b"3"]) + b"123"
    pair.b.link.receive(again, pair.now)
    pair.b.link.receive(again, pair.now)
    pair.b.link.receive(batch_head(2, b"\1", [b"1"]) + b"1", pair.now)
    assert [b"1", b"2", b"3"] == [body for _, body in pair.b.items]
    assert 4 == pair.b.link.received


def test_what_cannot_be_is_refused() -> None:
    for said, why in (
        (batch_head(2, b"\1", [b""]), "items 1 to 1 are missing"),
        (ack_frame(1), "acknowledges item 1, and the last one is 0"),
        (hello_frame(b""), "a frame of kind 1 comes too late"),
        (refused_sentence("enough"), "^enough$"),
        (b"\xff\xff\xff\xff\x04", "announces a frame of 4294967295 bytes"),
    ):
        with pytest.raises(LinkFrameError, match=why) as found:
            Pair().a.link.receive(said, 0.0)
        assert isinstance(found.value, LinkClosedError) == (why == "^enough$")


def test_what_came_before_a_bad_frame_counts() -> None:
    pair = Pair()
    pair.a.link.send("one", b"1")
    pair.turn()
    with pytest.raises(LinkFrameError):
        pair.b.link.receive(pair.to_b.carry(1000) + b"\0\0\0\0\xff", pair.now)
    assert [("one", b"1")] == pair.b.items
    assert [ACK] == kinds(pair.to_a)


def test_a_peer_that_has_another_number_than_it_can_have_is_refused() -> None:
    pair = Pair()
    pair.a.link.send("one", b"1")
    pair.settle()
    pair.cut()
    for received, why in ((1, "b~2 has forgotten what it has been sent"), (3, "received more than it was sent")):
        with pytest.raises(HandshakeError, match=why):
            pair.a.link.check(received)
    pair.a.link.check(2)


def test_a_dead_peer_gets_nothing_and_is_not_waited_for() -> None:
    pair = Pair()
    link = pair.a.link
    for _ in range(25):
        link.send("one", b"1")
    room, confirmed, answer = link.room(), link.confirm(), link.ask("noun", b"", pair.now + 5)
    pair.turn()
    link.send("one", b"2")
    pending = link.confirm()
    link.close_dead("b~2 was fenced")
    assert (True, True, True) == (room.done, confirmed.done, pending.done)
    assert isinstance(answer.error, LinkLostError)
    assert (LinkStatus.DEAD, "b~2 was fenced", False) == (link.status, link.problem, link.full)
    for _ in range(30):
        link.send("one", b"3")
        link.send("three", b"3", droppable=True)
    assert (0, 0, False) == (link.unacknowledged, link.unacknowledged_bytes, link.full)
    assert link.confirm().done and link.room().done
    assert isinstance(link.ask("noun", b"", pair.now + 5).error, LinkLostError)
    link.close_dead("twice")
    assert "b~2 was fenced" == link.problem


def test_a_handler_may_end_its_own_link(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.a.link.send("one", b"1")
    pair.a.link.send("two", b"last")
    pair.a.link.send("one", b"2")
    handle = pair.b.handler

    def handler(kind: str) -> ItemHandler | None:
        inner = handle(kind)

        def ends(peer: Peer, body: bytes) -> None:
            assert inner is not None
            inner(peer, body)
            pair.b.link.close_dead("told so")

        return ends if kind == "two" else inner

    monkeypatch.setattr(pair.b, "handler", handler)
    pair.settle()
    assert [("one", b"1"), ("two", b"last")] == pair.b.items
    assert LinkStatus.DEAD is pair.b.link.status


# -- questions


def test_a_question_is_answered_or_refused() -> None:
    pair = Pair()
    first = pair.a.link.ask("noun", b"question", pair.now + 5)
    second = pair.a.link.ask("other", b"", pair.now + 5)
    pair.settle()
    (wire, id_, noun, question), (_, other, *_) = pair.b.asked_for
    assert ("noun", b"question") == (noun, question)
    pair.b.link.refuse(wire, other, "I do not know")
    pair.b.link.answer(wire, id_, b"answer")
    pair.settle()
    assert (True, b"answer", None) == (first.done, first.result, first.error)
    assert isinstance(second.error, AskError) and "b~2 refuses: I do not know" in str(second.error)
    pair.b.link.answer(wire, id_, b"twice")
    pair.settle()
    assert b"answer" == first.result


def test_a_question_ends_in_time_and_with_its_connection() -> None:
    pair = Pair()
    short, long = pair.a.link.ask("noun", b"", pair.now + 1), pair.a.link.ask("noun", b"", pair.now + 2)
    pair.settle()
    pair.wait(1.5)
    assert (True, False) == (short.done, long.done)
    assert "b~2 has not answered in time" in str(short.error)
    wire, id_, *_ = pair.b.asked_for[1]
    pair.cut()
    assert isinstance(long.error, LinkLostError) and "it was cut" in str(long.error)
    pair.connect()
    pair.b.link.answer(wire, id_, b"too late")
    pair.settle()
    assert not pair.to_a.data and pair.a.link.deadline == float("inf")


def test_questions_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ASKS", 2)
    pair = Pair(replace(OPTIONS, max_frame=MIN_FRAME))
    link = pair.a.link
    for wrong in ("", "x" * 256):
        with pytest.raises(ValueError, match="a noun has 1 to 255 bytes"):
            link.ask(wrong, b"", 5)
    assert "too long for b~2" in str(link.ask("noun", bytes(MIN_FRAME), pair.now + 5).error)
    first, _, third = (link.ask("noun", b"", pair.now + 5) for _ in range(3))
    assert "b~2 has 2 questions to answer already" in str(third.error)
    pair.settle()
    pair.b.link.answer(*pair.b.asked_for[0][:2], bytes(MIN_FRAME))
    pair.settle()
    assert "too long for a frame" in str(first.error)


# -- pings


def test_a_ping_is_answered_behind_the_items_before_it() -> None:
    pair = Pair()
    pair.a.link.ping(pair.now)
    pair.b.link.send("one", b"sent before the ping came")
    pair.b.pong_body = b"positions"
    pair.b.link.receive(pair.to_b.carry(1000), pair.now)
    pair.b.link.send("one", b"after")
    pair.now += 0.25
    pair.a.link.receive(pair.to_a.carry(1 << 30), pair.now)
    assert [("one", b"sent before the ping came")] == pair.a.items
    assert ([(100.0, b"positions")], 0.25) == (pair.a.pongs, pair.a.link.round_trip)
    pair.settle()
    assert 2 == len(pair.a.items)


def test_a_pong_waits_with_the_items_before_it() -> None:
    pair = Pair(capacity=10)
    pair.b.link.send("one", bytes(50))
    pair.turn()
    pair.b.link.send("one", b"waits")
    pair.turn()
    pair.a.link.ping(pair.now)
    pair.b.link.receive(pair.to_b.carry(1000), pair.now)
    pair.a.link.receive(pair.to_a.carry(1 << 30), pair.now)
    assert (1, []) == (len(pair.a.items), pair.a.pongs)
    pair.settle()
    assert (2, 1) == (len(pair.a.items), len(pair.a.pongs))


def test_pings_of_an_earlier_connection_are_forgotten() -> None:
    pair = Pair()
    pair.a.link.ping(pair.now)
    pair.cut()
    pair.a.link.ping(pair.now)
    pair.connect()
    for _ in range(100):
        pair.a.link.ping(pair.now)
    pair.settle()
    assert 64 == len(pair.a.pongs), "the last ones; older ones were forgotten"


def test_figures_are_numbers() -> None:
    pair = Pair()
    pair.a.link.send("one", b"1")
    pair.settle()
    figures = pair.a.link.figures()
    assert (2, 0, 1, 1) == tuple(figures[name] for name in ("sent", "unacknowledged", "connections", "linked"))
    assert 2 == pair.b.link.figures()["received"]
