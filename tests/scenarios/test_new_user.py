"""The first hour with Motorcade, as processes: signals, exit codes, ports in use, and README as it is written."""

from __future__ import annotations

import hashlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.scenarios.witness import wait_until
from tests.support.commands import PATIENCE, environment, run, run_process, start_process
from tests.support.node import ROOT, START_PATIENCE, STOP_PATIENCE, NodeProcess
from tests.support.wire import Client


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(http=True) as running:
        yield running


def test_exit_codes_and_streams_are_those_of_the_process(tmp_path: Path) -> None:
    """What is said where, and with which code, is a table in tests/unit/cli/test_words.py; here that it gets out."""
    helped = run_process("--help")
    assert (0, "", True) == (helped.returncode, helped.stderr, "Usage: " in helped.stdout)
    unknown = run_process("nonsense")
    assert (2, "", True) == (unknown.returncode, unknown.stdout, "No such command 'nonsense'" in unknown.stderr)
    failed = run_process("serve", "--config", "nowhere.toml", cwd=tmp_path)
    assert (1, "", True) == (failed.returncode, failed.stdout, "nowhere.toml" in failed.stderr)


def test_a_port_that_is_in_use_is_named(node: NodeProcess, tmp_path: Path) -> None:
    for mqtt, http, taken in (
        (node.mqtt, "off", node.mqtt),
        ("127.0.0.1:0", node.http, node.http),
    ):
        done = run_process("serve", "--mqtt", mqtt, "--ws", "off", "--http", http, cwd=tmp_path)
        assert (1, "") == (done.returncode, done.stdout)
        assert str(taken) in done.stderr and "in use" in done.stderr and "Traceback" not in done.stderr


# --- Ctrl-C -------------------------------------------------------------------------------------------------------


