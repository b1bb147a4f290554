"""Records of the fan-out in the store, as MessagePack arrays whose first element is the version of the format.

    entry     [1, batch, request id, accepted at, expires at, priority, publisher, era]
    data      [1, SHA-256 digest, SHA-1 as hex, bytes, time]
    intent    [1, request id, VINs, time, [batch id, digest, appends, duplicates] or nil, member, in doubt]
    batch     [1, batch, digest, time, accepted, duplicates, replaced, rejected, superseded, VINs]
    request   [1, state, since, first at, last at, targets, cancelled at, era]
    untold    [1, member, receipt]
    claim     [1, member, batch]

    times     seconds since the epoch; expires at, cancelled at: 0 for never

Rule 1: fields are added at the end, with a default; shorter arrays are read as before.
Rule 2: an entry is the same for all vehicles of a batch, so that it is encoded once. What differs between them
        (position, attempts) is in the mailbox itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from motorcade.core.record import RecordError

MAX_APART: Final = 60.0  #: seconds that the clocks of two nodes may differ, with some to spare: with 30 none is let in

Status = Literal["active", "paused", "cancelled"]
T = TypeVar("T")


class EntryRecord(msgspec.Struct, array_like=True, tag=1, frozen=True, gc=False):
    """One message for one vehicle, but for its data, which is the payload of the entry."""

    batch: bytes  #: 16 bytes, the guid of the message that brought it; the same for all vehicles of the batch
    request_id: str
    accepted_at: float
    expires_at: float = 0.0  #: 0: not before the retention is over
    priority: Annotated[int, msgspec.Meta(ge=0, le=9)] = 0
    publisher: str = ""  #: client id of the platform
    era: int = 0  #: cancellations of its request before it was accepted


class DataRecord(msgspec.Struct, array_like=True, tag=1, frozen=True, gc=False):
    """Data of the two-step form, under the id that the platform has given it."""

    digest: bytes  #: SHA-256, the name of the blob
    sha1: str  #: hex
    size: int  #: bytes
    time: float  #: published last


class Named(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The identity of a batch with an id, however often it is sent (`dedup`)."""

    batch_id: str
    digest: bytes  #: of its vehicles and data
    appends: bool  #: its mode is `append`
    duplicates: int


class IntentRecord(msgspec.Struct, array_like=True, tag=1, frozen=True, gc=False):
    """A batch whose receipts may be missing, if the process dies now."""

    request_id: str
    vins: str  #: one after the other
    time: float
    named: Named | None = None  #: it has an id
    member: str = ""  #: who completes it, while that is alive; empty: a node by itself
    in_doubt: bool = False  #: that is being done by looking at what is stored (`recovery`)


class BatchRecord(msgspec.Struct, array_like=True, tag=1, frozen=True, gc=False):
    """A batch with an id that is stored, and what its publisher was told."""

    batch: bytes  #: the guid of the message that brought it, or the rest of it
    digest: bytes
    time: float
    accepted: int
    duplicates: int
    replaced: int
    rejected: int = 0
    superseded: int = 0
    missing: str = ""  #: VINs, one after the other, for which it is not stored


class RequestRecord(msgspec.Struct, array_like=True, tag=1, frozen=True, gc=False):
    """The decision of operators about a request. It need not exist: then the request is active."""

    state: Status = "active"
    since: float = 0.0  #: when the state became that
    first_at: float = 0.0  #: when the first batch of it was accepted
    last_at: float = 0.0  #: and the last one
    targets: int = 0  #: vehicles accepted, over all its batches
    cancelled_at: float = 0.0  #: entries accepted before are withdrawn, even if the request is in use again since
    era: int = 0  #: how often it was cancelled; 0, and `cancelled_at` is not: before eras were counted

    def cancels(self, entry: EntryRecord, retention: float) -> bool:
        """Return True if an entry of it is called off; `retention`: seconds for which decisions are kept at least.

        Eras decide, since clocks of nodes differ. The time says which cancellation is meant: decisions are forgotten,
        and eras begin again, when nothing that they concern is kept.
        """
        if not self.era:
            return entry.accepted_at < self.cancelled_at
        return entry.era < self.era and entry.accepted_at < self.cancelled_at + min(MAX_APART, retention)

    def over(self, before: float) -> bool:
        """Return True if it concerns nothing that was accepted after a time."""
        return self.state != "paused" and max(self.since, self.cancelled_at) <= before


class UntoldRecord(msgspec.Struct, array_like=True, tag=1, frozen=True, gc=False):
    """A final receipt that may not be in the stream yet."""

    member: str  #: who tells it, while that is alive
    receipt: bytes


class ClaimRecord(msgspec.Struct, array_like=True, tag=1, frozen=True, gc=False):
    """The right to store a batch with an id."""

    member: str
    batch: bytes  #: its guid there


def _decoder(kind: type[T]) -> Callable[[bytes], T]:
    decode = msgspec.msgpack.Decoder(kind).decode

    def decoded(value: bytes) -> T:
        try:
            return decode(value)
        except (msgspec.MsgspecError, ValueError) as error:
            raise RecordError(str(error)) from error

    return decoded


encode = msgspec.msgpack.Encoder().encode  #: a record as it is stored

# Each raises `RecordError`.
decode_entry = _decoder(EntryRecord)
decode_data = _decoder(DataRecord)
decode_intent = _decoder(IntentRecord)
decode_batch = _decoder(BatchRecord)
decode_request = _decoder(RequestRecord)
decode_untold = _decoder(UntoldRecord)
decode_claim = _decoder(ClaimRecord)
decode_time = _decoder(float)  #: of the last cancellation that has to be collected
