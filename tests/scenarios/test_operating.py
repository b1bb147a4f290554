"""Three real nodes as their operator handles them: listed, drained, resumed, left, restarted one after the other."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import httpx
import pytest

from tests.support.cluster_nodes import ClusterNodes
from tests.support.commands import Done, run, run_process
from tests.support.flows import lasting
from tests.support.node import ROOT, STOP_PATIENCE, NodeProcess
from tests.support.ports import free_port
from tests.support.redis import RedisServer
from tests.support.wire import DISCONNECT, PUBACK, PUBLISH, Client, Closed, ack_packet, publish_packet

ELSEWHERE = "other.example:1883"
USE_ANOTHER_SERVER, SERVER_MOVED, SERVER_REFERENCE = 0x9C, 0x9D, 0x1C
PATIENCE = 120.0  #: seconds: machines that run tests are busy
_names = count()


def unique(what: str) -> str:
    return f"{what}{next(_names)}"


@pytest.fixture(scope="module")
def nodes(lone_redis: RedisServer) -> Iterator[ClusterNodes]:
    url, reference = f"{lone_redis.url}?prefix=operating", f'server_reference = "{ELSEWHERE}"'
    with ClusterNodes(3, url, cluster="lease = 2.0\nview_lease = 3.5", broker=reference) as running:
        yield running
        for node in running.nodes:
            assert [] == [line for line in node.output if "Traceback" in line or '"level":"error"' in line]


def client(node: NodeProcess, name: str, version: int = 5, **kw: object) -> Client:
    opened = Client(node, version=version)
    assert 0 == opened.connect(name, **{"version": version, **kw}).reason
    return opened


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def node_command(verb: str, at: NodeProcess, *words: object) -> Done:
    return run("node", verb, *words, *at.at)


def listed(at: NodeProcess) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads(node_command("list", at, "--json").stdout)}


def ready(node: NodeProcess) -> str:
    """What `/readyz` complains of; nothing: clients may be sent there."""
    with node.web("") as web:
        answer = web.get("/readyz")
    return "" if answer.status_code == 200 else str(answer.json()["message"])


def test_every_node_lists_all_of_them(nodes: ClusterNodes) -> None:
    with client(nodes[1], unique("here")), client(nodes[1], unique("here"), **lasting(5)), client(nodes[2], "there"):
        for node in nodes.nodes:
            found = listed(node)
            assert {"n1": (0, 0), "n2": (2, 2), "n3": (1, 1)} == {
                name: (entry["clients"], entry["sessions"]) for name, entry in found.items()
            }
            assert {"live"} == {entry["state"] for entry in found.values()}
            others = [entry for entry in found.values() if not entry["here"]]
            assert 2 == len(others) and all(entry["linked"] and 0 <= entry["round_trip"] < 60 for entry in others)
            assert all(entry["id"].startswith(f"{name}~") and entry["since"] > 0 for name, entry in found.items())
            with node.web() as web:
                assert {"n1", "n2", "n3"} == {entry["name"] for entry in web.get("/nodes").json()["data"]}
                assert found["n3"]["id"] == web.get("/nodes/n3").json()["id"]
                assert 404 == web.get("/nodes/n4").status_code
        text = node_command("list", nodes[0]).stdout.splitlines()
        assert 4 == len(text) and all(len(line) <= 80 for line in text), text
        assert ["n1", "n2", "n3"] == [line.split()[0] for line in text[1:]]
        assert {"here", "ms"} == {line.split()[-3] for line in text[1:]}


def test_a_node_is_drained_and_takes_clients_again(nodes: ClusterNodes) -> None:
    """By a command at another node: at the rate that was asked for, and each client served elsewhere at once."""
    topic = unique("drained")
    sleeper = client(nodes[0], unique("sleeper"), **lasting(5))
    sleeper.subscribe(topic, 1)
    old = client(nodes[0], unique("old"), 4)
    crowd = [client(nodes[0], unique("crowd")) for _ in range(28)]
    assert "" == ready(nodes[0])
    done: list[Done] = []
    command = threading.Thread(
        target=lambda: done.append(run_process("node", "drain", "n1", "--rate", "20", *nodes[1].at))
    )
    began = time.monotonic()
    command.start()
    until(lambda: listed(nodes[2])["n1"]["state"] == "leaving", "the others know")
    assert "this node is drained" in ready(nodes[0])
    with pytest.raises(ConnectionRefusedError):
        Client(nodes[0])
    for one in (sleeper, *crowd):
        goodbye = one.expect(DISCONNECT)
        assert (USE_ANOTHER_SERVER, ELSEWHERE) == (goodbye.reason, goodbye.prop(SERVER_REFERENCE))
        one.close()
    assert [] == old.expect_closed()
    old.close()
    assert time.monotonic() - began > 29 / 20 - 0.2  # thirty clients, the first one at once
    again = Client(nodes[1], version=5)
    assert again.connect(sleeper.client_id, **lasting(5)).session_present
    with client(nodes[2], unique("pub")) as publisher:
        publisher.publish(topic, b"at its new node", 1)
    assert b"at its new node" == again.receive().payload
    command.join(PATIENCE)
    assert 0 == done[0].returncode and "n1 is drained: 30 clients sent away in" in done[0].stdout, done
    drained = listed(nodes[2])["n1"]
    assert (0, 0, "drained") == (drained["clients"], drained["attached"], drained["drain"]["state"])
    assert "drained" in next(line for line in node_command("list", nodes[1]).stdout.splitlines() if "n1" in line)

    resumed = node_command("drain", nodes[2], "n1", "--resume")
    assert (0, "n1 takes clients again\n") == (resumed.returncode, resumed.stdout)
    assert "" == ready(nodes[0])
    back = Client(nodes[0], version=5)
    assert back.connect(sleeper.client_id, **lasting(5)).session_present
    back.disconnect()
    assert "live" == listed(nodes[1])["n1"]["state"]
    not_drained = node_command("drain", nodes[2], "n1", "--resume")
    assert 1 == not_drained.returncode and "n1 is not drained" in not_drained.stderr


def test_the_last_node_that_takes_clients_is_not_drained(nodes: ClusterNodes) -> None:
    for name in ("n1", "n2"):
        assert 0 == node_command("drain", nodes[2], name).returncode
    refused = node_command("drain", nodes[0], "n3")
    assert 1 == refused.returncode
    assert "n3 is the only node that takes clients" in refused.stderr
    client(nodes[2], unique("still")).disconnect()
    for name in ("n1", "n2"):
        assert 0 == node_command("drain", nodes[2], name, "--resume").returncode
    unknown = node_command("drain", nodes[0], "n4")
    assert 1 == unknown.returncode and "there is no node 'n4' in this cluster; there are n1, n2, n3" in unknown.stderr
    assert 1 == node_command("drain", nodes[0], "n1", "--resume").returncode


@pytest.mark.parametrize("asked", [0, 1])
def test_a_node_leaves_the_cluster_and_ends(nodes: ClusterNodes, asked: int) -> None:
    """Exit code 0, nothing of it is left, also when the node that leaves is the one that is asked."""
    leaver = nodes[0]
    guest = client(leaver, unique("guest"), **lasting(5))
    id_ = listed(nodes[1])["n1"]["id"]
    name = ("n1",) if asked else ()
    done = node_command("leave", nodes[asked], *name)
    assert (0, "n1 has left the cluster\n") == (done.returncode, done.stdout), done
    assert USE_ANOTHER_SERVER == guest.expect(DISCONNECT).reason
    guest.close()
    assert leaver.process is not None
    assert 0 == leaver.process.wait(STOP_PATIENCE)
    until(lambda: "n1" not in listed(nodes[1]), "nobody knows of it any more")
    assert not any("member_dead" in line for node in nodes.nodes[1:] for line in node.output if id_ in line)
    leaver.kill()
    nodes.nodes[0] = nodes.node("n1").start()
    assert {"live"} == {entry["state"] for entry in listed(nodes[2]).values()}


def test_a_node_leaves_for_good(nodes: ClusterNodes) -> None:
    """MQTT 5 clients are told to forget it, with the address that is configured."""
    guest = client(nodes[0], unique("guest"))
    done = node_command("leave", nodes[1], "n1", "--permanent")
    assert (0, "n1 has left the cluster\n") == (done.returncode, done.stdout), done
    goodbye = guest.expect(DISCONNECT)
    assert (SERVER_MOVED, ELSEWHERE) == (goodbye.reason, goodbye.prop(SERVER_REFERENCE))
    guest.close()
    leaver = nodes[0]
    assert leaver.process is not None and 0 == leaver.process.wait(STOP_PATIENCE)
    leaver.kill()
    nodes.nodes[0] = nodes.node("n1").start()


def test_a_node_that_does_not_answer_is_listed_without_its_figures(nodes: ClusterNodes) -> None:
    nodes[0].kill()
    found = node_command("list", nodes[1], "--json")
    entry = next(entry for entry in json.loads(found.stdout) if entry["name"] == "n1")
    assert entry["clients"] is None and not entry["linked"]
    until(lambda: listed(nodes[1]).get("n1", {}).get("state", "fenced") == "fenced", "it is found dead")
    nodes.nodes[0] = nodes.node("n1").start()


def test_a_lone_node_is_listed_and_not_drained() -> None:
    with NodeProcess(http=True) as node:
        (entry,) = json.loads(node_command("list", node, "--json").stdout)
        assert ("alone", 0, True) == (entry["state"], entry["clients"], entry["here"])
        assert "alone" in node_command("list", node).stdout
        for verb in ("drain", "leave"):
            refused = node_command(verb, node)
            assert 1 == refused.returncode and "is alone (no cluster.bind)" in refused.stderr


# -- rolling restart


class Roamer:
    """A client that connects to whichever node takes it, in a thread of its own, until it is told to end."""

    def __init__(self, nodes: ClusterNodes, name: str) -> None:
        self._nodes = nodes
        self._at = next(_names)
        self.name = name
        self.problem = ""
        self.stopping = threading.Event()
        self.moves = 0
        self.thread = threading.Thread(target=self._guarded, name=name)
        self.thread.start()

    def _guarded(self) -> None:
        try:
            self.roam()
        except Exception as error:
            self.problem = repr(error)
            raise

    def roam(self) -> None:
        while not self.stopping.is_set():
            try:
                self._at += 1
                with Client(self._nodes[self._at % len(self._nodes)], version=5) as opened:
                    if opened.connect(self.name, **lasting(5)).reason:
                        continue
                    self.moves += 1
                    while not self.stopping.is_set():
                        self.step(opened)
            except (OSError, Closed):  # sent away, or no node there
                time.sleep(0.02)

    def step(self, connected: Client) -> None:
        raise NotImplementedError

    def end(self) -> None:
        self.stopping.set()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive() and not self.problem, self.problem


class Publisher(Roamer):
    """Publishes numbers, one after the other; each until it is acknowledged."""

    def __init__(self, nodes: ClusterNodes, name: str, topic: str) -> None:
        self.topic = topic
        self.acknowledged = 0
        super().__init__(nodes, name)

    def step(self, connected: Client) -> None:
        payload = b"%s %d" % (self.name.encode(), self.acknowledged)
        packet_id = connected.next_id()
        connected.send(publish_packet(self.topic, payload, version=5, qos=1, packet_id=packet_id))
        while True:
            answer = connected.recv()
            if answer.type == DISCONNECT:
                raise Closed("sent away")
            if answer.type == PUBACK and answer.packet_id == packet_id:
                assert (answer.reason or 0) < 0x80, answer
                self.acknowledged += 1
                return


class Subscriber(Roamer):
    """Takes what comes."""

    def __init__(self, nodes: ClusterNodes, name: str) -> None:
        self.got: list[bytes] = []
        super().__init__(nodes, name)

    def step(self, connected: Client) -> None:
        try:
            found = connected.recv(0.2)
        except TimeoutError:
            return
        if found.type == DISCONNECT:
            raise Closed("sent away")
        if found.type == PUBLISH:
            self.got.append(found.payload)
            connected.send(ack_packet(PUBACK, found.packet_id or 0, version=5))


@pytest.mark.parametrize("how", ["leave", "SIGTERM"])
def test_a_rolling_restart_under_load_loses_nothing(nodes: ClusterNodes, how: str) -> None:
    """Each node in turn, while three publishers and three durable subscribers go where they are taken."""
    topic = unique("rolling")
    names = [unique("roaming") for _ in range(3)]
    for name in names:
        with client(nodes[0], name, **lasting(5)) as opened:
            opened.subscribe(f"{topic}/#", 1)
            opened.disconnect()
    subscribers = [Subscriber(nodes, name) for name in names]
    publishers = [Publisher(nodes, unique("source"), f"{topic}/{number}") for number in range(3)]
    for number in range(3):
        counts = [publisher.acknowledged for publisher in publishers]
        until(
            lambda: all(p.acknowledged > c + 20 for p, c in zip(publishers, counts, strict=True)),  # noqa: B023
            f"publishing goes on: {[p.problem for p in publishers]}",
        )
        node = nodes[number]
        if how == "leave":
            assert 0 == node_command("leave", nodes[(number + 1) % 3], f"n{number + 1}").returncode
            assert node.process is not None and 0 == node.process.wait(STOP_PATIENCE)
            node.kill()
        else:
            node.stop()
        nodes.nodes[number] = nodes.node(f"n{number + 1}").start()
    for publisher in publishers:
        publisher.end()
        assert publisher.moves > 1
    expected = [
        [b"%s %d" % (publisher.name.encode(), number) for number in range(publisher.acknowledged)]
        for publisher in publishers
    ]
    for subscriber in subscribers:
        until(lambda: {one for run_ in expected for one in run_} <= set(subscriber.got), "all have come")  # noqa: B023
        subscriber.end()
        for publisher, sent in zip(publishers, expected, strict=True):
            mine = [one for one in dict.fromkeys(subscriber.got) if one.startswith(publisher.name.encode() + b" ")]
            assert sent == mine[: len(sent)]
    assert not any("member_dead" in line for node in nodes.nodes for line in node.output)


# -- what probes and scrapers see


def samples(node: NodeProcess) -> dict[str, float]:
    """The metrics of the cluster: name with labels, and value."""
    with node.web("") as web:
        lines = web.get("/metrics").text.splitlines()
    found = [line.rpartition(" ") for line in lines if line.startswith("motorcade_cluster_")]
    return {name.removeprefix("motorcade_cluster_"): float(value) for name, _, value in found}


def test_the_metrics_tell_of_members_links_and_moves_and_stand_on_the_page(nodes: ClusterNodes) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    before = samples(nodes[0])
    told = set(re.findall(r"`motorcade_cluster_([a-z_]+)`", page))
    assert told - {"options_differing"} == {name.partition("{")[0] for name in before}
    until(lambda: 3.0 == samples(nodes[0])['members{state="live"}'], "all are live")
    assert all(1.0 == before[f'link_up{{node="{name}"}}'] for name in ("n2", "n3"))
    assert 'link_up{node="n1"}' not in before
    assert (1.0, True) == (before["view_holds"], 0 < before["view_left_seconds"] <= 3.5)
    assert abs(before["clock_offset_seconds"]) < 60
    name = unique("mover")
    here = client(nodes[0], name, **lasting(5))
    client(nodes[1], name, **lasting(5)).disconnect()
    here.close()
    until(lambda: samples(nodes[1])['moves_total{event="slept"}'] >= 1, "its session sleeps")
    after = samples(nodes[0])
    assert 1 == after['moves_total{event="went"}'] - before['moves_total{event="went"}']
    assert samples(nodes[1])['moves_total{event="came"}'] >= 1
    assert after['link_items_total{event="sent"}'] > before['link_items_total{event="sent"}']
    nodes[2].kill()
    until(lambda: 0.0 == samples(nodes[0]).get('link_up{node="n3"}', 0.0), "its link is down")
    until(lambda: samples(nodes[0])["condemned_total"] + samples(nodes[1])["condemned_total"] >= 1, "it is found dead")
    nodes.nodes[2] = nodes.node("n3").start()


def test_a_node_that_joins_says_what_it_waits_for() -> None:
    """Its control port answers before it serves anybody; SIGTERM ends it as always."""
    unreachable = f"127.0.0.1:{free_port()}"
    with RedisServer() as redis, ClusterNodes(1, redis.url, cluster=f'advertise = "{unreachable}"') as nodes:
        late = nodes.node("n2")
        starting = threading.Thread(target=lambda: suppressed(late.start))
        starting.start()
        until(lambda: "joins its cluster" in probed(late), "it says so")
        with late.web() as web:
            assert 503 == web.get("/clients").status_code
            assert "starting" in web.post("/nodes/n1/drain").json()["message"]
            until(
                lambda: unreachable in str(web.get("/node").json()["problems"]), "it names the node that it waits for"
            )
            assert {"n1": "live", "n2": "joining"} == {
                one["name"]: one["state"] for one in web.get("/nodes").json()["data"]
            }
        with pytest.raises(ConnectionRefusedError):
            Client(late)
        late.stop()
        starting.join(PATIENCE)
        assert "" == ready(nodes[0])


def suppressed(start: Callable[[], object]) -> None:
    """A node that is stopped before it is ready."""
    with pytest.raises(AssertionError, match="did not become ready"):
        start()


def probed(node: NodeProcess) -> str:
    """The same as `ready`, of a node that may not answer yet."""
    try:
        return ready(node)
    except httpx.TransportError:
        return ""


def test_readiness_while_the_store_and_other_nodes_are_away() -> None:
    """Degraded as long as live messages go on; not ready when it is not known any more what others have granted."""
    with RedisServer() as redis, ClusterNodes(2, redis.url, cluster="lease = 1.5\nview_lease = 3.0") as nodes:
        here, there = nodes.nodes
        assert "" == ready(here)
        assert redis.process is not None
        os.kill(redis.process.pid, signal.SIGSTOP)
        until(lambda: "degraded" in status(here), "the store is away")
        with client(here, "pub") as publisher:
            publisher.publish("t", b"live", 1)
        os.kill(there.pid, signal.SIGSTOP)
        until(lambda: "not all nodes of the cluster have answered" in ready(here), "the view ends")
        assert 0.0 == samples(here)["view_holds"] and samples(here)["view_left_seconds"] < 0
        assert any("view_lost" in line for line in here.output)
        os.kill(there.pid, signal.SIGCONT)
        os.kill(redis.process.pid, signal.SIGCONT)
        until(lambda: "ready" == status(here), "all is well")
        until(lambda: "" == probed(there), "there too")
        for event in ("view_lost", "view_holds"):
            until(lambda: 1 == sum(f'"{event}"' in line for line in here.output), f"{event} once")  # noqa: B023


def status(node: NodeProcess) -> str:
    with node.web("") as web:
        return str(web.get("/readyz").json().get("status"))
