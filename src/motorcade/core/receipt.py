"""Receipts: what became of one message for one vehicle. One for every change of state.

                       ┌─▶ replaced   the same request was issued again for this vehicle before it got this one
    accepted ─▶ sent ──┼─▶ acked      the vehicle has acknowledged it
                 ▲ │   ├─▶ failed     sent as often as is allowed, or refused for good
                 │ ▼   ├─▶ expired    its time, or the time that messages are kept, is over
               retried └─▶ cancelled  called off by an operator

The five on the right are final, and can follow any of the others: a vehicle that is away gets its message replaced,
expired or cancelled without ever being sent it. Each delivery ends in exactly one of them.

A receipt is a JSON object, on its topic and in the payload of a record of the stream `receipts` (`core.record`):

    {"v": 1, "state": "acked", "vin": "LMCAAAAA9RA000001", "request_id": "task_ota_1",
     "delivery_id": "LMCAAAAA9RA000001.7", "time": 1760000000.25, "node": "n1", "attempt": 2, "reason": ""}

    v            version of this schema
    delivery_id  the vehicle and the position of the message in its mailbox, which is never used again: a request that
                 is issued twice for a vehicle has two deliveries, each with a history of its own
    time         seconds since the epoch
    node         the node that saw it happen
    attempt      how often the message had been sent then
    reason       why, where the state does not say it all; short names, listed in docs/receipts.md

Rule 1: fields are added, with a default; readers ignore what they do not know. A change that an old reader would
        misunderstand is a new version.
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import Final

import msgspec

from motorcade.core.errors import MotorcadeError

VERSION: Final = 1
TOPIC: Final = "$SDV-FANOUT/receipt"  #: followed by the request id and the VIN


class ReceiptError(MotorcadeError):
    """A receipt cannot be read."""


class State(StrEnum):
    """The state of a delivery; in the order in which a report shows them."""

    ACCEPTED = auto()
    SENT = auto()
    RETRIED = auto()
    ACKED = auto()
    REPLACED = auto()
    FAILED = auto()
    EXPIRED = auto()
    CANCELLED = auto()


#: Reason of a receipt that changes nothing: the vehicle has acknowledged a delivery that was over. Its state is `sent`,
#: and it stands behind the final receipt.
LATE_ACK: Final = "late_ack"

#: Nothing follows these.
FINAL: Final = frozenset({State.REPLACED, State.ACKED, State.FAILED, State.EXPIRED, State.CANCELLED})


class Receipt(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="v", tag=VERSION):
    """One change of state; the fields stand in the order of the schema."""

    state: State
    vin: str
    request_id: str
    delivery_id: str
    time: float
    node: str = ""
    attempt: int = 0
    reason: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Receipt).decode


def delivery_id(vin: str, position: int) -> str:
    """Return the name of a delivery: the entry at a position of a vehicle's mailbox."""
    return f"{vin}.{position}"


def topic_of(receipt: Receipt) -> str:
    """Return the topic on which a receipt is published."""
    return f"{TOPIC}/{receipt.request_id}/{receipt.vin}"


def encode(receipt: Receipt) -> bytes:
    """Return the JSON of a receipt."""
    return _encode(receipt)


def decode(value: bytes) -> Receipt:
    """Return the receipt of a JSON text; `ReceiptError` says why it is none."""
    try:
        return _decode(value)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ReceiptError(f"{error}{_other_version(value)}") from error


def _other_version(value: bytes) -> str:
    """Return advice about a receipt of another version; an empty text if that is not what is wrong."""
    try:
        stored = msgspec.json.decode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    version = stored.get("v") if isinstance(stored, dict) else None
    if type(version) is not int or version == VERSION:
        return ""
    return f" (its version is {version}, this program knows {VERSION}: read it with the program that wrote it)"
