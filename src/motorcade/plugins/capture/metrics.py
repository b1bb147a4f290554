"""Families of metrics of this plugin; docs/metrics.md lists them."""

from __future__ import annotations

from typing import Final

from motorcade.extension.metrics import Counts, Measure, same

OUTCOMES: Final = ("captured", "failed", "refused", "dropped", "repeated")
COUNTS: Final = (
    Counts(
        "capture_messages_total",
        "Messages that a capture rule has taken or refused, by what became of them.",
        "result",
        same(*OUTCOMES),
    ),
)
MEASURES: Final = (
    Measure("capture_rules", "Capture rules that are declared.", "capture_rules"),
    Measure("capture_pending_messages", "Messages on their way to a target.", "capture_pending"),
)

# Bytes of one entry, measured with CPython 3.11; see `extension.metrics.Table`.
ROUTE_BYTES: Final = 220  #: which rules a topic belongs to
