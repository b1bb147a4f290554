"""What can be said about a queue, and what cannot.

`QueueOptions` has the shape and the limits of single values; `check` knows what does not go together, and `check_chain`
what does not fit between queues. Both raise `BadOptionsError`, whose text names the queue, the option and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

from motorcade.core.errors import MotorcadeError, TopicError
from motorcade.core.topic import check_filter
from motorcade.extension.declared import BadOptionsError, Name, check_name
from motorcade.plugins.queues.tables import MOST_LEVELS, MOST_MARK

NOUN: Final = "queue"
MOST_TOPICS: Final = 100  #: filters of one queue
PROPERTY: Final = "property:"

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=10**10)]
Strategy = Literal["round_robin", "random", "least_inflight"]


class QueueOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One queue: what it takes, who gets it, and what becomes of messages that nobody takes. 0 lifts a bound."""

    topics: tuple[str, ...] = ()  #: filters; what is published to a topic that one of them matches is appended
    kind: Literal["regular", "last_value"] = "regular"  #: last_value: of the messages with one `key` the newest is kept
    key: str = "topic"  #: of last_value: `topic`, `publisher` or `property:NAME`, a user property
    strategy: Strategy = "round_robin"  #: which consumer with room gets the next message
    max_messages: Count = 100_000  #: messages in it; 0: any number
    max_bytes: Count = 1024**3  #: bytes of them, payloads and all; 0: any number
    overflow: Literal["refuse", "drop_oldest"] = "refuse"  #: what is done with a message that finds it full
    retention: Seconds = 604_800.0  #: seconds until a message is too old; 0: never
    ack_timeout: Seconds = 30.0  #: seconds until a message that was not acknowledged goes to another consumer; 0: never
    redispatch_delay: Seconds = 0.1  #: seconds until a consumer gets again what it has refused, if there is nobody else
    max_attempts: Annotated[int, msgspec.Meta(ge=0, le=MOST_MARK)] = 10  #: times a message is sent; 0: any number
    dead_letter: str = ""  #: queue that gets what was sent so often in vain; none: it is dropped
    #: levels; that of a message is its user property `priority`, else 0; the highest first
    priorities: Annotated[int, msgspec.Meta(ge=1, le=MOST_LEVELS)] = 1


class QueuesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Queues by name, and the bounds of the plugin."""

    queue: dict[Name, QueueOptions] = {}  #: `[plugins.queues.queue.NAME]`: one queue each
    max_queues: Annotated[int, msgspec.Meta(ge=1)] = 1000  #: of the configuration and of commands together
    max_pending: Annotated[int, msgspec.Meta(ge=1)] = 10_000  #: messages that wait for the store; more are not taken
    sweep_interval: Annotated[float, msgspec.Meta(gt=0)] = 60.0  #: seconds between two looks for messages too old
    sweep_budget: Annotated[int, msgspec.Meta(ge=1)] = 1000  #: messages looked at each time

    def __post_init__(self) -> None:
        for name, options in self.queue.items():
            check(name, options)


class _Version1(msgspec.Struct, array_like=True, tag=1):
    options: QueueOptions


class RecordError(MotorcadeError):
    """The options of a queue in the store cannot be read."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Version1)


def encode(options: QueueOptions) -> bytes:
    """The record of a queue."""
    return _encoder.encode(_Version1(options))


def decode(value: bytes) -> QueueOptions:
    """Options of a record."""
    try:
        return _decoder.decode(value).options
    except msgspec.MsgspecError as error:
        raise RecordError(str(error)) from error


def check(name: str, options: QueueOptions) -> None:
    """`MotorcadeError` unless a queue can be like that, whatever others there are."""
    check_name(NOUN, name)
    if len(options.topics) > MOST_TOPICS:
        raise _wrong(name, f"topics: {len(options.topics)} filters are more than {MOST_TOPICS}; use wildcards")
    for filter_ in options.topics:
        _check_topic(name, filter_)
    if options.kind == "last_value":
        _check_last_value(name, options)
    if options.dead_letter == name:
        raise _wrong(name, "dead_letter: a queue cannot be its own dead-letter queue; name another one")
    if options.dead_letter:
        check_name(NOUN, options.dead_letter)


def _check_topic(name: str, filter_: str) -> None:
    try:
        check_filter(filter_)
    except TopicError as error:
        raise _wrong(name, f"topics: {filter_!r}: {error}") from error
    for prefix in ("$share", "$queue", "$stream"):
        if filter_ == prefix or filter_.startswith(f"{prefix}/"):
            raise _wrong(name, f"topics: nothing is published to {prefix}/…, so {filter_!r} would stay empty")


def _check_last_value(name: str, options: QueueOptions) -> None:
    if options.key not in {"topic", "publisher"} and not options.key.removeprefix(PROPERTY).strip():
        raise _wrong(name, "key: write property:NAME with the name of a user property")
    if options.key not in {"topic", "publisher"} and not options.key.startswith(PROPERTY):
        raise _wrong(name, f"key: {options.key!r} is none of topic, publisher and property:NAME")
    if options.priorities > 1:
        raise _wrong(name, "priorities: a last_value queue has none; leave priorities out, or make it regular")


def check_chain(name: str, queues: Mapping[str, QueueOptions]) -> None:
    """`BadOptionsError` unless the dead letters of a queue go somewhere, and not round."""
    seen = [name]
    while after := queues[seen[-1]].dead_letter:
        if after not in queues:
            raise _wrong(seen[-1], f"dead_letter: there is no queue {after!r}; declare it first")
        if after in seen:
            raise _wrong(name, f"dead_letter: {' -> '.join([*seen, after])} goes round; let one of them have none")
        seen.append(after)


def _wrong(name: str, problem: str) -> BadOptionsError:
    return BadOptionsError(f"{NOUN} {name!r}: {problem}")
