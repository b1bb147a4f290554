"""Progress of a pipeline on standard error: a live display on a terminal, a line per batch in a log.

    ━━━━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━  63 %  120000 rows, 70000 behind  0:00:12
    batch 7: 20000 rows in 1.2 s (16667/s), 70000 behind; written (position 19985), dead (not_json 3)

Standard output is for the result alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from motorcade.pipelines.runner import BatchProgress


class Display(Protocol):
    """Shows the progress of a run."""

    def tell(self, words: str) -> None:
        """Show what is being done now."""

    def batch(self, batch: BatchProgress) -> None:
        """Show a finished batch."""


class Silent:
    """Shows nothing: not a terminal, or --quiet."""

    def tell(self, words: str) -> None:
        pass

    def batch(self, batch: BatchProgress) -> None:
        pass


class Lines(Silent):
    """A line per batch: what is left of a display in a file."""

    def batch(self, batch: BatchProgress) -> None:
        print(line(batch), file=sys.stderr, flush=True)


class Live:
    """A line that changes, and a bar as soon as the end of the stream is known."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._bar: _Bar | None = None
        self._rows = 0

    def tell(self, words: str) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._status is None:
            self._status = self._console.status("")
            self._status.start()
        self._status.update(f"{words} …")

    def batch(self, batch: BatchProgress) -> None:
        self._rows += batch.rows
        if batch.behind is None:
            self.tell(f"{self._rows} rows; {line(batch)}")
            return
        self._end_status()
        if self._bar is None:
            self._bar = _Bar(self._console)
        self._bar.show(self._rows, batch.behind, line(batch))

    def close(self) -> None:
        self._end_status()
        if self._bar is not None:
            self._bar.close()

    def _end_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


class _Bar:
    """A progress bar of the stream, and below it the last batch."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live as Screen
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns)
        self._task = self._progress.add_task("")
        self._screen = Screen(console=console, transient=True)
        self._screen.start()

    def show(self, rows: int, behind: int, last: str) -> None:
        from rich.console import Group
        from rich.text import Text

        told = f"{rows} rows, {behind} behind"
        self._progress.update(self._task, completed=rows, total=rows + behind, description=told)
        below = Text(last, overflow="ellipsis", no_wrap=True)
        self._screen.update(Group(self._progress, below), refresh=True)

    def close(self) -> None:
        self._screen.stop()


@contextmanager
def display(quiet: bool) -> Iterator[Display]:
    """Choose the display that suits standard error."""
    if quiet:
        yield Silent()
    elif not sys.stderr.isatty():
        yield Lines()
    else:
        from rich.console import Console

        live = Live(Console(stderr=True))
        try:
            yield live
        finally:
            live.close()


def line(batch: BatchProgress) -> str:
    """Format a batch: `batch 7: 20000 rows in 1.2 s (16667/s), 5000 behind; dead 3`."""
    speed = f" ({batch.rows / batch.seconds:.0f}/s)" if batch.seconds else ""
    behind = f", {batch.behind} behind" if batch.behind is not None else ""
    told = f"batch {batch.number}: {batch.rows} rows in {batch.seconds:.1f} s{speed}{behind}"
    counts = counted(batch.counts)
    return f"{told}; {counts}" if counts else told


def counted(counts: Mapping[str, object]) -> str:
    """Format counts: `written (position 19985), dead (not_json 3), late 2`; what is empty is left out."""
    parts = {name: f"({counted(value)})" if isinstance(value, Mapping) else value for name, value in counts.items()}
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value not in {None, "()"})
