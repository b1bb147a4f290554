"""`motorcade pub` and `motorcade sub`, with each other and with mosquitto's."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.scenarios.witness import wait_until
from tests.support import wire
from tests.support.node import NodeProcess
from tests.support.ports import free_port
from tests.unit.cli.conftest import PATIENCE, Run, environment

Listen = Callable[..., "Listener"]


class Listener:
    """`motorcade sub` in the background, subscribed."""

    def __init__(self, node: NodeProcess, *args: str) -> None:
        marker = "ready/for/the/test"
        command = [sys.executable, "-m", "motorcade", "sub", "-p", str(node.port), "-t", marker, *args]
        self.process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        # Told apart from what a test sends by the topic that only this function uses.
        arrived = threading.Event()
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, args=(arrived,), daemon=True)
        self.reader.start()
        with wire.Client(node) as client:
            client.connect()
            deadline = threading.Event()
            for _ in range(600):
                if arrived.is_set() or self.process.poll() is not None:
                    break
                client.publish(marker, b"MARKER", 1)
                deadline.wait(0.1)
        assert arrived.is_set(), "motorcade sub did not subscribe"

    def _read(self, arrived: threading.Event) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "MARKER" in line:
                arrived.set()
            else:
                self.lines.append(line)

    def end(self, number: signal.Signals, count: int) -> tuple[int, list[str]]:
        """Exit code and lines, when a signal comes after so many of them."""
        wait_until(lambda: len(self.lines) >= count, f"{count} lines are printed")
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        self.reader.join(PATIENCE)
        return code, self.lines


@pytest.fixture
def listen(node: NodeProcess) -> Iterator[Listen]:
    """`listen("-t", "a/#", …)`: a subscriber that hears everything sent from now on."""
    started: list[Listener] = []

    def listen_(*args: str) -> Listener:
        started.append(Listener(node, *args))
        return started[-1]

    yield listen_
    for listener in started:
        if listener.process.poll() is None:
            listener.process.kill()
            listener.process.wait(PATIENCE)
        for stream in (listener.process.stdout, listener.process.stderr):
            assert stream is not None
            stream.close()


def test_messages_are_printed_by_the_format(run: Run, node: NodeProcess, listen: Listen) -> None:
    listener = listen("-t", "fmt/#", "-q", "2", "-F", r"%t|%p|%q|%r|%l|%x|%C|%R|%P|%%\tend")
    options = ("--property", "content-type=text/plain", "--property", "response-topic=back", "--user-property", "k=v")
    done = run("pub", "-p", node.port, "-t", "fmt/a", "-m", "hä", "-q", "2", *options)
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)
    run("pub", "-p", node.port, "-t", "fmt/b", "-n", "--v311")
    code, lines = listener.end(signal.SIGINT, 2)
    assert (0, ["fmt/a|hä|2|0|3|68c3a4|text/plain|back|k:v|%\tend\n", "fmt/b||0|0|0|||||%\tend\n"]) == (code, lines)


def test_lines_files_and_repeats(run: Run, node: NodeProcess, listen: Listen, tmp_path: Path) -> None:
    (tmp_path / "payload").write_text("from a file")
    listener = listen("-t", "many", "-q", "1", "-v")
    port = ("-p", node.port, "-t", "many", "-q", "1")
    assert 0 == run("pub", *port, "-l", stdin="one\ntwo\n").returncode
    assert 0 == run("pub", *port, "-s", stdin="whole").returncode
    assert 0 == run("pub", *port, "-f", "payload").returncode
    assert 0 == run("pub", *port, "-m", "again", "--repeat", "3", "--rate", "1000").returncode
    wanted = ["one", "two", "whole", "from a file", "again", "again", "again"]
    assert (0, [f"many {payload}\n" for payload in wanted]) == listener.end(signal.SIGTERM, len(wanted))


def test_json_is_one_object_per_message(run: Run, node: NodeProcess, listen: Listen) -> None:
    listener = listen("-t", "json", "--json")
    run("pub", "-p", node.port, "-t", "json", "-m", '{"a": 1}', "--user-property", "k=v")
    run("pub", "-p", node.port, "-t", "json", "-f", "/dev/stdin", stdin="\x00")
    _, lines = listener.end(signal.SIGINT, 2)
    first, second = map(json.loads, lines)
    assert ("json", '{"a": 1}', 0, False, [["k", "v"]]) == tuple(
        first[key] for key in ("topic", "payload", "qos", "retain", "user_properties")
    )
    assert "\x00" == second["payload"]


def test_retained_messages_can_be_wanted_or_not(run: Run, node: NodeProcess) -> None:
    assert 0 == run("pub", "-p", node.port, "-t", "kept", "-m", "last", "-r", "-q", "1").returncode
    wanted = run("sub", "-p", node.port, "-t", "kept", "-C", "1", "-W", "30", "-F", "%p %r")
    assert (0, "last 1\n") == (wanted.returncode, wanted.stdout)
    unwanted = run("sub", "-p", node.port, "-t", "kept", "-W", "0.3", "-R")
    assert (0, "") == (unwanted.returncode, unwanted.stdout)


def test_too_few_messages_in_time_is_a_failure(run: Run, node: NodeProcess) -> None:
    done = run("sub", "-p", node.port, "-t", "nothing", "-C", "2", "-W", "0.2")
    assert (1, "error: 0 of 2 messages came\n") == (done.returncode, done.stderr)


def test_properties_of_the_subscription_and_what_the_broker_says_to_them(run: Run, node: NodeProcess) -> None:
    offset = ("sub", "-p", str(node.port), "-t", "$stream/nowhere", "-W", str(PATIENCE), "--user-property")
    with subprocess.Popen(
        [sys.executable, "-m", "motorcade", *offset, "stream-offset=earliest"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline().startswith("note: there is no stream 'nowhere' yet")
        waiting.send_signal(signal.SIGINT)
        assert ("", "") == waiting.communicate(timeout=PATIENCE)
    assert 0 == waiting.returncode
    refused = run(*offset, "stream-offset=tomorrow")
    assert 1 == refused.returncode
    assert "the subscription to '$stream/nowhere' was refused: topic filter invalid (0x8f): " in refused.stderr
    assert "tomorrow" in refused.stderr, "what is wrong"


def test_a_session_is_kept_for_its_id(run: Run, node: NodeProcess) -> None:
    subscribe = ("sub", "-p", node.port, "-t", "later", "-q", "1", "-c", "-i", "keeper")
    assert 0 == run(*subscribe, "-W", "0.2").returncode
    assert 0 == run("pub", "-p", node.port, "-t", "later", "-m", "kept", "-q", "1").returncode
    assert "kept\n" == run(*subscribe, "-C", "1", "-W", "30").stdout


@pytest.mark.parametrize(
    ("args", "code", "wanted"),
    [
        (("pub", "-t", "a"), 2, "give exactly one of -m, -f, -l, -s and -n"),
        (("pub", "-t", "a", "-m", "x", "-n"), 2, "give exactly one of"),
        (("pub", "-t", "a/+", "-m", "x"), 2, "wildcard"),
        (("pub", "-m", "x"), 2, "Missing option"),
        (("pub", "-t", "a", "-m", "x", "-q", "3"), 2, "-q"),
        (("pub", "-t", "a", "-m", "x", "--property", "colour=red"), 2, "content-type"),
        (("pub", "-t", "a", "-m", "x", "--user-property", "a=b", "--v311"), 2, "MQTT 3.1.1 has no properties"),
        (("pub", "-t", "a", "-f", "nowhere"), 2, "cannot read nowhere"),
        (("sub", "-t", "a/#/b"), 2, "must be the last level"),
        (("sub", "-t", "a", "-F", "%z"), 2, "is no field"),
        (("sub", "-t", "a", "-c"), 2, "--id"),
    ],
)
def test_wrong_usage_is_two(run: Run, args: tuple[str, ...], code: int, wanted: str) -> None:
    done = run(*args)
    assert code == done.returncode
    assert wanted in " ".join(done.stderr.split())


def test_nobody_there_is_one(run: Run) -> None:
    port = free_port()
    for verb in (("pub", "-t", "a", "-m", "x"), ("sub", "-t", "a")):
        done = run(*verb, "-p", port)
        assert (1, f"error: cannot connect to 127.0.0.1:{port}: Connection refused\n") == (done.returncode, done.stderr)


def test_mosquitto_clients_and_ours_understand_each_other(run: Run, node: NodeProcess, listen: Listen) -> None:
    publish, subscribe = shutil.which("mosquitto_pub"), shutil.which("mosquitto_sub")
    if publish is None or subscribe is None:
        pytest.skip("mosquitto-clients is not installed")
    listener = listen("-t", "both/ours", "-q", "2")
    subprocess.run([publish, "-p", str(node.port), "-t", "both/ours", "-m", "theirs", "-q", "2", "-V", "5"], check=True)
    assert (0, ["theirs\n"]) == listener.end(signal.SIGINT, 1)
    run("pub", "-p", node.port, "-t", "both/theirs", "-m", "ours", "-r", "-q", "1")
    got = subprocess.run(
        [subscribe, "-p", str(node.port), "-t", "both/theirs", "-C", "1", "-W", "30"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ours\n" == got.stdout
