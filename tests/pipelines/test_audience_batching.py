"""Columns of VINs: what is right is what `check_vin` says, each once, and batches say what a plain encoder would."""

from __future__ import annotations

import json
import random
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motorcade.core.vin import ALPHABET, VinError, check_digit_of, check_vin, make_vin
from motorcade.pipelines import PipelineError
from motorcade.pipelines.batching import CountedVins, VinTally, Wrong, batches, reason_of, right
from motorcade.plugins.fanout.batch import parse
from motorcade.plugins.fanout.options import FanoutConfig
from motorcade.publisher.batches import Order

ORDER = Order("task_ota_1", b"do it", {"expires_in": 60.0, "mode": "append"})

#: Texts near to being VINs: most of the right length, with few wrong characters, many with a right check digit.
NEARLY = st.text(alphabet=ALPHABET + "IOQioqäa \n\0'\"\\…", min_size=15, max_size=19)
SHAPED = st.text(alphabet=ALPHABET, min_size=17, max_size=17)
CHECKED = SHAPED.map(lambda text: text[:8] + check_digit_of(text) + text[9:])
TEXTS = st.one_of(st.none(), st.text(max_size=20), NEARLY, SHAPED, CHECKED)


def is_vin(text: str | None, *, check_digit: bool) -> bool:
    try:
        check_vin(text or "", check_digit=check_digit)
    except VinError:
        return False
    return True


@settings(deadline=None)  # the machine may be busy
@given(st.lists(TEXTS, max_size=40), st.booleans(), st.integers(0, 3))
def test_what_is_right_is_what_check_vin_says(texts: list[str | None], check_digit: bool, skipped: int) -> None:
    column = pa.array(["x" * 5] * skipped + texts, pa.string())[skipped:]  # a slice, as Spark's columns may be
    expected = [is_vin(text, check_digit=check_digit) for text in texts]
    assert expected == right(column, check_digit=check_digit).tolist()
    for text, good in zip(texts, expected, strict=True):
        assert good == (reason_of(text, check_digit=check_digit) is None)


def test_every_check_digit_is_known() -> None:
    """Each letter at each place, by itself."""
    texts = ["0" * place + letter + "0" * (16 - place) for place in range(17) for letter in ALPHABET]
    whole = [text[:8] + check_digit_of(text) + text[9:] for text in texts]
    assert right(pa.array(whole), check_digit=True).all()
    wrong = [text[:8] + ("1" if text[8] == "0" else "0") + text[9:] for text in whole]
    assert not right(pa.array(wrong), check_digit=True).any()
    assert right(pa.array(wrong)).all()


def test_what_is_wrong_is_told() -> None:
    for text, reason, says in (
        (None, Wrong.MISSING, "no VIN"),
        ("", Wrong.MISSING, "no VIN"),
        ("LMCAAAAA9RA00000I", Wrong.WRONG_CHARACTER, "character 17 is 'I'"),
        ("lMCAAAAA9RA000001", Wrong.WRONG_CHARACTER, "upper case"),
        (" LMCAAAAA9RA00001", Wrong.WRONG_CHARACTER, "character 1 is ' '"),
        ("LMCAAAAA9RA00001", Wrong.WRONG_LENGTH, "16 characters"),
        ("LMCAAAAA9RA0000010", Wrong.WRONG_LENGTH, "18 characters"),
        ("LMCAAAAA0RA000001", Wrong.WRONG_CHECK_DIGIT, "character 9 is '0'"),
    ):
        found = reason_of(text, check_digit=True)
        assert found is not None
        assert (reason, True) == (found[0], says in found[1]), (text, found)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.one_of(st.none(), st.sampled_from("abcdefgh")), max_size=60), st.integers(1, 20))
def test_each_is_there_once_and_counted(texts: list[str | None], gathered: int) -> None:
    tally = VinTally(gathered=gathered)
    for start in range(0, len(texts), 3):
        tally.add(pa.array(texts[start : start + 3], pa.string()))
    found = tally.found()
    assert Counter(texts) == dict(zip(found.texts.to_pylist(), found.times.tolist(), strict=True))


def test_a_task_holds_a_bounded_number() -> None:
    tally = VinTally(most=3, gathered=2)
    tally.add(pa.array(["a", "b", "a", "b"]))
    tally.add(pa.array(["c", "c"]))
    with pytest.raises(PipelineError, match=r"more than 3 different VINs.*--partitions"):
        tally.add(pa.array(["d", "e", "f"]))


@settings(deadline=None)  # the machine may be busy
@given(st.integers(0, 50), st.integers(1, 20), st.integers(1, 4), st.integers(0, 3))
def test_batches_say_what_a_plain_encoder_would(count: int, size: int, several: int, skipped: int) -> None:
    vins = [make_vin(number) for number in range(count + skipped)]
    times = [number % 3 + 1 for number in range(count)]
    column = pa.array(vins, pa.string())[skipped:]
    made = list(batches(CountedVins(column, pa.array(times, pa.int64()).to_numpy()), ORDER, size, "r-7-", several))
    ids = [one for some in made for one in some.ids]
    messages = [one for some in made for one in some.messages]
    expected = [vins[skipped + start : skipped + start + size] for start in range(0, count, size)]
    assert [f"r-7-{number}" for number in range(len(expected))] == ids
    assert messages == [ORDER.trigger(some, name) for some, name in zip(expected, ids, strict=True)]
    assert [len(some) for some in expected] == [one for some in made for one in some.vehicles]
    assert [sum(times[start : start + size]) for start in range(0, count, size)] == [
        one for some in made for one in some.rows
    ]


def test_the_node_understands_them() -> None:
    vins = [make_vin(number) for number in random.sample(range(10**6), 7)]
    found = CountedVins(pa.array(vins), pa.array([1] * 7, pa.int64()).to_numpy())
    order = Order('a "quoted" täsk', b"\xff" * 10, {"priority": 3, "expires_in": 0.5})
    for some in batches(found, order, 200, "run-0-"):
        for message in some.messages:
            batch = parse(message, FanoutConfig(), trigger=True)
            assert (tuple(vins), order.request_id, order.data_id) == (batch.vins, batch.request_id, batch.data_id)
            assert (3, 0.5, 0) == (batch.priority, batch.expires_in, batch.duplicates)
            assert "run-0-0" == json.loads(message)["batch_id"]
