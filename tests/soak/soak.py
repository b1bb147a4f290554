"""The soak: everything of one node is churned with ever-new names, and what it holds afterwards must not grow.

    cycle    churn for some minutes, then let everything go, then measure: the floor
    floor    memory, objects, entries of every table, descriptors, threads, disk; and how the cycle went

`tests/soak/judge.py` says what is wrong. Exit code 1 if anything is. docs/soak.md is the guide.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.command import ended_by_sigterm
from tests.soak import churn
from tests.soak.judge import Floor, report, verdict
from tests.soak.observer import TRACE
from tests.soak.probe import Probe
from tests.support.node import NodeProcess

PATIENCE = 120.0  #: seconds until a node must be quiet


@dataclass(frozen=True)
class Options:
    """The command line."""

    minutes: float = 30.0  #: all cycles together
    cycles: int = 3
    rate: float = 1.0  #: times the usual load
    trace: bool = False  #: have the node trace its memory, and show which lines of code have grown
    data: Path | None = None  #: keep what was measured here


class Soak:
    """One node and its load."""

    def __init__(self, options: Options, folder: Path) -> None:
        self.options = options
        self.folder = folder
        env = {TRACE: "1"} if options.trace else {}
        churn.prepare(folder)
        self.node = NodeProcess(config=churn.config(folder), data=folder / "data", ws=True, http=True, env=env)
        self.floors: list[Floor] = []
        self.done: Counter[str] = Counter()  #: pieces of churn by name
        self._lines = 0

    async def run(self) -> list[Floor]:
        """All cycles."""
        await asyncio.to_thread(self.node.start)
        load = churn.Churn(self.node, self.folder, self.options.rate)
        self.done = load.done
        probe = Probe(self.node)
        try:
            await probe.start()
            for cycle in range(1, self.options.cycles + 1):
                self.floors.append(await self._cycle(cycle, load, probe))
                self._tell(load)
            await probe.stop()
        except BaseException:
            await asyncio.to_thread(self.node.kill)
            raise
        finally:
            await load.web.aclose()
        await asyncio.to_thread(self.node.stop)
        if self.options.data is not None:
            (self.options.data / "node.log").write_text(self.node.log)
        return self.floors

    async def _cycle(self, cycle: int, load: churn.Churn, probe: Probe) -> Floor:
        probe.forget()
        before, units = await self._metrics(load), load.done.total()
        await load.run(self.options.minutes * 60 / self.options.cycles)
        after = await self._metrics(load)
        count, lost, latency = await probe.cycle()
        await self._quiet(load)
        looked = await self._look(f"floor-{cycle}", probe)
        quiet = await self._metrics(load)
        opened = _opened(self.node.pid)
        files = sum(1 for target in opened if target.startswith(str(self.node.data)))
        messages = _added(before, after, "motorcade_messages_total")
        cpu = _added(before, after, "process_cpu_seconds_total")
        return Floor(
            cycle,
            rss=looked["resident"],
            trimmed=looked["trimmed"],
            store=int(_total(quiet, "motorcade_store_memory_bytes")),
            garbage=looked["garbage"],
            objects=looked["objects"],
            descriptors=len(opened) - files,
            files=files,
            threads=len(os.listdir(f"/proc/{self.node.pid}/task")),  # noqa: PTH208 - names are enough
            disk=_size(self.node.data),
            tables=looked["tables"] | _tables(quiet),
            kinds=looked["kinds"],
            units=load.done.total() - units,
            messages=int(messages),
            probes=count,
            lost=lost,
            latency=latency,
            lag=_lag(before, after),
            cpu=cpu / max(messages, 1),
            errors=self._errors(),
        )

    async def _quiet(self, load: churn.Churn) -> None:
        """Wait until the probes are alone, and everything that has a time-out has run into it."""
        end = asyncio.get_running_loop().time() + PATIENCE
        while (await self._metrics(load))["motorcade_sessions"] > 2:
            if asyncio.get_running_loop().time() > end:
                raise AssertionError(f"sessions that do not end: {(await load.web.get('clients')).text[:2000]}")
            await asyncio.sleep(0.2)
        await asyncio.sleep(churn.LET_GO)

    async def _look(self, name: str, probe: Probe) -> dict[str, Any]:
        """Have the observer count, and read its figures."""
        await probe.observe(name)
        told = self.node.data / "plugins" / "observer" / f"{name}.json"
        await churn.until(told.exists, PATIENCE)
        found: dict[str, Any] = json.loads(told.read_text())
        told.unlink()
        if self.options.data is not None:
            self.options.data.mkdir(parents=True, exist_ok=True)
            (self.options.data / f"{name}.json").write_text(json.dumps(found, indent=1))
        for line in found["lines"]:
            print(f"  {line}")
        return found

    async def _metrics(self, load: churn.Churn) -> dict[str, float]:
        answer = await load.web.get(f"http://{self.node.http}/metrics")
        assert answer.status_code == 200, answer.text
        pairs = (line.rsplit(" ", 1) for line in answer.text.splitlines() if line and not line.startswith("#"))
        return {series: float(value) for series, value in pairs}

    def _errors(self) -> list[str]:
        """Errors that the node has logged since the last cycle."""
        lines, self._lines = self.node.output[self._lines :], len(self.node.output)
        return [line.strip()[:300] for line in lines if '"level":"error"' in line or "Traceback" in line][:5]

    def _tell(self, load: churn.Churn) -> None:
        floor = self.floors[-1]
        print(
            f"floor {floor.cycle}: RSS {floor.rss / 2**20:.1f} MiB, {floor.objects} objects, "
            f"{floor.descriptors} descriptors, {floor.units} pieces, {floor.lost} of {floor.probes} probes lost",
            flush=True,
        )
        if load.expired:
            print(f"  {load.expired} messages had expired when their vehicles came", flush=True)
        for what, count in load.refused.most_common(5):
            print(f"  {count} times {what}", flush=True)


def _total(metrics: dict[str, float], name: str) -> float:
    return sum(value for series, value in metrics.items() if series.split("{")[0] == name)


def _added(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return _total(after, name) - _total({series: value for series, value in before.items() if series in after}, name)


def _tables(metrics: dict[str, float]) -> dict[str, float]:
    """Sizes of tables, and of the store, as the node tells them."""
    wanted = (
        *("motorcade_table_entries", "motorcade_sessions", "motorcade_subscriptions", "motorcade_queued_messages"),
        *("motorcade_store_entries", "motorcade_store_records", "motorcade_store_blobs", "motorcade_declared"),
        *("motorcade_plugin_gauge", "motorcade_shared_subscriptions"),
    )
    sizes = ("_bytes", "_seconds", "timestamp")
    return {
        series: value
        for series, value in metrics.items()
        if series.split("{")[0] in wanted and not any(word in series for word in sizes)
    } | {"series of /metrics": len(metrics)}


def _lag(before: dict[str, float], after: dict[str, float]) -> float:
    """Seconds that 99 of 100 turns of the event loop were not late."""
    name = "motorcade_loop_lag_seconds_bucket"
    counts = [
        (float(series.split('"')[1]), value - before.get(series, 0))
        for series, value in after.items()
        if series.startswith(name)
    ]
    total = max((count for _, count in counts), default=0)
    return next((le for le, count in sorted(counts) if count >= total * 0.99), float("inf"))


def _opened(pid: int) -> list[str]:
    """Targets of the descriptors of a process."""
    found: list[str] = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(path.readlink()))
    return found


def _size(folder: Path) -> int:
    """Bytes of all files; some vanish while they are looked at."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def soak(options: Options) -> int:
    """Run, print, and judge; the exit code."""
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="motorcade-soak-") as folder:
        run = Soak(options, Path(folder))
        try:
            floors = asyncio.run(run.run())
        finally:
            run.node.kill()  # unless it has stopped
    print(report(floors))
    findings = verdict(floors)
    print("\n".join(findings) or "level: nothing has grown", flush=True)
    return 1 if findings else 0


def main(words: Sequence[str] | None = None) -> int:
    """The command line."""
    line = argparse.ArgumentParser(prog="python -m tests.soak.soak", description=__doc__.split("\n")[0])
    line.add_argument("--minutes", type=float, default=30.0, help="all cycles together; what is let go takes longer")
    line.add_argument("--cycles", type=int, default=3, help="floors that are compared")
    line.add_argument("--rate", type=float, default=1.0, help="times the usual load")
    line.add_argument("--trace", action="store_true", help="show which lines of the node's code hold more than before")
    line.add_argument("--data", type=Path, default=None, help="keep what was measured here")
    return soak(Options(**vars(line.parse_args(words))))


if __name__ == "__main__":
    sys.exit(main())
