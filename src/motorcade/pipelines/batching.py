"""Columns of VINs: which are right, each once, and the bytes of their fan-out batches. Arrow and numpy, no Spark.

    VINs of a partition ─▶ VinTally: each once, how often it was there ─▶ right? ─▶ matrix of n × 17 bytes ─▶ batches
                                                                        └─▶ wrong: reason and words of core.vin

Rule 1: what is frequent costs no Python: VINs are looked at, and batches are made of them, a partition at a time. Only
        what is wrong is looked at one by one.
Rule 2: what is right is what `core.vin.check_vin` says is right, and nothing is ever corrected.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum, auto
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from motorcade.core.vin import ALPHABET, CHECK, LENGTH, VinError, check_digit_of, check_vin
from motorcade.pipelines import PipelineError
from motorcade.publisher.batches import BETWEEN, HEAD, Order

#: Different texts that one task holds; 5 million VINs take about 300 MB.
MAX_DIFFERENT: Final = 5_000_000

#: Rows that are gathered before they are counted.
GATHERED: Final = 1_000_000

ByteArray = npt.NDArray[np.uint8]


class Wrong(StrEnum):
    """The reason why a text is no VIN."""

    MISSING = auto()  #: null, or empty
    WRONG_CHARACTER = auto()
    WRONG_LENGTH = auto()
    WRONG_CHECK_DIGIT = auto()


class CountedVins(NamedTuple):
    """Texts, each once, and how often each was there."""

    texts: pa.StringArray
    times: npt.NDArray[np.int64]

    def filter(self, mask: npt.NDArray[np.bool_]) -> CountedVins:
        return CountedVins(self.texts.filter(pa.array(mask)), self.times[mask])


class VinTally:
    """Counts texts as they come; holds each once, and those that came since."""

    def __init__(self, most: int = MAX_DIFFERENT, gathered: int = GATHERED) -> None:
        self._most = most
        self._gathered = gathered
        self._counted: pa.Table | None = None
        self._waiting: list[pa.Array] = []
        self._rows = 0

    def add(self, texts: pa.Array) -> None:
        self._waiting.append(texts)
        self._rows += len(texts)
        # Not more often than it doubles: counting goes over everything that is held.
        if self._rows >= max(self._gathered, self._counted.num_rows if self._counted is not None else 0):
            self._count()

    def found(self) -> CountedVins:
        if self._waiting or self._counted is None:
            self._count()
        assert self._counted is not None  # noqa: S101
        texts = self._counted.column("text").combine_chunks()
        if isinstance(texts, pa.ChunkedArray):  # what is empty has no chunk to combine
            texts = pa.array([], pa.string())
        return CountedVins(texts, self._counted.column("times").to_numpy().astype(np.int64))

    def _count(self) -> None:
        fresh = pc.value_counts(pa.chunked_array(self._waiting, pa.string()))
        table = pa.table({"text": fresh.field(0), "times": fresh.field(1)})
        if self._counted is not None:
            both = pa.concat_tables([self._counted, table])
            summed = both.group_by("text", use_threads=False).aggregate([("times", "sum")])
            table = pa.table({"text": summed.column("text"), "times": summed.column("times_sum")})
        self._counted, self._waiting, self._rows = table, [], 0
        if table.num_rows > self._most:
            raise PipelineError(
                f"one task has more than {self._most} different VINs to hold; more partitions (--partitions) make "
                "the share of each smaller"
            )


# -- right or wrong


def _table() -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return by byte whether it may be in a VIN, and its value in the check digit; and the weights of the places.

    Taken from `core.vin` by asking it: a letter alone at a place of weight w gives the remainder of its value × w.
    """
    allowed = np.zeros(256, dtype=np.bool_)
    values = np.zeros(256, dtype=np.int32)
    seventh = 6  # its weight is 2, whose multiples tell all values apart modulo 11
    for letter in ALPHABET:
        allowed[ord(letter)] = True
        values[ord(letter)] = (_remainder(letter, seventh) * 6) % 11  # 6 × 2 is 1 modulo 11
    weights = np.array([_remainder("1", place) for place in range(LENGTH)], dtype=np.int32)
    return allowed, values, weights


