"""`motorcade queue` about compacted queues: the command, the control port and the plugin together.

Beside them stand declared queues, since a name may be one of each. What only the control port shows is in
tests/unit/http/test_compacted.py.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from motorcade.cli._compacted import moment
from tests.scenarios.witness import wait_until
from tests.support.commands import PATIENCE, start_process
from tests.support.compacted import Compacted
from tests.support.consumers import fill, settled, take, unique
from tests.support.local import LocalNode
from tests.support.operator import Operator
from tests.unit.cli.conftest import Run

CONFIG = """\
[plugins.queues.queue.jobs]
topics = ["jobs/#"]

[plugins.queues.queue.levels]
topics = ["levels/#"]
priorities = 3
"""


@pytest.fixture
def queue(node: LocalNode) -> Compacted:
    return Compacted(node, unique("car"))


def consume(operator: Operator, queue: Compacted, count: int, client_id: str = "") -> None:
    """Have a consumer acknowledge so many messages and leave."""
    with queue.consumer(client_id=client_id) as client:
        take(client, count)
        settled(client)
        client.disconnect()
    wait_until(lambda: not any(each["connected"] for each in queue.shown(operator)["consuming"]), "it is gone")


def numbered(count: int) -> list[tuple[str, bytes]]:
    return [(f"k{number}", b"%d" % number) for number in range(1, count + 1)]


def fields(text: str) -> dict[str, str]:
    """Lines of a name and a value."""
    pairs = (line.split(maxsplit=1) for line in text.splitlines() if line.strip())
    return {pair[0]: pair[1] if len(pair) > 1 else "" for pair in pairs}


# -- looking


def test_the_queue_of_a_client_is_shown_with_its_progress(operator: Operator, queue: Compacted) -> None:
    """Depth, bytes, first and last number, the age of the oldest, and how far its owner is: in words and in JSON."""
    began = time.time()
    queue.put(*((f"k{number % 10}", b"x" * 100) for number in range(25)))
    shown = fields(operator.done("queue", "show", queue.name))
    assert ("0", "10", "no", "") == tuple(shown[key] for key in ("progress", "waiting", "connected", "acked_at"))
    with queue.consumer() as client:
        take(client, 4)
        take(client, 2, ack=False)
        settled(client)
        view = operator.asked("queue", "show", queue.name)
        (consumer,) = view["consuming"]
        assert (queue.name, True, 19, 6) == tuple(
            consumer[key] for key in ("client", "connected", "progress", "waiting")
        )
        assert 2 <= consumer["in_flight"] <= 6
        assert began - 1 <= view["oldest"] <= consumer["acked_at"] <= time.time() + 1
    assert 1000 <= view["bytes"] < 10_000
    wait_until(lambda: not queue.shown(operator)["consuming"][0]["connected"], "it is gone")

    def local(seconds: float) -> str:
        return f"{datetime.fromtimestamp(seconds, UTC).astimezone():%Y-%m-%d %H:%M:%S}"

    assert {
        "kind": "exclusive",
        "name": queue.name,
        "messages": "10",
        "bytes": str(view["bytes"]),
        "first": "16",
        "last": "25",
        "oldest": local(view["oldest"]),
        "connected": "no",
        "progress": "19",
        "waiting": "6",
        "in_flight": "0",
        "acked_at": local(consumer["acked_at"]),
    } == fields(operator.done("queue", "show", queue.name))


def test_a_shared_queue_is_shown_with_all_its_consumers(node: LocalNode, operator: Operator) -> None:
    queue = Compacted(node, unique("map"), "shared")
    queue.put(*numbered(4))
    consume(operator, queue, 4, "c-2")
    consume(operator, queue, 1, "c-1")
    head, table = operator.done("queue", "show", queue.name).split("\n\n")
    assert ("shared", "4", "2") == tuple(fields(head)[key] for key in ("kind", "messages", "consumers"))
    lines = [line.split() for line in table.splitlines() if line.startswith(("client", "c-"))]
    assert ["client", "connected", "progress", "waiting", "in_flight", "acked_at"] == lines[0]
    assert [["c-1", "no", "1", "3", "0"], ["c-2", "no", "4", "0", "0"]] == [line[:5] for line in lines[1:]]


def test_the_list_has_all_kinds_and_flags_choose(node: LocalNode, operator: Operator) -> None:
    """More than a page of them is listed page by page."""
    fill(node, [(f"$ECQ/w/paged-{number:03}/k", b"12345") for number in range(520)])
    Compacted(node, "list-c", "shared").put(("k", b"1"))

    def listed(*flags: object) -> list[tuple[str, str]]:
        return [(entry["name"], entry["kind"]) for entry in operator.asked("queue", "list", *flags)]

    everything = listed()
    assert everything == listed("--declared", "--exclusive", "--shared")
    assert everything == listed("--declared") + listed("--exclusive") + listed("--shared")
    assert [("jobs", "regular"), ("levels", "regular")] == listed("--declared")
    assert {"shared"} == {kind for _, kind in listed("--shared")} and ("list-c", "shared") in everything
    paged = [(f"paged-{number:03}", "exclusive") for number in range(520)]
    assert paged == [entry for entry in listed("--exclusive") if entry[0].startswith("paged-")]
    assert everything[:3] == listed("--limit", 3)
    assert 1 == len(listed("--exclusive", "--limit", 1))
    table = operator.done("queue", "list").splitlines()
    assert ["name", "origin", "kind", "topics", "messages", "bytes"] == table[0].split()[:6]
    (row,) = [line.split() for line in table if line.startswith("paged-007 ")]
    assert ["paged-007", "exclusive", "1"] == row[:3]


def test_messages_are_read_without_being_taken(operator: Operator, queue: Compacted) -> None:
    """`read` from the first on, `tail` the last ones, also where most numbers are of superseded values."""
    queue.put(*numbered(30), *[("k1", b"again")] * 200)
    wanted = [f"{number} {queue.read(f'k{number}')} {number}" for number in range(2, 31)]
    wanted.append(f"230 {queue.read('k1')} again")
    assert wanted == operator.done("queue", "read", queue.name).splitlines()
    assert wanted[2:4] == operator.done("queue", "read", queue.name, "--after", 3, "--limit", 2).splitlines()
    assert wanted[-10:] == operator.done("queue", "tail", queue.name).splitlines()
    assert wanted == operator.done("queue", "tail", queue.name, "--limit", 1000).splitlines()
    assert "" == operator.done("queue", "tail", queue.name, "-n", 0)
    for verb in ("read", "tail"):
        found = operator.asked("queue", verb, queue.name, "--exclusive", "--limit", 100)
        assert [*range(2, 31), 230] == [entry["position"] for entry in found]
        assert ("k1", "again") == (found[-1]["properties"]["key"], found[-1]["payload"])
    consume(operator, queue, 30)
    assert 30 == len(queue.stored(operator)), "what is acknowledged stays, for one may go back"
    operator.done("queue", "create", "tailed", "-t", "tailed/#")
    fill(operator.node, [(f"tailed/{number}", b"%d" % number) for number in range(12)])
    lines = operator.done("queue", "tail", "tailed", "-n", 3).splitlines()
    assert ["9", "10", "11"] == [line.split()[-1] for line in lines]


# -- which one is meant


def test_a_name_means_the_declared_queue_first_then_that_of_a_client(node: LocalNode, operator: Operator) -> None:
    """Flags choose another one, for every verb that looks."""
    Compacted(node, "jobs", "shared").put(("k", b"shared"))
    Compacted(node, "both", "shared").put(("k", b"shared"))
    assert "shared" == operator.asked("queue", "show", "both")["kind"]
    for name in ("jobs", "both"):
        Compacted(node, name).put(("k", b"exclusive"))
    assert "exclusive" == operator.asked("queue", "show", "both")["kind"]
    fill(node, [("jobs/x", b"regular")])
    for flags, kind in (((), "regular"), (("--exclusive",), "exclusive"), (("--shared",), "shared")):
        assert kind == operator.asked("queue", "show", "jobs", *flags)["kind"]
        for verb in ("read", "tail"):
            assert [kind] == [line.split()[-1] for line in operator.done("queue", verb, "jobs", *flags).splitlines()]


def test_what_is_nowhere_is_told_with_all_places_looked_at(operator: Operator) -> None:
    for verb in ("show", "read", "tail"):
        done = operator.command("queue", verb, "nope")
        assert (1, "") == (done.returncode, done.stdout), verb
        for said in (
            "there is no queue 'nope'; there are: jobs",
            "client 'nope'",
            "$ECQ/w/nope/KEY",
            "$SCQ/w/nope/KEY",
        ):
            assert said in done.stderr, verb
        assert done.stderr.endswith("(NOT_FOUND)\n")
        only = operator.refused("queue", verb, "nope", "--shared")
        assert "$SCQ/w/nope/KEY" in only and "$ECQ" not in only, verb


def test_odd_client_ids_are_names_too(run: Run, node: LocalNode) -> None:
    for name in ("Grüße", "a b", "100%", "?x=1", "..", "--exclusive", "rewind", "w", "%2F", "a%2Fb"):
        queue = Compacted(node, name)
        queue.put(("k", b"1"))
        with queue.consumer() as client:
            take(client, 1)
            settled(client)
        for verb in (("show",), ("read",), ("tail",), ("rewind", "--to", "1"), ("delete", "--exclusive", "--yes")):
            done = run("queue", *verb, *node.at, "--", name)
            assert (0, "") == (done.returncode, done.stderr), (verb, name)


# -- tail --follow


@contextmanager
def following(*words: object) -> Iterator[subprocess.Popen[str]]:
    """`motorcade queue tail --follow`; pytest's own time limit ends a wait in vain."""
    process = start_process("queue", "tail", "--follow", "--interval", "0.1", *words)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def test_following_prints_what_is_appended_until_stopped(node: LocalNode, queue: Compacted) -> None:
    queue.put(("a", b"1"), ("b", b"2"))
    with following(queue.name, "-n", "1", *node.at) as process:
        assert f"2 {queue.read('b')} 2" == line_of(process)
        queue.put(("a", b"3"), ("c", b"4"))
        assert [f"3 {queue.read('a')} 3", f"4 {queue.read('c')} 4"] == [line_of(process), line_of(process)]
        queue.put(("c", b"5"))
        assert f"5 {queue.read('c')} 5" == line_of(process)
        process.send_signal(signal.SIGINT)
        assert (("", ""), 0) == (process.communicate(timeout=PATIENCE), process.returncode)


