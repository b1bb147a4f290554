"""`motorcade queue` about compacted queues of a real node.

They are the trays of tests/unit/http/trays.py, beside declared queues of the plugin in the box: which queue a name
means and what is printed about it does not depend on who keeps it. Commands run in this process, which is quicker,
unless it matters that they are processes.
"""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

import pytest

from motorcade.cli import main
from motorcade.cli._compacted import moment
from tests.scenarios.witness import wait_until
from tests.support import wire
from tests.support.node import ROOT, NodeProcess
from tests.unit.cli.conftest import PATIENCE, environment

COMMAND = (sys.executable, "-m", "motorcade", "queue")
CONFIG = f"""\
[plugins.queues.queue.jobs]
topics = ["jobs/#"]

[plugins.queues.queue.levels]
topics = ["levels/#"]
priorities = 3

[plugins.ecq]
enabled = false

[plugins.trays]
path = "{ROOT}/tests/unit/http/trays.py"
"""


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(http=True, config=CONFIG) as running:
        yield running


@pytest.fixture
def at(node: NodeProcess) -> tuple[str, str]:
    return ("--http", str(node.http))


Run = Callable[..., "Done"]


@dataclass(frozen=True)
class Done:
    """What a command has left behind."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`run("queue", "list", …)` in an empty folder, with a developer's variables and terminal out of the way."""
    for name in [name for name in os.environ if name.startswith("MOTORCADE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def run_(*args: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["motorcade", *map(str, args)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    return run_


def fill(node: NodeProcess, place: str, *entries: tuple[str, bytes], progress: dict[str, int] | None = None) -> None:
    """Values by key into `{form}/{name}`, and how far its consumers are."""
    with wire.Client(node) as client:
        client.connect("filler")
        for key, payload in entries:
            client.publish(f"trays/{place}/{key}", payload, 1)
        for who, number in (progress or {}).items():
            client.publish(f"trays/consumer/{place}/{who}", b"%d" % number, 1)


def numbered(count: int) -> list[tuple[str, bytes]]:
    return [(f"k{number}", b"%d" % number) for number in range(1, count + 1)]


def fields(text: str) -> dict[str, str]:
    """Lines of a name and a value."""
    pairs = (line.split(maxsplit=1) for line in text.splitlines() if line.strip())
    return {pair[0]: pair[1] if len(pair) > 1 else "" for pair in pairs}


# -- looking


def test_the_queue_of_a_client_is_shown_with_its_progress(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    """Depth, bytes, the age of the oldest, and how far its owner is: in words and in JSON."""
    fill(node, "exclusive/car-1", ("door", b"open"), ("fuel", b"31"), ("door", b"shut"), progress={"car-1": 2})
    done = run("queue", "show", "car-1", *at)
    assert (0, "") == (done.returncode, done.stderr)
    shown = fields(done.stdout)
    view = json.loads(run("queue", "show", "car-1", *at, "--json").stdout)
    assert f"{datetime.fromtimestamp(view['oldest'], UTC).astimezone():%Y-%m-%d %H:%M:%S}" == shown.pop("oldest")
    assert {
        "kind": "exclusive",
        "name": "car-1",
        "messages": "2",
        "bytes": "6",
        "first": "2",
        "last": "3",
        "connected": "no",
        "progress": "2",
        "waiting": "1",
        "in_flight": "0",
        "acked_at": "",
    } == shown
    assert ("exclusive", 2, 6, [2]) == (
        view["kind"],
        view["messages"],
        view["bytes"],
        [consumer["progress"] for consumer in view["consuming"]],
    )


def test_a_queue_that_nobody_has_consumed_waits_with_all_it_has(
    run: Run, node: NodeProcess, at: tuple[str, str]
) -> None:
    fill(node, "exclusive/car-new", *numbered(3))
    shown = fields(run("queue", "show", "car-new", *at).stdout)
    assert ("0", "3", "no") == (shown["progress"], shown["waiting"], shown["connected"])


def test_a_shared_queue_is_shown_with_all_its_consumers(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    fill(node, "shared/map", *numbered(4), progress={"c-2": 4, "c-1": 1})
    head, table = run("queue", "show", "map", *at).stdout.split("\n\n")
    assert ("shared", "4", "2") == tuple(fields(head)[key] for key in ("kind", "messages", "consumers"))
    lines = [line.split() for line in table.splitlines() if line.startswith(("client", "c-"))]
    assert ["client", "connected", "progress", "waiting", "in_flight", "acked_at"] == lines[0]
    assert [["c-1", "no", "1", "3", "0"], ["c-2", "no", "4", "0", "0"]] == lines[1:]


def test_the_list_has_all_kinds_and_flags_choose(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    fill(node, "exclusive/list-a", ("k", b"12345"))
    fill(node, "exclusive/list-b", ("k", b"1"))
    fill(node, "shared/list-c", ("k", b"1"))

    def listed(*flags: object) -> list[tuple[str, str]]:
        found = json.loads(run("queue", "list", *flags, *at, "--json").stdout)
        return [(entry["name"], entry["kind"]) for entry in found]

    everything = listed()
    assert everything == listed("--declared", "--exclusive", "--shared")
    assert {("jobs", "regular"), ("list-a", "exclusive"), ("list-b", "exclusive"), ("list-c", "shared")} <= {
        *everything
    }
    assert everything == listed("--declared") + listed("--exclusive") + listed("--shared")
    assert {"regular"} == {kind for _, kind in listed("--declared")}
    assert {"exclusive"} == {kind for _, kind in listed("--exclusive")}
    assert everything[:3] == listed("--limit", 3)
    assert 1 == len(listed("--exclusive", "--limit", 1))
    table = run("queue", "list", *at).stdout.splitlines()
    assert ["name", "origin", "kind", "topics", "messages", "bytes"] == table[0].split()[:6]
    (row,) = [line.split() for line in table if line.startswith("list-a ")]
    assert ["list-a", "exclusive", "1", "5", "0", "1"] == row


def test_more_than_a_page_is_listed_page_by_page(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    with wire.Client(node) as client:
        client.connect("filler")
        for number in range(520):
            client.publish(f"trays/exclusive/paged-{number:03}/k", b"1", 1)
    found = json.loads(run("queue", "list", "--exclusive", *at, "--json").stdout)
    assert [f"paged-{number:03}" for number in range(520)] == [
        entry["name"] for entry in found if entry["name"].startswith("paged-")
    ]


def test_messages_are_read_without_being_taken(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    fill(node, "exclusive/reader", *numbered(5), ("k2", b"newer"))
    done = run("queue", "read", "reader", *at)
    wanted = ["1 trays/reader/k1 1", "3 trays/reader/k3 3", "4 trays/reader/k4 4", "5 trays/reader/k5 5"]
    assert (0, [*wanted, "6 trays/reader/k2 newer"]) == (done.returncode, done.stdout.splitlines())
    assert wanted[1:3] == run("queue", "read", "reader", "--after", 1, "--limit", 2, *at).stdout.splitlines()
    found = json.loads(run("queue", "read", "reader", "--exclusive", *at, "--json").stdout)
    assert [1, 3, 4, 5, 6] == [entry["position"] for entry in found]
    assert {"reader"} == {entry["topic"].split("/")[1] for entry in found}


# -- which one is meant


@pytest.fixture
def three(node: NodeProcess) -> None:
    """A queue of each kind of the same name."""
    with wire.Client(node) as client:
        client.connect("jobber")
        client.publish("jobs/x", b"declared", 1)
    fill(node, "exclusive/jobs", ("k", b"exclusive"))
    fill(node, "shared/jobs", ("k", b"shared"))


@pytest.mark.usefixtures("three")
def test_a_name_means_the_declared_queue_first(run: Run, at: tuple[str, str]) -> None:
    """Flags choose another one, for every verb that looks."""
    for flags, kind in (((), "regular"), (("--exclusive",), "exclusive"), (("--shared",), "shared")):
        assert kind == json.loads(run("queue", "show", "jobs", *flags, *at, "--json").stdout)["kind"]
        said = "declared" if kind == "regular" else kind
        for verb in ("read", "tail"):
            assert {said} == {line.split()[-1] for line in run("queue", verb, "jobs", *flags, *at).stdout.splitlines()}


def test_the_queue_of_a_client_goes_before_a_shared_one(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    fill(node, "shared/both", ("k", b"1"))
    assert "shared" == json.loads(run("queue", "show", "both", *at, "--json").stdout)["kind"]
    fill(node, "exclusive/both", ("k", b"1"))
    assert "exclusive" == json.loads(run("queue", "show", "both", *at, "--json").stdout)["kind"]


@pytest.mark.parametrize("verb", ["show", "read", "tail"])
def test_what_is_nowhere_is_told_with_all_places_looked_at(run: Run, at: tuple[str, str], verb: str) -> None:
    done = run("queue", verb, "nope", *at)
    assert (1, "") == (done.returncode, done.stdout)
    for said in ("there is no queue 'nope'; there are: jobs", "no exclusive tray 'nope'", "no shared tray 'nope'"):
        assert said in done.stderr
    assert done.stderr.endswith("(NOT_FOUND)\n")
    only = run("queue", verb, "nope", "--shared", *at).stderr
    assert "no shared tray 'nope'" in only and "exclusive" not in only


def test_odd_client_ids_are_names_too(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    for name in ("Grüße", "a b", "100%", "?x=1", "..", "--exclusive"):
        fill(node, f"exclusive/{name}", ("k", b"1"), progress={name: 1})
        for verb in (("show",), ("read",), ("tail",), ("rewind", "--to", "1")):
            done = run("queue", *verb, *at, "--", name)
            assert (0, "") == (done.returncode, done.stderr), (verb, name)


# -- tail


def test_the_tail_is_the_last_messages(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    """Also where most numbers are of superseded values, and of a declared queue."""
    fill(node, "exclusive/gaps", *numbered(30), *[("k1", b"again")] * 200)
    wanted = [f"{number} trays/gaps/k{number} {number}" for number in range(2, 31)] + ["230 trays/gaps/k1 again"]
    assert wanted[-10:] == run("queue", "tail", "gaps", *at).stdout.splitlines()
    assert wanted[-3:] == run("queue", "tail", "gaps", "-n", 3, *at).stdout.splitlines()
    assert wanted == run("queue", "tail", "gaps", "--limit", 1000, *at).stdout.splitlines()
    assert "" == run("queue", "tail", "gaps", "-n", 0, *at).stdout
    assert [29, 30, 230] == [
        entry["position"] for entry in json.loads(run("queue", "tail", "gaps", "-n", 3, *at, "--json").stdout)
    ]
    run("queue", "create", "tailed", "-t", "tailed/#", *at)
    with wire.Client(node) as client:
        client.connect("jobber")
        for number in range(12):
            client.publish(f"tailed/{number}", b"%d" % number, 1)
    assert ["9", "10", "11"] == [
        line.split()[-1] for line in run("queue", "tail", "tailed", "-n", 3, *at).stdout.splitlines()
    ]


class Following:
    """`motorcade queue tail --follow`, line by line."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "tail", "--follow", "--interval", "0.1", *args],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def line(self) -> str:
        """The next one; pytest's own time limit ends a wait in vain."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def ended(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, said


def test_following_prints_what_is_appended_until_stopped(node: NodeProcess, at: tuple[str, str]) -> None:
    fill(node, "exclusive/followed", ("a", b"1"), ("b", b"2"))
    with Following("followed", "-n", "1", *at) as following:
        assert "2 trays/followed/b 2" == following.line()
        fill(node, "exclusive/followed", ("a", b"3"), ("c", b"4"))
        assert "3 trays/followed/a 3" == following.line()
        assert "4 trays/followed/c 4" == following.line()
        fill(node, "exclusive/followed", ("c", b"5"))
        assert "5 trays/followed/c 5" == following.line()
        following.process.send_signal(signal.SIGINT)
        assert (0, "") == following.ended()


def test_following_in_json_is_a_line_for_each(node: NodeProcess, at: tuple[str, str]) -> None:
    fill(node, "shared/lines", ("a", b"old"))
    with Following("lines", "--json", *at) as following:
        for number, payload in ((1, "old"), (2, "new")):
            found = json.loads(following.line())
            assert (number, "trays/lines/a", payload) == (found["position"], found["topic"], found["payload"])
            fill(node, "shared/lines", ("a", b"new"))


def test_following_ends_with_the_queue(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    fill(node, "exclusive/short-lived", ("a", b"1"))
    with Following("short-lived", *at) as following:
        assert "1 trays/short-lived/a 1" == following.line()
        assert 0 == run("queue", "delete", "short-lived", "--exclusive", "--yes", *at).returncode
        code, said = following.ended()
    assert 1 == code
    assert "there is no exclusive tray 'short-lived'" in said


# -- rewinding


def test_a_rewind_is_previewed_and_done(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    fill(node, "exclusive/again", *numbered(9), ("k1", b"newer"), progress={"again": 10})

    def progress() -> int:
        view = json.loads(run("queue", "show", "again", *at, "--json").stdout)
        return int(view["consuming"][0]["progress"])

    seen = run("queue", "rewind", "again", "--to", 3, "--preview", *at)
    assert (0, "") == (seen.returncode, seen.stderr)
    assert seen.stdout.splitlines() == [
        "client 'again' would get 8 messages (numbers 3 to 10, 12 bytes)",
        "its progress would go from 10 to 2",
        "nothing was changed (--preview)",
    ]
    assert 10 == progress()
    done = run("queue", "rewind", "again", "--to", 3, *at)
    assert done.stdout.splitlines() == [
        "client 'again' gets 8 messages (numbers 3 to 10, 12 bytes)",
        "its progress went from 10 to 2",
    ]
    assert 2 == progress()
    ahead = run("queue", "rewind", "again", "--exclusive", "--to", 10, *at)
    assert ahead.stdout.splitlines() == [
        "client 'again' gets 1 message (number 10, 5 bytes)",
        "its progress went from 2 to 9",
        "7 that it has not acknowledged are skipped",
    ]
    end = run("queue", "rewind", "again", "--to", 11, "--preview", *at)
    assert end.stdout.splitlines() == [
        "client 'again' would get nothing until something is appended",
        "its progress would go from 9 to 10",
        "1 that it has not acknowledged would be skipped",
        "nothing was changed (--preview)",
    ]
    same = run("queue", "rewind", "again", "--to", 10, *at)
    assert "its progress stays at 9" in same.stdout
    told = json.loads(run("queue", "rewind", "again", "--to", 0, "--preview", *at, "--json").stdout)
    assert (True, 9, 0, 9) == tuple(told[key] for key in ("preview", "before", "progress", "messages"))


def test_one_consumer_of_a_shared_queue_is_rewound(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    fill(node, "shared/news", *numbered(3), progress={"one": 3, "two": 3})
    done = run("queue", "rewind", "news", "--shared", "--consumer", "two", "--to", 2, *at)
    assert "client 'two' of shared queue 'news' gets 2 messages (numbers 2 to 3, 2 bytes)" in done.stdout
    view = json.loads(run("queue", "show", "news", *at, "--json").stdout)
    assert {"one": 3, "two": 1} == {entry["client"]: entry["progress"] for entry in view["consuming"]}


def test_a_time_is_written_as_people_write_it(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    """A while ago, the time of this machine as `queue show` prints it, a time with a zone, seconds since the epoch."""
    fill(node, "exclusive/since", *numbered(2), progress={"since": 2})
    minute = datetime.now(UTC).astimezone() - timedelta(minutes=1)
    for given in (
        "2h",
        "1m",
        f"{minute:%Y-%m-%d %H:%M:%S}",
        minute.replace(tzinfo=None).isoformat(),
        minute.isoformat(),
        f"@{int(time.time()) - 60}",
    ):
        told = json.loads(run("queue", "rewind", "since", "--since", given, "--preview", *at, "--json").stdout)
        assert (0, 2) == (told["progress"], told["messages"]), given
    told = json.loads(run("queue", "rewind", "since", "--since", "0s", "--preview", *at, "--json").stdout)
    assert (2, 0) == (told["progress"], told["messages"])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h", {"ago": 7200}),
        ("1.5d", {"ago": 129600}),
        ("45", {"ago": 45}),
        ("@1790000000", {"since": 1790000000.0}),
        ("2026-11-15T08:30:00Z", {"since": 1794731400.0}),
        ("2026-11-15 09:30:00+01:00", {"since": 1794731400.0}),
        ("2026-11-15T08:30:00.5Z", {"since": 1794731400.5}),
    ],
)
def test_moments(text: str, seconds: dict[str, float]) -> None:
    assert seconds == moment(text)


def test_a_time_without_a_zone_is_that_of_the_machine(node: NodeProcess, at: tuple[str, str]) -> None:
    """The same text means another moment elsewhere."""
    fill(node, "exclusive/zones", *numbered(1), progress={"zones": 1})
    text = f"{datetime.now(UTC) - timedelta(hours=1):%Y-%m-%d %H:%M:%S}"

    def rewound(zone: str) -> int:
        done = subprocess.run(
            [*COMMAND, "rewind", "zones", "--since", text, "--preview", *at, "--json"],
            env=environment({"TZ": zone}),
            capture_output=True,
            timeout=PATIENCE,
            check=True,
        )
        return int(json.loads(done.stdout)["messages"])

    assert (1, 0) == (rewound("UTC0"), rewound("WEST5"))  # five hours behind: there it is a time to come


# -- deleting


def test_a_compacted_queue_is_deleted_only_by_its_kind(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    """The name alone is that of a declared queue; what may have been meant is said."""
    fill(node, "exclusive/doomed", ("k", b"1"))
    fill(node, "shared/doomed", ("k", b"1"))
    done = run("queue", "delete", "doomed", "--yes", *at)
    assert (1, "") == (done.returncode, done.stdout)
    assert "there is no queue 'doomed'" in done.stderr
    assert "the compacted queue of client 'doomed' is meant with --exclusive" in done.stderr
    gone = run("queue", "delete", "doomed", "--exclusive", "--yes", *at)
    assert (0, "the compacted queue of client 'doomed' is deleted\n") == (gone.returncode, gone.stdout)
    assert "shared queue 'doomed' is meant with --shared" in run("queue", "delete", "doomed", "--yes", *at).stderr
    gone = run("queue", "delete", "doomed", "--shared", "--yes", *at, "--json")
    assert {"kind": "shared", "name": "doomed", "result": "deleted"} == json.loads(gone.stdout)
    assert "meant with" not in run("queue", "delete", "doomed", "--yes", *at).stderr
    assert 1 == run("queue", "show", "doomed", *at).returncode


def test_deleting_asks_on_a_terminal(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    fill(node, "exclusive/asked", ("k", b"1"))
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [*COMMAND, "delete", "asked", "--exclusive", *at],
            env=environment(),
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        os.write(ours, b"n\n")
        out, _ = process.communicate(timeout=PATIENCE)
    finally:
        os.close(ours)
        os.close(theirs)
    assert 1 == process.returncode
    assert "Delete the compacted queue of client 'asked' with all messages in it?" in out
    assert 0 == run("queue", "show", "asked", *at).returncode


# -- what is wrong is said


WRONG: list[tuple[tuple[object, ...], int, str]] = [
    (("show",), 2, "Missing argument 'NAME'"),
    (("show", ""), 2, "a queue has a name, or the client id of its owner"),
    (("show", "x", "--exclusive", "--shared"), 2, "--exclusive, --shared: a queue is one or the other"),
    (("read", "x", "--after", -1), 2, "--after"),
    (("read", "x", "--after", 2**63), 2, "--after"),
    (("read", "x", "--limit", 0), 2, "--limit"),
    (("read", "x", "--exclusive", "--shared"), 2, "a queue is one or the other"),
    (("tail", "x", "-n", -1), 2, "--limit"),
    (("tail", "x", "-n", "ten"), 2, "--limit"),
    (("tail", "x", "--interval", 0), 2, "--interval"),
    (("tail", "levels", "--follow"), 2, "queue 'levels' has priorities: new messages are not at its end"),
    (("list", "--limit", 0), 2, "--limit"),
    (("rewind",), 2, "Missing argument 'CLIENT'"),
    (("rewind", "wrong"), 2, "--to, --since: say one of them: the number that comes next, or a time"),
    (("rewind", "wrong", "--to", 1, "--since", "2h"), 2, "say one of them"),
    (("rewind", "", "--to", 1), 2, "a queue has a name, or the client id of its owner"),
    (("rewind", "wrong", "--to", -1), 2, "--to"),
    (("rewind", "wrong", "--to", "first"), 2, "--to"),
    (("rewind", "wrong", "--to", 2**63), 2, "--to"),
    (("rewind", "wrong", "--to", 99), 1, "to = 99: the last number is 3"),
    (("rewind", "wrong", "--since", "yesterday"), 2, "--since: 'yesterday' is no time; write 7d, 12h, 30m, 45s"),
    (("rewind", "wrong", "--since", "2026-13-40"), 2, "'2026-13-40' is no time"),
    (("rewind", "wrong", "--since", "@x"), 2, "'@x' is no time"),
    (("rewind", "wrong", "--since", "@" + "9" * 400), 2, "is no time"),
    (("rewind", "wrong", "--since", "9" * 400 + "d"), 2, "is no time"),
    (("rewind", "wrong", "--since", "-2h"), 2, "'-2h' is no time"),
    (("rewind", "wrong", "--since", ""), 2, "'' is no time"),
    (("rewind", "wrong", "--consumer", "x", "--to", 1), 2, "--consumer: the queue of a client has no other consumer"),
    (("rewind", "wrong", "--shared", "--to", 1), 2, "--consumer: a shared queue has several; name the client"),
    (("rewind", "wrong", "--shared", "--consumer", "", "--to", 1), 2, "a shared queue has several; name the client"),
    (("rewind", "wrong", "--exclusive", "--shared", "--to", 1), 2, "a queue is one or the other"),
    (("rewind", "nobody", "--to", 1), 1, "there is no exclusive tray 'nobody'"),
    (("rewind", "wrong", "--shared", "--consumer", "x", "--to", 1), 1, "there is no shared tray 'wrong'"),
    (("delete", "wrong", "--exclusive"), 2, "--yes: there is no terminal to ask on; say that you mean it"),
    (("delete", "", "--exclusive", "--yes"), 2, "a queue has a name"),
    (("delete", "nobody", "--exclusive", "--yes"), 1, "there is no exclusive tray 'nobody'"),
    (("delete", "x", "--exclusive", "--shared", "--yes"), 2, "a queue is one or the other"),
]


@pytest.fixture(scope="module")
def wrong(node: NodeProcess) -> None:
    """The queue that wrong arguments are about."""
    fill(node, "exclusive/wrong", *numbered(3), progress={"wrong": 3})


@pytest.mark.usefixtures("wrong")
@pytest.mark.parametrize(("words", "code", "wanted"), WRONG, ids=[" ".join(map(str, row[0]))[:60] for row in WRONG])
def test_what_is_wrong_is_said(
    run: Run, at: tuple[str, str], words: tuple[object, ...], code: int, wanted: str
) -> None:
    """With what is wrong and what to write; nothing goes to standard output."""
    done = run("queue", *words, *at)
    said = " ".join(done.stderr.replace("│", " ").split())
    assert (code, "") == (done.returncode, done.stdout), said
    assert wanted in said
    assert "Traceback" not in said


def test_a_name_that_is_not_text_is_refused(at: tuple[str, str]) -> None:
    """Arguments are bytes; client ids are UTF-8."""
    done = subprocess.run(
        [*(word.encode() for word in COMMAND), b"show", b"\xff", *(word.encode() for word in at)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (2, "") == (done.returncode, done.stdout)
    assert "is not UTF-8" in done.stderr and "Traceback" not in done.stderr


# -- with the plugin in the box


@pytest.fixture(scope="module")
def hub() -> Iterator[NodeProcess]:
    """A node as it comes."""
    with NodeProcess(http=True) as running:
        yield running


def console(*args: object) -> str:
    """What `motorcade ARGS` prints, which must go well."""
    done = subprocess.run(
        [sys.executable, "-m", "motorcade", *map(str, args)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout


def test_everything_can_be_done_on_the_console(run: Run, hub: NodeProcess) -> None:
    """Append, consume, look, go back, consume again, delete: with `pub`, `sub` and `queue`, as the guide tells."""
    at, mqtt = ("--http", str(hub.http)), ("-p", hub.port, "-q", 1)
    for key, value in (("door", "open"), ("fuel", "31"), ("door", "shut")):
        console("pub", *mqtt, "-t", f"$ECQ/w/car-1/{key}", "-m", value)
    consume = ("sub", *mqtt, "-i", "car-1", "-t", "$ECQ/car-1/#", "-v", "-W", PATIENCE)
    assert "$ECQ/car-1/fuel 31\n$ECQ/car-1/door shut\n" == console(*consume, "-C", 2)

    def progress() -> str:
        return fields(run("queue", "show", "car-1", *at).stdout)["progress"]

    wait_until(lambda: progress() == "3", "its acknowledgements have been read")
    shown = fields(run("queue", "show", "car-1", *at).stdout)
    assert ("exclusive", "2", "2", "3", "3", "0") == tuple(
        shown[key] for key in ("kind", "messages", "first", "last", "progress", "waiting")
    )
    assert shown["acked_at"] and shown["oldest"]
    assert ["2 $ECQ/car-1/fuel 31", "3 $ECQ/car-1/door shut"] == run("queue", "tail", "car-1", *at).stdout.splitlines()

    seen = run("queue", "rewind", "car-1", "--since", "2h", "--preview", *at).stdout.splitlines()
    assert seen[0].startswith("client 'car-1' would get 2 messages (numbers 2 to 3, ")
    assert "3" == progress()
    done = run("queue", "rewind", "car-1", "--to", 3, *at).stdout.splitlines()
    assert "its progress went from 3 to 2" == done[1]
    assert "$ECQ/car-1/door shut\n" == console(*consume, "-C", 1)
    wait_until(lambda: progress() == "3", "its acknowledgement has been read")

    # The other way: the consumer asks by itself.
    console("pub", *mqtt, "-i", "car-1", "-t", "$ECQ/rewind/car-1", "-m", "0")
    assert "$ECQ/car-1/fuel 31\n$ECQ/car-1/door shut\n" == console(*consume, "-C", 2)

    assert 0 == run("queue", "delete", "car-1", "--exclusive", "--yes", *at).returncode
    assert "car-1" not in run("queue", "list", "--exclusive", *at).stdout
    console("pub", *mqtt, "-t", "$ECQ/w/car-1/door", "-m", "anew")
    assert "4 $ECQ/car-1/door anew\n" == run("queue", "read", "car-1", *at).stdout  # numbers are not used again


def test_each_consumer_of_a_shared_queue_has_its_own_progress(run: Run, hub: NodeProcess) -> None:
    at, mqtt = ("--http", str(hub.http)), ("-p", hub.port, "-q", 1)
    for key in ("a", "b"):
        console("pub", *mqtt, "-t", f"$SCQ/w/fleet/{key}", "-m", key)
    for client in ("c-1", "c-2"):
        assert "a\nb\n" == console("sub", *mqtt, "-i", client, "-t", "$SCQ/fleet/#", "-C", 2, "-W", PATIENCE)

    def progress() -> dict[str, int]:
        view = json.loads(run("queue", "show", "fleet", *at, "--json").stdout)
        return {consumer["client"]: consumer["progress"] for consumer in view["consuming"]}

    wait_until(lambda: progress() == {"c-1": 2, "c-2": 2}, "their acknowledgements have been read")
    done = run("queue", "rewind", "fleet", "--shared", "--consumer", "c-2", "--to", 2, *at)
    assert done.stdout.startswith("client 'c-2' of shared queue 'fleet' gets 1 message (number 2, ")
    assert {"c-1": 2, "c-2": 1} == progress()
    (row,) = [line.split() for line in run("queue", "list", *at).stdout.splitlines() if line.startswith("fleet ")]
    assert ["fleet", "shared", "2"] == row[:3]


#: Arguments that only the plugin can judge, and what it must say: what is wrong, where, and what to do.
REFUSED: list[tuple[tuple[object, ...], tuple[str, ...]]] = [
    (("show", "nope"), ("no queue 'nope'", "client 'nope'", "$ECQ/w/nope/KEY", "$SCQ/w/nope/KEY")),
    (("show", "nope", "--exclusive"), ("client 'nope'", "$ECQ/w/nope/KEY")),
    (("show", "nope", "--shared"), ("queue 'nope'", "$SCQ/w/nope/KEY")),
    (("read", "nope", "--shared"), ("queue 'nope'", "$SCQ/w/nope/KEY")),
    (("tail", "nope", "--exclusive"), ("client 'nope'", "$ECQ/w/nope/KEY")),
    (("delete", "nope", "--exclusive", "--yes"), ("client 'nope'", "$ECQ/w/nope/KEY")),
    (("delete", "nope", "--yes"), ("no queue 'nope'",)),
    (("rewind", "nope", "--to", 1), ("client 'nope'", "$ECQ/w/nope/KEY")),
    (("rewind", "nope", "--since", "1h", "--shared", "--consumer", "c"), ("queue 'nope'", "$SCQ/w/nope/KEY")),
    (("rewind", "judged", "--to", 9), ("to: 9", "between 0 and 4", "the last number is 3")),
    (("rewind", "judged", "--to", 2**62), (f"to: {2**62}", "the last number is 3")),
    (("rewind", "judged", "--shared", "--consumer", "nobody", "--to", 1), ("queue 'judged'", "no consumer 'nobody'")),
]


@pytest.fixture(scope="module")
def judged(hub: NodeProcess) -> None:
    with wire.Client(hub) as client:
        client.connect("filler")
        for root in ("$ECQ", "$SCQ"):
            for key, payload in numbered(3):
                client.publish(f"{root}/w/judged/{key}", payload, 1)


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize(("words", "wanted"), REFUSED, ids=[" ".join(map(str, row[0])) for row in REFUSED])
def test_what_the_plugin_refuses_is_said(
    run: Run, hub: NodeProcess, words: tuple[object, ...], wanted: tuple[str, ...]
) -> None:
    done = run("queue", *words, "--http", str(hub.http))
    assert (1, "") == (done.returncode, done.stdout)
    assert [] == [word for word in wanted if word not in done.stderr], done.stderr
    assert 3 == len(run("queue", "read", "judged", "--exclusive", "--http", str(hub.http)).stdout.splitlines())


def test_a_node_without_the_plugin_says_what_to_load(run: Run) -> None:
    """What it has is listed all the same."""
    config = '[plugins.ecq]\nenabled = false\n\n[plugins.queues.queue.jobs]\ntopics = ["jobs/#"]\n'
    with NodeProcess(http=True, config=config) as node:
        at = ("--http", str(node.http))
        listed = run("queue", "list", *at)
        assert 0 == listed.returncode and "jobs" in listed.stdout
        assert 1 == listed.stderr.count("note: this node has no compacted queues: plugin 'ecq' is not loaded")
        assert "jobs" in run("queue", "show", "jobs", *at).stdout
        for words in (("list", "--exclusive"), ("show", "x", "--shared"), ("show", "x"), ("rewind", "x", "--to", 1)):
            done = run("queue", *words, *at)
            assert (1, "") == (done.returncode, done.stdout)
            assert 1 == done.stderr.count("`motorcade plugin load ecq`")
        assert 0 == run("plugin", "unload", "queues", *at).returncode
        nothing = run("queue", "list", *at)
        assert (1, "") == (nothing.returncode, nothing.stdout)
        assert "`motorcade plugin load queues`" in nothing.stderr
        assert 0 == run("plugin", "load", "ecq", *at).returncode
        listed = run("queue", "list", *at)
        assert (0, "no queues\n") == (listed.returncode, listed.stdout)
        assert "`motorcade plugin load queues`" in listed.stderr
