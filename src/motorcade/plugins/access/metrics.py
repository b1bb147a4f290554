"""Families of metrics of this plugin; docs/metrics.md lists them."""

from __future__ import annotations

from typing import Final

from motorcade.extension.metrics import Counts, same

COUNTS: Final = (
    Counts(
        "access_logins_total",
        "Decisions of the plugin on who may connect.",
        "result",
        same("allowed", "denied", "anonymous", "throttled"),
    ),
    Counts(
        "access_denials_total",
        "Publishes and subscriptions that the rules deny.",
        "action",
        {"publish_denied": "publish", "subscribe_denied": "subscribe"},
    ),
    Counts("access_reloads_total", "Times that files and rules were read again.", "", same("reloaded")),
)

# Bytes of one entry, measured with CPython 3.11; see `extension.metrics.Table`.
FAILURE_BYTES: Final = 330  #: a name or address that failed lately
KNOWN_BYTES: Final = 130  #: a name at an address that got in
