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
