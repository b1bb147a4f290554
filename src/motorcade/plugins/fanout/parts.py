"""The parts that the others are built on, made in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from motorcade.extension.plugin import Context
from motorcade.plugins.fanout.attempts import Attempts
from motorcade.plugins.fanout.counters import RequestCounters
from motorcade.plugins.fanout.counting import CountingRole
from motorcade.plugins.fanout.decisions import RequestDecisions
from motorcade.plugins.fanout.inflight import InflightTable
from motorcade.plugins.fanout.members import FanoutMembers, Hint
from motorcade.plugins.fanout.options import FanoutConfig
from motorcade.plugins.fanout.queries import Queries
from motorcade.plugins.fanout.receipt_writer import ReceiptWriter
from motorcade.plugins.fanout.record import RequestRecord
from motorcade.plugins.fanout.told import ToldBatches
from motorcade.plugins.fanout.triggers import Triggers
from motorcade.storage.ports import Store


class Parts:
    """The fan-out of one node."""

    def __init__(self, context: Context, config: FanoutConfig, decided: Callable[[RequestRecord], None]) -> None:
        """`decided`: called when a decision about a request is in force here."""
        self.context = context
        self.store = cast("Store", context.store)
        self.now = context.hub.now
        self.members = FanoutMembers(context, context.cluster) if context.cluster is not None else None
        self.triggers = Triggers(config.dispatchers, context.counters)
        self.table = InflightTable(config, self.triggers)
        self.counters = RequestCounters(context, config.max_requests)
        self.receipts = ReceiptWriter(context, self.table, self.counters, self.members)
        self.decisions = RequestDecisions(context, self.table, decided)
        self.attempts = Attempts(self.table, self.receipts, self.triggers, self.now)
        self.queries = Queries(self.store, self.counters)
        self.role: CountingRole | None = None
        self.told: ToldBatches | None = None
        if self.members is not None:
            self.role = self.queries.role = CountingRole(context, self.members, self.counters, self.queries)
            self.told = ToldBatches(context, self.members, self.table, self.triggers)

    def hinted(self, hint: Hint) -> None:
        """Look at the vehicles of a batch that has its receipts; what it has replaced has ended."""
        for vin, position in hint.replaced:
            self.replaced(vin, position)
        for vin in hint.vins:
            self.table.drained.discard(vin)
            self.triggers.trigger(vin, "batch")

    def replaced(self, vin: str, position: int) -> None:
        """Note that a delivery has ended, as its `replaced` receipt is stored."""
        self.table.end(vin, position)
        self.receipts.ended(vin, position)
        if self.receipts.outbox is not None:
            self.receipts.outbox.replaced(vin, position)
