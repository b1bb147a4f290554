"""A batch on its way into the store, and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from motorcade.commit import Commit
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import Handled
from motorcade.plugins.fanout.batch import FanoutBatch
from motorcade.plugins.fanout.record import BatchRecord, EntryRecord, IntentRecord, Named
from motorcade.storage.ports import Appended

End = tuple[str, int]  #: VIN and position of an entry that has ended


@dataclass(slots=True, eq=False)
class BatchResult:
    """The result of a batch."""

    duplicates: int
    accepted: int = 0
    replaced: int = 0
    rejected: int = 0
    superseded: int = 0
    repeated: bool = False
    refusal: str = ""  #: why nothing of it was taken
    reason: ReasonCode = ReasonCode.PAYLOAD_FORMAT_INVALID  #: the same as a code

    def refuse(self, refusal: str, reason: ReasonCode = ReasonCode.PAYLOAD_FORMAT_INVALID) -> None:
        """Take nothing of it."""
        self.refusal, self.reason = refusal, reason

    def repeat(self, known: BatchRecord) -> None:
        """Answer as before: it was taken then."""
        self.repeated = True
        self.accepted, self.duplicates, self.replaced = known.accepted, known.duplicates, known.replaced
        self.rejected, self.superseded = known.rejected, known.superseded

    def add(self, known: BatchRecord) -> None:
        """Add the part of it that was taken before."""
        self.accepted += known.accepted
        self.replaced += known.replaced
        self.rejected += known.rejected
        self.superseded += known.superseded

    def answer(self) -> Handled:
        """Return the answer to the publisher."""
        if self.refusal:
            return Handled(self.reason, self.refusal)
        figures = [("accepted", str(self.accepted)), ("duplicates", str(self.duplicates))]
        figures.append(("replaced", str(self.replaced)))
        if self.rejected:
            figures.append(("rejected", str(self.rejected)))
        if self.superseded:
            figures.append(("superseded", str(self.superseded)))
        if self.repeated:
            figures.append(("repeated", "1"))
        return Handled(user_properties=tuple(figures))


class Stage(Enum):
    """The progress of a batch."""

    APPENDING = auto()  #: its entries are being stored, or it waits for that
    READY = auto()  #: its receipts can be written
    CHECKING = auto()  #: something has to be found out, or stored, before that
    WRITING = auto()  #: its receipts are being written
    UNKNOWN = auto()  #: a part of its entries may be stored, which is found out in its turn
    RECOVERING = auto()  #: that is being done
    DONE = auto()  #: everything about it is stored, or nothing is


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch on its way."""

    parsed: FanoutBatch
    result: BatchResult
    guid: bytes
    publisher: str
    now: float
    named: Named | None  #: it has an id
    data: bytes | None  #: None: it is to be looked up
    era: int = 0  #: cancellations of its request before it came
    member: str = ""  #: that completes it; empty: a node by itself
    known: BatchRecord | None = None  #: a part of it was stored before; this is the rest
    stage: Stage = Stage.APPENDING
    failed: bool = False
    done: Commit[None] = field(default_factory=Commit)  #: the publisher is answered
    told: Commit[None] = field(default_factory=Commit)  #: its `accepted` receipts are stored, or it is in doubt
    over: Commit[None] = field(default_factory=Commit)  #: and its messages may be sent: the next batch may end
    entry: EntryRecord | None = None
    answers: Sequence[Appended] = ()
    positions: Sequence[int] = ()  #: of its entries
    replaced: Sequence[End] = ()  #: entries that went when its own were appended
    rejected: list[End] = field(default_factory=list)  #: its own that are one too many for their vehicle
    ends: list[End] | None = None  #: of `replaced`, those that have ended by that
    is_behind_unknown: bool = False  #: some of `replaced` may be of a batch that was stored in part
    never_accepted: Sequence[End] = ()  #: of these, those without any receipt

    def intent(self) -> IntentRecord:
        """Return what is stored with its entries."""
        return IntentRecord(self.parsed.request_id, "".join(self.parsed.vins), self.now, self.named, self.member)
