"""A whole store as one file that every engine can read: `motorcade store export` and `import`.

    file    frame frame … frame, perhaps compressed with gzip
    frame   length(4, big-endian), msgpack array: what it is, then its fields in the order of the classes below

    store                                   first: who wrote it, when, and in which version of this format
    blob mailbox tokens records stream lease floor      in any order, but a blob before the first entry that needs it
    end                                     last: how many there were, and the SHA-256 of every byte before it

Rule 1: a file holds what readers of the ports could still see at the moment of the export, and what they must never
        see again: the last position of every mailbox, of those that are gone too, the offset last given by every
        stream, and a number that all fencing tokens stay below. Who is attached where is not in it: those nodes are not
        connected to the new store. Nor are feeds: their readers begin with the records.
Rule 2: payloads of up to INLINE bytes stand in their entries, larger ones are blobs, once, however an engine keeps
        them. So the same contents make the same items, whichever engine they come from.
Rule 3: a mailbox or stream of more than one frame comes in parts, one after the other, each with the same head.
Rule 4: nothing is imported before the file was read to its end and its digest was found right; and only into a store
        that is empty, since positions and offsets of two stores cannot be merged.
Rule 5: a change of a class here raises VERSION, unless what is new stands at the end and a program that leaves it out
        does no harm; files of the versions before are still read.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import BinaryIO, Final, Protocol, cast

import msgspec

from motorcade import __version__
from motorcade.storage.ports import StoreError

NAME: Final = "motorcade store"
VERSION: Final = 2  #: 1: without generations, and without the floor of positions

#: Bytes; larger payloads are stored apart from their entries.
INLINE: Final = 256

#: A part of a mailbox, collection or stream ends when it has so many rows, or bytes.
PART_ROWS: Final = 500
PART_BYTES: Final = 256 * 1024

#: Bytes of one frame. The largest payload of MQTT and its surroundings fit; more is damage, and must not be allocated.
MAX_FRAME: Final = 1 << 29

GZIP: Final = b"\x1f\x8b"


class TransferError(StoreError):
    """The file is not what it should be, or the store is not one to import into; the message says which."""


# -- what a file is made of


class FileHeader(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    """The first frame."""

    name: str
    version: int
    engine: str
    made_at: float
    made_by: str  #: version of Motorcade


class ExportedBlob(msgspec.Struct, frozen=True, array_like=True, tag="blob"):
    """A payload that entries refer to by its SHA-256, or that was put to be kept, or both."""

    data: bytes
    keep_until: float  #: 0: only as long as entries refer to it


class ExportedEntry(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a mailbox."""

    position: int
    stored_at: float
    expires_at: float
    mark: int
    droppable: bool
    key: bytes
    body: bytes
    payload: bytes  #: empty if it is a blob
    digest: bytes  #: of its blob; empty: it has none
    size: int  #: of the payload, wherever it is


class ExportedMailbox(msgspec.Struct, frozen=True, array_like=True, tag="mailbox"):
    """Entries of one owner, in the order of positions; none if only its last position is to be known."""

    owner: str
    last: int
    entries: list[ExportedEntry]
    generation: int = 1
    spare: int = 0  #: position up to which entries are in flight; -1: all of them


class ExportedTokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """Appends to one owner that must not be repeated: token, position, known until when."""

    owner: str
    tokens: list[tuple[bytes, int, float]]


class ExportedRecords(msgspec.Struct, frozen=True, array_like=True, tag="records"):
    """Records of one collection: key, value, when it expires. Due times are such records (`due`)."""

    collection: str
    records: list[tuple[str, bytes, float]]


class ExportedStream(msgspec.Struct, frozen=True, array_like=True, tag="stream"):
    """Records of one stream: offset, time, value."""

    name: str
    last: int  #: offset given last
    time: float  #: of the record appended last; no later one may be before it
    records: list[tuple[int, float, bytes]]


class ExportedLease(msgspec.Struct, frozen=True, array_like=True, tag="lease"):
    """A lease that has not run out."""

    name: str
    token: int
    until: float


class ExportedFloor(msgspec.Struct, frozen=True, array_like=True, tag="floor"):
    """The numbers given so far, and to what is gone: fencing tokens, and positions in mailboxes; none is above it."""

    token: int
    position: int = 0


