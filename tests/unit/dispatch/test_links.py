"""One worker as its leader sees it: credit, windows, and what it may not do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from motorcade.dispatch.frames import Answers, ack_frames, process_frames, reject_frame, return_frames
from motorcade.dispatch.links import FIRST_WINDOW, Fault, LinkState, WorkerLink
from motorcade.dispatch.options import DispatchOptions
from tests.support.ports import free_port
from tests.support.standing_clock import clock, turn, until
from tests.unit.dispatch.rig import IDS, Peer, peer

TIMEOUT = 200.0
OPTIONS = DispatchOptions(ack_timeout=TIMEOUT, remember=2000.0, window=64, cut_off=10.0)


class Notes:
    """A leader that writes down what it is told."""

    def __init__(self) -> None:
        self.acknowledged: list[bytes] = []
        self.rejected: list[tuple[bytes, str]] = []
        self.returned: list[bytes] = []
        self.back: list[tuple[Fault, list[bytes]]] = []
        self.states: list[LinkState] = []

    def answered(self, link: WorkerLink, answers: Answers) -> None:
        self.acknowledged += answers.acknowledged
        self.rejected += answers.rejected
        self.returned += answers.returned

    def taken_back(self, link: WorkerLink, ids: Sequence[bytes], fault: Fault, detail: str) -> None:
        self.back.append((fault, sorted(ids)))

    def changed(self, link: WorkerLink) -> None:
        self.states.append(link.state)


@asynccontextmanager
async def linked(options: DispatchOptions = OPTIONS) -> AsyncIterator[tuple[WorkerLink, Notes, Peer]]:
    async with peer() as worker:
        notes = Notes()
        link = WorkerLink(worker.name, notes, options)
        task = asyncio.create_task(link.run())
        await until(lambda: link.credit, "connected")
        yield link, notes, worker
        link.close()
        task.cancel()


async def send(link: WorkerLink, *ids: bytes) -> None:
    """Messages that have reached the worker when this returns."""
    link.send(list(ids), [b"{}"] * len(ids), clock().time())
    await clock().quiet()


async def say(worker: Peer, data: bytes) -> None:
    """Something that has reached the leader when this returns."""
    worker.say(data)
    await clock().quiet()


async def look(link: WorkerLink, later: float = 0.0) -> None:
    """After so many seconds."""
    await turn(later)
    link.look(clock().time())


# -- credit and windows


async def test_credit_is_what_the_window_has_left() -> None:
    """In messages, and in size_bytes: one message may always be sent, the next when some room is left."""
    async with linked() as (link, notes, worker):
        assert FIRST_WINDOW == link.credit
        await send(link, *IDS[:10])
        assert (FIRST_WINDOW - 10, IDS[:10]) == (link.credit, worker.ids)
        await say(worker, ack_frames(IDS[:4]))
        assert (FIRST_WINDOW - 6, 4, IDS[:4]) == (link.credit, link.acknowledged, notes.acknowledged)
    async with linked(DispatchOptions(window_bytes=1000)) as (link, _, worker):
        link.send([IDS[0]], [b"x" * 5000], clock().time())
        assert 0 == link.credit
        await clock().quiet()
        await say(worker, ack_frames([IDS[0]]))
        assert (FIRST_WINDOW, 0) == (link.credit, link.in_flight_bytes)


async def test_a_window_that_is_used_up_quickly_grows() -> None:
    """Up to the largest; one that is not used up, or of which nothing is acknowledged, stays."""
    async with linked() as (link, _, worker):
        await look(link)
        assert FIRST_WINDOW == link.window
        for size in (16, 32, 64, 64):
            assert size == link.credit
            await send(link, *IDS[:size])
            for _ in range(3):
                await look(link)
            assert (size, 0) == (link.window, link.credit)
            await say(worker, ack_frames(IDS[:size]))
            await look(link)


async def test_a_window_grows_when_a_whole_window_was_acknowledged() -> None:
    """Not at every look: a slow worker would have far too much in hand before the first of it is old."""
    async with linked() as (link, _, worker):
        sizes = []
        for number in range(32):
            await send(link, *IDS[number + len(link.held) :][: link.credit])
            await say(worker, ack_frames(IDS[number : number + 1]))
            await look(link)
            sizes.append(link.window)
        assert [16] * 15 + [32] * 17 == sizes


async def test_the_window_of_a_slow_worker_shrinks() -> None:
    """Before anything is overdue: half of the time has gone. Step by step, with time between two steps."""
    async with linked() as (link, notes, _):
        await send(link, *IDS[:16])
        sizes = []
        for seconds in (49, 50, 2, 1, 50, 47):
            await look(link, seconds)
            sizes.append(link.window)
        assert [16, 16, 8, 8, 4, 4] == sizes
        assert [] == notes.back


async def test_a_few_slow_messages_do_not_make_the_window_smaller() -> None:
    async with linked() as (link, _, worker):
        await send(link, *IDS[:16])
        await say(worker, ack_frames(IDS[:13]))
        await look(link, 150)
        assert 16 == link.window


async def test_a_window_that_was_made_smaller_grows_when_it_was_acknowledged() -> None:
    """What was acknowledged before says nothing of the new one."""
    async with linked() as (link, _, worker):
        await send(link, *IDS[:16])
        await say(worker, ack_frames(IDS[:11]))
        await look(link, 101)
        assert 8 == link.window
        await say(worker, ack_frames(IDS[11:16]))
        await send(link, *IDS[16:24])
        await say(worker, ack_frames(IDS[16:18]))
        await look(link)
        assert 8 == link.window, "seven were acknowledged since"
        await send(link, *IDS[24:26])
        await say(worker, ack_frames(IDS[18:19]))
        await look(link)
        assert 16 == link.window


# -- what is overdue, and what is said twice


async def test_what_is_overdue_at_a_worker_that_answers_is_taken_back() -> None:
    """The rest stays with it, and so does the worker."""
    async with linked() as (link, notes, worker):
        await send(link, *IDS[:2])
        await turn(TIMEOUT + 1)
        await send(link, IDS[2])
        await say(worker, ack_frames([IDS[0]]))
        await look(link)
        assert [(Fault.OVERDUE, [IDS[1]])] == notes.back
        assert (LinkState.CONNECTED, {IDS[2]}) == (link.state, link.held)


async def test_a_late_acknowledgement_is_no_lie() -> None:
    """Refusing what another worker has already means nothing; nor does a second acknowledgement."""
    async with linked() as (link, notes, worker):
        await send(link, *IDS[:3])
        await turn(TIMEOUT + 1)
        await send(link, IDS[3])
        await say(worker, ack_frames([IDS[3]]))
        await look(link)
        late = ack_frames([IDS[0]]) + reject_frame(IDS[1], "no") + return_frames([IDS[2]])
        await say(worker, late)
        assert [IDS[3], IDS[0]] == notes.acknowledged
        assert ([], [], LinkState.CONNECTED) == (notes.rejected, notes.returned, link.state)
        await say(worker, late)
        assert (3, LinkState.CONNECTED, [IDS[3], IDS[0]]) == (
            link.faults[Fault.REPEATED],
            link.state,
            notes.acknowledged,
        )


async def test_a_second_acknowledgement_is_harmless() -> None:
    """In one read or in several, after all that was sent with it was answered, and with a refusal before it."""
    async with linked() as (link, notes, worker):
        await send(link, *IDS[:4])
        repeated = []
        for said in (
            ack_frames([IDS[0], IDS[0]]),
            ack_frames([IDS[0], IDS[1]]) + reject_frame(IDS[2], "no"),
            ack_frames([IDS[2], IDS[3]]) * 2,
        ):
            await say(worker, said)
            repeated.append(link.faults[Fault.REPEATED])
        await look(link)
        await say(worker, ack_frames(IDS[:4]))
        assert [1, 2, 5, 9] == [*repeated, link.faults[Fault.REPEATED]]
        assert ([IDS[0], IDS[1], IDS[3]], [(IDS[2], "no")]) == (notes.acknowledged, notes.rejected)
        assert (LinkState.CONNECTED, [], 3) == (link.state, notes.back, link.acknowledged)
        assert FIRST_WINDOW == link.credit


async def test_a_message_sent_twice_to_one_worker_may_be_acknowledged_twice() -> None:
    async with linked() as (link, notes, worker):
        await send(link, *IDS[:2])
        await turn(TIMEOUT + 1)
        await say(worker, ack_frames([IDS[1]]))
        await look(link)
        await send(link, IDS[0])
        await say(worker, ack_frames([IDS[0]]))
        await say(worker, ack_frames([IDS[0]]))
        assert (LinkState.CONNECTED, 3) == (link.state, len(notes.acknowledged))


async def test_ids_that_were_answered_are_not_kept_for_ever() -> None:
    async with linked() as (link, _, worker):
        for start in [*range(0, 200, 10)] * 3:
            await send(link, *IDS[start : start + 10])
            await say(worker, ack_frames(IDS[start : start + 10]))
            await look(link)
        assert sum(map(len, link._past)) == link._past_ids <= 4 * OPTIONS.window


# -- who is cut off, and who is lost


async def test_a_worker_that_says_nothing_is_cut_off() -> None:
    """All that it has is taken back at once."""
    async with linked() as (link, notes, _):
        await send(link, IDS[0])
        await turn(TIMEOUT - 1)
        await send(link, IDS[1])
        await look(link, 1)
        assert [(Fault.HUNG, sorted(IDS[:2]))] == notes.back
        assert (LinkState.CUT_OFF, 0, set()) == (link.state, link.credit, link.held)


#: What a worker says that has the first two messages, what that is called, and which of them are taken back.
LIES = [
    (ack_frames([IDS[9]]), Fault.UNKNOWN_ID, IDS[:2]),
    (ack_frames([IDS[0], IDS[9]]), Fault.UNKNOWN_ID, IDS[1:2]),
    (ack_frames([IDS[9]]) * 1000, Fault.UNKNOWN_ID, IDS[:2]),
    (reject_frame(IDS[9], "no"), Fault.UNKNOWN_ID, IDS[:2]),
    (return_frames([IDS[9]]), Fault.UNKNOWN_ID, IDS[:2]),
    (b"\x02" + ack_frames([IDS[0]])[1:], Fault.BAD_FRAME, IDS[:2]),
    (ack_frames([IDS[0]]) + b"\x02" + ack_frames([IDS[1]])[1:], Fault.BAD_FRAME, IDS[1:2]),
    (return_frames([IDS[0]]) + b"nonsense", Fault.BAD_FRAME, IDS[1:2]),
    (process_frames([IDS[0]], [b"{}"]), Fault.BAD_FRAME, IDS[:2]),
    (b"\x01\x01\xff\xff\xff\xff", Fault.BAD_FRAME, IDS[:2]),
    (b"hello, is this a web server?", Fault.BAD_FRAME, IDS[:2]),
]


async def test_who_lies_or_talks_nonsense_is_cut_off() -> None:
    """And comes back after a pause, longer each time, with a clean slate. What it said well before counts."""
    for said, fault, left in LIES:
        async with linked() as (link, notes, worker):
            for attempt, pause in enumerate((10.0, 20.0, 40.0), 1):
                await send(link, *IDS[:2])
                await say(worker, said)
                assert ([(fault, sorted(left))], attempt) == (notes.back, link.faults[fault]), said[:50]
                assert 2 - len(left) == len(notes.acknowledged) + len(notes.returned), said[:50]
                notes.__init__()  # type: ignore[misc]
                await turn(pause - 0.1)
                assert (LinkState.CUT_OFF, attempt) == (link.state, worker.connections)
                await turn(0.2)
                assert FIRST_WINDOW == link.credit, "it is connected again"


async def test_what_a_lost_worker_had_is_taken_back_at_once() -> None:
    """Who hangs up again and again is left alone for longer, until it has acknowledged something."""
    async with linked() as (link, notes, worker):
        await send(link, *IDS[:5])
        worker.hang_up()
        await clock().quiet()
        assert [(Fault.LOST, sorted(IDS[:5]))] == notes.back
        await until(lambda: link.credit, "connected again")
        assert [LinkState.CONNECTED, LinkState.CONNECTING, LinkState.CONNECTED] == notes.states
        pauses = []
        for _ in range(4):
            worker.hang_up()
            await clock().quiet()
            assert LinkState.CONNECTING is notes.states[-1]
            began = clock().time()
            await until(lambda: link.credit, "connected again")
            pauses.append(round(clock().time() - began, 3))
        assert [0.1, 0.2, 0.4, 0.8] == pauses
        await send(link, IDS[0])
        await say(worker, ack_frames([IDS[0]]))
        worker.hang_up()
        await clock().quiet()
        began = clock().time()
        await until(lambda: link.credit, "connected again")
        assert 0.05 == round(clock().time() - began, 3)


async def test_a_worker_that_is_not_there_is_tried_again() -> None:
    port = free_port()
    link = WorkerLink(f"127.0.0.1:{port}", Notes(), OPTIONS)
    task = asyncio.create_task(link.run())
    await turn(60.0)
    assert "cannot connect" in link.problem
    server = await asyncio.start_server(Peer().serve, "127.0.0.1", port)
    await until(lambda: link.credit, "connected", within=3.0)
    link.close()
    task.cancel()
    server.close()
