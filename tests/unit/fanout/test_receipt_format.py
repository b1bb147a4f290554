"""Receipts as values of a stream: the bytes are those of the format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motorcade.core import receipt as receipts
from motorcade.core import record
from motorcade.core.message import Message
from motorcade.core.receipt import Receipt, State, topic_of
from motorcade.core.vin import MAX_VINS, make_vin
from motorcade.plugins.fanout.batch import MAX_REQUEST_ID
from motorcade.plugins.fanout.receipt_format import AcceptedRun, ReceiptFormat, prefix_of

names = st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="/+#"), min_size=1)
vehicles = st.integers(0, MAX_VINS - 1).map(make_vin)
times = st.floats(min_value=0, max_value=4e9)


def made(node: str) -> ReceiptFormat:
    return ReceiptFormat(node)


def as_format(receipt: Receipt, guid: bytes) -> bytes:
    """The value as the format of streams says it."""
    return record.encode(Message(topic_of(receipt), receipts.encode(receipt), 1, guid=guid, timestamp=receipt.time))


@given(
    st.lists(
        st.builds(
            Receipt,
            state=st.sampled_from(State),
            vin=vehicles,
            request_id=names.map(lambda name: name[:MAX_REQUEST_ID]),
            delivery_id=st.text(max_size=30),
            time=times,
            node=st.text(max_size=300),
            attempt=st.integers(0, 254),
            reason=st.text(max_size=300),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_values_are_records_of_a_stream(given_: list[Receipt]) -> None:
    values = made("n1").values(given_, 1000.0)
    guids = [record.decode(value).guid for value in values]
    assert [as_format(receipt, guid) for receipt, guid in zip(given_, guids, strict=True)] == values
    assert sorted(set(guids)) == guids
    for receipt, value in zip(given_, values, strict=True):
        assert value.startswith(prefix_of(receipt.request_id))


@given(
    st.lists(st.tuples(vehicles, st.integers(1, 2**40)), min_size=1, max_size=20),
    names.map(lambda name: name[:MAX_REQUEST_ID]),
    times,
    st.text(max_size=300),
)
def test_the_quick_way_makes_the_same_as_the_slow_one(
    targets: list[tuple[str, int]], request_id: str, now: float, node: str
) -> None:
    run = AcceptedRun([vin for vin, _ in targets], [position for _, position in targets], request_id, now)
    quick, slow = list(made(node).accepted(run, 1000.0)), run.receipts(node)
    assert [as_format(receipt, record.decode(value).guid) for receipt, value in zip(slow, quick, strict=True)] == quick


def test_percent_signs_are_nothing_special() -> None:
    (value,) = made("%n%d").accepted(AcceptedRun([make_vin(1)], [7], "100%b %%", 1.0), 1.0)
    receipt = receipts.decode(record.decode(value).payload)
    assert ("100%b %%", "%n%d", f"{make_vin(1)}.7") == (receipt.request_id, receipt.node, receipt.delivery_id)


def test_no_two_receipts_have_the_same_guid() -> None:
    """However many there are at one time."""
    format_ = made("n1")
    run = AcceptedRun([make_vin(n) for n in range(40)], range(1, 41), "r", 1.0)
    values = [value for _ in range(50) for value in format_.accepted(run, 1000.0)]
    guids = [record.decode(value).guid for value in values]
    assert sorted(set(guids)) == guids


def test_a_prefix_tells_requests_apart_that_begin_alike() -> None:
    (value,) = made("n1").accepted(AcceptedRun([make_vin(1)], [1], "task_1", 1.0), 1.0)
    assert value.startswith(prefix_of("task_1"))
    for other in ("task_11", "task", "task_", "Task_1", f"task_1/{make_vin(1)}"):
        assert not value.startswith(prefix_of(other))


def test_the_bytes_are_those_of_the_versions_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the version before has written them: pipelines and platforms read them."""
    monkeypatch.setattr("os.urandom", lambda _: b"origin")
    format_ = ReceiptFormat("n1")
    vin, time = make_vin(1), 1760000000.25
    acked = Receipt(
        state=State.ACKED, vin=vin, request_id="task_1", delivery_id=f"{vin}.7", time=time, node="n1", attempt=2
    )
    assert [
        (
            b"\x9f\x01\xd9,$SDV-FANOUT/receipt/task_1/LMCAAAAA9RA000001\xc4\xa4"
            b'{"v":1,"state":"acked","vin":"LMCAAAAA9RA000001","request_id":"task_1",'
            b'"delivery_id":"LMCAAAAA9RA000001.7","time":1760000000.25,"node":"n1","attempt":2,"reason":""}'
            b"\xa0\xc0\xcbA\xda9\xde\x00\x10\x00\x00\xc4\x10\x00\x06@\xb5\xee\xce\x00\x00origin\x00\x00"
            b"\x01\xc2\xc0\xc0\xc0\xc0\xc0\x90"
        )
    ] == format_.values([acked], 1760000000.0)
    assert [
        (
            b"\x9f\x01\xd9,$SDV-FANOUT/receipt/task_1/LMCAAAAA9RA000001\xc4\xa7"
            b'{"v":1,"state":"accepted","vin":"LMCAAAAA9RA000001","request_id":"task_1",'
            b'"delivery_id":"LMCAAAAA9RA000001.7","time":1760000000.25,"node":"n1","attempt":0,"reason":""}'
            b"\xa0\xc0\xcbA\xda9\xde\x00\x10\x00\x00\xc4\x10\x00\x06@\xb5\xee\xce\x00\x01origin\x00\x00"
            b"\x01\xc2\xc0\xc0\xc0\xc0\xc0\x90"
        )
    ] == list(format_.accepted(AcceptedRun([vin], [7], "task_1", time), 1760000000.0))
