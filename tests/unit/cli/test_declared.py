"""`motorcade queue`, `stream` and `capture`, as processes that speak to a real node."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from motorcade.cli._options import duration
from tests.support import wire
from tests.support.node import NodeProcess
from tests.unit.cli.conftest import PATIENCE, Run, environment

CONFIG = """\
[plugins.queues.queue.fixed]
topics = ["fixed/#"]

[plugins.streams.stream.fixed]
topics = ["fixed/#"]

[plugins.capture.rule.fixed]
topics = ["copied/#"]
to = "stream:fixed"
"""

#: One of each, and an option that can change: noun, arguments of `create`, `KEY=VALUE`.
NOUNS = [
    ("queue", ("-t", "a/#", "--topic", "b"), ("max_messages", 5)),
    ("stream", ("-t", "a/#", "--topic", "b"), ("max_messages", 5)),
    ("capture", ("-t", "a/#", "--topic", "b", "--to", "stream:fixed"), ("max_pending", 5)),
]
every_noun = pytest.mark.parametrize(("noun", "given", "option"), NOUNS, ids=[row[0] for row in NOUNS])


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(http=True, config=CONFIG) as running:
        yield running


@pytest.fixture
def at(node: NodeProcess) -> tuple[str, str]:
    return ("--http", str(node.http))


@every_noun
def test_the_life_of_a_declared_thing(
    run: Run, at: tuple[str, str], noun: str, given: tuple[str, ...], option: tuple[str, int]
) -> None:
    """Made, listed, shown, changed and deleted: what was not named in a change stays."""
    made = run(noun, "create", "life", *given, *at)
    assert (0, f"{noun} 'life' is created\n", "") == (made.returncode, made.stdout, made.stderr)
    listed = {entry["name"]: entry for entry in json.loads(run(noun, "list", *at, "--json").stdout)}
    listed.pop("receipts", None)  # a stream of the fan-out's own
    assert {"fixed": "configuration", "life": "command"} == {name: entry["origin"] for name, entry in listed.items()}
    table = run(noun, "list", *at).stdout
    assert "a/# b" in table and "fixed" in table

    key, value = option
    changed = run(noun, "change", "life", "--set", f"{key}={value}", *at)
    assert (0, f"{noun} 'life' is changed\n", "") == (changed.returncode, changed.stdout, changed.stderr)
    shown = json.loads(run(noun, "show", "life", *at, "--json").stdout)
    assert (["a/#", "b"], value) == (shown["topics"], shown[key])
    lines = dict(line.split(maxsplit=1) for line in run(noun, "show", "life", *at).stdout.splitlines() if " " in line)
    assert ("a/# b", str(value)) == (lines["topics"], lines[key])

    again = run(noun, "create", "life", *given, *at)
    assert (1, "") == (again.returncode, again.stdout)
    assert "already" in again.stderr
    gone = run(noun, "delete", "life", "--yes", *at)
    assert (0, f"{noun} 'life' is deleted\n", "") == (gone.returncode, gone.stdout, gone.stderr)
    assert 1 == run(noun, "show", "life", *at).returncode


@every_noun
def test_what_stands_in_the_configuration_is_changed_there(
    run: Run, at: tuple[str, str], noun: str, given: tuple[str, ...], option: tuple[str, int]
) -> None:
    for verb in (("change", "fixed", "--set", f"{option[0]}={option[1]}"), ("delete", "fixed", "--yes")):
        done = run(noun, *verb, *at)
        assert (1, "") == (done.returncode, done.stdout)
        assert "configuration" in done.stderr
    assert 0 == run(noun, "show", "fixed", *at).returncode


def test_flags_are_options(run: Run, at: tuple[str, str]) -> None:
    """Durations are written as people write them; flags and `--set` say the same."""
    run("queue", "create", "dead", *at)
    flags = ("--kind", "regular", "--strategy", "random", "--retention", "12h", "--dead-letter", "dead")
    made = json.loads(run("queue", "create", "flags", "-t", "f", *flags, *at, "--json").stdout)
    assert ("regular", "random", 43200, "dead") == tuple(
        made[key] for key in ("kind", "strategy", "retention", "dead_letter")
    )
    changed = json.loads(run("queue", "change", "flags", "--retention", "0", *at, "--json").stdout)
    assert (0, "random") == (changed["retention"], changed["strategy"])
    made = json.loads(run("stream", "create", "flags", "-t", "f", "--retention", "1.5d", *at, "--json").stdout)
    assert 129600 == made["retention"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7d", 604800), ("12h", 43200), ("30m", 1800), ("45s", 45), ("45", 45), ("0", 0), ("0.5h", 1800), ("0.5s", 0.5)],
)
def test_durations(text: str, seconds: float) -> None:
    assert seconds == duration(text)


@pytest.mark.parametrize("noun", ["queue", "stream"])
def test_messages_are_read_without_being_taken(run: Run, node: NodeProcess, at: tuple[str, str], noun: str) -> None:
    """Position, topic and payload as `sub -v` prints them, bytes as they are; as often as one likes."""
    run(noun, "create", "read", "-t", "read/#", *at)
    with wire.Client(node) as client:
        client.connect("reader")
        for number in range(12):
            client.publish(f"read/{number}", b"%d" % number, 1)
        client.publish("read/binary", "Grüße ".encode() + b"\x00\xff", 1)
    found = json.loads(run(noun, "read", "read", *at, "--json").stdout)
    assert [*(f"read/{number}" for number in range(12)), "read/binary"] == [entry["topic"] for entry in found]
    assert ["utf8"] * 12 + ["base64"] == [entry["encoding"] for entry in found]
    assert {"reader"} == {entry["publisher"] for entry in found}
    positions = [entry["position"] for entry in found]
    assert sorted(set(positions)) == positions

    after = run(noun, "read", "read", "--after", positions[4], "--limit", 3, *at)
    wanted = "".join(f"{positions[number]} read/{number} {number}\n" for number in (5, 6, 7))
    assert (0, wanted, "") == (after.returncode, after.stdout, after.stderr)
    raw = subprocess.run(
        [sys.executable, "-m", "motorcade", noun, "read", "read", "--after", str(positions[-2]), *at],
        env=environment(),
        capture_output=True,
        timeout=PATIENCE,
        check=True,
    )
    assert f"{positions[-1]} read/binary Grüße ".encode() + b"\x00\xff\n" == raw.stdout
    assert found == json.loads(run(noun, "read", "read", *at, "--json").stdout)


def test_more_than_a_page_is_read_page_by_page(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    count = 520
    run("stream", "create", "pages", "-t", "pages", *at)
    with wire.Client(node) as client:
        client.connect("writer")
        for number in range(count):
            client.publish("pages", b"%d" % number, 1)
    everything = json.loads(run("stream", "read", "pages", "--limit", 10_000, *at, "--json").stdout)
    assert [str(number) for number in range(count)] == [entry["payload"] for entry in everything]
    assert 510 == len(run("stream", "read", "pages", "--limit", 510, *at).stdout.splitlines())
    assert 100 == len(run("stream", "read", "pages", *at).stdout.splitlines())


def test_a_rule_copies_what_is_published(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    """From the configuration on; what was copied is read where it went."""
    with wire.Client(node) as client:
        client.connect("copied")
        client.publish("copied/x", b"one", 1)
    assert "copied/x one\n" in run("stream", "read", "fixed", *at).stdout
    shown = json.loads(run("capture", "show", "fixed", *at, "--json").stdout)
    assert "stream:fixed" == shown["to"]


# -- deleting asks


def answered(node: NodeProcess, name: str, answer: str) -> tuple[int, str]:
    """`motorcade queue delete NAME` on a terminal, where somebody types an answer: exit code and output."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "motorcade", "queue", "delete", name, "--http", str(node.http)],
            env=environment(),
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        os.write(ours, answer.encode())
        out, _ = process.communicate(timeout=PATIENCE)
    finally:
        os.close(ours)
        os.close(theirs)
    return process.returncode, out


