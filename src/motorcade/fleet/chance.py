"""Reproducible random numbers: small, and a stream of its own for each user.

Python's `random.Random` keeps 2.5 KiB per stream, which is more than an idle vehicle costs otherwise. This is
SplitMix64: one number of 64 bits as state, good enough for times and shares, and nothing here is a secret.
"""

from __future__ import annotations

import hashlib

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_STEP = 0x9E37_79B9_7F4A_7C15
_MIX_1 = 0xBF58_476D_1CE4_E5B9
_MIX_2 = 0x94D0_49BB_1331_11EB
_FRACTION = 1 / (1 << 53)


class Chance:
    """A stream of numbers that follows from a seed and a name."""

    __slots__ = ("_state",)

    def __init__(self, seed: int, name: str) -> None:
        raw = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        self._state = int.from_bytes(raw, "big")

    def number(self) -> float:
        """Return the next number, from 0 up to but without 1."""
        self._state = mixed = (self._state + _STEP) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * _MIX_1) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & _MASK
        return ((mixed ^ (mixed >> 31)) >> 11) * _FRACTION

    def between(self, low_high: tuple[float, float]) -> float:
        """Return a number of a range; a range of one number costs no draw."""
        low, high = low_high
        return low if low == high else low + (high - low) * self.number()

    def happens(self, share: float) -> bool:
        """Return True for this share of the calls; for 0 and 1 without a draw."""
        if share <= 0.0:
            return False
        return share >= 1.0 or self.number() < share
