"""Kill pipelines again and again, start them again from their folders, and compare what they have made with a ledger.

    python -m tests.chaos.spark --rounds 20 --pipeline ingest,audience [--engine rocksdb] [--cluster] [--seed 7]
    python -m tests.chaos.spark --pipeline ingest --phase compacting,replacing      strike at these moments only

A real node with a store, and `motorcade pipeline run …` as a user would start it. A round is one blow, SIGKILL to

    driver     the Python process of the command          worker     a Python process that works for Spark
    java       the JVM that it has started                executor   (with --cluster) the JVM of an executor
    all        everything that belongs to the run, at once

at a moment that is chosen by what the run is doing (`Phase`), as far as that can be seen from outside: the folder of
the run, Spark's checkpoint, the ledger of the lake. What has ended is started again, at once or when the last process
of it is gone. Workers and executors leave the command running; if it fails for their sake, it is started again. A blow
before Spark's Java is there hits a shell or an interpreter that loads modules; it is counted apart, and is no round.

    ingest     messages of all sorts come without pause (`spark_feed.py`), micro-batches follow each other. In the end
               the feed stops, a last run reads the rest, and the lake is compared with the ledger.
    audience   one campaign after the other, each with its own fleet, folder and request. Each is sent to its end, and
               the vehicles of its plan and of the node's receipts are compared with those that were meant; then the
               audit of the store must be clean.

Exit code 1 on any finding. What was hit is printed by victim and phase.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import IO, Any

import httpx
import psutil
import pyarrow.parquet as pq

from tests.chaos import spark_judge as judge
from tests.chaos.command import add_runs, folder, options_of_runs, parser, run_all
from tests.chaos.findings import Findings
from tests.chaos.spark_feed import NODE, SCHEMA, STREAM, Feed, Fleet
from tests.support.dispatch import environment
from tests.support.node import NodeProcess
from tests.support.redis import RedisServer
from tests.support.spark_cluster import BRIEF_JAVA, SparkCluster, still_running

ENGINES = ("rocksdb", "redis")
PIPELINES = ("ingest", "audience")

#: How a round goes, and how often; `executor` only where there are some.
VICTIMS = {"java": 3, "driver": 3, "all": 3, "worker": 2, "executor": 3}

#: Seconds: for a phase to come, start of Spark included; for a command to end that must end; for processes that are
#: left behind; between two looks at the phase.
PHASE_PATIENCE = 240.0
END_PATIENCE = 900.0
ORPHAN_PATIENCE = 120.0
LOOK = 0.003

#: Seconds for which a list of processes is good: to make one takes longer than some phases last.
LIST_AGE = 0.5

#: Attempts for each blow that counts, at most.
TRIES = 3

SETTINGS = {"spark.driver.memory": "512m"}
BATCH = 50  #: vehicles
MAX_ROWS, ALL_ROWS = 1000, 100_000  #: of a micro-batch; and of those of the last run, which nobody disturbs
LOCAL = "local[2,3]"  #: a task may fail twice, as on a cluster


class Phase(StrEnum):
    """What a run is doing."""

    STARTING = "starting"  #: Python, Java, Spark; until the pipeline has begun
    BEGINNING = "beginning"  #: no micro-batch yet
    COMPUTING = "computing"  #: Spark has planned a micro-batch
    WRITING = "writing"  #: files of it are staged
    MOVING = "moving"  #: the lake has decided to take it, and moves files
    PLACED = "placed"  #: they are in place, and Spark has not heard of it
    COMPACTING = "compacting"  #: one file is made of many
    REPLACING = "replacing"  #: the lake has decided that it takes their place
    PLANNING = "planning"  #: the audience is being computed
    PLANNED = "planned"  #: and not yet sent
    OPENED = "opened"  #: Spark has planned a micro-batch, and nothing of it has come to the node
    SENDING = "sending"  #: some of it has
    BETWEEN = "between"  #: the last micro-batch is done, and there is no next one yet


#: Seconds from the moment when a phase has come to the blow, at most: about as long as the phase lasts.
DELAYS = {
    Phase.STARTING: 8.0,
    Phase.PLANNING: 2.0,
    Phase.COMPUTING: 0.5,
    Phase.MOVING: 0.01,
    Phase.REPLACING: 0.01,
    Phase.SENDING: 12.0,
}
DELAY = 0.05


@dataclass
class Options:
    """What to do in one run."""

    pipeline: str = "ingest"
    rounds: int = 20
    minutes: float = math.inf  #: after which there is no further round
    engine: str = "rocksdb"
    cluster: bool = False
    seed: int = 1
    compact: bool = False  #: runs of ingest read what is there, compact all small files, and end
    rate: float = 100.0  #: messages a second into the stream
    vehicles: int = 9000  #: of a campaign
    send_rate: float = 300.0  #: vehicles a second; few, so that there are several micro-batches
    victims: Mapping[str, int] = field(default_factory=lambda: VICTIMS)
    phases: Sequence[Phase] = ()  #: to strike in, and in no others; else those of the pipeline are waited for
    data: Path | None = None
    quiet: bool = False


@dataclass(frozen=True)
class Blow:
    """A kill that was carried out."""

    victim: str
    phase: Phase
    again: bool  #: the micro-batch was one that an earlier blow had interrupted


@dataclass
class Outcome:
    """What came of it."""

    options: Options
    findings: Findings
    blows: list[Blow] = field(default_factory=list)
    vain: int = 0  #: blows that hit nothing of Spark's
    starts: int = 0
    figures: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.findings.passed


# -- a command and its processes


class Command:
    """`motorcade pipeline run …`, with everything it starts."""

    def __init__(self, words: Sequence[object], log: Path, env: Mapping[str, str]) -> None:
        self.began = time.time()
        self._log: IO[bytes] = log.open("ab")
        self._from = self._log.tell()
        self._path = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "motorcade", "pipeline", "run", *map(str, words)],
            env=environment(BRIEF_JAVA | dict(env)),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def said(self) -> str:
        """What this process has printed."""
        with self._path.open("rb") as log:
            log.seek(self._from)
            return log.read().decode(errors="replace")

    def family(self) -> list[psutil.Process]:
        """All that it has started and that run, but for itself."""
        with suppress(psutil.Error):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def wait(self, patience: float = END_PATIENCE) -> int | None:
        """Its exit code; None if it does not end."""
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Whatever is left of it goes."""
        family = self.family()
        strike([*family, psutil.Process(self.process.pid)] if self.running else family)
        self.process.wait()
        self._log.close()


