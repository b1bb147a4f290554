"""Addressed filters: those that name their own client, such as `agent/{client}/#`, where there are millions of clients.

    pattern `agent/{client}/#`     filter agent/V1/# of client V1    ─▶ a record in its home, and nothing else
                                   topic  agent/V1/cmd               ─▶ is offered to client V1 (`Batch.offer`)

A durable session's filter that lies inside a pattern is in no member's tables but that of the member to which its
client is attached. Publishing to a topic that fits the pattern asks the home of the client that the topic names: the
store finds its filters, appends, and answers where the client is attached.

Rule 1: all members have the same patterns (`membership.objection`): a member without one would not ask.
Rule 2: a topic that names a client is for the durable session of this client by way of the store alone, whatever filter
        of it matches, and wherever it is: also if it seems to be here. So no member needs to have heard of a filter.
Rule 3: clean sessions, other clients, and shared groups are served as if there were no pattern.
Rule 4: messages of QoS 0 go to a client that is here from here, to others by way of the store, which says where they
        are. A member that gets such a message anyway gives it to all of its clients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from motorcade.core.errors import TopicError
from motorcade.core.topic import check_filter

CLIENT: Final = "{client}"  #: the level of a pattern that is the id of the subscriber
MAX_PATTERNS: Final = 16  #: each is compared with every new topic


class Addressing:
    """The patterns of a cluster."""

    __slots__ = ("_patterns",)

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._patterns = [pattern.split("/") for pattern in patterns]

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def clients_of(self, topic: str) -> tuple[str, ...]:
        """Return the clients that a topic names."""
        if not self._patterns or topic[0] == "$":
            return ()
        levels = topic.split("/")
        found = (_named(pattern, levels) for pattern in self._patterns)
        return tuple(dict.fromkeys(client_id for client_id in found if client_id))

    def covers(self, client_id: str, filter_: str) -> bool:
        """Return True if all topics of a client's filter name this client."""
        if not self._patterns or client_id not in filter_ or client_id in ("+", "#") or filter_[0] == "$":
            return False
        levels = filter_.split("/")
        return any(_lies_inside(levels, pattern, client_id) for pattern in self._patterns)


def _named(pattern: list[str], topic: list[str]) -> str:
    """Return the level of a topic that stands where the pattern has the client; nothing if it does not fit."""
    client_id = ""
    for number, level in enumerate(pattern):
        if level == "#":
            return client_id
        if number == len(topic):
            return ""
        if level == CLIENT:
            client_id = topic[number]
        elif level not in ("+", topic[number]):
            return ""
    return client_id if len(topic) == len(pattern) else ""


def _lies_inside(filter_: list[str], pattern: list[str], client_id: str) -> bool:
    for number, level in enumerate(pattern):
        if level == "#":
            return True
        if number == len(filter_) or filter_[number] == "#":
            return False
        if level != "+" and filter_[number] != (client_id if level == CLIENT else level):
            return False
    return len(filter_) == len(pattern)


def problem_of(pattern: str) -> str:
    """Return what is wrong with a pattern, and what to write; nothing if it may be used."""
    try:
        check_filter(pattern)
    except TopicError as error:
        return f"{pattern!r} is not a filter: {error}"
    levels = pattern.split("/")
    if levels[0].startswith("$"):
        return f"{pattern!r} begins with $: such topics cannot be addressed"
    if levels.count(CLIENT) != 1:
        return f"{pattern!r} must have the level {CLIENT} once, for the id of the client, as in agent/{CLIENT}/#"
    if odd := next((level for level in levels if "{" in level and level != CLIENT), ""):
        return f"{pattern!r} has {odd!r}, but {CLIENT} is all that can be filled in"
    return ""
