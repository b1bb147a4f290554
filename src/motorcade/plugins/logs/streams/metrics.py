"""Families of metrics of this plugin; docs/metrics.md lists them."""

from __future__ import annotations

from typing import Final

from motorcade.extension.metrics import Counts, Measure, same

COUNTS: Final = (
    Counts(
        "stream_record_events_total",
        "Records of streams, by what became of them; read are those that came from the store, not from memory.",
        "event",
        same("appended", "read", "trimmed", "found_late", "refused", "expired", "too_large", "dropped_qos0"),
    ),
    Counts(
        "stream_hints_total",
        "Ends of streams told to other nodes; untold are streams beyond the number that is kept of one node's readers.",
        "outcome",
        {"ends_told": "told", "untold": "untold"},
    ),
    Counts("stream_trimmed_bytes_total", "Bytes of records that the retention removed.", "", same("trimmed_bytes")),
    Counts(
        "stream_failures_total",
        "Times the store refused or failed, by what was wanted of it.",
        "operation",
        {"append_failed": "append", "read_failed": "read", "trim_failed": "trim", "progress_failed": "progress"},
    ),
    Counts(
        "stream_refusals_total",
        "Messages, subscriptions and streams that a bound has refused.",
        "reason",
        same(
            *("refused_waiting", "refused_max_streams", "refused_max_progress", "refused_subscribe", "refused_publish"),
            prefix="refused_",
        ),
    ),
    Counts("stream_progress_writes_total", "Records of readers' progress written.", "", same("progress_written")),
    Counts(
        "stream_faults_total",
        "What is damaged, or cannot be written.",
        "fault",
        same("unreadable", "unwritable", "declaration_unreadable", "progress_unreadable", "progress_unwritable"),
    ),
)
MEASURES: Final = (
    Measure("streams", "Streams that are declared.", "streams"),
    Measure("stream_progress_entries", "Clients whose progress is in memory, over all streams.", "stream_progress"),
    Measure("stream_pending_messages", "Messages for streams that wait for the store.", "stream_waiting"),
    Measure("stream_cache_bytes", "Bytes of records in memory for readers.", "stream_cache_bytes"),
)

# Bytes of one entry, measured with CPython 3.11; see `extension.metrics.Table`.
PROGRESS_BYTES: Final = 420  #: how far one client is
