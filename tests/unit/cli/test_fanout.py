"""`motorcade fanout` and `motorcade vehicle`: the command, the control port and the fan-out together.

A plugin of the test (tests/unit/http/trouble.py) refuses, hangs up and is silent when it is told to.
"""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from motorcade.cli import _batches
from motorcade.core.vin import check_digit_of, make_vin
from motorcade.plugins.fanout.batch import check_batch_id
from tests.scenarios.witness import wait_until
from tests.support import wire
from tests.support.commands import COMMAND_TREE, PATIENCE, run_process, start_process
from tests.support.fanout import get, vehicle
from tests.support.local import LocalNode
from tests.unit.cli.conftest import Run
from tests.unit.http import trouble

CONFIG = f"""\
[plugins.trouble]
path = "{Path(trouble.__file__)}"
"""
PAYLOAD = b"\x00update\xff"


@pytest.fixture
def at(node: LocalNode) -> tuple[str, str]:
    return node.at


def vins(count: int, start: int = 0) -> list[str]:
    return [make_vin(number) for number in range(start, start + count)]


def written(folder: Path, lines: list[str], payload: bytes = PAYLOAD) -> tuple[str, ...]:
    """A list and a payload as files, and the options that name them."""
    (folder / "vins.txt").write_text("".join(f"{line}\n" for line in lines))
    (folder / "payload.bin").write_bytes(payload)
    return ("--vins", "vins.txt", "--payload", "payload.bin")


def shown(run: Run, *args: object) -> Any:
    done = run(*args, "--json")
    assert (0, "") == (done.returncode, done.stderr)
    return json.loads(done.stdout)


# -- sending


def test_a_list_is_sent_in_batches_and_the_payload_once(
    run: Run, node: LocalNode, at: tuple[str, str], tmp_path: Path
) -> None:
    """Duplicates count once; what vehicles are sent is the file, byte by byte."""
    targets = vins(450)
    files = written(tmp_path, [*targets, targets[0], targets[7]])
    sent = run("fanout", "send", *files, "--request", "many", "-p", node.port)
    assert (0, "request 'many': 450 vehicles accepted, 2 duplicates\n", "") == (
        sent.returncode,
        sent.stdout,
        sent.stderr,
    )
    view = shown(run, "fanout", "status", "many", *at)
    assert (450, 450, {"accepted": 450}) == (view["targets"], view["pending"], view["states"])
    with vehicle(node, targets[449]) as client:
        assert PAYLOAD == get(client).payload
    again = run("fanout", "send", *files, "--request", "many", "-p", node.port)
    assert 0 == again.returncode and "3 batches of 3 had been accepted before" in again.stderr, "no one twice"
    once_more = shown(run, "fanout", "send", *files, "--request", "many", "--batch-id", "second", "-p", node.port)
    assert (450, 2, 0) == tuple(once_more[key] for key in ("accepted", "duplicates", "repeated_batches"))


def test_options_of_a_batch_are_handed_on(run: Run, node: LocalNode, at: tuple[str, str], tmp_path: Path) -> None:
    (vin,) = vins(1, 1000)
    files = written(tmp_path, [vin])
    options = ("--expires", "12h", "--priority", 7, "--append")
    figures = shown(run, "fanout", "send", *files, "--request", "options", *options, "-p", node.port)
    assert {
        "request_id": "options",
        "accepted": 1,
        "duplicates": 0,
        "replaced": 0,
        "rejected": 0,
        "repeated_batches": 0,
        "batches": 1,
        "failed_batches": 0,
        "not_accepted": 0,
        "problems": [],
    } == figures
    more = shown(run, "fanout", "send", *files, "--request", "options", "--append", "-p", node.port)
    assert (1, 0) == (more["accepted"], more["replaced"])
    first, _ = shown(run, "vehicle", "show", vin, *at)["waiting"]
    assert (43200, 7) == (round(first["expires_at"] - first["accepted_at"]), first["priority"])


