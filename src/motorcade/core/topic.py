"""Rules for topic names and topic filters, and matching one against the other.

A level is what stands between two slashes; it may be empty. `+` takes one level, `#` the rest,
including nothing (`a/#` matches `a`). A filter that begins with a wildcard never matches a topic
that begins with `$`.
"""

from __future__ import annotations

from motorcade.core.errors import TopicError

SHARE = "$share"


def check_topic(topic: str, max_levels: int = 0) -> None:
    """Raise `TopicError` unless `topic` may stand in a PUBLISH. `max_levels` 0 is unlimited."""
    if not topic:
        raise TopicError("topic name is empty")  # [MQTT-4.7.3-1]
    if "+" in topic or "#" in topic:
        raise TopicError("topic name contains a wildcard")  # [MQTT-3.3.2-2]
    _check_common(topic, max_levels)


def check_filter(filter_: str, max_levels: int = 0) -> None:
    """Raise `TopicError` unless `filter_` may stand in a SUBSCRIBE (without `$share/…/`)."""
    if not filter_:
        raise TopicError("topic filter is empty")  # [MQTT-4.7.3-1]
    _check_common(filter_, max_levels)
    if "+" not in filter_ and "#" not in filter_:
        return
    levels = filter_.split("/")
    for level in levels:
        if len(level) > 1 and ("+" in level or "#" in level):
            # [MQTT-4.7.1-2], [MQTT-4.7.1-3]
            raise TopicError(f"wildcard must stand alone in its level, not as {level!r}")
    if "#" in levels[:-1]:
        raise TopicError("'#' must be the last level")  # [MQTT-4.7.1-2]


def _check_common(text: str, max_levels: int) -> None:
    if "\0" in text:
        raise TopicError("topic contains U+0000")  # [MQTT-4.7.3-2]
    if len(text) > 65535 or len(text.encode()) > 65535:
        raise TopicError("topic is longer than 65535 bytes")  # [MQTT-4.7.3-3]
    if max_levels and text.count("/") >= max_levels:
        raise TopicError(f"topic has more than {max_levels} levels")


def is_wildcard(filter_: str) -> bool:
    """Return True if a valid filter can match more than one topic."""
    return "+" in filter_ or "#" in filter_


def split_share(filter_: str) -> tuple[str | None, str]:
    """Split `$share/{group}/{filter}` into (`group`, `filter`); group is None for an ordinary filter."""
    if not filter_.startswith("$share/") and filter_ != SHARE:
        return None, filter_
    parts = filter_.split("/", 2)
    if len(parts) < 3 or not parts[2]:
        raise TopicError("a shared subscription is written $share/{group}/{filter}")  # [MQTT-4.8.2-1]
    group = parts[1]
    if not group or "+" in group or "#" in group:
        # [MQTT-4.8.2-2]
        raise TopicError("the group of a shared subscription must be at least one character, no wildcard")
    return group, parts[2]


def matches(filter_: str, topic: str) -> bool:
    """Return True if a valid filter matches a valid topic name."""
    if filter_ == topic:
        return True
    if topic[0] == "$" and filter_[0] in "+#":
        return False  # [MQTT-4.7.2-1]
    if filter_.endswith("/#") and "+" not in filter_:
        return topic.startswith(filter_[:-1]) or topic == filter_[:-2]
    wanted = filter_.split("/")
    given = topic.split("/")
    for i, level in enumerate(wanted):
        if level == "#":
            return True
        if i >= len(given) or level not in ("+", given[i]):
            return False
    return len(wanted) == len(given)
