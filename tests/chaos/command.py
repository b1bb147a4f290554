"""The command line of a crash test, whatever it kills.

A crash test is a module with `Options` (what to do in one run), a function that does it, and `report` (what came of it
in words). This is what lies around them:

    parser            the options that all have; each test adds its own, named like the fields of its `Options`
    add_runs          the option that names one or several of a few, and there is a run for each
    options_of_runs   what was given, as the fields of `Options`, run by run
    run_all           run after run, each told as soon as it is over, and the exit code
    folder            where the data of a run lies; gone afterwards, unless it shall be kept
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NoReturn, TypeVar

Options = TypeVar("Options")
Outcome = TypeVar("Outcome")


# -- what is asked for


def parser(module: str, about: str, *, rounds: str, data: bool = True) -> argparse.ArgumentParser:
    """For `python -m module`; `rounds` says what is counted, `data` whether there is anything that could be kept."""
    made = argparse.ArgumentParser(
        prog=f"python -m {module}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=int, default=20, help=rounds)
    seed = Random().randrange(1_000_000)
    made.add_argument("--seed", type=int, default=seed, help="of everything random (except the timing of processes)")
    made.add_argument("--quiet", action="store_true", help="only the outcome")
    if data:
        made.add_argument("--data", type=Path, default=None, help="keep data and logs here")
    return made


def add_runs(line: argparse.ArgumentParser, kind: str, known: Sequence[str], default: str) -> None:
    """An option with words between commas, for each of which there is a run."""

    def read(given: str) -> list[str]:
        words = given.split(",")
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"no {kind} {word!r}; there are {', '.join(known)}")
        return words

    line.add_argument(f"--{kind}", type=read, default=default, help=f"one or several of {', '.join(known)}")


def options_of_runs(given: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    """The fields of each `Options`: the runs differ in the word of this option."""
    return [vars(given) | {kind: word} for word in getattr(given, kind)]


# -- doing it


def run_all(
    runs: Iterable[Options],
    crash: Callable[[Options], Outcome],
    report: Callable[[Outcome], str],
    passed: Callable[[Outcome], bool],
) -> int:
    """The exit code: 1 if any run has not passed."""
    good = True
    with ended_by_sigterm():
        for options in runs:
            outcome = crash(options)
            print(report(outcome), end="\n\n", flush=True)
            good &= passed(outcome)
    return 0 if good else 1


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM becomes an exception, so that nothing is left running."""

    def end(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def folder(data: Path | None, name: str) -> Iterator[Path]:
    """A new folder: `name` in `data`, to be kept, or one that is removed in the end.

    Never one with the data of an earlier run, which the judge would take for something that nobody has published.
    """
    if data is not None:
        kept = data / name
        try:
            kept.mkdir(parents=True)
        except FileExistsError:
            sys.exit(f"--data {data}: {kept} is there already; remove it, or name another folder")
        yield kept
        return
    made = Path(tempfile.mkdtemp(prefix="motorcade-chaos-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
