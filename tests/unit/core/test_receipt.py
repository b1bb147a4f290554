"""Receipts as JSON: the schema that others read, and what is none."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motorcade.core.receipt import FINAL, Receipt, ReceiptError, State, decode, delivery_id, encode, topic_of
from tests.support.cases import each

receipts = st.builds(
    Receipt,
    state=st.sampled_from(State),
    vin=st.text(max_size=17),
    request_id=st.text(max_size=20),
    delivery_id=st.text(max_size=20),
    time=st.floats(min_value=0, max_value=4e9),
    node=st.text(max_size=10),
    attempt=st.integers(0, 254),
    reason=st.text(max_size=20),
)

ACKED = Receipt(
    state=State.ACKED,
    vin="LMCAAAAA9RA000001",
    request_id="task_ota_1",
    delivery_id="LMCAAAAA9RA000001.7",
    time=1760000000.25,
    node="n1",
    attempt=2,
)


@given(receipts)
def test_what_goes_in_comes_out(receipt: Receipt) -> None:
    assert receipt == decode(encode(receipt))


def test_the_schema_is_the_one_of_the_page() -> None:
    """Others read this, in other languages: names and order are fixed."""
    assert (
        b'{"v":1,"state":"acked","vin":"LMCAAAAA9RA000001","request_id":"task_ota_1",'
        b'"delivery_id":"LMCAAAAA9RA000001.7","time":1760000000.25,"node":"n1","attempt":2,"reason":""}'
    ) == encode(ACKED)


def test_a_request_is_a_level_of_the_topic_and_so_is_the_vehicle() -> None:
    assert "$SDV-FANOUT/receipt/task_ota_1/LMCAAAAA9RA000001" == topic_of(ACKED)


def test_a_delivery_is_named_by_vehicle_and_position() -> None:
    assert ACKED.delivery_id == delivery_id("LMCAAAAA9RA000001", 7)


def test_states_are_those_of_the_design_and_five_are_final() -> None:
    assert {"accepted", "replaced", "sent", "acked", "retried", "failed", "expired", "cancelled"} == set(State)
    assert {"replaced", "acked", "failed", "expired", "cancelled"} == FINAL


def test_fields_that_came_later_are_ignored_and_those_with_a_default_may_be_missing() -> None:
    stored = {"v": 1, "state": "sent", "vin": "V", "request_id": "r", "delivery_id": "V.1", "time": 2, "more": [1]}
    assert Receipt(state=State.SENT, vin="V", request_id="r", delivery_id="V.1", time=2.0) == decode(
        json.dumps(stored).encode()
    )


@each(key=("state", "vin", "request_id", "delivery_id", "time"))
def test_what_must_be_there_is_named(key: str) -> None:
    stored = msgspec.json.decode(encode(ACKED))
    del stored[key]
    with pytest.raises(ReceiptError, match=key):
        decode(json.dumps(stored).encode())


@each(value=(b"", b"{", b"[]", b"1", b"\xff", b'{"v":1}', encode(ACKED)[:-1], encode(ACKED).replace(b"acked", b"lost")))
def test_what_is_no_receipt_is_refused(value: bytes) -> None:
    with pytest.raises(ReceiptError):
        decode(value)


def test_another_version_is_named() -> None:
    with pytest.raises(ReceiptError, match=r"its version is 2, this program knows 1"):
        decode(encode(ACKED).replace(b'"v":1', b'"v":2'))