def test_list_and_payload_may_come_by_a_pipe(run: Run, node: LocalNode, at: tuple[str, str], tmp_path: Path) -> None:
    """Comments, blank lines and line ends of another system are no vehicles."""
    first, second = vins(2, 1100)
    written(tmp_path, [first])
    lines = f"# the fleet of Tuesday\r\n\r\n  {first}\t\r\n{second}\r\n"
    to = ("--request", "piped", "-p", node.port)
    sent = run("fanout", "send", "--vins", "-", "--payload", "payload.bin", *to, stdin=lines)
    assert (0, "request 'piped': 2 vehicles accepted\n") == (sent.returncode, sent.stdout)
    sent = run("fanout", "send", "--vins", "vins.txt", "--payload", "-", *to, stdin="text")
    assert (0, "request 'piped': 1 vehicle accepted, 1 replaced\n") == (sent.returncode, sent.stdout)
    waiting = {entry["request_id"]: entry for entry in shown(run, "vehicle", "show", first, *at)["waiting"]}
    assert 4 == waiting["piped"]["size"]


def test_the_id_of_a_batch_is_made_from_what_it_says() -> None:
    """So the same command has the same ids, and every other one has others."""
    targets = vins(3)
    job = _batches.Job(targets, "r", b"x", {"priority": 1})
    assert job.batch_id(targets) == _batches.Job(targets[::-1], "r", b"x", {"priority": 1}).batch_id(targets[::-1])
    assert job.batch_id(targets) == json.loads(job.trigger(targets))["batch_id"]
    others = [
        _batches.Job(targets, "s", b"x", {"priority": 1}),
        _batches.Job(targets, "r", b"y", {"priority": 1}),
        _batches.Job(targets, "r", b"x", {"priority": 2}),
        _batches.Job(targets, "r", b"x", {"priority": 1}, name="once more"),
    ]
    ids = {job.batch_id(targets), job.batch_id(targets[:2]), *(other.batch_id(targets) for other in others)}
    assert 6 == len(ids)
    check_batch_id(job.batch_id(targets))


def test_a_dry_run_talks_to_nobody(run: Run, tmp_path: Path) -> None:
    """It counts what would be sent, to the byte."""
    targets = vins(201)
    files = written(tmp_path, [*targets, targets[0]], b"x" * 1000)
    asked = ("fanout", "send", *files, "--request", "dry", "--dry-run", "-p", 1)
    plan = shown(run, *asked)
    digest = hashlib.sha256(b"x" * 1000).hexdigest()
    job = _batches.Job(targets, "dry", b"x" * 1000, {})
    messages = [job.trigger(batch) for batch in job.batches()]
    assert [200, 1] == [len(json.loads(message)["ids"]) for message in messages]
    assert {
        "request_id": "dry",
        "vehicles": 201,
        "duplicates": 1,
        "batches": 2,
        "payload_bytes": 1000,
        "bytes": 1000 + sum(map(len, messages)),
        "data_id": f"sha256:{digest}",
        "dry_run": True,
    } == plan
    told = run(*asked)
    assert (0, "nothing was sent (--dry-run)\n") == (told.returncode, told.stderr)
    assert "vehicles       201\n" in told.stdout


def test_wrong_lines_are_named_and_nothing_is_sent(
    run: Run, node: LocalNode, at: tuple[str, str], tmp_path: Path
) -> None:
    good = vins(3, 1200)
    lines = [good[0], good[1].lower(), "", good[2][:-1], "LMCAAAAAOIQ000001", *("?" for _ in range(12))]
    files = written(tmp_path, lines)
    done = run("fanout", "send", *files, "--request", "wrong", "-p", node.port)
    assert (1, "") == (done.returncode, done.stdout)
    said = done.stderr.splitlines()
    assert said[0].startswith("error: vins.txt:2: ") and "upper case" in said[0]
    assert said[1].startswith("vins.txt:4: ") and "16 characters" in said[1]
    assert said[2].startswith("vins.txt:5: ") and "no I, O and Q" in said[2]
    assert ["… and 5 more", "15 lines are wrong; nothing was sent"] == said[-2:]
    assert 10 == sum(line.partition("vins.txt:")[2] != "" for line in said)
    assert 1 == run("fanout", "status", "wrong", *at).returncode


