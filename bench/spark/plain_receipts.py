"""The report about receipts without Spark: what somebody would write who has none, and knows how to write it well.

    plain_receipts.py URL     reads the stream, prints seconds and the funnel of each request as JSON

One pass over the stream, a small list per delivery, then the same tables: funnel, percentiles of the stages, reasons,
counts per node and hour, the oldest stragglers. Everything is in the memory of one process, so there is a size at which
it ends; that is what it is compared with, not instead of.
"""

from __future__ import annotations

import heapq
import json
import sys
import time
from collections import Counter, defaultdict
from typing import Any

import msgspec

from motorcade.core.receipt import FINAL, Receipt, State
from motorcade.core.record import decode
from motorcade.storage.readers import open_reader

RANKS = (0.5, 0.9, 0.95, 0.99)
STRAGGLERS = 100


class Delivery(msgspec.Struct, gc=False):
    state: State
    reason: str
    last: float
    accepted: float = 0.0
    sent: float = 0.0
    resent: float = 0.0
    ended: float = 0.0
    retries: int = 0


def main() -> None:
    parse = msgspec.json.Decoder(Receipt).decode
    begun = time.perf_counter()
    deliveries: dict[str, dict[str, Delivery]] = defaultdict(dict)
    nodes: Counter[tuple[str, str, State]] = Counter()
    hours: Counter[tuple[str, int, State]] = Counter()
    seen: set[tuple[str, State, int]] = set()
    reader = open_reader(sys.argv[1])
    extent = reader.extent("receipts")
    for page in reader.pages("receipts", extent.floor - 1, extent.last):
        for value in page.values:
            told = parse(decode(value).payload)
            name, state, at = told.delivery_id, told.state, told.time
            if (name, state, told.attempt) in seen:
                continue
            seen.add((name, state, told.attempt))
            nodes[told.request_id, told.node, state] += 1
            hours[told.request_id, int(at // 3600), state] += 1
            one = deliveries[told.request_id].get(name)
            if one is None:
                one = deliveries[told.request_id][name] = Delivery(state, told.reason, at)
            elif one.state not in FINAL:
                one.state, one.reason = state, told.reason
            one.last = max(one.last, at)
            if state is State.ACCEPTED:
                one.accepted = at
            elif state is State.SENT:
                one.sent = one.sent or at
                one.resent = at
            elif state is State.RETRIED:
                one.retries += 1
            elif state in FINAL:
                one.ended = one.ended or at
    reader.close()
    tables = {request: table(found) for request, found in deliveries.items()}
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - begun,
                "funnels": {request: told["funnel"] for request, told in tables.items()},
                "counts": [len(nodes), len(hours)],
            }
        )
    )


def table(found: dict[str, Delivery]) -> dict[str, Any]:
    ends = Counter(one.state.value if one.state in FINAL else "pending" for one in found.values())
    stages: dict[str, list[float]] = defaultdict(list)
    for one in found.values():
        if one.sent:
            stages["wait"].append(one.sent - one.accepted)
            if one.resent > one.sent:
                stages["retry"].append(one.resent - one.sent)
        if one.state is State.ACKED:
            stages["total"].append(one.ended - one.accepted)
            if one.resent:
                stages["answer"].append(one.ended - one.resent)
    now = max(one.last for one in found.values())
    undone = ((now - one.accepted, name) for name, one in found.items() if one.state not in FINAL)
    return {
        "funnel": {"accepted": len(found), "sent": sum(one.sent > 0 for one in found.values()), **ends},
        "latency": {stage: percentiles(times) for stage, times in stages.items()},
        "reasons": Counter((one.state, one.reason) for one in found.values() if one.reason),
        "stragglers": heapq.nlargest(STRAGGLERS, undone),
    }


def percentiles(times: list[float]) -> list[float]:
    times.sort()
    return [times[int(rank * (len(times) - 1))] for rank in RANKS]


if __name__ == "__main__":
    main()