def _remainder(letter: str, place: int) -> int:
    digit = check_digit_of("0" * place + letter + "0" * (LENGTH - place - 1))
    return 10 if digit == "X" else int(digit)


_ALLOWED, _VALUES, _WEIGHTS = _table()
_DIGITS: Final = np.frombuffer(b"0123456789X", dtype=np.uint8)


def right(texts: pa.StringArray, *, check_digit: bool = False) -> npt.NDArray[np.bool_]:
    """Return which of the texts are VINs, as a mask."""
    mask: npt.NDArray[np.bool_] = pc.fill_null(pc.equal(pc.binary_length(texts), LENGTH), False).to_numpy(
        zero_copy_only=False
    )
    if not mask.any():
        return mask
    matrix = byte_matrix(texts if mask.all() else texts.filter(pa.array(mask)))
    good = _ALLOWED[matrix].all(axis=1)
    if check_digit:
        # Bytes that mean nothing here count 0, so that a sum is had of every row; those rows are wrong anyway.
        good &= _DIGITS[(_VALUES[matrix] @ _WEIGHTS) % 11] == matrix[:, CHECK]
    found: npt.NDArray[np.bool_] = mask.copy()
    found[mask] = good
    return found


def byte_matrix(texts: pa.StringArray) -> ByteArray:
    """Return texts as a matrix of bytes; each has `LENGTH` bytes, none is null."""
    offsets = np.frombuffer(texts.buffers()[1], dtype=np.int32)
    start = int(offsets[texts.offset]) if len(texts) else 0
    flat = np.frombuffer(texts.buffers()[2] or b"", dtype=np.uint8)
    return flat[start : start + LENGTH * len(texts)].reshape(-1, LENGTH)


def reason_of(text: str | None, *, check_digit: bool = False) -> tuple[Wrong, str] | None:
    """Return why a text is no VIN, and a sentence about it; None if it is one."""
    if not text:
        return Wrong.MISSING, "there is no VIN"
    try:
        check_vin(text, check_digit=check_digit)
    except VinError as error:
        if not set(text[:LENGTH]) <= set(ALPHABET):
            return Wrong.WRONG_CHARACTER, str(error)
        return (Wrong.WRONG_LENGTH if len(text) != LENGTH else Wrong.WRONG_CHECK_DIGIT), str(error)
    return None


# -- batches


class Batches(NamedTuple):
    """Several of them, as columns."""

    ids: list[str]
    messages: list[bytes]
    vehicles: list[int]
    rows: list[int]  #: that their vehicles had


def batches(found: CountedVins, order: Order, size: int, prefix: str, several: int = 1000) -> Iterator[Batches]:
    """Return batches of valid, distinct VINs, with ids that begin with `prefix`; `several` at a time."""
    matrix = byte_matrix(found.texts)
    middle, tail = order.middle(prefix), order.tail
    for first in range(0, len(matrix), size * several):
        some = matrix[first : first + size * several]
        joined = _joined(some)
        width = joined.shape[1]
        starts = range(0, len(some), size)
        numbers = range(first // size, first // size + len(starts))
        flat = joined.reshape(-1).data
        yield Batches(
            [f"{prefix}{number}" for number in numbers],
            [
                b"".join(
                    (
                        HEAD,
                        flat[start * width : min(start + size, len(some)) * width - len(BETWEEN)],
                        middle,
                        b"%d" % number,
                        tail,
                    )
                )
                for number, start in zip(numbers, starts, strict=True)
            ],
            [min(size, len(some) - start) for start in starts],
            [int(rows) for rows in np.add.reduceat(found.times[first : first + len(some)], list(starts))],
        )


def _joined(matrix: ByteArray) -> ByteArray:
    """Return each VIN followed by the separator."""
    between: Any = np.frombuffer(BETWEEN, dtype=np.uint8)
    return np.hstack([matrix, np.broadcast_to(between, (len(matrix), len(between)))])
