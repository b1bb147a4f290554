"""What to do with a pending entry, at the very moment."""

from __future__ import annotations

from collections import Counter

from motorcade.plugins.fanout.inflight import EntryVerdict, InflightTable
from motorcade.plugins.fanout.options import FanoutConfig
from motorcade.plugins.fanout.record import EntryRecord, RequestRecord
from motorcade.plugins.fanout.triggers import Triggers

CONFIG = FanoutConfig()


def judged(entry: EntryRecord, now: float, request: RequestRecord | None = None) -> EntryVerdict:
    table = InflightTable(CONFIG, Triggers(1, Counter()))
    if request is not None:
        table.requests[entry.request_id] = request
    return table.judge(entry, now)


def test_an_entry_expires_when_its_time_has_come() -> None:
    entry = EntryRecord(b"", "r", 10.0, 20.0)
    assert (EntryVerdict.SEND, EntryVerdict.EXPIRED) == (judged(entry, 19.9), judged(entry, 20.0))
    lasting, end = EntryRecord(b"", "r", 10.0), 10.0 + CONFIG.data_retention
    assert (EntryVerdict.SEND, EntryVerdict.OUTDATED) == (judged(lasting, end - 0.1), judged(lasting, end))


def test_what_was_accepted_before_a_request_was_cancelled_is_withdrawn() -> None:
    """What came at the same time or later belongs to the request that is in use again."""
    cancelled = RequestRecord("cancelled", 10.5, cancelled_at=10.5)
    assert EntryVerdict.CANCELLED is judged(EntryRecord(b"", "r", 10.4), 11.0, cancelled)
    assert EntryVerdict.SEND is judged(EntryRecord(b"", "r", 10.5), 11.0, cancelled)
    assert EntryVerdict.LATER is judged(EntryRecord(b"", "r", 10.5), 11.0, RequestRecord("paused", 10.6))
