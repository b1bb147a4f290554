"""The bytes between a leader and its workers. Pure: bytes in, ids and payloads out.

    | version, 1 byte = 1 | command, 1 byte | length of the payload, 4 bytes, big-endian | payload |

    command        payload             from      meaning
    0  PROCESS     UUID ':' message    leader    work on this
    1  ACK         UUID                worker    done: the result is written
    78 REJECT      UUID ':' reason     worker    the message cannot be worked on; counts as a delivery
    82 RETURN      UUID                worker    not done, and not the message's fault; does not count
    65 CHALLENGE, 66 PROOF, 70 REFUSED           before all others, where a secret is configured (`handshake.py`)

The first two are the seed's; a worker that knows no others simply does not acknowledge.

Frames come split and merged as TCP likes. Both readers take many of them from one read without an object per frame:
acknowledgements are all of the same size, so a run of them is checked and cut by slices of the whole read.

Rule: on a `FrameError`, use what came before it (`before`) and close the connection. After a wrong header it is unknown
where the next one begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

from motorcade.core.errors import MotorcadeError
from motorcade.core.pieces import Pieces

VERSION: Final = 1
PROCESS: Final = 0
ACK: Final = 1
REJECT: Final = 78
RETURN: Final = 82
CHALLENGE: Final = 65
PROOF: Final = 66
REFUSED: Final = 70

ID_SIZE: Final = 36  #: characters of a UUID
MAX_REASON: Final = 1000  #: bytes of a reason

_HEADER: Final = Struct(">BBI")
_SIZE: Final = _HEADER.size
_ACK_HEADER: Final = _HEADER.pack(VERSION, ACK, ID_SIZE)
_RETURN_HEADER: Final = _HEADER.pack(VERSION, RETURN, ID_SIZE)
_ACK_SIZE: Final = _SIZE + ID_SIZE
_COLON: Final = ord(":")
_DASHES: Final = (8, 13, 18, 23)


class FrameError(MotorcadeError):
    """The peer sent something that is no frame, or none that it may send."""

    #: What the good frames before it have said: they count, however the bytes were cut on their way.
    before: tuple[list[bytes], list[bytes]] | Answers | None = None


class SecretWantedError(FrameError):
    """The peer has a secret, and this side has none."""


class Answers(NamedTuple):
    """The answers of a worker about its messages."""

    acknowledged: list[bytes]
    rejected: list[tuple[bytes, str]]
    returned: list[bytes]


# -- writing


def process_frames(ids: Sequence[bytes], messages: Sequence[bytes]) -> bytes:
    pack = _HEADER.pack
    return b"".join(
        [
            b"%b%b:%b" % (pack(VERSION, PROCESS, ID_SIZE + 1 + len(message)), id_, message)
            for id_, message in zip(ids, messages, strict=True)
        ]
    )


def ack_frames(ids: Sequence[bytes]) -> bytes:
    return _ACK_HEADER + _ACK_HEADER.join(ids) if ids else b""


def return_frames(ids: Sequence[bytes]) -> bytes:
    return _RETURN_HEADER + _RETURN_HEADER.join(ids) if ids else b""


def reject_frame(id_: bytes, reason: str) -> bytes:
    text = reason.encode("utf-8", "replace")[:MAX_REASON]
    return b"%b%b:%b" % (_HEADER.pack(VERSION, REJECT, ID_SIZE + 1 + len(text)), id_, text)


# -- reading


class MessageReader:
    """Parses the frames that a worker gets."""

    __slots__ = ("_most", "_pieces")

    def __init__(self, max_message: int) -> None:
        self._pieces = Pieces()
        self._most = ID_SIZE + 1 + max_message

    def feed(self, data: bytes) -> tuple[list[bytes], list[bytes]]:
        """Return the ids and messages of all frames that are complete now."""
        ids: list[bytes] = []
        messages: list[bytes] = []
        try:
            self._read(self._pieces.together(data), ids, messages)
            if ids:
                _check_ids(ids)
        except FrameError as error:
            good = _good_ids(ids)
            error.before = ids[:good], messages[:good]
            raise
        return ids, messages

    def _read(self, data: bytes, ids: list[bytes], messages: list[bytes]) -> None:
        unpack, most = _HEADER.unpack_from, self._most
        at, end, need = 0, len(data), _SIZE
        while end - at >= _SIZE:
            version, command, length = unpack(data, at)
            if version != VERSION or command != PROCESS or not ID_SIZE < length <= most:
                raise _complaint(version, command, length, most, (PROCESS,))
            start = at + _SIZE
            stop = start + length
            if stop > end:
                need = stop - at
                break
            middle = start + ID_SIZE
            if data[middle] != _COLON:
                raise FrameError("there is no colon after the id of a message")
            ids.append(data[start:middle])
            messages.append(data[middle + 1 : stop])
            at = stop
        self._pieces.keep(data[at:], need)


class AnswerReader:
    """Parses the frames that a leader gets."""

    __slots__ = ("_pieces",)

    MOST = ID_SIZE + 1 + MAX_REASON

    def __init__(self) -> None:
        self._pieces = Pieces()

    def feed(self, data: bytes) -> Answers:
        data = self._pieces.together(data)
        ids, at = _run_of_acks(data)
        answers = Answers(ids, [], [])
        if at < len(data):
            try:
                at, need = self._singly(data, at, answers)
            except FrameError as error:
                error.before = answers
                raise
            self._pieces.keep(data[at:], need)
        return answers

    def _singly(self, data: bytes, at: int, answers: Answers) -> tuple[int, int]:
        end = len(data)
        while end - at >= _SIZE:
            version, command, length = _HEADER.unpack_from(data, at)
            if version != VERSION or command not in {ACK, REJECT, RETURN} or not ID_SIZE <= length <= self.MOST:
                raise _complaint(version, command, length, self.MOST, (ACK, REJECT, RETURN))
            if command != REJECT and length != ID_SIZE:
                raise FrameError(f"an acknowledgement has {length} bytes, not the {ID_SIZE} of an id")
            start = at + _SIZE
            stop = start + length
            if stop > end:
                return at, stop - at
            id_ = data[start : start + ID_SIZE]
            if command == ACK:
                answers.acknowledged.append(id_)
            elif command == RETURN:
                answers.returned.append(id_)
            else:
                answers.rejected.append((id_, data[start + ID_SIZE + 1 : stop].decode("utf-8", "replace")))
            at = stop
        return at, _SIZE


def _run_of_acks(data: bytes) -> tuple[list[bytes], int]:
    """Return the ids of a read that has only acknowledgements (the last one perhaps cut), and where they end."""
    count = len(data) // _ACK_SIZE
    end = count * _ACK_SIZE
    whole = data[:end]
    for offset, byte in enumerate(_ACK_HEADER):
        if whole[offset::_ACK_SIZE].count(byte) != count:
            return [], 0
    return [whole[start : start + ID_SIZE] for start in range(_SIZE, end, _ACK_SIZE)], end


def _check_ids(ids: list[bytes]) -> None:
    """Check all at once: hexadecimal digits, with dashes where a UUID has them."""
    joined = b"".join(ids)
    try:
        fine = all(joined[dash::ID_SIZE].count(b"-") == len(ids) for dash in _DASHES)
        digits = bytes.fromhex(joined.translate(None, b"-").decode("ascii"))
    except ValueError:
        fine, digits = False, b""
    if not fine or len(digits) != 16 * len(ids):
        raise FrameError("the id of a message is no UUID")


def _good_ids(ids: list[bytes]) -> int:
    """Count how many of them are UUIDs, from the first one on."""
    for number, id_ in enumerate(ids):
        try:
            _check_ids([id_])
        except FrameError:
            return number
    return len(ids)


def _complaint(version: int, command: int, length: int, most: int, known: tuple[int, ...]) -> FrameError:
    if version != VERSION:
        return FrameError(f"version {version} of the protocol is unknown; this is version {VERSION}")
    if command == CHALLENGE:
        return SecretWantedError("it asks for a secret, and there is none here (option secret_file of [dispatch])")
    if command not in known:
        return FrameError(f"command {command} is unknown or not for this side")
    if length > most:
        return FrameError(f"a frame of {length} bytes is longer than the {most} that are allowed")
    return FrameError(f"a frame of {length} bytes is too short for an id")
