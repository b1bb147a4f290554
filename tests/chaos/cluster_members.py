"""Three nodes that are one broker: real processes, each with ports and data of its own, which keep them for life.

Member     one node: started, killed, stopped, made to stand still; the next process has the same name and ports
Trio       all of them, the network between them, and the store
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

from tests.chaos.cluster_network import Network
from tests.chaos.cluster_node import ROUTES, WITHOUT
from tests.chaos.cluster_store import ClusterStore
from tests.chaos.victim import NotReadyError
from tests.support.node import ROOT, Endpoint, NodeProcess
from tests.support.ports import free_port

NAMES = ("one", "two", "three")
VIEW = 5 / 3  #: leases, of the view; as by default

#: No queue may drop anything: what is not delivered shall be the fault of the members, never of a limit.
CONFIG = """
[session]
queue = 10000000
queue_bytes = 0
[broker]
node = "{name}"
drain_timeout = 5.0
[cluster]
bind = "{bind}"
lease = {lease}
view_lease = {view}
{more}
"""


class MemberProcess(NodeProcess):
    """A node whose connections take the ways of the network."""

    def command(self) -> list[str]:
        return ["tests.chaos.cluster_node" if word == "motorcade" else word for word in super().command()]


class Member:
    """One node."""

    def __init__(
        self, name: str, folder: Path, *, lease: float, more: str = "", without: str = "", source: Path | None = None
    ) -> None:
        """`without`: what it shall do without (`cluster_node`); `source`: the folder with another package."""
        self.name = name
        self.mqtt = Endpoint("127.0.0.1", free_port())
        self.http = Endpoint("127.0.0.1", free_port())
        self.link = Endpoint("127.0.0.1", free_port())
        self.data = folder / name
        self.starts = 0
        self.standing = False
        self.troubles: list[tuple[str, str]] = []  #: kind of finding, and words
        self.url = ""
        self.routes: dict[str, str] = {}
        # Shorter than twice the lease: who stands still for that long has lost its view.
        view = max(lease * VIEW, lease + 1.1)
        self._config = CONFIG.format(name=name, bind=self.link, lease=lease, view=view, more=more)
        self._without = without
        self._source = source or ROOT / "src"
        self._process: NodeProcess | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.process is not None and self._process.process.poll() is None

    @property
    def serves(self) -> bool:
        """Whether anybody who connects may hope for an answer."""
        return self.is_alive and not self.standing

    @property
    def process(self) -> NodeProcess:
        """The process that runs now, with its log."""
        assert self._process is not None, "there is none"
        return self._process

    @property
    def auth(self) -> dict[str, str]:
        return self.process.auth

    async def start(self) -> None:
        """Start, and wait until the node is ready."""
        assert self._process is None, f"{self.name} runs already"
        self.starts += 1
        env = {
            ROUTES: json.dumps(self.routes),
            WITHOUT: self._without,
            "PYTHONPATH": os.pathsep.join([str(self._source), str(ROOT)]),
        }
        node = MemberProcess("--store", self.url, config=self._config, data=self.data, env=env, http=True)
        node.mqtt, node.http = self.mqtt, self.http
        self._process = node
        try:
            await asyncio.to_thread(node.start)
        except AssertionError as error:
            await self._end("kill")
            raise NotReadyError(f"{self.name}, process {self.starts}: {error}") from None

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        await self._end("kill")

    async def stop(self) -> None:
        """SIGTERM; that a node does not end with 0 is a finding."""
        try:
            await self._end("stop")
        except AssertionError as error:
            self.troubles.append(("did not stop", f"{self.name}, process {self.starts}: {str(error).splitlines()[0]}"))

    def stand(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)
        self.standing = True

    def go(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)
        self.standing = False

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.process is not None and self.is_alive:
            self._process.process.send_signal(number)

    def look(self) -> None:
        """Note it if the node has ended by itself."""
        if self._process is not None and not self.is_alive:
            self.troubles.append(("node ended", f"{self.name}, process {self.starts} ended by itself"))

    async def _end(self, how: str) -> None:
        node, self._process = self._process, None
        if node is None:
            return
        self.standing = False
        try:
            await asyncio.to_thread(getattr(node, how))
        finally:
            self.data.mkdir(parents=True, exist_ok=True)
            with (self.data / "node.log").open("a") as log:
                log.write(f"--- process {self.starts}\n{node.log}")
            if "Traceback" in node.log:
                self.troubles.append(("traceback", f"{self.name}, process {self.starts}: see node.log"))


class Trio:
    """The members, the network between them, and their store."""

    def __init__(
        self,
        store: ClusterStore,
        folder: Path,
        *,
        lease: float,
        more: str = "",
        without: str = "",
        source: Path | None = None,
    ) -> None:
        self.store = store
        self.lease = lease
        self.members = {
            name: Member(name, folder, lease=lease, more=more, without=without, source=source) for name in NAMES
        }
        self.network: Network

    async def start(self) -> None:
        """Start the store, the ways, and the members, one after the other."""
        await self.store.start()
        links = {name: str(member.link) for name, member in self.members.items()}
        self.network = await Network(links, [server.address for server in self.store.servers]).__aenter__()
        for member in self.members.values():
            member.url = self.store.url
            member.routes = self.network.routes(member.name)
            await member.start()

    async def remove(self) -> None:
        """End everything."""
        for member in self.members.values():
            member.go()
        await asyncio.gather(*(member.kill() for member in self.members.values()))
        if hasattr(self, "network"):
            await self.network.__aexit__()
        await self.store.remove()

    @property
    def troubles(self) -> list[tuple[str, str]]:
        return [trouble for member in self.members.values() for trouble in member.troubles]
