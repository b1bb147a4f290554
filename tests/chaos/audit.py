"""Did every vehicle get what the platform was promised, and do the receipts say so?

The judge of the fan-out's rounds. It knows what the platform has published and was answered, what vehicles have
received and answered, the receipts as anybody can read them, and the counts that `fanout status` shows. Nothing of the
node.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from motorcade.core.receipt import FINAL, Receipt, State
from motorcade.fleet import Received
from tests.chaos.platform import Batch

MOST_TOLD = 20  #: findings of one kind that are told one by one


@dataclass
class Audit:
    """Counts, and what is wrong."""

    batches: int = 0  #: acknowledged
    promised: int = 0  #: vehicles named in them, each batch counted
    deliveries: int = 0  #: accepted, as the receipts tell
    ended: Counter[State] = field(default_factory=Counter)
    repeated: int = 0  #: final receipts that are there twice
    received: int = 0  #: PUBLISH packets
    duplicated: int = 0  #: of these, of a delivery that the vehicle had acknowledged before
    findings: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def passed(self) -> bool:
        return not any(self.findings.values())

    def count(self, kind: str) -> int:
        return len(self.findings.get(kind, []))

    def told(self) -> Iterable[str]:
        for kind, found in self.findings.items():
            for words in found[:MOST_TOLD]:
                yield f"{kind}: {words}"
            if len(found) > MOST_TOLD:
                yield f"{kind}: and {len(found) - MOST_TOLD} more"


def audit(
    batches: Sequence[Batch],
    vehicles: Mapping[str, Sequence[Received]],
    receipts: Sequence[Receipt],
    counts: Mapping[str, Mapping[State, int]],
    ack_timeout: float,
) -> Audit:
    """The whole truth about one run. `counts` are those of `fanout status`, by request."""
    found = Audit()
    _promises(found, batches, vehicles)
    _receipts(found, batches, receipts)
    _answers(found, vehicles, receipts)
    _counts(found, receipts, counts)
    for vin, received in vehicles.items():
        found.received += len(received)
        found.duplicated += sum(record.repeated for record in received)
        _one_at_a_time(found, vin, received, ack_timeout)
    return found


def _promises(found: Audit, batches: Sequence[Batch], vehicles: Mapping[str, Sequence[Received]]) -> None:
    """What was acknowledged has reached its vehicle, unless the platform has replaced it or let it expire."""
    got = {
        vin: {(record.request_id, record.digest) for record in received if record.acked}
        for vin, received in vehicles.items()
    }
    replacing: dict[tuple[str, str], int] = {}  # request and VIN: the last batch that replaces
    for batch in batches:
        if batch.mode == "replace" and batch.published:
            replacing |= {(batch.request, vin): batch.number for vin in batch.vins}
    for batch in batches:
        for reason in batch.refusals:
            found.findings["refused"].append(f"batch {batch.number}: 0x{reason:02x}")
        if not batch.is_acknowledged:
            found.findings["unanswered"] += [f"batch {batch.number}"] * (batch.reason is None)
            continue
        found.batches += 1
        found.promised += len(batch.vins)
        for vin in batch.vins:
            replaced = batch.mode == "replace" and replacing[batch.request, vin] > batch.number
            if batch.expires is None and not replaced and (batch.request, batch.digest) not in got[vin]:
                found.findings["lost"].append(f"batch {batch.number}, request {batch.request}, vehicle {vin}")


def _receipts(found: Audit, batches: Sequence[Batch], receipts: Sequence[Receipt]) -> None:
    """There are receipts for all that was acknowledged, and every delivery has ended, once."""
    ends: dict[str, list[State]] = {}
    accepted: dict[tuple[str, str], set[str]] = defaultdict(set)
    for receipt in receipts:
        end = ends.setdefault(receipt.delivery_id, [])
        if receipt.state in FINAL:
            end.append(receipt.state)
        elif receipt.state is State.ACCEPTED:
            accepted[receipt.request_id, receipt.vin].add(receipt.delivery_id)
    found.deliveries = sum(map(len, accepted.values()))
    for name, states in ends.items():
        if not states:
            found.findings["not ended"].append(name)
        elif len(set(states)) > 1:
            found.findings["ended twice"].append(f"{name}: {', '.join(states)}")
        found.repeated += max(0, len(states) - 1)
        found.ended.update(states[:1])
    named = Counter((batch.request, vin) for batch in batches if batch.is_acknowledged for vin in batch.vins)
    for (request, vin), times in named.items():
        if len(accepted[request, vin]) < times:
            words = f"request {request}, vehicle {vin}: {times} batches, {len(accepted[request, vin])} accepted"
            found.findings["no receipt"].append(words)


def _answers(found: Audit, vehicles: Mapping[str, Sequence[Received]], receipts: Sequence[Receipt]) -> None:
    """Nobody is said to have acknowledged what it has not."""
    said: Counter[tuple[str, str]] = Counter()
    for name in {receipt.delivery_id: receipt for receipt in receipts if receipt.state is State.ACKED}.values():
        said[name.request_id, name.vin] += 1
    acked: Counter[tuple[str, str]] = Counter()
    for vin, received in vehicles.items():
        acked.update((record.request_id, vin) for record in received if record.acked)
    for key, times in said.items():
        if times > acked[key]:
            found.findings["invented"].append(f"request {key[0]}, vehicle {key[1]}: {times} said, {acked[key]} were")


def _counts(found: Audit, receipts: Sequence[Receipt], counts: Mapping[str, Mapping[State, int]]) -> None:
    """`fanout status` shows what the receipts tell."""
    last: dict[str, Receipt] = {}
    for receipt in receipts:
        before = last.get(receipt.delivery_id)
        if before is None or before.state not in FINAL:
            last[receipt.delivery_id] = receipt
    true: dict[str, Counter[State]] = defaultdict(Counter)
    for receipt in last.values():
        true[receipt.request_id][receipt.state] += 1
    for request in true.keys() | counts.keys():
        shown, is_ = dict(counts.get(request, {})), dict(true.get(request, {}))
        if shown != is_:
            found.findings["wrong count"].append(f"request {request}: {shown} instead of {is_}")


def _one_at_a_time(found: Audit, vin: str, received: Sequence[Received], ack_timeout: float) -> None:
    """A message that comes while another one is not answered; one about which a vehicle was silent for too long may be
    sent again, or be given up, while it still might answer."""
    waiting: list[Received] = []
    acked: dict[tuple[str, bytes], float] = {}  # when the first copy of a message was acknowledged
    for record in received:
        if record.acked and record.answered is not None:
            key = record.request_id, record.digest
            acked[key] = min(acked.get(key, record.answered), record.answered)
    first: dict[tuple[str, bytes], float] = {}  # when a message has come for the first time
    for record in received:
        waiting = [
            other
            for other in waiting
            if other.connection == record.connection and (other.answered is None or other.answered > record.time)
        ]
        for other in waiting:
            if acked.get((other.request_id, other.digest), record.time) < record.time:
                continue  # a copy was sent after a long silence, then the one before was acknowledged after all
            if record.time - other.time < ack_timeout * 0.9 and not record.dup:
                words = (
                    f"{vin}: {record.request_id} while {other.request_id} waits for {record.time - other.time:.3f} s"
                )
                found.findings["two at once"].append(words)
        first.setdefault((record.request_id, record.digest), record.time)
        if record.qos:
            waiting.append(record)