def test_following_in_json_is_a_line_for_each_and_ends_with_the_queue(node: LocalNode, operator: Operator) -> None:
    queue = Compacted(node, unique("lines"), "shared")
    queue.put(("a", b"old"))
    with following(queue.name, "--json", *node.at) as process:
        for number, payload in ((1, "old"), (2, "new")):
            found = json.loads(line_of(process))
            assert (number, queue.read("a"), payload) == (found["position"], found["topic"], found["payload"])
            queue.put(("a", b"new"))
        operator.done("queue", "delete", queue.name, "--shared", "--yes")
        _, said = process.communicate(timeout=PATIENCE)
    assert 1 == process.returncode
    assert f"$SCQ/w/{queue.name}/KEY" in said


# -- rewinding


def test_a_rewind_is_previewed_and_done(operator: Operator, queue: Compacted) -> None:
    queue.put(*numbered(9), ("k1", b"newer"))
    consume(operator, queue, 9)
    name, sizes = queue.name, [found["position"] for found in queue.messages(operator)]
    assert list(range(2, 11)) == sizes

    def rewound(*words: object) -> list[str]:
        said = operator.done("queue", "rewind", name, *words)
        return [line.split(", ")[0].removesuffix(")") for line in said.splitlines()]  # bytes are counted with overhead

    def progress() -> int:
        return int(operator.asked("queue", "show", name)["consuming"][0]["progress"])

    assert rewound("--to", 3, "--preview") == [
        f"client '{name}' would get 8 messages (numbers 3 to 10",
        "its progress would go from 10 to 2",
        "nothing was changed (--preview",
    ]
    assert 10 == progress()
    assert rewound("--to", 3) == [
        f"client '{name}' gets 8 messages (numbers 3 to 10",
        "its progress went from 10 to 2",
    ]
    assert 2 == progress()
    assert rewound("--exclusive", "--to", 10) == [
        f"client '{name}' gets 1 message (number 10",
        "its progress went from 2 to 9",
        "7 that it has not acknowledged are skipped",
    ]
    assert rewound("--to", 11, "--preview") == [
        f"client '{name}' would get nothing until something is appended",
        "its progress would go from 9 to 10",
        "1 that it has not acknowledged would be skipped",
        "nothing was changed (--preview",
    ]
    assert "its progress stays at 9" in rewound("--to", 10)
    told = operator.asked("queue", "rewind", name, "--to", 0, "--preview")
    assert (True, 9, 0, 9) == tuple(told[key] for key in ("preview", "before", "progress", "messages"))


