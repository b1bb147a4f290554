"""Times that people write."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from motorcade.core.moment import seconds_of
from tests.support.cases import each

ZONES = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
TIMES = st.datetimes(datetime(1971, 1, 1), datetime(9998, 1, 1))  # noqa: DTZ001 - the zone comes later


@given(TIMES, ZONES)
def test_a_time_with_a_zone_is_that_moment(moment: datetime, zone: timezone) -> None:
    """However it is written, and whatever zone is assumed otherwise."""
    zoned = moment.replace(tzinfo=zone)
    for text in (zoned.isoformat(), zoned.isoformat(" "), zoned.astimezone(UTC).isoformat().replace("+00:00", "Z")):
        assert zoned.timestamp() == seconds_of(text) == seconds_of(text, zone)


@given(TIMES, ZONES)
def test_a_time_without_a_zone_is_in_the_one_that_is_assumed(moment: datetime, zone: timezone) -> None:
    assert moment.replace(tzinfo=UTC).timestamp() == seconds_of(moment.isoformat())
    assert moment.replace(tzinfo=zone).timestamp() == seconds_of(moment.isoformat(), zone)
    assert moment.timestamp() == seconds_of(moment.isoformat(), None)


def test_a_date_is_its_beginning() -> None:
    assert datetime(2026, 11, 15, tzinfo=UTC).timestamp() == seconds_of("2026-11-15")


@each(
    text=(
        *("", "x", "now", "5", "1790000000", "20261115", "2026-W46", "2026-11", "08:30"),
        *(
            "2026-13-01",
            "2026-02-30",
            "2026-11-15T25:00",
            "2026-11-15T08:30+99:00",
            "2026-11-15T",
            "2026-11-15T08:30 x",
        ),
        *("1969-12-31", "1970-01-01T00:00+01:00", "٢٠٢٦-11-15", " 2026-11-15", "0001-01-01T00:00+14:00"),
    )
)
def test_what_is_none_is_none(text: str) -> None:
    """Nor is a time before there were any messages."""
    assert seconds_of(text) is None
