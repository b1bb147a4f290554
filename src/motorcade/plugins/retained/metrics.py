"""Families of metrics of this plugin; docs/metrics.md lists them."""

from __future__ import annotations

from typing import Final

from motorcade.extension.metrics import Counts, Measure, same

COUNTS: Final = (
    Counts(
        "retained_message_events_total",
        "Retained messages, by what became of them.",
        "event",
        same(
            *("stored", "deleted", "expired", "loaded", "not_loaded", "unreadable", "store_failed"),
            *("received", "unchecked", "overrun"),
        ),
    ),
    Counts(
        "retained_refusals_total",
        "Retained messages that were not kept, by the bound that refused them.",
        "reason",
        same(
            *("refused_max_messages", "refused_max_payload", "refused_max_bytes", "refused_uncommitted"),
            prefix="refused_",
        ),
    ),
)
MEASURES: Final = (
    Measure("retained_messages", "Retained messages now.", "retained_messages"),
    Measure("retained_bytes", "Bytes of their topics and payloads.", "retained_bytes"),
)

# Bytes of one entry, measured with CPython 3.11; see `extension.metrics.Table`.
MESSAGE_BYTES: Final = 500  #: without topic, payload and properties
LEVEL_BYTES: Final = 260  #: a level of the tree of topics
