"""Families of metrics, as plugins declare and `/metrics` shows them.

Rule 1: one family is one quantity with one unit, so that the sum over its series means something.
Rule 2: what clients choose is never a label. Names that operators choose may be one, up to `MAX_LABELS` series.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

Labels = Mapping[str, str]

MAX_LABELS: Final = 100  #: series of a family that are told one by one; the others are told as one sum
OTHERS: Final = "*"  #: label of that sum; no name of a queue or stream looks like this


class Family(NamedTuple):
    """One metric with all its series. The name has no prefix."""

    name: str
    kind: str  #: counter, gauge or histogram
    help: str
    samples: list[tuple[str, Labels, float]]  #: (suffix of the name, labels, value)


class Table(NamedTuple):
    """The memory that a table takes.

    Bytes are entries times what one takes, measured once, plus the texts and payloads that are counted anyway: an
    estimate, right to about a factor of two, and nothing that a message waits for.
    """

    name: str
    entries: int
    size_bytes: int
    bound: int = 0  #: bytes that it takes at its bound; 0: it grows with clients, their messages or what is declared


class Counts(NamedTuple):
    """A counter, made of events that a plugin counts: one series each, or one for all if there is no label."""

    name: str
    help: str
    label: str
    events: Mapping[str, str]  #: event: value of the label


class Measure(NamedTuple):
    """A gauge, made of one of the plugin's figures."""

    name: str
    help: str
    figure: str


def counter(name: str, text: str, samples: Iterable[tuple[Labels, float]]) -> Family:
    """Return a counter: a family that only grows."""
    return Family(name, "counter", text, [("", labels, value) for labels, value in samples])


def gauge(name: str, text: str, samples: Iterable[tuple[Labels, float]]) -> Family:
    """Return a gauge: a family of the moment."""
    return Family(name, "gauge", text, [("", labels, value) for labels, value in samples])


def by_name(name: str, text: str, label: str, values: Mapping[str, float]) -> Family:
    """Return a gauge with a series for each of the first `MAX_LABELS` names, and one for the sum of the others."""
    names = sorted(values)
    samples: list[tuple[Labels, float]] = [({label: each}, values[each]) for each in names[:MAX_LABELS]]
    if rest := names[MAX_LABELS:]:
        samples.append(({label: OTHERS}, sum(values[each] for each in rest)))
    return gauge(name, text, samples)


def same(*events: str, prefix: str = "") -> dict[str, str]:
    """Return the events under the labels that they are, without a common prefix."""
    return {event: event.removeprefix(prefix) for event in events}


def declared(
    plugin: str,
    counts: Iterable[Counts],
    measures: Iterable[Measure],
    counted: Mapping[str, int],
    figures: Mapping[str, float],
) -> list[Family]:
    """Return the families of a plugin. What is not declared gets a family named after plugin and event."""
    found: list[Family] = []
    left, other = dict(counted), dict(figures)
    for each in counts:
        values = [(event, value, left.pop(event, 0)) for event, value in each.events.items()]
        if each.label:
            found.append(counter(each.name, each.help, [({each.label: value}, count) for _, value, count in values]))
        else:
            found.append(counter(each.name, each.help, [({}, sum(count for _, _, count in values))]))
    found += [gauge(m.name, m.help, [({}, other.pop(m.figure))]) for m in measures if m.figure in other]
    prefix = _word(plugin)
    if counts:
        rest = [({"event": event}, count) for event, count in sorted(left.items())]
        found.append(counter(f"{prefix}_events_total", f"What else the plugin {plugin} counts.", rest))
    else:
        for event, count in sorted(left.items()):
            found.append(counter(f"{prefix}_{_word(event)}_total", f"Counted by the plugin {plugin}.", [({}, count)]))
    if not measures:
        for name, value in sorted(other.items()):
            word = _word(name)
            word = word if word.startswith(prefix) else f"{prefix}_{word}"
            found.append(gauge(word, f"Measured by the plugin {plugin}.", [({}, value)]))
    return found


def _word(text: str) -> str:
    """Return a text as part of a name that Prometheus takes."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "other"
