"""Commands of Motorcade as a person gives them, and what they must say.

    run("queue", "list", stdin="", env=None, cwd=None)     in this process: what a command says and does
    run_process(…), start_process(…)                       as a process: signals, pipes, terminals, locks

A command in this process takes some ten milliseconds, a process half a second. Both have the same arguments and find
the same environment: ours, without variables that would configure Motorcade, and with a screen of 200 columns.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import structlog
import typer

from motorcade import cli, log
from tests.support.node import ROOT

#: Seconds that a process may take. Generous: machines that run tests are busy.
PATIENCE = 120.0

#: The commands, put together once: that takes longer than most of them.
COMMAND_TREE = typer.main.get_command(cli.app)

Done = subprocess.CompletedProcess[str]


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a command, so that a developer's shell does not decide."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MOTORCADE_")}
    wide = {"COLUMNS": "200", "NO_COLOR": "1"}
    return clean | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"} | wide | (extra or {})


def run(*words: object, stdin: str = "", env: dict[str, str] | None = None, cwd: Path | None = None) -> Done:
    """`motorcade WORDS` in this process."""
    line = ["motorcade", *map(str, words)]
    given, out, err = (io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8", "replace") for text in (stdin, "", ""))
    code: object = None
    with (
        _alone(),
        patch.object(cli, "app", COMMAND_TREE),
        patch.object(sys, "argv", line),
        patch.object(sys, "stdin", given),
        patch.dict(os.environ, environment(env), clear=True),
        _logging_to(err),
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
    return Done(line, code if isinstance(code, int) else int(code is not None), _written(out), _written(err))


#: Arguments, streams, environment and folder belong to the process: two commands at a time would leave each other's.
_RUNNING = threading.Lock()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    assert _RUNNING.acquire(timeout=PATIENCE), "another command of this process does not end: run one as a process"
    try:
        yield
    finally:
        _RUNNING.release()


class OwnLog(threading.local):
    """Where the command that this thread runs logs to; nodes in other threads log as before."""

    stream: io.TextIOWrapper | None = None


_own = OwnLog()
_PROCESSORS = [structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer(key_order=["event"])]
_configure = log.configure


@contextlib.contextmanager
def _logging_to(stream: io.TextIOWrapper) -> Iterator[None]:
    """Log there, as a command's process logs to its standard error.

    Only the wrapper class is replaced, and it replaces the rest: `structlog` keeps what a factory has made, so a logger
    for this command would later meet the processors of another configuration.
    """
    before = structlog.get_config()
    structlog.configure(wrapper_class=_wrapper(before["wrapper_class"]), cache_logger_on_first_use=False)
    _own.stream = stream
    try:
        yield
    finally:
        _own.stream = None
        structlog.configure(
            wrapper_class=before["wrapper_class"], cache_logger_on_first_use=before["cache_logger_on_first_use"]
        )


def _wrapper(others: Callable[..., Any]) -> Any:
    """Make loggers of commands, and those of others as before."""

    def wrap(logger: object, processors: object, context: object) -> object:
        if _own.stream is None:
            return others(logger, processors=processors, context=context)
        return structlog.BoundLogger(structlog.PrintLogger(_own.stream), processors=_PROCESSORS, context=context)  # type: ignore[arg-type]

    return wrap


def _configure_nodes(*args: Any, **kwargs: Any) -> None:
    """Configure the logs, unless a command of this process asks for it: that would outlast the command."""
    if _own.stream is None:
        _configure(*args, **kwargs)


log.configure = _configure_nodes


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode("utf-8", "replace")


def start_process(
    *words: object, env: dict[str, str] | None = None, cwd: Path | None = None, **streams: Any
) -> subprocess.Popen[str]:
    """`motorcade WORDS` as a process; standard streams are pipes unless told otherwise."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    line = [sys.executable, "-m", "motorcade", *map(str, words)]
    return subprocess.Popen(
        line, env=environment(env), cwd=cwd, text=True, encoding="utf-8", errors="replace", **(pipes | streams)
    )


def run_process(
    *words: object, stdin: str | int = "", env: dict[str, str] | None = None, cwd: Path | None = None, **streams: Any
) -> Done:
    """`motorcade WORDS` as a process that ends by itself; `stdin` is what it reads, or a file."""
    text = stdin if isinstance(stdin, str) else None
    process = start_process(*words, env=env, cwd=cwd, **({} if text is not None else {"stdin": stdin}), **streams)
    try:
        out, err = process.communicate(text, PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"{' '.join(map(str, words))} does not end:\n{out}\n{err}") from None
    return Done(process.args, process.returncode, out, err)


class Commands(ABC):
    """Somebody who gives commands."""

    @abstractmethod
    def command(self, *words: object) -> Done:
        """The command, done or not."""

    def done(self, *words: object) -> str:
        """The output of a command that must succeed."""
        result = self.command(*words)
        assert 0 == result.returncode, f"{' '.join(map(str, words))}: {result.stdout}{result.stderr}"
        return result.stdout

    def asked(self, *words: object) -> Any:
        """The JSON that a command prints."""
        return json.loads(self.done(*words, "--json"))

    def refused(self, *words: object, code: int = 1) -> str:
        """What a command says that must fail."""
        result = self.command(*words)
        assert code == result.returncode, f"exit code {result.returncode}: {result.stdout}{result.stderr}"
        assert "Traceback" not in result.stderr, result.stderr
        return result.stderr
