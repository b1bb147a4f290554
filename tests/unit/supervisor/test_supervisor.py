"""The supervisor as a process, with stand-ins for nodes and a real store."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

import psutil
import pytest

from tests.support.node import Endpoint
from tests.support.supervised import NodesProcess, gone
from tests.support.tables import each_case

NO_STORE = "store.url=redis://127.0.0.1:1"  #: stand-ins open none


def who_answers(at: Endpoint) -> str:
    with socket.create_connection((at.host, at.port), timeout=20) as client:
        return client.recv(100).decode()


def test_one_ready_line_tells_where_all_of_them_are() -> None:
    """The control port of the first is the one that was asked for; clients come to all of them by one port."""
    others = set(psutil.Process().children())
    with NodesProcess(3, NO_STORE, stub=True) as nodes:
        assert nodes.ready_line is not None
        kinds = dict(part.split(" ", 1) for part in nodes.ready_line.strip().split("  ")[1:])
        assert str(nodes.mqtt) == kinds["tcp"]
        assert "stub-1 stub-2 stub-3" == kinds["nodes"]
        http = kinds["http"].split()
        assert 3 == len(set(http)) and http[0] == str(nodes.http)
        assert http == [
            event["http"]
            for number in (1, 2, 3)
            for event in nodes.events("node_up")
            if event["node"] == f"stub-{number}"
        ]
        nodes.until(lambda: len({who_answers(nodes.mqtt) for _ in range(20)}) == 3, "clients come to all nodes")
    assert 1 == sum(" ready " in line for line in nodes.output)
    assert gone([child for child in psutil.Process().children() if child not in others])


def test_what_nodes_share_and_what_is_their_own() -> None:
    with NodesProcess(2, NO_STORE, stub=True) as nodes:
        first, second = (event["orders"] for event in sorted(nodes.events("stub_begins"), key=lambda e: e["node"]))
        for key in ("broker.node", "data.dir", "http.bind", "cluster.bind"):
            assert first[key] != second[key], key
        for key in ("listeners.tcp.bind", "store.url", "log.format"):
            assert first[key] == second[key], key
        assert str(nodes.data / "node-1") == first["data.dir"]
        for private in (nodes.data / "token", nodes.data / "cluster.secret"):
            assert 0o600 == private.stat().st_mode & 0o777
            assert len(private.read_text().strip()) >= 32


@each_case("signal_name", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a_node_that_dies_is_started_again_where_it_was(signal_name: str) -> None:
    """The log tells how it died and what it said last, or that it was told to end; the others go on."""
    with NodesProcess(2, NO_STORE, stub=True) as nodes:
        pid, other = nodes.pid(1), nodes.pid(2)
        os.kill(pid, getattr(signal, signal_name))
        nodes.until(lambda: len(nodes.events("node_up")) == 3, "it is up again")
        (ended,) = nodes.events("node_ended" if signal_name == "SIGTERM" else "node_died")
        assert "stub-1" == ended["node"]
        if signal_name == "SIGTERM":
            assert [] == nodes.events("node_died") and "info" == ended["level"]
        else:
            assert signal_name == ended["signal"]
            assert ("out of memory" in ended["error"]) is (signal_name == "SIGKILL")
            assert any("stub_begins" in line for line in ended["tail"])
        assert nodes.pid(1) != pid and nodes.pid(2) == other
        before, after = (event["http"] for event in nodes.events("node_up") if event["node"] == "stub-1")
        assert before == after


def test_pauses_grow_while_it_dies_again_and_again() -> None:
    with NodesProcess(2, NO_STORE, stub=True) as nodes:
        nodes.ask(1, error="no more")
        os.kill(nodes.pid(1), signal.SIGKILL)
        nodes.until(lambda: len(nodes.events("node_died")) == 4, "it has died four times")
        pauses = [event["again_in"] for event in nodes.events("node_died")]
        assert pauses == [0.2, 0.4, 0.8, 1.6]
        assert {"no more"} == {event["error"] for event in nodes.events("node_died")[1:]}
        assert "stub-2" == who_answers(nodes.mqtt)
        nodes.ask(1)
        nodes.until(lambda: len(nodes.events("node_up")) == 3, "it is up again")


def test_what_cannot_start_ends_the_command_with_its_message() -> None:
    nodes = NodesProcess(3, NO_STORE, stub=True, asked={2: {"error": "the moon is full"}}).launch()
    try:
        assert 1 == nodes.exit_code()
        assert "error: node stub-2: the moon is full\n" == nodes.output[-1]
        assert nodes.ready_line is None
        assert 1 == len((nodes.data / "node-2" / "started").read_text().splitlines())
    finally:
        nodes.remove()


def test_nothing_is_left_when_the_supervisor_is_killed() -> None:
    """And a start at once afterwards, on the same ports and folder, finds everything free."""
    nodes = NodesProcess(2, stub=True).start()
    again = NodesProcess(2, f"listeners.tcp.bind={nodes.mqtt}", f"http.bind={nodes.http}", stub=True, data=nodes.data)
    try:
        family = nodes.family()
        assert 3 == len(family)
        nodes.signal(signal.SIGKILL)
        again.start()
        nodes.until(lambda: gone(family), "all processes end")
        again.stop()
    finally:
        again.remove()
        nodes.remove()


def test_no_node_is_left_when_the_supervisor_is_killed_not_even_one_that_stands_still() -> None:
    """Real nodes."""
    nodes = NodesProcess(2).launch()
    try:
        nodes.until(lambda: len(nodes.family()) == 3 and bool(nodes.events("node_up")), "one of them serves")
        family = nodes.family()
        os.kill(nodes.events("node_up")[0]["pid"], signal.SIGSTOP)
        nodes.signal(signal.SIGKILL)
        nodes.until(lambda: gone(family), "all processes end")
    finally:
        nodes.remove()


@pytest.mark.slow
@pytest.mark.timeout(900)
@each_case(("stub", "moments"), [(True, 14), (False, 7)])
def test_ctrl_c_at_any_moment_of_the_start_ends_everything(stub: bool, moments: int) -> None:
    """The moments are spread over the time until stand-ins are ready, or the first of two real nodes is."""
    began = time.monotonic()
    first = NodesProcess(2, stub=stub).launch()
    try:
        first.until(lambda: bool(first.ready_line or first.events("node_up")), "a node serves")
        took = time.monotonic() - began
    finally:
        first.remove()
    for step in range(1, moments):
        nodes = NodesProcess(2, stub=stub).launch()
        try:
            time.sleep(took * step / (moments - 2))
            family = nodes.family() if nodes.running else []
            nodes.signal(signal.SIGINT)
            code = nodes.exit_code()
            # Before the supervisor has taken over, Ctrl-C ends a command as ever.
            assert code in (0, 130, -signal.SIGINT), nodes.log
            assert "motorcade/supervisor/" not in nodes.log, nodes.log
            nodes.until(lambda alive=family: gone(alive), "all processes end")  # type: ignore[misc] # bound now
        finally:
            nodes.remove()


def test_nodes_drain_at_once_and_the_store_goes_last() -> None:
    with NodesProcess(4, stub=True, asked={number: {"drain": 3.0} for number in (1, 2, 3, 4)}) as nodes:
        began = time.monotonic()
        nodes.stop()
        assert 3.0 <= time.monotonic() - began < 11.0


def test_a_second_ctrl_c_hurries_and_a_second_sigterm_does_not() -> None:
    nodes = NodesProcess(2, stub=True, asked={2: {"deaf": True}}).start()
    try:
        family = nodes.family()
        nodes.signal(signal.SIGINT)
        nodes.until(lambda: len(nodes.events("stub_signalled")) == 2, "both are told")
        nodes.signal(signal.SIGTERM)
        nodes.signal(signal.SIGHUP)
        with pytest.raises(AssertionError, match="did not happen"):
            nodes.until(lambda: not nodes.running, "it ends", patience=0.5)
        nodes.signal(signal.SIGINT)
        assert 130 == nodes.exit_code()
        (killed,) = nodes.events("node_killed")
        assert ("stub-2", "in a hurry") == (killed["node"], killed["reason"])
        assert gone(family)
    finally:
        nodes.remove()


def test_sighup_goes_to_all_nodes_and_to_one_that_starts_when_it_is_up() -> None:
    with NodesProcess(2, NO_STORE, stub=True) as nodes:
        nodes.signal(signal.SIGHUP)
        nodes.until(lambda: len(nodes.events("stub_signalled")) == 2, "both are told")
        nodes.ask(1, silent=True)
        os.kill(nodes.pid(1), signal.SIGKILL)
        nodes.until(lambda: len(nodes.events("stub_begins")) == 3, "it starts")
        nodes.signal(signal.SIGHUP)
        nodes.until(lambda: len(nodes.events("stub_signalled")) == 3, "the other is told")
        nodes.ask(1)
        silent = int((nodes.data / "node-1" / "started").read_text().split()[-1])
        os.kill(silent, signal.SIGKILL)
        nodes.until(lambda: len(nodes.events("stub_signalled")) == 4, "it is told too")
        assert {"SIGHUP"} == {event["signal"] for event in nodes.events("stub_signalled")}


def test_one_log_in_json_and_for_people() -> None:
    """What a node prints besides its log is in it too."""
    with NodesProcess(2, NO_STORE, stub=True) as nodes:
        pass
    (*lines,) = (line for line in nodes.output if not line.startswith("motorcade "))
    events = [json.loads(line) for line in lines]
    assert all({"event", "level", "timestamp", "logger"} <= event.keys() for event in events)
    assert {"stub-1", "stub-2"} == {event["node"] for event in events if event["logger"] == "stub"}
    assert {"stubs say this", "to standard error"} == {event["text"] for event in nodes.events("printed")}
    with NodesProcess(2, NO_STORE, "log.format=console", stub=True) as nodes:
        pass
    begins = [line for line in nodes.output if "stub_begins" in line]
    assert 2 == len(begins)
    assert all("[info" in line and "2026-01-01T00:00:00Z" in line and "node=stub-" in line for line in begins)


def test_two_supervisors_do_not_share_a_folder_or_a_port() -> None:
    with NodesProcess(2, NO_STORE, stub=True) as nodes:
        same_folder = NodesProcess(2, NO_STORE, stub=True, data=nodes.data).launch()
        assert 1 == same_folder.exit_code()
        assert f"another `motorcade serve --nodes` has the data folder {nodes.data}" in same_folder.log
        same_folder.remove()
        same_port = NodesProcess(2, NO_STORE, f"listeners.tcp.bind={nodes.mqtt}", stub=True).launch()
        assert 1 == same_port.exit_code()
        assert f"listeners.tcp.bind: cannot listen on {nodes.mqtt}: Address already in use" in same_port.log
        assert not (same_port.data / "node-1").exists()
        same_port.remove()
