"""Who is found dead, who steps back, who may join: looks at records, with a clock that is turned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from motorcade.cluster.membership import (
    ClusterRecord,
    MemberRecord,
    Membership,
    MembershipChange,
    drift,
    objection,
    same_name,
    steward,
)
from motorcade.extension.cluster import MemberState

LEASE = 3.0
SHARED = ClusterRecord(name="fleet", store="s", last=9)


def record(number: int, name: str = "", state: MemberState = MemberState.LIVE, **more: object) -> MemberRecord:
    fields = {"token": b"", "writer": f"w{number}", "address": f"127.0.0.1:{7000 + number}", "software": "1.0", **more}
    return MemberRecord(name=name or f"n{number}", number=number, state=state, **fields)  # type: ignore[arg-type]


class Looks:
    """What one member sees: looks at most half a second apart, unless told otherwise."""

    def __init__(self, me: MemberRecord) -> None:
        self.membership = Membership(me, LEASE)
        self.now = 100.0
        self.heard: dict[str, float] = {}
        self.stored: dict[str, MemberRecord] = {}

    def put(self, *records: MemberRecord) -> None:
        self.stored |= {one.id: one for one in records}

    def look(self) -> MembershipChange:
        return self.membership.look([self.membership.me, *self.stored.values()], self.now, self.heard)

    def until(self, end: float, beating: Iterable[str] = ()) -> list[MembershipChange]:
        """Look every half second; some others count on."""
        found = []
        while self.now < end:
            self.now += 0.5
            for id_ in beating:
                self.stored[id_] = replace(self.stored[id_], beat=self.stored[id_].beat + 1)
            found.append(self.look())
        return found


def condemned(found: Iterable[MembershipChange]) -> list[str]:
    return [one.id for each in found for one in each.condemn]


def test_a_member_is_dead_when_its_counter_stands_for_a_lease_while_one_renews() -> None:
    looks = Looks(record(1))
    looks.put(record(2), record(3))
    first = looks.look()
    assert ["n2~2", "n3~3"] == [one.id for one in first.joined] and first.changed
    assert [] == condemned(looks.until(102.5, beating=["n2~2"]))
    assert ["n3~3"] == condemned(looks.until(103.0, beating=["n2~2"]))


def test_nobody_dies_while_the_store_is_away_nor_because_the_observer_stood_still() -> None:
    looks = Looks(record(1))
    looks.put(record(2))
    looks.until(102.5)
    looks.now = 130.0  # nothing could be renewed
    assert [] == condemned([looks.look()])
    assert [] == condemned(looks.until(132.5))
    assert ["n2~2"] == condemned(looks.until(133.0))


def test_who_is_condemned_and_left_alone_is_fenced_by_another_one() -> None:
    looks = Looks(record(1))
    looks.put(record(2))
    looks.look()
    looks.put(record(2, state=MemberState.CONDEMNED, by="n9~9"))
    assert [] == [one for found in looks.until(103.0) for one in found.fence]
    assert ["n2~2"] == [one.id for found in looks.until(103.5) for one in found.fence]
    looks.put(record(2, state=MemberState.FENCED))
    fenced = looks.look()
    assert ["n2~2"] == [one.id for one in fenced.gone] and fenced.changed
    assert MemberState.CONDEMNED is fenced.gone[0].state
    assert [] == condemned(looks.until(110.0))
    del looks.stored["n2~2"]
    removed = looks.look()
    assert removed.changed and not removed.gone


def test_a_member_whose_record_is_gone_has_left() -> None:
    looks = Looks(record(1))
    looks.put(record(2, state=MemberState.LEAVING))
    looks.look()
    looks.stored.clear()
    (left,) = looks.look().gone
    assert MemberState.LEAVING is left.state


CUT_OFF = [
    # me, the other, it is heard of, what it lists, and whether I step back
    (record(2), record(1), False, (), True),
    (record(2), record(1), True, (), False),
    (record(2), record(1), False, (2,), False),
    (record(1), record(2), False, (), False),
    (record(2, state=MemberState.JOINING), record(1), False, (), False),
    (record(2), record(1, state=MemberState.JOINING), False, (), False),
]


@pytest.mark.parametrize(("me", "other", "heard", "sees", "back"), CUT_OFF)
def test_of_two_that_do_not_see_each_other_the_younger_one_steps_back(
    me: MemberRecord, other: MemberRecord, heard: bool, sees: tuple[int, ...], back: bool
) -> None:
    looks = Looks(me)
    looks.put(replace(other, sees=sees))
    looks.look()
    unseen = []
    while looks.now < 108.0:
        if heard:
            looks.heard = {other.id: looks.now}
        unseen += [one.id for found in looks.until(looks.now + 0.5, beating=[other.id]) for one in found.unseen]
    assert bool(unseen) is back


def test_one_that_does_not_renew_is_no_reason_to_step_back() -> None:
    looks = Looks(record(2))
    looks.put(record(1))
    found = looks.until(103.5)
    assert ["n1~1"] == condemned(found)[:1] and not any(each.unseen for each in found)


def test_renewals_count_and_tell_whom_one_sees() -> None:
    membership = Membership(record(4, state=MemberState.JOINING), LEASE)
    next_ = membership.renewal([9, 2])
    assert (1, (2, 9), MemberState.JOINING) == (next_.beat, next_.sees, next_.state)
    assert MemberState.LIVE is membership.renewal([], MemberState.LIVE).state


def test_a_name_is_taken_only_when_its_member_is_surely_alive() -> None:
    looks = Looks(record(5, "car"))
    looks.put(record(2, "car"))
    looks.until(101.0)
    assert looks.membership.moving("car") is None
    looks.until(101.5, beating=["car~2"])
    other = looks.membership.moving("car")
    assert other is not None
    assert "car~5 cannot join: car~2 at 127.0.0.1:7002 is alive" in same_name(looks.membership.me, other)


@pytest.mark.parametrize(
    ("cluster", "others", "words"),
    [
        ("fleet", [record(1)], ""),
        ("other", [], ""),
        ("other", [record(1, state=MemberState.FENCED)], ""),
        ("other", [record(1)], "n5 belongs to the cluster 'other', and its store to the cluster 'fleet' with n1~1:"),
        ("fleet", [record(1, protocol=9, oldest=8, software="9.0")], "n5 (Motorcade 1.0) and n1~1 (Motorcade 9.0)"),
        ("fleet", [record(1, protocol=9, oldest=1)], ""),
        ("fleet", [record(1, protocol=0, oldest=0)], "update the older one"),
        ("fleet", [record(1, addressed=("a/{client}",))], "n5 has cluster.addressed = [], n1~1 has ['a/{client}']"),
        ("fleet", [record(1, addressed=("a/{client}",), state=MemberState.FENCED)], ""),
    ],
)
def test_who_may_join(cluster: str, others: list[MemberRecord], words: str) -> None:
    why = objection(record(5), cluster, SHARED, others)
    assert words in why and bool(words) == bool(why)


def test_options_that_differ_are_named() -> None:
    one = record(1, options={"a": "1", "b": "2"})
    assert [] == drift(one, record(2, options={"a": "1", "b": "2"}))
    assert ["a", "c"] == drift(one, record(2, options={"a": "2", "b": "2", "c": "1"}))


def test_cells_are_spread_over_the_members_and_move_only_with_theirs() -> None:
    members = [f"node-{number}~{number}" for number in range(1, 5)]
    before = [steward(members, feed) for feed in range(256)]
    counts = Counter(before)
    assert 4 == len(counts) and min(counts.values()) > 32
    after = [steward(members[:3], feed) for feed in range(256)]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != members[3])
    assert before == [steward(reversed(members), feed) for feed in range(256)]
