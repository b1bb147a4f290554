"""The options of the fan-out: what cannot be set, and the topics that follow from them."""

from __future__ import annotations

import msgspec
import pytest

from motorcade.plugins.fanout.options import FanoutConfig


def convert(**values: object) -> FanoutConfig:
    return msgspec.convert(values, FanoutConfig)


def test_topics_follow_from_the_prefix() -> None:
    assert "agent/V/proxy/request/task_1" == FanoutConfig().topic_of("V", "task_1")
    assert "agent/V/proxy/request/+" == FanoutConfig().filter_of("V")
    assert "{VIN2}/V/r" == FanoutConfig(topic_prefix="{VIN2}/{VIN}").topic_of("V", "r")


WRONG_PREFIXES = (
    ("", "topic name is empty"),
    ("agent/proxy", "must have {VIN} once, as a level of its own"),
    ("agent/x{VIN}/proxy", "must have {VIN} once, as a level of its own"),
    ("agent/{VIN}/{VIN}", "must have {VIN} once, as a level of its own"),
    ("agent/{VIN}/x{VIN}", "must have {VIN} once, as a level of its own"),
    ("agent/{vin}", "must have {VIN} once, as a level of its own"),
    ("agent/{VIN}/+", "topic name contains a wildcard"),
    ("agent/{VIN}/#", "topic name contains a wildcard"),
    ("agent/{VIN}/", "ends with '/'"),
    ("$share/{VIN}/x", "vehicles cannot subscribe to $share/…"),
    ("$queue/{VIN}", "vehicles cannot subscribe to $queue/…"),
    ("$SDV-FANOUT/{VIN}", "vehicles cannot subscribe to $SDV-FANOUT/…"),
)


def test_a_prefix_that_cannot_work_is_refused() -> None:
    for prefix, problem in WRONG_PREFIXES:
        with pytest.raises(msgspec.ValidationError, match=r"^topic_prefix: ") as caught:
            convert(topic_prefix=prefix)
        assert problem in str(caught.value), prefix


def test_a_longest_delay_below_the_first_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="retry_delay_max: 1 is less than retry_delay, 2"):
        convert(retry_delay=2.0, retry_delay_max=1.0)


def test_values_out_of_range_and_unknown_keys_are_refused() -> None:
    for key, value in (
        ("max_vins", 0),
        ("max_payload", 0),
        ("max_pending", -1),
        ("max_attempts", 0),
        ("max_attempts", 255),
        ("dispatchers", 0),
        ("gc_interval", 0),
        ("data_retention", 0),
        ("ack_timeout", -1),
        ("mode", "keep"),
        ("topic_prefx", "agent/{VIN}"),
    ):
        with pytest.raises(msgspec.ValidationError):
            raise AssertionError(f"{key} is {convert(**{key: value})}")
