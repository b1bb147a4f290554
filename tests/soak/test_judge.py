"""Floors that the judge of the soak refuses, and those that pass."""

from __future__ import annotations

from dataclasses import replace

from tests.soak.judge import Floor, report, verdict

LEVEL = Floor(
    1,
    rss=100 << 20,
    trimmed=90 << 20,
    objects=5000,
    descriptors=50,
    threads=10,
    disk=1 << 20,
    tables={"Router._routes": 40, "sys.modules": 800, "State.known": 10},
    kinds={"builtins.dict": 900},
    probes=100,
)


def floors(**last: object) -> list[Floor]:
    """Three, of which the last differs."""
    return [LEVEL, replace(LEVEL, cycle=2), replace(LEVEL, cycle=3, **last)]  # type: ignore[arg-type]


def test_level_floors_pass() -> None:
    assert [] == verdict(floors())
    assert [] == verdict(floors(rss=int(104.9 * 2**20), objects=5200, descriptors=60, disk=60 << 20))
    first = replace(LEVEL, rss=50 << 20, tables={}, kinds={})
    assert [] == verdict([first, *floors()[1:]]), "what a node makes once does not count"


def test_each_thing_that_grows_is_named() -> None:
    for change, word in (
        ({"rss": 106 << 20}, "RSS grew"),
        ({"trimmed": 96 << 20}, "RSS after a collection"),
        ({"objects": 6000}, "objects grew"),
        ({"descriptors": 80}, "descriptors"),
        ({"threads": 20}, "threads"),
        ({"disk": 200 << 20}, "disk"),
        ({"tables": {"Router._routes": 80}}, "table Router._routes grew from 40 to 80"),
        ({"tables": {"Made._later": 30}}, "table Made._later grew from 0 to 30"),
        ({"kinds": {"motorcade.broker.session.Session": 300}}, "objects of type motorcade.broker.session.Session"),
        ({"lost": 1}, "cycle 3: 1 of 100 probes lost"),
        ({"probes": 0}, "no probe"),
        ({"errors": ["connection_failed"]}, "connection_failed"),
    ):
        found = verdict(floors(**change))
        assert 1 == len(found), (change, found)
        assert word in found[0]


def test_a_cache_may_fill_up_to_its_bound() -> None:
    assert [] == verdict(floors(tables={"State.known": 19_000, "Recent.young[][]": 400_000}))
    assert ["table State.known grew from 10 to 21000"] == verdict(floors(tables={"State.known": 21_000}))


def test_objects_of_caches_do_not_count_up_to_their_bound() -> None:
    assert [] == verdict(floors(objects=6_000, kinds={"builtins.dict": 900, "builtins.list": 1_000}))
    found = verdict(floors(objects=8_000, kinds={"builtins.dict": 900, "builtins.list": 3_000}))
    assert [
        "objects grew from 5000 to 6700 (cycles 2 to 3)",
        "objects of type builtins.list grew from 0 to 3000",
    ] == found


def test_too_few_floors_say_nothing() -> None:
    assert verdict([LEVEL])
    grown = verdict([LEVEL, replace(LEVEL, cycle=2, rss=200 << 20)])
    assert ["RSS grew from 104857600 to 209715200 (cycles 1 to 2)"] == grown


def test_the_report_has_all_floors_side_by_side() -> None:
    text = report(floors(tables={"Router._routes": 80}))
    lines = text.splitlines()
    assert lines[0].split()[-3:] == ["1", "2", "3"]
    assert any(line.split() == ["Router._routes", "40", "40", "80"] for line in lines)
    assert 1 == len({len(line) for line in lines})
