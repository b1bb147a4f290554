"""How large a cluster can become: `.venv/bin/python bench/cluster/sizes.py [WHAT …] [--sessions N]`.

    fill        sessions are written by the store's own calls, as a node writes them that puts them to sleep
    join        a node starts on a store with so many sessions: seconds until it is ready, processor time, memory
    dead        a member dies that has so many clients attached: seconds from its fence until all of them are asleep,
                while a publisher goes on at another node
    addressed   the same sessions with addressed filters: what nodes know of them, and whether a message arrives
    offers      messages that are offered to sessions, beside those that are appended to their mailboxes, 64 at a time

On one Redis, or on a cluster of six processes (`--cluster`, with as many `--cells`), started for that and filled once.
Real nodes; processor time of nodes and of Redis is told apart.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

# ruff: noqa: E402 - after the path
import msgspec
import structlog

from motorcade.broker import session_records as records
from motorcade.cluster.membership import MemberRecord
from motorcade.cluster.roster import Roster
from motorcade.core.message import Message
from motorcade.core.subscription import Subscription
from motorcade.redis.url import RedisOptions
from motorcade.storage.homes import CLIENT
from motorcade.storage.ports import SPARE_ALL, Batch, Bound, Draft, Durability
from motorcade.storage.redis import RedisStore
from runner.machine import exact_cpu_seconds
from tests.support import node as node_support
from tests.support.cluster_nodes import ClusterNodes
from tests.support.flows import lasting
from tests.support.node import NodeProcess
from tests.support.redis import RedisCluster, RedisServer
from tests.support.wire import Client

PER_BATCH = 100  #: sessions in one write
UNDER_WAY = 64  #: writes
EXPIRY = 7 * 86_400
PATTERN = "agent/{client}/#"
PATIENCE = 600.0  #: seconds until a node is ready, on a machine that does other work
PATIENT = "lease = 10.0\nview_lease = 15.0"  #: of nodes: the member that is to die has all of its clients before
OFFERS = 20_000
PUBLISHES = 1000  #: to vehicles that are chosen at random


def vin(number: int) -> str:
    """Return the client id of a vehicle."""
    return f"WVWZZZ1JZ{number:08}"


def session_record(*, connected: bool) -> bytes:
    """Return the record of a session, as a node writes it."""
    now = time.time()
    expires_at = None if connected else now + EXPIRY
    record = records.SessionRecord(
        None, 5, EXPIRY, now, connected, expires_at, None if connected else now, None, sent_to=0, window=20
    )
    return records.encode(record)


class Servers:
    """The servers of the store, and what they have used."""

    def __init__(self, servers: RedisServer | RedisCluster, cells: int) -> None:
        self._all = servers.servers if isinstance(servers, RedisCluster) else [servers]
        self.url = f"{servers.url}?cells={cells}" if cells else servers.url

    def cpu(self) -> float:
        """Return the processor time of all servers, seconds."""
        return sum(exact_cpu_seconds(server.pid) for server in self._all)

    def memory(self) -> int:
        """Return the bytes that the data takes, with its replicas."""
        return sum(int(server.client.info("memory")["used_memory"]) for server in self._all)


@contextmanager
def servers(*, clustered: bool, cells: int) -> Iterator[Servers]:
    """Run servers that nothing was written to."""
    made = RedisCluster() if clustered else RedisServer()
    with made:
        yield Servers(made, cells)


async def opened(url: str) -> RedisStore:
    """Open the store as this program, which waits for no replica."""
    store = RedisStore(url, Durability.FAST, RedisOptions(patience=60.0))
    await store.open()
    return store


async def fill(url: str, sessions: int) -> None:
    """Write sessions that are asleep, each with one subscription, as in `SessionStore.put_to_sleep` and `subscribe`."""
    store = await opened(url)
    record = session_record(connected=False)
    room = asyncio.Semaphore(UNDER_WAY)
    for start in range(0, sessions, PER_BATCH):
        batch = Batch()
        for number in range(start, min(sessions, start + PER_BATCH)):
            name = vin(number)
            filter_ = f"agent/{name}/#"
            subscription = Subscription(filter_, 1)
            batch.put(records.SESSIONS, name, record)
            # Nothing was ever forgotten in this store: the first generation of each mailbox is 1.
            batch.put(records.SUBSCRIPTIONS, records.pair(name, filter_), records.subscription_record(subscription, 1))
            batch.make(records.owner_of(name))
            batch.due(CLIENT + name, time.time() + EXPIRY)
        await room.acquire()
        commit = store.write(batch)
        commit.then(room.release)
    for _ in range(UNDER_WAY):
        await room.acquire()
    await store.close()


def resident(pid: int) -> int:
    """Return the bytes that a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def started(node: NodeProcess, store: Servers) -> tuple[float, float, float, int]:
    """Start a node; seconds until it is ready, of its processor and of Redis', and its memory."""
    before, redis = time.monotonic(), store.cpu()
    node.start()
    return time.monotonic() - before, exact_cpu_seconds(node.pid), store.cpu() - redis, resident(node.pid)


