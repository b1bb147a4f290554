"""After SUBACK at one node, what any other node acknowledges arrives: so many tries, none missed.

    python -m tests.chaos.grants --rounds 10000 --redis lone,cluster --fault none,stand,slow

A try: one client subscribes to a topic of its own at a node; as soon as it has its SUBACK, another one publishes to
that topic at another node; when that has its acknowledgement, the message has to come. Three nodes in all pairs; clean
and durable sessions; QoS 1 and 2; MQTT 3.1.1 and 5; raw packets and paho, on both sides.

    none      all is well: what is measured is the time until SUBACK
    stand     one node after the other stands still for a second (SIGSTOP), every five seconds
    slow      two nodes are 200 ms from each other, in each direction

Exit code 1 if anything was missed, or a SUBACK came later than the lease of the view and a second.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.chaos.cluster_members import NAMES, VIEW, Member, Trio
from tests.chaos.cluster_network import Trouble
from tests.chaos.cluster_store import ClusterStore
from tests.chaos.command import add_runs, folder, parser, run_all
from tests.chaos.victim import NotReadyError
from tests.scenarios.clients import Details, Listeners, RealClient, Received, Will
from tests.scenarios.clients.base import PATIENCE
from tests.scenarios.clients.paho_client import PahoClient
from tests.support.flows import lasting
from tests.support.wire import SUBACK, Client, subscribe_packet

STORES: Final = {"lone": "redis", "cluster": "redis+cluster"}
FAULTS: Final = ("none", "stand", "slow")

STANDS: Final = 1.0  #: seconds that a node stands still
EVERY: Final = 5.0  #: seconds from one to the next
DELAY: Final = 0.2  #: seconds, in each direction
LATE: Final = 1.0  #: seconds after the lease of the view by which SUBACK must have come
REFUSED: Final = 0x80  #: the lowest of the reason codes that refuse
MOVES: Final = 25  #: tries of a subscriber, until it ends and a new one comes, of another kind and at another node


@dataclass
class Options:
    """What to do in one run."""

    tries: int = 10_000
    redis: str = "lone"
    fault: str = "none"
    clients: int = 8  #: that try at the same time
    lease: float = 3.0
    data: Path | None = None
    quiet: bool = False

    @property
    def view(self) -> float:
        """Seconds of the lease of the view."""
        return max(self.lease * VIEW, self.lease + 1.1)


@dataclass
class Outcome:
    """What came of it."""

    options: Options
    tries: int = 0
    missed: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    waits: dict[str, list[float]] = field(default_factory=dict)  #: seconds until SUBACK, by kind of client
    publishes: list[float] = field(default_factory=list)  #: seconds until a publish was acknowledged
    stands: int = 0
    seconds: float = 0.0

    @property
    def slowest(self) -> float:
        return max(itertools.chain.from_iterable(self.waits.values()), default=0.0)

    @property
    def passed(self) -> bool:
        wanted = self.tries == self.options.tries and not self.missed and not self.troubles
        return wanted and self.slowest <= self.options.view + LATE


def share(waits: list[float], percent: float) -> float:
    """The time within which so many of a hundred are."""
    ordered = sorted(waits)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


class RawClient(RealClient):
    """The client of the tests behind the interface of the others."""

    name = "raw"
    client: Client | None = None

    def connect(self, client_id: str, *, clean: bool = True, will: Will | None = None) -> None:
        assert will is None, "not needed"
        self.client = Client(self.address, version=self.version)
        assert self.client.connect(client_id, **({} if clean else lasting(self.version))).reason == 0

    def subscribe(self, topic_filter: str, qos: int) -> None:
        client = self._client
        packet_id = client.next_id()
        client.send(subscribe_packet(packet_id, [(topic_filter, qos)], version=self.version))
        # What is received may come before it: a late copy of the try before.
        assert [qos] == client.await_answer(SUBACK, packet_id).reasons

    def publish(
        self, topic: str, payload: bytes, qos: int = 1, *, retain: bool = False, details: Details | None = None
    ) -> None:
        answer = self._client.publish(topic, payload, qos, retain=retain)
        assert answer is None or (answer.reason or 0) < REFUSED, "it was refused"

    def receive(self) -> Received:
        try:
            got = self._client.receive(PATIENCE)
        except TimeoutError:
            raise AssertionError("raw got no message") from None
        return Received(got.topic, got.payload, got.qos, got.retain)

    def disconnect(self) -> None:
        self._client.disconnect()

    def drop(self) -> None:
        self._client.abort()

    def close(self) -> None:
        if self.client is not None:
            self.client.close()

    @property
    def _client(self) -> Client:
        assert self.client is not None, "it is not connected"
        return self.client


@dataclass(frozen=True)
class Kind:
    """One kind of client."""

    driver: Callable[[Listeners, str, int], RealClient]
    name: str
    version: int
    clean: bool

    def __str__(self) -> str:
        return f"{self.name} {'5' if self.version == 5 else '3.1.1'} {'clean' if self.clean else 'durable'}"

    def at(self, member: Member, name: str, *, clean: bool = True) -> RealClient:
        """Return a client of this kind that is connected to a node."""
        client = self.driver(Listeners(member.mqtt, member.mqtt), "tcp", self.version)
        client.connect(name, clean=clean)
        if isinstance(client, PahoClient) and client.client is not None:
            # Else the system holds a SUBSCRIBE for 40 ms, until the acknowledgement before it has been confirmed.
            held = client.client.socket()
            assert held is not None, "it is not connected"
            with socket.socket(fileno=os.dup(held.fileno())) as same:
                same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client


KINDS: Final = [
    Kind(driver, driver.name, version, clean)
    for driver, version, clean in itertools.product((RawClient, PahoClient), (4, 5), (True, False))
]


class Run:
    """One run on one kind of store, with one kind of fault."""

    def __init__(self, options: Options, data: Path) -> None:
        self.outcome = Outcome(options)
        self._options = options
        self._trio = Trio(ClusterStore(STORES[options.redis]), data, lease=options.lease)
        self._numbers = iter(range(options.tries))
        self._lock = threading.Lock()  # of the outcome and the numbers
        self._over = asyncio.Event()

    async def run(self) -> Outcome:
        options, trio = self._options, self._trio
        try:
            await trio.start()
            if options.fault == "slow":
                trio.network.begin([Trouble(*pair, delay=DELAY) for pair in (NAMES[:2], NAMES[1::-1])])
            began = time.monotonic()
            standing = asyncio.create_task(self._stand()) if options.fault == "stand" else None
            with ThreadPoolExecutor(options.clients) as threads:
                loop = asyncio.get_running_loop()
                await asyncio.gather(
                    *(
                        loop.run_in_executor(threads, self._try_again_and_again, worker)
                        for worker in range(options.clients)
                    )
                )
            self._over.set()
            if standing is not None:
                await standing
            self.outcome.seconds = time.monotonic() - began
            for member in trio.members.values():
                await member.stop()
        except NotReadyError as error:
            self.outcome.troubles.append(str(error))
        finally:
            await trio.remove()
        self.outcome.troubles += [words for _, words in trio.troubles]
        return self.outcome

    async def _stand(self) -> None:
        """Let one node after the other stand still for a while."""
        for member in itertools.cycle(self._trio.members.values()):
            if self._over.is_set():
                return
            member.stand()
            try:
                await asyncio.sleep(STANDS)
            finally:
                member.go()
            self.outcome.stands += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), EVERY - STANDS)

    # -- in threads: clients wait

    def _try_again_and_again(self, worker: int) -> None:
        """Be one subscriber after the other, with a publisher at each node for all of them."""
        kinds = KINDS[worker % len(KINDS) :] + KINDS[: worker % len(KINDS)]
        members = list(self._trio.members.values())
        with ExitStack() as stack:
            publishers = []
            for at, member in enumerate(members):
                publisher = kinds[2 * at + 1].at(member, f"publisher-{worker}-{member.name}")
                stack.callback(publisher.close)
                publishers.append(publisher)
            for turn in itertools.count():
                numbers = self._take()
                if not numbers:
                    return
                where, kind = (worker + turn) % len(members), kinds[turn % len(kinds)]
                subscriber = kind.at(members[where], f"subscriber-{worker}-{turn}", clean=kind.clean)
                stack.callback(subscriber.close)
                others = publishers[:where] + publishers[where + 1 :]
                for number in numbers:
                    if not self._try(number, kind, subscriber, others[number % 2]):
                        break  # whatever is missing: this one's next message may be an old one
                subscriber.close()

    def _take(self) -> list[int]:
        with self._lock:
            return list(itertools.islice(self._numbers, MOVES))

    def _try(self, number: int, kind: Kind, subscriber: RealClient, publisher: RealClient) -> bool:
        """Do one try; False if the message did not come."""
        topic, payload, qos = f"granted/{number}", b"%d" % number, 1 + number // 2 % 2
        began = time.perf_counter()
        granted = acknowledged = 0.0
        missed = ""
        try:
            subscriber.subscribe(topic, qos)
            granted = time.perf_counter()
            publisher.publish(topic, payload, qos)
            acknowledged = time.perf_counter()
            while (got := subscriber.receive()).topic != topic:
                pass  # a copy of an earlier one; QoS 1 may come twice
            assert payload == got.payload
        except (AssertionError, OSError, queue.Empty) as error:
            missed = f"try {number}, {kind}, from {publisher.address} to {subscriber.address}: {error!r}"
        with self._lock:
            self.outcome.tries += 1
            if granted:
                self.outcome.waits.setdefault(kind.name, []).append(granted - began)
            if acknowledged:
                self.outcome.publishes.append(acknowledged - granted)
            if missed:
                self.outcome.missed.append(missed)
            if not self._options.quiet and not self.outcome.tries % 1000:
                print(f"{self.outcome.tries} tries, {len(self.outcome.missed)} missed", flush=True)
        return not missed


def crash(options: Options) -> Outcome:
    """Run, and remove what it left behind, unless the data shall be kept somewhere."""
    with folder(options.data, f"{options.redis}-{options.fault}") as data:

        async def play() -> Outcome:
            return await Run(options, data).run()

        return asyncio.run(play())


def report(outcome: Outcome) -> str:
    return "\n".join(_lines(outcome))


def _lines(outcome: Outcome) -> Iterator[str]:
    options = outcome.options
    fault = f"{options.fault} ({outcome.stands} times)" if options.fault == "stand" else options.fault
    yield f"{options.redis}, {fault}, {options.clients} at a time: {outcome.tries} tries in {outcome.seconds:.0f} s"
    yield f"missed  {len(outcome.missed)}"
    for name, waits in sorted(outcome.waits.items()):
        yield f"SUBACK  {_times(waits)}  {name}, {len(waits)}"
    yield f"PUBACK  {_times(outcome.publishes)}"
    kept = "kept" if outcome.slowest <= options.view + LATE else "broken"
    yield f"bound   SUBACK within {options.view + LATE:.1f} s: {kept}"
    yield from outcome.missed[:20]
    yield from outcome.troubles
    yield "PASSED" if outcome.passed else "FAILED"


def _times(waits: list[float]) -> str:
    parts = [f"p{percent:g} {1000 * share(waits, percent):.1f}" for percent in (50, 99, 99.9)]
    return f"{', '.join(parts)}, at most {1000 * max(waits, default=0.0):.1f} ms"


def _options(arguments: list[str]) -> list[Options]:
    line = parser("tests.chaos.grants", __doc__ or "", rounds="tries in each run")
    line.set_defaults(rounds=Options.tries)
    line.add_argument("--clients", type=int, default=Options.clients, help="that try at the same time")
    add_runs(line, "redis", list(STORES), ",".join(STORES))
    add_runs(line, "fault", FAULTS, ",".join(FAULTS))
    given = line.parse_args(arguments)
    return [
        Options(given.rounds, redis, fault, given.clients, data=given.data, quiet=given.quiet)
        for redis, fault in itertools.product(given.redis, given.fault)
    ]


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    return run_all(_options(arguments), crash, report, lambda outcome: outcome.passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
