"""The options of a queue, and their checks.

`QueueOptions` checks itself, with `ValueError("KEY: problem")` for what does not go together, so that the check of a
configuration file can name the line. `check` adds what depends on the queue's name, `check_chain` what does not fit
between queues; both raise `BadOptionsError`, whose text names the queue, the option and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

from motorcade.core.errors import TopicError
from motorcade.core.record import RecordError
from motorcade.core.topic import check_filter
from motorcade.extension.declared import BadNameError, BadOptionsError, Name, check_name
from motorcade.plugins.logs.queues.tables import MAX_LEVELS, MAX_MARK

NOUN: Final = "queue"
MAX_TOPICS: Final = 100  #: filters of one queue
PROPERTY: Final = "property:"

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=10**10)]
Strategy = Literal["round_robin", "random", "least_inflight"]


class QueueOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of one queue."""

    topics: tuple[str, ...] = ()  #: filters: what is published to one of them is appended; none: it gets dead letters
    kind: Literal["regular", "last_value"] = "regular"  #: keep all messages, or of each key the newest
    key: str = "topic"  #: last_value: `topic`, `publisher` or `property:NAME` (a user property)
    strategy: Strategy = "round_robin"  #: who gets the next message; least_inflight: who has the fewest unacknowledged
    max_messages: Count = 100_000  #: 0: any number
    max_bytes: Count = 1024**3  #: of messages and payloads; 0: any number
    overflow: Literal["refuse", "drop_oldest"] = "refuse"  #: what happens to a message that does not fit
    retention: Seconds = 604_800.0  #: seconds until a message is too old; 0: never
    ack_timeout: Seconds = 30.0  #: seconds until a message that was not acknowledged goes to another consumer; 0: never
    redispatch_delay: Seconds = 0.1  #: seconds until a consumer gets again what it has refused, if there is no other
    max_attempts: Annotated[int, msgspec.Meta(ge=0, le=MAX_MARK)] = 10  #: times a message is sent; 0: any number
    dead_letter: str = ""  #: queue that gets what was sent so often without success; none: it is dropped
    priorities: Annotated[int, msgspec.Meta(ge=1, le=MAX_LEVELS)] = (
        1  #: levels; user property `priority`, highest first
    )

    def __post_init__(self) -> None:
        if len(self.topics) > MAX_TOPICS:
            raise ValueError(f"topics: {len(self.topics)} filters are more than {MAX_TOPICS}; use wildcards")
        for filter_ in self.topics:
            _check_topic(filter_)
        _check_key(self.key)
        if self.kind == "last_value" and self.priorities > 1:
            raise ValueError("priorities: a last_value queue has none; leave priorities out, or make it regular")
        if self.dead_letter:
            try:
                check_name(NOUN, self.dead_letter)
            except BadNameError as error:
                raise ValueError(f"dead_letter: {error}") from error


class QueuesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Queues by name, and the bounds of the plugin."""

    queue: dict[Name, QueueOptions] = {}  #: `[plugins.queues.queue.NAME]`: one queue each
    max_queues: Annotated[int, msgspec.Meta(ge=1)] = 1000  #: declared at a time, in whatever way
    max_pending: Annotated[int, msgspec.Meta(ge=1)] = 10_000  #: messages that wait for the store; more are not taken
    sweep_interval: Annotated[float, msgspec.Meta(gt=0)] = 60.0  #: seconds between two looks for messages too old
    sweep_budget: Annotated[int, msgspec.Meta(ge=1)] = 1000  #: messages looked at each time

    def __post_init__(self) -> None:
        """Check that dead letters of the configuration stay in it: what is declared elsewhere may be deleted."""
        if len(self.queue) > self.max_queues:
            raise ValueError(f"max_queues: {len(self.queue)} queues are more than {self.max_queues}")
        for name in self.queue:
            try:
                check_chain(name, self.queue)
            except BadOptionsError as error:
                raise ValueError(str(error)) from error


class _Version1(msgspec.Struct, array_like=True, tag=1):
    options: QueueOptions


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Version1)


def encode(options: QueueOptions) -> bytes:
    """Return the record of a queue."""
    return _encoder.encode(_Version1(options))


def decode(value: bytes) -> QueueOptions:
    """Return the options of a record; `RecordError` says why there are none."""
    try:
        return _decoder.decode(value).options
    except msgspec.MsgspecError as error:
        raise RecordError(str(error)) from error


def check(name: str, options: QueueOptions) -> None:
    """Raise `MotorcadeError` unless a queue can have this name and these options."""
    check_name(NOUN, name)
    if options.dead_letter == name:
        raise _wrong(name, "dead_letter: a queue cannot be its own dead-letter queue; name another one")


def _check_topic(filter_: str) -> None:
    try:
        check_filter(filter_)
    except TopicError as error:
        raise ValueError(f"topics: {filter_!r}: {error}") from error
    for prefix in ("$share", "$queue", "$stream"):
        if filter_ == prefix or filter_.startswith(f"{prefix}/"):
            raise ValueError(f"topics: {filter_!r}: no message is published there; name the topics themselves")


def _check_key(key: str) -> None:
    """Check the key of a regular queue too: a wrong one would be found only when the kind changes."""
    if key not in {"topic", "publisher"} and not key.startswith(PROPERTY):
        raise ValueError(f"key: {key!r} is none of topic, publisher and property:NAME")
    if key == PROPERTY:
        raise ValueError("key: write property:NAME with the name of a user property")


def check_chain(name: str, queues: Mapping[str, QueueOptions]) -> None:
    """Raise `BadOptionsError` unless the dead letters of a queue go to a queue, and not round."""
    seen = [name]
    while after := queues[seen[-1]].dead_letter:
        if after not in queues:
            raise _wrong(seen[-1], f"dead_letter: there is no queue {after!r}; declare it first")
        if after in seen:
            raise _wrong(name, f"dead_letter: {' -> '.join([*seen, after])} goes round; let one of them have none")
        seen.append(after)


def _wrong(name: str, problem: str) -> BadOptionsError:
    return BadOptionsError(f"{NOUN} {name!r}: {problem}")
