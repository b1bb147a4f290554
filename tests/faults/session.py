"""A plugin for pytest that judges faults: tests are collected once, and each fault gets a fork of that process.

To start pytest and to import everything takes longer than most faults take to be found. So this process does both,
once, on sources without faults. For each fault it plants the text (processes that tests start read it), forks, and the
child exchanges the code of the functions that are different (`exchange`) and runs the tests until one fails.

    run.py ─ faults ─▶ this process ─ fork ─▶ child: one fault, its tests, exit code and failures.json
       ▲                     │
       └───── verdicts ──────┘
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.faults.fault import SOURCES, Fault, Outcome, Verdict, expanded
from tests.support.failures import Failures

#: exit codes of a child: no test has failed, one has
PASSED, FAILED = 0, 1

_stamps = count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", help="the faults to judge, as JSON")
    parser.addoption("--verdicts", type=int, help="file descriptor to which verdicts are written")
    parser.addoption("--limit", type=float, help="seconds for the tests of one fault")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Judge(config))


class Judge:
    """Judges one fault after the other."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._root = config.rootpath
        self._faults = [Fault(**fault) for fault in json.loads(Path(config.getoption("--faults")).read_text())]
        self._limit: float = config.getoption("--limit")
        self._verdicts = os.fdopen(config.getoption("--verdicts"), "w")
        self._failures = self._root / "failures.json"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise pytest.UsageError("the tests cannot be collected")
        gc.unfreeze()
        found = [self._judge(fault, session) for fault in self._faults]
        self._confirm([verdict for verdict in found if verdict.outcome is Outcome.FOUND], session)
        return True

    def _tell(self, verdict: Verdict) -> None:
        self._verdicts.write(verdict.encoded() + "\n")
        self._verdicts.flush()

    def _judge(self, fault: Fault, session: pytest.Session) -> Verdict:
        began = time.monotonic()
        items = chosen(session.items, expanded(fault.tests, self._root), self._root)
        source = (self._root / SOURCES / fault.file).read_text()
        with planted(fault, self._root):
            code, failed = self._forked(lambda: self._look(fault, source, items, session), self._limit)
        outcome = {PASSED: Outcome.SURVIVED, FAILED: Outcome.FOUND, None: Outcome.LATE}.get(code, Outcome.BROKEN)
        test, reason = next(iter(failed.items()), ("", ""))
        if not items or (outcome is Outcome.FOUND and not test):
            outcome = Outcome.BROKEN
        if outcome is Outcome.SURVIVED and fault.gap:
            outcome, reason = Outcome.GAP, fault.gap
        verdict = Verdict(fault.name, fault.area, outcome, round(time.monotonic() - began, 1), test, reason)
        self._tell(verdict)
        return verdict

    def _confirm(self, found: Sequence[Verdict], session: pytest.Session) -> None:
        """Run all tests that have found something, without any fault: those that fail have found nothing."""
        tests = {verdict.test for verdict in found}
        items = [item for item in session.items if item.nodeid in tests]
        limit = self._limit * (1 + len(items) / 20)
        code, failed = self._forked(lambda: self._run(items, session, stop=False), limit)
        for verdict in found:
            if verdict.test in failed or code not in (PASSED, FAILED):
                self._tell(verdict.doubted(failed.get(verdict.test, "the tests without faults have not ended")))

    def _forked(self, work: Callable[[], int], limit: float) -> tuple[int | None, dict[str, str]]:
        """Do something in a child: its exit code (None: out of time), and failed tests with their reasons."""
        self._failures.unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            code = 70
            try:
                os.setsid()
                nothing = os.open(os.devnull, os.O_RDWR)
                for stream in (0, 1):
                    os.dup2(nothing, stream)
                code = work()
            finally:
                os._exit(code)
        code_ = _wait(pid, limit)
        try:
            os.killpg(pid, signal.SIGKILL)  # itself, or what its tests have left
        except ProcessLookupError:
            pass
        if code_ is None:
            os.waitpid(pid, 0)
        return code_, json.loads(self._failures.read_text()) if self._failures.exists() else {}

    # -- in the child

    def _look(self, fault: Fault, source: str, items: Sequence[pytest.Item], session: pytest.Session) -> int:
        if not exchange(fault, source):
            self._begin_anew(items)
        return self._run(items, session, stop=True)

    def _begin_anew(self, items: Sequence[pytest.Item]) -> None:
        """For what is no function of Python: another process imports everything again."""
        paths = dict.fromkeys(str(item.path.relative_to(self._root)) for item in items)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "tests.support.failures", *paths]
        command += [f"--failures={self._failures}", "-m", self._config.getoption("-m")]
        command += [f"--basetemp={self._config.getoption('--basetemp')}", f"-otimeout={self._config.getini('timeout')}"]
        os.execv(sys.executable, command)

    def _run(self, items: Sequence[pytest.Item], session: pytest.Session, *, stop: bool) -> int:
        """Run tests, until one fails if `stop`."""
        noted = Failures(self._failures)
        self._config.pluginmanager.register(noted)
        for item, following in zip(items, [*items[1:], None], strict=True):
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if stop and noted.found:
                session._setupstate.teardown_exact(None)
                break
        noted.pytest_sessionfinish()
        return FAILED if noted.found else PASSED


def _wait(pid: int, limit: float) -> int | None:
    """Wait for a child: its exit code, or None if it takes too long."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


@contextmanager
def planted(fault: Fault, root: Path) -> Iterator[None]:
    """Have a fault in the sources."""
    path = root / SOURCES / fault.file
    text, times = path.read_text(), path.stat()
    path.write_text(text.replace(fault.old, fault.new))
    # Python compares whole seconds and the size to tell whether its compiled file is out of date.
    later = times.st_mtime_ns + next(_stamps) * 1_000_000_000
    os.utime(path, ns=(later, later))
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def chosen(items: Sequence[pytest.Item], paths: Sequence[str], root: Path) -> list[pytest.Item]:
    """Those of the tests that are in one of the paths, in the order of the paths."""
    found: dict[pytest.Item, None] = {}
    for path in paths:
        for item in items:
            if item.path.is_relative_to(root / path):
                found[item] = None
    return list(found)


def exchange(fault: Fault, source: str) -> bool:
    """Let the functions of a module that is imported do what they do with the fault; False if that is not possible."""
    name = f"motorcade.{fault.file.removesuffix('.py').replace('/', '.')}"
    if not fault.file.endswith(".py"):
        return False
    new: dict[types.CodeType, types.CodeType] = {}
    old_codes = _codes(compile(source, fault.file, "exec", dont_inherit=True))
    new_codes = _codes(compile(source.replace(fault.old, fault.new), fault.file, "exec", dont_inherit=True))
    for place, code in old_codes.items():
        if place in new_codes and new_codes[place] != code:
            new[code] = new_codes[place]
    exchanged = 0
    for function in gc.get_objects():
        if isinstance(function, types.FunctionType) and function.__module__ == name and function.__code__ in new:
            code = new[function.__code__]
            if code.co_freevars != function.__code__.co_freevars:
                return False
            function.__code__ = code
            exchanged += 1
    return exchanged > 0


def _codes(code: types.CodeType) -> dict[tuple[str, int], types.CodeType]:
    """All code within some code, by its qualified name and its number among those of that name."""
    found: dict[tuple[str, int], types.CodeType] = {}
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    while inner:
        one = inner.pop(0)
        number = 0
        while (one.co_qualname, number) in found:
            number += 1
        found[one.co_qualname, number] = one
        inner += [constant for constant in one.co_consts if isinstance(constant, types.CodeType)]
    return found
