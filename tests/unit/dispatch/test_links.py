"""One worker as its leader sees it: credit, windows, and what it may not do."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from motorcade.dispatch.frames import Answers, ack_frames, process_frames, reject_frame, return_frames
from motorcade.dispatch.links import FIRST_WINDOW, Fault, Link, State
from motorcade.dispatch.options import DispatchOptions
from tests.support.ports import free_port
from tests.unit.dispatch.peers import Peer, peer, until

IDS = [str(uuid.UUID(int=number, version=4)).encode() for number in range(200)]  # the same in every process
TIMEOUT = 200.0  # nobody is late because the machine is
OPTIONS = DispatchOptions(ack_timeout=TIMEOUT, remember=2000.0, window=64, cut_off=0.05)


class Notes:
    """A leader that writes down what it is told."""

    def __init__(self) -> None:
        self.acknowledged: list[bytes] = []
        self.rejected: list[tuple[bytes, str]] = []
        self.returned: list[bytes] = []
        self.back: list[tuple[Fault, list[bytes]]] = []
        self.states: list[State] = []

    def answered(self, link: Link, answers: Answers) -> None:
        self.acknowledged += answers.acknowledged
        self.rejected += answers.rejected
        self.returned += answers.returned

    def taken_back(self, link: Link, ids: Sequence[bytes], fault: Fault, detail: str) -> None:
        self.back.append((fault, sorted(ids)))

    def changed(self, link: Link) -> None:
        self.states.append(link.state)


@asynccontextmanager
async def linked(options: DispatchOptions = OPTIONS) -> AsyncIterator[tuple[Link, Notes, Peer]]:
    async with peer() as worker:
        notes = Notes()
        link = Link(worker.name, notes, options)
        task = asyncio.create_task(link.run())
        await until(lambda: link.credit, "connected")
        yield link, notes, worker
        link.close()
        task.cancel()


def now() -> float:
    return asyncio.get_running_loop().time()


def send(link: Link, *ids: bytes, at: float | None = None) -> None:
    link.send(list(ids), [b"{}"] * len(ids), now() if at is None else at)


async def test_credit_is_what_the_window_has_left() -> None:
    async with linked() as (link, notes, worker):
        assert FIRST_WINDOW == link.credit
        send(link, *IDS[:10])
        assert FIRST_WINDOW - 10 == link.credit
        await until(lambda: worker.ids == IDS[:10], "all arrived")
        worker.say(ack_frames(IDS[:4]))
        await until(lambda: notes.acknowledged == IDS[:4], "acknowledged")
        assert (FIRST_WINDOW - 6, 4) == (link.credit, link.acknowledged)


async def test_a_window_that_is_used_up_quickly_grows() -> None:
    """Up to the largest; one that is not used up stays."""
    async with linked() as (link, _, worker):
        link.look(now())
        assert FIRST_WINDOW == link.window
        for size in (16, 32, 64, 64):
            assert size == link.credit
            send(link, *IDS[:size])
            await until(lambda: len(worker.messages) == len(link.held), "arrived")
            worker.say(ack_frames(IDS[:size]))
            await until(lambda: not link.held, "acknowledged")
            worker.messages.clear()
            link.look(now())


async def test_a_window_does_not_grow_for_somebody_who_acknowledges_nothing() -> None:
    async with linked() as (link, _, _):
        send(link, *IDS[:FIRST_WINDOW])
        for _ in range(3):
            link.look(now())
        assert (FIRST_WINDOW, 0) == (link.window, link.credit)


async def test_a_window_grows_when_a_whole_window_was_acknowledged() -> None:
    """Not at every look: a slow worker would have far too much in hand before the first of it is old."""
    async with linked() as (link, notes, worker):
        sizes = []
        for number in range(1, 33):
            send(link, *IDS[number - 1 + len(link.held) :][: link.credit])
            worker.say(ack_frames(IDS[number - 1 : number]))
            await until(lambda number=number: len(notes.acknowledged) == number, "acknowledged")  # type: ignore[misc]
            link.look(now())
            sizes.append(link.window)
        assert [16] * 15 + [32] * 17 == sizes


async def test_the_window_of_a_slow_worker_shrinks() -> None:
    """Before anything is overdue: half of the time has gone. Step by step, with time between two steps."""
    async with linked() as (link, notes, _):
        began = now()
        send(link, *IDS[:16], at=began)
        for after, size in ((49, 16), (99, 16), (101, 8), (102, 8), (152, 4), (199, 4)):
            link.look(began + after)
            assert size == link.window
        assert [] == notes.back


async def test_a_window_that_was_made_smaller_grows_when_it_was_acknowledged() -> None:
    """What was acknowledged before says nothing of the new one."""
    async with linked() as (link, notes, worker):
        send(link, *IDS[:16])
        worker.say(ack_frames(IDS[:15]))
        await until(lambda: len(notes.acknowledged) == 15, "acknowledged")
        began = now()
        send(link, *IDS[16:31], at=began)
        link.look(began + 101)
        assert 8 == link.window
        worker.say(ack_frames(IDS[15:22]))
        await until(lambda: len(notes.acknowledged) == 22, "acknowledged")
        link.look(began + 49)  # nothing is old
        assert (8, 9) == (link.window, len(link.held))
        worker.say(ack_frames(IDS[22:23]))
        await until(lambda: len(notes.acknowledged) == 23, "acknowledged")
        link.look(began + 49)
        assert 16 == link.window


async def test_a_few_slow_messages_do_not_make_the_window_smaller() -> None:
    async with linked() as (link, notes, worker):
        began = now()
        send(link, *IDS[:16], at=began)
        await until(lambda: len(worker.messages) == 16, "arrived")
        worker.say(ack_frames(IDS[:13]))
        await until(lambda: notes.acknowledged, "acknowledged")
        link.look(began + 150)
        assert 16 == link.window


async def test_octets_are_bounded_too() -> None:
    """One message may always be sent; the next when some room is left."""
    async with linked(DispatchOptions(window_bytes=1000)) as (link, notes, worker):
        link.send([IDS[0]], [b"x" * 5000], now())
        assert 0 == link.credit
        await until(lambda: worker.messages, "arrived")
        worker.say(ack_frames([IDS[0]]))
        await until(lambda: notes.acknowledged, "acknowledged")
        assert (FIRST_WINDOW, 0) == (link.credit, link.octets)


async def test_what_is_overdue_at_a_worker_that_answers_is_taken_back() -> None:
    """The rest stays with it, and so does the worker."""
    async with linked() as (link, notes, worker):
        send(link, *IDS[:2], at=now() - TIMEOUT - 1)
        send(link, IDS[2])
        await until(lambda: len(worker.messages) == 3, "arrived")
        worker.say(ack_frames([IDS[0]]))
        await until(lambda: notes.acknowledged, "acknowledged")
        link.look(now())
        assert [(Fault.OVERDUE, [IDS[1]])] == notes.back
        assert (State.CONNECTED, {IDS[2]}) == (link.state, link.held)


async def test_a_late_acknowledgement_is_no_lie() -> None:
    """Refusing what is somebody else's already means nothing; nor does a second acknowledgement."""
    async with linked() as (link, notes, worker):
        send(link, *IDS[:3], at=now() - TIMEOUT - 1)
        send(link, IDS[3])
        await until(lambda: len(worker.messages) == 4, "arrived")
        worker.say(ack_frames([IDS[3]]))
        await until(lambda: notes.acknowledged, "acknowledged")
        link.look(now())
        worker.say(ack_frames([IDS[0]]) + reject_frame(IDS[1], "no") + return_frames([IDS[2]]))
        await until(lambda: IDS[0] in notes.acknowledged, "acknowledged late")
        assert ([], [], State.CONNECTED) == (notes.rejected, notes.returned, link.state)
        worker.say(ack_frames([IDS[0]]) + reject_frame(IDS[1], "no") + return_frames([IDS[2]]))
        await until(lambda: 3 == link.faults[Fault.REPEATED], "heard again")
        assert (State.CONNECTED, [IDS[3], IDS[0]]) == (link.state, notes.acknowledged)


