"""Leaky buckets, networks and flapping, with time as an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motorcade.broker.limits import Flapping, LeakyBucket, Networks

# --- leaky buckets ------------------------------------------------------------------------------------------------


def test_a_burst_fits_and_the_next_one_waits() -> None:
    bucket = LeakyBucket(10.0, 5.0, 0.0)
    assert [True] * 5 + [False] == [bucket.admits(0.0) for _ in range(6)]
    assert not bucket.admits(0.09)
    assert bucket.admits(0.1)
    assert not bucket.admits(0.1)
    assert [True] * 5 + [False] == [bucket.admits(100.0) for _ in range(6)], "it never holds more than the burst"


def test_pouring_tells_how_long_to_hold_back() -> None:
    bucket = LeakyBucket(100.0, 50.0, 0.0)
    assert 0.0 == bucket.pour(50, 0.0)
    assert pytest.approx(0.25) == bucket.pour(25, 0.0)
    assert pytest.approx(0.05) == bucket.pour(0, 0.2)
    assert 0.0 == bucket.pour(0, 0.25)
    assert 0.0 == bucket.pour(50, 10.0)


def test_a_rate_of_zero_never_fills() -> None:
    bucket = LeakyBucket(0.0, 1.0, 0.0)
    assert all(bucket.admits(0.0) for _ in range(100))
    assert 0.0 == bucket.pour(1e9, 0.0)


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=200), st.integers(1, 50), st.integers(1, 20))
def test_never_more_than_burst_plus_rate_times_time(pauses: list[float], rate: int, burst: int) -> None:
    """Whatever the pattern of arrivals, and nobody is refused who came slower than the rate."""
    bucket = LeakyBucket(rate, burst, 0.0)
    now, admitted = 0.0, 0
    for pause in pauses:
        now += pause
        fits = bucket.admits(now)
        admitted += fits
        assert admitted <= burst + rate * now + 1e-6
        assert fits or pause * rate < 1 + 1e-6 or burst > 1


def test_a_clock_that_steps_back_refuses_nobody() -> None:
    """An empty bucket stays empty; what was in it leaks at its rate from then on."""
    for step in (-1.0, -60.0, -86400.0):
        bucket = LeakyBucket(1000.0, 20_000.0, 1e9)
        assert bucket.admits(1e9)
        assert bucket.admits(1e9 + step)
        other = LeakyBucket(1000.0, 20_000.0, 1e9)
        other.pour(20_000.0, 1e9)
        assert other.pour(1.0, 1e9 + step) < 1.0


# --- networks -----------------------------------------------------------------------------------------------------


def test_networks() -> None:
    """Deny goes first; an IPv4 address inside IPv6 is an IPv4 address; who has no address needs an open door."""
    for allow, deny, host, admitted in (
        ((), (), "203.0.113.9", True),
        ((), (), "anything", True),
        (("10.0.0.0/8",), (), "10.1.2.3", True),
        (("10.0.0.0/8",), (), "11.1.2.3", False),
        (("10.0.0.0/8",), ("10.1.0.0/16",), "10.1.2.3", False),
        (("10.0.0.0/8",), ("10.1.0.0/16",), "10.2.2.3", True),
        ((), ("10.0.0.0/8",), "10.2.2.3", False),
        ((), ("10.0.0.0/8",), "192.0.2.1", True),
        (("10.0.0.0/8",), (), "::ffff:10.1.2.3", True),
        ((), ("10.0.0.0/8",), "::ffff:10.1.2.3", False),
        (("2001:db8::/32",), (), "2001:db8::1", True),
        (("2001:db8::/32",), (), "10.0.0.1", False),
        ((), ("fe80::/10",), "fe80::1%eth0", False),
        (("10.0.0.1/8",), (), "10.9.9.9", True),
        (("10.0.0.0/8",), (), "", False),
        ((), ("10.0.0.0/8",), "", False),
    ):
        assert admitted is Networks(allow, deny).admits(host)


# --- flapping -----------------------------------------------------------------------------------------------------


def connects(flapping: Flapping, name: str, *times: float) -> list[bool]:
    """Whether a name gets in at each of these times."""
    return [not flapping.banned(name, now) and flapping.count(name, now) for now in times]


def test_a_name_that_comes_too_often_is_banned_for_a_while() -> None:
    flapping = Flapping(3, 60.0, 30.0)
    assert [True, True, True, False] == connects(flapping, "car", 0.0, 1.0, 2.0, 3.0)
    assert [True] == connects(flapping, "bus", 3.0), "others are not concerned"
    assert [False, False] == connects(flapping, "car", 4.0, 32.9)
    assert [True, True, True, False] == connects(flapping, "car", 33.0, 34.0, 35.0, 36.0)


def test_a_name_that_comes_in_time_is_never_banned() -> None:
    flapping = Flapping(3, 60.0, 30.0)
    assert all(connects(flapping, "car", *(25.0 * i for i in range(100))))


def test_a_count_of_zero_bans_nobody() -> None:
    assert all(connects(Flapping(0, 60.0, 30.0), "car", *[0.0] * 1000))


def test_the_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flapping, "SIZE", 10)
    flapping = Flapping(1, 60.0, 30.0)
    for number in range(100):
        flapping.count(f"once {number}", 0.0)
        flapping.count(f"twice {number}", 0.0)
        flapping.count(f"twice {number}", 0.0)
    assert len(flapping._seen) <= 10
    assert len(flapping._banned) <= 10
    assert flapping.banned("twice 99", 1.0), "the newest are remembered"


def test_the_table_forgets_those_who_came_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers with ever new names do not wash out one who keeps coming."""
    monkeypatch.setattr(Flapping, "SIZE", 10)
    flapping = Flapping(20, 60.0, 30.0)
    for number in range(20):
        assert flapping.count("car", 0.0)
        for other in range(5):
            flapping.count(f"{number} {other}", 0.0)
    assert not flapping.count("car", 0.0)


def test_names_go_when_their_time_is_over() -> None:
    """Ever new names do not add up; whoever connects too often within a window is found all the same."""
    flapping = Flapping(3, 60.0, 30.0)
    for number in range(10_000):
        now = number / 10
        flapping.sweep(now)
        assert flapping.count(f"car-{number}", now)
        if number % 100 == 0:
            assert [True, True, True, False] == connects(flapping, f"bus-{number}", *[now] * 4)
    assert len(flapping) <= 2 * 61 * 10
    assert flapping.banned("bus-9900", 1000.0)
    for now in (1061.0, 1122.0, 1183.0):
        flapping.sweep(now)
    assert 0 == len(flapping)


def test_a_sweep_in_the_middle_of_a_window_forgets_nobody() -> None:
    for swept in range(1, 60):
        flapping = Flapping(3, 60.0, 30.0)
        flapping.sweep(0.5)
        assert [True] == connects(flapping, "car", 1.0)
        flapping.sweep(float(swept + 1))
        assert [True] == connects(flapping, "car", swept + 1.0)
        flapping.sweep(60.6)
        assert [True, False] == connects(flapping, "car", 60.7, 60.8)