def test_one_consumer_of_a_shared_queue_is_rewound(node: LocalNode, operator: Operator) -> None:
    """And gets its messages again, at once."""
    queue = Compacted(node, unique("news"), "shared")
    queue.put(*numbered(3))
    consume(operator, queue, 3, "one")
    with queue.consumer(client_id="two") as two:
        take(two, 3)
        settled(two)
        said = operator.done("queue", "rewind", queue.name, "--shared", "--consumer", "two", "--to", 2)
        assert f"client 'two' of shared queue '{queue.name}' gets 2 messages (numbers 2 to 3, " in said
        assert [2, 3] == queue.numbers(take(two, 2, ack=False))
        assert {"one": 3, "two": 1} == {each["client"]: each["progress"] for each in queue.shown(operator)["consuming"]}


def test_a_time_is_written_as_people_write_it(operator: Operator, queue: Compacted) -> None:
    """A while ago, the time of this machine as `queue show` prints it, a time with a zone, seconds since the epoch."""
    queue.put(*numbered(2))
    consume(operator, queue, 2)
    minute = datetime.now(UTC).astimezone() - timedelta(minutes=1)
    for given, progress in {
        "2h": 0,
        "1m": 0,
        f"{minute:%Y-%m-%d %H:%M:%S}": 0,
        minute.replace(tzinfo=None).isoformat(): 0,
        minute.isoformat(): 0,
        f"@{int(time.time()) - 60}": 0,
        "0s": 2,
    }.items():
        told = operator.asked("queue", "rewind", queue.name, "--since", given, "--preview")
        assert (progress, 2 - progress) == (told["progress"], told["messages"]), given


