"""The tables of the fan-out, and the names of its topics.

    mailbox   fanout:{VIN}                what a vehicle has still to get, oldest first
              body                        `record.EntryRecord`, the same for all vehicles of a batch
              payload                     the data, stored once however many vehicles and requests it is for
              key                         mode `replace`: the request id; mode `append`: none
              mark                        0: never sent; n + 1: sent n times (a marked entry never expires in the store,
                                          so expiry is the fan-out's own business)
    mailbox   fanout-done:{VIN}           final receipts of a vehicle, its history; body: `core.receipt`, JSON;
                                          bounded by the options `history` and `receipts_retention`
    records   fanout-data / {data_id}     `record.DataRecord`; the bytes are a blob
    records   fanout-request / {request}  `record.RequestRecord`; whether a request is paused or cancelled
    records   fanout-intent / {guid}      `record.IntentRecord`; a batch that is stored, its receipts perhaps not yet
    records   fanout-batch / {name}       `record.BatchRecord`; a batch with an id that was stored; {request}/{batch id}
    records   fanout-state / prioritised  there is, or was lately, a pending message with a priority
    records   fanout-state / unswept      a request was cancelled, and a collection has to end what waits of it
    records   fanout-ledger / …           counts per request, see `counters.py`
    records   fanout-untold / {pos}/{VIN} `record.UntoldRecord`; a final receipt that is perhaps not told yet
    records   fanout-claim / {name}       `record.ClaimRecord`; the batch with an id that is under way at some member
    stream    receipts                    one record (`core.record`) per receipt

The position of an entry in `fanout:{VIN}` is never used again, so `{VIN}.{position}` names a delivery for ever. That is
why such a mailbox must not be forgotten (`forget`), only cleared.
"""

from __future__ import annotations

from typing import Final

INGRESS: Final = "$SDV-FANOUT"  #: topic of batches that carry their data
TRIGGER: Final = "$SDV-FANOUT/trigger"  #: topic of batches that name their data
DATA_PREFIX: Final = "$SDV-FANOUT/data/"  #: followed by the id of the data that is published there

ENTRIES: Final = "fanout:"
DONE: Final = "fanout-done:"

DATA: Final = "fanout-data"
REQUESTS: Final = "fanout-request"
LEDGER: Final = "fanout-ledger"
INTENTS: Final = "fanout-intent"
BATCHES: Final = "fanout-batch"
STATE: Final = "fanout-state"
UNTOLD: Final = "fanout-untold"
CLAIMS: Final = "fanout-claim"
PRIORITISED: Final = "prioritised"
UNSWEPT: Final = "unswept"

RECEIPTS: Final = "receipts"

MAX_ATTEMPTS: Final = 254  #: that a mark can tell


def owner_of(vin: str) -> str:
    """Return the mailbox of what a vehicle has still to get."""
    return f"{ENTRIES}{vin}"


def vin_of(owner: str) -> str | None:
    """Return whose mailbox it is; None if it is none of `owner_of`."""
    return owner[len(ENTRIES) :] if owner.startswith(ENTRIES) else None


def done_of(vin: str) -> str:
    """Return the mailbox of a vehicle's history."""
    return f"{DONE}{vin}"


def untold_of(vin: str, position: int) -> str:
    """Return the key of a final receipt in `UNTOLD`; its home is that of the vehicle (`storage.homes`)."""
    return f"{position}/{vin}"


def name_of(request_id: str, batch_id: str) -> str:
    """Return what a batch with an id is remembered by; neither of both has a slash."""
    return f"{request_id}/{batch_id}"


def mark_of(attempts: int) -> int:
    """Return the mark of an entry that was sent so often."""
    return min(attempts, MAX_ATTEMPTS) + 1


def attempts_of(mark: int) -> int:
    """Return how often an entry with this mark was sent."""
    return max(mark - 1, 0)
