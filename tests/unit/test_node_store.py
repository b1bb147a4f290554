"""Stores that a node refuses before it opens anything."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from motorcade import config as configuration
from motorcade.core.errors import ConfigError
from motorcade.node import Node
from tests.support.tables import each_case

QUIET = {"listeners.tcp.bind": "127.0.0.1:0", "listeners.ws.bind": "off", "http.bind": "off"}


def node_in(data: Path, **options: object) -> Node:
    flags = QUIET | {"data.dir": str(data)} | {key.replace("__", "."): value for key, value in options.items()}
    return Node(configuration.load(None, {}, flags), asyncio.get_running_loop())


@each_case("url", ["rocksdb://", "memory://", "rocksdb:///somewhere"])
async def test_a_node_with_links_does_not_take_an_embedded_store(tmp_path: Path, url: str) -> None:
    node = node_in(tmp_path / "data", store__url=url, cluster__bind="127.0.0.1:7946")
    with pytest.raises(ConfigError, match=r"cluster.bind: the embedded engine serves exactly one node.* redis://"):
        await node.run()
    assert not (tmp_path / "data").exists()


async def test_a_folder_with_the_store_of_several_nodes_gets_no_empty_one_beside_it(tmp_path: Path) -> None:
    """The message says how its contents get into a store for one node."""
    (tmp_path / "valkey" / "appendonlydir").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        await node_in(tmp_path).run()
    for words in ("--nodes 2", "motorcade store export", f"valkey://{tmp_path}/valkey", "motorcade store import"):
        assert words in str(caught.value)
    assert not (tmp_path / "store").exists()
