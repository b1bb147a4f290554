"""The options: `[plugins.ecq]`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=10**10)]
Interval = Annotated[float, msgspec.Meta(gt=0, le=10**10)]


class EcqConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of compacted queues; they hold for each queue unless they say otherwise."""

    max_messages: Count = 100_000  #: keys in one queue; 0: any number
    max_bytes: Count = 1024**3  #: of the messages in one queue; 0: any number
    overflow: Literal["refuse", "drop_oldest"] = "refuse"  #: what happens to a message that does not fit
    retention: Seconds = 604_800.0  #: seconds until a message is too old to be delivered, and is collected; 0: never
    max_key: Annotated[int, msgspec.Meta(ge=1, le=60_000)] = 1024  #: bytes of a key
    max_name: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 256  #: bytes of the name of a queue, or of its client id
    max_queues: Positive = 1_000_000  #: queues of both forms together; messages for one more are refused
    max_consumers: Positive = 10_000  #: of one shared queue whose progress is kept; others begin again each time
    max_pending: Positive = 20_000  #: messages that wait for the store; more are refused
    max_pending_bytes: Positive = 64 * 1024**2  #: bytes of these; whichever of both bounds is reached first
    max_attempts: Count = 10  #: times a consumer is given what it refuses, before it is passed over; 0: for ever
    retry_delay: Interval = 1.0  #: seconds until a consumer is given again what it has refused
    progress_interval: Interval = 0.1  #: seconds at most until the progress of a consumer is stored
    heartbeat: Interval = 60.0  #: seconds between two looks whether consumers have got everything
    gc_interval: Interval = 3600.0  #: seconds between two collections of what is too old
    gc_step: Positive = 1000  #: messages looked at in one step of a collection; others have their turn in between
    #: Seconds after which an empty queue without use is forgotten, and the progress of a consumer that stays away.
    idle: Interval = 2_592_000.0