async def test_a_second_acknowledgement_is_harmless() -> None:
    """In one read or in several, after all that was sent with it was answered, and with a refusal before it."""
    async with linked() as (link, notes, worker):
        send(link, *IDS[:4])
        await until(lambda: len(worker.messages) == 4, "arrived")
        worker.say(ack_frames([IDS[0], IDS[0]]))
        await until(lambda: 1 == link.faults[Fault.REPEATED], "heard")
        worker.say(ack_frames([IDS[0], IDS[1]]) + reject_frame(IDS[2], "no"))
        await until(lambda: notes.rejected, "refused")
        worker.say(ack_frames([IDS[2], IDS[3]]) * 2)
        await until(lambda: 5 == link.faults[Fault.REPEATED], "heard")
        link.look(now())
        worker.say(ack_frames(IDS[:4]))
        await until(lambda: 9 == link.faults[Fault.REPEATED], "heard")
        assert ([IDS[0], IDS[1], IDS[3]], [(IDS[2], "no")]) == (notes.acknowledged, notes.rejected)
        assert (State.CONNECTED, [], 3) == (link.state, notes.back, link.acknowledged)
        assert FIRST_WINDOW == link.credit


async def test_ids_that_were_answered_are_not_kept_for_ever() -> None:
    async with linked() as (link, notes, worker):
        total = 0
        for start in [*range(0, 200, 10)] * 3:
            send(link, *IDS[start : start + 10])
            worker.say(ack_frames(IDS[start : start + 10]))
            total += 10
            await until(lambda: len(notes.acknowledged) >= total, "acknowledged")  # noqa: B023 - awaited here
            link.look(now())
        assert sum(map(len, link._past)) == link._past_ids <= 4 * OPTIONS.window


