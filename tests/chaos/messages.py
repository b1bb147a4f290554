"""Payloads that say who they are, and notice when they are damaged."""

from __future__ import annotations

from random import Random

DAMAGED = "(damaged)"

#: Bytes beside the name, and how often: small ones, ones that a store may keep apart from their entries, large ones.
SIZES = ((0, 0.5), (40, 0.25), (300, 0.15), (4000, 0.08), (20000, 0.02))


def make_payload(name: str, size: int) -> bytes:
    """`NAME SIZE FILLING`; the filling follows from the name."""
    return f"{name} {size} {_filling(name, size)}".encode()


def read_payload(payload: bytes) -> str:
    """The name, if the payload is what `make_payload` has made."""
    try:
        name, size, filling = payload.decode().split(" ")
        whole = filling == _filling(name, int(size))
    except ValueError:
        return DAMAGED
    return name if whole else DAMAGED


def any_size(random: Random) -> int:
    sizes, weights = zip(*SIZES, strict=True)
    return int(random.choices(sizes, weights)[0])


def _filling(name: str, size: int) -> str:
    return (name * (size // len(name) + 1))[:size]
