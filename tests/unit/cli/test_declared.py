"""`motorcade queue`, `stream` and `capture`: the command, the control port and the plugins together.

What only the control port shows is in tests/unit/http/test_declared.py.
"""

from __future__ import annotations

import os
import pty
from pathlib import Path

import pytest

from motorcade.cli._options import duration
from tests.support.commands import run, run_process
from tests.support.compacted import Compacted
from tests.support.consumers import connected, fill, subscribe, take, unique
from tests.support.local import LocalNode
from tests.support.node import NodeProcess
from tests.support.operator import Operator

CONFIG = """\
[plugins.queues.queue.fixed]
topics = ["fixed/#"]

[plugins.streams.stream.fixed]
topics = ["fixed/#"]

[plugins.capture.rule.fixed]
topics = ["copied/#"]
to = "stream:fixed"
"""

#: One of each, and an option that can change: noun, arguments of `create`, key and value.
NOUNS = [
    ("queue", (), "max_messages"),
    ("stream", (), "max_messages"),
    ("capture", ("--to", "stream:fixed"), "max_pending"),
]


@pytest.mark.parametrize(("noun", "given", "key"), NOUNS, ids=[row[0] for row in NOUNS])
def test_the_life_of_a_declared_thing(operator: Operator, noun: str, given: tuple[str, ...], key: str) -> None:
    """Made, listed, shown, changed and deleted: what was not named in a change stays."""
    assert f"{noun} 'life' is created\n" == operator.done(noun, "create", "life", "-t", "a/#", "--topic", "b", *given)
    views = operator.asked(noun, "list")
    origins = {view["name"]: view["origin"] for view in views if view["name"] != "receipts"}  # the fan-out's own
    assert {"fixed": "configuration", "life": "command"} == origins
    table = operator.done(noun, "list")
    assert "a/# b" in table and "fixed" in table
    assert f"{noun} 'life' is changed\n" == operator.done(noun, "change", "life", "--set", f"{key}=5")
    shown = operator.asked(noun, "show", "life")
    assert (["a/#", "b"], 5) == (shown["topics"], shown[key])
    lines = dict(line.split(maxsplit=1) for line in operator.done(noun, "show", "life").splitlines() if " " in line)
    assert ("a/# b", "5") == (lines["topics"], lines[key])
    assert "already" in operator.refused(noun, "create", "life", "-t", "a", *given)
    assert "life" == operator.asked(noun, "delete", "life", "--yes")["name"]
    assert "life" in operator.refused(noun, "show", "life")
    # What stands in the configuration is changed there.
    for verb in (("change", "fixed", "--set", f"{key}=5"), ("delete", "fixed", "--yes")):
        assert "configuration" in operator.refused(noun, *verb)
    operator.done(noun, "show", "fixed")


def test_flags_are_options(operator: Operator) -> None:
    """Durations are written as people write them; flags and `--set` say the same."""
    operator.done("queue", "create", "dead")
    flags = ("--kind", "regular", "--strategy", "random", "--retention", "12h", "--dead-letter", "dead")
    made = operator.asked("queue", "create", "flags", "-t", "f", *flags)
    assert ("regular", "random", 43200, "dead") == tuple(
        made[key] for key in ("kind", "strategy", "retention", "dead_letter")
    )
    changed = operator.asked("queue", "change", "flags", "--retention", "0")
    assert (0, "random") == (changed["retention"], changed["strategy"])
    assert 129600 == operator.asked("stream", "create", "flags", "-t", "f", "--retention", "1.5d")["retention"]
    made = operator.asked("queue", "create", "set", "-t", "x", "--set", "kind=last_value", "--set", "key=property:vin")
    assert ("last_value", "property:vin") == (made["kind"], made["key"])
    for text, seconds in {
        "7d": 604800,
        "12h": 43200,
        "30m": 1800,
        "45s": 45,
        "45": 45,
        "0": 0,
        "0.5h": 1800,
        "0.5s": 0.5,
    }.items():
        assert seconds == duration(text), text


