"""Queues, streams and capture rules as operators meet them: in the configuration file and on the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.scenarios.witness import wait_until
from tests.support.consumers import connected, fill, numbered, payloads, subscribe, take, unique
from tests.support.node import ROOT, NodeProcess
from tests.support.operator import Operator, payload_of

CONFIG = """\
[plugins.queues.queue.configured]
topics = ["configured/#"]
max_messages = 7

[plugins.streams.stream.history]
topics = ["history/#", "more/+"]
retention = 3600

[plugins.capture.rule.copy]
topics = ["copy/#"]
to = "stream:history"
"""

NOUNS = {"queue": "queues", "stream": "streams", "capture": "captures"}
TARGET: dict[str, dict[str, Any]] = {"queue": {}, "stream": {}, "capture": {"to": "stream:history"}}
CONFIGURED = {"queue": "configured", "stream": "history", "capture": "copy"}
every_noun = pytest.mark.parametrize("noun", list(NOUNS))
with_contents = pytest.mark.parametrize("noun", ["queue", "stream"])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "motorcade.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def node(file: Path) -> Iterator[NodeProcess]:
    with NodeProcess("--store", "rocksdb://", "--config", str(file), http=True) as running:
        yield running


def create(desk: Operator, noun: str, name: str, *words: str) -> str:
    target = ["--to", "stream:history"] if noun == "capture" else []
    return desk.done(noun, "create", name, "--topic", f"{name}/#", *target, *words)


# --- the command line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noun", ["stream"])  # one way for all nouns: `test_json_for_scripts` has the others
def test_a_life_by_commands(node: NodeProcess, desk: Operator, noun: str) -> None:
    """Create, list, show, change, delete; each says what it did, and a second time what stands in the way."""
    name = unique("life")
    assert name in create(desk, noun, name)
    assert 409 == desk.web.post(f"{NOUNS[noun]}/{name}", json={"topics": ["t"], **TARGET[noun]}).status_code
    assert name in desk.done(noun, "change", name, "--topic", f"{name}/only")
    assert f"{name}/only" in desk.done(noun, "show", name)
    assert name in desk.done(noun, "list")
    assert name in desk.done(noun, "delete", name, "--yes")
    assert name in desk.refused(noun, "show", name)
    assert 404 == desk.web.delete(f"{NOUNS[noun]}/{name}").status_code
    assert name not in desk.names(NOUNS[noun])


@every_noun
def test_json_for_scripts(desk: Operator, noun: str) -> None:
    """A list of views, one view; each with its name, its origin and all options that were set."""
    name = unique("json")
    made = desk.asked(
        noun, "create", name, "--topic", "a/+", "-t", "b", *(["--to", "stream:history"] * (noun == "capture"))
    )
    assert (name, "command", ["a/+", "b"]) == (made["name"], made["origin"], made["topics"])
    views = desk.asked(noun, "list")
    assert isinstance(views, list)
    origins = {view["name"]: view["origin"] for view in views}
    assert ("command", "configuration") == (origins[name], origins[CONFIGURED[noun]])
    assert sorted(origins) == list(origins), "by name"
    assert made == desk.show(NOUNS[noun], name)
    assert name == desk.asked(noun, "delete", name, "--yes")["name"]


def test_options_of_a_queue_by_commands(desk: Operator) -> None:
    """`--set` takes every option; what is not set has the documented default."""
    name = unique("options")
    desk.done(
        *("queue", "create", name, "--topic", "x", "--set", "kind=last_value", "--set", "key=property:vin"),
        *("--set", "max_messages=9", "--set", "overflow=drop_oldest", "--set", "ack_timeout=1.5"),
    )
    view = desk.asked("queue", "show", name)
    assert {
        "kind": "last_value",
        "key": "property:vin",
        "max_messages": 9,
        "overflow": "drop_oldest",
        "ack_timeout": 1.5,
        "strategy": "round_robin",
        "max_bytes": 1 << 30,
        "retention": 604800,
        "redispatch_delay": 0.1,
        "max_attempts": 10,
        "dead_letter": "",
        "priorities": 1,
    } == {key: view[key] for key in view.keys() & QUEUE_OPTIONS}
    view = desk.asked("stream", "show", "history")
    assert (3600, 10 << 30, 0) == (view["retention"], view["max_bytes"], view["max_messages"])


QUEUE_OPTIONS = {
    *("kind", "key", "max_messages", "overflow", "ack_timeout", "strategy", "max_bytes", "retention"),
    *("redispatch_delay", "max_attempts", "dead_letter", "priorities"),
}


@pytest.mark.parametrize(
    ("noun", "options", "said"),
    [
        ("queue", {"kind": "best"}, "regular"),
        ("queue", {"strategy": "fair"}, "round_robin"),
        ("queue", {"overflow": "panic"}, "drop_oldest"),
        ("queue", {"priorities": 11}, "priorities"),
        ("queue", {"priorities": 0}, "priorities"),
        ("queue", {"max_messages": -1}, "max_messages"),
        ("queue", {"max_messages": "many"}, "max_messages"),
        ("queue", {"colour": "red"}, "colour"),
        ("queue", {"key": "colour"}, "property:"),
        ("queue", {"topics": ["a/#/b"]}, "a/#/b"),
        ("queue", {"topics": ["$queue/x"]}, "$queue/x"),
        ("queue", {"topics": ["$share/g/t"]}, "$share/g/t"),
        ("queue", {"dead_letter": "-x"}, "-x"),
        ("stream", {"retention": -1}, "retention"),
        ("stream", {"colour": "red"}, "colour"),
        ("stream", {"topics": ["a/+b"]}, "a/+b"),
        ("stream", {"topics": ["$stream/x"]}, "$stream/x"),
        ("stream", {"topics": "t"}, "topics"),
        ("capture", {"to": "stream:history", "max_pending": 0}, "max_pending"),
        ("capture", {"to": "stream:history", "colour": "red"}, "colour"),
        ("capture", {}, "to"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named(desk: Operator, noun: str, options: dict[str, Any], said: str) -> None:
    """The message tells which option it is and what it may be; nothing is made."""
    name = unique("wrong")
    answer = desk.web.post(f"{NOUNS[noun]}/{name}", json={"topics": ["t"]} | options)
    assert 400 == answer.status_code, answer.text
    assert said in answer.json()["message"]
    assert name not in desk.names(NOUNS[noun])


def test_a_wrong_option_is_named_by_the_command(desk: Operator) -> None:
    """Exit code 1 where the node refuses it, 2 where it is no option or no filter at all."""
    name = unique("wrong")
    assert "round_robin" in desk.refused("queue", "create", name, "--topic", "t", "--set", "strategy=fair")
    assert "a/#/b" in desk.refused("stream", "create", name, "--topic", "a/#/b", code=2)
    assert "kafka" in desk.refused("capture", "create", name, "--topic", "t", "--to", "kafka:x")


@every_noun
@pytest.mark.parametrize("name", ["-x", "a b", "a/b", "ü", "x" * 65])
def test_a_bad_name_is_named(desk: Operator, noun: str, name: str) -> None:
    """With what a name may be; over HTTP it is 400."""
    answer = desk.web.post(f"{NOUNS[noun]}/{quote(name, safe='')}", json={"topics": ["t"], **TARGET[noun]})
    assert 400 == answer.status_code, answer.text
    assert "letters, digits" in answer.json()["message"]


def test_a_queue_for_dead_letters(desk: Operator) -> None:
    """One that takes dead letters only has none; while others name it, it cannot go."""
    dead = unique("dead")
    desk.create("queues", dead, topics=[])
    jobs = unique("jobs")
    desk.done("queue", "create", jobs, "--topic", "t", "--dead-letter", dead)
    assert dead == desk.show("queues", jobs)["dead_letter"]
    assert jobs in desk.refused("queue", "delete", dead, "--yes"), "it is in use"


@with_contents
def test_reading_takes_nothing_out(node: NodeProcess, desk: Operator, noun: str) -> None:
    """`read` pages by position, shows what there is to know, and leaves everything where it is."""
    name = unique("read")
    desk.create(NOUNS[noun], name, topics=[f"{name}/#"])
    fill(node, numbered(f"{name}/a", 25))
    first = desk.asked(noun, "read", name, "--limit", 10)
    assert [b"%d" % number for number in range(10)] == [payload_of(message) for message in first]
    assert {"position", "topic", "payload", "encoding", "time", "publisher", "guid", "properties"} <= set(first[0])
    rest = desk.asked(noun, "read", name, "--after", first[-1]["position"])
    assert [b"%d" % number for number in range(10, 25)] == [payload_of(message) for message in rest]
    assert [] == desk.read(NOUNS[noun], name, after=rest[-1]["position"])
    assert noun == "queue" or 25 == len(desk.done(noun, "read", name).splitlines())
    with connected(node) as client:
        subscribe(client, f"$queue/{name}" if noun == "queue" else f"$stream/{name}/earliest")
        assert 25 == len(take(client, 25))


def test_a_node_that_cannot_be_reached(desk: Operator) -> None:
    said = desk.refused("queue", "list", "--http", "127.0.0.1:1")
    assert "127.0.0.1:1" in said


def test_deleting_asks_first(desk: Operator) -> None:
    """Without `--yes`, and with nobody to answer, nothing is deleted."""
    name = unique("asks")
    desk.create("queues", name, topics=["t"])
    result = desk.command("queue", "delete", name)
    assert 0 != result.returncode
    assert name in desk.names("queues")
    assert "--yes" in result.stdout + result.stderr


def test_numbers_of_a_queue_are_shown(node: NodeProcess, desk: Operator) -> None:
    """How many messages and consumers there are, for people and scripts, and in the metrics."""
    name = unique("shown")
    desk.create("queues", name, topics=[f"{name}/#"])
    fill(node, numbered(f"{name}/a", 40))
    with connected(node) as client:
        subscribe(client, f"$queue/{name}")
        take(client, 5, ack=False)
        view = desk.asked("queue", "show", name)
        assert (40, 1) == (view["messages"], view["consumers"])
    assert desk.counted("queue") > 0


# --- the configuration --------------------------------------------------------------------------------------------


def test_what_the_configuration_declares_works(node: NodeProcess, desk: Operator) -> None:
    name = unique("x")
    fill(node, [(f"history/{name}", b"1"), (f"more/{name}", b"2"), (f"copy/{name}", b"3")])
    topics = [message["topic"] for message in desk.read("streams", "history", limit=1000)]
    assert {f"history/{name}", f"more/{name}", f"copy/{name}"} <= set(topics)
    assert 7 == desk.show("queues", "configured")["max_messages"]


@every_noun
def test_what_the_configuration_declares_is_changed_there(desk: Operator, file: Path, noun: str) -> None:
    """Commands that would change or delete it are refused and say where it stands; HTTP says 409."""
    name = CONFIGURED[noun]
    said = desk.refused(noun, "delete", name, "--yes")
    assert name in said
    assert "configuration" in said
    for method in ("PUT", "PATCH", "DELETE", "POST"):
        body: dict[str, Any] = {} if method == "DELETE" else {"json": {"topics": ["other"], **TARGET[noun]}}
        answer = desk.web.request(method, f"{NOUNS[noun]}/{name}", **body)
        assert 409 == answer.status_code, f"{method}: {answer.text}"
        assert "configuration" in answer.json()["message"], method
    assert name in desk.names(NOUNS[noun])


def test_a_reload_changes_declarations(tmp_path: Path) -> None:
    """SIGHUP and `motorcade config reload`: new ones come, changed ones change with their contents, others go."""
    path = tmp_path / "motorcade.toml"
    path.write_text(CONFIG)
    with NodeProcess("--store", "rocksdb://", "--config", str(path), http=True) as node, Operator(node) as desk:
        fill(node, numbered("configured/a", 3))
        with connected(node) as client:
            subscribe(client, "$queue/new")
            path.write_text(
                CONFIG.replace("max_messages = 7", "max_messages = 8").replace('"configured/#"', '"other/#"')
                + '\n[plugins.queues.queue.new]\ntopics = ["new/#"]\n'
            )
            desk.done("config", "reload")
            wait_until(lambda: "new" in desk.names("queues"), "the new queue")
            fill(node, [("new/a", b"x")])
            assert [b"x"] == payloads(take(client, 1))
        assert 8 == desk.show("queues", "configured")["max_messages"]
        assert 3 == len(desk.read("queues", "configured"))
        fill(node, [("other/a", b"y"), ("configured/a", b"z")])
        assert b"y" == payload_of(desk.read("queues", "configured")[-1])
        path.write_text(CONFIG.replace("[plugins.queues.queue.configured]", "[plugins.queues.queue.renamed]"))
        os.kill(node.pid, signal.SIGHUP)
        wait_until(lambda: desk.names("queues") == ["renamed"], "the others are gone")
        path.write_text(CONFIG + '\n[plugins.queues.queue.bad]\nkind = "best"\n')
        said = desk.refused("config", "reload")
        assert "kind" in said
        assert ["renamed"] == desk.names("queues"), "a bad file changes nothing"


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
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
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    """`config check`, and `serve` too, say file, line and key, and what is wrong."""
    path = tmp_path / "motorcade.toml"
    path.write_text(text)
    commands = [["config", "check", str(path)]]
    if said in ("kind", "to"):  # it is the same check: a few are enough
        commands.append(["serve", "--config", str(path), "--mqtt", "127.0.0.1:0"])
    for words in commands:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("MOTORCADE_")}
        result = subprocess.run(
            [sys.executable, "-m", "motorcade", *words],
            env=clean | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "500"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        told = result.stdout + result.stderr
        assert 1 == result.returncode, told
        assert f"{path.name}:{line}:" in told, told
        assert said in told, told
        assert "Traceback" not in told


def test_a_command_cannot_take_a_name_of_the_configuration(tmp_path: Path) -> None:
    """And what was made by a command and is declared in the file later belongs to the file, with its contents."""
    path = tmp_path / "motorcade.toml"
    path.write_text("")
    data = tmp_path / "data"
    with (
        NodeProcess("--store", "rocksdb://", "--config", str(path), data=data, http=True) as node,
        Operator(node) as desk,
    ):
        desk.create("queues", "jobs", topics=["jobs/#"])
        fill(node, numbered("jobs/a", 5))
    path.write_text('[plugins.queues.queue.jobs]\ntopics = ["jobs/#"]\nmax_messages = 6\n')
    with (
        NodeProcess("--store", "rocksdb://", "--config", str(path), data=data, http=True) as node,
        Operator(node) as desk,
    ):
        view = desk.show("queues", "jobs")
        assert ("configuration", 6) == (view["origin"], view["max_messages"])
        assert 5 == len(desk.read("queues", "jobs"))
