"""Receipts on their way: into the stream with what they tell of, then to the ledger and to those who listen.

    values, accepted ─▶ stage ─▶ (the caller's batch) ─commit─▶ written ─┬─▶ ledger, counters
                                                     └─error──▶ failed   ├─▶ readers of `$stream/receipts` are woken
                                                                         └─▶ topic of the receipt, if somebody listens

Rule 1: nobody hears of a receipt that is not stored.
Rule 2: a value is a record of a stream (`core.record`). Its guid has the stamp of the block, the origin of this process
        and a number, so that a reader can tell receipts apart and the ledger knows which ones it has counted.
Rule 3: the bytes are put together by hand, since there are hundreds of thousands of them in a second. A test holds them
        to what `core.record.encode` makes of the same message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final

import msgspec

from motorcade.core.message import Message
from motorcade.core.receipt import TOPIC, Receipt, State, delivery_id, encode, topic_of
from motorcade.core.vin import LENGTH as VIN_LENGTH
from motorcade.extension.plugin import Context
from motorcade.plugins.fanout.ledger import Ledger
from motorcade.plugins.fanout.tables import INGRESS, RECEIPTS
from motorcade.storage.ports import Batch, StoreError

MOST_UNPUBLISHED: Final = 10_000  #: receipts that wait to be published to live subscribers; more are left out, counted
QOS: Final = 1  #: of receipts on their topics

# A record of 15 fields: version 1, topic, payload | client "", no user name, time | guid | QoS 1, not retained, and
# nothing else of MQTT 5.
_HEAD: Final = b"\x9f\x01"
_TIME: Final = Struct(">3sd").pack
_BEFORE_TIME: Final = b"\xa0\xc0\xcb"
_BEFORE_GUID: Final = b"\xc4\x10"
_TAIL: Final = bytes((QOS,)) + b"\xc2\xc0\xc0\xc0\xc0\xc0\x90"
_STAMP: Final = slice(-16 - len(_TAIL), -8 - len(_TAIL))  # of the guid in a value

_json = msgspec.json.Encoder().encode


class Receipts:
    """Writes and publishes the receipts of one node."""

    def __init__(self, context: Context, node: str, ledger: Ledger) -> None:
        self._context = context
        self._hub = context.hub
        self._counters = context.counters
        self._node = node
        self._ledger = ledger
        self._unpublished: deque[Message] = deque()
        self._publishing = False

    # -- into the stream

    def values(self, receipts: Sequence[Receipt]) -> list[bytes]:
        """What the stream gets for receipts; `written` or `failed` follows."""
        if not receipts:
            return []
        guid = self._block()
        values = []
        for number, receipt in enumerate(receipts, guid):
            topic, payload = topic_of(receipt).encode(), encode(receipt)
            values.append(
                b"".join(
                    (
                        _HEAD,
                        _text_head(len(topic)),
                        topic,
                        _bytes_head(len(payload)),
                        payload,
                        _TIME(_BEFORE_TIME, receipt.time),
                        _BEFORE_GUID,
                        number.to_bytes(16, "big"),
                        _TAIL,
                    )
                )
            )
        return values

    def accepted(self, vins: Sequence[str], positions: Sequence[int], request_id: str, now: float) -> list[bytes]:
        """The same for `accepted` receipts of one request, quickly; `written_accepted` or `failed` follows."""
        if not vins:
            return []
        guid = self._block()
        forms: dict[int, bytes] = {}  # by the number of digits of a position: the payload's length depends on it
        values = []
        for vin, position, number in zip(vins, positions, range(guid, guid + len(vins)), strict=True):
            name, digits = vin.encode(), len(str(position))
            form = forms.get(digits)
            if form is None:
                form = forms[digits] = self._form(len(name), digits, request_id, now)
            values.append(form % (name, name, name, position, number.to_bytes(16, "big")))
        return values

    def _block(self) -> int:
        """The guid of the first receipt of a new block, as a number; the others follow."""
        stamp = self._ledger.begin()
        return stamp << 64 | int.from_bytes(self._ledger.origin, "big") << 16

    def _form(self, vin: int, digits: int, request_id: str, now: float) -> bytes:
        """An `accepted` receipt with gaps: VIN, VIN, VIN, position, guid."""
        topic = f"{TOPIC}/{request_id}/".encode()
        before = b'{"v":1,"state":"accepted","vin":"'
        between = b'","request_id":%b,"delivery_id":"' % _json(request_id)
        after = b'","time":%b,"node":%b,"attempt":0,"reason":""}' % (_json(now), _json(self._node))
        length = len(before) + vin + len(between) + vin + 1 + digits + len(after)
        return b"".join(
            (
                _escaped(_HEAD + _text_head(len(topic) + vin) + topic),
                b"%b",
                _escaped(_bytes_head(length) + before),
                b"%b",
                _escaped(between),
                b"%b.%d",
                _escaped(after + _TIME(_BEFORE_TIME, now) + _BEFORE_GUID),
                b"%b",
                _escaped(_TAIL),
            )
        )

    def stage(self, batch: Batch, values: Sequence[bytes], now: float) -> None:
        """Let a batch append values to the stream."""
        if values:
            batch.stream(RECEIPTS, values, now)

    # -- after the commit

    def written(self, receipts: Sequence[Receipt], values: Sequence[bytes]) -> None:
        """These are stored."""
        if not receipts:
            return
        self._ledger.count(_stamp_of(values), receipts)
        for receipt in receipts:
            self._counters[f"receipts_{receipt.state}"] += 1
        self._tell(receipts)

    def written_accepted(
        self, vins: Sequence[str], positions: Sequence[int], request_id: str, now: float, values: Sequence[bytes]
    ) -> None:
        """What `accepted` made is stored."""
        if not vins:
            return
        self._ledger.count_accepted(_stamp_of(values), request_id, len(vins), now)
        self._counters["receipts_accepted"] += len(vins)
        self._tell(
            Receipt(
                state=State.ACCEPTED,
                vin=vin,
                request_id=request_id,
                delivery_id=delivery_id(vin, position),
                time=now,
                node=self._node,
            )
            for vin, position in zip(vins, positions, strict=True)
        )

    def failed(self, values: Sequence[bytes], error: BaseException) -> None:
        """The batch with these could not be committed."""
        if values:
            self._ledger.failed(_stamp_of(values), certain=isinstance(error, StoreError) and error.certain)

    # -- those who listen

    def _tell(self, receipts: Iterable[Receipt]) -> None:
        streams = self._context.service("streams")
        if streams is not None:
            streams.grown(RECEIPTS)
        if not self._hub.heard_below(INGRESS, self._context.name):
            return
        for receipt in receipts:
            topic = topic_of(receipt)
            if not self._hub.heard(topic, self._context.name):
                continue
            if len(self._unpublished) >= MOST_UNPUBLISHED:
                self._counters["receipts_not_published"] += 1
                continue
            self._unpublished.append(Message(topic, encode(receipt), QOS, timestamp=receipt.time))
        if self._unpublished and not self._publishing:
            self._publishing = True
            self._context.spawn(self._publish(), "receipts.publish")

    async def _publish(self) -> None:
        """One after the other, in the order in which they were stored."""
        try:
            while self._unpublished:
                await self._hub.publish(self._unpublished.popleft())
        finally:
            self._publishing = False


def _stamp_of(values: Sequence[bytes]) -> int:
    """The block that values belong to."""
    return int.from_bytes(values[0][_STAMP], "big")


def prefix_of(request_id: str) -> bytes:
    """How every value of a request's receipts begins, and no other."""
    topic = f"{TOPIC}/{request_id}/".encode()
    return _HEAD + _text_head(len(topic) + VIN_LENGTH) + topic


def _text_head(length: int) -> bytes:
    """How a text of so many bytes begins in MessagePack."""
    if length < 32:
        return bytes((0xA0 | length,))
    return b"\xd9" + length.to_bytes(1, "big") if length < 256 else b"\xda" + length.to_bytes(2, "big")


def _bytes_head(length: int) -> bytes:
    """Likewise for bytes."""
    return b"\xc4" + length.to_bytes(1, "big") if length < 256 else b"\xc5" + length.to_bytes(2, "big")


def _escaped(text: bytes) -> bytes:
    return text.replace(b"%", b"%%")
