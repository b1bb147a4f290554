"""The machine: paths, cores, limits, and what /proc says about processor time."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent
REPOSITORY = BENCH.parent
BUILD = BENCH / ".build"
PEERS = BENCH / "peers"
OFFLINE = BENCH / "offline"
SOURCES = BENCH / "sources"

#: Files a broker or the generator may open: 10 000 connections and room for what else they hold.
OPEN_FILES = 16384
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class BenchError(Exception):
    """The benchmark cannot go on; the text says what the user has to do."""


def exit_code(command: str, measure: Callable[[], int]) -> int:
    """That of a run, which may say 0 or 1; 2 if it could not go on, and why; 130 if somebody has stopped it."""
    try:
        return measure()
    except (BenchError, subprocess.TimeoutExpired) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def raise_open_files() -> None:
    """Let this process and those it starts open enough files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= OPEN_FILES:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, max(hard, OPEN_FILES)))
    except (ValueError, OSError) as error:
        raise BenchError(f"cannot open {OPEN_FILES} files ({error}); try `ulimit -n {OPEN_FILES}` as root") from error


def parse_cores(text: str) -> tuple[int, int]:
    """The cores of broker and generator, from `B,G`."""
    try:
        broker, generator = (int(word) for word in text.split(","))
    except ValueError:
        raise BenchError("--cores needs two numbers, such as 0,1") from None
    if not {broker, generator} <= os.sched_getaffinity(0):
        raise BenchError(f"this process may not use cores {text}; choose others with --cores")
    if broker == generator:
        raise BenchError("broker and generator need a core each")
    return broker, generator


@contextmanager
def alone() -> Iterator[None]:
    """Hold the lock that keeps two benchmarks from measuring each other."""
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BenchError("another bench/run is measuring on this machine") from None
        yield


def compile_generator() -> Path:
    """Compile mqttload.c, unless the program is newer than its source."""
    source, program = BENCH / "mqttload.c", BUILD / "mqttload"
    if program.exists() and program.stat().st_mtime >= source.stat().st_mtime:
        return program
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise BenchError("no C compiler found for the load generator; install gcc or set CC")
    BUILD.mkdir(exist_ok=True)
    subprocess.run([compiler, "-O2", "-std=gnu11", "-Wall", "-Wextra", "-o", program, source], check=True)
    return program


def _stat_fields(path: Path) -> list[str] | None:
    """The fields of a /proc stat file after the command name, or None when the process is gone."""
    try:
        return path.read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None


def process_tree(root: int) -> set[int]:
    """`root` and all its descendants that live now."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat_fields(entry / "stat")):
            parents[int(entry.name)] = int(fields[1])
    tree = {root} & parents.keys()
    while more := {pid for pid, parent in parents.items() if parent in tree and pid not in tree}:
        tree |= more
    return tree


def cpu_seconds(root: int) -> float:
    """Processor time used so far by `root` and its descendants."""
    ticks = 0
    for pid in process_tree(root):
        if fields := _stat_fields(Path(f"/proc/{pid}/stat")):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_SECOND


def exact_cpu_seconds(pid: int) -> float:
    """Processor time used so far by all threads of a process, in nanoseconds: for an idle one ticks are too coarse."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def busy_seconds() -> float:
    """Processor time used so far by everything on the machine."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS_PER_SECOND  # without idle and waiting for I/O


def children_seconds() -> float:
    """Processor time used by children of this process that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def describe() -> str:
    """One line about the machine."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
