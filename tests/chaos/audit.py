"""Did every vehicle get what the platform was promised, and do the receipts say so?

The judge of the fan-out's rounds. It knows what the platform has published and was answered, what vehicles have
received and answered, the receipts as anybody can read them, and the counts that `fanout status` shows. Nothing of the
node.

One at a time: while a vehicle has not answered a message, another PUBLISH may come by the same connection only

    silence       the same message once more, when the vehicle was silent about it for `ack_timeout`; if its connection
                  was broken it may not know, so a receipt `retried` (`no_ack`) counts as well, once each
    acknowledged  another copy of the unanswered message was acknowledged: it is over
    given up      another message, when the vehicle was silent for `ack_timeout` and the unanswered one had ended
                  otherwise (replaced, expired, cancelled, failed), as a receipt says

Batches with an id: however often one was published, a vehicle has one delivery of it. If the platform was told that
some vehicles have a later one of the same request instead, these have none of it, or one that was replaced.

With DUP comes what the session had in flight, before anything without it. Several of them are in flight only if one of
these was true before. How often each was the reason is counted; everything else is a finding.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from motorcade.core.receipt import FINAL, Receipt, State
from motorcade.fleet import Received
from tests.chaos.findings import Findings
from tests.chaos.platform import Batch

#: Seconds by which a vehicle may note a packet later than the node has sent it: it reads when it gets its turn.
TOLERANCE = 0.25


@dataclass
class Audit(Findings):
    """Counts, and what is wrong."""

    batches: int = 0  #: acknowledged
    promised: int = 0  #: vehicles named in them, each batch counted
    published_again: int = 0  #: batches with an id, times
    known: int = 0  #: of these, times that the node has said that it knows them
    deliveries: int = 0  #: accepted, as the receipts tell
    ended: Counter[State] = field(default_factory=Counter)
    repeated: int = 0  #: first and final receipts that are there twice
    received: int = 0  #: PUBLISH packets
    duplicated: int = 0  #: of these, of a delivery that the vehicle had acknowledged before
    excused: Counter[str] = field(default_factory=Counter)  #: why a message came while another one was unanswered


def audit(
    batches: Sequence[Batch],
    vehicles: Mapping[str, Sequence[Received]],
    receipts: Sequence[Receipt],
    counts: Mapping[str, Mapping[State, int]],
    ack_timeout: float,
    *,
    atomic: bool = True,
) -> Audit:
    """The whole truth about one run.

    `counts` are those of `fanout status`, by request. `atomic`: the store writes a batch as a whole, so that no receipt
    has an excuse for being there twice.
    """
    found = Audit()
    _promises(found, batches, vehicles)
    _receipts(found, batches, receipts, atomic=atomic)
    _answers(found, vehicles, receipts)
    _counts(found, receipts, counts)
    for vin, received in vehicles.items():
        found.received += len(received)
        found.duplicated += sum(record.repeated for record in received)
        _one_at_a_time(found, vin, received, [receipt for receipt in receipts if receipt.vin == vin], ack_timeout)
    return found


def _promises(found: Audit, batches: Sequence[Batch], vehicles: Mapping[str, Sequence[Received]]) -> None:
    """What was acknowledged has reached its vehicle, unless the platform has replaced it or let it expire."""
    got = {
        vin: {(record.request_id, record.digest) for record in received if record.acked}
        for vin, received in vehicles.items()
    }
    replacing = _replacing(batches)
    for batch in batches:
        for reason in batch.refusals:
            found.add("refused", f"batch {batch.number}: 0x{reason:02x}")
        if not batch.is_acknowledged:
            if batch.reason is None:
                found.add("unanswered", f"batch {batch.number}")
            continue
        found.batches += 1
        found.promised += len(batch.vins)
        for vin in batch.vins:
            replaced = batch.mode == "replace" and replacing[batch.request, vin] > batch.number
            if batch.expires is None and not replaced and (batch.request, batch.digest) not in got[vin]:
                found.add("lost", f"batch {batch.number}, request {batch.request}, vehicle {vin}")


def _replacing(batches: Sequence[Batch]) -> dict[tuple[str, str], int]:
    """By request and VIN: the last batch that replaces what waits."""
    replacing: dict[tuple[str, str], int] = {}
    for batch in batches:
        if batch.mode == "replace" and batch.published:
            replacing |= {(batch.request, vin): batch.number for vin in batch.vins}
    return replacing


def _receipts(found: Audit, batches: Sequence[Batch], receipts: Sequence[Receipt], *, atomic: bool) -> None:
    """There are receipts for all that was acknowledged, and every delivery begins and ends, once."""
    ends: dict[str, list[State]] = {}
    accepted: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for receipt in receipts:
        if receipt.delivery_id not in ends and receipt.state is not State.ACCEPTED:
            found.add("not accepted", f"{receipt.delivery_id} begins with {receipt.state}")
        end = ends.setdefault(receipt.delivery_id, [])
        if receipt.state in FINAL:
            end.append(receipt.state)
        elif receipt.state is State.ACCEPTED:
            accepted[receipt.request_id, receipt.vin][receipt.delivery_id] += 1
    found.deliveries = sum(map(len, accepted.values()))
    repeated = [name for names in accepted.values() for name, times in names.items() if times > 1]
    for name, states in ends.items():
        if not states:
            found.add("not ended", name)
        elif len(set(states)) > 1:
            found.add("ended twice", f"{name}: {', '.join(states)}")
        repeated += [name] * (len(states) > 1)
        found.ended.update(states[:1])
    found.repeated = len(repeated)
    if atomic:
        for name in repeated:
            found.add("repeated receipt", name)
    _numbers(found, batches, {key: len(names) for key, names in accepted.items()})


def _numbers(found: Audit, batches: Sequence[Batch], accepted: Mapping[tuple[str, str], int]) -> None:
    """At least as many deliveries as were promised, at most as many as were asked for."""
    promised: Counter[tuple[str, str]] = Counter()
    asked: Counter[tuple[str, str]] = Counter()
    replacing = _replacing(batches)
    for batch in batches:
        is_named = bool(batch.batch_id)
        found.published_again += max(0, batch.published - 1) if is_named else 0
        found.known += batch.repeated
        later = [vin for vin in batch.vins if replacing.get((batch.request, vin), 0) > batch.number]
        excused = set(later) if batch.superseded else set()
        if batch.superseded > len(later):
            words = f"batch {batch.number}: {batch.superseded} vehicles superseded, {len(later)} have a later one"
            found.add("left out", words)
        for vin in batch.vins:
            promised[batch.request, vin] += batch.is_acknowledged and vin not in excused
            asked[batch.request, vin] += min(batch.published, 1) if is_named else batch.published
    for request, vin in asked.keys() | accepted.keys():
        key, number = (request, vin), accepted.get((request, vin), 0)
        words = f"request {request}, vehicle {vin}: {number} accepted"
        if number < promised[key]:
            found.add("no receipt", f"{words}, {promised[key]} batches acknowledged")
        if number > asked[key]:
            found.add("invented", f"{words}, {asked[key]} batches published")


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
            found.add("invented", f"request {key[0]}, vehicle {key[1]}: {times} said, {acked[key]} were")


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
            found.add("wrong count", f"request {request}: {shown} instead of {is_}")


Message = tuple[str, bytes]  # request and digest


def _message(record: Received) -> Message:
    return record.request_id, record.digest


class _Street:
    """One vehicle: what it has not answered, and why something else may come all the same."""

    def __init__(self, received: Sequence[Received], receipts: Sequence[Receipt], ack_timeout: float) -> None:
        self.patience = ack_timeout - TOLERANCE
        self.acked: dict[Message, float] = {}  # when the first copy was acknowledged
        for record in received:
            if record.acked and record.answered is not None:
                key = _message(record)
                self.acked[key] = min(self.acked.get(key, record.answered), record.answered)
        self.over: dict[str, list[float]] = defaultdict(list)  # request: when deliveries ended without an answer
        self.retried: dict[str, list[float]] = defaultdict(list)  # request: when an attempt was said to be in vain
        for receipt in receipts:
            if receipt.state in FINAL and receipt.state is not State.ACKED:
                self.over[receipt.request_id].append(receipt.time)
            elif receipt.state is State.RETRIED and receipt.reason == "no_ack":
                self.retried[receipt.request_id].append(receipt.time)
        self.came: dict[tuple[int, Message], float] = {}  # packet id and message: when it came first
        self.copies: set[tuple[int, Message]] = set()  # those that were sent because of a silence

    def excuse(self, record: Received, other: Received) -> str:
        """Why a message may come though another one is not answered; empty: it may not."""
        message, unanswered = _message(record), _message(other)
        if self.acked.get(unanswered, record.time) < record.time:
            return "acknowledged"
        if message == unanswered:
            return "silence" if self._is_copy(record, other) else ""
        if self._waited(record, other) < self.patience:
            return ""
        requests = {record.request_id, other.request_id} if record.dup else {other.request_id}
        is_over = any(time <= record.time for request in requests for time in self.over[request])
        return "given up" if is_over or (record.dup and message in self.acked) else ""

    def _waited(self, record: Received, other: Received) -> float:
        """How long the vehicle had been silent, as far as it knows."""
        since = other.time
        if record.dup:
            # Both were in flight when the session was left. Then the time of the first began when it came first.
            since = min(self.came.get((one.packet_id, _message(one)), one.time) for one in (record, other))
        return record.time - since

    def _is_copy(self, record: Received, other: Received) -> bool:
        """Whether the vehicle was silent, or the node says so: what was sent to one that is gone comes all at once."""
        key, before = (record.packet_id, _message(record)), (other.packet_id, _message(other))
        if record.dup and (key in self.copies or before in self.copies):
            return True  # again, after another reconnect
        said = [time for time in self.retried[record.request_id] if time <= record.time]
        if said:
            self.retried[record.request_id].remove(said[-1])  # each excuses one copy
        elif self._waited(record, other) < self.patience:
            return False
        self.copies.add(key)
        return True


def _one_at_a_time(
    found: Audit, vin: str, received: Sequence[Received], receipts: Sequence[Receipt], ack_timeout: float
) -> None:
    """Messages that come while another one is not answered need an excuse; see above."""
    street = _Street(received, receipts, ack_timeout)
    waiting: list[Received] = []
    begun = 0  # connection by which something has come without DUP
    for record in received:
        if record.dup and begun == record.connection:
            found.add("repeated late", f"{vin}: {record.request_id} with DUP behind one without")
        begun = begun if record.dup else record.connection
        waiting = [
            other
            for other in waiting
            if other.connection == record.connection and (other.answered is None or other.answered > record.time)
        ]
        for other in waiting:
            excuse = street.excuse(record, other)
            found.excused[excuse] += bool(excuse)
            if not excuse:
                how = "again, with DUP," if record.dup else "comes"
                late = f"{record.time - other.time:.3f} s"
                found.add(
                    "two at once",
                    f"{vin}: {record.request_id} {how} while {other.request_id} has not been answered for {late}",
                )
        street.came.setdefault((record.packet_id, _message(record)), record.time)
        if record.qos:
            waiting.append(record)
