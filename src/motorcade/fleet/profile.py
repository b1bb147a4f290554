"""Behaviours of vehicles, profiles that mix them, and profiles from files.

A behaviour is what one vehicle does; it may be changed while the vehicle runs. A profile gives names and shares to
behaviours. A profile file is TOML with one table per kind of vehicle:

    [city]
    share = 3                 # three of four vehicles
    like = "commuter"         # whatever is not said here is taken from there
    asleep = [60, 600]

    [lorry]
    answer = [5, 20]
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from motorcade.core.errors import MotorcadeError
from motorcade.core.words import nearest

_T = TypeVar("_T", bound=msgspec.Struct)

Range = tuple[float, float]  #: seconds, from and to

_MINUTE, _HOUR = 60.0, 3600.0
#: Reason codes that a PUBACK may refuse with (MQTT 5, 3.4.2.1).
_REFUSALS = (0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99)
_MAX_KEEP_ALIVE = 65535
_MAX_EXPIRY = 0xFFFF_FFFF


class FleetError(MotorcadeError):
    """A fleet could not be made, could not reach its broker, or did not do what was waited for."""


class Leave(StrEnum):
    """The way in which a vehicle disconnects."""

    GOODBYE = auto()  #: DISCONNECT, then the connection is closed
    RESET = auto()  #: the connection ends at once, as when the modem loses power
    SILENCE = auto()  #: nothing is read or written any more, without notice, as in a tunnel


class Behaviour(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The behaviour of one vehicle. Times are seconds, shares go from 0 to 1."""

    heartbeat: float = _MINUTE  #: between two heartbeats; 0: none
    answer: Range = (0.0, 0.0)  #: from a message to its PUBACK
    refuse: float = 0.0  #: share of messages that are refused; MQTT 3.1.1 cannot say no, so the vehicle hangs up
    reason: int = 0x83  #: reason code of a refusal
    ignore: float = 0.0  #: share of messages that are never answered
    awake: Range = (0.0, 0.0)  #: how long it stays connected; 0: always
    asleep: Range = (_MINUTE, _MINUTE)  #: how long it stays away then
    leave: Leave = Leave.GOODBYE  #: how it goes
    clean: float = 0.0  #: share of returns that begin a new session
    resubscribe: bool = False  #: subscribe although the broker has kept the session
    keep_alive: int = 120  #: of CONNECT; 0: none
    session_expiry: int = 604800  #: of CONNECT (MQTT 5)

    def __post_init__(self) -> None:
        for name in ("answer", "awake", "asleep"):
            low, high = getattr(self, name)
            if not 0 <= low <= high < float("inf"):
                raise ValueError(f"{name} = [{low:g}, {high:g}]: two times in seconds, the smaller one first")
        for name in ("refuse", "ignore", "clean"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name):g}: a share goes from 0 to 1")
        if self.refuse + self.ignore > 1:
            raise ValueError("refuse and ignore are shares of the same messages: together at most 1")
        if not 0 <= self.heartbeat < float("inf"):
            raise ValueError(f"heartbeat = {self.heartbeat:g}: seconds, or 0 for none")
        if self.reason not in _REFUSALS:
            raise ValueError(
                f"reason = {self.reason}: a PUBACK refuses with one of {', '.join(map(hex, _REFUSALS))} "
                f"(decimal {', '.join(map(str, _REFUSALS))})"
            )
        if not 0 <= self.keep_alive <= _MAX_KEEP_ALIVE:
            raise ValueError(f"keep_alive = {self.keep_alive}: seconds, at most {_MAX_KEEP_ALIVE}")
        if not 0 <= self.session_expiry <= _MAX_EXPIRY:
            raise ValueError(f"session_expiry = {self.session_expiry}: seconds, at most {_MAX_EXPIRY}")

    @property
    def stays(self) -> bool:
        """Return True if it never leaves by itself."""
        return self.awake[1] <= 0

    def at_speed(self, speed: float) -> Behaviour:
        """Return a copy with shorter days: only `awake` and `asleep`, for the broker's own times do not change."""
        if speed == 1.0:
            return self
        (wake_low, wake_high), (sleep_low, sleep_high) = self.awake, self.asleep
        return msgspec.structs.replace(
            self, awake=(wake_low / speed, wake_high / speed), asleep=(sleep_low / speed, sleep_high / speed)
        )


@dataclass(frozen=True, slots=True)
class VehicleKind:
    """A name and a share for a behaviour."""

    name: str
    behaviour: Behaviour
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Profile:
    """A mix of behaviours."""

    name: str
    kinds: tuple[VehicleKind, ...]
    about: str = ""  #: a sentence

    def assign(self, count: int) -> Iterator[VehicleKind]:
        """Choose a kind for each of `count` vehicles; every stretch of them has about the shares of the whole."""
        total = sum(kind.share for kind in self.kinds)
        credit = [0.0] * len(self.kinds)
        for _ in range(count):
            for index, kind in enumerate(self.kinds):
                credit[index] += kind.share
            chosen = max(range(len(credit)), key=credit.__getitem__)
            credit[chosen] -= total
            yield self.kinds[chosen]


