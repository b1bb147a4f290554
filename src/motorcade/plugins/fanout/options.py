"""Configuration: `[plugins.fanout]`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from motorcade.core.errors import TopicError
from motorcade.core.topic import SHARE, check_topic
from motorcade.plugins.fanout.tables import INGRESS, MAX_ATTEMPTS

VIN: Final = "{VIN}"  #: stands for the vehicle in `topic_prefix`

Mode = Literal["replace", "append"]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=10**10)]
Interval = Annotated[float, msgspec.Meta(gt=0, le=10**10)]

_NOT_FOR_VEHICLES: Final = (SHARE, "$queue", "$stream", "$SYS", INGRESS)


class FanoutConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the fan-out."""

    #: Topic of what a vehicle gets, but for its last level, which is the request id. `{VIN}` is one level of it.
    topic_prefix: str = "agent/{VIN}/proxy/request"
    mode: Mode = "replace"  #: what a batch does to the pending message of the same request, unless it says so itself
    check_digit: bool = False  #: refuse VINs whose ninth character is not their check digit
    max_vins: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 10_000  #: vehicles in one batch
    max_payload: Positive = 1_000_000  #: bytes of data that a vehicle can be sent; with its topic it must fit a packet
    max_pending: Count = 1000  #: messages that wait for one vehicle; one more has failed (pending_limit); 0: any number
    max_data_bytes: Count = 1024**3  #: of all data published under an id; more is refused; 0: any number
    max_queued: Positive = 1000  #: batches that wait for the store; more are refused
    max_requests: Positive = 100_000  #: whose counts are kept; above it those that ended longest ago go
    max_batch_ids: Positive = 1_000_000  #: batches with a batch_id that are remembered; more are refused
    data_retention: Interval = 604_800.0  #: seconds that data and pending messages are kept; what is older has expired
    gc_interval: Interval = 3600.0  #: seconds between two collections of what is no longer needed
    gc_budget: Positive = 1000  #: entries looked at in one step of a collection; others get their turn in between
    dispatchers: Annotated[int, msgspec.Meta(ge=1, le=10_240)] = 16  #: workers; each vehicle has one of them
    #: Seconds until a vehicle that does not acknowledge is disconnected, to get it again; 0: never.
    ack_timeout: Seconds = 30.0
    retry_delay: Interval = 1.0  #: seconds until the second attempt; twice as long before each one that follows
    retry_delay_max: Interval = 300.0  #: but not longer than this
    max_attempts: Annotated[int, msgspec.Meta(ge=1, le=MAX_ATTEMPTS)] = 10  #: times that a message is sent
    history: Positive = 20  #: messages of each vehicle whose end is remembered
    receipts_retention: Interval = 2_592_000.0  #: seconds that receipts are kept

    def __post_init__(self) -> None:
        _check_prefix(self.topic_prefix)
        if self.retry_delay_max < self.retry_delay:
            raise ValueError(
                f"retry_delay_max: {self.retry_delay_max:g} is less than retry_delay, {self.retry_delay:g}"
            )

    def topic_of(self, vin: str, request_id: str) -> str:
        """Return the topic on which a vehicle gets the message of a request."""
        return f"{self.topic_prefix.replace(VIN, vin)}/{request_id}"

    def filter_of(self, vin: str) -> str:
        """Return the filter that a vehicle subscribes to."""
        return f"{self.topic_prefix.replace(VIN, vin)}/+"


def _check_prefix(prefix: str) -> None:
    try:
        check_topic(prefix)
    except TopicError as error:
        raise ValueError(f"topic_prefix: {prefix!r}: {error}") from error
    levels = prefix.split("/")
    if levels.count(VIN) != 1 or prefix.count(VIN) != 1:
        raise ValueError(f"topic_prefix: {prefix!r} must have {VIN} once, as a level of its own")
    if not levels[-1]:
        raise ValueError(f"topic_prefix: {prefix!r} ends with '/'; leave that out, the request id follows after one")
    if levels[0] in _NOT_FOR_VEHICLES:
        raise ValueError(
            f"topic_prefix: {prefix!r}: vehicles cannot subscribe to {levels[0]}/… for that; begin otherwise"
        )
