"""`motorcade queue`: messages that several consumers share, and the last value of each key for one of them.

Queues that are declared and compacted queues, which are not declared, are served by the same verbs where these make
sense for both; `_compacted` knows which one a name means.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from motorcade.cli import _compacted, _control, _declared, _options
from motorcade.cli._groups import verb

QUEUE = _declared.Noun(
    name="queue",
    plural="queues",
    columns=("name", "origin", "kind", "topics", "messages", "bytes", "inflight", "consumers", "dead_letter", "last"),
    lost="with all messages in it",
)

app = typer.Typer(no_args_is_help=True, help="Declare, list, read, rewind and delete queues of a running node.")


@dataclass(frozen=True)
class QueueFlags:
    """The options of a queue that is created or changed."""

    topics: _options.Topics = None
    kind: Annotated[
        str | None, typer.Option(metavar="regular|last_value", help="last_value keeps one message per key.")
    ] = None
    strategy: Annotated[
        str | None, typer.Option(metavar="round_robin|random|least_inflight", help="How the next consumer is chosen.")
    ] = None
    retention: _options.Retention = None
    dead_letter: Annotated[
        str | None, typer.Option("--dead-letter", metavar="QUEUE", help="Where messages go after too many attempts.")
    ] = None
    options: _options.Set = None


@verb(app)
def create(name: _declared.Name, *, given: QueueFlags, node: _control.NodeFlags) -> None:
    """Declare a queue; consumers subscribe to `$queue/NAME`. It is there again after a restart."""
    _declared.create(QUEUE, name, _declared.options(**vars(given)), node)


@verb(app)
def change(name: _declared.Name, *, given: QueueFlags, node: _control.NodeFlags) -> None:
    """Give a queue other options while it is in use; those that are not named stay as they are."""
    _declared.change(QUEUE, name, _declared.options(**vars(given)), node)


@verb(app, "list")
def list_(
    declared: Annotated[bool, typer.Option("--declared", help="Declared queues.")] = False,
    exclusive: Annotated[bool, typer.Option("--exclusive", help="The compacted queues of clients.")] = False,
    shared: Annotated[bool, typer.Option("--shared", help="Shared compacted queues.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number. \\[all]")] = None,
    *,
    node: _control.NodeFlags,
) -> None:
    """List queues of the node: declared by configuration or by commands, and compacted. Flags choose kinds."""
    flags = zip(_compacted.KINDS, (declared, exclusive, shared), strict=True)
    found = _compacted.every(node.control, (kind for kind, wanted in flags if wanted), limit)
    _declared.print_list(QUEUE, found, node)


@verb(app)
def show(
    name: _declared.Name,
    exclusive: _compacted.Exclusive = False,
    shared: _compacted.Shared = False,
    *,
    node: _control.NodeFlags,
) -> None:
    """Show one queue in full: its contents and the progress of its consumers.

    NAME is that of a declared queue, else a client id that has a compacted queue, else that of a shared one.
    """
    queue = _compacted.find(node.control, name, _compacted.kind(exclusive, shared))
    declared = queue.kind == _compacted.DECLARED
    node.print(queue.view, _declared.print_fields if declared else _compacted.print_queue)


@verb(app)
def read(
    name: _declared.Name,
    exclusive: _compacted.Exclusive = False,
    shared: _compacted.Shared = False,
    after: _declared.After = 0,
    limit: _declared.Limit = _declared.LIMIT,
    *,
    node: _control.NodeFlags,
) -> None:
    """Look at the messages of a queue, oldest first. Looking takes nothing out. NAME as for `show`."""
    queue = _compacted.find(node.control, name, _compacted.kind(exclusive, shared))
    _declared.print_messages(_declared.messages(node.control, queue.path, after, limit), node.as_json)


@verb(app)
def tail(
    name: _declared.Name,
    exclusive: _compacted.Exclusive = False,
    shared: _compacted.Shared = False,
    count: Annotated[int, typer.Option("--limit", "-n", min=0, help="Number of messages.")] = 10,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new messages as they are appended, until stopped.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="--follow: seconds between two queries.")] = 1.0,
    *,
    node: _control.NodeFlags,
) -> None:
    """Look at the last messages of a queue. Looking takes nothing out. NAME as for `show`.

    --follow does not see what is consumed or superseded between two looks; with --json it prints a line per message.
    """
    control = node.control
    queue = _compacted.find(control, name, _compacted.kind(exclusive, shared))
    if follow and queue.view.get("priorities", 1) > 1:
        raise typer.BadParameter(
            f"queue {name!r} has priorities: new messages are not at its end; use `queue read`", param_hint="--follow"
        )
    found = _compacted.last(control, queue, max(count, 1))  # the last one tells where to go on
    shown = found[-count:] if count else []
    if not follow:
        _declared.print_messages(shown, node.as_json)
        return
    with contextlib.suppress(KeyboardInterrupt):
        _print_lines(shown, node.as_json)
        for more in _compacted.follow(control, queue, found[-1]["position"] if found else 0, interval):
            _print_lines(more, node.as_json)


def _print_lines(found: list[dict[str, Any]], as_json: bool) -> None:
    for message in found:
        if as_json:
            print(json.dumps(message, ensure_ascii=False))
        else:
            _declared.print_message(message)
    sys.stdout.flush()


@verb(app)
def rewind(
    name: Annotated[str, typer.Argument(metavar="CLIENT", help="Owner of the queue; with --shared: its name.")],
    to: Annotated[
        int | None,
        typer.Option("--to", metavar="SEQ", min=0, max=_declared.FARTHEST, help="Sequence number of the next message."),
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="2h|TIME", help="Redeliver everything appended since then.")
    ] = None,
    preview: Annotated[bool, typer.Option("--preview", help="Show the effect, change nothing.")] = False,
    exclusive: _compacted.Exclusive = False,
    shared: _compacted.Shared = False,
    consumer: Annotated[
        str | None, typer.Option("--consumer", metavar="CLIENT", help="With --shared: the consumer to rewind.")
    ] = None,
    *,
    node: _control.NodeFlags,
) -> None:
    """Let the consumer of a compacted queue get messages again that it has acknowledged.

    It gets what is there: of each key the last value. `--to` may lie ahead: then it skips what is between.
    """
    kind = _compacted.kind(exclusive, shared) or _compacted.EXCLUSIVE
    body = _compacted.rewind_body(kind, to, since, consumer)
    place = f"{_compacted.path(kind, name)}/rewind"
    node.print(node.call("POST", place, {**body, "preview": preview}), _compacted.print_rewind)


@verb(app)
def delete(
    name: _declared.Name,
    exclusive: _compacted.Exclusive = False,
    shared: _compacted.Shared = False,
    yes: _declared.Yes = False,
    *,
    node: _control.NodeFlags,
) -> None:
    """Delete a queue with all messages in it. A compacted one is meant only with --exclusive or --shared."""
    kind = _compacted.kind(exclusive, shared) or _compacted.DECLARED
    place = _compacted.path(kind, name)
    _declared.ask(f"Delete {_compacted.title(kind, name)} {QUEUE.lost}?", yes)
    control = node.control
    try:
        answer = control.call("DELETE", place)
    except _control.ControlError as error:
        raise _compacted.with_hint(control, error, kind, name) from error
    node.print(answer, lambda _view: print(f"{_compacted.title(kind, name)} is deleted"))