async def test_a_message_sent_twice_to_one_worker_may_be_acknowledged_twice() -> None:
    async with linked() as (link, notes, worker):
        send(link, *IDS[:2], at=now() - TIMEOUT - 1)
        await until(lambda: len(worker.messages) == 2, "arrived")
        worker.say(ack_frames([IDS[1]]))
        await until(lambda: notes.acknowledged, "acknowledged")
        link.look(now())
        send(link, IDS[0])
        worker.say(ack_frames([IDS[0]]))
        worker.say(ack_frames([IDS[0]]))
        await until(lambda: len(notes.acknowledged) == 3, "acknowledged twice")
        assert State.CONNECTED == link.state


async def test_a_worker_that_says_nothing_is_cut_off() -> None:
    """All that it has is taken back at once."""
    async with linked() as (link, notes, _):
        send(link, IDS[0], at=now() - TIMEOUT - 1)
        send(link, IDS[1])
        link._heard = now() - TIMEOUT - 1
        link.look(now())
        assert [(Fault.HUNG, sorted(IDS[:2]))] == notes.back
        assert (State.CUT_OFF, 0, set()) == (link.state, link.credit, link.held)


@pytest.mark.parametrize(
    ("said", "fault", "left"),
    [
        (ack_frames([IDS[9]]), Fault.UNKNOWN_ID, IDS[:2]),
        (ack_frames([IDS[0], IDS[9]]), Fault.UNKNOWN_ID, IDS[1:2]),
        (reject_frame(IDS[9], "no"), Fault.UNKNOWN_ID, IDS[:2]),
        (return_frames([IDS[9]]), Fault.UNKNOWN_ID, IDS[:2]),
        (b"\x02" + ack_frames([IDS[0]])[1:], Fault.BAD_FRAME, IDS[:2]),
        (ack_frames([IDS[0]]) + b"\x02" + ack_frames([IDS[1]])[1:], Fault.BAD_FRAME, IDS[1:2]),
        (return_frames([IDS[0]]) + b"nonsense", Fault.BAD_FRAME, IDS[1:2]),
        (process_frames([IDS[0]], [b"{}"]), Fault.BAD_FRAME, IDS[:2]),
        (b"\x01\x01\xff\xff\xff\xff", Fault.BAD_FRAME, IDS[:2]),
        (b"hello, is this a web server?", Fault.BAD_FRAME, IDS[:2]),
    ],
    ids=["never had", "behind", "reject", "return", "version", "good", "good return", "command", "length", "text"],
)
async def test_who_lies_or_talks_nonsense_is_cut_off(said: bytes, fault: Fault, left: list[bytes]) -> None:
    """And comes back after a pause, longer each time, with a clean slate. What it said well before counts."""
    async with linked() as (link, notes, worker):
        pauses = []
        for attempt in range(1, 4):
            send(link, *IDS[:2])
            await until(lambda: len(worker.messages) == 2, "arrived")
            worker.messages.clear()
            worker.say(said)
            await until(lambda: notes.back, "taken back")
            ((found, ids),) = notes.back
            assert (fault, sorted(left), attempt) == (found, ids, link.faults[fault])
            assert 2 - len(left) == len(notes.acknowledged) + len(notes.returned)
            notes.back.clear()
            notes.acknowledged.clear()
            notes.returned.clear()
            pauses.append(link._cut)
            await until(lambda: link.credit, "connected again")
        assert [0.05, 0.1, 0.2] == pauses


async def test_what_a_lost_worker_had_is_taken_back_at_once() -> None:
    async with linked() as (link, notes, worker):
        send(link, *IDS[:5])
        await until(lambda: len(worker.messages) == 5, "arrived")
        assert worker.writer is not None
        worker.writer.close()
        await until(lambda: notes.back, "taken back")
        assert [(Fault.LOST, sorted(IDS[:5]))] == notes.back
        await until(lambda: link.credit, "connected again")
        assert [State.CONNECTED, State.CONNECTING, State.CONNECTED] == notes.states


async def test_who_hangs_up_again_and_again_is_left_alone_for_longer() -> None:
    """Until it has acknowledged something."""
    async with linked() as (link, notes, worker):
        pauses = []
        for _ in range(4):
            assert worker.writer is not None
            worker.writer.close()
            await until(lambda: notes.states[-1] is State.CONNECTING, "lost")
            await until(lambda: link.credit, "connected again")
            pauses.append(link._pause)
        assert [0.05, 0.1, 0.2, 0.4] == pauses
        send(link, IDS[0])
        await until(lambda: worker.messages, "arrived")
        worker.say(ack_frames([IDS[0]]))
        await until(lambda: notes.acknowledged, "acknowledged")
        assert 0.0 == link._pause


async def test_a_worker_that_is_not_there_is_tried_again() -> None:
    port = free_port()
    link = Link(f"127.0.0.1:{port}", Notes(), OPTIONS)
    task = asyncio.create_task(link.run())
    await until(lambda: "cannot connect" in link.problem, "failed")
    server = await asyncio.start_server(Peer().serve, "127.0.0.1", port)
    await until(lambda: link.credit, "connected")
    link.close()
    task.cancel()
    server.close()