def test_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, wanted in {
        "2h": {"ago": 7200},
        "1.5d": {"ago": 129600},
        "45": {"ago": 45},
        "@1790000000": {"since": 1790000000.0},
        "2026-11-15T08:30:00Z": {"since": 1794731400.0},
        "2026-11-15 09:30:00+01:00": {"since": 1794731400.0},
        "2026-11-15T08:30:00.5Z": {"since": 1794731400.5},
    }.items():
        assert wanted == moment(text), text
    # A time without a zone is that of the machine.
    try:
        for zone, hours in (("UTC0", 0), ("WEST5", 5)):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            assert {"since": 1794731400.0 + 3600 * hours} == moment("2026-11-15 08:30:00")
    finally:
        monkeypatch.undo()
        time.tzset()


# -- deleting


def test_a_compacted_queue_is_deleted_only_by_its_kind(node: LocalNode, operator: Operator) -> None:
    """The name alone is that of a declared queue; what may have been meant is said."""
    for kind in ("exclusive", "shared"):
        Compacted(node, "doomed", kind).put(("k", b"1"))
    said = operator.refused("queue", "delete", "doomed", "--yes")
    assert "there is no queue 'doomed'" in said
    assert "the compacted queue of client 'doomed' is meant with --exclusive" in said
    gone = operator.done("queue", "delete", "doomed", "--exclusive", "--yes")
    assert "the compacted queue of client 'doomed' is deleted\n" == gone
    assert "shared queue 'doomed' is meant with --shared" in operator.refused("queue", "delete", "doomed", "--yes")
    told = operator.asked("queue", "delete", "doomed", "--shared", "--yes")
    assert {"kind": "shared", "name": "doomed", "result": "deleted"} == told
    assert "meant with" not in operator.refused("queue", "delete", "doomed", "--yes")
    operator.refused("queue", "show", "doomed")


# -- what is wrong is said