def strike(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL, as close together as it goes."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def is_python(process: psutil.Process) -> bool:
    return _is(process, "python", "pyspark")


def is_driver_java(process: psutil.Process) -> bool:
    """Not the shell that starts it, nor the Java that the shell asks for a command line."""
    return _is(process, "java", "org.apache.spark.deploy.SparkSubmit")


def _is(process: psutil.Process, program: str, word: str) -> bool:
    try:
        return Path(process.exe()).name.startswith(program) and any(word in one for one in process.cmdline())
    except psutil.Error:
        return False


# -- what is killed


class Pipeline(ABC):
    """A pipeline in a folder: its command, and what can be seen of it from outside."""

    #: To wait for before a blow; those that come again and again.
    phases: Sequence[Phase] = ()

    #: A run ends by itself, and there is to be another one of the same.
    recurs = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: int | None = None  #: the micro-batch that was unfinished at the start

    @abstractmethod
    def words(self) -> list[object]:
        """The command."""

    def starting(self) -> None:
        """A process begins."""
        newest, done = self._newest("offsets"), self._newest("commits")
        self._open = newest if newest != done else None

    def look(self, began: float) -> tuple[Phase, bool]:
        """What the process that began at this time is doing, and whether it does so again."""
        status = _json(self.folder / "status.json")
        if status.get("started_at", 0.0) < began:
            return self._before(), False
        newest, done = self._newest("offsets"), self._newest("commits")
        if newest is None:
            return Phase.BEGINNING, False
        if newest == done:
            return self._between(), False
        return self._inside(newest), newest == self._open

    def _before(self) -> Phase:
        return Phase.STARTING

    def _between(self) -> Phase:
        return Phase.BETWEEN

    @abstractmethod
    def _inside(self, batch: int) -> Phase:
        """What is being done with a micro-batch that is under way."""

    def _newest(self, kind: str) -> int | None:
        with suppress(OSError):
            names = [path.name for path in (self.folder / "spark" / kind).iterdir()]
            return max((int(name) for name in names if name.isdigit()), default=None)
        return None


class Ingest(Pipeline):
    """A stream into a lake."""

    phases = (
        Phase.STARTING,
        Phase.COMPUTING,
        Phase.WRITING,
        Phase.MOVING,
        Phase.PLACED,
        Phase.COMPACTING,
        Phase.REPLACING,
        Phase.BETWEEN,
    )

    def __init__(self, place: Path, store: Sequence[object], *, compact: bool = False) -> None:
        super().__init__(place / "run")
        self.lake = place / "lake"
        self.recurs = compact
        self.last = False  #: this run reads what is there, and ends
        self.left_to_do: Counter[str] = Counter()  #: what was decided and not done when a process began
        self._schema = place / "schema.toml"
        self._schema.write_text(SCHEMA)
        self._store = store

    def words(self) -> list[object]:
        pace = ["--trigger", "once" if self.last or self.recurs else "continuous"]
        pace += ["--max-rows", str(ALL_ROWS if self.last else MAX_ROWS), *(["--compact"] if self.recurs else [])]
        source = ["--stream", STREAM, "--schema", self._schema, "--lake", self.lake, *self._store]
        return ["ingest", *source, "--checkpoint", self.folder, *pace]

    def starting(self) -> None:
        super().starting()
        for home in self.lake.glob(f"{judge.HIDDEN}/*"):
            ledger = _json(home / "ledger.json")
            self.left_to_do["compactions"] += bool(ledger.get("removes"))
            self.left_to_do["batches"] += bool(ledger.get("moves") and not ledger.get("removes"))

    def _between(self) -> Phase:
        phase = self._inside(self._newest("commits") or 0)  # --compact works when all is read
        return phase if phase in {Phase.COMPACTING, Phase.REPLACING} else Phase.BETWEEN

    def _inside(self, batch: int) -> Phase:
        for home in self.lake.glob(f"{judge.HIDDEN}/*"):
            ledger = _json(home / "ledger.json")
            if ledger.get("removes"):
                return Phase.REPLACING
            if ledger.get("moves"):
                return Phase.MOVING
            staged = _has_files(home / "staging")
            if ledger.get("batch") == batch:
                return Phase.COMPACTING if staged else Phase.PLACED
            if staged:
                return Phase.WRITING
        return Phase.COMPUTING


class Campaign(Pipeline):
    """An audience, and one message to it."""

    phases = (Phase.STARTING, Phase.PLANNING, Phase.PLANNED, Phase.OPENED, *[Phase.SENDING] * 4, Phase.BETWEEN)

    def __init__(
        self, place: Path, request: str, fleet: Fleet, broker: str, rate: float, arrived: Callable[[], int]
    ) -> None:
        super().__init__(place / request)
        self._arrived = arrived  #: how many batches the node has got, of all campaigns
        self._seen: tuple[int, int] | None = None  #: the open micro-batch, and how many there were when it was opened
        self.request = request
        self.fleet = fleet
        self._payload = place / f"{request}.txt"
        self._payload.write_text(request)
        self._broker = broker
        self._rate = rate

    def words(self) -> list[object]:
        who = ["--table", f"fleet={self.fleet.table}", "--sql", self.fleet.SQL, "--batch", BATCH]
        what = ["--request", self.request, "--payload", self._payload, "--rate", f"{self._rate:g}"]
        return ["audience", *who, *what, "--broker", self._broker, "--checkpoint", self.folder]

    def planned(self) -> list[str]:
        """The vehicles of all batches of the plan."""
        vins: list[str] = []
        for path in sorted((self.folder / "plan").glob("*.parquet")):
            for message in pq.read_table(path, columns=["message"], partitioning=None).column("message").to_pylist():
                vins += json.loads(message)["ids"]
        return vins

    def _before(self) -> Phase:
        if (self.folder / "plan").exists():
            return Phase.PLANNED if self._newest("offsets") is None else Phase.STARTING
        return Phase.PLANNING if (self.folder / "planning").exists() else Phase.STARTING

    def starting(self) -> None:
        super().starting()
        self._seen = None

    def _inside(self, batch: int) -> Phase:
        count = self._arrived()
        if self._seen is None or self._seen[0] != batch:
            self._seen = (batch, count)
        return Phase.SENDING if count > self._seen[1] else Phase.OPENED


def _has_files(staging: Path) -> bool:
    """In one of its folders, which may vanish while they are looked at."""
    with suppress(OSError):
        return any(staging.glob("*/*"))
    return False


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_bytes()))
    return {}


