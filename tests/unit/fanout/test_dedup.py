"""Batches with an id that were stored in part or not told of, one case at a time, in the world of the model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from motorcade.mqtt.packets import Puback, Publish, Pubrec
from motorcade.plugins.fanout.batch import parse
from motorcade.plugins.fanout.dedup import named_of, recovered, vins_of
from motorcade.plugins.fanout.options import FanoutConfig
from motorcade.plugins.fanout.record import BatchRecord, IntentRecord, Named, decode_intent, encode
from motorcade.plugins.fanout.tables import BATCHES, INGRESS, INTENTS
from motorcade.storage.ports import StoreError
from tests.unit.fanout.test_model import RETENTION, VINS, Machine, Sent, judged

ANSWERED = {"accepted": 3, "duplicates": 0, "replaced": 0}


class World(Machine):
    """Names what it publishes, and keeps the figures of each answer."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: list[dict[str, int]] = []

    def answered(self, packet: Puback | Pubrec) -> None:
        super().answered(packet)
        assert packet.reason < 0x80, packet
        self.figures.append({name: int(value) for name, value in packet.properties.user_properties})

    def send(self, data: str, mode: str = "append", *, turn: bool = True) -> None:
        """A batch for all vehicles whose id is its data, a number; the first time or again."""
        fields: dict[str, Any] = {"ids": VINS, "request_id": "r0", "data": data, "mode": mode, "batch_id": f"b{data}"}
        self.number += 1
        self.named[data.encode()] = INGRESS, fields, VINS
        self.batches[self.number] = Sent(self.now, "r0", data.encode(), VINS)
        self.say(self.publisher, Publish(INGRESS, json.dumps(fields).encode(), 1, packet_id=self.number))
        self.go_on(turn)

    def write(self, count: int = 1) -> None:
        """So many of the writes that wait are done."""
        self.let_go(count, True)

    def has(self, vehicle: int) -> list[str]:
        """What waits for a vehicle."""
        return [entry.payload.decode() for entry in self.pending(VINS[vehicle])]


