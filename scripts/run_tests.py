"""Run all tests; run what failed once more, alone, before it counts.

Two parts at the same time: everything but Spark, three tests at a time, and the tests that share one Spark session,
which takes ten seconds to start. Either of them leaves half of two cores idle, since much of it waits. The output of
the second part is shown when the first is over. Tests marked `long` are left out: `make test ARGS="-m long tests"`.

A test that fails is run again by itself when all parts are over. It counts as failed if it fails again. If it passes,
it is *unsteady*: it depends on what else the machine does. Unsteady tests are listed at the end with the reason of
their first failure, to be mended in their design; more than MAX_UNSTEADY of them fail the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

#: tests; more than this many that pass only on the second try fail the run
MAX_UNSTEADY = 5

#: tests; if more than this many fail, something is broken, and running them all again would only take time
MAX_RETRIED = 60

#: pytest's exit codes: all passed, some failed, no test matched. Any other code means that the run itself broke.
PASSED, FAILED, NO_TESTS = 0, 1, 5

#: A Java that lives for seconds should not spend them on compiling as if it lived for hours.
SPARK_ENVIRONMENT = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


@dataclass(frozen=True)
class Part:
    """One call of pytest: its own arguments, those that a retry needs too, and what its environment has besides."""

    parallel: list[str]
    common: list[str]
    environment: dict[str, str] = field(default_factory=dict)


PARTS = [
    Part(["-n", "3", "--dist", "worksteal"], ["-m", "not spark and not long"]),
    Part(["tests/pipelines"], ["-m", "spark and not long"], SPARK_ENVIRONMENT),
]


@dataclass
class Outcome:
    """The result of a run: whether it broke, failures by test id, and unsteady tests, each with its reason."""

    broken: bool = False
    failed: dict[str, str] = field(default_factory=dict)
    unsteady: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        return int(self.broken or bool(self.failed) or len(self.unsteady) > MAX_UNSTEADY)


class Run:
    """One part under way."""

    def __init__(self, part: Part, build: Path, *, shown: bool = True) -> None:
        """Begin. If it is not `shown`, its output goes to a file in `build` until it is over."""
        self.part = part
        self._build = build
        build.mkdir(parents=True, exist_ok=True)
        self._output = None if shown else build / "output.txt"
        self._process = self._pytest([*part.parallel, *part.common], self._output)

    def retry(self, outcome: Outcome) -> None:
        """Wait for its end, retry its failures alone, and add the result to `outcome`."""
        code, failed = self.wait()
        if code == PASSED:
            return
        if code != FAILED or not failed:
            outcome.broken = True
            outcome.failed |= failed
            return
        if len(failed) > MAX_RETRIED:
            print(f"{len(failed)} tests failed; more than {MAX_RETRIED} are not run again.", flush=True)
            outcome.failed |= failed
            return
        print(f"{len(failed)} failed; running them once more, alone.", flush=True)
        self._process, self._output = self._pytest([*failed, *self.part.common], None), None
        code, again = self.wait()
        if code not in {PASSED, FAILED}:
            outcome.broken = True
            again = failed
        outcome.failed |= again
        outcome.unsteady |= {test: reason for test, reason in failed.items() if test not in again}

    def wait(self) -> tuple[int, dict[str, str]]:
        """Return the exit code of pytest and the failed tests with their reasons. Show output that was kept back."""
        code = self._process.wait()
        if self._output is not None and self._output.exists():
            sys.stdout.write(self._output.read_text(errors="replace"))
            sys.stdout.flush()
            self._output.unlink()
        found = self._build / "failures.json"
        return code, json.loads(found.read_text()) if found.exists() else {}

    def _pytest(self, arguments: list[str], output: Path | None) -> subprocess.Popen[bytes]:
        found = self._build / "failures.json"
        found.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-p", "tests.support.failures", f"--failures={found}", *arguments]
        with contextlib.ExitStack() as stack:
            to = stack.enter_context(output.open("wb")) if output is not None else None
            return subprocess.Popen(command, env=os.environ | self.part.environment, stdout=to, stderr=to)  # noqa: S603


def report(outcome: Outcome) -> None:
    for title, tests in (("Failed twice", outcome.failed), ("Unsteady: failed, then passed alone", outcome.unsteady)):
        if tests:
            print(f"\n{title} ({len(tests)}):")
            for test, reason in tests.items():
                print(f"  {test}\n      {reason}")
    if len(outcome.unsteady) > MAX_UNSTEADY:
        print(f"\nMore than {MAX_UNSTEADY} unsteady tests: the run has failed.")
    if outcome.broken:
        print("\npytest itself did not end properly: the run has failed.")
    sys.stdout.flush()


def main() -> int:
    build = Path(".build")
    outcome = Outcome()
    runs = [Run(part, build / f"tests-{number}", shown=number == 0) for number, part in enumerate(PARTS)]
    for run in runs:
        run.wait()  # what is run again is run alone
    for run in runs:
        run.retry(outcome)
    report(outcome)
    return outcome.status


if __name__ == "__main__":
    sys.exit(main())