def report(row: str, **figures: float) -> None:
    """Print a row."""
    print(f"{row:34}" + "".join(f"  {name} {value:.4g}" for name, value in figures.items()), flush=True)


def join(store: Servers, sessions: int, *, addressed: bool) -> None:
    """Start nodes on a store that is filled, and on an empty one."""
    options = f'addressed = ["{PATTERN}"]' if addressed else ""
    kind = "addressed" if addressed else "join"
    with servers(clustered=False, cells=0) as empty:
        cluster = ClusterNodes(1, empty.url, cluster=options)
        seconds, node, redis, memory = started(cluster[0], empty)
        report(f"{kind}: empty store", seconds=seconds, node_cpu_s=node, redis_cpu_s=redis, node_MB=memory / 1e6)
        base = memory
        cluster[0].stop()
        cluster.remove()
    cluster = ClusterNodes(2, store.url, cluster=options)
    try:
        for number, one in enumerate(cluster.nodes):
            seconds, node, redis, memory = started(one, store)
            each = (memory - base) / sessions
            row = f"{kind}: {sessions} sessions, node {number + 1}"
            figures = {"seconds": seconds, "node_cpu_s": node, "redis_cpu_s": redis, "node_MB": memory / 1e6}
            report(row, **figures, bytes_per_session=each)
        if addressed:
            publish(cluster, store, sessions)
    finally:
        cluster.__exit__()


