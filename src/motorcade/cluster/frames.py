"""The bytes between two members. Pure: bytes in, frames out.

    | length of the body, 4 bytes | kind, 1 byte | body |          all numbers are little-endian

    kind         body                                              sent
    1 HELLO      MessagePack (`greeting.Hello`)                    first, by both
    2 PROOF      received up to, 8 · proof, 32 bytes or none       second, by both; the side that connects goes first
    3 REFUSED    a sentence, UTF-8                                 at any time; then the connection is closed
    4 BATCH      number of the first item, 8 · count n, 4 · n × code, 1 · n × length, 4 · the items
    5 ACK        number of the last item that was taken over, 8
    6 ASK        id, 8 · length of the noun, 1 · noun · question
    7 ANSWER     id, 8 · 1: answered, 0: refused · answer, or a sentence
    8 PING       id, 8
    9 PONG       id, 8 · body

The codes of a batch stand together, and so do its lengths: to write or read an item takes a few steps in C. Code 0 is a
declaration: one byte, the code, then the name of the kind that it stands for from now on. It is an item like others, so
it comes before the first item of its kind, is sent again after a break, and void with its incarnation.

Rule 1: a frame is longer than `most` bytes only if its sender is no member, or has another `cluster.max_frame`.
Rule 2: on a `LinkFrameError` the connection is closed: it is unknown where the next frame begins. The good ones before
        it count.
Rule 3: HELLO is read by all versions, past and to come; a number stands for one kind for ever.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final

from motorcade.core.errors import MotorcadeError
from motorcade.core.handshake import PROOF_SIZE
from motorcade.core.pieces import Pieces

HELLO: Final = 1
PROOF: Final = 2
REFUSED: Final = 3
BATCH: Final = 4
ACK: Final = 5
ASK: Final = 6
ANSWER: Final = 7
PING: Final = 8
PONG: Final = 9

DECLARATION: Final = 0  #: code of an item that declares another code
MAX_CODES: Final = 255  #: kinds of items in one direction of a link
MAX_NAME: Final = 255  #: bytes of the name of a kind, or of a noun
MAX_SENTENCE: Final = 2000  #: bytes of a refusal
MIN_FRAME: Final = 1_048_576  #: bytes of a body that every member takes
MAX_HELLO: Final = 16_384  #: bytes of a frame until both sides have proved who they are

HEADER_SIZE: Final = 5
ITEM_SIZE: Final = 5  #: bytes of an item in a batch beside its body
BATCH_SIZE: Final = 12  #: bytes of a batch beside its items

_HEADER: Final = Struct("<IB")
_PROOF: Final = Struct("<IBQ")
_BATCH: Final = Struct("<IBQI")
_FIRST: Final = Struct("<QI")
_NUMBER: Final = Struct("<IBQ")
_ASK: Final = Struct("<IBQB")
_ANSWER: Final = Struct("<IBQB")
_ID: Final = Struct("<Q")
_ID_AND_BYTE: Final = Struct("<QB")

_SWAP: Final = sys.byteorder == "big"
_LENGTHS: Final = "I" if array("I").itemsize == 4 else "L"

Frame = tuple[int, bytes, int, int]  #: kind, and where its body is: bytes, start, end


class LinkFrameError(MotorcadeError):
    """The other side has sent what is no frame, or none that it may send now."""


# -- writing


def hello_frame(body: bytes) -> bytes:
    return _HEADER.pack(len(body), HELLO) + body


def proof_frame(received: int, proof: bytes) -> bytes:
    return _PROOF.pack(8 + len(proof), PROOF, received) + proof


def refused_sentence(sentence: str) -> bytes:
    text = sentence.encode("utf-8", "replace")[:MAX_SENTENCE]
    return _HEADER.pack(len(text), REFUSED) + text


def batch_head(first: int, codes: bytes | bytearray, bodies: Sequence[bytes]) -> bytes:
    """Return all of a batch but its bodies, which follow it one after the other."""
    lengths = array(_LENGTHS, map(len, bodies))
    count = len(codes)
    size = BATCH_SIZE + ITEM_SIZE * count + sum(lengths)
    if _SWAP:
        lengths.byteswap()
    return b"".join((_BATCH.pack(size, BATCH, first, count), codes, lengths))


def ack_frame(number: int) -> bytes:
    return _NUMBER.pack(8, ACK, number)


def ask_frame(id_: int, noun: bytes, question: bytes) -> bytes:
    return b"".join((_ASK.pack(9 + len(noun) + len(question), ASK, id_, len(noun)), noun, question))


def answer_frame(id_: int, answered: bool, answer: bytes) -> bytes:
    return _ANSWER.pack(9 + len(answer), ANSWER, id_, answered) + answer


def ping_frame(id_: int) -> bytes:
    return _NUMBER.pack(8, PING, id_)


def pong_frame(id_: int, body: bytes) -> bytes:
    return _NUMBER.pack(8 + len(body), PONG, id_) + body


# -- reading


class FrameReader:
    """Cuts what comes into frames."""

    __slots__ = ("_most", "_pieces")

    def __init__(self, most: int) -> None:
        self._most = most  #: bytes of a body
        self._pieces = Pieces()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete now; stop to read them only when no more will be fed."""
        data = self._pieces.together(data)
        at, end, need = 0, len(data), HEADER_SIZE
        while end - at >= HEADER_SIZE:
            length, kind = _HEADER.unpack_from(data, at)
            if length > self._most:
                raise LinkFrameError(
                    f"it announces a frame of {length} bytes (kind {kind}), and {self._most} are allowed"
                )
            if not HELLO <= kind <= PONG:
                raise LinkFrameError(f"frames of kind {kind} are unknown")
            start = at + HEADER_SIZE
            stop = start + length
            if stop > end:
                need = stop - at
                break
            at = stop
            yield kind, data, start, stop
        self._pieces.keep(data[at:], need)


