"""The crash test of the fan-out in short, and its judge. `make chaos FANOUT=1 ROUNDS=100` is the long one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from motorcade.core.receipt import Receipt, State
from motorcade.core.vin import make_vin
from motorcade.fleet import Received
from tests.chaos.audit import Audit, audit
from tests.chaos.fanout import Options, crash, report
from tests.chaos.platform import Batch

VIN = make_vin(1)
DIGEST = hashlib.sha256(b"data").digest()


def test_nothing_promised_to_a_platform_is_lost_when_the_node_is_killed() -> None:
    """A few kills under a fan-out to vehicles of all sorts."""
    outcome = crash(Options(rounds=2, engine="rocksdb", vehicles=20, seed=3, quiet=True, standstill=60.0))
    assert outcome.verdict.passed, report(outcome)
    assert outcome.verdict.batches and outcome.verdict.ended[State.ACKED]
    assert outcome.kills.total() > 2


# -- the judge


def batch(number: int = 1, request: str = "r", mode: str = "replace", reason: int | None = 0) -> Batch:
    return Batch(number, request, (VIN,), b"data", mode, 0, None, "", digest=DIGEST, published=1, reason=reason)


def named(number: int = 1, published: int = 2, superseded: int = 0) -> Batch:
    """One with an id that was published more than once."""
    made = batch(number)
    made.batch_id, made.published, made.superseded = f"b{number}", published, superseded
    return made


def told(state: State, position: int = 1, request: str = "r") -> Receipt:
    return Receipt(state=state, vin=VIN, request_id=request, delivery_id=f"{VIN}.{position}", time=1.0)


def got(
    at: float = 1.0,
    answered: float | None = 1.0,
    id_: int = 1,
    link: int = 1,
    *,
    digest: bytes = DIGEST,
    dup: bool = False,
) -> Received:
    return Received("r", digest, 4, 1, dup, id_, link, at, 0, False, (), answered, None if answered is None else 0)


OTHER = hashlib.sha256(b"other").digest()
LEFT = [got(1.0, None), got(1.5, 5.0, link=2, dup=True)]  #: not answered, then again by another connection
DELIVERED = [told(State.ACCEPTED), told(State.SENT), told(State.ACKED)]


def judged(
    batches: Sequence[Batch], received: Sequence[Received], receipts: Sequence[Receipt], counted: int = 1
) -> Audit:
    return audit(batches, {VIN: received}, receipts, {"r": {State.ACKED: counted}}, 1.0)


def test_all_is_well() -> None:
    found = judged([batch()], [got()], DELIVERED)
    assert found.passed
    assert (1, 1, 1, 1) == (found.batches, found.promised, found.deliveries, found.received)


def test_what_is_wrong_is_found() -> None:
    wrong: list[tuple[str, list[Batch], list[Received], list[Receipt]]] = [
        ("lost", [batch()], [], DELIVERED),
        ("lost", [batch()], [got(answered=None)], DELIVERED),
        ("lost", [batch(1, mode="append"), batch(2, "s")], [], DELIVERED),
        ("unanswered", [batch(reason=None)], [got()], DELIVERED),
        ("not ended", [batch()], [got()], DELIVERED[:2]),
        ("ended twice", [batch()], [got()], [*DELIVERED, told(State.EXPIRED)]),
        ("no receipt", [batch(), batch(2)], [got()], DELIVERED),
        ("invented", [batch()], [got(answered=None)], DELIVERED),
        ("wrong count", [batch()], [got()], [*DELIVERED, told(State.ACCEPTED, 2), told(State.ACKED, 2)]),
        ("two at once", [batch()], [got(1.0, 5.0), got(1.5, digest=OTHER)], DELIVERED),
        ("two at once", [batch()], [got(1.0, None), got(1.5, 5.0, 2)], DELIVERED),  # too soon
        ("two at once", [batch()], [got(1.0, None), got(3.0, 5.0, 2, digest=OTHER)], DELIVERED),  # it is not over
        ("two at once", [batch()], [got(1.0, None, dup=True), got(1.1, 5.0, 2, digest=OTHER, dup=True)], DELIVERED),
        ("two at once", [batch()], [*LEFT, got(1.6, 5.0, 2, 2, dup=True)], DELIVERED),  # sent twice before it was left
        ("repeated late", [batch()], [got(1.0, 1.0), got(2.0, 2.0, 2, dup=True)], DELIVERED),
        ("repeated receipt", [batch()], [got()], [*DELIVERED, told(State.ACKED)]),
        ("repeated receipt", [batch()], [got()], [told(State.ACCEPTED), *DELIVERED]),
        ("not accepted", [batch()], [got()], DELIVERED[1:]),
        ("invented", [batch()], [got()], [*DELIVERED, told(State.ACCEPTED, 2), told(State.REPLACED, 2)]),
        ("invented", [named()], [got()], [*DELIVERED, told(State.ACCEPTED, 2), told(State.REPLACED, 2)]),
        ("left out", [named(superseded=1)], [got()], DELIVERED),
        ("no receipt", [named(1), named(2)], [got()], DELIVERED),
    ]
    for kind, batches, received, receipts in wrong:
        assert judged(batches, received, receipts).count(kind), (kind, batches, received)


def test_what_is_not_wrong() -> None:
    """Replaced by a later batch; where batches are not atomic, a final receipt that is there twice."""
    second = hashlib.sha256(b"second").digest()
    later = batch(2)
    later.digest = second
    receipts = [told(State.ACCEPTED), told(State.ACCEPTED, 2), told(State.REPLACED), told(State.ACKED, 2)]
    counts = {"r": {State.ACKED: 1, State.REPLACED: 1}}
    assert audit([batch(), later], {VIN: [got(digest=second)]}, receipts, counts, 1.0).passed
    assert judged([named(1, superseded=1), named(2)], [got()], DELIVERED).passed
    twice = [*DELIVERED, told(State.ACKED)]
    repeated = audit([batch()], {VIN: [got()]}, twice, {"r": {State.ACKED: 1}}, 1.0, atomic=False)
    assert repeated.passed and repeated.repeated == 1


def test_what_may_come_while_another_message_is_not_answered() -> None:
    expired = [told(State.ACCEPTED), told(State.ACCEPTED, 2), told(State.EXPIRED), told(State.ACKED, 2)]
    for why, received in (
        ("silence", [got(1.0, 3.0), got(2.1, 3.0, 2)]),
        ("silence", [got(1.0, None), got(2.1, None, 2), got(3.0, None, 1, 2, dup=True), got(3.0, 3.0, 2, 2, dup=True)]),
        ("acknowledged", [got(1.0, 9.0), got(2.1, 2.2, 2), got(2.3, 4.0, 3, digest=OTHER)]),
        ("given up", [got(1.0, None), got(2.1, 2.2, 2, digest=OTHER)]),
    ):
        found = judged([batch()], received, expired if why == "given up" else DELIVERED)
        assert not found.count("two at once") and not found.count("repeated late"), why
        assert found.excused[why], why
