"""Batches as bytes, how much they are, and what is answered to them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motorcade.client import ConnectionLostError, RefusedError
from motorcade.core.reasons import ReasonCode
from motorcade.core.vin import make_vin
from motorcade.mqtt.codec import encode
from motorcade.mqtt.packets import V5, Publish
from motorcade.publisher.batches import BatchTotals, Order, OrderError, broker_words, packet_bytes


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 10**9), min_size=1, max_size=5),
    st.text(min_size=1, max_size=20),
    st.none() | st.text(max_size=20),
    st.dictionaries(st.sampled_from(["priority", "expires_in", "mode"]), st.integers() | st.text()),
)
def test_a_trigger_is_the_json_that_it_stands_for(
    numbers: list[int], request: str, batch: str | None, options: dict[str, Any]
) -> None:
    vins = [make_vin(number) for number in numbers]
    order = Order(request.encode("utf-8", "replace").decode(), b"x", options)
    batch_id = batch.encode("utf-8", "replace").decode() if batch is not None else None
    options = {
        key: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for key, value in options.items()
    }
    order = Order(order.request_id, b"x", options)
    expected = {"ids": vins, "request_id": order.request_id, "data_id": order.data_id} | options
    if batch_id is not None:
        expected["batch_id"] = batch_id
    assert expected == json.loads(order.trigger(vins, batch_id))


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 20_000))
def test_a_packet_is_as_large_as_the_codec_makes_it(topic: int, payload: int) -> None:
    packet = Publish("t" * topic, bytes(payload), 1, False, False, 1)
    assert len(encode(packet, V5)) == packet_bytes(topic, payload)


def test_size_bytes_are_those_of_all_packets() -> None:
    order = Order("r", b"data" * 100)
    messages = [order.trigger([make_vin(n) for n in range(50)], f"b{number}") for number in range(10)]
    packets = [Publish("$SDV-FANOUT/trigger", message, 1, False, False, 1) for message in messages]
    data = [Publish(order.data_topic, order.data, 1, False, False, 1)] * 3
    whole = sum(len(encode(packet, V5)) for packet in [*packets, *data])
    assert whole == order.size_bytes(10, sum(map(len, messages)), copies=3)
    assert 0 == order.size_bytes(0, 0)
    assert 7 * len(encode(Publish("t" * 30, order.data, 1, False, False, 1), V5)) == order.bytes_one_by_one(7, 30)


def test_answers_are_summed_up() -> None:
    figures = BatchTotals()
    assert 200 == figures.add({"accepted": "200", "duplicates": "1", "replaced": "7"})
    figures.add({"accepted": "100", "duplicates": "0", "replaced": "0", "rejected": "3", "repeated": "1"})
    assert BatchTotals(2, 300, 1, 7, 3, 1) == figures
    assert BatchTotals(3, 301, 1, 7, 3, 1) == figures + BatchTotals(1, 1)


def test_an_answer_of_somebody_else_is_not_taken_for_one() -> None:
    for answer in ({}, {"accepted": "many", "duplicates": "0", "replaced": "0"}):
        with pytest.raises(OrderError, match="is the plugin 'fanout' loaded there"):
            BatchTotals().add(answer)


def test_a_request_id_that_no_broker_takes_is_found_before() -> None:
    Order("task_ota_1", b"").check()
    with pytest.raises(OrderError, match="request_id"):
        Order("a/b", b"").check()


def test_the_brokers_own_words_count() -> None:
    assert "no room (0x97)" == broker_words(RefusedError("it", ReasonCode.QUOTA_EXCEEDED, "no room"))
    assert "quota exceeded (0x97)" in broker_words(RefusedError("it", ReasonCode.QUOTA_EXCEEDED))
    assert "gone" == broker_words(ConnectionLostError("gone"))
