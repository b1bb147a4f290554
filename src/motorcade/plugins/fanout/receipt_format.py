"""Receipts as records of the stream `receipts`. Pure: receipts in, bytes out.

Rule 1: a value is a record of a stream (`core.record`). The bytes are put together by hand, since there are hundreds of
        thousands of them in a second; a test compares them with what `core.record.encode` makes of the same message.
Rule 2: guids differ, and grow within a process: microseconds, the origin of this process, and a number.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

import msgspec

from motorcade.core.receipt import TOPIC, Receipt, State, delivery_id, encode
from motorcade.core.vin import LENGTH as VIN_LENGTH
from motorcade.plugins.fanout.options import FanoutConfig
from motorcade.storage.ports import Draft, Formed

QOS: Final = 1  #: of receipts on their topics

# A record of 15 fields: version 1, topic, payload | client "", no user name, time | guid | QoS 1, not retained, and
# nothing else of MQTT 5.
_HEAD: Final = b"\x9f\x01"
_TIME: Final = Struct(">3sd2s").pack
_BEFORE_TIME: Final = b"\xa0\xc0\xcb"
_BEFORE_GUID: Final = b"\xc4\x10"
_TAIL: Final = bytes((QOS,)) + b"\xc2\xc0\xc0\xc0\xc0\xc0\x90"


def _bytes_head(length: int) -> bytes:
    """Return how so many bytes begin in MessagePack."""
    return b"\xc4" + length.to_bytes(1, "big") if length < 256 else b"\xc5" + length.to_bytes(2, "big")


def _text_head(length: int) -> bytes:
    """Return the same for a text."""
    if length < 32:
        return bytes((0xA0 | length,))
    return b"\xd9" + length.to_bytes(1, "big") if length < 256 else b"\xda" + length.to_bytes(2, "big")


_TEXT_HEADS: Final = tuple(map(_text_head, range(1024)))  # a topic is shorter: a request id has 128 characters
_BYTES_HEADS: Final = tuple(map(_bytes_head, range(1024)))  # a payload hardly ever has more
_json = msgspec.json.Encoder().encode


class AcceptedRun(NamedTuple):
    """The `accepted` receipts of one batch; single receipts are made only where they are needed."""

    vins: Sequence[str]
    positions: Sequence[int]
    request_id: str
    time: float

    def receipts(self, node: str) -> list[Receipt]:
        """Return them one by one."""
        return [
            Receipt(
                state=State.ACCEPTED,
                vin=vin,
                request_id=self.request_id,
                delivery_id=delivery_id(vin, position),
                time=self.time,
                node=node,
            )
            for vin, position in zip(self.vins, self.positions, strict=True)
        ]


class ReceiptFormat:
    """Makes the values of one process."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._origin = int.from_bytes(os.urandom(6), "big") << 16
        self._stamp = 0  # given last

    def values(self, receipts: Sequence[Receipt], now: float) -> list[bytes]:
        """Return the values of receipts."""
        values = []
        for number, receipt in enumerate(receipts, self._guid(now)):
            topic, payload = f"{TOPIC}/{receipt.request_id}/{receipt.vin}".encode(), encode(receipt)
            values.append(
                b"".join(
                    (
                        _HEAD,
                        _TEXT_HEADS[len(topic)],
                        topic,
                        _BYTES_HEADS[len(payload)] if len(payload) < 1024 else _bytes_head(len(payload)),
                        payload,
                        _TIME(_BEFORE_TIME, receipt.time, _BEFORE_GUID),
                        number.to_bytes(16, "big"),
                        _TAIL,
                    )
                )
            )
        return values

    def accepted(self, run: AcceptedRun, now: float) -> Formed:
        """Return the values of the `accepted` receipts of a batch, quickly."""
        vins, positions, request_id, time = run
        names = list(map(str.encode, vins))
        places = list(map(b"%d".__mod__, positions))
        # VIN, then its delivery id; only the digits of a position change the payload's length.
        before = b'{"v":1,"state":"accepted","vin":"'
        between = b'","request_id":%b,"delivery_id":"' % _json(request_id)
        after = b'","time":%b,"node":%b,"attempt":0,"reason":""}' % (_json(time), _json(self._node))
        length = len(before) + len(between) + len(after) + 2 * VIN_LENGTH + 1
        heads = {digits: _bytes_head(length + digits) for digits in set(map(len, places))}
        parts = (
            prefix_of(request_id),
            *(0, 1, before, 0, between, 0, b".", 2),
            after + _TIME(_BEFORE_TIME, time, _BEFORE_GUID),
            *(3, _TAIL),
        )
        guid = self._guid(now)
        guids = [number.to_bytes(16, "big") for number in range(guid, guid + len(names))]
        return Formed(parts, (names, list(map(heads.__getitem__, map(len, places))), places, guids))

    def _guid(self, now: float) -> int:
        """Return the guid of the first of some receipts, as a number; the others follow."""
        self._stamp = max(self._stamp + 1, int(now * 1_000_000))
        return self._stamp << 64 | self._origin


def history_draft(receipt: Receipt, config: FanoutConfig) -> Draft:
    """Return the entry of a final receipt in the history of its vehicle; it is kept as long as the receipts are."""
    return Draft(encode(receipt), expires_at=receipt.time + config.receipts_retention)


def prefix_of(request_id: str) -> bytes:
    """Return how every value of a request's receipts begins, and no other."""
    topic = f"{TOPIC}/{request_id}/".encode()
    return _HEAD + _TEXT_HEADS[len(topic) + VIN_LENGTH] + topic
