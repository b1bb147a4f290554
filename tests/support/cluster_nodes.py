"""Several real nodes on one store that serve as one broker, each with ports of its own: a test says which one it means.

with ClusterNodes(3, store_url) as nodes:
    nodes[0].mqtt, nodes[2].http           each is a `NodeProcess`
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from tests.support.node import Endpoint, NodeProcess
from tests.support.ports import free_port
from tests.support.redis import wait_until

CONFIG = """
[broker]
node = "{name}"
{broker}
[cluster]
bind = "{bind}"
{more}
"""


class ClusterNodes:
    """The nodes, in the order of their names: n1, n2, …"""

    def __init__(self, count: int, store: str, *, cluster: str = "", broker: str = "", more: str = "") -> None:
        """`cluster`, `broker`: more options of these sections; `more`: other sections."""
        self._folder = TemporaryDirectory(prefix="motorcade-cluster-")
        self._store = store
        self._broker = broker
        self._options = f"{cluster}\n{more}"
        self.nodes = [self.node(f"n{number}") for number in range(1, count + 1)]

    def node(self, name: str, *args: str) -> NodeProcess:
        """A node that is not started yet; the next one of the same name has the same files."""
        config = CONFIG.format(
            name=name, bind=Endpoint("127.0.0.1", free_port()), broker=self._broker, more=self._options
        )
        return NodeProcess("--store", self._store, *args, config=config, data=Path(self._folder.name) / name, http=True)

    def __getitem__(self, number: int) -> NodeProcess:
        return self.nodes[number]

    def __len__(self) -> int:
        return len(self.nodes)

    def __enter__(self) -> Self:
        try:
            for node in self.nodes:
                node.start()
            for node in self.nodes:  # each is ready, and the others hear of that a moment later
                wait_until(lambda: self._sees_all(node), f"{node.args} sees that all others take clients")  # noqa: B023
        except BaseException:
            self.remove()
            raise
        return self

    def _sees_all(self, node: NodeProcess) -> bool:
        with node.web("") as web:
            return f'motorcade_cluster_members{{state="live"}} {len(self)}\n' in web.get("/metrics").text

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.stop()
        self.remove()

    def remove(self) -> None:
        """Kill those that still run, and remove their files."""
        for node in self.nodes:
            node.kill()
            node.remove()
        self._folder.cleanup()