@pytest.mark.parametrize("noun", ["queue", "stream"])
def test_messages_are_read_without_being_taken(node: LocalNode, operator: Operator, noun: str) -> None:
    """Position, topic and payload as `sub -v` prints them, bytes as they are; as often as one likes, page by page."""
    count, name = 520, unique("read")
    operator.done(noun, "create", name, "-t", f"{name}/#")
    fill(node, [*((f"{name}/{number}", b"%d" % number) for number in range(count)), (f"{name}/raw", b"\x00\xff")])
    found = operator.asked(noun, "read", name, "--limit", 10_000)
    assert [f"{name}/{number}" for number in (*range(count), "raw")] == [entry["topic"] for entry in found]
    assert ["utf8"] * count + ["base64"] == [entry["encoding"] for entry in found]
    positions = [entry["position"] for entry in found]
    assert sorted(set(positions)) == positions
    wanted = "".join(f"{positions[number]} {name}/{number} {number}\n" for number in (5, 6, 7))
    assert wanted == operator.done(noun, "read", name, "--after", positions[4], "--limit", 3)
    assert f"{positions[-1]} {name}/raw \x00\ufffd\n" == operator.done(noun, "read", name, "--after", positions[-2])
    assert 510 == len(operator.done(noun, "read", name, "--limit", 510).splitlines())
    assert 100 == len(operator.done(noun, "read", name).splitlines())
    with connected(node) as client:
        subscribe(client, f"$queue/{name}" if noun == "queue" else f"$stream/{name}/earliest")
        assert b"0" == take(client, 1)[0].payload


def test_a_rule_copies_what_is_published(node: LocalNode, operator: Operator) -> None:
    """From the configuration on; what was copied is read where it went."""
    fill(node, [("copied/x", b"one")])
    assert "copied/x one\n" in operator.done("stream", "read", "fixed")
    assert "stream:fixed" == operator.asked("capture", "show", "fixed")["to"]


# -- deleting asks


