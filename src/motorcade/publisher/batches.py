"""One message to many vehicles, as the bytes of fan-out batches.

    $SDV-FANOUT/data/sha256:…     the payload, as it is, once
    $SDV-FANOUT/trigger           {"ids":["VIN","VIN",…],"batch_id":"…","request_id":"…","data_id":"sha256:…",…}
                                  ├─head─┤ vins joined ├mid┤   id  ├──────────────── tail ─────────────────┤

All batches of an order differ in their vehicles and ids alone, so the rest of them is encoded once: millions of
vehicles are joined as bytes by the caller.

Rule 1: VINs are checked before they come here. A VIN needs no escape in JSON; another text might.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Final, Self

from motorcade.client import RefusedError
from motorcade.core.errors import MotorcadeError
from motorcade.plugins.fanout.batch import BadBatchError, check_request_id
from motorcade.plugins.fanout.tables import DATA_PREFIX, TRIGGER

#: Default number of VINs in one batch.
BATCH: Final = 200

#: The broker's answer if it has no fan-out plugin.
NO_FANOUT: Final = "the broker took it for an ordinary message; is the plugin 'fanout' loaded there?"

HEAD: Final = b'{"ids":["'
BETWEEN: Final = b'","'  #: two VINs

#: Bytes of a PUBLISH with QoS 1 besides its topic and payload: type, length of the topic, packet id, no properties.
_HEADER: Final = 1 + 2 + 2 + 1


class OrderError(MotorcadeError):
    """An order cannot be sent as it is."""


@dataclass(frozen=True)
class Order:
    """A request for vehicles: id, payload and options; the VINs are not part of it."""

    request_id: str
    data: bytes
    options: Mapping[str, object] = field(default_factory=dict)  #: expires_in, priority, mode; only those given

    def check(self) -> None:
        """Raise `OrderError` if the broker would refuse every batch of it."""
        try:
            check_request_id(self.request_id)
        except BadBatchError as error:
            raise OrderError(str(error)) from error

    @cached_property
    def data_id(self) -> str:
        """Return the id of the data in batches; the broker checks it against the bytes."""
        return f"sha256:{hashlib.sha256(self.data).hexdigest()}"

    @property
    def data_topic(self) -> str:
        return f"{DATA_PREFIX}{self.data_id}"

    @cached_property
    def _rest(self) -> bytes:
        rest = {"request_id": self.request_id, "data_id": self.data_id, **self.options}
        return json.dumps(rest, ensure_ascii=False, separators=(",", ":")).encode().removeprefix(b"{")

    def middle(self, prefix: str) -> bytes:
        """Return the JSON between the vehicles and what follows `prefix` in the id of the batch."""
        return b'"],"batch_id":"' + json.dumps(prefix, ensure_ascii=False)[1:-1].encode()

    @property
    def tail(self) -> bytes:
        """Behind the id of the batch."""
        return b'",' + self._rest

    def trigger(self, vins: Sequence[str], batch_id: str | None = None) -> bytes:
        """Return the message for one batch; without an id the broker cannot dedupe it."""
        named = HEAD + BETWEEN.join(map(str.encode, vins))
        return named + (b'"],' + self._rest if batch_id is None else self.middle(batch_id) + self.tail)

    # -- how much it is

    def size_bytes(self, batches: int, payload: int, copies: int = 1) -> int:
        """Return the size of all packets: `batches` with `payload` bytes in all, and `copies` of the data."""
        if not batches:
            return 0
        triggers = batches * packet_bytes(len(TRIGGER), payload // batches) + payload % batches
        return triggers + copies * packet_bytes(len(self.data_topic), len(self.data))

    def bytes_one_by_one(self, vehicles: int, topic: int) -> int:
        """Return the size of one packet for each vehicle, whose topics have so many bytes."""
        return vehicles * packet_bytes(topic, len(self.data))


def packet_bytes(topic: int, payload: int) -> int:
    """Return the size of a PUBLISH with QoS 1."""
    rest = _HEADER - 1 + topic + payload
    length = 1 + (rest >= 2**7) + (rest >= 2**14) + (rest >= 2**21)
    return 1 + length + rest


@dataclass
class BatchTotals:
    """Totals of the broker's answers."""

    batches: int = 0
    accepted: int = 0  #: vehicles
    duplicates: int = 0  #: vehicles that a batch named a second time
    replaced: int = 0  #: vehicles whose pending message gave way
    rejected: int = 0  #: vehicles that have too many messages waiting
    repeated: int = 0  #: batches that the broker had accepted before

    def add(self, answer: Mapping[str, str]) -> int:
        """Count the acknowledgement of a batch; how many vehicles it speaks of. `OrderError` if it is none."""
        try:
            accepted, duplicates, replaced = (int(answer[key]) for key in ("accepted", "duplicates", "replaced"))
            rejected, repeated = int(answer.get("rejected", "0")), int(answer.get("repeated", "0"))
        except (KeyError, ValueError):
            raise OrderError(NO_FANOUT) from None
        self.batches += 1
        self.accepted += accepted
        self.duplicates += duplicates
        self.replaced += replaced
        self.rejected += rejected
        self.repeated += repeated > 0
        return accepted

    def __add__(self, other: BatchTotals) -> Self:
        return type(self)(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


def broker_words(error: Exception) -> str:
    """Return the broker's reason string, if any, else the name of its reason."""
    if isinstance(error, RefusedError) and error.detail:
        return f"{error.detail} (0x{error.reason:02x})"
    return str(error)
