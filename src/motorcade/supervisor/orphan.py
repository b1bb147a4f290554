"""A process that ends with its parent, whichever way that ends.

    python -m motorcade.supervisor.orphan PARENT SIGNAL PROGRAM ARGUMENT…

runs a program that knows nothing of this. Linux sends the signal, also to a process that is stopped; elsewhere programs
outlive a parent that was killed, and nodes end by themselves (`child.py`).
"""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1  # of prctl(2)


def end_with(parent: int, number: int) -> None:
    """Have the system send this process a signal when its parent ends; at once if it has ended already.

    It is about the thread of the parent that has started this process: that must be one which stays.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def main() -> None:
    """Become the program."""
    parent, number, *command = sys.argv[1:]
    os.umask(0o077)  # what it writes is its own user's
    end_with(int(parent), int(number))
    os.execv(command[0], command)  # noqa: S606 - this is what it is for


if __name__ == "__main__":
    main()
