"""Families of metrics of this plugin; docs/metrics.md lists them."""

from __future__ import annotations

from typing import Final

from motorcade.core.receipt import LATE_ACK, State
from motorcade.extension.metrics import Counts, Measure, same

COUNTS: Final = (
    Counts(
        "fanout_batches_total",
        "Batches, by what became of them.",
        "result",
        same(
            *("batches_completed", "batches_repeated", "batches_without_data", "batches_doubted", "batches_failed"),
            *("batches_refused", "batches_refused_ids", "batches_refused_queued", "batches_refused_other"),
            prefix="batches_",
        ),
    ),
    Counts("fanout_batches_received_total", "Batches that have come.", "", same("batches")),
    Counts("fanout_targets_total", "Vehicles addressed, over all batches.", "", same("targets")),
    Counts(
        "fanout_receipts_total",
        "Receipts, by state.",
        "state",
        same(*(f"receipts_{state}" for state in State), f"receipts_{LATE_ACK}", prefix="receipts_"),
    ),
    Counts(
        "fanout_receipt_faults_total",
        "Receipts that could not be stored or published, and those that the retention removed unread.",
        "fault",
        same("receipts_not_published", "receipts_not_stored", "receipts_trimmed", prefix="receipts_"),
    ),
    Counts(
        "fanout_payloads_total",
        "Payloads of two-step batches, by what became of them.",
        "result",
        same("data_stored", "data_replaced", "data_refused", "data_refused_full", prefix="data_"),
    ),
)
MEASURES: Final = (
    Measure("fanout_vehicles", "Vehicles that are connected and served.", "fanout_vehicles"),
    Measure("fanout_inflight_deliveries", "Deliveries sent and not acknowledged.", "fanout_in_flight"),
    Measure("fanout_pending_deliveries", "Deliveries without a final state.", "fanout_pending"),
    Measure("fanout_unwritten_receipts", "Receipts that wait for the store.", "fanout_receipts_unwritten"),
    Measure("fanout_requests", "Requests whose counts are kept.", "fanout_requests"),
    Measure("fanout_batch_ids", "Batch ids that are remembered.", "fanout_batch_ids"),
)

# Bytes of one entry, measured with CPython 3.11; see `extension.metrics.Table`.
REQUEST_BYTES: Final = 760  #: counts of one request
DELIVERY_ID_BYTES: Final = 170  #: a delivery that is known to have ended, by its name
GUID_BYTES: Final = 155  #: a batch that is known to have its receipts
POSITION_BYTES: Final = 220  #: the same, by vehicle and position; attempts of one that was given back
OPEN_BYTES: Final = 190  #: a delivery that is known to have been sent
VEHICLE_BYTES: Final = 1500  #: a connected vehicle
INFLIGHT_BYTES: Final = 1200  #: a delivery on its way, without the data, which many share