@pytest.fixture(params=[True, False], ids=["atomic", "in parts"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """What the model demands in the end is demanded here, too."""
    with judged(World(), atomic=request.param) as machine:
        yield machine


@pytest.mark.parametrize(("end", "mode"), [("kill", "replace"), ("fail", "append")])
def test_stored_in_part_it_goes_to_the_others_when_it_is_sent_again(world: World, end: str, mode: str) -> None:
    """Where a batch is atomic it is stored for all of them, and not once more."""
    world.hold()
    world.send("1", mode)
    if end == "kill":
        world.kill(int(world.store.atomic), True)
    else:
        world.fail("part")
        world.work_again()
    left = [] if not world.store.atomic else ["1"]
    assert [["1"], left, left] == [world.has(number) for number in range(3)]
    assert not world.figures
    world.send("1", mode)
    world.send("1", mode)
    first = ANSWERED | ({"repeated": 1} if world.store.atomic else {})
    assert [first, ANSWERED | {"repeated": 1}] == world.figures
    assert [["1"]] * 3 == [world.has(number) for number in range(3)]
    assert not world.store.records_of(INTENTS)


def test_stored_in_part_twice(world: World) -> None:
    """The rest of a rest."""
    for _ in range(3):
        world.hold()
        world.send("1")
        world.kill(int(world.store.atomic), True)
    assert [["1"]] * 3 == [world.has(number) for number in range(3)]
    world.send("1")
    assert ANSWERED | {"repeated": 1} == world.figures[-1]


def test_killed_at_any_time_it_is_stored_once() -> None:
    """Before anything is stored, with its entries, with its receipts."""
    for atomic, written in itertools.product((True, False), range(6)):
        with judged(World(), atomic=atomic) as world:
            world.hold()
            world.send("1")
            world.write(written)
            world.kill()
            world.send("1")
            assert [["1"]] * 3 == [world.has(number) for number in range(3)], f"{written} writes, atomic: {atomic}"
            assert 3 == world.figures[-1]["accepted"]


def test_what_was_lost_is_not_remembered(world: World) -> None:
    world.hold()
    world.send("1")
    world.fail("lost")
    world.work_again()
    assert not world.store.records_of(BATCHES)
    world.send("1")
    assert [ANSWERED] == world.figures


def test_the_later_of_two_that_were_not_told_of_stays(world: World) -> None:
    """Both are sent again, in order: the first must not replace the second, which is known already."""
    world.hold()
    for data in ("1", "2"):
        world.send(data, "replace")
    assert 2 == len(world.store.waiting), "both are on their way into the store"
    world.kill(2)
    for data in ("1", "2"):
        world.send(data, "replace")
    superseded = {"accepted": 0, "duplicates": 0, "replaced": 0, "superseded": 3, "repeated": 1}
    assert [superseded, ANSWERED | {"repeated": 1}] == world.figures
    assert [["2"]] * 3 == [world.has(number) for number in range(3)]


def test_each_of_two_that_append_is_there(world: World) -> None:
    world.hold()
    for data in ("1", "2"):
        world.send(data)
    world.kill(2)
    for data in ("1", "2"):
        world.send(data)
    assert [ANSWERED | {"repeated": 1}] * 2 == world.figures
    assert [["1", "2"]] * 3 == [world.has(number) for number in range(3)]


def test_the_later_of_two_stays_where_the_first_was_never_stored(world: World) -> None:
    """The store has lost the first, without saying so, and has taken the second."""
    world.hold()
    for data in ("1", "2"):
        world.send(data, "replace")
    world.fail("part")
    world.work_again()
    for data in ("1", "2"):
        world.send(data, "replace")
    assert [["2"]] * 3 == [world.has(number) for number in range(3)]
    assert [3, 0] == [world.figures[-2]["superseded"], world.figures[-2]["accepted"]]
    assert 3 == world.figures[-1]["accepted"] and world.figures[-1]["repeated"]


@pytest.mark.parametrize(("mode", "later"), [("append", "replace"), ("replace", "append")])
def test_a_later_one_that_would_not_have_replaced_it_keeps_nobody_from_it(world: World, mode: str, later: str) -> None:
    world.hold()
    world.send("1", mode)
    world.send("2", later)
    world.fail("part")
    world.work_again()
    world.send("1", mode)
    assert ANSWERED.items() <= world.figures[-1].items()
    others = ["1", "2"] if world.store.atomic else ["2", "1"]
    assert [["1", "2"], others, others] == [world.has(number) for number in range(3)]


def test_an_earlier_one_is_replaced_where_it_was_not_yet(world: World) -> None:
    world.send("1", "replace")
    world.hold()
    world.send("2", "replace")
    world.kill(int(world.store.atomic), True)
    left = ["2" if world.store.atomic else "1"]
    assert [["2"], left, left] == [world.has(number) for number in range(3)]
    world.send("2", "replace")
    assert [["2"]] * 3 == [world.has(number) for number in range(3)]
    assert {"accepted": 3, "replaced": 3}.items() <= world.figures[-1].items()


def test_a_twin_waits_for_a_batch_that_is_under_way(world: World) -> None:
    world.hold()
    world.send("1")
    world.send("1")
    world.send("2")
    assert 1 == len(world.store.waiting), "only the first one is being stored"
    world.fail("lost")
    world.work_again()
    assert [["1", "2"]] * 3 == [world.has(number) for number in range(3)], "in the order in which they came"


def test_sent_again_when_its_id_is_forgotten_while_the_first_still_waits_for_the_store(world: World) -> None:
    """The first one is stored when it is over already; the other is another batch, and each has its receipts."""
    world.hold()
    world.send("1")
    world.pass_time(RETENTION)
    world.send("1")
    world.work_again()
    assert [ANSWERED] * 2 == world.figures
    world.collect()
    assert [["1"]] * 3 == [world.has(number) for number in range(3)]


def test_sent_again_just_before_its_id_is_forgotten(world: World) -> None:
    """What was known of it when it came counts, however long the store takes."""
    world.hold()
    world.send("1")
    world.fail("part")
    world.work_again()
    world.pass_time(RETENTION - 5.0)
    world.hold()
    world.send("1")
    world.pass_time(10.0)
    world.fail("part")
    world.work_again()
    world.send("1")
    assert ANSWERED.items() <= world.figures[-1].items()


def test_a_batch_without_an_id_asks_the_store_for_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    get = world.store.inner.records.get

    async def noted(collection: str, key: str, now: float) -> bytes | None:
        asked.append(collection)
        return await get(collection, key, now)

    monkeypatch.setattr(world.store.inner.records, "get", noted)
    world.publish()
    assert [] == asked
    world.send("7")
    assert [BATCHES] == asked


def test_a_store_that_cannot_be_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform has no answer, and the batch is not stored; then everything goes on."""

    async def broken(*_: object) -> bytes | None:
        raise StoreError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(world.store.inner.records, "get", broken)
        world.send("1")
        assert not world.figures and not world.has(0)
    world.send("1")
    assert [ANSWERED] == world.figures


# -- what is compared, and what is written down

CONFIG = FanoutConfig()


def name(**fields: Any) -> Named | None:
    given = {"ids": VINS, "request_id": "r", "data": "x", "batch_id": "b"} | fields
    return named_of(parse(json.dumps(given).encode(), CONFIG, trigger="data_id" in fields))


def test_what_makes_a_batch_another_one() -> None:
    first = name()
    assert first is not None
    same = [name(ids=VINS[::-1]), name(priority=3, expires_in=5), name(data="eA==", encoding="base64")]
    assert {first.digest} == {named.digest for named in same if named is not None}
    others = [name(ids=VINS[:2]), name(data="y"), name(data_id="x"), name(data_id="y")]
    assert 5 == len({first.digest, *(named.digest for named in others if named is not None)})


def test_an_intent_of_an_older_version_has_no_id() -> None:
    old = b"\x94\x01\xa1r\xb1LMCAAAAA4RA000000\xcb?\xf0\x00\x00\x00\x00\x00\x00"
    assert IntentRecord("r", "LMCAAAAA4RA000000", 1.0) == decode_intent(old)
    intent = IntentRecord("r", "".join(VINS), 1.0, name())
    assert intent == decode_intent(encode(intent))
    assert VINS == vins_of(intent.vins)


def test_what_is_remembered_of_a_part() -> None:
    named = name()
    assert named is not None
    intent = IntentRecord("r", "".join(VINS), 5.0, named)
    assert recovered(b"1", intent, named, None, 0, 0, VINS) is None
    part = recovered(b"1", intent, named, None, 1, 1, VINS[2:])
    assert BatchRecord(b"1", named.digest, 5.0, 1, 0, 1, 0, 1, VINS[2]) == part
    assert recovered(b"1", intent, named, part, 3, 0, ()) is None, "it is known"
    rest = IntentRecord("r", VINS[2], 6.0, named)
    assert recovered(b"2", rest, named, part, 0, 0, VINS[2:]) is None
    assert BatchRecord(b"2", named.digest, 6.0, 2, 0, 1, 0, 1, "") == recovered(b"2", rest, named, part, 1, 0, ())
