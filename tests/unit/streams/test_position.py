"""What a filter and its offset mean."""

from __future__ import annotations

import pytest

from motorcade.core.errors import MotorcadeError
from motorcade.core.subscription import Subscription
from motorcade.plugins.logs.streams.position import (
    EARLIEST,
    LATEST,
    MOST,
    Origin,
    Position,
    Wish,
    read_position,
    read_wish,
)


def test_what_a_position_means() -> None:
    for text, position in [
        ("earliest", EARLIEST),
        ("latest", LATEST),
        ("1", Position(Origin.NUMBER, 1)),
        ("0042", Position(Origin.NUMBER, 42)),
        (str(MOST), Position(Origin.NUMBER, MOST)),
        ("@0", Position(Origin.TIME, 0.0)),
        ("@1700000000.25", Position(Origin.TIME, 1700000000.25)),
        ("2023-11-14T22:13:20Z", Position(Origin.TIME, 1700000000.0)),
        ("2023-11-14T22:13:20.5", Position(Origin.TIME, 1700000000.5)),
        ("2023-11-14 22:13:20", Position(Origin.TIME, 1700000000.0)),
        ("2023-11-15T00:13:20+02:00", Position(Origin.TIME, 1700000000.0)),
        ("1970-01-02", Position(Origin.TIME, 86400.0)),
    ]:
        assert position == read_position(text), text


def test_what_is_no_position() -> None:
    """The answer says what could be written, and is no longer than the mistake deserves."""
    for text in [
        *("0", "-1", "1.5", "1e3", str(MOST + 1), "9" * 5000, "\uff12", "\u00b2", " ", " 1"),
        *("EARLIEST", "yesterday", "2023-13-01", "2023-11-14T25:00", "2023-11-14T22:13:20Z "),
        *("@", "@x", "@-1", "@nan", "@inf", "@1e999"),
    ]:
        with pytest.raises(MotorcadeError, match="'earliest'") as caught:
            read_position(text)
        assert len(str(caught.value)) < 250


def test_what_a_filter_and_its_properties_mean() -> None:
    wishes: list[tuple[str, tuple[tuple[str, str], ...], Wish]] = [
        ("$stream/s", (), Wish("s", "", None)),
        ("$stream/s/latest", (), Wish("s", "latest", LATEST)),
        ("$stream/a.b-c_1/7", (), Wish("a.b-c_1", "7", Position(Origin.NUMBER, 7))),
        ("$stream/s", (("stream-offset", "earliest"),), Wish("s", "", EARLIEST)),
        ("$stream/s", (("other", "x"), ("stream-offset", "1"), ("stream-offset", "latest")), Wish("s", "", LATEST)),
        ("$stream/s/latest", (("stream-offset", "earliest"),), Wish("s", "latest", LATEST)),
    ]
    for filter_, properties, wish in wishes:
        assert wish == read_wish(Subscription(filter_, user_properties=properties)), filter_


def test_filters_that_mean_nothing() -> None:
    for filter_, says in [
        ("$stream/", "stream name ''"),
        ("$stream", "stream name"),
        ("$stream/#", "without wildcards"),
        ("$stream/+", "without wildcards"),
        ("$stream/s/#", "without wildcards"),
        ("$stream/s/", "an offset must follow"),
        ("$stream/s/earliest/x", "'earliest/x' is none of"),
        ("$stream/.s", "stream name '.s'"),
        ("$stream/" + "s" * 65, "at most 64"),
    ]:
        with pytest.raises(MotorcadeError, match=says):
            read_wish(Subscription(filter_))
    with pytest.raises(MotorcadeError, match="is empty"):
        read_wish(Subscription("$stream/s", user_properties=(("stream-offset", ""),)))
