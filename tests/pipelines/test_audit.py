"""The audit finds what is wrong, all of it and nothing else: by hand, and beside a model in plain Python."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from motorcade.cli.pipeline import _tell_verdict
from motorcade.core.receipt import FINAL
from motorcade.pipelines.audit import AuditVerdict, Problem, audit, judged, run
from tests.pipelines.lake import Lake
from tests.pipelines.receipts_made import mailboxes, moment, store, stream, told

pytestmark = pytest.mark.timeout(240)

WRONG: list[dict[str, Any] | bytes] = [
    told("A.1", "accepted", 0),
    told("A.1", "acked", 1),
    told("A.1", "acked", 1),  # told twice: one state all the same
    told("B.1", "accepted", 0),
    told("B.1", "sent", 0),
    told("C.1", "accepted", 0),
    told("C.1", "acked", 1),
    told("C.1", "expired", 2),
    told("D.1", "accepted", 0),
    told("D.1", "failed", 1),
    told("E.1", "accepted", 0),
    told("E.10", "sent", 0),
    told("F.1", "acked", 1),
    told("H.1", "accepted", 0, request="r2"),
    b"what is this",
]
WAITING = ["D.1", "E.1", "E.10", "G.7"]


def found(frame) -> dict[str | None, str]:
    return {row.delivery_id: row.outcome for row in frame.collect()}


def test_every_kind_of_problem_is_named(spark: SparkSession) -> None:
    receipts, pending = stream(spark, WRONG), mailboxes(spark, WAITING)
    assert {
        "B.1": "lost", "C.1": "several_finals", "D.1": "final_and_pending", "E.10": "never_accepted",
        "F.1": "never_accepted", "G.7": "never_accepted", "H.1": "lost", None: "unreadable",
    } == found(audit(receipts, pending))  # fmt: skip
    everything = {row.delivery_id: row for row in judged(receipts, pending).collect()}
    assert ("acked", "pending") == (everything["A.1"].outcome, everything["E.1"].outcome)
    assert ["acked", "expired"] == everything["C.1"].finals
    assert (True, "G", None) == (everything["G.7"].waits, everything["G.7"].vin, everything["G.7"].request_id)
    assert len(WRONG) == everything[None].offset


def test_one_request_alone(spark: SparkSession) -> None:
    assert {"H.1": "lost"} == found(audit(stream(spark, WRONG), mailboxes(spark, WAITING), request="r2"))


def test_what_was_trimmed_is_not_judged_and_not_passed_over(spark: SparkSession) -> None:
    """Entries that are younger than the oldest receipt have no excuse."""
    receipts = stream(spark, [told("A.1", "acked", 5), told("B.1", "sent", 5), told("C.1", "sent", 5)], first=90)
    pending = mailboxes(spark, ["B.1", "D.1"], stored=0).union(mailboxes(spark, ["E.1"], stored=7))
    assert {
        "A.1": "unjudged", "B.1": "unjudged", "C.1": "lost", "D.1": "unjudged", "E.1": "never_accepted",
    } == found(judged(receipts, pending, since=moment(5)))  # fmt: skip


def test_what_came_later_is_left_out(spark: SparkSession) -> None:
    receipts = stream(spark, [told("A.1", "accepted", 0), told("B.1", "accepted", 1), told("A.1", "acked", 2)])
    pending = mailboxes(spark, ["A.1"])
    assert {"A.1": "final_and_pending"} == found(judged(receipts, pending, upto=1))
    assert {"A.1": "final_and_pending", "B.1": "lost"} == found(audit(receipts, pending))


def test_other_mailboxes_do_not_count(spark: SparkSession) -> None:
    others = mailboxes(spark, ["A.1", "B.1"]).selectExpr(
        "replace(owner, 'fanout:', 'fanout-done:') owner", "position", "stored"
    )
    receipts = stream(spark, [told("A.1", "accepted", 0), told("A.1", "acked", 1)])
    assert {"A.1": "acked"} == found(judged(receipts, others))


@pytest.mark.parametrize("seed", [1, 2])
def test_beside_a_model(spark: SparkSession, seed: int) -> None:
    """Random lives, of which some go wrong in random ways."""
    chance = random.Random(seed)
    story: list[dict[str, Any]] = []
    waiting: list[str] = []
    expected: dict[str, str] = {}
    finals = sorted(FINAL)
    for number in range(600):
        name = f"V{number % 90}.{number}"
        accepted, waits = chance.random() < 0.9, chance.random() < 0.4
        ends = chance.sample(finals, chance.choice([0, 1, 1, 1, 2]))
        sent = chance.random() < 0.5
        life = (
            (["accepted"] if accepted else []) + (["sent", "retried"] if sent else []) + ends * chance.choice([1, 1, 2])
        )
        if not life and not waits:
            continue
        story += [told(name, str(state), number) for state in life]
        waiting += [name] if waits else []
        if len(ends) > 1:
            expected[name] = Problem.SEVERAL_FINALS
        elif ends and waits:
            expected[name] = Problem.FINAL_AND_PENDING
        elif not ends and not waits:
            expected[name] = Problem.LOST
        elif not accepted:
            expected[name] = Problem.NEVER_ACCEPTED
        else:
            expected[name] = str(ends[0]) if ends else "pending"
    chance.shuffle(story)
    assert expected == found(judged(stream(spark, story), mailboxes(spark, waiting)))


def test_a_verdict_is_told() -> None:
    finding = {"problem": "lost", "delivery_id": "A.1", "request_id": "r1", "finals": [], "offset": 3}
    bad = AuditVerdict({"acked": 5, "pending": 1, "unjudged": 2, "lost": 3}, [finding])
    assert [
        "11 deliveries: 5 acked, 1 pending, 2 unjudged, 3 lost",
        "lost: A.1 of r1: no final receipt, and not in the vehicle's mailbox",
        "and 2 more",
        "2 cannot be judged: their first receipts are no longer in the stream",
        "not clean: 3 wrong",
    ] == list(bad.lines())
    assert (1, False, 2) == (bad.exit_code, bad.as_dict()["clean"], bad.as_dict()["not_listed"])
    good = AuditVerdict({"acked": 5})
    assert ["5 deliveries: 5 acked", "clean"] == list(good.lines())
    assert 0 == good.exit_code
    assert ["0 deliveries: none", "clean"] == list(AuditVerdict({}).lines())
    unreadable: dict[str, Any] = {
        "problem": "unreadable",
        "delivery_id": None,
        "request_id": None,
        "finals": [],
        "offset": 9,
    }
    worst = AuditVerdict({"unreadable": 1}, [unreadable])
    assert "unreadable: offset 9: a record that is no receipt" in list(worst.lines())
    assert 0 == worst.as_dict()["deliveries"]


def test_a_request_of_which_there_is_nothing_was_not_audited(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped name must not look like a clean audit, neither to a person nor to a script."""
    url = f"rocksdb://{tmp_path / 'store'}"
    with Lake(url) as lake:
        store(lake, [told("A.1", "accepted", 0)])
    verdict = run(spark, url, request="r1x")
    assert (1, False, 0) == (verdict.exit_code, verdict.clean, verdict.wrong)
    _tell_verdict(verdict, "the store", as_json=False)
    out, err = capsys.readouterr()
    assert "0 deliveries: none\nnothing was audited: there are no receipts of request 'r1x'\n" == out
    assert err.startswith("error: the store has no receipts of request 'r1x'; `motorcade fanout list` names")
    _tell_verdict(verdict, "the store", as_json=True)
    out, err = capsys.readouterr()
    assert {"clean": False, "request": "r1x"}.items() <= json.loads(out).items()
    assert err