# -- a run


@dataclass(frozen=True)
class Aim:
    """Whom a blow would hit now."""

    victim: str  #: what those are that are hit; not always who was meant
    hit: list[psutil.Process]
    family: list[psutil.Process]  #: of the command
    counts: bool  #: Spark is there


class Run:
    """One pipeline under blows."""

    def __init__(self, options: Options, place: Path) -> None:
        self.options = options
        self.place = place
        self.random = Random(options.seed)
        self.findings = Findings()
        self.blows: list[Blow] = []
        self.vain = 0
        self.starts = 0
        self.figures: dict[str, int] = {}
        self.command: Command | None = None
        self.pipeline: Pipeline
        self._cluster: SparkCluster | None = None
        self._struck = False  #: the present process has got a blow, and may fail
        self._orphans: list[psutil.Process] = []
        self._feed: Feed | None = None
        self._campaigns: list[Campaign] = []

    def run(self) -> Outcome:
        began = time.monotonic()
        with self._stage():
            for _ in range(self.options.rounds * TRIES):
                late = time.monotonic() - began > self.options.minutes * 60
                if late or len(self.blows) >= self.options.rounds:
                    break
                self._round()
            if self.options.pipeline == "ingest":
                self._end_ingest()
            else:
                self._end_audience()
            self._look_for_orphans()
        seconds = time.monotonic() - began
        return Outcome(self.options, self.findings, self.blows, self.vain, self.starts, self.figures, seconds)

    @contextmanager
    def _stage(self) -> Iterator[None]:
        """The store, the node, the cluster; and nothing of it afterwards."""
        with ExitStack() as stack:
            store: list[str] = []
            if self.options.engine == "redis":
                store = ["--store", stack.enter_context(RedisServer()).url]
            self.node = stack.enter_context(NodeProcess(*store, config=NODE, data=self.place / "node", http=True))
            self.store: list[object] = [*store, "--data", self.node.data]
            if self.options.cluster:
                self._cluster = stack.enter_context(SparkCluster())
            stack.callback(self._end_command)
            if self.options.pipeline == "ingest":
                self._feed = Feed(self.node.port, self.random, self.options.rate)
                self._feed.start()
                self.pipeline = Ingest(self.place, self.store, compact=self.options.compact)
            else:
                self._next_campaign()
            yield

    def _next_campaign(self) -> None:
        number = len(self._campaigns) + 1
        fleet = Fleet.make(self.place / "fleets" / f"{number}.parquet", self.options.vehicles, self.random)
        broker = f"mqtt://{self.node.mqtt}"
        campaign = Campaign(
            self.place, f"campaign_{number}", fleet, broker, self.options.send_rate, lambda: sum(self._batches())
        )
        self._campaigns.append(campaign)
        self.pipeline = campaign

    # -- starting and ending

    def _end_command(self) -> None:
        if self.command is not None:
            self.command.close()

    def _start(self) -> None:
        self._end_command()
        master = self._cluster.url if self._cluster is not None else LOCAL
        words = [*self.pipeline.words(), "--master", master]
        for key, value in SETTINGS.items():
            words += ["--set", f"{key}={value}"]
        self.pipeline.starting()
        env = self._cluster.environment if self._cluster is not None else {}
        self.command = Command(words, self.place / "pipeline.log", env)
        self.starts += 1
        self._struck = False

    def _ensure_running(self) -> None:
        if self.command is not None:
            if self.command.running:
                return
            self._ended(self.command)
        self._start()

    def _ended(self, command: Command) -> None:
        """Nobody has ended it; it may have failed for a worker's sake, or be done."""
        if command.process.returncode == 0 and isinstance(self.pipeline, Campaign):
            self._next_campaign()
        elif not self._struck and (command.process.returncode != 0 or not self.pipeline.recurs):
            self.findings.add("failed", f"exit code {command.process.returncode}: {command.said[-1500:]}")

    # -- one round

    def _round(self) -> None:
        target = self.random.choice(self.options.phases or self.pipeline.phases)
        aim, phase, again = self._aim(self._victim(), target)
        assert self.command is not None
        if not self.command.running:
            return  # it was quicker; the next round looks at how it has ended
        strike(aim.hit)
        self._struck = True
        if aim.counts:
            self.blows.append(Blow(aim.victim, phase, again))
        else:
            self.vain += 1
        self._say(f"{aim.victim} while {phase}{' again' if again else ''}", aim.counts)
        if aim.victim in {"driver", "java", "all"}:
            self._orphans += aim.family
            self._await_end(aim)

    def _aim(self, victim: str, target: Phase) -> tuple[Aim, Phase, bool]:
        """Wait for a phase, and a random little longer; again, if the phase must be that one and is over by then."""
        end = time.monotonic() + PHASE_PATIENCE
        while True:
            aim = self._await(victim, target)
            delay = self.random.uniform(0.0, DELAYS.get(target, DELAY))
            time.sleep(delay)
            if delay > DELAY:
                aim = self._targets(victim)
            assert self.command is not None
            phase, again = self.pipeline.look(self.command.began)
            if not self.options.phases or phase is target or time.monotonic() > end:
                return aim, phase, again

    def _victim(self) -> str:
        possible = {name: share for name, share in self.options.victims.items() if self._cluster or name != "executor"}
        return self.random.choices(list(possible), list(possible.values()))[0]

    def _await(self, victim: str, target: Phase) -> Aim:
        """Until the run is in this phase, or any moment will do; whom to hit then."""
        end = time.monotonic() + PHASE_PATIENCE
        aim, listed = None, 0.0
        while True:
            self._ensure_running()
            if aim is None or time.monotonic() - listed > LIST_AGE:
                aim, listed = self._targets(victim), time.monotonic()
            assert self.command is not None
            if self.pipeline.look(self.command.began)[0] is target or listed > end:
                return aim
            time.sleep(LOOK)

    def _targets(self, victim: str) -> Aim:
        """Whom it hits: what there is just now. Before there is a worker there is Java, and before that Python."""
        assert self.command is not None
        driver = [psutil.Process(self.command.process.pid)] if self.command.running else []
        family = self.command.family()
        java = [process for process in family if is_driver_java(process)]
        workers = [process for process in family if is_python(process)]
        executors = self._cluster.executors() if self._cluster is not None else []
        workers += [child for one in executors for child in _children(one) if is_python(child)]
        hit = driver
        if victim == "executor" and executors:
            hit = [self.random.choice(executors)]
        elif victim == "worker" and workers:
            hit = [self.random.choice(workers)]
        elif victim == "all":
            hit = [*driver, *family, *executors, *workers]
            self.random.shuffle(hit)
        elif victim != "driver" and java:
            victim, hit = "java", java
        else:
            victim = "driver"
        return Aim(victim, hit, family, counts=bool(hit and java))

    def _await_end(self, aim: Aim) -> None:
        assert self.command is not None
        if self.command.wait() is None:
            self.findings.add("hung", f"after a blow to {aim.victim}: {self.command.said[-1500:]}")
            self.command.close()
        if self.random.random() < 0.5:  # else the next one begins while something of this one still runs
            still_running(aim.family, ORPHAN_PATIENCE)

    def _look_for_orphans(self) -> None:
        """What was started for a run that is dead must end by itself."""
        left = still_running(self._orphans, ORPHAN_PATIENCE)
        for process in left:
            self.findings.add("left behind", f"process {process.pid}")
        strike(left)

    # -- the end

    def _end_ingest(self) -> None:
        assert isinstance(self.pipeline, Ingest) and self._feed is not None
        self._feed.stop()
        self._stop()
        self.pipeline.last = True
        self._finish()
        found, ledger = judge.read(self.pipeline.lake), self._feed.ledger
        self._add(judge.lake(ledger, found))
        self.figures = {
            "messages": ledger.size,
            "of them published twice": ledger.repeated,
            "rows in the lake": sum(map(len, found.rows.values())),
            "dead letters": len(found.dead),
            "micro-batches": 1 + (self.pipeline._newest("commits") or 0),
            "files": found.files,
            "of them merged": found.merged,
            **{f"{what} that a start had to finish": count for what, count in self.pipeline.left_to_do.items()},
        }

    def _stop(self) -> None:
        """SIGTERM, which must not be an error."""
        assert self.command is not None
        if not self.command.running:
            return
        self.command.process.send_signal(signal.SIGTERM)
        code = self.command.wait()
        if code and not self._struck:
            self.findings.add("failed", f"exit code {code} after SIGTERM: {self.command.said[-1500:]}")

    def _finish(self) -> None:
        """Until it is done, without blows."""
        self._start()
        assert self.command is not None
        code = self.command.wait()
        if code != 0:
            self.findings.add("failed", f"at the end, exit code {code}: {self.command.said[-1500:]}")

    def _end_audience(self) -> None:
        if self.command is not None and (self._struck or self.command.wait() != 0):
            self.command.close()
            self._finish()
        accepted = self._accepted()
        for campaign in self._campaigns:
            planned = campaign.planned()
            found = judge.fanout(campaign.request, campaign.fleet.audience, planned, accepted.pop(campaign.request, []))
            self._add(found)
        for request in accepted:
            self.findings.add("invented", f"request {request}")
        audit = Command(
            ["audit", *self.store, "--master", "local[2]", "--set", "spark.driver.memory=1g"],
            self.place / "audit.log",
            {},
        )
        if audit.wait() != 0:
            self.findings.add("audit", audit.said[-1500:])
        audit.close()
        self.figures = {
            "campaigns": len(self._campaigns),
            "vehicles": sum(len(campaign.fleet.audience) for campaign in self._campaigns),
            "micro-batches": sum(1 + (campaign._newest("commits") or 0) for campaign in self._campaigns),
            "batches that came again": self._batches()[1],
        }

    def _add(self, found: Findings) -> None:
        for kind, words in found.by_kind.items():
            self.findings.by_kind[kind] += words

    def _web(self) -> httpx.Client:
        return self.node.web()

    def _accepted(self) -> dict[str, list[str]]:
        """VINs by request, as receipts name them: one for each delivery that the node has taken on."""
        found: dict[str, list[str]] = {}
        with self._web() as web:
            after = 0
            while True:
                params = {"after": after, "limit": 1000}
                page = web.get("streams/receipts/messages", params=params).raise_for_status().json()["data"]
                if not page:
                    return found
                for message in page:
                    receipt = json.loads(message["payload"])
                    if receipt["state"] == "accepted":
                        found.setdefault(receipt["request_id"], []).append(receipt["vin"])
                after = page[-1]["position"]

    def _batches(self) -> tuple[int, int]:
        """Batches that the node has taken, and those that it knew already: what blows have cost."""
        with self._web() as web:
            plugins = web.get("plugins").raise_for_status().json()["data"]
        (counters,) = [plugin["counters"] for plugin in plugins if plugin["name"] == "fanout"]
        return counters.get("batches", 0), counters.get("batches_repeated", 0)

    def _say(self, blow: str, counts: bool) -> None:
        if not self.options.quiet:
            number = f"round {len(self.blows)} of {self.options.rounds}" if counts else "in vain"
            print(f"{self.options.pipeline}: {number}: {blow}", flush=True)


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children(recursive=True)
    return []


