"""The parts that the others are built on, made in the order in which they need each other."""

from __future__ import annotations

from typing import cast

from motorcade.extension.plugin import Context
from motorcade.plugins.fanout.attempts import Attempts
from motorcade.plugins.fanout.counters import RequestCounters
from motorcade.plugins.fanout.inflight import InflightTable
from motorcade.plugins.fanout.options import FanoutConfig
from motorcade.plugins.fanout.queries import Queries
from motorcade.plugins.fanout.receipt_writer import ReceiptWriter
from motorcade.plugins.fanout.triggers import Triggers
from motorcade.storage.ports import Store


class Parts:
    """The fan-out of one node."""

    def __init__(self, context: Context, config: FanoutConfig) -> None:
        self.context = context
        self.store = cast("Store", context.store)
        self.now = context.hub.now
        self.triggers = Triggers(config.dispatchers, context.counters)
        self.table = InflightTable(config, self.triggers)
        self.counters = RequestCounters(context, config.max_requests)
        self.receipts = ReceiptWriter(context, self.table, self.counters)
        self.attempts = Attempts(self.table, self.receipts, self.triggers, self.now)
        self.queries = Queries(self.store, self.counters)