def profile_of(behaviour: Behaviour, name: str = "own") -> Profile:
    """Return a profile in which all vehicles behave the same."""
    return Profile(name, (VehicleKind(name, behaviour),))


_BEHAVIOURS: dict[str, tuple[str, Behaviour]] = {
    "steady": ("stays connected and answers at once", Behaviour()),
    "commuter": (
        "drives for 10 to 40 minutes, sleeps for half an hour to eight hours, says goodbye",
        Behaviour(awake=(10 * _MINUTE, 40 * _MINUTE), asleep=(30 * _MINUTE, 8 * _HOUR)),
    ),
    "tunnel": (
        "loses signal every few minutes without a word, and comes back while the broker still waits for it",
        Behaviour(awake=(2 * _MINUTE, 10 * _MINUTE), asleep=(5.0, 90.0), leave=Leave.SILENCE, keep_alive=30),
    ),
    "reboot": (
        "loses power now and then, and comes back soon, half of the times with a new session",
        Behaviour(awake=(2 * _MINUTE, 20 * _MINUTE), asleep=(5.0, 30.0), leave=Leave.RESET, clean=0.5),
    ),
    "slow": ("answers after 2 to 20 seconds", Behaviour(answer=(2.0, 20.0))),
    "refusing": ("refuses every message", Behaviour(refuse=1.0)),
    "silent": ("takes every message and never answers", Behaviour(ignore=1.0)),
}
_MIXED = {"steady": 50, "commuter": 20, "tunnel": 12, "reboot": 6, "slow": 8, "refusing": 2, "silent": 2}

#: The profiles that have names.
PROFILES: dict[str, Profile] = {
    name: Profile(name, (VehicleKind(name, behaviour),), about) for name, (about, behaviour) in _BEHAVIOURS.items()
} | {
    "mixed": Profile(
        "mixed",
        tuple(VehicleKind(name, _BEHAVIOURS[name][1], share) for name, share in _MIXED.items()),
        "a bit of everything: " + ", ".join(f"{share} % {name}" for name, share in _MIXED.items()),
    )
}


# --- files --------------------------------------------------------------------------------------------------------


class _KindTable(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a profile table besides the behaviour."""

    share: float = 1.0
    like: str = "steady"


_OWN_KEYS = tuple(_KindTable.__struct_fields__)
_KEYS = (*_OWN_KEYS, *Behaviour.__struct_fields__)


def find_profile(text: str) -> Profile:
    """Find the profile of this name, or of the file at this path."""
    if text in PROFILES:
        return PROFILES[text]
    path = Path(text)
    if not path.exists() and "/" not in text and path.suffix != ".toml":
        raise FleetError(f"there is no profile {text!r} and no file of this name{nearest(text, PROFILES)}")
    return read_profile(path)


def read_profile(path: Path) -> Profile:
    """Read a profile from a TOML file."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FleetError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FleetError(f"{path}: is no UTF-8 text, and so no profile") from error
    except tomllib.TOMLDecodeError as error:
        raise FleetError(f"{path}: is no TOML: {error}") from error
    kinds = tuple(_kind(f"{path}: [{name}]", name, table) for name, table in tree.items())
    if not kinds:
        raise FleetError(f"{path}: names no kind of vehicle; write for instance [city], and below it share = 1")
    if not any(kind.share for kind in kinds):
        raise FleetError(f"{path}: all shares are 0, so no vehicle has a behaviour")
    return Profile(path.stem, kinds)


def _kind(where: str, name: str, table: Any) -> VehicleKind:
    if not isinstance(table, dict):
        raise FleetError(f"{where} is a value; options stand below the name of a kind of vehicle, such as [city]")
    _check_keys(where, table)
    own = _converted(where, {key: table[key] for key in _OWN_KEYS if key in table}, _KindTable)
    if not 0 <= own.share < float("inf"):
        raise FleetError(f"{where} share = {own.share:g}: a number from 0 on")
    if own.like not in _BEHAVIOURS:
        raise FleetError(f"{where} like = {own.like!r}: there is no such behaviour{nearest(own.like, _BEHAVIOURS)}")
    base = msgspec.to_builtins(_BEHAVIOURS[own.like][1])
    said = {key: value for key, value in table.items() if key not in _OWN_KEYS}
    return VehicleKind(name, _converted(where, base | said, Behaviour), own.share)


def _check_keys(where: str, keys: Iterable[str]) -> None:
    for key in keys:
        if key not in _KEYS:
            raise FleetError(f"{where} {key}: there is no such option{nearest(key, _KEYS)}")


def _converted(where: str, values: dict[str, Any], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        problem, _, key = str(error).partition(" - at `$.")
        place = f" {key.rstrip('`')}:" if key else ""
        raise FleetError(f"{where}{place} {problem}") from error
