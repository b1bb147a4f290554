"""Families of metrics of this plugin; docs/metrics.md lists them."""

from __future__ import annotations

from typing import Final

from motorcade.extension.metrics import Counts, Measure, same

COUNTS: Final = (
    Counts(
        "queue_message_events_total",
        "Messages of queues, by what became of them.",
        "event",
        same(
            *("appended", "delivered", "acknowledged", "refused", "timed_out", "redispatched", "dead_lettered"),
            *("dead_dropped", "expired", "dropped", "replaced"),
        ),
    ),
    Counts(
        "queue_refusals_total",
        "Messages and queues that a bound has refused.",
        "reason",
        same("refused_full", "refused_pending", "refused_queues", prefix="refused_")
        | {"dead_letter_refused": "dead_letter"},
    ),
    Counts(
        "queue_faults_total",
        "Entries that are damaged, and what could not be written or remembered.",
        "fault",
        same("unreadable", "unstorable", "not_marked", "notes_forgotten"),
    ),
)
MEASURES: Final = (
    Measure("queues", "Queues that are declared.", "queues"),
    Measure("queue_pending_messages", "Messages for queues that wait for the store.", "queue_pending"),
)
#: Names and help of what is told of each queue, by gauge.
BY_QUEUE: Final = {
    "queue_messages": ("queue_messages", "Messages in a queue."),
    "queue_bytes": ("queue_bytes", "Bytes of these messages."),
    "queue_consumers": ("queue_consumers", "Consumers of a queue."),
    "queue_inflight": ("queue_inflight_messages", "Messages that consumers hold."),
}

# Bytes of one entry, measured with CPython 3.11; see `extension.metrics.Table`.
ROUTE_BYTES: Final = 220  #: which queues a topic belongs to
