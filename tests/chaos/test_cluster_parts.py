"""The parts that the chaos run of a cluster is made of: ways between members, and a store that forgets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from random import Random
from typing import Self

import pytest

from tests.chaos.cluster_network import STORE, Network, Trouble, partition
from tests.chaos.cluster_node import RoutedLoop
from tests.chaos.cluster_store import CELLS, PREFIX, ClusterStore
from tests.support.redis import RedisServer

PATIENCE = 30.0


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)


class Peer:
    """A connection through a way, to a server that sends everything back."""

    def __init__(self, network: Network, source: str, target: str) -> None:
        self.place = network.routes(source)[target].rpartition(":")
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(self.place[0], int(self.place[2]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def say(self, words: bytes) -> bytes:
        self.writer.write(words)
        return await asyncio.wait_for(self.reader.readexactly(len(words)), PATIENCE)


def test_ways_are_cut_slow_or_silent_in_one_direction_alone() -> None:
    async def play() -> None:
        servers = [await asyncio.start_server(echo, "127.0.0.1", 0) for _ in range(3)]
        one, two, store = ("{}:{}".format(*server.sockets[0].getsockname()) for server in servers)
        async with Network({"one": one, "two": two}, [store]) as network:
            async with Peer(network, "one", two) as there, Peer(network, "two", one) as back:
                assert b"a" == await there.say(b"a")
                assert b"a" == await back.say(b"a")
                for trouble in (Trouble("one", "two", lost=True), Trouble("two", "one", lost=True)):
                    # Whoever has dialled: what one says does not arrive, or what comes back does not.
                    for peer in (there, back):
                        network.begin([trouble])
                        answer = asyncio.ensure_future(peer.say(b"late"))
                        assert b"ok" == await asked(network, "one", store, b"ok")
                        await asyncio.sleep(0.05)
                        assert not answer.done()
                        network.end([trouble])
                        assert b"late" == await answer
                # Two troubles on one way: it works again when both are over.
                troubles = partition("one", "two")
                network.begin(troubles)
                network.begin([Trouble("one", "two", lost=True)])
                network.end(troubles)
                answer = asyncio.ensure_future(there.say(b"later"))
                await asyncio.sleep(0.05)
                assert not answer.done()
                network.end([Trouble("one", "two", lost=True)])
                assert b"later" == await answer
                # Slow: the bytes are there, in their order, and not before their time.
                slow = [Trouble("one", "two", delay=0.1, rate=50_000)]
                network.begin(slow)
                began, sent = asyncio.get_running_loop().time(), bytes(range(250)) * 80
                assert sent == await there.say(sent)
                assert asyncio.get_running_loop().time() - began > 0.2 + 0.9 * len(sent) / slow[0].rate - 0.05
                network.end(slow)
                assert b"quick" == await there.say(b"quick")
                network.reset("two", "one")
                for peer in (there, back):
                    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                        await peer.say(b"gone")
            # The way to the store, one way and cut.
            async with Peer(network, "two", store) as stored:
                network.begin([Trouble(STORE, "two", lost=True)])
                answer = asyncio.ensure_future(stored.say(b"late"))
                await asyncio.sleep(0.05)
                assert not answer.done()
                network.end([Trouble(STORE, "two", lost=True)])
                assert b"late" == await answer
        for server in servers:
            server.close()

    async def asked(network: Network, source: str, target: str, words: bytes) -> bytes:
        async with Peer(network, source, target) as peer:
            return await peer.say(words)

    asyncio.run(play())


def test_a_loop_takes_the_ways_it_is_told() -> None:
    async def play() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        RoutedLoop.routes = {"elsewhere:7": "{}:{}".format(*server.sockets[0].getsockname())}
        reader, writer = await asyncio.open_connection("elsewhere", 7)
        writer.write(b"hello")
        assert b"hello" == await asyncio.wait_for(reader.readexactly(5), PATIENCE)
        writer.close()
        server.close()

    try:
        with asyncio.Runner(loop_factory=RoutedLoop) as runner:
            runner.run(play())
    finally:
        RoutedLoop.routes = {}


@pytest.fixture
def forgetful() -> Iterator[ClusterStore]:
    store = ClusterStore("redis+cluster", forgets=True)
    asyncio.run(store.start())
    yield store
    asyncio.run(store.remove())


@pytest.mark.timeout(300)
def test_a_takeover_forgets_what_was_confirmed(forgetful: ClusterStore) -> None:
    """Written before: there. Written and confirmed by a replica while the other stood still: gone, and excused."""

    async def play() -> tuple[dict[int, RedisServer], dict[int, int]]:
        owners = {cell: master(f"{PREFIX}:{{{cell}}}:x") for cell in range(CELLS.count)}
        confirmed = dict.fromkeys(owners, 0)
        forgetting = asyncio.create_task(forgetful.forget(Random(3)))
        number = 0
        while not forgetting.done():
            number += 1
            for cell, server in owners.items():
                if await asyncio.to_thread(written, server, cell, number):
                    confirmed[cell] = number
        await forgetting
        await forgetful.wait_healthy()
        return owners, confirmed

    def master(key: str) -> RedisServer:
        cluster = forgetful._of_cluster
        slot = int(cluster.servers[0].command("CLUSTER", "KEYSLOT", key))
        for first, last, (_, port, *_), *_ in cluster.servers[0].command("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(server for server in cluster.servers if server.port == port)
        raise AssertionError("no master")

    def written(server: RedisServer, cell: int, number: int) -> bool:
        try:
            server.command("SET", f"{PREFIX}:{{{cell}}}:x", number)
            return int(server.command("WAIT", 1, 200)) >= 1
        except Exception:  # noqa: BLE001 - it is being killed
            return False

    owners, confirmed = asyncio.run(play())
    [lapse] = forgetful.lapses
    gone = set()
    for cell in owners:
        key = f"{PREFIX}:{{{cell}}}:x"
        if int(master(key).command("GET", key) or 0) < confirmed[cell]:
            gone.add(cell)
    assert gone, "nothing was forgotten"
    assert gone <= lapse.cells
    home = next(f"x{number}" for number in range(1000) if CELLS.of(f"x{number}") in lapse.cells)
    other = next(f"x{number}" for number in range(1000) if CELLS.of(f"x{number}") not in lapse.cells)
    assert lapse.concerns(home, lapse.began - 1, lapse.began)
    assert not lapse.concerns(home, lapse.ended + 1, lapse.ended + 2)
    assert not lapse.concerns(other, lapse.began, lapse.ended)
