"""VINs: what is one, what is none and why, and those that are made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motorcade.core.vin import ALPHABET, LENGTH, MAX_VINS, VinError, check_digit_of, check_vin, have_shape, make_vin
from tests.support.cases import each, each_row

#: Published examples; one has X for ten.
REAL = ("11111111111111111", "1M8GDM9AXKP042788", "5GZCZ43D13S812715", "1HGCM82633A004352")

WRONG = {
    "": "it has 0 characters instead of 17",
    "LMCAAAAA9RA00001": "it has 16 characters instead of 17",
    "LMCAAAAA9RA0000011": "it has 18 characters instead of 17",
    "lMCAAAAA6RA000001": "character 1 is 'l'; it is written in upper case",
    "LMCAAAAA9RA00000O": "character 17 is 'O'; it has no I, O and Q (1 and 0 perhaps?)",
    "LMCIAAAA9RA000001": "character 4 is 'I'; it has no I, O and Q (1 and 0 perhaps?)",
    "LMCqAAAA9RA000001": "character 4 is 'q'; it has no I, O and Q (1 and 0 perhaps?)",
    "LMC-AAAA9RA000001": "character 4 is '-'; it has digits and letters A to Z only",
    " LMCAAAAA9RA00000": "character 1 is ' '; it has digits and letters A to Z only",
    "LMCAAAAA9RA00000\n": "character 17 is '\\n'; it has digits and letters A to Z only",
    "LMCAAAAA9RA000001\n": "it has 18 characters instead of 17",
    "LMCÄAAAA9RA000001": "character 4 is 'Ä'; it has digits and letters A to Z only",
    "LMCAAAAA9RA00000\u0661": "character 17 is '\u0661'; it has digits and letters A to Z only",
    "+": "character 1 is '+'; it has digits and letters A to Z only",
}


@each(vin=REAL)
def test_real_numbers_pass_with_their_check_digit(vin: str) -> None:
    check_vin(vin, check_digit=True)
    assert vin[8] == check_digit_of(vin)


@each_row("text problem", WRONG.items())
def test_what_is_wrong_is_named_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(VinError) as caught:
        check_vin(text)
    assert f"{text!r} is no VIN: {problem}" == str(caught.value)


def test_a_long_text_is_shortened() -> None:
    with pytest.raises(VinError) as caught:
        check_vin("A" * 100_000)
    assert f"'{'A' * 20}'… is no VIN: it has 100000 characters instead of 17" == str(caught.value)


def test_a_wrong_check_digit_matters_only_if_asked_for() -> None:
    """European makers use the ninth character otherwise."""
    check_vin("1M8GDM9A1KP042788")
    with pytest.raises(VinError, match="character 9 is '1', the check digit of the others is 'X'"):
        check_vin("1M8GDM9A1KP042788", check_digit=True)


@given(
    st.text(alphabet=ALPHABET, min_size=LENGTH, max_size=LENGTH), st.integers(0, LENGTH - 1), st.sampled_from(ALPHABET)
)
def test_the_check_digit_finds_a_wrong_digit(vin: str, place: int, letter: str) -> None:
    """Any two characters that count as different digits change it; that is what it is for."""
    right = vin[:8] + check_digit_of(vin) + vin[9:]
    wrong = right[:place] + letter + right[place + 1 :]
    if place == 8:
        assert (wrong == right) == (check_digit_of(wrong) == wrong[8])
    elif "0123456789".find(letter) != "0123456789".find(right[place]) and letter.isdigit() and right[place].isdigit():
        with pytest.raises(VinError):
            check_vin(wrong, check_digit=True)


def test_made_numbers_are_valid_and_all_different() -> None:
    made = [make_vin(number) for number in (*range(3000), 10**6 - 1, 10**6, 33 * 10**6, MAX_VINS - 1)]
    for vin in made:
        check_vin(vin, check_digit=True)
    assert len(made) == len(set(made))
    assert "LMCAAAAA9RA000001" == made[1]


@given(st.integers(0, MAX_VINS - 1), st.integers(0, MAX_VINS - 1))
def test_different_numbers_make_different_vehicles(one: int, other: int) -> None:
    assert (one == other) == (make_vin(one) == make_vin(other))


@each(number=(-1, MAX_VINS))
def test_numbers_out_of_range_are_refused(number: int) -> None:
    with pytest.raises(VinError, match="is no number of a VIN"):
        make_vin(number)


@each(wmi=("", "LM", "LMCD", "lmc", "LMO"))
def test_a_wrong_manufacturer_is_refused(wmi: str) -> None:
    with pytest.raises(VinError):
        make_vin(1, wmi)


@each_row(
    "texts fit",
    (
        ([make_vin(1)], True),
        ([make_vin(number) for number in range(200)], True),
        ([make_vin(1), make_vin(2)[:-1]], False),
        ([make_vin(1), make_vin(2) + "A"], False),
        ([make_vin(1)[:-1], make_vin(2) + "A"], False),
        ([f"{make_vin(1)}\n{make_vin(2)}"], False),
        ([f"{make_vin(1)}\n{make_vin(2)}", ""], False),
        ([make_vin(1), f"{make_vin(2)[:-1]}\n"], False),
        ([make_vin(1).lower()], False),
        ([""], False),
    ),
)
def test_many_are_looked_through_at_once(texts: list[str], fit: bool) -> None:
    assert fit == have_shape(texts)