def publish(cluster: ClusterNodes, store: Servers, sessions: int) -> None:
    """Publish to vehicles at one node, and look at the other whether it has arrived."""
    numbers = random.Random(1).sample(range(sessions), min(PUBLISHES, sessions))
    with Client(cluster[0], version=5) as publisher:
        assert publisher.connect("platform").reason == 0
        cpu, redis, waits = exact_cpu_seconds(cluster[0].pid), store.cpu(), []
        for number in numbers:
            before = time.monotonic()
            publisher.publish(f"agent/{vin(number)}/cmd", b"x" * 100, 1)
            waits.append(time.monotonic() - before)
        cpu, redis = exact_cpu_seconds(cluster[0].pid) - cpu, store.cpu() - redis
        per = 1e6 / len(numbers)
        waits.sort()
        figures = {"p50_ms": median(waits) * 1e3, "p99_ms": waits[len(waits) * 99 // 100] * 1e3}
        report("addressed: publish, one at a time", node_us=cpu * per, redis_us=redis * per, **figures)
        for number in numbers[:50]:
            with Client(cluster[1], version=5) as vehicle:
                assert vehicle.connect(vin(number), **lasting(5)).session_present
                assert vehicle.receive().payload == b"x" * 100
                publisher.publish(f"agent/{vin(number)}/live", b"awake", 1)
                assert vehicle.receive().payload == b"awake"
                vehicle.disconnect()
    report("addressed: arrived", sleeping=min(50, len(numbers)), awake=min(50, len(numbers)))


class Publisher:
    """A client that publishes all the time, and how long it waits for each PUBACK."""

    def __init__(self, node: NodeProcess, topic: str, name: str) -> None:
        self.waits: list[tuple[float, float]] = []  #: when it was published, and seconds
        self._stopping = threading.Event()
        self._node = node
        self._topic = topic
        self._name = name
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        with Client(self._node, version=5) as client:
            client.connect(self._name)
            while not self._stopping.is_set():
                before = time.monotonic()
                client.publish(self._topic, b"x" * 100, 1)
                self.waits.append((before, time.monotonic() - before))

    def stop(self) -> None:
        """End it."""
        self._stopping.set()
        self._thread.join()

    def worst(self, since: float, until: float) -> dict[str, float]:
        """Return how it fared between two moments."""
        found = sorted(wait for at, wait in self.waits if since <= at < until) or [float("nan")]
        return {
            "published": len(found),
            "p50_ms": median(found) * 1e3,
            "p99_ms": found[len(found) * 99 // 100] * 1e3,
            "max_ms": found[-1] * 1e3,
        }


class DyingMember:
    """A member that has clients attached, counts on for a while, and dies."""

    def __init__(self, url: str, clients: int) -> None:
        self._url = url
        self._clients = clients

    async def live(self) -> RedisStore:
        """Attach the clients, as CONNECT does; the store of the member, which has died when this returns."""
        store = await opened(self._url)
        roster = Roster(store)
        record = MemberRecord(name="dying", number=0, token=b"d" * 16, writer=store.writer, address="")
        record, _ = await roster.enter(record, "motorcade")
        beating = asyncio.create_task(self._beat(roster, record))
        room = asyncio.Semaphore(256)
        connected = session_record(connected=True)

        async def attach(number: int) -> None:
            name = vin(number)
            found = await store.coordination.open(records.owner_of(name), record.id, ("session",), time.time())
            batch = Batch()
            batch.put(records.SESSIONS, name, connected)
            batch.spare(records.owner_of(name), SPARE_ALL)
            batch.due(CLIENT + name, 0.0)
            batch.fence(found.attached.fence)
            await store.write(batch)
            room.release()

        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                await room.acquire()
                group.create_task(attach(number))
        beating.cancel()
        return store

    async def _beat(self, roster: Roster, record: MemberRecord) -> None:
        while True:
            after = msgspec.structs.replace(record, beat=record.beat + 1)
            if await roster.renew(record, after) is not None:
                raise SystemExit("the member was found dead before all of its clients were attached")
            record = after
            await asyncio.sleep(0.3)


async def attached(store: RedisStore) -> int:
    """Return how many homes are attached."""
    counts = await store.core.everywhere("HLEN", "a")
    return sum(map(int, counts))


async def wait_for_line(nodes: Sequence[NodeProcess], words: str) -> float:
    """Wait until a node has said something; when that was seen."""
    while not any(words in line for node in nodes for line in node.output):  # noqa: ASYNC110 - another thread reads
        await asyncio.sleep(0.02)
    return time.monotonic()


def dead(store: Servers, clients: int) -> None:
    """Let a member die that has clients."""
    with ClusterNodes(2, store.url, cluster=PATIENT) as cluster:
        live = Client(cluster[0], version=5)
        live.connect("live")
        live.subscribe("bench/live", 0)
        publisher = Publisher(cluster[1], "bench/live", "publisher-live")
        durable = Publisher(cluster[1], f"agent/{vin(0)}/cmd", "publisher-durable")
        try:
            asyncio.run(_die(store, clients, cluster, (publisher, durable)))
        finally:
            publisher.stop()
            durable.stop()
            live.abort()


async def _die(store: Servers, clients: int, cluster: ClusterNodes, publishers: Sequence[Publisher]) -> None:
    before = time.monotonic()
    member = await DyingMember(store.url, clients).live()
    count = await attached(member)
    report(f"dead: {clients} clients attached", seconds=time.monotonic() - before, homes=count)
    quiet = time.monotonic()
    found = await wait_for_line(cluster.nodes, "member_dead")
    cpu, redis = [exact_cpu_seconds(node.pid) for node in cluster.nodes], store.cpu()
    left = count
    while left > 10:  # the publishers stay attached, and the live one
        await asyncio.sleep(0.1)
        left = await attached(member)
    done = time.monotonic()
    used = [exact_cpu_seconds(node.pid) - one for node, one in zip(cluster.nodes, cpu, strict=True)]
    figures = {f"node{number}_cpu_s": one for number, one in enumerate(used, 1)}
    report("dead: taken care of", found_after_s=found - quiet, seconds=done - found, redis_cpu_s=store.cpu() - redis)
    report("dead: of the nodes", **figures)
    for name, one in zip(("live", "durable"), publishers, strict=True):
        report(f"dead: {name} publisher before", **one.worst(quiet - 3, quiet))
        report(f"dead: {name} publisher meanwhile", **one.worst(found, done))


async def offers(store: Servers, sessions: int) -> None:
    """Store messages for sessions in both ways."""
    writer = await opened(store.url)
    count, room = min(OFFERS, sessions), Bound(1000)
    for kind in ("append", "offer") * 2:
        before, redis, now = time.process_time(), store.cpu(), time.time()
        for start in range(0, count, 64):
            commits = []
            for number in range(start, min(count, start + 64)):
                name, batch = vin(number), Batch()
                message = Message(f"agent/{name}/cmd", b"x" * 100, 1, False, "platform")
                if kind == "append":
                    body, payload = records.ENTRY.encode(message, 1)
                    batch.append([records.owner_of(name)], Draft(body, payload), now, room, (), [1])
                else:
                    body, payload = records.offered_body(message)
                    batch.offer(name, message.topic, Draft(body, payload), now, room, qos=1)
                commits.append(writer.write(batch))
            for commit in commits:
                assert (await commit).appended[0].position
        used, redis = time.process_time() - before, store.cpu() - redis
        report(f"offers: {count} by {kind}", caller_us=used / count * 1e6, redis_us=redis / count * 1e6)
    await writer.close()


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["join", "addressed", "offers", "dead"])
    parser.add_argument("--sessions", type=int, default=1_000_000, help="that sleep")
    parser.add_argument("--clients", type=int, default=100_000, help="of the member that dies")
    parser.add_argument("--cluster", action="store_true", help="a Redis Cluster of six processes")
    parser.add_argument("--cells", type=int, default=0, help="of the store; 0: as many as usual")
    asked = parser.parse_args()
    node_support.START_PATIENCE = PATIENCE
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with servers(clustered=asked.cluster, cells=asked.cells) as store:
        before = time.monotonic()
        asyncio.run(fill(store.url, asked.sessions))
        memory, seconds = store.memory(), time.monotonic() - before
        report(f"fill: {asked.sessions}", seconds=seconds, redis_MB=memory / 1e6, bytes_each=memory / asked.sessions)
        if "join" in asked.what:
            join(store, asked.sessions, addressed=False)
        if "addressed" in asked.what:
            join(store, asked.sessions, addressed=True)
        if "offers" in asked.what:
            asyncio.run(offers(store, asked.sessions))
        if "dead" in asked.what:
            dead(store, asked.clients)


if __name__ == "__main__":
    main()
