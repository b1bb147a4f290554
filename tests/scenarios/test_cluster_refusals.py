"""Nodes that must not become members: exit code 1, a sentence that names both sides, and nothing left in the store.

A cluster with one node serves all the while, with a secret; whatever is refused changes nothing for it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from motorcade.cluster.membership import MemberRecord
from motorcade.cluster.roster import Roster
from motorcade.storage import open_store
from motorcade.storage.ports import Durability
from tests.support.commands import run
from tests.support.flows import lasting
from tests.support.node import ROOT, START_PATIENCE, Endpoint, NodeProcess
from tests.support.ports import free_port
from tests.support.redis import RedisServer, wait_until
from tests.support.waiting import until
from tests.support.wire import Client

#: A node whose clock is off by so many seconds: `python -c SHIFTED SECONDS serve …`.
SHIFTED = (
    "import sys, time; real, by = time.time, float(sys.argv.pop(1)); time.time = lambda: real() + by; "
    "from motorcade.cli import main; main()"
)


class Fleet:
    """A cluster with one node."""

    def __init__(self, redis: RedisServer, folder: Path) -> None:
        self.redis = redis
        self.folder = folder
        self.secret = self.write("secret", "the right secret, long enough")
        self.bind = Endpoint("127.0.0.1", free_port())
        self.node = self.one("n1", bind=str(self.bind))

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o600)
        return path

    def one(self, node: str, *args: str, bind: str = "", more: str = "", **cluster: object) -> NodeProcess:
        """A node that would join, but for what is told."""
        options: dict[str, object] = {
            "bind": bind or f"127.0.0.1:{free_port()}",
            "name": "fleet",
            "secret_file": str(self.secret),
            **cluster,
        }
        lines = "\n".join(f"{key} = {msgspec.json.encode(value).decode()}" for key, value in options.items() if value)
        config = f'[broker]\nnode = "{node}"\n[cluster]\n{lines}\n{more}'
        return NodeProcess("--store", self.redis.url, *args, config=config, http=True)

    def keys(self) -> set[bytes]:
        return set(map(bytes, self.redis.command("KEYS", "*")))

    def listed(self) -> list[str]:
        return [line.split()[0] for line in run("node", "list", *self.node.at).stdout.splitlines()[1:]]

    def refusal(self, node: NodeProcess, *, clock: float = 0.0) -> str:
        """What a node says that ends with exit code 1; nothing of it stays, and the other one serves as before."""
        before = self.keys()
        line = node.command()
        if clock:
            line[1:3] = ["-c", SHIFTED, str(clock)]
        done = subprocess.run(
            line,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            cwd=node.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * START_PATIENCE,
            check=False,
        )
        node.remove()
        said = done.stdout + done.stderr
        assert 1 == done.returncode, said
        assert "Traceback" not in said and " ready " not in said, said
        assert set() == self.keys() - before
        wait_until(lambda: ["n1"] == self.listed(), "the other one knows of no other")
        with self.node.web("") as web:
            assert {"status": "ready"} == web.get("/readyz").json()
        error = done.stderr.splitlines()[-1]
        assert error.startswith("error: "), said
        return error


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with RedisServer() as redis:
        made = Fleet(redis, tmp_path_factory.mktemp("fleet"))
        with made.node:
            run("fanout", "list", *made.node.at)  # answered when it counts requests: nothing new is stored after that
            yield made
            assert not [line for line in made.node.output if '"level":"error"' in line or "Traceback" in line]


def test_another_secret(fleet: Fleet) -> None:
    """The log of the one that serves names both, too."""
    error = fleet.refusal(fleet.one("n2", secret_file=str(fleet.write("other", "a wrong secret, long enough"))))
    assert "n1~1" in error and "n2~" in error
    assert "have different secrets (option cluster.secret_file)" in error
    assert any("different secrets" in line and "n2~" in line for line in fleet.node.output), fleet.node.log
    error = fleet.refusal(fleet.one("n2", secret_file=""))
    assert "n1~1 has a secret and n2~" in error and "has none" in error


def test_another_name_of_the_cluster(fleet: Fleet) -> None:
    error = fleet.refusal(fleet.one("n2", name="trucks"))
    assert "n2 belongs to the cluster 'trucks', and its store to the cluster 'fleet' with n1~1" in error


def test_other_leases(fleet: Fleet) -> None:
    error = fleet.refusal(fleet.one("n2", lease=2.0))
    assert "n2 has cluster.lease = 2 and cluster.view_lease = 5, n1~1 has 3 and 5" in error


def test_other_addressed_filters(fleet: Fleet) -> None:
    error = fleet.refusal(fleet.one("n2", addressed=["agent/{client}/#"]))
    assert "n2 has cluster.addressed = ['agent/{client}/#'], n1~1 has []" in error
    assert "to change it, stop all of them first" in error


def test_the_name_of_a_node_that_is_alive(fleet: Fleet) -> None:
    error = fleet.refusal(fleet.one("n1"))
    assert f"cannot join: n1~1 at {fleet.bind} is alive and has the same name" in error


@pytest.mark.parametrize("seconds", [45.0, -45.0])
def test_a_clock_that_is_far_off(fleet: Fleet, seconds: float) -> None:
    error = fleet.refusal(fleet.one("n2"), clock=seconds)
    assert "the clock of n2 is 45.0 s" in error or "the clock of n2 is 44.9 s" in error
    assert ("ahead of" if seconds > 0 else "behind") in error and "that of the store's server" in error


def test_an_embedded_store(fleet: Fleet) -> None:
    for url in ("rocksdb://", "memory://"):
        node = fleet.one("n2")
        node.args = ("--store", url)
        assert "cluster.bind: the embedded engine serves exactly one node" in fleet.refusal(node)


def test_a_node_by_itself_on_the_store_of_a_cluster(fleet: Fleet) -> None:
    node = fleet.one("lone")
    node.config = '[broker]\nnode = "lone"\n'
    error = fleet.refusal(node)
    assert "lone is a node by itself (no cluster.bind), and its store is served by the cluster with n1~1" in error
    assert f"at {fleet.bind}" in error


def test_a_member_on_the_store_of_a_node_by_itself(fleet: Fleet) -> None:
    with RedisServer() as redis:
        lone = NodeProcess("--store", redis.url, config='[broker]\nnode = "lone"\n')
        with lone:
            before = set(redis.command("KEYS", "*"))
            node = fleet.one("n2")
            node.args = ("--store", redis.url)
            error = fleet.refusal(node)
            assert "n2 cannot join a cluster: a node by itself (no cluster.bind) serves this store" in error
            left = set(redis.command("KEYS", "*")) - before
            assert not [key for key in left if b"n2" in key], left
            with Client(lone, version=4) as client:
                assert 0 == client.connect("still", **lasting(4)).reason


def test_another_store(fleet: Fleet) -> None:
    """A member tells an address where one of another store answers: who joins hears it from both."""
    with RedisServer() as redis:
        astray = fleet.one("astray", advertise=str(fleet.bind))
        astray.args = ("--store", redis.url)
        with astray:
            node = fleet.one("n2")
            node.args = ("--store", redis.url)
            error = fleet.refusal(node)
            assert "n1~1" in error and "n2~2" in error and "have different stores" in error
            assert "option store.url" in error


async def put_member(url: str, record: MemberRecord) -> None:
    """Leave a record as a member does that is killed: nothing of it goes on."""
    store = await open_store(url, Durability.FAST, 0)
    await Roster(store).enter(record, "fleet")
    await store.close()


async def beat(url: str, record: MemberRecord, stopping: asyncio.Event) -> None:
    """Go on counting."""
    store = await open_store(url, Durability.FAST, 0)
    roster = Roster(store)
    mine, _ = await roster.enter(record, "fleet")
    while not stopping.is_set():
        after = msgspec.structs.replace(mine, beat=mine.beat + 1)
        await roster.renew(mine, after)
        mine = after
        await asyncio.sleep(0.2)
    await roster.remove(mine)
    await store.close()


def record(**kw: object) -> MemberRecord:
    plain = {"name": "later", "number": 0, "token": b"t" * 16, "writer": "w-later", "address": "127.0.0.1:9"}
    return MemberRecord(**{**plain, "software": "9.9", **kw})  # type: ignore[arg-type]


async def test_a_version_that_does_not_fit(fleet: Fleet) -> None:
    """A member of a later version is alive that does not read what this one writes."""
    with RedisServer() as redis:
        stopping = asyncio.Event()
        beating = asyncio.create_task(beat(redis.url, record(protocol=9, oldest=9), stopping))
        node = fleet.one("n2")
        node.args = ("--store", redis.url)
        try:
            error = await asyncio.to_thread(fleet.refusal, node)
        finally:
            stopping.set()
            await beating
    assert "n2 (Motorcade 0.1.0) and later~1 (Motorcade 9.9) keep what they share in different ways" in error
    assert "update the older one" in error


@pytest.mark.parametrize("different", [{"protocol": 9, "oldest": 9}, {"lease": 2.0, "view_lease": 4.0}])
async def test_who_is_dead_refuses_nobody(fleet: Fleet, different: dict[str, object]) -> None:
    """All nodes were killed, and start again with another version or another lease."""
    with RedisServer() as redis:
        await put_member(redis.url, record(**different))
        node = fleet.one("n2")
        node.args = ("--store", redis.url)
        await asyncio.to_thread(node.start)
        with node.web() as web:
            told = {one["id"]: one["state"] for one in web.get("/nodes").json()["data"]}
        node.stop()
    assert "live" == told["n2~2"] and told.get("later~1", "fenced") == "fenced"


async def test_another_cluster_may_begin_where_all_are_dead(fleet: Fleet) -> None:
    with RedisServer() as redis:
        await put_member(redis.url, record())
        node = fleet.one("n2", name="trucks")
        node.args = ("--store", redis.url)
        await asyncio.to_thread(node.start)
        node.stop()


async def test_a_node_that_waits_for_the_dead_is_stopped_as_always(fleet: Fleet) -> None:
    """SIGTERM while it looks whether those are alive that stand against it: exit code 0."""
    with RedisServer() as redis:
        await put_member(redis.url, record(lease=600.0))
        node = fleet.one("n2")
        node.args = ("--store", redis.url)
        starting = asyncio.create_task(asyncio.to_thread(node.start))
        await until(lambda: '"waiting"' in node.log)
        await asyncio.to_thread(node.stop)
        with pytest.raises(AssertionError, match="did not become ready"):
            await starting
