"""Promises that something is stored, and the line in which answers wait for them."""

from __future__ import annotations

import asyncio
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from motorcade.broker.ticket import Line, Ticket
from motorcade.storage.ports import StoreError, StoreFullError, StoreRefusedError


def test_a_ticket_is_done_with_its_last_part() -> None:
    told: list[str] = []
    ticket = Ticket(2)
    ticket.part()
    ticket.then(partial(told.append, "before"))
    ticket.finish()
    ticket.finish()
    assert told == []
    assert ticket.done is False
    ticket.finish()
    assert told == ["before"]
    ticket.then(partial(told.append, "after"))
    assert told == ["before", "after"]


def test_a_ticket_without_parts_is_done() -> None:
    told: list[str] = []
    ticket = Ticket(0)
    ticket.then(partial(told.append, "now"))
    assert ticket.done and told == ["now"] and ticket.error is None


def test_whoever_is_told_may_ask_for_more() -> None:
    told: list[str] = []
    ticket = Ticket()

    def again() -> None:
        told.append("first")
        ticket.then(partial(told.append, "second"))

    ticket.then(again)
    ticket.then(partial(told.append, "third"))
    ticket.finish()
    assert told == ["first", "second", "third"]


def test_a_ticket_is_refused_if_certainly_nothing_was_stored() -> None:
    """And if the store answers: what it could not take in time is to be sent again."""
    for errors, refused in (
        ([None, None], False),
        ([StoreFullError("full")], True),
        ([StoreError("lost")], False),
        ([StoreRefusedError("not sent in time")], False),
        ([None, StoreError("lost")], False),
        ([StoreError("lost"), StoreFullError("full")], False),
        ([RuntimeError("a plugin's")], False),
    ):
        ticket = Ticket(len(errors))
        for error in errors:
            ticket.finish(error)
        assert ticket.refused is refused
        assert ticket.error is next((error for error in errors if error), None)


async def test_a_ticket_takes_what_futures_bring() -> None:
    loop = asyncio.get_running_loop()
    good, bad, late = loop.create_future(), loop.create_future(), loop.create_future()
    ticket = Ticket(0)
    ticket.after([good, bad, late])
    good.set_result(None)
    bad.set_exception(StoreFullError("full"))
    late.cancel()
    assert ticket.error is None
    await asyncio.sleep(0)
    assert ticket.done
    assert isinstance(ticket.error, StoreFullError)


async def test_a_future_that_is_given_up_is_an_error() -> None:
    future = asyncio.get_running_loop().create_future()
    ticket = Ticket(0)
    ticket.after([future])
    future.cancel()
    await asyncio.sleep(0)
    assert ticket.done and ticket.error is not None and not ticket.refused


def test_whoever_has_its_turn_may_join_again() -> None:
    told: list[str] = []
    line, ticket = Line(), Ticket()

    def again() -> None:
        told.append("first")
        line.join(Ticket(0), partial(told.append, "again"))

    line.join(ticket, again)
    line.join(ticket, partial(told.append, "second"))
    ticket.finish()
    assert told == ["first", "second", "again"] and line.answers == 0


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_the_order_of_a_line_is_that_of_joining(which: list[int], random: object) -> None:
    """However tickets are shared and in whatever order they are done; and a turn comes as soon as it can."""
    told: list[int] = []
    line = Line()
    tickets = [Ticket() for _ in range(5)]
    for number, ticket in enumerate(which):
        line.join(tickets[ticket], partial(told.append, number))
    order = list(range(5))
    random.shuffle(order)  # type: ignore[attr-defined]
    done: set[int] = set()
    for ticket in order:
        tickets[ticket].finish()
        done.add(ticket)
        expected = next((n for n, waits_for in enumerate(which) if waits_for not in done), len(which))
        assert told == list(range(expected))
        assert line.answers == len(which) - expected
