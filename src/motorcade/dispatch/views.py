"""Reports of leaders and workers; the leader's view is kept in Redis for `dispatch status`."""

from __future__ import annotations

import msgspec


class RateReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the last report."""

    messages_per_second: float
    messages: int
    total: int
    in_flight: int
    workers: int = 0
    redistributed: int = 0
    dead: int = 0
    held_up: int = 0  #: times that a leader did not read because no worker had credit
    trimmed: int = 0  #: entries of the intake that were trimmed before they were read or finished, ever
    refused: int = 0  #: of a worker: messages that its handler could not work on
    repeated: int = 0  #: of a worker: messages whose result had been written before
    returned: int = 0  #: of a worker: messages that were given back, since their result could not be written
    stale: int = 0  #: of a worker: results that came too late to be written
    strangers: int = 0  #: of a worker: connections that were refused for want of the secret


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as the leader sees it."""

    worker: str
    state: str
    in_flight: int
    window: int  #: messages that it may have at once, now
    credit: int  #: messages that it could be sent now
    acknowledged: int
    faults: dict[str, int]
    problem: str  #: what keeps it from being connected; empty: nothing


class LeaderView(msgspec.Struct, frozen=True, kw_only=True):
    """A leader, as it was when it renewed its lease last."""

    token: str
    epoch: int
    time: float
    messages_per_second: float
    read: int
    acknowledged: int
    redistributed: int
    dead_lettered: int = msgspec.field(name="buried")  #: the name in --json
    in_flight: int
    held_up: int
    trimmed: int = 0  #: entries of the intake that were trimmed before they were read, ever
    unfinished: int = 0  #: those that were read, and trimmed before they could be read again after a failure
    channel_dropped: int
    channel_gaps: int
    workers: tuple[WorkerView, ...]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an operator asks for first."""

    leader: str  #: HOST:PID; empty: there is no leader
    epoch: int
    lease_left: float  #: seconds
    lag: int  #: messages that were not read yet
    trimmed: int  #: entries of the intake that were trimmed before they were read, ever
    unfinished: int  #: those that were read, and trimmed before they could be read again after a failure
    pending: int  #: messages in flight to a worker
    dead: int
    processed: int  #: entries of the stream of results
    registered: tuple[str, ...]  #: workers in the registry
    view: LeaderView | None  #: the leader's last report


class DeadLetterView(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was given up."""

    entry: str  #: in the stream of dead letters
    id: str
    payload: bytes
    reason: str
    deliveries: int
    worker: str
    time: float