#: Words, exit code, and what must be said.
WRONG: list[tuple[tuple[object, ...], int, tuple[str, ...]]] = [
    (("show",), 2, ("Missing argument 'NAME'",)),
    (("show", ""), 2, ("a queue has a name, or the client id of its owner",)),
    (("show", "x", "--exclusive", "--shared"), 2, ("--exclusive, --shared: a queue is one or the other",)),
    (("show", "\udcff"), 2, ("is not UTF-8",)),
    (("read", "x", "--after", -1), 2, ("--after",)),
    (("read", "x", "--after", 2**63), 2, ("--after",)),
    (("read", "x", "--limit", 0), 2, ("--limit",)),
    (("read", "x", "--exclusive", "--shared"), 2, ("a queue is one or the other",)),
    (("tail", "x", "-n", -1), 2, ("--limit",)),
    (("tail", "x", "-n", "ten"), 2, ("--limit",)),
    (("tail", "x", "--interval", 0), 2, ("--interval",)),
    (("tail", "levels", "--follow"), 2, ("queue 'levels' has priorities: new messages are not at its end",)),
    (("list", "--limit", 0), 2, ("--limit",)),
    (("rewind",), 2, ("Missing argument 'CLIENT'",)),
    (("rewind", "judged"), 2, ("--to, --since: give one of them: a sequence number, or a time",)),
    (("rewind", "judged", "--to", 1, "--since", "2h"), 2, ("give one of them",)),
    (("rewind", "", "--to", 1), 2, ("a queue has a name, or the client id of its owner",)),
    (("rewind", "judged", "--to", -1), 2, ("--to",)),
    (("rewind", "judged", "--to", "first"), 2, ("--to",)),
    (("rewind", "judged", "--to", 2**63), 2, ("--to",)),
    (("rewind", "judged", "--to", 9), 1, ("to: 9", "between 0 and 4", "the last number is 3")),
    (("rewind", "judged", "--to", 2**62), 1, (f"to: {2**62}", "the last number is 3")),
    (("rewind", "judged", "--since", "yesterday"), 2, ("--since: 'yesterday' is no time; write 7d, 12h, 30m, 45s",)),
    (("rewind", "judged", "--since", "2026-13-40"), 2, ("'2026-13-40' is no time",)),
    (("rewind", "judged", "--since", "@x"), 2, ("'@x' is no time",)),
    (("rewind", "judged", "--since", "@" + "9" * 400), 2, ("is no time",)),
    (("rewind", "judged", "--since", "9" * 400 + "d"), 2, ("is no time",)),
    (("rewind", "judged", "--since", "-2h"), 2, ("'-2h' is no time",)),
    (("rewind", "judged", "--since", ""), 2, ("'' is no time",)),
    (("rewind", "judged", "--consumer", "x", "--to", 1), 2, ("--consumer: the queue of a client has no other",)),
    (
        ("rewind", "judged", "--shared", "--to", 1),
        2,
        ("--consumer: a shared queue has several consumers; name the one to rewind",),
    ),
    (
        ("rewind", "judged", "--shared", "--consumer", "", "--to", 1),
        2,
        ("a shared queue has several consumers; name the one to rewind",),
    ),
    (("rewind", "judged", "--exclusive", "--shared", "--to", 1), 2, ("a queue is one or the other",)),
    (("rewind", "judged", "--shared", "--consumer", "nobody", "--to", 1), 1, ("'judged'", "no consumer 'nobody'")),
    (("rewind", "nope", "--to", 1), 1, ("client 'nope'", "$ECQ/w/nope/KEY")),
    (("rewind", "nope", "--since", "1h", "--shared", "--consumer", "c"), 1, ("queue 'nope'", "$SCQ/w/nope/KEY")),
    (("delete", "judged", "--exclusive"), 2, ("--yes: there is no terminal to ask on; confirm with the flag",)),
    (("delete", "", "--exclusive", "--yes"), 2, ("a queue has a name",)),
    (("delete", "nope", "--exclusive", "--yes"), 1, ("client 'nope'", "$ECQ/w/nope/KEY")),
    (("delete", "x", "--exclusive", "--shared", "--yes"), 2, ("a queue is one or the other",)),
]


