"""Run all tests; run what failed once more, alone, before it counts.

Two parts: everything but Spark, three tests at a time, since many wait; then the tests that share one Spark session,
which takes ten seconds to start and both cores to run. Both parts run even if the first fails. Tests marked `long` are
left out: `make test ARGS="-m long tests"`.

A test that fails is run again by itself when its part is over. It counts as failed if it fails again. If it passes, it
is *unsteady*: it depends on what else the machine does. Unsteady tests are listed at the end with the reason of their
first failure, to be mended in their design; more than MAX_UNSTEADY of them fail the run.
"""

from __future__ import annotations

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


def run_part(part: Part, build: Path, outcome: Outcome) -> None:
    """Run `part`, retry its failures alone, and add the result to `outcome`."""
    code, failed = pytest([*part.parallel, *part.common], part.environment, build)
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
    code, again = pytest([*failed, *part.common], part.environment, build)
    if code not in {PASSED, FAILED}:
        outcome.broken = True
        again = failed
    outcome.failed |= again
    outcome.unsteady |= {test: reason for test, reason in failed.items() if test not in again}


def pytest(arguments: list[str], environment: dict[str, str], build: Path) -> tuple[int, dict[str, str]]:
    """Run pytest. Return its exit code and the failed tests with their reasons."""
    found = build / "failures.json"
    found.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.failures", f"--failures={found}", *arguments]
    code = subprocess.run(command, env=os.environ | environment, check=False).returncode  # noqa: S603
    return code, json.loads(found.read_text()) if found.exists() else {}


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
    build.mkdir(exist_ok=True)
    outcome = Outcome()
    for part in PARTS:
        run_part(part, build, outcome)
    report(outcome)
    return outcome.status


if __name__ == "__main__":
    sys.exit(main())