def interrupted(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
    """Exit code and output after a signal; no traceback."""
    process.send_signal(number)
    try:
        out, err = process.communicate(timeout=STOP_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {number.name}:\n{out}\n{err}") from None
    for sign in ("Traceback", "KeyboardInterrupt", "Exception ignored"):
        assert sign not in out + err, out + err
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_sub_ends_on_a_signal_with_what_it_has_printed(
    node: NodeProcess, tmp_path: Path, number: signal.Signals
) -> None:
    """Stopping a listener is its ordinary end: 0, and it says goodbye to the broker."""
    name = f"listener-{number.name}"
    process = start_process("sub", "-t", name, "-i", name, "-p", node.port, cwd=tmp_path)
    with Client(node) as sender:
        assert 0 == sender.connect(f"sender-{number.name}").reason
        assert process.stdout is not None

        def subscribed() -> bool:
            answer = sender.publish(name, b"hello", 1)
            return answer is not None and answer.reason != 0x10  # no matching subscribers

        wait_until(subscribed, "sub is listening")
        assert "hello\n" == process.stdout.readline()
        code, _, err = interrupted(process, number)
    assert (0, "") == (code, err)


def test_sub_that_did_not_get_its_count_says_so(node: NodeProcess, tmp_path: Path) -> None:
    process = start_process("sub", "-t", "never", "-C", "3", "-i", "counting", "-p", node.port, cwd=tmp_path)
    wait_until(lambda: "counting" in run("client", "list", *node.at).stdout, "it is connected")
    code, _, err = interrupted(process)
    assert (1, "error: 0 of 3 messages came\n") == (code, err)


def test_sub_says_so_when_its_node_stops(tmp_path: Path) -> None:
    with NodeProcess(http=True) as node:
        process = start_process("sub", "-t", "a", "-i", "left-behind", "-p", node.port, cwd=tmp_path)
        wait_until(lambda: "left-behind" in run("client", "list", *node.at).stdout, "it is connected")
        node.stop()
        out, err = process.communicate(timeout=STOP_PATIENCE)
    assert (1, "") == (process.returncode, out)
    assert err.startswith("error: ")
    assert "shutting down" in err


@pytest.mark.parametrize(
    "line",
    ["sub -t a -p PORT", "pub -t a -m x -p PORT", "client list --http 127.0.0.1:PORT"],
    ids=lambda line: line[:6],
)
def test_ctrl_c_while_nobody_answers(tmp_path: Path, line: str) -> None:
    """A broker that accepts and then says nothing: Ctrl-C gives the prompt back."""
    with socket.create_server(("127.0.0.1", 0)) as hole:
        hole.settimeout(START_PATIENCE)
        process = start_process(*line.replace("PORT", str(hole.getsockname()[1])).split(), cwd=tmp_path)
        waiting, _ = hole.accept()
        with waiting:
            assert waiting.recv(1)  # it has begun to speak
            code, _, _ = interrupted(process)
    assert 130 == code


def test_ctrl_c_of_pub_that_reads_lines(node: NodeProcess, tmp_path: Path) -> None:
    process = start_process("pub", "-t", "a", "-l", "-i", "typing", "-p", node.port, cwd=tmp_path)
    wait_until(lambda: "typing" in run("client", "list", *node.at).stdout, "it is connected")
    code, _, _ = interrupted(process)
    assert 130 == code


def test_ctrl_c_of_serve(tmp_path: Path) -> None:
    """The ordinary end of a node."""
    process = start_process(
        "serve", "--mqtt", "127.0.0.1:0", "--ws", "off", "--http", "off", "--log-level", "error", cwd=tmp_path
    )
    assert process.stdout is not None
    assert "ready" in process.stdout.readline()
    assert (0, "", "") == interrupted(process)


def test_ctrl_c_of_the_demonstration_leaves_no_node(tmp_path: Path) -> None:
    process = start_process("demo", cwd=tmp_path)
    parent = psutil.Process(process.pid)
    children: list[psutil.Process] = []

    def has_node() -> bool:
        children[:] = parent.children(recursive=True)
        return bool(children)

    wait_until(has_node, "the demonstration has a node")
    code, _, _ = interrupted(process)
    assert code in (1, 130)
    psutil.wait_procs(children, timeout=STOP_PATIENCE)
    assert [] == [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


# --- README -------------------------------------------------------------------------------------------------------


def blocks(page: str) -> list[list[str]]:
    """The lines of the `console` blocks of a page."""
    return [block.splitlines() for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL)]


def wrapped_venv(clone: Path) -> None:
    """A `.venv` that scripts/setup takes for finished, and that runs the clone's sources with our interpreter."""
    folder = clone / ".venv" / "bin"
    folder.mkdir(parents=True)
    wanted = b"".join((clone / name).read_bytes() for name in ("requirements.lock", "pyproject.toml", "scripts/setup"))
    (clone / ".venv" / ".place").write_text(f"{clone.resolve()}\n")
    (clone / ".venv" / ".stamp").write_text(f"{hashlib.sha256(wanted).hexdigest()}  -\n")
    # Were the stamp not believed, pip would change the environment that these tests run in.
    python = f'#!/bin/sh\n[ "$2" != pip ] || exit 1\nexport PYTHONPATH="{clone}/src"\nexec "{sys.executable}" "$@"\n'
    motorcade = f'#!/bin/sh\nexec "{folder}/python" -m motorcade "$@"\n'
    for name, text in (("python", python), ("motorcade", motorcade)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


#: Plays README's two terminals in a network of its own, where nobody else has the default ports.
TWO_TERMINALS = """
set -eu
ip link set lo up
cd "$1"
setsid sh -c "$2" >serve.out 2>serve.err &
node=$!
until grep -q ready serve.out; do kill -0 $node; sleep 0.05; done
sh -c "$3" >second.out 2>second.err &
second=$!
until grep -q "$4" second.out; do sleep 0.05; done
kill -- -$node  # setsid has made it the leader of a group: make, and the node
wait $node || true
wait $second || true
"""


#: What a person does between two commands: look whether the first has done its work.
SUBSCRIBED = """until .venv/bin/motorcade client list --json | grep -q '"subscriptions": 1'; do sleep 0.05; done"""


@pytest.mark.slow
def test_the_first_screen_of_the_readme_works_as_written(tmp_path: Path) -> None:
    """Clone, `make serve`, and in another terminal a message that arrives; outputs are those that README shows."""
    namespace = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us make a network namespace")
    first, second, *_ = blocks((ROOT / "README.md").read_text())
    assert first[0].startswith("$ git clone ")
    clone = tmp_path / "motorcade"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    wrapped_venv(clone)
    serve = next(line for line in first[1:] if line.startswith("$ ")).removeprefix("$ ")
    shown = first[-1]
    commands = [line.removeprefix("$ ") for line in second if line.startswith("$ ")]
    printed = [line for line in second if not line.startswith("$ ")]
    assert len(printed) == 1, "README shows one delivered message"
    script = [TWO_TERMINALS, "sh", str(clone), serve, "\n".join([*commands[:-1], SUBSCRIBED, commands[-1], "wait"])]
    outside = {name: value for name, value in environment().items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))}
    done = subprocess.run(
        [*namespace, "bash", "-c", *script, printed[0]],
        env=outside | {"PYTHONPATH": ""},  # as in a shell of one's own, not as a make within a make
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        check=False,
    )
    outputs = {path.name: path.read_text() for path in clone.glob("*.out")}
    errors = {path.name: path.read_text() for path in clone.glob("*.err")}
    assert shown == outputs["serve.out"].splitlines()[0], (done, errors)
    assert printed == outputs["second.out"].splitlines(), (done, errors)