def crash(options: Options) -> Outcome:
    """Run, and remove what it left behind, unless the data shall be kept somewhere."""
    with folder(options.data, options.pipeline) as place:
        return Run(options, place).run()


def report(outcome: Outcome) -> str:
    """What was hit, what came of it, and every finding."""
    options = outcome.options
    where = "a cluster of two workers" if options.cluster else LOCAL
    head = f"{options.pipeline} from {options.engine} on {where}, seed {options.seed}: {len(outcome.blows)} kills "
    head += f"(and {outcome.vain} before Spark was there), "
    victims = list(VICTIMS)
    table = Counter((blow.phase, blow.victim) for blow in outcome.blows)
    again = Counter(blow.phase for blow in outcome.blows if blow.again)
    lines = [f"{'killed while':<14}" + "".join(f"{name:>10}" for name in victims) + "   in a batch that came again"]
    for phase in Phase:
        if any(table[phase, name] for name in victims):
            counts = "".join(f"{table[phase, name] or '':>10}" for name in victims)
            lines.append(f"{phase:<14}{counts}   {again[phase] or ''}".rstrip())
    return "\n".join(
        [
            f"{head}{outcome.starts} starts, {outcome.seconds:.0f} s",
            "",
            *lines,
            "",
            *(f"{name:<24} {value}" for name, value in outcome.figures.items()),
            "",
            *outcome.findings.conclusion(),
        ]
    )