def answered(node: LocalNode, answer: str, *words: str) -> tuple[int, str]:
    """`motorcade queue delete WORDS` on a terminal, where somebody types an answer: exit code and output."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answer.encode())
        done = run_process("queue", "delete", *words, *node.at, stdin=theirs)
    finally:
        os.close(ours)
        os.close(theirs)
    return done.returncode, done.stdout + done.stderr


def test_deleting_asks_on_a_terminal(node: LocalNode, operator: Operator) -> None:
    """Only a yes deletes; without a terminal `--yes` is wanted."""
    operator.done("queue", "create", "asked", "-t", "asked")
    Compacted(node, "asked").put(("k", b"1"))
    for words, what in ((("asked",), "queue 'asked'"), (("asked", "--exclusive"), "the compacted queue of client")):
        code, out = answered(node, "n\n", *words)
        assert 1 == code
        assert f"Delete {what}" in out and "with all messages in it?" in out and "nothing was deleted" in out
    for flag in ("--declared", "--exclusive"):
        assert "asked" in operator.done("queue", "list", flag)
    code, out = answered(node, "y\n", "asked")
    assert 0 == code and "queue 'asked' is deleted" in out
    done = run("queue", "delete", "fixed", *node.at, stdin="y\n")
    assert (2, "", True) == (done.returncode, done.stdout, "--yes" in done.stderr)


# -- the configuration, and what outlives a node


def test_a_reload_declares_changes_and_removes() -> None:
    """At once; a wrong file is refused with its line, and everything stays. Contents stay with a name."""
    old = '[plugins.queues.queue.old]\ntopics = ["old"]\n\n[plugins.queues.queue.stays]\ntopics = ["a"]\n'
    new = '[plugins.queues.queue.new]\ntopics = ["new"]\n\n[plugins.queues.queue.stays]\ntopcs = ["b"]\n'
    with LocalNode(old) as node, Operator(node) as operator:

        def queues() -> dict[str, object]:
            return {entry["name"]: entry["topics"] for entry in operator.asked("queue", "list")}

        fill(node, [("a", b"kept")])
        assert {"old": ["old"], "stays": ["a"]} == queues()
        node.file.write_text(new)
        refused = operator.refused("config", "reload")
        assert "motorcade.toml:5: unknown key 'plugins.queues.queue.stays.topcs'; did you mean 'topics'?" in refused
        assert {"old": ["old"], "stays": ["a"]} == queues()
        with connected(node) as client:
            subscribe(client, "$queue/new")  # before it is there
            node.file.write_text(new.replace("topcs", "topics"))
            operator.done("config", "reload")
            assert {"new": ["new"], "stays": ["b"]} == queues()
            fill(node, [("new", b"x")])
            assert b"x" == take(client, 1)[0].payload
        fill(node, [("b", b"more"), ("a", b"no more")])
        assert ["kept", "more"] == [entry["payload"] for entry in operator.asked("queue", "read", "stays")]


MISTAKES = [
    ('[plugins.queues.queue.x]\ntopics = ["t"]\nkind = "best"\n', 3, "kind"),
    ('[plugins.queues.queue.x]\ntopics = ["t"]\nmax_messages = "many"\n', 3, "max_messages"),
    ('[plugins.queues.queue.x]\ntopics = ["t"]\n\ncolour = "red"\n', 4, "colour"),
    ('[plugins.queues.queue."a b"]\ntopics = ["t"]\n', 1, "a b"),
    ('[plugins.queues.queue.x]\n\ntopics = ["a/#/b"]\n', 3, "a/#/b"),
    ('[plugins.streams.stream.x]\ntopics = ["t"]\nretention = -1\n', 3, "retention"),
    ('[plugins.streams.stream.x]\ntopics = "t"\n', 2, "topics"),
    ('[plugins.streams]\ncolour = "red"\n', 2, "colour"),
    ('[plugins.capture.rule.x]\ntopics = ["t"]\nto = "nowhere"\n', 3, "nowhere"),
    ('[plugins.capture.rule.x]\ntopics = ["t"]\n', 1, "to"),
]


def test_a_mistake_in_the_file_is_named_with_its_line(tmp_path: Path) -> None:
    """`config check`, and `serve` too, say file, line and key, and what is wrong."""
    for text, line, said in MISTAKES:
        (tmp_path / "m.toml").write_text(text)
        for words in (("config", "check", "m.toml"), ("serve", "--config", "m.toml", "--mqtt", "127.0.0.1:0")):
            done = run(*words, cwd=tmp_path)
            assert (1, "") == (done.returncode, done.stdout), text
            assert f"m.toml:{line}:" in done.stderr and said in done.stderr, text
            assert "Traceback" not in done.stderr, text


def test_what_was_declared_by_command_is_there_after_a_restart(tmp_path: Path) -> None:
    """What is declared in the file later belongs to the file, with its contents."""
    data, topics = tmp_path / "data", '[plugins.queues.queue.jobs]\ntopics = ["jobs/#"]\nmax_messages = 6\n'
    with NodeProcess(http=True, data=data) as node, Operator(node) as operator:
        for noun in ("queue", "stream"):
            operator.done(noun, "create", "kept", "-t", "kept/#", "--set", "max_messages=7")
        operator.done("capture", "create", "kept", "-t", "x/#", "--to", "stream:kept")
        operator.done("queue", "create", "jobs", "-t", "jobs/#")
        fill(node, [("jobs/a", b"%d" % number) for number in range(5)])
    with NodeProcess(http=True, data=data, config=topics) as node, Operator(node) as operator:
        for noun, key, value in (
            ("queue", "max_messages", 7),
            ("stream", "max_messages", 7),
            ("capture", "to", "stream:kept"),
        ):
            shown = operator.asked(noun, "show", "kept")
            assert ("command", value) == (shown["origin"], shown[key])
        shown = operator.asked("queue", "show", "jobs")
        assert ("configuration", 6, 5) == (shown["origin"], shown["max_messages"], shown["messages"])
