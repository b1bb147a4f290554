"""Receipts on their way: into the stream with what they tell of, then to the ledger and to those who listen.

    store: values, accepted ─▶ stage ─▶ batch ─commit─▶ written ─┬─▶ ledger, counters
                                 ▲                │              ├─▶ readers of `$stream/receipts` (the store tells)
                                 └── what is not ─┘ error        └─▶ topic of the receipt, if somebody listens
                                     there yet

Rule 1: nobody hears of a receipt that is not stored.
Rule 2: a value is a record of a stream (`core.record`). Its guid has the stamp of the block, the origin of this process
        and a number, so that a reader can tell receipts apart and the ledger knows which ones it has counted.
Rule 3: what cannot be written is tried again, for ever, and each receipt gets into the stream once: if the store does
        not say whether it has written something, that is looked for first (`doubt`).
Rule 4: the bytes are put together by hand, since there are hundreds of thousands of them in a second. A test holds them
        to what `core.record.encode` makes of the same message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Final, NamedTuple, cast

import msgspec

from motorcade.core.message import Message
from motorcade.core.receipt import LATE_ACK, TOPIC, Receipt, State, delivery_id, encode, topic_of
from motorcade.core.vin import LENGTH as VIN_LENGTH
from motorcade.extension.plugin import Context
from motorcade.plugins.fanout.doubt import Doubt
from motorcade.plugins.fanout.ledger import Ledger
from motorcade.plugins.fanout.options import FanoutConfig
from motorcade.plugins.fanout.tables import DONE, INGRESS, RECEIPTS
from motorcade.storage.ports import Batch, Draft, Formed, Store, StoreError

MOST_UNPUBLISHED: Final = 10_000  #: receipts that wait to be published to live subscribers; more are left out, counted
QOS: Final = 1  #: of receipts on their topics
RETRY: Final = 1.0  #: seconds until what could not be stored is tried again

# A record of 15 fields: version 1, topic, payload | client "", no user name, time | guid | QoS 1, not retained, and
# nothing else of MQTT 5.
_HEAD: Final = b"\x9f\x01"
_TIME: Final = Struct(">3sd").pack
_BEFORE_TIME: Final = b"\xa0\xc0\xcb"
_BEFORE_GUID: Final = b"\xc4\x10"
_TAIL: Final = bytes((QOS,)) + b"\xc2\xc0\xc0\xc0\xc0\xc0\x90"
_GUID: Final = slice(-16 - len(_TAIL), -len(_TAIL))  # in a value
_STAMP: Final = slice(-16 - len(_TAIL), -8 - len(_TAIL))

_json = msgspec.json.Encoder().encode


def history_draft(receipt: Receipt, config: FanoutConfig) -> Draft:
    """Make the entry of a final receipt in the history of its vehicle; it is kept as long as the receipts are."""
    return Draft(encode(receipt), expires_at=receipt.time + config.receipts_retention)


class Run(NamedTuple):
    """`accepted` receipts of one batch: of these no objects are made unless somebody needs them."""

    vins: Sequence[str]
    positions: Sequence[int]
    request_id: str
    now: float

    def receipts(self, node: str) -> list[Receipt]:
        return [
            Receipt(
                state=State.ACCEPTED,
                vin=vin,
                request_id=self.request_id,
                delivery_id=delivery_id(vin, position),
                time=self.now,
                node=node,
            )
            for vin, position in zip(self.vins, self.positions, strict=True)
        ]


class Block(NamedTuple):
    """Receipts that are counted together, and what the stream gets for them."""

    receipts: Sequence[Receipt] | Run
    values: Sequence[bytes]


class Receipts:
    """Writes and publishes the receipts of one node."""

    def __init__(self, context: Context, node: str, ledger: Ledger) -> None:
        self._context = context
        self._store = cast("Store", context.store)
        self._hub = context.hub
        self._counters = context.counters
        self._node = node
        self._ledger = ledger
        self._doubt = Doubt(self._store.streams, _GUID)
        self._failing = False
        self.finished = 0  #: final receipts in the histories of vehicles, about; the sweeper counts them
        self._unpublished: deque[Message] = deque()
        self._publishing = False

    # -- until it is stored

    async def store(
        self, fill: Callable[[Batch], None], receipts: Sequence[Receipt] = (), accepted: Run | None = None
    ) -> None:
        """Write receipts, and with them what `fill` puts into a batch, which may be done twice (rule 3)."""
        after = self._ledger.floor  # they will lie behind it
        blocks = []
        if accepted is not None and accepted.vins:
            blocks.append(Block(accepted, self.accepted(*accepted)))
        if receipts:
            blocks.append(Block(receipts, self.values(receipts)))
        error = await self._commit(fill, blocks)
        if error is not None:
            with self._doubt.held():
                while error is not None:
                    await asyncio.sleep(RETRY)
                    if not error.certain:
                        blocks, done = await self._left(blocks, after)
                        if done:
                            break
                    error = await self._commit(fill, blocks)
            self._failing = False
        for block in blocks:
            self._written(block)

    async def _commit(self, fill: Callable[[Batch], None], blocks: Sequence[Block]) -> StoreError | None:
        """One attempt; what went wrong."""
        now = self._hub.now()
        batch = Batch()
        for block in blocks:
            self.stage(batch, block.values, now)
        fill(batch)
        try:
            appended = (await self._store.write(batch)).appended
        except StoreError as error:
            self._counters["receipts_not_stored"] += 1
            if not self._failing:  # once until it goes well again
                self._failing = True
                self._context.log.error("receipts_not_stored", error=str(error))  # noqa: TRY400 - it tells all
            return error
        self.finished += sum(1 - len(answer.dropped) for answer in appended if answer.owner.startswith(DONE))
        return None

    async def _left(self, blocks: Sequence[Block], after: int) -> tuple[list[Block], bool]:
        """What of a write of unknown outcome is still to be written; True: nothing of it, nor of what was with it."""
        values = [value for block in blocks for value in block.values]
        while True:
            try:
                found = await self._doubt.find(values, after)
                break
            except StoreError:
                await asyncio.sleep(RETRY)
        if found and self._store.atomic:
            return list(blocks), True
        left: list[Block] = []
        for block in blocks:
            if found.isdisjoint(block.values):
                left.append(block)
                continue
            # Where batches are not atomic a part of it may be there: the rest is counted by itself.
            receipts = self._receipts_of(block)
            there = [value in found for value in block.values]
            self.written(
                [receipt for receipt, is_there in zip(receipts, there, strict=True) if is_there],
                [value for value, is_there in zip(block.values, there, strict=True) if is_there],
            )
            rest = [receipt for receipt, is_there in zip(receipts, there, strict=True) if not is_there]
            left += [Block(rest, self.values(rest))] if rest else []
        return left, False

    def _receipts_of(self, block: Block) -> Sequence[Receipt]:
        return block.receipts.receipts(self._node) if isinstance(block.receipts, Run) else block.receipts

    def _written(self, block: Block) -> None:
        if isinstance(block.receipts, Run):
            self.written_accepted(*block.receipts, block.values)
        else:
            self.written(block.receipts, block.values)

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

    def accepted(self, vins: Sequence[str], positions: Sequence[int], request_id: str, now: float) -> Sequence[bytes]:
        """The same for `accepted` receipts of one request, quickly; `written_accepted` or `failed` follows."""
        if not vins:
            return []
        guid = self._block()
        names = [vin.encode() for vin in vins]
        places = [b"%d" % position for position in positions]
        # Only the digits of a position change the payload's length.
        before, between, after = self._pieces(request_id, now)
        length = len(before) + len(between) + len(after) + 2 * VIN_LENGTH + 1
        heads = {digits: _bytes_head(length + digits) for digits in set(map(len, places))}
        topic = f"{TOPIC}/{request_id}/".encode()
        parts = (
            _HEAD + _text_head(len(topic) + VIN_LENGTH) + topic,
            *(0, 1, before, 0, between, 0, b".", 2),
            after + _TIME(_BEFORE_TIME, now) + _BEFORE_GUID,
            *(3, _TAIL),
        )
        guids = [number.to_bytes(16, "big") for number in range(guid, guid + len(vins))]
        return Formed(parts, (names, [heads[len(place)] for place in places], places, guids))

    def _block(self) -> int:
        """The guid of the first receipt of a new block, as a number; the others follow."""
        stamp = self._ledger.begin()
        return stamp << 64 | int.from_bytes(self._ledger.origin, "big") << 16

    def _pieces(self, request_id: str, now: float) -> tuple[bytes, bytes, bytes]:
        """What stands before, between and after VIN and delivery id in the payload of an `accepted` receipt."""
        before = b'{"v":1,"state":"accepted","vin":"'
        between = b'","request_id":%b,"delivery_id":"' % _json(request_id)
        after = b'","time":%b,"node":%b,"attempt":0,"reason":""}' % (_json(now), _json(self._node))
        return before, between, after

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
            self._counters[f"receipts_{receipt.state if receipt.reason != LATE_ACK else LATE_ACK}"] += 1
        self._tell(lambda: receipts)

    def written_accepted(
        self, vins: Sequence[str], positions: Sequence[int], request_id: str, now: float, values: Sequence[bytes]
    ) -> None:
        """What `accepted` made is stored."""
        if not vins:
            return
        self._ledger.count_accepted(_stamp_of(values), request_id, len(vins), now)
        self._counters["receipts_accepted"] += len(vins)
        self._tell(lambda: Run(vins, positions, request_id, now).receipts(self._node))

    def failed(self, values: Sequence[bytes], error: BaseException) -> None:
        """The batch with these could not be committed."""
        if values:
            self._ledger.failed(_stamp_of(values), certain=isinstance(error, StoreError) and error.certain)

    # -- those who listen

    def _tell(self, receipts: Callable[[], Iterable[Receipt]]) -> None:
        if not self._hub.heard_below(INGRESS, self._context.name):
            return
        for receipt in receipts():
            topic = topic_of(receipt)
            if not self._hub.heard(topic, self._context.name):
                continue
            if len(self._unpublished) >= MOST_UNPUBLISHED:
                self._counters["receipts_not_published"] += 1
                continue
            self._unpublished.append(Message(topic, encode(receipt), QOS, timestamp=receipt.time))
        if self._unpublished and not self._publishing:
            self._publishing = True
            self._context.spawn(self._publish, "publish")

    async def _publish(self) -> None:
        """One after the other, in the order in which they were stored."""
        self._publishing = True
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