def test_the_check_digit_is_checked_where_that_is_wanted(run: Run, tmp_path: Path) -> None:
    right = make_vin(5)
    wrong = right[:8] + ("1" if check_digit_of(right) == "0" else "0") + right[9:]
    files = written(tmp_path, [right, wrong])
    asked = ("fanout", "send", *files, "--request", "digit", "--dry-run")
    assert 0 == run(*asked).returncode
    done = run(*asked, "--check-digit")
    assert 1 == done.returncode
    assert "vins.txt:2: " in done.stderr and "check digit" in done.stderr and "a line is wrong" in done.stderr


def test_a_refused_batch_is_named_and_the_rest_can_be_sent_again(
    run: Run, node: LocalNode, at: tuple[str, str], tmp_path: Path
) -> None:
    """With the broker's reason; what was accepted before counts, what comes after is not sent."""
    targets = vins(30, 1300)
    targets[3] = trouble.REFUSED
    files = written(tmp_path, targets)
    to = ("--request", "refused", "-p", node.port)
    done = run("fanout", "send", *files, *to, "--batch", 1, "--rest", "rest.txt")
    assert (1, "") == (done.returncode, done.stdout)
    said = done.stderr.splitlines()
    assert (
        f"error: batch 4 of 30 ({trouble.REFUSED}) was refused: ids: {trouble.REFUSED} is not welcome here (0x99);"
        " nothing of it was stored"
    ) == said[0]
    rest = (tmp_path / "rest.txt").read_text().split()
    view = shown(run, "fanout", "status", "refused", *at)
    accepted = {target["vin"] for target in shown(run, "fanout", "targets", "refused", *at)}
    assert [vin for vin in targets if vin not in accepted] == rest
    assert view["targets"] == len(accepted) and trouble.REFUSED in rest
    assert f"{len(accepted)} batches of 30 accepted ({len(accepted)} vehicles); {len(rest)} vehicles not" == said[1]
    assert len(accepted) < 30 - 1, "those after it were not sent"
    (tmp_path / "rest.txt").write_text("".join(f"{vin}\n" for vin in rest if vin != trouble.REFUSED))
    assert 0 == run("fanout", "send", "--vins", "rest.txt", "--payload", "payload.bin", *to).returncode
    assert 29 == shown(run, "fanout", "status", "refused", *at)["targets"]


def test_what_was_refused_is_told_in_json_too(run: Run, node: LocalNode, tmp_path: Path) -> None:
    files = written(tmp_path, [*vins(2, 1400), trouble.REFUSED])
    done = run("fanout", "send", *files, "--request", "r", "-p", node.port, "--json")
    figures = json.loads(done.stdout)
    assert (1, 0, 1, 3) == (
        done.returncode,
        figures["accepted"],
        figures["failed_batches"],
        figures["not_accepted"],
    )
    assert "not welcome" in figures["problems"][0]


def test_a_connection_that_ends_leaves_a_batch_in_doubt(run: Run, node: LocalNode, tmp_path: Path) -> None:
    """It is not told as refused: it may be stored."""
    files = written(tmp_path, [*vins(2, 1500), trouble.HANGS_UP])
    done = run("fanout", "send", *files, "--request", "lost", "-i", "platform", "-p", node.port)
    assert 1 == done.returncode
    assert "batch 1 of 1" in done.stderr and "it may be stored or not" in done.stderr
    assert "administrative action" in done.stderr


def test_a_payload_that_is_refused_is_told_before_any_batch(
    run: Run, node: LocalNode, at: tuple[str, str], tmp_path: Path
) -> None:
    files = written(tmp_path, vins(1, 1600), b"unwanted")
    done = run("fanout", "send", *files, "--request", "unwanted", "-p", node.port)
    assert (1, "") == (done.returncode, done.stdout)
    assert (
        "error: the payload was not stored, and no vehicle was sent anything: data: nobody wants this (0x99)\n"
        == done.stderr
    )
    assert 1 == run("fanout", "status", "unwanted", *at).returncode


def test_a_broker_without_fan_out_is_told(run: Run, tmp_path: Path) -> None:
    """Whether somebody listens to the topic or not: batches are not swallowed in silence."""
    files = written(tmp_path, vins(1))
    with LocalNode("[plugins.fanout]\nenabled = false\n") as plain, wire.Client(plain) as listener:
        asked = ("fanout", "send", *files, "--request", "x", "-p", plain.port)
        done = run(*asked)
        assert 1 == done.returncode
        assert "plugin 'fanout'" in done.stderr and "the payload was not stored" in done.stderr
        listener.connect("listener")
        listener.subscribe("$SDV-FANOUT/#")
        done = run(*asked)
        assert 1 == done.returncode
        assert "batch 1 of 1" in done.stderr and "plugin 'fanout'" in done.stderr