def read_proof(data: bytes, start: int, stop: int) -> tuple[int, bytes]:
    """Return what has been received, and the proof."""
    if stop - start not in {8, 8 + PROOF_SIZE}:
        raise LinkFrameError("a proof has the wrong length")
    (received,) = _ID.unpack_from(data, start)
    return received, data[start + 8 : stop]


def read_sentence(data: bytes, start: int, stop: int) -> str:
    text = data[start : min(stop, start + MAX_SENTENCE)].decode("utf-8", "replace")
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)


def read_batch(data: bytes, start: int, stop: int) -> tuple[int, bytes, array[int], int]:
    """Return the number of the first item, codes and lengths of all, and where the first one begins."""
    if stop - start < BATCH_SIZE:
        raise LinkFrameError("a batch is too short")
    first, count = _FIRST.unpack_from(data, start)
    lengths_at = start + BATCH_SIZE + count
    at = lengths_at + 4 * count
    if at > stop:
        raise LinkFrameError("a batch is too short")
    lengths = array(_LENGTHS)
    lengths.frombytes(data[lengths_at:at])
    if _SWAP:
        lengths.byteswap()
    if at + sum(lengths) != stop:
        raise LinkFrameError("a batch has another length than its items")
    return first, data[start + BATCH_SIZE : lengths_at], lengths, at


def read_number(data: bytes, start: int, stop: int) -> int:
    """Return the number of an ACK or PING, or at the beginning of a PONG."""
    if stop - start < 8:
        raise LinkFrameError("a number is missing in a frame")
    number: int
    (number,) = _ID.unpack_from(data, start)
    return number


def read_ask(data: bytes, start: int, stop: int) -> tuple[int, str, bytes]:
    """Return id, noun and question."""
    if stop - start < 9:
        raise LinkFrameError("a question is too short")
    id_, length = _ID_AND_BYTE.unpack_from(data, start)
    at = start + 9 + length
    if at > stop:
        raise LinkFrameError("a question is too short")
    return id_, data[start + 9 : at].decode("utf-8", "replace"), data[at:stop]


def read_answer(data: bytes, start: int, stop: int) -> tuple[int, bool, bytes]:
    """Return id, whether it was answered, and the answer or a sentence."""
    if stop - start < 9:
        raise LinkFrameError("an answer is too short")
    id_, answered = _ID_AND_BYTE.unpack_from(data, start)
    return id_, bool(answered), data[start + 9 : stop]
