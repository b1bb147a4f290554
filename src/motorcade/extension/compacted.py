"""Compacted queues: what operators see of them and may do to them.

A compacted queue keeps the last value of each key, in the order of sequence numbers. The *exclusive* form belongs to
one client and is called by its client id; the *shared* form has a name and any number of consumers. They are not
declared: a queue is there from its first message until it is deleted. The plugin that has them offers one
`Compacted` as the service `compacted`; HTTP and the command line serve it.

Rule 1: looking changes nothing; every answer is a copy.
Rule 2: sequence numbers of a queue grow and are never used again, not even after `delete`.
Rule 3: a consumer's progress is the highest number with nothing unacknowledged at or below it. Only a rewind takes it
        back.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum, auto
from typing import Final, Protocol

import msgspec

from motorcade.extension.declared import FoundMessage

SERVICE: Final = "compacted"  #: name of the service


class CompactedKind(StrEnum):
    """The form of a queue."""

    EXCLUSIVE = auto()  #: `$ECQ/{CLIENTID}/#`
    SHARED = auto()  #: `$SCQ/{QUEUE}/#`


class ConsumerView(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of one client with a queue."""

    client: str
    connected: bool  #: it consumes now
    progress: int  #: everything up to this number was acknowledged; 0: nothing yet
    acked_at: float | None = None  #: when it has last acknowledged something; None: never
    waiting: int  #: messages after its progress, those in flight too
    in_flight: int = 0  #: sent and not acknowledged


class CompactedView(msgspec.Struct, frozen=True, kw_only=True):
    """A compacted queue, at one moment. What is beyond retention counts until it is collected, but is not delivered."""

    kind: CompactedKind
    name: str
    messages: int  #: one for each key
    bytes: int
    first: int  #: number of the oldest message; 0: empty
    last: int  #: number given last, whether that message is still there or not
    oldest: float | None = None  #: time at which the oldest message was appended; only in the view of one queue
    consumers: int  #: that have progress, connected or not
    consuming: tuple[ConsumerView, ...] = ()  #: by client id, the first 1000; only in the view of one queue
    #: Nodes that did not answer, if there are any, and why: consumers there are shown as stored; likewise.
    unanswered: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class RewindView(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a rewind, or of a plan for one."""

    kind: CompactedKind
    name: str
    consumer: str
    preview: bool  #: nothing was changed
    before: int  #: its progress before
    progress: int  #: and after; what comes after this number is delivered next
    messages: int  #: that will be delivered: those after `progress` as they are now, compacted
    bytes: int
    first: int  #: number of the first of them; 0: there are none
    last: int
    skipped: int = 0  #: messages that it has not acknowledged and will not get, since it was taken forward


class Compacted(Protocol):
    """All compacted queues of a node."""

    async def list(self, kind: CompactedKind, after: str = "", limit: int = 100) -> Sequence[CompactedView]:
        """Return up to `limit` queues whose names come after `after`, by name (in the order of code points)."""

    async def show(self, kind: CompactedKind, name: str) -> CompactedView:
        """Return one queue with its consumers; `UnknownError`."""

    async def rewind(
        self,
        kind: CompactedKind,
        name: str,
        consumer: str = "",
        *,
        to: int | None = None,
        since: float | None = None,
        preview: bool = False,
    ) -> RewindView:
        """Let a consumer get messages again: number `to` is the next, or everything appended at `since` or later.

        Exactly one of the two is given, else `BadOptionsError`; so answers a `to` that is negative or more than one
        above the last number. `to` may lie ahead of the consumer's progress: it skips what is between. `since` (seconds
        since the epoch) only ever takes it back. The consumer of an exclusive queue need not be named; one of a shared
        queue must be. `UnknownError` if there is no such queue, or it has no such consumer.
        """

    async def read(self, kind: CompactedKind, name: str, after: int = 0, limit: int = 100) -> Sequence[FoundMessage]:
        """Return up to `limit` messages after a number, oldest first, as they would be delivered; `UnknownError`.

        `position` is the sequence number, `topic` that of the delivery; `properties` has the `key`.
        """

    async def delete(self, kind: CompactedKind, name: str) -> None:
        """Remove a queue with its messages and all progress; `UnknownError`. Who consumes it gets what comes later."""
