"""The entry point: `motorcade`, and `python -m motorcade`.

Apart from the command line itself because importing that takes a moment, in which a person may press Ctrl-C. From the
first command on this is a KeyboardInterrupt as ever, and commands, or Typer for them, end with the same exit code.
"""

from __future__ import annotations

import os
import signal

#: Exit code of a command that was interrupted, as a shell has it.
INTERRUPTED = 130


def main() -> None:
    """Import the command line, then run it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # and not ignored, as for what a script starts in the background
        signal.signal(signal.SIGINT, _leave)
    from motorcade.cli import main as run  # noqa: PLC0415 - see above

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, before)
    run()


def _leave(_number: int, _frame: object) -> None:
    """Leave at once: nothing was begun, and an exception would go through imports of others, who may print it."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