_PHASES, _VICTIMS = ", ".join(Phase), ", ".join(VICTIMS)


def _victims(given: str) -> dict[str, int]:
    try:
        return {name: VICTIMS[name] for name in given.split(",")}
    except KeyError as error:
        raise ArgumentTypeError(f"no victim {error}; there are {_VICTIMS}") from error


def _phases(given: str) -> tuple[Phase, ...]:
    try:
        return tuple(map(Phase, given.split(",")))
    except ValueError as error:
        raise ArgumentTypeError(f"{error}; there are {_PHASES}") from error


def _options(arguments: list[str]) -> list[Options]:
    line = parser("tests.chaos.spark", __doc__, rounds="kills per pipeline")
    line.add_argument("--minutes", type=float, default=math.inf, help="no further round after so many")
    add_runs(line, "pipeline", PIPELINES, default=",".join(PIPELINES))
    line.add_argument("--engine", choices=ENGINES, default="rocksdb")
    line.add_argument("--cluster", action="store_true", help="on a Spark cluster of three processes; kills executors")
    line.add_argument("--compact", action="store_true", help="ingest: each run ends with a compaction of everything")
    line.add_argument("--victim", dest="victims", type=_victims, default=VICTIMS, help=f"only these, of {_VICTIMS}")
    line.add_argument("--phase", dest="phases", type=_phases, default=(), help=f"strike in these only, of {_PHASES}")
    given = line.parse_args(arguments)
    if [*given.victims] == ["executor"] and not given.cluster:
        line.error("--victim executor: there are executors on a cluster only (--cluster)")
    return [Options(**run) for run in options_of_runs(given, "pipeline")]


def main(arguments: list[str]) -> int:
    return run_all(_options(arguments), crash, report, lambda outcome: outcome.passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
