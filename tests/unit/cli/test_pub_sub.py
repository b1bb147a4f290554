"""`motorcade pub` and `motorcade sub`, with each other and with mosquitto's."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import PATIENCE, start_process
from tests.support.consumers import lasting, subscribe
from tests.support.local import LocalNode
from tests.support.ports import free_port
from tests.unit.cli.conftest import Run


class Absent:
    """A subscriber that was there, for whom messages wait; `printed` is `motorcade sub` in its name."""

    def __init__(self, run: Run, node: LocalNode, client_id: str, filter_: str) -> None:
        self.run = run
        self.words = ("sub", "-p", node.port, "-c", "-i", client_id, "-t", filter_, "-q", 2, "-W", PATIENCE)
        with lasting(node, client_id) as client:
            subscribe(client, filter_, 2)
            client.disconnect()

    def printed(self, count: int, *options: object) -> list[str]:
        done = self.run(*self.words, "-C", count, *options)
        assert (0, "") == (done.returncode, done.stderr)
        return list(done.stdout.splitlines())


def test_messages_are_printed_by_the_format(run: Run, node: LocalNode) -> None:
    listener = Absent(run, node, "formats", "fmt/#")
    options = ("--property", "content-type=text/plain", "--property", "response-topic=back", "--user-property", "k=v")
    done = run("pub", "-p", node.port, "-t", "fmt/a", "-m", "hä", "-q", "2", *options)
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)
    run("pub", "-p", node.port, "-t", "fmt/b", "-n", "--v311", "-q", 1)
    wanted = ["fmt/a|hä|2|0|3|68c3a4|text/plain|back|k:v|%\tend", "fmt/b||1|0|0|||||%\tend"]
    assert wanted == listener.printed(2, "-F", r"%t|%p|%q|%r|%l|%x|%C|%R|%P|%%\tend")


def test_lines_files_and_repeats(run: Run, node: LocalNode, tmp_path: Path) -> None:
    """Payloads from everywhere; as they are, after their topic, and as one JSON object each."""
    (tmp_path / "payload").write_bytes(b"from a file")
    plain, verbose, scripts = (Absent(run, node, name, "many") for name in ("plain", "verbose", "scripts"))
    port = ("-p", node.port, "-t", "many", "-q", "1")
    for words, stdin in (
        (("-l",), "one\ntwo\n"),
        (("-s",), "whole"),
        (("-f", "payload"), ""),
        (("-m", "again", "--repeat", "3", "--rate", "1000"), ""),
        (("-s", "--user-property", "k=v"), "\x00"),
    ):
        assert 0 == run("pub", *port, *words, stdin=stdin).returncode, words
    wanted = ["one", "two", "whole", "from a file", "again", "again", "again", "\x00"]
    assert wanted == plain.printed(len(wanted))
    assert [f"many {payload}" for payload in wanted] == verbose.printed(len(wanted), "-v")
    *_, before, last = map(json.loads, scripts.printed(len(wanted), "--json"))
    keys = ("topic", "payload", "qos", "retain")
    assert ["many", "again", 1, False] == [before[key] for key in keys]
    assert ["many", "\x00", 1, False, [["k", "v"]]] == [last[key] for key in (*keys, "user_properties")]


def test_retained_messages_can_be_wanted_or_not(run: Run, node: LocalNode) -> None:
    assert 0 == run("pub", "-p", node.port, "-t", "kept", "-m", "last", "-r", "-q", "1").returncode
    wanted = run("sub", "-p", node.port, "-t", "kept", "-C", "1", "-W", PATIENCE, "-F", "%p %r")
    assert (0, "last 1\n") == (wanted.returncode, wanted.stdout)
    unwanted = run("sub", "-p", node.port, "-t", "kept", "-W", "0.3", "-R")
    assert (0, "") == (unwanted.returncode, unwanted.stdout)


def test_too_few_messages_in_time_is_a_failure(run: Run, node: LocalNode) -> None:
    done = run("sub", "-p", node.port, "-t", "nothing", "-C", "2", "-W", "0.2")
    assert (1, "error: 0 of 2 messages came\n") == (done.returncode, done.stderr)


def test_properties_of_the_subscription_and_what_the_broker_says_to_them(run: Run, node: LocalNode) -> None:
    """A note comes at once, not at the end: the process is asked for it while it waits."""
    offset = ("sub", "-p", str(node.port), "-t", "$stream/nowhere", "-W", str(PATIENCE), "--user-property")
    with start_process(*offset, "stream-offset=earliest") as waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline().startswith("note: there is no stream 'nowhere' yet")
        waiting.send_signal(signal.SIGINT)
        assert ("", "") == waiting.communicate(timeout=PATIENCE)
    assert 0 == waiting.returncode
    refused = run(*offset, "stream-offset=tomorrow")
    assert 1 == refused.returncode
    assert "the subscription to '$stream/nowhere' was refused: topic filter invalid (0x8f): " in refused.stderr
    assert "tomorrow" in refused.stderr, "what is wrong"


def test_nobody_there_is_one(run: Run) -> None:
    port = free_port()
    for verb in (("pub", "-t", "a", "-m", "x"), ("sub", "-t", "a")):
        done = run(*verb, "-p", port)
        assert (1, f"error: cannot connect to 127.0.0.1:{port}: Connection refused\n") == (done.returncode, done.stderr)


def test_mosquitto_clients_and_ours_understand_each_other(run: Run, node: LocalNode) -> None:
    publish, listen = shutil.which("mosquitto_pub"), shutil.which("mosquitto_sub")
    if publish is None or listen is None:
        pytest.skip("mosquitto-clients is not installed")
    listener = Absent(run, node, "ours", "both/ours")
    subprocess.run([publish, "-p", str(node.port), "-t", "both/ours", "-m", "theirs", "-q", "2", "-V", "5"], check=True)
    assert ["theirs"] == listener.printed(1)
    run("pub", "-p", node.port, "-t", "both/theirs", "-m", "ours", "-r", "-q", "1")
    words = [listen, "-p", str(node.port), "-t", "both/theirs", "-C", "1", "-W", "30"]
    assert b"ours\n" == subprocess.run(words, capture_output=True, check=True).stdout
