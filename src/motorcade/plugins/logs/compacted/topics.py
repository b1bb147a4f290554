"""The topics of compacted queues: what is published to them, and subscribed to.

    publish     $ECQ/w/{CLIENTID}/{key}     append to the queue of a client
                $ECQ/rewind/{CLIENTID}      by the client itself: get messages again
    subscribe   $ECQ/{CLIENTID}/#           by the client itself, with QoS 1

    publish     $SCQ/w/{QUEUE}/{key}        append to a shared queue
                $SCQ/rewind/{QUEUE}         get messages of it again; no other consumer does
    subscribe   $SCQ/{QUEUE}/#              with QoS 1

A name is one level, a key all that follows it. Everything else below `$ECQ` and `$SCQ` is refused, and nothing of it is
ever routed. What is published and what is subscribed to have nothing in common, so a client may be called `w`. A shared
queue may not: who subscribes to `$SCQ/w/#` means to watch producers, and would get nothing.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from motorcade.core.reasons import ReasonCode
from motorcade.core.subscription import Subscription
from motorcade.core.topic import SHARE
from motorcade.extension.compacted import CompactedKind
from motorcade.plugins.logs.compacted.tables import EXCLUSIVE, SHARED, Shape

ROOTS: Final = {shape.root: shape for shape in (EXCLUSIVE, SHARED)}
TOPICS: Final = tuple(f"{root}/#" for root in ROOTS)  #: all there is
WRITE: Final = "w"
REWIND: Final = "rewind"
ROOT: Final = len(EXCLUSIVE.root)
WRITING: Final = {f"{shape.root}/{WRITE}/": shape for shape in (EXCLUSIVE, SHARED)}
PLACE: Final = len(f"{EXCLUSIVE.root}/{WRITE}/")  #: where the name begins in a topic that is written to
RESERVED: Final = (WRITE, REWIND)  #: no names of shared queues
SHOWN: Final = 64  #: characters of a name that a message quotes


class Refusal(NamedTuple):
    """A refusal: its reason code and detail."""

    reason: ReasonCode
    detail: str


def quoted(name: str) -> str:
    """Return a name as messages show it."""
    return repr(name if len(name) <= SHOWN else f"{name[:SHOWN]}…")


def what(shape: Shape) -> str:
    """Return the placeholder for the name of a queue, for people."""
    return "CLIENTID" if shape.form is CompactedKind.EXCLUSIVE else "QUEUE"


def consumed(filter_: str) -> tuple[Shape, str] | None:
    """Return the queue that a filter consumes; None: it is none of ours, or not well formed."""
    shape = ROOTS.get(filter_[:ROOT])
    if shape is None:
        return None
    levels = filter_[ROOT:].split("/")
    if len(levels) != 3 or levels[0] or levels[2] != "#" or levels[1] in ("", "+", "#"):
        return None
    return shape, levels[1]


def judge(client_id: str, subscription: Subscription, max_name: int) -> Refusal | None:
    """Return why a client cannot subscribe so; None: it can, or it is not our business."""
    filter_ = subscription.filter
    if filter_.startswith(f"{SHARE}/"):
        inner = filter_.split("/", 2)[-1]
        shape = _root_of(inner)
        if shape is None:
            return None
        return Refusal(
            ReasonCode.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED,
            f"compacted queues have no shared subscriptions: subscribe to {shape.root}/{what(shape)}/#",
        )
    shape = _root_of(filter_)
    return _judge(shape, client_id, subscription, max_name) if shape is not None else None


def _root_of(filter_: str) -> Shape | None:
    return ROOTS.get(filter_.split("/", 1)[0])


def _judge(shape: Shape, client_id: str, subscription: Subscription, max_name: int) -> Refusal | None:
    found = consumed(subscription.filter)
    if found is None:
        return Refusal(
            ReasonCode.TOPIC_FILTER_INVALID,
            f"a compacted queue is consumed as a whole: subscribe to {shape.root}/{what(shape)}/#",
        )
    name = found[1]
    if shape.form is CompactedKind.EXCLUSIVE and name != client_id:
        return Refusal(ReasonCode.NOT_AUTHORIZED, f"the queue of {quoted(name)} is for the client of that id alone")
    if shape.form is CompactedKind.SHARED and name in RESERVED:
        return Refusal(
            ReasonCode.TOPIC_FILTER_INVALID, f"no shared queue is called {name!r}; producers cannot be watched"
        )
    if len(name.encode()) > max_name:
        return Refusal(ReasonCode.TOPIC_FILTER_INVALID, f"the name is longer than {max_name} bytes (max_name)")
    if subscription.qos != 1:
        return Refusal(
            ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,
            f"a compacted queue is consumed with QoS 1, not {subscription.qos}: progress needs acknowledgements",
        )
    return None
