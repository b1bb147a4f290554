"""What the log of a node tells an operator of its cluster: members that are lost, links, clocks, configuration."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

from tests.chaos.cluster_members import Member, Trio
from tests.chaos.cluster_network import partition
from tests.chaos.cluster_store import ClusterStore
from tests.support.cluster_nodes import ClusterNodes
from tests.support.commands import run
from tests.support.node import ROOT, NodeProcess
from tests.support.redis import RedisServer, wait_until
from tests.support.waiting import until

PATIENCE = 120.0  #: seconds: machines that run tests are busy

#: A node whose clock is off by what stands in a file, and that looks at the clock of its store all the time.
SHIFTED = (
    "import sys, time; from pathlib import Path; real, shift = time.time, Path(sys.argv.pop(1)); "
    "time.time = lambda: real() + float(shift.read_text()); "
    "from motorcade.cluster import member; member.CLOCKS_APART = 0.2; "
    "from motorcade.cli import main; main()"
)


def events(node: NodeProcess, name: str) -> list[dict[str, Any]]:
    """Lines of its log with this event."""
    return [json.loads(line) for line in list(node.output) if f'"event":"{name}"' in line]


async def told(at: Member, name: str, /, *, beyond: int = 0, **fields: str) -> dict[str, Any]:
    """Wait for a line that was not there before; return it."""

    def fitting() -> list[dict[str, Any]]:
        return [
            event
            for event in events(at.process, name)[beyond:]
            if all(str(event[key]).startswith(value) for key, value in fields.items())
        ]

    async with asyncio.timeout(PATIENCE):
        await until(lambda: bool(fitting()))
    return fitting()[0]


async def test_members_that_are_lost_and_links_that_break(tmp_path: Path) -> None:
    """A link is reset, a node stands still, two do not reach each other, one is killed, one ends as it should."""
    trio = Trio(ClusterStore("redis"), tmp_path, lease=1.5)
    try:
        await trio.start()
        one, two, three = trio.members.values()
        assert ["one~1", "two~2"] == sorted((await told(three, "member_live", member="three~3"))["peers"])

        # A link breaks, and is there again.
        before = len(events(one.process, "cluster_link_open"))
        trio.network.reset("one", "two")
        lost = await told(one, "cluster_link_lost", peer="two~2")
        assert lost["why"] and lost["level"] == "warning"
        await told(one, "cluster_link_open", beyond=before, peer="two~2")

        # One stands still for longer than a lease: the others find it dead, and it finds that out.
        two.stand()
        dead = [asyncio.create_task(told(other, "member_dead", member="two~2")) for other in (one, three)]
        done, waiting = await asyncio.wait(dead, return_when=asyncio.FIRST_COMPLETED)
        assert 1.5 == done.pop().result()["lease"]
        for task in waiting:
            task.cancel()
        two.go()
        gone = await told(two, "membership_lost", member="two~2")
        assert gone["why"] and "joins again" in gone["consequence"]
        await told(two, "ready_again")
        await told(two, "member_live", member="two~4")

        # Two do not reach each other: the younger one steps back, and says what it waits for.
        cut = partition("one", "two")
        trio.network.begin(cut)
        await told(two, "membership_lost", member="two~4")
        waits = await told(two, "member_waits", member="two~")
        assert any("one~1" in what for what in waits["waits_for"]), waits
        assert not events(one.process, "membership_lost")
        trio.network.end(cut)
        await told(two, "member_live", beyond=2, member="two~")

        # One is killed; one ends as it should.
        await three.kill()
        done, waiting = await asyncio.wait(
            [asyncio.create_task(told(other, "member_fenced", member="three~3")) for other in (one, two)],
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert "taken care of" in done.pop().result()["consequence"]
        for task in waiting:
            task.cancel()
        process = two.process
        await two.stop()
        (left,) = events(process, "member_left")
        assert left["level"] == "info" and not trio.troubles
    finally:
        await trio.remove()


def test_options_that_differ_are_named_on_both_sides() -> None:
    with RedisServer() as redis, ClusterNodes(1, redis.url) as nodes:
        other = nodes.node("n2")
        assert other.config is not None
        other.config += "\n[limits]\nmax_packet_size = 500000\nmax_connections = 7\n[session]\nqueue = 50\n"
        with other:
            for node, member in ((nodes[0], "n2~2"), (other, "n1~1")):
                wait_until(lambda: bool(events(node, "configuration_drift")), "it is told")  # noqa: B023
                (drift,) = events(node, "configuration_drift")
                differs = ["limits.max_packet_size", "session.queue"]  # how many it takes may be as the machine is
                assert (member, differs, 0) == (drift["member"], drift["differs_in"], drift["more"])
                with node.web("") as web:
                    name = member.partition("~")[0]
                    assert f'motorcade_cluster_options_differing{{node="{name}"}} 2' in web.get("/metrics").text


def test_clocks_that_differ_and_agree_again(tmp_path: Path) -> None:
    """By more than a second, and less than what refuses a node."""
    shift = tmp_path / "shift"
    shift.write_text("5")
    with RedisServer() as redis, ClusterNodes(1, redis.url) as nodes:
        late = nodes.node("n2")
        line = late.command()
        line[1:3] = ["-c", SHIFTED, str(shift)]
        output: list[str] = []
        process = subprocess.Popen(
            line,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            cwd=late.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        late.output = output
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: output.extend(process.stdout or ()), daemon=True)
        reader.start()
        try:
            wait_until(lambda: bool(events(late, "clocks_apart")), "it says so")
            (apart,) = events(late, "clocks_apart")
            assert ("n2", True, "NTP" in apart["remedy"]) == (apart["node"], 4 < apart["seconds"] < 6, True)
            wait_until(lambda: bool(events(late, "member_live")), "it is let in all the same")
            shift.write_text("0")
            wait_until(lambda: bool(events(late, "clocks_agree")), "and when that is over")
            assert abs(events(late, "clocks_agree")[0]["seconds"]) < 1
            assert 1 == len(events(late, "clocks_apart"))
        finally:
            process.terminate()
            assert 0 == process.wait(PATIENCE), output
            reader.join(PATIENCE)
            late.remove()
        listed = run("node", "list", *nodes[0].at).stdout
        assert "n1" in listed and "n2" not in listed


def test_a_drain_is_told_from_its_beginning_to_its_end() -> None:
    with RedisServer() as redis, ClusterNodes(2, redis.url) as nodes:
        assert 0 == run("node", "drain", "n1", *nodes[1].at).returncode
        assert 0 == run("node", "drain", "n1", "--resume", *nodes[1].at).returncode
        for name in ("node_drains", "node_drained", "node_resumes"):
            wait_until(lambda: 1 == len(events(nodes[0], name)), f"{name} is told")  # noqa: B023
        assert 500.0 == events(nodes[0], "node_drains")[0]["rate"]
