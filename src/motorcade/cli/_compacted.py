"""Compacted queues on the command line: `motorcade queue` serves them beside those that are declared.

A name may mean three queues. Without a flag it means the declared one, then the compacted one of the
client of that id, then the shared one. What cannot be undone is done to what was named only.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from motorcade.cli import _control, _declared, _options, _output

DECLARED, EXCLUSIVE, SHARED = "declared", "exclusive", "shared"
KINDS = (DECLARED, EXCLUSIVE, SHARED)

Exclusive = Annotated[bool, typer.Option("--exclusive", help="The compacted queue of the client of that id.")]
Shared = Annotated[bool, typer.Option("--shared", help="The shared compacted queue of that name.")]

_CONSUMERS = ("client", "connected", "progress", "waiting", "in_flight", "acked_at")
_LONGEST = 20  # characters of a number of seconds
_BACK = 4  # times as far back for the last messages, where too few of the numbers looked at are still there


@dataclass(frozen=True)
class FoundQueue:
    """One of the three kinds, as it was found."""

    kind: str
    path: str
    view: dict[str, Any]


def kind(exclusive: bool, shared: bool) -> str:
    """Return the kind that the flags choose; empty: none."""
    if exclusive and shared:
        raise typer.BadParameter("a queue is one or the other", param_hint="--exclusive, --shared")
    return EXCLUSIVE if exclusive else SHARED if shared else ""


def path(kind: str, name: str) -> str:
    """Return the path of one of them."""
    if not name:
        raise typer.BadParameter("a queue has a name, or the client id of its owner", param_hint="NAME")
    return f"{_place(kind)}/{_control.name(name)}"


def _place(kind: str) -> str:
    return "queues" if kind == DECLARED else f"compacted/{kind}"


def find(control: _control.ControlClient, name: str, wanted: str = "") -> FoundQueue:
    """Find the queue of a name. If there is none, raise what the node says about each kind."""
    missed: list[str] = []
    for kind in (wanted,) if wanted else KINDS:
        place = path(kind, name)
        try:
            return FoundQueue(kind, place, control.call("GET", place))
        except _control.ControlError as error:
            if error.code != "NOT_FOUND":
                raise
            missed.append(error.message)
    raise _control.ControlError("; ".join(dict.fromkeys(missed)), "NOT_FOUND")


def title(kind: str, name: str) -> str:
    """Return its name for a sentence."""
    titles = {DECLARED: "queue {!r}", EXCLUSIVE: "the compacted queue of client {!r}", SHARED: "shared queue {!r}"}
    return titles[kind].format(name)


def with_hint(
    control: _control.ControlClient, error: _control.ControlError, kind: str, name: str
) -> _control.ControlError:
    """Return the error; if a queue of another kind has that name, with the flag for it."""
    if error.code != "NOT_FOUND" or kind != DECLARED:
        return error
    for other in (EXCLUSIVE, SHARED):
        try:
            find(control, name, other)
        except _control.ControlError:
            continue
        return _control.ControlError(f"{error.message}; {title(other, name)} is meant with --{other}", error.code)
    return error


def every(control: _control.ControlClient, kinds: Iterable[str], limit: int | None) -> list[dict[str, Any]]:
    """List queues of these kinds, at most `limit`; if no kind is chosen, of all kinds that the node has."""
    chosen = tuple(kinds)
    found: list[dict[str, Any]] = []
    missed: list[_control.ControlError] = []
    for kind in chosen or KINDS:
        try:
            found += _list(control, kind, None if limit is None else limit - len(found))
        except _control.ControlError as error:
            if chosen or error.code != "NOT_FOUND":
                raise
            missed.append(error)
    if len(missed) == len(KINDS):
        raise missed[0]
    for text in dict.fromkeys(error.message for error in missed):
        print(f"note: {text}", file=sys.stderr)
    return found


def _list(control: _control.ControlClient, kind: str, limit: int | None) -> list[dict[str, Any]]:
    if kind == DECLARED:
        declared: list[dict[str, Any]] = control.call("GET", _place(kind))["data"]
        return declared[:limit]
    return list(control.pages(_place(kind), limit))


# -- looking


def print_queue(view: dict[str, Any]) -> None:
    """Print a compacted queue and the progress of its consumers."""
    consuming = view["consuming"]
    short = {key: value for key, value in view.items() if key != "consuming"}
    if view["kind"] == EXCLUSIVE:
        del short["consumers"]  # there is one, and it has the name of the queue
        short |= {"connected": False, "progress": 0, "waiting": view["messages"], "in_flight": 0, "acked_at": None}
        for consumer in consuming:
            short |= {key: consumer[key] for key in short if key in consumer}
    _output.print_fields((key, _cell(key, value)) for key, value in short.items())
    if view["kind"] == SHARED and consuming:
        print()
        _output.print_table(_CONSUMERS, ([_cell(key, row[key]) for key in _CONSUMERS] for row in consuming))
        if view["consumers"] > len(consuming):
            print(f"… and {view['consumers'] - len(consuming)} more")


def _cell(name: str, value: Any) -> object:
    return _output.when(value) if name in ("oldest", "acked_at") else value


def last(control: _control.ControlClient, queue: FoundQueue, count: int) -> list[dict[str, Any]]:
    """Return the last messages, at least one, oldest first."""
    if queue.kind == DECLARED:  # nothing tells where its end is
        return list(deque(_declared.messages(control, queue.path, 0), count))
    found: list[dict[str, Any]] = []
    first, span = queue.view["first"], count
    # Numbers of superseded messages are not there any more, so that some of the last `count` may be missing.
    while first and len(found) < count:
        start = max(queue.view["last"] - span, first - 1)
        found = list(_declared.messages(control, queue.path, start))
        if start < first:
            break
        span *= _BACK
    return found[-count:]


def follow(
    control: _control.ControlClient, queue: FoundQueue, after: int, interval: float
) -> Iterator[list[dict[str, Any]]]:
    """Poll for messages after a position, without end."""
    while True:
        time.sleep(interval)
        found = list(_declared.messages(control, queue.path, after))
        if found:
            after = found[-1]["position"]
        yield found


# -- rewinding


def moment(text: str) -> dict[str, float]:
    """Parse `2h` (so long ago), an ISO 8601 time (that of this machine unless it has a zone), or `@` and seconds."""
    from motorcade.core.moment import seconds_of

    if text.startswith("@") and len(text) <= _LONGEST and text[1:].isascii() and text[1:].isdigit():
        return {"since": float(text[1:])}
    seconds = seconds_of(text, None)
    if seconds is not None:
        return {"since": seconds}
    try:
        return {"ago": _options.duration(text)}
    except typer.BadParameter:
        raise typer.BadParameter(
            f"{text[:40]!r} is no time; write 7d, 12h, 30m, 45s (so long ago), 2026-11-15T08:30:00 (local time, or with"
            " a zone: …Z, …+01:00), or @ and seconds since the epoch",
            param_hint="--since",
        ) from None


def rewind_body(kind: str, to: int | None, since: str | None, consumer: str | None) -> dict[str, Any]:
    """Make the body of a rewind request; `typer.BadParameter` if options contradict each other."""
    if (to is None) == (since is None):
        raise typer.BadParameter("give one of them: a sequence number, or a time", param_hint="--to, --since")
    if kind == SHARED and not consumer:
        raise typer.BadParameter(
            "a shared queue has several consumers; name the one to rewind", param_hint="--consumer"
        )
    if kind != SHARED and consumer is not None:
        raise typer.BadParameter(
            "the queue of a client has no other consumer; with --shared CLIENT is the name of a queue",
            param_hint="--consumer",
        )
    place: dict[str, Any] = {"to": to} if since is None else dict(moment(since))
    return place | ({"consumer": consumer} if consumer else {})


def print_rewind(view: dict[str, Any]) -> None:
    """Print what a rewind has done, or would do."""
    client, preview = view["consumer"], view["preview"]
    whose = "" if view["kind"] == EXCLUSIVE else f" of shared queue {view['name']!r}"
    count, before, progress = view["messages"], view["before"], view["progress"]
    if count:
        numbers = f"number {view['first']}" if count == 1 else f"numbers {view['first']} to {view['last']}"
        what = f"{count} {'message' if count == 1 else 'messages'} ({numbers}, {view['bytes']} bytes)"
    else:
        what = "nothing until something is appended"
    print(f"client {client!r}{whose} {'would get' if preview else 'gets'} {what}")
    if before == progress:
        print(f"its progress stays at {progress}")
    else:
        print(f"its progress {'would go' if preview else 'went'} from {before} to {progress}")
    if view["skipped"]:
        print(f"{view['skipped']} that it has not acknowledged {'would be' if preview else 'are'} skipped")
    if preview:
        print("nothing was changed (--preview)")