def test_deleting_asks_on_a_terminal(run: Run, node: NodeProcess, at: tuple[str, str]) -> None:
    """Only a yes deletes."""
    run("queue", "create", "asked", "-t", "asked", *at)
    code, out = answered(node, "asked", "n\n")
    assert 1 == code
    assert "Delete queue 'asked' with all messages in it?" in out and "nothing was deleted" in out
    assert 0 == run("queue", "show", "asked", *at).returncode
    code, out = answered(node, "asked", "y\n")
    assert 0 == code and "queue 'asked' is deleted" in out
    assert 1 == run("queue", "show", "asked", *at).returncode


def test_without_a_terminal_deleting_wants_yes(run: Run, at: tuple[str, str]) -> None:
    done = run("queue", "delete", "fixed", *at, stdin="y\n")
    assert (2, "") == (done.returncode, done.stdout)
    assert "--yes" in done.stderr


# -- the configuration, and what outlives a node


def test_a_reload_declares_changes_and_removes(run: Run, tmp_path: Path) -> None:
    """At once; a wrong file is refused with its line, and everything stays."""
    file = tmp_path / "m.toml"
    file.write_text('[plugins.queues.queue.old]\ntopics = ["old"]\n\n[plugins.queues.queue.stays]\ntopics = ["a"]\n')
    with NodeProcess("--config", str(file), http=True) as node:
        at = ("--http", str(node.http))

        def queues() -> dict[str, object]:
            found = json.loads(run("queue", "list", *at, "--json").stdout)
            return {entry["name"]: entry["topics"] for entry in found}

        assert {"old": ["old"], "stays": ["a"]} == queues()
        file.write_text('[plugins.queues.queue.new]\ntopics = ["new"]\n\n[plugins.queues.queue.stays]\ntopcs = ["b"]\n')
        refused = run("config", "reload", *at)
        assert 1 == refused.returncode
        assert "m.toml:5: unknown key 'plugins.queues.queue.stays.topcs'; did you mean 'topics'?" in refused.stderr
        assert {"old": ["old"], "stays": ["a"]} == queues()
        file.write_text(file.read_text().replace("topcs", "topics"))
        assert 0 == run("config", "reload", *at).returncode
        assert {"new": ["new"], "stays": ["b"]} == queues()


def test_what_was_declared_by_command_is_there_after_a_restart(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with NodeProcess(http=True, data=data) as node:
        at = ("--http", str(node.http))
        for noun in ("queue", "stream"):
            assert 0 == run(noun, "create", "kept", "-t", "kept/#", "--set", "max_messages=7", *at).returncode
        assert 0 == run("capture", "create", "kept", "-t", "x/#", "--to", "stream:kept", *at).returncode
        node.stop()
    with NodeProcess(http=True, data=data) as node:
        at = ("--http", str(node.http))
        for noun, key, value in (
            ("queue", "max_messages", 7),
            ("stream", "max_messages", 7),
            ("capture", "to", "stream:kept"),
        ):
            shown = json.loads(run(noun, "show", "kept", *at, "--json").stdout)
            assert ("command", value) == (shown["origin"], shown[key])
