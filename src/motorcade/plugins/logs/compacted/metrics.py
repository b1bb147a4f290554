"""Families of metrics of this plugin; docs/metrics.md lists them."""

from __future__ import annotations

from typing import Final

from motorcade.extension.metrics import Counts, Measure, same

COUNTS: Final = (
    Counts(
        "ecq_message_events_total",
        "Messages of compacted queues, by what became of them.",
        "event",
        same(
            *("appended", "replaced", "acknowledged", "refused", "given_again", "given_up", "too_old", "expired"),
            *("too_large", "collected", "dropped"),
        ),
    ),
    Counts(
        "ecq_queue_events_total",
        "Compacted queues: rewound, deleted, and forgotten because they were empty and unused.",
        "event",
        same("rewound", "deleted", "forgotten"),
    ),
    Counts(
        "ecq_refusals_total",
        "What a bound has refused, or what had no good name.",
        "reason",
        same(
            *("refused_full", "refused_pending", "refused_queues", "refused_key", "refused_consumers"),
            *("refused_publish", "refused_subscribe"),
            prefix="refused_",
        ),
    ),
    Counts(
        "ecq_failures_total",
        "Times the store refused or failed, by what was wanted of it.",
        "operation",
        {"append_failed": "append", "look_failed": "look", "progress_failed": "progress", "gc_failed": "gc"},
    ),
    Counts(
        "ecq_hints_total",
        "Several nodes: what another one was not told of single queues.",
        "event",
        {"hints_dropped": "dropped", "wanted_overflows": "overflow"},
    ),
    Counts("ecq_gc_rounds_total", "Collections of what is too old.", "", same("gc_rounds")),
    Counts("ecq_progress_writes_total", "Records of consumers' progress written.", "", same("progress_written")),
    Counts(
        "ecq_faults_total",
        "What is damaged, or cannot be written.",
        "fault",
        same("unreadable", "unstorable", "progress_unreadable"),
    ),
)
MEASURES: Final = (
    Measure("ecq_queues", "Compacted queues that there are.", "ecq_queues"),
    Measure("ecq_open_queues", "Compacted queues in memory.", "ecq_open"),
    Measure("ecq_consumers", "Subscriptions to compacted queues.", "ecq_consumers"),
    Measure("ecq_pending_messages", "Messages that wait for the store.", "ecq_pending"),
    Measure("ecq_pending_bytes", "Bytes of these messages.", "ecq_pending_bytes"),
)

# Bytes of one entry, measured with CPython 3.11; see `extension.metrics.Table`.
QUEUE_BYTES: Final = 700  #: an open queue without consumers
MESSAGE_BYTES: Final = 700  #: a message that waits for the store, without payload and key
