"""Behaviours, profiles and files of them; chance that is the same each time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from motorcade.fleet.chance import Chance
from motorcade.fleet.profile import PROFILES, Behaviour, FleetError, Leave, Profile, VehicleKind, find_profile


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return path


def test_the_same_seed_and_name_give_the_same_numbers_and_others_give_others() -> None:
    first, again, seed, name = (
        [chance.number() for _ in range(100)]
        for chance in (Chance(7, "a"), Chance(7, "a"), Chance(8, "a"), Chance(7, "b"))
    )
    assert first == again
    assert 3 == len({tuple(first[:4]), tuple(seed[:4]), tuple(name[:4])})


def test_numbers_fill_their_range_evenly() -> None:
    """Ten boxes for 100 000 draws: a tenth too many or too few in one is ten times what chance explains."""
    chance = Chance(1, "even")
    drawn = [chance.number() for _ in range(100_000)]
    assert all(0 <= number < 1 for number in drawn)
    boxes = Counter(int(number * 10) for number in drawn)
    assert 10 == len(boxes)
    assert all(abs(count - 10_000) < 1_000 for count in boxes.values())


def test_what_is_certain_needs_no_chance() -> None:
    """A draw that decides nothing would shift all later ones."""
    chance, untouched = Chance(1, "x"), Chance(1, "x")
    assert not chance.happens(0.0)
    assert chance.happens(1.0)
    assert 5.0 == chance.between((5.0, 5.0))
    assert untouched.number() == chance.number()


def test_a_range_is_kept() -> None:
    chance = Chance(1, "x")
    drawn = [chance.between((2.0, 3.0)) for _ in range(1000)]
    assert 2.0 <= min(drawn) < 2.1
    assert 2.9 < max(drawn) < 3.0


def test_every_stretch_of_a_fleet_has_the_shares() -> None:
    profile = Profile(
        "p", (VehicleKind("a", Behaviour(), 3), VehicleKind("b", Behaviour(), 1), VehicleKind("never", Behaviour(), 0))
    )
    names = [kind.name for kind in profile.assign(400)]
    assert {"a": 300, "b": 100} == Counter(names)
    assert all({"a": 3, "b": 1} == Counter(names[start : start + 4]) for start in range(0, 400, 4))


def test_the_mixed_profile_has_all_the_others() -> None:
    mixed = PROFILES["mixed"]
    assert set(PROFILES) - {"mixed"} == {kind.name for kind in mixed.kinds}
    assert 100 == sum(kind.share for kind in mixed.kinds)
    assert {kind.name for kind in mixed.kinds} == {kind.name for kind in mixed.assign(100)}


def test_speed_shortens_days_and_nothing_else() -> None:
    slow = Behaviour(awake=(60, 120), asleep=(600, 1200), answer=(1, 2), heartbeat=30)
    fast = slow.at_speed(60)
    assert ((1, 2), (10, 20)) == (fast.awake, fast.asleep)
    assert (slow.answer, slow.heartbeat, slow.keep_alive) == (fast.answer, fast.heartbeat, fast.keep_alive)


def test_a_file_takes_from_a_behaviour_what_it_does_not_say(tmp_path: Path) -> None:
    path = write(tmp_path, '[city]\nshare = 3\nlike = "tunnel"\nasleep = [1, 2]\n\n[lorry]\nanswer = [5, 20]\n')
    profile = find_profile(str(path))
    city, lorry = profile.kinds
    assert ("own", "city", 3.0, "lorry", 1.0) == (profile.name, city.name, city.share, lorry.name, lorry.share)
    tunnel = PROFILES["tunnel"].kinds[0].behaviour
    assert ((1, 2), tunnel.awake, Leave.SILENCE) == (city.behaviour.asleep, tunnel.awake, city.behaviour.leave)
    assert Behaviour(answer=(5, 20)) == lorry.behaviour


WRONG_FILES = (
    ("", "names no kind of vehicle"),
    ("[a]\nshare = 0\n", "all shares are 0"),
    ("share = 1\n", r"\[share\] is a value"),
    ("[a\n", "is no TOML"),
    ("[a]\nanser = [1, 2]\n", r"\[a\] anser: there is no such option; did you mean 'answer'"),
    ("[a]\nanswer = 3\n", r"\[a\] answer: Expected `array`"),
    ("[a]\nanswer = [3, 1]\n", r"\[a\].*answer = \[3, 1\].*smaller one first"),
    ("[a]\nawake = [-1, 1]\n", r"awake = \[-1, 1\]"),
    ("[a]\nawake = [1, inf]\n", r"awake = \[1, inf\]"),
    ("[a]\nheartbeat = -1\n", "heartbeat = -1"),
    ("[a]\nheartbeat = nan\n", "heartbeat = nan"),
    ("[a]\nrefuse = 1.5\n", "refuse = 1.5.*from 0 to 1"),
    ("[a]\nrefuse = 0.6\nignore = 0.6\n", "together at most 1"),
    ("[a]\nreason = 0\n", "reason = 0.*131"),
    ('[a]\nleave = "quietly"\n', "leave.*quietly"),
    ('[a]\nlike = "tunel"\n', r"\[a\] like = 'tunel'.*did you mean 'tunnel'"),
    ("[a]\nshare = -1\n", r"\[a\] share = -1"),
    ('[a]\nshare = "1"\n', r"\[a\] share: Expected `float`"),
    ("[a]\nkeep_alive = 65536\n", "keep_alive = 65536.*65535"),
    ("[a]\nsession_expiry = -1\n", "session_expiry = -1"),
)


def test_a_wrong_file_is_told_with_place_and_remedy(tmp_path: Path) -> None:
    for text, wanted in WRONG_FILES:
        path = write(tmp_path, text)
        with pytest.raises(FleetError, match=wanted) as caught:
            raise AssertionError(find_profile(str(path)))
        assert str(caught.value).startswith(f"{path}: "), text


def test_an_unknown_profile_is_told_with_the_nearest() -> None:
    with pytest.raises(FleetError, match=r"no profile 'comuter'.*did you mean 'commuter'"):
        find_profile("comuter")
    with pytest.raises(FleetError, match=r"nowhere\.toml: No such file"):
        find_profile("nowhere.toml")
