"""The options of a rule, and its view.

Options are checked by themselves: a wrong rule is refused when it is read, and the message begins with the option that
is wrong. `rules` finds out whether a stream is declared and a Redis URL can be used.

Rule: the password in a Redis URL is in no view and no message. `shown` is the only way to show a URL.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from motorcade.core.errors import TopicError
from motorcade.core.topic import SHARE, check_filter
from motorcade.extension.declared import BadNameError, Name, check_name
from motorcade.log import HIDDEN

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]

MAX_FILTERS: Final = 1000  #: topic filters of one rule
MAX_KEY: Final = 512  #: characters of a Redis key or channel
SCHEMES: Final = ("redis", "rediss", "redis+cluster", "rediss+cluster")
FORMS: Final = "stream:NAME, redis-stream:KEY or redis-channel:NAME"


class TargetKind(StrEnum):
    """The kinds of targets."""

    STREAM = "stream"
    REDIS_STREAM = "redis-stream"
    REDIS_CHANNEL = "redis-channel"


class CaptureTarget(NamedTuple):
    """The target of a rule, as `to` names it."""

    kind: TargetKind
    name: str


def parse_target(text: str) -> CaptureTarget:
    """Return the target that `to` names; `ValueError` says what is wrong."""
    word, _, name = text.partition(":")
    if word not in list(TargetKind) or not name:
        raise ValueError(f"{text[:MAX_KEY]!r} is no target; write {FORMS}")
    kind = TargetKind(word)
    if kind is TargetKind.STREAM:
        try:
            check_name("stream", name)
        except BadNameError as error:
            raise ValueError(str(error)) from None
    elif len(name) > MAX_KEY or "\0" in name:
        raise ValueError(f"the name of a {kind} has at most {MAX_KEY} characters and no U+0000")
    elif hash_tag(name) is None:
        raise ValueError(f"{name!r}: with '}}' in it, a name must have a part in braces, as in 'fleet:{{eu}}'")
    return CaptureTarget(kind, name)


def hash_tag(key: str) -> str | None:
    """Return the hash tag for another key of the same slot; None: there is none."""
    start = key.find("{")
    end = key.find("}", start + 1)
    if 0 <= start < end - 1:
        return key[start + 1 : end]
    return None if "}" in key else key


class RuleOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rule: which messages, and where to."""

    topics: tuple[str, ...]  #: topic filters; a message that matches several is copied once
    to: str  #: `stream:NAME`, `redis-stream:KEY` or `redis-channel:NAME`
    #: URL of the Redis of `redis-stream` and `redis-channel`; empty: the node's own store, if it is one
    redis: str = ""
    max_length: Count = 0  #: entries that a `redis-stream` keeps, about; 0: all
    form: Literal["envelope", "payload"] = "envelope"  #: of `redis-channel`: with topic, client, … or the payload alone
    max_pending: Positive = 10_000  #: messages that wait for the target; more: QoS 1 and 2 refused, QoS 0 dropped
    max_pending_bytes: Positive = 64 * 1024 * 1024  #: of their topics and payloads together; more: the same

    def __post_init__(self) -> None:
        if not self.topics:
            raise ValueError("topics: at least one topic filter is needed")
        if len(self.topics) > MAX_FILTERS:
            raise ValueError(f"topics: more than {MAX_FILTERS} topic filters; use wildcards, or a second rule")
        for filter_ in self.topics:
            _check_topics(filter_)
        try:
            kind = self.target.kind
        except ValueError as error:
            raise ValueError(f"to: {error}") from None
        if self.redis and kind is TargetKind.STREAM:
            raise ValueError(f"redis: goes with redis-stream and redis-channel, not with {self.to!r}")
        if self.redis and self.redis.partition("://")[0] not in SCHEMES:
            raise ValueError("redis: must be redis://…, rediss://…, redis+cluster://… or rediss+cluster://…")
        if self.max_length and kind is not TargetKind.REDIS_STREAM:
            raise ValueError(f"max_length: goes with redis-stream, not with {self.to!r}")
        if self.form != "envelope" and kind is not TargetKind.REDIS_CHANNEL:
            raise ValueError(f"form: goes with redis-channel, not with {self.to!r}")

    @property
    def target(self) -> CaptureTarget:
        return parse_target(self.to)


def _check_topics(filter_: str) -> None:
    try:
        check_filter(filter_)
    except TopicError as error:
        raise ValueError(f"topics: {filter_!r}: {error}") from None
    if filter_.partition("/")[0] == SHARE:
        raise ValueError(f"topics: {filter_!r}: a rule sees every message; leave {SHARE}/GROUP/ away")


class CaptureConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The rules of the configuration, and their bound."""

    rule: dict[Name, RuleOptions] = {}  #: `[plugins.capture.rule.NAME]`: one rule each
    max_rules: Positive = 1000  #: of the configuration and of commands together; more are refused


class RuleView(msgspec.Struct, frozen=True, kw_only=True):
    """A rule as operators see it: its options, and the outcomes of messages since the node started."""

    name: str
    origin: str
    topics: tuple[str, ...]
    to: str
    redis: str  #: without password; empty: the node's own store, or none is needed
    max_length: int
    form: str
    max_pending: int
    max_pending_bytes: int
    captured: int  #: messages that the target has confirmed
    failed: int  #: messages that the target has refused, or that were given up
    refused: int  #: QoS 1 and 2 messages that found no room; their publishers were told so
    dropped: int  #: QoS 0 messages that found no room
    repeated: int  #: QoS 2 messages that came again and were recognised
    pending: int  #: messages that wait now
    problem: str  #: what keeps messages from the target now; empty: nothing that is known


def shown(url: str) -> str:
    """Return a Redis URL without its password."""
    scheme, _, rest = url.partition("://")
    secret, at, place = rest.rpartition("@")
    if not at:
        return url
    user, colon, _ = secret.partition(":")
    return f"{scheme}://{user}:{HIDDEN}@{place}" if colon else f"{scheme}://{HIDDEN}@{place}"
