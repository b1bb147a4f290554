"""Frames as messages over MQTT with QoS 1: to a topic that a stream, a queue or a subscriber is bound to.

    topic  payload  [content_type]  [user_properties]  [retain]

Rule 1: at least once. Every row is acknowledged before its task ends; a task that runs again sends its rows again, and
        MQTT has no word for "this one I have told you before". (A stream of Redis itself is written exactly once:
        `appends.py`.)
Rule 2: a message without subscribers is lost, and the broker says so (0x10): then the task fails, unless the option
        `unrouted` lets it go.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import ArrayType, BinaryType, BooleanType, DataType, MapType, StringType, StructType

from motorcade.core.errors import TopicError
from motorcade.core.reasons import ReasonCode
from motorcade.core.topic import check_topic
from motorcade.mqtt.properties import NONE, Properties
from motorcade.pipelines import PipelineError
from motorcade.pipelines.sources.brokers import CONNECTION, Line, SendCounts, line_of, lowered, rows
from motorcade.pipelines.sources.options import OptionError
from motorcade.publisher.publisher import Post, PublishError, ReliablePublisher

KNOWN: Final = CONNECTION | {"publish", "unrouted"}

COLUMNS: Final = ("topic", "payload", "content_type", "user_properties", "retain")
NEEDED: Final = ("topic", "payload")

#: Default number of messages in flight: they are smaller than batches of a fan-out.
WINDOW: Final = 500


class Unrouted(StrEnum):
    """The reaction to a message without subscribers."""

    FAIL = auto()
    IGNORE = auto()


@dataclass(frozen=True, slots=True)
class Publishes:
    """One frame on its way to topics."""

    line: Line
    unrouted: Unrouted = Unrouted.FAIL

    @classmethod
    def parse(cls, given: Mapping[str, str], schema: StructType) -> Publishes:
        options = lowered(given, KNOWN, "publishing")
        _check_columns(schema)
        try:
            unrouted = Unrouted(options.get("unrouted", Unrouted.FAIL).lower())
        except ValueError:
            raise OptionError(f"option unrouted: {options['unrouted']!r} is none of {', '.join(Unrouted)}") from None
        return cls(line_of(options["publish"], "publish", {"window": str(WINDOW)} | options), unrouted)

    def send(self, batches: Iterator[pa.RecordBatch]) -> SendCounts:
        messages = 0

        def accept(post: Post, reason: ReasonCode, _answers: Mapping[str, str]) -> None:
            nonlocal messages
            if reason == ReasonCode.NO_MATCHING_SUBSCRIBERS and self.unrouted is Unrouted.FAIL:
                raise PublishError(
                    f"messages to {post.topic!r} have no subscriber: bind a stream or a queue to it, or drop them with "
                    "the option unrouted=ignore"
                )
            messages += 1

        publisher = ReliablePublisher(self.line.address, accept, self.line.options, name="motorcade-publish")
        sent = self.line.run(publisher, _posts(batches), SendCounts())
        return replace(sent, messages=messages)


async def _posts(batches: Iterator[pa.RecordBatch]) -> AsyncIterator[Post]:
    known: set[str] = set()
    async for topic, payload, content_type, user, retain in rows(batches, COLUMNS):
        if topic not in known:
            _check_topic(topic)
            if len(known) < WINDOW:
                known.add(topic)
        plain = content_type is None and not user
        yield Post(
            topic,
            b"" if payload is None else payload.encode() if isinstance(payload, str) else payload,
            NONE if plain else Properties(content_type=content_type, user_properties=_pairs(user)),
            bool(retain),
            name=f"the message to {topic!r}",
        )


def _check_topic(topic: str | None) -> None:
    try:
        check_topic(topic or "")
    except TopicError as error:
        raise PipelineError(f"{topic!r} is no topic that can be published to: {error}") from error


def _pairs(user: Any) -> tuple[tuple[str, str], ...]:
    """Return user properties of the source (`name`, `value`), or of a map."""
    pairs = [(one["name"], one["value"]) if isinstance(one, dict) else one for one in user or ()]
    return tuple((str(name), str(value)) for name, value in pairs if value is not None)


def _check_columns(schema: StructType) -> None:
    types = {one.name: one.dataType for one in schema.fields}
    if not set(NEEDED) <= set(types) <= set(COLUMNS):
        raise OptionError(
            f"a frame to publish has the columns {' and '.join(NEEDED)}, and perhaps {', '.join(COLUMNS[2:])}; this "
            f"one has {schema.simpleString()}"
        )
    for name, kind in types.items():
        if not _fits(name, kind):
            raise OptionError(f"the column {name!r} is {kind.simpleString()}, which cannot be published as that")


def _fits(name: str, kind: DataType) -> bool:
    match name:
        case "payload":
            return isinstance(kind, StringType | BinaryType)
        case "retain":
            return isinstance(kind, BooleanType)
        case "user_properties":
            if isinstance(kind, MapType):
                return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
            inside = kind.elementType if isinstance(kind, ArrayType) else None
            return isinstance(inside, StructType) and inside.fieldNames() == ["name", "value"]
        case _:
            return isinstance(kind, StringType)
