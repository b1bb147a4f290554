"""Plant known faults in the sources, one at a time, and see whether a test finds each.

The faults are in the TOML files beside this one. Each names a file, a piece of its text, what a tired developer would
write in its place, and the tests that should notice, cheapest first. They are planted in a copy of the repository, so
one can go on working. docs/faults.md is the guide.

Exit code 1 if a fault survives or is stale.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tests.faults.fault import (
    GOOD,
    Fault,
    ListError,
    Outcome,
    Verdict,
    chosen,
    expanded,
    load,
    staleness,
    summary,
)

ROOT = Path(__file__).resolve().parents[2]

#: seconds after which a single test that hangs has failed
TEST_TIMEOUT = 60

#: not copied: made by tools, large, or both
LEFT_OUT = (".git", ".venv", ".build", ".*_cache", ".hypothesis", "node_modules", "dist", "bench")

#: plugins of pytest that these runs do not need; without them it starts in half the time
PLUGINS_LEFT_OUT = ("anyio", "cacheprovider", "valkey", "xdist", "xdist.looponfail")


class Run:
    """Judges faults, each on one of some copies of a repository."""

    def __init__(self, root: Path, options: argparse.Namespace) -> None:
        self.verdicts: dict[str, Verdict] = {}
        self._root = root
        self._options = options
        self._lock = threading.Lock()

    def judge(self, faults: Sequence[Fault]) -> None:
        """Fill `verdicts`, and print them as they come."""
        sound: list[Fault] = []
        for fault in faults:
            reason = staleness(fault, self._root)
            if reason:
                self._note(Verdict(fault.name, fault.area, Outcome.STALE, reason=reason))
            else:
                sound.append(replace(fault, tests=fault.tests[: self._options.stages]))
        parts = [part for number in range(self._options.jobs) if (part := sound[number :: self._options.jobs])]
        with tempfile.TemporaryDirectory(prefix="motorcade-faults-") as folder:
            threads = [
                threading.Thread(target=self._session, args=(part, Path(folder) / str(number)))
                for number, part in enumerate(parts)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _note(self, verdict: Verdict) -> None:
        with self._lock:
            self.verdicts[verdict.name] = verdict
            print(verdict, flush=True)
            if self._options.json is not None:
                self._options.json.write_text(json.dumps([asdict(v) for v in self.verdicts.values()], indent=1))

    def _session(self, faults: Sequence[Fault], tree: Path) -> None:
        """Let one process of pytest judge faults (`session`)."""
        shutil.copytree(self._root, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        if (self._root / ".build").exists():  # npm packages of some tests
            (tree / ".build").symlink_to(self._root / ".build")
        listed, log = tree / "faults.json", tree / "faults.log"
        listed.write_text(json.dumps([asdict(fault) for fault in faults]))
        reading, writing = os.pipe()
        command = ["nice", "-n", str(self._options.nice), sys.executable, "-m", "pytest", "-q", "-s"]
        for plugin in PLUGINS_LEFT_OUT:
            command += ["-p", f"no:{plugin}"]
        command += ["-o", f"timeout={TEST_TIMEOUT}", "-m", "not spark and not long", f"--basetemp={tree / 'temporary'}"]
        command += ["-p", "tests.support.failures", "-p", "tests.faults.session", f"--faults={listed}"]
        command += [f"--verdicts={writing}", f"--limit={self._options.limit}"]
        command += _outermost([path for fault in faults for path in expanded(fault.tests, tree)])
        # CI: the same examples every time.
        environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}:{tree}", "CI": "1"}
        with log.open("w") as said:
            process = subprocess.Popen(
                command,
                cwd=tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[writing],
            )
            os.close(writing)
            with os.fdopen(reading) as verdicts:
                for line in verdicts:
                    self._note(Verdict.decoded(line))
            process.wait()
        reason = log.read_text().strip().rpartition("\n")[2]
        for fault in faults:
            if fault.name not in self.verdicts:
                self._note(Verdict(fault.name, fault.area, Outcome.BROKEN, reason=reason))


def _outermost(paths: Sequence[str]) -> list[str]:
    """Return each path once, and none that is within another."""
    return [
        path
        for path in dict.fromkeys(paths)
        if not any(other != path and Path(path).is_relative_to(other) for other in paths)
    ]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT, folder: Path | None = None) -> int:
    """Judge the faults of a folder of lists on a repository."""
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="names or areas, such as ledger*"
    )
    parser.add_argument("--jobs", type=int, default=1, help="faults judged at the same time")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for the tests of one fault")
    parser.add_argument("--stages", type=int, metavar="N", help="look no further than the first N patterns of each")
    parser.add_argument("--nice", type=int, default=10, help="priority of the tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there, too")
    parser.add_argument("--check", action="store_true", help="only tell which faults are stale")
    options = parser.parse_args(arguments)
    try:
        faults = chosen(load(folder or Path(__file__).parent), options.only)
    except (ListError, tomllib.TOMLDecodeError) as error:
        print(error, file=sys.stderr)
        return 1
    if not faults:
        print("no fault has such a name or area", file=sys.stderr)
        return 1
    if options.check:
        stale = {fault.name: reason for fault in faults if (reason := staleness(fault, root))}
        for name, reason in stale.items():
            print(f"{name}: {reason}")
        print(f"{len(faults)} faults, {len(stale)} of them stale")
        return int(bool(stale))
    run = Run(root, options)
    run.judge(faults)
    print(f"\n{summary(list(run.verdicts.values()))}")
    return int(any(verdict.outcome not in GOOD for verdict in run.verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