class FileEnd(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The last frame."""

    counts: dict[str, int]
    digest: bytes


Content = (
    ExportedBlob | ExportedMailbox | ExportedTokens | ExportedRecords | ExportedStream | ExportedLease | ExportedFloor
)
Frame = FileHeader | Content | FileEnd

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame).decode


class ExportSource(Protocol):
    """Everything in a store, to be written down."""

    @property
    def engine(self) -> str: ...

    def contents(self, now: float) -> AsyncIterator[Content]:
        """Yield what has not expired, in the order that a file has it."""


class ImportTarget(Protocol):
    """An empty store, to be filled."""

    async def load(self, content: Content) -> None:
        """Take one frame. May wait for others before it writes."""

    async def finish(self) -> None:
        """Make what was loaded last: all is there, and it counts only now."""


# -- writing and reading files


class TransferCounts:
    """The counts by kind; mailboxes and streams in parts count once."""

    def __init__(self) -> None:
        self.found = dict.fromkeys(
            ("mailboxes", "entries", "blobs", "blob_octets", "records", "streams", "stream_records", "leases"), 0
        )
        self._before = ("", "")  # kind and name of the frame before

    def add(self, content: Content) -> None:
        found = self.found
        match content:
            case ExportedBlob():
                found["blobs"] += 1
                found["blob_octets"] += len(content.data)
                return  # may stand between two parts of a mailbox
            case ExportedMailbox():
                found["mailboxes"] += self._is_new("mailbox", content.owner)
                found["entries"] += len(content.entries)
            case ExportedRecords():
                found["records"] += len(content.records)
            case ExportedStream():
                found["streams"] += self._is_new("stream", content.name)
                found["stream_records"] += len(content.records)
            case ExportedLease():
                found["leases"] += 1

    def _is_new(self, kind: str, name: str) -> bool:
        before, self._before = self._before, (kind, name)
        return before != self._before


Progress = Callable[[dict[str, int]], None]


def _no_progress(counts: dict[str, int]) -> None:
    """Show no progress."""


async def export(source: ExportSource, out: BinaryIO, now: float, progress: Progress = _no_progress) -> dict[str, int]:
    """Write a whole store; how much there was."""
    digest = hashlib.sha256()
    counts = TransferCounts()

    def write(frame: Frame) -> None:
        packed = _encode(frame)
        if len(packed) > MAX_FRAME:
            raise TransferError(f"one thing in the store has {len(packed)} bytes, more than a file can hold")
        framed = len(packed).to_bytes(4, "big") + packed
        digest.update(framed)
        out.write(framed)

    write(FileHeader(NAME, VERSION, source.engine, now, __version__))
    async for content in source.contents(now):
        counts.add(content)
        write(content)
        progress(counts.found)
    write(FileEnd(counts.found, digest.digest()))
    out.flush()
    return counts.found


def frames(file: BinaryIO) -> Iterator[Frame]:
    """Yield all frames of a file, the header and the end among them; `TransferError` where it is damaged or cut off."""
    plain = _plain(file)
    digest = hashlib.sha256()
    first = True
    try:
        while True:
            head = _exactly(plain, 4)
            size = int.from_bytes(head, "big")
            if first and size > MAX_FRAME:
                raise _foreign()
            if size > MAX_FRAME:
                raise TransferError("the file is damaged: a part of it has no sensible length")
            packed = _exactly(plain, size)
            frame = _frame(packed, first)
            if isinstance(frame, FileEnd):
                if frame.digest != digest.digest():
                    raise TransferError("the file is damaged: its digest does not agree with what is in it")
                if plain.read(1):
                    raise TransferError("the file is damaged: something follows its end")
                yield frame
                return
            digest.update(head)
            digest.update(packed)
            first = False
            yield frame
    except EOFError:
        if first:
            raise _foreign() from None
        raise TransferError("the file is cut off: its end is missing") from None
    except (gzip.BadGzipFile, OSError) as error:
        raise TransferError(f"the file cannot be read: {error}") from None


def _frame(packed: bytes, first: bool) -> Frame:
    try:
        frame = cast("Frame", _decode(packed))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if first:
            raise _foreign() from None
        raise TransferError(f"the file is damaged: {error}") from None
    if first != isinstance(frame, FileHeader):
        raise _foreign() if first else TransferError("the file is damaged: it begins twice")
    if isinstance(frame, FileHeader):
        if frame.name != NAME:
            raise _foreign()
        if frame.version > VERSION:
            raise TransferError(
                f"the file has version {frame.version} of the format and was made by Motorcade {frame.made_by}; "
                f"this is Motorcade {__version__}, which knows up to {VERSION}: use a newer one"
            )
    return frame


def _foreign() -> TransferError:
    return TransferError("this is no exported store; `motorcade store export` makes one")


def _plain(file: BinaryIO) -> BinaryIO:
    """Return the file without its compression, whatever its name says."""
    start = file.read(2)
    file.seek(-len(start), 1)
    return cast("BinaryIO", gzip.GzipFile(fileobj=file, mode="rb")) if start == GZIP else file


def _exactly(file: BinaryIO, size: int) -> bytes:
    read = bytearray()
    while len(read) < size:
        part = file.read(size - len(read))
        if not part:
            raise EOFError
        read += part
    return bytes(read)


def verify(file: BinaryIO) -> tuple[FileHeader, dict[str, int]]:
    """Read a file to its end; who made it, and what is in it. Leaves it at its beginning."""
    header: FileHeader | None = None
    counts = TransferCounts()
    told: dict[str, int] = {}
    for frame in frames(file):
        if isinstance(frame, FileHeader):
            header = frame
        elif isinstance(frame, FileEnd):
            told = frame.counts
        else:
            counts.add(frame)
    if header is None or told != counts.found:
        raise TransferError("the file is damaged: it does not hold what its end says")
    file.seek(0)
    return header, told


async def load(target: ImportTarget, file: BinaryIO, progress: Progress = _no_progress) -> dict[str, int]:
    """Fill an empty store from a file that `verify` has found good; how much was loaded."""
    counts = TransferCounts()
    for frame in frames(file):
        if not isinstance(frame, FileHeader | FileEnd):
            await target.load(frame)
            counts.add(frame)
            progress(counts.found)
    await target.finish()
    return counts.found


async def is_empty(source: ExportSource, now: float) -> bool:
    """Return True if there is nothing in a store that an import could meet."""
    async for content in source.contents(now):
        if not isinstance(content, ExportedFloor | ExportedLease):
            return False
    return True
