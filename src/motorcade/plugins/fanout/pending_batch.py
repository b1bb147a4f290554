"""A batch on its way into the store, and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from secrets import token_bytes

from motorcade.commit import Commit
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import Handled
from motorcade.plugins.fanout.batch import Batch
from motorcade.plugins.fanout.record import BatchRecord, EntryRecord, IntentRecord, Named
from motorcade.storage.ports import Appended

End = tuple[str, int]  #: VIN and position of an entry that has ended


class BatchResult:
    """What became of a batch."""

    __slots__ = ("accepted", "duplicates", "reason", "refusal", "rejected", "repeated", "replaced", "superseded")

    def __init__(self, duplicates: int) -> None:
        self.refusal = ""  #: why nothing of it was taken
        self.reason = ReasonCode.PAYLOAD_FORMAT_INVALID  #: the same as a code
        self.accepted = 0
        self.duplicates = duplicates
        self.replaced = 0
        self.rejected = 0
        self.superseded = 0
        self.repeated = False

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
    """How far a batch is."""

    APPENDING = auto()  #: its entries are being stored, or it waits for that
    READY = auto()  #: its receipts can be written
    CHECKING = auto()  #: something has to be found out, or stored, before that
    WRITING = auto()  #: its receipts are being written
    UNKNOWN = auto()  #: a part of its entries may be stored, which is found out in its turn
    RECOVERING = auto()  #: that is being done
    DONE = auto()  #: everything about it is stored, or nothing is


class PendingBatch:
    """A batch on its way."""

    __slots__ = (
        "answers",
        "data",
        "done",
        "ends",
        "entry",
        "failed",
        "guid",
        "is_behind_unknown",
        "key",
        "known",
        "named",
        "never_accepted",
        "now",
        "over",
        "parsed",
        "positions",
        "publisher",
        "rejected",
        "replaced",
        "result",
        "stage",
    )

    def __init__(self, parsed: Batch, message: Message, now: float, named: Named | None = None) -> None:
        self.parsed = parsed
        self.named = named  #: it has an id
        self.known: BatchRecord | None = None  #: a part of it was stored before; this is the rest
        self.guid = message.guid or token_bytes(16)
        self.key = self.guid.hex()  #: of its intent
        self.publisher = message.publisher
        self.now = now
        self.data = parsed.data
        self.stage = Stage.APPENDING
        self.failed = False
        self.result = BatchResult(parsed.duplicates)
        self.done: Commit[None] = Commit()  #: the publisher is answered
        self.over: Commit[None] = Commit()  #: the same, and its messages may be sent: the next batch may end
        self.entry: EntryRecord | None = None
        self.answers: Sequence[Appended] = ()
        self.positions: Sequence[int] = ()  #: of its entries
        self.replaced: list[End] = []  #: entries that went when its own were appended
        self.rejected: list[End] = []  #: its own that are one too many for their vehicle
        self.ends: list[End] | None = None  #: of `replaced`, those that have ended by that
        self.is_behind_unknown = False  #: some of `replaced` may be of a batch that was stored in part
        self.never_accepted: list[End] = []  #: of these, those without any receipt

    def intent(self) -> IntentRecord:
        """Return what is stored with its entries."""
        return IntentRecord(self.parsed.request_id, "".join(self.parsed.vins), self.now, self.named)