def test_a_person_sees_how_far_it_is(node: LocalNode, tmp_path: Path) -> None:
    """A bar on a terminal, which is gone at the end; none of it on standard output."""
    files = written(tmp_path, vins(500, 2000))
    ours, theirs = pty.openpty()
    words = ("fanout", "send", *files, "--request", "seen", "-p", node.port)
    done = run_process(*words, env={"TERM": "xterm"}, cwd=tmp_path, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 65536):
            seen += part
    except OSError:  # how a terminal says that the other end is closed
        pass
    os.close(ours)
    assert (0, "request 'seen': 500 vehicles accepted\n") == (done.returncode, done.stdout)
    assert b"vehicles accepted" in seen and b"500/500" in seen


def test_an_interrupted_command_says_how_far_it_came(node: LocalNode, tmp_path: Path) -> None:
    """The batch that the broker is silent about may be stored."""
    files = written(tmp_path, [*vins(3, 2600), trouble.SILENT])
    to = ("--request", "interrupted", "--batch", "1", "-i", "patient", "-p", str(node.port))
    process = start_process("fanout", "send", *files, *to, cwd=tmp_path)
    with wire.Client(node) as listener:
        listener.connect()
        listener.subscribe("test/silent", 1)  # retained: it is told of what happened before, too
        assert "test/silent" == listener.receive(PATIENCE).topic
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (130, "") == (process.returncode, out)
    # How many of the three answers it has read when the signal comes is a matter of chance.
    assert re.fullmatch(rf"interrupted: [0-3] batch(es)? of 4 accepted, up to {_batches.WINDOW} more may be\n", err)


def test_the_commands_of_the_guide_are_commands() -> None:
    """Every line of the page that begins with `motorcade fanout` or `vehicle` names verbs and options that exist."""
    page = (Path(__file__).parents[3] / "docs" / "fanout.md").read_text().replace("|\n    motorcade", "|\nmotorcade")
    lines = re.findall(r"^motorcade ((?:fanout|vehicle) [^#|\n]*)", page, re.MULTILINE)
    assert len(lines) > 8
    root: Any = COMMAND_TREE
    for line in lines:
        noun, verb, *rest = shlex.split(line)
        command = root.commands[noun].commands[verb]
        known = {option for parameter in command.params for option in parameter.opts}
        assert [] == [word for word in rest if word.startswith("-") and word != "-" and word not in known], line


# -- asking


def acknowledge(run: Run, node: LocalNode, vin: str) -> None:
    """Let a vehicle come and take what waits for it."""
    with vehicle(node, vin) as client:
        get(client)
        wait_until(lambda: not shown(run, "vehicle", "show", vin, *node.at)["pending"], "it has it")


def test_targets_by_state_can_be_sent_to_again(run: Run, node: LocalNode, at: tuple[str, str], tmp_path: Path) -> None:
    targets = sorted(vins(5, 3000))
    files = written(tmp_path, targets)
    assert 0 == run("fanout", "send", *files, "--request", "states", "-p", node.port).returncode
    for vin in targets[:2]:
        acknowledge(run, node, vin)
    lines = run("fanout", "targets", "states", *at).stdout.splitlines()
    assert [[vin, "acked" if vin in targets[:2] else "accepted"] for vin in targets] == [
        line.split()[:2] for line in lines
    ]
    assert lines[0].rstrip().endswith("attempt 1") and "attempt" not in lines[4]
    assert 3 == len(run("fanout", "targets", "states", "--limit", 3, *at).stdout.splitlines())
    acked = run("fanout", "targets", "states", "--state", "acked", "--only-vins", *at).stdout
    assert targets[:2] == acked.split()
    again = ("--payload", "payload.bin", "--request", "again", "-p", node.port)
    assert "request 'again': 2 vehicles accepted\n" == run("fanout", "send", "--vins", "-", *again, stdin=acked).stdout


