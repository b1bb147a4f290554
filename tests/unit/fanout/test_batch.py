"""Batches: what is taken, what is refused as a whole, and what the platform then hears."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motorcade.core.vin import make_vin
from motorcade.plugins.fanout.batch import (
    MAX_BATCH_ID,
    MAX_DATA_ID,
    MAX_EXTRA,
    MAX_REASON,
    MAX_REQUEST_ID,
    BadBatchError,
    FanoutBatch,
    check_data_id,
    check_request_id,
    check_size,
    data_digests,
    parse,
)
from motorcade.plugins.fanout.options import FanoutConfig

CONFIG = FanoutConfig()
VINS = [make_vin(number) for number in range(5)]
GONE = object()


def batch(**fields: Any) -> bytes:
    """One that carries its data; `GONE` leaves a field out."""
    given_ = {"ids": VINS[:2], "request_id": "task_ota_1", "data": "start"} | fields
    return json.dumps({key: value for key, value in given_.items() if value is not GONE}).encode()


def trigger(**fields: Any) -> bytes:
    """One that names its data."""
    return batch(**{"data": GONE, "data_id": "d1"} | fields)


def refusal(payload: bytes, config: FanoutConfig = CONFIG, *, trigger: bool = False) -> str:
    with pytest.raises(BadBatchError) as caught:
        parse(payload, config, trigger=trigger)
    reason = str(caught.value)
    assert len(reason) <= MAX_REASON
    return reason


def test_a_batch_that_carries_its_data() -> None:
    assert FanoutBatch(
        vins=tuple(VINS[:2]),
        duplicates=0,
        request_id="task_ota_1",
        data=b"start",
        data_id="",
        expires_in=None,
        priority=0,
        mode="replace",
    ) == parse(batch(), CONFIG, trigger=False)


def test_a_batch_that_names_its_data_and_says_everything() -> None:
    payload = trigger(expires_in=0.5, priority=9, mode="append", data_id="fw/v2 (final)", batch_id="b" * MAX_BATCH_ID)
    assert FanoutBatch(
        vins=tuple(VINS[:2]),
        duplicates=0,
        request_id="task_ota_1",
        data=None,
        data_id="fw/v2 (final)",
        expires_in=0.5,
        priority=9,
        mode="append",
        batch_id="b" * MAX_BATCH_ID,
    ) == parse(payload, CONFIG, trigger=True)


def test_the_mode_is_the_configured_one_unless_the_batch_says() -> None:
    append = FanoutConfig(mode="append")
    assert "append" == parse(batch(), append, trigger=False).mode
    assert "replace" == parse(batch(mode="replace"), append, trigger=False).mode


def test_vehicles_named_twice_are_counted_and_keep_their_first_place() -> None:
    parsed = parse(batch(ids=[VINS[2], VINS[0], VINS[2], VINS[1], VINS[0], VINS[2]]), CONFIG, trigger=False)
    assert ((VINS[2], VINS[0], VINS[1]), 3) == (parsed.vins, parsed.duplicates)


@given(st.binary(max_size=300))
def test_bytes_travel_as_base64(data: bytes) -> None:
    payload = batch(data=base64.b64encode(data).decode(), encoding="base64")
    assert data == parse(payload, CONFIG, trigger=False).data


@given(st.text(max_size=100))
def test_text_travels_as_it_is(text: str) -> None:
    assert text.encode() == parse(batch(data=text, encoding="utf8"), CONFIG, trigger=False).data


WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"ids": GONE}, "ids is missing"),
    ({"ids": "LMC"}, "ids: the text 'LMC' instead of a list of VINs"),
    ({"ids": None}, "ids: null instead of a list of VINs"),
    ({"ids": {}}, "ids: an object instead of a list of VINs"),
    ({"ids": []}, "ids: the list is empty; name at least one VIN"),
    ({"ids": [VINS[0], 7]}, "ids[1]: the number 7 instead of a VIN"),
    ({"ids": [VINS[0], None]}, "ids[1]: null instead of a VIN"),
    ({"ids": [[VINS[0]]]}, "ids[0]: a list of 1 instead of a VIN"),
    ({"ids": [*VINS, VINS[0].lower()]}, f"ids[5]: {VINS[0].lower()!r} is no VIN: character 1 is 'l'; it is written in"),
    ({"ids": [VINS[0], ""]}, "ids[1]: '' is no VIN: it has 0 characters instead of 17"),
    ({"request_id": GONE}, "request_id is missing"),
    ({"request_id": 7}, "request_id: the number 7 instead of a text"),
    ({"request_id": True}, "request_id: true instead of a text"),
    ({"request_id": ""}, "request_id is empty"),
    ({"request_id": "a/b"}, "request_id: 'a/b' has '/' at character 2; no '/', '+', '#' or control characters"),
    ({"request_id": "a+"}, "request_id: 'a+' has '+' at character 2"),
    ({"request_id": "#"}, "request_id: '#' has '#' at character 1"),
    ({"request_id": "a\0"}, "request_id: 'a\\x00' has '\\x00' at character 2"),
    ({"request_id": "a\n"}, "request_id: 'a\\n' has '\\n' at character 2"),
    ({"request_id": "a\x85"}, "request_id: 'a\\x85' has '\\x85' at character 2"),
    ({"request_id": "\uffff"}, "request_id: '\\uffff' has '\\uffff' at character 1"),
    ({"request_id": "r" * 129}, "request_id: 129 characters are more than 128: 'rrrr"),
    ({"data": GONE}, "data is missing"),
    ({"data": {"a": 1}}, "data: an object instead of a text"),
    ({"data": 1.5}, "data: the number 1.5 instead of a text"),
    (
        {"data": GONE, "data_id": "d"},
        "data is missing; a batch that names its data by data_id goes to $SDV-FANOUT/trig",
    ),
    ({"encoding": "gzip"}, "encoding: 'gzip' is none of utf8, base64"),
    ({"encoding": 8}, "encoding: the number 8 instead of a text"),
    ({"data": "QQ=", "encoding": "base64"}, "data: not base64: Incorrect padding"),
    ({"data": "QQ==QQ==", "encoding": "base64"}, "data: not base64: Excess data after padding"),
    ({"data": "QUJD\n", "encoding": "base64"}, "data: not base64: '\\n' at character 5"),
    ({"data": "_-8=", "encoding": "base64"}, "data: not base64: '_' at character 1"),
    ({"data": "ä", "encoding": "base64"}, "data: not base64: 'ä' at character 1"),
    ({"expires_in": 0}, "expires_in: 0 is not above 0 and at most 10000000000 seconds"),
    ({"expires_in": -1.5}, "expires_in: -1.5 is not above 0"),
    ({"expires_in": 1e300}, "expires_in: 1e+300 is not above 0"),
    ({"expires_in": 10**4000}, "expires_in: so large a number is not above 0"),
    ({"expires_in": "60"}, "expires_in: the text '60' instead of a number of seconds"),
    ({"expires_in": True}, "expires_in: true instead of a number of seconds"),
    ({"expires_in": None}, "expires_in: null instead of a number of seconds"),
    ({"priority": 10}, "priority: 10 is not 0 to 9"),
    ({"priority": -1}, "priority: -1 is not 0 to 9"),
    ({"priority": 3.0}, "priority: the number 3.0 instead of a whole number"),
    ({"priority": False}, "priority: false instead of a whole number"),
    ({"priority": "high"}, "priority: the text 'high' instead of a whole number"),
    ({"batch_id": 7}, "batch_id: the number 7 instead of a text"),
    ({"batch_id": None}, "batch_id: null instead of a text"),
    ({"batch_id": ""}, "batch_id is empty"),
    ({"batch_id": "a/b"}, "batch_id: 'a/b' has '/' at character 2; no '/', '+', '#' or control characters"),
    ({"batch_id": "b" * 129}, "batch_id: 129 characters are more than 128: 'bbbb"),
    ({"mode": "keep"}, "mode: 'keep' is none of replace, append"),
    ({"mode": None}, "mode: null instead of a text"),
]


WRONG_DATA_IDS: list[tuple[dict[str, Any], str]] = [
    ({"data_id": GONE}, "data_id is missing"),
    ({"data_id": GONE, "data": "x"}, "data_id is missing; a batch that carries its data goes to $SDV-FANOUT"),
    ({"data_id": 4}, "data_id: the number 4 instead of a text"),
    ({"data_id": ""}, "data_id is empty"),
    ({"data_id": "a/+/b"}, "data_id: 'a/+/b' has '+' at character 3"),
    ({"data_id": "a" * 257}, "data_id: 257 characters are more than 256: 'aaa"),
]

NO_OBJECTS = [
    (b"", "not JSON: "),
    (b"hello", "not JSON: "),
    (b"\xff\xfe", "not JSON: "),
    (batch()[:-1], "not JSON: "),
    (batch() + b"x", "not JSON: "),
    (b'{"ids": ["\xff"]}', "not JSON: "),
    (b'{"request_id": "\\ud800"}', "not JSON: "),
    (b"[" * 100_000, "not JSON: "),
    (b'{"ids": [NaN]}', "not JSON: "),
    (b"[]", "a list of 0 instead of a JSON object with ids"),
    (b'"text"', "the text 'text' instead of a JSON object"),
    (b"null", "null instead of a JSON object"),
]


def test_what_is_wrong_is_named_with_index_and_value() -> None:
    cases = [(batch(**fields), False, reason) for fields, reason in WRONG_FIELDS]
    cases += [(trigger(**fields), True, reason) for fields, reason in WRONG_DATA_IDS]
    cases += [(payload, False, reason) for payload, reason in NO_OBJECTS]
    told = [(refusal(payload, trigger=named), reason) for payload, named, reason in cases]
    assert [] == [(said, reason) for said, reason in told if not said.startswith(reason)]


def test_one_wrong_vin_among_many_refuses_all() -> None:
    vins = [make_vin(number) for number in range(10_000)]
    assert 10_000 == len(parse(batch(ids=vins), CONFIG, trigger=False).vins)
    vins[9_999] = "nobody"
    assert refusal(batch(ids=vins)).startswith("ids[9999]: 'nobody' is no VIN")


def test_limits_name_their_options() -> None:
    small = FanoutConfig(max_vins=2, max_payload=4)
    assert 2 == len(parse(batch(data="1234"), small, trigger=False).vins)
    assert "ids: 3 VINs are more than 2 (option max_vins); send several batches" == refusal(batch(ids=VINS[:3]), small)
    assert "data: 5 bytes are more than 4 (option max_payload)" == refusal(batch(data="12345"), small)
    assert refusal(batch(data="ääh"), small).startswith("data: 5 bytes")
    check_size(4, small)
    with pytest.raises(BadBatchError, match="data: 5 bytes"):
        check_size(5, small)


def test_the_list_is_as_long_as_it_was_sent() -> None:
    """Whoever sends the same vehicle a million times is refused before it is looked at."""
    assert refusal(batch(ids=[VINS[0]] * 3), FanoutConfig(max_vins=2)).startswith("ids: 3 VINs")


def test_check_digits_count_only_if_configured() -> None:
    wrong = VINS[1].replace("9", "8")
    assert (wrong,) == parse(batch(ids=[wrong]), CONFIG, trigger=False).vins
    assert refusal(batch(ids=[wrong]), FanoutConfig(check_digit=True)).startswith(f"ids[0]: {wrong!r} is no VIN: char")


def test_keys_that_mean_nothing_are_ignored_and_named() -> None:
    parsed = parse(batch(expires=60, note={"by": "ops"}), CONFIG, trigger=False)
    assert ("expires", "note") == parsed.extra
    assert ("data", "encoding") == parse(trigger(data="x", encoding=1), CONFIG, trigger=True).extra
    many = parse(batch(**{f"key{number}" + "x" * 100: 0 for number in range(100)}), CONFIG, trigger=False).extra
    assert MAX_EXTRA == len(many)
    assert max(map(len, many)) <= 40


def test_ids_of_requests_and_data_at_their_bounds() -> None:
    for request_id in ("r" * MAX_REQUEST_ID, "task_ota_1", "$x", "Tür 7", "a.b:c", "😀"):
        check_request_id(request_id)
        assert request_id == parse(batch(request_id=request_id), CONFIG, trigger=False).request_id
    for data_id in ("d" * MAX_DATA_ID, "a/b/c", "/", "sha1:x"):
        check_data_id(data_id)


DATA = b"firmware"
SHA1 = hashlib.sha1(DATA).hexdigest()
SHA256 = hashlib.sha256(DATA).hexdigest()


def test_an_id_that_is_a_digest_must_be_the_one_of_the_data() -> None:
    """SHA-1 and SHA-256, named or by their look, in any case; anything else is an id like another."""
    for data_id in (SHA1, SHA256, SHA1.upper(), f"sha1:{SHA1}", f"sha256:{SHA256.upper()}"):
        data_digests(data_id, DATA)
    for data_id in ("fw-1", "d" * 41, "g" * 40, "md5:1", "a:b:c"):
        data_digests(data_id, b"other")
    for data_id, reason in (
        (SHA1, f"data_id: {SHA1!r} is not the sha1 of the data, that is {hashlib.sha1(b'other').hexdigest()}"),
        (SHA256, f"data_id: {SHA256[:40]!r}… is not the sha256 of the data, that is "),
        (f"sha1:{SHA1}", "data_id: "),
        (f"sha256:{SHA256}", "data_id: "),
        (f"sha1:{SHA256}", f"data_id: 'sha1:{SHA256[:35]}'… is no sha1: 40 hexadecimal digits follow the colon"),
        ("sha1:", "data_id: 'sha1:' is no sha1: 40 hexadecimal digits follow the colon"),
        (f"sha256:{SHA1}", "data_id: "),
        ("sha256:" + "g" * 64, "data_id: "),
    ):
        with pytest.raises(BadBatchError) as caught:
            data_digests(data_id, b"other")
        assert str(caught.value).startswith(reason) and len(str(caught.value)) <= MAX_REASON, data_id


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
keys = ("ids", "request_id", "data", "data_id", "encoding", "expires_in", "priority", "mode", "batch_id")


@given(st.dictionaries(st.sampled_from(keys), json_values), st.booleans())
def test_whatever_comes_is_a_right_batch_or_refused_in_words(fields: dict[str, Any], named: bool) -> None:
    """Never another error: the platform would be disconnected without a reason."""
    payload = trigger(**fields) if named else batch(**fields)
    try:
        parsed = parse(payload, CONFIG, trigger=named)
    except BadBatchError:
        assert refusal(payload, trigger=named)
    else:
        assert parsed.vins
        assert named == (parsed.data is None) == bool(parsed.data_id)


@given(st.binary(max_size=50))
def test_any_bytes_are_a_batch_or_refused_in_words(payload: bytes) -> None:
    refusal(payload)
