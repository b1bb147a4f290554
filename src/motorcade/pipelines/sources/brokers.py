"""Shared parts of both writers to a broker: options of the connection, and a task's report to the driver.

    fanout   `fanouts.py`      vehicles, or batches that are encoded already
    publish  `publishes.py`    messages

Rule 1: everything is acknowledged by the broker before a task ends. A task that runs again sends again; what that means
        is told in the two files.
Rule 2: options are shown in plans and in Spark's interface, so none of them is a password.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa

from motorcade.pipelines.sources.options import SPARKS_OWN, OptionError
from motorcade.publisher.address import AddressError, BrokerAddress
from motorcade.publisher.batches import BatchTotals
from motorcade.publisher.publisher import PATIENCE, WINDOW, Post, PublisherOptions, ReliablePublisher, pulled

#: How to reach a broker.
CONNECTION: Final = frozenset(
    {"username", "password_file", "cafile", "cert", "key", "insecure", "window", "patience", "task_rate", "figures"}
)


@dataclass(frozen=True, slots=True)
class SendCounts:
    """Counts of what a task has sent."""

    messages: int = 0
    figures: BatchTotals = field(default_factory=BatchTotals)  #: of a fan-out
    reconnected: int = 0  #: times that a connection was lost
    sent_again: int = 0  #: messages that were in flight then

    def __add__(self, other: SendCounts) -> SendCounts:
        return SendCounts(
            self.messages + other.messages,
            self.figures + other.figures,
            self.reconnected + other.reconnected,
            self.sent_again + other.sent_again,
        )


class Sender(Protocol):
    """One frame, or one query, on its way to a broker."""

    @property
    def line(self) -> Line: ...

    def send(self, batches: Iterator[pa.RecordBatch]) -> SendCounts:
        """Send rows, in a task, until all are acknowledged."""
        ...


@dataclass(frozen=True, slots=True)
class Line:
    """The way to the broker."""

    address: BrokerAddress
    options: PublisherOptions = field(default_factory=PublisherOptions)
    figures: str = ""  #: a folder on the driver, for what tasks have sent

    def run(self, publisher: ReliablePublisher, posts: AsyncIterator[Post], sent: SendCounts) -> SendCounts:
        asyncio.run(publisher.send(posts))
        return replace(sent, reconnected=publisher.reconnected, sent_again=publisher.sent_again)

    def note(self, sent: Sequence[SendCounts], batch: int) -> None:
        """Note on the driver the result of a batch; the same file if it is done again."""
        if not self.figures:
            return
        total = sum(sent, SendCounts())
        place = Path(self.figures)
        place.mkdir(parents=True, exist_ok=True)
        partial = place / f".batch-{batch:010}"
        with partial.open("w") as out:
            json.dump(asdict(total), out)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(place / f"batch-{batch:010}.json")


def noted(place: str | Path) -> SendCounts:
    """Return the sum of all counts in a directory."""
    total = SendCounts()
    for file in sorted(Path(place).glob("batch-*.json")):
        found = json.loads(file.read_bytes())
        total += SendCounts(**(found | {"figures": BatchTotals(**found["figures"])}))
    return total


# -- options


def lowered(given: Mapping[str, str], known: frozenset[str], what: str) -> dict[str, str]:
    """Return options by their names; `OptionError` for one that is not known."""
    options = {name.lower(): value for name, value in given.items() if name.lower() not in SPARKS_OWN}
    unknown = sorted(set(options) - known)
    if unknown:
        raise OptionError(f"there is no option {unknown[0]!r} for {what}; there are {', '.join(sorted(known))}")
    return options


def line_of(url: str, name: str, options: Mapping[str, str]) -> Line:
    """Return the connection to a broker; `name` is the option of its URL."""
    try:
        address = BrokerAddress.parse(
            url,
            username=options.get("username"),
            password_file=options.get("password_file"),
            cafile=options.get("cafile"),
            cert=options.get("cert"),
            key=options.get("key"),
            insecure=flag("insecure", options.get("insecure", "false")),
        )
    except AddressError as error:
        raise OptionError(f"option {name}: {error}") from error
    rate = number("task_rate", options["task_rate"]) if "task_rate" in options else None
    return Line(
        address,
        PublisherOptions(
            window=whole("window", options.get("window", str(WINDOW)), 1, 65535),
            patience=number("patience", options.get("patience", str(PATIENCE))),
            rate=rate,
        ),
        options.get("figures", ""),
    )


def whole(name: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise OptionError(f"option {name}: a whole number from {least} to {most} is needed, not {text!r}")
    return int(text)


def number(name: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.0 < found < float("inf"):
        raise OptionError(f"option {name}: a number above 0 is needed, not {text!r}")
    return found


def flag(name: str, text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise OptionError(f"option {name}: {text!r} is none of true, false")
    return text.lower() == "true"


# -- rows


async def rows(batches: Iterator[pa.RecordBatch], names: Sequence[str]) -> AsyncIterator[tuple[Any, ...]]:
    """Yield the values of these columns, row by row; None for a column that is not there."""
    async for batch in pulled(batches):
        there = batch.schema.names
        columns = [
            batch.column(there.index(name)).to_pylist() if name in there else [None] * batch.num_rows for name in names
        ]
        for row in zip(*columns, strict=True):
            yield row