def test_what_is_wrong_is_said(node: LocalNode, operator: Operator) -> None:
    """With what is wrong and what to write; nothing goes to standard output, and nothing changes."""
    for kind in ("exclusive", "shared"):
        Compacted(node, "judged", kind).put(*numbered(3))
    consume(operator, Compacted(node, "judged"), 3)
    before = operator.asked("queue", "show", "judged")
    failures = []
    for words, code, wanted in WRONG:
        done = operator.command("queue", *words)
        said = " ".join(done.stderr.replace("│", " ").split())
        missing = [part for part in wanted if part not in said]
        if (code, "", [], False) != (done.returncode, done.stdout, missing, "Traceback" in said):
            failures.append(f"{words}: exit code {done.returncode}, without {missing}: {said}")
    assert not failures, "\n".join(failures)
    assert before == operator.asked("queue", "show", "judged")


# -- the guide, and without the plugin


def test_everything_can_be_done_on_the_console(run: Run, node: LocalNode, operator: Operator) -> None:
    """Append, consume, look, go back, consume again, delete: with `pub`, `sub` and `queue`, as the guide tells."""
    mqtt = ("-p", node.port, "-q", 1)
    consume_ = ("sub", *mqtt, "-i", "guide", "-t", "$ECQ/guide/#", "-v", "-W", PATIENCE)

    def console(*words: object) -> str:
        done = run(*words)
        assert 0 == done.returncode, done.stderr
        return done.stdout

    def shown() -> dict[str, str]:
        return fields(console("queue", "show", "guide", *node.at))

    for key, value in (("door", "open"), ("fuel", "31"), ("door", "shut")):
        console("pub", *mqtt, "-t", f"$ECQ/w/guide/{key}", "-m", value)
    assert "$ECQ/guide/fuel 31\n$ECQ/guide/door shut\n" == console(*consume_, "-C", 2)
    wait_until(lambda: shown()["progress"] == "3", "its acknowledgements have been read")
    assert "2 $ECQ/guide/fuel 31\n3 $ECQ/guide/door shut\n" == console("queue", "tail", "guide", *node.at)
    console("queue", "rewind", "guide", "--to", 3, *node.at)
    assert "$ECQ/guide/door shut\n" == console(*consume_, "-C", 1)
    wait_until(lambda: shown()["progress"] == "3", "its acknowledgement has been read")

    # The other way: the consumer asks by itself.
    console("pub", *mqtt, "-i", "guide", "-t", "$ECQ/rewind/guide", "-m", "0")
    assert "$ECQ/guide/fuel 31\n$ECQ/guide/door shut\n" == console(*consume_, "-C", 2)
    console("queue", "delete", "guide", "--exclusive", "--yes", *node.at)
    assert "guide" not in console("queue", "list", "--exclusive", *node.at)
    console("pub", *mqtt, "-t", "$ECQ/w/guide/door", "-m", "again")
    assert "4 $ECQ/guide/door again\n" == console("queue", "read", "guide", *node.at)  # numbers are not used again


def test_a_node_without_the_plugin_says_what_to_load() -> None:
    """What it has is listed all the same."""
    with LocalNode(f"[plugins.ecq]\nenabled = false\n\n{CONFIG}") as node, Operator(node) as operator:
        listed = operator.command("queue", "list")
        assert 0 == listed.returncode and "jobs" in listed.stdout
        assert 1 == listed.stderr.count("note: this node has no compacted queues: plugin 'ecq' is not loaded")
        assert "jobs" in operator.done("queue", "show", "jobs")
        wrong: Any = (("list", "--exclusive"), ("show", "x", "--shared"), ("show", "x"), ("rewind", "x", "--to", 1))
        for words in wrong:
            assert 1 == operator.refused("queue", *words).count("`motorcade plugin load ecq`"), words
        for path in ("shared", "shared/x", "shared/x/messages"):
            answer = operator.web.get(f"compacted/{path}")
            assert 404 == answer.status_code and "`motorcade plugin load ecq`" in answer.json()["message"]
        operator.done("plugin", "unload", "queues")
        assert "`motorcade plugin load queues`" in operator.refused("queue", "list")
        operator.done("plugin", "load", "ecq")
        listed = operator.command("queue", "list")
        assert (0, "no queues\n") == (listed.returncode, listed.stdout)
        assert "`motorcade plugin load queues`" in listed.stderr