def test_more_than_a_page_of_targets(run: Run, node: LocalNode, at: tuple[str, str], tmp_path: Path) -> None:
    targets = sorted(vins(5001, 4000))
    files = written(tmp_path, targets)
    assert 0 == run("fanout", "send", *files, "--request", "long", "-p", node.port).returncode
    assert targets == run("fanout", "targets", "long", "--only-vins", *at).stdout.split()
    assert targets[:10] == [target["vin"] for target in shown(run, "fanout", "targets", "long", "--limit", 10, *at)]


def test_a_request_is_listed_paused_resumed_and_cancelled(
    run: Run, node: LocalNode, at: tuple[str, str], tmp_path: Path
) -> None:
    files = written(tmp_path, vins(2, 50_000))
    run("fanout", "send", *files, "--request", "decided", "-p", node.port)
    assert "decided" in {view["request_id"] for view in shown(run, "fanout", "list", *at)}
    assert re.search(r"^decided +active +2 +2 +0", run("fanout", "list", *at).stdout, re.MULTILINE)
    told = run("fanout", "status", "decided", *at).stdout
    assert re.search(r"^status +active$", told, re.MULTILINE)
    assert re.search(r"^  accepted +2 \(100\.0 %\)$", told, re.MULTILINE)
    for verb, status in (("pause", "paused"), ("resume", "active"), ("cancel", "cancelled")):
        done = run("fanout", verb, "decided", *at)
        assert 0 == done.returncode
        assert re.fullmatch(rf"request 'decided' is {status}, [0-2] of 2 pending\n", done.stdout)
        assert status == shown(run, "fanout", "status", "decided", *at)["status"]


def test_watching_ends_when_everything_is_final(run: Run, node: LocalNode, at: tuple[str, str], tmp_path: Path) -> None:
    first, second = vins(2, 60_000)
    files = written(tmp_path, [first, second])
    run("fanout", "send", *files, "--request", "watched", "-p", node.port)
    acknowledge(run, node, first)
    words = ("fanout", "status", "watched", "--watch", "--interval", "0.1", "--json")
    process = start_process(*words, *at)
    run("fanout", "cancel", "watched", *at)
    out, err = process.communicate(timeout=PATIENCE)
    assert (0, "") == (process.returncode, err)
    assert {"acked": 1, "cancelled": 1} == json.loads(out)["states"]


def test_a_collection_is_waited_for(run: Run, node: LocalNode, at: tuple[str, str], tmp_path: Path) -> None:
    """And says what it has found: 3 messages whose time is over, of as many vehicles; what has time stays."""
    late, early = vins(3, 65_000), vins(1, 66_000)
    run("fanout", "send", *written(tmp_path, late), "--request", "late", "--expires", "0.01", "-p", node.port)
    run("fanout", "send", *written(tmp_path, early), "--request", "early", "-p", node.port)
    figures = shown(run, "fanout", "gc", *at)
    assert figures["expired"] >= 3 and figures["vehicles"] >= 4
    wait_until(lambda: shown(run, "fanout", "status", "late", *at)["states"] == {"expired": 3}, "they have expired")
    assert 1 == shown(run, "vehicle", "show", early[0], *at)["pending"]
    assert re.search(r"^expired +0$", run("fanout", "gc", *at).stdout, re.MULTILINE)


def test_why_and_the_vehicle(run: Run, node: LocalNode, at: tuple[str, str], tmp_path: Path) -> None:
    (vin,) = vins(1, 70_000)
    told = run("fanout", "why", vin, *at)
    assert 0 == told.returncode
    assert re.match(rf"not_known: No batch has named {vin} .*\.\nNothing, .*\.\n$", told.stdout)
    written(tmp_path, [vin])
    run("fanout", "send", *written(tmp_path, [vin]), "--request", "seen", "-p", node.port)
    page = run("vehicle", "show", vin, *at).stdout
    assert re.search(r"^connected +no$", page, re.MULTILINE)
    assert re.search(rf"^subscribed +no \(agent/{vin}/proxy/request/\+\)$", page, re.MULTILINE)
    assert re.search(r"^why +offline: ", page, re.MULTILINE)
    assert re.search(rf"^{vin}\.1 +seen +waiting ", page, re.MULTILINE)
